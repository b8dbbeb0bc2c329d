"""What a whole draft is asked for, and what comes back: plain data between drafters and what runs them.

Shape suffixes: B rows, W entries, N nodes, F features, K knots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from draftwing.model.cache import View
from draftwing.noise import Walk
from draftwing.tree import PAD, Accepted, DraftTree

__all__ = ["Adjustments", "Ahead", "DraftRequest", "Drafted", "GrowthRule", "Verified", "Waiting"]


@dataclass(frozen=True)
class GrowthRule:
    """What a tree's nodes are worth while it grows, in seconds: see ``budget.planner``.

    A node is reached at the product of its path's chances, each corrected by a table for its level. Nodes are verified
    while they bring more than they cost, and another level is drafted below those of them that are worth its time.

    Attributes:
        knots, rates: (tables, K) float32: chances as told, and as they came true; the last table serves deeper levels.
        gains, costs: (depth,) float32, of the level after each: what reaching it is worth, what its first node takes.
        verify: (most + 3,) float32: seconds that the verification of so many nodes of each row takes, the root counted.
        worth: of a token.
        share: what each other node of a level takes, as a share of the first one's time.
    """

    knots: np.ndarray
    rates: np.ndarray
    gains: np.ndarray
    costs: np.ndarray
    verify: np.ndarray
    worth: float
    share: float

    @cached_property
    def addresses(self) -> tuple[int, int, int, int, int]:
        """Where the arrays lie, in their order."""
        knots, rates, gains = self.knots.ctypes.data, self.rates.ctypes.data, self.gains.ctypes.data
        return knots, rates, gains, self.costs.ctypes.data, self.verify.ctypes.data


@dataclass(frozen=True)
class Adjustments:
    """What is made of the logits before temperatures, as ``SamplingBatch.adjusted`` makes it of the target's.

    Attributes:
        penalties: of each row: repetition, presence, frequency; (1, 0, 0) for none.
        said: of each row its committed tokens, the prompt's first; none where nothing penalises them.
        prompt_lengths: of each row.
        biases: of each row by token; -inf for banned ones.
    """

    penalties: Sequence[tuple[float, float, float]]
    said: Sequence[Sequence[int]]
    prompt_lengths: Sequence[int]
    biases: Sequence[Mapping[int, float]]


@dataclass(frozen=True)
class DraftRequest:
    """Trees to draft, one for every row: the best children by logits / temperature + noise, level by level.

    Attributes:
        depth: levels at most.
        width: nodes that are expanded of each level, and children of each of them; 1 is a chain.
        most: nodes to keep at most, the root not counted.
        roots: of each row its token.
        wanted: of each row, whether anything is to be drafted for it.
        temperatures: of each row, 0 for greedy ones; and its filters: ``top_k``, 0 for none, ``top_p`` and ``min_p``.
        noise: the handle of a ``NativeNoise``, with the rows' seeds, -1 where none is to be added, and the absolute
            positions of the tokens after their roots.
        sharpness, miss, scale: how scores under noise become chances, and what they are multiplied by before the
            noise is added (``nets.calibration``).
        adjustments: penalties and biases; None where no row has any.
        rule: what the nodes are worth; None expands ``width`` nodes of every level and keeps the ``most`` likely.
    """

    depth: int
    width: int
    most: int
    roots: Sequence[int]
    wanted: Sequence[bool]
    temperatures: Sequence[float]
    top_k: Sequence[int]
    top_p: Sequence[float]
    min_p: Sequence[float]
    noise: int
    seeds: Sequence[int]
    starts: Sequence[int]
    sharpness: float = 1.0
    miss: float = 0.0
    scale: float = 1.0
    adjustments: Adjustments | None = None
    rule: GrowthRule | None = None


@dataclass(frozen=True)
class Waiting:
    """What every row reads before its draft: entries of its own, the last of which is the root of its tree.

    Attributes:
        tokens: of each row, as many as it has entries.
        lengths: entries of each row that lie in its slots already.
        roots: slots of each row before that of its root.
        features: (B, at least W, F) of the same entries, W the most of them; None where tokens are all.
        view: the slots that are looked at, of the ``lengths`` that there are; None for all.
        prompt_lengths: of the rows, for rotations that depend on them.
    """

    tokens: Sequence[Sequence[int]]
    lengths: Sequence[int]
    roots: Sequence[int]
    features: Tensor | None = None
    view: View | None = None
    prompt_lengths: Sequence[int] | None = None

    @property
    def num_entries(self) -> int:
        """W."""
        return max(map(len, self.tokens))


@dataclass(frozen=True)
class Drafted:
    """Finished trees.

    Attributes:
        tree: of all rows.
        places: (B, N) int64, where a node stands among those that were run, whose slots follow each other after the
            root's; -1 for leaves that were not. None: each at its own number.
        num_levels: that were run below the root.
        states: (B, at most N, H) of a chain, what a net that reads tokens alone gave out for the nodes that were run;
            None where it gives nothing out, or nobody kept it.
    """

    tree: DraftTree
    places: Tensor | None = None
    num_levels: int = 0
    states: Tensor | None = None

    def slots_of(self, path: Tensor) -> Tensor:
        """``places`` of the nodes of a path (B, D); PAD where they have none."""
        if self.places is None:
            return path
        return self.places.gather(1, path.clamp(min=0)).masked_fill(path == PAD, PAD)


@dataclass(frozen=True)
class Ahead:
    """What verifies trees in the same call that drafts them.

    Attributes:
        runner: the target's, for whoever knows its kind; it is told what came of it (``Runner.verified``).
        lengths: slots of each row before its tree.
        walk: how tokens are drawn.
    """

    runner: object
    lengths: Sequence[int]
    walk: Walk


@dataclass(frozen=True)
class Verified:
    """What came of trees that were verified in the call that drafted them.

    Attributes:
        tree: these trees.
        logits, out: (B, N, V) and (B, N, F) or None: see ``Runner.forward``; ``out`` of the kept nodes, in their order.
        accepted: what is kept, and lies in its slots.
        seconds: that the verification took, of the call's.
    """

    tree: DraftTree
    logits: Tensor
    out: Tensor | None
    accepted: Accepted
    seconds: float
