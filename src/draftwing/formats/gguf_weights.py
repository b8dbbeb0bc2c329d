"""Read the tensors of a GGUF file by the names and in the order of a Hugging Face checkpoint.

Apart from the names these differ. Files of ``llama`` and some other architectures hold the rows of queries and keys in
another order: RoPE's pairs, i and i + dim / 2 of a head, are adjacent. In Qwen3.5 the value heads of the gated delta
rule are in another order, too. Norms that multiply by 1 + w hold 1 + w, and decays their exponential. A layer's experts
are one tensor, and a convolution is a matrix. Tied embeddings have no ``output.weight``, as in a checkpoint.

Some tensors have no counterpart in a checkpoint, and the lean decoder reads them by names that only files have: the two
halves of DeepSeek's ``kv_b_proj``, Qwen3-Next's matrices of several inputs split, and the columns of Qwen3.5's
``out_proj`` by value head, whose order cannot be changed within blocks (``out_proj_tiled``).
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from draftwing.cpu.layout import FORMATS
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.formats.gguf import GgufFile, TensorInfo, open_file
from draftwing.formats.gguf_folder import (
    ARCHITECTURES,
    LINK,
    Architecture,
    folder_files,
    get_architecture,
    get_model_type,
    link_of,
)
from draftwing.models.families import FAMILIES, Family
from draftwing.models.weights import (
    MappedFile,
    Stored,
    WeightFiles,
    Weights,
    as_numbers,
    check_finite,
    dequantized,
    joined,
)
from draftwing.storage import expand_user, new_folder, remove_leftovers, writing

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PIECE = 1 << 22  # numbers that are converted at a time
_MAX_EXPERTS = 1024  # llama.cpp has 512 at most
_NOT_WEIGHTS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}  # part of the config
_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
# Tensors outside the layers of a DSpark head, which is a ``dflash`` file.
_DSPARK = {
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
}
# Tensors of a layer, and the fields of ``LayerNames`` that hold their names in a checkpoint.
_IN_LAYERS = {
    "attn_norm": "attention_in",
    "post_attention_norm": "attention_out",
    "ffn_norm": "mlp_in",
    "post_ffw_norm": "mlp_out",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "attn_output": "out",
    "attn_sinks": "sinks",
    "ffn_down": "down",
}
# The same for experts, and the fields of ``ExpertTraits``.
_IN_EXPERTS = {
    "ffn_gate_inp": "router",
    "ffn_gate_inp.scale": "router_scale",
    "ffn_gate_inp_shexp": "shared_gate",
    "ffn_down_exps.scale": "expert_scale",
    "exp_probs_b": "score_bias",
}
# Tensors of a layer that few families have, and their names in a checkpoint.
_OTHERS = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
    **{
        f"attn_{part}": f"self_attn.{name}"
        for part, name in (
            ("q_a", "q_a_proj"), ("q_a_norm", "q_a_layernorm"), ("q_b", "q_b_proj"), ("kv_a_mqa", "kv_a_proj_with_mqa"),
            ("kv_a_norm", "kv_a_layernorm"), ("kv_b", "kv_b_proj"), ("k_b", "k_b_proj"), ("v_b", "v_b_proj"),
        )
    },
}  # fmt: skip
_DELTA = {
    part: f"linear_attn.{name}"
    for part, name in (
        ("attn_qkv", "in_proj_qkv"), ("attn_gate", "in_proj_z"), ("ssm_beta", "in_proj_b"), ("ssm_alpha", "in_proj_a"),
        ("ssm_in", "in_proj_qkvz"), ("ssm_ba", "in_proj_ba"), ("ssm_conv1d", "conv1d"), ("ssm_dt", "dt_bias"),
        ("ssm_a", "A_log"), ("ssm_norm", "norm"), ("ssm_out", "out_proj"),
    )
}  # fmt: skip
# MTP modules, in layers after the model's.
_MODULE = {
    f"nextn.{part}": name
    for part, name in (
        ("eh_proj", "eh_proj"), ("enorm", "enorm"), ("hnorm", "hnorm"), ("shared_head_norm", "shared_head.norm"),
        ("embed_tokens", "embed_tokens"), ("shared_head_head", "shared_head.head"),
    )
}  # fmt: skip
# Tensors that llama.cpp's converter makes of several if asked to.
_FUSED = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
}
# Tensors whose names in a checkpoint do not end in ``.weight`` or ``.bias``.
_WHOLE_NAMES = (
    "attn_sinks", "exp_probs_b", "ssm_a", "ssm_dt", "layer_output_scale", "ffn_gate_inp.scale", "ffn_down_exps.scale"
)  # fmt: skip
_ROWS = "moe_statics.e_score_correction_bias"  # is a matrix of one row in a checkpoint
_LAYER_NAME = re.compile(r"blk\.(\d{1,6})\.((?:shortconv\.|nextn\.)?\w+(?:\.scale)?)(?:\.(\d{1,6}))?(\.weight|\.bias)?")


@dataclass(frozen=True)
class _Order:
    """The order of a tensor's rows, apart from the ``first``: those in the file have two axes of ``shape`` swapped."""

    shape: tuple[int, int, int, int]  # the file's rows; one number may be -1
    first: int = 0

    @property
    def multiple(self) -> int:
        return abs(math.prod(self.shape))

    def rows(self, count: int) -> Tensor | None:
        """The rows in a checkpoint's order; None if their number does not fit."""
        if count < self.first or (count - self.first) % self.multiple:
            return None
        swapped = torch.arange(self.first, count).view(self.shape).transpose(1, 2).flatten()
        return torch.cat([torch.arange(self.first), swapped])


