"""Model weights on disk: memory-mapped files, matrices in their stored formats, and safetensors folders."""

from __future__ import annotations

import ctypes
import difflib
import math
import mmap
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftwing.cpu.layout import FORMATS, format_of
from draftwing.errors import CheckpointError
from draftwing.storage import parse_json, read_json_object

_PIECE = 1 << 22  # weights that are expanded at a time, which bounds the extra memory


class MappedFile:
    """A memory-mapped file. Its tensors stay valid when this object is gone.

    If the file is truncated while it is mapped, reading a lost page ends the process (SIGBUS). ``tensor`` checks the
    length each time, which makes that unlikely but cannot rule it out.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # Copy on write, because PyTorch warns of read-only memory. Nothing writes.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.size = len(self._map)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def tensor(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The numbers from byte ``start`` on, at any alignment. Raises ValueError beyond the end of the file."""
        count = math.prod(shape)
        if self._map.size() < self.size:
            raise ValueError(f"the file was cut short to {self._map.size()} of {self.size} bytes")
        if start < 0 or start + count * dtype.itemsize > self.size:
            raise ValueError(f"bytes {start} to {start + count * dtype.itemsize} of a file of {self.size}")
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        data = torch.frombuffer(self._map, dtype=torch.uint8, count=count * dtype.itemsize, offset=start)
        return as_numbers(data, dtype).view(tuple(shape))

    def drop(self, tensor: Tensor) -> None:
        """Release the pages under a tensor of this file; a later access reads them again."""
        start = tensor.data_ptr() - self._start
        if 0 <= start < self.size and hasattr(mmap, "MADV_DONTNEED"):
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, min(start + tensor.nbytes, self.size) - first)


