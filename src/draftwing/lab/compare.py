"""Compare drafters with the baseline on the same prompts: how fast they are, and whether the text is identical."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from draftwing.accept import get_rule, match
from draftwing.cpu.noise import noise_of
from draftwing.errors import ConfigError
from draftwing.lab.machine import describe_machine, describe_target, engine_of
from draftwing.lm import LM, Generation
from draftwing.models.target import Target
from draftwing.request import with_seed
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.stats import Stats
from draftwing.text.prompts import Prompt
from draftwing.tree import Accepted, DraftTree


@dataclass(frozen=True)
class MethodResult:
    """The figures of one drafter."""

    name: str
    tokens_per_s: float  # median over prompts and rounds; decoding only, without the prompt's prefill
    speedup: float  # median over prompts and rounds of the baseline's time per token over this one's, paired
    tau: float  # tokens per target forward over all prompts, including the bonus token
    efficiency: float  # speedup / tau
    alpha: list[float]  # acceptance by depth
    # ``text`` if the rule keeps the baseline's text at this temperature, ``distribution`` if it only keeps the
    # distribution, else ``nothing``
    promise: str
    num_identical: int  # prompts whose token ids equal the baseline's in every round
    num_prompts: int
    lossless: bool
    phases: dict[str, float]  # share of the step time by phase


@dataclass(frozen=True)
class Comparison:
    """The result of ``compare``; ``methods[0]`` is the baseline, and ``texts`` follow the first prompt, by method."""

    methods: list[MethodResult]
    baseline: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    texts: dict[str, str]
    is_complete: bool = True  # False after Ctrl-C: the rounds that were finished, or the prompts of the first round

    @property
    def all_identical(self) -> bool:
        """True if all texts equal the baseline's for every method that promises it."""
        return all(method.num_identical == method.num_prompts for method in self.methods if method.promise == "text")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "all_identical": self.all_identical}


