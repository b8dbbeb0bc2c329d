"""Who waits in front of the loop, in which order, and how busy an engine is."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftwing.engine.request import Request
from draftwing.errors import ConfigError, SlotsError, shown

if TYPE_CHECKING:
    from draftwing.engine.decode import Decoder

__all__ = ["EngineStats", "Queue", "check_rows", "check_urgency", "rank"]


@dataclass(frozen=True)
class EngineStats:
    """How busy an engine is.

    Attributes:
        num_running: requests in the batch.
        num_waiting: requests that wait for a row, or whose prompt is being read.
        num_preempted: how often a row gave its slots up for others.
        num_prefix_queries, num_prefix_hits: tokens of prompts that were to be read, and those of them that were found
            in the slots of former rows.
        num_slots, num_slots_used: of the stated memory, those that rows hold; 0 where none was stated.
        num_faults: what drafters raised; texts went on without them.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_preempted: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_slots: int = 0
    num_slots_used: int = 0
    num_faults: int = 0


def rank(request: Request) -> tuple[int, int]:
    """Where a request stands among others: the smaller, the sooner."""
    return -request.priority, request.id


def check_urgency(priority: int, deadline: float | None) -> None:
    """Raise ConfigError where these are no priority and no deadline."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ConfigError(f"priority must be a whole number, found {shown(priority)}: 0 is that of most requests")
    if deadline is not None and (
        isinstance(deadline, bool) or not isinstance(deadline, int | float) or math.isnan(deadline)
    ):
        raise ConfigError(f"deadline must be seconds of time.monotonic() or None, found {shown(deadline)}")


class Queue:
    """Requests that wait. Any thread may append; the one that steps asks for the first.

    Attributes:
        inbox, heap: those that came since ``first`` was last asked for, and the others.
    """

    def __init__(self) -> None:
        self.inbox: deque[Request] = deque()
        self.heap: list[tuple[tuple[int, int], int, Request]] = []
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self.inbox) + len(self.heap)

    def append(self, request: Request) -> None:
        """Let it wait; one that comes back takes the place that it had."""
        self.inbox.append(request)

    def first(self) -> Request:
        """The next one, which goes on waiting until it is dropped. There must be one."""
        while self.inbox:
            request = self.inbox[0]
            heapq.heappush(self.heap, (rank(request), next(self._count), request))
            self.inbox.popleft()  # only now: an interrupt must not lose it
        return self.heap[0][2]

    def drop(self, request: Request) -> None:
        """It waits no more, if it is still the first."""
        if self.heap and self.heap[0][2] is request:
            heapq.heappop(self.heap)


def check_rows(decoder: Decoder) -> None:
    """Raise SlotsError where a decoder's requests are not the rows of its target and its drafter."""
    drafter, rows = decoder.drafter, decoder.ctx.rows
    if len(rows) != len(decoder.running):
        raise SlotsError(f"{len(decoder.running)} requests run in {len(rows)} rows: this is a bug of Draftwing")
    for place, (request, row) in enumerate(zip(decoder.running, rows, strict=True)):
        if row.tokens != [*request.prompt_ids, *request.token_ids] or row.length != len(row.tokens) - 1:
            raise SlotsError(f"row {place} does not hold the text of request {request.id}: this is a bug of Draftwing")
    if drafter.traits.resumes:
        read = drafter.num_read  # type: ignore[attr-defined]  # see ``Resuming``
        if len(read) != len(rows) or any(num > row.length for num, row in zip(read, rows, strict=True)):
            raise SlotsError(
                f"{drafter.name} has read {read} tokens of rows of {[row.length for row in rows]}: this is a bug of "
                f"Draftwing"
            )
