"""The target drafts for itself through some of its own slots (MagicDec 2408.11049).

With long texts most of a step's time goes into reading keys and values. A draft that looks at a few hundred slots costs
a plain step of a short text, and a forward that verifies several tokens reads the slots once for all of them. No slots
are copied: the draft's own land where the verification writes anew.
"""

from __future__ import annotations

from torch import Tensor

from draftwing.drafters.base import Budget, Traits
from draftwing.drafters.growing.asked import Asked
from draftwing.drafters.views import Slots
from draftwing.errors import UnsupportedError
from draftwing.inference import inference
from draftwing.model.target import NO_FEATURES, Context, Target, TargetOutput
from draftwing.nets.calibration import Calibration
from draftwing.sampling import SamplingBatch
from draftwing.tree import Accepted, DraftTree

__all__ = ["SelfDrafter", "check_views"]

CALIBRATION = Calibration()


def check_views(target: Target) -> None:
    """Raise UnsupportedError where a target cannot draft for itself."""
    if not target.supports_views:
        raise UnsupportedError(
            f"{target.name} runs in transformers and cannot draft for itself, which takes the lean decoder: load it "
            f"with engine='lean' if that knows its family, or choose draft='lookup'"
        )


class SelfDrafter:
    """Drafts with the target through ``slots``, which keeps a state for each row.

    Raises:
        UnsupportedError: the target is not run by the lean decoder.
    """

    features = NO_FEATURES

    def __init__(self, target: Target, slots: Slots) -> None:
        check_views(target)
        self._target, self._slots = target, slots
        self.name = slots.name
        self.traits = Traits(
            grows_by_rule=True,
            identity=slots.settings,
            num_bytes=target.num_weight_bytes,
            runs_as=target.runs_as,
            context=slots.budget,
        )

    @inference
    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """A choice for the new row."""
        self._slots.admit(self._target)

    @inference
    def remove(self, ctx: Context, row: int) -> None:
        """Drop the row's choice; the last row takes its place."""
        self._slots.remove(row)

    @inference
    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Grow a tree in the shape of ``budget`` (see ``growth``), as deep as every row's context lets it."""
        rooms = [self._target.max_length - row.length - 2 for row in ctx.rows]
        room = min((room for room in rooms if room > 0), default=0)
        if min(room, budget.depth) <= 0:
            return ctx.roots()
        asked = Asked(ctx, [room > 0 for room in rooms], sampling, budget, CALIBRATION).within(room)
        return self._target.draft(ctx, self._slots.view(self._target, ctx), asked).tree

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Nothing to keep: the slots are the target's."""
