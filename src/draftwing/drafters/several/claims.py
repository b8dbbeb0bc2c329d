"""What came true of several drafters' claims, learnt of each by itself, and when the next one is worth asking.

One for all decode loops of a model: what is learnt in one text holds for the next.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from draftwing.budget.acceptance import Acceptance
from draftwing.drafters.growing.worth import Rates
from draftwing.drafters.several.merge import Offer, Proposal, Union, follow
from draftwing.model.target import Row
from draftwing.run.request import GrowthRule

__all__ = ["Asking", "Claims", "Step"]

FEW, MANY = 1, 64  # claims of a drafter that are learnt at once: few at first
KNOWN, RARE = 128, 4  # after so many steps one of so many is learnt from
EXPECTED = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # tokens that others promise, told apart
FIRST = 6  # times that a drafter is asked, whatever others promise, before that is judged
DOUBT = 1.0  # tokens, over the times that it was asked: what the scatter of a few answers does not tell
CARRIED = 10  # answers in other texts that count in one that begins
HICCUP = 1.5  # times what asking takes: more is the machine's, not the drafter's
LATEST = 0.03  # what the latest answer counts, once there were many
SOON, LOOK = 4, 64  # refusals, at first and at most, after which one is asked all the same, to learn how it is by now


class _Table:
    """How often claims came true, by the chance that was told and by depth."""

    def __init__(self) -> None:
        self._acceptance, self._seen = Acceptance(), 0
        self._waiting: list[tuple[float, int, bool]] = []
        self.lines = self._acceptance.tables()
        self.rates = Rates(*self.lines)

    def observe(self, told: float, depth: int, right: bool) -> None:
        """One claim whose parent was right; depth from 1."""
        self._waiting.append((told, depth, right))

    def settle(self) -> bool:
        """Learn what waits, where that is enough beside what is known; whether anything changed."""
        if len(self._waiting) < min(FEW + self._seen // 4, MANY):
            return False
        told, depths, right = zip(*self._waiting, strict=True)
        self._seen += len(told)
        self._waiting = []
        self._acceptance.observe(told, depths, right)
        self.lines = self._acceptance.tables()
        self.rates = Rates(*self.lines)
        return True


class Claims:
    """Calibrates what several drafters tell.

    A drafter's claim is first judged by what came true of that drafter's claims. Where others spoke too, claims for one
    token are taken together as if each could be wrong by itself; that is judged again by what came true where just
    these drafters proposed the token and just those spoke.

    Attributes:
        asking: of each drafter, whether it is worth asking.
        version: grows whenever something was learnt.
    """

    def __init__(self, num_drafters: int) -> None:
        self._own = [_Table() for _ in range(num_drafters)]
        self._shared: dict[tuple[int, int], _Table] = {}
        self.asking = [Asking() for _ in range(num_drafters)]
        self._lock = threading.Lock()
        self.version = self._steps = 0

    @cached_property
    def sampled(self) -> Claims:
        """Those of requests that draw their tokens, learnt by themselves: these are those of greedy ones.

        A chance is told otherwise under noise, from the margins of perturbed scores, and a text repeats itself less.
        """
        return Claims(len(self._own))

    def is_due(self) -> bool:
        """Whether to learn from a step: as much is known from some of them later on, and steps may be short."""
        self._steps += 1
        return self._steps <= KNOWN or self._steps % RARE == 0

    def rule_of(self, drafter: int, rule: GrowthRule) -> GrowthRule:
        """A rule with what was learnt of one drafter's own claims."""
        knots, rates = self._own[drafter].lines
        return replace(rule, knots=knots, rates=rates)

    def reached(self, drafter: int, proposal: Proposal) -> list[float]:
        """The chance of every node's path, by one drafter's claims alone."""
        rates, reached, depths = self._own[drafter].rates, [1.0], [0]
        for node in range(1, len(proposal.tokens)):
            above = proposal.parents[node]
            depths.append(depths[above] + 1)
            reached.append(reached[above] * rates(proposal.told[node], depths[above]))
        return reached

    def chance(self, union: Union, node: int) -> float:
        """Of a node given its parent, by all who spoke there."""
        told = self._joint(union, node)
        table = self._shared.get(_who(union, node))
        return told if table is None else table.rates(told, union.depths[node] - 1)

    def _joint(self, union: Union, node: int) -> float:
        """That not all claims for it are wrong."""
        level, wrong = union.depths[node] - 1, 1.0
        for drafter, told in union.claims[node].items():
            wrong *= 1 - self._own[drafter].rates(told, level)
        return 1 - wrong

    def learn(self, given: Sequence[Proposal], union: Union | None, emitted: Sequence[int]) -> None:
        """What became of one row's proposals.

        Args:
            given: by drafter; a lone root where one proposed nothing.
            union: of them, where there are several.
            emitted: tokens after the root that are certain by now.
        """
        with self._lock:
            for table, proposal in zip(self._own, given, strict=True):
                _learn_own(table, proposal, emitted)
            if union is not None:
                self._learn_shared(union, emitted)
            for table in (*self._own, *self._shared.values()):
                self.version += table.settle()

    def _learn_shared(self, union: Union, emitted: Sequence[int]) -> None:
        place = {node: depth for depth, node in enumerate(follow(_as_proposal(union), emitted))}
        for node in range(1, len(union.tokens)):
            depth = place.get(union.parents[node])
            if depth is None or depth >= len(emitted):
                continue
            who = _who(union, node)
            if who[1] & (who[1] - 1):  # more than one spoke
                table = self._shared.setdefault(who, _Table())
                table.observe(self._joint(union, node), depth + 1, union.tokens[node] == emitted[depth])


