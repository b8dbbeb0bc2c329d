"""Lookahead decoding (Fu et al., 2402.02057): the target guesses n-grams of its own future while it verifies.

Beside the text the target runs a window: W columns of N - 1 tokens each, the newest in the last row. Column i of the
first row stands i + 1 tokens after the pending one, and each further row one more. A token of the first row follows
the one on its left, every other the one above it: so the window is a tree, the paper's mask its paths, and no node of
it is ever kept (``DraftTree.num_scored``). What the target says after the last row is the next row (a step of Jacobi
iteration, under the noise of that very position where sampling is keyed), and each column with it an n-gram for the
pool. Proposed are the pool's latest n-grams that begin with the pending token. Nothing is trained.

Shape suffixes: B rows, K nodes of the window.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftwing.drafters.base import Budget, Traits
from draftwing.drafters.pool import NGramPool
from draftwing.drafters.suffix import merge_paths
from draftwing.model.target import NO_FEATURES, Context, Row, TargetOutput
from draftwing.sampling import SamplingBatch, best_of
from draftwing.tree import PAD, Accepted, DraftTree

__all__ = ["LookaheadDrafter"]

LATEST, DEEPER = 0.5, 0.7  # chances that are told of the latest n-gram's first token, and of each further one


@dataclass
class _Window:
    """Of one row.

    Attributes:
        levels: rows of as many tokens as there are columns; at first one, later N - 1.
        start: the absolute position of the first token of the first row.
    """

    pool: NGramPool
    levels: list[list[int]] = field(default_factory=list)
    start: int = 0

    def move(self, row: Row, width: int) -> None:
        """Begin behind the pending token: columns that the text has overtaken go, and others come in on the right."""
        start = row.length + 1
        behind, self.start = start - self.start, start
        if not self.levels or behind >= width:
            self.levels, behind = [[]], width
        # Any token will do to begin with; the paper takes the prompt's too.
        fresh = [
            [row.tokens[(2654435761 * (start + width - behind + i + level)) % len(row.tokens)] for i in range(behind)]
            for level in range(len(self.levels))
        ]
        # Past the end of a text nothing is run, nor what would follow it.
        ended = [bool(old) and old[-1] == PAD for old in self.levels]
        self.levels = [
            old[behind:] + ([PAD] * behind if end else new)
            for old, new, end in zip(self.levels, fresh, ended, strict=True)
        ]

    def advance(self, said: list[int], ngram: int) -> None:
        """What the target says after the last row of each column."""
        self.levels.append(said)
        if len(self.levels) == ngram:
            for column in zip(*self.levels, strict=True):
                if PAD not in column:
                    self.pool.add(column)
            del self.levels[0]
            self.start += 1


class LookaheadDrafter:
    """Proposes n-grams that the target has said ahead of its text.

    Args:
        vocab_size: V, for the draft law that the classic rules weigh (certain of its one proposal).
        window: columns of the window, W.
        ngram: tokens of an n-gram, N.
        guesses: n-grams that are verified at a time, G.
    """

    name = "lookahead"
    features = NO_FEATURES

    def __init__(self, vocab_size: int, window: int = 7, ngram: int = 5, guesses: int = 7) -> None:
        self._vocab_size, self._width, self._ngram, self._guesses = vocab_size, window, ngram, guesses
        identity = f"window {window}, ngram {ngram}, guesses {guesses}"
        self.traits = Traits(costs_forwards=False, identity=identity, scores=True)
        self._windows: list[_Window] = []
        self._sampling: SamplingBatch | None = None  # of the window that is being scored
        self._rows = 0  # of it

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """An empty pool."""
        self._windows.append(_Window(NGramPool(self._guesses)))

    def remove(self, ctx: Context, row: int) -> None:
        """Drop the row's pool and window."""
        self._windows[row] = self._windows[-1]
        self._windows.pop()

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Up to ``budget.width`` n-grams (with a rule: all guesses), and beside them the window."""
        self._sampling = None
        if budget.depth == 0:
            return ctx.roots()
        drawn = budget.children in ("sampled", "distinct")
        num_paths = 1 if drawn else self._guesses if budget.rule is not None else min(budget.width, self._guesses)
        most = 1 + (budget.depth * num_paths if budget.nodes is None else budget.nodes)
        tokens, parents, told = [], [], []
        for row, window in zip(ctx.rows, self._windows, strict=True):
            window.move(row, self._width)
            paths = [path[: budget.depth] for path in window.pool.after(row.tokens[-1])[:num_paths]]
            own, above, sources = merge_paths(row.tokens[-1], paths, most)
            tokens.append(own)
            parents.append(above)
            told.append(
                [1.0, *[DEEPER if p else LATEST / (1 + s) for p, s in zip(above[1:], sources[1:], strict=True)]]
            )
        tree = DraftTree.from_lists(tokens, parents, ctx.device)
        padded = [[*each, *[0.0] * (tree.num_nodes - len(each))] for each in told]
        depth = max(_depth(each) for each in parents)
        tree = replace(tree, told=torch.tensor(padded, device=ctx.device), depth=depth, is_line=num_paths == 1)
        if drawn:  # each node's child is certain: see ``LookupDrafter``
            following = torch.cat([tree.tokens[:, 1:], tree.tokens[:, -1:]], 1).clamp(min=0)
            probs = torch.zeros(*tree.tokens.shape, self._vocab_size, device=ctx.device)
            tree = replace(tree, draft_probs=probs.scatter_(2, following[:, :, None], 1.0))
        self._sampling = sampling
        return tree.beside(*self._window_nodes(ctx))

    def _window_nodes(self, ctx: Context) -> tuple[Tensor, Tensor, int]:
        """The windows as further nodes (B, K), row after row, those that are not filled yet with unused ones."""
        width, self._rows = self._width, max(len(window.levels) for window in self._windows)
        above = [*range(-1, width - 1), *range((self._rows - 1) * width)]
        tokens = [
            [
                *[token for level in window.levels for token in level],
                *[PAD] * ((self._rows - len(window.levels)) * width),
            ]
            for window in self._windows
        ]
        return ctx.tensor(tokens), ctx.tensor([above] * len(tokens)), width + self._rows - 1

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """What the target says after the last row of each window is the next row."""
        sampling, self._sampling = self._sampling, None
        if sampling is None or not tree.num_scored:
            return
        width, first = self._width, tree.num_nodes - tree.num_scored
        last = [[first + (len(window.levels) - 1) * width + i for i in range(width)] for window in self._windows]
        nodes = ctx.tensor(last)[:, :, None].expand(-1, -1, output.logits.shape[2])
        if sampling.penalises:  # they look at whole paths
            scores = sampling.scores(output.logits, tree, ctx.history()).gather(1, nodes)
        else:
            scores = sampling.scores(output.logits.gather(1, nodes), tree, None)
        depths = [[len(window.levels) + i for i in range(width)] for window in self._windows]
        starts = [row.length + 1 for row in ctx.rows]
        said = best_of(sampling.perturb(scores, ctx.tensor(depths), starts, max(map(max, depths)))).tolist()
        cut = tree.tokens.gather(1, ctx.tensor(last)).tolist()  # near the end of a text some nodes were not run
        for window, own, run in zip(self._windows, said, cut, strict=True):
            window.advance([PAD if node == PAD else token for token, node in zip(own, run, strict=True)], self._ngram)


def _depth(parents: list[int]) -> int:
    depths = [0] * len(parents)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    return max(depths)
