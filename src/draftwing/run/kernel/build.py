"""Compiles the CPU kernel's C++ where it is first used, keeps the library, and proves it before it is run.

It takes a compiler: ``$CXX`` with any flags, ``c++``, ``g++`` or ``clang++``, or the package ``ziglang`` from PyPI,
which holds one. ``DRAFTWING_KERNEL_ARCH``, such as ``x86-64-v3`` (AVX2) or ``armv8.2-a+dotprod``, replaces the
``native`` of ``-march=native``, which for ARM is ``-mcpu=native``: not all compilers know the other there.

A library is named after what made it (sources, flags, processor, compiler) and after its own bytes, so that the name
alone says whether it is the right one and whole. That is checked before it is loaded, and ``load`` tests it
afterwards; one that fails is compiled again, once. It lies in a folder that nobody else may write to
(``run.storage``). Where there is none, it is compiled for this process alone.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import importlib.util
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

from draftwing.run.storage import Folder, open_folder, private_folder

__all__ = ["KernelProblem", "with_library"]

T = TypeVar("T")

SOURCES = Path(__file__).with_name("native")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fno-strict-aliasing")
_TIMEOUT = 300  # seconds

# They let a compiler change what a sum or a quotient is, or forget NaN. The sources refuse what these do, too, by the
# compiler's own macros; here the flag is named.
_UNSAFE = re.compile(
    r"-Ofast|-f(fast-math|unsafe-math-optimizations|associative-math|reciprocal-math|finite-math-only"
    r"|no-signed-zeros|single-precision-constant|no-honor-nans|no-honor-infinities)|-mrecip(=.*)?|-ffp-model=(fast|aggressive)"
    r"|-fp-model[= ]?fast.*|-mdaz-ftz"
)


class KernelProblem(Exception):
    """Why there is no kernel, and what to do about it."""


@dataclass(frozen=True)
class _Recipe:
    """What a library is made of.

    Attributes:
        compiler: the words of its command; None where none was found.
        arch: the flag that names the processor.
        code, made_by: short hashes: of the sources, flags and processor; of the compiler.
    """

    compiler: tuple[str, ...] | None
    arch: str
    code: str
    made_by: str

    @classmethod
    def here(cls) -> _Recipe:
        arch = os.environ.get("DRAFTWING_KERNEL_ARCH") or "native"
        if not re.fullmatch(r"[\w.+-]+", arch):
            raise KernelProblem(f"DRAFTWING_KERNEL_ARCH is {arch!r}: give it a name that -march knows, or unset it")
        compiler = _find_compiler()
        unsafe = [word for word in compiler or () if _UNSAFE.fullmatch(word)]
        if unsafe:
            raise KernelProblem(f"CXX holds {unsafe[0]}, which changes the kernel's numbers: take it out")
        option = "-mcpu" if arch == "native" and platform.machine() in ("aarch64", "arm64") else "-march"
        sources = b"".join(file.read_bytes() for file in sorted(SOURCES.iterdir()))
        code = _hash(sources, *FLAGS, f"{option}={arch}", _cpu())
        return cls(compiler, f"{option}={arch}", code, _hash(*_stamp(compiler)) if compiler else "")

    @property
    def prefix(self) -> str:
        """Of the names of libraries that serve: any compiler's where there is none now, as on a machine that has a
        library for good but nothing to build one with.
        """
        return f"kernel-{self.code}-{self.made_by}-" if self.made_by else f"kernel-{self.code}-"


def with_library(load: Callable[[str, str], T]) -> tuple[T, str]:
    """What ``load`` makes of the library, and why that will be compiled again the next time; empty where it is kept.

    Args:
        load: takes the library's path, which is good until it returns, and what it is to be called; raises
            ``KernelProblem`` where the library is not what it should be.

    Raises:
        KernelProblem: none can be had.
    """
    shop = _Shop(_Recipe.here())
    try:
        with private_folder() as folder:
            return shop.serve(folder, load), ""
    except OSError as error:
        reason = _told(error)
    try:
        with tempfile.TemporaryDirectory(prefix="draftwing-") as path, open_folder(Path(path)) as folder:
            return shop.serve(folder, load), reason
    except OSError as error:
        raise KernelProblem(f"the CPU kernel can be kept nowhere: {reason}; {_told(error)}") from None


class _Shop:
    """Finds or compiles one library, the latter once, wherever it then has to lie."""

    def __init__(self, recipe: _Recipe) -> None:
        self._recipe = recipe
        self._compiled: bytes | None = None

    def serve(self, folder: Folder, load: Callable[[str, str], T]) -> T:
        """Load the library that lies in ``folder``, or put it there. OSError: nothing can be written there."""
        name = self._find(folder)
        if name is not None:
            with suppress(KernelProblem):  # whole, and still not right: compiled again
                return _load_from(folder, name, load)
            folder.remove(name)
        if not os.access(folder.at, os.W_OK):
            raise PermissionError(errno.EACCES, "nothing can be written there", str(folder.path))
        with folder.locked():
            name = self._find(folder) or self._build(folder)  # another process may have been faster
        try:
            return _load_from(folder, name, load)
        except KernelProblem:
            folder.remove(name)
            raise

    def _find(self, folder: Folder) -> str | None:
        """The name of a library that is whole; others that bear such a name are removed."""
        for name in folder.names():
            if not name.startswith(self._recipe.prefix):
                continue
            with suppress(OSError):
                if name.endswith(f"-{_hash(folder.read(name))}.so"):
                    return name
            folder.remove(name)
        return None

    def _build(self, folder: Folder) -> str:
        if self._compiled is None:
            self._compiled = _compile(self._recipe, folder)
        name = f"{self._recipe.prefix}{_hash(self._compiled)}.so"
        folder.write(name, self._compiled)
        return name


def _load_from(folder: Folder, name: str, load: Callable[[str, str], T]) -> T:
    return load(str(folder.at / name), name.rpartition("-")[0])


def _compile(recipe: _Recipe, folder: Folder) -> bytes:
    """The library. Everything on the way to it lies in a folder that is gone afterwards."""
    if recipe.compiler is None:
        raise KernelProblem("no C++ compiler was found: install g++ or clang++, or `pip install ziglang`, or set CXX")
    try:
        workshop = tempfile.TemporaryDirectory(prefix="draftwing-")
    except OSError:  # no room there, which tempfile calls a missing folder
        workshop = tempfile.TemporaryDirectory(prefix="draftwing-", dir=folder.path)
    with workshop as place:
        made = Path(place) / "kernel.so"
        sources = str(SOURCES / "kernel.cpp")
        _run([*recipe.compiler, *FLAGS, recipe.arch, "-o", str(made), sources], place)
        if not made.exists() or not made.stat().st_size:
            raise KernelProblem(f"{recipe.compiler[0]} compiled nothing: set CXX to a C++ compiler")
        return made.read_bytes()


def _run(command: list[str], place: str) -> None:
    """Run a compiler, which keeps its own files in ``place``."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT,
            env={**os.environ, "TMPDIR": place},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise KernelProblem(f"{command[0]} took more than {_TIMEOUT} s: set CXX to another compiler") from None
    except OSError as error:
        raise KernelProblem(f"{command[0]} cannot be run: {_told(error)}; set CXX to another compiler") from None
    if done.returncode:
        told = done.stderr.strip()
        if os.strerror(errno.ENOSPC) in told:
            raise OSError(errno.ENOSPC, "the disk is full", str(Path(place).parent))
        errors = "\n".join(line for line in told.split("\n") if "error" in line)  # without warnings and notes
        raise KernelProblem(f"{command[0]} could not compile the CPU kernel: {(errors or told)[-300:]}")


