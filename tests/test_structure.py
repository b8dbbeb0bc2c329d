"""The floors, the public names, and that the project speaks of itself alone."""

import ast
import collections
import importlib
import re
import tomllib
from functools import cache
from pathlib import Path

import yaml

import draftwing

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "draftwing"


def floors():
    rows = re.findall(r"^\| (\d+) \| `([\w.]+)` \|", (ROOT / "docs" / "dev" / "structure.md").read_text(), re.M)
    return {module: int(floor) for floor, module in rows}


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        if not name.endswith("__init__"):
            yield name, path


@cache
def imports(path):
    """Modules of ours that a file imports, anywhere in it."""
    return re.findall(r"^ *(?:from|import) draftwing\.?([\w.]*)", path.read_text(), re.M)


def room(module):
    return module.split(".")[0]


def test_the_table_names_every_room_and_no_other():
    assert set(floors()) == {room(name) for name, _ in modules()} | {"shipped"}


def test_a_file_imports_only_from_its_own_floor_or_lower_ones():
    floor = floors()
    wrong = []
    for name, path in modules():
        for other in imports(path):
            if other and room(other) in floor and floor[room(other)] > floor[room(name)]:
                wrong.append(f"{name} (floor {floor[room(name)]}) imports {other} (floor {floor[room(other)]})")
    assert not wrong


def test_no_import_cycles():
    names = {name for name, _ in modules()}
    graph = {name: {other for other in imports(path) if other in names} for name, path in modules()}
    done: set[str] = set()
    while ready := {name for name in graph if name not in done and graph[name] <= done}:
        done |= ready
    assert done == set(graph), f"in a cycle, or above one: {sorted(set(graph) - done)}"


def test_public_names():
    assert sorted(draftwing.__all__) == [
        "Accepted", "Budget", "Decoder", "DraftMethod", "DraftTree", "Drafter", "DraftwingError", "Engine",
        "Generation", "Grammar", "LM", "NetMethod", "Request", "Sampling", "Stats", "Step", "StreamStep", "Target",
        "TextStream", "custom_generate", "errors", "load", "register",
    ]  # fmt: skip
    assert all(hasattr(draftwing, name) for name in draftwing.__all__)


def test_the_version_is_one():
    version = draftwing.__version__
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    released = re.search(rf"^## {re.escape(version)} \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released
    assert f"\ndate-released: {released[1]}\n" in (ROOT / "CITATION.cff").read_text()


def test_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = {target for line in re.findall(r"^([a-z][a-z -]*):", makefile, re.M) for target in line.split()}
    named = [
        (page.name, *found)
        for page in ROOT.glob("*.md")
        for found in re.findall(r"`make ([a-z-]+)()", page.read_text())
    ]
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    for path in workflows:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for step in job["steps"]:
                for target, axis in re.findall(r"\bmake ([a-z-]+)(?:\$\{\{ matrix\.(\w+) \}\})?", step.get("run", "")):
                    ends = job["strategy"]["matrix"][axis] if axis else [""]
                    named += [(path.name, target, end) for end in ends]
    assert {"test.yml", "docs.yml", "release.yml"} <= {name for name, *_ in named}
    assert not [each for each in named if f"{each[1]}{each[2]}" not in targets]


def test_extras_that_are_named_exist():
    """Messages are read where Draftwing is installed, docs where it is not: nothing is published."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found = {
        (path, package, extra)
        for path in [*pages, *SOURCE.rglob("*.py")]
        for package, names in re.findall(r"(draftwing|\.(?:whl)?)\[([a-z,]+)\]'", path.read_text())
        for extra in names.split(",")
    }
    assert {extra for _, _, extra in found} >= {"train", "serve", "grammar", "all"}
    assert not [each for each in found if each[2] not in extras]
    assert not [path for path, package, _ in found if path in pages and package == "draftwing"]


def test_scripts_import_nothing_that_is_not_there():
    missing = []
    for path in sorted(each for room in ("benchmarks", "recipes", "tools") for each in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "draftwing":
                module, names = importlib.import_module(node.module), {name for name, _ in modules()}
                missing += [
                    f"{path.name}: {node.module}.{a.name}"
                    for a in node.names
                    if not hasattr(module, a.name) and f"{node.module}.{a.name}".removeprefix("draftwing.") not in names
                ]
    assert not missing


def test_known_mistakes_can_still_be_made():
    """``make test-all`` makes them; that takes long, so texts which are gone are to be seen before."""
    gone, tests = [], {f"tests/{path.name}": path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    for table in sorted((ROOT / "tools" / "mutants").glob("*.toml")):
        for file, mutants in tomllib.loads(table.read_text()).items():
            text = (SOURCE / file).read_text()
            gone += [f"{table.name}: {file}: {each['old']}" for each in mutants if text.count(each["old"]) != 1]
            for test in (each["test"] for each in mutants):
                path, _, function = test.partition("[")[0].partition("::")
                if path not in tests or (function and f"def {function}(" not in tests[path]):
                    gone.append(test)
    assert not gone


def test_every_class_name_is_used_once():
    files = collections.defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        for name in re.findall(r"^ *class (\w+)[(:]", path.read_text(), re.M):
            files[name].append(path.name)
    assert not {name: paths for name, paths in files.items() if len(paths) > 1}
