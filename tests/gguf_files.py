"""Tiny GGUF files, written with the gguf package from saved Hugging Face models, as llama.cpp's converter would."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from conftest import kernel_size

ARCHITECTURES = {  # by model type
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "cohere": "command-r",
    "hunyuan_v1_dense": "hunyuan-dense",
    "qwen2_moe": "qwen2moe",
    "lfm2_moe": "lfm2moe",
    "gpt_oss": "gpt-oss",
}
ADJACENT = ("llama", "smollm3", "granite", "arcee")  # RoPE turns adjacent numbers, unlike the checkpoint's
SHIFTED = ("gemma", "gemma2", "gemma3", "nemotron")  # norms hold 1 + w
SETTINGS = {  # the writer's methods by settings of a checkpoint
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "sliding_window": "sliding_window",
    "rms_norm_eps": "layer_norm_rms_eps",
    "norm_eps": "layer_norm_eps",
    "norm_epsilon": "layer_norm_eps",
    "layer_norm_eps": "layer_norm_eps",
    "use_parallel_residual": "parallel_residual",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_dense_layers": "leading_dense_block_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}


_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 5e5,
    "truncate": False,
}
_TIED = {"tie_word_embeddings": True}
# Families of ``conftest.FURTHER`` that GGUF has: with what their files can state, and at least one layer of each kind.
FURTHER: dict[str, dict[str, Any]] = {
    "gemma": _TIED,
    "gemma2-capped": {**_TIED, "query_pre_attn_scalar": 32},
    "gemma3": {**_TIED, "query_pre_attn_scalar": 32, "num_hidden_layers": 7, "layer_types": None},
    "smollm3": {"use_sliding_window": False, "sliding_window": None, "num_hidden_layers": 5, "no_rope_layers": None},
    "granite": {},
    "olmo2": {},
    "olmo3": {},
    "glm4": {},
    "exaone4": {},
    "cohere": _TIED,
    "cohere2": {**_TIED, "num_hidden_layers": 5, "layer_types": None},
    "seed_oss": {},
    "ernie4_5": {},
    "hunyuan": {},
    "starcoder2": {"sliding_window": None},
    "stablelm": {},
    "nemotron": {},
    "arcee": {},
    "olmoe": {},
    "lfm2": {**_TIED, "block_auto_adjust_ff_dim": False},
    "lfm2-moe": {**_TIED, "moe_intermediate_size": 64, "routed_scaling_factor": 1.0},
    "gpt-oss": {"num_hidden_layers": 4, "layer_types": None, "swiglu_limit": 7.0, "rope_parameters": _ROPE},
    "qwen2-moe": {"mlp_only_layers": [], "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
}


def changes_of(family: str) -> dict[str, Any]:
    """The changes to a family's tiny model that let the CPU kernel run it, in 8 bits too."""
    return {"vocab_size": 300, "intermediate_size": 64, **kernel_size(family), **FURTHER[family]}


def architecture_of(config: dict[str, Any]) -> str:
    return ARCHITECTURES.get(config["model_type"], config["model_type"])


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of queries and keys: the two numbers that RoPE turns together lie side by side."""
    halves = weight.view(heads, 2, weight.shape[0] // heads // 2, -1)
    return torch.stack((halves[:, 0], halves[:, 1]), dim=2).reshape(weight.shape)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's, in float32."""
    return {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}


def gguf_tensors(folder: Path) -> dict[str, np.ndarray]:
    """The same under the names that the gguf package has for them, and as llama.cpp's converter changes them."""
    config = json.loads((folder / "config.json").read_text())
    architecture = architecture_of(config)
    kind_of = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kind_of[architecture], config["num_hidden_layers"])
    found: dict[str, Any] = {}
    for name, weight in tensors_of(folder).items():
        if config["model_type"] == "gpt_oss" and ".mlp.experts." in name:
            found |= gpt_oss_experts(name, weight)
            continue
        if config["model_type"] == "lfm2_moe" and ".experts." in name:
            name = name.replace("w1", "gate_proj").replace("w2", "down_proj").replace("w3", "up_proj")
        expert = re.search(r"experts\.(\d+)\.", name)
        name += ".weight" * name.endswith("sinks") + ".bias" * name.endswith("expert_bias")
        new = names.get_name(name.replace(expert[0], "experts.") if expert else name, (".weight", ".bias"))
        assert new is not None, name
        if architecture in ADJACENT and re.search(r"attn_[qk]\.", new):
            kind = "num_attention_heads" if "attn_q" in new else "num_key_value_heads"
            weight = interleave(weight, config[kind])
        if architecture in SHIFTED and new.endswith("norm.weight"):
            weight = weight + 1
        if "gate_inp_shexp" in new or "shortconv.conv" in new:
            weight = weight.squeeze()
        if expert:
            found.setdefault(new, {})[int(expert[1])] = weight
        else:
            found[new] = weight
    stacked = {
        name: torch.stack([weight[index] for index in range(len(weight))]) if isinstance(weight, dict) else weight
        for name, weight in found.items()
    }
    return {name: weight.numpy() for name, weight in stacked.items()}


