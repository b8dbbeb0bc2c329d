"""A smaller causal LM as the drafter (Leviathan et al. 2211.17192; trees as in SpecInfer 2305.09781).

It keeps its own KV slots, those of the target's rows: what the target keeps of a tree is committed here too, as far as
it was run, so that the next draft reads only what is missing.

Shape suffixes: B rows, D depth.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from draftwing.drafters.base import Budget, Traits
from draftwing.drafters.growing.asked import Asked
from draftwing.errors import TokenizerError
from draftwing.inference import inference
from draftwing.model.target import NO_FEATURES, Context, Row, TargetOutput
from draftwing.nets.calibration import Calibration
from draftwing.run.forward import Net, Runtime
from draftwing.run.request import Drafted, Waiting
from draftwing.sampling import SamplingBatch
from draftwing.tree import PAD, Accepted, DraftTree

__all__ = ["CausalLMDrafter", "DraftModel"]

CALIBRATION = Calibration()


class DraftModel(Protocol):
    """What is asked of a model that reads tokens alone: a ``LeanTarget``, say.

    Attributes:
        name: for reports.
        vocab_size: of its logits.
        max_length: tokens of a row at most.
        runs: what makes the runners of its ``net``.
        num_weight_bytes: that one pass of one token reads; ``runs_as``: what computes its matrices.
    """

    name: str
    vocab_size: int
    max_length: int

    @property
    def net(self) -> Net: ...  # noqa: D102
    @property
    def runs(self) -> Runtime: ...  # noqa: D102
    @property
    def num_weight_bytes(self) -> int: ...  # noqa: D102
    @property
    def runs_as(self) -> str: ...  # noqa: D102


class CausalLMDrafter:
    """Drafts with ``model``, which must share the target's tokenizer.

    Args:
        calibration: how its scores become chances at T > 0.

    Raises:
        TokenizerError: the vocabularies differ in size (``load`` compares the tokenizers themselves).
    """

    features = NO_FEATURES

    def __init__(self, model: DraftModel, target_vocab_size: int, calibration: Calibration = CALIBRATION) -> None:
        if model.vocab_size != target_vocab_size:
            raise TokenizerError(
                f"draft model {model.name} has a vocabulary of {model.vocab_size}, the target {target_vocab_size}: "
                f"a draft model must share the target's tokenizer; choose another, or draft='lookup'"
            )
        self.model, self._calibration = model, calibration
        self.name = f"causal-lm ({model.name})"
        size = model.num_weight_bytes
        identity = f"{self.name}, {size}"
        self.traits = Traits(
            grows_by_rule=True, hands_on=True, resumes=True, identity=identity, num_bytes=size, runs_as=model.runs_as
        )
        self._runner = model.runs.runner(model.net, self)
        self._read: list[int] = []  # tokens of each row that lie in its slots here
        self._drafted: Drafted | None = None  # the tree that is being verified

    # --- the rows --------------------------------------------------------------------------------------------------

    @inference
    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """Prefill the new row; one that this model's context cannot hold stays empty here, and is not drafted for."""
        row, fits = ctx.rows[-1], self._room(ctx.rows[-1]) > 0
        if fits or not row.resumed:
            self._prefill(row, row.length if fits else 0)
        self._read.append(row.length if fits else 0)

    @property
    def num_read(self) -> list[int]:
        """See ``Resuming``."""
        return list(self._read)

    @inference
    def read_on(self, ctx: Context, row: Row, features: Tensor | None, stop: int) -> None:
        """See ``Resuming``."""
        if self._room(row) > 0:
            self._prefill(row, stop)

    def _prefill(self, row: Row, stop: int) -> None:
        """Read the row behind the last one up to ``stop``."""
        tokens, start, prompt = row.tokens[row.resumed : stop], row.resumed, row.prompt_length
        self._runner.prefill(len(self._read), tokens, prompt_length=prompt, start=start)

    @inference
    def remove(self, ctx: Context, row: int) -> None:
        """Drop the row's slots; the last row takes its place."""
        self._runner.cache.move_row(len(self._read) - 1, row)
        self._read[row] = self._read[-1]
        self._read.pop()

    def _room(self, row: Row) -> int:
        """How deep a tree this model's context lets it draft for a row; once below 1 it stays there."""
        return self.model.max_length - row.length - 2

    # --- a step ----------------------------------------------------------------------------------------------------

    @inference
    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Grow a tree in the shape of ``budget`` (see ``growth``), as deep as this model's context lets it."""
        rooms = [self._room(row) for row in ctx.rows]
        room = min((room for room in rooms if room > 0), default=0)
        self._drafted = None
        if min(room, budget.depth) <= 0:
            return ctx.roots()
        wanted = [room > 0 for room in rooms]
        asked = Asked(ctx, wanted, sampling, budget, self._calibration, wants_places=True).within(room)
        # What the target accepted but this model has not read, the pending token included. A row without room reads
        # its pending token alone, and nothing comes of it.
        fed = [read if fits else row.length for row, read, fits in zip(ctx.rows, self._read, wanted, strict=True)]
        missing = [row.tokens[start : row.length + 1] for row, start in zip(ctx.rows, fed, strict=True)]
        self._drafted = self._runner.draft(Waiting(missing, fed, [row.length for row in ctx.rows]), asked)
        self._read = [
            row.length if fits else read for row, read, fits in zip(ctx.rows, self._read, wanted, strict=True)
        ]
        return self._drafted.tree

    @inference
    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Commit the accepted path as far as it was run here: leaves never were."""
        drafted, self._drafted = self._drafted, None
        if drafted is None:
            return
        # The deepest level was never run: its nodes have no slots, and near the end there is no room for any.
        path = drafted.slots_of(accepted.own_path)[:, : 1 + drafted.num_levels]
        if drafted.places is not None:  # even of a lone path the nodes may stand apart here
            self._runner.commit(ctx.lengths, path)
        num_kept = (path != PAD).sum(1).tolist()  # no wait: the step has handed its tokens out already
        for place, (row, num) in enumerate(zip(ctx.rows, num_kept, strict=True)):
            if self._room(row) > 0:
                self._read[place] += min(num, 1 + drafted.num_levels)
