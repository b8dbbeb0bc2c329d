"""How a net's scores become chances, at T > 0: what orders the nodes of a tree there."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwing.errors import ConfigError

__all__ = ["NUM_COMPARED", "Calibration"]

NUM_COMPARED = 8  # rivals that a score is weighed against


@dataclass(frozen=True)
class Calibration:
    """The chance that a child is the token the target draws: ``(1 - miss) * softmax(sharpness * s)``.

    s = scale * log q + g are a node's best ``NUM_COMPARED`` scores under the target's own noise g. How far their margin
    can be trusted depends on how good the net is: the better, the sharper. The text never depends on it.

    Under one noise the best guess is log q + g only where q is p. Where the net knows less than the target, q is
    flatter than p and the noise, which is the target's for p, would choose too freely among what the net cannot tell
    apart: a scale above 1 holds it to its likeliest tokens.

    Attributes:
        sharpness: 2.7 is that of a very good net (an EAGLE-1 head that agrees with its target at 0.8 of all
            positions).
        miss: share of positions at which none of them is the target's token.
        scale: of log q.
    """

    sharpness: float = 2.7
    miss: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.sharpness < math.inf and 0 <= self.miss < 1 and 0 < self.scale < math.inf):
            raise ConfigError(
                f"a calibration needs a sharpness and a scale above 0 and a miss in [0, 1), found {self.sharpness}, "
                f"{self.scale}, {self.miss}"
            )

    def log_chance(self, ranked: Tensor, tokens: Tensor) -> Tensor:
        """Log of the chance of ``tokens`` (..., C) from perturbed scores ``ranked`` (..., V)."""
        rivals = ranked.topk(min(NUM_COMPARED, ranked.shape[-1]), dim=-1).values
        norm = (self.sharpness * rivals).logsumexp(-1, keepdim=True)
        return self.sharpness * ranked.gather(-1, tokens) - norm + math.log1p(-self.miss)

    @classmethod
    def fit(cls, rivals: Tensor, hit: Tensor, scale: float = 1.0) -> Calibration:
        """The most likely calibration.

        Args:
            rivals: (R, C) best scores under the noise, descending.
            hit: (R,) which of them the target drew; -1 for none.
            scale: that the scores were made with.
        """
        found = hit >= 0
        miss = float((~found).double().mean()) if len(hit) else 0.0
        if not bool(found.any()):
            return cls(miss=min(miss, 0.99), scale=scale)
        scores, places = rivals[found].double(), hit[found]
        grid = torch.logspace(-1.3, 1.0, 120, dtype=torch.float64)
        losses = [
            torch.nn.functional.cross_entropy(float(sharpness) * scores, places, reduction="mean").item()
            for sharpness in grid
        ]
        best = min(range(len(grid)), key=losses.__getitem__)
        return cls(round(float(grid[best]), 3), round(min(miss, 0.99), 3), scale)
