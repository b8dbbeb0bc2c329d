"""Read a head's ``config.json`` in any project's spelling.

    EAGLE, SGLang, SpecForge, vLLM    the shape at the top level, flags next to it
    Model-Optimizer                   the same, and a nested ``eagle_config``
    vLLM's EAGLE class                ``model_type`` "eagle", the shape nested under ``model``
    DeepSpec                          the same as EAGLE, and ``target_layer_ids``
    speculators                       the shape nested under ``transformer_layer_config``, flags at the top level
    Draftwing                         as EAGLE, and a nested ``draftwing`` with what the others cannot express

Taps are numbered in two ways. Top-level ``eagle_aux_hidden_state_layer_ids`` count the *inputs* of layers, as we do.
Those inside ``eagle_config`` count *outputs* (one less) for Model-Optimizer and SGLang, and inputs for vLLM. DeepSpec's
``target_layer_ids`` count outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, get_args

from draftwing.errors import ConfigError, UnsupportedError
from draftwing.formats.tensors import Names
from draftwing.methods.calibration import Calibration
from draftwing.methods.eagle_net import EagleConfig, Inputs
from draftwing.methods.net import TargetId
from draftwing.models.config import ROPE_TYPES, ModelConfig, first_refused

FORMAT: Final = 1
TAP_IDS: Final = "eagle_aux_hidden_state_layer_ids"
UNKNOWN_TAP: Final = -1  # replaces taps that a head does not name: every engine then reads its defaults

SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "hidden_act", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
    "original_max_position_embeddings",
)  # fmt: skip
MAX_LAYERS = 4  # a config of more layers without further hints is a language model's
_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh")
# The layers that Draftwing runs by their ``model_type``. The tensors tell biases and norms; phi3's and others' configs
# go with plain Llama tensors.
_LAYERS = ("llama", "eagle", "qwen2", "qwen3", "phi3", "mistral")
# Settings of layers and nets that no code here honours, the values at which they change nothing, and their meaning.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "kv_lora_rank": ((), "multi-head latent attention (MLA)"),
    "mlp_bias": ((False,), "biases in the MLP, which Draftwing's lacks"),
    "add_para_norm": ((False,), "norms before fc that Draftwing lacks"),
    "logit_scale": ((1, 1.0), "scaled logits"),
    "is_causal": ((True,), "attention in both directions"),
    "num_experts": ((0, 1), "a mixture of experts"),
    "num_local_experts": ((0, 1), "a mixture of experts"),
}
# P-EAGLE's mask token, as speculators and SpecForge name it, and vLLM in two ways.
_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
OTHER_ENGINE = "serve this head with the engine that it was made for"


@dataclass(frozen=True)
class Block:
    """The ``draftwing`` part of a config: what other layouts cannot express. The defaults stand for a missing part."""

    version: int | None = None
    taps: tuple[int, ...] | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    fc_bias: bool | None = None
    net: Mapping[str, Any] = field(default_factory=dict)  # see ``HeadSettings``


@dataclass(frozen=True)
class HeadSettings:
    """A config in one spelling. None stands for a key that is missing."""

    layout: str  # ``draftwing``, ``speculators``, ``model-optimizer`` or ``eagle`` (all others look alike)
    shape: Mapping[str, Any]  # the keys of a transformers config
    # fields of an ``EagleConfig`` that tensors do not tell; ``own_embedding`` if the file's embedding is not the
    # target's
    net: Mapping[str, Any]
    version: int | None
    draft_vocab_size: int | None
    bias: bool | None  # True if fc has one
    norm_before_residual: bool | None
    tap_ids: tuple[int, ...] | None  # as written; ``taps_are_outputs`` tells how they count
    taps_are_outputs: bool
    num_taps: int | None  # if it is given separately
    num_layers: int
    qkv_bias: bool | None
    attention_bias: bool | None
    rope_theta_given: bool  # False if every reader takes 10000 because the key is missing
    has_block: bool  # True if Draftwing wrote the config, so that ``block`` comes from it
    block: Block
    verifier: str | None


def is_head_config(config: Mapping[str, Any]) -> bool | None:
    """Return True if a config is a head's; None if it may be an EAGLE-1 head's or a small language model's."""
    if "draftwing" in config or "speculators_model_type" in config or "speculators_config" in config:
        return True
    if claimed_version(config) is not None or config.get("eagle_config") or is_medusa(config) or dflash_kind(config):
        return True
    if config.get("model_type") in ("eagle", "gemma4_assistant"):
        return True
    layers = config.get("num_hidden_layers")
    return None if isinstance(layers, int) and 1 <= layers <= MAX_LAYERS else False


