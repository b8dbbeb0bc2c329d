"""Read ``config.json`` strictly into what the lean decoder needs; an error names the file, the key and the value.

A value that a config leaves out is the default of the family's config class in transformers. ``null`` counts as left
out, except for windows and special tokens, where it means none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from draftwing.errors import CheckpointError, ConfigError, UnsupportedError, shown
from draftwing.storage import check_regular, read_json

_REQUIRED: Final = object()
_DOWNLOAD = "download the model's config.json again."


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a model folder's ``config.json``."""
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
    return config


def _shown(value: object) -> str:
    text = "of hundreds of digits" if isinstance(value, int) and abs(value) > 10**300 else repr(value)
    return f"{type(value).__name__} {text}"[:80]


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
        shown = _shown(self.config.get(key))
        return self.error(f"`{key}` must be {expected}, found {shown}. Correct the value, or {_DOWNLOAD}")

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

ROPE_TYPES: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")


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

    def __post_init__(self) -> None:
        _check_rope_type(self.type, ConfigReader({}, "RopeConfig"))
        yarn, llama3, original = self.type == "yarn", self.type == "llama3", self.original_max_position_embeddings
        min_dim = 4 if self.type == "dynamic" else 2  # dynamic NTK raises the base to rotary_dim / (rotary_dim - 2)
        dim_is_valid = self.rotary_dim % 2 == 0 and min_dim <= self.rotary_dim <= self.head_dim
        dim_text = f"rotary_dim (head_dim times partial_rotary_factor) must be even, from {min_dim} to {self.head_dim}"
        has_original, original_text = isinstance(original, int) and original > 0, "original_max_position_embeddings"
        bands = self.low_freq_factor, self.high_freq_factor
        checks: tuple[tuple[bool, str, object], ...] = (
            (dim_is_valid, dim_text, self.rotary_dim),
            (self.theta > 1, "rope_theta must be above 1", self.theta),
            (self.factor > 0, "factor must be above 0", self.factor),
            (self.max_position_embeddings > 0, "max_position_embeddings must be above 0", self.max_position_embeddings),
            (not (yarn or llama3) or has_original, f"{original_text} must be an integer above 0", original),
            (not yarn or self.beta_fast > 0, "beta_fast must be above 0", self.beta_fast),
            (not yarn or self.beta_slow > 0, "beta_slow must be above 0", self.beta_slow),
            (not llama3 or 0 < bands[0] < bands[1], "0 < low_freq_factor < high_freq_factor must hold", bands),
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
        """Read ``rope_scaling`` and ``rope_theta`` (transformers 4), or else ``rope_parameters`` (transformers 5).

        ``theta`` is the family's default base; ``where`` begins every error message.
        """
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
            kind = "longrope"  # as in transformers: the first Phi-3 configs called it so
        _check_rope_type(kind, read)
        if model_type == "phi3" and kind != "default":
            raise read.error(
                f'RoPE type "{kind}" does not exist for phi3; expected "default". Correct it, or {_DOWNLOAD}'
            )
        share = ConfigReader({**config, **table}, read.where).number("partial_rotary_factor", 1.0)
        # The models of the other families ignore the key, or fail.
        if model_type != "phi3" and share != 1.0:
            raise read.unsupported(
                f"`partial_rotary_factor` {share} has no meaning for {model_type}, only for phi3. Remove it if it is a "
                "mistake."
            )
        base = read.number("rope_theta", whole.number("rope_theta", theta))
        settings = _rope_settings(kind, read, config, max_position_embeddings)
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
        settings["factor"] = read.number("factor")
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

Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
}


@dataclass(frozen=True)
class _Family:
    """Defaults of a family's config class in transformers."""

    architecture: str
    max_positions: int
    kv_heads: int | None = None  # None for as many as query heads
    head_dim: int | None = None  # None for hidden_size / heads
    eps: float = 1e-6
    theta: float = 10000.0
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    window: int | None = 4096
    # layers with a sliding window: never; always; all if "use_sliding_window" is set (switch); or then those from
    # "max_window_layers" on (layer)
    windows: Literal["never", "always", "switch", "layer"] = "always"
    qkv_bias: bool | None = False  # None if the config's ``attention_bias`` decides
    qk_norm: bool = False


_FAMILIES: Final[dict[str, _Family]] = {
    "llama": _Family("LlamaForCausalLM", 2048, bos=1, eos=2, windows="never", qkv_bias=None),
    "mistral": _Family("MistralForCausalLM", 131072, kv_heads=8, bos=1, eos=2),
    "mixtral": _Family("MixtralForCausalLM", 131072, kv_heads=8, eps=1e-5, theta=1e6, bos=1, eos=2, window=None),
    "qwen2": _Family("Qwen2ForCausalLM", 32768, kv_heads=32, windows="layer", qkv_bias=True),
    "mimo": _Family("MiMoForCausalLM", 32768, kv_heads=32, windows="layer", qkv_bias=True),  # Qwen2 with MTP modules
    "qwen3": _Family(
        "Qwen3ForCausalLM", 32768, kv_heads=32, head_dim=128, windows="layer", qkv_bias=None, qk_norm=True
    ),
    "qwen3_moe": _Family("Qwen3MoeForCausalLM", 32768, kv_heads=4, windows="switch", qkv_bias=None, qk_norm=True),
    "phi3": _Family("Phi3ForCausalLM", 4096, eps=1e-5, bos=1, eos=32000, pad=32000, window=None),
}

