"""Matrices in the CPU kernel's layout; ``layout.WeightFormat`` describes how numbers are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.cpu.layout import FORMATS, RowForm, WeightFormat
from draftwing.cpu.library import required_kernel
from draftwing.errors import CheckpointError, ConfigError
from draftwing.models.weights import Stored, stack

TILE = 64  # outputs per tile
BLOCK = 32  # inputs that share a factor and an offset in 4 bits
MAX_LEVEL = 127
MIN_SPLIT = 32  # inputs per step of the matrix tiles
_CHUNK = 4096  # channels quantised at once, to bound the float copies


class NotFiniteError(CheckpointError):
    """A number of a matrix, or the scale of a block, is NaN or infinite."""


@dataclass(frozen=True)
class Packed:
    """A matrix in the kernel's layout.

    Attributes:
        num_in, num_out: inputs and outputs; ``num_out`` is half the matrix's rows if it is ``gated``.
        format: how its numbers are stored.
        weight: tiles of 64 interleaved outputs: (tiles, in, 64) for plain numbers; for bfloat16 two inputs per word,
            (tiles, in / 2, 64); for int8 four, (tiles, in / 4, 64); for blocks their words, then their halves, then
            their bytes, (tiles, blocks, ...).
        scales, sums: for int8, by output: the value of a level, and the contribution of the rows' offset of 128.
        bias: by output, or None.
        gated: whether gates (the first half of the rows) and gated values (the second) are in alternate tiles.
        row_form: how rows are converted before the product.
    """

    num_in: int
    num_out: int
    format: WeightFormat
    weight: Tensor
    scales: Tensor | None
    sums: Tensor | None
    bias: Tensor | None
    gated: bool
    row_form: RowForm = RowForm.AS_THEY_ARE

    @classmethod
    def of(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        *,
        quantize: str | None = None,
        gated: bool = False,
        rounds: bool = False,
    ) -> Packed:
        """Pack ``weight`` (out, in); float32 numbers that are exact in 16 bits take 16.

        Args:
            quantize: "int8", "q4" (see ``quantize_blocks``) or None. Blocks need a multiple of 32 inputs; others take 8
                bits.
        """
        if quantize == "q4" and weight.shape[1] % BLOCK == 0:
            return cls.of_stored([quantize_blocks(weight)], bias, gated=gated, arithmetic="int8")
        if quantize is None:
            stored = Stored("float32", weight.shape[1], weight.float())
            narrow = stored.rounded() if rounds else stored.narrowed()
            return cls.of_stored([narrow], bias, gated=gated, rounds=rounds)
        levels, scales = quantize_channels(weight)
        levels = F.pad(levels, (0, -weight.shape[1] % 4))
        parts = [half.contiguous().view(torch.uint8)[:, None] for half in levels.chunk(2 if gated else 1)]
        kind = FORMATS["int8"]
        return cls(
            weight.shape[1], weight.shape[0] // len(parts), kind, _tiles(parts, kind, interleave=gated),
            _by_output(scales, gated), _by_output(128 * levels.sum(1, dtype=torch.int32), gated),
            _by_output(bias, gated), gated,
        )  # fmt: skip

    @classmethod
    def of_stored(
        cls,
        parts: Sequence[Stored],
        bias: Tensor | None,
        *,
        gated: bool = False,
        rounds: bool = False,
        arithmetic: str = "float32",
    ) -> Packed:
        """Pack matrices of the same inputs and format, concatenated along the outputs.

        Args:
            rounds: whether rows are rounded to bfloat16, the format of the matrices. Otherwise rows are float32, which
                the processor's matrix tiles, if any, multiply in three parts.
            arithmetic: of matrices in blocks: "float32" or "int8".

        Raises:
            NotFiniteError: a number, or the scale of a block, is NaN or infinite.
        """
        kind, num_in = FORMATS[parts[0].format], parts[0].num_in
        num_out = sum(part.num_out for part in parts)
        if gated and len(parts) != 2:
            whole = stack(parts)[0]
            parts = [Stored(kind.name, num_in, half) for half in whole.data.chunk(2)]
        elif not gated and any(part.num_out % TILE for part in parts[:-1]):
            parts = stack(parts)
        weight = _tiles([_bytes_of(part) for part in parts], kind, interleave=gated)
        num_out //= 2 if gated else 1
        splits = kind.name == "bfloat16" and required_kernel().has_tiles and num_in >= MIN_SPLIT
        form = RowForm.ROUNDED if rounds else RowForm.SPLIT if splits else RowForm.AS_THEY_ARE
        if kind.is_blocks and arithmetic == "int8":
            form = RowForm.LEVELS
        return cls(num_in, num_out, kind, weight, None, None, _by_output(bias, gated), gated, form)

    def rows(self, outputs: Tensor) -> Tensor:
        """(R, in) float32: the weights of outputs (R,) int64.

        Raises:
            ConfigError: no such output, or a gated or int8 matrix.
        """
        if self.gated or not self.format.is_exact:
            raise ConfigError("rows of gated and int8 matrices cannot be read")
        if outputs.numel() and not 0 <= int(outputs.min()) <= int(outputs.max()) < self.num_out:
            raise ConfigError(f"outputs must be from 0 to {self.num_out - 1}, found {outputs.tolist()!r:.60}")
        return required_kernel().rows(self.format.code, self.weight, self.num_in, outputs)

    def refill(self, weight: Tensor, bias: Tensor | None = None, *, quantize: str | None = None) -> None:
        """Replace its numbers by others (out, in), rounded to its format, in the same memory, which programs refer to.

        Args:
            quantize: how it was quantized.

        Raises:
            ConfigError: the matrix is stored in the blocks of a GGUF file.
            NotFiniteError: a number is NaN or infinite.
        """
        kind = self.format
        if kind.is_blocks and quantize is None:
            raise ConfigError(f"a matrix in blocks ({kind.name}) cannot be refilled: load it in 16 bits or more")
        if quantize is None and kind.is_exact:
            rounded = Stored(kind.name, self.num_in, weight.to(getattr(torch, kind.name)))
            fresh = Packed.of_stored([rounded], bias, gated=self.gated)
        else:
            fresh = Packed.of(weight, bias, quantize=quantize or kind.name, gated=self.gated)
        for name in ("weight", "scales", "sums", "bias"):
            if getattr(self, name) is not None:
                getattr(self, name).copy_(getattr(fresh, name))

    @property
    def num_bytes(self) -> int:
        """Bytes read for one forward."""
        return sum(part.nbytes for part in (self.weight, self.scales) if part is not None)


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix (out, in) symmetrically: levels (out, in) int8, and the value of a level per output (out,)."""
    scales, levels = torch.empty(weight.shape[0]), torch.empty(weight.shape, dtype=torch.int8)
    for start in range(0, weight.shape[0], _CHUNK):
        part = weight[start : start + _CHUNK].float()
        scale = (part.abs().amax(1) / MAX_LEVEL).clamp_min(torch.finfo(torch.float32).tiny)
        scales[start : start + _CHUNK] = scale
        levels[start : start + _CHUNK] = (part / scale[:, None]).round_().clamp_(-MAX_LEVEL, MAX_LEVEL)
    return levels, scales


