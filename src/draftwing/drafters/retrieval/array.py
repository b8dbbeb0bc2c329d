"""A suffix array over token ids: every place where something occurs, in a few looks.

The suffixes of the texts, sorted, lie side by side where they begin alike. So the occurrences of a pattern are found
by two binary searches, and what follows them comes sorted too: a trie that nobody has to build.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwing.drafters.retrieval.following import Follower, Match

__all__ = ["END", "SuffixArray", "joined", "sort_suffixes"]

END = -1  # after every text: nothing follows it, and no pattern has it
# Of more occurrences than these, so many at even distances are looked at: the counts are then shares of them.
_MOST_OCCURRENCES = 1024

Ids = NDArray[np.int32]
Order = NDArray[Any]  # int32, and int64 where there are more tokens than that counts
_Occurrences = tuple[NDArray[np.int64], int]  # where the matches begin, as their suffixes are sorted; tokens from there


def joined(texts: Iterable[Sequence[int] | Ids]) -> Ids:
    """Texts one after another, each with ``END`` behind it."""
    parts = [np.append(text, END).astype(np.int32) for text in texts]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def sort_suffixes(tokens: Ids) -> Order:
    """Where the suffixes of ``tokens`` begin, in lexicographic order; a suffix comes before those it begins.

    By pydivsufsort (``pip install 'draftwing[datastore]'``) where it is installed, else by doubling the sorted
    prefixes in numpy, which takes several times as long and more memory.
    """
    if len(tokens) < 2:
        return np.arange(len(tokens), dtype=np.int32)
    try:
        from pydivsufsort import divsufsort
    except ImportError:
        return _sort_by_doubling(tokens)
    found = np.asarray(divsufsort(np.ascontiguousarray(tokens, dtype=np.int32)))
    return found.astype(np.int32 if len(tokens) < 2**31 else np.int64, copy=False)


def _sort_by_doubling(tokens: Ids) -> Order:
    """By ranks of prefixes of 1, 2, 4, ... tokens, until all of them differ (Manber and Myers, 1990)."""
    size = len(tokens)
    _, rank = np.unique(tokens, return_inverse=True)
    rank, length = rank.astype(np.int64) + 1, 1  # 0 is what lies behind the end
    while True:
        second = np.zeros(size, dtype=np.int64)
        if length < size:
            second[:-length] = rank[length:]
        keys = rank * (size + 1) + second
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        fresh = np.concatenate([[1], ordered[1:] != ordered[:-1]]).cumsum()
        rank = np.empty(size, dtype=np.int64)
        rank[order] = fresh
        length *= 2
        if fresh[-1] == size:
            return order.astype(np.int32) if size < 2**31 else order


class SuffixArray:
    """Texts and where their suffixes begin, sorted. Both may lie in a mapped file; neither is ever changed.

    Args:
        tokens: (T,) texts, each with ``END`` behind it.
        order: (T,) of ``sort_suffixes``; None sorts them.
        vocab_size: ids from here on, which only a damaged file can have, end a text as ``END`` does.
    """

    def __init__(self, tokens: Ids, order: Order | None = None, vocab_size: int | None = None) -> None:
        self.tokens: Ids = tokens
        self.order: Order = sort_suffixes(tokens) if order is None else order
        self._vocab_size = vocab_size or 2**31

    def __len__(self) -> int:
        """Tokens, the ends of texts counted."""
        return len(self.tokens)

    def find(self, pattern: Sequence[int]) -> tuple[int, int]:
        """Which suffixes begin with ``pattern``: from and to (not included) in ``order``."""
        wanted, beginning = list(pattern), self._beginning(len(pattern))
        low = bisect_left(self.order, wanted, key=beginning)
        return low, bisect_right(self.order, wanted, lo=low, key=beginning)

    def _beginning(self, size: int) -> Callable[[int], list[int]]:
        def tokens_from(start: int) -> list[int]:
            found: list[int] = self.tokens[start : int(start) + size].tolist()
            return found

        return tokens_from

    def longest(self, ending: Sequence[int], least: int, most: int) -> int:
        """The length of the longest end of ``ending`` that something follows here.

        Of ``least`` to ``most`` tokens; 0 where none of those occurs, or only where texts end.
        """
        low, high = least, min(most, len(ending))  # what is longer occurs more rarely
        if high < low or not self._goes_on(ending[-low:]):
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._goes_on(ending[-middle:]) else (low, middle - 1)
        return low

    def _goes_on(self, pattern: Sequence[int]) -> bool:
        """Whether ``pattern`` occurs before the end of a text. If so the last one does: ends are sorted first."""
        wanted, size = list(pattern), len(pattern)
        last = bisect_right(self.order, wanted, key=self._beginning(size)) - 1
        if last < 0:
            return False
        *found, following = self._beginning(size + 1)(self.order[last]) or [END]
        return found == wanted and following != END

    def place(self, pattern: Sequence[int]) -> _Occurrences:
        """The place after ``pattern``, for ``followers``."""
        low, high = self.find(pattern)
        if high - low <= _MOST_OCCURRENCES:
            return self.order[low:high].astype(np.int64), len(pattern)
        even = np.linspace(low, high - 1, _MOST_OCCURRENCES).astype(np.int64)
        return self.order[even].astype(np.int64), len(pattern)

    def match(self, ending: Sequence[int], least: int, most: int) -> Match | None:
        """The longest end of ``ending`` that something follows here, of ``least`` to ``most`` tokens, or None."""
        length = self.longest(ending, least, most)
        return Match(self, length, self.place(ending[-length:])) if length else None

    def followers(self, place: _Occurrences) -> list[Follower]:
        """See ``Indexed``; in the order of the tokens."""
        starts, passed = place
        if len(starts) == 1:  # as are most places inside of a draft
            only = int(starts[0]) + passed
            token = int(self.tokens[only]) if 0 <= only < len(self.tokens) else END
            return [Follower(token, 1, (starts, passed + 1))] if 0 <= token < self._vocab_size else []
        at = starts + passed
        tokens = np.where(at < len(self.tokens), self.tokens.take(at, mode="clip"), END)
        bounds = [0, *(np.flatnonzero(tokens[1:] != tokens[:-1]) + 1).tolist(), len(tokens)]
        found = ((int(tokens[low]), low, high) for low, high in pairwise(bounds) if high > low)
        return [
            Follower(token, high - low, (starts[low:high], passed + 1))
            for token, low, high in found
            if 0 <= token < self._vocab_size
        ]
