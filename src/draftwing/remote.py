"""Files and folders at URLs (``s3://``, ``gs://``, ``hf://``, ``https://``, ...), copied to this machine by fsspec.

The cache folder has a copy of each URL in ``data/KEY/NAME``, where KEY is a hash of the URL and NAME a part of it. A
file is replaced when it is complete, and only if its size, hash or time has changed at the URL. An interrupted download
continues at the byte where it stopped.

URLs and the messages of their clients may have passwords and signatures in them, so neither is shown unchanged.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from rich.filesize import decimal

from draftwing.errors import DataError
from draftwing.storage import open_folder, private_folder, write_fix

OnProgress = Callable[[int, int], None]  # called with the amount done and the total
Phase = Callable[[str], AbstractContextManager[OnProgress]]  # shows a title until its block ends

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
CHUNK_BYTES = 2**23  # read at once: few requests, and progress every second at 8 MB/s
MIN_SECRET = 4  # characters; shorter values of a query, such as 1, are also parts of harmless words
# Fields that describe a file's version, in various file systems. Addresses may change without the file.
_VERSION = (
    "size", "ETag", "etag", "md5", "md5Hash", "content_md5", "Content-MD5", "Digest", "blob_id", "xet_hash",
    "generation", "VersionId", "LastModified", "last_modified", "Last-Modified", "mtime", "modified", "created",
)  # fmt: skip
copies: dict[str, Path] = {}  # in this process, so that it reads one version only


def is_url(source: str | Path) -> bool:
    """Return True for ``protocol://...``; a ``Path`` is always a local file."""
    return isinstance(source, str) and _URL.match(source) is not None


def public_name(source: str | Path) -> str:
    """Return a source for messages and records: a URL without user, password and query."""
    if not isinstance(source, str) or not is_url(source):
        return str(source)
    protocol, _, rest = source.partition("://")
    place, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{protocol}://{place.rpartition('@')[2]}{slash}{path}"


def local_copy(source: str | Path, on_progress: OnProgress | None = None) -> Path:
    """Return the path of a local source, or of a copy of the file or folder at a URL, downloaded if need be.

    Args:
        on_progress: called with the bytes that are on this machine and the total, if anything is downloaded.

    Raises:
        DataError: a package is missing, the URL cannot be read, or the cache folder cannot be written.
    """
    if not isinstance(source, str) or not is_url(source):
        return Path(source)
    if source not in copies:
        copies[source] = _copy(source, on_progress or (lambda done, total: None))
    return copies[source]


def download(sources: Iterable[str | Path], phase: Phase) -> None:
    """Copy every URL among the sources to this machine, each in a phase that shows the bytes."""
    for source in sources:
        if is_url(source) and source not in copies:
            with phase(f"downloading {public_name(source)}, bytes") as on_progress:
                local_copy(source, on_progress)


def _copy(url: str, on_progress: OnProgress) -> Path:
    name = public_name(url)
    system, path = _call(url, _open_system, url)
    info = _call(url, system.info, path)
    root, is_folder = str(info["name"]).rstrip("/"), info["type"] == "directory"
    listed = _call(url, partial(system.find, detail=True), path) if is_folder else {}
    parts = [part for part in unquote(name.partition("://")[2]).split("/") if part.strip(".")]
    files: dict[str, Mapping[str, Any]] = {}
    if not is_folder:
        # In a folder of the same name as at the URL: some files are known by their folders.
        files["/".join(parts[-1:]) or "file"] = {**info, "name": path}
        parts = parts[:-1]
    for place, entry in listed.items():
        relative = place.removeprefix(root).lstrip("/")
        if not place.startswith(root) or ".." in PurePosixPath(relative).parts:
            raise DataError(f"{name}: lists {place}, which is not in this folder: give another folder")
        if relative and not any(part.startswith(".") for part in PurePosixPath(relative).parts):
            files[relative] = entry
    if not files:
        raise DataError(f"{name}: there is no file in this folder: check the path")
    key = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    try:
        with private_folder() as cache:
            home = cache.path / "data" / key
            for folder in (home.parent, home):
                with suppress(FileExistsError):
                    folder.mkdir(0o700)
            with open_folder(home) as opened, opened.locked("lock", math.inf):
                place = home / (parts[-1] if parts else "files")
                _Mirror(url, system, home, place).update(files, on_progress)
    except OSError as error:
        raise DataError(
            f"{name}: its copy cannot be written to the cache ({error}): {write_fix(error)}, such as another "
            f"DRAFTWING_CACHE; what was downloaded is kept"
        ) from error
    return place if is_folder else place / next(iter(files))


