"""What a set of answers says: tau, speedups and their intervals.

A question counts once: its turns are one sample, since the second follows from the first. Intervals are percentiles of
resampled questions (the bootstrap of Efron 1979).

Shape suffixes: R resamples, Q questions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwing.lab.bench import Journal, Unit, settings_key

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


# From records to tables: groups of equal settings, and in each a row for every set, part, sampling and method.


MEAN = "mean of sets"


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        set, category, turn, sampling: what was answered; no category or turn: all of them.
        method: what it was answered with, as recorded.
        num_questions, num_answers: an answer is a turn of a question.
        figures: by the names of ``STATISTICS``.
        tokens_per_s, plain_tokens_per_s: means over questions.
        alpha, reached: acceptance by depth, and how often a draft came to that depth.
        n_alpha: the same where the n-th drafted token has read n predicted features: of a fixed chain of an EAGLE head.
        num_identical: answers that are plain decoding's to the token.
        promise: what the rule keeps: ``text``, ``law`` or ``nothing`` (``evaluate.compare.MethodResult``).
        seconds, plain_seconds: of all answers.
    """

    set: str
    category: str | None
    turn: int | None
    sampling: str
    method: Mapping[str, Any]
    num_questions: int
    num_answers: int
    figures: Mapping[str, Estimate]
    tokens_per_s: float
    plain_tokens_per_s: float
    alpha: list[float]
    reached: list[int]
    n_alpha: list[float] | None
    num_identical: int
    promise: str
    lossless: bool
    seconds: float
    plain_seconds: float

    @property
    def part(self) -> str:
        """Category and turn in words; empty for a whole set."""
        turn = f"turn {self.turn}" if self.turn is not None else ""
        return ", ".join(each for each in (self.category or "", turn) if each)

    @property
    def keeps_promise(self) -> bool:
        """Whether every text is plain decoding's, where the rule promises it."""
        return self.promise != "text" or self.num_identical == self.num_answers

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        figures = {name: each.to_dict() for name, each in self.figures.items()}
        plain = {name: value for name, value in vars(self).items() if name not in ("figures", "method")}
        method = {name: self.method[name] for name in ("draft", "budget", "rule", "key")}
        efficiency = self.figures["speedup"].value / self.figures["tau"].value
        share = self.num_identical / self.num_answers
        return {**plain, **method, **figures, "efficiency": efficiency, "identical": share}


@dataclass
class Group:
    """Results of equal settings, from one folder or several.

    Attributes:
        rows: whole sets first in each set, then its turns and categories.
        skipped: turns that had no room.
        differences: answers that are not plain decoding's, both texts with them.
    """

    settings: dict[str, Any]
    sets: dict[str, dict[str, Any]]
    methods: dict[str, dict[str, Any]]
    folders: list[str]
    rows: list[Row] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    differences: list[dict[str, Any]] = field(default_factory=list)

    @property
    def wholes(self) -> list[Row]:
        """Rows of whole sets, and their mean."""
        return [row for row in self.rows if row.category is None and row.turn is None]

    @property
    def parts(self) -> list[Row]:
        """Rows of categories and of turns, those of one part side by side."""
        found = [row for row in self.rows if (row.category is None) != (row.turn is None)]
        order = list(dict.fromkeys((row.set, row.turn is None, row.part) for row in found))
        order.sort(key=lambda each: (list(self.sets).index(each[0]), each[1]))
        return sorted(found, key=lambda row: order.index((row.set, row.turn is None, row.part)))

    @property
    def keeps_promises(self) -> bool:
        """Whether every text that a rule promises to be plain decoding's is."""
        return all(row.keeps_promise for row in self.wholes)


def gather(journals: Sequence[Journal]) -> list[Group]:
    """Tables of one or several folders. Only what has the same settings and questions comes into one."""
    together: list[list[Journal]] = []
    for journal in journals:
        for held in together:
            if all(_fits(journal, other) for other in held):
                held.append(journal)
                break
        else:
            together.append([journal])
    return [_group(each) for each in together]


def _fits(one: Journal, other: Journal) -> bool:
    if settings_key(one.settings) != settings_key(other.settings):
        return False
    shared = one.sets.keys() & other.sets.keys()
    return all(one.sets[name]["identity"] == other.sets[name]["identity"] for name in shared)


def _group(journals: Sequence[Journal]) -> Group:
    first = journals[0]
    group = Group(first.settings, {}, {}, [str(each.folder) for each in journals])
    answers: dict[
        tuple[str, Unit], tuple[dict[str, Any], dict[str, Any]]
    ] = {}  # by method and unit: the first measured
    skipped: dict[Unit, dict[str, Any]] = {}
    for journal in journals:
        group.sets |= journal.sets
        group.methods |= journal.methods
        skipped |= journal.skipped
        for unit, records in journal.answers.items():
            for record in records:
                for key in record["methods"]:
                    answers.setdefault((key, unit), (record, record["methods"][key]))
    group.methods = _named_apart(group.methods)
    group.skipped = list(skipped.values())
    group.differences = [_difference(group.methods[key], *found) for (key, _), found in answers.items()]
    group.differences = [each for each in group.differences if each]
    group.rows = list(_rows(group, answers))
    return group


