"""Prepacked and quantised matrices: correct, and a row's bits do not depend on other rows."""

import pytest
import torch
import torch.nn.functional as F

from conftest import refused
from draftwing.errors import ConfigError, UnsupportedError
from draftwing.models import linear as linear_module
from draftwing.models.linear import Linear, can_prepack, check_quantize

SHAPES = [(1792, 384), (384, 896), (96, 64), (61, 32)]


def matrix(num_out, num_in, dtype=torch.float32, bias=False):
    """A plain matrix, its weight and its bias."""
    torch.manual_seed(num_out)
    weight, offset = torch.randn(num_out, num_in, dtype=dtype), torch.randn(num_out, dtype=dtype) if bias else None
    return Linear(weight.clone(), offset), weight, offset


def packed(*args, **options):
    linear, weight, offset = matrix(*args, **options)
    if not can_prepack(weight):
        pytest.skip("oneDNN does not take this here")
    linear.prepack()
    assert linear.weight.numel() == 0  # the plain copy is dropped
    return linear, weight, offset


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_it_is_the_product(shape, bias):
    linear, weight, offset = packed(*shape, bias=bias)
    x, residual = torch.randn(5, shape[1]), torch.randn(5, shape[0])
    expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    assert torch.allclose(linear(x).double(), expected, atol=1e-3)
    assert torch.allclose(linear(x, residual).double(), expected + residual, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_a_rows_bits_do_not_depend_on_other_rows(shape, dtype):
    linear, *_ = packed(*shape, dtype=dtype)
    x, residual = torch.randn(64, shape[1], dtype=dtype), torch.randn(64, shape[0], dtype=dtype)
    alone, added = linear(x), linear(x, residual)
    for rows in (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 32, 33, 63):
        assert torch.equal(linear(x[:rows].clone()), alone[:rows])
        assert torch.equal(linear(x[:rows].clone(), residual[:rows].clone()), added[:rows])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_16_bit_products_are_those_in_float32_rounded_once(shape, dtype):
    linear, weight, offset = packed(*shape, dtype=dtype, bias=True)
    wide = Linear(weight.float(), offset.float())
    wide.prepack()
    x, residual = torch.randn(5, shape[1]).to(dtype), torch.randn(5, shape[0]).to(dtype)
    assert torch.equal(linear(x), wide(x.float()).to(dtype))
    assert torch.equal(linear(x, residual), wide(x.float(), residual.float()).to(dtype))
    assert linear.num_bytes == wide.num_bytes


def test_runs_as():
    plain = Linear(torch.ones(4, 4))
    assert plain.runs_as == "PyTorch, float32, plain"
    if can_prepack(plain.weight):
        plain.prepack()
        assert plain.runs_as == "oneDNN, float32"
        half = Linear(torch.ones(4, 4, dtype=torch.bfloat16))
        half.prepack()
        assert half.runs_as == "oneDNN, bfloat16 in float32 arithmetic"


# --- int8 ------------------------------------------------------------------------------------------------------------

ODD = [(1, 1), (7, 5), (61, 33), (129, 1000), (515, 2049)]  # threads share the work on the last
int8 = pytest.mark.skipif(not linear_module.has_exact_int8(), reason="this CPU multiplies no 8-bit integers exactly")


def quantised(num_out, num_in, dtype=torch.float32, bias=False):
    linear, weight, offset = matrix(num_out, num_in, dtype, bias)
    linear.quantize("int8")
    assert linear.weight.numel() == 0  # the float weight is dropped
    assert (linear.quantized, linear.dtype, linear.num_bytes) == ("int8", dtype, num_out * (num_in + 4))
    return linear, weight, offset


def integer_product(x, weight):
    """In float64: the nearest of 255 levels between minus and plus the largest number, and exact sums."""
    scale = (weight.abs().amax(1) / 127).clamp_min(1e-30)
    largest = x.abs().amax(1, keepdim=True)
    levels = torch.floor(x / largest * 127 + 0.5)  # float32, as the kernel rounds
    return (levels.double() @ torch.round(weight / scale[:, None]).double().T) * scale.double() * largest.double() / 127


@int8
@pytest.mark.parametrize("shape", SHAPES + ODD)
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_int8_is_the_product_of_integers(shape, bias):
    linear, weight, offset = quantised(*shape, bias=bias)
    x, residual = torch.randn(5, shape[1]), torch.randn(5, shape[0])
    expected = integer_product(x, weight) + (0 if offset is None else offset)
    # A number between two levels may go to either; one level of one number is far below what is allowed here.
    room = 1e-5 * (1 + expected.abs().max()) + weight.abs().max() * x.abs().max() / 127 * (0 if shape[1] < 1000 else 1)
    assert (linear(x) - expected).abs().max() <= room
    assert (linear(x, residual) - expected - residual).abs().max() <= room


@int8
@pytest.mark.parametrize("shape", [*SHAPES, *ODD[2:]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_int8_is_near_the_float_product(shape, dtype):
    linear, weight, offset = quantised(*shape, dtype, bias=True)
    x, residual = torch.randn(16, shape[1], dtype=dtype), torch.randn(16, shape[0], dtype=dtype)
    expected = x.double() @ weight.double().T + offset.double()
    for found, exact in ((linear(x), expected), (linear(x, residual), expected + residual.double())):
        assert found.dtype == dtype
        assert (found.double() - exact).norm() < 0.02 * exact.norm()


@int8
@pytest.mark.parametrize(
    ("shape", "dtype", "threads"),
    [
        *((shape, torch.float32, 1) for shape in SHAPES + ODD),
        *((shape, torch.bfloat16, threads) for shape in (SHAPES[0], ODD[2], ODD[-1]) for threads in (1, 3)),
    ],
    ids=str,
)
@torch.inference_mode()
def test_an_int8_rows_bits_do_not_depend_on_other_rows(shape, dtype, threads):
    linear, *_ = quantised(*shape, dtype=dtype, bias=True)
    x, residual = torch.randn(64, shape[1], dtype=dtype), torch.randn(64, shape[0], dtype=dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([linear(row[None]) for row in x])
        added = torch.cat([linear(row[None], more[None]) for row, more in zip(x, residual, strict=True)])
        for rows in (*range(1, 20), 31, 32, 33, 47, 48, 63, 64):
            assert torch.equal(linear(x[:rows].clone()), alone[:rows])
            assert torch.equal(linear(x[:rows].clone(), residual[:rows].clone()), added[:rows])
        others = x.clone()
        others[1:] *= 1e6
        others[5:9] = 0
        assert torch.equal(linear(others)[0], alone[0])
    finally:
        torch.set_num_threads(before)


@int8
@torch.inference_mode()
def test_int8_rows_of_zeros_and_rows_that_are_not_finite():
    linear, _, offset = quantised(61, 33, bias=True)
    x = torch.randn(6, 33)
    x[2:5] = 0
    assert torch.equal(linear(x)[2:5], offset.expand(3, -1))
    bare = Linear(torch.zeros(7, 33))  # channels of zeros, too
    bare.quantize()
    assert torch.equal(bare(x), torch.zeros(6, 7))
    assert torch.equal(bare(x, torch.ones(6, 7)), torch.ones(6, 7))
    for odd in (float("nan"), float("inf")):
        assert not linear(x.index_fill(1, torch.tensor([1]), odd)).isfinite().any()


@pytest.mark.parametrize(
    ("quantize", "dtype", "device", "kind", "parts"),
    [
        ("int3", torch.float32, "cpu", ConfigError, ["quantize must be int8, q4 or None", "found 'int3'"]),
        ("int8", torch.float32, "cuda", UnsupportedError, ["quantize='int8'", "cuda", "device='cpu'"]),
        ("int8", torch.float64, "cpu", UnsupportedError, ["quantize='int8'", "found float64", "leave quantize out"]),
    ],
)
def test_check_quantize_refuses(quantize, dtype, device, kind, parts):
    with refused(kind, *parts):
        check_quantize(quantize, dtype, torch.device(device))
    check_quantize(None, dtype, torch.device(device))


def test_matrices_that_cannot_be_quantised(monkeypatch):
    monkeypatch.setattr(linear_module, "has_exact_int8", lambda: True)
    with refused(UnsupportedError, "at most", "found 70000"):
        Linear(torch.ones(1, 70000)).quantize("int8")
    linear = Linear(torch.ones(2, 2))
    linear.prepack()
    if linear.weight.numel() == 0:
        with refused(ConfigError, "prepacked", "instead of prepacking"):
            linear.quantize("int8")
    monkeypatch.setattr(linear_module, "has_exact_int8", lambda: False)
    with refused(UnsupportedError, "quantize='int8'", "VNNI", "leave quantize out"):
        Linear(torch.ones(2, 2)).quantize("int8")
