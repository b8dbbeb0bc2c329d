"""Heads on disk: every layout, there and back bit for bit, and what each broken head is told."""

import errno
import itertools
import json
import os
import re
import resource
import shutil
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import SMALL, add_tokenizer, refused
from draftwing.errors import CheckpointError, ConfigError, DraftwingWarning, UnsupportedError
from draftwing.formats import identity, write
from draftwing.formats.identity import chat_template_hash, target_id, target_id_of_folder
from draftwing.formats.read import Head, is_head, load_head, read_head
from draftwing.formats.tensors import read_draft_vocab, to_maps
from draftwing.formats.write import convert, save_head, serve_command, write_head
from draftwing.loading import load_target
from draftwing.methods.calibration import Calibration
from draftwing.methods.eagle_net import EagleConfig, EagleNet, default_taps, tensor_shapes
from draftwing.methods.net import TargetId
from draftwing.methods.registry import method_of_folder
from draftwing.methods.unroll import unroll
from draftwing.models.config import ModelConfig, read_config
from draftwing.models.linear import Linear
from draftwing.text.tokenizer import Tokenizer
from test_unroll import SlowNet

VOCAB, HIDDEN, LAYERS, DRAFT = SMALL["vocab_size"], SMALL["hidden_size"], 8, 20
SHAPE = {**SMALL, "num_hidden_layers": LAYERS, "model_type": "llama", "rope_theta": 500000.0}
TARGET = TargetId("some/target", HIDDEN, LAYERS, VOCAB, "0123456789abcdef")
KEPT = torch.tensor([0, 1, 2, 3, 5, 8, 9, 11, 14, 20, 21, 22, 30, 31, 40, 45, 50, 52, 59, 60])
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LAYOUTS = ("draftwing", "eagle", "vllm", "sglang", "speculators")
NARROW = {"hidden_size": 16, "target_hidden_size": HIDDEN, "own_embedding": True, "fc_norm": True}
QK = "norms of queries and keys"
OWN = "an embedding of the head's own"
# Version and shape of a head, the other layouts that can express it, and the reason of those that cannot.
VARIANTS = {
    "eagle1": (1, {}, "eagle vllm sglang", "EAGLE-1"),
    "eagle1-bias": (1, {"fc_bias": True}, "eagle sglang", {"vllm": "fc.bias that is not", "speculators": "EAGLE-1"}),
    "eagle3": (3, {}, "eagle vllm sglang speculators", ""),
    "eagle3-whole": (3, {"draft_vocab_size": None}, "eagle vllm sglang speculators", ""),
    "eagle3.1": (3, {"fc_norm": True, "norm_output": True}, "vllm sglang speculators", "fc_norm"),
    "eagle3-before-fc": (3, {"norm_before_fc": True}, "vllm sglang speculators", "norm_before_fc"),
    "eagle3-residual": (3, {"norm_before_residual": True}, "vllm speculators", "norm_before_residual"),
    "eagle3-taps": (3, {"taps": (1, 3, 6)}, "vllm sglang speculators", "taps (1, 3, 6)"),
    "eagle3-two-taps": (3, {"taps": (2, 5)}, "vllm sglang speculators", "taps (2, 5)"),
    "eagle3-llama3": (3, {"rope_scaling": LLAMA3}, "vllm sglang speculators", "RoPE of type 'llama3'"),
    "eagle3-wide": (3, {"head_dim": 16}, "vllm sglang speculators", "heads of width 16"),
    "eagle3-token": (3, {"inputs": "token"}, "", "draft inputs 'token'"),
    "eagle3-gelu": (3, {"hidden_act": "gelu"}, "eagle", "activation 'gelu'"),
    "eagle3-partial": (3, {"rotary_dim": 4}, "", "rotation of 4 of 8 numbers"),
    "eagle3-calibrated": (3, {"calibration": Calibration(0.75, 0.125, 1.5)}, "eagle vllm sglang speculators", ""),
    "eagle1-layers": (1, {"num_layers": 3}, "eagle vllm sglang", "EAGLE-1"),
    "eagle1-qkv-bias": (1, {"qkv_bias": True, "num_layers": 2}, "eagle vllm sglang", "EAGLE-1"),
    "eagle1-embedding": (1, {"own_embedding": True}, "eagle vllm", {"sglang": OWN, "speculators": "EAGLE-1"}),
    "peagle": (3, {"num_layers": 2, "mask_token_id": 3, "num_levels": 5}, "vllm speculators", "P-EAGLE (use vllm or"),
    "eagle3-layers": (3, {"num_layers": 3}, "vllm speculators", "EAGLE-3 of 3 layers"),
    "eagle3-qkv-bias": (3, {"qkv_bias": True}, "vllm speculators", "biases of queries, keys and values in EAGLE-3"),
    "eagle3-qk-norm": (3, {"qk_norm": True, "num_layers": 2}, "vllm speculators", QK),
    "eagle3-qwen3-bias": (3, {"qk_norm": True, "qkv_bias": True}, "vllm speculators", QK),
    "peagle-qk-norm": (3, {"qk_norm": True, "mask_token_id": 3}, "vllm speculators", "P-EAGLE (use vllm or"),
    "eagle1-qk-norm": (1, {"qk_norm": True}, "", dict.fromkeys(LAYOUTS, QK) | {"speculators": "EAGLE-1"}),
    "eagle3-embedding": (3, {"own_embedding": True}, "eagle vllm speculators", OWN),
    "eagle3-narrow": (3, NARROW, "vllm speculators", {"eagle": "fc_norm", "sglang": OWN}),
}


def config_of(variant, **more):
    version, changes, *_ = VARIANTS[variant]
    changes = {"draft_vocab_size": DRAFT, **changes, **more}
    of_model = ("rope_scaling", "head_dim", "hidden_act", "hidden_size")
    shape = {**SHAPE, **{key: changes.pop(key) for key in of_model if key in changes}}
    model = ModelConfig.from_hf(shape)
    rotary_dim = changes.pop("rotary_dim", model.head_dim)
    config = EagleConfig.for_target(
        version, model, changes.pop("draft_vocab_size"), rope=replace(model.rope, rotary_dim=rotary_dim), **changes
    )
    return replace(config, target=TARGET)


def net_of(variant="eagle3", dtype=torch.float32, **more):
    """A random net with norms and biases that are not their starting values."""
    torch.manual_seed(7)
    config = config_of(variant, **more)
    ids = KEPT if config.has_draft_vocab else None
    embedding = EMBEDDING[:, : config.hidden_size].to(dtype)
    net = EagleNet(config, embedding, Linear(LM_HEAD), ids, dtype)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return net


def head_of(variant="eagle3", dtype=torch.float32, **more):
    """A random head, without a net around it."""
    torch.manual_seed(7)
    config = config_of(variant, **more)
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in tensor_shapes(config).items()}
    return Head(config, tensors, KEPT if config.has_draft_vocab else None, {}, {"steps": 3}, TARGET.name)


def assert_same_head(one, other):
    """All that a folder holds; there is nothing else that a layout could be written from."""
    blank = {"tensors": {}, "target_ids": None, "copies": {}}
    assert replace(one, **blank) == replace(other, **blank)
    assert_same_ids(one, other)
    assert_same_tensors(one.tensors, other.tensors)
    assert_same_tensors(one.copies, other.copies)


def assert_same_ids(one, other):
    assert (one.target_ids is None) == (other.target_ids is None)
    assert one.target_ids is None or torch.equal(one.target_ids, other.target_ids)


torch.manual_seed(3)
EMBEDDING, LM_HEAD = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)


def assert_same_net(one, other):
    assert one.config == other.config
    assert_same_ids(one, other)
    assert_same_tensors(one.tensors(), other.tensors())


