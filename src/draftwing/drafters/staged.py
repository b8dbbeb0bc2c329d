"""A draft model that is itself drafted for, by lookup (staged speculation, Spector and Re, 2308.04623).

What the model is going to draft often stood in the text before. So lookup guesses its next tokens, one pass scores
them all, and those that the model itself would have drafted are a part of its draft; the first that is not is replaced
by its own. The draft is the one that the model makes alone, in fewer passes. Beside its own token each pass tells
further likely ones, which become siblings.

Shape suffixes: B rows, W entries, C children of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftwing.drafters.base import Budget
from draftwing.drafters.causal_lm import CALIBRATION, CausalLMDrafter
from draftwing.drafters.growing.children import Children
from draftwing.drafters.growing.worth import Rates, worth_keeping
from draftwing.drafters.several.merge import Proposal, Union, together, unite
from draftwing.drafters.suffix import SuffixAutomaton
from draftwing.inference import inference
from draftwing.model.lean import LeanTarget
from draftwing.model.target import Context, Row
from draftwing.run.forward import Entries
from draftwing.sampling import SamplingBatch
from draftwing.tree import PAD, DraftTree

__all__ = ["StagedDrafter"]

MIN_MATCH, MOST = 2, 8  # tokens that must repeat before one is guessed, and guesses in one pass: one for each of them


@dataclass
class _Text:
    """A row, as far as this drafter has read it.

    Attributes:
        guesses: what followed what in its tokens, of which ``seen`` were read.
        start: the row's length at the last draft; from there on lie the slots of the tokens ``run``.
    """

    guesses: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    seen: int = 0
    start: int = 0
    run: list[int] = field(default_factory=list)

    def read(self, row: Row) -> None:
        """The tokens that came since."""
        self.guesses.extend_all(row.tokens[self.seen :])
        self.seen = len(row.tokens)

    def num_kept(self, row: Row) -> int:
        """Slots that still hold the row's own tokens."""
        kept = 0
        for token, own in zip(self.run, row.tokens[self.start :], strict=False):
            if token != own:
                break
            kept += 1
        return self.start + kept


@dataclass
class _Trunk:
    """A row's draft while it grows: the model's own tokens, and after each of them the children that it thought likely.

    Attributes:
        read: slots that hold the row's tokens and the draft's; ``fresh``: the tokens to run next, the last a drawn one.
        guess: what is run behind them.
        reached: the chance of the whole draft, as such came true.
    """

    read: int
    fresh: list[int]
    is_open: bool
    tokens: list[int] = field(default_factory=list)
    children: list[list[tuple[int, float]]] = field(default_factory=list)
    guess: list[int] = field(default_factory=list)
    reached: float = 1.0

    def take(self, found: Sequence[Sequence[tuple[int, float]]], depth: int) -> None:
        """The children after the last fresh token and after each guess: the draft goes on as long as guesses hold."""
        self.read += len(self.fresh)
        for number, children in enumerate(found):
            self.children.append(list(children))
            self.tokens.append(children[0][0])
            if len(self.tokens) == depth or number == len(self.guess) or self.guess[number] != self.tokens[-1]:
                break
            self.read += 1
        self.fresh = self.tokens[-1:]
        self.is_open = len(self.tokens) < depth

    def proposal(self, root: int) -> Proposal:
        """All of it as a tree."""
        tokens, parents, told, trunk = [root], [-1], [1.0], 0
        for children in self.children:
            first = len(tokens)
            for token, chance in children[:1] + [each for each in children[1:] if each[1] > 0]:
                tokens.append(token)
                parents.append(trunk)
                told.append(chance)
            trunk = first
        return Proposal(tokens, parents, told)


