"""A GGUF file written out as a Hugging Face folder, for whatever does not read GGUF.

Every number is the file's: float32 holds what blocks stand for exactly, the 16-bit types round it. Matrices are
expanded piece by piece and written at once, so that memory stays bounded however large the model is; the folder
appears when all of it is there.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from draftwing.errors import CheckpointError, ConfigError
from draftwing.gguf.container import open_file
from draftwing.gguf.folder import folder_files
from draftwing.gguf.weights import GgufWeights
from draftwing.model.weights import check_finite

__all__ = ["DTYPES", "Unpacked", "import_gguf"]

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
    """The tensors of each file, with their bytes."""
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
