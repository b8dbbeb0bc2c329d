"""Several drafters on the same prompts against plain decoding: interleaved, medians, and is the text the same?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftwing.accept import get_rule, match
from draftwing.errors import ConfigError
from draftwing.lab.machine import describe_machine
from draftwing.lm import LM, Generation
from draftwing.request import with_seed
from draftwing.sampling import Sampling
from draftwing.stats import Stats
from draftwing.text.prompts import Prompt


@dataclass(frozen=True)
class MethodResult:
    """One drafter's figures.

    Attributes:
        tokens_per_s: median over prompts and rounds; decode time only, the prompt's prefill left out.
        speedup: median over prompts and rounds of plain decoding's time per token over this one's, paired.
        tau: tokens per target forward over all prompts, the bonus token counted.
        efficiency: speedup / tau.
        alpha: acceptance by depth.
        promise: what the rule keeps at this temperature: ``text`` (it is plain decoding's), ``law`` (other texts, drawn
            by the same law) or ``nothing``.
        num_identical: prompts whose token ids are plain decoding's.
        phases: share of the step time by phase.
    """

    name: str
    tokens_per_s: float
    speedup: float
    tau: float
    efficiency: float
    alpha: list[float]
    promise: str
    num_identical: int
    num_prompts: int
    lossless: bool
    phases: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` found; ``methods[0]`` is plain decoding.

    ``texts`` holds what each method wrote after the first prompt, by name.
    """

    methods: list[MethodResult]
    baseline: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    texts: dict[str, str]

    @property
    def all_identical(self) -> bool:
        """Whether every method that promises plain decoding's text wrote it for every prompt."""
        return all(method.num_identical == method.num_prompts for method in self.methods if method.promise == "text")

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "all_identical": self.all_identical}


def compare(
    lms: Sequence[LM],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    rounds: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Decode every prompt with every method, one prompt at a time, the methods in turn.

    Taking turns on each prompt pairs the measurements, so that a machine that slows down slows all alike. The
    first prompt is decoded once more beforehand, uncounted, to warm everything up.

    Args:
        lms: plain decoding first; all on one target.
        rounds: how often everything is done.
        on_progress: called with (done, total) generations.

    Raises:
        ConfigError: no plain decoding in front, or no prompt.
    """
    if not lms or lms[0].drafter.drafts:
        raise ConfigError("compare needs plain decoding first: pass LM(target, tokenizer) as the first of lms")
    if not prompts:
        raise ConfigError("compare needs at least one prompt")
    sampling = with_seed(sampling)
    for lm in lms:
        lm.generate([prompts[0]], sampling, max_tokens=min(sampling.max_tokens, 16))
    runs: list[list[Generation]] = [[] for _ in lms]
    total, done = rounds * len(prompts) * len(lms), 0
    for turn in range(rounds):
        for lm in lms:
            lm.forget()  # the answers of the last round, or of the warm-up, would be drafts that cost nothing
        for index, prompt in enumerate(prompts):
            first = (turn + index) % len(lms)
            for place in [*range(first, len(lms)), *range(first)]:
                runs[place] += lms[place].generate([prompt], sampling)
                done += 1
                if on_progress is not None:
                    on_progress(done, total)
    target = lms[0].target
    settings = {
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantize": target.quantized,
        "device": str(target.device),
        "num_prompts": len(prompts),
        "rounds": rounds,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "rules": {lm.drafter_name: lm.rule for lm in lms[1:]},
        "budgets": {lm.drafter_name: lm.describe_budget() for lm in lms[1:]},
    }
    methods = [_fold(lm, own, runs[0], len(prompts), sampling) for lm, own in zip(lms, runs, strict=True)]
    baseline = f"plain decoding, {type(target).__name__}, same settings, batch 1"
    texts = {lm.drafter_name: own[0].text for lm, own in zip(lms, runs, strict=True)}
    return Comparison(methods, baseline, settings, describe_machine(), texts)


def promise_of(lm: LM, sampling: Sampling) -> str:
    """What a rule promises of a text: see ``MethodResult.promise``."""
    rule = get_rule(lm.rule, lossless=False)
    if not rule.lossless:
        return "nothing"
    return "text" if rule.apply is match or sampling.temperature == 0 else "law"


def _fold(
    lm: LM, runs: list[Generation], plain: list[Generation], num_prompts: int, sampling: Sampling
) -> MethodResult:
    def rate(run: Generation) -> float:
        return run.stats.tokens_per_s

    stats = Stats.sum(run.stats for run in runs)
    phases = {phase: value / stats.total_seconds for phase, value in stats.seconds.items()}
    speedup = statistics.median(rate(own) / rate(base) for own, base in zip(runs, plain, strict=True))
    same = [own.token_ids == base.token_ids for own, base in zip(runs, plain, strict=True)]
    return MethodResult(
        name=lm.drafter_name,
        tokens_per_s=statistics.median(map(rate, runs)),
        speedup=speedup,
        tau=stats.tau,
        efficiency=speedup / stats.tau,
        alpha=stats.alpha,
        promise=promise_of(lm, sampling),
        # A prompt counts as identical when it is in every round.
        num_identical=sum(all(same[index::num_prompts]) for index in range(num_prompts)),
        num_prompts=num_prompts,
        lossless=stats.lossless,
        phases=phases,
    )
