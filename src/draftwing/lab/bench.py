"""Run the field's benchmark protocol and keep every answer on disk.

At batch 1, the baseline (decoding without drafts) and each method take turns on every turn of every question. Later
turns follow the baseline's answers, so that all methods see the same prompts. ``records.jsonl`` has the settings, then
each question set, method and answer; an answer is on disk as soon as it is finished.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import draftwing
from draftwing.accept import get_rule
from draftwing.cpu.library import get_kernel
from draftwing.errors import CheckpointError, ConfigError, PromptError, shown
from draftwing.formats.gguf_folder import LINK
from draftwing.formats.identity import hash_blocks
from draftwing.lab.compare import first_difference, promise_of
from draftwing.lab.machine import describe_machine, describe_target
from draftwing.lm import LM, Generation
from draftwing.remote import Phase, download, is_url, local_copy
from draftwing.sampling import Sampling, model_settings, nth_seed, sampling_of
from draftwing.storage import RecordFile, locked
from draftwing.text.prompts import check_text, read_entries, read_record

FILE = "records.jsonl"
_WARM_UP_TOKENS = 16
_SAMPLING_SETTINGS: dict[str, Callable[[str], float]] = {
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}
_DIGEST_BLOCKS = 256  # blocks of a weight file that its digest reads
# The categories of MT-bench, which Spec-Bench contains and reports as one task.
_MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
# The name of every question file in the repositories of EAGLE and Spec-Bench; the folder names the set.
_QUESTION_FILE = "question.jsonl"


@dataclass(frozen=True)
class Question:
    """One question of a set."""

    number: int  # its index in the file; ``id`` is from the file, else its line
    id: str
    categories: tuple[str, ...]  # its category, and the task that contains it if there is one
    turns: tuple[str, ...]  # the user's messages
    system: str | None = None

    def messages(self, answers: Sequence[str]) -> list[dict[str, str]]:
        """Return the dialogue with the answered turns and the next one."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn, answer in zip(self.turns, answers, strict=False):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": self.turns[len(answers)]}]


@dataclass(frozen=True)
class QuestionSet:
    """The questions of one file."""

    name: str
    path: str
    questions: tuple[Question, ...]

    @property
    def identity(self) -> str:
        values = [[question.id, question.categories, question.turns, question.system] for question in self.questions]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]

    def chosen(self, limit: int | None) -> list[Question]:
        """Choose ``limit`` questions evenly over the categories: the first of each, then the second of each, ...

        A smaller limit chooses a prefix.
        """
        tasks = _grouped(self.questions, lambda question: question.categories[-1])
        spread = [_in_turn(_grouped(task, lambda question: question.categories[0])) for task in tasks]
        return _in_turn(spread)[:limit]


def _grouped(questions: Iterable[Question], key: Callable[[Question], str]) -> list[list[Question]]:
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(key(question), []).append(question)
    return list(groups.values())


def _in_turn(groups: Sequence[Sequence[Question]]) -> list[Question]:
    return [question for row in zip_longest(*groups) for question in row if question is not None]


def find_files(arguments: Sequence[str], phase: Phase | None = None) -> dict[str, Path]:
    """Find question files, by the name of their set; those at URLs are downloaded first.

    Args:
        arguments: each is ``NAME=FILE``, a file or its URL (its name is the set's), or a folder, which gives its
            ``question.jsonl``, else its ``.jsonl`` and ``.json`` files and each ``question.jsonl`` one folder below.
        phase: shows a download, see ``remote.download``.
    """
    sets: dict[str, Path] = {}
    for argument in arguments:
        prefix, equals, rest = argument.partition("=")
        if not equals or is_url(argument) or Path(argument).exists():  # a file may have = in its name
            prefix, rest = "", argument
        elif not prefix.strip() or not rest:
            raise ConfigError(f"--set must be NAME=FILE, FILE or a folder, found {shown(argument)}")
        if phase is not None:
            download([rest], phase)
        path = local_copy(rest)
        files = _files_in(path) if path.is_dir() else [path]
        if prefix and len(files) > 1:
            raise ConfigError(
                f"--set {shown(argument)}: there are {len(files)} question files in this folder: name one of them, or "
                f"leave {prefix.strip()}= out"
            )
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"--set {argument}: there is no such file: give a file of questions, or a folder")
            name = prefix.strip() or (file.absolute().parent.name if file.name == _QUESTION_FILE else file.stem)
            if name in sets:
                raise ConfigError(
                    f"--set: both {sets[name]} and {file} would be called {name!r}: name one of them, such as "
                    f"other={file}"
                )
            sets[name] = file
    if not sets:
        raise ConfigError("bench needs questions: give --set FILE, such as --set mt_bench.jsonl")
    return sets


