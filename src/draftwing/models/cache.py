"""KV slots: row b's committed token at position i lies in slot i, node i of its tree in slot length_b + i.

A ragged batch needs no special case, and committing an accepted path is one gather.

Shape suffixes: L layers, B rows, N nodes, K heads, S slots, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from draftwing.errors import ConfigError, UnsupportedError, shown
from draftwing.torch_utils import clear, put
from draftwing.tree import PAD

KEY_BLOCK = 64  # slots are allocated in multiples of this
SPARE = 256  # slots beyond those requested: a sequence grows, and moving its slots takes as long as some steps
_ALIGNMENT = 64  # bytes, as PyTorch aligns its own memory


def check_kv_dtype(kv_dtype: str | None, runtime: str = "kernel") -> None:
    """Raise ConfigError unless it is "int8" or None, and UnsupportedError if ``runtime`` cannot use it."""
    if kv_dtype is not None and (not isinstance(kv_dtype, str) or kv_dtype != "int8"):
        raise ConfigError(f"kv_dtype must be int8 or None, found {shown(kv_dtype)}")
    if kv_dtype is not None and runtime != "kernel":
        raise UnsupportedError(
            f"kv_dtype={kv_dtype!r} runs in the CPU kernel alone, which is not available for this model, device or "
            f"dtype (see draftwing info): choose device='cpu' and dtype='float32', or leave kv_dtype out"
        )


def round_up(number: int, block: int) -> int:
    """Round up to a multiple of ``block``."""
    return -(-number // block) * block


@dataclass(frozen=True)
class View:
    """The committed slots that a forward reads, as indices; nothing is copied."""

    # (B, L, K, M) int32, ascending along M; L or K is 1 if all layers or KV heads read the same slots. M is at least 1.
    slots: Tensor
    counts: Sequence[int]  # (B,) valid slots of each row; those after them are undefined


class RowStates(Protocol):
    """The states of rows in recurrent layers: ``recurrent.RecurrentStates``, or the CPU kernel's."""

    def clear(self, row: int) -> None:
        """Forget a row."""

    def move(self, source: int, target: int) -> None:
        """Let row ``source`` take the place of ``target``; if they are the same, forget it."""

    def commit(self, row: int, nodes: Sequence[int]) -> None:
        """Take the states after the accepted nodes of the last forward, from the root on."""


class KVCache:
    """Keys and values of all layers in one tensor (L, 2, B, K, S, D), grown by doubling.

    Memory: ``2 * L * K * D * itemsize`` bytes per slot and row.
    """

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = (num_layers, 2, num_kv_heads, head_dim)
        self.table: Any = None  # a ``paged.PageTable`` if slots lie in pages
        self.data = torch.zeros(num_layers, 2, 0, num_kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.states: RowStates | None = None  # if there are recurrent layers
        # Forwards multiply unused slots by 0, so these must not hold NaN of an earlier request (0 * NaN is NaN).
        self.reads_unused = True
        self._written: set[int] = set()  # rows that have been used

    @property
    def num_rows(self) -> int:
        """Allocated rows."""
        return self.data.shape[2]

    @property
    def num_slots(self) -> int:
        """Slots of each row."""
        return self.data.shape[4]

    def reserve(self, num_rows: int, num_slots: int) -> None:
        """Make room for rows and slots; the content stays. Unused slots are zero, never NaN."""
        if num_rows <= self.num_rows and num_slots <= self.num_slots:
            return
        rows, slots = self.num_rows, self.num_slots
        new_rows = rows if num_rows <= rows else max(num_rows, 2 * rows)
        new_slots = (
            slots if num_slots <= slots else max(round_up(num_slots + SPARE, KEY_BLOCK), min(2 * slots, slots + 4096))
        )
        layers, two, heads, dim = self._shape
        self.data = grown(self.data, (layers, two, new_rows, heads, new_slots, dim))

    def hold(self, first_row: int, lengths: Sequence[int], extra: int) -> None:
        """Make room for ``lengths`` slots of the rows from ``first_row`` on, and ``extra`` more slots of each."""
        self.reserve(first_row + len(lengths), max(lengths) + extra)

    def place(self, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The positions of slots as indices of the third and the fifth dimension of ``data``."""
        return rows, slots

    def clear(self, row: int) -> None:
        """Begin a request in a row: zero its slots, if unused ones are read."""
        if self.states is not None:
            self.states.clear(row)
        if self.reads_unused and (row in self._written or self.data.device.type != "cpu"):
            clear(self.data[:, :, row])
        self._written.add(row)

    def move_row(self, source: int, target: int) -> None:
        """Copy one row over another, which keeps the batch dense when a row leaves."""
        if self.states is not None:
            self.states.move(source, target)
        if source != target:
            put(self.data[:, :, target], self.data[:, :, source])

    def commit(self, lengths: Tensor, path: Tensor) -> None:
        """Move the kept nodes of every row, (B, D) padded with PAD, to the slots after ``lengths`` (B,)."""
        width = path.shape[1]
        if width <= 1:
            return
        order = torch.arange(width, device=path.device)
        target = lengths[:, None] + order
        source = torch.where(path == PAD, target, lengths[:, None] + path)
        rows = torch.arange(path.shape[0], device=path.device)[:, None]
        into, at = self.place(rows, target)
        came, was = self.place(rows, source)
        self.data[:, :, into, :, at] = self.data[:, :, came, :, was]


def grown(data: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a larger tensor that begins with ``data`` in every dimension; the rest is zeros."""
    larger = _zeros(shape, data)
    put(larger[tuple(slice(size) for size in data.shape)], data)
    return larger


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros of the dtype and on the device of ``like``.

    Fresh memory of the operating system is zero, and takes no time or space before it is written. PyTorch would write
    all of it, with threads that a forked process does not have.
    """
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = math.prod(shape) * like.element_size()
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(like.dtype).view(shape)
