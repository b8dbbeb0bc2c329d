"""Find the layers with which a target drafts for itself (Draft & Verify, 2309.08168).

A trial of a set of layers takes a second or two: a few forwards over recorded texts give its acceptance, and measured
times its speed. Decoding would take a minute. ``trials.jsonl`` has the texts and times, then a line for each trial; the
best set is written at once, so that a run may be stopped at any time and resumed.

Shape suffixes: B rows, T tokens, C entries of each row.
"""

from __future__ import annotations

import json
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

from draftwing.budget.measure import costs_of
from draftwing.decode import loop_of
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.formats.write import check_destination
from draftwing.methods.base import Drafter
from draftwing.methods.layer_skip import LayerSet, LayerSkipDrafter
from draftwing.methods.net import TargetId
from draftwing.methods.unroll import UnrolledAttention
from draftwing.models.lean import LeanTarget
from draftwing.models.subnet import Parts, SubNet
from draftwing.storage import locked, write_fix

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

    A draft from position i reads the target's keys and values before i, and those of the chain after it. All
    positions are drafted at once, with the text's tokens as the chain. A chain equals the text up to its first mistake,
    and what follows does not count, so that the result is exactly what greedy decoding would accept.

    Args:
        target: with unpacked weights (``prepack=False``).
        texts: from the target. They are cut to the narrowest sliding window.
        depth: of the chains.

    Raises:
        ConfigError: no text has ``depth`` + 1 written tokens.
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
        """Return (B * C, 1, rotary_dim / 2) rotary factors."""
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
    """Measured seconds of drafting with any set of a target's layers.

    Attributes:
        start: of a draft, independent of its depth.
        base: of each pass besides the layers: embedding, norm, LM head and the choice of a token.
        attention, mlp: of each sublayer in a pass.
        verify: of the target's forward over 1, 2, ... nodes and everything after it.
    """

    start: float
    base: float
    attention: float
    mlp: float
    verify: tuple[float, ...]

    def tokens_per_s(self, parts: Parts, accepted: Sequence[float]) -> tuple[float, int]:
        """Return tokens per second and length (at least 1) of the best chain.

        Args:
            accepted: how often the first 1, 2, ... tokens of a chain are accepted. Each further token is accepted as
                often as the last of these, given those before it.
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
        """Read JSON values. Raises KeyError, TypeError or ValueError if they are malformed."""
        seconds = {name: float(values[name]) for name in ("start", "base", "attention", "mlp")}
        return cls(verify=tuple(map(float, values["verify"])), **seconds)


def measure_pace(target: LeanTarget, on_progress: Callable[[int, int], None] = lambda done, total: None) -> Pace:
    """Derive a pace from the costs of drafting with all layers, without their attentions, and without their MLPs.

    Args:
        on_progress: called with (done, total) measured sets.
    """
    count, every = target.num_layers, tuple(range(target.num_layers))
    sets = [Parts.without(count, (), ()), Parts.without(count, every, ()), Parts.without(count, (), every)]
    costs = []
    for number, parts in enumerate(sets):
        on_progress(number, len(sets))
        new_drafter: Callable[[], Drafter] = partial(LayerSkipDrafter, SubNet(target.net, parts), target, "layers")
        costs.append(costs_of(target, new_drafter, loop_of(target)))
    on_progress(len(sets), len(sets))
    whole, no_attention, no_mlp = (each.c * each.verify(1) for each in costs)
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
    known: Mapping[Parts, float] | None = None,
) -> Parts:
    """Search for the best set of layers by Bayesian optimisation: a tree-structured Parzen estimator (optuna).

    The search starts with random sets of every size, since most sets of half of the layers draft nothing useful. Later,
    every fourth set differs from the best one in one or two sublayers, which the estimator finds slowly.

    Args:
        num_layers: of the target.
        score: the higher the better. It may raise KeyboardInterrupt.
        num_trials: sets to try, including ``known``.
        known: scores of sets that were tried before, in that order.

    Returns:
        The best set that was tried.

    Raises:
        UnsupportedError: optuna is not installed.
    """
    tried, sampler = dict(known or {}), _Sampler(num_layers, seed)
    for parts, value in tried.items():
        sampler.add(parts, value)
    waiting = [parts for parts in starts(num_layers, seed) if parts not in tried]
    while len(tried) < min(num_trials, 4**num_layers):
        rng = random.Random(f"{seed} {len(tried)}")
        if waiting:
            parts = waiting.pop(0)
        elif len(tried) % 4 == 3:
            parts = _neighbour(max(tried, key=tried.__getitem__), rng)
        else:
            parts = sampler.suggest()
        while parts in tried:
            parts = _neighbour(parts, rng)
        tried[parts] = score(parts)
        sampler.add(parts, tried[parts])
    return max(tried, key=tried.__getitem__)


def starts(num_layers: int, seed: int = 0) -> list[Parts]:
    """Return the first sets: all layers, then without more and more random attentions, MLPs, and both."""
    rng = random.Random(seed)
    sets = [Parts.without(num_layers, (), ())]
    for share in START_SHARES:
        for skips in ((True, False), (False, True), (True, True)):
            skipped = [
                tuple(sorted(rng.sample(range(num_layers), round(share * num_layers)))) if skip else ()
                for skip in skips
            ]
            sets.append(Parts.without(num_layers, *skipped))
    return list(dict.fromkeys(sets))


def exits(num_layers: int) -> list[Parts]:
    """Return every early exit: the first layer, the first two, ... all but the last."""
    return [Parts.first(num_layers, count) for count in range(1, num_layers)]


class _Sampler:
    """Optuna's sampler, with one boolean for each sublayer: True skips it."""

    def __init__(self, num_layers: int, seed: int) -> None:
        try:
            import optuna
        except ImportError as error:
            raise UnsupportedError(
                f"tuning needs optuna, which is not installed ({error}): run `pip install 'draftwing[tune]'`, or try "
                f"only early exits (--exits), which do not need it"
            ) from error
        optuna.logging.set_verbosity(logging.WARNING)
        self._trial: Any = optuna.trial
        self._num_layers = num_layers
        choice = optuna.distributions.CategoricalDistribution([False, True])
        names = [f"{part}.{layer}" for part in ("attention", "mlp") for layer in range(num_layers)]
        self._space = dict.fromkeys(names, choice)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # multivariate is experimental
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=1)
        self._study: Any = optuna.create_study(direction="maximize", sampler=sampler)

    def add(self, parts: Parts, value: float) -> None:
        params = {f"attention.{layer}": layer not in parts.attention for layer in range(self._num_layers)}
        params |= {f"mlp.{layer}": layer not in parts.mlp for layer in range(self._num_layers)}
        self._study.add_trial(self._trial.create_trial(params=params, distributions=self._space, value=value))

    def suggest(self) -> Parts:
        trial = self._study.ask(self._space)
        skipped = [
            tuple(layer for layer in range(self._num_layers) if trial.params[f"{part}.{layer}"])
            for part in ("attention", "mlp")
        ]
        self._study.tell(trial, state=self._trial.TrialState.FAIL)  # ``add`` reports its value
        return Parts.without(self._num_layers, *skipped)


