"""The Triton kernels compute what PyTorch computes, on a GPU or in Triton's interpreter.

Without a GPU: ``pip install triton``, and ``TRITON_INTERPRET=1 pytest tests/test_gpu_kernels.py``.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch

from draftwing.models import gpu
from draftwing.models.attention import FusedTreeAttention, TreeAttention, TreeSlots
from draftwing.models.cache import KVCache
from draftwing.models.layers import RMSNorm
from draftwing.models.paged import PageTable
from draftwing.tree import DraftTree

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
EXACT = {"rtol": 1e-5, "atol": 2e-6}

pytestmark = pytest.mark.skipif(
    gpu.triton is None or not (HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs a GPU, or Triton with TRITON_INTERPRET=1",
)


class Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None


def chains(rows: int, nodes: int) -> DraftTree:
    return DraftTree.chain(torch.arange(nodes, device=DEVICE).repeat(rows, 1) + 5)


def binary_trees(rows: int, nodes: int) -> DraftTree:
    parents = torch.tensor([-1, *[(node - 1) // 2 for node in range(1, nodes)]], device=DEVICE)
    return DraftTree(torch.arange(nodes, device=DEVICE).repeat(rows, 1) + 5, parents.repeat(rows, 1))


def filled_cache(rows: int, slots: int, heads: Heads, seed: int = 0) -> KVCache:
    cache = KVCache(1, heads.num_kv_heads, heads.head_dim, torch.float32, DEVICE)
    cache.reserve(rows, slots)
    generator = torch.Generator().manual_seed(seed)
    cache.data.copy_(torch.randn(cache.data.shape, generator=generator))
    return cache


def attend(kind, cache, tree, lengths, heads, *, first_node=0, first_row=0, window=None, half=None, qkv=None):
    """The attention's result (R, H * D), of random queries, keys and values (R, (H + 2 * K) * D)."""
    generator = torch.Generator().manual_seed(1)
    nodes = tree.num_nodes - first_node
    total, half = tree.num_rows * nodes, half or heads.head_dim // 2
    angles = torch.randn(total, 1, half, generator=generator)
    cis = torch.polar(torch.ones_like(angles), angles).to(DEVICE)
    if qkv is None:
        width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        qkv = torch.randn(total, width, generator=generator).to(DEVICE)
    on_host = torch.tensor(lengths)
    strided = torch.stack([on_host, on_host + 1000], 1).to(DEVICE)[:, 0]  # as in a recorded draft
    slots = -(-(max(lengths) + tree.num_nodes) // 64) * 64
    where = TreeSlots(cache, tree, strided, first_row, first_node, slots)
    with torch.inference_mode():
        return kind(cis, where, [window], (heads.num_heads, heads.num_kv_heads), total)(0, qkv, heads)


CASES = {
    "one": (chains(1, 1), [10], Heads(6, 2, 32), {}),
    "chains": (chains(2, 5), [10, 70], Heads(6, 2, 32), {}),
    "window": (chains(2, 5), [10, 300], Heads(2, 2, 32), {"first_node": 2, "window": 40}),
    "trees": (binary_trees(2, 9), [0, 270], Heads(4, 1, 16), {}),
    "later level": (binary_trees(2, 9), [3, 270], Heads(4, 2, 32), {"first_node": 3, "first_row": 1, "half": 8}),
    "window over trees": (binary_trees(2, 9), [3, 130], Heads(4, 2, 32), {"window": 20}),
    "several splits": (binary_trees(1, 40), [600], Heads(3, 1, 64), {}),
}


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_attention(name, normed):
    tree, lengths, heads, options = CASES[name]
    if normed:
        weights = torch.rand(2, heads.head_dim, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        heads = heads._replace(q_norm=RMSNorm(weights[0], 1e-5), k_norm=RMSNorm(weights[1], 1e-5))
    rows, slots = tree.num_rows + options.get("first_row", 0), max(lengths) + tree.num_nodes + 1
    caches = [filled_cache(rows, slots, heads) for _ in range(2)]
    kinds = (TreeAttention, FusedTreeAttention)
    wanted, found = (attend(*each, tree, lengths, heads, **options) for each in zip(kinds, caches, strict=True))
    torch.testing.assert_close(found, wanted, **EXACT)
    torch.testing.assert_close(caches[1].data, caches[0].data, **EXACT)


def test_attention_over_pages():
    heads, tree, lengths = Heads(4, 2, 32), binary_trees(2, 7), [100, 5]
    results = []
    for kind in (TreeAttention, FusedTreeAttention):
        table = PageTable(num_rows=2, num_slots=256)
        cache = table.cache(1, heads.num_kv_heads, heads.head_dim, torch.float32, DEVICE)
        table.allocate(12 * cache.num_page_bytes)
        for row in range(2):
            table.attach(row, [])
            table.hold(row, [lengths[row]], tree.num_nodes)
        cache.data[..., 64:-64, :] = torch.randn(
            cache.data[..., 64:-64, :].shape, generator=torch.Generator().manual_seed(3)
        )
        results.append((attend(kind, cache, tree, lengths, heads), cache.data.clone()))
    torch.testing.assert_close(results[1], results[0], **EXACT)


def test_a_nodes_bits_do_not_depend_on_other_nodes_and_rows():
    heads, lengths = Heads(6, 2, 32), [70, 300]
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    qkv = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    kind = FusedTreeAttention
    together = attend(kind, filled_cache(2, 310, heads), chains(2, 5), lengths, heads, qkv=qkv.flatten(0, 1))
    alone = attend(kind, filled_cache(2, 310, heads), chains(1, 1), lengths[:1], heads, qkv=qkv[0, :1])
    assert torch.equal(alone[0], together[0])


@pytest.mark.parametrize("shape", [(5, 48), (3, 2, 32)])
def test_norms(shape):
    generator = torch.Generator().manual_seed(5)
    x, added = torch.randn(2, *shape, generator=generator).to(DEVICE)
    norm = RMSNorm(torch.rand(shape[-1], generator=generator).to(DEVICE), 1e-5)
    with torch.inference_mode():
        total, normed = gpu.add_norm(x, added, norm.weight, norm.eps)
        torch.testing.assert_close(total, x + added, **EXACT)
        wanted = torch.nn.functional.rms_norm(x + added, shape[-1:], norm.weight, norm.eps)
        torch.testing.assert_close(normed, wanted, **EXACT)
        torch.testing.assert_close(norm.forward(total), wanted, **EXACT)


def test_activation():
    both = torch.randn(5, 3000, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    with torch.inference_mode():
        found = gpu.silu_mul(both)
    torch.testing.assert_close(found, torch.nn.functional.silu(both[:, :1500]) * both[:, 1500:], **EXACT)


def test_training_does_without_them():
    x = torch.ones(2, 32, device=DEVICE, requires_grad=True)
    assert not gpu.is_usable(x)
    RMSNorm(torch.ones(32, device=DEVICE), 1e-5).forward(x).sum().backward()
    assert x.grad is not None
