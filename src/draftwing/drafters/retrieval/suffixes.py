"""SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975): draft from the request itself and from former ones.

Agents, pipelines and users who ask again get answers that repeat earlier ones. A suffix automaton of each request, and
a memory across all of them, say what followed the same words and how often; the longer the match, the more is drafted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from draftwing.drafters.base import Traits
from draftwing.drafters.retrieval.drafter import OwnTexts, RetrievalDrafter
from draftwing.drafters.retrieval.following import Match
from draftwing.drafters.retrieval.memory import Memory
from draftwing.model.target import Context, Row

__all__ = ["SuffixDrafter"]

_LONGEST = 32  # tokens of a match in the memory
_OWN = 4  # matches of different length in the request itself; the best of all is proposed


class SuffixDrafter(RetrievalDrafter):
    """Proposes the best continuation of the request's own text or of what was written for former ones.

    Args:
        memory: of former requests; drafters of any number of threads may share it. What a row has written is added
            when it leaves.
        alpha: nodes that are drafted for each token of a match.
        min_match: tokens of a match at least.
    """

    name = "suffix"

    def __init__(self, vocab_size: int, memory: Memory, alpha: float = 2.0, min_match: int = 1) -> None:
        super().__init__(vocab_size)
        self._memory, self._alpha, self._min_match = memory, alpha, min_match
        self._own = OwnTexts()
        self.traits = Traits(costs_forwards=False, forget=memory.forget, lists=True)

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """Start an automaton; it reads the prompt at the first proposal."""
        self._own.admit()

    def remove(self, ctx: Context, row: int) -> None:
        """Remember what was written, with the end of the prompt that it answers; drop the automaton."""
        left = ctx.rows[row]
        if len(left.tokens) > left.prompt_length:
            self._memory.add(left.tokens[max(0, left.prompt_length - _LONGEST) :])
        self._own.remove(row)
        if not len(self._own):
            self._memory.save()

    def matches(self, index: int, row: Row) -> Iterable[Match]:
        """In the request itself and in the memory, of several lengths: a shorter one has been met more often."""
        yield from self._own.of(index, row).matches(self._min_match, _OWN)
        yield from self._remembered(row.tokens[-_LONGEST:])

    def _remembered(self, ending: list[int]) -> Iterator[Match]:
        most = _LONGEST
        while most >= self._min_match:
            found = self._memory.match(ending, self._min_match, most)
            if found is None:
                return
            yield found
            most = found.length // 2

    def reach(self, match: Match) -> float:
        """Grows with the match."""
        return max(1.0, self._alpha * match.length)
