"""The tensors of a GGUF file, by the names and in the order of a Hugging Face checkpoint."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from draftwing.cpu.layout import FORMATS
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.formats.gguf import Place, TensorInfo, open_file, places
from draftwing.formats.gguf_config import architecture_of
from draftwing.formats.gguf_folder import LINK, folder_files, link_of
from draftwing.models.weights import MappedFile, Stored, Weights, as_numbers, check_finite, dequantized, joined

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PIECE = 1 << 22  # plain numbers handed on at a time


class GgufWeights(Weights):
    """A GGUF model's tensors, with the interface of ``model.weights.WeightFiles``.

    The file is memory-mapped; opening reads its header only. Matrices can also be had as they lie there (``stored``).

    Raises:
        CheckpointError: no such file, no GGUF, truncated or damaged.
        ConfigError, UnsupportedError: a version, an architecture or a format of tensors that is not supported.
    """

    def __init__(self, path: Path | str) -> None:
        self.folder = Path(path)  # where messages say that weights are
        file = open_file(self.folder)
        try:
            self._places = places(file, architecture_of(file))
            self._tensors = file.tensors
            paths = file.paths
        finally:
            file.close()
        try:
            self._mapped = [MappedFile(part) for part in paths]
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be mapped ({error}). Check the file.") from error

    @classmethod
    def from_folder(cls, folder: Path | str) -> GgufWeights:
        """The weights of a folder that ``open_gguf`` made.

        Raises:
            CheckpointError: it is no such folder, or the file is gone; and as the class.
        """
        link = Path(folder) / LINK
        if not link.exists():
            raise CheckpointError(f"{link}: expected a link to a GGUF file, found none. Give the file itself again.")
        return cls(link_of(Path(folder)) or link)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def close(self) -> None:
        """Let go of the file: it stays mapped for as long as tensors that were read look at it."""
        self._mapped.clear()

    def keys(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape. Raises CheckpointError if there is no such tensor."""
        place, info = self._find(name)
        return info.shape[1:] if place.expert is not None else info.shape

    def get(self, name: str, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """Read a tensor onto the CPU, blocks expanded.

        Args:
            name: its key.
            dtype: what to convert it to; None leaves plain numbers as they are and makes blocks float32.
            shape: what its shape must be; None takes any.

        Raises:
            CheckpointError: no such key, another shape, or numbers that are no floating-point ones.
            UnsupportedError: a format that cannot be expanded.
        """
        found, info = self._checked(name, shape)
        rows = self._rows(name)
        if dtype is not None and not dtype.is_floating_point:
            raise CheckpointError(f"{self.folder}: {name} holds floating-point numbers, not {dtype}.")
        plain = _PLAIN.get(info.kind)
        if plain is not None:
            return as_numbers(rows, plain).reshape(found).to(dtype or plain)
        return self._expand(name, rows, dtype or torch.float32).reshape(found)

    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> Stored:
        """A matrix as it lies in the file, its memory the mapped file's where rows need no other order.

        Formats that ``run.kernel.formats`` does not know are expanded to float32.

        Raises:
            CheckpointError: no such key, another shape, or no matrix.
            UnsupportedError: a format that cannot be expanded.
        """
        found, info = self._checked(name, shape)
        if len(found) != 2:
            raise CheckpointError(f"{self.folder}: {name} must be a matrix, found shape {found}. Convert it again.")
        rows = self._rows(name)
        if info.kind in _STORED:
            return Stored(_STORED[info.kind], found[1], as_numbers(rows, _PLAIN[info.kind]))
        if info.kind in FORMATS and FORMATS[info.kind].is_blocks:
            return Stored(info.kind, found[1], rows)
        return Stored("float32", found[1], self._expand(name, rows, torch.float32), was=info.kind)

    def pieces(self, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
        """A tensor some rows at a time: for whoever writes it elsewhere, in little memory.

        Raises:
            CheckpointError, UnsupportedError: as ``get``.
        """
        _, info = self._checked(name, None)
        for part in self._pieces(name, self._rows(name)):
            yield part.to(dtype)
        self._mapped[info.part].drop(self._bytes(info))

    def drop(self, stored: Stored) -> None:
        """Give back the memory that reading ``stored`` took, where it lies in the file; it can be read again."""
        for mapped in self._mapped:
            mapped.drop(stored.data)

    def _find(self, name: str) -> tuple[Place, TensorInfo]:
        if name not in self._places:
            raise self.missing(name, "Download the file again, or convert it again.")
        place = self._places[name]
        return place, self._tensors[place.tensor]

    def _checked(self, name: str, shape: tuple[int, ...] | None) -> tuple[tuple[int, ...], TensorInfo]:
        found, (_, info) = self.shape(name), self._find(name)
        if shape is not None and found != tuple(shape):
            raise CheckpointError(
                f"{self.folder}: {name} ({info.name}) must have shape {tuple(shape)}, found {found}. Does the metadata "
                "belong to these weights? Download the file again."
            )
        if not self._mapped:
            raise CheckpointError(f"{self.folder}: the file is closed. Open GgufWeights again to read {name}.")
        return found, info

    def _bytes(self, info: TensorInfo) -> Tensor:
        """All rows of a tensor (rows, bytes of one) uint8, as they lie in the file."""
        shape = (math.prod(info.shape[:-1]), info.row_bytes)
        try:
            return self._mapped[info.part].tensor(info.start, shape, torch.uint8)
        except ValueError as error:
            raise CheckpointError(f"{self.folder}: {info.name} is gone ({error}). Download the file again.") from error

    def _rows(self, name: str) -> Tensor:
        place, info = self._find(name)
        data = whole = self._bytes(info)
        if place.expert is not None:
            each = info.shape[1]
            data = data[place.expert * each : (place.expert + 1) * each]
        if not place.heads:
            return data
        # A bias is one row of numbers, which are to be moved like a matrix's rows.
        if len(info.shape) == 1:
            data = data.view(info.shape[0], -1) if info.kind in _PLAIN else data
        if data.shape[0] % (2 * place.heads):
            raise CheckpointError(
                f"{self.folder}: {info.name} must have a whole number of pairs for each of {place.heads} heads, found "
                f"shape {list(info.shape)}. Download the file again."
            )
        order = torch.arange(data.shape[0]).view(place.heads, -1, 2).transpose(1, 2).reshape(-1)
        moved = data[order]
        self._mapped[info.part].drop(whole)
        return moved if len(info.shape) > 1 else moved.view(1, -1)

    def _expand(self, name: str, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """(rows, bytes) uint8 -> (rows, numbers)."""
        return joined(self._pieces(name, rows), rows.shape[0], self._find(name)[1].shape[-1], dtype)

    def _pieces(self, name: str, rows: Tensor) -> Iterator[Tensor]:
        """(rows, bytes) uint8 -> (some rows, numbers) again and again, as PyTorch has them, blocks as float32."""
        info = self._find(name)[1]
        if info.kind.startswith("I") and not info.kind.startswith("IQ"):
            raise CheckpointError(
                f"{self.folder}: {name} must hold floating-point numbers, found {info.kind}. Convert the model again."
            )
        if info.kind in _PLAIN:
            for part in torch.split(rows, max(1, _PIECE // info.shape[-1])):
                yield as_numbers(part, _PLAIN[info.kind])
            return
        try:
            yield from dequantized(rows, info.kind, info.shape[-1])
        except NotImplementedError:
            raise UnsupportedError(
                f"{self.folder}: {name} is in the format {info.kind}, which cannot be expanded. Take a file in another "
                "format, such as Q4_K_M or Q8_0."
            ) from None


# A GGUF file written out as a Hugging Face folder, for whatever does not read GGUF.
#
# Every number is the file's: float32 holds what blocks stand for exactly, the 16-bit types round it. Matrices are
# expanded piece by piece and written at once, so that memory stays bounded however large the model is; the folder
# appears when all of it is there.


DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_SHARD = 4 * 10**9  # bytes of a weight file


@dataclass(frozen=True)
class Unpacked:
    """What was written: where, how many tensors, in which dtype, into how many bytes, from which formats."""

    folder: Path
    tensors: int
    dtype: str
    num_bytes: int
    formats: dict[str, int]


def import_gguf(
    path: Path,
    out: Path,
    dtype: str = "float32",
    on_progress: Callable[[int, int], None] | None = None,
    *,
    shard_bytes: int = _SHARD,
) -> Unpacked:
    """Write a GGUF file as a Hugging Face folder.

    Args:
        path: the file.
        out: a folder that is new or empty.
        dtype: float32, bfloat16 or float16.
        on_progress: called with (bytes written, all bytes).
        shard_bytes: about how large a weight file may become.

    Raises:
        CheckpointError: no GGUF, a damaged one, a folder with something in it, a full disk, or numbers that float16
            cannot hold.
        ConfigError, UnsupportedError, TokenizerError: as ``gguf.folder.open_gguf``.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r:.40} is not supported: choose {', '.join(DTYPES)}")
    path, out = Path(path).expanduser().absolute(), Path(out).expanduser().absolute()
    file = open_file(path)
    try:
        files = folder_files(file)
        formats: dict[str, int] = {}
        for info in file.tensors.values():
            formats[info.kind] = formats.get(info.kind, 0) + 1
    finally:
        file.close()
    config = json.loads(files["config.json"])
    files["config.json"] = json.dumps({**config, "dtype": dtype}, indent=2, ensure_ascii=False) + "\n"
    with GgufWeights(path) as weights:
        shards = _shards(weights, DTYPES[dtype].itemsize, shard_bytes)
        total = sum(size for shard in shards for size in shard.values())
        _check_room(out, total + sum(len(text) for text in files.values()))
        fresh = out.parent / f".{out.name}-{secrets.token_hex(4)}"
        fresh.mkdir()
        try:
            _write(fresh, files, weights, shards, dtype, on_progress or (lambda done, total: None))
            with suppress(FileNotFoundError):
                out.rmdir()  # it was empty
            os.rename(fresh, out)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise CheckpointError(f"{out}: the disk is full. Make room for {total / 1e9:.2f} GB.") from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        return Unpacked(out, len(weights.keys()), dtype, total, formats)


def _shards(weights: GgufWeights, itemsize: int, most: int) -> list[dict[str, int]]:
    found: list[dict[str, int]] = [{}]
    for name in weights.keys():  # noqa: SIM118  # it is no dict
        size = math.prod(weights.shape(name)) * itemsize
        if found[-1] and sum(found[-1].values()) + size > most:
            found.append({})
        found[-1][name] = size
    return found


def _check_room(out: Path, needed: int) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: expected a new or an empty folder, found something in it. Choose another one.")
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise CheckpointError(
            f"{out}: the folder takes {needed / 1e9:.2f} GB, and the disk has {free / 1e9:.2f} GB left. Make room, "
            "choose another disk, or a dtype of 16 bits."
        )


def _write(
    folder: Path,
    files: dict[str, str],
    weights: GgufWeights,
    shards: list[dict[str, int]],
    dtype: str,
    on_progress: Callable[[int, int], None],
) -> None:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    total, done = sum(size for shard in shards for size in shard.values()), 0
    index: dict[str, str] = {}
    for number, shard in enumerate(shards):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        index.update(dict.fromkeys(shard, name))
        with open(folder / name, "wb") as file:
            _write_header(file, weights, shard, dtype)
            for tensor, size in shard.items():
                _write_tensor(file, weights, tensor, dtype)
                done += size
                on_progress(done, total)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _write_header(file: BinaryIO, weights: GgufWeights, shard: dict[str, int], dtype: str) -> None:
    """What safetensors files begin with: a length, then JSON that says where each tensor lies."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, size in shard.items():
        header[name] = {"dtype": _NAMES[dtype], "shape": weights.shape(name), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def _write_tensor(file: BinaryIO, weights: GgufWeights, name: str, dtype: str) -> None:
    for part in weights.pieces(name, DTYPES[dtype]):
        check_finite(name, part)
        file.write(part.contiguous().view(torch.uint8).numpy().data)
