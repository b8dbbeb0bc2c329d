"""Summarise answers: tau, speedups and their intervals for every set, turn, category, sampling and method.

The turns of a question are one sample, since later turns depend on earlier ones. Intervals are percentiles over
resampled questions (Efron's bootstrap, 1979).

Shape suffixes: R resamples, Q questions.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwing.lab.bench import Journal, Unit, settings_key

NUM_RESAMPLES, LEVEL = 2000, 0.95
MEAN = "mean of sets"
NUM_SHOWN_DEPTHS = 3

Array = NDArray[np.float64]
Answer = tuple[dict[str, Any], dict[str, Any]]  # a record, and the part of it that one method measured


# --- statistics ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResultSample:
    """Sums over the turns of each question for a method and the baseline (plain): (Q,), or (R, Q) if resampled."""

    tokens: Array
    forwards: Array
    seconds: Array
    wall: Array
    plain_tokens: Array
    plain_seconds: Array
    plain_wall: Array

    @classmethod
    def of(cls, answers: Iterable[tuple[Any, Mapping[str, Any], Mapping[str, Any]]]) -> ResultSample:
        """Sum (question, the method's counts, the baseline's counts) over turns."""
        sums: dict[Any, Array] = {}
        for question, counts, plain in answers:
            row = [counts[name] for name in ("tokens", "forwards", "seconds", "wall")]
            row += [plain[name] for name in ("tokens", "seconds", "wall")]
            sums[question] = sums.get(question, 0) + np.array(row, dtype=np.float64)
        return cls(*np.array(list(sums.values())).T)

    @property
    def rate(self) -> Array:
        return self.tokens / self.seconds

    @property
    def plain_rate(self) -> Array:
        return self.plain_tokens / self.plain_seconds


STATISTICS: dict[str, Callable[[ResultSample], Any]] = {
    "tau": lambda s: s.tokens.sum(-1) / s.forwards.sum(-1),
    "speedup": lambda s: (s.rate / s.plain_rate).mean(-1),
    "speedup_ratio_of_means": lambda s: s.rate.mean(-1) / s.plain_rate.mean(-1),
    # Like the scripts of EAGLE and Spec-Bench, with the prompt's prefill in both times.
    "speedup_with_prompt": lambda s: (s.tokens / s.wall).mean(-1) / (s.plain_tokens / s.plain_wall).mean(-1),
}


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95% interval; ``low`` and ``high`` are None for fewer than two questions."""

    value: float
    low: float | None
    high: float | None
    resampled: Array  # (R,) the figure of each resample; empty without an interval

    @classmethod
    def of(cls, value: float, resampled: Array) -> Estimate:
        if not resampled.size:
            return cls(value, None, None, resampled)
        low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return cls(value, float(low), float(high), resampled)

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high}

    def text(self, unit: str = "") -> str:
        """Return for example ``1.61x [1.52-1.71]``."""
        ends = f" [{self.low:.2f}-{self.high:.2f}]" if self.low is not None else ""
        return f"{self.value:.2f}{unit}{ends}"


def resamples(size: int, seed: str) -> NDArray[np.intp]:
    """Draw (R, Q) indices of questions with replacement."""
    generator = np.random.default_rng(zlib.crc32(seed.encode()))
    return generator.integers(0, size, size=(NUM_RESAMPLES, size), dtype=np.intp)


def estimate(sample: ResultSample, seed: str) -> dict[str, Estimate]:
    """Compute every statistic of a sample; equal seeds draw equal questions."""
    size = len(sample.tokens)
    if size < 2:
        return {name: Estimate.of(float(compute(sample)), np.empty(0)) for name, compute in STATISTICS.items()}
    drawn = resamples(size, seed)
    resampled = ResultSample(**{name: values[drawn] for name, values in vars(sample).items()})
    return {name: Estimate.of(float(compute(sample)), compute(resampled)) for name, compute in STATISTICS.items()}


