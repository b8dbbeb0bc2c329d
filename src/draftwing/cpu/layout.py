"""The structures that Python and ``native`` share, field by field as the C++ declares them, and their arrays.

Shape suffixes: B rows, L layers, K heads, S slots, D head dimension.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

NUM_BUFFERS = 16
BYTES, EXPONENTS = -1, -2  # codes of parts of blocks that the kernel packs
KEYS, PAGE = 16, 64  # slots whose keys are stored together: of numbers, and of bytes
NARROW_SLOTS = torch.int32  # dtype of slots that hold bytes and their scales, as words


class Op(ctypes.Structure):
    """One operation of a program."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "source", "target", "column", "num_in", "num_out", "epilogue")),
        *(
            (name, ctypes.c_int32)
            for name in ("format", "num_heads", "num_kv_heads", "head_dim", "layer", "window", "first", "row_form")
        ),
        *((name, ctypes.c_int32) for name in ("is_gated", "multiplies", "centers", "norms_rotated", "is_tiled")),
        *((name, ctypes.c_int32) for name in ("rotation_first", "rotation_pairs", "value_dim", "shared_dim")),
        *((name, ctypes.c_int32) for name in ("slot_layer", "slot_first", "reads_only", "heads_apart", "query_scale")),
        *((name, ctypes.c_int32) for name in ("routes", "num_experts", "num_chosen", "gathers", "scales_input")),
        *((name, ctypes.c_int32) for name in ("scores", "normalises", "num_groups", "num_kept_groups", "sums_two")),
        *((name, ctypes.c_float) for name in ("eps", "scale", "cap")),
        *((name, ctypes.c_void_p) for name in ("norm", "weight", "scales", "sums", "bias", "places")),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm", "v_norm", "norm_bias", "sinks")),
    ]


class Expert(ctypes.Structure):
    """A matrix of an expert."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "sums", "bias")),
        *((name, ctypes.c_int32) for name in ("format", "row_form")),
    ]


class BatchStruct(ctypes.Structure):
    """The input of a program: rows, KV slots and buffers."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "nodes", "first_node", "tree_nodes")),
        *((name, ctypes.c_int32) for name in ("rotary_half", "rotation_by_row", "key_block", "slot_words")),
        *((name, ctypes.c_void_p) for name in ("tokens", "parents", "lengths", "rotation", "cache")),
        *((name, ctypes.c_int64) for name in ("layer_stride", "value_stride", "row_stride", "head_stride")),
        ("pages", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("view", "viewed")),
        *((name, ctypes.c_int64) for name in ("view_row", "view_layer", "view_head")),
        ("watch", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("watch_layer", "watch_head")),
        *((name, ctypes.c_void_p) for name in ("states", "kept", "marks")),
        *((name, ctypes.c_int64) for name in ("states_layer", "states_row", "kept_layer", "kept_row", "kept_width")),
        *((name, ctypes.c_int32) for name in ("kept_before", "num_recurrent", "keeps_all")),
        ("buffers", ctypes.c_void_p * NUM_BUFFERS),
        ("widths", ctypes.c_int32 * NUM_BUFFERS),
    ]

    def set_cache(self, data: Tensor, table: Any = None) -> None:
        """Read and write the KV slots ``data`` (L, 2, B, K, S, D); ``table`` lists their pages, if there are any."""
        strides, self.key_block = data.stride(), PAGE if data.dtype == NARROW_SLOTS else KEYS
        self.cache, self.slot_words = data.data_ptr(), data.shape[5]
        self.layer_stride, self.value_stride, self.row_stride, self.head_stride = strides[:4]
        if table is not None:
            self.row_stride, self.pages, self.page_stride = 0, table.address, table.stride


class Adjust(ctypes.Structure):
    """Penalties and biases of a row."""

    _fields_ = [
        *((name, ctypes.c_float) for name in ("repetition", "presence", "frequency")),
        ("num_biases", ctypes.c_int32),
        ("tokens", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_prompt")),
        *((name, ctypes.c_void_p) for name in ("biased", "biases")),
    ]


class Draft(ctypes.Structure):
    """Trees to draft, and where they are written."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("depth", "width", "max_nodes", "vocab_size", "room")),
        *((name, ctypes.c_int32) for name in ("num_fuse", "num_hidden", "logits", "read", "states", "fed_back")),
        *((name, ctypes.c_int32) for name in ("num_tables", "num_knots", "kept_out")),
        *((name, ctypes.c_float) for name in ("sharpness", "hit_rate", "scale", "worth", "share")),
        *((name, ctypes.c_void_p) for name in ("counts", "active", "temperatures")),
        *((name, ctypes.c_void_p) for name in ("top_k", "top_p", "min_p", "adjusts", "noise", "seeds", "starts")),
        *((name, ctypes.c_void_p) for name in ("knots", "rates", "gains", "costs", "verify")),
        *((name, ctypes.c_void_p) for name in ("tokens", "parents", "places", "node_probs", "path_probs")),
        ("verify_args", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("num_levels", "is_chain", "deepest")),
        ("num_forwards", ctypes.c_float),
    ]


class Filter(ctypes.Structure):
    """Temperature and filters of a row, which make scores of its logits."""

    _fields_ = [
        ("temperature", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("top_p", "min_p")),
    ]


class AcceptStruct(ctypes.Structure):
    """How the tokens after trees are drawn, and where the kept nodes are written."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("noise", "seeds", "starts", "filters", "found")),
        *((name, ctypes.c_int32) for name in ("logits", "out", "layers", "kv_heads")),
    ]


