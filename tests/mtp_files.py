"""Tiny targets with MTP modules in their checkpoints, in the field's layouts, and a module's forward by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from conftest import SMALL, build

LAYERS = SMALL["num_hidden_layers"]
# Of each layout: where a module's own tensors and its layer's lie, its names for the parts, and what the config counts.
LAYOUTS = {
    "deepseek": ("model.layers.{n}.", "model.layers.{n}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"), "llama"),
    "mimo": (
        "model.mtp_layers.{k}.",
        "model.mtp_layers.{k}.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        "qwen2",
    ),
    "qwen": ("mtp.", "mtp.layers.{k}.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "qwen3"),
}
COUNTS = {"deepseek": "num_nextn_predict_layers", "mimo": "num_nextn_predict_layers", "qwen": "mtp_num_hidden_layers"}
OWN = ("enorm", "hnorm", "join", "norm")


def write_target(folder: Path, layout: str, modules: int = 1, family: str | None = None, **changes) -> list[dict]:
    """Write a target of 3 layers; its modules' layers are transformers' own, those after the third.

    Returns:
        each module's weights, as ``by_hand`` takes them: the join reads the token's half first.
    """
    base, block, names, usual = LAYOUTS[layout]
    model = build(family or usual, num_hidden_layers=LAYERS + modules, **changes)
    model.save_pretrained(folder)
    tensors, hidden = load_file(folder / "model.safetensors"), model.config.hidden_size
    weights: list[dict] = []
    torch.manual_seed(5)
    for k in range(modules):
        own = weights[0] if layout == "qwen" and k else {
            "enorm": 1 + 0.1 * torch.randn(hidden).double(),
            "hnorm": 1 + 0.1 * torch.randn(hidden).double(),
            "join": torch.randn(hidden, 2 * hidden).double() / 4,
            "norm": 1 + 0.1 * torch.randn(hidden).double(),
        }  # fmt: skip
        found = {name: own[name] for name in OWN}
        old, place = f"model.layers.{LAYERS + k}.", {"k": k, "n": LAYERS + k}
        for name in [name for name in tensors if name.startswith(old)]:
            tensor = tensors.pop(name)
            found[name.removeprefix(old)] = tensor
            tensors[block.format(**place) + name.removeprefix(old)] = tensor
        weights.append(found)
        for name, part in zip(OWN, names, strict=True):
            tensor = found[name]
            if name == "join" and layout == "mimo":
                tensor = torch.cat([tensor[:, hidden:], tensor[:, :hidden]], 1)
            tensors[f"{base.format(**place)}{part}.weight"] = tensor.clone()
    if layout == "deepseek":  # its checkpoints hold these twice
        tensors[f"model.layers.{LAYERS}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{LAYERS}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said = {"num_hidden_layers": LAYERS, COUNTS[layout]: modules}
    if layout == "mimo":
        said |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    change_config(folder, **said)
    return weights


def change_config(folder: Path, **said) -> None:
    """Write other values into a config; its list of layers is cut to their number."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **said}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    file.write_text(json.dumps(config))


def change_tensors(folder: Path, **changes) -> None:
    """Put tensors into a checkpoint; None takes one out."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: each for name, each in tensors.items() if each is not None}, folder / "model.safetensors")


def weights_of(module, heads: tuple[int, int, int]) -> dict[str, Tensor]:
    """A module's parameters as ``by_hand`` takes them."""
    query, key = heads[0] * heads[2], heads[1] * heads[2]
    block, found = module.block, {}
    for name, start, size in (("q", 0, query), ("k", query, key), ("v", query + key, key)):
        found[f"self_attn.{name}_proj.weight"] = block.qkv.weight[start : start + size]
        if block.qkv.bias is not None:
            found[f"self_attn.{name}_proj.bias"] = block.qkv.bias[start : start + size]
    inner = block.mlp.gate_up.num_out // 2
    return {
        **found,
        "enorm": module.token_norm.weight,
        "hnorm": module.state_norm.weight,
        "join": module.join.weight,
        "norm": module.norm.weight,
        "input_layernorm.weight": block.input_norm.weight,
        "post_attention_layernorm.weight": block.post_norm.weight,
        "self_attn.o_proj.weight": block.out.weight,
        "mlp.gate_proj.weight": block.mlp.gate_up.weight[:inner],
        "mlp.up_proj.weight": block.mlp.gate_up.weight[inner:],
        "mlp.down_proj.weight": block.mlp.down.weight,
        **({"self_attn.q_norm.weight": block.q_norm.weight} if block.q_norm is not None else {}),
        **({"self_attn.k_norm.weight": block.k_norm.weight} if block.k_norm is not None else {}),
    }


def by_hand(
    w: Mapping[str, Tensor],
    tokens: Tensor,
    states: Tensor,
    heads: tuple[int, int, int],
    *,
    theta: float = 10000.0,
    window: int | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """One module over a text, entry by entry and head by head: embeddings (T, H) and states (T, H) -> (T, H)."""
    num_heads, num_kv_heads, width = heads

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    def times(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def turned(x: Tensor, position: int) -> Tensor:
        half = width // 2
        angles = position * theta ** -(torch.arange(half, dtype=x.dtype) / half)
        low, high = x[:half], x[half:]
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()])

    x = torch.cat([norm(tokens, w["enorm"]), norm(states, w["hnorm"])], -1) @ w["join"].T
    read = norm(x, w["input_layernorm.weight"])
    parts = {name: times(f"self_attn.{name}_proj", read).unflatten(-1, (-1, width)) for name in "qkv"}
    for name in "qk":
        if f"self_attn.{name}_norm.weight" in w:
            parts[name] = norm(parts[name], w[f"self_attn.{name}_norm.weight"])
    rows = []
    for i in range(len(x)):
        mixed = []
        for head in range(num_heads):
            shared = head // (num_heads // num_kv_heads)
            seen = range(0 if window is None else max(0, i - window + 1), i + 1)
            query = turned(parts["q"][i, head], i)
            scores = [query @ turned(parts["k"][j, shared], j) / math.sqrt(width) for j in seen]
            chances = torch.stack(scores).softmax(0)
            mixed.append(sum(p * parts["v"][j, shared] for p, j in zip(chances, seen, strict=True)))
        rows.append(torch.cat(mixed))
    x = x + times("self_attn.o_proj", torch.stack(rows))
    read = norm(x, w["post_attention_layernorm.weight"])
    x = x + times("mlp.down_proj", F.silu(times("mlp.gate_proj", read)) * times("mlp.up_proj", read))
    return norm(x, w["norm"])
