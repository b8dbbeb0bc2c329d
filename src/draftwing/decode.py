"""The decode loop: draft trees, verify them in one forward, accept, commit, emit.

Rows join and leave between steps; queues, streams and servers are wrappers around ``Decoder.step``.

A step counts as a whole or not at all, whenever an exception or an interrupt hits it: up to one assignment
(``unfinished``) nothing visible has changed, and after it the next call completes the step.

What makes sharing and moving rows exact: a KV slot is a function of the tokens up to it, whichever pieces they were
read in, and a request's text is a function of its prompt, seed and positions alone. So a row may be dropped and read
again, or start with slots that another row has written.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import cast

import torch
from torch import Tensor

from draftwing.accept import Rule, get_rule
from draftwing.budget.planner import Planner
from draftwing.checks import BATCH_SIZE, Argument, check_arguments
from draftwing.cpu.noise import noise_of
from draftwing.errors import ConfigError, DraftwingError, DraftwingWarning, UnsupportedError, shown
from draftwing.masks import Masks
from draftwing.methods.base import BUDGET_ARGUMENT, Budget, Drafter, NoDrafter, check_drafter, no_probs
from draftwing.models.context import Context, Row, TargetOutput
from draftwing.models.lean import LeanContext, LeanTarget
from draftwing.models.paged import PAGE, PagedCache, PageTable, pages_of
from draftwing.models.target import DraftFailed, StepResult, Target
from draftwing.noise import AcceptArgs
from draftwing.readout import add_node_distributions, explain, get_logprobs, read_emitted
from draftwing.request import Request, RowBudgets, budget_for_rule, names_of
from draftwing.runtime.forward import PREFILL_CHUNK
from draftwing.runtime.graphs import RECORDED
from draftwing.runtime.tree_builder import cut_to_depth, prune_by_rule
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.stats import RowStep, Step, Timings
from draftwing.torch_utils import joined
from draftwing.tree import Accepted, DraftTree, Emitted

MAX_ROWS = 256  # with kv_memory, if no number is given
EXTRA_NODES = 64  # slots for nodes that a drafter wants scored in addition to its tree
MAX_FAULTS = 3  # in a row, after which a drafter is given up
_ARGUMENTS = {
    "target": Argument((Target,), "a Target, as from load_target() or LM.target"),
    "drafter": Argument((Drafter, Callable, NoneType), "a Drafter, a function that makes one, or None"),  # type: ignore[arg-type]
    "budget": BUDGET_ARGUMENT,
    "planner": Argument((Planner, NoneType), "a Planner or None"),
    "turn": Argument((type(threading.RLock()), NoneType), "a threading.RLock or None"),
    "kv_memory": Argument((int, NoneType), "a number of bytes", "2 << 30 is 2 GiB", 1),
    "max_batch": BATCH_SIZE,
    "sampling": Argument((Sampling,), "a Sampling", "write Sampling(temperature=0.8)"),
}
_MIN_DEPTH = 8  # to which drafts near the end of a request are cut at most


@dataclass
class Faults:
    """Exceptions that drafters raised in a decode loop. Drafters only save time, so requests continue without them.

    Attributes:
        num: in total.
        last: the latest one.
        in_a_row: since the last successful step with drafts.
    """

    num: int = 0
    last: Exception | None = None
    in_a_row: int = 0
    _refused: set[int] = field(default_factory=set)  # requests that a drafter could not admit

    @property
    def is_hopeless(self) -> bool:
        """True if no drafter should be tried any more."""
        return self.in_a_row >= MAX_FAULTS

    def add(self, name: str, error: Exception, request: Request | None = None) -> None:
        """Count a fault of the drafter ``name``; ``request`` is the one that it could not admit, if it was that."""
        self.num, self.in_a_row, self.last = self.num + 1, self.in_a_row + 1, error
        if request is not None:
            self._refused.add(request.id)
        if self.is_hopeless:
            warnings.warn(
                f"{name} failed {self.in_a_row} times in a row, the last time with {type(error).__name__}: "
                f"{shown(str(error))}: drafting is off from here on; load the model again, or choose another draft",
                DraftwingWarning,
                stacklevel=2,
            )

    def may_retry(self, running: Sequence[Request]) -> bool:
        """True if a fresh drafter may admit all running requests: not while one runs that a drafter has refused."""
        if self._refused:
            self._refused &= {request.id for request in running}
        return not self._refused


@dataclass(eq=False)
class Prefill:
    """A request whose prompt is being read, in pieces between decode steps.

    Attributes:
        row: as it will join the others.
        pages: those that hold its first ``done`` slots.
        features: of the pieces, for drafters that read them all at once.
        skips_drafter: the request is decoded without the drafter.
        generation: of the decoder's rows; if these have been rebuilt since, what was read is gone.
    """

    request: Request
    row: Row
    pages: list[int] = field(default_factory=list)
    done: int = 0
    features: list[Tensor] = field(default_factory=list)
    skips_drafter: bool = False
    generation: int = 0

    @classmethod
    def of(cls, request: Request) -> Prefill:
        """The row of a request's prompt and all that it has emitted, of which nothing is read yet."""
        tokens = [*request.prompt_ids, *request.token_ids]
        return cls(request, Row(tokens, len(tokens) - 1, len(request.prompt_ids), request.references, request.drafts))

    def restart(self, generation: int) -> None:
        """Forget what was read."""
        self.pages, self.done, self.features, self.row.resumed = [], 0, [], 0
        self.generation = generation


