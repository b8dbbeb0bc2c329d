"""Read ``config.json`` strictly into what the lean decoder needs; an error names the file, the key and the value.

A value that a config leaves out is the default of the family's config class in transformers. ``null`` counts as left
out, except for windows and special tokens, where it means none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from draftwing.errors import CheckpointError, ConfigError, UnsupportedError, shown
from draftwing.models.families import FAMILIES, WRAPPERS, ExpertTraits, Family, Key
from draftwing.storage import check_regular, read_json

_REQUIRED: Final = object()
_DOWNLOAD = "download the model's config.json again."


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a model folder's ``config.json``.

    That of a multimodal model whose text model is native is the text model's, which is all that runs.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a model folder, found none. Check the path.")
    try:
        for entry in folder.iterdir():
            if not entry.is_dir():
                check_regular(entry)
        config = read_json(path)
    except FileNotFoundError:
        if (folder / "adapter_config.json").exists():
            raise CheckpointError(
                f"{folder}: a LoRA adapter, no model. Give its base model as the target and the adapter as lora "
                f"(--lora), or merge it with peft's merge_and_unload, and give the result."
            ) from None
        raise CheckpointError(
            f"{folder}: expected config.json in the model folder, found none. Point to a folder that "
            "save_pretrained wrote, or download the model again."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). Check the file and its permissions.") from error
    except ValueError as error:  # broken JSON, or not UTF-8
        raise ConfigError(f"{path}: expected JSON, found something else ({error}). Download it again.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {_shown(config)}. Download it again.")
    return _native_text(config)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a flat config: a multimodal model's ``text_config`` replaces the keys around it."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


# Keys next to ``text_config`` that apply to the text model, and keys that published files leave out of it.
_OUTER = (
    "dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id", "draftwing",
)  # fmt: skip
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _native_text(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a multimodal model's text model if its family is native; other configs unchanged."""
    text = config.get("text_config")
    if config.get("model_type") not in WRAPPERS or not isinstance(text, dict):
        return config
    family = FAMILIES.get(str(text.get("model_type")))
    if family is None:
        return config
    flat = {**text, "architectures": [family.architecture]}
    flat |= {key: config[key] for key in _OUTER if config.get(key) is not None}
    if config.get("tie_word_embeddings") is True:  # classes differ in which of the two keys they read
        flat["tie_word_embeddings"] = True
    if any(flat.get(size) is None for size in _SIZES):  # Gemma 3's and LLaVA's configs leave out defaults
        from transformers import CONFIG_MAPPING  # slow to import

        defaults = CONFIG_MAPPING[flat["model_type"]]().to_dict() if flat["model_type"] in CONFIG_MAPPING else {}
        flat |= {size: defaults.get(size) for size in _SIZES if flat.get(size) is None}
    return flat


def _shown(value: object) -> str:
    text = "of hundreds of digits" if isinstance(value, int) and abs(value) > 10**300 else repr(value)
    return f"{type(value).__name__} {text}"[:80]