def _files_in(folder: Path) -> list[Path]:
    if (folder / _QUESTION_FILE).is_file():
        return [folder / _QUESTION_FILE]
    files = sorted(path for path in folder.iterdir() if path.suffix in (".jsonl", ".json") and path.is_file())
    files += sorted(path / _QUESTION_FILE for path in folder.iterdir() if (path / _QUESTION_FILE).is_file())
    if not files:
        raise CheckpointError(f"--set {folder}: no .jsonl file in this folder: give a file of questions")
    return files


def read_set(name: str, path: Path) -> QuestionSet:
    """Read the questions of a file in any form of ``text.prompts.read_record``. Answers in the file are ignored."""
    questions = [_question(number, entry, where) for number, (where, entry) in enumerate(read_entries(path))]
    if {question.categories[0] for question in questions} > _MT_BENCH:
        for number, question in enumerate(questions):
            if question.categories[0] in _MT_BENCH:
                questions[number] = replace(question, categories=(*question.categories, "mt_bench"))
    return QuestionSet(name, str(path), tuple(questions))


def _question(number: int, entry: Any, where: str) -> Question:
    if isinstance(entry, dict) and isinstance(entry.get("article"), str):  # CNN/DM as published
        entry = {**entry, "question": f"Summarize: {entry['article']}"}
    record = read_record(entry, where, PromptError)
    system = None
    if record.text is not None:
        turns = [record.text]
    else:
        turns = [message["content"] for message in record.messages if message["role"] == "user"]
        system = "\n\n".join(message["content"] for message in record.messages if message["role"] == "system") or None
    if not turns or not all(turn.strip() for turn in turns):
        raise PromptError(f"{where}: there is no question in it, or an empty one: give it a text, or delete the entry")
    category = entry.get("category")
    return Question(
        number=number,
        id=str(next((entry[key] for key in ("question_id", "task_id", "id") if key in entry), number + 1)),
        categories=(category if isinstance(category, str) and category else "all",),
        turns=tuple(map(check_text, turns)),
        system=system,
    )


def digest(value: object) -> str:
    """Hash a JSON value to 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Method:
    """A draft with a budget: one row of a table. ``draft`` is its name there."""

    draft: str
    lm: LM

    @property
    def key(self) -> str:
        return str(self.describe()["key"])

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
    """Parse ``0``, ``1``, ``0.2,top_p=0.9`` or ``model``: the ``generation_config.json`` in the target's folder."""
    if text.strip() == "model":
        if not model_settings(folder):
            raise ConfigError(
                f"{folder}: the model's generation_config.json has no sampling settings: leave out --temperature "
                f"model, or give settings, such as --temperature 0.6,top_p=0.9"
            )
        return sampling_of(folder)
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


# --- settings --------------------------------------------------------------------------------------------------------


