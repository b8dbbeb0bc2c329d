"""What drafting and verifying take at present: what was measured beforehand, corrected by every step since."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from draftwing.budget.costs import ROWS, Costs

__all__ = ["HICCUP", "JUMP", "LOOKS", "SETTLED", "Clock", "Line", "Tilt"]

KEEP = 0.985  # share of what is remembered that a step leaves: the last 70 or so count
TRUST = 2.0  # drafts that each end of a measured line counts as
SPREAD = 30.0  # squares of nodes that no slope at all counts as
HICCUP = 2.0  # times what was expected: more of a step's time is not held against what it did
JUMP = 4.0  # times what was expected: no step says that the machine's speed has changed by more
SETTLED = 8  # plain steps of a run that tell how these compare with drafts; later ones tell of the machine's speed
COMPARED = 16  # drafts after plain steps that tell the same
TOLD, ASTRAY = 3, 1.15  # comparisons of the two that count; times what they told so far, from which one is in doubt
LOOKS, LEAP = 4, 1.25  # steps in a row that say, by their median, that the machine's speed has changed by so much
MOST = 256  # nodes that costs are looked up for
EVEN, LEVELS = 8, 16  # levels that are as many even ones; levels that are known each by itself
FAR = 4.0  # the other end of a measured line: farther off it would weigh more than all drafts that differ by a level
YOUNG = 32  # drafts up to which the latest ones count more
PAUSES, PAUSE = 9, 0.1  # the latest ones between two steps, which count; of a plain step, that they can be
UNSETTLED = 2  # drafts at first that tell nothing: memory is laid out for them
ALONE = 0.4, 1.25  # how much slower than drafts' verifications plain steps can be, each against what was measured
STALE = 0.6, 1.7  # of what was measured: steps outside are of another machine than was measured,
PERSISTENT = 48  # where so many in a row are


class Line:
    """Seconds of drafting by levels (least squares).

    ``counts``: of 0, 1, 2 ... levels, as how many even ones they count: as measured, the first ones take longer.
    """

    def __init__(self, start: float, slope: float, counts: Sequence[float] = (0.0, 1.0)) -> None:
        self._prior, self._counts = (start, slope), counts
        self._sums = [0.0] * 5  # of 1, levels, seconds, levels ** 2, levels * seconds
        self.start, self.slope = start, slope

    @classmethod
    def of(cls, costs: Costs, width: int) -> Line:
        """As measured."""
        low, high = costs.draft_seconds(1, width), costs.draft_seconds(EVEN, width)
        slope = max((high - low) / (EVEN - 1), 1e-7)
        counts = [1 + (costs.draft_seconds(level, width) - low) / slope for level in range(1, LEVELS + 1)]
        return cls(max(low - slope, 0.0), slope, [0.0, *counts] if high > low else (0.0, 1.0))

    def observe(self, levels: float, seconds: float) -> None:
        """One draft; a single slow one says little."""
        seconds, levels = min(seconds, HICCUP * self(levels)), self._even(levels)
        fresh = (1.0, levels, seconds, levels * levels, levels * seconds)
        self._sums = [KEEP * old + new for old, new in zip(self._sums, fresh, strict=True)]
        count, x, y, xx, xy = self._sums
        for at in (1.0, FAR):  # what was measured counts as a few drafts
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
        return self.start + self.slope * self._even(levels) if levels else 0.0

    def steps(self, count: int) -> list[float]:
        """Seconds of the second level, the third ... so many."""
        even = [self._even(level) for level in range(1, count + 2)]
        return [self.slope * (after - before) for before, after in pairwise(even)]

    def _even(self, levels: float) -> float:
        counts, below = self._counts, min(int(levels), len(self._counts) - 2)
        return counts[below] + (levels - below) * (counts[below + 1] - counts[below])


class Tilt:
    """How much more a node takes than was measured beforehand, in plain steps: the slope of what steps took beyond it.

    Caches that drafts have emptied, or a machine whose arithmetic is shared while its memory is not, show in it.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, nodes, excess, nodes ** 2, nodes * excess
        self.slope = self._mean = 0.0

    def observe(self, nodes: int, excess: float) -> None:
        """One step: by how many plain steps its verification took longer than expected."""
        fresh = (1.0, float(nodes), excess, float(nodes * nodes), nodes * excess)
        self._sums = [KEEP * old + new for old, new in zip(self._sums, fresh, strict=True)]
        count, x, y, xx, xy = self._sums
        self.slope, self._mean = (xy - x * y / count) / (xx - x * x / count + SPREAD), x / count

    def __call__(self, nodes: int) -> float:
        """Plain steps that so many nodes take beyond what is expected of all, which holds for their mean."""
        return self.slope * (nodes - self._mean)


