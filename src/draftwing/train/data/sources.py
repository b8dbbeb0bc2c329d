"""Sources of training data: which files there are, and the documents and dialogues in them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from draftwing.errors import DataError, shown
from draftwing.text.records import FORMS, Message, is_record, parse_json, read_record

__all__ = ["Message", "Record", "SourceFile", "find_files", "read_records"]

_JSON_LINES = (".jsonl", ".ndjson")
# Installed packages and compiled files are not what a folder is named for.
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages"}
_HEAD_BYTES = 8192  # enough to tell text from anything else before a file of gigabytes is read


@dataclass(frozen=True)
class SourceFile:
    """A file with data.

    Attributes:
        name: for messages: as it was given, or relative to the folder that was.
        in_folder: found in a folder; then it may be skipped where it is no text.
    """

    path: Path
    name: str
    num_bytes: int
    in_folder: bool


@dataclass(frozen=True)
class Record:
    """One document or one dialogue.

    Attributes:
        where: file and line, for messages.
        text: of a document; None for a dialogue.
        messages: of a dialogue.
        num_bytes: its share of the file, for progress.
        ended: False for a document that was cut off (``finish_reason`` is ``length``): no end token closes it.
    """

    where: str
    text: str | None
    messages: tuple[Message, ...]
    num_bytes: int
    ended: bool = True


# --- files -----------------------------------------------------------------------------------------------------------


def find_files(
    sources: Sequence[str | Path], exclude: Path | None = None, *, output: Path | None = None
) -> list[SourceFile]:
    """Every file of the sources, folders in the order of their relative names.

    Hidden files and folders, ``__pycache__``, installed packages and ``output`` are left out of folders.

    Args:
        exclude: a file with one relative name per line to leave out of folders: a name, a folder with a slash at
            its end, or a pattern with ``*`` (which stands for slashes too). Empty lines and ``#`` lines say nothing.
        output: a file that is being written, and therefore no source.

    Raises:
        DataError: there is no source, one is missing, or one is an empty file or a folder without files.
    """
    if not sources:
        raise DataError("there is no source of data: give at least one file or folder")
    patterns = _read_patterns(exclude)
    found: list[SourceFile] = []
    for source in map(Path, sources):
        if source.is_dir():
            inside = [file for file in _walk(source, patterns) if not _same(file.path, output)]
            if not inside:
                raise DataError(f"{source}: this folder has no file to read: check the path and what is excluded")
            found += inside
        elif not source.exists():
            raise DataError(f"{source}: there is no such file or folder: check the path")
        elif source.stat().st_size == 0:
            raise DataError(f"{source}: this file is empty: give one with text or dialogues")
        elif _same(source, output):
            raise DataError(f"{source}: this file is both a source and the output: write to another file")
        else:
            found.append(SourceFile(source, str(source), source.stat().st_size, in_folder=False))
    return found


def _same(path: Path, other: Path | None) -> bool:
    return other is not None and path.resolve() == other.resolve()


def _read_patterns(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file}: the names to exclude cannot be read ({error}): give a UTF-8 file with one name per line"
        ) from error
    return [line for raw in lines if (line := raw.strip()) and not line.startswith("#")]


def _walk(folder: Path, patterns: list[str]) -> Iterator[SourceFile]:
    paths = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith(".")]
        paths += [Path(root, name) for name in files if not name.startswith(".")]
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in paths):
        size = path.stat().st_size if path.is_file() else 0
        if size and not any(_matches(name, pattern) for pattern in patterns):
            yield SourceFile(path, name, size, in_folder=True)


def _matches(name: str, pattern: str) -> bool:
    if pattern.endswith("/"):
        pattern += "*"
    return fnmatch(name, pattern) if "*" in pattern else name == pattern


# --- records ---------------------------------------------------------------------------------------------------------


def read_records(file: SourceFile) -> Iterator[Record]:
    """The documents and dialogues of a file.

    ``.jsonl`` has one object per line, ``.json`` a list of them; anything else is one document. Of the files of a
    folder, those that are not UTF-8 text are skipped, and a ``.json`` file that is no list of such objects is a
    document like any other.

    Raises:
        DataError: the file cannot be read, or a line or an object means nothing here.
    """
    suffix = file.path.suffix.lower()
    if suffix in _JSON_LINES:
        yield from _read_lines(file)
        return
    text = _read_text(file)
    if text is None:
        return
    if suffix == ".json":
        objects = _list_of_objects(file, text)
        if objects is not None:
            for number, entry in enumerate(objects, 1):
                yield _record(entry, f"{file.name}, entry {number}", file.num_bytes // len(objects))
            return
    yield Record(file.name, text, (), file.num_bytes)


def _read_text(file: SourceFile) -> str | None:
    """The text with plain newlines; None for a file of a folder that has none."""
    try:
        with file.path.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
            if b"\0" in head:  # valid UTF-8, but in no text
                raise ValueError("it has zero bytes")
            text = (head + stream.read()).decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{file.name}: this file cannot be read ({error}): check its permissions") from error
    except ValueError as error:
        if file.in_folder:
            return None
        raise DataError(
            f"{file.name}: expected UTF-8 text, found other bytes ({error}): convert it to UTF-8"
        ) from error
    return text.replace("\r\n", "\n")


def _read_lines(file: SourceFile) -> Iterator[Record]:
    with file.path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            where = f"{file.name}, line {number}"
            if not line.strip():
                continue
            try:
                entry = parse_json(line.decode("utf-8-sig"))
            except ValueError as error:
                raise DataError(
                    f"{where}: not JSON ({error}): each line must be one object; fix or delete the line"
                ) from error
            yield _record(entry, where, len(line))


def _list_of_objects(file: SourceFile, text: str) -> list[Any] | None:
    """What a ``.json`` file lists; None for a file of a folder that means something else (settings, say)."""
    try:
        found = parse_json(text)
    except ValueError as error:
        if file.in_folder:
            return None
        raise DataError(
            f"{file.name}: not JSON ({error}): expected a list of objects; name the file .jsonl if it has one per line"
        ) from error
    listed = isinstance(found, list) and bool(found) and isinstance(found[0], dict)
    if listed and (not file.in_folder or is_record(found[0])):
        return list(found)
    if file.in_folder:
        return None
    raise DataError(
        f"{file.name}: expected a list of objects with {FORMS}, found {shown(found)}: give such a list, "
        f"or a .jsonl file"
    )


def _record(entry: object, where: str, num_bytes: int) -> Record:
    found = read_record(entry, where, DataError)
    if found.text is not None:
        return Record(where, _encodable(found.text), (), num_bytes, found.ended)
    messages = ({key: _encodable(value) for key, value in message.items()} for message in found.messages)
    return Record(where, None, tuple(messages), num_bytes)


def _encodable(text: str) -> str:
    """Half of a surrogate pair ("\\ud83d" alone) is legal in JSON, but no text: one among millions is replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")
