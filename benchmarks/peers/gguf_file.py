"""Write a Llama folder as GGUF, the format of llama.cpp, whose converter is not on PyPI.

Everything in it is from the checkpoint, except the pre-tokenizer: llama.cpp's default, which does not matter here,
since all peers get token ids.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.channel import PeerError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

ARCHITECTURE = "llama"
BLOCK = 32  # numbers that share a scale in Q8_0

# The checkpoint's name: GGUF's, after ``blk.N.`` for the layers.
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def write_gguf(folder: Path, out: Path, precision: str) -> None:
    """Write ``folder`` into the file ``out``: float32, or Q8_0 for every matrix if ``precision`` is ``int8``.

    Raises:
        PeerError: a checkpoint that this does not know how to write.
    """
    import gguf

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    check(config)
    source = Tensors(folder)
    partial = out.with_name(out.name + ".partial")
    writer = gguf.GGUFWriter(partial, ARCHITECTURE)
    add_metadata(writer, config, folder.name, gguf.LlamaFileType.MOSTLY_Q8_0 if precision == "int8" else None)
    add_tokenizer(writer, folder, config)
    names = names_of(config)
    missing = sorted(set(names) - set(source.names))
    unknown = sorted(set(source.names) - set(names) - {"lm_head.weight"})
    if missing or unknown:
        raise PeerError(f"no GGUF of this checkpoint: {f'lacks {missing[0]}' if missing else f'has {unknown[0]}'}")
    kinds = {name: _kind(source.shape(name), precision) for name in names}
    # First all names and sizes, then tensor by tensor, so that a large model is never in memory as a whole.
    for name, ours in names.items():
        shape, quantised = source.shape(name), kinds[name] == gguf.GGMLQuantizationType.Q8_0
        stored = gguf.quant_shape_to_byte_shape(shape, kinds[name]) if quantised else shape
        num_bytes = math.prod(stored) * (1 if quantised else 4)
        dtype = _dtype("uint8" if quantised else "float32")
        writer.add_tensor_info(ours, stored, dtype, num_bytes, raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in names:
        numbers = arranged(name, source.read(name), config)
        if kinds[name] == gguf.GGMLQuantizationType.Q8_0:
            numbers = gguf.quantize(numbers, kinds[name])
        writer.write_tensor_data(numbers)
    writer.close()
    partial.replace(out)


def check(config: dict[str, Any]) -> None:
    """Raise PeerError for a checkpoint that would be written wrongly."""
    wrong = None
    rope = rope_of(config)
    if config.get("model_type") != "llama":
        wrong = f"model_type {config.get('model_type')!r}"
    elif config.get("attention_bias") or config.get("mlp_bias"):
        wrong = "biases"
    elif rope.get("rope_type", rope.get("type", "default")) != "default":
        wrong = f"RoPE of type {rope.get('rope_type', rope.get('type'))!r}"
    if wrong:
        raise PeerError(f"this script writes GGUF of plain Llamas only, not of {wrong}")


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE settings, in either spelling."""
    return {
        "rope_theta": config.get("rope_theta", 10000.0),
        **(config.get("rope_parameters") or config.get("rope_scaling") or {}),
    }


def head_dim_of(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def names_of(config: dict[str, Any]) -> dict[str, str]:
    """Return the GGUF name of every tensor of a checkpoint."""
    found = dict(OUTER)
    if config.get("tie_word_embeddings"):
        del found["lm_head.weight"]  # if it is missing, llama.cpp takes the embedding
    for layer in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{layer}.{theirs}": f"blk.{layer}.{ours}" for theirs, ours in LAYER.items()}
    return found


def arranged(name: str, numbers: Array, config: dict[str, Any]) -> Array:
    """Convert a tensor to llama.cpp's layout, which rotates adjacent channels instead of the halves of a head."""
    if name.endswith("q_proj.weight"):
        return permuted(numbers, config["num_attention_heads"])
    if name.endswith("k_proj.weight"):
        return permuted(numbers, config.get("num_key_value_heads") or config["num_attention_heads"])
    return numbers


def permuted(matrix: Array, num_heads: int) -> Array:
    """Move row i of a head's first half to row 2i, and row i of its second half to row 2i + 1."""
    halves = matrix.reshape(num_heads, 2, -1, matrix.shape[1])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def add_metadata(writer: Any, config: dict[str, Any], name: str, file_type: Any) -> None:
    width = head_dim_of(config)
    writer.add_name(name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(rope_of(config)["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(0 if file_type is None else int(file_type))


def add_tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    """Write the byte-level BPE vocabulary of ``tokenizer.json``; unused ids get a name that no text has."""
    import gguf

    told = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = told["model"]
    if model.get("type") != "BPE":
        raise PeerError(f"this script writes GGUF of BPE tokenizers only, not of {model.get('type')!r}")
    size = config["vocab_size"]
    tokens, types = [f"[unused{index}]" for index in range(size)], [gguf.TokenType.UNUSED] * size
    for token, index in model["vocab"].items():
        tokens[index], types[index] = token, gguf.TokenType.NORMAL
    for added in told.get("added_tokens", []):
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    eos = config.get("eos_token_id")
    for add, index in (
        (writer.add_bos_token_id, config.get("bos_token_id")),
        (writer.add_eos_token_id, eos[0] if isinstance(eos, list) else eos),
        (writer.add_pad_token_id, config.get("pad_token_id")),
    ):
        if index is not None:
            add(index)
    writer.add_add_bos_token(False)


def _kind(shape: tuple[int, ...], precision: str) -> Any:
    import gguf

    if precision == "int8" and len(shape) == 2 and shape[-1] % BLOCK == 0:
        return gguf.GGMLQuantizationType.Q8_0
    return gguf.GGMLQuantizationType.F32


def _dtype(name: str) -> Any:
    import numpy as np

    return np.dtype(name)


class Tensors:
    """Float32 tensors of a folder's safetensors files, mapped rather than read.

    Without libraries, since numpy has no bfloat16 and this environment no PyTorch.
    """

    def __init__(self, folder: Path) -> None:
        self._found: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with file.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(size))
            header.pop("__metadata__", None)
            self._found |= {name: (file, 8 + size, entry) for name, entry in header.items()}

    @property
    def names(self) -> Iterator[str]:
        return iter(self._found)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._found[name][2]["shape"])

    def read(self, name: str) -> Array:
        import numpy as np

        file, start, entry = self._found[name]
        kinds = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
        if entry["dtype"] not in kinds:
            raise PeerError(f"{name} is stored as {entry['dtype']}: this script reads F32, F16 and BF16")
        first, last = entry["data_offsets"]
        raw = np.memmap(file, np.uint8, "r", start + first, (last - first,)).view(kinds[entry["dtype"]])
        if entry["dtype"] == "BF16":  # the upper half of a float32
            return (raw.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])
        return raw.astype(np.float32).reshape(entry["shape"])
