"""KV slots: row b's committed token at position i lies in slot i, node i of its tree in slot length_b + i.

A ragged batch needs no special case, and committing an accepted path is one gather.

Shape suffixes: L layers, B rows, N nodes, K heads, S slots, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.tree import PAD, Accepted, DraftTree

__all__ = ["KVCache", "TreeAttention"]

KEY_BLOCK = 64  # keys and queries are padded to these, so that a CPU's attention gives a row the same bits
QUERY_BLOCK = 8  # whatever is beside it


def _round_up(number: int, block: int) -> int:
    return -(-number // block) * block


class KVCache:
    """Keys and values of all layers in one tensor (L, 2, B, K, S, D), grown by doubling.

    Memory: ``2 * L * K * D * itemsize`` bytes per slot and row.
    """

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = (num_layers, 2, num_kv_heads, head_dim)
        self.data = torch.zeros(num_layers, 2, 0, num_kv_heads, 0, head_dim, dtype=dtype, device=device)

    @property
    def num_rows(self) -> int:
        """Rows that there is room for."""
        return self.data.shape[2]

    @property
    def num_slots(self) -> int:
        """Slots of each row."""
        return self.data.shape[4]

    def reserve(self, num_rows: int, num_slots: int) -> None:
        """Make room for at least so many; what is stored stays. Unused slots are zero, never NaN."""
        if num_rows <= self.num_rows and num_slots <= self.num_slots:
            return
        rows, slots = self.num_rows, self.num_slots
        new_rows = rows if num_rows <= rows else max(num_rows, 2 * rows)
        new_slots = slots if num_slots <= slots else max(_round_up(num_slots, KEY_BLOCK), min(2 * slots, slots + 4096))
        layers, two, heads, dim = self._shape
        grown = self.data.new_zeros(layers, two, new_rows, heads, new_slots, dim)
        grown[:, :, :rows, :, :slots] = self.data
        self.data = grown

    def clear(self, row: int) -> None:
        """Zero a row's slots: a former request may have left NaN there, which no mask keeps out (0 * NaN is NaN)."""
        self.data[:, :, row].zero_()

    def move_row(self, source: int, target: int) -> None:
        """Copy one row over another: how a batch stays dense when a row leaves."""
        if source != target:
            self.data[:, :, target] = self.data[:, :, source]

    def commit(self, lengths: Tensor, accepted: Accepted, first_row: int = 0) -> None:
        """Gather the kept nodes of every row down to slots ``length .. length + num``. ``lengths``: (B,)."""
        path = accepted.path
        width = path.shape[1]
        if width <= 1:
            return
        order = torch.arange(width, device=path.device)
        target = lengths[:, None] + order
        source = torch.where(path == PAD, target, lengths[:, None] + path)
        rows = torch.arange(first_row, first_row + path.shape[0], device=path.device)[:, None]
        self.data[:, :, rows, :, target] = self.data[:, :, rows, :, source]


class TreeAttention:
    """Attention of a batch of trees over their rows' slots: an ``Attend`` for one forward.

    Each node sees its row's committed slots and its own ancestors, within the layer's window. The queries that
    share a KV head are folded into one block, so that keys are read once for all of them.

    Args:
        cache: where keys and values are written; room for every tree must be reserved.
        first_row: the cache row of the tree's first row.
        lengths: committed tokens of each row, on the host; ``lengths_B`` the same on the device. None in a recording
            (``run.graphs``), which must not know them: it gives ``width`` instead, the slots that are looked at.
        first_node: the queries are the nodes from here on; earlier ones lie in their slots already.
        windows: each layer's sliding window, or None.
        num_heads: query heads.
        scale: of the scores.
        num_rows_out: rows of the result; more than B * N where the caller padded.
    """

    def __init__(
        self,
        cache: KVCache,
        first_row: int,
        lengths: Sequence[int] | None,
        lengths_B: Tensor,
        tree: DraftTree,
        first_node: int,
        windows: Sequence[int | None],
        num_heads: int,
        scale: float,
        num_rows_out: int,
        width: int | None = None,
    ) -> None:
        rows, nodes = tree.num_rows, tree.num_nodes - first_node
        layers, _, _, kv_heads, _, dim = cache.data.shape
        if width is None:
            assert lengths is not None
            width = min(_round_up(max(lengths) + tree.num_nodes, KEY_BLOCK), cache.num_slots)
        self._groups = num_heads // kv_heads
        self._queries = nodes * self._groups
        self._scale, self._windows = scale, windows
        self._shape = (rows, nodes, kv_heads, self._groups, dim)
        padded = _round_up(self._queries, QUERY_BLOCK) if cache.data.device.type == "cpu" else self._queries
        kv = cache.data[:, :, first_row : first_row + rows]
        self._keys = [kv[layer, 0, :, :, :width] for layer in range(layers)]
        self._values = [kv[layer, 1, :, :, :width] for layer in range(layers)]
        self._masks = {
            window: self._mask(lengths_B, tree, first_node, window, width, padded, cache.data.dtype)
            for window in set(windows)
        }
        # Rows of one length share a contiguous range of slots, which is far cheaper to write than an index.
        if lengths is not None and max(lengths) == min(lengths):
            fresh = slice(lengths[0] + first_node, lengths[0] + tree.num_nodes)
            self._key_slots = [keys[:, :, fresh].transpose(1, 2) for keys in self._keys]
            self._value_slots = [values[:, :, fresh].transpose(1, 2) for values in self._values]
            self._index: tuple[Tensor, Tensor] | None = None
        else:
            slots = lengths_B[:, None] + torch.arange(first_node, tree.num_nodes, device=lengths_B.device)
            self._index = (torch.arange(rows, device=lengths_B.device)[:, None], slots)
        self._q = cache.data.new_zeros(rows, kv_heads, padded, dim)
        self._q_view = (
            self._q[:, :, : self._queries].view(rows, kv_heads, nodes, self._groups, dim).permute(0, 2, 1, 3, 4)
        )
        self._out = cache.data.new_zeros(num_rows_out, num_heads * dim)
        self._out_view = self._out[: rows * nodes].view(self._shape)

    def _mask(
        self,
        lengths: Tensor,
        tree: DraftTree,
        first_node: int,
        window: int | None,
        width: int,
        padded: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """(B, 1, padded, width): 0 where a query may look, -inf elsewhere; padding queries look everywhere."""
        slots = torch.arange(width, device=lengths.device)
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

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v into the tree's slots, then attend. (R, heads, D) each -> (padded R, num_heads * D)."""
        rows, nodes, kv_heads, _, dim = self._shape
        keys, values = self._keys[layer], self._values[layer]
        if self._index is None:
            self._key_slots[layer].copy_(k.view(rows, nodes, kv_heads, dim))
            self._value_slots[layer].copy_(v.view(rows, nodes, kv_heads, dim))
        else:
            row, slot = self._index
            keys[row, :, slot] = k.view(rows, nodes, kv_heads, dim)
            values[row, :, slot] = v.view(rows, nodes, kv_heads, dim)
        self._q_view.copy_(q.view(self._shape))
        mask = self._masks[self._windows[layer]]
        mixed = F.scaled_dot_product_attention(self._q, keys, values, attn_mask=mask, scale=self._scale)
        mixed = mixed[:, :, : self._queries].view(rows, kv_heads, nodes, self._groups, dim)
        self._out_view.copy_(mixed.permute(0, 2, 1, 3, 4))
        return self._out
