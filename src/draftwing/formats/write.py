"""A head written into a folder, so that no one ever finds half of it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.formats.head import Head
from draftwing.formats.layouts import head_files
from draftwing.formats.read import WEIGHTS, is_head, weight_files
from draftwing.methods.eagle_net import EagleNet
from draftwing.models.config import read_config

_FIXES = {
    errno.ENOSPC: "the disk is full: make room, or write elsewhere",
    errno.EDQUOT: "your quota of the disk is used up: make room, or write elsewhere",
    errno.EFBIG: "the file would be larger than is allowed here: raise the limit, or write elsewhere",
    errno.EACCES: "writing is not allowed there: choose a folder of your own",
    errno.EPERM: "writing is not allowed there: choose a folder of your own",
    errno.EROFS: "the disk is read-only: write elsewhere",
    errno.ENOTDIR: "part of the path is a file: choose another path",
}


def write_head(folder: Path, net: EagleNet, *, training: Mapping[str, Any] | None = None) -> None:
    """Write a net as a head folder of ours; an older head in it is replaced, whole or not at all.

    Args:
        net: not prepacked.
        training: how it was trained: any JSON. `draftwing doctor` knows two keys: ``chat_template`` (see
            ``chat_template_hash``) and ``coverage``, the share of the training tokens that the draft vocabulary has.

    Raises:
        CheckpointError: the folder cannot be written, or holds another model.
        ConfigError: ``training`` is not JSON.
    """
    save_head(Path(folder), Head.from_net(net, training), "draftwing")


def save_head(folder: Path, head: Head, layout: str, *, depth: int = 5) -> None:
    """Write a head in one of the ``LAYOUTS``; ``depth`` is how many tokens speculators' config proposes.

    Raises:
        UnsupportedError: the layout cannot express this head.
        CheckpointError: the folder cannot be written, or holds another model.
    """
    config, tensors = head_files(head, layout, depth)
    write_folder(folder, config, tensors)


def check_destination(folder: Path) -> None:
    """Raise CheckpointError where writing a head would overwrite something that is not one."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a folder to write into, found a file: choose another path")
    if (folder / "config.json").exists() and not is_head(read_config(folder), folder):
        raise CheckpointError(
            f"{folder}: holds another model, which a head would overwrite: choose a folder of its own for the head"
        )


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    name: str = WEIGHTS,
    copies: Sequence[Path] = (),
) -> None:
    """Write ``config.json`` and ``model.safetensors``, and ``copies`` of some files, whole or not at all.

    All are written into a folder beside ``folder`` and moved when they are complete; other files that a folder
    already has stay.

    Args:
        name: of the weights' file, where an engine wants another one; a ``.pt`` is pickled.

    Raises:
        CheckpointError: the folder cannot be written, holds another model, or has weights that an engine would read
            instead.
    """
    folder = Path(folder)
    check_destination(folder)
    others = [each for each in weight_files(folder) if each != name]
    if others:
        raise CheckpointError(
            f"{folder}: has {others[0]} already, which some engines read before the {name} that would be written "
            f"beside it: choose an empty folder"
        )
    partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
        plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        # Writing from memory of which another tensor holds a part is refused, and a tied copy is one.
        seen: set[int] = set()
        for each, tensor in plain.items():
            if tensor.numel() and tensor.untyped_storage().data_ptr() in seen:
                plain[each] = tensor.clone()
            seen.add(tensor.untyped_storage().data_ptr())
        if name.endswith(".pt"):
            torch.save(plain, partial / name)
        else:
            save_file(plain, partial / name, metadata={"format": "pt"})
        (partial / name).chmod(0o644)  # the writer's own mode lets nobody else read it
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for file in copies:
            shutil.copyfile(file, partial / file.name)
        _move(partial, folder, [*(file.name for file in copies), name])
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save says so of a full disk
        raise CheckpointError(f"{folder}: the head cannot be written ({error}): {write_fix(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _move(partial: Path, folder: Path, names: Sequence[str]) -> None:
    if not folder.exists():
        partial.rename(folder)
        return
    # The config last: what has a config has the weights that belong to it, but for the moment between the two.
    for name in (*names, "config.json"):
        os.replace(partial / name, folder / name)


def write_fix(error: Exception) -> str:
    """What to do about a file that could not be written."""
    code = error.errno if isinstance(error, OSError) else None
    if code is None:  # the safetensors writer has the system's message, not its number
        code = next((code for code in _FIXES if os.strerror(code) in str(error)), None)
    return _FIXES.get(code or 0, "check the path and the disk")


def write_text(file: Path, text: str) -> None:
    """Put a text into a file, whole or not at all.

    Raises:
        CheckpointError: it cannot be written.
    """
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"{file}: cannot be written ({error}): {write_fix(error)}") from error
