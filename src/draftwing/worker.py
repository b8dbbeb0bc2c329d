"""A thread that owns an engine: any thread submits requests, and results come back step by step.

``Worker.submit`` returns a ``Ticket``. After each step the worker's thread adds the new text to the tickets and calls
their ``on_news``; ``Ticket.take`` returns everything since the previous call. A slow reader does not block the thread:
from ``_MAX_PARTS`` unread parts on, new ones are merged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from draftwing.engine import Engine
from draftwing.errors import BusyError, ClosedError, ConfigError, DraftwingError, shown
from draftwing.request import Request
from draftwing.sampling import Sampling
from draftwing.stats import RowStep, Step

_MAX_PARTS = 256
_CLOSED = "the server is shutting down and accepts no new requests: use another one"


@dataclass(frozen=True)
class Part:
    """The output of one step, or of several merged ones, for a request."""

    row: RowStep  # the request's share of the step; if merged, with all texts, tokens and log-probabilities
    step: Step | None = None  # the step, if the ticket keeps steps and this is a single one
    place: int = 0  # the index of ``row`` among the step's rows
    at: float = 0.0  # ``time.monotonic`` after the (last) step


class Ticket:
    """A request that a ``Worker`` decodes, made by ``Worker.submit``. One thread reads it.

    Attributes:
        request: the request; the worker's thread changes it until ``is_done``.
        submitted_at: ``time.monotonic`` at submission.
        keeps_steps: if True, parts carry their ``Step``.
        is_done: True once no more parts come; ``take`` may still return earlier ones.
    """

    def __init__(self, request: Request, on_news: Callable[[], None], *, keeps_steps: bool = False) -> None:
        self.request, self.keeps_steps, self.is_done = request, keeps_steps, False
        self.submitted_at = time.monotonic()
        self._on_news = on_news
        self._lock = threading.Lock()
        self._parts: list[Part] = []
        self._is_woken = False

    def take(self) -> tuple[list[Part], bool]:
        """Return the parts since the last call, and True if they are the last ones. Never blocks."""
        with self._lock:
            parts, self._parts, self._is_woken = self._parts, [], False
            return parts, self.is_done

    def put(self, part: Part | None) -> None:
        """Add a part, or None for the end, and wake the reader unless it was woken since its last ``take``."""
        with self._lock:
            if part is None:
                self.is_done = True
            elif len(self._parts) < _MAX_PARTS:
                self._parts.append(part)
            else:
                first, then = self._parts[-1].row, part.row
                row = replace(
                    then,
                    token_ids=(*first.token_ids, *then.token_ids),
                    num_drafted=first.num_drafted + then.num_drafted,
                    num_accepted=first.num_accepted + then.num_accepted,
                    position=first.position,
                    text=first.text + then.text,
                    logprobs=(*(first.logprobs or ()), *(then.logprobs or ())),
                )
                self._parts[-1] = Part(row, at=part.at)
            wakes, self._is_woken = self.is_done or not self._is_woken, True
        if wakes:
            try:
                self._on_news()
            except Exception:  # the reader is gone, for example a closed event loop
                self.request.finish_reason = self.request.finish_reason or "cancelled"


class Worker:
    """Decodes submitted requests in its own thread, which sleeps while there are none.

    Args:
        engine: an empty engine; from now on only this worker may use it.
        max_running: requests that the engine decodes at once.
        max_waiting: requests beyond these that may wait; more are refused.
        on_step: called in the worker's thread with each step and its tickets by request id, before readers are woken.
        on_end: called in the worker's thread with each ticket that has ended.

    Attributes:
        max_open: requests that may run or wait.
        error: the error that broke the engine; all requests end with it, and no more are accepted.

    Raises:
        ConfigError: a limit that is not a whole number in its range.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_running: int,
        max_waiting: int = 64,
        on_step: Callable[[Step, dict[int, Ticket]], None] = lambda step, tickets: None,
        on_end: Callable[[Ticket], None] = lambda ticket: None,
    ) -> None:
        for name, value, least in (("max_running", max_running, 1), ("max_waiting", max_waiting, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be at least {least}, found {shown(value)}: give a whole number")
        self.engine, self.max_open = engine, max_running + max_waiting
        self._on_step, self._on_end = on_step, on_end
        self._changed = threading.Condition()
        self._open: dict[int, Ticket] = {}
        self._num_accepted = 0
        self._is_draining = self._is_stopped = False
        self.error: DraftwingError | None = None
        self._thread = threading.Thread(target=self._run, name="draftwing-worker", daemon=True)

    def start(self) -> Worker:
        """Start the thread."""
        self._thread.start()
        return self

    @property
    def state(self) -> str:
        """``running``, ``draining``, ``failed`` or ``stopped``."""
        if self.error is not None:
            return "failed"
        return "stopped" if self._is_stopped else "draining" if self._is_draining else "running"

    @property
    def num_open(self) -> int:
        """Requests that run or wait."""
        return len(self._open)

    @property
    def num_accepted(self) -> int:
        """Clients' requests that ``accept`` counts."""
        return self._num_accepted

    @contextmanager
    def accept(self) -> Iterator[None]:
        """Count a client's request from its arrival until it is answered. Requests inside may be submitted in a drain.

        Raises:
            ClosedError: the worker is draining or has stopped.
        """
        with self._changed:
            if self._is_draining:
                raise ClosedError(_CLOSED)
            self._num_accepted += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_accepted -= 1

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        on_news: Callable[[], None],
        *,
        keeps_steps: bool = False,
        **options: Any,
    ) -> Ticket:
        """Queue a request, from any thread.

        Args:
            prompt_ids, sampling, options: see ``Engine.submit``.
            on_news: called in the worker's thread when there is something new to take; it must not block.
            keeps_steps: if True, parts carry their ``Step``.

        Raises:
            BusyError: too many requests wait.
            ClosedError: the worker is draining, has stopped or has failed.
            PromptError, SamplingError, ConfigError: the request is invalid.
        """
        with self._changed:
            if self.error is not None:
                raise ClosedError(f"the engine failed and accepts no requests ({self.error}): restart the server")
            if self._is_stopped or (self._is_draining and not self._num_accepted):
                raise ClosedError(_CLOSED)
            if len(self._open) >= self.max_open:
                raise BusyError(f"{len(self._open)} requests run or wait already, which is the limit: try again later")
            ticket = Ticket(self.engine.submit(prompt_ids, sampling, **options), on_news, keeps_steps=keeps_steps)
            self._open[ticket.request.id] = ticket
            self._changed.notify_all()
            return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request early; has no effect on one that has ended."""
        with self._changed:
            if ticket.request.id in self._open:
                self.engine.cancel(ticket.request)
                self._changed.notify_all()

    def drain(self) -> None:
        """Accept no more requests; those that were accepted, run or wait are finished."""
        with self._changed:
            self._is_draining = True

    def stop(self, timeout: float = 10.0) -> bool:
        """Cancel all requests and end the thread. Return True if it ended within ``timeout`` seconds."""
        with self._changed:
            self._is_draining = self._is_stopped = True
            for ticket in self._open.values():
                self.engine.cancel(ticket.request)
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._is_stopped)
                if not self._open:
                    return
            try:
                for step in self.engine.steps():
                    with self._changed:  # a thread that is submitting holds the lock until its ticket is registered
                        tickets = dict(self._open)
                    self._on_step(step, tickets)
                    for place, row in enumerate(step.rows):
                        if ticket := tickets.get(row.request_id):
                            ticket.put(Part(row, step if ticket.keeps_steps else None, place, time.monotonic()))
                    self._close_finished()
            except Exception as error:  # whatever its class: no reader may wait forever
                with self._changed:
                    self.error = ClosedError(f"the engine failed: {type(error).__name__}: {error}")
                    for ticket in self._open.values():
                        ticket.request.finish_reason, ticket.request.error = "error", self.error
            self._close_finished()
            if self.error is not None:
                return

    def _close_finished(self) -> None:
        with self._changed:
            finished = [ticket for ticket in self._open.values() if ticket.request.finish_reason is not None]
            for ticket in finished:
                del self._open[ticket.request.id]
        for ticket in finished:
            self._on_end(ticket)
            ticket.put(None)
