"""A matrix as a file holds it, before it is laid out for what runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwing.run.kernel.formats import FORMATS

__all__ = ["Stored", "dequantized", "joined", "stack"]

_PIECE = 1 << 22  # weights expanded at a time: what that takes besides stays small


@dataclass(frozen=True)
class Stored:
    """A matrix (out, in) in one of ``run.kernel.formats``.

    Attributes:
        format: its name.
        num_in: inputs.
        data: plain numbers (out, in), or GGUF's blocks (out, bytes of a row) uint8 as the file holds them.
        was: the file's own format, where it was expanded because the kernel does not know it.
    """

    format: str
    num_in: int
    data: Tensor
    was: str = ""

    @property
    def num_out(self) -> int:
        """Outputs."""
        return self.data.shape[0]

    def rows(self, order: Tensor) -> Stored:
        """Its outputs in another order, or some of them."""
        return replace(self, data=self.data[order])

    def narrowed(self) -> Stored:
        """The same numbers in 16 bits where these hold float32 ones exactly: many checkpoints were made of such."""
        if self.format != "float32" or self.was:
            return self
        for dtype in (torch.bfloat16, torch.float16):
            half = self.data[:1].to(dtype)
            if not torch.equal(half.float(), self.data[:1]):
                continue  # the start tells most matrices
            half = self.data.to(dtype)
            if torch.equal(half.float(), self.data):
                return replace(self, format=str(dtype).removeprefix("torch."), data=half)
        return self

    def rounded(self) -> Stored:
        """The numbers of bfloat16 that are nearest to these."""
        if self.format == "bfloat16":
            return self
        dtype = torch.bfloat16
        if FORMATS[self.format].is_blocks:
            parts = dequantized(self.data, self.format, self.num_in)
            return Stored("bfloat16", self.num_in, joined(parts, self.num_out, self.num_in, dtype))
        return Stored("bfloat16", self.num_in, self.data.to(dtype))

    def expanded(self) -> Stored:
        """The same numbers in float32."""
        return replace(self, format="float32", data=self.expand())

    def expand(self) -> Tensor:
        """(out, in) float32: exactly what the format says."""
        if not FORMATS[self.format].is_blocks:
            return self.data.float()
        return joined(dequantized(self.data, self.format, self.num_in), self.num_out, self.num_in)


def dequantized(blocks: Tensor, kind: str, num_in: int) -> Iterator[Tensor]:
    """GGUF's blocks (out, bytes of a row) uint8 as float32, some rows (rows, in) at a time.

    Raises:
        NotImplementedError: a format that ``gguf`` cannot expand.
    """
    import gguf  # here, since it takes a while

    step = max(1, _PIECE // num_in)
    for start in range(0, blocks.shape[0], step):
        with np.errstate(all="ignore"):  # numbers that are not finite are whoever reads them to refuse
            part: Any = gguf.quants.dequantize(blocks[start : start + step].numpy(), gguf.GGMLQuantizationType[kind])
        yield torch.from_numpy(np.ascontiguousarray(part, dtype=np.float32))


def joined(parts: Iterable[Tensor], num_out: int, num_in: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Some rows after the other as one matrix (out, in), with little memory beside."""
    out, at = torch.empty(num_out, num_in, dtype=dtype), 0
    for part in parts:
        out[at : at + part.shape[0]] = part
        at += part.shape[0]
    return out


def stack(parts: Sequence[Stored]) -> list[Stored]:
    """Matrices of one input on top of each other: neighbours of one format become one."""
    found: list[Stored] = []
    for part in parts:
        if found and found[-1].format == part.format:
            last = found.pop()
            part = replace(last, data=torch.cat((last.data, part.data)), was=last.was or part.was)
        found.append(part)
    return found
