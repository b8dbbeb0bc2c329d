"""Draft trees that a network grows level by level: what a draft is asked for, how it grows, and the finished tree.

    chain     one child each                                                     Leviathan et al. 2211.17192
    static    a tree of a fixed shape; EAGLE-1's has 25 nodes                    EAGLE 2401.15077
    dynamic   the best nodes of each level are expanded, and in the end the      EAGLE-2 2406.16858
              best of all nodes are kept
    by rule   a dynamic tree whose depth, width and size follow from measured
              costs (``GrowthRule``)

Under the classic acceptance rules the shape must not depend on the drawn tokens: they use chains and static trees.
The CPU kernel grows the same trees in one call (``cpu/native/drafts.h``); tests/test_drafts.py compares the two.

Shape suffixes: B rows, N nodes, W nodes of one level (or catch-up entries), C children of each, F features, H hidden,
V vocabulary.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.methods.base import Budget
from draftwing.methods.calibration import Calibration
from draftwing.models.cache import View
from draftwing.models.context import Context, TargetOutput
from draftwing.noise import DRAFT, AcceptArgs, gumbel, hash_bits
from draftwing.sampling import History, SamplingBatch
from draftwing.torch_utils import on_device
from draftwing.tree import PAD, DraftTree, GrowthRule

DEFAULT = Calibration()
UNKNOWN_PROB = 0.5  # for nodes of drafters that give no probability: the acceptance rate of their depth decides

# Runs one level: the tree, its first new node, the tokens (B, W) that the entries read (None: their own) and the states
# (B, W, H) -> logits (B, W, V) and new states.
RunLevel = Callable[[DraftTree, int, Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class DraftRequest:
    """A tree to draft for every row, as plain data for whatever runs the network.

    Before a row's tree grows, the network reads the row's unread entries; the last one is the root's.
    """

    ctx: Context  # the running rows
    active: Sequence[bool]  # (B,) rows to draft for; the others get a lone root
    # sampling, budget: the rows' sampling, and shape and size of the trees
    sampling: SamplingBatch
    budget: Budget
    calibration: Calibration  # how scores become probabilities at T > 0
    tokens: Sequence[Sequence[int]]  # token ids of each row's unread entries
    lengths: Sequence[int]  # (B,) entries of each row that are in its KV slots already
    root_slots: Sequence[int]  # (B,) KV slot of each root
    features: Tensor | None = None  # (B, at least W, F) of the unread entries; None if the network reads tokens alone
    view: View | None = None  # the KV slots that attention reads, of ``lengths``; None for all
    prompt_lengths: Sequence[int] | None = None  # (B,) for rotations that depend on them
    wants_places: bool = False  # True if ``Drafted.places`` is needed

    @property
    def roots(self) -> list[int]:
        """(B,) the pending tokens."""
        return [row.tokens[row.length] for row in self.ctx.rows]

    @property
    def starts(self) -> list[int]:
        """(B,) absolute position of the token after each root."""
        return [row.length + 1 for row in self.ctx.rows]

    @property
    def num_entries(self) -> int:
        """W, the unread entries of the row that has most."""
        return max(map(len, self.tokens))

    @property
    def max_nodes(self) -> int:
        """Nodes that may be run below the root."""
        return len(self.budget.paths) if self.budget.paths else self.budget.width * self.budget.depth

    def within(self, depth: int) -> DraftRequest:
        """The same request with at most ``depth`` levels, for a network whose context ends there."""
        return self if depth >= self.budget.depth else replace(self, budget=cut_to_depth(self.budget, depth))

    def builder(self) -> TreeBuilder:
        """To grow the trees level by level."""
        history = self.ctx.history() if self.sampling.penalises else None
        return TreeBuilder(
            self.ctx.pending(), self.active, self.starts, self.sampling, self.budget, self.calibration,
            history=history, wants_places=self.wants_places,
        )  # fmt: skip


def cut_to_depth(budget: Budget, depth: int) -> Budget:
    """A budget of fewer levels."""
    if budget.paths is None or depth == 0:
        return replace(budget, depth=depth, paths=None)
    return replace(budget, paths=tuple(path for path in budget.paths if len(path) <= depth))


class VerifyRequest(NamedTuple):
    """Asks a runner that drafts to verify the trees in the same call with the target's ``runner``.

    ``lengths`` (B,) are the committed KV slots of each row; ``accept`` is how the target draws tokens.
    """

    runner: object
    lengths: Sequence[int]
    accept: AcceptArgs


class Drafted(NamedTuple):
    """Finished trees."""

    tree: DraftTree  # the trees to verify
    # (B, N) index of each node among those that the network ran, in slot order; PAD for leaves, which it did not run.
    # None if each node has its own index.
    places: Tensor | None = None
    num_levels: int = 0  # levels below the root that the network ran
    # (B, at most N, H) of a chain: second output of a network that reads tokens alone, for the nodes it ran
    states: Tensor | None = None
    # the target's forward of ``tree``, if a ``VerifyRequest`` could be served in the same call
    verified: TargetOutput | None = None
    # finishes the target's forward of ``tree``, part of which drafting has run: returns (B, N, V) logits
    resume: Callable[[], Tensor] | None = None

    def slots_of(self, path: Tensor) -> Tensor:
        """``places`` of the nodes on a path (B, D); PAD if the network did not run them."""
        if self.places is None:
            return path
        return self.places.gather(1, path.clamp(min=0)).masked_fill(path == PAD, PAD)


# --- static trees ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StaticLevel:
    """One level of a static tree."""

    parents: tuple[int, ...]  # index of each node's parent among the expanded nodes of the level above
    ranks: tuple[int, ...]  # which child of its parent each node is, from 0
    expanded: tuple[int, ...]  # indices of the nodes that have children

    @cache  # noqa: B019  # a handful of shapes, which recorded drafts refer to by address
    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """``parents``, ``ranks`` and ``expanded`` as int64 on a device."""
        with torch.inference_mode(False):
            columns = (self.parents, self.ranks, self.expanded)
            parents, ranks, expanded = (torch.tensor(column, dtype=torch.int64, device=device) for column in columns)
        return parents, ranks, expanded


@lru_cache(maxsize=64)
def static_levels(paths: tuple[tuple[int, ...], ...]) -> tuple[StaticLevel, ...]:
    """The levels of a static tree from its paths of ranks: ``(0, 1)`` is the second child of the root's first child."""
    by_depth: dict[int, list[tuple[int, ...]]] = {}
    for path in sorted(paths, key=lambda path: (len(path), path)):
        by_depth.setdefault(len(path), []).append(path)
    inner: set[tuple[int, ...]] = {path[:-1] for path in paths}
    above: list[tuple[int, ...]] = [()]
    levels = []
    for depth in range(1, len(by_depth) + 1):
        nodes, index = by_depth[depth], {path: i for i, path in enumerate(above)}
        expanded = tuple(i for i, path in enumerate(nodes) if path in inner)
        levels.append(StaticLevel(tuple(index[p[:-1]] for p in nodes), tuple(p[-1] for p in nodes), expanded))
        above = [nodes[i] for i in expanded]
    return tuple(levels)


