"""Waiting for a processor, as Linux counts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from draftwing.budget import neighbours
from draftwing.budget.neighbours import Undisturbed, waited_seconds


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not count waiting")
def test_two_that_share_a_processor_disturb_each_other():
    code = """
import os, time
from draftwing.budget.neighbours import Undisturbed, waited_seconds
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
spin = lambda until: [None for _ in iter(lambda: time.perf_counter() < until, False)]
child = os.fork()
if child == 0:
    spin(time.perf_counter() + 60)
    os._exit(0)
before = waited_seconds()
with Undisturbed() as is_so:
    spin(time.perf_counter() + 0.5)
os.kill(child, 9)
print(bool(is_so), waited_seconds() - before > 0.05)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False True\n", done.stderr


def test_all_threads_are_counted_and_what_cannot_be_read_is_not(tmp_path, monkeypatch):
    for name, text in (("7", "5 2000000000 3"), ("8", "5 500000000 3"), ("9", ""), ("10", "a b c")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    (tmp_path / "11").mkdir()  # ended meanwhile
    monkeypatch.setattr(neighbours, "TASKS", tmp_path)
    assert waited_seconds() == 2.5
    monkeypatch.setattr(neighbours, "TASKS", tmp_path / "none")
    assert waited_seconds() == 0.0


@pytest.mark.parametrize(("waited", "is_so"), [(0.0, True), (0.0199, True), (0.0202, False), (3.0, False)])
def test_a_fiftieth_of_the_time_may_be_waited(waited, is_so, monkeypatch):
    monkeypatch.setattr(neighbours, "waited_seconds", iter([5.0, 5.0 + waited]).__next__)
    monkeypatch.setattr(neighbours.time, "perf_counter", iter([1.0, 2.0]).__next__)
    with Undisturbed() as undisturbed:
        pass
    assert bool(undisturbed) is is_so
