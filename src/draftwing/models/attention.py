"""Attention in PyTorch over draft trees, whole sequences, or a view of the KV slots.

Shape suffixes: B rows, N nodes, T tokens, R rows of a forward, L layers, K KV heads, S slots, M slots of a view, D head
dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from draftwing.models import gpu
from draftwing.models.cache import KEY_BLOCK, KVCache, View, round_up
from draftwing.models.recurrent import GatedDelta, RecurrentStates, WalkOrder
from draftwing.torch_utils import on_device
from draftwing.tree import DraftTree, last_tokens

# Queries are padded to multiples of this and keys to KEY_BLOCK, so that a row's bits on a CPU do not depend on others.
QUERY_BLOCK = 8
_KEYS_AT_ONCE = 256  # keys per product for capped scores: few enough that it sums over them in order

# Not cuDNN, which plans each new shape for longer than the attention takes.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_split = torch.split_with_sizes  # without the Python wrapper, which costs more than the work on a few rows


@dataclass(frozen=True, eq=False)
class HeadTraits:
    """How the heads of a layer differ from Llama's."""

    scale: float | None = None  # factor of the scores; None for head_dim ** -0.5
    cap: float = 0.0  # scores are capped to cap * tanh(score / cap); 0: not
    # the first of the net's rotation factors that the layer uses, and their number; None for all
    rotation: tuple[int, int] | None = None
    query_scale: int | None = None  # the rotation factor whose real part multiplies queries
    norms_rotated: bool = False  # queries and keys are normed after their rotation
    sinks: Tensor | None = None  # (heads,) a further score of each query head, of no value
    value_dim: int | None = None  # width of values, if smaller than that of keys
    shared_dim: int = 0  # first channels of keys, which all heads share
    is_gated: bool = False  # columns after the values, one for each of the result, are its gates
    source: int | None = None  # the layer whose keys and values are attended to, if several layers share them
    # the layer of slots that holds the keys and values, and the first word in these; None: those of the layer alone
    slots: tuple[int, int] | None = None

    @property
    def is_plain(self) -> bool:
        """True if the Triton kernels compute it."""
        special = self.cap or self.norms_rotated or self.sinks is not None
        return not special and self.rotation is None and self.query_scale is None and self.slots is None


PLAIN_HEADS = HeadTraits()


