"""Read the header of a GGUF file: metadata and the place of every tensor, checked against the file's size.

A file may come from anywhere: no count, length, offset or shape in it is trusted. Nothing allocates more than a small
multiple of the file, and every failure names the file, the key or tensor, and the value. Files are memory-mapped;
``gguf_weights`` reads the tensors.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftwing.errors import CheckpointError, ConfigError, UnsupportedError, shown

MAGIC = b"GGUF"
ADVICE = "Download the file again, or convert the model again."
_DAMAGED = "The file is truncated or damaged: download it again."
_MAX_ENTRIES = 1 << 16  # pairs or tensors: real files have some thousands at most
_MAX_NAME_BYTES = 1 << 10
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_LENGTH = struct.Struct("<Q").unpack_from
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)")


@dataclass(frozen=True)
class StringArray:
    """An array of strings in the file: ``count`` of them from byte ``start``, checked but not decoded."""

    data: Any
    start: int
    count: int

    def __iter__(self) -> Iterator[bytes]:
        at = self.start
        for _ in range(self.count):
            (length,) = _LENGTH(self.data, at)
            yield self.data[at + 8 : at + 8 + length]
            at += 8 + length

    def __repr__(self) -> str:
        return f"an array of {self.count} strings"


def shortest_decimal(value: float) -> float:
    """Return the shortest decimal that rounds to this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


