"""What requests may not say, at every node of their trees: constraints, and end tokens before ``min_tokens``.

Masks come before everything else that is made of the logits, and are never looked at by drafters: these draft blindly.
A node that a mask forbids can never be kept. Under the keyed rule it is cut out before the forward; the classic rules
must meet it, or the law of what stands beside it would not be the target's.

Shape suffixes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftwing.constraint import State, forbidden_of, has_bit, words_without
from draftwing.engine.request import Request
from draftwing.errors import DraftwingError
from draftwing.sampling import on_host
from draftwing.tree import PAD, DraftTree

__all__ = ["Masks"]


@dataclass(frozen=True)
class _Limited:
    """A row with something that it may not say.

    Attributes:
        ends: tokens that end its text.
        everything: the mask of a row without a constraint; ``young``: where it must not end yet.
    """

    row: int
    request: Request
    ends: tuple[int, ...]
    everything: np.ndarray
    young: np.ndarray

    @property
    def is_free(self) -> bool:
        """Whether it may say anything from here on."""
        return self.request.constraint is None and len(self.request.token_ids) >= self.request.sampling.min_tokens

    def start(self) -> State | None:
        """Of its root."""
        return None if self.request.constraint is None else self.request.state()

    def mask(self, state: State | None, depth: int) -> np.ndarray:
        """After a node. Where all that a constraint leaves are ends, these stand, however young the text is."""
        is_young = len(self.request.token_ids) + depth < self.request.sampling.min_tokens
        if state is None:
            return self.young if is_young else self.everything
        words = state.allowed()
        if not is_young:
            return words
        rest = words_without(words, self.ends)
        return rest if rest.any() else words


class Masks:
    """Of the rows of a batch. ``of`` makes it, or None where nobody needs one.

    Args:
        limited: the rows that do.
        cuts: whether forbidden nodes are taken out of trees.
    """

    def __init__(self, limited: Sequence[_Limited], *, cuts: bool) -> None:
        self._limited, self._cuts = limited, cuts
        self._places: list[tuple[int, int]] = []  # of this step's masks: row and node
        self._words: list[np.ndarray] = []
        self._failed: list[tuple[int, int]] = []
        self._errors: dict[int, DraftwingError] = {}

    @classmethod
    def of(cls, requests: Sequence[Request], vocab_size: int, eos_ids: Sequence[int], *, cuts: bool) -> Masks | None:
        """The masks of requests in the order of their rows."""
        limited = []
        for row, request in enumerate(requests):
            sampling = request.sampling
            if request.constraint is None and not sampling.min_tokens:
                continue
            ends = sampling.stop_tokens if sampling.ignore_eos else (*sampling.stop_tokens, *eos_ids)
            everything = np.full((vocab_size + 31) // 32, 0xFFFFFFFF, dtype=np.uint32)
            limited.append(_Limited(row, request, ends, everything, words_without(everything, ends)))
        return cls(limited, cuts=cuts) if limited else None

    def error(self, row: int) -> DraftwingError | None:
        """Why nothing can be said of a row any more."""
        return self._errors.get(row)

    def read(self, tree: DraftTree) -> DraftTree:
        """Find the masks of all nodes that may be kept.

        Returns:
            The tree, without forbidden nodes where they can be told before it is scored.
        """
        self._places, self._words, self._failed, self._errors = [], [], [], {}
        active = [each for each in self._limited if not each.is_free]
        if not active:
            return tree
        offer = tree.offer
        if offer.num_nodes == 1:
            for each in active:
                self._walk(each, [0], [-1])
            return tree
        tokens, parents = offer.tokens.tolist(), offer.parents.tolist()
        forbidden = [
            (each.row, node) for each in active for node in self._walk(each, tokens[each.row], parents[each.row])
        ]
        if not self._cuts or tree.num_scored:
            return tree
        return tree.without(forbidden)

    def _walk(self, limited: _Limited, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Find the masks of one row's nodes; the nodes that can never be kept."""
        states: list[State | None] = [None] * len(tokens)
        masks: list[np.ndarray | None] = [None] * len(tokens)
        depths, forbidden = [0] * len(tokens), []
        for node, (token, above) in enumerate(zip(tokens, parents, strict=True)):
            if node and token == PAD:
                continue
            try:
                if node:
                    mask, state = masks[above], states[above]
                    if mask is None or not has_bit(mask, token):
                        forbidden.append(node)
                        continue
                    if token in limited.ends:  # what is drawn after it is cut off
                        continue
                    depths[node] = depths[above] + 1
                    if state is not None:
                        states[node] = state = state.fork()
                        state.take(token)
                else:
                    states[0] = limited.start()
                masks[node] = limited.mask(states[node], depths[node])
            except DraftwingError as error:
                self._errors[limited.row] = error
                self._failed.append((limited.row, node))
        known = [(node, mask) for node, mask in enumerate(masks) if mask is not None]
        self._places += [(limited.row, node) for node, _ in known]
        self._words += [mask for _, mask in known]
        return forbidden

    def apply(self, logits_BNV: Tensor) -> Tensor:
        """The logits with -inf for what may not be said, as a copy: log-probabilities are those of the logits."""
        if not self._places and not self._failed:
            return logits_BNV
        _, nodes, vocab_size = logits_BNV.shape
        places = [row * nodes + node for row, node in self._places]
        failed = [row * nodes + node for row, node in self._failed]
        forbidden = [forbidden_of(words, vocab_size) for words in self._words]
        if on_host(logits_BNV) and logits_BNV.dtype in (torch.float32, torch.float64):
            # By numpy: operators on a row of logits would wait for a second thread.
            rows = np.array(logits_BNV.detach().numpy(), order="C").reshape(-1, vocab_size)
            for place, each in zip(places, forbidden, strict=True):
                np.copyto(rows[place], -math.inf, where=each)
            rows[failed] = math.nan
            return torch.from_numpy(rows).view(logits_BNV.shape)
        masked = logits_BNV.clone(memory_format=torch.contiguous_format)
        flat_RV = masked.view(-1, vocab_size)
        if places:  # all at once
            index = torch.tensor(places, device=masked.device)
            mask = torch.from_numpy(np.stack(forbidden)).to(masked.device)
            flat_RV[index] = flat_RV[index].masked_fill_(mask, -math.inf)
        if failed:
            flat_RV[torch.tensor(failed, device=masked.device)] = math.nan
        return masked
