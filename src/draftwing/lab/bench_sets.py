"""Question sets: files of the field, read into questions with turns and categories."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from draftwing.errors import CheckpointError, ConfigError, PromptError, shown
from draftwing.text.prompts import check_text, read_entries, read_record

# Spec-Bench asks MT-bench's questions among others, and reports them as one task.
_MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
_TOGETHER = "mt_bench"
# What EAGLE's and Spec-Bench's repositories call every question file: the folder says which it is.
_QUESTIONS = "question.jsonl"


@dataclass(frozen=True)
class Question:
    """One question of a set.

    Attributes:
        number: its place in the file, from 0.
        id: what the file calls it; its line where it says nothing.
        categories: those it counts under: its own, and the task that this is part of.
        turns: what is asked, one after the other.
        system: the system message, where the file has one.
        is_bare: a text to go on from, where the model has no chat template.
    """

    number: int
    id: str
    categories: tuple[str, ...]
    turns: tuple[str, ...]
    system: str | None = None
    is_bare: bool = False

    def messages(self, answers: Sequence[str]) -> list[dict[str, str]]:
        """The dialogue up to the question that follows ``answers``."""
        found = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in zip(self.turns, answers, strict=False):
            found += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*found, {"role": "user", "content": self.turns[len(answers)]}]


@dataclass(frozen=True)
class QuestionSet:
    """The questions of one file."""

    name: str
    path: str
    questions: tuple[Question, ...]

    @property
    def identity(self) -> str:
        """16 hexadecimal digits that stand for every question in it."""
        asked = [[each.id, each.categories, each.turns, each.system] for each in self.questions]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]

    def chosen(self, limit: int | None) -> list[Question]:
        """``limit`` questions, evenly spread over the categories: the first of each, then the second of each, ...

        Those of a smaller limit are among those of a larger one.
        """
        tasks = _grouped(self.questions, lambda each: each.categories[-1])
        spread = [_in_turn(_grouped(task, lambda each: each.categories[0])) for task in tasks]
        return _in_turn(spread)[:limit]


def _grouped(questions: Iterable[Question], of: Any) -> list[list[Question]]:
    found: dict[str, list[Question]] = {}
    for each in questions:
        found.setdefault(of(each), []).append(each)
    return list(found.values())


def _in_turn(groups: Sequence[Sequence[Question]]) -> list[Question]:
    return [each for row in zip_longest(*groups) for each in row if each is not None]


# --- files -----------------------------------------------------------------------------------------------------------


def find_files(given: Sequence[str]) -> dict[str, Path]:
    """Question files by the name of their set.

    Args:
        given: ``NAME=FILE``; a file, which gives its own name; or a folder, which stands for all question files in it:
            its ``question.jsonl``, else its ``.jsonl`` and ``.json`` files and each ``question.jsonl`` one folder down.

    Raises:
        CheckpointError: there is no such file, or no question file in a folder.
        ConfigError: two sets of one name.
    """
    found: dict[str, Path] = {}
    for each in given:
        name, path = _split(each)
        files = _in_folder(path) if path.is_dir() else [path]
        if name and len(files) > 1:
            raise ConfigError(
                f"--set {shown(each)}: there are {len(files)} question files in this folder: name one of them, or "
                f"leave {name}= out"
            )
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"--set {each}: there is no such file: give a file of questions, or a folder")
            called = name or _name_of(file)
            if called in found:
                raise ConfigError(
                    f"--set: both {found[called]} and {file} would be called {called!r}: name one of them, such as "
                    f"other={file}"
                )
            found[called] = file
    if not found:
        raise ConfigError("bench needs questions: give --set FILE, such as --set mt_bench.jsonl")
    return found


def _split(given: str) -> tuple[str, Path]:
    name, equals, path = given.partition("=")
    if not equals or Path(given).exists():  # a file may have = in its name
        return "", Path(given)
    if not name.strip() or not path:
        raise ConfigError(f"--set must be NAME=FILE, FILE or a folder, found {shown(given)}")
    return name.strip(), Path(path)


def _in_folder(folder: Path) -> list[Path]:
    if (folder / _QUESTIONS).is_file():
        return [folder / _QUESTIONS]
    files = sorted(each for each in folder.iterdir() if each.suffix in (".jsonl", ".json") and each.is_file())
    files += sorted(each / _QUESTIONS for each in folder.iterdir() if (each / _QUESTIONS).is_file())
    if not files:
        raise CheckpointError(f"--set {folder}: no .jsonl file in this folder: give a file of questions")
    return files


def _name_of(file: Path) -> str:
    return file.absolute().parent.name if file.name == _QUESTIONS else file.stem


def read_set(name: str, path: Path) -> QuestionSet:
    """The questions of a file, in any form of ``text.prompts.read_record``.

    Answers in the file are left out: the model gives its own.

    Raises:
        CheckpointError: the file cannot be read.
        PromptError: an entry that asks nothing, named by its line.
    """
    found = [_question(number, entry, where) for number, (where, entry) in enumerate(read_entries(path))]
    own = {each.categories[0] for each in found}
    if own > _MT_BENCH:
        found = [_with_task(each) for each in found]
    return QuestionSet(name, str(path), tuple(found))


def _with_task(question: Question) -> Question:
    if question.categories[0] not in _MT_BENCH:
        return question
    return replace(question, categories=(*question.categories, _TOGETHER))


def _question(number: int, entry: Any, where: str) -> Question:
    if isinstance(entry, dict) and isinstance(entry.get("article"), str):  # CNN/DM as it is published
        entry = {**entry, "question": f"Summarize: {entry['article']}"}
    record = read_record(entry, where, PromptError)
    if record.text is not None:
        turns, system = [record.text], None
    else:
        turns = [each["content"] for each in record.messages if each["role"] == "user"]
        system = "\n\n".join(each["content"] for each in record.messages if each["role"] == "system") or None
    if not turns or not all(turn.strip() for turn in turns):
        raise PromptError(f"{where}: there is no question in it, or an empty one: give it a text, or delete the entry")
    called = next((entry[key] for key in ("question_id", "task_id", "id") if key in entry), number + 1)
    category = entry.get("category")
    return Question(
        number=number,
        id=str(called),
        categories=(category if isinstance(category, str) and category else "all",),
        turns=tuple(map(check_text, turns)),
        system=system,
        is_bare=record.bare or record.text is not None,
    )
