"""What a run trains on: dialogues and documents as token ids, and a part of them held out."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from draftwing.errors import ConfigError, DataError

__all__ = ["Corpus", "Example", "held_out", "split"]

# Tokens of a document that are held out together, so that a corpus of one long file can be split too.
_SECTION = 2**14


@dataclass(frozen=True, eq=False)
class Example:
    """One dialogue.

    Attributes:
        ids: (T,) int32.
        mask: (T,) bool: True where the *prediction of* this token counts in the loss; never at 0.
        where: file and line that it was read from; empty where nobody knows.
    """

    ids: np.ndarray
    mask: np.ndarray
    where: str = ""


@dataclass(frozen=True, eq=False)
class Corpus:
    """What a run trains on.

    Attributes:
        examples: dialogues.
        stream: (N,) int32: the documents one after the other, each closed by the end token. All of it counts.
        starts: (D,) int64: where each document begins in the stream.
        prefix: the ids in front of every window cut from the stream: BOS, or nothing.
        skipped: why records were left out, and how many.
    """

    examples: Sequence[Example] = ()
    stream: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    starts: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    prefix: tuple[int, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens of the dialogues and of the stream."""
        return sum(len(example.ids) for example in self.examples) + len(self.stream)


def split(corpus: Corpus, validation_share: float, seed: int = 0) -> tuple[Corpus, Corpus]:
    """A training and a validation corpus, chosen by a hash of the content.

    Duplicates therefore stay on one side, and the order of the sources does not matter. Units are dialogues, and
    sections of up to 16,384 tokens of documents. Small corpora keep at least one unit on each side.

    Raises:
        ConfigError: a share outside [0, 1).
        DataError: there is but one unit.
    """
    sections = _sections(corpus)
    units = [example.ids for example in corpus.examples] + [corpus.stream[start:end] for start, end in sections]
    held = held_out(units, validation_share, seed)
    if not held.any():
        return corpus, Corpus(prefix=corpus.prefix)
    num = len(corpus.examples)
    return (
        _part(corpus, ~held[:num], [s for s, out in zip(sections, held[num:], strict=True) if not out]),
        _part(corpus, held[:num], [s for s, out in zip(sections, held[num:], strict=True) if out]),
    )


def held_out(units: Sequence[np.ndarray], share: float, seed: int = 0) -> np.ndarray:
    """(U,) bool: which units (ids each) a split holds out. At least one on each side, unless the share is 0.

    Raises:
        ConfigError: a share outside [0, 1).
        DataError: no two units are different.
    """
    if not 0 <= share < 1:
        raise ConfigError(f"validation_share must be in [0, 1), found {share}")
    if share == 0:
        return np.zeros(len(units), dtype=bool)
    hashes = np.asarray([_hash(ids, seed) for ids in units])
    if len(np.unique(hashes)) < 2:
        raise DataError(
            f"all there is are {len(units)} dialogues or sections of text, no two of them different: give more data, "
            f"or hold out nothing (validation_share 0)"
        )
    found: np.ndarray = ((hashes < share) | (hashes == hashes.min())) & (hashes != hashes.max())
    return found


def _sections(corpus: Corpus) -> list[tuple[int, int]]:
    """Where each section lies in the stream; none reaches over a document's end."""
    bounds = [*corpus.starts.tolist(), len(corpus.stream)]
    documents = itertools.pairwise(bounds)
    return [(at, min(at + _SECTION, end)) for start, end in documents for at in range(start, end, _SECTION)]


def _hash(ids: np.ndarray, seed: int) -> float:
    """Even in [0, 1)."""
    digest = hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=8, salt=seed.to_bytes(8, "little", signed=True))
    return int.from_bytes(digest.digest(), "little") / 2**64


def _part(corpus: Corpus, chosen: np.ndarray, sections: Sequence[tuple[int, int]]) -> Corpus:
    lengths = [end - start for start, end in sections]
    parts = [corpus.stream[start:end] for start, end in sections]
    return Corpus(
        tuple(example for example, take in zip(corpus.examples, chosen, strict=True) if take),
        np.concatenate(parts) if parts else Corpus().stream,
        np.cumsum([0, *lengths[:-1]], dtype=np.int64) if lengths else Corpus().starts,
        corpus.prefix,
    )