def is_medusa(config: Mapping[str, Any]) -> bool:
    """Return True if a ``config.json`` describes a Medusa head, in any layout."""
    block = config.get("draftwing")
    if isinstance(block, dict):
        return block.get("kind") == "medusa"
    return config.get("model_type") == "medusa" or "medusa_num_heads" in config


def dflash_kind(config: Mapping[str, Any]) -> str | None:
    """Return ``dflash``, ``dspark`` or ``domino`` for a config in another project's layout; None for others."""
    nested = config.get("dflash_config")
    projector = nested.get("projector_type") if isinstance(nested, Mapping) else None
    text = " ".join([*_class_names(config), f"{config.get('speculators_model_type')} {projector}"]).lower()
    kind = next((kind for kind in ("dspark", "domino", "dflash") if kind in text), None)
    return "dflash" if kind is None and "dflash_config" in config else kind


def is_parallel(config: Mapping[str, Any]) -> bool:
    """Return True if a ``config.json`` describes a P-EAGLE head, in any layout."""
    names = [*_class_names(config), str(config.get("speculators_model_type"))]
    has_key = any(config.get(key) is not None for key in _MASK_KEYS[1:]) or config.get("parallel_drafting") is True
    return has_key or any("peagle" in name.lower() for name in names)


def claimed_version(config: Mapping[str, Any]) -> int | None:
    """Return 1 or 3 by the class name in a config; None if it does not tell, as LlamaForCausalLM."""
    for name in map(str.lower, _class_names(config)):
        if "eagle" in name:
            return 3 if "eagle3" in name or "peagle" in name else 1
    return 3 if config.get("draft_vocab_size") not in (None, config.get("vocab_size")) else None


