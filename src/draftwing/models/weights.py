"""A file in memory as it lies on disk: its tensors are views, and what was read can be given back."""

from __future__ import annotations

import ctypes
import difflib
import json
import math
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftwing.cpu.layout import FORMATS, format_of
from draftwing.errors import CheckpointError


class MappedFile:
    """A file, mapped: pages come as they are read. Tensors stay valid when this object is gone.

    A file that is cut short while it is mapped ends the process where a page that is gone is read (SIGBUS). That it is
    still whole is looked at for each tensor, which leaves little time for it; nothing can rule it out.

    Raises:
        OSError, ValueError: it cannot be opened or mapped, or is empty.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # Copy on write: PyTorch warns of memory that it may not write to. Nothing does.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.size = len(self._map)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def tensor(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The numbers from byte ``start`` on. They may lie at any address. Raises ValueError beyond the file's end."""
        count = math.prod(shape)
        if self._map.size() < self.size:
            raise ValueError(f"the file was cut short to {self._map.size()} of {self.size} bytes")
        if start < 0 or start + count * dtype.itemsize > self.size:
            raise ValueError(f"bytes {start} to {start + count * dtype.itemsize} of a file of {self.size}")
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        found = torch.frombuffer(self._map, dtype=torch.uint8, count=count * dtype.itemsize, offset=start)
        return as_numbers(found, dtype).view(tuple(shape))

    def drop(self, tensor: Tensor) -> None:
        """Give back the pages under a tensor of this file; they are read again if they are looked at again."""
        start = tensor.data_ptr() - self._start
        if 0 <= start < self.size and hasattr(mmap, "MADV_DONTNEED"):
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, min(start + tensor.nbytes, self.size) - first)


