"""Find the layers with which a target drafts for itself (Draft & Verify, 2309.08168).

A trial of a set of layers takes a second or two: a few forwards over recorded texts give its acceptance, and measured
times its speed. Decoding would take a minute. The best set is written at once, and a later run continues from it.

Shape suffixes: B rows, T tokens, C entries of each row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, ConfigError
from draftwing.formats.write import check_destination
from draftwing.measure import measure
from draftwing.methods.base import Drafter
from draftwing.methods.layer_skip import LayerSet, LayerSkipDrafter
from draftwing.methods.net import TargetId
from draftwing.methods.unroll import UnrolledAttention
from draftwing.models.lean import LeanTarget
from draftwing.models.subnet import Parts, SubNet

DEPTH = 4  # length of recorded chains; the acceptance of longer ones is extrapolated
MAX_DEPTH = 12  # length of the longest chain that is considered
MAX_ENTRIES = 512  # positions of all texts together at which a set is tried
START_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)  # shares of the sublayers that the first sets skip


# --- acceptance ------------------------------------------------------------------------------------------------------


class Recorded:
    """Texts with the target's keys and values: one batch, on which any set of layers is tried.

    A draft from position i reads the target's keys and values before i, and those of the chain after it. All positions
    are drafted at once, with the text's tokens as the chain. A chain equals the text up to its first mistake, and what
    follows does not count, so that the result is exactly what greedy decoding would accept. The target's weights must
    be unpacked; its texts are cut to the narrowest sliding window.

    Args:
        texts: the token ids of each prompt and of its greedy continuation.
        depth: length of the chains.
    """

    @torch.inference_mode()
    def __init__(self, target: LeanTarget, texts: Sequence[tuple[Sequence[int], Sequence[int]]], depth: int) -> None:
        net, rows = target.net, len(texts)
        room = min([abs(window) for window in net.shape.windows if window is not None], default=target.max_length)
        lengths = [min(len(prompt) + len(written), room) for prompt, written in texts]
        longest = max(lengths, default=0)
        ids = torch.zeros(rows, longest, dtype=torch.int64)
        starts = torch.arange(longest)  # the last committed token before each draft
        valid = torch.zeros(rows, longest, dtype=torch.bool)
        for row, ((prompt, written), length) in enumerate(zip(texts, lengths, strict=True)):
            ids[row, :length] = torch.tensor([*prompt, *written][:length])
            valid[row] = (starts >= max(len(prompt) - 2, 0)) & (starts + depth + 1 < length)
        entries = valid.any(0).nonzero()[:, 0]
        if not len(entries):
            raise ConfigError(
                f"the recorded texts are too short: chains of {depth} need at least {depth + 1} written tokens within "
                f"{room} tokens: let the target write more"
            )
        entries = entries[:: -(-rows * len(entries) // MAX_ENTRIES)]
        self._net, self._depth, self._longest, self._rows = net, depth, longest, rows
        self._ids, self._entries = ids.to(target.device), entries.to(target.device)
        self._valid = valid[:, entries].to(target.device)
        self._attend = UnrolledAttention(rows, longest, net.shape.num_layers, net.shape.head_dim**-0.5)
        self._attend.cis = self._cis(torch.arange(longest, device=target.device))
        net.forward(self._ids.reshape(-1), None, self._attend)

    def _cis(self, places: Tensor) -> Tensor:
        positions = places.repeat(self._rows)
        cis = self._net.rotary.cis(positions, torch.full_like(positions, self._longest), upto=self._longest)
        return cis.view(len(positions), 1, -1)

    @torch.inference_mode()
    def accepted(self, parts: Parts) -> tuple[float, ...]:
        """Return the share of positions at which the first 1, 2, ... ``depth`` tokens of a chain are accepted."""
        net, attend, shares = SubNet(self._net, parts), self._attend.again(), []
        attend.choose(self._entries)
        right, count = self._valid, int(self._valid.sum())
        for step in range(1, self._depth + 1):
            places = self._entries + step
            attend.cis = self._cis(places)
            hidden, _ = net.forward(self._ids[:, places].reshape(-1), None, attend)
            best = net.logits(hidden).argmax(-1).view(self._rows, -1)
            right = right & (best == self._ids[:, places + 1])
            shares.append(int(right.sum()) / count)
        return tuple(shares)


# --- costs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """A set, how often its chains are accepted to each depth, and its tokens per second with chains of ``depth``."""

    parts: Parts
    accepted: tuple[float, ...]
    tokens_per_s: float
    depth: int


@dataclass(frozen=True)
class Pace:
    """Measured seconds of drafting with any set of a target's layers."""

    start: float  # start of a draft, independent of its depth
    base: float  # each pass without its layers: embedding, norm, LM head and the choice of a token
    # attention, mlp: of each sublayer in a pass
    attention: float
    mlp: float
    verify: tuple[float, ...]  # the target's forward over 1, 2, ... nodes and everything after it

    def trial(self, parts: Parts, accepted: tuple[float, ...]) -> Trial:
        """Return the length (at least 1) and tokens per second of the best chain.

        The first 1, 2, ... tokens of a chain are ``accepted`` that often, and each further one as often as the last of
        these, given those before it.
        """
        seconds = self.base + len(parts.attention) * self.attention + len(parts.mlp) * self.mlp
        reached, tokens, chains = 1.0, 1.0, []
        for depth in range(1, len(self.verify)):
            if depth <= len(accepted):
                reached = accepted[depth - 1]
            else:
                before = accepted[-2] if len(accepted) > 1 else 1.0
                reached *= accepted[-1] / before if before else 0.0
            tokens += reached
            chains.append((tokens / (self.start + depth * seconds + self.verify[depth]), depth))
        tokens_per_s, depth = max(chains)
        return Trial(parts, accepted, tokens_per_s, depth)

    @property
    def plain(self) -> float:
        """Tokens per second of the baseline."""
        return 1 / self.verify[0]


