"""A head's ``config.json``, whoever wrote it, in one spelling.

    EAGLE, SGLang, SpecForge, vLLM    the shape at the top level, flags beside it
    Model-Optimizer                   the same, and a nested ``eagle_config``
    vLLM's EAGLE class                ``model_type`` "eagle", the shape nested under ``model``
    speculators                       the shape nested under ``transformer_layer_config``, flags at the top level
    Draftwing                         as EAGLE, and a nested ``draftwing`` with what the others cannot say

Taps are numbered in two ways. Top-level ``eagle_aux_hidden_state_layer_ids`` count the *inputs* of layers, as we do.
Those inside ``eagle_config`` count *outputs* (one less) for Model-Optimizer and SGLang, and inputs for vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from draftwing.errors import ConfigError, UnsupportedError
from draftwing.formats.names import UNKNOWN_TAP, Names
from draftwing.methods.calibration import Calibration
from draftwing.methods.eagle_net import EagleConfig, Inputs
from draftwing.methods.net import TargetId
from draftwing.models.config import ROPE_TYPES, ModelConfig

FORMAT: Final = 1
TAP_IDS: Final = "eagle_aux_hidden_state_layer_ids"

_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "hidden_act",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
)
_MOST_LAYERS = 4  # a config of more layers that says nothing else is a language model's
_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh")
# What an engine's class is called, and which EAGLE it runs. "LlamaForCausalLM" may be either.
_VERSIONS = {
    "LlamaForCausalLMEagle3": 3,
    "Eagle3LlamaForCausalLM": 3,
    "Eagle3Speculator": 3,
    "Eagle3DraftModel": 3,
    "LlamaForCausalLMEagle": 1,
    "EagleLlamaForCausalLM": 1,
    "EAGLEModel": 1,
}


@dataclass(frozen=True)
class Block:
    """The ``draftwing`` part of a config: what other layouts cannot say. ``taps`` None: not known."""

    version: int
    inputs: Inputs
    taps: tuple[int, ...] | None
    target: TargetId | None
    training: Mapping[str, Any]
    fc_bias: bool | None
    own_embedding: bool
    calibration: Calibration


@dataclass(frozen=True)
class Settings:
    """A config in one spelling.

    Attributes:
        layout: ``draftwing``, ``speculators``, ``model-optimizer`` or ``eagle`` (all others look alike).
        shape: the keys of a transformers config.
        version: 1 or 3 where the config tells.
        bias: whether fc has one; None where the config does not say.
        norm_before_residual: None where the config does not say.
        tap_ids: as written; ``taps_are_outputs`` says how they count.
        num_taps: where it is given by itself.
        qkv_bias, attention_bias: None where the config does not say.
        target_hidden_size: where the target's width differs from the head's.
        own_embedding: the file's embedding is not the target's, by what the config says.
        rope_theta_given: False where every reader takes 10000 because there is none.
    """

    layout: str
    shape: Mapping[str, Any]
    version: int | None = None
    draft_vocab_size: int | None = None
    bias: bool | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    tap_ids: tuple[int, ...] | None = None
    taps_are_outputs: bool = False
    num_taps: int | None = None
    num_layers: int = 1
    qkv_bias: bool | None = None
    attention_bias: bool | None = None
    target_hidden_size: int | None = None
    own_embedding: bool = False
    rope_theta_given: bool = True
    block: Block | None = None
    verifier: str | None = None

    @property
    def takes_norm_before_residual(self) -> bool:
        """What the layout's own engine takes ``norm_before_residual`` for where the config does not say."""
        return self.layout == "speculators" if self.norm_before_residual is None else self.norm_before_residual


def is_head_config(config: Mapping[str, Any]) -> bool | None:
    """Whether a config is a head's; None where an EAGLE-1 head's would look like a small model's own."""
    if "draftwing" in config or "speculators_model_type" in config or "speculators_config" in config:
        return True
    if claimed_version(config) is not None or config.get("model_type") == "eagle" or config.get("eagle_config"):
        return True
    layers = config.get("num_hidden_layers")
    return None if isinstance(layers, int) and 1 <= layers <= _MOST_LAYERS else False