@dataclass(frozen=True)
class _TensorPlace:
    """The source of a checkpoint's tensor: ``tensor`` of the file, or one ``expert`` of it, or some ``rows``."""

    tensor: str
    expert: int | None
    rows: slice | None
    order: _Order | None = None
    undo: Callable[[Tensor], Tensor] | None = None  # returns a checkpoint's numbers
    new_axis: int | None = None  # a dimension of one that the tensor has in a checkpoint
    is_transposed: bool = False  # the matrices of all heads, one after the other, are (in, out)


def _find_places(file: GgufFile) -> dict[str, _TensorPlace]:
    """Return the source of every tensor by its name in a checkpoint; tensors without such a name keep their own."""
    architecture = get_architecture(file)
    traits, family = ARCHITECTURES[architecture], FAMILIES[get_model_type(file)]
    parts = {**_layer_names(family), **_OTHERS, **_MODULE}
    parts |= {part: parts[usual] for part, usual in traits.renamed.items()}
    outside = _OUTSIDE_LAYERS
    if family.conv_size is not None:
        outside = {**outside, "token_embd_norm.weight": f"{family.names.final_norm}.weight"}
    if traits.is_head:
        parts, outside = head_names(architecture)
    orders = _orders(file, architecture, traits, family)
    if family.delta is not None:
        parts |= _DELTA
        if "ssm_a" in orders:
            parts["ssm_out"] += "_tiled"
    places: dict[str, _TensorPlace] = {}
    named = (
        (info, *names) for info in file.tensors.values() for names in _checkpoint_names(file, info, parts, outside)
    )
    for info, part, name, rows in named:
        is_stacked = "*" in name
        name = name.removeprefix("model.") if traits.is_head else name
        if is_stacked and (len(info.shape) != (2 if name.endswith(".bias") else 3) or info.shape[0] > _MAX_EXPERTS):
            raise CheckpointError(
                f"{file.path}: {info.name} must hold at most {_MAX_EXPERTS} experts' numbers, one after the other, "
                f"found shape {list(info.shape)}. Download the file again."
            )
        is_transposed = part == "attn_k_b"
        if is_transposed and len(info.shape) != 3:
            raise CheckpointError(
                f"{file.path}: {info.name} must hold the matrices of all heads, found shape {list(info.shape)}. "
                "Convert the model again with a current llama.cpp."
            )
        undo: Callable[[Tensor], Tensor] | None = None
        new_axis = None
        if family.norm_offset and info.name.endswith("norm.weight") and part != "ssm_norm":
            undo = partial(torch.sub, other=family.norm_offset)
        elif part == "ssm_a":
            undo = _logarithm
        if len(info.shape) == 1 and (part == "ffn_gate_inp_shexp" or name.endswith(_ROWS)):
            new_axis = 0
        elif part in ("shortconv.conv", "ssm_conv1d"):
            new_axis = 1
        for expert in range(info.shape[0]) if is_stacked else (None,):
            full_name = name if expert is None else name.replace("*", str(expert))
            if full_name in places:
                raise CheckpointError(
                    f"{file.path}: {places[full_name].tensor} and {info.name} are both {full_name}. Convert it again."
                )
            order = orders.get(part)
            places[full_name] = _TensorPlace(info.name, expert, rows, order, undo, new_axis, is_transposed)
    return places


