"""Networks and the runners that execute them over KV slots; the runner for PyTorch.

A network is written once (``Net``). A ``Runner`` holds the KV slots of one decoder and runs a network over them:
operator by operator in PyTorch, as recorded CUDA graphs (``runtime.graphs``), or in the CPU kernel (``cpu.runner``). A
``Runtime`` makes runners of one kind; ``runtime.choose`` chooses it when weights are loaded.

Shape suffixes: B rows, W entries, R = B * W, F features, H hidden, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.cpu.layout import NARROW_SLOTS
from draftwing.models.attention import CausalAttention, TreeSlots, attention_over
from draftwing.models.cache import KEY_BLOCK, KVCache, View, round_up
from draftwing.models.config import DeltaConfig
from draftwing.models.context import TargetOutput
from draftwing.models.linear import MIN_ROWS
from draftwing.models.paged import new_cache
from draftwing.models.recurrent import RecurrentStates
from draftwing.models.rope import Rotary
from draftwing.noise import AcceptArgs
from draftwing.runtime.tree_builder import Drafted, DraftRequest, VerifyRequest
from draftwing.torch_utils import joined, on_device
from draftwing.tree import PAD, DraftTree

PREFILL_CHUNK = 256


@dataclass(frozen=True)
class NetShape:
    """Sizes of a network."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: Sequence[int | None]  # see ``ModelConfig.sliding_windows``
    vocab_size: int  # V of its logits
    # feature_width, state_width: F of features and H of states that entries read; 0 if they read tokens alone
    feature_width: int = 0
    state_width: int = 0
    out_width: int = 0  # width of the second result of ``forward``
    is_shifted: bool = True  # True if an entry reads its token, False if it reads that of its parent
    is_sparse: bool = False  # True if its logits leave tokens out, which hold -inf
    has_plain_heads: bool = True  # see ``HeadTraits.is_plain``
    # words of a head's keys in a slot of 8 bits (``ModelConfig.slot_width``); 0: slots hold numbers
    narrow_width: int = 0
    num_slot_layers: int = 0  # layers of slots, if fewer than ``num_layers`` (``ModelConfig.slots``)
    num_slot_heads: int = 0  # KV heads of a slot, if more than ``num_kv_heads`` (``ModelConfig.num_slot_heads``)
    delta: DeltaConfig | None = None  # the sizes of recurrent layers
    num_recurrent: int = 0  # number of these
    causal: Sequence[bool] = ()  # layers whose nodes see no later position; empty: none is marked (``SlotAttention``)


class Net(Protocol):
    """A network over KV slots: computes on tensors, or on the values that trace it (``cpu.program``).

    ``fuse`` turns features (R, F) into states (R, H); ``forward`` takes tokens (R,) and states or None, and returns the
    input of ``logits`` (R, H) and features, states or None; ``logits`` returns (R, V).
    """

    @property
    def shape(self) -> NetShape: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def rotary(self) -> Rotary: ...

    def fuse(self, features: Any) -> Any: ...

    def forward(self, ids: Any, states: Any, attend: Any) -> tuple[Any, Any]: ...

    def logits(self, read: Any) -> Any: ...


@dataclass(frozen=True)
class Entries:
    """The nodes of a batch of trees that a forward reads."""

    # the trees, of which the nodes from ``first_node`` on are run; earlier ones are in their slots already
    tree: DraftTree
    lengths: Sequence[int]  # (B,) slots of each row before its tree; empty in a recording
    first_row: int = 0  # the row of the first tree
    first_node: int = 0
    ids: Tensor | None = None  # (B, W) the token that each entry reads, PAD if unused; None for its node's token
    states: Tensor | None = None  # (B, W, H), or None if the network reads tokens alone
    prompt_lengths: Sequence[int] | None = None  # (B,) for rotations that depend on them
    view: View | None = None  # the slots before the trees that attention reads; None for all
    # (L, K, S) float32 of one row, to which the attention weights of the S slots before its tree are added. The
    # entries' own slots are then read, not written.
    watched: Tensor | None = None
    # The nodes are chains of tokens that are certain to be kept: recurrent states may advance past them at once.
    keeps_all: bool = False
    rows: Tensor | None = None  # (B,) the row of each tree, on the device; None for those from ``first_row`` on

    @property
    def tokens(self) -> Tensor:
        """(B, W)."""
        if self.ids is not None:
            return self.ids
        return self.tree.tokens[:, self.first_node :] if self.first_node else self.tree.tokens


Outputs = tuple[Tensor | None, Tensor | None]  # logits, and the second output