def assert_same_tensors(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def assert_same_folder(one, other):
    assert read_config(one) == read_config(other)
    assert_same_tensors(load_file(one / "model.safetensors"), load_file(other / "model.safetensors"))


def load(folder, dtype=torch.float32, target=TARGET, **options):
    return read_head(folder, EMBEDDING.to(dtype), Linear(LM_HEAD), target, dtype, **options)


def set_config(folder, *drop, **changes):
    file = folder / "config.json"
    found = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in found.items() if key not in drop}))


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.fixture
def head(tmp_path):
    """A whole EAGLE-3 head of ours, to be damaged."""
    write_head(tmp_path / "head", net_of(), training={"steps": 3})
    return tmp_path / "head"


# --- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "dtype"), list(zip(VARIANTS, itertools.cycle([torch.float32, torch.bfloat16]))))
def test_our_own_folder_comes_back_as_it_was(tmp_path, variant, dtype):
    net = net_of(variant, dtype)
    write_head(tmp_path / "head", net, training={"steps": 3, "data": ["a", "b"]})
    assert_same_net(net, load(tmp_path / "head", dtype))
    assert load_head(tmp_path / "head").training == {"steps": 3, "data": ["a", "b"]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layout_there_and_back(tmp_path, variant):
    """Reading a layout gives the head that was written, so converting the folder writes the same files again.

    A layout that cannot express the head names the reason.
    """
    _, _, layouts, reasons = VARIANTS[variant]
    head = head_of(variant, torch.bfloat16 if variant in ("eagle1", "eagle3.1") else torch.float32)
    for layout in LAYOUTS:
        folder = tmp_path / layout
        if layout in ("draftwing", *layouts.split()):
            save_head(folder, head, layout)
            assert_same_head(load_head(folder), head)
            convert(folder, tmp_path / "again", layout)
            assert_same_folder(folder, tmp_path / "again")
            shutil.rmtree(tmp_path / "again")
            continue
        reason = reasons[layout] if isinstance(reasons, dict) else reasons
        with refused(UnsupportedError, f"the {layout} layout cannot express", reason, "write it in another layout"):
            save_head(folder, head, layout)
        assert not folder.exists()


def test_what_engines_cannot_express_of_norms_and_taps(tmp_path):
    for name, changes, reason in (
        ("norms", {"norm_before_fc": True, "fc_norm": True}, "norm_before_fc together with fc_norm"),
        ("order", {"taps": (5, 2, 4)}, "taps (5, 2, 4) (each hidden state is read once"),
        ("twice", {"taps": (2, 2, 4)}, "taps (2, 2, 4)"),
        ("last", {"taps": (2, 4, LAYERS)}, f"tap {LAYERS} (the target's last state"),
        ("bias", {"fc_bias": True}, "an fc.bias in EAGLE-3"),
    ):
        write_head(tmp_path / name, net_of(**changes))
        assert_same_net(net_of(**changes), load(tmp_path / name))
        for layout in ("vllm", "sglang", "speculators"):
            with refused(UnsupportedError, f"the {layout} layout cannot express", reason):
                convert(tmp_path / name, tmp_path / "out", layout)


def test_zero_biases_come_and_go(tmp_path):
    write_head(tmp_path / "plain", net_of("eagle1"))
    convert(tmp_path / "plain", tmp_path / "sglang", "sglang")
    bias = load_file(tmp_path / "sglang" / "model.safetensors")["fc.bias"]
    assert bias.shape == (HIDDEN,)
    assert not bias.any()

    zero = net_of("eagle1-bias")
    zero.fc.bias.data.zero_()
    write_head(tmp_path / "zero", zero)
    convert(tmp_path / "zero", tmp_path / "vllm", "vllm")
    assert "fc.bias" not in load_file(tmp_path / "vllm" / "model.safetensors")
    assert_same_net(zero, load(tmp_path / "vllm"))

    change_weights(tmp_path / "sglang", lambda weights: weights.update({"fc.bias": torch.ones(HIDDEN)}))
    with refused(CheckpointError, "exported with an fc.bias of zeros", "not zero", "original place"):
        load(tmp_path / "sglang")


# --- what is written -------------------------------------------------------------------------------------------------


def test_the_published_layout(head):
    config, weights = read_config(head), load_file(head / "model.safetensors")
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "vocab_size": VOCAB, "draft_vocab_size": DRAFT, "hidden_size": HIDDEN, "max_position_embeddings": 256,
        "rope_theta": 500000.0, "rope_scaling": None, "tie_word_embeddings": False, "attention_bias": False,
        "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
        "torch_dtype": "float32",
    }  # fmt: skip
    assert {key: config.get(key) for key in expected} == expected
    assert "eagle_aux_hidden_state_layer_ids" not in config
    assert config["draftwing"] == {
        "format": 1,
        "version": 3,
        "inputs": "feature-shifted",
        "taps": [2, 4, 5],
        "target": asdict(TARGET),
        "calibration": {"sharpness": 2.7, "miss": 0.0, "scale": 1.0},
        "training": {"steps": 3},
    }
    shapes = {name: tensor.shape for name, tensor in {**raw_third(), **MAPS}.items()}
    assert {name: tensor.shape for name, tensor in weights.items()} == shapes
    assert weights["d2t"].dtype == torch.int64
    assert weights["t2d"].dtype == torch.bool
    assert torch.equal(weights["d2t"] + torch.arange(DRAFT), KEPT)
    assert torch.equal(weights["t2d"].nonzero().flatten(), KEPT)


def test_the_published_layout_of_eagle_1(tmp_path):
    write_head(tmp_path / "plain", net_of("eagle1"))
    write_head(tmp_path / "bias", net_of("eagle1-bias"))
    plain, bias = read_config(tmp_path / "plain"), read_config(tmp_path / "bias")
    assert plain["architectures"] == bias["architectures"] == ["LlamaForCausalLM"]
    assert plain["bias"] is False
    assert "bias" not in bias  # EAGLE's code takes that for true; engines would add biases to attention for a true
    assert not {"draft_vocab_size", "fc_norm", "norm_output"} & plain.keys()
    assert load_file(tmp_path / "plain" / "model.safetensors").keys() == raw_first().keys()


def test_the_layouts_of_engines(tmp_path):
    write_head(tmp_path / "one", net_of("eagle1"))
    write_head(tmp_path / "three", net_of("eagle3-two-taps"))
    for layout in ("vllm", "sglang"):
        convert(tmp_path / "one", tmp_path / f"one-{layout}", layout)
        convert(tmp_path / "three", tmp_path / f"three-{layout}", layout)
    convert(tmp_path / "three", tmp_path / "speculators", "speculators", depth=4)
    vllm, sglang = read_config(tmp_path / "one-vllm"), read_config(tmp_path / "one-sglang")
    assert (vllm["architectures"], vllm["bias"]) == (["LlamaForCausalLM"], False)
    assert sglang["architectures"] == ["LlamaForCausalLMEagle"]
    assert "bias" not in sglang
    vllm, sglang = read_config(tmp_path / "three-vllm"), read_config(tmp_path / "three-sglang")
    assert vllm["eagle_aux_hidden_state_layer_ids"] == [2, 5]
    assert sglang["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 4]}
    assert "eagle_aux_hidden_state_layer_ids" not in sglang
    assert vllm["num_aux_hidden_states"] == sglang["num_aux_hidden_states"] == 2

    save_head(tmp_path / "parallel", head_of("peagle-qk-norm"), "vllm")
    save_head(tmp_path / "qwen3", head_of("eagle3-qwen3-bias"), "speculators")
    config = read_config(tmp_path / "parallel")
    assert (config["architectures"], config["model_type"]) == (["Eagle3Qwen3ForCausalLM"], "qwen3")
    assert config["pard_token"] == config["mask_token_id"] == 3
    assert read_config(tmp_path / "qwen3")["transformer_layer_config"]["model_type"] == "qwen3"
    assert not any("o_proj.bias" in name for name in load_file(tmp_path / "qwen3" / "model.safetensors"))

    config = read_config(tmp_path / "speculators")
    assert "model_type" not in config
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 5]
    assert config["norm_before_residual"] is False
    save_head(tmp_path / "whole", head_of("eagle3-whole"), "draftwing")
    assert not {"d2t", "t2d"} & load_file(tmp_path / "whole" / "model.safetensors").keys()
    assert read_config(tmp_path / "whole")["draft_vocab_size"] == VOCAB
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert config["transformer_layer_config"]["vocab_size"] == VOCAB
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    names = set(load_file(tmp_path / "speculators" / "model.safetensors"))
    assert {"layers.0.hidden_norm.weight", "layers.0.self_attn.q_proj.weight", "d2t", "t2d", "lm_head.weight"} <= names
    assert not any(name.startswith("midlayer.") for name in names)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "mscale": 1.0}
