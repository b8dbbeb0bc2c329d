"""What rows need now and then: budgets of their own, log-probabilities, laws, and why one cannot go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from draftwing.drafters.base import Budget
from draftwing.engine.request import Request
from draftwing.errors import NumericsError
from draftwing.model.target import Row
from draftwing.sampling import SamplingBatch, on_host
from draftwing.stats import Law, Logprob, RowStep
from draftwing.tree import PAD, DraftTree

__all__ = ["cut_to", "explain", "logprobs_of", "rooms_of", "with_laws"]

_LEAST = 8  # depth that drafts are not cut below


def cut_to(budget: Budget, depth: int) -> Budget:
    """A budget that drafts not much deeper than ``depth``, what can still be emitted.

    The depth is rounded up to a power of two: where drafts are recorded, each depth is a recording of its own.
    """
    depth = max(_LEAST, 1 << (depth - 1).bit_length()) if depth > 0 else 0
    if budget.depth <= depth:
        return budget
    if budget.paths is None or depth == 0:
        return replace(budget, depth=depth, paths=None)
    return replace(budget, paths=tuple(path for path in budget.paths if len(path) <= depth))


def rooms_of(rows: Sequence[Row], ends: Sequence[int], max_length: int) -> list[int]:
    """How many tokens each row may still emit, of ``ends`` in all.

    Args:
        max_length: tokens that a row may hold.
    """
    pairs = zip(rows, ends, strict=True)
    return [min(row.prompt_length + end, max_length) - row.length - 1 for row, end in pairs]


def logprobs_of(tokens: Sequence[int], logits_NV: Tensor, path: Tensor, num_top: int) -> tuple[Logprob, ...]:
    """The target's own log-probabilities of a row's emitted tokens: each is read at the node before it.

    Args:
        tokens: as many as are emitted.
        logits_NV: (N, V) of the row's nodes.
        path: (D + 1,) the kept nodes.
        num_top: how many of the best tokens are named beside each.
    """
    # By numpy: PyTorch's threads would go on waiting for more, on the processors that the next forward needs.
    nodes = path[: len(tokens)]
    if on_host(logits_NV):
        logits = logits_NV.detach().float().numpy()[nodes.numpy()]
    else:
        logits = logits_NV[nodes].detach().float().cpu().numpy()
    shifted = logits - logits.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    found, num_top = [], min(num_top, logprobs.shape[-1])
    for token, law in zip(tokens, logprobs, strict=True):
        best: list[int] = np.argpartition(-law, num_top - 1)[:num_top].tolist() if num_top else []
        top = tuple((each, float(law[each])) for each in sorted(best, key=lambda each: (-law[each], each)))
        found.append(Logprob(token, float(law[token]), top))
    return tuple(found)


def explain(target: str, request: Request, position: int, logits_NV: Tensor, path: Tensor) -> NumericsError:
    """Why a token was drawn from scores that are not finite: the target's logits, or what the settings made of them."""
    kept = logits_NV[path[path != PAD]]
    where = f"{target}: the logits of request {request.id} at position {position}"
    if bool((kept.isnan() | kept.isposinf()).any()):
        return NumericsError(f"{where} hold NaN or infinity: check the weights, or load with dtype='float32'")
    sampling = request.sampling
    values = {
        "temperature": sampling.temperature,
        "logit_bias": max(sampling.logit_bias.values(), key=abs, default=0.0),
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "banned_tokens": f"{len(sampling.banned_tokens)} of them" if sampling.banned_tokens else 0.0,
        "constraint": 0.0 if request.constraint is None else "that allows none of what is left",
    }
    neutral = {"temperature": (0.0, 1.0), "repetition_penalty": (1.0,)}
    active = [f"{name} {value}" for name, value in values.items() if value not in neutral.get(name, (0.0,))]
    return NumericsError(
        f"{where} are finite, but its settings leave no token with a finite score: choose less extreme ones, or drop "
        f"them ({', '.join(active) or 'it has none: the logits are -inf'})"
    )


def with_laws(rows: Sequence[RowStep], tree: DraftTree, scores: Tensor, sampling: SamplingBatch) -> list[RowStep]:
    """The rows of a step, with what the target says at each node where a row asks for it.

    Args:
        rows: in the order of the tree's.
        tree: what was proposed.
        scores: (B, N, V) from which the target draws after each node.
        sampling: of the rows.
    """
    found = list(rows)
    for place, row in enumerate(rows):
        count = sampling.rows[place].laws
        if count and row.error is None:
            tokens, parents = tree.tokens[place].tolist(), tree.parents[place].tolist()
            depths, laws = [0] * len(tokens), []
            for node, above in enumerate(parents):
                depths[node] = depths[above] + 1 if above >= 0 else 0
                beside = [tokens[child] for child, each in enumerate(parents) if each == node]
                if tokens[node] != PAD:
                    position = row.position + depths[node]
                    laws.append(_law(scores[place, node], beside, sampling, (place, position), count))
            found[place] = replace(row, laws=tuple(laws))
    return found


def _law(scores_V: Tensor, beside: Sequence[int], sampling: SamplingBatch, at: tuple[int, int], count: int) -> Law:
    """Of one node. ``beside``: tokens that are named beside the ``count`` likeliest; ``at``: row, and next position."""
    row, position = at
    drawn = sampling.draw_one(scores_V, row, position)
    probs = scores_V.double().softmax(-1)
    named = dict.fromkeys([*probs.topk(min(count, len(probs))).indices.tolist(), *beside, drawn])
    tokens = sorted(named, key=lambda token: -float(probs[token]))
    noise = sampling.noise.at(sampling.seeds[row], position) if sampling.rows[row].temperature > 0 else None
    return Law(
        tuple((token, float(probs[token]), 0.0 if noise is None else float(noise[token])) for token in tokens), drawn
    )
