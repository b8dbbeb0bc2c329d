"""A matrix as a file holds it, before it is laid out for what runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwing.run.kernel.formats import FORMATS

__all__ = ["Stored", "stack"]

_PIECE = 1 << 24  # weights expanded at a time: what that takes besides stays small


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

    def expanded(self) -> Stored:
        """The same numbers in float32."""
        return replace(self, format="float32", data=self.expand())

    def expand(self) -> Tensor:
        """(out, in) float32: exactly what the format says."""
        if not FORMATS[self.format].is_blocks:
            return self.data.float()
        import gguf  # here, since it takes a while

        kind = gguf.GGMLQuantizationType[self.format]
        out = torch.empty(self.num_out, self.num_in)
        step = max(1, _PIECE // self.num_in)
        for start in range(0, self.num_out, step):
            part = gguf.quants.dequantize(self.data[start : start + step].numpy(), kind)
            out[start : start + step] = torch.from_numpy(part)
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
