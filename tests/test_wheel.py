"""What a wheel holds: every file of the package, the page, the kernel's sources and the shipped models, and no more."""

from __future__ import annotations

import os
import platform
import runpy
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest

from draftwing.cpu import build
from draftwing.cpu.library import get_kernel

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "draftwing"
MOST_BYTES = 100_000_000  # of a file in the public package index


@pytest.fixture(scope="module")
def held():
    """By its path in the wheel, where each file is from. Built by nothing: hatchling is asked what it would take."""
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed: pip install hatchling")
    builder = wheel.WheelBuilder(str(ROOT))
    return {each.distribution_path: Path(each.path) for each in builder.recurse_included_files()}


def test_a_wheel_holds_the_whole_package_and_nothing_else(held):
    own = {each for each in PACKAGE.rglob("*") if each.is_file() and "__pycache__" not in each.parts}
    assert set(held.values()) == own
    assert set(held) == {f"draftwing/{each.relative_to(PACKAGE).as_posix()}" for each in own}
    for name in (
        *("py.typed", "serve/page/index.html", "serve/page/vendor/uplot.js", "cpu/native/kernel.cpp"),
        *("shipped/smollm2-135m-instruct/eagle3/model.safetensors", "shipped/toy/target/model.safetensors"),
    ):
        assert f"draftwing/{name}" in held


def test_a_wheel_may_be_published(held):
    """Deflated fast, so rather more than it will be."""
    assert sum(_deflated(each) for each in held.values()) < MOST_BYTES


def _deflated(file: Path) -> int:
    packer, size = zlib.compressobj(1), 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            size += len(packer.compress(block))
    return size + len(packer.flush())


# --- with compiled kernels -------------------------------------------------------------------------------------------


def test_every_library_that_is_looked_for_is_in_one_wheel():
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install hatchling")
    platforms = runpy.run_path(str(ROOT / "tools" / "wheel_hook.py"))["PLATFORMS"]
    assert sorted(level for _, levels in platforms.values() for level in levels) == sorted(build.LEVELS)
    assert all(f" {tag}" in (ROOT / "Makefile").read_text() for tag in platforms)


USE = """
import draftwing as dw
from draftwing.cpu.library import get_kernel
answer, = dw.load("toy").generate("Why is the sky blue?", max_tokens=24, temperature=0.7, seed=5)
print(get_kernel().name, answer.text)
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="a library for x86-64")
def test_a_wheel_needs_no_compiler(tmp_path):
    for package in ("hatchling", "ziglang"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")
    names = {"DRAFTWING_WHEEL": "manylinux_2_28_x86_64", "DRAFTWING_KERNEL_ARCH": "x86-64-v3"}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **names}, check=True)
    (wheel,) = tmp_path.glob("draftwing-*-py3-none-manylinux_2_28_x86_64.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    bare = {"PATH": "", "PYTHONPATH": str(tmp_path / "site"), "DRAFTWING_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", USE], env=bare, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("x86-64-v3-")
    assert not (tmp_path / "cache").exists()
    if get_kernel() is not None:  # compiled here
        here = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True)
        assert here.stdout.partition(" ")[2] == done.stdout.partition(" ")[2]
