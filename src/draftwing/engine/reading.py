"""What a step came to, as the host reads it: tokens that lie on a device, and the times of its work."""

from __future__ import annotations

import itertools
import math
import time

import torch

from draftwing.sampling import on_host
from draftwing.tree import PAD, Accepted, DraftTree, Emitted

__all__ = ["as_on_device", "mark", "read", "stamp"]


def read(tree: DraftTree, accepted: Accepted, scores: torch.Tensor) -> list[Emitted]:
    """What each row emits, where the rule has not said so in the host's own numbers."""
    return _on_the_host(tree, accepted, scores) if on_host(scores) else _gathered(tree, accepted, scores)


def _gathered(tree: DraftTree, accepted: Accepted, scores: torch.Tensor) -> list[Emitted]:
    """What each row emits, read from the device as one tensor: (B, D + 6)."""
    path = accepted.path
    drafted = tree.tokens.gather(1, path.clamp(min=0))
    last = path.gather(1, accepted.num[:, None])
    chosen = scores[torch.arange(len(path), device=path.device), last[:, 0], accepted.bonus]
    columns = [accepted.num, accepted.bonus, tree.valid.sum(1), tree.depths.amax(1), chosen.isfinite()]
    together = torch.cat([drafted, *(column[:, None] for column in columns)], 1)
    return [
        Emitted([*tokens[1 : num + 1], bonus], used - 1, depth, finite > 0)
        for *tokens, num, bonus, used, depth, finite in together.tolist()
    ]


def _on_the_host(tree: DraftTree, accepted: Accepted, scores: torch.Tensor) -> list[Emitted]:
    """The same where tensors are on the host: small operators would cost more than loops."""
    found = []
    columns = (tree.tokens, tree.parents, accepted.path, accepted.num, accepted.bonus)
    for row, (tokens, parents, path, num, bonus) in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
        depths = [0] * len(tokens)
        for node in range(1, len(tokens)):
            depths[node] = depths[parents[node]] + 1 if parents[node] >= 0 else 0
        used = sum(token != PAD for token in tokens)
        finite = math.isfinite(float(scores[row, path[num], bonus]))
        found.append(Emitted([*(tokens[node] for node in path[1 : num + 1]), bonus], used - 1, max(depths), finite))
    return found


def mark(device: torch.device) -> torch.cuda.Event:
    """A moment in the work of a GPU, which goes on after the host has given it out."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def stamp(clock: list[float], marks: list[torch.cuda.Event], device: torch.device) -> None:
    """This moment, on the host and in the GPU's work."""
    clock.append(time.perf_counter())
    marks.append(mark(device))


def as_on_device(clock: list[float], marks: list[torch.cuda.Event]) -> None:
    """Set when drafting and the forward ended to when the GPU had done them; it has, once tokens were handed over.

    The host's own times would count all of it to the hand-over, and a planner would take drafts for free.
    """
    for place, (before, after) in enumerate(itertools.pairwise(marks), 1):
        clock[place] = min(clock[place - 1] + before.elapsed_time(after) / 1000, clock[3])
