"""Static trees, level by level: which nodes stand where, and which of them have children."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

__all__ = ["Level", "Shape"]


@dataclass(frozen=True)
class Level:
    """One level of a static tree.

    Attributes:
        parents: for each node its parent's place among the expanded nodes of the level above.
        ranks: for each node which child of its parent it is, from 0.
        expanded: places of the nodes that have children themselves.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    expanded: tuple[int, ...]

    @cache  # noqa: B019  # of a handful of shapes; for good, since a recorded draft knows where they lie
    def places(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """``parents``, ``ranks`` and ``expanded`` as int64 on a device: made once, since that may have to wait."""
        with torch.inference_mode(False):
            every = (self.parents, self.ranks, self.expanded)
            parents, ranks, expanded = (torch.tensor(each, dtype=torch.int64, device=device) for each in every)
        return parents, ranks, expanded


class Shape:
    """A static tree, from paths of ranks: ``(0, 1)`` is the second child of the root's first child."""

    def __init__(self, paths: tuple[tuple[int, ...], ...]) -> None:
        by_depth: dict[int, list[tuple[int, ...]]] = {}
        for path in sorted(paths, key=lambda path: (len(path), path)):
            by_depth.setdefault(len(path), []).append(path)
        inner = {path[:-1] for path in paths}
        above: list[tuple[int, ...]] = [()]
        self.levels: list[Level] = []
        for depth in range(1, len(by_depth) + 1):
            nodes = by_depth[depth]
            place = {path: i for i, path in enumerate(above)}
            expanded = tuple(i for i, path in enumerate(nodes) if path in inner)
            level = Level(tuple(place[p[:-1]] for p in nodes), tuple(p[-1] for p in nodes), expanded)
            self.levels.append(level)
            above = [nodes[i] for i in expanded]

    @staticmethod
    @lru_cache(maxsize=64)
    def of(paths: tuple[tuple[int, ...], ...]) -> Shape:
        """The same shape is made once."""
        return Shape(paths)
