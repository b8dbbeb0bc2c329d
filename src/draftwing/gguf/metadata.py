"""What a GGUF file says of itself: its key-value pairs, looked up by type.

Every failure names the file, the key and the value.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftwing.errors import ConfigError, UnsupportedError, shown

__all__ = ["Metadata", "Texts", "as_written"]

_ADVICE = "Download the file again, or convert the model again."


@dataclass(frozen=True)
class Texts:
    """An array of strings as it lies in the file: ``count`` of them from byte ``start``, checked, not yet decoded."""

    data: Any
    start: int
    count: int

    def __iter__(self) -> Iterator[bytes]:
        at = self.start
        for _ in range(self.count):
            (length,) = struct.unpack_from("<Q", self.data, at)
            yield self.data[at + 8 : at + 8 + length]
            at += 8 + length

    def __repr__(self) -> str:
        return f"an array of {self.count} strings"


def as_written(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, where widening it gives 9.999999747378752e-06."""
    return float(str(np.float32(value)))


class Metadata:
    """A file's key-value pairs.

    Values are ints, floats (see ``as_written``), bools, ``bytes`` (a string), numpy arrays (numbers) or ``Texts``.
    """

    def __init__(self, pairs: dict[str, Any], where: str) -> None:
        self.pairs, self.where = pairs, where

    def __contains__(self, key: str) -> bool:
        return key in self.pairs

    def wrong(self, key: str, expected: str) -> ConfigError:
        """The error to raise where ``key`` is not what was expected."""
        return ConfigError(
            f"{self.where}: metadata `{key}` must be {expected}, found {shown(self.pairs[key])}. {_ADVICE}"
        )

    def _missing(self, key: str) -> ConfigError:
        return ConfigError(f"{self.where}: required metadata `{key}` is missing. {_ADVICE}")

    def integer(self, key: str, default: int | None = None, *, minimum: int = 0, maximum: int = 2**31 - 1) -> int:
        """A whole number in a range; of an array with a number for each layer, the one that all layers share.

        Raises:
            ConfigError: it is missing and has no default, or is not such a number.
            UnsupportedError: layers differ.
        """
        value = self.pairs.get(key, default)
        if value is None:
            raise self._missing(key)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
            if (value != value[0]).any():
                raise UnsupportedError(
                    f"{self.where}: `{key}` differs between layers, which the lean decoder lacks. Use a model whose "
                    "layers are alike."
                )
            value = int(value[0])
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.wrong(key, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number.

        Raises:
            ConfigError: it is missing and has no default, or is not such a number.
        """
        value = self.pairs.get(key, default)
        if value is None:
            raise self._missing(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.wrong(key, "a finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false.

        Raises:
            ConfigError: it is neither.
        """
        value = self.pairs.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string.

        Raises:
            ConfigError: it is missing and has no default, or is no UTF-8 string.
        """
        value = self.pairs.get(key)
        if value is None:
            if default is None:
                raise self._missing(key)
            return default
        try:
            return bytes(value).decode() if isinstance(value, bytes) else _refuse_text()
        except ValueError:
            raise self.wrong(key, "a UTF-8 string") from None

    def texts(self, key: str, *, longest: int = 1 << 16) -> list[str]:
        """An array of strings, each of at most ``longest`` bytes.

        Raises:
            ConfigError: it is missing, or is no such array.
        """
        value = self.pairs.get(key)
        if value is None:
            raise self._missing(key)
        if not isinstance(value, Texts):
            raise self.wrong(key, "an array of strings")
        found = []
        for index, raw in enumerate(value):
            if len(raw) > longest:
                raise ConfigError(
                    f"{self.where}: string {index} of `{key}` must have at most {longest} bytes, found {len(raw)}. "
                    f"{_ADVICE}"
                )
            try:
                found.append(raw.decode())
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{self.where}: string {index} of `{key}` must be UTF-8, found {shown(raw)} ({error.reason}). "
                    f"{_ADVICE}"
                ) from None
        return found

    def numbers(self, key: str, kinds: str, length: int) -> list[Any] | None:
        """An array of ``length`` numbers whose numpy kind is one of ``kinds``; None where it is missing.

        Raises:
            ConfigError: it is no such array.
        """
        value = self.pairs.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or value.size != length:
            found = f"{value.size} of type {value.dtype}" if isinstance(value, np.ndarray) else shown(value)
            raise ConfigError(
                f"{self.where}: metadata `{key}` must be an array of {length} numbers, found {found}. {_ADVICE}"
            )
        found_list: list[Any] = value.tolist()
        return found_list


def _refuse_text() -> str:
    raise ValueError
