"""Find the CPU kernel in the wheel, or compile its C++ at first use and keep the library; test it before it is used.

Wheels for a platform hold a library for each of some levels of instructions (``tools/wheel_hook.py``). The best that
this processor supports is used. Without one the compiler is ``$CXX`` with any flags, ``c++``, ``g++`` or ``clang++``.
``DRAFTWING_KERNEL_ARCH``, such as ``x86-64-v3`` (AVX2) or ``armv8.2-a+dotprod``, names a library of the wheel, or else
replaces the ``native`` of ``-march=native``; on ARM that is ``-mcpu=native``, since not all compilers accept the other
there.

The file name of a compiled library contains hashes of its sources, flags, processor, compiler and bytes, so that
a damaged or outdated file is recognised before it is loaded. ``load`` tests it afterwards; if that fails it is compiled
again, once. Libraries are kept in a folder that no other user may write to (``storage``). Without such a folder the
library is compiled for this process alone.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from draftwing.storage import Folder, open_folder, private_folder

T = TypeVar("T")

SOURCES = Path(__file__).with_name("native")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fno-strict-aliasing")
_TIMEOUT = 300  # seconds

# The libraries of wheels, the best first, and words of `_cpu` without which one is not even loaded: all of its
# code may use the instructions.
PREBUILT = Path(__file__).with_name("prebuilt")
_V3 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"}
LEVELS = {
    "x86-64-v4+avx512vnni+amx": _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"},
    "x86-64-v3+avxvnni": _V3 | {"avx_vnni"},
    "x86-64-v3": _V3,
    "armv8.2-a+dotprod+i8mm": {"atomics", "asimdrdm", "asimddp", "i8mm"},
    "armv8.2-a+dotprod": {"atomics", "asimdrdm", "asimddp"},
    "apple-m1": {"Apple"},
}

# These flags let a compiler change sums and quotients, or ignore NaN. The sources reject them by the compiler's macros
# too; here the error message can name the flag.
_UNSAFE = re.compile(
    r"-Ofast|-f(fast-math|unsafe-math-optimizations|associative-math|reciprocal-math|finite-math-only"
    r"|no-signed-zeros|single-precision-constant|no-honor-nans|no-honor-infinities)|-mrecip(=.*)?|-ffp-model=(fast|aggressive)"
    r"|-fp-model[= ]?fast.*|-mdaz-ftz"
)


class KernelProblem(Exception):
    """The kernel cannot be used; the message gives the reason and a fix."""


@dataclass(frozen=True)
class _Recipe:
    """Inputs of a compilation.

    Attributes:
        compiler: the words of its command; None if none was found.
        arch: the flag that names the processor.
        code, made_by: short hashes of sources, flags and processor, and of the compiler.
    """

    compiler: tuple[str, ...] | None
    arch: str
    code: str
    made_by: str

    @classmethod
    def here(cls) -> _Recipe:
        arch = os.environ.get("DRAFTWING_KERNEL_ARCH") or "native"
        if not re.fullmatch(r"[\w.+-]+", arch):
            raise KernelProblem(f"DRAFTWING_KERNEL_ARCH is {arch!r}: give a name that -march accepts, or unset it")
        compiler = find_compiler()
        unsafe = [word for word in compiler or () if _UNSAFE.fullmatch(word)]
        if unsafe:
            raise KernelProblem(f"CXX holds {unsafe[0]}, which changes the kernel's numbers: take it out")
        option = "-mcpu" if arch == "native" and platform.machine() in ("aarch64", "arm64") else "-march"
        sources = b"".join(file.read_bytes() for file in sorted(SOURCES.iterdir()))
        code = hash_of(sources, *FLAGS, f"{option}={arch}", _cpu())
        return cls(compiler, f"{option}={arch}", code, hash_of(*_stamp(compiler)) if compiler else "")

    @property
    def prefix(self) -> str:
        """Prefix of usable libraries' names; without a compiler, libraries of any compiler are usable."""
        return f"kernel-{self.code}-{self.made_by}-" if self.made_by else f"kernel-{self.code}-"


def with_library(load: Callable[[str, str], T]) -> tuple[T, str]:
    """The result of ``load``, and why the library cannot be kept and will be compiled again; empty if it is kept.

    Args:
        load: takes the library's path, valid until it returns, and its name; raises ``KernelProblem`` if the library
            fails its test.

    Raises:
        KernelProblem: no library can be loaded or compiled.
    """
    for file in _prebuilt():
        with suppress(KernelProblem):
            return load(str(file), file.stem), ""
    builder = _Builder(_Recipe.here())
    try:
        with private_folder() as folder:
            return builder.serve(folder, load), ""
    except OSError as error:
        reason = _describe(error)
    try:
        with tempfile.TemporaryDirectory(prefix="draftwing-") as path, open_folder(Path(path)) as folder:
            return builder.serve(folder, load), reason
    except OSError as error:
        raise KernelProblem(f"the CPU kernel can be kept nowhere: {reason}; {_describe(error)}") from None


