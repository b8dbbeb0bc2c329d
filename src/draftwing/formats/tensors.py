"""The tensors of an EAGLE head: the names that projects give them, and the maps of a draft vocabulary.

EAGLE-1             layers.{i}.*                                  fc, no norm before the first layer's attention
EAGLE-3             midlayer.*  or, in vLLM's trainer and Model-Optimizer,  layers.0.*;  layers.{i}.* for more layers
EAGLE-3.1           fc_norm.{0,1,2}  or, earlier,  aux_norm_{low,mid,high}
draft vocabulary    d2t, t2d    or, in vLLM's memory,  draft_id_to_target_id

``d2t`` (V_draft,) is published as offsets, ``target_id = draft_id + d2t[draft_id]``. Some tools write target ids under
the same name, and only the numbers tell the two apart: offsets never fall, ids always rise, and both must end in the
vocabulary. ``t2d`` (V,) is True for every drafted target id, and decides.

Shape suffixes: V the target's vocabulary, V_draft the draft's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, UnsupportedError

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
_ALIASES = {
    "draft_id_to_target_id": "d2t",
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
    "model.embed_tokens.weight": EMBEDDING,
}
# Engines give the output of attention a bias if queries have one; EAGLE's own layer has none.
_OUTPUT_BIAS = re.compile(r"(midlayer|layers\.\d+)\.self_attn\.o_proj\.bias")
_QKV_BIAS = re.compile(r"(midlayer|layers\.\d+)\.self_attn\.[qkv]_proj\.bias")
_QK_NORM = re.compile(r"(midlayer|layers\.\d+)\.self_attn\.[qk]_norm\.weight")
_LAYER = re.compile(r"layers\.(\d+)\..*")
# Parts of the target that a trainer saved, and buffers that are computed again.
IGNORED = re.compile(r"verifier_(lm_head|norm)\.weight|(.*\.)?rotary_emb\.(inv_freq|.*_cached)")
_UNSUPPORTED = (
    (re.compile(r"parallel_draft_heads\..*"), "heads with an LM head for each token"),
    (re.compile(r"additional_layers\..*"), "heads with SGLang's further layers, which drop the residual"),
    (re.compile(r".*self_attn\.kv_a_proj_with_mqa\.weight"), "heads with multi-head latent attention (MLA)"),
    (re.compile(r".*mlp\.(gate|up|down)_proj\.bias"), "heads with biases in the MLP"),
    (re.compile(r".*\.(weight_scale|weight_packed|qweight|scales)"), "quantised heads"),
    (re.compile(r"(embedding_layernorm|hidden_states_layernorm|embed_norm)\..*"), "heads with norms before fc's input"),
    (re.compile(r"(fusion_fc|transformer)\..*"), "the first speculators layout of EAGLE-1"),
)


@dataclass(frozen=True)
class Names:
    """The names of a head's tensors in the file, by EAGLE's names."""

    net: dict[str, str]  # tensors of the net
    maps: dict[str, str]  # ``d2t`` and ``t2d``
    copies: dict[str, str]  # the target's own matrices
    zeros: dict[str, str]  # biases that must be zero

    @property
    def num_layers(self) -> int:
        """Decoder layers: the highest number, and one for the first."""
        return 1 + max((int(match[1]) for name in self.net if (match := _LAYER.fullmatch(name))), default=0)

    @property
    def has_qkv_bias(self) -> bool:
        return any(_QKV_BIAS.fullmatch(name) for name in self.net)

    @property
    def has_qk_norm(self) -> bool:
        return any(_QK_NORM.fullmatch(name) for name in self.net)


def version_of_names(names: Iterable[str]) -> int | None:
    """Return 1 or 3 by the tensors' names; None if this is not an EAGLE head."""
    names = set(names)
    if "fc.weight" not in names:
        return None
    return 3 if any(name.endswith(".hidden_norm.weight") or name == "norm.weight" for name in names) else 1


