"""The decode loop: draft a tree, score it, keep what the rule keeps, hand the tokens out.

Rows join and leave between steps. Everything else (streaming, serving, benchmarks) is a wrapper around
``Decoder.step``.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from draftwing.accept import Rule, get_rule
from draftwing.budget.planner import Planner
from draftwing.drafters.base import Budget, Drafter, NoDrafter
from draftwing.drafters.worth import worth_keeping
from draftwing.errors import ConfigError, NumericsError, UnsupportedError
from draftwing.model.target import Row, Target, TargetOutput
from draftwing.run.kernel.build import noise_of
from draftwing.sampling import Sampling, SamplingBatch, on_host
from draftwing.stats import Logprob, RowStep, Step, Timings
from draftwing.tree import PAD, Accepted, DraftTree, Emitted

__all__ = ["Decoder"]


class Decoder:
    """Decodes a changing set of requests, each with its own sampling.

    Args:
        target: the model whose text this is.
        drafter: proposes trees; None decodes plainly.
        rule: a name in ``accept.RULES``.
        budget: how much to draft.
        lossless: refuse rules that change the target's law.
        planner: decides how much to draft in each step, instead of ``budget``.

    Raises:
        ConfigError: an unknown or lossy rule, or a budget that the rule cannot take.
        UnsupportedError: a drafter for a target whose state cannot be rolled back.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        rule: str | Rule = "match",
        budget: Budget | None = None,
        *,
        lossless: bool = True,
        planner: Planner | None = None,
    ) -> None:
        self.target, self._planner = target, planner
        self.drafter: Drafter = drafter or NoDrafter()
        self.rule = get_rule(rule, lossless=lossless)
        budget = budget or Budget()
        if self.rule.chain_only and not budget.is_chain:
            raise ConfigError(
                f"rule {self.rule.name!r} takes chains, found width {budget.width}: use width 1 or 'match'"
            )
        if drafter is not None and not isinstance(drafter, NoDrafter) and not target.supports_trees:
            raise UnsupportedError(
                f"{target.name} keeps a state that cannot be rolled back (recurrent layers), so drafted tokens could "
                f"not be taken back: decode it plainly with draft='none'"
            )
        self.budget = replace(budget, children=self.rule.children)
        self.ctx = target.new_context()
        self._noise = noise_of(target.vocab_size, target.device)
        self._requests: list[tuple[int, Sampling]] = []
        self._batch: SamplingBatch | None = None
        self._next_id = 0

    @property
    def num_running(self) -> int:
        """Requests that the next step will advance."""
        return len(self._requests)

    def admit(self, prompt_ids: Sequence[int], sampling: Sampling) -> int:
        """Prefill a prompt and add it to the batch.

        Returns:
            The request's id.

        Raises:
            PromptError, SamplingError: see ``Target.check_prompt`` and ``Sampling``.
        """
        sampling.check_vocabulary(self.target.vocab_size)
        self.target.check_prompt(prompt_ids)
        features = self.target.prefill(self.ctx, prompt_ids, self.drafter.features)
        try:
            self.drafter.admit(self.ctx, features)
        except BaseException:  # the rows of target and drafter must stay the same ones
            self.target.remove(self.ctx, self.ctx.num_rows - 1)
            raise
        self._requests.append((self._next_id, sampling))
        self._batch = None
        self._next_id += 1
        return self._next_id - 1

    @torch.inference_mode()
    def step(self) -> Step:
        """Advance every running request by at least one token; finished ones leave the batch."""
        if not self._requests:
            raise ConfigError("there is nothing to decode: admit a prompt first")
        clock, marks = [time.perf_counter()], [_mark(self.target.device)]
        ctx = self.ctx
        sampling = self._batch = self._batch or SamplingBatch(
            [request for _, request in self._requests], self._noise, self.target.device
        )
        starts = [row.length + 1 for row in ctx.rows]
        planner, budget = self._planner, self.budget
        if planner is not None:
            budget = planner.budget(ctx, self.rule.children)
        tree = self.drafter.propose(ctx, sampling, budget)
        if budget.rule is not None and not self.drafter.traits.grows_by_rule:
            tree = worth_keeping(tree, budget.rule)
        tree = self._fit(tree)
        clock.append(time.perf_counter())
        marks.append(_mark(self.target.device))
        output = self.target.forward(ctx, tree, self.drafter.features)
        tree = output.tree or tree
        clock.append(time.perf_counter())
        marks.append(_mark(self.target.device))
        scores = sampling.scores(output.logits, tree, ctx.history() if sampling.penalises else None)
        accepted = self.rule.apply(tree, scores, sampling, starts)
        emitted = self._hand_over(tree, accepted, scores)
        clock.append(time.perf_counter())
        _as_on_device(clock, marks)
        self.target.commit(ctx, tree, accepted)
        self.drafter.observe(ctx, tree, accepted, output)
        clock.append(time.perf_counter())
        rows = [self._advance(b, found, accepted, output) for b, found in enumerate(emitted)]
        for row in reversed([b for b, row in enumerate(rows) if row.finish_reason]):
            self._drop(row)
        if planner is not None:
            num_tokens = sum(len(row.token_ids) for row in rows)
            planner.observe(tree, accepted, num_tokens, clock[1] - clock[0], clock[4] - clock[1])
        clock.append(time.perf_counter())
        timings = Timings(*(after - before for before, after in itertools.pairwise(clock)))
        return Step(tuple(rows), tree, accepted, timings, self.rule.lossless)

    def retire(self, request_id: int) -> None:
        """Drop a request that is still running (a stop string, a client that went away)."""
        for row, (running, _) in enumerate(self._requests):
            if running == request_id:
                self._drop(row)
                return
        raise ConfigError(
            f"request {request_id} is not running: it finished, or was never admitted; retire only ids from admit() "
            f"that no step has finished"
        )

    # --- the parts of a step ---------------------------------------------------------------------------------------

    def _room(self, row: Row, sampling: Sampling) -> int:
        """Tokens that the row may still emit."""
        return min(row.prompt_length + sampling.max_tokens, self.target.max_length) - row.length - 1

    def _fit(self, tree: DraftTree) -> DraftTree:
        """Cut nodes that could not be emitted any more: near its end a row needs a shallower tree."""
        if tree.num_nodes == 1:
            return tree
        room = [self._room(row, request) - 1 for row, (_, request) in zip(self.ctx.rows, self._requests, strict=True)]
        # The depth is known on the host for every tree that was grown, so that nothing waits for the device.
        if min(room) >= tree.num_nodes - 1 or min(room) >= tree.max_depth:
            return tree
        return tree.prune(self.ctx.tensor(room), min(tree.max_depth, max(room)))

    def _hand_over(self, tree: DraftTree, accepted: Accepted, scores: torch.Tensor) -> list[Emitted]:
        """What each row emits.

        The one place where a step waits for the device.
        """
        emitted = accepted.on_host
        if emitted is None:
            emitted = _on_the_host(tree, accepted, scores) if on_host(scores) else _gathered(tree, accepted, scores)
        for row, found in enumerate(emitted):
            if not found.finite:
                raise NumericsError(
                    f"{self.target.name}: the logits of request {self._requests[row][0]} at position "
                    f"{self.ctx.rows[row].length + 1} hold NaN, or every token is banned: check the weights, or load "
                    f"with dtype='float32'"
                )
        return emitted

    def _advance(self, row: int, emitted: Emitted, accepted: Accepted, output: TargetOutput) -> RowStep:
        """Move one row on by the tokens it emits, cut where the request ends."""
        request_id, sampling = self._requests[row]
        tokens = emitted.tokens
        state = self.ctx.rows[row]
        num_accepted = len(tokens) - 1
        room, finish = self._room(state, sampling), None
        ends = sampling.stop_tokens if sampling.ignore_eos else (*sampling.stop_tokens, *self.target.eos_ids)
        stop_at = next((i for i, token in enumerate(tokens) if token in ends), None)
        if stop_at is not None and stop_at < room:
            tokens, finish = tokens[: stop_at + 1], "stop"
        elif len(tokens) >= room:
            tokens, finish = tokens[:room], "length"
        logprobs = (
            None if sampling.logprobs is None else self._logprobs(row, tokens, accepted, output, sampling.logprobs)
        )
        state.tokens.extend(tokens)
        state.length += num_accepted + 1
        return RowStep(request_id, tuple(tokens), emitted.num_drafted, num_accepted, emitted.depth, finish, logprobs)

    def _logprobs(
        self, row: int, tokens: list[int], accepted: Accepted, output: TargetOutput, num_top: int
    ) -> tuple[Logprob, ...]:
        """The target's own log-probabilities of the emitted tokens: each is read at the node before it."""
        nodes = accepted.path[row, : len(tokens)]
        logprobs = output.logits[row, nodes].float().log_softmax(-1)
        best = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1) if num_top else None
        found = []
        for i, token in enumerate(tokens):
            top = () if best is None else tuple(zip(best.indices[i].tolist(), best.values[i].tolist(), strict=True))
            found.append(Logprob(token, float(logprobs[i, token]), top))
        return tuple(found)

    def _drop(self, row: int) -> None:
        self.drafter.remove(self.ctx, row)
        self.target.remove(self.ctx, row)
        self._requests[row] = self._requests[-1]
        self._requests.pop()
        self._batch = None


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


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """A moment in the work of a GPU, which goes on after the host has given it out."""
    if device.type != "cuda":
        return None
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _as_on_device(clock: list[float], marks: list[torch.cuda.Event | None]) -> None:
    """Set when drafting and the forward ended to when the GPU had done them; it has, once tokens were handed over.

    The host's own times would count all of it to the hand-over, and a planner would take drafts for free.
    """
    for place, (before, after) in enumerate(itertools.pairwise(marks), 1):
        if before is not None and after is not None:
            clock[place] = min(clock[place - 1] + before.elapsed_time(after) / 1000, clock[3])
