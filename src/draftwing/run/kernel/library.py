"""A whole forward in one call: the CPU kernel.

Decoding a small model through PyTorch spends most of its time between the operators. Here the layers of a decoder
are one *program*, a list of operations over buffers of rows, which is walked in one parallel region. It also
gives every row the same bits whatever stands beside it, in any tree, so that speculative decoding in float32 is
exact to the bit, and so is int8.

The C++ in ``native`` is compiled where it is first used (``build``). Without a compiler everything runs through
PyTorch, slower; ``DRAFTWING_KERNEL=off`` asks for that.

``program`` says what runs. Shape suffixes: B rows, K heads, S slots, D head dimension or depth, V vocabulary.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.model.paged import SlotTable
from draftwing.run.kernel.build import KernelProblem, with_library
from draftwing.run.kernel.layout import Ahead, Batch, Draft, Op, Walk, set_cache
from draftwing.run.kernel.selftest import fault_of
from draftwing.run.kernel.slab import LargePages

__all__ = ["Kernel", "get_kernel", "kernel_notice", "kernel_problem", "required_kernel"]

_SYSTEMS = ("linux", "darwin")


class Kernel:
    """The compiled library, with as many threads as PyTorch is told to take.

    Attributes:
        name: another one for other code.
        has_tiles: whether products of 8 and 16 bits run on the processor's tiles (AMX); never with
            ``DRAFTWING_KERNEL_AMX=off``.
        run: walks so many operations: ops, their number, a ``Batch``, threads (``draftwing_run``).
        walk: descends in trees by their scores (``draftwing_walk``).
        verify: both, and moves what is kept to its slots (``draftwing_verify``).
        draft: grows trees with a program, and verifies them where it is told how (``draftwing_draft``); how many nodes
            they have.
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self.run, self._commit = library.draftwing_run, library.draftwing_commit
        self.run.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32]
        self.run.restype = None
        self.draft = library.draftwing_draft
        self.draft.argtypes = [ctypes.c_void_p, ctypes.c_int32, *[ctypes.c_void_p] * 4, ctypes.c_int32]
        self._commit.argtypes = [
            ctypes.c_void_p, *[ctypes.c_int32] * 3, ctypes.c_void_p, *[ctypes.c_int32] * 2,
        ]  # fmt: skip
        self._commit.restype = None
        self.noise_new, self.noise_free = library.draftwing_noise_new, library.draftwing_noise_free
        self.noise_new.argtypes, self.noise_new.restype = [ctypes.c_int64] * 2, ctypes.c_void_p
        self.noise_free.argtypes, self.noise_free.restype = [ctypes.c_void_p], None
        self.noise_copy, self.walk = library.draftwing_noise_copy, library.draftwing_walk
        self.noise_copy.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
        self.noise_copy.restype = None
        self.walk.argtypes = [ctypes.c_void_p, *[ctypes.c_int32] * 2, *[ctypes.c_void_p] * 3]
        self.walk.restype = None
        self.verify = library.draftwing_verify
        self.verify.argtypes = [ctypes.c_void_p, ctypes.c_int32, *[ctypes.c_void_p] * 2, ctypes.c_int32]
        self.verify.restype = None
        self._pack = library.draftwing_pack
        self._pack.argtypes = [
            ctypes.c_int32, ctypes.c_void_p, *[ctypes.c_int64] * 5, ctypes.c_void_p, *[ctypes.c_int64] * 2,
        ]  # fmt: skip
        library.draftwing_expect.argtypes, library.draftwing_expect.restype = [ctypes.c_void_p, ctypes.c_int64], None
        self._pages = LargePages(library.draftwing_expect)
        self._rows = library.draftwing_rows
        self._rows.argtypes = [ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, *[ctypes.c_void_p] * 2, ctypes.c_int64]
        self._rows.restype = None
        self.max_ops: int = library.draftwing_sizes(2)
        self._use_tiles = library.draftwing_use_tiles
        self.has_tiles = self.use_tiles(os.environ.get("DRAFTWING_KERNEL_AMX") != "off")
        self.has_int8 = bool(library.draftwing_has_int8())  # else 8 bits would be slower than 32

    @property
    def costs_like(self) -> str:
        """Another word for other code, or other instructions: what was measured with those holds no more."""
        return f"{self.name} AMX" if self.has_tiles else self.name

    def use_tiles(self, wanted: bool) -> bool:
        """Compute products of 8 and 16 bits by the processor's tiles (AMX), or without; whether it does.

        Of weights that are packed already the bits are the same. What is packed while tiles are on takes float32 rows
        in parts (``RowForm.SPLIT``).

        Tiles are not used where they do not work: the first call tries them in a child process.
        """
        self.has_tiles = bool(self._use_tiles(wanted))
        return self.has_tiles

    def room(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory for weights, not filled yet."""
        return self._pages.take(*shape, dtype=dtype)

    def pack(self, code: int, rows: Tensor, tiles: Tensor, at: int, groups: int) -> bool:
        """Numbers of rows (out, blocks, bytes) into tiles (tiles, blocks, numbers * 64), zeros behind the last row.

        Args:
            code: of the format of plain numbers, or any other for words of 32 bits.
            rows: uint8; ``groups`` numbers of each block are taken, from byte ``at`` on.

        Returns:
            Whether all of them are finite; words always are.
        """
        num_out, blocks, _ = rows.shape
        found: int = self._pack(
            code, rows.data_ptr() + at, rows.stride(0), num_out, blocks, rows.stride(1), groups, tiles.data_ptr(),
            tiles.stride(0) * tiles.element_size(), tiles.stride(1) * tiles.element_size(),
        )  # fmt: skip
        return bool(found)

    def rows(self, code: int, tiles: Tensor, num_in: int, outputs: Tensor) -> Tensor:
        """(R, in) float32: the weights of some outputs (R,) int64, which must be there, out of tiles of a format."""
        outputs, found = outputs.contiguous(), torch.empty(len(outputs), num_in)
        self._rows(code, tiles.data_ptr(), num_in, outputs.data_ptr(), found.data_ptr(), len(outputs))
        return found

    def commit(self, data: Tensor, lengths: Tensor, path: Tensor, table: SlotTable | None = None) -> None:
        """Move the kept nodes of every row, (B, D) with PAD behind, down to the slots after ``lengths`` (B,).

        Args:
            data: (L, 2, B, K, S, D) keys, transposed by 16 slots, and values.
            table: which pages the rows' slots lie in, where they do.
        """
        batch = Batch(rows=path.shape[0])
        layers, _, _, heads, _, dim = data.shape
        set_cache(batch, data, 0)
        if table is not None:
            batch.row_stride, batch.pages, batch.page_stride = 0, table.address, table.stride
        lengths, path = lengths.contiguous(), path.contiguous()
        batch.lengths = lengths.data_ptr()
        self._commit(ctypes.byref(batch), layers, heads, dim, path.data_ptr(), path.shape[1], path.shape[1])


class _Found(NamedTuple):
    kernel: Kernel | None
    problem: str  # why there is none
    not_kept: str  # why it is compiled again the next time


def get_kernel() -> Kernel | None:
    """The kernel, compiled if it is not yet; None where it cannot run here, for which see ``kernel_problem``."""
    return None if _is_off() else _load().kernel


def required_kernel() -> Kernel:
    """The kernel, for what was laid out for it. Raises ConfigError where it was turned off since."""
    found = get_kernel()
    if found is None:
        raise ConfigError("DRAFTWING_KERNEL was turned off after a model was loaded: load the model again")
    return found


def kernel_problem() -> str:
    """Why ``get_kernel`` gives none, and what to do about it; empty where it gives one."""
    return "DRAFTWING_KERNEL is off" if _is_off() else _load().problem


def kernel_notice() -> str:
    """What whoever decodes on this CPU should know: why it is slow, or slow to start. Empty where there is nothing.

    Nor is there where the kernel was turned off, or where it does not run on the system at all.
    """
    if _is_off() or sys.platform not in _SYSTEMS:
        return ""
    found = _load()
    if found.kernel is None:
        return (
            f"PyTorch runs what the CPU kernel would run faster: {found.problem} (DRAFTWING_KERNEL=off turns this "
            f"warning off)"
        )
    return f"the CPU kernel is compiled anew by every process: {found.not_kept}" if found.not_kept else ""


def _is_off() -> bool:
    return os.environ.get("DRAFTWING_KERNEL") == "off"


@cache
def _load() -> _Found:
    if sys.platform not in _SYSTEMS:
        return _Found(None, f"the CPU kernel runs on Linux and macOS, this is {platform.system()}", "")
    try:
        kernel, not_kept = with_library(_open)
    except KernelProblem as problem:
        return _Found(None, str(problem), "")
    return _Found(kernel, "", not_kept)


def _open(path: str, name: str) -> Kernel:
    """Load a library and see that it is right."""
    try:
        library = ctypes.CDLL(path)
        if not library.draftwing_runs_here():
            raise KernelProblem("DRAFTWING_KERNEL_ARCH names instructions that this processor lacks: unset it")
        sizes = tuple(library.draftwing_sizes(which) for which in (0, 1, 3, 4, 5))
        if sizes != tuple(map(ctypes.sizeof, (Op, Batch, Draft, Walk, Ahead))):
            raise KernelProblem(f"the compiled CPU kernel lays its structures out otherwise: {sizes}")
        kernel = Kernel(library, name)
    except (OSError, AttributeError) as error:
        raise KernelProblem(f"the compiled CPU kernel cannot be loaded: {error}") from None
    wrong = fault_of(library)
    if wrong:
        raise KernelProblem(f"the compiled CPU kernel gets {wrong} wrong on this machine: set CXX to another compiler")
    return kernel
