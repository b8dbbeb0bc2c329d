"""The loss of a net that guesses the token after each entry, as the target does: Kangaroo's adapter (2404.18911).

Nothing is unrolled: while drafting, the target's own layers compute the states that the net reads, so that what it
reads in training is what it will read.

Shape suffixes: B rows, T tokens, R entries, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.model.attention import CausalAttention
from draftwing.nets.base import DraftNet, Scored
from draftwing.nets.objectives import Objective, StepGuesses, StepSums, Told, known_positions, product_dtype, step_sums

__all__ = ["AlignedLoss"]


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

    def forward(self, found: Scored, truth: Told, *, agreement: bool = False) -> list[StepSums]:
        """Sums over all entries whose next token counts: see ``UnrolledLoss.forward``."""
        net, narrow = self.net, product_dtype(found.features, self.net.dtype)
        weight = net.head_weight if self._narrowed is None else net.head_weight[self._narrowed]
        ids = found.batch.ids
        where = known_positions(truth, ids.shape[1], ids.device, of_text=self.objective.of_text)
        read = self._read(found)[where]
        return [step_sums(read, weight, truth, where, self.objective, narrow, agreement=agreement)]

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
