"""What a set of answers says: tau, speedups and their intervals.

A question counts once: its turns are one sample, since the second follows from the first. Intervals are percentiles of
resampled questions (the bootstrap of Efron 1979).

Shape suffixes: R resamples, Q questions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["STATISTICS", "Estimate", "Sample", "alpha_of", "estimate", "mean_estimate", "resamples"]

NUM_RESAMPLES, LEVEL = 2000, 0.95

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """Sums over the turns of each question; the last axis of every array is the questions'.

    Attributes:
        tokens, forwards, seconds, wall: of a method.
        plain_tokens, plain_seconds, plain_wall: of plain decoding.
    """

    tokens: Array
    forwards: Array
    seconds: Array
    wall: Array
    plain_tokens: Array
    plain_seconds: Array
    plain_wall: Array

    @classmethod
    def of(cls, answers: Iterable[tuple[Any, Mapping[str, Any], Mapping[str, Any]]]) -> Sample:
        """Of (question, the method's measurements, plain decoding's), one for each turn."""
        sums: dict[Any, list[float]] = {}
        for question, own, plain in answers:
            row = [own["tokens"], own["forwards"], own["seconds"], own["wall"]]
            row += [plain["tokens"], plain["seconds"], plain["wall"]]
            held = sums.setdefault(question, [0.0] * len(row))
            held[:] = [a + b for a, b in zip(held, row, strict=True)]
        return cls(*np.array(list(sums.values()), dtype=np.float64).T)

    @property
    def size(self) -> int:
        """Q."""
        return int(self.tokens.shape[-1])

    def at(self, places: NDArray[np.intp]) -> Sample:
        """Of other questions, by their places; the shape of ``places`` is that of the arrays."""
        return Sample(**{name: values[places] for name, values in vars(self).items()})

    @property
    def rate(self) -> Array:
        """Tokens per second of decoding."""
        return self.tokens / self.seconds

    @property
    def plain_rate(self) -> Array:
        """Plain decoding's."""
        return self.plain_tokens / self.plain_seconds


def _tau(s: Sample) -> Array:
    return s.tokens.sum(-1) / s.forwards.sum(-1)  # type: ignore[no-any-return]


def _speedup(s: Sample) -> Array:
    return (s.rate / s.plain_rate).mean(-1)  # type: ignore[no-any-return]


def _ratio_of_means(s: Sample) -> Array:
    return s.rate.mean(-1) / s.plain_rate.mean(-1)  # type: ignore[no-any-return]


def _with_prompt(s: Sample) -> Array:
    """As EAGLE's and Spec-Bench's scripts have it: the prompt's prefill is in the times."""
    return (s.tokens / s.wall).mean(-1) / (s.plain_tokens / s.plain_wall).mean(-1)  # type: ignore[no-any-return]


STATISTICS: dict[str, Callable[[Sample], Array]] = {
    "tau": _tau,
    "speedup": _speedup,
    "speedup_ratio_of_means": _ratio_of_means,
    "speedup_with_prompt": _with_prompt,
}


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95% interval; the ends are None where there are fewer than two questions.

    Attributes:
        drawn: (R,) the figure of each resample; empty where there is no interval.
    """

    value: float
    low: float | None
    high: float | None
    drawn: Array

    @classmethod
    def of(cls, value: float, drawn: Array) -> Estimate:
        """With the interval that the resamples give."""
        if not drawn.size:
            return cls(value, None, None, drawn)
        low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return cls(value, float(low), float(high), drawn)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"value": self.value, "low": self.low, "high": self.high}


def resamples(size: int, seed: str) -> NDArray[np.intp]:
    """(R, Q) places of questions, drawn with replacement; ``seed`` decides which."""
    generator = np.random.default_rng(zlib.crc32(seed.encode()))
    return generator.integers(0, size, size=(NUM_RESAMPLES, size), dtype=np.intp)


def estimate(sample: Sample, seed: str) -> dict[str, Estimate]:
    """Every statistic of a sample."""
    several = sample.at(resamples(sample.size, seed)) if sample.size > 1 else None
    none = np.empty(0)
    return {
        name: Estimate.of(float(of(sample)), none if several is None else of(several))
        for name, of in STATISTICS.items()
    }


def mean_estimate(parts: Sequence[Estimate]) -> Estimate:
    """The mean of several sets' figures, each set counting alike. The sets are resampled independently."""
    value = float(np.mean([each.value for each in parts]))
    drawn = [each.drawn for each in parts]
    if not all(each.size for each in drawn):
        return Estimate.of(value, np.empty(0))
    return Estimate.of(value, np.mean(drawn, axis=0))


def alpha_of(measured: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[int]]:
    """Acceptance at each depth given that the depth was reached and drafted for, over all answers; how often it was."""
    depth = max((len(each["reached"]) for each in measured), default=0)
    reached, taken = np.zeros(depth), np.zeros(depth)
    for each in measured:
        reached[: len(each["reached"])] += each["reached"]
        taken[: len(each["taken"])] += each["taken"]
    shares = [float(t / r) if r else 0.0 for t, r in zip(taken, reached, strict=True)]
    return shares, [int(each) for each in reached]
