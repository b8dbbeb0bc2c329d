"""Products on the processor's matrix tiles (AMX) where it has them: in 8 bits, of rounded rows, and of split rows.

Sums are taken in one order, so that the bits are the same without tiles, and a row's do not depend on other rows.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from draftwing.cpu.layout import RowForm
from draftwing.cpu.library import get_kernel
from draftwing.models.linear import Linear
from draftwing.models.weights import Stored
from test_native import CAN_COMPILE, compiled

kernel = get_kernel()
pytestmark = pytest.mark.skipif(kernel is None, reason="no kernel here")
needs_int8 = pytest.mark.skipif(kernel is None or not kernel.has_int8, reason="this CPU multiplies no bytes")
FORMS = [pytest.param("int8", marks=needs_int8), "rounded", "split"]
ROWS = (1, 2, 3, 5, 6, 7, 10, 11, 12, 13, 15, 16, 17, 22, 31, 33, 48, 64, 70)
# Inputs: less than a step of 32, whole steps, some more, and odd. Outputs: less than 64, and more.
SHAPES = [(1, 3), (31, 10), (32, 64), (37, 65), (64, 70), (130, 200), (577, 130), (1030, 64)]


def linear_of(form: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    if form == "split":
        linear = Linear.of_stored([Stored("bfloat16", weight.shape[1], weight.bfloat16())], bias)
        if weight.shape[1] >= 32:
            assert linear.packed[0].row_form == RowForm.SPLIT
        return linear
    linear = Linear(weight.clone(), bias)
    linear.pack("int8" if form == "int8" else None, rounds=form == "rounded")
    return linear


@pytest.fixture(autouse=True, params=[2])
def threads(request) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def parts_of(x: torch.Tensor) -> list[torch.Tensor]:
    """Three in bfloat16: the first 8 bits of each number, the next 8 and the last 8."""
    parts = []
    for _ in range(3):
        parts.append((x.view(torch.int32) & -0x10000).view(torch.float32))
        x = x - parts[-1]
    assert not x.any()
    return parts


def reference(form: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(R, out) float32: of each part 32 inputs at a time, the even and the odd ones apart; the small parts first."""
    weight, sums = weight.bfloat16().float(), []
    for part in parts_of(x) if form == "split" else [x.bfloat16().float()]:
        total = torch.zeros(len(x), len(weight))
        for start in range(0, x.shape[1], 32):
            halves = torch.zeros(2, *total.shape)
            for i in range(start, min(start + 32, x.shape[1])):
                halves[i % 2] += part[:, i, None] * weight[:, i]  # exact
            total += halves[0] + halves[1]
        sums.append(total)
    return sums[0] if form == "rounded" else sums[0] + (sums[1] + sums[2])


@needs_int8
@pytest.mark.parametrize("shape", [(36, 10), (64, 64), (68, 65), (200, 130), (330, 70), (576, 192)], ids=str)
def test_sums_in_8_bits_are_those_of_integers(shape, tiles):
    """Rows and weights that 8 bits hold exactly: every number of rows, and what stands behind the last is left out."""
    num_in, num_out = shape
    generator = torch.Generator().manual_seed(num_in)
    x = torch.randint(-126, 127, (70, num_in), generator=generator).float()
    weight = torch.randint(-126, 127, (num_out, num_in), generator=generator).float()
    x[:, 1], weight[:, 2] = 127, 127  # a level is worth 1
    bias = torch.arange(num_out).float()
    wanted = (x.long() @ weight.long().T).float() + bias
    linear = linear_of("int8", weight, bias)
    for rows in range(1, 71):
        assert torch.equal(linear(x[:rows]), wanted[:rows]), rows


