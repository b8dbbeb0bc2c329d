"""Drafters whose draft is one request to the runner of a network, so that the target may verify it in the same call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeGuard

from torch import Tensor

from draftwing.methods.base import Budget, Drafter
from draftwing.models.context import Context
from draftwing.runtime.forward import Runner
from draftwing.runtime.tree_builder import Drafted, DraftRequest, VerifyRequest
from draftwing.sampling import SamplingBatch
from draftwing.torch_utils import clear, inference, joined, put
from draftwing.tree import DraftTree


class NetDrafter(Drafter):
    """Splits ``propose`` into a request, the draft, and what the drafter does with the result."""

    _runner: Runner

    def request(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftRequest | None:
        """The trees to draft; None to draft nothing. Changes no state that a repeated step would miss."""
        raise NotImplementedError

    def draft(self, request: DraftRequest, verify: VerifyRequest | None = None) -> Drafted:
        """Grow the trees, and verify them in the same call if the runner can."""
        return self._runner.draft(request, verify)

    def receive(self, ctx: Context, drafted: Drafted) -> DraftTree:
        """Take the result of ``draft``; returns the trees to propose."""
        return drafted.tree

    @inference
    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Trees in the shape of ``budget`` (see ``runtime.tree_builder``)."""
        request = self.request(ctx, sampling, budget)
        return ctx.roots() if request is None else self.receive(ctx, self.draft(request))

    @property
    def is_one_request(self) -> bool:
        """False if a subclass overrides ``propose``."""
        return type(self).propose is NetDrafter.propose


def drafts_at_once(drafter: object) -> TypeGuard[NetDrafter]:
    """True if a draft is one request, whose trees are proposed unchanged."""
    return isinstance(drafter, NetDrafter) and drafter.is_one_request


class PendingFeatures:
    """Features of kept tokens that a network has not read yet: each row's entries since the last draft, in order.

    Steps without a draft only append their features. When rows join or leave, the entries are sorted by row once, so
    that the pending features of the other rows are not copied each time.

    Shape suffixes: B rows, W entries, F features.
    """

    def __init__(self) -> None:
        self._sorted: list[list[Tensor]] = []  # for each row (W, F) pieces, before those of all steps
        # For each step (B, at least a row's entries, F), and the rows' lengths before it.
        self._steps: list[tuple[Tensor, list[int]]] = []

    def add(self, features: Tensor, lengths: list[int]) -> None:
        """Add a step's features (B, W, F) of rows that had ``lengths`` before; values past a row's end are ignored."""
        self._steps.append((features, lengths))

    def clear(self) -> None:
        """Drop everything after it has been read."""
        self._steps = []
        if any(self._sorted):
            self._sorted = [[] for _ in self._sorted]

    def admit(self, first: Tensor, lengths: Sequence[int]) -> None:
        """Add a row after those of ``lengths``, with entries ``first`` (1, W, F); W may be 0."""
        self._sort(lengths)
        self._sorted.append([first[0]])

    def remove(self, row: int, lengths: Sequence[int]) -> None:
        """Drop a row; the last of ``lengths`` takes its place."""
        self._sort(lengths)
        self._sorted[row] = self._sorted[-1]
        self._sorted.pop()

    def joined(self, lengths: Sequence[int]) -> Tensor:
        """(B, W, F) of rows that have ``lengths`` now; W is at least the largest number of entries of a row."""
        if not any(self._sorted):
            if len(self._steps) == 1:
                return self._steps[0][0]
            counts = list(self._counts(lengths))
            pieces = [piece for piece, _ in self._steps]
            if all(min(step) == max(step) for step in counts):
                return joined([piece[:, : step[0]] for piece, step in zip(pieces, counts, strict=True)], 1)
        self._sort(lengths)
        rows = [joined(pieces, 0) for pieces in self._sorted]
        longest = max(1, *(len(row) for row in rows))
        if len(rows) == 1 and len(rows[0]) == longest:
            return rows[0][None]
        padded = rows[0].new_empty((len(rows), longest, rows[0].shape[1]))
        for into, row in zip(padded, rows, strict=True):
            put(into[: len(row)], row)
            clear(into[len(row) :])
        return padded

    def _sort(self, lengths: Sequence[int]) -> None:
        """Append each row's entries of the steps to its own."""
        if not self._steps:
            return
        counts = list(self._counts(lengths))
        for row, pieces in enumerate(self._sorted):
            steps = zip(self._steps, counts, strict=True)
            pieces.append(joined([piece[row, : step[row]] for (piece, _), step in steps], 0))
        self._steps = []

    def _counts(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        starts = [start for _, start in self._steps]
        for before, after in zip(starts, [*starts[1:], lengths], strict=True):
            yield [end - start for start, end in zip(before, after, strict=True)]
