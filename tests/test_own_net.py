"""A network as a user would write it: two matrices, trained, loaded, converted and run by Draftwing."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from textwrap import indent

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from conftest import Recorder, refused
from draftwing.cli import main as cli
from draftwing.cpu.library import get_kernel
from draftwing.cpu.noise import noise_of
from draftwing.decode import Decoder
from draftwing.errors import CheckpointError, ConfigError
from draftwing.formats.identity import head_id, target_id
from draftwing.lab.compare import compare
from draftwing.lm import LM
from draftwing.loading import load, load_drafter, load_target
from draftwing.methods.base import Budget
from draftwing.methods.method import NetMethod
from draftwing.methods.net import DraftNet, PlainConfig
from draftwing.methods.net_drafter import EagleDrafter
from draftwing.methods.objectives import Objective, soft_cross_entropy
from draftwing.methods.registry import (
    METHODS,
    TrainingMethod,
    convert,
    diagnose,
    get_method,
    method_of_folder,
    register,
)
from draftwing.methods.unroll import UnrolledLoss
from draftwing.models.layers import concat
from draftwing.runtime.forward import Entries, TorchRuntime
from draftwing.runtime.graphs import GraphRuntime
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.options import TrainOptions
from draftwing.tree import PAD, DraftTree
from short_runs import new_target, short_run

# --- what a user writes: the net, its objective, and how it is trained -----------------------------------------------


class TwoLinear(DraftNet):
    """Predicts the target's next hidden state from the last one and the token after it."""

    kind = "two-linear"

    def __init__(self, config: PlainConfig, *parts, **options) -> None:
        super().__init__(config, *parts, **options)
        width = config.hidden_size
        self.first = self.new_matrix(2 * width, 2 * width)
        self.second = self.new_matrix(width, 2 * width)

    def forward(self, ids, states, attend):
        both = concat([self.embedding(ids), states])
        guess = self.second.forward(self.first.forward(both), states)
        return guess, guess


def squares(logits: Tensor, probs: Tensor) -> Tensor:
    """The squared distance of the two distributions."""
    return (logits.softmax(-1) - probs).square().sum(-1)


OBJECTIVE = Objective(((0.5, soft_cross_entropy), (1.0, squares)), feature_weight=0.5, decay=0.8)


class TwoLinearMethod(NetMethod):
    net, config = TwoLinear, PlainConfig


TRAINING = {"two-linear": TrainingMethod(OBJECTIVE, unroll_steps=3, noise=0.1)}
register("two-linear", TwoLinearMethod, "two matrices on the last hidden state", training=TRAINING)

# --- what it gets for that -------------------------------------------------------------------------------------------

