"""A net in the CPU kernel: traced once into a program, and run over the slots of one decoder.

Whole drafts are one call (``native/drafts.h``): what is waiting, then a tree level by level.

Shape suffixes: B rows, W entries, R = B * W, N nodes, F features, H hidden, V vocabulary.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwing.alone import filled
from draftwing.errors import ConfigError
from draftwing.model.cache import KVCache
from draftwing.run.forward import Entries, Net, Runner, pick
from draftwing.run.growing import Asked
from draftwing.run.kernel.built import Built
from draftwing.run.kernel.layout import Adjust, Batch, Draft, Op, set_cache, set_view
from draftwing.run.kernel.library import Kernel
from draftwing.run.kernel.noise import Walked
from draftwing.run.kernel.program import Program
from draftwing.run.kernel.slab import Slab
from draftwing.run.kernel.standby import Standby, Standing
from draftwing.run.request import Adjustments, Ahead, Drafted, DraftRequest, Waiting
from draftwing.tree import DraftTree

__all__ = ["KernelRunner", "KernelRuntime", "Workspace"]


class Workspace:
    """Memory for the values of a program. Of one decoder alone: a run writes over those of the last."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.batch = Batch()  # what is true of every run; the kernel copies what it is given
        self._memory = torch.empty(0)
        self._capacity = 0
        for buffer, width in enumerate(program.widths):
            self.batch.widths[buffer] = width

    def reserve(self, num_rows: int) -> None:
        """Room for R rows."""
        if num_rows <= self._capacity:
            return
        self._capacity = max(num_rows, 2 * self._capacity)
        program = self.program
        own = [(place, width) for place, width in enumerate(program.widths) if not program.is_given[place]]
        self._memory = torch.empty(self._capacity * sum(width for _, width in own))
        at = self._memory.data_ptr()
        for place, width in own:
            self.batch.buffers[place] = at
            at += 4 * width * self._capacity

    def run(
        self,
        rows: int,
        nodes: int,
        given: Mapping[int, Tensor],
        *,
        first_op: int = 0,
        num_ops: int | None = None,
        walked: Walked | None = None,
    ) -> None:
        """Walk the program, or its operations from ``first_op`` to before ``num_ops``.

        Args:
            rows, nodes: R = rows * nodes. What else a run reads (tokens, slots) is set in ``batch``.
            given: float32 tensors of R rows by place, all that these operations use of the program's given values.
            walked: descends in the trees afterwards, and commits what is kept.
        """
        if rows * nodes > self._capacity:
            self.reserve(rows * nodes)
        batch, program = self.batch, self.program
        batch.rows, batch.nodes = rows, nodes
        for place, tensor in given.items():
            batch.buffers[place] = tensor.data_ptr()
        last, first = program.num_ops if num_ops is None else num_ops, first_op * ctypes.sizeof(Op)
        kernel, ops, threads = program.kernel, ctypes.byref(program.ops, first), torch.get_num_threads()
        if walked is None:
            kernel.run(ops, last - first_op, ctypes.byref(batch), threads)
        else:
            kernel.verify(ops, last - first_op, ctypes.byref(batch), ctypes.byref(walked.how), threads)


