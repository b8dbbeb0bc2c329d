"""Recorded forwards: on a GPU a step of hundreds of small kernels becomes one launch (CUDA graphs).

A graph repeats the same kernels on the same memory, so that nothing may change but what lies there: shapes are rounded
up to buckets, inputs are copied into static tensors, and outputs are good until the next replay. The functions that
are recorded here are the ordinary ones of eager decoding; what makes them recordable is that they learn nothing from
the host. How something is recorded stands in ``run.recording``.

Shape suffixes: B rows, N nodes (padded to the bucket), V vocabulary, F features.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from draftwing.model.cache import KVCache
from draftwing.model.paged import makes_pages
from draftwing.run.eager import EagerRunner, Inputs
from draftwing.run.forward import Entries, Net, on_device, pick
from draftwing.run.growing import Asked, grow
from draftwing.run.recording import Outputs, Pool, Record, Recording, Recordings
from draftwing.run.request import Drafted, Waiting
from draftwing.sampling import SamplingBatch
from draftwing.tree import PAD, DraftTree

__all__ = ["GraphRuntime", "RecordedRunner", "round_up_nodes"]

NODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
ROW_BUCKETS = (1, 2, 4, 8, 16)
MIN_SLOTS = 256  # fewer are not worth a graph of their own


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


# --- a net -----------------------------------------------------------------------------------------------------------


class _Bucket:
    """The static inputs of one recorded forward.

    Attributes:
        tokens, parents: (B, N) of the trees, and past them of whatever was there before.
        lengths: (B,) committed tokens.
        table: the rotation factors that were recorded: held, since a longer table takes its place elsewhere.
    """

    def __init__(self, rows: int, nodes: int, net: Net, width: int) -> None:
        self.tokens = torch.full((rows, nodes), PAD, dtype=torch.int64, device=net.device)
        self.parents = torch.full_like(self.tokens, -1)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=net.device)
        self.table = net.rotary.table(width)
        self.recording: Recording | None = None


class RecordedRunner(EagerRunner):
    """See ``Runner``: forwards of trees by bucket, and whole drafts, each one recording.

    A bucket is (rows rounded up, nodes forwarded before, nodes rounded up, slots rounded up). Nodes that only fill a
    bucket, unused ones or what an earlier tree left there, do no harm: no node of the tree sees them, and their keys
    and values go into slots past the tree's, reserved for them and written again before anything looks at them. Rows
    that only fill a bucket write slots of no one: a row that joins later fills its own first.
    """

    keeps_outputs = False

    def __init__(self, net: Net, record: Record, cache: KVCache | None = None) -> None:
        super().__init__(net, cache)
        self._record = record
        self._buckets: Recordings[_Bucket] = Recordings(self.cache)
        self._drafts: Recordings[_Draft] = Recordings(self.cache)

    def forward(
        self, entries: Entries, *, want_logits: bool = True, last: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """See ``Runner.forward``; what it returns is good until the next one. Prompts, drafts and views run eagerly."""
        tree = entries.tree
        if not want_logits or entries.states is not None or entries.first_row or entries.view is not None:
            return super().forward(entries, want_logits=want_logits, last=last)
        rows, nodes, first_node = tree.num_rows, tree.num_nodes, entries.first_node
        padded = first_node + round_up_nodes(nodes - first_node)
        most = max(entries.lengths) + padded
        wide = round_up_rows(rows)
        self.reserve(wide, most)
        self.cache.hold(0, entries.lengths, padded)
        width = round_up_slots(most, self.cache)
        key = (wide, first_node, padded, width)
        bucket = self._buckets.get(key, lambda: self._bucket(wide, padded, width, first_node))
        bucket.lengths[:rows].copy_(on_device(entries.lengths, bucket.lengths.device))
        bucket.tokens[:rows, :nodes].copy_(tree.tokens)
        bucket.parents[:rows, :nodes].copy_(tree.parents)
        assert bucket.recording is not None
        logits, ancestors, depths, *out = bucket.recording.run()
        # The rule walks along these; copies, since a tree outlives its step.
        self.paths = (ancestors[:rows, :nodes, :nodes].clone(), depths[:rows, :nodes].clone())
        fresh = nodes - first_node
        found = logits[:rows, :fresh], out[0][:rows, :fresh] if out else None
        return found if last is None else pick(found, last)

    def _bucket(self, rows: int, nodes: int, width: int, first_node: int) -> _Bucket:
        bucket = _Bucket(rows, nodes, self.net, width)

        def run() -> Outputs:
            tree = DraftTree(bucket.tokens, bucket.parents)
            ids = tree.tokens[:, first_node:]
            read, out = self.hidden(Inputs(tree, ids, None, bucket.lengths, None, width, width, first_node))
            found = (self.logits(read), tree.ancestors, tree.depths)
            return found if out is None else (*found, out)

        bucket.recording = Recording(self._record, run)
        return bucket

    def draft(self, waiting: Waiting, asked: Asked) -> Drafted:
        """See ``Runner.draft``: the very tree that growing it eagerly gives."""
        kind = asked.key() if waiting.view is None else None
        if kind is None:
            return super().draft(waiting, asked)
        count, rows, lengths = waiting.num_entries, len(waiting.tokens), waiting.roots
        wide, depth = round_up_rows(rows), asked.depth
        # After a tree of this depth no row waits for more: one bucket for all that can come of it.
        entries = depth + 1 if count <= depth + 1 else 1 << (count - 1).bit_length()
        most = max(max(waiting.lengths) + entries, max(lengths) + 1 + asked.most_nodes)
        self.reserve(wide, most)
        self.cache.hold(0, waiting.lengths, entries)
        self.cache.hold(0, lengths, 1 + asked.most_nodes)
        width = round_up_slots(most, self.cache)
        key = (wide, entries, width, kind)
        draft = self._drafts.get(key, lambda: self._new_draft(wide, entries, width, waiting, asked))
        draft.fill(waiting, lengths, asked)
        assert draft.recording is not None
        found = [output[:rows].clone() for output in draft.recording.run()]  # a step keeps its tree
        if len(found) == 1:
            return Drafted(DraftTree.chain(found[0]), num_levels=depth - 1)
        tokens, parents, confidence, *places = found
        return Drafted(DraftTree(tokens, parents, confidence, depth=depth), places[0] if places else None, depth - 1)

    def _new_draft(self, rows: int, entries: int, width: int, waiting: Waiting, asked: Asked) -> _Draft:
        draft = _Draft(rows, entries, waiting, asked, self.net, width)

        def step(
            tree: DraftTree, first: int, ids: Tensor | None, states: Tensor | None
        ) -> tuple[Tensor, Tensor | None]:
            ids = tree.tokens[:, first:] if ids is None else ids
            read, out = self.hidden(Inputs(tree, ids, states, draft.lengths, None, width, width, first))
            return self.logits(read), out

        def run() -> Outputs:
            chain = DraftTree.chain(draft.tokens)
            states = None if draft.features is None else self.fuse(draft.features)
            read, out = self.hidden(Inputs(chain, chain.tokens, states, draft.fed, None, width, width))
            ends = [None if x is None else x.gather(1, draft.last.expand(-1, 1, x.shape[2])) for x in (read, out)]
            assert ends[0] is not None
            growth = draft.over(draft.pending, draft.wanted, draft.sampling)
            grown = grow(growth, self.logits(ends[0]), ends[1], step, shifted=self.net.shape.is_shifted)
            tree = grown.tree
            if tree.is_line:
                return (tree.tokens,)
            assert tree.confidence is not None
            found = (tree.tokens, tree.parents, tree.confidence)
            return found if grown.places is None else (*found, grown.places)

        draft.recording = Recording(self._record, run)
        return draft


class GraphRuntime:
    """See ``Runtime``. A runner that nobody holds any more is lent to the next, with all that it has recorded."""

    name = "torch"

    def __init__(self, record: Record) -> None:
        self.record = record
        self._pools: weakref.WeakKeyDictionary[Net, Pool[RecordedRunner]] = weakref.WeakKeyDictionary()

    def runner(self, net: Net, holder: object, cache: KVCache | None = None) -> EagerRunner:
        """See ``Runtime.runner``. Rotations that ask the device for lengths are not recorded."""
        if not net.rotary.config.position_only:
            return EagerRunner(net, cache)
        if cache is not None or makes_pages():  # lent slots go with whom they were lent to, pages with their table
            return RecordedRunner(net, self.record, cache)
        pool = self._pools.setdefault(net, Pool())
        return pool.lend(holder, lambda: RecordedRunner(net, self.record))


# --- the static inputs of a recorded draft ---------------------------------------------------------------------------


class _StaticSampling(SamplingBatch):
    """Temperatures and noise of whatever rows are filled in; which are greedy, only as far as all or none are.

    Args:
        like: rows of the same kind, fewer than ``num_rows`` perhaps.
        num_levels: positions that noise is held for.
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
        tokens: (B, W) of the catch-up's entries, PAD past a row's own; features: (B, W, F) or None.
        fed, lengths, pending: (B,); last: (B, 1, 1) the last entry of each row; wanted: (B, 1).
    """

    def __init__(self, rows: int, entries: int, waiting: Waiting, asked: Asked, net: Net, width: int) -> None:
        self._numbers = torch.zeros(rows, entries + 5, dtype=torch.int64, device=net.device)
        self.tokens = self._numbers[:, :entries]
        self.fed, self.lengths, self.pending, last, wanted = self._numbers[:, entries:].unbind(1)
        self.last, self.wanted = last[:, None, None], wanted[:, None]
        brought = waiting.features
        self.features = None if brought is None else brought.new_zeros(rows, entries, brought.shape[2])
        self.over, self.sampling = asked.over(), _StaticSampling(asked.sampling, rows, asked.depth)
        self._entries, self._table = entries, net.rotary.table(width)
        self.recording: Recording | None = None

    def fill(self, waiting: Waiting, lengths: Sequence[int], asked: Asked) -> None:
        columns = zip(waiting.tokens, waiting.lengths, lengths, asked.roots, map(int, asked.wanted), strict=True)
        numbers = [
            [*ids, *[PAD] * (self._entries - len(ids)), fed, length, pending, max(len(ids), 1) - 1, wanted]
            for ids, fed, length, pending, wanted in columns
        ]
        rows = len(numbers)
        self._numbers[:rows].copy_(on_device(numbers, self._numbers.device))
        if self.features is not None and waiting.features is not None:
            count = min(waiting.features.shape[1], self._entries)
            self.features[:rows, :count].copy_(waiting.features[:, :count])
            if count < self._entries:  # never what lay there: a NaN would not stay in its own entry (0 * NaN is NaN)
                self.features[:, count:].zero_()
        self.sampling.fill(asked.sampling, asked.starts, with_noise=asked.is_keyed)
