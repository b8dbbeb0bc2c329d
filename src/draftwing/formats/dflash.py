"""Read DFlash and DSpark heads in the layouts of other projects.

    z-lab, SpecForge    a Qwen3 config, and a nested ``dflash_config`` whose ``target_layer_ids`` count layers' outputs
    DeepSpec            the same fields, all at the top level
    speculators         the shape nested under ``transformer_layer_config``, flags at the top level;
                        ``aux_hidden_state_layer_ids`` count layers' inputs, as our taps do

The mask is a row of the target's embedding, and the LM head is the target's unless the file has one. Layers with a
sliding window see no later token of their block, all others see the whole block, unless ``causal`` decides.

Shape suffixes: H hidden, V vocabulary, V_draft the draft's, S rank of DSpark's bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.formats.plain import PlainHead
from draftwing.formats.read import read_tensors
from draftwing.formats.settings import OTHER_ENGINE, SHAPE, SettingsReader, without_mrope
from draftwing.formats.tensors import EMBEDDING, IGNORED, LM_HEAD, check_tensors, read_draft_vocab
from draftwing.methods.net import LAYER_FIELDS, PlainConfig, layer_names
from draftwing.models.config import ModelConfig, first_refused, read_config
from draftwing.models.weights import check_finite

# Settings that no code here honours, and the values at which they change nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "kv_lora_rank": (),  # multi-head latent attention (MLA)
    "mla_use_output_gate": (False,),
    "conv_kernel_size": (),  # DFlash 2
    "conv_group_size": (),
    "selector_rank": (),
    "selector_top_k": (),
    "emb_dim": (),  # Domino
    "gru_hidden_dim": (),
    "shift_label": (False,),
    "pure_draft_prefix_len": (0, 1),
    "aux_hidden_stream": (),
    "hc_mult": (1,),
    "fc_norm": (False,),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "input_embedding_scale": (1, 1.0),
    "logit_scale": (1, 1.0),
    "final_logit_softcapping": (),
    "is_neox_style": (True,),
    "partial_rotary_factor": (1, 1.0),
    "use_aux_hidden_state": (True,),
    "draft_adapter_rank": (0,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "mlp_bias": (False,),
}
# Keys of ``dflash_config`` that are read, or that only trainers read.
_KNOWN = {
    "mask_token_id", "target_layer_ids", "block_size", "causal", "sample_from_anchor", "query_zero_predicts_next",
    "projector_type", "use_swa", "swa_window_size", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov", "confidence_head_alpha", "attention_mode", "num_anchors",
}  # fmt: skip
_SURE = 30.0  # log odds of a confidence that float32 rounds to 1


@dataclass(frozen=True)
class _Settings:
    """A config in one spelling."""

    fields: dict[str, Any]  # fields of a ``DFlashConfig``, without ``own_head``
    draft_vocab_size: int
    num_target_layers: int | None
    has_confidence: bool | None  # None if the tensors tell


def load_dflash(folder: Path, kind: str, config_type: type[PlainConfig]) -> PlainHead:
    """Read a head of another project without its target, as a net of ``kind`` with a config of ``config_type``.

    Raises:
        UnsupportedError: a setting that Draftwing does not honour; the message names it.
        CheckpointError, ConfigError: config.json and the tensors do not belong together, or are incomplete.
    """
    where = str(folder)
    settings = _read_settings(read_config(folder), kind, f"{where}/config.json")
    stored = {
        name.removeprefix("model.").removeprefix("logit_head."): tensor
        for name, tensor in read_tensors(folder).items()
        if not IGNORED.fullmatch(name)
    }
    maps = {name: stored.pop(name, None) for name in ("d2t", "t2d")}
    copies = {EMBEDDING: stored.pop(EMBEDDING)} if EMBEDDING in stored else {}
    for name, tensor in stored.items():
        if not tensor.is_floating_point():
            raise UnsupportedError(
                f"{where}: {name} holds {tensor.dtype}: the head is quantised; take the original one, or {OTHER_ENGINE}"
            )
        check_finite(f"{name} of {where}", tensor)
    vocab = settings.fields["vocab_size"]
    ids, _ = read_draft_vocab(maps["d2t"], maps["t2d"], vocab, settings.draft_vocab_size, where)
    fields = {**settings.fields, "own_head": LM_HEAD in stored}
    if "mask_embedding" in stored and kind == "dflash":
        fields["mask_token_id"] = None
    try:
        config = config_type(**fields)
    except ConfigError as error:
        raise type(error)(f"{where}: {error}; correct it in config.json") from error
    if ids is not None and LM_HEAD not in stored:
        raise CheckpointError(
            f"{where}: the draft vocabulary has {len(ids)} of {vocab} tokens, but there is no {LM_HEAD} for it: take "
            f"config.json and weights from one place"
        )
    places = _places(config, settings)
    expected = {name: shape for names in places.values() for name, shape in names}
    if kind == "dspark":
        _complete_confidence(stored, expected, settings.has_confidence)
    check_tensors(expected, {name: tuple(tensor.shape) for name, tensor in stored.items()}, where)
    tensors = {place: torch.cat([stored[name] for name, _ in names]) for place, names in places.items()}
    return PlainHead(kind, config, tensors, ids, copies=copies, num_target_layers=settings.num_target_layers)


def _read_settings(config: Mapping[str, Any], kind: str, where: str) -> _Settings:
    top = SettingsReader(config, where)
    nested, is_speculators = top.inner("dflash_config"), "speculators_model_type" in config
    shape = without_mrope(top.inner("transformer_layer_config").values if is_speculators else config)
    _refuse(nested, config, shape, kind, where)
    inside = SettingsReader(shape, where)

    def find(key: str, what: str, default: Any = None) -> Any:
        value = nested.get(key, what)
        return top.get(key, what, default) if value is None else value

    def require(key: str, value: Any, hint: str) -> Any:
        if value is None:
            raise ConfigError(f"{where}: lacks `{key}`, {hint}: add it, or take the head from its original place again")
        return value

    if is_speculators:
        taps = require("aux_hidden_state_layer_ids", top.layers("aux_hidden_state_layer_ids"), "which taps are read")
    else:
        ids = nested.layers("target_layer_ids") or top.layers("target_layer_ids")
        taps = tuple(tap + 1 for tap in require("target_layer_ids", ids, "the target's layers whose output is read"))
    num_layers = inside.get("num_hidden_layers", "size", 1)
    anchor = find("sample_from_anchor", "flag", nested.get("query_zero_predicts_next", "flag"))
    if anchor is None and is_speculators and kind == "dspark":
        require("sample_from_anchor", None, "for which vLLM takes false and speculators true")
    windows, causal = _attention(find, inside, num_layers, is_speculators, where)
    layer = {key: shape[key] for key in SHAPE if shape.get(key) is not None}
    ropes = (shape, shape.get("rope_parameters") or {}, shape.get("rope_scaling") or {})
    theta = next((rope["rope_theta"] for rope in ropes if rope.get("rope_theta") is not None), None)
    require("rope_theta", theta, "for which vLLM takes 1000000 and transformers 10000")
    model = ModelConfig.from_hf(
        {**layer, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 1}, where
    )
    fields = {name: getattr(model, name) for name in LAYER_FIELDS}
    fields |= {
        "taps": taps,
        "num_layers": num_layers,
        "block_size": require("block_size", find("block_size", "size"), "the number of tokens in a block"),
        "mask_token_id": require("mask_token_id", find("mask_token_id", "id"), "the token that stands for a mask"),
        "from_anchor": kind == "dspark" if anchor is None else anchor,
        "windows": windows,
        "causal": causal,
        "attention_bias": inside.get("attention_bias", "flag", False),
    }
    if kind == "dspark":
        fields["rank"] = require("markov_rank", find("markov_rank", "size"), "the rank of the bias by the token before")
    draft_vocab_size = top.get("draft_vocab_size", "size", model.vocab_size)
    count, has_confidence = top.get("num_target_layers", "size"), find("enable_confidence_head", "flag")
    return _Settings(fields, draft_vocab_size, count, has_confidence)


def _attention(
    find: Any, inside: SettingsReader, num_layers: int, is_speculators: bool, where: str
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Return each layer's sliding window or None, and whether it sees no later token of its block."""
    types = inside.values.get("layer_types") or ["full_attention"] * num_layers
    if not isinstance(types, list) or len(types) != num_layers or set(types) - {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"{where}: `layer_types` must name full_attention or sliding_attention for each of {num_layers} layers, "
            f"found {types!r:.80}: correct it"
        )
    slides = [name == "sliding_attention" for name in types]
    if find("use_swa", "flag", False) and not any(slides):
        slides = [True] * num_layers
    is_causal = find("is_causal", "flag", find("causal", "flag"))
    if is_speculators and any(slides):
        non_causal = find("sliding_window_non_causal", "flag")
        if non_causal is None:
            raise ConfigError(
                f"{where}: lacks `sliding_window_non_causal`, which decides whether layers with a window see the whole "
                f"block: add it"
            )
        causal = [slide and not non_causal for slide in slides]
    else:
        causal = slides if is_causal is None else [is_causal] * num_layers
    if not any(slides):
        return (), tuple(causal) if any(causal) else ()
    window = find("swa_window_size", "size", inside.get("sliding_window", "size"))
    if window is None or inside.get("use_sliding_window", "flag", True) is False:
        raise ConfigError(
            f"{where}: `layer_types` has sliding_attention, but no window: correct `use_sliding_window` and "
            f"`sliding_window`"
        )
    return tuple(window if slide else None for slide in slides), tuple(causal) if any(causal) else ()


