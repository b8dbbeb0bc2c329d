"""MagicDec (2408.11049): the target drafts for itself through a view of its KV slots.

With long contexts most of a step's time is spent on reading keys and values. A draft that attends to a few hundred
slots costs a baseline step of a short context, and the forward that verifies several tokens reads all slots once for
them. Two policies choose the slots:

    WindowSlots    the first slots (sinks) and the last ones    StreamingLLM 2309.17453
    SnapKVSlots    those that the last tokens attend to most    SnapKV 2404.14469

A view is an index; no slots are copied, and the draft writes slots that the verification writes again. Differences to
SnapKV: slots are chosen in groups of 16 by default, as the CPU kernel stores keys, and chosen again while decoding.

Shape suffixes: B rows, L layers, K KV heads, S slots, M slots of a view.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.errors import ConfigError, UnsupportedError
from draftwing.methods.base import Budget, swap_remove
from draftwing.methods.calibration import Calibration
from draftwing.methods.method import DraftMethod, NewDrafter, Source, bool_option, integer_option
from draftwing.methods.net_drafter import NetDrafter
from draftwing.models.cache import View
from draftwing.models.context import Context
from draftwing.models.target import Target
from draftwing.runtime.tree_builder import Drafted, DraftRequest, VerifyRequest
from draftwing.sampling import SamplingBatch
from draftwing.torch_utils import inference

# --- which slots -----------------------------------------------------------------------------------------------------


class WindowSlots:
    """The first ``sinks`` slots and the last ones, ``budget`` in all, the same in all layers.

    Raises ConfigError if there is no room for the last ones.
    """

    def __init__(self, budget: int = 512, sinks: int = 4) -> None:
        if sinks >= budget:
            raise ConfigError(
                f"draft_options: sinks must be fewer than budget, found {sinks} of {budget}: leave room for a window"
            )
        self.budget, self._sinks = budget, sinks
        self.name, self.settings = f"self-window:{budget}", f"{sinks} sinks"

    def admit(self, target: Target) -> None:
        """Add a row at the end."""

    def remove(self, row: int) -> None:
        """Drop a row; the last row takes its place."""

    def view(self, target: Target, ctx: Context) -> View:
        """Return the slots that the next draft attends to."""
        sinks, size, rows = self._sinks, self.budget - self._sinks, []
        for length in ctx.lengths:
            start = max(length - size, sinks)
            rows += [torch.arange(sinks), torch.arange(start, start + size)]
        slots = torch.cat(rows).view(ctx.num_rows, 1, 1, self.budget)
        return View(slots.int().to(target.device), [min(length, self.budget) for length in ctx.lengths])


class _SlotChoice(NamedTuple):
    """``num`` chosen slots of a row and then all from ``start`` on; chosen when the row had ``length`` tokens."""

    num: int = 0
    start: int = 0
    length: int = 0


class SnapKVSlots:
    """The slots that a row's last tokens attend to most, the slots of these tokens, and all written since.

    They are chosen when a row first drafts, and again after every ``refresh`` tokens, by a forward of ``window``
    tokens. A row of at most ``budget`` tokens attends to all of its slots. Same interface as ``WindowSlots``.

    Args:
        budget: slots of a choice, including those of the last tokens.
        window: last tokens, whose attention decides.
        pool: width of the max pooling over neighbouring slots.
        grain: adjacent slots that are chosen together: 16 are stored together in the CPU kernel.
        refresh: tokens after which slots are chosen again; 0: never.
        per_head: choose slots for each KV head instead of each layer.

    Raises:
        ConfigError: the budget holds no more than the window.
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
        if window + 2 * grain > budget:
            raise ConfigError(
                f"draft_options: budget must hold the window and twice the grain, found {budget} for {window} and "
                f"{grain}: give a budget of at least {window + 2 * grain}"
            )
        self.budget, self._window, self._pool, self._grain = budget, window, pool, grain
        self._refresh, self._per_head = refresh, per_head
        scope, self.name = "each KV head's own" if per_head else "each layer's", f"self-snapkv:{budget}"
        self.settings = f"{scope}, {grain} at a time by the last {window}, pool {pool}, refresh {refresh}"
        self._choices: list[_SlotChoice] = []
        self._slots: Tensor | None = None  # (B, L, K, M) the chosen slots, then all from ``start`` on

    def admit(self, target: Target) -> None:
        self._choices.append(_SlotChoice())
        if self._slots is not None:
            self._slots = torch.cat([self._slots, self._slots[:1]])
            self._fill(len(self._choices) - 1)

    def remove(self, row: int) -> None:
        swap_remove(self._choices, row)
        if self._slots is not None:
            self._slots[row] = self._slots[-1]
            self._slots = self._slots[:-1] if self._choices else None

    def view(self, target: Target, ctx: Context) -> View:
        for row, length in enumerate(ctx.lengths):
            choice = self._choices[row]
            is_old = length < choice.length or (self._refresh and length - choice.length >= self._refresh)
            if choice.num and length <= self.budget:
                self._choices[row] = _SlotChoice()
                self._fill(row)
            elif length > self.budget and (not choice.num or is_old):
                self._choose(target, ctx, row, length)
        lengths = zip(self._choices, ctx.lengths, strict=True)
        counts = [choice.num + length - choice.start for choice, length in lengths]
        return View(self._with_room(target, max(counts)), counts)

    def _choose(self, target: Target, ctx: Context, row: int, length: int) -> None:
        start = (length - self._window) // self._grain * self._grain  # slots from here on are always in view
        watched = target.watch(ctx, row, start)
        if not self._per_head:
            watched = watched.sum(1, keepdim=True)
        chosen = snapkv_slots(watched, self.budget - (length - start), self._pool, self._grain)
        num = chosen.shape[2]
        if self._slots is None:
            self._slots = chosen.new_zeros(len(self._choices), *chosen.shape[:2], 0)
        slots = self._with_room(target, num + length - start)
        self._choices[row] = _SlotChoice(num, start, length)
        slots[row, :, :, :num] = chosen
        self._fill(row)

    def _with_room(self, target: Target, count: int) -> Tensor:
        """Return the slots with room for ``count`` of each row."""
        size = max(count, self.budget) + 64
        if self._slots is None:  # nothing was ever chosen: rows attend to all of their slots
            return torch.arange(size, dtype=torch.int32, device=target.device).repeat(len(self._choices), 1, 1, 1)
        if count > self._slots.shape[3]:
            self._slots = F.pad(self._slots, (0, size - self._slots.shape[3]))
            for row in range(len(self._choices)):
                self._fill(row)
        return self._slots

    def _fill(self, row: int) -> None:
        """Append all slots from the row's start on to the chosen ones."""
        if self._slots is not None:
            num, start, _ = self._choices[row]
            rest = self._slots.shape[3] - num
            self._slots[row, :, :, num:] = torch.arange(start, start + rest, device=self._slots.device)


