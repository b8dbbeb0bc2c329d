"""Answers of a loaded ``LM``, with the target's hidden states if a cache is to store them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.engine import Engine
from draftwing.errors import ConfigError, PromptError, TokenizerError
from draftwing.lm import LM
from draftwing.methods.base import Budget, Drafter
from draftwing.models.context import Context, FeatureSpec, TargetOutput
from draftwing.request import Request
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.train.answers import AnsweredTask, Task, sampling_of
from draftwing.train.data import JOIN, DialogueEncoder, Example
from draftwing.train.feature_cache import CacheRow
from draftwing.tree import Accepted, DraftTree


class LMAnswerer:
    """Answers tasks with an ``LM``, up to ``max_batch`` at once.

    Dialogues are rendered by the chat template; without one their messages are joined by empty lines, as in training.

    Args:
        sampling: one, or several of which each task gets one (see ``sampling_of``).
        states: the hidden states to keep of all tokens that are read and written (``AnsweredTask.row``).
    """

    def __init__(
        self, lm: LM, sampling: Sampling | Sequence[Sampling], *, max_batch: int = 8, states: Sequence[int] = ()
    ) -> None:
        if max_batch < 1:
            raise ConfigError(f"max_batch must be at least 1, found {max_batch}")
        self._lm, self._max_batch = lm, max_batch
        self._choices = [sampling] if isinstance(sampling, Sampling) else list(sampling)
        self._recorded: dict[bytes, Tensor] = {}  # by ids: the states of rows that have just ended
        self._encoder = None
        if states:
            self._lm = recording(lm, states, lambda ids, row: self._recorded.update({_key(ids): row}))
            self._encoder = DialogueEncoder(lm.tokenizer, lm.target.max_length, settings={})
        self.num_tokens = 0

    def answer(self, tasks: Iterable[Task]) -> Iterator[AnsweredTask]:
        engine, waiting = self._lm.engine(max_batch=self._max_batch), iter(tasks)
        running: dict[Request, AnsweredTask] = {}
        yield from self._refill(engine, running, waiting)
        for step in engine.steps():
            self.num_tokens += sum(len(row.token_ids) for row in step.rows)
            for request in [request for request in running if request.finish_reason is not None]:
                answer = running.pop(request)
                if request.error is not None:
                    yield answer.finish(str(request.error))
                elif request.text.strip():
                    answer.row = self._row(answer, request)
                    answer.take(request.text, request.finish_reason or "", len(request.token_ids))
                    yield from self._submit(engine, running, answer)
                else:
                    yield answer.finish("the answer is empty")
            self._recorded.clear()
            yield from self._refill(engine, running, waiting)

    def _refill(
        self, engine: Engine, running: dict[Request, AnsweredTask], waiting: Iterator[Task]
    ) -> Iterator[AnsweredTask]:
        """Submit tasks until ``max_batch`` are running; yield those that cannot be submitted."""
        while len(running) < self._max_batch and (task := next(waiting, None)) is not None:
            temperature = sampling_of(self._choices, task.id).temperature
            yield from self._submit(engine, running, AnsweredTask(task, temperature))

    def _submit(
        self, engine: Engine, running: dict[Request, AnsweredTask], answer: AnsweredTask
    ) -> Iterator[AnsweredTask]:
        """Submit the next prompt, or yield the answer if there is no next prompt, or an invalid one."""
        prompt = answer.next_prompt()
        if prompt is None:
            yield answer.finish()
            return
        if not isinstance(prompt, str) and not self._lm.tokenizer.has_chat_template:
            prompt = "".join(message["content"] + JOIN for message in prompt)
        sampling = sampling_of(self._choices, answer.task.id)
        try:
            running[engine.submit(self._lm.encode(prompt), sampling)] = answer
        except (PromptError, TokenizerError) as error:  # longer than the context, or refused by the chat template
            yield answer.finish(str(error))

    def _row(self, answer: AnsweredTask, request: Request) -> CacheRow | None:
        """Return all ids up to the end of a request's answer, and the states; what the assistant wrote counts."""
        ids = [*request.prompt_ids, *request.token_ids]
        states = self._recorded.get(_key(ids))
        if self._encoder is None or states is None or len(states) != len(ids) - 1:
            return None
        num_prompt, sampling = len(request.prompt_ids), request.sampling
        mask = np.ones(len(ids), dtype=bool)
        mask[:num_prompt] = self._encoder.mask_of_prompt(answer.prompted, request.prompt_ids)
        example = Example(np.asarray(ids, dtype=np.int32), mask)
        is_greedy = not (sampling.temperature or sampling.penalises or sampling.logit_bias or sampling.banned_tokens)
        best, unknown = np.append(example.ids[1:], np.int32(0)), mask[1 : num_prompt if is_greedy else None]
        best[: len(unknown)][unknown] = -1
        return CacheRow(example, F.pad(states, (0, 0, 0, 1)), best)


