"""What the planner learns and decides, by definition and in made-up worlds; and that no decision changes the text."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from functools import partial
from itertools import groupby, islice, product

import numpy as np
import pytest
import torch

import test_exact
from draftwing.accept import RULES, get_rule
from draftwing.budget import acceptance as accepting
from draftwing.budget import gate as gating
from draftwing.budget.acceptance import Acceptance, Ranks
from draftwing.budget.account import Account
from draftwing.budget.clock import COMPARED, PAUSE, SETTLED, Clock, Line
from draftwing.budget.costs import Costs, Curve
from draftwing.budget.gate import FRESH, GROWN, KNOWN, Gate
from draftwing.budget.planner import RAREST, TOGETHER, Planner
from draftwing.drafters.base import Budget, Traits
from draftwing.drafters.causal_lm import CausalLMDrafter
from draftwing.drafters.feature import EagleDrafter
from draftwing.drafters.growing.worth import Forest
from draftwing.drafters.lookup import LookupDrafter
from draftwing.engine.decode import Decoder
from draftwing.model.target import Context, Row
from draftwing.tree import PAD, Accepted, DraftTree
from test_exact import MAX_TOKENS, PROMPTS, VOCAB, lab, run  # noqa: F401  # lab is a fixture

COSTS = Costs(
    verify=Curve(((1, 1.0), (4, 1.1), (16, 1.6), (64, 4.0))),
    chain=Curve(((1, 0.1), (8, 0.8))),
    tree=Curve(((1, 0.2), (8, 1.6))),
    width=4,
)
TREE = Budget(14, 4, 63)


@pytest.fixture
def no_plain_start(monkeypatch):
    """Worlds begin with drafts; ``test_plain_steps_come_first`` has the start as it is."""
    monkeypatch.setattr(gating, "PLAIN", 0)


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


# --- the clock -------------------------------------------------------------------------------------------------------


def test_a_line_of_drafting_follows_the_clock():
    line = Line(0.2, 0.1)
    assert [line(depth) for depth in (0, 1, 4)] == pytest.approx([0, 0.3, 0.6])
    line.observe(4, 60.0)  # a hiccup
    assert line(4) < 1.5 * 0.6
    rng = random.Random(0)
    for _ in range(300):
        depth = rng.randint(1, 9)
        line.observe(depth, 0.1 + 0.3 * depth)
    assert line.slope == pytest.approx(0.3, rel=0.15)
    assert [line(depth) for depth in (1, 4, 8)] == pytest.approx([0.4, 1.3, 2.5], rel=0.15)
    for _ in range(300):
        line.observe(3, 0.0)  # of one depth alone, and said to cost nothing
    assert line.slope > 0
    assert 0 <= line(3) < 0.3


def test_a_few_drafts_tell_what_a_level_takes():
    """Of one and two levels, whatever was measured of eight."""
    line = Line(0.3, 0.2)
    for at in range(120):
        line.observe(1 + at % 2, 0.5 + 0.4 * (at % 2))
    assert line(2) - line(1) == pytest.approx(0.4, rel=0.3)


def test_levels_that_were_not_drafted_are_believed_at_the_pace_of_the_machine():
    clock = Clock(COSTS)
    for _ in range(200):
        clock.observe(1, 2, 1, False, 3 * COSTS.draft_seconds(1), 3 * COSTS.verify_seconds(2))
    for levels in (1, 4):
        assert clock.draft(levels, 1) == pytest.approx(3 * COSTS.draft_seconds(levels), rel=0.05)


def test_the_later_plain_steps_of_a_check_tell():
    """The first ones find what drafts left in the caches."""
    clock = Clock(COSTS)
    for _ in range(4):
        for _ in range(30):
            clock.observe(1, 4, 3, False, 0.3, COSTS.verify_seconds(4))
        for at in range(8):
            clock.observe(1, 1, 0, False, 0.0, COSTS.verify_seconds(1) * (1.2 if at < 5 else 1.0))
    assert clock.plain_step(1) == pytest.approx(COSTS.verify_seconds(1), rel=0.02)


def test_first_levels_may_take_longer_than_later_ones():
    costs = replace(COSTS, chain=Curve(((1, 0.8), (2, 1.2), (4, 1.6), (8, 2.0))))
    line, clock = Line.of(costs, 1), Clock(costs)
    for level in (1, 2, 3, 4, 6, 8, 11, 1.5, 4.5):
        assert line(level) == pytest.approx(costs.draft_seconds(level))
    assert line(0) == 0
    assert line.steps(3) == pytest.approx([0.4, 0.2, 0.2])
    assert clock.levels(3, 1).tolist() == pytest.approx([0.4, 0.2, 0.2])
    rng = random.Random(0)
    for _ in range(300):
        depth = rng.randint(1, 4)
        line.observe(depth, 3 * costs.draft_seconds(depth))  # a slower machine
    assert [line(depth) for depth in (1, 2, 4)] == pytest.approx([2.4, 3.6, 4.8], rel=0.1)


def test_a_clock_comes_to_what_steps_take():
    clock = Clock(COSTS)
    for factor in (0.15, 3.0, 1.0):
        for _ in range(300):
            for nodes in (5, 9):
                clock.observe(1, nodes, 4, False, 0.4 * factor, factor * COSTS.verify_seconds(nodes))
        assert clock.slow == pytest.approx(factor, rel=0.02)
        assert clock.verify(9, 1) == pytest.approx(factor * COSTS.verify_seconds(9), rel=0.03)
        wanted = 0.4 * factor  # what was measured counts as a few drafts for good
        assert abs(clock.draft(4, 1) - wanted) < 0.25 * abs(0.4 - wanted) + 0.03
    before = clock.slow
    took, _ = clock.observe(1, 5, 4, False, 100.0, 100.0)  # a hiccup is not held against what it drafted
    assert took < 2 * before * COSTS.verify_seconds(5) + 2.5
    assert clock.slow < 1.3 * before


def test_more_than_was_measured_by_each_node_shows_as_a_tilt():
    clock = Clock(COSTS)
    for turn in range(400):
        nodes = (2, 6, 12, 20)[turn % 4]
        clock.observe(1, nodes, nodes - 1, False, 0.1, COSTS.verify_seconds(nodes) + 0.05 * nodes)
    curve = clock.verify_upto(21, 1)
    assert curve[20] - curve[2] > 0.7 * (COSTS.verify_seconds(20) - COSTS.verify_seconds(2) + 18 * 0.05)
    assert (np.diff(curve) >= 0).all()


# --- rules and shapes ------------------------------------------------------------------------------------------------


def context(rows: int = 1, length: int = 0) -> Context:
    return Context(torch.device("cpu"), [Row([3] * (length + 1), length, 1) for _ in range(rows)])


def taken(tree: DraftTree, *paths: list[int]) -> Accepted:
    width = max(map(len, paths))
    path = torch.tensor([[*each, *[PAD] * (width - len(each))] for each in paths])
    return Accepted(path, (path != PAD).sum(1) - 1, torch.zeros(len(paths), dtype=torch.int64))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_rule_holds_what_was_measured(rows):
    costs = Costs(COSTS.verify, COSTS.chain, COSTS.tree, 4, per_row=0.1, draft_per_row=0.5)
    rule = Planner(costs, TREE).rule(rows)
    assert (len(rule.gains), len(rule.verify)) == (14, 66)
    assert rule.verify[1:] == pytest.approx([costs.verify_seconds(nodes, rows) for nodes in range(1, 66)])
    assert rule.worth == pytest.approx(costs.verify_seconds(1, rows) / rows)
    assert rule.costs == pytest.approx([0.1 * (1 + 0.5 * (rows - 1))] * 14)
    assert rule.gains == pytest.approx([0.7 * rule.worth] * 14)
    assert rule.share == pytest.approx(1 / 3)  # a level of four takes twice as long as one of one
    huge = Planner(costs, Budget(14, 4, 500)).rule(1)
    assert huge.verify.shape == (503,)
    assert bool((np.diff(huge.verify) >= 0).all())


def test_tokens_that_come_cheaper_are_worth_less():
    worths = []
    for tokens in (1, 3, 6, 12):
        planner = Planner(COSTS, TREE)
        tree = DraftTree.chain(torch.zeros(1, 9, dtype=torch.int64))
        for _ in range(20):
            planner.observe(tree, taken(tree, [0]), tokens, COSTS.draft_seconds(8), COSTS.verify_seconds(9))
        worths.append(planner.rule(1).worth)
    assert worths == sorted(worths, reverse=True)
    assert worths[0] == pytest.approx(1.0)  # what a token takes plainly, where drafts bring less
    assert worths[-1] < 0.4


def test_a_levels_worth_is_the_next_levels_best_child():
    planner = Planner(COSTS, TREE)
    for depth, rate in ((1, 0.2), (2, 0.9), (3, 0.5), (4, 0.1)):
        planner.ranks._rates[depth - 1][0] = rate
    assert planner.rule(1).gains[:5] == pytest.approx([0.9, 0.5, 0.1, 0.1, 0.1])


def test_what_is_said_of_a_node_is_learnt_for_its_own_depth():
    """The first child is always right and its own child never: the tables of the two depths say so, and no other."""
    planner = Planner(COSTS, TREE)
    tree = DraftTree.chain(torch.zeros(1, 4, dtype=torch.int64))
    tree = DraftTree(tree.tokens, tree.parents, told=torch.tensor([[1.0, 0.85, 0.85, 0.85]]), effort=3, depth=3)
    for _ in range(60):
        planner.observe(tree, taken(tree, [0, 1]), 2, 0.3, 1.1)  # the first child right, the second wrong
    found = [planner.acceptance(np.array([0.85]), depth)[0] for depth in (1, 2)]
    assert found[0] > 0.95
    assert found[1] < 0.2
    seen = np.array(planner.acceptance._sums)[:, 0].sum(1) - sum(planner.acceptance._prior[0])
    assert seen[0] == pytest.approx(seen[1])
    assert seen[0] > 20
    assert seen[2] == seen[3] == 0  # a node whose parent was wrong says nothing
    assert planner.ranks.rate(1) > 0.9 > 0.1 > planner.ranks.rate(2)


def test_siblings_are_told_apart_by_their_order():
    planner = Planner(COSTS, TREE)
    tree = DraftTree.from_lists([[3, 5, 6, 7, 8]], [[-1, 0, 0, 1, 0]])
    for _ in range(100):
        planner.observe(tree, taken(tree, [0, 2]), 2, 0.3, 1.1)
    fresh = Ranks()
    assert planner.ranks.rate(1, 1) > 0.9 > 0.1 > max(planner.ranks.rate(1, 0), planner.ranks.rate(1, 2))
    assert planner.ranks.rate(1, 3) == fresh.rate(1, 3)
    assert planner.ranks.rate(2, 0) == fresh.rate(2, 0)  # its parent was not taken


@pytest.mark.parametrize("most", [Budget(14), TREE], ids=str)
def test_a_blind_shape_has_the_greatest_speedup(most):
    rng = random.Random(3)
    for _ in range(30):
        planner = Planner(COSTS, most, sighted=False)
        planner.ranks._rates = [[rng.random() ** (1 + 2 * rank) for rank in range(4)] for _ in range(4)]
        found = planner._blind()
        tau, deepest, width = 1.0, 0, 1
        prefixes = {}
        for path, chance in islice(planner.ranks.likeliest(14, most.width), most.nodes or 14):
            tau, deepest = tau + chance, max(deepest, len(path))
            width = max(width, 1 + max(path))
            takes = COSTS.verify_seconds(len(prefixes) + 2) + COSTS.draft_seconds(deepest, width)
            prefixes[len(prefixes) + 1] = tau / takes
        best = max(prefixes, key=prefixes.__getitem__)
        assert (len(found.paths) if found.paths else found.depth) == best
        assert most.width > 1 or found.is_chain
        assert found.rule is None


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("forwards", [True, False])
def test_a_planner_suits_rule_drafter_and_machine(rule, forwards, on_cpu):
    traits = Traits(costs_forwards=forwards)
    planner = Planner.of(COSTS, rule, traits, on_cpu=on_cpu)
    reads = rule.children in ("keyed", "top")
    assert planner.sighted == (reads and (on_cpu or not forwards))
    assert planner.most.is_chain == (rule.chain_only if forwards else not reads)
    assert bool(planner.shapes) == (forwards and reads and not on_cpu)
    assert Planner.of(Costs(COSTS.verify), rule, Traits(), on_cpu=on_cpu).most.is_chain


def test_on_a_gpu_a_handful_of_shapes_is_chosen_among(no_plain_start):
    planner = Planner.of(COSTS, get_rule("match"), Traits(), on_cpu=False)
    chosen = {}
    for rate, second in ((0.02, 0.0), (0.97, 0.0), (0.55, 0.44)):
        planner.ranks._rates = [[rate, second, 0.0, 0.0] for _ in range(4)]
        budget = chosen[rate] = planner._blind()
        assert budget in planner.shapes
        assert budget == max(planner.shapes, key=planner._expected)
    assert chosen[0.02] == Budget(1)
    assert chosen[0.97] == Budget(8)
    assert planner.budget(context(), "keyed").rule is None


@pytest.mark.parametrize("most", [1, 3, 5, 16, 63, 4000])
@pytest.mark.parametrize("plan", ["chain", "tree", "blind-chain", "blind-tree", "shapes"])
def test_a_limit_holds_whatever_is_chosen(plan, most, no_plain_start):
    planner, rng = PLANS[plan](COSTS), random.Random(most)
    for _ in range(150):
        planner.ranks._rates = [[rng.random() ** (1 + rank / 2) for rank in range(4)] for _ in range(4)]
        planner._num_learnt += 1
        budget = planner.budget(context(), "keyed", most)
        size = len(budget.paths) if budget.paths else budget.depth if budget.is_chain else budget.nodes
        assert size <= most
        assert budget.depth <= most


def test_what_small_drafts_bring_is_not_held_against_large_ones(no_plain_start):
    """Of a limit of one node little is gained; whoever has none is drafted for as if nobody had had one."""
    dear = Curve(((1, 1.4), (8, 1.6)))  # the first level, whatever follows
    costs = Costs(COSTS.verify, dear, dear, 4)
    free, shared = World(PLANS["tree"](costs)), World(PLANS["tree"](costs))
    small = World(shared.planner, seed=1)
    small.most = 1
    shared.texts = small.texts  # one that begins would be tried anyhow
    assert small.run(300, 0.95)[0] < 0.2
    assert max(small.nodes) == 2
    assert shared.run(300, 0.95)[1] > 0.95 * free.run(300, 0.95)[1] > 1.3


# --- worlds ----------------------------------------------------------------------------------------------------------


class World:
    """A drafter that claims a chance for its best child and is right at a rate; steps take exactly what costs say.

    Of children that are not the best none is ever right. Nothing is decoded: trees grow by the planner's own budgets.
    """

    def __init__(self, planner: Planner, claims: float = 0.9, seed: int = 0) -> None:
        self.planner, self.costs, self.rng = planner, planner.clock.costs, random.Random(seed)
        rest = [(1 - claims) / 10] * 3
        self.chances = np.log(sorted([claims, *rest], reverse=True)).tolist()
        self.rows, self.rate, self.slow, self.plain_slow = 1, 0.9, 1.0, 1.0
        self.depths: list[int] = []  # levels drafted in each step
        self.nodes: list[int] = []
        self.texts: dict[int, Context] = {}
        self.dear = 0.0  # of nodes of several rows: plain steps that each takes more than is believed
        self.cold = 0  # drafts at first that take longer than those after them
        self.waking = 0.0  # plain steps that the first draft after plain ones takes more
        self.warming = 0, 1.0  # plain steps at first, and how much longer they take
        self.tokens = self.seconds = 0.0
        self.most: int | None = None  # nodes of a tree

    def grow(self, ctx: Context, budget: Budget) -> tuple[DraftTree, float]:
        """A tree and its levels."""
        roots = [row.tokens[row.length] for row in ctx.rows]
        if budget.depth == 0:
            return DraftTree.root(torch.tensor(roots)), 0
        if budget.rule is None:
            order = sorted(budget.shape(), key=lambda path: (len(path), path))
            parents = [-1, *[([(), *order]).index(path[:-1]) for path in order]]
            tokens = [4, *[4 + path[-1] for path in order]]
            tree = DraftTree.from_lists([tokens] * len(roots), [parents] * len(roots))
            return DraftTree(tree.tokens, tree.parents, effort=budget.depth, depth=budget.depth), budget.depth
        forest = Forest(budget.rule, roots, [True] * len(roots), budget.width, budget.nodes)
        entries = 1
        for level in range(1, budget.depth + 1):
            kinds = [4, 5, 6, 7][: budget.width]
            forest.branch([[kinds] * entries] * len(roots), [[self.chances[: budget.width]] * entries] * len(roots))
            if level == budget.depth or not forest.widen():
                break
            entries = forest.drafted(ctx.device).num_nodes - forest.first
        tree = forest.finish(ctx.device).tree
        return tree, tree.effort

    def step(self) -> None:
        ctx = self.texts.setdefault(self.rows, context(self.rows))
        budget = self.planner.budget(ctx, "keyed", self.most)
        tree, levels = self.grow(ctx, budget)
        pairs = zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)
        accepted = taken(tree, *(self._path(tokens, parents) for tokens, parents in pairs))
        drafted = self.costs.draft_seconds(levels, 1, self.rows) * self.slow
        verified = self.costs.verify_seconds(tree.num_nodes, self.rows, 0) * self.slow
        if self.rows > 1:
            plain = self.costs.verify_seconds(1, self.rows, 0)
            verified += self.dear * plain * (tree.num_nodes - 1) * self.slow
        if levels == 0:
            left, factor = self.warming
            verified *= self.plain_slow * (factor if left else 1.0)
            self.warming = max(left - 1, 0), factor
        elif self.cold:
            self.cold, verified = self.cold - 1, 1.7 * verified
        elif self.depths and not self.depths[-1]:
            verified += self.waking * self.slow
        tokens = int(accepted.num.sum()) + self.rows
        self.planner.observe(tree, accepted, tokens, drafted, verified)
        self.depths.append(int(np.ceil(levels)))
        self.nodes.append(tree.num_nodes)
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + drafted + verified

    def _path(self, tokens: list[int], parents: list[int]) -> list[int]:
        path = [0]
        while self.rng.random() < self.rate:
            below = [node for node, above in enumerate(parents) if above == path[-1] and tokens[node] == 4]
            if not below:
                break
            path.append(below[0])
        return path

    def run(self, steps: int, rate: float, rows: int = 1, slow: float = 1.0) -> tuple[float, float]:
        """The share of steps that drafted, and the speedup over plain decoding."""
        self.rate, self.rows, self.slow, self.tokens, self.seconds = rate, rows, slow, 0.0, 0.0
        for _ in range(steps):
            self.step()
        plain = self.costs.verify_seconds(1, rows, 0) * slow * self.plain_slow / rows
        return sum(depth > 0 for depth in self.depths[-steps:]) / steps, self.tokens * plain / self.seconds


def best_chain(costs: Costs, rate: float, longest: int = 14) -> float:
    return max(costs.speedup(rate, gamma, 1, 0) for gamma in range(longest + 1))


def gaps(depths: list[int]) -> list[int]:
    """Lengths of the plain runs between drafts."""
    runs = [(bool(drafts), len(list(steps))) for drafts, steps in groupby(depths, key=lambda depth: depth > 0)]
    return [length for drafts, length in runs[:-1] if not drafts]


PLANS = {
    "chain": lambda costs: Planner(costs, Budget(14)),
    "tree": lambda costs: Planner(costs, TREE),
    "blind-chain": lambda costs: Planner(costs, Budget(14), sighted=False),
    "blind-tree": lambda costs: Planner(costs, TREE, sighted=False),
    "shapes": lambda costs: Planner.of(costs, get_rule("match"), Traits(), on_cpu=False),
}


@pytest.mark.parametrize("plan", PLANS)
def test_where_nothing_is_accepted_little_is_drafted(plan, no_plain_start):
    world = World(PLANS[plan](COSTS))
    world.run(600, 0.0)
    assert all(depth > 0 for depth in world.depths[: gating.FIRST])
    between = gaps(world.depths)
    assert between == sorted(between)  # ever rarer
    assert between[0] < gating.PROBE
    assert gating.PATIENCE - 2 <= between[-1] <= gating.PATIENCE
    share, speedup = world.run(1000, 0.0)
    assert 0 < share < 1.2 * gating.PROBES / gating.PATIENCE
    assert speedup > 0.97


@pytest.mark.parametrize("plan", PLANS)
def test_drafting_comes_back_when_it_pays_again(plan, no_plain_start):
    world = World(PLANS[plan](COSTS))
    assert world.run(500, 0.0)[0] < 0.2
    world.run(1000, 0.95)
    share, speedup = world.run(200, 0.95)
    assert share == 1.0
    assert speedup > 2.3
    world.run(300, 0.0)
    share, speedup = world.run(400, 0.0)
    assert share < (0.1 if world.planner.sighted else 0.2)  # blind shapes shrink first, and lose less
    assert speedup > 0.96


@pytest.mark.parametrize(
    ("rate", "claims"),
    [
        (0.95, 0.95),
        (0.2, 0.9),
        (0.05, 0.95),
        *(pytest.param(*each, marks=pytest.mark.full) for each in [(0.5, 0.5), (0.9, 0.3), (0.5, 0.95), (0.8, 0.6)]),
    ],
)
@pytest.mark.parametrize("plan", ["chain", "tree", "blind-chain", "blind-tree"])
def test_it_comes_near_the_best_fixed_shape(plan, rate, claims):
    """Whatever the drafter claims: never below 0.97 of plain decoding, and within a few percent of the best chain."""
    speedups = []
    for seed in range(3):
        world = World(PLANS[plan](COSTS), claims, seed)
        world.run(600, rate)
        speedups.append(world.run(1200, rate)[1])
    found = float(np.mean(speedups))
    assert found > 0.97
    assert found > (0.95 if world.planner.sighted else 0.94) * best_chain(COSTS, rate)


def test_rows_that_come_and_go_do_not_stop_the_drafts(no_plain_start):
    """What drafts brought for one row is not held against what plain decoding brings for eight."""
    flat = Costs(Curve(((1, 1.0), (512, 1.01))), COSTS.chain)
    for most in (Budget(4), Budget(4, 2, 8)):
        world = World(Planner(flat, most))
        for rows in (1, 8, 1, 8):
            share, speedup = world.run(100, 0.9, rows)
            assert share == 1.0, rows
            assert speedup > 2


CROWD = Costs(  # of a small chat model: many rows fill the machine by themselves
    Curve(((1, 1.0), (4, 1.09), (12, 1.24), (16, 1.47), (32, 2.4), (64, 4.69))),
    Curve(((1, 0.05), (8, 0.4))),
    Curve(((1, 0.06), (8, 0.5))),
    width=4,
    per_row=0.02,
    draft_per_row=0.1,
)


def best_for(costs: Costs, rate: float, rows: int) -> float:
    """Speedup of the best chain, or of none, for so many rows."""
    plain = costs.verify_seconds(1, rows, 0)
    takes = [costs.verify_seconds(gamma + 1, rows, 0) + costs.draft_seconds(gamma, 1, rows) for gamma in range(10)]
    return max(sum(rate**i for i in range(gamma + 1)) * plain / each for gamma, each in enumerate(takes))


@pytest.mark.parametrize("plan", ["chain", "tree", "blind-chain"])
def test_how_much_is_drafted_depends_on_the_rows(plan):
    """Four nodes for one row, none for 32, and each time at once: what pays for one size is not asked of another."""
    world = World(PLANS[plan](CROWD), 0.6)
    world.run(300, 0.6)
    for rows in (4, 8, 16, 32, 1, 32, 4):
        share, speedup = world.run(250, 0.6, rows)
        best = best_for(CROWD, 0.6, rows)
        assert speedup > 0.9 * best, rows
        assert speedup > 0.98 or best > 1.05, rows
        assert rows == 16 or (share < 0.15 if rows == 32 else share > 0.9), rows  # 16 break even
    assert max(world.nodes[:300]) >= 4


def test_what_many_rows_take_decides_for_many_alone():
    """Further rows were believed to be cheap, and are not: that is learnt of them, and says nothing of one row."""
    assert best_for(CROWD, 0.8, 8) > 1.3
    speedups = []
    for seed in range(6):
        world = World(Planner(CROWD, Budget(14)), 0.8, seed)
        world.dear = 0.8  # of the nodes of 16 rows, each by this share of a plain step more
        assert world.run(300, 0.8)[1] > 0.85 * best_for(CROWD, 0.8, 1)
        share, _ = world.run(200, 0.8, 8)
        assert 3 <= 200 * share <= 32  # as soon as that is seen
        share, speedup = world.run(200, 0.8, 8)
        assert share < 0.15
        speedups.append(speedup)
        assert world.run(100, 0.8)[0] == 1.0
    assert np.mean(speedups) > 0.98
    world = World(Planner(CROWD, Budget(14)), 0.8, 0)
    world.dear = 1.2
    world.run(300, 0.8)
    assert 3 <= 200 * world.run(200, 0.8, 8)[0] <= 8  # sooner where it is plain to see


def test_costs_are_stale_where_they_were_measured_alone():
    """What 16 rows take was never measured: that it is otherwise is no reason to measure anew."""
    for rows, told in ((2, [1]), (16, [])):
        found: list[int] = []
        planner = Planner(CROWD, Budget(4), on_stale=lambda found=found: found.append(1))
        tree = DraftTree.chain(torch.zeros(rows, 2, dtype=torch.int64))
        for _ in range(120):
            planner.observe(tree, taken(tree, *[[0]] * rows), rows, 0.05, 9 * CROWD.verify_seconds(2, rows))
        assert found == told


@pytest.mark.parametrize("seed", range(6))
def test_a_machine_that_changes_its_speed_neither_stops_nor_starts_the_drafts(seed):
    """Plain steps are looked at now and then: a verification that grows slower by itself is not the machine's doing."""
    world = World(Planner(COSTS, Budget(4)), seed=seed)
    found = [world.run(200, 0.9, slow=slow) for slow in (1.0, 3.0, 0.5, 1.0)]
    assert min(share for share, _ in found) > 0.9
    assert np.mean([speedup for _, speedup in found]) > 0.95 * best_chain(COSTS, 0.9, 4)
    world = World(Planner(COSTS, Budget(4)), seed=seed)
    world.run(300, 0.05)
    for slow in (3.0, 0.5, 2.0):
        assert world.run(400, 0.05, slow=slow)[1] > 0.96


