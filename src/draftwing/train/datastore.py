"""Datastores for retrieval: files and folders as token ids, with a suffix array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftwing import __version__
from draftwing.errors import DataError
from draftwing.methods.suffix_array import END, Store, SuffixArray, check_new_datastore, join_texts, write_datastore
from draftwing.remote import OnProgress, public_name
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data import bare_tokenizer, chunked, find_files, read_files


@dataclass(frozen=True)
class Texts:
    """Texts one after another."""

    tokens: NDArray[np.int32]  # (T,) ids, each text followed by ``END``
    num_texts: int  # documents, and messages of dialogues
    num_files: int  # files that they come from


def read_texts(sources: Sequence[str | Path], tokenizer: Tokenizer, on_progress: OnProgress | None = None) -> Texts:
    """Read and encode files and folders (see ``find_files``); every message of a dialogue is a text."""
    files, bare = find_files(sources), bare_tokenizer(tokenizer)
    texts = (
        text
        for record in read_files(files, on_progress)
        for text in ([message["content"] for message in record.messages] if record.text is None else [record.text])
    )
    parts, num_texts = [], 0
    for chunk in chunked(texts, len):
        encoded = [encoding.ids for encoding in bare.encode_batch_fast(chunk, add_special_tokens=False)]
        num_texts += sum(map(bool, encoded))
        parts.append(join_texts(filter(None, encoded)))
    if not num_texts:
        names = ", ".join(map(public_name, sources))
        raise DataError(f"{names}: there is no text in it: give files with text or dialogues")
    return Texts(np.concatenate(parts), num_texts, len(files))


def build_datastore(folder: Path, texts: Texts, tokenizer: Tokenizer, target: str) -> Store:
    """Sort the texts' suffixes and write a datastore into a new folder. It takes about 30 bytes of memory per token.

    ``target`` is the name of the model with this tokenizer, for messages.
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
