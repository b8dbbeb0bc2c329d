"""Attention in PyTorch: rotate queries and keys, then mix values over a tree's slots or over whole texts.

Shape suffixes: B rows, N nodes, T tokens, R rows of a forward, K KV heads, S slots, D head dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.model.cache import KEY_BLOCK, KVCache, View, round_up
from draftwing.tree import DraftTree

__all__ = [
    "Attend",
    "Attention",
    "CausalAttention",
    "Heads",
    "PagedTreeAttention",
    "TreeAttention",
    "TreeSlots",
    "rotate",
]

# Queries are padded to these and keys to KEY_BLOCK, so that a CPU gives a row the same bits in any company.
QUERY_BLOCK = 8

_split = torch.split_with_sizes  # the operator itself: its Python wrapper costs more than the work on a few rows


class Heads(Protocol):
    """How queries, keys and values lie side by side, and the norms of each head (Qwen3), or None."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Any
    k_norm: Any


class Attend(Protocol):
    """Mixes values by attention."""

    def __call__(self, layer: int, qkv: Any, heads: Any) -> Any:
        """(R, (heads + 2 * KV heads) * D), queries first -> (R, heads * D)."""
        ...


def rotate(heads: Tensor, cis: Tensor) -> Tensor:
    """Rotary embedding (RoFormer, 2104.09864) as one complex product.

    The result holds each pair side by side instead of half a head apart; queries and keys are permuted alike,
    so their products are the same, and nobody else reads them.

    Args:
        heads: (R, K, D).
        cis: (R, 1, rotary_dim / 2) complex; channels past ``rotary_dim`` stay as they are.
    """
    half = cis.shape[-1]
    turning = heads if heads.dtype in (torch.float32, torch.float64) else heads.float()
    if heads.shape[-1] == 2 * half:
        real, imaginary = _split(turning, (half, half), -1)
    else:
        real, imaginary = turning[..., :half], turning[..., half : 2 * half]
    turned = torch.view_as_real(torch.complex(real, imaginary) * cis).flatten(-2).to(heads.dtype)
    return turned if heads.shape[-1] == 2 * half else torch.cat([turned, heads[..., 2 * half :]], -1)


