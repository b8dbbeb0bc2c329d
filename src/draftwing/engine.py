"""Who waits in front of the loop, in which order, and how busy an engine is."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, cast

from torch import Tensor

from draftwing.constraint import Constraint
from draftwing.decode import Decoder
from draftwing.errors import ConfigError, DraftwingError, PromptError, SlotsError, UnsupportedError, shown
from draftwing.limits import AtMost, check_constraint, check_drafts
from draftwing.methods.base import Budget, Drafter
from draftwing.models.context import Context, Row
from draftwing.models.lean import LeanContext, LeanTarget
from draftwing.models.paged import PAGE, SlotsExhausted, SlotTable, pages_of
from draftwing.models.target import Target
from draftwing.request import Request
from draftwing.runtime.forward import PREFILL_CHUNK
from draftwing.sampling import Sampling
from draftwing.stats import Step
from draftwing.text.stream import TokenDecoder
from draftwing.torch_utils import inference, joined


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
    if drafter.resumes:
        read = drafter.num_read
        if len(read) != len(rows) or any(num > row.length for num, row in zip(read, rows, strict=True)):
            raise SlotsError(
                f"{drafter.name} has read {read} tokens of rows of {[row.length for row in rows]}: this is a bug of "
                f"Draftwing"
            )


# What was read of former texts, found again by prompts that begin alike: whole pages, by the tokens up to their ends.
#
# A drafter's slot may hold the token after its position (an EAGLE head's entry i reads feature i and token i + 1): a
# page
# counts as the same only where the token behind it is the same too. What follows is read anew.


_Key = tuple[int, tuple[int, ...]]  # the number of the page before, and the tokens of the page and the one behind it


class Prefixes:
    """Pages by text. Keys hold the tokens themselves: no two texts are taken for one another.

    Args:
        table: whose pages they are. It takes those that nobody uses when it needs them, the oldest first.
    """

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._found: dict[_Key, tuple[int, int]] = {}  # to a page and its number, which no other page will ever have
        self._keys: dict[int, _Key] = {}
        self._next = 1

    def clear(self) -> None:
        """Everything is gone."""
        self._found, self._keys = {}, {}

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The pages that hold the beginning of a text, but for its last two tokens at least: these are read anew."""
        self._forget()
        pages, before = list[int](), 0
        for start in range(0, len(tokens) - PAGE - 1, PAGE):
            found = self._found.get((before, tuple(tokens[start : start + PAGE + 1])))
            if found is None:
                break
            pages.append(found[0])
            before = found[1]
        return pages

    def remember(self, tokens: Sequence[int], pages: Sequence[int], num_valid: int) -> None:
        """Keep what was read of a text: ``num_valid`` slots, in these pages, hold what they will hold for good."""
        self._forget()
        before = 0
        for place in range(min(num_valid // PAGE, (len(tokens) - 1) // PAGE)):
            start, page = place * PAGE, pages[place]
            key = before, tuple(tokens[start : start + PAGE + 1])
            found = self._found.get(key)
            if found is None:
                if page in self._keys:  # of a text that began otherwise: its beginning is gone
                    del self._found[self._keys.pop(page)]
                found = self._found[key] = page, self._next
                self._keys[page] = key
                self._next += 1
                self._table.remember(page)
            before = found[1]

    def drop(self, pages: Sequence[int]) -> None:
        """Nobody is to find these again: what was read there came to nothing."""
        for page in pages:
            key = self._keys.pop(page, None)
            if key is not None:
                del self._found[key]
                self._table.forget(page)

    def _forget(self) -> None:
        """Drop what the table has given to others."""
        gone, self._table.forgotten = self._table.forgotten, []
        for page in gone:
            key = self._keys.pop(page, None)
            if key is not None:
                del self._found[key]


# The decode loop over slots of a stated amount: prompts come in pieces, rows go and come back, pages are shared.
#
# What makes this exact: a slot holds a function of the tokens up to it, whoever wrote it and in what pieces, and a text
# is a function of prompt, seed and position alone. So a row may be dropped and read again, and may begin with the slots
# of another one.


MOST_ROWS = 256  # where nobody says how many


def check_memory(num_bytes: int) -> int:
    """Raise ConfigError where this is no amount of memory."""
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or num_bytes < 1:
        raise ConfigError(f"kv_memory must be a number of bytes, found {shown(num_bytes)}: 2 << 30 are two gigabytes")
    return num_bytes


@dataclass(eq=False)
class Reading:
    """A prompt that is being read, piece by piece, beside the rows that run.

    Attributes:
        row: as it will join the others.
        pages: those that hold what was read, ``done`` slots.
        features: of the pieces, where the drafter takes them all at once.
        generation: of the table that the pages are from.
    """

    request: Request
    row: Row
    pages: list[int] = field(default_factory=list)
    done: int = 0
    features: list[Tensor] = field(default_factory=list)
    generation: int = 0

    def start_again(self, generation: int) -> None:
        """What was read is gone, and the table with it."""
        self.pages, self.done, self.features, self.row.resumed = [], 0, [], 0
        self.generation = generation


class SlotDecoder(Decoder):
    """A ``Decoder`` whose slots lie in pages (``model.paged``).

    Args:
        max_batch: rows at most; None for 256.
        num_bytes: for the slots of target and drafter together.
        target, args, options: see ``Decoder``.

    Attributes:
        table: who holds which page.
        num_prefix_queries, num_prefix_hits: see ``EngineStats``.

    Raises:
        ConfigError, UnsupportedError: see ``Decoder``; ``num_bytes`` hold no text, or the target keeps its own slots.
    """

    def __init__(self, max_batch: int | None, num_bytes: int, target: Target, *args: Any, **options: Any) -> None:
        if not target.supports_pages:
            raise UnsupportedError(
                f"{target.name} runs in transformers, which keeps slots of its own: leave kv_memory out, or load it "
                f"with engine='lean' if it is of a family that the lean decoder knows"
            )
        # Beside the rows that run: one that is being read, and those that fill a recording's bucket.
        self.table = SlotTable(-(-((max_batch or MOST_ROWS) + 1) // 16) * 16, target.max_length)
        self.prefixes = Prefixes(self.table)
        self.num_prefix_queries = self.num_prefix_hits = 0
        with self.table.making():
            super().__init__(target, *args, **options)
        self.table.allocate(num_bytes)
        self._lead(self.ctx)

    def _lead(self, ctx: Context) -> None:
        cast(LeanContext, ctx).cache.leads = True  # type: ignore[attr-defined]  # a PagedCache: see ``making``

    @property
    def most(self) -> Budget:
        """The most that it drafts for requests that do not say it themselves."""
        return self.budget if self._planner is None else self._planner.most

    @property
    def shares(self) -> bool:
        """Whether rows may begin with the slots of others."""
        has_none = not self.drafter.reads_features and len(self.table.caches) == 1  # no slots of its own
        return cast(LeanTarget, self.target).is_prefix_free and (self.drafter.resumes or has_none)

    # --- a row comes, piece by piece -------------------------------------------------------------------------------

    def begin(self, request: Request) -> Reading:
        """Begin to read a request's prompt and all that it has emitted, from where nobody has read it before."""
        with self._turn:
            self.settle()
            tokens = [*request.prompt_ids, *request.token_ids]
            row = Row(tokens, len(tokens) - 1, len(request.prompt_ids), request.references, request.drafts)
            reading = Reading(request, row, generation=self.table.generation)
            self.num_prefix_queries += row.length
            if self.shares:
                for page in self.prefixes.find(tokens):
                    self.table.share(page)
                    reading.pages.append(page)
                reading.done = row.resumed = len(reading.pages) * PAGE
                self.num_prefix_hits += reading.done
            if request.num_cached is None:  # later it may find what it has read itself
                request.num_cached = reading.done
            return reading

    @inference
    def read_on(self, reading: Reading, most: int = PREFILL_CHUNK) -> bool:
        """Read up to ``most`` further tokens; whether that was all, and the row has joined the others.

        Raises:
            SlotsExhausted: there are not enough pages; nothing has changed.
        """
        with self._turn:
            self.settle()
            if reading.generation != self.table.generation:
                reading.start_again(self.table.generation)
            ctx, row = self.ctx, reading.row
            stop, place = min(reading.done + most, row.length), self.ctx.num_rows
            self.table.attach(place, reading.pages)
            try:
                self.table.hold(place, [stop], 1)
                features = self._read_piece(ctx, self.drafter, reading, stop)
                if stop == row.length:
                    self._changing = True
                    self.drafter = self._join(ctx, self.drafter, reading, features)
                    self._batch, self.running = None, (*self.running, reading.request)
                    self._changing = False
            except DraftwingError:
                self._changing = False
                raise
            finally:
                if len(self.table.rows) > ctx.num_rows:
                    self.table.detach(place)
            if stop == row.length:
                self._remember(place)
            return stop == row.length

    def _read_piece(self, ctx: Context, drafter: Drafter, reading: Reading, stop: int) -> Tensor | None:
        """Read up to ``stop``; of the last piece, the features that the drafter has not read yet."""
        row = reading.row
        features = self.target.read(ctx, row, reading.done, stop)
        if stop < row.length:
            if drafter.resumes:
                drafter.read_on(ctx, row, features, stop)
                row.resumed = stop
            elif features is not None:
                reading.features.append(features)
        elif reading.features:
            features = joined([*reading.features, cast(Tensor, features)], 1)
        reading.done = stop
        return features

    def _join(self, ctx: Context, drafter: Drafter, reading: Reading, features: Tensor | None) -> Drafter:
        """A row at the end, of target and drafter, or of neither; the drafter, or what is left where it failed."""
        ctx.rows.append(reading.row)
        try:
            drafter.admit(ctx, features)
        except Exception as error:
            if self._new_drafter is None:
                self.target.remove(ctx, ctx.num_rows - 1)
            return self._leave_out(error, reading.request)
        return drafter

    def drop(self, reading: Reading) -> None:
        """Give up on a prompt; what was read of it is kept for as long as there is room."""
        with self._turn:
            if reading.generation == self.table.generation:
                if self.shares and reading.pages:
                    self.prefixes.remember(reading.row.tokens, reading.pages, reading.done)
                self.table.release(reading.pages)
            reading.start_again(self.table.generation)

    def _add(self, ctx: Context, drafter: Drafter, request: Request) -> Drafter:
        self._lead(ctx)
        tokens = [*request.prompt_ids, *request.token_ids]
        reading = Reading(
            request, Row(tokens, len(tokens) - 1, len(request.prompt_ids), request.references, request.drafts)
        )
        features, stop = None, -1
        while stop < reading.row.length:
            stop = min(reading.done + PREFILL_CHUNK, reading.row.length)
            features = self._read_piece(ctx, drafter, reading, stop)
        return self._join(ctx, drafter, reading, features)

    # --- a row goes ------------------------------------------------------------------------------------------------

    def preempt(self, request: Request) -> None:
        """Take a running request's slots away. It has lost nothing: it may begin again where it stands."""
        with self._turn:
            self.settle()
            place, last = self.running.index(request), len(self.running) - 1
            self._remember(place)
            self._changing = True
            self.drafter.remove(self.ctx, place)
            self.target.remove(self.ctx, place)
            moved = (*self.running[:place], self.running[last], *self.running[place + 1 : last])
            self._batch, self.running = None, moved[:last]
            self._changing = False

    def _drop_ended(self) -> None:
        for place, request in enumerate(self.running):
            if request.error is not None:
                self.prefixes.drop(self.table.rows[place])
            elif request.finish_reason is not None:
                self._remember(place)
        super()._drop_ended()

    def _remember(self, place: int) -> None:
        """Keep what a row's slots hold for good."""
        if not self.shares:
            return
        row = self.ctx.rows[place]
        num_valid = min(row.length, len(row.tokens) - 1)
        if self.drafter.resumes:
            num_valid = min(num_valid, self.drafter.num_read[place])
        self.prefixes.remember(row.tokens, self.table.rows[place], num_valid)

    def _start_over(self) -> None:
        if self._new_drafter is not None:
            self.table.restart()
            self.prefixes.clear()
        with self.table.making():
            super()._start_over()


# Requests in, texts out: a queue in front of the decode loop.
#
# Whoever generates (streams, batches, ``custom_generate``, training's own measurements, a server) submits requests and
# drives ``Engine.step``; nobody else loops over the decoder.


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
            drafts = check_drafts(drafts, self._decoder.draft_names)
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
        if self._decoder.drafter.learns:
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


# An engine under load: prompts are read beside the decoding, and requests come in as far as memory reaches.
#
# Each step reads at most ``PIECE`` tokens of waiting prompts (on a GPU ``PREFILL_CHUNK``), the first one first, and
# decodes all rows once: a long prompt does not stall those that run. A request is let in when the memory will probably
# hold what all of them may still need. Where it turns out not to, the least important row, of these the youngest, gives
# its slots up; it is read again, with all that it has written, when there is room.


OPTIMISM = 0.5  # of the tokens that a text may still have, the share that is taken not to come: most end before
# Tokens of prompts that a step on a CPU reads beside its rows, which wait that long. More at once take no less time
# each; fewer than this cost throughput, since rows are stepped more often for them.
PIECE = 128
BESIDE = 64  # slots for what a drafter wants scored beside its tree


class SlotEngine(Engine):
    """See ``Engine``; ``LM.engine`` makes it where it is given ``kv_memory``.

    Args:
        decoder: over slots in pages.
        max_batch, tokenizer: see ``Engine``.
        optimism: share of the tokens that requests may still emit for which no memory is set aside. 0: no row ever has
            to give way.

    Raises:
        ConfigError: see ``Engine``; ``optimism`` is no number from 0 to 1.
    """

    _decoder: SlotDecoder

    def __init__(
        self,
        decoder: SlotDecoder,
        *,
        max_batch: int | None = None,
        tokenizer: TokenDecoder | None = None,
        optimism: float = OPTIMISM,
    ) -> None:
        super().__init__(decoder, max_batch=max_batch or MOST_ROWS, tokenizer=tokenizer)
        if isinstance(optimism, bool) or not isinstance(optimism, int | float) or not 0 <= optimism <= 1:
            raise ConfigError(f"optimism must be a number from 0 to 1, found {optimism!r:.60}")
        self._optimism = optimism
        self._reading: Reading | None = None
        self._num_preempted = 0
        self._is_filling = False  # pages may be on their way from one to another

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row, or whose prompt is being read."""
        return len(self._waiting) + (self._reading is not None)

    @property
    def stats(self) -> EngineStats:
        decoder, table = self._decoder, self._decoder.table
        return EngineStats(
            self.num_running,
            self.num_waiting,
            self._num_preempted,
            decoder.num_prefix_queries,
            decoder.num_prefix_hits,
            table.num_pages * PAGE,
            (table.num_pages - table.num_available) * PAGE,
            decoder.faults.num,
        )

    def room_for(self, num_prompt_tokens: int) -> int:
        """How many tokens such a prompt may be answered with at most, by memory and context; below 1, none."""
        return self._room(num_prompt_tokens, None)

    def _room(self, num_prompt_tokens: int, own: Budget | AtMost | None) -> int:
        decoder = self._decoder
        slots = decoder.table.num_pages * PAGE - _behind(decoder.most, *([own] if isinstance(own, Budget) else []))
        return min(slots, decoder.target.max_length) - num_prompt_tokens

    def _check_room(self, prompt_ids: Sequence[int], sampling: Sampling, budget: Budget | AtMost | None) -> None:
        room, target = self._room(len(prompt_ids), budget), self._decoder.target
        if room < min(sampling.max_tokens, target.max_length - len(prompt_ids)):
            raise PromptError(
                f"a prompt of {len(prompt_ids)} tokens and an answer of {sampling.max_tokens} do not fit into the "
                f"{self._decoder.table.num_pages * PAGE} KV slots that there are: give more kv_memory"
                + (f", or ask for {room} tokens at most" if room > 0 else ", or shorten it")
            )

    def step(self) -> Step:
        """See ``Engine.step``; at most a piece of prompts is read before, where rows are running."""
        self._fill()
        return self._advance()

    def check(self) -> None:
        """See ``Engine.check``; pages belong to rows too, to a prompt that is being read, or to nobody."""
        super().check()
        decoder = self._decoder
        if len(decoder.table.rows) != len(decoder.running):
            raise SlotsError(
                f"{len(decoder.running)} requests run, and {len(decoder.table.rows)} rows hold slots: this is a bug of "
                f"Draftwing"
            )
        decoder.table.check(self._beside())

    # --- who comes in ----------------------------------------------------------------------------------------------

    def _fill(self) -> int:
        decoder = self._decoder
        if decoder.undone is not None:
            return len(decoder.running)
        decoder.settle()
        if self._is_filling:  # an interrupt hit the last time
            del decoder.table.rows[len(decoder.running) :]
            decoder.table.recount(self._beside())
        self._is_filling, left = True, self._piece
        while True:
            self._sweep()
            reading = self._reading
            if reading is not None and reading.request.finish_reason is not None:
                self._put_back(reading, waits=False)
            if not (left or not decoder.running) or not self._may_read():
                break
            left -= self._read(left if decoder.running else PREFILL_CHUNK)
            left = max(left, 0)
        self._make_room()
        self._is_filling = False
        return len(decoder.running)

    @property
    def _piece(self) -> int:
        """Tokens of prompts that are read beside rows that run."""
        return PREFILL_CHUNK if self._decoder.target.device.type == "cuda" else min(PREFILL_CHUNK, PIECE)

    def _beside(self) -> list[list[int]]:
        reading = self._reading
        return [reading.pages] if reading and reading.generation == self._decoder.table.generation else []

    def _may_read(self) -> bool:
        decoder = self._decoder
        reading = self._reading
        if reading is not None:
            upto = min(reading.done + PREFILL_CHUNK, reading.row.length) + 1
            needs = self._wanted() + pages_of(upto) - len(reading.pages)
            return not decoder.running or needs <= decoder.table.num_available
        while self._waiting:
            request = self._waiting.first()
            if request.finish_reason is None and request not in decoder.running:
                is_full = len(decoder.running) >= (self._max_batch or math.inf)
                if is_full or not self._fits(request):
                    return False
                self._reading = decoder.begin(request)
                self._waiting.drop(request)  # only now: an interrupt must not lose it
                return True
            self._waiting.drop(request)
        return False

    def _read(self, most: int) -> int:
        """Go on with the prompt that is being read; how many tokens that were."""
        reading = self._reading
        assert reading is not None
        before = reading.done
        if reading.request in self._decoder.running:  # it has joined, and an interrupt kept that from being noted
            self._reading = None
            return 0
        try:
            if self._decoder.read_on(reading, most):
                self._reading = None
        except DraftwingError as error:  # its own: the others go on
            if isinstance(error, SlotsExhausted) and self._decoder.running:
                self._put_back(reading)
                return most
            reading.request.error, reading.request.finish_reason = error, "error"
            self._put_back(reading, waits=False)
        return max(reading.done - before, 1)

    def _put_back(self, reading: Reading, *, waits: bool = True) -> None:
        """Stop reading a prompt."""
        self._decoder.drop(reading)
        if waits:
            self._waiting.append(reading.request)
        self._reading = None

    # --- memory ----------------------------------------------------------------------------------------------------

    def _tree(self, *more: Request) -> int:
        """Slots behind a row's text that a step of those that run, and more, may take."""
        wishes = [each.speculation for each in (*self._decoder.running, *more)]
        return _behind(self._decoder.most, *[each for each in wishes if isinstance(each, Budget)])

    def _expected(self, request: Request, tree: int) -> int:
        """Pages that a request will probably need, where a step takes so many slots behind its text."""
        written = len(request.prompt_ids) + len(request.token_ids)
        end = min(len(request.prompt_ids) + request.sampling.max_tokens, self._decoder.target.max_length)
        return pages_of(written + math.ceil((1 - self._optimism) * max(end - written, 0)) + tree)

    def _fits(self, request: Request) -> bool:
        """Whether it may come in: what all probably need, it among them, is there."""
        decoder, table = self._decoder, self._decoder.table
        if not decoder.running:
            return True
        tree = self._tree(request)
        coming = sum(
            max(self._expected(each, tree) - len(pages), 0)
            for each, pages in zip(decoder.running, table.rows, strict=True)
        )
        written = pages_of(len(request.prompt_ids) + len(request.token_ids))
        if coming + self._expected(request, tree) - written > table.num_available:
            return False
        found = decoder.prefixes.find([*request.prompt_ids, *request.token_ids]) if decoder.shares else []
        in_use = sum(table.uses[page] > 0 for page in found)
        return coming + self._expected(request, tree) - in_use <= table.num_available

    def _wanted(self) -> int:
        """Pages that the next step may take beyond those that rows hold."""
        decoder, tree = self._decoder, self._tree()
        return sum(
            max(pages_of(row.length + 1 + tree) - len(pages), 0)
            for row, pages in zip(decoder.ctx.rows, decoder.table.rows, strict=True)
        )

    def _make_room(self) -> None:
        """See that the next step finds its slots: rows give way as long as it would not."""
        while self._wanted() > self._decoder.table.num_available and self._give_way():
            pass

    def _give_way(self) -> bool:
        """Let the least important request give its slots up; False where that would leave none."""
        decoder, reading = self._decoder, self._reading
        last = max(decoder.running, key=rank, default=None)
        if reading is not None and reading.pages and (last is None or rank(reading.request) > rank(last)):
            self._put_back(reading)
            self._num_preempted += 1
            return True
        if last is None or len(decoder.running) + (reading is not None) < 2:
            return False
        if len(decoder.running) == 1 and reading is not None:
            self._put_back(reading)
            self._num_preempted += 1
            return True
        self._waiting.append(last)  # before it loses its row: an interrupt must not lose it
        decoder.preempt(last)
        self._num_preempted += 1
        return True

    def _advance(self) -> Step:
        """See ``Engine``; a step that runs out of slots has changed nothing, and is done again with fewer rows."""
        while True:
            try:
                return super()._advance()
            except SlotsExhausted as error:
                if self._give_way():
                    continue
                for request in self._decoder.running:
                    request.error, request.finish_reason = error, "error"
                self._decoder.sweep()
                raise


def _behind(*budgets: Budget) -> int:
    """Slots behind a text that drafting and verifying by the widest of these may take."""
    levels = max(budget.depth for budget in budgets) * max(budget.width for budget in budgets)
    return 1 + BESIDE + max(levels, *(max(budget.nodes or 0, len(budget.paths or ())) for budget in budgets))
