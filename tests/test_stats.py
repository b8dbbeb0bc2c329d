"""What steps add up to, by hand."""

from __future__ import annotations

import pytest
import torch

from draftwing.stats import RowStep, Stats, Step, Timings
from draftwing.tree import Accepted, DraftTree


def step(*rows: RowStep, lossless: bool = True) -> Step:
    roots = torch.zeros(len(rows), dtype=torch.int64)
    accepted = Accepted(roots[:, None], roots, roots)
    return Step(rows, DraftTree.root(roots), accepted, Timings(0.1, 0.2, 0.3, 0.4, 0.5), lossless)


def row(num_tokens: int, num_drafted: int, num_accepted: int, depth: int) -> RowStep:
    return RowStep(0, tuple(range(num_tokens)), num_drafted, num_accepted, depth)


# Depth 3 with two kept, depth 2 with none, depth 1 with one; a text cut to two of its four tokens; no draft at all.
ROWS = [row(3, 9, 2, 3), row(1, 2, 0, 2), row(2, 1, 1, 1), row(2, 3, 3, 3), row(1, 0, 0, 0)]


def check(stats: Stats) -> None:
    assert (stats.num_tokens, stats.num_forwards, stats.num_drafted, stats.num_accepted) == (9, 5, 15, 6)
    assert stats.tau == 9 / 5
    assert (stats.reached, stats.taken) == ([4, 2, 2], [3, 2, 1])
    assert stats.alpha == [3 / 4, 1, 1 / 2]


def test_every_row_of_a_step_counts():
    stats = Stats.of([step(*ROWS[:2]), step(ROWS[2]), step(*ROWS[3:])])
    check(stats)
    assert stats.seconds == pytest.approx({"draft": 0.3, "verify": 0.6, "accept": 0.9, "commit": 1.2, "host": 1.5})
    assert stats.total_seconds == pytest.approx(4.5)
    assert stats.lossless
    assert Timings(1, 2, 4, 8, 16).total == 31


def test_folds_add_up():
    """The shorter one may come first or last."""
    for cut in (1, 2, 3, 4):
        total = Stats.sum([Stats.of([step(*ROWS[:cut])]), Stats(), Stats.of([step(*ROWS[cut:])])])
        check(total)
        check(Stats.sum([Stats.of([step(*ROWS[cut:])]), Stats.of([step(*ROWS[:cut])])]))
        assert total.total_seconds == pytest.approx(3.0)


def test_one_lossy_step_is_enough():
    steps = [step(ROWS[0]), step(ROWS[1], lossless=False), step(ROWS[2])]
    assert not Stats.of(steps).lossless
    assert not Stats.sum([Stats.of(steps[:1]), Stats.of(steps[1:])]).lossless
    assert Stats.sum([Stats.of(steps[:1]), Stats.of(steps[2:])]).lossless


def test_nothing_is_no_division():
    assert (Stats().tau, Stats().alpha, Stats().total_seconds) == (0.0, [], 0)
