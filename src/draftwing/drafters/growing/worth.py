"""Trees that grow, or are cut, by what their nodes are worth (``GrowthRule``), on the host.

The CPU kernel makes the same decisions (``native/drafts.h``); the tests hold both against an explicit search.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from draftwing.run.request import Drafted, GrowthRule
from draftwing.tree import PAD, DraftTree

__all__ = ["UNTOLD", "Forest", "Rates", "num_worth", "worth_keeping"]

UNTOLD = 0.5  # the chance of a node whose drafter tells none: what is learnt of its depth says the rest


@dataclass
class _Tree:
    """One row's nodes in the order in which they were met, parents first; the root is node 0.

    Attributes:
        told: the chance of each node given its parent, as the drafter says; ``reached``: of its path, as such came
            true.
        places: among the expanded nodes; PAD for leaves.
        order: all but the root, by ``reached``; equal ones as they were met.
        expanded: the newest level's expanded nodes; PAD where the row has fewer than others.
        newest: the first node of the newest level.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    told: list[float] = field(default_factory=lambda: [1.0])
    reached: list[float] = field(default_factory=lambda: [1.0])
    depths: list[int] = field(default_factory=lambda: [0])
    places: list[int] = field(default_factory=lambda: [0])
    order: list[int] = field(default_factory=list)
    expanded: list[int] = field(default_factory=lambda: [0])
    newest: int = 1

    def add(self, token: int, parent: int, told: float, rate: float) -> None:
        reached = float(np.float32(self.reached[parent] * rate))  # as the kernel rounds it: equal paths stay equal
        if not reached > 0:
            return
        self.tokens.append(token)
        self.parents.append(parent)
        self.told.append(told)
        self.reached.append(reached)
        self.depths.append(self.depths[parent] + 1)
        self.places.append(PAD)


