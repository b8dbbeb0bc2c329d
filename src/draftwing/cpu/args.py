"""Arguments and results of kernel calls: arrays that one call reads, and memory that it writes.

Shape suffixes: B rows, N nodes.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwing.cpu import layout
from draftwing.cpu.layout import BatchStruct, Filter
from draftwing.models.cache import View
from draftwing.noise import AcceptArgs
from draftwing.tree import Accepted, Emitted

MAX_KEPT_BLOCKS = 3  # blocks of a ``BufferPool``: logits of the last steps may still be referenced
MAX_OVERSIZE = 4  # a pooled block may be this many times larger than the request


class KernelArgs:
    """Arrays that one kernel call reads; keep this object until the call returns.

    Methods copy values into an array of one C type and return its address.
    """

    def __init__(self) -> None:
        self._arrays: list[object] = []

    def numbers(self, code: str, values: Iterable[float]) -> int:
        """An array of one type, by its code in the module ``array``: ``q`` int64, ``i`` int32, ``f`` float32."""
        numbers = array(code, values)
        self._arrays.append(numbers)
        return numbers.buffer_info()[0]

    def structures(self, values: Sequence[ctypes.Structure]) -> int:
        """An array of structures of one type."""
        together = (type(values[0]) * len(values))(*values)
        self._arrays.append(together)
        return ctypes.addressof(together)

    def tensor(self, values: Tensor) -> int:
        """The address of a contiguous tensor, without a copy."""
        self._arrays.append(values)
        return values.data_ptr()

    def set_view(self, batch: BatchStruct, view: View | None, watched: Tensor | None = None) -> None:
        """Set the KV slots that attention reads, and where their attention weights are summed (``Entries``)."""
        if watched is not None:
            batch.watch = self.tensor(watched)
            batch.watch_layer, batch.watch_head = watched.stride()[:2]
        if view is not None:
            slots = view.slots
            batch.view, batch.viewed = self.tensor(slots), self.numbers("q", view.counts)
            strides = (0 if size == 1 else stride for size, stride in zip(slots.shape, slots.stride(), strict=True))
            batch.view_row, batch.view_layer, batch.view_head, *_ = strides


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


class AcceptResult:
    """``accept.match`` in the kernel: its arguments, and the result for trees of at most ``nodes`` nodes.

    Attributes:
        args: valid as long as this object.
        arrays: what ``args`` refers to; others of the same call may be added.
    """

    def __init__(self, accept: AcceptArgs, rows: int, nodes: int) -> None:
        self._rows, self._nodes, self.arrays = rows, nodes, KernelArgs()
        self._found = torch.empty(rows * (5 + 2 * nodes), dtype=torch.int64)
        seeds, filters = self.arrays.numbers("q", [*accept.seeds, *accept.starts]), None
        if accept.filters is not None:
            filters = self.arrays.structures([Filter(*row) for row in zip(*accept.filters, strict=True)])
        self.args = layout.AcceptStruct(accept.noise, seeds, seeds + 8 * rows, filters, self._found.data_ptr())

    def read(self, nodes: int | None = None) -> Accepted:
        """The kept nodes, after the kernel has run; ``nodes`` of the trees, if there were fewer."""
        nodes, longest, emitted = nodes or self._nodes, 0, []
        found = self._found[: self._rows * (5 + 2 * nodes)].view(self._rows, -1)
        for numbers in found.numpy().tolist():
            num, _, used, depth, finite = numbers[:5]
            emitted.append(Emitted(numbers[5 + nodes : 6 + nodes + num], used - 1, depth, finite > 0))
            longest = max(longest, num)
        return Accepted(found[:, 5 : 6 + longest], found[:, 0], found[:, 1], emitted)
