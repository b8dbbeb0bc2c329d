"""Prepacked and quantised matrices: correct, and a row's bits do not depend on other rows."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from conftest import PROCESS_SECONDS, refused
from draftwing.errors import ConfigError, UnsupportedError
from draftwing.models import linear as linear_module
from draftwing.models.linear import BlockProduct, Linear, can_prepack, check_quantize

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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_rows_bits_do_not_depend_on_other_rows(shape, dtype):
    linear, *_ = packed(*shape, dtype=dtype)
    x, residual = torch.randn(64, shape[1], dtype=dtype), torch.randn(64, shape[0], dtype=dtype)
    alone, added = linear(x), linear(x, residual)
    for rows in (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 32, 33, 63):
        assert torch.equal(linear(x[:rows].clone()), alone[:rows])
        assert torch.equal(linear(x[:rows].clone(), residual[:rows].clone()), added[:rows])


# --- 16 bits ---------------------------------------------------------------------------------------------------------


COUNTS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 33, 63, 65)
MORE_THAN_A_BLOCK = 270


def check_rows(linear, weight):
    """Each row has the bits that it has alone, at the end of any number of other rows."""
    x, dtype = BlockProduct(linear, weight, "another").sample(), weight.dtype
    x = torch.cat([x, torch.randn(33, weight.shape[1]).to(dtype)])
    residual = torch.randn(len(x), len(weight)).to(dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    added = torch.cat([linear(row[None], more[None]) for row, more in zip(x, residual, strict=True)])
    for rows in COUNTS:
        assert torch.equal(linear(x[-rows:]), alone[-rows:])
        assert torch.equal(linear(x[-rows:], residual[-rows:]), added[-rows:])
    many = torch.arange(MORE_THAN_A_BLOCK) % len(x)
    assert torch.equal(linear(x[many]), alone[many])
    assert torch.equal(linear(x.T.contiguous().T), alone)
    assert linear(x[:0]).shape == (0, len(weight))
    return x, alone


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_16_bit_rows_do_not_depend_on_each_other(shape, dtype, bias):
    linear, weight, offset = matrix(*shape, dtype, bias)
    linear.prepack()
    x, found = (part[32:] for part in check_rows(linear, weight))
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    assert (found.double() - exact).norm() < 0.01 * exact.norm()
    assert "rows or more" in linear.runs_as or "one row at a time" in linear.runs_as


class Unruly:
    """A product that sums its inputs in the reverse order if ``is_odd(place, rows)``, in float32 as oneDNN does."""

    def __init__(self, num_out, num_in, is_odd):
        torch.manual_seed(1)
        self.weight, self.is_odd, self.calls = torch.randn(num_out, num_in).bfloat16(), is_odd, 0

    def __call__(self, x):
        self.calls += 1
        parts = zip(x.double().chunk(8, 1), self.weight.double().chunk(8, 1), strict=True)
        sums = [(part @ weight.T).float() for part, weight in parts]
        forwards, backwards = sums[0], sums[-1]
        for up, down in zip(sums[1:], sums[-2::-1], strict=True):
            forwards, backwards = forwards + up, backwards + down
        odd = torch.tensor([self.is_odd(place, len(x)) for place in range(len(x))])
        return torch.where(odd[:, None], backwards, forwards).bfloat16()


@pytest.mark.parametrize(
    ("is_odd", "smallest"),
    [
        (lambda place, rows: False, 4),
        (lambda place, rows: rows < 16, 16),  # another kernel for few rows
        (lambda place, rows: rows in (5, 6, 32), 4),
        (lambda place, rows: rows == 16, 16),
        (lambda place, rows: rows > 16, 4),
        (lambda place, rows: place % 2 == 1 and rows > 4, 4),
        (lambda place, rows: place == 3, 0),  # the last row of a block of four, and one of many
        (lambda place, rows: place >= rows // 2, 0),
    ],
    ids=range(8),
)
@torch.inference_mode()
def test_sizes_whose_rows_depend_on_each_other_are_not_used(is_odd, smallest):
    unruly = Unruly(384, 896, is_odd)
    product = BlockProduct(unruly, unruly.weight, f"unruly {id(is_odd)}")
    assert product.smallest == smallest
    x = torch.cat([product.sample()] * 3)
    alone = torch.cat([product(row[None]) for row in x])
    for rows in COUNTS:
        assert torch.equal(product(x[-rows:]), alone[-rows:])
    sizes = (4, 5, 16, 32)
    is_tame = not any(is_odd(place, size) for size in sizes for place in range(size))
    assert all(torch.equal(torch.cat([unruly(part) for part in x.split(size)]), alone) for size in sizes) == is_tame


@torch.inference_mode()
def test_sizes_are_tried_once_per_shape_and_number_of_threads(monkeypatch):
    threads = torch.get_num_threads()
    unruly = Unruly(64, 64, lambda place, rows: torch.get_num_threads() != threads and rows == 4)
    product, x = BlockProduct(unruly, unruly.weight, "threads"), torch.randn(4, 64).bfloat16()
    before = unruly.calls
    product(x)
    assert BlockProduct(unruly, unruly.weight, "threads").smallest == 4
    assert unruly.calls == before + 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    assert product.smallest == 16
    monkeypatch.undo()
    assert product.smallest == 4


@torch.inference_mode()
def test_a_matrix_on_a_machine_whose_rows_depend_on_each_other(monkeypatch):
    """Slow, correct, and reported."""
    unruly = Unruly(380, 896, lambda place, rows: place >= rows // 2)  # a shape of no other test
    monkeypatch.setattr(Linear, "product", lambda self, x: unruly(x))
    linear = Linear(unruly.weight.clone())
    linear.prepack()
    assert linear.runs_as.endswith("bfloat16, one row at a time")
    check_rows(linear, unruly.weight)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs AVX-512")
@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_16_bit_rows_on_other_processors(isa):
    """As far as oneDNN can simulate them."""
    code = (
        "import torch; torch.set_num_threads(2); from draftwing.models.linear import Linear; import test_linear as t\n"
        "with torch.inference_mode():\n"
        "    for dtype in (torch.bfloat16, torch.float16):\n"
        "        for out, width in ((384, 896), (61, 32)):\n"
        "            weight = torch.randn(out, width).to(dtype); linear = Linear(weight.clone()); linear.prepack()\n"
        "            t.check_rows(linear, weight); print(linear.runs_as)"
    )
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=PROCESS_SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 4


def test_runs_as():
    plain = Linear(torch.ones(4, 4))
    assert plain.runs_as == "PyTorch, float32, plain"
    if can_prepack(plain.weight):
        plain.prepack()
        assert plain.runs_as == "oneDNN, float32"


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
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES + ODD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_an_int8_rows_bits_do_not_depend_on_other_rows(shape, dtype, threads):
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
