"""What a result depends on: the target, how it runs and samples, the machine; and what is measured, a draft each."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import draftwing
from draftwing.accept import get_rule
from draftwing.cpu.library import get_kernel
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError, shown
from draftwing.formats.gguf_folder import LINK
from draftwing.lab.bench_sets import Question, QuestionSet
from draftwing.lab.compare import promise_of
from draftwing.lab.machine import describe_machine
from draftwing.lm import LM, Generation
from draftwing.sampling import Sampling
from draftwing.sampling_options import nth_seed
from draftwing.text.prompts import parse_json
from draftwing.train.checkpoint import locked

_FILE = "generation_config.json"
_KNOWN: dict[str, Callable[[str], float]] = {"top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}
# Settings of a generation_config.json that change what is sampled, and are not supported: what asks for nothing.
_UNSUPPORTED = {
    "typical_p": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "suppress_tokens": (None,),
    "guidance_scale": (None, 1, 1.0),
}
_BLOCK = 1 << 14  # bytes read at each of _SAMPLES places of a weight file
_SAMPLES = 256


def digest(value: object) -> str:
    """12 hexadecimal digits that stand for a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


# --- what is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A draft with a budget: one row of a table.

    Attributes:
        draft: what it is called.
        lm: decodes with it.
    """

    draft: str
    lm: LM

    def fresh(self) -> Method:
        """The same with nothing learnt: a budget that is decided step by step begins anew with each set."""
        lm = self.lm
        return replace(
            self, lm=type(lm)(lm.target, lm.tokenizer, lm.new_drafter, lm.rule, lm.budget, lossless=lm.lossless)
        )

    def describe(self) -> dict[str, Any]:
        """As it stands in a record; ``key`` stands for all of it."""
        drafter, rule = self.lm.drafter, get_rule(self.lm.rule, lossless=False)
        budget = self.lm.budget
        values = {
            "draft": self.draft,
            "identity": digest(drafter.identity),
            "runs_as": drafter.runs_as,
            "budget": self.lm.describe_budget(),
            "paths": budget.paths if budget is not None else None,
            "rule": self.lm.rule,
            "lossless": rule.lossless,
            "is_feature_chain": drafter.reads_features and budget is not None and budget.is_chain,
        }
        return {"key": digest(values), **values}


# --- sampling --------------------------------------------------------------------------------------------------------


def name_of_sampling(sampling: Sampling) -> str:
    """Such as ``T=0`` or ``T=0.6 top_p=0.9``: everything that tells it from another."""
    more = [f"{name}={value:g}" for name in _KNOWN if (value := getattr(sampling, name)) != getattr(Sampling(), name)]
    return " ".join([f"T={sampling.temperature:g}", *more])


def parse_sampling(text: str, folder: Path) -> Sampling:
    """``0``, ``1``, ``0.2,top_p=0.9``, or ``model``: as the model's own ``generation_config.json`` says.

    Args:
        folder: the target's.

    Raises:
        ConfigError: it says nothing that is known, or the model has no settings of its own.
        SamplingError: a value outside its range.
    """
    if text.strip() == "model":
        return _of_model(folder / _FILE)
    first, *more = (part.strip() for part in text.split(","))
    pairs = [part.partition("=")[::2] for part in more]
    try:
        words = {name.strip(): _KNOWN[name.strip()](value) for name, value in pairs}
        return Sampling(temperature=float(first), **words)  # type: ignore[arg-type]
    except (KeyError, ValueError) as error:
        if isinstance(error, draftwing.DraftwingError):
            raise
        raise ConfigError(
            f"--temperature must be a number, a number with settings such as 0.2,top_p=0.9 (of {', '.join(_KNOWN)}), "
            f"or model, found {shown(text)}"
        ) from None


def _of_model(file: Path) -> Sampling:
    try:
        held = parse_json(file.read_bytes()) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error}): download it again") from error
    held = held if isinstance(held, dict) else {}
    odd = next((name for name, neutral in _UNSUPPORTED.items() if held.get(name) not in neutral), None)
    if odd is not None:
        raise UnsupportedError(
            f"{file}: the model's own sampling has {odd} {shown(held[odd])}, which is not supported: leave out "
            f"--temperature model"
        )
    words: dict[str, Any] = {name: held[name] for name in ("temperature", *_KNOWN) if held.get(name) is not None}
    if words.get("top_k") == 0:  # as transformers says none
        del words["top_k"]
    if not words or held.get("do_sample") is False:
        raise ConfigError(
            f"{file}: the model has no sampling settings of its own: leave out --temperature model, or give them, such "
            f"as --temperature 0.6,top_p=0.9"
        )
    return Sampling(**{"temperature": 1.0, **words})


# --- settings --------------------------------------------------------------------------------------------------------


def describe_settings(lm: LM, sampling: Sampling) -> dict[str, Any]:
    """Everything beside set, sampling and draft that a figure depends on. What differs in it is never put in one table.

    Args:
        lm: plain decoding.
        sampling: its ``max_tokens`` and ``seed`` count.
    """
    target, kernel = lm.target, get_kernel()
    is_kernel = target.runtime == "kernel" and kernel is not None
    return {
        "target": target.name,
        "target_identity": _identity(lm.tokenizer.folder),
        "tokenizer": lm.tokenizer.vocab_hash,
        "chat": lm.tokenizer.has_chat_template,
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantize": target.quantized or "none",
        "device": str(target.device),
        "runtime": kernel.name if is_kernel and kernel is not None else f"{target.runtime}, {type(target).__name__}",
        "matrices": target.runs_as,
        "tokens": sampling.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "seed": sampling.seed,
        "batch": 1,
        "draftwing": draftwing.__version__,
        "machine": describe_machine(),
    }


def _identity(folder: Path) -> str:
    """16 digits that stand for a model's weights, of which evenly spaced parts are read: it takes milliseconds."""
    hashed = hashlib.sha256()
    link = folder / LINK
    files = [link] if link.exists() else sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin"))
    try:
        for path in files:
            size = path.stat().st_size
            hashed.update(f"{size} ".encode())
            with path.open("rb") as file:
                for number in range(_SAMPLES):
                    file.seek(max(size - _BLOCK, 0) * number // (_SAMPLES - 1))
                    hashed.update(file.read(_BLOCK))
    except OSError as error:
        raise CheckpointError(f"{folder}: the weights cannot be read ({error}): download them again") from error
    return hashed.hexdigest()[:16]


def settings_key(settings: Mapping[str, Any]) -> str:
    """Stands for settings; what the target is called does not count, its weights do."""
    return digest({name: value for name, value in settings.items() if name != "target"})


# What is measured, on disk at once: one line of JSON for each finished answer, and before it what it depends on.
#
# Kinds of lines: ``settings`` (once), ``set`` and ``method`` (once each), ``answer`` (one turn of a question, decoded
# plainly and by one or more methods), ``skipped`` (a turn that has no room).


FILE = "records.jsonl"
_KINDS = ("settings", "set", "method", "answer", "skipped")

# A turn of a question under a sampling: set, question's number, turn (from 1), name of the sampling.
Unit = tuple[str, int, int, str]


@dataclass
class Journal:
    """The records of one folder.

    Attributes:
        settings: what all of them depend on; empty in a new folder.
        sets, methods: by name, and by key, as recorded.
        answers: of each unit its records: later ones of methods that were added later.
        skipped: units that had no room.
    """

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    sets: dict[str, dict[str, Any]] = field(default_factory=dict)
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)
    answers: dict[Unit, list[dict[str, Any]]] = field(default_factory=dict)
    skipped: dict[Unit, dict[str, Any]] = field(default_factory=dict)

    def done(self, unit: Unit) -> set[str]:
        """Keys of the methods that have answered."""
        return {key for record in self.answers.get(unit, ()) for key in record["methods"]}

    def text(self, unit: Unit) -> str | None:
        """What plain decoding answered; None where it has not."""
        found = self.answers.get(unit)
        return None if found is None else str(found[0]["plain"]["text"])

    def take(self, record: Mapping[str, Any]) -> None:
        """Add a record to what is known."""
        kind = record["kind"]
        values = {name: value for name, value in record.items() if name != "kind"}
        if kind == "settings":
            self.settings = values
        elif kind == "set":
            self.sets[record["name"]] = values
        elif kind == "method":
            self.methods[record["key"]] = values
        else:
            unit: Unit = record["set"], record["question"], record["turn"], record["sampling"]
            if kind == "skipped":
                self.skipped[unit] = values
            else:
                self.answers.setdefault(unit, []).append(values)

    def add(self, record: Mapping[str, Any]) -> None:
        """Write a record, so that nothing of it is lost from here on.

        Raises:
            OSError: the disk is full, say.
        """
        line = json.dumps(record, ensure_ascii=False, default=str) + "\n"
        with (self.folder / FILE).open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self.take(record)

    # --- what may be added to it -------------------------------------------------------------------------------------

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Say what all that follows depends on.

        Raises:
            ConfigError: there are results of other settings in this folder.
        """
        wanted = json.loads(json.dumps(dict(settings), default=str))
        if not self.settings:
            self.add({"kind": "settings", **wanted})
        elif settings_key(self.settings) != settings_key(wanted):
            name, held, asked = _first_difference(self.settings, wanted)
            raise ConfigError(
                f"{self.folder} holds results with {name} {shown(held)}, and this run has {shown(asked)}: choose "
                f"another --out (draftwing bench --report shows several folders, what differs in a table each)"
            )

    def admit(self, questions: QuestionSet) -> None:
        """Add a set.

        Raises:
            ConfigError: another one of this name is there.
        """
        held = self.sets.get(questions.name)
        if held is None:
            count = len(questions.questions)
            self.add(
                {
                    "kind": "set",
                    "name": questions.name,
                    "file": Path(questions.path).name,
                    "identity": questions.identity,
                    "num_questions": count,
                }
            )
        elif held["identity"] != questions.identity:
            raise ConfigError(
                f"{self.folder} holds results for other questions called {questions.name!r} than those of "
                f"{questions.path}: name this set otherwise (--set other={questions.path}), or choose another --out"
            )

    def enrol(self, method: Mapping[str, Any]) -> None:
        """Add a method, where it is not known."""
        if method["key"] not in self.methods:
            self.add({"kind": "method", **method})


def _first_difference(held: Mapping[str, Any], asked: Mapping[str, Any], of: str = "") -> tuple[str, Any, Any]:
    for name in [*held, *(each for each in asked if each not in held)]:
        one, other = held.get(name), asked.get(name)
        if one == other or (name == "target" and not of):
            continue
        if name == "target_identity" and held.get("target") != asked.get("target"):
            return "target", held.get("target"), asked.get("target")
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            return _first_difference(one, other, f"{name} ")
        return f"{of}{name}".replace("_", " "), one, other
    return "settings", "", ""


# --- files -----------------------------------------------------------------------------------------------------------


@contextmanager
def open_journal(folder: Path) -> Iterator[Journal]:
    """A folder's journal, to be added to by nobody else until the block ends. The folder is made where it is missing.

    Raises:
        ConfigError: another process writes there, or nobody can.
        CheckpointError: the records cannot be read.
    """
    with locked(folder, ConfigError):
        file = folder / FILE
        if file.exists():
            _cut(file)
            yield read_journal(folder)
        else:
            yield Journal(folder)


def _cut(file: Path) -> None:
    """Drop a last line that a kill left unfinished."""
    with file.open("rb+") as stream:
        content = stream.read()
        if content and not content.endswith(b"\n"):
            stream.truncate(content.rfind(b"\n") + 1)


def read_journal(folder: Path) -> Journal:
    """The records of a folder.

    Raises:
        CheckpointError: there are none, or they cannot be read.
    """
    file = folder / FILE
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise CheckpointError(
            f"{folder}: no results of draftwing bench in this folder ({error}): give one that it wrote with --out"
        ) from error
    journal = Journal(folder)
    for number, line in enumerate(lines[:-1], 1):  # behind the last newline: nothing, or an unfinished line
        try:
            record = parse_json(line)
            if record["kind"] not in _KINDS:
                raise ValueError(f"unknown kind {shown(record['kind'])}")
            journal.take(record)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{file}, line {number}: not a record of draftwing bench ({error}): restore the file, or delete "
                f"the line"
            ) from error
    if not journal.settings:
        raise CheckpointError(f"{file}: no settings in it: delete it, and run draftwing bench again")
    return journal


# The protocol: batch 1, every question of every set, turn after turn, plainly and with each method in alternation.
#
# A later turn follows plain decoding's answers, whoever is measured, so that all answer the same prompts: where a
# text is
# not plain decoding's, that is recorded with both texts.


_WARM_UP = 16  # tokens


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Attributes:
        plain: plain decoding, the baseline.
        methods: all on the same target.
        sets: the questions.
        samplings: each set is answered with each.
        limit: questions of each set; None takes all.
    """

    plain: LM
    methods: Sequence[Method]
    sets: Sequence[QuestionSet]
    samplings: Sequence[Sampling]
    limit: int | None = None

    def check(self) -> None:
        """Raise ConfigError where there is nothing to measure, or something twice."""
        if self.plain.drafter.drafts:
            raise ConfigError("bench needs plain decoding as its baseline: pass LM(target, tokenizer) as plain")
        for what, given in (("draft", self.methods), ("question set", self.sets), ("temperature", self.samplings)):
            if not given:
                raise ConfigError(f"bench needs at least one {what}: give one")
        keys = [each.describe()["key"] for each in self.methods]
        twice = next((each for each in self.methods if keys.count(each.describe()["key"]) > 1), None)
        if twice is not None:
            raise ConfigError(f"{twice.draft} with tree {twice.lm.describe_budget()} is asked for twice: leave one out")

    def units(self, questions: QuestionSet, sampling: Sampling) -> list[tuple[Question, list[Unit]]]:
        """The questions of a set, and the unit of each turn."""
        name = name_of_sampling(sampling)
        return [
            (each, [(questions.name, each.number, turn, name) for turn in range(1, len(each.turns) + 1)])
            for each in questions.chosen(self.limit)
        ]


