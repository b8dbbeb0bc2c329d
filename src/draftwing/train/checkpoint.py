"""Files of a run: a lock that ends with its process, and checkpoints and texts that are replaced as a whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from draftwing.errors import CheckpointError, DraftwingError
from draftwing.files import check_regular

if sys.platform != "win32":  # there, files are not locked
    import fcntl

CHECKPOINT = "checkpoint.pt"


@contextmanager
def locked(path: Path, problem: type[DraftwingError], *, is_file: bool = False) -> Iterator[None]:
    """Keep other processes from writing to ``path``, a folder (made if it is missing) or a file.

    The system drops the lock when the process ends, in any way.

    Raises:
        DraftwingError: of the class ``problem``: another process writes there, or the path cannot be written.
    """
    file = path.with_name(f".{path.name}.lock") if is_file else path / ".lock"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = _acquire(file)
    except OSError as error:
        kind = "file" if is_file else "folder"
        raise problem(f"{path}: cannot be written to ({error}): give another {kind}") from error
    if handle is None:
        holder = ""
        with suppress(OSError, ValueError):
            holder = f" (process {int(file.read_text())})"
        raise problem(
            f"{path}: another run{holder} is writing here, and the two would damage each other's work: wait for it, "
            f"stop it, or choose another --out"
        )
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()  # before the lock is dropped, so that it is never another process's file
        os.close(handle)


def _acquire(file: Path) -> int | None:
    """Return the locked file's descriptor; None if another process holds the lock."""
    while True:
        handle, is_ours = os.open(file, os.O_RDWR | os.O_CREAT, 0o644), False
        try:
            if sys.platform != "win32":
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:
            pass  # a file system without locks
        try:
            with suppress(FileNotFoundError):  # its holder may have removed the file: then there is a new one
                if os.path.samestat(os.fstat(handle), file.stat()):
                    os.ftruncate(handle, 0)
                    os.write(handle, str(os.getpid()).encode())
                    is_ours = True
                    return handle
        finally:
            if not is_ours:
                os.close(handle)


def write_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Replace the folder's checkpoint.

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


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn OSError of the block, which writes to ``path``, into CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error}): free some space, or choose another --out"
        ) from error


def write_atomically(file: Path, text: str) -> None:
    """Replace a text file. Raises CheckpointError if it cannot be written."""
    partial = file.with_name(file.name + ".partial")
    with writing(file):
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, file)
