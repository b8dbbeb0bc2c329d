"""The suffix automaton against brute force, and the tree that merges its drafts."""

from __future__ import annotations

import random

import pytest

from draftwing.methods import lookup as suffix
from draftwing.methods.lookup import SuffixAutomaton, merge_paths


def match_length(automaton: SuffixAutomaton) -> int:
    """The length of the longest match."""
    return max((match.length for match in automaton.matches(1, 1)), default=0)


def earlier_ends(tokens: list[int], length: int) -> list[int]:
    """The ends, before the last, of all occurrences of the sequence's last ``length`` tokens."""
    tail = tokens[len(tokens) - length :]
    return [end for end in range(length, len(tokens)) if tokens[end - length : end] == tail]


def longest_match(tokens: list[int]) -> int:
    return max((n for n in range(1, len(tokens)) if earlier_ends(tokens, n)), default=0)


def sequences(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        symbols = rng.randint(2, 5)
        tokens = [rng.randrange(symbols) for _ in range(rng.randint(0, 60))]
        # Long repeats do not come about by chance.
        if tokens and rng.random() < 0.5:
            at = rng.randrange(len(tokens))
            tokens = (tokens + tokens[at : at + 20])[-60:]
        out.append(tokens)
    return [*out, [], [1], [1] * 60, [1, 2] * 30, [1, 2, 3] * 20]


def is_prefix(a: list[int], b: list[int]) -> bool:
    return b[: len(a)] == a


def test_match_length() -> None:
    for tokens in sequences(1, 60):
        automaton = SuffixAutomaton()
        assert match_length(automaton) == 0
        for i, token in enumerate(tokens):
            automaton.extend(token)
            assert len(automaton) == i + 1
            assert match_length(automaton) == longest_match(tokens[: i + 1])


def test_continuations_follow_earlier_occurrences() -> None:
    rng = random.Random(2)
    for tokens in sequences(3, 150):
        automaton = SuffixAutomaton(tokens)
        max_tokens, max_branches, min_match = rng.randint(1, 8), rng.randint(1, 5), rng.randint(1, 3)
        found = automaton.continuations(max_tokens, max_branches, min_match)
        longest = longest_match(tokens)
        assert bool(found) == (longest >= min_match)
        assert len(found) <= max_branches
        followers = [
            tokens[end : end + max_tokens] for n in range(min_match, longest + 1) for end in earlier_ends(tokens, n)
        ]
        lengths = [length for length, _ in found]
        assert lengths == sorted(lengths, reverse=True)
        for i, (length, path) in enumerate(found):
            assert path in followers
            assert any(path[0] == tokens[end] for end in earlier_ends(tokens, length))
            assert not any(is_prefix(path, other) for j, (_, other) in enumerate(found) if j != i)
        if found:
            # The first is what followed the longest match, or goes on where that broke off.
            best = [tokens[end : end + max_tokens] for end in earlier_ends(tokens, longest)]
            assert any(is_prefix(path, found[0][1]) for path in best)
            assert lengths[0] == longest


def test_latest_occurrence_is_exact_without_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "REFRESH_DEPTH", 1000)
    for tokens in sequences(4, 150):
        found = SuffixAutomaton(tokens).continuations(5, 1)
        if found:
            latest = earlier_ends(tokens, longest_match(tokens))[-1]
            assert is_prefix(tokens[latest : latest + 5], found[0][1])


# "1 2 3" was followed by 4, then by 5; "2 3" alone by 6 in between, "3" alone by 7.
LATEST = [1, 2, 3, 4, 0, 3, 7, 0, 2, 3, 6, 0, 1, 2, 3, 5, 9, 1, 2, 3]


@pytest.mark.parametrize(
    ("tokens", "args", "wanted"),
    [
        (LATEST, (2, 9), [(3, [5, 9]), (3, [4, 0])]),
        (LATEST, (1, 1), [(3, [5])]),
        (LATEST, (2, 9, 4), []),
        ([2, 3, 6, 0, 1, 2, 3, 5, 1, 2, 3], (1, 9), [(3, [5]), (2, [6])]),  # shorter matches give other branches
        ([1, 2, 3] * 4, (8, 4), [(9, [1, 2, 3, 1, 2, 3, 1, 2])]),  # continued where the sequence's end cuts one
        ([7] * 500, (5, 2), [(499, [7] * 5)]),
        ([], (4, 4), []),
        ([1, 2, 3], (4, 4), []),
        ([1, 1], (0, 4), []),
        ([1, 1], (4, 0), []),
    ],
)
def test_continuations_by_hand(tokens, args, wanted) -> None:
    assert SuffixAutomaton(tokens).continuations(*args) == wanted


def test_incremental_building() -> None:
    rng = random.Random(5)
    tokens = [rng.randrange(50) for _ in range(3000)] + [1] * 3000 + [1, 2] * 1500
    whole = SuffixAutomaton(tokens)
    parts = SuffixAutomaton(tokens[:1000])
    parts.extend_all(tokens[1000:])
    assert whole.continuations(6, 4) == parts.continuations(6, 4)


def test_merge_paths_properties() -> None:
    rng = random.Random(6)
    for _ in range(300):
        paths = [[rng.randrange(3) for _ in range(rng.randint(0, 6))] for _ in range(rng.randint(0, 6))]
        max_nodes = rng.randint(1, 24)
        tokens, parents, sources = merge_paths(9, paths, max_nodes)
        assert (tokens[0], parents[0]) == (9, -1)
        assert len(tokens) == len(parents) <= max_nodes
        assert all(0 <= parents[i] < i for i in range(1, len(parents)))
        nodes: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            nodes.append((*nodes[parent], token))
        # The nodes are the distinct beginnings of the paths, in order, up to the budget.
        expected = list(dict.fromkeys([(), *(tuple(path[:n]) for path in paths for n in range(1, len(path) + 1))]))
        assert nodes == expected[:max_nodes]
        first = [min((i for i, path in enumerate(paths) if tuple(path[: len(n)]) == n), default=-1) for n in nodes]
        assert sources == [-1, *first[1:]]


@pytest.mark.parametrize(
    ("paths", "max_nodes", "wanted"),
    [
        ([[1, 2, 3], [1, 4], [5, 6]], 99, ([0, 1, 2, 3, 4, 5, 6], [-1, 0, 1, 2, 1, 0, 5], [-1, 0, 0, 0, 1, 2, 2])),
        ([[1, 2, 3], [1, 4], [5, 6]], 6, ([0, 1, 2, 3, 4, 5], [-1, 0, 1, 2, 1, 0], [-1, 0, 0, 0, 1, 2])),
        ([[1, 2, 3], [1, 4], [5, 6]], 1, ([0], [-1], [-1])),
        ([], 4, ([0], [-1], [-1])),
    ],
)
def test_merge_paths_by_hand(paths, max_nodes, wanted) -> None:
    assert merge_paths(0, paths, max_nodes) == wanted
