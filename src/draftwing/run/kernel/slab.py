"""Memory for the few numbers that a call into the kernel gives out.

To ask an array for its address takes longer than to fill it where everything else went through the caches in between,
so arrays are cut off a larger one whose address is known.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Slab"]

SIZE = 1 << 13


class Slab:
    """Hands out arrays of one type, each once; what they lie in lives as long as any of them."""

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
