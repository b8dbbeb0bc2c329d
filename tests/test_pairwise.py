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
    """(drafter, family, sampling, batch): variants of a drafter meet two values of each, the others few families."""
    factors, chosen = test_exact.FACTORS, set(test_exact.CHOSEN)
    assert chosen <= set(product(*factors.values()))

    def met(drafter, factor):
        if drafter in test_exact.EVERYWHERE:
            return factors[factor]
        if drafter in test_exact.VARIANTS:
            return test_exact.TWO[factor]
        if factor == "family" and drafter not in test_exact.OWN:
            return (*test_exact.OURS, "gpt2") if drafter in test_exact.STRANGERS else test_exact.OURS
        return (*test_exact.OURS, "mistral-window", "gpt2") if factor == "family" else factors[factor]

    for group in [*groups_of(factors, 2), ("family", "kind", "batch")]:
        covered = {values for case in chosen for _, values in parts(case, list(factors), [group])}
        wanted = set(product(*(factors[name] for name in group)))
        if "drafter" in group:
            (other,) = set(group) - {"drafter"}
            wanted = {(drafter, value) for drafter in factors["drafter"] for value in met(drafter, other)}
            wanted = {pair if group[0] == "drafter" else pair[::-1] for pair in wanted}
        assert covered >= wanted, group
    assert {*test_exact.VARIANTS, *test_exact.EVERYWHERE} <= set(test_exact.DRAFTERS)
    assert set(factors["drafter"]) == set(test_exact.DRAFTERS)
    assert set(factors["family"]) == set(test_exact.TARGETS)
    assert set(factors["kind"]) == set(test_exact.SAMPLINGS)
    assert set(factors["batch"]) == set(test_exact.BATCHES)
