"""The union of several drafters' trees, against sets of paths; and what is kept of it, against explicit search."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftwing.methods.base import Budget, ListTree
from draftwing.methods.ensemble import (
    Union,
    by_row,
    follow,
    kept_tokens,
    part_path,
    proposals,
    unite,
)
from draftwing.runtime.tree_builder import UNKNOWN_PROB, together
from draftwing.tree import PAD, Accepted, DraftTree, Emitted

ROOT = 7
Path = tuple[int, ...]


@st.composite
def proposal(draw, most: int = 7) -> ListTree:
    """Any tree over three tokens, so that paths often meet, equal siblings too."""
    size = draw(st.integers(1, most))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]
    tokens = [ROOT, *(draw(st.integers(0, 2)) for _ in range(1, size))]
    told = [1.0, *(draw(st.floats(0.05, 1.0)) for _ in range(1, size))]
    return ListTree(tokens, parents, told)


several = st.lists(proposal(), min_size=1, max_size=3)


def paths(of: ListTree | Union) -> list[Path]:
    """The tokens on the way to every node, the root's left out."""
    found: list[Path] = [()]
    for node in range(1, len(of.tokens)):
        found.append((*found[of.parents[node]], of.tokens[node]))
    return found


def told_of(many: list[ListTree]) -> dict[Path, dict[int, float]]:
    found: dict[Path, dict[int, float]] = {}
    for drafter, each in enumerate(many):
        for path, told in list(zip(paths(each), each.node_probs, strict=True))[1:]:
            own = found.setdefault(path, {})
            own[drafter] = max(own.get(drafter, 0.0), told)
    return found


def noisy_or(union: Union, node: int) -> float:
    wrong = 1.0
    for told in union.given_probs[node].values():
        wrong *= 1 - told
    return 1 - wrong


def weighed(many: list[ListTree]) -> Union:
    union = unite(many)
    union.weigh(noisy_or)
    return union


@given(several)
def test_the_union_is_that_of_the_paths(many):
    union, wanted = unite(many), told_of(many)
    own = paths(union)
    assert len(own) == len(set(own))  # each path is one node
    assert set(own) == {(), *wanted}
    for node, path in enumerate(own):
        assert union.depths[node] == len(path)
        assert node == 0 or 0 <= union.parents[node] < node
        assert union.given_probs[node] == wanted.get(path, {})
        below = [found for found in wanted if found[:-1] == path]
        assert union.child_proposers[node] == sum({1 << drafter for found in below for drafter in wanted[found]})
        assert union.proposers(node) == sum(1 << drafter for drafter in wanted.get(path, {}))


@given(several)
def test_siblings_chances_add_up_to_one_at_most(many):
    union, wanted = weighed(many), {}
    own = paths(union)
    for path, claims in told_of(many).items():
        miss = 1.0
        for told in claims.values():
            miss *= 1 - told
        wanted[path] = 1 - miss
    sums = {path: max(1.0, sum(each for at, each in wanted.items() if at[:-1] == path)) for path in own}
    for node, path in enumerate(own[1:], 1):
        assert union.node_probs[node] == pytest.approx(wanted[path] / sums[path[:-1]])
        reached = 1.0
        for depth in range(1, len(path) + 1):
            reached *= union.node_probs[own.index(path[:depth])]
        assert union.path_probs[node] == pytest.approx(reached)


def connected(union: Union, count: int):
    """Every set of ``count`` nodes beside the root that hangs together."""
    for nodes in combinations(range(1, len(union.tokens)), count):
        if all(union.parents[node] in (0, *nodes) for node in nodes):
            yield nodes


@settings(max_examples=60, deadline=None)
@given(st.lists(proposal(5), min_size=1, max_size=2), st.integers(1, 5))
@example([ListTree([ROOT, 0, 1, 2], [-1, 0, 0, 1], [1.0, 0.9, 0.05, 0.9])], 2)  # a child is likelier than its uncle
def test_as_many_nodes_as_asked_for_are_the_best_that_hang_together(many, count):
    union = weighed(many)
    count = min(count, len(union.tokens) - 1)
    kept = union.within(Budget(8, 4, max(count, 1)))
    assert kept[0] == 0
    assert all(union.parents[node] in kept[:place] for place, node in enumerate(kept) if node)
    if count:
        best = max(sum(union.path_probs[node] for node in nodes) for nodes in connected(union, count))
        assert len(kept) == 1 + count
        assert sum(union.path_probs[node] for node in kept[1:]) == pytest.approx(best)
    assert union.within(Budget(paths=tuple((rank,) for rank in range(max(count, 1))))) == kept


@given(several)
def test_a_chain_is_the_path_on_which_most_is_to_be_expected(many):
    union = weighed(many)
    own = paths(union)
    value = {path: sum(union.path_probs[own.index(path[:depth])] for depth in range(1, len(path) + 1)) for path in own}
    kept = union.within(Budget(8))
    assert [union.parents[node] for node in kept] == [-1, *kept[:-1]]
    assert sum(union.path_probs[node] for node in kept[1:]) == pytest.approx(max(value.values()))


@given(several, st.integers(2, 3))
def test_each_level_keeps_its_best(many, width):
    union = weighed(many)
    kept, level = set(union.within(Budget(2, width))), {0}
    for depth in (1, 2):
        below = [node for node in range(len(union.tokens)) if union.parents[node] in level]
        level = {node for node in kept if union.depths[node] == depth}
        best = sorted((union.path_probs[node] for node in below), reverse=True)[:width]
        assert sorted((union.path_probs[node] for node in level), reverse=True) == pytest.approx(best)
        assert level <= set(below)
    assert max(union.depths[node] for node in kept) <= 2


