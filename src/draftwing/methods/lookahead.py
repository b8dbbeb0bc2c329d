"""Lookahead decoding (Fu et al., 2402.02057): the target guesses n-grams of its future while it verifies.

Next to the sequence the target runs a window: W columns of N - 1 tokens each, the newest in the last row. The token in
row r and column i, both from 0, is i + r + 1 positions after the pending token. A token of the first row follows its
left neighbour, every other token the one above it. So the window is a tree, whose paths are the paper's attention mask;
its nodes are scored but never kept (``DraftTree.num_extra_nodes``). The target's choice after the last row is the next
row (a step of Jacobi iteration, under the noise of that position if sampling is keyed), and each column with its choice
is an n-gram for the pool. The latest n-grams of the pool that begin with the pending token are proposed. Nothing is
trained.

Differs from the paper: each request has a pool, and the prompt's tokens only start the window.

Shape suffixes: B rows, K nodes of the window, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import ClassVar

from torch import Tensor

from draftwing.methods.base import Budget, Drafter, ListTree, swap_remove
from draftwing.methods.lookup import merge_paths, node_depths, to_draft_tree
from draftwing.methods.method import DraftMethod, NewDrafter, Source, integer_option
from draftwing.models.context import Context, Row, TargetOutput
from draftwing.sampling import SamplingBatch, best_of
from draftwing.tree import PAD, Accepted, DraftTree

# Initial probabilities of the latest n-gram's first token (older ones in proportion to 1 / age), and of later tokens.
FIRST_PROB, LATER_PROB = 0.5, 0.7


class NGramPool:
    """The latest n-grams that begin with each token, up to ``max_ngrams`` of each."""

    def __init__(self, max_ngrams: int) -> None:
        self._max_ngrams = max_ngrams
        self._followers: dict[int, dict[tuple[int, ...], None]] = {}  # an ordered set per token, the oldest first

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram, or make it the latest if the pool has it."""
        followers, rest = self._followers.setdefault(ngram[0], {}), tuple(ngram[1:])
        followers.pop(rest, None)
        followers[rest] = None
        if len(followers) > self._max_ngrams:
            del followers[next(iter(followers))]

    def after(self, token: int) -> list[list[int]]:
        """Return the n-grams that begin with ``token``, without it, the latest first."""
        return [list(rest) for rest in reversed(self._followers.get(token, ()))]


@dataclass
class LookaheadWindow:
    """A request's window and pool."""

    pool: NGramPool
    levels: list[list[int]] = field(default_factory=list)  # the window's rows, W tokens each; first one, later N - 1
    start: int = 0  # the absolute position of the first token of the first row

    def move(self, row: Row, width: int) -> None:
        """Start after the pending token: drop columns that the sequence has overtaken, and add new ones."""
        start = row.length + 1
        behind, self.start = start - self.start, start
        if not self.levels or behind >= width:
            self.levels, behind = [[]], width
        # New columns start from arbitrary tokens of the sequence; the paper takes the prompt's too.
        fresh = [
            [row.tokens[(2654435761 * (start + width - behind + i + level)) % len(row.tokens)] for i in range(behind)]
            for level in range(len(self.levels))
        ]
        # A column after one that is past the end of the request is not run either.
        self.levels = [
            old[behind:] + ([PAD] * behind if old and old[-1] == PAD else new)
            for old, new in zip(self.levels, fresh, strict=True)
        ]

    def advance(self, choices: list[int], ngram: int) -> None:
        """Take the target's choices after the last row; a full window gives its n-grams to the pool."""
        self.levels.append(choices)
        if len(self.levels) == ngram:
            for column in zip(*self.levels, strict=True):
                if PAD not in column:
                    self.pool.add(column)
            del self.levels[0]
            self.start += 1


