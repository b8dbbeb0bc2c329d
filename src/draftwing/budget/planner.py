"""How much to speculate, decided step by step from measured costs and observed acceptance.

Everything is weighed in seconds. A token is worth what one takes at present (the seconds per token that the run has
come to); a node is worth that times its chance of being accepted; a level of drafting costs what the cost model says.
So a tree grows while another level is worth its draft step, keeps the nodes that are worth their share of the
verification, and where drafting brings less than it costs, nothing is drafted but for a short probe now and then.

With the keyed match rule no decision can change the text. With rules that draw children from q, decisions look at
former steps alone (``reads`` is False): nothing that a decision gates is drawn before it.

SpecDec++ (2405.19715), Sequoia (2402.12374) and BanditSpec (2505.15141) decide parts of this.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from draftwing.accept import Rule
from draftwing.budget.costs import Costs, pooled
from draftwing.drafters.base import Budget
from draftwing.model.target import Context
from draftwing.run.request import GrowthRule
from draftwing.tree import Accepted, DraftTree

__all__ = ["Acceptance", "Planner"]

KEEP = 0.985  # share of what is remembered that a step leaves: the last 70 or so count
DOUBT = 0.5  # of an arm's speedup, over the root of the steps that it had: tokens of a step scatter as much as that
TRUST = 4.0  # drafts that each end of a measured line counts as
SPREAD = 100.0  # squares of nodes that no slope at all counts as
FIRST, AGAIN = 16, 2  # steps that an arm is tried at first, so many at a time: texts change, and arms must share them
EVERY, SELDOM = 24, 384  # steps between two trials of an arm that is not the best: at first, and at most
WIDER, NODES = 1.8, 2.5  # a tree may have so many times a chain's accepted drafts, with so many nodes for each token
BRANCHES = 4  # children of a node, and nodes of a level that go on, of a tree that grows at once
PROBE, PATIENCE = 16, 160  # plain steps between two probes: at first, and at most
EDGES = np.array([0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995])  # bins of a chance
PLAIN = 4  # plain steps at first: a loop of them may take less than one among others, by what stays in the caches
GAIN = 1.04  # speedup from which drafting is worth it: what is undecided costs nothing plainly
KNOWN = 64  # steps after which every other one is looked at
RESTING = 32  # plain steps of a long run, of which one is looked at
SETTLED = 8  # plain steps of a run that tell how these compare with drafts; later ones tell of the machine's speed
CHECK, CLOSE = 24, 1.5  # the step from which they are measured anew, ever rarer, where drafting gains less than that
HICCUP = 2.0  # times what was expected: more of a step's time is not held against what it did
MOST = 256  # nodes that costs are looked up for
NUM_DEPTHS = 4  # depths told apart, the last one with all beyond
PRIOR = 3.0  # observations that a bin's own chance counts as
FORGET = 0.998  # of acceptance, by observation
FRESH, YOUNG = 8, 32  # after the first so many steps, what was seen is learnt from every so many


class Acceptance:
    """How often drafted tokens with such a chance were accepted: binned, by depth, decayed, never falling.

    Bins of one depth are pooled where they fall (isotonic regression), so that a greater chance never counts less.
    Until a depth has been seen often enough, it is believed to be as the one above: deep nodes are rarely reached.
    """

    def __init__(self) -> None:
        middles = np.concatenate([[EDGES[0] / 2], (EDGES[1:] + EDGES[:-1]) / 2, [(1 + EDGES[-1]) / 2]])
        # Sums over a bin: nodes, their chances, and how many were accepted; all begin at what the drafter says.
        self._prior = PRIOR * np.stack([np.ones_like(middles), middles, middles])
        self._sums = np.tile(self._prior, (NUM_DEPTHS, 1, 1))
        self._lines: list[tuple[np.ndarray, np.ndarray] | None] = [None] * NUM_DEPTHS
        self._lists: list[tuple[list[float], list[float]]] = [([], [])] * NUM_DEPTHS

    def observe(self, chances: np.ndarray, depths: np.ndarray, accepted: np.ndarray) -> None:
        """Nodes whose parents were accepted: (K,) the drafter's chance of each, depth from 1, and whether it was."""
        if not len(chances):
            return
        place = np.minimum(depths, NUM_DEPTHS) - 1
        bins = np.searchsorted(EDGES, chances)
        touched = np.unique(place)
        self._sums[touched] = self._prior + FORGET ** len(chances) * (self._sums[touched] - self._prior)
        for kind, values in enumerate((np.ones_like(chances), chances, accepted)):
            np.add.at(self._sums, (place, np.full_like(place, kind), bins), values)
        self._lines = [None] * NUM_DEPTHS

    def __call__(self, chances: np.ndarray, depth: int) -> np.ndarray:
        """The chance at which such nodes of this depth were accepted, of any shape."""
        found: np.ndarray = np.interp(chances, *self.line(min(depth, NUM_DEPTHS) - 1))
        return found

    def one(self, chance: float, depth: int) -> float:
        """The same for one node, faster."""
        place = min(depth, NUM_DEPTHS) - 1
        self.line(place)
        at, rates = self._lists[place]
        right = bisect.bisect_left(at, chance)
        if right == 0 or right == len(at):
            return rates[min(right, len(at) - 1)]
        low, high = at[right - 1], at[right]
        share = (chance - low) / (high - low) if high > low else 1.0
        return rates[right - 1] + share * (rates[right] - rates[right - 1])

    def line(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Of depth ``place + 1``, (bins,) each: the mean chance, and the rate at which the nodes were accepted."""
        known = self._lines[place]
        if known is not None:
            return known
        seen, chances, hits = self._sums[place]
        if place:
            hits = hits - self._prior[2] + PRIOR * self.line(place - 1)[1]
        rates = np.array(pooled((hits / seen).tolist(), seen.tolist()))
        self._lists[place] = (chances / seen).tolist(), rates.tolist()
        line = self._lines[place] = chances / seen, rates
        return line


class _Line:
    """Seconds of drafting by depth: what was measured beforehand, corrected by every draft since (least squares)."""

    def __init__(self, start: float, slope: float) -> None:
        self._prior = start, slope
        self._sums = [0.0] * 5  # of 1, depth, seconds, depth ** 2, depth * seconds
        self.start, self.slope = start, slope

    def observe(self, depth: float, seconds: float) -> None:
        """One draft; a single slow one says little."""
        seconds = min(seconds, 3 * self(depth))
        fresh = (1.0, float(depth), seconds, float(depth * depth), depth * seconds)
        self._sums = [KEEP * old + new for old, new in zip(self._sums, fresh, strict=True)]
        count, x, y, xx, xy = self._sums
        for at in (1.0, 8.0):  # what was measured counts as a few drafts
            value = self._prior[0] + self._prior[1] * at
            count, x, y = count + TRUST, x + TRUST * at, y + TRUST * value
            xx, xy = xx + TRUST * at * at, xy + TRUST * at * value
        slope = (count * xy - x * y) / (count * xx - x * x)
        self.slope = max(slope, 0.2 * self._prior[1])
        self.start = (y - self.slope * x) / count
        if self.start < 0:  # then through the origin
            self.start, self.slope = 0.0, max(xy / xx, 0.2 * self._prior[1])

    def __call__(self, depth: float) -> float:
        """Seconds."""
        return self.start + self.slope * depth if depth else 0.0


class _Tilt:
    """How much more a node takes than was measured beforehand, in plain steps: the slope of what steps took beyond it.

    Caches that drafts have emptied, or a machine whose arithmetic is shared while its memory is not, show in it.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, nodes, excess, nodes ** 2, nodes * excess
        self.slope = 0.0

    def observe(self, nodes: int, excess: float) -> None:
        """One step: by how many plain steps its verification took longer than expected."""
        fresh = (1.0, float(nodes), excess, float(nodes * nodes), nodes * excess)
        self._sums = [KEEP * old + new for old, new in zip(self._sums, fresh, strict=True)]
        count, x, y, xx, xy = self._sums
        self.slope = (xy - x * y / count) / (xx - x * x / count + SPREAD)


@dataclass
class _Arm:
    """One budget, and what it brought: decayed sums, in seconds of the cost model.

    Weighed against plain decoding of the same rows at the same time, so that it holds when rows come and go, and the
    machine's speed too.
    """

    budget: Budget
    plain: float = 0.0  # that plain decoding would have taken for as many tokens
    verify: float = 0.0
    draft: float = 0.0
    tokens: float = 0.0  # of a row,
    count: float = 0.0  # in so many steps
    steps: int = 0
    rest: int = EVERY  # steps until it is tried again
    due: int = 0

    def speedup(self, slow: float, alone: float) -> float:
        """Over plain decoding, where verification is so much slower than measured, and that of plain steps again."""
        return slow * alone * self.plain / (slow * self.verify + self.draft) if self.steps else 1.0

    @property
    def tau(self) -> float:
        return self.tokens / self.count if self.count else 1.0

    def add(self, plain: float, verify: float, draft: float, tokens: float) -> None:
        self.tokens, self.count = KEEP * self.tokens + tokens, KEEP * self.count + 1
        self.plain, self.verify = KEEP * self.plain + plain, KEEP * self.verify + verify
        self.draft = KEEP * self.draft + draft
        self.steps += 1


@dataclass
class Planner:
    """Chooses the budget of every step; one for all requests of a model, since what it learns holds for the next.

    It is the ``Plan`` that a growing tree asks.

    Args:
        costs: of this target and drafter, measured.
        arms: budgets to choose among.
        reads: whether a tree may be shaped by the chances of its own nodes.
        at_once: trees grow in one call, a wider level takes little more than a narrow one, and a tree with nothing
            worth a second branch is a chain: then there is nothing to choose among.
    """

    costs: Costs
    arms: Sequence[Budget]
    reads: bool = True
    at_once: bool = False
    acceptance: Acceptance = field(default_factory=Acceptance)  # of chains, by the margin of their best two scores
    tree_acceptance: Acceptance = field(default_factory=Acceptance)  # by the chances that the drafter gives

    @classmethod
    def of(cls, costs: Costs, rule: Rule, *, free: bool, on_cpu: bool, at_once: bool = False) -> Planner:
        """With the usual arms.

        Args:
            free: a draft costs no pass of a net (lookup).
            on_cpu: elsewhere a step must not wait for the chances of its own nodes.
            at_once: the drafter grows whole trees in one call.
        """
        grows = not rule.chain_only and costs.width > 1
        if free:
            return cls(costs, (Budget(4), Budget(8), Budget(16)), reads=False)
        if on_cpu and rule.children in ("keyed", "top"):
            if grows and at_once:
                return cls(costs, (Budget(14, BRANCHES, 63),), at_once=True)
            chain = (Budget(14),)
            return cls(costs, (*chain, Budget(10, costs.width, 63)) if grows else chain)
        chains = tuple(map(Budget, (1, 2, 3, 5, 8)))
        return cls(costs, (*chains, Budget(5, 8, 16), Budget(8, 10, 60)) if grows else chains, reads=False)

    def __post_init__(self) -> None:
        self._arms = [_Arm(replace(budget, plan=self if self.reads else None)) for budget in self.arms]
        self._rows, self._context = 1, 0.0
        self._all = _Arm(Budget(0))  # what every step brought, whichever way
        self._slow = 1.0  # how much slower than measured a verification is now,
        self._alone = 1.0  # and how much slower than that in a run of plain steps
        self._run = 0  # plain steps up to now
        self._tilt = _Tilt()
        self._own = 0.0  # seconds that the planner takes after a step, in the mean
        self._settled = [0, 0]  # steps that told of the one, and of the other
        self._check, self._checking = CHECK, 0
        # Steps not yet learnt from: parents (B, N), path (B, D), chances (B, N), and whether these are no margins.
        self._unlearnt: list[tuple[Tensor, Tensor, np.ndarray | None, bool]] = []
        self._rules: dict[tuple[int, int, int], GrowthRule] = {}
        self._budgets: dict[tuple[int, str], Budget] = {}
        self._curves: dict[int, np.ndarray] = {}
        self._lines = {False: _line_of(self.costs, 1), True: _line_of(self.costs, self.costs.width)}  # by: is a tree
        self._continues = np.full(NUM_DEPTHS, 0.7)  # how often a node's best child was accepted
        self._asked = [0] * NUM_DEPTHS  # how often that was seen
        self._chosen: _Arm | None = None
        self._reform = 0  # the step from which an arm may be judged anew
        self._steps = self._plain = 0
        self._patience, self._probing = PROBE, 0
        self._raw: np.ndarray | None = None
        self._levels = 0.0
        self._by_margin = False  # whether a chain was told of by margins
        low, high = self.costs.draft_seconds(1), self.costs.draft_seconds(8)
        wide = self.costs.draft_seconds(8, self.costs.width) - self.costs.draft_seconds(1, self.costs.width)
        more = (wide / max(high - low, 1e-7) - 1) / max(self.costs.width - 1, 1)
        self._wider = min(max(more, 0.02), 1.0)  # what each other node of a level takes, as a share of the first

    def _speedup(self, arm: _Arm) -> float:
        """Over plain decoding."""
        return arm.speedup(self._slow, self._alone)

    def _hope(self, arm: _Arm) -> float:
        """Speedup with the benefit of the doubt (an upper confidence bound): a few unlucky steps prove little."""
        return self._speedup(arm) * (1 + DOUBT / math.sqrt(max(arm.steps, 1)))

    # --- a step ----------------------------------------------------------------------------------------------------

    def budget(self, ctx: Context, children: str) -> Budget:
        """For the next step."""
        known = self._budgets.get((id(None), children))
        if known is not None and self._rests and 0 < self._plain < self._patience - 1 and ctx.num_rows == self._rows:
            self._steps, self._plain = self._steps + 1, self._plain + 1
            return known
        self._rows, self._context = ctx.num_rows, sum(ctx.lengths) / max(ctx.num_rows, 1)
        self._steps += 1
        self._raw, self._levels, self._by_margin = None, 0.0, False
        arm = self._chosen = self._choose()
        key = (id(arm), children)
        if key not in self._budgets:
            self._budgets[key] = Budget(0, children=children) if arm is None else replace(arm.budget, children=children)
        return self._budgets[key]

    @property
    def _rests(self) -> bool:
        """Whether nothing is decided nor learnt now: in a long run of plain steps all but one in ``RESTING``."""
        return self._chosen is None and self._run >= SETTLED and self._run % RESTING > 0

    def _choose(self) -> _Arm | None:
        if not self._arms or self._steps <= PLAIN:
            return None
        if self._chosen is None and 0 < self._plain < self._patience - 1:  # nothing is learnt from plain steps
            self._plain += 1
            return None
        if self._chosen is not None and self._chosen.steps % AGAIN and self._chosen.steps < FIRST:
            return self._chosen
        if self._must_check():
            return None
        open_arms = [arm for arm in self._arms if self._may_win(arm)]
        fresh = min(open_arms, key=lambda arm: arm.steps)
        if fresh.steps < (FIRST if fresh.budget.width == 1 or self.at_once else max(FIRST // 2, 1)):
            return fresh
        best = max(open_arms, key=self._hope)
        if self._probing:
            self._probing -= 1
            return best
        if self._hope(best) < GAIN:
            self._plain += 1
            if self._plain < self._patience:
                return None
            self._plain, self._patience, self._probing = 0, min(2 * self._patience, PATIENCE), AGAIN - 1
            if self._forecast() > max(1.05, 1.1 * self._speedup(best)) and self._steps >= self._reform:
                # What it brought was brought by chains of another length than it would draft now.
                self._reform = self._steps + 2 * (self._steps + FIRST)  # ever rarer, should that prove wrong
                best.plain = best.verify = best.draft = best.tokens = best.count = 0.0
                best.steps = 0
            return best
        self._plain, self._patience = 0, PROBE
        return self._another(best)

    def _must_check(self) -> bool:
        """Whether to step plainly for once: what that takes decides, and the first steps of all told little of it."""
        if self._checking:
            self._checking -= 1
            return True
        if not PLAIN or self._steps < self._check:
            return False
        if self._check == CHECK:
            self._settled[1] = 0
        self._check = 2 * self._steps
        if self._speedup(self._all) >= CLOSE:
            return False
        self._checking = PLAIN - 1
        return True

    def _forecast(self) -> float:
        """The speedup of the best fixed chain by what has been learnt of the depths, by the costs of now."""
        if not self.reads or not (self.at_once or any(arm.budget.width == 1 for arm in self._arms)):
            return 0.0
        tau, path, best = 1.0, 1.0, 0.0
        for depth in range(1, 17):
            path *= self._continues[min(depth, NUM_DEPTHS) - 1]
            tau += path
            takes = self._verify(depth + 1) + self._lines[False](depth) * self._share + self._own
            takes += max(self._tilt.slope, 0.0) * self._verify(1) * depth
            best = max(best, tau * self._verify(1) * self._alone / takes)
        return best

    def _may_win(self, arm: _Arm) -> bool:
        """Whether a tree may beat the best chain, by its costs: a trial is dear where its levels are."""
        chains = [each for each in self._arms if each.budget.width == 1 and each.steps >= FIRST]
        if arm.budget.width == 1 or not self.reads:
            return True
        if not chains:
            return len(self._arms) == 1 or all(each.budget.width > 1 for each in self._arms)
        chain = max(chain.tau for chain in chains)
        wide = 1 + WIDER * (chain - 1)
        chain_takes = self._verify(round(chain) + 1) + self._lines[False](round(chain)) * self._share
        wide_takes = self._verify(round(NODES * wide)) + self._lines[True](round(wide)) * self._share
        return wide / wide_takes > chain / chain_takes

    def _another(self, best: _Arm) -> _Arm:
        """The best arm, or one whose turn to be tried again has come."""
        best.rest = EVERY
        for arm in self._arms:
            if arm is best or not self._may_win(arm):
                continue
            if self._steps >= arm.due + AGAIN:  # it was tried and lost: less often from now on
                if arm.due:
                    arm.rest = min(2 * arm.rest, SELDOM)
                arm.due = self._steps + arm.rest
            if self._steps >= arm.due:
                return arm
        return best

    def observe(
        self, tree: DraftTree, accepted: Accepted, num_tokens: int, drafted_s: float, verified_s: float
    ) -> None:
        """What became of a step, and its seconds: of drafting, and of all that followed."""
        if self._rests and tree.num_nodes == 1:
            self._run += 1
            return
        if self.at_once and self._settled[0] > KNOWN and self._steps % 2 and tree.num_nodes > 1:
            self._run = 0
            return  # as much is known from every other step, and steps may be short
        began = time.perf_counter()
        rows, nodes, arm = tree.num_rows, tree.num_nodes, self._chosen
        depth = max(tree.max_depth, self._levels)
        line, share = self._lines[self._is_wide], self.costs.draft_share(rows)
        if depth:
            line.observe(depth, drafted_s / share)
        verify = self._verify(nodes) / self._slow
        ratio = min(max(verified_s / verify, 0.25), 4.0)
        self._run = self._run + 1 if nodes == 1 else 0
        if nodes > 1:
            self._tilt.observe(
                nodes, (min(ratio, HICCUP * self._slow) - self._slow) * verify * self._slow / self._verify(1)
            )
            self._settled[0] += 1
            self._slow += max(0.05, 1 / (self._settled[0] + 1)) * (ratio - self._slow)
        elif self._run > SETTLED:
            self._slow += 0.3 * (ratio / self._alone - self._slow)
        elif self._run > 1:  # the first plain step after drafts is not yet like those of plain decoding
            self._settled[1] += 1
            self._alone += max(0.1, 1 / self._settled[1]) * (ratio / self._slow - self._alone)
        plain = num_tokens * self._verify(1) / self._slow / rows
        # What it took by the clock, since trees and sampling take more than was measured beforehand; but a hiccup of
        # the machine says nothing of an arm.
        draft = min(drafted_s, HICCUP * line(depth) * share) if depth else 0.0
        verify = min(verified_s / self._slow, HICCUP * verify)
        self._all.add(plain, verify, draft, num_tokens / rows)
        if arm is not None:
            arm.add(plain, verify, draft + self._own, num_tokens / rows)
        if nodes > 1 and self.reads:
            is_tree = not self._by_margin and arm is not None and arm.budget.width > 1
            self._unlearnt.append((tree.parents, accepted.path, self._raw, is_tree))
            if self._steps < YOUNG or self._steps % FRESH == 0:  # several at once take less than each by itself
                self._learn()
        self._own += 0.05 * (min(time.perf_counter() - began, 1e-3) - self._own)

    def _learn(self) -> None:
        """Acceptance of the nodes whose parents were accepted, in the steps since it was learnt from last."""
        seen: dict[bool, tuple[list[float], list[int], list[bool]]] = {}  # by: chances of a tree's nodes, no margins
        for parents_BN, path_BD, raw_BN, is_tree in self._unlearnt:
            raw = None if raw_BN is None or raw_BN.shape != parents_BN.shape else raw_BN.tolist()
            said, at, right = seen.setdefault(is_tree, ([], [], []))  # lists, since there are a handful
            for row, (path, parents) in enumerate(zip(path_BD.tolist(), parents_BN.tolist(), strict=True)):
                kept, depths = set(path), [0] * len(parents)
                for node in range(1, len(parents)):
                    above = parents[node]
                    if above < 0 or above not in kept:
                        continue
                    depth = depths[node] = depths[above] + 1
                    hit = node in kept
                    if parents[node - 1] != above:  # siblings stand in order: the best of them
                        place = min(depth, NUM_DEPTHS) - 1
                        self._asked[place] += 1
                        weight = max(0.03, 1 / (self._asked[place] + 3))
                        self._continues[place] += weight * (hit - self._continues[place])
                    if raw is not None:
                        said.append(raw[row][node])
                        at.append(depth)
                        right.append(hit)
        self._unlearnt = []
        for is_tree, (said, at, right) in seen.items():
            acceptance = self.tree_acceptance if is_tree else self.acceptance
            acceptance.observe(np.array(said), np.array(at), np.array(right))

    # --- what a growing tree asks ----------------------------------------------------------------------------------

    def chance(self, raw: float, depth: int) -> float:
        """See ``Plan``."""
        self._by_margin = True
        return self.acceptance.one(raw, depth)

    def chances(self, raw: Tensor, depth: int) -> Tensor:
        """See ``Plan``."""
        found = self.tree_acceptance(raw.exp().numpy(), depth)
        return torch.from_numpy(np.log(found.clip(1e-9))).to(raw.dtype)

    def another_level(self, reached: float, level: int, width: int) -> bool:
        """See ``Plan``."""
        gain = reached * self._continues[min(level, NUM_DEPTHS - 1)] * self._token_seconds
        step = self._level_seconds(width)
        more = self._verify(level + 2) - self._verify(level + 1)  # of one node each, in a chain at least
        worth = bool(gain > step + more)
        self._levels = level + worth
        return worth

    def growth_rule(self, depth: int, width: int, most: int) -> GrowthRule | None:
        """See ``Plan``."""
        if width > 1 and not self.at_once:
            return None
        key = (depth, most, self._rows)
        if self._steps < YOUNG or self._steps % FRESH == 0 or key not in self._rules:
            self._rules = {key: self._growth_rule(depth, most)}
        return self._rules[key]

    def _growth_rule(self, depth: int, most: int) -> GrowthRule:
        told = np.array([self.tree_acceptance.line(place) for place in range(NUM_DEPTHS)], dtype=np.float32)
        continues = self._continues[np.minimum(np.arange(1, depth + 1), NUM_DEPTHS - 1)]
        return GrowthRule(
            np.ascontiguousarray(told[:, 0]),  # (tables, 2, K)
            np.ascontiguousarray(told[:, 1]),
            (continues * self._token_seconds).astype(np.float32),
            np.full(depth, self._level_seconds(1), dtype=np.float32),
            self._weighed(most + 3).astype(np.float32),
            self._token_seconds,
            self._wider,
        )

    def num_nodes(self, chances: Sequence[float]) -> int:
        """See ``Plan``."""
        worth = self._token_seconds
        most = None if self._chosen is None else self._chosen.budget.nodes
        self._levels = max(self._levels, 1)
        gains = np.cumsum([0.0, *chances[:most]]) * worth
        return int((gains - self._weighed(len(gains) + 1)[1:]).argmax())

    def drafted(self, raw: np.ndarray, effort: float) -> None:
        """See ``Plan``."""
        self._raw, self._levels = raw, max(self._levels, effort)

    # --- seconds ---------------------------------------------------------------------------------------------------

    @property
    def _token_seconds(self) -> float:
        """What a token takes at present: no more than in plain decoding."""
        return self._verify(1) * self._alone / self._rows / max(self._speedup(self._all), 1.0)

    def _level_seconds(self, width: int) -> float:
        """Another level of drafting, for the present rows."""
        return self._lines[width > 1 and not self.at_once].slope * self._share

    @property
    def _is_wide(self) -> bool:
        """Whether what drafting takes is counted by levels of a tree: where trees grow at once, by those of a chain."""
        return not self.at_once and self._chosen is not None and self._chosen.budget.width > 1

    @property
    def _share(self) -> float:
        return self.costs.draft_share(self._rows)

    def _verify(self, nodes: int) -> float:
        """T_V of the present rows."""
        return max(float(self._curve[min(nodes, MOST)]) + self._beyond, 1e-7) * self._slow

    def _weighed(self, count: int) -> np.ndarray:
        """T_V of the present rows for 0 to ``count - 1`` nodes, but for what all have in common."""
        curve = self._curve[:count]
        if len(curve) < count:
            curve = np.pad(curve, (0, count - len(curve)), mode="edge")
        tilted = curve * self._slow + self._tilt.slope * self._verify(1) * np.arange(count)
        return np.maximum.accumulate(tilted)

    @property
    def _curve(self) -> np.ndarray:
        """T_V of the present rows by nodes, at the context of the costs."""
        known = self._curves.get(self._rows)
        if known is None:
            rows, context = self._rows, self.costs.context / self._rows
            found = [self.costs.verify_seconds(max(nodes, 1), rows, context) for nodes in range(MOST + 1)]
            known = self._curves[rows] = np.array(found)
        return known

    @property
    def _beyond(self) -> float:
        """What longer texts add."""
        return (self._context * self._rows - self.costs.context) * self.costs.per_token


def _line_of(costs: Costs, width: int) -> _Line:
    low, high = costs.draft_seconds(1, width), costs.draft_seconds(8, width)
    slope = max((high - low) / 7, 1e-7)
    return _Line(max(low - slope, 0.0), slope)
