"""What was timed, and what it says of costs: each count in every round, and whether other work had the processors."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from draftwing.budget.costs import ROWS, Costs, Curve

__all__ = ["WIDTH", "ByCount", "Sample", "Samples"]

WIDTH = 4  # of the trees that are measured


class Sample(NamedTuple):
    """What a step, or a part of it, took; and whether the whole step had the processors for itself."""

    seconds: float
    is_clean: bool


ByCount = dict[float, list[Sample]]
_new = partial(defaultdict[float, list[Sample]], list)


@dataclass
class Samples:
    """By count, round by round."""

    verify: ByCount = field(default_factory=_new)
    by_rows: ByCount = field(default_factory=_new)
    long: ByCount = field(default_factory=_new)
    chain: ByCount = field(default_factory=_new)
    tree: ByCount = field(default_factory=_new)
    rows_chain: ByCount = field(default_factory=_new)

    @property
    def busy(self) -> float:
        """The share of counts of which every sample but the first one was disturbed."""
        parts = (self.verify, self.by_rows, self.long, self.chain, self.tree, self.rows_chain)
        later = [each[1:] for part in parts for each in part.values() if each]
        return statistics.fmean([not any(sample.is_clean for sample in each) for each in later])

    def of_target(self, context: int, stretched: int) -> Costs:
        """What they say of the target."""
        curve = Curve.fit(_later(self.verify))
        per_row = [(Curve.fit(_later(self.by_rows))(n) - curve(n * ROWS)) / (ROWS - 1) for n in self.by_rows]
        per_token = [(Curve.fit(_later(self.long))(n) - curve(n)) / max(stretched - context, 1) for n in self.long]
        token = max(0.0, _middle(per_token))
        return Costs(
            verify=curve,
            per_token=token,
            per_token_of=Curve.fit({n: [max(each, 0.0)] for n, each in zip(self.long, per_token, strict=True)}),
            per_row=max(0.0, _middle(per_row) - context * token),  # each row's own tokens are counted beside
            context=context,
        )

    def pace(self, known: Costs) -> float:
        """What the target takes now, against what is known of it: the middle of what was measured."""
        return _middle([seconds / known.verify_seconds(int(n)) for n, seconds in Curve.fit(_later(self.verify)).knots])

    def with_draft(self, target: Costs) -> Costs:
        """The target's costs, and what they say of the drafter."""
        chains, more_rows = Curve.bent(_later(self.chain)), 0.0
        if self.rows_chain:
            more_rows = Curve.fit(_later(self.rows_chain))(1) / chains(max(self.chain)) - 1
        return replace(
            target,
            chain=chains,
            tree=Curve.line(_later(self.tree)),
            width=WIDTH if self.tree else 1,
            draft_per_row=max(0.0, more_rows / (ROWS - 1)),
            busy=max(self.busy, target.busy),
        )


def _later(samples: ByCount) -> dict[float, list[float]]:
    """Seconds; not of the first rounds, nor of steps that were disturbed where there are others."""
    found = {}
    for count, values in samples.items():
        later = values[1:] or values
        found[count] = [each.seconds for each in later if each.is_clean] or [each.seconds for each in later]
    return found


def _middle(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
