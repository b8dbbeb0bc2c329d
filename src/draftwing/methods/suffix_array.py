"""Suffix arrays over token ids, the trees grown from them, and their files: the index of retrieval drafters.

Suffixes that begin alike are adjacent in sorted order. Two binary searches find the occurrences of a pattern, and the
tokens after them are sorted too: a trie that needs no building.

An index of texts (``SuffixArray``, ``lookup.SuffixAutomaton``, ``retrieval.Memory``) returns the tokens that follow at
a place, and how often each does. The places below a match form the trie of its continuations; ``grow_tree`` visits only
the part of it that is drafted.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush, nlargest
from itertools import count, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwing.errors import CheckpointError, ConfigError, TokenizerError, shown
from draftwing.methods.base import ListTree
from draftwing.models.config import read_config
from draftwing.storage import new_folder, partial_name, remove_leftovers, writing
from draftwing.text.tokenizer import Tokenizer

END = -1  # follows every text: no pattern contains it
_MAX_OCCURRENCES = 1024  # a larger number is sampled at even distances, so that counts are shares

Ids = NDArray[np.int32]
Order = NDArray[Any]  # int32, or int64 for more tokens than int32 counts

# --- the index -------------------------------------------------------------------------------------------------------


class Follower(NamedTuple):
    """A token that follows at a place, how often it does, and the place after it, for the index that returned it."""

    token: int
    times: int
    place: Any


@dataclass(frozen=True)
class Match:
    """A suffix of ``length`` tokens that occurs in ``texts``, an index, and the place after it."""

    texts: Any
    length: int
    place: Any


class _Occurrences(NamedTuple):
    """The place of a ``SuffixArray``: the starts of the matches, sorted by suffix, and the number of matched tokens."""

    starts: NDArray[np.int64]
    length: int


class SuffixArray:
    """Texts and the sorted starts of their suffixes. Both may lie in a mapped file; neither ever changes.

    Args:
        tokens: (T,) texts, each followed by ``END``.
        order: (T,) from ``sort_suffixes``; None sorts them.
        vocab_size: larger ids, which only a damaged file contains, end a text like ``END``.
    """

    def __init__(self, tokens: Ids, order: Order | None = None, vocab_size: int | None = None) -> None:
        self.tokens: Ids = tokens
        self.order: Order = sort_suffixes(tokens) if order is None else order
        self._vocab_size = vocab_size or 2**31

    def __len__(self) -> int:
        return len(self.tokens)

    def find(self, pattern: Sequence[int]) -> tuple[int, int]:
        """Return the range of ``order`` whose suffixes begin with ``pattern``."""
        ids, prefix = list(pattern), self._prefix(len(pattern))
        low = bisect_left(self.order, ids, key=prefix)
        return low, bisect_right(self.order, ids, lo=low, key=prefix)

    def _prefix(self, size: int) -> Callable[[int], list[int]]:
        """Return a function from the start of a suffix to its first ``size`` tokens."""
        return lambda start: self.tokens[start : int(start) + size].tolist()

    def longest(self, ending: Sequence[int], min_length: int, max_length: int) -> int:
        """Return the length of the longest suffix of ``ending`` that something follows here, 0 without one."""
        longest = min(max_length, len(ending))
        if longest < min_length or not self._is_continued(ending[-min_length:]):
            return 0
        longer = range(min_length + 1, longest + 1)  # the longer a suffix, the rarer it is
        return min_length + bisect_left(longer, 1, key=lambda length: not self._is_continued(ending[-length:]))

    def _is_continued(self, pattern: Sequence[int]) -> bool:
        """Return True if ``pattern`` occurs before the end of a text: its last occurrence does, as ends sort first."""
        ids, size = list(pattern), len(pattern)
        last = bisect_right(self.order, ids, key=self._prefix(size)) - 1
        if last < 0:
            return False
        *prefix, following = self._prefix(size + 1)(self.order[last]) or [END]
        return prefix == ids and following != END

    def place(self, pattern: Sequence[int]) -> _Occurrences:
        """Return the place after ``pattern``, for ``followers``."""
        low, high = self.find(pattern)
        starts = self.order[low:high]
        if high - low > _MAX_OCCURRENCES:
            starts = self.order[np.linspace(low, high - 1, _MAX_OCCURRENCES).astype(np.int64)]
        return _Occurrences(starts.astype(np.int64), len(pattern))

    def match(self, ending: Sequence[int], min_length: int, max_length: int) -> Match | None:
        """Return the longest suffix of ``ending`` that something follows here, or None."""
        length = self.longest(ending, min_length, max_length)
        return Match(self, length, self.place(ending[-length:])) if length else None

    def followers(self, place: _Occurrences) -> list[Follower]:
        starts, length = place
        if len(starts) == 1:  # most places inside a draft
            position = int(starts[0]) + length
            token = int(self.tokens[position]) if 0 <= position < len(self.tokens) else END
            is_token = 0 <= token < self._vocab_size
            return [Follower(token, 1, _Occurrences(starts, length + 1))] if is_token else []
        positions = starts + length
        tokens = np.where(positions < len(self.tokens), self.tokens.take(positions, mode="clip"), END)
        bounds = [0, *(np.flatnonzero(tokens[1:] != tokens[:-1]) + 1).tolist(), len(tokens)]
        runs = ((int(tokens[low]), low, high) for low, high in pairwise(bounds) if high > low)
        return [
            Follower(token, high - low, _Occurrences(starts[low:high], length + 1))
            for token, low, high in runs
            if 0 <= token < self._vocab_size
        ]


def join_texts(texts: Iterable[Sequence[int] | Ids]) -> Ids:
    """Concatenate texts, each followed by ``END``."""
    parts = [np.append(text, END).astype(np.int32) for text in texts]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def sort_suffixes(tokens: Ids) -> Order:
    """Return the starts of the suffixes of ``tokens`` in lexicographic order; a prefix sorts before longer suffixes.

    Uses pydivsufsort (``pip install 'draftwing[train]'``) if installed, else prefix doubling in NumPy, which takes
    several times as long and more memory.
    """
    if len(tokens) < 2:
        return np.arange(len(tokens), dtype=np.int32)
    try:
        from pydivsufsort import divsufsort
    except ImportError:
        return sort_by_doubling(tokens)
    order = np.asarray(divsufsort(np.ascontiguousarray(tokens, dtype=np.int32)))
    return order.astype(np.int32 if len(tokens) < 2**31 else np.int64, copy=False)


def sort_by_doubling(tokens: Ids) -> Order:
    """Sort by the ranks of prefixes of 1, 2, 4, ... tokens, until all of them differ (Manber and Myers, 1990)."""
    size = len(tokens)
    _, rank = np.unique(tokens, return_inverse=True)
    rank, length = rank.astype(np.int64) + 1, 1  # 0 is the rank after the end
    while True:
        second = np.zeros(size, dtype=np.int64)
        if length < size:
            second[:-length] = rank[length:]
        keys = rank * (size + 1) + second
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        new_ranks = np.concatenate([[1], ordered[1:] != ordered[:-1]]).cumsum()
        rank = np.empty(size, dtype=np.int64)
        rank[order] = new_ranks
        length *= 2
        if new_ranks[-1] == size:
            return order.astype(np.int32) if size < 2**31 else order


# --- trees -----------------------------------------------------------------------------------------------------------


def grow_tree(root: int, match: Match, max_nodes: int, max_depth: int, width: int) -> ListTree:
    """Grow the tree of a match's likeliest continuations after ``root``, best first.

    A token that followed ``times`` of ``total`` times has the probability times / total, discounted the more, the
    shorter the match (including the path's tokens) and the rarer it is. A match that occurred once counts like in
    prompt lookup. A node has up to ``width`` children, and the tree up to ``max_nodes`` nodes besides the root.
    """
    tree, serial = ListTree([root]), count()
    candidates: list[tuple[float, int, int, int, float, Follower]] = []
    node, level, reached, place = 0, 0, 1.0, match.place
    while True:
        if level < max_depth:
            followers = match.texts.followers(place)
            total = sum(follower.times for follower in followers)
            for follower in nlargest(width, followers, key=lambda follower: follower.times):
                prob = follower.times / total * (1 - 1 / (match.length + level + total))
                heappush(candidates, (-reached * prob, next(serial), node, level + 1, prob, follower))
        if not candidates or len(tree.tokens) > max_nodes:
            return tree
        negative, _, parent, level, prob, (token, _, place) = heappop(candidates)
        node, reached = len(tree.tokens), -negative
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.node_probs.append(prob)
        tree.depth, tree.score = max(tree.depth, level), tree.score + reached


# --- files: texts and their suffix arrays, mapped, for datastores and memories ---------------------------------------
#
#     8 bytes   MAGIC
#     8 bytes   the length of the header and its CRC-32, two little-endian uint32
#     header    JSON: version, the texts' tokenizer, the number of tokens of each part
#     parts     each: its tokens (int32), then the order of its suffixes (int32, from 2**31 tokens on int64)
#     blocks    the CRC-32 of every 4 MiB of the parts, uint32
#
# Each part, each half of it and the blocks begin at a multiple of 64 bytes. A file is written under another name and
# renamed when it is complete.

MAGIC, VERSION = b"DWTEXTS\n", 1
_ALIGN, BLOCK_BYTES = 64, 4 << 20
NUM_CHECKED = 64  # blocks that are checked when a file is opened: the first, the last, and evenly spaced ones


@dataclass(frozen=True)
class Store:
    path: Path
    about: Mapping[str, Any]  # its header: ``vocab_size``, ``vocab_hash`` and further fields of the writer
    parts: tuple[SuffixArray, ...]
    num_bytes: int


def _dtypes(size: int) -> tuple[np.dtype[Any], np.dtype[Any]]:
    return np.dtype("<i4"), np.dtype("<i4" if size < 2**31 else "<i8")


def _aligned(offset: int) -> int:
    return offset + -offset % _ALIGN


def write_store(path: Path, parts: Sequence[SuffixArray], about: Mapping[str, Any]) -> None:
    """Write a file; an existing one is replaced only once the new one is complete. Raises OSError."""
    header = json.dumps({**about, "version": VERSION, "sizes": [len(part) for part in parts]}).encode()
    remove_leftovers(path)
    partial = partial_name(path)
    try:
        with partial.open("w+b") as file:
            file.write(MAGIC + struct.pack("<II", len(header), zlib.crc32(header)) + header)
            begin = file.seek(_aligned(file.tell()))
            for part in parts:
                for values, dtype in zip((part.tokens, part.order), _dtypes(len(part)), strict=True):
                    file.write(np.ascontiguousarray(values, dtype).data)
                    file.seek(_aligned(file.tell()))
            file.truncate()
            file.seek(begin)
            sums = [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK_BYTES), b"")]
            file.write(np.array(sums, dtype="<u4").data)
            file.flush()
            os.fsync(file.fileno())  # else the name might reach the disk before the data
        os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def read_store(path: Path, *, whole: bool = False) -> Store:
    """Open a file, whose arrays are mapped. Raises CheckpointError if it is damaged, of another kind or version.

    By default only the header, the size and up to 64 blocks of 4 MiB are checked, else all of it.
    """
    try:
        with path.open("rb") as file:
            about, offset = _read_header(path, file)
            sizes = about["sizes"]
            end = offset + sum(_aligned(size * dtype.itemsize) for size in sizes for dtype in _dtypes(size))
            num_blocks, actual = -(-(end - offset) // BLOCK_BYTES), path.stat().st_size
            num_bytes = end + 4 * num_blocks
            if actual != num_bytes:
                raise _damaged(path, f"it should have {num_bytes:,} bytes, and has {actual:,}")
            file.seek(end)
            sums = np.frombuffer(file.read(), dtype="<u4")
            spaced = np.linspace(0, num_blocks - 1, min(num_blocks, NUM_CHECKED)).astype(int).tolist()
            for number in range(num_blocks) if whole else sorted(set(spaced)):
                start = file.seek(offset + number * BLOCK_BYTES)
                if zlib.crc32(file.read(min(BLOCK_BYTES, end - start))) != sums[number]:
                    raise _damaged(path, f"block {number} of {num_blocks} is not what was written")
        parts = []
        for size in sizes:
            arrays = []
            for dtype in _dtypes(size):
                arrays.append(np.memmap(path, dtype, "r", offset, (size,)) if size else np.zeros(0, dtype))
                offset += _aligned(size * dtype.itemsize)
            parts.append(SuffixArray(arrays[0], arrays[1], about["vocab_size"]))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}): check the path and its permissions") from error
    return Store(path, about, tuple(parts), num_bytes)


def _read_header(path: Path, file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the header, and the offset of the first part."""
    start = file.read(16)
    if start[:8] != MAGIC:
        raise CheckpointError(
            f"{path}: expected a file that `draftwing datastore build` or draft 'suffix' has written, found another "
            f"one: check the path"
        )
    length, crc = struct.unpack("<II", start[8:]) if len(start) == 16 else (0, 0)
    header = file.read(length)
    if not header or len(header) != length or zlib.crc32(header) != crc:
        raise _damaged(path, "its header is not what was written")
    about = json.loads(header)
    if about["version"] != VERSION:
        raise CheckpointError(
            f"{path}: expected version {VERSION} of the format, found {shown(about['version'])}: update Draftwing, or "
            f"make the file again"
        )
    return about, _aligned(16 + length)


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: this file is damaged ({reason}): copy it again, or delete it and recreate it")


def check_tokenizer(
    path: Path, about: Mapping[str, Any], tokenizer: Tokenizer | None, vocab_size: int, fix: str
) -> None:
    """Raise TokenizerError, ending in ``fix``, unless a file's ids are the target's; some are known by number only."""
    theirs, ours = about["vocab_hash"], "" if tokenizer is None else tokenizer.vocab_hash
    if (theirs and ours and theirs != ours) or about["vocab_size"] > vocab_size:
        raise TokenizerError(
            f"{path}: holds ids of the tokenizer of {about['target']} ({about['vocab_size']:,} tokens), which is not "
            f"this target's ({vocab_size:,}): {fix}"
        )


# --- datastores: a folder with such a file, and a config.json like other drafts --------------------------------------

DATASTORE_KIND = "rest"
TEXTS_FILE = "texts.bin"


def check_new_datastore(folder: Path) -> None:
    """Raise ConfigError if the folder exists, before any work is done. Removes the leftovers of killed writers."""
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder}: is there already: choose another folder, or delete it first")
    remove_leftovers(folder)