def as_numbers(data: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes (..., bytes) uint8 as numbers; copied only if they are not aligned."""
    return (data.clone() if data.data_ptr() % dtype.itemsize else data).view(dtype)


@dataclass(frozen=True)
class Stored:
    """A matrix (out, in) as a file stores it."""

    format: str  # a name in ``cpu.layout.FORMATS``
    num_in: int
    data: Tensor  # plain numbers (out, in), or GGUF blocks (out, bytes of a row) uint8
    was: str = ""  # the file's format, if it was expanded because the kernel does not support it

    @property
    def num_out(self) -> int:
        return self.data.shape[0]

    def narrowed(self) -> Stored:
        """In 16 bits if these hold float32 numbers exactly: many float32 checkpoints were converted from 16 bits."""
        if self.format != "float32" or self.was:
            return self
        for dtype in (torch.bfloat16, torch.float16):
            half = self.data[:1].to(dtype)
            if not torch.equal(half.float(), self.data[:1]):
                continue  # the first row decides most matrices
            half = self.data.to(dtype)
            if torch.equal(half.float(), self.data):
                return replace(self, format=str(dtype).removeprefix("torch."), data=half)
        return self

    def rounded(self) -> Stored:
        """Rounded to bfloat16."""
        if self.format == "bfloat16":
            return self
        if not FORMATS[self.format].is_blocks:
            return Stored("bfloat16", self.num_in, self.data.to(torch.bfloat16))
        parts = dequantized(self.data, self.format, self.num_in)
        return Stored("bfloat16", self.num_in, joined(parts, self.num_out, self.num_in, torch.bfloat16))

    def expanded(self) -> Stored:
        return replace(self, format="float32", data=self.expand())

    def expand(self) -> Tensor:
        """The exact numbers in float32 (out, in)."""
        if not FORMATS[self.format].is_blocks:
            return self.data.float()
        return joined(dequantized(self.data, self.format, self.num_in), self.num_out, self.num_in)


def dequantized(blocks: Tensor, kind: str, num_in: int) -> Iterator[Tensor]:
    """Expand GGUF blocks (out, bytes of a row) uint8 to float32, some rows (rows, in) at a time."""
    import gguf  # slow to import

    step = max(1, _PIECE // num_in)
    for start in range(0, blocks.shape[0], step):
        with np.errstate(all="ignore"):  # the reader checks for numbers that are not finite
            part: Any = gguf.quants.dequantize(blocks[start : start + step].numpy(), gguf.GGMLQuantizationType[kind])
        yield torch.from_numpy(np.ascontiguousarray(part, dtype=np.float32))


def mxfp4_blocks(blocks: Tensor, scales: Tensor) -> Stored:
    """A matrix of gpt-oss in GGUF's order: blocks (out, blocks, 16) uint8 of 32 numbers of 4 bits, two adjacent a byte.

    Args:
        scales: (out, blocks) uint8 the exponent of each block's factor, with an offset of 127.
    """
    first, last = torch.stack([blocks & 15, blocks >> 4], -1).flatten(2).chunk(2, -1)
    data = torch.cat([scales[..., None], first | last << 4], -1)
    return Stored("MXFP4", 32 * blocks.shape[1], data.flatten(1))


def joined(parts: Iterable[Tensor], num_out: int, num_in: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Concatenate groups of rows (rows, in) to a matrix (out, in), one at a time to save memory."""
    out, start = torch.empty(num_out, num_in, dtype=dtype), 0
    for part in parts:
        out[start : start + part.shape[0]] = part
        start += part.shape[0]
    return out


def stack(parts: Sequence[Stored]) -> list[Stored]:
    """Concatenate the outputs of adjacent matrices of one format."""
    stacked: list[Stored] = []
    for part in parts:
        if stacked and stacked[-1].format == part.format:
            last = stacked.pop()
            part = replace(last, data=torch.cat((last.data, part.data)), was=last.was or part.was)
        stacked.append(part)
    return stacked


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise CheckpointError, naming ``name``, if ``tensor`` (any shape and dtype) holds NaN or infinity."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    # A sum is one pass without a temporary, and NaN and infinity survive it. It may overflow, so a sum that is not
    # finite is followed by an exact check.
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    if torch.isfinite(tensor.sum(dtype=wide)):
        return
    bad = int(tensor.numel() - torch.isfinite(tensor).sum())
    if bad:
        raise CheckpointError(
            f"weight {name}: expected finite numbers, found {bad} of {tensor.numel()} that are NaN or infinite. "
            "Download the checkpoint again, or, if it was converted to float16, use bfloat16 or float32."
        )


# --- folders ---------------------------------------------------------------------------------------------------------

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_CLOSEST = 10_000  # tensors up to which an error names the closest one, which takes long among more
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Prefixes of the text model's tensors, and of its LM head, in files of multimodal models: transformers 5's, those of
# most published files, and SmolVLM's. In files of text models they are ``model.`` and ``lm_head.``.
_TEXT_PREFIXES = (
    ("model.language_model.", "lm_head."),
    ("language_model.model.", "language_model.lm_head."),
    ("model.text_model.", "lm_head."),
)
_UNPREFIXED = ("lm_head.", "mtp.", "model.layers.", "model.embed_tokens.", "model.norm.")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Weights(ABC):
    """The tensors of a model: ``WeightFiles`` or ``GgufWeights``. A context manager that calls ``close``."""

    folder: Path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def close(self) -> None:
        """Unmap the files; tensors already read stay valid."""

    @abstractmethod
    def keys(self) -> list[str]:
        """The names of all tensors, sorted."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the header alone. Raises CheckpointError if there is no such tensor."""

    @abstractmethod
    def get(self, name: str, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """Read a tensor onto the CPU.

        Args:
            dtype: converts it; None leaves it as stored, in the memory of the mapped file.
            shape: the expected shape; None accepts any.
        """

    @abstractmethod
    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> Stored:
        """A matrix (out, in) in the format and the memory of the file; raises as ``get`` does."""

    @abstractmethod
    def drop(self, stored: Stored) -> None:
        """Release the pages of a matrix that was read."""

    def text_name(self, name: str) -> str | None:
        """Return the name here of a multimodal model's tensor; None if that is not part of the text model."""
        return name

    def name_in_file(self, name: str) -> str:
        """Return a tensor's name in the file, for messages."""
        return name

    def unused(self, used: set[str]) -> list[str]:
        """The names of the tensors that are not in ``used``, sorted."""
        return [name for name in self.keys() if name not in used]

    def missing(self, name: str, fix: str) -> CheckpointError:
        """The error to raise if there is no tensor ``name``; ``fix`` is the advice in it."""
        name, names = self.name_in_file(name), [self.name_in_file(key) for key in self.keys()]
        close = difflib.get_close_matches(name, names, n=1) if len(names) < _MAX_CLOSEST else []
        return CheckpointError(
            f"{self.folder}: weight {name} is missing among {len(names)}"
            f"{f'; the closest is {close[0]}' if close else ''}. {fix}"
        )


class WeightFiles(Weights):
    """The safetensors of a Hugging Face model folder: ``model.safetensors``, or the shards of an index.

    Of a multimodal model only the text model's tensors are here, under the names that they have in a text model.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}  # file name -> safetensors handle
        self._file_of: dict[str, str] = {}  # tensor name -> file name
        self._name_in: dict[str, str] = {}  # tensor name -> its name in the file, if that differs
        self._prefixes: tuple[str, str] | None = None  # those in ``_TEXT_PREFIXES`` of a multimodal model
        self._mapped: dict[str, tuple[MappedFile, dict[str, int]]] = {}  # file name -> its map, offsets of its tensors
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: expected a model folder, found none. Check the path.")
        # lexists: report a link into an emptied download cache as broken, not as absent.
        if os.path.lexists(self.folder / _SINGLE):
            self._add(_SINGLE)
            self._file_of = dict.fromkeys(self._open[_SINGLE].keys(), _SINGLE)
        elif os.path.lexists(self.folder / _INDEX):
            self._read_index()
        else:
            raise CheckpointError(f"{self.folder}: expected {_SINGLE} or {_INDEX}, found {_content(self.folder)}")
        names = [*self._file_of]
        self._prefixes = next(
            (pair for pair in _TEXT_PREFIXES if any(name.startswith(pair[0]) for name in names)), None
        )
        if self._prefixes is not None:
            self._name_in = {text: name for name in names if (text := self.text_name(name)) is not None}
            self._file_of = {text: self._file_of[name] for text, name in self._name_in.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def close(self) -> None:
        self._mapped.clear()
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)

    def keys(self) -> list[str]:
        return sorted(self._file_of)

    def text_name(self, name: str) -> str | None:
        if self._prefixes is None:
            return name
        for prefixes in _TEXT_PREFIXES:
            for prefix, text in zip(prefixes, ("model.", "lm_head."), strict=True):
                if name.startswith(prefix):
                    return text + name.removeprefix(prefix)
        return name if name.startswith(_UNPREFIXED) else None

    def name_in_file(self, name: str) -> str:
        if name in self._name_in or self._prefixes is None:
            return self._name_in.get(name, name)
        for prefix, text in zip(self._prefixes, ("model.", "lm_head."), strict=True):
            if name.startswith(text):
                return prefix + name.removeprefix(text)
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def get(self, name: str, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        entry = self._slice(name)
        found, stored, file = tuple(entry.get_shape()), entry.get_dtype(), self._file_of[name]
        where, name = self.folder / file, self.name_in_file(name)
        if shape is not None and found != shape:
            raise CheckpointError(
                f"{where}: {name} must have shape {shape}, found {found}. Do the weights and config.json belong to "
                "the same model? Download both again from one place."
            )
        if dtype is not None and (dtype in _FLOATS) != (stored in _DTYPES):
            kinds = ("floating-point numbers (F64, F32, F16 or BF16)", "integers or booleans")
            raise CheckpointError(
                f"{where}: {name} must hold {kinds[dtype not in _FLOATS]}, found {stored}. If the checkpoint is "
                'quantised, use the unquantised one, or engine="transformers".'
            )
        try:
            tensor: Tensor = self._open[file].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{where}: {name} cannot be read ({error}). Download the file again.") from error
        return tensor if dtype is None else tensor.to(dtype)

    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> Stored:
        entry, file = self._slice(name), self._file_of[name]
        found, dtype = tuple(entry.get_shape()), _DTYPES.get(entry.get_dtype())
        kind = None if dtype is None else format_of(dtype)
        if kind is None or dtype is None or found != (shape or found):
            tensor = self.get(name, torch.float32, shape)
            return Stored("float32", tensor.shape[-1], tensor)
        name = self.name_in_file(name)
        try:
            if file not in self._mapped:
                self._mapped[file] = _map(self.folder / file)
            mapped, starts = self._mapped[file]
            return Stored(kind.name, found[-1], mapped.tensor(starts[name], found, dtype))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder / file}: {name} cannot be read ({error}). Download it again."
            ) from error

    def drop(self, stored: Stored) -> None:
        for mapped, _ in [*self._mapped.values()]:  # a copy: other threads map further files
            mapped.drop(stored.data)

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise self.missing(name, "Does config.json belong to these weights? Download both again from one place.")
        if not self._open:
            raise CheckpointError(f"{self.folder}: the weight files are closed. Open WeightFiles again to read {name}.")
        return self._open[self._file_of[name]].get_slice(self.name_in_file(name))

    def _add(self, file: str) -> None:
        """Map a safetensors file, which checks its header against its length."""
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
            start = b""
            with suppress(OSError), path.open("rb") as content:
                start = content.read(30)
            if start.startswith(b"version https://git-lfs"):
                raise CheckpointError(
                    f"{path}: expected weights, found a Git LFS pointer to them. Run `git lfs pull` in {self.folder}."
                ) from error
            raise CheckpointError(
                f"{path}: expected a whole safetensors file, found a truncated or corrupt one of {path.stat().st_size} "
                f"bytes ({error}). Download it again."
            ) from error

    def _read_index(self) -> None:
        path = self.folder / _INDEX
        try:
            shards = read_json_object(path).get("weight_map")
        except FileNotFoundError as error:  # a broken link
            raise CheckpointError(f"{path}: cannot be read ({error}). Download it again.") from error
        if not isinstance(shards, dict) or not shards or not all(isinstance(file, str) for file in shards.values()):
            raise CheckpointError(
                f"{path}: expected a `weight_map` from tensor names to files, found none. Download it again."
            )
        files = sorted(set(shards.values()))
        for file in files:
            # A checkpoint is untrusted: it must not name files outside its folder.
            if file != os.path.basename(file) or file in ("", ".", "..") or "\\" in file:
                raise CheckpointError(
                    f"{path}: expected names of files in its folder, found {file!r}. Download the model from its "
                    "original place."
                )
        missing = [file for file in files if not (self.folder / file).exists()]
        if missing:
            raise CheckpointError(
                f"{self.folder}: {len(missing)} of {len(files)} shards are missing, first {missing[0]}. Download the "
                "model again."
            )
        self._file_of = dict(shards)
        for file in files:
            self._add(file)
            absent = {name for name, home in shards.items() if home == file} - set(self._open[file].keys())
            if absent:
                raise CheckpointError(
                    f"{self.folder / file}: expected {min(absent)} in it, as {_INDEX} says, found it missing. "
                    "Download shards and index again from one place."
                )


def _map(path: Path) -> tuple[MappedFile, dict[str, int]]:
    """Map a safetensors file with a valid header; returns the first byte of each tensor, too."""
    mapped = MappedFile(path)
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(size))
    header.pop("__metadata__", None)
    return mapped, {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items()}


def _content(folder: Path) -> str:
    """Describe the weights in a folder without safetensors, and how to convert them."""
    files = sorted(path.name for path in folder.iterdir())
    pickled = [name for name in files if re.fullmatch(r"pytorch_model.*\.bin(\.index\.json)?", name)]
    if pickled:
        return (
            f'only {pickled[0]}, which is pickled. Convert it: python -c "from transformers import '
            f"AutoModelForCausalLM as M; M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\" and "
            "copy the tokenizer's files along."
        )
    if "adapter_model.safetensors" in files:
        return "adapter_model.safetensors, a LoRA adapter. Give its base model, and the adapter as lora (--lora)."
    for name in files:
        if name.endswith(".gguf"):
            return f"{name}. Give that file itself: {folder / name}"
    for name in files:
        if name.endswith((".safetensors", ".pth", ".pt")):
            return f"{name}. Save the model in Hugging Face format with save_pretrained."
    return "no weights at all. Check the path, or download the model again."
