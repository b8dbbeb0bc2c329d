"""Measured curves equal their definitions, and learned costs follow the machine."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from draftwing.budget import CONFIG
from draftwing.budget.costs import TYPICAL, Costs, Curve, LearnedCosts

COSTS = Costs(
    verify=Curve(((1, 4.0), (4, 4.4), (16, 8.0))),
    chain=Curve(((1, 0.3), (4, 0.9))),
    tree=Curve(((1, 0.5), (4, 1.7))),
    width=4,
    per_token=0.001,
    per_row=0.25,
    draft_per_row=0.1,
    context=64,
)


# --- curves ----------------------------------------------------------------------------------------------------------


def test_a_curve_goes_through_its_knots():
    curve = Curve(((2, 1.0), (4, 3.0), (8, 3.0), (10, 7.0)))
    for count, seconds in curve.knots:
        assert curve(count) == seconds
    assert [curve(count) for count in (0, 1, 2)] == [1.0] * 3  # flat before the first
    assert [curve(count) for count in (3, 3.5, 6, 9)] == [2.0, 2.5, 3.0, 5.0]
    assert [curve(count) for count in (11, 20)] == [9.0, 27.0]  # behind the last as between the last two
    assert Curve(((3, 2.0),))(1) == Curve(((3, 2.0),))(9) == 2.0
    assert Curve(())(5) == 0.0


def isotonic(values: list[float]) -> list[float]:
    """The rising sequence of least squares, by its min-max formula."""
    n = len(values)
    mean = [[math.fsum(values[i : j + 1]) / (j + 1 - i) if j >= i else 0.0 for j in range(n)] for i in range(n)]
    return [max(min(mean[i][j] for j in range(k, n)) for i in range(k + 1)) for k in range(n)]


def test_a_fit_is_the_nearest_rising_curve():
    rng = random.Random(1)
    for size in (1, 2, 3, 5, 9, 14):
        for _ in range(40):
            counts = sorted(rng.sample(range(1, 70), size))
            seconds = [rng.choice((0.1 * i, 1.0, 2.0)) + rng.random() for i in range(size)]
            samples = list(zip(counts, seconds, strict=True))
            rng.shuffle(samples)  # the order in which they were measured does not matter
            curve = Curve.fit({count: [value] for count, value in samples})
            assert [count for count, _ in curve.knots] == counts
            assert [value for _, value in curve.knots] == pytest.approx(isotonic(seconds))


def test_a_fit_takes_the_medians_of_the_faster_half():
    curve = Curve.fit({1: [3.0, 1.0, 99.0], 4: [8.0, 70.0, 9.0, 6.0, 11.0], 2: [5.0]})
    assert curve.knots == ((1, 2.0), (2, 5.0), (4, 8.0))
    slowed = {count: [*values, *[100.0] * len(values)] for count, values in {1: [1.0, 2.0, 3.0], 3: [4.0]}.items()}
    assert Curve.fit(slowed).knots == ((1, 2.0), (3, 4.0))
    assert Curve.fit({}).knots == Curve.fit_line({}).knots == ()


def test_a_line_is_straight_whatever_one_count_says():
    true = {count: 0.5 + 0.25 * count for count in (1, 2, 4, 6, 8)}
    for odd in (None, 2, 4, 8):
        line = Curve.fit_line({count: [9.0 if count == odd else seconds] for count, seconds in true.items()})
        assert dict(line.knots) == pytest.approx(true)
    assert Curve.fit_line({8: [1.0], 1: [2.0]}).knots == ((1, 1.5), (8, 1.5))  # it never falls
    assert Curve.fit_line({3: [2.0]}).knots == ((3, 2.0),)
    assert all(seconds >= 0 for _, seconds in Curve.fit_line({1: [0.0], 2: [0.0], 4: [9.0], 5: [12.0]}).knots)


def test_a_bent_curve_rises_less_and_less():
    true = {1: 1.0, 2: 1.5, 4: 2.1, 8: 2.5}
    bent = Curve.fit_concave({count: [seconds] for count, seconds in true.items()})
    assert dict(bent.knots) == pytest.approx(true)
    rng = random.Random(2)
    for size in (1, 2, 3, 4, 6):
        for _ in range(20):
            samples = {count: [rng.random() * 4] for count in rng.sample(range(1, 20), size)}
            fitted, bent = Curve.fit(samples).knots, Curve.fit_concave(samples).knots
            slopes = [(high - low) / (right - left) for (left, low), (right, high) in pairwise(bent)]
            assert [count for count, _ in bent] == [count for count, _ in fitted]
            assert min(slopes, default=0.0) > -1e-9
            if min(seconds for _, seconds in bent) > 0:
                assert all(after <= before + 1e-9 for before, after in pairwise(slopes))
                # In the mean it is what was measured.
                assert math.fsum(seconds for _, seconds in bent) == pytest.approx(math.fsum(own for _, own in fitted))
    assert Curve.fit_concave({}).knots == ()


# --- measured costs --------------------------------------------------------------------------------------------------


def test_seconds_add_up():
    costs = COSTS
    assert costs.verify_seconds(4) == 4.4
    assert costs.verify_seconds(4, 1, 64) == 4.4
    assert costs.verify_seconds(10) == pytest.approx(6.2)
    # Three rows of two nodes are six nodes, two more rows, and three times the context.
    assert costs.verify_seconds(2, 3, 100) == pytest.approx(costs.verify(6) + 2 * 0.25 + (3 * 100 - 64) * 0.001)
    assert Costs(Curve(((1, 0.1),)), per_token=1.0, context=64).verify_seconds(1, 1, 0) > 0
    assert costs.draft_seconds(0) == costs.draft_seconds(0, 4, 3) == 0
    assert costs.draft_seconds(2) == pytest.approx(0.5)
    assert costs.draft_seconds(2, 4) == pytest.approx(0.9)
    assert costs.draft_seconds(2, 1, 3) == pytest.approx(0.5 * 1.2)
    chains_alone = Costs(costs.verify, costs.chain)
    assert chains_alone.draft_seconds(3, 4) == chains_alone.draft_seconds(3, 1) == pytest.approx(0.7)
    assert costs.level_seconds == pytest.approx(0.2)  # a level more, not the first with what it needs besides
    assert Costs(costs.verify, Curve(((1, 1.0),))).level_seconds == 1.0


BY_NODES = Costs(
    Curve(((1, 1.0), (2, 1.1), (8, 1.7))), per_token=0.5, per_token_of=Curve(((1, 0.001), (4, 0.0013))), context=64
)


def test_a_token_of_context_costs_more_with_more_nodes():
    """Keys and values are read once for all nodes, but each node multiplies with them."""
    assert BY_NODES.verify_seconds(4, 1, 164) - BY_NODES.verify_seconds(4) == pytest.approx(100 * 0.0013)
    assert BY_NODES.verify_seconds(2, 2, 82) - BY_NODES.verify_seconds(2, 2) == pytest.approx(100 * 0.0011)
    assert BY_NODES.verify_seconds(1, 1, 64) == 1.0
    assert COSTS.token_seconds(7) == COSTS.per_token


# --- learned costs ---------------------------------------------------------------------------------------------------


def learned(verify, draft, rows=1, steps=60, baseline=1.0, noise=0.0) -> LearnedCosts:
    """Costs learned from small trees and chains of a machine whose costs are other than typical ones."""
    costs, rng = LearnedCosts(TYPICAL, rows), random.Random(0)
    costs.baseline = baseline
    for step in range(steps):
        nodes, levels = ((2, 1), (3, 2), (6, 3), (9, 4))[step % 4]
        slow = 1 + noise * rng.random()
        costs.observe(nodes, levels, (verify(nodes) + draft(levels)) * slow, draft(levels) * slow)
    return costs


@pytest.mark.parametrize("rows", [1, 8])
def test_costs_are_typical_until_steps_are_observed(rows):
    costs = LearnedCosts(TYPICAL, rows)
    assert costs.baseline == TYPICAL.verify_seconds(1, rows)
    for pace in (1.0, 0.005):  # seconds of a baseline step
        costs.baseline = pace
        for nodes in (1, 2, 7, 33, 90):
            share = TYPICAL.verify_seconds(nodes, rows) / TYPICAL.verify_seconds(1, rows)
            assert costs.verify_seconds(nodes) == pytest.approx(pace * share)
        for depth, width in ((1, 1), (5, 1), (3, 4)):
            share = TYPICAL.draft_seconds(depth, width, rows) / TYPICAL.verify_seconds(1, rows)
            assert costs.draft_seconds(depth, width) == pytest.approx(pace * share)
        assert costs.draft_seconds(0) == 0.0


@pytest.mark.parametrize("pace", [1.0, 0.01])
@pytest.mark.parametrize("factor", [0.1, 1.0, 4.0])
def test_costs_come_to_those_of_the_machine(factor, pace):
    """Also those of larger trees than any that was observed."""

    def verify(nodes: int) -> float:
        return pace * (1.02 + factor * (TYPICAL.verify(nodes) - 1))

    def draft(levels: int) -> float:
        return pace * (0.01 + factor * TYPICAL.chain(levels))

    costs = learned(verify, draft, baseline=pace)
    for nodes in (2, 4, 8, 32):
        assert costs.verify_seconds(nodes) == pytest.approx(verify(nodes), rel=0.1)
    for levels in (1, 4, 8):
        assert costs.draft_seconds(levels) == pytest.approx(draft(levels), abs=0.05 * pace)
    assert costs.draft_seconds(4, 4) > costs.draft_seconds(4)
    assert costs.verify_seconds(1) == pace


def test_a_few_steps_change_costs_by_much():
    """Four-bit weights: a second row takes .3 of a step, five times the typical share."""
    costs = learned(lambda nodes: 1 + 0.3 * (nodes - 1), lambda levels: 0.2 * levels, steps=4)
    assert costs.verify_seconds(6) == pytest.approx(2.5, rel=0.2)
    assert costs.draft_seconds(4) == pytest.approx(0.8, rel=0.3)


def test_interrupted_steps_change_little():
    costs = learned(TYPICAL.verify, TYPICAL.chain)
    before = costs.verify_seconds(6), costs.draft_seconds(3)
    costs.observe(6, 3, 500.0, 250.0)
    for _ in range(4):
        costs.observe(6, 3, TYPICAL.verify(6) + TYPICAL.chain(3), TYPICAL.chain(3))
    assert (costs.verify_seconds(6), costs.draft_seconds(3)) == pytest.approx(before, rel=0.2)


def test_learned_costs_follow_the_machine():
    costs = learned(TYPICAL.verify, TYPICAL.chain, steps=200)
    for _ in range(300):
        costs.observe(6, 3, 3.0 + 1.0, 1.0)
    assert costs.verify_seconds(6) == pytest.approx(3.0, rel=0.05)
    assert costs.draft_seconds(3) == pytest.approx(1.0, rel=0.05)


def test_a_machines_fixed_cost_is_not_forgotten():
    """A constant that is added to every step stays known after thousands of them."""
    costs = learned(lambda nodes: TYPICAL.verify(nodes) + 0.5, lambda levels: TYPICAL.chain(levels) + 0.4, steps=3000)
    for nodes in (2, 4, 8):
        assert costs.verify_seconds(nodes) == pytest.approx(TYPICAL.verify(nodes) + 0.5, rel=0.05)
    assert costs.draft_seconds(4) == pytest.approx(TYPICAL.chain(4) + 0.4, rel=0.1)


def test_learned_costs_are_never_negative():
    costs = learned(lambda nodes: 0.5, lambda levels: 0.0)
    assert min(costs.verify_seconds(nodes) for nodes in range(1, 70)) >= costs.baseline
    assert min(costs.draft_seconds(depth, width) for depth in range(9) for width in (1, 4)) >= 0


def test_observed_costs_are_shown_at_the_measured_sizes():
    costs = learned(lambda nodes: 1 + 0.3 * (nodes - 1), lambda levels: 0.2 * levels)
    shown = costs.knots
    assert [count for count, _ in shown.verify.knots] == list(CONFIG.nodes)
    assert all(seconds == costs.verify_seconds(count) for count, seconds in shown.verify.knots)
    assert all(seconds == costs.draft_seconds(depth) for depth, seconds in shown.chain.knots)
    assert all(seconds == costs.draft_seconds(depth, shown.width) for depth, seconds in shown.tree.knots)
    assert not LearnedCosts(TYPICAL.of_target, 1).knots.chain.knots
