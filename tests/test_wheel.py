"""What a wheel holds: every file of the package, the page, the kernel's sources and the shipped models, and no more."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

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
