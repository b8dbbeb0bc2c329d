"""A few cases out of a full product: every combination of the factors that are named together occurs in one of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product

import pytest

Case = tuple[object, ...]
Group = tuple[str, ...]


def groups_of(factors: Iterable[str], size: int) -> list[Group]:
    """All groups of ``size`` factors: pairs for 2."""
    return list(combinations(factors, size))


def parts(case: Case, names: Sequence[str], groups: Iterable[Group]) -> Iterator[tuple[Group, Case]]:
    """What a case covers: for each group the values that it has there."""
    values = dict(zip(names, case, strict=True))
    for group in groups:
        yield group, tuple(values[name] for name in group)


def cover(factors: Mapping[str, Sequence[object]], groups: Sequence[Group]) -> list[Case]:
    """Cases, one value of each factor, that together hold every combination of values of every group.

    Greedy: the case that covers the most that is not covered yet comes next, the first in the order of the product
    among equals. So it is the same list every time. A case's gain only ever falls, and is looked at again when it
    comes to the top.
    """
    names = list(factors)
    cases = list(product(*factors.values()))
    number: dict[tuple[Group, Case], int] = {}
    masks = []
    for case in cases:
        mask = 0
        for part in parts(case, names, groups):
            mask |= 1 << number.setdefault(part, len(number))
        masks.append(mask)
    missing = (1 << len(number)) - 1
    waiting = [(-len(groups), index) for index in range(len(cases))]
    chosen = []
    while missing:
        _, index = heapq.heappop(waiting)
        gain = (masks[index] & missing).bit_count()
        if waiting and (-gain, index) > waiting[0]:
            heapq.heappush(waiting, (-gain, index))
            continue
        chosen.append(cases[index])
        missing &= ~masks[index]
    return chosen


def pairs(factors: Mapping[str, Sequence[object]]) -> list[object]:
    """The full product as parameters of a test; all but cases that together hold every pair are marked ``full``."""
    chosen = set(cover(factors, groups_of(factors, 2)))
    return [
        pytest.param(*case, marks=() if case in chosen else pytest.mark.full) for case in product(*factors.values())
    ]
