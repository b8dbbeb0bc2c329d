"""Prompts of what a run held out, as people wrote them: a few go along with the head, to try it on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwing.heads.prompts import line_of
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data.corpus import Corpus
from draftwing.train.data.sources import find_files, read_records

__all__ = ["held_out_prompts"]

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
        sources, exclude: as the corpus was read from.

    Raises:
        DataError: a source has become unreadable since.
    """
    dialogues = _dialogues(validation, sources, num, exclude)
    beginnings = _beginnings(validation, tokenizer, num)
    if dialogues and beginnings:  # half of each, or as many as there are
        half = max(num // 2, num - len(dialogues))
        beginnings = _spread(beginnings, half)
        dialogues = _spread(dialogues, num - len(beginnings))
    return [*_spread(dialogues, num), *_spread(beginnings, num)]


def _dialogues(validation: Corpus, sources: Sequence[str | Path], num: int, exclude: Path | None) -> list[str]:
    known = [example.where for example in validation.examples if example.where]
    wanted = dict.fromkeys(_spread(known, _MORE * num))
    found: dict[str, str] = {}
    for file in find_files(sources, exclude) if wanted else ():
        for record in read_records(file):
            if record.where not in wanted or record.where in found:
                continue
            roles = [message["role"] for message in record.messages]
            turn = roles.index("assistant", 1)  # there is one after the first message: the example counts its tokens
            messages = [{key: message[key] for key in ("role", "content")} for message in record.messages[:turn]]
            found[record.where] = line_of({"messages": messages}) or ""
            if len(found) == len(wanted):
                break
        if len(found) == len(wanted):
            break
    return list(dict.fromkeys(line for where in wanted if (line := found.get(where))))


def _beginnings(validation: Corpus, tokenizer: Tokenizer, num: int) -> list[str]:
    bounds = [*validation.starts.tolist(), len(validation.stream)]
    places = [
        (at, min(at + _BEGINNING, end))
        for start, end in zip(bounds, bounds[1:], strict=False)
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