PROMPTS = ["def add(", "class Table:\n    def", "for row in rows: print(row)\nfor row in"]
BUDGETS = [Budget(4), Budget(3, 3, 8), None]
needs_kernel = pytest.mark.skipif(get_kernel() is None, reason="no C++ compiler here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target whose sampled and greedy texts can be guessed a little."""
    return new_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """A short training, through the ordinary session: where it is, and the losses."""
    return short_run(folder, tmp_path_factory.mktemp("run"), "two-linear", iterations=12)


def test_it_trains(run):
    _, session, metrics = run
    losses = [line["loss"] for line in metrics]
    assert max(losses[-3:]) < 0.9 * losses[0]
    assert len(metrics[0]["agreement"]) == 3
    assert metrics[-1]["tau"] >= 1
    assert "two-linear head of" in session.describe()


def test_it_is_saved_and_loaded(run, folder):
    place, session, _ = run
    head, target = place / "head", load_target(folder)
    assert method_of_folder(head) is get_method("two-linear")
    net = get_method("two-linear").read(head, target.embedding, target.head, target_id(target, Tokenizer(folder)))
    assert net.config == session.trainer.net.config
    assert net.config.calibration != type(net.config.calibration)()  # fitted, and kept
    for name, tensor in session.trainer.net.tensors().items():
        assert torch.equal(net.tensors()[name], tensor), name
    drafter = load_drafter(head, target, Tokenizer(folder))()
    assert drafter.name == "two-linear (head)"
    assert head_id(head) in drafter.identity  # two heads of one shape share no measurements
    assert drafter.num_bytes >= target.head.num_bytes
    assert drafter.net.runs.name == ("kernel" if get_kernel() else "torch")


def drafters(run, folder):
    """The same net in the CPU kernel, in PyTorch, and recorded, each with a target of its own."""
    for name in ("kernel", "torch", "recorded"):
        target = load_target(folder, prepack=name == "kernel")
        net = get_method("two-linear").read(run[0] / "head", target.embedding, target.head)
        net = net.prepack() if name == "kernel" else net.requires_grad_(False)
        if name == "recorded":
            net.runs = GraphRuntime(Recorder())
        assert net.runs.name == ("kernel" if name == "kernel" else "torch")
        yield EagleDrafter(net, target), target


@needs_kernel
@pytest.mark.parametrize("budget", BUDGETS[:2], ids=str)
def test_it_drafts_the_same_trees_in_the_kernel_and_in_torch(run, folder, budget):
    found = []
    for drafter, target in drafters(run, folder):
        decoder = Decoder(target, drafter, budget=budget)
        requests = [Sampling(float(row > 0), seed=row, max_tokens=40, ignore_eos=True) for row in range(3)]
        for prompt, sampling in zip(PROMPTS, requests, strict=True):
            decoder.admit(Tokenizer(folder).encode(prompt), sampling)
        for _ in range(3):
            decoder.step()
        sampling = SamplingBatch(requests, noise_of(target.vocab_size, target.device))
        found.append(drafter.propose(decoder.ctx, sampling, budget))
    for tree in found[1:]:
        for row in range(3):
            assert paths(tree, row).keys() == paths(found[0], row).keys()
            for path, chance in paths(tree, row).items():
                assert chance == pytest.approx(paths(found[0], row)[path], rel=1e-3, abs=1e-6)


def paths(tree, row):
    """The reached chance of every node, by the tokens on its path; a chain's nodes have none."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    chances = [1.0] * len(tokens) if tree.confidence is None or tree.is_line else tree.confidence[row].tolist()
    found = {0: (tokens[0],)}
    for node in range(1, len(tokens)):
        if tokens[node] != PAD:
            found[node] = (*found[parents[node]], tokens[node])
    return {path: chances[node] for node, path in found.items()}


@pytest.mark.parametrize("engine", ["lean", "transformers"])
def test_the_text_is_the_targets(run, folder, engine):
    sampling = [Sampling(float(row > 0), seed=3, max_tokens=24, ignore_eos=True) for row in range(3)]
    plain = load(folder, "none", engine=engine).generate(PROMPTS, sampling)
    for budget in BUDGETS:
        found = load(folder, run[0] / "head", engine=engine, budget=budget).generate(PROMPTS, sampling)
        assert [each.token_ids for each in found] == [each.token_ids for each in plain]
        if budget is not None:
            assert all(each.stats.num_drafted for each in found)


def test_it_can_be_compared(run, folder):
    target, tokenizer = load_target(folder), Tokenizer(folder)
    lms = [LM(target, tokenizer)]
    lms += [LM(target, tokenizer, load_drafter(run[0] / "head", target, tokenizer), "match", b) for b in BUDGETS[:2]]
    found = compare(lms, PROMPTS[:2], Sampling(max_tokens=12, ignore_eos=True))
    assert found.all_identical
    assert [each.name for each in found.methods][1] == "two-linear (head)"


def test_the_command_line_knows_it(run, folder):
    head = str(run[0] / "head")
    shown = CliRunner().invoke(cli.app, ["doctor", head, "-t", str(folder), "--json", "--no-measure"])
    assert shown.exit_code == 0, shown.output
    assert {each["name"]: each["status"] for each in json.loads(shown.stdout)["findings"]} == {
        "head": "ok",
        "target": "ok",
    }
    written = CliRunner().invoke(cli.app, ["generate", "def add(", "-t", str(folder), "-d", head, "-n", "8"])
    assert written.exit_code == 0, written.output


# --- what is refused -------------------------------------------------------------------------------------------------


def test_another_targets_head_is_refused(run, folder_of, tmp_path):
    head = run[0] / "head"
    other = load_target(folder_of("llama", head_dim=32))
    with refused(CheckpointError, "made for", "vocab_size 300 and 61"):
        load_drafter(head, other, None)
    found = {each.name: each.status for each in diagnose(head, folder_of("llama", head_dim=32))}
    assert found == {"head": "ok", "target": "fail"}
    with refused(ConfigError, "unknown head layout 'onnx'"):
        convert(head, tmp_path / "no", "onnx")


def changed(head, tmp_path, change):
    """A copy of the head whose config's ``draftwing`` part was changed."""
    convert(head, tmp_path / "odd", "draftwing")
    file = tmp_path / "odd" / "config.json"
    config = json.loads(file.read_text())
    change(config["draftwing"])
    file.write_text(json.dumps(config))
    return tmp_path / "odd"


@pytest.mark.parametrize(
    ("change", "kind", "parts"),
    [
        (lambda block: block.update(kind="three-linear"), ConfigError, ["kind 'three-linear'", "import the module"]),
        (lambda block: block["config"].update(vocab_size="300"), ConfigError, ["config: vocab_size", "int", "'300'"]),
        (lambda block: block["config"].pop("taps"), ConfigError, ["lacks the field 'taps'"]),
        (lambda block: block["config"].update(depth=3), ConfigError, ["unknown field 'depth'"]),
        (lambda block: block["config"].update(rope=[]), ConfigError, ["config: rope must be an object"]),
        (lambda block: block["config"].update(taps=[]), ConfigError, ["taps must name at least 1"]),
        (lambda block: block["config"].update(taps=3), ConfigError, ["config: taps must be a list", "found 3"]),
        (lambda block: block.update(format=9), CheckpointError, ["expected format 1, found 9"]),
        (lambda block: block["config"].update(hidden_size=16), CheckpointError, ["(300, 16)", "(300, 32)"]),
    ],
)
def test_configs_that_cannot_be_meant(run, folder, tmp_path, change, kind, parts):
    odd = changed(run[0] / "head", tmp_path, change)
    with refused(kind, *parts):
        load_drafter(odd, load_target(folder), None)


def test_names_and_options_of_other_nets():
    with refused(ConfigError, "'two-linear' cannot be added", "not taken"):
        register("two-linear", TwoLinearMethod, "again")
    with refused(ConfigError, "training method called 'two-linear' is there already"):
        register("other", TwoLinearMethod, "again", training=TRAINING)
    assert "other" not in METHODS
    with refused(ConfigError, "fc_norm belongs to eagle3", "'two-linear'"):
        TrainOptions("two-linear", iterations=1, fc_norm=True)
    with refused(ConfigError, "inputs belongs to eagle1, hass, eagle3", "'two-linear'"):
        TrainOptions("two-linear", iterations=1, inputs="token")


def test_a_net_that_nobody_registered(run, folder):
    net = partial(TwoLinear, run[1].trainer.net.config, run[1].target.embedding, run[1].target.head)()
    net.kind = "stranger"
    with refused(ConfigError, "TwoLinear is a net of kind 'stranger'", "draftwing.register"):
        run[1].trainer.net, own = net, run[1].trainer.net
        try:
            run[1].trainer.save()
        finally:
            run[1].trainer.net = own


def test_a_head_with_a_bias_is_not_trained(run):
    """The loss is computed from the head's matrix alone: a bias would stay what it was, and nobody would say so."""
    net = TwoLinear(run[1].trainer.net.config, run[1].target.embedding, run[1].target.head)
    net.head = net.new_matrix(300, 32, bias=True)
    with refused(ConfigError, "two-linear", "LM head with a bias", "without one"):
        UnrolledLoss(net, OBJECTIVE, 2)


# --- further on ------------------------------------------------------------------------------------------------------


class OwnHead(TwoLinear):
    """The same with an LM head of its own, over some tokens."""

    kind = "own-head"

    def __init__(self, config: PlainConfig, *parts, **options) -> None:
        super().__init__(config, *parts, **options)
        self.head = self.new_matrix(self.num_draft_tokens, config.hidden_size)


class OwnHeadMethod(NetMethod):
    net, config, settings = OwnHead, PlainConfig, ("draft_vocab_size",)


def test_a_draft_vocabulary_of_its_own(run, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("draftwing.methods.registry.METHODS", kinds := dict(METHODS))
    register("own-head", OwnHeadMethod, "with a head", training={"own-head": TrainingMethod("eagle3", 2)})
    _, session, _ = short_run(folder, tmp_path, "own-head", draft_vocab_size=80, iterations=2, eval_prompts=0)
    trained = session.trainer.net
    assert "own-head" in kinds
    assert "80 of 300 tokens" in session.describe()
    target = load_target(folder)
    net = get_method("own-head").read(tmp_path / "head", target.embedding, target.head).prepack()
    assert torch.equal(net.target_ids, trained.target_ids)
    tokens, states = torch.arange(6)[:, None] + 3, torch.randn(6, 1, net.shape.state_width)
    one, other = net.runs.runner(net, net), TorchRuntime().runner(trained.requires_grad_(False), trained)
    for _ in range(2):  # memory that was used before holds nothing else
        found, wanted = (
            each.forward(Entries(DraftTree.chain(tokens), [0] * 6, states=states)) for each in (one, other)
        )
        assert found[0].isfinite().sum(2).tolist() == [[80]] * 6
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
        states = found[1]


# --- docs/dev/extending.md ------------------------------------------------------------------------------------


def test_what_the_docs_show_runs(monkeypatch, capsys):
    monkeypatch.setattr("draftwing.methods.registry.METHODS", kinds := dict(METHODS))
    root = Path(__file__).parents[1]
    text = (root / "docs" / "dev" / "extending.md").read_text()
    methods, family, net = re.findall(r"```python\n(.*?)```", text, re.S)
    assert indent(family, "    ") in (root / "src" / "draftwing" / "models" / "families.py").read_text()
    for block in (methods, net):
        exec(compile(block, "extending.md", "exec"), {"__name__": "extending"})
    assert {"repeats", "guess"} <= set(kinds)
    assert get_method("guess").layouts == ("draftwing",)
    assert capsys.readouterr().out.strip()
