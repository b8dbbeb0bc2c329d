"""The record of a decode step, and sums over many.

The decode loop returns a ``Step`` and keeps no counters: the command line prints it, evaluation sums it with ``Stats``,
tests compare it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from draftwing.errors import DraftwingError
from draftwing.tree import Accepted, DraftTree


@dataclass(frozen=True)
class Timings:
    """Seconds of one step by phase; ``host`` is the rest of the wall time."""

    draft: float
    verify: float
    accept: float
    commit: float
    host: float

    @property
    def total(self) -> float:
        """Wall seconds of the step."""
        return self.draft + self.verify + self.accept + self.commit + self.host


@dataclass(frozen=True)
class Logprob:
    """The target's log-probability of an emitted token before any processing, and those of the ``top`` tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class NodeDistribution:
    """The target's distribution after one node of a tree, and the draw from it.

    Attributes:
        chances: token, probability and noise of the likeliest tokens, the node's children and the drawn token, the
            likeliest first. Probabilities are those of the request's sampling, at temperature 0 those of temperature 1;
            the noise is that of the position, 0 if nothing is drawn.
        drawn: the token of the greatest log-probability plus noise: the target's next token.
    """

    chances: tuple[tuple[int, float, float], ...]
    drawn: int


@dataclass(frozen=True)
class RowStep:
    """One row's share of a step.

    Attributes:
        request_id: the request in this row.
        token_ids: the tokens emitted: accepted drafts, then the bonus; cut at the end of the request.
        num_drafted: nodes proposed, without the root.
        num_accepted: drafted nodes on the kept path, before any cut.
        depth: depth of the row's tree.
        finish_reason: None while the request runs, else ``stop`` (a stop token or string), ``length`` or ``error``.
        logprobs: one per emitted token if requested.
        position: of the first of these tokens in the row, including the prompt.
        text: newly printable text, if the request has a tokenizer; may be empty while a character or a possible stop
            string is incomplete.
        error: why the row stopped.
        node_distributions: one per node of the row's tree if requested.
    """

    request_id: int
    token_ids: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    depth: int
    finish_reason: str | None = None
    logprobs: tuple[Logprob, ...] | None = None
    position: int = 0
    text: str = ""
    error: DraftwingError | None = None
    node_distributions: tuple[NodeDistribution, ...] | None = None


@dataclass(frozen=True)
class Step:
    """One iteration of the decode loop over all rows.

    Attributes:
        rows: one entry per running request.
        tree: the drafter's proposals.
        accepted: the nodes that the rule kept.
        lossless: the rule keeps the target's distribution.
    """

    rows: tuple[RowStep, ...]
    tree: DraftTree
    accepted: Accepted
    timings: Timings
    lossless: bool = True


class Share(NamedTuple):
    """The part of a step from which a row computes its share."""

    timings: Timings
    num_rows: int
    lossless: bool


@dataclass
class Stats:
    """A sum of steps: ``Stats.of(steps)``, or ``add`` one by one.

    Attributes:
        num_tokens, num_forwards: tokens emitted, and target forwards; a forward counts once for every row in it, so
            that tau is per request.
        num_drafted, num_accepted: drafted nodes, and those kept.
        reached, taken: by depth, rows that reached it and rows that kept a node there.
        seconds: by phase. The rows of a batch share a step's time equally, so the seconds of the requests of a batch
            add up to the time of the batch.
        elapsed: wall seconds of the steps, shared or not: how long a request waited for its text.
        lossless: every step's rule keeps the target's distribution.
    """

    num_tokens: int = 0
    num_forwards: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    reached: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    elapsed: float = 0.0
    lossless: bool = True

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Stats:
        """Return the sum of many steps."""
        stats = cls()
        for step in steps:
            stats.add(step)
        return stats

    @classmethod
    def sum(cls, many: Iterable[Stats]) -> Stats:
        """Return the total of several requests.

        Steps that they shared count once: ``elapsed`` is the sum of their shares, the wall time of a whole batch.
        """
        total = cls()
        for stats in many:
            for name in ("num_tokens", "num_forwards", "num_drafted", "num_accepted"):
                setattr(total, name, getattr(total, name) + getattr(stats, name))
            total.elapsed += stats.total_seconds
            total.lossless &= stats.lossless
            for name in ("reached", "taken"):
                pairs = zip_longest(getattr(total, name), getattr(stats, name), fillvalue=0)
                setattr(total, name, [left + right for left, right in pairs])
            for phase, seconds in stats.seconds.items():
                total.seconds[phase] = total.seconds.get(phase, 0.0) + seconds
        return total

    def add(self, step: Step) -> None:
        """Add a step."""
        self._spend(step.timings, 1.0, step.lossless)
        for row in step.rows:
            self._count(row)

    def add_row(self, row: RowStep, share: Share) -> None:
        """Add one row's share of a step."""
        self._spend(share.timings, 1 / share.num_rows, share.lossless)
        self._count(row)

    def _spend(self, timings: Timings, share: float, lossless: bool) -> None:
        self.lossless &= lossless
        self.elapsed += timings.total
        for phase in ("draft", "verify", "accept", "commit", "host"):
            self.seconds[phase] = self.seconds.get(phase, 0.0) + share * getattr(timings, phase)

    def _count(self, row: RowStep) -> None:
        self.num_tokens += len(row.token_ids)
        self.num_forwards += 1
        self.num_drafted += row.num_drafted
        self.num_accepted += row.num_accepted
        for depth in range(row.depth):
            if depth == len(self.reached):
                self.reached.append(0)
                self.taken.append(0)
            self.reached[depth] += row.num_accepted >= depth
            self.taken[depth] += row.num_accepted > depth

    @property
    def tau(self) -> float:
        """Tokens emitted per target forward, including the bonus token."""
        return self.num_tokens / self.num_forwards if self.num_forwards else 0.0

    @property
    def alpha(self) -> list[float]:
        """Acceptance at each depth given that the depth was reached and drafted for."""
        return [taken / reached if reached else 0.0 for taken, reached in zip(self.taken, self.reached, strict=True)]

    @property
    def total_seconds(self) -> float:
        """Seconds of all phases: the wall time of the steps, or a request's share of it."""
        return sum(self.seconds.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of decoding; for requests decoded together, their total throughput."""
        return self.num_tokens / self.total_seconds if self.num_tokens else 0.0
