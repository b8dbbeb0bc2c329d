"""Acceptance rates of drafted tokens: by draft probability and depth, and by rank among siblings and depth."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from torch import Tensor

from draftwing.budget import CONFIG
from draftwing.budget.costs import isotonic

NUM_RANKS = CONFIG.tree.width
NUM_DEPTHS = len(CONFIG.depths)  # the last one stands for all deeper ones, which few nodes reach


class Acceptance:
    """Acceptance rate of a node whose parent was accepted, by its draft probability and depth.

    Observations are binned by probability and decay. Isotonic regression over the bins of a depth keeps the rate from
    falling as the probability grows. A bin starts at the rate of the depth above, since deep nodes are rarely reached,
    and at depth 1 at the probability itself.
    """

    def __init__(self) -> None:
        middles = [(low + high) / 2 for low, high in pairwise([0.0, *CONFIG.probability_bins, 1.0])]
        # By bin: number of nodes, sum of their probabilities, number of accepted ones. Python lists, because NumPy is
        # slower for the few nodes of a step.
        self._priors = [[CONFIG.prior_weight * start for start in starts] for starts in ([1.0] * len(middles), middles)]
        self._priors.append(self._priors[1])
        self._sums = [[list(prior) for prior in self._priors] for _ in range(NUM_DEPTHS)]
        self._curves: dict[int, tuple[list[float], list[float]]] = {}

    def observe(self, probs: Iterable[float], depths: Iterable[int], accepted: Iterable[bool]) -> None:
        """Count nodes whose parents were accepted.

        Args:
            probs: (K,) the drafter's probability of each node; nodes for which it is not finite are ignored.
            depths: (K,) depth of each node, 1 for children of the root.
            accepted: (K,) True for accepted nodes.
        """
        nodes = [node for node in zip(probs, depths, accepted, strict=True) if math.isfinite(node[0])]
        keep = CONFIG.acceptance_decay ** len(nodes)
        for index in {_table(depth) for _, depth, _ in nodes}:
            for values, priors in zip(self._sums[index], self._priors, strict=True):
                values[:] = [prior + keep * (value - prior) for value, prior in zip(values, priors, strict=True)]
        for prob, depth, is_accepted in nodes:
            place = bisect_left(CONFIG.probability_bins, prob)
            counts, sums, hits = self._sums[_table(depth)]
            counts[place] += 1
            sums[place] += prob
            hits[place] += is_accepted
        self._curves.clear()

    def __call__(self, probs: np.ndarray, depth: int) -> np.ndarray:
        """Return the acceptance rate of nodes at ``depth``, in the shape of ``probs``."""
        rates: np.ndarray = np.interp(probs, *self._curve(_table(depth)))
        return rates

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the knots and rates of a ``GrowthRule``: (num_depths, bins) float32 each."""
        curves = [self._curve(index) for index in range(NUM_DEPTHS)]
        knots, rates = (np.array(part, dtype=np.float32) for part in zip(*curves, strict=True))
        return knots, rates

    def _curve(self, index: int) -> tuple[list[float], list[float]]:
        """Return mean probability and acceptance rate of every bin, (bins,) each."""
        if index not in self._curves:
            counts, sums, hits = self._sums[index]
            if index:
                above = zip(hits, self._priors[2], self._curve(index - 1)[1], strict=True)
                hits = [count - prior + CONFIG.prior_weight * rate for count, prior, rate in above]
            rates = isotonic([hit / count for hit, count in zip(hits, counts, strict=True)], counts)
            self._curves[index] = [total / count for total, count in zip(sums, counts, strict=True)], rates
        return self._curves[index]


class Ranks:
    """Acceptance rate of the first, second, ... child of an accepted node, by depth: known before a draft is made."""

    def __init__(self) -> None:
        first = CONFIG.prior_acceptance
        start = [first] + [(1 - first) / NUM_RANKS] * (NUM_RANKS - 1)
        self._rates = [list(start) for _ in range(NUM_DEPTHS)]
        self._counts = [[0] * NUM_RANKS for _ in range(NUM_DEPTHS)]

    def observe(self, depth: int, rank: int, accepted: bool) -> None:
        """Count one node whose parent was accepted; depth from 1, rank from 0."""
        if rank >= NUM_RANKS:
            return
        rates, counts = self._rates[_table(depth)], self._counts[_table(depth)]
        counts[rank] += 1
        weight = max(1 - CONFIG.decay, 1 / (counts[rank] + CONFIG.prior_weight))
        rates[rank] += weight * (accepted - rates[rank])

    def rate(self, depth: int, rank: int = 0) -> float:
        """Return the acceptance rate of a child; depth from 1, rank from 0."""
        return self._rates[_table(depth)][rank]

    def likeliest(self, depth: int, width: int) -> Iterator[tuple[tuple[int, ...], float]]:
        """Yield paths of ranks with their probabilities, the likeliest first, parents before children (Sequoia)."""
        queue: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
        while queue:
            value, path = heapq.heappop(queue)
            if path:
                yield path, -value
            if len(path) < depth:
                for rank in range(min(width, NUM_RANKS)):
                    heapq.heappush(queue, (value * self.rate(len(path) + 1, rank), (*path, rank)))


def reached_nodes(
    steps: Sequence[tuple[Tensor, Tensor, Tensor | None]], ranks: Ranks
) -> tuple[list[float], list[int], list[bool]]:
    """Return the nodes whose parents were accepted as arguments of ``Acceptance.observe``, and count them in ``ranks``.

    Args:
        steps: for each step parents (B, N), accepted path (B, D) and the nodes' draft probabilities (B, N) or None.
    """
    probs, levels, hits = [], [], []
    for parents_BN, path_BD, probs_BN in steps:
        for row, (path, parents) in enumerate(zip(path_BD.tolist(), parents_BN.tolist(), strict=True)):
            accepted, depths, num_children = set(path), [0] * len(parents), [0] * len(parents)
            row_probs = None if probs_BN is None else probs_BN[row].tolist()
            for node in range(1, len(parents)):
                parent = parents[node]
                if parent < 0 or parent not in accepted:
                    continue
                depth = depths[node] = depths[parent] + 1
                ranks.observe(depth, num_children[parent], node in accepted)  # siblings are stored in order of rank
                num_children[parent] += 1
                if row_probs is not None:
                    probs.append(row_probs[node])
                    levels.append(depth)
                    hits.append(node in accepted)
    return probs, levels, hits


def _table(depth: int) -> int:
    return min(depth, NUM_DEPTHS) - 1