@dataclass
class Step:
    """What was proposed in a step, until its tokens are known.

    Attributes:
        rows, starts: the rows, and their lengths then.
        offers: by drafter.
        unions: of each row, None where one drafter alone proposed something.
        expected: of the drafters that were asked at a price, by row the tokens that those before them promised.
        names: of the drafters: what nobody wanted of one tells nothing of it.
    """

    rows: Sequence[Row]
    starts: Sequence[int]
    offers: Sequence[Offer]
    unions: Sequence[Union | None]
    expected: Mapping[int, Sequence[float]]
    names: Sequence[str] = ()

    def teach(self, claims: Claims, *, whole: bool) -> None:
        """What became of it, by the tokens that are in the rows by now; ``whole``: of every claim, too."""
        if not whole and not self.expected:
            return
        for number, (row, start) in enumerate(zip(self.rows, self.starts, strict=True)):
            emitted = row.tokens[start + 1 :]
            if not emitted:  # a step that never counted
                continue
            if whole:
                claims.learn([each.rows[number] for each in self.offers], self.unions[number], emitted)
            for place, expected in self.expected.items():
                if row.drafts is not None and not row.takes(self.names[place]):
                    continue
                tokens, nodes = self._brought(place, number, emitted, row.length - start - 1)
                claims.asking[place].brought(expected[number], tokens, nodes)

    def _brought(self, place: int, number: int, emitted: Sequence[int], kept: int) -> tuple[int, int]:
        """Tokens that a drafter added in a row to those of the drafters before it, and nodes that it proposed there.

        Args:
            kept: tokens of the row that were drafted by whomever.
        """
        offer = self.offers[place]
        if not offer.is_heard:
            return 0, 0
        heard = [each for each in self.offers if each.is_heard]
        if len(heard) == 1 and len(self.rows) == 1:
            return kept, offer.num_nodes - 1
        depths = [
            min(len(follow(each.rows[number], emitted)) - 1, kept) if each.is_heard else 0
            for each in self.offers[: place + 1]
        ]
        return max(depths[place] - max(depths[:place], default=0), 0), len(offer.rows[number].tokens) - 1


def _learn_own(table: _Table, proposal: Proposal, emitted: Sequence[int]) -> None:
    place = {node: depth for depth, node in enumerate(follow(proposal, emitted))}
    for node in range(1, len(proposal.tokens)):
        depth = place.get(proposal.parents[node])
        if depth is not None and depth < len(emitted):
            table.observe(proposal.told[node], depth + 1, proposal.tokens[node] == emitted[depth])


