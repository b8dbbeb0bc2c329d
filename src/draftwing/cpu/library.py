"""The compiled CPU kernel: a whole forward in one call.

Decoding a small model through PyTorch spends most of its time between the operators. In the kernel the layers of a
decoder are one *program*, a list of operations over buffers of rows, which runs in one parallel region. The bits of a
row do not depend on the other rows or on the tree, so speculative decoding is exact to the bit in float32 and in int8.

The C++ in ``native`` is compiled at first use (``cpu.build``). Without a compiler everything runs in PyTorch, slower;
``DRAFTWING_KERNEL=off`` requests that.

Shape suffixes: B rows, K heads, S slots, D head dimension or depth, V vocabulary.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwing.cpu.build import KernelProblem, with_library
from draftwing.cpu.layout import AcceptStruct, BatchStruct, Draft, Op, VerifyArgs
from draftwing.cpu.selftest import fault_of
from draftwing.cpu.states import KernelStates
from draftwing.errors import ConfigError, shown
from draftwing.models.paged import PageTable

_SYSTEMS = ("linux", "darwin")

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


_INT, _LONG, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
# The results and arguments of the library's functions, as ``native/kernel.cpp`` declares them.
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "run": (None, [_POINTER, _INT, _POINTER, _INT]),
    "draft": (_INT, [_POINTER, _INT, *[_POINTER] * 4, _INT]),
    "verify": (None, [_POINTER, _INT, *[_POINTER] * 2, _INT]),
    "accept": (None, [_POINTER, *[_INT] * 2, *[_POINTER] * 3]),
    "commit": (None, [_POINTER, *[_INT] * 2, _POINTER, *[_INT] * 2]),
    "noise_new": (_POINTER, [_LONG] * 2),
    "noise_free": (None, [_POINTER]),
    "noise_copy": (None, [_POINTER, *[_LONG] * 3, _POINTER]),
    "pack": (_INT, [_INT, _POINTER, *[_LONG] * 5, _POINTER, *[_LONG] * 2]),
    "rows": (None, [_INT, _POINTER, _INT, *[_POINTER] * 2, _LONG]),
    "advise": (None, [_POINTER, _LONG]),
}


class Kernel:
    """The compiled library.

    Attributes:
        name: identifies the code.
        has_tiles: whether products of 8 and 16 bits run on the processor's tiles (AMX); never with
            ``DRAFTWING_KERNEL_AMX=off``.
        has_int8: whether 8-bit products are faster than 32-bit ones.
        run: runs operations: ops, their number, a ``BatchStruct``, threads (``draftwing_run``).
        accept: applies ``accept.match`` to trees (``draftwing_accept``).
        verify: both, and moves the kept nodes to their KV slots (``draftwing_verify``).
        draft: grows trees with a program, verifies them if given ``VerifyArgs``, and returns the number of nodes
            (``draftwing_draft``).
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        for function, (result, arguments) in _SIGNATURES.items():
            native = getattr(library, f"draftwing_{function}")
            native.restype, native.argtypes = result, arguments
        self.run, self.draft = library.draftwing_run, library.draftwing_draft
        self.verify, self.accept = library.draftwing_verify, library.draftwing_accept
        self.noise_new, self.noise_free = library.draftwing_noise_new, library.draftwing_noise_free
        self.noise_copy = library.draftwing_noise_copy
        self._commit, self._pack, self._rows = library.draftwing_commit, library.draftwing_pack, library.draftwing_rows
        self._pages = HugePageArena(library.draftwing_advise)
        self.max_ops: int = library.draftwing_sizes(2)
        self.max_experts: int = library.draftwing_sizes(6)
        self._use_tiles = library.draftwing_use_tiles
        self.has_tiles = self.use_tiles(not is_off("DRAFTWING_KERNEL_AMX"))
        self.has_int8 = bool(library.draftwing_has_int8())

    def use_tiles(self, wanted: bool) -> bool:
        """Turn the processor's tiles (AMX) for products of 8 and 16 bits on or off; returns whether they are on.

        Results with packed weights do not change. Weights packed while tiles are on multiply float32 rows in parts
        (``RowForm.SPLIT``). The first call tries tiles in a child process, and leaves them off if they do not work.
        """
        self.has_tiles = bool(self._use_tiles(wanted))
        return self.has_tiles

    def room(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor for weights."""
        return self._pages.take(*shape, dtype=dtype)

    def pack(self, code: int, rows: Tensor, tiles: Tensor, at: int, groups: int) -> bool:
        """Copy numbers of rows (out, blocks, bytes) into tiles (tiles, blocks, numbers * 64), padded with zeros.

        Args:
            code: format of plain numbers, or any other for 32-bit words.
            rows: uint8; ``groups`` numbers of each block are copied, from byte ``at`` on.

        Returns:
            True if all numbers are finite, as words always are.
        """
        num_out, blocks, _ = rows.shape
        is_finite: int = self._pack(
            code, rows.data_ptr() + at, rows.stride(0), num_out, blocks, rows.stride(1), groups, tiles.data_ptr(),
            tiles.stride(0) * tiles.element_size(), tiles.stride(1) * tiles.element_size(),
        )  # fmt: skip
        return bool(is_finite)

    def rows(self, code: int, tiles: Tensor, num_in: int, outputs: Tensor) -> Tensor:
        """(R, in) float32: the weights of outputs (R,) int64, which must exist, from tiles of a format."""
        outputs, weights = outputs.contiguous(), torch.empty(len(outputs), num_in)
        self._rows(code, tiles.data_ptr(), num_in, outputs.data_ptr(), weights.data_ptr(), len(outputs))
        return weights

    def commit(
        self,
        data: Tensor,
        lengths: Tensor,
        path: Tensor,
        table: PageTable | None = None,
        states: KernelStates | None = None,
    ) -> None:
        """Move the kept nodes of every row, (B, D) padded with PAD, to the slots after ``lengths`` (B,).

        Args:
            data: (L, 2, B, K, S, D) keys, transposed by 16 slots (by 64 in 8 bits), and values.
            table: lists the pages of the slots, if there are any.
            states: of the recurrent layers, if there are any.
        """
        batch = BatchStruct(rows=path.shape[0])
        layers, _, _, heads, _, _ = data.shape
        batch.set_cache(data, table)
        if states is not None:
            states.set_batch(batch)
        lengths, path = lengths.contiguous(), path.contiguous()
        batch.lengths = lengths.data_ptr()
        self._commit(ctypes.byref(batch), layers, heads, path.data_ptr(), path.shape[1], path.shape[1])


class _Loaded(NamedTuple):
    kernel: Kernel | None
    problem: str  # why there is no kernel
    not_kept: str  # why it will be compiled again


def get_kernel() -> Kernel | None:
    """The kernel, compiled if necessary; None if it cannot run here (see ``kernel_problem``)."""
    return None if is_off("DRAFTWING_KERNEL") else _load().kernel


def required_kernel() -> Kernel:
    """The kernel, for weights in its layout. Raises ConfigError if it was turned off after they were loaded."""
    kernel = get_kernel()
    if kernel is None:
        raise ConfigError("DRAFTWING_KERNEL was turned off after a model was loaded: load the model again")
    return kernel


def kernel_problem() -> str:
    """Why ``get_kernel`` returns None, and how to fix it; empty if it does not."""
    return "DRAFTWING_KERNEL is off" if is_off("DRAFTWING_KERNEL") else _load().problem


def kernel_notice() -> str:
    """Why decoding on this CPU is slow, or slow to start; empty if not, or if the kernel is off or unsupported."""
    if is_off("DRAFTWING_KERNEL") or sys.platform not in _SYSTEMS:
        return ""
    found = _load()
    if found.kernel is None:
        return (
            f"PyTorch runs what the CPU kernel would run faster: {found.problem} (DRAFTWING_KERNEL=off turns this "
            f"warning off)"
        )
    return f"the CPU kernel is compiled again by every process: {found.not_kept}" if found.not_kept else ""


def is_off(variable: str) -> bool:
    """Return True if an environment variable is "off". Raises ConfigError for values other than "on" and "off"."""
    value = os.environ.get(variable) or "on"
    if value not in ("on", "off"):
        raise ConfigError(f"{variable} must be on or off, found {shown(value)}: unset it for on")
    return value == "off"


@cache
def _load() -> _Loaded:
    if sys.platform not in _SYSTEMS:
        return _Loaded(None, f"the CPU kernel runs on Linux and macOS, this is {platform.system()}", "")
    try:
        kernel, not_kept = with_library(open_library)
    except KernelProblem as problem:
        return _Loaded(None, str(problem), "")
    return _Loaded(kernel, "", not_kept)


def open_library(path: str, name: str) -> Kernel:
    """Load a library and test it."""
    try:
        library = ctypes.CDLL(path)
        if not library.draftwing_runs_here():
            raise KernelProblem("DRAFTWING_KERNEL_ARCH names instructions that this processor lacks: unset it")
        sizes = tuple(library.draftwing_sizes(which) for which in (0, 1, 3, 4, 5))
        if sizes != tuple(map(ctypes.sizeof, (Op, BatchStruct, Draft, AcceptStruct, VerifyArgs))):
            raise KernelProblem(f"the compiled CPU kernel lays its structures out otherwise: {sizes}")
        kernel = Kernel(library, name)
    except (OSError, AttributeError) as error:
        raise KernelProblem(f"the compiled CPU kernel cannot be loaded: {error}") from None
    wrong = fault_of(library)
    if wrong:
        raise KernelProblem(f"the compiled CPU kernel gets {wrong} wrong on this machine: set CXX to another compiler")
    return kernel
