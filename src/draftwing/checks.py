"""Types and ranges of the arguments of public functions, checked once, before any work is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from itertools import islice
from types import NoneType
from typing import Any, NamedTuple

from draftwing.errors import ConfigError, DraftwingError, shown

MAX_BATCH = 65_536  # requests in a batch or of a call: more would only use up memory
AT_MOST_BATCH = f"give a whole number of at most {MAX_BATCH:,}"
MAX_TOKENS = 1 << 22  # in a prompt: more than any context holds


class Argument(NamedTuple):
    """The values that an argument may have.

    Attributes:
        kinds: their classes. A bool is an int only if ``bool`` is among them.
        expected: describes them, for the message.
        hint: the fix, for the end of the message.
        least, most: the range of numbers; NaN is outside.
    """

    kinds: tuple[type, ...]
    expected: str
    hint: str = ""
    least: float | None = None
    most: float | None = None

    def takes(self, value: object) -> bool:
        """Return True if the argument may have this value."""
        if not isinstance(value, self.kinds) or (isinstance(value, bool) and bool not in self.kinds):
            return False
        if value is None or self.least is None:
            return True
        return bool(self.least <= value and (self.most is None or value <= self.most))  # type: ignore[operator]


BATCH_SIZE = Argument((int, NoneType), "at least 1", AT_MOST_BATCH, 1, MAX_BATCH)


def check_arguments(
    table: Mapping[str, Argument], values: Mapping[str, Any], error: type[DraftwingError] = ConfigError
) -> None:
    """Raise ``error`` for the first argument in ``table`` that has a value which it may not have."""
    for name, argument in table.items():
        if name in values and not argument.takes(values[name]):
            hint = f": {argument.hint}" if argument.hint else ""
            raise error(f"{name} must be {argument.expected}, found {shown(values[name])}{hint}")


def listed(values: object, limit: int) -> list[Any] | None:
    """Return the items of an iterable; None if it is not iterable, fails, or has more than ``limit`` items."""
    if not isinstance(values, Iterable):
        return None
    try:
        if isinstance(values, Sized) and len(values) > limit:
            return None
        items = list(islice(values, limit + 1))
    except Exception:  # raised by the caller's own class
        return None
    return items if len(items) <= limit else None


def pairs(values: object, limit: int) -> list[tuple[Any, Any]] | None:
    """Return the keys and values of a mapping; None if it is none, fails, or has more than ``limit`` items."""
    if not isinstance(values, Mapping):
        return None
    try:
        return listed(values.items(), limit)
    except Exception:  # raised by the caller's own class
        return None
