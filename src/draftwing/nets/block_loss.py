"""What an update minimises for nets that guess several tokens in one pass (``nets.block``).

Each level is a step: entry i guesses the token at i + 2 + k at level k, as in an unroll, scored by the same objectives
and weighted by ``Objective.decay``. Nothing is fed back: later levels read the text's own tokens, if any.

Shape suffixes: B rows, T tokens, C entries that blocks start from, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.nets.base import Scored
from draftwing.nets.block import BlockNet
from draftwing.nets.objectives import (
    CHUNK,
    GPU_CHUNK,
    Objective,
    StepGuesses,
    StepSums,
    Told,
    product_dtype,
    step_sums,
    tv,
)

__all__ = ["BlockLoss", "overlap"]


class BlockLoss(nn.Module):
    """``net`` under an objective; called as ``train.loss.batch.UnrolledLoss`` is.

    Args:
        num_steps: levels; a net guesses as many, neither more nor fewer.
        noise: width of the uniform noise that is added to the features, not in evaluation.
        later_share: of the entries that blocks would start from (``BlockNet.share``); less is faster.

    Raises:
        ConfigError: a net of another number of levels, or an objective that compares features.
    """

    def __init__(
        self,
        net: BlockNet,
        objective: Objective,
        num_steps: int,
        noise: float = 0.0,
        later_share: float = 1.0,
        target_ids: Tensor | None = None,
    ) -> None:
        super().__init__()
        if num_steps != net.num_levels:
            raise ConfigError(
                f"this {net.kind} head guesses {net.num_levels} tokens, and the run asks for {num_steps}: give "
                f"unroll_steps {net.num_levels}, or start from nothing"
            )
        if objective.feature_weight:
            raise ConfigError(
                f"a {net.kind} head predicts no features, and the objective compares them: use medusa, dflash or tv"
            )
        self.net, self.objective, self.num_steps, self.noise = net, objective, num_steps, noise
        self._share = net.share * later_share
        self._narrowed = target_ids if net.target_ids is None else None

    def forward(self, found: Scored, truth: Told, *, agreement: bool = False) -> list[StepSums]:
        """Sums for every level; see ``UnrolledLoss.forward``."""
        narrow = product_dtype(found.features, self.net.dtype)
        entries, sums = self._entries(found), []
        for level, (read, weight) in enumerate(self._levels(found, entries, self.num_steps)):
            weight = weight if self._narrowed is None else weight[self._narrowed]
            own, where = truth.rows(level, entries, of_text=self.objective.of_text)
            read = read[own]
            scored = step_sums(read, weight, truth, where, self.objective, narrow, agreement=agreement)
            sureness = self.net.sureness(read.detach())
            if sureness is not None:
                share = overlap(read.detach().to(narrow), weight.to(narrow), truth.probs, where)
                unsure = F.binary_cross_entropy_with_logits(sureness.float(), share.float(), reduction="sum")
                scored = replace(scored, loss=scored.loss + unsure)
            sums.append(scored)
        return sums

    def steps(self, found: Scored, num_steps: int) -> Iterator[StepGuesses]:
        """See ``train.loss.batch.Scorer``."""
        entries = self._entries(found)
        levels = self._levels(found, entries, min(num_steps, self.num_steps))
        for level, (read, _) in enumerate(levels):
            yield StepGuesses(level, entries, read)

    def logits(self, index: int, read: Tensor) -> Tensor:
        """See ``train.loss.batch.Scorer``."""
        return self.net.level_logits(index, read)

    def _entries(self, found: Scored) -> Tensor:
        """(C,) from which blocks start: any of them in training, evenly spaced ones in evaluation."""
        count = found.batch.ids.shape[1] - 2
        chosen = max(1, round(self._share * count))
        if chosen >= count:
            places = torch.arange(count)
        elif self.training:
            places = torch.randperm(count)[:chosen].sort().values
        else:
            places = torch.arange(chosen) * count // chosen
        return places.to(found.batch.ids.device)

    def _levels(self, found: Scored, entries: Tensor, num_levels: int) -> Iterator[tuple[Tensor, Tensor]]:
        features = found.features.to(self.net.dtype)
        if self.noise and self.training:
            features = features + (torch.rand_like(features) - 0.5) * self.noise
        ids = F.pad(found.batch.ids, (0, self.net.num_levels))  # the last entries' blocks reach beyond the text
        return self.net.levels(ids, features, entries, num_levels)


@torch.no_grad()
def overlap(read: Tensor, weight: Tensor, probs: Tensor, rows: Tensor) -> Tensor:
    """(R,) 1 - TV of softmax(read @ weight.T) and ``probs[rows]``: how often speculative sampling keeps a guess."""
    chunk, found = CHUNK.get(read.device.type, GPU_CHUNK), []
    for start in range(0, len(read), chunk):
        logits = (read[start : start + chunk] @ weight.T).to(probs.dtype)
        found.append(1 - tv(logits, probs[rows[start : start + chunk]]))
    return torch.cat(found) if found else probs.new_zeros(0)
