"""Run the field's benchmark protocol and keep every answer on disk.

At batch 1, the baseline (decoding without drafts) and each method take turns on every turn of every question. Later
turns follow the baseline's answers, so that all methods see the same prompts. ``records.jsonl`` has the settings, then
each question set, method and answer as one line of JSON; an answer is on disk as soon as it is finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import draftwing
from draftwing.accept import get_rule
from draftwing.cpu.library import get_kernel
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError, shown
from draftwing.files import parse_json
from draftwing.formats.gguf_folder import LINK
from draftwing.lab.bench_sets import Question, QuestionSet
from draftwing.lab.compare import promise_of
from draftwing.lab.machine import describe_machine
from draftwing.lm import LM, Generation
from draftwing.sampling import Sampling
from draftwing.sampling_options import nth_seed
from draftwing.train.checkpoint import locked

FILE = "records.jsonl"
_WARM_UP_TOKENS = 16
_SAMPLING_SETTINGS: dict[str, Callable[[str], float]] = {
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}
# Unsupported settings of a generation_config.json that change the distribution, with the values that do not.
_UNSUPPORTED = {
    "typical_p": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "suppress_tokens": (None,),
    "guidance_scale": (None, 1, 1.0),
}
_DIGEST_PARTS, _DIGEST_PART_BYTES = 256, 1 << 14  # how much of a weight file its digest reads


def digest(value: object) -> str:
    """Hash a JSON value to 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Method:
    """A draft with a budget: one row of a table. ``draft`` is its name there."""

    draft: str
    lm: LM

    def describe(self) -> dict[str, Any]:
        """Return the method's record; ``key`` is a digest of the other values."""
        drafter, budget = self.lm.drafter, self.lm.budget
        values = {
            "draft": self.draft,
            "identity": digest(drafter.identity),
            "runs_as": drafter.runs_as,
            "budget": self.lm.describe_budget(),
            "paths": budget.paths if budget is not None else None,
            "rule": self.lm.rule,
            "lossless": get_rule(self.lm.rule, lossless=False).lossless,
            "is_feature_chain": drafter.reads_features and budget is not None and budget.is_chain,
        }
        return {"key": digest(values), **values}


# --- sampling --------------------------------------------------------------------------------------------------------


def name_of_sampling(sampling: Sampling) -> str:
    """Name a sampling by its settings that are not defaults, such as ``T=0`` or ``T=0.6 top_p=0.9``."""
    default = Sampling()
    values = {name: getattr(sampling, name) for name in _SAMPLING_SETTINGS}
    changed = [f"{name}={value:g}" for name, value in values.items() if value != getattr(default, name)]
    return " ".join([f"T={sampling.temperature:g}", *changed])


def parse_sampling(text: str, folder: Path) -> Sampling:
    """Parse ``0``, ``1``, ``0.2,top_p=0.9`` or ``model``, which reads the target's ``generation_config.json``.

    Args:
        folder: the target's.

    Raises:
        CheckpointError: ``generation_config.json`` is not JSON.
        ConfigError: unknown settings, or the model has none.
        SamplingError: a value outside its range.
        UnsupportedError: a setting of the model that Draftwing does not support.
    """
    if text.strip() == "model":
        return _read_model_sampling(folder / "generation_config.json")
    first, *rest = (part.strip() for part in text.split(","))
    pairs = [part.partition("=")[::2] for part in rest]
    try:
        settings: dict[str, Any] = {name.strip(): _SAMPLING_SETTINGS[name.strip()](value) for name, value in pairs}
        temperature = float(first)
    except (KeyError, ValueError):
        raise ConfigError(
            f"--temperature must be a number, a number with settings such as 0.2,top_p=0.9 (of "
            f"{', '.join(_SAMPLING_SETTINGS)}), or model, found {shown(text)}"
        ) from None
    return Sampling(temperature=temperature, **settings)


def _read_model_sampling(file: Path) -> Sampling:
    try:
        config = parse_json(file.read_bytes()) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error}): download it again") from error
    config = config if isinstance(config, dict) else {}
    for name, neutral in _UNSUPPORTED.items():
        if config.get(name) not in neutral:
            raise UnsupportedError(
                f"{file}: the model's sampling has {name} {shown(config[name])}, which is not supported: leave out "
                f"--temperature model"
            )
    names = ("temperature", *_SAMPLING_SETTINGS)
    settings: dict[str, Any] = {name: config[name] for name in names if config.get(name) is not None}
    if settings.get("top_k") == 0:  # transformers: no limit
        del settings["top_k"]
    if not settings or config.get("do_sample") is False:
        raise ConfigError(
            f"{file}: the model has no sampling settings: leave out --temperature model, or give settings, such as "
            f"--temperature 0.6,top_p=0.9"
        )
    return Sampling(**{"temperature": 1.0, **settings})


