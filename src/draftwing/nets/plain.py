"""The usual config of a net of one's own, as ``heads.plain`` writes it: a subclass adds what its net needs more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from draftwing.errors import ConfigError
from draftwing.model.config import ModelConfig
from draftwing.model.rope_config import RopeConfig
from draftwing.nets.calibration import Calibration
from draftwing.nets.eagle_config import TargetId

__all__ = ["PlainConfig"]


@dataclass(frozen=True)
class PlainConfig:
    """What every net's config says: a ``nets.base.NetConfig``.

    A subclass is a frozen dataclass too; its fields are numbers, strings, tuples of them, or such dataclasses.

    Attributes:
        taps: the target's hidden states that are read, counted as transformers' ``hidden_states``.
        vocab_size: of the target.
        hidden_size: of the target, and of a state.
        rope: the rotation of its positions: the target's, which a net without attention has no use for.
        calibration: how its scores become chances at T > 0.
        target: which target it was trained for.

    Raises:
        ConfigError: no taps, or a size below 1.
    """

    taps: tuple[int, ...]
    vocab_size: int
    hidden_size: int
    rope: RopeConfig
    calibration: Calibration = field(default_factory=Calibration)
    target: TargetId | None = None

    def __post_init__(self) -> None:
        if not self.taps or min(self.taps) < 0:
            raise ConfigError(f"taps must name at least 1 hidden state of the target, from 0 on, found {self.taps}")
        if min(self.vocab_size, self.hidden_size) < 1:
            raise ConfigError(
                f"vocab_size and hidden_size must be at least 1, found {self.vocab_size} and {self.hidden_size}"
            )

    @classmethod
    def for_target(cls, like: ModelConfig, taps: tuple[int, ...], **changes: Any) -> Self:
        """The config of a new net for a target of this shape; ``changes``: any other field."""
        sizes = {"vocab_size": like.vocab_size, "hidden_size": like.hidden_size, "rope": like.rope}
        return cls(taps=taps, **{**sizes, **changes})
