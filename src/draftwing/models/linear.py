"""8-bit products by oneDNN, and who may have them: the CPU kernel has its own (``run.kernel.packed``).

Only a quarter of the bytes is read. There is one scale for each output channel of the weight, and one for each row,
found as it comes: a row's numbers depend on itself alone. Between the scales there are sums of integers, which are
exact in any order, so that a row's bits are its own here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.cpu.layout import RowForm
from draftwing.cpu.library import required_kernel
from draftwing.cpu.packed import MAX_LEVEL, Packed, quantize_channels
from draftwing.cpu.program import Program, Traced, TracedIds, Workspace
from draftwing.errors import ConfigError, UnsupportedError
from draftwing.models.weights import Stored, stack

_pack, _product = torch.ops.onednn.qlinear_prepack.default, torch.ops.onednn.qlinear_pointwise.default

QUANTIZATIONS = ("int8",)
MAX_INPUTS = 2**31 // (255 * MAX_LEVEL)  # more could overflow a sum of 32 bits


def check_quantize(quantize: str | None, dtype: torch.dtype, device: torch.device, runs: str = "kernel") -> None:
    """Raise ConfigError or UnsupportedError where matrices cannot be quantised so; None is always right.

    ``runs``: see ``Layout``. The CPU kernel's sums of 8-bit products are exact on every processor.
    """
    if quantize is None:
        return
    if quantize not in QUANTIZATIONS:
        raise ConfigError(f"quantize must be one of {', '.join(QUANTIZATIONS)} or None, found {quantize!r:.60}")
    if device.type != "cpu":
        raise UnsupportedError(
            f"quantize={quantize!r} runs on a CPU alone, found device {str(device)!r}: choose device='cpu', or leave "
            f"quantize out"
        )
    if dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedError(
            f"quantize={quantize!r} goes with dtype float32 or bfloat16, found {str(dtype).removeprefix('torch.')}: "
            f"choose one of these, or leave quantize out"
        )
    if runs != "kernel" and not has_exact_int8():
        raise UnsupportedError(
            f"quantize={quantize!r} without the CPU kernel needs a CPU that multiplies 8-bit integers exactly (AVX-512 "
            f"VNNI, AMX, AVX-VNNI), and this one, or this build of PyTorch, does not: install a C++ compiler, with "
            f"which the kernel is built, or leave quantize out"
        )


class Int8Product:
    """A matrix (out, in) in 8 bits for rows in 8 bits: both symmetric, a scale for each channel and each row.

    oneDNN wants rows unsigned, 128 for zero; signed ones would run in its reference code, hundreds of times slower.
    """

    def __init__(self, weight: Tensor) -> None:
        num_out, num_in = weight.shape
        quantised, scales = quantize_channels(weight)
        self.packed: Tensor = _pack(quantised, None)
        self.scales = scales / MAX_LEVEL  # of a row whose largest number is 1
        self._zeros = torch.zeros(num_out, dtype=torch.int32)
        self._half = torch.full((1, num_in), 128.5)  # not one number: TensorIterator is slow with two broadcast inputs

    def forward(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """(R, in) -> (R, out). Few and small kernels: on small matrices they cost as much as the product."""
        wide = x if x.dtype == torch.float32 else x.float()
        largest = wide.abs().amax(1, keepdim=True)
        # To the next of the 255 levels: the conversion cuts off what half a level was added to. A row of zeros is
        # 0 / 0, NaN here, and some level or other after it; its largest number, zero, makes it zero again below.
        levels = torch.addcdiv(self._half, wide, largest, value=MAX_LEVEL).to(torch.uint8)
        out = self.product(levels)
        if residual is not None:
            out = torch.addcmul(residual if bias is None else residual + bias, out, largest)
        else:
            out = out.mul_(largest) if bias is None else torch.addcmul(bias, out, largest)
        return out if out.dtype == x.dtype else out.to(x.dtype)

    def product(self, levels: Tensor) -> Tensor:
        """(R, in) uint8 -> (R, out) float32."""
        args: tuple[Any, ...] = (self.packed, self.scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], "")
        out: Tensor = _product(levels, 1.0, 128, *args)
        return out


@cache
def has_exact_int8() -> bool:
    """Whether this machine's 8-bit products are exact: older ones add pairs of them in 16 bits, which saturates."""
    if not torch._C._has_mkldnn:
        return False
    try:
        found = Int8Product(torch.ones(32, 64)).product(torch.full((4, 64), 255, dtype=torch.uint8))
    except RuntimeError:
        return False
    return torch.allclose(found, torch.tensor(64.0), rtol=1e-5)


