"""A file of JSON records, one on each line, that a run appends to and a later run resumes from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from draftwing.errors import CheckpointError
from draftwing.files import parse_json
from draftwing.storage import write_fix


class RecordFile:
    """The whole lines of a file. An unfinished last line, which a kill leaves, is ignored, then overwritten.

    Args:
        file: need not exist.
        command: the command that writes it, for error messages.

    Raises:
        CheckpointError: the file cannot be read.
    """

    def __init__(self, file: Path, command: str) -> None:
        self._file, self._command = file, command
        try:
            content = file.read_bytes() if file.exists() else b""
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read ({error}): choose another --out") from error
        *self._lines, unfinished = content.split(b"\n")
        self._num_bytes = len(content) - len(unfinished)

    def load(self, take: Callable[[Any], None], lines: slice = slice(None)) -> None:
        """Call ``take`` with every record, or with those of some lines.

        Raises:
            CheckpointError: a line is not JSON, or ``take`` raises KeyError, TypeError or ValueError.
        """
        for number, line in list(enumerate(self._lines, 1))[lines]:
            try:
                take(parse_json(line))
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{self._file}, line {number}: not a record of draftwing {self._command} ({error!r}): delete the "
                    f"line, or delete the file to start again"
                ) from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record and sync it to disk.

        Raises:
            CheckpointError: for example if the disk is full.
        """
        line = json.dumps(record, ensure_ascii=False, default=str).encode() + b"\n"
        try:
            with self._file.open("ab") as file:
                file.truncate(self._num_bytes)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"{self._file}: cannot be written to ({error}): {write_fix(error)}; earlier records are kept"
            ) from error
        self._num_bytes += len(line)
