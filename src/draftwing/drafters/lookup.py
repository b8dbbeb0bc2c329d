"""Prompt lookup: draft what followed the same words before (Saxena 2023; automata as in SAM-Decoding, 2411.10666).

Costs next to nothing, and gains wherever a text repeats itself or its prompt: code, edits, summaries.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftwing.drafters.base import Budget, Traits
from draftwing.drafters.retrieval.following import Grown, as_tree
from draftwing.drafters.suffix import SuffixAutomaton, merge_paths
from draftwing.model.target import NO_FEATURES, Context, TargetOutput
from draftwing.sampling import SamplingBatch
from draftwing.tree import Accepted, DraftTree

__all__ = ["LookupDrafter"]

SECOND = 0.3  # chance of what followed a shorter match, of that of what followed it elsewhere


class LookupDrafter:
    """Matches the longest suffix of prompt and output that occurred before, and proposes what followed.

    Args:
        vocab_size: V, for the draft law that the classic rules weigh (certain of its one proposal).
        min_match: the shortest suffix worth proposing from.
    """

    name = "lookup"
    features = NO_FEATURES
    traits = Traits(costs_forwards=False, lists=True)

    def __init__(self, vocab_size: int, min_match: int = 2) -> None:
        self._vocab_size, self._min_match = vocab_size, min_match
        self._automata: list[SuffixAutomaton] = []
        self._read: list[int] = []

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """Start an automaton; it reads the prompt at the first proposal."""
        self._automata.append(SuffixAutomaton())
        self._read.append(0)

    def remove(self, ctx: Context, row: int) -> None:
        """Drop the row's automaton."""
        self._automata[row], self._read[row] = self._automata[-1], self._read[-1]
        self._automata.pop()
        self._read.pop()

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Up to ``budget.width`` continuations of ``budget.depth`` tokens; one alone where a classic rule needs q.

        The longer a match, the likelier what followed it: ``told`` says how likely.
        """
        if budget.depth == 0:  # what is new is read when there is something to propose
            return ctx.roots()
        drawn = budget.children in ("sampled", "distinct")
        law_of = self._vocab_size if drawn else None
        return as_tree(self.grown(ctx, budget), ctx.device, is_line=drawn or budget.width == 1, law_of=law_of)

    def grown(self, ctx: Context, budget: Budget) -> list[Grown]:
        """See ``Listing``."""
        num_paths = 1 if budget.children in ("sampled", "distinct") else budget.width
        most = 1 + (budget.depth * num_paths if budget.nodes is None else budget.nodes)
        rows = []
        for index, row in enumerate(ctx.rows):
            automaton = self._automata[index]
            automaton.extend_all(row.tokens[self._read[index] :])
            self._read[index] = len(row.tokens)
            found = automaton.continuations(budget.depth, num_paths, self._min_match)
            if not found:
                rows.append(Grown(row.tokens[-1:]))
                continue
            tokens, parents, sources = merge_paths(row.tokens[-1], [path for _, path in found], most)
            depths = _depths(parents)
            told = _told([length for length, _ in found], parents, sources, depths)
            rows.append(Grown(tokens, parents, told, max(depths)))
        return rows

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """The automata read new tokens when they next propose."""


def _depths(parents: Sequence[int]) -> list[int]:
    depths = [0] * len(parents)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    return depths


def _told(lengths: Sequence[int], parents: Sequence[int], sources: Sequence[int], depths: Sequence[int]) -> list[float]:
    """The chance of each node given its parent, from the length of the match that it continues.

    A match grows with every token that comes true. What is wrong with these chances is learnt from what comes of them.
    """
    told, branched = [1.0] * len(parents), set[int]()
    for node in range(1, len(parents)):
        told[node] = 1 - 1 / (lengths[sources[node]] + depths[node])
        if parents[node] in branched:
            told[node] *= SECOND
        branched.add(parents[node])
    return told