def first_refused(refused: Mapping[str, Sequence[Any]], *configs: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the first key of ``refused`` with another value than those listed there or null, and the value."""
    found = ((key, config.get(key), neutral) for key, neutral in refused.items() for config in configs)
    return next(((key, value) for key, value, neutral in found if value is not None and value not in neutral), None)


class ConfigReader:
    """Typed look-ups in a config. Every failure is a ConfigError, which begins with ``where``."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"{self.where}: {text}")

    def unsupported(self, text: str) -> UnsupportedError:
        return UnsupportedError(f'{self.where}: {text} Use engine="transformers", which runs it through the adapter.')

    def _get(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is None:
            value = default
        if value is _REQUIRED:
            raise self.error(f"required key `{key}` is missing. Add it, or {_DOWNLOAD}")
        return value

    def _wrong(self, key: str, expected: str) -> ConfigError:
        found = _shown(self.config.get(key))
        return self.error(f"`{key}` must be {expected}, found {found}. Correct the value, or {_DOWNLOAD}")

    def integer(self, key: str, default: Any = _REQUIRED, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        value = self._get(key, default)
        # JSON's true is Python's int 1; it is not a size.
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self._wrong(key, f"an integer of at least {minimum}")
        if value > maximum:
            raise self._wrong(key, f"an integer of at most {maximum}")
        return value

    def number(self, key: str, default: Any = _REQUIRED, minimum: float = -1e300) -> float:
        value = self._get(key, default)
        # The bounds also exclude NaN, infinity and integers that no float can hold.
        if not isinstance(value, int | float) or isinstance(value, bool) or not minimum <= value < 1e300:
            raise self._wrong(key, "a finite number" if minimum < 0 else f"a finite number of at least {minimum}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str = "") -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def setting(self, value: Any) -> Any:
        """The value of a ``Key`` of a family, with the type of its default (a number if it is None); or ``value``."""
        if not isinstance(value, Key):
            return value
        if isinstance(value.default, bool):
            return self.flag(value.name, value.default)
        if isinstance(value.default, str):
            return self.text(value.name, value.default)
        if value.default is None and self.config.get(value.name) is None:
            return None
        if isinstance(value.default, int):
            return self.integer(value.name, value.default, minimum=0)
        return self.number(value.name, value.default)

    def items(self, key: str, kind: type) -> list[Any]:
        """A list of ``kind``; empty if the key is missing."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self._wrong(key, f"a list of {kind.__name__}")
        return value

    def ids(self, key: str, default: int | None, *, is_list: bool = False) -> tuple[int, ...]:
        """Token ids; null and, as some configs on the Hub have it, a negative id mean none."""
        value = self.config.get(key, default)
        ids = value if is_list and isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise self._wrong(key, "a token id, a list of them or null" if is_list else "a token id or null")
        return tuple(item for item in ids if item >= 0)


# --- rotary position embeddings --------------------------------------------------------------------------------------

ROPE_TYPES: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "proportional")


def _check_rope_type(kind: str, read: ConfigReader) -> None:
    if kind not in ROPE_TYPES:
        expected = f"expected one of {', '.join(ROPE_TYPES)}."
        raise read.unsupported(f'RoPE type "{kind}" is not supported by the lean decoder; {expected}')


@dataclass(frozen=True)
class RopeConfig:
    """Settings of the rotation of a model's queries and keys."""

    type: str  # one of ROPE_TYPES
    theta: float  # base of the frequencies
    # head_dim, rotary_dim: width of a head, and the number of its first channels that are rotated
    head_dim: int
    rotary_dim: int
    max_position_embeddings: int  # context in tokens
    factor: float = 1.0  # by which the context is stretched (all types but default)
    # context in tokens before stretching (required by llama3 and yarn)
    original_max_position_embeddings: int | None = None
    # low_freq_factor, high_freq_factor: bounds of llama3's frequency bands
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # multiplies cosine and sine (yarn); None derives it from ``factor``, ``mscale`` and ``mscale_all_dim``
    attention_factor: float | None = None
    # bounds of yarn's ramp, in rotations over the original context; ``truncate`` rounds them
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0  # share of the pairs that turn (proportional); the others have frequency 0

    def __post_init__(self) -> None:
        _check_rope_type(self.type, ConfigReader({}, "RopeConfig"))
        yarn, llama3, original = self.type == "yarn", self.type == "llama3", self.original_max_position_embeddings
        min_dim = 4 if self.type == "dynamic" else 2  # dynamic NTK raises the base to rotary_dim / (rotary_dim - 2)
        dim_is_valid = self.rotary_dim % 2 == 0 and min_dim <= self.rotary_dim <= self.head_dim
        dim_text = f"rotary_dim (head_dim times partial_rotary_factor) must be even, from {min_dim} to {self.head_dim}"
        has_original, original_text = isinstance(original, int) and original > 0, "original_max_position_embeddings"
        bands, share = (self.low_freq_factor, self.high_freq_factor), self.partial_rotary_factor
        checks: tuple[tuple[bool, str, object], ...] = (
            (dim_is_valid, dim_text, self.rotary_dim),
            (self.theta > 1, "rope_theta must be above 1", self.theta),
            (self.factor > 0, "factor must be above 0", self.factor),
            (self.max_position_embeddings > 0, "max_position_embeddings must be above 0", self.max_position_embeddings),
            (not (yarn or llama3) or has_original, f"{original_text} must be an integer above 0", original),
            (not yarn or self.beta_fast > 0, "beta_fast must be above 0", self.beta_fast),
            (not yarn or self.beta_slow > 0, "beta_slow must be above 0", self.beta_slow),
            (not llama3 or 0 < bands[0] <= bands[1], "0 < low_freq_factor <= high_freq_factor must hold", bands),
            (isinstance(self.truncate, bool), "truncate must be true or false", self.truncate),
            (0 <= share <= 1, "partial_rotary_factor must be from 0 to 1", share),
        )
        for holds, expected, value in checks:
            if not holds:
                raise ConfigError(f'RoPE of type "{self.type}": {expected}, found {value}. Correct it in config.json.')

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        *,
        model_type: str,
        head_dim: int,
        max_position_embeddings: int,
        theta: float,
        where: str = "config.json",
    ) -> RopeConfig:
        """Read ``rope_scaling`` and ``rope_theta`` (transformers 4), or else ``rope_parameters`` (transformers 5).

        ``theta`` is the family's default base; ``where`` begins every error message.
        """
        partial = FAMILIES[model_type].partial
        key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        table, whole = config.get(key) or {}, ConfigReader(config, where)
        if not isinstance(table, Mapping):
            raise whole.error(f"`{key}` must be an object, found {shown(table)}. Correct it, or remove it.")
        read = ConfigReader(table, f"{where}: {key}")
        if any(isinstance(value, Mapping) for value in table.values()):
            raise read.unsupported(
                f"expected one set of RoPE settings, found several ({', '.join(table)}), which the lean decoder lacks."
            )
        kind = table.get("rope_type") or table.get("type") or "default"
        if model_type == "phi3" and kind == "yarn":
            kind = "longrope"  # as in transformers: the first Phi-3 configs called it that
        theta_factor = 1.0
        if model_type == "hunyuan_v1_dense" and kind == "dynamic" and table.get("alpha"):
            kind = "default"  # with a fixed base
            theta_factor = read.number("alpha", minimum=0) ** (head_dim / (head_dim - 2))
        _check_rope_type(kind, read)
        if model_type == "phi3" and kind != "default":
            raise read.error(
                f'RoPE type "{kind}" does not exist for phi3; expected "default". Correct it, or {_DOWNLOAD}'
            )
        share = ConfigReader({**config, **table}, read.where).number("partial_rotary_factor", partial or 1.0)
        proportional, share = (share, 1.0) if kind == "proportional" else (1.0, share)
        # The models of the other families ignore the key, or fail.
        if partial is None and share != 1.0:
            raise read.unsupported(f"`partial_rotary_factor` {share} has no meaning for {model_type}.")
        base = read.number("rope_theta", whole.number("rope_theta", theta)) * theta_factor
        settings = _rope_settings(kind, read, config, max_position_embeddings)
        settings["partial_rotary_factor"] = proportional
        try:
            return cls(kind, base, head_dim, int(head_dim * share), max_position_embeddings, **settings)
        except ConfigError as error:
            raise type(error)(f"{where}: {error}") from error

    @property
    def position_only(self) -> bool:
        """True if the rotation depends on the position alone (every type but dynamic)."""
        return self.type != "dynamic"


def _rope_settings(kind: str, read: ConfigReader, config: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    """The fields of RopeConfig that belong to one type."""
    table, settings = read.config, dict[str, Any]()
    if kind in ("llama3", "yarn"):
        # As in transformers, a key next to the RoPE settings takes precedence over one among them.
        both = {**table, **{key: value for key, value in config.items() if value is not None}}
        original = ConfigReader(both, read.where).number("original_max_position_embeddings", max_positions)
        settings["original_max_position_embeddings"] = int(original) if original.is_integer() else original
    if kind == "yarn" and "factor" in table and table["factor"] is None and original > 0:
        settings["factor"] = max_positions / original  # DeepSeek's spelling
    elif kind != "default":
        settings["factor"] = read.number("factor", 1.0 if kind == "proportional" else _REQUIRED)
    if kind == "llama3":
        settings.update({key: read.number(key) for key in ("low_freq_factor", "high_freq_factor")})
    if kind == "yarn":
        optional = ("attention_factor", "mscale", "mscale_all_dim")
        settings.update({key: read.number(key) for key in optional if table.get(key) is not None})
        settings["beta_fast"] = read.number("beta_fast", 32.0) or 32.0  # 0 means the default, too
        settings["beta_slow"] = read.number("beta_slow", 1.0) or 1.0
        settings["truncate"] = table.get("truncate", True) or False  # null means false, as in transformers
    return settings


# --- models ----------------------------------------------------------------------------------------------------------

Activation = Literal["silu", "gelu", "gelu_pytorch_tanh", "relu2"]

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "relu2": "relu2",
}


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts."""

    # num_experts, num_experts_per_token: MLPs of a layer, and those that each token goes through
    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # inner width of an expert
    norm_topk_prob: bool  # True if the probabilities of the chosen experts are rescaled to sum to one
    sparse_layers: tuple[bool, ...]  # for each layer, True if it has experts instead of an ordinary MLP, or beside it
    shared_size: int = 0  # inner width of the expert that every token goes through; 0 if there is none
    scale: float = 1.0  # factor of the weights
    # number of groups of experts, and those that a token chooses from; None without groups
    groups: tuple[int, int] | None = None
    clamp: tuple[float, float] | None = None  # see ``ExpertTraits``


@dataclass(frozen=True)
class LatentConfig:
    """Widths of multi-head latent attention: a head's queries and keys are ``rope_dim`` + ``plain_dim`` wide."""

    query_rank: int | None  # width of the latent queries; None for a single matrix
    rank: int  # width of the latent keys and values
    rope_dim: int
    plain_dim: int
    value_dim: int


@dataclass(frozen=True)
class DeltaConfig:
    """Sizes of the gated delta rule (``models.recurrent``)."""

    num_key_heads: int
    num_value_heads: int
    # key_dim, value_dim: widths of a head
    key_dim: int
    value_dim: int
    conv_size: int  # tokens that the convolution of queries, keys and values reads

    @property
    def keys_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def values_width(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys_width + self.values_width


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of a layer."""

    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    source: int  # the layer whose keys and values it attends to: itself, or an earlier one; then it has only queries
    repeats_keys: bool = False  # values are projected by the matrix of keys


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder: a family's traits (``models.families``) with the values of one model."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # width of the widest heads
    rms_norm_eps: float
    activation: Activation
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # queries and keys are normed (``Family.qk_norm`` says how)
    rope: RopeConfig
    # for each layer, None for full attention, W if a token sees itself and the W - 1 before it, or -W if it sees its
    # own chunk, and chunks begin at the multiples of W
    sliding_windows: tuple[int | None, ...]
    moe: MoeConfig | None
    bos_id: int | None
    # may be empty. Special tokens may lie outside the vocabulary, as defaults of tiny models do.
    eos_ids: tuple[int, ...]
    pad_id: int | None
    dtype: str | None  # the checkpoint's, such as "bfloat16"; None if the config does not name it
    attention_scale: float  # factor of the scores
    latent: LatentConfig | None = None
    score_cap: float = 0.0  # scores are capped to cap * tanh(score / cap); 0: not
    local_rope: RopeConfig | None = None  # for layers with a window, if theirs differs
    rotates: tuple[bool, ...] = ()  # for each layer, False if it has no position embeddings
    # for each layer, True if it has a short convolution over ``conv_size`` tokens instead of attention
    convolves: tuple[bool, ...] = ()
    conv_size: int = 0
    # for each layer, True if it has the gated delta rule ``delta`` instead of attention
    recurs: tuple[bool, ...] = ()
    delta: DeltaConfig | None = None
    # A query at position p is multiplied by 1 + beta * log(1 + floor((p + first) / length)): (beta, length, first), or
    # None. If some layers do not rotate, then in these alone.
    query_scale: tuple[float, int, int] | None = None
    # embedding_scale, residual_scale, logit_scale: factors of embeddings, of what a layer adds, and of logits
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # see ``score_cap``
    layer_sizes: tuple[LayerSizes, ...] = ()  # one entry per layer; empty if all have the model's
    # tokens and width of the embeddings that each layer reads; None without them
    layer_inputs: tuple[int, int] | None = None
    kv_dtype: str | None = None  # int8: keys and values in 8 bits, in the CPU kernel

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    def sizes_of(self, layer: int) -> LayerSizes:
        """The sizes of a layer."""
        if self.layer_sizes:
            return self.layer_sizes[layer]
        return LayerSizes(self.head_dim, self.num_kv_heads, self.intermediate_size, layer)

    @cached_property
    def slots(self) -> tuple[tuple[int, int], ...]:
        """For each of ``layer_sizes``, the layer of slots that holds its keys and values, and the first word in these.

        Layers with narrow heads share a layer of slots that is as wide as the widest heads.
        """
        found: list[tuple[int, int]] = []
        num, places = 0, dict[int, tuple[int, int]]()  # the newest layer of slots by width, and the heads in it
        for layer, sizes in enumerate(self.layer_sizes):
            if sizes.source != layer:
                found.append(found[sizes.source])
                continue
            index, place = places.get(sizes.head_dim, (num, 0))
            if place == 0:
                index, num = num, num + 1
            found.append((index, place * self._words(sizes.head_dim)))
            places[sizes.head_dim] = index, (place + 1) % (self.head_dim // sizes.head_dim)
        return tuple(found)

    @property
    def num_slot_layers(self) -> int:
        """The number of layers of slots."""
        return max((index + 1 for index, _ in self.slots), default=self.num_layers)

    @property
    def num_slot_heads(self) -> int:
        """KV heads of a slot, whose keys and values also hold the inputs of a convolution."""
        width = self.hidden_size if any(self.convolves) else 0
        return max(self.num_kv_heads, -(-width // (2 * self.slot_width)))

    @property
    def slot_width(self) -> int:
        """Numbers in a head's keys of a slot, and in its values; in 8 bits, words of four bytes and a scale."""
        narrow = (self.head_dim // sizes.head_dim * self._words(sizes.head_dim) for sizes in self.layer_sizes)
        return max([self._words(self.head_dim), *narrow])

    def _words(self, head_dim: int) -> int:
        """The words that a head of this width takes in a slot."""
        return head_dim if self.kv_dtype is None else head_dim // 4 + 1

    @property
    def context_length(self) -> int:
        """Tokens that a row may hold; configs state the length before RoPE stretches it."""
        positions, rope = self.max_position_embeddings, self.rope
        if rope.type in ("linear", "dynamic"):
            return int(positions * rope.factor)
        if rope.type == "yarn" and rope.original_max_position_embeddings is not None:
            return max(positions, int(rope.original_max_position_embeddings * rope.factor))
        return positions

    @classmethod
    def from_hf(cls, config: dict[str, Any], where: str = "config.json") -> ModelConfig:
        """Read the content of a ``config.json``; ``where`` begins every error message.

        Raises:
            ConfigError: a value is missing or impossible.
            UnsupportedError: a setting that the lean decoder does not honour, or no family that it has.
        """
        read = ConfigReader(config, where)
        model_type = _model_type(read)
        family = FAMILIES[model_type]
        _refuse(read, family)
        latent = _latent(read) if family.is_latent else None
        heads, kv_heads, head_dim = _heads(read, family, latent)
        # Bounded, because a list of that length is made before any weight could show that the number is absurd.
        layers = read.integer("num_hidden_layers", maximum=10000)
        name = family.activation.name
        activation = read.text(name, family.activation.default)
        if activation not in _ACTIVATIONS:
            raise read.unsupported(
                f'activation `{name}` "{activation}" is not supported; expected one of {", ".join(_ACTIVATIONS)}.'
            )
        hidden = read.integer("hidden_size")
        max_positions = read.integer("max_position_embeddings", family.max_positions)
        windows = _windows(read, family, layers)
        intermediate, local_dim = _intermediate_size(read, family), head_dim
        sizes: tuple[LayerSizes, ...] = ()
        if family.is_layered:
            windows = (*windows[:-1], None)
            sizes = _layer_sizes(read, heads, LayerSizes(head_dim, kv_heads, intermediate, 0), windows)
            head_dim, kv_heads = sizes[-1].head_dim, max(size.num_kv_heads for size in sizes)
            local_dim = min(size.head_dim for size in sizes)
        rotates = _rotates(read, family, windows)
        rope, local_rope = _ropes(
            read, family, model_type, head_dim if latent is None else latent.rope_dim, max_positions, local_dim
        )
        scale = 1.0 if family.is_layered else read.setting(family.scale)
        if latent is not None:
            rope = replace(rope, head_dim=head_dim)
            if rope.type != "default" and rope.mscale_all_dim and rope.factor > 1:
                scale = head_dim**-0.5 * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2
        embedding_scale = hidden**0.5 if family.embedding_scale == "root" else read.setting(family.embedding_scale)
        return cls(
            model_type=model_type,
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=read.number(family.eps.name, family.eps.default, minimum=0),
            activation=_ACTIVATIONS[activation],
            max_position_embeddings=max_positions,
            tie_word_embeddings=read.flag(
                _lfm2_key(read, family, "tie_embedding", "tie_word_embeddings"), family.is_tied
            ),
            qkv_bias=read.setting(family.qkv_bias),
            o_bias=read.setting(family.o_bias),
            mlp_bias=read.setting(family.mlp_bias),
            qk_norm=family.qk_norm != "none" and read.setting(family.uses_qk_norm),
            rope=rope,
            sliding_windows=windows,
            moe=_moe(read, family.experts, layers) if family.experts else None,
            bos_id=next(iter(read.ids("bos_token_id", family.bos)), None),
            eos_ids=_eos_ids(read, family),
            pad_id=next(iter(read.ids("pad_token_id", family.pad)), None),
            dtype=read.text("dtype") or read.text("torch_dtype") or None,
            attention_scale=head_dim**-0.5 if scale is None else scale**family.scale_power,
            latent=latent,
            score_cap=read.setting(family.score_cap) or 0.0,
            local_rope=local_rope,
            rotates=rotates,
            convolves=_convolves(read, family, layers),
            recurs=_recurs(read, family, layers),
            delta=None if family.delta is None else _delta(read),
            conv_size=read.setting(family.conv_size) or 0,
            query_scale=_query_scale(read, family, rotates),
            embedding_scale=1.0 if embedding_scale is None else embedding_scale,
            residual_scale=read.setting(family.residual_scale or 1.0),
            logit_scale=read.setting(family.logit_scale or 1.0) / _divisor(read, family),
            logit_cap=read.setting(family.logit_cap) or 0.0,
            layer_sizes=sizes,
            layer_inputs=_layer_inputs(read) if family.is_layered else None,
        )


def _model_type(read: ConfigReader) -> str:
    """The family, by ``architectures[0]`` and ``model_type``, which must agree if both are there."""
    architecture = next(iter(read.items("architectures", str)), "")
    model_type = read.text("model_type")
    if not architecture and not model_type:
        raise read.error(
            "expected `architectures` or `model_type`, found neither. Download the model's config.json again."
        )
    architectures = {family.architecture: name for name, family in FAMILIES.items()}
    named = architectures.get(architecture) if architecture else model_type
    if named not in FAMILIES:
        raise read.unsupported(
            f"architecture {architecture or model_type} is not supported by the lean decoder; expected "
            f"one of {', '.join(architectures)}."
        )
    if model_type and named != model_type:
        raise read.error(
            f'`architectures` is {architecture}, of model type "{named}", but `model_type` is "{model_type}". Correct '
            "the one that is wrong."
        )
    return named


def _refuse(read: ConfigReader, family: Family) -> None:
    """Raise UnsupportedError for a setting that no code honours, unless its value changes nothing."""
    quantized = read.config.get("quantization_config")
    is_mxfp4 = isinstance(quantized, Mapping) and quantized.get("quant_method") == "mxfp4"
    if quantized and not (is_mxfp4 and family.experts is not None and family.experts.clamp is not None):
        raise read.unsupported("`quantization_config` is set: the weights are quantised.")
    if found := first_refused(family.refused, read.config):
        raise read.unsupported(f"`{found[0]}` {shown(found[1])} is not supported by the lean decoder.")


def _lfm2_key(read: ConfigReader, family: Family, old: str, key: str) -> str:
    """Return ``old``, the name of a setting in LFM2's first configs, if the config has it; else ``key``."""
    return old if family.is_rounded_up and old in read.config else key


def _intermediate_size(read: ConfigReader, family: Family) -> int:
    experts = family.experts
    if experts is not None and experts.dense_size is not None:
        return read.integer(experts.dense_size.name, experts.dense_size.default)
    if experts is not None and experts.is_everywhere and read.config.get("intermediate_size") is None:
        return int(read.setting(experts.size))
    size = read.integer(_lfm2_key(read, family, "block_ff_dim", "intermediate_size"))
    if not family.is_rounded_up or not read.flag("block_auto_adjust_ff_dim", True):
        return size
    size, multiple = int(2 * size / 3), read.integer("block_multiple_of", 256)
    return -(-int(read.number("block_ffn_dim_multiplier", 1.0, minimum=0) * size) // multiple) * multiple


def _convolves(read: ConfigReader, family: Family, layers: int) -> tuple[bool, ...]:
    """For each layer, True if it has a short convolution instead of attention."""
    if family.conv_size is None:
        return (False,) * layers
    kinds, attends = read.items("layer_types", str), read.items("full_attn_idxs", int)
    if kinds:  # ``_windows`` checks their number
        return tuple(kind == "conv" for kind in kinds)
    return tuple(bool(attends) and layer not in attends for layer in range(layers))


def _recurs(read: ConfigReader, family: Family, layers: int) -> tuple[bool, ...]:
    """For each layer, True if it has the gated delta rule instead of attention."""
    kinds = read.items("layer_types", str)
    if family.delta is None or kinds:
        return tuple(kind == "linear_attention" for kind in kinds) or (False,) * layers
    every = read.integer("full_attention_interval", 4)
    return tuple((layer + 1) % every != 0 for layer in range(layers))


def _delta(read: ConfigReader) -> DeltaConfig:
    keys, values = read.integer("linear_num_key_heads", 16), read.integer("linear_num_value_heads", 32)
    if values % keys:
        raise read.error(f"`linear_num_value_heads` {values} is not divisible by `linear_num_key_heads` {keys}.")
    dims = read.integer("linear_key_head_dim", 128), read.integer("linear_value_head_dim", 128)
    return DeltaConfig(keys, values, *dims, read.integer("linear_conv_kernel_dim", 4))


def _eos_ids(read: ConfigReader, family: Family) -> tuple[int, ...]:
    if isinstance(family.eos, tuple):  # these families take null for their default, too
        return read.ids("eos_token_id", None, is_list=True) or family.eos
    return read.ids("eos_token_id", family.eos, is_list=True)


def _divisor(read: ConfigReader, family: Family) -> float:
    divisor: float = read.setting(family.logit_divisor or 1.0)
    if not divisor and family.logit_divisor is not None:
        raise read.error(f"`{family.logit_divisor.name}` must not be 0. Correct it, or {_DOWNLOAD}")
    return divisor


def _latent(read: ConfigReader) -> LatentConfig:
    query_rank = read.integer("q_lora_rank", 1536) if read.config.get("q_lora_rank", 1536) is not None else None
    sizes = read.integer("qk_rope_head_dim", 64), read.integer("qk_nope_head_dim", 128), read.integer("v_head_dim", 128)
    if sizes[2] > sizes[0] + sizes[1]:
        raise read.unsupported("`v_head_dim` is larger than `qk_rope_head_dim` and `qk_nope_head_dim` together.")
    return LatentConfig(query_rank, read.integer("kv_lora_rank", 512), *sizes)


def _heads(read: ConfigReader, family: Family, latent: LatentConfig | None) -> tuple[int, int, int]:
    """(query heads, KV heads, head width), checked against each other."""
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    if latent is not None:  # keys and values of every head are made from the latent ones
        if read.integer("num_key_value_heads", heads) != heads:
            raise read.unsupported("`num_key_value_heads` differs from `num_attention_heads`.")
        return heads, heads, latent.rope_dim + latent.plain_dim
    # If the key is null, there are as many as query heads; if it is missing, the config class's default.
    kv_default = heads if "num_key_value_heads" in read.config else family.kv_heads or heads
    kv_heads = read.integer("num_key_value_heads", kv_default)
    head_dim = read.integer("head_dim", family.head_dim or hidden // heads or 1)
    if head_dim * heads != hidden and not read.config.get("head_dim") and not family.head_dim:
        raise read.error(
            f"`hidden_size` {hidden} is not divisible by `num_attention_heads` {heads}, and there is no "
            f"`head_dim`. Correct one of them, or {_DOWNLOAD}"
        )
    if heads % kv_heads:
        raise read.error(
            f"`num_attention_heads` {heads} is not divisible by `num_key_value_heads` {kv_heads}"
            f"{'' if read.config.get('num_key_value_heads') else ', its default'}. Correct one of them."
        )
    if head_dim % 2:
        raise read.error(
            f"`head_dim` must be even, because RoPE rotates pairs, found {head_dim}. Correct it, or {_DOWNLOAD}"
        )
    return heads, kv_heads, head_dim


def _layer_sizes(
    read: ConfigReader, heads: int, usual: LayerSizes, windows: tuple[int | None, ...]
) -> tuple[LayerSizes, ...]:
    """The sizes of each layer; ``usual`` are those of layers with a window."""
    layers, repeats_keys = len(windows), read.flag("attention_k_eq_v", False)
    changes = read.config.get("per_layer_config")
    if "per_layer_config" not in read.config:  # as it is published; transformers 5 writes the sizes of each layer
        entry = {"head_dim": read.integer("global_head_dim", 512)}
        if repeats_keys:
            entry["num_key_value_heads"] = read.integer("num_global_key_value_heads", usual.num_kv_heads)
        changes = {str(layer): entry for layer, window in enumerate(windows) if window is None}
    known, entries = {str(layer) for layer in range(layers)}, changes or {}
    names = {"head_dim", "num_key_value_heads"}
    if not isinstance(entries, Mapping) or any(
        key not in known or not isinstance(entry, Mapping) or set(entry) - names for key, entry in entries.items()
    ):
        raise read.unsupported(f"`per_layer_config` must give {' and '.join(sorted(names))} of layers by their number.")

    def heads_of(layer: int) -> tuple[int, int]:
        own = ConfigReader(entries.get(str(layer), {}), f"{read.where}: per_layer_config of layer {layer}")
        return own.integer("head_dim", usual.head_dim), own.integer("num_key_value_heads", usual.num_kv_heads)

    wide, narrow = (
        {heads_of(i) for i, window in enumerate(windows) if (window is None) == is_full} for is_full in (True, False)
    )
    full, local = max(wide), max(narrow or wide)
    if len(wide) > 1 or len(narrow) > 1 or local[0] > full[0] or max(full[1], local[1]) % min(full[1], local[1]):
        raise read.unsupported(f"heads of {sorted(wide)} in layers without a window and {sorted(narrow)} in others.")
    if any(head_dim % 2 or heads % kv_heads for head_dim, kv_heads in (full, local)):
        raise read.error(
            f"head widths must be even, and `num_attention_heads` {heads} a multiple of the KV heads, found (width, KV "
            f"heads) {full} and {local}. Correct them, or {_DOWNLOAD}"
        )
    first = layers - read.integer("num_kv_shared_layers", 0, minimum=0)
    width, factor = usual.intermediate_size, 2 if read.flag("use_double_wide_mlp", False) else 1
    sizes = []
    for layer, window in enumerate(windows):
        head_dim, kv_heads = full if window is None else local
        repeats, alike = repeats_keys and window is None, [i for i in range(min(layer, first)) if windows[i] == window]
        if layer < first:
            sizes.append(LayerSizes(head_dim, kv_heads, width, layer, repeats))
        elif alike:
            sizes.append(LayerSizes(head_dim, kv_heads, width * factor, alike[-1]))
        else:
            raise read.unsupported(f"`num_kv_shared_layers` leaves layer {layer} no earlier one of its type.")
    return tuple(sizes)


def _layer_inputs(read: ConfigReader) -> tuple[int, int] | None:
    """Tokens and width of the embeddings that each layer reads."""
    width = read.integer("hidden_size_per_layer_input", 256, minimum=0)
    count, vocab_size = read.integer("vocab_size_per_layer_input", 262144), read.integer("vocab_size")
    if width and count < vocab_size:
        raise read.unsupported(f"`vocab_size_per_layer_input` {count} is below `vocab_size` {vocab_size}.")
    return (count, width) if width else None


def _windows(read: ConfigReader, family: Family, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer in tokens, a negative chunk, or None."""
    window, rule = None, family.windows
    key, local = "sliding_window", "sliding_attention"
    if rule == "chunked":
        key, local = "attention_chunk_size", "chunked_attention"
    is_on = rule not in ("switch", "layer", "alternate", "unrotated") or read.flag("use_sliding_window", False)
    # Here null means no window; only a missing key means the default one.
    if is_on and rule != "never" and read.config.get(key, family.window) is not None:
        window = read.integer(key, family.window) * (-1 if rule == "chunked" else 1)
    first = read.integer("max_window_layers", 28, minimum=0) if rule in ("layer", "alternate") else 0
    slides = [window is not None] * layers
    if rule == "layer":
        slides = [layer >= first for layer in range(layers)]
    elif rule == "alternate":
        slides = [layer % 2 == 0 and layer < first for layer in range(layers)]
    elif rule in ("unrotated", "chunked"):
        slides = [rotates == (rule == "chunked") for rotates in _listed_rotations(read, layers)]
    elif rule == "pattern":
        every = 0 if read.config.get("layer_types") else read.setting(family.pattern)
        slides = [not every or (layer + 1) % every != 0 for layer in range(layers)]
    usual = tuple(window if slide else None for slide in slides)
    kinds = ["full_attention" if kind == "attention" else kind for kind in read.items("layer_types", str)]
    if not kinds:
        return usual
    if len(kinds) != layers:
        raise read.error(
            f"`layer_types` must have one entry per layer (`num_hidden_layers` {layers}), found {len(kinds)}. "
            f"Correct it, or {_DOWNLOAD}"
        )
    others = {"conv": family.conv_size, "linear_attention": family.delta}
    for kind in kinds:
        if kind not in ("full_attention", local) and others.get(kind) is None:
            raise read.unsupported(
                f'`layer_types` has "{kind}", which the lean decoder lacks; expected full_attention or {local}.'
            )
    sliding = [kind == local for kind in kinds]
    if rule in ("layer", "alternate", "unrotated", "pattern", "chunked"):
        if any(sliding) and window is None:
            advice = f"`{key}`" if rule == "chunked" else "`use_sliding_window` and `sliding_window`"
            raise read.error(f"`layer_types` has {local}, but no window. Correct {advice}.")
        return tuple(window if slides else None for slides in sliding)
    # The models of these families attend alike in all layers and ignore the list.
    if sliding != [entry is not None for entry in usual]:
        raise read.unsupported(
            f"`layer_types` disagrees with {family.architecture}, which attends alike in all layers (its "
            f"`sliding_window` is {window} here). Remove the list if it is a mistake."
        )
    return usual


def _listed_rotations(read: ConfigReader, layers: int) -> tuple[bool, ...]:
    """``no_rope_layers``, in which 0 marks a layer that does not rotate; by default every n-th one."""
    marks = read.items("no_rope_layers", int)
    if not marks:
        every = read.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % every != 0 for layer in range(layers))
    if len(marks) != layers:
        raise read.error(
            f"`no_rope_layers` must have one entry per layer (`num_hidden_layers` {layers}), found {len(marks)}. "
            f"Correct it, or {_DOWNLOAD}"
        )
    return tuple(mark != 0 for mark in marks)


def _rotates(read: ConfigReader, family: Family, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """For each layer, True if it rotates queries and keys."""
    if family.rotates == "listed":
        return _listed_rotations(read, len(windows))
    if family.rotates == "all":
        return (True,) * len(windows)
    if family.rotates == "windowed_or_all" and read.config.get("sliding_window", family.window) is None:
        return (True,) * len(windows)
    return tuple(window is not None for window in windows)


def _ropes(
    read: ConfigReader, family: Family, model_type: str, head_dim: int, max_positions: int, local_dim: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """The RoPE settings, and those of layers with a window, with heads of ``local_dim``, if they have their own."""
    config = dict(read.config)
    if family.rope and not config.get("rope_scaling") and not config.get("rope_parameters"):
        config["rope_parameters"] = family.rope

    def make(settings: Mapping[str, Any], theta: float, head_dim: int) -> RopeConfig:
        return RopeConfig.from_hf(
            settings,
            model_type=model_type,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            theta=theta,
            where=read.where,
        )

    local = family.local_theta
    if local is None:
        return make(config, family.theta, head_dim), None
    tables = config.get("rope_parameters")
    if isinstance(tables, Mapping) and any(isinstance(table, Mapping) for table in tables.values()):
        unknown = sorted(set(tables) - {"full_attention", "sliding_attention"})
        if unknown:
            raise read.unsupported(f"`rope_parameters` has settings for {', '.join(unknown)}.")
        rest = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling")}
        full, slides = (tables.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
        full = {**full, **(config.get("rope_scaling") or {})}
        base = slides.get("rope_theta", read.setting(local))
        return make({**config, "rope_scaling": None, "rope_parameters": full}, family.theta, head_dim), make(
            {**rest, "rope_theta": base, "rope_parameters": slides}, base, local_dim
        )
    if family.is_layered:
        raise read.unsupported("`rope_parameters` must have settings for full_attention and sliding_attention.")
    # transformers 4 stretches the layers with full attention alone.
    rest = {name: value for name, value in config.items() if name != "rope_parameters"}
    base = read.setting(local)
    local_rope = make({**rest, "rope_scaling": None, "rope_theta": base}, base, local_dim)
    return make(rest, family.theta, head_dim), local_rope


def _query_scale(read: ConfigReader, family: Family, rotates: tuple[bool, ...]) -> tuple[float, int, int] | None:
    """Llama 4's growing query scale, which Ministral 3 states among its RoPE settings."""
    if family.tunes_temperature:
        if all(rotates) or not read.flag("attn_temperature_tuning", True):
            return None
        return read.number("attn_scale", 0.1), read.integer("floor_scale", 8192), 1
    table = read.config.get("rope_scaling") or read.config.get("rope_parameters") or family.rope
    if "llama_4_scaling_beta" not in family.rope or table.get("llama_4_scaling_beta") is None:
        return None
    settings = ConfigReader(table, f"{read.where}: RoPE settings")
    return settings.number("llama_4_scaling_beta"), settings.integer("original_max_position_embeddings"), 0


def _moe(read: ConfigReader, experts: ExpertTraits, layers: int) -> MoeConfig | None:
    if experts.beside is not None and not read.flag(experts.beside, False):
        return None
    # transformers 5 writes the second name; 4 wrote the first.
    keys = ("num_experts", "num_local_experts") if experts.count is None else (experts.count,)
    names = [key for key in keys if read.config.get(key) is not None]
    minimum = 0 if experts.has_dense_layers else 1
    counts = {read.integer(key, minimum=minimum) for key in names}
    if len(counts) > 1:
        raise read.error("`num_experts` and `num_local_experts` differ. Remove the one that is wrong.")
    num_experts = counts.pop() if counts else experts.num
    per_token = read.integer(experts.per_token, experts.num_per_token)
    size, shared = read.setting(experts.size), read.setting(experts.shared_size) or 0
    sparse = [True] * layers
    if experts.has_dense_layers:
        dense, step = read.items("mlp_only_layers", int), read.integer("decoder_sparse_step", 1)
        sparse = [num_experts > 0 and layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    if experts.num_dense is not None:
        last = layers - 1 if experts.last_sparse is None else read.integer(experts.last_sparse.name, -1, minimum=-1)
        last = layers - 1 if last < 0 else last
        sparse = [read.setting(experts.num_dense) <= layer <= last for layer in range(layers)]
    if experts.every is not None:
        step = read.integer(experts.every.name, experts.every.default)
        with_experts: Iterable[int] = range(step - 1, layers, step)
        if read.config.get("moe_layers") is not None:
            with_experts = read.items("moe_layers", int)
        sparse = [layer in with_experts for layer in range(layers)]
    if not any(sparse):
        return None
    if per_token > num_experts:
        raise read.error(
            f"`{experts.per_token}` {per_token} is more than the {num_experts} experts there are "
            f"(`{names[0] if names else 'num_experts'}`). Correct one of them."
        )
    if not size:
        raise read.error(f"`{experts.size.name}` must be above 0. Correct it, or {_DOWNLOAD}")
    if experts.num_shared is not None:
        shared = size * int(read.setting(experts.num_shared))
    return MoeConfig(
        num_experts, per_token, size, read.setting(experts.normalise), tuple(sparse), shared,
        scale=read.setting(experts.scale or 1.0), groups=_groups(read, experts, num_experts, per_token),
        clamp=None if experts.clamp is None else (read.setting(experts.clamp[0]), read.setting(experts.clamp[1])),
    )  # fmt: skip


def _groups(read: ConfigReader, experts: ExpertTraits, num_experts: int, per_token: int) -> tuple[int, int] | None:
    """The number of groups of experts, and of those that a token chooses from."""
    if experts.groups == "max":
        method = read.text("topk_method", "greedy")
        if method == "greedy":
            return None
        if method != "group_limited_greedy":
            raise read.unsupported(f'`topk_method` "{method}" is not supported.')
    if experts.groups is None:
        return None
    groups = read.integer("n_group", experts.num_groups[0]), read.integer("topk_group", experts.num_groups[1])
    if num_experts % groups[0] or groups[1] > groups[0] or groups[1] * num_experts // groups[0] < per_token:
        raise read.error(f"`n_group` {groups[0]} and `topk_group` {groups[1]} do not fit {num_experts} experts.")
    return groups


# --- multi-token prediction modules in a target's checkpoint (MTP, DeepSeek-V3, 2412.19437) --------------------------

# Their number in the configs of: DeepSeek, GLM and MiMo; transformers' versions of these; Qwen3.5.
_MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class MtpNames:
    """Names of the modules' tensors. A module also has a decoder layer with the names that the target's layers have."""

    # base, block: prefixes of a module's tensors and of its decoder layer's. ``{k}`` is the module, from 0, and ``{n}``
    # the target's number of layers plus k.
    base: str
    block: str
    # token_norm, state_norm, join, norm: after ``base``, without ``.weight``: the norms of token and state, the
    # projection of both, and the last norm
    token_norm: str
    state_norm: str
    join: str
    norm: str
    states_first: bool = False  # True if the projection reads states before tokens
    num_modules: int = 0
    num_layers: int = 0  # the target's

    def base_of(self, module: int) -> str:
        return self.base.format(k=module, n=self.num_layers + module)

    def block_of(self, module: int) -> str:
        return self.block.format(k=module, n=self.num_layers + module)

    def owns(self, name: str) -> bool:
        """True if a tensor of this name belongs to a module."""
        return name.startswith(tuple(self.base_of(module) for module in range(self.num_modules)))


_MTP_LAYOUTS = (
    # DeepSeek-V3, GLM-4.5
    MtpNames("model.layers.{n}.", "model.layers.{n}.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    # MiMo
    MtpNames(
        "model.mtp_layers.{k}.", "model.mtp_layers.{k}.", "token_layernorm", "hidden_layernorm", "input_proj",
        "final_layernorm", states_first=True,
    ),
    # Qwen3-Next, Mellum
    MtpNames("mtp.", "mtp.layers.{k}.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
)  # fmt: skip


def num_modules(config: Mapping[str, Any], where: str = "config.json") -> int:
    """Return the number of MTP modules that a model's config states. Raises ConfigError if it is impossible."""
    read = ConfigReader(text_config(config), where)
    return max(read.integer(key, 0, minimum=0, maximum=1000) for key in _MTP_KEYS)


def module_names(config: Mapping[str, Any], tensors: Iterable[str], where: str = "config.json") -> MtpNames | None:
    """Return the names of a checkpoint's MTP modules, given the names of all its tensors; None if it has none."""
    names, count = set(tensors), num_modules(config, where)
    num_layers = ConfigReader(text_config(config), where).integer("num_hidden_layers", 0, minimum=0)
    if not count:  # Qwen3-Next's config does not count them
        matches = (re.match(r"mtp\.layers\.(\d{1,3})\.", name) for name in names)
        count = max((1 + int(match[1]) for match in matches if match is not None), default=0)
    for layout in _MTP_LAYOUTS:
        layout = replace(layout, num_modules=count, num_layers=num_layers)
        if count and f"{layout.base_of(0)}{layout.join}.weight" in names:
            return layout
    return None


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return a config's name of the model's architecture, for messages."""
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type")
    return str(first)[:80]
