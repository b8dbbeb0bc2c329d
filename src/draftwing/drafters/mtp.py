"""A whole chain of MTP modules as the drafter (DeepSeek-V3, 2412.19437): module k guesses the k-th drafted token.

``EagleDrafter`` runs the first module on its own states; here each token is guessed by the module that was trained for
it, and beyond the last module by that one on its own states. It costs a pass of every module over what was accepted,
and of all later ones over each level.

Each module has slots of its own. Its entry i pairs the state that the module before left at i with the token at i + k,
so that the root, whose token is the pending one, lies k - 1 slots earlier than in the first module's slots.

Shape suffixes: B rows, W entries, H hidden, D modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftwing.drafters.base import Budget
from draftwing.drafters.feature import EagleDrafter
from draftwing.drafters.growing.asked import Asked
from draftwing.inference import inference
from draftwing.model.target import Context, Target, TargetOutput
from draftwing.nets.mtp import MtpNet
from draftwing.run.forward import Entries, on_device
from draftwing.run.growing import grow
from draftwing.run.request import Waiting
from draftwing.sampling import SamplingBatch
from draftwing.tree import PAD, Accepted, DraftTree

__all__ = ["ChainDrafter"]


class ChainDrafter(EagleDrafter):
    """Drafts with several modules of one head.

    Args:
        parts: a net of each module, the first one first.

    Raises:
        ConfigError: see ``EagleDrafter``.
    """

    def __init__(self, parts: Sequence[MtpNet], target: Target, name: str = "", identity: str = "") -> None:
        super().__init__(parts[0], target, name, f"{identity} {len(parts)} modules")
        num_head = target.head.num_bytes
        size = len(parts) * (self.traits.num_bytes - num_head) + num_head
        # A module goes on from what the one before has left, which no slot keeps: rows begin at their beginning.
        self.traits = replace(self.traits, num_bytes=size, resumes=False)
        self.name += f", {len(parts)} modules"
        self._runners = [self._runner, *(part.runs.runner(part, self) for part in parts[1:])]
        # (B, D, H) what each module left at the last entry of every row that it has read; and after this step.
        self._left = torch.zeros(0, len(parts), self.net.shape.state_width, dtype=self._dtype, device=self.net.device)
        self._leaves: Tensor | None = None

    # --- the rows --------------------------------------------------------------------------------------------------

    def _prefill(self, row: int, ids: Sequence[int], features: Tensor, start: int) -> None:
        """Feed a prompt to every module: each has one entry less than the one before."""
        states, left = features, []
        for module, runner in enumerate(self._runners):
            out = runner.prefill(row, ids[module:], states[:, : max(len(ids) - module, 0)])
            states = states.new_zeros(1, 0, states.shape[2]) if out is None else out
            left.append(states[:, -1] if states.shape[1] else states.new_zeros(1, states.shape[2]))
        self._left, self._leaves = torch.cat([self._left, torch.stack(left, 1)]), None

    @inference
    def remove(self, ctx: Context, row: int) -> None:
        """Drop the row's slots; the last row takes its place."""
        last = len(self._fed) - 1
        super().remove(ctx, row)
        for runner in self._runners[1:]:
            runner.cache.move_row(last, row)
        left, self._leaves = self._left, None
        self._left = torch.cat([left[:row], left[last:], left[row + 1 : last]])[:last]

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """See ``EagleDrafter.observe``: what was read counts from here on."""
        if self._read is not None and self._leaves is not None:
            self._left, self._leaves = self._leaves, None
        super().observe(ctx, tree, accepted, output)

    # --- a step ----------------------------------------------------------------------------------------------------

    @inference
    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Grow a tree level by level, for rows whose root every module has an entry for."""
        wanted = [row.length >= len(self._runners) for row in ctx.rows]
        if budget.depth == 0 or not any(wanted):
            return ctx.roots()
        asked = Asked(ctx, wanted, sampling, budget, self._calibration)
        waiting = self._waiting(ctx)
        logits, self._leaves = self._catch_up(waiting)
        level = 0

        def step(
            tree: DraftTree, first: int, ids: Tensor | None, states: Tensor | None
        ) -> tuple[Tensor, Tensor | None]:
            nonlocal level
            assert states is not None
            level += 1
            return self._level(waiting.roots, tree, first, states, level)

        return grow(asked.growth(), logits, self._leaves.flatten(1)[:, None], step, shifted=True).tree

    def _catch_up(self, waiting: Waiting) -> tuple[Tensor, Tensor]:
        """Feed what waits to every module: the first one's logits (B, 1, V) after the roots, and what all left there.

        A module reads the states that the one before left an entry earlier; before a row's first entry there is none.
        """
        device, features = self.net.device, waiting.features
        assert features is not None
        states, left, logits = features[:, : waiting.num_entries], [], None
        for module, runner in enumerate(self._runners):
            starts = [max(fed, module) for fed in waiting.lengths]
            skipped = [start - fed for start, fed in zip(starts, waiting.lengths, strict=True)]
            tokens = [ids[skip:] for ids, skip in zip(waiting.tokens, skipped, strict=True)]
            width = max(1, *map(len, tokens))
            if module:  # what was left before the first of these entries, and at all but the last of them
                before = torch.cat([self._left[:, None, module - 1], states], 1)
                first = on_device([int(fed < module) for fed in waiting.lengths], device)[:, None]
                place = (first + torch.arange(width, device=device)).clamp(max=before.shape[1] - 1)
                states = before.gather(1, place[:, :, None].expand(-1, -1, before.shape[2]))
            chain = DraftTree.chain(on_device([[*ids, *[PAD] * (width - len(ids))] for ids in tokens], device))
            entries = Entries(chain, [start - module for start in starts], states=states)
            found, out = runner.forward(entries, want_logits=not module)
            assert out is not None
            last = on_device([max(len(ids), 1) - 1 for ids in tokens], device)[:, None, None]
            if found is not None:
                logits = found.gather(1, last.expand(-1, 1, found.shape[2]))
            states = out
            none = on_device([not ids for ids in tokens], device).bool()[:, None]
            left.append(torch.where(none, self._left[:, module], out.gather(1, last.expand(-1, 1, out.shape[2]))[:, 0]))
        assert logits is not None
        return logits, torch.stack(left, 1)

    def _level(
        self, roots: Sequence[int], tree: DraftTree, first: int, states: Tensor, level: int
    ) -> tuple[Tensor, Tensor]:
        """Run the nodes from ``first`` on, ``level`` below the root, by every module that later ones or the tree need.

        Args:
            states: (B, W, D * H) what each module left at their parents.

        Returns:
            logits (B, W, V), and what each module left here, anything where nobody will look.
        """
        found = list(states.chunk(len(self._runners), 2))
        deepest, logits = len(self._runners) - 1, None
        for module in range(min(level, deepest), deepest + 1):
            lengths = [max(root - module, 0) for root in roots]
            read = states.chunk(len(self._runners), 2)[module - 1 if level <= module else module]
            guesses = module == min(level, deepest)
            logits_here, out = self._runners[module].forward(
                Entries(tree, lengths, 0, first, None, read), want_logits=guesses
            )
            assert out is not None
            found[module], logits = out, logits_here if guesses else logits
        assert logits is not None
        return logits, torch.cat(found, 2)
