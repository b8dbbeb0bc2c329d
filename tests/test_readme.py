"""What the README shows runs, and its commands exist."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftwing.cli.main import app
from draftwing.shipped import SHIPPED

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
COMMANDS = sorted({line[2:] for line in README.splitlines() if line.startswith("$ draftwing ")})
needs_models = pytest.mark.skipif(not (SHIPPED / "target").exists(), reason="the shipped models are not in this tree")


@needs_models
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block, capsys):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_there_is_something_to_run():
    assert BLOCKS
    assert COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_and_their_options_exist(command):
    words = shlex.split(command)[1:]
    shown = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}).invoke(
        app, [*words[: 2 if words[0] == "data" else 1], "--help"]
    )
    assert shown.exit_code == 0
    for word in words[1:]:
        if word.startswith("--"):
            assert word.split("=")[0] in shown.output


def test_links_lead_somewhere():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
