"""Draft trees: every drafter proposes tokens in this form.

Node 0 is the *pending* token: already emitted, not yet in the target's KV cache. A lone root is autoregressive
decoding, a chain is classic speculative decoding, and a batch of trees of different sizes is one tensor whose unused
nodes hold ``PAD``.

Shape suffixes: B rows, N nodes, D depth, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from draftwing.checks import listed
from draftwing.errors import TreeError, shown

PAD = -1
T = TypeVar("T")


@dataclass(frozen=True)
class DraftTree:
    """A batch of ragged draft trees.

    Attributes:
        tokens: (B, N) int64. ``tokens[:, 0]`` is the pending token; ``PAD`` marks unused nodes.
        parents: (B, N) int64. ``-1`` for the root and for unused nodes, else ``parents[b, i] < i``.
            Siblings are in the order in which a rule tries them.
        confidence: (B, N) the probability that a node and its whole path are accepted, or None.
        draft_probs: (B, N, V) the draft distribution q from which the *children* of each node were drawn;
            only the classic rules need it.
        node_probs: (B, N) the drafter's probability of each node given its parent, before calibration, or None.
        num_draft_forwards: drafting forwards that the tree took; wide levels may count as more than one. 0 without a
            network; None if as many as the tree is deep.
        is_line: whether every node is the child of the one before, so that an accepted path is in its final slots.
        depth: depth of the deepest node of all rows, if the host knows it.
        paths: ``ancestors`` and ``depths``, if a recorded forward has computed them.
        num_extra_nodes: the last nodes, which are scored for the drafter but not proposed (``with_extra_nodes``).
    """

    tokens: Tensor
    parents: Tensor
    confidence: Tensor | None = None
    draft_probs: Tensor | None = None
    node_probs: Tensor | None = None
    num_draft_forwards: float | None = None
    is_line: bool = False
    depth: int | None = None
    paths: tuple[Tensor, Tensor] | None = None
    num_extra_nodes: int = 0

    @classmethod
    def chain(cls, tokens: Tensor, confidence: Tensor | None = None, draft_probs: Tensor | None = None) -> DraftTree:
        """Each token's child is the next one. ``tokens``: (B, N), ``PAD`` only at the end of a row.

        Raises:
            TreeError: ``tokens`` is not such a tensor.
        """
        _check_ids("tokens", tokens, 2)
        num_nodes = tokens.shape[1]
        parents = torch.arange(-1, num_nodes - 1, device=tokens.device).expand_as(tokens)
        if num_nodes > 1:
            parents = parents.masked_fill(tokens < 0, -1)
        return cls(tokens, parents, confidence, draft_probs, is_line=True, depth=num_nodes - 1)

    @classmethod
    def root(cls, pending: Tensor) -> DraftTree:
        """Trees of one node: ordinary decoding. ``pending``: (B,).

        Raises:
            TreeError: ``pending`` is not such a tensor.
        """
        _check_ids("pending", pending, 1)
        tokens = pending[:, None]
        return cls(tokens, torch.full_like(tokens, -1), is_line=True, depth=0)

    @classmethod
    def from_lists(
        cls, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], device: torch.device | str = "cpu"
    ) -> DraftTree:
        """Ragged Python lists, one per row, padded to the longest.

        Raises:
            TreeError: they are not lists of as many ints each, or there is no such device.
        """
        rows, above = _checked_rows("tokens", tokens), _checked_rows("parents", parents)
        if [len(row) for row in rows] != [len(row) for row in above]:
            raise TreeError(
                f"tokens and parents must be lists of the same lengths, found {shown(tokens)} and {shown(parents)}"
            )
        num_nodes = max(map(len, rows))
        padded = [[*row, *[PAD] * (num_nodes - len(row))] for row in rows]
        padded_parents = [[*row, *[-1] * (num_nodes - len(row))] for row in above]
        try:
            return cls(torch.tensor(padded, device=device), torch.tensor(padded_parents, device=device))
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            raise TreeError(f"device must be a device of this machine, found {shown(device)}: use 'cpu'") from error

    @property
    def num_rows(self) -> int:
        """B."""
        return self.tokens.shape[0]

    @property
    def num_nodes(self) -> int:
        """N, the root and unused nodes counted."""
        return self.tokens.shape[1]

    @cached_property
    def valid(self) -> Tensor:
        """(B, N) bool: the nodes that are used."""
        return self.tokens != PAD

    @cached_property
    def ancestors(self) -> Tensor:
        """(B, N, N) bool: ``[b, i, j]`` where j lies on the path from the root to i, both ends included.

        An unused node has itself alone, so that its attention row is never empty.
        """
        if self.paths is not None:
            return self.paths[0]
        num_nodes = self.num_nodes
        device = self.tokens.device
        if self.is_line:
            order = torch.arange(num_nodes, device=device)
            lower = order[:, None] >= order  # tril_ starts threads for a handful of bytes
            if num_nodes == 1:
                return lower.expand(self.num_rows, 1, 1)
            itself = order[:, None] == order
            return torch.where(self.valid[:, :, None], lower, itself)
        # Paths of length 2^k by repeated squaring of (I + parent): log2(N) products, no loop over nodes.
        reach = torch.eye(num_nodes, device=device).repeat(self.num_rows, 1, 1)
        reach.scatter_(2, self.parents.clamp(min=0)[:, :, None], 1.0)
        has_parent = (self.parents >= 0)[:, :, None]
        reach = torch.where(has_parent, reach, torch.eye(num_nodes, device=device))
        covered = 1
        while covered < num_nodes - 1:
            reach = (reach @ reach).clamp_(max=1.0)
            covered *= 2
        return reach > 0

    @cached_property
    def depths(self) -> Tensor:
        """(B, N) int64: 0 at the root (and at unused nodes)."""
        if self.paths is not None:
            return self.paths[1]
        if self.is_line:
            steps = torch.arange(self.num_nodes, device=self.tokens.device)
            return steps.masked_fill(~self.valid, 0) if self.num_nodes > 1 else steps.expand(self.num_rows, 1)
        return self.ancestors.sum(-1) - 1

    @cached_property
    def max_depth(self) -> int:
        """Depth of the deepest node of all rows: ``depth``, or asked of the device."""
        return int(self.depths.max()) if self.depth is None else self.depth

    def prune(self, max_depths: Tensor, depth: int | None = None) -> DraftTree:
        """Mark nodes deeper than ``max_depths`` (B,) as unused; the root always stays. ``depth``: of what is left."""
        keep = self.depths <= max_depths[:, None].clamp(min=0)
        if keep.device.type == "cpu" and bool(keep.all()):  # elsewhere that would wait for the device
            return self
        tokens, parents = self.tokens.masked_fill(~keep, PAD), self.parents.masked_fill(~keep, -1)
        depth = self.depth if self.is_line else depth
        return replace(self, tokens=tokens, parents=parents, depth=depth, paths=None)

    def at_most(self, counts: Tensor) -> DraftTree:
        """Mark all but the ``counts`` (B,) likeliest nodes of each row as unused; the root always stays.

        Where children were drawn from q, the first ones are kept instead of the likeliest: what is drafted must not
        depend on what was drawn. Nodes that are only scored are not counted.
        """
        start = self.num_nodes - self.num_extra_nodes
        worth = self.valid[:, :start].float()
        if self.confidence is not None and self.draft_probs is None:
            worth = worth * self.confidence[:, :start].float().clamp(min=0) + worth * 1e-30
        worth[:, 0] = torch.inf
        places = worth.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        keep = torch.ones_like(self.valid)
        keep[:, :start] = places <= counts[:, None]
        keep = ~(self.ancestors & ~keep[:, None, :]).any(-1)  # no node without its path
        tokens, parents = self.tokens.masked_fill(~keep, PAD), self.parents.masked_fill(~keep, -1)
        return replace(self, tokens=tokens, parents=parents, depth=self.depth if self.is_line else None, paths=None)

    def without(self, dead: Sequence[tuple[int, int]]) -> DraftTree:
        """The same without some nodes (row, node), below which there must be none either.

        The others keep their numbers; places at the end that no row uses are left out.
        """
        if not dead:
            return self
        device, rows, nodes = self.tokens.device, *zip(*dead, strict=True)
        tokens, parents = self.tokens.clone(), self.parents.clone()
        at = torch.tensor(rows, device=device), torch.tensor(nodes, device=device)
        tokens[at], parents[at] = PAD, -1
        used = (tokens != PAD).any(0).nonzero()
        count = int(used[-1]) + 1
        num_forwards = float(self.max_depth) if self.num_draft_forwards is None else self.num_draft_forwards
        is_line = self.is_line or count == 1
        cut = replace(self, tokens=tokens, parents=parents, num_draft_forwards=num_forwards, is_line=is_line)
        return replace(cut._first(count), depth=count - 1 if is_line else None)

    def _first(self, count: int) -> DraftTree:
        """The first ``count`` nodes, of an unknown depth."""
        tokens, parents = self.tokens[:, :count], self.parents[:, :count]
        confidence, draft_probs, node_probs = (
            None if column is None else column[:, :count]
            for column in (self.confidence, self.draft_probs, self.node_probs)
        )
        return DraftTree(
            tokens, parents, confidence, draft_probs, node_probs, self.num_draft_forwards, is_line=self.is_line
        )

    def with_extra_nodes(self, tokens: Tensor, parents: Tensor, depth: int) -> DraftTree:
        """Append nodes that are scored but must not be accepted.

        Args:
            tokens: (B, K) of the extra nodes.
            parents: (B, K) of the extra nodes: another extra node, or -1 for the root.
            depth: depth of the deepest of them.
        """
        if not tokens.shape[1]:
            return self
        count = self.num_nodes
        above = torch.where(parents < 0, 0, parents + count).masked_fill(tokens == PAD, -1)
        return replace(
            self,
            tokens=torch.cat([self.tokens, tokens], 1),
            parents=torch.cat([self.parents, above], 1),
            confidence=_wider(self.confidence, tokens.shape[1]),
            node_probs=_wider(self.node_probs, tokens.shape[1]),
            draft_probs=_wider(self.draft_probs, tokens.shape[1]),
            is_line=False,
            depth=None if self.depth is None else max(self.depth, depth),
            paths=None,
            num_extra_nodes=tokens.shape[1],
        )

    @property
    def extra_nodes(self) -> tuple[Tensor, Tensor, int]:
        """The arguments of ``with_extra_nodes``."""
        start = self.num_nodes - self.num_extra_nodes
        tokens, parents = self.tokens[:, start:], self.parents[:, start:]
        return tokens, torch.where(parents < start, -1, parents - start), self.max_depth

    @property
    def proposals(self) -> DraftTree:
        """The tree without the extra nodes."""
        return self._first(self.num_nodes - self.num_extra_nodes) if self.num_extra_nodes else self

    @property
    def proposed(self) -> DraftTree:
        """The tree with unused nodes in place of the extra ones."""
        if not self.num_extra_nodes:
            return self
        start = self.num_nodes - self.num_extra_nodes
        is_tail = torch.arange(self.num_nodes, device=self.tokens.device) >= start
        tokens, parents = self.tokens.masked_fill(is_tail, PAD), self.parents.masked_fill(is_tail, -1)
        return replace(self, tokens=tokens, parents=parents, paths=None, num_extra_nodes=0)

    def check(self, vocab_size: int | None = None) -> None:
        """Validate the invariants; for drafters under test and trees that a user wrote.

        Raises:
            TreeError: names the first row and node that break one.
        """
        _check_ids("tokens", self.tokens, 2)
        _check_ids("parents", self.parents, 2)
        if vocab_size is not None and (isinstance(vocab_size, bool) or not isinstance(vocab_size, int)):
            raise TreeError(f"vocab_size must be a whole number or None, found {shown(vocab_size)}")
        if self.tokens.shape != self.parents.shape:
            raise TreeError(
                f"tokens and parents must both be (B, N), found {tuple(self.tokens.shape)} and "
                f"{tuple(self.parents.shape)}: give one parent for each node"
            )
        for row, (tokens, parents) in enumerate(zip(self.tokens.tolist(), self.parents.tolist(), strict=True)):
            if not tokens or tokens[0] == PAD or parents[0] != -1:
                raise TreeError(
                    f"row {row}: node 0 must hold the pending token and have parent -1, found {parents[:1]}"
                )
            for node in range(1, len(tokens)):
                if tokens[node] == PAD:
                    continue
                if not 0 <= parents[node] < node:
                    raise TreeError(
                        f"row {row}, node {node}: parent {parents[node]} is out of order; parents[i] must lie in "
                        f"0..{node - 1}: sort the nodes so that parents come first"
                    )
                if tokens[parents[node]] == PAD:
                    raise TreeError(f"row {row}, node {node}: its parent {parents[node]} is unused (PAD)")
                if vocab_size is not None and not 0 <= tokens[node] < vocab_size:
                    raise TreeError(
                        f"row {row}, node {node}: token {tokens[node]} is outside the target's vocabulary "
                        f"of {vocab_size}"
                    )


def depth_first(parents: Sequence[int], nodes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each of a row's ``nodes`` (ascending, from the root on) and its depth, parents before their children.

    A walk that keeps one state per level always has the parent's. First children come last, so that the states kept at
    the end are those of the most probable path.
    """
    children: dict[int, list[int]] = {node: [] for node in nodes}
    for node in nodes[1:]:
        children[parents[node]].append(node)
    waiting = [(nodes[0], 0)]
    while waiting:
        node, depth = waiting.pop()
        yield node, depth
        waiting += [(child, depth + 1) for child in children[node]]


