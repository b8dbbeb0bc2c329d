"""The layouts that heads are written in: what each can express, and its ``config.json`` and tensor names.

    draftwing    ours: everything
    eagle        what SafeAILab's own code reads: plain EAGLE-1 and EAGLE-3 with the default taps
    vllm         the same names; taps may be told, the residual may be the normed state, EAGLE-1's fc has no bias
    sglang       the same names; taps counted as outputs, EAGLE-1 with a class of its own and an fc bias
    speculators  vLLM's format: EAGLE-3 as ``layers.0``, with the target named in the config

                      more layers      biases of q, k, v    an embedding of its own, another width than the target's
    eagle             EAGLE-1          EAGLE-1              yes
    vllm, speculators yes              yes, and o's         yes
    sglang            EAGLE-1          EAGLE-1, and o's     no, it takes the target's

As read in vLLM 0.32, SGLang 0.5.23, speculators 0.7 and EAGLE's own code. Every layout keeps the ``draftwing`` part of
the config, which the others ignore, so that the way back loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import ConfigError, UnsupportedError
from draftwing.formats.head import Head
from draftwing.formats.names import LM_HEAD
from draftwing.formats.settings import FORMAT, TAP_IDS
from draftwing.formats.vocab import to_maps
from draftwing.methods.eagle_net import EagleConfig

Config = dict[str, Any]
Limit = Callable[[Head], str | None]

_SPECULATORS_VERSION = "0.7.0"  # the version whose layout this is


def head_files(head: Head, layout: str, depth: int = 5) -> tuple[Config, dict[str, Tensor]]:
    """The ``config.json`` and the tensors of a head in a layout.

    Args:
        depth: how many tokens a speculators config proposes.

    Raises:
        ConfigError: no such layout.
        UnsupportedError: the layout cannot express this head; the message names what.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown head layout {layout!r}: choose one of {', '.join(LAYOUTS)}")
    if depth < 1:
        raise ConfigError(f"a head must propose at least 1 token, found depth {depth}: give 1 or more")
    chosen = LAYOUTS[layout]
    for limit in chosen.limits:
        reason = limit(head)
        if reason is not None:
            raise UnsupportedError(
                f"the {layout} layout cannot express {reason}: write it in another layout (`draftwing` takes "
                f"everything), or train the head without it"
            )
    maps = {} if head.target_ids is None else to_maps(head.target_ids, head.config.vocab_size)
    tensors = chosen.tensors({**head.tensors, **maps, **head.copies}, head)
    return chosen.config(head, depth), tensors


# --- what a layout cannot express ------------------------------------------------------------------------------------


def _inputs(head: Head) -> str | None:
    inputs = head.config.inputs
    return None if inputs == "feature-shifted" else f"draft inputs {inputs!r} (only 'feature-shifted')"


def _residual(head: Head) -> str | None:
    return "norm_before_residual" if head.config.norm_before_residual else None


def _extra_norms(head: Head) -> str | None:
    config = head.config
    found = [name for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(config, name)]
    return f"{found[0]} (EAGLE-3.1 and later)" if found else None


def _two_norms(head: Head) -> str | None:
    # Ours norms each tap first; vLLM and SGLang norm all together first.
    both = head.config.norm_before_fc and head.config.fc_norm
    return "norm_before_fc together with fc_norm (the order of the two differs)" if both else None


def _bias_of_third(head: Head) -> str | None:
    return "an fc.bias in EAGLE-3" if head.config.version == 3 and head.config.fc_bias else None


def _bias(head: Head) -> str | None:
    bias = head.tensors.get("fc.bias")
    return None if bias is None or not bias.any() else "an fc.bias that is not zero"


def _default_taps(head: Head) -> str | None:
    if head.config.version == 1 or head.has_default_taps:
        return None
    return f"taps {head.config.taps} (only the inputs of layers 2, L // 2 and L - 3 of a target that is known)"


def _rising_taps(head: Head) -> str | None:
    config = head.config
    if config.version == 1 or not head.knows_taps:
        return None
    if any(high <= low for low, high in zip(config.taps, config.taps[1:], strict=False)):
        return f"taps {config.taps} (each hidden state is read once, low to high)"
    if config.target is not None and config.target.num_layers in config.taps:
        return f"tap {config.target.num_layers} (the target's last state after its norm; engines give it before)"
    return None


