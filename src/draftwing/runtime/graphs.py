"""CUDA graphs of forwards and whole drafts: a step of hundreds of small kernels becomes one launch.

A graph repeats the same kernels on the same memory, so shapes are rounded up to buckets, inputs are copied into static
tensors, and outputs are valid until the next replay. The recorded functions are those of eager decoding; they can be
recorded because they read nothing from the host.

Shape suffixes: B rows, N nodes (padded to the bucket), W entries, V vocabulary, F features.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from draftwing.errors import DraftwingWarning
from draftwing.models import gpu
from draftwing.models.cache import KVCache
from draftwing.models.context import TargetOutput
from draftwing.models.paged import makes_pages
from draftwing.noise import AcceptArgs
from draftwing.runtime.forward import PREFILL_CHUNK, EagerRunner, Entries, Net, pick
from draftwing.runtime.tree_builder import Drafted, DraftRequest, TreeBuilder, VerifyRequest
from draftwing.sampling import SamplingBatch
from draftwing.torch_utils import on_device
from draftwing.tree import PAD, DraftTree

WARM_UPS = 2  # runs before a capture, in which libraries initialise; they may not during the capture
CAPACITY = 64  # recordings over one cache; the least recently used goes first

Outputs = tuple[Tensor, ...]
T = TypeVar("T")


class RecordingCount(threading.local):
    """The number of recordings that this thread has made: a step with one takes as long as many others."""

    num = 0


RECORDED = RecordingCount()


# Records a function, maybe by several runs, and returns one that replays it into the same tensors.
Record = Callable[[Callable[[], Outputs]], Callable[[], Outputs]]


class CudaRecorder:
    """Records CUDA graphs on one device. They share a memory pool: a replay overwrites the outputs of the last one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: torch.cuda.CUDAGraph | None = None  # a pool ends with its last graph: this one stays

    def __call__(self, function: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """See ``Record``. A function that cannot be captured runs eagerly instead, and a warning says why."""
        with torch.cuda.device(self._device):
            stream, current = torch.cuda.Stream(self._device), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    function()
            current.wait_stream(stream)
            if self._first is None:
                self._first = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._first, capture_error_mode="thread_local"):
                    torch.zeros(1, device=self._device)
            graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
            gc.disable()  # freeing memory, such as that of another graph, would end the capture
            try:
                # Other threads may make CUDA calls during the capture.
                with torch.cuda.graph(graph, pool=self._first.pool(), capture_error_mode="thread_local"):
                    outputs = function()
            except RuntimeError as error:
                # The pool and the generator of random numbers still believe that a capture is running.
                generator = torch.cuda.default_generators[torch.cuda.current_device()]
                generator.graphsafe_set_state(generator.clone_state())
                self._first = None
                warnings.warn(
                    f"a CUDA graph could not be captured, so this part of decoding runs kernel by kernel, slower and "
                    f"with the same result: {str(error).splitlines()[0]}",
                    DraftwingWarning,
                    stacklevel=2,
                )
                return function
            finally:
                if collects:
                    gc.enable()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay


@dataclass
class Recording(Generic[T]):
    """A function over static ``inputs``, recorded at its first run.

    Recorded earlier, with empty inputs, it would write wrong keys and values into the slots of the first tokens.
    """

    record: Record
    inputs: T
    function: Callable[[], Outputs]
    replay: Callable[[], Outputs] | None = None

    def run(self) -> Outputs:
        """Outputs for the current inputs, valid until the next run of any recording of the same ``Record``."""
        if self.replay is None:
            self.replay = self.record(self.function)
            RECORDED.num += 1
        return self.replay()


