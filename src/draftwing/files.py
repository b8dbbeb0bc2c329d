"""Files that a user names: whatever is damaged in one, reading it ends with an OSError or a ValueError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def exists(path: str | Path) -> bool:
    """Return True if there is such a file or folder; False also for names that the system cannot have."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, an unknown user's home, a null character
        return False


def check_regular(path: Path) -> None:
    """Raise OSError for a pipe, a socket or a device, since reading it may block forever."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path.name} is not a regular file")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is not JSON, or nested too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def read_json(path: Path) -> Any:
    """Return the value of a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON in UTF-8, or nested too deep.
    """
    check_regular(path)
    return parse_json(path.read_text(encoding="utf-8"))
