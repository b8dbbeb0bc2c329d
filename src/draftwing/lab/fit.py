"""Measure whether a head fits its target: acceptance on a few prompts of the head's kind, with the real decoder."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from draftwing.formats.card import read_stored
from draftwing.lm import LM
from draftwing.loading import load_drafter
from draftwing.methods.base import Budget, Drafter
from draftwing.models.context import FeatureSpec
from draftwing.sampling import Sampling
from draftwing.stats import Stats
from draftwing.text.prompts import Prompt, as_put, shipped_prompts, shipped_questions
from draftwing.text.tokenizer import Tokenizer

BUDGET = Budget(5)  # the automatic budget would draft nothing with a bad head, and measure nothing
# Shares of first drafts that are accepted. Heads damaged on purpose (features of another model, no features, another
# draft vocabulary, random weights) reach 0.00 to 0.11; a sound head .75; one with permuted taps .5, which still helps.
MISFIT, WEAK = 0.15, 0.4


@dataclass(frozen=True)
class FitTrial:
    """Prompts to try a head on; ``source`` describes them for people."""

    prompts: Sequence[Prompt]
    source: str


@dataclass(frozen=True)
class TapTrial:
    """The head's acceptance if it reads other hidden states."""

    taps: tuple[int, ...]
    alpha: tuple[float, ...]
    tau: float


@dataclass(frozen=True)
class Fit:
    tau: float
    alpha: tuple[float, ...]
    verdict: str  # ``fits``, ``weak`` or ``does not fit``
    tried_on: str  # see ``FitTrial.source``
    num_drafts: int
    interval: tuple[float, float]  # 95% interval of ``alpha[0]``
    # share of first drafts that would be accepted if they were shuffled among their positions: what guessing common
    # tokens gains, independent of the target
    chance: float
    lookup_tau: float  # tau of prompt lookup on the same prompts
    taps: tuple[int, ...] = ()  # hidden states that it reads
    other: TapTrial | None = None  # with the taps of the other convention


def trial_of(
    head: Path, tokenizer: Tokenizer, num_prompts: int, prompts: Sequence[Prompt] | None = None, *, where: str = ""
) -> FitTrial:
    """Choose prompts of a head's kind.

    The user's ``prompts`` (from ``where``), if there are any; else those that training held out and stored in the
    head's folder; else questions through the target's chat template, if it has one; else beginnings of Python files.
    """
    chat = tokenizer.has_chat_template
    if prompts is not None:
        source = f"prompts of {where}{' through the chat template' if chat else ''}"
        return FitTrial([as_put(prompt, chat) for prompt in prompts], source)
    stored = read_stored(head)[:num_prompts]
    if stored:
        # A stored text is the beginning of a document, which is no question even for a chat model.
        stored = [prompt if isinstance(prompt, str) else as_put(prompt, chat) for prompt in stored]
        return FitTrial(stored, "prompts held out of its training, stored with the head")
    texts: Sequence[Prompt] = shipped_prompts(num_prompts)
    if chat:
        texts = [as_put(question, chat) for question in shipped_questions(num_prompts)]
    source = "general questions through the chat template" if chat else "beginnings of Python files"
    return FitTrial(texts, f"{source}, for lack of prompts stored with the head")


def measure_fit(lm: LM, trial: FitTrial, max_tokens: int = 48, other_taps: tuple[int, ...] | None = None) -> Fit:
    """Decode greedily with chains, one prompt at a time, and judge by the first drafted token.

    A head does not fit if its first tokens are accepted no more often than shuffled ones would be. It is weak if it
    drafts less than prompt lookup on the same prompts, even if its first tokens are often right.

    Args:
        other_taps: further hidden states to try, see ``formats.doctor.other_taps``.
    """
    lookup = LM(lm.target, lm.tokenizer, load_drafter("lookup", lm.target, lm.tokenizer))
    lookup_tau = _decode(lookup, trial.prompts, max_tokens)[0].tau
    fit, other = judge(*_decode(lm, trial.prompts, max_tokens), lookup_tau, trial.source), None
    if other_taps is not None:
        stats = _decode(LM(lm.target, lm.tokenizer, _reading(lm.new_drafter, other_taps)), trial.prompts, max_tokens)[0]
        other = TapTrial(other_taps, tuple(stats.alpha), stats.tau)
    return replace(fit, taps=lm.drafter.features.taps, other=other)


def _reading(new_drafter: Callable[[], Drafter], taps: tuple[int, ...]) -> Callable[[], Drafter]:
    def new() -> Drafter:
        drafter = new_drafter()
        drafter.features = FeatureSpec(taps)
        return drafter

    return new


def judge(stats: Stats, drafted: Sequence[int], emitted: Sequence[int], lookup_tau: float, tried_on: str) -> Fit:
    """Judge a head by its statistics, the first token of every draft, and the token that the target emitted there."""
    first = stats.alpha[0] if stats.alpha else 0.0
    low, high = wilson(sum(map(int.__eq__, drafted, emitted)), len(drafted))
    chance = by_chance(drafted, emitted)
    if first < MISFIT or low <= chance:
        verdict = "does not fit"
    else:
        verdict = "weak" if first < WEAK or stats.tau < lookup_tau else "fits"
    return Fit(stats.tau, tuple(stats.alpha), verdict, tried_on, len(drafted), (low, high), chance, lookup_tau)


def _decode(lm: LM, prompts: Sequence[Prompt], max_tokens: int) -> tuple[Stats, list[int], list[int]]:
    stats, drafted, emitted = Stats(), list[int](), list[int]()
    engine = LM(lm.target, lm.tokenizer, lm.new_drafter, budget=BUDGET).engine(max_batch=1)
    for prompt in prompts:
        engine.submit(lm.encode(prompt), Sampling(max_tokens=max_tokens))
    for step in engine.steps():
        stats.add(step)
        row = step.rows[0]
        if row.depth:
            drafted.append(int(step.tree.tokens[0, 1]))
            emitted.append(row.token_ids[0])
    return stats, drafted, emitted


def by_chance(drafted: Sequence[int], emitted: Sequence[int]) -> float:
    """Return the share of (drafted, emitted) pairs from two different positions that agree."""
    count = len(drafted)
    if count < 2:
        return 0.0
    totals = Counter(emitted)
    pairs = sum(number * totals[token] for token, number in Counter(drafted).items())
    return (pairs - sum(map(int.__eq__, drafted, emitted))) / (count * (count - 1))


def wilson(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's interval of a share that was seen ``hits`` times in ``count``; (0, 1) if ``count`` is 0."""
    if not count:
        return 0.0, 1.0
    share, square = hits / count, z * z / count
    middle, half = share + square / 2, z * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))
