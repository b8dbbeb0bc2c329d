"""What can be run, and what a forward of it is asked for: the one interface of eager, recorded and compiled runs.

A net says what it computes once (``Net``). A ``Runner`` holds the KV slots of one decoder and runs the net over them;
a ``Runtime`` makes runners of one kind, and is chosen when weights are loaded. Nobody else knows which kind it is.

Shape suffixes: B rows, W entries, R = B * W, F what a row brings along, H hidden, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from draftwing.alone import joined
from draftwing.model.cache import KVCache, View
from draftwing.model.paged import new_cache
from draftwing.model.rope import Rotary
from draftwing.noise import Walk
from draftwing.run.growing import Asked, grow
from draftwing.run.request import Drafted, Verified, Waiting
from draftwing.tree import Accepted, DraftTree

__all__ = [
    "PREFILL_CHUNK",
    "Entries",
    "Net",
    "NetShape",
    "Runner",
    "Runtime",
    "on_device",
    "pick",
]

PREFILL_CHUNK = 256


@dataclass(frozen=True)
class NetShape:
    """What a runner must know of a net.

    Attributes:
        num_layers, num_heads, num_kv_heads, head_dim: of its attention and so of its slots.
        windows: each layer's sliding window, or None.
        vocab_size: V of its logits.
        feature_width, state_width: F of what an entry brings along and H of a state; 0 where tokens are all it reads.
        out_width: of the second result of ``forward``.
        is_shifted: an entry reads its own token, not that of its parent.
        is_sparse: its logits leave tokens out: these hold -inf.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: Sequence[int | None]
    vocab_size: int
    feature_width: int = 0
    state_width: int = 0
    out_width: int = 0
    is_shifted: bool = True
    is_sparse: bool = False


class Net(Protocol):
    """A net over KV slots, written once: for tensors, and for what stands for them while it is traced."""

    @property
    def shape(self) -> NetShape:
        """Its sizes."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of its slots and states."""
        ...

    @property
    def device(self) -> torch.device:
        """Of its slots and states."""
        ...

    @property
    def rotary(self) -> Rotary:
        """The rotation of its positions."""
        ...

    def fuse(self, features: Any) -> Any:
        """(R, F) -> states (R, H)."""
        ...

    def forward(self, ids: Any, states: Any, attend: Any) -> tuple[Any, Any]:
        """Token ids (R,) and states (R, H) or None -> what ``logits`` reads (R, H), and what else comes out or None."""
        ...

    def logits(self, read: Any) -> Any:
        """(R, H) -> (R, V)."""
        ...


@dataclass(frozen=True)
class Entries:
    """The nodes of a batch of trees that a forward reads.

    Attributes:
        tree: of which the nodes from ``first_node`` on are run; earlier ones lie in their slots already.
        lengths: slots of each row before its tree.
        first_row: the row of the first tree.
        ids: (B, W) the token that each entry reads, PAD where unused; None: its own.
        states: (B, W, H), or None where tokens are all that is read.
        prompt_lengths: of the rows, for rotations that depend on them.
        view: the slots before the trees that are looked at; None for all.
        walk: of whole trees of a target, how tokens are drawn: the runner may commit what is kept (``Runner.walked``).
        watched: (L, K, S) float32 of one row, to which is added how much each of the S slots before its tree is looked
            at. The entries' own slots are then read, and not written.
    """

    tree: DraftTree
    lengths: Sequence[int]
    first_row: int = 0
    first_node: int = 0
    ids: Tensor | None = None
    states: Tensor | None = None
    prompt_lengths: Sequence[int] | None = None
    view: View | None = None
    watched: Tensor | None = None
    walk: Walk | None = None

    @property
    def tokens(self) -> Tensor:
        """(B, W)."""
        return self.tree.tokens[:, self.first_node :] if self.ids is None else self.ids

    @property
    def upto(self) -> int:
        """Slots that the trees may reach."""
        return max(self.lengths) + self.tree.num_nodes