def mean_estimate(estimates: Sequence[Estimate]) -> Estimate:
    """Average the figures of several sets with equal weights. The sets are resampled independently."""
    value = float(np.mean([estimate.value for estimate in estimates]))
    resampled = [estimate.resampled for estimate in estimates]
    return Estimate.of(value, np.mean(resampled, axis=0) if all(map(len, resampled)) else np.empty(0))


def alpha_of(counts: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[int]]:
    """Return acceptance at each depth over all answers, and how often a draft reached that depth."""
    depth = max((len(answer["reached"]) for answer in counts), default=0)
    reached, taken = np.zeros(depth), np.zeros(depth)
    for answer in counts:
        reached[: len(answer["reached"])] += answer["reached"]
        taken[: len(answer["taken"])] += answer["taken"]
    return (taken / np.maximum(reached, 1)).tolist(), reached.astype(np.int64).tolist()


# --- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResultRow:
    """One line of a table."""

    # set, category, turn, sampling: the answers it covers; category and turn are None for all of them
    set: str
    category: str | None
    turn: int | None
    sampling: str
    method: Mapping[str, Any]  # its record
    # num_questions, num_answers: an answer is one turn of a question
    num_questions: int
    num_answers: int
    figures: Mapping[str, Estimate]  # by the names of ``STATISTICS``
    # tokens_per_s, plain_tokens_per_s: means over questions
    tokens_per_s: float
    plain_tokens_per_s: float
    # alpha, reached: acceptance by depth, and how often a draft reached that depth
    alpha: list[float]
    reached: list[int]
    # for a fixed chain of an EAGLE head, acceptance of the n-th token, which has read n predicted features
    n_alpha: list[float] | None
    num_identical: int
    promise: str  # the guarantee of the rule: ``text``, ``distribution`` or ``nothing`` (see ``compare.MethodResult``)
    lossless: bool
    seconds: float
    plain_seconds: float

    @property
    def part(self) -> str:
        """Category and turn in words; empty for a whole set."""
        turn = f"turn {self.turn}" if self.turn is not None else ""
        return ", ".join(filter(None, (self.category, turn)))

    @property
    def keeps_promise(self) -> bool:
        """True unless the rule preserves the text and an answer differs."""
        return self.promise != "text" or self.num_identical == self.num_answers

    def cells(self) -> dict[str, str]:
        """Return the line as text by column, without some intervals and the acceptance of deep levels."""
        alpha = [f"{value:.2f}".removeprefix("0") for value in self.alpha[:NUM_SHOWN_DEPTHS]]
        alpha += ["..."] if len(self.alpha) > NUM_SHOWN_DEPTHS else []
        suffix = " (same distribution)" if self.promise == "distribution" else "" if self.lossless else ", LOSSY rule"
        return {
            "set": self.set,
            "part": self.part,
            "sampling": self.sampling,
            "draft": self.method["draft"] + ("" if self.method["rule"] == "match" else f" ({self.method['rule']})"),
            "tree": str(self.method["budget"]),
            "n": str(self.num_questions),
            "tau": self.figures["tau"].text(),
            "speedup": self.figures["speedup"].text("x"),
            "of means": f"{self.figures['speedup_ratio_of_means'].value:.2f}x",
            "with prompt": f"{self.figures['speedup_with_prompt'].value:.2f}x",
            "tokens/s": f"{self.tokens_per_s:.1f}",
            "plain": f"{self.plain_tokens_per_s:.1f}",
            "alpha by depth": " ".join(alpha) or "-",
            "identical": f"{self.num_identical} of {self.num_answers}{suffix}",
        }

    def to_dict(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name not in ("figures", "method")}
        method = {name: self.method[name] for name in ("draft", "budget", "rule", "key")}
        figures = {name: figure.to_dict() for name, figure in self.figures.items()}
        efficiency = self.figures["speedup"].value / self.figures["tau"].value
        share = self.num_identical / self.num_answers
        return {**values, **method, **figures, "efficiency": efficiency, "identical": share}