def _named_apart(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Two heads of one name get the beginning of what tells them apart."""
    found = {}
    for key, method in methods.items():
        same = {other["identity"] for other in methods.values() if other["draft"] == method["draft"]}
        name = f"{method['draft']} ({method['identity'][:6]})" if len(same) > 1 else method["draft"]
        found[key] = {**method, "draft": name}
    return found


def _difference(method: Mapping[str, Any], record: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    if own["identical"]:
        return {}
    where = {name: record[name] for name in ("set", "question", "id", "turn", "sampling")}
    what = {name: method[name] for name in ("draft", "budget", "rule")}
    texts = {"plain_text": record["plain"]["text"], "text": own["text"]}
    return {**where, **what, "promise": own["promise"], "differs_at": own["differs_at"], **texts}


# --- rows ------------------------------------------------------------------------------------------------------------

Found = tuple[dict[str, Any], dict[str, Any]]  # an answer's record, and a method's part of it


def _rows(group: Group, answers: Mapping[tuple[str, Unit], Found]) -> Iterator[Row]:
    by_table: dict[tuple[str, str, str], list[Found]] = {}
    for (key, unit), found in answers.items():
        by_table.setdefault((unit[0], unit[3], key), []).append(found)
    samplings = list(dict.fromkeys(sampling for _, sampling, _ in by_table))
    order = [(s, t, key) for s in group.sets for t in samplings for key in group.methods if (s, t, key) in by_table]
    wholes: list[Row] = []
    for name, sampling, key in order:
        rows = [
            _row(group.methods[key], (name, *part, sampling), found)
            for part, found in _parts(by_table[name, sampling, key])
        ]
        wholes.append(rows[0])
        yield from rows
    for sampling in samplings:
        for key in group.methods:
            own = [row for row in wholes if row.sampling == sampling and row.method["key"] == key]
            if len(own) > 1 and len(own) == len(group.sets):
                yield _mean(own)


def _parts(found: Sequence[Found]) -> Iterator[tuple[tuple[str | None, int | None], list[Found]]]:
    """All answers, then those of each turn, of each category, and of each turn of each category."""
    categories = list(dict.fromkeys(name for record, _ in found for name in record["categories"]))
    turns = sorted({record["turn"] for record, _ in found})
    for category in [None, *(categories if len(categories) > 1 else ())]:
        for turn in [None, *(turns if len(turns) > 1 else ())]:
            part = [
                each
                for each in found
                if (category is None or category in each[0]["categories"]) and (turn is None or turn == each[0]["turn"])
            ]
            if part:
                yield (category, turn), part


def _row(method: Mapping[str, Any], of: tuple[str, str | None, int | None, str], found: Sequence[Found]) -> Row:
    sample = Sample.of((record["question"], own, record["plain"]) for record, own in found)
    alpha, reached = alpha_of([own for _, own in found])
    return Row(
        *of,
        method=method,
        num_questions=sample.size,
        num_answers=len(found),
        # The same questions are drawn for every method: what is compared is resampled alike.
        figures=estimate(sample, f"{of[0]} {of[1]} {of[2]}"),
        tokens_per_s=float(sample.rate.mean()),
        plain_tokens_per_s=float(sample.plain_rate.mean()),
        alpha=alpha,
        reached=reached,
        n_alpha=alpha if method["is_feature_chain"] else None,
        num_identical=sum(own["identical"] for _, own in found),
        promise=found[0][1]["promise"],
        lossless=all(own["lossless"] for _, own in found),
        seconds=float(sample.seconds.sum()),
        plain_seconds=float(sample.plain_seconds.sum()),
    )


def _mean(rows: Sequence[Row]) -> Row:
    """As the papers' last column: each set counts alike."""
    first = rows[0]
    return Row(
        set=MEAN,
        category=None,
        turn=None,
        sampling=first.sampling,
        method=first.method,
        num_questions=sum(row.num_questions for row in rows),
        num_answers=sum(row.num_answers for row in rows),
        figures={name: mean_estimate([row.figures[name] for row in rows]) for name in STATISTICS},
        tokens_per_s=sum(row.tokens_per_s for row in rows) / len(rows),
        plain_tokens_per_s=sum(row.plain_tokens_per_s for row in rows) / len(rows),
        alpha=[],
        reached=[],
        n_alpha=None,
        num_identical=sum(row.num_identical for row in rows),
        promise=first.promise,
        lossless=all(row.lossless for row in rows),
        seconds=sum(row.seconds for row in rows),
        plain_seconds=sum(row.plain_seconds for row in rows),
    )


# --- JSON ------------------------------------------------------------------------------------------------------------


def to_dict(groups: Sequence[Group]) -> dict[str, Any]:
    """As plain JSON values."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "groups": [
            {
                "settings": group.settings,
                "folders": group.folders,
                "sets": list(group.sets.values()),
                "methods": list(group.methods.values()),
                "all_identical": group.keeps_promises,
                "rows": [row.to_dict() for row in group.rows],
                "skipped": group.skipped,
                "differences": group.differences,
            }
            for group in groups
        ],
    }
