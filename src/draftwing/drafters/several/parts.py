"""Several drafters as one: what they are like together, what each of them is told, and one for each row.

Shape suffixes: B rows, T tokens, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from torch import Tensor

from draftwing.drafters.base import Budget, Drafter, Listing, Resuming, Traits
from draftwing.drafters.several.merge import Offer, Proposal, by_row, kept_tokens, own_path, proposals
from draftwing.errors import DraftwingError
from draftwing.model.target import Context, FeatureSpec, Row, TargetOutput
from draftwing.sampling import SamplingBatch
from draftwing.tree import Accepted, DraftTree

__all__ = ["Parts", "levels_of", "nothing"]

SURE = 0.75  # what a drafter must tell of its next token to be taken alone: for lookup, a match of three tokens


class Parts:
    """Drafters over the same rows: all of a ``Drafter`` but ``propose``.

    Args:
        parts: those that cost no passes of a net come first, whatever their order.
        names: by which a request chooses among them; None: their own.
    """

    def __init__(self, parts: Sequence[Drafter], names: Sequence[str] | None = None) -> None:
        pairs = zip(parts, names or [part.name for part in parts], strict=True)
        ordered = sorted(pairs, key=lambda pair: pair[0].traits.costs_forwards)
        self.parts, self.names = [part for part, _ in ordered], tuple(name for _, name in ordered)
        self.name = " + ".join(part.name for part in self.parts)
        self.features = FeatureSpec(tuple(dict.fromkeys(tap for part in self.parts for tap in part.features.taps)))
        traits = [part.traits for part in self.parts]
        self.traits = Traits(
            drafts=any(each.drafts for each in traits),
            reads_features=any(each.reads_features for each in traits),
            costs_forwards=any(each.costs_forwards for each in traits),
            grows_by_rule=True,  # every part by what came true of its own claims
            identity=" + ".join(f"{part.name} {part.traits.identity}".strip() for part in self.parts),
            num_bytes=sum(each.num_bytes for each in traits),
            runs_as=", ".join(dict.fromkeys(each.runs_as for each in traits if each.runs_as)),
            parts=self.names,
            resumes=all(each.resumes or not (each.reads_features or each.costs_forwards) for each in traits),
            forget=self._forget if any(each.forget for each in traits) else None,
        )
        self._resuming = [part for part in self.parts if part.traits.resumes]
        # Of the parts whose trees were not taken as they were, what they proposed in this step, row by row; None too of
        # those that do not hear of it (``Listing``).
        self.made: list[Offer | None] = [None] * len(self.parts)
        # The part that wants further nodes scored (``DraftTree.num_scored``), and these.
        self.scorer: int | None = None
        self.scored: tuple[Tensor, Tensor, int] | None = None

    def _forget(self) -> None:
        """See ``Traits.forget``: what each of them has kept."""
        for part in self.parts:
            if part.traits.forget is not None:
                part.traits.forget()

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """A new row, to all of them or to none."""
        done: list[Drafter] = []
        try:
            for part in self.parts:
                part.admit(ctx, self._of(part, features))
                done.append(part)
        except DraftwingError:
            for part in done:
                part.remove(ctx, ctx.num_rows - 1)
            raise

    @property
    def num_read(self) -> list[int]:
        """See ``Resuming``: what all of them have read."""
        return [min(each) for each in zip(*(cast(Resuming, part).num_read for part in self._resuming), strict=True)]

    def read_on(self, ctx: Context, row: Row, features: Tensor | None, stop: int) -> None:
        """See ``Resuming``."""
        for part in self._resuming:
            cast(Resuming, part).read_on(ctx, row, self._of(part, features), stop)

    def remove(self, ctx: Context, row: int) -> None:
        """See ``Drafter.remove``."""
        for part in self.parts:
            part.remove(ctx, row)

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Each learns what became of the whole tree, and which of its own nodes were kept."""
        offer = tree.offer

        def own_of(made: Offer) -> Tensor:
            return own_path(made.rows, kept_tokens(offer, accepted), accepted.path)

        for place, (part, made) in enumerate(zip(self.parts, self.made, strict=True)):
            own = accepted if made is None else replace(accepted, own=partial(own_of, made))
            features = self._of(part, output.features)
            seen = output if features is output.features else replace(output, features=features)
            part.observe(ctx, tree if place == self.scorer else offer, own, seen)

    def _of(self, part: Drafter, features: Tensor | None) -> Tensor | None:
        """Of all hidden states (B, T, F) those that a part reads."""
        taps = part.features.taps
        if features is None or taps == self.features.taps:
            return features
        if not taps:
            return None
        count = len(self.features.taps)
        by_tap = features.reshape(*features.shape[:2], count, features.shape[2] // count)
        return by_tap[..., [self.features.taps.index(tap) for tap in taps], :].flatten(-2)

    def asked(self, place: int, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """What a part proposes, for the rows that take it; what the first part wants scored beside is put aside."""
        refused = self.refused(place, ctx)
        part = self.parts[place]
        tree = part.propose(ctx, sampling, nothing(budget) if len(refused) == ctx.num_rows else budget)
        if tree.num_scored and self.scorer is None:
            self.scorer, self.scored = place, tree.scored
        tree = tree.proposals
        return tree.without([(row, node) for row in refused for node in range(1, tree.num_nodes)]) if refused else tree

    def listed(self, place: int, ctx: Context, budget: Budget) -> list[Proposal]:
        """The same of a ``Listing`` part."""
        refused, part = self.refused(place, ctx), cast(Listing, self.parts[place])
        found = part.grown(ctx, budget) if len(refused) < ctx.num_rows else ()
        rows = [Proposal(each.tokens, each.parents, each.told) for each in found]
        if not refused:
            return rows
        roots = [Proposal(row.tokens[-1:], [-1], [1.0]) for row in ctx.rows]
        return [roots[number] if number in refused else rows[number] for number in range(ctx.num_rows)]

    def refused(self, place: int, ctx: Context) -> list[int]:
        """Rows whose requests have not chosen a part."""
        return [number for number, row in enumerate(ctx.rows) if not row.takes(self.names[place])]

    def first_that_is_sure(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Each row's tree from one drafter, chosen by the row's own text before anything is drawn."""
        nobody, effort = len(self.parts), 0.0
        chosen, trees = [nobody] * ctx.num_rows, list[DraftTree]()
        takes = [[place for place in range(nobody) if row.takes(self.names[place])] or [0] for row in ctx.rows]
        for place, part in enumerate(self.parts):
            costs = part.traits.costs_forwards
            free = [row for row, other in enumerate(chosen) if other == nobody and place in takes[row]]
            tree = self.asked(place, ctx, sampling, budget if free else nothing(budget))
            trees.append(tree)
            if costs and free:
                effort += levels_of(tree)
            found = proposals(tree) if free and not costs else []
            for row in free:
                if costs or place == takes[row][-1] or _is_sure(found[row]):
                    chosen[row] = place
        for place, tree in enumerate(trees):
            if any(other != place for other in chosen):
                self.made[place] = Offer(tree)
        return replace(by_row(trees, chosen), effort=effort)


def nothing(budget: Budget) -> Budget:
    """For a part that is not asked."""
    return Budget(0, children=budget.children)


def levels_of(tree: DraftTree) -> float:
    """Levels of drafting that a tree took."""
    return float(tree.max_depth) if tree.effort is None else tree.effort


def _is_sure(proposal: Proposal) -> bool:
    return len(proposal.told) > 1 and proposal.told[1] >= SURE
