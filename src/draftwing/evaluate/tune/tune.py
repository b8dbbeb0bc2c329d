"""Tunes the layers with which a target drafts for itself: see ``search`` for how, ``recorded`` and ``pace`` by what.

A trial is a few forwards over recorded texts, weighed with measured times: a second or two, where decoding would take
a minute. What is found best is written at once, so that a run may be stopped at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwing.errors import CheckpointError
from draftwing.evaluate.tune.recorded import Recorded
from draftwing.evaluate.tune.search import exits, search
from draftwing.evaluate.tune.trials import Basis, Trial, Trials
from draftwing.heads.layer_set import LayerSet
from draftwing.heads.write import check_destination
from draftwing.model.lean import LeanTarget
from draftwing.model.subnet import Parts
from draftwing.nets.eagle_config import TargetId
from draftwing.train.lock import locked

__all__ = ["DEPTH", "Plan", "Tuned", "tune"]

DEPTH = 4  # of the chains whose acceptance is recorded; longer ones are reckoned from these


@dataclass(frozen=True)
class Plan:
    """What is tuned, and how.

    Attributes:
        out: the folder that ``--draft`` then takes.
        target: for which.
        num_trials: sets to try in all, those of earlier runs counted.
        seed: of the search.
        only_exits: try the first layer, the first two, ... and nothing else.
        about: what else trials depend on; any JSON.
    """

    out: Path
    target: TargetId
    num_trials: int = 200
    seed: int = 0
    only_exits: bool = False
    about: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Tuned:
    """What came of it.

    Attributes:
        best: of all that were tried.
        plain: tokens a second without drafts, by the same measure.
        num_trials: in all.
        finished: whether none is left.
    """

    best: Trial
    plain: float
    num_trials: int
    finished: bool

    @property
    def speedup(self) -> float:
        """That is expected."""
        return self.best.tokens_per_s / self.plain


def tune(
    plan: Plan,
    new_basis: Callable[[], Basis],
    new_target: Callable[[], LeanTarget],
    on_progress: Callable[[int, int, Trial | None], None] = lambda done, total, best: None,
) -> Tuned:
    """Try sets until all are tried that were asked for, or Ctrl-C; the same plan goes on where it was stopped.

    Args:
        new_basis: lets the target write texts, and measures its times; not called where an earlier run did.
        new_target: the target with plain weights.
        on_progress: called with the sets tried, how many there will be, and the best one.

    Raises:
        CheckpointError: the folder cannot be read or written, is in use, or holds another model.
        ConfigError: it holds a run about something else.
        UnsupportedError: optuna is not installed.
        KeyboardInterrupt: before any set was tried.
    """
    about = {**(plan.about or {}), "target": plan.target.name, "seed": plan.seed, "exits": plan.only_exits}
    check_destination(plan.out)
    with locked(plan.out, CheckpointError):
        trials = Trials(plan.out, about, plan.target.num_layers)
        trials.read()
        if trials.basis is None:
            trials.begin(new_basis())
        basis = trials.basis
        assert basis is not None
        recorded = Recorded(new_target(), basis.texts, DEPTH)
        num_layers = plan.target.num_layers
        total = num_layers - 1 if plan.only_exits else min(plan.num_trials, 4**num_layers)
        before = len(trials.found)

        def score(parts: Parts) -> float:
            on_progress(len(trials.found), total, trials.best)
            accepted = recorded.accepted(parts)
            trial = Trial(parts, accepted, *basis.pace.tokens_per_s(parts, accepted))
            trials.add(trial)
            if trials.best is trial:
                _write(plan, trials, basis)
            return trial.tokens_per_s

        finished = True
        try:
            if plan.only_exits:
                for parts in exits(num_layers):
                    if parts not in trials.scores:
                        score(parts)
            else:
                search(num_layers, score, total, plan.seed, trials.scores)
        except KeyboardInterrupt:
            finished = False
        best = trials.best
        if best is None:
            raise KeyboardInterrupt
        if len(trials.found) == before:  # all were there; the set may have been deleted since
            _write(plan, trials, basis)
        on_progress(len(trials.found), total, best)
    return Tuned(best, basis.pace.plain, len(trials.found), finished)


def _write(plan: Plan, trials: Trials, basis: Basis) -> None:
    """Put the best set where ``--draft`` finds it."""
    best = trials.best
    assert best is not None
    tuning = {
        "trials": len(trials.found),
        "accepted": list(best.accepted),
        "depth": best.depth,
        "tokens_per_s": best.tokens_per_s,
        "plain_tokens_per_s": basis.pace.plain,
    }
    LayerSet(best.parts, plan.target, tuning).write(plan.out)
