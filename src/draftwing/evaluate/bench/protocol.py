"""The protocol: batch 1, every question of every set, turn after turn, plainly and with each method in alternation.

A later turn follows plain decoding's answers, whoever is measured, so that all answer the same prompts: where a text is
not plain decoding's, that is recorded with both texts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftwing.api import LM, Generation
from draftwing.errors import ConfigError
from draftwing.evaluate.bench.records import Journal, Unit
from draftwing.evaluate.bench.sets import Question, QuestionSet
from draftwing.evaluate.bench.settings import Method, name_of_sampling
from draftwing.evaluate.compare import promise_of
from draftwing.sampling import Sampling
from draftwing.sampling_options import nth_seed

__all__ = ["Plan", "run"]

_WARM_UP = 16  # tokens


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Attributes:
        plain: plain decoding, the baseline.
        methods: all on the same target.
        sets: the questions.
        samplings: each set is answered with each.
        limit: questions of each set; None takes all.
    """

    plain: LM
    methods: Sequence[Method]
    sets: Sequence[QuestionSet]
    samplings: Sequence[Sampling]
    limit: int | None = None

    def check(self) -> None:
        """Raise ConfigError where there is nothing to measure, or something twice."""
        if self.plain.traits.drafts:
            raise ConfigError("bench needs plain decoding as its baseline: pass LM(target, tokenizer) as plain")
        for what, given in (("draft", self.methods), ("question set", self.sets), ("temperature", self.samplings)):
            if not given:
                raise ConfigError(f"bench needs at least one {what}: give one")
        keys = [each.describe()["key"] for each in self.methods]
        twice = next((each for each in self.methods if keys.count(each.describe()["key"]) > 1), None)
        if twice is not None:
            raise ConfigError(f"{twice.draft} with tree {twice.lm.describe_budget()} is asked for twice: leave one out")

    def units(self, questions: QuestionSet, sampling: Sampling) -> list[tuple[Question, list[Unit]]]:
        """The questions of a set, and the unit of each turn."""
        name = name_of_sampling(sampling)
        return [
            (each, [(questions.name, each.number, turn, name) for turn in range(1, len(each.turns) + 1)])
            for each in questions.chosen(self.limit)
        ]


def run(plan: Plan, journal: Journal, on_progress: Callable[[int, int], None] | None = None) -> None:
    """Measure what is not in the journal yet. Every answer is in it, on disk, as soon as it is finished.

    Args:
        on_progress: called with (done, total) answers of those that were missing.

    Raises:
        ConfigError: see ``Plan.check`` and ``Journal``.
    """
    plan.check()
    keys = [each.describe()["key"] for each in plan.methods]
    for questions in plan.sets:
        journal.admit(questions)
    for method in plan.methods:
        journal.enrol(method.describe())
    todo = {
        unit
        for questions in plan.sets
        for sampling in plan.samplings
        for _, units in plan.units(questions, sampling)
        for unit in units
        if unit not in journal.skipped and not journal.done(unit).issuperset(keys)
    }
    total = len(todo)
    for questions in plan.sets:
        for sampling in plan.samplings:
            session = _Session(plan, journal, sampling)
            for place, (question, units) in enumerate(plan.units(questions, sampling)):
                for unit in session.ask(question, units, place):
                    todo.discard(unit)
                    if on_progress is not None:
                        on_progress(total - len(todo), total)


