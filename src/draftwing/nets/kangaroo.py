"""Kangaroo's adapter (2404.18911): one attention layer and two norms behind the target's first layers.

    x_E (the target's hidden state E) -> x_E + attention(norm(x_E)) -> norm -> the target's LM head

Entry i is the token at position i, and guesses the token at i + 1, as the target itself does. In training the hidden
states are the target's; while drafting, the target's first layers compute them for what is drafted (``Shallow``).

Shape suffixes: B rows, T tokens, R rows of entries, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.model.attention import Attend
from draftwing.model.config import ModelConfig
from draftwing.model.layers import RMSNorm
from draftwing.model.rope import Rotary
from draftwing.model.subnet import SubNet
from draftwing.nets.base import DraftNet
from draftwing.nets.plain import PlainConfig
from draftwing.run.forward import NetShape

__all__ = ["KangarooConfig", "KangarooNet", "Shallow"]


@dataclass(frozen=True)
class KangarooConfig(PlainConfig):
    """The shape of an adapter: its attention is as wide as the target's.

    Attributes:
        taps: the one hidden state that it reads, E: the target's first E layers run while drafting.
        num_heads, num_kv_heads, head_dim: of its attention.
        rms_norm_eps: of its norms.

    Raises:
        ConfigError: more than one tap, or heads that no attention has.
    """

    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 64
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.taps) != 1 or self.taps[0] < 1:
            raise ConfigError(
                f"a Kangaroo adapter reads one tap, a state behind 1 or more of the target's layers, found {self.taps}"
            )
        if min(self.num_heads, self.num_kv_heads, self.head_dim) < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads must be a multiple of num_kv_heads, and head_dim at least 1, found {self.num_heads}, "
                f"{self.num_kv_heads} and {self.head_dim}"
            )

    @classmethod
    def for_target(cls, like: ModelConfig, taps: tuple[int, ...], **changes: Any) -> Self:
        """See ``PlainConfig.for_target``."""
        heads = {"num_heads": like.num_heads, "num_kv_heads": like.num_kv_heads, "head_dim": like.head_dim}
        return super().for_target(like, taps, **{"rms_norm_eps": like.rms_norm_eps, **heads, **changes})


class KangarooNet(DraftNet):
    """The adapter: trained on the target's hidden state E alone, and read by the target's LM head."""

    kind = "kangaroo"
    config: KangarooConfig

    def __init__(self, config: KangarooConfig, *parts: Any, **options: Any) -> None:
        super().__init__(config, *parts, **options)
        hidden, width = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, width
        self.q_norm = self.k_norm = None  # what an ``Attend`` asks of whoever calls it
        self.input_norm, self.norm = self._new_norm(), self._new_norm()
        self.qkv = self.new_matrix((config.num_heads + 2 * config.num_kv_heads) * width, hidden)
        self.out = self.new_matrix(hidden, config.num_heads * width)

    def _new_norm(self) -> RMSNorm:
        place: dict[str, Any] = {"dtype": self._new_dtype, "device": self.embedding.device}
        return RMSNorm(torch.ones(self.config.hidden_size, requires_grad=True, **place), self.config.rms_norm_eps)

    @property
    def shape(self) -> NetShape:
        """See ``Net``."""
        config = self.config
        return replace(
            super().shape,
            num_layers=1,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            windows=(None,),
        )

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """(R, H) hidden states E -> (R, H) what ``logits`` reads, twice: the tokens are in the states already."""
        mixed = attend(0, self.qkv.forward(self.input_norm.forward(states)), self).to(self.dtype)
        read = self.norm.forward(self.out.forward(mixed, states))
        return read, read


class Shallow:
    """What drafts: the target's first layers and the adapter behind them, as one net over slots of its own.

    The first layers' keys and values are kept twice, here and in the target's slots, since a pass of one net reads
    slots of one kind: that is (E + 1) / num_layers of the target's. No weight is copied.
    """

    def __init__(self, first: SubNet, adapter: KangarooNet) -> None:
        self._first, self._adapter = first, adapter
        self._depth = adapter.config.taps[0]

    @property
    def shape(self) -> NetShape:
        """See ``run.forward.Net``, here and below.

        Raises:
            ConfigError: the adapter's keys and values are not as wide as the target's.
        """
        own, config = self._first.shape, self._adapter.config
        if (config.num_heads, config.num_kv_heads, config.head_dim) != (own.num_heads, own.num_kv_heads, own.head_dim):
            raise ConfigError(
                f"the adapter has {config.num_heads} heads, {config.num_kv_heads} KV heads and {config.head_dim} "
                f"channels of each, and the target {own.num_heads}, {own.num_kv_heads} and {own.head_dim}: use an "
                f"adapter trained for it"
            )
        windows = (*own.windows[: self._depth], None)
        return replace(own, num_layers=self._depth + 1, windows=windows)

    @property
    def dtype(self) -> torch.dtype:
        """Of its slots: the target's."""
        return self._first.dtype

    @property
    def device(self) -> torch.device:
        """The target's."""
        return self._first.device

    @property
    def rotary(self) -> Rotary:
        """The target's."""
        return self._first.rotary

    def fuse(self, features: Any) -> Any:
        """Tokens are all it reads."""
        return features

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """(R,) -> (R, H) what ``logits`` reads."""
        x = self._first.stream(ids, attend)

        def behind(layer: int, qkv: Any, heads: Any) -> Any:
            return attend(self._depth + layer, qkv, heads)

        return self._adapter.forward(ids, x.to(self._adapter.dtype), behind)[0], None

    def logits(self, read: Any) -> Any:
        """(R, H) -> (R, V)."""
        found: Tensor = self._adapter.logits(read)
        return found
