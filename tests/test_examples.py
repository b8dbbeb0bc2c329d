"""The scripts and notebooks in ``examples`` run with the toy, and print what they are about."""

import json
import re
import runpy
import socket
import sys
from pathlib import Path

import pytest

from draftwing.methods.registry import METHODS
from draftwing.train.options import TrainOptions

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(path.name for path in EXAMPLES.glob("*.ipynb"))
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))


def tau(text):
    return [float(number) for number in re.findall(r"tau (\d+\.\d+)", text)]


def check_batch(text):
    assert re.findall(r"\[(\d+) tokens in", text)[:2] == ["32", "32"]
    assert text.count("again: True") == 3


def check_chat(text):
    cached = re.findall(r"\[(\d+) of (\d+) prompt tokens", text)
    assert len(cached) == 3
    assert int(cached[0][0]) == 0
    assert all(0 < int(found) < int(total) for found, total in cached[1:])


def check_compare_drafts(text):
    rows = [line.rsplit(maxsplit=3) for line in text.splitlines()[1:]]
    assert [name for name, *_ in rows] == ["none", "lookup", "suffix", "eagle3", "eagle3+lookup"]
    assert {same for *_, same in rows} == {"True"}
    assert float(rows[0][2]) == 1.0
    assert float(rows[3][2]) > 1.0


def check_in_transformers(text):
    assert tau(text)[0] >= 1.0
    assert "64 tokens" in text
    assert text.strip().endswith("the same text without drafts")


def check_json_answer(text):
    *_, date = text.strip().splitlines()
    assert re.search(r"^'.*', [\d,]+, capital: (True|False) \(tau ", text, re.M)
    assert re.fullmatch(r"a date: (19|20)\d\d-(0[1-9]|1[0-2])", date)


def check_openai_client(text):
    _, baseline, drafted = re.split(r"^--- .*\n", text, flags=re.M)
    assert baseline == drafted
    assert len(baseline) > 20


def check_own_drafter(text):
    assert tau(text)[0] > 1.0
    assert "without drafts: True" in text


def check_stream(text):
    pieces = re.findall(r"\x1b\[(\d+)m(.*?)\x1b\[0m", text, re.S)
    assert len({colour for colour, _ in pieces}) > 1  # the toy repeats itself, so several tokens are accepted
    assert tau(text)[0] == pytest.approx(96 / len(pieces), abs=0.01)


def check_train_head(text):
    losses = [float(loss) for loss in re.findall(r"held-out loss (\d+\.\d+)", text)]
    assert losses[-1] < losses[0]
    new, shipped = tau(text)[-2:]
    assert 1.0 < new < shipped


def check_verify(text):
    assert text.strip().endswith("48 texts are the same as without drafts")
    assert text.count("identical") == 4


def test_there_are_ten_short_scripts_and_two_notebooks():
    assert (len(SCRIPTS), len(NOTEBOOKS)) == (10, 2)
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"({name})" in listed for name in SCRIPTS + NOTEBOOKS)
    assert all(len((EXAMPLES / name).read_text().splitlines()) <= 40 for name in SCRIPTS)


@pytest.fixture
def chat_model(chat_toy, monkeypatch):
    """The default model in this process, with its heads, and in others, where it is a folder like any."""
    monkeypatch.setattr("draftwing.shipped.SHIPPED", chat_toy)
    return str(chat_toy / "toy" / "target")


def short_options(*args, **given):
    """Half of the updates that the example asks for."""
    return TrainOptions(*args, **{**given, "iterations": 12, "eval_every": 6})


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_run(name, chat_model, monkeypatch, capsys):
    monkeypatch.setattr("draftwing.methods.registry.METHODS", dict(METHODS))
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr("draftwing.train.session.START_TOKENS", 4096)
    monkeypatch.setattr("draftwing.train.options.TrainOptions", short_options)
    if name == "openai_client.py":  # it starts a server
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            sys.argv.append(str(free.getsockname()[1]))
        monkeypatch.setenv("DRAFTWING_MODEL", chat_model)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    globals()[f"check_{name.removesuffix('.py')}"](capsys.readouterr().out)


def check_coloured_chat(text):
    assert {"\x1b[37m", "\x1b[32m"} <= set(re.findall(r"\x1b\[3\dm", text))
    assert text.count("\n* ") == text.count("bonus: ") == 4
    plain, drafted = map(int, re.search(r"(\d+) forwards without drafts, (\d+) with them", text).groups())
    assert drafted < plain == 96


def check_train_in_15_minutes(text):
    assert "user: " in text
    assert "assistant: " in text
    assert re.search(r"^update 8: held-out loss \d+\.\d+, tau [1-6]\.\d+", text, re.M)
    assert re.search(r"eagle1 \(head\).*yes \(10 of 10\)", text)


@pytest.mark.full
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_run(name, chat_model, monkeypatch, tmp_path, capsys):
    if name.startswith("train"):  # it starts processes
        monkeypatch.setenv("DRAFTWING_MODEL", chat_model)
    monkeypatch.setenv("TRAIN", "--iterations 8 --tokens-per-batch 512")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "notebook"}
    for cell in json.loads((EXAMPLES / name).read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            exec(compile("".join(cell["source"]), name, "exec"), names)
    globals()[f"check_{name.removesuffix('.ipynb')}"](capsys.readouterr().out)