# --- children --------------------------------------------------------------------------------------------------------


class Children:
    """Chooses the children of nodes from their scores.

    At T > 0 they are the best tokens under the target's own noise (``keyed``): a sample of the draft distribution
    without replacement, and most often the very token that the target will draw. The classic rules need children that
    are drawn from q (``sampled``, ``distinct``).

    Args:
        kind: ``Budget.children``.
        starts: (B,) absolute position of the token after each root.
    """

    def __init__(self, sampling: SamplingBatch, kind: str, calibration: Calibration, starts: Sequence[int]) -> None:
        self._sampling, self._kind, self._calibration, self._starts = sampling, kind, calibration, starts
        self.are_drawn = kind in ("sampled", "distinct")
        self.probs: list[Tensor] = []  # q of every level that was drawn from, (B, W, V) each

    def best(self, scores: Tensor, level: int, count: int) -> tuple[Tensor, Tensor]:
        """``count`` tokens after each node (B, W, V), and their log probabilities: (B, W, C) both."""
        if self.are_drawn:
            return self.draw(scores, level, count)
        ranked = self.ranked(scores, level)
        tokens = ranked.topk(count, dim=-1).indices
        return tokens, self.log_prob(scores, ranked, tokens)

    def ranked(self, scores: Tensor, level: int) -> Tensor:
        """The numbers by which children are chosen: scores under the target's noise, or without it (``top``)."""
        if self._kind == "top":
            return scores
        sampling, scale, scaled = self._sampling, self._calibration.scale, scores
        if scale != 1 and not sampling.all_greedy:
            scaled = torch.where(sampling.greedy, scores, scores * scale) if sampling.num_greedy else scores * scale
        return sampling.perturb_level(scaled, self._starts, level)

    def draw(self, scores: Tensor, level: int, count: int) -> tuple[Tensor, Tensor]:
        """Children drawn from q with the drafter's own noise, in drawing order: tokens and log probs (B, W, C)."""
        probs = self._sampling.probs(scores)
        self.probs.append(probs)
        rows, width, vocab = probs.shape
        independent = count if self._kind == "sampled" else 1
        ids = torch.arange(vocab, device=probs.device)
        which = torch.arange(width * independent, device=probs.device)[:, None]
        noise = torch.stack(
            [
                gumbel(hash_bits(seed, (DRAFT, start, level, which), ids))
                for seed, start in zip(self._sampling.seeds, self._starts, strict=True)
            ]
        ).view(rows, width, independent, vocab)
        perturbed = probs.log()[:, :, None] + noise
        if independent > 1 or count == 1:
            best = perturbed.max(-1)
            tokens, alive = best.indices, best.values.isfinite()
        else:  # the top k under Gumbel noise are k draws without replacement, in order
            top = perturbed[:, :, 0].topk(count, dim=-1)
            tokens, alive = top.indices, top.values.isfinite()
        return tokens, probs.log().gather(-1, tokens).masked_fill(~alive, -torch.inf)

    def log_prob(self, scores: Tensor, ranked: Tensor, tokens: Tensor) -> Tensor:
        """Log of the probability that each of ``tokens`` (B, W, C) is the one that the target draws."""
        softmax = scores.gather(-1, tokens) - scores.logsumexp(-1, keepdim=True)
        if self._sampling.all_greedy or self._kind == "top":
            return softmax.float()
        return torch.where(self._sampling.greedy, softmax, self._calibration.log_chance(ranked, tokens)).float()


