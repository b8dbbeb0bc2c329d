"""What the README and the pages behind it show runs, its commands exist, and links lead somewhere."""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

import draftwing
from draftwing.cli.main import app
from draftwing.shipped import TOY

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
LINKING = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md"))]
LINKING += [ROOT / folder / "README.md" for folder in ("benchmarks", "examples")]
# What extending.md shows registers kinds of drafts: tests/test_own_net.py runs it, and takes them back.
RUN = [page for page in PAGES if page.name != "extending.md"]
BLOCKS = [
    pytest.param(block, page.name, id=f"{page.stem}-{number}")
    for page in RUN
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]
COMMANDS = sorted(
    {
        found
        for page in PAGES
        for found in re.findall(r"^ *\$ (?:.* \| )?(draftwing .+)$", page.read_text(), re.M)
        + re.findall(r"^    (draftwing .+)$", page.read_text(), re.M)
    }
    | set(re.findall(r"^ *(draftwing .+)$", (ROOT / "recipes" / "cluster" / "node.sh").read_text(), re.M))
)
GROUPS = ("data", "datastore", "tune")  # commands with commands of their own
needs_models = pytest.mark.skipif(not (TOY / "target").exists(), reason="the shipped models are not in this tree")


@pytest.fixture
def chat_model(chat_toy, monkeypatch):
    """The default model without a download."""
    monkeypatch.setenv("DRAFTWING_MODEL", str(chat_toy / "toy" / "target"))


@needs_models
@pytest.mark.parametrize(("block", "page"), BLOCKS)
def test_python_blocks_run(block, page, chat_model, capsys):
    exec(compile(block, page, "exec"), {"__name__": "readme"})


def test_there_is_something_to_run():
    assert {page for param in BLOCKS for page in param.values[1:]} >= {"README.md", "quick-start.md", "transformers.md"}
    shown = {shlex.split(command, comments=True)[1] for command in COMMANDS}
    assert shown >= {"chat", "demo", "generate", "compare", "verify", "train", "data", "doctor", "export", "import"}


@cache
def help_of(*words):
    """Its exit code and its text."""
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
    shown = runner.invoke(app, [*words, "--help"])
    return shown.exit_code, shown.output


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_and_their_options_exist(command):
    words = shlex.split(command, comments=True)[1:]
    is_group = words[0] in GROUPS and len(words) > 1 and not words[1].startswith("-")
    code, text = help_of(*words[: 2 if is_group else 1])
    assert code == 0
    for word in words[1:]:
        if word.startswith("--"):
            assert word.split("=")[0] in text


def headings(page):
    """The anchors that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        other = page.parent / path if path else page
        assert other.exists(), link
        assert not anchor or anchor in headings(other), link


def test_the_readme_is_a_front_page():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 150
    for page in DOCS:
        assert str(page.relative_to(ROOT)) in text, f"nothing leads to {page.name}"


def test_the_api_reference_has_every_public_name():
    shown = re.findall(r"^::: draftwing\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert sorted([*shown, "DraftwingError"]) == sorted(draftwing.__all__)


def test_the_picture_is_small_and_needs_nothing_from_elsewhere():
    picture = (ROOT / "docs" / "chat.svg").read_text()
    assert len(picture.encode()) < 60_000
    assert set(re.findall(r"https?://[^\"' )]+", picture)) <= {
        "http://www.w3.org/2000/svg",
        "https://www.textualize.io",
    }
