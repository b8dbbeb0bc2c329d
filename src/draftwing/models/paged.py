"""KV slots in pages within a stated amount of memory, as in PagedAttention (2309.06180).

Slot i of row b lies in page ``rows[b][i // PAGE]`` of every cache of a decoder: the target's and the drafter's. So one
table is enough, rows join and leave without copies, and rows with a common prefix share pages. Only drafters with
another tokenizer have a table of their own, with as many pages. The first page belongs
to no row and stays zero: attention reads it past the pages of a row. Rows that only fill a recording's bucket write to
the last page.

Shape suffixes: L layers, B rows, N nodes, K heads, S slots, D head dimension, P pages.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwing.errors import ConfigError, SlotsError, shown
from draftwing.models.cache import KEY_BLOCK, KVCache
from draftwing.torch_utils import clear, put

PAGE = KEY_BLOCK  # slots
SPARE = 2  # pages that belong to no row
MARGIN = 4160  # slots behind the longest text, for the widest tree that a budget may ask for


class SlotsExhausted(SlotsError):
    """A row needs a page, and none is free. The engine preempts a row and repeats the step."""


def pages_of(num_slots: int) -> int:
    """Pages for ``num_slots`` slots."""
    return -(-num_slots // PAGE)


def check_memory(num_bytes: int, num_page_bytes: int, num_pages: int, device: torch.device) -> None:
    """Raise ConfigError if ``num_bytes`` hold fewer than ``num_pages`` pages for rows, or are more than there are."""
    least = (num_pages + SPARE) * num_page_bytes
    given = f"kv_memory={num_bytes:,}" if num_bytes < 2**63 else f"kv_memory={shown(num_bytes)}"
    if num_bytes < least:
        raise ConfigError(
            f"{given} bytes is too small: it needs at least {num_pages + SPARE} blocks of {PAGE} tokens "
            f"({least:,} bytes, {least / 2**30:.3g} GiB)"
        )
    most = _device_memory(device)
    if most is not None and num_bytes > most:
        raise ConfigError(
            f"{given} bytes is more than the {most / 2**30:.1f} GiB of memory of {device}: it needs at least "
            f"{least / 2**30:.3g} GiB, and more holds longer prompts and more requests"
        )


def _device_memory(device: torch.device) -> int | None:
    """Return the bytes of a device's memory, or None if the system does not report them."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    with suppress(AttributeError, ValueError, OSError):  # Windows
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


