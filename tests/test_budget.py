"""What the planner learns and decides, in simulated worlds; and that no decision changes the output."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
import torch

import test_exact
from draftwing.accept import RULES, get_rule
from draftwing.budget import CONFIG
from draftwing.budget import acceptance as accepting
from draftwing.budget.acceptance import Acceptance, Ranks
from draftwing.budget.costs import TYPICAL, TYPICAL_GPU, Costs, Curve, LearnedCosts
from draftwing.budget.planner import FEW_SHAPES, SHAPES, Bandit, Planner, planner_for
from draftwing.decode import Decoder
from draftwing.methods.base import Budget, Drafter, NoDrafter
from draftwing.methods.causal_lm import CausalLMDrafter
from draftwing.methods.lookup import LookupDrafter
from draftwing.methods.net_drafter import EagleDrafter
from draftwing.models.context import Context, Row
from draftwing.runtime.tree_builder import RuledTrees
from draftwing.tree import PAD, Accepted, DraftTree
from test_exact import MAX_TOKENS, PROMPTS, VOCAB, run

# Seconds relative to a baseline step: nodes nearly free, as with weights read from memory; int8; 4-bit weights.
MEMORY = Costs(
    verify=Curve(((1, 1.0), (4, 1.06), (16, 1.3), (64, 3.0))),
    chain=Curve(((1, 0.05), (8, 0.4))),
    tree=Curve(((1, 0.1), (8, 0.8))),
    width=4,
)
INT8 = Costs(
    verify=Curve(((1, 1.0), (4, 1.25), (16, 1.9), (64, 6.0))),
    chain=Curve(((1, 0.2), (8, 1.4))),
    tree=Curve(((1, 0.4), (8, 2.8))),
    width=4,
)
FOUR_BIT = Costs(
    verify=Curve(((1, 1.0), (2, 1.3), (4, 1.9), (16, 5.0), (64, 20.0))),
    chain=Curve(((1, 0.2), (8, 1.4))),
    tree=Curve(((1, 0.4), (8, 2.8))),
    width=4,
)
COSTS = INT8
TREE = Budget(14, 4, 63)


# --- acceptance ------------------------------------------------------------------------------------------------------


def feed(acceptance: Acceptance, chance: float, rate: float, times: int, depth: int = 1, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(times):
        hits = rng.random(4) < rate
        acceptance.observe(np.full(4, chance), np.full(4, depth), hits)


def test_unobserved_a_chance_is_what_the_drafter_says():
    acceptance = Acceptance()
    chances = np.linspace(0.01, 0.9975, 50)
    for depth in (1, 2, 9):
        assert acceptance(chances, depth) == pytest.approx(chances)
    assert acceptance(np.array([[0.0], [1.0]]), 1).shape == (2, 1)
    assert ((acceptance(np.array([0.0, 1.0]), 1) > 0) & (acceptance(np.array([0.0, 1.0]), 1) < 1)).all()
    for nothing in ([], [np.nan, np.nan]):
        acceptance.observe(np.array(nothing), np.ones(len(nothing), dtype=int), np.zeros(len(nothing), dtype=bool))
        assert acceptance(chances, 1) == pytest.approx(chances)


@pytest.mark.parametrize(("chance", "rate"), [(0.9, 0.3), (0.15, 0.6), (0.5, 0.0), (0.03, 1.0)])
def test_it_comes_to_the_observed_rate(chance, rate):
    acceptance = Acceptance()
    before = abs(acceptance(np.array([chance]), 2)[0] - rate)
    errors = [before]
    for turn in range(4):
        feed(acceptance, chance, rate, 50, depth=2, seed=turn)
        errors.append(abs(acceptance(np.array([chance]), 2)[0] - rate))
    assert errors[1] < before
    assert errors[-1] < 0.08


def test_a_greater_chance_never_counts_less():
    acceptance, rng = Acceptance(), np.random.default_rng(3)
    grid = np.linspace(0, 1, 201)
    for _ in range(60):
        count = rng.integers(1, 9)
        chances, depths = rng.random(count), rng.integers(1, 7, count)
        acceptance.observe(chances, depths, rng.random(count) < 1 - chances)  # the very opposite of what is said
        for depth in (1, 2, 3, 4, 8):
            line = acceptance(grid, depth)
            assert (np.diff(line) >= -1e-12).all()
            assert ((line > 0) & (line < 1)).all()


def test_depths_are_told_apart_as_far_as_there_are_many():
    acceptance, chance = Acceptance(), np.array([0.5])
    for depth, rate in ((1, 0.9), (2, 0.1)):
        feed(acceptance, 0.5, rate, 100, depth)
    assert acceptance(chance, 1) > 0.8 > 0.2 > acceptance(chance, 2)
    assert acceptance(chance, 3) == pytest.approx(0.5, abs=0.05)
    feed(acceptance, 0.5, 0.0, 100, accepting.NUM_DEPTHS + 3)
    assert acceptance(chance, accepting.NUM_DEPTHS) == acceptance(chance, accepting.NUM_DEPTHS + 1) < 0.1
    assert acceptance(chance, accepting.NUM_DEPTHS - 1) == pytest.approx(0.5, abs=0.05)
    knots, rates = acceptance.tables()
    assert knots.dtype == rates.dtype == np.float32
    for depth in range(1, accepting.NUM_DEPTHS + 1):
        assert acceptance(knots[depth - 1], depth) == pytest.approx(rates[depth - 1], abs=1e-6)


def test_it_forgets():
    acceptance, chance = Acceptance(), np.array([0.5])
    feed(acceptance, 0.5, 1.0, 2000)
    assert acceptance(chance, 1) > 0.95
    feed(acceptance, 0.5, 0.0, 600)
    assert acceptance(chance, 1) < 0.05  # though by far the most of all observations were accepted


def test_ranks_come_to_the_observed_rates_and_follow_them():
    rng, ranks = random.Random(1), Ranks()
    for rate in (0.9, 0.4):
        for _ in range(400):
            ranks.observe(2, 1, rng.random() < rate)
        assert ranks.rate(2, 1) == pytest.approx(rate, abs=0.15)
    fresh = Ranks()
    assert [ranks.rate(depth, rank) for depth, rank in ((1, 1), (3, 1), (2, 0), (2, 2))] == [
        fresh.rate(depth, rank) for depth, rank in ((1, 1), (3, 1), (2, 0), (2, 2))
    ]
    ranks.observe(1, accepting.NUM_RANKS, True)  # one that nobody counts
    assert ranks.rate(9) == ranks.rate(accepting.NUM_DEPTHS)


def test_the_likeliest_paths_are_those_of_all_there_are():
    rng, ranks = random.Random(2), Ranks()
    for _ in range(300):
        ranks.observe(rng.randint(1, 5), rng.randint(0, 3), rng.random() < 0.4)
    every = {}
    for length in (1, 2, 3):
        for path in product(range(3), repeat=length):
            every[path] = np.prod([ranks.rate(depth, rank) for depth, rank in enumerate(path, 1)])
    found = list(ranks.likeliest(3, 3))
    assert dict(found) == pytest.approx(every)
    assert [chance for _, chance in found] == sorted((chance for _, chance in found), reverse=True)
    seen = {()}
    for path, _ in found:
        assert path[:-1] in seen  # a tree, wherever it is cut
        seen.add(path)


# --- arms ------------------------------------------------------------------------------------------------------------


class Arms:
    """A world in which every arm has a speed, in tokens per second, that does not depend on the text."""

    def __init__(self, speeds, costs: Costs = INT8, noise: float = 0.0, claims: Sequence[float] = ()) -> None:
        self.planner, self.ctx, self.speeds = Planner(costs, TREE), context(), speeds
        self.noise, self.rng, self.claims = noise, random.Random(0), claims
        self.cold: Sequence[float] = ()  # factors of the baseline's first steps after a draft
        self.since_draft = 0

    def new_request(self) -> None:
        self.ctx = context()

    def play(self, steps: int) -> list[int]:
        """Return the arms that are played: 0 for the baseline, 1 and 2 for chains, 3 for the grown tree."""
        played = []
        for _ in range(steps):
            budget = self.planner.budget(self.ctx, "keyed")
            arm = 3 if budget.rule is not None else budget.depth
            tree = replace(DraftTree.root(torch.zeros(1, dtype=torch.int64)), num_draft_forwards=float(arm))
            if self.claims:
                tree = replace(tree, confidence=torch.tensor([[self.claims[arm]]]))
            seconds = (1 + self.noise * self.rng.random()) / self.speeds[arm]
            if arm == 0 and self.since_draft < len(self.cold):
                seconds *= self.cold[self.since_draft]
            self.since_draft = 0 if arm else self.since_draft + 1
            self.planner.observe(tree, taken(tree, [0]), 1, seconds, 0.0)
            played.append(arm)
        return played


@pytest.mark.parametrize("best", range(4))
def test_the_fastest_arm_is_played(best):
    speeds = [1.0, 0.8, 0.9, 0.85]
    speeds[best] = 1.4 if best else 1.1
    assert Arms(speeds).play(400).count(best) > 340


@pytest.mark.parametrize("drafts", [0.9, 1.1])
def test_the_baselines_first_steps_after_drafts_are_slower_and_do_not_count(drafts):
    """As on a processor whose caches hold all weights: 3.9, 3.5, 3.4, 3.3, 3.2, 3.2, ... ms after drafts."""
    arms = Arms([0.5, 0.8, 0.3, 0.3])
    arms.cold = (1.22, 1.1, 1.06, 1.03, 1.02)
    assert arms.play(300)[200:].count(1) > 80
    arms.speeds = [1.0, drafts, 0.3, 0.3]
    assert arms.play(800)[400:].count(1 if drafts > 1 else 0) > 340


def test_the_baseline_is_probed_before_any_draft_was_timed():
    """Drafts that always follow baseline steps of other batch sizes are never timed."""
    bandit, probed = Bandit([Budget(1)], LearnedCosts(INT8, 1), has_grown=False), 0
    for _ in range(60):
        if bandit.choose([1.0, 2.0]) == 0:
            bandit.add(1.0, 1.0, 1.0)
            probed += bandit.best == 1
    assert probed


def test_an_interrupted_step_does_not_change_the_choice():
    arms = Arms([1.0, 0.3, 0.3, 1.5])
    arms.play(100)
    arms.speeds = [1.0, 0.3, 0.3, 1e-3]
    arms.play(1)
    arms.speeds = [1.0, 0.3, 0.3, 1.5]
    assert arms.play(50).count(3) > 45


def test_a_change_of_arms_must_be_worth_more_than_noise_unless_drafts_have_become_a_loss():
    little = 1 + (CONFIG.min_gain - 1) / 2
    arms = Arms([1.0, 0.3, 0.3, 0.93], replace(INT8, chain=Curve(((1, 0.5), (8, 4.0)))))
    assert arms.play(2000)[1000:].count(0) > 950
    arms.speeds[3], played = little, []
    for _ in range(30):
        arms.new_request()
        played += arms.play(100)
    assert played.count(0) > 0.9 * len(played)
    assert played.count(3) > 30  # they are tried in every request
    arms.speeds[3] = CONFIG.min_gain + 0.06
    assert arms.play(1500)[1000:].count(3) > 450
    arms.speeds[3] = little
    assert arms.play(1500)[1000:].count(3) > 450
    arms.speeds[3] = 1 / little
    assert arms.play(1500)[1000:].count(0) > 450


def test_arms_whose_draft_probabilities_are_off_by_different_factors_are_compared_by_what_is_emitted():
    """A chain that claims too much loses to another that claims too little, if that one is faster."""
    arms = Arms([1.0, 1.1, 1.3, 0.5], claims=[1.0, 1.4, 0.7, 1.0])
    assert arms.play(1500)[500:].count(2) > 900


def test_drafts_that_follow_a_step_without_a_match_count():
    """A lookup proposes something in every other step only: these steps show its speed as well as the others."""
    planner, ctx = Planner(INT8.of_target, TREE, ()), context()
    drafts = 0
    for step in range(600):
        budget = planner.budget(ctx, "keyed")
        if budget.depth and step % 2:
            tree, drafts = DraftTree.chain(torch.full((1, 2), 4)), drafts + 1
            planner.observe(tree, taken(tree, [0, 1]), 2, 1.1, 0.0)
        else:
            root = DraftTree.root(torch.zeros(1, dtype=torch.int64))
            planner.observe(root, taken(root, [0]), 1, 1.05 if budget.depth else 1.0, 0.0)
    assert drafts > 250


def test_the_first_steps_are_the_baselines_and_then_predictions_choose():
    played = Arms([1.0, 1.0, 1.0, 1.0]).play(CONFIG.warmup_steps + 1)
    assert played[:-1] == [0] * CONFIG.warmup_steps
    assert played[-1] > 0  # by the assumed acceptance drafts gain
    expensive = replace(INT8, chain=Curve(((1, 5.0), (8, 40.0))))
    assert not any(Arms([1.0, 0.2, 0.2, 0.2], expensive).play(20))  # and by these costs they cannot


def probe_starts(played: list[int]) -> list[int]:
    return [step for step in range(1, len(played)) if played[step] and not played[step - 1]]


def test_probes_become_rare_while_nothing_changes():
    arms = Arms([1.0, 0.3, 0.3, 0.9])
    gaps = [later - earlier for earlier, later in pairwise(probe_starts(arms.play(4000)))]
    assert gaps[0] < 2 * CONFIG.first_interval
    assert gaps[-1] >= CONFIG.last_interval
    assert sum(map(bool, arms.play(2000))) <= 2 * (2000 / CONFIG.last_interval + 1)


def test_a_new_request_is_probed_soon():
    """Predictions and measurements are against drafts, but leave them a chance."""
    arms = Arms([1.0, 0.9, 0.3, 0.3], replace(INT8, chain=Curve(((1, 0.6), (8, 4.8)))))
    assert not any(arms.play(3000)[-CONFIG.first_interval :])
    arms.new_request()
    assert any(arms.play(CONFIG.first_interval))


@pytest.mark.parametrize("arm", range(4))
def test_an_arm_that_becomes_the_fastest_is_noticed_though_the_best_one_stays_as_it_was(arm):
    best = 3 if arm != 3 else 1
    arms = Arms([1.0, 0.9, 0.9, 0.9])
    arms.speeds[best] = 1.3
    assert arms.play(300)[200:].count(best) > 80
    arms.speeds[arm] = 3.0
    assert arms.play(1000)[800:].count(arm) > 180


def test_a_change_is_noticed_in_the_middle_of_a_request():
    arms = Arms([1.0, 0.3, 0.3, 2.0])
    arms.play(300)
    arms.speeds[3] = 0.4
    assert arms.play(120)[60:].count(0) > 50  # drafts that no longer pay are soon dropped
    arms.speeds[3] = 2.0
    assert arms.play(900)[600:].count(3) > 250  # and return when they pay again


@pytest.mark.parametrize("steps", [60, 100])
def test_a_machine_that_has_become_faster_shows_in_the_baseline_too(steps):
    """Drafts that lose are not kept because the baseline was last timed while the machine was slow."""
    arms = Arms([0.4, 0.36, 0.3, 0.3])
    arms.play(100)
    arms.speeds = [0.4, 0.5, 0.3, 0.3]
    assert arms.play(steps)[-20:].count(1) > 15
    arms.speeds = [1.0, 0.9, 0.75, 0.75]
    assert arms.play(600).count(0) > 300


def test_probes_read_the_cold_first_draft_and_one_more():
    arms = Arms([1.0, 0.3, 0.3, 0.95])
    played = arms.play(2000)
    assert any(played[300:])
    for start in probe_starts(played)[10:]:
        assert played[start] == played[start + 1]
        assert played[start + 2] == 0


# --- what the planner makes of it ------------------------------------------------------------------------------------


def context(rows: int = 1, length: int = 0) -> Context:
    return Context(torch.device("cpu"), [Row([3] * (length + 1), length, 1) for _ in range(rows)])


def taken(tree: DraftTree, *paths: list[int]) -> Accepted:
    width = max(map(len, paths))
    path = torch.tensor([[*each, *[PAD] * (width - len(each))] for each in paths])
    return Accepted(path, (path != PAD).sum(1) - 1, torch.zeros(len(paths), dtype=torch.int64))


@pytest.mark.parametrize("rows", [1, 4])
def test_a_rule_holds_the_assumed_costs(rows):
    costs = replace(INT8, per_row=0.1, draft_per_row=0.5)
    planner, root, budget = (
        Planner(costs, TREE, ()),
        DraftTree.root(torch.zeros(1, dtype=torch.int64)),
        Budget(0),
    )
    while budget.rule is None:  # the first steps are the baseline's
        budget = planner.budget(context(rows), "keyed")
        planner.observe(root, taken(root, [0]), rows, costs.verify_seconds(1, rows), 0.0)
    rule = budget.rule
    assert (len(rule.gains), len(rule.verify)) == (14, 66)
    assert rule.verify[1:] == pytest.approx([costs.verify_seconds(nodes, rows) for nodes in range(1, 66)])
    assert rule.worth == pytest.approx(costs.verify_seconds(1, rows) / rows)
    levels = [costs.draft_seconds(level, 1, rows) for level in range(1, 16)]
    assert rule.costs == pytest.approx(np.diff(levels))
    assert rule.gains == pytest.approx([CONFIG.prior_acceptance * rule.worth] * 14)
    assert rule.share == pytest.approx((costs.tree(8) / costs.chain(8) - 1) / 3)
    assert bool((np.diff(Planner(costs, Budget(14, 4, 500)).rule(1).verify) >= 0).all())


def test_costs_follow_the_machines_pace():
    planner, root = Planner(INT8, TREE), DraftTree.root(torch.zeros(1, dtype=torch.int64))
    for _ in range(50):
        planner.budget(context(), "keyed")
        planner.observe(root, taken(root, [0]), 1, 3.0, 0.0)  # three times as slow as measured
    rule = planner.rule(1)
    assert rule.verify[8] == pytest.approx(3 * INT8.verify_seconds(8), rel=0.02)
    assert rule.costs[0] == pytest.approx(3 * (INT8.draft_seconds(2) - INT8.draft_seconds(1)), rel=0.02)
    assert rule.worth == pytest.approx(3.0, rel=0.02)


def test_rows_share_a_steps_time():
    """A token is worth its row's seconds, of which the step's are shared by all rows."""
    planner, ctx, root = Planner(INT8, TREE), context(rows=4), DraftTree.root(torch.zeros(4, dtype=torch.int64))
    for _ in range(50):
        planner.budget(ctx, "keyed")
        planner.observe(root, taken(root, *[[0]] * 4), 4, 2.0, 0.0)  # half a token a second in each row
    assert planner.rule(4).worth == pytest.approx(2.0 / 4, rel=0.02)


def test_a_level_is_worth_what_the_next_one_accepts():
    planner, ctx = Planner(INT8, TREE), context()
    chain = DraftTree.chain(torch.zeros(1, 3, dtype=torch.int64))
    for _ in range(100):
        planner.budget(ctx, "keyed")
        planner.observe(chain, taken(chain, [0, 1]), 2, 1.0, 0.1)  # the first level always, the second never
    planner.budget(ctx, "keyed")
    rule = planner.rule(1)
    assert rule.gains[0] < 0.2 * rule.worth
    assert rule.gains[1] > 0.3 * rule.worth  # no third level was observed


def test_tokens_that_come_faster_are_worth_less():
    worths = []
    for tokens in (1, 3, 6):
        planner, ctx = Planner(INT8, TREE, ()), context()
        for _ in range(60):
            budget = planner.budget(ctx, "keyed")
            tree = DraftTree.chain(torch.zeros(1, 1 + 4 * bool(budget.depth), dtype=torch.int64))
            planner.observe(tree, taken(tree, [0]), tokens if budget.depth else 1, 0.3 + 1.2, 0.3)
        worths.append(planner.rule(1).worth)
    assert worths == sorted(worths, reverse=True)
    assert worths[-1] == pytest.approx(1.5 / 6, rel=0.1)


@pytest.mark.parametrize("children", ["keyed", "top", "sampled"])
def test_arms_are_budgets(children):
    planner, ctx, seen = Planner(INT8, TREE), context(), []
    for _ in range(30):
        budget = planner.budget(ctx, children)
        tree = DraftTree.root(torch.zeros(1, dtype=torch.int64))
        planner.observe(tree, taken(tree, [0]), 1, 1.0, 0.0)
        seen.append((budget.depth, budget.width, budget.nodes, budget.rule is not None))
        assert budget.children == children
    assert {(0, 1, None, False), (1, 1, None, False), (2, 1, None, False), (14, 4, 63, True)} == set(seen)


@pytest.mark.parametrize("most", [1, 2, 7, 63])
@pytest.mark.parametrize("grown", [TREE, Budget(14), None], ids=str)
def test_a_node_limit_holds_for_every_arm(grown, most):
    planner, ctx = Planner(INT8, grown, SHAPES if grown is None else FEW_SHAPES), context()
    for _ in range(60):
        budget = planner.budget(ctx, "keyed", most)
        assert (budget.nodes or budget.depth * budget.width) <= most
        tree = DraftTree.root(torch.zeros(1, dtype=torch.int64))
        planner.observe(tree, taken(tree, [0]), 1, 1.0, 0.0)


def test_without_grown_trees_the_best_fixed_shape_is_played():
    for rate, best in ((0, Budget(0)), (1, max(SHAPES, key=lambda shape: shape.depth))):
        planner, ctx, played = Planner(MEMORY, None, SHAPES), context(), []
        for _ in range(400):
            budget = planner.budget(ctx, "sampled")
            tree = DraftTree.chain(torch.zeros(1, 1 + budget.depth, dtype=torch.int64))
            hits = [0, *range(1, 1 + int(budget.depth * rate))]
            planner.observe(tree, taken(tree, hits), len(hits), 1.0 + 0.01 * budget.depth, 0.01 * budget.depth)
            played.append(budget)
        assert all(budget.rule is None for budget in played)
        assert np.mean([budget.depth == best.depth for budget in played[-100:]]) > 0.9


def test_planners_suit_rule_drafter_and_device():
    heavy, light = Drafter(), NoDrafter()
    for rule, drafter, device, most, grows in (
        ("match", heavy, "cpu", TREE, True),
        ("match", heavy, "cuda", Budget(8, 4, 63), False),
        ("multi-round", heavy, "cpu", Budget(8, 4, 63), False),
        ("speculative", heavy, "cpu", Budget(8), False),
        ("match", light, "cpu", TREE, True),
        ("block", light, "cpu", Budget(14), False),
    ):
        planner = planner_for(rule, drafter, torch.device(device))
        assert planner.largest == most, (rule, device)
        budgets, ctx, root = [], context(), DraftTree.root(torch.zeros(1, dtype=torch.int64))
        for _ in range(30):
            budgets.append(planner.budget(ctx, get_rule(rule).children))
            planner.observe(root, taken(root, [0]), 1, 1.0, 0.0)
        assert any(budget.rule is not None for budget in budgets) is grows
        if RULES[rule].chain_only:
            assert all(budget.is_chain for budget in budgets)


# --- simulated worlds ------------------------------------------------------------------------------------------------


class World:
    """A drafter that claims a probability for its best child and is right at a rate; steps take what ``costs`` say,
    with noise and hiccups that only the planner's clock sees."""

    def __init__(self, planner: Planner, costs: Costs, claims: float, seed: int = 0, rows: int = 1) -> None:
        self.planner, self.costs, self.rng, self.noise = planner, costs, random.Random(seed), random.Random(seed + 99)
        self.claims, self.rate, self.slow, self.rows = claims, claims, 1.0, rows
        self.chances = np.log(sorted([claims, *[(1 - claims) / 10] * 3], reverse=True)).tolist()
        self.ctx = context(rows)
        self.tokens = self.seconds = 0.0
        self.drafted: list[bool] = []
        self.records, self.recorded = False, set()  # on a GPU, the first step with a budget records a graph

    def grow(self, budget: Budget) -> DraftTree:
        """Trees of a rule; else chains, with useless branches up to the nodes of the budget."""
        roots = [3] * self.rows
        if budget.depth == 0:
            return DraftTree.root(torch.tensor(roots))
        if budget.rule is None:
            chances = torch.tensor([[self.claims**depth for depth in range(budget.depth + 1)]] * self.rows)
            tree = DraftTree.chain(torch.full((self.rows, budget.depth + 1), 4), chances)
            told = torch.tensor([[1.0, *[self.claims] * budget.depth]] * self.rows)
            tree = replace(tree, node_probs=told, num_draft_forwards=float(budget.depth))
            if not budget.nodes:
                return tree
            tokens = torch.full((self.rows, budget.nodes + 1), 9)
            parents = torch.zeros_like(tokens)
            tokens[:, : tree.num_nodes], parents[:, : tree.num_nodes] = tree.tokens, tree.parents
            return replace(tree, tokens=tokens, parents=parents, confidence=None, node_probs=None)
        wanted = [True] * self.rows
        forest, entries = RuledTrees.start(budget.rule, roots, wanted, budget.width, budget.nodes), 1
        for level in range(1, budget.depth + 1):
            tokens, chances = [4, 5, 6, 7][: budget.width], self.chances[: budget.width]
            forest.branch([[tokens] * entries] * self.rows, [[chances] * entries] * self.rows)
            if level == budget.depth or not forest.choose_expanded():
                break
            entries = forest.num_newest
        return forest.finish(self.ctx.device).tree

    def path(self, tokens: list[int], parents: list[int]) -> list[int]:
        path = [0]
        while self.rng.random() < self.rate:
            below = [node for node, above in enumerate(parents) if above == path[-1] and tokens[node] == 4]
            if not below:
                break
            path.append(below[0])
        return path

    def step(self) -> None:
        budget = self.planner.budget(self.ctx, "keyed")
        tree = self.grow(budget)
        levels = float(tree.num_draft_forwards or 0)
        accepted = taken(tree, *map(self.path, tree.tokens.tolist(), tree.parents.tolist()))
        draft = self.costs.draft_seconds(levels, 1, self.rows) + (0.03 if levels else 0.0)
        draft += 0.3 if levels and not (self.drafted and self.drafted[-1]) else 0.0  # reads what it has missed
        verify = self.costs.verify_seconds(tree.num_nodes, self.rows, 0)
        noise = self.slow * (1 + abs(self.noise.gauss(0, 0.15))) * (3 if self.noise.random() < 0.01 else 1)
        tokens = int(accepted.num.sum()) + self.rows
        seconds = (draft + verify) * noise if not self.records or budget in self.recorded else None
        self.recorded.add(budget)
        self.planner.observe(tree, accepted, tokens, seconds, draft * noise if seconds else 9.0)
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + (draft + verify) * self.slow
        self.drafted.append(levels > 0)

    def share_of_oracle(self, steps: int) -> float:
        """Speed relative to the best fixed chain, which knows the rate."""
        self.tokens = self.seconds = 0.0
        for _ in range(steps):
            self.step()
        best = self.rows / self.costs.verify_seconds(1, self.rows, 0)
        for gamma in range(1, 15):
            tau = self.rows * sum(self.rate**depth for depth in range(gamma + 1))
            takes = self.costs.draft_seconds(gamma, 1, self.rows) + 0.03
            best = max(best, tau / (takes + self.costs.verify_seconds(gamma + 1, self.rows, 0)))
        return self.tokens / self.seconds * self.slow / best