def _default_feature(head: Head) -> str | None:
    if head.config.version == 1 and not head.has_default_taps:
        return f"tap {head.config.taps[0]} in EAGLE-1 (only the target's last hidden state, and a target that is known)"
    return None


def _activation(head: Head) -> str | None:
    return None if head.config.activation == "silu" else f"activation {head.config.activation!r} (only silu)"


def _partial_rotation(head: Head) -> str | None:
    rope = head.config.rope
    if rope.rotary_dim == rope.head_dim:
        return None
    return f"the rotation of {rope.rotary_dim} of {rope.head_dim} numbers in each head"


def _plain_rope(head: Head) -> str | None:
    rope = head.config.rope
    if rope.type == "default" or (rope.type in ("linear", "dynamic") and rope.theta == 10000):
        return None
    return f"RoPE of type {rope.type!r} with base {rope.theta:g}"


def _square_heads(head: Head) -> str | None:
    config = head.config
    if config.head_dim * config.num_heads == config.hidden_size:
        return None
    return f"heads of width {config.head_dim} (only hidden_size / heads, {config.hidden_size // config.num_heads})"


def _one_layer(head: Head) -> str | None:
    # EAGLE's code has one for EAGLE-3; SGLang's further layers drop the residual.
    config = head.config
    return f"EAGLE-3 of {config.num_layers} layers" if config.version == 3 and config.num_layers > 1 else None


def _no_qkv_bias(head: Head) -> str | None:
    return (
        "biases of queries, keys and values in EAGLE-3" if head.config.version == 3 and head.config.qkv_bias else None
    )


def _targets_embedding(head: Head) -> str | None:
    return "an embedding of the head's own (SGLang takes the target's)" if head.config.own_embedding else None


def _first_version(head: Head) -> str | None:
    return "EAGLE-1" if head.config.version == 1 else None


_ENGINES: tuple[Limit, ...] = (_inputs, _bias_of_third, _partial_rotation, _default_feature, _rising_taps)
_SERVERS: tuple[Limit, ...] = (*_ENGINES, _two_norms, _activation)


# --- configs ---------------------------------------------------------------------------------------------------------


def _shape(head: Head) -> Config:
    """What every layout says alike. Only the old spelling of RoPE: all of them read it, and two could disagree."""
    config, rope = head.config, head.config.rope
    scaling: Config | None = None
    if rope.type != "default":
        scaling = {"rope_type": rope.type, "type": rope.type, "factor": rope.factor}
        scaling |= {key: getattr(rope, key) for key in _ROPE_KEYS[rope.type] if getattr(rope, key) is not None}
    found: Config = {
        "model_type": "llama",
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }
    if config.qkv_bias:
        found["qkv_bias"] = True
    if rope.rotary_dim != rope.head_dim:
        found["partial_rotary_factor"] = rope.rotary_dim / rope.head_dim
    return found


_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


def _flags(config: EagleConfig) -> Config:
    return {
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }


def _block(head: Head) -> Config:
    config = head.config
    found: Config = {
        "format": FORMAT,
        "version": config.version,
        "inputs": config.inputs,
        "taps": list(config.taps) if head.knows_taps else None,
        "target": None if config.target is None else asdict(config.target),
        "calibration": asdict(config.calibration),
        "training": dict(head.training),
    }
    return {**found, "own_embedding": True} if config.own_embedding else found


def _published(head: Head, first: str, *, say_taps: bool = True) -> Config:
    config = head.config
    found: Config = {"architectures": [first if config.version == 1 else "LlamaForCausalLMEagle3"], **_shape(head)}
    # EAGLE's code takes a missing `bias` for true, and the servers take a true one for biases in attention as well.
    if not config.fc_bias or config.version == 3:
        found["bias"] = config.fc_bias
    if config.version == 3:
        found |= _flags(config)
        if config.feature_size != config.hidden_size:
            found["target_hidden_size"] = config.feature_size
        if len(config.taps) != 3:
            found["num_aux_hidden_states"] = len(config.taps)
        if say_taps and not head.has_default_taps:
            found[TAP_IDS] = list(config.taps)
    return {**found, "draftwing": _block(head)}


def _draftwing(head: Head, depth: int) -> Config:
    return _published(head, "LlamaForCausalLM")