class PageTable:
    """The pages of each row, up to ``num_rows`` of ``num_slots`` slots. For the stepping thread only.

    Attributes:
        rows: the pages of each row, in the order of the context's rows, followed during a prefill by those of the row
            that is being read.
        uses: the number of holders of each page.
        caches: all caches that lie in these pages.
        num_pages: pages that rows may hold.
        is_apart: see ``apart``; its only cache moves the rows.
        prefixes: known pages by the tokens they hold.
    """

    def __init__(self, num_rows: int, num_slots: int) -> None:
        # Twice as many slots: when one row catches up with its tokens, the others get as many entries, mostly unused.
        self.array = np.zeros((num_rows, pages_of(2 * num_slots + MARGIN)), dtype=np.int32)
        self.address, self.stride = self.array.ctypes.data, self.array.shape[1]
        self.rows: list[list[int]] = []
        self.caches: list[PagedCache] = []
        self._unclaimed: list[PagedCache] = []
        self._apart: list[PageTable] = []
        self._num_apart = 0  # the first ones, which are in use
        self.is_apart = False
        self.num_pages = 0
        self.uses: list[int] = []
        self._free: list[int] = []  # empty pages
        self._kept: dict[int, None] = {}  # unused pages that hold a known prefix, the oldest first
        self.prefixes = Prefixes(self)
        self._mirror: Tensor | None = None
        self._is_changed = True

    # --- the caches ------------------------------------------------------------------------------------------------

    @contextmanager
    def making(self) -> Iterator[None]:
        """While this context is open, contexts and drafters make their KV caches in these pages."""
        token = _table.set(self)
        try:
            yield
        finally:
            _table.reset(token)

    def cache(
        self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> PagedCache:
        """A new cache; after ``restart``, an old one of the same shape."""
        cache = PagedCache(self, num_layers, num_kv_heads, head_dim, dtype, device)
        for place, old in enumerate(self._unclaimed):
            if old.key == cache.key:
                return self._unclaimed.pop(place)
        self.caches.append(cache)
        cache.allocate(self.num_pages + SPARE if self.num_pages else 0)
        return cache

    def apart(self, num_slots: int) -> PageTable:
        """Return a table of other rows, with as many pages in the same memory; after ``restart``, an old one."""
        if self._num_apart == len(self._apart):
            table = PageTable(len(self.array), num_slots)
            table.is_apart, table.num_pages = True, self.num_pages
            table.restart()
            self._apart.append(table)
        self._num_apart += 1
        return self._apart[self._num_apart - 1]

    @property
    def num_page_bytes(self) -> int:
        """Bytes of one page in all caches together."""
        num_bytes = sum(cache.num_page_bytes for cache in self.caches)
        return num_bytes + sum(table.num_page_bytes for table in self._apart)

    def allocate(self, num_bytes: int, least_pages: int = 2) -> None:
        """Allocate ``num_bytes`` for all caches; the shortest request needs ``least_pages``."""
        check_memory(num_bytes, self.num_page_bytes, least_pages, self.caches[0].data.device)
        num_pages = num_bytes // self.num_page_bytes - SPARE
        for table in (self, *self._apart):
            table.num_pages = num_pages
            for cache in table.caches:
                cache.allocate(num_pages + SPARE)
        self.restart()
        for table in (self, *self._apart):
            table._unclaimed = []
        self._num_apart = len(self._apart)

    def restart(self) -> None:
        """Drop all rows and pages; caches that are made next reuse the memory of the present ones."""
        self.rows, self.uses = [], [0] * (self.num_pages + 1)
        self._free = [*range(self.num_pages, 0, -1)]
        self._kept = {}
        self.prefixes.clear()
        self._unclaimed = list(self.caches)
        for cache in self.caches:
            cache.leads = False
        self.array[:] = 0
        self._is_changed = True
        self._num_apart = 0
        for table in self._apart:
            table.restart()

    # --- rows ------------------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Pages that rows can get, including those that are only kept."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Unused pages that hold a known prefix."""
        return len(self._kept)

    def hold(self, first_row: int, lengths: Sequence[int], extra: int) -> None:
        """Give each row from ``first_row`` on the pages for its length and ``extra`` more slots."""
        while len(self.rows) < first_row + len(lengths):
            self.rows.append([])
        for row, length in enumerate(lengths, first_row):
            if len(self.rows[row]) * PAGE < length + extra:
                self._grow(row, pages_of(length + extra))
        if self._mirror is not None and self._is_changed:
            self._upload()

    def num_missing(self, lengths: Sequence[int], extra: int) -> int:
        """New pages that ``hold(0, lengths, extra)`` needs."""
        missing = 0
        for row, length in enumerate(lengths):
            pages = len(self.rows[row]) if row < len(self.rows) else 0
            missing += max(pages_of(length + extra) - pages, 0)
        return missing

    def _grow(self, row: int, count: int) -> None:
        pages = self.rows[row]
        if count - len(pages) > self.num_available or count > self.stride or row >= len(self.array):
            raise SlotsExhausted(
                f"the KV slots are used up: row {row} needs {count} pages of {PAGE}, holds {len(pages)}, and "
                f"{self.num_available} of {self.num_pages} are free: give more kv_memory, or run fewer requests at once"
            )
        while len(pages) < count:
            page = self._take()
            self.array[row, len(pages)] = page
            pages.append(page)
        self._is_changed = True

    def _take(self) -> int:
        """A free page, or the one that was kept the longest; zeros in the caches whose unused slots are read."""
        if self._free:
            page = self._free.pop()
        else:
            page = next(iter(self._kept))
            del self._kept[page]
            self.prefixes.remove(page)
        self.uses[page] = 1
        for cache in self.caches:
            if cache.reads_unused:
                clear(cache.data[..., page * PAGE : (page + 1) * PAGE, :])
        return page

    def attach(self, row: int, pages: list[int]) -> None:
        """Add a row with these pages after the last one."""
        del self.rows[row:]
        self.rows.append(pages)
        self.array[row] = 0
        self.array[row, : len(pages)] = pages
        self._is_changed = True

    def detach(self, row: int) -> list[int]:
        """Remove the last row, and return its pages, which stay held."""
        pages = self.rows.pop(row)
        self.array[row, : len(pages)] = 0
        self._is_changed = True
        return pages

    def remove(self, row: int, last: int) -> None:
        """Release a row's pages; row ``last`` takes its place."""
        del self.rows[last + 1 :]  # an interrupt may have left a row there
        self.rows += ([] for _ in range(last + 1 - len(self.rows)))  # rows that never held a page
        released, moved = self.rows[row], self.rows.pop()
        self.array[len(self.rows)] = 0
        if row < len(self.rows):
            self.rows[row] = moved
            self.array[row] = 0
            self.array[row, : len(moved)] = moved
        self.release(released)
        self._is_changed = True

    def empty(self, row: int) -> None:
        """Release a row's pages; the row stays."""
        if row < len(self.rows):
            self.release(self.rows[row])
            self.array[row] = 0
            self._is_changed = True

    # --- shared and kept pages -------------------------------------------------------------------------------------

    def share(self, page: int) -> None:
        """Hold a known page once more."""
        self._kept.pop(page, None)
        self.uses[page] += 1

    def copy(self, source: int) -> int | None:
        """Take a page with the content of a known one; None if no page is left."""
        self.share(source)  # or it could be the one that is taken
        page = None
        if self.num_available:
            page = self._take()
            for cache in self.caches:
                *outer, slots, width = cache.data.shape  # the width is 0 for a head without attention
                pages = cache.data.view(*outer, slots // PAGE, PAGE, width)
                put(pages[..., page, :, :], pages[..., source, :, :])
        self.release([source])
        return page

    def forget(self, page: int) -> None:
        """Free a page that holds no known prefix any more, if it was kept."""
        if page in self._kept:
            del self._kept[page]
            self._free.append(page)

    def release(self, pages: list[int]) -> None:
        """Release pages in reverse order, so that the end of a known prefix is reused first; empties the list."""
        for page in reversed(pages):
            self.uses[page] -= 1
            if self.uses[page]:
                continue
            if page in self.prefixes:
                self._kept[page] = None
            else:
                self._free.append(page)
        pages.clear()

    def recount(self, others: Sequence[Sequence[int]] = ()) -> None:
        """Recount the holders of all pages after an interrupt: the rows, and ``others``."""
        self.uses = [0] * (self.num_pages + 1)
        for pages in (*self.rows, *others):
            for page in pages:
                self.uses[page] += 1
        idle = [page for page in range(self.num_pages, 0, -1) if not self.uses[page]]
        order = [*(page for page in self._kept if not self.uses[page]), *idle]  # the oldest first
        self._free = [page for page in idle if page not in self.prefixes]
        self._kept = {page: None for page in order if page in self.prefixes}
        for table in self._apart:
            table.recount()

    def check(self, others: Sequence[Sequence[int]] = ()) -> None:
        """Raise SlotsError if pages are lost or counted wrongly; ``others`` hold pages besides the rows."""
        uses = [0] * (self.num_pages + 1)
        for pages in (*self.rows, *others):
            for page in pages:
                uses[page] += 1
        idle = [*self._free, *self._kept]
        wrong = [page for page in range(1, len(uses)) if uses[page] != self.uses[page]]
        lost = set(range(1, len(uses))) - set(idle) - {page for page, count in enumerate(uses) if count}
        if wrong or lost or len(set(idle)) < len(idle) or any(uses[page] for page in idle) or uses[0]:
            raise SlotsError(
                f"KV pages do not add up: of {self.num_pages}, {len(wrong)} are counted wrongly, {len(lost)} are lost, "
                f"{len(idle) - len(set(idle))} are free twice: this is a bug of Draftwing"
            )
        for row, pages in enumerate(self.rows):
            if self.array[row, : len(pages)].tolist() != pages:
                raise SlotsError(f"row {row} reads other pages than it holds: this is a bug of Draftwing")
        for table in self._apart:
            table.check()

    # --- the table on a device -------------------------------------------------------------------------------------

    def tensor(self, device: torch.device) -> Tensor:
        """(B, P) int32 on a device: always the same memory, updated by ``hold``."""
        if device.type == "cpu":
            return torch.from_numpy(self.array)
        if self._mirror is None:
            self._mirror = torch.zeros(self.array.shape, dtype=torch.int32, device=device)
            self._upload()
        return self._mirror

    def _upload(self) -> None:
        assert self._mirror is not None
        self._mirror.copy_(torch.from_numpy(self.array))
        self._is_changed = False


class PagedCache(KVCache):
    """Keys and values of all layers in pages: (L, 2, 1, K, P * PAGE, D). Rows get pages by ``hold``.

    The cache that ``leads``, the target's, moves the rows of the table.
    """

    def __init__(
        self,
        table: PageTable,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(num_layers, num_kv_heads, head_dim, dtype, device)
        self.table, self.leads = table, False
        self.key = (self._shape, dtype, str(device))

    @property
    def num_page_bytes(self) -> int:
        """Bytes of one page."""
        layers, two, heads, dim = self._shape
        size: int = layers * two * heads * dim * PAGE * self.data.element_size()
        return size

    @property
    def num_rows(self) -> int:
        """Most rows of the table."""
        return int(self.table.array.shape[0])

    @property
    def num_slots(self) -> int:
        """Most slots of a row."""
        return int(self.table.stride) * PAGE

    def allocate(self, num_pages: int) -> None:
        """Allocate all pages. A page is cleared when a row gets it; those that belong to no row are cleared here."""
        layers, two, heads, dim = self._shape
        self.data = self.data.new_empty(layers, two, 1, heads, num_pages * PAGE, dim)
        self.data[..., :PAGE, :].zero_()
        self.data[..., max(num_pages - 1, 0) * PAGE :, :].zero_()

    def reserve(self, num_rows: int, num_slots: int) -> None:
        """Rows get pages by ``hold``."""

    def hold(self, first_row: int, lengths: Sequence[int], extra: int) -> None:
        self.table.hold(first_row, lengths, extra)

    def clear(self, row: int) -> None:
        """Pages are cleared when they are taken."""

    def move_row(self, source: int, target: int) -> None:
        """Drop row ``target``; ``source``, the last one, takes its place.

        The target's cache does this for all caches; its rows are removed after the drafter's.
        """
        if self.leads or self.table.is_apart:
            self.table.remove(target, source)

    def place(self, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        pages: Tensor = self.table.tensor(slots.device)[rows, slots // PAGE]
        return torch.zeros_like(slots), pages * PAGE + slots % PAGE


_table: ContextVar[PageTable | None] = ContextVar("table", default=None)


def makes_pages() -> bool:
    """True if caches that are made now lie in pages."""
    return _table.get() is not None


def new_cache(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """The KV cache of one runner: in the pages of the decoder that is being made, if any (``PageTable.making``)."""
    table = _table.get()
    if table is None:
        return KVCache(num_layers, num_kv_heads, head_dim, dtype, device)
    return table.cache(num_layers, num_kv_heads, head_dim, dtype, device)


@contextmanager
def other_rows(num_slots: int) -> Iterator[None]:
    """While this context is open, KV caches have rows of other lengths than the target's, of up to ``num_slots``."""
    table = _table.get()
    token = _table.set(None if table is None else table.apart(num_slots))
    try:
        yield
    finally:
        _table.reset(token)


class Prefix(NamedTuple):
    """The start of a text that is in known pages."""

    pages: list[int]  # whole pages, which can be shared
    partial: int | None  # a page whose first slots continue them, to be copied; None if there is none
    num_slots: int  # slots in both


class Prefixes:
    """Finds pages by the tokens they hold: all tokens up to them are compared, so no two prefixes can be confused.

    A drafter's slot may depend on the token after its position (entry i of an EAGLE head reads feature i and token i +
    1), so a slot counts only if the token after it is the same, too. ``table`` reuses pages that no row holds when it
    needs them, the oldest first.
    """

    def __init__(self, table: PageTable) -> None:
        self._table = table
        # Tokens of the known pages that follow a whole page, and of the token after each, sorted; none begins another.
        self._after: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}  # by page: what it follows, and its tokens
        self._numbers: dict[int, int] = {}  # by page: a number that no other page ever gets; 0 is the start of a text
        self._next = 1

    def __len__(self) -> int:
        """Number of known pages."""
        return len(self._keys)

    def __contains__(self, page: int) -> bool:
        """True if a page is known: it is kept after its last holder has released it, as long as there is room."""
        return page in self._keys

    def clear(self) -> None:
        """Forget all pages."""
        self._after, self._keys, self._numbers = {}, {}, {}

    def find(self, tokens: Sequence[int]) -> Prefix:
        """The known start of ``tokens``, without its last two tokens at least."""
        pages, before = list[int](), 0
        while True:
            start = len(pages) * PAGE
            page, num_common = self._nearest(before, tuple(tokens[start : min(start + PAGE + 1, len(tokens) - 1)]))
            if num_common <= PAGE:
                num_copied = max(num_common - 1, 0)
                return Prefix(pages, page if num_copied else None, start + num_copied)
            pages.append(page)
            before = self._numbers[page]

    def remember(self, tokens: Sequence[int], pages: Sequence[int], num_valid: int) -> None:
        """Keep the pages of a row, of which the first ``num_valid`` slots are final."""
        before, end = 0, min(num_valid, len(tokens) - 1)
        for start, page in zip(range(0, end, PAGE), pages, strict=False):
            key = tuple(tokens[start : min(start + PAGE, end) + 1])
            known, num_common = self._nearest(before, key)
            if num_common < len(key):
                if num_common and num_common == len(self._keys[known][1]):  # the other page holds less
                    self.drop([known])
                self.remove(page)  # it may be known by other tokens
                known = page
                insort(self._after.setdefault(before, []), (key, page))
                self._keys[page], self._numbers[page] = (before, key), self._next
                self._next += 1
            before = self._numbers[known]

    def drop(self, pages: Sequence[int]) -> None:
        """Forget pages whose content is wrong or is held by another page."""
        for page in pages:
            if self.remove(page):
                self._table.forget(page)

    def _nearest(self, before: int, key: tuple[int, ...]) -> tuple[int, int]:
        """The page after ``before`` that has most of its first tokens in common with ``key``, and their number."""
        siblings = self._after.get(before, [])
        place = bisect_left(siblings, (key,))
        page, longest = 0, 0
        for tokens, other in siblings[max(place - 1, 0) : place + 1]:
            num = next(
                (i for i, (a, b) in enumerate(zip(tokens, key, strict=False)) if a != b), min(len(tokens), len(key))
            )
            if num > longest:
                page, longest = other, num
        return page, longest

    def remove(self, page: int) -> bool:
        """Forget what a page holds, for example because it is reused; False if that is not known."""
        key = self._keys.pop(page, None)
        if key is None:
            return False
        before, tokens = key
        siblings = self._after[before]
        del siblings[bisect_left(siblings, (tokens, page))]
        if not siblings:
            del self._after[before]
        del self._numbers[page]
        return True
