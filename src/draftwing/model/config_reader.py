"""``config.json`` from disk, and typed look-ups in it.

Every failure names the file, the key and the value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from draftwing.errors import CheckpointError, ConfigError

__all__ = ["ConfigReader", "read_config"]

_REQUIRED: Final = object()


def read_config(folder: Path) -> dict[str, Any]:
    """The dict in a model folder's ``config.json``.

    Raises:
        CheckpointError: no such folder, or no readable ``config.json`` in it.
        ConfigError: it is not a JSON object.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a model folder, found none. Check the path.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: expected config.json in the model folder, found none. Point to a folder that "
            "save_pretrained wrote, or download the model again."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). Check the file and its permissions.") from error
    except ValueError as error:  # broken JSON, or not UTF-8
        raise ConfigError(f"{path}: expected JSON, found something else ({error}). Download it again.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {_kind(config)}. Download it again.")
    return config


def _kind(value: object) -> str:
    shown = "of hundreds of digits" if isinstance(value, int) and abs(value) > 10**300 else repr(value)
    return f"{type(value).__name__} {shown}"[:80]


class ConfigReader:
    """Typed look-ups in a config; every failure is a ConfigError that names the key and the value."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def wrong(self, key: str, expected: str) -> ConfigError:
        """The error to raise where ``key`` is not what was expected."""
        return ConfigError(
            f"{self.where}: `{key}` must be {expected}, found {_kind(self.config.get(key))}. "
            "Correct the value, or download the model's config.json again."
        )

    def _get(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is None:
            value = default
        if value is _REQUIRED:
            raise ConfigError(
                f"{self.where}: required key `{key}` is missing. Add it, or download the model's config.json again."
            )
        return value

    def integer(self, key: str, default: Any = _REQUIRED, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        """A whole number in a range."""
        value = self._get(key, default)
        # JSON's true is Python's int 1; it is not a size.
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.wrong(key, f"an integer of at least {minimum}")
        if value > maximum:
            raise self.wrong(key, f"an integer of at most {maximum}")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A finite number of at least 0."""
        value = self._get(key, default)
        # The bound also keeps out NaN, infinity and integers that no float can hold.
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e300:
            raise self.wrong(key, "a finite number of at least 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        """A list of ``kind``; empty where the key is missing."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self.wrong(key, f"a list of {kind.__name__}")
        return value

    def ids(self, key: str, default: int | None, several: bool = False) -> tuple[int, ...]:
        """Token ids; null and, as some configs on the Hub have it, a negative id mean none."""
        value = self.config.get(key, default)
        ids = value if several and isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise self.wrong(key, "a token id, a list of them or null" if several else "a token id or null")
        return tuple(item for item in ids if item >= 0)
