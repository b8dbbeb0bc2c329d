"""The target drafts for itself with some of its layers: Draft & Verify (2309.08168), early exit (LayerSkip 2404.16710).

The drafting passes read the target's own keys and values of every committed token, and write those of the drafted
nodes into the slots of the tree, which the target's forward then writes again. So there is no state to keep: nothing
is prefilled, nothing is committed, and weights and slots are the target's. Where the first layers alone draft a chain,
the target's forward goes on from the stream that they left (``model.subnet.Begun``).

Draft & Verify stops a draft below a confidence that it adapts to the share of drafts accepted. Here the growth rule
does that (``drafters.growing.worth``): by each depth's own table of how often drafts of such a confidence came true.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.drafters.base import Budget, Traits
from draftwing.drafters.growing.asked import Asked
from draftwing.inference import inference
from draftwing.model.lean import LeanContext, LeanTarget
from draftwing.model.subnet import Begun, SubNet, runner_over
from draftwing.model.target import NO_FEATURES, Context, TargetOutput, own_context
from draftwing.nets.calibration import Calibration
from draftwing.run.forward import Runner
from draftwing.run.request import Waiting
from draftwing.sampling import SamplingBatch
from draftwing.tree import Accepted, DraftTree

__all__ = ["SubLayersDrafter"]

CALIBRATION = Calibration()


class SubLayersDrafter:
    """Drafts with ``net``, a sub-net of ``target``.

    Args:
        name: for reports.
    """

    features = NO_FEATURES

    def __init__(self, net: SubNet, target: LeanTarget, name: str) -> None:
        self.name, self._net, self._target = f"{name} ({net.parts})", net, target
        self.traits = Traits(
            grows_by_rule=True,
            identity=f"{name} {net.parts!r}",
            num_bytes=net.num_bytes,
            runs_as=target.runs_as,
        )
        self._runner: Runner | None = None
        self._rest: Runner | None = None  # of the layers behind an early exit

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """Nothing to do: what it reads is the target's."""

    def remove(self, ctx: Context, row: int) -> None:
        """Nothing to drop."""

    @inference
    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Grow a tree in the shape of ``budget`` (see ``growth``) from the pending tokens."""
        if budget.depth == 0:
            return ctx.roots()
        own = own_context(ctx, LeanContext)
        own.begun = None
        runner, lengths = self._over(own), own.lengths
        asked = Asked(ctx, [True] * ctx.num_rows, sampling, budget, CALIBRATION, wants_places=True)
        found = runner.draft(Waiting([[root] for root in asked.roots], lengths, lengths), asked)
        if found.states is not None and self._rest is not None:
            own.begun = Begun(runner, self._rest, found.tree, found.states, tuple(lengths))
        if self._net.dtype == torch.float16:
            # Without some layers the stream may overflow where the target's own does not, and a NaN that stays in a
            # slot reaches every row that looks there, masked or not.
            data = own.cache.data[..., min(lengths) if own.cache.table is None else 0 :, :]
            data.copy_(data.nan_to_num(nan=0.0))
        return found.tree

    def _over(self, ctx: LeanContext) -> Runner:
        """What runs the net over the slots of this context."""
        if self._runner is None or self._runner.cache is not ctx.cache:
            self._runner, rest = runner_over(self._net, self._target, ctx), self._net.rest
            self._rest = None if rest is None else runner_over(rest, self._target, ctx)
        return self._runner

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Nothing to learn."""
