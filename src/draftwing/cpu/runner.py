"""Networks in the CPU kernel: forwards, whole drafts, and a target's verification in the call that drafts its trees.

A network is traced once into a program (``cpu.program``), which runs over the KV slots of one decoder. A whole draft is
one call (``native/drafts.h``): the unread entries, then a tree level by level, then the target's verification.

Shape suffixes: B rows, W entries, N nodes, F features, H hidden, V vocabulary.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwing.cpu.layout import AcceptStruct, Adjust, BatchStruct, Draft, Filter, Op, VerifyArgs
from draftwing.cpu.library import Kernel
from draftwing.cpu.program import Program, TracedAttention, TracedIds, Workspace
from draftwing.cpu.states import KernelStates
from draftwing.errors import ConfigError
from draftwing.models.cache import KVCache, View
from draftwing.models.context import TargetOutput
from draftwing.noise import AcceptArgs
from draftwing.runtime.forward import Entries, Net, Outputs, Runner, pick
from draftwing.runtime.tree_builder import Drafted, DraftRequest, VerifyRequest
from draftwing.torch_utils import filled
from draftwing.tree import PAD, Accepted, DraftTree, Emitted

MAX_KEPT_BLOCKS = 3  # blocks of a ``BufferPool``: logits of the last steps may still be referenced
MAX_OVERSIZE = 4  # a pooled block may be this many times larger than the request


@dataclass(frozen=True)
class Built:
    """A network's program, and the places of its values; -1 for values that it does not have.

    Attributes:
        num_fuse: first operations, which compute ``states`` from ``features``; 0 if these are the same.
        num_hidden: operations before those that compute ``logits`` from ``read``.
        out: the network's second output.
    """

    program: Program
    num_fuse: int
    num_hidden: int
    features: int
    states: int
    read: int
    out: int
    logits: int

    @classmethod
    def of(cls, net: Net, kernel: Kernel) -> Built:
        """Trace a network."""
        program = Program(kernel)
        shape = net.shape
        features = program.given(shape.feature_width) if shape.feature_width else None
        states = fused = None if features is None else net.fuse(features)
        if fused is not None and fused is not features:
            states = program.given(shape.state_width)
            fused.write(states.buffer)
        num_fuse = len(program)
        read, out = net.forward(TracedIds(program), states, TracedAttention(shape.windows, shape.num_kv_heads))
        written = -1 if out is None else program.output(out)
        num_hidden = len(program)
        logits = program.output(net.logits(read))
        program.finish()
        place = program.place
        return cls(
            program, num_fuse, num_hidden,
            features=-1 if features is None else place(features.buffer),
            states=-1 if states is None else place(states.buffer),
            read=place(read.buffer), out=-1 if out is None else place(written), logits=place(logits),
        )  # fmt: skip


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
        self.args = AcceptStruct(accept.noise, seeds, seeds + 8 * rows, filters, self._found.data_ptr())

    def read(self, nodes: int | None = None) -> Accepted:
        """The kept nodes, after the kernel has run; ``nodes`` of the trees, if there were fewer."""
        nodes, longest, emitted = nodes or self._nodes, 0, []
        found = self._found[: self._rows * (5 + 2 * nodes)].view(self._rows, -1)
        for numbers in found.numpy().tolist():
            num, _, used, depth, finite = numbers[:5]
            emitted.append(Emitted(numbers[5 + nodes : 6 + nodes + num], used - 1, depth, finite > 0))
            longest = max(longest, num)
        return Accepted(found[:, 5 : 6 + longest], found[:, 0], found[:, 1], emitted)


@dataclass(slots=True)
class FusedStep:
    """A target's part of the kernel call that drafts and verifies.

    Attributes:
        logits, out: (B * N, V) and (B * N, F) or None, for the largest possible trees.
        prepare_seconds: time that it took to make this.
    """

    args: VerifyArgs
    logits: Tensor
    out: Tensor | None
    result: AcceptResult
    prepare_seconds: float

    def read(self, tree: DraftTree) -> TargetOutput:
        """The result for the drafted trees; its seconds include the preparation and this call."""
        began = time.perf_counter()
        rows, nodes = tree.tokens.shape
        logits, out = (
            None if block is None else block[: rows * nodes].view(rows, nodes, -1) for block in (self.logits, self.out)
        )
        assert logits is not None
        accepted, seconds = self.result.read(nodes), self.args.seconds + self.prepare_seconds
        seconds += time.perf_counter() - began
        return TargetOutput(logits, out, tree, accepted=accepted, seconds=seconds)


class KernelRunner(Runner):
    """See ``Runner``. The bits of a row do not depend on the other rows of its batch."""

    def __init__(self, net: Net, built: Built, cache: KVCache | None = None) -> None:
        super().__init__(net, cache)
        self.cache.reads_unused = False
        self._recurrent: KernelStates | None = None
        if net.shape.delta is not None:
            self._recurrent = self.cache.states = KernelStates(net.shape.delta, net.shape.num_recurrent)
        self._shape, self._built, self._space = net.shape, built, Workspace(built.program)
        self._reserved = (0, 0)  # rows and slots of the cache
        self._data: Tensor | None = None  # the cache's slots; a new tensor when they have moved, for whichever runner
        self._rotation: Tensor | None = None  # by position; None if it depends on more
        # The kernel grows trees level by level, without preparing recurrent states in between.
        self._drafts_trees = net.shape.is_shifted and net.rotary.position_only and self._recurrent is None
        # Temporary outputs of drafts. Tokens that a sparse net leaves out are never written: they hold -inf.
        self._logits = torch.empty(0, net.shape.vocab_size)
        self._states = torch.empty(2, 0, net.shape.state_width)
        self._taps = torch.empty(0, net.shape.out_width)
        self._num_draft_rows = 0
        self._draft = Draft(  # the fields that are the same for every draft
            vocab_size=net.shape.vocab_size, num_fuse=built.num_fuse, num_hidden=built.num_hidden,
            logits=built.logits, read=built.read, states=built.states,
            fed_back=-1 if built.states < 0 else built.out, kept_out=built.out if built.states < 0 else -1,
        )  # fmt: skip
        program = built.program
        self._verify_args = VerifyArgs(
            ctypes.addressof(program.ops) + built.num_fuse * ctypes.sizeof(Op), ctypes.addressof(self._space.batch),
            num_ops=program.num_ops - built.num_fuse,
        )  # fmt: skip
        self._verified_logits, self._verified_out = BufferPool(), BufferPool()

    # --- forwards --------------------------------------------------------------------------------------------------

    def verify(self, entries: Entries, accept: AcceptArgs | None = None) -> TargetOutput:
        tree = entries.tree
        result = None if accept is None else self._accept_result(accept, tree.num_rows, tree.num_nodes)
        logits, out = self.forward(entries, accept=result)
        assert logits is not None
        return TargetOutput(logits, out, tree, accepted=None if result is None else result.read())

    def forward(
        self,
        entries: Entries,
        *,
        want_logits: bool = True,
        last: Tensor | None = None,
        accept: AcceptResult | None = None,
    ) -> Outputs:
        """See ``Runner.forward``; ``accept`` applies ``accept.match`` to the trees, and commits the kept nodes."""
        built, shape, tree, batch = self._built, self._shape, entries.tree, self._space.batch
        num_nodes = tree.tokens.shape[1]
        tokens, first_row, arrays = entries.tokens, entries.first_row, KernelArgs()
        rows, nodes = tokens.shape
        self.reserve(first_row + rows, max(entries.lengths) + num_nodes)
        table = self.cache.table
        if table is not None:
            table.hold(first_row, entries.lengths, num_nodes)
            batch.pages = table.address + first_row * 4 * table.stride
        if self._rotation is None:
            positions = torch.tensor(entries.lengths)[:, None] + tree.depths[:, entries.first_node :]
            prompts = None if entries.prompt_lengths is None else torch.tensor(entries.prompt_lengths)[:, None]
            rotation = self.net.rotary.cis(positions, prompts).flatten(0, 1).contiguous()
            batch.rotation, batch.rotary_half = arrays.tensor(rotation), rotation.shape[-1]
        batch.cache = self.cache.data.data_ptr() + first_row * batch.row_stride * 4
        if self._recurrent is not None:
            self._recurrent.prepare(batch, first_row, entries.lengths, num_nodes, keeps_all=entries.keeps_all)
        batch.first_node, batch.tree_nodes = entries.first_node, num_nodes
        batch.parents, batch.tokens = arrays.tensor(tree.parents.contiguous()), arrays.tensor(tokens.contiguous())
        batch.lengths = arrays.numbers("q", entries.lengths)
        batch.view = batch.watch = None
        if entries.view is not None or entries.watched is not None:
            arrays.set_view(batch, entries.view, entries.watched)
        given, out = {}, None
        if entries.states is not None:
            states = given[built.states] = entries.states.contiguous()
            if states.shape != (rows, nodes, shape.state_width):
                raise ConfigError(
                    f"a net's states must be {shape.state_width} wide, as its shape says, found {tuple(states.shape)}"
                )
        if built.out >= 0:
            out = given[built.out] = torch.empty(rows, nodes, shape.out_width)
        if want_logits:
            given[built.logits] = self._new_logits(rows, nodes)
        num_ops = None if want_logits else built.num_hidden
        args = None if accept is None else accept.args
        self._space.run(rows, nodes, given, first_op=built.num_fuse, num_ops=num_ops, accept=args)
        outputs = given[built.logits] if want_logits else None, out
        return outputs if last is None or nodes == 1 else pick(outputs, last)

    def fuse(self, features: Tensor) -> Tensor:
        built = self._built
        if built.features == built.states:
            return features
        rows, count, _ = features.shape
        states = torch.empty(rows, count, self._shape.state_width)
        given = {built.features: features.contiguous(), built.states: states}
        self._space.run(rows, count, given, num_ops=built.num_fuse)
        return states

    def commit(self, lengths: Sequence[int], path: Tensor) -> None:
        self._built.program.kernel.commit(
            self.cache.data, torch.tensor(lengths), path, self.cache.table, self._recurrent
        )

    def _new_logits(self, *shape: int) -> Tensor:
        shape = *shape, self._shape.vocab_size
        return filled(shape, -torch.inf) if self._shape.is_sparse else torch.empty(shape)

    def reserve(self, num_rows: int, num_slots: int) -> None:
        """See ``Runner.reserve``. Updates the fields that depend on the address of the slots if these have moved."""
        if self.cache.data is self._data and num_rows <= self._reserved[0] and num_slots <= self._reserved[1]:
            return
        self.cache.reserve(num_rows, num_slots)
        self._data = self.cache.data
        self._reserved = self.cache.num_rows, self.cache.num_slots
        batch, rotary = self._space.batch, self.net.rotary
        batch.set_cache(self.cache.data, self.cache.table)
        batch.rotation_by_row = int(not rotary.position_only)
        if rotary.position_only:
            self._rotation = rotary.table(self._reserved[1]).contiguous()
            batch.rotation, batch.rotary_half = self._rotation.data_ptr(), self._rotation.shape[-1]

    # --- drafts ----------------------------------------------------------------------------------------------------

    def draft(self, request: DraftRequest, verify: VerifyRequest | None = None) -> Drafted:
        """See ``Runner.draft``: in one call, if the kernel can grow such trees."""
        budget, has_noise = request.budget, request.sampling.noise.handle is not None
        depth, width, max_nodes = budget.depth, budget.width, budget.depth if budget.width == 1 else budget.nodes
        if budget.rule is not None and max_nodes is not None:
            depth, max_nodes = min(depth, budget.rule.max_depth), min(max_nodes, budget.rule.max_nodes)
        can_grow = self._drafts_trees and has_noise and not budget.paths and budget.children in ("keyed", "top")
        if not can_grow or max_nodes is None or depth < 1:
            return super().draft(request)
        arrays = KernelArgs()
        rows, entries, program = len(request.tokens), max(map(len, request.tokens)), self._built.program
        levels, unread = self._draft_batches(request, depth, arrays)
        draft = self._draft_args(request, depth, max_nodes, arrays)
        room = 1 + width + (depth - 1) * width * width  # most nodes of a row
        numbers, probs = torch.empty(3, rows * room, dtype=torch.int64), torch.empty(2, rows * room)
        address, draft.room, draft.node_probs = numbers.data_ptr(), room, probs.data_ptr()
        draft.tokens, draft.parents, draft.places = address, address + 8 * rows * room, address + 16 * rows * room
        draft.path_probs = probs.data_ptr() + 4 * rows * room
        outs = None
        if draft.kept_out >= 0:
            passes = 1 + (depth - 1) * width
            outs = torch.empty(max(passes, entries), rows, self._shape.out_width)
            levels.buffers[draft.kept_out] = unread.buffers[draft.kept_out] = outs.data_ptr()
        fused = None
        if verify is not None and isinstance(verify.runner, KernelRunner) and verify.runner is not self:
            fused = verify.runner.fused_step(verify, 1 + min(max_nodes, room - 1))
        draft.verify_args = None if fused is None else ctypes.addressof(fused.args)
        nodes = program.kernel.draft(
            program.ops, program.num_ops, ctypes.byref(levels), ctypes.byref(unread), ctypes.byref(draft),
            arrays.numbers("q", [row.tokens[row.length] for row in request.ctx.rows]), torch.get_num_threads(),
        )  # fmt: skip
        (tokens, parents, places), (node_probs, path_probs) = (
            block[:, : rows * nodes].view(-1, rows, nodes).unbind() for block in (numbers, probs)
        )
        tree = DraftTree(
            tokens, parents, path_probs, node_probs=node_probs, num_draft_forwards=draft.num_forwards,
            is_line=bool(draft.is_chain), depth=draft.deepest,
        )  # fmt: skip
        verified = None if fused is None else fused.read(tree)
        if width > 1:
            return Drafted(tree, places, draft.num_levels - 1, verified=verified)
        states = None if outs is None or entries > 1 else outs[: draft.num_levels].transpose(0, 1)
        return Drafted(tree, None, draft.num_levels - 1, states, verified)

    def _draft_batches(self, request: DraftRequest, depth: int, arrays: KernelArgs) -> tuple[BatchStruct, BatchStruct]:
        """The batch of a level, and that of the unread entries."""
        built, rows, batch, width = self._built, len(request.tokens), self._space.batch, request.budget.width
        entries, tree_slots, table = max(map(len, request.tokens)), 1 + depth * width, self.cache.table
        self.reserve(rows, max(max(request.root_slots) + tree_slots, max(request.lengths) + entries))
        if table is not None:
            ends = [length + len(ids) for length, ids in zip(request.lengths, request.tokens, strict=True)]
            table.hold(0, ends, 0)
            table.hold(0, request.root_slots, tree_slots)
            batch.pages = table.address
        count = rows * max(entries, width)
        if count > self._num_draft_rows:
            count = self._num_draft_rows = max(count, 2 * self._num_draft_rows, 16)
            self._space.reserve(count)
            self._logits, self._states = self._new_logits(count), torch.empty(2, count, self._shape.state_width)
            self._taps = torch.empty(count, self._shape.out_width)
        batch.rows, batch.cache, batch.lengths = (
            rows,
            self.cache.data.data_ptr(),
            arrays.numbers("q", request.root_slots),
        )
        batch.buffers[built.logits] = self._logits.data_ptr()
        batch.view = batch.watch = None
        if request.view is not None:
            arrays.set_view(batch, request.view)
        if request.features is not None:
            start, half = self._states.data_ptr(), self._states.stride(0) * 4
            batch.buffers[built.states], batch.buffers[built.out] = start, start + half
        elif built.out >= 0:  # taps of a target that drafts for itself: not read
            batch.buffers[built.out] = self._taps.data_ptr()
        unread = BatchStruct.from_buffer_copy(batch)
        if request.features is not None:  # a single row may have more: the unread entries come first
            features = request.features if rows == 1 else request.features[:, :entries]
            unread.buffers[built.features] = arrays.tensor(features.contiguous())
        padded = [[*ids, *[PAD] * (entries - len(ids))] for ids in request.tokens]
        unread.nodes = unread.tree_nodes = entries
        unread.first_node = 0
        unread.tokens, unread.lengths = (
            arrays.numbers("q", chain.from_iterable(padded)),
            arrays.numbers("q", request.lengths),
        )
        unread.parents = arrays.numbers("q", [*range(-1, entries - 1)] * rows)
        return batch, unread

    def _draft_args(self, request: DraftRequest, depth: int, max_nodes: int, arrays: KernelArgs) -> Draft:
        """The request as the kernel reads it, all but where trees are written."""
        sampling, calibration, rule = request.sampling, request.calibration, request.budget.rule
        temperatures, top_k, top_p, min_p = sampling.all_filters
        seeds = sampling.drawing_seeds if request.budget.children == "keyed" else [-1] * len(temperatures)
        draft = Draft.from_buffer_copy(self._draft)
        draft.depth, draft.width, draft.max_nodes = depth, request.budget.width, max_nodes
        draft.sharpness, draft.hit_rate, draft.scale = calibration.sharpness, 1 - calibration.miss, calibration.scale
        draft.noise, draft.seeds, draft.starts = (
            sampling.noise.handle,
            arrays.numbers("q", seeds),
            arrays.numbers("q", [row.length + 1 for row in request.ctx.rows]),
        )
        draft.active, draft.counts = arrays.numbers("q", request.active), arrays.numbers("q", map(len, request.tokens))
        draft.temperatures, draft.top_p, draft.min_p = (
            arrays.numbers("f", values) for values in (temperatures, top_p, min_p)
        )
        draft.top_k = arrays.numbers("i", (min(k, self._shape.vocab_size) for k in top_k))
        if sampling.adjusts:
            adjusts = []
            for row, own, biases in zip(request.ctx.rows, sampling.rows, sampling.token_biases, strict=True):
                tokens = row.tokens[: row.length] if own.penalises else []
                adjusts.append(Adjust(
                    own.repetition_penalty, own.presence_penalty, own.frequency_penalty, len(biases),
                    arrays.numbers("q", tokens), len(tokens), row.prompt_length, arrays.numbers("q", biases),
                    arrays.numbers("f", biases.values()),
                ))  # fmt: skip
            draft.adjusts = arrays.structures(adjusts)
        if rule is not None:
            draft.num_tables, draft.num_knots = rule.knots.shape
            tables = (rule.knots, rule.rates, rule.gains, rule.costs, rule.verify)
            draft.knots, draft.rates, draft.gains, draft.costs, draft.verify = (table.ctypes.data for table in tables)
            draft.worth, draft.share = rule.worth, rule.share
        return draft

    def fused_step(self, request: VerifyRequest, nodes: int) -> FusedStep | None:
        """Prepare to verify trees of at most ``nodes`` nodes in the call that drafts them.

        None if the rotations depend on more than the lengths, or the largest trees need more pages than are free.
        """
        began, rows, table, built = time.perf_counter(), len(request.lengths), self.cache.table, self._built
        self.reserve(rows, max(request.lengths) + nodes)
        if self._rotation is None or self._shape.is_sparse:
            return None
        batch, args = self._space.batch, self._verify_args
        if table is not None:
            if table.num_missing(request.lengths, nodes) > table.num_available:
                return None
            table.hold(0, request.lengths, nodes)
            batch.pages = table.address
        if self._recurrent is not None:
            self._recurrent.prepare(batch, 0, request.lengths, nodes)
        if rows * nodes > self._space.capacity:
            self._space.reserve(rows * nodes)
        result = self._accept_result(request.accept, rows, nodes)
        args.accept = ctypes.addressof(result.args)
        batch.view = batch.watch = None
        batch.rows, batch.cache = rows, self.cache.data.data_ptr()
        batch.lengths = result.arrays.numbers("q", request.lengths)
        logits, batch.buffers[built.logits] = self._verified_logits.take(rows * nodes, self._shape.vocab_size)
        out = None
        if built.out >= 0:
            out, batch.buffers[built.out] = self._verified_out.take(rows * nodes, self._shape.out_width)
        return FusedStep(args, logits, out, result, time.perf_counter() - began)

    def _accept_result(self, accept: AcceptArgs, rows: int, nodes: int) -> AcceptResult:
        result, built = AcceptResult(accept, rows, nodes), self._built
        args = result.args
        args.logits, args.out = built.logits, built.out
        args.layers, _, _, args.kv_heads, _, _ = self.cache.data.shape
        return result


class KernelRuntime:
    name = "kernel"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._built: weakref.WeakKeyDictionary[Net, Built] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def runner(self, net: Net, holder: object, cache: KVCache | None = None) -> KernelRunner:
        with self._lock:
            built = self._built.get(net)
            if built is None:
                built = self._built[net] = Built.of(net, self.kernel)
        return KernelRunner(net, built, cache)
