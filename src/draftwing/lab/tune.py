"""Find the layers with which a target drafts for itself (Draft & Verify, 2309.08168).

A trial of a set of layers takes a second or two: a few forwards over recorded texts give its acceptance, and measured
times its speed. Decoding would take a minute. ``trials.jsonl`` has the texts and times, then each trial; the best set
is written at once, so that a run may be stopped at any time and resumed.

Shape suffixes: B rows, T tokens, C entries of each row.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.formats.write import check_destination
from draftwing.measure import measure
from draftwing.methods.base import Drafter
from draftwing.methods.layer_skip import LayerSet, LayerSkipDrafter
from draftwing.methods.net import TargetId
from draftwing.methods.unroll import UnrolledAttention
from draftwing.models.lean import LeanTarget
from draftwing.models.subnet import Parts, SubNet
from draftwing.storage import RecordFile, locked

FILE = "trials.jsonl"
DEPTH = 4  # length of recorded chains; the acceptance of longer ones is extrapolated
MAX_DEPTH = 12  # length of the longest chain that is considered
MAX_ENTRIES = 512  # positions of all texts together at which a set is tried
START_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)  # shares of the sublayers that the first sets skip


# --- acceptance ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextIds:
    """The token ids of a prompt and its greedy continuation; ``prompt`` is the prompt's length."""

    ids: tuple[int, ...]
    prompt: int


