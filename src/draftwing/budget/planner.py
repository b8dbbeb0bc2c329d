"""How much to speculate, decided step by step from measured costs and observed acceptance.

Everything is weighed in seconds. A token is worth what one takes at present; a node is worth that times its chance of
being accepted; a level of drafting costs what the clock says. What follows is data: a ``GrowthRule`` that a tree grows
by, or, where the shape must be blind to q or the host must not wait, a shape made of former steps alone. Where
drafting brings less than it costs, nothing is drafted but for a short probe now and then.

With the keyed match rule no decision can change the text. With rules that draw children from q, decisions look at
former steps alone: nothing that a decision gates is drawn before it.

SpecDec++ (2405.19715), Sequoia (2402.12374) and BanditSpec (2505.15141) decide parts of this.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
from torch import Tensor

from draftwing.accept import Rule
from draftwing.budget.acceptance import Acceptance, Ranks, judged
from draftwing.budget.clock import HICCUP, JUMP, Clock
from draftwing.budget.costs import ROWS, Costs
from draftwing.budget.gate import KNOWN, Gate
from draftwing.drafters.base import Budget, Traits
from draftwing.model.target import Context, Row
from draftwing.run.request import GrowthRule
from draftwing.tree import Accepted, DraftTree

__all__ = ["Planner"]

LOOPS = 8  # decode loops that may take turns without each of their steps looking like another text's
# When to learn.
YOUNG = 32  # after the first so many steps what was seen is learnt from every `Gate.fresh` steps
TOGETHER = 4  # steps that are judged at a time where much is known: the first after a forward takes as long as many
SHARE, RAREST = 0.015, 4  # of the time, that learning takes if it can: at least one of so many steps is looked at
FIRSTS = 5  # drafts after plain steps that tell what these take
LOOK = 64  # steps of blind shapes, of which one is larger: what is never drafted is never learnt
# How much at most.
DEPTH, BRANCHES, NODES = 14, 4, 63
COPIES, ALTERNATIVES = 16, 3  # depth and width of drafts that cost next to nothing
GPU_CHAINS = tuple(map(Budget, (1, 2, 3, 5, 8)))  # shapes to choose among where each is recorded for itself
GPU_TREES = (Budget(5, 8, 16), Budget(8, 10, 60))

_Kept = tuple[Tensor, Tensor, Tensor | None]  # parents (B, N), accepted path (B, D), told (B, N)


class _Seen(NamedTuple):
    """A step that was looked at; what its trees were, and became, is read as it is judged.

    Attributes:
        num_tokens: emitted, of all rows.
        seconds: of drafting, and of all that followed.
        decided_s: what deciding on it took.
        was_plain: whether the one before was a plain one.
        every: steps of which it is one.
    """

    tree: DraftTree
    accepted: Accepted
    num_tokens: int
    seconds: tuple[float, float]
    decided_s: float
    was_plain: bool
    every: int


class Planner:
    """Chooses the budget of every step; one for all requests of a model, since what it learns holds for the next.

    Any number of threads may use one: a lock guards what is learnt, and a step's own data come with its tree.

    Args:
        costs: of this target and drafter, measured.
        most: the largest budget.
        sighted: whether a tree may be shaped by what is said of its own nodes.
        shapes: where not, budgets to choose among; none: any chain or tree up to ``most``.
        stays_dear: see ``Gate``.
        on_stale: called once, when steps persistently take something else than was measured.

    Attributes:
        listens: whether ``observe`` has anything to learn from the step that ``budget`` was asked for last.
    """

    def __init__(
        self,
        costs: Costs,
        most: Budget,
        *,
        sighted: bool = True,
        shapes: tuple[Budget, ...] = (),
        stays_dear: bool = False,
        on_stale: Callable[[], None] | None = None,
    ) -> None:
        self.clock, self.acceptance, self.ranks = Clock(costs), Acceptance(), Ranks()
        self.most, self.sighted, self.shapes = most, sighted, shapes
        self._new_gate = partial(Gate, forecast=self._forecast, trusts_forecast=not sighted, stays_dear=stays_dear)
        self.gate = self._new_gate(self.clock)
        self._lock, self._on_stale = threading.Lock(), on_stale
        self.listens = True
        self._whole = most.nodes or most.depth
        self._rows, self._size, self._most_nodes = 1, (0, self._whole), self._whole
        self._asked: tuple[int, int | None] | None = None  # rows and limit of the latest step, as far as it is known
        self._sizes: dict[tuple[int, int], tuple[Clock, Gate]] = {}  # what steps take, and whether drafts pay in them
        self._texts: deque[Row] = deque(maxlen=LOOPS)  # the latest ones that were decoded alone; loops may take turns
        self._firsts: deque[float] = deque(maxlen=FIRSTS)  # plain steps that the latest drafts after plain steps took
        self._look_s = 0.0  # seconds that a look at a step takes,
        self._own = 0.0  # seconds that deciding and learning take in a step, in the mean
        self._decided_s, self._unseen = 0.0, 0  # that deciding took in the latest step; steps not looked at before it
        self._seen: list[_Seen] = []  # steps that are still to be judged,
        self._unlearnt: list[_Kept] = []  # and to be learnt from
        self._nothing: dict[str, Budget] = {}
        self._num_learnt = 0  # times that something was learnt
        self._budget: tuple[tuple[int, str, int, int], Budget] | None = None  # and what it was made by

    @classmethod
    def of(
        cls, costs: Costs, rule: Rule, traits: Traits, *, on_cpu: bool, on_stale: Callable[[], None] | None = None
    ) -> Planner:
        """The planner that suits a rule and a drafter; ``on_cpu``: elsewhere a step must not wait for its own nodes."""
        if not traits.costs_forwards:
            sighted = rule.children in ("keyed", "top")
            most = Budget(COPIES, ALTERNATIVES, NODES) if sighted else Budget(COPIES)
            return cls(costs, most, sighted=sighted, stays_dear=traits.scores, on_stale=on_stale)
        is_tree = not rule.chain_only and costs.width > 1
        most = Budget(DEPTH, BRANCHES, NODES) if is_tree else Budget(DEPTH)
        if rule.children in ("keyed", "top"):
            shapes = () if on_cpu else (*GPU_CHAINS, *(GPU_TREES if is_tree else ()))
            return cls(costs, most, sighted=on_cpu, shapes=shapes, on_stale=on_stale)
        return cls(costs, most, sighted=False, on_stale=on_stale)

    # --- a step ----------------------------------------------------------------------------------------------------

    def budget(self, ctx: Context, children: str, most_nodes: int | None = None) -> Budget:
        """For the next step; ``most_nodes``: of each row's tree, from 1 on, where that is limited."""
        with self._lock:
            self.clock.begin()
            known = self._as_before(ctx, children, most_nodes)
            if known is not None:
                return known
            began = time.perf_counter()
            budget, gate = self._decided(ctx, children, most_nodes), self.gate
            self.listens = not gate.is_open or gate.looks(gate.steps)
            self._decided_s = time.perf_counter() - began
            self._unseen += not self.listens
            return budget

    def _as_before(self, ctx: Context, children: str, most_nodes: int | None) -> Budget | None:
        """Where the next step is like the one before and is not looked at: that should take next to nothing."""
        rows, nothing, known = len(ctx.rows), self._nothing.get(children), self._budget
        if (rows, most_nodes) != self._asked or (rows == 1 and ctx.rows[0] is not self._texts[-1]):
            return None
        self.listens = bool(nothing) and self.gate.measures()
        if nothing and (self.listens or self.gate.sleeps()):
            self._decided_s = 0.0
            return nothing
        if known is not None and known[0] == self._made_by(rows, children) and self.gate.coasts():
            self.listens, self._decided_s = self.gate.looks(self.gate.steps), 0.0
            self._unseen += not self.listens
            return known[1]
        return None

    def _decided(self, ctx: Context, children: str, most_nodes: int | None) -> Budget:
        rows, nothing = len(ctx.rows), self._nothing.get(children)
        self._most_nodes = self._capped(most_nodes)
        self._turn_to(rows)
        self._asked = rows, most_nodes
        gate, self.gate.rows = self.gate, rows
        was_open = gate.is_open
        if rows == 1 and not any(ctx.rows[0] is each for each in self._texts):
            self._texts.append(ctx.rows[0])
            self._judge()  # at the length of the text before
            gate.begin_text()
        self._rows, self.clock.context = rows, sum([row.length for row in ctx.rows]) / max(rows, 1)
        if not gate.decide():
            return nothing or self._nothing.setdefault(children, Budget(0, children=children))
        if not self.sighted and gate.steps >= YOUNG and gate.steps % LOOK == 0:
            return replace(self._blind(looks=True), children=children)
        key, known = self._made_by(rows, children), self._budget
        if known is None or known[0] != key or not was_open:
            budget = replace(self._largest(), rule=self.rule(rows)) if self.sighted else self._blind()
            known = self._budget = key, replace(budget, children=children)
        return known[1]

    def _made_by(self, rows: int, children: str) -> tuple[int, str, int, int]:
        """What a budget follows from."""
        return rows, children, self._num_learnt, self._most_nodes

    def passes_over(self, num_tokens: int, temperature: float) -> bool:
        """Whether a text of at most so many tokens, about to be decoded alone, is decoded plainly as a whole.

        Its drafter then need not read its prompt or its features, and nobody asks for a budget.
        """
        with self._lock:
            return self._gate_of_one().passes_over(num_tokens, temperature)

    def passed_over(self, num_steps: int) -> None:
        """Such a text took so many steps."""
        with self._lock:
            self._gate_of_one().rest(num_steps)

    def _gate_of_one(self) -> Gate:
        """That of a text that is decoded alone, with trees of any size."""
        self._most_nodes = self._whole
        self._turn_to(1)
        self._judge()
        return self.gate

    def observe(
        self, tree: DraftTree, accepted: Accepted, num_tokens: int, drafted_s: float, verified_s: float
    ) -> None:
        """What became of a step, and its seconds: of drafting, and of all that followed."""
        with self._lock:
            if not self.listens:
                return
            rows, nodes = tree.tokens.shape
            self._turn_to(rows)
            gate, clock = self.gate, self.clock
            if nodes == 1 and not tree.effort and gate.rests:
                clock.run += 1
                return
            is_known, was_plain = nodes > 1 and clock.num_drafts > KNOWN, clock.run > 0
            if nodes > 1:
                clock.run = 0
            decided_s, every = min(self._decided_s, drafted_s), 1 + self._unseen
            took = drafted_s - decided_s, verified_s
            self._unseen = 0
            self._seen.append(_Seen(tree, accepted, num_tokens, took, decided_s, was_plain, every))
            waits = gate.goes_on_plainly if nodes == 1 else is_known and not was_plain and len(self._seen) < TOGETHER
            if not waits:
                self._judge()
            self.clock.end()

    def _judge(self) -> None:
        """What was seen of steps since it was judged last.

        After a forward hardly any of this code is in the processor's caches: the first step takes as long as many.
        """
        if not self._seen:
            return
        began, seen, gate = time.perf_counter(), self._seen, self.gate
        self._seen = []
        for each in seen:
            self._judge_step(each)
        # Here too several at once take less than each by itself.
        if self._unlearnt and (gate.steps < YOUNG or len(self._unlearnt) >= gate.fresh):
            self._learn()
        if self._on_stale is not None and self.clock.is_stale and len(seen[-1].tree.tokens) <= ROWS:
            self._on_stale()
            self._on_stale = None
        steps, decided_s = sum(each.every for each in seen), sum(each.decided_s for each in seen)
        spent = min(time.perf_counter() - began + decided_s, 1e-3)
        self._own += min(0.05 * steps, 1.0) * (spent / steps - self._own)
        self._look_s += 0.2 * (spent / len(seen) - self._look_s)
        gate.every = min(1 + int(self._look_s / (SHARE * self.clock.plain_step(self._rows))), RAREST)

    def _judge_step(self, seen: _Seen) -> None:
        gate, clock, tree = self.gate, self.clock, seen.tree
        rows, nodes = tree.tokens.shape
        levels = float(tree.max_depth) if tree.effort is None else tree.effort
        drafts, is_wide = nodes > 1 or levels > 0, not self.sighted and nodes > 1 and not tree.is_line
        seconds = seen.seconds if drafts else (0.0, sum(seen.seconds))
        took, found = clock.observe(rows, nodes, levels, is_wide, *seconds)
        for account in (gate.all, gate.drafts):
            account.correct(found)
        chances = tree.confidence if self.sighted else None
        tokens, expected = seen.num_tokens / rows, None if chances is None else sum(map(sum, chances.tolist())) / rows
        gate.all.add(tokens, took, expected)
        if drafts:
            took += self._usual / clock.plain_step(rows)
            brought = gate.drafts.add(tokens, took, expected)
            whole = min((sum(seen.seconds) + clock.rest) / clock.plain_step(rows), JUMP * took)
            gate.lose((self._gone(whole, took, is_first=seen.was_plain) - brought) * seen.every)
        if nodes > 1:
            self._unlearnt.append((tree.parents, seen.accepted.path, tree.told))

    def _gone(self, whole: float, took: float, *, is_first: bool) -> float:
        """Plain steps that a draft took, whatever it tells of those to come, without what is the machine's doing.

        The first one after plain steps may take several times as long as others: that much is gone with each of them.
        """
        if not is_first:
            return min(whole, HICCUP * took)
        usual = statistics.median(self._firsts) if self._firsts else whole
        self._firsts.append(whole)
        return min(whole, HICCUP * usual)

    def _capped(self, most_nodes: int | None) -> int:
        """Nodes of a tree at most."""
        return self._whole if most_nodes is None else min(most_nodes, self._whole)

    def _turn_to(self, rows: int) -> None:
        """Go on with what was learnt of batches of such a size, of 2 ** (bits - 1) + 1 to 2 ** bits rows, and limit.

        Each has its own clock and gate: drafts that pay for one row may not for many, nor small ones as large ones, and
        what many take is not measured beforehand, but follows from what few took.
        """
        if (size := ((rows - 1).bit_length(), self._most_nodes)) == self._size:
            return
        self._judge()
        self._asked = None
        self._sizes[self._size] = self.clock, self.gate
        if size not in self._sizes:
            clock = Clock(self.clock.costs)
            self._sizes[size] = clock, self._new_gate(clock)
        self._size, (self.clock, self.gate) = size, self._sizes[size]

    def _learn(self) -> None:
        """Acceptance of the nodes whose parents were accepted, in the steps since it was learnt from last."""
        said = judged(self._unlearnt, self.ranks)
        self._unlearnt = []
        self._num_learnt += 1
        self.acceptance.observe(*said)

    # --- what to draft ---------------------------------------------------------------------------------------------

    def rule(self, rows: int) -> GrowthRule:
        """What nodes are worth at present, for so many rows."""
        depth, nodes = self.most.depth, self.most.nodes or self.most.depth
        knots, rates = self.acceptance.tables()
        worth = self._token_seconds(rows)
        continues = [self.ranks.rate(level + 1) for level in range(1, depth + 1)]
        return GrowthRule(
            knots,
            rates,
            (worth * np.array(continues)).astype(np.float32),
            self.clock.levels(depth, rows).astype(np.float32),
            self.clock.verify_upto(nodes + 3, rows).astype(np.float32),
            worth,
            self.clock.share,
        )

    def _largest(self) -> Budget:
        """The largest budget within the limit."""
        most, nodes = self.most, self._most_nodes
        if nodes >= (most.nodes or most.depth):
            return most
        width = min(most.width, nodes)
        return replace(most, depth=min(most.depth, nodes), width=width, nodes=None if width == 1 else nodes)

    def _blind(self, *, looks: bool = False) -> Budget:
        """The shape of the greatest speedup by what was accepted in former steps; ``looks``: a larger one."""
        most = self._most_nodes
        shapes = [each for each in self.shapes if (each.nodes or each.depth) <= most]
        if shapes:
            return shapes[-1] if looks else max(shapes, key=self._expected)
        paths, is_wide = [], False
        tau, deepest, best, greatest = 1.0, 0, 1, 0.0
        for path, chance in islice(self.ranks.likeliest(self.most.depth, self.most.width), most):
            paths.append(path)
            tau, deepest, is_wide = tau + chance, max(deepest, len(path)), is_wide or any(path)
            speed = tau / self._takes(len(paths), deepest, is_wide)
            if speed > greatest:
                greatest, best = speed, len(paths)
        if looks:
            best = min(len(paths), 2 * best + 2)
        paths = paths[:best]
        if any(any(path) for path in paths):
            return Budget(paths=tuple(paths))
        return Budget(len(paths))

    def _expected(self, shape: Budget) -> float:
        """Tokens in a second of a chain or dynamic tree, a tree's nodes being the likeliest by rank."""
        nodes = shape.nodes or shape.depth
        chances = islice(self.ranks.likeliest(shape.depth, shape.width), nodes)
        return (1 + sum(chance for _, chance in chances)) / self._takes(nodes, shape.depth, shape.width > 1)

    def _takes(self, nodes: int, levels: int, is_wide: bool) -> float:
        """Seconds of a step with so many drafted nodes."""
        drafting = self.clock.draft(levels, self._rows, is_wide=is_wide and not self.sighted)
        return self.clock.verify_tilted(nodes + 1, self._rows) + drafting + self.clock.rest + self._usual

    @property
    def _usual(self) -> float:
        """Seconds of a step for deciding and learning, once no more steps are looked at than must be."""
        return min(self._own, self._look_s / self.gate.every)

    def _forecast(self) -> float:
        """The speedup of the best fixed chain by what has been learnt of the depths, by the costs of now."""
        tau, path, best = 1.0, 1.0, 0.0
        for depth in range(1, min(self._most_nodes, 16) + 1):
            path *= self.ranks.rate(depth)
            tau += path
            best = max(best, tau / self._takes(depth, depth, is_wide=False))
        return best * self.clock.plain_step(self._rows)

    def _token_seconds(self, rows: int) -> float:
        """What a token takes at present: no more than in plain decoding."""
        return self.clock.plain_step(rows) / rows / max(self.gate.all.speedup, 1.0)
