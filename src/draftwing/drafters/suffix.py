"""Drafts out of the sequence itself: what followed the last time that the text ended like this.

Code, tables, quotes and answers about a given document repeat themselves. A suffix automaton, grown by one token at a
time, knows at every moment the longest end of the sequence that stood in it before, and where; what followed there is
a draft that costs no forward pass. The idea is that of SAM-Decoding (arXiv 2411.10666).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from draftwing.drafters.retrieval.following import Follower, Match
from draftwing.errors import ConfigError, TreeError

__all__ = ["SuffixAutomaton", "merge_paths"]

# How many states, from the matched one along its suffix links, learn that they have just occurred again.
_REFRESH_DEPTH = 8
# How many states ``continuations`` looks at; a sequence like "aaaa..." has as many as it has tokens.
_WALK_DEPTH = 64
# How many states, from the longest along its suffix links, count a new token: of short strings in such a sequence there
# are then more than are counted.
_COUNT_DEPTH = 64


class SuffixAutomaton:
    """The suffix automaton of a growing sequence of token ids, with where each of its strings occurred.

    A state stands for the strings that end at the same positions of the sequence; its suffix link leads to the longest
    shorter end of those strings that also ends elsewhere. A position is a number of tokens: what followed an
    occurrence with end ``e`` starts at ``tokens[e]``. For n tokens there are at most 2n states.

    Every state keeps two ends. The first is exact. The latest is always a true and earlier end, but it can be out of
    date: a new token is a new occurrence of *all* states on the path of suffix links, which may be as long as the
    sequence, so only the first few states of the path (the matched one and the next longest) are told. Short matches
    below several longer ones may thus be followed by what came after an older occurrence than the last.

    It is an ``Indexed`` too. A place is a state, and a token follows as often as the state behind it has occurred.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        # State 0 is the empty string. A list per field: a state is only an index.
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._first_end: list[int] = [0]
        self._latest_end: list[int] = [0]
        self._count: list[int] = [0]
        self._last = 0
        self.extend_all(tokens)

    def __len__(self) -> int:
        """The number of tokens in the sequence."""
        return len(self._tokens)

    @property
    def num_states(self) -> int:
        """The number of states, the one of the empty string included."""
        return len(self._length)

    @property
    def match_length(self) -> int:
        """The length, in tokens, of the longest end of the sequence that also occurred earlier in it.

        The earlier occurrence ends before the sequence's end and may overlap it: 2 for ``[7, 7, 7]``. 0 if the last
        token is new, or there is none.
        """
        # The last state holds the ends of the sequence that occur nowhere else, so its link is the longest that does.
        return self._length[self._link[self._last]] if self._last else 0

    def extend_all(self, tokens: Iterable[int]) -> None:
        """Append ``tokens``, in order."""
        for token in tokens:
            self.extend(token)

    def extend(self, token: int) -> None:
        """Append one token; amortised expected constant time."""
        self._refresh()
        self._tokens.append(token)
        end = len(self._tokens)
        current = self._add_state(length=end, transitions={}, first_end=end, latest_end=end)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = current
            state = self._link[state]
        self._link[current] = self._target(state, token) if state >= 0 else 0
        self._last = current
        for _ in range(_COUNT_DEPTH):
            if current <= 0:
                break
            self._count[current] += 1
            current = self._link[current]

    def matches(self, least: int, most: int) -> list[Match]:
        """The ends of the sequence, of at least ``least`` tokens, that occurred earlier in it: ``most``, longest first.

        Of ends that occurred at the same places there is the longest alone.
        """
        found, state = list[Match](), self._link[self._last]
        while state > 0 and self._length[state] >= least and len(found) < most:
            found.append(Match(self, self._length[state], state))
            state = self._link[state]
        return found

    def followers(self, place: int) -> list[Follower]:
        """See ``Indexed``; in the order in which they first occurred."""
        return [Follower(token, self._count[state], state) for token, state in self._next[place].items()]

    def continuations(self, max_tokens: int, max_branches: int, min_match: int = 1) -> list[tuple[int, list[int]]]:
        """What followed earlier occurrences of the longest matching ends of the sequence.

        The longest match comes first, then ever shorter ones; for each, what followed its latest known earlier
        occurrence and then what followed its first one. None is a prefix of another: one that only repeats the
        beginning of a chosen one is dropped, and one that goes on where a chosen one broke off at the sequence's end
        takes its place. At most the 64 longest distinct matches are looked at.

        Args:
            max_tokens: The most tokens in one continuation, at least 0.
            max_branches: The most continuations, at least 0.
            min_match: The least length of a match, in tokens, at least 1.

        Returns:
            At most ``max_branches`` pairs of a match's length and the 1 to ``max_tokens`` token ids that followed it;
            none if nothing matches.

        Raises:
            ConfigError: An argument is below its least value.
        """
        for name, value, least in (
            ("max_tokens", max_tokens, 0),
            ("max_branches", max_branches, 0),
            ("min_match", min_match, 1),
        ):
            if value < least:
                raise ConfigError(f"{name}: expected at least {least}, found {value}; raise it to {least} or more.")
        chosen: list[tuple[int, list[int]]] = []
        if max_tokens == 0 or max_branches == 0:
            return chosen
        state = self._link[self._last]
        for _ in range(_WALK_DEPTH):
            if state <= 0 or self._length[state] < min_match:
                break
            for end in (self._latest_end[state], self._first_end[state]):
                _choose(chosen, self._length[state], self._tokens[end : end + max_tokens], max_branches)
            if len(chosen) == max_branches and all(len(path) == max_tokens for _, path in chosen):
                break
            state = self._link[state]
        return chosen

    def after(self, extra: Sequence[int], max_tokens: int, min_match: int = 1) -> tuple[int, list[int]]:
        """What followed the longest end of the sequence with ``extra`` behind it that stood in the sequence before.

        Nothing is appended: ``extra`` may turn out to be wrong.

        Returns:
            The match's length and the 1 to ``max_tokens`` token ids after its latest known occurrence; ``(0, [])``
            where no match of at least ``min_match`` tokens is followed by anything.
        """
        state = self._link[self._last] if self._last else 0
        length = self._length[state]
        for token in extra:
            while state and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        while state and self._first_end[state] == len(self._tokens):  # it stands at the very end alone
            state = self._link[state]
            length = self._length[state]
        if not state or length < max(min_match, 1) or max_tokens < 1:
            return 0, []
        end = self._latest_end[state]
        end = end if end < len(self._tokens) else self._first_end[state]
        return length, self._tokens[end : end + max_tokens]

    def _add_state(self, *, length: int, transitions: dict[int, int], first_end: int, latest_end: int) -> int:
        self._next.append(transitions)
        self._link.append(0)
        self._length.append(length)
        self._first_end.append(first_end)
        self._latest_end.append(latest_end)
        self._count.append(0)
        return len(self._length) - 1

    def _refresh(self) -> None:
        """Tell the longest matches that they end here; only now, when "here" is about to be an earlier position."""
        state = self._link[self._last]
        for _ in range(_REFRESH_DEPTH):
            if state <= 0:
                break
            self._latest_end[state] = len(self._tokens)
            state = self._link[state]

    def _target(self, state: int, token: int) -> int:
        """The state of ``state``'s longest string followed by ``token``, split off from a longer one if need be."""
        target = self._next[state][token]
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        # Up to now the shorter strings ended wherever the longer ones did, so the ends are copied as they are.
        clone = self._add_state(
            length=length,
            transitions=dict(self._next[target]),
            first_end=self._first_end[target],
            latest_end=self._latest_end[target],
        )
        self._link[clone] = self._link[target]
        self._count[clone] = self._count[target]
        self._link[target] = clone
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        return clone


