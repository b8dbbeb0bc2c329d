"""LoRA adapters: a target with one has the logits of a model whose weights were changed by hand.

The adapters are written as peft 0.21 writes them, and the weights follow its definitions.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import draftwing as dw
from conftest import add_tokenizer, refused
from draftwing.cpu.library import get_kernel
from draftwing.errors import CheckpointError, ConfigError, TokenizerError, UnsupportedError
from draftwing.loading import find_model, load_target
from draftwing.models.catalogue import entry_of
from draftwing.shipped import shipped_folder
from draftwing.text.tokenizer import Tokenizer

IDS = torch.tensor([[1, 5, 9, 33, 60, 2, 7]])
LAYER, TIED = "model.layers.1.", "llama-bias-tied"


def write_adapter(folder, base, tensors, **config):
    """An adapter as peft saves it; ``tensors`` by their names after ``base_model.model.``."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 4, "lora_alpha": 10, **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


def matrices(weights, *modules, rank=4):
    """Random A and B for matrices of the model, and for its embedding those of an embedding."""
    tensors = {}
    for module in modules:
        out, width = weights[f"{module}.weight"].shape
        names, sizes = ("lora_A.weight", "lora_B.weight"), ((rank, width), (out, rank))
        if module.endswith("embed_tokens"):
            names, sizes = ("lora_embedding_A", "lora_embedding_B"), ((rank, out), (width, rank))
        for name, size in zip(names, sizes, strict=True):
            tensors[f"{module}.{name}"] = 0.2 * torch.randn(*size, dtype=torch.float64)
    return tensors


def plain(weights):
    query, down = f"{LAYER}self_attn.q_proj", f"{LAYER}mlp.down_proj"
    tensors = matrices(weights, query, down)
    changed = {
        f"{name}.weight": weights[f"{name}.weight"]
        + 2.5 * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        for name in (query, down)
    }
    return tensors, changed, {}


def patterns(weights):
    """rsLoRA, with a rank and an alpha of their own for some modules."""
    query, up = f"{LAYER}self_attn.q_proj", f"{LAYER}mlp.up_proj"
    tensors = {**matrices(weights, query), **matrices(weights, up, rank=9)}
    scales = {query: 7 / 4**0.5, up: 10 / 9**0.5}
    changed = {
        f"{name}.weight": weights[f"{name}.weight"]
        + scale * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        for name, scale in scales.items()
    }
    config = {"use_rslora": True, "rank_pattern": {"up_proj": 9}, "alpha_pattern": {r"layers\.\d\.self_attn.q_proj": 7}}
    return tensors, changed, config


def dora(weights):
    name = f"{LAYER}self_attn.o_proj"
    tensors = matrices(weights, name)
    tensors[f"{name}.lora_magnitude_vector"] = magnitude = 1 + torch.rand(32, dtype=torch.float64)
    sums = weights[f"{name}.weight"] + 2.5 * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    changed = {f"{name}.weight": magnitude[:, None] * sums / (sums**2).sum(1, keepdim=True).sqrt()}
    return tensors, changed, {"use_dora": True}


def ends(weights):
    tensors = matrices(weights, "model.embed_tokens", "lm_head")
    down, up = (tensors[f"model.embed_tokens.lora_embedding_{part}"] for part in "AB")
    changed = {
        "model.embed_tokens.weight": weights["model.embed_tokens.weight"] + 2.5 * (up @ down).T,
        "lm_head.weight": weights["lm_head.weight"]
        + 2.5 * tensors["lm_head.lora_B.weight"] @ tensors["lm_head.lora_A.weight"],
    }
    return tensors, changed, {}


def whole(weights):
    """``modules_to_save`` and ``bias="all"``."""
    names = ("lm_head.weight", f"{LAYER}input_layernorm.weight")
    changed = {name: torch.randn_like(weights[name]) for name in names}
    return {**changed, **matrices(weights, f"{LAYER}mlp.gate_proj", rank=4)}, changed, {"zero": True}