@pytest.mark.parametrize(("plain", "drafts"), [(1.0, True), (0.4, False)])
def test_plain_steps_come_first(plain, drafts):
    """What a run of plain steps takes is measured then: half of what the costs say makes drafts half as good."""
    world = World(Planner(COSTS, Budget(1)))
    world.plain_slow = plain
    world.run(60, 0.6)
    assert world.depths[: gating.PLAIN] == [0] * gating.PLAIN
    assert world.depths[gating.PLAIN] == 1
    share, speedup = world.run(300, 0.6)
    assert (share > 0.75) == drafts
    assert speedup > 0.97


@pytest.mark.parametrize("plan", ["chain", "tree"])
def test_a_text_of_another_kind_is_tried_soon(plan, no_plain_start):
    """Whatever drafts brought in those before."""
    world = World(PLANS[plan](COSTS))
    world.run(2000, 0.1)
    world.texts.clear()
    world.run(48, 0.9)
    share, speedup = world.run(48, 0.9)
    assert share > 0.9
    assert speedup > 1.5
    world.texts.clear()
    world.run(48, 0.1)
    assert world.run(600, 0.1)[1] > 0.9


def test_a_text_that_begins_is_noticed_in_the_middle_of_plain_steps(no_plain_start, monkeypatch):
    planner = PLANS["chain"](COSTS)
    world, begun = World(planner), []
    world.run(600, 0.1)
    while not planner.gate.rests:
        world.step()
    monkeypatch.setattr(planner.gate, "begin_text", lambda: begun.append(planner.gate.steps))
    world.step()
    assert not begun
    world.texts.clear()
    world.step()
    assert len(begun) == 1


