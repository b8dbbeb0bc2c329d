"""Matrices as the CPU kernel reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["MAX_LEVEL", "TILE", "Packed", "quantize_channels"]

TILE = 64  # outputs that the kernel computes together
MAX_LEVEL = 127  # of each sign
_CHUNK = 4096  # channels quantised at once: the float copies that this takes stay small


@dataclass(frozen=True)
class Packed:
    """A matrix as the kernel reads it.

    Attributes:
        num_in, num_out: of the product; ``num_out`` is half the matrix's rows where it is ``gated``.
        bits: 32 or 8.
        weight: tiles of 64 outputs: (tiles, in, 64) float32, or (tiles, in / 4, 64, 4) int8.
        scales, sums: of int8, by output: what a level is worth, and what the rows' offset of 128 adds.
        bias: by output, or None.
        gated: gates (the first half of the rows) and what they let through (the second) lie in alternate tiles.
    """

    num_in: int
    num_out: int
    bits: int
    weight: Tensor
    scales: Tensor | None
    sums: Tensor | None
    bias: Tensor | None
    gated: bool

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, *, bits: int = 32, gated: bool = False) -> Packed:
        """Pack ``weight`` (out, in) float32."""
        num_out, num_in = weight.shape
        if gated:
            num_out //= 2
            weight = _interleave(weight)
            bias = None if bias is None else _interleave(bias[:, None])[:, 0]
        padding = -weight.shape[0] % TILE
        weight = F.pad(weight, (0, 0, 0, padding)) if padding else weight
        bias = None if bias is None else F.pad(bias, (0, weight.shape[0] - bias.shape[0])).contiguous()
        tiles = weight.shape[0] // TILE
        if bits == 32:
            laid_out = weight.view(tiles, TILE, num_in).transpose(1, 2).contiguous()
            return cls(num_in, num_out, bits, laid_out, None, None, bias, gated)
        levels, scales = quantize_channels(weight)
        levels = F.pad(levels, (0, -num_in % 4))
        sums = 128 * levels.sum(1, dtype=torch.int32)
        laid_out = levels.view(tiles, TILE, -1, 4).transpose(1, 2).contiguous()
        return cls(num_in, num_out, bits, laid_out, scales, sums, bias, gated)

    def plain(self) -> Tensor:
        """The matrix (out, in) float32 again, where it was float32 and is not gated."""
        assert self.bits == 32
        assert not self.gated
        return self.weight.transpose(1, 2).reshape(-1, self.num_in)[: self.num_out]

    @property
    def num_bytes(self) -> int:
        """Bytes read for one forward."""
        return sum(part.nbytes for part in (self.weight, self.scales) if part is not None)


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix (out, in) as levels (out, in) int8, symmetric, and what one level of each output is worth, (out,)."""
    scales, levels = torch.empty(weight.shape[0]), torch.empty(weight.shape, dtype=torch.int8)
    for start in range(0, weight.shape[0], _CHUNK):
        part = weight[start : start + _CHUNK].float()
        own = (part.abs().amax(1) / MAX_LEVEL).clamp_min(torch.finfo(torch.float32).tiny)
        scales[start : start + _CHUNK] = own
        levels[start : start + _CHUNK] = (part / own[:, None]).round_().clamp_(-MAX_LEVEL, MAX_LEVEL)
    return levels, scales


def _interleave(rows: Tensor) -> Tensor:
    """(2 W, ...) -> tiles of the first half before those of the second, each half padded to whole tiles."""
    half = rows.shape[0] // 2
    padded = [F.pad(part, (0, 0, 0, -half % TILE)).view(-1, TILE, rows.shape[1]) for part in (rows[:half], rows[half:])]
    return torch.stack(padded, 1).reshape(-1, rows.shape[1])
