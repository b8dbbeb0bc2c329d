"""What the planner decides, against explicit search and in made-up worlds; and that no decision changes the text."""

from __future__ import annotations

import random
from functools import partial
from itertools import groupby

import numpy as np
import pytest
import torch

import test_exact
from draftwing.accept import RULES, get_rule
from draftwing.budget import planner as auto
from draftwing.budget.costs import Costs, Curve
from draftwing.budget.planner import Acceptance, Planner
from draftwing.drafters.base import Budget
from draftwing.drafters.causal_lm import CausalLMDrafter
from draftwing.drafters.feature import EagleDrafter
from draftwing.drafters.growth import Growth
from draftwing.drafters.lookup import LookupDrafter
from draftwing.engine.decode import Decoder
from draftwing.model.target import Context, Row
from draftwing.noise import KeyedNoise
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.tree import PAD, Accepted, DraftTree
from test_exact import MAX_TOKENS, PROMPTS, VOCAB, lab, run  # noqa: F401  # lab is a fixture

COSTS = Costs(
    verify=Curve(((1, 1.0), (4, 1.1), (16, 1.6), (64, 4.0))),
    chain=Curve(((1, 0.1), (8, 0.8))),
    tree=Curve(((1, 0.2), (8, 1.6))),
    width=4,
)


@pytest.fixture(autouse=True)
def no_plain_start(monkeypatch):
    """Worlds begin with drafts; ``test_plain_steps_come_first`` has the start as it is."""
    monkeypatch.setattr(auto, "PLAIN", 0)


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
    acceptance.observe(np.array([]), np.array([], dtype=int), np.array([], dtype=bool))
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
    feed(acceptance, 0.5, 0.0, 100, auto.NUM_DEPTHS + 3)
    assert acceptance(chance, auto.NUM_DEPTHS) == acceptance(chance, auto.NUM_DEPTHS + 1) < 0.1
    assert acceptance(chance, auto.NUM_DEPTHS - 1) == pytest.approx(0.5, abs=0.05)


def test_it_forgets():
    acceptance, chance = Acceptance(), np.array([0.5])
    feed(acceptance, 0.5, 1.0, 2000)
    assert acceptance(chance, 1) > 0.95
    feed(acceptance, 0.5, 0.0, 600)
    assert acceptance(chance, 1) < 0.05  # though by far the most of all observations were accepted


# --- single questions ------------------------------------------------------------------------------------------------


def context(rows: int = 1, length: int = 0) -> Context:
    return Context(torch.device("cpu"), [Row([3] * (length + 1), length, 1) for _ in range(rows)])


def planner_of(costs: Costs = COSTS, arms=None, rows: int = 1, length: int = 0, **named) -> Planner:
    planner = Planner(costs, arms or (Budget(8),), **named)
    planner.budget(context(rows, length), "keyed")
    return planner


@pytest.mark.parametrize("rows", [1, 3])
def test_the_number_of_nodes_has_the_greatest_gain(rows):
    rng = random.Random(rows)
    for _ in range(60):
        seconds = sorted(rng.random() for _ in range(8))
        costs = Costs(Curve(tuple(zip((1, 2, 3, 5, 8, 12, 20, 40), seconds, strict=True))), per_row=0.01)
        planner = planner_of(costs, rows=rows)
        count = rng.randint(1, 12)
        chances = sorted((rows * rng.random() for _ in range(count)), reverse=True)
        token = costs.verify_seconds(1, rows) / rows

        def gain(nodes: int) -> float:
            return sum(chances[:nodes]) * token - costs.verify_seconds(nodes + 1, rows)  # noqa: B023

        found = planner.num_nodes(chances)
        assert 0 <= found <= count
        assert gain(found) >= max(map(gain, range(count + 1))) - 1e-12


def test_no_node_is_verified_for_nothing():
    planner = planner_of()
    assert planner.num_nodes([0.0] * 5) == 0
    assert planner.num_nodes([]) == 0
    assert planner.num_nodes([1.0] * 5) == 5


