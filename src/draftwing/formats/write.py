"""Write EAGLE heads in any layout, convert between layouts, and build the commands of the engines that serve them.

    draftwing    ours: everything
    eagle        read by SafeAILab's own code: plain EAGLE-1 and EAGLE-3 with the default taps
    vllm         the same names; taps may be named, the residual may be the normed state, EAGLE-1's fc has no bias
    sglang       the same names; taps counted as outputs, EAGLE-1 with its own class and an fc bias
    speculators  vLLM's format: EAGLE-3 as ``layers.0``, with the target named in the config
    gguf         llama.cpp's: EAGLE-3 in one file, with the target's tokenizer (``gguf_head``)

                      more layers      biases of q, k, v    its own embedding, another width than the target's
    eagle             EAGLE-1          EAGLE-1              yes
    vllm, speculators yes              yes, and o's         yes
    sglang            EAGLE-1          EAGLE-1, and o's     no, it takes the target's
    gguf              no               no                   yes

As read in vLLM 0.32, SGLang 0.5.23, speculators 0.7 and EAGLE's own code. Every layout keeps the ``draftwing`` part of
the config, which the others ignore, so that the way back loses nothing.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftwing.errors import CheckpointError, ConfigError, DraftwingWarning, UnsupportedError
from draftwing.formats.card import copy_card, copy_stored
from draftwing.formats.gguf import open_file
from draftwing.formats.gguf_head import rope_obstacle, write_gguf
from draftwing.formats.read import (
    WEIGHTS,
    Head,
    checked_training,
    find_version,
    is_head,
    load_head,
    read_tensors,
    weight_files,
)
from draftwing.formats.settings import FORMAT, TAP_IDS, dflash_kind, is_medusa, is_parallel, read_settings
from draftwing.formats.tensors import LM_HEAD, to_maps
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.methods.net import TargetId
from draftwing.models.config import read_config
from draftwing.storage import new_folder, writing
from draftwing.torch_utils import save_pickle

Config = dict[str, Any]

_SPECULATORS_VERSION = "0.7.0"  # the version whose layout this is


def head_files(head: Head, layout: str, depth: int = 5) -> tuple[Config, dict[str, Tensor]]:
    """Return a head's ``config.json`` and tensors in a layout; a speculators config proposes ``depth`` tokens."""
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown head layout {layout!r}: choose one of {', '.join(LAYOUTS)}")
    if depth < 1:
        raise ConfigError(f"a head must propose at least 1 token, found depth {depth}: give 1 or more")
    obstacles = _special_features(head)
    reason = next((obstacles[name] for name in LAYOUTS[layout] if name in obstacles), None)
    if reason is not None:
        raise UnsupportedError(
            f"the {layout} layout cannot express {reason}: write it in another layout (`draftwing` takes everything), "
            f"or train the head without it"
        )
    return _config(head, layout, depth), _tensors(head, layout)