def _class_names(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def read_settings(config: Mapping[str, Any], where: str) -> HeadSettings:
    """Flatten a head's config; ``where`` starts every error message."""
    top = SettingsReader(config, where)
    nested = top.inner("eagle_config")
    verifier = top.inner("speculators_config").inner("verifier").values.get("name_or_path")
    layout = "eagle"
    shape: Mapping[str, Any] = config
    if "speculators_model_type" in config or "speculators_config" in config:
        layout, shape = "speculators", top.inner("transformer_layer_config").values
        kind = config.get("speculators_model_type")
        if kind not in ("eagle3", "peagle"):
            raise UnsupportedError(
                f"{where}: `speculators_model_type` is {kind!r}, Draftwing reads 'eagle3': take an EAGLE-3 head, or "
                f"serve this one with vLLM"
            )
    elif config.get("model_type") == "eagle":
        shape = top.inner("model").values or config
    elif nested.values:
        layout = "model-optimizer"
    _refuse_unsupported(shape, config, nested.values, where)
    shape = without_mrope(shape)
    inside = SettingsReader(shape, where)
    target_hidden = top.get("target_hidden_size", "size")
    target_hidden = None if target_hidden == inside.get("hidden_size", "size") else target_hidden
    inner_ids, outer_ids, deepspec_ids = nested.layers(TAP_IDS), top.layers(TAP_IDS), top.layers("target_layer_ids")
    ropes = [shape, shape.get("rope_parameters"), shape.get("rope_scaling")]
    block = _read_block(config, where)
    net: dict[str, Any] = {
        "norm_before_fc": bool(nested.get("norm_before_fc", "flag", top.get("norm_before_fc", "flag"))),
        "fc_norm": bool(top.get("fc_norm", "flag", top.get("use_aux_norm", "flag"))),
        "norm_output": bool(top.get("norm_output", "flag")),
        "target_hidden_size": target_hidden,
        "own_embedding": bool(target_hidden or top.get("embed_requires_grad", "flag")),
        "mask_token_id": None,
    }
    if is_parallel(config):
        mask = next((token for key in _MASK_KEYS if (token := top.get(key, "id")) is not None), None)
        if mask is None:
            raise ConfigError(
                f"{where}: lacks `mask_token_id`, the token that a P-EAGLE head reads for one that is not known yet "
                f"(SpecForge has it in the training config): add it"
            )
        proposals = top.inner("speculators_config").values.get("proposal_methods")
        proposal = proposals[0] if isinstance(proposals, list) and proposals and isinstance(proposals[0], dict) else {}
        levels = SettingsReader(proposal, where).get("speculative_tokens", "size", 8)  # the trainers' default
        net |= {"mask_token_id": mask, "num_levels": levels}
    return HeadSettings(
        layout="draftwing" if "draftwing" in config and layout == "eagle" else layout,
        shape=shape,
        net={**net, **block.net},
        version=block.version or (3 if layout == "speculators" else claimed_version(config)),
        draft_vocab_size=top.get("draft_vocab_size", "size"),
        bias=top.get("bias", "flag"),
        norm_before_residual=top.get("norm_before_residual", "flag"),
        tap_ids=outer_ids or inner_ids or deepspec_ids,  # vLLM reads the outer ones first
        taps_are_outputs=not outer_ids and (inner_ids or deepspec_ids) is not None,
        num_taps=top.get("num_aux_hidden_states", "size") or inside.get("num_aux_hidden_states", "size"),
        num_layers=inside.get("num_hidden_layers", "size") or 1,
        qkv_bias=inside.get("qkv_bias", "flag"),
        attention_bias=inside.get("attention_bias", "flag"),
        rope_theta_given=any(isinstance(rope, Mapping) and rope.get("rope_theta") is not None for rope in ropes),
        has_block="draftwing" in config,
        block=block,
        verifier=verifier if isinstance(verifier, str) else None,
    )


def eagle_config(settings: HeadSettings, version: int, num_taps: int, names: Names, where: str) -> EagleConfig:
    """Return the net's shape, with ``num_taps`` unknown taps."""
    shape = {key: settings.shape[key] for key in SHAPE if settings.shape.get(key) is not None}
    activation = shape.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(
            f"{where}: `hidden_act` is {activation!r}, Draftwing supports {', '.join(_ACTIVATIONS)}: {OTHER_ENGINE}"
        )
    model = ModelConfig.from_hf(
        {**shape, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}, where
    )
    rotated = SettingsReader(settings.shape, where).get("partial_rotary_factor", "share", 1.0)
    if version == 1 and settings.draft_vocab_size not in (None, model.vocab_size):
        raise UnsupportedError(
            f"{where}: an EAGLE-1 head with a draft vocabulary of {settings.draft_vocab_size} tokens is not "
            f"supported: {OTHER_ENGINE}"
        )
    residual = settings.norm_before_residual
    if residual is None:  # speculators' EAGLE-3 leaves out true
        residual = settings.layout == "speculators" and settings.net["mask_token_id"] is None
    try:
        return EagleConfig.for_target(
            version,
            model,
            settings.draft_vocab_size,
            rope=replace(model.rope, rotary_dim=int(model.head_dim * rotated)),
            taps=(UNKNOWN_TAP,) * num_taps,
            fc_bias="fc.bias" in names.net,
            norm_before_residual=residual,
            num_layers=names.num_layers,
            qkv_bias=names.has_qkv_bias,
            qk_norm=names.has_qk_norm,
            **settings.net,
        )
    except ConfigError as error:
        raise type(error)(f"{where}: {error}; correct it in config.json") from error


def without_mrope(shape: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a shape whose RoPE is not in sections (mrope): for text, all three have the same position."""

    def plain(rope: Mapping[str, Any]) -> dict[str, Any]:
        dropped = ["mrope_section", "mrope_interleaved"]
        dropped += [key for key in ("type", "rope_type") if rope.get(key) == "mrope"]
        return {key: value for key, value in rope.items() if key not in dropped}

    ropes = {key: rope for key in ("rope_scaling", "rope_parameters") if isinstance(rope := shape.get(key), Mapping)}
    return {**shape, **{key: plain(rope) or None for key, rope in ropes.items()}}


def _refuse_unsupported(
    shape: Mapping[str, Any], config: Mapping[str, Any], nested: Mapping[str, Any], where: str
) -> None:
    """Raise UnsupportedError for features that the weights alone would not show."""
    kind = shape.get("model_type", "llama")
    found = first_refused({key: plain for key, (plain, _) in _REFUSED.items()}, shape, config)
    special = f"`{found[0]}` is {found[1]!r:.60}: {_REFUSED[found[0]][1]}" if found else ""
    rope = shape.get("rope_scaling") or shape.get("rope_parameters") or {}
    rope_type = (rope.get("rope_type") or rope.get("type") or "default") if isinstance(rope, Mapping) else "default"
    kinds = shape.get("layer_types")
    has_window = isinstance(kinds, list) and "sliding_attention" in kinds
    is_truncated = config.get("truncated_vocab_size") not in (None, shape.get("vocab_size"))
    for condition, feature in (
        (config.get("quantization_config"), "`quantization_config` is set: its weights are quantised"),
        (special, special),
        (kind not in _LAYERS, f"its layer is of `model_type` {kind!r}, and Draftwing runs {', '.join(_LAYERS)}"),
        (has_window, "`layer_types` has sliding_attention, and Draftwing's heads attend to everything"),
        (
            config.get("use_sliding_window") and not shape.get("layer_types") and shape.get("sliding_window"),
            "`use_sliding_window` is true, and Draftwing's heads attend to everything",
        ),
        (rope_type not in (*ROPE_TYPES, "mrope"), f"RoPE type {rope_type!r} is none of {', '.join(ROPE_TYPES)}"),
        (nested.get("use_aux_hidden_state") is False, "`use_aux_hidden_state` is false: an EAGLE-3 layer without fc"),
        (is_truncated, "`truncated_vocab_size` is smaller than the vocabulary: an EAGLE-1 head with a token map"),
    ):
        if condition:
            raise UnsupportedError(f"{where}: {feature}: {OTHER_ENGINE}")


def _read_block(config: Mapping[str, Any], where: str) -> Block:
    if "draftwing" not in config:
        return Block()
    block = SettingsReader(config, where).inner("draftwing")
    inside, number = block.where, block.get("format", "size")
    if number is None or number > FORMAT:
        raise UnsupportedError(
            f"{inside}: `format` is {number}, this Draftwing reads up to {FORMAT}: update Draftwing, or get the head "
            f"in another layout"
        )
    version, inputs = block.get("version", "size"), block.values.get("inputs", "feature-shifted")
    if version not in (1, 3):
        raise ConfigError(f"{inside}: `version` must be 1 or 3, found {version!r}: correct it in config.json")
    if inputs not in get_args(Inputs):
        raise ConfigError(
            f"{inside}: `inputs` must be one of {', '.join(get_args(Inputs))}, found {inputs!r:.60}: correct it"
        )
    net: dict[str, Any] = {"inputs": inputs}
    if block.values.get("target") is not None:
        reader = block.inner("target")
        sizes = {key: reader.get(key, "size", 0) for key in ("hidden_size", "num_layers", "vocab_size")}
        texts = {key: reader.get(key, "string", "") for key in ("name", "vocab_hash")}
        net["target"] = TargetId(**texts, **sizes)
    reader, default = block.inner("calibration"), Calibration()
    sharpness, scale = (reader.get(name, "number", getattr(default, name)) for name in ("sharpness", "scale"))
    miss = reader.get("miss", "share", default.miss)
    try:
        net["calibration"] = Calibration(float(sharpness), float(miss), float(scale))
    except ConfigError as error:
        raise ConfigError(f"{inside}: {error}: correct it, or remove `calibration`") from error
    for key, kind in (("own_embedding", "flag"), ("num_levels", "size")):
        if value := block.get(key, kind):
            net[key] = value
    training, fc_bias = block.inner("training").values, block.get("fc_bias", "flag")
    return Block(version, block.layers("taps"), training, fc_bias, net)


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "id": ("a token id", lambda value: type(value) is int and value >= 0),
    "size": ("an integer of at least 1", lambda value: type(value) is int and value >= 1),
    "layers": (
        "a list of layer numbers",
        lambda value: isinstance(value, list) and all(type(item) is int and item >= -1 for item in value),
    ),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    # The bounds also refuse NaN, infinity and integers that no float can hold.
    "number": ("a number from 0 on", lambda value: type(value) in (int, float) and 0 <= value <= 1e300),
    "share": ("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1),
    "string": ("a string", lambda value: isinstance(value, str)),
    "object": ("an object", lambda value: isinstance(value, Mapping)),
}


class SettingsReader:
    """Typed look-ups that raise ConfigError naming the key; null counts as missing."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def get(self, key: str, kind: str, default: Any = None) -> Any:
        value, (expected, is_valid) = self.values.get(key), _KINDS[kind]
        if value is not None and not is_valid(value):
            raise ConfigError(
                f"{self.where}: `{key}` must be {expected}, found {value!r:.60}: correct it in config.json, or take "
                f"the head from its original place again"
            )
        return default if value is None else value

    def layers(self, key: str) -> tuple[int, ...] | None:
        """Return layer numbers; None also for an empty list."""
        return tuple(self.get(key, "layers", ())) or None

    def inner(self, key: str) -> SettingsReader:
        """Return a reader of a nested object; it has no values if the key is missing."""
        return SettingsReader(self.get(key, "object", {}), f"{self.where}: {key}")
