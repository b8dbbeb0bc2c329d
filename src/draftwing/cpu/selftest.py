"""Test a compiled kernel against NumPy and PyTorch in a few milliseconds.

This finds compilers that break the rules (reassociated sums, ignored NaN, approximate quotients) and processors that
lack what the library expects.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from draftwing.cpu.layout import FORMATS, AcceptStruct, BatchStruct, Op, RowForm, WeightFormat
from draftwing.noise import KeyedNoise

_NORM, _LINEAR = 1, 2
_SILU = 2
_TILE = 64
_ROWS, _IN, _OUT = 7, 37, 64
_EPS = 1e-5
_WIDENED = [kind for kind in FORMATS.values() if kind.is_exact and kind.name != "float32"]


def fault_of(library: ctypes.CDLL) -> str:
    """The first feature that a library computes wrongly; empty if none. Argument types must be set already."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((_ROWS, _IN), dtype=np.float32)
    weight = rng.standard_normal((2 * _OUT, _IN), dtype=np.float32)
    for feature, is_right in (
        ("products", _products(library, x, weight[:_OUT])),
        ("norms", _norms(library, x)),
        ("activations", _activations(library, x, weight)),
        ("8-bit products", _bytes(library, rng)),
        *((f"{kind.name} weights", _widens(library, rng, kind)) for kind in _WIDENED),
        *((f"8-bit products with {kind.name}", _blocks(library, rng, kind)) for kind in _WIDENED if kind.is_blocks),
        *(
            (f"bfloat16 products, rows {form.name.lower()}", _narrow(library, rng, form, rows, width))
            for form in (RowForm.ROUNDED, RowForm.SPLIT)
            for rows, width in ((_ROWS, _IN), (37, 5 * 32 + 6))
        ),
        ("noise", _noise(library)),
        ("draws", _draws(library)),
    ):
        if not is_right:
            return feature
    return ""


def _run(library: ctypes.CDLL, x: np.ndarray, width: int, op: dict[str, Any]) -> np.ndarray:
    """Run one operation on rows x: (R, width)."""
    out = np.zeros((len(x), width), np.float32)
    batch = BatchStruct(rows=len(x), nodes=1)
    batch.buffers[0], batch.widths[0] = x.ctypes.data, x.shape[1]
    batch.buffers[1], batch.widths[1] = out.ctypes.data, width
    pointers = {name: value.ctypes.data if isinstance(value, np.ndarray) else value for name, value in op.items()}
    ops = (Op * 1)(Op(source=0, target=1, num_in=x.shape[1], **pointers))
    library.draftwing_run(ops, 1, ctypes.byref(batch), 1)
    return out


def _tiles(weight: np.ndarray) -> np.ndarray:
    """(out, in) float32 in the kernel's layout: (tiles, in, 64)."""
    return np.ascontiguousarray(weight.reshape(-1, _TILE, weight.shape[1]).transpose(0, 2, 1))


def _near(result: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(result - expected).max() < 1e-5 * np.abs(expected).max())


def _products(library: ctypes.CDLL, x: np.ndarray, weight: np.ndarray) -> bool:
    """Correct, summed in the order of the inputs, and independent of the other rows."""
    x, weight = x.copy(), weight.copy()
    x[3], weight[5] = 0, 1
    x[3, 7:11] = 1e8, 1, -1e8, 1  # sums to 1 only in this order: 1e8 + 1 is 1e8
    op = {"kind": _LINEAR, "num_out": _OUT, "format": 0, "weight": _tiles(weight)}
    together = _run(library, x, _OUT, op)
    alone = np.concatenate([_run(library, np.ascontiguousarray(row[None]), _OUT, op) for row in x])
    others = np.arange(_ROWS) != 3
    exact = x[others].astype(np.float64) @ weight.T.astype(np.float64)
    return _near(together[others], exact) and np.array_equal(together, alone) and together[3, 5] == 1


def _norms(library: ctypes.CDLL, x: np.ndarray) -> bool:
    scale = np.linspace(0.5, 2, _IN, dtype=np.float32)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + _EPS) * scale
    return _near(_run(library, x, _IN, {"kind": _NORM, "eps": _EPS, "norm": scale}), expected)


def _activations(library: ctypes.CDLL, x: np.ndarray, weight: np.ndarray) -> bool:
    op = {"kind": _LINEAR, "num_out": _OUT, "format": 0, "epilogue": _SILU, "is_gated": 1, "weight": _tiles(weight)}
    gate, up = np.split(x.astype(np.float64) @ weight.T.astype(np.float64), 2, axis=1)
    return _near(_run(library, x, _OUT, op), gate / (1 + np.exp(-gate)) * up)