def _with_engine_bias(found: Config, head: Head) -> Config:
    # The engines' flag for biases in attention; the output has one too, for which there are zeros.
    return {**found, "attention_bias": True} if head.config.qkv_bias else found


def _sglang(head: Head, depth: int) -> Config:
    found = _with_engine_bias(_published(head, "LlamaForCausalLMEagle", say_taps=False), head)
    if head.config.version == 1:
        found.pop("bias", None)  # its fc has one in any case
        if not head.config.fc_bias:
            found["draftwing"]["fc_bias"] = False
    elif not head.has_default_taps:
        found["eagle_config"] = {"use_aux_hidden_state": True, TAP_IDS: [tap - 1 for tap in head.config.taps]}
    return found


def _vllm(head: Head, depth: int) -> Config:
    found = _with_engine_bias(_published(head, "LlamaForCausalLM"), head)
    found["bias"] = False
    if head.config.version == 1 and head.config.fc_bias:
        found["draftwing"]["fc_bias"] = True
    return found


def _speculators(head: Head, depth: int) -> Config:
    config = head.config
    # No `model_type` at the top: vLLM knows the format by its absence. The target's class is not ours to know.
    layer = _with_engine_bias({"architectures": ["LlamaForCausalLM"], **_shape(head)}, head)
    if len(config.taps) != 3:
        layer["num_aux_hidden_states"] = len(config.taps)
    method = {"proposal_type": "greedy", "speculative_tokens": depth, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _SPECULATORS_VERSION,
        **_flags(config),
        "target_hidden_size": config.feature_size,
        TAP_IDS: list(config.taps) if head.knows_taps else None,
        "embed_requires_grad": config.own_embedding,
        "tie_word_embeddings": False,
        "torch_dtype": layer["torch_dtype"],
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": head.verifier, "architectures": []},
        },
        "draftwing": _block(head),
    }


# --- tensors ---------------------------------------------------------------------------------------------------------


def _same(tensors: Mapping[str, Tensor], head: Head) -> dict[str, Tensor]:
    return dict(tensors)


def _vllm_tensors(tensors: Mapping[str, Tensor], head: Head) -> dict[str, Tensor]:
    # In EAGLE-1 vLLM refuses an lm_head, and drops an fc.bias without a word: a zero one goes here.
    dropped = ("fc.bias", LM_HEAD) if head.config.version == 1 else ()
    return _with_output_bias({name: tensor for name, tensor in tensors.items() if name not in dropped}, head)


def _sglang_tensors(tensors: Mapping[str, Tensor], head: Head) -> dict[str, Tensor]:
    found = _with_output_bias(tensors, head)
    if head.config.version == 1 and "fc.bias" not in found:
        found["fc.bias"] = torch.zeros(head.config.hidden_size, dtype=head.dtype)
    return found


def _speculators_tensors(tensors: Mapping[str, Tensor], head: Head) -> dict[str, Tensor]:
    return {
        "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name: tensor
        for name, tensor in _with_output_bias(tensors, head).items()
    }


def _with_output_bias(tensors: Mapping[str, Tensor], head: Head) -> dict[str, Tensor]:
    """Zeros where engines have a bias at attention's output, which would otherwise hold what memory held."""
    found = dict(tensors)
    if head.config.qkv_bias:
        for name in tensors:
            if name.endswith(".self_attn.o_proj.weight"):
                zeros = torch.zeros(head.config.hidden_size, dtype=head.dtype)
                found[name.removesuffix("weight") + "bias"] = zeros
    return found


@dataclass(frozen=True)
class _Layout:
    limits: tuple[Limit, ...]
    config: Callable[[Head, int], Config]
    tensors: Callable[[Mapping[str, Tensor], Head], dict[str, Tensor]]


LAYOUTS: dict[str, _Layout] = {
    "draftwing": _Layout((), _draftwing, _same),
    "eagle": _Layout(
        (*_ENGINES, _residual, _extra_norms, _default_taps, _plain_rope, _square_heads, _one_layer, _no_qkv_bias),
        _draftwing,
        _same,
    ),
    "vllm": _Layout((*_SERVERS, _bias), _vllm, _vllm_tensors),
    "sglang": _Layout((*_SERVERS, _residual, _one_layer, _no_qkv_bias, _targets_embedding), _sglang, _sglang_tensors),
    "speculators": _Layout((_first_version, *_SERVERS), _speculators, _speculators_tensors),
}
