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
    "mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "olmo3": "olmo2",
    "cohere": "command-r", "hunyuan_v1_dense": "hunyuan-dense", "qwen2_moe": "qwen2moe", "lfm2_moe": "lfm2moe",
    "gpt_oss": "gpt-oss", "ministral3": "mistral3", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm": "chatglm",
    "glm4_moe": "glm4moe", "ernie4_5_moe": "ernie4_5-moe", "llama4_text": "llama4", "gemma4_text": "gemma4",
}  # fmt: skip
# RoPE turns adjacent numbers, unlike the checkpoint's.
ADJACENT = ("llama", "smollm3", "granite", "granitemoe", "arcee", "mistral3")
SHIFTED = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next")  # norms hold 1 + w
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
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "moe_layer_interval": "interleave_moe_layer_step",
    "n_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "linear_conv_kernel_dim": "ssm_conv_kernel",
    "linear_key_head_dim": "ssm_state_size",
    "linear_num_key_heads": "ssm_group_count",
    "linear_num_value_heads": "ssm_time_step_rank",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "num_kv_shared_layers": "shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
}


_ROPE = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 5e5, "truncate": False,
}  # fmt: skip
_TIED = {"tie_word_embeddings": True}
# llama.cpp has one width for keys and values.
_HEADS = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_value_heads": 6}
_LATENT = {"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "kv_lora_rank": 32, "moe_intermediate_size": 32}
# Families of ``conftest.FURTHER`` that GGUF has: with what their files can state, and at least one layer of each kind.
FURTHER: dict[str, dict[str, Any]] = {
    "gemma": _TIED,
    "gemma2-capped": {**_TIED, "query_pre_attn_scalar": 32},
    "gemma3": {**_TIED, "query_pre_attn_scalar": 32, "num_hidden_layers": 7, "layer_types": None},
    "smollm3": {"use_sliding_window": False, "sliding_window": None, "num_hidden_layers": 5, "no_rope_layers": None},
    "granite": {},
    "olmo2": {},
    "olmo3": {},
    "glm": {},
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
    "granitemoe": {},
    "ministral3": {},
    "qwen3.5": _HEADS,
    "qwen3.5-moe": {**_HEADS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "qwen3-next": {
        **_HEADS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "mlp_only_layers": []
    },
    "deepseek-v2": {
        **_LATENT, "q_lora_rank": 32,
        "rope_parameters": {**_ROPE, "truncate": True, "mscale": 0.7, "mscale_all_dim": 0.7},
    },
    "deepseek-v3": _LATENT,
    "glm4-moe": {"moe_intermediate_size": 32},
    "ernie4_5-moe": {"moe_intermediate_size": 32, "moe_layer_end_index": -1},
    "llama4": {
        "num_hidden_layers": 5, "interleave_moe_layer_step": 2, "moe_layers": None, "no_rope_layers": None,
        "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "intermediate_size_mlp": 96,
    },
    "gemma4": {**_TIED, "global_head_dim": 64, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 300},
    "gemma4-moe": {**_TIED, "global_head_dim": 64, "moe_intermediate_size": 32},
}  # fmt: skip


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
    names = gguf.get_tensor_name_map(kind_of[architecture], config["num_hidden_layers"] + num_modules(config))
    found: dict[str, Any] = {}
    for name, weight in tensors_of(folder).items():
        for new, part in converted(config, module_name(config, name), weight).items():
            expert = re.search(r"experts\.(\d+)\.", new)
            if not new.startswith("blk."):
                generic = new.replace(expert[0], "experts.") if expert else new
                new = names.get_name(generic, (".weight", ".bias"))
                assert new is not None, name
            if architecture in ADJACENT and re.search(r"attn_[qk]\.", new):
                kind = "num_attention_heads" if "attn_q" in new else "num_key_value_heads"
                part = interleave(part, config[kind])
            if architecture in SHIFTED and new.endswith("norm.weight") and "ssm_norm" not in new:
                part = part + 1
            if re.search(r"gate_inp_shexp|shortconv\.conv|conv1d|exp_probs_b", new):
                part = part.squeeze()
            if expert:
                found.setdefault(new, {})[int(expert[1])] = part
            else:
                found[new] = part
    stacked = {
        name: torch.stack([weight[index] for index in range(len(weight))]) if isinstance(weight, dict) else weight
        for name, weight in found.items()
    }
    return {name: weight.contiguous().numpy() for name, weight in stacked.items()}


# The names of an MTP module's tensors in a file, by those in a checkpoint.
MODULE = {
    "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "shared_head_norm",
    "embed_tokens": "embed_tokens", "shared_head.head": "shared_head_head", "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "shared_head_norm",
}  # fmt: skip


GEMMA4_EXPERTS = {
    "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight", "experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip


def num_modules(config: dict[str, Any]) -> int:
    return config.get("num_nextn_predict_layers") or config.get("mtp_num_hidden_layers") or 0


def module_name(config: dict[str, Any], name: str) -> str:
    """The name of an MTP module's tensor in a file, or of one of its layer's as if it were the model's next one."""
    layers = config["num_hidden_layers"]
    match = re.fullmatch(rf"(?:mtp|model\.layers\.{layers})\.([\w.]+)\.weight", name)
    if match and match[1] in MODULE:
        return f"blk.{layers}.nextn.{MODULE[match[1]]}.weight"
    return name.replace("mtp.layers.0.", f"model.layers.{layers}.")


def converted(config: dict[str, Any], name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that the converter makes of one, by their names in a checkpoint or in a file."""
    kind, heads = config["model_type"], config["num_attention_heads"]
    if kind == "gpt_oss" and ".mlp.experts." in name:
        return gpt_oss_experts(name, weight)
    if kind == "lfm2_moe" and ".experts." in name:
        name = name.replace("w1", "gate_proj").replace("w2", "down_proj").replace("w3", "up_proj")
    if kind in ("llama4_text", "granitemoe") and weight.ndim == 3:
        layer = re.search(r"layers\.(\d+)\.", name)[1]
        weight = weight.transpose(1, 2) if kind == "llama4_text" else weight
        is_down = "down_proj" in name or "output_linear" in name
        parts = {"down": weight} if is_down else dict(zip(("gate", "up"), weight.chunk(2, 1), strict=True))
        return {f"blk.{layer}.ffn_{part}_exps.weight": matrices for part, matrices in parts.items()}
    if kind == "gemma4_text" and (match := re.search(r"layers\.(\d+)\.((?:router|experts)\.\w+)$", name)):
        return {f"blk.{match[1]}.{GEMMA4_EXPERTS[match[2]]}": weight}
    if name.endswith("kv_b_proj.weight"):
        sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
        keys, values = weight.view(heads, sum(sizes), -1).split(sizes, 1)
        base = name.removesuffix("kv_b_proj.weight")
        return {f"{base}k_b_proj.weight": keys.transpose(1, 2), f"{base}v_b_proj.weight": values}
    if ".linear_attn." in name:
        return delta(config, name, weight)
    name += ".weight" * name.endswith(("sinks", "layer_scalar")) + ".bias" * name.endswith("expert_bias")
    return {re.sub(r"(e_score_correction)_bias$", r"\1.bias", name): weight}


def delta(config: dict[str, Any], name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of the gated delta rule."""
    heads, values, dim = (config[f"linear_{key}"] for key in ("num_key_heads", "num_value_heads", "value_head_dim"))
    base, group, kind = re.match(r".*linear_attn\.", name)[0], values // heads, name.split("linear_attn.")[1]
    if kind == "in_proj_qkvz.weight":
        parts = weight.view(heads, -1, weight.shape[1]).split([dim, dim, group * dim, group * dim], 1)
        q, k, v, z = (part.flatten(0, 1) for part in parts)
        layer = re.search(r"layers\.(\d+)\.", name)[1]
        return {f"blk.{layer}.attn_qkv.weight": torch.cat([q, k, v]), f"blk.{layer}.attn_gate.weight": z}

    def tiled(rows: torch.Tensor) -> torch.Tensor:
        """The first value head of every key head, then the second ones."""
        return rows.view(heads, group, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    if config["model_type"].startswith("qwen3_5"):
        keys = 2 * heads * dim
        if kind in ("in_proj_qkv.weight", "conv1d.weight"):
            weight = torch.cat([weight[:keys], tiled(weight[keys:])])
        elif kind == "out_proj.weight":
            weight = tiled(weight.T).T
        elif kind != "norm.weight":
            weight = tiled(weight)
    if kind == "A_log":
        return {name: -weight.exp()}
    return {f"{base}dt_proj.bias" if kind == "dt_bias" else name: weight}


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
    writer.add_block_count(config["num_hidden_layers"] + num_modules(config))
    if num_modules(config):
        writer.add_nextn_predict_layers(num_modules(config))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config.get("intermediate_size_mlp", config["intermediate_size"]))
    writer.add_head_count(heads)
    kv_heads = config["num_key_value_heads"]
    if writer.arch == "gemma4":
        kv_heads = add_layered(writer, config)
    if writer.arch == "deepseek2":
        kv_heads = 1
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
    if config["model_type"] == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    dim = config.get("head_dim") or hidden // heads
    if writer.arch == "gemma4":
        writer.add_rope_dimension_count(64)
        writer.add_rope_dimension_count_swa(dim)
    else:
        writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1)))
    if writer.arch == "deepseek2":
        add_latent(writer, config, rope)
    elif writer.arch != "gemma4" and (dim * heads != hidden or config["model_type"].startswith("qwen3")):
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    if "linear_value_head_dim" in config:
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        recurs = [kind == "linear_attention" for kind in config["layer_types"]]
        if writer.arch == "qwen35":
            writer.add_array("qwen35.attention.recurrent_layers", recurs + [False] * num_modules(config))
        else:
            writer.add_full_attention_interval(recurs.index(False) + 1)
        if writer.arch != "qwen3next":
            writer.add_rope_dimension_sections([11, 11, 10, 0])
    counts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if experts := next((config[key] for key in counts if config.get(key)), None):
        writer.add_expert_count(experts)
        used = ("moe_k", "top_k_experts", "num_experts_per_tok")
        writer.add_expert_used_count(next(config[key] for key in used if config.get(key)))
    if config["model_type"] == "ernie4_5_moe":
        writer.add_expert_shared_feed_forward_length(config["moe_num_shared_experts"] * config["moe_intermediate_size"])
    if config["model_type"] == "llama4_text":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config["model_type"] in ("deepseek_v3", "glm4_moe"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def add_latent(writer: gguf.GGUFWriter, config: dict[str, Any], rope: dict[str, Any]) -> None:
    """The widths of latent attention."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def add_layered(writer: gguf.GGUFWriter, config: dict[str, Any]) -> list[int]:
    """The sizes of Gemma 4's layers, and the factors of its rotation; returns the KV heads."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    wide = next(iter(config["per_layer_config"].values()))
    dim, layers = wide["head_dim"], config["num_hidden_layers"]
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    del writer.kv_data[0]["gemma4.feed_forward_length"]
    width, shared = config["intermediate_size"], config["num_kv_shared_layers"]
    writer.add_feed_forward_length([width * (1 + (i >= layers - shared)) for i in range(layers)])
    turning = int(dim * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    factors = [1.0] * turning + [1e30] * (dim // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    return [config["num_key_value_heads"] if slide else wide["num_key_value_heads"] for slide in slides]


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
    is_fused: bool = False,
    **writer_options: Any,
) -> Path:
    """A saved model with a tokenizer as a GGUF file; ``kind_of`` says in which format a tensor goes.

    ``change`` may add to the file and change it, ``keep`` leaves tensors out; ``is_fused`` is the converter's option.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(out, architecture_of(config), **writer_options)
    writer.add_name(folder.name)
    add_sizes(writer, config)
    add_byte_level(writer, folder, config["vocab_size"])
    if change is not None:
        change(writer)
    tensors = gguf_tensors(folder)
    for name, weight in (fused(tensors) if is_fused else tensors).items():
        if not keep(name):
            continue
        is_plain = weight.ndim == 1 or re.search(r"conv1d|shortconv\.conv\.|bias$", name)
        kind = gguf.GGMLQuantizationType["F32" if is_plain else kind_of(name, weight)]
        plain = kind == gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, weight if plain else quantised(weight, kind), raw_dtype=None if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With one matrix for queries, keys and values, and one for the gates of experts."""
    found = {}
    for name, weight in tensors.items():
        for parts, whole in ((("attn_q", "attn_k", "attn_v"), "attn_qkv"), (("gate_exps", "up_exps"), "gate_up_exps")):
            layer, part, suffix = name.partition(parts[0] + ".")
            if part:
                rows = [tensors[f"{layer}{part}.{suffix}"] for part in parts]
                found[f"{layer}{whole}.{suffix}"] = np.concatenate(rows, -1 if suffix == "bias" else -2)
                break
            if any(f"{part}." in name for part in parts):
                break
        else:
            found[name] = weight
    return found


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
