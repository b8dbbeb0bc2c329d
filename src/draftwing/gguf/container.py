"""The container: header, metadata and tensors of a GGUF file, with every number checked against the file's size.

A file comes from elsewhere. Nothing in it is believed: no count, length, offset or shape makes this allocate more
than a small multiple of the file, and what cannot be is refused by name. The file is memory-mapped, tensors are read
by whoever wants them (``weights``).
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftwing.errors import CheckpointError, UnsupportedError, shown
from draftwing.gguf.metadata import Metadata, Texts, as_written

__all__ = ["MAGIC", "GgufFile", "TensorInfo", "is_gguf", "open_file"]

MAGIC = b"GGUF"
_MOST = 1 << 16  # pairs or tensors: real files have some thousands at most
_LONGEST_NAME = 1 << 10
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_LENGTH = struct.Struct("<Q").unpack_from
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)")
_AGAIN = "The file is truncated or damaged: download it again."


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        kind: its format, as ggml calls it.
        shape: outermost first, as in PyTorch.
        part: of a split model, the file that it is in.
        start: its first byte in that file.
        num_bytes: all of it.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    part: int
    start: int
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """Of one row: what lies along the innermost dimension."""
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return self.num_bytes // rows


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


class GgufFile:
    """An open GGUF model: one file, or all files of a split one.

    Attributes:
        path: the (first) file.
        paths: all files.
        metadata: its key-value pairs.
        tensors: by name.
        maps: the memory-mapped files.
    """

    def __init__(self, path: Path, metadata: Metadata, tensors: dict[str, TensorInfo], mapped: mmap.mmap) -> None:
        self.path, self.paths, self.metadata, self.tensors, self.maps = path, [path], metadata, tensors, [mapped]

    def bytes_of(self, info: TensorInfo) -> bytes:
        """A copy of a small tensor's bytes."""
        return self.maps[info.part][info.start : info.start + info.num_bytes]

    def close(self) -> None:
        """Unmap the files."""
        while self.maps:
            self.maps.pop().close()


def open_file(path: Path) -> GgufFile:
    """Map a GGUF file and read its header; of a split model, all of its files.

    Raises:
        CheckpointError: no such file, no GGUF, truncated or damaged, or a part is missing.
        UnsupportedError: a version or a format of tensors that this does not know.
    """
    metadata, tensors, mapped = _read(path, 0)
    found = GgufFile(path, metadata, tensors, mapped)
    try:
        count = metadata.integer("split.count", 0, maximum=10000)
        if count > 1:
            _add_parts(found, count)
    except BaseException:
        found.close()
        raise
    return found


def _add_parts(file: GgufFile, count: int) -> None:
    match = _PART.fullmatch(file.path.name)
    if match is None or int(match[3]) != count:
        raise CheckpointError(
            f"{file.path}: one of {count} files of a split model must be called like model-00001-of-{count:05}.gguf. "
            "Give the files their own names back."
        )
    if int(match[2]) != 1:
        first = file.path.with_name(f"{match[1]}-00001-of-{match[3]}{match[4]}")
        raise CheckpointError(f"{file.path}: this is a later part of a split model. Give its first file, {first}.")
    for part in range(1, count):
        path = file.path.with_name(f"{match[1]}-{part + 1:05}-of-{match[3]}{match[4]}")
        if not path.exists():
            raise CheckpointError(f"{path}: part {part + 1} of {count} of a split model is missing. Download it.")
        metadata, tensors, mapped = _read(path, part)
        file.maps.append(mapped)
        file.paths.append(path)
        if metadata.integer("split.no", -1, minimum=-1, maximum=10000) != part:
            raise CheckpointError(f"{path}: expected part {part} of a split model (`split.no`). Download it again.")
        for name, info in tensors.items():
            if name in file.tensors:
                raise CheckpointError(f"{path}: tensor {name} is in an earlier part, too. Download all parts again.")
            file.tensors[name] = info
    wanted = file.metadata.integer("split.tensors.count", len(file.tensors))
    if wanted != len(file.tensors):
        raise CheckpointError(
            f"{file.path}: expected {wanted} tensors in all {count} parts, found {len(file.tensors)}. Download them "
            "again from one place."
        )