class Recorded:
    """Texts with the target's keys and values: one batch, on which any set of layers is tried.

    A draft from position i reads the target's keys and values before i, and those of the chain after it. All positions
    are drafted at once, with the text's tokens as the chain. A chain equals the text up to its first mistake, and what
    follows does not count, so that the result is exactly what greedy decoding would accept. The target's weights must
    be unpacked; its texts are cut to the narrowest sliding window.
    """

    @torch.inference_mode()
    def __init__(self, target: LeanTarget, texts: Sequence[TextIds], depth: int) -> None:
        net, rows = target.net, len(texts)
        room = min([window for window in net.shape.windows if window is not None], default=target.max_length)
        lengths = [min(len(text.ids), room) for text in texts]
        longest = max(lengths, default=0)
        ids = torch.zeros(rows, longest, dtype=torch.int64)
        starts = torch.arange(longest)  # the last committed token before each draft
        valid = torch.zeros(rows, longest, dtype=torch.bool)
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            ids[row, :length] = torch.tensor(text.ids[:length])
            valid[row] = (starts >= max(text.prompt - 2, 0)) & (starts + depth + 1 < length)
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
class Pace:
    """Measured seconds of drafting with any set of a target's layers."""

    start: float  # start of a draft, independent of its depth
    base: float  # each pass without its layers: embedding, norm, LM head and the choice of a token
    # attention, mlp: of each sublayer in a pass
    attention: float
    mlp: float
    verify: tuple[float, ...]  # the target's forward over 1, 2, ... nodes and everything after it

    def tokens_per_s(self, parts: Parts, accepted: Sequence[float]) -> tuple[float, int]:
        """Return tokens per second and length (at least 1) of the best chain.

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
        return max(chains)

    @property
    def plain(self) -> float:
        """Tokens per second of the baseline."""
        return 1 / self.verify[0]

    @classmethod
    def from_dict(cls, values: Any) -> Pace:
        seconds = {name: float(values[name]) for name in ("start", "base", "attention", "mlp")}
        return cls(verify=tuple(map(float, values["verify"])), **seconds)


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


def search(
    num_layers: int,
    score: Callable[[Parts], float],
    num_trials: int,
    seed: int = 0,
    earlier: Mapping[Parts, float] | None = None,
) -> Parts:
    """Search for the best set of layers by Bayesian optimisation: a tree-structured Parzen estimator (optuna).

    The search starts with random sets of every size, since most sets of half of the layers draft nothing useful. Later,
    every fourth set differs from the best one in one or two sublayers, which the estimator finds slowly.

    Args:
        score: the higher the better. It may raise KeyboardInterrupt.
        num_trials: sets to try, including ``earlier``: the scores of sets that were tried before, in that order.
    """
    try:
        import optuna
    except ImportError as error:
        raise UnsupportedError(
            f"tuning needs optuna, which is not installed ({error}): run `pip install 'draftwing[lab]'`, or try only "
            f"early exits (--exits), which do not need it"
        ) from error
    optuna.logging.set_verbosity(logging.WARNING)
    sublayers = [(kind, layer) for kind in ("attention", "mlp") for layer in range(num_layers)]
    choice = optuna.distributions.CategoricalDistribution([False, True])  # True skips the sublayer
    space: dict[str, Any] = {f"{kind}.{layer}": choice for kind, layer in sublayers}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # multivariate is experimental
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=1)
    study = optuna.create_study(direction="maximize", sampler=sampler)

    def add(parts: Parts, value: float) -> None:
        params = {f"{kind}.{layer}": (kind, layer) in _skipped(parts) for kind, layer in sublayers}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=value))

    def suggest() -> Parts:
        trial = study.ask(space)
        study.tell(trial, state=optuna.trial.TrialState.FAIL)  # ``add`` reports its value
        return _without(num_layers, {(kind, layer) for kind, layer in sublayers if trial.params[f"{kind}.{layer}"]})

    scores = dict(earlier or {})
    for parts, value in scores.items():
        add(parts, value)
    waiting = [parts for parts in starts(num_layers, seed) if parts not in scores]
    while len(scores) < min(num_trials, 4**num_layers):
        rng = random.Random(f"{seed} {len(scores)}")
        if waiting:
            parts = waiting.pop(0)
        elif len(scores) % 4 == 3:
            parts = _neighbour(max(scores, key=scores.__getitem__), rng)
        else:
            parts = suggest()
        while parts in scores:
            parts = _neighbour(parts, rng)
        scores[parts] = score(parts)
        add(parts, scores[parts])
    return max(scores, key=scores.__getitem__)


def starts(num_layers: int, seed: int = 0) -> list[Parts]:
    """Return the first sets: all layers, then without more and more random attentions, MLPs, and both."""
    rng = random.Random(seed)
    sets = [_without(num_layers, set())]
    for share in START_SHARES:
        for kinds in (("attention",), ("mlp",), ("attention", "mlp")):
            skipped = [
                (kind, layer) for kind in kinds for layer in rng.sample(range(num_layers), round(share * num_layers))
            ]
            sets.append(_without(num_layers, set(skipped)))
    return list(dict.fromkeys(sets))


def _skipped(parts: Parts) -> set[tuple[str, int]]:
    skipped = {("attention", layer) for layer in parts.skipped_attention}
    return skipped | {("mlp", layer) for layer in parts.skipped_mlp}


def _without(num_layers: int, skipped: set[tuple[str, int]]) -> Parts:
    layers = [tuple(sorted(layer for kind, layer in skipped if kind == name)) for name in ("attention", "mlp")]
    return Parts.without(num_layers, *layers)


def _neighbour(parts: Parts, rng: random.Random) -> Parts:
    skipped = _skipped(parts)
    for _ in range(rng.choice((1, 2))):
        skipped ^= {(rng.choice(("attention", "mlp")), rng.randrange(parts.num_layers))}
    return _without(parts.num_layers, skipped)


# --- the run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """A set, how often its chains are accepted to each depth, and its tokens per second with chains of ``depth``."""

    parts: Parts
    accepted: tuple[float, ...]
    tokens_per_s: float
    depth: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "skip_attention": list(self.parts.skipped_attention),
            "skip_mlp": list(self.parts.skipped_mlp),
            "accepted": list(self.accepted),
            "tokens_per_s": self.tokens_per_s,
            "depth": self.depth,
        }


class Trials:
    """The trials of a folder: a first record of settings, texts and times that all share, then one record for each."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], num_layers: int) -> None:
        self._about, self._num_layers = dict(settings), num_layers
        self._file = RecordFile(folder / FILE, "tune")
        self.texts: list[TextIds] = []
        self.pace: Pace | None = None  # None in a new folder
        self.scores: dict[Parts, float] = {}  # tokens per second, in the order of the trials
        self.best: Trial | None = None
        self._file.load(self._take_first, slice(1))
        for name, value in settings.items():
            if self._about.get(name) != value:
                raise ConfigError(
                    f"{folder / FILE} holds a run with {name} {self._about.get(name)!r:.80}, and this one has "
                    f"{value!r:.80}: choose another --out, or give the options of that run to resume it"
                )
        self._file.load(self._take, slice(1, None))

    def _take_first(self, record: Any) -> None:
        self._about = dict(record["about"])
        self.texts = [TextIds(tuple(map(int, text["ids"])), int(text["prompt"])) for text in record["texts"]]
        self.pace = Pace.from_dict(record["pace"])

    def _take(self, record: Any) -> None:
        skipped = [tuple(map(int, record[name])) for name in ("skip_attention", "skip_mlp")]
        accepted, parts = tuple(map(float, record["accepted"])), Parts.without(self._num_layers, *skipped)
        trial = Trial(parts, accepted, float(record["tokens_per_s"]), int(record["depth"]))
        self.scores[parts] = trial.tokens_per_s
        if self.best is None or trial.tokens_per_s > self.best.tokens_per_s:
            self.best = trial

    def begin(self, texts: Sequence[TextIds], pace: Pace) -> None:
        """Write the first record. Raises CheckpointError if the file is not writable."""
        record = {"about": self._about, "texts": [asdict(text) for text in texts], "pace": asdict(pace)}
        self._file.append(record)
        self._take_first(record)

    def add(self, trial: Trial) -> None:
        """Append a trial. Raises CheckpointError if the file is not writable."""
        self._file.append(trial.to_dict())
        self._take(trial.to_dict())


