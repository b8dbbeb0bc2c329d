"""KV slots in pages of a stated amount of memory: no row needs as many slots as the longest one.

Slot i of row b lies in page ``rows[b][i // PAGE]``, the same in every cache of a decoder: the target's, and those that
its drafter keeps. So one table says where everything lies, rows come and go without a copy, and rows whose texts begin
alike share pages. The first page belongs to nobody and stays zeros: rows look there past their own pages. Rows that
only fill a recording's bucket write into the last one.

Shape suffixes: L layers, B rows, N nodes, K heads, S slots, D head dimension, P pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor

from draftwing.errors import ConfigError, SlotsError
from draftwing.models.cache import KEY_BLOCK, KVCache
from draftwing.torch_utils import clear

PAGE = KEY_BLOCK  # slots
SPARE = 2  # pages that belong to no row
MARGIN = 4160  # slots behind the longest text, for the widest tree that a budget may ask for


class SlotsExhausted(SlotsError):
    """A row needs a page, and there is none: whoever runs the loop makes room and asks again."""


def pages_of(num_slots: int) -> int:
    """Pages that hold so many slots."""
    return -(-num_slots // PAGE)


class SlotTable:
    """Which pages belong to whom. Used by the one thread that steps.

    Args:
        num_rows: that there may be at once.
        num_slots: of a row at most.

    Attributes:
        rows: the pages of each row, in the order of the context's rows; behind them, for the time of a forward, those
            of a prompt that is being read.
        uses: of each page, how many hold it.
        caches: all that lie in these pages.
        generation: how often everything was dropped.
        num_pages: that rows may hold.
    """

    def __init__(self, num_rows: int, num_slots: int) -> None:
        # Twice as many: where one row catches up with its text, others have as many entries, of which most are none.
        self.array = np.zeros((num_rows, pages_of(2 * num_slots + MARGIN)), dtype=np.int32)
        self.address, self.stride = self.array.ctypes.data, self.array.shape[1]
        self.rows: list[list[int]] = []
        self.caches: list[PagedCache] = []
        self._unclaimed: list[PagedCache] = []
        self.num_pages, self.generation = 0, 0
        self.uses: list[int] = []
        self._free: list[int] = []  # pages that hold nothing
        self._kept: dict[int, None] = {}  # pages that nobody uses and that are worth keeping, the oldest first
        self._is_known: set[int] = set()  # pages that somebody may ask for again
        self.forgotten: list[int] = []  # of these, those that went since ``forgotten`` was last emptied
        self._mirror: Tensor | None = None
        self._is_changed = True

    # --- the caches ------------------------------------------------------------------------------------------------

    @contextmanager
    def making(self) -> Iterator[None]:
        """Whatever makes a KV cache meanwhile (a context, a drafter) makes it in these pages."""
        token = _table.set(self)
        try:
            yield
        finally:
            _table.reset(token)

    def cache(
        self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> PagedCache:
        """A new cache; after ``restart``, one of the same shape whose owner is gone."""
        made = PagedCache(self, num_layers, num_kv_heads, head_dim, dtype, device)
        for place, old in enumerate(self._unclaimed):
            if old.key == made.key:
                return self._unclaimed.pop(place)
        self.caches.append(made)
        made.allocate(self.num_pages + SPARE if self.num_pages else 0)
        return made

    @property
    def num_page_bytes(self) -> int:
        """Bytes of one page, in all caches together."""
        return sum(cache.num_page_bytes for cache in self.caches)

    def allocate(self, num_bytes: int) -> None:
        """Take so much memory for all caches together, once they are made.

        Raises:
            ConfigError: it holds too few slots for any text.
        """
        self.num_pages = num_bytes // self.num_page_bytes - SPARE
        if self.num_pages < 2:
            raise ConfigError(
                f"kv_memory of {num_bytes:,} bytes holds no text: {PAGE} slots of target and drafter take "
                f"{self.num_page_bytes:,} bytes, and at least four times as much is needed"
            )
        for cache in self.caches:
            cache.allocate(self.num_pages + SPARE)
        self.restart()
        self._unclaimed = []

    def restart(self) -> None:
        """Drop every row, and all that is kept: caches that are made next take the memory of those that there are."""
        self.rows, self.uses = [], [0] * (self.num_pages + 1)
        self._free = [*range(self.num_pages, 0, -1)]
        self._kept, self._is_known, self.forgotten = {}, set(), []
        self._unclaimed = list(self.caches)
        self.generation += 1
        for cache in self.caches:
            cache.leads = False
        self.array[:] = 0
        self._is_changed = True

    # --- rows ------------------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Pages that can be had, those that are only kept among them."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Pages that are kept and belong to nobody."""
        return len(self._kept)

    def hold(self, first_row: int, lengths: Sequence[int], extra: int) -> None:
        """See that each row from ``first_row`` on has slots for its length and ``extra`` more.

        Raises:
            SlotsExhausted: there are not enough pages.
        """
        while len(self.rows) < first_row + len(lengths):
            self.rows.append([])
        for row, length in enumerate(lengths, first_row):
            if len(self.rows[row]) * PAGE < length + extra:
                self._grow(row, pages_of(length + extra))
        if self._mirror is not None and self._is_changed:
            self._upload()

    def num_missing(self, lengths: Sequence[int], extra: int) -> int:
        """Pages that ``hold(0, lengths, extra)`` would take."""
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
        """A page of zeros: what a former request left there may be NaN, which no mask keeps out (0 * NaN is NaN)."""
        if self._free:
            page = self._free.pop()
        else:
            page = next(iter(self._kept))
            del self._kept[page]
            self._is_known.discard(page)
            self.forgotten.append(page)
        self.uses[page] = 1
        for cache in self.caches:
            clear(cache.data[..., page * PAGE : (page + 1) * PAGE, :])
        return page

    def attach(self, row: int, pages: list[int]) -> None:
        """Make these the pages of the row behind the last one."""
        del self.rows[row:]
        self.rows.append(pages)
        self.array[row] = 0
        self.array[row, : len(pages)] = pages
        self._is_changed = True

    def detach(self, row: int) -> list[int]:
        """Take the last row out again; its pages stay with whoever asks."""
        pages = self.rows.pop(row)
        self.array[row, : len(pages)] = 0
        self._is_changed = True
        return pages

    def remove(self, row: int, last: int) -> None:
        """Let a row's pages go; row ``last`` takes its place."""
        del self.rows[last + 1 :]  # what an interrupt may have left there
        gone, moved = self.rows[row], self.rows.pop()
        self.array[len(self.rows)] = 0
        if row < len(self.rows):
            self.rows[row] = moved
            self.array[row] = 0
            self.array[row, : len(moved)] = moved
        self.release(gone)
        self._is_changed = True

    # --- pages that several hold, or nobody ------------------------------------------------------------------------

    def share(self, page: int) -> None:
        """One more holds a page that is known."""
        self._kept.pop(page, None)
        self.uses[page] += 1

    def remember(self, page: int) -> None:
        """Keep a page, once nobody holds it any more, for as long as there is room."""
        self._is_known.add(page)

    def forget(self, page: int) -> None:
        """Keep a page no longer."""
        self._is_known.discard(page)
        if page in self._kept:
            del self._kept[page]
            self._free.append(page)

    def release(self, pages: list[int]) -> None:
        """One fewer holds these; of a text that is kept, the end goes first."""
        for page in reversed(pages):
            self.uses[page] -= 1
            if self.uses[page]:
                continue
            if page in self._is_known:
                self._kept[page] = None
            else:
                self._free.append(page)
        pages.clear()

    def recount(self, others: Sequence[Sequence[int]] = ()) -> None:
        """Count anew who holds what, after an interrupt: rows, and ``others`` beside them."""
        self.uses = [0] * (self.num_pages + 1)
        for pages in (*self.rows, *others):
            for page in pages:
                self.uses[page] += 1
        idle = [page for page in range(self.num_pages, 0, -1) if not self.uses[page]]
        order = [*(page for page in self._kept if not self.uses[page]), *idle]  # the oldest first
        self._free = [page for page in idle if page not in self._is_known]
        self._kept = {page: None for page in order if page in self._is_known}

    def check(self, others: Sequence[Sequence[int]] = ()) -> None:
        """Raise SlotsError where pages are lost or held twice; ``others`` hold some beside the rows."""
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
                f"{len(idle) - len(set(idle))} are free twice: this is a bug of Draftwing, please report it"
            )
        for row, pages in enumerate(self.rows):
            if self.array[row, : len(pages)].tolist() != pages:
                raise SlotsError(f"row {row} looks at other pages than it holds: this is a bug of Draftwing")

    # --- the table on a device -------------------------------------------------------------------------------------

    def tensor(self, device: torch.device) -> Tensor:
        """(B, P) int32 on a device: always the same memory, brought up to date by ``hold``."""
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
    """Keys and values of all layers in pages: (L, 2, 1, K, P * PAGE, D). Rows are made by ``hold``.

    Attributes:
        leads: whether it is the target's, whose rows are the table's.
    """

    def __init__(
        self,
        table: SlotTable,
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
        """Rows that the table has."""
        return int(self.table.array.shape[0])

    @property
    def num_slots(self) -> int:
        """Slots that a row may have."""
        return int(self.table.stride) * PAGE

    def allocate(self, num_pages: int) -> None:
        """Make all pages. Whoever takes one clears it; those that belong to no row are cleared here."""
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
        """Row ``target`` leaves, and ``source``, the last one, takes its place: in the table, and once for all caches.

        The target's rows are dropped last, after those of a drafter.
        """
        if self.leads:
            self.table.remove(target, source)

    def place(self, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        pages: Tensor = self.table.tensor(slots.device)[rows, slots // PAGE]
        return torch.zeros_like(slots), pages * PAGE + slots % PAGE


_table: ContextVar[SlotTable | None] = ContextVar("table", default=None)


def makes_pages() -> bool:
    """Whether caches that are made now lie in pages."""
    return _table.get() is not None


def new_cache(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """Slots for one runner: of its own, or in the pages of the decoder that is being made (``SlotTable.making``)."""
    table = _table.get()
    if table is None:
        return KVCache(num_layers, num_kv_heads, head_dim, dtype, device)
    return table.cache(num_layers, num_kv_heads, head_dim, dtype, device)
