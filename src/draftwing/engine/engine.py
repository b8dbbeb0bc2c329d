"""Requests in, texts out: a queue in front of the decode loop.

Whoever generates (streams, batches, ``custom_generate``, training's own measurements, a server) submits requests and
drives ``Engine.step``; nobody else loops over the decoder.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from operator import index

from draftwing.constraint import Constraint
from draftwing.drafters.base import Budget
from draftwing.engine.decode import Decoder
from draftwing.engine.queue import EngineStats, Queue, check_rows, check_urgency
from draftwing.engine.request import Request
from draftwing.engine.wishes import AtMost, check_constraint, checked_drafts
from draftwing.errors import ConfigError, DraftwingError, PromptError, shown
from draftwing.sampling import Sampling
from draftwing.stats import Step
from draftwing.text.stream import TokenDecoder

__all__ = ["Engine", "Speculation"]

Speculation = Budget | AtMost | str | None  # of one request: a budget, "none", or the engine's own way, or up to a size


class Engine:
    """Decodes whatever is submitted, at most ``max_batch`` requests at once; rows that end make room for waiting ones.

    Requests may be submitted and cancelled at any time, from any thread; one thread steps.

    Args:
        decoder: the loop, with nothing in it.
        max_batch: requests decoded at once; None for all.
        tokenizer: makes text of what is emitted; None: requests are token ids alone, and have no stop strings.

    Raises:
        ConfigError: ``max_batch`` is no whole number from 1 on.
    """

    def __init__(
        self, decoder: Decoder, *, max_batch: int | None = None, tokenizer: TokenDecoder | None = None
    ) -> None:
        if max_batch is not None and (isinstance(max_batch, bool) or not isinstance(max_batch, int) or max_batch < 1):
            raise ConfigError(f"max_batch must be at least 1, found {max_batch!r}: give a whole number")
        self._decoder, self._max_batch, self._tokenizer = decoder, max_batch, tokenizer
        decoder.is_lone = max_batch == 1
        self._waiting = Queue()
        self._timed: list[Request] = []  # with a deadline
        self._ids = itertools.count()
        self._has_cancelled = False

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._decoder.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._waiting)

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        *,
        speculation: Speculation = None,
        references: Sequence[Sequence[int]] = (),
        constraint: Constraint | None = None,
        drafts: Sequence[str] | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> Request:
        """Put a request into the queue; a bad one is refused here, before any work is done.

        Args:
            prompt_ids: token ids.
            sampling: greedy decoding of 128 tokens where it is None.
            speculation: how much to draft for it: a ``Budget``, ``"none"``, None for as much as the engine drafts, or
                ``AtMost(nodes)`` for as much of that. In a batch whose rows differ, all are drafted as wide as the
                widest, and each as deep as it says.
            references: texts, as ids, that are likely to be repeated; draft ``"llma"`` copies from them.
            constraint: what the text may say, such as a grammar (``text.grammar``); whatever is drafted.
            drafts: of several drafts (``draft="eagle3+lookup"``) the names of those that propose for this request, as
                they were loaded; None for all, an empty list for none.
            priority: requests with more of it come before those with less, and those before that came first.
            deadline: seconds of ``time.monotonic`` at which it ends, with the finish reason ``deadline``.

        Raises:
            PromptError, SamplingError, ConfigError: it cannot be decoded.
        """
        sampling = sampling or Sampling()
        self._decoder.check(prompt_ids, sampling)
        budget = self._budget_of(speculation)
        self._check_room(prompt_ids, sampling, budget)
        ids = _checked(references, self._decoder.target.vocab_size)
        if constraint is not None:
            check_constraint(constraint, sampling)
        if drafts is not None:
            drafts = checked_drafts(drafts, self._decoder.draft_names)
            budget = budget if drafts else self._decoder.checked(Budget(0))
        check_urgency(priority, deadline)
        wishes = (constraint, drafts, priority, deadline)
        request = Request(next(self._ids), prompt_ids, sampling, budget, self._tokenizer, ids, *wishes)
        self._enqueue(request)
        return request

    def _check_room(self, prompt_ids: Sequence[int], sampling: Sampling, budget: Budget | AtMost | None) -> None:
        """Raise ``PromptError`` for a text that would never fit. Here slots grow with it."""

    def _enqueue(self, request: Request) -> None:
        self._waiting.append(request)
        if request.deadline is not None:
            self._timed.append(request)

    def cancel(self, request: Request) -> None:
        """End a request where it stands, with the finish reason ``cancelled``; one that has ended stays as it is."""
        request.finish_reason = request.finish_reason or "cancelled"
        self._has_cancelled = True

    def step(self) -> Step:
        """Let waiting requests into free rows and advance every row by at least one token.

        Raises:
            ConfigError: there is nothing to decode.
        """
        if self._waiting.inbox or self._waiting.heap or self._has_cancelled or self._timed:
            self._fill()
        return self._advance()

    def steps(self) -> Iterator[Step]:
        """Steps until every request has ended, those submitted on the way too."""
        while self._fill():
            yield self._advance()

    def run(self) -> None:
        """All of them at once."""
        while self._fill():
            self._advance()

    def _advance(self) -> Step:
        """A step of the loop; what its drafter learns, it learns before, where no clock of a step runs."""
        if self._decoder.drafter.traits.learns:
            self._decoder.learn()
        return self._decoder.step()

    def _fill(self) -> int:
        """Take cancelled requests out and let waiting ones in; how many there are then."""
        decoder, waiting = self._decoder, self._waiting
        if decoder.undone is not None:
            return len(decoder.running)
        decoder.settle()
        self._sweep()
        while waiting and len(decoder.running) < (self._max_batch or math.inf):
            request = waiting.first()
            if request.finish_reason is None and request not in decoder.running:
                try:
                    decoder.start(request)
                except DraftwingError as error:  # its own: the others go on
                    request.error, request.finish_reason = error, "error"
            waiting.drop(request)  # only now: an interrupt must not lose it
        return len(decoder.running)

    def _sweep(self) -> None:
        """Take the rows out that were cancelled, or whose time is up."""
        if self._timed:
            now = time.monotonic()
            for request in list(self._timed):  # others append meanwhile
                if request.deadline is not None and request.deadline <= now and request.finish_reason is None:
                    request.finish_reason, self._has_cancelled = "deadline", True
                if request.finish_reason is not None:
                    self._timed.remove(request)
        if self._has_cancelled:
            self._has_cancelled = False
            self._decoder.sweep()

    @property
    def stats(self) -> EngineStats:
        """How busy it is, as plain numbers; may be read from any thread."""
        return EngineStats(self.num_running, self.num_waiting, num_faults=self._decoder.faults.num)

    def room_for(self, num_prompt_tokens: int) -> int:
        """How many tokens such a prompt may be answered with at most; below 1, none."""
        return self._decoder.target.max_length - num_prompt_tokens

    def check(self) -> None:
        """See that requests, rows of the target and rows of the drafter are the same.

        Raises:
            SlotsError: they are not, which is a bug of Draftwing.
        """
        self._decoder.settle()
        check_rows(self._decoder)

    def _budget_of(self, speculation: Speculation) -> Budget | AtMost | None:
        if speculation is None or isinstance(speculation, AtMost):
            return speculation
        if speculation == "none":
            return self._decoder.checked(Budget(0))
        if not isinstance(speculation, Budget):
            raise ConfigError(
                f"speculation must be a Budget, 'none' or None, found {speculation!r:.60}: write Budget(5) for chains "
                f"of 5 tokens"
            )
        return self._decoder.checked(speculation)


def _checked(references: Sequence[Sequence[int]], vocab_size: int) -> list[list[int]]:
    """References as lists of ids. Raises PromptError where they are something else."""
    try:
        ids = [list(map(index, reference)) for reference in references]
        if not any(isinstance(each, str) for each in references) and all(
            0 <= token < vocab_size for reference in ids for token in reference
        ):
            return ids
    except TypeError:
        pass
    raise PromptError(
        f"references must be lists of token ids from 0 to {vocab_size - 1:,}, found {shown(references)}: encode each "
        f"text first"
    )
