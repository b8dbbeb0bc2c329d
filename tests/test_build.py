"""Where the compiled kernel comes from: found whole, compiled once, proven before it runs, and never anyone else's."""

import ctypes
import errno
import os
import platform
import signal
import stat
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from draftwing import storage
from draftwing.cpu import build, layout, library
from draftwing.cpu import noise as noise_module
from draftwing.cpu.build import KernelProblem, with_library
from draftwing.cpu.layout import BLOCKS, FORMATS, RowForm
from draftwing.cpu.library import get_kernel, kernel_notice, kernel_problem
from draftwing.cpu.noise import NativeNoise, noise_of
from draftwing.cpu.selftest import fault_of
from draftwing.errors import ConfigError, DraftwingWarning
from draftwing.storage import cache_folder, open_folder, private_folder

# A kernel that fails its own test must not go unnoticed: only what nobody could compile is left out.
CAN_COMPILE = sys.platform == "linux" and build.find_compiler() is not None
needs_kernel = pytest.mark.skipif(not CAN_COMPILE, reason="no C++ compiler here")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def compiled() -> Path:
    """A library that was compiled here, to be handed out by compilers that only pretend."""
    folder = cache_folder()
    assert folder is not None
    with_library(library.open_library)
    return next(folder.glob("kernel-*.so"))


class Shop:
    """A folder of its own, and a compiler that copies, and counts how often."""

    def __init__(self, path: Path, compiled: Path) -> None:
        self.cache, self.temp, self.compiled = path / "cache", path / "temp", compiled
        self.temp.mkdir()
        self.log, self.script = path / "log", path / "cc"
        self.write()

    def write(self, before: str = "", body: str = 'cp {compiled} "$2"') -> None:
        script = f"#!/bin/sh\necho . >> {self.log}\n{before}\n"
        script += 'while [ "$1" != "-o" ]; do shift; done\n' + body.format(compiled=self.compiled) + "\n"
        self.script.write_text(script)
        self.script.chmod(0o755)

    @property
    def runs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    @property
    def kept(self) -> list[Path]:
        return sorted(self.cache.glob("kernel-*"))


@pytest.fixture
def shop(tmp_path, compiled, monkeypatch) -> Shop:
    made = Shop(tmp_path, compiled)
    monkeypatch.setenv("DRAFTWING_CACHE", str(made.cache))
    monkeypatch.setenv("CXX", str(made.script))
    monkeypatch.delenv("DRAFTWING_KERNEL_ARCH", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(made.temp))
    yield made
    assert not list(made.temp.iterdir())  # nothing is left behind, whatever happened


def read(path: str, name: str) -> bytes:
    return Path(path).read_bytes()


@needs_kernel
def test_where_there_is_a_compiler_there_is_a_kernel(monkeypatch):
    monkeypatch.delenv("DRAFTWING_KERNEL", raising=False)
    assert kernel_problem() == ""
    assert get_kernel() is not None


# --- kept ------------------------------------------------------------------------------------------------------------


@needs_kernel
def test_it_is_compiled_once_and_kept_in_a_private_folder(shop):
    kernel, not_kept = with_library(library.open_library)
    assert not_kept == ""
    assert stat.S_IMODE(shop.cache.stat().st_mode) == 0o700
    (file,) = shop.kept
    assert file.name.startswith(f"{kernel.name}-")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again, _ = with_library(library.open_library)
    assert (again.name, shop.runs, shop.kept) == (kernel.name, 1, [file])
    assert {path.name for path in shop.cache.iterdir()} == {file.name, "lock"}


