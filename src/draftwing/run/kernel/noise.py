"""Keyed noise as the CPU kernel makes it, and the walk down a tree with it."""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftwing.errors import DraftwingWarning
from draftwing.noise import Filters, KeyedNoise
from draftwing.run.kernel.library import Kernel, get_kernel, kernel_notice
from draftwing.tree import Accepted, DraftTree, Emitted

__all__ = ["NativeNoise", "noise_of"]

_told: set[str] = set()


def noise_of(vocab_size: int, device: torch.device) -> KeyedNoise:
    """Keyed noise, made by the kernel where there is one. Where there should be, and is not, it warns once."""
    if device.type != "cpu":
        return KeyedNoise(vocab_size, device)
    notice = kernel_notice()
    if notice and notice not in _told:
        _told.add(notice)
        warnings.warn(notice, DraftwingWarning, stacklevel=2)
    kernel = get_kernel()
    return KeyedNoise(vocab_size, device) if kernel is None else NativeNoise(kernel, vocab_size)


class _Filter(ctypes.Structure):
    """``Filter`` of ``native/filters.h``."""

    _fields_ = (
        ("temperature", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("top_p", ctypes.c_float),
        ("min_p", ctypes.c_float),
    )


def _as_structures(filters: Filters) -> ctypes.Array[_Filter]:
    found = [_Filter(*row) for row in zip(*filters, strict=True)]
    return (_Filter * len(found))(*found)


class NativeNoise(KeyedNoise):
    """Keyed noise that the kernel makes and keeps, and reads itself where it drafts and where it walks trees.

    Attributes:
        handle: the ``NoiseStore`` of ``native/noise.h``.
    """

    def __init__(self, kernel: Kernel, vocab_size: int, capacity: int = 256) -> None:
        super().__init__(vocab_size)
        self._kernel = kernel
        self.handle = kernel.noise_new(vocab_size, capacity)
        weakref.finalize(self, kernel.noise_free, self.handle)

    def at(self, seed: int, position: int) -> Tensor:
        """(V,) float32, a copy."""
        out = torch.empty(self.vocab_size)
        self._kernel.noise_copy(self.handle, seed, position, 1, out.data_ptr())
        return out

    def block(self, seeds: Sequence[int], starts: Sequence[int], num_positions: int) -> Tensor:
        """See ``KeyedNoise.block``."""
        out = torch.empty(len(seeds), num_positions, self.vocab_size)
        for row, (seed, start) in enumerate(zip(seeds, starts, strict=True)):
            self._kernel.noise_copy(self.handle, seed, start, num_positions, out[row].data_ptr())
        return out

    def walk(
        self,
        tree: DraftTree,
        scores: Tensor,
        seeds: Sequence[int],
        starts: Sequence[int],
        filters: Filters | None = None,
    ) -> Accepted | None:
        """See ``KeyedNoise.walk``; of float32 scores."""
        rows, nodes, vocab = scores.shape
        if scores.dtype != torch.float32 or vocab != self.vocab_size or not scores.is_contiguous():
            return None
        tokens, parents = tree.tokens.contiguous(), tree.parents.contiguous()
        width, whole = 5 + 2 * nodes, ctypes.c_int64 * rows
        found = (ctypes.c_int64 * (rows * width))()
        self._kernel.walk(
            self.handle, scores.data_ptr(), rows, nodes, tokens.data_ptr(), parents.data_ptr(),
            whole(*seeds), whole(*starts), filters if filters is None else _as_structures(filters), found,
        )  # fmt: skip
        numbers, longest, on_host = found[:], 0, []
        for at in range(0, rows * width, width):
            num, _, used, depth, finite = numbers[at : at + 5]
            emitted = at + 5 + nodes
            longest = max(longest, num)
            on_host.append(Emitted(numbers[emitted : emitted + num + 1], used - 1, depth, finite > 0))
        columns = np.frombuffer(memoryview(found), np.int64).reshape(rows, width)  # its views cost less than tensors'
        path, num_kept, bonus = map(torch.from_numpy, (columns[:, 5 : 6 + longest], columns[:, 0], columns[:, 1]))
        return Accepted(path, num_kept, bonus, on_host)
