"""The folder of files that belong to this machine: the compiled kernel, measured costs, fetched models.

These files are executed and trusted, so no other user may write to the folder. On Linux the folder is opened once,
its owner and mode are read from the open folder, and files are reached through that: a folder that is swapped for
another one after the check changes nothing.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_POSIX = os.name == "posix"
_PATIENCE = 60.0  # seconds to wait for another process's lock: it may have been stopped


def cache_folder() -> Path | None:
    """``$DRAFTWING_CACHE``, or ``draftwing`` in the user's cache; None for a user without a home."""
    own = os.environ.get("DRAFTWING_CACHE")
    if own:
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftwing"
    except RuntimeError:
        return None


@contextmanager
def private_folder() -> Iterator[Folder]:
    """The cache folder, made where it is missing, checked, and open until the block ends.

    Raises:
        OSError: there is none, it cannot be made, or others may write to it.
    """
    path = cache_folder()
    if path is None:
        raise OSError("this user has no home folder: name a folder in DRAFTWING_CACHE")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # another process was faster
            path.mkdir(0o700)
    with open_folder(path) as folder:
        yield folder


@contextmanager
def open_folder(path: Path) -> Iterator[Folder]:
    """An existing folder, checked, and open until the block ends.

    Raises:
        OSError: it is no folder, belongs to another user, or others may write to it.
    """
    if not _POSIX:
        yield Folder(path, path)
        return
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise OSError(f"{path} is a link or a file: name the folder itself in DRAFTWING_CACHE") from None
    try:
        state = os.fstat(handle)
        if not _is_trusted(state):
            raise OSError(f"{path} belongs to another user (uid {state.st_uid}): name your own in DRAFTWING_CACHE")
        if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OSError(f"{path} may be written by other users: run `chmod 700 {path}`")
        through = Path(f"/proc/self/fd/{handle}")
        yield Folder(path, through if through.exists() else path)
    finally:
        os.close(handle)


def _is_trusted(state: os.stat_result) -> bool:
    """Return True if a file or folder belongs to this user, or to root, which is not restricted anyway."""
    return not _POSIX or state.st_uid in (os.geteuid(), 0)


class Folder:
    """An open private folder.

    Attributes:
        path: its name, for messages.
        at: where its files are reached: the very folder that was checked, whatever its name stands for by now.
    """

    def __init__(self, path: Path, at: Path) -> None:
        self.path, self.at = path, at

    def names(self) -> list[str]:
        return sorted(os.listdir(self.at))

    def read(self, name: str) -> bytes:
        """A whole file.

        Raises:
            OSError: there is none, it is a link, or it belongs to another user.
        """
        with open(self.at / name, "rb", opener=_open_plain) as file:
            if not _is_trusted(os.fstat(file.fileno())):
                raise OSError(f"{self.path / name} belongs to another user: delete it")
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """A whole file or, where anything goes wrong, none."""
        handle, fresh = tempfile.mkstemp(dir=self.at, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(fresh, self.at / name)
        except BaseException:
            with suppress(OSError):
                os.unlink(fresh)
            raise

    def remove(self, name: str) -> None:
        """A file, if it is there and can be removed."""
        with suppress(OSError):
            (self.at / name).unlink()

    @contextmanager
    def locked(
        self, name: str = "lock", patience: float | None = None, on_wait: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Alone among processes that ask for it: a dead one holds no lock, and one that is stuck is not waited for.

        Args:
            name: of the lock's file.
            patience: seconds after which a process that holds the lock counts as stuck; None is a minute.
            on_wait: called once where the lock is not free.
        """
        try:
            import fcntl

            handle = os.open(self.at / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except (ImportError, OSError):  # a folder that can only be read
            yield
            return
        try:
            until = time.monotonic() + (_PATIENCE if patience is None else patience)
            while time.monotonic() < until:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if on_wait is not None:
                        on_wait()
                        on_wait = None
                    time.sleep(0.05)
                except OSError:  # a file system without locks
                    break
            yield
        finally:
            os.close(handle)


def _open_plain(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))
