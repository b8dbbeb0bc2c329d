"""What the CPU kernel runs: matrices laid out for it, programs of operations over buffers of rows, whole drafts.

Shape suffixes: R rows, B rows of a batch, N nodes, H hidden, V vocabulary.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.run.kernel.build import NUM_BUFFERS, Batch, Draft, Kernel, Op, set_cache
from draftwing.run.request import Drafted, DraftRequest, Waiting
from draftwing.tree import DraftTree

__all__ = [
    "ACTIVATIONS",
    "Heads",
    "Packed",
    "Program",
    "Slots",
    "quantise_channels",
]

TILE = 64  # outputs that the kernel computes together
ACTIVATIONS = {"silu": 2, "gelu": 3, "gelu_pytorch_tanh": 4}
_EMBED, _NORM, _LINEAR, _ATTEND, _COPY = range(5)
_STORE, _ADD = 0, 1
MAX_LEVEL = 127  # of each sign
_CHUNK = 4096  # channels quantised at once: the float copies that this takes stay small


# --- a matrix --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """A matrix as the kernel reads it.

    Attributes:
        num_in, num_out: of the product; ``num_out`` is half the matrix's rows where it is ``gated``.
        bits: 32 or 8.
        weight: tiles of 64 outputs: (tiles, in, 64) float32, or (tiles, in / 4, 64, 4) int8.
        scales, sums: of int8, by output: what a level is worth, and what the rows' offset of 128 adds.
        bias: by output, or None.
        gated: gates (the first half of the rows) and what they let through (the second) lie in alternate tiles.
    """

    num_in: int
    num_out: int
    bits: int
    weight: Tensor
    scales: Tensor | None
    sums: Tensor | None
    bias: Tensor | None
    gated: bool

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, *, bits: int = 32, gated: bool = False) -> Packed:
        """Pack ``weight`` (out, in) float32."""
        num_out, num_in = weight.shape
        if gated:
            num_out //= 2
            weight = _interleave(weight)
            bias = None if bias is None else _interleave(bias[:, None])[:, 0]
        padding = -weight.shape[0] % TILE
        weight = F.pad(weight, (0, 0, 0, padding)) if padding else weight
        bias = None if bias is None else F.pad(bias, (0, weight.shape[0] - bias.shape[0])).contiguous()
        tiles = weight.shape[0] // TILE
        if bits == 32:
            laid_out = weight.view(tiles, TILE, num_in).transpose(1, 2).contiguous()
            return cls(num_in, num_out, bits, laid_out, None, None, bias, gated)
        levels, scales = quantise_channels(weight)
        levels = F.pad(levels, (0, -num_in % 4))
        sums = 128 * levels.sum(1, dtype=torch.int32)
        laid_out = levels.view(tiles, TILE, -1, 4).transpose(1, 2).contiguous()
        return cls(num_in, num_out, bits, laid_out, scales, sums, bias, gated)

    def plain(self) -> Tensor:
        """The matrix (out, in) float32 again, where it was float32 and is not gated."""
        assert self.bits == 32
        assert not self.gated
        return self.weight.transpose(1, 2).reshape(-1, self.num_in)[: self.num_out]

    @property
    def num_bytes(self) -> int:
        """Bytes read for one forward."""
        return sum(part.nbytes for part in (self.weight, self.scales) if part is not None)


def quantise_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix (out, in) as levels (out, in) int8, symmetric, and what one level of each output is worth, (out,)."""
    scales, levels = torch.empty(weight.shape[0]), torch.empty(weight.shape, dtype=torch.int8)
    for start in range(0, weight.shape[0], _CHUNK):
        part = weight[start : start + _CHUNK].float()
        own = (part.abs().amax(1) / MAX_LEVEL).clamp_min(torch.finfo(torch.float32).tiny)
        scales[start : start + _CHUNK] = own
        levels[start : start + _CHUNK] = (part / own[:, None]).round_().clamp_(-MAX_LEVEL, MAX_LEVEL)
    return levels, scales