def _prebuilt() -> list[Path]:
    """The intact libraries of this wheel that run here, the best first, or the one that DRAFTWING_KERNEL_ARCH names.

    Their folder is not checked for other users: they could as well write to this file, next to it.
    """
    arch, found = os.environ.get("DRAFTWING_KERNEL_ARCH"), set(_cpu().split())
    names = [name for name, needed in LEVELS.items() if needed <= found and arch in (None, "", name)]
    files = [file for name in names for file in PREBUILT.glob(f"{name}-*.so")]
    return [file for file in files if file.stem.endswith(f"-{hash_of(file.read_bytes())}")]


class _Builder:
    """Finds a library, or compiles it at most once for all folders that are tried."""

    def __init__(self, recipe: _Recipe) -> None:
        self._recipe = recipe
        self._compiled: bytes | None = None

    def serve(self, folder: Folder, load: Callable[[str, str], T]) -> T:
        """Load the library from ``folder``, compiling it there if necessary. Raises OSError if that is not writable."""
        name = self._find(folder)
        if name is not None:
            with suppress(KernelProblem):  # intact but failing its test: compile it again
                return _load_from(folder, name, load)
            folder.remove(name)
        if not os.access(folder.at, os.W_OK):
            raise PermissionError(errno.EACCES, "nothing can be written there", str(folder.path))
        with folder.locked():
            name = self._find(folder) or self._build(folder)  # another process may have compiled it meanwhile
        try:
            return _load_from(folder, name, load)
        except KernelProblem:
            folder.remove(name)
            raise

    def _find(self, folder: Folder) -> str | None:
        """The name of an intact library; damaged ones are removed."""
        for name in folder.names():
            if not name.startswith(self._recipe.prefix):
                continue
            with suppress(OSError):
                if name.endswith(f"-{hash_of(folder.read(name))}.so"):
                    return name
            folder.remove(name)
        return None

    def _build(self, folder: Folder) -> str:
        if self._compiled is None:
            self._compiled = _compile(self._recipe, folder)
        name = f"{self._recipe.prefix}{hash_of(self._compiled)}.so"
        folder.write(name, self._compiled)
        return name


def _load_from(folder: Folder, name: str, load: Callable[[str, str], T]) -> T:
    return load(str(folder.at / name), name.rpartition("-")[0])


def _compile(recipe: _Recipe, folder: Folder) -> bytes:
    """Compile in a temporary folder; returns the library's bytes."""
    if recipe.compiler is None:
        raise KernelProblem(
            "no C++ compiler was found: install g++ or clang++, set CXX, or install a wheel made by `make wheels`"
        )
    try:
        workdir = tempfile.TemporaryDirectory(prefix="draftwing-")
    except OSError:  # a full disk, which tempfile reports as a missing folder
        workdir = tempfile.TemporaryDirectory(prefix="draftwing-", dir=folder.path)
    with workdir as place:
        output = Path(place) / "kernel.so"
        sources = str(SOURCES / "kernel.cpp")
        _run([*recipe.compiler, *FLAGS, recipe.arch, "-o", str(output), sources], place)
        if not output.exists() or not output.stat().st_size:
            raise KernelProblem(f"{recipe.compiler[0]} compiled nothing: set CXX to a C++ compiler")
        return output.read_bytes()


def _run(command: list[str], place: str) -> None:
    """Run a compiler with its temporary files in ``place``."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT,
            env={**os.environ, "TMPDIR": place},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise KernelProblem(f"{command[0]} took more than {_TIMEOUT} s: set CXX to another compiler") from None
    except OSError as error:
        raise KernelProblem(f"{command[0]} cannot be run: {_describe(error)}; set CXX to another compiler") from None
    if done.returncode:
        stderr = done.stderr.strip()
        if os.strerror(errno.ENOSPC) in stderr:
            raise OSError(errno.ENOSPC, "the disk is full", str(Path(place).parent))
        errors = "\n".join(line for line in stderr.split("\n") if "error" in line)  # no warnings or notes
        raise KernelProblem(f"{command[0]} could not compile the CPU kernel: {(errors or stderr)[-300:]}")


def find_compiler() -> tuple[str, ...] | None:
    try:
        configured = shlex.split(os.environ.get("CXX") or "")
    except ValueError as error:
        raise KernelProblem(f"CXX is {os.environ['CXX']!r}: {error}") from None
    for words in (configured, ["c++"], ["g++"], ["clang++"]):
        if words and shutil.which(words[0]):
            return tuple(words)
    return None


def _stamp(compiler: tuple[str, ...]) -> list[str]:
    """The command, and size and date of its files: running ``--version`` would take too long."""
    stamp = list(compiler)
    for path in filter(None, map(shutil.which, compiler)):
        with suppress(OSError):
            real = os.path.realpath(path)
            state = os.stat(real)
            stamp.append(f"{real} {state.st_size} {state.st_mtime_ns}")
    return stamp


def _cpu() -> str:
    if sys.platform == "darwin":
        return f"{platform.machine()} {_sysctl('machdep.cpu.brand_string')}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _sysctl(name: str) -> str:
    """A value of ``sysctl`` on macOS; empty if there is none."""
    size, text = ctypes.c_size_t(256), ctypes.create_string_buffer(256)
    sysctl = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    if sysctl is None or sysctl(name.encode(), text, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return ""
    return text.value.decode(errors="replace")


def hash_of(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()[:16]


def _describe(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return f"the disk is full ({error.filename})" if error.filename else "the disk is full"
    return str(error)
