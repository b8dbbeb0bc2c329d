"""The table of kinds: every net is traced and compared with PyTorch, and every entry with what the rest makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import test_own_net  # registers a net of its own
from conftest import PROCESS_SECONDS, refused
from draftwing.cli.main import app
from draftwing.cpu.library import get_kernel
from draftwing.decode import Decoder
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.formats.identity import target_id
from draftwing.formats.read import PICKLED
from draftwing.formats.write import LAYOUTS
from draftwing.formats.write import convert as convert_eagle
from draftwing.loading import load, load_drafter, load_target
from draftwing.methods.base import Budget
from draftwing.methods.method import NewNet
from draftwing.methods.net import DraftNet
from draftwing.methods.net_drafter import EagleDrafter
from draftwing.methods.objectives import OBJECTIVES, Objective
from draftwing.methods.registry import (
    METHODS,
    convert,
    drafter_maker,
    get_method,
    method_of_folder,
    method_of_net,
    training_method,
    training_methods,
)
from draftwing.models.config import ModelConfig, read_config
from draftwing.models.lean import LeanTarget
from draftwing.runtime.forward import Entries, Runner, TorchRuntime
from draftwing.sampling import Sampling
from draftwing.shipped import TOY
from draftwing.train.options import TrainOptions
from draftwing.tree import DraftTree

needs_kernel = pytest.mark.skipif(get_kernel() is None, reason="no C++ compiler here")
SHAPE = {"head_dim": 32, "num_hidden_layers": 4}
NARROW = {"hidden_size": 48, "target_hidden_size": 32, "own_embedding": True}


@dataclass(frozen=True)
class Net:
    """A net of a registered kind. ``num_draft``: tokens of its draft vocabulary."""

    kind: str
    settings: dict = field(default_factory=dict)
    num_draft: int | None = None

    def make(self, target: LeanTarget, like: ModelConfig) -> DraftNet:
        """One with numbers of its own, the same at every call."""
        entry = get_method(self.kind)
        torch.manual_seed(3)
        size = self.settings.get("hidden_size")
        embedding = target.embedding if size is None else torch.randn(target.vocab_size, size)
        ids = None if self.num_draft is None else torch.randperm(target.vocab_size)[: self.num_draft].sort().values
        taps, own = entry.taps(like.num_layers), target_id(target)
        net = entry.new(NewNet(like, taps, own, embedding, target.head, ids, self.settings))
        with torch.no_grad():
            for weight in net.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
        return net.requires_grad_(False)


NETS = {
    "eagle1": Net("eagle1"),
    "eagle1-fc-bias": Net("eagle1", {"fc_bias": True}),
    "eagle1-layers": Net("eagle1", {"num_layers": 2, "qkv_bias": True}),
    "eagle1-own-embedding": Net("eagle1", {"own_embedding": True}),
    "eagle3": Net("eagle3"),
    "eagle3-few-tokens": Net("eagle3", num_draft=40),
    "eagle3-residual": Net("eagle3", {"norm_before_residual": True}),
    "eagle3.1": Net("eagle3", {"fc_norm": True, "norm_output": True}),
    "eagle3.1-before-fc": Net("eagle3", {"norm_before_fc": True, "norm_output": True}, num_draft=20),
    "eagle3-layers": Net("eagle3", {"num_layers": 2}),
    "eagle3-qkv-bias": Net("eagle3", {"qkv_bias": True, "num_layers": 3}),
    "eagle3-own-embedding": Net("eagle3", {"own_embedding": True}),
    "eagle3-another-width": Net("eagle3", NARROW),
    "eagle3.1-another-width": Net("eagle3", {**NARROW, "fc_norm": True, "num_layers": 2}, num_draft=30),
    "mtp": Net("mtp"),
    "mtp-modules": Net("mtp", {"unroll_steps": 3}),
    "kangaroo": Net("kangaroo"),
    "two-linear": Net("two-linear"),
}
BLOCKS = ("medusa", "hydra", "dflash", "dspark", "domino")  # whose trees the kernel does not grow: see test_block.py


@pytest.fixture(scope="module")
def folder(folder_of) -> Path:
    return folder_of("llama", **SHAPE)


@cache
def both(name: str, folder: Path) -> list[tuple[DraftNet, LeanTarget]]:
    """The same net by PyTorch and in the CPU kernel, with a target each."""
    like, found = ModelConfig.from_hf(read_config(folder)), []
    for prepack in (False, True):
        plain = LeanTarget.from_folder(folder, prepack=False)
        net = NETS[name].make(plain, like)
        found.append((net.prepack() if prepack else net, LeanTarget.from_folder(folder, prepack=prepack)))
    assert [net.runs.name for net, _ in found] == ["torch", "kernel"]
    return found


def test_every_kind_of_net_is_traced_here():
    """But for those that read no features: these are the lean decoder itself, whose programs test_kernel compares."""
    reading = {
        name for name, entry in METHODS.items() if entry.training and entry.method.taps(SHAPE["num_hidden_layers"])
    }
    assert {net.kind for net in NETS.values()} == reading - {*BLOCKS, "peagle"}  # whose net is EAGLE-3's


@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_not_traced_says_so(name, folder):
    target, like = LeanTarget.from_folder(folder, prepack=False), ModelConfig.from_hf(read_config(folder))
    net = Net(name).make(target, like)
    assert not net.is_traceable
    assert net.prepack().runs.name == "torch"


@needs_kernel
@pytest.mark.parametrize("name", NETS)
def test_kernel_and_torch_agree_in_logits_and_states(name, folder):
    """Two prompts of features, and a ragged tree below them."""
    torch.manual_seed(7)
    results = []
    shape = both(name, folder)[0][0].shape
    features, ids = torch.randn(2, 9, shape.feature_width), torch.randint(61, (2, 9))
    tokens = torch.randint(61, (2, 5))
    tree = DraftTree(tokens, torch.tensor([[-1, 0, 0, 1, 3], [-1, 0, 1, 2, 1]]))
    states = torch.randn(2, 5, shape.state_width)
    for net, _ in both(name, folder):
        assert method_of_net(net) is get_method(NETS[name].kind)
        runner: Runner = net.runs.runner(net, object()) if net.runs.name == "kernel" else TorchRuntime().runner(net, 0)
        fused = runner.fuse(features)
        runner.prefill(0, ids[0].tolist(), features[:1])
        runner.prefill(1, ids[1, :6].tolist(), features[1:, :6])
        chain = runner.forward(Entries(DraftTree.chain(ids), [0, 0], states=fused))
        results.append([fused, *chain, *runner.forward(Entries(tree, [9, 6], states=states))])
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found.isinf(), wanted.isinf())
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)
    if NETS[name].num_draft:
        assert int(results[0][1][0, 0].isfinite().sum()) == NETS[name].num_draft


@needs_kernel
@pytest.mark.parametrize(
    ("name", "budget", "temperature"),
    [
        pytest.param(name, *how, marks=() if how == tree or (how == chain and name in METHODS) else pytest.mark.full)
        for chain, tree in [((Budget(4), 1.0), (Budget(3, 3, 9), 0.0))]
        for how in (chain, tree, (Budget(4), 0.0), (Budget(3, 3, 9), 1.0))
        for name in NETS
    ],
    ids=str,
)
def test_kernel_and_torch_draft_the_same_trees(name, budget, temperature, folder):
    """Rows of several lengths, one of them alone for a step: every tree, and the text that comes of them."""
    seen = []
    for net, target in both(name, folder):
        drafter = Watched(net, target)
        decoder, texts = Decoder(target, drafter, budget=budget), {0: (), 1: ()}
        for row, prompt in enumerate(((4, 7, 7, 1, 30), (9, 2, 11))):
            decoder.admit(prompt, Sampling(temperature=temperature, seed=row, max_tokens=9 - row, ignore_eos=True))
            step = decoder.step()
            for each in step.rows:
                texts[each.request_id] += each.token_ids
        while decoder.num_running:
            for each in decoder.step().rows:
                texts[each.request_id] += each.token_ids
        seen.append((texts, drafter.trees))
    assert seen[0][0] == seen[1][0]
    assert len(seen[0][1]) == len(seen[1][1]) >= 3
    for found, wanted in zip(seen[1][1], seen[0][1], strict=True):
        assert found == wanted


class Watched(EagleDrafter):
    """Keeps the nodes of its trees, each by the tokens on its path."""

    def __init__(self, net, target) -> None:
        super().__init__(net, target)
        self.trees: list[list[set]] = []

    def propose(self, ctx, sampling, budget):
        tree = super().propose(ctx, sampling, budget)
        self.trees.append([set(test_own_net.paths(tree, row)) for row in range(tree.num_rows)])
        return tree


# --- entries ---------------------------------------------------------------------------------------------------------


def test_a_folder_says_its_kind(folder, tmp_path):
    assert method_of_folder(TOY / "eagle1").name == "eagle1"
    assert method_of_folder(TOY / "eagle3").name == "eagle3"
    assert method_of_folder(TOY / "draft").name == method_of_folder(folder).name == "causal-lm"
    with refused(CheckpointError, str(tmp_path / "nothing")):
        method_of_folder(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name in ("eagle1", "eagle3")
        for layout in get_method(name).layouts
        if layout not in ("eagle", "gguf")
    ],
)
def test_a_head_is_known_in_every_layout_of_its_kind(name, layout, tmp_path):
    convert_eagle(TOY / name, tmp_path / "head", layout)
    assert method_of_folder(tmp_path / "head") is get_method(name)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    del config["draftwing"]  # as others write it: its tensors tell an EAGLE-1 head
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    assert method_of_folder(tmp_path / "head") is get_method(name)
    if (name, layout) == ("eagle1", "draftwing"):
        (tmp_path / "head" / "model.safetensors").unlink()
        torch.save({"fc.weight": torch.zeros(2, 4)}, tmp_path / "head" / PICKLED)
        assert method_of_folder(tmp_path / "head") is get_method(name)


def test_layouts_and_objectives_are_there():
    layouts = {layout for entry in METHODS.values() if entry.training for layout in entry.method.layouts}
    assert layouts == {*LAYOUTS, "medusa"}
    assert list(training_methods())[:4] == ["eagle1", "hass", "eagle3", "mtp"]
    for _, method in training_methods().values():
        assert isinstance(method.objective, Objective) or method.objective in OBJECTIVES
    with refused(ConfigError, "unknown training method 'dragon'", "eagle1, hass, eagle3, mtp"):
        training_method("dragon")
    with refused(ConfigError, "method must be one of eagle1, hass, eagle3, mtp", "'dragon'"):
        TrainOptions("dragon", iterations=1)


def test_speculators_has_no_eagle1(tmp_path):
    with refused(UnsupportedError, "can only be written as draftwing, eagle, vllm, sglang", "'speculators'"):
        convert(TOY / "eagle1", tmp_path / "head", "speculators")
    convert(TOY / "eagle3", tmp_path / "head", "speculators")
    assert method_of_folder(tmp_path / "head").name == "eagle3"


# --- options of a draft ----------------------------------------------------------------------------------------------


def test_options_reach_the_drafter(folder):
    target = load_target(folder)
    make = load_drafter("lookup", target, None, options={"min_match": 3})
    assert make().min_match == 3
    assert load_drafter("lookup", target, None)().min_match == 2
    assert load(draft="lookup", draft_options={"min_match": 4}).new_drafter().min_match == 4
    # The same word twice is drafted from where one word is enough, and not where three are asked for.
    prompt, found = [5, 9, 5, 9], {}
    for least in (1, 3):
        drafter = load_drafter("lookup", target, None, options={"min_match": least})()
        decoder = Decoder(target, drafter, budget=Budget(3))
        decoder.admit(prompt, Sampling(max_tokens=1, ignore_eos=True))
        found[least] = drafter.propose(decoder.ctx, None, Budget(3)).num_nodes
    assert found[1] > 1 == found[3]


@pytest.mark.parametrize(
    ("draft", "options", "parts"),
    [
        ("lookup", {"max_match": 3}, ["lookup has no option 'max_match'", "it has min_match"]),
        ("lookup", {"min_match": 0}, ["min_match must be at least 1, found 0"]),
        ("lookup", {"min_match": True}, ["min_match must be at least 1, found True"]),
        ("lookup", {"min_match": "3"}, ["min_match must be at least 1, found '3'"]),
        ("none", {"min_match": 3}, ["none has no option 'min_match'", "leave draft_options out"]),
        (TOY / "eagle3", {"min_match": 3}, ["eagle3 has no option 'min_match'", "it has online, online_lr"]),
    ],
)
def test_options_that_a_draft_has_not(draft, options, parts, folder):
    target = load_target(folder)
    with refused(ConfigError, "draft_options", *parts):
        load_drafter(draft, target, None, options=options)


def test_only_a_draft_model_asks_for_a_device(folder):
    target = load_target(folder)
    for draft in ("none", "lookup"):
        load_drafter(draft, target, None, device="a place that is none")
    with refused(ConfigError, "unknown device 'a place that is none'"):
        load_drafter(folder, target, None, device="a place that is none")


def test_a_kinds_name_is_a_folder_where_it_comes_with_none(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    target = load_target(folder)
    with refused(CheckpointError, "two-linear"):
        drafter_maker("two-linear", target, None, device=lambda: torch.device("cpu"))


# --- the command line ------------------------------------------------------------------------------------------------


def test_help_names_what_is_in_the_table():
    for command, words in (
        ("train", ["eagle1", "hass", "eagle3", "hass 3, eagle3 5"]),
        ("convert", list(LAYOUTS)),
        ("generate", ["eagle3", "lookup", "eagle3+lookup", "docs/methods.md"]),
        ("compare", ["eagle3", "lookup", "eagle3+lookup", "docs/methods.md"]),
    ):
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0, shown.output
        for word in words:
            assert word in " ".join(shown.output.replace("│", " ").split()), (command, word)


def test_the_table_does_not_wait_for_torch():
    code = "import sys; import draftwing.methods.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=PROCESS_SECONDS).returncode == 0
