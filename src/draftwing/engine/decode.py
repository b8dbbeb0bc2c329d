"""The decode loop: draft a tree, score it, keep what the rule keeps, hand the tokens out.

Rows join and leave between steps. Everything else (queues, streams, serving) is a wrapper around ``Decoder.step``.

A step either counts or does not, wherever an exception or an interrupt hits it: up to one assignment (``undone``)
nothing that anybody reads has changed, and from there on the next call finishes what is left.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import sub

import torch

from draftwing.accept import Rule, get_rule
from draftwing.budget.planner import Planner
from draftwing.drafters.base import Budget, Drafter, NoDrafter
from draftwing.drafters.growing.worth import worth_keeping
from draftwing.engine.request import Request
from draftwing.engine.rows import cut_to, explain, logprobs_of, widest, with_laws
from draftwing.errors import ConfigError, DraftwingError, UnsupportedError
from draftwing.model.target import Context, Target, TargetOutput
from draftwing.run.kernel.noise import noise_of
from draftwing.sampling import Sampling, SamplingBatch, on_host
from draftwing.stats import RowStep, Step, Timings
from draftwing.tree import PAD, Accepted, DraftTree, Emitted

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
        self._own_budgets = False  # whether a request says how much is drafted for it
        self._ends: list[int] = []  # of the rows: tokens that each may emit in all
        self._on_gpu = target.device.type == "cuda"
        self._next_id = 0
        self.undone: Step | None = None
        self._changing = False  # rows of target and drafter may be out of step with each other

    @property
    def num_running(self) -> int:
        """Requests that the next step will advance."""
        return len(self.running)

    def checked(self, budget: Budget) -> Budget:
        """A budget as the rule needs it.

        Raises:
            ConfigError: one that the rule cannot take.
        """
        if self.rule.chain_only and not budget.is_chain:
            raise ConfigError(
                f"rule {self.rule.name!r} takes chains, found width {budget.width}: use width 1 or 'match'"
            )
        return replace(budget, children=self.rule.children)

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
            self._changing = True
            try:
                self._add(self.ctx, self.drafter, request)
            except DraftwingError:  # refused, with the rows as they were
                self._changing = False
                raise
            self._batch, self.running = None, (*self.running, request)
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

    @torch.inference_mode()
    def step(self) -> Step:
        """Advance every running request by at least one token; finished ones leave the batch.

        A row whose logits are not finite ends with the finish reason ``error``; the others go on.
        """
        with self._turn:
            if self._changing:
                if self.undone is not None:
                    return self._carry_out(self.undone)
                self.settle()
            if not self.running:
                raise ConfigError("there is nothing to decode: admit a prompt first")
            ctx, sampling = self.ctx, self._batch or self._new_batch()
            clock, starts, rooms = [time.perf_counter()], [], []
            marks = [_mark(ctx.device)] if self._on_gpu else None
            for state, end in zip(ctx.rows, self._ends, strict=True):
                starts.append(state.length + 1)
                rooms.append(min(state.prompt_length + end, self.target.max_length) - state.length - 1)
            planner, budget = self._planner, self.budget
            if self._own_budgets:
                planner, budget, rooms = None, *self._own(rooms)
            elif planner is not None:
                budget = planner.budget(ctx, self.rule.children)
            if budget.depth >= max(rooms):
                budget = cut_to(budget, max(rooms) - 1)
            tree = self.drafter.propose(ctx, sampling, budget)
            if budget.rule is not None and not self.drafter.traits.grows_by_rule:
                tree = worth_keeping(tree, budget.rule)
            if tree.tokens.shape[1] > min(rooms) and (tree.depth is None or tree.depth >= min(rooms)):
                tree = tree.prune(ctx.tensor([room - 1 for room in rooms]), min(tree.max_depth, max(rooms) - 1))
            _stamp(clock, marks, ctx.device) if marks else clock.append(time.perf_counter())
            output = self.target.forward(ctx, tree)
            tree = output.tree or tree
            _stamp(clock, marks, ctx.device) if marks else clock.append(time.perf_counter())
            scores = output.logits
            if sampling.changes_scores or scores.dtype not in _SCORES:
                scores = sampling.scores(scores, tree, ctx.history() if sampling.penalises else None)
            whole, tree = tree, tree.offer
            accepted = self.rule.apply(tree, scores, sampling, starts)
            emitted = accepted.on_host or self._read(tree, accepted, scores)  # the one place that waits for the device
            clock.append(time.perf_counter())
            if marks:
                _as_on_device(clock, marks)
            self._changing = True
            self.target.commit(ctx, tree, accepted)
            self.drafter.observe(ctx, whole, accepted, output)
            clock.append(time.perf_counter())
            rows, num_tokens = [], 0
            for place, found in enumerate(emitted):
                rows.append(self._advance(place, found, accepted, output))
                num_tokens += len(rows[-1].token_ids)
            rows = with_laws(rows, tree, scores, sampling) if sampling.has_laws else rows
            if planner is not None:
                planner.observe(tree, accepted, num_tokens, clock[1] - clock[0], clock[4] - clock[1])
            clock.append(time.perf_counter())
            timings = Timings(*map(sub, clock[1:], clock))
            self.undone = Step(tuple(rows), tree, accepted, timings, self.rule.lossless)  # from here on it counts
            return self._carry_out(self.undone)

    # --- the parts of a step ---------------------------------------------------------------------------------------

    def _new_batch(self) -> SamplingBatch:
        """After rows came or went."""
        self._own_budgets = any(request.speculation is not None for request in self.running)
        self._ends = [request.sampling.max_tokens for request in self.running]
        rows = [request.sampling for request in self.running]
        self._batch = SamplingBatch(rows, self._noise, self.target.device)
        return self._batch

    def _own(self, rooms: Sequence[int]) -> tuple[Budget, list[int]]:
        """The budget of a step where rows say what theirs is, and how far each row may go."""
        budget, mixed = self.budget, any(request.speculation is None for request in self.running)
        if self._planner is not None and mixed:
            budget = self._planner.budget(self.ctx, self.rule.children)
        wanted = [request.speculation or budget for request in self.running]
        return widest(wanted), [min(room, own.depth + 1) for room, own in zip(rooms, wanted, strict=True)]

    def _read(self, tree: DraftTree, accepted: Accepted, scores: torch.Tensor) -> list[Emitted]:
        """What each row emits, where the rule has not said so in the host's own numbers."""
        return _on_the_host(tree, accepted, scores) if on_host(scores) else _gathered(tree, accepted, scores)

    def _advance(self, row: int, emitted: Emitted, accepted: Accepted, output: TargetOutput) -> RowStep:
        """What one row emits, cut where the request ends. Changes nothing but the state of the row's text."""
        request, state = self.running[row], self.ctx.rows[row]
        num_accepted, position = len(emitted.tokens) - 1, state.length + 1
        if not emitted.finite:
            error = explain(self.target.name, request, position, output.logits[row], accepted.path[row])
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

    def _add(self, ctx: Context, drafter: Drafter, request: Request) -> None:
        """A row at the end, of target and drafter, or of neither."""
        features = self.target.prefill(ctx, [*request.prompt_ids, *request.token_ids])
        ctx.rows[-1].prompt_length, ctx.rows[-1].references = len(request.prompt_ids), request.references
        try:
            drafter.admit(ctx, features)
        except DraftwingError:
            self.target.remove(ctx, ctx.num_rows - 1)
            raise

    def _drop_ended(self) -> None:
        """Take the rows of requests that have ended out; each time the last row takes the place."""
        for row in range(len(self.running) - 1, -1, -1):
            if self.running[row].finish_reason is not None:
                self.drafter.remove(self.ctx, row)
                self.target.remove(self.ctx, row)
                moved = (*self.running[:row], self.running[-1], *self.running[row + 1 : -1])
                self._batch, self.running = None, moved[: len(self.running) - 1]

    def _start_over(self) -> None:
        """New rows of target and drafter for all that runs."""
        if self._new_drafter is None:
            raise ConfigError(
                f"a step was interrupted while {self.drafter.name} was changing its rows, so they cannot be "
                f"trusted: admit the requests to a new Decoder, or give it a function that makes the drafter"
            )
        drafter = self._new_drafter()
        ctx = self.target.new_context(drafter.features)
        running = tuple(request for request in self.running if request.finish_reason is None)
        for request in running:
            self._add(ctx, drafter, request)
            request.restart_text()
        self.ctx, self.drafter, self.running, self._batch = ctx, drafter, running, None
        self._changing = False