def _refuse(nested: SettingsReader, config: Mapping[str, Any], shape: Mapping[str, Any], kind: str, where: str) -> None:
    """Raise UnsupportedError for settings that Draftwing does not honour."""
    width, hidden = config.get("target_hidden_size"), shape.get("hidden_size")
    markov = nested.values.get("markov_head_type", config.get("markov_head_type", "vanilla"))
    for key, value, allowed in (
        ("speculators_model_type", config.get("speculators_model_type", kind), (kind,)),
        ("projector_type", nested.values.get("projector_type", kind), (kind,)),
        ("model_type", shape.get("model_type", "qwen3"), ("qwen3",)),
        ("markov_head_type", markov, ("vanilla",)),
        ("target_hidden_size", hidden if width is None else width, (hidden,)),
    ):
        if value not in allowed:
            raise UnsupportedError(
                f"{where}: `{key}` is {value!r:.60}, and Draftwing reads a {kind} head with {allowed[0]!r}: "
                f"{OTHER_ENGINE}"
            )
    if found := first_refused(_REFUSED, nested.values, config, shape):
        raise UnsupportedError(
            f"{where}: `{found[0]}` is {found[1]!r:.60}, which Draftwing does not support: {OTHER_ENGINE}"
        )
    unknown = sorted(nested.values.keys() - _KNOWN - _REFUSED.keys())
    if unknown:
        raise UnsupportedError(
            f"{where}: `dflash_config` has {unknown[0]!r}, which Draftwing does not know: {OTHER_ENGINE}"
        )


