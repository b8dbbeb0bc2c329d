"""The names that the tensors of a head have in the field, and EAGLE's own for each.

EAGLE-1             layers.{i}.*                                  fc, no norm before the first layer's attention
EAGLE-3             midlayer.*  or, in vLLM's trainer and Model-Optimizer,  layers.0.*;  layers.{i}.* for more layers
EAGLE-3.1           fc_norm.{0,1,2}  or, earlier,  aux_norm_{low,mid,high}
draft vocabulary    d2t, t2d    or, in vLLM's memory,  draft_id_to_target_id
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from draftwing.errors import CheckpointError, UnsupportedError

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
UNKNOWN_TAP = -1  # in the place of taps that a head does not name: every engine then takes its defaults
_ALIASES = {
    "draft_id_to_target_id": "d2t",
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
}
# Engines give the output of attention a bias wherever queries have one; EAGLE's own layer has none.
_ZEROS = re.compile(r"(midlayer|layers\.\d+)\.self_attn\.o_proj\.bias")
_QKV_BIAS = re.compile(r"(midlayer|layers\.\d+)\.self_attn\.[qkv]_proj\.bias")
_LAYER = re.compile(r"layers\.(\d+)\..*")
# Parts of the target that a trainer saved along, and buffers that are computed anew.
_IGNORED = re.compile(r"verifier_(lm_head|norm)\.weight|(.*\.)?rotary_emb\.(inv_freq|.*_cached)")
_FOREIGN = (
    (re.compile(r"mask_hidden|parallel_draft_heads\..*"), "heads that draft several tokens in one forward (P-EAGLE)"),
    (re.compile(r"additional_layers\..*"), "heads with SGLang's further layers, which drop the residual"),
    (re.compile(r".*self_attn\.[qk]_norm\.weight"), "heads with norms on queries and keys (Qwen3's layer)"),
    (re.compile(r".*mlp\.(gate|up|down)_proj\.bias"), "heads with biases in the MLP"),
    (re.compile(r".*\.(weight_scale|weight_packed|qweight|scales)"), "quantised heads"),
    (re.compile(r"(embedding_layernorm|hidden_states_layernorm|embed_norm)\..*"), "heads with norms before fc's input"),
    (re.compile(r"(fusion_fc|transformer)\..*"), "the first speculators layout of EAGLE-1"),
)


@dataclass(frozen=True)
class Names:
    """The names of a head's tensors as they are in the file, by EAGLE's.

    ``net`` belong to the net, ``maps`` are ``d2t`` and ``t2d``, ``copies`` the target's own matrices, ``zeros`` must
    hold nothing but zeros.
    """

    net: Mapping[str, str]
    maps: Mapping[str, str]
    copies: Mapping[str, str]
    zeros: Mapping[str, str]

    @property
    def num_layers(self) -> int:
        """Decoder layers: the highest number, and one for the first."""
        numbers = [int(found[1]) for name in self.net if (found := _LAYER.fullmatch(name))]
        return 1 + max(numbers, default=0)

    @property
    def has_qkv_bias(self) -> bool:
        """Whether any query, key or value has a bias."""
        return any(_QKV_BIAS.fullmatch(name) for name in self.net)


def version_of_names(names: Iterable[str]) -> int | None:
    """1 or 3 by the tensors' names; None if this is no EAGLE head."""
    found = set(names)
    if "fc.weight" not in found:
        return None
    return 3 if any(name.endswith(".hidden_norm.weight") or name == "norm.weight" for name in found) else 1


def sort_names(names: Iterable[str], version: int, where: str, *, own_embedding: bool = False) -> Names:
    """Give every tensor EAGLE's name, and tell the net's from the others.

    Args:
        own_embedding: the embedding in the file belongs to the net, and is no copy of the target's.

    Raises:
        CheckpointError: two tensors with the same meaning.
        UnsupportedError: a tensor of a kind of head that has no net here.
    """
    net: dict[str, str] = {}
    maps: dict[str, str] = {}
    copies: dict[str, str] = {}
    zeros: dict[str, str] = {}
    aside = {"d2t": maps, "t2d": maps, EMBEDDING: net if own_embedding else copies}
    if version == 1:
        aside[LM_HEAD] = copies
    for name in sorted(names):
        if _IGNORED.fullmatch(name):
            continue
        for pattern, kind in _FOREIGN:
            if pattern.fullmatch(name):
                raise UnsupportedError(
                    f"{where}: has a tensor {name!r}: Draftwing does not run {kind}; take a head of plain Llama "
                    f"layers, or serve this one with the engine that it was made for"
                )
        renamed = _ALIASES.get(name, name)
        if version == 3 and renamed.startswith("layers.0."):
            renamed = "midlayer." + renamed.removeprefix("layers.0.")
        if renamed == "model.embed_tokens.weight":
            renamed = EMBEDDING
        place = zeros if _ZEROS.fullmatch(renamed) else aside.get(renamed, net)
        if renamed in place:
            raise CheckpointError(
                f"{where}: tensors {place[renamed]!r} and {name!r} mean the same one: remove the one that is stale"
            )
        place[renamed] = name
    return Names(net, maps, copies, zeros)


def check_names(expected: Iterable[str], found: Iterable[str], where: str) -> None:
    """Raise CheckpointError unless a head has the tensors that its config asks for, and no others."""
    wanted, there = set(expected), set(found)
    missing, unknown = sorted(wanted - there), sorted(there - wanted)
    if missing:
        close = difflib.get_close_matches(missing[0], unknown, n=1)
        raise CheckpointError(
            f"{where}: tensor {missing[0]!r} is missing ({len(missing)} of {len(wanted)} are)"
            f"{f'; the closest is {close[0]!r}' if close else ''}: {_fix_missing(missing[0])}"
        )
    if unknown:
        raise CheckpointError(
            f"{where}: tensor {unknown[0]!r} has no place in the net that config.json describes ({len(unknown)} like "
            f"it): {_fix_unknown(unknown[0])}"
        )


def check_shapes(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise CheckpointError where a tensor has another shape than the config asks for."""
    for name, shape in expected.items():
        if found[name] != shape:
            raise CheckpointError(
                f"{where}: {name} has shape {found[name]}, expected {shape} from config.json: was the head trained "
                f"for another target, or is this another head's config? Take both files from one place"
            )


def _fix_missing(name: str) -> str:
    if name == LM_HEAD:
        return "the head uses the target's own LM head; copy the target's lm_head.weight into its file"
    if name == EMBEDDING:
        return "the head does not read the target's embedding and needs one of its own; take its whole weight file"
    if name.endswith("_proj.bias"):
        return "set `qkv_bias` to false in config.json if the head was trained without biases"
    if name.startswith("fc_norm"):
        return "set `fc_norm` to false in config.json if the head was trained without it"
    if name.startswith("input_norm"):
        return "set `norm_before_fc` to false in config.json if the head was trained without it"
    return "take config.json and weights from one place again"


def _fix_unknown(name: str) -> str:
    if name.startswith("fc_norm"):
        return "set `fc_norm` to true in config.json if the head was trained with it"
    if name.startswith("input_norm"):
        return "set `norm_before_fc` to true in config.json if the head was trained with it"
    return "take config.json and weights from one place again, or remove the tensor if it means nothing"
