"""Read and write files, lock output folders, and keep this machine's cache folder.

The cache folder holds the compiled kernel and downloaded models. These files are executed and trusted,
so no other user may write to it. On Linux the folder is opened once, its owner and mode are checked on the open handle,
and files are accessed through it: replacing the folder after the check has no effect.
"""

from __future__ import annotations

import difflib
import errno
import glob
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from draftwing.errors import CheckpointError, DraftwingError, shown

if sys.platform != "win32":  # there, output folders are not locked
    import fcntl

_POSIX = os.name == "posix"
_NUMBERS = count()
_PATIENCE = 60.0  # seconds to wait for the lock of another process, which may be stopped
_FIXES = {
    errno.ENOSPC: "the disk is full: make room, or write elsewhere",
    errno.EDQUOT: "your disk quota is used up: make room, or write elsewhere",
    errno.EFBIG: "the file would exceed the size limit: raise the limit, or write elsewhere",
    errno.EACCES: "writing is not allowed there: choose your own folder",
    errno.EPERM: "writing is not allowed there: choose your own folder",
    errno.EROFS: "the disk is read-only: write elsewhere",
    errno.EEXIST: "part of the path is a file: choose another path",
    errno.ENOTDIR: "part of the path is a file: choose another path",
}


# --- reading ---------------------------------------------------------------------------------------------------------