@dataclass
class Group:
    """Results of equal settings, from one folder or several."""

    settings: dict[str, Any]
    sets: dict[str, dict[str, Any]]
    methods: dict[str, dict[str, Any]]
    folders: list[str]
    rows: list[ResultRow]  # for each set: all of it, then its turns and categories
    skipped: list[dict[str, Any]]  # turns whose prompt and answer exceed the context
    differences: list[dict[str, Any]]  # answers that differ from the baseline's, with both texts

    @property
    def wholes(self) -> list[ResultRow]:
        """Rows of whole sets, and their means."""
        return [row for row in self.rows if row.category is None and row.turn is None]

    @property
    def parts(self) -> list[ResultRow]:
        """Rows of turns and categories: by set, turns first, rows of one part next to each other."""
        rows = [row for row in self.rows if (row.category is None) != (row.turn is None)]
        names, parts = list(self.sets), list(dict.fromkeys((row.set, row.part) for row in rows))
        return sorted(rows, key=lambda row: (names.index(row.set), row.turn is None, parts.index((row.set, row.part))))

    @property
    def keeps_promises(self) -> bool:
        """True if all answers equal the baseline's for every rule that preserves the text."""
        return all(row.keeps_promise for row in self.wholes)


def gather(journals: Sequence[Journal]) -> list[Group]:
    """Summarise one or several folders: one group for equal settings and questions."""
    grouped: list[list[Journal]] = []
    for journal in journals:
        fitting = [group for group in grouped if all(_fits(journal, other) for other in group)]
        if fitting:
            fitting[0].append(journal)
        else:
            grouped.append([journal])
    return [_summarise(group) for group in grouped]


def _fits(one: Journal, other: Journal) -> bool:
    if settings_key(one.settings) != settings_key(other.settings):
        return False
    shared = one.sets.keys() & other.sets.keys()
    return all(one.sets[name]["identity"] == other.sets[name]["identity"] for name in shared)


def _summarise(journals: Sequence[Journal]) -> Group:
    answers: dict[tuple[str, Unit], Answer] = {}  # by method and unit; the first one that was measured
    skipped: dict[Unit, dict[str, Any]] = {}
    sets: dict[str, dict[str, Any]] = {}
    methods: dict[str, dict[str, Any]] = {}
    for journal in journals:
        sets |= journal.sets
        methods |= journal.methods
        skipped |= journal.skipped
        for unit, records in journal.answers.items():
            for record in records:
                for key, counts in record["methods"].items():
                    answers.setdefault((key, unit), (record, counts))
    methods = _with_distinct_names(methods)
    differences = [
        {
            **{name: record[name] for name in ("set", "question", "id", "turn", "sampling")},
            **{name: methods[key][name] for name in ("draft", "budget", "rule")},
            **{name: counts[name] for name in ("promise", "differs_at")},
            "plain_text": record["plain"]["text"],
            "text": counts["text"],
        }
        for (key, _), (record, counts) in answers.items()
        if not counts["identical"]
    ]
    return Group(
        settings=journals[0].settings,
        sets=sets,
        methods=methods,
        folders=[str(journal.folder) for journal in journals],
        rows=list(_rows(sets, methods, answers)),
        skipped=list(skipped.values()),
        differences=differences,
    )


