"""Whether something else had the processors while this process wanted them, by what Linux counts for each thread."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["Undisturbed", "waited_seconds"]

TASKS = Path("/proc/self/task")
SHARE, MOMENT = 0.02, 20e-6  # of a span, and seconds: as much waiting is what any machine does by itself


def waited_seconds() -> float:
    """Seconds that this process's threads have been ready to run and did not; 0 where the system does not say."""
    waited = 0
    try:
        with os.scandir(TASKS) as tasks:
            for task in tasks:
                try:
                    with open(f"{task.path}/schedstat", "rb") as file:
                        waited += int(file.read().split()[1])
                except (OSError, ValueError, IndexError):
                    pass  # a thread that has ended meanwhile
    except OSError:
        return 0.0  # not Linux
    return waited * 1e-9


class Undisturbed:
    """Around something that is timed; true where no thread had to wait for a processor meanwhile."""

    def __enter__(self) -> Undisturbed:
        self._waited, self._began = waited_seconds(), time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        spent = time.perf_counter() - self._began
        self._is_so = waited_seconds() - self._waited <= SHARE * spent + MOMENT

    def __bool__(self) -> bool:
        return self._is_so