def _bytes(library: ctypes.CDLL, rng: np.random.Generator) -> bool:
    """Exact for rows and weights that fit in 8 bits: with few rows, and with enough rows for tiles."""
    return _byte_sums(library, rng, _ROWS, 40) and _byte_sums(library, rng, 37, 5 * 64 + 12)


def _byte_sums(library: ctypes.CDLL, rng: np.random.Generator, rows: int, width: int) -> bool:
    x = rng.integers(-126, 127, (rows, width)).astype(np.float32)
    x[:, 3] = 127
    weight = rng.integers(-127, 128, (_OUT, width)).astype(np.int8)
    packed = np.ascontiguousarray(weight.reshape(1, _TILE, -1, 4).transpose(0, 2, 1, 3))
    sums = 128 * weight.sum(1, dtype=np.int32)
    op = {"kind": _LINEAR, "num_out": _OUT, "format": 3, "weight": packed, "sums": sums}
    result = _run(library, x, _OUT, {**op, "scales": np.ones(_OUT, np.float32)})
    return np.array_equal(result, x @ weight.T.astype(np.float32))


def _widens(library: ctypes.CDLL, rng: np.random.Generator, kind: WeightFormat) -> bool:
    """Products of narrow weights equal those of their float32 values bit for bit, for any number of rows."""
    width = 3 * kind.inputs if kind.inputs < _IN else kind.inputs
    if kind.is_blocks:
        tile = _random_blocks(rng, kind, width, lambda shape: rng.uniform(-0.1, 0.1, shape))
    else:
        width = _IN
        expected = rng.standard_normal((_TILE, width + width % 2), np.float32)
        expected[:, width:] = 0
        if kind.name == "float16":
            tile = np.ascontiguousarray(expected.T[:width].astype(np.float16))
            expected = expected.astype(np.float16).astype(np.float32)
        else:
            expected = _bfloat16(expected)
            tile = _pairs(expected)
    wide = _wide(library, kind, tile, width)
    if not kind.is_blocks and not np.array_equal(wide, expected[:, :width]):
        return False
    x = rng.standard_normal((_ROWS, width), np.float32)
    op = {"kind": _LINEAR, "num_out": _TILE}
    plain = _run(library, x, _TILE, {**op, "format": 0, "weight": _tiles(wide)})
    for rows in (x, x[:1], x[:2], x[:5]):
        result = _run(library, np.ascontiguousarray(rows), _TILE, {**op, "format": kind.code, "weight": tile})
        if not np.array_equal(result, plain[: len(rows)]):
            return False
    return True


