"""Prepacked and quantised linears: right, and a row's bits are its own."""

import pytest
import torch
import torch.nn.functional as F

from conftest import refused
from draftwing.errors import ConfigError, UnsupportedError
from draftwing.model import linear as module
from draftwing.model.linear import Linear, can_prepack, check_weights

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


# --- int8 ------------------------------------------------------------------------------------------------------------

ODD = [
    (1, 1),
    (7, 5),
    (61, 33),
    (129, 1000),
    (515, 2049),
]  # threads share the work on the last
int8 = pytest.mark.skipif(not module._has_exact_int8(), reason="this CPU multiplies no 8-bit integers exactly")


def quantised(num_out, num_in, dtype=torch.float32, bias=False):
    torch.manual_seed(num_out)
    weight, offset = torch.randn(num_out, num_in, dtype=dtype), torch.randn(num_out, dtype=dtype) if bias else None
    linear = Linear(weight.clone(), offset)
    linear.quantise("int8")
    assert linear.weight.numel() == 0  # the float weight is gone
    assert (linear.quantised, linear.dtype, linear.num_bytes) == ("int8", dtype, num_out * (num_in + 4))
    return linear, weight, offset


def integer_product(x, weight):
    """What int8 means, in float64: the nearest of 255 levels between minus and plus the largest, and exact sums."""
    own = (weight.abs().amax(1) / 127).clamp_min(1e-30)
    largest = x.abs().amax(1, keepdim=True)
    levels = torch.floor(x / largest * 127 + 0.5)  # float32, as the kernel rounds
    return (levels.double() @ torch.round(weight / own[:, None]).double().T) * own.double() * largest.double() / 127


@int8
@pytest.mark.parametrize("shape", SHAPES + ODD)
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_int8_is_the_product_of_integers(shape, bias):
    linear, weight, offset = quantised(*shape, bias=bias)
    x, residual = torch.randn(5, shape[1]), torch.randn(5, shape[0])
    wanted = integer_product(x, weight) + (0 if offset is None else offset)
    # A number between two levels may go to either; one level of one number is far below what is allowed here.
    room = 1e-5 * (1 + wanted.abs().max()) + weight.abs().max() * x.abs().max() / 127 * (0 if shape[1] < 1000 else 1)
    assert (linear(x) - wanted).abs().max() <= room
    assert (linear(x, residual) - wanted - residual).abs().max() <= room


@int8
@pytest.mark.parametrize("shape", [*SHAPES, *ODD[2:]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_int8_is_near_the_float_product(shape, dtype):
    linear, weight, offset = quantised(*shape, dtype, bias=True)
    x, residual = torch.randn(16, shape[1], dtype=dtype), torch.randn(16, shape[0], dtype=dtype)
    wanted = x.double() @ weight.double().T + offset.double()
    for found, exact in ((linear(x), wanted), (linear(x, residual), wanted + residual.double())):
        assert found.dtype == dtype
        assert (found.double() - exact).norm() < 0.02 * exact.norm()


@int8
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES + ODD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_an_int8_row_has_the_same_bits_whatever_is_beside_it(shape, dtype, threads):
    linear, *_ = quantised(*shape, dtype=dtype, bias=True)
    x, residual = torch.randn(64, shape[1], dtype=dtype), torch.randn(64, shape[0], dtype=dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([linear(row[None]) for row in x])
        added = torch.cat([linear(row[None], more[None]) for row, more in zip(x, residual, strict=True)])
        for rows in range(1, 65):
            assert torch.equal(linear(x[:rows].clone()), alone[:rows])
            assert torch.equal(linear(x[:rows].clone(), residual[:rows].clone()), added[:rows])
        beside = x.clone()
        beside[1:] *= 1e6
        beside[5:9] = 0
        assert torch.equal(linear(beside)[0], alone[0])
    finally:
        torch.set_num_threads(before)


@int8
@torch.inference_mode()
def test_an_int8_row_of_zeros_is_zero():
    linear, _, offset = quantised(61, 33, bias=True)
    x = torch.randn(6, 33)
    x[2:5] = 0
    assert torch.equal(linear(x)[2:5], offset.expand(3, -1))
    bare = Linear(torch.zeros(7, 33))  # channels of zeros, too
    bare.quantise()
    assert torch.equal(bare(x), torch.zeros(6, 7))
    assert torch.equal(bare(x, torch.ones(6, 7)), torch.ones(6, 7))


@int8
@torch.inference_mode()
def test_int8_hides_no_number_that_is_none():
    linear, *_ = quantised(7, 5)
    for odd in (float("nan"), float("inf")):
        assert not linear(torch.tensor([[1.0, odd, 0.0, 2.0, 3.0]])).isfinite().any()


def test_what_cannot_be_quantised_is_refused(monkeypatch):
    cpu = torch.device("cpu")
    check_weights(None, torch.float16, torch.device("cuda"))
    with refused(ConfigError, "unknown weights 'int3'", "choose int8"):
        check_weights("int3", torch.float32, cpu)
    with refused(UnsupportedError, "weights='int8'", "cuda", "device='cpu'"):
        check_weights("int8", torch.float32, torch.device("cuda"))
    with refused(UnsupportedError, "weights='int8'", "found float64", "leave weights out"):
        Linear(torch.ones(2, 2, dtype=torch.float64)).quantise("int8")
    monkeypatch.setattr(module, "_has_exact_int8", lambda: True)
    with refused(UnsupportedError, "at most", "found 70000"):
        Linear(torch.ones(1, 70000)).quantise("int8")
    linear = Linear(torch.ones(2, 2))
    linear.prepack()
    if linear.weight.numel() == 0:
        with refused(ConfigError, "prepacked", "instead of prepacking"):
            linear.quantise("int8")
    monkeypatch.setattr(module, "_has_exact_int8", lambda: False)
    with refused(UnsupportedError, "weights='int8'", "VNNI", "leave weights out"):
        Linear(torch.ones(2, 2)).quantise("int8")