def test_loops_that_take_turns_are_no_new_texts(monkeypatch):
    planner, begun = PLANS["chain"](COSTS), []
    monkeypatch.setattr(planner.gate, "begin_text", lambda: begun.append(planner.gate.steps))
    one, other, both = context(1), context(1), context(2)
    for ctx in (one, other, both) * 5:
        planner.budget(ctx, "keyed")
    assert begun == [0, 1]


@pytest.mark.parametrize("plan", ["chain", "tree"])
def test_cold_first_drafts_decide_nothing(plan):
    """They are slow as memory is laid out, and later plain steps are not: small gains are not given up for that."""
    shares = []
    for seed in range(4):
        world = World(PLANS[plan](COSTS), 0.6, seed)
        world.cold = 14
        world.run(300, 0.6)
        shares.append(world.run(300, 0.6)[0])
        assert world.planner.clock.alone == pytest.approx(1.0, abs=0.05)
    assert np.mean(shares) > 0.8


def test_many_slow_first_drafts_are_not_the_last_word():
    """More of them than are tried at first: as they may have come down since, drafts are tried once more."""
    shares = []
    for seed in range(4):
        world = World(Planner(COSTS, Budget(1)), 0.6, seed)
        world.cold = 28
        world.run(700, 0.5)
        shares.append(world.run(300, 0.5)[0])
    assert np.mean(shares) > 0.9


