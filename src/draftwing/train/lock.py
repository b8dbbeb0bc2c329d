"""One writer at a time for a folder or a file: a lock that ends with the process that holds it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from draftwing.errors import DraftwingError

if sys.platform != "win32":  # where nobody is kept from writing twice
    import fcntl

__all__ = ["locked"]


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
    """The locked file's descriptor; None where another process has it."""
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
    """Whether the name still stands for the open file."""
    try:
        return os.path.samestat(os.fstat(number), file.stat())
    except FileNotFoundError:
        return False


def _holder(file: Path) -> str:
    """Who has the lock, for a message."""
    with suppress(OSError, ValueError):
        return f" (process {int(file.read_text())})"
    return ""