def read_settings(config: Mapping[str, Any], where: str) -> Settings:
    """Flatten a head's config.

    Args:
        where: begins every error message.

    Raises:
        ConfigError: a value of the wrong type, or one that cannot be meant.
        UnsupportedError: a kind of head that has no net here.
    """
    top = _Reader(config, where)
    nested = _Reader(top.table("eagle_config"), f"{where}: eagle_config")
    layout = "eagle"
    shape: Mapping[str, Any] = config
    if "speculators_model_type" in config or "speculators_config" in config:
        layout, shape = "speculators", top.table("transformer_layer_config")
        if config.get("speculators_model_type") != "eagle3":
            raise UnsupportedError(
                f"{where}: `speculators_model_type` is {config.get('speculators_model_type')!r}, Draftwing reads "
                f"'eagle3': take an EAGLE-3 head, or serve this one with vLLM"
            )
    elif config.get("model_type") == "eagle":
        shape = top.table("model") or config
    elif nested.values:
        layout = "model-optimizer"
    _refuse_foreign(shape, config, nested.values, where)
    inside = _Reader(shape, where)
    hidden, target_hidden = inside.integer("hidden_size"), top.integer("target_hidden_size")
    target_hidden = None if target_hidden == hidden else target_hidden
    inner_ids, outer_ids = nested.integers(TAP_IDS), top.integers(TAP_IDS)
    block = _read_block(config, where)
    return Settings(
        layout="draftwing" if block is not None and layout == "eagle" else layout,
        shape=shape,
        version=block.version if block is not None else 3 if layout == "speculators" else claimed_version(config),
        draft_vocab_size=top.integer("draft_vocab_size"),
        bias=top.flag("bias"),
        norm_before_residual=top.flag("norm_before_residual"),
        norm_before_fc=_either(nested.flag("norm_before_fc"), top.flag("norm_before_fc")),
        fc_norm=_either(top.flag("fc_norm"), top.flag("use_aux_norm")),
        norm_output=top.flag("norm_output") or False,
        # vLLM reads the outer ones first.
        tap_ids=outer_ids or inner_ids,
        taps_are_outputs=not outer_ids and inner_ids is not None,
        num_taps=top.integer("num_aux_hidden_states") or inside.integer("num_aux_hidden_states"),
        num_layers=inside.integer("num_hidden_layers") or 1,
        qkv_bias=inside.flag("qkv_bias"),
        attention_bias=inside.flag("attention_bias"),
        target_hidden_size=target_hidden,
        own_embedding=bool(target_hidden or top.flag("embed_requires_grad") or (block and block.own_embedding)),
        rope_theta_given=_gives_theta(shape),
        block=block,
        verifier=_verifier(top),
    )


def eagle_config(settings: Settings, version: int, num_taps: int, names: Names, where: str) -> EagleConfig:
    """The net's shape, with ``UNKNOWN_TAP`` for ``num_taps`` unknown ones.

    Raises:
        ConfigError: a size is missing, or sizes do not go together.
        UnsupportedError: an activation or RoPE type that has no net here.
    """
    shape = {key: settings.shape[key] for key in _SHAPE if settings.shape.get(key) is not None}
    activation = shape.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(
            f"{where}: `hidden_act` is {activation!r}, Draftwing's nets know {', '.join(_ACTIVATIONS)}: serve this "
            f"head with the engine that it was made for"
        )
    model = ModelConfig.from_hf(
        {**shape, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}, where
    )
    turned = _Reader(settings.shape, where).number("partial_rotary_factor", 1.0, most=1.0)
    if version == 1 and settings.draft_vocab_size not in (None, model.vocab_size):
        raise UnsupportedError(
            f"{where}: an EAGLE-1 head with a draft vocabulary of {settings.draft_vocab_size} tokens: Draftwing's read "
            f"the target's whole LM head; serve this head with the engine that it was made for"
        )
    try:
        rope = replace(model.rope, rotary_dim=int(model.head_dim * turned))
        found = EagleConfig.for_target(
            version,
            model,
            settings.draft_vocab_size,
            rope=rope,
            taps=(UNKNOWN_TAP,) * num_taps,
            inputs=settings.block.inputs if settings.block is not None else "feature-shifted",
            fc_bias="fc.bias" in names.net,
            norm_before_residual=settings.takes_norm_before_residual,
            norm_before_fc=settings.norm_before_fc,
            fc_norm=settings.fc_norm,
            norm_output=settings.norm_output,
            num_layers=settings.num_layers,
            qkv_bias=names.has_qkv_bias,
            target_hidden_size=settings.target_hidden_size,
            own_embedding=settings.own_embedding,
        )
    except ConfigError as error:
        raise type(error)(f"{where}: {error}; correct it in config.json") from error
    block = settings.block
    return found if block is None else replace(found, target=block.target, calibration=block.calibration)