def sort_names(names: Iterable[str], version: int, where: str, *, own_embedding: bool = False) -> Names:
    """Give every tensor EAGLE's name, and separate those of the net from the others.

    With ``own_embedding``, the embedding in the file belongs to the net, and is not a copy of the target's.
    """
    sorted_names = Names({}, {}, {}, {})
    groups = {"d2t": sorted_names.maps, "t2d": sorted_names.maps}
    if not own_embedding:
        groups[EMBEDDING] = sorted_names.copies
    if version == 1:
        groups[LM_HEAD] = sorted_names.copies
    for name in sorted(names):
        if IGNORED.fullmatch(name):
            continue
        for pattern, kind in _UNSUPPORTED:
            if pattern.fullmatch(name):
                raise UnsupportedError(
                    f"{where}: has a tensor {name!r}: Draftwing does not run {kind}; take a head of plain Llama "
                    f"layers, or serve this one with the engine that it was made for"
                )
        renamed = _ALIASES.get(name, name)
        if version == 3 and renamed.startswith("layers.0."):
            renamed = "midlayer." + renamed.removeprefix("layers.0.")
        default = sorted_names.zeros if _OUTPUT_BIAS.fullmatch(renamed) else sorted_names.net
        group = groups.get(renamed, default)
        if renamed in group:
            raise CheckpointError(
                f"{where}: tensors {group[renamed]!r} and {name!r} have the same meaning: remove the outdated one"
            )
        group[renamed] = name
    return sorted_names


def check_tensors(expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise CheckpointError unless a head has exactly the tensors and shapes that its config requires."""
    missing, unknown = sorted(expected.keys() - stored.keys()), sorted(stored.keys() - expected.keys())
    if missing:
        close = difflib.get_close_matches(missing[0], unknown, n=1)
        hint = f"; the closest is {close[0]!r}" if close else ""
        raise CheckpointError(
            f"{where}: tensor {missing[0]!r} is missing ({len(missing)} of {len(expected)} are){hint}: "
            f"{_fix_for(missing[0], _FIX_MISSING)}"
        )
    if unknown:
        raise CheckpointError(
            f"{where}: tensor {unknown[0]!r} has no place in the net that config.json describes ({len(unknown)} such "
            f"tensors): {_fix_for(unknown[0], _FIX_UNKNOWN)}"
        )
    for name, shape in expected.items():
        if stored[name] != shape:
            raise CheckpointError(
                f"{where}: {name} has shape {stored[name]}, expected {shape} from config.json: was the head trained "
                f"for another target, or is this another head's config? Take both files from one place"
            )


_FIX_MISSING = {
    LM_HEAD: "the head uses the target's own LM head; copy the target's lm_head.weight into its file",
    EMBEDDING: "the head does not read the target's embedding and needs its own; take its whole weight file",
    "_proj.bias": "set `qkv_bias` to false in config.json if the head was trained without biases",
    "fc_norm": "set `fc_norm` to false in config.json if the head was trained without it",
    "input_norm": "set `norm_before_fc` to false in config.json if the head was trained without it",
    "": "take config.json and weights from one place again",
}
_FIX_UNKNOWN = {
    "mask_hidden": "set `mask_token_id` in config.json: a head that drafts several tokens in one forward (P-EAGLE)",
    "fc_norm": "set `fc_norm` to true in config.json if the head was trained with it",
    "input_norm": "set `norm_before_fc` to true in config.json if the head was trained with it",
    "": "take config.json and weights from one place again, or remove the tensor if it is not needed",
}


def _fix_for(name: str, fixes: Mapping[str, str]) -> str:
    return next(fix for part, fix in fixes.items() if name.startswith(part) or name.endswith(part))


# --- draft vocabularies ----------------------------------------------------------------------------------------------

MapForm = Literal["none", "offsets", "ids"]


def to_maps(target_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return ``d2t`` (V_draft,) int64 offsets and ``t2d`` (V,) bool of ascending ``target_ids`` (V_draft,)."""
    ids = target_ids.to("cpu", torch.int64)
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}


