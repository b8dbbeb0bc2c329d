"""Matrices as the CPU kernel reads them: see ``formats`` for how numbers are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.model.stored import Stored, stack
from draftwing.run.kernel.formats import FORMATS, WeightFormat, format_of

__all__ = ["MAX_LEVEL", "TILE", "Packed", "narrowed", "quantize_channels"]

TILE = 64  # outputs that the kernel computes together
MAX_LEVEL = 127  # of each sign
_INFINITE = 0x7C00  # the exponent of what is no number, in half precision
_CHUNK = 4096  # channels quantised at once: the float copies that this takes stay small


@dataclass(frozen=True)
class Packed:
    """A matrix as the kernel reads it.

    Attributes:
        num_in, num_out: of the product; ``num_out`` is half the matrix's rows where it is ``gated``.
        format: how its numbers are stored.
        weight: tiles of 64 outputs, which stand side by side: (tiles, in, 64) of plain numbers, of bfloat16 two inputs
            in a word, (tiles, in / 2, 64), of int8 four, (tiles, in / 4, 64); of blocks their words, then their halves,
            (tiles, blocks, ...).
        scales, sums: of int8, by output: what a level is worth, and what the rows' offset of 128 adds.
        bias: by output, or None.
        gated: gates (the first half of the rows) and what they let through (the second) lie in alternate tiles.
    """

    num_in: int
    num_out: int
    format: WeightFormat
    weight: Tensor
    scales: Tensor | None
    sums: Tensor | None
    bias: Tensor | None
    gated: bool

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, *, quantize: str | None = None, gated: bool = False) -> Packed:
        """Pack ``weight`` (out, in): float32 numbers that are exact in 16 bits take 16."""
        if quantize is None:
            plain = narrowed(weight)
            kind = format_of(plain.dtype)
            assert kind is not None
            return cls.of_stored([Stored(kind.name, plain.shape[1], plain)], bias, gated=gated)
        levels, scales = quantize_channels(weight)
        levels = F.pad(levels, (0, -weight.shape[1] % 4))
        parts = [_as(half, torch.int32) for half in levels.chunk(2 if gated else 1)]
        return cls(
            weight.shape[1], weight.shape[0] // len(parts), FORMATS[quantize], _tiles(parts, interleave=gated),
            _by_output(scales, gated), _by_output(128 * levels.sum(1, dtype=torch.int32), gated),
            _by_output(bias, gated), gated,
        )  # fmt: skip

    @classmethod
    def of_stored(cls, parts: Sequence[Stored], bias: Tensor | None, *, gated: bool = False) -> Packed:
        """Pack matrices of one input and one format, on top of each other, as they are stored.

        Raises:
            CheckpointError: a block's scale is NaN or infinite.
        """
        kind, num_in = FORMATS[parts[0].format], parts[0].num_in
        num_out = sum(part.num_out for part in parts)
        if gated and len(parts) != 2:
            whole = stack(parts)[0]
            parts = [Stored(kind.name, num_in, half) for half in whole.data.chunk(2)]
        elif not gated and any(part.num_out % TILE for part in parts[:-1]):
            parts = stack(parts)
        rows = [part.data for part in parts]
        if kind.is_blocks:
            weight = _block_tiles(rows, kind, interleave=gated)
        elif kind.name == "bfloat16":
            padded = [F.pad(each, (0, 1)) if num_in % 2 else each.contiguous() for each in rows]
            weight = _tiles([_as(each, torch.int32) for each in padded], interleave=gated)
        else:
            weight = _tiles(rows, interleave=gated)
        return cls(num_in, num_out // (2 if gated else 1), kind, weight, None, None, _by_output(bias, gated), gated)

    @property
    def num_bytes(self) -> int:
        """Bytes read for one forward."""
        return sum(part.nbytes for part in (self.weight, self.scales) if part is not None)


def narrowed(weight: Tensor) -> Tensor:
    """The same numbers in 16 bits where these hold them exactly: most checkpoints in float32 were made of such."""
    if weight.dtype != torch.float32:
        return weight
    for dtype in (torch.bfloat16, torch.float16):
        half = weight.to(dtype)
        # A look at the start first: it tells most matrices.
        if torch.equal(half[:1].float(), weight[:1]) and torch.equal(half.float(), weight):
            return half
    return weight


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix (out, in) as levels (out, in) int8, symmetric, and what one level of each output is worth, (out,)."""
    scales, levels = torch.empty(weight.shape[0]), torch.empty(weight.shape, dtype=torch.int8)
    for start in range(0, weight.shape[0], _CHUNK):
        part = weight[start : start + _CHUNK].float()
        own = (part.abs().amax(1) / MAX_LEVEL).clamp_min(torch.finfo(torch.float32).tiny)
        scales[start : start + _CHUNK] = own
        levels[start : start + _CHUNK] = (part / own[:, None]).round_().clamp_(-MAX_LEVEL, MAX_LEVEL)
    return levels, scales