def _key(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype=np.int64).tobytes()


Take = Callable[[Sequence[int], Tensor], None]


def recording(lm: LM, states: Sequence[int], take: Take) -> LM:
    """Return an ``LM`` with the same output that also records the target's states: see ``FeatureRecorder``."""
    make, hidden_size = lm.new_drafter, lm.target.hidden_size

    def new_drafter() -> FeatureRecorder:
        return FeatureRecorder(make(), states, hidden_size, take)

    return LM(lm.target, lm.tokenizer, new_drafter, lm.rule, lm.budget, lossless=lm.lossless)


class FeatureRecorder(Drafter):
    """Drafts like ``inner``, and reports the target's hidden states of each row when it is removed.

    The target gives them to drafters that request them: of a prompt when a row is admitted, and of each step's tree
    when it is observed. Rejected nodes are dropped.

    Shape suffixes: B rows, P nodes on a path, T tokens, S hidden states, H hidden, F features.

    Args:
        states: the hidden states, counted like ``FeatureSpec.taps``.
        hidden_size: H of the target.
        take: called with a row's T tokens, prompt first, and the states (T - 1, S * H) in bfloat16 of all tokens but
            the last, which the target has read or not, depending on the draft.
    """

    def __init__(self, inner: Drafter, states: Sequence[int], hidden_size: int, take: Take) -> None:
        taps = (*inner.features.taps, *(state for state in states if state not in inner.features.taps))
        self.copy_capabilities(inner)
        self.name, self.identity, self.features = inner.name, inner.identity, FeatureSpec(taps)
        self.resumes = self.lists = False  # it records whole texts
        self._inner, self._take = inner, take
        self._inner_width = len(inner.features.taps) * hidden_size
        self._columns = [slice(place * hidden_size, (place + 1) * hidden_size) for place in map(taps.index, states)]
        self._rows: list[list[Tensor]] = []  # pieces (P, S * H) of each row

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        pieces = [self._recorded(features)[0]]
        self._inner.admit(ctx, self._inner_features(features))
        self._rows.append(pieces)

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        return self._inner.propose(ctx, sampling, budget)

    @torch.inference_mode()
    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        self._inner.observe(ctx, tree, accepted, replace(output, features=self._inner_features(output.features)))
        path = self._recorded(output.features_on(tree, accepted.path))
        for pieces, states, num in zip(self._rows, path, accepted.num.tolist(), strict=True):
            pieces.append(states[: num + 1].clone())  # a view would keep the whole path in memory

    def remove(self, ctx: Context, row: int) -> None:
        tokens = ctx.rows[row].tokens
        self._take(tokens, torch.cat(self._rows[row])[: len(tokens) - 1].cpu())
        self._inner.remove(ctx, row)
        self._rows[row] = self._rows[-1]
        self._rows.pop()

    def _inner_features(self, features: Tensor | None) -> Tensor | None:
        if features is None or not self._inner_width:
            return None
        return features if self._inner_width == features.shape[-1] else features[..., : self._inner_width]

    def _recorded(self, features: Tensor | None) -> Tensor:
        """(B, T, F) -> (B, T, S * H) in bfloat16, copied: the next forward may overwrite the features."""
        if features is None:
            raise ConfigError(
                "the target gave no hidden states to record: let its prefill and forward return the features that "
                "their context requests"
            )
        return torch.cat([features[..., columns].to(torch.bfloat16) for columns in self._columns], -1)