def run(plan: Plan, journal: Journal, on_progress: Callable[[int, int], None] | None = None) -> None:
    """Measure what is not in the journal yet. Every answer is in it, on disk, as soon as it is finished.

    Args:
        on_progress: called with (done, total) answers of those that were missing.

    Raises:
        ConfigError: see ``Plan.check`` and ``Journal``.
    """
    plan.check()
    keys = [each.describe()["key"] for each in plan.methods]
    for questions in plan.sets:
        journal.admit(questions)
    for method in plan.methods:
        journal.enrol(method.describe())
    todo = {
        unit
        for questions in plan.sets
        for sampling in plan.samplings
        for _, units in plan.units(questions, sampling)
        for unit in units
        if unit not in journal.skipped and not journal.done(unit).issuperset(keys)
    }
    total = len(todo)
    for questions in plan.sets:
        for sampling in plan.samplings:
            session = _Session(plan, journal, sampling)
            for place, (question, units) in enumerate(plan.units(questions, sampling)):
                for unit in session.ask(question, units, place):
                    todo.discard(unit)
                    if on_progress is not None:
                        on_progress(total - len(todo), total)


class _Session:
    """One set under one sampling: methods that learn begin anew with it, and keep what they learn to its end."""

    def __init__(self, plan: Plan, journal: Journal, sampling: Sampling) -> None:
        self._plain, self._journal, self._sampling = plan.plain, journal, sampling
        fresh = [each.fresh() for each in plan.methods]
        self._lms = {each.describe()["key"]: each.lm for each in fresh}
        self._is_warm = False

    def ask(self, question: Question, units: Sequence[Unit], place: int) -> Iterator[Unit]:
        """All turns of one question, the ``place``-th of its set; yields each that it is through with."""
        answers: list[str] = []
        for unit in units:
            missing = [key for key in self._lms if key not in self._journal.done(unit)]
            if unit in self._journal.skipped:
                return
            if missing:
                prompt = self._encode(question, answers)
                room = self._plain.target.max_length - len(prompt)
                if room < self._sampling.max_tokens:
                    self._skip(question, units[unit[2] - 1 :], len(prompt))
                    yield from units[unit[2] - 1 :]
                    return
                self._answer(question, unit, prompt, missing, place)
            yield unit
            answers.append(self._journal.text(unit) or "")

    def _encode(self, question: Question, answers: Sequence[str]) -> list[int]:
        messages = question.messages(answers)
        if self._plain.tokenizer.has_chat_template:
            return self._plain.encode(messages)
        return self._plain.encode("\n\n".join(each["content"] for each in messages))

    def _skip(self, question: Question, units: Sequence[Unit], num_tokens: int) -> None:
        for name, number, turn, sampling in units:
            self._journal.add(
                {
                    "kind": "skipped",
                    "set": name,
                    "question": number,
                    "id": question.id,
                    "turn": turn,
                    "sampling": sampling,
                    "prompt_tokens": num_tokens,
                    "context": self._plain.target.max_length,
                }
            )

    def _answer(self, question: Question, unit: Unit, prompt: list[int], missing: Sequence[str], place: int) -> None:
        """Decode one prompt with everything that has not answered it, and record it."""
        lms = {"plain": self._plain, **{key: self._lms[key] for key in missing}}
        # A seed of the question's own, so that no two of them are sampled with the same noise.
        sampling = replace(self._sampling, seed=nth_seed(self._sampling.seed or 0, question.number))
        if not self._is_warm:
            for lm in lms.values():
                lm.generate([prompt], replace(sampling, max_tokens=min(_WARM_UP, sampling.max_tokens)))
                lm.forget()
            self._is_warm = True
        names = list(lms)
        first = (place + unit[2]) % len(names)  # taking turns at being first, whatever is resumed
        found = {name: _timed(lms[name], prompt, sampling) for name in [*names[first:], *names[:first]]}
        plain = found.pop("plain")
        self._journal.add(
            {
                "kind": "answer",
                "set": unit[0],
                "question": unit[1],
                "id": question.id,
                "categories": question.categories,
                "turn": unit[2],
                "sampling": unit[3],
                "prompt_tokens": len(prompt),
                "plain": {**_measured(*plain), "text": plain[0].text, "finish_reason": plain[0].finish_reason},
                "methods": {
                    key: {
                        **_measured(*found[key]),
                        **_compared(found[key][0], plain[0]),
                        "promise": promise_of(lms[key], sampling),
                    }
                    for key in missing
                },
            }
        )


def _timed(lm: LM, prompt: list[int], sampling: Sampling) -> tuple[Generation, float]:
    began = time.perf_counter()
    (done,) = lm.generate([prompt], sampling)
    return done, time.perf_counter() - began


def _measured(done: Generation, wall: float) -> dict[str, Any]:
    """Counts and times of one answer. ``wall`` is from the prompt's ids to the last token, prefill included."""
    stats = done.stats
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


def _compared(done: Generation, plain: Generation) -> Mapping[str, Any]:
    """Whether the text is plain decoding's; where it is not, from which token on, and what it is."""
    if done.token_ids == plain.token_ids:
        return {"identical": True}
    pairs = enumerate(zip(done.token_ids, plain.token_ids, strict=False))
    shorter = min(len(done.token_ids), len(plain.token_ids))
    return {
        "identical": False,
        "differs_at": next((place for place, (one, other) in pairs if one != other), shorter),
        "text": done.text,
    }
