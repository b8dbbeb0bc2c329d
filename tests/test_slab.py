"""Memory that is handed out: to one at a time, again never while somebody looks at it."""

import gc
import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch

from draftwing.cpu.library import CACHE_LINE_BYTES, HUGE_PAGE_BYTES, SHARED_BYTES, HugePageArena
from draftwing.cpu.runner import MAX_KEPT_BLOCKS, MAX_OVERSIZE, BufferPool


def test_memory_is_handed_out_again_once_nobody_looks_at_it():
    reused = BufferPool()
    first, address = reused.take(64, 100)
    assert first.data_ptr() == address
    part = first.as_strided((1, 3, 100), (300, 100, 1))[0, 1]
    part.fill_(7.0)
    del first
    second, other = reused.take(64, 100)  # a view of a view still looks at the first
    second.zero_()
    assert other != address
    assert (part == 7.0).all()
    del part
    third, again = reused.take(60, 100)
    assert again == address
    assert third.shape == (60, 100)
    assert third.dtype == torch.float32


def test_blocks_are_few_and_fit():
    reused = BufferPool()
    held = [reused.take(8, 8)[0] for _ in range(2 * MAX_KEPT_BLOCKS)]
    for place, each in enumerate(held):
        each.fill_(place)
    assert [each[0, 0].item() for each in held] == list(range(2 * MAX_KEPT_BLOCKS))
    assert len(reused._blocks) == MAX_KEPT_BLOCKS
    held.clear()
    block = max(len(each[0]) for each in reused._blocks)
    assert reused.take(1, block // MAX_OVERSIZE - 1)[0].numel() < block // MAX_OVERSIZE  # a block of its own
    assert min(len(each[0]) for each in reused._blocks) < block


def test_matrices_lie_side_by_side_in_large_pages():
    told: list[tuple[int, int]] = []
    large = HugePageArena(lambda address, size: told.append((address, size)))
    kept = [
        large.take(3, 7, dtype=torch.int16),
        large.take(5, dtype=torch.float32),
        large.take(SHARED_BYTES, dtype=torch.int8),
    ]
    kept.append(large.take(2, 2, dtype=torch.int32))
    for place, each in enumerate(kept):
        each.fill_(place + 1)
    assert [(each == place + 1).all().item() for place, each in enumerate(kept)] == [True] * 4
    assert [tuple(each.shape) for each in kept] == [(3, 7), (5,), (SHARED_BYTES,), (2, 2)]
    (shared, size), (own, own_size) = told
    assert (size, own_size) == (SHARED_BYTES, SHARED_BYTES)
    assert shared % HUGE_PAGE_BYTES == own % HUGE_PAGE_BYTES == 0
    assert [each.data_ptr() for each in kept] == [shared, shared + CACHE_LINE_BYTES, own, shared + 2 * CACHE_LINE_BYTES]


def test_pages_go_with_their_last_tensor():
    told: list[tuple[int, int]] = []
    large = HugePageArena(lambda address, size: told.append((address, size)))
    first, view = large.take(4, dtype=torch.float32), large.take(2, 4, dtype=torch.float32)[1]
    pages = weakref.ref(large._pages())
    view.fill_(7.0)
    del first
    large.take(4, dtype=torch.float32)
    assert len(told) == 1  # a view of what is left holds them
    assert (view == 7.0).all()
    del view
    gc.collect()
    assert pages() is None
    large.take(4, dtype=torch.float32)
    assert len(told) == 2


def test_threads_get_memory_of_their_own():
    large = HugePageArena(lambda *_: None)
    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(lambda _: large.take(1000, dtype=torch.int32), range(400)))
    places = sorted(each.data_ptr() for each in taken)
    assert all(after - before >= 4000 for before, after in itertools.pairwise(places))