@pytest.mark.parametrize("plan", ["chain", "tree"])
def test_drafts_in_doubt_lose_little_whatever_each_takes(plan):
    """They nearly pay, but for the first one after plain steps, which takes seven of these."""
    found = []
    for seed in range(4):
        world = World(PLANS[plan](COSTS), 0.6, seed)
        world.waking = 6.0
        for _ in range(12):
            world.texts.clear()
            world.run(100, 0.1)
        for _ in range(12):
            world.texts.clear()
            found.append(world.run(100, 0.1)[1])
        world.texts.clear()
        world.run(gating.LONGEST, 0.95)
        assert world.run(100, 0.95)[0] > 0.9  # and drafts that pay are still found
    assert np.mean(found) > 0.97


def texts(world: World, count: int, rate: float, steps: int = 100, temperature: float = 1.0) -> str:
    """What becomes of texts, one after another: ``.`` is passed over."""
    found = ""
    for _ in range(count):
        if world.planner.passes_over(steps, temperature):
            world.planner.passed_over(steps)
            found += "."
        else:
            world.texts.clear()
            share, _ = world.run(steps, rate)
            found += "D" if share else "p"
    return found


def test_texts_are_passed_over_where_drafts_lost_time_in_several():
    world = World(Planner(COSTS, Budget(4)), 0.6)
    found = texts(world, 60, 0.05)
    assert "." not in found[: gating.MISSED]
    assert found[-40:].count(".") > 25
    assert max(map(len, found.replace("p", "D").split("D"))) <= gating.LONGEST // 100
    assert texts(world, 1, 0.05, gating.LONGEST + 1) != "."  # too long to be passed over without a look
    assert "." in texts(world, 20, 0.05, temperature=1.5)
    assert texts(world, 1, 0.05, temperature=0.9) != "."  # cooler than those that they lost in
    assert "." not in texts(world, 30, 0.95)[-20:]  # drafts that pay again are found, and stay
    world.rows = 4
    world.run(50, 0.95, rows=4)
    assert "." not in texts(world, 1, 0.95)  # another size of batch in between


