"""The cost of a step, as functions of nodes, depth, rows and context: measured, or typical and corrected by steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, combinations, pairwise

from draftwing.budget import CONFIG


@dataclass(frozen=True)
class Curve:
    """A non-decreasing piecewise linear function through ``knots`` (count, seconds), in order of count.

    It is flat below the first knot and continues the last segment beyond the last one.
    """

    knots: tuple[tuple[float, float], ...]

    def __call__(self, count: float) -> float:
        """Return the seconds for a count."""
        knots = self.knots
        if not knots or count <= knots[0][0]:
            return knots[0][1] if knots else 0.0
        for (left, low), (right, high) in pairwise(knots):
            if count <= right or right == knots[-1][0]:
                return low + (high - low) * (count - left) / (right - left)
        return knots[-1][1]

    @classmethod
    def fit(cls, samples: Mapping[int, Sequence[float]]) -> Curve:
        """Fit the nearest non-decreasing curve (isotonic regression): more nodes never take less time."""
        counts = sorted(samples)
        return cls(tuple(zip(counts, isotonic([_quiet(samples[count]) for count in counts]), strict=True)))

    @classmethod
    def fit_concave(cls, samples: Mapping[int, Sequence[float]]) -> Curve:
        """Fit the nearest non-decreasing concave curve: later levels of a draft find warmer caches."""
        knots = cls.fit(samples).knots
        widths = [right - left for (left, _), (right, _) in pairwise(knots)]
        slopes = [(high - low) / (right - left) for (left, low), (right, high) in pairwise(knots)]
        falling = [-slope for slope in isotonic([-slope for slope in slopes], widths)]
        rises = accumulate((slope * width for slope, width in zip(falling, widths, strict=True)), initial=0.0)
        points = [(count, seconds, rise) for (count, seconds), rise in zip(knots, rises, strict=False)]
        start = statistics.fmean([seconds - rise for _, seconds, rise in points] or [0.0])
        return cls(tuple((count, max(start + rise, 0.0)) for count, _, rise in points))

    @classmethod
    def fit_line(cls, samples: Mapping[int, Sequence[float]]) -> Curve:
        """Fit a non-decreasing straight line with the median of all pairs' slopes (Theil-Sen)."""
        points = [(count, _quiet(samples[count])) for count in sorted(samples)]
        slopes = [(high - low) / (right - left) for (left, low), (right, high) in combinations(points, 2)]
        slope = max(statistics.median(slopes or [0.0]), 0.0)
        start = statistics.median([seconds - slope * count for count, seconds in points] or [0.0])
        return cls(tuple((count, max(start + slope * count, 0.0)) for count, _ in points))


