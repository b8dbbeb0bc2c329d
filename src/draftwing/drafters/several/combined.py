"""Several drafters at once: their trees merged (SpecInfer, 2305.09781), or the first that is sure (SAM-Decoding).

Drafters that cost nothing are asked first. One whose drafts take passes of a net is asked where it is worth its time
beside what the others have proposed, and what it proposes joins theirs: a node's chance is what came true of such
claims (``drafters.several.claims``), and the nodes that are worth their verification are kept.

Under the classic rules a node's children must come from one q. There each row takes a drafter that costs nothing where
that one is sure of its next token, which the text so far decides alone, and else the first of the others (2411.10666).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from draftwing.drafters.base import Budget, Drafter
from draftwing.drafters.growing.worth import num_worth, worth_keeping
from draftwing.drafters.several.claims import Claims, Step
from draftwing.drafters.several.merge import Offer, Union, alone, together, unite
from draftwing.drafters.several.parts import Parts, levels_of, nothing
from draftwing.model.target import Context, Row
from draftwing.sampling import SamplingBatch
from draftwing.tree import DraftTree

__all__ = ["CombinedDrafter"]

COPIES = 16  # depth of what costs nothing to draft


class CombinedDrafter(Parts):
    """Drafts with all of its ``parts``.

    Args:
        parts: drafters.
        claims: what was learnt of them, in the order of ``Parts.parts``; shared by all decode loops of a model.
        names: see ``Parts``.
    """

    def __init__(self, parts: Sequence[Drafter], claims: Claims, names: Sequence[str] | None = None) -> None:
        super().__init__(parts, names)
        self._claims = self._now = claims  # of greedy requests, with those of others; of the rows as they are
        self._step: Step | None = None
        self._text: Row | None = None  # that was drafted alone last
        self._budgets: dict[int, tuple[Budget, Claims, int, Budget]] = {}

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """The best of all that they propose, within the budget."""
        self.scorer = self.scored = None
        tree = self._proposed(ctx, sampling, budget)
        return tree if self.scored is None else tree.beside(*self.scored)

    def _proposed(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        step, self._step = self._step, None
        if step is not None:
            step.teach(self._now, whole=self._now.is_due())
        if ctx.num_rows == 1 and ctx.rows[0] is not self._text:
            self._text = ctx.rows[0]
            for asking in (*self._claims.asking, *self._claims.sampled.asking):
                asking.begin_text()
        self._now = self._claims if sampling.all_greedy else self._claims.sampled
        self.made = [None] * len(self.parts)
        if budget.depth == 0:
            for part in self.parts:
                if not part.traits.lists:
                    part.propose(ctx, sampling, budget)
            return ctx.roots()
        if budget.children in ("sampled", "distinct"):
            return self.first_that_is_sure(ctx, sampling, budget)
        step, effort = self._ask(ctx, sampling, budget)
        self._step, offers, rule = step, step.offers, budget.rule
        speaking = [place for place, offer in enumerate(offers) if offer.is_heard]
        if not speaking:
            return replace(ctx.roots(), effort=effort)
        self.made = [None if part.traits.lists else offer for part, offer in zip(self.parts, offers, strict=True)]
        first = offers[speaking[0]]
        if len(speaking) == 1 and first.tree is not None:
            tree = first.tree
            if rule is not None and not self.parts[speaking[0]].traits.grows_by_rule:
                tree = worth_keeping(tree, self._now.rule_of(speaking[0], rule))
            else:
                self.made[speaking[0]] = None  # its own tree, as it stands
            return tree if tree.effort == effort else replace(tree, effort=effort)
        if len(speaking) == 1:
            assert rule is not None
            pairs = zip(first.rows, first.reached, strict=True)
            unions = [alone(each, reached, first.num_worthy) for each, reached in pairs]
            return together(unions, [range(len(union.tokens)) for union in unions], ctx.device, effort)
        unions = [unite(each) for each in zip(*[offer.rows for offer in offers], strict=True)]
        for union in unions:
            union.weigh(self._now.chance)
        step.unions = unions
        return together(unions, _kept(unions, budget), ctx.device, effort)

    def _ask(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> tuple[Step, float]:
        """What every drafter offers, what is to be learnt from it, and the levels that it took."""
        rule, rows, effort, worthy = budget.rule, ctx.num_rows, 0.0, 0
        offers, expected, promised = list[Offer](), [0.0] * rows, dict[int, list[float]]()
        for place, part in enumerate(self.parts):
            costs, lists = part.traits.costs_forwards, part.traits.lists and rule is not None
            if lists:
                offer = Offer(self.listed(place, ctx, self._budget_of(place, budget)))
            else:
                asking, began = self._now.asking[place], time.perf_counter()
                wanted = not costs or rule is None or asking.is_worth_it(expected, worthy, rule)
                wanted = wanted and any(row.takes(self.names[place]) for row in ctx.rows)
                own = self._budget_of(place, budget) if wanted else nothing(budget)
                offer = Offer(tree := self.asked(place, ctx, sampling, own))
                if costs and wanted:
                    if rule is not None:
                        asking.took(rows, time.perf_counter() - began, rule)
                    promised[place], effort = expected, effort + levels_of(tree)
            if rule is not None and offer.is_heard and (lists or place + 1 < len(self.parts)):
                offer.reached = [self._now.reached(place, each) for each in offer.rows]
                ranked = [sorted(each[1:], reverse=True) for each in offer.reached]
                offer.num_worthy = num_worth(ranked, rule, len(rule.verify) - 3)
                offer.is_heard = costs or offer.num_worthy > 0
                if offer.is_heard:
                    worthy = max(worthy, offer.num_worthy)
                    expected = [max(old, sum(new[1:])) for old, new in zip(expected, offer.reached, strict=True)]
            offers.append(offer)
        return Step(list(ctx.rows), ctx.lengths, offers, [None] * rows, promised, self.names), effort

    def _budget_of(self, place: int, budget: Budget) -> Budget:
        """A part's own: it grows by what came true of its own claims, and deep where that costs nothing."""
        if budget.rule is None:
            return budget
        known, claims = self._budgets.get(place), self._now
        if known is None or known[0] is not budget or known[1] is not claims or known[2] != claims.version:
            costs = self.parts[place].traits.costs_forwards
            depth = budget.depth if costs else max(budget.depth, COPIES)
            own = replace(budget, depth=depth, rule=claims.rule_of(place, budget.rule))
            known = self._budgets[place] = budget, claims, claims.version, own
        return known[3]


def _kept(unions: Sequence[Union], budget: Budget) -> list[list[int]]:
    """The nodes of each union that are worth their verification, or that the budget has room for."""
    rule, is_free = budget.rule, budget.rule is not None and budget.width > 1
    kept = [union.ordered() if is_free else union.within(budget) for union in unions]
    if rule is None:
        return kept
    ranked = [[union.reached[node] for node in nodes[1:]] for union, nodes in zip(unions, kept, strict=True)]
    count = 1 + num_worth(ranked, rule, len(rule.verify) - 3)
    pairs = zip(unions, kept, strict=True)
    return [[node for node in nodes[:count] if union.reached[node] > 0] for union, nodes in pairs]
