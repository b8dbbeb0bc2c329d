"""The shape of an EAGLE net, and the target that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.model.config import Activation, ModelConfig
from draftwing.model.embedding import Embedding
from draftwing.model.linear import Linear
from draftwing.model.rope_config import RopeConfig
from draftwing.nets.calibration import Calibration

__all__ = ["EagleConfig", "Inputs", "TargetId", "check_parts", "default_taps"]

# What an entry reads, in the terms of the EAGLE paper's ablation.
Inputs = Literal["token", "feature", "feature-unshifted", "feature-shifted"]


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's low, middle and high tap: the inputs of layers 2, L // 2 and L - 3, as every engine defaults to.

    Raises:
        ConfigError: a target of fewer than 3 layers, which has no such layers.
    """
    if num_layers < 3:
        raise ConfigError(
            f"EAGLE-3's usual taps need a target of 3 layers or more, found {num_layers}: give taps (from 0 to "
            f"{num_layers}), or use EAGLE-1, which reads the last hidden state"
        )
    return 2, num_layers // 2, num_layers - 3


@dataclass(frozen=True)
class TargetId:
    """Which target a head was trained for: its name, and what can be checked of it."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    vocab_hash: str = ""


@dataclass(frozen=True)
class EagleConfig:
    """An EAGLE net's shape.

    Attributes:
        version: 1 or 3.
        taps: the target's hidden states that are read, counted as transformers' ``hidden_states``.
        vocab_size, draft_vocab_size: of the target, and of this net's own head.
        inputs: what an entry reads; everything but ``feature-shifted`` is for the ablation.
        fc_bias: EAGLE-1's fc has a bias.
        norm_before_residual: the layer's residual is the normed state (some engines' variant of EAGLE-3).
        norm_before_fc: one RMSNorm over all taps together before fc.
        fc_norm, norm_output: EAGLE-3.1: an RMSNorm for each tap; the normed state is what is fed back.
        num_layers: decoder layers; the first is the widened one, the others are plain.
        qkv_bias: queries, keys and values of every layer have biases.
        target_hidden_size: width of the target's features in EAGLE-3, where it is not ``hidden_size``.
        own_embedding: the net has a token embedding of its own in place of the target's.
        calibration: how its scores become chances at T > 0.
        target: which target it was trained for; None in foreign heads that do not say.

    Raises:
        ConfigError: values that do not go together.
    """

    version: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: Activation
    rope: RopeConfig
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    inputs: Inputs = "feature-shifted"
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    num_layers: int = 1
    qkv_bias: bool = False
    target_hidden_size: int | None = None
    own_embedding: bool = False
    calibration: Calibration = field(default_factory=Calibration)
    target: TargetId | None = None

    def __post_init__(self) -> None:
        if self.version not in (1, 3):
            raise ConfigError(f"an EAGLE net is of version 1 or 3, found {self.version}")
        if self.inputs not in get_args(Inputs):
            raise ConfigError(f"unknown draft inputs {self.inputs!r}: choose one of {', '.join(get_args(Inputs))}")
        if self.version == 1 and (len(self.taps) != 1 or self.draft_vocab_size != self.vocab_size):
            raise ConfigError("an EAGLE-1 net reads one tap and the target's own LM head: one tap, no draft vocabulary")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(
                f"the draft vocabulary must have 1 to {self.vocab_size} tokens, found {self.draft_vocab_size}"
            )
        if self.num_layers < 1:
            raise ConfigError(f"an EAGLE net needs at least 1 layer, found {self.num_layers}")
        if self.target_hidden_size is not None and self.target_hidden_size < 1:
            raise ConfigError(f"target_hidden_size must be at least 1, found {self.target_hidden_size}")
        if self.feature_size != self.hidden_size and self.version == 1:
            raise ConfigError(
                f"an EAGLE-1 net predicts the target's features and must be as wide as they are ({self.feature_size}), "
                f"found hidden_size {self.hidden_size}"
            )
        if self.feature_size != self.hidden_size and not self.own_embedding:
            raise ConfigError(
                f"a net of width {self.hidden_size} cannot read the embedding of a target of width "
                f"{self.feature_size}: it needs an embedding of its own"
            )

    @classmethod
    def for_target(
        cls, version: int, like: ModelConfig, draft_vocab_size: int | None = None, **changes: Any
    ) -> EagleConfig:
        """The usual net for a target: one layer of the target's own shape, the default taps.

        Args:
            like: the target's shape.
            changes: any other field, such as ``inputs`` or ``fc_norm``.

        Raises:
            ConfigError: EAGLE-3's taps for a target of fewer than 3 layers, which has no such layers.
        """
        if "taps" not in changes:
            changes["taps"] = (like.num_layers,) if version == 1 else default_taps(like.num_layers)
        shape: dict[str, Any] = {
            "version": version,
            "hidden_size": like.hidden_size,
            "intermediate_size": like.intermediate_size,
            "num_heads": like.num_heads,
            "num_kv_heads": like.num_kv_heads,
            "head_dim": like.head_dim,
            "rms_norm_eps": like.rms_norm_eps,
            "activation": like.activation,
            "rope": like.rope,
            "max_position_embeddings": like.max_position_embeddings,
            "vocab_size": like.vocab_size,
            "draft_vocab_size": (draft_vocab_size if version == 3 else None) or like.vocab_size,
            **changes,
        }
        return cls(**shape)

    @property
    def feature_size(self) -> int:
        """Width of each of the target's hidden states that the net reads."""
        return self.hidden_size if self.target_hidden_size is None else self.target_hidden_size

    @property
    def has_draft_vocab(self) -> bool:
        """Whether draft ids differ from target ids."""
        return self.draft_vocab_size < self.vocab_size


def check_parts(
    config: EagleConfig, embedding: Tensor | Embedding, target_head: Linear | None, target_ids: Tensor | None
) -> None:
    """Raise ConfigError where what a net is given does not fit its config (shapes as in ``EagleNet``)."""
    wanted = (config.vocab_size, config.hidden_size)
    if tuple(embedding.shape) != wanted:
        raise ConfigError(
            f"the head is made for an embedding of {wanted}, the target's is {tuple(embedding.shape)}: a head only "
            f"fits the target that it was trained for"
        )
    if config.version == 1 and target_head is None:
        raise ConfigError("an EAGLE-1 net needs the target's LM head")
    if config.has_draft_vocab != (target_ids is not None) or (
        target_ids is not None and target_ids.shape != (config.draft_vocab_size,)
    ):
        raise ConfigError(
            f"the draft vocabulary has {config.draft_vocab_size} of {config.vocab_size} tokens, and target_ids "
            f"{None if target_ids is None else tuple(target_ids.shape)}: give one id for each, or None for all"
        )
