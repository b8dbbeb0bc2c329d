"""Texts and their suffix arrays in one file, which is mapped, not read: the format of datastores and memories.

A file is

    8 bytes   MAGIC
    8 bytes   the length of the header and its CRC-32, two little-endian uint32
    header    JSON: version, what the texts are, the number of tokens of each part
    parts     each: its tokens (int32), then the order of its suffixes (int32, from 2**31 tokens on int64)
    blocks    the CRC-32 of every 4 MiB of the parts, uint32

where each part, each half of it and the blocks begin at a multiple of 64 bytes. It is written elsewhere and renamed
when it is whole.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import shutil
import struct
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from draftwing.drafters.retrieval.array import SuffixArray
from draftwing.errors import CheckpointError, TokenizerError, shown
from draftwing.text.tokenizer import Tokenizer

__all__ = ["Store", "check_tokenizer", "identity_of", "partial_name", "read_store", "sweep", "write_store"]

MAGIC, VERSION = b"DWTEXTS\n", 1
_ALIGN, _BLOCK = 64, 4 << 20
_CHECKED = 64  # blocks that are checked when a file is opened: the first and last, and at even distances between them

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Store:
    """A file that was opened.

    Attributes:
        about: what its header says: ``vocab_size``, ``vocab_hash`` and whatever else was written there.
    """

    path: Path
    about: Mapping[str, Any]
    parts: tuple[SuffixArray, ...]
    num_bytes: int


def identity_of(parts: Sequence[SuffixArray]) -> str:
    """16 hexadecimal digits that stand for the texts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.ascontiguousarray(part.tokens).data)
    return digest.hexdigest()[:16]


def write_store(path: Path, parts: Sequence[SuffixArray], about: Mapping[str, Any]) -> None:
    """Write a file in place of one that is there; whatever goes wrong, that one stays.

    Raises:
        OSError: it cannot be written.
    """
    header = {**about, "version": VERSION, "sizes": [len(part) for part in parts]}
    said = json.dumps(header).encode()
    sweep(path)
    partial = partial_name(path)
    try:
        with partial.open("wb") as file:
            file.write(MAGIC + struct.pack("<II", len(said), zlib.crc32(said)) + said)
            blocks = _Blocks(file)
            for part in parts:
                blocks.write(part.tokens, np.dtype("<i4"))
                blocks.write(part.order, _order_type(len(part)))
            blocks.finish()
            file.flush()
            os.fsync(file.fileno())  # or the name might reach the disk before the numbers
        os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def partial_name(path: Path) -> Path:
    """Where a file or folder is written before it is whole; another name for each writer."""
    return path.with_name(f".{path.name}.{next(_NUMBERS)}.{os.getpid()}.partial")


def sweep(path: Path) -> None:
    """Remove what writers of ``path`` that were killed have left behind."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        if not _is_running(leftover.suffixes[-2].removeprefix(".")):
            with suppress(OSError):
                leftover.unlink() if leftover.is_file() else shutil.rmtree(leftover)


def _is_running(process: str) -> bool:
    if os.name != "posix" or not process.isdigit():
        return True
    try:
        os.kill(int(process), 0)
    except (OSError, OverflowError) as error:
        return not isinstance(error, ProcessLookupError)
    return True


class _Blocks:
    """Writes arrays at their places and sums up every block."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sum, self._filled, self._sums = file, 0, 0, list[int]()
        file.write(bytes(-file.tell() % _ALIGN))

    def write(self, values: NDArray[Any], dtype: np.dtype[Any]) -> None:
        """An array, and zeros up to the next place."""
        step = _BLOCK // dtype.itemsize
        for start in range(0, len(values), step):
            self._put(np.ascontiguousarray(values[start : start + step], dtype=dtype).tobytes())
        self._put(bytes(-len(values) * dtype.itemsize % _ALIGN))

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        while data:
            now, data = data[: _BLOCK - self._filled], data[_BLOCK - self._filled :]
            self._sum, self._filled = zlib.crc32(now, self._sum), self._filled + len(now)
            if self._filled == _BLOCK:
                self._close()

    def _close(self) -> None:
        self._sums.append(self._sum)
        self._sum = self._filled = 0

    def finish(self) -> None:
        """The sums."""
        if self._filled:
            self._close()
        self._file.write(np.array(self._sums, dtype="<u4").tobytes())