def loop_of(target: Target) -> Callable[[Drafter, Budget], Decoder]:
    """Makes loops of a drafter and a fixed budget: what costs are measured with (``budget.measure``)."""
    return lambda drafter, budget: Decoder(target, drafter, budget=budget)


def _gathered(tree: DraftTree, accepted: Accepted, scores: torch.Tensor) -> list[Emitted]:
    """What each row emits, read from the device as one tensor: (B, D + 6)."""
    path = accepted.path
    drafted = tree.tokens.gather(1, path.clamp(min=0))
    last = path.gather(1, accepted.num[:, None])
    chosen = scores[torch.arange(len(path), device=path.device), last[:, 0], accepted.bonus]
    columns = [accepted.num, accepted.bonus, tree.valid.sum(1), tree.depths.amax(1), chosen.isfinite()]
    together = torch.cat([drafted, *(column[:, None] for column in columns)], 1)
    return [
        Emitted([*tokens[1 : num + 1], bonus], used - 1, depth, finite > 0)
        for *tokens, num, bonus, used, depth, finite in together.tolist()
    ]


def _on_the_host(tree: DraftTree, accepted: Accepted, scores: torch.Tensor) -> list[Emitted]:
    """The same where tensors are on the host: small operators would cost more than loops."""
    found = []
    columns = (tree.tokens, tree.parents, accepted.path, accepted.num, accepted.bonus)
    for row, (tokens, parents, path, num, bonus) in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
        depths = [0] * len(tokens)
        for node in range(1, len(tokens)):
            depths[node] = depths[parents[node]] + 1 if parents[node] >= 0 else 0
        used = sum(token != PAD for token in tokens)
        finite = math.isfinite(float(scores[row, path[num], bonus]))
        found.append(Emitted([*(tokens[node] for node in path[1 : num + 1]), bonus], used - 1, max(depths), finite))
    return found


def _mark(device: torch.device) -> torch.cuda.Event:
    """A moment in the work of a GPU, which goes on after the host has given it out."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _stamp(clock: list[float], marks: list[torch.cuda.Event], device: torch.device) -> None:
    """This moment, on the host and in the GPU's work."""
    clock.append(time.perf_counter())
    marks.append(_mark(device))


def _as_on_device(clock: list[float], marks: list[torch.cuda.Event]) -> None:
    """Set when drafting and the forward ended to when the GPU had done them; it has, once tokens were handed over.

    The host's own times would count all of it to the hand-over, and a planner would take drafts for free.
    """
    for place, (before, after) in enumerate(itertools.pairwise(marks), 1):
        clock[place] = min(clock[place - 1] + before.elapsed_time(after) / 1000, clock[3])
