"""Hydra (2402.05109): Medusa's heads, each of which also reads the tokens drafted so far.

    head k:  z = [h; e(t_0); ...; e(t_k)]      t_0 the pending token, then those drafted on a node's path
             x = R z + SiLU(W1 z)              R is the identity on h at first, and trained
             x = x + SiLU(W x)                 once for each further layer
             logits = W2 x

So siblings' children have laws of their own, at a small product for each node; with one pass of the target's features
there is still no attention and no slot.

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

__all__ = ["HydraConfig", "HydraNet"]

MOST = 64


@dataclass(frozen=True)
class HydraConfig(PlainConfig):
    """A Hydra net's shape.

    Attributes:
        num_heads: K. ``num_layers``: of each head.

    Raises:
        ConfigError: see ``PlainConfig``; or a count that cannot be meant.
    """

    num_heads: int = 5
    num_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_tap(self.taps, "a Hydra head")
        if not (1 <= self.num_heads <= MOST and 1 <= self.num_layers <= MOST):
            raise ConfigError(
                f"a Hydra net has from 1 to {MOST} heads of 1 to {MOST} layers, found {self.num_heads} and "
                f"{self.num_layers}: correct num_heads and num_layers"
            )

    @staticmethod
    def of_levels(num_levels: int) -> dict[str, int]:
        """The fields of a net that guesses so many tokens."""
        return {"num_heads": num_levels}


class HydraNet(BlockNet):
    """K heads, each on those before it."""

    kind = "hydra"
    config: HydraConfig

    def __init__(self, config: HydraConfig, *parts: Any, **options: Any) -> None:
        super().__init__(config, *parts, **options)
        width, heads = config.hidden_size, range(config.num_heads)
        self.straight = nn.ModuleList(self.new_matrix(width, (k + 2) * width) for k in heads)
        self.mixed = nn.ModuleList(self.new_matrix(width, (k + 2) * width, bias=True) for k in heads)
        self.further = nn.ModuleList(
            nn.ModuleList(self.new_matrix(width, width, bias=True) for _ in range(config.num_layers - 1)) for _ in heads
        )
        self.heads = nn.ModuleList(self.new_matrix(self.num_draft_tokens, width) for _ in heads)
        self.head = cast(Linear, self.heads[0])  # its own, and not the target's

    @torch.no_grad()
    def start_from(self, target_head: Linear) -> Self:
        """Every head as the target's own LM head on the feature; what it makes of tokens is yet to be learnt."""
        own = target_head.plain()
        own = own if self.target_ids is None else own[self.target_ids.to(own.device)]
        width = self.config.hidden_size
        for straight, mixed, head in zip(self.straight, self.mixed, self.heads, strict=True):
            cast(Linear, mixed).weight.zero_()
            weight = cast(Linear, straight).weight.zero_()
            weight[:, :width].fill_diagonal_(1.0)
            cast(Linear, head).weight.copy_(own)
        for layers in self.further:
            for layer in cast(nn.ModuleList, layers):
                cast(Linear, layer).weight.zero_()
        return self

    # --- what it computes ------------------------------------------------------------------------------------------

    @property
    def num_levels(self) -> int:
        """See ``BlockNet``."""
        return self.config.num_heads

    def mix(self, level: int, known: Tensor) -> Tensor:
        """The feature and the tokens so far (R, (level + 2) * H) -> (R, H), what the LM head of a level reads."""
        x: Tensor = cast(Linear, self.straight[level]).forward(known)
        x = x + F.silu(cast(Linear, self.mixed[level]).forward(known))
        for layer in cast(nn.ModuleList, self.further[level]):
            x = x + F.silu(cast(Linear, layer).forward(x))
        return x

    def guess(self, level: int, block: Tensor, tokens: Tensor, carried: Tensor | None) -> Guess:
        """See ``BlockNet``: what is carried down a path is the feature and the tokens on it, (B, W, (k + 2) * H)."""
        rows, nodes = tokens.shape
        before = block.expand(-1, nodes, -1) if carried is None else carried
        known = torch.cat([before, self._embedded(tokens)], -1)
        logits = self.level_logits(level, self.mix(level, known.flatten(0, 1)))
        return Guess(logits.view(rows, nodes, -1), known)

    def levels(
        self, ids: Tensor, features: Tensor, entries: Tensor, num_levels: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """See ``BlockNet``: the tokens drafted so far are the text's own."""
        known = features[:, entries].flatten(0, 1)
        for level in range(num_levels):
            tokens = ids[:, entries + 1 + level].flatten()
            known = torch.cat([known, self._embedded(tokens)], -1)
            yield self.mix(level, known), cast(Linear, self.heads[level]).weight

    def level_logits(self, level: int, read: Tensor) -> Tensor:
        """See ``BlockNet``."""
        head = cast(Linear, self.heads[level])
        found: Tensor = head.spread(read.to(head.dtype), self.target_ids, self.config.vocab_size)
        return found

    def _embedded(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.embedding.forward(tokens).to(self.dtype)
        return found
