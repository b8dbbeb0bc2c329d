"""What drafting and verifying take at present: what was measured beforehand, corrected by every step since."""

from __future__ import annotations

import numpy as np

from draftwing.budget.costs import Costs

__all__ = ["Clock", "Line", "Tilt"]

KEEP = 0.985  # share of what is remembered that a step leaves: the last 70 or so count
TRUST = 4.0  # drafts that each end of a measured line counts as
SPREAD = 100.0  # squares of nodes that no slope at all counts as
HICCUP = 2.0  # times what was expected: more of a step's time is not held against what it did
JUMP = 4.0  # times what was expected: no step says that the machine's speed has changed by more
SETTLED = 8  # plain steps of a run that tell how these compare with drafts; later ones tell of the machine's speed
MOST = 256  # nodes that costs are looked up for
DOUBTED = 0.1  # share by which what was learnt of plain steps fades while none are beside drafts
YOUNG = 32  # drafts up to which the latest ones count more
UNSETTLED = 2  # drafts at first that tell nothing: memory is laid out for them
STALE = 0.6, 1.7  # of what was measured: steps outside are of another machine than was measured,
PERSISTENT = 48  # where so many in a row are


class Line:
    """Seconds of drafting by levels (least squares)."""

    def __init__(self, start: float, slope: float) -> None:
        self._prior = start, slope
        self._sums = [0.0] * 5  # of 1, levels, seconds, levels ** 2, levels * seconds
        self.start, self.slope = start, slope

    @classmethod
    def of(cls, costs: Costs, width: int) -> Line:
        """As measured."""
        low, high = costs.draft_seconds(1, width), costs.draft_seconds(8, width)
        slope = max((high - low) / 7, 1e-7)
        return cls(max(low - slope, 0.0), slope)

    def observe(self, levels: float, seconds: float) -> None:
        """One draft; a single slow one says little."""
        seconds = min(seconds, 3 * self(levels))
        fresh = (1.0, levels, seconds, levels * levels, levels * seconds)
        self._sums = [KEEP * old + new for old, new in zip(self._sums, fresh, strict=True)]
        count, x, y, xx, xy = self._sums
        for at in (1.0, 8.0):  # what was measured counts as a few drafts
            value = self._prior[0] + self._prior[1] * at
            count, x, y = count + TRUST, x + TRUST * at, y + TRUST * value
            xx, xy = xx + TRUST * at * at, xy + TRUST * at * value
        slope = (count * xy - x * y) / (count * xx - x * x)
        self.slope = max(slope, 0.2 * self._prior[1])
        self.start = (y - self.slope * x) / count
        if self.start < 0:  # then through the origin
            self.start, self.slope = 0.0, max(xy / xx, 0.2 * self._prior[1])

    def __call__(self, levels: float) -> float:
        """Seconds."""
        return self.start + self.slope * levels if levels else 0.0


