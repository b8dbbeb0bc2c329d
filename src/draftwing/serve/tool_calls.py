"""A model's calls of tools, read out of what it writes while it writes them.

Models write calls in a few forms: Hermes and Qwen ``<tool_call>{"name", "arguments"}</tool_call>``, Llama 3.1 a bare
``{"name", "parameters"}``, Mistral ``[TOOL_CALLS][{"name", "arguments"}]``. Any of them is read, whoever wrote it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MARKS = (OPEN, "[TOOL_CALLS]", "<|python_tag|>")
_ALL_MARKS = (*_MARKS, CLOSE)
_BLANK = " \t\r\n"
_BETWEEN = _BLANK + ";,]"  # of calls


@dataclass
class Call:
    """A call that the model has written, or as much of it as there is; ``arguments`` are JSON."""

    id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True)
class Delta:
    """What comes to a text's calls: a new one, or more arguments of the latest one.

    Attributes:
        index: of the call in its text.
        call: the new one, its arguments still empty; None where it has begun before.
        arguments: the next ones of it.
    """

    index: int
    call: Call | None = None
    arguments: str = ""


class ToolReader:
    """Divides a text that grows into what is said and the calls in it.

    A call is told from where its name and the beginning of its arguments are known, and then as it grows. What may
    become one is held back until then, and said where it does not. What follows a call and is none is left out.

    Args:
        names: of the functions that may be called.
        most: calls that count; None for all.
    """

    def __init__(self, names: Sequence[str], most: int | None = None) -> None:
        self._names, self._scanner = frozenset(names), _Scanner(frozenset(names), most)
        self._is_scanning = True  # a text may begin with a call that has no mark
        self._held = ""  # what was scanned since the latest call, or may be the beginning of a mark

    @property
    def is_open(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._scanner.is_open

    def push(self, text: str) -> tuple[str, list[Delta]]:
        """Add the next text; what is certain to be said, and what comes to the calls."""
        said, rest = "", text
        if not self._is_scanning:
            self._held, rest = "", self._held + text
        while rest:
            more, rest = self._scan(rest) if self._is_scanning else self._say(rest)
            said += "" if self._scanner.num_begun else more
        return said, self._scanner.take()

    def flush(self) -> str:
        """At the end: what else is said."""
        held, self._held = self._held, ""
        return "" if self._scanner.num_begun else held

    def _say(self, text: str) -> tuple[str, str]:
        """Look for a mark: what is before it, and the rest."""
        places = [text.index(mark) for mark in _MARKS if mark in text]
        if places:
            self._is_scanning = True
            return text[: min(places)], text[min(places) :]
        certain = len(text) - max(_open_end(text, mark) for mark in _MARKS)
        self._held = text[certain:]
        return text[:certain], ""

    def _scan(self, text: str) -> tuple[str, str]:
        """Look for calls: once it is clear that there is none, what is said then, and the rest."""
        for place, char in enumerate(text):
            if not self._scanner.push(char):
                self._is_scanning = False
                held, self._held = self._held, ""
                # Behind something that began like a call the character may begin something else.
                return (held, text[place:]) if held else (char, text[place + 1 :])
            self._held += char
        return "", ""


class _NoCallError(Exception):
    pass


_Reading = Generator[None, str, str]  # takes characters; gives the one behind what it has read


class _Scanner:
    """Reads calls, character by character.

    Attributes:
        num_begun: calls that have begun.
        is_open: whether the latest one has not ended.
    """

    def __init__(self, names: frozenset[str], most: int | None) -> None:
        self._names, self._most = names, most
        self.num_begun, self.is_open = 0, False
        self._deltas: list[Delta] = []
        self._more: list[str] = []
        self._reading: _Reading | None = None

    def push(self, char: str) -> bool:
        """The next character; False where it is not of a call, nor between calls: then it starts anew."""
        if self._reading is None:
            self._reading = self._calls()
            next(self._reading)
        try:
            self._reading.send(char)
        except _NoCallError:
            self._reading, self.is_open = None, False
            return False
        return True

    def take(self) -> list[Delta]:
        """What has come since the last time."""
        self._put_more()
        found, self._deltas = self._deltas, []
        return found

    def _begin(self, name: str) -> None:
        self._put_more()
        self.num_begun, self.is_open = self.num_begun + 1, True
        if self._counts:
            self._deltas.append(Delta(self.num_begun - 1, Call(f"call_{uuid.uuid4().hex[:24]}", name)))

    def _put_more(self) -> None:
        """Tell of arguments that have come, all at once."""
        if self._more and self._counts:
            self._deltas.append(Delta(self.num_begun - 1, None, "".join(self._more)))
        self._more.clear()

    @property
    def _counts(self) -> bool:
        return self._most is None or self.num_begun <= self._most

    # --- what calls consist of; each takes characters one by one ---------------------------------------------------

    def _calls(self) -> _Reading:
        """Calls, one after the other."""
        char = yield
        while True:
            if char in _BETWEEN:
                char = yield
            elif char == "{":
                char = yield from self._object()
            elif char in "<[":
                char = yield from self._mark(char)
            else:
                char = yield from self._named(char)

    def _mark(self, read: str) -> _Reading:
        if read == "[":
            char = yield
            if char != "T":
                return char
            read += char
        while read not in _ALL_MARKS:
            read += yield
            if not any(mark.startswith(read) for mark in _ALL_MARKS):
                raise _NoCallError
        return (yield)

    def _named(self, name: str) -> _Reading:
        """``name{...}`` or ``name[ARGS]{...}``."""
        char = ""
        while any(known.startswith(name) for known in self._names):
            char = yield
            if char in _BLANK or char in "[{":
                break
            name += char
        if name not in self._names:
            raise _NoCallError
        char = yield from _skip(char)
        if char == "[":
            for expected in "ARGS]":
                if (yield) != expected:
                    raise _NoCallError
            char = yield from _skip((yield))
        if char != "{":
            raise _NoCallError
        self._begin(name)
        rest = yield from _value(char, self._more.append)
        self.is_open = False
        return rest or (yield)

    def _object(self) -> _Reading:
        """``{"name": ..., "arguments": ...}``, its keys in any order; others are passed over."""
        name, given, is_told = None, None, False
        char = yield from _skip((yield))
        while char != "}":
            if char == ",":
                char = yield from _skip((yield))
                continue
            key = yield from _string(char)
            if (yield from _skip((yield))) != ":":
                raise _NoCallError
            char = yield from _skip((yield))
            rest = ""
            if key == "name":
                name = yield from _string(char)
                if name not in self._names:
                    raise _NoCallError
            elif key not in ("arguments", "parameters") or given is not None:
                rest = yield from _value(char, _pass_over)
            elif char == '"':
                given = yield from _string(char)
            elif name is not None:
                given, is_told = "", True
                self._begin(name)
                rest = yield from _value(char, self._more.append)
            else:
                raw: list[str] = []
                rest = yield from _value(char, raw.append)
                given = "".join(raw)
            char = yield from _skip(rest or (yield))
        if name is None:
            raise _NoCallError
        if not is_told:
            self._begin(name)
            self._more.append("{}" if given is None else given)
        self.is_open = False
        return (yield)


def _pass_over(_: str) -> None:
    pass


def _skip(char: str) -> _Reading:
    """Blanks; the first character that is none."""
    while char in _BLANK:
        char = yield
    return char


def _string(char: str) -> _Reading:
    raw: list[str] = []
    if char != '"':
        raise _NoCallError
    yield from _value(char, raw.append)
    try:
        return str(json.loads("".join(raw), strict=False))
    except ValueError:
        raise _NoCallError from None


def _value(char: str, tell: Callable[[str], None]) -> _Reading:
    """A JSON value, each character of which is told; the one behind it, where only that shows its end, else nothing."""
    tell(char)
    depth, is_quoted, is_escaped = int(char in "{["), char == '"', False
    while depth or is_quoted:
        char = yield
        tell(char)
        if is_quoted:
            is_quoted, is_escaped = is_escaped or char != '"', char == "\\" and not is_escaped
        elif char == '"':
            is_quoted = True
        else:
            depth += (char in "{[") - (char in "}]")
    while char not in '}]"':
        char = yield
        if char in _BLANK or char in ",}]":
            return char
        tell(char)
    return ""


def _open_end(text: str, mark: str) -> int:
    """The length of the longest end of ``text`` that is a beginning of ``mark``."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)
