"""Tokens that requests forbid at each node of their draft trees: constraints, and end tokens before ``min_tokens``.

Masks come before everything else that is computed from the logits; drafters never see them. A forbidden node can never
be accepted. Under the keyed rule it is removed before the forward; the classic rules must judge it, or the distribution
of its siblings would not be the target's.

Shape suffixes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftwing.constraint import State, as_own_error, check_mask, forbidden_tokens, has_bit, words_without
from draftwing.errors import DraftwingError
from draftwing.request import Request
from draftwing.sampling import on_host
from draftwing.tree import PAD, DraftTree


@dataclass(frozen=True)
class _MaskedRow:
    """A row that may forbid something."""

    row: int
    request: Request
    end_tokens: tuple[int, ...]  # end the request
    allow_all: np.ndarray  # the mask of a row without a constraint
    allow_no_end: np.ndarray  # the same before ``min_tokens``

    @property
    def is_free(self) -> bool:
        """True if nothing is forbidden from here on."""
        return self.request.constraint is None and len(self.request.token_ids) >= self.request.sampling.min_tokens

    def mask(self, state: State | None, depth: int) -> np.ndarray:
        """The mask after a node. If a constraint allows end tokens only, they stay allowed before ``min_tokens``."""
        must_continue = len(self.request.token_ids) + depth < self.request.sampling.min_tokens
        if state is None:
            return self.allow_no_end if must_continue else self.allow_all
        words = check_mask(state.allowed())
        if not must_continue:
            return words
        rest = words_without(words, self.end_tokens)
        return rest if rest.any() else words


class Masks:
    """The masks of a batch.

    Args:
        requests: in the order of their rows.
        prunes: remove forbidden nodes from trees.
    """

    def __init__(self, requests: Sequence[Request], vocab_size: int, eos_ids: Sequence[int], *, prunes: bool) -> None:
        self._prunes, self._rows = prunes, list[_MaskedRow]()
        allow_all = np.full((vocab_size + 31) // 32, 0xFFFFFFFF, dtype=np.uint32)
        for row, request in enumerate(requests):
            if not request.is_restricted:
                continue
            sampling = request.sampling
            ends = sampling.stop_tokens if sampling.ignore_eos else (*sampling.stop_tokens, *eos_ids)
            self._rows.append(_MaskedRow(row, request, ends, allow_all, words_without(allow_all, ends)))
        # This step: (row, node) of each mask, the masks, and (row, node) of failed constraints.
        self._places: list[tuple[int, int]] = []
        self._words: list[np.ndarray] = []
        self._failed: list[tuple[int, int]] = []
        self._errors: dict[int, DraftwingError] = {}

    def error(self, row: int) -> DraftwingError | None:
        """The error of a row's constraint."""
        return self._errors.get(row)

    def find(self, tree: DraftTree) -> DraftTree:
        """Compute the masks of all nodes that may be accepted.

        Returns:
            The tree, without forbidden nodes if these may be removed before the forward.
        """
        self._places, self._words, self._failed, self._errors = [], [], [], {}
        active = [row for row in self._rows if not row.is_free]
        if not active:
            return tree
        proposed = tree.proposed
        if proposed.num_nodes == 1:
            for row in active:
                self._walk(row, [0], [-1])
            return tree
        tokens, parents = proposed.tokens.tolist(), proposed.parents.tolist()
        forbidden = [(row.row, node) for row in active for node in self._walk(row, tokens[row.row], parents[row.row])]
        return tree.without(forbidden) if self._prunes and not tree.num_extra_nodes else tree

    def _walk(self, row: _MaskedRow, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Compute the masks of one row's nodes; returns the nodes that can never be accepted."""
        states: list[State | None] = [None] * len(tokens)
        masks: list[np.ndarray | None] = [None] * len(tokens)
        depths, forbidden = [0] * len(tokens), []
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if node and token == PAD:
                continue
            if node:
                mask = masks[parent]
                if mask is None or not has_bit(mask, token):
                    forbidden.append(node)
                    continue
                if token in row.end_tokens:  # tokens after it are cut off
                    continue
                depths[node] = depths[parent] + 1
            try:
                if node:
                    state = states[parent]
                    if state is not None:
                        states[node] = state = state.fork()
                        state.take(token)
                elif row.request.constraint is not None:
                    states[0] = row.request.state()
                masks[node] = row.mask(states[node], depths[node])
            except Exception as error:  # the constraint may be the caller's own
                self._errors[row.row] = as_own_error(error)
                self._failed.append((row.row, node))
        for node, mask in enumerate(masks):
            if mask is not None:
                self._places.append((row.row, node))
                self._words.append(mask)
        return forbidden

    def apply(self, logits_BNV: Tensor) -> Tensor:
        """A copy of the logits with -inf for forbidden tokens; log-probabilities are those of the original."""
        if not self._places and not self._failed:
            return logits_BNV
        _, nodes, vocab_size = logits_BNV.shape
        places = [row * nodes + node for row, node in self._places]
        failed = [row * nodes + node for row, node in self._failed]
        forbidden = [forbidden_tokens(words, vocab_size) for words in self._words]
        if on_host(logits_BNV) and logits_BNV.dtype in (torch.float32, torch.float64):
            # NumPy: a PyTorch operator on a row of logits would wake a second thread.
            rows = np.array(logits_BNV.detach().numpy(), order="C").reshape(-1, vocab_size)
            for place, mask in zip(places, forbidden, strict=True):
                np.copyto(rows[place], -math.inf, where=mask)
            rows[failed] = math.nan
            return torch.from_numpy(rows).view(logits_BNV.shape)
        masked = logits_BNV.clone(memory_format=torch.contiguous_format)
        flat_RV = masked.view(-1, vocab_size)
        if places:
            index = torch.tensor(places, device=masked.device)
            mask_RV = torch.from_numpy(np.stack(forbidden)).to(masked.device)
            flat_RV[index] = flat_RV[index].masked_fill_(mask_RV, -math.inf)
        if failed:
            flat_RV[torch.tensor(failed, device=masked.device)] = math.nan
        return masked
