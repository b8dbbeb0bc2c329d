"""Multimodal checkpoints whose text model is of a native family run as that text model."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import mtp_files
from conftest import SMALL, build, float64_norms, refused
from draftwing.cpu.library import get_kernel
from draftwing.decode import Decoder
from draftwing.errors import CheckpointError, UnsupportedError
from draftwing.formats.identity import target_id_of_folder
from draftwing.loading import load_drafter, load_target
from draftwing.models.config import ModelConfig, read_config
from draftwing.models.families import WRAPPERS
from draftwing.sampling import Sampling
from test_lora import matrices, write_adapter

IDS = torch.tensor([[1, 5, 9, 33, 60, 2, 7, 11, 12, 13, 14, 15]])
TEXT = {**SMALL, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
VISION = {
    **dict.fromkeys(("hidden_size", "out_hidden_size", "vision_output_dim", "projector_output_dim"), 16),
    **dict.fromkeys(("projector_input_dim", "image_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_attention_heads", "num_heads"), 1),
    "intermediate_size": 16,
    "patch_size": 8,
}
MROPE = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25, "rope_theta": 1e4}
KINDS = {
    "gemma3": {"sliding_window": 6, "query_pre_attn_scalar": 16},
    "llama4": {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 8},
    "mistral3": {"sliding_window": 5},
    "qwen3_5": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
        "rope_parameters": {"rope_type": "default", **MROPE},
    },
}


def make(kind, **changes):
    """A tiny model of transformers with a vision tower."""
    config = transformers.CONFIG_MAPPING[kind](
        text_config={"model_type": "mistral" if kind == "mistral3" else f"{kind}_text", **TEXT, **KINDS[kind]},
        vision_config=VISION,
        **{"tie_word_embeddings": False, **changes},
    )
    torch.manual_seed(1)
    return transformers.AutoModelForImageTextToText.from_config(config).eval()


def wrap(folder, kind, prefix="model.language_model.", head="lm_head.", **outside):
    """Rewrite a folder with a text model as one with a vision tower, whose names begin with ``prefix``."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "text_config": config, **outside}))
    tensors = {"model.visual.blocks.0.attn.qkv.weight": torch.zeros(4, 4)}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for old, new in (("model.", prefix), ("lm_head.", head)):
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    return folder


def decode(target, drafter=None, length=8):
    decoder = Decoder(target, drafter)
    decoder.admit(IDS[0].tolist(), Sampling(max_tokens=length, temperature=0.0, ignore_eos=True))
    tokens = []
    while decoder.num_running:
        tokens += decoder.step().rows[0].token_ids
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_it_has_the_logits_and_the_text_of_the_whole_model(kind, tmp_path):
    model = make(kind)
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path)
    assert target.runtime == ("kernel" if get_kernel() is not None else "torch")
    text = decode(target)
    assert decode(target, load_drafter("lookup", target, None)()) == text

    # transformers' forward of the whole Llama 4 fails without images.
    reference = float64_norms((model.language_model if kind == "llama4" else model).double())
    ids = torch.cat([IDS, torch.tensor([text])], 1)
    with torch.no_grad():
        logits = reference(input_ids=ids, use_cache=False).logits
    assert logits[0, IDS.shape[1] - 1 : -1].argmax(-1).tolist() == text
    # Not closer: some of transformers' classes compute rotations in float32.
    torch.testing.assert_close(load_target(tmp_path, dtype="float64").score(ids).logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.language_model.", "lm_head."),
        ("language_model.model.", "language_model.lm_head."),
        ("model.text_model.", "lm_head."),
    ],
)
def test_the_names_of_files(prefix, head, tmp_path):
    build("llama").save_pretrained(tmp_path)
    expected = load_target(tmp_path, dtype="float64").score(IDS).logits
    wrap(tmp_path, "llava", prefix, head)
    assert torch.equal(load_target(tmp_path, dtype="float64").score(IDS).logits, expected)
    assert target_id_of_folder(tmp_path).num_layers == SMALL["num_hidden_layers"]
    tensors = load_file(tmp_path / "model.safetensors")
    for name in (f"{prefix}layers.1.mlp.up_proj.weight", f"{head}weight"):
        save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "model.safetensors")
        with refused(CheckpointError, f"weight {name} is missing"):
            load_target(tmp_path)


