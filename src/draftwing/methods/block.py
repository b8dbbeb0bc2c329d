"""Nets that guess several tokens in one pass: shared by Medusa, Hydra, DFlash and DSpark.

Like EAGLE, they pair the feature at position i with the token after it. From the last such entry, whose token is
pending, one pass opens a *block*: everything needed to guess the next K tokens. A tree then grows without another pass
of the net. Level k has one distribution for all its nodes, or one per node that a small step (``guess``) computes from
the block and the tokens on the node's path. With a single distribution per level, a path's probability is the product
of its tokens' probabilities, so level-by-level growth finds the best-first tree of DDTree (2604.12989).

Shape suffixes: B rows, T tokens, C entries that blocks start from, W nodes of a level, N = 1 + masks, R = B * C,
K levels, H hidden, F features, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from itertools import count
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.methods.base import Drafter
from draftwing.methods.method import NetMethod, NewNet
from draftwing.methods.net import DraftNet, Scored
from draftwing.methods.net_drafter import EagleDrafter
from draftwing.methods.objectives import CHUNK, GPU_CHUNK, DraftLoss, StepGuesses, Truth, tv
from draftwing.models.attention import Attend
from draftwing.models.linear import Linear
from draftwing.models.target import Target
from draftwing.runtime.forward import Entries
from draftwing.runtime.tree_builder import Drafted, DraftRequest, VerifyRequest
from draftwing.torch_utils import on_device
from draftwing.tree import DraftTree


class Guess(NamedTuple):
    """The distribution of the tokens after the nodes of a level."""

    logits: Tensor  # (B, W, V) over the target's tokens, or (B, 1, V) if all nodes of the level share one distribution
    carried: Tensor | None = None  # (B, W, ...) state that the nodes' children need, or None
    confidence: Tensor | None = None  # (B, W) how far the distribution can be trusted, in (0, 1], or None


class BlockNet(DraftNet):
    """A net that guesses ``num_levels`` tokens in one pass.

    Attributes:
        num_masks: mask tokens that a second pass reads after the pending token, in the same slots as the entries;
            0 if the last entry's state is all that a block needs.
        share: fraction of a text's entries from which training starts blocks.
    """

    num_masks: int = 0
    share: float = 1.0

    @property
    @abstractmethod
    def num_levels(self) -> int:
        """K."""

    def start_from(self, target_head: Linear) -> Self:
        """Initialise a new net from the target's LM head; by default the weights stay random."""
        return self

    @property
    def mask_id(self) -> int:
        """The id that stands for an unknown token."""
        return int(self.config.vocab_size)

    @property
    def is_traceable(self) -> bool:
        """False: the CPU kernel grows trees by one pass per level."""
        return False

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """Return each entry's state unchanged: the default for nets without attention."""
        return states, states

    # --- drafting --------------------------------------------------------------------------------------------------

    def open(self, out: Tensor, depth: int) -> Tensor:
        """Return every row's block, made from the output of the pass; only its first ``depth`` levels will be used.

        Args:
            out: (B, 1, H) of the last entry, or (B, N, H) of the pending token and the masks.
        """
        return out

    @abstractmethod
    def guess(self, level: int, block: Tensor, tokens: Tensor, carried: Tensor | None) -> Guess:
        """Guess the tokens after the nodes of a level.

        Args:
            level: 0 for the root.
            block: from ``open``.
            tokens: (B, W) of the nodes; unused nodes hold any token.
            carried: (B, W, ...) of each node's parent, None for the root.
        """

    # --- training --------------------------------------------------------------------------------------------------

    @abstractmethod
    def levels(
        self, ids: Tensor, features: Tensor, entries: Tensor, num_levels: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the LM head's input at each level for all of ``entries`` (C,), with the text's tokens as drafted.

        Level k of entry i guesses the token at i + 2 + k.

        Args:
            ids: (B, T), padded far enough that every block lies in it.
            features: (B, T, F) the target's, of the same tokens.

        Yields:
            (R, H) and the LM head's matrix (V_draft, H).
        """

    def level_head(self, level: int) -> Linear:
        return self.read_head

    def level_logits(self, level: int, read: Tensor) -> Tensor:
        """Map (R, H) of ``levels`` to logits (R, V) over the target's tokens."""
        head = self.level_head(level)
        logits: Tensor = head.spread(read.to(head.dtype), self.target_ids, self.config.vocab_size)
        return logits

    def confidence_logits(self, read: Tensor) -> Tensor | None:
        """Map (R, H) of ``levels`` to the log odds (R,) of 1 - TV(p, q), for nets that learn to predict it."""
        return None


# --- drafting --------------------------------------------------------------------------------------------------------


class BlockDrafter(EagleDrafter):
    """Drafts with a ``BlockNet``: keeps the row state of ``EagleDrafter``, and grows trees from the block."""

    net: BlockNet

    def draft(self, request: DraftRequest, verify: VerifyRequest | None = None) -> Drafted:
        net, request = self.net, request.within(self.net.num_levels)
        chain, last, states = self.runner.catch_up(request)
        entries = Entries(chain, request.lengths, states=states)
        _, out = self.runner.forward(entries, want_logits=False, last=last)
        assert out is not None
        if net.num_masks:
            out = self._read_masks(request)
        block, builder, start = net.open(out, request.budget.depth), request.builder(), 0
        guess = net.guess(0, block, on_device([request.roots], net.device).T, None)
        for level in count(1):
            builder.extend(guess.logits, guess.confidence)
            if builder.done:
                break
            tree, first, carried = builder.expanded(), builder.first, guess.carried
            if carried is not None:
                parents = tree.parents[:, first:].clamp(min=start) - start  # an unused node may have any parent
                carried = carried.gather(1, parents[:, :, None].expand(-1, -1, carried.shape[2]))
            guess, start = net.guess(level, block, tree.tokens[:, first:].clamp(min=0), carried), first
        return builder.finish()

    def _read_masks(self, request: DraftRequest) -> Tensor:
        """Run the pending token and the masks, which all see each other and every entry: (B, N, H)."""
        net, nodes, roots = self.net, 1 + self.net.num_masks, request.roots
        tokens = on_device([[root, *[net.mask_id] * net.num_masks] for root in roots], net.device)
        order = torch.arange(nodes, device=net.device).expand(len(roots), -1)
        everything = torch.ones(len(roots), nodes, nodes, dtype=torch.bool, device=net.device)
        tree = DraftTree(tokens, order - 1, paths=(everything, order))
        _, out = self.runner.forward(Entries(tree, [root + 1 for root in request.root_slots]), want_logits=False)
        assert out is not None
        return out


# --- training --------------------------------------------------------------------------------------------------------


class BlockLoss(DraftLoss):
    """The loss of a ``BlockNet``: each level counts as a step of an unroll, weighted by ``Objective.decay``.

    Nothing is fed back; later levels read the text's tokens, if any. ``later_share`` thins out the entries that blocks
    start from (``BlockNet.share``); less is faster.
    """

    def extra_loss(
        self, read: Tensor, weight: Tensor, truth: Truth, where: Tensor, dtype: torch.dtype
    ) -> Tensor | None:
        """Compare the net's confidence with 1 - TV, the share of its guesses that sampling keeps."""
        confidence = self.net.confidence_logits(read)
        if confidence is None:
            return None
        read, weight, probs = read.to(dtype), weight.to(dtype), truth.probs
        chunk = CHUNK.get(read.device.type, GPU_CHUNK)
        kept = torch.empty(len(read), device=read.device)
        with torch.no_grad():
            for start in range(0, len(read), chunk):
                logits = (read[start : start + chunk] @ weight.T).to(probs.dtype)
                kept[start : start + chunk] = 1 - tv(logits, probs[where[start : start + chunk]])
        return F.binary_cross_entropy_with_logits(confidence.float(), kept, reduction="sum")

    def steps(self, scored: Scored, num_steps: int) -> Iterator[StepGuesses]:
        entries = self.entries(scored)
        ids = F.pad(scored.batch.ids, (0, self.net.num_levels))  # the last entries' blocks reach beyond the text
        levels = self.net.levels(ids, self.noisy(scored), entries, min(num_steps, self.num_steps))
        for level, (read, weight) in enumerate(levels):
            yield StepGuesses(level, entries, read, weight)

    def logits(self, index: int, read: Tensor) -> Tensor:
        logits: Tensor = self.net.level_logits(index, read)
        return logits

    def entries(self, scored: Scored) -> Tensor:
        """Return the entries (C,) that blocks start from: random in training, evenly spaced in evaluation."""
        total = scored.batch.ids.shape[1] - 2
        count = max(1, round(self.net.share * self.later_share * total))
        if count >= total:
            entries = torch.arange(total)
        elif self.training:
            entries = torch.randperm(total)[:count].sort().values
        else:
            entries = torch.arange(count) * total // count
        return entries.to(scored.batch.ids.device)


# --- registration ----------------------------------------------------------------------------------------------------


class BlockMethod(NetMethod):
    """A method whose net guesses several tokens in one forward; ``unroll_steps`` is how many."""

    settings: tuple[str, ...] = ("unroll_steps", "num_layers")
    options: ClassVar = {}
    loss = BlockLoss

    def new(self, new: NewNet) -> Any:
        return super().new(new).start_from(new.head)

    def drafter(self, net: Any, target: Target, name: str = "", identity: str = "") -> Drafter:
        return BlockDrafter(net, target, name, identity)
