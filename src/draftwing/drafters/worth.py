"""Trees that grow, or are cut, by what their nodes are worth (``GrowthRule``), on the host.

The CPU kernel makes the same decisions (``native/drafts.h``); the tests hold both against an explicit search.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from draftwing.run.request import Drafted, GrowthRule
from draftwing.tree import PAD, DraftTree

__all__ = ["UNTOLD", "Forest", "worth_keeping"]

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

    def add(self, token: int, parent: int, told: float, rate: float) -> bool:
        reached = float(np.float32(self.reached[parent] * rate))  # as the kernel rounds it: equal paths stay equal
        if not reached > 0:
            return False
        self.tokens.append(token)
        self.parents.append(parent)
        self.told.append(told)
        self.reached.append(reached)
        self.depths.append(self.depths[parent] + 1)
        self.places.append(PAD)
        insort(self.order, len(self.tokens) - 1, key=lambda node: -self.reached[node])
        return True


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
        self._tables: list[tuple[list[float], list[float]]] = list(
            zip(rule.knots.tolist(), rule.rates.tolist(), strict=True)
        )
        self._verify: list[float] = rule.verify.tolist()
        self._most = rule.most if most is None else min(most, rule.most)
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

    def take(self, row: int, tokens: Sequence[int], parents: Sequence[int], told: Sequence[float]) -> None:
        """Nodes of a row that were drafted already, parents first; PAD are none."""
        tree, known = self._trees[row], {0: 0}
        for node in range(1, len(tokens)):
            above = known.get(parents[node])
            if tokens[node] == PAD or above is None:
                continue
            known[node] = len(tree.tokens)
            if not tree.add(tokens[node], above, told[node], self._rate(told[node], tree.depths[above])):
                del known[node]

    def widen(self) -> bool:
        """Choose the nodes of the newest level to expand; False where another level is not worth its time."""
        level, rule = self._levels - 1, self._rule
        kept = self._num_worth()
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
        takes = cost * (1 + (worth - 1) * rule.share) + self._verify[kept + 2] - self._verify[kept + 1]
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
    def first(self) -> int:
        """Where the newest level begins in ``drafted``."""
        return len(self._drafted[0][0]) - len(self._trees[0].expanded)

    def drafted(self, device: torch.device) -> DraftTree:
        """The expanded nodes as a tree."""
        tokens, parents = (torch.tensor([each[part] for each in self._drafted], device=device) for part in (0, 1))
        return DraftTree(tokens, parents, depth=self._levels)

    # --- finishing -------------------------------------------------------------------------------------------------

    def finish(self, device: torch.device) -> Drafted:
        """The nodes that are worth their verification."""
        limit = self._num_worth()
        nodes = [[0, *sorted(tree.order[:limit])] for tree in self._trees]
        width = max(map(len, nodes))
        parents, is_line = [], True
        for tree, kept in zip(self._trees, nodes, strict=True):
            place = {node: i for i, node in enumerate(kept)}
            parents.append([-1, *(place[tree.parents[node]] for node in kept[1:])])
            is_line &= parents[-1] == [*range(-1, len(kept) - 1)]

        def column(name: str, filling: float) -> list[list[float]]:
            rows = zip((getattr(tree, name) for tree in self._trees), nodes, strict=True)
            return [[*(values[node] for node in kept), *[filling] * (width - len(kept))] for values, kept in rows]

        finished = DraftTree(
            torch.tensor(column("tokens", PAD), device=device),
            torch.tensor([[*row, *[-1] * (width - len(row))] for row in parents], device=device),
            torch.tensor(column("reached", 0.0), dtype=torch.float32, device=device),
            told=torch.tensor(column("told", 0.0), dtype=torch.float32, device=device),
            effort=self._effort,
            is_line=is_line,
            depth=max(tree.depths[node] for tree, kept in zip(self._trees, nodes, strict=True) for node in kept),
        )
        return Drafted(finished, np.array(column("places", PAD), dtype=np.int64), self._levels, self._width == 1)

    # --- what nodes are worth --------------------------------------------------------------------------------------

    def _rate(self, told: float, level: int) -> float:
        """At which such nodes came true."""
        table = min(level, len(self._knots) - 1)
        at, rates = self._knots[table], self._rates[table]
        right = bisect_left(at, told)
        if right == 0 or right == len(at):
            return rates[0 if right == 0 else -1]
        gap = at[right] - at[right - 1]
        share = (told - at[right - 1]) / gap if gap > 0 else 1.0
        return rates[right - 1] + share * (rates[right] - rates[right - 1])

    def _num_worth(self) -> int:
        """How many nodes of every row are worth their verification."""
        most = min(self._most, max(len(tree.order) for tree in self._trees))
        gain, best, greatest = 0.0, 0, -self._verify[1]
        for count in range(1, most + 1):
            for tree in self._trees:
                if count <= len(tree.order):
                    gain += tree.reached[tree.order[count - 1]]
            net = gain * self._rule.worth - self._verify[count + 1]
            if net > greatest:
                greatest, best = net, count
        return best


def worth_keeping(tree: DraftTree, rule: GrowthRule) -> DraftTree:
    """The nodes of a tree that are worth their verification: for drafters that do not grow by the rule themselves.

    Its drafter may have said of each node how likely it is (``tree.told``), or nothing.
    """
    if tree.num_nodes == 1:
        return tree
    tokens, parents, device = tree.tokens.tolist(), tree.parents.tolist(), tree.tokens.device
    told = [[UNTOLD] * tree.num_nodes for _ in tokens] if tree.told is None else tree.told.tolist()
    forest = Forest(rule, [row[0] for row in tokens], [True] * len(tokens), 0, None)
    for row in range(len(tokens)):
        forest.take(row, tokens[row], parents[row], told[row])
    return replace(forest.finish(device).tree, effort=tree.effort or tree.max_depth)
