"""An engine under load: prompts are read beside the decoding, and requests come in as far as memory reaches.

Each step reads at most ``PIECE`` tokens of waiting prompts (on a GPU ``PREFILL_CHUNK``), the first one first, and
decodes all rows once: a long prompt does not stall those that run. A request is let in when the memory will probably
hold what all of them may still need. Where it turns out not to, the least important row, of these the youngest, gives
its slots up; it is read again, with all that it has written, when there is room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from draftwing.drafters.base import Budget
from draftwing.engine.engine import Engine
from draftwing.engine.paged import MOST_ROWS, Reading, SlotDecoder
from draftwing.engine.queue import EngineStats, rank
from draftwing.engine.request import Request
from draftwing.engine.wishes import AtMost
from draftwing.errors import ConfigError, DraftwingError, PromptError, SlotsError
from draftwing.model.paged import PAGE, SlotsExhausted, pages_of
from draftwing.run.forward import PREFILL_CHUNK
from draftwing.sampling import Sampling
from draftwing.stats import Step
from draftwing.text.stream import TokenDecoder

__all__ = ["OPTIMISM", "SlotEngine"]

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
        """See ``Engine``."""
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
        """The whole memory has to hold the text."""
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
        """See ``Engine``; how many rows there are then."""
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
        """The pages of the prompt that is being read."""
        reading = self._reading
        return [reading.pages] if reading and reading.generation == self._decoder.table.generation else []

    def _may_read(self) -> bool:
        """Whether there is a prompt to read, and room for it."""
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
