"""The loss of a net that guesses the token after each entry, as the target does: Kangaroo's adapter (2404.18911).

Nothing is unrolled: while drafting, the target's own layers compute the states that the net reads, so that what it
reads in training is what it will read.

Shape suffixes: B rows, T tokens, R entries, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.model.attention import CausalAttention
from draftwing.nets.base import DraftNet, Scored
from draftwing.nets.objectives import Objective, StepGuesses, StepSums, head_loss, num_agreed, product_dtype

__all__ = ["AlignedLoss"]


class Known(Protocol):
    """What the target says of every token of a batch: ``train.loss.batch.Truth``."""

    @property
    def probs(self) -> Tensor: ...
    @property
    def best(self) -> Tensor: ...
    @property
    def counts(self) -> Tensor: ...


class AlignedLoss(nn.Module):
    """See ``train.loss.batch.UnrolledLoss``, whose arguments it takes.

    Raises:
        ConfigError: more than one step, or an objective that regresses features: there is nothing of either here.
    """

    def __init__(
        self,
        net: DraftNet,
        objective: Objective,
        num_steps: int,
        noise: float = 0.0,
        later_share: float = 1.0,
        target_ids: Tensor | None = None,
    ) -> None:
        super().__init__()
        if num_steps != 1 or later_share != 1 or objective.feature_weight:
            raise ConfigError(
                f"training: a net of kind {net.kind!r} learns one step, from the target's law alone: leave out "
                f"unroll_steps, later_share and objectives that regress features (eagle1, hass)"
            )
        self.net, self.objective, self.noise = net, objective, noise
        self._narrowed = target_ids if net.target_ids is None else None

    def forward(self, found: Scored, truth: Known, *, agreement: bool = False) -> list[StepSums]:
        """Sums over all entries whose next token counts: see ``UnrolledLoss.forward``."""
        net, narrow = self.net, product_dtype(found.features, self.net.dtype)
        weight = net.head_weight if self._narrowed is None else net.head_weight[self._narrowed]
        where = _known(truth)
        read = self._read(found)[where]
        loss = head_loss(read, weight, truth.probs, where, self.objective.divergence, narrow)
        agreed = num_agreed(read, weight, truth.best, where, narrow) if agreement else None
        return [StepSums(loss, len(where), agreed)]

    def steps(self, found: Scored, num_steps: int) -> Iterator[StepGuesses]:
        """See ``train.loss.batch.Scorer``: entry i of its numbering ends with the token at i + 1."""
        rows, length = found.batch.ids.shape
        read = self._read(found).view(rows, length, -1)[:, 1:-1]
        yield StepGuesses(0, torch.arange(length - 2, device=read.device), read.flatten(0, 1))

    def logits(self, index: int, read: Tensor) -> Tensor:
        """See ``train.loss.batch.Scorer``."""
        found: Tensor = self.net.logits(read)
        return found

    def _read(self, found: Scored) -> Tensor:
        """(B * T, H) what the LM head reads of every token."""
        net, ids = self.net, found.batch.ids
        rows, length = ids.shape
        features = found.features.to(net.dtype)
        if self.noise and self.training:
            features = features + (torch.rand_like(features) - 0.5) * self.noise
        shape = net.shape
        positions = torch.arange(length, device=ids.device).repeat(rows)
        cis = net.rotary.cis(positions, upto=length).view(rows * length, 1, -1)
        attend = CausalAttention(rows, length, shape.windows, max(shape.head_dim, 1) ** -0.5, cis)
        read: Tensor = net.forward(ids.flatten(), net.fuse(features.flatten(0, 1)), attend)[0]
        return read


def _known(truth: Known) -> Tensor:
    """(R,) into B * T: the positions whose next token counts, and is in the draft vocabulary."""
    keep = torch.zeros_like(truth.counts)
    keep[:, :-1] = truth.counts[:, 1:] & (truth.best[:, :-1] >= 0)
    found: Tensor = keep.flatten().nonzero()[:, 0]
    return found
