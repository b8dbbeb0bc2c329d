"""What a step takes on this machine, as measured (how: ``budget.measure``), and what follows for speculation.

Shape of all of it: T_V(n), a target forward over n nodes, and a drafter's time by depth.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, pairwise
from typing import Any

from draftwing.budget.formulas import expected_tokens
from draftwing.errors import ConfigError

__all__ = ["ROWS", "Costs", "Curve", "inflection_length", "pooled"]

ROWS = 4  # at once, with which it is measured what further rows take


@dataclass(frozen=True)
class Curve:
    """A rising piecewise linear function of a count, through ``knots`` (count, seconds) in order of their counts.

    Below the first knot it is flat, behind the last one it goes on as between the last two.
    """

    knots: tuple[tuple[float, float], ...]

    def __call__(self, count: float) -> float:
        """Seconds."""
        knots = self.knots
        if not knots or count <= knots[0][0]:
            return knots[0][1] if knots else 0.0
        for (left, low), (right, high) in pairwise(knots):
            if count <= right or right == knots[-1][0]:
                return low + (high - low) * (count - left) / (right - left)
        return knots[-1][1]

    def times(self, factor: float) -> Curve:
        """Every second so many."""
        return Curve(tuple((count, seconds * factor) for count, seconds in self.knots))

    @classmethod
    def line(cls, samples: Mapping[float, Sequence[float]]) -> Curve:
        """A straight one through the same: start and slope by the median of all pairs' slopes (Theil and Sen)."""
        points = [(count, _quiet(samples[count])) for count in sorted(samples)]
        if len(points) < 2:
            return cls(tuple(points))
        slopes = [(high - low) / (right - left) for (left, low), (right, high) in combinations(points, 2)]
        slope = max(statistics.median(slopes), 0.0)
        start = statistics.median([seconds - slope * count for count, seconds in points])
        return cls(tuple((count, max(start + slope * count, 0.0)) for count, _ in points))

    @classmethod
    def bent(cls, samples: Mapping[float, Sequence[float]]) -> Curve:
        """The nearest one through the same that rises less and less: what follows finds the caches warmer."""
        fitted = cls.fit(samples).knots
        if not fitted:
            return cls(())
        widths = [right - left for (left, _), (right, _) in pairwise(fitted)]
        slopes = [(high - low) / (right - left) for (left, low), (right, high) in pairwise(fitted)]
        values = [0.0]
        for slope, width in zip(pooled([-slope for slope in slopes], widths), widths, strict=True):
            values.append(values[-1] - slope * width)
        start = statistics.fmean([own - value for (_, own), value in zip(fitted, values, strict=True)])
        return cls(tuple((count, max(start + value, 0.0)) for (count, _), value in zip(fitted, values, strict=True)))

    @classmethod
    def fit(cls, samples: Mapping[float, Sequence[float]]) -> Curve:
        """Through the medians of ``samples``; where these fall, through the mean of those out of order.

        That is isotonic regression by pooling adjacent violators: more nodes never take less time, whatever a noisy
        clock says. Medians of the faster half: what else runs on a machine only ever adds to a time.
        """
        counts = sorted(samples)
        means = pooled([_quiet(samples[count]) for count in counts], [1.0] * len(counts))
        return cls(tuple(zip(counts, means, strict=True)))