def _read(path: Path, part: int) -> tuple[Metadata, dict[str, TensorInfo], mmap.mmap]:
    """One file: its metadata, its tensors, and its memory."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(4) != MAGIC:
                raise CheckpointError(f"{path}: expected a GGUF file, found {_what_else(path)}. Download it again.")
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error}). Check the path and its permissions.") from error
    try:
        header = _Header(mapped, size, path)
        num_tensors, num_pairs = header.begin()
        metadata = Metadata(header.pairs(num_pairs), str(path))
        infos = header.tensors(num_tensors)
        alignment = metadata.integer("general.alignment", 32, minimum=1, maximum=1 << 20)
        if alignment & (alignment - 1):
            raise metadata.wrong("general.alignment", "a power of two")
        begin = -(-header.at // alignment) * alignment
        return metadata, _placed(infos, begin, alignment, size, (path, part)), mapped
    except BaseException:
        mapped.close()
        raise


def _what_else(path: Path) -> str:
    with open(path, "rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer to one (run `git lfs pull`)"
    return f"one that begins with {shown(start[:8])}" if start else "an empty one"


class _Header:
    """Reads the header from its start; ``at`` is the next byte."""

    def __init__(self, data: mmap.mmap, size: int, path: Path) -> None:
        self.data, self.size, self.path, self.at = data, size, path, 4

    def begin(self) -> tuple[int, int]:
        """Number of tensors, number of pairs."""
        version = self.number("I", "the version")
        if version in (1 << 24, 2 << 24, 3 << 24):
            raise UnsupportedError(
                f"{self.path}: this GGUF file is big-endian, for other processors. Download the usual one."
            )
        if version not in (2, 3):
            raise UnsupportedError(
                f"{self.path}: GGUF version {version} is not supported; expected 2 or 3. Convert the model again with "
                "a current llama.cpp."
            )
        counts = [self.number("Q", f"the number of {what}") for what in ("tensors", "metadata pairs")]
        for count, what, least in zip(counts, ("tensors", "metadata pairs"), (32, 13), strict=True):
            if count > _MOST or count * least > self.size:
                raise CheckpointError(
                    f"{self.path}: the header announces {count} {what}; a file of {self.size} bytes can hold at most "
                    f"{min(_MOST, self.size // least)}. {_AGAIN}"
                )
        return counts[0], counts[1]

    def take(self, count: int, what: str) -> int:
        """Skip ``count`` bytes, which must be there; where they begin."""
        start = self.at
        if count > self.size - start:
            raise CheckpointError(
                f"{self.path}: {what} must lie within the file, found {count} bytes at byte {start} of {self.size}. "
                f"{_AGAIN}"
            )
        self.at = start + count
        return start

    def number(self, code: str, what: str) -> Any:
        """One little-endian number."""
        return struct.unpack_from(f"<{code}", self.data, self.take(struct.calcsize(f"<{code}"), what))[0]

    def string(self, what: str, longest: int | None = None) -> bytes:
        """A length and as many bytes."""
        length = self.number("Q", f"the length of {what}")
        if longest is not None and length > longest:
            raise CheckpointError(f"{self.path}: {what} must have at most {longest} bytes, found {length}. {_AGAIN}")
        start = self.take(length, what)
        return self.data[start : start + length]

    def name(self, what: str) -> str:
        """A short string in UTF-8."""
        raw = self.string(what, _LONGEST_NAME)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: {what} must be UTF-8, found {shown(raw)}. {_AGAIN}") from None

    def pairs(self, count: int) -> dict[str, Any]:
        """All metadata."""
        found: dict[str, Any] = {}
        for index in range(count):
            key = self.name(f"the key of metadata pair {index}")
            if key in found:
                raise CheckpointError(f"{self.path}: metadata `{key:.60}` is there twice. {_AGAIN}")
            found[key] = self._value(self.number("I", f"the type of `{key:.60}`"), f"metadata `{key:.60}`")
        return found

    def _value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path}: {what} has the unknown type {kind}. {_AGAIN}")
        if kind == _BOOL:
            return self._bools(self.number("B", what), what) > 0
        found = self.number(_SCALARS[kind], what)
        return as_written(found) if kind == _FLOAT32 else found

    def _bools(self, values: Any, what: str) -> Any:
        if np.any(np.asarray(values) > 1):
            raise CheckpointError(f"{self.path}: {what} must be true or false, 1 or 0. {_AGAIN}")
        return values

    def _array(self, what: str) -> Any:
        kind, count = self.number("I", f"the type of {what}"), self.number("Q", f"the length of {what}")
        if kind == _STRING:
            # Each has a length of 8 bytes: the count is checked before anything is done so often.
            if count > (self.size - self.at) // 8:
                self.take(8 * count, what)
            start = at = self.at
            try:
                for _ in range(count):  # hundreds of thousands: as little as can be for each
                    at += 8 + _LENGTH(self.data, at)[0]
            except (struct.error, OverflowError):
                at = self.size + 1
            self.take(at - start, what)
            return Texts(self.data, start, count)
        if kind not in _SCALARS:
            nested = "an array of arrays, which models do not have" if kind == _ARRAY else f"of the unknown type {kind}"
            raise CheckpointError(f"{self.path}: {what} is {nested}. {_AGAIN}")
        dtype = np.dtype(np.uint8 if kind == _BOOL else f"<{_SCALARS[kind]}")
        start = self.take(count * dtype.itemsize, what)
        values = np.frombuffer(self.data[start : self.at], dtype)
        return self._bools(values, what).astype(bool) if kind == _BOOL else values

    def tensors(self, count: int) -> list[tuple[str, tuple[int, ...], int, int]]:
        """Of each tensor: name, shape (outermost first), number of its format, offset."""
        found = []
        for index in range(count):
            name = self.name(f"the name of tensor {index}")
            rank = self.number("I", f"the rank of {name:.60}")
            if not 1 <= rank <= 4:
                raise CheckpointError(f"{self.path}: tensor {name:.60} has {rank} dimensions, not 1 to 4. {_AGAIN}")
            shape = tuple(self.number("Q", f"the shape of {name:.60}") for _ in range(rank))[::-1]
            found.append((name, shape, self.number("I", f"the format of {name:.60}"), self.number("Q", "an offset")))
        return found


def _placed(
    infos: list[tuple[str, tuple[int, ...], int, int]], begin: int, alignment: int, size: int, file: tuple[Path, int]
) -> dict[str, TensorInfo]:
    """Tensors by name, each within the file and none over another."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # here: the package takes a while

    path, part = file
    found: dict[str, TensorInfo] = {}
    for name, shape, number, offset in infos:
        short = f"{path}: tensor {name:.60}"
        if name in found:
            raise CheckpointError(f"{short} is there twice. {_AGAIN}")
        try:
            kind = GGMLQuantizationType(number)
            inputs, num_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise UnsupportedError(
                f"{short} has the unknown format {number}. Update the gguf package, or take a file in another format."
            ) from None
        if shape[-1] % inputs:
            raise CheckpointError(
                f"{short} has rows of {shape[-1]} numbers, no whole blocks of {inputs} ({kind.name}). {_AGAIN}"
            )
        for length in shape:
            num_bytes *= length
        num_bytes //= inputs
        if not num_bytes or offset % alignment or begin + offset + num_bytes > size:
            raise CheckpointError(
                f"{short} must have a size and lie within the file of {size} bytes, aligned to {alignment}; found "
                f"shape {list(shape)} ({kind.name}), {num_bytes} bytes at {begin} + {offset}. {_AGAIN}"
            )
        found[name] = TensorInfo(name, kind.name, shape, part, begin + offset, num_bytes)
    last: TensorInfo | None = None
    for info in sorted(found.values(), key=lambda info: info.start):
        if last is not None and last.start + last.num_bytes > info.start:
            raise CheckpointError(f"{path}: tensors {last.name:.60} and {info.name:.60} overlap. {_AGAIN}")
        last = info
    return found
