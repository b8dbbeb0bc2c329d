"""Requests in, text out: a queue in front of the decode loop.

Every generator (streams, batches, ``custom_generate``, training's measurements, the server) submits requests and calls
``Engine.step``.

With ``kv_memory``, each step reads at most ``PREFILL_PIECE`` tokens of waiting prompts (``PREFILL_CHUNK`` on a GPU) and
then decodes all rows once, so that a long prompt does not stall the others. A request is admitted when memory will
probably hold what all requests may still need. If memory runs out, the least important row, and of these the youngest,
is preempted; it is read again, with all that it has emitted, when there is room.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import NoneType
from typing import Any

from draftwing.checks import BATCH_SIZE, MAX_TOKENS, Argument, check_arguments, listed
from draftwing.constraint import Constraint
from draftwing.decode import MAX_ROWS, Decoder, Prefill, tree_slots
from draftwing.errors import ConfigError, DraftwingError, PromptError, shown
from draftwing.methods.base import Budget
from draftwing.models.paged import PAGE, PageTable, SlotsExhausted, pages_of
from draftwing.request import AtMost, Request, budget_for_rule, check_constraint, check_drafts
from draftwing.runtime.forward import PREFILL_CHUNK
from draftwing.sampling import Sampling
from draftwing.stats import Step
from draftwing.text.tokenizer import TokenDecoder, check_decoder

OPTIMISM = 0.5  # share of the remaining tokens that requests are expected not to need: most end early
# Tokens of prompts that a step on a CPU reads next to its rows, which wait that long. More tokens are not faster each;
# fewer cost throughput, since the rows are stepped more often for them.
PREFILL_PIECE = 128

Speculation = Budget | AtMost | str | None  # see ``Engine.submit``

_ARGUMENTS = {
    "decoder": Argument((Decoder,), "a Decoder, as from LM.decoder()"),
    "max_batch": BATCH_SIZE,
    "optimism": Argument((int, float), "a number from 0 to 1", least=0, most=1),
    "priority": Argument((int,), "a whole number", "0 is that of most requests"),
    "deadline": Argument((int, float, NoneType), "seconds of time.monotonic() or None", least=-math.inf),
    "request": Argument((Request,), "a Request, as from Engine.submit()"),
    "num_prompt_tokens": Argument((int,), "a whole number"),
}


@dataclass(frozen=True)
class EngineStats:
    """The load of an engine.

    Attributes:
        num_running: requests in the batch.
        num_waiting: requests that wait for a row, or whose prompt is being read.
        num_preempted: rows that were preempted.
        num_prefix_queries, num_prefix_hits: prompt tokens that were to be read, and those found in the pages of other
            requests.
        num_slots, num_slots_used: slots of the stated memory, and those that rows hold; 0 without ``kv_memory``.
        num_faults: exceptions of drafters; requests continued without them.
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
    """The order of requests: smaller comes first."""
    return -request.priority, request.id


