"""Draft trees against brute force: ancestors, depths, pruning, and what is not a tree."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from draftwing.errors import TreeError
from draftwing.tree import PAD, DraftTree


def random_row(rng: random.Random, num_nodes: int) -> tuple[list[int], list[int]]:
    """Unused nodes anywhere but at the root; parents are used nodes."""
    tokens, parents, used = [rng.randrange(50)], [-1], [0]
    for node in range(1, num_nodes):
        if rng.random() < 0.25:
            tokens.append(PAD)
            parents.append(-1)
            continue
        # Deep trees as well as bushy ones.
        parents.append(used[-1] if rng.random() < 0.5 else rng.choice(used))
        tokens.append(rng.randrange(50))
        used.append(node)
    return tokens, parents


def random_trees(seed: int) -> tuple[DraftTree, list[tuple[list[int], list[int]]]]:
    rng = random.Random(seed)
    rows = [random_row(rng, rng.randint(1, 20)) for _ in range(rng.randint(1, 4))]
    return DraftTree.from_lists([tokens for tokens, _ in rows], [parents for _, parents in rows]), rows


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path


@pytest.mark.parametrize("seed", range(12))
def test_ancestors_depths_and_valid(seed):
    tree, rows = random_trees(seed)
    tree.check(50)
    assert tree.num_rows == len(rows)
    assert tree.num_nodes == max(len(tokens) for tokens, _ in rows)
    for b, (tokens, parents) in enumerate(rows):
        for node in range(tree.num_nodes):
            used = node < len(tokens) and tokens[node] != PAD
            path = path_to(parents, node) if used else [node]
            assert tree.ancestors[b, node].nonzero()[:, 0].tolist() == sorted(path)
            assert int(tree.depths[b, node]) == len(path) - 1
            assert bool(tree.valid[b, node]) == used
    assert tree.ancestors.dtype == tree.valid.dtype == torch.bool
    assert tree.depths.dtype == torch.int64


@pytest.mark.parametrize("seed", range(12))
def test_only_so_many_nodes_of_each_row_are_kept(seed):
    """The likeliest, where a drafter says so and nothing was drawn from q; else the first ones."""
    tree, rows = random_trees(seed)
    rng = random.Random(seed)
    counts = [rng.randint(0, 8) for _ in rows]
    chances = torch.tensor([[1.0] + [rng.choice([0.25, 0.5, 1.0]) for _ in range(tree.num_nodes - 1)] for _ in rows])
    reach = torch.where(tree.ancestors, chances[:, None, :], 1.0).prod(-1)
    kinds = {
        "told": (replace(tree, confidence=reach), reach),
        "silent": (tree, None),
        "drawn": (replace(tree, confidence=reach, draft_probs=torch.zeros(*tree.tokens.shape, 1)), None),
    }
    for kind, (whole, worth) in kinds.items():
        found = whole.at_most(torch.tensor(counts))
        found.check(50)
        for b, count in enumerate(counts):
            used = tree.valid[b].nonzero()[1:, 0].tolist()
            order = used if worth is None else sorted(used, key=lambda node: -float(worth[b, node]))
            assert found.valid[b].nonzero()[1:, 0].tolist() == sorted(order[:count]), kind
            assert torch.equal(found.tokens[b, found.valid[b]], tree.tokens[b, found.valid[b]])


def test_chances_that_cannot_be_leave_no_node_without_its_path():
    tree = DraftTree.from_lists([[1, 2, 3, 4]], [[-1, 0, 1, 0]])
    found = replace(tree, confidence=torch.tensor([[1.0, 0.2, 0.9, 0.5]])).at_most(torch.tensor([2]))
    assert found.tokens.tolist() == [[1, PAD, PAD, 4]]


def test_nodes_that_are_only_scored_do_not_count():
    tree = DraftTree.chain(torch.tensor([[1, 2, 3]])).with_extra_nodes(
        torch.tensor([[7, 8]]), torch.tensor([[-1, 0]]), 2
    )
    assert tree.at_most(torch.tensor([1])).tokens.tolist() == [[1, 2, PAD, 7, 8]]


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5, 8, 9, 33, 64, 65])
def test_a_path_of_any_length_is_followed_to_its_root(num_nodes):
    """Repeated squaring must not stop early: chains built as general trees, of every length around a power of two."""
    parents = list(range(-1, num_nodes - 1))
    general = DraftTree.from_lists([[5] * num_nodes], [parents])
    chain = DraftTree.chain(torch.full((1, num_nodes), 5))
    assert torch.equal(general.ancestors[0], torch.ones(num_nodes, num_nodes, dtype=torch.bool).tril())
    assert torch.equal(chain.ancestors, general.ancestors)
    assert chain.depths.tolist() == general.depths.tolist() == [list(range(num_nodes))]


@pytest.mark.parametrize("seed", range(10))
def test_a_ragged_chain_is_the_general_tree_of_the_same_nodes(seed):
    rng = random.Random(seed)
    width = rng.randint(2, 12)
    lengths = [rng.randint(1, width) for _ in range(4)]
    tokens = torch.tensor([[rng.randrange(50) for _ in range(n)] + [PAD] * (width - n) for n in lengths])
    chain = DraftTree.chain(tokens)
    general = DraftTree(chain.tokens, chain.parents)
    chain.check(50)
    assert chain.is_line
    assert not general.is_line
    for name in ("valid", "ancestors", "depths"):
        assert torch.equal(getattr(chain, name), getattr(general, name)), name
    limits = torch.tensor([rng.randint(-1, width) for _ in lengths])
    short, other = chain.prune(limits), general.prune(limits)
    assert short.is_line
    for name in ("tokens", "parents", "valid", "ancestors", "depths"):
        assert torch.equal(getattr(short, name), getattr(other, name)), name


def test_a_lone_root():
    tree = DraftTree.root(torch.tensor([7, 8]))
    tree.check(9)
    assert tree.is_line
    assert tree.tokens.tolist() == [[7], [8]]
    assert tree.parents.tolist() == tree.depths.sub(1).tolist() == [[-1], [-1]]
    assert tree.ancestors.shape == (2, 1, 1)
    assert bool(tree.ancestors.all())
    assert tree.prune(torch.tensor([-3, 0])) is tree


@pytest.mark.parametrize("seed", range(10))
def test_prune(seed):
    tree, rows = random_trees(seed)
    rng = random.Random(seed + 100)
    confidence = torch.rand(tree.tokens.shape)
    tree = DraftTree(tree.tokens, tree.parents, confidence)
    limits = [rng.randint(-2, 6) for _ in rows]
    pruned = tree.prune(torch.tensor(limits))
    pruned.check(50)
    assert pruned.confidence is confidence
    for b, limit in enumerate(limits):
        for node in range(tree.num_nodes):
            keep = bool(tree.valid[b, node]) and int(tree.depths[b, node]) <= max(limit, 0)
            wanted = (int(tree.tokens[b, node]), int(tree.parents[b, node])) if keep else (PAD, -1)
            assert (int(pruned.tokens[b, node]), int(pruned.parents[b, node])) == wanted
    assert tree.prune(torch.tensor([tree.num_nodes] * len(rows))) is tree


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.prune(torch.tensor([1])),
        lambda tree: tree.at_most(torch.tensor([2])),
        lambda tree: tree.without([(0, 3), (0, 4)]),
        lambda tree: tree.with_extra_nodes(torch.tensor([[9]]), torch.tensor([[-1]]), 1),
        lambda tree: replace(tree, num_extra_nodes=1).proposed,
    ],
)
def test_a_changed_tree_has_its_own_paths(change):
    """A recorded forward computes the paths of the trees that it ran: they are not those of what is left of them."""
    tree = DraftTree.from_lists([[5, 6, 7, 8, 4]], [[-1, 0, 0, 1, 3]])
    wanted, found = (change(given) for given in (tree, replace(tree, paths=(tree.ancestors, tree.depths))))
    assert found.ancestors.tolist() == wanted.ancestors.tolist()
    assert found.depths.tolist() == wanted.depths.tolist()


def test_from_lists_pads_to_the_longest_row():
    tree = DraftTree.from_lists([[1], [2, 3, 4]], [[-1], [-1, 0, 0]])
    assert tree.tokens.tolist() == [[1, PAD, PAD], [2, 3, 4]]
    assert tree.parents.tolist() == [[-1, -1, -1], [-1, 0, 0]]


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([[1], [PAD]], [[-1], [-1]], r"row 1: node 0 must hold the pending token and have parent -1"),
        ([[1, 2]], [[0, 0]], r"row 0: node 0 must hold the pending token and have parent -1, found \[0\]"),
        ([[1, 2, 3]], [[-1, 2, 0]], r"row 0, node 1: parent 2 is out of order; parents\[i\] must lie in 0\.\.0: sort"),
        ([[1, 2, 3]], [[-1, 0, 2]], r"row 0, node 2: parent 2 is out of order; parents\[i\] must lie in 0\.\.1: sort"),
        ([[1, 2]], [[-1, -1]], r"row 0, node 1: parent -1 is out of order"),
        ([[1, PAD, 3]], [[-1, -1, 1]], r"row 0, node 2: its parent 1 is unused \(PAD\)"),
        ([[1, 2], [1, 9]], [[-1, 0], [-1, 0]], r"row 1, node 1: token 9 is outside the target's vocabulary of 9"),
        ([[1, -7]], [[-1, 0]], r"row 0, node 1: token -7 is outside the target's vocabulary of 9"),
    ],
)
def test_check_names_what_is_wrong(tokens, parents, message):
    with pytest.raises(TreeError, match=message):
        DraftTree.from_lists(tokens, parents).check(9)


def test_check_of_shapes():
    for tokens, parents, message in (
        (torch.zeros(2, 3), torch.zeros(2, 2), r"must both be \(B, N\), found .*: give one parent for each node"),
        (torch.zeros(3), torch.zeros(3), "tokens must be an int64 tensor of 2 dimensions"),
    ):
        with pytest.raises(TreeError, match=message):
            DraftTree(tokens.long(), parents.long()).check()
    DraftTree.from_lists([[1, 99]], [[-1, 0]]).check()  # without a vocabulary any id goes
