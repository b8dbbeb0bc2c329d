"""Medusa (2401.10774): K heads on the target's last hidden state, the k-th of which guesses the k-th token drafted.

    head k:  x = h + SiLU(W1 h), once for each residual block;  logits = W2 x

h is the feature that the pending token was drawn from. A new head starts as the target's own: W1 is zero, W2 its LM
head.

Shape suffixes: see ``nets.block``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.model.linear import Linear
from draftwing.nets.block import BlockNet, Guess, check_one_tap
from draftwing.nets.plain import PlainConfig

__all__ = ["MedusaConfig", "MedusaNet"]

MOST_HEADS = 64


@dataclass(frozen=True)
class MedusaConfig(PlainConfig):
    """A Medusa net's shape.

    Attributes:
        num_heads: K. ``num_layers``: residual blocks of each head.
        has_bias: the residual blocks have biases.
        own_heads: every head has an LM head of its own; False: all use the target's.

    Raises:
        ConfigError: see ``PlainConfig``; or a count that cannot be meant.
    """

    num_heads: int = 5
    num_layers: int = 1
    has_bias: bool = True
    own_heads: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_tap(self.taps, "a Medusa head")
        if not (1 <= self.num_heads <= MOST_HEADS and 1 <= self.num_layers <= MOST_HEADS):
            raise ConfigError(
                f"a Medusa net has from 1 to {MOST_HEADS} heads of 1 to {MOST_HEADS} residual blocks, found "
                f"{self.num_heads} and {self.num_layers}: correct num_heads and num_layers"
            )

    @staticmethod
    def of_levels(num_levels: int) -> dict[str, int]:
        """The fields of a net that guesses so many tokens."""
        return {"num_heads": num_levels}


class MedusaNet(BlockNet):
    """K heads side by side."""

    kind = "medusa"
    config: MedusaConfig

    def __init__(self, config: MedusaConfig, *parts: Any, **options: Any) -> None:
        super().__init__(config, *parts, **options)
        width = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(self.new_matrix(width, width, bias=config.has_bias) for _ in range(config.num_layers))
            for _ in range(config.num_heads)
        )
        self.heads = nn.ModuleList()
        if config.own_heads:
            self.heads.extend(self.new_matrix(self.num_draft_tokens, width) for _ in range(config.num_heads))
            self.head = cast(Linear, self.heads[0])  # its own, and not the target's

    @torch.no_grad()
    def start_from(self, target_head: Linear) -> Self:
        """Every head as the target's own LM head, as in the paper."""
        own = target_head.plain()
        own = own if self.target_ids is None else own[self.target_ids.to(own.device)]
        for layers in self.blocks:
            for layer in cast(nn.ModuleList, layers):
                cast(Linear, layer).weight.zero_()
        for head in self.heads:
            cast(Linear, head).weight.copy_(own)
        return self

    # --- what it computes ------------------------------------------------------------------------------------------

    @property
    def num_levels(self) -> int:
        """See ``BlockNet``."""
        return self.config.num_heads

    def residual(self, level: int, state: Tensor) -> Tensor:
        """(R, H) -> (R, H), what the LM head of a level reads."""
        for layer in cast(nn.ModuleList, self.blocks[level]):
            state = state + F.silu(cast(Linear, layer).forward(state))
        return state

    def guess(self, level: int, block: Tensor, tokens: Tensor, carried: Tensor | None) -> Guess:
        """See ``BlockNet``: heads know nothing of each other's tokens, so that a level has one law."""
        logits = self.level_logits(level, self.residual(level, block.flatten(0, 1)))
        return Guess(logits[:, None])

    def levels(
        self, ids: Tensor, features: Tensor, entries: Tensor, num_levels: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """See ``BlockNet``."""
        states = features[:, entries].flatten(0, 1)
        for level in range(num_levels):
            yield self.residual(level, states), self._head(level).weight

    def level_logits(self, level: int, read: Tensor) -> Tensor:
        """See ``BlockNet``."""
        head = self._head(level)
        found: Tensor = head.spread(read.to(head.dtype), self.target_ids, self.config.vocab_size)
        return found

    def _head(self, level: int) -> Linear:
        return cast(Linear, self.heads[level]) if self.config.own_heads else self.read_head
