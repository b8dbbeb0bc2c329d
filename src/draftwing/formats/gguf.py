"""What a GGUF file says of itself: its key-value pairs, looked up by type.

Every failure names the file, the key and the value.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from draftwing.errors import CheckpointError, ConfigError, UnsupportedError, shown

_ADVICE = "Download the file again, or convert the model again."


@dataclass(frozen=True)
class Texts:
    """An array of strings as it lies in the file: ``count`` of them from byte ``start``, checked, not yet decoded."""

    data: Any
    start: int
    count: int

    def __iter__(self) -> Iterator[bytes]:
        at = self.start
        for _ in range(self.count):
            (length,) = struct.unpack_from("<Q", self.data, at)
            yield self.data[at + 8 : at + 8 + length]
            at += 8 + length

    def __repr__(self) -> str:
        return f"an array of {self.count} strings"


def as_written(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, where widening it gives 9.999999747378752e-06."""
    return float(str(np.float32(value)))


class Metadata:
    """A file's key-value pairs.

    Values are ints, floats (see ``as_written``), bools, ``bytes`` (a string), numpy arrays (numbers) or ``Texts``.
    """

    def __init__(self, pairs: dict[str, Any], where: str) -> None:
        self.pairs, self.where = pairs, where

    def __contains__(self, key: str) -> bool:
        return key in self.pairs

    def wrong(self, key: str, expected: str) -> ConfigError:
        """The error to raise where ``key`` is not what was expected."""
        return ConfigError(
            f"{self.where}: metadata `{key}` must be {expected}, found {shown(self.pairs[key])}. {_ADVICE}"
        )

    def _missing(self, key: str) -> ConfigError:
        return ConfigError(f"{self.where}: required metadata `{key}` is missing. {_ADVICE}")

    def integer(self, key: str, default: int | None = None, *, minimum: int = 0, maximum: int = 2**31 - 1) -> int:
        """A whole number in a range; of an array with a number for each layer, the one that all layers share.

        Raises:
            ConfigError: it is missing and has no default, or is not such a number.
            UnsupportedError: layers differ.
        """
        value = self.pairs.get(key, default)
        if value is None:
            raise self._missing(key)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
            if (value != value[0]).any():
                raise UnsupportedError(
                    f"{self.where}: `{key}` differs between layers, which the lean decoder lacks. Use a model whose "
                    "layers are alike."
                )
            value = int(value[0])
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.wrong(key, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number.

        Raises:
            ConfigError: it is missing and has no default, or is not such a number.
        """
        value = self.pairs.get(key, default)
        if value is None:
            raise self._missing(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.wrong(key, "a finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false.

        Raises:
            ConfigError: it is neither.
        """
        value = self.pairs.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string.

        Raises:
            ConfigError: it is missing and has no default, or is no UTF-8 string.
        """
        value = self.pairs.get(key)
        if value is None:
            if default is None:
                raise self._missing(key)
            return default
        try:
            return bytes(value).decode() if isinstance(value, bytes) else _refuse_text()
        except ValueError:
            raise self.wrong(key, "a UTF-8 string") from None

    def texts(self, key: str, *, longest: int = 1 << 16) -> list[str]:
        """An array of strings, each of at most ``longest`` bytes.

        Raises:
            ConfigError: it is missing, or is no such array.
        """
        value = self.pairs.get(key)
        if value is None:
            raise self._missing(key)
        if not isinstance(value, Texts):
            raise self.wrong(key, "an array of strings")
        found = []
        for index, raw in enumerate(value):
            if len(raw) > longest:
                raise ConfigError(
                    f"{self.where}: string {index} of `{key}` must have at most {longest} bytes, found {len(raw)}. "
                    f"{_ADVICE}"
                )
            try:
                found.append(raw.decode())
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{self.where}: string {index} of `{key}` must be UTF-8, found {shown(raw)} ({error.reason}). "
                    f"{_ADVICE}"
                ) from None
        return found

    def numbers(self, key: str, kinds: str, length: int) -> list[Any] | None:
        """An array of ``length`` numbers whose numpy kind is one of ``kinds``; None where it is missing.

        Raises:
            ConfigError: it is no such array.
        """
        value = self.pairs.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or value.size != length:
            found = f"{value.size} of type {value.dtype}" if isinstance(value, np.ndarray) else shown(value)
            raise ConfigError(
                f"{self.where}: metadata `{key}` must be an array of {length} numbers, found {found}. {_ADVICE}"
            )
        found_list: list[Any] = value.tolist()
        return found_list


def _refuse_text() -> str:
    raise ValueError


# The container: header, metadata and tensors of a GGUF file, with every number checked against the file's size.
#
# A file comes from elsewhere. Nothing in it is believed: no count, length, offset or shape makes this allocate more
# than a small multiple of the file, and what cannot be is refused by name. The file is memory-mapped, tensors are read
# by whoever wants them (``weights``).


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


# Which tensor of a GGUF file is which of a Hugging Face checkpoint.
#
# Three things differ beside the names. Files of the architecture ``llama`` hold the rows of queries and keys in another
# order: RoPE's pairs, i and i + dim / 2 of a head, lie side by side. A layer's experts are one tensor. And tied
# embeddings have no ``output.weight``, as in a checkpoint.


ARCHITECTURES: Final = ("llama", "qwen2", "qwen3", "qwen3moe", "phi3")

# What the config says, not the weights (``config``).
NOT_WEIGHTS: Final = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_MOST_EXPERTS = 1024  # llama.cpp has 512 at most

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {
    "llama": ("block_sparse_moe.", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3moe": ("mlp.", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}
_IN_LAYER = re.compile(r"blk\.(\d{1,6})\.(\w+)(?:\.(\d{1,6}))?\.(weight|bias)")
_OF_EXPERTS = re.compile(r"ffn_(gate|up|down)(_exps)?")


@dataclass(frozen=True)
class Place:
    """Where a checkpoint's tensor lies: in ``tensor``, of which it may be one expert.

    ``heads``: rows are queries or keys of so many heads whose pairs lie side by side; 0 where they lie as usual.
    """

    tensor: str
    expert: int | None = None
    heads: int = 0


def places(file: GgufFile, architecture: str) -> dict[str, Place]:
    """Every tensor of a file by its name in a checkpoint; what has no such name keeps its own.

    Raises:
        CheckpointError: two tensors are one in a checkpoint, or experts without an end.
        ConfigError: the number of heads is missing, where rows have to be put in order.
    """
    found: dict[str, Place] = {}
    heads = _heads(file, architecture)
    for name, info in file.tensors.items():
        if name in NOT_WEIGHTS:
            continue
        stem, expert, several = _name(name, architecture)
        if several and (len(info.shape) != 3 or info.shape[0] > _MOST_EXPERTS):
            raise CheckpointError(
                f"{file.path}: {name} must hold at most {_MOST_EXPERTS} matrices, one for each expert, found shape "
                f"{list(info.shape)}. Download the file again."
            )
        for index in range(info.shape[0]) if several else (expert,):
            own = stem if index is None else stem.replace("*", str(index))
            if own in found:
                raise CheckpointError(
                    f"{file.path}: tensors {found[own].tensor} and {name} are both {own}. Convert the model again."
                )
            pairs = next((count for part, count in heads.items() if f".{part}." in name), 0)
            found[own] = Place(name, index if several else None, pairs)
    return found


def _heads(file: GgufFile, architecture: str) -> dict[str, int]:
    """By tensor, the heads of what lies in pairs."""
    if architecture != "llama":
        return {}
    queries = file.metadata.integer("llama.attention.head_count", minimum=1)
    return {
        "attn_q": queries,
        "attn_k": file.metadata.integer("llama.attention.head_count_kv", queries, minimum=1),
    }


def _name(name: str, architecture: str) -> tuple[str, int | None, bool]:
    """The checkpoint's name (``*`` for an expert), the expert that it names, and whether it holds all of them."""
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return _OUTER.get(name, name), None, False
    layer, part, number, suffix = match.groups()
    base, (block, parts) = f"model.layers.{int(layer)}.", _EXPERTS.get(architecture, ("", {}))
    experts = _OF_EXPERTS.fullmatch(part)
    if parts and experts and (number is None) == (experts[2] is not None):
        stem = f"{base}{block}experts.*.{parts[experts[1]]}.{suffix}"
        return stem, None if number is None else int(number), number is None
    if number is not None:
        return name, None, False
    if parts and part == "ffn_gate_inp":
        return f"{base}{block}gate.{suffix}", None, False
    if architecture == "phi3" and part == "ffn_up":
        return f"{base}mlp.gate_up_proj.{suffix}", None, False
    return (f"{base}{_LAYER[part]}.{suffix}" if part in _LAYER else name), None, False
