"""A target that stands by while its drafter drafts, and verifies the trees in the same call.

Shape suffixes: B rows, N nodes, F features, V vocabulary.
"""

from __future__ import annotations

import ctypes
import time
from array import array

from draftwing.run.forward import NetShape, Runner
from draftwing.run.kernel import layout
from draftwing.run.kernel.built import Built
from draftwing.run.kernel.noise import Walked
from draftwing.run.kernel.slab import Reused, Slab
from draftwing.run.request import Ahead, Verified
from draftwing.tree import DraftTree

__all__ = ["Standby", "Standing"]


class Standing:
    """What the kernel needs to know of a target whenever it stands by.

    Args:
        batch: of its own memory. It has room, and its slots are set, before anything stands by.
    """

    def __init__(self, built: Built, batch: layout.Batch, shape: NetShape) -> None:
        program = built.program
        self.built, self.batch, self.shape = built, batch, shape
        self.how = layout.Ahead(
            ctypes.addressof(program.ops) + built.num_fuse * ctypes.sizeof(layout.Op),
            ctypes.addressof(batch),
            num_ops=program.num_ops - built.num_fuse,
        )
        self.address = ctypes.addressof(self.how)
        self.logits, self.out = Reused(), Reused()


class Standby:
    """A target that stands by for one call, in which trees of so many nodes at most are drafted.

    Args:
        runner: of the target; it is told what came of its trees.
        began: seconds of ``time.perf_counter`` since when this is prepared: that belongs to the verification too.

    Attributes:
        address: of the ``layout.Ahead``.
    """

    def __init__(self, runner: Runner, standing: Standing, ahead: Ahead, nodes: int, slab: Slab, began: float) -> None:
        built, batch, shape, rows = standing.built, standing.batch, standing.shape, len(ahead.lengths)
        self.runner, self._standing, self._rows, self.address = runner, standing, rows, standing.address
        self._walked = Walked(ahead.walk, rows, nodes, slab)
        self._walked.descends(built, shape)
        standing.how.how = ctypes.addressof(self._walked.how)
        self._lengths = array("q", ahead.lengths)
        self._logits, batch.buffers[built.logits] = standing.logits.take(rows * nodes, shape.vocab_size)
        self._out = None
        if built.out >= 0:
            self._out, batch.buffers[built.out] = standing.out.take(rows * nodes, shape.out_width)
        batch.rows, batch.lengths = rows, self._lengths.buffer_info()[0]
        self._prepared = time.perf_counter() - began

    def read(self, tree: DraftTree) -> None:
        """Tell the runner what came of these trees."""
        began = time.perf_counter()
        nodes, rows, logits, out = tree.num_nodes, self._rows, self._logits, self._out
        vocab, width = logits.shape[1], 0 if out is None else out.shape[1]
        shaped = logits.as_strided((rows, nodes, vocab), (nodes * vocab, vocab, 1))
        taps = None if out is None else out.as_strided((rows, nodes, width), (nodes * width, width, 1))
        accepted, took = self._walked.read(nodes), self._standing.how.seconds + self._prepared
        seconds = took + time.perf_counter() - began
        self.runner.verified = Verified(tree, shaped, taps, accepted, seconds)