def _who(union: Union, node: int) -> tuple[int, int]:
    """Who proposed a node, and who spoke of its parent's children at all."""
    return union.makers(node), union.speakers[union.parents[node]]


def _as_proposal(union: Union) -> Proposal:
    return Proposal(union.tokens, union.parents, union.chances)


class Asking:
    """Whether a drafter whose drafts cost passes is worth asking, by what it brought beside what others promised.

    Everything is learnt: the tokens that it added, what it takes by number of rows, the nodes that it made more of.
    What it takes is kept in forwards of the target, since one that is asked rarely would else be judged by how slow the
    machine was long ago.
    """

    def __init__(self) -> None:
        bins = len(EXPECTED) + 1
        self._added, self._squares, self._seen = [0.0] * bins, [0.0] * bins, [0] * bins
        self._refused, self._patience = [0] * bins, [SOON] * bins
        self._takes: dict[int, tuple[int, float]] = {}  # by rows: times, forwards
        self._nodes = 0.0

    def is_worth_it(self, expected: Sequence[float], nodes: int, rule: GrowthRule) -> bool:
        """For the next step.

        Args:
            expected: of each row, tokens that others promise.
            nodes: of each row that would be verified without it, the root not counted.
            rule: what tokens and nodes are worth.
        """
        places = [_bin(each) for each in expected]
        times, forwards = self._takes.get(len(places), (0, 0.0))
        if not times or any(self._seen[place] < FIRST for place in places):
            return True
        last = len(rule.verify) - 1
        here, there = min(nodes + 1, last), min(nodes + 1 + round(self._nodes), last)
        takes = forwards * float(rule.verify[1]) + float(rule.verify[there] - rule.verify[here])
        # With the benefit of the doubt: a few steps in which it added little prove little.
        added = sum([self._added[place] + self._doubt(place) for place in places])
        if added * rule.worth > takes:
            for place in places:
                self._refused[place], self._patience[place] = 0, SOON
            return True
        for place in places:
            self._refused[place] += 1
        first = places[0]
        if self._refused[first] < self._patience[first]:
            return False
        self._refused[first], self._patience[first] = 0, min(2 * self._patience[first], LOOK)
        return True

    def _doubt(self, place: int) -> float:
        """Tokens that it may add beyond the mean that was seen (empirical Bernstein): few where all answers agree."""
        scatter = max(self._squares[place] - self._added[place] ** 2, 0.0)
        return math.sqrt(scatter / self._seen[place]) + DOUBT / self._seen[place]

    def begin_text(self) -> None:
        """Another text begins, which may be of another kind: believe what is found in it, and look soon."""
        self._seen = [min(seen, CARRIED) for seen in self._seen]
        self._refused, self._patience = [0] * len(self._seen), [SOON] * len(self._seen)

    def took(self, rows: int, seconds: float, rule: GrowthRule) -> None:
        """What asking it took."""
        forwards = seconds / float(rule.verify[1])
        times, known = self._takes.get(rows, (0, forwards))
        if times < FIRST:  # the first drafts of all are slow ones
            known = min(known, forwards)
        else:  # a hiccup of the machine says little
            known += 0.1 * (min(forwards, HICCUP * known) - known)
        self._takes[rows] = times + 1, known

    def brought(self, expected: float, tokens: int, nodes: int) -> None:
        """In one row: tokens and nodes beyond what others had proposed, where these promised so many tokens."""
        place = _bin(expected)
        self._seen[place] += 1
        latest = max(LATEST, 1 / self._seen[place])
        self._added[place] += latest * (tokens - self._added[place])
        self._squares[place] += latest * (tokens * tokens - self._squares[place])
        self._nodes += LATEST * (nodes - self._nodes)


def _bin(expected: float) -> int:
    return bisect_right(EXPECTED, expected) if expected > 0 else 0
