"""A smaller causal LM as the drafter (Leviathan et al. 2211.17192; trees as in SpecInfer 2305.09781).

It keeps its own KV slots. A tree grows level by level, each level one forward of the new nodes alone.

Shape suffixes: B rows, W nodes of a level, N nodes, V vocabulary, C candidates.
"""

from __future__ import annotations

from torch import Tensor

from draftwing.drafters.base import Budget, Traits
from draftwing.drafters.growth import Growth, request_for
from draftwing.errors import TokenizerError
from draftwing.model.lean import LeanContext, LeanTarget
from draftwing.model.target import NO_FEATURES, Context, Row, TargetOutput
from draftwing.run.request import Drafted
from draftwing.sampling import SamplingBatch
from draftwing.tree import PAD, Accepted, DraftTree

__all__ = ["CausalLMDrafter"]


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
        self.traits = Traits(grows_by_rule=True, identity=f"{model.name}, {model.num_weight_bytes} bytes")
        self._ctx: LeanContext = model.new_context()
        self.at_once = model.drafts
        self._slots: Growth | Drafted | None = None  # of the tree that is being verified
        self._forwarded = 0  # levels of it below the root that were forwarded here

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
        """Grow a tree in the shape of ``budget`` (see ``growth``), as deep as this model's context lets it."""
        rooms = [self._room(row) for row in ctx.rows]
        room = min((room for room in rooms if room > 0), default=0)
        self._slots = None
        if min(room, budget.depth) <= 0:
            return DraftTree.root(ctx.pending())
        wanted, depth = [room > 0 for room in rooms], min(room, budget.depth)
        request = request_for(ctx, wanted, sampling, budget, depth) if self.at_once else None
        if request is not None:
            drafted = self._slots = self.model.draft(self._ctx, request, self._missing(ctx))
            self._caught_up(ctx)
            self._forwarded = drafted.num_levels - 1
            return drafted.tree
        logits = self._catch_up(ctx)
        growth = self._slots = Growth(ctx, wanted, sampling, budget)
        self._forwarded = 0
        while True:
            growth.extend(logits)
            if growth.done or growth.level == depth:
                return growth.finish()
            logits = self.model.forward(self._ctx, growth.drafted(), first_node=growth.first).logits
            self._forwarded = growth.level

    def _room(self, row: Row) -> int:
        """How deep a tree this model's context lets it draft for a row; once below 1 it stays there."""
        return self.model.max_length - row.length - 2

    def _missing(self, ctx: Context) -> list[list[int]]:
        """What of each row the target accepted but this model has not read, the pending token included.

        A row without room reads its pending token alone, and nothing comes of it.
        """
        missing = []
        for row, own in zip(ctx.rows, self._ctx.rows, strict=True):
            own.tokens, read = row.tokens, own.length if self._room(row) > 0 else row.length
            missing.append(row.tokens[read : row.length + 1])
        return missing

    def _caught_up(self, ctx: Context) -> None:
        for row, own in zip(ctx.rows, self._ctx.rows, strict=True):
            if self._room(row) > 0:
                own.length = row.length

    def _catch_up(self, ctx: Context) -> Tensor:
        """Read what is missing; logits (B, 1, V) after the pending token."""
        missing = self._missing(ctx)
        width = max(map(len, missing))
        padded = [tokens + [PAD] * (width - len(tokens)) for tokens in missing]
        output = self.model.forward(self._ctx, DraftTree.chain(ctx.tensor(padded)))
        self._caught_up(ctx)
        last = ctx.tensor([len(tokens) - 1 for tokens in missing])
        return output.logits.gather(1, last[:, None, None].expand(-1, 1, output.logits.shape[-1]))

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Commit the accepted path as far as it was forwarded here: leaves never were."""
        slots, self._slots = self._slots, None
        if slots is None:
            return
        # The deepest level was never forwarded: its nodes have no slots, and near the end there is no room for any.
        path = slots.slots_of(accepted.path)[:, : 1 + self._forwarded]
        if not slots.is_chain:  # even of a lone path the nodes may stand apart here
            apart = DraftTree(tree.tokens, tree.parents)
            self.model.commit(self._ctx, apart, Accepted(path, accepted.num, accepted.bonus))
        num_kept = (path != PAD).sum(1).tolist()  # no wait: the step has handed its tokens out already
        for row, own, num in zip(ctx.rows, self._ctx.rows, num_kept, strict=True):
            if self._room(row) > 0:
                own.length += min(num, 1 + self._forwarded)
