"""How often drafted tokens are accepted: by the chance that the drafter gives, by depth, and by rank among siblings."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from torch import Tensor

from draftwing.budget.costs import pooled

NUM_DEPTHS = 4  # depths told apart, the last one with all beyond
EDGES = [0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995]  # bins of a chance
PRIOR = 3.0  # observations that what is believed beforehand counts as
FORGET = 0.998  # decay of a bin per observation
NUM_RANKS = 4  # siblings told apart
LATEST = 0.03  # weight of the latest observation of a rank, after many


class Acceptance:
    """How often tokens with such a chance were accepted, given their parents: binned, by depth, decayed, never falling.

    Bins of one depth are pooled where they fall (isotonic regression), so that a greater chance never counts less.
    Until a depth has been seen often enough, it is believed to be as the one above: deep nodes are rarely reached.
    """

    def __init__(self) -> None:
        middles = [(low + high) / 2 for low, high in pairwise([0.0, *EDGES, 1.0])]
        # Sums over a bin: nodes, their chances, and how many were accepted; all begin at what the drafter says. Lists,
        # since a handful is seen at a time, between forwards that leave none of NumPy's code in the caches.
        self._prior = [[PRIOR] * len(middles), *([PRIOR * each for each in middles] for _ in range(2))]
        self._sums = [[list(kind) for kind in self._prior] for _ in range(NUM_DEPTHS)]
        self._lines: list[tuple[list[float], list[float]] | None] = [None] * NUM_DEPTHS

    def observe(self, chances: Iterable[float], depths: Iterable[int], accepted: Iterable[bool]) -> None:
        """Nodes whose parents were accepted: (K,) the drafter's chance of each, depth from 1, and whether it was."""
        nodes = zip(chances, depths, accepted, strict=True)
        known = [(chance, min(depth, NUM_DEPTHS) - 1, hit) for chance, depth, hit in nodes if math.isfinite(chance)]
        if not known:
            return
        kept = FORGET ** len(known)
        for place in {place for _, place, _ in known}:
            for sums, priors in zip(self._sums[place], self._prior, strict=True):
                sums[:] = [prior + kept * (own - prior) for own, prior in zip(sums, priors, strict=True)]
        for chance, place, hit in known:
            at, (seen, chances, hits) = bisect_left(EDGES, chance), self._sums[place]
            seen[at] += 1
            chances[at] += chance
            hits[at] += hit
        self._lines = [None] * NUM_DEPTHS

    def __call__(self, chances: np.ndarray, depth: int) -> np.ndarray:
        """The chance at which such nodes of this depth were accepted, of any shape."""
        found: np.ndarray = np.interp(chances, *self._line(min(depth, NUM_DEPTHS) - 1))
        return found

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Knots and rates of a ``GrowthRule``: (NUM_DEPTHS, bins) float32 each."""
        lines = [self._line(place) for place in range(NUM_DEPTHS)]
        knots, rates = (np.array([line[part] for line in lines], dtype=np.float32) for part in (0, 1))
        return knots, rates

    def _line(self, place: int) -> tuple[list[float], list[float]]:
        """The mean chance and the acceptance rate of nodes of depth ``place + 1``, (bins,) each."""
        known = self._lines[place]
        if known is not None:
            return known
        seen, chances, hits = self._sums[place]
        if place:
            above = self._line(place - 1)[1]
            hits = [own - prior + PRIOR * rate for own, prior, rate in zip(hits, self._prior[2], above, strict=True)]
        rates = pooled([hit / count for hit, count in zip(hits, seen, strict=True)], seen)
        means = [chance / count for chance, count in zip(chances, seen, strict=True)]
        line = self._lines[place] = means, rates
        return line


class Ranks:
    """How often the first, second, ... child of an accepted node was accepted, by depth: what blind shapes go by."""

    def __init__(self) -> None:
        first = [0.7, 0.1, 0.05, 0.03]  # believed beforehand
        self._rates = [list(first) for _ in range(NUM_DEPTHS)]
        self._seen = [[0] * NUM_RANKS for _ in range(NUM_DEPTHS)]

    def observe(self, depth: int, rank: int, accepted: bool) -> None:
        """One node whose parent was accepted; depth from 1, rank from 0."""
        if rank >= NUM_RANKS:
            return
        place = min(depth, NUM_DEPTHS) - 1
        self._seen[place][rank] += 1
        weight = max(LATEST, 1 / (self._seen[place][rank] + PRIOR))
        self._rates[place][rank] += weight * (accepted - self._rates[place][rank])

    def rate(self, depth: int, rank: int = 0) -> float:
        """The chance of such a child; depth from 1."""
        return self._rates[min(depth, NUM_DEPTHS) - 1][rank]

    def likeliest(self, depth: int, width: int) -> Iterator[tuple[tuple[int, ...], float]]:
        """Paths of ranks with the chance of each, the likeliest first and parents before their children (Sequoia)."""
        waiting: list[tuple[float, tuple[int, ...]]] = []
        waiting += [(-self.rate(1, rank), (rank,)) for rank in range(min(width, NUM_RANKS))]
        heapq.heapify(waiting)
        while waiting:
            value, path = heapq.heappop(waiting)
            yield path, -value
            if len(path) < depth:
                for rank in range(min(width, NUM_RANKS)):
                    heapq.heappush(waiting, (value * self.rate(len(path) + 1, rank), (*path, rank)))


def judged(
    steps: Sequence[tuple[Tensor, Tensor, Tensor | None]], ranks: Ranks
) -> tuple[list[float], list[int], list[bool]]:
    """The nodes whose parents were accepted, as ``Acceptance.observe`` reads them, (K,) each. ``ranks`` observes them.

    Args:
        steps: parents (B, N), accepted path (B, D) and what was said of the nodes (B, N) or None, of each step.
    """
    said, at, right = [], [], []
    for parents_BN, path_BD, told_BN in steps:
        told = None if told_BN is None else told_BN.tolist()
        for row, (path, parents) in enumerate(zip(path_BD.tolist(), parents_BN.tolist(), strict=True)):
            kept, depths, children = set(path), [0] * len(parents), [0] * len(parents)
            for node in range(1, len(parents)):
                above = parents[node]
                if above < 0 or above not in kept:
                    continue
                depth = depths[node] = depths[above] + 1
                ranks.observe(depth, children[above], node in kept)  # siblings stand in order
                children[above] += 1
                if told is not None:
                    said.append(told[row][node])
                    at.append(depth)
                    right.append(node in kept)
    return said, at, right
