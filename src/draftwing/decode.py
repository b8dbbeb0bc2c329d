"""What a step came to, as the host reads it: tokens that lie on a device, and the times of its work."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import sub

import numpy as np
import torch
from torch import Tensor

from draftwing.accept import Rule, get_rule
from draftwing.budget.planner import Planner
from draftwing.constraint import State, forbidden_tokens, has_bit, words_without
from draftwing.cpu.noise import noise_of
from draftwing.errors import ConfigError, DraftwingError, DraftwingWarning, NumericsError, UnsupportedError, shown
from draftwing.limits import RowBudgets, budget_for_rule, names_of
from draftwing.methods.base import Budget, Drafter, NoDrafter
from draftwing.methods.net_drafter import drafts_at_once
from draftwing.models.context import Context, Row, TargetOutput
from draftwing.models.target import DraftFailed, Target
from draftwing.request import Request
from draftwing.runtime.tree_builder import prune_by_rule
from draftwing.sampling import Sampling, SamplingBatch, on_host
from draftwing.stats import Law, Logprob, RowStep, Step, Timings
from draftwing.torch_utils import inference
from draftwing.tree import PAD, Accepted, DraftTree, Emitted


def read(tree: DraftTree, accepted: Accepted, scores: torch.Tensor) -> list[Emitted]:
    """What each row emits, where the rule has not said so in the host's own numbers."""
    return _on_the_host(tree, accepted, scores) if on_host(scores) else _gathered(tree, accepted, scores)


def _gathered(tree: DraftTree, accepted: Accepted, scores: torch.Tensor) -> list[Emitted]:
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


# What rows need now and then: budgets of their own, log-probabilities, laws, and why one cannot go on.


_LEAST = 8  # depth that drafts are not cut below


def cut_to(budget: Budget, depth: int) -> Budget:
    """A budget that drafts not much deeper than ``depth``, what can still be emitted.

    The depth is rounded up to a power of two: where drafts are recorded, each depth is a recording of its own.
    """
    depth = max(_LEAST, 1 << (depth - 1).bit_length()) if depth > 0 else 0
    if budget.depth <= depth:
        return budget
    if budget.paths is None or depth == 0:
        return replace(budget, depth=depth, paths=None)
    return replace(budget, paths=tuple(path for path in budget.paths if len(path) <= depth))


def rooms_of(rows: Sequence[Row], ends: Sequence[int], max_length: int) -> list[int]:
    """How many tokens each row may still emit, of ``ends`` in all.

    Args:
        max_length: tokens that a row may hold.
    """
    pairs = zip(rows, ends, strict=True)
    return [min(row.prompt_length + end, max_length) - row.length - 1 for row, end in pairs]


def logprobs_of(tokens: Sequence[int], logits_NV: Tensor, path: Tensor, num_top: int) -> tuple[Logprob, ...]:
    """The target's own log-probabilities of a row's emitted tokens: each is read at the node before it.

    Args:
        tokens: as many as are emitted.
        logits_NV: (N, V) of the row's nodes.
        path: (D + 1,) the kept nodes.
        num_top: how many of the best tokens are named beside each.
    """
    # By numpy: PyTorch's threads would go on waiting for more, on the processors that the next forward needs.
    nodes = path[: len(tokens)]
    if on_host(logits_NV):
        logits = logits_NV.detach().float().numpy()[nodes.numpy()]
    else:
        logits = logits_NV[nodes].detach().float().cpu().numpy()
    shifted = logits - logits.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    found, num_top = [], min(num_top, logprobs.shape[-1])
    for token, law in zip(tokens, logprobs, strict=True):
        best: list[int] = np.argpartition(-law, num_top - 1)[:num_top].tolist() if num_top else []
        top = tuple((each, float(law[each])) for each in sorted(best, key=lambda each: (-law[each], each)))
        found.append(Logprob(token, float(law[token]), top))
    return tuple(found)