def expand_user(path: str | Path) -> Path:
    """Replace ``~`` and ``~USER`` at the start of a path, unless there is no such user, as shells do."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def exists(path: str | Path) -> bool:
    """Return True if there is such a file or folder; False also for names that the system cannot have."""
    try:
        return expand_user(path).exists()
    except (OSError, ValueError):  # too long, a null character
        return False


def similar_paths(path: str | Path) -> list[str]:
    """Return at most two existing paths that a missing one may be a misspelling of, best first."""
    parts = expand_user(path).parts
    for index in range(len(parts)):
        if not exists(Path(*parts[: index + 1])):
            parent = Path(*parts[:index])
            with suppress(OSError, ValueError):
                close = difflib.get_close_matches(parts[index], os.listdir(parent), n=2, cutoff=0.65)
                found = [Path(parent, name, *parts[index + 1 :]) for name in close]
                return [str(path) for path in found if path.exists()]
            break
    return []


def check_regular(path: Path) -> None:
    """Raise OSError for a pipe, a socket or a device, since reading it may block forever."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path.name} is not a regular file")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is not JSON, or nested too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def read_json(path: Path) -> Any:
    """Return the value of a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON in UTF-8, or nested too deep.
    """
    check_regular(path)
    return parse_json(path.read_text(encoding="utf-8"))


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it cannot be read, or holds something else.
    """
    try:
        value = read_json(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected JSON, cannot be read ({error}). Download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {shown(value)}. Download it again.")
    return value


# --- output files ----------------------------------------------------------------------------------------------------


@contextmanager
def writing(path: Path, problem: type[DraftwingError] = CheckpointError, note: str = "") -> Iterator[None]:
    """Turn an error of the block, which writes to ``path``, into a ``problem`` with its cause, the fix and ``note``."""
    try:
        yield
    except Exception as error:  # torch.save raises RuntimeError for a full disk, safetensors its SafetensorError
        if not isinstance(error, OSError | RuntimeError) and type(error).__name__ != "SafetensorError":
            raise
        cause = _cause(error)
        raise problem(f"{path}: cannot be written ({cause}): {write_fix(cause)}{note}") from error


def _cause(error: Exception) -> Exception:
    """Return the system's error that led to an error, or the error itself. torch.save hides it if it writes a file."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def write_fix(error: Exception) -> str:
    """Return what to do about a file that could not be written."""
    code = error.errno if isinstance(error, OSError) else None
    if code is None:  # the safetensors writer has the system's message, not its number
        code = next((code for code in _FIXES if os.strerror(code) in str(error)), None)
    return _FIXES.get(code or 0, "check the path and the disk")


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a path to write to. It replaces ``file`` when the block ends, and is deleted if the block fails."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        yield partial
        with partial.open("rb+") as written:
            os.fsync(written.fileno())  # or the name might reach the disk before the contents
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def write_text(file: Path, text: str) -> None:
    """Write a text file, whole or not at all. Raises CheckpointError if it cannot be written."""
    with writing(file), replacing(file) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write to. It becomes ``folder`` when the block ends, and is deleted if the block fails.

    If ``folder`` exists, its files of the same names are replaced, and others stay.
    """
    remove_leftovers(folder)
    partial = partial_name(folder)
    try:
        partial.mkdir(parents=True)
        yield partial
        if not _renamed(partial, folder):
            # The config last, and no config until then: a kill must not leave one next to the weights of another.
            old, new = (place / "config.json" for place in (folder, partial))
            if old.exists() and new.exists() and old.read_bytes() != new.read_bytes():
                old.unlink()
            for file in sorted(partial.iterdir(), key=lambda file: file.name == "config.json"):
                os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _renamed(partial: Path, folder: Path) -> bool:
    """Rename a folder to a new name; return False if there is a folder, which another process may just have made."""
    if folder.is_dir():  # renaming onto it would fail, or replace some shell's current folder
        return False
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        return False
    return True


def partial_name(path: Path) -> Path:
    """Return the name under which a file or folder is written before it is complete, different for each writer."""
    path = Path(os.path.abspath(path))  # "." has no name
    return path.parent / f".{path.name}.{next(_NUMBERS)}.{os.getpid()}.partial"


def remove_leftovers(path: Path) -> None:
    """Remove the partial files and folders of writers of ``path`` that were killed."""
    path = Path(os.path.abspath(path))
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        if not _is_running(leftover.suffixes[-2].removeprefix(".")):
            with suppress(OSError):
                leftover.unlink() if leftover.is_file() else shutil.rmtree(leftover)


def _is_running(process: str) -> bool:
    if not _POSIX or not process.isdigit():
        return True
    try:
        os.kill(int(process), 0)
    except (OSError, OverflowError) as error:
        return not isinstance(error, ProcessLookupError)
    return True


@contextmanager
def locked(path: Path, problem: type[DraftwingError], *, is_file: bool = False) -> Iterator[None]:
    """Keep other processes from writing to ``path``, a folder (made if it is missing) or a file.

    The system drops the lock when the process ends, in any way.

    Raises:
        DraftwingError: of the class ``problem``: another process writes there, or the path cannot be written.
    """
    file = path.with_name(f".{path.name}.lock") if is_file else path / ".lock"
    with ExitStack() as handles:
        with writing(path, problem):
            file.parent.mkdir(parents=True, exist_ok=True)
            is_current = False
            while not is_current:  # the process that held the lock may have removed the file
                lock = handles.enter_context(file.open("a+", encoding="utf-8"))
                _lock_or_refuse(lock.fileno(), path, file, problem)
                with suppress(FileNotFoundError):
                    is_current = os.path.samestat(os.fstat(lock.fileno()), file.stat())
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
        try:
            yield
        finally:
            with suppress(OSError):
                file.unlink()  # before the lock is dropped, so that it is never another process's file


def _lock_or_refuse(handle: int, path: Path, file: Path, problem: type[DraftwingError]) -> None:
    try:
        if sys.platform != "win32":
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = file.read_text() if file.exists() else ""
        raise problem(
            f"{path}: another run{f' (process {holder})' if holder.isdecimal() else ''} is writing here, and the two "
            f"would damage each other's work: wait for it, stop it, or choose another --out"
        ) from None
    except OSError:
        pass  # a file system without locks


class RecordFile:
    """The whole lines of a file. An unfinished last line, which a kill leaves, is ignored, then overwritten.

    Args:
        file: need not exist.

    Raises:
        CheckpointError: the file cannot be read.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            content = file.read_bytes() if file.exists() else b""
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read ({error}): choose another --out") from error
        *self._lines, unfinished = content.split(b"\n")
        self._num_bytes = len(content) - len(unfinished)

    def load(self, take: Callable[[Any], None]) -> None:
        """Call ``take`` with every record.

        Raises:
            CheckpointError: a line is not JSON, or ``take`` raises KeyError, TypeError or ValueError.
        """
        for number, line in enumerate(self._lines, 1):
            try:
                take(parse_json(line))
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{self._file}, line {number}: not a record of draftwing bench ({error!r}): delete the "
                    f"line, or delete the file to start again"
                ) from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record and sync it to disk.

        Raises:
            CheckpointError: for example if the disk is full.
        """
        line = json.dumps(record, ensure_ascii=False, default=str).encode() + b"\n"
        try:
            with self._file.open("ab") as file:
                file.truncate(self._num_bytes)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"{self._file}: cannot be written to ({error}): {write_fix(error)}; earlier records are kept"
            ) from error
        self._num_bytes += len(line)


# --- the cache folder ------------------------------------------------------------------------------------------------


def cache_folder() -> Path | None:
    """Return ``$DRAFTWING_CACHE``, or ``draftwing`` in the user's cache folder; None for a user without a home."""
    if path := os.environ.get("DRAFTWING_CACHE"):
        return expand_user(path)  # no shell has, if it was quoted or comes from a settings file
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftwing"
    except RuntimeError:
        return None