class Tilt:
    """How much more a node takes than was measured beforehand, in plain steps: the slope of what steps took beyond it.

    Caches that drafts have emptied, or a machine whose arithmetic is shared while its memory is not, show in it.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, nodes, excess, nodes ** 2, nodes * excess
        self.slope = 0.0

    def observe(self, nodes: int, excess: float) -> None:
        """One step: by how many plain steps its verification took longer than expected."""
        fresh = (1.0, float(nodes), excess, float(nodes * nodes), nodes * excess)
        self._sums = [KEEP * old + new for old, new in zip(self._sums, fresh, strict=True)]
        count, x, y, xx, xy = self._sums
        self.slope = (xy - x * y / count) / (xx - x * x / count + SPREAD)


class Clock:
    """Seconds of the parts of a step.

    Attributes:
        slow: how much slower than measured a verification is now.
        alone: how much slower than that in a run of plain steps.
        run: plain steps up to now.
        context: the mean number of tokens of the rows.
        num_drafts: steps with drafted nodes that were observed.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.slow = self.alone = 1.0
        self.run = 0
        self.context = 0.0
        self.num_drafts = self._num_plain = self._num_stale = 0
        self._tilt = Tilt()
        self._lines = {False: Line.of(costs, 1), True: Line.of(costs, costs.width)}  # by: is wide
        self._curves: dict[int, np.ndarray] = {}
        self.share = _share(costs)

    def observe(
        self, rows: int, nodes: int, levels: float, is_wide: bool, drafted_s: float, verified_s: float
    ) -> tuple[float, float]:
        """What a step took.

        Returns:
            Seconds of its verification, as if the machine were as fast as when it was measured, and of its draft.
            What the clock says, since trees and sampling take more than was measured beforehand; but a hiccup of the
            machine says nothing of drafts.
        """
        line, share = self._lines[is_wide], 1 + (rows - 1) * self.costs.draft_per_row
        if levels:
            line.observe(levels, drafted_s / share)
        verify = self.verify(nodes, rows) / self.slow
        measured = verified_s / verify
        self._num_stale = 0 if STALE[0] < measured < STALE[1] else self._num_stale + 1
        ratio = min(max(measured, self.slow / JUMP), self.slow * JUMP)
        self.run = self.run + 1 if nodes == 1 else 0
        if nodes > 1 and self.num_drafts < UNSETTLED:
            self.num_drafts += 1
        elif nodes > 1:
            excess = (min(ratio, HICCUP * self.slow) - self.slow) * verify * self.slow
            self._tilt.observe(nodes, excess / self.verify(1, rows))
            self.num_drafts += 1
            latest = 0.2 if self.num_drafts < YOUNG else 0.05  # early drafts grow faster as memory warms up
            self.slow += max(latest, 1 / (self.num_drafts + 1 - UNSETTLED)) * (ratio - self.slow)
        elif self.run > SETTLED:
            self.alone += DOUBTED * (1 - self.alone)
            self.slow += 0.3 * (ratio / self.alone - self.slow)
        elif self.run > 1:  # the first plain step after drafts is not yet like those of plain decoding
            self._num_plain += 1
            self.alone += max(0.1, 1 / self._num_plain) * (ratio / self.slow - self.alone)
        draft = min(drafted_s, HICCUP * line(levels or 1.0) * share) if levels or nodes > 1 else 0.0
        return min(verified_s / self.slow, HICCUP * verify), draft

    @property
    def is_stale(self) -> bool:
        """Whether steps persistently take something else than was measured."""
        return self._num_stale >= PERSISTENT

    def forget_plain(self) -> None:
        """Learn anew how plain steps compare: the first ones of all told little of it."""
        self._num_plain = 0

    def verify(self, nodes: int, rows: int) -> float:
        """T_V of trees of ``nodes`` each, the root counted."""
        beyond = (self.context * rows - self.costs.context) * self.costs.per_token  # what longer texts add
        return max(float(self._curve(rows)[min(nodes, MOST)]) + beyond, 1e-7) * self.slow

    def verify_tilted(self, nodes: int, rows: int) -> float:
        """The same with what nodes were seen to take more."""
        return self.verify(nodes, rows) + max(self._tilt.slope, 0.0) * self.verify(1, rows) * (nodes - 1)

    def verify_upto(self, count: int, rows: int) -> np.ndarray:
        """The same for 0 to ``count - 1`` nodes, but for what all have in common."""
        curve = self._curve(rows)[:count]
        if len(curve) < count:
            curve = np.pad(curve, (0, count - len(curve)), mode="edge")
        tilted = curve * self.slow + self._tilt.slope * self.verify(1, rows) * np.arange(count)
        return np.maximum.accumulate(tilted)

    def draft(self, levels: float, rows: int, *, is_wide: bool = False) -> float:
        """A draft of so many levels."""
        return self._lines[is_wide](levels) * self.costs.draft_share(rows)

    def level(self, rows: int) -> float:
        """Another level of one node."""
        return self._lines[False].slope * self.costs.draft_share(rows)

    def _curve(self, rows: int) -> np.ndarray:
        """T_V by nodes, at the context of the costs."""
        known = self._curves.get(rows)
        if known is None:
            context = self.costs.context / rows
            found = [self.costs.verify_seconds(max(nodes, 1), rows, context) for nodes in range(MOST + 1)]
            known = self._curves[rows] = np.array(found)
        return known


def _share(costs: Costs) -> float:
    """What each other node of a level takes, as a share of the first."""
    low, high = costs.draft_seconds(1), costs.draft_seconds(8)
    wide = costs.draft_seconds(8, costs.width) - costs.draft_seconds(1, costs.width)
    more = (wide / max(high - low, 1e-7) - 1) / max(costs.width - 1, 1)
    return min(max(more, 0.02), 1.0)