def _special_features(head: Head) -> dict[str, str]:
    """Return the features of a head that not every layout can express, with their descriptions."""
    config, rope, taps, target = head.config, head.config.rope, head.config.taps, head.config.target
    is_eagle1, is_eagle3 = config.version == 1, config.version == 3
    bias = head.tensors.get("fc.bias")
    norms = [name for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(config, name)]
    gguf_rope = rope_obstacle(rope)
    is_plain_rope = rope.type == "default" or (rope.type in ("linear", "dynamic") and rope.theta == 10000)
    has_other_taps, width = not head.has_default_taps, config.head_dim * config.num_heads
    named_taps = taps if is_eagle3 and head.knows_taps else ()
    is_rising = all(low < high for low, high in pairwise(named_taps))
    last = None if target is None else target.num_layers
    cases = (
        ("eagle1", is_eagle1, "EAGLE-1"),
        ("inputs", config.inputs != "feature-shifted", f"draft inputs {config.inputs!r} (only 'feature-shifted')"),
        ("residual", config.norm_before_residual, "norm_before_residual"),
        ("norms", norms, f"{', '.join(norms)} (EAGLE-3.1 and later)"),
        # Our net norms each tap first; vLLM and SGLang norm all together first.
        ("two norms", config.norm_before_fc and config.fc_norm, "norm_before_fc together with fc_norm (order differs)"),
        ("eagle3 bias", is_eagle3 and config.fc_bias, "an fc.bias in EAGLE-3"),
        ("bias", bias is not None and bias.any(), "an fc.bias that is not zero"),
        ("taps", is_eagle3 and has_other_taps, f"taps {taps} (only the default ones of a target that is known)"),
        ("feature", is_eagle1 and has_other_taps, f"tap {taps[0]} in EAGLE-1 (only the last state of a known target)"),
        ("tap order", not is_rising, f"taps {taps} (each hidden state is read once, low to high)"),
        ("last tap", last in named_taps, f"tap {last} (the target's last state; engines read it before its norm)"),
        ("activation", config.activation != "silu", f"activation {config.activation!r} (only silu)"),
        ("rotation", rope.rotary_dim != rope.head_dim, f"rotation of {rope.rotary_dim} of {rope.head_dim} numbers"),
        ("rope", not is_plain_rope, f"RoPE of type {rope.type!r} with base {rope.theta:g}"),
        ("gguf rope", gguf_rope, gguf_rope),
        ("wide heads", width != config.hidden_size, f"heads of width {config.head_dim} (only hidden_size / heads)"),
        ("three taps", len(taps) != 3, f"{len(taps)} taps (llama.cpp takes three)"),
        ("unknown taps", not head.knows_taps, "taps that are not known (name the target, or give them)"),
        ("tap norms", [name for name in norms if name != "norm_before_fc"], "fc_norm or norm_output (EAGLE-3.1)"),
        ("layers", is_eagle3 and config.num_layers > 1, f"EAGLE-3 of {config.num_layers} layers"),
        ("qkv bias", is_eagle3 and config.qkv_bias, "biases of queries, keys and values in EAGLE-3"),
        ("qk norms", config.qk_norm, "norms of queries and keys (Qwen3's layer; use vllm or speculators)"),
        ("eagle1 qk norms", is_eagle1 and config.qk_norm, "norms of queries and keys in EAGLE-1"),
        ("parallel", config.mask_token_id is not None, "P-EAGLE (use vllm or speculators)"),
        ("embedding", config.own_embedding, "an embedding of the head's own (SGLang takes the target's)"),
    )
    return {name: description for name, applies, description in cases if applies}


# --- configs ---------------------------------------------------------------------------------------------------------

_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": (),
    "proportional": ("partial_rotary_factor",),
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