class VerifyArgs(ctypes.Structure):
    """The target's program, to verify trees as soon as they are drafted."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("ops", "batch", "accept")),
        ("seconds", ctypes.c_double),
        ("num_ops", ctypes.c_int32),
    ]


# --- weight formats --------------------------------------------------------------------------------------------------


class RowForm(IntEnum):
    """How float32 rows are converted before they are multiplied."""

    AS_THEY_ARE = 0
    ROUNDED = 1  # to bfloat16, like the weights
    SPLIT = 2  # each number into three bfloat16 numbers that sum to it: float32 arithmetic on matrix tiles
    LEVELS = 3  # to 8 bits for each unit of a block that shares a scale: integer products


@dataclass(frozen=True)
class WeightFormat:
    """One storage format of a matrix (out, in).

    Every format but int8 is exact: the CPU kernel widens its numbers to float32 in registers, then multiplies and sums
    as with float32 weights, so that the output equals that of the float32 expansion bit for bit, while a forward reads
    the format's own bytes. On matrix tiles, float32 rows times bfloat16 weights are exact products too, but summed in
    another order (``RowForm.SPLIT``). With int8 weights, and with blocks in int8 arithmetic (``RowForm.LEVELS``), rows
    are rounded too: a different, similar model.

    GGUF's blocks are defined in ggml's ``ggml-common.h``. The kernel needs to know which bytes of a block are 32-bit
    words (levels and packed scales), which are 16-bit numbers (scales and offsets) and which are bytes (packed scales,
    or the exponent of a power of two): those of 64 outputs are stored side by side, word by word.

    Attributes:
        name: the name in checkpoints, GGUF files and ``quantize``.
        code: its number in ``native/formats.h``.
        inputs, num_bytes: numbers and bytes of a block.
        exact: the model whose products it reproduces, in float32 arithmetic.
        fast_on: the processors on which it is faster.
        dtype: of plain numbers; None for blocks and levels.
        halves: byte offsets of a block's 16-bit numbers.
        words: first and last byte offset of a block's 32-bit words.
        scale_bytes: first and last byte offset of its packed scales of 8 bits, or of its exponent if it has no
            ``halves``.
    """

    name: str
    code: int
    inputs: int
    num_bytes: int
    exact: str
    fast_on: str = "any x86-64 (AVX-512, AVX2)"
    dtype: torch.dtype | None = None
    halves: tuple[int, ...] = ()
    words: tuple[int, int] = (0, 0)
    scale_bytes: tuple[int, int] = (0, 0)

    @property
    def is_exact(self) -> bool:
        """True if no weight is rounded."""
        return self.name != "int8"

    @property
    def is_blocks(self) -> bool:
        """True for GGUF's block formats."""
        return self.words != (0, 0)

    @property
    def parts(self) -> list[tuple[int, int, int, int]]:
        """Code, first byte, number and size of a block's words, 16-bit numbers and bytes, in a tile's order."""
        halves, (first, last), (word, end) = self.halves, self.scale_bytes, self.words
        parts = [(self.code, word, (end - word) // 4, 4)]
        if halves:
            parts.append((FORMATS["float16"].code, halves[0], len(halves), 2))
        if last:
            parts.append((BYTES if halves else EXPONENTS, first, last - first, 1))
        return parts


_EXPANSION = "its float32 expansion"
_ALL = (
    WeightFormat("float32", 0, 1, 4, "the checkpoint", dtype=torch.float32),
    WeightFormat("bfloat16", 1, 1, 2, "the checkpoint in float32", dtype=torch.bfloat16),
    WeightFormat("float16", 2, 1, 2, "the checkpoint in float32", dtype=torch.float16),
    WeightFormat("int8", 3, 1, 1, "the same model in int8", "AMX, AVX-512 VNNI, AVX-VNNI; slower on AVX2 alone"),
    WeightFormat("Q8_0", 4, 32, 34, _EXPANSION, halves=(0,), words=(2, 34)),
    WeightFormat("Q4_0", 5, 32, 18, _EXPANSION, halves=(0,), words=(2, 18)),
    WeightFormat("Q4_1", 6, 32, 20, _EXPANSION, halves=(0, 2), words=(4, 20)),
    WeightFormat("Q4_K", 7, 256, 144, _EXPANSION, halves=(0, 2), words=(4, 144)),
    WeightFormat("Q5_K", 8, 256, 176, _EXPANSION, halves=(0, 2), words=(4, 176)),
    WeightFormat("Q6_K", 9, 256, 210, _EXPANSION, halves=(208,), words=(0, 208)),
    WeightFormat("IQ4_NL", 10, 32, 18, _EXPANSION, halves=(0,), words=(2, 18)),
    WeightFormat("IQ4_XS", 11, 256, 136, _EXPANSION, halves=(0,), words=(8, 136), scale_bytes=(2, 8)),
    WeightFormat("MXFP4", 12, 32, 17, _EXPANSION, words=(1, 17), scale_bytes=(0, 1)),
)

FORMATS = {each.name: each for each in _ALL}
PLAIN = {each.dtype: each for each in _ALL if each.dtype is not None}
BLOCKS = tuple(each.name for each in _ALL if each.is_blocks)


def format_of(dtype: torch.dtype) -> WeightFormat | None:
    """The format of plain numbers of a dtype; None if the kernel has none (float64)."""
    return PLAIN.get(dtype)
