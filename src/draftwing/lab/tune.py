"""Texts that a target wrote, with its keys and values: a batch on which any set of its layers is tried in one go.

A draft from position i reads the target's own keys and values before i, and those of its own chain behind. All
positions are drafted at once, each token of the chain being the text's: that is the draft's own as long as it is right,
and what comes after its first mistake does not count. So what is found is what greedy decoding would accept, exactly.

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
from draftwing.formats.write import check_destination, write_fix
from draftwing.methods.base import Drafter
from draftwing.methods.layer_skip import LayerSet, LayerSkipDrafter
from draftwing.methods.net import TargetId
from draftwing.methods.unroll import UnrolledAttention
from draftwing.models.lean import LeanTarget
from draftwing.models.subnet import Parts, SubNet
from draftwing.train.checkpoint import locked

MOST_ENTRIES = 512  # positions of all texts together that a set is tried at


@dataclass(frozen=True)
class Text:
    """A prompt and what the target wrote after it, greedily.

    Attributes:
        ids: of both; ``prompt``: how many of them are the prompt's.
    """

    ids: tuple[int, ...]
    prompt: int

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"ids": list(self.ids), "prompt": self.prompt}

    @classmethod
    def from_dict(cls, values: Any) -> Text:
        """What ``to_dict`` gave. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(tuple(map(int, values["ids"])), int(values["prompt"]))


