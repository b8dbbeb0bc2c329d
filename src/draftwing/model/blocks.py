"""Products in 16 bits on a CPU, each row with bits of its own: only in blocks of sizes that were tried out.

Which code oneDNN runs for a bfloat16 product depends on the processor, on the shape and on what is fused into it, and
not all of it sums a row in the same order whatever stands beside it (on AMX, not with a residual added inside). So a
product here runs in blocks of certain sizes, padded with rows of zeros, with nothing added inside but the bias. Before
a size is used, it is tried on this machine with the matrix at hand: its rows must have the bits that they have in
blocks of the smallest size, at other places, in other company. Where not even the smallest size keeps rows apart, each
row runs in a block of its own: the same call with the same zeros around it. That is slow, and cannot go wrong.

What is tried is a sample of rows, each made so that one of its outputs shows the order of its sum: two inputs cancel
each other there, and are so large that what is added between them is rounded coarsely. It is a sample all the same. And
the same call on the same numbers must give the same bits as long as the number of threads stays; with another one,
sizes are tried again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["MIN_ROWS", "BlockProduct"]

MIN_ROWS = 4  # on AVX-512, 4 rows take a faster kernel than 1 or 2, and the same bits as any larger number
_TILE = 16  # rows that AMX takes at once: where 4 take another kernel than 16, everything is padded to 16
_SIZES: tuple[int, ...] = (*range(4, 16), *range(16, 32, 4), *range(32, 64, 8), *range(64, 257, 32))
_ROWS = 32  # of a sample
_LARGE = {
    torch.bfloat16: 2.0**20,
    torch.float16: 2.0**13,
}  # what cancels, in units of the other terms; fp16 ends at 65504

Product = Callable[[Tensor], Tensor]


@dataclass
class _Verdict:
    """What was found out about products of one kind and shape with one number of threads.

    Attributes:
        base: the smallest size whose rows have bits of their own; 0: there is none.
        agrees: whether blocks of other sizes give the same bits; only of those that were tried.
    """

    base: int
    agrees: dict[int, bool] = field(default_factory=dict)


_verdicts: dict[tuple[object, ...], _Verdict] = {}


class BlockProduct:
    """A matrix times rows in 16 bits.

    Args:
        product: (R, in) -> (R, out), of any number of rows.
        weight: (out, in), of which nothing but a few numbers is kept.
        kind: what besides its shape says which code runs, such as a bias: products of one kind and shape are tried
            once.
    """

    def __init__(self, product: Product, weight: Tensor, kind: str) -> None:
        self._product, self._num_out = product, weight.shape[0]
        self._key = (kind, *weight.shape, weight.dtype)
        self._pairs = _cancelling(weight.detach())
        self._wanted: dict[int, Tensor] = {}  # of the sample, by the number of threads; only where sizes are tried here
        self._verdict()

    @property
    def smallest(self) -> int:
        """The smallest block; 0 where each row runs in one of its own."""
        return self._verdict().base

    def __call__(self, x: Tensor) -> Tensor:
        """(R, in) -> (R, out)."""
        x, verdict, rows = x.contiguous(), self._verdict(), x.shape[0]
        if not verdict.base:
            parts = [self._padded(x[row : row + 1], MIN_ROWS) for row in range(rows)]
        else:
            parts, done = [], 0
            while done < rows:
                size = self._size(verdict, rows - done)
                parts.append(self._padded(x[done : done + size], size))
                done += size
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else x.new_empty((0, self._num_out))

    def _padded(self, x: Tensor, size: int) -> Tensor:
        missing = size - x.shape[0]
        return self._product(F.pad(x, (0, 0, 0, missing)))[:-missing] if missing else self._product(x)

    def _size(self, verdict: _Verdict, rows: int) -> int:
        """The smallest good size that holds ``rows``, or the largest below it."""
        at = sum(size < rows for size in _SIZES[:-1])
        for size in _SIZES[at::-1]:
            if size <= verdict.base:
                break
            if size not in verdict.agrees:
                sample, threads = self.sample(), torch.get_num_threads()
                if threads not in self._wanted:
                    self._wanted[threads] = self._blocks(sample, verdict.base)
                verdict.agrees[size] = self._same(size, sample, self._wanted[threads])
            if verdict.agrees[size]:
                return size
        return verdict.base

    # --- trying sizes out --------------------------------------------------------------------------------------------

    def _verdict(self) -> _Verdict:
        key = (*self._key, torch.get_num_threads())
        if key not in _verdicts:
            with torch.inference_mode():
                _verdicts[key] = self._try()
        return _verdicts[key]

    def _try(self) -> _Verdict:
        sample = self.sample()
        found = {size: self._blocks(sample, size) for size in (MIN_ROWS, _TILE)}
        apart = [size for size in found if self._same(size, sample, found[size])]
        if apart == [MIN_ROWS, _TILE] and not torch.equal(found[MIN_ROWS], found[_TILE]):
            apart.remove(MIN_ROWS)
        return _Verdict(min(apart, default=0))

    def sample(self) -> Tensor:
        """(R, in) rows whose bits show the order in which they are summed."""
        places, values = self._pairs
        x = torch.randn(_ROWS, self._key[2], generator=torch.Generator().manual_seed(0)).to(values.dtype)
        return x.scatter_(1, places, values)

    def _blocks(self, x: Tensor, size: int) -> Tensor:
        return torch.cat([self._product(part) for part in torch.split(x, size)])

    def _same(self, size: int, sample: Tensor, wanted: Tensor) -> bool:
        """Whether the rows of a sample, shuffled, have the wanted bits in blocks of ``size``."""
        whole = -(-len(sample) // size) * size
        order = torch.randperm(whole, generator=torch.Generator().manual_seed(size)) % len(sample)
        return torch.equal(self._blocks(sample[order], size), wanted[order])


def _cancelling(weight: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of a sample two inputs (R, 2) and their values (R, 2), which cancel each other in one output."""
    num_out, num_in = weight.shape
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randint(num_out, (_ROWS,), generator=generator)
    places = torch.rand(_ROWS, num_in, generator=generator).argsort(1)[:, :2]
    seen = weight[outputs].float()
    pairs = seen.gather(1, places)
    usual = seen.abs().mean(1, keepdim=True)
    large = _LARGE[weight.dtype] * usual / pairs.prod(1, keepdim=True).abs()
    most = 4 * _LARGE[weight.dtype] / pairs.abs().amax(1, keepdim=True)
    large = torch.minimum(large, most).nan_to_num(1.0).clamp(2.0**-60, 2.0**60)  # zeros cancel nothing
    scale = torch.exp2(large.log2().floor())  # of two: then both products are the same number, and exact
    crossed = pairs.flip(1) * torch.tensor([1.0, -1.0]) * scale
    return places, crossed.to(weight.dtype)