# --- growing ---------------------------------------------------------------------------------------------------------


class TreeBuilder:
    """The trees of all rows under construction.

    Call ``extend`` with the logits after the newest level's expanded nodes, then run ``expanded`` from node ``first``
    on for the next logits, until ``done``; ``finish`` returns the trees to verify. ``grow`` does all that.

    Args:
        roots: (B,) pending tokens.
        active: rows to draft for; (B, 1) int64 in a recording, where the host must not know.
        starts: (B,) absolute position of the token after each root.
        history: committed tokens, if a row has penalties.
    """

    def __init__(
        self,
        roots: Tensor,
        active: Sequence[bool] | Tensor,
        starts: Sequence[int],
        sampling: SamplingBatch,
        budget: Budget,
        calibration: Calibration = DEFAULT,
        *,
        history: History | None = None,
        wants_places: bool = False,
    ) -> None:
        self._sampling, self._budget, self._history, self._wants_places = sampling, budget, history, wants_places
        self._children = Children(sampling, budget.children, calibration, starts)
        self._tokens = roots[:, None]
        self._parents = torch.full_like(self._tokens, -1)
        # A root of log probability -inf has no children: that is how rows are left out.
        rows = active if isinstance(active, Tensor) else on_device(list(map(int, active)), roots.device)[:, None]
        self._log_probs = torch.zeros(self._tokens.shape, device=roots.device).masked_fill(rows == 0, -torch.inf)
        self._expanded = torch.zeros_like(self._tokens)  # nodes that were run, or will be next
        self._expanded_parents = self._parents
        self._kept: Tensor | None = None  # (B, N) nodes of the finished tree; None for all
        is_static = budget.paths or (self._children.are_drawn and budget.width > 1)
        self._static = static_levels(budget.shape()) if is_static else ()
        self.is_chain = budget.width == 1 and not self._static
        self.depth = len(self._static) or budget.depth
        self.level = self.first = 0
        self._ruled: RuledTrees | None = None
        if budget.rule is not None:
            assert not self._static
            self.depth = min(self.depth, budget.rule.max_depth)
            limit = self.depth if self.is_chain else budget.nodes
            self._ruled = RuledTrees.start(budget.rule, roots.tolist(), (rows[:, 0] != 0).tolist(), budget.width, limit)
        self._is_stopped = False

    def grow(self, logits: Tensor, states: Tensor | None, run_level: RunLevel, *, shifted: bool) -> Drafted:
        """Grow the trees from the roots' logits (B, 1, V) and states (B, 1, H).

        If ``shifted``, an entry reads its own token, not its parent's.
        """
        start = 0
        while True:
            self.extend(logits)
            if self.done:
                return self.finish()
            tree, first = self.expanded(), self.first
            above = tree.parents[:, first:].clamp(min=start)  # an unused node may follow any
            ids = None if shifted else tree.tokens.gather(1, above)
            if states is not None:
                states = states.gather(1, (above - start)[:, :, None].expand(-1, -1, states.shape[2]))
            logits, states = run_level(tree, first, ids, states)
            start = first

    @property
    def done(self) -> bool:
        """True if the trees are complete."""
        return self._is_stopped or self.level == self.depth

    @property
    def num_newest(self) -> int:
        """W: expanded nodes of the newest level, unused ones included."""
        if self._ruled is not None:
            return self._ruled.num_newest
        return 1 if self.is_chain else self._expanded.shape[1] - self.first

    def expanded(self) -> DraftTree:
        """The expanded nodes as a tree: what the network runs, from node ``first`` on."""
        if self._ruled is not None:
            return self._ruled.expanded_tree(self._tokens.device)
        if self.is_chain:
            return DraftTree.chain(self._tokens)
        return DraftTree(self._tokens.gather(1, self._expanded), self._expanded_parents, depth=self.level)

    def extend(self, logits: Tensor, trust: Tensor | None = None) -> None:
        """Choose the next level from ``logits`` (B, W, V) after the newest expanded nodes.

        (B, 1, V) if all of them share one distribution: a network that predicts several tokens in one pass has one per
        level. ``trust`` (B, W): factors on the children's probabilities.
        """
        width, level = self.num_newest, self.level
        if self._history is not None or self._children.are_drawn:  # scores or draws then differ by node
            logits = logits.expand(-1, width, -1)
        scores = self._scores(logits)
        self.level += 1
        if self.is_chain and self._ruled is None:  # nodes are not compared: a softmax over V would be wasted
            if self._children.are_drawn:
                drawn, log_probs = self._children.draw(scores, level, 1)
                tokens = drawn[:, :, 0].masked_fill(~log_probs[:, :, 0].isfinite(), PAD)
            else:
                tokens = self._children.ranked(scores, level).argmax(-1)
            unused = (self._tokens[:, -1:] == PAD) | self._log_probs.isinf()
            self._tokens = torch.cat([self._tokens, tokens.masked_fill(unused, PAD)], 1)
            self.first = self.level
            return
        static = self._static[level] if self._static else None
        if self._ruled is not None:
            scores = scores.masked_fill(scores.isnan(), -torch.inf)
        num_ranks = max(static.ranks) + 1 if static else self._budget.width
        count = min(num_ranks, scores.shape[-1])
        tokens, log_probs = self._children.best(scores, level, count)
        if trust is not None:
            log_probs = log_probs + trust.log()[:, :, None]
        tokens, log_probs = tokens.expand(-1, width, -1), log_probs.expand(-1, width, -1)
        if self._ruled is not None:  # on the host, which handles a few numbers faster
            self._ruled.branch(tokens.tolist(), log_probs.tolist())
            self._is_stopped = self.level < self.depth and not self._ruled.choose_expanded()
            self.first = self._ruled.first
            return
        frontier, start = self._expanded[:, self.first :], self._tokens.shape[1]
        log_probs = self._log_probs.gather(1, frontier)[:, :, None] + log_probs
        if static is not None:
            missing = num_ranks - count  # ranks that a small vocabulary does not have become unused nodes
            tokens, log_probs = F.pad(tokens, (0, missing)), F.pad(log_probs, (0, missing), value=-torch.inf)
            parents, ranks, inner = static.tensors(scores.device)
            chosen = parents * num_ranks + ranks
            self._append(tokens.flatten(1)[:, chosen], frontier[:, parents], log_probs.flatten(1)[:, chosen])
            nodes, above = (start + inner).expand(len(tokens), -1), parents[inner].expand(len(tokens), -1)
        else:
            flat = log_probs.flatten(1)
            best = flat.topk(min(self._budget.width, width * count), dim=-1).indices
            above = best // count
            if self._budget.nodes is None:  # only expanded nodes are kept
                self._append(tokens.flatten(1).gather(1, best), frontier.gather(1, above), flat.gather(1, best))
                nodes = start + torch.arange(best.shape[1], device=best.device).expand_as(best)
            else:
                self._append(tokens.flatten(1), frontier[:, :, None].expand(-1, -1, count).flatten(1), flat)
                nodes = start + best
        above, self.first = self.first + above, self._expanded.shape[1]
        self._expanded = torch.cat([self._expanded, nodes], 1)
        unused = self._tokens.gather(1, nodes) == PAD
        self._expanded_parents = torch.cat([self._expanded_parents, above.masked_fill(unused, -1)], 1)

    def finish(self) -> Drafted:
        """The trees to verify: all nodes, the best ``budget.nodes`` of them, or those that the rule keeps."""
        if self._ruled is not None:
            return self._ruled.finish(self._tokens.device)
        levels = self.level - 1
        if self.is_chain:
            tree = DraftTree.chain(self._tokens, None, self._draft_probs())
            return Drafted(replace(tree, num_draft_forwards=self.level), None, levels)
        count = self._budget.nodes
        if count is None or count >= self._tokens.shape[1] - 1 or self._static:
            tree = DraftTree(self._tokens, self._parents, self._log_probs.exp(), self._draft_probs())
        else:
            tree = self._rerank(count)
        places = None
        if self._wants_places:
            index = torch.arange(self._expanded.shape[1], device=self._tokens.device).expand_as(self._expanded)
            places = torch.full_like(self._tokens, PAD).scatter(1, self._expanded, index)
            places = places if self._kept is None else places.gather(1, self._kept)
        return Drafted(replace(tree, depth=self.level, num_draft_forwards=self.level), places, levels)

    def _append(self, tokens: Tensor, parents: Tensor, log_probs: Tensor) -> None:
        # A child of an unused node, or one of probability 0, is unused too.
        unused = log_probs.isinf() | (self._tokens.gather(1, parents) == PAD)
        self._tokens = torch.cat([self._tokens, tokens.masked_fill(unused, PAD)], 1)
        self._parents = torch.cat([self._parents, parents.masked_fill(unused, -1)], 1)
        self._log_probs = torch.cat([self._log_probs, log_probs.masked_fill(unused, -torch.inf)], 1)

    def _rerank(self, count: int) -> DraftTree:
        """The ``count`` likeliest nodes, which are connected: a node is never likelier than its parent, and of equal
        ones the shallower comes first."""
        ranked = self._log_probs[:, 1:].sort(dim=-1, descending=True, stable=True)
        best = ranked.indices[:, :count].sort(-1).values + 1
        self._kept = torch.cat([torch.zeros_like(best[:, :1]), best], 1)
        places = torch.full_like(self._tokens, -1)
        index = torch.arange(count + 1, device=best.device).expand_as(self._kept)
        places.scatter_(1, self._kept, index)
        parents = self._parents.gather(1, self._kept)
        moved = places.gather(1, parents.clamp(min=0)).masked_fill(parents < 0, -1)
        return DraftTree(self._tokens.gather(1, self._kept), moved, self._log_probs.gather(1, self._kept).exp())

    def _scores(self, logits: Tensor) -> Tensor:
        """The newest level's scores: the same temperature, filters and penalties as the target's."""
        if self._history is None:
            return self._sampling.scores(logits, DraftTree.root(self._tokens[:, 0]), None)
        # Penalties read whole paths: give the older nodes empty logits and take the newest nodes' result.
        padded = torch.cat([logits.new_zeros(logits.shape[0], self.first, logits.shape[2]), logits], 1)
        return self._sampling.scores(padded, self.expanded(), self._history)[:, self.first :]

    def _draft_probs(self) -> Tensor | None:
        """(B, N, V) q after each node for the classic rules; nodes without children hold zeros."""
        if not self._children.probs:
            return None
        probs = torch.cat(self._children.probs, 1)
        rows, count, vocab = probs.shape
        nodes = torch.arange(count, device=probs.device).expand(rows, -1)
        if not self.is_chain:
            nodes = self._expanded[:, :count]
        return probs.new_zeros(rows, self._tokens.shape[1], vocab).scatter(1, nodes[:, :, None].expand_as(probs), probs)