class StagedDrafter(CausalLMDrafter):
    """See ``CausalLMDrafter``. Static trees, children drawn from q and penalties it drafts as that does."""

    def __init__(self, model: LeanTarget, target_vocab_size: int) -> None:
        super().__init__(model, target_vocab_size)
        self.name = f"causal-lm ({model.name}, drafted for by lookup)"
        self._texts: list[_Text] = []

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """See ``CausalLMDrafter.admit``."""
        super().admit(ctx, features)
        self._texts.append(_Text(start=self._read[-1]))

    def remove(self, ctx: Context, row: int) -> None:
        """See ``CausalLMDrafter.remove``."""
        super().remove(ctx, row)
        self._texts[row] = self._texts[-1]
        self._texts.pop()

    @inference
    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """The model's own draft, in as few passes as guesses allow."""
        for place, (row, text) in enumerate(zip(ctx.rows, self._texts, strict=True)):
            text.read(row)
            if text.run:
                self._read[place], text.run = min(text.num_kept(row), row.length), []
        rooms = [self._room(row) for row in ctx.rows]
        depth = min(budget.depth, min((room for room in rooms if room > 0), default=0))
        if depth < 1 or budget.paths or budget.children not in ("keyed", "top") or sampling.penalises:
            return super().propose(ctx, sampling, budget)
        if budget.rule is not None:
            depth = min(depth, len(budget.rule.gains))
        self._drafted = None
        trunks = []
        for row, room, read in zip(ctx.rows, rooms, self._read, strict=True):
            start = read if room > 0 else row.length
            trunks.append(_Trunk(start, row.tokens[start : row.length + 1], room > 0))
        passes = 0
        while any(trunk.is_open for trunk in trunks):
            self._pass(ctx, sampling, budget, trunks, depth)
            passes += 1
        for place, (row, trunk, room) in enumerate(zip(ctx.rows, trunks, rooms, strict=True)):
            if room > 0:
                self._read[place], text = row.length, self._texts[place]
                text.start, text.run = row.length, [row.tokens[row.length], *trunk.tokens][: trunk.read - row.length]
        return _tree_of(ctx, trunks, budget, float(passes))

    def _pass(
        self, ctx: Context, sampling: SamplingBatch, budget: Budget, trunks: Sequence[_Trunk], depth: int
    ) -> None:
        """Run what is fresh of every row with guesses behind it, and take what the model itself says."""
        for text, trunk in zip(self._texts, trunks, strict=True):
            room = depth - len(trunk.tokens) - 1
            length, guess = text.guesses.after(trunk.tokens, min(MOST, room), MIN_MATCH) if trunk.is_open else (0, [])
            trunk.guess = guess[:length]
        runs = [[*trunk.fresh, *trunk.guess] for trunk in trunks]
        width = max(map(len, runs))
        levels = [[max(len(t.tokens) + i - len(t.fresh) + 1, 0) for i in range(width)] for t in trunks]
        chain = DraftTree.chain(ctx.tensor([[*run, *[PAD] * (width - len(run))] for run in runs]))
        logits, _ = self._runner.forward(Entries(chain, [trunk.read for trunk in trunks]))
        assert logits is not None
        tokens, chances = _best(ctx, sampling, budget, logits, levels)
        rule = budget.rule
        rates = None if rule is None else Rates(rule.knots, rule.rates)
        for trunk, own_tokens, own_chances in zip(trunks, tokens, chances, strict=True):
            if not trunk.is_open:
                continue
            first, before = len(trunk.fresh) - 1, len(trunk.tokens)
            pairs = [list(zip(*each, strict=True)) for each in zip(own_tokens, own_chances, strict=True)]
            trunk.take(pairs[first : first + 1 + len(trunk.guess)], depth)
            if rule is not None and rates is not None:
                for level in range(before, len(trunk.tokens)):
                    trunk.reached *= rates(trunk.children[level][0][1], level)
                last = len(trunk.tokens) - 1
                trunk.is_open &= trunk.reached * float(rule.gains[last]) > float(rule.costs[last])


def _best(
    ctx: Context, sampling: SamplingBatch, budget: Budget, logits: Tensor, levels: Sequence[Sequence[int]]
) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
    """The likeliest children of every entry (B, W, C), best first, and the chance of each."""
    starts = [row.length + 1 for row in ctx.rows]
    scores = sampling.scores(logits, ctx.roots(), None)
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    ranked = scores
    if budget.children == "keyed":
        ranked = sampling.perturb(scores, ctx.tensor(levels), starts, max(map(max, levels)))
    tokens = ranked.topk(min(budget.width, scores.shape[-1]), dim=-1).indices
    chances = Children(sampling, budget.children, CALIBRATION, starts).log_chance(scores, ranked, tokens).exp()
    return tokens.tolist(), chances.clamp(max=1.0).tolist()


def _tree_of(ctx: Context, trunks: Sequence[_Trunk], budget: Budget, effort: float) -> DraftTree:
    """The drafts with the siblings that the budget has room for, or that its rule finds worth their verification."""
    unions: list[Union] = []
    for row, trunk in zip(ctx.rows, trunks, strict=True):
        union = unite([trunk.proposal(row.tokens[row.length])])
        union.weigh(lambda union, node: union.claims[node][0])
        unions.append(union)
    is_free = budget.rule is not None and budget.width > 1
    kept = [union.ordered() if is_free else union.within(budget) for union in unions]
    tree = together(unions, kept, ctx.device, effort)
    return tree if budget.rule is None else worth_keeping(tree, budget.rule)