def compare(
    lms: Sequence[LM],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    rounds: int = 1,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Decode every prompt ``rounds`` times with every method (the baseline first), one prompt at a time.

    Methods take turns on each prompt, which pairs the measurements: a machine that slows down slows all of them. The
    first prompt is decoded once more at the start, uncounted, to warm up. Ctrl-C ends after the last finished round, or
    if there is none, after the last prompt that every method has finished; without one it raises KeyboardInterrupt.
    """
    if not lms or lms[0].drafter.drafts:
        raise ConfigError("compare needs the baseline first: pass LM(target, tokenizer) as the first of lms")
    if not prompts:
        raise ConfigError("compare needs at least one prompt")
    sampling = with_seed(sampling)
    runs: list[list[Generation]] = [[] for _ in lms]
    total, is_complete = (1 + rounds * len(prompts)) * len(lms), False
    try:
        for done, lm in enumerate(lms):
            on_progress(done, total)
            lm.generate([prompts[0]], sampling, max_tokens=min(sampling.max_tokens, 16))
        for turn in range(rounds):
            for lm in lms:
                lm.forget()  # else drafts that learn would copy the answers of the last round or of the warm-up
            for index, prompt in enumerate(prompts):
                first = (turn + index) % len(lms)
                for place in [*range(first, len(lms)), *range(first)]:
                    on_progress(len(lms) + sum(map(len, runs)), total)
                    runs[place] += lms[place].generate([prompt], sampling)
        on_progress(total, total)
        is_complete = True
    except KeyboardInterrupt:
        num_finished = min(map(len, runs))
        if not num_finished:
            raise
        rounds, prompts = max(num_finished // len(prompts), 1), prompts[:num_finished]
        runs = [run[: rounds * len(prompts)] for run in runs]
    target = lms[0].target
    settings = {
        **describe_target(target),
        "num_prompts": len(prompts),
        "rounds": rounds,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "rules": {lm.drafter_name: lm.rule for lm in lms[1:]},
        "budgets": {lm.drafter_name: lm.describe_budget() for lm in lms[1:]},
    }
    return Comparison(
        methods=[_summarise(lm, run, runs[0], len(prompts), sampling) for lm, run in zip(lms, runs, strict=True)],
        baseline=f"the same settings without drafts, batch 1, engine {engine_of(target)}",
        settings=settings,
        machine=describe_machine(),
        texts={lm.drafter_name: run[0].text for lm, run in zip(lms, runs, strict=True)},
        is_complete=is_complete,
    )


def promise_of(lm: LM, sampling: Sampling) -> str:
    rule = get_rule(lm.rule, lossless=False)
    if not rule.lossless:
        return "nothing"
    return "text" if rule.apply is match or sampling.temperature == 0 else "distribution"


def _summarise(
    lm: LM, run: list[Generation], baseline: list[Generation], num_prompts: int, sampling: Sampling
) -> MethodResult:
    stats, pairs = Stats.sum(one.stats for one in run), list(zip(run, baseline, strict=True))
    speedup = statistics.median(one.stats.tokens_per_s / base.stats.tokens_per_s for one, base in pairs)
    same = [one.token_ids == base.token_ids for one, base in pairs]
    return MethodResult(
        name=lm.drafter_name,
        tokens_per_s=statistics.median(one.stats.tokens_per_s for one in run),
        speedup=speedup,
        tau=stats.tau,
        efficiency=speedup / stats.tau,
        alpha=stats.alpha,
        promise=promise_of(lm, sampling),
        num_identical=sum(all(same[index::num_prompts]) for index in range(num_prompts)),
        num_prompts=num_prompts,
        lossless=stats.lossless,
        phases={phase: value / stats.total_seconds for phase, value in stats.seconds.items()},
    )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal tokens at the start of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))


# --- verify ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The first token of a speculative text that differs from the baseline's."""

    prompt_index: int
    position: int  # the number of equal tokens before it
    # plain_token, token: of both texts; -1 if one of them ends there
    plain_token: int
    token: int
    margin: float  # the baseline's perturbed score of its token minus that of the other; 0 if a text ends
    noise: float  # the largest change of any score when the same tokens are forwarded in other groups
    is_tie: bool  # the margin is at most twice the noise, since each of the two scores may change by that much


@dataclass(frozen=True)
class Verification:
    num_prompts: int
    num_identical: int
    num_tokens: int
    differences: list[Difference]
    settings: dict[str, Any]


def verify(
    lm: LM,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Verification:
    """Decode every prompt with and without drafts and compare token ids."""
    baseline, sampling = LM(lm.target, lm.tokenizer), with_seed(sampling)
    differences, num_tokens = [], 0
    for index, prompt in enumerate(prompts):
        (generation,), (base,) = (one.generate([prompt], sampling) for one in (lm, baseline))
        num_tokens += len(base.token_ids)
        if generation.token_ids != base.token_ids:
            differences.append(_explain(lm.target, base, generation.token_ids, sampling, index))
        on_progress(index + 1, len(prompts))
    settings = {
        **describe_target(lm.target),
        "drafter": lm.drafter_name,
        "rule": lm.rule,
        "max_batch": 1,
        "sampling": {key: value for key, value in asdict(sampling).items() if value != getattr(Sampling(), key)},
    }
    return Verification(len(prompts), len(prompts) - len(differences), num_tokens, differences, settings)


@torch.inference_mode()
def _explain(target: Target, base: Generation, token_ids: list[int], sampling: Sampling, index: int) -> Difference:
    """Recompute the scores at the first difference with several groupings of the same tokens."""
    plain_ids, position = base.token_ids, first_difference(base.token_ids, token_ids)
    ids = base.prompt_ids + plain_ids[:position]
    batch = SamplingBatch([sampling], noise_of(target.vocab_size, target.device), target.device)
    scores = [_scores(target, ids, len(base.prompt_ids), group, batch) for group in (1, 2, 5, 16, len(ids))]
    noise = max(float((other - scores[0]).nan_to_num(0.0).abs().max()) for other in scores[1:])
    if position == min(len(plain_ids), len(token_ids)):  # one text ends here
        return Difference(index, position, -1, -1, 0.0, noise, is_tie=False)
    plain_token, token = plain_ids[position], token_ids[position]
    margin = float(scores[0][plain_token] - scores[0][token])
    return Difference(index, position, plain_token, token, margin, noise, abs(margin) <= 2 * noise)


def _scores(target: Target, ids: list[int], num_prompt: int, group: int, batch: SamplingBatch) -> Tensor:
    """Forward all but the prompt in chains of ``group``; return (V,) perturbed scores of the token after ``ids``."""
    ctx = target.new_context()
    target.prefill(ctx, ids[:num_prompt] if group < len(ids) else ids)
    row = ctx.rows[0]
    while True:
        chain = ids[row.length : row.length + (group if target.supports_trees else 1)]
        row.tokens = ids
        tree = DraftTree.chain(torch.tensor([chain], device=target.device))
        output = target.forward(ctx, tree)
        if row.length + len(chain) == len(ids):
            row.prompt_length = num_prompt
            scores = batch.scores(output.logits, tree, ctx.history() if batch.penalises else None)
            depths = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
            return batch.perturb(scores[:, -1:], depths, [len(ids)], 0)[0, 0]
        nodes = torch.arange(tree.num_nodes, device=target.device)[None]
        num_accepted = ctx.tensor([tree.num_nodes - 1])
        target.commit(ctx, tree, Accepted(nodes, num_accepted, num_accepted))
        row.length += tree.num_nodes
