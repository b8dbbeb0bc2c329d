"""Penalties for what stands in a text already: repetition, presence, frequency, by each node's own path.

Shape suffixes: B rows, N nodes, V vocabulary, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftwing.tree import DraftTree

__all__ = ["History", "Penalties", "penalised", "penalised_on_host"]


@dataclass(frozen=True)
class History:
    """What penalties look at: the committed tokens of each row.

    Attributes:
        tokens: (B, S) int64, valid up to ``lengths``.
        lengths: (B,) committed tokens (the pending token not counted).
        prompt_lengths: (B,).
    """

    tokens: Tensor
    lengths: Tensor
    prompt_lengths: Tensor


@dataclass(frozen=True)
class Penalties:
    """Of every row, (B, 1, 1) float64. Repetition looks at prompt and output, the others at the output alone."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor


def penalised(scores: Tensor, tree: DraftTree, history: History, by: Penalties) -> Tensor:
    """(B, N, V) the scores, with counts of the committed tokens plus those on each node's own path."""
    rows, nodes, vocab = scores.shape
    slots = torch.arange(history.tokens.shape[1], device=scores.device)
    committed = slots < history.lengths[:, None]
    output = committed & (slots >= history.prompt_lengths[:, None])
    safe = history.tokens.clamp(min=0)
    path = tree.ancestors & tree.valid[:, None, :]
    # The root is output unless it is still the prompt's last token; every drafted node is.
    path_output = path.clone()
    path_output[:, :, 0] &= (history.lengths >= history.prompt_lengths)[:, None]
    path_tokens = tree.tokens.clamp(min=0)[:, None, :].expand(rows, nodes, tree.num_nodes)

    def counts(past: Tensor, on_path: Tensor) -> Tensor:
        base = torch.zeros(rows, vocab, dtype=scores.dtype, device=scores.device)
        base.scatter_add_(1, safe, past.to(scores.dtype))
        each = base[:, None, :].repeat(1, nodes, 1)
        return each.scatter_add_(2, path_tokens, on_path.to(scores.dtype))

    seen = counts(committed, path) > 0
    written = counts(output, path_output)
    penalty = by.repetition.to(scores.dtype)
    scores = torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    scores = scores - by.frequency.to(scores.dtype) * written
    return scores - by.presence.to(scores.dtype) * (written > 0)


def penalised_on_host(scores: Tensor, tree: DraftTree, history: History, by: Penalties) -> Tensor:
    """The same, bit for bit, of float32 or float64 on the host: only what was said is touched, and by one thread."""
    whole = np.array(scores.detach().numpy())  # a copy
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    lengths, prompts = history.lengths.tolist(), history.prompt_lengths.tolist()
    committed = history.tokens.numpy()
    kind = whole.dtype.type
    amounts = zip(*(each.flatten().tolist() for each in (by.repetition, by.presence, by.frequency)), strict=True)
    for row, (repetition, presence, frequency) in enumerate(amounts):
        if (repetition, presence, frequency) == (1.0, 0.0, 0.0):
            continue
        own = kind(repetition), kind(presence), kind(frequency)
        said = committed[row, : lengths[row]]
        ids, place = np.unique(said, return_inverse=True)
        written = np.bincount(place[prompts[row] :], minlength=len(ids)).astype(kind)
        before = {int(token): float(count) for token, count in zip(ids, written, strict=True)}
        root_counts = lengths[row] >= prompts[row]
        for node, path in enumerate(_paths(tokens[row], parents[row])):
            law = whole[row, node]
            on_path: dict[int, float] = {}
            for step in path:
                token = tokens[row][step]
                on_path[token] = on_path.get(token, before.get(token, 0.0)) + (step > 0 or root_counts)
            extra = np.array(list(on_path), dtype=np.int64)
            counts = np.array(list(on_path.values()), dtype=kind)
            changed = _changed(law[extra], counts, own)
            law[ids] = _changed(law[ids], written, own)
            law[extra] = changed
    return torch.from_numpy(whole)


def _changed(scores: np.ndarray, written: np.ndarray, by: tuple[np.floating, np.floating, np.floating]) -> np.ndarray:
    """Of tokens that were seen, and were written so often."""
    repetition, presence, frequency = by
    scores = np.where(scores > 0, scores / repetition, scores * repetition)
    scores = scores - frequency * written
    found: np.ndarray = scores - presence * (written > 0).astype(scores.dtype)
    return found


def _paths(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """Of every node the used nodes from the root to it."""
    paths: list[list[int]] = []
    for node, (token, above) in enumerate(zip(tokens, parents, strict=True)):
        paths.append([*(paths[above] if above >= 0 else []), *([node] if token >= 0 else [])])
    return paths
