"""Matrices learn in the units of what they read."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from draftwing.train.trainer import LEAST_SIZE, in_units, input_sizes

SIZES = torch.tensor([1.0, 64.0, 0.125, 4.0])


class Net(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first = nn.Parameter(first.clone())
        self.second = nn.Parameter(torch.eye(3, 5))
        self.unused = nn.Parameter(torch.ones(2, 2))
        self.offset = nn.Parameter(torch.zeros(5))

    def forward(self, x):
        return F.linear(torch.tanh(F.linear(x, self.first, self.offset)), self.second)


def inputs():
    return torch.randn(400, 4, generator=torch.Generator().manual_seed(0))


def test_sizes_are_those_of_the_inputs_to_the_nearest_power_of_two():
    net = Net(torch.randn(5, 4))
    found = input_sizes(net, lambda: net(torch.stack([inputs() * SIZES * 1.1] * 2)))
    assert set(found) == {"first", "second"}
    assert torch.equal(found["first"], SIZES)
    assert found["second"].shape == (5,)
    silent = input_sizes(net, lambda: net(torch.zeros(3, 4)))
    assert torch.equal(silent["first"], torch.full((4,), LEAST_SIZE))


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, "muon"])
def test_a_step_is_that_of_a_matrix_that_reads_inputs_of_size_one(make):
    """To the bit: loud channels against the same inputs scaled down, and the matrix scaled up."""
    start = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    loud, even = Net(start / SIZES), Net(start)
    for net, scale, sizes in ((loud, SIZES, {"first": SIZES}), (even, 1.0, {})):
        optimizer = torch.optim.Muon([net.first], lr=0.1) if make == "muon" else make([net.first], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(inputs() * scale).square().sum().backward()
            with in_units(net, sizes):
                optimizer.step()
    assert torch.equal(loud.first * SIZES, even.first)
    assert not torch.equal(even.first, start)


def test_weights_are_themselves_again_when_a_step_fails():
    net = Net(torch.randn(5, 4))
    before = net.first.detach().clone()
    with pytest.raises(KeyboardInterrupt), in_units(net, {"first": SIZES}):
        raise KeyboardInterrupt
    assert torch.equal(net.first, before)