# --- trees that grow, or are pruned, by what their nodes are worth ---------------------------------------------------


class AcceptRates:
    """Acceptance rates of nodes by the probability that the drafter gave them: the tables of a ``GrowthRule``."""

    def __init__(self, knots: np.ndarray, rates: np.ndarray) -> None:
        self._knots: list[list[float]] = knots.tolist()
        self._rates: list[list[float]] = rates.tolist()

    def __call__(self, prob: float, level: int) -> float:
        table = min(level, len(self._knots) - 1)
        knots, rates = self._knots[table], self._rates[table]
        right = bisect_left(knots, prob)
        if right == 0 or right == len(knots):
            return rates[0 if right == 0 else -1]
        gap = knots[right] - knots[right - 1]
        share = (prob - knots[right - 1]) / gap if gap > 0 else 1.0
        return rates[right - 1] + share * (rates[right] - rates[right - 1])


def num_worthwhile(ranked: Sequence[Sequence[float]], rule: GrowthRule, max_nodes: int) -> int:
    """Return how many nodes of each row are worth their verification, at most ``max_nodes``.

    ``ranked`` has the probabilities of each row's paths, the likeliest first.
    """
    sums: list[float] = []  # over all rows: of the best, second best, ... node
    for row in ranked:
        sums += [0.0] * (min(max_nodes, len(row)) - len(sums))
        for rank, path_prob in enumerate(row[:max_nodes]):
            sums[rank] += path_prob
    verify: list[float] = rule.verify.tolist()
    gain, best, best_net = 0.0, 0, -verify[1]
    for count, more in enumerate(sums, 1):
        gain += more
        net = gain * rule.worth - verify[count + 1]
        if net > best_net:
            best_net, best = net, count
    return best