def _with_distinct_names(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Append the first digits of the identity to the names of different heads that share one."""
    renamed = {}
    for key, method in methods.items():
        identities = {other["identity"] for other in methods.values() if other["draft"] == method["draft"]}
        name = f"{method['draft']} ({method['identity'][:6]})" if len(identities) > 1 else method["draft"]
        renamed[key] = {**method, "draft": name}
    return renamed


def _rows(
    sets: Mapping[str, Any], methods: Mapping[str, Mapping[str, Any]], answers: Mapping[tuple[str, Unit], Answer]
) -> Iterator[ResultRow]:
    tables: dict[tuple[str, str, str], list[Answer]] = {}
    for (key, unit), answer in answers.items():
        tables.setdefault((unit.set, unit.sampling, key), []).append(answer)
    samplings = list(dict.fromkeys(sampling for _, sampling, _ in tables))
    wholes: dict[tuple[str, str], list[ResultRow]] = {}
    for name, sampling, key in itertools.product(sets, samplings, methods):
        if (name, sampling, key) in tables:
            rows = [_row(methods[key], name, sampling, *part) for part in _parts(tables[name, sampling, key])]
            wholes.setdefault((sampling, key), []).append(rows[0])
            yield from rows
    for sampling, key in itertools.product(samplings, methods):
        rows = wholes.get((sampling, key), [])
        if len(rows) > 1 and len(rows) == len(sets):
            yield _mean(rows)


def _parts(answers: Sequence[Answer]) -> Iterator[tuple[str | None, int | None, list[Answer]]]:
    """Yield all answers, then those of each turn, of each category, and of each turn of each category."""
    categories = list(dict.fromkeys(name for record, _ in answers for name in record["categories"]))
    turns = sorted({record["turn"] for record, _ in answers})
    for category in [None, *(categories if len(categories) > 1 else ())]:
        for turn in [None, *(turns if len(turns) > 1 else ())]:
            part = [
                (record, counts)
                for record, counts in answers
                if category in (None, *record["categories"]) and turn in (None, record["turn"])
            ]
            if part:
                yield category, turn, part


def _row(
    method: Mapping[str, Any],
    name: str,
    sampling: str,
    category: str | None,
    turn: int | None,
    answers: Sequence[Answer],
) -> ResultRow:
    sample = ResultSample.of((record["question"], counts, record["plain"]) for record, counts in answers)
    alpha, reached = alpha_of([counts for _, counts in answers])
    return ResultRow(
        set=name,
        category=category,
        turn=turn,
        sampling=sampling,
        method=method,
        num_questions=len(sample.tokens),
        num_answers=len(answers),
        figures=estimate(sample, f"{name} {category} {turn}"),  # the same resampled questions for every method
        tokens_per_s=float(sample.rate.mean()),
        plain_tokens_per_s=float(sample.plain_rate.mean()),
        alpha=alpha,
        reached=reached,
        n_alpha=alpha if method["is_feature_chain"] else None,
        num_identical=sum(counts["identical"] for _, counts in answers),
        promise=answers[0][1]["promise"],
        lossless=all(counts["lossless"] for _, counts in answers),
        seconds=float(sample.seconds.sum()),
        plain_seconds=float(sample.plain_seconds.sum()),
    )


def _mean(rows: Sequence[ResultRow]) -> ResultRow:
    """Average whole sets with equal weights, like the last column of the papers' tables."""

    def total(name: str) -> Any:
        return sum(getattr(row, name) for row in rows)

    return replace(
        rows[0],
        set=MEAN,
        figures={name: mean_estimate([row.figures[name] for row in rows]) for name in STATISTICS},
        alpha=[],
        reached=[],
        n_alpha=None,
        lossless=all(row.lossless for row in rows),
        tokens_per_s=total("tokens_per_s") / len(rows),
        plain_tokens_per_s=total("plain_tokens_per_s") / len(rows),
        **{name: total(name) for name in ("num_questions", "num_answers", "num_identical", "seconds", "plain_seconds")},
    )


def to_dict(groups: Sequence[Group]) -> dict[str, Any]:
    values = []
    for group in groups:
        lists = {"sets": list(group.sets.values()), "methods": list(group.methods.values())}
        rows = [row.to_dict() for row in group.rows]
        values.append({**vars(group), **lists, "all_identical": group.keeps_promises, "rows": rows})
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "groups": values}
