"""Prompts, and records of files in every form in which prompts, dialogues and documents are published.

``read_record`` serves both prompt files and training data, so that they accept the same forms.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from draftwing.checks import MAX_TOKENS, listed, pairs
from draftwing.errors import CheckpointError, DraftwingError, PromptError, shown
from draftwing.remote import local_copy
from draftwing.shipped import SHIPPED
from draftwing.storage import parse_json

# role (system, user, assistant or tool) and content; finish_reason is "length" if an answer was cut off
Message = dict[str, str]

_ROLES = {
    "system": "system",
    "developer": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
_DIALOGUES = ("conversations", "messages")
# Key of the question, keys of an addition to it, keys of the answer: the first one that a record has.
_QUESTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
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
    """A document or a dialogue."""

    text: str | None = None  # the document; None for a dialogue
    messages: tuple[Message, ...] = ()  # the dialogue
    # the dialogue is one text under ``prompt``: a model without a chat template continues it unchanged
    bare: bool = False
    # False for a document that was cut off (``finish_reason`` is ``length``): no end token closes it
    ended: bool = True


def is_record(entry: object) -> bool:
    """Return True if an entry has a key that ``read_record`` reads."""
    return isinstance(entry, Mapping) and not {*_DIALOGUES, "turns", *_QUESTIONS, "text"}.isdisjoint(entry)


def read_record(entry: object, where: str, problem: type[DraftwingError]) -> Text:
    """Return the document or dialogue of an entry of a JSON file.

    Args:
        entry: ``conversations`` (``from``, ``value``) or ``messages`` (``role``, ``content``), ``turns`` (questions, or
            messages), ``prompt`` with ``response`` or ``completion``, ``question`` with ``answer``, ``instruction``
            with ``input`` and ``output``, or ``text``. Answers may be missing.
        where: file and line, for messages.
        problem: the error to raise.
    """
    if not isinstance(entry, dict):
        raise problem(f"{where}: expected an object with {FORMS}, found {shown(entry)}: fix or delete it")
    for key in _DIALOGUES:
        if key in entry:
            return Text(messages=_messages(entry[key], f"{where}, {key!r}", problem))
    if "turns" in entry:
        turns = entry["turns"]
        if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):  # as in MT-bench
            return Text(messages=tuple({"role": "user", "content": turn} for turn in turns))
        return Text(messages=_messages(turns, f"{where}, 'turns'", problem))
    for key in _QUESTIONS:
        if key in entry:
            return _question(entry, key, where, problem)
    if "text" in entry:
        return Text(_string(entry, "text", where, problem), ended=entry.get("finish_reason") != "length")
    found = shown(", ".join(map(repr, entry))).strip('"') or "none"
    raise problem(f"{where}: expected one of the keys {FORMS}, found {found}: rename the key that has the text")


def _messages(listed: object, where: str, problem: type[DraftwingError]) -> tuple[Message, ...]:
    if not isinstance(listed, list):
        raise problem(f"{where}: expected a list of messages, found {type(listed).__name__}: fix or delete it")
    messages = []
    for number, message in enumerate(listed, 1):
        place = f"{where}, message {number}"
        if not isinstance(message, dict):
            raise problem(f"{place}: expected an object, found {shown(message)}: fix or delete it")
        role_key, content_key = ("from", "value") if "from" in message else ("role", "content")
        role = _ROLES.get(_string(message, role_key, place, problem).lower())
        if role is None:
            roles = ", ".join(sorted(set(_ROLES.values())))
            raise problem(f"{place}: unknown role {shown(message[role_key])}: rename it to one of {roles}")
        messages.append({"role": role, "content": _string(message, content_key, place, problem)})
        if message.get("finish_reason") == "length":
            messages[-1]["finish_reason"] = "length"
    return tuple(messages)


def _question(entry: dict[str, Any], key: str, where: str, problem: type[DraftwingError]) -> Text:
    def read(name: str, role: str) -> list[Message]:
        if isinstance(entry[name], list):
            return list(_messages(entry[name], f"{where}, {name!r}", problem))
        return [{"role": role, "content": _string(entry, name, where, problem)}]

    additions, answers = _QUESTIONS[key]
    messages = read(key, "user")
    addition = next((name for name in additions if entry.get(name)), None)
    if addition is not None:
        if not messages:
            raise problem(f"{where}: expected a question under {key!r}, found none: write it, or delete the entry")
        messages[-1]["content"] += "\n\n" + _string(entry, addition, where, problem)
    answer = next((name for name in answers if name in entry), None)
    if answer is not None:
        messages += read(answer, "assistant")
    return Text(messages=tuple(messages), bare=key == "prompt" and isinstance(entry[key], str))


def _string(entry: dict[str, Any], key: str, where: str, problem: type[DraftwingError]) -> str:
    value = entry.get(key)
    if not isinstance(value, str):
        found = "no such key" if key not in entry else f"{type(value).__name__} {shown(value)}"
        raise problem(f"{where}: expected a string under {key!r}, found {found}: write it as text, or delete the entry")
    return value


Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]

_MAX_ID = 2**63  # ids beyond it cannot be compared with a vocabulary's size


def as_list(prompts: object) -> list[Any]:
    """Return one prompt or many as a list; ``check_prompt`` checks each of them.

    A string, token ids (a list of ints, or an array or tensor of one dimension) and a list of messages are one prompt.
    """
    dimensions = _dimensions(prompts)
    if dimensions is not None:
        return (listed(prompts, MAX_TOKENS) or [prompts]) if dimensions == 2 else [prompts]
    is_one = isinstance(prompts, str | bytes | bytearray | Mapping)
    items = None if is_one else listed(prompts, MAX_TOKENS)
    if items is None:
        return [prompts]
    return [items] if items and isinstance(items[0], Integral | Mapping) else items


def check_prompt(prompt: object) -> Prompt:
    """Return a text, token ids as a list of ints, or a dialogue as a list of messages.

    Args:
        prompt: any of these; ids may be an array or a tensor of one dimension.
    """
    if isinstance(prompt, str):
        return check_text(prompt)
    if isinstance(prompt, Mapping):
        raise PromptError(
            f"a prompt must be a text, token ids or a list of messages, found a lone dict {shown(prompt)}: put "
            f"a message into a list, [{{'role': 'user', 'content': ...}}], and give a tokenizer's output as its "
            f"'input_ids'"
        )
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise PromptError(f"a prompt must be a text, found {type(prompt).__name__}: decode it, such as with .decode()")
    dimensions = _dimensions(prompt)
    if dimensions is not None:
        if dimensions != 1:
            raise PromptError(
                f"token ids must have one dimension, found {dimensions} ({type(prompt).__name__}): give one row of it"
            )
        prompt = _to_list(prompt)
    items = None if isinstance(prompt, set | frozenset) else listed(prompt, MAX_TOKENS)
    if items is None:
        raise PromptError(
            f"a prompt must be a text, token ids (ints) or messages, found {type(prompt).__name__} {shown(prompt)}"
        )
    if items and all(isinstance(item, Mapping) for item in items):
        return [_check_message(item, number) for number, item in enumerate(items, 1)]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise PromptError(
                f"a prompt must be a text, token ids (ints) or messages, found {type(item).__name__} {shown(item)} in "
                f"it: give ids with .tolist(), or a list of messages with role and content"
            )
        if not -_MAX_ID <= int(item) < _MAX_ID:
            raise PromptError(f"token id {shown(item)} is outside any vocabulary: give the tokenizer's ids")
    return [int(item) for item in items]


def as_put(prompt: Prompt, chat: bool) -> Prompt:
    """Return a prompt in the form that a target takes.

    With ``chat``, a text becomes a question; without, a dialogue becomes plain text, with an empty line between two
    messages, as in training. Token ids stay unchanged.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}] if chat else prompt
    messages = [message for message in prompt if not isinstance(message, int)]
    return prompt if chat or not messages else "\n\n".join(message["content"] for message in messages)


