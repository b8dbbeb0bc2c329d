"""One thread that owns the model: requests come from anywhere, and what it writes goes back piece by piece.

``Worker.submit`` gives a ``Ticket``. The thread puts what each step wrote into the tickets and calls ``on_news`` of
each; ``Ticket.take`` hands over all that has come since the last time. Nobody who reads slowly holds the thread up, and
what waits for him is bounded by what his request may write.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftwing.engine import Engine
from draftwing.errors import BusyError, ClosedError, ConfigError, DraftwingError, shown
from draftwing.request import Request
from draftwing.sampling import Sampling
from draftwing.stats import RowStep, Step

_MOST_PARTS = 256  # steps that wait for a reader one by one; from there on they are joined


@dataclass(frozen=True)
class Part:
    """What one step, or several that nobody read in time, wrote for a request.

    Attributes:
        row: the request's share of the step; of several steps, their texts, tokens and log-probabilities together.
        step: the step, where the ticket keeps steps and this is a single one.
        place: of ``row`` among the step's rows: the row of its tree.
        at: ``time.monotonic`` when it was written, the last one of several.
    """

    row: RowStep
    step: Step | None = None
    place: int = 0
    at: float = 0.0


class Ticket:
    """A request in the hands of a ``Worker``. ``Worker.submit`` makes it; any one thread reads it.

    Attributes:
        request: the request itself. Until the ticket ``is_done`` the worker's thread adds to it.
        submitted_at, first_at, last_at: ``time.monotonic`` when it was submitted, and when its first and its latest
            tokens came; 0 before.
    """

    def __init__(self, request: Request, on_news: Callable[[], None], *, keeps_steps: bool = False) -> None:
        self.request = request
        self.submitted_at, self.first_at, self.last_at = time.monotonic(), 0.0, 0.0
        self._on_news, self._keeps_steps = on_news, keeps_steps
        self._lock = threading.Lock()
        self._parts: list[Part] = []
        self._is_done = False
        self._is_told = False

    @property
    def is_done(self) -> bool:
        """Whether nothing more comes, but for what ``take`` has yet to hand over."""
        return self._is_done

    def take(self) -> tuple[list[Part], bool]:
        """All that has come since the last call, and whether that is the end. Never waits."""
        with self._lock:
            parts, self._parts, self._is_told = self._parts, [], False
            return parts, self._is_done

    def put(self, part: Part) -> None:
        """Add what a step wrote. The worker's thread calls this."""
        with self._lock:
            self.last_at = time.monotonic()
            self.first_at = self.first_at or self.last_at
            if len(self._parts) >= _MOST_PARTS:
                self._parts[-1] = Part(_joined(self._parts[-1].row, part.row), at=self.last_at)
            else:
                self._parts.append(replace(part, step=part.step if self._keeps_steps else None, at=self.last_at))
        self._tell()

    def end(self) -> None:
        """Nothing more comes. The worker's thread calls this."""
        with self._lock:
            self._is_done = True
        self._tell()

    def _tell(self) -> None:
        """Wake the reader once for all that it has not taken yet."""
        with self._lock:
            told, self._is_told = self._is_told and not self._is_done, True
        if not told:
            try:
                self._on_news()
            except Exception:  # a reader that is gone, such as an event loop that was closed
                self.request.finish_reason = self.request.finish_reason or "cancelled"


