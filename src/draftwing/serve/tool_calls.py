"""Parses tool calls from a model's output while it is generated.

Models write calls in a few forms: Hermes and Qwen ``<tool_call>{"name", "arguments"}</tool_call>``, Llama 3.1 a bare
``{"name", "parameters"}``, Mistral ``[TOOL_CALLS][{"name", "arguments"}]``. All forms are parsed for every model.
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
_BETWEEN_CALLS = _BLANK + ";,]"


@dataclass
class Call:
    """A call, complete or as far as it is generated; ``arguments`` are JSON."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Delta:
    """A change to a sequence's calls: a new call, or more arguments of the latest one."""

    index: int  # the call's index in its sequence
    call: Call | None = None  # the new call, with empty arguments; None for an earlier one
    arguments: str = ""  # the text to append to its arguments


class _NoCallError(Exception):
    pass


_Parser = Generator[None, str, str]  # receives characters; returns the one after what it has parsed


class ToolReader:
    """Splits a growing text into plain text and calls of the functions ``names``, of which ``max_calls`` are reported.

    A call is reported when its name and the beginning of its arguments are complete, and then as it grows. Text that
    may become a call is held back, and returned if it does not. Text after a call that is not a call is dropped.
    """

    def __init__(self, names: Sequence[str], max_calls: int | None = None) -> None:
        self._names, self._max_calls, self._num_calls = frozenset(names), max_calls, 0
        self.is_open = False
        self._deltas: list[Delta] = []
        self._parser: _Parser | None = None
        self._is_parsing = True  # a text may begin with a call that has no mark
        self._held = ""  # parsed since the latest call, or the possible beginning of a mark

    def push(self, text: str) -> tuple[str, list[Delta]]:
        """Add text. Return the plain text that is now certain, and the changes to the calls."""
        plain, rest = "", text
        if not self._is_parsing:
            self._held, rest = "", self._held + text
        while rest:
            more, rest = self._parse(rest) if self._is_parsing else self._find_mark(rest)
            plain += "" if self._num_calls else more
        deltas, self._deltas = self._deltas, []
        return plain, deltas

    def flush(self) -> str:
        """Return the plain text that was held back, at the end."""
        held, self._held = self._held, ""
        return "" if self._num_calls else held

    def _find_mark(self, text: str) -> tuple[str, str]:
        """Return the text before the first mark, and the rest."""
        places = [text.index(mark) for mark in _MARKS if mark in text]
        if places:
            self._is_parsing = True
            return text[: min(places)], text[min(places) :]
        held = max(length for mark in _MARKS for length in range(len(mark)) if text.endswith(mark[:length]))
        self._held = text[len(text) - held :]
        return text[: len(text) - held], ""

    def _parse(self, text: str) -> tuple[str, str]:
        """Parse calls. Where a character is not part of one, return the plain text up to there, and the rest."""
        for place, char in enumerate(text):
            if self._parser is None:
                self._parser = self._calls()
                next(self._parser)
            try:
                self._parser.send(char)
            except _NoCallError:
                self._parser, self.is_open, self._is_parsing = None, False, False
                held, self._held = self._held, ""
                # After the false beginning of a call, the character may begin a mark.
                return (held, text[place:]) if held else (char, text[place + 1 :])
            self._held += char
        return "", ""

    def _begin(self, name: str) -> None:
        self._num_calls, self.is_open = self._num_calls + 1, True
        if self._max_calls is None or self._num_calls <= self._max_calls:
            self._deltas.append(Delta(self._num_calls - 1, Call(f"call_{uuid.uuid4().hex[:24]}", name)))

    def _add_arguments(self, text: str) -> None:
        if self._max_calls is None or self._num_calls <= self._max_calls:
            if not self._deltas or self._deltas[-1].call is not None:
                self._deltas.append(Delta(self._num_calls - 1))
            self._deltas[-1].arguments += text

    # --- the grammar -------------------------------------------------------------------------------------------------

    def _calls(self) -> _Parser:
        char = yield
        while True:
            if char in _BETWEEN_CALLS:
                char = yield
            elif char == "{":
                char = yield from self._object()
            elif char in "<[":
                mark = char
                if mark == "[":  # a list, unless a mark follows
                    char = yield
                    mark += char
                    if char != "T":
                        continue
                while mark not in _ALL_MARKS:
                    mark += yield
                    if not any(each.startswith(mark) for each in _ALL_MARKS):
                        raise _NoCallError
                char = yield
            else:
                char = yield from self._named(char)

    def _named(self, name: str) -> _Parser:
        """``name{...}`` or ``name[ARGS]{...}``."""
        char = ""
        while any(each.startswith(name) for each in self._names):
            char = yield
            if char in _BLANK or char in "[{":
                break
            name += char
        if name not in self._names:
            raise _NoCallError
        char = yield from _skip_blanks(char)
        if char == "[":
            for expected in "ARGS]":
                if (yield) != expected:
                    raise _NoCallError
            char = yield from _skip_blanks((yield))
        if char != "{":
            raise _NoCallError
        self._begin(name)
        rest = yield from _value(char, self._add_arguments)
        self.is_open = False
        return rest or (yield)

    def _object(self) -> _Parser:
        """``{"name": ..., "arguments": ...}``, its keys in any order; other keys are skipped."""
        name, arguments, has_begun = None, None, False
        char = yield from _skip_blanks((yield))
        while char != "}":
            if char == ",":
                char = yield from _skip_blanks((yield))
                continue
            key = yield from _string(char)
            if (yield from _skip_blanks((yield))) != ":":
                raise _NoCallError
            char = yield from _skip_blanks((yield))
            rest = ""
            if key == "name":
                name = yield from _string(char)
                if name not in self._names:
                    raise _NoCallError
            elif key not in ("arguments", "parameters") or arguments is not None:
                rest = yield from _value(char, lambda _: None)
            elif char == '"':
                arguments = yield from _string(char)
            elif name is not None:
                arguments, has_begun = "", True
                self._begin(name)
                rest = yield from _value(char, self._add_arguments)
            else:
                raw: list[str] = []
                rest = yield from _value(char, raw.append)
                arguments = "".join(raw)
            char = yield from _skip_blanks(rest or (yield))
        if name is None:
            raise _NoCallError
        if not has_begun:
            self._begin(name)
            self._add_arguments("{}" if arguments is None else arguments)
        self.is_open = False
        return (yield)


def _skip_blanks(char: str) -> _Parser:
    while char in _BLANK:
        char = yield
    return char


def _string(char: str) -> _Parser:
    raw: list[str] = []
    if char != '"':
        raise _NoCallError
    yield from _value(char, raw.append)
    try:
        return str(json.loads("".join(raw), strict=False))
    except ValueError:
        raise _NoCallError from None


def _value(char: str, add: Callable[[str], None]) -> _Parser:
    """Pass a JSON value to ``add``. Return the character after it if only that shows the end, else an empty string."""
    add(char)
    depth, is_quoted, is_escaped = int(char in "{["), char == '"', False
    while depth or is_quoted:
        char = yield
        add(char)
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
        add(char)
    return ""