def as_numbers(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes (..., bytes) uint8 as numbers; copied only where they do not lie as the processor wants them."""
    return (data.clone() if data.data_ptr() % dtype.itemsize else data).view(dtype)


# A matrix as a file holds it, before it is laid out for what runs it.


_PIECE = 1 << 22  # weights expanded at a time: what that takes besides stays small


@dataclass(frozen=True)
class Stored:
    """A matrix (out, in) in one of ``run.kernel.formats``.

    Attributes:
        format: its name.
        num_in: inputs.
        data: plain numbers (out, in), or GGUF's blocks (out, bytes of a row) uint8 as the file holds them.
        was: the file's own format, where it was expanded because the kernel does not know it.
    """

    format: str
    num_in: int
    data: Tensor
    was: str = ""

    @property
    def num_out(self) -> int:
        """Outputs."""
        return self.data.shape[0]

    def rows(self, order: Tensor) -> Stored:
        """Its outputs in another order, or some of them."""
        return replace(self, data=self.data[order])

    def narrowed(self) -> Stored:
        """The same numbers in 16 bits where these hold float32 ones exactly: many checkpoints were made of such."""
        if self.format != "float32" or self.was:
            return self
        for dtype in (torch.bfloat16, torch.float16):
            half = self.data[:1].to(dtype)
            if not torch.equal(half.float(), self.data[:1]):
                continue  # the start tells most matrices
            half = self.data.to(dtype)
            if torch.equal(half.float(), self.data):
                return replace(self, format=str(dtype).removeprefix("torch."), data=half)
        return self

    def rounded(self) -> Stored:
        """The numbers of bfloat16 that are nearest to these."""
        if self.format == "bfloat16":
            return self
        dtype = torch.bfloat16
        if FORMATS[self.format].is_blocks:
            parts = dequantized(self.data, self.format, self.num_in)
            return Stored("bfloat16", self.num_in, joined(parts, self.num_out, self.num_in, dtype))
        return Stored("bfloat16", self.num_in, self.data.to(dtype))

    def expanded(self) -> Stored:
        """The same numbers in float32."""
        return replace(self, format="float32", data=self.expand())

    def expand(self) -> Tensor:
        """(out, in) float32: exactly what the format says."""
        if not FORMATS[self.format].is_blocks:
            return self.data.float()
        return joined(dequantized(self.data, self.format, self.num_in), self.num_out, self.num_in)


def dequantized(blocks: Tensor, kind: str, num_in: int) -> Iterator[Tensor]:
    """GGUF's blocks (out, bytes of a row) uint8 as float32, some rows (rows, in) at a time.

    Raises:
        NotImplementedError: a format that ``gguf`` cannot expand.
    """
    import gguf  # here, since it takes a while

    step = max(1, _PIECE // num_in)
    for start in range(0, blocks.shape[0], step):
        with np.errstate(all="ignore"):  # numbers that are not finite are whoever reads them to refuse
            part: Any = gguf.quants.dequantize(blocks[start : start + step].numpy(), gguf.GGMLQuantizationType[kind])
        yield torch.from_numpy(np.ascontiguousarray(part, dtype=np.float32))


def joined(parts: Iterable[Tensor], num_out: int, num_in: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Some rows after the other as one matrix (out, in), with little memory beside."""
    out, at = torch.empty(num_out, num_in, dtype=dtype), 0
    for part in parts:
        out[at : at + part.shape[0]] = part
        at += part.shape[0]
    return out


def stack(parts: Sequence[Stored]) -> list[Stored]:
    """Matrices of one input on top of each other: neighbours of one format become one."""
    found: list[Stored] = []
    for part in parts:
        if found and found[-1].format == part.format:
            last = found.pop()
            part = replace(last, data=torch.cat((last.data, part.data)), was=last.was or part.was)
        found.append(part)
    return found


# Weights on disk: reading a folder's safetensors, and saying what is wrong with them.


_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MANY = 10_000  # tensors among which looking for the closest name would take long
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Weights(ABC):
    """Where a model's tensors come from: ``WeightFiles``, or a GGUF file. Closed at the end of a ``with`` block.

    Attributes:
        folder: where messages say that they are.
    """

    folder: Path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def close(self) -> None:
        """Reading is over."""

    @abstractmethod
    def keys(self) -> list[str]:
        """The names of all tensors, sorted."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape. Raises CheckpointError if there is no such tensor."""

    @abstractmethod
    def get(self, name: str, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """A tensor on the CPU: see ``WeightFiles.get``."""

    @abstractmethod
    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> Stored:
        """A matrix (out, in) as it lies in the file."""

    @abstractmethod
    def drop(self, stored: Stored) -> None:
        """Its pages need not stay in memory: it was read."""

    def unused(self, used: set[str]) -> list[str]:
        """The tensors that are not in ``used``, sorted: a strict loader wants none left."""
        return [name for name in self.keys() if name not in used]

    def missing(self, name: str, fix: str) -> CheckpointError:
        """What is to be raised where there is no tensor ``name``; ``fix`` says what to do about it."""
        names = self.keys()
        close = difflib.get_close_matches(name, names, n=1) if len(names) < _MANY else []
        return CheckpointError(
            f"{self.folder}: weight {name} is missing among {len(names)}"
            f"{f'; the closest is {close[0]}' if close else ''}. {fix}"
        )


class WeightFiles(Weights):
    """The tensors of a Hugging Face model folder: ``model.safetensors``, or the shards of an index.

    Files are memory-mapped; opening reads their headers only. Use it as a context manager, or ``close`` it, to
    unmap the files once tensors have been read (tensors already read stay valid).

    Raises:
        CheckpointError: no folder; no safetensors in it; a shard missing; a file truncated or corrupt; an index
            that does not fit its shards.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}  # file name -> safetensors handle
        self._file_of: dict[str, str] = {}  # tensor name -> file name
        self._mapped: dict[str, tuple[MappedFile, dict[str, int]]] = {}  # and where each tensor begins
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: expected a model folder, found none. Check the path.")
        # lexists: a link into an emptied download cache should be reported as broken, not as absent.
        if os.path.lexists(self.folder / _SINGLE):
            self._add(_SINGLE)
            self._file_of = dict.fromkeys(self._open[_SINGLE].keys(), _SINGLE)
        elif os.path.lexists(self.folder / _INDEX):
            self._read_index()
        else:
            raise CheckpointError(_no_weights(self.folder))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def close(self) -> None:
        """Unmap the files; reading is over."""
        self._mapped.clear()
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)

    def keys(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the header alone. Raises CheckpointError if there is no such tensor."""
        return tuple(self._slice(name).get_shape())

    def get(self, name: str, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """Read a tensor onto the CPU.

        Args:
            name: its key.
            dtype: what to convert it to; None leaves it as stored, and then its memory is the mapped file.
            shape: what its shape must be; None takes any.

        Raises:
            CheckpointError: no such key (the message names the closest), another shape, quantised numbers where
                a floating dtype is wanted or the reverse, or a file that cannot be read.
        """
        entry = self._slice(name)
        found = tuple(entry.get_shape())
        where = self.folder / self._file_of[name]
        if shape is not None and found != shape:
            raise CheckpointError(
                f"{where}: {name} must have shape {shape}, found {found}. Do the weights and config.json belong to "
                "the same model? Download both again from one place."
            )
        stored = entry.get_dtype()
        if dtype is not None and (dtype in _FLOATS) != (stored in _DTYPES):
            kinds = ("floating-point numbers (F64, F32, F16 or BF16)", "integers or booleans")
            raise CheckpointError(
                f"{where}: {name} must hold {kinds[dtype not in _FLOATS]}, found {stored}. If the checkpoint is "
                'quantised, use the unquantised one, or engine="transformers".'
            )
        try:
            tensor: Tensor = self._open[self._file_of[name]].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{where}: {name} cannot be read ({error}). Download the file again.") from error
        return tensor if dtype is None else tensor.to(dtype)

    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> Stored:
        """A matrix (out, in) as it lies in the file, and its memory is the mapped file; see ``get``."""
        entry, file = self._slice(name), self._file_of[name]
        dtype = _DTYPES.get(entry.get_dtype())
        kind = None if dtype is None else format_of(dtype)
        if kind is None or dtype is None or tuple(entry.get_shape()) != (shape or tuple(entry.get_shape())):
            found = self.get(name, torch.float32, shape)
            return Stored("float32", found.shape[-1], found)
        if file not in self._mapped:
            self._mapped[file] = _map(self.folder / file)
        mapped, starts = self._mapped[file]
        try:
            numbers = mapped.tensor(starts[name], entry.get_shape(), dtype)
        except ValueError as error:
            raise CheckpointError(
                f"{self.folder / file}: {name} cannot be read ({error}). Download it again."
            ) from error
        return Stored(kind.name, numbers.shape[-1], numbers)

    def drop(self, stored: Stored) -> None:
        """Its pages need not stay in memory: it was read."""
        for mapped, _ in self._mapped.values():
            mapped.drop(stored.data)

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise self.missing(name, "Does config.json belong to these weights? Download both again from one place.")
        if not self._open:
            raise CheckpointError(f"{self.folder}: the weight files are closed. Open WeightFiles again to read {name}.")
        return self._open[self._file_of[name]].get_slice(name)

    def _add(self, file: str) -> None:
        """Map a safetensors file and check its header against its length."""
        path = self.folder / file
        try:
            self._open[file] = safe_open(path, framework="pt", device="cpu")
        except FileNotFoundError:
            raise CheckpointError(
                f"{path}: expected a weight file, found none (or a link to a file that is gone). Download it again."
            ) from None
        except PermissionError as error:
            raise CheckpointError(f"{path}: cannot be opened ({error}). Check the file's permissions.") from error
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            if _starts_with(path, b"version https://git-lfs"):
                raise CheckpointError(
                    f"{path}: expected weights, found a Git LFS pointer to them. Run `git lfs pull` in {self.folder}."
                ) from error
            raise CheckpointError(
                f"{path}: expected a whole safetensors file, found a truncated or corrupt one of {_size(path)} bytes "
                f"({error}). Download it again."
            ) from error

    def _read_index(self) -> None:
        path = self.folder / _INDEX
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: expected JSON, cannot be read ({error}). Download it again.") from error
        shards = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(shards, dict) or not shards or not all(isinstance(file, str) for file in shards.values()):
            raise CheckpointError(
                f"{path}: expected a `weight_map` from tensor names to files, found none. Download it again."
            )
        for file in sorted(set(shards.values())):
            # A checkpoint is data from elsewhere: it does not get to name files outside its folder.
            if file != os.path.basename(file) or file in ("", ".", "..") or "\\" in file:
                raise CheckpointError(
                    f"{path}: expected the names of files beside it, found {file!r}. Take the model from its original "
                    "place again."
                )
        missing = [file for file in sorted(set(shards.values())) if not (self.folder / file).exists()]
        if missing:
            raise CheckpointError(
                f"{self.folder}: {len(missing)} of {len(set(shards.values()))} shards are missing, first "
                f"{missing[0]}. Download the model again."
            )
        self._file_of = dict(shards)
        for file in sorted(set(shards.values())):
            self._add(file)
            absent = {name for name, home in shards.items() if home == file} - set(self._open[file].keys())
            if absent:
                raise CheckpointError(
                    f"{self.folder / file}: expected {min(absent)} in it, as {_INDEX} says, found it missing. "
                    "Download shards and index again from one place."
                )


def _map(path: Path) -> tuple[MappedFile, dict[str, int]]:
    """A safetensors file whose header was found good, and the byte at which each of its tensors begins."""
    try:
        mapped = MappedFile(path)
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). Check the file and its permissions.") from error
    return mapped, {
        name: 8 + size + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"
    }


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise CheckpointError, naming ``name``, if ``tensor`` (any shape and dtype) holds NaN or infinity."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    # A sum is one pass without a temporary, and NaN and infinity survive it. Only a sum that is not finite (it may
    # have overflowed) needs the exact look.
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    if torch.isfinite(tensor.sum(dtype=wide)):
        return
    bad = int(tensor.numel() - torch.isfinite(tensor).sum())
    if bad:
        raise CheckpointError(
            f"weight {name}: expected finite numbers, found {bad} of {tensor.numel()} that are NaN or infinite. "
            "Download the checkpoint again, or, if it was converted to float16, use bfloat16 or float32."
        )


def _no_weights(folder: Path) -> str:
    """What a folder without model.safetensors has instead, and what to do about it."""
    lead = f"{folder}: expected {_SINGLE} or {_INDEX}, found "
    files = sorted(path.name for path in folder.iterdir())
    pickled = [
        file for file in files if file.startswith("pytorch_model") and file.endswith((".bin", ".bin.index.json"))
    ]
    if pickled:
        return (
            f'{lead}only {pickled[0]}, which is pickled. Convert it: python -c "from transformers import '
            f"AutoModelForCausalLM as M; M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\" and "
            "copy the tokenizer's files along."
        )
    if "adapter_model.safetensors" in files:
        return f"{lead}adapter_model.safetensors, a LoRA adapter. Merge it into its base model and save that."
    ggufs = [file for file in files if file.endswith(".gguf")]
    if ggufs:
        return f"{lead}{ggufs[0]}. Give that file itself: {folder / ggufs[0]}"
    others = [file for file in files if file.endswith((".safetensors", ".pth", ".pt"))]
    if others:
        return f"{lead}{others[0]}. Save the model in Hugging Face format with save_pretrained."
    return f"{lead}no weights at all. Check the path, or download the model again."


def _starts_with(path: Path, prefix: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(prefix)) == prefix
    except OSError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