@given(st.lists(several, min_size=1, max_size=3))
def test_the_batch_holds_every_rows_nodes(rows):
    unions = [weighed(many) for many in rows]
    tree = together(unions, [union.ordered() for union in unions], torch.device("cpu"), 2.0)
    tree.check(ROOT + 1)
    assert tree.num_draft_forwards == 2.0
    assert tree.depth == int(tree.depths.max())
    assert tree.is_line == all(row[used].tolist() == [*range(-1, int(used.sum()) - 1)]
                               for row, used in zip(tree.parents, tree.valid, strict=True))  # fmt: skip
    for union, found in zip(unions, proposals(tree), strict=True):
        assert dict(zip(paths(found), found.node_probs, strict=True)) == pytest.approx(
            dict(zip(paths(union), union.node_probs, strict=True)), rel=1e-5
        )


@given(proposal(), st.lists(st.integers(0, 2), max_size=6))
def test_tokens_are_followed_as_far_as_they_were_proposed(one, tokens):
    single = unite([one])
    own, single = paths(single), ListTree(single.tokens, single.parents, [1.0] * len(single.tokens))
    path = follow(single, tokens)
    assert [own[node] for node in path] == [tuple(tokens[:depth]) for depth in range(len(path))]
    assert tuple(tokens[: len(path)]) not in own or len(path) == len(tokens) + 1


def test_the_first_of_equal_siblings_is_followed():
    """Children of the second sibling are not followed."""
    twice = ListTree([ROOT, 1, 1, 2, 3], [-1, 0, 0, 1, 2], [1.0] * 5)
    assert follow(twice, [1, 2]) == [0, 1, 3]
    assert follow(twice, [1, 3]) == [0, 1]


def test_chances_are_read_from_what_a_tree_says():
    tokens, parents = (
        torch.tensor([[ROOT, 1, PAD, 2], [ROOT, 3, 4, PAD]]),
        torch.tensor([[-1, 0, -1, 1], [-1, 0, 0, -1]]),
    )
    for tree, wanted in (
        (DraftTree(tokens, parents), [[UNKNOWN_PROB] * 3] * 2),
        (DraftTree(tokens, parents, node_probs=torch.tensor([[1, 0.5, 0, 0.25]] * 2)), [[1, 0.5, 0.25], [1, 0.5, 0]]),
        (
            DraftTree(tokens, parents, torch.tensor([[1, 0.5, 0, 0.25], [1, 0.5, 0.4, 0]])),
            [[1, 0.5, 0.5], [1, 0.5, 0.4]],
        ),
    ):
        found = proposals(tree)
        assert [each.tokens for each in found] == [[ROOT, 1, 2], [ROOT, 3, 4]]
        assert [each.parents for each in found] == [[-1, 0, 1], [-1, 0, 0]]
        assert [each.node_probs for each in found] == [pytest.approx(each) for each in wanted]


def test_a_kept_path_in_a_drafters_own_numbers():
    own = [ListTree([ROOT, 1, 2, 3], [-1, 0, 0, 2], [1.0] * 4), ListTree([ROOT, 9], [-1, 0], [1.0] * 2)]
    tree = DraftTree.from_lists([[ROOT, 2, 1, 3, 5], [ROOT, 2]], [[-1, 0, 0, 1, 3], [-1, 0]])
    accepted = Accepted(torch.tensor([[0, 1, 3, 4], [0, 1, PAD, PAD]]), torch.tensor([3, 1]), torch.tensor([0, 0]))
    kept = kept_tokens(tree, accepted)
    assert kept == [[2, 3, 5], [2]]
    on_host = [Emitted([2, 3, 5, 0], 4, 3, True), Emitted([2, 0], 1, 1, True)]
    assert kept_tokens(tree, replace(accepted, on_host=on_host)) == kept
    assert part_path(own, kept, accepted.path).tolist() == [[0, 2, 3, PAD], [0, PAD, PAD, PAD]]


def test_rows_are_taken_from_the_chosen_trees():
    q = torch.arange(8.0, dtype=torch.float64).view(1, 2, 4).repeat(2, 1, 1)
    chain = DraftTree.chain(torch.tensor([[ROOT, 1], [ROOT, 2]]), draft_probs=q)
    other = DraftTree.chain(torch.tensor([[ROOT, 3, 0], [ROOT, 3, PAD]]), draft_probs=torch.ones(2, 3, 4))
    found = by_row([chain, other], [1, 0])
    assert found.tokens.tolist() == [[ROOT, 3, 0], [ROOT, 2, PAD]]
    assert found.parents.tolist() == [[-1, 0, 1], [-1, 0, -1]]
    assert found.is_line
    assert found.depth == 2
    assert found.draft_probs.dtype == torch.float64
    assert found.draft_probs[0].tolist() == torch.ones(3, 4).tolist()
    assert found.draft_probs[1].tolist() == [*q[1].tolist(), [0.0] * 4]
    root = DraftTree.root(torch.tensor([ROOT, ROOT]))
    assert by_row([chain, root], [0, 1]).draft_probs[1].tolist() == [[0.0] * 4] * 2
    unsaid = DraftTree.chain(torch.tensor([[ROOT, 1], [ROOT, 2]]))
    assert by_row([chain, unsaid], [0, 1]).draft_probs is None
