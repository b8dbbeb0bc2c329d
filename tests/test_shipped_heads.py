"""Heads that come with Draftwing for a model with a name: found, fitting in every precision, small enough to ship."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import draftwing as dw
from conftest import add_tokenizer, refused
from draftwing.cli import main as cli
from draftwing.cli.options import Compared, Drafting, Model
from draftwing.errors import CheckpointError
from draftwing.formats.identity import made_for, target_id
from draftwing.formats.read import Head
from draftwing.formats.write import head_files, write_head
from draftwing.loading import load_target
from draftwing.methods.eagle_net import EagleConfig, EagleNet, tensor_shapes
from draftwing.methods.net import TargetId
from draftwing.models.catalogue import CATALOGUE, Entry, Shipped
from draftwing.models.config import ModelConfig
from draftwing.models.linear import has_exact_int8
from draftwing.shipped import SHIPPED, TOY, shipped_heads
from draftwing.text.tokenizer import Tokenizer
from gguf_files import write

MB = 1e6
# SmolLM2-135M: the shape for which heads are shipped.
SMOL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "rope_theta": 100000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def target(folder_of, tmp_path_factory):
    folder = folder_of(
        "llama",
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    return folder if (folder / "tokenizer.json").exists() else add_tokenizer(folder)


@pytest.fixture(scope="module")
def package(target, tmp_path_factory):
    """A package with heads for ``tiny``, in bfloat16, made for the float32 folder."""
    root = tmp_path_factory.mktemp("shipped")
    for each in SHIPPED.iterdir():  # beside what is there already
        (root / each.name).symlink_to(each)
    loaded = load_target(target, device="cpu", prepack=False)
    own = target_id(loaded, Tokenizer(target), "tiny")
    torch.manual_seed(0)
    for version, ids in ((3, torch.arange(0, 300, 2)), (1, None)):
        config = EagleConfig.for_target(version, loaded.config, 150, target=own)
        net = EagleNet(config, loaded.embedding.plain().bfloat16(), loaded.head, ids, torch.bfloat16)
        write_head(root / "tiny" / f"eagle{version}", net)
    return root


@pytest.fixture
def named(target, package, monkeypatch):
    monkeypatch.setattr("draftwing.shipped.SHIPPED", package)
    entry = Entry("tiny", Shipped(str(target)), "MIT", 1, heads=shipped_heads("tiny", "eagle3", "hydra", "eagle1"))
    monkeypatch.setitem(CATALOGUE, "tiny", entry)
    return entry


def run(*args):
    return CliRunner().invoke(cli.app, list(map(str, args)))


def test_only_what_is_there_is_shipped(named):
    assert named.heads == {"eagle3": "tiny/eagle3", "eagle1": "tiny/eagle1"}
    assert named.best_head == "eagle3"
    assert shipped_heads("other", "eagle3") == {}


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_name_brings_its_best_head(named, quantize):
    if quantize and not has_exact_int8():  # heads this narrow run in PyTorch
        pytest.skip("this CPU multiplies no 8-bit integers exactly")
    options = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 2}
    plain = dw.load("tiny", "none", quantize=quantize, device="cpu").generate("def add(", **options)[0]
    for draft, name in ((None, "eagle3"), ("eagle3", "eagle3"), ("eagle1", "eagle1")):
        lm = dw.load("tiny", draft, quantize=quantize, device="cpu")
        assert lm.drafter_name == name
        found = lm.generate("def add(", speculation=dw.Budget(3), **options)[0]
        assert found.token_ids == plain.token_ids
        assert found.stats.num_drafted > 0


def test_a_head_is_found_for_the_same_model_in_another_file(named, target, tmp_path, monkeypatch):
    """The target's name is no part of what it is: a folder or a file in 4 bits gets the head by its kind."""
    file = write(target, tmp_path / "tiny.Q4_1.gguf", lambda name, weight: "Q4_1")
    for model in (target, file):
        lm = dw.load(model, "eagle3", device="cpu")
        assert lm.drafter_name == "eagle3"
        assert lm.generate("def add(", max_tokens=4, speculation=dw.Budget(2))[0].token_ids
        shown = run("convert", "eagle3", "-t", str(model), "-o", str(tmp_path / f"{model.name}-head"))
        assert shown.exit_code == 0, shown.output
    monkeypatch.setenv("DRAFTWING_MODEL", str(target))
    assert run("convert", "eagle3", "-o", str(tmp_path / "default-head")).exit_code == 0
    refusal = run("convert", "eagle3", "-t", str(TOY / "draft"), "-o", str(tmp_path / "other"))
    assert "eagle3: there is no such folder" in refusal.stderr
    assert made_for(TOY / "eagle3").name == "toy"
    assert made_for(target) is None
    with refused(CheckpointError, "does not come with a draft of kind causal-lm", "eagle3, eagle1"):
        dw.load("tiny", "causal-lm", device="cpu")


