"""REST (He et al. 2023, arXiv 2311.08252): draft what followed the same words in a datastore of texts.

Gains where the datastore holds texts like those that are written: the files of a project, former answers, a manual.
"""

from __future__ import annotations

from collections.abc import Iterable

from draftwing.drafters.base import Traits
from draftwing.drafters.retrieval.array import SuffixArray
from draftwing.drafters.retrieval.drafter import RetrievalDrafter
from draftwing.drafters.retrieval.following import Match
from draftwing.model.target import Row

__all__ = ["RestDrafter"]


class RestDrafter(RetrievalDrafter):
    """Looks for the longest end of the text that stands in the datastore, exactly, and proposes what followed it there.

    Args:
        texts: a datastore's; drafters of any number of threads may share them.
        min_match, max_match: tokens of that end, at least and at most.
        identity: of the datastore.
    """

    name = "rest"

    def __init__(
        self, vocab_size: int, texts: SuffixArray, min_match: int = 2, max_match: int = 16, *, identity: str = ""
    ) -> None:
        super().__init__(vocab_size)
        self._texts, self._min_match, self._max_match = texts, min_match, max(min_match, max_match)
        self.traits = Traits(costs_forwards=False, identity=identity, lists=True)

    def matches(self, index: int, row: Row) -> Iterable[Match]:
        """The longest one."""
        found = self._texts.match(row.tokens[-self._max_match :], self._min_match, self._max_match)
        return () if found is None else (found,)
