"""How a tree grows, level by level, whatever net or model drafts it.

    chain     one child each                                                     Leviathan et al. 2211.17192
    static    a tree of a fixed shape; EAGLE-1's has 25 nodes                    EAGLE 2401.15077
    dynamic   the best nodes of each level are expanded, and in the end the      EAGLE-2 2406.16858
              best of all that were met are kept
    by rule   a dynamic tree whose depth, width and nodes follow from what       drafters.growing.worth
              they are worth

``growing.children`` says which tokens follow a node. Under the classic rules the shape must not depend on what was
drawn: theirs are chains and static trees.

Shape suffixes: B rows, N nodes, W nodes of the newest level, C children of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.drafters.base import Budget
from draftwing.drafters.growing.children import Children
from draftwing.drafters.growing.shapes import Level, Shape
from draftwing.drafters.growing.worth import Forest
from draftwing.model.target import Context
from draftwing.nets.calibration import Calibration
from draftwing.run.request import Drafted
from draftwing.sampling import SamplingBatch
from draftwing.tree import PAD, DraftTree

__all__ = ["Growth"]

DEFAULT = Calibration()


class Growth:
    """A tree under construction.

    Call ``extend`` with the logits after the newest level's nodes, then forward ``drafted`` from ``first`` on for the
    next; ``finish`` gives the tree to verify. ``drafted`` holds only nodes that were expanded: a drafter's own slots.

    Args:
        ctx: the running rows.
        wanted: which rows are drafted for; (B, 1) int64 where the host must not know (see ``run.graphs``).
        sampling: theirs.
        budget: shape and size; ``budget.children`` says how children are chosen.
        calibration: how scores become chances at T > 0.
        wants_places: whether to say where the finished tree's nodes were run.
    """

    def __init__(
        self,
        ctx: Context,
        wanted: Sequence[bool] | Tensor,
        sampling: SamplingBatch,
        budget: Budget,
        calibration: Calibration = DEFAULT,
        *,
        wants_places: bool = False,
    ) -> None:
        self._sampling, self._budget, self._wants_places = sampling, budget, wants_places
        self._history = ctx.history() if sampling.penalises else None
        self._children = Children(sampling, budget.children, calibration, [row.length + 1 for row in ctx.rows])
        self._tokens = ctx.pending()[:, None]
        self._parents = torch.full_like(self._tokens, -1)
        # A root without value has no children: how rows are left out.
        rows = wanted if isinstance(wanted, Tensor) else ctx.tensor([int(each) for each in wanted])[:, None]
        self._values = torch.zeros(self._tokens.shape, device=ctx.device).masked_fill(rows == 0, -torch.inf)
        self._expanded = torch.zeros_like(self._tokens)  # nodes that were, or are about to be, forwarded
        self._drafted_parents = self._parents
        self._kept: Tensor | None = None  # (B, N) which nodes the finished tree holds; None for all
        is_static = budget.paths or (self._children.are_drawn and budget.width > 1)
        self._shape = Shape.of(budget.shape()) if is_static else None
        self.is_chain = budget.width == 1 and self._shape is None
        self.depth = len(self._shape.levels) if self._shape else budget.depth
        self.level = self.first = 0
        self._forest: Forest | None = None
        if budget.rule is not None:
            assert self._shape is None
            self.depth = min(self.depth, len(budget.rule.gains))
            most = self.depth if self.is_chain else budget.nodes
            self._forest = Forest(
                budget.rule, self._tokens[:, 0].tolist(), (rows[:, 0] != 0).tolist(), budget.width, most
            )
        self._stopped = False
        self._sure: Tensor | None = None  # of the newest level

    @property
    def done(self) -> bool:
        """Whether the tree is as deep as it shall be."""
        return self._stopped or self.level == self.depth

    def drafted(self) -> DraftTree:
        """The expanded nodes as a tree: what the drafter forwards, from node ``first`` on."""
        if self._forest is not None:
            return self._forest.drafted(self._tokens.device)
        if self.is_chain:
            return DraftTree.chain(self._tokens)
        return DraftTree(self._tokens.gather(1, self._expanded), self._drafted_parents, depth=self.level)

    def extend(self, logits: Tensor, sure: Tensor | None = None) -> None:
        """Choose the next level from ``logits`` (B, W, V) after the newest expanded nodes.

        (B, 1, V) where one law holds for all of them: a net that guesses several tokens in one pass has one of each.
        ``sure`` (B, W): how far the laws can be trusted; children are as much less likely.
        """
        self._sure = sure
        if self._history is not None or self._children.are_drawn:  # then each node goes its own way all the same
            logits = logits.expand(-1, self._num_newest, -1)
        scores = self._scores(logits)
        if self._forest is not None:
            self._extend_forest(scores, self._forest)
            return
        if self.is_chain:
            self._extend_chain(scores)
            return
        frontier = self._expanded[:, self.first :]
        if self._shape:
            self._extend_static(scores, frontier, self._shape.levels[self.level])
        else:
            self._extend_dynamic(scores, frontier)
        self.level += 1

    def finish(self) -> Drafted:
        """The tree to verify: all nodes, the best ``budget.nodes`` of them, or those that the rule keeps."""
        if self._forest is not None:
            return self._forest.finish(self._tokens.device)
        if self.is_chain:
            tree = replace(DraftTree.chain(self._tokens, None, self._draft_probs()), effort=self.level)
            return Drafted(tree, None, self.level - 1)
        count = self._budget.nodes
        if count is None or count >= self._tokens.shape[1] - 1 or self._shape:
            tree = DraftTree(self._tokens, self._parents, self._values.exp(), self._draft_probs())
        else:
            tree = self._rerank(count)
        places = self._places() if self._wants_places else None
        return Drafted(replace(tree, depth=self.level, effort=self.level), places, self.level - 1)

    def _places(self) -> Tensor:
        """(B, N) where the finished tree's nodes stand in ``drafted``; PAD where they do not."""
        places = torch.full_like(self._tokens, PAD)
        index = torch.arange(self._expanded.shape[1], device=places.device).expand_as(self._expanded)
        places = places.scatter(1, self._expanded, index)
        return places if self._kept is None else places.gather(1, self._kept)

    # --- the ways of growing ---------------------------------------------------------------------------------

    def _extend_forest(self, scores: Tensor, forest: Forest) -> None:
        """As the rule says, on the host: a few numbers are handled faster there."""
        scores, count = scores.masked_fill(scores.isnan(), -torch.inf), min(self._budget.width, scores.shape[-1])
        tokens, chances = self._best(scores, count)
        forest.branch(tokens.tolist(), chances.tolist())
        self.level += 1
        self._stopped = self.level < self.depth and not forest.widen()
        self.first = forest.first

    def _extend_chain(self, scores: Tensor) -> None:
        # Nobody weighs one node against another here: a softmax over V is not worth its time.
        if self._children.are_drawn:
            drawn, chances = self._children.draw(scores, self.level, 1)
            tokens = drawn[:, :, 0].masked_fill(~chances[:, :, 0].isfinite(), PAD)
        else:
            tokens = self._children.ranked(scores, self.level).argmax(-1)
        unused = (self._tokens[:, -1:] == PAD) | self._values.isinf()
        self._tokens = torch.cat([self._tokens, tokens.masked_fill(unused, PAD)], 1)
        self.first = self.level = self.level + 1

    def _extend_static(self, scores: Tensor, frontier: Tensor, level: Level) -> None:
        count = max(level.ranks) + 1
        missing = max(count - scores.shape[-1], 0)  # ranks that a small vocabulary does not have: unused nodes
        tokens, values = self._paths(scores, frontier, count - missing)
        tokens, values = F.pad(tokens, (0, missing)), F.pad(values, (0, missing), value=-torch.inf)
        parents, ranks, inner = level.places(scores.device)
        chosen = parents * count + ranks
        start = self._tokens.shape[1]
        self._append(tokens.flatten(1)[:, chosen], frontier[:, parents], values.flatten(1)[:, chosen])
        self._expand((start + inner).expand(len(tokens), -1), (self.first + parents[inner]).expand(len(tokens), -1))

    def _extend_dynamic(self, scores: Tensor, frontier: Tensor) -> None:
        width, count = self._num_newest, min(self._budget.width, scores.shape[-1])
        tokens, values = self._paths(scores, frontier, count)
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

    def _scores(self, logits: Tensor) -> Tensor:
        """The processed scores of the newest level: the same temperature, filters and penalties as the target's."""
        if self._history is None:
            return self._sampling.scores(logits, DraftTree.root(self._tokens[:, 0]), None)
        # Penalties look at whole paths: give the older nodes empty logits and take the newest ones' result.
        padded = torch.cat([logits.new_zeros(logits.shape[0], self.first, logits.shape[2]), logits], 1)
        return self._sampling.scores(padded, self.drafted(), self._history)[:, self.first :]

    def _paths(self, scores: Tensor, frontier: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """For each frontier node ``count`` tokens and the log of the chance of each path: (B, W, C) both."""
        tokens, chances = self._best(scores, count)
        return tokens, self._values.gather(1, frontier)[:, :, None] + chances

    def _best(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """``Children.best`` of each of the newest nodes, chosen once where all have one law."""
        tokens, chances = self._children.best(scores, self.level, count)
        if self._sure is not None:
            chances = chances + self._sure.log()[:, :, None]
        wide = (-1, self._num_newest, -1)
        return tokens.expand(wide), chances.expand(wide)

    @property
    def _num_newest(self) -> int:
        """W: nodes whose children come next."""
        if self._forest is not None:
            return self._forest.num_newest
        return 1 if self.is_chain else self._expanded.shape[1] - self.first

    def _draft_probs(self) -> Tensor | None:
        """(B, N, V) q after each node for the classic rules; nodes without children hold zeros."""
        if not self._children.probs:
            return None
        known = torch.cat(self._children.probs, 1)
        rows, _, vocab = known.shape
        everywhere = known.new_zeros(rows, self._tokens.shape[1], vocab)
        nodes = torch.arange(known.shape[1], device=known.device).expand(rows, -1)
        if not self.is_chain:
            nodes = self._expanded[:, : known.shape[1]]
        return everywhere.scatter(1, nodes[:, :, None].expand_as(known), known)