LINEAR, DYNAMIC = ({"rope_type": kind, "factor": 2.0} for kind in ("linear", "dynamic"))


@pytest.mark.parametrize("scaling", [None, LLAMA3, LINEAR, DYNAMIC, {**YARN, "mscale_all_dim": 0.5, "truncate": False}])
def test_every_rope_comes_back(tmp_path, scaling):
    from transformers import LlamaConfig

    net = net_of(rope_scaling=scaling)
    write_head(tmp_path / "head", net)
    assert load(tmp_path / "head").config.rope == net.config.rope
    found = LlamaConfig.from_pretrained(tmp_path / "head").rope_parameters
    wanted = {"rope_type": "default", **(scaling or {}), "rope_theta": 500000.0}
    assert {key: found.get(key) for key in wanted} == wanted


def test_the_commands_that_serve(tmp_path):
    write_head(tmp_path / "one", net_of("eagle1"))
    write_head(tmp_path / "a head", net_of())
    assert serve_command("vllm", "org/model", tmp_path / "a head", 3) == (
        "vllm serve org/model --speculative-config "
        f'\'{{"method": "eagle3", "model": "{tmp_path}/a head", "num_speculative_tokens": 3}}\''
    )
    assert '"method": "eagle",' in serve_command("vllm", "org/model", tmp_path / "one", 3)
    assert serve_command("speculators", "m", tmp_path / "a head", 3) == serve_command(
        "vllm", "m", tmp_path / "a head", 3
    )
    assert serve_command("sglang", "org/model", tmp_path / "a head", 5) == (
        "python -m sglang.launch_server --model-path org/model --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path '{tmp_path}/a head' --speculative-num-steps 5 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 6"
    )
    eagle1 = serve_command("sglang", "m", tmp_path / "one", 9)
    assert "--speculative-algorithm EAGLE " in eagle1
    assert eagle1.endswith("--speculative-num-draft-tokens 10")
    with refused(ConfigError, "no engine serves the layout 'draftwing'", "vllm, speculators, sglang"):
        serve_command("draftwing", "m", tmp_path / "one", 3)
    with refused(ConfigError, "at least 1, found 0"):
        serve_command("vllm", "m", tmp_path / "one", 0)


# --- layouts of others, written by hand ------------------------------------------------------------------------------


def foreign(folder, config, tensors, pickled=False):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def raw_config(**more):
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "vocab_size": VOCAB, "max_position_embeddings": 256, "rope_theta": 500000.0, **more,
    }  # fmt: skip


def raw_layer(base, width):
    return {
        f"{base}.self_attn.q_proj.weight": torch.randn(32, width),
        f"{base}.self_attn.k_proj.weight": torch.randn(16, width),
        f"{base}.self_attn.v_proj.weight": torch.randn(16, width),
        f"{base}.self_attn.o_proj.weight": torch.randn(32, 32),
        f"{base}.mlp.gate_proj.weight": torch.randn(48, 32),
        f"{base}.mlp.up_proj.weight": torch.randn(48, 32),
        f"{base}.mlp.down_proj.weight": torch.randn(32, 48),
        f"{base}.post_attention_layernorm.weight": torch.randn(32),
    }


def raw_first(**more):
    return {"fc.weight": torch.randn(32, 64), **raw_layer("layers.0", 32), **more}


def raw_third(base="midlayer", draft=DRAFT, **more):
    return {
        "fc.weight": torch.randn(32, 96), **raw_layer(base, 64), f"{base}.hidden_norm.weight": torch.randn(32),
        f"{base}.input_layernorm.weight": torch.randn(32), "norm.weight": torch.randn(32),
        "lm_head.weight": torch.randn(draft, 32), **more,
    }  # fmt: skip


MAPS = to_maps(KEPT, VOCAB)


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_eagle_1_as_published(tmp_path, pickled, bias):
    tensors = raw_first(**{"embed_tokens.weight": EMBEDDING.clone(), "lm_head.weight": LM_HEAD.clone()})
    tensors |= {"fc.bias": torch.randn(32)} if bias else {}
    config = raw_config(**({} if bias else {"bias": False}))
    folder = foreign(tmp_path / "head", config, tensors, pickled)
    net = load(folder)
    assert (net.config.version, net.config.taps, net.config.fc_bias) == (1, (LAYERS,), bias)
    assert net.config.rope.theta == 500000.0
    assert net.config.target == TARGET
    assert_same_tensors(
        net.tensors(), {k: v for k, v in tensors.items() if k not in ("embed_tokens.weight", "lm_head.weight")}
    )


def test_eagle_1_of_sglang_and_of_vllm(tmp_path):
    sglang = foreign(
        tmp_path / "s", raw_config(architectures=["LlamaForCausalLMEagle"]), raw_first(**{"fc.bias": torch.zeros(32)})
    )
    vllm = foreign(tmp_path / "v", raw_config(architectures=["EagleLlamaForCausalLM"]), raw_first())
    nested = foreign(
        tmp_path / "n",
        {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": raw_config(), "truncated_vocab_size": VOCAB},
        raw_first(**{"lm_head.weight": LM_HEAD.clone()}),
    )
    assert [load(folder).config.fc_bias for folder in (sglang, vllm, nested)] == [True, False, False]
    assert {load(folder).config.version for folder in (sglang, vllm, nested)} == {1}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"])
def test_eagle_3_as_published(tmp_path, architecture):
    tensors = {**raw_third(), **MAPS}
    config = raw_config(architectures=[architecture], draft_vocab_size=DRAFT)
    net = load(foreign(tmp_path / "head", config, tensors))
    assert (net.config.version, net.config.taps) == (3, (2, 4, 5))
    assert torch.equal(net.target_ids, KEPT)
    assert_same_tensors(net.tensors(), {k: v for k, v in tensors.items() if k not in MAPS})


def test_eagle_3_1_of_specforge_with_maps_of_the_whole_vocabulary(tmp_path):
    norms = {f"fc_norm.{index}.weight": torch.randn(32) for index in range(3)}
    maps = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    config = raw_config(
        architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=VOCAB, fc_norm=True, norm_output=True
    )
    net = load(foreign(tmp_path / "head", config, {**raw_third(draft=VOCAB), **norms, **maps}))
    assert net.config.fc_norm
    assert net.config.norm_output
    assert net.target_ids is None
    assert torch.equal(net.tensors()["fc_norm.1.weight"], norms["fc_norm.1.weight"])


@pytest.mark.parametrize("norm_output", [True, False, None])
def test_norm_output_means_what_serving_engines_mean_by_it(tmp_path, norm_output):
    """The head always reads the normed state; with the flag, the next step does too (vLLM, SGLang, TensorRT-LLM)."""
    norms = {f"fc_norm.{index}.weight": torch.rand(32) + 0.5 for index in range(3)}
    tensors = {**raw_third(draft=VOCAB), **norms}
    flag = {} if norm_output is None else {"norm_output": norm_output}
    config = raw_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=VOCAB, fc_norm=True, **flag)
    net = load(foreign(tmp_path / "head", config, tensors), torch.float64)
    ids, features = torch.tensor([[5, 6, 7, 8, 9]]), torch.randn(1, 5, 96, dtype=torch.float64)
    slow = SlowNet(net, {name: tensor.double() for name, tensor in tensors.items()})
    slow.config = replace(net.config, norm_output=bool(norm_output))
    with torch.no_grad():
        steps = list(unroll(net, ids, features, 3))
    for step, (_, read) in zip(steps, slow.draft(ids[0].tolist(), features[0], 0, 3), strict=True):
        torch.testing.assert_close(step.read[0], read, rtol=1e-9, atol=1e-9)