class Heads(Protocol):
    """The heads of an attention layer, and their norms (Qwen3) or None."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Any
    k_norm: Any
    v_norm: Any
    traits: HeadTraits
    mixer: Any  # a ``layers.ShortConvolution`` or ``recurrent.GatedDelta`` instead of heads, or None


class Attend(Protocol):
    """The attention of one forward."""

    def __call__(self, layer: int, qkv: Any, heads: Any) -> Any:
        """(R, (heads + 2 * KV heads) * D), queries first -> (R, heads * D)."""
        ...


def first_visible(window: int, positions: Tensor) -> Tensor:
    """The first position that queries at ``positions`` see within a sliding window, or a chunk if it is negative."""
    return positions - window + 1 if window > 0 else positions // -window * -window


def rotate(heads: Tensor, cis: Tensor) -> Tensor:
    """Rotary embedding (RoFormer, 2104.09864) of (R, K, D) as one complex product with (R, 1, rotary_dim / 2).

    The result holds each pair next to each other instead of half a head apart; queries and keys are permuted in the
    same way, so their products are unchanged. Channels past ``rotary_dim`` are unchanged.
    """
    half = cis.shape[-1]
    wide = heads if heads.dtype in (torch.float32, torch.float64) else heads.float()
    if heads.shape[-1] == 2 * half:
        real, imaginary = _split(wide, (half, half), -1)
    else:
        real, imaginary = wide[..., :half], wide[..., half : 2 * half]
    rotated = torch.view_as_real(torch.complex(real, imaginary) * cis).flatten(-2).to(heads.dtype)
    return rotated if heads.shape[-1] == 2 * half else torch.cat([rotated, heads[..., 2 * half :]], -1)


def _norm_rotated(norm: Any, heads: Tensor, cis: Tensor) -> Tensor:
    """Norm (R, K, D) after ``rotate``, which has moved the channels."""
    channels = torch.arange(heads.shape[-1], device=heads.device)
    half = cis.shape[-1]
    channels[: 2 * half] = channels[: 2 * half].view(2, half).T.flatten()
    normed: Tensor = norm.forward(heads, channels)
    return normed


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, traits: HeadTraits) -> Tensor:
    """Attention of queries (B, K, Q, D), folded by KV head as in ``TreeAttention``, to keys (B, K, W, D).

    Capped scores and sinks are computed in blocks of one size on a CPU, so that a query's bits depend on no other query
    and on no masked key.

    Args:
        mask: (B or 1, 1 or K, Q, W) True or 0 for visible keys, False or -inf for others; None for all.
    """
    scale = scale if traits.scale is None else traits.scale
    if not traits.cap and traits.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    sinks = None
    if traits.sinks is not None:  # (1, K, Q, 1)
        groups = traits.sinks.view(k.shape[1], -1)
        repeats = -(-q.shape[2] // groups.shape[1])
        sinks = groups.repeat(1, repeats)[None, :, : q.shape[2], None].to(q.dtype)
    queries, keys = (QUERY_BLOCK, _KEYS_AT_ONCE) if q.device.type == "cpu" else (q.shape[2], k.shape[2])
    parts = []
    for first in range(0, q.shape[2], queries):
        some = slice(first, first + queries)
        pieces = torch.split(k, keys, 2)
        scores = torch.cat([q[:, :, some] @ piece.transpose(2, 3) for piece in pieces], -1) * scale
        if traits.cap:
            scores = (scores / traits.cap).tanh_().mul_(traits.cap)
        if mask is not None:
            scores = scores + mask[:, :, some]
        top = scores.amax(-1, keepdim=True)
        if sinks is not None:
            top = torch.maximum(top, sinks[:, :, some])
        weights = (scores - top).exp_()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + (sinks[:, :, some] - top).exp()
        shares, values = torch.split(weights, keys, -1), torch.split(v, keys, 2)
        mixed = [part @ piece for part, piece in zip(shares, values, strict=True)]
        out = mixed[0]
        for part in mixed[1:]:
            out = out + part
        parts.append(out / total)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


class Attention(ABC):
    """Normalises and rotates queries and keys; subclasses attend in ``mix``.

    ``cis`` (R, 1, rotary_dim / 2) is the rotation of the real rows; later rows of a forward are padding.
    """

    def __init__(self, cis: Tensor) -> None:
        self.cis = cis

    def __call__(self, layer: int, qkv: Tensor, heads: Heads) -> Tensor:
        num_heads, num_kv_heads = heads.num_heads, heads.num_kv_heads
        real = self.cis.shape[0]
        if heads.mixer is not None:
            mixed: Tensor = heads.mixer.mix(layer, qkv[:real], self)
            return F.pad(mixed, (0, 0, 0, len(qkv) - real))
        qk, v = _split(qkv[:real].view(real, -1, heads.head_dim), (num_heads + num_kv_heads, num_kv_heads), 1)
        traits, cis, normed = heads.traits, self.cis, heads.q_norm is not None
        if traits.rotation is not None:
            cis = cis.narrow(-1, *traits.rotation)
        if normed and not traits.norms_rotated:
            q, k = _split(qk, (num_heads, num_kv_heads), 1)
            q = heads.q_norm.forward(q)
            qk = q if heads.k_norm is None else torch.cat([q, heads.k_norm.forward(k)], 1)
        if heads.v_norm is not None:
            v = heads.v_norm.forward(v)
        q, k = _split(rotate(qk, cis) if cis.shape[-1] else qk, (num_heads, num_kv_heads), 1)
        if normed and traits.norms_rotated:
            q, k = _norm_rotated(heads.q_norm, q, cis), _norm_rotated(heads.k_norm, k, cis)
        if traits.query_scale is not None:
            q = q * self.cis[..., traits.query_scale : traits.query_scale + 1].real.to(q.dtype)
        return self.mix(layer, traits, q, k, v)

    @abstractmethod
    def mix(self, layer: int, traits: HeadTraits, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(R, K, D) each, k and v with the KV heads alone -> (R, heads * D).

        Without KV heads, the keys and values are those of layer ``traits.source``, which was called before.
        """


