"""Hydra (2402.05109): Medusa's heads, each of which also reads the tokens drafted so far.

    head k:  z = [h; e(t_0); ...; e(t_k)]      t_0 the pending token, then the drafted ones on a node's path
             x = R z + SiLU(W1 z)              R starts as the identity on h, and is trained
             x = x + SiLU(W x)                 once per further layer
             logits = W2 x

So the children of siblings get different distributions, for a small product per node; there is still no attention and
no KV slot. Differs from the paper: no prefix attention (Hydra++), and new heads predict as the target does.

Shape suffixes: see ``methods.block``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.methods.block import BlockMethod, BlockNet, Guess
from draftwing.methods.medusa import HeadsConfig, heads_weight
from draftwing.models.linear import Linear


@dataclass(frozen=True)
class HydraConfig(HeadsConfig):
    """The shape of a Hydra net: ``num_heads`` heads of ``num_layers`` layers."""


class HydraNet(BlockNet):
    """K heads, each of which reads the tokens that the heads before it drafted."""

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
        self.head = self.level_head(0)

    @torch.no_grad()
    def start_from(self, target_head: Linear) -> Self:
        """Start every head as the target's LM head on the feature, without any influence of tokens."""
        weight = heads_weight(self, target_head)
        for level in range(self.num_levels):
            straight, mixed, further = self._layers(level)
            mixed.weight.zero_()
            straight.weight.zero_()[:, : self.config.hidden_size].fill_diagonal_(1.0)
            self.level_head(level).weight.copy_(weight)
            for layer in further:
                layer.weight.zero_()
        return self

    @property
    def num_levels(self) -> int:
        return self.config.num_heads

    def level_head(self, level: int) -> Linear:
        return cast(Linear, self.heads[level])

    def _layers(self, level: int) -> tuple[Linear, Linear, list[Linear]]:
        further = [cast(Linear, layer) for layer in cast(nn.ModuleList, self.further[level])]
        return cast(Linear, self.straight[level]), cast(Linear, self.mixed[level]), further

    def mix(self, level: int, inputs: Tensor) -> Tensor:
        """Map the feature and the tokens so far, (R, (level + 2) * H), to the LM head's input (R, H)."""
        straight, mixed, further = self._layers(level)
        x: Tensor = straight.forward(inputs) + F.silu(mixed.forward(inputs))
        for layer in further:
            x = x + F.silu(layer.forward(x))
        return x

    def _embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.embedding.forward(tokens).to(self.dtype)
        return embedded

    def guess(self, level: int, block: Tensor, tokens: Tensor, carried: Tensor | None) -> Guess:
        """A path carries the feature and the embeddings of its tokens, (B, W, (k + 2) * H)."""
        rows, nodes = tokens.shape
        before = block.expand(-1, nodes, -1) if carried is None else carried
        inputs = torch.cat([before, self._embed(tokens)], -1)
        logits = self.level_logits(level, self.mix(level, inputs.flatten(0, 1)))
        return Guess(logits.view(rows, nodes, -1), inputs)

    def levels(
        self, ids: Tensor, features: Tensor, entries: Tensor, num_levels: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        inputs = features[:, entries].flatten(0, 1)
        for level in range(num_levels):
            inputs = torch.cat([inputs, self._embed(ids[:, entries + 1 + level].flatten())], -1)
            yield self.mix(level, inputs), self.level_head(level).weight


class Hydra(BlockMethod):
    """Medusa heads that read the tokens before them."""

    net = HydraNet
    config = HydraConfig
    settings = ("unroll_steps", "draft_vocab_size", "num_layers")