class Decoder:
    """Decodes a changing set of requests, each with its own sampling.

    One thread steps at a time; others wait for their turn.

    Args:
        target: the model whose output this is.
        drafter: proposes trees: a function that makes one with empty state, or a drafter, which cannot be replaced when
            it fails or a step is interrupted while rows change. None decodes without drafts.
        rule: a name in ``accept.RULES``.
        budget: how much to draft for requests that set no limit themselves.
        lossless: refuse rules that change the target's distribution.
        planner: decides how much to draft in each step, instead of ``budget``.
        turn: held during each step; decoders that share a planner share it too.
        kv_memory: bytes for the KV slots of target and drafter together, in pages (``models.paged``); None lets the
            slots grow with the rows.
        max_batch: most rows with ``kv_memory``; None for 256.

    Attributes:
        running: the requests, in the order of ``ctx.rows``.
        unfinished: a step that counts but was interrupted; the next ``step`` completes and returns it.
        draft_names: names of the drafters, among which a request may choose.
        faults: exceptions of drafters. A step continues without a failing drafter, the next one gets a fresh one, and
            after several faults in a row none is tried. A drafter that cannot be replaced raises to the caller.
        is_lone: at most one request runs at a time, so that whole requests may skip the drafter.
        pages: which row holds which page; None without ``kv_memory``.
        generation: increases when all rows are rebuilt.
        num_prefix_queries, num_prefix_hits: see ``EngineStats``.

    Raises:
        ConfigError: an unknown or lossy rule, a budget that the rule cannot take, or too little ``kv_memory``.
        UnsupportedError: drafts or ``kv_memory`` for a target that does not support them.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | Callable[[], Drafter] | None = None,
        rule: str | Rule = "match",
        budget: Budget | None = None,
        *,
        lossless: bool = True,
        planner: Planner | None = None,
        turn: threading.RLock | None = None,
        kv_memory: int | None = None,
        max_batch: int | None = None,
    ) -> None:
        values = {"target": target, "drafter": drafter, "budget": budget, "planner": planner, "turn": turn}
        check_arguments(_ARGUMENTS, {**values, "kv_memory": kv_memory, "max_batch": max_batch})
        self.target, self._planner = target, planner
        self.rule = get_rule(rule, lossless=lossless)
        self.budget = budget_for_rule(budget or Budget(), self.rule)
        self._new_drafter = drafter if callable(drafter) else NoDrafter if drafter is None else None
        self.pages: PageTable | None = None
        if kv_memory is not None:
            self._check_pages()
            # One more row that is being read, and those that only fill a recording's bucket.
            num_rows = -(-((max_batch or MAX_ROWS) + 1) // 16) * 16
            self.pages = PageTable(num_rows, target.max_length)
            with self.pages.making():
                self._make(drafter)
            try:
                self.pages.allocate(kv_memory, least_pages(self.largest_budget))
            except (MemoryError, OverflowError, RuntimeError, TypeError) as error:  # depending on how large it is
                raise ConfigError(
                    f"kv_memory={shown(kv_memory)} cannot be allocated ({type(error).__name__}): give less"
                ) from error
            self._lead(self.ctx)
        else:
            self._make(drafter)
        self.draft_names = names_of(self.drafter)
        if self.drafter.drafts and not target.supports_trees:
            raise UnsupportedError(
                f"{target.name} keeps a state that cannot be rolled back (recurrent layers), so drafted tokens could "
                f"not be taken back: decode it plainly with draft='none'"
            )
        if self.rule.children not in ("keyed", "top") and not self.drafter.has_probs:
            raise ConfigError(f"rule {self.rule.name!r}: {no_probs(self.drafter.name)}")
        self._noise = noise_of(target.vocab_size, target.device)
        self._turn = turn or threading.RLock()
        self.running: tuple[Request, ...] = ()
        self.unfinished: Step | None = None
        self.faults = Faults()
        self.is_lone = False
        self.num_prefix_queries = self.num_prefix_hits = 0
        self.generation = self._next_id = 0
        self._batch: SamplingBatch | None = None  # the next three belong to it too
        self._masks: Masks | None = None
        self._wanted: RowBudgets | None = None
        self._max_tokens: list[int] = []
        self._skipped: Drafter | None = None  # the drafter, while a request is decoded without it
        self._needs_drafter = False  # a faulty one was removed and may be replaced
        self._changing = False  # the rows of target and drafter may disagree

    def _make(self, drafter: Drafter | Callable[[], Drafter] | None) -> None:
        self.drafter: Drafter = drafter() if callable(drafter) else NoDrafter() if drafter is None else drafter
        check_drafter(self.drafter)
        self.ctx = self.target.new_context(self.drafter.features)

    def _check_pages(self) -> None:
        if not self.target.supports_pages:
            if isinstance(self.target, LeanTarget):
                raise UnsupportedError(
                    f"{self.target.name} has recurrent layers, whose states do not lie in pages: leave kv_memory out"
                )
            raise UnsupportedError(
                f"{self.target.name} runs in transformers, which manages its own KV cache: leave kv_memory out, or "
                f"load it with engine='lean' if the lean decoder supports its family"
            )

    def _lead(self, ctx: Context) -> None:
        """Let the target's cache move the pages of all caches when rows move."""
        cast(PagedCache, cast(LeanContext, ctx).cache).leads = True

    # --- requests --------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that the next step will advance."""
        return len(self.running)

    @property
    def largest_budget(self) -> Budget:
        """The largest budget of requests that set none themselves."""
        return self.budget if self._planner is None else self._planner.largest

    @property
    def shares_prefixes(self) -> bool:
        """True if rows may start with pages that other rows have written."""
        if self.pages is None:
            return False
        keeps_nothing = not self.drafter.reads_features and len(self.pages.caches) == 1
        return cast(LeanTarget, self.target).is_prefix_free and (self.drafter.resumes or keeps_nothing)

    def check(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        """Raise PromptError or SamplingError if such a request cannot be decoded."""
        check_arguments(_ARGUMENTS, {"sampling": sampling})
        sampling.check_vocabulary(self.target.vocab_size)
        self.target.check_prompt(prompt_ids)

    def admit(self, prompt_ids: Sequence[int], sampling: Sampling) -> int:
        """Prefill a prompt and add it to the batch.

        Returns:
            The request's id.

        Raises:
            PromptError, SamplingError: see ``check``.
            ConfigError: stop strings, which need an ``Engine`` with a tokenizer.
        """
        self.check(prompt_ids, sampling)
        request = Request(self._next_id, prompt_ids, sampling)
        self.start(request)
        self._next_id += 1
        return request.id

    def start(self, request: Request) -> None:
        """Add a request that ``check`` has passed: its prompt and all that it has emitted."""
        with self._turn:
            prefill = self.begin(request)
            try:
                while not self.read_on(prefill):
                    pass
            except DraftwingError:
                self.drop(prefill)
                raise

    def begin(self, request: Request) -> Prefill:
        """Start reading a checked request: its prompt and all that it has emitted, after any shared prefix."""
        with self._turn:
            self.recover()
            prefill = Prefill.of(request)
            prefill.skips_drafter, prefill.generation = self._skips_drafter(request), self.generation
            if self.pages is not None:
                self.num_prefix_queries += prefill.row.length
                if self.shares_prefixes:
                    self._share_prefix(prefill)
                    self.num_prefix_hits += prefill.done
                if request.num_cached is None:  # later it may find its own pages
                    request.num_cached = prefill.done
            return prefill

    def _share_prefix(self, prefill: Prefill) -> None:
        """Start a row with the slots of earlier requests: whole pages are shared, and part of one is copied."""
        pages = cast(PageTable, self.pages)
        prefix = pages.prefixes.find(prefill.row.tokens)
        for page in prefix.pages:
            pages.share(page)
            prefill.pages.append(page)
        num_slots = len(prefix.pages) * PAGE
        if prefix.partial is not None and (copied := pages.copy(prefix.partial)) is not None:
            prefill.pages.append(copied)
            num_slots = prefix.num_slots
        prefill.done = prefill.row.resumed = num_slots

    def _skips_drafter(self, request: Request) -> bool:
        """True if a lone request is decoded without the drafter, since drafts did not pay in earlier ones.

        Even a drafter that proposes nothing reads prompts, keeps features and takes its share of the caches: a
        twentieth of a small model's time. Not for requests whose drafts are special, for drafters that learn from what
        they see or cost next to nothing, or with pages, where a later request may start with this one's slots.
        """
        is_special = request.speculation is not None or request.constraint is not None or len(request.references) > 0
        if not self.is_lone or self.running or self._planner is None or self.pages is not None or is_special:
            return False
        if self.drafter.learns or not self.drafter.costs_forwards:
            return False
        return self._planner.skips(request.sampling.temperature)

    def read_on(self, prefill: Prefill, max_tokens: float = PREFILL_CHUNK) -> bool:
        """Read up to ``max_tokens`` further tokens, or all of them without pages.

        Returns:
            True if the row is complete and has joined the batch.

        Raises:
            SlotsExhausted: there are not enough pages; nothing has changed.
        """
        with self._turn, torch.inference_mode():
            self.recover()
            pages, row, index = self.pages, prefill.row, len(self.ctx.rows)
            if prefill.generation != self.generation:
                prefill.restart(self.generation)
            stop = row.length if pages is None else int(min(prefill.done + max_tokens, row.length))
            is_last = stop == row.length
            drafter = NoDrafter() if prefill.skips_drafter else self.drafter
            try:
                if pages is not None:
                    pages.attach(index, prefill.pages)
                    pages.hold(index, [stop], 1)
                self._changing = pages is None
                features = self._read(self.ctx, drafter, prefill, stop)
                if is_last:
                    self._changing = True
                    skipped = self.drafter if prefill.skips_drafter else None
                    self.drafter = self._join(self.ctx, drafter, prefill, features)
                    self._batch, self.running, self._skipped = None, (*self.running, prefill.request), skipped
                self._changing = False
            except DraftwingError:  # the rows are as they were
                self._changing = False
                raise
            finally:
                if pages is not None and len(pages.rows) > len(self.ctx.rows):
                    pages.detach(index)
            if is_last and pages is not None:
                self._remember(pages, index)
            return is_last

    def drop(self, prefill: Prefill) -> None:
        """Stop reading a request; its pages are kept for others as long as there is room."""
        with self._turn:
            if self.pages is not None and prefill.generation == self.generation:
                if self.shares_prefixes:
                    self.pages.prefixes.remember(prefill.row.tokens, prefill.pages, prefill.done)
                self.pages.release(prefill.pages)
            prefill.restart(self.generation)

    def retire(self, request_id: int) -> None:
        """Drop a running request.

        Raises:
            ConfigError: it is not running.
        """
        with self._turn:
            self.recover()
            is_id = isinstance(request_id, int)
            request = next((request for request in self.running if is_id and request.id == request_id), None)
            if request is None:
                raise ConfigError(
                    f"request {shown(request_id)} is not running: it finished, or was never admitted; retire only ids "
                    f"from admit() that no step has finished"
                )
            request.finish_reason = "cancelled"
            self.drop_ended()

    def preempt(self, request: Request) -> None:
        """Free the slots of a running request. It loses nothing: ``begin`` continues it."""
        with self._turn:
            self.recover()
            index = self.running.index(request)
            if self.pages is not None:
                self._remember(self.pages, index)
            self._changing = True
            self._remove(index)
            self._changing = False

    def drop_ended(self) -> None:
        """Drop the rows whose requests have a finish reason."""
        with self._turn:
            self.recover()
            self._changing = True
            self._drop_ended()
            self._changing = False

    def recover(self) -> None:
        """Complete an interrupted step, or rebuild the rows if the interrupt hit a change of them.

        Raises:
            ConfigError: the drafter's rows cannot be trusted, and it cannot be replaced.
        """
        with self._turn:
            if self.unfinished is not None:
                self._finish(self.unfinished)
            elif self._changing:
                self._rebuild()

    def learn(self) -> None:
        """Let the drafter learn from the steps so far: see ``Drafter.learn``."""
        try:
            self.drafter.learn()
        except Exception as error:
            self._remove_drafter(error)

    # --- a step ----------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """Advance every running request by at least one token; finished ones leave the batch.

        A row whose logits are not finite ends with the finish reason ``error``; the others continue.

        Raises:
            ConfigError: no request is running.
        """
        with self._turn, torch.inference_mode():
            if self.unfinished is not None:
                return self._finish(self.unfinished)
            if self._changing or self._needs_drafter or not self.running:
                self._prepare()
            ctx, sampling, start = self.ctx, self._batch or self._new_batch(), time.perf_counter()
            num_recorded = RECORDED.num
            planner, budget, revise = self._plan()
            planned = time.perf_counter()

            result = self._draft_and_verify(budget, revise)
            output, tree = result.output, result.tree
            tree = tree.proposed if tree.num_extra_nodes else tree
            accepted, scores = (output.accepted, output.logits) if output.accepted is not None else self._accept(result)
            emitted = accepted.on_host or read_emitted(tree, accepted, scores)
            draft_s, verify_s = result.seconds()
            verified = planned + draft_s + verify_s
            decided = max(time.perf_counter(), verified)
            self._changing = True
            if output.accepted is None:
                self.target.commit(ctx, tree, accepted)
            self._observe(result.tree, accepted, output)

            committed = time.perf_counter()
            rows = [self._emit(index, row, accepted, output) for index, row in enumerate(emitted)]
            if sampling.has_node_distributions:
                rows = add_node_distributions(rows, tree, sampling.filtered(self._adjusted(result)), sampling)
            if planner is not None:
                num_tokens = sum([len(row.token_ids) for row in rows])
                seconds = time.perf_counter() - start if RECORDED.num == num_recorded else None
                planner.observe(tree, accepted, num_tokens, seconds, draft_s)
            host_s = planned - start + time.perf_counter() - committed
            timings = Timings(draft_s, verify_s, decided - verified, committed - decided, host_s)
            self.unfinished = Step(tuple(rows), tree, accepted, timings, self.rule.lossless)  # from here on it counts
            return self._finish(self.unfinished)

    def _prepare(self) -> None:
        """Make the rows ready for a step, after interrupts and faults."""
        if self._changing:
            self.recover()
        if self._needs_drafter and self.faults.may_retry(self.running):
            self._rebuild()
        if not self.running:
            raise ConfigError("there is nothing to decode: admit a prompt first")

    def _new_batch(self) -> SamplingBatch:
        """The sampling of the rows, after some joined or left."""
        target, running, prunes = self.target, self.running, self.rule.children in ("keyed", "top")
        budgets = [request.speculation for request in running]
        self._wanted = RowBudgets(budgets) if any(budget is not None for budget in budgets) else None
        is_masked = any(request.is_restricted for request in running)
        self._masks = Masks(running, target.vocab_size, target.eos_ids, prunes=prunes) if is_masked else None
        self._max_tokens = [request.sampling.max_tokens for request in running]
        self._batch = SamplingBatch([request.sampling for request in running], self._noise, target.device)
        return self._batch

    def _plan(self) -> tuple[Planner | None, Budget, Callable[[DraftTree], DraftTree] | None]:
        """The planner that learns from this step, the budget, and a function that changes the proposed trees."""
        ctx, target, wanted = self.ctx, self.target, self._wanted
        rooms = [
            min(row.prompt_length + max_tokens - row.length - 1, target.room(row.length))
            for row, max_tokens in zip(ctx.rows, self._max_tokens, strict=True)
        ]
        planner, budget = self._planner if self._skipped is None else None, self.budget
        if wanted is not None:
            planner, budget, rooms = wanted.plan(ctx, planner, budget, rooms)
        elif planner is not None:
            budget = planner.budget(ctx, self.rule.children)
        least, most = min(rooms), max(rooms)
        if budget.depth >= most:
            budget = cut_depth(budget, most - 1)
        if wanted is None and self._masks is None and budget.depth < least and self.drafter.is_one_request:
            return planner, budget, None

        def revise(tree: DraftTree) -> DraftTree:
            """Drop nodes that are not worth their verification, or can never be emitted."""
            if budget.rule is not None and not self.drafter.grows_by_rule:
                tree = prune_by_rule(tree, budget.rule)
            tree = tree if wanted is None else wanted.cut(ctx, tree)
            if tree.tokens.shape[1] > least and (tree.depth is None or tree.depth >= least):
                tree = tree.prune(ctx.tensor([room - 1 for room in rooms]), min(tree.max_depth, most - 1))
            return tree if self._masks is None else self._masks.find(tree)

        return planner, budget, revise

    def _draft_and_verify(self, budget: Budget, revise: Callable[[DraftTree], DraftTree] | None) -> StepResult:
        """``Target.step``, without drafts if the drafter fails."""
        sampling, accept = cast(SamplingBatch, self._batch), None
        handle = None if sampling.adjusts or self._masks is not None else sampling.noise.handle
        if handle is not None and self.rule.is_match and self.target.applies_match:
            starts = [row.length + 1 for row in self.ctx.rows]
            accept = AcceptArgs(handle, sampling.drawing_seeds, starts, sampling.filters)
        try:
            return self.target.step(self.drafter, self.ctx, sampling, budget, accept, revise)
        except DraftFailed as failure:
            self._remove_drafter(failure.error)
            return self.target.step(self.drafter, self.ctx, sampling, budget, accept, revise)

    def _accept(self, result: StepResult) -> tuple[Accepted, Tensor]:
        """Apply the rule; also returns the scores that it was applied to."""
        tree, sampling = result.tree.proposed, cast(SamplingBatch, self._batch)
        logits, starts = self._adjusted(result), [row.length + 1 for row in self.ctx.rows]
        accepted = self.rule.early(tree, logits, sampling, starts)  # filters only along the accepted path
        if accepted is not None:
            return accepted, logits
        scores = sampling.filtered(logits)
        return self.rule.apply(tree, scores, sampling, starts), scores

    def _adjusted(self, result: StepResult) -> Tensor:
        """The logits after masks, penalties and biases."""
        sampling, logits = cast(SamplingBatch, self._batch), result.output.logits
        logits = logits if self._masks is None else self._masks.apply(logits)
        if sampling.adjusts or logits.dtype not in (torch.float32, torch.float64):
            logits = sampling.adjusted(logits, result.tree, self.ctx.history() if sampling.penalises else None)
        return logits

    def _observe(self, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Show the drafter what was accepted of its tree."""
        try:
            self.drafter.observe(self.ctx, tree, accepted, output)
        except Exception as error:
            self._remove_drafter(error)
        else:
            if self.faults.in_a_row and tree.num_nodes > 1:
                self.faults.in_a_row = 0

    def _emit(self, index: int, emitted: Emitted, accepted: Accepted, output: TargetOutput) -> RowStep:
        """A row's share of the step, cut where the request ends. Changes only the state of the request's text."""
        request, row = self.running[index], self.ctx.rows[index]
        num_accepted, position = len(emitted.tokens) - 1, row.length + 1
        if not emitted.finite:
            error = self._masks.error(index) if self._masks is not None else None
            error = error or explain(self.target.name, request, position, output.logits[index], accepted.path[index])
            return RowStep(request.id, (), emitted.num_drafted, 0, emitted.depth, "error", None, position, "", error)
        end = min(row.prompt_length + request.sampling.max_tokens, self.target.max_length)
        tokens, text, finish = request.cut(emitted.tokens, end - position, self.target.eos_ids)
        num_top, logprobs = request.sampling.logprobs, None
        if num_top is not None:
            logprobs = get_logprobs(tokens, output.logits[index], accepted.path[index], num_top)
        counts = emitted.num_drafted, num_accepted, emitted.depth
        return RowStep(request.id, tuple(tokens), *counts, finish, logprobs, position, text)

    def _finish(self, step: Step) -> Step:
        """Write the step's tokens to rows and requests. Idempotent: safe to run again after an interrupt."""
        has_ended = False
        for request, row, emitted in zip(self.running, self.ctx.rows, step.rows, strict=True):
            row.tokens[emitted.position :] = emitted.token_ids
            row.length = emitted.position + emitted.num_accepted
            request.take(emitted, step)
            has_ended = has_ended or request.finish_reason is not None
        self.unfinished = None
        if has_ended:
            self._drop_ended()
        self._changing = False
        return step

    # --- rows ------------------------------------------------------------------------------------------------------

    def _read(self, ctx: Context, drafter: Drafter, prefill: Prefill, stop: int) -> Tensor | None:
        """Read up to ``stop``; of the last piece, returns the features that the drafter has not read yet."""
        row = prefill.row
        features = self.target.read(ctx, row, prefill.done, stop)
        if stop < row.length:
            if drafter.resumes:
                drafter.read_on(ctx, row, features, stop)
                row.resumed = stop
            elif features is not None:
                prefill.features.append(features)
        elif prefill.features:
            features = joined([*prefill.features, cast(Tensor, features)], 1)
        prefill.done = stop
        return features

    def _join(self, ctx: Context, drafter: Drafter, prefill: Prefill, features: Tensor | None) -> Drafter:
        """Add a row that has been read, to target and drafter or to neither; returns the drafter that remains."""
        ctx.rows.append(prefill.row)
        try:
            drafter.admit(ctx, features)
        except Exception as error:
            if self._new_drafter is None:
                self.target.remove(ctx, ctx.num_rows - 1)
            return self._remove_drafter(error, prefill.request)
        return drafter

    def _remove_drafter(self, error: Exception, request: Request | None = None) -> Drafter:
        """Continue without the drafter, which raised ``error``, until the rows are rebuilt with a fresh one.

        Args:
            request: the one that it could not admit.

        Raises:
            Exception: ``error``, if the drafter cannot be replaced.
        """
        if self._new_drafter is None:
            raise error
        self.drafter, name = NoDrafter(), self.drafter.name
        self.faults.add(name, error, request)
        if self.faults.is_hopeless:
            self._new_drafter, self._planner = NoDrafter, None
        self._needs_drafter = not self.faults.is_hopeless
        return self.drafter

    def _remove(self, index: int) -> None:
        """Remove a row from target, drafter and batch; the last row takes its place."""
        try:
            self.drafter.remove(self.ctx, index)
        except Exception as error:
            self._remove_drafter(error)
        self.target.remove(self.ctx, index)
        last = len(self.running) - 1
        rows = (*self.running[:index], self.running[last], *self.running[index + 1 : last])
        self._batch, self.running = None, rows[:last]
        if self._skipped is not None:
            self.drafter, self._skipped = self._skipped, None

    def _drop_ended(self) -> None:
        for index in range(len(self.running) - 1, -1, -1):
            request = self.running[index]
            if request.finish_reason is not None:
                if self.pages is not None and request.error is None:
                    self._remember(self.pages, index)
                elif self.pages is not None:
                    self.pages.prefixes.drop(self.pages.rows[index])
                self._remove(index)

    def _remember(self, pages: PageTable, index: int) -> None:
        """Keep the final pages of a row for requests with the same prefix."""
        if not self.shares_prefixes:
            return
        row = self.ctx.rows[index]
        num_valid = min(row.length, self.drafter.num_read[index]) if self.drafter.resumes else row.length
        pages.prefixes.remember(row.tokens, pages.rows[index], num_valid)

    def _rebuild(self) -> None:
        """Make the rows of target and drafter again for all running requests, with a fresh drafter."""
        if self._new_drafter is None:
            raise ConfigError(
                f"a step was interrupted while {self.drafter.name} was changing its rows, so they cannot be "
                f"trusted: admit the requests to a new Decoder, or give it a function that makes the drafter"
            )
        self.generation += 1
        with torch.inference_mode():
            if self.pages is None:
                self._rebuild_rows(self._new_drafter)
            else:
                self.pages.restart()
                with self.pages.making():
                    self._rebuild_rows(self._new_drafter)

    def _rebuild_rows(self, new_drafter: Callable[[], Drafter]) -> None:
        try:
            drafter = fresh = new_drafter()
        except Exception as error:
            drafter, fresh = self._remove_drafter(error), None
        ctx = self.target.new_context(drafter.features)
        if self.pages is not None:
            self._lead(ctx)
        running = tuple(request for request in self.running if request.finish_reason is None)
        for request in running:
            prefill = Prefill.of(request)
            piece = PREFILL_CHUNK if self.pages is not None else prefill.row.length
            while prefill.done + piece < prefill.row.length:
                self._read(ctx, drafter, prefill, prefill.done + piece)
            features = self._read(ctx, drafter, prefill, prefill.row.length)
            drafter = self._join(ctx, drafter, prefill, features)
            request.restart_text()
        self._needs_drafter &= drafter is not fresh
        self.ctx, self.drafter, self.running, self._batch, self._skipped = ctx, drafter, running, None, None
        self._changing = False


def cut_depth(budget: Budget, depth: int) -> Budget:
    """A budget that drafts not much deeper than ``depth``, the tokens that can still be emitted.

    The depth is rounded up to a power of two: where drafts are recorded, each depth is recorded separately.
    """
    depth = max(_MIN_DEPTH, 1 << (depth - 1).bit_length()) if depth > 0 else 0
    return budget if budget.depth <= depth else cut_to_depth(budget, depth)


def tree_slots(budgets: Sequence[Budget]) -> int:
    """Slots after a row's tokens that drafting and verifying by the widest of these budgets may need."""
    levels = max(budget.depth for budget in budgets) * max(budget.width for budget in budgets)
    nodes = max(max(budget.nodes or 0, len(budget.paths or ())) for budget in budgets)
    return 1 + EXTRA_NODES + max(levels, nodes)


def least_pages(budget: Budget) -> int:
    """Return the pages that a prompt of one token and an answer of one need."""
    return pages_of(tree_slots([budget]) + 2)