# --- settings --------------------------------------------------------------------------------------------------------


def describe_settings(lm: LM, sampling: Sampling) -> dict[str, Any]:
    """Return everything that figures depend on, except set, sampling and draft. One table has one of these.

    Args:
        lm: the baseline.
        sampling: only its ``max_tokens``, ``ignore_eos`` and ``seed`` are used.
    """
    target = lm.target
    kernel = get_kernel() if target.runtime == "kernel" else None
    return {
        "target": target.name,
        "target_identity": weights_digest(lm.tokenizer.folder),
        "tokenizer": lm.tokenizer.vocab_hash,
        "chat": lm.tokenizer.has_chat_template,
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantize": target.quantized or "none",
        "device": str(target.device),
        "runtime": f"{target.runtime}, {type(target).__name__}" if kernel is None else kernel.name,
        "matrices": target.runs_as,
        "tokens": sampling.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "seed": sampling.seed,
        "batch": 1,
        "draftwing": draftwing.__version__,
        "machine": describe_machine(),
    }


def weights_digest(folder: Path) -> str:
    """Hash evenly spaced parts of a model's weight files to 16 hexadecimal digits; takes milliseconds.

    Raises:
        CheckpointError: the files cannot be read.
    """
    sha = hashlib.sha256()
    link = folder / LINK
    files = [link] if link.exists() else sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin"))
    try:
        for path in files:
            size = path.stat().st_size
            sha.update(f"{size} ".encode())
            with path.open("rb") as file:
                for number in range(_DIGEST_PARTS):
                    file.seek(max(size - _DIGEST_PART_BYTES, 0) * number // (_DIGEST_PARTS - 1))
                    sha.update(file.read(_DIGEST_PART_BYTES))
    except OSError as error:
        raise CheckpointError(f"{folder}: the weights cannot be read ({error}): download them again") from error
    return sha.hexdigest()[:16]


def settings_key(settings: Mapping[str, Any]) -> str:
    """Hash settings; the target counts by its weights, not by its name."""
    return digest({name: value for name, value in settings.items() if name != "target"})


# --- records ---------------------------------------------------------------------------------------------------------


class Unit(NamedTuple):
    """One turn (from 1) of a question (from 0) of a set, under one sampling."""

    set: str
    question: int
    turn: int
    sampling: str

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Unit:
        """Return the unit of an answer or skipped turn."""
        return cls(*(record[name] for name in cls._fields))


@dataclass
class Journal:
    """The records of one folder.

    Attributes:
        settings: what all records depend on; empty in a new folder.
        sets, methods: by name, and by key, as recorded.
        answers: records of each unit, several if methods were added later.
        skipped: units whose prompt and answer exceed the context.
    """

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    sets: dict[str, dict[str, Any]] = field(default_factory=dict)
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)
    answers: dict[Unit, list[dict[str, Any]]] = field(default_factory=dict)
    skipped: dict[Unit, dict[str, Any]] = field(default_factory=dict)

    def done(self, unit: Unit) -> set[str]:
        """Return the keys of the methods that have answered."""
        return {key for record in self.answers.get(unit, ()) for key in record["methods"]}

    def text(self, unit: Unit) -> str:
        """Return the baseline's answer."""
        return str(self.answers[unit][0]["plain"]["text"])

    def load(self, record: Mapping[str, Any]) -> None:
        """Add a record that is on disk. Raises KeyError, TypeError or ValueError if it is malformed."""
        kind = record["kind"]
        values = {name: value for name, value in record.items() if name != "kind"}
        match kind:
            case "settings":
                self.settings = values
            case "set":
                self.sets[record["name"]] = values
            case "method":
                self.methods[record["key"]] = values
            case "answer":
                self.answers.setdefault(Unit.of_record(record), []).append(values)
            case "skipped":
                self.skipped[Unit.of_record(record)] = values
            case _:
                raise ValueError(f"unknown kind {shown(kind)}")

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record to the file and sync it to disk.

        Raises:
            OSError: for example if the disk is full.
        """
        line = json.dumps(record, ensure_ascii=False, default=str) + "\n"
        with (self.folder / FILE).open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self.load(record)

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Record the settings of all answers that follow.

        Raises:
            ConfigError: the folder has results of other settings.
        """
        new = json.loads(json.dumps(dict(settings), default=str))
        if not self.settings:
            self.add({"kind": "settings", **new})
        elif settings_key(self.settings) != settings_key(new):
            before, after = ({**each, **each["machine"]} for each in (self.settings, new))
            changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
            name = next(name for name in changed if name not in ("target", "machine"))
            if name == "target_identity" and "target" in changed:
                name = "target"
            raise ConfigError(
                f"{self.folder} holds results with {name.replace('_', ' ')} {shown(before.get(name))}, and this run "
                f"has {shown(after.get(name))}: choose another --out (draftwing bench --report shows several folders, "
                f"one table for each set of settings)"
            )

    def add_set(self, questions: QuestionSet) -> None:
        """Record a question set, once.

        Raises:
            ConfigError: the folder has another set of this name.
        """
        recorded = self.sets.get(questions.name)
        if recorded is None:
            values = {"name": questions.name, "file": Path(questions.path).name, "identity": questions.identity}
            self.add({"kind": "set", **values, "num_questions": len(questions.questions)})
        elif recorded["identity"] != questions.identity:
            raise ConfigError(
                f"{self.folder} holds results for other questions called {questions.name!r} than those of "
                f"{questions.path}: give this set another name (--set other={questions.path}), or choose another --out"
            )