def mean_share(costs, rates, steps, claims=None, believed=TYPICAL, rows=1, new_requests=False, slow=(1.0,)) -> float:
    """By default the planner knows nothing of the world's costs."""
    shares = []
    for seed in range(2):
        world = World(Planner(believed, TREE), costs, claims or max(rates[0], 0.05), seed, rows)
        for number, rate in enumerate(rates):
            world.rate, world.slow = rate, slow[number % len(slow)]
            world.ctx = context(rows) if new_requests else world.ctx
            shares.append(world.share_of_oracle(steps))
    return float(np.mean(shares))


@pytest.mark.parametrize(("costs", "rate"), [(INT8, 0.05), (INT8, 0.8), (MEMORY, 0.3), (FOUR_BIT, 0.8)])
def test_near_the_best_fixed_chain(costs, rate):
    assert mean_share(costs, [rate], 500) > 0.92


def test_worlds_that_change():
    assert mean_share(INT8, [0.1, 0.8] * 2, 200, 0.7, new_requests=True) > 0.78  # requests of two kinds in turn
    assert mean_share(INT8, [0.8, 0.1, 0.8], 200, 0.7) > 0.76  # in the middle of a request
    assert mean_share(INT8, [0.4], 500, 0.9) > 0.88  # a drafter that claims too much
    assert mean_share(INT8, [0.6] * 4, 150, slow=(1.0, 2.0)) > 0.88  # a machine that changes its speed
    assert mean_share(INT8, [0.5], 200, rows=4) > 0.9


