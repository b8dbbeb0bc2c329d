"""What MTP modules are trained for: lambda / D * the sum of their cross-entropies (DeepSeek-V3, 2412.19437, eq. 24-25).

Module k (1 to D) reads at entry i the state that module k - 1 left there, or the target's, and the token at i + k; its
attention is causal over its own entries; its cross-entropy is that of the text's own token at i + k + 1.

Shape suffixes: B rows, T tokens, E = T - 2 entries, R rows of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.model.attention import CausalAttention
from draftwing.nets.base import Scored
from draftwing.nets.mtp import MtpNet
from draftwing.nets.objectives import Objective, StepGuesses, StepSums, Told, product_dtype, step_sums

__all__ = ["MtpLoss"]


LAMBDA = 0.3  # for most of DeepSeek-V3's training; here the target is frozen, and it weighs against nothing


class MtpLoss(nn.Module):
    """``net`` under an objective; called as ``train.loss.batch.UnrolledLoss`` is.

    Args:
        net: in training, with a module for each step.
        objective: ``next-token`` for the text's own tokens; others compare with what the target thinks.
        num_steps: D.
        noise: width of the uniform noise that is added to the target's states; not in evaluation.
        later_share: must be 1: every entry of a module is seen by later ones.
        target_ids: the tokens that losses look at; None for all.

    Raises:
        ConfigError: another number of modules, a regression onto states, or a share.
    """

    def __init__(
        self,
        net: MtpNet,
        objective: Objective,
        num_steps: int,
        noise: float = 0.0,
        later_share: float = 1.0,
        target_ids: Tensor | None = None,
    ) -> None:
        super().__init__()
        if num_steps != len(net.chain):
            raise ConfigError(
                f"the head has {len(net.chain)} MTP modules, and unroll_steps is {num_steps}: a step is a module; give "
                f"{len(net.chain)}"
            )
        if later_share != 1:
            raise ConfigError(
                f"later_share is {later_share}, and later MTP modules read what earlier ones leave at every entry: "
                f"leave it out"
            )
        if objective.feature_weight:
            raise ConfigError("an MTP module is not trained to predict states: choose another objective")
        self.net, self.objective, self._noise = net, objective, noise
        self._ids = target_ids

    def forward(self, found: Scored, truth: Told, *, agreement: bool = False) -> list[StepSums]:
        """Sums for every module, whose means over entries add up to the loss.

        Args:
            agreement: count too how often a module's best token is the target's.
        """
        net, narrow = self.net, product_dtype(found.features, self.net.dtype)
        weight = net.head_weight if self._ids is None else net.head_weight[self._ids]
        sums, share = [], LAMBDA / len(net.chain)
        for step, read in enumerate(self._steps(found)):
            every = torch.arange(found.batch.ids.shape[1] - 2, device=read.device)
            entries, where = truth.rows(step, every, of_text=self.objective.of_text)
            scored = step_sums(read[entries], weight, truth, where, self.objective, narrow, agreement=agreement)
            sums.append(replace(scored, loss=scored.loss * share))
        return sums

    def steps(self, found: Scored, num_steps: int) -> Iterator[StepGuesses]:
        """See ``train.loss.batch.Scorer``."""
        every = torch.arange(found.batch.ids.shape[1] - 2, device=found.features.device)
        for step, read in enumerate(islice(self._steps(found), num_steps)):
            yield StepGuesses(step, every, read)

    def logits(self, index: int, read: Tensor) -> Tensor:
        """See ``train.loss.batch.Scorer``."""
        found: Tensor = self.net.logits(read)
        return found

    def _steps(self, found: Scored) -> Iterator[Tensor]:
        """(B * E, H) what the LM head reads after each module."""
        net, ids = self.net, found.batch.ids
        rows, count, shape = ids.shape[0], ids.shape[1] - 2, net.shape
        states = found.features[:, :count].to(net.dtype)
        if self._noise and self.training:
            states = states + (torch.rand_like(states) - 0.5) * self._noise
        states = states.reshape(rows * count, -1)
        padded = F.pad(ids, (0, len(net.chain)))
        places = torch.arange(count, device=ids.device).repeat(rows)
        for step, module in enumerate(net.modules_in_order):
            cis = net.rotary.cis(places + step, upto=count + len(net.chain)).view(len(places), 1, -1)
            attend = CausalAttention(rows, count, shape.windows, shape.head_dim**-0.5, cis)
            tokens = net.embedding.forward(padded[:, 1 + step : 1 + step + count].reshape(-1))
            states = module.forward(tokens, states, attend)
            yield states
