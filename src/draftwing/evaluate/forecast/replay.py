"""Tau of a tree from held-out statistics: a walk along each text, as decoding with that tree would take it.

    chain     goes on while the text's own next token is the first child
    static    while the ranks of the path are among those of the tree
    dynamic   while the node was among the ``width`` best of its level (else it had no children), and is among the
              ``nodes`` best of all
    auto      a tree of the nodes whose path's chance is above a threshold: what one that grows by its nodes' worth
              comes to, at a constant price of a node

Dynamic trees of the reference tree's width are exact on the texts that were collected; so are chains and static trees,
where no node of theirs on the text's path fell out of the reference tree. Of
narrower dynamic trees, nodes that would not have been met count among the likelier ones, which makes tau a little too
small.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from draftwing.drafters.base import Budget
from draftwing.errors import ConfigError
from draftwing.evaluate.forecast.held_out import DEPTH, THRESHOLDS, WIDTH, Texts, quantised

__all__ = ["Walk", "accepted", "accepted_above", "check_reach", "walk", "walk_above"]

BRANCHES = 4  # children of a node of a tree that grows by its nodes' worth (``budget.planner``)


@dataclass(frozen=True)
class Walk:
    """What decoding did.

    Attributes:
        tokens, steps: (T,) int64: emitted on each text, and target forwards.
        nodes, levels: in the mean of all steps: nodes verified beside the root, and levels drafted.
    """

    tokens: np.ndarray
    steps: np.ndarray
    nodes: float
    levels: float

    @property
    def tau(self) -> float:
        """Tokens emitted per target forward."""
        return float(self.tokens.sum() / self.steps.sum())

    def interval(self, draws: int = 1000) -> tuple[float, float]:
        """Of tau, 95%: bootstrap over the texts, always the same."""
        generator = np.random.default_rng(0)
        chosen = generator.integers(len(self.steps), size=(draws, len(self.steps)))
        taus = self.tokens[chosen].sum(1) / self.steps[chosen].sum(1)
        low, high = np.quantile(taus, (0.025, 0.975))
        return float(low), float(high)


def check_reach(budget: Budget) -> None:
    """Raise ConfigError where a tree goes beyond what was collected."""
    if budget.depth > DEPTH or budget.width > WIDTH:
        raise ConfigError(
            f"{budget}: held-out statistics reach {DEPTH} levels of {WIDTH} nodes, and this tree has {budget.depth} of "
            f"{budget.width}: forecast a smaller one, or measure it with `draftwing compare --tree`"
        )


def walk(texts: Texts, budget: Budget) -> Walk:
    """With trees of one budget.

    Raises:
        ConfigError: see ``check_reach``.
    """
    check_reach(budget)
    met = budget.width + max(budget.depth - 1, 0) * budget.width**2
    nodes = len(budget.shape()) if budget.nodes is None else min(budget.nodes, met)
    _, tokens, steps = _visited(texts, accepted(texts, budget))
    return Walk(tokens, steps, float(nodes), float(budget.depth))


def walk_above(texts: Texts, place: int) -> Walk:
    """With trees of all nodes whose path's chance is above ``THRESHOLDS[place]``."""
    visited, tokens, steps = _visited(texts, accepted_above(texts, place))
    # Whether a level was worth drafting is only known of the nodes that it was drafted below.
    levels = np.minimum(texts.levels[visited, place].astype(np.float64) + 1, DEPTH)
    return Walk(tokens, steps, float(texts.sizes[visited, place].mean()), float(levels.mean()))


def accepted(texts: Texts, budget: Budget) -> np.ndarray:
    """(P,) how many drafted tokens each position's step would keep."""
    ranks, depths = texts.ranks, _depths(texts)
    if budget.is_chain and budget.paths is None:
        fits = ranks == 0
    elif budget.paths is not None or budget.nodes is None:
        return _accepted_static(texts, budget.shape()) if budget.paths else _accepted_beam(texts, budget)
    else:
        rivals = np.where(np.arange(DEPTH) < budget.depth, texts.likelier, 0).sum(1)
        fits = (rivals < budget.nodes) & _was_met(texts, budget.width)
    return _leading(texts, fits & (depths <= budget.depth))


def accepted_above(texts: Texts, place: int) -> np.ndarray:
    """(P,) the same of ``walk_above``."""
    certain = texts.chances < quantised(np.array([THRESHOLDS[place]]))[0]
    return _leading(texts, certain & _was_met(texts, BRANCHES))


def _accepted_beam(texts: Texts, budget: Budget) -> np.ndarray:
    """Of a dynamic tree that keeps the best nodes of each level, and no others."""
    return _leading(texts, (_places(texts) < budget.width) & (_depths(texts) <= budget.depth))


def _accepted_static(texts: Texts, paths: Iterable[tuple[int, ...]]) -> np.ndarray:
    known, found = set(paths), []
    ranks, at = texts.ranks.tolist(), 0
    for length in texts.found.tolist():
        path = tuple(ranks[at : at + length])
        at += length
        found.append(next((depth for depth in range(length) if path[: depth + 1] not in known), length))
    return np.array(found, dtype=np.int64)


def _was_met(texts: Texts, width: int) -> np.ndarray:
    """(E,) whether each would be met where ``width`` nodes of each level have as many children each."""
    first = _depths(texts) == 1
    above = np.concatenate([[0], _places(texts)[:-1]])  # a path's nodes stand one after another
    met: np.ndarray = (texts.ranks < width) & (first | (above < width))
    return met


def _depths(texts: Texts) -> np.ndarray:
    """(E,) of each node, from 1."""
    found = texts.found.astype(np.int64)
    starts = np.cumsum(found) - found
    return np.arange(len(texts.ranks)) - np.repeat(starts, found) + 1


def _places(texts: Texts) -> np.ndarray:
    """(E,) likelier nodes of the same level."""
    same: np.ndarray = texts.likelier[np.arange(len(texts.ranks)), _depths(texts) - 1]
    return same


def _leading(texts: Texts, fits: np.ndarray) -> np.ndarray:
    """(P,) how many of a position's path fit, up to the first one that does not."""
    held = np.zeros((len(texts.found), DEPTH), dtype=bool)
    held[np.repeat(np.arange(len(texts.found)), texts.found), _depths(texts) - 1] = fits
    kept: np.ndarray = np.logical_and.accumulate(held, axis=1).sum(1)
    return kept


def _visited(texts: Texts, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The positions at which steps begin, and each text's tokens and steps."""
    visited: list[int] = []
    tokens, steps, start, counts = [], [], 0, kept.tolist()
    for length, stops in zip(texts.lengths.tolist(), texts.stopped.tolist(), strict=True):
        at, before = 0, len(visited)
        while at < length:
            visited.append(start + at)
            at += counts[start + at] + 1
        # Only an end of its own cuts a step short; a text that was left off goes on.
        tokens.append(length if stops else at)
        steps.append(len(visited) - before)
        start += length
    return np.array(visited), np.array(tokens), np.array(steps)
