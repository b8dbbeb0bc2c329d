"""Held-out data: loss, agreement and tau of a net, its calibration, and prompts that are stored with its head."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftwing.decode import Decoder
from draftwing.engine import Engine
from draftwing.formats.card import line_of
from draftwing.methods.base import Budget
from draftwing.methods.calibration import NUM_COMPARED, Calibration
from draftwing.methods.net import DraftNet
from draftwing.methods.objectives import DraftLoss, Truth
from draftwing.methods.registry import method_of_net
from draftwing.models.linear import Linear
from draftwing.models.target import Target
from draftwing.remote import OnProgress
from draftwing.sampling import Sampling
from draftwing.stats import Stats, Step
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data import Corpus, Example
from draftwing.train.features import FeatureBatch, FeatureSource
from draftwing.train.options import TrainOptions

T = TypeVar("T")

PROMPT_TOKENS = 128  # prompt length when tau is measured on documents
VALIDATION_BATCHES = 4
# Calibration.
CALIBRATED_STEPS = 2
MAX_ROWS = 4096  # positions that are drawn for one fit
SCALES = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0)  # candidates
MIN_GAIN = 1.01  # first guesses that a scale must make right, relative to none: a smaller gain may be chance
# Prompts that are stored with the head.
BEGINNING_TOKENS = 64  # prompt length in documents
BEGINNING_DISTANCE = 2048  # tokens between two beginnings in one long document
CANDIDATES = 4  # looked at for each stored prompt, since long ones are left out


# --- evaluation ------------------------------------------------------------------------------------------------------


def validation_prompts(corpus: Corpus, num: int) -> list[list[int]]:
    """Cut up to ``num`` prompts from held-out data: dialogues up to their first answer, and parts of documents."""
    prompts = [_prompt_of(example, PROMPT_TOKENS) for example in corpus.examples]
    room = len(corpus.stream) - PROMPT_TOKENS
    if room > 0:
        starts = [int(room * (i + 0.5) / max(num, 1)) for i in range(num)]
        prompts += [[*corpus.prefix, *corpus.stream[at : at + PROMPT_TOKENS].tolist()] for at in starts]
    step = max(1, len(prompts) // max(num, 1))
    return prompts[::step][:num]


def _prompt_of(example: Example, num_tokens: int) -> list[int]:
    """Return what comes before the first answer; of a document's window, the beginning."""
    first = int(example.mask.argmax())
    ids: list[int] = example.ids[: first if first > 1 else min(num_tokens, len(example.ids) // 2)].tolist()
    return ids


@torch.inference_mode()
def measure_tau(
    target: Target,
    net: DraftNet,
    prompts: Sequence[Sequence[int]],
    budget: Budget,
    tokens: int,
    on_progress: OnProgress | None = None,
) -> Stats:
    """Decode greedily with a net in training, all prompts in one batch; report the tokens and their number."""
    engine = Engine(Decoder(target, method_of_net(net).drafter(net, target), budget=budget))
    requests = [engine.submit(prompt, Sampling(max_tokens=tokens, ignore_eos=True)) for prompt in prompts]

    def steps() -> Iterator[Step]:
        for step in engine.steps():
            yield step
            if on_progress is not None:
                on_progress(sum(len(request.token_ids) for request in requests), tokens * len(requests))

    return Stats.of(steps())


@dataclass
class Evaluation:
    """Evaluates nets on held-out data."""

    target: Target  # the model to draft for
    validation: Corpus  # the data that prompts are cut from
    source: FeatureSource  # features of ``validation``
    options: TrainOptions  # options of the run
    # Called with what is done at present; empty at the end.
    on_progress: Callable[[str], None] = lambda text: None

    def __call__(self, net: DraftNet) -> dict[str, Any]:
        """Measure loss and agreement, calibrate the net, and measure tau if the target has its layers."""
        began, options, (objective, num_steps, _) = time.perf_counter(), self.options, self.options.recipe
        scorer = method_of_net(net).loss(net, objective, num_steps).eval()
        dtype = torch.promote_types(net.dtype, torch.float32)
        loss, count, agreed = torch.zeros(3, num_steps)
        numbers = range(min(VALIDATION_BATCHES, self.source.num_batches_per_epoch))
        batches = []
        for number in numbers:
            self.on_progress(f"scoring held-out batch {number + 1} of {len(numbers)}")
            batches.append(self.source.batch(number))
        for number, batch in enumerate(batches, 1):
            self.on_progress(f"held-out loss, batch {number} of {len(batches)}")
            sums = scorer(batch, Truth.of(batch, self.target.head, net.target_ids, dtype), agreement=True)
            loss += torch.tensor([float(s.loss) for s in sums])
            count += torch.tensor([float(s.count) for s in sums])
            agreed += torch.tensor([float(s.agreed) for s in sums])
        if method_of_net(net).calibrates:
            self.on_progress("calibrating")
            calibration = fit_calibration(partial(draw_guesses, scorer, self.target.head, batches))
            net.config = dataclasses.replace(net.config, calibration=calibration)
        result: dict[str, Any] = {
            **dataclasses.asdict(net.config.calibration),
            "val_loss": float((loss / count.clamp(min=1)).sum()),
            "val_agreement": (agreed / count.clamp(min=1)).tolist(),
        }
        prompts = validation_prompts(self.validation, options.eval_prompts) if self.target.has_layers else []
        prompts = [prompt for prompt in prompts if len(prompt) + options.eval_tokens < self.target.max_length]
        if prompts:
            budget = Budget(options.eval_depth)
            stats = measure_tau(self.target, net, prompts, budget, options.eval_tokens, self._report_tokens)
            result |= {"tau": stats.tau, "alpha": stats.alpha}
        self.on_progress("")
        return {**result, "eval_seconds": time.perf_counter() - began}

    def _report_tokens(self, done: int, total: int) -> None:
        self.on_progress(f"measuring tau, {done} of {total} tokens")


# --- calibration -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def fit_calibration(draws: Callable[[], Iterable[tuple[Tensor, Tensor, Tensor]]]) -> Calibration:
    """Fit the scale of log q at temperature 1 first, then the probabilities under it.

    Args:
        draws: returns the same parts every time: (R, V) log q, (R, V) noise, and (R,) the target's token under the
            noise, which target and draft share while sampling.
    """
    right = torch.zeros(len(SCALES))
    for log_q, noise, drawn in draws():
        right += torch.stack([((scale * log_q + noise).argmax(-1) == drawn).sum().cpu() for scale in SCALES])
    best = int(right.argmax())
    scale = SCALES[best] if right[best] > MIN_GAIN * right[0] else SCALES[0]
    rivals, hits = [], []
    for log_q, noise, drawn in draws():
        ranked = (scale * log_q + noise).topk(min(NUM_COMPARED, log_q.shape[-1]), dim=-1)
        same = ranked.indices == drawn[:, None]
        rivals.append(ranked.values.cpu())
        hits.append(torch.where(same.any(-1), same.float().argmax(-1), -1).cpu())
    return Calibration.fit(torch.cat(rivals), torch.cat(hits), scale)


@torch.no_grad()
def draw_guesses(
    scorer: DraftLoss, head: Linear, batches: Sequence[FeatureBatch]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the draws of ``fit_calibration``, of the first ``CALIBRATED_STEPS`` tokens drafted after random positions.

    ``scorer`` is the loss of a net in float32, ``head`` the target's, and ``batches`` held-out text.
    """
    generator = torch.Generator().manual_seed(0)
    for batch in batches:
        logits = batch.logits_of(head)
        truth = Truth.of(batch, head, scorer.net.target_ids, torch.float32)
        for step in scorer.steps(batch, CALIBRATED_STEPS):
            entries, where = truth.rows(step.index, step.entries)
            chosen = torch.randperm(len(entries), generator=generator)[: MAX_ROWS // (CALIBRATED_STEPS * len(batches))]
            entries, where = entries[chosen.to(entries.device)], where[chosen.to(where.device)]
            log_q = scorer.logits(step.index, step.read[entries]).float().log_softmax(-1)
            log_p = logits.flatten(0, 1)[where].float().log_softmax(-1)
            uniform = torch.rand(log_q.shape, generator=generator, dtype=torch.float64).clamp(min=1e-300)
            noise = -(-uniform.log()).log().float().to(log_q.device)
            yield log_q, noise, (log_p + noise).argmax(-1)


# --- prompts for the head's folder -----------------------------------------------------------------------------------


def held_out_prompts(validation: Corpus, tokenizer: Tokenizer, num: int) -> list[str]:
    """Return up to ``num`` prompts of the held-out data, spread evenly over it, each a line for ``card.write_stored``.

    A dialogue's prompt is everything before its first answer, as the chat template renders it; a document's is its
    beginning. Prompts that are too long to be stored are left out.
    """
    examples = _spread(validation.examples, CANDIDATES * num)
    dialogues = [_rendered(_prompt_of(example, BEGINNING_TOKENS), tokenizer) for example in examples]
    bounds = itertools.pairwise([*validation.starts.tolist(), len(validation.stream)])
    starts = [
        at for start, end in bounds for at in range(start, end, BEGINNING_DISTANCE) if end - at >= BEGINNING_TOKENS
    ]
    documents: list[str | None] = []
    for start in _spread(starts, CANDIDATES * num):
        text = tokenizer.decode(validation.stream[start : start + BEGINNING_TOKENS].tolist())
        text = text.rstrip("\ufffd")  # a part of a character
        documents.append(line_of({"text": text}) if text.strip() else None)
    questions, beginnings = ([line for line in dict.fromkeys(lines) if line] for lines in (dialogues, documents))
    if questions and beginnings:  # half of each, or as many as there are
        beginnings = _spread(beginnings, max(num // 2, num - len(questions)))
        questions = _spread(questions, num - len(beginnings))
    return [*_spread(questions, num), *_spread(beginnings, num)]


def _rendered(ids: list[int], tokenizer: Tokenizer) -> str | None:
    """Return the line of a text with these ids, except for a begin token before them; None if there is none."""
    for start in (1, 0):  # the tokenizer may add the begin token that the template writes
        text = tokenizer.decode(ids[start:], skip_special_tokens=False)
        if text and tokenizer.encode(text)[-len(ids) :] == ids:
            return line_of({"text": text})
    return None


def _spread(items: Sequence[T], num: int) -> list[T]:
    """Select ``num`` of the items at even steps, or all of them."""
    if len(items) <= num:
        return list(items)
    return [items[int(len(items) * (i + 0.5) / num)] for i in range(num)]
