"""One record of a file, in every form that the field writes prompts, dialogues and documents in.

Prompt files and training data are read by the same ``read_record``, so that what one of them takes the other takes too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from draftwing.errors import CheckpointError, DraftwingError, PromptError, shown
from draftwing.shipped import SHIPPED

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


# Prompts: what counts as one, and files of them in every form that the field writes them in.


Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]

_MOST_ID = 2**63  # beyond it no vocabulary can be compared with


# --- one prompt ------------------------------------------------------------------------------------------------------


def as_list(prompts: object) -> list[Any]:
    """One prompt or many, as a list of them; ``check_prompt`` tells whether each is one.

    A string, token ids (a list of ints, or an array or tensor of one dimension) and a list of messages are one prompt.
    """
    dimensions = _dimensions(prompts)
    if dimensions is not None:
        return list(prompts) if dimensions == 2 else [prompts]  # type: ignore[call-overload]
    if isinstance(prompts, str | bytes | bytearray | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]
    items = list(prompts)
    return [items] if items and isinstance(items[0], Integral | Mapping) else items


def check_prompt(prompt: object) -> Prompt:
    """A text, token ids as a list of ints, or a dialogue as a list of messages.

    Args:
        prompt: any of these; ids may be an array or a tensor of one dimension.

    Raises:
        PromptError: it is none of these. An empty list of ids passes: what to do with it is up to the target.
    """
    if isinstance(prompt, str):
        return check_text(prompt)
    if isinstance(prompt, Mapping):
        raise PromptError(
            f"a prompt must be a text, token ids or a list of messages, found a lone dict {shown(dict(prompt))}: put "
            f"a message into a list, [{{'role': 'user', 'content': ...}}], and give a tokenizer's output as its "
            f"'input_ids'"
        )
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise PromptError(
            f"a prompt must be a text, found {type(prompt).__name__}: decode them, such as with .decode()"
        )
    dimensions = _dimensions(prompt)
    if dimensions is not None:
        if dimensions != 1:
            raise PromptError(
                f"token ids must have one dimension, found {dimensions} ({type(prompt).__name__}): give one row of it"
            )
        prompt = prompt.tolist()  # type: ignore[attr-defined]
    if not isinstance(prompt, Iterable) or isinstance(prompt, set | frozenset):
        raise PromptError(
            f"a prompt must be a text, token ids (ints) or messages, found {type(prompt).__name__} {shown(prompt)}"
        )
    items = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        return [_message(item, number) for number, item in enumerate(items, 1)]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise PromptError(
                f"a prompt must be a text, token ids (ints) or messages, found {type(item).__name__} {shown(item)} in "
                f"it: give ids with .tolist(), or a list of messages with role and content"
            )
        if not -_MOST_ID <= int(item) < _MOST_ID:
            raise PromptError(f"token id {shown(item)} is outside any vocabulary: give the tokenizer's ids")
    return [int(item) for item in items]


def as_put(prompt: Prompt, chat: bool) -> Prompt:
    """A prompt as a target takes it: a text as a question of a dialogue where it chats, and where it does not a
    dialogue as plain text, with an empty line between two messages, as in training. Token ids stay as they are."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}] if chat else prompt
    messages = [message for message in prompt if not isinstance(message, int)]
    return prompt if chat or not messages else "\n\n".join(message["content"] for message in messages)


