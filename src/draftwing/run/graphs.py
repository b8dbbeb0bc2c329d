"""Recorded forwards: on a GPU a step of hundreds of small kernels becomes one launch (CUDA graphs).

A graph repeats the same kernels on the same memory, so that nothing may change but what lies there: shapes are rounded
up to buckets, inputs are copied into static tensors, and outputs are good until the next replay. The functions that
are recorded here are the ordinary ones of eager decoding; what makes them recordable is that they learn nothing from
the host. How something is recorded stands behind ``Record``: on a CPU ``Recorder`` runs the function anew at every
replay, so that everything but the capture itself is tested where there is no GPU.

Shape suffixes: B rows, N nodes (padded to the bucket), V vocabulary, F features.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.errors import DraftwingWarning
from draftwing.model.cache import KVCache, TreeAttention
from draftwing.model.config import ModelConfig
from draftwing.model.layers import Attend
from draftwing.model.linear import MIN_ROWS, Linear
from draftwing.model.rope import Rotary
from draftwing.model.target import FeatureSpec, TargetOutput, on_device
from draftwing.tree import PAD, DraftTree

__all__ = [
    "CudaRecorder",
    "Pool",
    "Record",
    "Recorder",
    "Recording",
    "Recordings",
    "TreeGraphs",
    "round_up_rows",
    "round_up_slots",
]

NODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
ROW_BUCKETS = (1, 2, 4, 8, 16)
MIN_SLOTS = 256  # fewer are not worth a graph of their own
WARM_UPS = 2  # runs before a capture: libraries set themselves up in the first, and may not while it is recorded
CAPACITY = 64  # recordings over one cache; the least recently used goes first

Outputs = tuple[Tensor, ...]
T = TypeVar("T")


def round_up_nodes(count: int) -> int:
    """Nodes of the bucket that ``count`` nodes go into."""
    return _bucket_of(count, NODE_BUCKETS)


def round_up_rows(count: int) -> int:
    """Rows of the bucket that ``count`` rows go into: while requests come and go, most of them change nothing."""
    return _bucket_of(count, ROW_BUCKETS)


def _bucket_of(count: int, sizes: tuple[int, ...]) -> int:
    return next((size for size in sizes if size >= count), -(-count // sizes[-1]) * sizes[-1])


def round_up_slots(count: int, cache: KVCache) -> int:
    """Slots that attention looks at where it needs ``count``: a power of two, or all there are."""
    return min(max(1 << (count - 1).bit_length(), MIN_SLOTS), cache.num_slots)


# --- recording -------------------------------------------------------------------------------------------------------


class Record(Protocol):
    """Records a function without arguments, and gives back what replays it.

    The function may run any number of times while it is recorded: it must write the same whenever its inputs are the
    same. All replays return the same tensors, which each of them overwrites.
    """

    num_recorded: int

    def __call__(self, function: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """What replays ``function``."""
        ...


class Recorder:
    """Replays by running the function again: for tests, and for machines without graphs.

    It is as strict as a graph about outputs: every replay writes over those of the last.
    """

    def __init__(self) -> None:
        self.num_recorded = self.num_replays = 0

    def __call__(self, function: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """See ``Record``."""
        self.num_recorded += 1
        static = tuple(output.clone() for output in function())

        def replay() -> Outputs:
            self.num_replays += 1
            for kept, fresh in zip(static, function(), strict=True):
                kept.copy_(fresh)
            return static

        return replay


class CudaRecorder:
    """Records CUDA graphs on one device. They share a memory pool: one replay's outputs are gone at the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # PyTorch's handle of it
        self.num_recorded = 0

    def __call__(self, function: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """See ``Record``. A function that cannot be captured runs eagerly instead, and a warning says why."""
        self.num_recorded += 1
        with torch.cuda.device(self._device):
            stream, current = torch.cuda.Stream(self._device), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    function()
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads may go on with CUDA calls of their own while this one captures.
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    outputs = function()
            except RuntimeError as error:
                warnings.warn(
                    f"a CUDA graph could not be captured, so this part of decoding runs kernel by kernel, slower and "
                    f"with the same result: {str(error).splitlines()[0]}",
                    DraftwingWarning,
                    stacklevel=2,
                )
                return function
            self._pool = self._pool or graph.pool()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay


class Recording:
    """A function over static inputs. It is recorded at its first run, when these hold something real.

    Made before, a recording would write keys and values of nothing into the slots of the first tokens.
    """

    def __init__(self, record: Record, function: Callable[[], Outputs]) -> None:
        self._record, self._function = record, function
        self._replay: Callable[[], Outputs] | None = None

    def run(self) -> Outputs:
        """The outputs for what the inputs hold now, good until the next run of anything of the same ``Record``."""
        if self._replay is None:
            self._replay = self._record(self._function)
        return self._replay()


class Recordings(Generic[T]):
    """What was recorded over one cache, by key; forgotten when its slots move, since a graph knows addresses alone."""

    def __init__(self, cache: KVCache) -> None:
        self._cache, self._data = cache, cache.data
        self._found: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The one for ``key``, made where there is none. Slots must be reserved before."""
        if self._cache.data is not self._data:
            self._found.clear()
            self._data = self._cache.data
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = make()
            if len(self._found) > CAPACITY:
                self._found.popitem(last=False)
        else:
            self._found.move_to_end(key)
        return found


class Pool(Generic[T]):
    """Things with slots, lent to one holder at a time: the next gets the graphs that the last one has recorded.

    Args:
        keep: how many may lie idle; more are let go, and their memory with them.
    """

    def __init__(self, keep: int = 1) -> None:
        self._free: list[T] = []
        self._keep = keep

    def lend(self, holder: object, make: Callable[[], T]) -> T:
        """One for as long as ``holder`` lives, which it must not refer to."""
        lent = self._free.pop() if self._free else make()
        weakref.finalize(holder, self._take_back, lent).atexit = False
        return lent

    def _take_back(self, lent: T) -> None:
        if len(self._free) < self._keep:
            self._free.append(lent)


# --- the target ------------------------------------------------------------------------------------------------------


class _Bucket:
    """The static inputs of one recorded forward.

    Attributes:
        tokens, parents: (B, N) of the trees, and past them of whatever was there before.
        lengths: (B,) committed tokens.
        table: the rotation factors that were recorded: held, since a longer table takes its place elsewhere.
    """

    def __init__(self, rows: int, nodes: int, device: torch.device, table: Tensor) -> None:
        self.tokens = torch.full((rows, nodes), PAD, dtype=torch.int64, device=device)
        self.parents = torch.full_like(self.tokens, -1)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.table = table
        self.recording: Recording | None = None


class TreeGraphs:
    """A lean decoder's forward over the slots of one cache, recorded by buckets.

    A bucket is (rows rounded up, nodes forwarded before, nodes rounded up, slots rounded up, taps). Nodes that only
    fill a bucket, unused ones or what an earlier tree left there, do no harm: no node of the tree sees them, and their
    keys and values go into slots past the tree's, reserved for them and written again before anything looks at them.
    Rows that only fill a bucket write slots of no one: a row that joins later fills its own first.

    Args:
        cache: its own; prefill and commit use it too.
        run_layers: (R, H) embeddings, rotation factors, attention, features -> (R, H) and the taps (R, F).
    """

    def __init__(
        self,
        cache: KVCache,
        config: ModelConfig,
        rotary: Rotary,
        embedding: Tensor,
        head: Linear,
        run_layers: Callable[[Tensor, Tensor, Attend, FeatureSpec], tuple[Tensor, Tensor | None]],
        record: Record,
    ) -> None:
        self.cache = cache
        self._config, self._rotary, self._embedding, self._head = config, rotary, embedding, head
        self._run_layers, self._record = run_layers, record
        self._buckets: Recordings[_Bucket] = Recordings(cache)

    def forward(self, lengths: Sequence[int], tree: DraftTree, features: FeatureSpec, first_node: int) -> TargetOutput:
        """See ``Target.forward``; what it returns is good until the next one."""
        rows, nodes = tree.num_rows, tree.num_nodes
        padded = first_node + round_up_nodes(nodes - first_node)
        most = max(lengths) + padded
        wide = round_up_rows(rows)
        self.cache.reserve(wide, most)
        width = round_up_slots(most, self.cache)
        key = (wide, first_node, padded, width, features.taps)
        bucket = self._buckets.get(key, lambda: self._bucket(wide, padded, width, first_node, features))
        bucket.lengths[:rows].copy_(on_device(lengths, bucket.lengths.device))
        bucket.tokens[:rows, :nodes].copy_(tree.tokens)
        bucket.parents[:rows, :nodes].copy_(tree.parents)
        assert bucket.recording is not None
        logits, ancestors, depths, *taps = bucket.recording.run()
        if not tree.is_line:  # the rule walks along them; copies, since a tree outlives its step
            tree = replace(tree, paths=(ancestors[:rows, :nodes, :nodes].clone(), depths[:rows, :nodes].clone()))
        fresh = nodes - first_node
        return TargetOutput(logits[:rows, :fresh], taps[0][:rows, :fresh] if taps else None, tree)

    def _bucket(self, rows: int, nodes: int, width: int, first_node: int, features: FeatureSpec) -> _Bucket:
        bucket = _Bucket(rows, nodes, self.cache.data.device, self._rotary.table(width))
        bucket.recording = Recording(self._record, lambda: self._forward(bucket, width, first_node, features))
        return bucket

    def _forward(self, bucket: _Bucket, width: int, first_node: int, features: FeatureSpec) -> Outputs:
        """Logits (B, N, V), the trees' ancestors and depths, and the taps (B, N, F) if any: what is recorded."""
        config, lengths, tree = self._config, bucket.lengths, DraftTree(bucket.tokens, bucket.parents)
        rows, nodes = tree.num_rows, tree.num_nodes - first_node
        real = rows * nodes
        positions = lengths[:, None] + tree.depths[:, first_node:]
        cis = self._rotary.cis(positions, upto=width).view(real, 1, -1)
        x = F.embedding(tree.tokens[:, first_node:].clamp(min=0).reshape(-1), self._embedding)
        if real < MIN_ROWS:
            x = F.pad(x, (0, 0, 0, MIN_ROWS - real))
        windows, heads, scale = config.sliding_windows, config.num_heads, config.head_dim**-0.5
        attend = TreeAttention(
            self.cache, 0, None, lengths, tree, first_node, windows, heads, scale, max(real, MIN_ROWS), width
        )
        x, taps = self._run_layers(x, cis, attend, features)
        logits = self._head.forward(x)[:real].view(rows, nodes, -1)
        found = (logits, tree.ancestors, tree.depths)
        return found if taps is None else (*found, taps[:real].view(rows, nodes, -1))
