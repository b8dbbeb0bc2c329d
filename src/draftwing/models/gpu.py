"""Triton kernels for GPUs: what a layer does between its matrix products, in one launch each.

PyTorch needs twenty launches there, and each takes longer than its work on a handful of rows.

Attention works on tiles of 16 queries and on splits of ``SPLIT`` slots that begin at fixed places, and merges splits in
their order. So the bits of a node do not depend on the other nodes and rows, nor on the width of a recording.

Shape suffixes: B rows, N nodes that are run, T nodes of the trees, R = B * N, H query heads, K KV heads, D head
dimension, S slots, P splits.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs comes without it
    triton = None

SPLIT = 256  # slots that one program reads; more programs than one for a long row, to fill the GPU
_BLOCK = 64  # slots read at once: a page
_TILE, _LARGE_TILE = 16, 64  # queries of a program; large ones read a prompt's slots less often
_MANY = 1024  # queries of a KV head from which tiles are large: those of a prompt
_COLUMNS = 1024  # channels of a program of ``silu_mul``


def is_usable(x: Tensor) -> bool:
    """True if the kernels take such a tensor; they have no gradients."""
    return not torch.is_grad_enabled() and _take(x.device, x.dtype)


def attends(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """True if the kernels can attend over slots of this kind."""
    return _take(device, dtype) and 16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0


def _take(device: torch.device, dtype: torch.dtype) -> bool:
    if triton is None or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)


def silu_mul(gate_up: Tensor) -> Tensor:
    """(R, 2 * I), the gate first -> silu(gate) * up (R, I)."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _silu_mul[rows, triton.cdiv(width, _COLUMNS)](gate_up.contiguous(), out, width, COLUMNS=_COLUMNS)
    return out


