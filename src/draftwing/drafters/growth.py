"""How a tree grows, level by level, whatever net or model drafts it.

    chain     one child each                                                     Leviathan et al. 2211.17192
    static    a tree of a fixed shape; EAGLE-1's has 25 nodes                    EAGLE 2401.15077
    dynamic   the best nodes of each level are expanded, and in the end the      EAGLE-2 2406.16858
              best of all that were met are kept
    best-first  a chain or a dynamic tree whose depth and nodes a plan decides,  drafters.auto
              while it grows, by what they are worth

At T > 0 the children of a node are its best tokens under the target's own noise (``keyed``): a sample of the draft
law without replacement, and most often the very token that the target will draw. The classic rules need children
drawn from q, and a shape that does not depend on what was drawn: theirs are static trees.

Shape suffixes: B rows, N nodes, W nodes of the newest level, C children of each, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.drafters.base import Budget, Plan
from draftwing.model.target import Context
from draftwing.nets.calibration import Calibration
from draftwing.run.request import Drafted, DraftRequest
from draftwing.sampling import DRAFT, SamplingBatch, gumbel, hash_bits
from draftwing.tree import PAD, DraftTree

__all__ = ["Growth", "Shape", "request_for", "taken"]

DEFAULT = Calibration()


@dataclass(frozen=True)
class Level:
    """One level of a static tree.

    Attributes:
        parents: for each node its parent's place among the expanded nodes of the level above.
        ranks: for each node which child of its parent it is, from 0.
        expanded: places of the nodes that have children themselves.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    expanded: tuple[int, ...]

    @cache  # noqa: B019  # of a handful of shapes; for good, since a recorded draft knows where they lie
    def places(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """``parents``, ``ranks`` and ``expanded`` as int64 on a device: made once, since that may have to wait."""
        with torch.inference_mode(False):
            every = (self.parents, self.ranks, self.expanded)
            parents, ranks, expanded = (torch.tensor(each, dtype=torch.int64, device=device) for each in every)
        return parents, ranks, expanded


class Shape:
    """A static tree, from paths of ranks: ``(0, 1)`` is the second child of the root's first child."""

    def __init__(self, paths: tuple[tuple[int, ...], ...]) -> None:
        by_depth: dict[int, list[tuple[int, ...]]] = {}
        for path in sorted(paths, key=lambda path: (len(path), path)):
            by_depth.setdefault(len(path), []).append(path)
        inner = {path[:-1] for path in paths}
        above: list[tuple[int, ...]] = [()]
        self.levels: list[Level] = []
        for depth in range(1, len(by_depth) + 1):
            nodes = by_depth[depth]
            place = {path: i for i, path in enumerate(above)}
            expanded = tuple(i for i, path in enumerate(nodes) if path in inner)
            level = Level(tuple(place[p[:-1]] for p in nodes), tuple(p[-1] for p in nodes), expanded)
            self.levels.append(level)
            above = [nodes[i] for i in expanded]

    @staticmethod
    @lru_cache(maxsize=64)
    def of(paths: tuple[tuple[int, ...], ...]) -> Shape:
        """The same shape is made once."""
        return Shape(paths)


def request_for(
    ctx: Context,
    wanted: Sequence[bool],
    sampling: SamplingBatch,
    budget: Budget,
    depth: int,
    calibration: Calibration = DEFAULT,
) -> DraftRequest | None:
    """The trees of ``budget`` as one request, for a drafter that grows them in one call: the very ones of ``Growth``.

    None where that must be asked as they grow. ``depth``: levels at most, the drafter's own limit counted in; the other
    arguments are those of ``Growth``.
    """
    most = depth if budget.is_chain else budget.nodes
    if budget.paths or budget.children not in ("keyed", "top") or most is None or depth < 1:
        return None
    if sampling.penalises or sampling.biases:
        return None
    rule = None
    if budget.plan is not None:
        rule = budget.plan.growth_rule(depth, budget.width, most)
        if rule is None:
            return None
    handle = sampling.noise.handle
    if handle is None:
        return None
    keyed = budget.children == "keyed"
    return DraftRequest(
        depth,
        budget.width,
        most,
        [row.tokens[row.length] for row in ctx.rows],
        wanted,
        [request.temperature for request in sampling.rows],
        [request.top_k or 0 for request in sampling.rows],
        [request.top_p for request in sampling.rows],
        [request.min_p for request in sampling.rows],
        handle,
        [request.seed if keyed and request.temperature > 0 else -1 for request in sampling.rows],
        [row.length + 1 for row in ctx.rows],
        calibration.sharpness,
        calibration.miss,
        rule,
    )


def taken(drafted: Drafted, budget: Budget) -> DraftTree:
    """The tree of a request; the plan hears what was said of it."""
    if budget.plan is not None:
        budget.plan.drafted(drafted.told, drafted.effort)
    return drafted.tree


class Growth:
    """A tree under construction.

    Call ``extend`` with the logits after the newest level's nodes, then forward ``drafted`` from ``first`` on for the
    next; ``finish`` gives the tree to verify. ``drafted`` holds only nodes that were expanded: a drafter's own slots.

    Args:
        ctx: the running rows.
        wanted: which rows are drafted for; (B, 1) int64 where the host must not know (see ``drafters.recorded``).
        sampling: theirs.
        budget: shape and size; ``budget.children`` says how children are chosen.
        calibration: how scores become chances at T > 0.
    """

    def __init__(
        self,
        ctx: Context,
        wanted: list[bool] | Tensor,
        sampling: SamplingBatch,
        budget: Budget,
        calibration: Calibration = DEFAULT,
    ) -> None:
        if budget.plan is not None and budget.plan.at_once:  # a call for each level: a chain's are the cheapest
            budget = replace(budget, width=1, nodes=None)
        self._sampling, self._budget, self._calibration = sampling, budget, calibration
        self._history = ctx.history() if sampling.penalises else None
        self._starts = [row.length + 1 for row in ctx.rows]
        self._tokens = ctx.pending()[:, None]
        self._parents = torch.full_like(self._tokens, -1)
        # A root without value has no children: how rows are left out.
        rows = wanted if isinstance(wanted, Tensor) else ctx.tensor(wanted)[:, None]
        self._values = torch.zeros(self._tokens.shape, device=ctx.device).masked_fill(rows == 0, -torch.inf)
        self._expanded = torch.zeros_like(self._tokens)  # nodes that were, or are about to be, forwarded
        self._drafted_parents = self._parents
        self._raw = torch.zeros_like(self._values)  # the chances of nodes given their parents, for the plan
        self._probs: list[Tensor] = []
        self._kept: Tensor | None = None  # (B, N) which nodes the finished tree holds; None for all
        self._drawn = budget.children in ("sampled", "distinct")
        self._shape = Shape.of(budget.shape()) if budget.paths or (self._drawn and budget.width > 1) else None
        self.is_chain = budget.width == 1 and self._shape is None
        self.depth = len(self._shape.levels) if self._shape else budget.depth
        self.level = self.first = 0
        self._plan, self._stopped = budget.plan, False
        self._told: list[list[float]] = []  # of a planned chain: by level, what the drafter said of each row's node,
        self._reached: list[list[float]] = []  # and the chance of its path

    @property
    def done(self) -> bool:
        """Whether the tree is as deep as it shall be."""
        return self._stopped or self.level == self.depth

    def drafted(self) -> DraftTree:
        """The expanded nodes as a tree: what the drafter forwards, from node ``first`` on."""
        if self.is_chain:
            return DraftTree.chain(self._tokens)
        return DraftTree(self._tokens.gather(1, self._expanded), self._drafted_parents, depth=self.level)

    def extend(self, logits: Tensor) -> None:
        """Choose the next level from ``logits`` (B, W, V) after the newest expanded nodes."""
        scores = self._scores(logits)
        if self.is_chain:
            self._extend_chain(scores)
            return
        frontier = self._expanded[:, self.first :]
        if self._shape:
            self._extend_static(scores, frontier, self._shape.levels[self.level])
        else:
            self._extend_dynamic(scores, frontier)
        self.level += 1
        if self._plan is not None and self.level < self.depth:
            reached = float(self._values.gather(1, self._expanded[:, self.first :]).exp().sum())
            self._stopped = not self._plan.another_level(reached, self.level, self._budget.width)

    def finish(self) -> DraftTree:
        """The tree to verify: all nodes, or the best ``budget.nodes`` of them."""
        if self._plan is not None:
            return self._planned(self._plan)
        if self.is_chain:
            return DraftTree.chain(self._tokens, None, self._draft_probs())
        count = self._budget.nodes
        if count is None or count >= self._tokens.shape[1] - 1 or self._shape:
            tree = DraftTree(self._tokens, self._parents, self._values.exp(), self._draft_probs())
        else:
            tree = self._rerank(count)
        return replace(tree, depth=self.level)

    def slots_of(self, path: Tensor) -> Tensor:
        """Where the nodes of a path (B, D) of the finished tree stand in ``drafted``; PAD where they do not."""
        if self.is_chain:
            return path
        nodes = path.clamp(min=0) if self._kept is None else self._kept.gather(1, path.clamp(min=0))
        places = torch.full_like(self._tokens, PAD)
        index = torch.arange(self._expanded.shape[1], device=path.device).expand_as(self._expanded)
        return places.scatter(1, self._expanded, index).gather(1, nodes).masked_fill(path == PAD, PAD)

    def _planned(self, plan: Plan) -> DraftTree:
        """The nodes that are worth their verification."""
        if self.is_chain:
            count = plan.num_nodes([sum(level) for level in self._reached])
            one = [1.0] * len(self._tokens)
            told, reached = (torch.tensor([one, *each[:count]]).T for each in (self._told, self._reached))
            plan.drafted(told.numpy(), self.level)
            return DraftTree.chain(self._tokens[:, : count + 1], reached)
        ranked = self._values[:, 1:].sort(dim=-1, descending=True).values
        count = plan.num_nodes(ranked.exp().sum(0).tolist())
        if count == 0:
            return DraftTree.root(self._tokens[:, 0])
        tree = self._rerank(count)
        assert self._kept is not None
        plan.drafted(self._raw.gather(1, self._kept).exp().numpy(), self.level)
        return tree

    # --- the three ways of growing ---------------------------------------------------------------------------------

    def _extend_chain(self, scores: Tensor) -> None:
        # Without a plan nobody weighs one node against another, and with one the margin between the best two says
        # enough: a softmax over V is not worth its time.
        if self._plan is not None:
            best = self._ranked(scores)[:, 0].topk(min(2, scores.shape[-1]), dim=-1)
            tokens = best.indices[:, :1]
            self._weigh_chain(self._plan, best.values)
        elif self._drawn:
            drawn, chances = self._draw(scores, 1)
            tokens = drawn[:, :, 0].masked_fill(~chances[:, :, 0].isfinite(), PAD)
        else:
            tokens = self._ranked(scores).argmax(-1)
        unused = (self._tokens[:, -1:] == PAD) | self._values.isinf()
        self._tokens = torch.cat([self._tokens, tokens.masked_fill(unused, PAD)], 1)
        self.first = self.level = self.level + 1

    def _weigh_chain(self, plan: Plan, best: Tensor) -> None:
        """``best``: (B, 2) the two best scores of every row. On the host, where a few numbers are handled faster."""
        above = self._reached[-1] if self._reached else self._values[:, 0].exp().tolist()
        margins = (best[:, 0] - best[:, 1]).tolist() if best.shape[1] > 1 else [math.inf] * len(best)
        level = self.level + 1
        reached = self._weigh(plan, margins, above, level)
        self._stopped = level < self.depth and not plan.another_level(sum(reached), level, 1)

    def _weigh(self, plan: Plan, margins: list[float], above: list[float], level: int) -> list[float]:
        """The chances of the rows' paths down to a level of a chain; ``above``: those of the level above."""
        told = [1 / (1 + math.exp(-min(margin, 50.0))) if margin == margin else 0.5 for margin in margins]
        reached = [path * plan.chance(raw, level) for path, raw in zip(above, told, strict=True)]
        self._told.append(told)
        self._reached.append(reached)
        return reached

    def _extend_static(self, scores: Tensor, frontier: Tensor, level: Level) -> None:
        count = max(level.ranks) + 1
        missing = max(count - scores.shape[-1], 0)  # ranks that a small vocabulary does not have: unused nodes
        tokens, values = self._children(scores, frontier, count - missing)
        tokens, values = F.pad(tokens, (0, missing)), F.pad(values, (0, missing), value=-torch.inf)
        parents, ranks, inner = level.places(scores.device)
        chosen = parents * count + ranks
        start = self._tokens.shape[1]
        self._append(tokens.flatten(1)[:, chosen], frontier[:, parents], values.flatten(1)[:, chosen])
        self._expand((start + inner).expand(len(tokens), -1), (self.first + parents[inner]).expand(len(tokens), -1))

    def _extend_dynamic(self, scores: Tensor, frontier: Tensor) -> None:
        width, vocab = scores.shape[1:]
        count = min(self._budget.width, vocab)
        tokens, values = self._children(scores, frontier, count)
        flat = values.flatten(1)
        best = flat.topk(min(self._budget.width, width * count), dim=-1).indices
        above = best // count
        start = self._tokens.shape[1]
        if self._budget.nodes is None:  # nothing to choose from in the end: keep what is expanded alone
            self._append(tokens.flatten(1).gather(1, best), frontier.gather(1, above), flat.gather(1, best))
            fresh = torch.arange(best.shape[1], device=best.device).expand_as(best)
        else:
            parents = frontier[:, :, None].expand(-1, -1, count)
            self._append(tokens.flatten(1), parents.flatten(1), flat)
            fresh = best
        self._expand(start + fresh, self.first + above)

    def _append(self, tokens: Tensor, parents: Tensor, values: Tensor) -> None:
        # A child of an unused node, or one that q gives no chance, is unused too.
        unused = values.isinf() | (self._tokens.gather(1, parents) == PAD)
        self._tokens = torch.cat([self._tokens, tokens.masked_fill(unused, PAD)], 1)
        self._parents = torch.cat([self._parents, parents.masked_fill(unused, -1)], 1)
        self._values = torch.cat([self._values, values.masked_fill(unused, -torch.inf)], 1)

    def _expand(self, nodes: Tensor, drafted_parents: Tensor) -> None:
        self.first = self._expanded.shape[1]
        self._expanded = torch.cat([self._expanded, nodes], 1)
        unused = self._tokens.gather(1, nodes) == PAD
        self._drafted_parents = torch.cat([self._drafted_parents, drafted_parents.masked_fill(unused, -1)], 1)

    def _rerank(self, count: int) -> DraftTree:
        """The ``count`` nodes of the highest value. A node is never above its parent, and equals go to the shallower
        (which comes first): so what is kept hangs together."""
        values = self._values[:, 1:].sort(dim=-1, descending=True, stable=True)
        best = values.indices[:, :count].sort(-1).values + 1
        self._kept = torch.cat([torch.zeros_like(best[:, :1]), best], 1)
        places = torch.full_like(self._tokens, -1)
        index = torch.arange(count + 1, device=best.device).expand_as(self._kept)
        places.scatter_(1, self._kept, index)
        parents = self._parents.gather(1, self._kept)
        moved = places.gather(1, parents.clamp(min=0)).masked_fill(parents < 0, -1)
        return DraftTree(self._tokens.gather(1, self._kept), moved, self._values.gather(1, self._kept).exp())

    # --- choosing children -----------------------------------------------------------------------------------------

    def _scores(self, logits: Tensor) -> Tensor:
        """The processed scores of the newest level: the same temperature, filters and penalties as the target's."""
        if self._history is None:
            return self._sampling.scores(logits, DraftTree.root(self._tokens[:, 0]), None)
        # Penalties look at whole paths: give the older nodes empty logits and take the newest ones' result.
        padded = torch.cat([logits.new_zeros(logits.shape[0], self.first, logits.shape[2]), logits], 1)
        return self._sampling.scores(padded, self.drafted(), self._history)[:, self.first :]

    def _children(self, scores: Tensor, frontier: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """For each frontier node ``count`` tokens and the log of the chance of each path: (B, W, C) both."""
        if self._drawn:
            tokens, chances = self._draw(scores, count)
        else:
            ranked = self._ranked(scores)
            tokens = ranked.topk(count, dim=-1).indices
            chances = self._log_chance(scores, ranked, tokens)
        if self._plan is not None:
            self._raw = torch.cat([self._raw, chances.flatten(1)], 1)
            chances = self._plan.chances(chances, self.level + 1)
        return tokens, self._values.gather(1, frontier)[:, :, None] + chances

    def _ranked(self, scores: Tensor) -> Tensor:
        """What the best children are the best by: the scores under the target's noise, or (``top``) without."""
        if self._budget.children == "top":
            return scores
        return self._sampling.perturb_level(scores, self._starts, self.level)

    def _log_chance(self, scores: Tensor, ranked: Tensor, tokens: Tensor) -> Tensor:
        """Log of the chance that each of ``tokens`` (B, W, C) is what the target draws."""
        plain = scores.gather(-1, tokens) - scores.logsumexp(-1, keepdim=True)
        if self._sampling.all_greedy or self._budget.children == "top":
            return plain.float()
        return torch.where(self._sampling.greedy, plain, self._calibration.log_chance(ranked, tokens)).float()

    def _draw(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Children drawn from q with noise of the drafter's own, in the order drawn: (B, W, C) tokens, log chances."""
        probs = self._sampling.probs(scores)
        self._probs.append(probs)
        rows, width, vocab = probs.shape
        independent = count if self._budget.children == "sampled" else 1
        ids = torch.arange(vocab, device=probs.device)
        which = torch.arange(width * independent, device=probs.device)[:, None]
        noise = torch.stack(
            [
                gumbel(hash_bits(seed, (DRAFT, start, self.level, which), ids))
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

    def _draft_probs(self) -> Tensor | None:
        """(B, N, V) q after each node for the classic rules; nodes without children hold zeros."""
        if not self._probs:
            return None
        known = torch.cat(self._probs, 1)
        rows, _, vocab = known.shape
        everywhere = known.new_zeros(rows, self._tokens.shape[1], vocab)
        nodes = torch.arange(known.shape[1], device=known.device).expand(rows, -1)
        if not self.is_chain:
            nodes = self._expanded[:, : known.shape[1]]
        return everywhere.scatter(1, nodes[:, :, None].expand_as(known), known)