@dataclass
class WeighedTree:
    """A row's nodes with their probabilities, parents first; node 0 is the root."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    node_probs: list[float] = field(default_factory=lambda: [1.0])  # the probability of each node given its parent
    path_probs: list[float] = field(default_factory=lambda: [1.0])  # the probability that the node is accepted


def together(
    trees: Sequence[WeighedTree], kept: Sequence[Sequence[int]], device: torch.device, num_forwards: float | None = None
) -> DraftTree:
    """Return the ``kept`` nodes of every row, parents first, as one batch of trees."""
    width, is_line, deepest = max(map(len, kept)), True, 0
    columns: list[list[list[Any]]] = [[], [], [], []]
    for tree, nodes in zip(trees, kept, strict=True):
        index, rest = {node: i for i, node in enumerate(nodes)}, width - len(nodes)
        parents = [-1, *[index[tree.parents[node]] for node in nodes[1:]]]
        is_line &= parents == [*range(-1, len(nodes) - 1)]
        deepest = max(deepest, *[tree.depths[node] for node in nodes])
        columns[0].append([*[tree.tokens[node] for node in nodes], *[PAD] * rest])
        columns[1].append([*parents, *[-1] * rest])
        columns[2].append([*[tree.path_probs[node] for node in nodes], *[0.0] * rest])
        columns[3].append([*[tree.node_probs[node] for node in nodes], *[0.0] * rest])
    tokens_BN, parents_BN = torch.tensor(columns[:2], device=device).unbind()
    path_BN, node_BN = torch.tensor(columns[2:], dtype=torch.float32, device=device).unbind()
    return DraftTree(
        tokens_BN, parents_BN, path_BN, node_probs=node_BN, num_draft_forwards=num_forwards, is_line=is_line,
        depth=deepest,
    )  # fmt: skip


@dataclass
class _RuledTree(WeighedTree):
    """A row's tree while it grows; nodes are in the order in which they were added."""

    places: list[int] = field(default_factory=lambda: [0])  # index among the expanded nodes; PAD for leaves
    # all nodes but the root by ``path_probs``; equal ones as they were added
    order: list[int] = field(default_factory=list)
    # the newest level's expanded nodes; PAD if the row has fewer than others
    expanded: list[int] = field(default_factory=lambda: [0])
    newest: int = 1  # the first node of the newest level