def _random_blocks(rng: np.random.Generator, kind: WeightFormat, width: int, scales_of: Any) -> np.ndarray:
    """A tile of random levels, (blocks, bytes), whose 16-bit numbers are ``scales_of`` their shape."""
    tile = rng.integers(0, 256, (width // kind.inputs, _TILE * kind.num_bytes), np.uint8)
    first, last = kind.scale_bytes
    end = tile.shape[1] - _TILE * (last - first)
    scales = scales_of((len(tile), _TILE * len(kind.halves))).astype(np.float16)
    tile[:, end - 2 * scales.shape[1] : end] = scales.view(np.uint8)
    if not kind.halves:
        tile[:, end:] = rng.integers(124, 130, tile[:, end:].shape)  # exponents
    return tile


def _wide(library: ctypes.CDLL, kind: WeightFormat, tile: np.ndarray, width: int) -> np.ndarray:
    """(64, in) float32: the weights of a tile."""
    outputs, wide = np.arange(_TILE), np.zeros((_TILE, width), np.float32)
    library.draftwing_rows(kind.code, tile.ctypes.data, width, outputs.ctypes.data, wide.ctypes.data, _TILE)
    return wide


def _blocks(library: ctypes.CDLL, rng: np.random.Generator, kind: WeightFormat) -> bool:
    """Exact for rows of whole numbers and scales that are powers of two: with few rows, and with enough for tiles."""
    return all(_block_products(library, rng, kind, rows) for rows in (_ROWS, 61))


def _block_products(library: ctypes.CDLL, rng: np.random.Generator, kind: WeightFormat, rows: int) -> bool:
    width = -(-320 // kind.inputs) * kind.inputs
    tile = _random_blocks(rng, kind, width, lambda shape: rng.choice([-0.5, 0.25, 1.0], shape))
    x = rng.integers(-20, 21, (rows, width)).astype(np.float32)
    x[:, ::16] = 127 * rng.choice([-1, 1], (rows, width // 16))  # the largest of each unit: a level is 1
    expected = x.astype(np.float64) @ _wide(library, kind, tile, width).T.astype(np.float64)
    op = {"kind": _LINEAR, "num_out": _TILE, "format": kind.code, "row_form": RowForm.LEVELS, "weight": tile}
    together = _run(library, x, _TILE, op)
    alone = _run(library, np.ascontiguousarray(x[2:3]), _TILE, op)
    return np.array_equal(together, expected) and np.array_equal(together[2:3], alone)


def _narrow(library: ctypes.CDLL, rng: np.random.Generator, form: RowForm, rows: int, width: int) -> bool:
    """Products of rounded or split rows are exact, summed in the order of ``native/rounded.h``."""
    x = rng.standard_normal((rows, width), np.float32)
    weight = np.pad(_bfloat16(rng.standard_normal((_TILE, width), np.float32)), ((0, 0), (0, width % 2)))
    op = {"kind": _LINEAR, "num_out": _TILE, "format": 1, "row_form": form, "weight": _pairs(weight)}
    parts = [_bfloat16(x)] if form == RowForm.ROUNDED else _split(x)
    sums = [np.zeros((rows, _TILE), np.float32) for _ in parts]
    for part, total in zip(parts, sums, strict=True):
        for start in range(0, width, 32):
            halves = np.zeros((2, rows, _TILE), np.float32)
            for i in range(start, min(start + 32, width)):
                halves[i % 2] += part[:, i, None] * weight[:, i]  # exact: a product of two such numbers has 16 bits
            total += halves[0] + halves[1]
    expected = sums[0] if len(sums) == 1 else sums[0] + (sums[1] + sums[2])
    return np.array_equal(_run(library, x, _TILE, op), expected)


def _split(numbers: np.ndarray) -> list[np.ndarray]:
    """Split numbers into three bfloat16 parts of 8 bits each."""
    parts = []
    for _ in range(3):
        parts.append((numbers.view(np.uint32) & 0xFFFF0000).view(np.float32))
        numbers = numbers - parts[-1]
    return parts


def _bfloat16(numbers: np.ndarray) -> np.ndarray:
    """Round to nearest even in bfloat16, as float32."""
    bits = numbers.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).view(np.float32)


def _pairs(weight: np.ndarray) -> np.ndarray:
    """(64, in) bfloat16 numbers in the kernel's layout, two inputs per word: (in / 2, 64, 2) uint16."""
    return (weight.view(np.uint32) >> 16).astype(np.uint16).reshape(_TILE, -1, 2).transpose(1, 0, 2).copy()


def _noise(library: ctypes.CDLL) -> bool:
    vocab, seed, position = 41, 2**40 + 7, 12
    result = np.zeros(vocab, np.float32)
    store = library.draftwing_noise_new(vocab, 2)
    library.draftwing_noise_copy(store, seed, position, 1, result.ctypes.data)
    library.draftwing_noise_free(store)
    return np.array_equal(result, KeyedNoise(vocab).at(seed, position).numpy())


def _draws(library: ctypes.CDLL) -> bool:
    vocab, rows = 300, 8
    scores = np.zeros((rows, vocab), np.float32)
    scores[0, [5, 16, 37]] = 1
    scores[1, 20], scores[2, 139] = np.nan, np.inf
    scores[3] = -np.inf
    seeds = np.array([-1] * 4 + [1, 2, 3, 4])
    whole, none = np.zeros(rows, np.int64), np.full(rows, -1)
    result = np.zeros((rows, 7), np.int64)
    store = library.draftwing_noise_new(vocab, 2)
    how = AcceptStruct(store, seeds.ctypes.data, whole.ctypes.data, None, result.ctypes.data)
    library.draftwing_accept(scores.ctypes.data, rows, 1, whole.ctypes.data, none.ctypes.data, ctypes.byref(how))
    library.draftwing_noise_free(store)
    noise = KeyedNoise(vocab)
    drawn = [int(noise.at(int(seed), 0).argmax()) for seed in seeds[4:]]
    return bool(result[:, 1].tolist() == [5, 20, 139, 0, *drawn] and result[:, 4].tolist() == [1, 0, 0, 0, 1, 1, 1, 1])
