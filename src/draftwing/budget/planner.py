"""How much to draft, decided step by step: a bandit over a few sizes of drafts, by measured tokens per second.

The arms are no drafts, a chain of one, a chain of two, and the *grown* tree, whose nodes are chosen while it grows by
what they are worth (``GrowthRule``: measured costs and observed acceptance). Every arm keeps decayed sums of seconds
and tokens of its steps. The fastest arm is played; the others are probed for two steps at intervals that double while
nothing changes. A new request shortens the intervals and fades what earlier requests said about drafts.

With the keyed match rule no decision can change the output. For rules that draw children from q, and on a GPU, where
the host must not wait for a tree's nodes, the grown tree is replaced by the fixed shape of the highest expected
speed.

Deciding by a bandit: BanditSpec (2505.15141). Trees by expected worth: Sequoia (2402.12374), SpecDec++ (2405.19715).
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice

import numpy as np
from torch import Tensor

from draftwing.accept import Rule
from draftwing.budget.acceptance import Acceptance, Ranks, judged
from draftwing.budget.costs import Costs
from draftwing.methods.base import Budget, Drafter
from draftwing.models.context import Context, Row
from draftwing.tree import Accepted, DraftTree, GrowthRule


@dataclass(frozen=True)
class PlannerConfig:
    """Constants of the planner. Units are decode steps unless stated; SmolLM2 in int8 takes about 5 ms per step."""

    decay: float = 0.985  # share of an arm's past that a step keeps: its memory is about 70 steps
    token_decay: float = 0.998  # the same for the ratio of emitted to expected tokens: about 500 steps
    min_gain: float = 1.06  # by which the hope for drafts must beat the baseline, whose steps between drafts run slower
    doubt: float = 0.3  # optimism about an arm that was played once, as a share of its speed; falls with 1/sqrt(plays)
    warmup: int = 4  # steps of the baseline, and of each chain, before the first decision
    warmup_grown: int = 12  # steps of the grown tree before the first decision: acceptance is learned in them
    probe: int = 2  # steps of a probe; the first one after baseline steps is slow and does not count
    first_interval: int = 16  # steps between probes, doubled after each one that changes nothing,
    last_interval: int = 256  # up to this: a probe that loses half of its time then costs 0.4%
    hopeless: float = (
        0.75  # an arm slower than the best one by more than this factor is only probed at the last interval
    )
    carried: float = 5.0  # plays of earlier requests that count in a new request: the next prompt may differ
    probe_fade: float = 0.6  # share of an arm's past that counts when it is probed again
    hiccup: float = (
        2.0  # a step counts as at most this many average steps of its arm: other processes are not its fault
    )
    learn_every: int = 8  # drafted steps between updates of acceptance and growth rule (0.2 ms each)
    skip_after: int = 3  # requests in a row without a gain, after which requests are decoded without the drafter
    max_skipped: int = 8  # requests skipped at most before drafts are tried again
    max_depth: int = 14  # levels of a tree
    max_width: int = 4  # children of a node
    max_nodes: int = 63  # nodes of a tree, the root not counted: one less than the largest measured size


CONFIG = PlannerConfig()
CHEAP = Budget(16, 3, 63)  # for drafters that run no net: depth, alternatives and nodes cost next to nothing to propose
SHAPES = (*map(Budget, (3, 5, 8)), Budget(5, 8, 16), Budget(8, 10, 60))  # to choose from when trees cannot grow freely


class Arm:
    """Decayed seconds and tokens of one way of stepping."""

    def __init__(self) -> None:
        self.plays, self.weight, self.seconds, self.tokens = 0, 0.0, 0.0, 0.0
        self.interval = CONFIG.first_interval

    def add(self, seconds: float, tokens: float) -> None:
        if self.plays >= 4:
            seconds = min(seconds, CONFIG.hiccup * self.seconds / self.weight)
        self.plays += 1
        keep = CONFIG.decay
        self.weight, self.seconds, self.tokens = (
            keep * self.weight + 1,
            keep * self.seconds + seconds,
            keep * self.tokens + tokens,
        )

    def fade(self, share: float) -> None:
        self.weight, self.seconds, self.tokens = share * self.weight, share * self.seconds, share * self.tokens

    @property
    def speed(self) -> float:
        """Tokens per second of each row."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def hope(self) -> float:
        """An upper confidence bound of the speed."""
        return self.speed * (1 + CONFIG.doubt / math.sqrt(self.weight)) if self.weight else math.inf