class Engine:
    """Decodes submitted requests, at most ``max_batch`` at once; rows that end make room for waiting ones.

    Requests may be submitted and cancelled at any time, from any thread; one thread steps.

    Args:
        decoder: the decode loop, without requests.
        max_batch: requests decoded at once; None for all, or for 256 with ``kv_memory``.
        tokenizer: detokenizes the output; None: requests have ids only, and no stop strings.
        optimism: with ``kv_memory``, the share of the tokens that requests may still emit for which no memory is
            reserved. 0: no row is ever preempted.

    Attributes:
        decoder: the decode loop.
        prefill: the request whose prompt is being read in pieces; None if there is none.

    Raises:
        ConfigError: ``max_batch`` is not an integer of at least 1, or ``optimism`` not a number from 0 to 1.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_batch: int | None = None,
        tokenizer: TokenDecoder | None = None,
        optimism: float = OPTIMISM,
    ) -> None:
        check_arguments(_ARGUMENTS, {"decoder": decoder, "max_batch": max_batch, "optimism": optimism})
        if tokenizer is not None:
            check_decoder(tokenizer)
        self.decoder, self._tokenizer, self._optimism = decoder, tokenizer, optimism
        self._max_batch = max_batch or (math.inf if decoder.pages is None else MAX_ROWS)
        decoder.is_lone = max_batch == 1
        self.prefill: Prefill | None = None
        # Waiting requests. Any thread appends to the inbox; the thread that steps sorts them by ``rank`` into the heap.
        self._inbox: deque[Request] = deque()
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._timed: list[Request] = []  # with a deadline
        self._ids = itertools.count()
        self._num_preempted = 0
        self._has_cancelled = False
        self._is_filling = False  # an interrupt may have left pages unaccounted for
        # Tokens of prompts that are read next to running rows.
        piece = PREFILL_CHUNK if decoder.target.device.type == "cuda" else min(PREFILL_CHUNK, PREFILL_PIECE)
        self._piece = math.inf if decoder.pages is None else piece

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self.decoder.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row, or whose prompt is being read."""
        return len(self._inbox) + len(self._heap) + (self.prefill is not None)

    @property
    def stats(self) -> EngineStats:
        """The load, as plain numbers; may be read from any thread."""
        decoder, pages = self.decoder, self.decoder.pages
        return EngineStats(
            self.num_running,
            self.num_waiting,
            self._num_preempted,
            decoder.num_prefix_queries,
            decoder.num_prefix_hits,
            0 if pages is None else pages.num_pages * PAGE,
            0 if pages is None else (pages.num_pages - pages.num_available) * PAGE,
            decoder.faults.num,
        )

    # --- requests --------------------------------------------------------------------------------------------------

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
        """Put a request into the queue; an invalid one is refused here, before any work is done.

        Args:
            prompt_ids: token ids.
            sampling: None decodes 128 tokens greedily.
            speculation: how much to draft: a ``Budget``, ``"none"``, None for the engine's own, or ``AtMost(nodes)``
                for the engine's own up to a size. In steps that requests share, a tree is at most as large as the
                engine's own, or as 1.5 times the median if no request uses that, so that it does not slow the others;
                two nodes are always drafted.
            references: token sequences that are likely to be repeated; draft ``"llma"`` copies from them.
            constraint: restricts the text, such as a grammar (``text.grammar``).
            drafts: of combined drafts (``draft="eagle3+lookup"``) those that propose for this request, by their names;
                None for all, an empty list for none.
            priority: requests of higher priority come first; among equals, the earlier one.
            deadline: seconds of ``time.monotonic`` at which it ends, with the finish reason ``deadline``.

        Raises:
            PromptError, SamplingError, ConfigError: it cannot be decoded.
        """
        check_arguments(_ARGUMENTS, {"priority": priority, "deadline": deadline})
        sampling = Sampling() if sampling is None else sampling
        self.decoder.check(prompt_ids, sampling)
        budget = self._checked_speculation(speculation)
        self._check_room(prompt_ids, sampling, budget)
        reference_ids = _checked_references(references, self.decoder.target.vocab_size)
        if constraint is not None:
            check_constraint(constraint, sampling)
        if drafts is not None:
            drafts = check_drafts(drafts, self.decoder.draft_names)
            budget = budget if drafts else budget_for_rule(Budget(0), self.decoder.rule)
        request = Request(
            next(self._ids), prompt_ids, sampling, budget, self._tokenizer, reference_ids,
            constraint, drafts, priority, deadline,
        )  # fmt: skip
        self._inbox.append(request)
        if deadline is not None:
            self._timed.append(request)
        return request

    def _checked_speculation(self, speculation: Speculation) -> Budget | AtMost | None:
        if speculation is None or isinstance(speculation, AtMost):
            return speculation
        if isinstance(speculation, str) and speculation == "none":
            return budget_for_rule(Budget(0), self.decoder.rule)
        if not isinstance(speculation, Budget):
            raise ConfigError(
                f"speculation must be a Budget, 'none' or None, found {shown(speculation)}: write Budget(5) for chains "
                f"of 5 tokens"
            )
        return budget_for_rule(speculation, self.decoder.rule)

    def _check_room(self, prompt_ids: Sequence[int], sampling: Sampling, budget: Budget | AtMost | None) -> None:
        """Raise PromptError for a request that would never fit into memory."""
        pages, room = self.decoder.pages, self._room(len(prompt_ids), budget)
        if pages is not None and room < min(sampling.max_tokens, self.decoder.target.max_length - len(prompt_ids)):
            raise PromptError(
                f"a prompt of {len(prompt_ids)} tokens and an answer of {sampling.max_tokens} do not fit into the "
                f"{pages.num_pages * PAGE} KV slots that there are: give more kv_memory"
                + (f", or ask for {room} tokens at most" if room > 0 else ", or shorten it")
            )

    def room_for(self, num_prompt_tokens: int) -> int:
        """The most tokens that may follow such a prompt, by memory and context; below 1 for none."""
        check_arguments(_ARGUMENTS, {"num_prompt_tokens": num_prompt_tokens})
        return self._room(num_prompt_tokens, None)

    def _room(self, num_prompt_tokens: int, budget: Budget | AtMost | None) -> int:
        decoder, slots = self.decoder, self.decoder.target.max_length
        if decoder.pages is not None:
            budgets = [decoder.largest_budget, *([budget] if isinstance(budget, Budget) else [])]
            slots = min(slots, decoder.pages.num_pages * PAGE - tree_slots(budgets))
        return slots - num_prompt_tokens

    def cancel(self, request: Request) -> None:
        """End a request after the current step, with the finish reason ``cancelled``, unless it has ended."""
        check_arguments(_ARGUMENTS, {"request": request})
        request.finish_reason = request.finish_reason or "cancelled"
        self._has_cancelled = True

    # --- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """Admit waiting requests as far as there is room, and advance every row by at least one token.

        Raises:
            ConfigError: there is nothing to decode.
        """
        is_paged, has_waiting = self.decoder.pages is not None, self._inbox or self._heap
        if is_paged or has_waiting or self.prefill is not None or self._timed or self._has_cancelled:
            self._fill()
        return self._advance()

    def steps(self) -> Iterator[Step]:
        """Steps until every request has ended, including those submitted meanwhile."""
        while self._fill():
            yield self._advance()

    def run(self) -> None:
        """Take all ``steps``."""
        while self._fill():
            self._advance()

    def _advance(self) -> Step:
        """A step of the decode loop. One that runs out of slots has changed nothing, and is repeated with fewer rows.

        The drafter learns before, when no step is being timed.
        """
        decoder = self.decoder
        while True:
            if decoder.drafter.learns:
                decoder.learn()
            try:
                return decoder.step()
            except SlotsExhausted as error:
                if self.preempt():
                    continue
                for request in decoder.running:
                    request.error, request.finish_reason = error, "error"
                decoder.drop_ended()
                raise

    def _fill(self) -> int:
        """Drop ended requests and read waiting ones; returns the number of running requests."""
        decoder, pages = self.decoder, self.decoder.pages
        if decoder.unfinished is not None:
            return len(decoder.running)
        decoder.recover()
        if self._is_filling and pages is not None:  # an interrupt hit the last time
            del pages.rows[len(decoder.running) :]
            pages.recount(self._prefill_pages())
        self._is_filling, left = True, self._piece
        while True:
            self._drop_ended()
            if self.prefill is not None and self.prefill.request.finish_reason is not None:
                self._stop_prefill(waits=False)
            if not (left > 0 or not decoder.running) or not self._may_read():
                break
            left -= self._read(left if decoder.running else PREFILL_CHUNK)
        while pages is not None and self._num_wanted(pages) > pages.num_available and self.preempt():
            pass
        self._is_filling = False
        return len(decoder.running)

    def _drop_ended(self) -> None:
        """Drop the rows of requests that were cancelled or are past their deadline."""
        if self._timed:
            now = time.monotonic()
            for request in list(self._timed):  # other threads append meanwhile
                if request.deadline is not None and request.deadline <= now and request.finish_reason is None:
                    request.finish_reason, self._has_cancelled = "deadline", True
                if request.finish_reason is not None:
                    self._timed.remove(request)
        if self._has_cancelled:
            self._has_cancelled = False
            self.decoder.drop_ended()

    def _may_read(self) -> bool:
        """True if there is a prompt to read, and room for it; it is ``self.prefill`` then."""
        decoder, prefill = self.decoder, self.prefill
        if prefill is not None:
            if decoder.pages is None or not decoder.running:
                return True
            stop = min(prefill.done + PREFILL_CHUNK, prefill.row.length) + 1
            return self._num_wanted(decoder.pages) + pages_of(stop) - len(prefill.pages) <= decoder.pages.num_available
        while self._inbox or self._heap:
            while self._inbox:
                heapq.heappush(self._heap, (rank(self._inbox[0]), self._inbox[0]))
                self._inbox.popleft()  # only now: an interrupt must not lose it
            request = self._heap[0][1]
            if request.finish_reason is None and request not in decoder.running:
                if len(decoder.running) >= self._max_batch:
                    return False
                if decoder.pages is not None and decoder.running and not self._fits(decoder.pages, request):
                    return False
                self.prefill = decoder.begin(request)
                heapq.heappop(self._heap)  # only now: an interrupt must not lose it
                return True
            heapq.heappop(self._heap)
        return False

    def _read(self, max_tokens: float) -> int:
        """Continue the prefill; returns the number of tokens read."""
        prefill = self.prefill
        assert prefill is not None
        if prefill.request in self.decoder.running:  # an interrupt kept this from being noted
            self.prefill = None
            return 0
        done = prefill.done
        try:
            if self.decoder.read_on(prefill, max_tokens):
                self.prefill = None
        except DraftwingError as error:  # this request's own: the others continue
            if isinstance(error, SlotsExhausted) and self.decoder.running:
                self._stop_prefill()
                return int(max_tokens)
            prefill.request.error, prefill.request.finish_reason = error, "error"
            self._stop_prefill(waits=False)
        return max(prefill.done - done, 1)

    def _stop_prefill(self, *, waits: bool = True) -> None:
        """Stop reading the prompt; with ``waits`` its request returns to the queue."""
        assert self.prefill is not None
        self.decoder.drop(self.prefill)
        if waits:
            self._inbox.append(self.prefill.request)
        self.prefill = None

    # --- memory ----------------------------------------------------------------------------------------------------

    def _prefill_pages(self) -> list[list[int]]:
        """Pages that no row holds yet."""
        prefill = self.prefill
        return [prefill.pages] if prefill is not None and prefill.generation == self.decoder.generation else []

    def _tree_slots(self, *more: Request) -> int:
        """Slots after each row that a step of the running requests, and of ``more``, may need."""
        budgets = [request.speculation for request in (*self.decoder.running, *more)]
        return tree_slots([self.decoder.largest_budget, *(budget for budget in budgets if isinstance(budget, Budget))])

    def _num_expected(self, request: Request, tree: int) -> int:
        """Pages that a request will probably need, with ``tree`` slots after its tokens."""
        written = len(request.prompt_ids) + len(request.token_ids)
        end = min(len(request.prompt_ids) + request.sampling.max_tokens, self.decoder.target.max_length)
        return pages_of(written + math.ceil((1 - self._optimism) * max(end - written, 0)) + tree)

    def _fits(self, pages: PageTable, request: Request) -> bool:
        """True if there are the pages that all requests, including this one, will probably need."""
        decoder = self.decoder
        tree = self._tree_slots(request)
        expected = self._num_expected(request, tree) + sum(
            max(self._num_expected(running, tree) - len(held), 0)
            for running, held in zip(decoder.running, pages.rows, strict=True)
        )
        tokens = [*request.prompt_ids, *request.token_ids]
        if expected - pages_of(len(tokens)) > pages.num_available:
            return False
        prefix = pages.prefixes.find(tokens).pages if decoder.shares_prefixes else []
        return expected - sum(pages.uses[page] > 0 for page in prefix) <= pages.num_available

    def _num_wanted(self, pages: PageTable) -> int:
        """Pages that the next step may need in addition to those that rows hold."""
        tree = self._tree_slots()
        return sum(
            max(pages_of(row.length + 1 + tree) - len(held), 0)
            for row, held in zip(self.decoder.ctx.rows, pages.rows, strict=True)
        )

    def preempt(self) -> bool:
        """Free the slots of the least important request; False if no other one would remain."""
        decoder, prefill = self.decoder, self.prefill
        last = max(decoder.running, key=rank, default=None)
        is_reading = prefill is not None and bool(prefill.pages)
        if prefill is not None and (
            (is_reading and (last is None or rank(prefill.request) > rank(last))) or len(decoder.running) == 1
        ):
            self._stop_prefill()
        elif last is None or len(decoder.running) < 2:
            return False
        else:
            self._inbox.append(last)  # before it loses its row: an interrupt must not lose it
            decoder.preempt(last)
        self._num_preempted += 1
        return True


def _checked_references(references: Any, vocab_size: int) -> list[list[int]]:
    """References as lists of ids. Raises PromptError if they are something else."""
    lists = None if isinstance(references, str) else listed(references, MAX_TOKENS)
    ids = None if lists is None else [_ids(reference, vocab_size) for reference in lists]
    if ids is None or None in ids:
        raise PromptError(
            f"references must be lists of token ids from 0 to {vocab_size - 1:,}, found {shown(references)}: encode "
            f"each text first"
        )
    return [each for each in ids if each is not None]


def _ids(tokens: object, vocab_size: int) -> list[int] | None:
    """Return tokens as a list of ints; None if they are something else."""
    items: list[Any] | None = None if isinstance(tokens, str) else listed(tokens, MAX_TOKENS)
    if items is None or any(type(token) is bool or not isinstance(token, Integral) for token in items):
        return None
    ids = list(map(int, items))
    return ids if all(0 <= token < vocab_size for token in ids) else None
