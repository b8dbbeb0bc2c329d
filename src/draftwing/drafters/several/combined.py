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
from draftwing.drafters.several.merge import Proposal, proposals, together, unite
from draftwing.drafters.several.parts import Parts, levels_of, nothing
from draftwing.model.target import Context
from draftwing.run.request import GrowthRule
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
        self._claims = claims
        self._step: Step | None = None
        self._budgets: dict[int, tuple[Budget, int, Budget]] = {}

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """The best of all that they propose, within the budget."""
        self.scorer = self.scored = None
        tree = self._proposed(ctx, sampling, budget)
        return tree if self.scored is None else tree.beside(*self.scored)

    def _proposed(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        step, self._step = self._step, None
        if step is not None:
            step.teach(self._claims, whole=self._claims.is_due())
        self.made = [None] * len(self.parts)
        if budget.depth == 0:
            for part in self.parts:
                part.propose(ctx, sampling, budget)
            return DraftTree.root(ctx.pending())
        if budget.children in ("sampled", "distinct"):
            return self.first_that_is_sure(ctx, sampling, budget)
        trees, step, effort = self._ask(ctx, sampling, budget)
        self._step, given = step, list(zip(*step.given, strict=True))
        rule, speaking = budget.rule, [place for place, tree in enumerate(trees) if tree.num_nodes > 1]
        if len(speaking) < 2:
            place = speaking[0] if speaking else 0
            tree = trees[place]
            self.made = list(given)
            if rule is not None and not self.parts[place].traits.grows_by_rule:
                tree = worth_keeping(tree, self._claims.rule_of(place, rule))
            else:
                self.made[place] = None  # its own tree, as it stands
            return replace(tree, effort=effort)
        unions = [unite(each) for each in step.given]
        for union in unions:
            union.weigh(self._claims.chance)
        step.unions = unions
        is_free = rule is not None and budget.width > 1
        kept = [union.ordered() if is_free else union.within(budget) for union in unions]
        if rule is not None:
            ranked = [[union.reached[node] for node in nodes[1:]] for union, nodes in zip(unions, kept, strict=True)]
            count = 1 + num_worth(ranked, rule, len(rule.verify) - 3)
            pairs = zip(unions, kept, strict=True)
            kept = [[node for node in nodes[:count] if union.reached[node] > 0] for union, nodes in pairs]
        self.made = list(given)
        return together(unions, kept, ctx.device, effort)

    def _ask(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> tuple[list[DraftTree], Step, float]:
        """Every drafter's trees, what is to be learnt from them, and the levels that they took."""
        rule, rows, effort, worthy = budget.rule, ctx.num_rows, 0.0, 0
        trees: list[DraftTree] = []
        given: list[list[Proposal]] = []
        expected, promised = [0.0] * rows, dict[int, list[float]]()
        for place, part in enumerate(self.parts):
            costs, asking, began = part.traits.costs_forwards, self._claims.asking[place], time.perf_counter()
            wanted = not costs or rule is None or asking.is_worth_it(expected, worthy, rule)
            wanted = wanted and any(row.takes(self.names[place]) for row in ctx.rows)
            tree = self.asked(place, ctx, sampling, self._budget_of(place, budget) if wanted else nothing(budget))
            found = proposals(tree)
            if costs and wanted:
                asking.took(rows, time.perf_counter() - began)
                promised[place], effort = expected, effort + levels_of(tree)
            if rule is not None and tree.num_nodes > 1 and place + 1 < len(self.parts):
                reached = [self._claims.reached(place, each) for each in found]
                num_worthy = max(_num_worthy(each, rule) for each in reached)
                if num_worthy or costs:
                    worthy = max(worthy, num_worthy)
                    expected = [max(old, sum(new[1:])) for old, new in zip(expected, reached, strict=True)]
                else:  # nothing that is worth being verified
                    tree = DraftTree.root(ctx.pending())
            trees.append(tree)
            given.append(found)
        step = Step(list(ctx.rows), ctx.lengths, list(zip(*given, strict=True)), [None] * rows, promised, self.names)
        return trees, step, effort

    def _budget_of(self, place: int, budget: Budget) -> Budget:
        """A part's own: it grows by what came true of its own claims, and deep where that costs nothing."""
        if budget.rule is None:
            return budget
        known, version = self._budgets.get(place), self._claims.version
        if known is None or known[0] is not budget or known[1] != version:
            costs = self.parts[place].traits.costs_forwards
            depth = budget.depth if costs else max(budget.depth, COPIES)
            own = replace(budget, depth=depth, rule=self._claims.rule_of(place, budget.rule))
            known = self._budgets[place] = budget, version, own
        return known[2]


def _num_worthy(reached: Sequence[float], rule: GrowthRule) -> int:
    """Nodes that bring more than the verification of one node takes."""
    least = float(rule.verify[2] - rule.verify[1])
    return sum(each * rule.worth > least for each in reached[1:])