@contextmanager
def open_journal(folder: Path) -> Iterator[Journal]:
    """Lock a folder for writing, make it if it is missing, and read its records; drop an unfinished last line.

    Raises:
        ConfigError: another process writes there, or the folder is not writable.
        CheckpointError: the records cannot be read.
    """
    with locked(folder, ConfigError):
        file = folder / FILE
        if not file.exists():
            yield Journal(folder)
            return
        with file.open("rb+") as stream:
            stream.truncate(stream.read().rfind(b"\n") + 1)
        yield read_journal(folder)


def read_journal(folder: Path) -> Journal:
    """Read the records of a folder.

    Raises:
        CheckpointError: there are none, or they cannot be read.
    """
    file = folder / FILE
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise CheckpointError(
            f"{folder}: no results of draftwing bench in this folder ({error}): give a folder that --out wrote"
        ) from error
    journal = Journal(folder)
    for number, line in enumerate(lines[:-1], 1):  # the last one is empty or unfinished
        try:
            journal.load(parse_json(line))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{file}, line {number}: not a record of draftwing bench ({error}): restore the file, or delete "
                f"the line"
            ) from error
    if not journal.settings:
        raise CheckpointError(f"{file}: no settings in it: delete it, and run draftwing bench again")
    return journal


# --- the protocol ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The measurements to make.

    Attributes:
        plain: the baseline, which has no drafter.
        methods: all on the baseline's target.
        samplings: each set is answered with each.
        limit: questions of each set; None takes all.
    """

    plain: LM
    methods: Sequence[Method]
    sets: Sequence[QuestionSet]
    samplings: Sequence[Sampling]
    limit: int | None = None

    def check(self) -> None:
        """Raise ConfigError if there is nothing to measure, or a method twice."""
        if self.plain.drafter.drafts:
            raise ConfigError("bench needs a baseline without drafts: pass LM(target, tokenizer) as plain")
        for name, values in (("draft", self.methods), ("question set", self.sets), ("temperature", self.samplings)):
            if not values:
                raise ConfigError(f"bench needs at least one {name}: give one")
        seen = set()
        for method in self.methods:
            key = method.describe()["key"]
            if key in seen:
                raise ConfigError(
                    f"{method.draft} with tree {method.lm.describe_budget()} is requested twice: leave one out"
                )
            seen.add(key)

    def units(self, questions: QuestionSet, sampling: Sampling) -> list[tuple[Question, list[Unit]]]:
        """Return the chosen questions of a set, each with the units of its turns."""
        name = name_of_sampling(sampling)
        return [
            (question, [Unit(questions.name, question.number, n + 1, name) for n in range(len(question.turns))])
            for question in questions.chosen(self.limit)
        ]


def run(plan: Plan, journal: Journal, on_progress: Callable[[int, int], None] | None = None) -> None:
    """Measure every answer that the journal does not have, and add it.

    Args:
        on_progress: called with (done, total) answers of those that were missing.

    Raises:
        ConfigError: see ``Plan.check`` and ``Journal.add_set``.
    """
    plan.check()
    for questions in plan.sets:
        journal.add_set(questions)
    methods = {record["key"]: record for record in (method.describe() for method in plan.methods)}
    for key, record in methods.items():
        if key not in journal.methods:
            journal.add({"kind": "method", **record})
    passes = [(sampling, plan.units(questions, sampling)) for questions in plan.sets for sampling in plan.samplings]
    todo = {
        unit
        for _, chosen in passes
        for _, units in chosen
        for unit in units
        if unit not in journal.skipped and not journal.done(unit) >= methods.keys()
    }
    total = len(todo)
    for sampling, chosen in passes:
        session = _Session(plan, journal, sampling)
        for index, (question, units) in enumerate(chosen):
            for unit in session.answer(question, units, index):
                todo.discard(unit)
                if on_progress is not None:
                    on_progress(total - len(todo), total)


class _Session:
    """One set under one sampling, with new drafters and budgets, which may learn until the set ends."""

    def __init__(self, plan: Plan, journal: Journal, sampling: Sampling) -> None:
        self._plain, self._journal, self._sampling = plan.plain, journal, sampling
        self._lms = {
            method.describe()["key"]: type(lm)(
                lm.target, lm.tokenizer, lm.new_drafter, lm.rule, lm.budget, lossless=lm.lossless
            )
            for method in plan.methods
            for lm in [method.lm]
        }
        self._is_warm = False

    def answer(self, question: Question, units: Sequence[Unit], index: int) -> Iterator[Unit]:
        """Answer all turns of the question at ``index``; yield each unit that is answered or skipped."""
        answers: list[str] = []
        for turn, unit in enumerate(units):
            if unit in self._journal.skipped:
                return
            done = self._journal.done(unit)
            missing = {key: lm for key, lm in self._lms.items() if key not in done}
            if missing:
                messages = question.messages(answers)
                is_chat = self._plain.tokenizer.has_chat_template
                prompt = self._plain.encode(messages if is_chat else "\n\n".join(each["content"] for each in messages))
                room = self._plain.target.max_length - len(prompt)
                if room < self._sampling.max_tokens:
                    size = {"prompt_tokens": len(prompt), "context": self._plain.target.max_length}
                    for rest in units[turn:]:
                        values = {"set": rest.set, "question": rest.question, "id": question.id, "turn": rest.turn}
                        self._journal.add({"kind": "skipped", **values, "sampling": rest.sampling, **size})
                        yield rest
                    return
                self._measure(question, unit, prompt, missing, index)
            yield unit
            answers.append(self._journal.text(unit))

    def _measure(self, question: Question, unit: Unit, prompt: list[int], lms: Mapping[str, LM], index: int) -> None:
        lms = {"plain": self._plain, **lms}
        # Each question has its own seed, so that no two are sampled with the same noise.
        sampling = replace(self._sampling, seed=nth_seed(self._sampling.seed or 0, question.number))
        if not self._is_warm:
            for lm in lms.values():
                lm.generate([prompt], sampling, max_tokens=min(_WARM_UP_TOKENS, sampling.max_tokens))
                lm.forget()
            self._is_warm = True
        names = list(lms)
        first = (index + unit.turn) % len(names)  # independent of what an earlier run left
        results = {name: _generate(lms[name], prompt, sampling) for name in [*names[first:], *names[:first]]}
        plain, plain_wall = results["plain"]
        self._journal.add(
            {
                "kind": "answer",
                "set": unit.set,
                "question": unit.question,
                "id": question.id,
                "categories": question.categories,
                "turn": unit.turn,
                "sampling": unit.sampling,
                "prompt_tokens": len(prompt),
                "plain": {**_counts(plain, plain_wall), "text": plain.text, "finish_reason": plain.finish_reason},
                "methods": {
                    key: {
                        **_counts(*results[key]),
                        **_difference(results[key][0], plain),
                        "promise": promise_of(lms[key], sampling),
                    }
                    for key in names[1:]
                },
            }
        )


def _generate(lm: LM, prompt: list[int], sampling: Sampling) -> tuple[Generation, float]:
    """Decode a prompt; return the generation and its seconds, prefill included."""
    start = time.perf_counter()
    (generation,) = lm.generate([prompt], sampling)
    return generation, time.perf_counter() - start


def _counts(generation: Generation, wall: float) -> dict[str, Any]:
    stats = generation.stats
    return {
        "tokens": stats.num_tokens,
        "forwards": stats.num_forwards,
        "drafted": stats.num_drafted,
        "reached": stats.reached,
        "taken": stats.taken,
        "seconds": stats.total_seconds,
        "wall": wall,
        "lossless": stats.lossless,
    }


def _difference(generation: Generation, plain: Generation) -> dict[str, Any]:
    ids, plain_ids = generation.token_ids, plain.token_ids
    if ids == plain_ids:
        return {"identical": True}
    pairs = enumerate(zip(ids, plain_ids, strict=False))
    differs_at = next((n for n, (token, other) in pairs if token != other), min(len(ids), len(plain_ids)))
    return {"identical": False, "differs_at": differs_at, "text": generation.text}
