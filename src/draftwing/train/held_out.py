"""Prompts of what a run held out, as people wrote them: a few go along with the head, to try it on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftwing.formats.card import line_of
from draftwing.text.prompts import Message
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data import Corpus, DialogueEncoder, bare_tokenizer, find_files, read_records, special_prefix

_BEGINNING = 64  # tokens of a document
_APART = 2048  # tokens between two beginnings in one long document
_MORE = 4  # times as many as are wanted are looked at, as long ones are left out


def held_out_prompts(
    validation: Corpus, tokenizer: Tokenizer, sources: Sequence[str | Path], num: int, *, exclude: Path | None = None
) -> list[str]:
    """Up to ``num`` prompts of the held-out data, spread evenly over it, each a line for ``heads.prompts``.

    Of a dialogue everything up to its first answer, of a document the beginning. Prompts that are too long to go
    along with a head are left out. Dialogues are read from their files again: a corpus keeps nothing but ids.

    Args:
        sources, exclude: as the corpus was read from; without sources, dialogues are given as their template renders
            them.

    Raises:
        DataError: a source has become unreadable since.
    """
    dialogues = (
        _dialogues(validation, tokenizer, sources, num, exclude) if sources else _rendered(validation, tokenizer, num)
    )
    beginnings = _beginnings(validation, tokenizer, num)
    if dialogues and beginnings:  # half of each, or as many as there are
        half = max(num // 2, num - len(dialogues))
        beginnings = _spread(beginnings, half)
        dialogues = _spread(dialogues, num - len(beginnings))
    return [*_spread(dialogues, num), *_spread(beginnings, num)]


def _dialogues(
    validation: Corpus, tokenizer: Tokenizer, sources: Sequence[str | Path], num: int, exclude: Path | None
) -> list[str]:
    bare = bare_tokenizer(tokenizer)
    encoder = DialogueEncoder(tokenizer, bare, special_prefix(tokenizer, bare), max_length=2**30)
    wanted = {each.where: each.ids for each in _spread([e for e in validation.examples if e.where], _MORE * num)}
    found: dict[str, str | None] = {}
    for file in find_files(sources, exclude):
        for record in read_records(file) if len(found) < len(wanted) else ():
            if record.where not in wanted or record.where in found:
                continue
            ids = wanted[record.where]
            if not any(np.array_equal(each[0][: len(ids)], ids) for each in encoder.encode([record])):
                continue  # files in two folders have one name
            found[record.where] = _question(record.messages)
            if len(found) == len(wanted):
                break
    return list(dict.fromkeys(line for where in wanted if (line := found.get(where)) is not None))


def _rendered(validation: Corpus, tokenizer: Tokenizer, num: int) -> list[str]:
    """Dialogues up to their first answer as text, where that text has these very ids."""
    found = []
    for example in _spread(validation.examples, _MORE * num):
        ids = example.ids[: int(example.mask.argmax())].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=False)
        line = line_of({"text": text}) if text and tokenizer.encode(text) == ids else None
        if line is not None:
            found.append(line)
    return list(dict.fromkeys(found))


def _question(messages: Sequence[Message]) -> str | None:
    """A dialogue up to its first answer; what it was trained on has one after the first message."""
    turn = [message["role"] for message in messages].index("assistant", 1)
    return line_of({"messages": [{key: each[key] for key in ("role", "content")} for each in messages[:turn]]})


def _beginnings(validation: Corpus, tokenizer: Tokenizer, num: int) -> list[str]:
    bounds = [*validation.starts.tolist(), len(validation.stream)]
    places = [
        (at, min(at + _BEGINNING, end))
        for start, end in itertools.pairwise(bounds)
        for at in range(start, end, _APART)
        if end - at >= _BEGINNING
    ]
    found = []
    for start, end in _spread(places, _MORE * num):
        text = tokenizer.decode(validation.stream[start:end].tolist()).rstrip("\ufffd")  # half of a character
        line = line_of({"text": text}) if text.strip() else None
        if line is not None:
            found.append(line)
    return list(dict.fromkeys(found))


def _spread(items: Sequence[Any], num: int) -> list[Any]:
    """``num`` of them at even steps; all where there are no more."""
    if len(items) <= num:
        return list(items)
    return [items[int(len(items) * (i + 0.5) / num)] for i in range(num)]