def pooled(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest never falling sequence (isotonic regression): those out of order become their weighted mean."""
    blocks: list[tuple[float, float, int]] = []  # (mean, weight, how many)
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            above, others, more = blocks.pop()
            mean = (mean * total + above * others) / (total + others)
            total, count = total + others, count + more
        blocks.append((mean, total, count))
    return [mean for mean, _, count in blocks for _ in range(count)]


def _quiet(values: Sequence[float]) -> float:
    """The median of the faster half."""
    ordered = sorted(values)
    return statistics.median(ordered[: (len(ordered) + 1) // 2])


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a step, as measured for one target, drafter, dtype, device and number of threads.

    Attributes:
        verify: T_V by nodes in one forward (roots counted, all rows together), at ``context`` tokens of one row: the
            target's forward and everything after it.
        chain, tree: a drafter's time for one row by depth, for a chain, and for a tree of ``width``.
        width: of the trees measured; 1 where a drafter grows chains alone.
        per_token: of each committed token of each row; ``per_token_of``: the same by nodes of that row's tree, where
            known. Keys and values are read once for all nodes, but each node multiplies with them.
        per_row: verification of each row beside the first; ``draft_per_row`` as a share of the draft for one row.
        context: tokens at which the curves were measured.
        busy: the share of all that was measured only while other work had the processors.
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
        """T_V of ``rows`` trees of ``nodes`` each, the root counted; ``context`` is the mean of the rows'."""
        beyond = 0.0 if context is None else (context * rows - self.context) * self.token_seconds(nodes)
        return max(self.verify(nodes * rows) + (rows - 1) * self.per_row + beyond, 1e-7)

    def token_seconds(self, nodes: int) -> float:
        """What each committed token of a row adds to the verification of so many nodes of that row."""
        return self.per_token_of(nodes) if self.per_token_of.knots else self.per_token

    @property
    def of_target(self) -> Costs:
        """Without the drafter's."""
        return replace(self, chain=Curve(()), tree=Curve(()), width=1, draft_per_row=0.0)

    def at_pace(self, pace: float) -> Costs:
        """The target's, on a machine that takes so many times as long."""
        return replace(
            self.of_target,
            verify=self.verify.times(pace),
            per_token=self.per_token * pace,
            per_token_of=self.per_token_of.times(pace),
            per_row=self.per_row * pace,
        )

    def draft_seconds(self, depth: int, width: int = 1, rows: int = 1) -> float:
        """A drafter's time for trees of so many levels; 0 for depth 0."""
        if depth <= 0:
            return 0.0
        curve = self.chain if width == 1 or not self.tree.knots else self.tree
        return curve(depth) * self.draft_share(rows)

    def draft_share(self, rows: int) -> float:
        """A draft for so many rows, in drafts for one."""
        return 1 + (rows - 1) * self.draft_per_row

    @property
    def c(self) -> float:
        """T_D / T_T: a level of a chain against a plain step."""
        knots = self.chain.knots
        if len(knots) < 2:
            return self.chain(1) / self.verify(1)
        (first, low), (last, high) = knots[0], knots[-1]
        return max(high - low, 0.0) / (last - first) / self.verify(1)

    def speedup(self, alpha: float, gamma: int, rows: int = 1, context: float | None = None) -> float:
        """Chains of ``gamma`` against plain decoding with the measured times (MagicDec's form, 2408.11049)."""
        spent = self.draft_seconds(gamma, 1, rows) + self.verify_seconds(gamma + 1, rows, context)
        return expected_tokens(alpha, gamma) * self.verify_seconds(1, rows, context) / spent

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Costs:
        """What ``to_dict`` gave.

        Raises:
            ConfigError: something else.
        """
        try:
            curves = {
                name: Curve(tuple((float(count), float(seconds)) for count, seconds in values[name]["knots"]))
                for name in ("verify", "chain", "tree", "per_token_of")
            }
            if not curves["verify"].knots:
                raise ValueError("verify has no knots")
            whole = {name: int(values[name]) for name in ("width", "context")}
            numbers = {name: float(values[name]) for name in ("per_token", "per_row", "draft_per_row", "busy")}
            return cls(**curves, **whole, **numbers)  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"these are no measured costs ({error!r}): measure again") from error


def inflection_length(costs: Costs, alpha: float, gamma: int, rows: int = 1, *, view: int | None = None) -> float:
    """Tokens of context from which chains of ``gamma`` gain (MagicDec 2408.11049, section 3).

    With longer texts the KV slots, read once for all nodes, outweigh the rest, and T_V / T_T falls towards 1.

    Args:
        view: of a target that drafts for itself through so many slots: a draft step is then a plain step of a text of
            that length, and need not have been measured. None: as measured.

    Returns:
        0 where they gain from the start, infinity where they never do.
    """
    tokens = expected_tokens(alpha, gamma)
    draft = costs.draft_seconds(gamma, 1, rows) if view is None else gamma * costs.verify_seconds(1, rows, view)
    missing = draft + costs.verify_seconds(gamma + 1, rows, 0) - tokens * costs.verify_seconds(1, rows, 0)
    if missing <= 0 and view is None:
        return 0.0
    gained = (tokens * costs.token_seconds(1) - costs.token_seconds(gamma + 1)) * rows
    found = missing / gained if gained > 0 else math.inf
    return found if view is None else max(found, float(view))
