"""Prepacked linears: right, and a row's bits are its own."""

import pytest
import torch
import torch.nn.functional as F

from draftwing.model.linear import Linear, can_prepack

SHAPES = [(1792, 384), (384, 896), (96, 64), (61, 32)]


def packed(num_out, num_in, dtype=torch.float32, bias=False):
    torch.manual_seed(num_out)
    weight, offset = torch.randn(num_out, num_in, dtype=dtype), torch.randn(num_out, dtype=dtype) if bias else None
    linear = Linear(weight.clone(), offset)
    if not can_prepack(weight):
        pytest.skip("oneDNN does not take this here")
    linear.prepack()
    assert linear.weight.numel() == 0  # the plain copy is gone
    return linear, weight, offset


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_it_is_the_product(shape, bias):
    linear, weight, offset = packed(*shape, bias=bias)
    x, residual = torch.randn(5, shape[1]), torch.randn(5, shape[0])
    wanted = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    assert torch.allclose(linear(x).double(), wanted, atol=1e-3)
    assert torch.allclose(linear(x, residual).double(), wanted + residual, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_row_has_the_same_bits_whatever_is_beside_it(shape, dtype):
    linear, *_ = packed(*shape, dtype=dtype)
    x, residual = torch.randn(64, shape[1], dtype=dtype), torch.randn(64, shape[0], dtype=dtype)
    alone, added = linear(x), linear(x, residual)
    for rows in (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 32, 33, 63):
        assert torch.equal(linear(x[:rows].clone()), alone[:rows])
        assert torch.equal(linear(x[:rows].clone(), residual[:rows].clone()), added[:rows])