def describe_settings(lm: LM, sampling: Sampling) -> dict[str, Any]:
    """Return everything that figures depend on, except set, sampling and draft. One table has one of these."""
    target = lm.target
    kernel = get_kernel() if target.runtime == "kernel" else None
    return {
        **describe_target(target),
        "quantize": target.quantized or "none",
        "target_identity": weights_digest(lm.tokenizer.folder),
        "tokenizer": lm.tokenizer.vocab_hash,
        "chat": lm.tokenizer.has_chat_template,
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
    """Hash evenly spaced parts of a model's weight files to 16 hexadecimal digits; takes milliseconds."""
    sha = hashlib.sha256()
    link = folder / LINK
    files = [link] if link.exists() else sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin"))
    try:
        for path in files:
            sha.update(f"{path.stat().st_size} ".encode())
            hash_blocks(path, _DIGEST_BLOCKS, sha)
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


class Journal:
    """The records of a folder: ``settings``, ``sets`` by name, ``methods`` by key, and turns.

    A unit has several ``answers`` if methods were added later. ``skipped`` units exceed the context.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings: dict[str, Any] = {}
        self.sets: dict[str, dict[str, Any]] = {}
        self.methods: dict[str, dict[str, Any]] = {}
        self.answers: dict[Unit, list[dict[str, Any]]] = {}
        self.skipped: dict[Unit, dict[str, Any]] = {}
        self._file = RecordFile(folder / FILE)
        self._file.load(self._take)

    def done(self, unit: Unit) -> set[str]:
        """Return the keys of the methods that have answered."""
        return {key for record in self.answers.get(unit, ()) for key in record["methods"]}

    def text(self, unit: Unit) -> str:
        """Return the baseline's answer."""
        return str(self.answers[unit][0]["plain"]["text"])

    def _take(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        values = {name: value for name, value in record.items() if name != "kind"}
        if kind == "settings":
            self.settings = values
        elif not self.settings:
            raise ValueError("the settings must be first")
        elif kind == "set":
            self.sets[record["name"]] = values
        elif kind == "method":
            self.methods[record["key"]] = values
        elif kind == "answer":
            self.answers.setdefault(Unit.of_record(record), []).append(values)
        elif kind == "skipped":
            self.skipped[Unit.of_record(record)] = values
        else:
            raise ValueError(f"unknown kind {shown(kind)}")

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record. Raises CheckpointError if the file cannot be written."""
        self._file.append(record)
        self._take(record)

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Record the settings of all answers. Raises ConfigError if the folder has results of other settings."""
        new = json.loads(json.dumps(dict(settings), default=str))
        if not self.settings:
            self.add({"kind": "settings", **new})
        elif settings_key(self.settings) != settings_key(new):
            before, after = ({**values, **values["machine"]} for values in (self.settings, new))
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
        """Record a question set, once. Raises ConfigError if the folder has another set of this name."""
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
    """Lock a folder for writing (ConfigError if that fails), make it if it is missing, and read its records."""
    with locked(folder, ConfigError):
        yield Journal(folder)


def read_journal(folder: Path) -> Journal:
    """Read the records of a folder. Raises CheckpointError if there are none."""
    journal = Journal(folder)
    if not journal.settings:
        raise CheckpointError(f"{folder}: no results of draftwing bench in this folder: give a folder that --out wrote")
    return journal


# --- the protocol ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The measurements to make: every set with every sampling, the baseline (``plain``) and every method.

    ``limit`` is the number of questions of each set; None takes all.
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
        keys = [method.key for method in self.methods]
        for method in self.methods:
            if keys.count(method.key) > 1:
                raise ConfigError(
                    f"{method.draft} with tree {method.lm.describe_budget()} is requested twice: leave one out"
                )

    def units(self, questions: QuestionSet, sampling: Sampling) -> list[tuple[Question, list[Unit]]]:
        """Return the chosen questions of a set, each with the units of its turns."""
        name = name_of_sampling(sampling)
        return [
            (question, [Unit(questions.name, question.number, n + 1, name) for n in range(len(question.turns))])
            for question in questions.chosen(self.limit)
        ]


def run(plan: Plan, journal: Journal, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Measure every answer that the journal does not have, and add it.

    ``on_progress`` is called with (done, total) of the missing answers. Raises ConfigError for an invalid plan.
    """
    plan.check()
    for questions in plan.sets:
        journal.add_set(questions)
    keys = {method.key for method in plan.methods}
    for method in plan.methods:
        if method.key not in journal.methods:
            journal.add({"kind": "method", **method.describe()})
    passes = [(sampling, plan.units(questions, sampling)) for questions in plan.sets for sampling in plan.samplings]
    every = [unit for _, chosen in passes for _, units in chosen for unit in units]
    todo = {unit for unit in every if unit not in journal.skipped and not journal.done(unit) >= keys}
    total = len(todo)
    for sampling, chosen in passes:
        session = _Session(plan, journal, sampling)
        for index, (question, units) in enumerate(chosen):
            for unit in session.answer(question, units, index):
                todo.discard(unit)
                on_progress(total - len(todo), total)


class _Session:
    """One set under one sampling, with new drafters and budgets, which may learn until the set ends."""

    def __init__(self, plan: Plan, journal: Journal, sampling: Sampling) -> None:
        self._plain, self._journal, self._sampling = plan.plain, journal, sampling
        self._lms = {}
        for method in plan.methods:
            lm = method.lm
            new = type(lm)(lm.target, lm.tokenizer, lm.new_drafter, lm.rule, lm.budget, lossless=lm.lossless)
            self._lms[method.key] = new
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
                text = "\n\n".join(message["content"] for message in messages)
                prompt = self._plain.encode(messages if is_chat else text)
                context = self._plain.target.max_length
                if context - len(prompt) < self._sampling.max_tokens:
                    for rest in units[turn:]:
                        size = {"prompt_tokens": len(prompt), "context": context}
                        self._journal.add({"kind": "skipped", **rest._asdict(), "id": question.id, **size})
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
        generations, counts = {}, {}
        for name in [*names[first:], *names[:first]]:
            start = time.perf_counter()
            (generations[name],) = lms[name].generate([prompt], sampling)
            wall = time.perf_counter() - start  # prefill included
            stats = generations[name].stats
            counts[name] = {
                "tokens": stats.num_tokens,
                "forwards": stats.num_forwards,
                "drafted": stats.num_drafted,
                "reached": stats.reached,
                "taken": stats.taken,
                "seconds": stats.total_seconds,
                "wall": wall,
                "lossless": stats.lossless,
            }
        plain = generations["plain"]
        methods = {
            key: {**counts[key], **_difference(generations[key], plain), "promise": promise_of(lms[key], sampling)}
            for key in names[1:]
        }
        self._journal.add(
            {
                "kind": "answer",
                **unit._asdict(),
                "id": question.id,
                "categories": question.categories,
                "prompt_tokens": len(prompt),
                "plain": {**counts["plain"], "text": plain.text, "finish_reason": plain.finish_reason},
                "methods": methods,
            }
        )


def _difference(generation: Generation, plain: Generation) -> dict[str, Any]:
    ids, plain_ids = generation.token_ids, plain.token_ids
    if ids == plain_ids:
        return {"identical": True}
    return {"identical": False, "differs_at": first_difference(ids, plain_ids), "text": generation.text}
