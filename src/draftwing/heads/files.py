"""A head's folder: its tensors read, and written so that no one ever finds half of it."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.model.weights import WeightFiles

__all__ = ["PICKLED", "read_tensors", "weight_files", "write_folder", "write_mend"]

PICKLED = "pytorch_model.bin"
_WEIGHTS = "model.safetensors"
_SHARDED = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

_WRITE_MENDS = {
    errno.ENOSPC: "the disk is full: make room, or write elsewhere",
    errno.EDQUOT: "your quota of the disk is used up: make room, or write elsewhere",
    errno.EFBIG: "the file would be larger than is allowed here: raise the limit, or write elsewhere",
    errno.EACCES: "writing is not allowed there: choose a folder of your own",
    errno.EPERM: "writing is not allowed there: choose a folder of your own",
    errno.EROFS: "the disk is read-only: write elsewhere",
    errno.ENOTDIR: "part of the path is a file: choose another path",
}


def weight_files(folder: Path) -> list[str]:
    """The names of the weight files that a folder has; an engine may prefer any one of several."""
    folder = Path(folder)
    return [name for name in (_WEIGHTS, PICKLED, *_SHARDED) if os.path.lexists(folder / name)]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a head as they are stored, on the CPU: of its safetensors, or of its ``pytorch_model.bin``.

    A pickled file is read with ``weights_only``, which runs no code from it.

    Raises:
        CheckpointError: no weights, or weights that are truncated, corrupt, or pickled with more than tensors.
    """
    folder = Path(folder)
    if folder.is_dir() and weight_files(folder) == [PICKLED]:
        return _read_pickled(folder / PICKLED)
    with WeightFiles(folder) as files:
        return {name: files.get(name) for name in files.keys()}  # noqa: SIM118  (its own method, not a dict's)


def _read_pickled(path: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: expected tensors alone, found something that would run code when it is read, or a damaged file "
            f"({str(error).splitlines()[0]:.120}): take the head's safetensors, or have its author save a state dict"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path}: expected a whole PyTorch checkpoint, found a truncated or corrupt one ({error}): download it "
            f"again"
        ) from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        raise CheckpointError(
            f"{path}: expected a dictionary from names to tensors, found {type(found).__name__} with other things in "
            f"it: have its author save the model's state dict"
        )
    return {name: value.detach() for name, value in found.items()}


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors``, whole or not at all.

    Both are written into a folder beside ``folder`` and moved when they are complete; other files that a folder
    already has stay.

    Raises:
        CheckpointError: the folder cannot be written, or has weights that an engine would read instead.
    """
    folder = Path(folder)
    others = [name for name in weight_files(folder) if name != _WEIGHTS]
    if others:
        raise CheckpointError(
            f"{folder}: has {others[0]} already, which some engines read before the {_WEIGHTS} that would be written "
            f"beside it: choose an empty folder"
        )
    partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
        plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        # Writing from memory of which another tensor holds a part is refused, and a tied copy is one.
        seen: set[int] = set()
        for name, tensor in plain.items():
            if tensor.numel() and tensor.untyped_storage().data_ptr() in seen:
                plain[name] = tensor.clone()
            seen.add(tensor.untyped_storage().data_ptr())
        save_file(plain, partial / _WEIGHTS, metadata={"format": "pt"})
        (partial / _WEIGHTS).chmod(0o644)  # the writer's own mode lets nobody else read it
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _move(partial, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: the head cannot be written ({error}): {write_mend(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _move(partial: Path, folder: Path) -> None:
    if not folder.exists():
        partial.rename(folder)
        return
    # The config last: what has a config has the weights that belong to it, but for the moment between the two.
    for name in (_WEIGHTS, "config.json"):
        os.replace(partial / name, folder / name)


def write_mend(error: Exception) -> str:
    """What to do about a file that could not be written."""
    code = error.errno if isinstance(error, OSError) else None
    if code is None:  # the safetensors writer has the system's message, not its number
        code = next((code for code in _WRITE_MENDS if os.strerror(code) in str(error)), None)
    return _WRITE_MENDS.get(code or 0, "check the path and the disk")