def test_old_names_of_sglang_and_vllm(tmp_path):
    norms = {f"aux_norm_{each}.weight": torch.randn(32) for each in ("low", "mid", "high")}
    maps = {"draft_id_to_target_id": MAPS["d2t"]}
    config = raw_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=DRAFT, use_aux_norm=True)
    net = load(foreign(tmp_path / "head", config, {**raw_third(base="layers.0"), **norms, **maps}))
    assert torch.equal(net.tensors()["fc_norm.2.weight"], norms["aux_norm_high.weight"])
    assert torch.equal(net.target_ids, KEPT)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "phi3"},
        {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": False},
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [1, 1, 2]}},
    ],
)
def test_configs_copied_from_targets_go_with_llama_tensors(tmp_path, changes):
    """Positions in a text are the same in all sections of mrope, and the tensors are plain Llama's."""
    tensors, config = {**raw_third(), **MAPS}, raw_config(draft_vocab_size=DRAFT)
    plain = foreign(tmp_path / "plain", config, tensors)
    assert_same_net(load(plain), load(foreign(tmp_path / "changed", {**config, **changes}, tensors)))


def test_a_number_of_layers_copied_from_the_target(tmp_path):
    config = raw_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=DRAFT, num_hidden_layers=36)
    folder = foreign(tmp_path / "head", config, {**raw_third(), **MAPS})
    with pytest.warns(DraftwingWarning, match="`num_hidden_layers` 36, a number copied from the target"):
        net = load(folder)
    assert net.config.num_layers == 1


@pytest.mark.parametrize("given", [{}, {"target_layer_ids": [0, 3, 6]}])
def test_eagle_3_with_qwen3s_layer(tmp_path, given):
    """DeepSpec's layout; queries and keys are normed, and its taps count outputs of layers."""
    norms = {f"layers.0.self_attn.{each}_norm.weight": torch.rand(8) + 0.5 for each in "qk"}
    tensors = {**raw_third("layers.0", VOCAB), **norms, "embed_tokens.weight": EMBEDDING.clone()}
    config = raw_config(architectures=["Qwen3Eagle3Model"], model_type="qwen3", layer_types=["full_attention"], **given)
    net = load(foreign(tmp_path / "head", config, tensors), torch.float64)
    assert net.config.taps == ((1, 4, 7) if given else (2, 4, 5))
    ids, features = torch.tensor([[5, 6, 7, 8, 9]]), torch.randn(1, 5, 96, dtype=torch.float64)
    named = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor.double() for name, tensor in tensors.items()}
    slow = SlowNet(net, named)
    with torch.no_grad():
        steps = list(unroll(net, ids, features, 3))
    for step, (_, read) in zip(steps, slow.draft(ids[0].tolist(), features[0], 0, 3), strict=True):
        torch.testing.assert_close(step.read[0], read, rtol=1e-9, atol=1e-9)


def raw_biases(base):
    return {f"{base}.self_attn.{each}_proj.bias": torch.randn(32 if each == "q" else 16) for each in "qkv"}


def raw_next(index):
    """A layer after the first: a plain one, with its norm before attention."""
    return {**raw_layer(f"layers.{index}", 32), f"layers.{index}.input_layernorm.weight": torch.randn(32)}


def test_eagle_1_of_two_layers_with_biases(tmp_path):
    tensors = {**raw_first(), **raw_next(1), **raw_biases("layers.0"), **raw_biases("layers.1")}
    config = raw_config(bias=False, num_hidden_layers=2, qkv_bias=True)
    folder = foreign(tmp_path / "head", config, tensors)
    assert not is_head(config)
    assert is_head(config, folder)
    head = load_head(folder)
    assert (head.config.num_layers, head.config.qkv_bias) == (2, True)
    assert_same_tensors(head.tensors, tensors)
    net = load(folder)
    for index, kind in itertools.product((0, 1), ("weight", "bias")):  # one matrix, queries first
        parts = [tensors[f"layers.{index}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
        assert torch.equal(getattr(net.layers[index].qkv, kind), torch.cat(parts))
    convert(folder, tmp_path / "sglang", "sglang", target=TARGET)
    out = load_file(tmp_path / "sglang" / "model.safetensors")
    assert read_config(tmp_path / "sglang")["attention_bias"] is True
    for index in (0, 1):  # a bias that engines would leave at what memory held
        assert not out[f"layers.{index}.self_attn.o_proj.bias"].any()
        assert torch.equal(
            out[f"layers.{index}.self_attn.v_proj.bias"], tensors[f"layers.{index}.self_attn.v_proj.bias"]
        )


def test_eagle_3_narrower_than_its_target(tmp_path):
    """As EAGLE's own code has them: ``target_hidden_size``, and an embedding of the head's own."""
    tensors = {**raw_third(), **MAPS, "fc.weight": torch.randn(32, 192), "embed_tokens.weight": torch.randn(VOCAB, 32)}
    config = raw_config(draft_vocab_size=DRAFT, target_hidden_size=64)
    head = load_head(foreign(tmp_path / "head", config, tensors))
    assert (head.config.hidden_size, head.config.feature_size, head.config.own_embedding) == (32, 64, True)
    assert_same_tensors(head.tensors, {name: each for name, each in tensors.items() if name not in MAPS})
    wide = replace(TARGET, hidden_size=64)
    assert head.for_target(wide, None, "head").config.taps == (2, 4, 5)
    with refused(CheckpointError, "not for some/target", "hidden_size 64 and 32"):
        head.for_target(TARGET, None, "head")
    with refused(CheckpointError, "an embedding of (61, 64), this one's is (61, 32)"):
        read_head(tmp_path / "head", EMBEDDING, None, wide)


def test_eagle_3_of_vllm_with_two_layers_and_biases(tmp_path):
    tensors = {**raw_third(base="layers.0"), **raw_next(1), **MAPS}
    for base in ("layers.0", "layers.1"):
        tensors |= {**raw_biases(base), f"{base}.self_attn.o_proj.bias": torch.zeros(32)}
    layer = raw_config(num_hidden_layers=2, attention_bias=True)
    folder = foreign(tmp_path / "head", speculators_config(transformer_layer_config=layer), tensors)
    head = load_head(folder)
    assert (head.config.num_layers, head.config.qkv_bias) == (2, True)
    assert torch.equal(head.tensors["midlayer.self_attn.k_proj.bias"], tensors["layers.0.self_attn.k_proj.bias"])
    assert not any(name.endswith("o_proj.bias") for name in head.tensors)
    convert(folder, tmp_path / "out", "speculators", target=TARGET)
    assert_same_tensors(load_file(tmp_path / "out" / "model.safetensors"), tensors)


def speculators_config(**more):
    layer = raw_config(torch_dtype="float32")
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "draft_vocab_size": DRAFT,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
        **more,
    }


def test_peagle_of_others(tmp_path):
    """As speculators and vLLM name it: the mask's token and features, and no normed residual unless it is stated."""
    config = speculators_config(speculators_model_type="peagle", mask_token_id=5, norm_before_residual=None)
    tensors = {**raw_third(), **MAPS, "mask_hidden": torch.randn(1, 1, 96)}
    folder = foreign(tmp_path / "head", config, tensors)
    net = load(folder)
    assert (net.kind, net.config.mask_token_id, net.config.num_levels) == ("peagle", 5, 3)
    assert not net.config.norm_before_residual
    assert torch.equal(net.mask_hidden, tensors["mask_hidden"].flatten())
    assert method_of_folder(folder).name == "peagle"
    command = serve_command("vllm", "m", folder, 2).replace(str(folder), "h")
    assert '"eagle3", "model": "h", "num_speculative_tokens": 2, "parallel_drafting": true' in command
    set_config(folder, mask_token_id=VOCAB)
    with refused(ConfigError, f"mask_token_id must be a token below {VOCAB}", "correct it in config.json"):
        load(folder)
    set_config(folder, "mask_token_id", ptd_token_id=6)
    assert load(folder).config.mask_token_id == 6
    set_config(folder, "ptd_token_id")
    with refused(ConfigError, "lacks `mask_token_id`", "a P-EAGLE head reads"):
        load(folder)


def test_speculators(tmp_path):
    tensors = {**raw_third(base="layers.0"), **MAPS, "embed_tokens.weight": EMBEDDING.clone()}
    tensors["verifier_lm_head.weight"] = torch.randn(DRAFT, 32)
    folder = foreign(tmp_path / "head", speculators_config(), tensors)
    net = load(folder)
    assert net.config.norm_before_residual
    assert net.config.taps == (2, 4, 5)
    assert net.config.rope.theta == 500000.0
    assert torch.equal(net.tensors()["midlayer.hidden_norm.weight"], tensors["layers.0.hidden_norm.weight"])
    assert load_head(folder).verifier == "some/target"

    set_config(folder, "norm_before_residual")
    with pytest.warns(DraftwingWarning, match="norm_before_residual.*true is taken, as vLLM does.*add it"):
        assert load(folder).config.norm_before_residual
    set_config(folder, norm_before_residual=False, eagle_aux_hidden_state_layer_ids=[1, 3, 6])
    assert load(folder).config.taps == (1, 3, 6)


def test_model_optimizer(tmp_path):
    inner = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4], "norm_before_fc": True}
    config = raw_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=DRAFT, eagle_config=inner)
    tensors = raw_third(base="layers.0", d2t=MAPS["d2t"], **{"input_norm.weight": torch.randn(96)})
    folder = foreign(tmp_path / "head", config, tensors)
    with pytest.warns(DraftwingWarning, match=r"taps 1, 3, 4 inside `eagle_config` .* give taps=\(1, 3, 4\)"):
        net = load(folder)
    assert net.config.taps == (2, 4, 5)
    assert net.config.norm_before_fc
    with pytest.warns(DraftwingWarning):
        assert load(folder, taps=(1, 3, 4)).config.taps == (1, 3, 4)
    set_config(folder, eagle_aux_hidden_state_layer_ids=[2, 4, 6])  # vLLM reads the outer ones first
    assert load(folder).config.taps == (2, 4, 6)
    set_config(folder, "eagle_aux_hidden_state_layer_ids")
    convert(folder, tmp_path / "out", "draftwing", taps=(1, 3, 4), target=TARGET)
    assert read_config(tmp_path / "out")["draftwing"]["taps"] == [1, 3, 4]