def gpt_oss_experts(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a layer's experts: gate and up apart, and each matrix (out, in)."""
    layer, part = re.search(r"layers\.(\d+)\..*\.(\w+)_proj", name).groups()
    suffix = "bias" if name.endswith("_bias") else "weight"
    weight = weight if suffix == "bias" else weight.transpose(1, 2)
    parts = {"down": weight} if part == "down" else {"gate": weight[:, 0::2], "up": weight[:, 1::2]}
    return {f"blk.{layer}.ffn_{kind}_exps.{suffix}": half.contiguous() for kind, half in parts.items()}


def expert_by_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of gpt-oss under the names that files have them by."""
    found = {}
    for name, weight in tensors.items():
        if ".mlp.experts." not in name:
            found[name] = weight
            continue
        for stacked, matrices in gpt_oss_experts(name, weight).items():
            layer, kind, suffix = re.fullmatch(r"blk\.(\d+)\.ffn_(\w+)_exps\.(\w+)", stacked).groups()
            base = f"model.layers.{layer}.mlp.experts"
            found |= {f"{base}.{index}.{kind}_proj.{suffix}": each for index, each in enumerate(matrices)}
    return found


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    kv_heads = config["num_key_value_heads"]
    if writer.arch in ("lfm2", "lfm2moe"):
        kv_heads = [0 if kind == "conv" else kv_heads for kind in config["layer_types"]]
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_head_count_kv(kv_heads)
    for key, method in SETTINGS.items():
        if config.get(key) is not None:
            getattr(writer, f"add_{method}")(config[key])
    if writer.arch in ("olmo2", "exaone4") and config.get("sliding_window"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    rope = config.get("rope_parameters") or {}
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    dim = config.get("head_dim") or hidden // heads
    writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1)))
    if dim * heads != hidden or config["model_type"].startswith("qwen3"):
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])


def add_byte_level(writer: gguf.GGUFWriter, folder: Path, size: int, pre: str = "gpt-2") -> None:
    """The tokenizer of ``conftest.add_tokenizer``."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    kinds = [gguf.TokenType.CONTROL if token in ("<pad>", "<s>", "</s>") else gguf.TokenType.NORMAL for token in tokens]
    unused = [f"[PAD{index}]" for index in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + unused)
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED] * len(unused))
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")


def write(
    folder: Path,
    out: Path,
    kind_of: Callable[[str, np.ndarray], str] = lambda name, weight: "F32",
    *,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    keep: Callable[[str], bool] = lambda name: True,
    **writer_options: Any,
) -> Path:
    """A saved model with a tokenizer as a GGUF file; ``kind_of`` says in which format a tensor goes.

    ``change`` may add to the file and change it, ``keep`` leaves tensors out.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(out, architecture_of(config), **writer_options)
    writer.add_name(folder.name)
    add_sizes(writer, config)
    add_byte_level(writer, folder, config["vocab_size"])
    if change is not None:
        change(writer)
    for name, weight in gguf_tensors(folder).items():
        if not keep(name):
            continue
        is_plain = weight.ndim == 1 or "shortconv.conv." in name or name.endswith("bias")
        kind = gguf.GGMLQuantizationType["F32" if is_plain else kind_of(name, weight)]
        plain = kind == gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, weight if plain else quantised(weight, kind), raw_dtype=None if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


HEADS = {
    "midlayer.": "blk.0.", "layers.": "blk.", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "lm_head": "output", "embed_tokens": "token_embd",
}  # fmt: skip


def write_head_file(head: Path, target: Path, out: Path, architecture: str, **fields: Any) -> Path:
    """An EAGLE-3 or DFlash head's folder as a GGUF file, as llama.cpp's converter writes it; ``fields`` are added."""
    config = json.loads((head / "config.json").read_text())
    writer = gguf.GGUFWriter(out, architecture)
    add_sizes(writer, config)
    add_byte_level(writer, target, config["vocab_size"])
    for name, value in {"vocab_size": config["vocab_size"], **fields}.items():
        key = name if "." in name else f"{architecture}.{name}"
        writer.add_array(key, value) if isinstance(value, list) else writer.add_key_value(
            key, value, gguf.GGUFValueType.BOOL if isinstance(value, bool) else gguf.GGUFValueType.UINT32
        )
    tensors = load_file(head / "model.safetensors")
    tensors.pop("t2d", None)
    for name, weight in tensors.items():
        if name == "d2t":
            writer.add_tensor(name, (weight + torch.arange(len(weight))).numpy())
            continue
        new = {"hidden_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight"}.get(name, name)
        for old, short in HEADS.items():
            new = new.replace(old, short)
        new = new.replace("hidden_norm", "attn_norm_2")
        if architecture == "eagle3" and ("attn_q." in new or "attn_k." in new):
            weight = interleave(weight, config["num_attention_heads" if "attn_q" in new else "num_key_value_heads"])
        writer.add_tensor(new, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def quantised(weight: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """A matrix in a format; where the package cannot round to one, blocks of random levels with sane scales."""
    try:
        return gguf.quants.quantize(weight, kind)
    except NotImplementedError:
        inputs, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        random = np.random.default_rng(len(kind.name) + weight.size)
        shape = (*weight.shape[:-1], weight.shape[-1] // inputs, num_bytes)
        blocks = random.integers(0, 256, shape, dtype=np.uint8)
        scales = random.random(shape[:-1]) * 1e-3
        # Offsets that put the numbers about zero: a model of positive ones says one word for ever.
        middles = {"Q4_K": {0: 1, 2: 7.5}, "Q5_K": {0: 1, 2: 15.5}, "Q6_K": {208: 1}, "Q2_K": {80: 1, 82: 1.5}}
        for at, factor in {**middles, "Q3_K": {108: 1}}.get(kind.name, {0: 1}).items():
            blocks[..., at : at + 2] = (scales * factor).astype(np.float16)[..., None].view(np.uint8)
        return blocks.reshape(*weight.shape[:-1], -1)
