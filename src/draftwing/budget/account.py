"""What drafts brought and took, against plain decoding."""

from __future__ import annotations

from dataclasses import dataclass

from draftwing.budget.clock import KEEP, Clock

__all__ = ["Account"]


@dataclass
class Account:
    """What drafts brought: decayed sums, in seconds of the measured costs.

    Weighed against plain decoding of the same rows at the same time: it holds when rows or the machine's speed change.
    """

    plain: float = 0.0  # that plain decoding would have taken for as many tokens
    verify: float = 0.0
    draft: float = 0.0
    steps: int = 0
    weight: float = 0.0  # of them, as far as they are remembered

    def add(self, plain: float, verify: float, draft: float) -> None:
        """One step."""
        self.plain, self.verify = KEEP * self.plain + plain, KEEP * self.verify + verify
        self.draft, self.weight = KEEP * self.draft + draft, KEEP * self.weight + 1
        self.steps += 1

    def fade(self, share: float) -> None:
        """Remember only so much of what was."""
        self.plain, self.verify, self.draft = share * self.plain, share * self.verify, share * self.draft
        self.weight *= share

    def speedup(self, clock: Clock) -> float:
        """Over plain decoding, at the machine's present speed."""
        if not self.steps:
            return 1.0
        return clock.slow * clock.alone * self.plain / (clock.slow * self.verify + self.draft)

    def lost(self, clock: Clock, rows: int) -> float:
        """What such a step loses, in plain steps."""
        plain = clock.slow * clock.alone * self.plain
        return (clock.slow * self.verify + self.draft - plain) / self.weight / (clock.verify(1, rows) * clock.alone)