def layer_shape(config: Any, dtype: torch.dtype) -> Config:
    """Return the keys that all layouts share. RoPE in the old spelling only: all read it, and two could disagree."""
    rope = config.rope
    scaling: Config | None = None
    if rope.type != "default":
        scaling = {"rope_type": rope.type, "type": rope.type, "factor": rope.factor}
        scaling |= {key: getattr(rope, key) for key in _ROPE_KEYS[rope.type] if getattr(rope, key) is not None}
    shape: Config = {
        "model_type": "qwen3" if getattr(config, "qk_norm", False) else "llama",
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": rope.max_position_embeddings,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if getattr(config, "qkv_bias", False):
        shape["qkv_bias"] = True
    if rope.rotary_dim != rope.head_dim:
        shape["partial_rotary_factor"] = rope.rotary_dim / rope.head_dim
    return shape


def _flags(config: EagleConfig) -> Config:
    names = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {name: getattr(config, name) for name in names}


def _block(head: Head) -> Config:
    config = head.config
    block: Config = {
        "format": FORMAT,
        "version": config.version,
        "inputs": config.inputs,
        "taps": list(config.taps) if head.knows_taps else None,
        "target": None if config.target is None else asdict(config.target),
        "calibration": asdict(config.calibration),
        "training": dict(head.training),
    }
    if config.own_embedding:
        block["own_embedding"] = True
    return block if config.mask_token_id is None else {**block, "num_levels": config.num_levels}


def _published(head: Head, eagle1_class: str, *, name_taps: bool = True) -> Config:
    config = head.config
    class_name = eagle1_class if config.version == 1 else "LlamaForCausalLMEagle3"
    result: Config = {"architectures": [class_name], **layer_shape(config, head.dtype)}
    # EAGLE's code takes a missing `bias` for true, and the servers take a true one for biases in attention as well.
    if not config.fc_bias or config.version == 3:
        result["bias"] = config.fc_bias
    if config.version == 3:
        result |= _flags(config)
        if config.mask_token_id is not None:
            result |= {"architectures": ["PEagleDraftModel"], "mask_token_id": config.mask_token_id}
        if config.feature_size != config.hidden_size:
            result["target_hidden_size"] = config.feature_size
        if len(config.taps) != 3:
            result["num_aux_hidden_states"] = len(config.taps)
        if name_taps and not head.has_default_taps:
            result[TAP_IDS] = list(config.taps)
    return {**result, "draftwing": _block(head)}


def _speculators(head: Head, depth: int) -> Config:
    config = head.config
    # No `model_type` at the top: vLLM recognises the format by its absence. The target's class is unknown.
    layer = {
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        **layer_shape(config, head.dtype),
        "attention_bias": config.qkv_bias,
    }
    if len(config.taps) != 3:
        layer["num_aux_hidden_states"] = len(config.taps)
    kind, more = "eagle3", {}
    if config.mask_token_id is not None:
        kind, depth, more = "peagle", config.num_levels, {"mask_token_id": config.mask_token_id}
    return {
        "architectures": ["PEagleSpeculator" if more else "Eagle3Speculator"],
        **more,
        **_flags(config),
        "target_hidden_size": config.feature_size,
        TAP_IDS: list(config.taps) if head.knows_taps else None,
        "embed_requires_grad": config.own_embedding,
        "tie_word_embeddings": False,
        "torch_dtype": layer["torch_dtype"],
        "transformer_layer_config": layer,
        **speculators_keys(kind, head.verifier, depth),
        "draftwing": _block(head),
    }


def speculators_keys(kind: str, verifier: str | None, depth: int) -> Config:
    """Return the keys of every speculators config: it proposes ``depth`` tokens for the target ``verifier``."""
    method = {"proposal_type": "greedy", "speculative_tokens": depth, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "speculators_model_type": kind,
        "speculators_version": _SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }


def _config(head: Head, layout: str, depth: int) -> Config:
    if layout == "speculators":
        return _speculators(head, depth)
    is_eagle1, fc_bias, is_sglang = head.config.version == 1, head.config.fc_bias, layout == "sglang"
    config = _published(head, "LlamaForCausalLMEagle" if is_sglang else "LlamaForCausalLM", name_taps=not is_sglang)
    if layout not in ("draftwing", "eagle"):
        config["attention_bias"] = head.config.qkv_bias  # the engines' flag
    if layout == "vllm":
        config["bias"] = False
        if head.config.mask_token_id is not None:
            config |= {"architectures": ["LlamaForCausalLMEagle3"], "pard_token": head.config.mask_token_id}
        if head.config.qk_norm:
            config["architectures"] = ["Eagle3Qwen3ForCausalLM"]
        if is_eagle1 and fc_bias:
            config["draftwing"]["fc_bias"] = True
    elif is_sglang and is_eagle1:
        config.pop("bias", None)  # its fc always has one
        if not fc_bias:
            config["draftwing"]["fc_bias"] = False
    elif is_sglang and not head.has_default_taps:
        config["eagle_config"] = {"use_aux_hidden_state": True, TAP_IDS: [tap - 1 for tap in head.config.taps]}
    return config


def _tensors(head: Head, layout: str) -> dict[str, Tensor]:
    maps = {} if head.target_ids is None else to_maps(head.target_ids, head.config.vocab_size)
    tensors = {**head.tensors, **maps, **head.copies}
    if layout in ("draftwing", "eagle", "gguf"):
        return tensors
    zeros = torch.zeros(head.config.hidden_size, dtype=head.dtype)
    for name in list(tensors) if head.config.qkv_bias and not head.config.qk_norm else ():
        if name.endswith(".self_attn.o_proj.weight"):  # engines would leave this bias of Llama's layer uninitialised
            tensors[name.removesuffix("weight") + "bias"] = zeros.clone()
    if layout == "vllm" and head.config.version == 1:
        # vLLM refuses an lm_head, and silently drops an fc.bias, which is zero here.
        for name in ("fc.bias", LM_HEAD):
            tensors.pop(name, None)
    elif layout == "sglang" and head.config.version == 1:
        tensors.setdefault("fc.bias", zeros)
    elif layout == "speculators":
        tensors = {re.sub(r"^midlayer\.", "layers.0.", name): tensor for name, tensor in tensors.items()}
        if "mask_hidden" in tensors:
            tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
    return tensors


_ALL_ENGINES = ("inputs", "eagle3 bias", "rotation", "feature", "tap order", "last tap")
_SERVERS = (*_ALL_ENGINES, "two norms", "activation")
# The features of ``_special_features`` that each layout cannot express.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "draftwing": (),
    "eagle": (
        "parallel", "qk norms", *_ALL_ENGINES, "residual", "norms", "taps", "rope", "wide heads", "layers", "qkv bias",
    ),
    "vllm": ("eagle1 qk norms", *_SERVERS, "bias"),
    "sglang": ("parallel", "qk norms", *_SERVERS, "residual", "layers", "qkv bias", "embedding"),
    "speculators": ("eagle1", *_SERVERS),
    "gguf": (
        "eagle1", "parallel", "inputs", "eagle3 bias", "three taps", "unknown taps", "last tap", "tap norms", "layers",
        "qkv bias", "qk norms", "activation", "rotation", "gguf rope",
    ),
}  # fmt: skip


