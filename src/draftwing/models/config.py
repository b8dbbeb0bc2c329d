"""``config.json`` from disk, and typed look-ups in it.

Every failure names the file, the key and the value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from draftwing.errors import CheckpointError, ConfigError, UnsupportedError

_REQUIRED: Final = object()


def read_config(folder: Path) -> dict[str, Any]:
    """The dict in a model folder's ``config.json``.

    Raises:
        CheckpointError: no such folder, or no readable ``config.json`` in it.
        ConfigError: it is not a JSON object.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a model folder, found none. Check the path.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: expected config.json in the model folder, found none. Point to a folder that "
            "save_pretrained wrote, or download the model again."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). Check the file and its permissions.") from error
    except ValueError as error:  # broken JSON, or not UTF-8
        raise ConfigError(f"{path}: expected JSON, found something else ({error}). Download it again.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {_kind(config)}. Download it again.")
    return config


def _kind(value: object) -> str:
    shown = "of hundreds of digits" if isinstance(value, int) and abs(value) > 10**300 else repr(value)
    return f"{type(value).__name__} {shown}"[:80]


class ConfigReader:
    """Typed look-ups in a config; every failure is a ConfigError that names the key and the value."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def wrong(self, key: str, expected: str) -> ConfigError:
        """The error to raise where ``key`` is not what was expected."""
        return ConfigError(
            f"{self.where}: `{key}` must be {expected}, found {_kind(self.config.get(key))}. "
            "Correct the value, or download the model's config.json again."
        )

    def _get(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is None:
            value = default
        if value is _REQUIRED:
            raise ConfigError(
                f"{self.where}: required key `{key}` is missing. Add it, or download the model's config.json again."
            )
        return value

    def integer(self, key: str, default: Any = _REQUIRED, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        """A whole number in a range."""
        value = self._get(key, default)
        # JSON's true is Python's int 1; it is not a size.
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.wrong(key, f"an integer of at least {minimum}")
        if value > maximum:
            raise self.wrong(key, f"an integer of at most {maximum}")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A finite number of at least 0."""
        value = self._get(key, default)
        # The bound also keeps out NaN, infinity and integers that no float can hold.
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e300:
            raise self.wrong(key, "a finite number of at least 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        """A list of ``kind``; empty where the key is missing."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self.wrong(key, f"a list of {kind.__name__}")
        return value

    def ids(self, key: str, default: int | None, several: bool = False) -> tuple[int, ...]:
        """Token ids; null and, as some configs on the Hub have it, a negative id mean none."""
        value = self.config.get(key, default)
        ids = value if several and isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise self.wrong(key, "a token id, a list of them or null" if several else "a token id or null")
        return tuple(item for item in ids if item >= 0)


# What a config says of rotary position embeddings, read strictly.
#
# Both spellings are read: ``rope_theta`` with ``rope_scaling`` (transformers 4) and ``rope_parameters`` (transformers
# 5).


ROPE_TYPES: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")

_ADAPTER = 'Use engine="transformers", which runs it through the adapter.'


def check_rope_type(kind: str, where: str = "RopeConfig") -> None:
    """Raise UnsupportedError, naming ``kind`` and what there is instead, unless it is one of ROPE_TYPES."""
    if kind not in ROPE_TYPES:
        raise UnsupportedError(
            f'{where}: RoPE type "{kind}" is not supported by the lean decoder; expected one of '
            f"{', '.join(ROPE_TYPES)}. {_ADAPTER}"
        )


@dataclass(frozen=True)
class RopeConfig:
    """What determines the rotation of a model's queries and keys.

    ``head_dim`` is a head's width; its first ``rotary_dim`` numbers are rotated and the rest pass through.
    ``max_position_embeddings`` is the context in tokens. ``factor`` stretches the context (all types but
    default). ``original_max_position_embeddings``, in tokens, is the context before stretching (llama3 and
    yarn, required there). ``low_freq_factor`` and ``high_freq_factor`` bound llama3's bands. ``attention_factor``
    multiplies cosine and sine (yarn; None: derived from ``factor``, ``mscale`` and ``mscale_all_dim``);
    ``beta_fast``, ``beta_slow`` (rotations over the original context) and ``truncate`` bound yarn's ramp.

    Raises:
        UnsupportedError: for a type outside ROPE_TYPES.
        ConfigError: for values that cannot be computed with.
    """

    type: str
    theta: float
    head_dim: int
    rotary_dim: int
    max_position_embeddings: int
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_rope_type(self.type)
        # Dynamic NTK raises the base to rotary_dim / (rotary_dim - 2).
        least = 4 if self.type == "dynamic" else 2
        yarn, llama3, original = self.type == "yarn", self.type == "llama3", self.original_max_position_embeddings
        checks: tuple[tuple[bool, str, object], ...] = (
            (
                self.rotary_dim % 2 == 0 and least <= self.rotary_dim <= self.head_dim,
                f"rotary_dim (head_dim times partial_rotary_factor) must be even, from {least} to {self.head_dim}",
                self.rotary_dim,
            ),
            (self.theta > 1, "rope_theta must be above 1", self.theta),
            (self.factor > 0, "factor must be above 0", self.factor),
            (self.max_position_embeddings > 0, "max_position_embeddings must be above 0", self.max_position_embeddings),
            (
                not (yarn or llama3) or (isinstance(original, int) and original > 0),
                "original_max_position_embeddings must be an integer above 0",
                original,
            ),
            (not yarn or self.beta_fast > 0, "beta_fast must be above 0", self.beta_fast),
            (not yarn or self.beta_slow > 0, "beta_slow must be above 0", self.beta_slow),
            (
                not llama3 or 0 < self.low_freq_factor < self.high_freq_factor,
                "0 < low_freq_factor < high_freq_factor must hold",
                (self.low_freq_factor, self.high_freq_factor),
            ),
            (isinstance(self.truncate, bool), "truncate must be true or false", self.truncate),
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
        """Read the RoPE settings of a ``config.json``: its ``rope_scaling`` or else its ``rope_parameters``.

        ``theta`` is the family's default base; ``where`` begins every error message. Raises as the class does.
        """
        key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        table, inside = config.get(key) or {}, f"{where}: {key}"
        if not isinstance(table, Mapping):
            raise ConfigError(f"{where}: `{key}` must be an object, found {table!r:.60}. Correct it, or remove it.")
        if any(isinstance(value, Mapping) for value in table.values()):
            raise UnsupportedError(
                f"{inside}: expected one set of RoPE settings, found several ({', '.join(table)}), which the lean "
                f"decoder lacks. {_ADAPTER}"
            )
        kind = _kind_rope_config(table, model_type, inside)
        settings = _scaling(kind, table, config, max_position_embeddings, inside)
        share = _number({**config, **table}, "partial_rotary_factor", inside, 1.0)
        # The other families' models ignore the key or fail over it.
        if model_type != "phi3" and share != 1.0:
            raise UnsupportedError(
                f"{inside}: `partial_rotary_factor` {share} has no meaning for {model_type}, only for phi3. Remove it "
                f"if it is a mistake. {_ADAPTER}"
            )
        base = _number(table, "rope_theta", inside, _number(config, "rope_theta", where, theta))
        try:
            return cls(kind, base, head_dim, int(head_dim * share), max_position_embeddings, **settings)
        except ConfigError as error:
            raise type(error)(f"{where}: {error}") from error

    @property
    def position_only(self) -> bool:
        """Whether the rotation depends on the position alone (every type but dynamic)."""
        return self.type != "dynamic"

    @property
    def original_context(self) -> int:
        """Tokens of the context before stretching; the whole context where nothing is said of it."""
        return self.original_max_position_embeddings or self.max_position_embeddings


def _kind_rope_config(table: Mapping[str, Any], model_type: str, where: str) -> str:
    kind = table.get("rope_type") or table.get("type") or "default"
    if model_type == "phi3" and kind == "yarn":
        kind = "longrope"  # what transformers takes it for, too: the first Phi-3 configs called it so
    check_rope_type(kind, where)
    if model_type == "phi3" and kind != "default":
        raise ConfigError(
            f'{where}: RoPE type "{kind}" does not exist for phi3; expected "default". Correct it, or download the '
            "model's config.json again."
        )
    return str(kind)


def _number(table: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    """A finite number; null counts as missing, and missing without a default is an error."""
    value = table.get(key)
    if value is None:
        value = default
    # The bound also keeps out NaN, infinity and integers that no float can hold.
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
        raise ConfigError(
            f"{where}: `{key}` must be a finite number, found {value!r:.60}. Correct it, or download the model's "
            "config.json again."
        )
    return float(value)


def _scaling(
    kind: str, table: Mapping[str, Any], config: Mapping[str, Any], max_positions: int, where: str
) -> dict[str, Any]:
    """RopeConfig's fields that belong to one type only."""
    found: dict[str, Any] = {}
    if kind in ("llama3", "yarn"):
        # A key beside the RoPE settings goes before one among them, as in transformers.
        both = {**table, **{key: value for key, value in config.items() if value is not None}}
        original = _number(both, "original_max_position_embeddings", where, max_positions)
        found["original_max_position_embeddings"] = int(original) if original.is_integer() else original
    if kind == "yarn" and "factor" in table and table["factor"] is None and original > 0:
        found["factor"] = max_positions / original  # DeepSeek's way of writing it
    elif kind != "default":
        found["factor"] = _number(table, "factor", where)
    if kind == "llama3":
        found.update({key: _number(table, key, where) for key in ("low_freq_factor", "high_freq_factor")})
    if kind == "yarn":
        optional = ("attention_factor", "mscale", "mscale_all_dim")
        found.update({key: _number(table, key, where) for key in optional if table.get(key) is not None})
        # A zero means the default, too.
        found["beta_fast"] = _number(table, "beta_fast", where, 32.0) or 32.0
        found["beta_slow"] = _number(table, "beta_slow", where, 1.0) or 1.0
        found["truncate"] = table.get("truncate", True) or False  # null means false, as in transformers
    return found


# A model's ``config.json``, read strictly into what the lean decoder needs.
#
# Eight families are read: llama, mistral, mixtral, qwen2, mimo (a Qwen2 with MTP modules beside it), qwen3, qwen3_moe
# and
# phi3. Whatever a config leaves out takes the default of that family's config class in transformers (``null`` counts as
# left out, except where null means "none": windows and special tokens). Both spellings of RoPE are read: ``rope_theta``
# with ``rope_scaling`` (transformers 4) and ``rope_parameters`` (transformers 5).


Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
}
_ADAPTER_config = 'Use engine="transformers", which runs it through the adapter.'


@dataclass(frozen=True)
class _Family:
    """The defaults of a family's config class in transformers, and how it reads its windows."""

    architecture: str
    max_positions: int
    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / heads
    eps: float = 1e-6
    theta: float = 10000.0
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    window: int | None = 4096
    # "never"; "always" when set; behind "use_sliding_window"; or behind that and by "layer"
    windows: Literal["never", "always", "switch", "layer"] = "always"
    qkv_bias: bool | None = False  # None: as the config's attention_bias says
    qk_norm: bool = False


_FAMILIES: Final[dict[str, _Family]] = {
    "llama": _Family("LlamaForCausalLM", 2048, bos=1, eos=2, windows="never", qkv_bias=None),
    "mistral": _Family("MistralForCausalLM", 131072, kv_heads=8, bos=1, eos=2),
    "mixtral": _Family("MixtralForCausalLM", 131072, kv_heads=8, eps=1e-5, theta=1e6, bos=1, eos=2, window=None),
    "qwen2": _Family("Qwen2ForCausalLM", 32768, kv_heads=32, windows="layer", qkv_bias=True),
    "mimo": _Family("MiMoForCausalLM", 32768, kv_heads=32, windows="layer", qkv_bias=True),
    "qwen3": _Family(
        "Qwen3ForCausalLM", 32768, kv_heads=32, head_dim=128, windows="layer", qkv_bias=None, qk_norm=True
    ),
    "qwen3_moe": _Family("Qwen3MoeForCausalLM", 32768, kv_heads=4, windows="switch", qkv_bias=None, qk_norm=True),
    "phi3": _Family("Phi3ForCausalLM", 4096, eps=1e-5, bos=1, eos=32000, pad=32000, window=None),
}

LEAN_MODEL_TYPES: frozenset[str] = frozenset(_FAMILIES)


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts: each token goes through ``num_experts_per_token`` of ``num_experts`` small MLPs.

    ``intermediate_size`` is an expert's inner width. ``norm_topk_prob``: whether the chosen experts' router
    probabilities are rescaled to sum to one. ``sparse_layers``: for each layer, whether it has experts (True) or an
    ordinary MLP of the model's own ``intermediate_size``.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: tuple[bool, ...]

    def is_sparse(self, layer: int) -> bool:
        """Whether ``layer`` (counted from 0) has experts."""
        return self.sparse_layers[layer]


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-like decoder's shape.

    Sizes are in numbers per token (``hidden_size``, ``intermediate_size``, ``head_dim``) or counts.
    ``sliding_windows`` has one entry per layer: None for full attention, or W where a token sees itself and the
    W - 1 tokens before it. ``eos_ids`` may be empty. Token ids may lie outside the vocabulary (as defaults of
    tiny models do): such a token never comes. ``dtype`` is the checkpoint's own, such as "bfloat16", if it says.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: Activation
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    moe: MoeConfig | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    dtype: str | None

    @property
    def context_length(self) -> int:
        """Tokens that a row may hold: RoPE that stretches the context counts, as configs write the length before it."""
        positions, rope = self.max_position_embeddings, self.rope
        if rope.type in ("linear", "dynamic"):
            return int(positions * rope.factor)
        if rope.type == "yarn" and rope.original_max_position_embeddings is not None:
            return max(positions, int(rope.original_max_position_embeddings * rope.factor))
        return positions

    @classmethod
    def from_hf(cls, config: dict[str, Any], where: str = "config.json") -> ModelConfig:
        """Read the dict of a Hugging Face ``config.json``; ``where`` begins every error message.

        Raises:
            ConfigError: a required key is missing, or a value has the wrong type or cannot be meant.
            UnsupportedError: an architecture, activation, RoPE type or quantisation that the lean decoder lacks.
        """
        model_type = _model_type(config, where)
        family, read = _FAMILIES[model_type], ConfigReader(config, where)
        if config.get("quantization_config"):
            raise UnsupportedError(f"{where}: `quantization_config` is set: the weights are quantised. {_ADAPTER}")
        layers, heads, kv_heads, head_dim = _heads(read, family)
        activation = read.text("hidden_act", "silu")
        if activation not in _ACTIVATIONS:
            raise UnsupportedError(
                f'{where}: activation `hidden_act` "{activation}" is not supported by the lean decoder; expected one '
                f"of {', '.join(_ACTIVATIONS)}. {_ADAPTER}"
            )
        max_positions = read.integer("max_position_embeddings", family.max_positions)
        attention_bias = read.flag("attention_bias", False) if family.qkv_bias is None else None
        return cls(
            model_type=model_type,
            vocab_size=read.integer("vocab_size"),
            hidden_size=read.integer("hidden_size"),
            intermediate_size=read.integer("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=read.number("rms_norm_eps", family.eps),
            activation=_ACTIVATIONS[activation],
            max_position_embeddings=max_positions,
            tie_word_embeddings=read.flag("tie_word_embeddings", False),
            qkv_bias=bool(family.qkv_bias) if attention_bias is None else attention_bias,
            o_bias=bool(attention_bias),
            mlp_bias=read.flag("mlp_bias", False) if model_type == "llama" else False,
            qk_norm=family.qk_norm,
            rope=RopeConfig.from_hf(
                config,
                model_type=model_type,
                head_dim=head_dim,
                max_position_embeddings=max_positions,
                theta=family.theta,
                where=where,
            ),
            sliding_windows=_windows(read, family, layers),
            moe=_moe(read, model_type, layers),
            bos_id=next(iter(read.ids("bos_token_id", family.bos)), None),
            eos_ids=read.ids("eos_token_id", family.eos, several=True),
            pad_id=next(iter(read.ids("pad_token_id", family.pad)), None),
            dtype=read.text("dtype", "") or read.text("torch_dtype", "") or None,
        )


def _model_type(config: Mapping[str, Any], where: str) -> str:
    """The family, by ``architectures[0]`` and ``model_type``, which must agree where both are there."""
    read = ConfigReader(config, where)
    architecture = next(iter(read.items("architectures", str)), "")
    model_type = read.text("model_type", "")
    if not architecture and not model_type:
        raise ConfigError(
            f"{where}: expected `architectures` or `model_type`, found neither. Download the model's config.json again."
        )
    known = {family.architecture: name for name, family in _FAMILIES.items()}
    named = known.get(architecture) if architecture else model_type
    if named not in _FAMILIES:
        raise UnsupportedError(
            f"{where}: architecture {architecture or model_type} is not supported by the lean decoder; expected one "
            f"of {', '.join(known)}. {_ADAPTER}"
        )
    if model_type and named != model_type:
        raise ConfigError(
            f'{where}: `architectures` says {architecture}, of model type "{named}", but `model_type` is '
            f'"{model_type}". Correct the one that is wrong.'
        )
    return named


def _heads(read: ConfigReader, family: _Family) -> tuple[int, int, int, int]:
    """(layers, query heads, key-value heads, head width), checked against each other."""
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    # Written as null, the count is the query heads'; left out, it is the config class's own default.
    kv_default = heads if "num_key_value_heads" in read.config else family.kv_heads or heads
    kv_heads = read.integer("num_key_value_heads", kv_default)
    head_dim = read.integer("head_dim", family.head_dim or hidden // heads or 1)
    if head_dim * heads != hidden and not read.config.get("head_dim") and not family.head_dim:
        raise ConfigError(
            f"{read.where}: `hidden_size` {hidden} is not divisible by `num_attention_heads` {heads}, and there is no "
            "`head_dim`. Correct one of them, or download the model's config.json again."
        )
    if heads % kv_heads:
        raise ConfigError(
            f"{read.where}: `num_attention_heads` {heads} is not divisible by `num_key_value_heads` {kv_heads}"
            f"{'' if read.config.get('num_key_value_heads') else ', its default'}. Correct one of them."
        )
    if head_dim % 2:
        raise ConfigError(
            f"{read.where}: `head_dim` must be even, because RoPE rotates pairs, found {head_dim}. "
            "Correct it, or download the model's config.json again."
        )
    # Bounded, because a list of that length is made before any weight could show that the number is absurd.
    return read.integer("num_hidden_layers", maximum=10000), heads, kv_heads, head_dim


def _windows(read: ConfigReader, family: _Family, layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window in tokens, or None."""
    window = None
    switched = family.windows not in ("switch", "layer") or read.flag("use_sliding_window", False)
    # Here null means no window; only a missing key means the default one.
    if switched and family.windows != "never" and read.config.get("sliding_window", family.window) is not None:
        window = read.integer("sliding_window", family.window)
    first = read.integer("max_window_layers", 28, minimum=0) if family.windows == "layer" else 0
    usual = [window if layer >= first else None for layer in range(layers)]
    renamed = {"attention": "full_attention"}
    kinds = [renamed.get(kind, kind) for kind in read.items("layer_types", str)]
    if not kinds:
        return tuple(usual)
    if len(kinds) != layers:
        raise ConfigError(
            f"{read.where}: `layer_types` must have one entry per layer (`num_hidden_layers` {layers}), found "
            f"{len(kinds)}. Correct it, or download the model's config.json again."
        )
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedError(
                f'{read.where}: `layer_types` has "{kind}", which the lean decoder lacks; expected full_attention or '
                f"sliding_attention. {_ADAPTER}"
            )
    sliding = [kind == "sliding_attention" for kind in kinds]
    if family.windows == "layer":
        if any(sliding) and window is None:
            raise ConfigError(
                f"{read.where}: `layer_types` has sliding_attention, but no window: expected `use_sliding_window` true "
                "and a `sliding_window`. Correct them."
            )
        return tuple(window if slides else None for slides in sliding)
    # The family's model has one kind of layer only and would not look at the list; a list that says otherwise
    # comes from another model.
    if sliding != [entry is not None for entry in usual]:
        raise UnsupportedError(
            f"{read.where}: `layer_types` disagrees with {family.architecture}, which attends alike in all layers (its "
            f"`sliding_window` is {window} here). Remove the list if it is a mistake. {_ADAPTER}"
        )
    return tuple(usual)


def _moe(read: ConfigReader, model_type: str, layers: int) -> MoeConfig | None:
    if model_type not in ("mixtral", "qwen3_moe"):
        return None
    # transformers reads, and since version 5 writes, the one name for the other.
    names = [key for key in ("num_experts", "num_local_experts") if read.config.get(key) is not None]
    counts = {read.integer(key, minimum=1 if model_type == "mixtral" else 0) for key in names}
    if len(counts) > 1:
        raise ConfigError(f"{read.where}: `num_experts` and `num_local_experts` differ. Remove the one that is wrong.")
    if model_type == "mixtral":
        num_experts, per_token = counts.pop() if counts else 8, read.integer("num_experts_per_tok", 2)
        size, normalise = read.integer("intermediate_size"), True
        sparse = [True] * layers
    else:
        num_experts, per_token = counts.pop() if counts else 128, read.integer("num_experts_per_tok", 8)
        size, normalise = read.integer("moe_intermediate_size", 768), read.flag("norm_topk_prob", False)
        dense, step = read.items("mlp_only_layers", int), read.integer("decoder_sparse_step", 1)
        sparse = [num_experts > 0 and layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    if not any(sparse):
        return None
    if per_token > num_experts:
        raise ConfigError(
            f"{read.where}: `num_experts_per_tok` {per_token} is more than the {num_experts} experts there are "
            f"(`{names[0] if names else 'num_experts'}`). Correct one of them."
        )
    return MoeConfig(num_experts, per_token, size, normalise, tuple(sparse))
