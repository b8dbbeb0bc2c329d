"""The sweep benchmark: verdicts, sets, resuming, and one tiny run. No test looks at a time."""

import importlib
import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import draftwing as dw
from conftest import add_tokenizer, refused
from draftwing.errors import PromptError

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
script = importlib.import_module("sweep")


def candidate(*rates, tau=2.0, same=4):
    return {"tokens_per_s": list(rates), "tau": tau, "num_identical": same}


def entry(plain, auto, temperature=0.0, **fixed):
    names = {name.replace("_", ":"): candidate(*rates) for name, rates in fixed.items()}
    found = {"plain": candidate(*plain, tau=1.0), **names, "auto": candidate(*auto)}
    return {"set": "code", "temperature": temperature, "num_prompts": 4, "candidates": found}


# --- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("auto", "never_slower", "near_best"),
    [(200, True, True), (190.5, True, True), (189, True, False), (97.5, True, False), (96.5, False, False)],
)
def test_the_two_thresholds(auto, never_slower, near_best):
    found = script.summary(entry([100], [auto], chain_1=[150], chain_2=[200], chain_3=[120])["candidates"])
    assert found["best_fixed"] == "chain:2"
    assert found["auto_over_plain"] == pytest.approx(auto / 100)
    assert found["auto_over_best"] == pytest.approx(auto / 200)
    assert (found["never_slower"], found["near_best"]) == (never_slower, near_best)
    assert found["efficiency"] == pytest.approx(auto / 200)  # tau 2


def test_ratios_are_taken_within_a_round():
    # The machine's speed differs between rounds: medians of rates would give 100 / 90 and another best tree.
    found = script.summary(
        entry([50, 90, 200], [75, 100, 240], chain_1=[100, 180, 200], chain_2=[50, 190, 210])["candidates"]
    )
    assert found["plain_tokens_per_s"] == 90
    assert found["auto_over_plain"] == pytest.approx(1.2)
    assert found["speedups"]["chain:1"] == 2
    assert found["speedups"]["chain:2"] == pytest.approx(1.05)
    assert found["auto_over_best"] == pytest.approx(0.75)


def test_the_second_baseline_shows_noise_and_is_no_fixed_tree():
    measured = entry([100, 100, 100], [96, 96, 96], plain_again=[98, 103, 104], chain_1=[60, 60, 60])
    candidates = measured["candidates"]
    candidates["plain again"] = candidates.pop("plain:again")
    found = script.summary(candidates)
    assert found["again_over_plain"] == pytest.approx(1.03)
    assert (found["best_fixed"], found["near_best"], found["never_slower"]) == ("chain:1", True, False)
    assert script.row(measured)[3] == "1.030"


def test_a_row_of_the_table():
    good = entry([100], [190], chain_5=[200])
    assert script.row(good) == [
        "code T=0", "100.0", "1.900 [green]pass[/green]", "", "2.00", "0.95", "chain:5 2.00x",
        "0.950 [green]pass[/green]", "12 of 12",
    ]  # fmt: skip
    bad = entry([100], [90], chain_5=[200], temperature=1.0)
    bad["candidates"]["auto"]["num_identical"] = 3
    cells = script.row(bad)
    assert cells[0] == "code T=1"
    assert "FAIL" in cells[2]
    assert "FAIL" in cells[7]
    assert cells[8] == "[red]11 of 12: NO[/red]"


# --- candidates and prompts ------------------------------------------------------------------------------------------


def test_candidates():
    found = script.fixed_budgets("1,4", "8,4,2 60,8,10")
    assert found == {
        "chain:1": dw.Budget(1),
        "chain:4": dw.Budget(4),
        "dynamic:8,4,2": dw.Budget(4, 2, 8),
        "dynamic:60,8,10": dw.Budget(8, 10, 60),
    }
    assert list(script.fixed_budgets("", "8,4,2")) == ["dynamic:8,4,2"]
    for bad in (("", ""), ("1,x", "")):
        with pytest.raises(typer.BadParameter):
            script.fixed_budgets(*bad)