class Attention(ABC):
    """Norms and rotates queries and keys; ``mix`` does the rest.

    Args:
        cis: (R, 1, rotary_dim / 2) rotation of the real rows; later rows of a forward only pad its products.
    """

    def __init__(self, cis: Tensor) -> None:
        self.cis = cis

    def __call__(self, layer: int, qkv: Tensor, heads: Heads) -> Tensor:
        """See ``Attend``."""
        num_heads, num_kv_heads = heads.num_heads, heads.num_kv_heads
        real = self.cis.shape[0]
        each = qkv[:real].view(real, -1, heads.head_dim)
        turning, v = _split(each, (num_heads + num_kv_heads, num_kv_heads), 1)
        if heads.q_norm is not None and heads.k_norm is not None:
            q, k = _split(turning, (num_heads, num_kv_heads), 1)
            turning = torch.cat([heads.q_norm.forward(q), heads.k_norm.forward(k)], 1)
        q, k = _split(rotate(turning, self.cis), (num_heads, num_kv_heads), 1)
        return self.mix(layer, q, k, v)

    @abstractmethod
    def mix(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(R, K, D) each, k and v with the KV heads alone -> (R, heads * D)."""


@dataclass(frozen=True)
class TreeSlots:
    """Where the nodes of a batch of trees stand.

    Attributes:
        cache: where keys and values are written; room for every tree must be reserved.
        tree: the queries are the nodes from ``first_node`` on; earlier ones lie in their slots already.
        lengths_B: (B,) committed tokens of each row, on the device.
        lengths: the same on the host. None in a recording (``run.graphs``), which must not know them.
        first_row: the cache row of the tree's first row.
        width: slots that are looked at.
        view, watched: see ``run.forward.Entries`` (``model.views`` attends so).
    """

    cache: KVCache
    tree: DraftTree
    lengths_B: Tensor
    lengths: Sequence[int] | None
    first_row: int
    first_node: int
    width: int
    view: View | None = None
    watched: Tensor | None = None

    @property
    def fresh(self) -> Tensor:
        """(B, N) slots of the nodes that are run."""
        nodes = torch.arange(self.first_node, self.tree.num_nodes, device=self.lengths_B.device)
        return self.lengths_B[:, None] + nodes


class TreeAttention(Attention):
    """Attention of a batch of trees over their rows' slots: an ``Attend`` for one forward.

    Each node sees its row's committed slots and its own ancestors, within the layer's window. The queries that
    share a KV head are folded into one block, so that keys are read once for all of them.

    Args:
        cis: see ``Attention``.
        where: the trees and their slots.
        windows: each layer's sliding window, or None.
        num_heads: query heads.
        num_rows_out: rows of the result; more than B * N where the caller padded.
    """

    def __init__(
        self, cis: Tensor, where: TreeSlots, windows: Sequence[int | None], num_heads: int, num_rows_out: int
    ) -> None:
        super().__init__(cis)
        cache, tree, first_node = where.cache, where.tree, where.first_node
        rows, nodes, width = tree.num_rows, tree.num_nodes - first_node, min(where.width, cache.num_slots)
        _, _, _, kv_heads, _, dim = cache.data.shape
        self._groups = num_heads // kv_heads
        self._queries = nodes * self._groups
        self._scale, self._windows = dim**-0.5, windows
        self._shape = (rows, nodes, kv_heads, self._groups, dim)
        padded = round_up(self._queries, QUERY_BLOCK) if cache.data.device.type == "cpu" else self._queries
        self._padded, self._dtype = padded, cache.data.dtype
        self._masks = {window: self._mask(where, window, width) for window in set(windows)}
        self._find(where, width)
        self._q = cache.data.new_zeros(rows, kv_heads, padded, dim)
        self._q_view = (
            self._q[:, :, : self._queries].view(rows, kv_heads, nodes, self._groups, dim).permute(0, 2, 1, 3, 4)
        )
        self._out = cache.data.new_zeros(num_rows_out, num_heads * dim)
        self._out_view = self._out[: rows * nodes].view(self._shape)

    def _find(self, where: TreeSlots, width: int) -> None:
        """Where the slots of the rows lie, and in them those of the nodes."""
        cache, lengths, rows = where.cache, where.lengths, where.tree.num_rows
        kv = cache.data[:, :, where.first_row : where.first_row + rows]
        self._keys = [keys[:, :, :width] for keys in kv[:, 0]]
        self._values = [values[:, :, :width] for values in kv[:, 1]]
        # Rows of one length share a contiguous range of slots, which is far cheaper to write than an index.
        self._index: tuple[Tensor, Tensor] | None = None
        if lengths is not None and max(lengths) == min(lengths):
            fresh = slice(lengths[0] + where.first_node, lengths[0] + where.tree.num_nodes)
            self._key_slots = [keys[:, :, fresh].transpose(1, 2) for keys in self._keys]
            self._value_slots = [values[:, :, fresh].transpose(1, 2) for values in self._values]
        else:
            self._index = (torch.arange(rows, device=where.lengths_B.device)[:, None], where.fresh)

    def _kept(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v (B, N, K, D) into the nodes' slots: keys and values (B, K, width, D) of all that is seen."""
        keys, values = self._keys[layer], self._values[layer]
        if self._index is None:
            self._key_slots[layer].copy_(k)
            self._value_slots[layer].copy_(v)
        else:
            row, slot = self._index
            keys[row, :, slot] = k
            values[row, :, slot] = v
        return keys, values

    def _mask(self, where: TreeSlots, window: int | None, width: int) -> Tensor:
        """(B, 1, padded, width): 0 where a query may look, -inf elsewhere; padding queries look everywhere."""
        tree, lengths, first_node, padded = where.tree, where.lengths_B, where.first_node, self._padded
        dtype, slots = self._dtype, torch.arange(width, device=lengths.device)
        if tree.is_line and window is None:  # what drafting spends its time on: a third of the kernels
            last = first_node + torch.arange(padded, device=lengths.device) // self._groups
            seen = slots <= (lengths[:, None] + last)[:, None, :, None]
            return torch.where(seen, torch.zeros((), dtype=dtype, device=seen.device), float("-inf"))
        place = slots - lengths[:, None]  # the node that a slot holds, negative for committed slots
        node = place.clamp(0, tree.num_nodes - 1)
        ancestors = tree.ancestors[:, first_node:]
        in_tree = ancestors.gather(2, node[:, None, :].expand(-1, ancestors.shape[1], -1))
        allowed = (place < 0)[:, None, :] | (in_tree & (place < tree.num_nodes)[:, None, :])
        if window is not None:
            key_position = torch.where(place < 0, slots, lengths[:, None] + tree.depths.gather(1, node))
            query_position = lengths[:, None] + tree.depths[:, first_node:]
            allowed &= key_position[:, None, :] > query_position[:, :, None] - window
        bias = torch.zeros(allowed.shape, dtype=dtype, device=lengths.device).masked_fill_(~allowed, float("-inf"))
        folded = bias.repeat_interleave(self._groups, dim=1)
        return F.pad(folded, (0, 0, 0, padded - folded.shape[1]))[:, None]

    def mix(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v into the tree's slots, then attend. (R, heads, D) each -> (padded R, num_heads * D)."""
        rows, nodes, kv_heads, _, dim = self._shape
        keys, values = self._kept(layer, k.view(rows, nodes, kv_heads, dim), v.view(rows, nodes, kv_heads, dim))
        self._q_view.copy_(q.view(self._shape))
        mask = self._masks[self._windows[layer]]
        mixed = F.scaled_dot_product_attention(self._q, keys, values, attn_mask=mask, scale=self._scale)
        mixed = mixed[:, :, : self._queries].view(rows, kv_heads, nodes, self._groups, dim)
        self._out_view.copy_(mixed.permute(0, 2, 1, 3, 4))
        return self._out


class PagedTreeAttention(TreeAttention):
    """``TreeAttention`` over slots in pages (``model.paged``): what is looked at is gathered, layer by layer."""

    def _find(self, where: TreeSlots, width: int) -> None:
        self._data = where.cache.data
        rows = torch.arange(where.first_row, where.first_row + where.tree.num_rows, device=where.lengths_B.device)
        seen = torch.arange(width, device=rows.device).expand(len(rows), -1)
        self._seen = where.cache.place(rows[:, None], seen)[1]
        fresh = where.cache.place(rows[:, None], where.fresh)[1]
        # The first page stays zeros: rows look there past their own pages. The last one is for rows that are not one.
        self._fresh = torch.where(fresh < KEY_BLOCK, fresh + self._data.shape[4] - KEY_BLOCK, fresh)

    def _kept(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        data = self._data[layer, :, 0]
        data[0][:, self._fresh], data[1][:, self._fresh] = k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)
        keys, values = data[:, :, self._seen].transpose(1, 2)
        return keys, values


class CausalAttention(Attention):
    """Each token sees itself and those before it, within the layer's window: an ``Attend`` for (B, T) tokens.

    Padding belongs at the end of rows: no other token sees it.

    Args:
        num_rows, length: B and T.
        windows: each layer's sliding window, or None.
        scale: of the scores.
        cis: see ``Attention``.
    """

    def __init__(self, num_rows: int, length: int, windows: Sequence[int | None], scale: float, cis: Tensor) -> None:
        super().__init__(cis)
        self._rows, self._length, self._windows, self._scale = num_rows, length, windows, scale
        self._masks: dict[int, Tensor] = {}

    def mix(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(R, heads, D) each -> (R, heads * D)."""
        mask = self._mask(self._windows[layer], q.device)
        q, k, v = (each.view(self._rows, self._length, -1, each.shape[-1]).transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=True
        )
        return mixed.transpose(1, 2).reshape(self._rows * self._length, -1)

    def _mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """(T, T) True where a token looks; None where all that came before may be seen."""
        if window is None or window >= self._length:
            return None
        if window not in self._masks:
            place = torch.arange(self._length, device=device)
            back = place[:, None] - place
            self._masks[window] = (back >= 0) & (back < window)
        return self._masks[window]
