"""Memory for weights and for the results of kernel calls."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK_ITEMS = 1 << 13  # of a ``BumpAllocator``: some hundred steps
MAX_KEPT_BLOCKS = 3  # of a ``BufferPool``: logits of the last steps may still be referenced
MAX_OVERSIZE = 4  # a pooled block may be this many times larger than the request
HUGE_PAGE_BYTES = 1 << 21
SHARED_BYTES = 16 * HUGE_PAGE_BYTES  # shared by tensors of at most half that size
CACHE_LINE_BYTES = 64


class HugePageArena:
    """Allocates tensors side by side in huge pages, since the matrices of a small model are smaller than one each.

    A page lives as long as any of its tensors. Thread-safe.

    Args:
        advise: asks the system for huge pages, given an address that begins one and a number of bytes.
    """

    def __init__(self, advise: Callable[[int, int], None]) -> None:
        self._advise, self._lock = advise, threading.Lock()
        self._pages: Callable[[], npt.NDArray[np.uint8] | None] = lambda: None  # a weak reference: tensors own pages
        self._offset = 0

    def take(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised, cache-line-aligned tensor."""
        count = math.prod(shape) * dtype.itemsize
        if 2 * count > SHARED_BYTES:
            pages, offset = self._allocate(count)
        else:
            with self._lock:
                current = self._pages()
                if current is None or self._offset + count > len(current):
                    current, self._offset = self._allocate(SHARED_BYTES)
                    self._pages = weakref.ref(current)
                pages, offset = current, self._offset
                self._offset += count + -count % CACHE_LINE_BYTES
        return (
            torch.from_numpy(pages[offset : offset + count]).view(dtype).view(shape)
        )  # its views keep the pages alive

    def _allocate(self, count: int) -> tuple[npt.NDArray[np.uint8], int]:
        """Memory, and the offset of its first huge page."""
        pages = np.empty(count + HUGE_PAGE_BYTES, np.uint8)
        start = -pages.ctypes.data % HUGE_PAGE_BYTES
        self._advise(pages.ctypes.data + start, count)
        return pages, start


class BufferPool:
    """Float32 buffers that are reused as soon as no tensor refers to them.

    A fused step asks for as much as its largest tree would need. Memory of that size, freed and allocated in each step,
    would be returned to the system and zeroed again: 5% of a small model's step.
    """

    def __init__(self) -> None:
        # Block, address, and a weak reference to the array that is in use.
        self._blocks: list[tuple[npt.NDArray[Any], int, weakref.ref[npt.NDArray[Any]]]] = []

    def take(self, rows: int, width: int) -> tuple[Tensor, int]:
        """An uninitialised tensor (rows, width), and its address."""
        count = rows * width
        free = (
            index
            for index, (block, _, user) in enumerate(self._blocks)
            if user() is None and count <= len(block) <= MAX_OVERSIZE * count
        )
        if (index := next(free, None)) is None:
            block = np.empty(count, np.float32)
            address = block.ctypes.data
            del self._blocks[: 1 - MAX_KEPT_BLOCKS]
        else:
            block, address, _ = self._blocks.pop(index)
        array = block[:count].reshape(rows, width)
        self._blocks.append((block, address, weakref.ref(array)))
        return torch.from_numpy(array), address  # its views keep ``array`` alive


class BumpAllocator:
    """Allocates arrays of one type, each once, from blocks that live as long as any of their arrays.

    Asking a new array for its address takes longer than filling it if the caches are cold, so arrays are cut from a
    block whose address is known.
    """

    def __init__(self, dtype: type[np.generic]) -> None:
        self._dtype, self._itemsize, self._offset = dtype, np.dtype(dtype).itemsize, 0
        self._block: npt.NDArray[Any] = np.empty(0, dtype)
        self._address = 0

    def take(self, count: int) -> tuple[npt.NDArray[Any], int]:
        """An uninitialised array (count,), and its address."""
        offset = self._offset
        if offset + count > len(self._block):
            self._block, offset = np.empty(max(BLOCK_ITEMS, count), self._dtype), 0
            self._address = self._block.ctypes.data
        self._offset = offset + count
        return self._block[offset : offset + count], self._address + offset * self._itemsize
