"""What all drafters have in common that look drafts up in texts: from matches to trees."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from draftwing.drafters.base import Budget, Traits
from draftwing.drafters.retrieval.following import Grown, Match, as_tree, grow
from draftwing.drafters.suffix import SuffixAutomaton
from draftwing.model.target import NO_FEATURES, Context, Row, TargetOutput
from draftwing.sampling import SamplingBatch
from draftwing.tree import Accepted, DraftTree

__all__ = ["OwnTexts", "RetrievalDrafter"]


class RetrievalDrafter:
    """Proposes for each row the best of its matches' trees; a subclass says what matches.

    Args:
        vocab_size: V, for the draft law that the classic rules weigh (certain of its one proposal).
    """

    name = "retrieval"
    features = NO_FEATURES
    traits = Traits(costs_forwards=False, lists=True)

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def matches(self, index: int, row: Row) -> Iterable[Match]:
        """Where the text of the row at ``index`` goes on elsewhere."""
        raise NotImplementedError

    def reach(self, match: Match) -> float:
        """How many nodes a match is good for."""
        return math.inf

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """Nothing to keep."""

    def remove(self, ctx: Context, row: int) -> None:
        """Nothing to drop."""

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """The tree of which most nodes are expected to come true; a chain where a classic rule needs q."""
        drawn = budget.children in ("sampled", "distinct")
        law_of = self._vocab_size if drawn else None
        return as_tree(self.grown(ctx, budget), ctx.device, is_line=drawn or budget.width == 1, law_of=law_of)

    def grown(self, ctx: Context, budget: Budget) -> list[Grown]:
        """See ``Listing``."""
        width = 1 if budget.children in ("sampled", "distinct") else budget.width
        most = budget.depth * width if budget.nodes is None else budget.nodes
        rows = []
        for index, row in enumerate(ctx.rows):
            root, found = row.tokens[-1], self.matches(index, row) if budget.depth else ()
            trees = [grow(root, each, int(min(most, self.reach(each))), budget.depth, width) for each in found]
            rows.append(max(trees, key=lambda tree: tree.score, default=Grown([root])))
        return rows

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """New tokens are read when there is next something to propose."""


class OwnTexts:
    """A suffix automaton for each row: what the request itself has said so far, its prompt with it."""

    def __init__(self) -> None:
        self._automata: list[SuffixAutomaton] = []

    def __len__(self) -> int:
        """Rows."""
        return len(self._automata)

    def admit(self) -> None:
        """A row was added at the end; it is read when it is first asked for."""
        self._automata.append(SuffixAutomaton())

    def remove(self, row: int) -> None:
        """A row left; the last one takes its place."""
        self._automata[row] = self._automata[-1]
        self._automata.pop()

    def of(self, index: int, row: Row) -> SuffixAutomaton:
        """Of a row, with all of its tokens."""
        automaton = self._automata[index]
        automaton.extend_all(row.tokens[len(automaton) :])
        return automaton