def test_named_files():
    assert script.split_names(["a=x.jsonl", "b=/y=z.jsonl"]) == {"a": Path("x.jsonl"), "b": Path("/y=z.jsonl")}
    for bad in (["x.jsonl"], ["=x"], ["a="], ["code=x"], ["random=x"], ["a=x", "a=y"]):
        with pytest.raises(typer.BadParameter, match="NAME=FILE"):
            script.split_names(bad)


def test_lines_as_the_field_publishes_them(tmp_path):
    file = tmp_path / "set.jsonl"

    def read(*lines, limit=5):
        file.write_text("\n".join(map(json.dumps, lines)) + "\n")
        return script.read_set(file, limit)

    assert read({"question": "How many?", "answer": "5"}, {"question": "Why?"}) == ["How many?", "Why?"]
    assert read({"question": "one"}, {"question": "two"}, limit=1) == ["one"]
    assert read({"prompt": "import os"}) == ["import os"]
    assert read({"question_id": 3, "turns": ["first", "second"]}) == [[{"role": "user", "content": "first"}]]
    assert read({"prompt": "asked", "question": "not asked"}) == ["asked"]
    with refused(PromptError, "line 2", "expected an object"):
        read({"prompt": "asked"}, ["alone here"])


@pytest.fixture(scope="module")
def folder(folder_of, tmp_path_factory):
    copy = shutil.copytree(folder_of("llama", vocab_size=300), tmp_path_factory.mktemp("sweep") / "tiny")
    return add_tokenizer(copy)


def settings(**changes):
    base = {"target": "t", "draft": "d", "weights": None, "num_prompts": 2, "tokens": 6, "rounds": 1, "seed": 0}
    return script.Settings(**{**base, "candidates": ("plain", "chain:1", "auto"), **changes})


def test_ids_of_sets(folder, tmp_path):
    lm = dw.load(folder, "none", device="cpu")
    drawn = script.prompts_of("random", {}, lm, settings())
    assert [len(ids) for ids in drawn] == [script.RANDOM_LENGTH] * 3  # one warms up
    assert drawn == script.prompts_of("random", {}, lm, settings())
    assert drawn != script.prompts_of("random", {}, lm, settings(seed=1))
    file = tmp_path / "turns.jsonl"
    file.write_text(json.dumps({"turns": ["def add(a, b):", "and then?"]}) + "\n" + json.dumps({"turns": ["x" * 900]}))
    ids = script.prompts_of("chat", {"chat": file}, lm, settings())
    assert ids[0] == lm.encode("def add(a, b):")  # a tokenizer without chat template: plain text
    assert len(ids[1]) == lm.target.max_length - 6 - 1  # cut to the context
    file.write_text(json.dumps({"prompt": "x"}))
    assert script.prompts_of("chat", {"chat": file}, lm, settings()) == [lm.encode("x")] * 2


# --- measuring -------------------------------------------------------------------------------------------------------


