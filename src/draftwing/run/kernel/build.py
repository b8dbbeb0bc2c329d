"""A whole forward in one call: the CPU kernel, compiled where it is first used.

Decoding a small model through PyTorch spends most of its time between the operators. Here the layers of a decoder
are one *program*, a list of operations over buffers of rows, which is walked in one parallel region. It also
gives every row the same bits whatever stands beside it, in any tree, so that speculative decoding in float32 is
exact to the bit, and so is int8.

The C++ in ``native`` needs a compiler: ``$CXX``, ``c++``, ``g++`` or ``clang++``, or the package ``ziglang`` from PyPI,
which holds one. What it makes is kept in the user's cache. Without a compiler everything runs through PyTorch, slower;
``DRAFTWING_KERNEL=off`` asks for that.

``program`` says what runs. Shape suffixes: B rows, K heads, S slots, D head dimension or depth, V vocabulary.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwing.noise import KeyedNoise
from draftwing.tree import Accepted, DraftTree, Emitted

__all__ = [
    "Batch",
    "Draft",
    "Kernel",
    "NativeNoise",
    "Op",
    "cache_folder",
    "get_kernel",
    "kernel_problem",
    "noise_of",
    "set_cache",
]

_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-math-errno",
    "-fno-strict-aliasing",
)
NUM_BUFFERS = 16


def cache_folder() -> Path:
    """Where what belongs to this machine is kept: ``$DRAFTWING_CACHE``, or ``draftwing`` in the user's cache."""
    own = os.environ.get("DRAFTWING_CACHE")
    if own:
        return Path(own)
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        base = Path(tempfile.gettempdir())
    return base / "draftwing"


# --- the compiled code -----------------------------------------------------------------------------------------------


class Op(ctypes.Structure):
    """One operation, as ``native`` lays it out."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "source", "target", "column", "num_in", "num_out", "epilogue")),
        *(
            (name, ctypes.c_int32)
            for name in ("bits", "num_heads", "num_kv_heads", "head_dim", "layer", "window", "first")
        ),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        *((name, ctypes.c_void_p) for name in ("norm", "weight", "scales", "sums", "bias", "places")),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm")),
    ]


class Batch(ctypes.Structure):
    """What a program runs on: rows, slots and buffers."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "nodes", "first_node", "tree_nodes")),
        *((name, ctypes.c_int32) for name in ("rotary_half", "rotation_by_row")),
        *((name, ctypes.c_void_p) for name in ("tokens", "parents", "lengths", "rotation", "cache")),
        *((name, ctypes.c_int64) for name in ("layer_stride", "value_stride", "row_stride", "head_stride")),
        ("buffers", ctypes.c_void_p * NUM_BUFFERS),
        ("widths", ctypes.c_int32 * NUM_BUFFERS),
    ]


class Draft(ctypes.Structure):
    """Trees to draft, and where they are written."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("depth", "width", "most", "vocab_size", "room")),
        *((name, ctypes.c_int32) for name in ("num_catch_up", "num_hidden", "logits", "read", "states", "fed_back")),
        *((name, ctypes.c_int32) for name in ("num_tables", "num_knots")),
        *((name, ctypes.c_float) for name in ("sharpness", "kept", "worth", "share")),
        *((name, ctypes.c_void_p) for name in ("counts", "wanted", "temperatures")),
        *((name, ctypes.c_void_p) for name in ("top_k", "top_p", "min_p", "noise", "seeds", "starts")),
        *((name, ctypes.c_void_p) for name in ("knots", "rates", "gains", "costs", "verify")),
        *((name, ctypes.c_void_p) for name in ("tokens", "parents", "places", "told", "reached")),
        *((name, ctypes.c_int32) for name in ("levels", "is_chain", "deepest")),
        ("effort", ctypes.c_float),
    ]


class Kernel:
    """The compiled library, with as many threads as PyTorch is told to take.

    Attributes:
        name: another one for other code: what was measured with that holds no more.
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._run, self._commit = library.draftwing_run, library.draftwing_commit
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32]
        self._run.restype = None
        self._draft = library.draftwing_draft
        self._draft.argtypes = [ctypes.c_void_p, ctypes.c_int32, *[ctypes.c_void_p] * 4, ctypes.c_int32]
        self._commit.argtypes = [
            ctypes.c_void_p, *[ctypes.c_int32] * 3, ctypes.c_void_p, ctypes.c_int32,
        ]  # fmt: skip
        self._commit.restype = None
        self.noise_new, self.noise_free = library.draftwing_noise_new, library.draftwing_noise_free
        self.noise_new.argtypes, self.noise_new.restype = [ctypes.c_int64] * 2, ctypes.c_void_p
        self.noise_free.argtypes, self.noise_free.restype = [ctypes.c_void_p], None
        self.noise_copy, self.walk = library.draftwing_noise_copy, library.draftwing_walk
        self.noise_copy.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
        self.noise_copy.restype = None
        self.walk.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int32] * 2, *[ctypes.c_void_p] * 5]
        self.walk.restype = None
        self.max_ops: int = library.draftwing_sizes(2)
        self.has_int8 = bool(library.draftwing_has_int8())  # else 8 bits would be slower than 32

    def run(self, ops: Any, num_ops: int, batch: Batch) -> None:
        """Walk the first ``num_ops`` of a program."""
        self._run(ops, num_ops, ctypes.byref(batch), torch.get_num_threads())

    def draft(self, ops: Any, num_ops: int, batch: Batch, waiting: Batch, draft: Draft, roots: int) -> int:
        """Grow trees with a program, level by level; how many nodes they have. ``roots``: address of (B,) int64."""
        nodes: int = self._draft(
            ops,
            num_ops,
            ctypes.byref(batch),
            ctypes.byref(waiting),
            ctypes.byref(draft),
            roots,
            torch.get_num_threads(),
        )
        return nodes

    def commit(self, data: Tensor, lengths: Tensor, path: Tensor) -> None:
        """Move the kept nodes of every row, (B, D) with PAD behind, down to the slots after ``lengths`` (B,).

        ``data``: (L, 2, B, K, S, D) keys, transposed by 16 slots, and values.
        """
        batch = Batch(rows=path.shape[0])
        layers, _, _, heads, _, dim = data.shape
        set_cache(batch, data, 0)
        lengths, path = lengths.contiguous(), path.contiguous()
        batch.lengths = lengths.data_ptr()
        self._commit(ctypes.byref(batch), layers, heads, dim, path.data_ptr(), path.shape[1])


