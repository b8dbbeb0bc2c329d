"""Read the field's question files into sets of questions with turns and categories."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from draftwing.errors import CheckpointError, ConfigError, PromptError, shown
from draftwing.remote import Phase, download, is_url, local_copy
from draftwing.text.prompts import check_text, read_entries, read_record

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