@needs_kernel
@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None, "flipped"], ids=["empty", "short", "half", "flipped"])
def test_a_damaged_library_is_never_loaded_and_compiled_again(shop, damage):
    """A truncated one would end the process as soon as it is mapped."""
    with_library(read)
    (file,) = shop.kept
    whole = file.read_bytes()
    bad = bytearray(whole)
    bad[len(whole) // 2] ^= 1
    file.write_bytes({None: whole[: len(whole) // 2], "flipped": bytes(bad)}.get(damage, damage))
    loaded = []

    def load(path, name):
        loaded.append(read(path, name))
        return library.open_library(path, name)

    with_library(load)
    assert loaded == [whole]
    assert shop.runs == 2
    assert shop.kept[0].read_bytes() == whole


@needs_kernel
def test_a_library_that_fails_its_test_is_compiled_again_once(shop):
    with_library(read)
    told = []

    def fails(times):
        def load(path, name):
            told.append(name)
            if len(told) <= times:
                raise KernelProblem("it is wrong")
            return read(path, name)

        return load

    assert with_library(fails(1))[0] == shop.compiled.read_bytes()
    assert (len(told), shop.runs) == (2, 2)
    told.clear()
    with pytest.raises(KernelProblem, match="it is wrong"):
        with_library(fails(9))
    assert (len(told), shop.runs) == (2, 3)
    assert not shop.kept  # what is wrong is not found again


@needs_kernel
def test_other_flags_compilers_and_processors_make_other_libraries(shop, monkeypatch):
    with_library(read)
    for change in ({"CXX": f"{shop.script} -O1"}, {"DRAFTWING_KERNEL_ARCH": "x86-64-v3"}):
        for name, value in change.items():
            monkeypatch.setenv(name, value)
        before = shop.runs
        with_library(read)
        with_library(read)
        assert shop.runs == before + 1
    os.utime(shop.script, ns=(1, 1))  # another version of the compiler
    with_library(read)
    assert shop.runs == 4
    monkeypatch.setattr(build, "_cpu", lambda: "another one")
    with_library(read)
    assert shop.runs == 5
    assert len(shop.kept) == 5


@needs_kernel
def test_where_it_is_started_makes_no_other_library(shop, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", f"{shop.script} -O1")
    with_library(read)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with_library(read)
    assert shop.runs == 1


@needs_kernel
def test_where_no_compiler_is_left_its_library_still_serves(shop, monkeypatch):
    with_library(read)
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert with_library(library.open_library)[0].name == shop.kept[0].name.rpartition("-")[0]
    (file,) = shop.kept
    file.unlink()  # it is in use: what is loaded must not be cut short under this process
    file.write_bytes(b"")
    with pytest.raises(KernelProblem, match=r"no C\+\+ compiler was found: install g\+\+"):
        with_library(read)


def in_children(count, work):
    """The exit codes of forked children."""
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    return children


@needs_kernel
def test_processes_that_start_together_compile_once(shop):
    shop.write(before="sleep 0.5")
    children = in_children(4, lambda: with_library(library.open_library))
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert shop.runs == 1
    assert len(shop.kept) == 1


@needs_kernel
def test_a_process_that_is_killed_while_it_compiles_is_in_nobodys_way(shop):
    shop.write(before=f"echo $$ > {shop.log}.pid; exec sleep 60")
    (child,) = in_children(1, lambda: with_library(read))
    pid = Path(f"{shop.log}.pid")
    while not (pid.exists() and pid.read_text().strip()):
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.kill(int(pid.read_text()), signal.SIGKILL)
    shop.write()
    began = time.monotonic()
    with_library(library.open_library)
    assert time.monotonic() - began < 20  # it does not wait for the dead
    assert {path.name for path in shop.cache.iterdir()} == {shop.kept[0].name, "lock"}
    for left in shop.temp.iterdir():  # a killed process cannot tidy up; what it leaves is in nobody's way
        left.rmdir()


def test_a_process_that_is_stuck_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_PATIENCE", 0.2)
    with open_folder(tmp_path) as one, open_folder(tmp_path) as other, one.locked():
        began = time.monotonic()
        with other.locked():
            assert 0.2 <= time.monotonic() - began < 10


# --- whose folder it is ----------------------------------------------------------------------------------------------


@contextmanager
def foreign(path, monkeypatch):
    """The folder belongs to somebody else."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    yield


@needs_kernel
@pytest.mark.parametrize("who", ["foreign", "world", "group", "link", "file", "file-in-the-way"])
def test_a_folder_that_others_may_write_to_is_not_trusted(who, shop, tmp_path, monkeypatch):
    """A library that was planted there is not even opened."""
    with_library(read)
    (planted,) = shop.kept
    if who == "foreign":
        with foreign(shop.cache, monkeypatch):
            found, reason = with_library(read)
        wanted = "belongs to another user"
    else:
        if who in ("world", "group"):
            shop.cache.chmod(0o777 if who == "world" else 0o770)
            wanted = f"chmod 700 {shop.cache}"
        elif who == "link":
            shop.cache.rename(tmp_path / "real")
            shop.cache.symlink_to(tmp_path / "real")
            wanted = "is a link or a file"
        else:
            monkeypatch.setenv("DRAFTWING_CACHE", str(planted if who == "file" else planted / "below"))
            wanted = "is a link or a file" if who == "file" else "File exists"
        planted.read_bytes()
        found, reason = with_library(read)
    assert wanted in reason
    assert found == shop.compiled.read_bytes()
    assert shop.runs == 2  # compiled for this process alone


@needs_kernel
def test_a_file_of_somebody_else_in_ones_own_folder_is_not_trusted(shop, monkeypatch):
    with_library(read)
    (file,) = shop.kept
    copy = file.read_bytes()
    file.unlink()
    (shop.cache / "target").write_bytes(copy)
    file.symlink_to(shop.cache / "target")
    with_library(read)
    assert shop.runs == 2
    assert not file.is_symlink()
    with foreign(file, monkeypatch), open_folder(shop.temp) as folder:
        del folder
        if os.geteuid() == 0:
            with private_folder() as mine, pytest.raises(OSError, match="belongs to another user"):
                mine.read(file.name)


def test_a_user_without_a_home_has_no_folder(monkeypatch):
    def homeless():
        raise RuntimeError("no home")

    monkeypatch.delenv("DRAFTWING_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder() is None
    with pytest.raises(OSError, match="name a folder in DRAFTWING_CACHE"), private_folder():
        pass


def test_the_folder_may_be_below_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DRAFTWING_CACHE", "~/cache")
    assert cache_folder() == tmp_path / "cache"


@needs_kernel
def test_without_a_folder_it_is_compiled_for_this_process_alone(shop, monkeypatch):
    monkeypatch.setattr(storage, "cache_folder", lambda: None)
    kernel, reason = with_library(library.open_library)
    assert kernel.max_ops > 0
    assert "no home folder" in reason
    assert not shop.cache.exists()


def test_a_folder_stays_the_one_that_was_checked(tmp_path):
    """Whatever its name stands for by then."""
    mine = tmp_path / "mine"
    mine.mkdir(0o700)
    with open_folder(mine) as folder:
        folder.write("one", b"1")
        mine.rename(tmp_path / "moved")
        mine.mkdir()
        (mine / "one").write_bytes(b"planted")
        assert folder.read("one") == b"1"
        folder.write("two", b"2")
    assert (tmp_path / "moved" / "two").read_bytes() == b"2"


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_folder(tmp_path) as folder:
        folder.write("file", b"before")
        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            folder.write("file", b"after")
        assert folder.names() == ["file"]
        assert folder.read("file") == b"before"


# --- what goes wrong -------------------------------------------------------------------------------------------------


@needs_kernel
def test_a_full_disk_is_called_that(shop, monkeypatch):
    shop.write(body="echo 'ld: final link failed: No space left on device' >&2; exit 1")
    with pytest.raises(KernelProblem, match=r"kept nowhere: the disk is full"):
        with_library(read)
    shop.write()

    def full(folder, name, data):
        if folder.path == shop.cache:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder.path / name))
        (folder.at / name).write_bytes(data)

    monkeypatch.setattr(storage.Folder, "write", full)
    before = shop.runs
    found, reason = with_library(read)
    assert found == shop.compiled.read_bytes()
    assert reason.startswith("the disk is full")
    assert shop.runs == before + 1  # not once more for the other folder


@needs_kernel
def test_a_folder_that_can_only_be_read(shop, monkeypatch):
    shop.cache.mkdir(0o700)
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).resolve() != shop.cache and real(path, mode))
    _, reason = with_library(read)
    assert "nothing can be written there" in reason
    assert shop.runs == 1


@needs_kernel
def test_where_the_temporary_folder_is_full_it_is_compiled_beside_the_library(shop, monkeypatch):
    def full():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")  # as tempfile says it

    with_library(read)
    shop.kept[0].unlink()
    monkeypatch.setattr(tempfile, "gettempdir", full)
    assert with_library(read) == (shop.compiled.read_bytes(), "")
    assert {path.name for path in shop.cache.iterdir()} == {shop.kept[0].name, "lock"}


@pytest.mark.parametrize(
    "flag",
    ["-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-fassociative-math", "-ffinite-math-only", "-mrecip",
     "-freciprocal-math", "-ffp-model=fast", "-mrecip=all", "-fno-signed-zeros"],
)  # fmt: skip
def test_flags_that_change_numbers_are_refused(flag, monkeypatch):
    monkeypatch.setenv("CXX", f"g++ -O2 {flag}")
    with pytest.raises(KernelProblem, match=f"CXX holds {flag}, which changes the kernel's numbers: take it out"):
        with_library(read)


@needs_kernel
def test_a_compiler_that_adds_such_flags_itself_is_refused_by_the_sources(shop, monkeypatch):
    monkeypatch.delenv("CXX")
    real = build.find_compiler()
    assert real is not None
    shop.script.write_text(f'#!/bin/sh\nexec {" ".join(real)} -ffast-math "$@"\n')
    monkeypatch.setenv("CXX", str(shop.script))
    with pytest.raises(KernelProblem, match="take them out of CXX"):
        with_library(read)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"CXX": "false"}, "false could not compile the CPU kernel"),
        ({"CXX": "true"}, "true compiled nothing: set CXX"),
        ({"CXX": "'g++"}, "CXX is .*No closing quotation"),
        ({"DRAFTWING_KERNEL_ARCH": "native; rm"}, "DRAFTWING_KERNEL_ARCH is .*: give a name that -march accepts"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_told(change, told, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTWING_CACHE", str(tmp_path / "cache"))
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(KernelProblem, match=told):
        with_library(read)
    assert not list(tmp_path.glob("cache/kernel-*"))


@pytest.fixture
def fresh():
    """The kernel is looked for again, in the test and after it."""
    library._load.cache_clear()
    noise_module._shown_notices.clear()
    yield
    library._load.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_decoding_without_the_kernel_warns_once_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTWING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "false")
    assert get_kernel() is None
    assert kernel_problem().startswith("false could not compile the CPU kernel")
    with pytest.warns(DraftwingWarning, match="PyTorch runs what .*: false could not compile.*DRAFTWING_KERNEL=off"):
        assert not isinstance(noise_of(7, CPU), NativeNoise)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        noise_of(7, CPU)
    monkeypatch.setenv("DRAFTWING_KERNEL", "off")
    noise_module._shown_notices.clear()
    assert kernel_notice() == ""
    assert kernel_problem() == "DRAFTWING_KERNEL is off"
    noise_of(7, CPU)
    monkeypatch.setenv("DRAFTWING_KERNEL", "0")
    with pytest.raises(ConfigError, match="DRAFTWING_KERNEL must be on or off, found '0'"):
        get_kernel()


@needs_kernel
@pytest.mark.usefixtures("fresh")
def test_a_kernel_that_cannot_be_kept_warns_once(shop):
    shop.cache.mkdir()
    shop.cache.chmod(0o777)
    with pytest.warns(DraftwingWarning, match="compiled again by every process: .*chmod 700"):
        assert isinstance(noise_of(7, CPU), NativeNoise)
    assert kernel_problem() == ""
    noise_of(7, CPU)


# --- from a wheel ----------------------------------------------------------------------------------------------------


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """The folder of libraries in a wheel of every platform, on a machine that can compile nothing."""
    for level in build.LEVELS:
        (tmp_path / f"{level}-{build.hash_of(level)}.so").write_text(level)
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setenv("DRAFTWING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "false")
    monkeypatch.delenv("DRAFTWING_KERNEL_ARCH", raising=False)
    return tmp_path


AVX2 = "x86_64flags\t\t: fpu sse2 avx2 fma f16c bmi1 bmi2 abm movbe"
AVX512 = f"{AVX2} avx512f avx512dq avx512cd avx512bw avx512vl"
ARM = "aarch64Features\t: fp asimd atomics asimdrdm asimddp"


@pytest.mark.parametrize(
    ("processor", "arch", "level"),
    [
        (AVX2, "", "x86-64-v3"),
        (f"{AVX2} avx_vnni", "", "x86-64-v3+avxvnni"),
        (AVX512, "", "x86-64-v3"),
        (f"{AVX512} avx512_vnni avx_vnni", "", "x86-64-v4+avx512vnni+amx"),
        (f"{AVX512} avx512_vnni", "x86-64-v3", "x86-64-v3"),
        (ARM, "", "armv8.2-a+dotprod"),
        (f"{ARM} i8mm", "", "armv8.2-a+dotprod+i8mm"),
        ("arm64 Apple M2 Pro", "", "apple-m1"),
        (AVX2.replace("avx2", "avx"), "", None),
        (AVX2, "x86-64-v3+avxvnni", None),
        (AVX2, "native", None),
    ],
)
def test_the_best_library_of_a_wheel_that_the_processor_supports_is_used(processor, arch, level, wheel, monkeypatch):
    monkeypatch.setattr(build, "_cpu", lambda: processor)
    monkeypatch.setenv("DRAFTWING_KERNEL_ARCH", arch)
    if level is None:
        with pytest.raises(KernelProblem, match="could not compile"):
            with_library(read)
    else:
        assert with_library(read) == (level.encode(), "")
        assert not (wheel / "cache").exists()


def test_damaged_libraries_of_a_wheel_and_those_that_fail_their_test_are_passed_over(wheel, monkeypatch):
    monkeypatch.setattr(build, "_cpu", lambda: f"{AVX512} avx512_vnni avx_vnni")
    next(wheel.glob("*amx*")).write_text("")

    def load(path, name):
        if "avxvnni" in name:
            raise KernelProblem("it is wrong")
        return read(path, name)

    assert with_library(load)[0] == b"x86-64-v3"


# --- proven before it runs -------------------------------------------------------------------------------------------


class Broken:
    """A library one of whose functions is wrong now and then."""

    def __init__(self, compiled: Path, **changes) -> None:
        self._real = ctypes.CDLL(str(compiled))
        library.Kernel(self._real, "")
        self._changes = changes

    def __getattr__(self, name):
        real = getattr(self._real, name)
        change = self._changes.get(name.removeprefix("draftwing_"))
        return (lambda *args: (real(*args), change(*args))[0]) if change is not None else real


def numbers(address, count):
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (count,))


def spoils(wanted):
    """One number of a result, by so little that only a close look finds it."""

    def change(ops, num_ops, batch, threads):
        op, outcome = ops[0], ctypes.cast(batch, ctypes.POINTER(layout.BatchStruct))[0]
        if (op.kind, op.epilogue, op.format) == wanted:
            found = numbers(outcome.buffers[1], outcome.rows * outcome.widths[1])
            found[np.abs(found).argmax()] *= 1.0001

    return change


def spoils_narrow(form):
    """The last bit of a sum whose rows are rounded, or split."""

    def change(ops, num_ops, batch, threads):
        if ops[0].row_form != form:
            return
        outcome = ctypes.cast(batch, ctypes.POINTER(layout.BatchStruct))[0]
        found = numbers(outcome.buffers[1], outcome.rows * outcome.widths[1])
        found[-1] = np.nextafter(found[-1], np.float32(9))

    return change


def spoils_rows(wanted):
    """The same of single rows."""

    def change(format, weight, num_in, outputs, out, count):
        if format == wanted:
            numbers(out, num_in)[5] += 1

    return change


def spoil_accept(how):
    found = ctypes.cast(how, ctypes.POINTER(layout.AcceptStruct))[0].found
    ctypes.cast(found, ctypes.POINTER(ctypes.c_int64))[11] = 1


WIDENED = ("bfloat16", "float16", *BLOCKS)


@needs_kernel
@pytest.mark.parametrize(
    ("fault", "changes"),
    [
        ("", {}),
        ("products", {"run": spoils((2, 0, 0))}),
        ("norms", {"run": spoils((1, 0, 0))}),
        ("activations", {"run": spoils((2, 2, 0))}),
        ("8-bit products", {"run": spoils((2, 0, 3))}),
        *(
            (f"{name} weights", {"run": spoils((2, 0, FORMATS[name].code))})
            for name in ("bfloat16", "float16", *BLOCKS)
        ),
        *(
            (f"bfloat16 products, rows {form.name.lower()}", {"run": spoils_narrow(form)})
            for form in (RowForm.ROUNDED, RowForm.SPLIT)
        ),
        ("Q4_K weights", {"rows": spoils_rows(FORMATS["Q4_K"].code)}),
        ("noise", {"noise_copy": lambda store, seed, position, count, out: numbers(out, 41).__setitem__(40, 0.0)}),
        ("draws", {"accept": lambda *args: spoil_accept(args[-1])}),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(value),
)
def test_the_test_finds_what_is_wrong(fault, changes, compiled):
    assert fault_of(Broken(compiled, **changes)) == fault


@needs_kernel
def test_a_rows_bits_that_depend_on_its_company_are_found(compiled):
    def change(ops, num_ops, batch, threads):
        outcome = ctypes.cast(batch, ctypes.POINTER(layout.BatchStruct))[0]
        if ops[0].format == 0 and not ops[0].epilogue and outcome.rows == 1:
            found = numbers(outcome.buffers[1], 1)
            found[:] = np.nextafter(found, np.float32(9))

    assert fault_of(Broken(compiled, run=change)) == "products"


@needs_kernel
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"runs_here": 0}, "names instructions that this processor lacks"),
        ({"sizes": 5}, "lays its structures out otherwise"),
        ({"commit": None}, "cannot be loaded"),
    ],
    ids=str,
)
def test_a_library_that_is_not_ours_is_refused(changes, told, compiled, monkeypatch):
    real = ctypes.CDLL

    class Other:
        def __init__(self, path):
            self._real = real(path)

        def __getattr__(self, name):
            short = name.removeprefix("draftwing_")
            if short not in changes:
                return getattr(self._real, name)
            if changes[short] is None:
                raise AttributeError(name)
            return lambda *_: changes[short]

    monkeypatch.setattr(ctypes, "CDLL", Other)
    with pytest.raises(KernelProblem, match=told):
        library.open_library(str(compiled), "kernel")
    monkeypatch.undo()
    (compiled.parent / "text").write_text("no library")
    with pytest.raises(KernelProblem, match="cannot be loaded"):
        library.open_library(str(compiled.parent / "text"), "kernel")


@needs_kernel
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names of x86 processors")
@pytest.mark.parametrize(
    ("arch", "has_int8"),
    [pytest.param(arch, has, marks=pytest.mark.full) for arch, has in (("x86-64-v2", False), ("x86-64-v3", True))],
)
def test_a_kernel_for_an_older_processor_passes_its_test(arch, has_int8, monkeypatch):
    monkeypatch.setenv("DRAFTWING_KERNEL_ARCH", arch)
    monkeypatch.setattr(build, "FLAGS", ("-O1", *build.FLAGS[1:]))  # that compiles faster
    kernel, _ = with_library(library.open_library)
    assert kernel.has_int8 is has_int8
