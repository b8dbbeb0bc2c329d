"""Inflated models compute the small model's numbers, text and drafts in a large model's shape."""

import importlib.util
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

import draftwing as dw
from conftest import add_tokenizer, float64_norms, refused
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.formats.identity import target_id_of_folder
from draftwing.formats.read import load_head
from draftwing.formats.write import write_head
from draftwing.loading import load_drafter, load_target
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.models.config import ModelConfig, read_config
from draftwing.models.linear import Linear

FILE = Path(__file__).parents[1] / "benchmarks" / "inflate.py"
spec = importlib.util.spec_from_file_location("inflate", FILE)
script = sys.modules["inflate"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
Shape, inflate = script.Shape, script.inflate

# The small one: hidden 32, 3 layers, 4 heads that share 2, MLP of 48.
SHAPES = {
    "same": Shape(32, 3, 4, 2, 48),
    "larger": Shape(64, 5, 8, 4, 96),
    "wider groups": Shape(80, 4, 10, 2, 50),
    "smaller groups": Shape(48, 3, 8, 8, 64),
}
LLAMAS = {"untied": ("llama", {}), "tied": ("llama", {"tie_word_embeddings": True}), "bias": ("llama-bias-tied", {})}
HEADS = {
    "eagle3": (3, {}),
    "eagle3-whole": (3, {"draft_vocab_size": None}),
    "eagle3.1": (3, {"fc_norm": True, "norm_output": True}),
    "eagle3-before-fc": (3, {"norm_before_fc": True}),
    "eagle3-residual": (3, {"norm_before_residual": True}),
    "eagle3-last": (3, {"taps": (1, 3)}),
    "eagle3-heads": (3, {"num_heads": 2, "num_kv_heads": 1, "intermediate_size": 20}),
    "eagle1": (1, {}),
    "eagle1-bias": (1, {"fc_bias": True}),
}
PROMPTS = [[1, 5, 9, 30, 2, 17], [1, 44], [3, 8, 8, 60, 12, 7, 21, 50]]
IDS = torch.tensor([[1, 5, 9, 30, 2, 17, 44, 60, 3, 8, 8, 12]])


def head_of(folder, out, variant="eagle3"):
    """A random head for the model in ``folder``."""
    version, changes = HEADS[variant]
    shape = ModelConfig.from_hf(read_config(folder))
    changes = {"taps": (shape.num_layers,) if version == 1 else (0, 1, 2), "draft_vocab_size": 40, **changes}
    config = EagleConfig.for_target(version, shape, changes.pop("draft_vocab_size"), **changes)
    config = replace(config, target=target_id_of_folder(folder))
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    ids = torch.arange(config.draft_vocab_size) + 20 if config.has_draft_vocab else None
    torch.manual_seed(5)
    net = EagleNet(config, embedding, Linear(embedding), ids, torch.float64)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    write_head(out, net)
    return out


def steps_of(folder, head, temperature):
    """Decode all prompts at once with a tree wide enough for a random head to be right; return every step."""
    target = load_target(folder, dtype="float64", device="cpu")
    drafter = load_drafter(head, target, None, device="cpu")()
    decoder = dw.Decoder(target, drafter, budget=dw.Budget(3, 12, 40))
    for seed, prompt in enumerate(PROMPTS):
        decoder.admit(prompt, dw.Sampling(max_tokens=8, ignore_eos=True, temperature=temperature, seed=seed))
    steps = []
    while decoder.num_running:
        steps.append(decoder.step())
    return steps


@torch.no_grad()
def hf_logits(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return float64_norms(model)(IDS).logits


@pytest.mark.parametrize(
    ("llama", "shape"), [("untied", "same"), ("untied", "wider groups"), ("tied", "larger"), ("bias", "smaller groups")]
)
def test_the_same_logits_and_text(folder_of, tmp_path, llama, shape):
    family, changes = LLAMAS[llama]
    small, large = folder_of(family, **changes), tmp_path / "target"
    inflate(small, [], tmp_path, SHAPES[shape], torch.float64)
    torch.testing.assert_close(hf_logits(large), hf_logits(small), rtol=0, atol=1e-10)
    for dtype, tolerance in (("float64", 1e-10), ("float32", 1e-5)):
        one, other = (load_target(folder, dtype=dtype, device="cpu") for folder in (small, large))
        logits = one.score(IDS).logits
        tolerance *= float(logits.abs().max())
        torch.testing.assert_close(other.score(IDS).logits, logits, rtol=0, atol=tolerance)
        assert texts_of(one) == texts_of(other)


def texts_of(target):
    decoder, texts = dw.Decoder(target), {}
    for prompt in PROMPTS:
        texts[decoder.admit(prompt, dw.Sampling(max_tokens=6, ignore_eos=True))] = []
    while decoder.num_running:
        for row in decoder.step().rows:
            texts[row.request_id] += row.token_ids
    return texts


@pytest.mark.parametrize("shape", ["larger", pytest.param("smaller groups", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "variant", [name if name in ("eagle3", "eagle1") else pytest.param(name, marks=pytest.mark.full) for name in HEADS]
)
def test_the_same_drafts(folder_of, tmp_path, variant, shape):
    small = folder_of("llama")
    head = head_of(small, tmp_path / variant, variant)
    _, (wide,) = inflate(small, [head], tmp_path / "out", SHAPES[shape], torch.float64)
    for temperature in (0, 1) if variant in ("eagle3", "eagle1") else (1,):
        ours = steps_of(small, head, temperature)
        theirs = steps_of(tmp_path / "out" / "target", wide, temperature)
        assert dw.Stats.of(ours).num_accepted == dw.Stats.of(theirs).num_accepted > 0
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.tree.tokens, other.tree.tokens)
            assert [row.token_ids for row in one.rows] == [row.token_ids for row in other.rows]


def test_all_taps_but_the_last_keep_their_numbers(folder_of, tmp_path):
    small = folder_of("llama")
    heads = [head_of(small, tmp_path / name, name) for name in ("eagle3", "eagle3-last", "eagle1")]
    _, wide = inflate(small, heads, tmp_path / "out", SHAPES["larger"], torch.float32)
    assert [load_head(head).config.taps for head in wide] == [(0, 1, 2), (1, 5), (5,)]
    assert {load_head(head).config.target.num_layers for head in wide} == {5}


@pytest.fixture(scope="module")
def folder(folder_of, tmp_path_factory):
    copy = shutil.copytree(folder_of("llama", vocab_size=300), tmp_path_factory.mktemp("small") / "tiny")
    return add_tokenizer(copy)


def test_the_command_line(folder, tmp_path):
    heads = [head_of(folder, tmp_path / name, name) for name in ("eagle3", "eagle1")]
    out = tmp_path / "out"
    done = run(out, "--target", folder, "--head", heads[0], "--head", heads[1], "--hidden-size", 64)
    assert done.exit_code == 0, done.output
    assert "logits: largest difference" in done.output
    assert done.output.count("the same text") == 2
    notice = f"Inflated: the text is that of {folder}, the cost that of a Llama of 3 layers of 64"
    assert notice in done.output
    assert notice in (out / "target" / "README.md").read_text()
    config = transformers.AutoConfig.from_pretrained(out / "target")
    assert (config.hidden_size, config.head_dim) == (64, 8)
    assert config.draftwing_inflated["hidden_size"] == 32
    for name in ("eagle3", "eagle1"):
        inflated = dw.load(out / "target", out / name, device="cpu", budget=dw.Budget(3, 3))
        small = dw.load(folder, "none", device="cpu")
        texts = [lm.generate("def add(", max_tokens=8)[0].token_ids for lm in (inflated, small)]
        assert texts[0] == texts[1]
    for arguments, message in (
        ((out, "--target", folder, "--hidden-size", 64), "exists already"),
        ((tmp_path / "new", "--target", folder), "how large?"),
    ):
        refusal = run(*arguments)
        assert refusal.exit_code == 2
        assert message in refusal.output


def run(*arguments):
    app = typer.Typer()
    app.command()(script.main)
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_the_shapes_of_known_models():
    assert script.shape_like("1b", 64) == Shape(2048, 16, 32, 8, 8192)
    assert script.shape_like("3b", 128) == Shape(3072, 28, 24, 8, 8192)
    assert script.shape_like("3b", 64) == Shape(3072, 28, 48, 16, 8192)
    assert script.shape_like("8b", 64) == Shape(4096, 32, 64, 16, 14336)
    with refused(ConfigError, "no multiple of the target's head_dim 48"):
        script.shape_like("1b", 48)


def test_shards(folder_of, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "SHARD_BYTES", 50_000)
    small = folder_of("llama")
    inflate(small, [], tmp_path, SHAPES["larger"], torch.float32)
    index = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())
    files = {file.name for file in (tmp_path / "target").glob("*.safetensors")}
    assert len(files) > 3
    assert files == set(index["weight_map"].values())
    torch.testing.assert_close(hf_logits(tmp_path / "target"), hf_logits(small), rtol=1e-4, atol=1e-4)


def test_half_precision_reports_rounding(folder_of, tmp_path):
    small = tmp_path / "small"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder_of("llama"), dtype=torch.bfloat16)
    model.save_pretrained(small)
    inflation, _ = inflate(small, [], tmp_path / "half", SHAPES["larger"], torch.bfloat16)
    assert not inflation.rounded
    torch.testing.assert_close(hf_logits(tmp_path / "half" / "target"), hf_logits(small), rtol=0, atol=1e-5)
    tensors = load_file(tmp_path / "half" / "target" / "model.safetensors")
    assert {tensor.dtype for name, tensor in tensors.items() if "norm" not in name} == {torch.bfloat16}
    inflation, _ = inflate(folder_of("llama"), [], tmp_path / "rounded", SHAPES["larger"], torch.bfloat16)
    assert inflation.rounded


def test_new_weights_cost_what_real_ones_do(folder_of, tmp_path):
    small = folder_of("llama")
    head = head_of(small, tmp_path / "eagle3")
    inflate(small, [head], tmp_path / "out", SHAPES["larger"], torch.float32)
    for name in ("target", "eagle3"):
        for key, tensor in load_file(tmp_path / "out" / name / "model.safetensors").items():
            if tensor.is_floating_point():
                used = tensor[tensor != 0].abs()
                assert torch.isfinite(tensor).all(), key
                assert not len(used) or used.min() > 1e-20, key  # denormal numbers are slow on CPUs
    new = load_file(tmp_path / "out" / "target" / "model.safetensors")
    for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        assert new[f"model.layers.4.{part}.weight"].std() > 0.01
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        assert not new[f"model.layers.4.{part}.weight"].any()


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ({"hidden_size": 24, "num_heads": 4}, ["hidden size (32)", "found 24"]),
        ({"num_layers": 2}, ["number of layers (3)", "found 2"]),
        ({"intermediate_size": 40}, ["intermediate size (48)", "found 40"]),
        ({"num_heads": 2, "num_kv_heads": 2}, ["4 heads that share 2 key heads", "2 that share 2"]),
        ({"num_heads": 8, "num_kv_heads": 3}, ["cannot be placed", "8 that share 3"]),
        ({"num_heads": 2, "num_kv_heads": 4}, ["cannot be placed"]),
        ({"hidden_size": 36, "num_heads": 8, "num_kv_heads": 4}, ["36 is not divisible by 8 heads"]),
    ],
)
def test_shapes_without_room(folder_of, tmp_path, shape, parts):
    with refused(ConfigError, *parts):
        inflate(folder_of("llama"), [], tmp_path / "out", replace(SHAPES["same"], **shape), torch.float32)
    assert not (tmp_path / "out").exists()


def test_only_a_llama_and_its_own_heads(folder_of, tmp_path):
    with refused(UnsupportedError, "only a Llama", "qwen3"):
        inflate(folder_of("qwen3"), [], tmp_path / "out", SHAPES["larger"], torch.float32)
    other = head_of(folder_of("llama", num_hidden_layers=4), tmp_path / "other")
    with refused(CheckpointError, "made for", "num_layers 4 and 3"):
        inflate(folder_of("llama"), [other], tmp_path / "out", SHAPES["larger"], torch.float32)
    head = head_of(folder_of("llama"), tmp_path / "head")
    with refused(ConfigError, "two folders would be named"):
        inflate(folder_of("llama"), [head, head], tmp_path / "out", SHAPES["larger"], torch.float32)
    assert not (tmp_path / "out").exists()
