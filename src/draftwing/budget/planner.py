"""Decide before every step how much to draft: a bandit over a few budgets, by measured tokens per second.

The arms are the baseline (no draft), fixed shapes such as chains of one and two tokens, and the *grown* tree, whose
nodes are chosen while it grows by their expected worth (``GrowthRule``: observed costs and acceptance).

1. **Prediction.** The costs and acceptance rates observed so far predict the speedup of every arm, also of those that
   were never played. The prediction counts as ``prior_weight`` steps. Nothing is measured beforehand: typical costs,
   relative to the baseline's step, are corrected by every drafted step (``Correction``).
2. **Exploitation.** The arm with the highest mean of predicted and measured speed is played.
3. **Probes.** At intervals that double while nothing changes, the arm with the highest upper confidence bound is tried,
   if that bound exceeds the speed of the best arm. Bounds widen with the time since an arm was played, so slow arms are
   tried rarely but not never. Every other probe plays the baseline: all predictions are relative to it, and the
   machine's speed changes. Its first steps after drafts are slower than later ones, and do not count unless they are so
   slow that later ones cannot win either.
4. **Requests.** A new request keeps all that was learned about the machine, but little of the arms' speeds in earlier
   requests, and probes soon.

With the keyed match rule no decision can change the output. For rules that draw children from q, and on a GPU, where
the host must not wait for a tree's nodes, there is no grown tree, and more fixed shapes instead.

Speculative decoding as a bandit: BanditSpec (2505.15141). Trees by expected worth: Sequoia (2402.12374), SpecDec++
(2405.19715).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from draftwing.accept import get_rule
from draftwing.budget import CONFIG
from draftwing.budget.acceptance import Acceptance, Ranks, reached_nodes
from draftwing.budget.costs import TYPICAL, TYPICAL_GPU, Costs, LearnedCosts
from draftwing.methods.base import MAX_NODES, Budget, Drafter, cut_to_nodes
from draftwing.models.context import Context, Row
from draftwing.tree import Accepted, DraftTree, GrowthRule

FEW_SHAPES = (Budget(1), Budget(2))
# If trees cannot grow freely: chains of the measured depths, a small and a large tree.
_TREES = [Budget(CONFIG.depths[-1], CONFIG.tree.width, nodes - 1) for nodes in CONFIG.nodes[-3::2]]
SHAPES = (*map(Budget, CONFIG.depths), *_TREES)
BASELINE, GROWN = 0, -1  # indices of arms


class Arm:
    """Decayed seconds and tokens of the steps with one budget."""

    def __init__(self) -> None:
        self.plays, self.last_step = 0, 0
        self.weight = self.seconds = self.tokens = 0.0
        # Tokens as emitted and as predicted, over more steps than ``tokens``, and their ratio: a grown tree predicts
        # better than a chain, which asks the drafter.
        self._emitted = self._predicted = CONFIG.prior_weight
        self.bias = 1.0

    def add(self, seconds: float, tokens: float, predicted: float, step: int) -> None:
        """Count a step: its duration, emitted tokens and predicted ones."""
        if self.plays >= CONFIG.prior_weight:
            seconds = min(seconds, CONFIG.max_slowdown * self.seconds / self.weight)
        keep = CONFIG.decay
        self.weight, self.seconds = keep * self.weight + 1, keep * self.seconds + seconds
        self.tokens = keep * self.tokens + predicted
        keep = CONFIG.acceptance_decay
        self._emitted, self._predicted = keep * self._emitted + tokens, keep * self._predicted + predicted
        self.bias = self._emitted / self._predicted
        self.plays, self.last_step = self.plays + 1, step

    @property
    def speed(self) -> float:
        """Measured tokens per second of each row."""
        return self.tokens * self.bias / self.seconds if self.seconds else 0.0

    def upper_bound(self, speed: float, step: int, prior_weight: float) -> float:
        """Return the upper confidence bound of a speed; the evidence for it decays with the steps since a play."""
        weight = (prior_weight + self.weight) * CONFIG.decay ** (step - self.last_step)
        return speed * (1 + CONFIG.exploration / math.sqrt(weight)) if weight else math.inf


class Bandit:
    """Choose an arm for every step, for batches of one size: the baseline, one of ``shapes``, or any grown tree."""

    def __init__(self, shapes: Sequence[Budget], costs: LearnedCosts, *, has_grown: bool) -> None:
        self.shapes, self.costs = shapes, costs
        self.arms = [Arm() for _ in range(1 + len(shapes) + has_grown)]
        # Arguments of ``costs.observe`` to learn from: the latest steps if drafters propose nothing for long.
        self.drafted: deque[tuple[int, float, float, float]] = deque(maxlen=CONFIG.learn_every)
        self.best = self.current = BASELINE
        self.is_probing = False
        self.steps, self.interval, self.next_probe = 0, CONFIG.first_interval, CONFIG.first_interval
        self.last_choice = 0  # step at which a probe was last considered
        self.run = CONFIG.settling_steps  # steps in a row with the current arm; there is no other one yet

    def choose(self, speedups: Sequence[float]) -> int:
        """Return the arm of the next step.

        Args:
            speedups: predicted speed of every arm relative to the baseline.
        """
        self.steps += 1
        before, self.current = self.current, self._next(speedups)
        self.run = self.run + 1 if self.current == before else 1
        return self.current

    def _next(self, speedups: Sequence[float]) -> int:
        baseline = self.arms[BASELINE]
        if baseline.plays < CONFIG.warmup_steps:
            return BASELINE
        # The mean of predicted and measured speed.
        speeds = [baseline.speed]
        for arm, speedup in zip(self.arms[1:], speedups[1:], strict=True):
            predicted, prior = speedup * baseline.speed, CONFIG.prior_weight
            speeds.append((prior * predicted + arm.weight * arm.speed) / (prior + arm.weight))

        # Drafts that are slower than the baseline are left at once; any other change must be worth it.
        best = self.best if speeds[self.best] > baseline.speed else BASELINE
        fastest = max(range(len(speeds)), key=speeds.__getitem__)
        if speeds[fastest] > CONFIG.min_gain * speeds[best]:
            best = fastest
        if best != self.best:
            self.best, self.is_probing, self.interval = best, False, CONFIG.first_interval
            self.next_probe = self.steps + self.interval
        if self.is_probing and self.steps < self.next_probe:
            return self.current
        self.is_probing = False

        if self.steps >= self.next_probe:  # try the other arm with the highest bound, if it may be the fastest
            bounds = {
                index: arm.upper_bound(speeds[index], self.steps, CONFIG.prior_weight if index else 0.0)
                for index, arm in enumerate(self.arms)
                if index != self.best
            }
            probed = max(bounds, key=bounds.__getitem__)
            if self.best != BASELINE and baseline.last_step < self.last_choice:
                probed, bounds[BASELINE] = BASELINE, math.inf
            self.last_choice = self.steps
            if bounds[probed] > speeds[self.best]:
                self.is_probing = True
                self.interval = min(2 * self.interval, CONFIG.last_interval)
                self.next_probe = self.steps + self.interval
                return probed
        return self.best

    def add(self, seconds: float, tokens: float, predicted: float) -> bool:
        """Count a step of the current arm, and return True; False if it is too early to tell how fast the arm is.

        A probe continues until the next one while it is worth a change of arms, or may be when it has settled.
        """
        arm = self.arms[self.current]
        own, best = predicted * arm.bias, seconds * self.arms[self.best].speed  # tokens in the time of this step
        is_settling = self.current == BASELINE and self.run <= CONFIG.settling_steps
        if is_settling and not (self.is_probing and best > own * (1 + CONFIG.settling / self.run)):
            return False
        arm.add(seconds, tokens, predicted, self.steps)
        baseline = self.arms[BASELINE]
        if baseline.weight:
            self.costs.baseline = baseline.seconds / baseline.weight
        self.is_probing = self.is_probing and own > CONFIG.min_gain * best
        return True

    def begin_request(self) -> None:
        """Reduce the weight of earlier drafts to that of a prediction, since they may no longer be true; probe soon."""
        for arm in self.arms[1:]:
            keep = CONFIG.prior_weight / max(arm.weight, CONFIG.prior_weight)
            arm.weight, arm.seconds, arm.tokens = keep * arm.weight, keep * arm.seconds, keep * arm.tokens
        self.interval = CONFIG.first_interval
        self.next_probe = min(self.next_probe, self.steps + self.interval // 2)


class Planner:
    """Choose the budget of every step. One planner serves all requests and decode loops of a model.

    Args:
        costs: assumed until steps are observed; only their ratios to a baseline step count.
        grown: the largest tree; None if trees must not depend on their own nodes.
        shapes: the chains and fixed trees that are arms.
    """

    def __init__(self, costs: Costs, grown: Budget | None, shapes: Sequence[Budget] = FEW_SHAPES) -> None:
        self._costs = costs
        self.largest = grown or max(shapes, key=attrgetter("max_nodes"))
        self._grown, self._shapes = grown, shapes
        self._acceptance, self._ranks = Acceptance(), Ranks()
        self._bandits: dict[tuple[int, int | None], Bandit] = {}
        self._bandit = self._bandit_for(1, None)
        self._budgets: list[Budget] = []  # by arm
        self._speedups: list[float] = []  # predicted, by arm
        self._unlearned: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._was_baseline = True
        self._request: Row | None = None
        self._num_losses, self._num_skips = 0, 0  # requests in a row without a gain, requests still to skip
        self._temperature = self._lowest_loss = math.inf
        self._lock = threading.Lock()

    # --- one step --------------------------------------------------------------------------------------------------

    def budget(self, ctx: Context, children: str, max_nodes: int | None = None) -> Budget:
        """Return the budget of the next step.

        Args:
            ctx: the running rows.
            children: how the rule needs children to be chosen.
            max_nodes: limit of each row's tree, the root not counted.
        """
        with self._lock:
            rows = len(ctx.rows)
            bandit = self._bandit_for(rows, max_nodes)
            if bandit is not self._bandit:
                self._bandit, self._budgets = bandit, []
            begins = rows == 1 and ctx.rows[0] is not self._request
            if begins:
                self._end_request()
                self._request, self._request_bandit = ctx.rows[0], self._bandit
                self._bandit.begin_request()
            num_steps = min(CONFIG.learn_every, 1 + self._bandit.steps // CONFIG.learn_every)
            if not self._budgets or (len(self._unlearned) >= num_steps and not begins):  # a first token is not delayed
                self._learn(rows, max_nodes or MAX_NODES, children)
            return self._budgets[self._bandit.choose(self._speedups)]

    def observe(
        self, tree: DraftTree, accepted: Accepted, num_tokens: int, seconds: float | None, draft_seconds: float
    ) -> None:
        """Learn from a step.

        Args:
            tree: the proposed trees.
            accepted: the nodes that the rule accepted.
            num_tokens: emitted tokens of all rows.
            seconds: duration of the step, including the planner's decision; None if it says nothing about later ones,
                because the step recorded a CUDA graph.
            draft_seconds: the part of it that the drafter took.
        """
        with self._lock:
            rows, nodes = tree.tokens.shape
            is_draft = nodes > 1 or bool(tree.num_draft_forwards)
            # The first draft after the baseline's steps also reads the tokens since the last draft: it takes longer.
            if seconds is not None and not (is_draft and self._was_baseline):
                tokens = predicted = num_tokens / rows
                if is_draft and self._grown is not None and tree.confidence is not None:
                    predicted = sum(map(sum, tree.confidence.tolist())) / rows  # it varies less than the emitted number
                if self._bandit.add(seconds, tokens, predicted) and is_draft:
                    levels = float(tree.max_depth) if tree.num_draft_forwards is None else tree.num_draft_forwards
                    self._bandit.drafted.append((nodes, levels, seconds, draft_seconds))
            self._was_baseline = self._bandit.current == BASELINE
            if nodes > 1:
                self._unlearned.append((tree.parents, accepted.path, tree.node_probs))

    @property
    def observed_costs(self) -> Costs | None:
        """The costs of a row decoded alone as observed so far; None before the first step."""
        with self._lock:
            bandit = self._bandit_for(1, None)
            return bandit.costs.knots if bandit.steps else None

    def _bandit_for(self, rows: int, max_nodes: int | None) -> Bandit:
        """Return the bandit of a batch size, by powers of two, and of a node limit: the costs of drafts differ."""
        bits = (rows - 1).bit_length()
        if (bits, max_nodes) not in self._bandits:
            shapes = [cut_to_nodes(shape, max_nodes or MAX_NODES) for shape in self._shapes]
            costs = LearnedCosts(self._costs, 1 << bits)
            bandit = Bandit(list(dict.fromkeys(shapes)), costs, has_grown=self._grown is not None)
            self._bandits[bits, max_nodes] = bandit
        return self._bandits[bits, max_nodes]

    # --- learned values --------------------------------------------------------------------------------------------

    def _learn(self, rows: int, max_nodes: int, children: str) -> None:
        """Update acceptance, and with it every arm's budget and predicted speedup."""
        if self._unlearned:
            self._acceptance.observe(*reached_nodes(self._unlearned, self._ranks))
            self._unlearned = []
        while self._bandit.drafted:
            self._bandit.costs.observe(*self._bandit.drafted.popleft())
        shapes = self._bandit.shapes
        budgets, speeds = [Budget(0), *shapes], [self._expected_speed(shape) for shape in shapes]
        if self._grown is not None:
            grown = cut_to_nodes(self._grown, max_nodes)
            budgets.append(replace(grown, rule=self.rule(rows)))
            speeds.append(max(self._chain_speeds(grown.depth)))  # it is at least as fast as the best chain
        self._budgets = [replace(budget, children=children) for budget in budgets]
        self._speedups = [1.0, *[self._bandit.costs.baseline * speed for speed in speeds]]

    def rule(self, rows: int) -> GrowthRule:
        """Return the present value and cost of nodes, for a batch of ``rows``."""
        depth, nodes, bandit = self.largest.depth, self.largest.max_nodes, self._bandit
        verify = np.maximum.accumulate([bandit.costs.verify_seconds(n) for n in range(nodes + 3)])
        levels = [bandit.costs.draft_seconds(level) for level in range(1, depth + 2)]
        worth = 1 / (rows * max(bandit.arms[GROWN].speed, 1 / bandit.costs.baseline))
        knots, rates = self._acceptance.tables()
        gains = np.array([worth * self._ranks.rate(level + 1) for level in range(1, depth + 1)], np.float32)
        level_costs = np.maximum(np.diff(levels), 1e-7).astype(np.float32)
        return GrowthRule(knots, rates, gains, level_costs, verify.astype(np.float32), worth, self._costs.node_share)

    def _chain_speeds(self, depth: int) -> Iterator[float]:
        """Yield tokens per second of each row with chains of 1, 2, ... ``depth`` tokens."""
        costs, tokens, prob = self._bandit.costs, 1.0, 1.0
        for level in range(1, depth + 1):
            prob *= self._ranks.rate(level)
            tokens += prob
            yield tokens / (costs.draft_seconds(level) + costs.verify_seconds(level + 1))

    def _expected_speed(self, shape: Budget) -> float:
        """Return tokens per second of each row with a fixed shape, its nodes being the likeliest by rank."""
        costs, nodes = self._bandit.costs, shape.max_nodes
        probs = islice(self._ranks.likeliest(shape.depth, shape.width), nodes)
        seconds = costs.draft_seconds(shape.depth, shape.width) + costs.verify_seconds(nodes + 1)
        return (1 + sum(prob for _, prob in probs)) / seconds

    # --- requests that are decoded without the drafter -------------------------------------------------------------

    def skips(self, temperature: float) -> bool:
        """Return True if a request that is about to run alone should be decoded without the drafter.

        Even a drafter that proposes nothing reads prompts and features, about 3% of a small model's time. A request at
        a lower temperature than those without a gain is not skipped, since more of its drafts are accepted.
        """
        with self._lock:
            self._end_request()
            if self._num_skips and temperature >= self._lowest_loss:
                self._num_skips -= 1
                return True
            self._temperature = temperature
            return False

    def _end_request(self) -> None:
        """Count requests in a row without a gain; after the n-th one, skip floor(log2(n)) requests."""
        if self._request is None:
            return
        self._request = None
        drafts = sum(arm.plays for arm in self._request_bandit.arms[1:])
        if self._request_bandit.best != BASELINE or drafts < CONFIG.prior_weight:
            self._num_losses, self._num_skips, self._lowest_loss = 0, 0, math.inf
        else:
            self._num_losses, self._lowest_loss = self._num_losses + 1, min(self._lowest_loss, self._temperature)
            self._num_skips = self._num_losses.bit_length() - 1


def planner_for(rule_name: str, drafter: Drafter, device: torch.device) -> Planner:
    """Return the planner for a rule (a name in ``accept.RULES``), a drafter and the target's device."""
    rule, on_cpu = get_rule(rule_name, lossless=False), device.type == "cpu"
    costs, largest = TYPICAL if on_cpu else TYPICAL_GPU, CONFIG.tree
    may_grow = rule.children in ("keyed", "top") and on_cpu
    if not drafter.costs_forwards:
        grown, shapes = (largest, []) if may_grow else (None, [Budget(largest.depth)])
        return Planner(costs.of_target, grown, shapes)
    if may_grow:
        return Planner(costs, Budget(largest.depth) if rule.chain_only else largest)
    return Planner(costs, None, [shape for shape in SHAPES if shape.is_chain or not rule.chain_only])