def head_names(architecture: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the names of a head's tensors in its layers, and outside them, by their names in a file."""
    parts = {**_layer_names(FAMILIES[ARCHITECTURES[architecture].model_type]), "attn_norm_2": "hidden_norm"}
    outside = {new: name.removeprefix("model.") for new, name in _OUTSIDE_LAYERS.items()}
    norm = "input_norm" if architecture == "eagle3" else "hidden_norm"
    return parts, {**outside, **_DSPARK, "enc.output_norm.weight": f"{norm}.weight"}


def _checkpoint_names(
    file: GgufFile, info: TensorInfo, parts: Mapping[str, str], outside: Mapping[str, str]
) -> Iterator[tuple[str, str, slice | None]]:
    """Yield the checkpoint's tensors that a file's tensor holds: the part of a layer, the name, and the rows of each.

    There are several if the converter fused them. In the name, ``*`` stands for the numbers of all experts.
    """
    match = _LAYER_NAME.fullmatch(info.name)
    if match is None:
        if info.name not in _NOT_WEIGHTS:
            yield "", outside.get(info.name, info.name), None
        return
    layer, part, number, suffix = match.groups()
    pieces: Iterable[tuple[str, slice | None]] = [(part, None)]
    if part in _FUSED and part not in parts and suffix is not None:
        pieces = _unfused(file, info, layer, part)
    for part, rows in pieces:
        name, is_whole = parts.get(part if number is None else f"{part}_exps"), part in _WHOLE_NAMES
        if name is None or (number is not None and part.endswith("_exps")) or (suffix is None and not is_whole):
            yield part, info.name, rows
            continue
        if number is not None:  # old files have a tensor for each expert
            name = name.replace("*", str(int(number)))
        yield part, f"model.layers.{int(layer)}.{name}{'' if is_whole else suffix}", rows


def _unfused(file: GgufFile, info: TensorInfo, layer: str, part: str) -> Iterator[tuple[str, slice]]:
    """Yield the parts of a layer that a fused tensor holds, and their rows."""
    is_bias = info.name.endswith(".bias")
    count = info.shape[-1 if is_bias else -2] if len(info.shape) > 1 or is_bias else 0
    sizes = [count // 2] * 2
    if part == "attn_qkv":
        out = file.tensors.get(f"blk.{layer}.attn_output.weight")
        queries = 0 if out is None else out.shape[-1]
        sizes = [queries, (count - queries) // 2, (count - queries) // 2]
    if sum(sizes) != count or min(sizes) < 1:
        raise CheckpointError(
            f"{file.path}: {info.name} must hold {', '.join(_FUSED[part])}, found shape {list(info.shape)}. Download "
            "the file again."
        )
    for own, size, end in zip(_FUSED[part], sizes, accumulate(sizes), strict=True):
        yield own, slice(end - size, end)


def _logarithm(numbers: Tensor) -> Tensor:
    return (-numbers).log()


def _orders(file: GgufFile, architecture: str, traits: Architecture, family: Family) -> dict[str, _Order]:
    """Return the order of rows by the tensors of a layer that have another one than in a checkpoint."""
    data, orders = file.metadata, dict[str, _Order]()
    if traits.has_pairs:
        heads = data.integer(f"{architecture}.attention.head_count", minimum=1)
        orders["attn_q"] = _Order((heads, -1, 2, 1))
        kv_heads = data.integer(f"{architecture}.attention.head_count_kv", heads, minimum=1)
        orders["attn_k"] = _Order((kv_heads, -1, 2, 1))
    if family.delta == "split":
        keys = data.integer(f"{architecture}.ssm.group_count", minimum=1)
        values = data.integer(f"{architecture}.ssm.time_step_rank", minimum=1)
        if values > keys:  # the first value head of every key head comes first
            width = 2 * keys * data.integer(f"{architecture}.ssm.state_size", minimum=1)
            rest = _Order((1, values // keys, keys, -1))
            orders |= dict.fromkeys(("attn_gate", "ssm_beta", "ssm_alpha", "ssm_dt", "ssm_a"), rest)
            orders |= dict.fromkeys(("attn_qkv", "ssm_conv1d"), replace(rest, first=width))
    return orders


def _layer_names(family: Family) -> dict[str, str]:
    """Return the names of a layer's tensors in a checkpoint by their names in a file; ``*`` stands for the expert."""
    names, experts = family.names, family.experts
    parts: dict[str, str | None] = {part: getattr(names, field) for part, field in _IN_LAYERS.items()}
    parts |= dict(zip(("attn_q", "attn_k", "attn_v") if len(names.qkv) == 3 else ("attn_qkv",), names.qkv, strict=True))
    is_split = len(names.gate_up) == 2
    parts |= dict(zip(("ffn_gate", "ffn_up") if is_split else ("ffn_up",), names.gate_up, strict=True))
    if experts is not None:
        parts |= {part: getattr(experts, field) for part, field in _IN_EXPERTS.items()}
        for kind, matrix in zip(("gate", "up", "down"), experts.apart, strict=True):
            parts[f"ffn_{kind}_exps"] = matrix.replace("{e}", "*")
            if experts.shared is not None:
                parts[f"ffn_{kind}_shexp"] = f"{experts.shared}.{kind}_proj"
    return {part: name for part, name in parts.items() if name is not None}


def open_weights(folder: Path) -> Weights:
    """Open the tensors of a model folder: safetensors, or the GGUF file that the folder was made from."""
    link = folder / LINK
    if not os.path.lexists(link):
        return WeightFiles(folder)
    if not link.exists():
        raise CheckpointError(f"{link}: expected a link to a GGUF file, found none. Give the file itself again.")
    return GgufWeights(link_of(folder) or link)


class GgufWeights(Weights):
    """The tensors of a GGUF model, with the interface of ``WeightFiles``; ``stored`` returns the file's own format.

    The file is memory-mapped; opening reads only its header.
    """

    def __init__(self, path: Path | str) -> None:
        self.folder = Path(path)  # used in messages
        with closing(open_file(self.folder)) as file:
            self._places, self._tensors, paths = _find_places(file), file.tensors, file.paths
        try:
            self._mapped = [MappedFile(part) for part in paths]
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be mapped ({error}). Check the file.") from error

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def close(self) -> None:
        self._mapped.clear()

    def keys(self) -> list[str]:
        return sorted(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        place, info = self._find(name)
        shape = info.shape if place.expert is None else info.shape[1:]
        if place.rows is not None:
            shape = (place.rows.stop - place.rows.start, *shape[1:])
        if place.is_transposed:
            shape = (shape[0], shape[2], shape[1])
        if len(shape) == 3:  # the matrices of all heads
            shape = (shape[0] * shape[1], shape[2])
        return shape if place.new_axis is None else (*shape[: place.new_axis], 1, *shape[place.new_axis :])

    def get(self, name: str, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """Read a tensor onto the CPU, blocks expanded: to float32 if no dtype is given."""
        stored_shape, info = self._check(name, shape)
        rows = self._rows(name)
        if dtype is not None and not dtype.is_floating_point:
            raise CheckpointError(f"{self.folder}: {name} holds floating-point numbers, not {dtype}.")
        if (name, info.kind) == ("d2t", "I64"):  # a head's draft vocabulary
            return as_numbers(rows, torch.int64).flatten()
        plain, place = _PLAIN.get(info.kind), self._find(name)[0]
        if plain is not None and place.undo is None and not place.is_transposed:
            return as_numbers(rows, plain).reshape(stored_shape).to(dtype or plain)
        return self._expand(name, rows, dtype or torch.float32).reshape(stored_shape)

    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> Stored:
        """Return a matrix in the file's format, or in float32 if the kernel does not know it."""
        stored_shape, info = self._check(name, shape)
        if len(stored_shape) != 2:
            raise CheckpointError(
                f"{self.folder}: {name} must be a matrix, found shape {stored_shape}. Convert it again."
            )
        rows = self._rows(name)
        if self._find(name)[0].is_transposed:
            return Stored("float32", stored_shape[1], self._expand(name, rows, torch.float32), was=info.kind)
        if info.kind in _STORED:
            return Stored(_STORED[info.kind], stored_shape[1], as_numbers(rows, _PLAIN[info.kind]))
        if info.kind in FORMATS and FORMATS[info.kind].is_blocks:
            return Stored(info.kind, stored_shape[1], rows)
        return Stored("float32", stored_shape[1], self._expand(name, rows, torch.float32), was=info.kind)

    def pieces(self, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield a tensor some rows at a time, to write it elsewhere in little memory."""
        _, info = self._check(name, None)
        for piece in self._pieces(name, self._rows(name)):
            yield piece.to(dtype)
        self._mapped[info.part].drop(self._bytes(info))

    def drop(self, stored: Stored) -> None:
        for mapped in self._mapped:
            mapped.drop(stored.data)

    def _find(self, name: str) -> tuple[_TensorPlace, TensorInfo]:
        if name not in self._places:
            raise self.missing(name, "Download the file again, or convert it again.")
        place = self._places[name]
        return place, self._tensors[place.tensor]

    def _check(self, name: str, shape: tuple[int, ...] | None) -> tuple[tuple[int, ...], TensorInfo]:
        stored_shape, (_, info) = self.shape(name), self._find(name)
        if shape is not None and stored_shape != tuple(shape):
            raise CheckpointError(
                f"{self.folder}: {name} ({info.name}) must have shape {tuple(shape)}, found {stored_shape}. Does the "
                "metadata belong to these weights? Download the file again."
            )
        if not self._mapped:
            raise CheckpointError(f"{self.folder}: the file is closed. Open GgufWeights again to read {name}.")
        return stored_shape, info

    def _bytes(self, info: TensorInfo) -> Tensor:
        """Return all rows of a tensor (rows, bytes of a row) uint8, as in the file."""
        num_rows = math.prod(info.shape[:-1])
        try:
            return self._mapped[info.part].tensor(info.start, (num_rows, info.num_bytes // num_rows), torch.uint8)
        except ValueError as error:
            raise CheckpointError(f"{self.folder}: {info.name} is gone ({error}). Download the file again.") from error

    def _rows(self, name: str) -> Tensor:
        """Return the rows (rows, bytes of a row) uint8 of a tensor, in a checkpoint's order."""
        place, info = self._find(name)
        data = whole = self._bytes(info)
        if place.expert is not None:
            num_rows = math.prod(info.shape[1:-1])  # one of a bias
            data = data[place.expert * num_rows : (place.expert + 1) * num_rows]
        is_vector = data.shape[0] == 1 and info.kind in _PLAIN  # its numbers are taken like a matrix's rows
        if is_vector:
            data = data.view(info.shape[-1], -1)
        if place.rows is not None:
            data = data[place.rows]
        if place.order is not None:
            order = place.order.rows(data.shape[0])
            if order is None:
                raise CheckpointError(
                    f"{self.folder}: {info.name} must have a multiple of {place.order.multiple} rows, for the heads "
                    f"that the metadata states, found shape {list(info.shape)}. Download the file again."
                )
            data = data[order]
            self._mapped[info.part].drop(whole)
        return data.view(1, -1) if is_vector else data

    def _expand(self, name: str, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """(rows, bytes) uint8 -> (rows, numbers)."""
        place, info = self._find(name)
        numbers = joined(self._pieces(name, rows), rows.shape[0], info.shape[-1], dtype)
        return numbers.view(info.shape).transpose(-2, -1).reshape(self.shape(name)) if place.is_transposed else numbers

    def _pieces(self, name: str, rows: Tensor) -> Iterator[Tensor]:
        """(rows, bytes) uint8 -> (some rows, numbers) repeatedly: plain numbers unchanged, blocks as float32."""
        place, info = self._find(name)
        if info.kind.startswith("I") and not info.kind.startswith("IQ"):
            raise CheckpointError(
                f"{self.folder}: {name} must hold floating-point numbers, found {info.kind}. Convert the model again."
            )
        if info.kind in _PLAIN:
            for piece in torch.split(rows, max(1, _PIECE // info.shape[-1])):
                numbers = as_numbers(piece, _PLAIN[info.kind])
                yield numbers if place.undo is None else place.undo(numbers.float())
            return
        try:
            yield from dequantized(rows, info.kind, info.shape[-1])
        except NotImplementedError:
            raise UnsupportedError(
                f"{self.folder}: {name} is in the format {info.kind}, which cannot be expanded. Take a file in another "
                "format, such as Q4_K_M or Q8_0."
            ) from None


# --- import as a Hugging Face folder ---------------------------------------------------------------------------------

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class ImportResult:
    """The folder, number of tensors, dtype and size in bytes that were written, and the file's formats by count."""

    folder: Path
    tensors: int
    dtype: str
    num_bytes: int
    formats: dict[str, int]


def import_gguf(
    path: Path,
    out: Path,
    dtype: str = "float32",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    shard_bytes: int = 4 * 10**9,
) -> ImportResult:
    """Write a GGUF file as a Hugging Face folder, for programs that do not read GGUF.

    float32 holds exactly what blocks stand for; bfloat16 and float16 round it. Matrices are expanded and written piece
    by piece, so that memory stays bounded; the folder, new or empty, appears when it is complete.

    Args:
        on_progress: called with (bytes written, all bytes).
        shard_bytes: approximate limit of a weight file.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r:.40} is not supported: choose {', '.join(_DTYPES)}")
    path, out = expand_user(path).absolute(), expand_user(out).absolute()
    with closing(open_file(path)) as file:
        files = folder_files(file)
        config, family = json.loads(files["config.json"]), FAMILIES[get_model_type(file)]
        experts = family.experts
        is_stacked = experts is not None and (experts.is_stacked or config.get(experts.beside))
        for is_other, feature in (
            (is_stacked, "all experts in one tensor"),
            (family.is_latent, "one matrix for latent keys and values"),
            (family.delta is not None, "other matrices of the gated delta rule"),
        ):
            if is_other:
                raise UnsupportedError(
                    f"{path}: a checkpoint of this family has {feature}, which is not written. Use the GGUF file "
                    "itself, or the model's Hugging Face folder."
                )
        formats = Counter(info.kind for info in file.tensors.values())
    files["config.json"] = json.dumps({**config, "dtype": dtype}, indent=2, ensure_ascii=False) + "\n"
    with GgufWeights(path) as weights:
        sizes = {name: math.prod(weights.shape(name)) * getattr(torch, dtype).itemsize for name in weights.keys()}  # noqa: SIM118
        shards: list[dict[str, int]] = [{}]
        for name, size in sizes.items():
            if shards[-1] and sum(shards[-1].values()) + size > shard_bytes:
                shards.append({})
            shards[-1][name] = size
        total = sum(sizes.values())
        with writing(out):
            _check_room(out, total + sum(len(text) for text in files.values()))
            with new_folder(out) as partial:
                for name, text in files.items():
                    (partial / name).write_text(text, encoding="utf-8")
                _write_shards(partial, weights, shards, dtype, lambda done: on_progress(done, total))
        return ImportResult(out, len(sizes), dtype, total, dict(formats))


def _check_room(out: Path, needed: int) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: expected a new or an empty folder, found something in it. Choose another one.")
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(out)  # which take room
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise CheckpointError(
            f"{out}: the folder takes {needed / 1e9:.2f} GB, and the disk has {free / 1e9:.2f} GB left. Make room, "
            "choose another disk, or a dtype of 16 bits."
        )


def _write_shards(
    folder: Path, weights: GgufWeights, shards: list[dict[str, int]], dtype: str, on_progress: Callable[[int], None]
) -> None:
    done = 0
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        index.update(dict.fromkeys(shard, file_name))
        with open(folder / file_name, "wb") as file:
            _write_header(file, weights, shard, dtype)
            for name, size in shard.items():
                for piece in weights.pieces(name, getattr(torch, dtype)):
                    check_finite(name, piece)
                    file.write(piece.contiguous().view(torch.uint8).numpy().data)
                done += size
                on_progress(done)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": done}, "weight_map": index}, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _write_header(file: BinaryIO, weights: GgufWeights, shard: dict[str, int], dtype: str) -> None:
    """Write the start of a safetensors file: a length, then JSON with the place of each tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, size in shard.items():
        header[name] = {"dtype": _DTYPES[dtype], "shape": weights.shape(name), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