class Fake:
    """An LM that only logs its calls."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def generate(self, prompts, sampling, **options):
        (prompt,) = prompts
        self.log.append((self.name, prompt[0], options.get("seed")))
        stats = dw.Stats(num_tokens=3, num_forwards=2, num_drafted=4, seconds={"draft": 0.5, "verify": 1.0})
        odd = self.name == "auto" and len(self.log) > 12  # another text in the second round
        return [dw.Generation(list(prompt), token_ids=[9 if odd else 8], stats=stats)]


def test_candidates_take_turns():
    log, ticks = [], []
    lms = {name: Fake(name, log) for name in ("plain", "chain:1", "auto")}
    prompts = [[0], [1], [2]]
    found = script.measure(lms, prompts, dw.Sampling(seed=7), 2, lambda: ticks.append(1))
    assert [each[:2] for each in log[:3]] == [("plain", 0), ("chain:1", 0), ("auto", 0)]  # warming up
    names = [name for name, _, _ in log[3:]]
    orders = [tuple(names[start : start + 3]) for start in range(0, 12, 3)]
    assert all(set(order) == set(lms) for order in orders)
    assert len(set(orders)) > 1
    assert [(prompt, seed) for _, prompt, seed in log[3:]] == [*[(1, 7)] * 3, *[(2, 8)] * 3] * 2
    assert len(ticks) == len(log) == 15
    plain, auto = found["plain"], found["auto"]
    assert plain["tokens_per_s"] == [2.0, 2.0]  # 6 tokens in 3 seconds, without the warm-up
    assert plain["num_tokens"] == 6
    assert plain["tau"] == 1.5
    assert plain["drafted_per_step"] == 2
    assert plain["phases"] == {"draft": 0.333, "verify": 0.667}
    assert (plain["num_identical"], found["chain:1"]["num_identical"]) == (2, 2)
    assert auto["num_identical"] == 1  # one text differed in one of its rounds


# --- one file of results ---------------------------------------------------------------------------------------------


def test_a_file_is_resumed_only_with_its_settings(tmp_path):
    out = tmp_path / "deep" / "found.json"
    assert script.resume(out, settings()) == []
    script.save(out, settings(), [entry([100], [190], chain_1=[200])])
    assert [file.name for file in out.parent.iterdir()] == ["found.json"]
    (held,) = script.resume(out, settings())
    assert held["summary"]["near_best"]
    assert script.row(held)[0] == "code T=0"
    for name, value in {"tokens": 7, "weights": "int8", "candidates": ("plain", "auto"), "target": "u"}.items():
        with pytest.raises(typer.BadParameter, match=f"measured with {name}"):
            script.resume(out, settings(**{name: value}))


def test_names_without_folders():
    assert script.short(None) == "shipped"
    assert script.short("lookup") == "lookup"
    assert script.short("/a/b/c/target") == "c/target"


def run(*arguments):
    app = typer.Typer()
    app.command()(script.main)
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_a_run_that_is_killed_and_resumed(folder, tmp_path, monkeypatch):
    out, png = tmp_path / "found.json", tmp_path / "found.png"
    model = ("--target", folder, "--draft", "lookup", "--chains", "1,2", "--trees", "4,2,2")
    sizes = ("--num-prompts", 2, "--tokens", 5, "--rounds", 2, "--no-code", "--json", out)
    measure, done_sets = script.measure, []

    def stopped(lms, prompts, sampling, *rest):
        if len(done_sets) == 1:
            raise KeyboardInterrupt
        done_sets.append(sampling.temperature)
        return measure(lms, prompts, sampling, *rest)

    monkeypatch.setattr(script, "measure", stopped)
    done = run(*model, *sizes)
    assert done.exit_code == 130
    before = json.loads(out.read_text())
    assert [(each["set"], each["temperature"]) for each in before["sets"]] == [("random", 0)]
    names = ["plain", "plain again", "chain:1", "chain:2", "dynamic:4,2,2", "auto"]
    assert list(before["sets"][0]["candidates"]) == names
    assert run(*model, *sizes).exit_code == 2  # a forgotten --resume overwrites nothing
    done_sets.clear()
    done = run(*model, *sizes, "--resume", "--png", png)
    assert done.exit_code == 0, done.output
    assert done_sets == [1]
    after = json.loads(out.read_text())
    assert after["sets"][0] == before["sets"][0]
    assert [(each["set"], each["temperature"]) for each in after["sets"]] == [("random", 0), ("random", 1)]
    for each in after["sets"]:
        assert each["summary"]["num_identical"] == each["summary"]["num_compared"] == 12
        assert all(len(one["tokens_per_s"]) == 2 for one in each["candidates"].values())
    assert png.stat().st_size > 1000
    assert str(tmp_path) not in out.read_text()  # results name no folders of this machine


def test_the_table_of_all_sets():
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(script.table([entry([100], [190], chain_1=[200]), entry([9], [3], 1.0, chain_1=[6])], settings()))
    text = console.export_text()
    assert "code T=0" in text
    assert "chain:1 0.67x" in text
    assert text.count("FAIL") == 2