def _find_compiler() -> tuple[str, ...] | None:
    try:
        own = shlex.split(os.environ.get("CXX") or "")
    except ValueError as error:
        raise KernelProblem(f"CXX is {os.environ['CXX']!r}: {error}") from None
    for words in (own, ["c++"], ["g++"], ["clang++"]):
        if words and shutil.which(words[0]):
            return tuple(words)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "c++")
    return None


def _stamp(compiler: tuple[str, ...]) -> list[str]:
    """The command, and which version it runs: the size and date of its files. To ask it would take too long."""
    stamp = list(compiler)
    paths = [shutil.which(word) for word in compiler]
    if "ziglang" in compiler and (spec := importlib.util.find_spec("ziglang")):
        paths.append(spec.origin)
    for path in filter(None, paths):
        with suppress(OSError):
            real = os.path.realpath(path)
            state = os.stat(real)
            stamp.append(f"{real} {state.st_size} {state.st_mtime_ns}")
    return stamp


def _cpu() -> str:
    """What ``native`` depends on."""
    if sys.platform == "darwin":
        return f"{platform.machine()} {_sysctl('machdep.cpu.brand_string')}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _sysctl(name: str) -> str:
    """What a system like macOS says of itself; empty where it has no such name."""
    size, text = ctypes.c_size_t(256), ctypes.create_string_buffer(256)
    ask = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    if ask is None or ask(name.encode(), text, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return ""
    return text.value.decode(errors="replace")


def _hash(*parts: str | bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        whole.update(b"%d:" % len(data) + data)
    return whole.hexdigest()[:16]


def _told(error: OSError) -> str:
    """What went wrong, in words; a full disk is called that."""
    if error.errno == errno.ENOSPC:
        return f"the disk is full ({error.filename})" if error.filename else "the disk is full"
    return str(error)