def test_the_coolest_text_says_most():
    """What was lost in hot texts tells nothing of a cool one, the other way round it does."""
    for first, then, passes in ((1.0, 0.0, False), (0.0, 1.0, True)):
        world = World(Planner(COSTS, Budget(4)), 0.6)
        while texts(world, 1, 0.05, temperature=first) != ".":
            pass
        assert (texts(world, 1, 0.05, temperature=then) == ".") == passes


def test_a_text_where_drafts_paid_gives_the_next_ones_a_chance():
    """Two of three texts gain: the third one's losses must not keep drafts out of them."""
    world = World(Planner(COSTS, Budget(4)), 0.6)
    texts(world, 3, 0.9)
    shares = []
    for place in range(30):
        world.texts.clear()
        share, _ = world.run(100, 0.05 if place % 3 == 2 else 0.9)
        shares.append(share)
    assert np.mean([share for place, share in enumerate(shares) if place % 3 != 2]) > 0.75


def test_drafts_are_tried_where_a_text_begins():
    """Where they lost time lately: later on all that the drafter has not read yet would have to be read first."""
    world, found = World(Planner(COSTS, Budget(4)), 0.6), []
    world.run(100, 0.05)
    for _ in range(2):
        world.texts.clear()
        world.run(100, 0.05)
        found.append([at for at, depth in enumerate(world.depths[-100:]) if depth])
    assert all(found)
    assert max(map(max, found)) < 2 * gating.PLAIN + gating.PROBES


