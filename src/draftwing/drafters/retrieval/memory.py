"""What was written for former requests, bounded in memory, and kept in a file where one is named.

Texts come in one by one, so they lie in several suffix arrays, each more than twice as large as the next: a new one is
merged with those before it as long as they are not (a log-structured merge), and a token is sorted again a few times
in its life. When there are too many tokens, the oldest array goes.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftwing.drafters.retrieval.array import SuffixArray, joined
from draftwing.drafters.retrieval.following import Follower, Match
from draftwing.drafters.retrieval.store import read_store, write_store
from draftwing.errors import DraftwingWarning

__all__ = ["Memory"]

_SAVE_EVERY = 1 << 14  # tokens, where requests never pause

Place = tuple[tuple[SuffixArray, Any], ...]  # in several arrays at once


class Memory:
    """Texts that several decode loops look into and add to, from any thread.

    Readers take the tuple of arrays as it is at that moment and need no lock: arrays never change.

    Args:
        most: tokens to keep at most, the ends of texts counted; about 8 bytes each.
        file: where they are kept, or None. It is read if it is there.
        about: whose ids these are: ``vocab_size``, ``vocab_hash`` and ``target``.

    Raises:
        CheckpointError: the file is no such file, or damaged.
    """

    def __init__(self, most: int, file: Path | None = None, about: Mapping[str, Any] | None = None) -> None:
        self._most, self._file, self._about = most, file, dict(about or {"vocab_size": 2**31})
        self._changing = threading.Lock()
        self._parts: tuple[SuffixArray, ...] = ()
        self._unsaved = 0
        if file is not None and file.exists():
            store = read_store(file, whole=True)
            # In memory: the file may be replaced, and a mapped one would stay on the disk for as long.
            parts = [SuffixArray(np.array(part.tokens), np.array(part.order)) for part in store.parts]
            self._parts = self._bounded(parts)
        self._read = self._parts

    def __len__(self) -> int:
        """Tokens that are kept."""
        return sum(map(len, self._parts))

    @property
    def num_parts(self) -> int:
        """Suffix arrays that they lie in."""
        return len(self._parts)

    # --- looking -----------------------------------------------------------------------------------------------------

    def match(self, ending: Sequence[int], least: int, most: int) -> Match | None:
        """The longest end of ``ending``, of ``least`` to ``most`` tokens, that occurs in any text; None without one."""
        best, found = 0, list[SuffixArray]()
        for part in self._parts:
            length = part.longest(ending, max(least, best), most)
            if length > best:
                best, found = length, []
            if length:
                found.append(part)
        return self._match(found, ending, best) if found else None

    def _match(self, parts: Sequence[SuffixArray], ending: Sequence[int], length: int) -> Match:
        pattern = ending[-length:]
        place: Place = tuple((part, part.place(pattern)) for part in parts)
        return Match(self, length, place)

    def followers(self, place: Place) -> list[Follower]:
        """See ``Indexed``: those in all arrays, added up."""
        if len(place) == 1:
            part, own = place[0]
            return [Follower(token, times, ((part, after),)) for token, times, after in part.followers(own)]
        merged: dict[int, Follower] = {}
        for part, own in place:
            for token, times, after in part.followers(own):
                so_far = merged.get(token, Follower(token, 0, ()))
                merged[token] = Follower(token, so_far.times + times, (*so_far.place, (part, after)))
        return list(merged.values())

    # --- adding ------------------------------------------------------------------------------------------------------

    def add(self, text: Sequence[int]) -> None:
        """Add a text; of one that is longer than half of what may be kept, its end."""
        text = text[-(self._most // 2 - 1) :]
        if len(text) < 2:
            return  # nothing follows anything in it
        with self._changing:
            self._parts = self._bounded([*self._parts, SuffixArray(joined([text]))])
            self._unsaved += len(text)
        if self._unsaved >= _SAVE_EVERY:
            self.save()

    def _bounded(self, parts: list[SuffixArray]) -> tuple[SuffixArray, ...]:
        """Merged where a part is not more than twice as large as the next, and within the bound."""
        while len(parts) > 1:
            size = len(parts[-2]) + len(parts[-1])
            if len(parts[-2]) > 2 * len(parts[-1]) or size > self._most // 2:  # else all would go at once
                break
            last = parts.pop()
            parts[-1] = SuffixArray(np.concatenate([parts[-1].tokens, last.tokens]))
        while sum(map(len, parts)) > self._most:
            parts.pop(0)
        return tuple(parts)

    def forget(self) -> None:
        """Go back to what was read from the file, or to nothing."""
        with self._changing:
            self._parts, self._unsaved = self._read, 0

    def save(self) -> None:
        """Write the file, where one is named and something is new. What cannot be written is a warning: texts go on."""
        if self._file is None or not self._unsaved:
            return
        with self._changing:
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_store(self._file, self._parts, self._about)
            except (OSError, ValueError) as error:  # a name may be none
                warnings.warn(
                    f"{self._file}: what was learnt of former requests cannot be kept ({error}): check the path and "
                    f"the disk",
                    DraftwingWarning,
                    stacklevel=2,
                )
            self._unsaved = 0
