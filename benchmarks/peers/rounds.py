"""Measure every mode once per round, with workers loaded and ended as memory permits, and record failures."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.channel import PeerError, Run, Worker
from peers.heads import exported
from peers.modes import Mode, Settings, turns

WARM_UP_TOKENS = 16
ROOM = 1.2  # times the largest worker's memory must be free before one more is kept


@dataclass
class Outcome:
    """The result of a mode.

    Attributes:
        rounds: for each round the runs of all prompts.
        failure: why it could not be measured in all rounds, or None.
        load: the answer of its first load: ``versions``, ``notes``, ``memory``.
    """

    mode: Mode
    rounds: list[list[Run]] = field(default_factory=list)
    failure: str | None = None
    load: dict[str, Any] = field(default_factory=dict)


def available_memory() -> int:
    """Return the bytes that new processes can have without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Measurement:
    """Run modes in turn.

    Args:
        start: returns a new worker for a peer; raises ``PeerError`` if the peer cannot be installed.
        say: called with progress messages.
        available: returns the free memory in bytes.
    """

    def __init__(
        self,
        modes: Sequence[Mode],
        settings: Settings,
        start: Callable[[str], Worker],
        say: Callable[[str], None] = lambda _: None,
        available: Callable[[], int] = available_memory,
    ) -> None:
        self.outcomes = [Outcome(mode) for mode in modes]
        self._settings, self._start, self._say, self._available = settings, start, say, available
        self._workers: dict[Mode, Worker] = {}
        self._jobs: dict[Mode, dict[str, Any]] = {}  # seconds of loading, and the results of ``prepare``
        self._largest = 0

    def prepare(self) -> None:
        """Convert checkpoints in processes that end afterwards, since conversion takes memory."""
        for outcome in self.outcomes:
            mode = outcome.mode
            outcome.failure = self._settings.lacks(mode)
            if outcome.failure is None:
                self._say(f"preparing {mode}")
                with _Failing(outcome, self._say):
                    job = self._settings.job(mode, "prepare", exported(mode, self._settings))
                    worker = self._start(mode.peer)
                    try:
                        self._jobs[mode] = {**job, **worker.ask(job), "op": "load"}
                    finally:
                        worker.close()

    def run(self, prompts: Sequence[Sequence[int]], rounds: int) -> None:
        """Run every mode once per round; a failed one is left out from then on."""
        for number, order in enumerate(turns(len(self.outcomes), rounds), 1):
            for outcome in (self.outcomes[index] for index in order):
                if outcome.failure is None:
                    self._say(f"round {number} of {rounds}: {outcome.mode}")
                    with _Failing(outcome, self._say):
                        outcome.rounds.append(self._turn(outcome, prompts))
                    self._make_room(outcome.mode, failed=outcome.failure is not None)
        self.close()

    def _turn(self, outcome: Outcome, prompts: Sequence[Sequence[int]]) -> list[Run]:
        worker = self._workers.get(outcome.mode)
        job = {"op": "generate", "prompts": [list(prompt) for prompt in prompts]}
        if worker is None:
            worker = self._workers[outcome.mode] = self._start(outcome.mode.peer)
            told = worker.ask(self._jobs[outcome.mode])
            outcome.load = outcome.load or told
            # A run's first tokens pay for what is allocated or compiled once.
            worker.ask(
                {**job, "prompts": job["prompts"][:1], "max_tokens": min(WARM_UP_TOKENS, self._settings.max_tokens)}
            )
        answer = worker.ask({**job, "max_tokens": self._settings.max_tokens})
        self._largest = max(self._largest, answer["memory"])
        return [Run(**run) for run in answer["runs"]]

    def _make_room(self, mode: Mode, *, failed: bool) -> None:
        """Keep the worker for the next round unless it failed or the next mode might need its memory."""
        if failed or self._available() < ROOM * self._largest:
            worker = self._workers.pop(mode, None)
            if worker is not None:
                worker.close()

    def close(self) -> None:
        """End all workers."""
        while self._workers:
            self._workers.popitem()[1].close()


class _Failing:
    """Write a peer's failure into its outcome instead of ending the run."""

    def __init__(self, outcome: Outcome, say: Callable[[str], None]) -> None:
        self._outcome, self._say = outcome, say

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> bool:
        if not isinstance(error, PeerError):
            return False
        self._outcome.failure = str(error)
        self._say(f"{self._outcome.mode} failed: {error}")
        return True
