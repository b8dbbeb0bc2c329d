"""A drafter whose net learns from the tokens at which it was wrong (online speculative decoding, 2310.07177).

It drafts as the one that it holds does, and puts down what the target said where that was not drafted. Between steps
its ``Learner`` takes that in. What was asked and answered stays in memory, in a ring of the newest stretches of text,
and is never written anywhere.

Shape suffixes: B rows, N nodes, F features, V vocabulary, K tokens of a place.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from draftwing.drafters.base import Budget, Drafter, Resuming
from draftwing.errors import ConfigError
from draftwing.model.target import Context, Row, TargetOutput
from draftwing.nets.learner import Learner, Stretch, Tally
from draftwing.sampling import SamplingBatch
from draftwing.tree import Accepted, DraftTree

__all__ = ["OnlineDrafter"]

SHARED = 16  # tokens of a stretch with which the next one of its row begins
BEST = 64  # tokens whose chances are kept of a place


@dataclass
class _Trail:
    """The end of a row: features from position ``start`` on, and the places at which the draft was wrong."""

    start: int
    features: list[Tensor]
    places: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Features that it has."""
        return sum(map(len, self.features))


class OnlineDrafter:
    """Drafts as ``drafter`` does, with a net that ``learner`` trains.

    Args:
        drafter: of a net that reads features.
        learner: of that net; drafters of several decoders may share it.
    """

    def __init__(self, drafter: Drafter, learner: Learner) -> None:
        self._drafter, self.learner = drafter, learner
        self.name, self.features = f"{drafter.name}, online", drafter.features
        self.traits = replace(drafter.traits, learns=True, identity=f"{drafter.traits.identity} online")
        self._trails: list[_Trail] = []
        self._found: list[Stretch] = []
        self._tally, self._seconds, self._began = Tally(), 0.0, 0.0

    # --- as the drafter that it holds ------------------------------------------------------------------------------

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """See ``Drafter``, here and below."""
        self._drafter.admit(ctx, features)
        if features is None:
            raise ConfigError(f"{self.name} reads hidden states, and the target gave none for the prompt")
        last = _own(features[0, -SHARED:])
        self._trails.append(_Trail(ctx.rows[-1].length - len(last), [last]))

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """A stretch ends here, where all of its tokens are known."""
        self._began, pace = time.perf_counter(), self.learner.pace
        for row, trail in zip(ctx.rows, self._trails, strict=True):
            if trail.length >= pace.length or len(trail.places) >= pace.places:
                self._end(row, trail)
        return self._drafter.propose(ctx, sampling, budget)

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Put down the features of what was kept, and what the target thought after the last of it."""
        self._drafter.observe(ctx, tree, accepted, output)
        features = output.features_on(tree, accepted.path)
        if features is None:
            raise ConfigError(f"{self.name} reads hidden states, and the target's forward gave none")
        paths, counts = accepted.path.tolist(), accepted.num.tolist()
        parents = tree.parents.tolist()
        for number, (row, trail) in enumerate(zip(ctx.rows, self._trails, strict=True)):
            path = paths[number][: counts[number] + 1]
            trail.features.append(_own(features[number, : len(path)]))
            missed = path[-1] in parents[number]
            self._tally += Tally(len(path) - 1 + missed, len(path) - 1)
            place = row.length + len(path) - 1
            if missed and place > trail.start:
                best = self._best(output.logits[number, path[-1]])
                trail.places += [] if best is None else [(place, *best)]
        self._seconds += time.perf_counter() - self._began

    def remove(self, ctx: Context, row: int) -> None:
        """What the row has shown is kept."""
        self._end(ctx.rows[row], self._trails[row])
        self._trails[row] = self._trails[-1]
        self._trails.pop()
        self._drafter.remove(ctx, row)

    @property
    def num_read(self) -> list[int]:
        """See ``Resuming``, here and below."""
        return cast(Resuming, self._drafter).num_read

    def read_on(self, ctx: Context, row: Row, features: Tensor | None, stop: int) -> None:
        """A piece of a prompt: nothing to put down."""
        cast(Resuming, self._drafter).read_on(ctx, row, features, stop)

    # --- learning --------------------------------------------------------------------------------------------------

    def learn(self) -> None:
        """Between two steps: hand over what was found since the last time, and let the learner learn."""
        if self.learner.learn(self._found, self._tally, self._seconds):
            self._found, self._tally, self._seconds = [], Tally(), 0.0
        else:
            del self._found[: -self.learner.pace.ring]

    def _end(self, row: Row, trail: _Trail) -> None:
        """Make a stretch of the trail, and go on with its last tokens."""
        features = torch.cat(trail.features)[: max(len(row.tokens) - 1 - trail.start, 0)]
        ids = row.tokens[trail.start : trail.start + len(features) + 1]
        places = [each for each in trail.places if each[0] < trail.start + len(features)]
        if places and len(ids) > 2:
            with torch.inference_mode(False):
                where = torch.tensor([place - trail.start for place, _, _ in places])
                tokens = torch.stack([best for _, best, _ in places])
                probs = torch.stack([chances for _, _, chances in places])
                self._found.append(Stretch(torch.tensor(ids), _own(features), where, tokens, probs))
        kept = _own(features[-SHARED:])
        trail.start += len(features) - len(kept)
        trail.features, trail.places = [kept], []

    def _best(self, logits: Tensor) -> tuple[Tensor, Tensor] | None:
        """(V,) -> (K,) draft ids and chances of the likeliest tokens; None where the net cannot draft the best one."""
        ids = self.learner.net.target_ids
        with torch.inference_mode(False), torch.no_grad():
            own = logits.float() if ids is None else logits.index_select(0, ids.to(logits.device)).float()
            if not torch.isfinite(logits.max()) or own.max() < logits.max():
                return None
            best = own.topk(min(BEST, len(own)))
            return best.indices, best.values.softmax(0)


def _own(features: Tensor) -> Tensor:
    """A copy that outlives the step, and may be learnt from."""
    with torch.inference_mode(False), torch.no_grad():
        return features.clone()
