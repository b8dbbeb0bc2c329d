"""Memory for weights, and for what a call into the kernel gives out."""

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

__all__ = ["LargePages", "Reused", "Slab"]

SIZE = 1 << 13
BLOCKS = 3  # that are kept
LARGER = 4  # times what is asked for: larger blocks are not handed out
LARGE_PAGE = 1 << 21  # bytes
SHARED = 16 * LARGE_PAGE  # that tensors of up to half as many share
LINE = 64  # bytes, of a cache


class LargePages:
    """Hands out tensors side by side in large pages: matrices of a small model are smaller than one each.

    A page lives as long as any of its tensors. Threads may ask at once.

    Args:
        expect: tells the system that so many bytes from an address on, where a large page begins, will be filled.
    """

    def __init__(self, expect: Callable[[int, int], None]) -> None:
        self._expect, self._lock = expect, threading.Lock()
        self._pages: Callable[[], npt.NDArray[np.uint8] | None] = lambda: None  # nobody but their tensors holds them
        self._at = 0

    def take(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor of anything, which begins a line of the cache."""
        count = math.prod(shape) * dtype.itemsize
        if 2 * count > SHARED:
            pages, at = self._fresh(count)
        else:
            with self._lock:
                found = self._pages()
                if found is None or self._at + count > len(found):
                    found, self._at = self._fresh(SHARED)
                    self._pages = weakref.ref(found)
                pages, at = found, self._at
                self._at += count + -count % LINE
        return torch.from_numpy(pages[at : at + count]).view(dtype).view(shape)  # whose views keep the pages alive

    def _fresh(self, count: int) -> tuple[npt.NDArray[np.uint8], int]:
        """Pages, and where the first one begins."""
        pages = np.empty(count + LARGE_PAGE, np.uint8)
        start = -pages.ctypes.data % LARGE_PAGE
        self._expect(pages.ctypes.data + start, count)
        return pages, start


class Reused:
    """Hands out float32 tensors, and their memory again as soon as nobody looks at it any more.

    A step asks for as much as its largest tree would need. Memory of that size, freed and allocated in each step, goes
    back to the system in between, which makes its pages anew: a twentieth of the step of a small model.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[npt.NDArray[Any], int, weakref.ref[npt.NDArray[Any]]]] = []  # address, who looks at it

    def take(self, rows: int, width: int) -> tuple[Tensor, int]:
        """A tensor (rows, width) of anything, and where it lies."""
        count = rows * width
        fits = (
            at
            for at, (block, _, user) in enumerate(self._blocks)
            if user() is None and count <= len(block) <= LARGER * count
        )
        if (place := next(fits, None)) is None:
            block = np.empty(count, np.float32)
            address = block.ctypes.data
            del self._blocks[: 1 - BLOCKS]
        else:
            block, address, _ = self._blocks.pop(place)
        shaped = block[:count].reshape(rows, width)
        self._blocks.append((block, address, weakref.ref(shaped)))
        return torch.from_numpy(shaped), address  # whose views keep ``shaped`` alive


class Slab:
    """Hands out arrays of one type, each once; what they lie in lives as long as any of them.

    To ask an array for its address takes longer than to fill it where everything else went through the caches in
    between, so arrays are cut off a larger one whose address is known.
    """

    def __init__(self, dtype: type[np.generic]) -> None:
        self._dtype, self._bytes, self._at = dtype, np.dtype(dtype).itemsize, 0
        self._memory: npt.NDArray[Any] = np.empty(0, dtype)
        self._address = 0

    def take(self, count: int) -> tuple[npt.NDArray[Any], int]:
        """An array (count,) of anything, and where it lies."""
        at = self._at
        if at + count > len(self._memory):
            self._memory, at = np.empty(max(SIZE, count), self._dtype), 0
            self._address = self._memory.ctypes.data
        self._at = at + count
        return self._memory[at : at + count], self._address + at * self._bytes