def _interleave(rows: Tensor) -> Tensor:
    """(2 W, ...) -> tiles of the first half before those of the second, each half padded to whole tiles."""
    half = rows.shape[0] // 2
    padded = [F.pad(part, (0, 0, 0, -half % TILE)).view(-1, TILE, rows.shape[1]) for part in (rows[:half], rows[half:])]
    return torch.stack(padded, 1).reshape(-1, rows.shape[1])


# --- a program -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """The heads of an attention: how many, of queries and of keys, and how wide."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Program:
    """Operations over buffers of rows, built once and run for any number of rows.

    A buffer is a number: ``scratch`` lies in the program's own workspace, ``outside`` is given anew for every run.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._ops: list[Op] = []
        self._array: Any = None
        self._kept: list[Any] = []  # what the operations point to
        self._widths: list[int] = []
        self._is_outside: list[bool] = []
        self._workspace = torch.empty(0)
        self._capacity = 0
        self._last = Batch()

    def __len__(self) -> int:
        return len(self._ops)

    def scratch(self, width: int) -> int:
        """A buffer (R, width) of the program's own."""
        return self._buffer(-(-width // 16) * 16, outside=False)

    def outside(self, width: int) -> int:
        """A buffer (R, width) that ``run`` is given."""
        return self._buffer(width, outside=True)

    def _buffer(self, width: int, *, outside: bool) -> int:
        assert len(self._widths) < NUM_BUFFERS
        self._widths.append(width)
        self._is_outside.append(outside)
        return len(self._widths) - 1

    def embed(self, table: Tensor, target: int) -> None:
        """target = the rows of ``table`` (V, H) that the tokens name."""
        self._add(kind=_EMBED, target=target, num_out=table.shape[1], weight=table)

    def norm(self, source: int, weight: Tensor, eps: float, target: int, column: int = 0) -> None:
        """target[column:] = RMSNorm(source)."""
        self._add(kind=_NORM, source=source, target=target, column=column, num_in=len(weight), eps=eps, norm=weight)

    def copy(self, source: int, width: int, target: int, column: int = 0) -> None:
        """target[column:] = source[:width]."""
        self._add(kind=_COPY, source=source, target=target, column=column, num_in=width)

    def linear(
        self,
        source: int,
        packed: Packed,
        target: int,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        activation: str | None = None,
        add: bool = False,
        places: Tensor | None = None,
    ) -> None:
        """target = matrix times (normed) source; with ``activation`` a gated one; with ``add`` added to target.

        ``places`` (num_out,) int64 says where in the target each output goes; what no place names stays as it is.
        """
        assert packed.gated == (activation is not None)
        self._add(
            kind=_LINEAR, source=source, target=target, num_in=packed.num_in, num_out=packed.num_out,
            epilogue=ACTIVATIONS[activation] if activation is not None else _ADD if add else _STORE,
            bits=packed.bits, eps=eps, norm=norm, weight=packed.weight, scales=packed.scales, sums=packed.sums,
            bias=packed.bias, places=places,
        )  # fmt: skip

    def attend(
        self,
        source: int,
        heads: Heads,
        target: int,
        *,
        layer: int,
        scale: float,
        window: int | None = None,
        norms: tuple[Tensor, Tensor] | None = None,
        eps: float = 0.0,
    ) -> None:
        """Rotate queries and keys, write keys and values to their slots, and mix: target = attention(source)."""
        q_norm, k_norm = norms or (None, None)
        self._add(
            kind=_ATTEND, source=source, target=target, layer=layer, window=window or 0, scale=scale, eps=eps,
            num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim,
            q_norm=q_norm, k_norm=k_norm,
        )  # fmt: skip

    def _add(self, **values: Any) -> None:
        assert len(self._ops) < self._kernel.max_ops
        for name, value in values.items():
            if isinstance(value, Tensor):
                value = value.detach()
                assert value.is_contiguous()
                self._kept.append(value)
                values[name] = value.data_ptr()
        self._ops.append(Op(**values))
        self._array = None

    def run(
        self,
        rows: int,
        nodes: int,
        outside: Mapping[int, Tensor],
        *,
        first_op: int = 0,
        num_ops: int | None = None,
        tokens: Tensor | None = None,
        slots: Slots | None = None,
    ) -> None:
        """Run the program, or its operations from ``first_op`` to before ``num_ops``.

        Args:
            rows, nodes: R = rows * nodes.
            outside: float32 tensors of R rows, for every buffer made by ``outside`` that these operations use.
            tokens: (R,) int64, for ``embed``; unused ones may hold PAD.
            slots: for ``attend``.
        """
        batch = self._batch(rows, nodes, outside, slots)
        if tokens is not None:
            tokens = tokens.contiguous()
            batch.tokens = tokens.data_ptr()
        last = len(self._ops) if num_ops is None else num_ops
        self._kernel.run(ctypes.byref(self._array, first_op * ctypes.sizeof(Op)), last - first_op, batch)

    def draft(
        self,
        request: DraftRequest,
        outside: Mapping[int, Tensor],
        slots: Slots,
        logits: int,
        *,
        waiting: Waiting,
        num_catch_up: int = 0,
        num_hidden: int = 0,
        read: int = -1,
        states: tuple[int, int] | None = None,
    ) -> Drafted:
        """Grow a tree for every row without coming back to Python in between.

        Args:
            request: what to draft.
            outside: as for ``run``, with room for a level of every row, and for what is waiting.
            slots: with room for the roots and ``request.depth * request.width`` nodes more.
            logits: the buffer of the logits.
            waiting: what is to be run first: its last entries are the roots.
            num_catch_up: operations in front that only ``waiting`` goes through.
            num_hidden: operations before those that turn the buffer ``read`` into logits.
            states: the buffers that a node reads and writes, where nodes read what their parents wrote.
        """
        rows, depth, rule = len(request.roots), request.depth, request.rule
        width, entries = request.width, max(map(len, waiting.tokens))
        batch = self._batch(rows, max(width, entries), outside, slots)
        room = 1 + width + (depth - 1) * width * width
        size = rows * room
        numbers, chances = np.empty(3 * size, dtype=np.int64), np.empty(2 * size, dtype=np.float32)
        roots, wanted = array("q", request.roots), array("q", request.wanted)
        counts = array("q", map(len, waiting.tokens))
        seeds, starts = array("q", request.seeds), array("q", request.starts)
        temperatures, top_k = array("f", request.temperatures), array("i", request.top_k)
        top_p, min_p = array("f", request.top_p), array("f", request.min_p)
        out, told = numbers.ctypes.data, chances.ctypes.data
        draft = Draft(
            depth=depth, width=width, most=request.most, vocab_size=self._widths[logits], room=room,
            num_catch_up=num_catch_up, num_hidden=num_hidden, logits=logits, read=read,
            states=-1, fed_back=-1, sharpness=request.sharpness, kept=1 - request.miss,
            counts=_address(counts), wanted=_address(wanted), temperatures=_address(temperatures),
            top_k=_address(top_k), top_p=_address(top_p), min_p=_address(min_p),
            noise=request.noise, seeds=_address(seeds), starts=_address(starts),
            tokens=out, parents=out + 8 * size, places=out + 16 * size, told=told, reached=told + 4 * size,
        )  # fmt: skip
        if states is not None:
            draft.states, draft.fed_back = states
        if rule is not None:
            draft.num_tables, draft.num_knots = rule.knots.shape
            draft.knots, draft.rates = rule.knots.ctypes.data, rule.rates.ctypes.data
            draft.gains, draft.costs = rule.gains.ctypes.data, rule.costs.ctypes.data
            draft.verify, draft.worth, draft.share = rule.verify.ctypes.data, rule.worth, rule.share
        caught = Batch.from_buffer_copy(batch)
        caught.nodes = caught.tree_nodes = entries
        caught.first_node = 0
        if waiting.features is not None:
            caught.buffers[waiting.source] = waiting.features.data_ptr()
        flat = array("q")
        for ids in waiting.tokens:
            flat.extend(ids)
            flat.extend([-1] * (entries - len(ids)))
        lengths, parents = array("q", waiting.lengths), array("q", [*range(-1, entries - 1)] * rows)
        caught.tokens, caught.lengths, caught.parents = map(_address, (flat, lengths, parents))
        nodes = self._kernel.draft(self._array, len(self._ops), batch, caught, draft, _address(roots))
        found = [
            part[at : at + rows * nodes].reshape(rows, nodes)  # views of numpy take less than those of tensors
            for part, at in ((numbers, 0), (numbers, size), (numbers, 2 * size), (chances, 0), (chances, size))
        ]
        tokens, parents_BN, told_BN, reached = (torch.from_numpy(found[part]) for part in (0, 1, 3, 4))
        tree = DraftTree(
            tokens, parents_BN, reached, None, told_BN, draft.effort, is_line=bool(draft.is_chain), depth=draft.deepest
        )
        return Drafted(tree, found[2], draft.levels, width == 1)

    def _batch(self, rows: int, nodes: int, outside: Mapping[int, Tensor], slots: Slots | None) -> Batch:
        count = rows * nodes
        if count > self._capacity:
            self._capacity = max(count, 2 * self._capacity)
            self._workspace = torch.empty(self._capacity * sum(self._widths))
            self._lay_out()
        batch = self._last  # the kernel copies what it is given
        batch.rows, batch.nodes = rows, nodes
        for buffer, tensor in outside.items():
            batch.buffers[buffer] = tensor.data_ptr()
        if slots is not None:
            slots.fill(batch)
        if self._array is None:
            self._array = (Op * len(self._ops))(*self._ops)
        return batch

    def _lay_out(self) -> None:
        """Say where the program's own buffers lie."""
        self._last = Batch()
        at = self._workspace.data_ptr()
        for buffer, (width, is_outside) in enumerate(zip(self._widths, self._is_outside, strict=True)):
            self._last.widths[buffer] = width
            if not is_outside:
                self._last.buffers[buffer] = at
                at += 4 * width * self._capacity


def _address(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]


class Slots:
    """Where the nodes of a batch of trees stand: their rows' slots, their parents and their rotation.

    Args:
        data: (L, 2, B, K, S, D) keys and values, with room for the trees.
        first_row: the row of the first tree.
        lengths: committed tokens of each row.
        parents: (B, N) of the trees; None where they grow (``Program.draft``).
        first_node: the nodes from here on are forwarded; earlier ones lie in their slots already.
        rotation: complex64, (positions, D / 2), or one row for each node where ``by_node``.
    """

    def __init__(
        self,
        data: Tensor,
        first_row: int,
        lengths: Sequence[int],
        parents: Tensor | None,
        first_node: int,
        rotation: Tensor,
        *,
        by_node: bool,
    ) -> None:
        self._data, self._first_row, self._first_node, self._by_node = data, first_row, first_node, by_node
        self._lengths = array("q", lengths)
        self._parents = None if parents is None else parents.contiguous()
        self._rotation = rotation.contiguous()

    def fill(self, batch: Batch) -> None:
        """Write it where the kernel reads it."""
        set_cache(batch, self._data, self._first_row)
        if self._parents is not None:
            batch.first_node, batch.tree_nodes = self._first_node, self._parents.shape[1]
            batch.parents = self._parents.data_ptr()
        batch.lengths = _address(self._lengths)
        batch.rotation, batch.rotation_by_row = self._rotation.data_ptr(), int(self._by_node)
        batch.rotary_half = self._rotation.shape[-1]