class RuledTrees:
    """The trees of all rows, grown or pruned by a ``GrowthRule`` on the host.

    Expands at most ``width`` nodes of each level, and keeps at most ``max_nodes``.
    """

    def __init__(self, rule: GrowthRule, trees: Sequence[_RuledTree], width: int, max_nodes: int) -> None:
        self._rule, self._trees, self._width, self._max_nodes = rule, trees, width, max_nodes
        self._rate = AcceptRates(rule.knots, rule.rates)
        self._expanded = [(list(tree.tokens[:1]), [-1]) for tree in trees]  # tokens and parents of the expanded nodes
        self._num_levels, self._num_forwards = 0, 0.0

    @classmethod
    def start(
        cls, rule: GrowthRule, roots: Sequence[int], active: Sequence[bool], width: int, max_nodes: int | None
    ) -> RuledTrees:
        """Lone roots."""
        rows = zip(roots, active, strict=True)
        trees = [_RuledTree([root], expanded=[0 if is_active else PAD]) for root, is_active in rows]
        return cls(rule, trees, width, rule.max_nodes if max_nodes is None else min(max_nodes, rule.max_nodes))

    def branch(
        self, tokens_BWC: Sequence[Sequence[Sequence[int]]], log_probs_BWC: Sequence[Sequence[Sequence[float]]]
    ) -> None:
        """Add children of the newest expanded nodes, with their log probabilities; -inf for none."""
        level, self._num_levels = self._num_levels, self._num_levels + 1
        self._num_forwards += 1 + (self.num_newest - 1) * self._rule.share
        for tree, tokens_WC, log_probs_WC in zip(self._trees, tokens_BWC, log_probs_BWC, strict=True):
            tree.newest = len(tree.tokens)
            for above, tokens, log_probs in zip(tree.expanded, tokens_WC, log_probs_WC, strict=True):
                for token, log_prob in zip(tokens, log_probs, strict=True):
                    if above == PAD or not log_prob > -math.inf:  # NaN is no probability either
                        continue
                    prob = math.exp(min(log_prob, 0.0))
                    # In float32 as in the kernel, so that equal paths stay equal.
                    path_prob = float(np.float32(tree.path_probs[above] * self._rate(prob, level)))
                    if path_prob > 0:
                        tree.tokens.append(token)
                        tree.parents.append(above)
                        tree.node_probs.append(prob)
                        tree.path_probs.append(path_prob)
                        tree.depths.append(tree.depths[above] + 1)
                        tree.places.append(PAD)

    def choose_expanded(self) -> bool:
        """Choose the newest level's nodes to expand; False if another level is not worth its time."""
        level, rule = self._num_levels - 1, self._rule
        kept = self._num_kept()
        chosen = [[node for node in tree.order[:kept] if node >= tree.newest][: self._width] for tree in self._trees]
        gain, cost, total, width = float(rule.gains[level]), float(rule.costs[level]), 0.0, 0
        while width < max(map(len, chosen)):
            pairs = zip(self._trees, chosen, strict=True)
            path_probs = sum(tree.path_probs[nodes[width]] for tree, nodes in pairs if width < len(nodes))
            if width and not path_probs * gain > cost * rule.share:
                break
            total, width = total + path_probs, width + 1
        if not width:
            return False
        seconds = cost * (1 + (width - 1) * rule.share) + float(rule.verify[kept + 2] - rule.verify[kept + 1])
        if not total * gain > seconds:
            return False
        for tree, nodes, (tokens, parents) in zip(self._trees, chosen, self._expanded, strict=True):
            tree.expanded = [*nodes[:width], *[PAD] * (width - len(nodes))]
            for node in tree.expanded:
                if node != PAD:
                    tree.places[node] = len(tokens)
                tokens.append(PAD if node == PAD else tree.tokens[node])
                parents.append(-1 if node == PAD else tree.places[tree.parents[node]])
        return True

    @property
    def num_newest(self) -> int:
        """Expanded nodes of the newest level, unused ones included."""
        return len(self._trees[0].expanded)

    @property
    def first(self) -> int:
        """Index of the newest level's first node among the expanded ones."""
        return len(self._expanded[0][0]) - self.num_newest

    def expanded_tree(self, device: torch.device) -> DraftTree:
        """The expanded nodes as a tree."""
        tokens, parents = (torch.tensor([row[column] for row in self._expanded], device=device) for column in (0, 1))
        return DraftTree(tokens, parents, depth=self._num_levels)

    def finish(self, device: torch.device) -> Drafted:
        """The nodes that are worth their verification."""
        kept = self.kept()
        tree = together(self._trees, kept, device, self._num_forwards)
        if self._width == 1:
            return Drafted(tree, None, self._num_levels - 1)
        places = [
            [*(row.places[node] for node in nodes), *[PAD] * (tree.num_nodes - len(nodes))]
            for row, nodes in zip(self._trees, kept, strict=True)
        ]
        return Drafted(tree, torch.tensor(places), self._num_levels - 1)

    def kept(self) -> list[list[int]]:
        """The nodes of each row that are worth their verification, the root first."""
        limit = self._num_kept()
        return [[0, *sorted(node for node in tree.order[:limit] if tree.path_probs[node] > 0)] for tree in self._trees]

    def _num_kept(self) -> int:
        """Sort the nodes and count those that are worth their verification."""
        ranked = []
        for tree in self._trees:
            path_probs = tree.path_probs
            tree.order = sorted(range(1, len(path_probs)), key=path_probs.__getitem__, reverse=True)
            ranked.append([path_probs[node] for node in tree.order[: self._max_nodes]])
        return num_worthwhile(ranked, self._rule, self._max_nodes)