def snapkv_slots(watched: Tensor, count: int, pool: int, grain: int = 1) -> Tensor:
    """Return the slots that are attended to most, (L, K, at most ``count``), ascending (SnapKV, listing 1).

    Args:
        watched: (L, K, S) the attention that each slot gets.
        pool: odd width of the max pooling over neighbouring slots; 1: none.
        grain: slots that are chosen together; S must be a multiple.
    """
    layers, heads, size = watched.shape
    pooled = F.max_pool1d(watched.reshape(1, layers * heads, size), pool, 1, pool // 2)
    groups = pooled.view(layers, heads, size // grain, grain).sum(3)
    best = groups.topk(min(count // grain, groups.shape[2]), dim=2).indices.sort(2).values
    return (best[..., None] * grain + torch.arange(grain, device=best.device)).flatten(2).int()


# --- the drafter -----------------------------------------------------------------------------------------------------


class SelfDrafter(NetDrafter):
    """Drafts with the target, which must run on the lean decoder, through the slots that ``policy`` chooses."""

    grows_by_rule = True

    def __init__(self, target: Target, policy: WindowSlots | SnapKVSlots) -> None:
        if not target.supports_views:
            if target.runs_as != "transformers":
                raise UnsupportedError(
                    f"{target.name} has recurrent layers, which read no slots, and cannot draft for itself: choose "
                    f"draft='lookup'"
                )
            raise UnsupportedError(
                f"{target.name} runs in transformers and cannot draft for itself: load it with engine='lean' if its "
                f"family is supported, or choose draft='lookup'"
            )
        self._target, self._policy = target, policy
        self.name, self.identity, self.context = policy.name, policy.settings, policy.budget
        self.num_bytes, self.runs_as = target.num_weight_bytes, target.runs_as

    @inference
    def admit(self, ctx: Context, features: Tensor | None) -> None:
        self._policy.admit(self._target)

    @inference
    def remove(self, ctx: Context, row: int) -> None:
        self._policy.remove(row)

    @inference
    def request(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftRequest | None:
        """Return a request for trees as deep as every row's context allows."""
        rooms = [self._target.max_length - row.length - 2 for row in ctx.rows]
        room = min((room for room in rooms if room > 0), default=0)
        if min(room, budget.depth) <= 0:
            return None
        fits, roots = [room > 0 for room in rooms], [[row.tokens[row.length]] for row in ctx.rows]
        request = DraftRequest(ctx, fits, sampling, budget, Calibration(), roots, ctx.lengths, ctx.lengths)
        view, prompt_lengths = self._policy.view(self._target, ctx), [row.prompt_length for row in ctx.rows]
        return replace(request, view=view, prompt_lengths=prompt_lengths).within(room)

    def draft(self, request: DraftRequest, verify: VerifyRequest | None = None) -> Drafted:
        return self._target.draft(request)


# --- registration ----------------------------------------------------------------------------------------------------

_MAX = 1 << 16  # largest value of any option: a larger view saves nothing


def _pool(value: Any) -> int:
    pool = integer_option("pool", 1, _MAX)(value)
    if pool % 2 == 0:
        raise ConfigError(f"draft_options: pool must be odd, found {pool}: a slot is in the middle of its pool")
    return pool


def _maker(target: Target, new_policy: Callable[[], WindowSlots | SnapKVSlots]) -> NewDrafter:
    SelfDrafter(target, new_policy())  # raises an error before anything is decoded
    return lambda: SelfDrafter(target, new_policy())


class SelfWindow(DraftMethod):
    options: ClassVar = {"budget": integer_option("budget", 2, _MAX), "sinks": integer_option("sinks", 0, _MAX)}

    def new_drafter(self, source: Source) -> NewDrafter:
        return _maker(source.target, partial(WindowSlots, **source.options))


class SelfSnapKV(DraftMethod):
    options: ClassVar = {
        "budget": integer_option("budget", 2, _MAX),
        "window": integer_option("window", 1, _MAX),
        "pool": _pool,
        "grain": integer_option("grain", 1, _MAX),
        "refresh": integer_option("refresh", 0, _MAX),
        "per_head": bool_option("per_head"),
    }

    def new_drafter(self, source: Source) -> NewDrafter:
        return _maker(source.target, partial(SnapKVSlots, **source.options))