def _refuse_foreign(shape: Mapping[str, Any], config: Mapping[str, Any], nested: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedError for what the weights alone would not show."""
    kind = shape.get("model_type", "llama")
    rope = shape.get("rope_scaling") or shape.get("rope_parameters") or {}
    rope_type = (rope.get("rope_type") or rope.get("type") or "default") if isinstance(rope, Mapping) else "default"
    windows = [entry for entry in shape.get("layer_types") or [] if entry == "sliding_attention"]
    refused: tuple[tuple[bool, str], ...] = (
        (bool(config.get("quantization_config")), "`quantization_config` is set: its weights are quantised"),
        (kind not in ("llama", "eagle"), f"its layer is of `model_type` {kind!r}, and Draftwing runs 'llama'"),
        (bool(shape.get("mlp_bias")), "`mlp_bias` is true, and Draftwing's MLP has no biases"),
        (bool(windows), "`layer_types` has sliding_attention, and Draftwing's heads attend to everything"),
        (rope_type not in ROPE_TYPES, f"RoPE type {rope_type!r} is none of {', '.join(ROPE_TYPES)}"),
        (nested.get("use_aux_hidden_state") is False, "`use_aux_hidden_state` is false: an EAGLE-3 layer without fc"),
        (bool(config.get("add_para_norm")), "`add_para_norm` is true: norms before fc that Draftwing lacks"),
        (
            config.get("truncated_vocab_size") not in (None, shape.get("vocab_size")),
            "`truncated_vocab_size` is smaller than the vocabulary: an EAGLE-1 head with a token map",
        ),
    )
    for holds, what in refused:
        if holds:
            raise UnsupportedError(f"{where}: {what}: serve this head with the engine that it was made for")


def claimed_version(config: Mapping[str, Any]) -> int | None:
    """1 or 3 by the name of the engine's class that a config gives; None where that tells nothing."""
    names = config.get("architectures")
    for name in names if isinstance(names, list) else []:
        if name in _VERSIONS:
            return _VERSIONS[name]
    return 3 if config.get("draft_vocab_size") not in (None, config.get("vocab_size")) else None


def _read_block(config: Mapping[str, Any], where: str) -> Block | None:
    if "draftwing" not in config:
        return None
    inside = f"{where}: draftwing"
    read = _Reader(_Reader(config, where).table("draftwing"), inside)
    found = read.integer("format")
    if found is None or found > FORMAT:
        raise UnsupportedError(
            f"{inside}: `format` is {found}, this Draftwing reads up to {FORMAT}: update Draftwing, or ask for the "
            f"head in another layout"
        )
    version, inputs = read.integer("version"), read.values.get("inputs", "feature-shifted")
    if version not in (1, 3):
        raise ConfigError(f"{inside}: `version` must be 1 or 3, found {version!r}: correct it in config.json")
    if inputs not in get_args(Inputs):
        raise ConfigError(
            f"{inside}: `inputs` must be one of {', '.join(get_args(Inputs))}, found {inputs!r:.60}: correct it"
        )
    target = None
    if read.values.get("target") is not None:
        inner = _Reader(read.table("target"), f"{inside}: target")
        sizes = {key: inner.integer(key) or 0 for key in ("hidden_size", "num_layers", "vocab_size")}
        target = TargetId(name=inner.text("name"), vocab_hash=inner.text("vocab_hash"), **sizes)
    fitted, usual = _Reader(read.table("calibration"), f"{inside}: calibration"), Calibration()
    sharpness, miss = fitted.number("sharpness", usual.sharpness), fitted.number("miss", usual.miss, most=1.0)
    try:
        calibration = Calibration(sharpness, miss, fitted.number("scale", usual.scale))
    except ConfigError as error:
        raise ConfigError(f"{inside}: {error}: correct it, or remove `calibration`") from error
    return Block(
        version=version,
        inputs=inputs,
        taps=read.integers("taps"),
        target=target,
        training=read.table("training"),
        fc_bias=read.flag("fc_bias"),
        own_embedding=read.flag("own_embedding") or False,
        calibration=calibration,
    )


def _verifier(top: _Reader) -> str | None:
    verifier = _Reader(top.table("speculators_config"), top.where).table("verifier")
    return verifier.get("name_or_path") if isinstance(verifier.get("name_or_path"), str) else None


def _gives_theta(shape: Mapping[str, Any]) -> bool:
    tables = [shape, *(shape.get(key) for key in ("rope_parameters", "rope_scaling"))]
    return any(isinstance(table, Mapping) and table.get("rope_theta") is not None for table in tables)


def _either(first: bool | None, second: bool | None) -> bool:
    return bool(second if first is None else first)


class _Reader:
    """Typed look-ups; null counts as missing, and every failure is a ConfigError that names the key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def _wrong(self, key: str, expected: str) -> ConfigError:
        return ConfigError(
            f"{self.where}: `{key}` must be {expected}, found {self.values.get(key)!r:.60}: correct it in config.json, "
            f"or take the head from its original place again"
        )

    def integer(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise self._wrong(key, "an integer of at least 1")
        return value

    def integers(self, key: str) -> tuple[int, ...] | None:
        value = self.values.get(key)
        if value is None or value == []:
            return None
        if not isinstance(value, list) or not all(type(item) is int and item >= -1 for item in value):
            raise self._wrong(key, "a list of layer numbers")
        return tuple(value)

    def flag(self, key: str) -> bool | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def number(self, key: str, default: float, least: float = 0.0, most: float = 1e300) -> float:
        value = self.values.get(key)
        # The bounds also keep out NaN, infinity and integers that no float can hold.
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most
        ):
            raise self._wrong(key, f"a number from {least:g}" + (f" to {most:g}" if most < 1e300 else " on"))
        return default if value is None else float(value)

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value or ""

    def table(self, key: str) -> Mapping[str, Any]:
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(key, "an object")
        return value or {}
