"""Keyed noise as the CPU kernel makes it, and the walk down a tree with it."""

from __future__ import annotations

import ctypes
import warnings
import weakref
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftwing.errors import DraftwingWarning
from draftwing.noise import Filters, KeyedNoise, Walk
from draftwing.run.forward import NetShape
from draftwing.run.kernel import layout
from draftwing.run.kernel.built import Built
from draftwing.run.kernel.library import Kernel, get_kernel, kernel_notice
from draftwing.run.kernel.slab import Slab
from draftwing.tree import Accepted, DraftTree, Emitted

__all__ = ["NativeNoise", "Walked", "noise_of"]

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


class Walked:
    """A walk as the kernel reads it, and what it wrote: of trees of so many rows and nodes, or fewer nodes.

    Attributes:
        how: good for as long as this lives.
    """

    def __init__(self, walk: Walk, rows: int, nodes: int, slab: Slab) -> None:
        found, address = slab.take(rows * (5 + 2 * nodes))
        self._rows, self._nodes, self._found = rows, nodes, found
        self._numbers = array("q", [*walk.seeds, *walk.starts])
        at = self._numbers.buffer_info()[0]
        self.how = layout.Walk(walk.noise, at, at + 8 * rows, None, address)
        if walk.filters is not None:
            self._filters = _as_structures(walk.filters)
            self.how.filters = ctypes.addressof(self._filters)

    def descends(self, built: Built, shape: NetShape) -> None:
        """In the trees of such a target, as soon as it was run."""
        how = self.how
        how.logits, how.out = built.logits, built.out
        how.layers, how.kv_heads, how.dim = shape.num_layers, shape.num_kv_heads, shape.head_dim

    def read(self, nodes: int | None = None) -> Accepted:
        """What is kept, once the kernel has been there; ``nodes`` of the trees, where they came to be fewer."""
        nodes, longest, on_host = nodes or self._nodes, 0, []
        found = self._found[: self._rows * (5 + 2 * nodes)].reshape(self._rows, -1)
        for numbers in found.tolist():
            num, _, used, depth, finite = numbers[:5]
            on_host.append(Emitted(numbers[5 + nodes : 6 + nodes + num], used - 1, depth, finite > 0))
            longest = max(longest, num)
        path, num, bonus = map(torch.from_numpy, (found[:, 5 : 6 + longest], found[:, 0], found[:, 1]))
        return Accepted(path, num, bonus, on_host)


def _as_structures(filters: Filters) -> ctypes.Array[layout.Filter]:
    found = [layout.Filter(*row) for row in zip(*filters, strict=True)]
    return (layout.Filter * len(found))(*found)


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
        if (
            self.handle is None
            or scores.dtype != torch.float32
            or vocab != self.vocab_size
            or not scores.is_contiguous()
        ):
            return None
        tokens, parents = tree.tokens.contiguous(), tree.parents.contiguous()
        walked = Walked(Walk(self.handle, seeds, starts, filters), rows, nodes, Slab(np.int64))
        self._kernel.walk(
            scores.data_ptr(), rows, nodes, tokens.data_ptr(), parents.data_ptr(), ctypes.byref(walked.how)
        )
        return walked.read()
