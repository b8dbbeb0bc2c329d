"""LLMA (Yang et al. 2023, arXiv 2304.04487): copy from reference texts that are given with a request.

Answers out of retrieved documents, new versions of a file and summaries repeat spans of what they are made from. Where
the end of the text stands in a reference, what follows it there is the draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from draftwing.drafters.retrieval.array import SuffixArray, joined
from draftwing.drafters.retrieval.drafter import OwnTexts, RetrievalDrafter
from draftwing.drafters.retrieval.following import Match
from draftwing.model.target import Context, Row

__all__ = ["LlmaDrafter"]

_LONGEST = 32  # tokens of a match; what is longer says no more of what follows


class LlmaDrafter(RetrievalDrafter):
    """Matches the end of the text with references, and with the text itself, in whose prompt they often stand.

    Args:
        references: texts as ids, for every request. A row may have more of its own (``Row.references``).
        min_match: tokens of a match at least.
    """

    name = "llma"

    def __init__(self, vocab_size: int, references: Sequence[Sequence[int]] = (), min_match: int = 2) -> None:
        super().__init__(vocab_size)
        self._shared = self._indexed(references)
        self._min_match = min_match
        self._rows: list[SuffixArray | None] = []
        self._own = OwnTexts()

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """Sort the row's own references."""
        self._rows.append(self._indexed(ctx.rows[-1].references))
        self._own.admit()

    def remove(self, ctx: Context, row: int) -> None:
        """Drop them."""
        self._rows[row] = self._rows[-1]
        self._rows.pop()
        self._own.remove(row)

    def matches(self, index: int, row: Row) -> Iterable[Match]:
        """The longest one of each."""
        ending = row.tokens[-_LONGEST:]
        for texts in (self._rows[index], self._shared):
            found = None if texts is None else texts.match(ending, self._min_match, _LONGEST)
            if found is not None:
                yield found
        yield from self._own.of(index, row).matches(self._min_match, 1)

    def _indexed(self, references: Sequence[Sequence[int]]) -> SuffixArray | None:
        return SuffixArray(joined(references), vocab_size=self._vocab_size) if len(references) else None
