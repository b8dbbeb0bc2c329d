"""Answers of our own ``LM``, with the hidden states that it had on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from draftwing.engine import Engine
from draftwing.errors import ConfigError, PromptError, TokenizerError
from draftwing.lm import LM
from draftwing.request import Request
from draftwing.sampling import Sampling
from draftwing.text.prompts import Message
from draftwing.train.answers import Answer, Dialogue, Task, sampling_of
from draftwing.train.data import DialogueEncoder, Example, bare_tokenizer, special_prefix
from draftwing.train.feature_cache import Row
from draftwing.train.recorder import recording


class LMAnswerer:
    """Answers with an ``LM`` here, ``max_batch`` tasks at once.

    Dialogues go through the chat template; without one their messages are joined by empty lines, as in training.

    Args:
        sampling: of every answer; its seed is mixed with each task's id. Of several, each task gets one: see
            ``sampling_of``.
        states: the target's hidden states to keep of all that is read and written (``Answer.row``).

    Attributes:
        num_tokens: written so far.

    Raises:
        ConfigError: ``max_batch`` below 1.
    """

    def __init__(
        self, lm: LM, sampling: Sampling | Sequence[Sampling], *, max_batch: int = 8, states: Sequence[int] = ()
    ) -> None:
        if max_batch < 1:
            raise ConfigError(f"max_batch must be at least 1, found {max_batch}")
        self._lm = recording(lm, states, self._record) if states else lm
        self._choices = [sampling] if isinstance(sampling, Sampling) else list(sampling)
        self._max_batch = max_batch
        self._rows = _Rows(lm) if states else None
        self._recorded: dict[bytes, Tensor] = {}  # by ids: the states of rows that have just ended
        self.num_tokens = 0

    def answer(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        engine, waiting = self._lm.engine(max_batch=self._max_batch), iter(tasks)
        running: dict[Request, Dialogue] = {}
        yield from self._refill(engine, running, waiting)
        for step in engine.steps():
            self.num_tokens += sum(len(row.token_ids) for row in step.rows)
            for request in [each for each in running if each.finish_reason is not None]:
                dialogue = running.pop(request)
                if request.error is not None:
                    yield dialogue.finish(str(request.error))
                elif request.text.strip():
                    if self._rows is not None:
                        dialogue.row = self._rows.of(dialogue, request, self._recorded)
                    dialogue.take(request.text, request.finish_reason or "", len(request.token_ids))
                    yield from self._ask(engine, running, dialogue)
                else:
                    yield dialogue.finish("the answer is empty")
            self._recorded.clear()
            yield from self._refill(engine, running, waiting)

    def _refill(self, engine: Engine, running: dict[Request, Dialogue], waiting: Iterator[Task]) -> Iterator[Answer]:
        """Ask as many tasks as run at once; gives out those that cannot be asked."""
        while len(running) < self._max_batch and (task := next(waiting, None)) is not None:
            temperature = sampling_of(self._choices, task.id).temperature
            yield from self._ask(engine, running, Dialogue(task, temperature))

    def _ask(self, engine: Engine, running: dict[Request, Dialogue], dialogue: Dialogue) -> Iterator[Answer]:
        """Submit the next prompt, or give out what there is where there is no next, or none that the model takes."""
        prompt = dialogue.next_prompt()
        if prompt is None:
            yield dialogue.finish()
            return
        if not isinstance(prompt, str) and not self._lm.tokenizer.has_chat_template:
            prompt = "".join(message["content"] + "\n\n" for message in prompt)
        sampling = sampling_of(self._choices, dialogue.task.id)
        try:
            running[engine.submit(self._lm.encode(prompt), sampling)] = dialogue
        except (PromptError, TokenizerError) as error:  # longer than the context, or refused by the chat template
            yield dialogue.finish(str(error))

    def _record(self, ids: Sequence[int], states: Tensor) -> None:
        self._recorded[_key(ids)] = states


def _takes_best(sampling: Sampling) -> bool:
    return not (sampling.temperature or sampling.penalises or sampling.logit_bias or sampling.banned_tokens)


def _key(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype=np.int64).tobytes()


class _Rows:
    """Makes rows of a cache from what was asked and answered."""

    def __init__(self, lm: LM) -> None:
        bare = bare_tokenizer(lm.tokenizer)
        self._encoder = DialogueEncoder(
            lm.tokenizer, bare, special_prefix(lm.tokenizer, bare), lm.target.max_length, settings={}
        )

    def of(self, dialogue: Dialogue, request: Request, recorded: dict[bytes, Tensor]) -> Row | None:
        """The text up to the end of a request's answer: all that its target read, and the token that it wrote last.

        The prompt holds the earlier turns, which were read again, so that the last answer's row has all of them. What
        the assistant wrote counts.
        """
        ids = [*request.prompt_ids, *request.token_ids]
        states = recorded.get(_key(ids))
        if states is None or len(states) != len(ids) - 1:
            return None
        mask = np.ones(len(ids), dtype=bool)
        mask[: len(request.prompt_ids)] = self._answers(dialogue.asked, request.prompt_ids)
        example = Example(np.asarray(ids, dtype=np.int32), mask)
        drawn_best = len(request.prompt_ids) if _takes_best(request.sampling) else None
        return Row(example, F.pad(states, (0, 0, 0, 1)), drawn_best)

    def _answers(self, asked: Sequence[Message], prompt_ids: Sequence[int]) -> np.ndarray:
        """(T,) which tokens of a prompt are earlier answers."""
        if not any(message["role"] == "assistant" for message in asked):
            return np.zeros(len(prompt_ids), dtype=bool)
        return self._encoder.mask_of_prompt(asked, prompt_ids)