@pytest.mark.parametrize("layout", ["draftwing", "eagle", "vllm", "sglang"])
@pytest.mark.parametrize("version", [1, 3])
def test_foreign_heads_go_everywhere_without_a_target(tmp_path, version, layout):
    """Without a target the taps stay unknown, and that too survives."""
    extra = {"embed_tokens.weight": EMBEDDING.clone()}
    tensors = raw_first(**extra) if version == 1 else {**raw_third(), **MAPS, **extra}
    config = raw_config(**({"bias": False} if version == 1 else {"draft_vocab_size": DRAFT}))
    source = foreign(tmp_path / "source", config, tensors)
    convert(source, tmp_path / "out", layout)
    convert(tmp_path / "out", tmp_path / "back", "eagle")
    assert_same_tensors(load_file(tmp_path / "back" / "model.safetensors"), tensors)
    one, two = load_head(source), load_head(tmp_path / "back")
    assert one.config == two.config
    assert not two.knows_taps
    assert load(tmp_path / "out").config.taps == ((LAYERS,) if version == 1 else (2, 4, 5))
    with refused(CheckpointError, "does not name the hidden states", "give the target"):
        load(tmp_path / "out", target=None)
    assert load(tmp_path / "out", target=None, taps=(0,) if version == 1 else (0, 1, 2)).config.taps[0] == 0


# --- is it a head? ---------------------------------------------------------------------------------------------------


def test_heads_and_language_models_are_told_apart(tmp_path, folder_of):
    model = folder_of("llama", num_hidden_layers=1)
    assert not is_head(read_config(model), model)
    assert not is_head(read_config(folder_of("qwen3")), folder_of("qwen3"))
    first = foreign(tmp_path / "first", raw_config(), raw_first())
    pickled = foreign(tmp_path / "pickled", raw_config(), raw_first(), pickled=True)
    assert not is_head(read_config(first))
    assert is_head(read_config(first), first)
    assert is_head(read_config(pickled), pickled)
    for config in (
        raw_config(draft_vocab_size=DRAFT),
        raw_config(architectures=["LlamaForCausalLMEagle"]),
        raw_config(eagle_config={"use_aux_hidden_state": True}),
        speculators_config(),
        {"draftwing": {}},
    ):
        assert is_head(config)
    shutil.rmtree(first)
    assert not is_head(raw_config(), first)


@pytest.mark.parametrize(
    "config",
    [
        {"draft_vocab_size": DRAFT},
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 3}},
        {"architectures": ["K3DSparkModel"], "model_type": "k3_dspark"},
        {"architectures": ["PEagleDraftModel"], "model_type": "llama", "num_hidden_layers": 4},
        {"architectures": ["MedusaModel"], "model_type": "medusa"},
        {"model_type": "gemma4_assistant"},
        {"speculators_model_type": "dflash2"},
        {"draftwing": {"format": 1, "kind": "dspark"}},
        {},  # an EAGLE-1 head, which only its tensors tell
    ],
)
def test_a_head_is_no_target(tmp_path, config):
    folder = foreign(tmp_path / "head", raw_config(**config), raw_first())
    for engine in ("auto", "lean", "transformers"):
        with refused(CheckpointError, "is a draft head, not a language model", "as the target", f"--draft {folder}"):
            load_target(folder, engine=engine)


# --- broken heads ----------------------------------------------------------------------------------------------------


HIDDEN_NORM, ONES = "midlayer.hidden_norm.weight", torch.ones(32)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({HIDDEN_NORM: None}, (f"tensor '{HIDDEN_NORM}' is missing (1 of 13", "from one place again")),
        ({"lm_head.weight": None}, ("'lm_head.weight' is missing", "copy the target's lm_head.weight")),
        ({"surprise": ONES}, ("tensor 'surprise' has no place", "remove the tensor if it is not needed")),
        ({"mask_hidden": ONES}, ("'mask_hidden' has no place", "set `mask_token_id`", "P-EAGLE")),
        ({"fc_norm.0.weight": ONES}, ("'fc_norm.0.weight' has no place", "set `fc_norm` to true")),
        ({"norm.weight": ONES[1:]}, ("norm.weight has shape (31,), expected (32,)", "one place")),
        ({"fc.weight": None}, ("without an fc.weight among them", "is this a language model's folder")),
        ({"layers.0.hidden_norm.weight": ONES}, ("'layers.0.hidden_norm.weight'", HIDDEN_NORM, "the same meaning")),
        ({"norm.weight": ONES.char()}, ("must hold numbers of 16 to 64 bits, found torch.int8", "quantised")),
        ({"norm.weight": ONES * float("nan")}, ("norm.weight of", "32 of 32 that are NaN or infinite", "Download")),
    ],
)
def test_missing_unknown_and_misshapen_tensors(head, changes, parts):
    weights = {**load_file(head / "model.safetensors"), **changes}
    save_file({key: value for key, value in weights.items() if value is not None}, head / "model.safetensors")
    with refused(CheckpointError, *parts):
        load(head)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("additional_layers.0.hidden_norm.weight", "SGLang's further layers"),
        ("midlayer.self_attn.kv_a_proj_with_mqa.weight", "multi-head latent attention"),
        ("midlayer.mlp.up_proj.bias", "biases in the MLP"),
        ("midlayer.mlp.up_proj.weight_scale", "quantised"),
        ("embedding_layernorm.weight", "norms before fc's input"),
    ],
)
def test_heads_of_other_kinds(head, name, kind):
    change_weights(head, lambda weights: weights.update({name: torch.zeros(2)}))
    with refused(UnsupportedError, f"has a tensor {name!r}: Draftwing does not run", kind, "serve this one with"):
        load(head)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"quantization_config": {"bits": 4}}, "its weights are quantised"),
        ({"model_type": "gemma4_assistant"}, "of `model_type` 'gemma4_assistant'"),
        ({"mlp_bias": True}, "`mlp_bias` is True: biases in the MLP"),
        ({"model_type": "kimi_k2", "kv_lora_rank": 8}, "`kv_lora_rank` is 8: multi-head latent attention"),
        ({"logit_scale": 0.5}, "`logit_scale` is 0.5: scaled logits"),
        ({"use_sliding_window": True, "sliding_window": 64}, "`use_sliding_window` is true"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "RoPE type 'longrope'"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "`use_aux_hidden_state` is false"),
        ({"hidden_act": "relu"}, "`hidden_act` is 'relu'"),
    ],
)
def test_configs_of_other_kinds(head, changes, found):
    set_config(head, **changes)
    with refused(UnsupportedError, "config.json", found, "with the engine that it was made for"):
        load(head)


