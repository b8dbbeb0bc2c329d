"""An EAGLE net over KV slots of its own, and its whole draft as one recording: a GPU drafts a tree in one launch.

What is recorded is ``grow``, the loop of eager drafting, over static inputs: the net's catch-up with what was accepted
last, and then the tree itself, chain, static or dynamic, by ``Growth`` as ever, its tokens never leaving the device.

Shape suffixes: B rows, W entries, D levels, F features, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.drafters.base import Budget
from draftwing.drafters.growth import Growth
from draftwing.model.cache import KVCache, TreeAttention
from draftwing.model.linear import MIN_ROWS
from draftwing.model.rope import Rotary
from draftwing.model.target import Context, on_device
from draftwing.nets.eagle import EagleNet
from draftwing.run.graphs import Outputs, Pool, Record, Recording, Recordings, round_up_rows, round_up_slots
from draftwing.sampling import SamplingBatch
from draftwing.tree import PAD, DraftTree

__all__ = ["CatchUp", "EagleRun", "grow"]

Step = Callable[[Tensor, Tensor, DraftTree, int], tuple[Tensor, Tensor]]


def grow(growth: Growth, logits: Tensor, states: Tensor, step: Step, *, shifted: bool) -> DraftTree:
    """Grow a tree from the root's logits (B, 1, V) and state (B, 1, H).

    Args:
        step: one draft step: tokens (B, W), states (B, W, H), the tree, its first new node -> logits (B, W, V) of the
            target's vocabulary, and states.
        shifted: an entry reads its own token, not the one before.
    """
    start = 0
    while True:
        growth.extend(logits)
        if growth.done:
            return growth.finish()
        tree, first = growth.drafted(), growth.first
        above = tree.parents[:, first:].clamp(min=start)  # an unused node may follow any
        tokens = tree.tokens[:, first:] if shifted else tree.tokens.gather(1, above)
        states = states.gather(1, (above - start)[:, :, None].expand(-1, -1, states.shape[2]))
        logits, states = step(tokens, states, tree, first)
        start = first


@dataclass(frozen=True)
class CatchUp:
    """What a net reads before it drafts.

    Attributes:
        tokens: for each row those of its waiting entries.
        features: (B, at least the most entries, F) the target's, of the same entries.
        fed: entries that lie in each row's slots already.
        lengths: entries of each row before the tree's root comes on top.
        pending: the roots' tokens.
        wanted: which rows are drafted for.
    """

    tokens: list[list[int]]
    features: Tensor
    fed: list[int]
    lengths: list[int]
    pending: list[int]
    wanted: list[bool]


class EagleRun:
    """The net, its slots, and what was recorded over them.

    Args:
        record: how drafts are recorded; None: never.
    """

    def __init__(self, net: EagleNet, device: torch.device, record: Record | None = None) -> None:
        config = net.config
        self.net, self.record = net, record
        self.rotary = Rotary(config.rope, net.dtype, device)
        self.cache = KVCache(1, config.num_kv_heads, config.head_dim, net.dtype, device)
        self.shifted = config.inputs != "feature-unshifted"
        self._drafts: Recordings[_Draft] = Recordings(self.cache)

    @classmethod
    def of(cls, net: EagleNet, device: torch.device, record: Record | None, holder: object) -> EagleRun:
        """One for ``holder``: with a ``record`` that of a holder before it, whose recordings still hold."""
        if record is None or not net.config.rope.position_only or net.kernel is not None:
            return cls(net, device)
        if net.runs is None or net.runs[0] is not record:
            net.runs = record, Pool[EagleRun]()
        pool: Pool[EagleRun] = net.runs[1]
        return pool.lend(holder, lambda: cls(net, device, record))

    # --- the net ---------------------------------------------------------------------------------------------------

    def fuse(self, features: Tensor) -> Tensor:
        """(B, W, F) -> (B, W, H)."""
        return self.net.fuse(features.flatten(0, 1)).view(*features.shape[:2], -1)

    def logits(self, read: Tensor) -> Tensor:
        """(B, W, H) -> (B, W, V) of the target's vocabulary."""
        found = self.net.logits(read.flatten(0, 1))
        return self.net.to_target(found.view(*read.shape[:2], -1))

    def run(
        self,
        tokens: Tensor,
        states: Tensor,
        tree: DraftTree,
        lengths: Sequence[int] | Tensor,
        first_row: int = 0,
        first_node: int = 0,
        width: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What is fed back and what the LM head reads, (B, W, H) each, of the tree's nodes from ``first_node`` on.

        Args:
            tokens: (B, W) what each entry reads; unused ones hold PAD.
            states: (B, W, H).
            lengths: entries of each row before the tree; (B,) in a recording, which gives ``width``: slots looked at.
        """
        rows, nodes = tokens.shape
        real, config = rows * nodes, self.net.config
        if isinstance(lengths, Tensor):
            assert width is not None
            on_host, lengths_B, upto = None, lengths, width
        else:
            self.cache.reserve(first_row + rows, max(lengths) + tree.num_nodes)
            on_host, lengths_B, upto = lengths, on_device(lengths, tokens.device), max(lengths) + tree.max_depth + 1
        positions = lengths_B[:, None] + tree.depths[:, first_node:]
        cis = self.rotary.cis(positions, upto=upto).view(real, 1, -1)
        padding = max(MIN_ROWS - real, 0)  # padded once here, not in every matrix
        ids = F.pad(tokens.clamp(min=0).flatten(), (0, padding))
        heads, scale, padded = config.num_heads, config.head_dim**-0.5, real + padding
        attend = TreeAttention(
            self.cache, first_row, on_host, lengths_B, tree, first_node, [None], heads, scale, padded, width
        )
        fed_back, read = self.net.forward(ids, F.pad(states.flatten(0, 1), (0, 0, 0, padding)), cis, attend)
        return fed_back[:real].view(rows, nodes, -1), read[:real].view(rows, nodes, -1)

    # --- a whole draft ---------------------------------------------------------------------------------------------

    def can_record(self, sampling: SamplingBatch, budget: Budget) -> bool:
        """Whether such a draft can be one recording.

        Not where the host decides as it grows, and not where scores look at more than temperatures: top-p asks the
        device how far it has to sort, penalties read a history that grows, and q is kept for the classic rules alone.
        """
        plain = budget.rule is None and budget.children in ("keyed", "top")
        return self.record is not None and plain and sampling.only_temperature

    def draft(self, ctx: Context, waiting: CatchUp, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Catch up and grow the tree of ``budget``: the very one that ``Growth`` gives eagerly."""
        assert self.record is not None
        count, rows, device = max(map(len, waiting.tokens)), round_up_rows(ctx.num_rows), ctx.device
        # After a tree of this budget no row waits for more: one bucket for all that can come of it.
        entries = budget.depth + 1 if count <= budget.depth + 1 else 1 << (count - 1).bit_length()
        drafted = len(budget.paths) if budget.paths else budget.width * budget.depth
        most = max(max(waiting.fed) + entries, max(waiting.lengths) + 1 + drafted)
        self.cache.reserve(rows, most)
        width = round_up_slots(most, self.cache)
        # What the scores' code looks at on the host, and nothing else of a request.
        kind = (sampling.all_greedy, sampling.num_greedy > 0, sampling.scales)
        key = (rows, entries, budget, width, kind)
        draft = self._drafts.get(key, lambda: self._draft(rows, entries, budget, width, waiting, sampling, device))
        draft.fill(waiting, sampling, [row.length + 1 for row in ctx.rows])
        assert draft.recording is not None
        found = [output[: ctx.num_rows].clone() for output in draft.recording.run()]  # a step keeps its tree
        if len(found) == 1:
            return DraftTree.chain(found[0])
        tokens, parents, confidence = found
        return DraftTree(tokens, parents, confidence, depth=budget.depth)

    def _draft(
        self,
        rows: int,
        entries: int,
        budget: Budget,
        width: int,
        waiting: CatchUp,
        sampling: SamplingBatch,
        device: torch.device,
    ) -> _Draft:
        assert self.record is not None
        draft = _Draft(rows, entries, budget, waiting.features, sampling, self.rotary.table(width), device)
        draft.recording = Recording(self.record, lambda: self._grow(draft, budget, width))
        return draft

    def _grow(self, draft: _Draft, budget: Budget, width: int) -> Outputs:
        """The tree's tokens, and where it is no chain its parents and confidence: what is recorded."""
        chain = DraftTree.chain(draft.tokens)
        fed_back, read = self.run(chain.tokens, self.fuse(draft.features), chain, draft.fed, width=width)
        states, read = (each.gather(1, draft.last.expand(-1, 1, each.shape[2])) for each in (fed_back, read))
        ctx = _Rows(draft.tokens.device, pending_ids=draft.pending)
        growth = Growth(ctx, draft.wanted, draft.sampling, budget, self.net.config.calibration)

        def step(tokens: Tensor, states: Tensor, tree: DraftTree, first: int) -> tuple[Tensor, Tensor]:
            fed_back, read = self.run(tokens, states, tree, draft.lengths, 0, first, width)
            return self.logits(read), fed_back

        tree = grow(growth, self.logits(read), states, step, shifted=self.shifted)
        if tree.is_line:
            return (tree.tokens,)
        assert tree.confidence is not None
        return tree.tokens, tree.parents, tree.confidence


# --- the static inputs of a recorded draft ---------------------------------------------------------------------------


@dataclass
class _Rows(Context):
    """The rows as far as a recording may know them: by the tensor of their pending tokens."""

    pending_ids: Tensor = None  # type: ignore[assignment]  # always given

    def pending(self) -> Tensor:
        return self.pending_ids


class _StaticSampling(SamplingBatch):
    """Temperatures and noise of whatever rows are filled in; which are greedy, only as far as all or none are.

    Args:
        like: rows of the same kind, fewer than ``num_rows`` perhaps.
        num_levels: positions that noise is held for.
    """

    def __init__(self, like: SamplingBatch, num_rows: int, num_levels: int) -> None:
        super().__init__([*like.rows, *[like.rows[0]] * (num_rows - len(like.rows))], like.noise, like.device)
        self._levels: Tensor | None = None
        if self.all_greedy:
            return
        self.greedy, self.temperature = torch.zeros_like(self.greedy), torch.ones_like(self.temperature)
        self._levels = torch.zeros(num_rows, num_levels, like.noise.vocab_size, device=like.device)

    def fill(self, other: SamplingBatch, starts: Sequence[int], *, with_noise: bool) -> None:
        if self._levels is None:
            return
        rows = len(other.rows)
        self.greedy[:rows].copy_(other.greedy)
        self.temperature[:rows].copy_(other.temperature)
        if with_noise:
            self._levels[:rows].copy_(other.noise.block(other.seeds, starts, self._levels.shape[1]))

    def perturb_level(self, scores: Tensor, starts: Sequence[int], level: int) -> Tensor:
        return scores if self._levels is None else self.add_noise(scores, self._levels[:, level : level + 1])


class _Draft:
    """The inputs, views of one tensor that the host fills in one copy.

    Attributes:
        tokens: (B, W) of the catch-up's entries, PAD past a row's own; features: (B, W, F).
        fed, lengths, pending: (B,); last: (B, 1, 1) the last entry of each row; wanted: (B, 1).
    """

    def __init__(
        self,
        rows: int,
        entries: int,
        budget: Budget,
        features: Tensor,
        sampling: SamplingBatch,
        table: Tensor,
        device: torch.device,
    ) -> None:
        self._numbers = torch.zeros(rows, entries + 5, dtype=torch.int64, device=device)
        self.tokens = self._numbers[:, :entries]
        self.fed, self.lengths, self.pending, last, wanted = self._numbers[:, entries:].unbind(1)
        self.last, self.wanted = last[:, None, None], wanted[:, None]
        self.features = features.new_zeros(rows, entries, features.shape[2])
        self.sampling = _StaticSampling(sampling, rows, budget.depth)
        self._with_noise = budget.children == "keyed"
        self._entries, self._table = entries, table
        self.recording: Recording | None = None

    def fill(self, waiting: CatchUp, sampling: SamplingBatch, starts: Sequence[int]) -> None:
        columns = zip(
            waiting.tokens, waiting.fed, waiting.lengths, waiting.pending, map(int, waiting.wanted), strict=True
        )
        numbers = [
            [*ids, *[PAD] * (self._entries - len(ids)), fed, length, pending, max(len(ids), 1) - 1, wanted]
            for ids, fed, length, pending, wanted in columns
        ]
        rows, count = len(numbers), min(waiting.features.shape[1], self._entries)
        self._numbers[:rows].copy_(on_device(numbers, self._numbers.device))
        self.features[:rows, :count].copy_(waiting.features[:, :count])
        if count < self._entries:  # never what lay there: a NaN would not stay in its own entry (0 * NaN is NaN)
            self.features[:, count:].zero_()
        self.sampling.fill(sampling, starts, with_noise=self._with_noise)
