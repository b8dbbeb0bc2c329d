"""One writer at a time for a folder or a file: a lock that ends with the process that holds it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from draftwing.errors import CheckpointError, DraftwingError

if sys.platform != "win32":  # where nobody is kept from writing twice
    import fcntl


@contextmanager
def locked(path: Path, problem: type[DraftwingError], *, is_file: bool = False) -> Iterator[None]:
    """Be the only one that writes to ``path``, a folder (made where there is none) or a file.

    The system drops the lock when its process ends, however it ends, so that no lock is ever left behind.

    Raises:
        DraftwingError: of the class ``problem``: another process writes there, or nobody can.
    """
    file = path.with_name(f".{path.name}.lock") if is_file else path / ".lock"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        held = _acquire(file)
    except OSError as error:
        kind = "file" if is_file else "folder"
        raise problem(f"{path}: cannot be written to ({error}): give another {kind}") from error
    if held is None:
        raise problem(
            f"{path}: another run{_holder(file)} writes here at this moment, and the two would spoil each other's "
            f"work: wait for it, stop it, or choose another --out"
        )
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()  # before the lock is dropped, so that it is never another process's file
        os.close(held)


def _acquire(file: Path) -> int | None:
    while True:
        number = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not _lock(number):
                os.close(number)
                return None
            if _is_same(number, file):
                os.ftruncate(number, 0)
                os.write(number, str(os.getpid()).encode())
                return number
        except BaseException:
            os.close(number)
            raise
        os.close(number)  # its holder removed the file while this one waited to open it: there is a new one


def _lock(number: int) -> bool:
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _is_same(number: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(number), file.stat())
    except FileNotFoundError:
        return False


def _holder(file: Path) -> str:
    """Who has the lock, for a message."""
    with suppress(OSError, ValueError):
        return f" (process {int(file.read_text())})"
    return ""


# Checkpoints of a training run: written whole or not at all, so that a kill at any moment loses nothing older.


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