def test_a_hiccup_is_not_what_drafts_lost():
    """A draft after plain steps takes as much as such drafts do; what one of them takes more is the machine's doing."""
    planner = Planner(COSTS, Budget(4))
    for _ in range(5):
        assert planner._gone(2.0, 1.5, is_first=True) == 2.0
    assert planner._gone(40.0, 1.5, is_first=True) == 4.0
    assert planner._gone(2.0, 1.5, is_first=True) == 2.0
    assert planner._gone(40.0, 1.5, is_first=False) == 3.0
    for _ in range(5):
        planner._gone(6.0, 1.5, is_first=True)
    assert planner._gone(7.0, 1.5, is_first=True) == 7.0  # all of them do


def test_the_shorter_steps_are_the_fewer_of_them_are_looked_at():
    """So that learning takes a small share of the time. What each of these tells stands for those between."""
    seen = []
    for seconds in (1.0, 4e-4):
        costs = Costs(*(curve.times(seconds) for curve in (COSTS.verify, COSTS.chain, COSTS.tree)), width=4)
        world = World(Planner(costs, Budget(4)), 0.9)
        world.run(2 * KNOWN, 0.9)
        drafts = world.planner.gate.drafts
        before = drafts.steps
        world.run(160, 0.9)
        seen.append((drafts.steps - before) / 160)
    assert seen[0] > 0.9
    assert 0.8 / RAREST < seen[1] < 1.3 / RAREST


def test_steps_are_judged_several_at_once_where_much_is_known():
    """And none is forgotten where another text begins, or where more of them run."""
    world = World(Planner(COSTS, Budget(4)), 0.9)
    drafts = world.planner.gate.drafts
    while world.planner.clock.num_drafts <= KNOWN:
        world.step()
    judged, found = drafts.steps, []
    for _ in range(40):
        world.step()
        found.append(drafts.steps - judged)
        judged = drafts.steps
    assert set(found) == {0, TOGETHER}
    world.planner.passes_over(9, 0.0)
    judged = drafts.steps
    for number in range(1, 4):
        world.rows = 1
        world.step()
        world.step()
        world.rows = 2  # another clock and another gate
        world.step()
        assert drafts.steps == judged + 2 * number


def test_a_step_that_tells_nothing_is_not_told():
    world = World(Planner(COSTS, Budget(4)), 0.6)
    world.run(300, 0.05)
    told = []
    for _ in range(100):
        world.step()
        told.append(world.planner.listens)
    assert 0 < sum(told) < 30
    run = world.planner.clock.run
    world.planner.listens = False
    tree = DraftTree.root(torch.tensor([4]))
    world.planner.observe(tree, taken(tree, [0]), 1, 0.0, 100.0)
    assert world.planner.clock.run == run


def test_slow_first_plain_steps_are_found_out_soon():
    """They make drafts look as if they gained a little; some twenty steps later plain ones are looked at again."""
    world = World(Planner(COSTS, Budget(1)), 0.6)
    world.warming = gating.PLAIN, 1.5
    world.run(gating.PLAIN + 60, 0.05)
    plain = world.depths[gating.PLAIN : gating.PLAIN + 40].count(0)
    assert plain >= gating.PLAIN
    assert world.planner.clock.alone == pytest.approx(1.0, abs=0.1)
    world = World(Planner(COSTS, Budget(1)), 0.6)
    world.warming = 3 * gating.PLAIN, 1.5  # the first look, twice as long, is misled as well, and the second is not far
    world.run(260, 0.3)
    assert world.planner.clock.alone == pytest.approx(1.0, abs=0.1)