def write_datastore(folder: Path, texts: SuffixArray, about: Mapping[str, Any]) -> Store:
    """Write a new folder, under another name until it is complete.

    ``about`` holds ``target``, ``vocab_hash``, ``vocab_size``, and any further fields.
    """
    check_new_datastore(folder)
    identity = hashlib.sha256(np.ascontiguousarray(texts.tokens).data).hexdigest()[:16]
    num_texts = int((texts.tokens == END).sum())
    about = {**about, "num_texts": num_texts, "num_tokens": len(texts) - num_texts, "identity": identity}
    with writing(folder), new_folder(folder) as partial:
        write_store(partial / TEXTS_FILE, [texts], about)
        config = {"draftwing": {"kind": DATASTORE_KIND, **about}}
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return read_datastore(folder)


def read_datastore(folder: Path, *, whole: bool = False) -> Store:
    """Open a datastore; see ``read_store``. Raises CheckpointError if it is none, or damaged."""
    block = read_config(folder).get("draftwing")
    if not isinstance(block, dict) or block.get("kind") != DATASTORE_KIND:
        raise CheckpointError(f"{folder}: is no datastore: give a folder that `draftwing datastore build` has written")
    store = read_store(folder / TEXTS_FILE, whole=whole)
    if len(store.parts) != 1:
        raise CheckpointError(f"{store.path}: expected one part, found {len(store.parts)}: it is not a datastore's")
    return store
