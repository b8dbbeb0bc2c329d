"""Checkpoints of a training run: written whole or not at all, so that a kill at any moment loses nothing older."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from draftwing.errors import CheckpointError

__all__ = ["CHECKPOINT", "read_checkpoint", "write_atomically", "write_checkpoint", "writing"]

CHECKPOINT = "checkpoint.pt"


def write_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Put ``state`` in place of the folder's checkpoint.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written.
    """
    partial = folder / (CHECKPOINT + ".partial")
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, folder / CHECKPOINT)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"{folder / CHECKPOINT} cannot be written ({error}): free some space, or choose another --out; the "
            f"checkpoint before this one is whole"
        ) from error


def read_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The folder's checkpoint; None where there is none yet.

    Raises:
        CheckpointError: there is one, and it cannot be read.
    """
    file = folder / CHECKPOINT
    if not file.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch errors of many kinds
        raise CheckpointError(
            f"{file} cannot be read ({error}): delete it to start this run anew, or choose another --out"
        ) from error
    return state


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what writes to ``path``: raises CheckpointError where the disk is full, or the path not writable."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error}): free some space, or choose another --out"
        ) from error


def write_atomically(file: Path, text: str) -> None:
    """Replace a text file in one step.

    Raises:
        CheckpointError: the disk is full, or the file cannot be written.
    """
    partial = file.with_name(file.name + ".partial")
    with writing(file):
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, file)
