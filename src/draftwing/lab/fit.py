"""Does a head fit its target? Acceptance on a few prompts of its own kind, through the real decoder."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftwing.formats.card import read_stored
from draftwing.lm import LM
from draftwing.loading import load_drafter
from draftwing.methods.base import Budget
from draftwing.sampling import Sampling
from draftwing.stats import Stats
from draftwing.text.prompts import Prompt, as_put, shipped_prompts, shipped_questions
from draftwing.text.tokenizer import Tokenizer

BUDGET = Budget(5)  # of every head alike: the planner would draft nothing with a bad one, and nothing would be seen
# Shares of first drafts that are accepted. Heads that were damaged on purpose come to 0.00 to 0.11: another model's
# features, no features, another draft vocabulary, random numbers. A sound one comes to 0.75, with its taps in another
# order to 0.5, which still helps.
MISFIT, WEAK = 0.15, 0.4


@dataclass(frozen=True)
class Trial:
    """What a head is tried on.

    Attributes:
        prompts: texts, dialogues or token ids.
        source: what they are, for people.
    """

    prompts: Sequence[Prompt]
    source: str


@dataclass(frozen=True)
class Fit:
    """What was measured.

    Attributes:
        tau: tokens emitted per target forward.
        alpha: acceptance at each depth, given that the depth was reached.
        verdict: ``fits``, ``weak`` or ``does not fit``.
        tried_on: see ``Trial.source``.
        num_drafts: how often the head was asked.
        interval: of ``alpha[0]``, at 95%.
        chance: share of first drafts that would be accepted if they were shuffled among the places where they were
            made: what there is to gain by guessing common tokens, whatever the target said.
        lookup_tau: of prompt lookup on the same prompts.
    """

    tau: float
    alpha: tuple[float, ...]
    verdict: str
    tried_on: str
    num_drafts: int
    interval: tuple[float, float]
    chance: float
    lookup_tau: float


def trial_of(
    head: Path, tokenizer: Tokenizer, num_prompts: int, own: Sequence[Prompt] | None = None, *, where: str = ""
) -> Trial:
    """Prompts of a head's own kind.

    Those that are given; else those held out of its training, which lie in its folder; else questions through the
    target's chat template, where it has one; else beginnings of Python files.

    Args:
        head: the head's folder.
        tokenizer: the target's.
        own: the user's prompts, read from ``where``.

    Raises:
        CheckpointError, PromptError: the prompts in the head's folder cannot be read.
    """
    chat = tokenizer.has_chat_template
    if own is not None:
        prompts, source = [as_put(each, chat) for each in own], f"prompts of {where}"
        return Trial(prompts, f"{source} through the chat template" if chat else source)
    stored = read_stored(head)
    if stored:
        # A text that was stored is the beginning of a document: no question, whatever the target is.
        ready = [each if isinstance(each, str) else as_put(each, chat) for each in stored[:num_prompts]]
        return Trial(ready, "prompts held out of its training, stored with the head")
    if chat:
        questions = [as_put(each, chat) for each in shipped_questions(num_prompts)]
        return Trial(questions, "general questions through the chat template, for lack of prompts stored with the head")
    return Trial(shipped_prompts(num_prompts), "beginnings of Python files, for lack of prompts stored with the head")


def measure_fit(lm: LM, trial: Trial, max_tokens: int = 48) -> Fit:
    """Decode greedily with chains, one prompt at a time, and judge by the first drafted token.

    A head that does not fit guesses no better than chance, but for what a token alone says of the next one. One that
    drafts less than prompt lookup does on the same prompts is weak, however often its first token is right.
    """
    stats, guesses, said = _decode(lm, trial.prompts, max_tokens)
    lookup = LM(lm.target, lm.tokenizer, load_drafter("lookup", lm.target, lm.tokenizer))
    lookup_tau = _decode(lookup, trial.prompts, max_tokens)[0].tau
    first = stats.alpha[0] if stats.alpha else 0.0
    low, high = wilson(sum(map(int.__eq__, guesses, said)), len(guesses))
    chance = by_chance(guesses, said)
    if first < MISFIT or low <= chance:
        verdict = "does not fit"
    else:
        verdict = "weak" if first < WEAK or stats.tau < lookup_tau else "fits"
    return Fit(stats.tau, tuple(stats.alpha), verdict, trial.source, len(guesses), (low, high), chance, lookup_tau)


def _decode(lm: LM, prompts: Sequence[Prompt], max_tokens: int) -> tuple[Stats, list[int], list[int]]:
    """Statistics, every first drafted token, and what the target said there."""
    stats, guesses, said = Stats(), list[int](), list[int]()
    engine = LM(lm.target, lm.tokenizer, lm.new_drafter, budget=BUDGET).engine(max_batch=1)
    for prompt in prompts:
        engine.submit(lm.encode(prompt), Sampling(max_tokens=max_tokens))
    for step in engine.steps():
        stats.add(step)
        row = step.rows[0]
        if row.depth:
            guesses.append(int(step.tree.tokens[0, 1]))
            said.append(row.token_ids[0])
    return stats, guesses, said


def by_chance(guesses: Sequence[int], said: Sequence[int]) -> float:
    """Share of pairs from two different places that agree."""
    count = len(guesses)
    if count < 2:
        return 0.0
    left, right = Counter(guesses), Counter(said)
    pairs = sum(number * right[token] for token, number in left.items()) - sum(map(int.__eq__, guesses, said))
    return pairs / (count * (count - 1))


def wilson(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The interval of a share that was seen ``hits`` times in ``count``; everything where nothing was seen."""
    if not count:
        return 0.0, 1.0
    share, square = hits / count, z * z / count
    middle, half = share + square / 2, z * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))
