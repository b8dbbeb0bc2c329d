"""Convert a network's scores to probabilities at T > 0, by which the nodes of a tree are ordered."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.errors import ConfigError

NUM_COMPARED = 8  # best scores in the normaliser


@dataclass(frozen=True)
class Calibration:
    """The probability that a child is the token the target draws: ``(1 - miss) * softmax(sharpness * s)``.

    s = scale * log q + g are a node's best ``NUM_COMPARED`` scores under the target's noise g. The better the network,
    the more their margin can be trusted. The output never depends on it.

    With the same noise, log q + g is the best prediction only if q is p. A weaker network has a flatter q, so that the
    noise, scaled for p, would decide too much: a scale above 1 keeps drafts among the network's most likely tokens.
    """

    # 2.7 is that of a very good network (an EAGLE-1 head that agrees with its target at 0.8 of all positions)
    sharpness: float = 2.7
    miss: float = 0.0  # share of positions at which none of them is the target's token
    scale: float = 1.0  # factor of log q

    def __post_init__(self) -> None:
        if not (0 < self.sharpness < math.inf and 0 <= self.miss < 1 and 0 < self.scale < math.inf):
            raise ConfigError(
                f"a calibration needs a sharpness and a scale above 0 and a miss in [0, 1), found {self.sharpness}, "
                f"{self.scale}, {self.miss}"
            )

    def log_chance(self, ranked: Tensor, tokens: Tensor) -> Tensor:
        """Return the log probability of ``tokens`` (..., C) from perturbed scores ``ranked`` (..., V)."""
        rivals = ranked.topk(min(NUM_COMPARED, ranked.shape[-1]), dim=-1).values
        norm = (self.sharpness * rivals).logsumexp(-1, keepdim=True)
        return self.sharpness * ranked.gather(-1, tokens) - norm + math.log1p(-self.miss)

    @classmethod
    def fit(cls, rivals: Tensor, hit: Tensor, scale: float = 1.0) -> Calibration:
        """Return the maximum-likelihood calibration for scores of a scale.

        Args:
            rivals: (R, C) best scores under the noise, descending.
            hit: (R,) which of them the target drew; -1 for none.
        """
        is_hit = hit >= 0
        miss = float((~is_hit).double().mean()) if len(hit) else 0.0
        if not bool(is_hit.any()):
            return cls(miss=min(miss, 0.99), scale=scale)
        scores, places = rivals[is_hit].double(), hit[is_hit]
        grid = torch.logspace(-1.3, 1.0, 120, dtype=torch.float64).tolist()
        best = min(grid, key=lambda sharpness: float(F.cross_entropy(sharpness * scores, places)))
        return cls(round(best, 3), round(min(miss, 0.99), 3), scale)
