"""The kernel computes the same bits on other processors and with other compilers.

`native/figures.cpp` computes everything that the kernel can. ARM programs are cross-compiled and run in an emulator:
`apt-get install g++-aarch64-linux-gnu qemu-user`.
"""

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from draftwing.cpu import build
from test_native import CAN_COMPILE, HERE

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not CAN_COMPILE, reason="no C++ compiler here"),
]
IS_X86 = platform.machine() in ("x86_64", "AMD64")
FLAGS = [*(flag for flag in build.FLAGS if flag not in ("-shared", "-fPIC")), "-Werror=return-type"]
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
LIBRARY = ("GELU",)  # uses the C library's erf, whose last bit differs between libraries


def figures(made: Path, command: list[str], runner: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """Compile the program with ``command``, run it, and return the words it prints, by name."""
    done = subprocess.run(
        [*command, *FLAGS, f"-I{build.SOURCES}", "-o", str(made), str(HERE / "figures.cpp")],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    ran = subprocess.run([*runner, str(made)], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    lines = (line.split(" |") for line in ran.stdout.splitlines())
    return {name: np.array([int(word, 16) for word in words.split()], np.uint32) for name, words in lines}


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> dict[str, np.ndarray]:
    compiler = build.find_compiler()
    assert compiler is not None
    option = "-march=native" if IS_X86 else "-mcpu=native"
    found = figures(tmp_path_factory.mktemp("here") / "figures", [*compiler, option])
    assert len(found) > 200
    return found


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, words in expected.items():
        if name in LIBRARY:
            np.testing.assert_allclose(found[name].view(np.float32), words.view(np.float32), rtol=1e-6, atol=1e-7)
        else:
            assert np.array_equal(found[name], words), name


@pytest.mark.skipif(not IS_X86, reason="names of x86 processors")
@pytest.mark.parametrize("arch", ["x86-64-v3", "x86-64-v3 -mavxvnni", "x86-64-v3 -mavx512f", "skylake-avx512"])
def test_older_x86_processors_have_the_same_bits(arch, here, tmp_path):
    compiler, flags = build.find_compiler(), Path("/proc/cpuinfo").read_text()
    assert compiler is not None
    needed = {"avxvnni": "avx_vnni", "avx512": "avx512dq", "v3": "avx2"}
    if any(word in arch and flag not in flags for word, flag in needed.items()):
        pytest.skip("this processor lacks the instructions")
    assert_same(figures(tmp_path / "figures", [*compiler, *f"-march={arch}".split()]), here)


@pytest.mark.skipif(not IS_X86, reason="names of x86 processors")
def test_without_fused_multiply_add_only_rounding_differs(here, tmp_path):
    """Sums of integers, products with blocks, weights, noise and sampled tokens are the same; others are close."""
    compiler = build.find_compiler()
    assert compiler is not None
    found = figures(tmp_path / "figures", [*compiler, "-march=x86-64-v2"])
    assert found.keys() == here.keys()
    for name, words in here.items():
        if name.startswith(("blocks", "bytes", "rows", "noise", "walk")) or name.endswith(("tokens", "parents")):
            assert np.array_equal(found[name], words), name
        elif not name.startswith("slots narrow"):  # these are bytes
            numbers, expected = found[name].view(np.float32), words.view(np.float32)
            scale = np.abs(expected[np.isfinite(expected)]).max()
            bound = 1e-3 if "narrow" in name else 1e-5  # a number may be rounded to the next level of 8 bits
            np.testing.assert_allclose(numbers, expected, rtol=1e-4, atol=bound * scale, err_msg=name)


@pytest.mark.skipif(shutil.which("clang++") is None, reason="no clang++ here")
@pytest.mark.parametrize("arch", ["native", *(["x86-64-v3"] if IS_X86 else [])])
def test_clang_gives_the_same_bits(arch, here, tmp_path):
    option = "-march" if IS_X86 else "-mcpu"
    assert_same(figures(tmp_path / "figures", ["clang++", f"{option}={arch}"]), here)


@pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"no {CROSS} here: apt-get install g++-aarch64-linux-gnu")
@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR} here: apt-get install qemu-user")
@pytest.mark.parametrize("arch", ["armv8-a", "armv8.2-a+dotprod", "armv8.2-a+dotprod+i8mm"])
def test_arm_gives_the_same_bits(arch, here, tmp_path):
    command = [CROSS, f"-march={arch}", "-static"]
    assert_same(figures(tmp_path / "figures", command, (EMULATOR, "-cpu", "max")), here)


@pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"no {CROSS} here: apt-get install g++-aarch64-linux-gnu")
@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR} here: apt-get install qemu-user")
def test_an_arm_processor_that_lacks_instructions_is_recognised(tmp_path):
    command = [CROSS, "-march=armv8.2-a+dotprod+i8mm", "-static", *FLAGS, f"-I{build.SOURCES}"]
    source = tmp_path / "here.cpp"
    source.write_text('#include "processor.h"\nint main() { return runs_here() ? 0 : 3; }\n')
    subprocess.run([*command, "-o", str(tmp_path / "here"), str(source)], check=True, capture_output=True)
    for cpu, status in (("max", 0), ("cortex-a76", 3), ("cortex-a72", 3)):
        assert subprocess.run([EMULATOR, "-cpu", cpu, str(tmp_path / "here")]).returncode == status, cpu
