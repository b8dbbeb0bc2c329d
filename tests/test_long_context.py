"""The benchmark of long texts: the context from which drafting gains, and one tiny run. No test depends on times."""

import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from conftest import add_tokenizer, build
from draftwing.budget.costs import Costs, Curve

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
script = importlib.import_module("long_context")


@pytest.mark.parametrize(
    ("gains", "context"),
    [
        ([-3, -1, 1, 3], 3000),
        ([-3, 1, -1, 1], 6000),
        ([1, 2, 3, 4], 0),
        ([-4, -3, -2, -1], None),
        ([-1, 0, 0, 1], 4000),
    ],
    ids=str,
)
def test_the_context_from_which_gains_stay_positive(gains, context):
    assert script.crossing([1000, 2000, 4000, 8000], gains) == context
    assert script.crossing([7], [1.0]) == 0
    assert script.crossing([7], [-1.0]) is None


def test_the_crossing_is_the_inflection_of_the_costs():
    """If steps take exactly the modelled time."""
    costs = Costs(
        Curve(((1, 1.0), (2, 1.2), (8, 2.4))), Curve(((1, 1.1), (4, 4.4))), per_token=0.001,
        per_token_of=Curve(((1, 0.001), (5, 0.0012))), context=64,
    )  # fmt: skip
    contexts, found, alpha, gamma = [500, 1000, 2000, 4000, 8000], {}, 0.8, 4
    for rows in (1, 3):
        for context in contexts:
            point = found[512, rows, context] = script.Found(tries=1000, taken=800)
            point.plain.append(costs.verify_seconds(1, rows, context))
            point.drafted.append(costs.draft_seconds(gamma, 1, rows) + costs.verify_seconds(gamma + 1, rows, context))
            point.emitted.append((1 - alpha ** (gamma + 1)) / (1 - alpha))
    for line in script.inflections(found, {512: costs}, gamma):
        assert line["measured"] == pytest.approx(line["by_costs"])
        # Self-drafting breaks even where the draft's steps, each as long as the view, cost what the tokens save.
        length, rows, tau = line["by_plain_costs"], line["rows"], point.emitted[0]
        spent = gamma * costs.verify_seconds(1, rows, 512) + costs.verify_seconds(gamma + 1, rows, length)
        assert tau * costs.verify_seconds(1, rows, length) == pytest.approx(spent)


def test_chains_may_gain_at_once_or_never():
    steep = Costs(Curve(((1, 1.0), (2, 3.0))), per_token=0.001)
    assert script.inflection_length(Costs(Curve(((1, 1.0), (8, 1.1)))), 3.0, 4, 1) == 0
    assert script.inflection_length(steep, 1.0, 3, 1) == math.inf  # nothing is ever accepted
    assert script.inflection_length(Costs(steep.verify), 1.9, 1, 1) == math.inf  # a longer context changes nothing
    assert 0 < script.inflection_length(steep, 1.9, 1, 1) < math.inf
    # Up to the view's length a draft step takes a whole step.
    assert script.inflection_length(Costs(Curve(((1, 1.0), (2, 1.0))), per_token=1.0), 2.0, 1, 1, 300) == 300


def test_rows_of_one_text():
    assert script.prompts_of(range(20), 1, 5) == [[*range(6)]]
    assert script.prompts_of(range(20), 3, 5) == [[*range(6)], [*range(7, 13)], [*range(14, 20)]]
    with pytest.raises(typer.BadParameter, match="20 tokens, too few for 3 rows of 18"):
        script.prompts_of(range(20), 3, 18)


def run(*arguments):
    app = typer.Typer()
    app.command()(script.main)
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.parametrize("draft", ["self-window", "self-snapkv"])
def test_a_run_on_a_target_that_is_stretched(draft, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "COSTS_SECONDS", 0.0)
    folder, out, text = tmp_path / "target", tmp_path / "found.json", tmp_path / "text.py"
    build("llama", vocab_size=300, head_dim=32).save_pretrained(folder)
    add_tokenizer(folder)
    text.write_text("def add(a, b):\n    return a + b\n" * 100)
    sizes = ("--contexts", "300,150", "--views", 80, "--rows", "1,2", "--gamma", 2, "--steps", 2, "--rounds", 2)
    done = run("--target", folder, "--draft", draft, *sizes, "--text", text, "--json", out)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert found["settings"]["stretched"]
    places = [(each["view"], each["rows"], each["context"]) for each in found["points"]]
    assert places == [(80, 1, 150), (80, 1, 300), (80, 2, 150), (80, 2, 300)]
    for each in found["points"]:
        assert len(each["plain_s"]) == len(each["drafted_s"]) == len(each["draft_s"]) == 2
        assert 1 <= each["tau"] <= 3
        assert min(each["plain_s"] + each["draft_s"]) > 0
    assert [(line["view"], line["rows"]) for line in found["inflections"]] == [(80, 1), (80, 2)]
    assert found["costs"].keys() == {"80"}


def test_invalid_arguments():
    assert run("--contexts", "0,5").exit_code == 2
    assert run("--views", "").exit_code == 2
