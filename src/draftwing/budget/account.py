"""What drafts brought and took, against plain decoding."""

from __future__ import annotations

from dataclasses import dataclass

from draftwing.budget.clock import KEEP

__all__ = ["Account"]


@dataclass
class Account:
    """What drafts brought and took: decayed sums, in plain steps of the same rows at the same time.

    So it holds when rows or the machine's speed change.
    """

    brought: float = 0.0  # plain steps that as many tokens take
    took: float = 0.0
    steps: int = 0
    weight: float = 0.0  # of them, as far as they are remembered

    def add(self, brought: float, took: float) -> None:
        """One step."""
        self.steps += 1
        self.brought, self.took = KEEP * self.brought + brought, KEEP * self.took + took
        self.weight = KEEP * self.weight + 1

    def fade(self, share: float) -> None:
        """Remember only so much of what was."""
        self.brought, self.took, self.weight = share * self.brought, share * self.took, share * self.weight

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