def check_text(text: str) -> str:
    """Return the text. Raises PromptError for an unpaired surrogate, as from bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"invalid character U+{ord(text[error.start]):04X} at position {error.start} of the prompt (an unpaired "
            f"surrogate, or a byte that is not UTF-8): give valid text"
        ) from error
    return text


def join_parts(parts: Sequence[object], role: object, number: int) -> str:
    """Return the text of a message's content parts.

    Args:
        parts: ``{"type": "text", "text": ...}``; an assistant's may be ``{"type": "refusal", "refusal": ...}`` too.
        role: of the message.
        number: of the message, for errors.
    """
    texts, kinds = [], ("text", "refusal") if role == "assistant" else ("text",)
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else part
        text = part.get(kind) if isinstance(part, Mapping) and kind in kinds else None
        if not isinstance(text, str):
            raise PromptError(
                f"message {number} has a part of type {shown(kind)}: this model reads parts of type text, such as "
                f"{{'type': 'text', 'text': 'a question'}}"
            )
        texts.append(check_text(text))
    return "".join(texts)


def prepare_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """Return messages whose content is text, and True if the model continues the last one (``"prefix": True``)."""
    prepared, is_open = [dict(message) for message in messages], False
    for number, message in enumerate(prepared, 1):
        prefix, role = message.pop("prefix", None), message.get("role")
        is_open = prefix is True and number == len(prepared) and role == "assistant" and not message.get("tool_calls")
        if not (is_open or prefix is None or prefix is False):
            raise PromptError(
                f"message {number} has prefix {shown(prefix)}: only the last message may have `prefix: true`, if it is "
                f"the assistant's and calls no tools"
            )
        if isinstance(message.get("content"), list):
            message["content"] = join_parts(message["content"], role, number)
    if is_open and not prepared[-1].get("content"):
        return prepared[:-1], False
    return prepared, is_open


def _check_message(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a message as a dict; the chat template reads what it has besides role and content."""
    fields = dict(pairs(message, 1000) or ())
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str) or not (isinstance(content, str | list) or "tool_calls" in fields):
        raise PromptError(
            f"message {number} of the prompt must have a role and a content, both strings, found "
            f"{shown(message)}: write {{'role': 'user', 'content': 'the question'}}"
        )
    for text in (role, content):
        if isinstance(text, str):
            check_text(text)
    return fields


