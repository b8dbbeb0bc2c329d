"""Which of its own slots a target looks at while it drafts for itself: a window, or those that attention looks at most.

    window    the first slots (sinks) and the last ones     StreamingLLM 2309.17453
    chosen    those that the last tokens look at most       SnapKV 2404.14469

Either is an index; the slots are the target's own. Shape suffixes: B rows, L layers, K KV heads, S slots, M of a view.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.model.cache import View
from draftwing.model.target import Context, Target

__all__ = ["ChosenSlots", "Slots", "WindowSlots", "most_watched"]


class Slots(Protocol):
    """Chooses slots of every row. It keeps a state per row, in the order of ``ctx.rows``.

    Attributes:
        name: of the way of choosing, and its budget; ``settings``: the others.
        budget: slots at most, but for what was written since they were chosen.
    """

    name: str
    settings: str
    budget: int

    def admit(self, target: Target) -> None:
        """A row was added at the end."""
        ...

    def remove(self, row: int) -> None:
        """A row left; the last row takes its place."""
        ...

    def view(self, target: Target, ctx: Context) -> View:
        """What the next draft looks at."""
        ...


class WindowSlots:
    """The first ``sinks`` slots and the last ones, ``budget`` in all: the same in all layers."""

    def __init__(self, budget: int = 512, sinks: int = 4) -> None:
        self.budget, self._sinks = budget, sinks
        self.name, self.settings = f"self-window:{budget}", f"{sinks} sinks"
        self._slots = torch.zeros(0, 1, 1, budget, dtype=torch.int32)

    def admit(self, target: Target) -> None:
        """See ``Slots``."""
        fresh = torch.arange(self.budget, dtype=torch.int32, device=target.device)
        self._slots = torch.cat([self._slots.to(target.device), fresh[None, None, None]])

    def remove(self, row: int) -> None:
        """See ``Slots``."""
        self._slots[row] = self._slots[-1]
        self._slots = self._slots[:-1]

    def view(self, target: Target, ctx: Context) -> View:
        """See ``Slots``."""
        sinks, size = self._sinks, self.budget - self._sinks
        for slots, length in zip(self._slots, ctx.lengths, strict=True):
            start = max(length - size, sinks)
            torch.arange(start, start + size, out=slots[0, 0, sinks:])
        return View(self._slots, [min(length, self.budget) for length in ctx.lengths])


class ChosenSlots:
    """The slots that a row's last tokens look at most, these tokens, and all that was written since.

    They are chosen when a row first drafts, and again after every ``refresh`` tokens: that takes a forward of
    ``window`` tokens.

    Args:
        budget: slots of a choice, the last tokens' among them.
        window: last tokens whose attention chooses.
        pool: neighbours, itself among them, whose best chance a slot counts with.
        grain: slots side by side that are chosen together. The CPU kernel keeps and reads the keys of 16 together; 1 is
            the paper's.
        refresh: tokens after which is chosen again; 0: never.
        per_head: whether each KV head has slots of its own; else those of a layer share theirs.
    """

    def __init__(
        self,
        budget: int = 512,
        window: int = 32,
        pool: int = 7,
        grain: int = 16,
        refresh: int = 128,
        *,
        per_head: bool = True,
    ) -> None:
        self.budget, self._window, self._pool, self._grain = budget, window, pool, grain
        self._refresh, self._per_head = refresh, per_head
        shared = "each KV head's own" if per_head else "each layer's"
        self.name = f"self-snapkv:{budget}"
        self.settings = f"{shared}, {grain} at a time by the last {window}, pool {pool}, refresh {refresh}"
        self._slots: Tensor | None = None  # (B, L, K, M): what was chosen, and behind it all slots from ``start`` on
        self._chosen: list[tuple[int, int, int]] = []  # of each row: how many were chosen, start, and at which length

    def admit(self, target: Target) -> None:
        """See ``Slots``."""
        self._chosen.append((0, 0, 0))
        if self._slots is not None:
            self._slots = torch.cat([self._slots, self._slots[:1]])
            self._continue(len(self._chosen) - 1)

    def remove(self, row: int) -> None:
        """See ``Slots``."""
        self._chosen[row] = self._chosen[-1]
        self._chosen.pop()
        if self._slots is not None:
            self._slots[row] = self._slots[-1]
            self._slots = self._slots[:-1] if self._chosen else None

    def view(self, target: Target, ctx: Context) -> View:
        """See ``Slots``."""
        for row, length in enumerate(ctx.lengths):
            num, _, at = self._chosen[row]
            is_old = length < at or (self._refresh and length - at >= self._refresh)
            if num and length <= self.budget:
                self._chosen[row] = 0, 0, 0
                self._continue(row)
            elif length > self.budget and (not num or is_old):
                self._choose(target, ctx, row, length)
        counts = [num + length - start for (num, start, _), length in zip(self._chosen, ctx.lengths, strict=True)]
        return View(self._room(target, max(counts)), counts)

    def _choose(self, target: Target, ctx: Context, row: int, length: int) -> None:
        start = (length - self._window) // self._grain * self._grain  # what follows is always looked at
        watched = target.watch(ctx, row, start)
        if not self._per_head:
            watched = watched.sum(1, keepdim=True)
        found = most_watched(watched, self.budget - (length - start), self._pool, self._grain)
        num = found.shape[2]
        if self._slots is None:
            self._slots = found.new_zeros(len(self._chosen), *found.shape[:2], 0)
        slots = self._room(target, num + length - start)
        self._chosen[row] = num, start, length
        slots[row, :, :, :num] = found
        self._continue(row)

    def _room(self, target: Target, count: int) -> Tensor:
        """The slots of all rows, with room for so many of each."""
        slots = self._slots
        if slots is None:  # nothing was ever chosen: a row looks at all that it has
            slots = torch.zeros(len(self._chosen), 1, 1, 0, dtype=torch.int32, device=target.device)
        if count > slots.shape[3] or slots.shape[3] == 0:
            slots = F.pad(slots, (0, max(count, self.budget) + 64 - slots.shape[3]))
            if self._slots is None:
                slots[:] = torch.arange(slots.shape[3], device=slots.device)
                return slots
            self._slots = slots
            for row in range(len(self._chosen)):
                self._continue(row)
        return slots

    def _continue(self, row: int) -> None:
        """Put all slots from a row's start on behind those that were chosen."""
        if self._slots is not None:
            num, start, _ = self._chosen[row]
            rest = self._slots.shape[3] - num
            self._slots[row, :, :, num:] = torch.arange(start, start + rest, device=self._slots.device)


def most_watched(watched: Tensor, count: int, pool: int, grain: int = 1) -> Tensor:
    """The slots that are looked at most, (L, K, at most ``count``) rising: SnapKV (2404.14469, listing 1).

    Args:
        watched: (L, K, S) how much each slot is looked at.
        pool: an odd number of neighbours, itself among them, whose best value a slot counts with; 1: its own alone.
        grain: slots that are chosen together; S must be a multiple.
    """
    layers, heads, size = watched.shape
    pooled = F.max_pool1d(watched.reshape(1, layers * heads, size), pool, 1, pool // 2) if pool > 1 else watched
    groups = pooled.view(layers, heads, size // grain, grain).sum(3)
    num = min(count // grain, groups.shape[2])
    best = groups.topk(num, dim=2).indices.sort(2).values
    return (best[..., None] * grain + torch.arange(grain, device=best.device)).flatten(2).int()
