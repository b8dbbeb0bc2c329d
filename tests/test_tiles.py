"""8-bit products of many rows: by the processor's matrix tiles (AMX) where it has them, and the same bits without."""

import os
import subprocess
import sys

import pytest
import torch

from draftwing.cpu.library import get_kernel
from draftwing.models.linear import Linear
from test_native import CAN_COMPILE, compiled

kernel = get_kernel()
pytestmark = pytest.mark.skipif(
    not CAN_COMPILE or kernel is None or not kernel.has_int8, reason="no kernel that multiplies bytes here"
)
ROWS = range(1, 71)
# Inputs: less than a tile, whole tiles, and some more. Outputs: less than 64, and more.
SHAPES = [(36, 10), (64, 64), (68, 65), (200, 130), (330, 70), (576, 192), (1030, 64)]


@pytest.fixture(params=[True, False], ids=["tiles", "vectors"])
def tiles(request):
    """With tiles, where there are any, and without."""
    before = kernel.has_tiles
    if kernel.use_tiles(request.param) != request.param:
        pytest.skip("this processor has no tiles that work")
    yield request.param
    kernel.use_tiles(before)


def product(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None, threads: int = 2) -> torch.Tensor:
    linear = Linear(weight, bias)
    linear.pack("int8")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return linear(x)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_those_of_integers(shape, tiles):
    """Rows and weights that 8 bits hold exactly: every number of rows, and what stands behind the last is left out."""
    num_in, num_out = shape
    generator = torch.Generator().manual_seed(num_in)
    x = torch.randint(-126, 127, (ROWS[-1], num_in), generator=generator).float()
    weight = torch.randint(-126, 127, (num_out, num_in), generator=generator).float()
    x[:, 1], weight[:, 2] = 127, 127  # a level is worth 1
    bias = torch.arange(num_out).float()
    wanted = (x.long() @ weight.long().T).float() + bias
    for rows in ROWS:
        assert torch.equal(product(weight, x[:rows], bias), wanted[:rows]), rows


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_its_own_bits_whatever_stands_beside_it(tiles, threads):
    x, weight = torch.randn(70, 200), torch.randn(150, 200)
    alone = torch.cat([product(weight, row[None], threads=threads) for row in x])
    for rows in (2, 5, 6, 15, 16, 17, 31, 33, 48, 64, 70):
        assert torch.equal(product(weight, x[:rows], threads=threads), alone[:rows])
        assert torch.equal(product(weight, x[-rows:], threads=threads), alone[-rows:])


def test_with_and_without_tiles_the_bits_are_the_same(tiles):
    if not tiles:
        pytest.skip("compared with the other")
    x, weight = torch.randn(67, 700), torch.randn(130, 700)
    with_tiles = product(weight, x)
    kernel.use_tiles(False)
    assert torch.equal(product(weight, x), with_tiles)


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


def test_what_ends_a_process_is_tried_by_a_child(tmp_path):
    """It says no, crashes, is stopped or never comes back: nobody is told of a child's end, and none is left."""
    path = tmp_path / "trial.so"
    done = compiled("trial.cpp", path, "-fPIC", "-shared")
    assert done.returncode == 0, done.stderr
    done = subprocess.run([sys.executable, "-c", TRIES, str(path)], capture_output=True, text=True)
    assert done.stdout == "[1, 0, 0, 0, 0] [] None\n", done.stderr
