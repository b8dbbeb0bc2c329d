"""Which tokens follow a node in a draft tree, and with what chance.

At T > 0 the children of a node are its best tokens under the target's own noise (``keyed``): a sample of the draft
law without replacement, and most often the very token that the target will draw. The classic rules need children
drawn from q (``sampled``, ``distinct``).

Shape suffixes: B rows, W nodes, C children of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwing.nets.calibration import Calibration
from draftwing.noise import DRAFT, gumbel, hash_bits
from draftwing.sampling import SamplingBatch

__all__ = ["Children"]


class Children:
    """Chooses children from scores.

    Args:
        sampling: of the rows.
        kind: ``Budget.children``.
        calibration: how scores become chances at T > 0.
        starts: of each row the absolute position of the token after its root.
    """

    def __init__(self, sampling: SamplingBatch, kind: str, calibration: Calibration, starts: Sequence[int]) -> None:
        self._sampling, self._kind, self._calibration, self._starts = sampling, kind, calibration, starts
        self.are_drawn = kind in ("sampled", "distinct")
        self.probs: list[Tensor] = []  # q of every level that was drawn from, (B, W, V) each

    def best(self, scores: Tensor, level: int, count: int) -> tuple[Tensor, Tensor]:
        """``count`` tokens after each node (B, W, V), and the log of the chance of each: (B, W, C) both."""
        if self.are_drawn:
            return self.draw(scores, level, count)
        ranked = self.ranked(scores, level)
        tokens = ranked.topk(count, dim=-1).indices
        return tokens, self.log_chance(scores, ranked, tokens)

    def ranked(self, scores: Tensor, level: int) -> Tensor:
        """What the best children are the best by: the scores under the target's noise, or (``top``) without."""
        if self._kind == "top":
            return scores
        return self._sampling.perturb_level(self._scaled(scores), self._starts, level)

    def _scaled(self, scores: Tensor) -> Tensor:
        """What the noise is added to: scaled as the net was found to guess best by, but for greedy rows."""
        sampling, scale = self._sampling, self._calibration.scale
        if scale == 1 or sampling.all_greedy:
            return scores
        return torch.where(sampling.greedy, scores, scores * scale) if sampling.num_greedy else scores * scale

    def draw(self, scores: Tensor, level: int, count: int) -> tuple[Tensor, Tensor]:
        """Children drawn from q with noise of the drafter's own, in the order drawn: (B, W, C) tokens, log chances."""
        probs = self._sampling.probs(scores)
        self.probs.append(probs)
        rows, width, vocab = probs.shape
        independent = count if self._kind == "sampled" else 1
        ids = torch.arange(vocab, device=probs.device)
        which = torch.arange(width * independent, device=probs.device)[:, None]
        noise = torch.stack(
            [
                gumbel(hash_bits(seed, (DRAFT, start, level, which), ids))
                for seed, start in zip(self._sampling.seeds, self._starts, strict=True)
            ]
        ).view(rows, width, independent, vocab)
        perturbed = probs.log()[:, :, None] + noise
        if independent > 1 or count == 1:
            best = perturbed.max(-1)
            tokens, alive = best.indices, best.values.isfinite()
        else:  # the top k under Gumbel noise are k draws without replacement, in order
            top = perturbed[:, :, 0].topk(count, dim=-1)
            tokens, alive = top.indices, top.values.isfinite()
        return tokens, probs.log().gather(-1, tokens).masked_fill(~alive, -torch.inf)

    def log_chance(self, scores: Tensor, ranked: Tensor, tokens: Tensor) -> Tensor:
        """Log of the chance that each of ``tokens`` (B, W, C) is what the target draws."""
        plain = scores.gather(-1, tokens) - scores.logsumexp(-1, keepdim=True)
        if self._sampling.all_greedy or self._kind == "top":
            return plain.float()
        return torch.where(self._sampling.greedy, plain, self._calibration.log_chance(ranked, tokens)).float()
