"""Files and folders as a datastore: texts as ids, sorted by what follows, that drafts are retrieved from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftwing import __version__
from draftwing.errors import DataError
from draftwing.methods.suffix_array import END, Store, SuffixArray, check_new_datastore, join_texts, write_datastore
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data import Record, SourceFile, bare_tokenizer, find_files, read_records

_CHUNK = 2**21  # characters encoded at once: enough for every core


@dataclass(frozen=True)
class Texts:
    """Texts one after another.

    Attributes:
        tokens: (T,) ids, each text with ``END`` behind it.
        num_texts: documents, and messages of dialogues.
        num_files: that they are from.
    """

    tokens: NDArray[np.int32]
    num_texts: int
    num_files: int


def read_texts(
    sources: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    exclude: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Texts:
    """Read and encode files and folders, as training data is read; every message of a dialogue is a text.

    Args:
        exclude: see ``find_files``.
        on_progress: called with the bytes done and the bytes in all.

    Raises:
        DataError: a source cannot be used, or there is no text in any.
    """
    files = find_files(sources, exclude)
    bare = bare_tokenizer(tokenizer)
    parts: list[NDArray[np.int32]] = []
    num_texts = 0
    for chunk in _chunks(files, on_progress):
        found = [encoding.ids for encoding in bare.encode_batch_fast(chunk, add_special_tokens=False)]
        num_texts += sum(map(bool, found))
        parts.append(join_texts(filter(None, found)))
    if not num_texts:
        raise DataError(f"{', '.join(map(str, sources))}: there is no text in it: give files with text or dialogues")
    return Texts(np.concatenate(parts), num_texts, len(files))


def _chunks(files: Sequence[SourceFile], on_progress: Callable[[int, int], None] | None) -> Iterator[list[str]]:
    waiting, length, done = list[str](), 0, 0
    total = sum(file.num_bytes for file in files)
    for file in files:
        for record in read_records(file):
            done += record.num_bytes
            for text in _texts_of(record):
                waiting.append(text)
                length += len(text)
            if length >= _CHUNK:
                yield waiting
                waiting, length = [], 0
                if on_progress is not None:
                    on_progress(min(done, total), total)
    yield waiting
    if on_progress is not None:
        on_progress(total, total)


def _texts_of(record: Record) -> list[str]:
    if record.text is not None:
        return [record.text]
    return [message["content"] for message in record.messages]


def build_datastore(folder: Path, texts: Texts, tokenizer: Tokenizer, target: str) -> Store:
    """Sort the texts' suffixes and write a datastore. In memory it takes some 30 bytes for each token.

    Args:
        folder: must not be there yet; it appears when all of it is written.
        target: the name of the model whose tokenizer this is, for messages.

    Raises:
        ConfigError: the folder is there already.
        CheckpointError: it cannot be written.
    """
    check_new_datastore(folder)
    about = {
        "target": target,
        "vocab_size": max(tokenizer.fast.get_vocab().values()) + 1,
        "vocab_hash": tokenizer.vocab_hash,
        "num_texts": int((texts.tokens == END).sum()),
        "num_files": texts.num_files,
        "draftwing": __version__,
    }
    return write_datastore(folder, SuffixArray(texts.tokens), about)
