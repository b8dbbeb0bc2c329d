"""Continuations with counts: what followed a match in texts, and the tree that is grown of it.

Whatever holds texts (``SuffixAutomaton``, ``SuffixArray``, ``Memory``) answers one question: which tokens follow at a
place, and how often. The places below a match are a trie of its continuations, in which only what is drafted is ever
visited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush, nlargest
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch

from draftwing.tree import DraftTree

__all__ = ["Follower", "Grown", "Indexed", "Match", "as_tree", "grow"]


class Follower(NamedTuple):
    """A token that follows at a place.

    Attributes:
        times: how often it does there.
        place: the one after it. Only the texts that gave it know what it means.
    """

    token: int
    times: int
    place: Any


class Indexed(Protocol):
    """Texts in which places can be found."""

    def followers(self, place: Any) -> Sequence[Follower]:
        """The distinct tokens that follow at a place; none where every text ends."""
        ...


@dataclass(frozen=True)
class Match:
    """An end of the sequence that occurs in texts.

    Attributes:
        length: tokens of it.
        place: after it.
    """

    texts: Indexed
    length: int
    place: Any


@dataclass
class Grown:
    """The tree of one row.

    Attributes:
        tokens, parents: of the nodes, the root first; parents come before their children.
        told: the chance of each node given its parent.
        depth: of the deepest node.
        score: the sum of the nodes' chances, those of their paths with them: how many are expected to come true.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    told: list[float] = field(default_factory=lambda: [1.0])
    depth: int = 0
    score: float = 0.0


def grow(root: int, match: Match, most: int, depth: int, width: int) -> Grown:
    """The likeliest continuations of a match, as a tree.

    A token that followed ``times`` of ``total`` times has the chance times / total, and of that there is the more
    evidence the longer the match (the tokens of the path with it) and the more often it was met. A match that was met
    once counts as in prompt lookup.

    Args:
        root: the pending token.
        most: nodes beside the root at most; the likeliest paths are kept.
        depth: of the tree at most.
        width: children of a node at most; 1 is a chain.
    """
    grown, serial = Grown([root]), count()
    waiting: list[tuple[float, int, int, int, float, Follower]] = []
    node, level, reached, place = 0, 0, 1.0, match.place
    while True:
        if level < depth:
            found = match.texts.followers(place)
            total = sum(each.times for each in found)
            for each in nlargest(width, found, key=lambda follower: follower.times):
                told = each.times / total * (1 - 1 / (match.length + level + total))
                heappush(waiting, (-reached * told, next(serial), node, level + 1, told, each))
        if not waiting or len(grown.tokens) > most:
            return grown
        chance, _, parent, level, told, (token, _, place) = heappop(waiting)
        node, reached = len(grown.tokens), -chance
        grown.tokens.append(token)
        grown.parents.append(parent)
        grown.told.append(told)
        grown.depth, grown.score = max(grown.depth, level), grown.score + reached


def as_tree(rows: Sequence[Grown], device: torch.device, *, is_line: bool, law_of: int | None = None) -> DraftTree:
    """The rows' trees as one.

    Args:
        is_line: all are chains.
        law_of: V, where a classic rule needs q, which is certain of each node's one child.
    """
    tree = DraftTree.from_lists([row.tokens for row in rows], [row.parents for row in rows], device)
    padded = [[*row.told, *[0.0] * (tree.num_nodes - len(row.told))] for row in rows]
    deepest = max(row.depth for row in rows)
    tree = replace(tree, told=torch.tensor(padded, device=device), depth=deepest, is_line=is_line)
    if law_of is None:
        return tree
    # Node i's child is certain: q is one-hot on it (and means nothing at the last node).
    following = torch.cat([tree.tokens[:, 1:], tree.tokens[:, -1:]], 1).clamp(min=0)
    probs = torch.zeros(*tree.tokens.shape, law_of, device=device)
    return replace(tree, draft_probs=probs.scatter_(2, following[:, :, None], 1.0))
