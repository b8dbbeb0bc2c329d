"""A conversation with a chat model: what was said, and answers by whichever draft is chosen, with their figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from draftwing.errors import PromptError
from draftwing.lm import LM
from draftwing.loading import load_drafter
from draftwing.sampling import Sampling
from draftwing.stats import RowStep, Stats
from draftwing.text.prompts import Prompt, check_text
from draftwing.text.tokenizer import TextStream

Message = dict[str, str]


class Piece(NamedTuple):
    """The text that one token made certain, and whether that token was drafted (else it is the step's bonus token)."""

    text: str
    is_drafted: bool


@dataclass(frozen=True)
class Said:
    """The part of an answer that one decode step adds.

    Attributes:
        pieces: the step's text, token by token.
        num_accepted: drafted tokens that the step accepted at once.
    """

    pieces: tuple[Piece, ...]
    num_accepted: int

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(piece.text for piece in self.pieces)


@dataclass
class Answer:
    """An answer of the model, and how fast it came.

    Attributes:
        draft: the draft that it was written with.
        num_prompt_tokens: of the whole dialogue up to and with the question.
        finish_reason: ``stop``, ``length``, or ``cancelled`` where it was interrupted.
        first_s, seconds: until the first step's tokens were there (the prompt is read before), and in all.
    """

    question: str
    draft: str
    sampling: Sampling
    num_prompt_tokens: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "cancelled"
    stats: Stats = field(default_factory=Stats)
    first_s: float = 0.0
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        """As ``chat --json`` prints it."""
        return {
            "question": self.question,
            "text": self.text,
            "draft": self.draft,
            "temperature": self.sampling.temperature,
            "seed": self.sampling.seed,
            "finish_reason": self.finish_reason,
            "num_prompt_tokens": self.num_prompt_tokens,
            "token_ids": self.token_ids,
            "seconds": self.seconds,
            "first_token_s": self.first_s,
            **figures(self.stats),
        }


def figures(stats: Stats) -> dict[str, Any]:
    """The figures that are shown of one answer or of several."""
    return {
        "num_tokens": stats.num_tokens,
        "tokens_per_s": stats.tokens_per_s,
        "tau": stats.tau,
        "acceptance": sum(stats.taken) / max(sum(stats.reached), 1),
        "alpha": stats.alpha,
        "lossless": stats.lossless,
    }


class Dialogue:
    """Questions and answers. Every answer depends on the messages and the sampling only, not on the draft.

    Args:
        lm: answers until another draft is chosen; the others share its target, rule and budget.
        draft: what to call its draft.
        sampling: of every answer.
        system: the system message; None leaves it to the chat template.
        put: turns messages into a prompt of the ``LM``; by default with the chat template.

    Attributes:
        turns: the messages, the system message left out. ``sampling`` and ``system`` may be changed at any time.
        answers: those of ``turns``, in order.
        draft: the chosen draft's name.
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
        self.sampling, self.system = sampling, system
        self.draft = draft
        self.turns: list[Message] = []
        self.answers: list[Answer] = []
        lm.decoder()  # what has to be measured for its budget is measured now, not in the first answer
        self._lms, self._put = {draft: lm}, put

    @property
    def lm(self) -> LM:
        """The ``LM`` that answers at present."""
        return self._lms[self.draft]

    @property
    def messages(self) -> list[Message]:
        """All that was said, the system message in front."""
        return ([] if self.system is None else [{"role": "system", "content": self.system}]) + self.turns

    def switch(self, draft: str) -> None:
        """Draft with another one from the next answer on. What one has learnt is kept for when it is chosen again.

        Args:
            draft: see ``api.load_drafter``.

        Raises:
            CheckpointError, ConfigError, TokenizerError: no such draft, or one that does not fit; all stays as it was.
        """
        if draft not in self._lms:
            lm = self.lm
            maker = load_drafter(draft, lm.target, lm.tokenizer, device=lm.target.device)
            other = LM(lm.target, lm.tokenizer, maker, lm.rule, lm.budget, lossless=lm.lossless)
            other.decoder()  # see above
            self._lms[draft] = other
        self.draft = draft

    def reset(self) -> None:
        """Forget what was said; the system message stays."""
        self.turns, self.answers = [], []

    def ask(self, question: str, show: Callable[[Said], None] = lambda said: None) -> Answer:
        """Ask, and let ``show`` have every step of the answer as it comes.

        An interrupt, from the keyboard or out of ``show``, leaves the dialogue with what was said until then; where
        that is nothing, without the question.

        Raises:
            PromptError: the question is empty, or the dialogue is longer than the target's context.
            TokenizerError: the chat template refuses the messages.
            NumericsError: the target's logits are not finite.
        """
        asked = {"role": "user", "content": check_text(question)}
        if not question.strip():
            raise PromptError("the question is empty: write something")
        ids = self._encode([*self.messages, asked])
        answer = Answer(question, self.draft, self.sampling, len(ids))
        began = time.perf_counter()
        try:
            for said in self._steps(ids, answer):
                answer.first_s = answer.first_s or time.perf_counter() - began
                show(said)
        finally:
            answer.seconds = time.perf_counter() - began
            if answer.token_ids:
                self.turns = [*self.turns, asked, {"role": "assistant", "content": answer.text}]
                self.answers = [*self.answers, answer]
        return answer

    def retry(self, show: Callable[[Said], None] = lambda said: None) -> Answer:
        """Ask the last question again, in place of its answer.

        Raises:
            PromptError: there is no question yet; and as ``ask``.
        """
        if not self.answers:
            raise PromptError("there is no question to ask again: ask one")
        before = self.turns, self.answers
        question = self.answers[-1].question
        self.turns, self.answers = self.turns[:-2], self.answers[:-1]
        kept = len(self.answers)
        try:
            return self.ask(question, show)
        finally:
            if len(self.answers) == kept:  # nothing was said
                self.turns, self.answers = before

    def stats(self) -> dict[str, Stats]:
        """The figures of all answers together, for each draft that wrote any."""
        names = dict.fromkeys(answer.draft for answer in self.answers)
        return {name: Stats.sum(each.stats for each in self.answers if each.draft == name) for name in names}

    def _encode(self, messages: list[Message]) -> list[int]:
        ids = self.lm.encode(self._put(messages))
        room = self.lm.target.max_length
        if len(ids) >= room:
            what = "the dialogue with this question" if self.turns else "the question"
            fix = "start over with /reset, or ask something shorter" if self.turns else "ask something shorter"
            raise PromptError(
                f"{what} has {len(ids):,} tokens, and {self.lm.target.name} reads at most {room:,}: {fix}"
            )
        return ids

    def _steps(self, ids: list[int], answer: Answer) -> Iterator[Said]:
        """Decode; every step is added to ``answer`` before it is given out."""
        # The text of a step is known to the stream below; another one says which token made which part of it certain.
        tokens = TextStream(self.lm.tokenizer, ids, self.sampling.stop)
        for step in self.lm.stream(ids, self.sampling):
            row = step.step.rows[0]
            said = Said(tuple(pieces_of(row, tokens)), row.num_accepted)
            answer.stats.add(step.step)
            answer.token_ids.extend(step.token_ids)
            answer.text += step.text
            answer.finish_reason = step.finish_reason or answer.finish_reason
            yield said


def pieces_of(row: RowStep, tokens: TextStream) -> Iterator[Piece]:
    """A step's text token by token: accepted drafts come first, the bonus token last.

    Args:
        row: the text's share of the step.
        tokens: a stream of the same text that all rows before were put through.
    """
    shown = 0
    for place, token in enumerate(row.token_ids):
        text = tokens.push([token])
        shown += len(text)
        if text:
            yield Piece(text, place < row.num_accepted)
    if shown < len(row.text):  # what was held back until the end of the answer
        yield Piece(row.text[shown:], len(row.token_ids) <= row.num_accepted)
