"""Put mistakes into the code, one at a time, and check that the test named for each of them fails.

    python tools/mutants.py                 all of the tables in tools/mutants/
    python tools/mutants.py --only accept   those whose file, texts or test hold "accept"
    python tools/mutants.py --list

The tests run on copies of the working tree in a temporary folder. First all named tests must pass on the unchanged
code. Exits with 1 if a mutant survives, or if its old text is not in its file exactly once.

A mutant is an entry of a table under the name of its file in the package: the ``old`` text, the ``new`` one, and the
``test``. The C++ kernel is compiled again for its mutants.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "tools" / "mutants"
PACKAGE = Path("src", "draftwing")
NOT_COPIED = (".*", "__pycache__", "build", "dist", "*.egg-info", "results")
OPTIONS = ("-m", "", "-p", "no:cacheprovider")
TIMEOUT = 300  # seconds of one test; a mutant may well run for ever, and is found then
# Imported once, by a process that forks for each mutant: importing takes longer than most tests.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "transformers", "pytest", "hypothesis", "typer.testing"])


@dataclass(frozen=True)
class Mutant:
    """``old`` in ``file`` (of the package) becomes ``new``, and then ``test`` (a pytest node id) must fail."""

    file: str
    old: str
    new: str
    test: str

    @property
    def name(self) -> str:
        """Return one line that identifies the mutant."""
        pairs = zip_longest(self.old.splitlines(), self.new.splitlines(), fillvalue="")
        return f"{self.file}: {next((new.strip() for old, new in pairs if old != new), 'nothing new')}"


@dataclass(frozen=True)
class Result:
    """The outcome of a mutant: ``killed``, or the problem."""

    mutant: Mutant
    status: str
    seconds: float
    output: str = ""


def main() -> int:
    """Run the mutants of the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Put known mistakes into the code; tests must find each.")
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose file, texts or test hold TEXT")
    parser.add_argument("--list", action="store_true", help="show them and run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time (default: 2)")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in read_tables() if any(arguments.only in part for part in vars(mutant).values())]
    if arguments.list:
        for mutant in chosen:
            print(f"{mutant.name}\n    {mutant.test}")
        return 0
    if not chosen:
        print(f"no mutant holds {arguments.only!r}: see --list", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="draftwing-mutants-") as folder:
        return run(chosen, Path(folder), max(arguments.jobs, 1))


def read_tables() -> list[Mutant]:
    """Read all mutants of tools/mutants/, file by file."""
    return [
        Mutant(file, **entry)
        for table in sorted(TABLES.glob("*.toml"))
        for file, entries in tomllib.loads(table.read_text(encoding="utf-8")).items()
        for entry in entries
    ]


def run(mutants: list[Mutant], folder: Path, jobs: int) -> int:
    """Run ``mutants`` in copies of the tree below ``folder``, and print each outcome."""
    cache = folder / "cache"
    cache.mkdir()
    # As in tests/conftest.py, for what is imported before it.
    os.environ |= {"DRAFTWING_TEST_CACHE": str(cache), "HF_HUB_CACHE": str(cache / "hub")}
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    first = folder / "0"
    shutil.copytree(ROOT, first, ignore=shutil.ignore_patterns(*NOT_COPIED))
    # A mutant may be as long and as old as what it came from: bytecode goes by what the file holds.
    compiling = (sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", str(first / "src"))
    subprocess.run(compiling, check=True)
    tests = sorted({mutant.test for mutant in mutants})
    print(f"{len(tests)} tests on the code as it is ...", flush=True)
    command = (sys.executable, "-m", "pytest", *OPTIONS, *tests, *(("-n", str(jobs)) if jobs > 1 else ()))
    found = subprocess.run(command, cwd=first, env=os.environ | {"PYTHONPATH": str(first / "src")}, check=False)
    if found.returncode:
        print("\nThese tests must pass before they can tell of mutants.", file=sys.stderr)
        return 1
    trees: queue.Queue[Path] = queue.Queue()
    trees.put(first)
    for number in range(1, jobs):
        trees.put(shutil.copytree(first, folder / str(number)))

    def one(mutant: Mutant) -> Result:
        tree = trees.get()
        try:
            return try_out(mutant, tree)
        finally:
            trees.put(tree)

    width, bad = len(str(len(mutants))), []
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(one, mutant) for mutant in mutants]
        for number, future in enumerate(as_completed(running), 1):
            result = future.result()
            print(f"{number:{width}}/{len(mutants)}  {result.status:<15} {result.seconds:5.1f} s  {result.mutant.name}")
            sys.stdout.flush()
            if result.status != "killed":
                bad.append(result)
    for result in bad:
        print(f"\n{result.status}: {result.mutant.name}\n    {result.mutant.test}\n{result.output[-1500:]}")
    print(f"\n{len(mutants) - len(bad)} of {len(mutants)} mutants killed")
    return 1 if bad else 0


def try_out(mutant: Mutant, tree: Path) -> Result:
    """Put the mutant into ``tree``, run its test, and restore the file."""
    file = tree / PACKAGE / mutant.file
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if text.count(mutant.old) != 1 or mutant.old == mutant.new:
        times = f"its old text is there {text.count(mutant.old)} times:\n{mutant.old}"
        return Result(mutant, "does not apply", 0.0, times)
    start = time.monotonic()
    try:
        file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        code, output = run_test(tree, mutant.test)
        # 1: tests failed; all else (no tests found, a file that cannot be read) proves nothing
        status = {0: "survived", 1: "killed"}.get(code, f"pytest gave {code}")
        return Result(mutant, status, time.monotonic() - start, output)
    finally:
        file.write_text(text, encoding="utf-8")


def run_test(tree: Path, test: str) -> tuple[int, str]:
    """Return pytest's exit status, 1 if it takes too long, and what it printed."""
    output = tree / "output.txt"
    process = PROCESSES.Process(target=in_process, args=(tree, test, output))
    process.start()
    process.join(TIMEOUT)
    code = process.exitcode
    if code is None:
        os.killpg(process.ident or 0, signal.SIGKILL)
        process.join()
    return 1 if code is None else code, output.read_text(errors="replace")


def in_process(tree: Path, test: str, output: Path) -> None:
    """Run a test of ``tree``, whose package comes before an installed one, and exit with pytest's status."""
    import pytest

    os.setsid()  # so that killpg reaches the processes of the test, too
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(tree / "src"))
    sys.exit(int(pytest.main([*OPTIONS, "-x", test])))


if __name__ == "__main__":
    sys.exit(main())