class Runner(ABC):
    """Runs a network over the KV slots of one decoder, in ``cache`` (another runner's if the network shares them).

    With ``keeps_outputs``, outputs of ``forward`` stay valid after the next call.
    """

    cache: KVCache
    keeps_outputs = True

    def __init__(self, net: Net, cache: KVCache | None = None) -> None:
        self.net, self.device = net, net.device
        shape = net.shape
        heads = max(shape.num_slot_heads, shape.num_kv_heads)
        slot = (shape.narrow_width, NARROW_SLOTS) if shape.narrow_width else (shape.head_dim, net.dtype)
        self.cache = cache or new_cache(shape.num_slot_layers or shape.num_layers, heads, *slot, self.device)
        if shape.delta is not None:
            self.cache.states = RecurrentStates()

    @abstractmethod
    def forward(self, entries: Entries, *, want_logits: bool = True, last: Tensor | None = None) -> Outputs:
        """Run entries and write their slots: logits (B, W, V), and the second output (B, W, F or H) or None.

        Args:
            want_logits: False returns None for the logits.
            last: (B, 1, 1) the one entry of each row to return results of; None for all.
        """

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Features (B, W, F) as states (B, W, H)."""

    def verify(self, entries: Entries, accept: AcceptArgs | None = None) -> TargetOutput:
        """Run whole trees of a target.

        Args:
            accept: how tokens are drawn, for runners that can apply ``accept.match`` and commit the kept nodes at once.
        """
        logits, out = self.forward(entries)
        assert logits is not None
        return TargetOutput(logits, out, entries.tree, self.keeps_outputs)

    def draft(self, request: DraftRequest, verify: VerifyRequest | None = None) -> Drafted:
        """Read the unread entries and grow a tree below the last one of every row, and verify it if this runner can."""
        prompts, view = request.prompt_lengths, request.view
        chain, last, states = self.catch_up(request)
        entries = Entries(chain, request.lengths, states=states, prompt_lengths=prompts, view=view)
        logits, out = self.forward(entries, last=last)
        assert logits is not None
        feeds_states, outs = self.net.shape.state_width > 0, [out]

        def run_level(
            tree: DraftTree, first: int, ids: Tensor | None, states: Tensor | None
        ) -> tuple[Tensor, Tensor | None]:
            logits, out = self.forward(Entries(tree, request.root_slots, 0, first, ids, states, prompts, view))
            assert logits is not None
            if feeds_states:
                return logits, out
            outs.append(out)
            return logits, None

        builder, shifted = request.builder(), self.net.shape.is_shifted
        drafted = builder.grow(logits, out if feeds_states else None, run_level, shifted=shifted)
        if feeds_states or drafted.places is not None or not drafted.tree.is_line or outs[0] is None:
            return drafted
        return drafted._replace(states=torch.cat([out for out in outs if out is not None], 1))

    def catch_up(self, request: DraftRequest) -> tuple[DraftTree, Tensor, Tensor | None]:
        """The unread entries as chains (B, W), the last entry of each row (B, 1, 1), and the states (B, W, H)."""
        device, width = self.device, request.num_entries
        tokens = [[*ids, *[PAD] * (width - len(ids))] for ids in request.tokens]
        last = on_device([max(len(ids), 1) - 1 for ids in request.tokens], device)[:, None, None]
        states = None if request.features is None else self.fuse(request.features[:, :width])
        return DraftTree.chain(on_device(tokens, device)), last, states

    def reserve(self, num_rows: int, num_slots: int) -> None:
        self.cache.reserve(num_rows, num_slots)

    def commit(self, lengths: Sequence[int], path: Tensor) -> None:
        """Move the kept nodes of every row, (B, D) padded with PAD, to the slots after ``lengths``."""
        self.cache.commit(on_device(lengths, self.device), path)

    def prefill(
        self,
        row: int,
        ids: Sequence[int],
        features: Tensor | None = None,
        prompt_length: int | None = None,
        *,
        start: int = 0,
    ) -> Tensor | None:
        """Write a row's slots from ``start`` on, in chunks of ids and features (1, T, F); returns the second output."""
        self.reserve(row + 1, start + len(ids) + 1)
        if not start:
            self.cache.clear(row)
        prompts = None if prompt_length is None else [prompt_length]
        pieces = []
        for done in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[done : done + PREFILL_CHUNK]
            chain = DraftTree.chain(on_device([chunk], self.device))
            states = None if features is None else self.fuse(features[:, done : done + len(chunk)])
            entries = Entries(chain, [start + done], row, states=states, prompt_lengths=prompts, keeps_all=True)
            piece = self.forward(entries, want_logits=False)[1]
            if self.cache.states is not None:
                self.cache.states.commit(row, range(len(chunk)))
            pieces += [] if piece is None else [piece]
        return joined(pieces, 1) if pieces else None

    def watch(self, row: int, ids: Sequence[int], start: int, prompt_length: int | None = None) -> Tensor:
        """Attention weights of the last tokens on each slot before them: (L, K, ``start``) float32.

        Summed over these tokens and over the query heads that share a KV head. Writes no slots: ``ids`` are in the
        row's slots from ``start`` on already.
        """
        shape, device = self.net.shape, self.device
        watched = torch.zeros(shape.num_layers, shape.num_kv_heads, start, device=device)
        prompts = None if prompt_length is None else [prompt_length]
        chain = DraftTree.chain(on_device([ids], device))
        self.forward(Entries(chain, [start], row, prompt_lengths=prompts, watched=watched), want_logits=False)
        return watched