def _order_type(size: int) -> np.dtype[Any]:
    return np.dtype("<i4" if size < 2**31 else "<i8")


def read_store(path: Path, *, whole: bool = False) -> Store:
    """Open a file. Its numbers are mapped, and read when they are looked at.

    Args:
        whole: check all of it. Else the header, the size and up to 64 blocks of 4 MiB are.

    Raises:
        CheckpointError: no such file, one of another kind, of a newer version, or a damaged one.
    """
    try:
        with path.open("rb") as file:
            about, begin = _read_header(path, file)
            sizes = about["sizes"]
            places, end = _places(sizes, begin)
            num_bytes = end + 4 * -(-(end - begin) // _BLOCK)
            found = path.stat().st_size
            if found != num_bytes:
                raise _damaged(path, f"it should have {num_bytes:,} bytes, and has {found:,}")
            _check_blocks(path, file, begin, end, whole=whole)
        parts = []
        for size, (tokens, order) in zip(sizes, places, strict=True):
            mapped = [
                np.memmap(path, dtype, "r", offset, (size,)) if size else np.zeros(0, dtype)
                for dtype, offset in ((np.dtype("<i4"), tokens), (_order_type(size), order))
            ]
            parts.append(SuffixArray(mapped[0], mapped[1], about["vocab_size"]))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}): check the path and its permissions") from error
    return Store(path, about, tuple(parts), num_bytes)


def _read_header(path: Path, file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header, and where the parts begin."""
    start = file.read(16)
    if start[:8] != MAGIC:
        raise CheckpointError(
            f"{path}: expected a file that `draftwing datastore build` or draft 'suffix' has written, found another "
            f"one: check the path"
        )
    length, crc = struct.unpack("<II", start[8:]) if len(start) == 16 else (0, 0)
    said = file.read(length)
    if not said or len(said) != length or zlib.crc32(said) != crc:
        raise _damaged(path, "its header is not what was written")
    about = json.loads(said)
    if about["version"] != VERSION:
        raise CheckpointError(
            f"{path}: expected version {VERSION} of the format, found {shown(about['version'])}: update Draftwing, or "
            f"make the file again"
        )
    return about, 16 + length + -(16 + length) % _ALIGN


def _places(sizes: Sequence[int], begin: int) -> tuple[list[tuple[int, int]], int]:
    """Where the tokens and the order of each part begin, and where all parts end."""
    found = []
    for size in sizes:
        order = begin + 4 * size + -4 * size % _ALIGN
        found.append((begin, order))
        num_bytes = _order_type(size).itemsize * size
        begin = order + num_bytes + -num_bytes % _ALIGN
    return found, begin


def _check_blocks(path: Path, file: BinaryIO, begin: int, end: int, *, whole: bool) -> None:
    count = -(-(end - begin) // _BLOCK)
    file.seek(end)
    sums = np.frombuffer(file.read(4 * count), dtype="<u4")
    chosen = range(count) if whole else sorted({*np.linspace(0, count - 1, min(count, _CHECKED)).astype(int).tolist()})
    for number in chosen:
        file.seek(begin + number * _BLOCK)
        data = file.read(min(_BLOCK, end - begin - number * _BLOCK))
        if zlib.crc32(data) != sums[number]:
            raise _damaged(path, f"block {number} of {count} is not what was written")


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: this file is damaged ({why}): copy it again, or delete it and make it anew")


def check_tokenizer(
    path: Path, about: Mapping[str, Any], tokenizer: Tokenizer | None, vocab_size: int, fix: str
) -> None:
    """Raise TokenizerError unless a file's ids mean what the target's do.

    Args:
        tokenizer: the target's; without one only the number of ids is compared.
        vocab_size: of the target.
        fix: what to do otherwise.
    """
    theirs, ours = about["vocab_hash"], "" if tokenizer is None else tokenizer.vocab_hash
    if (theirs and ours and theirs != ours) or about["vocab_size"] > vocab_size:
        raise TokenizerError(
            f"{path}: holds ids of the tokenizer of {about['target']} ({about['vocab_size']:,} tokens), which is not "
            f"this target's ({vocab_size:,}): {fix}"
        )