class Clock:
    """Seconds of the parts of a step.

    Steps that verify drafts and runs of plain steps have a pace each, since what stays in the caches between them
    differs. How the two compare, a few plain steps among drafts tell now and then, and the machine may stumble in just
    these: the median of what the latest of them told counts. While only one kind is seen the other is taken to speed up
    and slow down with it, as the machine does.

    Attributes:
        slow: how much slower than measured a draft's verification is now.
        plain: the same of a run of plain steps; ``alone``: of what it is of a draft's.
        run: plain steps up to now.
        context: the mean number of tokens of the rows.
        rest: seconds of a step, of whatever kind, for what is neither drafting nor verifying.
        num_drafts: steps with drafted nodes that were observed.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.slow = self.plain = self.alone = 1.0
        self.run = 0
        self.context = self.rest = 0.0
        self._ended_at, self._pauses = 0.0, deque[float](maxlen=PAUSES)
        self.num_drafts = self._num_stale = 0
        self._num_since = COMPARED  # drafts since plain steps were seen
        self._is_old = False  # whether these were many when the plain steps of now began
        self._plains: list[float] = []  # how slow each of the plain steps was by which the two were compared last
        self._told: deque[float] = deque(maxlen=TOLD)  # what such comparisons told of ``alone``; the latest one counts
        # only once the drafts after it were seen
        self._latest: deque[float] = deque(maxlen=LOOKS)  # how slow the latest steps of one kind were
        self._tilt = Tilt()
        self._lines = {False: Line.of(costs, 1), True: Line.of(costs, costs.width)}  # by: is wide
        self._curves: dict[int, np.ndarray] = {}
        self.share = _share(costs)

    def observe(
        self, rows: int, nodes: int, levels: float, is_wide: bool, drafted_s: float, verified_s: float
    ) -> tuple[float, float]:
        """What a step took.

        Returns:
            What it took, in plain steps: what the clock says, since trees and sampling take more than was measured
            beforehand, but a hiccup of the machine says nothing of drafts. And what a plain step took of what it was
            believed to take in the drafts before, where it was not seen for long; else 1.
        """
        line, share = self._lines[is_wide], 1 + (rows - 1) * self.costs.draft_per_row
        usual = line(levels or 1.0) * share * self.slow
        if levels:
            line.observe(levels, drafted_s / share / self.slow)
        verify = self.verify(nodes, rows) / self.slow
        measured = verified_s / verify
        self._num_stale = 0 if STALE[0] < measured < STALE[1] else self._num_stale + 1
        believed = self.plain if nodes == 1 else self.slow
        ratio, found = min(max(measured, believed / JUMP), believed * JUMP), 1.0
        self.run = self.run + 1 if nodes == 1 else 0
        if nodes > 1:
            self._draft_took(ratio, nodes, verify / self.verify(1, rows) * self.slow)
        elif self.run == 1:  # not yet like those of plain decoding
            self._is_old = self._num_since >= COMPARED
            self._latest.clear()
            if self._is_old:
                self._plains = []
                self._told.append(self.alone)
        else:
            found = self._plain_took(ratio)
        draft = min(drafted_s, HICCUP * usual) if levels or nodes > 1 else 0.0
        # The first draft after plain steps, as that of all, tells little of the time that those to come take. What many
        # rows take was not measured: there it tells more than what is believed.
        is_cold = nodes > 1 and rows <= ROWS and (self._num_since == 1 or self.num_drafts <= UNSETTLED)
        most = verify * (self.slow if is_cold else HICCUP * max(self.slow, self.plain))
        seconds = min(verified_s, most) + (min(draft, usual) if is_cold else draft) + self.rest
        return seconds / self.plain_step(rows), found

    def end(self) -> None:
        """Of a step that was looked at, now: what follows until the next one counts as ``rest``."""
        self._ended_at = time.perf_counter()

    def begin(self) -> None:
        """Of a step, now."""
        if self._ended_at:
            self._pauses.append(time.perf_counter() - self._ended_at)
            usual = statistics.median(self._pauses)
            self.rest = min(usual, PAUSE * self.verify(1, 1))  # more is somebody else's
            self._ended_at = 0.0

    def _draft_took(self, ratio: float, nodes: int, forwards: float) -> None:
        """The verification of a draft, as measured beforehand so many forwards, took ``ratio`` times as long."""
        if self._num_since == 0:
            self._latest.clear()
        self.num_drafts += 1
        self._num_since += 1
        self._latest.append(ratio)
        excess = min(ratio, HICCUP * self.slow) - self.slow
        if self.num_drafts > UNSETTLED:
            self._tilt.observe(nodes, excess * forwards / self.slow)
        if self._num_since <= COMPARED:  # what plain steps take is known: that is how the two compare
            settled = self._num_since - UNSETTLED
            self.slow += max(0.2, 1 / (1 + settled)) * excess if settled > 0 else 0.0
            self._compare()
        elif self.num_drafts > UNSETTLED:
            before, usual = self.slow, statistics.median(self._latest)
            latest = 0.2 if self.num_drafts < YOUNG else 0.05  # early drafts grow faster as memory warms up
            self.slow += max(latest, 1 / (self.num_drafts + 1 - UNSETTLED)) * (ratio - self.slow)
            if not 1 / LEAP < usual / before < LEAP and len(self._latest) == LOOKS:
                self.slow = usual
            self.plain = self.alone * self.slow

    def _plain_took(self, ratio: float) -> float:
        """A plain step that was not the first of its run; see ``observe`` for what is found."""
        believed = self.plain
        self._num_since = 0
        if self._is_old and self.run <= SETTLED:
            self._plains.append(ratio)
            if not self.num_drafts:
                self.slow = statistics.median(self._plains) / self.alone
            self._compare()
            return self.plain / believed
        self._latest.append(ratio)
        if self.run > SETTLED:
            self._plains = [*self._latest]
            self.plain = statistics.median(self._plains)
            self.slow = self.plain / self.alone
        return 1.0

    def _compare(self) -> None:
        """Plain steps with the drafts around them."""
        if self._plains and self._told:
            low, high = ALONE  # beyond these the machine has changed meanwhile
            later = self._plains[len(self._plains) // 2 :]  # the first ones find what drafts left in the caches
            told = min(max(statistics.median(later) / self.slow, low), high)
            self._told[-1] = told
            self.alone = statistics.median(self._told)
        self.plain = self.alone * self.slow

    @property
    def is_stale(self) -> bool:
        """Whether steps persistently take something else than was measured."""
        return self._num_stale >= PERSISTENT

    @property
    def is_in_doubt(self) -> bool:
        """Whether plain steps told something else the last time than before."""
        if len(self._told) < 2:
            return False
        before = self.alone if len(self._told) > 2 else self._told[0]
        return not 1 / ASTRAY < self._told[-1] / before < ASTRAY

    def forget_plain(self) -> None:
        """Learn anew how plain steps compare: the first ones of all told little of it."""
        self._told.clear()

    def verify(self, nodes: int, rows: int) -> float:
        """T_V of trees of ``nodes`` each, the root counted."""
        beyond = (self.context * rows - self.costs.context) * self.costs.per_token  # what longer texts add
        return max(float(self._curve(rows)[min(nodes, MOST)]) + beyond, 1e-7) * self.slow

    def plain_step(self, rows: int) -> float:
        """Seconds of a step in a run of plain ones."""
        return self.verify(1, rows) * self.alone + self.rest

    def verify_tilted(self, nodes: int, rows: int) -> float:
        """The same with what many nodes were seen to take more."""
        return self.verify(nodes, rows) + max(self._tilt(nodes), 0.0) * self.verify(1, rows)

    def verify_upto(self, count: int, rows: int) -> np.ndarray:
        """The same for 0 to ``count - 1`` nodes, but for what all have in common."""
        curve = self._curve(rows)[:count]
        if len(curve) < count:
            curve = np.pad(curve, (0, count - len(curve)), mode="edge")
        tilted = curve * self.slow + self._tilt.slope * self.verify(1, rows) * np.arange(count)
        return np.maximum.accumulate(tilted)

    def draft(self, levels: float, rows: int, *, is_wide: bool = False) -> float:
        """A draft of so many levels."""
        return self._lines[is_wide](levels) * self.costs.draft_share(rows) * self.slow

    def levels(self, count: int, rows: int) -> np.ndarray:
        """Of one node each: the second one, the third ... so many."""
        scale = self.costs.draft_share(rows) * self.slow
        return scale * np.array(self._lines[False].steps(count))

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
    low, high = costs.draft_seconds(1), costs.draft_seconds(EVEN)
    wide = costs.draft_seconds(EVEN, costs.width) - costs.draft_seconds(1, costs.width)
    more = (wide / max(high - low, 1e-7) - 1) / max(costs.width - 1, 1)
    return min(max(more, 0.02), 1.0)