class Runtime(Protocol):
    """Makes runners of one kind; ``name``: ``torch``, or the CPU ``kernel``."""

    name: str

    def runner(self, net: Net, holder: object, cache: KVCache | None = None) -> Runner:
        """A runner for the lifetime of ``holder``, over new KV slots or over ``cache``."""
        ...


def pick(outputs: Outputs, last: Tensor) -> Outputs:
    """The results (B, W, ...) at one entry of each row, ``last`` (B, 1, 1)."""
    logits, out = (x if x is None else x.gather(1, last.expand(-1, 1, x.shape[2])) for x in outputs)
    return logits, out


def num_padding(num_rows: int, device: torch.device) -> int:
    """Rows to add to a forward on a CPU, once instead of in every matrix (``MIN_ROWS``)."""
    return max(MIN_ROWS - num_rows, 0) if device.type == "cpu" else 0


# --- PyTorch, operator by operator ------------------------------------------------------------------------------------


class EagerRunner(Runner):
    def forward(self, entries: Entries, *, want_logits: bool = True, last: Tensor | None = None) -> Outputs:
        device, prompts, num_nodes = self.device, entries.prompt_lengths, entries.tree.num_nodes
        self.cache.hold(entries.first_row, entries.lengths, num_nodes)
        upto = max(entries.lengths) + num_nodes
        prompts_B = None if prompts is None else on_device(prompts, device)
        lengths_B = on_device(entries.lengths, device)
        read, out = self.hidden(entries, lengths_B, prompts_B, width=round_up(upto, KEY_BLOCK), upto=upto)
        if last is not None:
            picked, out = pick((read, out), last)
            assert picked is not None
            read = picked
        return (self.logits(read) if want_logits else None), out

    def hidden(
        self, entries: Entries, lengths_B: Tensor, prompts_B: Tensor | None = None, *, width: int, upto: int
    ) -> tuple[Tensor, Tensor | None]:
        """The LM head's input (B, W, H), and the second output (B, W, F or H) or None.

        Args:
            entries: without ``lengths`` in a recording, which knows no values on the host.
            width: slots that attention reads.
            upto: positions that may be reached.
        """
        net, tree, first_node, ids = self.net, entries.tree, entries.first_node, entries.tokens
        rows, nodes = ids.shape
        real = rows * nodes
        positions = lengths_B[:, None] + tree.depths[:, first_node:]
        prompts = None if prompts_B is None else prompts_B[:, None]
        cis = net.rotary.cis(positions, prompts, upto=upto).view(real, 1, -1)
        padding = num_padding(real, self.device)
        ids = F.pad(ids.clamp(min=0).reshape(-1), (0, padding))
        states = None if entries.states is None else F.pad(entries.states.flatten(0, 1), (0, 0, 0, padding))
        slots = TreeSlots(
            self.cache, tree, lengths_B, entries.first_row, first_node, width, entries.view, entries.watched,
            entries.rows,
        )  # fmt: skip
        shape, attend = net.shape, None
        if shape.num_layers:
            kind = attention_over(slots, is_plain=shape.has_plain_heads)
            heads = shape.num_heads, shape.num_kv_heads
            attend = kind(cis, slots, shape.windows, heads, real + padding, shape.causal)
        read, out = net.forward(ids, states, attend)
        return read[:real].view(rows, nodes, -1), None if out is None else out[:real].view(rows, nodes, -1)

    def logits(self, read: Tensor) -> Tensor:
        """(B, W, H) -> (B, W, V)."""
        rows, nodes, _ = read.shape
        real = rows * nodes
        logits: Tensor = self.net.logits(F.pad(read.reshape(real, -1), (0, 0, 0, num_padding(real, read.device))))
        return logits[:real].view(rows, nodes, -1)

    def fuse(self, features: Tensor) -> Tensor:
        states: Tensor = self.net.fuse(features.flatten(0, 1))
        return states.view(*features.shape[:2], -1)


class TorchRuntime:
    name = "torch"

    def runner(self, net: Net, holder: object, cache: KVCache | None = None) -> EagerRunner:
        return EagerRunner(net, cache)


def score(net: Net, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Whole sequences (B, T) in one causal forward: logits (B, T, V), and the second output or None."""
    rows, length = ids.shape
    positions = torch.arange(length, device=ids.device).repeat(rows)
    cis = net.rotary.cis(positions, torch.full_like(positions, length), upto=length).view(rows * length, 1, -1)
    attend = CausalAttention(rows, length, net.shape.windows, net.shape.head_dim**-0.5, cis)
    read, out = net.forward(ids.reshape(-1), None, attend)
    logits = net.logits(read).view(rows, length, -1)
    return logits, None if out is None else out.view(rows, length, -1)