def _neighbour(parts: Parts, rng: random.Random) -> Parts:
    skipped = {("attention", layer) for layer in parts.skipped_attention}
    skipped |= {("mlp", layer) for layer in parts.skipped_mlp}
    for _ in range(rng.choice((1, 2))):
        skipped ^= {(rng.choice(("attention", "mlp")), rng.randrange(parts.num_layers))}
    chosen = [tuple(sorted(layer for part, layer in skipped if part == name)) for name in ("attention", "mlp")]
    return Parts.without(parts.num_layers, *chosen)


# --- trials on disk --------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Basis:
    """Texts and times that all trials of a run share."""

    texts: tuple[TextIds, ...]
    pace: Pace


class Trials:
    """The trials of a run in a file, which each trial is appended to at once.

    Args:
        folder: the run's.
        about: what the trials depend on, as JSON; a run about something else is not resumed.
        num_layers: of the target.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], num_layers: int) -> None:
        self._file, self._about, self._num_layers = folder / FILE, dict(about), num_layers
        self.basis: Basis | None = None
        self.scores: dict[Parts, float] = {}  # tokens per second, in the order of the trials
        self.best: Trial | None = None

    def read(self) -> None:
        """Read the trials of earlier runs; drop a last line that a kill cut short.

        Raises:
            CheckpointError: the file cannot be read, or is malformed.
            ConfigError: a run about something else.
        """
        try:
            content = self._file.read_bytes() if self._file.exists() else b""
        except OSError as error:
            raise CheckpointError(f"{self._file}: cannot be read ({error}): choose another --out") from error
        *lines, rest = content.split(b"\n")
        about = self._about
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                if number == 1:
                    about = dict(record["about"])
                    texts = [TextIds(tuple(map(int, each["ids"])), int(each["prompt"])) for each in record["texts"]]
                    self.basis = Basis(tuple(texts), Pace.from_dict(record["pace"]))
                else:
                    self._take(self._parse(record))
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{self._file}, line {number}: expected what `draftwing tune` writes ({error!r}): delete the "
                    f"file to start again, or choose another --out"
                ) from error
            for name, value in self._about.items():
                if about.get(name) != value:
                    raise ConfigError(
                        f"{self._file} holds a run with {name} {about.get(name)!r:.80}, and this one has "
                        f"{value!r:.80}: choose another --out, or give the options of that run to resume it"
                    )
        if rest:
            try:
                with self._file.open("r+b") as file:
                    file.truncate(len(content) - len(rest))
            except OSError as error:
                raise self._unwritable(error) from error

    def _parse(self, record: Any) -> Trial:
        skipped = [tuple(map(int, record[name])) for name in ("skip_attention", "skip_mlp")]
        accepted = tuple(map(float, record["accepted"]))
        parts = Parts.without(self._num_layers, *skipped)
        return Trial(parts, accepted, float(record["tokens_per_s"]), int(record["depth"]))

    def begin(self, basis: Basis) -> None:
        """Write the first line. Raises CheckpointError if the file is not writable."""
        texts = [asdict(text) for text in basis.texts]
        self._append({"about": self._about, "texts": texts, "pace": asdict(basis.pace)})
        self.basis = basis

    def add(self, trial: Trial) -> None:
        """Append a trial. Raises CheckpointError if the file is not writable."""
        self._append(trial.to_dict())
        self._take(trial)

    def _take(self, trial: Trial) -> None:
        self.scores[trial.parts] = trial.tokens_per_s
        if self.best is None or trial.tokens_per_s > self.best.tokens_per_s:
            self.best = trial

    def _append(self, record: Mapping[str, Any]) -> None:
        try:
            size = self._file.stat().st_size if self._file.exists() else 0
            with self._file.open("ab") as file:
                try:
                    file.write(json.dumps(record).encode() + b"\n")
                    file.flush()
                except OSError:
                    file.truncate(size)  # the next line would be appended to half a line
                    raise
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self._file}: cannot be written to ({error}): {write_fix(error)}; earlier trials are kept"
        )


# --- the run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TunePlan:
    """The settings of a run.

    Attributes:
        out: the folder to write, which ``--draft`` takes.
        target: identifies the target.
        num_trials: sets to try, including those of earlier runs.
        seed: of the search.
        only_exits: try only the first layer, the first two, ...
        about: what else trials depend on, as JSON.
    """

    out: Path
    target: TargetId
    num_trials: int = 200
    seed: int = 0
    only_exits: bool = False
    about: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Tuned:
    """The result of ``tune``.

    Attributes:
        best: of all trials.
        plain: expected tokens per second of the baseline.
        num_trials: including earlier runs.
        finished: False if it was interrupted.
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
    plan: TunePlan,
    new_basis: Callable[[], Basis],
    new_target: Callable[[], LeanTarget],
    on_progress: Callable[[int, int, Trial | None], None] = lambda done, total, best: None,
) -> Tuned:
    """Try sets of layers until all trials are done or Ctrl-C; the same plan resumes an interrupted run.

    Args:
        new_basis: lets the target write texts and measures its times; called only by the first run.
        new_target: loads the target with unpacked weights.
        on_progress: called with the trials that are done, their total, and the best one.

    Raises:
        CheckpointError: the folder cannot be read or written, is in use, or holds another model.
        ConfigError: it holds a run about something else.
        UnsupportedError: optuna is not installed.
        KeyboardInterrupt: before any set was tried.
    """
    about = {**(plan.about or {}), "target": plan.target.name, "seed": plan.seed, "exits": plan.only_exits}
    num_layers = plan.target.num_layers
    check_destination(plan.out)
    with locked(plan.out, CheckpointError):
        trials = Trials(plan.out, about, num_layers)
        trials.read()
        if trials.basis is None:
            trials.begin(new_basis())
        basis = trials.basis
        assert basis is not None
        recorded = Recorded(new_target(), basis.texts, DEPTH)
        total = num_layers - 1 if plan.only_exits else min(plan.num_trials, 4**num_layers)
        before = len(trials.scores)

        def write_best(best: Trial) -> None:
            tuning = {
                "trials": len(trials.scores),
                "accepted": list(best.accepted),
                "depth": best.depth,
                "tokens_per_s": best.tokens_per_s,
                "plain_tokens_per_s": basis.pace.plain,
            }
            LayerSet(best.parts, plan.target, tuning).write(plan.out)

        def score(parts: Parts) -> float:
            on_progress(len(trials.scores), total, trials.best)
            accepted = recorded.accepted(parts)
            trial = Trial(parts, accepted, *basis.pace.tokens_per_s(parts, accepted))
            trials.add(trial)
            if trials.best is trial:
                write_best(trial)
            return trial.tokens_per_s

        finished = True
        try:
            if plan.only_exits:
                for parts in exits(num_layers):
                    if parts not in trials.scores:
                        score(parts)
            else:
                search(num_layers, score, total, plan.seed, trials.scores)
        except KeyboardInterrupt:
            finished = False
        if trials.best is None:
            raise KeyboardInterrupt
        if len(trials.scores) == before:  # no trial was left, and the set may have been deleted
            write_best(trials.best)
        on_progress(len(trials.scores), total, trials.best)
        return Tuned(trials.best, basis.pace.plain, len(trials.scores), finished)
