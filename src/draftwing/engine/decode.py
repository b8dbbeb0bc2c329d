"""The decode loop: draft a tree, score it, keep what the rule keeps, hand the tokens out.

Rows join and leave between steps. Everything else (queues, streams, serving) is a wrapper around ``Decoder.step``.

A step either counts or does not, wherever an exception or an interrupt hits it: up to one assignment (``undone``)
nothing that anybody reads has changed, and from there on the next call finishes what is left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from operator import sub
from typing import cast

import torch

from draftwing.accept import Rule, get_rule
from draftwing.budget.planner import Planner
from draftwing.drafters.base import Budget, Drafter, Learning, NoDrafter
from draftwing.drafters.growing.worth import worth_keeping
from draftwing.engine.aside import passes_over
from draftwing.engine.faults import Faults
from draftwing.engine.masks import Masks
from draftwing.engine.reading import as_on_device, mark, read, stamp
from draftwing.engine.request import Request
from draftwing.engine.rows import cut_to, explain, logprobs_of, rooms_of, with_laws
from draftwing.engine.wishes import Wanted, names_of, suited
from draftwing.errors import ConfigError, DraftwingError, UnsupportedError
from draftwing.inference import inference
from draftwing.model.target import Context, Target, TargetOutput
from draftwing.noise import Walk
from draftwing.run.kernel.noise import noise_of
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.stats import RowStep, Step, Timings
from draftwing.tree import Accepted, DraftTree, Emitted

__all__ = ["Decoder", "loop_of"]

_SCORES = (torch.float32, torch.float64)  # logits that are scores as they stand


class Decoder:
    """Decodes a changing set of requests, each with its own sampling.

    One thread steps at a time; another one waits for its turn.

    Args:
        target: the model whose text this is.
        drafter: proposes trees, or a function that makes it with empty state: with that, requests outlive a step that
            was interrupted while rows were being changed. None decodes plainly.
        rule: a name in ``accept.RULES``.
        budget: how much to draft for requests that do not say it themselves.
        lossless: refuse rules that change the target's law.
        planner: decides how much to draft in each step, instead of ``budget``.
        turn: held during each step; whoever shares a planner shares it too.

    Attributes:
        running: the requests in its rows.
        undone: a step that counts, but was interrupted before everything was put down; the next call of ``step`` does
            that and returns it.
        draft_names: names of what drafts: a request may choose among them.
        faults: what drafters raised. A step goes on without a drafter that fails, the next one has a fresh one, and
            after several faults in a row there is none any more. (An only drafter that was given, not made by a
            function, cannot be replaced: what it raises goes on to the caller.)
        is_lone: whether one request runs at a time at most: then whole texts may go without the drafter (``aside``).

    Raises:
        ConfigError: an unknown or lossy rule, or a budget that the rule cannot take.
        UnsupportedError: a drafter for a target whose state cannot be rolled back.
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
    ) -> None:
        self.target, self._planner = target, planner
        self._new_drafter = drafter if callable(drafter) else NoDrafter if drafter is None else None
        self.drafter: Drafter = drafter() if callable(drafter) else drafter or NoDrafter()
        self.draft_names = names_of(self.drafter)
        self.rule = get_rule(rule, lossless=lossless)
        self.budget = self.checked(budget or Budget())
        if self.drafter.traits.drafts and not target.supports_trees:
            raise UnsupportedError(
                f"{target.name} keeps a state that cannot be rolled back (recurrent layers), so drafted tokens could "
                f"not be taken back: decode it plainly with draft='none'"
            )
        self.ctx = target.new_context(self.drafter.features)
        self._noise = noise_of(target.vocab_size, target.device)
        self._turn = turn or threading.RLock()
        self.running: tuple[Request, ...] = ()  # in the order of ``ctx.rows``
        self._batch: SamplingBatch | None = None
        self._masks: Masks | None = None  # of the batch
        self._wanted: Wanted | None = None  # where a request says how much is drafted for it
        self._ends: list[int] = []  # of the rows: tokens that each may emit in all
        self._on_gpu = target.device.type == "cuda"
        self._next_id = 0
        self.undone: Step | None = None
        self.faults = Faults()
        self.is_lone = False
        self._aside: Drafter | None = None  # the drafter, while a text is decoded without it
        self._left_out = False  # whether the drafter is, until a fresh one takes its place
        self._changing = False  # rows of target and drafter may be out of step with each other

    @property
    def num_running(self) -> int:
        """Requests that the next step will advance."""
        return len(self.running)

    def checked(self, budget: Budget) -> Budget:
        """A budget as the rule needs it. Raises ConfigError for one that it cannot take."""
        return suited(budget, self.rule)

    def check(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        """Raise PromptError or SamplingError where such a request cannot be decoded."""
        sampling.check_vocabulary(self.target.vocab_size)
        self.target.check_prompt(prompt_ids)

    def admit(self, prompt_ids: Sequence[int], sampling: Sampling) -> int:
        """Prefill a prompt and add it to the batch.

        Returns:
            The request's id.

        Raises:
            PromptError, SamplingError: see ``check``.
            ConfigError: stop strings; they need an ``Engine`` with a tokenizer.
        """
        self.check(prompt_ids, sampling)
        request = Request(self._next_id, prompt_ids, sampling)
        self.start(request)
        self._next_id += 1
        return request.id

    def start(self, request: Request) -> None:
        """Add a request that ``check`` has passed, with all that it has emitted already."""
        with self._turn:
            self.settle()
            self._changing, drafter = True, self.drafter
            goes = self.is_lone and not self.running and passes_over(request, self._planner, drafter.traits)
            aside = drafter if goes else None
            try:
                self.drafter = self._add(self.ctx, NoDrafter() if aside else drafter, request)
            except DraftwingError:  # refused, with the rows as they were
                self._changing = False
                raise
            self._batch, self.running, self._aside = None, (*self.running, request), aside
            self._changing = False

    def retire(self, request_id: int) -> None:
        """Drop a request that is still running (a client that went away)."""
        with self._turn:
            self.settle()
            request = next((each for each in self.running if each.id == request_id), None)
            if request is None:
                raise ConfigError(
                    f"request {request_id} is not running: it finished, or was never admitted; retire only ids from "
                    f"admit() that no step has finished"
                )
            request.finish_reason = "cancelled"
            self.sweep()

    def sweep(self) -> None:
        """Drop the rows whose requests have ended from outside."""
        with self._turn:
            self.settle()
            self._changing = True
            self._drop_ended()
            self._changing = False

    def settle(self) -> None:
        """Finish a step that counts, or put rows together anew, after an interrupt in the middle of either.

        Raises:
            ConfigError: the drafter's rows cannot be trusted, and nobody said how to make another one.
        """
        with self._turn:
            if self.undone is not None:
                self._carry_out(self.undone)
            elif self._changing:
                self._start_over()

    def learn(self) -> None:
        """Let the drafter learn from the steps so far: one whose traits say that it does."""
        try:
            cast(Learning, self.drafter).learn()
        except Exception as error:
            self._leave_out(error)

    @inference
    def step(self) -> Step:
        """Advance every running request by at least one token; finished ones leave the batch.

        A row whose logits are not finite ends with the finish reason ``error``; the others go on.
        """
        with self._turn:
            if self._changing:
                if self.undone is not None:
                    return self._carry_out(self.undone)
                self.settle()
            if self._left_out and self.faults.may_try(self.running):
                self._start_over()
            if not self.running:
                raise ConfigError("there is nothing to decode: admit a prompt first")
            ctx, sampling = self.ctx, self._batch or self._new_batch()
            clock, masks, marks = [time.perf_counter()], self._masks, [mark(ctx.device)] if self._on_gpu else None
            starts = [state.length + 1 for state in ctx.rows]
            walk = self.rule.walk(sampling, starts) if masks is None and self.target.walks else None
            tree, planner = self._propose(ctx, sampling, walk)
            stamp(clock, marks, ctx.device) if marks else clock.append(time.perf_counter())
            tree = tree if masks is None else masks.read(tree)
            walk = None if tree.num_scored else walk
            output = self.target.forward(ctx, tree) if walk is None else self.target.forward(ctx, tree, walk)
            tree = output.tree or tree
            stamp(clock, marks, ctx.device) if marks else clock.append(time.perf_counter())
            clock[1] -= output.ahead
            whole, tree = tree, tree.offer
            adjusted = output.logits if masks is None else masks.apply(output.logits)
            if sampling.adjusts or adjusted.dtype not in _SCORES:
                adjusted = sampling.adjusted(adjusted, whole, ctx.history() if sampling.penalises else None)
            accepted, scores = output.accepted or self.rule.early(tree, adjusted, sampling, starts), adjusted
            if accepted is None:
                scores = sampling.filtered(adjusted)
                accepted = self.rule.apply(tree, scores, sampling, starts)
            emitted = accepted.on_host or read(tree, accepted, scores)  # the one place that waits for the device
            clock.append(time.perf_counter())
            if marks:
                as_on_device(clock, marks)
            self._changing = True
            if output.accepted is None:
                self.target.commit(ctx, tree, accepted)
            self._observe(ctx, whole, accepted, output)
            clock.append(time.perf_counter())
            rows, num_tokens = [], 0
            for place, found in enumerate(emitted):
                rows.append(self._advance(place, found, accepted, output))
                num_tokens += len(rows[-1].token_ids)
            rows = with_laws(rows, tree, sampling.filtered(adjusted), sampling) if sampling.has_laws else rows
            if planner is not None:
                planner.observe(tree, accepted, num_tokens, clock[1] - clock[0], time.perf_counter() - clock[1])
            clock.append(time.perf_counter())
            timings = Timings(*map(sub, clock[1:], clock))
            self.undone = Step(tuple(rows), tree, accepted, timings, self.rule.lossless)  # from here on it counts
            return self._carry_out(self.undone)

    # --- the parts of a step ---------------------------------------------------------------------------------------

    def _new_batch(self) -> SamplingBatch:
        """After rows came or went."""
        self._wanted = Wanted.of([request.speculation for request in self.running])
        self._ends = [request.sampling.max_tokens for request in self.running]
        rows = [request.sampling for request in self.running]
        cuts = self.rule.children in ("keyed", "top")
        self._masks = Masks.of(self.running, self.target.vocab_size, self.target.eos_ids, cuts=cuts)
        self._batch = SamplingBatch(rows, self._noise, self.target.device)
        return self._batch

    def _propose(self, ctx: Context, sampling: SamplingBatch, walk: Walk | None) -> tuple[DraftTree, Planner | None]:
        """A tree for every row, no deeper than can still be emitted, and who is to learn what became of them."""
        rooms = rooms_of(ctx.rows, self._ends, self.target.max_length)
        planner, budget, wanted = self._planner if self._aside is None else None, self.budget, self._wanted
        if wanted is not None:
            planner, budget, rooms = wanted.plan(ctx, planner, budget, rooms)
        elif planner is not None:
            budget = planner.budget(ctx, self.rule.children)
            planner = planner if planner.listens else None
        if budget.depth >= max(rooms):
            budget = cut_to(budget, max(rooms) - 1)
        is_final = wanted is None and budget.depth < min(rooms) and self.drafter.traits.hands_on
        ctx.walk = walk if is_final else None
        try:
            tree = self.drafter.propose(ctx, sampling, budget)
        except Exception as error:
            self._leave_out(error)
            return ctx.roots(), planner
        if budget.rule is not None and not self.drafter.traits.grows_by_rule:
            tree = worth_keeping(tree, budget.rule)
        tree = tree if wanted is None else wanted.cut(ctx, tree)
        if tree.tokens.shape[1] > min(rooms) and (tree.depth is None or tree.depth >= min(rooms)):
            tree = tree.prune(ctx.tensor([room - 1 for room in rooms]), min(tree.max_depth, max(rooms) - 1))
        return tree, planner

    def _observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Tell the drafter what became of its tree."""
        try:
            self.drafter.observe(ctx, tree, accepted, output)
        except Exception as error:
            self._leave_out(error)
        else:
            if self.faults.in_a_row and tree.num_nodes > 1:
                self.faults.in_a_row = 0

    def _advance(self, row: int, emitted: Emitted, accepted: Accepted, output: TargetOutput) -> RowStep:
        """What one row emits, cut where the request ends. Changes nothing but the state of the row's text."""
        request, state = self.running[row], self.ctx.rows[row]
        num_accepted, position = len(emitted.tokens) - 1, state.length + 1
        if not emitted.finite:
            error = self._masks.error(row) if self._masks is not None else None
            error = error or explain(self.target.name, request, position, output.logits[row], accepted.path[row])
            return RowStep(request.id, (), emitted.num_drafted, 0, emitted.depth, "error", None, position, "", error)
        end = min(state.prompt_length + request.sampling.max_tokens, self.target.max_length)
        tokens, text, finish = request.cut(emitted.tokens, end - position, self.target.eos_ids)
        num_top = request.sampling.logprobs
        logprobs = None if num_top is None else logprobs_of(tokens, output.logits[row], accepted.path[row], num_top)
        counts = emitted.num_drafted, num_accepted, emitted.depth
        return RowStep(request.id, tuple(tokens), *counts, finish, logprobs, position, text)

    def _carry_out(self, step: Step) -> Step:
        """Make a step that counts everybody's own. As long as it is ``undone``, it can be done again from the start."""
        has_ended = False
        for request, state, row in zip(self.running, self.ctx.rows, step.rows, strict=True):
            state.tokens[row.position :] = row.token_ids
            state.length = row.position + row.num_accepted
            request.take(row, step)
            has_ended = has_ended or request.finish_reason is not None
        self.undone = None
        if has_ended:
            self._drop_ended()
        self._changing = False
        return step

    # --- rows ------------------------------------------------------------------------------------------------------

    def _add(self, ctx: Context, drafter: Drafter, request: Request) -> Drafter:
        """A row at the end, of target and drafter, or of neither; the drafter, or what is left where it failed."""
        features = self.target.prefill(ctx, [*request.prompt_ids, *request.token_ids])
        row = ctx.rows[-1]
        row.prompt_length, row.references, row.drafts = len(request.prompt_ids), request.references, request.drafts
        try:
            drafter.admit(ctx, features)
        except Exception as error:
            if self._new_drafter is None:
                self.target.remove(ctx, ctx.num_rows - 1)
            return self._leave_out(error, request)
        return drafter

    def _leave_out(self, error: Exception, request: Request | None = None) -> Drafter:
        """Go on without the drafter, which raised ``error``, until a fresh one can be made of the tokens.

        Where nobody said how to make one, the error is the caller's. ``request``: whose row it could not take.
        """
        if self._new_drafter is None:
            raise error
        self.drafter, name = NoDrafter(), self.drafter.name
        self.faults.add(name, error, request)
        if self.faults.is_hopeless:
            self._new_drafter, self._planner = NoDrafter, None
        self._left_out = not self.faults.is_hopeless
        return self.drafter

    def _drop_ended(self) -> None:
        """Take the rows of requests that have ended out; each time the last row takes the place."""
        for row in range(len(self.running) - 1, -1, -1):
            if (ended := self.running[row]).finish_reason is not None:
                try:
                    self.drafter.remove(self.ctx, row)
                except Exception as error:
                    self._leave_out(error)
                self.target.remove(self.ctx, row)
                moved = (*self.running[:row], self.running[-1], *self.running[row + 1 : -1])
                self._batch, self.running = None, moved[: len(self.running) - 1]
                if self._aside is not None and self._planner is not None:
                    self._planner.passed_over(len(ended.token_ids))
                    self.drafter, self._aside = self._aside, None

    def _start_over(self) -> None:
        """New rows of target and drafter for all that runs."""
        if self._new_drafter is None:
            raise ConfigError(
                f"a step was interrupted while {self.drafter.name} was changing its rows, so they cannot be "
                f"trusted: admit the requests to a new Decoder, or give it a function that makes the drafter"
            )
        try:
            drafter = fresh = self._new_drafter()
        except Exception as error:
            drafter, fresh = self._leave_out(error), None
        ctx = self.target.new_context(drafter.features)
        running = tuple(request for request in self.running if request.finish_reason is None)
        for request in running:
            drafter = self._add(ctx, drafter, request)
            request.restart_text()
        self._left_out &= drafter is not fresh
        self.ctx, self.drafter, self.running, self._batch, self._aside = ctx, drafter, running, None, None
        self._changing = False


def loop_of(target: Target) -> Callable[[Drafter, Budget], Decoder]:
    """Makes loops of a drafter and a fixed budget: what costs are measured with (``budget.measure``)."""
    return lambda drafter, budget: Decoder(target, drafter, budget=budget)
