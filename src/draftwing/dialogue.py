"""A conversation with a chat model: its messages, and answers with any draft and their statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from draftwing.engine import Engine
from draftwing.errors import PromptError
from draftwing.lm import LM
from draftwing.loading import load_drafter
from draftwing.sampling import Sampling
from draftwing.stats import RowStep, Stats
from draftwing.text.prompts import Prompt, check_text
from draftwing.text.tokenizer import TextStream

Message = dict[str, str]

# Bytes for the KV slots of a dialogue: 20,000 tokens of a 135M model, 4,000 of one of 8B. Memory is used as it fills.
KV_MEMORY = 1 << 30


class Piece(NamedTuple):
    """The text that one token completed, and True if the token was drafted (False for the step's bonus token)."""

    text: str
    is_drafted: bool


@dataclass(frozen=True)
class AnswerStep:
    """The part of an answer that one decode step adds."""

    pieces: tuple[Piece, ...]  # the step's text by token
    num_accepted: int  # drafted tokens that the step accepted

    @property
    def text(self) -> str:
        """The text of all pieces."""
        return "".join(piece.text for piece in self.pieces)


@dataclass
class Answer:
    """An answer and its statistics."""

    question: str
    draft: str  # the draft in use
    sampling: Sampling
    num_prompt_tokens: int  # tokens of the dialogue up to and including the question
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "cancelled"  # ``stop``, ``length``, or ``cancelled`` if interrupted
    stats: Stats = field(default_factory=Stats)
    # first_s, seconds: until the first step's tokens (after reading the prompt), and in total
    first_s: float = 0.0
    seconds: float = 0.0
    num_cached_tokens: int = 0  # those of them that were not read again

    def record(self) -> dict[str, Any]:
        """Return the JSON object that ``chat --json`` prints."""
        return {
            "question": self.question,
            "text": self.text,
            "draft": self.draft,
            "temperature": self.sampling.temperature,
            "seed": self.sampling.seed,
            "finish_reason": self.finish_reason,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "token_ids": self.token_ids,
            "seconds": self.seconds,
            "first_token_s": self.first_s,
            **figures(self.stats),
        }


def figures(stats: Stats) -> dict[str, Any]:
    """Return the statistics that are shown for one or more answers."""
    return {
        "num_tokens": stats.num_tokens,
        "tokens_per_s": stats.tokens_per_s,
        "tau": stats.tau,
        "acceptance": sum(stats.taken) / max(sum(stats.reached), 1),
        "alpha": stats.alpha,
        "lossless": stats.lossless,
    }


class Dialogue:
    """Questions and answers. Each answer depends on the messages and the sampling only, not on the draft.

    Args:
        lm: answers until another draft is selected; other drafts use its target, rule and budget.
        draft: the name of its draft.
        sampling: for every answer.
        system: the system message; None leaves it to the chat template.
        put: turns messages into a prompt for the ``LM``; the default applies the chat template.

    Attributes:
        sampling, system: may be changed at any time.
        turns: the messages without the system message.
        answers: those in ``turns``, in order.
        draft: the name of the selected draft.
    """

    def __init__(
        self,
        lm: LM,
        draft: str,
        sampling: Sampling,
        *,
        system: str | None = None,
        put: Callable[[Sequence[Message]], Prompt] = list,
    ) -> None:
        self.sampling, self.system, self.draft = sampling, system, draft
        self.turns: list[Message] = []
        self.answers: list[Answer] = []
        self._lms, self._put = {draft: lm}, put
        self._engines: dict[str, Engine] = {}  # by draft: they keep what was read of the dialogue

    @property
    def lm(self) -> LM:
        """The ``LM`` with the selected draft."""
        return self._lms[self.draft]

    @property
    def messages(self) -> list[Message]:
        """All messages, beginning with the system message if there is one."""
        return ([] if self.system is None else [{"role": "system", "content": self.system}]) + self.turns

    def switch(self, draft: str) -> None:
        """Select the draft for the next answers. State that a draft has learned is kept for later.

        Args:
            draft: see ``loading.load_drafter``.
        """
        if draft not in self._lms:
            lm = self.lm
            new_drafter = load_drafter(draft, lm.target, lm.tokenizer, device=lm.target.device)
            self._lms[draft] = LM(lm.target, lm.tokenizer, new_drafter, lm.rule, lm.budget, lossless=lm.lossless)
        self.draft = draft

    def reset(self) -> None:
        """Forget all turns; the system message is kept."""
        self.turns, self.answers = [], []

    def ask(self, question: str, show: Callable[[AnswerStep], None] = lambda step: None) -> Answer:
        """Answer a question, and call ``show`` with each step.

        An interrupt, from the keyboard or raised by ``show``, keeps the partial answer in the dialogue; if there is
        none, the question is dropped too.
        """
        message = {"role": "user", "content": check_text(question)}
        if not question.strip():
            raise PromptError("the question is empty: write something")
        lm = self.lm
        ids = lm.encode(self._put([*self.messages, message]))
        if len(ids) >= lm.target.max_length:
            what = "the dialogue with this question" if self.turns else "the question"
            fix = "start over with /reset, or ask something shorter" if self.turns else "ask something shorter"
            raise PromptError(
                f"{what} has {len(ids):,} tokens, and {lm.target.name} reads at most {lm.target.max_length:,}: {fix}"
            )
        answer = Answer(question, self.draft, self.sampling, len(ids))
        # Decodes the text a second time, token by token, to attribute each piece to its token.
        tokens = TextStream(lm.tokenizer, ids, self.sampling.stop, min_ids=self.sampling.min_tokens)
        engine = self._engine(len(ids))
        num_hits, began = 0 if engine is None else engine.stats.num_prefix_hits, time.perf_counter()
        try:
            with closing(lm.stream(ids, self.sampling, engine=engine)) as steps:
                for step in steps:
                    row = step.step.rows[0]
                    shown = AnswerStep(tuple(pieces_of(row, tokens)), row.num_accepted)
                    answer.stats.add(step.step)
                    answer.token_ids.extend(step.token_ids)
                    answer.text += step.text
                    answer.finish_reason = step.finish_reason or answer.finish_reason
                    answer.first_s = answer.first_s or time.perf_counter() - began
                    show(shown)
        finally:
            answer.seconds = time.perf_counter() - began
            if engine is not None:
                answer.num_cached_tokens = engine.stats.num_prefix_hits - num_hits
            if answer.token_ids:
                self.turns = [*self.turns, message, {"role": "assistant", "content": answer.text}]
                self.answers = [*self.answers, answer]
        return answer

    def _engine(self, num_prompt_tokens: int) -> Engine | None:
        """Return the engine of the selected draft; None if the dialogue is too long for its memory, or it has none."""
        lm = self.lm
        if not lm.target.supports_pages:
            return None
        if self.draft not in self._engines:
            self._engines[self.draft] = lm.engine(max_batch=1, kv_memory=KV_MEMORY)
        engine = self._engines[self.draft]
        room = min(self.sampling.max_tokens, lm.target.max_length - num_prompt_tokens)
        return engine if engine.room_for(num_prompt_tokens) >= room else None

    def retry(self, show: Callable[[AnswerStep], None] = lambda step: None) -> Answer:
        """Answer the last question again, replacing its answer."""
        if not self.answers:
            raise PromptError("there is no question to ask again: ask one")
        before = self.turns, self.answers
        question = self.answers[-1].question
        self.turns, self.answers = self.turns[:-2], self.answers[:-1]
        num_kept = len(self.answers)
        try:
            return self.ask(question, show)
        finally:
            if len(self.answers) == num_kept:  # there is no new answer
                self.turns, self.answers = before

    def stats(self) -> dict[str, Stats]:
        """Return the statistics of all answers by draft."""
        drafts = dict.fromkeys(answer.draft for answer in self.answers)
        return {draft: Stats.sum(answer.stats for answer in self.answers if answer.draft == draft) for draft in drafts}


def pieces_of(row: RowStep, tokens: TextStream) -> Iterator[Piece]:
    """Yield a step's text token by token: accepted drafts first, the bonus token last.

    Args:
        row: the request's share of the step.
        tokens: a stream of the same text that has received all earlier rows.
    """
    num_shown = 0
    for place, token in enumerate(row.token_ids):
        text = tokens.push([token])
        num_shown += len(text)
        if text:
            yield Piece(text, place < row.num_accepted)
    if num_shown < len(row.text):  # text that was held back until the end
        yield Piece(row.text[num_shown:], len(row.token_ids) <= row.num_accepted)