class Recordings(Generic[T]):
    """Recordings over one cache, by key; dropped when its slots move, since a graph holds addresses."""

    def __init__(self, record: Record, cache: KVCache) -> None:
        self._record, self._cache, self._data = record, cache, cache.data
        self._by_key: dict[Hashable, Recording[T]] = {}  # the most recently used last

    def get(self, key: Hashable, make: Callable[[], tuple[T, Callable[[], Outputs]]]) -> Recording[T]:
        """The recording for ``key``. If there is none, ``make`` returns its inputs and function.

        Slots must be reserved before.
        """
        if self._cache.data is not self._data:
            self._by_key.clear()
            self._data = self._cache.data
        recording = self._by_key.pop(key, None) or Recording(self._record, *make())
        self._by_key[key] = recording
        if len(self._by_key) > CAPACITY:
            del self._by_key[next(iter(self._by_key))]
        return recording


class Pool(Generic[T]):
    """Lends runners to one holder at a time, so that the next holder gets the graphs recorded by the last one.

    One idle runner is kept.
    """

    def __init__(self) -> None:
        self._idle: T | None = None

    def lend(self, holder: object, make: Callable[[], T]) -> T:
        """A runner for the lifetime of ``holder``, which it must not refer to."""
        lent, self._idle = make() if self._idle is None else self._idle, None
        weakref.finalize(holder, self._take_back, lent).atexit = False
        return lent

    def _take_back(self, lent: T) -> None:
        self._idle = lent if self._idle is None else self._idle


NODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
PROMPT_BUCKETS = (16, 32, 64, 128, PREFILL_CHUNK)
ROW_BUCKETS = (1, 2, 4, 8, 16)  # so that few joining or leaving requests change the bucket
MIN_SLOTS = 256  # smallest bucket of KV slots


