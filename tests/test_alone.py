"""No step of a text shares the processors with PyTorch's own threads, which wait awake for more of what is large."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import draftwing as dw
from draftwing import torch_utils as alone
from draftwing.cpu.library import get_kernel
from draftwing.methods.net_drafter import PendingFeatures

GRAIN = 32768  # elements from which PyTorch splits its work


class OnlySmall(TorchDispatchMode):
    """Collects the operations that PyTorch would split."""

    def __init__(self):
        super().__init__()
        self.large = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
        is_work = not func.is_view and "empty" not in func.name()
        if is_work and max((each.numel() for each in tensors), default=0) >= GRAIN:
            self.large.add(func.name())
        return result


@pytest.fixture(scope="module")
def lms():
    if get_kernel() is None:
        pytest.skip("without the kernel PyTorch computes everything, with its threads")
    lm = dw.load(draft="eagle3")
    engine = lm.engine(kv_memory=1 << 26)  # the angles of all positions are computed once
    engine.submit([1, 2, 3])
    engine.run()
    return {"auto": lm, "fixed": dw.LM(lm.target, lm.tokenizer, lm.new_drafter, budget=dw.Budget(3))}


@pytest.mark.parametrize(
    ("name", "temperature", "memory"),
    [("auto", 0.0, None), ("auto", 1.0, 1 << 26), ("fixed", 0.0, 1 << 26), ("fixed", 1.0, None)],
)
def test_a_text_leaves_nothing_to_the_threads_of_pytorch(lms, name, temperature, memory):
    """Prompts in one piece and in several; the second text finds what the first one left in its row or its pages."""
    engine = lms[name].engine(max_batch=1, kv_memory=memory)
    with OnlySmall() as seen:
        for length in (100, 600):
            engine.submit([7 * at % 2000 for at in range(length)], dw.Sampling(temperature=temperature, max_tokens=40))
        engine.run()
    assert not seen.large


@pytest.mark.parametrize("counts", [(300,), (300, 200), (0, 300)])
def test_what_waits_to_be_read_is_put_together_by_one_thread(counts):
    """Rows that came one after another, each with features of its prompt and of a step."""
    unread, features = PendingFeatures(), torch.arange(len(counts) * 301 * 128.0).view(len(counts), 301, 128)
    with OnlySmall() as seen:
        for row, count in enumerate(counts):
            unread.admit(features[row : row + 1, :count], counts[:row])
        unread.add(features[:, 300:], list(counts))
        found = unread.joined([1 + count for count in counts])
    assert not seen.large
    assert found.shape == (len(counts), 1 + max(counts), 128)
    for row, count in enumerate(counts):
        assert torch.equal(found[row, :count], features[row, :count])
        assert torch.equal(found[row, count], features[row, 300])
        assert found[row, count + 1 :].eq(0).all()


def test_what_is_large_is_seen():
    with OnlySmall() as seen:
        torch.zeros(GRAIN).add_(1)
        torch.empty(2 * GRAIN).view(2, -1)
    assert seen.large == {"aten::zeros", "aten::add_.Tensor"}


@pytest.mark.parametrize("most", [0, alone.MAX_COPY_BYTES])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_copies_are_those_of_pytorch(monkeypatch, dtype, most):
    monkeypatch.setattr(alone, "MAX_COPY_BYTES", most)
    draw = torch.Generator().manual_seed(3)
    pieces = [torch.randint(-9, 9, (2, count, 3), generator=draw).to(dtype) for count in (4, 1, 2)]
    for dim in (0, 1):
        alike = [piece[:, :1] for piece in pieces] if dim == 0 else pieces
        found = alone.joined(alike, dim)
        assert found.dtype == dtype
        assert torch.equal(found, torch.cat(alike, dim))
    assert alone.joined(pieces[:1], 1) is pieces[0]
    whole = torch.full((2, 9, 3), 5).to(dtype)
    alone.put(whole[:, 2:6], pieces[0])
    alone.clear(whole[1, 7:])
    assert torch.equal(whole[:, 2:6], pieces[0])
    assert whole[1, 7:].eq(0).all()
    assert whole[:, :2].eq(5).all()
    assert whole[0, 6:].eq(5).all()
    assert torch.equal(alone.filled((2, 3), -torch.inf), torch.full((2, 3), -torch.inf))