class _Session:
    """One set under one sampling: methods that learn begin anew with it, and keep what they learn to its end."""

    def __init__(self, plan: Plan, journal: Journal, sampling: Sampling) -> None:
        self._plain, self._journal, self._sampling = plan.plain, journal, sampling
        fresh = [each.fresh() for each in plan.methods]
        self._lms = {each.describe()["key"]: each.lm for each in fresh}
        self._is_warm = False

    def ask(self, question: Question, units: Sequence[Unit], place: int) -> Iterator[Unit]:
        """All turns of one question, the ``place``-th of its set; yields each that it is through with."""
        answers: list[str] = []
        for unit in units:
            missing = [key for key in self._lms if key not in self._journal.done(unit)]
            if unit in self._journal.skipped:
                return
            if missing:
                prompt = self._encode(question, answers)
                room = self._plain.target.max_length - len(prompt)
                if room < self._sampling.max_tokens:
                    self._skip(question, units[unit[2] - 1 :], len(prompt))
                    yield from units[unit[2] - 1 :]
                    return
                self._answer(question, unit, prompt, missing, place)
            yield unit
            answers.append(self._journal.text(unit) or "")

    def _encode(self, question: Question, answers: Sequence[str]) -> list[int]:
        messages = question.messages(answers)
        if self._plain.tokenizer.has_chat_template:
            return self._plain.encode(messages)
        return self._plain.encode("\n\n".join(each["content"] for each in messages))

    def _skip(self, question: Question, units: Sequence[Unit], num_tokens: int) -> None:
        for name, number, turn, sampling in units:
            self._journal.add(
                {
                    "kind": "skipped",
                    "set": name,
                    "question": number,
                    "id": question.id,
                    "turn": turn,
                    "sampling": sampling,
                    "prompt_tokens": num_tokens,
                    "context": self._plain.target.max_length,
                }
            )

    def _answer(self, question: Question, unit: Unit, prompt: list[int], missing: Sequence[str], place: int) -> None:
        """Decode one prompt with everything that has not answered it, and record it."""
        lms = {"plain": self._plain, **{key: self._lms[key] for key in missing}}
        # A seed of the question's own, so that no two of them are sampled with the same noise.
        sampling = replace(self._sampling, seed=nth_seed(self._sampling.seed or 0, question.number))
        if not self._is_warm:
            for lm in lms.values():
                lm.generate([prompt], replace(sampling, max_tokens=min(_WARM_UP, sampling.max_tokens)))
                lm.forget()
            self._is_warm = True
        names = list(lms)
        first = (place + unit[2]) % len(names)  # taking turns at being first, whatever is resumed
        found = {name: _timed(lms[name], prompt, sampling) for name in [*names[first:], *names[:first]]}
        plain = found.pop("plain")
        self._journal.add(
            {
                "kind": "answer",
                "set": unit[0],
                "question": unit[1],
                "id": question.id,
                "categories": question.categories,
                "turn": unit[2],
                "sampling": unit[3],
                "prompt_tokens": len(prompt),
                "plain": {**_measured(*plain), "text": plain[0].text, "finish_reason": plain[0].finish_reason},
                "methods": {
                    key: {
                        **_measured(*found[key]),
                        **_compared(found[key][0], plain[0]),
                        "promise": promise_of(lms[key], sampling),
                    }
                    for key in missing
                },
            }
        )


def _timed(lm: LM, prompt: list[int], sampling: Sampling) -> tuple[Generation, float]:
    began = time.perf_counter()
    (done,) = lm.generate([prompt], sampling)
    return done, time.perf_counter() - began


def _measured(done: Generation, wall: float) -> dict[str, Any]:
    """Counts and times of one answer. ``wall`` is from the prompt's ids to the last token, prefill included."""
    stats = done.stats
    return {
        "tokens": stats.num_tokens,
        "forwards": stats.num_forwards,
        "drafted": stats.num_drafted,
        "reached": stats.reached,
        "taken": stats.taken,
        "seconds": stats.total_seconds,
        "wall": wall,
        "lossless": stats.lossless,
    }


def _compared(done: Generation, plain: Generation) -> Mapping[str, Any]:
    """Whether the text is plain decoding's; where it is not, from which token on, and what it is."""
    if done.token_ids == plain.token_ids:
        return {"identical": True}
    pairs = enumerate(zip(done.token_ids, plain.token_ids, strict=False))
    shorter = min(len(done.token_ids), len(plain.token_ids))
    return {
        "identical": False,
        "differs_at": next((place for place, (one, other) in pairs if one != other), shorter),
        "text": done.text,
    }
