"""What was read of former texts, found again by prompts that begin alike: whole pages, by the tokens up to their ends.

A drafter's slot may hold the token after its position (an EAGLE head's entry i reads feature i and token i + 1): a page
counts as the same only where the token behind it is the same too. What follows is read anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftwing.model.paged import PAGE, SlotTable

__all__ = ["Prefixes"]

_Key = tuple[int, tuple[int, ...]]  # the number of the page before, and the tokens of the page and the one behind it


class Prefixes:
    """Pages by text. Keys hold the tokens themselves: no two texts are taken for one another.

    Args:
        table: whose pages they are. It takes those that nobody uses when it needs them, the oldest first.
    """

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._found: dict[_Key, tuple[int, int]] = {}  # to a page and its number, which no other page will ever have
        self._keys: dict[int, _Key] = {}
        self._next = 1

    def clear(self) -> None:
        """Everything is gone."""
        self._found, self._keys = {}, {}

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The pages that hold the beginning of a text, but for its last two tokens at least: these are read anew."""
        self._forget()
        pages, before = list[int](), 0
        for start in range(0, len(tokens) - PAGE - 1, PAGE):
            found = self._found.get((before, tuple(tokens[start : start + PAGE + 1])))
            if found is None:
                break
            pages.append(found[0])
            before = found[1]
        return pages

    def remember(self, tokens: Sequence[int], pages: Sequence[int], num_valid: int) -> None:
        """Keep what was read of a text: ``num_valid`` slots, in these pages, hold what they will hold for good."""
        self._forget()
        before = 0
        for place in range(min(num_valid // PAGE, (len(tokens) - 1) // PAGE)):
            start, page = place * PAGE, pages[place]
            key = before, tuple(tokens[start : start + PAGE + 1])
            found = self._found.get(key)
            if found is None:
                if page in self._keys:  # of a text that began otherwise: its beginning is gone
                    del self._found[self._keys.pop(page)]
                found = self._found[key] = page, self._next
                self._keys[page] = key
                self._next += 1
                self._table.remember(page)
            before = found[1]

    def drop(self, pages: Sequence[int]) -> None:
        """Nobody is to find these again: what was read there came to nothing."""
        for page in pages:
            key = self._keys.pop(page, None)
            if key is not None:
                del self._found[key]
                self._table.forget(page)

    def _forget(self) -> None:
        """Drop what the table has given to others."""
        gone, self._table.forgotten = self._table.forgotten, []
        for page in gone:
            key = self._keys.pop(page, None)
            if key is not None:
                del self._found[key]
