"""What a config says of rotary position embeddings, read strictly.

Both spellings are read: ``rope_theta`` with ``rope_scaling`` (transformers 4) and ``rope_parameters`` (transformers 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftwing.errors import ConfigError, UnsupportedError

__all__ = ["ROPE_TYPES", "RopeConfig", "check_rope_type"]

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
        kind = _kind(table, model_type, inside)
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


def _kind(table: Mapping[str, Any], model_type: str, where: str) -> str:
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