class KernelRunner(Runner):
    """See ``Runner``. Each row has its own bits, whatever stands beside it."""

    def __init__(self, net: Net, built: Built, cache: KVCache | None = None) -> None:
        super().__init__(net, cache)
        self._shape = net.shape
        self._built, self._space = built, Workspace(built.program)
        self._room = (0, 0)  # rows and slots that are reserved
        self._data: Tensor | None = None  # the slots themselves: they move where they grow, for whichever runner
        self._slots = 0  # their address
        self._grows = net.shape.is_shifted and net.rotary.config.position_only  # whole trees in one call
        self._rotation: Tensor | None = None  # by position; None where it depends on more
        # Of drafts, which nobody keeps; tokens that the net leaves out are never written: they hold -inf.
        self._logits = torch.empty(0, net.shape.vocab_size)
        self._states = torch.empty(2, 0, net.shape.state_width)
        self._passes, self._at_states = 0, (0, 0)  # rows that there is room for, and where the states lie
        self._taps = torch.empty(0, net.shape.out_width)
        self._numbers, self._chances = Slab(np.int64), Slab(np.float32)
        self._asks = Draft(  # what is true of every draft
            vocab_size=net.shape.vocab_size, num_catch_up=built.num_fuse, num_hidden=built.num_hidden,
            logits=built.logits, read=built.read, states=built.states,
            fed_back=-1 if built.states < 0 else built.out, kept_out=built.out if built.states < 0 else -1,
        )  # fmt: skip
        self._standing = Standing(built, self._space.batch, net.shape)

    def forward(
        self, entries: Entries, *, want_logits: bool = True, last: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """See ``Runner.forward``."""
        built, shape, tokens = self._built, self._shape, entries.tree.tokens
        tokens = tokens[:, entries.first_node :] if entries.first_node else tokens
        rows, nodes = tokens.shape
        kept = self._place(entries)
        tokens = (tokens if entries.ids is None else entries.ids).contiguous()
        self._space.batch.tokens = tokens.data_ptr()
        given = {}
        if entries.states is not None:
            states = given[built.states] = entries.states.contiguous()
            if states.shape != (rows, nodes, shape.state_width):
                raise ConfigError(
                    f"a net's states must be {shape.state_width} wide, as its shape says, found {tuple(states.shape)}"
                )
        out = None
        if built.out >= 0:
            out = given[built.out] = torch.empty(rows, nodes, shape.out_width)
        if want_logits:
            given[built.logits] = self._new_logits(rows, nodes)
        num_ops = None if want_logits else built.num_hidden
        walked = None if entries.walk is None else Walked(entries.walk, rows, nodes, self._numbers)
        if walked is not None:
            walked.descends(built, shape)
        self._space.run(rows, nodes, given, first_op=built.num_fuse, num_ops=num_ops, walked=walked)
        self.walked = None if walked is None else walked.read()
        del kept
        logits = given[built.logits] if want_logits else None
        return (logits, out) if last is None or nodes == 1 else pick((logits, out), last)

    def _new_logits(self, *shape: int) -> Tensor:
        shape = *shape, self._shape.vocab_size
        return filled(shape, -torch.inf) if self._shape.is_sparse else torch.empty(shape)

    def _place(self, entries: Entries) -> tuple[object, ...]:
        """Say where the entries stand; what must be kept until they are run."""
        tree, batch, first_row = entries.tree, self._space.batch, entries.first_row
        rows, nodes = tree.tokens.shape
        upto = max(entries.lengths) + nodes
        self._make_room(first_row + rows, upto)
        table = self.cache.table
        if table is not None:
            table.hold(first_row, entries.lengths, nodes)
            batch.pages = table.address + first_row * 4 * table.stride
        rotation = self._rotation
        if rotation is None:
            positions = torch.tensor(entries.lengths)[:, None] + tree.depths[:, entries.first_node :]
            prompts = None if entries.prompt_lengths is None else torch.tensor(entries.prompt_lengths)[:, None]
            rotation = self.net.rotary.cis(positions, prompts).flatten(0, 1).contiguous()
            batch.rotation, batch.rotary_half = rotation.data_ptr(), rotation.shape[-1]
        lengths, parents = array("q", entries.lengths), tree.parents.contiguous()
        batch.cache = self._slots + first_row * batch.row_stride * 4
        batch.first_node, batch.tree_nodes, batch.parents = entries.first_node, nodes, parents.data_ptr()
        batch.lengths = _at(lengths)
        return lengths, parents, rotation, set_view(batch, entries.view, entries.watched)

    def _make_room(self, num_rows: int, num_slots: int) -> None:
        """``reserve``, where there is less, or another runner has moved the slots."""
        if num_rows > self._room[0] or num_slots > self._room[1] or self.cache.data is not self._data:
            self.reserve(num_rows, num_slots)

    def reserve(self, num_rows: int, num_slots: int) -> None:
        """See ``Runner.reserve``. What depends on where the slots lie is set when they move."""
        super().reserve(num_rows, num_slots)
        if self.cache.data is self._data:
            return
        self._data = self.cache.data
        self._room = self.cache.num_rows, self.cache.num_slots
        batch, rotary = self._space.batch, self.net.rotary
        set_cache(batch, self.cache.data, 0)
        if self.cache.table is not None:
            batch.row_stride, batch.page_stride = 0, self.cache.table.stride
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
        request = asked.request() if self._grows else None
        if request is None:
            return super().draft(waiting, asked)
        rows, entries = len(waiting.tokens), max(map(len, waiting.tokens))
        batch, caught, kept = self._batches(waiting, request, entries)
        room = 1 + request.width + (request.depth - 1) * request.width * request.width  # of a row's nodes
        (numbers, at), (chances, told) = self._numbers.take(3 * rows * room), self._chances.take(2 * rows * room)
        draft = self._drafting(request, kept)
        counts, roots = array("q", map(len, waiting.tokens)), array("q", request.roots)
        draft.room, draft.counts, draft.told, draft.reached = room, _at(counts), told, told + 4 * rows * room
        draft.tokens, draft.parents, draft.places = at, at + 8 * rows * room, at + 16 * rows * room
        program, outs = self._built.program, None
        if draft.kept_out >= 0:
            passes = 1 + (request.depth - 1) * request.width
            outs = torch.empty(max(passes, entries), rows, self._shape.out_width)
            batch.buffers[draft.kept_out] = caught.buffers[draft.kept_out] = outs.data_ptr()
        standby = self._standby(asked.ahead, request, draft)
        nodes = program.kernel.draft(
            program.ops, program.num_ops, ctypes.byref(batch), ctypes.byref(caught), ctypes.byref(draft), _at(roots),
            torch.get_num_threads(),
        )  # fmt: skip
        kept.clear()
        (tokens, above, places), (said, reached) = (
            torch.from_numpy(found.reshape(count, -1)[:, : rows * nodes].reshape(count, rows, nodes)).unbind()
            for found, count in ((numbers, 3), (chances, 2))
        )
        tree = DraftTree(
            tokens, above, reached, told=said, effort=draft.effort, is_line=bool(draft.is_chain), depth=draft.deepest
        )
        if standby is not None:
            standby.read(tree)
        if request.width > 1:
            return Drafted(tree, places, draft.levels - 1)
        states = None if outs is None or entries > 1 else outs[: draft.levels].transpose(0, 1)
        return Drafted(tree, None, draft.levels - 1, states)

    def _standby(self, ahead: Ahead | None, request: DraftRequest, draft: Draft) -> Standby | None:
        """The target, to go on with the verification of what is drafted; None where it cannot."""
        target = None if ahead is None else ahead.runner
        if ahead is None or not isinstance(target, KernelRunner) or target is self:
            return None
        standby = target.stand_by(ahead, 1 + min(request.most, draft.room - 1))
        if standby is not None:
            draft.ahead = standby.address
        return standby

    def stand_by(self, ahead: Ahead, nodes: int) -> Standby | None:
        """To run trees of so many nodes at most as soon as they are drafted; None where more must be known of them."""
        began, rows, upto = time.perf_counter(), len(ahead.lengths), max(ahead.lengths) + nodes
        self._make_room(rows, upto)
        if self.cache.table is not None or self._rotation is None or self._shape.is_sparse:
            return None
        self._space.reserve(rows * nodes)
        self._space.batch.cache = self._slots
        set_view(self._space.batch, None)
        return Standby(self, self._standing, ahead, nodes, self._numbers, began)

    def _batches(self, waiting: Waiting, request: DraftRequest, entries: int) -> tuple[Batch, Batch, list[object]]:
        """The batch of a level of every row, that of what is waiting, and what they point to."""
        built, rows, batch = self._built, len(waiting.tokens), self._space.batch
        upto = max(max(waiting.roots) + 1 + request.depth * request.width, max(waiting.lengths) + entries)
        self._make_room(rows, upto)
        table = self.cache.table
        if table is not None:
            own = [fed + len(ids) for fed, ids in zip(waiting.lengths, waiting.tokens, strict=True)]
            table.hold(0, own, 0)
            table.hold(0, waiting.roots, 1 + request.depth * request.width)
            batch.pages = table.address
        count = rows * max(entries, request.width)
        if count > self._passes:
            count = max(count, 2 * self._passes, 16)
            self._space.reserve(count)
            self._logits, self._states = self._new_logits(count), torch.empty(2, count, self._shape.state_width)
            self._taps = torch.empty(count, self._shape.out_width)
            self._passes, self._at_states = count, (self._states[0].data_ptr(), self._states[1].data_ptr())
        batch.rows, batch.cache = rows, self._slots
        batch.buffers[built.logits] = self._logits.data_ptr()
        features, roots, seen = waiting.features, array("q", waiting.roots), set_view(batch, waiting.view)
        batch.lengths = _at(roots)
        if features is not None:
            features = (features if rows == 1 else features[:, :entries]).contiguous()  # of one row, entries come first
            batch.buffers[built.states], batch.buffers[built.out] = self._at_states
        elif built.out >= 0:  # a target's taps, which a draft of its own does not look at
            batch.buffers[built.out] = self._taps.data_ptr()
        caught = Batch.from_buffer_copy(batch)
        if features is not None:
            caught.buffers[built.features] = features.data_ptr()
        flat, fed, above = array("q"), array("q", waiting.lengths), array("q", [*range(-1, entries - 1)] * rows)
        for ids in waiting.tokens:
            flat.extend(ids)
            flat.extend([-1] * (entries - len(ids)))
        caught.nodes = caught.tree_nodes = entries
        caught.first_node = 0
        caught.tokens, caught.lengths, caught.parents = _at(flat), _at(fed), _at(above)
        return batch, caught, [roots, features, flat, fed, above, seen]

    def _drafting(self, request: DraftRequest, kept: list[object]) -> Draft:
        """The request as the kernel reads it; what it points to goes into ``kept``."""
        wanted, seeds, starts = (array("q", each) for each in (request.wanted, request.seeds, request.starts))
        temperatures, top_p, min_p = (array("f", each) for each in (request.temperatures, request.top_p, request.min_p))
        vocab, rule = self._shape.vocab_size, request.rule
        top_k = array("i", [min(k, vocab) for k in request.top_k])
        kept += [wanted, seeds, starts, temperatures, top_k, top_p, min_p, rule]
        draft = Draft.from_buffer_copy(self._asks)
        draft.depth, draft.width, draft.most = request.depth, request.width, request.most
        draft.sharpness, draft.kept, draft.scale = request.sharpness, 1 - request.miss, request.scale
        draft.wanted, draft.seeds, draft.starts, draft.noise = _at(wanted), _at(seeds), _at(starts), request.noise
        draft.temperatures, draft.top_k = _at(temperatures), _at(top_k)
        draft.top_p, draft.min_p = _at(top_p), _at(min_p)
        if request.adjustments is not None:
            draft.adjusts = _adjusting(request.adjustments, kept)
        if rule is not None:
            draft.num_tables, draft.num_knots = rule.knots.shape
            draft.knots, draft.rates, draft.gains, draft.costs, draft.verify = rule.addresses
            draft.worth, draft.share = rule.worth, rule.share
        return draft

    def commit(self, lengths: Sequence[int], path: Tensor) -> None:
        """See ``Runner.commit``."""
        self._built.program.kernel.commit(self.cache.data, torch.tensor(lengths), path, self.cache.table)


def _adjusting(asked: Adjustments, kept: list[object]) -> int:
    """The address of penalties and biases as the kernel reads them; what is there goes into ``kept``."""
    rows = []
    for penalties, tokens, prompt, biases in zip(
        asked.penalties, asked.said, asked.prompt_lengths, asked.biases, strict=True
    ):
        said, biased, amounts = array("q", tokens), array("q", biases), array("f", biases.values())
        kept += [said, biased, amounts]
        rows.append(Adjust(*penalties, len(biased), _at(said), len(said), prompt, _at(biased), _at(amounts)))
    found = (Adjust * len(rows))(*rows)
    kept.append(found)
    return ctypes.addressof(found)


def _at(numbers: array[Any]) -> int:
    """Where they lie; they must outlive the call that reads them."""
    return numbers.buffer_info()[0]


class KernelRuntime:
    """See ``Runtime``."""

    name = "kernel"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._built: weakref.WeakKeyDictionary[Net, Built] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def runner(self, net: Net, holder: object, cache: KVCache | None = None) -> KernelRunner:
        """See ``Runtime.runner``; a net is traced once."""
        with self._lock:
            built = self._built.get(net)
            if built is None:
                built = self._built[net] = Built.of(net, self.kernel)
        return KernelRunner(net, built, cache)