def test_plain_steps_and_drafts_have_a_pace_each():
    """A long run of one kind tells how fast the machine is, not that the other kind has come closer."""
    clock = Clock(COSTS)
    for _ in range(20):
        clock.observe(1, 5, 4, False, 0.4, 1.5 * COSTS.verify_seconds(5))
    for _ in range(SETTLED):
        clock.observe(1, 1, 0, False, 0.0, COSTS.verify_seconds(1))
    assert clock.alone < 0.75
    for _ in range(60):
        clock.observe(1, 1, 0, False, 0.0, 2 * COSTS.verify_seconds(1))
    assert clock.alone < 0.75
    assert (clock.plain, clock.slow) == pytest.approx((2.0, 3.0), rel=0.1)
    for _ in range(6):  # right after plain steps drafts tell how the two compare, and nothing of the machine,
        clock.observe(1, 5, 4, False, 0.4, 2.4 * COSTS.verify_seconds(5))
    assert (clock.plain, clock.slow) == pytest.approx((2.0, 2.4), rel=0.05)
    for _ in range(COMPARED):
        clock.observe(1, 5, 4, False, 0.4, 2.4 * COSTS.verify_seconds(5))
    for _ in range(6):  # later on that it has slowed down
        clock.observe(1, 5, 4, False, 0.4, 4.8 * COSTS.verify_seconds(5))
    assert (clock.plain, clock.slow) == pytest.approx((4.0, 4.8), rel=0.05)
    found = [clock.observe(1, 1, 0, False, 0.0, 3 * COSTS.verify_seconds(1))[1] for _ in range(4)]
    assert found[0] == 1.0
    assert np.prod(found) == pytest.approx(clock.plain / 4.0, rel=0.05)
    assert clock.plain < 3.8


def test_what_the_host_does_between_steps_takes_its_time_too(monkeypatch):
    """Of whatever kind a step is: so fewer steps gain more than drafts and verifications alone tell."""
    now = [5.0]
    monkeypatch.setattr("draftwing.budget.clock.time.perf_counter", lambda: now[0])

    def took(pause: float) -> float:
        clock = Clock(COSTS)
        for _ in range(12):
            clock.begin()
            found = clock.observe(1, 2, 1, False, COSTS.draft_seconds(1), COSTS.verify_seconds(2))[0]
            clock.end()
            now[0] += pause
        clock.begin()
        now[0] += 7.0  # a step that is not looked at,
        clock.begin()
        assert clock.rest == pytest.approx(min(pause, PAUSE), rel=0.01)
        assert clock.plain_step(1) == pytest.approx(COSTS.verify_seconds(1) + clock.rest, rel=0.01)
        return found

    bare = COSTS.draft_seconds(1) + COSTS.verify_seconds(2)
    assert took(0.0) == pytest.approx(bare, rel=0.01)
    assert took(0.08) == pytest.approx((bare + 0.08) / 1.08, rel=0.01)
    assert took(3.0) == pytest.approx((bare + PAUSE) / (1 + PAUSE), rel=0.01)  # a slow reader


def test_what_is_known_well_is_learnt_ever_more_rarely():
    gate = Gate(Clock(COSTS), lambda: 1.0)
    found = []
    for steps in (0, *GROWN):
        gate.steps = steps
        found.append(gate.fresh)
    assert found == [FRESH, 2 * FRESH, 4 * FRESH]


def test_chance_is_told_from_what_stands_out():
    """Tokens scatter: a few unlucky drafts say less than the chances of their nodes do, many that agree say more."""
    rng, lucky, errors = random.Random(0), [], {"brought": [], "counted": []}
    for _ in range(300):
        account = Account()
        lucky = [1.0 + (rng.random() < 0.5) for _ in range(16)]
        for brought in lucky:
            account.add(brought, 1.0, 1.5)
        errors["brought"].append(np.mean(lucky) - 1.5)
        errors["counted"].append(account.brought / account.weight - 1.5)
    assert np.std(errors["counted"]) < 0.8 * np.std(errors["brought"])
    account = Account()
    for _ in range(40):
        assert 0.9 < account.add(1.0, 1.0, 3.0) <= 3.0
    assert account.brought / account.weight == pytest.approx(1.0, abs=0.05)


def test_a_stumble_in_plain_steps_says_little():
    """What they told before counts until the next look, which comes soon, says the same."""
    clock = Clock(COSTS)

    def look(slow: float) -> None:
        for _ in range(SETTLED):
            clock.observe(1, 1, 0, False, 0.0, slow * COSTS.verify_seconds(1))
        for _ in range(2 * COMPARED):
            clock.observe(1, 5, 4, False, 0.4, COSTS.verify_seconds(5))

    for _ in range(3):
        look(1.0)
    assert clock.alone == pytest.approx(1.0, abs=0.03)
    look(0.7)
    assert clock.alone == pytest.approx(1.0, abs=0.03)
    assert clock.is_in_doubt
    look(0.7)
    assert clock.alone == pytest.approx(0.7, abs=0.05)
    assert not clock.is_in_doubt


def test_a_wrong_belief_of_plain_steps_is_corrected():
    """Drafts that seemed to gain, since plain steps were believed to be slow, are judged by what these take."""
    account = Account()
    for _ in range(100):
        account.add(2.0, 1.6)
    assert account.speedup == pytest.approx(1.25)
    account.correct(0.5)  # a plain step takes half of what was believed
    assert account.speedup == pytest.approx(0.625)
    assert account.lost == pytest.approx(1.2)
    world = World(Planner(COSTS, Budget(4)))
    world.run(100, 0.6)
    assert world.depths[-1] > 0
    world.plain_slow = 0.4  # from now on, which only a look tells, and another one confirms
    world.run(300, 0.6)
    share, speedup = world.run(200, 0.6)
    assert share < 0.1
    assert speedup > 0.96


