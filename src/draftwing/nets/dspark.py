"""DSpark (2607.05147): DFlash, whose places learn of the token before them, and say how far they can be trusted.

    logits of a place = LM head(x) + B a(t)      t the token before it on a node's path, a(t) and B of low rank
    sure of it        = sigmoid(w [x; a(t)])     trained on 1 - TV(p, q): how often a guess from q is kept

So a block that was guessed in one pass is no longer a product of laws that know nothing of each other, at the price
of a thin matrix for each node, and a draft is cut short where the net does not trust itself.

Shape suffixes: see ``nets.block``; S rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.model.linear import Linear
from draftwing.nets.block import Guess
from draftwing.nets.dflash import DFlashConfig, DFlashNet

__all__ = ["DSparkConfig", "DSparkNet"]


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """A DSpark net's shape.

    Attributes:
        rank: S, of what a place learns of the token before it.

    Raises:
        ConfigError: see ``DFlashConfig``; or a rank below 1.
    """

    rank: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise ConfigError(f"a DSpark net needs a rank of at least 1, found {self.rank}: 256 is usual")


class DSparkNet(DFlashNet):
    """A DFlash net with a bias by the token before, and confidence."""

    kind = "dspark"
    config: DSparkConfig

    def __init__(self, config: DSparkConfig, *parts: Any, **options: Any) -> None:
        super().__init__(config, *parts, **options)
        place: dict[str, Any] = {"dtype": self._new_dtype, "device": self.embedding.device}
        self.embedding_before = nn.Parameter(torch.randn(config.vocab_size, config.rank, **place) * 0.02)
        self.head_after = self.new_matrix(config.vocab_size, config.rank)
        self.trust = self.new_matrix(1, config.hidden_size + config.rank, bias=True)

    @torch.no_grad()
    def start_from(self, target_head: Linear) -> Self:
        """As a DFlash net: no token has a say yet."""
        self.head_after.weight.zero_()
        return self

    # --- what it computes ------------------------------------------------------------------------------------------

    def open(self, out: Tensor, depth: int) -> Tensor:
        """See ``BlockNet``: the laws with what they were read from, (B, depth, V + H)."""
        return torch.cat([super().open(out, depth), out[:, 1 : 1 + depth]], -1)

    def guess(self, level: int, block: Tensor, tokens: Tensor, carried: Tensor | None) -> Guess:
        """See ``BlockNet``: a law for each node, by its own token."""
        rows, nodes = tokens.shape
        vocab, place = self.config.vocab_size, block[:, level : level + 1]
        logits, x = place[..., :vocab], place[..., vocab:]
        before = self.embedding_before[tokens]
        bias = self.head_after.forward(before.flatten(0, 1)).view(rows, nodes, -1)
        read = torch.cat([x.expand(-1, nodes, -1), before], -1)
        return Guess(logits + bias, None, self.sureness(read.flatten(0, 1)).sigmoid().view(rows, nodes))

    # --- training --------------------------------------------------------------------------------------------------

    def levels(
        self, ids: Tensor, features: Tensor, entries: Tensor, num_levels: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """See ``BlockNet``: the state and what is known of the token before side by side, and so the matrices."""
        weight = torch.cat([self.head_weight.to(self.dtype), self.head_after.weight], 1)
        for level, (read, _) in enumerate(super().levels(ids, features, entries, num_levels)):
            before = self.embedding_before[ids[:, entries + 1 + level].flatten()]
            yield torch.cat([read, before], -1), weight

    def level_logits(self, level: int, read: Tensor) -> Tensor:
        """See ``BlockNet``."""
        x, before = read[:, : self.config.hidden_size], read[:, self.config.hidden_size :]
        found: Tensor = self.logits(x) + self.head_after.forward(before)
        return found

    def sureness(self, read: Tensor) -> Tensor:
        """See ``BlockNet``."""
        found: Tensor = self.trust.forward(read)[:, 0]
        return found
