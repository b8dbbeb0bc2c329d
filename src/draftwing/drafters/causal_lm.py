"""A smaller causal LM as the drafter (Leviathan et al. 2211.17192; trees as in SpecInfer 2305.09781).

It keeps its own KV slots. A tree grows level by level, each level one forward of the new nodes alone.

Shape suffixes: B rows, W nodes of a level, N nodes, V vocabulary, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.drafters.base import Budget
from draftwing.errors import TokenizerError
from draftwing.model.lean import LeanContext, LeanTarget
from draftwing.model.target import NO_FEATURES, Context, Row, TargetOutput
from draftwing.sampling import DRAFT, History, SamplingBatch, gumbel, hash_bits
from draftwing.tree import PAD, Accepted, DraftTree

__all__ = ["CausalLMDrafter"]

# How a margin between perturbed scores becomes a chance of acceptance at T > 0: fitted once on a 17M target
# (0.59 nats where q itself takes 4.65); only the order of nodes depends on it, never the text.
SHARPNESS = 2.7
NUM_COMPARED = 8


class CausalLMDrafter:
    """Drafts with ``model``, which must share the target's tokenizer.

    Raises:
        TokenizerError: the vocabularies differ in size (``load`` compares the tokenizers themselves).
    """

    features = NO_FEATURES

    def __init__(self, model: LeanTarget, target_vocab_size: int) -> None:
        if model.vocab_size != target_vocab_size:
            raise TokenizerError(
                f"draft model {model.name} has a vocabulary of {model.vocab_size}, the target {target_vocab_size}: "
                f"a draft model must share the target's tokenizer; choose another, or draft='lookup'"
            )
        self.model = model
        self.name = f"causal-lm ({model.name})"
        self._ctx: LeanContext = model.new_context()
        self._grown: DraftTree | None = None  # the last tree as forwarded here, before anyone pruned it

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """Prefill the new row; one that this model's context cannot hold stays empty here, and is not drafted for."""
        row = ctx.rows[-1]
        if self._room(row) > 0:
            self.model.prefill(self._ctx, row.tokens)
            return
        self._ctx.cache.reserve(self._ctx.num_rows + 1, 0)
        self._ctx.rows.append(Row(row.tokens, 0, row.prompt_length))

    def remove(self, ctx: Context, row: int) -> None:
        """Drop the row's slots."""
        self.model.remove(self._ctx, row)

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Grow ``budget.depth`` levels of ``budget.width`` nodes.

        With the keyed rule the best nodes of each level are kept, whatever their parents. With a classic rule no
        choice may look at the tokens it chooses between: the root has ``width`` drawn children, and each of them
        goes on as a chain.
        """
        rooms = [self._room(row) for row in ctx.rows]
        depth = min([budget.depth, *(room for room in rooms if room > 0)])
        if depth <= 0 or max(rooms) <= 0:
            return DraftTree.root(ctx.pending())
        logits = self._catch_up(ctx)
        level = _Level.root(ctx, [room > 0 for room in rooms], sampling, budget)
        for step in range(depth):
            level.add_children(logits, step)
            if step + 1 < depth:
                output = self.model.forward(self._ctx, level.tree(), first_node=level.first)
                logits = output.logits
        self._grown = level.tree()
        probs = level.draft_probs()
        return (
            DraftTree(self._grown.tokens, self._grown.parents, level.confidence(), probs)
            if (budget.width > 1)
            else DraftTree.chain(self._grown.tokens, level.confidence(), probs)
        )

    def _room(self, row: Row) -> int:
        """How deep a tree this model's context lets it draft for a row; once below 1 it stays there."""
        return self.model.max_length - row.length - 2

    def _catch_up(self, ctx: Context) -> Tensor:
        """Commit what the target accepted but this model has not read; logits (B, 1, V) after the pending token.

        A row without room is forwarded along with its pending token alone, and nothing comes of it.
        """
        missing = []
        for row, own in zip(ctx.rows, self._ctx.rows, strict=True):
            own.tokens, read = row.tokens, own.length if self._room(row) > 0 else row.length
            missing.append(row.tokens[read : row.length + 1])
        width = max(map(len, missing))
        padded = [tokens + [PAD] * (width - len(tokens)) for tokens in missing]
        chain = DraftTree.chain(torch.tensor(padded, device=ctx.device))
        output = self.model.forward(self._ctx, chain)
        for row, own in zip(ctx.rows, self._ctx.rows, strict=True):
            if self._room(row) > 0:
                own.length = row.length
        last = ctx.tensor([len(tokens) - 1 for tokens in missing])
        return output.logits.gather(1, last[:, None, None].expand(-1, 1, output.logits.shape[-1]))

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Commit the accepted path as far as it was forwarded here: the last level never was."""
        grown, self._grown = self._grown, None
        if grown is None:
            return
        if not tree.is_chain:
            self.model.commit(self._ctx, tree, accepted)
        forwarded = int(grown.depths.max()) - 1
        for row, own, num in zip(ctx.rows, self._ctx.rows, accepted.num.tolist(), strict=True):
            if self._room(row) > 0:
                own.length += 1 + min(num, forwarded)


class _Level:
    """A tree under construction and its newest level."""

    def __init__(
        self,
        pending: Tensor,
        wanted: Tensor,
        sampling: SamplingBatch,
        budget: Budget,
        starts: list[int],
        history: History | None,
    ) -> None:
        self._sampling, self._budget, self._starts, self._history = sampling, budget, starts, history
        self._tokens, self._parents = pending, torch.full_like(pending, -1)
        # A root without value has no children: how rows are left out.
        self._values = torch.zeros(pending.shape, device=pending.device).masked_fill(~wanted, -torch.inf)
        self._probs: list[Tensor] = []
        self.first = 0

    @classmethod
    def root(cls, ctx: Context, wanted: list[bool], sampling: SamplingBatch, budget: Budget) -> _Level:
        """The pending tokens; ``wanted`` tells which rows are drafted for."""
        history = ctx.history() if sampling.penalises else None
        rows = torch.tensor(wanted, device=ctx.device)[:, None]
        return cls(ctx.pending()[:, None], rows, sampling, budget, [row.length + 1 for row in ctx.rows], history)

    def tree(self) -> DraftTree:
        if self._budget.width == 1:
            return DraftTree.chain(self._tokens)
        return DraftTree(self._tokens, self._parents)

    def confidence(self) -> Tensor | None:
        """(B, N) product of the chances along each path; None for chains, which nobody weighs."""
        return None if self._budget.width == 1 else self._values.exp()

    def draft_probs(self) -> Tensor | None:
        """(B, N, V) q after each node for the classic rules; nodes without children hold zeros."""
        if not self._probs:
            return None
        known = torch.cat(self._probs, 1)
        missing = self._tokens.shape[1] - known.shape[1]
        return torch.cat([known, known.new_zeros(known.shape[0], missing, known.shape[2])], 1)

    def add_children(self, logits: Tensor, step: int) -> None:
        """Choose the next level from ``logits`` (B, W, V) after the newest level's nodes."""
        tree = self.tree()
        scores = self._scores(logits, tree)
        if self._budget.children == "keyed":
            tokens, parents, values = self._best(scores, step)
        else:
            tokens, parents, values = self._drawn(scores, step)
        # A child of an unused node, or one that q gives no chance, is unused too.
        usable = (self._tokens.gather(1, parents) != PAD) & values.isfinite()
        self._tokens = torch.cat([self._tokens, tokens.masked_fill(~usable, PAD)], 1)
        self._parents = torch.cat([self._parents, parents.masked_fill(~usable, -1)], 1)
        self._values = torch.cat([self._values, values.masked_fill(~usable, -torch.inf)], 1)
        self.first = tree.num_nodes

    def _scores(self, logits: Tensor, tree: DraftTree) -> Tensor:
        """The processed scores of the newest level: the same temperature, filters and penalties as the target's."""
        if self._history is None:
            return self._sampling.scores(logits, tree, None)
        # Penalties look at whole paths: give the older nodes empty logits and take the newest ones' result.
        padded = torch.cat([logits.new_zeros(logits.shape[0], self.first, logits.shape[2]), logits], 1)
        return self._sampling.scores(padded, tree, self._history)[:, self.first :]

    def _best(self, scores: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """The ``width`` best children of the level under the target's own noise."""
        _, width, vocab = scores.shape
        starts = [start + step for start in self._starts]
        perturbed = self._sampling.perturb(scores, torch.zeros_like(scores[..., 0], dtype=torch.int64), starts, 0)
        if self._budget.width == 1:
            best = perturbed.argmax(-1)
            # Nobody weighs one node against another here, so its chance (a softmax over V) is not worth its time.
            return best, torch.full_like(best, self.first), self._values[:, -1:]
        count = min(self._budget.width, vocab)
        tokens = perturbed.topk(count, dim=-1).indices  # (B, W, C)
        values = self._values[:, self.first :, None] + self._log_chance(scores, perturbed, tokens)
        kept = values.flatten(1).topk(min(self._budget.width, width * count), dim=-1)
        parents = self.first + kept.indices // count
        return tokens.flatten(1).gather(1, kept.indices), parents, kept.values

    def _log_chance(self, scores: Tensor, perturbed: Tensor, tokens: Tensor) -> Tensor:
        """Log of the chance that each of ``tokens`` (B, W, C) is what the target draws."""
        plain = scores.log_softmax(-1).gather(-1, tokens)
        if self._sampling.all_greedy:
            return plain
        rivals = perturbed.topk(min(NUM_COMPARED, perturbed.shape[-1]), dim=-1).values
        norm = (SHARPNESS * rivals).logsumexp(-1, keepdim=True)
        keyed = SHARPNESS * perturbed.gather(-1, tokens) - norm
        return torch.where(self._sampling.greedy, plain, keyed).float()

    def _drawn(self, scores: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Children drawn from q: ``width`` of the root, then one of each node."""
        probs = self._sampling.probs(scores)
        self._probs.append(probs)
        rows, width, vocab = probs.shape
        count = min(self._budget.width, vocab) if step == 0 else 1
        draws = count if self._budget.children == "sampled" else 1
        ids = torch.arange(vocab, device=probs.device)
        noise = torch.stack(
            [
                torch.stack([gumbel(hash_bits(seed, (DRAFT, start, step, k), ids)) for k in range(width * draws)])
                for seed, start in zip(self._sampling.seeds, self._starts, strict=True)
            ]
        ).view(rows, width, draws, vocab)
        perturbed = probs.log()[:, :, None] + noise
        if self._budget.children == "sampled":
            best = perturbed.max(-1)
            tokens, alive = best.indices, best.values.isfinite()
        else:  # the top k under Gumbel noise are k draws without replacement, in order
            top = perturbed[:, :, 0].topk(count, dim=-1)
            tokens, alive = top.indices, top.values.isfinite()
        chance = probs.log().gather(-1, tokens).masked_fill(~alive, -torch.inf)
        values = (self._values[:, self.first :, None] + chance).flatten(1)
        nodes = torch.arange(self.first, self.first + width, device=probs.device)
        return tokens.flatten(1), nodes[:, None].expand(-1, tokens.shape[2]).reshape(1, -1).expand(rows, -1), values
