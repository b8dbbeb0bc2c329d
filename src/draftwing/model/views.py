"""Attention in PyTorch through a view: a forward that looks at some of the committed slots, or says where it looks.

What a view costs grows with the slots in it, and not with the context: keys and values are gathered layer by layer.

Shape suffixes: B rows, N nodes, R rows of a forward, L layers, K KV heads, S slots, M slots of a view, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.model.attention import Attention, PagedTreeAttention, TreeAttention, TreeSlots
from draftwing.run.forward import on_device

__all__ = ["ViewAttention", "WatchAttention", "attention_over"]


class ViewAttention(Attention):
    """Each node sees the slots of its row's view and its own ancestors, within the layer's window.

    Args: see ``TreeAttention``; ``where.view`` must be given.
    """

    def __init__(
        self, cis: Tensor, where: TreeSlots, windows: Sequence[int | None], num_heads: int, num_rows_out: int
    ) -> None:
        super().__init__(cis)
        if where.view is None:
            raise ConfigError("attention through a view needs one: give TreeSlots.view")
        cache, tree, first, lengths = where.cache, where.tree, where.first_node, where.lengths_B
        device, kv_heads, dim = cache.data.device, cache.data.shape[3], cache.data.shape[5]
        rows, nodes, most = tree.num_rows, tree.num_nodes - first, max(where.view.counts)
        self._cache = cache
        self._shape, self._rows_out = (rows, nodes, kv_heads, num_heads // kv_heads, dim), num_rows_out
        self._windows, self._scale = windows, dim**-0.5
        self._slots = where.view.slots[..., :most]
        counts = on_device(where.view.counts, device)
        self._is_seen = torch.arange(most, device=device) < counts[:, None]
        self._in_tree, self._positions = tree.ancestors[:, first:], lengths[:, None] + tree.depths
        self._first = first
        self._places = lengths[:, None] + torch.arange(tree.num_nodes, device=device)
        self._row = torch.arange(where.first_row, where.first_row + rows, device=device)[:, None]
        self._head = torch.arange(kv_heads, device=device)
        self._mask: Tensor | None = None  # the same in all layers without a window

    def mix(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v into the tree's slots, then attend. (R, heads, D) each -> (padded R, num_heads * D)."""
        rows, nodes, kv_heads, groups, dim = self._shape
        keys, values = self._cache.data[layer].unbind(0)
        row, fresh = self._cache.place(self._row, self._places[:, self._first :])
        keys[row, :, fresh] = k.view(rows, nodes, kv_heads, dim)
        values[row, :, fresh] = v.view(rows, nodes, kv_heads, dim)
        seen = self._slots[:, layer if self._slots.shape[1] > 1 else 0]
        seen = torch.where(self._is_seen[:, None], seen, 0).expand(-1, kv_heads, -1).long()
        index = torch.cat([seen, self._places[:, None].expand(-1, kv_heads, -1)], 2)
        row, index = self._cache.place(self._row[:, :, None], index)
        at = row, self._head[None, :, None], index
        folded = q.view(self._shape).permute(0, 2, 1, 3, 4).reshape(rows, kv_heads, nodes * groups, dim)
        mask = self._mask_of(self._windows[layer], seen)
        mixed = F.scaled_dot_product_attention(folded, keys[at], values[at], attn_mask=mask, scale=self._scale)
        mixed = mixed.view(rows, kv_heads, nodes, groups, dim).permute(0, 2, 1, 3, 4).reshape(rows * nodes, -1)
        return F.pad(mixed, (0, 0, 0, self._rows_out - len(mixed)))

    def _mask_of(self, window: int | None, seen: Tensor) -> Tensor:
        """(B, K or 1, N * groups, M + N) True where a query looks; ``seen``: (B, K, M)."""
        if window is None and self._mask is not None:
            return self._mask
        nodes, groups = self._shape[1], self._shape[3]
        committed = self._is_seen[:, None, None].expand(-1, 1, nodes, -1)
        in_tree = self._in_tree[:, None]
        if window is not None:
            lowest = self._positions[:, None, self._first :, None] - window
            committed = committed & (seen[:, :, None] > lowest)
            in_tree = in_tree & (self._positions[:, None, None] > lowest)
        in_tree = in_tree.expand(-1, committed.shape[1], -1, -1)
        mask = torch.cat([committed, in_tree], 3).repeat_interleave(groups, dim=2)
        if window is None:
            self._mask = mask
        return mask


class WatchAttention(Attention):
    """The last tokens of a text look at the slots that they and those before them lie in already: nothing is written.

    How much each slot before them is looked at is added up in ``where.watched``.

    Args: see ``TreeAttention``; ``where.watched`` must be given, and the tree must be one chain.
    """

    def __init__(
        self, cis: Tensor, where: TreeSlots, windows: Sequence[int | None], num_heads: int, num_rows_out: int
    ) -> None:
        super().__init__(cis)
        if where.watched is None or where.tree.num_rows != 1:
            raise ConfigError("attention that is watched is that of one row: give TreeSlots.watched (L, K, S)")
        cache, nodes, self._watched = where.cache, where.tree.num_nodes, where.watched
        kv_heads, dim, self._start = cache.data.shape[3], cache.data.shape[5], where.watched.shape[2]
        every = torch.arange(self._start + nodes, device=cache.data.device)
        row, every = cache.place(torch.full_like(every, where.first_row), every)
        self._kv, self._at = cache.data, (row, every)
        self._shape, self._rows_out = (nodes, kv_heads, num_heads // kv_heads, dim), num_rows_out
        self._windows, self._scale = windows, dim**-0.5
        slots = torch.arange(self._start + nodes, device=cache.data.device)
        self._back = (slots[self._start :, None] - slots).repeat_interleave(num_heads // kv_heads, dim=0)

    def mix(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(R, heads, D) each -> (padded R, num_heads * D); k and v are what the slots hold."""
        nodes, kv_heads, groups, dim = self._shape
        keys, values = (each[self._at[0], :, self._at[1]].transpose(0, 1) for each in self._kv[layer])
        folded = q.view(self._shape).transpose(0, 1).reshape(kv_heads, nodes * groups, dim)
        scores = (folded @ keys.transpose(1, 2)).mul_(self._scale)
        window = self._windows[layer]
        hidden = self._back < 0 if window is None else (self._back < 0) | (self._back >= window)
        chances = scores.masked_fill_(hidden, -torch.inf).softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
        self._watched[layer] += chances[..., : self._start].sum(1)
        mixed = (chances.to(q.dtype) @ values).view(kv_heads, nodes, groups * dim).transpose(0, 1)
        return F.pad(mixed.reshape(nodes, -1), (0, 0, 0, self._rows_out - nodes))


def attention_over(where: TreeSlots) -> type[TreeAttention | ViewAttention | WatchAttention]:
    """How a forward attends to these slots."""
    if where.watched is not None:
        return WatchAttention
    if where.view is not None:
        return ViewAttention
    return TreeAttention if where.cache.table is None else PagedTreeAttention