def test_experts_in_one_tensor(tmp_path):
    """As Qwen3.5-MoE is published."""
    build("qwen3-moe", hidden_size=64, head_dim=32).save_pretrained(tmp_path)
    options = [{"dtype": "float64"}, {"dtype": "float32"}, {"quantize": "int8"}]
    expected = [load_target(tmp_path, **option).score(IDS).logits for option in options]
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in (0, 2):
        base = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{base}{expert}.{name}_proj.weight") for expert in range(4)])
            for name in ("gate", "up", "down")
        )
        tensors |= {f"{base}gate_up_proj": torch.cat([gate, up], 1), f"{base}down_proj": down}
    save_file(tensors, tmp_path / "model.safetensors")
    for option, logits in zip(options, expected, strict=True):
        assert torch.equal(load_target(tmp_path, **option).score(IDS).logits, logits)


def test_an_adapter_of_the_whole_model(tmp_path):
    """Its modules have the names of the whole model, also in patterns; those of the vision tower are left out."""
    build("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    tensors, name = matrices(weights, "model.layers.1.self_attn.q_proj"), "model.layers.1.self_attn.q_proj"
    plain = write_adapter(tmp_path / "plain", tmp_path, tensors, alpha_pattern={name: 7})
    expected = load_target(tmp_path, dtype="float64", lora=plain).score(IDS).logits
    wrap(tmp_path, "llava", "language_model.model.", "language_model.lm_head.")
    whole = name.replace("model.", "model.language_model.", 1)
    named = {key.replace(name, whole): tensor for key, tensor in tensors.items()}
    named |= {f"model.visual.blocks.0.attn.qkv.lora_{part}.weight": torch.zeros(4, 4) for part in "AB"}
    adapter = write_adapter(tmp_path / "adapter", tmp_path, named, alpha_pattern={whole: 7})
    assert torch.equal(load_target(tmp_path, dtype="float64", lora=adapter).score(IDS).logits, expected)
    assert torch.equal(load_target(tmp_path, dtype="float64", lora=plain).score(IDS).logits, expected)


def test_modules_for_drafts(tmp_path):
    mtp_files.write_target(tmp_path, "qwen")
    wrap(tmp_path, "qwen3_5")
    target = load_target(tmp_path)
    assert decode(target, load_drafter("mtp", target, None)()) == decode(target)


def test_a_stored_lm_head_that_differs_from_the_embedding_is_used(tmp_path):
    """Configs of multimodal models claim ties that their files do not have; transformers believes the files too."""
    build("llama").save_pretrained(tmp_path)
    expected = load_target(tmp_path, dtype="float64").score(IDS).logits
    wrap(tmp_path, "llava", tie_word_embeddings=True)
    assert torch.equal(load_target(tmp_path, dtype="float64").score(IDS).logits, expected)


# The config of Gemma 3 4B, which leaves out the defaults of its classes.
GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "torch_dtype": "bfloat16",
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


def read(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**GEMMA, **changes}))
    return read_config(folder)


def test_a_config_that_leaves_out_defaults(tmp_path):
    config = ModelConfig.from_hf(read(tmp_path))
    assert (config.model_type, config.vocab_size, config.num_heads, config.num_kv_heads) == (
        "gemma3_text", 262208, 8, 4,
    )  # fmt: skip
    assert (config.num_layers, config.head_dim, config.rope.factor, config.dtype) == (34, 256, 8.0, "bfloat16")
    assert (config.eos_ids, config.tie_word_embeddings) == ((1, 106), True)


def test_other_models_are_left_to_transformers(tmp_path):
    with refused(UnsupportedError, "`quantization_config` is set"):
        ModelConfig.from_hf(read(tmp_path, quantization_config={"quant_method": "fp8"}))
    for changes in ({"model_type": "paligemma"}, {"text_config": {"model_type": "opt"}}, {"text_config": None}):
        assert read(tmp_path, **changes) == {**GEMMA, **changes}
    assert "paligemma" not in WRAPPERS