WIDE = torch.randn(32, 192)
O_BIAS, K_BIAS = (f"midlayer.self_attn.{each}_proj.bias" for each in "ok")


@pytest.mark.parametrize(
    ("config", "tensors", "parts"),
    [
        ({"num_hidden_layers": 2}, {}, ("says `num_hidden_layers` 2, but the tensors are those of 1", "one place")),
        ({}, raw_next(1), ("says `num_hidden_layers` 1, but the tensors are those of 2", "correct")),
        (
            {"num_hidden_layers": 3},
            {**raw_next(1), **raw_next(2), "layers.1.self_attn.k_proj.weight": None},
            ("'layers.1.self_attn.k_proj.weight' is missing",),
        ),
        ({"qkv_bias": True}, {}, ("`qkv_bias` or `attention_bias` true, but the tensors have no biases", "one")),
        ({"fc_norm": True}, {}, ("'fc_norm.0.weight' is missing", "set `fc_norm` to false")),
        (
            {"attention_bias": False},
            raw_biases("midlayer"),
            ("`qkv_bias` or `attention_bias` false, but the tensors have biases", "one"),
        ),
        ({}, {**raw_biases("midlayer"), K_BIAS: None}, (f"'{K_BIAS}' is missing", "set `qkv_bias` to false")),
        ({"target_hidden_size": 64}, {"fc.weight": WIDE}, ("'embed_tokens.weight' is missing", "needs its own")),
    ],
)
def test_layers_and_biases_that_config_and_tensors_disagree_about(tmp_path, config, tensors, parts):
    tensors = {name: each for name, each in {**raw_third(), **MAPS, **tensors}.items() if each is not None}
    folder = foreign(tmp_path / "head", raw_config(draft_vocab_size=DRAFT, **config), tensors)
    with refused(CheckpointError, *parts):
        load(folder)


def test_biases_that_are_refused_or_not_used(tmp_path):
    tensors, config = {**raw_third(), **MAPS}, raw_config(draft_vocab_size=DRAFT)
    output = foreign(tmp_path / "output", config, {**tensors, **raw_biases("midlayer"), O_BIAS: torch.ones(32)})
    with refused(UnsupportedError, f"{O_BIAS} is not zero", "no bias at its output"):
        load(output)
    unused = foreign(tmp_path / "unused", {**config, "attention_bias": True}, tensors)
    with pytest.warns(DraftwingWarning, match="`attention_bias` true, but there are no biases.*set it to false"):
        load(unused)


def block_of(**changes):
    return {"draftwing": {"format": 1, "version": 3, **changes}}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"hidden_size": None}, ("required key `hidden_size` is missing", "Add it")),
        ({"draft_vocab_size": "x"}, ("`draft_vocab_size` must be an integer of at least 1, found 'x'", "correct")),
        ({"draft_vocab_size": 99}, ("the draft vocabulary must have 1 to 61 tokens, found 99", "correct it in")),
        ({"fc_norm": "yes"}, ("`fc_norm` must be true or false, found 'yes'", "correct it in config.json")),
        ({"eagle_config": [1]}, ("`eagle_config` must be an object", "correct it")),
        (block_of(version=2), ("draftwing: `version` must be 1 or 3, found 2", "correct it")),
        (block_of(inputs="all"), ("`inputs` must be one of token,", "'all'")),
        (block_of(taps=["x"]), ("`taps` must be a list of layer numbers",)),
        (block_of(calibration={"miss": 2}), ("`miss` must be a number from 0 to 1, found 2", "correct it")),
        (block_of(calibration={"sharpness": 0}), ("needs a sharpness", "above 0", "0.0", "remove `calibration`")),
    ],
)
def test_configs_that_cannot_be_meant(head, changes, parts):
    set_config(head, **changes)
    with refused(ConfigError, "config.json", *parts):
        load(head)


def test_a_config_of_another_format_or_version_or_none(head):
    block = read_config(head)["draftwing"]
    set_config(head, draftwing={"format": 2, "version": 3})
    with refused(UnsupportedError, "`format` is 2, this Draftwing reads up to 1", "update Draftwing"):
        load(head)
    set_config(head, draftwing={**block, "version": 1})
    with refused(CheckpointError, "describes an EAGLE-1 head, but the tensors are those of EAGLE-3", "one place"):
        load(head)
    (head / "config.json").unlink()
    with refused(CheckpointError, "expected config.json", "found none"):
        load(head)
    with refused(CheckpointError, "expected a model folder, found none"):
        load(head.parent / "nowhere")