class Runner(ABC):
    """Runs a net over slots of its own: one for every decoder.

    Attributes:
        cache: its slots; those of another runner, where a net reads and writes these.
        keeps_outputs: whether what ``forward`` gives out is still there after the next one.
        paths: ``DraftTree.paths`` of the trees that ran last, where the forward had to find them out.
        walked: what it has committed of these trees, where it was told how tokens are drawn.
        verified: the forward of trees that was run in the call that drafted them; it is of those very trees alone.
    """

    cache: KVCache
    keeps_outputs = True
    paths: tuple[Tensor, Tensor] | None = None
    walked: Accepted | None = None
    verified: Verified | None = None

    def __init__(self, net: Net, cache: KVCache | None = None) -> None:
        self.net = net
        shape = net.shape
        self.cache = cache or new_cache(shape.num_layers, shape.num_kv_heads, shape.head_dim, net.dtype, net.device)

    @abstractmethod
    def forward(
        self, entries: Entries, *, want_logits: bool = True, last: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits (B, W, V) where they are wanted, and what else the net gives out (B, W, F or H) or None.

        Args:
            entries: what to run; their slots are written.
            last: (B, 1, 1) the one entry of each row whose results are wanted; None for all.
        """

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """What rows bring along (B, W, F) as states (B, W, H)."""

    def draft(self, waiting: Waiting, asked: Asked) -> Drafted:
        """Read what is waiting and grow a tree below the last entry of every row."""
        device, width = self.net.device, waiting.num_entries
        chain = DraftTree.chain(on_device([[*ids, *[-1] * (width - len(ids))] for ids in waiting.tokens], device))
        states = None if waiting.features is None else self.fuse(waiting.features[:, :width])
        last = on_device([max(len(ids), 1) - 1 for ids in waiting.tokens], device)[:, None, None]
        prompts, view = waiting.prompt_lengths, waiting.view
        entries = Entries(chain, waiting.lengths, states=states, prompt_lengths=prompts, view=view)
        logits, out = self.forward(entries, last=last)
        assert logits is not None
        lengths, is_fed, kept = waiting.roots, self.net.shape.state_width > 0, [out]

        def step(
            tree: DraftTree, first: int, ids: Tensor | None, states: Tensor | None
        ) -> tuple[Tensor, Tensor | None]:
            logits, out = self.forward(Entries(tree, lengths, 0, first, ids, states, prompts, view))
            assert logits is not None
            if is_fed:
                return logits, out
            kept.append(out)
            return logits, None

        found = grow(asked.growth(), logits, out if is_fed else None, step, shifted=self.net.shape.is_shifted)
        if is_fed or found.places is not None or not found.tree.is_line:
            return found
        outs = [each for each in kept if each is not None]
        return replace(found, states=torch.cat(outs, 1) if outs else None)

    def reserve(self, num_rows: int, num_slots: int) -> None:
        """Room for so many rows and slots of each; what is stored stays."""
        self.cache.reserve(num_rows, num_slots)

    def commit(self, lengths: Sequence[int], path: Tensor) -> None:
        """Move the kept nodes of every row, (B, D) with PAD behind, down to the slots after ``lengths``."""
        self.cache.commit(on_device(lengths, self.net.device), path)

    def prefill(
        self,
        row: int,
        ids: Sequence[int],
        features: Tensor | None = None,
        prompt_length: int | None = None,
        *,
        start: int = 0,
    ) -> Tensor | None:
        """Write the slots of a text in a row from ``start`` on, in pieces: (1, T, F or H) what the net gives out.

        ``features``: (1, T, F) what the entries bring along; ``prompt_length``: for rotations that depend on it.
        """
        self.reserve(row + 1, start + len(ids) + 1)
        if not start:
            self.cache.clear(row)
        prompts = None if prompt_length is None else [prompt_length]
        pieces = []
        for done in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[done : done + PREFILL_CHUNK]
            chain = DraftTree.chain(on_device([chunk], self.net.device))
            states = None if features is None else self.fuse(features[:, done : done + len(chunk)])
            entries = Entries(chain, [start + done], row, states=states, prompt_lengths=prompts)
            piece = self.forward(entries, want_logits=False)[1]
            pieces += [] if piece is None else [piece]
        return joined(pieces, 1) if pieces else None

    def watch(self, row: int, ids: Sequence[int], start: int, prompt_length: int | None = None) -> Tensor:
        """How much the last tokens of a text look at each slot before them: (L, K, ``start``) float32.

        Chances, summed over these tokens and over the query heads that share a KV head. Writes nothing.

        Args:
            ids: tokens of a row, whose slots from ``start`` on hold them already.
            prompt_length: for rotations that depend on it.
        """
        shape, device = self.net.shape, self.net.device
        watched = torch.zeros(shape.num_layers, shape.num_kv_heads, start, device=device)
        prompts = None if prompt_length is None else [prompt_length]
        chain = DraftTree.chain(on_device([ids], device))
        self.forward(Entries(chain, [start], row, prompt_lengths=prompts, watched=watched), want_logits=False)
        return watched


class Runtime(Protocol):
    """Makes runners of one kind; ``name``: ``torch``, or the CPU ``kernel``."""

    name: str

    def runner(self, net: Net, holder: object, cache: KVCache | None = None) -> Runner:
        """One for as long as ``holder`` lives, over slots of its own, or over those of another runner."""
        ...


Found = tuple[Tensor | None, Tensor | None]


def pick(found: Found, last: Tensor) -> Found:
    """Of logits and states (B, W, ...) the one entry of each row that ``last`` (B, 1, 1) names."""
    logits, out = (each if each is None else each.gather(1, last.expand(-1, 1, each.shape[2])) for each in found)
    return logits, out


def on_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The host's numbers as int64 on a device, without waiting for what the device still has to do.

    From memory that the system may move, a GPU copies only after it has finished all earlier work. Pinned memory it
    reads when it comes to it; PyTorch keeps it until then.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64, device=device)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)