# Not a set: a damaged config may have a list where the name belongs, which cannot be looked up in one.
LEAN_MODEL_TYPES: tuple[str, ...] = tuple(sorted(_FAMILIES))


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts."""

    # num_experts, num_experts_per_token: MLPs of a layer, and those that each token goes through
    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # inner width of an expert
    norm_topk_prob: bool  # True if the probabilities of the chosen experts are rescaled to sum to one
    sparse_layers: tuple[bool, ...]  # for each layer, True if it has experts instead of an ordinary MLP


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama-like decoder."""

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
    # for each layer, None for full attention, or W if a token sees itself and the W - 1 before it
    sliding_windows: tuple[int | None, ...]
    moe: MoeConfig | None
    bos_id: int | None
    # may be empty. Special tokens may lie outside the vocabulary, as defaults of tiny models do.
    eos_ids: tuple[int, ...]
    pad_id: int | None
    dtype: str | None  # the checkpoint's, such as "bfloat16"; None if the config does not name it

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
        """Read the content of a ``config.json``; ``where`` begins every error message."""
        read = ConfigReader(config, where)
        model_type = _model_type(read)
        family = _FAMILIES[model_type]
        if config.get("quantization_config"):
            raise read.unsupported("`quantization_config` is set: the weights are quantised.")
        layers, heads, kv_heads, head_dim = _heads(read, family)
        activation = read.text("hidden_act", "silu")
        if activation not in _ACTIVATIONS:
            raise read.unsupported(
                f'activation `hidden_act` "{activation}" is not supported; expected one of {", ".join(_ACTIVATIONS)}.'
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
            rms_norm_eps=read.number("rms_norm_eps", family.eps, minimum=0),
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
            eos_ids=read.ids("eos_token_id", family.eos, is_list=True),
            pad_id=next(iter(read.ids("pad_token_id", family.pad)), None),
            dtype=read.text("dtype") or read.text("torch_dtype") or None,
        )


def _model_type(read: ConfigReader) -> str:
    """The family, by ``architectures[0]`` and ``model_type``, which must agree if both are there."""
    architecture = next(iter(read.items("architectures", str)), "")
    model_type = read.text("model_type")
    if not architecture and not model_type:
        raise read.error(
            "expected `architectures` or `model_type`, found neither. Download the model's config.json again."
        )
    architectures = {family.architecture: name for name, family in _FAMILIES.items()}
    named = architectures.get(architecture) if architecture else model_type
    if named not in _FAMILIES:
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


def _heads(read: ConfigReader, family: _Family) -> tuple[int, int, int, int]:
    """(layers, query heads, KV heads, head width), checked against each other."""
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
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
    # Bounded, because a list of that length is made before any weight could show that the number is absurd.
    return read.integer("num_hidden_layers", maximum=10000), heads, kv_heads, head_dim


def _windows(read: ConfigReader, family: _Family, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer in tokens, or None."""
    window = None
    is_on = family.windows not in ("switch", "layer") or read.flag("use_sliding_window", False)
    # Here null means no window; only a missing key means the default one.
    if is_on and family.windows != "never" and read.config.get("sliding_window", family.window) is not None:
        window = read.integer("sliding_window", family.window)
    first = read.integer("max_window_layers", 28, minimum=0) if family.windows == "layer" else 0
    usual = tuple(window if layer >= first else None for layer in range(layers))
    kinds = ["full_attention" if kind == "attention" else kind for kind in read.items("layer_types", str)]
    if not kinds:
        return usual
    if len(kinds) != layers:
        raise read.error(
            f"`layer_types` must have one entry per layer (`num_hidden_layers` {layers}), found {len(kinds)}. "
            f"Correct it, or {_DOWNLOAD}"
        )
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise read.unsupported(
                f'`layer_types` has "{kind}", which the lean decoder lacks; expected full_ or sliding_attention.'
            )
    sliding = [kind == "sliding_attention" for kind in kinds]
    if family.windows == "layer":
        if any(sliding) and window is None:
            raise read.error(
                "`layer_types` has sliding_attention, but no window. Correct `use_sliding_window` and `sliding_window`."
            )
        return tuple(window if slides else None for slides in sliding)
    # The models of these families attend alike in all layers and ignore the list.
    if sliding != [entry is not None for entry in usual]:
        raise read.unsupported(
            f"`layer_types` disagrees with {family.architecture}, which attends alike in all layers (its "
            f"`sliding_window` is {window} here). Remove the list if it is a mistake."
        )
    return usual


def _moe(read: ConfigReader, model_type: str, layers: int) -> MoeConfig | None:
    if model_type not in ("mixtral", "qwen3_moe"):
        return None
    # transformers 5 writes the second name; 4 wrote the first.
    names = [key for key in ("num_experts", "num_local_experts") if read.config.get(key) is not None]
    counts = {read.integer(key, minimum=1 if model_type == "mixtral" else 0) for key in names}
    if len(counts) > 1:
        raise read.error("`num_experts` and `num_local_experts` differ. Remove the one that is wrong.")
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
        raise read.error(
            f"`num_experts_per_tok` {per_token} is more than the {num_experts} experts there are "
            f"(`{names[0] if names else 'num_experts'}`). Correct one of them."
        )
    return MoeConfig(num_experts, per_token, size, normalise, tuple(sparse))


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
    text = config.get("text_config")
    read = ConfigReader({**config, **text} if isinstance(text, dict) else config, where)
    return max(read.integer(key, 0, minimum=0, maximum=1000) for key in _MTP_KEYS)


def module_names(config: Mapping[str, Any], tensors: Iterable[str], where: str = "config.json") -> MtpNames | None:
    """Return the names of a checkpoint's MTP modules, given the names of all its tensors; None if it has none."""
    text, names, count = config.get("text_config"), set(tensors), num_modules(config, where)
    read = ConfigReader({**config, **text} if isinstance(text, dict) else config, where)
    num_layers = read.integer("num_hidden_layers", 0, minimum=0)
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
