"""What drafts brought and took, against plain decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass

from draftwing.budget.clock import KEEP

__all__ = ["Account"]

LONG, PRIOR = 0.998, 30.0  # share of these that a step leaves; plain steps of them that are believed beforehand
LUCK, CHANCE = 0.0, 1.5  # standard errors up to which a deviation is chance; from one more on it is none


@dataclass
class Account:
    """What drafts brought and took: decayed sums, in plain steps of the same rows at the same time.

    So it holds when rows or the machine's speed change.

    Which of a step's tokens are accepted is mostly chance. Where it is known how likely each was, that says more than
    what came of it, and what came beyond it counts only as far as it stands out from chance: a dozen drafts then tell
    as much as several dozen.
    """

    expected: float = 0.0  # plain steps that as many tokens take as were to be expected,
    beyond: float = 0.0  # and that came beyond these,
    spread: float = 0.0  # and the squares of it
    _said: float = 0.0  # plain steps that were expected of all steps, by the chances of their nodes alone,
    _came: float = 0.0  # and that came
    took: float = 0.0
    steps: int = 0
    weight: float = 0.0  # of them, as far as they are remembered

    def add(self, brought: float, took: float, expected: float | None = None) -> float:
        """One step, which brought so much, of ``expected``.

        Returns:
            What it is taken to have brought.
        """
        if expected is None:
            expected = brought
        else:  # drafted are those that look likely, which makes them look more likely than they are
            self._said, self._came = LONG * self._said + expected, LONG * self._came + brought
            expected *= (PRIOR + self._came) / (PRIOR + self._said)
        beyond = brought - expected
        self.steps += 1
        self.expected, self.took = KEEP * self.expected + expected, KEEP * self.took + took
        self.beyond, self.spread = KEEP * self.beyond + beyond, KEEP * self.spread + beyond * beyond
        self.weight = KEEP * self.weight + 1
        return expected + self._share * beyond

    @property
    def _share(self) -> float:
        """How much of what came beyond the expected is not chance: none of it stands out, or (1) nearly all."""
        if not self.beyond:
            return 0.0
        away = self.beyond / math.sqrt(self.spread)
        return min(max(away - LUCK, -away - CHANCE, 0.0), 1.0)

    @property
    def brought(self) -> float:
        """Plain steps that as many tokens take as drafts bring."""
        return self.expected + self._share * self.beyond

    def fade(self, share: float) -> None:
        """Remember only so much of what was."""
        self.expected, self.took, self.weight = share * self.expected, share * self.took, share * self.weight
        self.beyond, self.spread = share * self.beyond, share * share * self.spread

    def correct(self, found: float) -> None:
        """A plain step took so much of what it was believed to take."""
        self.took /= found

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.brought / self.took if self.took > 0 else 1.0

    @property
    def lost(self) -> float:
        """What a step loses, in plain steps."""
        return (self.took - self.brought) / self.weight