# --- tiles -----------------------------------------------------------------------------------------------------------


def _as(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Its bytes as wider numbers; what a file holds may lie at any address."""
    flat = rows.reshape(-1)
    if flat.data_ptr() % dtype.itemsize or flat.storage_offset() * flat.element_size() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(*rows.shape[:-1], -1)


def _places(parts: Sequence[Tensor], tiles: Tensor, *, interleave: bool) -> list[Tensor]:
    """Where in ``tiles`` each part lies: one after the other, or two in alternate tiles."""
    if interleave:
        return [tiles[0::2], tiles[1::2]]
    return list(torch.split(tiles, [_num_tiles(part) for part in parts]))


def _num_tiles(rows: Tensor) -> int:
    return -(-rows.shape[0] // TILE)


def _fill(tiles: Tensor, rows: Tensor) -> None:
    """Rows (out, ...) into tiles (tiles, ..., 64), zeros behind the last."""
    whole, rest = divmod(rows.shape[0], TILE)
    tiles[:whole].copy_(rows[: whole * TILE].view(whole, TILE, *rows.shape[1:]).movedim(1, -1))
    if rest:
        tiles[whole].zero_()[..., :rest] = rows[whole * TILE :].movedim(0, -1)


def _tiles(parts: Sequence[Tensor], *, interleave: bool) -> Tensor:
    """Numbers (out, groups) of each part as (tiles, groups, 64)."""
    tiles = parts[0].new_empty(sum(map(_num_tiles, parts)), parts[0].shape[1], TILE)
    for part, place in zip(parts, _places(parts, tiles, interleave=interleave), strict=True):
        _fill(place, part)
    return tiles


def _block_tiles(parts: Sequence[Tensor], kind: WeightFormat, *, interleave: bool) -> Tensor:
    """Blocks (out, bytes of a row) of each part as (tiles, blocks, ...): the words of 64 outputs, then the halves."""
    start, stop = kind.words
    blocks, num_words = parts[0].shape[1] // kind.num_bytes, (stop - start) // 4
    tiles = torch.empty(sum(map(_num_tiles, parts)), blocks, 16 * kind.num_bytes, dtype=torch.int32)
    for part, place in zip(parts, _places(parts, tiles, interleave=interleave), strict=True):
        each = part.view(-1, blocks, kind.num_bytes)
        _fill(
            torch.unflatten(place[..., : TILE * num_words], 2, (num_words, TILE)),
            _as(each[..., start:stop], torch.int32),
        )
        halves = torch.stack([_as(each[..., at : at + 2], torch.int16)[..., 0] for at in kind.halves], -1)
        if bool(((halves & _INFINITE) == _INFINITE).any()):
            raise CheckpointError("a block's scale is NaN or infinite: download the file again")
        where = place.view(torch.int16)[..., 2 * TILE * num_words :]
        _fill(torch.unflatten(where, 2, (len(kind.halves), TILE)), halves)
    return tiles


def _by_output(numbers: Tensor | None, gated: bool) -> Tensor | None:
    """(out,) as the tiles lie, zeros where there is no output."""
    if numbers is None:
        return None
    parts = [part[:, None] for part in numbers.chunk(2 if gated else 1)]
    return _tiles(parts, interleave=gated).flatten()