def measure_pace(target: LeanTarget) -> Pace:
    """Derive a pace from the costs of drafting with all layers, without their attentions, and without their MLPs."""
    count, every = target.num_layers, tuple(range(target.num_layers))
    sets = [Parts.without(count, (), ()), Parts.without(count, every, ()), Parts.without(count, (), every)]
    costs = []
    for parts in sets:
        new_drafter: Callable[[], Drafter] = partial(LayerSkipDrafter, SubNet(target.net, parts), target, "layers")
        costs.append(measure(target, new_drafter))
    whole, no_attention, no_mlp = (one.level_seconds for one in costs)
    return Pace(
        start=max(costs[0].chain(1) - whole, 0.0),
        base=max(no_attention + no_mlp - whole, 0.0),
        attention=max(whole - no_attention, 0.0) / count,
        mlp=max(whole - no_mlp, 0.0) / count,
        verify=tuple(map(costs[0].verify, range(1, MAX_DEPTH + 2))),
    )


# --- search ----------------------------------------------------------------------------------------------------------


def starts(num_layers: int, rng: random.Random) -> list[Parts]:
    """Return the first sets: all layers, then without more and more random attentions, MLPs, and both."""
    sets = [Parts.without(num_layers, (), ())]
    for share in START_SHARES:
        count = round(share * num_layers)
        attention, mlp = (tuple(sorted(rng.sample(range(num_layers), count))) for _ in range(2))
        sets += [Parts.without(num_layers, *skipped) for skipped in ((attention, ()), ((), mlp), (attention, mlp))]
    return list(dict.fromkeys(sets))


def neighbour(parts: Parts, rng: random.Random) -> Parts:
    """Return a set that differs in one or two sublayers."""
    skipped = set(parts.skipped_attention), set(parts.skipped_mlp)
    for _ in range(rng.choice((1, 2))):
        rng.choice(skipped).symmetric_difference_update({rng.randrange(parts.num_layers)})
    return Parts.without(parts.num_layers, *(tuple(sorted(layers)) for layers in skipped))


def tune(
    out: Path,
    target: TargetId,
    score: Callable[[Parts], Trial],
    *,
    num_trials: int = 200,
    seed: int = 0,
    only_exits: bool = False,
    on_progress: Callable[[int, int, Trial | None], None] = lambda done, total, best: None,
) -> tuple[Trial, bool]:
    """Try sets of layers until all trials are done or Ctrl-C.

    The first sets are the one that ``out`` has, and random ones of every size, since most sets of half of the layers
    draft nothing useful. Each of the others differs from the best one in one or two sublayers.

    Args:
        out: the folder that gets the best set whenever there is a better one; ``--draft`` takes it.
        only_exits: try only the first layer, the first two, ...

    Returns:
        The best trial, and False after Ctrl-C.
    """
    check_destination(out)
    num_layers, rng = target.num_layers, random.Random(seed)
    if only_exits:
        waiting = [Parts.first(num_layers, count) for count in range(1, num_layers)]
        total = len(waiting)
    else:
        waiting, total = starts(num_layers, rng), min(num_trials, 4**num_layers)
        with suppress(CheckpointError, ConfigError):  # there is no set yet
            earlier = LayerSet.read(out)
            waiting = [earlier.parts, *waiting] if earlier.target == target else waiting
    on_progress(0, total, None)
    best = score(waiting.pop(0))
    tried = {best.parts}
    _write(out, best, target)
    try:
        while len(tried) < total:
            on_progress(len(tried), total, best)
            parts = waiting.pop(0) if waiting else neighbour(best.parts, rng)
            while parts in tried:
                parts = neighbour(parts, rng)
            trial = score(parts)
            tried.add(parts)
            if trial.tokens_per_s > best.tokens_per_s:
                best = trial
                _write(out, best, target)
    except KeyboardInterrupt:
        return best, False
    on_progress(total, total, best)
    return best, True


def _write(out: Path, best: Trial, target: TargetId) -> None:
    tuning = {name: value for name, value in asdict(best).items() if name != "parts"}
    LayerSet(best.parts, target, tuning).write(out)
