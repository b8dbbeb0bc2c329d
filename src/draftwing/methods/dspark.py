"""DSpark (2607.05147): DFlash whose masks see the token before them, and predict how often their guess is kept.

    logits of a mask = LM head(x) + B a(t)      t the token before it on a node's path, a(t) and B of low rank
    confidence       = sigmoid(w [x; a(t)])     trained on 1 - TV(p, q): how often a guess from q is kept

A block is then no longer a product of independent distributions, for a thin matrix per node, and a draft ends early
when the net is unsure.

Shape suffixes: see ``methods.block``; S rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from draftwing.methods.block import Guess
from draftwing.methods.dflash import DFlash, DFlashConfig, DFlashNet
from draftwing.models.linear import Linear


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """The shape of a DSpark net, whose bias by the token before has the rank S."""

    rank: int = 256


class CorrectedNet(DFlashNet):
    """A DFlash net whose guesses depend on the tokens before them, by a second LM head of low rank S."""

    config: DSparkConfig

    def __init__(self, config: DSparkConfig, *parts: Any, **options: Any) -> None:
        super().__init__(config, *parts, **options)
        self.head_after = self.new_matrix(self.num_draft_tokens, config.rank)

    @torch.no_grad()
    def start_from(self, target_head: Linear) -> Self:
        """Start as a DFlash net, without influence of the tokens before."""
        self.head_after.weight.zero_()
        return self

    def open(self, out: Tensor, depth: int) -> Tensor:
        """Return each mask's logits, and the state that they were read from: (B, depth, V + H)."""
        masks = self.guessing(out, depth)
        logits: Tensor = self.logits(masks.flatten(0, 1))
        return torch.cat([logits.view(*masks.shape[:2], -1), masks], -1)

    @abstractmethod
    def correct(self, level: int, x: Tensor, tokens: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the input (R, S) of the second head, and the state to carry to the nodes' children.

        Args:
            x: (R, H) the state of the place that guesses.
            tokens: (R,) the tokens of the nodes.
            carried: (R, G) of the nodes' parents, None for the root.
        """

    def guess(self, level: int, block: Tensor, tokens: Tensor, carried: Tensor | None) -> Guess:
        rows, nodes = tokens.shape
        vocab, place = self.config.vocab_size, block[:, level : level + 1]
        logits, x = place[..., :vocab], place[..., vocab:].expand(-1, nodes, -1).flatten(0, 1)
        before = None if carried is None else carried.flatten(0, 1)
        read, state = self.correct(level, x, tokens.flatten(), before)
        sure = self.confidence_logits(torch.cat([x, read], -1))
        return Guess(
            logits + self.bias_after(read).view(rows, nodes, -1),
            None if state is None else state.view(rows, nodes, -1),
            None if sure is None else sure.sigmoid().view(rows, nodes),
        )

    def bias_after(self, read: Tensor) -> Tensor:
        """Map the second head's input (R, S) to what it adds to the logits (R, V)."""
        bias: Tensor = self.head_after.spread(read, self.target_ids, self.config.vocab_size)
        return bias

    # --- training --------------------------------------------------------------------------------------------------

    def levels(
        self, ids: Tensor, features: Tensor, entries: Tensor, num_levels: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs of both heads concatenated, and both matrices likewise."""
        weight, state = torch.cat([self.head_weight.to(self.dtype), self.head_after.weight], 1), None
        for level, (x, _) in enumerate(super().levels(ids, features, entries, num_levels)):
            read, state = self.correct(level, x, ids[:, entries + 1 + level].flatten(), state)
            yield torch.cat([x, read], -1), weight

    def level_logits(self, level: int, read: Tensor) -> Tensor:
        x, before = read[:, : self.config.hidden_size], read[:, self.config.hidden_size :]
        logits: Tensor = self.logits(x) + self.bias_after(before)
        return logits


class DSparkNet(CorrectedNet):
    """A DFlash net with a bias by the token before, and confidence."""

    kind = "dspark"

    def __init__(self, config: DSparkConfig, *parts: Any, **options: Any) -> None:
        super().__init__(config, *parts, **options)
        place: dict[str, Any] = {"dtype": self._new_dtype, "device": self.embedding.device}
        self.embedding_before = nn.Parameter(torch.randn(config.vocab_size, config.rank, **place) * 0.02)
        self.trust = self.new_matrix(1, config.hidden_size + config.rank, bias=True)

    def correct(self, level: int, x: Tensor, tokens: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the embedding of the token before."""
        return self.embedding_before[tokens], None

    def confidence_logits(self, read: Tensor) -> Tensor:
        logits: Tensor = self.trust.forward(read)[:, 0]
        return logits


class DSpark(DFlash):
    """A block of masks over the target's features: see ``DSparkNet``."""

    net = DSparkNet
    config = DSparkConfig
    # SGLang wants the target's embedding and LM head in the file.
    layouts = ("draftwing", "vllm", "speculators", "gguf")
