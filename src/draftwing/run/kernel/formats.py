"""How a matrix may lie in memory: one table for checkpoints, GGUF files and ``quantize``.

Every format but int8 is exact: the CPU kernel widens its numbers to float32 in registers, then multiplies and sums as
it does with float32 weights, so that a text is that of the float32 expansion to the bit, while a forward reads the
format's own bytes. On matrix tiles float32 rows and weights in bfloat16 are multiplied exactly as well, but summed in
another order (``RowForm.SPLIT``). In int8 rows are rounded too: it is another model, close to the first.

GGUF's blocks are described where they come from, in ggml's ``ggml-common.h``. Of each the kernel wants to know which
bytes are 32-bit words (levels and packed scales) and which are 16-bit numbers (scales and offsets of a block): of 64
outputs these lie side by side, word by word, otherwise as the file holds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

__all__ = ["BLOCKS", "FORMATS", "PLAIN", "RowForm", "WeightFormat", "format_of"]


class RowForm(IntEnum):
    """What becomes of float32 rows before they are multiplied with weights in bfloat16."""

    AS_THEY_ARE = 0
    ROUNDED = 1  # to bfloat16
    SPLIT = 2  # each number into three of bfloat16 whose sum it is: float32 arithmetic on matrix tiles


@dataclass(frozen=True)
class WeightFormat:
    """One way to hold a matrix (out, in).

    Attributes:
        name: as checkpoints, GGUF files and ``quantize`` call it.
        code: its number in ``native/formats.h``.
        inputs: of a block, whose numbers are stored together.
        num_bytes: of a block.
        exact: what the products are equal to.
        fast_on: the processors on which it gains.
        dtype: of plain numbers; None for blocks and levels.
        halves: where in a block its 16-bit numbers begin.
        words: where in a block its 32-bit words begin and end.
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

    @property
    def bytes_per_weight(self) -> float:
        """Without what a matrix has once for each output."""
        return self.num_bytes / self.inputs

    @property
    def is_exact(self) -> bool:
        """Whether no weight is rounded: products are those of the float32 expansion, to the bit but on matrix tiles."""
        return self.name != "int8"

    @property
    def is_blocks(self) -> bool:
        """Whether it is one of GGUF's block formats."""
        return self.words != (0, 0)


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
)

FORMATS = {each.name: each for each in _ALL}
PLAIN = {each.dtype: each for each in _ALL if each.dtype is not None}
BLOCKS = tuple(each.name for each in _ALL if each.is_blocks)


def format_of(dtype: torch.dtype) -> WeightFormat | None:
    """The format of plain numbers of a dtype; None where the kernel has none (float64)."""
    return PLAIN.get(dtype)