class Forest:
    """The trees of all rows while they grow by a rule.

    Args:
        rule: what nodes are worth.
        roots: of each row its pending token; ``wanted``: whether anything is drafted for it.
        width: nodes expanded on each level at most; ``most``: nodes of the finished tree at most.
    """

    def __init__(
        self, rule: GrowthRule, roots: Sequence[int], wanted: Sequence[bool], width: int, most: int | None
    ) -> None:
        self._rule, self._width = rule, width
        self._rate = Rates(rule.knots, rule.rates)
        self._most = len(rule.verify) - 3 if most is None else min(most, len(rule.verify) - 3)
        self._trees = [
            _Tree([root], expanded=[0 if drafts else PAD]) for root, drafts in zip(roots, wanted, strict=True)
        ]
        self._drafted = [([root], [-1]) for root in roots]  # tokens and parents of the expanded nodes
        self._levels, self._effort = 0, 0.0

    # --- growing ---------------------------------------------------------------------------------------------------

    def branch(
        self, tokens_BWC: Sequence[Sequence[Sequence[int]]], chances_BWC: Sequence[Sequence[Sequence[float]]]
    ) -> None:
        """Give the newest expanded nodes children, with the logs of their chances; -inf are none."""
        level, self._levels = self._levels, self._levels + 1
        self._effort += 1 + (len(self._trees[0].expanded) - 1) * self._rule.share
        for tree, tokens_WC, chances_WC in zip(self._trees, tokens_BWC, chances_BWC, strict=True):
            tree.newest = len(tree.tokens)
            for above, tokens, chances in zip(tree.expanded, tokens_WC, chances_WC, strict=True):
                if above == PAD:
                    continue
                for token, chance in zip(tokens, chances, strict=True):
                    if chance > -math.inf:  # nor is NaN a chance
                        told = math.exp(min(chance, 0.0))
                        tree.add(token, above, told, self._rate(told, level))

    def widen(self) -> bool:
        """Choose the nodes of the newest level to expand; False where another level is not worth its time."""
        level, rule = self._levels - 1, self._rule
        kept = _num_worth(self._trees, self._rule, self._most)
        chosen = [[node for node in tree.order[:kept] if node >= tree.newest][: self._width] for tree in self._trees]
        entries = max(map(len, chosen))
        gain, cost, total, worth = float(rule.gains[level]), float(rule.costs[level]), 0.0, 0
        while worth < entries:
            reached = sum(
                tree.reached[nodes[worth]]
                for tree, nodes in zip(self._trees, chosen, strict=True)
                if worth < len(nodes)
            )
            if worth and not reached * gain > cost * rule.share:
                break
            total, worth = total + reached, worth + 1
        if not worth:
            return False
        takes = cost * (1 + (worth - 1) * rule.share) + float(rule.verify[kept + 2] - rule.verify[kept + 1])
        if not total * gain > takes:
            return False
        for tree, nodes, (tokens, parents) in zip(self._trees, chosen, self._drafted, strict=True):
            tree.expanded = [*nodes[:worth], *[PAD] * (worth - len(nodes))]
            for node in tree.expanded:
                if node != PAD:
                    tree.places[node] = len(tokens)
                tokens.append(PAD if node == PAD else tree.tokens[node])
                parents.append(-1 if node == PAD else tree.places[tree.parents[node]])
        return True

    @property
    def num_newest(self) -> int:
        """Nodes of the newest level that were expanded, unused ones counted."""
        return len(self._trees[0].expanded)

    @property
    def first(self) -> int:
        """Where the newest level begins in ``drafted``."""
        return len(self._drafted[0][0]) - self.num_newest

    def drafted(self, device: torch.device) -> DraftTree:
        """The expanded nodes as a tree."""
        tokens, parents = (torch.tensor([each[part] for each in self._drafted], device=device) for part in (0, 1))
        return DraftTree(tokens, parents, depth=self._levels)

    # --- finishing -------------------------------------------------------------------------------------------------

    def finish(self, device: torch.device) -> Drafted:
        """The nodes that are worth their verification."""
        kept = _kept(self._trees, self._rule, self._most)
        tree = _cut(self._trees, kept, self._effort, device)
        places = [[tree.places[node] for node in nodes] for tree, nodes in zip(self._trees, kept, strict=True)]
        padded = np.array([[*row, *[PAD] * (tree.num_nodes - len(row))] for row in places], dtype=np.int64)
        return Drafted(tree, None if self._width == 1 else torch.from_numpy(padded), self._levels - 1)


def worth_keeping(tree: DraftTree, rule: GrowthRule) -> DraftTree:
    """The nodes of a tree that are worth their verification: for drafters that do not grow by the rule themselves.

    Its drafter may have said of each node how likely it is (``tree.told``), or nothing.
    """
    if tree.num_scored:
        return worth_keeping(tree.proposals, rule).beside(*tree.scored)
    if tree.num_nodes == 1:
        return tree if tree.effort is not None else replace(tree, effort=0.0)
    columns = (tree.tokens.tolist(), tree.parents.tolist(), None if tree.told is None else tree.told.tolist())
    rates, trees = Rates(rule.knots, rule.rates), []
    for row, (tokens, parents) in enumerate(zip(*columns[:2], strict=True)):
        told = [UNTOLD] * len(tokens) if columns[2] is None else columns[2][row]
        reached, depths = [1.0] + [0.0] * (len(parents) - 1), [0] * len(parents)
        for node, above in enumerate(parents):
            if above >= 0:
                depths[node] = depths[above] + 1
                reached[node] = reached[above] * rates(told[node], depths[above])
        trees.append(_Tree(tokens, parents, told, reached, depths))
    effort = float(max(max(each.depths) for each in trees)) if tree.effort is None else tree.effort
    kept = _kept(trees, rule, len(rule.verify) - 3)
    if sum(map(len, kept)) < int(tree.valid.sum()):
        return _cut(trees, kept, effort, tree.tokens.device)
    return replace(
        tree, confidence=torch.tensor([each.reached for each in trees], device=tree.tokens.device), effort=effort
    )