def isotonic(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Return the nearest non-decreasing sequence (isotonic regression by pooling adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, number of values
    for mean, weight in zip(values, weights or [1.0] * len(values), strict=True):
        count = 1
        while blocks and blocks[-1][0] > mean:
            left_mean, left_weight, left_count = blocks.pop()
            mean = (mean * weight + left_mean * left_weight) / (weight + left_weight)
            weight, count = weight + left_weight, count + left_count
        blocks.append((mean, weight, count))
    return [mean for mean, _, count in blocks for _ in range(count)]


def _quiet(values: Sequence[float]) -> float:
    """Return the median of the faster half: other processes only ever add to a time."""
    ordered = sorted(values)
    return statistics.median(ordered[: (len(ordered) + 1) // 2])


@dataclass(frozen=True)
class Costs:
    """Measured seconds of the parts of a step, for one target, drafter, dtype, device and number of threads.

    Attributes:
        verify: T_V by nodes per forward (roots included, all rows together), at ``context`` tokens of one row.
        chain, tree: drafting time of one row by depth, for chains and for trees of ``width``.
        width: children per node of the measured trees; 1 if the drafter only drafts chains.
        per_token: verification time per committed token of a row.
        per_token_of: the same by nodes of the row's tree.
        per_row: verification time per further row.
        draft_per_row: drafting time per further row, as a share of one row's.
        context: tokens of the row with which the curves were measured.
    """

    verify: Curve
    chain: Curve = field(default_factory=lambda: Curve(()))
    tree: Curve = field(default_factory=lambda: Curve(()))
    width: int = 1
    per_token: float = 0.0
    per_token_of: Curve = field(default_factory=lambda: Curve(()))
    per_row: float = 0.0
    draft_per_row: float = 0.0
    context: int = 0

    def verify_seconds(self, nodes: int, rows: int = 1, context: float | None = None) -> float:
        """T_V of ``rows`` trees of ``nodes`` each, roots included; ``context`` is the rows' mean length."""
        tokens = 0.0 if context is None else context * rows - self.context
        return max(self.verify(nodes * rows) + (rows - 1) * self.per_row + tokens * self.token_seconds(nodes), 1e-7)

    def token_seconds(self, nodes: int) -> float:
        """Verification time per committed token of a row, for a tree of ``nodes``."""
        return self.per_token_of(nodes) if self.per_token_of.knots else self.per_token

    @property
    def of_target(self) -> Costs:
        """These costs without the drafter's."""
        return replace(self, chain=Curve(()), tree=Curve(()), width=1, draft_per_row=0.0)

    def draft_seconds(self, depth: float, width: int = 1, rows: int = 1) -> float:
        """Drafting time of trees of ``depth`` levels; 0 for depth 0."""
        if depth <= 0:
            return 0.0
        curve = self.chain if width == 1 or not self.tree.knots else self.tree
        return curve(depth) * (1 + (rows - 1) * self.draft_per_row)

    @property
    def node_share(self) -> float:
        """The cost of each further node of a level, as a share of the level's first node."""
        wide = self.draft_seconds(8, self.width) / max(self.draft_seconds(8), 1e-7)
        return min(max((wide - 1) / max(self.width - 1, 1), 0.02), 1.0)

    @property
    def level_seconds(self) -> float:
        """Seconds of one more level of a chain."""
        knots = self.chain.knots
        if len(knots) < 2:
            return self.chain(1)
        (first, low), (last, high) = knots[0], knots[-1]
        return max(high - low, 0.0) / (last - first)


# Shares of a baseline step, from SmolLM2-135M in int8 with an EAGLE-3 head (two cores, AVX2).
TYPICAL = Costs(
    verify=Curve(((1, 1.0), (4, 1.25), (8, 1.6), (16, 2.8), (64, 10.0))),
    chain=Curve(((1, 0.15), (8, 0.5))),
    tree=Curve(((1, 0.2), (8, 1.0))),
    width=4,
    draft_per_row=0.15,
)

# The same for 7 billion weights in bfloat16 with an EAGLE-3 head (H200): nodes are nearly free up to 64 of all rows.
TYPICAL_GPU = Costs(
    verify=Curve(((1, 1.0), (16, 1.08), (64, 1.35), (256, 2.1), (1024, 6.3))),
    chain=Curve(((1, 0.07), (8, 0.45))),
    tree=Curve(((1, 0.08), (8, 0.55))),
    width=4,
    per_row=0.008,
    draft_per_row=0.03,
)


class Correction:
    """Corrects predicted costs by observed ones, by ridge regression: ``observed = start + scale * predicted``.

    Costs are shares of a baseline step. Predictions are believed at first; observations count less with every later
    one.
    """

    def __init__(self) -> None:
        self._n = self._x = self._xx = self._r = self._xr = 0.0  # decayed sums over predictions x and their errors r
        self._start, self._scale = 0.0, 1.0

    def add(self, predicted: float, observed: float) -> None:
        """Learn from a step."""
        observed = min(observed, CONFIG.max_surprise * (1 + self(predicted)) - 1)  # other processes interrupt some
        keep, error = CONFIG.decay, observed - predicted
        self._n, self._x, self._xx = keep * self._n + 1, keep * self._x + predicted, keep * self._xx + predicted**2
        self._r, self._xr = keep * self._r + error, keep * self._xr + predicted * error
        n, xx = self._n + CONFIG.prior_weight, self._xx + CONFIG.scale_prior
        divisor = n * xx - self._x**2
        self._start = (xx * self._r - self._x * self._xr) / divisor
        self._scale = max(1 + (n * self._xr - self._x * self._r) / divisor, 0.0)

    def __call__(self, predicted: float) -> float:
        """Return the corrected cost."""
        return max(self._start + self._scale * predicted, 0.0)


class LearnedCosts:
    """Costs of steps with one number of rows: typical ones, corrected by every observed step.

    Args:
        typical: only its ratios to a baseline step count.
        rows: in the batch.

    Attributes:
        baseline: seconds of a baseline step.
    """

    def __init__(self, typical: Costs, rows: int) -> None:
        self._typical = typical
        self.baseline = baseline = typical.verify_seconds(1, rows)
        self._verify, self._draft = Correction(), Correction()
        # As shares of a baseline step, beyond it for a verification. All are needed again whenever the planner learns.
        self._typical_verify = cache(lambda nodes: typical.verify_seconds(nodes, rows) / baseline - 1)
        self._typical_draft = cache(lambda depth, width: typical.draft_seconds(depth, width, rows) / baseline)

    def observe(self, nodes: int, levels: float, seconds: float, draft_seconds: float) -> None:
        """Learn from a step that drafted, and verified ``nodes`` of each row, the root included.

        Args:
            nodes: of each row's tree.
            levels: drafting forwards.
            seconds: duration of the step.
            draft_seconds: the part of it that the drafter took.
        """
        self._draft.add(self._typical_draft(levels, 1), draft_seconds / self.baseline)
        self._verify.add(self._typical_verify(nodes), (seconds - draft_seconds) / self.baseline - 1)

    def verify_seconds(self, nodes: int) -> float:
        """Duration of a step with ``nodes`` of each row, the root included, without its draft."""
        return self.baseline * (1 + self._verify(self._typical_verify(nodes)) if nodes > 1 else 1)

    def draft_seconds(self, depth: float, width: int = 1) -> float:
        """Drafting time of trees of ``depth`` levels; 0 for depth 0."""
        return self.baseline * self._draft(self._typical_draft(depth, width)) if depth else 0.0

    @property
    def knots(self) -> Costs:
        """The costs at the sizes that ``measure`` measures."""
        typical = self._typical
        chain = CONFIG.depths if typical.chain.knots else ()
        tree = CONFIG.depths if typical.tree.knots else ()
        return Costs(
            Curve(tuple((nodes, self.verify_seconds(nodes)) for nodes in CONFIG.nodes)),
            Curve(tuple((depth, self.draft_seconds(depth)) for depth in chain)),
            Curve(tuple((depth, self.draft_seconds(depth, typical.width)) for depth in tree)),
            typical.width,
        )
