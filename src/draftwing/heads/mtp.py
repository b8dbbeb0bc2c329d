"""MTP modules read from a target's own checkpoint, in the layouts of ``model.mtp``, as a net."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, UnsupportedError
from draftwing.gguf.source import open_weights
from draftwing.model.config import ModelConfig, read_config
from draftwing.model.embedding import Embedding
from draftwing.model.linear import Linear
from draftwing.model.mtp import MtpNames, architecture_of, module_names
from draftwing.model.weights import Weights, check_finite
from draftwing.nets.eagle_config import TargetId
from draftwing.nets.mtp import MtpConfig, MtpNet

__all__ = ["read_modules"]

# The target's own embedding and LM head, which DeepSeek's checkpoints hold once more, and what they are copies of.
_COPIES = {
    "embed_tokens.weight": ("model.embed_tokens.weight",),
    "shared_head.head.weight": ("lm_head.weight", "model.embed_tokens.weight"),
}
_ADVICE = "draft with lookup, or train a head for it (`draftwing train`)"


def read_modules(
    folder: Path,
    embedding: Tensor | Embedding,
    target_head: Linear | None = None,
    target: TargetId | None = None,
    dtype: torch.dtype | None = None,
) -> MtpNet:
    """The modules in a target's folder.

    Args:
        folder: the target's.
        embedding, target_head, target: the same target's.
        dtype: of the net's weights.

    Raises:
        CheckpointError: the checkpoint has no such modules, or they lack tensors, or hold other shapes or NaN.
        ConfigError: a config that cannot be meant.
        UnsupportedError: modules whose decoder layers Draftwing does not have: experts, latent attention, gates.
    """
    folder = Path(folder)
    config, where = read_config(folder), str(folder / "config.json")
    with open_weights(folder) as files:
        names = module_names(config, files.keys(), where)
        if names is None:
            raise CheckpointError(
                f"{folder}: this checkpoint of {architecture_of(config)} has no MTP modules: {_ADVICE}, or give the "
                f"folder of an MTP head"
            )
        like = _shape(config, folder, where)
        window, size = like.sliding_windows[-1], names.num_modules
        shape = MtpConfig.for_target(like, (like.num_layers,), num_modules=size, window=window, target=target)
        wanted = {
            f"chain.{module}.{name}": parts
            for module in range(size)
            for name, parts in _tensors(names, module, shape, is_fused=like.model_type == "phi3").items()
        }
        _check_names(config, names, {part for parts in wanted.values() for part in parts}, files)
        _check_copies(names, files)
        net = MtpNet(shape, embedding, target_head, None, dtype or torch.float32)
        tensors = {name: _read(files, parts, net.dtype) for name, parts in wanted.items()}
    if names.states_first:
        for name in tensors:
            if name.endswith(".join.weight"):
                states, tokens = tensors[name].chunk(2, 1)
                tensors[name] = torch.cat([tokens, states], 1)
    net.load_tensors(tensors, str(folder))
    return net


def _shape(config: Mapping[str, Any], folder: Path, where: str) -> ModelConfig:
    """The target's. Raises UnsupportedError, with what to do, for an architecture that the lean decoder lacks."""
    try:
        return ModelConfig.from_hf(dict(config), where)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{folder}: the MTP modules of {architecture_of(config)} cannot be run: Draftwing has no decoder layer as "
            f"that architecture's are. {_ADVICE[0].upper()}{_ADVICE[1:]}"
        ) from error


def _tensors(names: MtpNames, module: int, shape: MtpConfig, *, is_fused: bool) -> dict[str, list[str]]:
    """A module's parameters, and the names of the checkpoint's tensors that each is made of, from the first row on.

    Args:
        is_fused: queries, keys and values lie in one matrix there, and so do gate and up (Phi-3).
    """
    base, block = names.base_of(module), names.block_of(module)
    attention, mlp = f"{block}self_attn.", f"{block}mlp."
    qkv = ["qkv_proj"] if is_fused else ["q_proj", "k_proj", "v_proj"]
    gate_up = ["gate_up_proj"] if is_fused else ["gate_proj", "up_proj"]
    found = {
        "token_norm.weight": [f"{base}{names.token_norm}.weight"],
        "state_norm.weight": [f"{base}{names.state_norm}.weight"],
        "join.weight": [f"{base}{names.join}.weight"],
        "norm.weight": [f"{base}{names.norm}.weight"],
        "block.input_norm.weight": [f"{block}input_layernorm.weight"],
        "block.post_norm.weight": [f"{block}post_attention_layernorm.weight"],
    }
    if shape.qk_norm:
        found |= {f"block.{each}_norm.weight": [f"{attention}{each}_norm.weight"] for each in "qk"}
    matrices = (
        ("qkv", [f"{attention}{name}" for name in qkv], shape.qkv_bias),
        ("out", [f"{attention}o_proj"], shape.o_bias),
        ("mlp.gate_up", [f"{mlp}{name}" for name in gate_up], shape.mlp_bias),
        ("mlp.down", [f"{mlp}down_proj"], shape.mlp_bias),
    )
    for name, parts, has_bias in matrices:
        for kind in ("weight", "bias") if has_bias else ("weight",):
            found[f"block.{name}.{kind}"] = [f"{part}.{kind}" for part in parts]
    return found


def _check_names(config: Mapping[str, Any], names: MtpNames, known: set[str], files: Weights) -> None:
    """Raise UnsupportedError where a module has other tensors than those of a dense decoder layer."""
    for name in files.unused(known):
        if names.owns(name) and not name.endswith((*_COPIES, "rotary_emb.inv_freq")):
            raise UnsupportedError(
                f"{files.folder}: an MTP module of {architecture_of(config)} has {name!r}, which the dense decoder "
                f"layers that Draftwing runs modules with do not have: {_ADVICE}"
            )


def _check_copies(names: MtpNames, files: Weights) -> None:
    """Raise UnsupportedError where what should be a copy of the target's embedding or LM head is another matrix."""
    for module in range(names.num_modules):
        for name, originals in _COPIES.items():
            copy = names.base_of(module) + name
            original = next((each for each in originals if each in files), None)
            if copy in files and original and not torch.equal(files.get(copy), files.get(original)):
                raise UnsupportedError(
                    f"{files.folder}: {copy} is not the target's {original}, and Draftwing runs MTP modules with the "
                    f"target's own embedding and LM head: {_ADVICE}"
                )


def _read(files: Weights, names: list[str], dtype: torch.dtype) -> Tensor:
    """Tensors on top of each other, all of them finite."""
    parts = []
    for name in names:
        parts.append(files.get(name, dtype))
        check_finite(name, parts[-1])
    return parts[0] if len(parts) == 1 else torch.cat(parts)
