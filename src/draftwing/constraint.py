"""What a text may say, asked token by token: a grammar, a schema, or anything of one's own.

A mask is a bit per token: bit ``t % 32`` of word ``t // 32`` is set where token t may come next. Whoever decodes asks
for one at every node of a draft tree, so that a text is the same whatever was drafted for it.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np


class State(Protocol):
    """Where a text stands. It follows from the tokens that were taken alone."""

    def allowed(self) -> np.ndarray:
        """(W,) uint32, the mask of the next token; whoever asks leaves it as it is. Tokens beyond it may not follow.

        End tokens are in it where the text may end, and nothing else is where it must.

        Raises:
            DraftwingError: nobody can tell any more: the text ends with this error.
        """
        ...

    def take(self, token: int) -> None:
        """The text goes on with a token that was allowed."""
        ...

    def fork(self) -> State:
        """The same, which goes its own way from here on. Cheap: every node of a tree is one."""
        ...


@runtime_checkable
class Constraint(Protocol):
    """What a text may say. It does not change: any number of requests and threads may share one."""

    def start(self) -> State:
        """Where every text begins, before its first token."""
        ...


def has_bit(words: np.ndarray, token: int) -> bool:
    """Whether a mask allows a token."""
    return token >> 5 < len(words) and bool(words[token >> 5] >> np.uint32(token & 31) & np.uint32(1))


def words_without(words: np.ndarray, tokens: tuple[int, ...]) -> np.ndarray:
    """A mask without some tokens, as a copy."""
    found = words.copy()
    for token in tokens:
        if token >> 5 < len(found):
            found[token >> 5] &= ~np.uint32(1 << (token & 31))
    return found


def forbidden_of(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """(V,) bool: the tokens that a mask does not allow, those beyond its words too."""
    octets = (~words).astype("<u4", copy=False).view(np.uint8)
    bits = np.unpackbits(octets, count=min(vocab_size, 8 * len(octets)), bitorder="little")
    if len(bits) < vocab_size:
        bits = np.pad(bits, (0, vocab_size - len(bits)), constant_values=1)
    found: np.ndarray = bits.view(bool)
    return found
