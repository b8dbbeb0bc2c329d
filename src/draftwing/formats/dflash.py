"""Read and write DFlash, DSpark and Domino heads in the layouts of other projects.

    z-lab, SpecForge    a Qwen3 config, and a nested ``dflash_config`` whose ``target_layer_ids`` count layers' outputs
    DeepSpec            the same fields, all at the top level
    speculators         the shape nested under ``transformer_layer_config``, flags at the top level;
                        ``aux_hidden_state_layer_ids`` count layers' inputs, as our taps do

The mask is a row of the target's embedding, or the vector in ``mask_embedding.pt``, which vLLM reads for DFlash. The LM
head is the target's unless the file has one. Layers with a sliding window see no later token of their block, all others
see the whole block, unless ``causal`` decides.

Written are the layouts that engines read: z-lab's for vLLM and SGLang (DeepSpec's for DSpark, SpecForge's for Domino),
and speculators'. The ``draftwing`` part of the config holds what they lack.

Shape suffixes: H hidden, V vocabulary, V_draft the draft's, S rank of the correction of DSpark and Domino, G size of
Domino's recurrent state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.formats.gguf_head import rope_obstacle, write_gguf
from draftwing.formats.plain import DRAFT_IDS, PlainHead, load_plain, own_block
from draftwing.formats.read import read_tensors, unpickle
from draftwing.formats.settings import OTHER_ENGINE, SHAPE, SettingsReader, without_mrope
from draftwing.formats.tensors import EMBEDDING, IGNORED, LM_HEAD, check_tensors, read_draft_vocab, to_maps
from draftwing.formats.write import layer_shape, speculators_keys, write_folder
from draftwing.methods.calibration import Calibration
from draftwing.methods.net import LAYER_FIELDS, Place, PlainConfig, layer_places
from draftwing.models.config import ModelConfig, first_refused, read_config
from draftwing.models.weights import check_finite

MASK_FILE = "mask_embedding.pt"
_DOMINO = ("emb_dim", "gru_hidden_dim", "shift_label", "pure_draft_prefix_len")
# Settings that no code here honours, and the values at which they change nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "kv_lora_rank": (),  # multi-head latent attention (MLA)
    "mla_use_output_gate": (False,),
    "conv_kernel_size": (),  # DFlash 2
    "conv_group_size": (),
    "selector_rank": (),
    "selector_top_k": (),
    **dict.fromkeys(_DOMINO, ()),
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
    source = read_config(folder)
    settings = _read_settings(source, kind, f"{where}/config.json")
    stored = {
        name.removeprefix("model.").removeprefix("logit_head."): tensor
        for name, tensor in read_tensors(folder).items()
        if not IGNORED.fullmatch(name)
    }
    if kind == "dflash" and (folder / MASK_FILE).exists():
        stored["mask_embedding"] = _read_mask(folder / MASK_FILE)
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
    if "mask_embedding" in stored:
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
    places = _places(kind, config, settings.draft_vocab_size)
    expected = {name: place.shape for name, place in places.items()}
    if kind == "dspark":
        _complete_confidence(stored, expected, settings.has_confidence)
    check_tensors(expected, {name: tuple(tensor.shape) for name, tensor in stored.items()}, where)
    parts: dict[str, list[Tensor]] = {}
    for name, place in places.items():
        parts.setdefault(place.path, []).append(stored[name])
    tensors = {path: torch.cat(rows) for path, rows in parts.items()}
    head = PlainHead(kind, config, tensors, ids, copies=copies, num_target_layers=settings.num_target_layers)
    if "draftwing" not in source:
        return head
    own = load_plain(folder, kind, config_type, {**tensors, **({} if ids is None else {DRAFT_IDS: ids})})
    if replace(own.config, calibration=Calibration(), target=None) != config:
        raise CheckpointError(
            f"{where}: config.json describes two nets, one in its `draftwing` part: it was changed since Draftwing "
            f"wrote it; write the head again, or remove that part"
        )
    return replace(head, config=own.config, training=own.training)


def _read_mask(path: Path) -> Tensor:
    """Return the vector (H,) of a ``mask_embedding.pt``: a tensor, or one in a dictionary."""
    stored = unpickle(path)
    mask = stored.get("embedding") if isinstance(stored, dict) else stored
    if not isinstance(mask, Tensor):
        raise CheckpointError(f"{path}: expected the mask's vector, found none: download the head again")
    return mask.detach().flatten()


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
    elif kind == "domino":
        shifts = require("shift_label", find("shift_label", "flag"), "whether the pending token's position predicts")
        fields |= {
            "rank": require("emb_dim", find("emb_dim", "size"), "the rank of the correction"),
            "state_size": require("gru_hidden_dim", find("gru_hidden_dim", "size"), "the size of the recurrent state"),
            "num_uncorrected": find("pure_draft_prefix_len", "id", 0),
            "from_anchor": shifts,
        }
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
    refused = {key: value for key, value in _REFUSED.items() if kind != "domino" or key not in _DOMINO}
    if found := first_refused(refused, nested.values, config, shape):
        raise UnsupportedError(
            f"{where}: `{found[0]}` is {found[1]!r:.60}, which Draftwing does not support: {OTHER_ENGINE}"
        )
    unknown = sorted(nested.values.keys() - _KNOWN - _REFUSED.keys())
    if unknown:
        raise UnsupportedError(
            f"{where}: `dflash_config` has {unknown[0]!r}, which Draftwing does not know: {OTHER_ENGINE}"
        )


def _places(kind: str, config: Any, draft_vocab_size: int) -> dict[str, Place]:
    """Return the places of a file's tensors in the net."""
    hidden = config.hidden_size
    places = {
        "fc.weight": Place("fc.weight", (hidden, hidden * len(config.taps))),
        "hidden_norm.weight": Place("state_norm.weight", (hidden,)),
        "norm.weight": Place("norm.weight", (hidden,)),
    }
    biased = ("qkv", "out") if config.attention_bias else ()
    for name in (f"layers.{index}" for index in range(config.num_layers)):
        places[f"{name}.input_layernorm.weight"] = Place(f"{name}.input_norm.weight", (hidden,))
        places |= layer_places(config, name, name, hidden, biased=biased, qk_norm=True)
    if config.own_head:
        places[LM_HEAD] = Place("head.weight", (draft_vocab_size, hidden))
    if config.mask_token_id is None:
        places["mask_embedding"] = Place("mask", (hidden,))
    if kind == "dspark":
        places["markov_head.markov_w1.weight"] = Place("embedding_before", (config.vocab_size, config.rank))
        places["markov_head.markov_w2.weight"] = Place("head_after.weight", (draft_vocab_size, config.rank))
        places["confidence_head.proj.weight"] = Place("trust.weight", (1, hidden + config.rank))
        places["confidence_head.proj.bias"] = Place("trust.bias", (1,))
    elif kind == "domino":
        places["prefix_gru.weight_ih_l0"] = Place("read_token.weight", (3 * config.state_size, hidden))
        places["prefix_gru.weight_hh_l0"] = Place("read_state.weight", (3 * config.state_size, config.state_size))
        places["embed_proj.0.weight"] = Place("mix.weight", (config.rank, hidden + config.state_size))
        places["embed_proj.2.weight"] = Place("head_after.weight", (draft_vocab_size, config.rank))
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


