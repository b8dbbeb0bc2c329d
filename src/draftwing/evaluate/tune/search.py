"""Which of all sets of layers is worth most: Bayesian optimisation by a tree-structured Parzen estimator (optuna).

What it learns from comes first: sets of every size, drawn at random, since most sets of half of the layers guess
nothing. In the end every fourth set tried differs from the best one in a layer or two, which a model of all
sublayers alone finds slowly.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from draftwing.errors import UnsupportedError
from draftwing.model.subnet import Parts

__all__ = ["Score", "exits", "search", "starts"]

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
    """The same but for one or two sublayers."""
    skipped = {("attention", each) for each in parts.skipped_attention} | {("mlp", each) for each in parts.skipped_mlp}
    for _ in range(rng.choice((1, 2))):
        skipped ^= {(rng.choice(("attention", "mlp")), rng.randrange(parts.num_layers))}
    chosen = [tuple(sorted(layer for part, layer in skipped if part == name)) for name in ("attention", "mlp")]
    return Parts.without(parts.num_layers, *chosen)


def _untried(parts: Parts, tried: Mapping[Parts, float], rng: random.Random) -> Parts:
    """The first set on a random walk that was not tried yet: there is one."""
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
