"""Memory that is handed out again: never while somebody looks at it."""

import torch

from draftwing.run.kernel.slab import BLOCKS, LARGER, Reused


def test_memory_is_handed_out_again_once_nobody_looks_at_it():
    reused = Reused()
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
    reused = Reused()
    held = [reused.take(8, 8)[0] for _ in range(2 * BLOCKS)]
    for place, each in enumerate(held):
        each.fill_(place)
    assert [each[0, 0].item() for each in held] == list(range(2 * BLOCKS))
    assert len(reused._blocks) == BLOCKS
    held.clear()
    block = max(len(each[0]) for each in reused._blocks)
    assert reused.take(1, block // LARGER - 1)[0].numel() < block // LARGER  # a block of its own
    assert min(len(each[0]) for each in reused._blocks) < block