@dataclass(frozen=True)
class TreeSlots:
    """The KV slots of a batch of trees."""

    cache: KVCache  # has room for every tree
    tree: DraftTree  # the queries are the nodes from ``first_node`` on; earlier ones are in their slots already
    lengths_B: Tensor  # (B,) committed tokens of each row, on the device
    first_row: int  # the cache row of the tree's first row
    first_node: int
    width: int  # slots that attention reads
    # view, watched, rows: see ``runtime.forward.Entries``
    view: View | None = None
    watched: Tensor | None = None
    rows: Tensor | None = None

    @property
    def fresh(self) -> Tensor:
        """(B, N) slots of the nodes that are run."""
        nodes = torch.arange(self.first_node, self.tree.num_nodes, device=self.lengths_B.device)
        return self.lengths_B[:, None] + nodes

    def place(self, slots: Tensor, *, writes: bool = False) -> tuple[Tensor, Tensor]:
        """The positions of slots (B, M) as indices of the third and the fifth dimension of the cache's ``data``."""
        rows = self.rows
        if rows is None:
            rows = torch.arange(self.first_row, self.first_row + len(slots), device=slots.device)
        into, at = self.cache.place(rows[:, None], slots)
        if writes and self.cache.table is not None:
            # The first page stays zeros: rows read it past their own pages. Padding rows write into the last page.
            at = torch.where(at < KEY_BLOCK, at + self.cache.data.shape[4] - KEY_BLOCK, at)
        return into, at


