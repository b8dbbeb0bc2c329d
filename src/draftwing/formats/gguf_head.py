"""Write draft heads as GGUF files for llama.cpp, as its converter does: architectures ``eagle3`` and ``dflash``.

A head's file holds its target's tokenizer, which is copied from the target's own file. Matrices are in one format,
norms and biases in float32. ``draftwing.config`` is the part of ``config.json`` that other programs ignore, so that the
way back loses nothing.

As read in llama.cpp's converter and loader in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from draftwing.errors import CheckpointError, ConfigError
from draftwing.formats.gguf import GgufFile, StringArray, is_gguf, open_file
from draftwing.formats.gguf_folder import ARCHITECTURES, OWN_KEY
from draftwing.formats.gguf_weights import head_names
from draftwing.models.config import RopeConfig
from draftwing.models.rope import inverse_frequencies
from draftwing.models.weights import check_finite
from draftwing.storage import replacing, writing

_KINDS: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_FILE_TYPES: Final = {"F32": 0, "F16": 1, "BF16": 32}  # llama.cpp's numbers, which programs show
_ROPES: Final = ("default", "linear", "llama3", "yarn")
_LAYER = re.compile(r"(?:midlayer|layers\.(\d+))\.(.+)\.(weight|bias)")


def rope_obstacle(rope: RopeConfig) -> str:
    """Return the feature of a RoPE that a file cannot express; empty if none."""
    is_usual = (rope.attention_factor, rope.mscale, rope.mscale_all_dim, rope.truncate) == (None, None, None, True)
    bands = (rope.low_freq_factor, rope.high_freq_factor)
    if rope.type not in _ROPES or (rope.type == "llama3" and bands != (1, 4)) or (rope.type == "yarn" and not is_usual):
        return f"RoPE of type {rope.type!r} with these settings (only {', '.join(_ROPES)}, with their usual ones)"
    return ""


def write_gguf(
    path: Path,
    architecture: str,
    config: Any,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    own: Mapping[str, Any],
    *,
    target: Path | None,
    dtype: str | None = None,
) -> None:
    """Write a head's file, whole or not at all; a head's file that is there is replaced.

    Args:
        config: the net's, an ``EagleConfig`` or ``DFlashConfig``.
        fields: metadata of this architecture alone, in addition to its sizes, and tokens that only the head has.
        tensors: by their names in EAGLE's or z-lab's layout.
        own: the ``draftwing`` part of the config.
        target: the target's GGUF file, whose tokenizer is copied.
        dtype: of the matrices; None for that of ``fc``.
    """
    _check_destination(path)
    if target is None:
        raise ConfigError(
            f"{path}: a head's GGUF file holds the tokenizer of its target: give with --target the GGUF file that "
            f"llama.cpp runs"
        )
    name = dtype or str(tensors["fc.weight"].dtype).removeprefix("torch.")
    if name not in _KINDS:
        raise ConfigError(f"dtype {name!r:.40} is not supported in GGUF: choose {', '.join(_KINDS)}")
    data = {
        "general.name": path.stem,
        "general.file_type": _FILE_TYPES[_KINDS[name]],
        **_tokenizer(target, config.vocab_size),
        **{
            key if key.startswith("tokenizer.") else f"{architecture}.{key}": value
            for key, value in {**_sizes(config), **_rope(config.rope), **fields}.items()
        },
        OWN_KEY: json.dumps(own),
    }
    stored = _tensors(architecture, config, tensors, _KINDS[name])
    if config.rope.type == "llama3":
        plain = inverse_frequencies(replace(config.rope, type="default"))
        stored["rope_freqs.weight"] = plain / inverse_frequencies(config.rope), "F32"
    _write(path, architecture, data, stored)


def _check_destination(path: Path) -> None:
    """Raise CheckpointError if a file would overwrite something that is no head's file."""
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path}: a GGUF head is one file: choose a name that ends in .gguf")
    if not path.exists():
        return
    if is_gguf(path):
        with closing(open_file(path)) as file:
            traits = ARCHITECTURES.get(file.metadata.text("general.architecture"))
        if traits is not None and traits.is_head:
            return
    raise CheckpointError(f"{path}: holds something that is no head, which it would overwrite: choose another name")


