"""Prompt lookup: draft what followed an earlier occurrence of the sequence's last tokens (Saxena 2023).

Code, tables, quotes and answers about a given document repeat themselves. A suffix automaton, extended token by token,
holds the longest suffix of the sequence that occurred in it before, and its positions; what followed there is a draft
that costs no forward pass. The automaton is that of SAM-Decoding (2411.10666); here several matches, the latest and the
first occurrence of each, are merged into a tree.

This file also holds ``ListDrafter``, the base of all drafters that look drafts up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftwing.methods.base import Budget, Drafter, ListTree, NoDrafter, swap_remove
from draftwing.methods.method import DraftMethod, NewDrafter, Source, integer_option
from draftwing.methods.suffix_array import Follower, Match
from draftwing.models.context import Context, Row
from draftwing.sampling import SamplingBatch
from draftwing.tree import DraftTree

# Limits per new token, each a number of states along the suffix links, so that a sequence like "aaaa...", which has as
# many links as tokens, costs constant time too.
REFRESH_DEPTH = 8  # states that record their latest occurrence
WALK_DEPTH = 64  # states that ``continuations`` looks at
COUNT_DEPTH = 64  # states that count a new occurrence, from the longest on

REPEAT_DISCOUNT = 0.3  # relative probability of a second continuation: a shorter match, or an older occurrence


class SuffixAutomaton:
    """The suffix automaton of a growing sequence of token ids, with the positions of its substrings.

    A state stands for the strings that end at the same positions of the sequence; its suffix link leads to the longest
    of their suffixes that also ends elsewhere. A position is a number of tokens: what followed an occurrence with end
    ``e`` starts at ``tokens[e]``. For n tokens there are at most 2n states.

    Every state keeps two ends. The first is exact. The latest is always a true earlier end, but can be out of date: a
    new token is a new occurrence of *all* states along the suffix links, which may be as many as there are tokens, so
    only the first few are updated. Short matches below several longer ones may thus be continued from an older
    occurrence than the last.

    It is an index of texts too: a place is a state, and a token follows as often as the state behind it has occurred.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        # State 0 is the empty string. One list per field: a state is only an index.
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._first_end: list[int] = [0]
        self._latest_end: list[int] = [0]
        self._count: list[int] = [0]
        self._last = 0
        self.extend_all(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend_all(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.extend(token)

    def extend(self, token: int) -> None:
        """Append one token; amortised expected constant time."""
        # The longest matches end here; only now, when "here" is about to become an earlier position.
        state = self._link[self._last]
        for _ in range(REFRESH_DEPTH):
            if state <= 0:
                break
            self._latest_end[state] = len(self._tokens)
            state = self._link[state]
        self._tokens.append(token)
        end = len(self._tokens)
        current = self._add_state({}, end, end, end)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = current
            state = self._link[state]
        self._link[current] = self._target(state, token) if state >= 0 else 0
        self._last = current
        for _ in range(COUNT_DEPTH):
            if current <= 0:
                break
            self._count[current] += 1
            current = self._link[current]

    def _add_state(self, transitions: dict[int, int], length: int, first_end: int, latest_end: int) -> int:
        self._next.append(transitions)
        self._link.append(0)
        self._length.append(length)
        self._first_end.append(first_end)
        self._latest_end.append(latest_end)
        self._count.append(0)
        return len(self._length) - 1

    def _target(self, state: int, token: int) -> int:
        """Return the state of ``state``'s longest string followed by ``token``, split off a longer one if necessary."""
        target = self._next[state][token]
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        # Up to now the shorter strings had the ends of the longer ones, so the ends are copied.
        clone = self._add_state(dict(self._next[target]), length, self._first_end[target], self._latest_end[target])
        self._link[clone] = self._link[target]
        self._count[clone] = self._count[target]
        self._link[target] = clone
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def matches(self, min_length: int, max_matches: int) -> list[Match]:
        """Return the suffixes of the sequence that occurred earlier in it, longest first.

        The earlier occurrence may overlap the suffix: ``[7, 7]`` for ``[7, 7, 7]``. Among suffixes that occurred at the
        same places, only the longest is returned.
        """
        # The last state holds the suffixes that occur nowhere else, so its link is the longest that does.
        matches, state = list[Match](), self._link[self._last]
        while state > 0 and self._length[state] >= min_length and len(matches) < max_matches:
            matches.append(Match(self, self._length[state], state))
            state = self._link[state]
        return matches

    def followers(self, place: int) -> list[Follower]:
        return [Follower(token, self._count[state], state) for token, state in self._next[place].items()]

    def continuations(self, max_tokens: int, max_branches: int, min_match: int = 1) -> list[tuple[int, list[int]]]:
        """Return the continuations of earlier occurrences of the longest matching suffixes of the sequence.

        The longest match comes first, then shorter ones; for each, the continuation of its latest recorded earlier
        occurrence, then that of its first one. None is a prefix of another: a path that repeats the beginning of a
        chosen one is dropped, and one that extends a path cut by the sequence's end replaces it. Returns at most
        ``max_branches`` pairs of a match's length and the 1 to ``max_tokens`` token ids that followed it, of at most
        the 64 longest distinct matches.
        """
        chosen: list[tuple[int, list[int]]] = []
        if max_tokens == 0 or max_branches == 0:
            return chosen
        state = self._link[self._last]
        for _ in range(WALK_DEPTH):
            if state <= 0 or self._length[state] < min_match:
                break
            for end in (self._latest_end[state], self._first_end[state]):
                _choose(chosen, self._length[state], self._tokens[end : end + max_tokens], max_branches)
            if len(chosen) == max_branches and all(len(path) == max_tokens for _, path in chosen):
                break
            state = self._link[state]
        return chosen


def _choose(chosen: list[tuple[int, list[int]]], length: int, path: list[int], max_branches: int) -> None:
    """Add ``path``, which followed a match of ``length``, to ``chosen`` in place, unless it is a prefix of a path."""
    for i, (longer, other) in enumerate(chosen):
        common = min(len(path), len(other))
        if path[:common] == other[:common]:
            if len(path) > common:
                chosen[i] = longer, path
            return
    if len(chosen) < max_branches:
        chosen.append((length, path))


# --- trees -----------------------------------------------------------------------------------------------------------


def merge_paths(root: int, paths: Sequence[Sequence[int]], max_nodes: int) -> tuple[list[int], list[int], list[int]]:
    """Merge continuations of ``root`` into a tree of at most ``max_nodes`` nodes, the first paths first.

    Returns:
        ``(tokens, parents, sources)`` of all nodes: the token, the index of the parent, which is below the node's own,
        and the first path through the node; -1 for the root. No two children of a node have the same token.
    """
    tokens, parents, sources = [root], [-1], [-1]
    children: dict[tuple[int, int], int] = {}
    for source, path in enumerate(paths):
        node = 0
        for token in path:
            child = children.get((node, token))
            if child is None:
                if len(tokens) == max_nodes:
                    return tokens, parents, sources
                child = children[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
                sources.append(source)
            node = child
    return tokens, parents, sources


def node_depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of every node of a tree whose parents come before their children; 0 for the root."""
    depths = [0] * len(parents)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    return depths


def to_draft_tree(rows: Sequence[ListTree], device: torch.device, certain_of: int | None = None) -> DraftTree:
    """Return the rows' trees as one ``DraftTree``; if q is needed (over ``certain_of`` tokens), it is certain."""
    tree = DraftTree.from_lists([row.tokens for row in rows], [row.parents for row in rows], device)
    probs = pad_sequence([torch.tensor(row.node_probs) for row in rows], batch_first=True).to(device)
    is_line = all(row.parents == [*range(-1, len(row.parents) - 1)] for row in rows)
    tree = replace(tree, node_probs=probs, depth=max(row.depth for row in rows), is_line=is_line)
    if certain_of is None:
        return tree
    following = torch.cat([tree.tokens[:, 1:], tree.tokens[:, -1:]], 1).clamp(min=0)  # means nothing at the last node
    one_hot = torch.zeros(*tree.tokens.shape, certain_of, device=device).scatter_(2, following[:, :, None], 1.0)
    return replace(tree, draft_probs=one_hot)


class ListDrafter(Drafter):
    """A drafter that looks its drafts up: no network, no features, and trees that start as lists.

    It has a suffix automaton per row, over prompt and output. The classic rules need V, the size of q.
    """

    costs_forwards = False
    lists = True

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._automata: list[SuffixAutomaton] = []

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        self._automata.append(SuffixAutomaton())

    def remove(self, ctx: Context, row: int) -> None:
        swap_remove(self._automata, row)

    def automaton(self, index: int, row: Row) -> SuffixAutomaton:
        """Return a row's automaton, extended by its new tokens."""
        automaton = self._automata[index]
        automaton.extend_all(row.tokens[len(automaton) :])
        return automaton

    @staticmethod
    def max_paths(budget: Budget) -> tuple[int, int]:
        """Return the most children of a node (1 if children are drawn from q), and the most nodes besides the root."""
        width = 1 if budget.children in ("sampled", "distinct") else budget.width
        return width, budget.depth * width if budget.nodes is None else budget.nodes

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Propose the trees of ``list_trees``: chains if the budget's children are drawn from q."""
        if budget.depth == 0:  # new tokens are read by the next draft
            return ctx.roots()
        certain_of = self._vocab_size if budget.children in ("sampled", "distinct") else None
        return to_draft_tree(self.list_trees(ctx, budget), ctx.device, certain_of)


class LookupDrafter(ListDrafter):
    """Matches the longest suffix of prompt and output that occurred before, and proposes what followed.

    Suffixes have at least ``min_match`` tokens.
    """

    name = "lookup"

    def __init__(self, vocab_size: int, min_match: int = 2) -> None:
        super().__init__(vocab_size)
        self.min_match = min_match

    def list_trees(self, ctx: Context, budget: Budget) -> list[ListTree]:
        """Merge up to ``budget.width`` continuations of ``budget.depth`` tokens; see ``ListDrafter``.

        The longer a match, the likelier its continuation, and a match grows with every accepted token: the probability
        of a node is 1 - 1 / length. The planner learns from acceptance how far that is off.
        """
        num_paths, max_nodes = self.max_paths(budget)
        trees = []
        for index, row in enumerate(ctx.rows):
            continuations = self.automaton(index, row).continuations(budget.depth, num_paths, self.min_match)
            paths = [path for _, path in continuations]
            tokens, parents, sources = merge_paths(row.tokens[-1], paths, 1 + max_nodes)
            depths, probs, branched = node_depths(parents), [1.0], set[int]()
            for node in range(1, len(tokens)):
                length = continuations[sources[node]][0] + depths[node]
                probs.append((1 - 1 / length) * (REPEAT_DISCOUNT if parents[node] in branched else 1))
                branched.add(parents[node])
            trees.append(ListTree(tokens, parents, probs, max(depths)))
        return trees


class Baseline(DraftMethod):
    """No drafts: autoregressive decoding."""

    def new_drafter(self, source: Source) -> NewDrafter:
        return NoDrafter


class Lookup(DraftMethod):
    options: ClassVar = {"min_match": integer_option("min_match", 1)}

    def new_drafter(self, source: Source) -> NewDrafter:
        return partial(LookupDrafter, source.target.vocab_size, **source.options)