# Products in 16 bits on a CPU, each row with bits of its own: only in blocks of sizes that were tried out.
#
# Which code oneDNN runs for a bfloat16 product depends on the processor, on the shape and on what is fused into it, and
# not all of it sums a row in the same order whatever stands beside it (on AMX, not with a residual added inside). So a
# product here runs in blocks of certain sizes, padded with rows of zeros, with nothing added inside but the bias.
# Before
# a size is used, it is tried on this machine with the matrix at hand: its rows must have the bits that they have in
# blocks of the smallest size, at other places, in other company. Where not even the smallest size keeps rows apart,
# each
# row runs in a block of its own: the same call with the same zeros around it. That is slow, and cannot go wrong.
#
# What is tried is a sample of rows, each made so that one of its outputs shows the order of its sum: two inputs cancel
# each other there, and are so large that what is added between them is rounded coarsely. It is a sample all the same.
# And
# the same call on the same numbers must give the same bits as long as the number of threads stays; with another one,
# sizes are tried again.


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


# Matrix times rows, laid out for decoding: few rows, all of the weight read for each.
#
# On a CPU ``F.linear`` is slow for 2 to 16 rows, and a row's last bits depend on how many rows are beside it. oneDNN
# with prepacked weights has neither fault: on a 64 MB float32 matrix 8 rows cost 1.1 times one row (``F.linear``: 2.5
# times), and for two rows or more each row's bits are its own. Both are what verification lives on. In 16 bits the
# second is not so everywhere: there ``blocks`` runs only what was tried out.


_product_linear, _product_added = torch.ops.mkldnn._linear_pointwise.default, torch.ops.mkldnn._linear_pointwise.binary

_SAME = ("int8", "float32")  # formats in which the kernel also computes