def test_tokens_that_come_cheaper_are_worth_less():
    """The same chances: where a run comes to more tokens a second, a node must bring more to be worth it."""
    chances = [0.5, 0.3, 0.2, 0.1, 0.06, 0.05, 0.04]
    counts = []
    for tokens in (1, 3, 6, 12):
        planner = planner_of()
        tree = DraftTree.chain(torch.zeros(1, 9, dtype=torch.int64))
        for _ in range(20):
            planner.observe(tree, taken(tree, [0]), tokens, COSTS.draft_seconds(8), COSTS.verify_seconds(9))
        counts.append(planner.num_nodes(chances))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_level_is_drafted_where_it_is_worth_its_step(rows):
    rng = random.Random(5)
    answers = []
    for _ in range(200):
        step, level, width = rng.uniform(0.01, 1), rng.randint(1, 9), rng.choice((1, 4))
        chain = Curve(((1, 0.3), (9, 0.3 + 8 * step)))
        tree = Curve(((1, 0.3), (9, 0.3 + 8 * 2 * step)))
        costs = Costs(COSTS.verify, chain, tree, 4, draft_per_row=0.5)
        planner = planner_of(costs, rows=rows)
        reached = sum(rng.random() for _ in range(width * rows))
        # As many tokens as paths that are right to there, and then once more; for one more node of each row at least.
        worth = reached * 0.7 * costs.verify_seconds(1, rows) / rows
        takes = step * (1 if width == 1 else 2) * (1 + 0.5 * (rows - 1))
        takes += costs.verify_seconds(level + 2, rows) - costs.verify_seconds(level + 1, rows)
        if abs(worth - takes) > 1e-4:
            assert planner.another_level(reached, level, width) == (worth > takes)
            answers.append(worth > takes)
    assert 20 < sum(answers) < len(answers) - 20
    assert not planner.another_level(0.0, 1, 4)


def test_a_line_of_drafting_follows_the_clock():
    line = auto._Line(0.2, 0.1)
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


def test_a_slow_machine_is_noticed():
    """Drafting that takes twice what was measured is worth it half as long."""
    tree = DraftTree.chain(torch.zeros(1, 9, dtype=torch.int64))
    costs = Costs(COSTS.verify, Curve(((1, 0.2), (9, 1.8))))
    for drafting, verifying, wanted in ((1, 1, True), (2, 1, False), (2, 2, True), (1, 0.5, False)):
        planner = planner_of(costs)
        for _ in range(200):
            planner.observe(tree, taken(tree, [0]), 1, drafting * 1.6, verifying * costs.verify_seconds(9))
        assert planner.another_level(0.41, 1, 1) == wanted, (drafting, verifying)


def test_chances_are_the_observed_rates():
    planner = planner_of()
    chances = torch.tensor([[[0.9, 0.05]], [[0.4, 0.3]]])
    for depth in (1, 6):
        assert planner.chances(chances.log(), depth).exp().numpy() == pytest.approx(chances.numpy(), rel=1e-4)
        assert [planner.chance(each, depth) for each in (0.9, 0.05)] == pytest.approx([0.9, 0.05])
    for rate in (0.5, 0.2):
        for kind in (planner.acceptance, planner.tree_acceptance):
            feed(kind, 0.9, rate, 300)
        found = planner.chances(chances.log(), 1)
        assert found.dtype == chances.dtype
        assert found.shape == chances.shape
        assert float(found[0, 0, 0].exp()) == pytest.approx(rate, abs=0.08)
        grid = torch.linspace(0, 1, 41)  # one by one as all together
        together = planner.chances(grid.log(), 1).exp().tolist()
        assert [planner.chance(float(each), 1) for each in grid] == pytest.approx(together, rel=1e-4)
    assert bool(planner.chances(torch.tensor([[-torch.inf]]), 1).isfinite().all())


