"""A net in the CPU kernel: traced once into a program, and run over the slots of one decoder.

Shape suffixes: B rows, W entries, R = B * W, N nodes, F features, H hidden, V vocabulary.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from draftwing.run.forward import Asked, Entries, Net, Runner, pick
from draftwing.run.kernel.built import Built
from draftwing.run.kernel.draft import address, grow_tree
from draftwing.run.kernel.layout import Batch, set_cache
from draftwing.run.kernel.library import Kernel
from draftwing.run.kernel.program import Workspace
from draftwing.run.request import Drafted, Waiting

__all__ = ["KernelRunner", "KernelRuntime"]


class KernelRunner(Runner):
    """See ``Runner``. Each row has its own bits, whatever stands beside it."""

    def __init__(self, net: Net, built: Built) -> None:
        super().__init__(net)
        self._shape = net.shape
        self._built, self._space = built, Workspace(built.program)
        self._room = (0, 0)  # rows and slots that are reserved
        self._slots = 0  # their address
        self._rotation: Tensor | None = None  # by position; None where it depends on more
        # Of drafts, which nobody keeps; tokens that the net leaves out are never written: they hold -inf.
        self._logits = torch.empty(0, net.shape.vocab_size)
        self._states = torch.empty(2, 0, net.shape.state_width)

    def forward(
        self, entries: Entries, *, want_logits: bool = True, last: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """See ``Runner.forward``."""
        built, shape, tokens = self._built, self._shape, entries.tokens
        rows, nodes = tokens.shape
        kept = self._place(entries)
        tokens = tokens.contiguous()
        self._space.batch.tokens = tokens.data_ptr()
        given = {}
        if entries.states is not None:
            states = given[built.states] = entries.states.contiguous()
            assert states.shape == (rows, nodes, shape.state_width)
        out = None
        if built.out >= 0:
            out = given[built.out] = torch.empty(rows, nodes, shape.out_width)
        if want_logits:
            given[built.logits] = self._new_logits(rows * nodes)
        num_ops = None if want_logits else built.num_hidden
        self._space.run(rows, nodes, given, first_op=built.num_fuse, num_ops=num_ops)
        del kept
        logits = given[built.logits].view(rows, nodes, -1) if want_logits else None
        return (logits, out) if last is None or nodes == 1 else pick((logits, out), last)

    def _new_logits(self, count: int) -> Tensor:
        if not self._shape.is_sparse:
            return torch.empty(count, self._shape.vocab_size)
        return torch.full((count, self._shape.vocab_size), -torch.inf)

    def _place(self, entries: Entries) -> tuple[object, ...]:
        """Say where the entries stand; what must be kept until they are run."""
        tree, rotary, batch = entries.tree, self.net.rotary, self._space.batch
        self.reserve(entries.first_row + tree.num_rows, entries.upto)
        rotation = self._rotation
        if rotation is None:
            positions = torch.tensor(entries.lengths)[:, None] + tree.depths[:, entries.first_node :]
            prompts = None if entries.prompt_lengths is None else torch.tensor(entries.prompt_lengths)[:, None]
            rotation = rotary.cis(positions, prompts).flatten(0, 1).contiguous()
            batch.rotation, batch.rotary_half = rotation.data_ptr(), rotation.shape[-1]
        lengths, parents = array("q", entries.lengths), tree.parents.contiguous()
        batch.cache = self._slots + entries.first_row * batch.row_stride * 4
        batch.first_node, batch.tree_nodes, batch.parents = entries.first_node, tree.num_nodes, parents.data_ptr()
        batch.lengths = address(lengths)
        return lengths, parents, rotation

    def reserve(self, num_rows: int, num_slots: int) -> None:
        """See ``Runner.reserve``. What depends on where the slots lie is set when they move."""
        if num_rows <= self._room[0] and num_slots <= self._room[1]:
            return
        super().reserve(num_rows, num_slots)
        self._room = self.cache.num_rows, self.cache.num_slots
        batch, rotary = self._space.batch, self.net.rotary
        set_cache(batch, self.cache.data, 0)
        self._slots = self.cache.data.data_ptr()
        batch.rotation_by_row = int(not rotary.config.position_only)
        if rotary.config.position_only:
            self._rotation = rotary.table(self._room[1]).contiguous()
            batch.rotation, batch.rotary_half = self._rotation.data_ptr(), self._rotation.shape[-1]

    def fuse(self, features: Tensor) -> Tensor:
        """See ``Runner.fuse``."""
        built = self._built
        if built.features == built.states:
            return features
        rows, count, _ = features.shape
        states = torch.empty(rows, count, self._shape.state_width)
        given = {built.features: features.contiguous(), built.states: states}
        self._space.run(rows, count, given, num_ops=built.num_fuse)
        return states

    def draft(self, waiting: Waiting, asked: Asked) -> Drafted:
        """See ``Runner.draft``: in one call, where the tree can be asked for in numbers."""
        request = asked.request() if self._shape.is_shifted and self.net.rotary.config.position_only else None
        if request is None:
            return super().draft(waiting, asked)
        built, rows, entries = self._built, len(waiting.tokens), waiting.num_entries
        before = waiting.before_roots()
        upto = max(max(before) + 1 + request.depth * request.width, max(waiting.lengths) + entries)
        self.reserve(rows, upto)
        count = rows * max(entries, request.width)
        self._space.reserve(count)
        if count > len(self._logits):
            self._logits = self._new_logits(max(count, 16))
            self._states = torch.empty(2, max(count, 16), self._shape.state_width)
        batch = self._space.batch
        batch.cache = self._slots
        batch.buffers[built.logits] = self._logits.data_ptr()
        features = waiting.features
        if features is not None:
            features = features[:, :entries].contiguous()
            batch.buffers[built.states], batch.buffers[built.out] = (each.data_ptr() for each in self._states)
        caught = Batch.from_buffer_copy(batch)
        if features is not None:
            caught.buffers[built.features] = features.data_ptr()
        return grow_tree(built, batch, caught, waiting, before, request)

    def commit(self, lengths: Sequence[int], path: Tensor) -> None:
        """See ``Runner.commit``."""
        self._built.program.kernel.commit(self.cache.data, torch.tensor(lengths), path)


class KernelRuntime:
    """See ``Runtime``."""

    name = "kernel"
    grows = True

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._built: weakref.WeakKeyDictionary[Net, Built] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def runner(self, net: Net, holder: object) -> KernelRunner:
        """See ``Runtime.runner``; a net is traced once."""
        with self._lock:
            built = self._built.get(net)
            if built is None:
                built = self._built[net] = Built.of(net, self.kernel)
        return KernelRunner(net, built)