def read_draft_vocab(
    d2t: Tensor | None, t2d: Tensor | None, vocab_size: int, draft_vocab_size: int, where: str
) -> tuple[Tensor | None, MapForm]:
    """Interpret the maps of a head, None if the file lacks them; ``where`` starts every error message.

    Returns:
        The target ids (V_draft,) ascending, or None for the whole vocabulary, and the contents of ``d2t``.
    """
    again = "take the head from its original place again"
    d2t = None if d2t is None else _check_map("d2t", d2t, draft_vocab_size, where)
    t2d = None if t2d is None else _check_map("t2d", t2d, vocab_size, where).bool()
    if draft_vocab_size == vocab_size:  # maps are not needed, but some trainers write them
        whole = f"{where}: the draft vocabulary is the whole vocabulary of {vocab_size} tokens, but"
        fix = f"correct `draft_vocab_size` in config.json, or {again}"
        form: MapForm = "ids" if d2t is not None and d2t.any() else "none"
        if form == "ids" and d2t is not None and not torch.equal(d2t, torch.arange(vocab_size)):
            raise CheckpointError(f"{whole} d2t moves tokens ({_summary(d2t)}): {fix}")
        if t2d is not None and not t2d.all():
            raise CheckpointError(f"{whole} t2d leaves out {int((~t2d).sum())} of {len(t2d)} tokens: {fix}")
        return None, form
    if d2t is None:
        raise CheckpointError(
            f"{where}: the draft vocabulary has {draft_vocab_size} of {vocab_size} tokens, but there is no d2t: {again}"
        )
    readings: dict[MapForm, Tensor] = {"offsets": d2t + torch.arange(draft_vocab_size), "ids": d2t}
    fitting = {form: ids for form, ids in readings.items() if _is_map(ids, vocab_size)}
    if not fitting:
        raise CheckpointError(
            f"{where}: d2t is no map into a vocabulary of {vocab_size}: expected offsets that never fall (or "
            f"ascending ids), found {_summary(d2t)}: was the head made for another target? Otherwise {again}"
        )
    if t2d is not None:
        drafted = t2d.nonzero().flatten()
        fitting = {form: ids for form, ids in fitting.items() if torch.equal(ids, drafted)}
        if not fitting:
            raise CheckpointError(
                f"{where}: t2d and d2t disagree: t2d marks {len(drafted)} tokens ({_summary(drafted)}), d2t maps "
                f"{draft_vocab_size} ({_summary(readings['offsets'])} as offsets): {again}"
            )
    if len(fitting) > 1:
        raise CheckpointError(
            f"{where}: d2t can be read as offsets and as target ids ({_summary(d2t)}), and there is no t2d to decide: "
            f"add t2d, {vocab_size} booleans that are true for every token that the head drafts"
        )
    form, ids = fitting.popitem()
    return ids, form


def _check_map(name: str, values: Tensor, length: int, where: str) -> Tensor:
    """Return a map as int64 if it has integers and the right length."""
    if values.is_floating_point() or values.is_complex():
        raise CheckpointError(
            f"{where}: {name} must hold integers, found {values.dtype}, which rounds large ids: convert the head again "
            f"and leave its maps unchanged"
        )
    if values.shape != (length,):
        raise CheckpointError(
            f"{where}: {name} has shape {tuple(values.shape)}, expected ({length},) from "
            f"`{'draft_vocab_size' if name == 'd2t' else 'vocab_size'}` in config.json: take both from one place"
        )
    return values.to("cpu", torch.int64)


def _is_map(ids: Tensor, vocab_size: int) -> bool:
    rising = bool((ids[1:] > ids[:-1]).all())
    return rising and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size


def _summary(values: Tensor) -> str:
    head = ", ".join(str(value) for value in values[:3].tolist())
    return head if len(values) <= 3 else f"{head} ... {int(values[-1])}"