def explain(target: str, request: Request, position: int, logits_NV: Tensor, path: Tensor) -> NumericsError:
    """Why a token was drawn from scores that are not finite: the target's logits, or what the settings made of them."""
    kept = logits_NV[path[path != PAD]]
    where = f"{target}: the logits of request {request.id} at position {position}"
    if bool((kept.isnan() | kept.isposinf()).any()):
        return NumericsError(f"{where} hold NaN or infinity: check the weights, or load with dtype='float32'")
    sampling = request.sampling
    values = {
        "temperature": sampling.temperature,
        "logit_bias": max(sampling.logit_bias.values(), key=abs, default=0.0),
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "banned_tokens": f"{len(sampling.banned_tokens)} of them" if sampling.banned_tokens else 0.0,
        "constraint": 0.0 if request.constraint is None else "that allows none of what is left",
    }
    neutral = {"temperature": (0.0, 1.0), "repetition_penalty": (1.0,)}
    active = [f"{name} {value}" for name, value in values.items() if value not in neutral.get(name, (0.0,))]
    return NumericsError(
        f"{where} are finite, but its settings leave no token with a finite score: choose less extreme ones, or drop "
        f"them ({', '.join(active) or 'it has none: the logits are -inf'})"
    )


def with_laws(rows: Sequence[RowStep], tree: DraftTree, scores: Tensor, sampling: SamplingBatch) -> list[RowStep]:
    """The rows of a step, with what the target says at each node where a row asks for it.

    Args:
        rows: in the order of the tree's.
        tree: what was proposed.
        scores: (B, N, V) from which the target draws after each node.
        sampling: of the rows.
    """
    found = list(rows)
    for place, row in enumerate(rows):
        count = sampling.rows[place].laws
        if count and row.error is None:
            tokens, parents = tree.tokens[place].tolist(), tree.parents[place].tolist()
            depths, laws = [0] * len(tokens), []
            for node, above in enumerate(parents):
                depths[node] = depths[above] + 1 if above >= 0 else 0
                beside = [tokens[child] for child, each in enumerate(parents) if each == node]
                if tokens[node] != PAD:
                    position = row.position + depths[node]
                    laws.append(_law(scores[place, node], beside, sampling, (place, position), count))
            found[place] = replace(row, laws=tuple(laws))
    return found


def _law(scores_V: Tensor, beside: Sequence[int], sampling: SamplingBatch, at: tuple[int, int], count: int) -> Law:
    """Of one node. ``beside``: tokens that are named beside the ``count`` likeliest; ``at``: row, and next position."""
    row, position = at
    drawn = sampling.draw_one(scores_V, row, position)
    probs = scores_V.double().softmax(-1)
    named = dict.fromkeys([*probs.topk(min(count, len(probs))).indices.tolist(), *beside, drawn])
    tokens = sorted(named, key=lambda token: -float(probs[token]))
    noise = sampling.noise.at(sampling.seeds[row], position) if sampling.rows[row].temperature > 0 else None
    return Law(
        tuple((token, float(probs[token]), 0.0 if noise is None else float(noise[token])) for token in tokens), drawn
    )


# What requests may not say, at every node of their trees: constraints, and end tokens before ``min_tokens``.
#
# Masks come before everything else that is made of the logits, and are never looked at by drafters: these draft
# blindly.
# A node that a mask forbids can never be kept. Under the keyed rule it is cut out before the forward; the classic rules
# must meet it, or the law of what stands beside it would not be the target's.
#
# Shape suffixes: B rows, N nodes, V vocabulary.


@dataclass(frozen=True)
class _Limited:
    """A row with something that it may not say.

    Attributes:
        ends: tokens that end its text.
        everything: the mask of a row without a constraint; ``young``: where it must not end yet.
    """

    row: int
    request: Request
    ends: tuple[int, ...]
    everything: np.ndarray
    young: np.ndarray

    @property
    def is_free(self) -> bool:
        """Whether it may say anything from here on."""
        return self.request.constraint is None and len(self.request.token_ids) >= self.request.sampling.min_tokens

    def start(self) -> State | None:
        return None if self.request.constraint is None else self.request.state()

    def mask(self, state: State | None, depth: int) -> np.ndarray:
        """After a node. Where all that a constraint leaves are ends, these stand, however young the text is."""
        is_young = len(self.request.token_ids) + depth < self.request.sampling.min_tokens
        if state is None:
            return self.young if is_young else self.everything
        words = state.allowed()
        if not is_young:
            return words
        rest = words_without(words, self.ends)
        return rest if rest.any() else words