def _choose(chosen: list[tuple[int, list[int]]], length: int, path: list[int], max_branches: int) -> None:
    """Add ``path``, which followed a match of ``length``, to ``chosen`` in place: no prefixes, and within its size."""
    for i, (longer, other) in enumerate(chosen):
        common = min(len(path), len(other))
        if path[:common] == other[:common]:
            if len(path) > common:
                chosen[i] = longer, path
            return
    if len(chosen) < max_branches:
        chosen.append((length, path))


def merge_paths(root: int, paths: Sequence[Sequence[int]], max_nodes: int) -> tuple[list[int], list[int], list[int]]:
    """Merge paths that all start behind one token into a tree, the first paths first.

    Path 0 gets its nodes, then path 1 those that it does not share with path 0, and so on until the budget is used;
    the path that meets its end is cut there.

    Args:
        root: The token of node 0.
        paths: Token ids in order, each path a continuation of ``root``; the best ones first.
        max_nodes: The most nodes, the root included, at least 1.

    Returns:
        ``(tokens, parents, sources)``, all as long as there are nodes: a node's token; the index of its parent, which
        is below its own; and the first path that goes through it. -1 for node 0. No two children of a node have the
        same token.

    Raises:
        TreeError: ``max_nodes`` is below 1.
    """
    if max_nodes < 1:
        raise TreeError(f"max_nodes: expected at least 1 (the root), found {max_nodes}; raise it to 1 or more.")
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