def _places(config: Any, settings: _Settings) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """Return the net's tensors, each with the names and shapes of those in the file that are stacked to make it."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * dim, config.num_kv_heads * dim
    places: dict[str, list[tuple[str, tuple[int, ...]]]] = {
        "fc.weight": [("fc.weight", (hidden, hidden * len(config.taps)))],
        "state_norm.weight": [("hidden_norm.weight", (hidden,))],
        "norm.weight": [("norm.weight", (hidden,))],
    }
    shapes: dict[str, list[tuple[int, ...]]] = {
        "input_norm": [(hidden,)],
        "post_norm": [(hidden,)],
        "q_norm": [(dim,)],
        "k_norm": [(dim,)],
        "qkv": [(query, hidden), (key, hidden), (key, hidden)],
        "out": [(hidden, query)],
        "mlp.gate_up": [(inner, hidden)] * 2,
        "mlp.down": [(hidden, inner)],
    }
    names = layer_names("qwen3")
    for index in range(config.num_layers):
        for module, sizes in shapes.items():
            parts = list(zip((f"layers.{index}.{part}" for part in names[module]), sizes, strict=True))
            places[f"layers.{index}.{module}.weight"] = [(f"{part}.weight", size) for part, size in parts]
            if config.attention_bias and module in ("qkv", "out"):
                places[f"layers.{index}.{module}.bias"] = [(f"{part}.bias", size[:1]) for part, size in parts]
    if config.own_head:
        places["head.weight"] = [(LM_HEAD, (settings.draft_vocab_size, hidden))]
    if config.mask_token_id is None:
        places["mask"] = [("mask_embedding", (hidden,))]
    if (rank := getattr(config, "rank", None)) is not None:
        places["embedding_before"] = [("markov_head.markov_w1.weight", (config.vocab_size, rank))]
        places["head_after.weight"] = [("markov_head.markov_w2.weight", (settings.draft_vocab_size, rank))]
        places["trust.weight"] = [("confidence_head.proj.weight", (1, hidden + rank))]
        places["trust.bias"] = [("confidence_head.proj.bias", (1,))]
    return places


def _complete_confidence(
    stored: dict[str, Tensor], expected: Mapping[str, tuple[int, ...]], has_confidence: bool | None
) -> None:
    """Add what a confidence head may lack: its bias, the weights of the token before, or all of it (always sure)."""
    weight, bias = "confidence_head.proj.weight", "confidence_head.proj.bias"
    like, width, hidden = stored.get("fc.weight", torch.zeros(0)), expected[weight][1], expected["norm.weight"][0]
    if weight in stored:
        stored.setdefault(bias, like.new_zeros(1))
        if stored[weight].shape == (1, hidden):
            stored[weight] = torch.cat([stored[weight], like.new_zeros(1, width - hidden)], 1)
    elif not has_confidence and bias not in stored:
        stored[weight], stored[bias] = like.new_zeros(1, width), like.new_full((1,), _SURE)
