"""Waiting for a processor, as Linux counts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from draftwing.budget import measure
from draftwing.budget.measure import waited_seconds


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not count waiting")
def test_two_that_share_a_processor_disturb_each_other():
    code = """
import os, time
from draftwing.budget.measure import waited_seconds
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
spin = lambda until: [None for _ in iter(lambda: time.perf_counter() < until, False)]
child = os.fork()
if child == 0:
    spin(time.perf_counter() + 60)
    os._exit(0)
before = waited_seconds()
spin(time.perf_counter() + 0.5)
os.kill(child, 9)
print(waited_seconds() - before > 0.05)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_all_threads_are_counted_and_what_cannot_be_read_is_not(tmp_path, monkeypatch):
    for name, text in (("7", "5 2000000000 3"), ("8", "5 500000000 3"), ("9", ""), ("10", "a b c")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    (tmp_path / "11").mkdir()  # ended meanwhile
    monkeypatch.setattr(measure, "TASKS", tmp_path)
    assert waited_seconds() == 2.5
    monkeypatch.setattr(measure, "TASKS", tmp_path / "none")
    assert waited_seconds() == 0.0