# --- folders ---------------------------------------------------------------------------------------------------------


def write_head(folder: Path, net: EagleNet, *, training: Mapping[str, Any] | None = None) -> None:
    """Write a net, not prepacked, in our layout; an older head in the folder is replaced, whole or not at all.

    Of ``training``, which may be any JSON, `draftwing doctor` reads ``chat_template`` (see ``chat_template_hash``) and
    ``coverage``, the draft vocabulary's share of the training tokens.
    """
    target = net.config.target
    ids = None if net.target_ids is None else net.target_ids.to("cpu", torch.int64)
    name = None if target is None else target.name
    head = Head(net.config, net.tensors(), ids, training=checked_training(training), verifier=name)
    save_head(Path(folder), head, "draftwing")


def save_head(
    path: Path, head: Head, layout: str, *, depth: int = 5, target_file: Path | None = None, dtype: str | None = None
) -> None:
    """Write a head in one of the ``LAYOUTS``: a folder, or a file for gguf. See ``head_files`` and ``convert``."""
    config, tensors = head_files(head, layout, depth)
    if layout == "gguf":
        fields = {name: getattr(head.config, name) for name in ("norm_before_residual", "norm_before_fc")}
        fields["target_hidden_size"], own = head.config.feature_size, config["draftwing"]
        write_gguf(path, "eagle3", head.config, fields, tensors, own, target=target_file, dtype=dtype)
    else:
        write_folder(path, config, tensors)