def can_prepack(weight: Tensor) -> bool:
    """Whether oneDNN takes this weight prepacked and is the better choice for it."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def runs_as(matrices: Iterable[Linear]) -> str:
    """What computes them, each way once: see ``Linear.runs_as``."""
    return "; ".join(dict.fromkeys(matrix.runs_as for matrix in matrices))


@dataclass(frozen=True)
class Layout:
    """How matrices are laid out for what runs them.

    Attributes:
        runs: ``kernel`` for the CPU kernel's programs, ``torch`` prepacked where that wins, ``plain`` as they are.
        quantize: how, one of ``QUANTIZATIONS``, or None.
        expand: float32 even where a file holds smaller numbers, to compare with those.
        rounds: products are those of bfloat16, whose sums are float32: the CPU kernel's, where they are not quantised.
    """

    runs: str = "plain"
    quantize: str | None = None
    expand: bool = False
    rounds: bool = False

    @property
    def as_exact(self) -> Layout:
        """The same for a matrix that is never quantised."""
        return replace(self, quantize=None)


class Linear(nn.Module):
    """``x @ weight.T + bias`` with prepacked forms for inference.

    Args:
        weight: (out, in).
        bias: (out,) or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.requires_grad)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=bias.requires_grad)
        self.num_out, self.num_in = weight.shape
        self.dtype = weight.dtype
        self._packed: Tensor | None = None
        self._blocks: BlockProduct | None = None
        self._int8: Int8Product | None = None
        self._fused: tuple[Packed, ...] = ()
        self._expanded: tuple[str, ...] = ()  # formats of the file that the CPU kernel does not know

    @classmethod
    def of_stored(
        cls,
        parts: Sequence[Stored],
        bias: Tensor | None,
        quantize: str | None = None,
        *,
        gated: bool = False,
        rounds: bool = False,
    ) -> Linear:
        """Matrices of one input on top of each other, packed for the CPU kernel as a file holds them; see ``pack``.

        ``rounds``: all of them are stored in bfloat16, and rows are rounded to it.
        """
        found = cls(torch.empty(0, parts[0].num_in), bias)
        found.num_out = sum(part.num_out for part in parts)
        differ = len({part.format for part in parts}) > 1
        if quantize is not None or (gated and differ):
            plain = [part.expand() for part in parts]
            weight = plain[0] if len(plain) == 1 else torch.cat(plain)
            found._fused = (Packed.of(weight, bias, quantize=quantize, gated=gated),)
            if quantize is None:
                found._expanded = tuple(dict.fromkeys(part.was or part.format for part in parts))
            return found
        some = [[part] for part in stack(parts)] if differ else [parts]
        sizes = [sum(part.num_out for part in each) for each in some]
        biases = [None] * len(some) if bias is None else torch.split(bias, sizes)
        found._expanded = tuple(dict.fromkeys(part.was for part in parts if part.was))
        found._fused = tuple(
            Packed.of_stored(each, own, gated=gated, rounds=rounds) for each, own in zip(some, biases, strict=True)
        )
        return found

    @property
    def quantized(self) -> str | None:
        """How: one of ``QUANTIZATIONS``; None where it is not."""
        return "int8" if self._int8 is not None or "int8" in self.formats else None

    @property
    def formats(self) -> tuple[str, ...]:
        """How its numbers are stored, from the first output to the last: see ``run.kernel.formats``."""
        if self._fused:
            return tuple(part.format.name for part in self._fused)
        return ("int8",) if self._int8 is not None else (str(self.dtype).removeprefix("torch."),)

    @property
    def packed(self) -> tuple[Packed, ...]:
        """The matrix as the CPU kernel reads it, in parts that lie one below the other; only after ``pack``."""
        if not self._fused:
            raise ConfigError("a matrix was not packed for the CPU kernel: make it an attribute of the net")
        return self._fused

    @property
    def num_bytes(self) -> int:
        """Bytes read for one forward."""
        if self._fused:
            return sum(part.num_bytes for part in self._fused)
        if self._int8 is not None:
            return self.num_out * (self.num_in + self._int8.scales.element_size())
        return self.num_out * self.num_in * self.weight.element_size()

    def lay_out(self, layout: Layout, *, gated: bool = False) -> Linear:
        """Lay it out, once. ``gated``: see ``pack``."""
        if layout.runs == "kernel":
            self.pack(layout.quantize, gated=gated, rounds=layout.rounds)
        elif layout.quantize is not None:
            self.quantize(layout.quantize)
        elif layout.runs == "torch":
            self.prepack()
        return self

    @property
    def runs_as(self) -> str:
        """What computes it; a row's bits are its own but for ``plain`` products."""
        if self._fused:
            names = ", ".join(dict.fromkeys(self.formats))
            if self._fused[0].row_form == RowForm.ROUNDED:
                return f"CPU kernel, {names}"
            note = f" expanded from {', '.join(self._expanded)}" if self._expanded else ""
            return f"CPU kernel, {names}{note or ('' if names in _SAME else ' weights in float32 arithmetic')}"
        if self._int8 is not None:
            return "oneDNN, int8"
        name = str(self.dtype).removeprefix("torch.")
        if self._blocks is not None:
            how = f"blocks of {self._blocks.smallest} rows or more" if self._blocks.smallest else "one row at a time"
            return f"{'PyTorch' if self._packed is None else 'oneDNN'}, {name}, {how}"
        return f"PyTorch, {name}, plain" if self._packed is None else f"oneDNN, {name}"

    def prepack(self, *, keep: bool = False) -> None:
        """Reorder the weight for oneDNN where that wins; the plain copy is dropped unless ``keep``.

        In 16 bits on a CPU, with or without oneDNN, rows get bits of their own from here on (``BlockProduct``).
        """
        if self._packed is not None or self._int8 is not None or self._blocks is not None:
            return
        if can_prepack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
        if self.weight.device.type == "cpu" and self.dtype in (torch.bfloat16, torch.float16):
            kind = f"{'plain' if self._packed is None else 'packed'}, {'bias' if self.bias is not None else 'bare'}"
            self._blocks = BlockProduct(self._product, self.weight, kind)
        if self._packed is not None and not keep:
            self._drop()

    def pack(self, quantize: str | None = None, *, gated: bool = False, rounds: bool = False) -> None:
        """Lay a float32 matrix out for the CPU kernel's programs, in 8 bits where ``quantize`` says so.

        Numbers that are exact in 16 bits take no more.

        Args:
            gated: its first half are gates of its second. It then runs in programs alone, not by ``forward``.
            rounds: to bfloat16, and rows as they come; where ``quantize`` is None.
        """
        if not self._fused:
            bias = None if self.bias is None else self.bias.detach()
            self._fused = (Packed.of(self.weight.detach(), bias, quantize=quantize, gated=gated, rounds=rounds),)
            self._drop()

    def for_drafts(self, quantize: str | None) -> Linear | None:
        """This matrix fused, with ``quantize`` in place of float32 ones: itself, or a copy; None where it cannot be.

        For a net that reads a matrix of the target, which may run in PyTorch.
        """
        if self._fused and (quantize is None or self.quantized is not None):
            return self
        plain = self.plain()
        if plain.numel() == 0 or plain.dtype != torch.float32 or plain.device.type != "cpu":
            return None
        copy = Linear(plain, None if self.bias is None else self.bias.detach())
        copy.pack(quantize)
        return copy

    def quantize(self, how: str = "int8") -> None:
        """Keep the weight in 8 bits alone: another matrix, within about a percent. Not for a prepacked one.

        Raises:
            ConfigError, UnsupportedError: see ``check_quantize``; or the matrix is too wide.
        """
        if self._int8 is not None:
            return
        if self._packed is not None:
            raise ConfigError("a prepacked matrix cannot be quantised: quantise it instead of prepacking it")
        check_quantize(how, self.weight.dtype, self.weight.device, "torch")
        if self.num_in > MAX_INPUTS:
            raise UnsupportedError(
                f"quantize={how!r} takes matrices of at most {MAX_INPUTS} inputs, found {self.num_in}: leave "
                f"quantize out"
            )
        self._int8 = Int8Product(self.weight.detach())
        self._drop()

    @torch.no_grad()
    def refill(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Other numbers (out, in) in place of its own, laid out as these are; whatever runs it reads them from then on.

        Raises:
            ConfigError: it lies in several parts, or in a file's blocks.
            NotFiniteError: a number is NaN or infinite.
        """
        if len(self._fused) > 1:
            raise ConfigError("a matrix in several parts takes no other numbers: load it in one format")
        for part in self._fused:
            part.refill(weight.float(), bias)
        if self._int8 is not None:
            self._int8 = Int8Product(weight.to(self.dtype))
        elif self._packed is not None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(self.dtype), None)
        if self.weight.numel():
            self.weight.copy_(weight)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def plain(self) -> Tensor:
        """(out, in): its weight, or where that was laid out for the CPU kernel, what it stands for in float32."""
        if not self._fused:
            return self.weight.detach()
        return torch.cat([part.rows(torch.arange(part.num_out)) for part in self._fused])

    def _drop(self) -> None:
        self.weight = nn.Parameter(torch.empty(0, dtype=self.weight.dtype), requires_grad=False)

    def forward(self, x: Any, residual: Any = None) -> Any:
        """(R, in) -> (R, out); ``residual`` (R, out) is added in the same kernel where there is one."""
        if isinstance(x, Traced):
            return x.linear(self.packed, residual)
        if self._fused:
            return self._forward_fused(x, residual)
        if self._int8 is not None:
            return self._int8.forward(x, self.bias, residual)
        if self._blocks is not None:
            out = self._blocks(x)
            return out if residual is None else residual + out
        packed = self._packed
        if packed is None:
            plain = F.linear(x, self.weight, self.bias)
            return plain if residual is None else residual + plain
        rows = x.shape[0]
        if rows < MIN_ROWS:
            x = F.pad(x, (0, 0, 0, MIN_ROWS - rows))
            residual = None if residual is None else F.pad(residual, (0, 0, 0, MIN_ROWS - rows))
        out = self._product(x) if residual is None else _product_added(x, residual, packed, self.bias, "add")
        return out[:rows] if rows < MIN_ROWS else out

    def spread(self, x: Any, places: Tensor | None, width: int) -> Any:
        """(R, in) -> (R, width), each output in its place (out,) and -inf elsewhere; None: side by side."""
        if places is None:
            return self.forward(x)
        if isinstance(x, Traced):
            return x.linear(self.packed, spread=(places, width))
        out = self.forward(x)
        return out.new_full((*out.shape[:-1], width), float("-inf")).index_copy_(-1, places, out)

    def _product(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        out: Tensor = _product_linear(x, self._packed, self.bias, "none", [], "")
        return out

    def _forward_fused(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Alone, outside of any net: where training or an evaluation reads a head that was laid out for the kernel."""
        program = Program(required_kernel())
        given = program.given(self.num_in)
        result = program.output(given.linear(self.packed))
        program.finish()
        out = torch.empty(x.shape[0], self.num_out)
        places = {program.place(given.buffer): x.float().contiguous(), program.place(result): out}
        Workspace(program).run(x.shape[0], 1, places)
        return out if residual is None else residual + out


# The rows of the input tokens: a table for PyTorch, or packed for the CPU kernel.
#
# Shape suffixes: R rows, V vocabulary, H hidden.


class Embedding(nn.Module):
    """Rows (V, H), looked up by token ids.

    Args:
        table: (V, H), which a net may train; None where they are ``packed``, in float32 or what is widened to it.
    """

    def __init__(self, table: Tensor | None, packed: Packed | None = None) -> None:
        super().__init__()
        if isinstance(table, nn.Parameter):
            self.table: Tensor | None = table
        else:
            self.register_buffer("table", table, persistent=False)
        self.packed = packed

    @classmethod
    def of_stored(cls, stored: Stored) -> Embedding:
        """Packed for the CPU kernel as a file holds them."""
        return cls(None, Packed.of_stored([stored], None))

    @classmethod
    def shared_with(cls, head: Linear) -> Embedding:
        """The rows of an LM head that the CPU kernel reads, no byte of them twice."""
        (packed,) = head.packed
        return cls(None, packed)

    @property
    def shape(self) -> tuple[int, int]:
        """V and H."""
        if self.packed is not None:
            return self.packed.num_out, self.packed.num_in
        num_tokens, width = self._table.shape
        return num_tokens, width

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.packed is not None else self._table.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return torch.device("cpu") if self.packed is not None else self._table.device

    @property
    def _table(self) -> Tensor:
        assert self.table is not None
        return self.table

    def forward(self, ids: Any) -> Any:
        """(...) ids -> (..., H)."""
        if isinstance(ids, TracedIds):
            if self.packed is None:
                raise ConfigError("an embedding was not packed for the CPU kernel: make it an attribute of the net")
            return Traced.embedding(ids, self.packed)
        if self.packed is None:
            return F.embedding(ids, self._table)
        return self.packed.rows(ids.reshape(-1)).view(*ids.shape, -1)

    def plain(self) -> Tensor:
        """(V, H) as a table."""
        found: Tensor = self._table if self.packed is None else self.forward(torch.arange(self.shape[0]))
        return found

    def view(self) -> Embedding:
        """Another one with the same numbers: what is done to it later leaves this one as it is."""
        return Embedding(self.table, self.packed)

    def lay_out(self, layout: Layout) -> Embedding:
        """Pack it where the CPU kernel runs the net."""
        if layout.runs == "kernel" and self.packed is None:
            self.packed = Packed.of(self._table.detach(), None)
            self.table = None
        return self
