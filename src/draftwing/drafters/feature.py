"""An EAGLE head as the drafter (EAGLE-1 2401.15077, EAGLE-2 2406.16858, EAGLE-3 2503.01840).

It keeps KV slots of its own: entry i (the feature at position i with the token after it) lies in slot i, so that the
root of a tree is the entry before the pending token, in slot ``length - 1``. While a tree grows, an entry's feature is
the net's own guess; after the step the accepted path is fed again with the target's true features, in one forward.

Shape suffixes: B rows, W entries, P nodes on a path, F features, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.drafters.base import Budget, Traits
from draftwing.drafters.growth import Growth, request_for
from draftwing.drafters.recorded import CatchUp, EagleRun, grow
from draftwing.errors import ConfigError
from draftwing.model.lean import LeanContext, LeanTarget
from draftwing.model.linear import Linear
from draftwing.model.target import Context, FeatureSpec, Target, TargetOutput
from draftwing.nets.eagle import EagleNet
from draftwing.run.kernel.fused_eagle import FusedEagle
from draftwing.sampling import SamplingBatch
from draftwing.tree import PAD, Accepted, DraftTree

__all__ = ["EagleDrafter"]

PREFILL_CHUNK = 256


class EagleDrafter:
    """Drafts with ``net`` for ``target``.

    Raises:
        ConfigError: the net reads features that the target does not have.
    """

    def __init__(self, net: EagleNet, target: Target, name: str = "") -> None:
        config = net.config
        if config.vocab_size != target.vocab_size or max(config.taps) > target.num_layers:
            raise ConfigError(
                f"the head reads taps {config.taps} of a target with a vocabulary of {config.vocab_size}; "
                f"{target.name} has {target.num_layers} layers and {target.vocab_size} tokens: use a head trained "
                f"for it"
            )
        self.net, self.features = net, FeatureSpec(config.taps)
        self.name = f"eagle{config.version}" + (f" ({name})" if name else "")
        # What a draft takes depends on the net's shape and on how its matrices are read, not on their numbers.
        identity = f"{config} {net.dtype} {sum(part.num_bytes for part in net.modules() if isinstance(part, Linear))}"
        self.traits = Traits(reads_features=True, grows_by_rule=True, identity=identity)
        dtype, device = net.dtype, target.device
        # Where the target's forwards are recorded, so are the drafts.
        record = target.record if isinstance(target, LeanTarget) else None
        self._run = EagleRun.of(net, device, record, self)
        self._cache, self._rotary, self._shifted = self._run.cache, self._run.rotary, self._run.shifted
        self._fed: list[int] = []  # entries of each row whose slots hold true features
        self._none = torch.zeros(0, 1, config.hidden_size * len(config.taps), dtype=dtype, device=device)
        # Features since the last draft, step by step, (B, at least a row's entries, F) each, with the rows' lengths
        # before: in a run of plain steps they are only put down here.
        self._waiting: list[tuple[Tensor, list[int]]] = []
        self._read: list[int] | None = None  # entries of each row once the step that drafts is done: it may never be
        self._fused = None if net.kernel is None else FusedEagle(net.kernel, net, net.read_head)
        self.at_once = self._fused is not None and config.rope.position_only and config.inputs == "feature-shifted"

    # --- the rows --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """Feed the prompt's entries but the last, which waits to be the first tree's root."""
        assert features is not None
        tokens, row, count = ctx.rows[-1].tokens, len(self._fed), features.shape[1]
        self._cache.reserve(row + 1, count + 1)
        self._cache.clear(row)
        features = features.to(self._none.dtype)
        for start in range(0, count - 1, PREFILL_CHUNK):
            stop = min(start + PREFILL_CHUNK, count - 1)
            ids = tokens[start + 1 : stop + 1] if self._shifted else tokens[start:stop]
            chain = DraftTree.chain(ctx.tensor([ids]))
            states = self._run.fuse(features[:, start:stop])
            if self._fused is not None:
                self._fused.forward(
                    chain.tokens, states, chain, self._cache, self._rotary, [start], row, 0, want_logits=False
                )
            else:
                self._run.run(chain.tokens, states, chain, [start], row)
        last = features[:, -1:] if count else features.new_zeros(1, 1, features.shape[2])
        waiting, self._read = self._joined(ctx), None
        self._fed.append(max(count - 1, 0))
        self._waiting = [(torch.cat([waiting, F.pad(last, (0, 0, 0, waiting.shape[1] - 1))]), list(self._fed))]

    @torch.inference_mode()
    def remove(self, ctx: Context, row: int) -> None:
        """Drop the row's slots; the last row takes its place."""
        last, waiting, self._read = len(self._fed) - 1, self._joined(ctx), None
        self._cache.move_row(last, row)
        self._fed[row] = self._fed[-1]
        self._fed.pop()
        self._waiting = [(torch.cat([waiting[:row], waiting[last:], waiting[row + 1 : last]])[:last], list(self._fed))]

    # --- a step ----------------------------------------------------------------------------------------------------

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Grow a tree in the shape that ``budget`` asks for (see ``growth``)."""
        wanted = [row.length > 0 for row in ctx.rows]  # a prompt of one token has no feature to start from
        if budget.depth == 0 or not any(wanted):
            return DraftTree.root(ctx.pending())
        return self._propose(ctx, wanted, sampling, budget)

    @torch.inference_mode()
    def _propose(self, ctx: Context, wanted: list[bool], sampling: SamplingBatch, budget: Budget) -> DraftTree:
        waiting = self._waiting_entries(ctx, wanted)
        if self._run.can_record(sampling, budget):
            return self._run.draft(ctx, waiting, sampling, budget)
        fused, calibration = self._fused, self.net.config.calibration
        request = request_for(ctx, wanted, sampling, budget, budget.depth, calibration) if self.at_once else None
        if request is not None and fused is not None:
            features = waiting.features[:, : max(map(len, waiting.tokens))]
            states = features if fused.fuses else self._run.fuse(features)
            drafted = fused.draft(
                request, waiting.tokens, states, self._cache, self._rotary, waiting.fed, waiting.lengths
            )
            return drafted.tree
        logits, states = self._catch_up(ctx, waiting)
        growth = Growth(ctx, wanted, sampling, budget, calibration)

        def step(tokens: Tensor, states: Tensor, tree: DraftTree, first: int) -> tuple[Tensor, Tensor]:
            return self._forward(tokens, states, tree, waiting.lengths, first_node=first)

        return grow(growth, logits, states, step, shifted=self._shifted)

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Keep the true features of the accepted path until a tree is drafted again."""
        assert output.features is not None
        rewritten = isinstance(ctx, LeanContext) and ctx.graphs is not None  # by the next replay: these need a copy
        fresh = _kept(output.features, accepted.path, as_view=tree.is_line and not rewritten)
        if self._read is not None:
            self._fed, self._read, self._waiting = self._read, None, []
        self._waiting.append((fresh.to(self._none.dtype), ctx.lengths))

    def _joined(self, ctx: Context) -> Tensor:
        """(B, W, F) what is waiting, W at least the most entries of a row."""
        if not self._waiting:
            return self._none
        pieces, starts = [piece for piece, _ in self._waiting], [start for _, start in self._waiting]
        ends = [*starts[1:], [row.length for row, _ in zip(ctx.rows, starts[0], strict=False)]]
        counts = [[end - start for start, end in zip(*pair, strict=True)] for pair in zip(starts, ends, strict=True)]
        if len(pieces) == 1:
            return pieces[0][:, : max(1, *counts[0])] if counts[0] else pieces[0]
        if all(min(each) == max(each) for each in counts):
            return torch.cat([piece[:, : each[0]] for piece, each in zip(pieces, counts, strict=True)], 1)
        rows = [torch.cat([piece[row, : each[row]] for piece, each in zip(pieces, counts, strict=True)])
                for row in range(len(counts[0]))]  # fmt: skip
        padded: Tensor = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return padded

    def _waiting_entries(self, ctx: Context, wanted: list[bool]) -> CatchUp:
        """Each row's entries since the last draft."""
        fed, shift = self._fed, 1 if self._shifted else 0
        fresh = [row.tokens[start + shift : row.length + shift] for row, start in zip(ctx.rows, fed, strict=True)]
        self._read = [row.length for row in ctx.rows]
        lengths = [max(row.length - 1, 0) for row in ctx.rows]
        pending = [row.tokens[row.length] for row in ctx.rows]
        return CatchUp(fresh, self._joined(ctx), fed, lengths, pending, wanted)

    def _catch_up(self, ctx: Context, waiting: CatchUp) -> tuple[Tensor, Tensor]:
        """Feed each row's waiting entries; logits (B, 1, V) and states (B, 1, H) of the last: the root's."""
        width = max(map(len, waiting.tokens))
        chain = DraftTree.chain(ctx.tensor([[*ids, *[PAD] * (width - len(ids))] for ids in waiting.tokens]))
        states = self._run.fuse(waiting.features[:, :width])
        last = ctx.tensor([max(len(ids), 1) - 1 for ids in waiting.tokens])[:, None, None]
        return self._forward(chain.tokens, states, chain, waiting.fed, last=last)

    # --- the net ---------------------------------------------------------------------------------------------------

    def _forward(
        self,
        tokens: Tensor,
        states: Tensor,
        tree: DraftTree,
        lengths: list[int],
        first_node: int = 0,
        last: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One draft step of the tree's nodes from ``first_node`` on: target logits (B, W, V) and states (B, W, H).

        Args:
            tokens: (B, W) what each entry reads; unused ones hold PAD.
            states: (B, W, H).
            lengths: entries of each row before the tree.
            last: (B, 1, 1) the one node of each row whose logits and state are wanted; None for all.
        """
        if self._fused is not None:
            logits, fed_back = self._fused.forward(
                tokens, states, tree, self._cache, self._rotary, lengths, 0, first_node
            )
            if last is None or tokens.shape[1] == 1:
                return logits, fed_back
            return logits.gather(1, last.expand(-1, 1, logits.shape[2])), fed_back.gather(
                1, last.expand(-1, 1, fed_back.shape[2])
            )
        fed_back, read = self._run.run(tokens, states, tree, lengths, 0, first_node)
        if last is not None:
            fed_back, read = (each.gather(1, last.expand(-1, 1, each.shape[2])) for each in (fed_back, read))
        return self._run.logits(read), fed_back


def _kept(features: Tensor, path: Tensor, *, as_view: bool) -> Tensor:
    """The features (B, P, F) of the nodes on each row's ``path`` (B, P); past a row's own end anything.

    ``as_view``: the nodes are the first ones.
    """
    if as_view:
        return features if features.shape[1] == path.shape[1] else features[:, : path.shape[1]]
    if len(path) == 1:
        return features.index_select(1, path[0].clamp(min=0))
    return features.gather(1, path.clamp(min=0)[:, :, None].expand(-1, -1, features.shape[2]))