class _Mirror:
    """The copy in ``place``. ``home/stamps`` has the versions of its files, and ``home/partial`` unfinished ones."""

    def __init__(self, url: str, system: Any, home: Path, place: Path) -> None:
        self._url, self._system, self._home, self._place = url, system, home, place

    def update(self, files: Mapping[str, Mapping[str, Any]], on_progress: OnProgress) -> None:
        """Make the copy equal to ``files``, whose descriptions are those of fsspec."""
        missing = {
            name: info
            for name, info in files.items()
            if not (self._place / name).is_file() or self._stamp(name) != _version(info)
        }
        total, needed = (sum(int(i.get("size") or 0) for i in infos.values()) for infos in (files, missing))
        done = total - needed
        for folder in ("stamps", "partial"):
            (self._home / folder).mkdir(exist_ok=True)
        kept = sum(file.stat().st_size for file in (self._home / "partial").iterdir())
        if needed - kept > shutil.disk_usage(self._home).free:
            raise OSError(errno.ENOSPC, f"{decimal(needed - kept)} are needed")
        for name, info in missing.items():
            on_progress(done, total)
            for num_bytes in self._fetch(name, info):
                on_progress(done + num_bytes, total)
            done += int(info.get("size") or 0)
        for path in self._place.rglob("*"):
            if path.is_file() and path.relative_to(self._place).as_posix() not in files:
                path.unlink()
        if missing:
            on_progress(total, total)
            shutil.rmtree(self._home / "partial")  # parts of other versions may be left

    def _fetch(self, name: str, info: Mapping[str, Any]) -> Iterator[int]:
        """Download a file, and yield the number of bytes that it has so far."""
        part = self._home / "partial" / _digest(f"{name} {_version(info)}")
        size, file = info.get("size"), self._place / name
        with part.open("ab") as out:
            num_bytes = out.tell()
            stream = self._open(info["name"], num_bytes)
            if stream is None:
                num_bytes = out.truncate(0)
                stream = self._open(info["name"], 0)
            with stream:
                chunk = b"\0"
                while chunk:
                    yield num_bytes
                    chunk = _call(self._url, stream.read, CHUNK_BYTES)
                    num_bytes += out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if size is not None and num_bytes != size:
            part.unlink()
            raise DataError(
                f"{public_name(self._url)}: {name} should have {size:,} bytes, and {num_bytes:,} were received: run "
                f"the same command again"
            )
        stamp = self._stamp_file(name)
        stamp.unlink(missing_ok=True)  # it must never belong to another version than the file
        file.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, file)
        stamp.write_text(_version(info), encoding="utf-8")

    def _open(self, path: str, start: int) -> Any:
        """Open a file at a byte; return None if its server only sends whole files (HTTP without ranges)."""
        options = {"block_size": 0} if self._url.startswith("http") and not start else {}  # one request for all of it
        stream = _call(self._url, partial(self._system.open, **options), path, "rb")
        if start:
            try:
                stream.seek(start)
                stream.read(1)  # HTTP files find out when they read
                stream.seek(start)
            except (OSError, ValueError):
                stream.close()
                return None
        return stream

    def _stamp_file(self, name: str) -> Path:
        return self._home / "stamps" / _digest(name)

    def _stamp(self, name: str) -> str:
        with suppress(FileNotFoundError):
            return self._stamp_file(name).read_text(encoding="utf-8")
        return ""


def _version(info: Mapping[str, Any]) -> str:
    return _digest(str([(field, str(info[field])) for field in _VERSION if info.get(field) is not None]))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _open_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    import fsspec  # slow to import

    return fsspec.core.url_to_fs(url)  # type: ignore[no-any-return]


def _call(url: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of a client. Raises DataError without secrets for any error."""
    name, protocol = public_name(url), url.partition("://")[0]
    try:
        return function(*args)
    except FileNotFoundError:
        problem = "there is no such file or folder, or it is not public: check the address and your credentials"
    except ImportError as error:
        module = getattr(error.__cause__, "name", None) or error.name or protocol
        package = module.partition(".")[0]
        problem = f"{protocol}:// needs the package {package}: run pip install {package}"
    except Exception as error:
        if str(error) == f"Protocol not known: {protocol}":
            problem = f"the protocol {protocol} is unknown: give s3://, gs://, az://, hf:// or https://"
        else:
            text = _without_secrets(f"{type(error).__name__}: {error}", url)
            problem = (
                f"it cannot be read ({text}): check the address, the network and your credentials; what was downloaded "
                f"is kept, and the same command continues"
            )
    raise DataError(f"{name}: {problem}")  # not in the except block: tracebacks would show the client's message


def _without_secrets(text: str, url: str) -> str:
    """Remove a URL's user and query from a client's message, and those of other URLs in it, such as redirects."""
    parts = urlsplit(url)
    user = parts.netloc.rpartition("@")[0]
    values = [value for _, value in parse_qsl(parts.query) if len(value) >= MIN_SECRET]
    for secret in (parts.query, user, user.partition(":")[2], *values):
        for form in {secret, unquote(secret)} - {""}:
            text = text.replace(form, "...")
    text = re.sub(r"(\w://)[^\s/@'\"]*@", r"\1", text)
    return re.sub(r"(\w://[^\s?#'\"]*)[?#][^\s'\"]*", r"\1", text)