def tied(weights):
    """An embedding that the LM head shares, changed alone: the head stays."""
    tensors = matrices(weights, "model.embed_tokens")
    tensors[f"{LAYER}self_attn.q_proj.bias"] = torch.randn_like(weights[f"{LAYER}self_attn.q_proj.bias"])
    down, up = (tensors[f"model.embed_tokens.lora_embedding_{part}"] for part in "AB")
    changed = {
        "model.embed_tokens.weight": weights["model.embed_tokens.weight"] + 2.5 * (up @ down).T,
        "lm_head.weight": weights["model.embed_tokens.weight"].clone(),
        f"{LAYER}self_attn.q_proj.bias": tensors[f"{LAYER}self_attn.q_proj.bias"],
    }
    return tensors, changed, {}


def kept_tied(weights):
    embedding = torch.randn_like(weights["model.embed_tokens.weight"])
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    return tensors, {"model.embed_tokens.weight": embedding}, {"ensure_weight_tying": True}


CASES = {
    make.__name__: (family, make)
    for family, make in (
        ("llama", plain), ("qwen3", patterns), ("llama", dora), ("llama", ends), ("llama", whole), (TIED, tied),
        (TIED, kept_tied),
    )
}  # fmt: skip


def adapted(base, root, make):
    """The folder of an adapter, and that of the model with it."""
    torch.manual_seed(0)
    weights = load_file(base / "model.safetensors")
    tensors, changed, config = make(weights)
    if config.pop("zero", False):
        tensors = {name: 0 * tensor if "lora_B" in name else tensor for name, tensor in tensors.items()}
    merged = shutil.copytree(base, root / "merged")
    if "lm_head.weight" in changed and "lm_head.weight" not in weights:
        values = json.loads((merged / "config.json").read_text())
        (merged / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": False}))
    (merged / "model.safetensors").unlink()
    save_file({**weights, **changed}, merged / "model.safetensors")
    return write_adapter(root / "adapter", base, tensors, **config), merged


@pytest.mark.parametrize("name", CASES)
def test_a_target_with_an_adapter_has_the_merged_models_logits(name, folder_of, tmp_path):
    family, make = CASES[name]
    base = folder_of(family)
    adapter, merged = adapted(base, tmp_path, make)
    expected = load_target(merged, dtype="float64").score(IDS).logits
    logits = load_target(base, dtype="float64", lora=adapter).score(IDS).logits
    assert torch.allclose(logits, expected, rtol=0, atol=1e-12)
    assert not torch.allclose(logits, load_target(base, dtype="float64").score(IDS).logits, atol=0.1)


@pytest.mark.skipif(get_kernel() is None, reason="needs the CPU kernel")
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_the_kernel_reads_merged_matrices_and_quantises_them(quantize, folder_of, tmp_path):
    base = folder_of("mistral-window", head_dim=32)
    adapter, merged = adapted(base, tmp_path, plain)
    options = {"dtype": "float32", "quantize": quantize}
    target = load_target(base, lora=adapter, **options)
    assert target.runtime == "kernel"
    assert torch.equal(target.score(IDS).logits, load_target(merged, **options).score(IDS).logits)


def test_a_folder_of_an_adapter_is_a_target(folder_of, tmp_path):
    base = shutil.copytree(folder_of("llama", vocab_size=300), tmp_path / "base")
    add_tokenizer(base)
    adapter, merged = adapted(base, tmp_path, plain)
    sampling = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    expected = dw.load(merged, "lookup").generate([[1, 70, 80]], **sampling)[0].token_ids
    for target, lora in ((adapter, None), (base, adapter), (str(base), str(adapter))):
        assert dw.load(target, "lookup", lora=lora).generate([[1, 70, 80]], **sampling)[0].token_ids == expected
    with refused(TokenizerError, "a LoRA adapter without a tokenizer", "merge it into its base model"):
        Tokenizer(adapter)
    # A base model that is named relative to the adapter, and a tokenizer of the adapter's own.
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "../base"}))
    assert find_model(adapter)[0].resolve() == base.resolve()
    add_tokenizer(adapter, 290)
    assert dw.load(adapter, "none").tokenizer.fast.get_vocab_size() == 290
    with refused(ConfigError, "is a LoRA adapter itself"):
        dw.load(adapter, lora=adapter)
    with refused(CheckpointError, "a LoRA adapter, no model", "(--lora)"):
        load_target(adapter)
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with refused(CheckpointError, "does not name its base model"):
        dw.load(adapter)


