"""Which tensor of a GGUF file is which of a Hugging Face checkpoint.

Three things differ beside the names. Files of the architecture ``llama`` hold the rows of queries and keys in another
order: RoPE's pairs, i and i + dim / 2 of a head, lie side by side. A layer's experts are one tensor. And tied
embeddings have no ``output.weight``, as in a checkpoint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from draftwing.errors import CheckpointError
from draftwing.gguf.container import GgufFile

__all__ = ["ARCHITECTURES", "NOT_WEIGHTS", "Place", "places"]

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3", "qwen3moe", "phi3")

# What the config says, not the weights (``config``).
NOT_WEIGHTS: Final = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_MOST_EXPERTS = 1024  # llama.cpp has 512 at most

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {
    "llama": ("block_sparse_moe.", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3moe": ("mlp.", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}
_IN_LAYER = re.compile(r"blk\.(\d{1,6})\.(\w+)(?:\.(\d{1,6}))?\.(weight|bias)")
_OF_EXPERTS = re.compile(r"ffn_(gate|up|down)(_exps)?")


@dataclass(frozen=True)
class Place:
    """Where a checkpoint's tensor lies: in ``tensor``, of which it may be one expert.

    ``heads``: rows are queries or keys of so many heads whose pairs lie side by side; 0 where they lie as usual.
    """

    tensor: str
    expert: int | None = None
    heads: int = 0


def places(file: GgufFile, architecture: str) -> dict[str, Place]:
    """Every tensor of a file by its name in a checkpoint; what has no such name keeps its own.

    Raises:
        CheckpointError: two tensors are one in a checkpoint, or experts without an end.
        ConfigError: the number of heads is missing, where rows have to be put in order.
    """
    found: dict[str, Place] = {}
    heads = _heads(file, architecture)
    for name, info in file.tensors.items():
        if name in NOT_WEIGHTS:
            continue
        stem, expert, several = _name(name, architecture)
        if several and (len(info.shape) != 3 or info.shape[0] > _MOST_EXPERTS):
            raise CheckpointError(
                f"{file.path}: {name} must hold at most {_MOST_EXPERTS} matrices, one for each expert, found shape "
                f"{list(info.shape)}. Download the file again."
            )
        for index in range(info.shape[0]) if several else (expert,):
            own = stem if index is None else stem.replace("*", str(index))
            if own in found:
                raise CheckpointError(
                    f"{file.path}: tensors {found[own].tensor} and {name} are both {own}. Convert the model again."
                )
            pairs = next((count for part, count in heads.items() if f".{part}." in name), 0)
            found[own] = Place(name, index if several else None, pairs)
    return found


def _heads(file: GgufFile, architecture: str) -> dict[str, int]:
    """By tensor, the heads of what lies in pairs."""
    if architecture != "llama":
        return {}
    queries = file.metadata.integer("llama.attention.head_count", minimum=1)
    return {
        "attn_q": queries,
        "attn_k": file.metadata.integer("llama.attention.head_count_kv", queries, minimum=1),
    }


def _name(name: str, architecture: str) -> tuple[str, int | None, bool]:
    """The checkpoint's name (``*`` for an expert), the expert that it names, and whether it holds all of them."""
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return _OUTER.get(name, name), None, False
    layer, part, number, suffix = match.groups()
    base, (block, parts) = f"model.layers.{int(layer)}.", _EXPERTS.get(architecture, ("", {}))
    experts = _OF_EXPERTS.fullmatch(part)
    if parts and experts and (number is None) == (experts[2] is not None):
        stem = f"{base}{block}experts.*.{parts[experts[1]]}.{suffix}"
        return stem, None if number is None else int(number), number is None
    if number is not None:
        return name, None, False
    if parts and part == "ffn_gate_inp":
        return f"{base}{block}gate.{suffix}", None, False
    if architecture == "phi3" and part == "ffn_up":
        return f"{base}mlp.gate_up_proj.{suffix}", None, False
    return (f"{base}{_LAYER[part]}.{suffix}" if part in _LAYER else name), None, False
