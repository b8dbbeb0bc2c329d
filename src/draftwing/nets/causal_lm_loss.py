"""What a draft model's update minimises: a divergence from the target after every token that counts (2310.08461).

One causal forward over the batch; no unroll, since a draft model reads nothing but tokens, and these are the same
whether it drafted them or not.

Shape suffixes: B rows, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.model.attention import CausalAttention
from draftwing.nets.base import Scored
from draftwing.nets.causal_lm import CausalLMNet
from draftwing.nets.objectives import Objective, StepSums, Told, known_positions, product_dtype, step_sums

__all__ = ["CausalLoss"]


class CausalLoss(nn.Module):
    """``net`` under a divergence: a module called as ``train.loss.batch.UnrolledLoss`` is, with one step.

    Args:
        net: in training.
        objective: divergences alone.
        num_steps, later_share: 1; there is no unroll.
        noise, target_ids: not for a draft model, which reads no features and has an LM head of its own.

    Raises:
        ConfigError: an objective that compares features, or an unroll.
    """

    def __init__(
        self,
        net: CausalLMNet,
        objective: Objective,
        num_steps: int = 1,
        noise: float = 0.0,
        later_share: float = 1.0,
        target_ids: Tensor | None = None,
    ) -> None:
        super().__init__()
        if objective.feature_weight:
            raise ConfigError(
                "training: a draft model has no features to compare with the target's: choose --objective fkl, rkl, "
                "jsd or tv"
            )
        if num_steps != 1 or later_share != 1:
            raise ConfigError(
                "training: a draft model learns from every position at once: leave --unroll-steps and --later-share out"
            )
        self.net, self.objective = net, objective

    def forward(self, found: Scored, truth: Told, *, agreement: bool = False) -> list[StepSums]:
        """Sums over all predictions that count.

        Args:
            agreement: count too how often the net's best token is the target's.
        """
        net, ids = self.net, found.batch.ids
        narrow = product_dtype(ids, net.dtype)
        where = known_positions(truth, ids.shape[1], ids.device, of_text=self.objective.of_text)
        read = _read(net, ids).flatten(0, 1)[where]
        return [step_sums(read, net.head_weight, truth, where, self.objective, narrow, agreement=agreement)]


def _read(net: CausalLMNet, ids: Tensor) -> Tensor:
    """(B, T) -> (B, T, H) what the LM head reads at each position."""
    rows, length = ids.shape
    positions = torch.arange(length, device=ids.device).repeat(rows)
    # Every text is read as if it had come as one prompt, as ``run.eager.score`` reads it.
    cis = net.rotary.cis(positions, torch.full_like(positions, length), upto=length).view(rows * length, 1, -1)
    attend: Any = CausalAttention(rows, length, net.shape.windows, net.shape.head_dim**-0.5, cis)
    read: Tensor = net.forward(ids.reshape(-1), None, attend)[0]
    return read.view(rows, length, -1)