def _dimensions(value: object) -> int | None:
    ndim = getattr(value, "ndim", None)
    return ndim if isinstance(ndim, int) and hasattr(value, "tolist") and not isinstance(value, memoryview) else None


def _to_list(array: Any) -> object:
    """Return an array's items, or the array itself if it has none to give, such as a tensor of the meta device."""
    try:
        return array.tolist()
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return array


class PromptList(list[Prompt]):
    """The prompts of a file, and file and line of each, for messages."""

    def __init__(self, prompts: Iterable[tuple[str, Prompt]]) -> None:
        places, items = zip(*prompts, strict=True)
        super().__init__(items)
        self.places: tuple[str, ...] = places


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put ``where``, unless it is empty, before the message of a PromptError."""
    try:
        yield
    except PromptError as error:
        if not where:
            raise
        raise PromptError(f"{where}: {error}") from error


def read_prompts(source: Path | str, limit: int | None = None) -> PromptList:
    """Return the prompts of a file, also at a URL, or of standard input (``-``).

    A ``.jsonl`` file (or text whose first line is a JSON object) has one prompt per line, a ``.json`` file a list of
    them, each in any form of ``read_record``. A dialogue is a prompt up to its last question, ``turns`` up to the
    first. Anything else is one prompt.
    """
    source = local_copy(source)
    text = _read_text(source)
    if not _has_entries(text, source):
        with located(_name(source)):
            return PromptList([(_name(source), check_text(text))])
    return PromptList([(where, _prompt_of(entry, where)) for where, entry in _entries(text, source, limit)])


def read_entries(source: Path | str) -> list[tuple[str, Any]]:
    """Return place (for messages) and value of each entry of a JSON file. Raises as ``read_prompts`` does."""
    source = local_copy(source)
    text = _read_text(source)
    if not _has_entries(text, source):
        raise PromptError(f"{source}: expected one JSON object per line, found plain text: give a .jsonl file")
    return list(_entries(text, source, None))


def _name(source: Path | str) -> str:
    return "stdin" if str(source) == "-" else str(source)


def _read_text(source: Path | str) -> str:
    try:
        if str(source) == "-":
            stdin = getattr(sys.stdin, "buffer", sys.stdin)
            content: bytes | str = b"" if stdin is None else stdin.read()
        else:
            content = Path(source).read_bytes()
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError, as is the error for a NUL in a name
        raise CheckpointError(
            f"{_name(source)}: prompts cannot be read ({error}): give a UTF-8 text or .jsonl file"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _has_entries(text: str, source: Path | str) -> bool:
    if not text.strip():
        raise PromptError(f"{_name(source)}: there is no prompt in it: give some text, or one JSON object per line")
    first = text.lstrip().split("\n", 1)[0]
    return str(source).endswith((".json", ".jsonl")) or (first.startswith("{") and first.rstrip().endswith("}"))


def _entries(text: str, source: Path | str, limit: int | None) -> Iterator[tuple[str, Any]]:
    if str(source).endswith(".json"):
        entries = _parse(text, str(source), "give a list of objects, or name it .jsonl if it has one per line")
        if not isinstance(entries, list) or not entries:
            raise PromptError(f"{source}: expected a list of objects, found {shown(entries)}: give a list of prompts")
        yield from ((f"{source}, entry {number}", entry) for number, entry in enumerate(entries[:limit], 1))
        return
    # Only "\n" ends a line: str.splitlines would cut JSON at U+2028 and others, which are legal inside a string.
    numbered = [(f"{source}, line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    for where, line in numbered[:limit]:
        yield where, _parse(line, where, "each line must be one object")


def _parse(text: str, where: str, fix: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise PromptError(f"{where}: not JSON ({error}): {fix}") from error


def _prompt_of(entry: object, where: str) -> Prompt:
    record = read_record(entry, where, PromptError)
    if record.text is not None or record.bare:
        text = record.messages[0]["content"] if record.text is None else record.text
        if not text:
            raise PromptError(f"{where}: the prompt is empty: give some text to continue")
        with located(where):
            return check_text(text)
    roles = [message["role"] for message in record.messages]
    if "user" not in roles:
        raise PromptError(f"{where}: there is no question in this dialogue: give a message of the role user")
    if isinstance(entry, dict) and "turns" in entry:
        last = roles.index("user")
    else:
        last = max(index for index, role in enumerate(roles) if role != "assistant")
    with located(where):
        return [_check_message(message, number) for number, message in enumerate(record.messages[: last + 1], 1)]


def shipped_prompts(limit: int | None = None) -> list[str]:
    """Return beginnings of Python definitions in files that the shipped models have never seen."""
    return _shipped("prompts.jsonl", limit)


def shipped_questions(limit: int | None = None) -> list[str]:
    """Return questions of all kinds, for targets with a chat template."""
    return _shipped("questions.jsonl", limit)


def _shipped(name: str, limit: int | None) -> list[str]:
    file = SHIPPED / name
    if not file.exists():
        raise CheckpointError(f"{file}: the prompts that ship with Draftwing are not installed: give a file")
    return [str(prompt) for prompt in read_prompts(file, limit)]