@pytest.mark.parametrize("form", ["rounded", "split"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_order_of_sums(shape, form, tiles):
    """To the bit, for every number of rows. And n rounded sums are wrong by at most n / 2^24 of the absolute sum."""
    num_in, num_out = shape
    if form == "split" and num_in < 32:
        pytest.skip("less than a step: rows are not split")
    torch.manual_seed(num_in)
    x, weight, bias = torch.randn(ROWS[-1], num_in), torch.randn(num_out, num_in), torch.randn(num_out)
    expected = reference(form, x, weight) + bias
    near, exact = (x.bfloat16() if form == "rounded" else x).double(), weight.bfloat16().double()
    longest = 17 + 1 + -(-num_in // 32) + 3  # sums that a number takes part in, with the bias's
    bound = longest * 2.0**-24 * (near.abs() @ exact.abs().T + bias.abs())
    assert ((expected - (near @ exact.T + bias)).abs() <= bound).all()
    linear = linear_of(form, weight, bias)
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), expected[:rows]), rows


@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("form", FORMS)
def test_a_rows_bits_do_not_depend_on_other_rows(form, threads, tiles):
    torch.manual_seed(threads)
    x, linear = torch.randn(70, 203), linear_of(form, torch.randn(150, 203))
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in ROWS[1:]:
        assert torch.equal(linear(x[:rows]), alone[:rows])
        assert torch.equal(linear(x[-rows:]), alone[-rows:])


@pytest.mark.parametrize("form", FORMS)
def test_with_and_without_tiles_the_bits_are_the_same(form, tiles):
    """Also of numbers and sums that are too small to be normal. A matrix that was laid out for tiles stays what it is
    when they are turned off."""
    if not tiles:
        pytest.skip("compared with the other")
    torch.manual_seed(0)
    for bounds in ((-20, 20), (-80, -40), (-140, 1))[: 1 if form == "int8" else 3]:
        scale = torch.exp2(torch.randint(*bounds, (1, 707)).float())
        assert kernel.use_tiles(True)
        x, linear = torch.randn(67, 707) * scale, linear_of(form, torch.randn(130, 707) * scale.flip(1))
        with_tiles = linear(x)
        kernel.use_tiles(False)
        assert torch.equal(linear(x), with_tiles)
        assert with_tiles.abs().amax() > 0


def test_rows_are_rounded_to_the_nearest_and_ties_to_even(tiles):
    """An identity matrix shows each input; the last column remains of sixteen."""
    exact = 1 + torch.arange(64) / 128  # in bfloat16
    between = torch.cat([exact, -exact]) + 2.0**-8  # in the middle of two
    x = torch.stack([between, between * (1 + 2.0**-20), between * (1 - 2.0**-20), between * 1e38])
    x = torch.cat([x, torch.full((4, 1), 1e-39)], 1)
    found = linear_of("rounded", torch.eye(129))(x)
    expected = x.bfloat16().float()
    expected[:, -1] = 0  # too small to be normal
    assert torch.equal(found, expected)
    assert not torch.equal(found[0], found[1])


def test_split_numbers_come_through_whole(tiles):
    """Seen through a matrix that gives each input out: all 24 bits, whatever the sign and the size."""
    torch.manual_seed(1)
    x = torch.randn(6, 96) * torch.exp2(torch.randint(-90, 120, (6, 96)).float())
    x[0, :4] = torch.tensor([0.0, -0.0, torch.finfo(torch.float32).max, -1 - 2.0**-23])
    assert torch.equal(linear_of("split", torch.eye(96))(x), x)


def test_split_rows_are_nearer_than_whole_ones(tiles):
    torch.manual_seed(3)
    x, weight = torch.randn(70, 2048), torch.randn(300, 2048).bfloat16()
    exact = x.double() @ weight.double().T
    kernel.has_tiles = False
    whole = Linear.of_stored([Stored("bfloat16", 2048, weight)], None)
    assert whole.packed[0].row_form == RowForm.AS_THEY_ARE
    kernel.has_tiles = True
    errors = [(found - exact).abs().mean() for found in (linear_of("split", weight.float())(x), whole(x))]
    assert 0 < errors[0] < errors[1] / 2


@pytest.mark.parametrize(("form", "low_bits"), [("rounded", 0x7FFFFFFF), ("split", 0x7F800001)])
def test_numbers_that_are_not_finite_stay_so(form, low_bits, tiles):
    """Also NaNs whose rounding up would overflow, or whose first part would be infinite."""
    x = torch.randn(5, 40)
    x[0, 3], x[2, 39], x[3, 0], x[4, 8] = torch.nan, -torch.inf, torch.finfo(torch.float32).max, torch.nan
    x.view(torch.int32)[4, 8] = low_bits
    found = linear_of(form, torch.ones(3, 40))(x)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()
    if form == "rounded":
        assert found[4].isnan().all()
        assert (found[2] == -torch.inf).all()
        assert (found[3] == torch.inf).all()  # beyond the largest number of bfloat16
    else:
        assert not found[[2, 4]].isfinite().any()
        assert found[3].isfinite().all()


# --- whether there are tiles ------------------------------------------------------------------------------------------


def test_the_environment_turns_tiles_off(tiles):
    if not tiles:
        pytest.skip("they are off")
    code = "from draftwing.cpu.library import get_kernel; print(get_kernel().has_tiles)"
    environment = {**os.environ, "DRAFTWING_KERNEL_AMX": "off"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


TRIES = """
import ctypes, os, signal, sys
trial, told = ctypes.CDLL(sys.argv[1]).trial, []
signal.signal(signal.SIGCHLD, lambda *_: told.append(1))
found = [trial(which) for which in range(5)]
try:
    left = os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    left = None
print(found, told, left)
"""


@pytest.mark.skipif(not CAN_COMPILE, reason="no C++ compiler here")
def test_what_ends_a_process_is_tried_by_a_child(tmp_path):
    """The child refuses, crashes, stops or hangs. The parent receives no signal when it ends, and no child remains."""
    path = tmp_path / "trial.so"
    done = compiled("trial.cpp", path, "-fPIC", "-shared")
    assert done.returncode == 0, done.stderr
    done = subprocess.run([sys.executable, "-c", TRIES, str(path)], capture_output=True, text=True)
    assert done.stdout == "[1, 0, 0, 0, 0] [] None\n", done.stderr