def latest_state(path: Sequence[tuple[int, T]], nodes: Sequence[int], start: T) -> tuple[T, int]:
    """Return the state after the first ``nodes`` that a walked path, of nodes and states, shares, and their number."""
    shared = 0
    for node, (walked, after) in zip(nodes, path, strict=False):
        if node != walked:
            break
        start, shared = after, shared + 1
    return start, shared


def last_tokens(parents: Tensor, nodes: Tensor, count: int) -> Tensor:
    """Return (B, M, count) each node and what precedes it, the oldest first, for parents (B, N) and nodes (B, M).

    -1 is the last committed token, -2 the one before.
    """
    found = [nodes]
    for _ in range(count - 1):
        node = found[0]
        found.insert(0, torch.where(node >= 0, parents.gather(1, node.clamp(min=0)), node - 1))
    return torch.stack(found, 2)


def _check_ids(name: str, ids: object, ndim: int) -> None:
    if not isinstance(ids, Tensor) or ids.ndim != ndim or ids.dtype != torch.int64 or ids.is_meta or ids.is_sparse:
        raise TreeError(f"{name} must be an int64 tensor of {ndim} dimension{'s' * (ndim > 1)}, found {shown(ids)}")


def _checked_rows(name: str, rows: object) -> list[list[int]]:
    """Return lists of lists of ints that int64 holds; at least one row, and no empty one."""
    lists = [listed(row, 1 << 20) for row in listed(rows, 1 << 20) or ()]
    if not lists or not all(row and all(type(each) is int and abs(each) < 2**63 for each in row) for row in lists):
        raise TreeError(f"{name} must be one list of ints for each row, found {shown(rows)}: write [[5, 6], [7]]")
    return [row for row in lists if row is not None]


