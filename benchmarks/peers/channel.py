"""Jobs and answers between the benchmark and a worker: one line of JSON each.

A worker reads ``{"op": "prepare" | "load" | "generate", ...}`` on standard input and answers on standard output. An
answer with an ``error`` is a failure that the worker survived; one that ends without an answer has crashed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

LOG_LINES, LOG_WIDTH = 8, 400  # the end of a crashed worker's standard error: its last words say why


class PeerError(Exception):
    """A peer failed or cannot do something; the message goes into the table."""


# --- the worker's side -----------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One prompt's continuation.

    Attributes:
        seconds: from the prompt to the last token.
        first_seconds, first_tokens: when the first tokens came, and how many; None if the peer does not report it.
        forwards: of the target after those first tokens; None if the peer does not report it.
    """

    token_ids: list[int]
    seconds: float
    first_seconds: float | None = None
    first_tokens: int | None = None
    forwards: int | None = None


class Stopwatch:
    """Time tokens as they arrive, and return a ``Run``."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.steps = 0  # how often tokens came
        self._first: tuple[float, int] | None = None
        self._began = time.perf_counter()

    def take(self, tokens: Iterable[int]) -> None:
        self.token_ids += tokens
        self.steps += 1
        if self._first is None and self.token_ids:
            self._first = time.perf_counter() - self._began, len(self.token_ids)

    def stop(self, max_tokens: int, forwards: int | None = None) -> Run:
        """Return the run of the first ``max_tokens`` tokens; tokens drafted beyond them do not count."""
        seconds = time.perf_counter() - self._began
        first_seconds, first_tokens = self._first or (None, None)
        return Run(self.token_ids[:max_tokens], seconds, first_seconds, first_tokens, forwards)


class Peer(Protocol):
    """The interface of ``PEER`` in a peer's file."""

    def prepare(self, job: dict[str, Any]) -> dict[str, Any]:
        """Convert the checkpoint if necessary; return values to add to the job of ``load``."""

    def load(self, job: dict[str, Any]) -> dict[str, Any]:
        """Load a mode; return ``versions`` (by package) and ``notes``."""

    def generate(self, prompt: list[int], max_tokens: int) -> Run:
        """Continue one prompt greedily by exactly ``max_tokens`` tokens."""


def run_job(peer: Peer, job: dict[str, Any]) -> dict[str, Any]:
    if job["op"] == "prepare":
        return peer.prepare(job)
    if job["op"] == "load":
        return {"versions": {}, "notes": [], **peer.load(job), "memory": peak_memory()}
    runs = []
    for prompt in job["prompts"]:
        run = peer.generate(prompt, job["max_tokens"])
        if len(run.token_ids) != job["max_tokens"]:
            raise PeerError(f"wrote {len(run.token_ids)} tokens instead of {job['max_tokens']}")
        runs.append(asdict(run))
    return {"runs": runs, "memory": peak_memory()}


def serve(peer: Peer) -> None:
    """Answer jobs until standard input ends."""
    # Peers print to standard output: that becomes standard error, and the answers' pipe is kept aside.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = run_job(peer, json.loads(line))
        except Exception as error:
            traceback.print_exc()
            told = " ".join(str(error).split())
            answer = {"error": told if isinstance(error, PeerError) else f"{type(error).__name__}: {told}"}
        answers.write(json.dumps(answer) + "\n")


def peak_memory() -> int:
    """Return the bytes of memory that this process and the ones that it runs took at most."""
    children = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    statuses = [Path(f"/proc/{pid}/status").read_text(encoding="utf-8") for pid in ("self", *children)]
    return 1024 * sum(int(status.partition("VmHWM:")[2].split()[0]) for status in statuses)


# --- the benchmark's side --------------------------------------------------------------------------------------------


class Worker:
    """A worker process.

    Args:
        command: starts it.
        environment: set on top of ours.
        seconds: how long an answer may take.
    """

    def __init__(
        self, command: Sequence[str], environment: dict[str, str] | None = None, seconds: float = 1800
    ) -> None:
        self._seconds = seconds
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed in ``close``
        # A new session, so that everything it starts can be ended with it.
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run one job and return the answer.

        Raises:
            PeerError: it failed, crashed, or took too long; a worker that crashed or was too slow is closed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
            line = self._read_line()
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            raise PeerError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _read_line(self) -> bytes:
        """Read up to the end of the line or pipe; end a worker that does not answer in time."""
        assert self._process.stdout is not None
        pipe, told, until = self._process.stdout.fileno(), b"", time.monotonic() + self._seconds
        while not told.endswith(b"\n"):
            if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                self._end()
                raise PeerError(f"no answer within {self._seconds:g} s")
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                break
            told += chunk
        return told

    def _last_words(self) -> str:
        self._end()
        self._log.seek(0)
        lines = [line.strip()[:LOG_WIDTH] for line in self._log if line.strip()]
        code = self._process.returncode
        ended = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return " | ".join([ended, *lines[-LOG_LINES:]])

    def _end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)  # one that crashed a moment ago: its own exit code is wanted, not our signal
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End the worker and everything it started."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._end()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


def worker_command(python: Path | str, peer: str) -> list[str]:
    """Return the command that starts a peer's worker in its environment."""
    return [str(python), str(Path(__file__).resolve().parents[1] / "peers.py"), "--worker", peer]


NewWorker = Callable[[str], Worker]