class Masks:
    """Of the rows of a batch. ``of`` makes it, or None where nobody needs one.

    Args:
        limited: the rows that do.
        cuts: whether forbidden nodes are taken out of trees.
    """

    def __init__(self, limited: Sequence[_Limited], *, cuts: bool) -> None:
        self._limited, self._cuts = limited, cuts
        self._places: list[tuple[int, int]] = []  # of this step's masks: row and node
        self._words: list[np.ndarray] = []
        self._failed: list[tuple[int, int]] = []
        self._errors: dict[int, DraftwingError] = {}

    @classmethod
    def of(cls, requests: Sequence[Request], vocab_size: int, eos_ids: Sequence[int], *, cuts: bool) -> Masks | None:
        """The masks of requests in the order of their rows."""
        limited = []
        for row, request in enumerate(requests):
            sampling = request.sampling
            if request.constraint is None and not sampling.min_tokens:
                continue
            ends = sampling.stop_tokens if sampling.ignore_eos else (*sampling.stop_tokens, *eos_ids)
            everything = np.full((vocab_size + 31) // 32, 0xFFFFFFFF, dtype=np.uint32)
            limited.append(_Limited(row, request, ends, everything, words_without(everything, ends)))
        return cls(limited, cuts=cuts) if limited else None

    def error(self, row: int) -> DraftwingError | None:
        """Why nothing can be said of a row any more."""
        return self._errors.get(row)

    def read(self, tree: DraftTree) -> DraftTree:
        """Find the masks of all nodes that may be kept.

        Returns:
            The tree, without forbidden nodes where they can be told before it is scored.
        """
        self._places, self._words, self._failed, self._errors = [], [], [], {}
        active = [each for each in self._limited if not each.is_free]
        if not active:
            return tree
        offer = tree.proposed
        if offer.num_nodes == 1:
            for each in active:
                self._walk(each, [0], [-1])
            return tree
        tokens, parents = offer.tokens.tolist(), offer.parents.tolist()
        forbidden = [
            (each.row, node) for each in active for node in self._walk(each, tokens[each.row], parents[each.row])
        ]
        if not self._cuts or tree.num_extra_nodes:
            return tree
        return tree.without(forbidden)

    def _walk(self, limited: _Limited, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Find the masks of one row's nodes; the nodes that can never be kept."""
        states: list[State | None] = [None] * len(tokens)
        masks: list[np.ndarray | None] = [None] * len(tokens)
        depths, forbidden = [0] * len(tokens), []
        for node, (token, above) in enumerate(zip(tokens, parents, strict=True)):
            if node and token == PAD:
                continue
            try:
                if node:
                    mask, state = masks[above], states[above]
                    if mask is None or not has_bit(mask, token):
                        forbidden.append(node)
                        continue
                    if token in limited.ends:  # what is drawn after it is cut off
                        continue
                    depths[node] = depths[above] + 1
                    if state is not None:
                        states[node] = state = state.fork()
                        state.take(token)
                else:
                    states[0] = limited.start()
                masks[node] = limited.mask(states[node], depths[node])
            except DraftwingError as error:
                self._errors[limited.row] = error
                self._failed.append((limited.row, node))
        known = [(node, mask) for node, mask in enumerate(masks) if mask is not None]
        self._places += [(limited.row, node) for node, _ in known]
        self._words += [mask for _, mask in known]
        return forbidden

    def apply(self, logits_BNV: Tensor) -> Tensor:
        """The logits with -inf for what may not be said, as a copy: log-probabilities are those of the logits."""
        if not self._places and not self._failed:
            return logits_BNV
        _, nodes, vocab_size = logits_BNV.shape
        places = [row * nodes + node for row, node in self._places]
        failed = [row * nodes + node for row, node in self._failed]
        forbidden = [forbidden_tokens(words, vocab_size) for words in self._words]
        if on_host(logits_BNV) and logits_BNV.dtype in (torch.float32, torch.float64):
            # By numpy: operators on a row of logits would wait for a second thread.
            rows = np.array(logits_BNV.detach().numpy(), order="C").reshape(-1, vocab_size)
            for place, each in zip(places, forbidden, strict=True):
                np.copyto(rows[place], -math.inf, where=each)
            rows[failed] = math.nan
            return torch.from_numpy(rows).view(logits_BNV.shape)
        masked = logits_BNV.clone(memory_format=torch.contiguous_format)
        flat_RV = masked.view(-1, vocab_size)
        if places:  # all at once
            index = torch.tensor(places, device=masked.device)
            mask = torch.from_numpy(np.stack(forbidden)).to(masked.device)
            flat_RV[index] = flat_RV[index].masked_fill_(mask, -math.inf)
        if failed:
            flat_RV[torch.tensor(failed, device=masked.device)] = math.nan
        return masked


# What goes wrong in drafters, which are there to save time alone: a text goes on without one that fails.


MOST = 3  # faults in a row after which a drafter is given up


@dataclass
class Faults:
    """Exceptions that drafters raised in a decode loop.

    Attributes:
        num: of them in all.
        last: the latest one.
        in_a_row: since the last step with drafts that went well.
    """

    num: int = 0
    last: Exception | None = None
    in_a_row: int = 0
    _refused: set[int] = field(default_factory=set)

    @property
    def is_hopeless(self) -> bool:
        """Whether to try no more drafters."""
        return self.in_a_row >= MOST

    def add(self, name: str, error: Exception, request: Request | None = None) -> None:
        """One more; it warns where that is one too many.

        Args:
            name: the drafter's.
            request: whose row it could not take; None where it failed in another way.
        """
        self.num, self.in_a_row, self.last = self.num + 1, self.in_a_row + 1, error
        if request is not None:
            self._refused.add(request.id)
        if self.is_hopeless:
            warnings.warn(
                f"{name} failed {self.in_a_row} times in a row, the last time with {type(error).__name__}: "
                f"{shown(str(error))}: from here on nothing is drafted, and texts are decoded plainly; load it anew, "
                f"or choose another draft",
                DraftwingWarning,
                stacklevel=2,
            )

    def may_try(self, running: Sequence[Request]) -> bool:
        """Whether a fresh drafter may take all that runs: not while a request is there that one could not take."""
        if self._refused:
            self._refused &= {request.id for request in running}
        return not self._refused


# Texts that are decoded as if there were no drafter, where drafts were not worth it in those before.
#
# A drafter that is never asked still reads prompts and keeps features, and takes its share of the caches: a twentieth
# of
# the time of a small model that lies in these.


def passes_over(request: Request, planner: Planner | None, drafter: Drafter) -> bool:
    """Whether a request that is about to be decoded alone is.

    Not where something speaks for drafts that other texts do not have, such as a grammar, nor with drafters that learn
    from what they see, or that cost next to nothing.
    """
    is_special = request.speculation is not None or request.constraint is not None or len(request.references) > 0
    if planner is None or is_special or drafter.learns or not drafter.costs_forwards:
        return False
    return planner.skips(request.sampling.temperature)


# The decode loop: draft a tree, score it, keep what the rule keeps, hand the tokens out.
#
# Rows join and leave between steps. Everything else (queues, streams, serving) is a wrapper around ``Decoder.step``.
#
# A step either counts or does not, wherever an exception or an interrupt hits it: up to one assignment (``undone``)
# nothing that anybody reads has changed, and from there on the next call finishes what is left.


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
        if self.drafter.drafts and not target.supports_trees:
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
        self._wanted: RowBudgets | None = None  # where a request says how much is drafted for it
        self._ends: list[int] = []  # of the rows: tokens that each may emit in all
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
        return budget_for_rule(budget, self.rule)

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
            goes = self.is_lone and not self.running and passes_over(request, self._planner, drafter)
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
        """Let the drafter learn from the steps so far: see ``Drafter.learns``."""
        try:
            self.drafter.learn()
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
            begun, masks = time.perf_counter(), self._masks
            starts = [state.length + 1 for state in ctx.rows]
            planner, budget, revise = self._plan(ctx)
            planned = time.perf_counter()
            accept = self.rule.accept_args(sampling, starts) if masks is None and self.target.applies_match else None
            try:
                result = self.target.step(self.drafter, ctx, sampling, budget, accept, revise)
            except DraftFailed as failure:
                self._leave_out(failure.error)
                result = self.target.step(self.drafter, ctx, sampling, budget, accept, revise)
            output, whole = result.output, result.tree
            tree = whole.proposed
            adjusted = output.logits if masks is None else masks.apply(output.logits)
            if sampling.adjusts or adjusted.dtype not in _SCORES:
                adjusted = sampling.adjusted(adjusted, whole, ctx.history() if sampling.penalises else None)
            accepted, scores = output.accepted or self.rule.early(tree, adjusted, sampling, starts), adjusted
            if accepted is None:
                scores = sampling.filtered(adjusted)
                accepted = self.rule.apply(tree, scores, sampling, starts)
            emitted = accepted.on_host or read(tree, accepted, scores)  # the one place that waits for the device
            draft_seconds, verify_seconds = result.seconds()
            clock = [begun, planned + draft_seconds, planned + draft_seconds + verify_seconds]
            clock.append(max(time.perf_counter(), clock[-1]))
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
        self._wanted = RowBudgets.of([request.speculation for request in self.running])
        self._ends = [request.sampling.max_tokens for request in self.running]
        rows = [request.sampling for request in self.running]
        cuts = self.rule.children in ("keyed", "top")
        self._masks = Masks.of(self.running, self.target.vocab_size, self.target.eos_ids, cuts=cuts)
        self._batch = SamplingBatch(rows, self._noise, self.target.device)
        return self._batch

    def _plan(self, ctx: Context) -> tuple[Planner | None, Budget, Callable[[DraftTree], DraftTree] | None]:
        """Who learns from this step, how much to draft, and how to change the proposed trees; None if not at all."""
        rooms = rooms_of(ctx.rows, self._ends, self.target.max_length)
        planner, budget, wanted = self._planner if self._aside is None else None, self.budget, self._wanted
        if wanted is not None:
            planner, budget, rooms = wanted.plan(ctx, planner, budget, rooms)
        elif planner is not None:
            budget = planner.budget(ctx, self.rule.children)
        room = min(rooms)
        if budget.depth >= max(rooms):
            budget = cut_to(budget, max(rooms) - 1)
        if wanted is None and self._masks is None and budget.depth < room and drafts_at_once(self.drafter):
            return planner, budget, None

        def revise(tree: DraftTree) -> DraftTree:
            """Drop nodes that are not worth their verification, or can never be emitted."""
            if budget.rule is not None and not self.drafter.grows_by_rule:
                tree = prune_by_rule(tree, budget.rule)
            tree = tree if wanted is None else wanted.cut(ctx, tree)
            if tree.tokens.shape[1] > room and (tree.depth is None or tree.depth >= room):
                tree = tree.prune(ctx.tensor([room - 1 for room in rooms]), min(tree.max_depth, max(rooms) - 1))
            return tree if self._masks is None else self._masks.read(tree)

        return planner, budget, revise

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
            if self.running[row].finish_reason is not None:
                try:
                    self.drafter.remove(self.ctx, row)
                except Exception as error:
                    self._leave_out(error)
                self.target.remove(self.ctx, row)
                moved = (*self.running[:row], self.running[-1], *self.running[row + 1 : -1])
                self._batch, self.running = None, moved[: len(self.running) - 1]
                if self._aside is not None:
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
