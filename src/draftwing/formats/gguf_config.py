"""A GGUF file's metadata as the ``config.json`` that the model had before it was converted."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.formats.gguf import ARCHITECTURES, GgufFile, as_written
from draftwing.models.config import ModelConfig

_FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "mixtral": ("mixtral", "MixtralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
}
_DTYPES = {"F16": "float16", "BF16": "bfloat16"}
_ANOTHER = "Use the model's Hugging Face folder instead."


def architecture_of(file: GgufFile) -> str:
    """``general.architecture``, one of ``names.ARCHITECTURES``.

    Raises:
        UnsupportedError: another one, or no model at all.
        ConfigError: the file does not say.
    """
    where, kind = file.metadata.where, file.metadata.text("general.type", "model")
    if kind != "model":
        raise UnsupportedError(
            f"{where}: this file holds no model but one's \"{kind:.40}\". Give the model's own file."
        )
    found = file.metadata.text("general.architecture")
    if found not in ARCHITECTURES:
        raise UnsupportedError(
            f"{where}: GGUF files of the architecture {found!r:.42} are not supported; expected one of "
            f"{', '.join(ARCHITECTURES)}. {_ANOTHER}"
        )
    # Files from before version 2 of the blocks hold others under the same numbers.
    version = file.metadata.integer("general.quantization_version", 2)
    if version != 2:
        raise UnsupportedError(
            f"{where}: blocks of version {version} are not supported, only of version 2. Quantise the model again "
            "with a current llama.cpp."
        )
    return found


def config_of(file: GgufFile) -> dict[str, Any]:
    """The model's ``config.json``.

    Raises:
        ConfigError: metadata is missing, or cannot be meant.
        UnsupportedError: it means something that the lean decoder does not have.
        CheckpointError: the embedding is missing, or does not fit.
    """
    architecture, data = architecture_of(file), file.metadata
    of = f"{architecture}."
    hidden = data.integer(f"{of}embedding_length", minimum=1)
    heads = data.integer(f"{of}attention.head_count", minimum=1)
    if hidden % heads and f"{of}attention.key_length" not in data:
        raise ConfigError(
            f"{data.where}: `{of}embedding_length` {hidden} is no multiple of `{of}attention.head_count` {heads}, and "
            f"there is no `{of}attention.key_length`. Convert the model again."
        )
    head_dim = data.integer(f"{of}attention.key_length", hidden // heads, minimum=1)
    value_dim = data.integer(f"{of}attention.value_length", head_dim, minimum=1)
    if value_dim != head_dim:
        raise UnsupportedError(
            f"{data.where}: keys of {head_dim} and values of {value_dim} numbers; the lean decoder has one width for "
            f"both. {_ANOTHER}"
        )
    family = _family(file, architecture)
    model_type, name = _FAMILIES[family]
    positions = data.integer(f"{of}context_length", minimum=1)
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": _vocab_size(file, hidden),
        "hidden_size": hidden,
        "intermediate_size": data.integer(f"{of}feed_forward_length", minimum=1),
        "num_hidden_layers": data.integer(f"{of}block_count", minimum=1, maximum=10000),
        "num_attention_heads": heads,
        "num_key_value_heads": data.integer(f"{of}attention.head_count_kv", heads, minimum=1),
        "hidden_act": "silu",
        "rms_norm_eps": data.number(f"{of}attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": positions,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "use_cache": True,
    }
    if head_dim * heads != hidden or model_type in ("qwen3", "qwen3_moe"):
        config["head_dim"] = head_dim
    config.update(_biases(file, model_type))
    config.update(_windows(file, family, of))
    config.update(_experts(file, family, of))
    config.update(_rope(file, architecture, head_dim, positions))
    config.update(special_ids(file))
    config["dtype"] = _dtype(file)
    ModelConfig.from_hf(config, data.where)  # says what cannot be meant, in the file's name
    return config


def special_ids(file: GgufFile) -> dict[str, Any]:
    """``bos_token_id``, ``eos_token_id`` (all tokens that end a text) and ``pad_token_id``, where there are such.

    Raises:
        ConfigError: an id that is no number.
    """
    from draftwing.formats.gguf_tokenizer import end_ids

    found: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    for key, name in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if f"tokenizer.ggml.{name}" in file.metadata:
            found[key] = file.metadata.integer(f"tokenizer.ggml.{name}", maximum=2**32 - 1)
            if found[key] == 2**32 - 1:  # how a missing token is written
                found[key] = None
    ends = end_ids(file.metadata)
    found["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
    return found


def _family(file: GgufFile, architecture: str) -> str:
    """Mistral's and Mixtral's files call themselves llama."""
    if architecture != "llama":
        return architecture
    if file.metadata.integer("llama.expert_count", 0):
        return "mixtral"
    return "mistral" if file.metadata.integer("llama.attention.sliding_window", 0) else "llama"


def _vocab_size(file: GgufFile, hidden: int) -> int:
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2 or info.shape[1] != hidden:
        found = "none" if info is None else f"shape {list(info.shape)}"
        raise CheckpointError(
            f"{file.path}: expected the embedding token_embd.weight with rows of {hidden} numbers, found {found}. "
            "Download the file again."
        )
    return info.shape[0]


def _biases(file: GgufFile, model_type: str) -> dict[str, Any]:
    if model_type not in ("llama", "qwen3", "qwen3_moe"):
        return {}
    found = {"attention_bias": "blk.0.attn_q.bias" in file.tensors}
    if model_type == "llama":
        found["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    return found


def _windows(file: GgufFile, family: str, of: str) -> dict[str, Any]:
    if family == "qwen2":
        return {"use_sliding_window": False}
    window = file.metadata.integer(f"{of}attention.sliding_window", 0)
    if family in ("mistral", "mixtral", "phi3"):
        return {"sliding_window": window or None}
    return {}


def _experts(file: GgufFile, family: str, of: str) -> dict[str, Any]:
    if family not in ("mixtral", "qwen3moe"):
        return {}
    count = file.metadata.integer(f"{of}expert_count", minimum=1, maximum=1024)
    found = {"num_experts_per_tok": file.metadata.integer(f"{of}expert_used_count", minimum=1, maximum=count)}
    if family == "mixtral":
        return {**found, "num_local_experts": count}
    width = file.metadata.integer(f"{of}expert_feed_forward_length", minimum=1)
    return {
        **found,
        "num_experts": count,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,  # llama.cpp's only way
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _rope(file: GgufFile, architecture: str, head_dim: int, positions: int) -> dict[str, Any]:
    """``rope_theta``, ``rope_scaling`` and, for phi3, ``partial_rotary_factor``."""
    data, of = file.metadata, f"{architecture}.rope."
    theta = data.number(f"{of}freq_base", 10000.0)
    found: dict[str, Any] = {"rope_theta": theta}
    rotated = data.integer(f"{of}dimension_count", head_dim, minimum=2)
    if rotated != head_dim:
        if architecture != "phi3" or rotated > head_dim:
            raise UnsupportedError(
                f"{data.where}: RoPE turns {rotated} of a head's {head_dim} numbers (`{of}dimension_count`), which "
                f"models of the architecture {architecture} do not. {_ANOTHER}"
            )
        # Half a number more, so that rounding down gives the whole one whatever the division lost.
        found["partial_rotary_factor"] = (
            rotated if head_dim * (rotated / head_dim) == rotated else rotated + 0.5
        ) / head_dim
    if "rope_factors_long.weight" in file.tensors or "rope_factors_short.weight" in file.tensors:
        raise UnsupportedError(
            f"{data.where}: RoPE of the type longrope is not supported by the lean decoder. {_ANOTHER}"
        )
    scaling = _scaling(file, of, positions)
    if "rope_freqs.weight" in file.tensors:
        if scaling:
            raise UnsupportedError(f"{data.where}: rope_freqs.weight beside `{of}scaling` is not supported. {_ANOTHER}")
        scaling = _llama3(file, of, theta, head_dim)
    if scaling:
        found["rope_scaling"] = scaling
    return found


def _scaling(file: GgufFile, of: str, positions: int) -> dict[str, Any]:
    data = file.metadata
    kind = data.text(f"{of}scaling.type", "none")
    factor = data.number(f"{of}scaling.factor", data.number(f"{of}scale_linear", 1.0))
    if kind == "none" and f"{of}scale_linear" in data and factor != 1:
        kind = "linear"  # how files said it at first
    if kind == "none" or (kind == "linear" and factor == 1):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedError(
            f'{data.where}: RoPE of the type "{kind:.40}" is not supported by the lean decoder; expected none, linear '
            f"or yarn. {_ANOTHER}"
        )
    original = data.integer(f"{of}scaling.original_context_length", positions, minimum=1)
    found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        if f"{of}scaling.yarn_{name}" in data:
            found[name] = data.number(f"{of}scaling.yarn_{name}")
    for name in ("attn_factor", "yarn_attn_factor", "yarn_log_multiplier", "yarn_ext_factor"):
        key = f"{of}scaling.{name}"
        neutral = 0.0 if name == "yarn_log_multiplier" else 1.0
        if key in data and data.number(key) != neutral:
            raise UnsupportedError(f"{data.where}: `{key}` {data.number(key)} is not supported. {_ANOTHER}")
    return found


def _llama3(file: GgufFile, of: str, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3.1's RoPE: the file holds by how much each frequency is divided, the config what that follows from."""
    info = file.tensors["rope_freqs.weight"]
    if info.kind != "F32" or info.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{file.path}: rope_freqs.weight must hold {head_dim // 2} numbers in F32, found {list(info.shape)} in "
            f"{info.kind}. Convert the model again."
        )
    divided = np.frombuffer(file.bytes_of(info), "<f4").astype(np.float64)
    if not (np.isfinite(divided) & (divided >= 1)).all():
        raise ConfigError(f"{file.path}: rope_freqs.weight must be at least 1. Download the file again.")
    factor = as_written(float(divided.max()))
    if factor == 1:
        return {}
    original = file.metadata.integer(f"{of}scaling.original_context_length", 8192, minimum=1)
    low, high = 1.0, 4.0
    turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(divided, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise UnsupportedError(
            f"{file.path}: rope_freqs.weight is not Llama 3's (factor {factor}, {original} positions, bands from "
            f"{low} to {high}), and no other is supported. {_ANOTHER}"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _dtype(file: GgufFile) -> str:
    """The format of most weights; ``float32`` for blocks, whose numbers need all of it."""
    weights: Counter[str] = Counter()
    for info in file.tensors.values():
        weights[_DTYPES.get(info.kind, "float32")] += math.prod(info.shape)
    return weights.most_common(1)[0][0]