# --- writing ---------------------------------------------------------------------------------------------------------


def save_dflash(folder: Path, head: PlainHead, layout: str, **options: Any) -> None:
    """Write a head in z-lab's or DeepSpec's layout (``vllm``, ``sglang``), in ``speculators``' or as a GGUF file.

    ``options`` are those of ``write_gguf``.

    Raises UnsupportedError for a head that the layout cannot express.
    """
    config, is_nested = head.config, layout == "speculators"
    slides, causal = ([bool(value) for value in each] for each in (config.windows, config.causal))
    causal = causal or [False] * len(slides)
    num_target_layers = head.num_target_layers if config.target is None else config.target.num_layers
    has_file = layout == "vllm" and head.kind == "dflash"  # the mask may be a vector
    is_gguf, num_levels = layout == "gguf", config.block_size - 1 + config.from_anchor
    gguf_rope = rope_obstacle(config.rope) if is_gguf else ""
    for is_lacking, feature in (
        (
            config.mask_token_id is None and not has_file,
            "a trained mask vector (train with `--mask-token-id`, the id of a token that the target never generates"
            + (", or write it for vllm)" if head.kind == "dflash" else ")"),
        ),
        (len(set(config.windows) - {None}) > 1, f"windows of several sizes {config.windows}"),
        (any(causal) and causal != slides and not all(causal), f"causal layers {config.causal}"),
        (any(causal) and not slides, "causal layers without windows"),
        (
            not is_nested and (0 in config.taps or num_target_layers in config.taps),
            f"taps {config.taps} (only the outputs of layers, before the final norm)",
        ),
        (
            is_nested and any(causal) and not all(slides),
            "some causal layers (vLLM would take all for causal)",
        ),
        (layout == "sglang" and slides != causal, "layers with a window that see the whole block"),
        (layout == "sglang" and config.own_head, "an LM head of the head's own (SGLang takes the target's)"),
        (layout == "sglang" and num_target_layers is None, "a head whose target is not known (give it: --target)"),
        (
            (is_gguf or layout == "sglang") and head.kind == "dflash" and config.from_anchor,
            "a prediction at the pending token's position",
        ),
        (is_gguf and any(causal) and not all(causal), "some causal layers (llama.cpp has one flag for all)"),
        (is_gguf and config.attention_bias, "biases of attention"),
        (is_gguf and gguf_rope, gguf_rope),
        (
            layout == "vllm" and head.kind == "dspark" and not config.from_anchor,
            "predictions from masks alone (DeepSpec's layout also predicts at the pending token; use speculators)",
        ),
        (head.kind == "domino" and config.num_uncorrected != 1, "another number of uncorrected tokens than 1"),
        (config.activation != "silu", f"activation {config.activation!r} (only silu)"),
        (config.rope.rotary_dim != config.rope.head_dim, "rotation of a part of each attention head"),
    ):
        if is_lacking:
            raise UnsupportedError(
                f"the {layout} layout cannot express {feature}: write the head as draftwing, which takes everything"
            )
    draft_vocab_size = config.vocab_size if head.target_ids is None else len(head.target_ids)
    tensors: dict[str, Tensor] = {**head.copies}
    for name, place in _places(head.kind, config, draft_vocab_size).items():
        tensors[name] = head.tensors[place.path][place.start : place.start + place.shape[0]]
    mask = tensors.pop("mask_embedding", None)
    window = max((window for window in config.windows if window is not None), default=None)
    if head.target_ids is not None:
        tensors |= to_maps(head.target_ids, config.vocab_size)
    if is_gguf:
        metadata = {"block_size": config.block_size, "tokenizer.ggml.mask_token_id": config.mask_token_id}
        if any(slides):
            metadata |= {"attention.sliding_window": window, "attention.sliding_window_pattern": slides}
        if any(causal):
            metadata["attention.causal"] = True
        if head.kind == "dspark":
            metadata |= {"sample_from_anchor": config.from_anchor, "has_confidence_head": True}
        write_gguf(folder, "dflash", config, metadata, tensors, own_block(head), **options)
        return
    shape = {
        **layer_shape(config, head.tensors["fc.weight"].dtype),
        "model_type": "qwen3",
        "attention_bias": config.attention_bias,
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides]
        or ["full_attention"] * config.num_layers,
        "sliding_window": window,
        "use_sliding_window": any(slides),
    }
    # vLLM replaces the row of this token; which one does not matter, as long as it is rare.
    fields: dict[str, Any] = {"mask_token_id": config.vocab_size - 1 if mask is not None else config.mask_token_id}
    if head.kind == "dspark":
        fields |= {"markov_rank": config.rank, "markov_head_type": "vanilla"}
        fields |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    elif head.kind == "domino":
        fields |= {"projector_type": "domino", "emb_dim": config.rank, "gru_hidden_dim": config.state_size}
        fields |= {"shift_label": config.from_anchor, "pure_draft_prefix_len": config.num_uncorrected}
    written: dict[str, Any] = {"block_size": config.block_size, "draft_vocab_size": draft_vocab_size}
    if is_nested:
        written |= {
            "architectures": [{"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}[head.kind]],
            **speculators_keys(head.kind, None if config.target is None else config.target.name, num_levels),
            "aux_hidden_state_layer_ids": list(config.taps),
            "sample_from_anchor": config.from_anchor,
            "sliding_window_non_causal": not any(causal),
            "transformer_layer_config": {"architectures": ["Qwen3ForCausalLM"], **shape},
            **fields,
        }
    else:
        fields["target_layer_ids"] = [tap - 1 for tap in config.taps]
        if any(slides) and causal != slides:
            fields["causal"] = all(causal)
        if head.kind == "dflash" and config.from_anchor:
            fields["sample_from_anchor"] = True
        name = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel", "domino": "DominoDraftModel"}[head.kind]
        written |= {"architectures": [name], **shape, "num_target_layers": num_target_layers}
        written |= fields if head.kind == "dspark" else {"dflash_config": fields}
    if mask is None:
        (folder / MASK_FILE).unlink(missing_ok=True)  # left by an older head
    pickled = None if mask is None else {MASK_FILE: {"embedding": mask.cpu()}}
    write_folder(folder, {**written, "draftwing": own_block(head)}, tensors, pickled=pickled)
