"""The decode loop over slots of a stated amount: prompts come in pieces, rows go and come back, pages are shared.

What makes this exact: a slot holds a function of the tokens up to it, whoever wrote it and in what pieces, and a text
is a function of prompt, seed and position alone. So a row may be dropped and read again, and may begin with the slots
of another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from draftwing.alone import joined
from draftwing.drafters.base import Budget, Drafter, Resuming
from draftwing.engine.decode import Decoder
from draftwing.engine.prefixes import Prefixes
from draftwing.engine.request import Request
from draftwing.errors import ConfigError, DraftwingError, UnsupportedError, shown
from draftwing.inference import inference
from draftwing.model.lean import LeanContext, LeanTarget
from draftwing.model.paged import PAGE, SlotTable
from draftwing.model.target import Context, Row, Target
from draftwing.run.forward import PREFILL_CHUNK

__all__ = ["MOST_ROWS", "Reading", "SlotDecoder", "check_memory"]

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
        """The target's rows are the table's."""
        cast(LeanContext, ctx).cache.leads = True  # type: ignore[attr-defined]  # a PagedCache: see ``making``

    @property
    def most(self) -> Budget:
        """The most that it drafts for requests that do not say it themselves."""
        return self.budget if self._planner is None else self._planner.most

    @property
    def shares(self) -> bool:
        """Whether rows may begin with the slots of others."""
        traits = self.drafter.traits
        has_none = not traits.reads_features and len(self.table.caches) == 1  # no slots of its own
        return cast(LeanTarget, self.target).is_prefix_free and (traits.resumes or has_none)

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
            if drafter.traits.resumes:
                cast(Resuming, drafter).read_on(ctx, row, features, stop)
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
        """See ``Decoder``: all pieces at once."""
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
        """See ``Decoder``; what was read is kept, but for rows that failed."""
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
        if self.drafter.traits.resumes:
            num_valid = min(num_valid, cast(Resuming, self.drafter).num_read[place])
        self.prefixes.remember(row.tokens, self.table.rows[place], num_valid)

    def _start_over(self) -> None:
        """See ``Decoder``: in the same memory."""
        if self._new_drafter is not None:
            self.table.restart()
            self.prefixes.clear()
        with self.table.making():
            super()._start_over()