def test_the_command_line_takes_it(named):
    rows = {row["name"]: row for row in json.loads(run("list", "--json").stdout)["models"]}
    assert rows["tiny"]["heads"] == ["eagle3", "eagle1"]
    for more in ([], ["--draft", "eagle1"]):
        shown = run("generate", "-t", "tiny", "-n", "4", "--tree", "chain:2", "--json", "def add(", *more)
        assert shown.exit_code == 0, shown.output
    drafters = Model("tiny", device="cpu").load_many(Compared(), Drafting(tree="chain:2"))
    assert [lm.drafter_name for lm in drafters] == ["none", "lookup", "eagle1", "eagle3"]


# --- a head of the shipped shape -------------------------------------------------------------------------------------


def smol(version, draft_vocab_size):
    model = ModelConfig.from_hf(SMOL, "")
    target = TargetId("smollm2-135m-instruct", 576, 30, 49152, "0" * 16)
    return EagleConfig.for_target(version, model, draft_vocab_size, target=target)


def num_bytes(config):
    maps = 8 * config.draft_vocab_size + config.vocab_size if config.has_draft_vocab else 0
    return 2 * sum(torch.Size(shape).numel() for shape in tensor_shapes(config).values()) + maps


def test_heads_are_small_enough_to_ship():
    assert num_bytes(smol(3, 8192)) + num_bytes(smol(1, None)) < 30 * MB
    assert num_bytes(smol(3, 16384)) < 30 * MB  # alone, not with EAGLE-1 beside it
    sizes = {file: file.stat().st_size for file in SHIPPED.rglob("*") if file.is_file()}
    assert sum(size for file, size in sizes.items() if "smollm2-135m-instruct" in file.parts) < 30 * MB
    assert sum(sizes.values()) < 95 * MB  # a wheel stays below 100
    assert not [file for file in sizes if file.name.endswith(".partial")]


def zeros(config):
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in tensor_shapes(config).items()}


@pytest.mark.parametrize("layout", ["vllm", "sglang", "speculators"])
def test_what_engines_are_told_of_it(layout):
    """Each of the traps that vLLM and SGLang have for a head of this shape, on a target with tied embeddings."""
    config, ids = smol(3, 8192), torch.arange(8192) * 5
    said, written = head_files(Head(config, zeros(config), ids, verifier=config.target.name), layout)
    shape = said.get("transformer_layer_config", said)
    expected = {key: value for key, value in SMOL.items() if key not in ("architectures", "tie_word_embeddings")}
    expected |= {"num_hidden_layers": 1, "head_dim": 64, "rope_scaling": None, "torch_dtype": "bfloat16"}
    # The target's embeddings are tied, the head's LM head is its own: said false, and there.
    expected |= dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), False)
    assert {key: shape[key] for key in expected} == expected
    assert (said["draft_vocab_size"], said["tie_word_embeddings"], said["norm_before_residual"]) == (8192, False, False)
    assert (written["lm_head.weight"].shape, written["fc.weight"].shape) == ((8192, 576), (576, 3 * 576))
    assert "embed_tokens.weight" not in written
    assert (written["d2t"].dtype, written["t2d"].dtype) == (torch.int64, torch.bool)
    assert torch.equal(torch.arange(8192) + written["d2t"], ids)
    assert written["t2d"].nonzero()[:, 0].equal(ids)
    # All engines default to the inputs of layers 2, 15 and 27; ids that are named count differently in two of them.
    if layout == "speculators":
        assert "model_type" not in said
        assert (said["target_hidden_size"], said["eagle_aux_hidden_state_layer_ids"]) == (576, [2, 15, 27])
        assert said["speculators_config"]["verifier"]["name_or_path"] == "smollm2-135m-instruct"
        assert not any(name.startswith("midlayer.") for name in written)
    else:
        assert (said["architectures"], said["bias"]) == (["LlamaForCausalLMEagle3"], False)
        assert not {"eagle_aux_hidden_state_layer_ids", "eagle_config"} & said.keys()


def test_what_vllm_is_told_of_an_eagle1_head():
    config = smol(1, None)
    said, written = head_files(Head(config, zeros(config)), "vllm")
    assert said["architectures"] == ["LlamaForCausalLM"]
    assert not {"lm_head.weight", "fc.bias", "embed_tokens.weight"} & written.keys()
    assert not any("input_layernorm" in name for name in written)
    assert said["tie_word_embeddings"] is False


@pytest.mark.parametrize("is_same", [True, False])
def test_a_head_with_a_copy_of_the_embedding_is_loaded(is_same, target, package, tmp_path):
    """As other projects write them: the target's own rows are shared, others are kept."""
    shutil.copytree(package / "tiny" / "eagle1", tmp_path / "head")
    loaded, file = load_target(target), tmp_path / "head" / "model.safetensors"
    rows = loaded.embedding.plain().float() * (1 if is_same else 2)
    save_file({**load_file(file), "embed_tokens.weight": rows.contiguous()}, file)
    net = dw.load(target, tmp_path / "head").drafter.net
    assert net.config.own_embedding is not is_same
    assert torch.allclose(net.embedding.plain().float(), rows, rtol=2**-7)