def round_up_to(sizes: tuple[int, ...], count: int) -> int:
    """Size of the bucket for ``count`` nodes or rows: one of ``sizes``, or a multiple of the last."""
    return next((size for size in sizes if size >= count), -(-count // sizes[-1]) * sizes[-1])


def round_up_slots(count: int, cache: KVCache) -> int:
    """Slots that attention reads if it needs ``count``: a power of two, or all there are."""
    return min(max(1 << (count - 1).bit_length(), MIN_SLOTS), cache.num_slots)


# --- a net -----------------------------------------------------------------------------------------------------------


class _Bucket(NamedTuple):
    """The static inputs of one recorded forward."""

    # tokens, parents: (B, N) of the trees, followed by values of earlier trees
    tokens: Tensor
    parents: Tensor
    lengths: Tensor  # (B,) committed tokens
    table: Tensor  # the recorded rotation factors: kept alive, since a longer table may replace them in the net


class _Prompt(NamedTuple):
    """The static inputs of a recorded piece of a prompt."""

    numbers: Tensor  # (B, 2) of each row: its number, and its committed tokens
    tokens: Tensor  # (B, W)
    states: Tensor | None  # (B, W, H), or None
    table: Tensor  # see ``_Bucket``


class RecordedRunner(EagerRunner):
    """See ``Runner``: forwards of trees by bucket, and whole drafts, each one recording.

    A bucket is (rows rounded up, nodes forwarded before, nodes rounded up, slots rounded up). Nodes that only fill a
    bucket do no harm: no node of the tree attends to them, and their keys and values go into reserved slots after the
    tree's, which are written again before they are read. Rows that only fill a bucket write slots that no request
    uses: a row that joins later fills its own first.
    """

    keeps_outputs = False

    def __init__(self, net: Net, record: Record, cache: KVCache | None = None) -> None:
        super().__init__(net, cache)
        self._buckets: Recordings[_Bucket] = Recordings(record, self.cache)
        self._prompts: Recordings[_Prompt] = Recordings(record, self.cache)
        self._drafts: Recordings[_Draft] = Recordings(record, self.cache)
        # Their rows are numbers on the device, which the kernels alone read.
        self._records_prompts = gpu.attends(net.device, net.dtype, net.shape.head_dim)

    def forward(
        self, entries: Entries, *, want_logits: bool = True, last: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """See ``Runner.forward``; the result is valid until the next one. Drafts and views run eagerly."""
        is_prompt = not want_logits and entries.tree.is_line and entries.ids is None and not entries.first_node
        if is_prompt and self._records_prompts and entries.view is None and entries.watched is None:
            return None, self._read(entries)
        if not want_logits or entries.states is not None or entries.first_row or entries.view is not None:
            return super().forward(entries, want_logits=want_logits, last=last)
        logits, out, _ = self._replay(entries)
        return (logits, out) if last is None else pick((logits, out), last)

    def _read(self, entries: Entries) -> Tensor | None:
        """Write the slots of a piece of a prompt, padded to a bucket; returns the second output of its tokens."""
        rows, count = entries.tokens.shape
        length = round_up_to(PROMPT_BUCKETS, count)
        last_slot = max(entries.lengths) + length
        self.reserve(entries.first_row + rows, last_slot)
        self.cache.hold(entries.first_row, entries.lengths, count)
        width = round_up_slots(last_slot, self.cache)
        key = (rows, length, width)
        recording = self._prompts.get(key, lambda: self._prompt(rows, length, width))
        prompt, device = recording.inputs, self.device
        numbers = [[entries.first_row + row, start] for row, start in enumerate(entries.lengths)]
        prompt.numbers.copy_(on_device(numbers, device))
        prompt.tokens[:, :count].copy_(entries.tokens)
        if prompt.states is not None and entries.states is not None:
            prompt.states[:, :count].copy_(entries.states)
        outputs = recording.run()
        return outputs[0][:, :count].clone() if outputs else None

    def _prompt(self, rows: int, length: int, width: int) -> tuple[_Prompt, Callable[[], Outputs]]:
        tokens = torch.zeros(rows, length, dtype=torch.int64, device=self.device)
        size, states = self.net.shape.state_width or self.net.shape.feature_width, None
        if size:
            states = torch.zeros(rows, length, size, dtype=self.net.dtype, device=self.device)
        prompt = _Prompt(torch.zeros_like(tokens[:, :2]), tokens, states, self.net.rotary.table(width))

        def run() -> Outputs:
            first, lengths = prompt.numbers.unbind(1)
            entries = Entries(DraftTree.chain(tokens), (), states=states, rows=first.contiguous())
            _, out = self.hidden(entries, lengths.contiguous(), width=width, upto=width)
            return () if out is None else (out,)

        return prompt, run

    def verify(self, entries: Entries, accept: AcceptArgs | None = None) -> TargetOutput:
        """See ``Runner.verify``. Acceptance reads the paths that the forward has computed."""
        tree, (logits, out, paths) = entries.tree, self._replay(entries)
        return TargetOutput(logits, out, tree if tree.is_line else replace(tree, paths=paths), self.keeps_outputs)

    def _replay(self, entries: Entries) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor]]:
        """Logits and second output of the new nodes, and ``DraftTree.paths`` of all nodes."""
        tree = entries.tree
        rows, nodes, first_node = tree.num_rows, tree.num_nodes, entries.first_node
        padded = first_node + round_up_to(NODE_BUCKETS, nodes - first_node)
        num_slots, wide = max(entries.lengths) + padded, round_up_to(ROW_BUCKETS, rows)
        self.reserve(wide, num_slots)
        self.cache.hold(0, entries.lengths, padded)
        width = round_up_slots(num_slots, self.cache)
        key = (wide, first_node, padded, width)
        recording = self._buckets.get(key, lambda: self._bucket(wide, padded, width, first_node))
        bucket = recording.inputs
        bucket.lengths[:rows].copy_(on_device(entries.lengths, bucket.lengths.device))
        bucket.tokens[:rows, :nodes].copy_(tree.tokens)
        bucket.parents[:rows, :nodes].copy_(tree.parents)
        logits, ancestors, depths, *out = recording.run()
        paths = (ancestors[:rows, :nodes, :nodes].clone(), depths[:rows, :nodes].clone())  # a tree outlives its step
        fresh = nodes - first_node
        return logits[:rows, :fresh], out[0][:rows, :fresh] if out else None, paths

    def _bucket(self, rows: int, nodes: int, width: int, first_node: int) -> tuple[_Bucket, Callable[[], Outputs]]:
        tokens = torch.full((rows, nodes), PAD, dtype=torch.int64, device=self.device)
        lengths = torch.zeros(rows, dtype=torch.int64, device=self.device)
        bucket = _Bucket(tokens, torch.full_like(tokens, -1), lengths, self.net.rotary.table(width))

        def run() -> Outputs:
            tree = DraftTree(bucket.tokens, bucket.parents)
            read, out = self.hidden(Entries(tree, (), first_node=first_node), bucket.lengths, width=width, upto=width)
            outputs = (self.logits(read), tree.ancestors, tree.depths)
            return outputs if out is None else (*outputs, out)

        return bucket, run

    def draft(self, request: DraftRequest, verify: VerifyRequest | None = None) -> Drafted:
        """See ``Runner.draft``: the same trees that it grows eagerly."""
        kind = recording_key(request)
        if kind is None:
            return super().draft(request)
        count, rows, depth, lengths = request.num_entries, len(request.tokens), request.budget.depth, request.root_slots
        wide, nodes = round_up_to(ROW_BUCKETS, rows), 1 + request.max_nodes
        # After a tree of this depth no row has more unread entries: one bucket for all of them.
        entries = depth + 1 if count <= depth + 1 else 1 << (count - 1).bit_length()
        num_slots = max(max(request.lengths) + entries, max(lengths) + nodes)
        self.reserve(wide, num_slots)
        self.cache.hold(0, request.lengths, entries)
        self.cache.hold(0, lengths, nodes)
        width = round_up_slots(num_slots, self.cache)
        key = (wide, entries, width, kind)
        recording = self._drafts.get(key, lambda: self._new_draft(wide, entries, width, request))
        recording.inputs.fill(request)
        outputs = [output[:rows].clone() for output in recording.run()]  # a step keeps its tree
        if len(outputs) == 1:
            return Drafted(DraftTree.chain(outputs[0]), num_levels=depth - 1)
        tokens, parents, confidence, *places = outputs
        return Drafted(DraftTree(tokens, parents, confidence, depth=depth), places[0] if places else None, depth - 1)

    def _new_draft(
        self, rows: int, entries: int, width: int, request: DraftRequest
    ) -> tuple[_Draft, Callable[[], Outputs]]:
        draft = _Draft(rows, entries, request, self.net, width)
        budget, calibration, wants_places = request.budget, request.calibration, request.wants_places

        def run_level(
            tree: DraftTree, first: int, ids: Tensor | None, states: Tensor | None
        ) -> tuple[Tensor, Tensor | None]:
            level = Entries(tree, (), first_node=first, ids=ids, states=states)
            read, out = self.hidden(level, draft.lengths, width=width, upto=width)
            return self.logits(read), out

        def run() -> Outputs:
            states = None if draft.features is None else self.fuse(draft.features)
            unread = Entries(DraftTree.chain(draft.tokens), (), states=states)
            read, out = pick(self.hidden(unread, draft.fed, width=width, upto=width), draft.last)
            assert read is not None
            builder = TreeBuilder(
                draft.pending, draft.active, (), draft.sampling, budget, calibration, wants_places=wants_places
            )
            grown = builder.grow(self.logits(read), out, run_level, shifted=self.net.shape.is_shifted)
            tree = grown.tree
            if tree.is_line:
                return (tree.tokens,)
            assert tree.confidence is not None
            parts = (tree.tokens, tree.parents, tree.confidence)
            return parts if grown.places is None else (*parts, grown.places)

        return draft, run


def recording_key(request: DraftRequest) -> Hashable | None:
    """The values that a recorded draft depends on; None if the draft cannot be recorded.

    Not recorded: views; trees grown by a rule, since the host decides while they grow; scores that need more than
    temperatures, since top-p waits for the device and penalties read a growing history; and children drawn from q.
    """
    sampling, budget = request.sampling, request.budget
    if request.view is not None or budget.rule is not None or budget.children not in ("keyed", "top"):
        return None
    if not sampling.only_temperature:
        return None
    # Everything that the code of the scores reads on the host.
    return (
        budget, request.calibration, request.wants_places,
        sampling.all_greedy, sampling.num_greedy > 0, sampling.scales,
    )  # fmt: skip


class GraphRuntime:
    """See ``Runtime``. A runner without a holder is lent to the next one, with its recordings."""

    name = "torch"

    def __init__(self, record: Record) -> None:
        self.record = record
        self._pools: weakref.WeakKeyDictionary[Net, Pool[RecordedRunner]] = weakref.WeakKeyDictionary()

    def runner(self, net: Net, holder: object, cache: KVCache | None = None) -> EagerRunner:
        """See ``Runtime.runner``. Rotations that depend on prompt lengths are not recorded."""
        if not net.rotary.position_only:
            return EagerRunner(net, cache)
        if cache is not None or makes_pages():  # shared slots belong to their owner, pages to their table
            return RecordedRunner(net, self.record, cache)
        pool = self._pools.setdefault(net, Pool())
        return pool.lend(holder, lambda: RecordedRunner(net, self.record))


# --- the static inputs of a recorded draft ---------------------------------------------------------------------------


class _StaticSampling(SamplingBatch):
    """Temperatures and noise for ``num_levels`` positions in static tensors; ``all_greedy`` is fixed.

    ``like`` are rows of the same kind, at most ``num_rows``.
    """

    def __init__(self, like: SamplingBatch, num_rows: int, num_levels: int) -> None:
        super().__init__([*like.rows, *[like.rows[0]] * (num_rows - len(like.rows))], like.noise, like.device)
        self._levels: Tensor | None = None
        if self.all_greedy:
            return
        self.greedy, self.temperature = torch.zeros_like(self.greedy), torch.ones_like(self.temperature)
        self._levels = torch.zeros(num_rows, num_levels, like.noise.vocab_size, device=like.device)

    def fill(self, other: SamplingBatch, starts: Sequence[int], *, with_noise: bool) -> None:
        if self._levels is None:
            return
        rows = len(other.rows)
        self.greedy[:rows].copy_(other.greedy)
        self.temperature[:rows].copy_(other.temperature)
        if with_noise:
            self._levels[:rows].copy_(other.noise.block(other.seeds, starts, self._levels.shape[1]))

    def perturb_level(self, scores: Tensor, starts: Sequence[int], level: int) -> Tensor:
        return scores if self._levels is None else self.add_noise(scores, self._levels[:, level : level + 1])


class _Draft:
    """The inputs, views of one tensor that the host fills in one copy.

    Attributes:
        tokens: (B, W) of the unread entries, PAD past the end of a row; features: (B, W, F) or None.
        fed, lengths, pending: (B,); last: (B, 1, 1) the last entry of each row; active: (B, 1).
    """

    def __init__(self, rows: int, entries: int, request: DraftRequest, net: Net, width: int) -> None:
        self._numbers = torch.zeros(rows, entries + 5, dtype=torch.int64, device=net.device)
        self.tokens = self._numbers[:, :entries]
        self.fed, self.lengths, self.pending, last, active = self._numbers[:, entries:].unbind(1)
        self.last, self.active = last[:, None, None], active[:, None]
        features = request.features
        self.features = None if features is None else features.new_zeros(rows, entries, features.shape[2])
        self.sampling = _StaticSampling(request.sampling, rows, request.budget.depth)
        self._entries, self._table = entries, net.rotary.table(width)

    def fill(self, request: DraftRequest) -> None:
        columns = zip(
            request.tokens, request.lengths, request.root_slots, request.roots, map(int, request.active), strict=True
        )
        numbers = [
            [*ids, *[PAD] * (self._entries - len(ids)), fed, length, pending, max(len(ids), 1) - 1, active]
            for ids, fed, length, pending, active in columns
        ]
        rows = len(numbers)
        self._numbers[:rows].copy_(on_device(numbers, self._numbers.device))
        if self.features is not None and request.features is not None:
            count = min(request.features.shape[1], self._entries)
            self.features[:rows, :count].copy_(request.features[:, :count])
            if count < self._entries:  # clear old features: a NaN would not stay in its own entry (0 * NaN is NaN)
                self.features[:, count:].zero_()
        self.sampling.fill(request.sampling, request.starts, with_noise=request.budget.children == "keyed")
