"""Methods from data to drafts: trained for a few updates, saved, loaded, examined, and drafted with."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from typer.testing import CliRunner

import draftwing.cli.main as cli
from conftest import refused
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.formats.identity import target_id
from draftwing.loading import load, load_drafter, load_target
from draftwing.methods.base import Budget
from draftwing.methods.calibration import Calibration
from draftwing.methods.mtp import LAMBDA
from draftwing.methods.objectives import Truth
from draftwing.methods.registry import convert, diagnose, get_method, method_of_folder
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.options import TrainOptions
from draftwing.train.session import RunFiles, prepare
from short_runs import new_target, short_run
from test_block import new_net

PROMPTS = ["def add(", "class Table:\n    def", "for row in rows: print(row)\nfor row in"]
BLOCKS = ("medusa", "hydra", "dflash", "dspark")
STEPS = {"medusa": 5, "hydra": 5, "dflash": 7, "dspark": 7, "mtp": 2, "kangaroo": 1}
CHANGES = {
    "dflash": {"num_layers": 2},
    "dspark": {"num_layers": 2},
    "mtp": {"unroll_steps": 2},
    "kangaroo": {"iterations": 30, "lr": 5e-3, "eval_every": 30, "eval_prompts": 2, "eval_tokens": 8},
}


@pytest.fixture(scope="module")
def folder_for(tmp_path_factory):
    """A method's target: one with norms of queries and keys for MTP, else a Llama."""
    made = cache(lambda family: new_target(tmp_path_factory.mktemp("target"), family))
    return lambda method: made("qwen3" if method == "mtp" else "llama")


@pytest.fixture(scope="module")
def run_of(folder_for, tmp_path_factory):
    """A short training by a method: its folder, the session, and the metrics."""
    return cache(
        lambda method: short_run(folder_for(method), tmp_path_factory.mktemp(method), method, **CHANGES.get(method, {}))
    )


@pytest.mark.parametrize("method", STEPS)
def test_it_trains(method, run_of, folder_for):
    _, session, metrics = run_of(method)
    trainer, target = session.trainer, session.target
    batch, losses = trainer.source.batch(0), []
    for net in (new_net(method, target, folder_for(method), numbers=0.0, **trainer.options.settings), trainer.net):
        scorer = get_method(method).loss(net, trainer.options.recipe.objective, STEPS[method]).eval()
        sums = scorer(batch, Truth.of(batch, target.head, None, torch.float32))
        losses.append(sum(each.loss.item() / each.count for each in sums))
    assert losses[1] < losses[0]
    assert len(metrics[0]["agreement"]) == len(metrics[-1]["val_agreement"]) == STEPS[method]
    assert metrics[-1]["tau"] >= (1.5 if method == "kangaroo" else 1)
    assert f"{method} head of" in session.describe()
    assert trainer.net.config.calibration != Calibration()  # fitted on what this kind guesses
    if method == "mtp":
        assert metrics[0]["loss"] == pytest.approx(LAMBDA * torch.tensor(300.0).log().item(), rel=0.3)
    if method == "kangaroo":
        assert metrics[-1]["agreement"][0] > 0.2 > 10 * metrics[0]["agreement"][0]


@pytest.mark.parametrize("method", STEPS)
def test_it_is_saved_loaded_and_examined(method, run_of, folder_for, folder_of, tmp_path):
    place, session, _ = run_of(method)
    head, folder = place / "head", folder_for(method)
    target, tokenizer = load_target(folder), Tokenizer(folder)
    assert method_of_folder(head) is get_method(method)
    net = get_method(method).read(head, target.embedding, target.head, target_id(target, tokenizer))
    assert net.config == session.trainer.net.config
    for name, tensor in session.trainer.net.tensors().items():
        assert torch.equal(net.tensors()[name], tensor), name
    drafter = load_drafter(head, target, tokenizer)()
    assert drafter.name == f"{method} (head)"
    assert method != "kangaroo" or drafter.num_bytes < target.num_weight_bytes
    shown = CliRunner().invoke(cli.app, ["doctor", str(head), "-t", str(folder), "--json", "--no-measure"])
    assert shown.exit_code == 0, shown.output
    findings = {each["name"]: each["status"] for each in json.loads(shown.stdout)["findings"]}
    assert findings["head"] == findings["target"] == "ok"
    convert(head, tmp_path / "copy", "draftwing")
    assert (tmp_path / "copy" / "config.json").read_text() == (head / "config.json").read_text()
    if get_method(method).layouts == ("draftwing",):  # others: test_block.py
        with refused(UnsupportedError, "can only be written as draftwing", "'vllm'"):
            convert(head, tmp_path / "no", "vllm")
    other = folder_of("llama", head_dim=32)
    assert "fail" in {each.status for each in diagnose(head, other)}
    with refused(CheckpointError, "made for", "vocab_size 300 and 61"):
        load_drafter(head, load_target(other), None)


@pytest.mark.parametrize(
    ("method", "temperature", "options"),
    [
        ("medusa", 0.0, {}), ("hydra", 1.0, {}), ("dflash", 1.0, {}), ("dspark", 0.0, {}), ("kangaroo", 1.0, {}),
        ("mtp", 1.0, {}), ("mtp", 0.0, {"modules": 2}),
    ],
)  # fmt: skip
def test_the_output_is_the_targets(method, temperature, options, run_of, folder_for):
    """With a tree, and with what the planner chooses; of some nets without layers of the target's on both engines."""
    head, folder = run_of(method)[0] / "head", folder_for(method)
    settings = {"temperature": temperature, "seed": 3, "max_tokens": 12, "ignore_eos": True}
    for engine, budgets in (("lean", (Budget(3, 4, 8), None)), ("transformers", (Budget(3, 3),))):
        if engine == "transformers" and method not in ("hydra", "dspark"):
            continue
        baseline = load(folder, "none", engine=engine).generate(PROMPTS, **settings)
        for budget in budgets:
            lm = load(folder, head, engine=engine, budget=budget, draft_options=options or None)
            drafted = lm.generate(PROMPTS, **settings)
            assert [each.token_ids for each in drafted] == [each.token_ids for each in baseline]
            assert budget is None or all(each.stats.num_drafted for each in drafted)


@pytest.mark.parametrize("method", BLOCKS)
def test_a_run_of_another_number_of_levels(method, run_of, folder_for, tmp_path):
    """A head keeps its number of levels; a new one has as many as the run asks for."""
    place, folder, data = run_of(method)[0], folder_for(method), [run_of(method)[0] / "data.jsonl"]
    options = TrainOptions(method, iterations=1, max_length=32, tokens_per_batch=256, unroll_steps=3, precision="no")
    same = {"dtype": "float32", "device": "cpu"}
    assert prepare(RunFiles(folder, data), options, tmp_path, **same).trainer.net.num_levels == 3
    with refused(ConfigError, f"{method} head guesses {STEPS[method]} tokens", "unroll_steps is 3"):
        prepare(RunFiles(folder, data, initial=place / "head"), options, tmp_path, **same)


def test_a_part_of_mtp_modules_has_the_very_weights(run_of, folder_for):
    target = load_target(folder_for("mtp"), prepack=False)
    net = get_method("mtp").read(run_of("mtp")[0] / "head", target.embedding, target.head)
    assert net.config.qk_norm
    part = net.part(1)
    assert part.modules_in_order[0] is net.modules_in_order[1]
    assert part.config.num_modules == len(part.chain) == 1
    assert net.part(0, 2) is net