def check_text(text: str) -> str:
    """The text, where it can be encoded.

    Raises:
        PromptError: it has half of a surrogate pair, as from bytes that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the prompt has {shown(text[error.start])} at character {error.start}, which is no character (half of a "
            f"surrogate pair, or a byte that is not UTF-8): give valid text"
        ) from error
    return text


def _message(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A message of a dialogue; what it has beside role and content is the chat template's to read."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not (isinstance(content, str | list) or "tool_calls" in message):
        raise PromptError(
            f"message {number} of the prompt must have a role and a content, both strings, found "
            f"{shown(dict(message))}: write {{'role': 'user', 'content': 'the question'}}"
        )
    for text in (role, content):
        if isinstance(text, str):
            check_text(text)
    return dict(message)


def _dimensions(value: object) -> int | None:
    found = getattr(value, "ndim", None)
    return found if isinstance(found, int) and hasattr(value, "tolist") and not isinstance(value, memoryview) else None


# --- files -----------------------------------------------------------------------------------------------------------


def read_prompts(source: Path | str, limit: int | None = None) -> list[Prompt]:
    """Prompts of a file, or of standard input (``-``).

    A ``.jsonl`` file (or text whose first line is a JSON object) has one prompt a line, a ``.json`` file a list of
    them, each in any form of ``read_record``. Of a dialogue everything up to the last question is asked, of ``turns``
    the first. Anything else is one prompt as it stands.

    Raises:
        CheckpointError: the file cannot be read.
        PromptError: a line is no such object (named by number), or there is no prompt at all.
    """
    text = _read_text(source)
    if not _is_listed(text, source):
        return [check_text(text)]
    return [_prompt_of(entry, where) for where, entry in _entries(text, source, limit)]


def read_entries(source: Path | str) -> list[tuple[str, Any]]:
    """What a ``.jsonl`` or ``.json`` file lists: where each entry stands, for messages, and its JSON value.

    Raises:
        CheckpointError: the file cannot be read.
        PromptError: it is no list of JSON objects, or empty.
    """
    text = _read_text(source)
    if not _is_listed(text, source):
        raise PromptError(f"{source}: expected one JSON object a line, found plain text: give a .jsonl file")
    return list(_entries(text, source, None))


def _is_listed(text: str, source: Path | str) -> bool:
    if not text.strip():
        raise PromptError(f"{source}: there is no prompt in it")
    first = text.lstrip().split("\n", 1)[0]
    return str(source).endswith((".json", ".jsonl")) or (first.startswith("{") and first.rstrip().endswith("}"))


def _entries(text: str, source: Path | str, limit: int | None) -> Iterator[tuple[str, Any]]:
    if str(source).endswith(".json"):
        yield from ((f"{source}, entry {n}", each) for n, each in enumerate(_listed(text, source)[:limit], 1))
        return
    # "\n" alone ends a line: str.splitlines would cut JSON at U+2028 and others, which are legal inside a string.
    numbered = [(f"{source}, line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    for where, line in numbered[:limit]:
        yield where, _parsed(line, where)


def _read_text(source: Path | str) -> str:
    try:
        if str(source) == "-":
            stdin = getattr(sys.stdin, "buffer", sys.stdin)
            found: bytes | str = b"" if stdin is None else stdin.read()
        else:
            found = Path(source).read_bytes()
        text = found.decode("utf-8-sig") if isinstance(found, bytes) else found
    except (OSError, ValueError) as error:  # UnicodeDecodeError is one, and so is what a NUL in a name raises
        where = "stdin" if str(source) == "-" else source
        raise CheckpointError(f"{where}: prompts cannot be read ({error}): give a UTF-8 text or .jsonl file") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _parsed(line: str, where: str) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        raise PromptError(f"{where}: not JSON ({error}): each line must be one object") from error


def _listed(text: str, source: Path | str) -> list[Any]:
    try:
        found = parse_json(text)
    except ValueError as error:
        raise PromptError(
            f"{source}: not JSON ({error}): give a list of objects, or name it .jsonl if it has one a line"
        ) from error
    if not isinstance(found, list) or not found:
        raise PromptError(f"{source}: expected a list of objects, found {shown(found)}: give a list of prompts")
    return found


def _prompt_of(entry: object, where: str) -> Prompt:
    found = read_record(entry, where, PromptError)
    if found.text is not None or found.bare:
        text = found.messages[0]["content"] if found.text is None else found.text
        if not text:
            raise PromptError(f"{where}: the prompt is empty: give some text to go on from")
        return check_text(text)
    messages: Sequence[Mapping[str, str]] = found.messages
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise PromptError(f"{where}: there is no question in this dialogue: give a message of the role user")
    if isinstance(entry, dict) and "turns" in entry:
        last = roles.index("user")
    else:
        last = max(place for place, role in enumerate(roles) if role != "assistant")
    return [_message(message, number) for number, message in enumerate(messages[: last + 1], 1)]


def shipped_prompts(limit: int | None = None) -> list[str]:
    """Beginnings of Python definitions in files that the shipped models have never seen."""
    return _shipped("prompts.jsonl", limit)


def shipped_questions(limit: int | None = None) -> list[str]:
    """Questions of all kinds, for targets that chat."""
    return _shipped("questions.jsonl", limit)


def _shipped(name: str, limit: int | None) -> list[str]:
    file = SHIPPED / name
    if not file.exists():
        raise CheckpointError(f"{file}: the prompts shipped with Draftwing are not installed: pass a file of your own")
    return [str(prompt) for prompt in read_prompts(file, limit)]