def check_destination(folder: Path) -> None:
    """Raise CheckpointError if writing a head would overwrite something that is not one."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a folder to write into, found a file: choose another path")
    if (folder / "config.json").exists() and not is_head(read_config(folder), folder):
        raise CheckpointError(f"{folder}: holds another model, which a head would overwrite: choose another folder")


def check_source(source: Path, destination: Path) -> None:
    """Raise CheckpointError if a head would be converted into its own folder."""
    if destination.exists() and source.exists() and destination.samefile(source):
        raise CheckpointError(f"{destination}: is the source itself: choose another folder for the converted head")


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    name: str = WEIGHTS,
    copies: Sequence[Path] = (),
    pickled: Mapping[str, Any] | None = None,
) -> None:
    """Write ``config.json``, the weight file ``name`` (a ``.pt`` is pickled) and ``copies``, whole or not at all.

    Other files in ``folder`` stay. ``pickled`` are further objects, by the names of their files.
    """
    folder = Path(folder)
    check_destination(folder)
    others = [other for other in weight_files(folder) if other != name]
    if others:
        raise CheckpointError(
            f"{folder}: has {others[0]}, which some engines would read instead of {name}: choose an empty folder"
        )
    with writing(folder), new_folder(folder) as partial:
        plain = {key: tensor.detach().to("cpu").contiguous() for key, tensor in tensors.items()}
        # The writer refuses tensors that share memory, as a tied copy does.
        seen: set[int] = set()
        for key, tensor in plain.items():
            if tensor.numel() and tensor.untyped_storage().data_ptr() in seen:
                plain[key] = tensor.clone()
            seen.add(tensor.untyped_storage().data_ptr())
        if name.endswith(".pt"):
            save_pickle(plain, partial / name)
        else:
            save_file(plain, partial / name, metadata={"format": "pt"})
        (partial / name).chmod(0o644)  # the writer's own mode lets no other user read it
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for file in copies:
            shutil.copyfile(file, partial / file.name)
        for file_name, value in (pickled or {}).items():
            save_pickle(value, partial / file_name)


# --- conversion ------------------------------------------------------------------------------------------------------

# The engine that serves each layout; ours and EAGLE's have no server.
SERVED_BY = {"vllm": "vllm", "speculators": "vllm", "sglang": "sglang", "gguf": "llama.cpp"}


def convert(
    source: Path,
    destination: Path,
    to: str,
    *,
    target: TargetId | None = None,
    taps: tuple[int, ...] | None = None,
    depth: int = 5,
    target_file: Path | None = None,
    dtype: str | None = None,
) -> None:
    """Write the head in ``source``, of any layout, into ``destination`` in the layout ``to``, with prompts and card.

    Tensors keep their bits, and what a layout cannot express stays in the config's ``draftwing`` part. The target's own
    ``embed_tokens`` (and in EAGLE-1 ``lm_head``) are copied if the source has them and the engine accepts them.

    Args:
        target: the head's target, for a source that does not name it; compared with one that does.
        taps: the hidden states that the head reads, instead of those that the source names.
        depth: number of tokens that a speculators config proposes.
        target_file, dtype: ``target`` and ``dtype`` of ``write_gguf``, for the layout gguf.
    """
    source, destination = Path(source), Path(destination)
    check_source(source, destination)
    head = load_head(source).for_target(target, taps, str(source))
    for text in head.warnings:
        if taps is None or "taps=" not in text:  # the argument replaces a guess
            warnings.warn(DraftwingWarning(text), stacklevel=2)
    save_head(destination, head, to, depth=depth, target_file=target_file, dtype=dtype)
    if to == "gguf":
        return
    copy_stored(source, destination)
    name, config = destination.resolve().name, head.config
    method = "eagle" if config.version == 1 else "eagle3" if config.mask_token_id is None else "peagle"
    copy_card(source, destination, to, command_for(to, head.verifier or "TARGET", name, method, depth))


def serve_command(to: str, target: str, folder: Path, depth: int) -> str:
    """Return the command that serves ``target`` (path or hub id) with a converted head and ``depth`` drafted tokens."""
    folder = Path(folder)
    if to not in SERVED_BY:
        raise ConfigError(f"no engine serves the layout {to!r}: choose one of {', '.join(SERVED_BY)}")
    if depth < 1:
        raise ConfigError(f"depth must be at least 1, found {depth}")
    if to == "gguf":
        with closing(open_file(folder)) as file:
            data, is_dspark = file.metadata, "markov_w1.weight" in file.tensors
            method = "dspark" if is_dspark else data.text("general.architecture")
            if method != "eagle3":  # the block that it was trained for
                anchor = is_dspark and data.flag("dflash.sample_from_anchor", True)
                depth = data.integer("dflash.block_size") - 1 + anchor
        return command_for(to, target, str(folder), method, depth)
    config = read_config(folder)
    if is_medusa(config):
        method, depth = "medusa", min(depth, config.get("num_heads", depth))
    elif (kind := dflash_kind(config)) is not None:
        settings = config["draftwing"]["config"]
        method, depth = kind, settings["block_size"] - 1 + settings["from_anchor"]  # the block that it was trained for
    elif is_parallel(config):
        method = "peagle"
    else:
        version = find_version(read_settings(config, f"{folder}/config.json"), read_tensors(folder), str(folder))
        method = "eagle" if version == 1 else "eagle3"
    return command_for(to, target, str(folder), method, depth)


def command_for(to: str, target: str, folder: str, method: str, depth: int) -> str:
    """Return the command that serves a head by an engine's name of its method; empty if no engine reads the layout."""
    engine = SERVED_BY.get(to)
    if engine == "vllm":  # without a method it guesses one from the folder's name
        options = {"method": method, "model": folder, "num_speculative_tokens": depth}
        if method == "peagle":
            options |= {"method": "eagle3", "parallel_drafting": True}
        config = json.dumps(options)
        return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(config)}"
    if engine == "llama.cpp":
        arguments = {"-m": target, "-md": folder, "--spec-type": f"draft-{method}", "--spec-draft-n-max": str(depth)}
        return "llama-server " + " ".join(f"{key} {shlex.quote(value)}" for key, value in arguments.items())
    if engine is None:
        return ""
    # EAGLE drafts a chain, as in vLLM. The last number counts the target's own token.
    shape = {"--speculative-num-steps": str(depth), "--speculative-eagle-topk": "1"} if "eagle" in method else {}
    arguments = {
        "--model-path": target,
        "--speculative-algorithm": "DFLASH" if method == "domino" else method.upper(),
        "--speculative-draft-model-path": folder,
        **shape,
        "--speculative-num-draft-tokens": str(depth + 1),
    }
    return "python -m sglang.launch_server " + " ".join(
        f"{key} {shlex.quote(value)}" for key, value in arguments.items()
    )