class Bandit:
    """Which arm to play, for batches of one size. Arm 0 is the baseline, the last one the grown tree."""

    def __init__(self, num_arms: int) -> None:
        self.arms = [Arm() for _ in range(num_arms)]
        self.best: int = 0
        self.current: int = 0
        self.steps, self.next_probe, self.probe_left = 0, 0, 0  # probe_left: further steps of the current probe
        self.warmup = [*[CONFIG.warmup] * (num_arms - 1), CONFIG.warmup_grown]

    def choose(self) -> int:
        """The arm of the next step."""
        self.steps += 1
        if self.probe_left:
            self.probe_left -= 1
            return self.current
        # Baseline first, then the grown tree, whose acceptance decides which chains are worth a look.
        order: list[int] = [0, len(self.arms) - 1, *range(1, len(self.arms) - 1)]
        for arm in order:
            if self.arms[arm].plays < self.warmup[arm]:
                self.current = arm
                return arm
        best = self._fastest()
        if best != self.best:
            self.best = best
            self.arms[best].interval = CONFIG.first_interval
            self.next_probe = self.steps + CONFIG.first_interval
        self.current = best
        if self.steps >= self.next_probe:
            self._start_probe()
        return self.current

    def _fastest(self) -> int:
        hopes = [arm.hope for arm in self.arms]
        drafts = hopes.index(max(hopes[1:]), 1)
        if self.best and hopes[drafts] < 1.02 * hopes[self.best]:
            drafts = self.best  # near ties are not worth a change
        return drafts if hopes[drafts] > CONFIG.min_gain * self.arms[0].speed else 0

    def _start_probe(self) -> None:
        """Play the arm that was left alone longest by its own interval, unless it is hopeless."""
        others = [place for place in range(len(self.arms)) if place != self.best]
        top = self.arms[self.best].speed
        able = [place for place in others if self.arms[place].hope > CONFIG.hopeless * top] or others
        probed = min(able, key=lambda place: self.arms[place].weight)
        arm = self.arms[probed]
        arm.fade(CONFIG.probe_fade)
        arm.interval = min(2 * arm.interval, CONFIG.last_interval)
        if able is others:
            arm.interval = CONFIG.last_interval
        self.next_probe = self.steps + arm.interval
        self.current, self.probe_left = probed, CONFIG.probe - 1

    def begin_request(self) -> None:
        """Believe less of what earlier requests said about drafts, and probe soon."""
        for arm in self.arms[1:]:
            arm.fade(min(1.0, CONFIG.carried / max(arm.weight, 1e-9)))
            arm.interval = CONFIG.first_interval
        self.next_probe = min(self.next_probe, self.steps + CONFIG.first_interval // 4)


class Planner:
    """Chooses the budget of every step. One planner serves all requests and decode loops of a model.

    Args:
        costs: measured for this target and drafter.
        grown: the largest tree; None if trees must not depend on their own nodes: then a fixed shape takes its place.
        shapes: the chains and trees to choose that fixed shape from.
        chains: lengths of the chains that are arms of their own.
    """

    def __init__(
        self,
        costs: Costs,
        grown: Budget | None,
        *,
        shapes: tuple[Budget, ...] = SHAPES,
        chains: tuple[int, ...] = (1, 2),
    ) -> None:
        self.costs, self.most = costs, grown or max(shapes, key=_num_nodes)
        self._grown, self._shapes, self._chains = grown, shapes, chains
        self._acceptance, self._ranks = Acceptance(), Ranks()
        self._bandits: dict[tuple[int, int], Bandit] = {}
        self._key = 0, 0  # rows (by powers of two) and node limit of the latest step
        self._bandit = Bandit(2 + len(chains))
        self._budget: Budget | None = None  # the grown arm's, until something is learned
        self._unlearned: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._expected = self._emitted = 30.0  # tokens by the nodes' probabilities, and as they came
        self._request: Row | None = None
        self._was_baseline = True
        self._losing, self._skips, self._skip_length = 0, 0, 1
        self._temperature = self._coolest = math.inf
        self._lock = threading.Lock()

    @classmethod
    def of(cls, costs: Costs, rule: Rule, drafter: Drafter, *, on_cpu: bool) -> Planner:
        """The planner for a rule and a drafter."""
        may_grow = rule.children in ("keyed", "top") and on_cpu
        if not drafter.costs_forwards:
            return cls(costs, CHEAP if may_grow else None, shapes=(Budget(16),), chains=())
        is_tree = not rule.chain_only and costs.width > 1
        grown = Budget(CONFIG.max_depth, CONFIG.max_width, CONFIG.max_nodes) if is_tree else Budget(CONFIG.max_depth)
        shapes = SHAPES if is_tree else tuple(shape for shape in SHAPES if shape.is_chain)
        return cls(costs, grown if may_grow else None, shapes=shapes)

    # --- one step --------------------------------------------------------------------------------------------------

    def budget(self, ctx: Context, children: str, max_nodes: int | None = None) -> Budget:
        """The budget of the next step.

        Args:
            ctx: the running rows.
            children: how the rule needs children to be chosen.
            max_nodes: limit of each row's tree, the root not counted.
        """
        with self._lock:
            self._turn_to(len(ctx.rows), max_nodes)
            if len(ctx.rows) == 1 and ctx.rows[0] is not self._request:
                self._end_request()
                self._request = ctx.rows[0]
                self._bandit.begin_request()
            arm = self._bandit.choose()
            if arm <= len(self._chains):
                length = (0, *self._chains)[arm]
                return _chain(length if max_nodes is None else min(length, max_nodes), children)
            if self._budget is None or len(self._unlearned) >= CONFIG.learn_every or self._bandit.steps < 64:
                self._learn()
                self._budget = replace(self._shape(len(ctx.rows), max_nodes), children=children)
            return self._budget

    def observe(self, tree: DraftTree, accepted: Accepted, num_tokens: int, seconds: float) -> None:
        """Learn from a step.

        Args:
            tree: the proposed trees.
            accepted: what the rule kept.
            num_tokens: emitted tokens of all rows.
            seconds: duration of the step, including the planner's decision.
        """
        with self._lock:
            rows, nodes = tree.tokens.shape
            bandit = self._bandit
            drafted = nodes > 1 or bool(tree.num_draft_forwards)
            tokens = num_tokens / rows
            if drafted and self._grown is not None and tree.confidence is not None:
                # Which token comes true is luck; how likely it was says more.
                expected = float(tree.confidence.sum()) / rows
                keep = CONFIG.token_decay
                self._expected, self._emitted = keep * self._expected + expected, keep * self._emitted + tokens
                tokens = expected * self._emitted / self._expected
            # The first draft after baseline steps reads all tokens since the last draft: it says nothing of later ones.
            is_cold = drafted and self._was_baseline and bandit.arms[bandit.current].plays > 0
            if not is_cold:
                bandit.arms[bandit.current].add(seconds, tokens)
            self._was_baseline = not drafted
            if nodes > 1:
                self._unlearned.append((tree.parents, accepted.path, tree.node_probs))

    # --- what is learned -------------------------------------------------------------------------------------------

    def _turn_to(self, rows: int, max_nodes: int | None) -> None:
        """Batches of different sizes, and limits, have bandits of their own: what pays for one row may not for many."""
        key = (rows - 1).bit_length(), max_nodes or 0
        if key != self._key:
            self._bandits[self._key] = self._bandit
            self._bandit = self._bandits.setdefault(key, Bandit(2 + len(self._chains)))
            self._key, self._budget = key, None

    def _learn(self) -> None:
        if self._unlearned:
            self._acceptance.observe(*judged(self._unlearned, self._ranks))
            self._unlearned = []

    def _pace(self, rows: int) -> float:
        """The time of a baseline step now, relative to its measured cost."""
        baseline = self._bandit.arms[0]
        return baseline.seconds / baseline.weight / self.costs.verify_seconds(1, rows) if baseline.weight else 1.0

    def _shape(self, rows: int, max_nodes: int | None) -> Budget:
        """The budget of the grown arm."""
        limit = max_nodes or CONFIG.max_nodes
        if self._grown is None:
            shapes = [shape for shape in self._shapes if _num_nodes(shape) <= limit] or [Budget(min(limit, 3))]
            return max(shapes, key=lambda shape: self._expected_speed(shape, rows))
        grown = self._grown
        if limit < _num_nodes(grown):
            width = min(grown.width, limit)
            grown = Budget(min(grown.depth, limit), width, None if width == 1 else limit)
        return replace(grown, rule=self.rule(rows))

    def rule(self, rows: int) -> GrowthRule:
        """The present value of nodes, for a batch of ``rows``."""
        costs, depth, nodes = self.costs, self.most.depth, _num_nodes(self.most)
        pace, baseline = self._pace(rows), self._bandit.arms[0].speed
        verify = np.maximum.accumulate([pace * costs.verify_seconds(max(n, 1), rows) for n in range(nodes + 3)])
        levels = [pace * costs.draft_seconds(level, 1, rows) for level in range(1, depth + 2)]
        speed = max(self._bandit.arms[-1].speed, baseline)
        worth = 1 / (speed * rows) if speed else pace * costs.verify_seconds(1, rows) / rows
        knots, rates = self._acceptance.tables()
        return GrowthRule(
            knots,
            rates,
            np.array([worth * self._ranks.rate(level + 1) for level in range(1, depth + 1)], np.float32),
            np.maximum(np.diff(levels), 1e-7).astype(np.float32),
            verify.astype(np.float32),
            worth,
            costs.node_share,
        )

    def _expected_speed(self, shape: Budget, rows: int) -> float:
        """Tokens per second of a fixed shape, a tree's nodes being the likeliest by rank."""
        nodes = _num_nodes(shape)
        chances = islice(self._ranks.likeliest(shape.depth, shape.width), nodes)
        seconds = self.costs.draft_seconds(shape.depth, shape.width, rows) + self.costs.verify_seconds(nodes + 1, rows)
        return (1 + sum(chance for _, chance in chances)) / seconds

    # --- requests that are decoded without the drafter -------------------------------------------------------------

    def skips(self, temperature: float) -> bool:
        """Return True if a request that is about to run alone should be decoded without the drafter.

        A drafter that is never asked still reads prompts and features, about 3% of a small model's time. A request at a
        lower temperature than those that gained nothing is not skipped: more of its drafts come true.
        """
        with self._lock:
            self._end_request()
            if self._skips and temperature >= self._coolest:
                self._skips -= 1
                return True
            self._temperature = temperature
            return False

    def _end_request(self) -> None:
        """Count requests in a row that ended without a gain from drafts."""
        if self._request is None:
            return
        self._request = None
        bandit = self._bandit if self._key == (0, 0) else self._bandits.get((0, 0), self._bandit)
        if bandit.best or bandit.arms[-1].plays < CONFIG.warmup_grown:
            self._losing, self._skip_length, self._coolest = 0, 1, math.inf
            return
        self._losing, self._coolest = self._losing + 1, min(self._coolest, self._temperature)
        if self._losing >= CONFIG.skip_after:
            self._skips, self._skip_length = self._skip_length, min(2 * self._skip_length, CONFIG.max_skipped)


@cache
def _chain(depth: int, children: str) -> Budget:
    return Budget(depth, children=children)


def _num_nodes(budget: Budget) -> int:
    return budget.nodes or budget.depth * budget.width