def test_an_adapter_has_the_default_draft_of_its_base_model(tmp_path):
    toy = shipped_folder("toy/target")
    weights = load_file(toy / "model.safetensors")
    adapter = write_adapter(tmp_path / "adapter", "toy", matrices(weights, f"{LAYER}mlp.up_proj"))
    given, stated = dw.load("toy", lora=adapter), dw.load(adapter)
    assert stated.drafter_name == given.drafter_name == dw.load("toy").drafter_name
    texts = [lm.generate([[1, 70, 80]], max_tokens=9)[0].token_ids for lm in (given, stated)]
    assert texts[0] == texts[1] == dw.load(adapter, "none").generate([[1, 70, 80]], max_tokens=9)[0].token_ids
    (tmp_path / "adapter" / "toy").mkdir()  # a folder of this name comes first
    assert entry_of(adapter) is None


def test_adapters_that_do_not_fit(folder_of, tmp_path):
    base, other = folder_of("llama"), folder_of("llama", hidden_size=64)
    weights = load_file(base / "model.safetensors")
    tensors = plain(weights)[0]
    first = next(iter(tensors))

    def load(folder=base, given=tensors, **config):
        load_target(folder, lora=write_adapter(tmp_path / "adapter", "org/base", given, **config))

    with refused(CheckpointError, "lora_", "must have shape", "64", "found", "32", "'org/base'"):
        load(other)
    with refused(CheckpointError, "must have shape", "2", "found", "4"):
        load(r=2)
    with refused(CheckpointError, "it changes model.layers.7.mlp.up_proj.weight, which", "'org/base'"):
        load(given={"model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(4, 32)})
    with refused(CheckpointError, "has only one of lora_A and lora_B"):
        load(given={first: tensors[first]})
    with refused(UnsupportedError, "prompt_embeddings is no weight of a LoRA adapter", "merge_and_unload"):
        load(given={"prompt_embeddings": torch.zeros(2, 2)})
    with refused(CheckpointError, "holds no weights"):
        load(given={})
    with refused(CheckpointError, "weight of lm_head must have shape (61, 32)", "found (64, 32)"):
        load(given={"lm_head.weight": torch.zeros(64, 32)})  # a larger vocabulary
    with refused(UnsupportedError, "DoRA of model.embed_tokens"):
        magnitude = {"model.embed_tokens.lora_magnitude_vector": torch.ones(61)}
        load(given={**matrices(weights, "model.embed_tokens"), **magnitude})
    with refused(UnsupportedError, "of type 'IA3'"):
        load(peft_type="IA3")
    with refused(UnsupportedError, "layer_replication=[[0, 2]]"):
        load(layer_replication=[[0, 2]])
    with refused(UnsupportedError, "init_lora_weights='pissa_niter_4' changes the base model"):
        load(init_lora_weights="pissa_niter_4")
    for wrong in (0, "4", None, True):
        with refused(CheckpointError, "r must be an integer of at least 1, found"):
            load(r=wrong)
    with refused(CheckpointError, f"weight {first.removesuffix('.lora_A.weight')}.weight: expected finite numbers"):
        load(given={**tensors, first: torch.full_like(tensors[first], torch.nan)})


def test_adapters_that_are_damaged(folder_of, tmp_path):
    base = folder_of("llama")
    adapter = write_adapter(tmp_path / "adapter", base, plain(load_file(base / "model.safetensors"))[0])
    with refused(UnsupportedError, "lora=", "needs the lean decoder"):
        load_target(folder_of("gpt2"), lora=adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"no weights")
    with refused(CheckpointError, "adapter_model.safetensors: cannot be read", "Download it again"):
        load_target(base, lora=adapter)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with refused(CheckpointError, "expected adapter_model.safetensors, found only adapter_model.bin", "pickled"):
        load_target(base, lora=adapter)
    (adapter / "adapter_model.bin").unlink()
    with refused(CheckpointError, "expected adapter_model.safetensors, found none"):
        load_target(base, lora=adapter)
    for content, kind in (("{", "expected JSON"), ("[]", "expected a JSON object")):
        (adapter / "adapter_config.json").write_text(content)
        with refused(CheckpointError, "adapter_config.json", kind):
            load_target(base, lora=adapter)
    (adapter / "adapter_config.json").unlink()
    with refused(CheckpointError, "expected a LoRA adapter with adapter_config.json, found none"):
        load_target(base, lora=adapter)