class Recorded:
    """See above.

    Args:
        target: with plain weights (``prepack=False``).
        texts: what it wrote. Sliding windows are not looked at: what lies beyond the narrowest one is cut off.
        depth: of the chains that are tried.

    Raises:
        ConfigError: no text has ``depth`` + 1 written tokens.
    """

    @torch.inference_mode()
    def __init__(self, target: LeanTarget, texts: Sequence[Text], depth: int) -> None:
        net, rows = target.net, len(texts)
        room = min([window for window in net.shape.windows if window is not None], default=target.max_length)
        lengths = [min(len(text.ids), room) for text in texts]
        longest = max(lengths, default=0)
        ids = torch.zeros(rows, longest, dtype=torch.int64)
        starts = torch.arange(longest)  # the last token that is committed before each draft
        valid = torch.zeros(rows, longest, dtype=torch.bool)
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            ids[row, :length] = torch.tensor(text.ids[:length])
            valid[row] = (starts >= max(text.prompt - 2, 0)) & (starts + depth + 1 < length)
        entries = valid.any(0).nonzero()[:, 0]
        if not len(entries):
            raise ConfigError(
                f"the recorded texts are too short: chains of {depth} need as many written tokens and one more, within "
                f"{room} tokens: let the target write more"
            )
        entries = entries[:: -(-rows * len(entries) // MOST_ENTRIES)]
        self._net, self._depth, self._longest, self._rows = net, depth, longest, rows
        self._ids, self._entries = ids.to(target.device), entries.to(target.device)
        self._valid = valid[:, entries].to(target.device)
        shape = net.shape
        self._attend = UnrolledAttention(rows, longest, shape.num_layers, shape.head_dim**-0.5)
        self._attend.cis = self._cis(torch.arange(longest, device=target.device))
        net.forward(self._ids.reshape(-1), None, self._attend)

    def _cis(self, places: Tensor) -> Tensor:
        """(B * C, 1, rotary_dim / 2)"""
        positions = places.repeat(self._rows)
        found = self._net.rotary.cis(positions, torch.full_like(positions, self._longest), upto=self._longest)
        return found.view(len(positions), 1, -1)

    @torch.inference_mode()
    def accepted(self, parts: Parts) -> tuple[float, ...]:
        """At which share of the positions the first token of a chain is accepted, the first two, ... all ``depth``."""
        net, attend, found = SubNet(self._net, parts), self._attend.again(), []
        attend.choose(self._entries)
        right, count = self._valid, int(self._valid.sum())
        for step in range(1, self._depth + 1):
            places = self._entries + step
            attend.cis = self._cis(places)
            read, _ = net.forward(self._ids[:, places].reshape(-1), None, attend)
            best = net.logits(read).argmax(-1).view(self._rows, -1)
            right = right & (best == self._ids[:, places + 1])
            found.append(int(right.sum()) / count)
        return tuple(found)


# What drafting with any set of a target's layers takes on this machine, from a handful of measurements.


MOST_DEPTH = 12  # of the chains that are weighed


@dataclass(frozen=True)
class Pace:
    """Seconds.

    Attributes:
        start: of a draft, whatever its depth.
        base: of each of its passes beside the layers: embedding, norm, LM head, choosing a token.
        attention, mlp: of each layer's part in a pass.
        verify: of the target's forward over 1, 2, ... nodes, with all that comes after it.
    """

    start: float
    base: float
    attention: float
    mlp: float
    verify: tuple[float, ...]

    def tokens_per_s(self, parts: Parts, accepted: Sequence[float]) -> tuple[float, int]:
        """Of the best chain: its tokens a second, and its length, 1 at least.

        Args:
            accepted: how often the first token of a chain is accepted, the first two, ...; each further token as often
                as the last of these, given those before it.
        """
        each = self.base + len(parts.attention) * self.attention + len(parts.mlp) * self.mlp
        reached, tokens, found = 1.0, 1.0, []
        for depth in range(1, len(self.verify)):
            if depth <= len(accepted):
                reached = accepted[depth - 1]
            else:
                before = accepted[-2] if len(accepted) > 1 else 1.0
                reached *= accepted[-1] / before if before else 0.0
            tokens += reached
            found.append((tokens / (self.start + depth * each + self.verify[depth]), depth))
        return max(found)

    @property
    def plain(self) -> float:
        """Tokens a second without drafts."""
        return 1 / self.verify[0]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Pace:
        """What ``to_dict`` gave.

        Raises:
            ConfigError: something else.
        """
        try:
            numbers = {name: float(values[name]) for name in ("start", "base", "attention", "mlp")}
            verify = tuple(map(float, values["verify"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"these are no measured times ({error!r}): measure again") from error
        return cls(verify=verify, **numbers)


def measure_pace(target: LeanTarget, on_progress: Callable[[int, int], None] = lambda done, total: None) -> Pace:
    """From a target's costs with all of its layers drafting, without their attentions, and without their MLPs.

    Args:
        on_progress: called with the sets measured, and how many there are.
    """
    count, every = target.num_layers, tuple(range(target.num_layers))
    sets = [Parts.without(count, (), ()), Parts.without(count, every, ()), Parts.without(count, (), every)]
    costs = []
    for number, parts in enumerate(sets):
        on_progress(number, len(sets))
        new: Callable[[], Drafter] = partial(LayerSkipDrafter, SubNet(target.net, parts), target, "layers")
        costs.append(costs_of(target, new, loop_of(target)))
    on_progress(len(sets), len(sets))
    whole, no_attention, no_mlp = (each.c * each.verify(1) for each in costs)
    verify = costs[0].verify
    return Pace(
        start=max(costs[0].chain(1) - whole, 0.0),
        base=max(no_attention + no_mlp - whole, 0.0),
        attention=max(whole - no_attention, 0.0) / count,
        mlp=max(whole - no_mlp, 0.0) / count,
        verify=tuple(verify(nodes) for nodes in range(1, MOST_DEPTH + 2)),
    )


# Which of all sets of layers is worth most: Bayesian optimisation by a tree-structured Parzen estimator (optuna).
#
# What it learns from comes first: sets of every size, drawn at random, since most sets of half of the layers guess
# nothing. In the end every fourth set tried differs from the best one in a layer or two, which a model of all
# sublayers alone finds slowly.


Score = Callable[[Parts], float]
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)  # of the sublayers that the first sets skip


def search(
    num_layers: int, score: Score, num_trials: int, seed: int = 0, known: Mapping[Parts, float] | None = None
) -> Parts:
    """The best set that was tried.

    Args:
        num_layers: of the target.
        score: what a set is worth; the higher the better. It may raise KeyboardInterrupt.
        num_trials: sets to try in all, those that are ``known`` counted.
        known: sets that were tried before, and what they are worth, in that order.

    Raises:
        UnsupportedError: optuna is not installed.
    """
    tried, advisor = dict(known or {}), _Advisor(num_layers, seed)
    for parts, worth in tried.items():
        advisor.learn(parts, worth)
    waiting = [parts for parts in starts(num_layers, seed) if parts not in tried]
    while len(tried) < min(num_trials, 4**num_layers):
        rng = random.Random(f"{seed} {len(tried)}")
        if waiting:
            parts = waiting.pop(0)
        elif len(tried) % 4 == 3:
            parts = _neighbour(max(tried, key=tried.__getitem__), rng)
        else:
            parts = advisor.advise()
        if parts in tried:
            parts = _untried(parts, tried, rng)
        tried[parts] = score(parts)
        advisor.learn(parts, tried[parts])
    return max(tried, key=tried.__getitem__)


def starts(num_layers: int, seed: int = 0) -> list[Parts]:
    """What is tried first: nothing skipped, then more and more attentions, MLPs, and both, drawn at random."""
    rng = random.Random(seed)
    found = [Parts.without(num_layers, (), ())]
    for share in SHARES:
        for attention, mlp in ((True, False), (False, True), (True, True)):
            skipped = [
                tuple(sorted(rng.sample(range(num_layers), round(share * num_layers)))) if wanted else ()
                for wanted in (attention, mlp)
            ]
            found.append(Parts.without(num_layers, *skipped))
    return list(dict.fromkeys(found))


def exits(num_layers: int) -> list[Parts]:
    """Every early exit: the first layer, the first two, ... all but the last."""
    return [Parts.first(num_layers, count) for count in range(1, num_layers)]


class _Advisor:
    """Optuna's sampler: each sublayer is skipped or not."""

    def __init__(self, num_layers: int, seed: int) -> None:
        self._optuna, self._num_layers = _load_optuna(), num_layers
        names = [f"{part}.{layer}" for part in ("attention", "mlp") for layer in range(num_layers)]
        choice = self._optuna.distributions.CategoricalDistribution([False, True])
        self._space = dict.fromkeys(names, choice)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of parts that are experimental
            sampler = self._optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=1)
        self._study = self._optuna.create_study(direction="maximize", sampler=sampler)

    def learn(self, parts: Parts, worth: float) -> None:
        """A set and what it is worth."""
        params = {f"attention.{layer}": layer not in parts.attention for layer in range(self._num_layers)}
        params |= {f"mlp.{layer}": layer not in parts.mlp for layer in range(self._num_layers)}
        done = self._optuna.trial.create_trial(params=params, distributions=self._space, value=worth)
        self._study.add_trial(done)

    def advise(self) -> Parts:
        """A set that promises much."""
        trial = self._study.ask(self._space)
        skipped = [
            tuple(layer for layer in range(self._num_layers) if trial.params[f"{part}.{layer}"])
            for part in ("attention", "mlp")
        ]
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)  # what it is worth is learnt as any other's
        return Parts.without(self._num_layers, *skipped)


def _neighbour(parts: Parts, rng: random.Random) -> Parts:
    skipped = {("attention", each) for each in parts.skipped_attention} | {("mlp", each) for each in parts.skipped_mlp}
    for _ in range(rng.choice((1, 2))):
        skipped ^= {(rng.choice(("attention", "mlp")), rng.randrange(parts.num_layers))}
    chosen = [tuple(sorted(layer for part, layer in skipped if part == name)) for name in ("attention", "mlp")]
    return Parts.without(parts.num_layers, *chosen)


def _untried(parts: Parts, tried: Mapping[Parts, float], rng: random.Random) -> Parts:
    while parts in tried:
        parts = _neighbour(parts, rng)
    return parts


def _load_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UnsupportedError(
            f"tuning needs optuna, which is not installed ({error}): run `pip install 'draftwing[tune]'`, or try early "
            f"exits alone (--exits), which takes none"
        ) from error
    optuna.logging.set_verbosity(logging.WARNING)
    return optuna


# Every set of layers that was tried, in a file to which each is added at once: a run that was stopped goes on from it.
#
# The first line says what the run is about, with the recorded texts and the measured times, so that all trials are of
# one measure; then comes a line for each set.


FILE = "trials.jsonl"


@dataclass(frozen=True)
class Trial:
    """A set, how often its chains are accepted to each depth, and its tokens a second with chains of ``depth``."""

    parts: Parts
    accepted: tuple[float, ...]
    tokens_per_s: float
    depth: int

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "skip_attention": list(self.parts.skipped_attention),
            "skip_mlp": list(self.parts.skipped_mlp),
            "accepted": list(self.accepted),
            "tokens_per_s": self.tokens_per_s,
            "depth": self.depth,
        }