def test_taps_that_cannot_be(head):
    block = read_config(head)["draftwing"]
    set_config(head, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    with refused(CheckpointError, "names the taps twice: (2, 4, 5)", "(1, 2, 3)", "remove the wrong ones"):
        load(head)
    set_config(head, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    assert load(head).config.taps == (2, 4, 5)
    set_config(head, "eagle_aux_hidden_state_layer_ids", draftwing={**block, "taps": [2, 4, 9]})
    with refused(CheckpointError, "tap 9 is no hidden state", "from 0 to 8, the layers of some/target", "correct"):
        load(head)
    set_config(head, draftwing={**block, "taps": [2, 4]})
    with refused(CheckpointError, "fc.weight has shape (32, 96), expected (32, 64)"):
        load(head)
    set_config(head, draftwing={**block, "taps": [2, 4]}, num_aux_hidden_states=3)
    with refused(CheckpointError, "names 2 taps (2, 4), but says that there are 3", "correct"):
        load(head)
    set_config(head, draftwing=block)
    with refused(CheckpointError, "reads 3 of the target's hidden states, but 2 taps are given (1, 2)", "give 3"):
        load(head, taps=(1, 2))


def test_a_target_of_two_layers_has_no_usual_taps(tmp_path):
    with refused(ConfigError, "EAGLE-3's usual taps need a target of 3 layers or more, found 2", "give taps"):
        default_taps(2)
    folder = foreign(tmp_path / "head", raw_config(draft_vocab_size=DRAFT), {**raw_third(), **MAPS})
    flat = replace(TARGET, num_layers=2)
    with refused(CheckpointError, "does not name the hidden states", "3 layers or more", "or the taps"):
        load(folder, target=flat)
    assert load(folder, target=flat, taps=(0, 1, 2)).config.taps == (0, 1, 2)
    assert not load_head(folder).for_target(flat, (0, 1, 2), "head").has_default_taps


def test_the_state_before_the_last_norm_is_none_of_ours(tmp_path):
    config = raw_config(draft_vocab_size=DRAFT, eagle_aux_hidden_state_layer_ids=[2, 4, LAYERS])
    folder = foreign(tmp_path / "head", config, {**raw_third(), **MAPS})
    with refused(UnsupportedError, "last hidden state before the final norm (tap 8)", "with the engine"):
        load(folder)
    assert load(folder, taps=(2, 4, 5)).config.taps == (2, 4, 5)
    write_head(tmp_path / "own", net_of(taps=(2, 4, LAYERS)))  # after that norm, in a head of ours
    assert load(tmp_path / "own").config.taps == (2, 4, LAYERS)


def test_a_bias_that_config_and_tensors_disagree_about(tmp_path):
    missing = foreign(tmp_path / "a", raw_config(bias=True), raw_first())
    with refused(CheckpointError, "says `bias` true, but the tensors have no fc.bias", "correct `bias`"):
        load(missing)
    extra = foreign(tmp_path / "b", raw_config(bias=False), raw_first(**{"fc.bias": torch.ones(32)}))
    with refused(CheckpointError, "says `bias` false, but the tensors have an fc.bias", "correct `bias`"):
        load(extra)


def test_no_rope_theta(head):
    set_config(head, "rope_theta")
    with pytest.warns(DraftwingWarning, match="no `rope_theta`: 10000 is taken.*add `rope_theta`"):
        assert load(head).config.rope.theta == 10000.0
    with pytest.warns(DraftwingWarning, match="no `rope_theta`"):
        convert(head, head.parent / "out", "eagle")
    assert read_config(head.parent / "out")["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("field", "other"), [("hidden_size", 64), ("num_layers", 9), ("vocab_size", 300), ("vocab_hash", "feed")]
)
def test_a_head_for_another_target(head, field, other):
    target = replace(TARGET, name="other/model", **{field: other})
    own = getattr(TARGET, field)
    with refused(
        CheckpointError, "is made for some/target, not for other/model", f"{field} {own} and {other}", "train one for"
    ):
        load(head, target=target)
    with refused(CheckpointError, "is made for some/target, not for other/model"):
        convert(head, head.parent / "out", "vllm", target=target)


def test_a_foreign_head_for_another_target(tmp_path):
    folder = foreign(tmp_path / "head", raw_config(draft_vocab_size=DRAFT), {**raw_third(), **MAPS})
    with refused(CheckpointError, "made for another target, not for big/model", "hidden_size 32 and 64"):
        load(folder, target=TargetId("big/model", 64, LAYERS, VOCAB))
    assert load(folder, target=replace(TARGET, vocab_hash="")).config.target.vocab_hash == ""
    with refused(CheckpointError, "embedding of (61, 32), this one's is (62, 32)", "trained for"):
        read_head(folder, torch.zeros(62, 32), None, None, taps=(1, 2, 3))


@pytest.mark.parametrize("version", [1, 3])
def test_an_embedding_of_its_own(tmp_path, version):
    """What EAGLE's own code loads over the target's, and so what such a head was trained with."""
    config = raw_config(**({"bias": False} if version == 1 else {"draft_vocab_size": DRAFT}))
    tensors = raw_first() if version == 1 else {**raw_third(), **MAPS}
    folder = foreign(tmp_path / "head", config, {**tensors, "embed_tokens.weight": EMBEDDING.to(torch.float16)})
    net = load(folder)  # rounding is no difference
    assert torch.equal(net.embedding.plain(), EMBEDDING)
    assert not net.config.own_embedding
    change_weights(folder, lambda weights: weights["embed_tokens.weight"][7].add_(0.1))
    own = load_file(folder / "model.safetensors")["embed_tokens.weight"].float()
    net = load(folder)
    assert torch.equal(net.embedding.plain(), own)
    assert net.config.own_embedding
    write_head(tmp_path / "again", net)
    assert_same_net(net, load(tmp_path / "again"))
    assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")["embed_tokens.weight"], own)
    with refused(UnsupportedError, "the sglang layout cannot express an embedding of the head's own"):
        convert(tmp_path / "again", tmp_path / "out", "sglang")


def test_an_embedding_that_was_trained(tmp_path):
    """Speculators says so in the config; it may still lie near the target's."""
    tensors = {**raw_third(base="layers.0"), **MAPS, "embed_tokens.weight": EMBEDDING * 1.0001}
    folder = foreign(tmp_path / "head", speculators_config(embed_requires_grad=True), tensors)
    assert torch.equal(load(folder).embedding.plain(), EMBEDDING * 1.0001)


def test_an_lm_head_that_is_not_the_targets(tmp_path):
    tensors = raw_first(**{"lm_head.weight": LM_HEAD + 0.1})
    first = foreign(tmp_path / "first", raw_config(bias=False), tensors)
    with pytest.warns(DraftwingWarning, match=r"its lm_head.weight is not the target's own"):
        load(first)
    packed = Linear(LM_HEAD.clone())
    packed.prepack()
    read_head(first, EMBEDDING, packed, TARGET)  # nothing left to compare with


def test_pickled_weights(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'exploded'}",)

    folder = foreign(tmp_path / "head", raw_config(), {"fc.weight": Bomb()}, pickled=True)
    with refused(CheckpointError, "pytorch_model.bin: expected only tensors", "run code", "safetensors"):
        load(folder)
    assert not (tmp_path / "exploded").exists()
    torch.save({"model": raw_first()}, folder / "pytorch_model.bin")
    with refused(CheckpointError, "expected a dictionary from names to tensors", "state dict"):
        load(folder)
    whole = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(whole[: len(whole) // 2])
    with refused(CheckpointError, "pytorch_model.bin", "damaged", "download it again"):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with refused(CheckpointError, "no weights at all"):
        load(folder)


# --- draft vocabularies ----------------------------------------------------------------------------------------------


def test_a_map_of_ids_is_read_warned_about_and_fixed(head):
    change_weights(head, lambda weights: weights.update(d2t=KEPT.clone()))
    with pytest.warns(DraftwingWarning, match="d2t holds target ids instead of the usual offsets.*writes offsets"):
        assert torch.equal(load(head).target_ids, KEPT)
    with pytest.warns(DraftwingWarning, match="d2t holds target ids"):
        convert(head, head.parent / "out", "draftwing")
    assert torch.equal(load_file(head.parent / "out" / "model.safetensors")["d2t"], MAPS["d2t"])


def test_what_maps_can_mean():
    def read(d2t, t2d=None, vocab=VOCAB, draft=DRAFT):
        return read_draft_vocab(d2t, t2d, vocab, draft, "head")

    for given in (None, MAPS["t2d"], MAPS["t2d"].to(torch.uint8)):
        assert read(MAPS["d2t"], given)[1] == "offsets"
        assert read(KEPT, given)[1] == "ids"
        assert torch.equal(read(MAPS["d2t"].int(), given)[0], KEPT)
    both = torch.tensor([0, 2, 4])
    with refused(CheckpointError, "d2t can be read as offsets and as target ids (0, 2, 4)", "add t2d"):
        read(both, draft=3)
    assert read(both, to_maps(both, VOCAB)["t2d"], draft=3)[1] == "ids"
    assert read(both, to_maps(both + torch.arange(3), VOCAB)["t2d"], draft=3)[1] == "offsets"
    assert read(None, None, draft=VOCAB) == (None, "none")
    assert read(torch.arange(VOCAB), None, draft=VOCAB) == (None, "ids")


@pytest.mark.parametrize(
    ("d2t", "t2d", "draft", "parts"),
    [
        (None, None, DRAFT, ("20 of 61 tokens, but there is no d2t", "original place")),
        (MAPS["d2t"].float(), None, DRAFT, ("d2t must hold integers, found torch.float32", "leave its maps")),
        (MAPS["d2t"][:-1], None, DRAFT, ("d2t has shape (19,), expected (20,) from `draft_vocab_size`", "one place")),
        (MAPS["d2t"], MAPS["t2d"][1:], DRAFT, ("t2d has shape (60,), expected (61,) from `vocab_size`", "one place")),
        (MAPS["d2t"], MAPS["t2d"].roll(1), DRAFT, ("t2d and d2t disagree", "original place again")),
        (MAPS["d2t"].flip(0), None, DRAFT, ("d2t is no map into a vocabulary of 61", "made for another target")),
        (MAPS["d2t"] + 1, None, DRAFT, ("d2t is no map", "found 1, 1, 1 ... 42")),
        (MAPS["d2t"] - 1, None, DRAFT, ("d2t is no map", "original place again")),
        (torch.ones(VOCAB).long(), None, VOCAB, ("whole vocabulary of 61 tokens, but d2t moves", "correct")),
        (None, MAPS["t2d"], VOCAB, ("t2d leaves out 41 of 61 tokens", "correct `draft_vocab_size`")),
    ],
)
def test_maps_that_cannot_be(d2t, t2d, draft, parts):
    with refused(CheckpointError, "head: ", *parts):
        read_draft_vocab(d2t, t2d, VOCAB, draft, "head")


def test_a_draft_id_means_the_token_that_the_map_says(head):
    """What the net's own head says of each draft id is said of the target's token, and nothing of any other."""
    net = load(head)
    read = torch.randn(3, HIDDEN)
    own, wide = net.draft_logits(read), net.logits(read)
    assert own.shape == (3, DRAFT)
    assert wide.shape == (3, VOCAB)
    for draft_id, token in enumerate(KEPT.tolist()):
        assert torch.equal(wide[:, token], own[:, draft_id])
    others = [token for token in range(VOCAB) if token not in KEPT.tolist()]
    assert (wide[:, others] == float("-inf")).all()
    whole = net_of("eagle3-whole")
    assert torch.equal(whole.logits(read), whole.draft_logits(read))


# --- writing ---------------------------------------------------------------------------------------------------------


def test_a_head_replaces_a_head_and_nothing_else(head, folder_of, tmp_path):
    (head / "README.md").write_text("kept")
    write_head(head, net_of("eagle1"))
    assert_same_net(net_of("eagle1"), load(head))
    assert (head / "README.md").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head"]

    model = shutil.copytree(folder_of("llama"), tmp_path / "model")
    before = (model / "model.safetensors").read_bytes()
    with refused(CheckpointError, "holds another model, which a head would overwrite", "choose another folder"):
        write_head(model, net_of())
    with refused(CheckpointError, "holds another model"):
        convert(head, model, "vllm")
    assert (model / "model.safetensors").read_bytes() == before
    with refused(CheckpointError, "is the source itself", "choose another folder"):
        convert(head, tmp_path / "." / "head", "vllm")
    with refused(CheckpointError, "expected a folder to write into, found a file", "choose another path"):
        write_head(head / "config.json", net_of())
    old = foreign(tmp_path / "old", raw_config(bias=False), raw_first(), pickled=True)
    with refused(CheckpointError, "has pytorch_model.bin", "some engines would read instead", "empty folder"):
        write_head(old, net_of())


def test_a_failed_write_leaves_what_was_there(head, monkeypatch, tmp_path):
    before = {path.name: path.read_bytes() for path in head.iterdir()}

    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(write, "save_file", full)
    with refused(CheckpointError, str(head), "cannot be written", "No space left", "the disk is full: make room"):
        write_head(head, net_of("eagle1"))
    assert {path.name: path.read_bytes() for path in head.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head"]
    with refused(CheckpointError, "cannot be written", "part of the path is a file: choose another path"):
        write_head(head / "config.json" / "head", net_of())


@pytest.mark.parametrize("num_files", [0, 1])
def test_a_killed_write_leaves_no_config_with_other_weights(head, monkeypatch, num_files):
    """A kill after ``num_files`` files of the new head are in place."""
    old = {path.name: path.read_bytes() for path in head.iterdir()}
    replace, placed = os.replace, []

    def killed(source, destination):
        if len(placed) == num_files:
            raise SystemExit
        placed.append(destination)
        replace(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(SystemExit):
            write_head(head, net_of("eagle1"))
    assert len(placed) == num_files
    assert old["config.json"] not in [path.read_bytes() for path in head.glob("config.json")]
    write_head(head, net_of("eagle1"))
    assert_same_net(net_of("eagle1"), load(head))


def test_a_disk_that_really_refuses(tmp_path):
    """A limit on the size of files makes the writer of weights itself fail, half way."""
    net = net_of()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with refused(CheckpointError, "cannot be written", "exceed the size limit"):
            write_head(tmp_path / "head", net)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_head_is_saved_as_a_gguf_file_or_not_at_all(tmp_path):
    with refused(CheckpointError, "one file: choose a name that ends in .gguf"):
        save_head(tmp_path / "head", head_of("eagle3"), "gguf")
    with refused(ConfigError, "holds the tokenizer of its target", "--target"):
        save_head(tmp_path / "head.gguf", head_of("eagle3"), "gguf")
    assert list(tmp_path.iterdir()) == []


def test_training_notes_are_json(tmp_path):
    write_head(tmp_path / "head", net_of(), training={"sizes": (1, 2)})
    assert load_head(tmp_path / "head").training == {"sizes": [1, 2]}
    for notes in ({"loss": float("nan")}, {"path": tmp_path}):
        with refused(ConfigError, "training must be JSON", "give plain numbers"):
            write_head(tmp_path / "head", net_of(), training=notes)


def test_unknown_layouts(head):
    with refused(ConfigError, "unknown head layout 'onnx'", "draftwing, eagle, vllm, sglang, speculators, gguf"):
        convert(head, head.parent / "out", "onnx")
    with refused(ConfigError, "at least 1 token, found depth 0"):
        convert(head, head.parent / "out", "speculators", depth=0)


# --- identity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
def test_the_identity_of_a_head(head, tmp_path, monkeypatch, whole):
    if not whole:
        monkeypatch.setattr(identity, "_WHOLE", 100)
        monkeypatch.setattr(identity, "_SAMPLES", 8)
        monkeypatch.setattr(identity, "_BLOCK", 512)
    own = identity.head_id(head)
    assert re.fullmatch("[0-9a-f]{16}", own)
    assert identity.head_id(shutil.copytree(head, tmp_path / "elsewhere")) == own
    other = tmp_path / "run" / "head"  # every training writes into a folder of this name
    with torch.random.fork_rng():
        net = net_of()
        torch.manual_seed(8)
        for parameter in net.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=1e-4)
    write_head(other, net, training={"steps": 3})
    assert (other / "config.json").read_bytes() == (head / "config.json").read_bytes()
    assert (other / "model.safetensors").stat().st_size == (head / "model.safetensors").stat().st_size
    assert identity.head_id(other) != own
    data = bytearray((head / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (head / "model.safetensors").write_bytes(data)
    assert identity.head_id(head) != own
    shutil.copy(tmp_path / "elsewhere" / "model.safetensors", head)
    assert identity.head_id(head) == own
    set_config(head, norm_output=True)
    assert identity.head_id(head) != own
    with refused(CheckpointError, "the head cannot be read", "give a head's folder"):
        identity.head_id(tmp_path / "nowhere")
    with refused(CheckpointError, "expected a head with its weights, found none"):
        identity.head_id(tmp_path)


def test_the_identity_of_a_target(folder_of, tmp_path):
    folder = add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=300), tmp_path / "model"))
    found = target_id_of_folder(folder)
    assert found == target_id(load_target(folder), Tokenizer(folder), "model")
    assert (found.name, found.hidden_size, found.num_layers, found.vocab_size) == ("model", 32, 3, 300)
    assert re.fullmatch("[0-9a-f]{16}", found.vocab_hash)
    gpt = target_id_of_folder(folder_of("gpt2"))
    assert (gpt.hidden_size, gpt.num_layers, gpt.vocab_hash) == (32, 3, "")

    other = add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=300), tmp_path / "b"), texts=["xyz uvw " * 9])
    assert Tokenizer(other).vocab_hash != found.vocab_hash
    assert chat_template_hash(folder) == ""
    add_tokenizer(folder, chat_template="{{ messages }}")
    one = chat_template_hash(folder)
    assert re.fullmatch("[0-9a-f]{16}", one)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert chat_template_hash(folder) == one
    (folder / "chat_template.jinja").write_text("{{ messages }}!")
    assert chat_template_hash(folder) != one
    (tmp_path / "b" / "config.json").write_text("{}")
    with refused(ConfigError, "`hidden_size` must be an integer of at least 1, found None"):
        target_id_of_folder(tmp_path / "b")


def test_shapes_are_the_nets_own():
    for variant in VARIANTS:
        net = net_of(variant)
        assert tensor_shapes(net.config) == {name: tuple(t.shape) for name, t in net.tensors().items()}