class Worker:
    """Decodes what is submitted in a thread of its own, which sleeps while there is nothing.

    Args:
        engine: with nothing in it; from now on only this worker may touch it.
        max_running: requests that the engine decodes at once.
        max_waiting: requests beyond these that may wait; more are refused.
        on_step: called in the worker's thread with each step and its tickets by request id, before they are told.

    Attributes:
        error: what broke the engine; all requests then end with it, and none is taken any more.

    Raises:
        ConfigError: a limit that is no number from its least on.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_running: int,
        max_waiting: int = 64,
        on_step: Callable[[Step, dict[int, Ticket]], None] | None = None,
        on_end: Callable[[Ticket], None] | None = None,
    ) -> None:
        for name, value, least in (("max_running", max_running, 1), ("max_waiting", max_waiting, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be at least {least}, found {shown(value)}: give a whole number")
        self.engine, self._most = engine, max_running + max_waiting
        self._on_step, self._on_end = on_step, on_end
        self._changed = threading.Condition()
        self._open: dict[int, Ticket] = {}
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

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        on_news: Callable[[], None],
        *,
        keeps_steps: bool = False,
        **options: Any,
    ) -> Ticket:
        """Put a request into the queue, from any thread.

        Args:
            prompt_ids, sampling, options: see ``Engine.submit``.
            on_news: called in the worker's thread whenever there is something to take that was not told before; it
                must not wait for anything.
            keeps_steps: whether parts carry their ``Step``.

        Raises:
            BusyError: too many wait.
            ClosedError: the worker drains, stopped or broke.
            PromptError, SamplingError, ConfigError: it cannot be decoded.
        """
        with self._changed:
            self._check_open()
            if len(self._open) >= self._most:
                raise BusyError(
                    f"{len(self._open)} requests run or wait already, the most that are taken: try again in a while"
                )
            ticket = Ticket(self.engine.submit(prompt_ids, sampling, **options), on_news, keeps_steps=keeps_steps)
            self._open[ticket.request.id] = ticket
            self._changed.notify_all()
            return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request where it stands; one that has ended stays as it is."""
        with self._changed:
            if ticket.request.id in self._open:
                self.engine.cancel(ticket.request)
                self._changed.notify_all()

    def drain(self) -> None:
        """Take no more requests; those that run or wait are finished."""
        with self._changed:
            self._is_draining = True

    def stop(self, timeout: float = 10.0) -> bool:
        """Cancel everything and end the thread; whether it ended within ``timeout`` seconds."""
        with self._changed:
            self._is_draining = self._is_stopped = True
            for ticket in self._open.values():
                self.engine.cancel(ticket.request)
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _check_open(self) -> None:
        if self.error is not None:
            raise ClosedError(f"the engine broke, and takes no requests: restart the server ({self.error})")
        if self._is_draining:
            raise ClosedError("the server is shutting down, and takes no new requests: ask another one")

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait():
            try:
                for step in self.engine.steps():
                    self._hand_out(step)
            except Exception as error:  # whatever it is, nobody may be left waiting
                self._break(error)
                return
            self._end_finished()

    def _wait(self) -> bool:
        """Sleep until there is work; False at the end."""
        with self._changed:
            while not self._open and not self._is_stopped:
                self._changed.wait()
            return bool(self._open)

    def _hand_out(self, step: Step) -> None:
        with self._changed:  # whoever is submitting just now: until its ticket is known
            tickets = dict(self._open)
        if self._on_step is not None:
            self._on_step(step, tickets)
        for place, row in enumerate(step.rows):
            ticket = tickets.get(row.request_id)
            if ticket is not None:
                ticket.put(Part(row, step, place))
        self._end_finished()

    def _end_finished(self) -> None:
        """Close the tickets of requests that have ended, in a step or outside of one."""
        with self._changed:
            ended = [ticket for ticket in self._open.values() if ticket.request.finish_reason is not None]
            for ticket in ended:
                del self._open[ticket.request.id]
        for ticket in ended:
            self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        if self._on_end is not None:
            self._on_end(ticket)
        ticket.end()

    def _break(self, error: Exception) -> None:
        """The engine is in no state to go on: every request ends with the reason."""
        with self._changed:
            self.error = ClosedError(f"the engine broke: {type(error).__name__}: {error}")
            ended, self._open = list(self._open.values()), {}
        for ticket in ended:
            ticket.request.finish_reason, ticket.request.error = "error", self.error
            self._end(ticket)


def _joined(first: RowStep, then: RowStep) -> RowStep:
    """Two shares of one request, one after the other, as one."""
    logprobs = (*(first.logprobs or ()), *(then.logprobs or ())) if then.logprobs is not None else first.logprobs
    return replace(
        then,
        token_ids=(*first.token_ids, *then.token_ids),
        num_drafted=first.num_drafted + then.num_drafted,
        num_accepted=first.num_accepted + then.num_accepted,
        position=first.position,
        text=first.text + then.text,
        logprobs=logprobs,
    )