@dataclass(frozen=True)
class Tuned:
    """The best of all trials, expected tokens per second of the baseline (``plain``), and the number of trials.

    ``finished`` is False if the run was interrupted.
    """

    best: Trial
    plain: float
    num_trials: int
    finished: bool

    @property
    def speedup(self) -> float:
        """The expected speedup over the baseline."""
        return self.best.tokens_per_s / self.plain


def tune(
    out: Path,
    target: TargetId,
    measure: Callable[[], tuple[Sequence[TextIds], Pace]],
    new_target: Callable[[], LeanTarget],
    *,
    num_trials: int = 200,
    seed: int = 0,
    only_exits: bool = False,
    settings: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int, Trial | None], None] = lambda done, total, best: None,
) -> Tuned:
    """Try sets of layers until all trials are done or Ctrl-C; the same arguments resume an interrupted run.

    Args:
        out: the folder to write, which ``--draft`` takes.
        measure: lets the target write texts, and measures its times; called only by the first run.
        new_target: loads the target with unpacked weights.
        num_trials: sets to try, including those of earlier runs.
        only_exits: try only the first layer, the first two, ...
        settings: further values that trials depend on, as JSON.
    """
    num_layers = target.num_layers
    check_destination(out)
    with locked(out, CheckpointError):
        about = {**(settings or {}), "target": target.name, "seed": seed, "exits": only_exits}
        trials = Trials(out, about, num_layers)
        if trials.pace is None:
            trials.begin(*measure())
        pace = trials.pace
        assert pace is not None
        recorded = Recorded(new_target(), trials.texts, DEPTH)
        total = num_layers - 1 if only_exits else min(num_trials, 4**num_layers)
        num_before = len(trials.scores)

        def write_best() -> None:
            assert trials.best is not None
            tuning = trials.best.to_dict() | {"trials": len(trials.scores), "plain_tokens_per_s": pace.plain}
            del tuning["skip_attention"], tuning["skip_mlp"]
            LayerSet(trials.best.parts, target, tuning).write(out)

        def score(parts: Parts) -> float:
            on_progress(len(trials.scores), total, trials.best)
            accepted = recorded.accepted(parts)
            tokens_per_s, depth = pace.tokens_per_s(parts, accepted)
            trials.add(Trial(parts, accepted, tokens_per_s, depth))
            if trials.best is not None and trials.best.parts == parts:
                write_best()
            return tokens_per_s

        finished = True
        try:
            if only_exits:
                for parts in (Parts.first(num_layers, count) for count in range(1, num_layers)):
                    if parts not in trials.scores:
                        score(parts)
            else:
                search(num_layers, score, total, seed, trials.scores)
        except KeyboardInterrupt:
            finished = False
        if trials.best is None:
            raise KeyboardInterrupt
        if len(trials.scores) == num_before:  # no trial was left, and the set may have been deleted
            write_best()
        on_progress(len(trials.scores), total, trials.best)
        return Tuned(trials.best, pace.plain, len(trials.scores), finished)
