"""From token ids to text that can be shown while it is being generated.

Tokens are not characters. One character can take several tokens (an emoji is four bytes), one token can hold the end
of one character and the start of the next, and some tokenizers drop the space in front of the first token they decode.
A stream therefore decodes a short sliding window of ids, not single tokens and not the whole output: the window's
front is context whose text is already out, and only what stands behind it is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

from draftwing.errors import ConfigError, DraftwingError

# What every decoder writes for bytes that are no character, or not one yet.
_BROKEN = "\ufffd"
# Ids of the prompt that the first window starts with; doubled until they decode to something whole.
_CONTEXT_IDS = 8
# A character has at most four bytes, so a window that has not come to a character's end after this many ids holds
# bytes that never will be one; waiting longer would hold back, and decode again and again, without end.
_MAX_OPEN_IDS = 16


class TokenDecoder(Protocol):
    """What a stream needs of a tokenizer; ``tokenizers.Tokenizer`` has it."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        """Return the text of ``ids``, with U+FFFD for bytes that are no character."""
        ...


class TextStream:
    """The printable text of a growing list of token ids, up to the first stop string.

    What comes out depends on the ids alone, not on how they were grouped into pushes: five ids accepted in one
    speculative step give the same text as five steps of one id. Half a character never comes out, and neither does a
    tail that may turn out to be the beginning of a stop string.

    The stop string that ends the text is the one whose last character comes first in the generated text; of several
    that end at the same character, the longest. The text ends right before its first character. The prompt is never
    searched. Each id costs a decode of a few ids, however long the output has become.

    Args:
        tokenizer: A ``tokenizers.Tokenizer``, or anything with its ``decode``.
        prompt_ids: The ids that the output continues, possibly none. They are only context: they decide whether the
            output starts with a space, and none of their text comes out.
        stop: The strings that end the text; none of them empty.
        skip_special_tokens: Whether special tokens are left out of the text.
        min_ids: Ids that come before any end: a stop string that is complete with one of them ends nothing.

    Raises:
        ConfigError: ``stop`` is one string instead of a tuple of them, or has an empty one or one that is no string.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        prompt_ids: Sequence[int] = (),
        stop: tuple[str, ...] = (),
        *,
        skip_special_tokens: bool = True,
        min_ids: int = 0,
    ) -> None:
        _check_stop(stop)
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop, self._min_ids = tuple(stop), min_ids
        self._alone: dict[int, str] = {}  # what ids decode to by themselves
        self._held = ""  # decoded, but perhaps the beginning of a stop string
        self._stopped: str | None = None
        self._num_tokens = 0
        self._flushed = False
        self._start_window(prompt_ids)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None while there is none."""
        return self._stopped

    @property
    def num_tokens_kept(self) -> int:
        """How many of the pushed ids count: up to and including the one that completed the stop string.

        While there is no stop string, all of them. Ids pushed behind the stop string are not counted.
        """
        return self._num_tokens

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids (any number of them) and return the text that has become certain, possibly ``""``.

        After a stop string, ids are ignored and the text is ``""``.

        Raises:
            DraftwingError: The stream was flushed already.
        """
        if self._flushed:
            raise DraftwingError(
                "TextStream.push: expected an open stream, found one whose flush() was called; "
                "make a new TextStream with the ids so far as its prompt_ids."
            )
        out = []
        # One id at a time: that alone makes the text independent of the grouping.
        for token in ids:
            if self._stopped is not None:
                break
            self._num_tokens += 1
            out.append(self._settle(self._decode_next(token)))
        return "".join(out)

    def flush(self) -> str:
        """End the stream and return what was held back: a partial stop string, and U+FFFD for half a character.

        Returns ``""`` after a stop string, and when called again.
        """
        if self._flushed or self._stopped is not None:
            self._flushed = True
            return ""
        self._flushed = True
        out = self._settle(self._text[self._shown_of(self._text) :])
        if self._stopped is None:
            out += self._held
            self._held = ""
        return out

    def _decode(self, ids: list[int]) -> str:
        text = self._alone.get(ids[0]) if len(ids) == 1 else None
        if text is None:
            text = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
            if len(ids) == 1:
                self._alone[ids[0]] = text
        return text

    def _start_window(self, prompt_ids: Sequence[int]) -> None:
        """Fill the window with the prompt's last ids, enough of them to decode to text that starts whole."""
        count = _CONTEXT_IDS
        self._slide(list(prompt_ids[-count:]), 0)
        # Ids that decode to nothing (special tokens) are no context for a leading space, and a decoder of byte
        # tokens that is started inside a character takes the bytes behind it for broken too.
        while count < len(prompt_ids) and (not self._text or self._text.startswith(_BROKEN)):
            count *= 2
            self._slide(list(prompt_ids[-count:]), 0)
        # A prompt that ends inside a character: the output may complete it, and then that character is new text.
        self._ragged = self._text if self._text.endswith(_BROKEN) else ""
        self._open_from = 0 if self._ragged else len(self._window)

    def _slide(self, window: list[int], open_from: int) -> None:
        """Make ``window`` the ids to decode from now on, its text being out; from ``open_from`` on they stay next."""
        self._window = window
        self._open_from = open_from
        self._text: str = self._decode(window) if window else ""
        self._shown = len(self._text)
        self._ragged = ""

    def _shown_of(self, text: str) -> int:
        if not self._ragged:
            return self._shown
        pairs = zip(self._ragged, text, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _decode_next(self, token: int) -> str:
        """Add ``token`` to the window and return the text that it made certain."""
        self._window.append(token)
        text = self._decode(self._window)
        if text and text == self._text and not self._decode([token]):
            # A special token that is skipped: as the window's only context it would be none.
            self._window.pop()
            return ""
        changed, self._text = text != self._text, text
        start = self._shown_of(text)
        if not text.endswith(_BROKEN):
            end = len(text)
            if changed:
                rest = self._window[self._open_from :]
                self._slide(rest, len(rest))
                return text[start:end]
        elif len(self._window) - self._open_from > _MAX_OPEN_IDS:
            # All but the last U+FFFD is there to stay; the last one may still be a character that lacks its end.
            end = len(text) - 1
            self._slide(self._window[-_CONTEXT_IDS:], 0)
            self._shown -= 1
            return text[start:end]
        else:
            end = len(text.rstrip(_BROKEN))
        if end > start:
            self._shown, self._ragged = end, ""
        return text[start:end]

    def _settle(self, piece: str) -> str:
        """Add ``piece`` to the text and return what can no longer be part of a stop string."""
        old, held = len(self._held), self._held + piece  # of what is old, nothing can be the end of a stop string
        found = [(held.find(stop, max(old - len(stop) + 1, 0)), stop) for stop in self._stop]
        hits = [(at + len(stop), at, stop) for at, stop in found if at >= 0]
        if hits and self._num_tokens > self._min_ids:
            _, at, self._stopped = min(hits)
            self._held = ""
            return held[:at]
        cut = len(held) - max((_overlap(held, stop) for stop in self._stop), default=0)
        self._held = held[cut:]
        return held[:cut]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that is a beginning of ``stop``, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


def _check_stop(stop: object) -> None:
    """Raise ConfigError unless ``stop`` is a tuple (or list) of strings that are not empty."""
    if not isinstance(stop, tuple | list):
        raise ConfigError(f"stop: expected a tuple of strings, found {stop!r}; write a single one as ('...',).")
    for i, item in enumerate(stop):
        if not isinstance(item, str) or not item:
            raise ConfigError(f"stop[{i}]: expected a string of at least one character, found {item!r}; leave it out.")
