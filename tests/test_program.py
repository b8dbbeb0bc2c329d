"""What a net that is traced for the CPU kernel may not do, and what it is told then."""

import pytest
import torch

from conftest import refused
from draftwing.cpu.layout import NUM_BUFFERS
from draftwing.cpu.library import get_kernel
from draftwing.cpu.packed import Packed
from draftwing.cpu.program import Program, Traced, Workspace, join
from draftwing.errors import ConfigError, UnsupportedError
from draftwing.models.layers import GatedMLP, RMSNorm
from draftwing.models.linear import Linear

pytestmark = pytest.mark.skipif(get_kernel() is None, reason="no C++ compiler here")
WIDTH = 32


@pytest.fixture
def given() -> Traced:
    return Program(get_kernel()).given(WIDTH)


def matrix(*, packed: bool = True, gated: bool = False) -> Linear:
    found = Linear(torch.randn(WIDTH * (2 if gated else 1), WIDTH, generator=torch.Generator().manual_seed(0)))
    if packed:
        found.pack(gated=gated)
    return found


def test_a_value_is_gone_after_it_was_a_residual(given):
    value, square = given.linear(matrix().packed), matrix()
    square.forward(given, value)
    with refused(ConfigError, "after it was the residual", "is_traceable = False"):
        square.forward(value)


def test_more_operations_than_fit(given):
    square = matrix().packed
    with refused(UnsupportedError, f"more than {get_kernel().max_ops} operations", "is_traceable = False"):
        for _ in range(get_kernel().max_ops + 1):
            given = given.linear(square)


def test_more_values_at_a_time_than_fit(given):
    square = matrix().packed
    join([given.linear(square) for _ in range(NUM_BUFFERS + 1)])
    with refused(UnsupportedError, f"more than {NUM_BUFFERS} values", "is_traceable = False"):
        given.program.finish()


def test_a_gate_belongs_to_its_mlp(given):
    mlp = GatedMLP(matrix(gated=True), matrix(), "silu")
    with refused(ConfigError, "call the GatedMLP"):
        mlp.gate_up.forward(given)


def test_a_matrix_that_was_not_packed(given):
    with refused(ConfigError, "not packed", "attribute of the net"):
        matrix(packed=False).forward(given)


def test_columns_of_a_norm(given):
    norm = RMSNorm(torch.linspace(0.5, 1.5, WIDTH), 1e-6)
    program, x = given.program, torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    end = program.output(given.normed(norm).columns(8, 24))
    program.finish()
    out = torch.empty(2, 16)
    Workspace(program).run(2, 1, {program.place(given.buffer): x, program.place(end): out})
    assert torch.allclose(out, norm.forward(x)[:, 8:24], atol=1e-6)


def test_values_that_are_needed_together_share_no_memory():
    torch.manual_seed(0)
    kernel, x, matrices = get_kernel(), torch.randn(5, 32), torch.randn(3, 32, 32)
    program = Program(kernel)
    given = program.given(32)
    one, two, three = (given.linear(Packed.of(matrix, None)) for matrix in matrices)
    joined = program.output(join([one, two, three]))
    program.finish()
    out = torch.empty(5, 96)
    Workspace(program).run(5, 1, {program.place(given.buffer): x, program.place(joined): out})
    assert torch.allclose(out, torch.cat([x @ matrix.T for matrix in matrices], -1), atol=1e-4)
