"""The n-grams that lookahead decoding has come across (2402.02057)."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["NGramPool"]


class NGramPool:
    """For every token the latest n-grams that begin with it.

    Args:
        most: n-grams kept of one first token.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._rest: dict[int, dict[tuple[int, ...], None]] = {}  # the oldest first

    def add(self, ngram: Sequence[int]) -> None:
        """One n-gram; one that is known becomes the latest."""
        known = self._rest.setdefault(ngram[0], {})
        rest = tuple(ngram[1:])
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self._most:
            del known[next(iter(known))]

    def after(self, token: int) -> list[list[int]]:
        """What followed ``token`` in its n-grams, the latest first."""
        return [list(rest) for rest in reversed(self._rest.get(token, ()))]
