"""The structures that Python and ``native`` share, field by field as the C++ lays them out.

Shape suffixes: B rows, K heads, S slots, D head dimension.
"""

from __future__ import annotations

import ctypes
from array import array

from torch import Tensor

from draftwing.model.cache import View

__all__ = ["NUM_BUFFERS", "Adjust", "Ahead", "Batch", "Draft", "Filter", "Op", "Walk", "set_cache", "set_view"]

NUM_BUFFERS = 16


class Op(ctypes.Structure):
    """One operation, as ``native`` lays it out."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "source", "target", "column", "num_in", "num_out", "epilogue")),
        *(
            (name, ctypes.c_int32)
            for name in ("format", "num_heads", "num_kv_heads", "head_dim", "layer", "window", "first", "row_form")
        ),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        *((name, ctypes.c_void_p) for name in ("norm", "weight", "scales", "sums", "bias", "places")),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm")),
    ]


class Batch(ctypes.Structure):
    """What a program runs on: rows, slots and buffers."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "nodes", "first_node", "tree_nodes")),
        *((name, ctypes.c_int32) for name in ("rotary_half", "rotation_by_row")),
        *((name, ctypes.c_void_p) for name in ("tokens", "parents", "lengths", "rotation", "cache")),
        *((name, ctypes.c_int64) for name in ("layer_stride", "value_stride", "row_stride", "head_stride")),
        ("pages", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("view", "viewed")),
        *((name, ctypes.c_int64) for name in ("view_row", "view_layer", "view_head")),
        ("watch", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("watch_layer", "watch_head")),
        ("buffers", ctypes.c_void_p * NUM_BUFFERS),
        ("widths", ctypes.c_int32 * NUM_BUFFERS),
    ]


class Adjust(ctypes.Structure):
    """Penalties and biases of a row."""

    _fields_ = [
        *((name, ctypes.c_float) for name in ("repetition", "presence", "frequency")),
        ("num_biases", ctypes.c_int32),
        ("said", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_said", "num_prompt")),
        *((name, ctypes.c_void_p) for name in ("biased", "biases")),
    ]


class Draft(ctypes.Structure):
    """Trees to draft, and where they are written."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("depth", "width", "most", "vocab_size", "room")),
        *((name, ctypes.c_int32) for name in ("num_catch_up", "num_hidden", "logits", "read", "states", "fed_back")),
        *((name, ctypes.c_int32) for name in ("num_tables", "num_knots", "kept_out")),
        *((name, ctypes.c_float) for name in ("sharpness", "kept", "scale", "worth", "share")),
        *((name, ctypes.c_void_p) for name in ("counts", "wanted", "temperatures")),
        *((name, ctypes.c_void_p) for name in ("top_k", "top_p", "min_p", "adjusts", "noise", "seeds", "starts")),
        *((name, ctypes.c_void_p) for name in ("knots", "rates", "gains", "costs", "verify")),
        *((name, ctypes.c_void_p) for name in ("tokens", "parents", "places", "told", "reached", "ahead")),
        *((name, ctypes.c_int32) for name in ("levels", "is_chain", "deepest")),
        ("effort", ctypes.c_float),
    ]


class Filter(ctypes.Structure):
    """What makes scores of a row's logits."""

    _fields_ = [
        ("temperature", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("top_p", "min_p")),
    ]


class Walk(ctypes.Structure):
    """How the tokens after trees are drawn, and where it is written what is kept."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("noise", "seeds", "starts", "filters", "found")),
        *((name, ctypes.c_int32) for name in ("logits", "out", "layers", "kv_heads", "dim")),
    ]


class Ahead(ctypes.Structure):
    """What verifies trees as soon as they are drafted."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("ops", "batch", "how")),
        ("seconds", ctypes.c_double),
        ("num_ops", ctypes.c_int32),
    ]


def set_cache(batch: Batch, data: Tensor, first_row: int) -> None:
    """Point to the slots (L, 2, B, K, S, D) of the rows from ``first_row`` on."""
    strides = data.stride()
    batch.cache = data.data_ptr() + first_row * strides[2] * data.element_size()
    batch.layer_stride, batch.value_stride, batch.row_stride, batch.head_stride = strides[:4]


def set_view(batch: Batch, view: View | None, watched: Tensor | None = None) -> object:
    """Say which slots are looked at, and where that is watched (``Entries``); what must be kept until it is run."""
    batch.view = batch.watch = None
    if watched is not None:
        batch.watch = watched.data_ptr()
        batch.watch_layer, batch.watch_head = watched.stride()[:2]
    if view is None:
        return watched
    slots, counts = view.slots, array("q", view.counts)
    strides = [0 if size == 1 else stride for size, stride in zip(slots.shape, slots.stride(), strict=True)]
    batch.view, batch.viewed = slots.data_ptr(), counts.buffer_info()[0]
    batch.view_row, batch.view_layer, batch.view_head = strides[:3]
    return view, counts, watched
