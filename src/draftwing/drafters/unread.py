"""Features of kept tokens that a net has not read yet, for as long as nothing is drafted.

A run of plain steps only puts them down, all rows' at once. Where rows come or go they are sorted by row, once: with
many short texts at a time somebody comes or goes every few steps, and what the others wait with is not copied again.

Shape suffixes: B rows, W entries, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from draftwing.alone import clear, joined, put

__all__ = ["Unread"]


class Unread:
    """Each row's entries since the last draft, in order."""

    def __init__(self) -> None:
        self._sorted: list[list[Tensor]] = []  # of each row (W, F), before all steps
        # Step by step (B, at least a row's entries, F), with the rows' lengths before.
        self._steps: list[tuple[Tensor, list[int]]] = []

    def add(self, features: Tensor, lengths: list[int]) -> None:
        """A step's features (B, W, F), of rows that had ``lengths`` before; past a row's own end anything."""
        self._steps.append((features, lengths))

    def clear(self) -> None:
        """All of it has been read."""
        self._steps = []
        if any(self._sorted):
            self._sorted = [[] for _ in self._sorted]

    def admit(self, first: Tensor, lengths: Sequence[int]) -> None:
        """A row came, behind those of ``lengths``, and ``first`` (1, W, F) is to be read of it; W may be 0."""
        self._sort(lengths)
        self._sorted.append([first[0]])

    def remove(self, row: int, lengths: Sequence[int]) -> None:
        """A row left, and the last of ``lengths`` takes its place."""
        self._sort(lengths)
        self._sorted[row] = self._sorted[-1]
        self._sorted.pop()

    def joined(self, lengths: Sequence[int]) -> Tensor:
        """(B, W, F) of rows that have ``lengths`` now, W at least the most entries of a row."""
        if not any(self._sorted):
            if len(self._steps) == 1:
                return self._steps[0][0]
            counts = list(self._counts(lengths))
            pieces = [piece for piece, _ in self._steps]
            if all(min(each) == max(each) for each in counts):
                return joined([piece[:, : each[0]] for piece, each in zip(pieces, counts, strict=True)], 1)
        self._sort(lengths)
        rows = [joined(each, 0) for each in self._sorted]
        most = max(1, *(len(own) for own in rows))
        if len(rows) == 1 and len(rows[0]) == most:
            return rows[0][None]
        padded = rows[0].new_empty((len(rows), most, rows[0].shape[1]))
        for into, own in zip(padded, rows, strict=True):
            put(into[: len(own)], own)
            clear(into[len(own) :])
        return padded

    def _sort(self, lengths: Sequence[int]) -> None:
        """Put each row's entries of the steps behind those that it has."""
        if not self._steps:
            return
        counts = list(self._counts(lengths))
        for row, own in enumerate(self._sorted):
            pieces = zip(self._steps, counts, strict=True)
            own.append(joined([piece[row, : each[row]] for (piece, _), each in pieces], 0))
        self._steps = []

    def _counts(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Of each step, how many entries of it each row kept."""
        starts = [start for _, start in self._steps]
        for before, after in zip(starts, [*starts[1:], lengths], strict=True):
            yield [end - start for start, end in zip(before, after, strict=True)]
