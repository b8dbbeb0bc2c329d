"""Docstrings, comments, messages and docs are plain English: no habits of translated prose."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "draftwing"
PYTHON = sorted(SOURCE.rglob("*.py"))
PYTHON += sorted((ROOT / "tools").rglob("*.py")) + sorted((ROOT / "benchmarks").rglob("*.py"))
NATIVE = sorted((ROOT / "src").rglob("*.h")) + sorted((ROOT / "src").rglob("*.cpp"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
OPENING = re.compile(r"(Of|What|See above|Whether|Where|Who) ")
SUSPECTED = re.compile(rf"(\"|#|//)[#\s]*{OPENING.pattern}", re.I)
WORDS = re.compile(
    r"\b(whoever|anew|so many|goes on|go on with|at hand|as it stands|of its own|stand by|stands by|is told|tells of|"
    r"is heard|nobody|somebody|everybody)\b",
    re.I,
)


def python_prose(text):
    """(line, text, is the beginning of a comment or docstring) of comments, docstrings and messages."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comment = token.string.lstrip("# ")
            is_trailing = bool(token.line[: token.start[1]].strip())  # such comments begin in lower case
            yield token.start[0], comment[:1].upper() + comment[1:] if is_trailing else comment, True
        elif token.type in (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)) and " " in token.string:
            for number, line in enumerate(token.string.split("\n")):
                yield token.start[0] + number, line, False
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or "", True


def findings(path):
    text = path.read_text()
    if not (WORDS.search(text) or SUSPECTED.search(text)):
        return  # reading every comment and docstring takes seconds
    if path.suffix == ".py":
        prose = python_prose(text)
    elif path.suffix == ".md":
        prose = ((number, line, False) for number, line in enumerate(text.split("\n"), 1))
    else:
        found = enumerate(text.split("\n"), 1)
        prose = ((number, line.split("//", 1)[1].strip(), True) for number, line in found if "//" in line)
    for number, line, opens in prose:
        if (opens and OPENING.match(line)) or WORDS.search(line):
            yield f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"


@pytest.mark.parametrize("paths", [PYTHON, NATIVE, PAGES], ids=["python", "native", "docs"])
def test_prose_is_plain(paths):
    assert not [finding for path in paths for finding in findings(path)]


def test_the_check_finds_what_it_should(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "bad.py"
    file.write_text(
        '"""Of its root."""\n# What waits\nx = "a text that goes on anew"\nname = "anew"\nSIZE = 3  # of a row\n'
    )
    assert len(list(findings(file))) == 4
