"""Tools: how a model is told of them, and how its calls are read out of what it writes.

Models write calls in a few forms: Hermes and Qwen ``<tool_call>{"name", "arguments"}</tool_call>``, Llama 3.1 a bare
``{"name", "parameters"}``, Mistral ``[TOOL_CALLS][{"name", "arguments"}]``. Any of them is read, whoever wrote it.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftwing.serve.fields import ChatBody
from draftwing.serve.refusal import Refusal
from draftwing.text.tokenizer import Tokenizer

__all__ = ["Call", "ToolReader", "calling_messages", "forced_schema"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARKS = (_OPEN, "[TOOL_CALLS]", "<|python_tag|>")
_BETWEEN = " \t\r\n;,"  # of calls
_NAMED = re.compile(r"([a-zA-Z0-9_.-]{1,128})\s*(?:\[ARGS\])?\s*(?=\{)")
_TOLD = """# Tools

You may call these functions:
<tools>
{tools}
</tools>

To call one, answer with a JSON object inside of <tool_call></tool_call> and nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{"its": "arguments"}}}}
</tool_call>"""


@dataclass(frozen=True)
class Call:
    """A call that the model has written; ``arguments`` are JSON."""

    id: str
    name: str
    arguments: str


# --- telling the model -----------------------------------------------------------------------------------------------


def forced_schema(body: ChatBody, tools: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The JSON schema of the call that has to be the answer; None where the model may choose.

    Raises:
        Refusal: a choice among tools that are not there.
    """
    choice = body.tool_choice
    if choice is None or choice in ("none", "auto"):
        return None
    name = None if isinstance(choice, str) else choice.function.name
    wanted = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if not wanted:
        raise Refusal(400, "tool_choice names a function that is not in tools: add it there", "tool_choice")
    kinds = [
        {
            "type": "object",
            "properties": {"name": {"const": each["name"]}, "arguments": each.get("parameters") or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for each in wanted
    ]
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def calling_messages(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], tokenizer: Tokenizer
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and variables for a chat template.

    Where the template has no place for tools, the model is told of them in a system message, and calls and results
    in former messages are written into their text.
    """
    if tokenizer.template_reads("tools"):
        return list(messages), {"tools": list(tools)}
    told = _TOLD.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    plain = [_as_text(message) for message in messages]
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]], {}
    return [{"role": "system", "content": told}, *plain], {}


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        f"{_OPEN}\n{json.dumps({name: call['function'].get(name) for name in ('name', 'arguments')})}\n{_CLOSE}"
        for call in message.get("tool_calls", ())
    ]
    return {"role": message["role"], "content": "\n".join([message["content"], *calls]).strip("\n")}


# --- reading what it wrote -------------------------------------------------------------------------------------------


class ToolReader:
    """Divides a text that grows into what is said and the calls in it.

    From where calls may begin, the text is held back to its end: then it is known whether they are calls.

    Args:
        names: of the functions that may be called.
        most: calls that count; None for all.
    """

    def __init__(self, names: Sequence[str], most: int | None = None) -> None:
        self._names, self._most = frozenset(names), most
        self._held, self._has_begun, self._in_calls = "", False, False

    def push(self, text: str) -> str:
        """Add the next text; what of it is certain to be said."""
        self._held += text
        if self._in_calls:
            return ""
        if not self._has_begun:
            front = self._held.lstrip()
            if not front or any(name.startswith(front) for name in self._names):
                return ""
            self._in_calls = front[0] in "{[" or self._is_named(front)  # a bare call, if it is one
            self._has_begun = True
            if self._in_calls:
                return ""
        places = [self._held.index(mark) for mark in _MARKS if mark in self._held]
        if places:
            self._in_calls, certain = True, min(places)
        else:
            certain = len(self._held) - max(_open_end(self._held, mark) for mark in _MARKS)
        said, self._held = self._held[:certain], self._held[certain:]
        return said

    def flush(self) -> tuple[str, list[Call]]:
        """At the end: what else is said, and the calls."""
        held, self._held = self._held, ""
        calls = self._calls(held)[: self._most] if self._in_calls else []
        return ("" if calls else held), calls

    def _is_named(self, front: str) -> bool:
        match = _NAMED.match(front)
        return match is not None and match[1] in self._names

    def _calls(self, text: str) -> list[Call]:
        """The calls that a text consists of; none where a part of it is something else."""
        rest, calls = text, list[Call]()
        for mark in (*_MARKS, _CLOSE):
            rest = rest.replace(mark, "\n")
        while rest := rest.strip(_BETWEEN):
            match = _NAMED.match(rest)
            try:
                value, end = json.JSONDecoder().raw_decode(rest, match.end() if match else 0)
            except (ValueError, RecursionError):
                return calls
            found = self._calls_of({"name": match[1], "arguments": value} if match else value)
            if not found:
                return calls
            calls += found
            rest = rest[end:]
        return calls

    def _calls_of(self, value: Any) -> list[Call]:
        """The calls that a JSON value is."""
        calls = []
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, dict) or each.get("name") not in self._names:
                return []
            given = each.get("arguments", each.get("parameters", {}))
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            calls.append(Call(f"call_{uuid.uuid4().hex[:24]}", each["name"], text))
        return calls


def _open_end(text: str, mark: str) -> int:
    """The length of the longest end of ``text`` that is a beginning of ``mark``."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)
