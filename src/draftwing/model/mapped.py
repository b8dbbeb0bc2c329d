"""A file in memory as it lies on disk: its tensors are views, and what was read can be given back."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["MappedFile", "as_numbers"]


class MappedFile:
    """A file, mapped: pages come as they are read. Tensors stay valid when this object is gone.

    A file that is cut short while it is mapped ends the process where a page that is gone is read (SIGBUS). That it is
    still whole is looked at for each tensor, which leaves little time for it; nothing can rule it out.

    Raises:
        OSError, ValueError: it cannot be opened or mapped, or is empty.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # Copy on write: PyTorch warns of memory that it may not write to. Nothing does.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.size = len(self._map)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def tensor(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The numbers from byte ``start`` on. They may lie at any address. Raises ValueError beyond the file's end."""
        count = math.prod(shape)
        if self._map.size() < self.size:
            raise ValueError(f"the file was cut short to {self._map.size()} of {self.size} bytes")
        if start < 0 or start + count * dtype.itemsize > self.size:
            raise ValueError(f"bytes {start} to {start + count * dtype.itemsize} of a file of {self.size}")
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        found = torch.frombuffer(self._map, dtype=torch.uint8, count=count * dtype.itemsize, offset=start)
        return as_numbers(found, dtype).view(tuple(shape))

    def drop(self, tensor: Tensor) -> None:
        """Give back the pages under a tensor of this file; they are read again if they are looked at again."""
        start = tensor.data_ptr() - self._start
        if 0 <= start < self.size and hasattr(mmap, "MADV_DONTNEED"):
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, min(start + tensor.nbytes, self.size) - first)


def as_numbers(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes (..., bytes) uint8 as numbers; copied only where they do not lie as the processor wants them."""
    return (data.clone() if data.data_ptr() % dtype.itemsize else data).view(dtype)