def test_shapes_that_a_limit_makes_equal_are_one_arm():
    """So they are not probed one after the other."""
    root, decided = DraftTree.root(torch.zeros(1, dtype=torch.int64)), []
    for shapes in (SHAPES, [Budget(1)]):
        planner, ctx, budgets = Planner(TYPICAL_GPU, None, shapes), context(), []
        for _ in range(300):
            budgets.append(planner.budget(ctx, "keyed", max_nodes=1))
            tree = root if budgets[-1].depth == 0 else DraftTree.chain(torch.zeros(1, 2, dtype=torch.int64))
            planner.observe(tree, taken(tree, [0]), 1, 1.0 + tree.num_nodes, 0.5)
        decided.append(budgets)
    assert decided[0] == decided[1]
    assert Budget(0) in decided[0]
    assert Budget(1) in decided[0]


@pytest.mark.parametrize(("levels", "rate", "rows"), [(1, 0.3, 1), (8, 0.67, 1), (1, 0.8, 64)])
def test_near_the_best_fixed_chain_on_a_gpu(levels, rate, rows):
    """With a large model, and with a small one whose drafts are eight times as expensive in baseline steps."""
    costs = replace(TYPICAL_GPU, chain=Curve(tuple((n, levels * time) for n, time in TYPICAL_GPU.chain.knots)))
    shares = []
    for seed in range(3 if rows == 1 else 1):  # a batch of rows averages already
        planner = planner_for("match", Drafter(), torch.device("cuda"))
        world = World(planner, costs, rate, seed, rows)
        world.records = True
        shares.append([world.share_of_oracle(steps) for steps in (100, 300)])
    early, late = np.mean(shares, axis=0)
    assert early > 0.83
    assert late > 0.88