def set_cache(batch: Batch, data: Tensor, first_row: int) -> None:
    """Point to the slots (L, 2, B, K, S, D) of the rows from ``first_row`` on."""
    strides = data.stride()
    batch.cache = data.data_ptr() + first_row * strides[2] * data.element_size()
    batch.layer_stride, batch.value_stride, batch.row_stride, batch.head_stride = strides[:4]


def get_kernel() -> Kernel | None:
    """The kernel, compiled if it is not yet; None where it cannot run here, for which see ``kernel_problem``."""
    return None if os.environ.get("DRAFTWING_KERNEL") == "off" else _load()[0]


def kernel_problem() -> str:
    """Why ``get_kernel`` gives none, and what to do about it; empty where it gives one."""
    return "DRAFTWING_KERNEL is off" if os.environ.get("DRAFTWING_KERNEL") == "off" else _load()[1]


def noise_of(vocab_size: int, device: torch.device) -> KeyedNoise:
    """Keyed noise, made by the kernel where there is one."""
    kernel = get_kernel() if device.type == "cpu" else None
    return KeyedNoise(vocab_size, device) if kernel is None else NativeNoise(kernel, vocab_size)


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

    def walk(self, tree: DraftTree, scores: Tensor, seeds: Sequence[int], starts: Sequence[int]) -> Accepted | None:
        """See ``KeyedNoise.walk``; of float32 scores."""
        rows, nodes, vocab = scores.shape
        if scores.dtype != torch.float32 or vocab != self.vocab_size or not scores.is_contiguous():
            return None
        tokens, parents = tree.tokens.contiguous(), tree.parents.contiguous()
        width, whole = 5 + 2 * nodes, ctypes.c_int64 * rows
        found = (ctypes.c_int64 * (rows * width))()
        self._kernel.walk(
            self.handle, scores.data_ptr(), rows, nodes, tokens.data_ptr(), parents.data_ptr(),
            whole(*seeds), whole(*starts), found,
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


@cache
def _load() -> tuple[Kernel | None, str]:
    if sys.platform != "linux":
        return None, f"the CPU kernel runs on Linux, this is {platform.system()}"
    try:
        file = _compiled()
        library = ctypes.CDLL(str(file))
    except (OSError, subprocess.SubprocessError) as error:
        return None, str(error)
    sizes = tuple(library.draftwing_sizes(which) for which in (0, 1, 3))
    if sizes != tuple(map(ctypes.sizeof, (Op, Batch, Draft))):
        return None, f"the compiled CPU kernel lays its structures out otherwise: {sizes}; delete it from the cache"
    return Kernel(library, file.stem), ""


def _compiled() -> Path:
    folder = Path(__file__).with_name("native")
    source, code = folder / "kernel.cpp", b"".join(file.read_bytes() for file in sorted(folder.iterdir()))
    key = hashlib.sha256(code + " ".join((*_FLAGS, _cpu())).encode()).hexdigest()[:16]
    found = cache_folder() / f"kernel-{key}.so"
    if found.exists():
        return found
    compiler = _compiler()
    if compiler is None:
        raise OSError("no C++ compiler was found: install g++ or clang++, or `pip install ziglang`, or set CXX")
    try:
        found.parent.mkdir(parents=True, exist_ok=True)
        handle, fresh = tempfile.mkstemp(".so", dir=found.parent)
    except OSError:  # nowhere to keep it: compiled again the next time
        handle, fresh = tempfile.mkstemp(".so")
        found = Path(fresh)
    os.close(handle)
    done = subprocess.run([*compiler, *_FLAGS, "-o", fresh, str(source)], capture_output=True, text=True, timeout=300)
    if done.returncode:
        Path(fresh).unlink()
        raise OSError(f"{compiler[0]} could not compile the CPU kernel: {done.stderr.strip()[-300:]}")
    os.replace(fresh, found)  # whole or not at all, whoever else compiles it meanwhile
    return found


def _compiler() -> list[str] | None:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        words = shlex.split(name or "")
        if words and shutil.which(words[0]):
            return words
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++"]
    return None


def _cpu() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")