def test_no_more_nodes_than_the_budget_has():
    """Even where verifying costs nothing."""
    free = Curve(((1, 0.0), (8, 0.0)))
    world = World(Planner(Costs(Curve(((1, 1.0), (64, 1.0))), free, free, 4), Budget(6, 4, 20)))
    for _ in range(20):
        world.step()
    assert set(world.nodes[gating.PLAIN :]) == {21}
    assert set(world.depths[gating.PLAIN :]) > {6} or max(world.depths) >= 6


def test_many_threads_may_use_one_planner():
    """Steps of several decode loops interleave; nothing is lost or torn."""
    planner, problems = Planner(COSTS, TREE), []

    def loop(seed: int) -> None:
        try:
            World(planner, seed=seed).run(150, 0.8, rows=1 + seed % 2)
        except BaseException as error:  # told below, by the test's own thread
            problems.append(error)

    threads = [threading.Thread(target=loop, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert sum(gate.steps for _, gate in planner._sizes.values()) == 600  # of one row, and of two
    assert planner.rule(1).worth < 1.0


# --- no decision changes the text ------------------------------------------------------------------------------------


class Dice(Gate):
    """Drafts by dice, seeded, so that a failure can be had again."""

    rng = random.Random(0)

    def decide(self) -> bool:
        self.steps += 1
        self.is_open = self.rng.random() < 0.6
        return self.is_open


class Always(Gate):
    """Drafts in every step."""

    def decide(self) -> bool:
        self.steps, self.is_open = self.steps + 1, True
        return True


class Seldom(Gate):
    """A draft in every seventh step: six steps' features wait."""

    def decide(self) -> bool:
        self.steps += 1
        self.is_open = self.steps % 7 == 0
        return self.is_open


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
CHURN = {"rows": (0, 1, 2, 1, 0), "joins": (0, 0, 2, 3, 5), "leaves": {0: 2, 2: 6}}


def planner_of(gate: type[Gate], costs: Costs, most: Budget, **named) -> Planner:
    planner = Planner(costs, most, **named)
    planner.gate = gate(planner.clock, planner._forecast)
    return planner


def decode_with(monkeypatch, planner: Planner, *args, **named):
    """``test_exact.run``, with a planner."""
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
    ("maker", "gate", "kind"),
    [
        *((maker, gate, "t1") for maker in MAKERS for gate in (Always, Dice)),
        ("causal-lm", Seldom, "greedy"),
        ("eagle3", Seldom, "greedy"),
        ("eagle1-unshifted", Gate, "greedy"),
        ("eagle3-few-tokens", Gate, "greedy"),
        ("lookup", Gate, "greedy"),
        ("eagle3", Dice, "penalties"),
        ("causal-lm", Always, "penalties"),
    ],
)
def test_text_is_plain_decodings(maker, gate, kind, lab, monkeypatch):  # noqa: F811
    """Rows join and leave meanwhile."""
    here = lab("llama")
    planner = planner_of(gate, BARGAIN, Budget(6, 3, 20))
    stats = check_churn(here, kind, MAKERS[maker](here), planner, monkeypatch)
    assert stats.num_drafted > 0 or maker == "lookup"


@pytest.mark.parametrize("rule", ["speculative", "block", "multi-round", "multi-round-replacement"])
@pytest.mark.parametrize("maker", ["lookup", "causal-lm", "eagle3"])
def test_classic_rules_keep_the_law_with_a_planner(rule, maker, lab, monkeypatch):  # noqa: F811
    """At T = 0 the law is one text. No tree is shaped by what was drawn for it."""
    here, classic = lab("llama"), get_rule(rule)
    made = MAKERS[maker](here)
    usual = Planner.of(COSTS, classic, made.traits, on_cpu=True)
    for gate in (Gate, Dice):
        usual.gate = gate(usual.clock, usual._forecast)
        requests = [here.request("greedy", row) for row in range(3)]
        texts, stats = decode_with(
            monkeypatch, usual, here.target, requests, MAKERS[maker](here), rule=rule, joins=(0, 0, 2)
        )
        assert texts == {row: here.plain("greedy", row) for row in range(3)}
        assert stats.lossless
        assert stats.num_drafted > 0 or maker == "lookup"
    assert usual.budget(context(), classic.children).rule is None


def test_match_top_with_a_planner(lab, monkeypatch):  # noqa: F811
    here = lab("llama")
    requests = [here.request("t1", row) for row in range(3)]
    planner = planner_of(Dice, BARGAIN, Budget(6, 3, 20))
    texts, stats = decode_with(monkeypatch, planner, here.target, requests, MAKERS["eagle3"](here), rule="match-top")
    assert texts == {row: here.plain("t1", row) for row in range(3)}
    assert stats.num_drafted > 0


# --- drafts after plain steps ----------------------------------------------------------------------------------------


class Recorded:
    """A drafter, and every chain that it proposed, by prompt and place."""

    def __init__(self, drafter) -> None:
        self.drafter, self.name, self.features, self.traits = drafter, drafter.name, drafter.features, drafter.traits
        self.admit, self.observe, self.remove = drafter.admit, drafter.observe, drafter.remove
        self.chains: dict[tuple[int, ...], tuple[int, ...]] = {}

    def propose(self, ctx, sampling, budget):
        tree = self.drafter.propose(ctx, sampling, budget)
        if budget.depth:
            for row, tokens in zip(ctx.rows, tree.tokens.tolist(), strict=True):
                self.chains[tuple(row.tokens)] = tuple(tokens[1:])
        return tree


@pytest.mark.parametrize("maker", ["causal-lm", "eagle1", "eagle1-unshifted", "eagle3", "eagle3-few-tokens"])
@pytest.mark.parametrize("kind", ["greedy", "t1"])
def test_after_plain_steps_a_draft_is_what_it_would_have_been(kind, maker, lab, monkeypatch):  # noqa: F811
    """A drafter that was left out for some steps has missed nothing: rows join, leave and end meanwhile."""
    here, found = lab("llama"), []
    for gate in (Always, Seldom, Dice):
        planner = planner_of(gate, COSTS, Budget(4), sighted=False, shapes=(Budget(4),))
        recorded = Recorded(MAKERS[maker](here))
        requests = [here.request(kind, row) for row in CHURN["rows"]]
        decode_with(monkeypatch, planner, here.target, requests, recorded, joins=CHURN["joins"], leaves={0: 2, 2: 9})
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