class LookaheadDrafter(Drafter):
    """Proposes n-grams that the target has chosen ahead of its sequence.

    Args:
        vocab_size: V, for the draft distribution that the classic rules need (certain of its one proposal).
        window: columns of the window, W.
        ngram: tokens of an n-gram, N.
        guesses: n-grams that are verified at a time, G.
    """

    name = "lookahead"
    costs_forwards = False

    def __init__(self, vocab_size: int, window: int = 7, ngram: int = 5, guesses: int = 7) -> None:
        self._vocab_size, self._width, self._ngram, self._guesses = vocab_size, window, ngram, guesses
        self.identity = f"window {window}, ngram {ngram}, guesses {guesses}"
        self.windows: list[LookaheadWindow] = []
        self._sampling: SamplingBatch | None = None  # for the windows that are being scored

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        self.windows.append(LookaheadWindow(NGramPool(self._guesses)))

    def remove(self, ctx: Context, row: int) -> None:
        swap_remove(self.windows, row)

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Propose up to ``budget.width`` n-grams (with a rule: all guesses), and add the window."""
        self._sampling = None
        if budget.depth == 0:
            return ctx.roots()
        is_drawn = budget.children in ("sampled", "distinct")
        num_paths = 1 if is_drawn else self._guesses if budget.rule is not None else min(budget.width, self._guesses)
        max_nodes = 1 + (budget.depth * num_paths if budget.nodes is None else budget.nodes)
        rows = []
        for row, window in zip(ctx.rows, self.windows, strict=True):
            window.move(row, self._width)
            paths = [path[: budget.depth] for path in window.pool.after(row.tokens[-1])[:num_paths]]
            tokens, parents, sources = merge_paths(row.tokens[-1], paths, max_nodes)
            pairs = zip(parents[1:], sources[1:], strict=True)
            probs = [LATER_PROB if parent else FIRST_PROB / (1 + source) for parent, source in pairs]
            rows.append(ListTree(tokens, parents, [1.0, *probs], max(node_depths(parents))))
        tree = to_draft_tree(rows, ctx.device, self._vocab_size if is_drawn else None)
        self._sampling = sampling
        return tree.with_extra_nodes(*self._window_nodes(ctx))

    def _window_nodes(self, ctx: Context) -> tuple[Tensor, Tensor, int]:
        """Return the windows' tokens and parents (B, K), row after row, and their depth; missing rows are unused."""
        width, num_levels = self._width, max(len(window.levels) for window in self.windows)
        parents = [*range(-1, width - 1), *range((num_levels - 1) * width)]
        tokens = []
        for window in self.windows:
            unused = [PAD] * width * (num_levels - len(window.levels))
            tokens.append([*chain.from_iterable(window.levels), *unused])
        return ctx.tensor(tokens), ctx.tensor([parents] * len(tokens)), width + num_levels - 1

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Take the target's choices after the last row of each window as the next row."""
        sampling, self._sampling = self._sampling, None
        if sampling is None or not tree.num_extra_nodes:
            return
        width, first = self._width, tree.num_nodes - tree.num_extra_nodes
        starts = [first + (len(window.levels) - 1) * width for window in self.windows]
        last = ctx.tensor([[*range(start, start + width)] for start in starts])
        nodes = last[:, :, None].expand(-1, -1, output.logits.shape[2])
        if sampling.penalises:  # penalties depend on whole paths
            scores = sampling.scores(output.logits, tree, ctx.history()).gather(1, nodes)
        else:
            scores = sampling.scores(output.logits.gather(1, nodes), tree, None)
        depths = [[len(window.levels) + i for i in range(width)] for window in self.windows]
        positions = [row.length + 1 for row in ctx.rows]
        choices = best_of(sampling.perturb(scores, ctx.tensor(depths), positions, max(map(max, depths)))).tolist()
        nodes_run = tree.tokens.gather(1, last).tolist()  # near the end of a request some nodes were not run
        for window, row_choices, row_nodes in zip(self.windows, choices, nodes_run, strict=True):
            pairs = zip(row_choices, row_nodes, strict=True)
            window.advance([PAD if node == PAD else token for token, node in pairs], self._ngram)


# W, N and G: the paper's for 7B on a GPU; fewer on a CPU, which has less arithmetic to spare.
_GPU_SIZES = {"window": 7, "ngram": 5, "guesses": 7}
_CPU_SIZES = {"window": 4, "ngram": 3, "guesses": 4}


class Lookahead(DraftMethod):
    options: ClassVar = {
        "window": integer_option("window", 1, 64),
        "ngram": integer_option("ngram", 2, 64),
        "guesses": integer_option("guesses", 1, 64),
    }

    def new_drafter(self, source: Source) -> NewDrafter:
        sizes = _GPU_SIZES if source.target.device.type == "cuda" else _CPU_SIZES
        return partial(LookaheadDrafter, source.target.vocab_size, **{**sizes, **source.options})