def test_a_step_that_recorded_a_graph_says_nothing_about_time():
    planner, ctx = Planner(INT8, None, SHAPES), context()
    for step in range(60):
        budget = planner.budget(ctx, "keyed")
        tree = DraftTree.chain(torch.zeros(1, 1 + budget.depth, dtype=torch.int64))
        accepted, (seconds, draft_seconds) = (
            taken(tree, [*range(1 + budget.depth)]),
            (1.0, 0.0) if step % 3 else (None, 50.0),
        )
        planner.observe(tree, accepted, 1 + budget.depth, seconds, draft_seconds)
    assert budget.depth == 8
    assert planner.observed_costs.verify_seconds(1) == pytest.approx(1.0)


def test_costs_that_are_wrong_by_a_factor_of_two():
    def scaled(curve):
        return Curve(tuple((count, 2 * seconds) for count, seconds in curve.knots))

    verify = Curve(tuple((count, 2 * seconds - 1) for count, seconds in INT8.verify.knots))
    believed = replace(INT8, verify=verify, chain=scaled(INT8.chain), tree=scaled(INT8.tree))
    assert mean_share(INT8, [0.6], 500, believed=believed) > 0.92


def test_useless_drafts_cost_little():
    world = World(Planner(INT8, TREE), INT8, 0.05)
    assert world.share_of_oracle(2000) > 0.965
    assert np.mean(world.drafted[1000:]) < 0.02


