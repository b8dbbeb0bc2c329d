"""One record of a file, in every form that the field writes prompts, dialogues and documents in.

Prompt files and training data are read by the same ``read_record``, so that what one of them takes the other takes too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftwing.errors import DraftwingError, shown

__all__ = ["FORMS", "Message", "Text", "is_record", "parse_json", "read_record"]

# role (system, user, assistant or tool) and content; finish_reason "length" where an answer was cut off
Message = dict[str, str]

_ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_DIALOGUES = ("conversations", "messages")
# What asks, what may add to the question, and what answers it: the first of these keys that a record has.
_ASKED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "prompt": ((), ("response", "completion")),
    "question": ((), ("answer", "response")),
    "instruction": (("input", "context"), ("output", "response")),
}
FORMS = (
    "'conversations', 'messages', 'turns', 'prompt' (with 'response' or 'completion'), 'question' (with 'answer'), "
    "'instruction' (with 'input' and 'output') or 'text'"
)


@dataclass(frozen=True)
class Text:
    """What a record says.

    Attributes:
        text: of a document; None for a dialogue.
        messages: of a dialogue.
        bare: the dialogue is one text under ``prompt``: a model without a chat template goes on from it as it stands.
        ended: False for a document that was cut off (``finish_reason`` is ``length``): no end token closes it.
    """

    text: str | None = None
    messages: tuple[Message, ...] = ()
    bare: bool = False
    ended: bool = True


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, or lists are nested too deep in it.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def is_record(entry: object) -> bool:
    """Whether an entry has a key that ``read_record`` knows."""
    return isinstance(entry, Mapping) and not {*_DIALOGUES, "turns", *_ASKED, "text"}.isdisjoint(entry)


def read_record(entry: object, where: str, problem: type[DraftwingError]) -> Text:
    """What an entry of a JSON file says.

    Args:
        entry: ``conversations`` (``from``, ``value``) or ``messages`` (``role``, ``content``), ``turns`` (questions, or
            messages), ``prompt`` with ``response`` or ``completion``, ``question`` with ``answer``, ``instruction``
            with ``input`` and ``output``, or ``text``. Answers may be missing.
        where: file and line, for messages.
        problem: the error to raise.

    Raises:
        DraftwingError: of the class ``problem``: the entry is none of these.
    """
    if not isinstance(entry, dict):
        raise problem(f"{where}: expected an object with {FORMS}, found {shown(entry)}: fix or delete it")
    for key in _DIALOGUES:
        if key in entry:
            return Text(messages=_messages(entry[key], f"{where}, {key!r}", problem))
    if "turns" in entry:
        return Text(messages=_turns(entry["turns"], f"{where}, 'turns'", problem))
    for key in _ASKED:
        if key in entry:
            return _asked(entry, key, where, problem)
    if "text" in entry:
        return Text(_string(entry, "text", where, problem), ended=entry.get("finish_reason") != "length")
    found = shown(", ".join(map(repr, entry))).strip('"') or "none"
    raise problem(f"{where}: expected one of the keys {FORMS}, found {found}: rename the key that has the text")


def _messages(listed: object, where: str, problem: type[DraftwingError]) -> tuple[Message, ...]:
    if not isinstance(listed, list):
        raise problem(f"{where}: expected a list of messages, found {type(listed).__name__}: fix or delete it")
    messages = []
    for number, message in enumerate(listed, 1):
        here = f"{where}, message {number}"
        if not isinstance(message, dict):
            raise problem(f"{here}: expected an object, found {shown(message)}: fix or delete it")
        who, what = ("from", "value") if "from" in message else ("role", "content")
        role = _ROLES.get(_string(message, who, here, problem).lower())
        if role is None:
            raise problem(
                f"{here}: unknown role {shown(message[who])}: rename it to one of "
                f"{', '.join(sorted(set(_ROLES.values())))}"
            )
        messages.append({"role": role, "content": _string(message, what, here, problem)})
        if message.get("finish_reason") == "length":
            messages[-1]["finish_reason"] = "length"
    return tuple(messages)


def _turns(listed: object, where: str, problem: type[DraftwingError]) -> tuple[Message, ...]:
    """Questions, one after the other (as in MT-bench), or messages."""
    if isinstance(listed, list) and listed and all(isinstance(turn, str) for turn in listed):
        return tuple({"role": "user", "content": turn} for turn in listed)
    return _messages(listed, where, problem)


def _asked(entry: dict[str, Any], key: str, where: str, problem: type[DraftwingError]) -> Text:
    """A question and its answer, each a text or a list of messages."""
    more, answers = _ASKED[key]
    bare = key == "prompt" and isinstance(entry[key], str)
    messages = _said(entry, key, "user", where, problem)
    for name in more:
        if entry.get(name):
            if not messages:
                raise problem(f"{where}: expected a question under {key!r}, found none: write it, or delete the entry")
            messages[-1]["content"] += "\n\n" + _string(entry, name, where, problem)
            break
    answer = next((name for name in answers if name in entry), None)
    if answer is not None:
        messages += _said(entry, answer, "assistant", where, problem)
    return Text(messages=tuple(messages), bare=bare)


def _said(entry: dict[str, Any], key: str, role: str, where: str, problem: type[DraftwingError]) -> list[Message]:
    if isinstance(entry[key], list):
        return list(_messages(entry[key], f"{where}, {key!r}", problem))
    return [{"role": role, "content": _string(entry, key, where, problem)}]


def _string(entry: dict[str, Any], key: str, where: str, problem: type[DraftwingError]) -> str:
    value = entry.get(key)
    if not isinstance(value, str):
        found = "no such key" if key not in entry else f"{type(value).__name__} {shown(value)}"
        raise problem(f"{where}: expected a string under {key!r}, found {found}: write it as text, or delete the entry")
    return value