class Metadata:
    """The key-value pairs of a file: ints, floats, bools, ``bytes`` (a string), numpy arrays or ``StringArray``.

    All look-ups raise ConfigError for a value of another type, and for a missing key without a default.
    """

    def __init__(self, pairs: dict[str, Any], where: str) -> None:
        self.pairs, self.where = pairs, where
        self.read: set[str] = set()  # keys that were looked up

    def __contains__(self, key: str) -> bool:
        return key in self.pairs

    def _get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        value = self.pairs.get(key, default)
        if value is None:
            raise ConfigError(f"{self.where}: required metadata `{key}` is missing. {ADVICE}")
        return value

    def wrong(self, key: str, expected: str) -> ConfigError:
        """Return the error to raise if the value of ``key`` is not what was expected."""
        value = self.pairs[key]
        found = f"{value.size} of type {value.dtype}" if isinstance(value, np.ndarray) else shown(value)
        return ConfigError(f"{self.where}: metadata `{key}` must be {expected}, found {found}. {ADVICE}")

    def unsupported(self, text: str) -> UnsupportedError:
        """Return the error to raise for a model that cannot run from its file."""
        return UnsupportedError(f"{self.where}: {text} Use the model's Hugging Face folder instead.")

    def integer(self, key: str, default: int | None = None, *, minimum: int = 0, maximum: int = 2**31 - 1) -> int:
        """Return an integer in a range; an array with one for each layer must hold the same for all."""
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
            if (value != value[0]).any():
                raise UnsupportedError(
                    f"{self.where}: `{key}` differs between layers. Use a model whose layers are alike."
                )
            value = int(value[0])
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.wrong(key, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.wrong(key, "a finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, None if default is None else default.encode())
        try:
            return str(value.decode())
        except (AttributeError, UnicodeDecodeError):
            raise self.wrong(key, "a UTF-8 string") from None

    def texts(self, key: str, *, max_bytes: int = 1 << 16) -> list[str]:
        """Return an array of UTF-8 strings, each of at most ``max_bytes``."""
        strings = self._get(key)
        if not isinstance(strings, StringArray):
            raise self.wrong(key, "an array of strings")
        texts = []
        for index, raw in enumerate(strings):
            what = f"{self.where}: string {index} of `{key}` must"
            if len(raw) > max_bytes:
                raise ConfigError(f"{what} have at most {max_bytes} bytes, found {len(raw)}. {ADVICE}")
            try:
                texts.append(raw.decode())
            except UnicodeDecodeError as error:
                raise ConfigError(f"{what} be UTF-8, found {shown(raw)} ({error.reason}). {ADVICE}") from None
        return texts

    def numbers(self, key: str, kinds: str, length: int) -> list[Any] | None:
        """Return an array of ``length`` numbers whose numpy kind is in ``kinds``; None if the key is missing."""
        self.read.add(key)
        value = self.pairs.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or value.size != length:
            raise self.wrong(key, f"an array of {length} numbers")
        return list(value.tolist())


@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor."""

    name: str
    kind: str  # its format, as ggml calls it
    shape: tuple[int, ...]  # outermost dimension first, as in PyTorch
    part: int  # index of its file in a split model
    start: int  # its first byte in that file
    num_bytes: int


class GgufFile:
    """An open GGUF model: one file, or all files (``paths``, in memory ``maps``) of a split one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.paths: list[Path] = []
        self.maps: list[mmap.mmap] = []
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata = self.read_part(path)

    def read_part(self, path: Path) -> Metadata:
        """Map another file, add its tensors and return its metadata."""
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = file.read(64)
                if start[:4] != MAGIC:
                    found = f"one that begins with {shown(start[:8])}" if start else "an empty one"
                    if start.startswith(b"version https://git-lfs"):
                        found = "a Git LFS pointer to one (run `git lfs pull`)"
                    raise CheckpointError(f"{path}: expected a GGUF file, found {found}. Download it again.")
                self.maps.append(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened ({error}). Check the path and its permissions.") from error
        try:
            header = _Header(self.maps[-1], size, path)
            num_tensors, num_pairs = header.counts()
            metadata = Metadata(header.pairs(num_pairs), str(path))
            part = len(self.paths)
            if part and metadata.integer("split.no", -1, minimum=-1, maximum=10000) != part:
                raise CheckpointError(f"{path}: expected part {part} of a split model (`split.no`). Download it again.")
            for name, info in header.tensors(num_tensors, metadata, part).items():
                if name in self.tensors:
                    raise CheckpointError(f"{path}: an earlier part has tensor {name}, too. Download all parts again.")
                self.tensors[name] = info
        except BaseException:
            self.close()
            raise
        self.paths.append(path)
        return metadata

    def close(self) -> None:
        while self.maps:
            self.maps.pop().close()


def is_gguf(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def open_file(path: Path) -> GgufFile:
    """Map a GGUF file and read its header; if it is the first part of a split model, all parts."""
    with ExitStack() as on_error:
        file = on_error.enter_context(closing(GgufFile(path)))
        count = file.metadata.integer("split.count", 0, maximum=10000)
        if count > 1:
            _read_other_parts(file, count)
        on_error.pop_all()
    return file


def _read_other_parts(file: GgufFile, count: int) -> None:
    match = _PART.fullmatch(file.path.name)
    if match is None or int(match[3]) != count:
        raise CheckpointError(
            f"{file.path}: one of {count} files of a split model must be called like model-00001-of-{count:05}.gguf. "
            "Restore the files' original names."
        )
    paths = [file.path.with_name(f"{match[1]}-{part:05}-of-{match[3]}{match[4]}") for part in range(1, count + 1)]
    if int(match[2]) != 1:
        raise CheckpointError(f"{file.path}: this is a later part of a split model. Give its first file, {paths[0]}.")
    for part, path in enumerate(paths[1:], 2):
        if not path.exists():
            raise CheckpointError(f"{path}: part {part} of {count} of a split model is missing. Download it.")
        file.read_part(path)
    expected = file.metadata.integer("split.tensors.count", len(file.tensors))
    if expected != len(file.tensors):
        raise CheckpointError(
            f"{file.path}: expected {expected} tensors in all {count} parts, found {len(file.tensors)}. Download them "
            "again from one place."
        )


class _Header:
    """Reads the header from its start; ``at`` is the next byte."""

    def __init__(self, data: mmap.mmap, size: int, path: Path) -> None:
        self.data, self.size, self.path, self.at = data, size, path, 4

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}. {_DAMAGED}")

    def counts(self) -> list[int]:
        """Return the number of tensors and of pairs."""
        version = self.number("I", "the version")
        if version in (1 << 24, 2 << 24, 3 << 24):
            raise UnsupportedError(f"{self.path}: GGUF file for big-endian processors. Download the usual one.")
        if version not in (2, 3):
            raise UnsupportedError(
                f"{self.path}: GGUF version {version} is not supported; expected 2 or 3. Convert the model again with "
                "a current llama.cpp."
            )
        counts = []
        for what, min_bytes in (("tensors", 32), ("metadata pairs", 13)):
            count = self.number("Q", f"the number of {what}")
            maximum = min(_MAX_ENTRIES, self.size // min_bytes)
            if count > maximum:
                raise self.damaged(f"{count} {what}, and a file of {self.size} bytes can hold at most {maximum}")
            counts.append(count)
        return counts

    def take(self, count: int, what: str) -> int:
        """Skip ``count`` bytes, which must be in the file, and return their start."""
        start = self.at
        if count > self.size - start:
            raise self.damaged(f"{what} must lie within the file, found {count} bytes at byte {start} of {self.size}")
        self.at = start + count
        return start

    def number(self, code: str, what: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.take(struct.calcsize(f"<{code}"), what))[0]

    def string(self, what: str, max_bytes: int = 1 << 64) -> bytes:
        length = self.number("Q", f"the length of {what}")
        if length > max_bytes:
            raise self.damaged(f"{what} must have at most {max_bytes} bytes, found {length}")
        start = self.take(length, what)
        return self.data[start : start + length]

    def name(self, what: str) -> str:
        raw = self.string(what, _MAX_NAME_BYTES)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.damaged(f"{what} must be UTF-8, found {shown(raw)}") from None

    def pairs(self, count: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        for index in range(count):
            key = self.name(f"the key of metadata pair {index}")
            if key in pairs:
                raise self.damaged(f"metadata `{key:.60}` occurs twice")
            pairs[key] = self._value(self.number("I", f"the type of `{key:.60}`"), f"metadata `{key:.60}`")
        return pairs

    def _value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _SCALARS:
            raise self.damaged(f"{what} has the unknown type {kind}")
        if kind == _BOOL:
            return bool(self._bools(np.uint8(self.number("B", what)), what))
        value = self.number(_SCALARS[kind], what)
        return shortest_decimal(value) if kind == _FLOAT32 else value

    def _bools(self, values: Any, what: str) -> Any:
        if np.any(values > 1):
            raise self.damaged(f"{what} must be true or false, 1 or 0")
        return values.astype(bool)

    def _array(self, what: str) -> Any:
        kind, count = self.number("I", f"the type of {what}"), self.number("Q", f"the length of {what}")
        if kind == _STRING:
            # Every string has a length of 8 bytes: check the count before looping over it.
            if count > (self.size - self.at) // 8:
                self.take(8 * count, what)
            start = at = self.at
            try:
                for _ in range(count):  # hundreds of thousands: as little work as possible for each
                    at += 8 + _LENGTH(self.data, at)[0]
            except (struct.error, OverflowError):
                at = self.size + 1
            self.take(at - start, what)
            return StringArray(self.data, start, count)
        if kind not in _SCALARS:
            nested = "an array of arrays, which models do not have" if kind == _ARRAY else f"of the unknown type {kind}"
            raise self.damaged(f"{what} is {nested}")
        dtype = np.dtype(np.uint8 if kind == _BOOL else f"<{_SCALARS[kind]}")
        start = self.take(count * dtype.itemsize, what)
        values = np.frombuffer(self.data[start : self.at], dtype)
        return self._bools(values, what) if kind == _BOOL else values

    def tensors(self, count: int, metadata: Metadata, part: int) -> dict[str, TensorInfo]:
        """Return the tensors by name, each within the file and none over another."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # here: the package takes a while

        entries = []
        for index in range(count):
            name = self.name(f"the name of tensor {index}")
            rank = self.number("I", f"the rank of {name:.60}")
            if not 1 <= rank <= 4:
                raise self.damaged(f"tensor {name:.60} has {rank} dimensions, not 1 to 4")
            shape = tuple(self.number("Q", f"the shape of {name:.60}") for _ in range(rank))[::-1]
            entries.append((name, shape, self.number("I", f"the format of {name:.60}"), self.number("Q", "an offset")))
        alignment = metadata.integer("general.alignment", 32, minimum=1, maximum=1 << 20)
        if alignment & (alignment - 1):
            raise metadata.wrong("general.alignment", "a power of two")
        begin = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, number, offset in entries:
            tensor = f"tensor {name:.60}"
            if name in tensors:
                raise self.damaged(f"{tensor} occurs twice")
            try:
                kind = GGMLQuantizationType(number)
                inputs, num_bytes = GGML_QUANT_SIZES[kind]
            except (ValueError, KeyError):
                raise UnsupportedError(
                    f"{self.path}: {tensor} has the unknown format {number}. Update the gguf package, or take a file "
                    "in another format."
                ) from None
            if shape[-1] % inputs:
                raise self.damaged(
                    f"{tensor} has rows of {shape[-1]} numbers, no whole blocks of {inputs} ({kind.name})"
                )
            num_bytes = num_bytes * math.prod(shape) // inputs
            if not num_bytes or offset % alignment or begin + offset + num_bytes > self.size:
                raise self.damaged(
                    f"{tensor} must have a size and lie within the file of {self.size} bytes, aligned to {alignment}; "
                    f"found shape {list(shape)} ({kind.name}), {num_bytes} bytes at {begin} + {offset}"
                )
            tensors[name] = TensorInfo(name, kind.name, shape, part, begin + offset, num_bytes)
        last: TensorInfo | None = None
        for info in sorted(tensors.values(), key=lambda info: info.start):
            if last is not None and last.start + last.num_bytes > info.start:
                raise self.damaged(f"tensors {last.name:.60} and {info.name:.60} overlap")
            last = info
        return tensors
