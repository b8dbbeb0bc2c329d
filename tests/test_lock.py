"""Locks of output folders: two runs never write to one at once, and a lock ends with its process."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from conftest import refused
from draftwing.errors import CheckpointError, DataError
from draftwing.storage import locked
from draftwing.train.answers import AnsweredTask, Task, regenerate

HOLD = """
import sys, time
from pathlib import Path
from draftwing.errors import CheckpointError
from draftwing.storage import locked
with locked(Path(sys.argv[1]), CheckpointError):
    print("held", flush=True)
    time.sleep(120)
"""


def test_a_second_run_is_refused_and_names_the_first(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, env=environment)
    assert process.stdout.readline() == b"held\n"
    message = f"{tmp_path}: another run (process {process.pid}) is writing here"
    with refused(CheckpointError, message, "choose another --out"), locked(tmp_path, CheckpointError):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / ".lock").exists()  # a dead process leaves the file, and holds nothing
    with locked(tmp_path, CheckpointError):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())
    assert list(tmp_path.iterdir()) == []


def test_the_lock_goes_with_an_error_and_needs_a_folder(tmp_path):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), locked(tmp_path / "a", CheckpointError):
            1 / 0  # noqa: B018
    with locked(tmp_path / "a", CheckpointError), refused(DataError, "another run"), locked(tmp_path / "a", DataError):
        pass
    file = tmp_path / "file"
    file.write_text("")
    with refused(CheckpointError, "cannot be written", "part of the path is a file"), locked(file, CheckpointError):
        pass


def contend(folder, number, inside):
    """Take the lock a hundred times, and check that no other process has it."""
    taken = 0
    while taken < 100:
        try:
            with locked(folder, CheckpointError):
                assert inside.value == 0
                inside.value = number
                time.sleep(0)
                assert inside.value == number
                inside.value = 0
                taken += 1
        except CheckpointError:
            time.sleep(1e-4)


def test_one_at_a_time_under_contention(tmp_path):
    """The file is removed at the end of each turn, which must not let two in."""
    context = multiprocessing.get_context("fork")
    inside = context.Value("i", 0, lock=False)
    workers = [context.Process(target=contend, args=(tmp_path, number, inside)) for number in (1, 2, 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]


def test_answers_go_to_one_file_once(tmp_path):
    out = tmp_path / "out.jsonl"
    task = Task("a", "here", (), "text")

    class Nested:
        """While it answers, another run wants to write to the same file."""

        def answer(self, tasks):
            with refused(DataError, f"out.jsonl: another run (process {os.getpid()}) is writing here"):
                regenerate([task], Nested(), out)
            for each in tasks:
                answer = AnsweredTask(each)
                answer.take(" and more", "stop", 2)
                yield answer.finish()

    assert regenerate([task], Nested(), out).num_written == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl"]
