"""Several drafters as one: what they are like together, and what each of them is told.

Shape suffixes: B rows, T tokens, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from draftwing.drafters.base import Drafter, Traits
from draftwing.drafters.merge import Proposal, own_path
from draftwing.errors import DraftwingError
from draftwing.model.target import Context, FeatureSpec, TargetOutput
from draftwing.tree import Accepted, DraftTree

__all__ = ["Parts"]


class Parts:
    """Drafters over the same rows: all of a ``Drafter`` but ``propose``.

    Args:
        parts: those that cost no passes of a net come first, whatever their order.
    """

    def __init__(self, parts: Sequence[Drafter]) -> None:
        self.parts = sorted(parts, key=lambda part: part.traits.costs_forwards)
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
        )
        # Of the parts whose trees were not taken as they were, what they proposed in this step, row by row.
        self.made: list[Sequence[Proposal] | None] = [None] * len(self.parts)
        self.scorer: int | None = None  # the part whose further nodes were scored (``DraftTree.num_scored``)

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

    def remove(self, ctx: Context, row: int) -> None:
        """See ``Drafter.remove``."""
        for part in self.parts:
            part.remove(ctx, row)

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Each learns what became of the whole tree, and which of its own nodes were kept."""
        offer = tree.offer
        for place, (part, made) in enumerate(zip(self.parts, self.made, strict=True)):
            own = accepted if made is None else replace(accepted, own=own_path(made, tree, accepted))
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
        by_tap = features.unflatten(-1, (len(self.features.taps), -1))
        return by_tap[..., [self.features.taps.index(tap) for tap in taps], :].flatten(-2)
