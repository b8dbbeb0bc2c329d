"""Fits a head's ``Calibration`` on held-out data, by drawing as sampling draws: one noise for target and draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from draftwing.methods.calibration import NUM_COMPARED, Calibration
from draftwing.models.linear import Linear
from draftwing.train.features import FeatureBatch
from draftwing.train.loss import Scorer, Truth

MAX_ROWS = 4096  # scores of so many positions and no more are drawn for one fit
SCALES = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0)  # that are tried
GAIN = 1.01  # a scale must make so many more first guesses right than none: less is the luck of the draw


@torch.no_grad()
def fit_calibration(scorer: Scorer, head: Linear, batches: Sequence[FeatureBatch], num_steps: int = 2) -> Calibration:
    """At temperature 1, over the first ``num_steps`` drafted tokens: first the scale, then the chances under it.

    Args:
        scorer: the loss, whose net is in float32.
        head: the target's.
        batches: held-out text with the target's features and logits.
    """
    right = torch.zeros(len(SCALES))
    for q, noise, drawn in _guesses(scorer, head, batches, num_steps):
        right += torch.stack([((scale * q + noise).argmax(-1) == drawn).sum().cpu() for scale in SCALES])
    best = int(right.argmax())
    scale = SCALES[best] if right[best] > GAIN * right[0] else SCALES[0]
    rivals, hits = [], []
    for q, noise, drawn in _guesses(scorer, head, batches, num_steps):
        ranked = (scale * q + noise).topk(min(NUM_COMPARED, q.shape[-1]), dim=-1)
        same = ranked.indices == drawn[:, None]
        rivals.append(ranked.values.cpu())
        hits.append(torch.where(same.any(-1), same.float().argmax(-1), -1).cpu())
    return Calibration.fit(torch.cat(rivals), torch.cat(hits), scale)


def _guesses(
    scorer: Scorer, head: Linear, batches: Sequence[FeatureBatch], num_steps: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of some positions, the same in every call: (R, V) log q, (R, V) noise, and (R,) what the target draws by it."""
    generator = torch.Generator().manual_seed(0)
    for found in batches:
        logits = found.logits_of(head)
        truth = Truth.of(found, head, scorer.net.target_ids, torch.float32)
        for step in scorer.steps(found, num_steps):
            entries, where = truth.rows(step.index, step.entries)
            some = torch.randperm(len(entries), generator=generator)[: MAX_ROWS // (num_steps * len(batches))]
            entries, where = entries[some.to(entries.device)], where[some.to(where.device)]
            q = scorer.logits(step.index, step.read[entries]).float().log_softmax(-1)
            p = logits.flatten(0, 1)[where].float().log_softmax(-1)
            uniform = torch.rand(q.shape, generator=generator, dtype=torch.float64).clamp(min=1e-300)
            noise = -(-uniform.log()).log().float().to(q.device)
            yield q, noise, (p + noise).argmax(-1)
