"""The cases that stand for a full product leave no combination out."""

from __future__ import annotations

from itertools import product

import pytest

import test_exact
from pairwise import cover, groups_of, parts

FACTORS = {"a": "123456", "b": "xyz", "c": "pq", "d": "kl"}


@pytest.mark.parametrize(
    "groups",
    [groups_of(FACTORS, 1), groups_of(FACTORS, 2), groups_of(FACTORS, 3), [*groups_of(FACTORS, 2), ("b", "c", "d")]],
)
def test_every_combination_of_a_group_occurs(groups):
    cases = cover(FACTORS, groups)
    covered = {part for case in cases for part in parts(case, list(FACTORS), groups)}
    for group in groups:
        for values in product(*(FACTORS[name] for name in group)):
            assert (group, values) in covered
    assert len(cases) == len(set(cases)) < len(list(product(*FACTORS.values())))
    assert cases == cover(FACTORS, groups)


def test_what_is_covered_is_small():
    assert len(cover(FACTORS, groups_of(FACTORS, 1))) == 6
    assert len(cover(FACTORS, groups_of(FACTORS, 2))) <= 20  # 18 at least


def test_the_exactness_suite_meets_every_drafter_in_the_kernel_and_in_pytorch():
    """Each in a batch of rows with different sampling, and for a single request."""
    drafters = test_exact.DRAFTERS
    assert {*test_exact.VARIANTS, *test_exact.EVERYWHERE, *test_exact.STRANGERS} <= set(drafters)
    for drafter in drafters:
        families, kinds = zip(
            *((family, kind) for family, name, kind in test_exact.CHOSEN if name == drafter), strict=True
        )
        assert {"llama", test_exact.FLOAT32, test_exact.INT8} <= set(families)
        assert {"mixed", "learned"} & set(kinds)
        assert set(kinds) - set(test_exact.BATCHES)
    assert {family for family, _, _ in test_exact.CHOSEN} == set(test_exact.TARGETS)