def test_batch_sizes_are_learned_apart():
    """Drafts pay for one row and not for eight, whose verification costs a multiple."""
    costs = replace(INT8, per_row=0.0, verify=Curve(((1, 1.0), (8, 1.3), (16, 8.0), (64, 40.0))))
    planner = Planner(costs, TREE)
    one, many = World(planner, costs, 0.8), World(planner, costs, 0.8, rows=8)
    for _ in range(60):
        for world in (one, many):
            for _ in range(5):
                world.step()
    assert np.mean(one.drafted[-150:]) > 0.9
    assert np.mean(many.drafted[-150:]) < 0.2


def test_threads_may_share_a_planner():
    planner, problems = Planner(INT8, TREE), []

    def loop(seed: int) -> None:
        try:
            world = World(planner, INT8, 0.8, seed, rows=1 + seed % 2)
            for _ in range(150):
                world.step()
        except BaseException as error:  # reported below, by the test's own thread
            problems.append(error)

    threads = [threading.Thread(target=loop, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


# --- requests without a drafter --------------------------------------------------------------------------------------


def end_requests(planner: Planner, rate: float, count: int, temperature: float = 1.0, steps: int = 120) -> list[bool]:
    """Return which of these requests are skipped."""
    world, skipped = World(planner, INT8, 0.5), []
    world.rate = rate
    for _ in range(count):
        skipped.append(planner.skips(temperature))
        if not skipped[-1]:
            world.ctx = context()
            for _ in range(steps):
                world.step()
    return skipped


def test_requests_are_skipped_after_several_without_a_gain():
    skipped = end_requests(Planner(INT8, TREE), 0.02, 40)
    assert not any(skipped[:2])
    assert skipped[2]
    runs = "".join("x" if each else "." for each in skipped).replace(".", " ").split()
    lengths = [len(run) for run in runs[:-1]]
    assert lengths == sorted(lengths)  # longer and longer, but never for good
    assert 2 <= max(lengths) <= 4
    assert skipped.count(False) >= 8


def test_requests_with_a_gain_or_a_lower_temperature_are_not_skipped():
    planner = Planner(INT8, TREE)
    assert not any(end_requests(planner, 0.9, 8))
    planner = Planner(INT8, TREE)
    end_requests(planner, 0.02, 2, temperature=0.8)
    assert not planner.skips(0.2)
    assert planner.skips(0.8)


def test_a_gain_ends_what_requests_before_it_showed():
    planner = Planner(INT8, TREE)
    end_requests(planner, 0.02, 2, temperature=0.0)
    end_requests(planner, 0.9, 3, temperature=0.0, steps=500)
    end_requests(planner, 0.02, 2, temperature=1.0, steps=500)
    assert not planner.skips(0.5)  # only requests at 1.0 have had no gain since
    assert planner.skips(1.0)


def test_requests_before_the_first_drafts_say_nothing_about_them():
    assert not any(end_requests(Planner(INT8, TREE), 0.02, 4, steps=1))


@pytest.mark.parametrize(("costs", "rate"), [(MEMORY, 0.03), (INT8, 0.2), (FOUR_BIT, 0.3)], ids=str)
@pytest.mark.parametrize("claims", [None, 0.6])
def test_short_requests_without_a_gain_pay_little_for_trying(costs, rate, claims):
    assert np.mean([short_requests(costs, rate, claims or rate, seed) for seed in range(3)]) > 0.9


def test_short_requests_with_a_gain_get_it():
    for costs, gain in ((MEMORY, 1.9), (INT8, 1.25), (FOUR_BIT, 1.0)):
        assert np.mean([short_requests(costs, 0.8, 0.7, seed) for seed in range(3)]) > gain


def short_requests(costs: Costs, rate: float, claims: float, seed: int) -> float:
    """Decode three requests of 32 tokens; return the speed relative to the baseline."""
    world, tokens, seconds = World(Planner(TYPICAL, TREE), costs, claims, seed), 0.0, 0.0
    world.rate = rate
    for _ in range(3):
        world.ctx, world.tokens, world.seconds = context(), 0.0, 0.0
        is_skipped = world.planner.skips(1.0)
        while world.tokens < 32:
            if is_skipped:
                world.tokens, world.seconds = world.tokens + 1, world.seconds + 1
            else:
                world.step()
        tokens, seconds = tokens + world.tokens, seconds + world.seconds
    return tokens / seconds


# --- no decision changes the output ----------------------------------------------------------------------------------


class Dice(Planner):
    """Drafts by dice, seeded."""

    share = 0.6

    def __init__(self, costs: Costs, grown: Budget | None, **named) -> None:
        super().__init__(costs, grown, **named)
        self.rng, self.grows = random.Random(0), grown is not None

    def drafts(self) -> bool:
        return self.rng.random() < self.share

    def budget(self, ctx, children, max_nodes=None):
        if not self.drafts():
            return Budget(0, children=children)
        return replace(self.largest, rule=self.rule(len(ctx.rows)) if self.grows else None, children=children)


class Always(Dice):
    share = 1.1


class Seldom(Dice):
    """Drafts in every seventh step: six steps' features wait."""

    steps = 0

    def drafts(self) -> bool:
        self.steps += 1
        return self.steps % 7 == 0


NOTHING = Curve(((1, 0.0), (8, 0.0)))
# A plain step is dearer than all that is drafted and verified.
BARGAIN = Costs(Curve(((1, 1e4), (2, 1.0), (64, 1.0))), NOTHING, NOTHING, 4)
MAKERS = {
    "lookup": lambda here: LookupDrafter(VOCAB, 1),
    "causal-lm": lambda here: CausalLMDrafter(here.perturbed, VOCAB),
    "eagle1": lambda here: EagleDrafter(here.head(1, ()), here.target),
    "eagle1-unshifted": lambda here: EagleDrafter(here.head(1, (("inputs", "feature-unshifted"),)), here.target),
    "eagle3": lambda here: EagleDrafter(here.head(3, ()), here.target),
    "eagle3-few-tokens": lambda here: EagleDrafter(here.head(3, (("draft_vocab_size", 40),)), here.target),
}
CHURN = {"rows": (0, 1, 2, 1, 0), "joins": (0, 0, 2, 3, 5), "leaves": {0: 1, 2: 3}}


def decode_with(monkeypatch, planner: Planner, *args, **named):
    """``test_exact.run``, with a planner that sees every step take a millisecond."""
    observe = planner.observe
    monkeypatch.setattr(planner, "observe", lambda *step: observe(*step[:-2], 0.001, 0.0))
    monkeypatch.setattr(test_exact, "Decoder", partial(Decoder, planner=planner))
    try:
        return run(*args, **named)
    finally:
        monkeypatch.setattr(test_exact, "Decoder", Decoder)


def check_churn(here, kind, maker, planner, monkeypatch):
    requests = [here.request(kind, row) for row in CHURN["rows"]]
    texts, stats = decode_with(
        monkeypatch, planner, here.target, requests, maker, joins=CHURN["joins"], leaves=CHURN["leaves"]
    )
    for request, row in enumerate(CHURN["rows"]):
        wanted = here.plain(kind, row)
        if request in CHURN["leaves"]:
            wanted = wanted[: len(texts[request])]
            assert wanted
        assert texts[request] == wanted
    return stats


@pytest.mark.parametrize(
    ("maker", "planner"),
    [
        *((maker, Dice) for maker in MAKERS),
        *(("causal-lm", Seldom), ("eagle1-unshifted", Seldom), ("eagle3-few-tokens", Planner)),
    ],
)
def test_text_is_plain_decodings(maker, planner, lab, monkeypatch):
    """Rows join and leave meanwhile."""
    here = lab("llama")
    planner = planner(BARGAIN, Budget(6, 3, 20))
    stats = check_churn(here, "mixed", MAKERS[maker](here), planner, monkeypatch)
    assert stats.num_drafted > 0 or maker == "lookup"


@pytest.mark.parametrize(
    ("maker", "rule"),
    [
        *(("eagle3", "block"), ("eagle3", "multi-round"), ("causal-lm", "multi-round-replacement")),
        ("lookup", "speculative"),
    ],
)
def test_classic_rules_keep_the_distribution_with_a_planner(rule, maker, lab, monkeypatch):
    """At T = 0 the distribution is one text. No tree is shaped by what was drawn for it."""
    here, classic = lab("llama"), get_rule(rule)
    made = MAKERS[maker](here)
    usual = planner_for(rule, made, here.target.device)
    for planner in (usual, Dice(COSTS, None, shapes=(Budget(3),))):
        requests = [here.request("greedy", row) for row in range(3)]
        texts, stats = decode_with(
            monkeypatch, planner, here.target, requests, MAKERS[maker](here), rule=rule, joins=(0, 0, 2)
        )
        assert texts == {row: here.plain("greedy", row) for row in range(3)}
        assert stats.lossless
        assert stats.num_drafted > 0 or maker == "lookup"
    assert usual.budget(context(), classic.children).rule is None


# --- drafts after baseline steps -------------------------------------------------------------------------------------


class Recorded(Drafter):
    """A drafter, and every chain that it proposed, by prompt and place."""

    def __init__(self, drafter) -> None:
        self.drafter, self.name = drafter, drafter.name
        self.copy_capabilities(drafter)
        self.admit, self.observe, self.remove = drafter.admit, drafter.observe, drafter.remove
        self.chains: dict[tuple[int, ...], tuple[int, ...]] = {}

    def propose(self, ctx, sampling, budget):
        tree = self.drafter.propose(ctx, sampling, budget)
        if budget.depth:
            for row, tokens in zip(ctx.rows, tree.tokens.tolist(), strict=True):
                self.chains[tuple(row.tokens)] = tuple(tokens[1:])
        return tree


@pytest.mark.parametrize(
    ("maker", "kind"), [("causal-lm", "t1"), ("eagle1-unshifted", "t1"), ("eagle3-few-tokens", "greedy")]
)
def test_after_plain_steps_a_draft_is_what_it_would_have_been(kind, maker, lab, monkeypatch):
    """A drafter that was left out for some steps has missed nothing: rows join, leave and end meanwhile."""
    here, found = lab("llama"), []
    for planner in (Always, Seldom, Dice):
        planner = planner(COSTS, None, shapes=(Budget(4),))
        recorded = Recorded(MAKERS[maker](here))
        requests = [here.request(kind, row) for row in CHURN["rows"]]
        decode_with(monkeypatch, planner, here.target, requests, recorded, joins=CHURN["joins"], leaves={0: 1, 2: 4})
        found.append(recorded.chains)
    everywhere, *others = found
    # What is drafted depends on the text alone, so chains at the same place are the same.
    num_shared = 0
    for chains in others:
        shared = everywhere.keys() & chains.keys()
        for text in shared:  # near the end of the longest text of a batch all are cut
            assert all(one == other for one, other in zip(chains[text], everywhere[text], strict=False))
        assert any(PAD not in chains[text] for text in shared)
        num_shared += len(shared)
    assert num_shared >= 8
    assert len({text[: len(PROMPTS[2])] for text in everywhere}) > 1
    assert max(map(len, everywhere)) >= MAX_TOKENS // 2