class SlotAttention(Attention):
    """Attention over KV slots ``where`` the trees are: an ``Attend`` for one forward.

    Its result has ``num_rows_out`` rows, more than B * N if the caller padded. ``windows`` are each layer's sliding
    window, chunk or None (``ModelConfig.sliding_windows``). Layers marked in ``causal`` see no later position; others
    do if a tree's ``paths`` let nodes see each other, as in a block. Empty: none is marked. ``heads`` are the numbers
    of query heads and of KV heads, of which slots may have more (``ModelConfig.num_slot_heads``).
    """

    def __init__(
        self,
        cis: Tensor,
        where: TreeSlots,
        windows: Sequence[int | None],
        heads: tuple[int, int],
        num_rows_out: int,
        causal: Sequence[bool] = (),
    ) -> None:
        super().__init__(cis)
        num_heads, kv_heads = heads
        dim = where.cache.data.shape[5]
        self._where, self._before = where, dict[int, Tensor]()
        self._orders: list[WalkOrder] | None = None  # for recurrent layers
        self._windows, self._scale, self._rows_out = windows, dim**-0.5, num_rows_out
        self._causal = causal or [False] * len(windows)
        nodes = where.tree.num_nodes - where.first_node
        self._shape = (where.tree.num_rows, nodes, kv_heads, num_heads // kv_heads)
        self._prepare(where)

    @abstractmethod
    def _prepare(self, where: TreeSlots) -> None:
        """Compute the masks and indices of all layers."""

    def _fitted(self, heads: Tensor, count: int) -> Tensor:
        """(R, K, D) -> (B, N, count, D): heads are repeated."""
        if heads.shape[1] < count:
            heads = heads.repeat_interleave(count // heads.shape[1], 1)
        return heads.view(*self._shape[:2], count, -1)

    def _folded(self, q: Tensor) -> Tensor:
        """Queries (R, heads, D) -> (B, N, K, heads / K, D)."""
        return q.view(*self._shape, -1)

    def _slots_of(self, data: Tensor, layer: int, traits: HeadTraits, dim: int) -> Tensor:
        """The slots of a layer with heads of this width, among those of all layers."""
        if traits.slots is None:
            return data[layer]
        index, first = traits.slots
        return data[index][..., first : first + dim]

    def before(self, layer: int, inputs: Tensor, count: int) -> Tensor:
        """The inputs (R, count, H) of a convolution at the tokens before each row, the oldest first; zeros without.

        Writes the inputs of each node into its slot, and gathers its ancestors'.
        """
        where, (rows, nodes) = self._where, self._shape[:2]
        data = where.cache.data[layer]
        if where.watched is None:
            into, at = where.place(where.fresh, writes=True)
            _, _, heads, _, dim = data.shape
            padded = F.pad(inputs, (0, 2 * heads * dim - inputs.shape[1]))
            data[:, into, :, at] = padded.view(rows, nodes, 2, heads, dim)
        if count not in self._before:
            self._before[count] = self._slots_before(where, count)
        slots = self._before[count]
        into, at = where.place(slots.clamp(min=0).flatten(1))
        found = data[:, into, :, at].view(rows * nodes, count, -1)[..., : inputs.shape[1]]
        return torch.where(
            (slots >= 0).view(-1, count, 1), found, torch.zeros((), dtype=found.dtype, device=found.device)
        )

    def recur(self, layer: int, rows: Tensor, delta: GatedDelta) -> Tensor:
        """The result of a recurrent layer for its matrix's rows (R, width): see ``GatedDelta.mix``."""
        where = self._where
        if self._orders is None:
            self._orders = WalkOrder.of(where.tree, delta.weight.shape[0])
        states, texts = cast(RecurrentStates, where.cache.states), rows.view(len(self._orders), -1, rows.shape[1])
        mixed = [
            states.forward(where.first_row + row, layer, texts[row], delta, order)
            for row, order in enumerate(self._orders)
        ]
        return torch.cat(mixed)

    def _slots_before(self, where: TreeSlots, count: int) -> Tensor:
        """(B, N, count) slots of the tokens before each node that is run, the oldest first; negative without."""
        parents = where.tree.parents
        nodes = torch.arange(where.first_node, where.tree.num_nodes, device=parents.device).expand(len(parents), -1)
        return where.lengths_B[:, None, None] + last_tokens(parents, nodes, count + 1)[:, :, :-1]


class TreeAttention(SlotAttention):
    """Each node attends to its row's committed slots and its ancestors, within the layer's window.

    The queries that share a KV head are folded into one block, so that keys are read once for all of them.
    """

    def _prepare(self, where: TreeSlots) -> None:
        data, width = where.cache.data, min(where.width, where.cache.num_slots)
        rows, nodes, _, self._groups = self._shape
        self._queries = nodes * self._groups
        padded = round_up(self._queries, QUERY_BLOCK) if data.device.type == "cpu" else self._queries
        self._padded, self._dtype = padded, data.dtype
        kinds = set(zip(self._windows, self._causal, strict=True))
        self._masks = {kind: self._mask(where, *kind, width) for kind in kinds}
        self._kv, self._fresh = data[:, :, :, : self._shape[2]], where.place(where.fresh, writes=True)
        self._rows, self._width = slice(where.first_row, where.first_row + rows), width
        self._seen: Tensor | None = None  # (B, width) positions of slots in pages
        if where.cache.table is not None:
            slots = torch.arange(width, device=where.lengths_B.device).expand(rows, -1)
            self._seen = where.place(slots)[1]
        self._buffers: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def _buffers_of(self, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries (B, K, padded, D) and the result (padded R, heads * D) of heads of this width, and views of both."""
        if dim not in self._buffers:
            rows, nodes, kv_heads, groups = self._shape
            q = self._kv.new_zeros(rows, kv_heads, self._padded, dim)
            q_view = q[:, :, : self._queries].view(rows, kv_heads, nodes, groups, dim).permute(0, 2, 1, 3, 4)
            out = self._kv.new_zeros(self._rows_out, kv_heads * groups * dim)
            self._buffers[dim] = q, q_view, out, out[: rows * nodes].view(*self._shape, dim)
        return self._buffers[dim]

    def _write(self, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v (R, K, D), if any, into the nodes' slots; returns keys and values (B, K, width, D) to attend.

        Slots in pages are gathered.
        """
        keys, values = slots
        into, at = self._fresh
        if k.shape[1]:
            k, v = self._fitted(k, self._shape[2]), self._fitted(v, self._shape[2])
            keys[into, :, at], values[into, :, at] = k.to(keys.dtype), v.to(values.dtype)
        if self._seen is None:
            return keys[self._rows, :, : self._width], values[self._rows, :, : self._width]
        return keys[0][:, self._seen].transpose(0, 1), values[0][:, self._seen].transpose(0, 1)

    def _mask(self, where: TreeSlots, window: int | None, is_causal: bool, width: int) -> Tensor:
        """(B, 1, padded, width): 0 for visible slots, else -inf; padding queries see all slots."""
        tree, lengths, first_node, padded = where.tree, where.lengths_B, where.first_node, self._padded
        dtype, slots = self._dtype, torch.arange(width, device=lengths.device)
        if tree.is_line and window is None:  # most drafts: a third of the kernels of the general case
            last = first_node + torch.arange(padded, device=lengths.device) // self._groups
            visible = slots <= (lengths[:, None] + last)[:, None, :, None]
            return torch.where(visible, torch.zeros((), dtype=dtype, device=visible.device), float("-inf"))
        place = slots - lengths[:, None]  # the node that a slot holds, negative for committed slots
        node = place.clamp(0, tree.num_nodes - 1)
        ancestors = tree.ancestors[:, first_node:]
        in_tree = ancestors.gather(2, node[:, None, :].expand(-1, ancestors.shape[1], -1))
        allowed = (place < 0)[:, None, :] | (in_tree & (place < tree.num_nodes)[:, None, :])
        if window is not None or is_causal:
            key_position = torch.where(place < 0, slots, lengths[:, None] + tree.depths.gather(1, node))[:, None, :]
            query_position = (lengths[:, None] + tree.depths[:, first_node:])[:, :, None]
            if window is not None:
                allowed &= key_position >= first_visible(window, query_position)
            if is_causal:
                allowed &= key_position <= query_position
        bias = torch.zeros(allowed.shape, dtype=dtype, device=lengths.device).masked_fill_(~allowed, float("-inf"))
        folded = bias.repeat_interleave(self._groups, dim=1)
        return F.pad(folded, (0, 0, 0, padded - folded.shape[1]))[:, None]

    def mix(self, layer: int, traits: HeadTraits, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(R, heads, D) each -> (padded R, num_heads * D)."""
        rows, nodes, kv_heads, groups = self._shape
        queries, q_view, out, out_view = self._buffers_of(q.shape[2])
        keys, values = self._write(self._slots_of(self._kv, layer, traits, q.shape[2]), k, v)
        q_view.copy_(self._folded(q))
        mask = self._masks[self._windows[layer], self._causal[layer]]
        mixed = attend(queries, keys, values, mask, self._scale, traits)
        mixed = mixed[:, :, : self._queries].view(rows, kv_heads, nodes, groups, -1)
        out_view.copy_(mixed.permute(0, 2, 1, 3, 4))
        return out


class FusedTreeAttention(SlotAttention):
    """``TreeAttention`` in two or three launches a layer, over slots in rows or pages (``models.gpu``)."""

    def _prepare(self, where: TreeSlots) -> None:
        cache, tree, device = where.cache, where.tree, where.lengths_B.device
        rows = where.rows
        if rows is None:
            rows = torch.arange(where.first_row, where.first_row + tree.num_rows, device=device)
        self._data, self._width = cache.data, min(where.width, cache.num_slots)
        self._places = rows, where.lengths_B.contiguous(), None if cache.table is None else cache.table.tensor(device)
        self._first_node, self._num_nodes = where.first_node, tree.num_nodes
        self._ancestors = self._causal_ancestors = None if tree.is_line else tree.ancestors
        if any(self._causal) and self._ancestors is not None:
            self._causal_ancestors = self._ancestors & (tree.depths[:, None, :] <= tree.depths[:, :, None])
        self._depths = None if tree.is_line or not any(self._windows) else tree.depths.contiguous()
        self._pairs = torch.view_as_real(self.cis[:, 0])

    def __call__(self, layer: int, qkv: Tensor, heads: Heads) -> Tensor:
        norms = None
        if heads.q_norm is not None and heads.k_norm is not None:
            norms = heads.q_norm.weight, heads.k_norm.weight, heads.q_norm.eps
        slots, first = self._data[layer], self._first_node
        queries = gpu.write_heads(
            qkv, self._pairs, slots, self._places, first, (heads.num_heads, heads.num_kv_heads), norms
        )
        return gpu.tree_attention(
            queries, slots, self._places, self._causal_ancestors if self._causal[layer] else self._ancestors,
            self._depths, first, self._num_nodes, self._width, self._windows[layer],
            self._scale if heads.traits.scale is None else heads.traits.scale,
        )  # fmt: skip

    def mix(self, layer: int, traits: HeadTraits, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError  # ``__call__`` does all of it


class CausalAttention(Attention):
    """Causal attention of (B, T) tokens, within each layer's window, if any. Padding must be at the end of rows."""

    def __init__(self, num_rows: int, length: int, windows: Sequence[int | None], scale: float, cis: Tensor) -> None:
        super().__init__(cis)
        self._rows, self._length, self._windows, self._scale = num_rows, length, windows, scale
        self._masks: dict[int, Tensor] = {}
        self._shared: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values of layers that others attend to
        self._order: WalkOrder | None = None  # for recurrent layers

    def mix(self, layer: int, traits: HeadTraits, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(R, heads, D) each -> (R, heads * D)."""
        mask = self._mask(self._windows[layer], q.device)
        if traits.source is not None:
            if k.shape[1]:
                self._shared[traits.source] = k, v
            k, v = self._shared[traits.source]
        q, k, v = (x.view(self._rows, self._length, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v))
        scale = self._scale if traits.scale is None else traits.scale
        if traits.cap or traits.sinks is not None:
            groups, length = q.shape[1] // k.shape[1], self._length
            rows, dim = q.shape[0], q.shape[3]
            folded = q.view(rows, -1, groups, length, dim).transpose(2, 3).flatten(2, 3)
            visible = self._mask(length, q.device, always=True) if mask is None else mask
            assert visible is not None
            mixed = attend(folded, k, v, visible.repeat_interleave(groups, 0)[None, None], scale, traits)
            mixed = mixed.view(rows, -1, length, groups, dim).permute(0, 2, 1, 3, 4)
            return mixed.reshape(rows * length, -1)
        with sdpa_kernel(_BACKENDS) if q.is_cuda else nullcontext():
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
        return mixed.transpose(1, 2).reshape(self._rows * self._length, -1)

    def before(self, layer: int, inputs: Tensor, count: int) -> Tensor:
        padded = F.pad(inputs.view(self._rows, self._length, -1), (0, 0, count, 0))
        shifted = [padded[:, i : i + self._length] for i in range(count)]
        return torch.stack(shifted, 2).flatten(0, 1)

    def recur(self, layer: int, rows: Tensor, delta: GatedDelta) -> Tensor:
        if self._order is None:
            chain = DraftTree.chain(torch.zeros(1, self._length, dtype=torch.int64, device=rows.device))
            self._order = WalkOrder.of(chain, delta.weight.shape[0])[0]
        texts = rows.view(self._rows, self._length, -1)
        return torch.cat([RecurrentStates().forward(0, layer, text, delta, self._order) for text in texts])

    def _mask(self, window: int | None, device: torch.device, *, always: bool = False) -> Tensor | None:
        """(T, T) True for visible tokens; None if all earlier ones are, unless ``always``."""
        if window is None or (abs(window) >= self._length and not always):
            return None
        if window not in self._masks:
            place = torch.arange(self._length, device=device)
            self._masks[window] = (place <= place[:, None]) & (place >= first_visible(window, place)[:, None])
        return self._masks[window]


class ViewAttention(SlotAttention):
    """Each node attends to the slots of its row's view and its ancestors, within the layer's window.

    Keys and values are gathered layer by layer, so the cost grows with the view, not with the context.
    """

    def _prepare(self, where: TreeSlots) -> None:
        assert where.view is not None
        tree, first, lengths, device = where.tree, where.first_node, where.lengths_B, where.lengths_B.device
        longest = max(where.view.counts)
        self._cache = where.cache
        self._slots = where.view.slots[..., :longest]
        counts = on_device(where.view.counts, device)
        self._is_seen = torch.arange(longest, device=device) < counts[:, None]
        self._in_tree, self._positions = tree.ancestors[:, first:], lengths[:, None] + tree.depths
        self._first = first
        self._places = lengths[:, None] + torch.arange(tree.num_nodes, device=device)
        self._row = torch.arange(where.first_row, where.first_row + tree.num_rows, device=device)[:, None]
        self._head = torch.arange(self._shape[2], device=device)
        self._mask: Tensor | None = None  # the same in all layers without a window

    def mix(self, layer: int, traits: HeadTraits, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(R, heads, D) each -> (padded R, num_heads * D)."""
        rows, nodes, kv_heads, groups = self._shape
        dim = q.shape[2]
        keys, values = self._slots_of(self._cache.data[:, :, :, :kv_heads], layer, traits, dim)
        row, fresh = self._cache.place(self._row, self._places[:, self._first :])
        if k.shape[1]:
            keys[row, :, fresh], values[row, :, fresh] = (self._fitted(x, kv_heads) for x in (k, v))
        seen = self._slots[:, layer if self._slots.shape[1] > 1 else 0]
        seen = torch.where(self._is_seen[:, None], seen, 0).expand(-1, kv_heads, -1).long()
        index = torch.cat([seen, self._places[:, None].expand(-1, kv_heads, -1)], 2)
        row, index = self._cache.place(self._row[:, :, None], index)
        at = row, self._head[None, :, None], index
        folded = self._folded(q).permute(0, 2, 1, 3, 4).reshape(rows, kv_heads, nodes * groups, dim)
        mask = self._visible(self._windows[layer], seen)
        mixed = attend(folded, keys[at], values[at], mask, self._scale, traits)
        mixed = mixed.view(rows, kv_heads, nodes, groups, dim).permute(0, 2, 1, 3, 4).reshape(rows * nodes, -1)
        return F.pad(mixed, (0, 0, 0, self._rows_out - len(mixed)))

    def _visible(self, window: int | None, seen: Tensor) -> Tensor:
        """(B, K or 1, N * groups, M + N) True for visible slots; ``seen``: (B, K, M)."""
        if window is None and self._mask is not None:
            return self._mask
        nodes, groups = self._shape[1], self._shape[3]
        committed = self._is_seen[:, None, None].expand(-1, 1, nodes, -1)
        in_tree = self._in_tree[:, None]
        if window is not None:
            lowest = first_visible(window, self._positions[:, None, self._first :, None])
            committed = committed & (seen[:, :, None] >= lowest)
            in_tree = in_tree & (self._positions[:, None, None] >= lowest)
        in_tree = in_tree.expand(-1, committed.shape[1], -1, -1)
        mask = torch.cat([committed, in_tree], 3).repeat_interleave(groups, dim=2)
        if window is None:
            self._mask = mask
        return mask


class WatchAttention(SlotAttention):
    """Attention of the last tokens of one row, whose keys and values are in their slots already: writes no slots.

    Adds the attention weights of each earlier slot to ``where.watched`` (L, K, S).
    """

    def _prepare(self, where: TreeSlots) -> None:
        assert where.watched is not None
        self._watched, self._start, nodes = where.watched, where.watched.shape[2], where.tree.num_nodes
        slots = torch.arange(self._start + nodes, device=where.cache.data.device)
        self._kv = where.cache.data[:, :, :, : self._shape[2]]
        self._at = where.cache.place(torch.full_like(slots, where.first_row), slots)
        self._slots, self._own = slots, slots[self._start :, None].repeat_interleave(self._shape[3], dim=0)

    def mix(self, layer: int, traits: HeadTraits, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(R, heads, D) each -> (padded R, num_heads * D); k and v equal the slots' content."""
        _, nodes, kv_heads, groups = self._shape
        dim = q.shape[2]
        slots = self._slots_of(self._kv, layer, traits, dim)
        keys, values = (x[self._at[0], :, self._at[1]].transpose(0, 1) for x in slots)
        folded = self._folded(q)[0].transpose(0, 1).reshape(kv_heads, nodes * groups, dim)
        scores = (folded @ keys.transpose(1, 2)).mul_(self._scale if traits.scale is None else traits.scale)
        if traits.cap:
            scores = (scores / traits.cap).tanh_().mul_(traits.cap)
        window = self._windows[layer]
        hidden = self._slots > self._own
        if window is not None:
            hidden |= self._slots < first_visible(window, self._own)
        scores = scores.masked_fill_(hidden, -torch.inf)
        if traits.sinks is not None:
            sinks = traits.sinks.view(kv_heads, 1, groups).expand(-1, nodes, -1).reshape(kv_heads, -1, 1)
            scores = torch.cat([scores, sinks.to(scores.dtype)], -1)
        weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))[..., : len(self._slots)]
        self._watched[layer] += weights[..., : self._start].sum(1)
        mixed = (weights.to(q.dtype) @ values).view(kv_heads, nodes, groups * dim).transpose(0, 1)
        return F.pad(mixed.reshape(nodes, -1), (0, 0, 0, self._rows_out - nodes))


def attention_over(where: TreeSlots, *, is_plain: bool = True) -> type[SlotAttention]:
    """The class of attention for these slots; ``is_plain``: see ``HeadTraits``."""
    if where.watched is not None:
        return WatchAttention
    if where.view is not None:
        return ViewAttention
    data = where.cache.data
    if is_plain and gpu.attends(data.device, data.dtype, data.shape[5]):
        return FusedTreeAttention
    return TreeAttention