def _tokenizer(target: Path, vocab_size: int) -> dict[str, Any]:
    """Return the tokenizer's metadata in a target's file, for a head with ``vocab_size`` tokens."""
    with closing(GgufFile(target)) as file:
        pairs = {key: value for key, value in file.metadata.pairs.items() if key.startswith("tokenizer.")}
        strings = {key: list(value) for key, value in pairs.items() if isinstance(value, StringArray)}
    count = len(strings.get("tokenizer.ggml.tokens", ()))
    if count != vocab_size:
        raise CheckpointError(
            f"{target}: its tokenizer has {count} tokens, and the head is made for {vocab_size}: give the file of the "
            f"head's own target"
        )
    return {**pairs, **strings}


def _sizes(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "block_count": config.num_layers,
        "context_length": config.rope.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "target_layers": list(config.taps),
    }


def _rope(rope: RopeConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"freq_base": float(rope.theta), "dimension_count": rope.rotary_dim}
    if rope.type in ("linear", "yarn"):
        fields |= {"scaling.type": rope.type, "scaling.factor": float(rope.factor)}
    if rope.type in ("llama3", "yarn"):
        fields["scaling.original_context_length"] = rope.original_max_position_embeddings
    if rope.type == "yarn":
        fields |= {f"scaling.yarn_{name}": float(getattr(rope, name)) for name in ("beta_fast", "beta_slow")}
    return {f"rope.{key}": value for key, value in fields.items()}


def _tensors(architecture: str, config: Any, tensors: Mapping[str, Tensor], kind: str) -> dict[str, tuple[Tensor, str]]:
    """Return tensors and formats by their names in a file."""
    parts, outside = ({name: new for new, name in names.items()} for names in head_names(architecture))
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if ARCHITECTURES[architecture].has_pairs else {}
    stored = {}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        part = "" if match is None else parts[match[2]]
        new = outside.get(name, name) if match is None else f"blk.{match[1] or 0}.{part}.{match[3]}"
        if name == "d2t":  # llama.cpp's are target ids, not offsets
            stored[new] = tensor + torch.arange(len(tensor)), "I64"
        elif name != "t2d":
            if part in heads:  # RoPE turns adjacent rows of a head
                tensor = tensor.view(heads[part], 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
            stored[new] = tensor, "F32" if tensor.ndim == 1 else kind
    return stored


class _Stored(np.ndarray):
    """An array that reports a full disk: numpy's own ``tofile`` ignores errors of closing its C file."""

    def tofile(self, fid: Any, sep: str = "", format: str = "%s") -> None:
        fid.write(self.data)


def _write(path: Path, architecture: str, data: Mapping[str, Any], tensors: Mapping[str, tuple[Tensor, str]]) -> None:
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter  # here: the package takes a while

    dtypes = {kind: getattr(torch, name) for name, kind in _KINDS.items()} | {"I64": torch.int64}
    types = {bool: "BOOL", int: "UINT32", float: "FLOAT32", bytes: "STRING", str: "STRING"}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path), replacing(path) as partial, closing(GGUFWriter(partial, architecture)) as writer:
        for key, value in data.items():
            if isinstance(value, np.ndarray) and value.size:
                element = GGUFValueType[value.dtype.name.upper()]
                writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, element)
            elif isinstance(value, list):
                writer.add_array(key, value)
            elif not isinstance(value, np.ndarray):
                writer.add_key_value(key, value, GGUFValueType[types[type(value)]])
        for name, (tensor, kind) in tensors.items():
            numbers = tensor.to("cpu", dtypes[kind]).contiguous()
            check_finite(f"{name} of {path}", numbers)
            stored = numbers.view(torch.uint8).numpy().view(_Stored)
            writer.add_tensor(name, stored, raw_dtype=GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
