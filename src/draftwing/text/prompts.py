"""Prompt files: JSON lines as the field publishes them, or plain text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from draftwing.errors import CheckpointError, PromptError
from draftwing.shipped import SHIPPED

__all__ = ["Prompt", "as_list", "check_prompt", "read_prompts", "shipped_prompts"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


_FORMS = "a text, token ids (ints) or messages"


def as_list(prompts: Any) -> list[Any]:
    """One prompt or many, as a list of prompts; a string, ids or a dialogue is one. None of them is checked yet.

    Raises:
        PromptError: it is neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts)
    return [items] if items and isinstance(items[0], Integral | Mapping) else items


def check_prompt(prompt: Any) -> str | list[int] | list[Mapping[str, str]]:
    """One prompt as a text, a list of ids or a list of messages.

    Raises:
        PromptError: it is none of these.
    """
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"the prompt is no Unicode text ({error}): decode it with errors='replace'") from error
        return prompt
    items = _items(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        return items
    for item in items:
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise PromptError(
                f"a prompt must be {_FORMS}, found {type(item).__name__} {item!r:.40} in it: give ids with .tolist(), "
                f"or a list of messages with role and content"
            )
    return [int(token) for token in items]


def _items(prompt: Any) -> list[Any]:
    if isinstance(prompt, Iterable) and not isinstance(prompt, Mapping | bytes | bytearray):
        try:
            return list(prompt)
        except TypeError:  # an array without a dimension
            pass
    raise PromptError(
        f"a prompt must be {_FORMS}, found {type(prompt).__name__} {prompt!r:.40}: decode bytes, and put messages "
        f"into a list"
    )


def read_prompts(source: Path | str, limit: int | None = None) -> list[Prompt]:
    """Prompts of a file, or of standard input (``-``).

    A ``.jsonl`` file (or text whose first line is a JSON object) has one prompt a line: ``{"prompt": text}``,
    ``{"text": text}``, ``{"messages": [...]}`` or ``{"turns": [first, ...]}``, of which the first turn is asked.
    Anything else is one prompt as it stands.

    Raises:
        CheckpointError: the file cannot be read.
        PromptError: a line is not such an object (named by number), or there is no prompt at all.
    """
    if str(source) == "-":
        text = sys.stdin.read()
    else:
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{source}: prompts cannot be read ({error}): give a UTF-8 text or .jsonl file"
            ) from error
    if not text.strip():
        raise PromptError(f"{source}: there is no prompt in it")
    first = text.lstrip().split("\n", 1)[0]
    if not (str(source).endswith(".jsonl") or (first.startswith("{") and first.rstrip().endswith("}"))):
        return [text]
    numbered = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return [_prompt_of(line, f"{source}, line {number}") for number, line in numbered[:limit]]


def _prompt_of(line: str, where: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where}: not JSON ({error}): each line must be one object") from error
    if isinstance(entry, dict):
        for key in ("prompt", "text"):
            if isinstance(entry.get(key), str) and entry[key]:
                return str(entry[key])
        if isinstance(entry.get("messages"), list) and entry["messages"]:
            return [dict(message) for message in entry["messages"]]
        if isinstance(entry.get("turns"), list) and entry["turns"]:
            return [{"role": "user", "content": str(entry["turns"][0])}]
    raise PromptError(f"{where}: expected an object with 'prompt', 'text', 'messages' or 'turns', found {line[:60]!r}")


def shipped_prompts(limit: int | None = None) -> list[str]:
    """Beginnings of Python definitions in files that the shipped models have never seen."""
    file = SHIPPED / "prompts.jsonl"
    if not file.exists():
        raise CheckpointError(f"{file}: the prompts shipped with Draftwing are not installed: pass a file of your own")
    lines = file.read_text(encoding="utf-8").splitlines()
    return [str(json.loads(line)["prompt"]) for line in lines[:limit]]