@contextmanager
def private_folder() -> Iterator[Folder]:
    """Create the cache folder if it is missing, check it, and keep it open until the block ends.

    Raises:
        OSError: it cannot be created, or other users may write to it.
    """
    path = cache_folder()
    if path is None:
        raise OSError("this user has no home folder: name a folder in DRAFTWING_CACHE")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # another process created it
            path.mkdir(0o700)
    with open_folder(path) as folder:
        yield folder


@contextmanager
def open_folder(path: Path) -> Iterator[Folder]:
    """Check an existing folder and keep it open until the block ends.

    Raises:
        OSError: it is not a folder, belongs to another user, or other users may write to it.
    """
    if not _POSIX:
        yield Folder(path, path)
        return
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise OSError(f"{path} is a link or a file: set DRAFTWING_CACHE to the folder itself") from None
    try:
        state = os.fstat(handle)
        if not _is_trusted(state):
            raise OSError(f"{path} belongs to another user (uid {state.st_uid}): set DRAFTWING_CACHE to your own")
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
        path: its path, for messages.
        at: the path through which its files are accessed; refers to the folder that was checked.
    """

    def __init__(self, path: Path, at: Path) -> None:
        self.path, self.at = path, at

    def names(self) -> list[str]:
        return sorted(os.listdir(self.at))

    def read(self, name: str) -> bytes:
        """Return a file's content.

        Raises:
            OSError: it does not exist, is a link, or belongs to another user.
        """

        def open_file(path: str, flags: int) -> int:
            return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))

        with open(self.at / name, "rb", opener=open_file) as file:
            if not _is_trusted(os.fstat(file.fileno())):
                raise OSError(f"{self.path / name} belongs to another user: delete it")
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically: completely or not at all."""
        handle, temporary = tempfile.mkstemp(dir=self.at, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, self.at / name)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def remove(self, name: str) -> None:
        """Delete a file, if it exists and that is allowed."""
        with suppress(OSError):
            (self.at / name).unlink()

    @contextmanager
    def locked(
        self, name: str = "lock", patience: float | None = None, on_wait: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Hold a lock that other processes respect; a process that exits releases its locks.

        Without write access, or on a file system without locks, this has no effect.

        Args:
            name: the lock's file.
            patience: seconds after which to continue without the lock, as its holder must be stuck; None is a minute.
            on_wait: called once if the lock is not free.
        """
        try:
            if sys.platform == "win32":
                raise OSError("no locks")
            handle = os.open(self.at / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:  # a read-only folder
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