def test_a_plan_goes_along_only_where_it_may_read():
    arms = (Budget(3), Budget(4, 2, 9))
    for reads in (True, False):
        cheap = Costs(Curve(((1, 1.0), (64, 1.0))), COSTS.chain, COSTS.chain, 4)
        planner = Planner(cheap, arms, reads=reads)
        seen = set()
        for number in range(auto.FIRST + auto.FIRST // 2):
            budget = planner.budget(context(), "top")
            assert budget.children == "top"
            assert budget.plan is (planner if reads else None)
            assert budget == Budget(budget.depth, budget.width, budget.nodes, children="top")
            seen.add(budget.depth)
            tree = DraftTree.chain(torch.zeros(1, 1 + budget.depth, dtype=torch.int64))
            planner.observe(tree, taken(tree, [0]), 4, 0.3, 1.1)  # as if much came of it: the tree may win
            assert (planner.acceptance(np.array([0.6]), 1) == pytest.approx(0.6)) or reads, number
        assert seen == {3, 4}


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("free", [True, False])
def test_the_usual_arms_suit_the_rule(rule, free, on_cpu):
    planner = Planner.of(COSTS, rule, free=free, on_cpu=on_cpu)
    assert planner.reads == (on_cpu and not free and rule.children in ("keyed", "top"))
    assert all(arm.is_chain for arm in planner.arms) == (free or rule.chain_only)
    assert all(arm.is_chain for arm in Planner.of(Costs(COSTS.verify), rule, free=free, on_cpu=on_cpu).arms)


def test_without_arms_nothing_is_drafted():
    planner = Planner(COSTS, ())
    for _ in range(50):
        assert planner.budget(context(), "keyed").depth == 0
        tree = DraftTree.chain(torch.zeros(1, 1, dtype=torch.int64))
        planner.observe(tree, taken(tree, [0]), 1, 0.0, 1.0)


# --- worlds ----------------------------------------------------------------------------------------------------------


def taken(tree: DraftTree, *paths: list[int]) -> Accepted:
    width = max(map(len, paths))
    path = torch.tensor([[*each, *[PAD] * (width - len(each))] for each in paths])
    return Accepted(path, (path != PAD).sum(1) - 1, torch.zeros(len(paths), dtype=torch.int64))


class World:
    """A drafter that claims a chance for its best child and is right at a rate; steps take exactly what costs say.

    Of children that are not the best none is ever right.
    """

    def __init__(self, planner: Planner, claims: float = 0.9, seed: int = 0) -> None:
        self.planner, self.costs, self.rng = planner, planner.costs, random.Random(seed)
        self.logits = torch.full((11,), (1 - claims) / 10).log()
        self.logits[4] = np.log(claims)
        self.rows, self.rate, self.slow = 1, 0.9, 1.0
        self.depths: list[int] = []  # drafted in each step
        self.nodes: list[int] = []
        self.tokens = self.seconds = 0.0

    def step(self, wanted: str = "keyed") -> None:
        ctx = context(self.rows)
        budget = self.planner.budget(ctx, wanted)
        tree, level = DraftTree.root(ctx.pending()), 0
        if budget.depth:
            growth = Growth(ctx, [True] * self.rows, SamplingBatch([Sampling()] * self.rows, KeyedNoise(11)), budget)
            width = 1
            while not growth.done:
                growth.extend(self.logits.expand(self.rows, width, -1))
                width = growth.drafted().num_nodes - growth.first
            tree, level = growth.finish(), growth.level
        accepted = taken(tree, *(self._path(tree.parents[row].tolist()) for row in range(self.rows)))
        drafted = self.costs.draft_seconds(level, budget.width, self.rows) * self.slow
        verified = self.costs.verify_seconds(tree.num_nodes, self.rows, 0) * self.slow
        tokens = int(accepted.num.sum()) + self.rows
        self.planner.observe(tree, accepted, tokens, drafted, verified)
        self.depths.append(level)
        self.nodes.append(tree.num_nodes)
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + drafted + verified

    def _path(self, parents: list[int]) -> list[int]:
        path = [0]
        while path[-1] in parents[path[-1] + 1 :] and self.rng.random() < self.rate:
            path.append(parents.index(path[-1], path[-1] + 1))
        return path

    def run(self, steps: int, rate: float, rows: int = 1, slow: float = 1.0) -> tuple[float, float]:
        """The share of steps that drafted, and the speedup over plain decoding."""
        self.rate, self.rows, self.slow, self.tokens, self.seconds = rate, rows, slow, 0.0, 0.0
        for _ in range(steps):
            self.step()
        plain = self.costs.verify_seconds(1, rows, 0) * slow / rows
        return sum(depth > 0 for depth in self.depths[-steps:]) / steps, self.tokens * plain / self.seconds


def gaps(depths: list[int]) -> list[int]:
    """Lengths of the plain runs between drafts."""
    runs = [(bool(drafts), len(list(steps))) for drafts, steps in groupby(depths, key=lambda depth: depth > 0)]
    return [length for drafts, length in runs[:-1] if not drafts]


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("arms", [(Budget(8),), (Budget(2), Budget(6, 4, 40))], ids=["chain", "two"])
def test_where_nothing_is_accepted_little_is_drafted(arms, reads):
    world = World(Planner(COSTS, arms, reads=reads))
    world.run(600, 0.0)
    assert all(depth > 0 for depth in world.depths[: auto.FIRST])
    between = gaps(world.depths)
    assert between == sorted(between)  # ever rarer
    assert between[0] < auto.PROBE
    assert auto.PATIENCE - 2 <= between[-1] <= auto.PATIENCE
    share, speedup = world.run(1000, 0.0)
    assert 0 < share < 1.2 * auto.AGAIN / auto.PATIENCE
    assert speedup > 0.96


@pytest.mark.parametrize("reads", [True, False])
def test_drafting_comes_back_when_it_pays_again(reads):
    world = World(Planner(COSTS, (Budget(8),), reads=reads))
    assert world.run(500, 0.0)[0] < 0.2
    world.run(800, 0.95)
    share, speedup = world.run(200, 0.95)
    assert share == 1.0
    assert speedup > 2.5
    world.run(300, 0.0)
    assert world.run(400, 0.0)[0] < 0.1


@pytest.mark.parametrize(("rate", "better"), [(0.97, 8), (0.5, 1)])
@pytest.mark.parametrize("order", [1, -1])
def test_the_better_arm_is_taken(rate, better, order):
    world = World(Planner(COSTS, (Budget(1), Budget(8))[::order], reads=False))
    world.run(200, rate)
    world.run(1000, rate)
    depths = world.depths[-1000:]
    assert depths.count(better) / len(depths) > 0.93
    assert depths.count(9 - better) > 0  # the other is tried again now and then


@pytest.mark.parametrize(
    ("rate", "claims"),
    [(0.95, 0.95), (0.9, 0.3), (0.2, 0.9), (0.5, 0.5), (0.5, 0.95)],
)
def test_a_chain_comes_near_the_best_fixed_one(rate, claims):
    """Whatever the drafter claims."""
    world = World(Planner(COSTS, (Budget(14),)), claims)
    world.run(300, rate)
    _, speedup = world.run(700, rate)
    best = max(COSTS.speedup(rate, gamma, 1, 0) for gamma in range(15))
    assert speedup > 0.88 * best


def test_costs_decide_between_chain_and_tree():
    """Where a tree is dear a chain is taken: none but the best child is ever right here."""
    arms = (Budget(6), Budget(6, 4, 40))
    dear = World(Planner(Costs(COSTS.verify, COSTS.chain, Curve(((1, 3.0), (8, 24.0))), 4), arms))
    dear.run(300, 0.8)
    assert dear.run(500, 0.8)[1] > 1.8
    assert sum(arm.steps for arm in dear.planner._arms[1:]) < 0.1 * dear.planner._arms[0].steps


def test_rows_that_come_and_go_do_not_stop_the_drafts():
    """What arms brought for one row is not held against what plain decoding brings for eight."""
    flat = Costs(Curve(((1, 1.0), (512, 1.01))), COSTS.chain)
    world = World(Planner(flat, (Budget(4),), reads=False))
    for rows in (1, 8, 1, 8):
        share, speedup = world.run(100, 0.9, rows)
        assert share == 1.0, rows
        assert speedup > 2


def test_a_machine_that_slows_down_does_not_stop_the_drafts():
    world = World(Planner(COSTS, (Budget(4),), reads=False))
    for slow in (1.0, 3.0, 0.5, 1.0):
        assert world.run(200, 0.9, slow=slow)[0] == 1.0
    # Nor does it start them.
    world = World(Planner(COSTS, (Budget(4),), reads=False))
    world.run(300, 0.05)
    for slow in (3.0, 0.5, 2.0):
        assert world.run(400, 0.05, slow=slow)[0] < 0.05


def test_plain_steps_come_first(monkeypatch):
    """What a run of plain steps takes is measured then: half of what the costs say makes drafts half as good."""
    monkeypatch.setattr(auto, "PLAIN", 4)
    for plain, drafts in ((1.0, True), (0.4, False)):
        world = World(Planner(COSTS, (Budget(1),), reads=False))
        for _ in range(60):
            world.slow = 1.0 if world.planner.budget(context(), "keyed").depth else plain
            world.planner._steps -= 1
            world.step()
        assert world.depths[:4] == [0] * 4
        assert world.depths[4] == 1
        world.rate = 0.6
        for _ in range(300):
            world.slow = plain if world.planner._chosen is None else 1.0
            world.step()
        assert (sum(world.depths[-200:]) > 150) == drafts, plain


def test_all_that_was_drafted_is_paid_for():
    """Levels are counted as they were drafted, by their own curve, whatever is kept of them."""
    for arm in (Budget(6), Budget(6, 4, 40), Budget(1), Budget(1, 4, 8)):
        world = World(Dice(COSTS, (arm,)))
        only = world.planner._arms[0]
        for number in range(80):
            spent, counted, steps = world.seconds, only.verify + only.draft, only.steps
            world.step()
            spent = world.seconds - spent
            wanted = auto.KEEP * counted + spent if only.steps > steps else counted
            assert only.verify + only.draft == pytest.approx(wanted, rel=1e-3), number  # the planner's own time too
        assert 0 in world.depths
        assert arm.depth in world.depths
        assert any(depth > 0 and nodes == 1 for depth, nodes in zip(world.depths, world.nodes, strict=True))


def test_no_more_nodes_than_the_budget_has():
    """Even where verifying costs nothing."""
    flat = Costs(Curve(((1, 1.0), (64, 1.0))), Curve(((1, 0.0), (8, 0.0))), Curve(((1, 0.0), (8, 0.0))), 4)
    world = World(Planner(flat, (Budget(6, 4, 20),)))
    for _ in range(10):
        world.step()
    assert set(world.nodes) == {21}
    assert set(world.depths) == {6}


# --- no decision changes the text ------------------------------------------------------------------------------------


class Dice(Planner):
    """Every decision by dice: seeded, so that a failure can be had again."""

    seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rng = random.Random(self.seed)

    def _choose(self):
        return self.rng.choice([None, None, *self._arms])

    @property
    def _token_seconds(self):
        """What a token is worth decides how deep, and how many nodes."""
        return super()._token_seconds * self.rng.choice((0, 10 ** self.rng.uniform(-2, 2), 1e9, 1e9))


class First(Planner):
    """Always the first of its arms."""

    def _choose(self):
        return self._arms[0]


class Turns(Planner):
    """A chain, a tree, nothing, in turn."""

    def _choose(self):
        return [*self._arms, None][self._steps % (len(self._arms) + 1)]


class Seldom(Planner):
    """A draft in every seventh step: six steps' features wait."""

    def _choose(self):
        return self._arms[self._steps // 7 % len(self._arms)] if self._steps % 7 == 0 else None


NOTHING = Curve(((1, 0.0), (8, 0.0)))
SCRIPTS = {
    # A plain step is dearer than all that is drafted and verified; or a draft so dear that none is but for the probes.
    "always": Costs(Curve(((1, 1e4), (2, 1.0), (64, 1.0))), NOTHING, NOTHING, 4),
    "never": Costs(Curve(((1, 1e-6), (64, 1e-6))), Curve(((1, 1e4), (8, 1e5))), Curve(((1, 1e4), (8, 1e5))), 4),
    "short": Costs(Curve(((1, 1.0), (2, 1.9), (64, 60.0))), NOTHING, NOTHING, 4),
    "normal": COSTS,
}
PLANNERS = {
    **{name: (Planner, costs) for name, costs in SCRIPTS.items()},
    "dice": (Dice, COSTS),
    "dice-free": (Dice, SCRIPTS["always"]),
    "turns": (Turns, SCRIPTS["always"]),
    "seldom": (Seldom, SCRIPTS["always"]),
}
ARMS = (Budget(6), Budget(4, 3, 20), Budget(3, 2))
MAKERS = {
    "lookup": lambda here: LookupDrafter(VOCAB, 1),
    "causal-lm": lambda here: CausalLMDrafter(here.perturbed, VOCAB),
    "eagle1": lambda here: EagleDrafter(here.head(1, ()), here.target),
    "eagle1-unshifted": lambda here: EagleDrafter(here.head(1, (("inputs", "feature-unshifted"),)), here.target),
    "eagle3": lambda here: EagleDrafter(here.head(3, ()), here.target),
    "eagle3-few-tokens": lambda here: EagleDrafter(here.head(3, (("draft_vocab_size", 40),)), here.target),
}
BATCHES = {
    "one": {"rows": (1,)},
    "churn": {"rows": (0, 1, 2, 1, 0), "joins": (0, 0, 2, 3, 5), "leaves": {0: 2, 2: 6}},
}


@pytest.fixture
def impatient(monkeypatch):
    """Texts are short: probes must come soon to come at all."""
    for name, value in {"FIRST": 1, "AGAIN": 1, "EVERY": 3, "PROBE": 3, "PATIENCE": 5}.items():
        monkeypatch.setattr(auto, name, value)


class Watch:
    """Stands between decoder and planner and counts what was drafted."""

    def __init__(self, planner: Planner) -> None:
        self.planner, self.nodes, self.drafting = planner, [], []

    def budget(self, ctx, children):
        budget = self.planner.budget(ctx, children)
        self.drafting.append(budget.depth > 0)
        return budget

    def observe(self, tree, accepted, num_tokens, drafted_s, verified_s):
        self.nodes.append(tree.num_nodes)
        self.planner.observe(tree, accepted, num_tokens, drafted_s, verified_s)


def decode_with(monkeypatch, planner: Planner, *args, **named):
    """``test_exact.run``, with a planner."""
    watch = Watch(planner)
    monkeypatch.setattr(test_exact, "Decoder", partial(Decoder, planner=watch))
    try:
        return *run(*args, **named), watch
    finally:
        monkeypatch.setattr(test_exact, "Decoder", Decoder)


def check_texts(here, kind, batch, texts) -> None:
    leaves = batch.get("leaves", {})
    for request, row in enumerate(batch["rows"]):
        wanted = here.plain(kind, row)
        if request in leaves:
            wanted = wanted[: len(texts[request])]
            assert wanted
        assert texts[request] == wanted


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("script", PLANNERS)
@pytest.mark.parametrize("kind", ["greedy", "t1"])
def test_text_is_plain_decodings(kind, script, maker, lab, monkeypatch, impatient):  # noqa: F811
    here, (planner_class, costs) = lab("llama"), PLANNERS[script]
    planner = planner_class(costs, ARMS, reads=maker != "lookup")
    nodes, drafting = [], []
    for batch in BATCHES.values():  # one planner for all of them, as it is for all requests of a model
        requests = [here.request(kind, row) for row in batch["rows"]]
        joins, leaves = batch.get("joins", ()), batch.get("leaves", {})
        made = MAKERS[maker](here)
        texts, stats, watch = decode_with(monkeypatch, planner, here.target, requests, made, joins=joins, leaves=leaves)
        check_texts(here, kind, batch, texts)
        assert stats.num_forwards <= stats.num_tokens
        nodes, drafting = nodes + watch.nodes, drafting + watch.drafting
    if maker == "lookup":
        return  # drafts where something repeats, and not for the asking
    if script == "always":
        assert all(drafting)
        assert max(nodes) == 21
    elif script not in ("short", "normal"):
        assert max(nodes) > 1
        assert not all(drafting)
        assert any(drafting[drafting.index(False) :])  # again after plain steps


@pytest.mark.parametrize("family", ["qwen3", "mistral-window"])
@pytest.mark.parametrize("maker", ["causal-lm", "eagle3"])
def test_text_of_other_families(family, maker, lab, monkeypatch):  # noqa: F811
    here = lab(family)
    for seed, kind in enumerate(("greedy", "penalties")):
        planner = type("Seeded", (Dice,), {"seed": seed})(COSTS, ARMS)
        requests = [here.request(kind, row) for row in range(3)]
        texts, stats, _ = decode_with(monkeypatch, planner, here.target, requests, MAKERS[maker](here))
        assert texts == {row: here.plain(kind, row) for row in range(3)}
        assert stats.num_drafted > 0


@pytest.mark.parametrize("rule", ["speculative", "block", "multi-round", "multi-round-replacement"])
@pytest.mark.parametrize("maker", ["lookup", "causal-lm", "eagle3"])
def test_classic_rules_keep_the_law_with_a_planner(rule, maker, lab, monkeypatch, impatient):  # noqa: F811
    """At T = 0 the law is one text."""
    here, classic = lab("llama"), get_rule(rule)
    usual = Planner.of(COSTS, classic, free=maker == "lookup", on_cpu=True)
    assert not usual.reads
    arms = tuple(arm for arm in usual.arms if arm.width < 8) or usual.arms
    if not classic.chain_only and maker != "lookup":
        arms = (*arms, Budget(3, 2))
    for planner in (usual, Dice(COSTS, arms, reads=False), Turns(COSTS, arms, reads=False)):
        requests = [here.request("greedy", row) for row in range(3)]
        texts, stats, watch = decode_with(
            monkeypatch, planner, here.target, requests, MAKERS[maker](here), rule=rule, joins=(0, 0, 2)
        )
        assert texts == {row: here.plain("greedy", row) for row in range(3)}
        assert stats.lossless
        if maker != "lookup":
            assert max(watch.nodes) > 2
        if type(planner) is Dice:
            assert not all(watch.drafting)


def test_match_top_with_a_planner(lab, monkeypatch):  # noqa: F811
    here = lab("llama")
    requests = [here.request("t1", row) for row in range(3)]
    texts, stats, _ = decode_with(
        monkeypatch, Dice(COSTS, ARMS), here.target, requests, MAKERS["eagle3"](here), rule="match-top"
    )
    assert texts == {row: here.plain("t1", row) for row in range(3)}
    assert stats.num_drafted > 0


# --- drafts after plain steps ----------------------------------------------------------------------------------------


class Recorded:
    """A drafter, and every chain that it proposed, by prompt and place."""

    def __init__(self, drafter) -> None:
        self.drafter, self.name, self.features = drafter, drafter.name, drafter.features
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
    for planner_class in (First, Seldom, Dice):
        planner = planner_class(COSTS, (Budget(4),), reads=False)
        recorded, batch = Recorded(MAKERS[maker](here)), BATCHES["churn"]
        requests = [here.request(kind, row) for row in batch["rows"]]
        *_, watch = decode_with(
            monkeypatch, planner, here.target, requests, recorded, joins=batch["joins"], leaves={0: 2, 2: 9}
        )
        found.append(recorded.chains)
        assert all(watch.drafting) == (planner_class is First)
    everywhere, *others = found
    # What is drafted depends on the text alone, so chains at the same place are the same.
    num_shared = 0
    for chains in others:
        shared = everywhere.keys() & chains.keys()
        assert {text: chains[text] for text in shared} == {text: everywhere[text] for text in shared}
        assert any(PAD not in chains[text] for text in shared)
        num_shared += len(shared)
    assert num_shared >= 8
    assert len({text[: len(PROMPTS[2])] for text in everywhere}) > 1
    assert max(map(len, everywhere)) >= MAX_TOKENS // 2
