"""What is measured, on disk at once: one line of JSON for each finished answer, and before it what it depends on.

Kinds of lines: ``settings`` (once), ``set`` and ``method`` (once each), ``answer`` (one turn of a question, decoded
plainly and by one or more methods), ``skipped`` (a turn that has no room).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftwing.errors import CheckpointError, ConfigError, shown
from draftwing.evaluate.bench.sets import QuestionSet
from draftwing.evaluate.bench.settings import settings_key
from draftwing.text.records import parse_json
from draftwing.train.lock import locked

__all__ = ["FILE", "Journal", "Unit", "open_journal", "read_journal"]

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
