"""Checkpoints of a run, replaced as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftwing.errors import CheckpointError
from draftwing.files import check_regular
from draftwing.storage import replacing, writing

CHECKPOINT = "checkpoint.pt"


def write_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Replace the folder's checkpoint. Raises CheckpointError if it cannot be written."""
    file = folder / CHECKPOINT
    note = "; make room, or choose another --out: the checkpoint before this one is whole"
    with writing(file, note=note), replacing(file) as partial:
        torch.save(state, partial)


def read_checkpoint(folder: Path) -> dict[str, Any] | None:
    """Return the folder's checkpoint; None if there is none.

    Raises:
        CheckpointError: it cannot be read.
    """
    file = folder / CHECKPOINT
    if not file.exists():
        return None
    try:
        check_regular(file)
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch errors of many kinds
        raise CheckpointError(
            f"{file} cannot be read ({error}): delete it to restart this run, or choose another --out"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} holds no checkpoint: delete it to restart this run, or choose another --out")
    return state
