"""Files and folders to what a run trains on: dialogues and documents as token ids.

Dialogues stay as they are, one row each, and only what the assistant wrote counts. Plain documents are one long
stream that every epoch cuts at another place, so that no token is always the first of its window.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftwing.errors import ConfigError, DataError, TokenizerError
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data.batches import Batch, Batches
from draftwing.train.data.conversations import DialogueEncoder, bare_tokenizer, special_prefix
from draftwing.train.data.corpus import Corpus, Example, split
from draftwing.train.data.sources import Record, find_files, read_records

__all__ = ["Batch", "Batches", "Corpus", "Example", "read_examples", "split"]

# Characters encoded at once: enough for every core, and little beside what the ids of a corpus take.
_CHUNK = 2**21
# Longer documents are encoded in pieces cut at line ends, as one text is encoded on one core.
_PIECE = 2**18


def read_examples(
    sources: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    eos_id: int | None = None,
    exclude: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Corpus:
    """Read and encode files and folders: see ``find_files`` and ``read_records`` for what they may hold.

    Args:
        max_length: tokens of a dialogue; longer ones are cut there.
        eos_id: closes every document; None is the tokenizer's own.
        exclude: names to leave out of folders.
        on_progress: called with the bytes done and the bytes in all.

    Raises:
        DataError: a source cannot be used, or nothing is left to train on.
        TokenizerError: the chat template refuses every dialogue, or does not tell what the assistant wrote; or
            there are documents and no end token is known.
        ConfigError: ``max_length`` below 2.
    """
    if max_length < 2:
        raise ConfigError(f"max_length must be at least 2 (a token, and one to predict), found {max_length}")
    files = find_files(sources, exclude)
    encoder = _Encoder(tokenizer, max_length, eos_id)
    done, total, shown = 0, sum(file.num_bytes for file in files), 0
    for file in files:
        for record in read_records(file):
            encoder.add(record)
            done += record.num_bytes
            if on_progress is not None and done - shown >= total // 500:  # there may be millions of records
                shown = done
                on_progress(min(done, total), total)
    corpus = encoder.finish()
    if not corpus.num_tokens:
        encoder.dialogues.check()
        reasons = (
            ", ".join(f"{count} with {why}" for why, count in corpus.skipped.items()) or "there was no text at all"
        )
        raise DataError(
            f"{', '.join(map(str, sources))}: nothing is left to train on ({reasons}): give dialogues with answers "
            f"(`draftwing data regenerate` writes them), documents, or a larger max_length"
        )
    if on_progress is not None:
        on_progress(total, total)
    return corpus


class _Encoder:
    """Collects records, encodes them in chunks, and keeps nothing but ids."""

    def __init__(self, tokenizer: Tokenizer, max_length: int, eos_id: int | None) -> None:
        self._tokenizer, self._eos = tokenizer, eos_id
        self._bare = bare_tokenizer(tokenizer)
        self._prefix = special_prefix(tokenizer, self._bare)
        self.dialogues = DialogueEncoder(tokenizer, self._bare, self._prefix, max_length)
        self._waiting: list[Record] = []
        self._pieces: list[tuple[str, str]] = []  # a piece of a document, and what it is: inner, end or cut
        self._num_characters = 0
        self._examples: list[Example] = []
        self._parts: list[np.ndarray] = []
        self._starts, self._length = [0], 0
        self._skipped: Counter[str] = Counter()

    def add(self, record: Record) -> None:
        """Take a record."""
        if record.text is None:
            self._waiting.append(record)
            self._count(sum(len(message["content"]) for message in record.messages))
        elif not record.text.strip():
            self._skipped["no text"] += 1
        else:
            pieces = list(_cut(record.text))
            for piece in pieces[:-1]:
                self._pieces.append((piece, "inner"))
                self._count(len(piece))
            self._pieces.append((pieces[-1], "end" if record.ended else "cut"))
            self._count(len(pieces[-1]))

    def _count(self, num_characters: int) -> None:
        self._num_characters += num_characters
        if self._num_characters >= _CHUNK:
            self._flush()

    def _flush(self) -> None:
        self._examples += [Example(*found) for found in self.dialogues.encode(self._waiting)]
        if self._pieces:
            if self._eos is None:
                self._eos = _find_eos(self._tokenizer)
            encodings = self._bare.encode_batch_fast([piece for piece, _ in self._pieces], add_special_tokens=False)
            for encoding, (_, kind) in zip(encodings, self._pieces, strict=True):
                ids = np.asarray([*encoding.ids, self._eos] if kind == "end" else encoding.ids, dtype=np.int32)
                self._parts.append(ids)
                self._length += len(ids)
                if kind != "inner":
                    self._starts.append(self._length)
        self._waiting, self._pieces, self._num_characters = [], [], 0

    def finish(self) -> Corpus:
        """All that was added."""
        self._flush()
        return Corpus(
            tuple(self._examples),
            np.concatenate(self._parts) if self._parts else Corpus().stream,
            np.asarray(self._starts[:-1], dtype=np.int64),
            self._prefix,
            dict(self._skipped + self.dialogues.skipped),
        )


def _cut(text: str) -> Iterator[str]:
    """Pieces of a long text, cut after a line's end where there is one."""
    start = 0
    while len(text) - start > _PIECE:
        end = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def _find_eos(tokenizer: Tokenizer) -> int:
    """The end token of tokenizer_config.json, else the first one of generation_config.json or config.json."""
    token = _read_json(tokenizer.folder / "tokenizer_config.json").get("eos_token")
    found: Any = tokenizer.fast.token_to_id(str(token.get("content") if isinstance(token, dict) else token))
    for name in ("generation_config.json", "config.json"):
        if found is None:
            found = _read_json(tokenizer.folder / name).get("eos_token_id")
            found = next(iter(found), None) if isinstance(found, list) else found
    if not isinstance(found, int):
        raise TokenizerError(
            f"{tokenizer.folder}: no end token is known to close documents with: expected eos_token in "
            f"tokenizer_config.json or eos_token_id in generation_config.json; add one, or pass eos_id"
        )
    return found


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file}: not readable as JSON ({error}): download it again") from error
    return found if isinstance(found, dict) else {}