def _wider(values: Tensor | None, count: int) -> Tensor | None:
    """Append zeros for ``count`` nodes to (B, N, ...)."""
    if values is None:
        return None
    return torch.cat([values, values.new_zeros(values.shape[0], count, *values.shape[2:])], 1)


@dataclass(frozen=True)
class GrowthRule:
    """The worth of a tree's nodes while it grows, in seconds (see ``budget.planner``).

    A node is reached with the product of its path's acceptance rates, which a table for its level gives by the
    drafter's probability. Nodes are verified as long as they bring more than they cost, and another level is drafted
    below those that are worth its time.

    Attributes:
        knots, rates: (tables, K) float32: drafter probabilities and the acceptance rates there; the last table serves
            deeper levels.
        gains, costs: (depth,) float32, by level: the value of reaching the next level, the seconds of its first node.
        verify: (max_nodes + 3,) float32: seconds to verify that many nodes of each row, the root included.
        worth: seconds that a token is worth.
        share: time of each further node of a level, as a share of the first one's.
        max_depth, max_nodes: levels and nodes that the tables cover, the root not included.
    """

    knots: np.ndarray
    rates: np.ndarray
    gains: np.ndarray
    costs: np.ndarray
    verify: np.ndarray
    worth: float
    share: float
    max_depth: int = field(init=False)
    max_nodes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_depth", len(self.gains))
        object.__setattr__(self, "max_nodes", len(self.verify) - 3)


class Emitted(NamedTuple):
    """Tokens that one step emits for a row, on the host.

    Attributes:
        tokens: the accepted draft tokens, then the bonus token.
        num_drafted: nodes of the row's tree, the root not included.
        depth: depth of the row's tree.
        finite: whether the scores that these tokens were drawn from are finite.
    """

    tokens: list[int]
    num_drafted: int
    depth: int
    finite: bool


@dataclass(frozen=True)
class Accepted:
    """The nodes that one step accepts.

    Attributes:
        path: (B, D + 1) int64 indices of the accepted nodes, the root first, then ``PAD``.
        num: (B,) accepted draft nodes, the root not included.
        bonus: (B,) the token after the last accepted node: the next pending token.
        on_host: emitted tokens, if the rule was applied on the host, so that the tensors need not be read.
        own: computes the path in the numbering of one of several drafters, PAD from the first node that it did not
            propose; None if that is ``path``.
    """

    path: Tensor
    num: Tensor
    bonus: Tensor
    on_host: list[Emitted] | None = None
    own: Callable[[], Tensor] | None = None

    @property
    def own_path(self) -> Tensor:
        """(B, D + 1) the accepted nodes in the numbering of the drafter that observes the step."""
        return self.path if self.own is None else self.own()