def add_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(..., H) -> x + added, or x itself, and its RMSNorm."""
    width = x.shape[-1]
    rows, x = x.numel() // width, x.contiguous()
    total, normed = x if added is None else torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        x, x if added is None else added, weight, total, normed, width, eps,
        BLOCK=block, ADDS=added is not None, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return total, normed


def write_heads(
    qkv: Tensor,
    cis: Tensor,
    cache: Tensor,
    places: tuple[Tensor, Tensor, Tensor | None],
    first_node: int,
    heads: tuple[int, int],
    norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    """Norm and rotate queries and keys, and write keys and values into the nodes' slots.

    Args:
        qkv: (R, (H + 2 * K) * D), queries first.
        cis: (R, rotary_dim / 2, 2) float32, cosine and sine of each pair.
        cache: (2, B, K, S, D) of the layer, or (2, 1, K, S, D) in pages.
        places: (B,) int64 the cache rows, (B,) int64 committed tokens, and the int32 page table or None.
        heads: H and K.
        norms: weights (D,) of the queries' and the keys' norm, and their eps.

    Returns:
        (R, H, D) the queries. A rotated pair is stored side by side, as in ``attention.rotate``.
    """
    (num_heads, num_kv_heads), dim = heads, cache.shape[4]
    rows, lengths, table = places
    nodes = qkv.shape[0] // len(rows)
    queries = qkv.new_empty(qkv.shape[0], num_heads, dim)
    q_weight, k_weight, eps = (qkv, qkv, 0.0) if norms is None else norms
    _write_heads[qkv.shape[0], num_heads + 2 * num_kv_heads](
        qkv, cis, queries, cache, rows, lengths, rows if table is None else table, q_weight, k_weight, eps,
        nodes, first_node, cache.shape[3] // _BLOCK - 1, *_strides(cache, table),
        HEADS=num_heads, KV=num_kv_heads, DIM=dim, HALF=cis.shape[1], PAGE=_BLOCK, HAS_NORM=norms is not None,
        IS_PAGED=table is not None, num_warps=1,
    )  # fmt: skip
    return queries


def tree_attention(
    queries: Tensor,
    cache: Tensor,
    places: tuple[Tensor, Tensor, Tensor | None],
    ancestors: Tensor | None,
    depths: Tensor | None,
    first_node: int,
    num_nodes: int,
    width: int,
    window: int | None,
    scale: float,
) -> Tensor:
    """Attention (R, H * D) of each node to its row's committed slots and its ancestors, within the window.

    Args:
        queries: (R, H, D).
        cache, places, first_node: see ``write_heads``.
        ancestors: (B, T, T) bool, or None for chains.
        depths: (B, T) int64 for windows over trees.
        num_nodes: T.
        width: slots that the longest row may have, its tree included.
    """
    rows, lengths, table = places
    total, num_heads, dim = queries.shape
    nodes, num_kv_heads = total // len(rows), cache.shape[2]
    groups, splits = num_heads // num_kv_heads, -(-width // SPLIT)
    out = queries.new_empty(total, num_heads * dim)
    is_split = splits > 1
    parts = torch.empty(splits if is_split else 0, total * num_heads, dim + 2, device=out.device)
    is_large = nodes * groups >= _MANY and queries.dtype != torch.float32  # whose large tiles take shared memory
    tile = _LARGE_TILE if is_large else _TILE
    _attend[triton.cdiv(nodes * groups, tile), len(rows) * num_kv_heads, splits](
        queries, cache, out, parts, rows, lengths, rows if table is None else table,
        out if ancestors is None else ancestors.contiguous().view(torch.uint8), lengths if depths is None else depths,
        scale * 1.4426950408889634, window or 0, nodes, first_node, num_nodes, total * num_heads,
        *_strides(cache, table),
        KV=num_kv_heads, GROUPS=groups, DIM=dim, TILE=tile, BLOCK=_BLOCK, SPLIT=SPLIT, IS_LINE=ancestors is None,
        HAS_WINDOW=window is not None, IS_PAGED=table is not None, IS_SPLIT=is_split,
        num_warps=4,
    )  # fmt: skip
    if is_split:
        _merge[(total * num_heads,)](
            parts, out, lengths, nodes * num_heads, num_nodes, total * num_heads, DIM=dim, SPLIT=SPLIT, num_warps=1
        )
    return out


def _strides(cache: Tensor, table: Tensor | None) -> tuple[int, int, int]:
    """From keys to values, from row to row (of the page table, if there is one), and from head to head."""
    return cache.stride(0), cache.stride(1) if table is None else table.stride(0), cache.stride(2)


if triton is not None:
    # Numbers that change with the size of a tree: Triton would compile a kernel for 1 and for multiples of 16.
    _NUMBERS = ["nodes", "first_node", "last_page", "window", "num_nodes", "num_queries", "queries_per_row"]

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _silu_mul(gate_up, out, width, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
        row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        gate = tl.load(gate_up + row * 2 * width + column, mask=inside).to(tl.float32)
        up = tl.load(gate_up + row * 2 * width + width + column, mask=inside)
        gated = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
        tl.store(out + row * width + column, (gated.to(tl.float32) * up.to(tl.float32)).to(up.dtype), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _add_norm(  # type: ignore[no-untyped-def]
        x, added, weight, total, normed, width, eps, BLOCK: tl.constexpr, ADDS: tl.constexpr
    ):  # fmt: skip
        start, channel = tl.program_id(0).to(tl.int64) * width, tl.arange(0, BLOCK)
        inside = channel < width
        value = tl.load(x + start + channel, mask=inside, other=0.0)
        if ADDS:
            value = value + tl.load(added + start + channel, mask=inside, other=0.0)
            tl.store(total + start + channel, value, mask=inside)
        wide = value.to(tl.float32)
        unit = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
        scale = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
        tl.store(normed + start + channel, (wide * unit * scale).to(value.dtype), mask=inside)

    @triton.jit(do_not_specialize=_NUMBERS)  # type: ignore[untyped-decorator,unused-ignore]
    def _write_heads(  # type: ignore[no-untyped-def]
        qkv, cis, queries, cache, rows, lengths, table, q_weight, k_weight, eps,
        nodes, first_node, last_page, to_values, to_row, to_head,
        HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
        HAS_NORM: tl.constexpr, IS_PAGED: tl.constexpr,
    ):  # fmt: skip
        entry, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        source = qkv + (entry * (HEADS + 2 * KV) + head) * DIM
        channel = tl.arange(0, DIM)
        out = tl.load(source + channel)
        if head < HEADS + KV:
            # Channel 2i is the real part of pair i and 2i + 1 the imaginary one; they come half a rotation apart.
            is_rotated, pair = channel < 2 * HALF, channel // 2
            real = tl.load(source + pair, mask=is_rotated, other=0.0)
            imaginary = tl.load(source + HALF + pair, mask=is_rotated, other=0.0)
            if HAS_NORM:
                wide = out.to(tl.float32)
                unit = tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)
                weight = q_weight if head < HEADS else k_weight
                out = (wide * unit).to(out.dtype) * tl.load(weight + channel)
                of_real = tl.load(weight + pair, mask=is_rotated, other=0.0)
                real = (real.to(tl.float32) * unit).to(out.dtype) * of_real
                of_imaginary = tl.load(weight + HALF + pair, mask=is_rotated, other=0.0)
                imaginary = (imaginary.to(tl.float32) * unit).to(out.dtype) * of_imaginary
            cosine = tl.load(cis + (entry * HALF + pair) * 2, mask=is_rotated, other=0.0)
            sine = tl.load(cis + (entry * HALF + pair) * 2 + 1, mask=is_rotated, other=0.0)
            a, b = real.to(tl.float32), imaginary.to(tl.float32)
            rotated = tl.where(channel % 2 == 0, a * cosine - b * sine, a * sine + b * cosine)
            out = tl.where(is_rotated, rotated.to(out.dtype), out)
        if head < HEADS:
            tl.store(queries + (entry * HEADS + head) * DIM + channel, out)
        else:
            batch = entry // nodes
            row = tl.load(rows + batch)
            slot = tl.load(lengths + batch) + first_node + entry % nodes
            if IS_PAGED:
                page = tl.load(table + row * to_row + slot // PAGE).to(tl.int64)
                # The first page stays zeros; what only fills a recording is written to the last one.
                page = tl.where(page == 0, last_page, page)
                base = (page * PAGE + slot % PAGE) * DIM
            else:
                base = row * to_row + slot * DIM
            kv_head = (head - HEADS) % KV
            base += kv_head * to_head
            if head >= HEADS + KV:
                base += to_values
            tl.store(cache + base + channel, out)

    @triton.jit(do_not_specialize=_NUMBERS)  # type: ignore[untyped-decorator,unused-ignore]
    def _attend(  # type: ignore[no-untyped-def]
        queries, cache, out, parts, rows, lengths, table, ancestors, depths,
        scale, window, nodes, first_node, num_nodes, num_queries, to_values, to_row, to_head,
        KV: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
        SPLIT: tl.constexpr, IS_LINE: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_PAGED: tl.constexpr,
        IS_SPLIT: tl.constexpr,
    ):  # fmt: skip
        batch, kv_head, split = (tl.program_id(1) // KV).to(tl.int64), tl.program_id(1) % KV, tl.program_id(2)
        length, row = tl.load(lengths + batch), tl.load(rows + batch)
        start = (split * SPLIT).to(tl.int64)
        end = tl.minimum(length + num_nodes, start + SPLIT)
        if start < end:
            folded = tl.program_id(0) * TILE + tl.arange(0, TILE)
            node = folded // GROUPS
            is_query, channel = node < nodes, tl.arange(0, DIM)
            query = (batch * nodes + node) * (KV * GROUPS) + kv_head * GROUPS + folded % GROUPS
            q = tl.load(queries + query[:, None] * DIM + channel[None, :], mask=is_query[:, None], other=0.0)
            place_of_query = first_node + node
            if HAS_WINDOW:
                if IS_LINE:
                    position = length + place_of_query
                else:
                    own = tl.load(depths + batch * num_nodes + place_of_query, mask=is_query, other=0)
                    position = length + own
                start = tl.maximum(start, tl.maximum(length - window + 1, 0) // BLOCK * BLOCK)
            top = tl.full([TILE], float("-inf"), tl.float32)
            total = tl.zeros([TILE], tl.float32)
            mixed = tl.zeros([TILE, DIM], tl.float32)
            keys = cache + kv_head * to_head
            if not IS_PAGED:
                keys += row * to_row
            for block in range(start, end, BLOCK):
                slot = block + tl.arange(0, BLOCK)
                exists = slot < length + num_nodes
                if IS_PAGED:
                    page = tl.load(table + row * to_row + block // BLOCK).to(tl.int64)
                    where = page * BLOCK + tl.arange(0, BLOCK)
                else:
                    where = slot.to(tl.int64)
                at = keys + where[:, None] * DIM + channel[None, :]
                k = tl.load(at, mask=exists[:, None], other=0.0)
                scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
                place = slot - length
                if IS_LINE:
                    visible = place[None, :] <= place_of_query[:, None]
                else:
                    is_node = (place >= 0) & exists
                    of_query = ancestors + (batch * num_nodes + place_of_query) * num_nodes
                    is_above = tl.load(
                        of_query[:, None] + place[None, :], mask=is_node[None, :] & is_query[:, None], other=0
                    )
                    visible = (place[None, :] < 0) | (is_above != 0)
                if HAS_WINDOW:
                    if IS_LINE:
                        key_position = slot
                    else:
                        below = tl.load(depths + batch * num_nodes + place, mask=is_node, other=0)
                        key_position = tl.where(place < 0, slot, length + below)
                    visible = visible & (key_position[None, :] > position[:, None] - window)
                scores = tl.where(visible & exists[None, :], scores, float("-inf"))
                new_top = tl.maximum(top, tl.max(scores, 1))
                base = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing is visible yet
                weights = tl.exp2(scores - base[:, None])
                keep = tl.exp2(top - base)
                total = total * keep + tl.sum(weights, 1)
                v = tl.load(at + to_values, mask=exists[:, None], other=0.0)
                mixed = mixed * keep[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
                top = new_top
            if IS_SPLIT:
                part = parts + (split.to(tl.int64) * num_queries + query) * (DIM + 2)
                tl.store(part[:, None] + channel[None, :], mixed, mask=is_query[:, None])
                tl.store(part + DIM, top, mask=is_query)
                tl.store(part + DIM + 1, total, mask=is_query)
            else:
                found = (mixed / total[:, None]).to(out.dtype.element_ty)
                tl.store(out + query[:, None] * DIM + channel[None, :], found, mask=is_query[:, None])

    @triton.jit(do_not_specialize=_NUMBERS)  # type: ignore[untyped-decorator,unused-ignore]
    def _merge(  # type: ignore[no-untyped-def]
        parts, out, lengths, queries_per_row, num_nodes, num_queries, DIM: tl.constexpr, SPLIT: tl.constexpr
    ):  # fmt: skip
        query, channel = tl.program_id(0).to(tl.int64), tl.arange(0, DIM)
        length = tl.load(lengths + query // queries_per_row)
        top, total = float("-inf"), 0.0
        mixed = tl.zeros([DIM], tl.float32)
        for split in range(tl.cdiv(length + num_nodes, SPLIT)):
            part = parts + (split * num_queries + query) * (DIM + 2)
            found = tl.load(part + DIM)
            new_top = tl.maximum(top, found)
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            keep, weight = tl.exp2(top - base), tl.exp2(found - base)
            total = total * keep + tl.load(part + DIM + 1) * weight
            mixed = mixed * keep + tl.load(part + channel) * weight
            top = new_top
        tl.store(out + query * DIM + channel, (mixed / total).to(out.dtype.element_ty))
