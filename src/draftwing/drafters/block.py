"""A net that guesses several tokens in one pass as the drafter: Medusa, Hydra, DFlash, DSpark.

What it keeps of a row is what any net that reads features keeps. A draft is the catch-up with what was accepted and,
for a net with masks, one pass over the pending token and the masks. The tree then grows from the block of laws: chains,
static trees, the best nodes of each level, or by a rule, which is best-first (DDTree, 2604.12989): as long as a level
has one law, a path's chance is the product of its tokens' chances, and the likeliest nodes are found level by level.

Shape suffixes: B rows, W nodes of a level, N = 1 + masks, H hidden.
"""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor

from draftwing.drafters.feature import EagleDrafter
from draftwing.drafters.growing.asked import Asked
from draftwing.nets.block import BlockNet
from draftwing.run.forward import Entries, on_device
from draftwing.run.request import Drafted, Waiting
from draftwing.tree import DraftTree

__all__ = ["BlockDrafter"]


class BlockDrafter(EagleDrafter):
    """Drafts with a ``BlockNet``; see ``EagleDrafter``."""

    net: BlockNet

    def _draft(self, waiting: Waiting, asked: Asked) -> Drafted:
        net, asked = self.net, asked.within(self.net.num_levels)
        out = self._caught_up(waiting)
        if net.num_masks:
            out = self._masked(waiting, asked)
        block, growth, start = net.open(out, asked.depth), asked.growth(), 0
        guess = net.guess(0, block, on_device([asked.roots], net.device).T, None)
        for level in count(1):
            growth.extend(guess.logits, guess.sure)
            if growth.done:
                break
            tree, first, carried = growth.drafted(), growth.first, guess.carried
            if carried is not None:
                above = tree.parents[:, first:].clamp(min=start) - start  # an unused node may follow any
                carried = carried.gather(1, above[:, :, None].expand(-1, -1, carried.shape[2]))
            guess, start = net.guess(level, block, tree.tokens[:, first:].clamp(min=0), carried), first
        return growth.finish()

    def _caught_up(self, waiting: Waiting) -> Tensor:
        """Read what is waiting: (B, 1, H) of each row's last entry."""
        device, width, runner = self.net.device, waiting.num_entries, self._runner
        chain = DraftTree.chain(on_device([[*ids, *[-1] * (width - len(ids))] for ids in waiting.tokens], device))
        last = on_device([max(len(ids), 1) - 1 for ids in waiting.tokens], device)[:, None, None]
        assert waiting.features is not None
        states = runner.fuse(waiting.features[:, :width])
        _, out = runner.forward(Entries(chain, waiting.lengths, states=states), want_logits=False, last=last)
        assert out is not None
        return out

    def _masked(self, waiting: Waiting, asked: Asked) -> Tensor:
        """(B, N, H) of the pending token and the masks, which all see each other and every entry."""
        net, rows = self.net, len(waiting.tokens)
        nodes = 1 + net.num_masks
        tokens = on_device([[root, *[net.mask_id] * net.num_masks] for root in asked.roots], net.device)
        order = torch.arange(nodes, device=net.device).expand(rows, -1)
        everything = torch.ones(rows, nodes, nodes, dtype=torch.bool, device=net.device)
        tree = DraftTree(tokens, order - 1, paths=(everything, order))
        _, out = self._runner.forward(Entries(tree, [root + 1 for root in waiting.roots]), want_logits=False)
        assert out is not None
        return out
