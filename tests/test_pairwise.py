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


def test_the_exactness_suite_leaves_no_pair_out():
    """Of (drafter, family, sampling, batch) all pairs are there, but for drafters that meet a few families."""
    factors = test_exact.FACTORS
    chosen = set(test_exact.CHOSEN)
    assert chosen <= set(product(*factors.values()))
    for group in [*groups_of(factors, 2), ("family", "kind", "batch")]:
        covered = {values for case in chosen for _, values in parts(case, list(factors), [group])}
        wanted = set(product(*(factors[name] for name in group)))
        if set(group) == {"family", "drafter"}:
            left_out = {
                *product(set(test_exact.TARGETS) - set(test_exact.FEW), test_exact.ELSEWHERE),
                *product(["gpt2"], set(test_exact.ELSEWHERE) - set(test_exact.ADAPTED)),
            }
            wanted -= {case if group[0] == "family" else case[::-1] for case in left_out}
        assert covered == wanted, group
    assert {*test_exact.VARIANTS, *test_exact.EVERYWHERE} <= set(test_exact.DRAFTERS)
    assert set(factors["drafter"]) == set(test_exact.DRAFTERS)
    assert set(factors["family"]) == set(test_exact.TARGETS)
    assert set(factors["kind"]) == set(test_exact.SAMPLINGS)
    assert set(factors["batch"]) == set(test_exact.BATCHES)