@dataclass(frozen=True)
class Basis:
    """What all trials of a run are measured by."""

    texts: tuple[Text, ...]
    pace: Pace


class _OtherRunError(Exception):
    pass


class Trials:
    """The file of a run.

    Args:
        folder: where it lies.
        about: what the trials depend on; any JSON. A run about something else is not gone on with.
        num_layers: of the target.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], num_layers: int) -> None:
        self._file, self._about, self._num_layers = folder / FILE, dict(about), num_layers
        self.basis: Basis | None = None
        self.found: list[Trial] = []

    def read(self) -> None:
        """What earlier runs left; a last line that a kill cut short is dropped.

        Raises:
            CheckpointError: the file cannot be read, or holds something else.
            ConfigError: a run about something else.
        """
        try:
            content = self._file.read_bytes() if self._file.exists() else b""
        except OSError as error:
            raise CheckpointError(f"{self._file}: cannot be read ({error}): choose another --out") from error
        lines = content.split(b"\n")
        whole, rest = lines[:-1], lines[-1]
        for number, line in enumerate(whole, 1):
            try:
                self._take(json.loads(line), number)
            except _OtherRunError as error:
                raise ConfigError(str(error)) from None
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{self._file}, line {number}: expected what `draftwing tune` writes ({error!r}): delete the "
                    f"file to start anew, or choose another --out"
                ) from error
        if rest:
            try:
                with self._file.open("r+b") as file:
                    file.truncate(len(content) - len(rest))
            except OSError as error:
                raise self._unwritable(error) from error

    def _take(self, record: Any, number: int) -> None:
        if number == 1:
            differs = [name for name, value in self._about.items() if record["about"].get(name) != value]
            if differs:
                raise _OtherRunError(
                    f"{self._file} holds a run with {differs[0]} {record['about'].get(differs[0])!r:.80}, and this one "
                    f"has {self._about[differs[0]]!r:.80}: choose another --out, or give what that run had to go on"
                )
            self.basis = Basis(tuple(map(Text.from_dict, record["texts"])), Pace.from_dict(record["pace"]))
            return
        skipped = [tuple(map(int, record[name])) for name in ("skip_attention", "skip_mlp")]
        accepted = tuple(map(float, record["accepted"]))
        parts = Parts.without(self._num_layers, *skipped)
        self.found.append(Trial(parts, accepted, float(record["tokens_per_s"]), int(record["depth"])))

    def begin(self, basis: Basis) -> None:
        """Write the first line. Raises CheckpointError where that cannot be."""
        texts = [text.to_dict() for text in basis.texts]
        self._append({"about": self._about, "texts": texts, "pace": basis.pace.to_dict()})
        self.basis = basis

    def add(self, trial: Trial) -> None:
        """Put a trial down. Raises CheckpointError where the file cannot be written to."""
        self._append(trial.to_dict())
        self.found.append(trial)

    @property
    def best(self) -> Trial | None:
        """The fastest so far."""
        return max(self.found, key=lambda trial: trial.tokens_per_s, default=None)

    @property
    def scores(self) -> dict[Parts, float]:
        """Tokens a second by set, in the order in which they were tried."""
        return {trial.parts: trial.tokens_per_s for trial in self.found}

    def _append(self, record: Mapping[str, Any]) -> None:
        try:
            size = self._file.stat().st_size if self._file.exists() else 0
            with self._file.open("ab") as file:
                try:
                    file.write(json.dumps(record).encode() + b"\n")
                    file.flush()
                except OSError:
                    file.truncate(size)  # half a line would be taken for damage
                    raise
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self._file}: cannot be written to ({error}): {write_fix(error)}; what was tried before is kept"
        )


# Tunes the layers with which a target drafts for itself: see ``search`` for how, ``recorded`` and ``pace`` by what.
#
# A trial is a few forwards over recorded texts, weighed with measured times: a second or two, where decoding would take
# a minute. What is found best is written at once, so that a run may be stopped at any moment.


DEPTH = 4  # of the chains whose acceptance is recorded; longer ones are reckoned from these


@dataclass(frozen=True)
class Plan:
    """What is tuned, and how.

    Attributes:
        out: the folder that ``--draft`` then takes.
        target: for which.
        num_trials: sets to try in all, those of earlier runs counted.
        seed: of the search.
        only_exits: try the first layer, the first two, ... and nothing else.
        about: what else trials depend on; any JSON.
    """

    out: Path
    target: TargetId
    num_trials: int = 200
    seed: int = 0
    only_exits: bool = False
    about: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Tuned:
    """What came of it.

    Attributes:
        best: of all that were tried.
        plain: tokens a second without drafts, by the same measure.
        num_trials: in all.
        finished: whether none is left.
    """

    best: Trial
    plain: float
    num_trials: int
    finished: bool

    @property
    def speedup(self) -> float:
        """That is expected."""
        return self.best.tokens_per_s / self.plain


def tune(
    plan: Plan,
    new_basis: Callable[[], Basis],
    new_target: Callable[[], LeanTarget],
    on_progress: Callable[[int, int, Trial | None], None] = lambda done, total, best: None,
) -> Tuned:
    """Try sets until all are tried that were asked for, or Ctrl-C; the same plan goes on where it was stopped.

    Args:
        new_basis: lets the target write texts, and measures its times; not called where an earlier run did.
        new_target: the target with plain weights.
        on_progress: called with the sets tried, how many there will be, and the best one.

    Raises:
        CheckpointError: the folder cannot be read or written, is in use, or holds another model.
        ConfigError: it holds a run about something else.
        UnsupportedError: optuna is not installed.
        KeyboardInterrupt: before any set was tried.
    """
    about = {**(plan.about or {}), "target": plan.target.name, "seed": plan.seed, "exits": plan.only_exits}
    check_destination(plan.out)
    with locked(plan.out, CheckpointError):
        trials = Trials(plan.out, about, plan.target.num_layers)
        trials.read()
        if trials.basis is None:
            trials.begin(new_basis())
        basis = trials.basis
        assert basis is not None
        recorded = Recorded(new_target(), basis.texts, DEPTH)
        num_layers = plan.target.num_layers
        total = num_layers - 1 if plan.only_exits else min(plan.num_trials, 4**num_layers)
        before = len(trials.found)

        def score(parts: Parts) -> float:
            on_progress(len(trials.found), total, trials.best)
            accepted = recorded.accepted(parts)
            trial = Trial(parts, accepted, *basis.pace.tokens_per_s(parts, accepted))
            trials.add(trial)
            if trials.best is trial:
                _write(plan, trials, basis)
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
        best = trials.best
        if best is None:
            raise KeyboardInterrupt
        if len(trials.found) == before:  # all were there; the set may have been deleted since
            _write(plan, trials, basis)
        on_progress(len(trials.found), total, best)
    return Tuned(best, basis.pace.plain, len(trials.found), finished)


def _write(plan: Plan, trials: Trials, basis: Basis) -> None:
    """Put the best set where ``--draft`` finds it."""
    best = trials.best
    assert best is not None
    tuning = {
        "trials": len(trials.found),
        "accepted": list(best.accepted),
        "depth": best.depth,
        "tokens_per_s": best.tokens_per_s,
        "plain_tokens_per_s": basis.pace.plain,
    }
    LayerSet(best.parts, plan.target, tuning).write(plan.out)
