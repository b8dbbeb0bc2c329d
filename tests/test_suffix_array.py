"""Suffix arrays, the tokens after a match, and the trees grown from it: all against brute force."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from draftwing.methods import lookup as suffix
from draftwing.methods.lookup import SuffixAutomaton
from draftwing.methods.suffix_array import (
    END,
    Match,
    SuffixArray,
    grow_tree,
    join_texts,
    sort_by_doubling,
    sort_suffixes,
)

# The same examples on every machine, however busy it is.
EVERYWHERE = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
TOKENS = st.integers(0, 3)
TEXT = st.lists(TOKENS, max_size=24)
TEXTS = st.lists(TEXT, max_size=5)
WORD = st.lists(TOKENS, min_size=1, max_size=5)


def followers(texts: list[list[int]], pattern: list[int]) -> Counter[int]:
    """What follows each occurrence of a pattern in any of the texts."""
    size = len(pattern)
    return Counter(
        text[i + size] for text in texts for i in range(len(text) - size) if text[i : i + size] == list(pattern)
    )


def followers_of(indexed, place) -> Counter[int]:
    return Counter({each.token: each.times for each in indexed.followers(place)})


def brute_tree(texts: list[list[int]], pattern: list[int], most: int, depth: int, width: int):
    """The best nodes of the trie of all continuations, as paths with their chances: written out, then cut."""
    every: dict[tuple[int, ...], float] = {}
    told: dict[tuple[int, ...], float] = {}

    def expand(path: tuple[int, ...], reached: float) -> None:
        found = followers(texts, [*pattern, *path])
        total = found.total()
        if len(path) == depth or not total:
            return
        # Equally frequent ones in the order of their ids, as the array gives them.
        for token, times in sorted(found.items(), key=lambda each: (-each[1], each[0]))[:width]:
            told[*path, token] = times / total * (1 - 1 / (len(pattern) + len(path) + total))
            every[*path, token] = reached * told[*path, token]
            expand((*path, token), every[*path, token])

    expand((), 1.0)
    values = sorted(every.values(), reverse=True)[:most]
    return every, told, values


# --- sorting and searching -------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-1, 3), max_size=40))
@EVERYWHERE
def test_suffixes_are_sorted(tokens):
    wanted = sorted(range(len(tokens)), key=lambda start: tokens[start:])
    given_ids = np.array(tokens, dtype=np.int32)
    assert sort_suffixes(given_ids).tolist() == wanted
    if len(tokens) > 1:
        assert sort_by_doubling(given_ids).tolist() == wanted


@pytest.mark.parametrize("tokens", [[5] * 300, [70000, 3, 70000, 3, 0], [0, 2**30, END] * 20])
def test_without_the_library_suffixes_are_sorted_too(tokens, monkeypatch):
    given_ids = np.array(tokens, dtype=np.int32)
    fast = sort_suffixes(given_ids)
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)  # its import now fails
    slow = sort_suffixes(given_ids)
    assert fast.tolist() == slow.tolist() == sorted(range(len(tokens)), key=lambda start: tokens[start:])
    assert fast.dtype == slow.dtype == np.int32


def test_texts_are_joined():
    assert join_texts([]).tolist() == []
    assert join_texts([[1, 2], [], np.array([3])]).tolist() == [1, 2, END, END, 3, END]
    assert join_texts([[1]]).dtype == np.int32


@given(TEXTS, WORD)
@EVERYWHERE
def test_every_occurrence_is_found(texts, pattern):
    found = SuffixArray(join_texts(texts))
    low, high = found.find(pattern)
    tokens = found.tokens.tolist()
    wanted = [i for i in range(len(tokens)) if tokens[i : i + len(pattern)] == pattern]
    assert sorted(found.order[low:high].tolist()) == wanted


@given(TEXTS, st.lists(TOKENS, max_size=10), st.integers(1, 3), st.integers(1, 6))
@example([[1, 2, 3, 0]], [1, 2, 3], 1, 3)  # all of the ending is found
@EVERYWHERE
def test_the_longest_match_and_what_follows_it(texts, ending, least, most):
    found = SuffixArray(join_texts(texts))
    lengths = [n for n in range(least, min(most, len(ending)) + 1) if followers(texts, ending[-n:])]
    match = found.match(ending, least, most)
    assert found.longest(ending, least, most) == max(lengths, default=0)
    assert (match is None) == (not lengths)
    if match is not None:
        assert match.length == lengths[-1]
        assert followers_of(found, match.place) == followers(texts, ending[-match.length :])
        for each in found.followers(match.place):
            wanted = followers(texts, [*ending[-match.length :], each.token])
            assert followers_of(found, each.place) == wanted


def test_many_occurrences_are_sampled_evenly():
    tokens = [1, 2] * 3000 + [1, 3] * 1000
    found = SuffixArray(join_texts([tokens]))
    counts = followers_of(found, found.place([1]))
    assert counts.total() == 1024
    assert 0.74 < counts[2] / counts.total() < 0.76
    assert counts[3] == 1024 - counts[2]


def test_ids_outside_of_the_vocabulary_follow_nothing():
    """Only a damaged file has them: a drafted id that the target has not would be looked up out of bounds."""
    found = SuffixArray(join_texts([[1, 9, 1, 2], [3, 9]]), vocab_size=9)
    assert [each.token for each in found.followers(found.place([1]))] == [2]
    assert found.followers(found.place([3])) == []


# --- the automaton's counts ------------------------------------------------------------------------------------------


@given(st.lists(TOKENS, max_size=40))
@EVERYWHERE
def test_the_automaton_counts_as_often_as_there_are_occurrences(tokens):
    automaton = SuffixAutomaton(tokens)
    earlier = [n for n in range(1, len(tokens)) if followers([tokens], tokens[-n:])]
    found = automaton.matches(1, 99)
    assert max((match.length for match in found), default=0) == max(earlier, default=0)
    assert [match.length for match in found] == sorted({match.length for match in found}, reverse=True)
    for match in found:
        ending = tokens[-match.length :]
        assert followers_of(automaton, match.place) == followers([tokens], ending)
        for each in automaton.followers(match.place):
            assert followers_of(automaton, each.place) == followers([tokens], [*ending, each.token])


def test_a_long_repetition_counts_its_longest_strings_alone(monkeypatch):
    monkeypatch.setattr(suffix, "COUNT_DEPTH", 4)
    automaton = SuffixAutomaton([7] * 50)
    (match,) = automaton.matches(1, 1)
    assert match.length == 49
    assert followers_of(automaton, match.place) == {7: 1}
    assert followers_of(automaton, 0) == {7: 4}  # 50 in truth


@pytest.mark.parametrize(("args", "lengths"), [((1, 9), [3, 2]), ((3, 9), [3]), ((1, 1), [3]), ((4, 9), [])])
def test_matches_within_limits(args, lengths):
    automaton = SuffixAutomaton([2, 3, 6, 0, 1, 2, 3, 5, 1, 2, 3])
    assert [match.length for match in automaton.matches(*args)] == lengths


# --- trees -----------------------------------------------------------------------------------------------------------


@given(TEXTS, WORD, st.integers(1, 12), st.integers(0, 4), st.integers(1, 4))
@example([[1, 2, 0], [1, 2, 0], [1, 3], [1, 3]], [1], 3, 2, 2)  # 0 is sure to follow 2, and yet less likely than 3
@EVERYWHERE
def test_a_tree_has_the_likeliest_paths_of_the_trie(texts, pattern, most, depth, width):
    indexed = SuffixArray(join_texts(texts))
    grown = grow_tree(9, Match(indexed, len(pattern), indexed.place(pattern)), most, depth, width)
    every, told, values = brute_tree(texts, pattern, most, depth, width)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(grown.tokens[1:], grown.parents[1:], strict=True):
        assert parent < len(paths)
        paths.append((*paths[parent], token))
    assert (grown.tokens[0], grown.parents[0], grown.node_probs[0]) == (9, -1, 1.0)
    assert len(set(paths)) == len(paths)
    assert set(paths[1:]) <= set(every)
    assert grown.node_probs[1:] == pytest.approx([told[path] for path in paths[1:]])
    assert [every[path] for path in paths[1:]] == pytest.approx(values)
    assert grown.depth == max(map(len, paths))
    assert grown.score == pytest.approx(sum(values))


def test_a_tree_by_hand():
    texts = SuffixArray(join_texts([[1, 2, 3], [1, 2, 4], [1, 5], [1, 2, 3]]))
    match = texts.match([8, 1], 1, 4)
    assert match is not None
    assert match.length == 1
    grown = grow_tree(1, match, 9, 4, 4)
    assert (grown.tokens, grown.parents) == ([1, 2, 3, 5, 4], [-1, 0, 1, 0, 1])
    # 2 follows 3 of 4 times; of a match of length 1 met 4 times that is believed to 4 / 5; and so on.
    assert grown.node_probs == pytest.approx([1, 3 / 4 * 4 / 5, 2 / 3 * 4 / 5, 1 / 4 * 4 / 5, 1 / 3 * 4 / 5])
    chain = grow_tree(1, match, 9, 4, 1)
    assert (chain.tokens, chain.parents, chain.depth) == ([1, 2, 3], [-1, 0, 1], 2)
    assert grow_tree(1, match, 1, 4, 4).tokens == [1, 2]
    assert grow_tree(1, match, 9, 0, 4).tokens == [1]
