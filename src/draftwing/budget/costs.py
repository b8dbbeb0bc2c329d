"""The cost of a step on this machine, measured by ``budget.measure``: functions of nodes, depth, rows and context."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, combinations, pairwise
from typing import Any

from draftwing.errors import ConfigError

CURVES = ("verify", "chain", "tree", "per_token_of")  # attributes of ``Costs``


_MOST = 1e9  # far above any count and any number of seconds


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

    def times(self, factor: float) -> Curve:
        """Return the curve with all seconds multiplied by ``factor``."""
        return Curve(tuple((count, seconds * factor) for count, seconds in self.knots))

    @classmethod
    def fit(cls, samples: Mapping[float, Sequence[float]]) -> Curve:
        """Fit the nearest non-decreasing curve (isotonic regression): more nodes never take less time."""
        counts = sorted(samples)
        return cls(tuple(zip(counts, isotonic([_quiet(samples[count]) for count in counts]), strict=True)))

    @classmethod
    def fit_concave(cls, samples: Mapping[float, Sequence[float]]) -> Curve:
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
    def fit_line(cls, samples: Mapping[float, Sequence[float]]) -> Curve:
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
        busy: share of the measured sizes that were only measured while other processes held the processors.
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
    busy: float = 0.0

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

    def at_pace(self, pace: float) -> Costs:
        """Return the target's costs on a machine ``pace`` times as slow."""
        return replace(
            self.of_target,
            verify=self.verify.times(pace),
            per_token=self.per_token * pace,
            per_token_of=self.per_token_of.times(pace),
            per_row=self.per_row * pace,
        )

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

    def describe(self) -> str:
        """Return the main costs as text."""
        parts = [f"a forward {self.verify(1) * 1e3:.1f} ms, of 16 nodes {self.verify(16) * 1e3:.1f} ms"]
        if self.chain.knots:
            parts.append(f"a draft of 4 tokens {self.chain(4) * 1e3:.1f} ms")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the costs as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Costs:
        """Read what ``to_dict`` returned.

        Raises:
            ConfigError: the values are not measured costs.
        """
        try:
            parts: dict[str, Any] = {
                name: float(values[name]) for name in cls.__dataclass_fields__ if name not in CURVES
            }
            for name in CURVES:
                parts[name] = Curve(tuple((float(count), float(seconds)) for count, seconds in values[name]["knots"]))
            if not parts["verify"].knots:
                raise ValueError("verify has no knots")
            if not all(_is_curve(parts[name]) for name in CURVES) or parts["verify"](1) <= 0:
                raise ValueError("counts must rise, and seconds must not fall")
            parts |= {name: int(values[name]) for name in ("width", "context")}
            numbers = [value for name, value in parts.items() if name not in CURVES]
            if not all(0 <= number < _MOST for number in numbers) or parts["width"] < 1:
                raise ValueError("numbers must be finite, and at least 0")
            return cls(**parts)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"invalid measured costs ({error!r}): measure again") from error


def _is_curve(curve: Curve) -> bool:
    """Return True if a curve could have been measured: positive counts in order, finite seconds that do not fall."""
    numbers = [number for knot in curve.knots for number in knot]
    rises = all(left < right and low <= high for (left, low), (right, high) in pairwise(curve.knots))
    return rises and all(0 <= number < _MOST for number in numbers)
