"""A few prompts in a head's folder, held out of its training: what it is tried on by whoever gets it.

prompts.jsonl    a prompt a line: ``{"messages": [...]}`` up to a question, or ``{"text": ...}``, a document's beginning
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwing.errors import CheckpointError
from draftwing.heads.write import write_fix, write_text
from draftwing.text.prompts import Prompt, read_prompts

__all__ = ["MOST_BYTES", "copy_stored", "line_of", "read_stored", "write_stored"]

_FILE = "prompts.jsonl"
MOST_BYTES = 1024  # of one prompt: a head is a few megabytes, and what it carries along stays small beside that


def line_of(record: Mapping[str, Any]) -> str | None:
    """A record as a line of the file; None where it is too long for it."""
    line = json.dumps(record, ensure_ascii=False)
    return line if len(line.encode()) <= MOST_BYTES else None


def write_stored(folder: Path, lines: Sequence[str]) -> None:
    """Put prompts into a head's folder in place of those that lie there; none removes the file.

    Args:
        lines: of ``line_of``.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    file = Path(folder) / _FILE
    if lines:
        write_text(file, "".join(f"{line}\n" for line in lines))
        return
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be written ({error}): {write_fix(error)}") from error


def read_stored(folder: Path, limit: int | None = None) -> list[Prompt]:
    """The prompts in a head's folder; none where there is no such file.

    Raises:
        CheckpointError, PromptError: the file is there and cannot be read.
    """
    file = Path(folder) / _FILE
    return read_prompts(file, limit) if file.exists() else []


def copy_stored(source: Path, destination: Path) -> None:
    """The prompts of one head's folder into another's, which keeps none of its own.

    Raises:
        CheckpointError: the destination cannot be written.
    """
    found, file = Path(source) / _FILE, Path(destination) / _FILE
    try:
        if found.exists():
            shutil.copyfile(found, file)
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be written ({error}): {write_fix(error)}") from error
