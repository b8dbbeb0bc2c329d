"""Waiting for a processor, as Linux counts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftwing.budget import measure
from draftwing.budget.measure import waited_seconds


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not count waiting")
def test_two_that_share_a_processor_disturb_each_other():
    may_use = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(may_use)})  # this thread and what it starts
    other = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    try:
        before, end = waited_seconds(), time.perf_counter() + 60
        while waited_seconds() - before < 0.05:
            assert time.perf_counter() < end
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, may_use)


def test_all_threads_are_counted_and_what_cannot_be_read_is_not(tmp_path, monkeypatch):
    for name, text in (("7", "5 2000000000 3"), ("8", "5 500000000 3"), ("9", ""), ("10", "a b c")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    (tmp_path / "11").mkdir()  # ended meanwhile
    monkeypatch.setattr(measure, "TASKS", tmp_path)
    assert waited_seconds() == 2.5
    monkeypatch.setattr(measure, "TASKS", tmp_path / "none")
    assert waited_seconds() == 0.0