def quantize_blocks(weight: Tensor) -> Stored:
    """Quantise a matrix (out, in) to 4 bits in blocks of 32 inputs, each with a factor and an offset: GGUF's Q4_1.

    The levels between a block's extremes are rounded to, then factor and offset are fitted to them by least squares,
    and the levels are rounded to once more.
    """
    num_out, num_in = weight.shape
    data = torch.empty(num_out, num_in // BLOCK, 4 + BLOCK // 2, dtype=torch.uint8)
    for start in range(0, num_out, _CHUNK):
        x = weight[start : start + _CHUNK].float().reshape(-1, BLOCK)
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        levels = _levels(x, (high - low) / 15, low)
        spread, mean = levels - levels.mean(1, keepdim=True), x.mean(1, keepdim=True)
        variance = (spread * spread).sum(1, keepdim=True)
        factor = ((spread * x).sum(1, keepdim=True) / variance.clamp_min(1)).half()  # 0 if all weights are equal
        offset = (mean - factor.float() * levels.mean(1, keepdim=True)).half()
        whole = _levels(x, factor.float(), offset.float()).to(torch.uint8)
        parts = (factor.view(torch.uint8), offset.view(torch.uint8), whole[:, :16] | whole[:, 16:] << 4)
        data[start : start + _CHUNK] = torch.cat(parts, 1).view(-1, *data.shape[1:])
    return Stored("Q4_1", num_in, data.flatten(1))


def _levels(x: Tensor, factor: Tensor, offset: Tensor) -> Tensor:
    return ((x - offset) / factor.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(0, 15)


# --- tiles -----------------------------------------------------------------------------------------------------------


def _bytes_of(part: Stored) -> Tensor:
    """(out, blocks, bytes) uint8; plain numbers are one block, padded to an even number for bfloat16."""
    kind = FORMATS[part.format]
    if kind.is_blocks:
        return part.data.view(part.num_out, -1, kind.num_bytes)
    rows = part.data if kind.name != "bfloat16" or part.num_in % 2 == 0 else F.pad(part.data, (0, 1))
    return rows.contiguous().view(torch.uint8)[:, None]


def _tiles(parts: Sequence[Tensor], kind: WeightFormat, *, interleave: bool) -> Tensor:
    """Rows (out, blocks, bytes) of each part as tiles of 64 outputs, the parts in sequence or in alternate tiles.

    Returns (tiles, numbers, 64) for plain numbers, (tiles, blocks, words, halves and bytes) for blocks.
    """
    kernel, counts = required_kernel(), [-(-len(part) // TILE) for part in parts]
    _, blocks, num_bytes = parts[0].shape
    size = 2 if kind.name == "float16" else 4
    dtype = torch.int16 if size == 2 else torch.int32
    tiles = kernel.room(
        sum(counts), blocks, num_bytes // size * TILE if not kind.is_blocks else 16 * num_bytes, dtype=dtype
    )
    places = [tiles[0::2], tiles[1::2]] if interleave else list(torch.split(tiles, counts))
    numbers = kind.parts if kind.is_blocks else [(kind.code, 0, num_bytes // size, size)]
    for part, place in zip(parts, places, strict=True):
        is_finite, to = True, place.view(torch.uint8)
        for code, start, count, width in numbers:
            is_finite &= kernel.pack(code, part, to, start, count)
            to = to[..., TILE * count * width :]
        if not is_finite:
            raise NotFiniteError("a weight is NaN or infinite")
    return tiles if kind.is_blocks else tiles.view(len(tiles), -1, TILE)


def _by_output(numbers: Tensor | None, gated: bool) -> Tensor | None:
    """(out,) in the order of the tiles, zeros for padding."""
    if numbers is None:
        return None
    halves = numbers.chunk(2 if gated else 1)
    tiles = [F.pad(half, (0, -len(half) % TILE)).view(-1, TILE) for half in halves]
    return torch.stack(tiles, 1).flatten() if gated else tiles[0].flatten().contiguous()