class Rates:
    """At which rates nodes came true, by what was said of them: the tables of a ``GrowthRule``."""

    def __init__(self, knots: np.ndarray, rates: np.ndarray) -> None:
        self._knots: list[list[float]] = knots.tolist()
        self._rates: list[list[float]] = rates.tolist()

    def __call__(self, told: float, level: int) -> float:
        """Of one node; level from 0."""
        table = min(level, len(self._knots) - 1)
        at, rates = self._knots[table], self._rates[table]
        right = bisect_left(at, told)
        if right == 0 or right == len(at):
            return rates[0 if right == 0 else -1]
        gap = at[right] - at[right - 1]
        share = (told - at[right - 1]) / gap if gap > 0 else 1.0
        return rates[right - 1] + share * (rates[right] - rates[right - 1])


def num_worth(ranked: Sequence[Sequence[float]], rule: GrowthRule, most: int) -> int:
    """How many nodes of every row are worth their verification, ``most`` at most.

    Args:
        ranked: of each row how likely its nodes are reached, the likeliest first.
    """
    sums: list[float] = []  # of all rows, of the best, second best, ... node
    for row in ranked:
        sums += [0.0] * (min(most, len(row)) - len(sums))
        for rank, reached in enumerate(row[:most]):
            sums[rank] += reached
    verify: list[float] = rule.verify.tolist()
    gain, best, greatest = 0.0, 0, -verify[1]
    for count, more in enumerate(sums, 1):
        gain += more
        net = gain * rule.worth - verify[count + 1]
        if net > greatest:
            greatest, best = net, count
    return best


def _num_worth(trees: Sequence[_Tree], rule: GrowthRule, most: int) -> int:
    """``num_worth`` of trees; brings their order up to date."""
    ranked = []
    for tree in trees:
        reached = tree.reached
        tree.order = sorted(range(1, len(reached)), key=reached.__getitem__, reverse=True)
        ranked.append([reached[node] for node in tree.order[:most]])
    return num_worth(ranked, rule, most)


def _kept(trees: Sequence[_Tree], rule: GrowthRule, most: int) -> list[list[int]]:
    """The nodes of each row that are worth their verification, in order."""
    limit = _num_worth(trees, rule, most)
    return [[0, *sorted(node for node in tree.order[:limit] if tree.reached[node] > 0)] for tree in trees]


def _cut(trees: Sequence[_Tree], kept: Sequence[Sequence[int]], effort: float, device: torch.device) -> DraftTree:
    """The trees of these nodes."""
    width = max(map(len, kept))
    whole: list[list[list[int]]] = [[], []]
    chances: list[list[list[float]]] = [[], []]
    is_line, deepest = True, 0
    for tree, nodes in zip(trees, kept, strict=True):
        place, rest = {node: i for i, node in enumerate(nodes)}, width - len(nodes)
        parents = [-1, *[place[tree.parents[node]] for node in nodes[1:]]]
        is_line &= parents == [*range(-1, len(nodes) - 1)]
        deepest = max(deepest, *[tree.depths[node] for node in nodes])
        whole[0].append([*[tree.tokens[node] for node in nodes], *[PAD] * rest])
        whole[1].append([*parents, *[-1] * rest])
        chances[0].append([*[tree.reached[node] for node in nodes], *[0.0] * rest])
        chances[1].append([*[tree.told[node] for node in nodes], *[0.0] * rest])
    tokens_BN, parents_BN = torch.tensor(whole, device=device).unbind()
    reached_BN, told_BN = torch.tensor(chances, dtype=torch.float32, device=device).unbind()
    return DraftTree(tokens_BN, parents_BN, reached_BN, told=told_BN, effort=effort, is_line=is_line, depth=deepest)
