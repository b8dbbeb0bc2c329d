"""Read a step's results on the host: emitted tokens, log-probabilities, distributions, and causes of bad scores.

Shape suffixes: B rows, N nodes, V vocabulary, D depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from draftwing.errors import NumericsError
from draftwing.request import Request
from draftwing.sampling import SamplingBatch, on_host
from draftwing.stats import Logprob, NodeDistribution, RowStep
from draftwing.tree import PAD, Accepted, DraftTree, Emitted


def read_emitted(tree: DraftTree, accepted: Accepted, scores: Tensor) -> list[Emitted]:
    """The emitted tokens of each row: on a GPU, this waits for the device.

    Args:
        scores: (B, N, V) that the rule has applied.
    """
    path = accepted.path
    drafted = tree.tokens.gather(1, path.clamp(min=0))
    last = path.gather(1, accepted.num[:, None])
    chosen = scores[torch.arange(len(path), device=path.device), last[:, 0], accepted.bonus]
    columns = (accepted.num, accepted.bonus, tree.valid.sum(1), tree.depths.amax(1), chosen.isfinite())
    together = torch.cat([drafted, *(column[:, None] for column in columns)], 1)  # one copy to the host
    return [
        Emitted([*tokens[1 : num + 1], bonus], used - 1, depth, finite > 0)
        for *tokens, num, bonus, used, depth, finite in together.tolist()
    ]


def depths_of(parents: Sequence[int]) -> list[int]:
    """The depth of each node; parents come before their children, and nodes without one have depth 0."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def get_logprobs(tokens: Sequence[int], logits_NV: Tensor, path: Tensor, num_top: int) -> tuple[Logprob, ...]:
    """The target's own log-probabilities of a row's emitted tokens, each read at the node before it.

    Args:
        tokens: the emitted tokens.
        logits_NV: (N, V) of the row's nodes.
        path: (D + 1,) the accepted nodes.
        num_top: how many of the likeliest tokens to list with each.
    """
    # NumPy: PyTorch's threads would busy-wait on the processors that the next forward needs.
    nodes = path[: len(tokens)]
    if on_host(logits_NV):
        logits = logits_NV.detach().float().numpy()[nodes.numpy()]
    else:
        logits = logits_NV[nodes].detach().float().cpu().numpy()
    shifted = logits - logits.max(-1, keepdims=True)
    logprobs_DV = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    logprobs, num_top = [], min(num_top, logprobs_DV.shape[-1])
    for token, logprobs_V in zip(tokens, logprobs_DV, strict=True):
        best: list[int] = np.argpartition(-logprobs_V, num_top - 1)[:num_top].tolist() if num_top else []
        top = tuple(
            (other, float(logprobs_V[other])) for other in sorted(best, key=lambda other: (-logprobs_V[other], other))
        )
        logprobs.append(Logprob(token, float(logprobs_V[token]), top))
    return tuple(logprobs)


def explain(target: str, request: Request, position: int, logits_NV: Tensor, path: Tensor) -> NumericsError:
    """The cause of scores that are not finite: the target's logits, or the request's settings."""
    kept = logits_NV[path[path != PAD]]
    subject = f"{target}: the logits of request {request.id} at position {position}"
    if bool((kept.isnan() | kept.isposinf()).any()):
        return NumericsError(f"{subject} hold NaN or infinity: check the weights, or load with dtype='float32'")
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
        f"{subject} are finite, but its settings leave no token with a finite score: choose less extreme ones, or drop "
        f"them ({', '.join(active) or 'it has none: the logits are -inf'})"
    )


def add_node_distributions(
    rows: Sequence[RowStep], tree: DraftTree, scores: Tensor, sampling: SamplingBatch
) -> list[RowStep]:
    """Add the target's distribution at each node to the rows that ask for it (``Sampling.node_distributions``).

    Args:
        rows: in the order of the tree's.
        tree: the proposed trees.
        scores: (B, N, V) from which the target draws after each node.
        sampling: of the rows.
    """
    with_distributions = list(rows)
    for index, row in enumerate(rows):
        num_top = sampling.rows[index].node_distributions
        if not num_top or row.error is not None:
            continue
        tokens, parents = tree.tokens[index].tolist(), tree.parents[index].tolist()
        distributions = []
        for node, (token, depth) in enumerate(zip(tokens, depths_of(parents), strict=True)):
            if token != PAD:
                children = [tokens[child] for child, parent in enumerate(parents) if parent == node]
                distributions.append(
                    _node_distribution(scores[index, node], children, sampling, index, row.position + depth, num_top)
                )
        with_distributions[index] = replace(row, node_distributions=tuple(distributions))
    return with_distributions


def _node_distribution(
    scores_V: Tensor, children: Sequence[int], sampling: SamplingBatch, row: int, position: int, num_top: int
) -> NodeDistribution:
    drawn = sampling.draw_one(scores_V, row, position)
    probs = scores_V.double().softmax(-1)
    listed = {*probs.topk(min(num_top, len(probs))).indices.tolist(), *children, drawn}
    noise = sampling.noise.at(sampling.seeds[row], position) if sampling.rows[row].temperature > 0 else None
    return NodeDistribution(
        tuple(
            (token, float(probs[token]), 0.0 if noise is None else float(noise[token]))
            for token in sorted(listed, key=lambda token: (-float(probs[token]), token))
        ),
        drawn,
    )
