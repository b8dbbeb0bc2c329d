"""Constrained decoding: the protocol for grammars, schemas and custom constraints, and helpers for token masks.

A mask has one bit per token: token t is allowed if bit ``t % 32`` of word ``t // 32`` is set. The decoder queries a
mask at every node of a draft tree, so the text does not depend on the draft.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from draftwing.errors import ConfigError, DraftwingError, shown


class State(Protocol):
    """The state of one sequence. It is a function of the tokens taken so far."""

    def allowed(self) -> np.ndarray:
        """Return (W,) uint32, the mask of the next token, which the caller does not modify.

        Tokens beyond the mask are forbidden. End tokens are allowed where the text may end, and are the only ones
        allowed where it must end.

        Raises:
            DraftwingError: no mask can be computed; the request ends with this error.
        """
        ...

    def take(self, token: int) -> None:
        """Advance by an allowed token."""
        ...

    def fork(self) -> State:
        """Return an independent copy. Must be cheap: it is called for every node of a tree."""
        ...


class Constraint(Protocol):
    """An immutable constraint on a text, which requests and threads may share."""

    def start(self) -> State:
        """Return the state before the first generated token."""
        ...


def as_own_error(error: Exception) -> DraftwingError:
    """Return the error with which a request ends whose constraint has raised ``error``."""
    if isinstance(error, DraftwingError):
        return error
    found = ConfigError(
        f"the constraint failed ({type(error).__name__}: {shown(str(error))}): its states must have allowed(), take() "
        f"and fork() (see draftwing.constraint.State)"
    )
    found.__cause__ = error
    return found


def check_mask(words: object) -> np.ndarray:
    """Return a mask. Raises ConfigError if it is none."""
    if not isinstance(words, np.ndarray) or words.ndim != 1 or words.dtype != np.uint32:
        raise ConfigError(f"a constraint's allowed() must return a NumPy array (W,) of uint32, found {shown(words)}")
    return words


def has_bit(words: np.ndarray, token: int) -> bool:
    """Return True if a mask allows a token."""
    return token >> 5 < len(words) and bool(words[token >> 5] >> np.uint32(token & 31) & np.uint32(1))


def words_without(words: np.ndarray, tokens: tuple[int, ...]) -> np.ndarray:
    """Return a copy of a mask that forbids ``tokens``."""
    copy = words.copy()
    for token in tokens:
        if token >> 5 < len(copy):
            copy[token >> 5] &= ~np.uint32(1 << (token & 31))
    return copy


def forbidden_tokens(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return (V,) bool: True for the tokens that a mask forbids, including those beyond its words."""
    octets = (~words).astype("<u4", copy=False).view(np.uint8)
    bits = np.unpackbits(octets, count=min(vocab_size, 8 * len(octets)), bitorder="little")
    if len(bits) < vocab_size:
        bits = np.pad(bits, (0, vocab_size - len(bits)), constant_values=1)
    forbidden: np.ndarray = bits.view(bool)
    return forbidden
