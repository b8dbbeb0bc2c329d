"""Write a head into a folder, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.formats.layouts import head_files
from draftwing.formats.read import WEIGHTS, Head, checked_training, is_head, weight_files
from draftwing.methods.eagle_net import EagleNet
from draftwing.models.config import read_config
from draftwing.storage import writing


def write_head(folder: Path, net: EagleNet, *, training: Mapping[str, Any] | None = None) -> None:
    """Write a net as a head folder in our layout; an older head in it is replaced, whole or not at all.

    Args:
        net: not prepacked.
        training: notes on its training: any JSON. `draftwing doctor` reads two keys: ``chat_template`` (see
            ``chat_template_hash``) and ``coverage``, the draft vocabulary's share of the training tokens.
    """
    target = net.config.target
    ids = None if net.target_ids is None else net.target_ids.to("cpu", torch.int64)
    name = None if target is None else target.name
    head = Head(net.config, net.tensors(), ids, training=checked_training(training), verifier=name)
    save_head(Path(folder), head, "draftwing")


def save_head(folder: Path, head: Head, layout: str, *, depth: int = 5) -> None:
    """Write a head in one of the ``LAYOUTS``; ``depth`` is the number of tokens that speculators' config proposes."""
    config, tensors = head_files(head, layout, depth)
    write_folder(folder, config, tensors)


def check_destination(folder: Path) -> None:
    """Raise CheckpointError if writing a head would overwrite something that is not one."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a folder to write into, found a file: choose another path")
    if (folder / "config.json").exists() and not is_head(read_config(folder), folder):
        raise CheckpointError(f"{folder}: holds another model, which a head would overwrite: choose another folder")


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    name: str = WEIGHTS,
    copies: Sequence[Path] = (),
) -> None:
    """Write ``config.json`` and ``model.safetensors``, and ``copies`` of some files, whole or not at all.

    All are written into a folder next to ``folder`` and moved when they are complete; other files in ``folder`` stay.

    Args:
        name: of the weight file; a ``.pt`` is pickled.
    """
    folder = Path(folder)
    check_destination(folder)
    others = [other for other in weight_files(folder) if other != name]
    if others:
        raise CheckpointError(
            f"{folder}: has {others[0]}, which some engines would read instead of {name}: choose an empty folder"
        )
    partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    try:
        with writing(folder):
            partial.mkdir(parents=True)
            plain = {key: tensor.detach().to("cpu").contiguous() for key, tensor in tensors.items()}
            # The writer refuses tensors that share memory, as a tied copy does.
            seen: set[int] = set()
            for key, tensor in plain.items():
                if tensor.numel() and tensor.untyped_storage().data_ptr() in seen:
                    plain[key] = tensor.clone()
                seen.add(tensor.untyped_storage().data_ptr())
            if name.endswith(".pt"):
                torch.save(plain, partial / name)
            else:
                save_file(plain, partial / name, metadata={"format": "pt"})
            (partial / name).chmod(0o644)  # the writer's own mode lets no other user read it
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            for file in copies:
                shutil.copyfile(file, partial / file.name)
            if folder.exists():
                # The config last: a folder with a config has the weights that belong to it, but for a moment.
                for file_name in (*(file.name for file in copies), name, "config.json"):
                    os.replace(partial / file_name, folder / file_name)
            else:
                partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
