"""The scaling benchmark: exponents, trees, and one tiny run. No test looks at a time."""

import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from draftwing.loading import load_target

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
script = importlib.import_module("scaling")

X = [2**power for power in range(7, 14)]
GROWTH = {
    "constant": (lambda x: 5.0, None, False),
    "in proportion": (lambda x: 3.0 * x, 1, False),
    "a line": (lambda x: 200 + x, 1, False),
    "a square": (lambda x: 1 + x * x, 2, True),
    "a late square": (lambda x: 100 + 0.001 * x * x, 2, True),
    "x log x": (lambda x: x * math.log2(x), 1.12, False),
    "a root": (lambda x: x**0.5, 0.5, False),
    "flat, then a line": (lambda x: max(1000.0, x), 1, False),
    "a square too small to detect": (lambda x: 1000 + 1e-7 * x * x, None, False),
}


@pytest.mark.parametrize("kind", GROWTH)
def test_worse_than_linear(kind):
    law, exponent, worse = GROWTH[kind]
    found = script.fit(X, [law(x) for x in X])
    assert found["worse_than_linear"] is worse
    assert found["increments_exponent"] == (exponent if exponent is None else pytest.approx(exponent, abs=0.03))
    assert ("WORSE" in script.verdict(found)) is worse


def test_noise_is_allowed_for():
    line = [200 + x for x in X]
    for sign in (1, -1):
        shaken = [y * (1 + sign * 0.05 * (-1) ** place) for place, y in enumerate(line)]
        assert not script.fit(X, shaken)["worse_than_linear"]
    slow = [*line[:-1], 1.14 * line[-1]]
    assert not script.fit(X, slow)["worse_than_linear"]
    square = [(1 + 0.05 * (-1) ** place) * (100 + 0.001 * x * x) for place, x in enumerate(X)]
    assert script.fit(X, square)["worse_than_linear"]


def test_exponents_between_doublings():
    assert script.exponents([1, 2, 4, 8], [1, 2, 8, 8]) == [1, 2, 0]
    assert script.exponents([1, 2, 4], [1, 0, -1]) == [None, None]
    assert script.fit([1, 2], [1, 3])["worse_than_linear"]
    assert not script.fit([1], [1])["worse_than_linear"]


def test_trees():
    pending = torch.tensor([5, 9])
    chain = script.tree_of(pending, 6, bushy=False)
    assert chain.is_line
    assert chain.max_depth == 5
    bushy = script.tree_of(pending, 9, bushy=True)
    bushy.check(10)
    assert bushy.parents.tolist() == [[-1, 0, 0, 0, 0, 1, 1, 1, 1]] * 2
    assert bushy.tokens[:, 0].tolist() == [5, 9]
    script.tree_of(pending, 1, bushy=True).check(10)


def test_one_doubles_while_two_stay():
    assert script.plan_of([128, 256], [1, 2], [4, 8], (512, 3, 16)) == {
        "context": [(128, 3, 16), (256, 3, 16)],
        "rows": [(512, 1, 16), (512, 2, 16)],
        "nodes": [(512, 3, 4), (512, 3, 8)],
    }


@pytest.mark.parametrize("text", ["1,2,3", "", "0", "4,2", "1,x"])
def test_numbers_must_double(text):
    with pytest.raises(typer.BadParameter):
        script.doubling(text, "rows")
    assert script.doubling("2,4,8", "rows") == [2, 4, 8]


def run(*arguments):
    app = typer.Typer()
    app.command()(script.main)
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_a_run_on_a_target_that_is_too_short(folder_of, tmp_path):
    out, png = tmp_path / "found.json", tmp_path / "found.png"
    sizes = ("--contexts", "16,32,64", "--rows", "1,2", "--nodes", "1,2,4", "--at", "16,2,2", "--rounds", 2)
    done = run("--target", folder_of("llama"), *sizes, "--json", out, "--png", png)
    assert done.exit_code == 0, done.output
    assert "random weights" in done.output
    found = json.loads(out.read_text())
    assert found["settings"]["random_weights"]
    assert found["settings"]["max_length"] == 64 + script.MARGIN
    assert {name: panel["x"] for name, panel in found["panels"].items()} == {
        "context": [16, 32, 64],
        "rows": [1, 2],
        "nodes": [1, 2, 4],
    }
    assert found["panels"]["rows"]["fixed"] == {"context": 16, "nodes": 2}
    for panel in found["panels"].values():
        for name, term in panel["terms"].items():
            assert [len(samples) for samples in term["samples"]] == [2] * len(panel["x"])
            assert name == "draft level" or min(term["seconds"]) > 0
    assert [each["context"] for each in found["memory"]] == [16, 32, 64]
    for each in found["memory"]:  # 3 layers, 2 KV heads, 8 wide, float32
        assert each["bytes_per_slot"] == 2 * 3 * 2 * 8 * 4
        assert each["is_formula"]
        assert each["bytes"] == each["bytes_per_slot"] * each["slots"]
        assert each["slots"] >= each["context"]
    assert png.stat().st_size > 1000


def test_a_target_with_enough_context_is_used_itself(folder_of, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "MARGIN", 100)
    lengths = []

    class Seen(script.Bench):
        def __init__(self, target, drafter, rows, prompt):
            super().__init__(target, drafter, rows, prompt)
            lengths.append((len(self.ctx.rows), self.ctx.rows[0].length))

    monkeypatch.setattr(script, "Bench", Seen)
    plan = script.plan_of([8, 16], [1, 2], [1, 2], (8, 1, 2))
    weights = {"quantize": None, "dtype": "float32"}
    found = script.run(folder_of("llama"), weights, plan, (8, 1, 2), 1, tmp_path)
    assert not found["settings"]["random_weights"]
    assert found["settings"]["max_length"] == load_target(folder_of("llama"), device="cpu").max_length == 256
    assert lengths == [(1, 8), (1, 16), (1, 8), (2, 8), (1, 8)]


@pytest.mark.parametrize("at", ["512", "a,b,c", "1,2,3,4"])
def test_a_bad_fixed_point(at):
    done = run("--at", at)
    assert done.exit_code == 2
    assert "CONTEXT,ROWS,NODES" in done.output