def prune_by_rule(tree: DraftTree, rule: GrowthRule) -> DraftTree:
    """The nodes of a finished tree that are worth their verification, for drafters that do not grow trees by the rule.

    Uses ``tree.node_probs`` if the drafter gave them.
    """
    if tree.num_extra_nodes:
        return prune_by_rule(tree.proposals, rule).with_extra_nodes(*tree.extra_nodes)
    if tree.num_nodes == 1:
        return tree if tree.num_draft_forwards is not None else replace(tree, num_draft_forwards=0.0)
    node_probs = None if tree.node_probs is None else tree.node_probs.tolist()
    rates, trees = AcceptRates(rule.knots, rule.rates), []
    for row, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        probs = [UNKNOWN_PROB] * len(tokens) if node_probs is None else node_probs[row]
        path_probs, depths = [1.0] + [0.0] * (len(parents) - 1), [0] * len(parents)
        for node, above in enumerate(parents):
            if above >= 0:
                depths[node] = depths[above] + 1
                path_probs[node] = path_probs[above] * rates(probs[node], depths[above])
        trees.append(_RuledTree(tokens, parents, depths, probs, path_probs))
    deepest = max(max(row.depths) for row in trees)
    num_forwards = float(deepest) if tree.num_draft_forwards is None else tree.num_draft_forwards
    kept = RuledTrees(rule, trees, 1, rule.max_nodes).kept()
    if sum(map(len, kept)) < int(tree.valid.sum()):
        return together(trees, kept, tree.tokens.device, num_forwards)
    confidence = torch.tensor([row.path_probs for row in trees], device=tree.tokens.device)
    return replace(tree, confidence=confidence, num_draft_forwards=num_forwards)
