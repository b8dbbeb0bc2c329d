"""Matrices laid out for decoding: few rows, and all of the weight read for each. 8- and 16-bit products, embeddings.

On a CPU ``F.linear`` is slow for 2 to 16 rows, and the last bits of a row depend on how many rows are in the batch.
oneDNN with prepacked weights has neither fault in float32: on 64 MB, 8 rows cost 1.1 times one row (``F.linear``:
2.5 times), and from two rows on a row's bits do not depend on the others. Verification needs both. In 16 bits
``BlockProduct`` ensures the second, in 8 bits ``Int8Product``. The formats of the CPU kernel are in ``cpu.packed``.

Shape suffixes: R rows, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.cpu.layout import RowForm
from draftwing.cpu.library import required_kernel
from draftwing.cpu.packed import MAX_LEVEL, Packed, quantize_channels
from draftwing.cpu.program import Program, Traced, TracedIds, Workspace
from draftwing.errors import ConfigError, UnsupportedError, shown
from draftwing.models.weights import Stored, stack

_int8_pack, _int8_product = torch.ops.onednn.qlinear_prepack.default, torch.ops.onednn.qlinear_pointwise.default
_product_linear, _product_added = torch.ops.mkldnn._linear_pointwise.default, torch.ops.mkldnn._linear_pointwise.binary

# --- 8 bits by oneDNN ------------------------------------------------------------------------------------------------

_MAX_INPUTS = 2**31 // (255 * MAX_LEVEL)  # more could overflow a sum of 32 bits


def check_quantize(quantize: str | None, dtype: torch.dtype, device: torch.device, runs: str = "kernel") -> None:
    """Check that matrices can be quantised, if at all. The CPU kernel's int8 products are exact on every processor."""
    if quantize is None:
        return
    if not isinstance(quantize, str) or quantize not in ("int8", "q4"):
        raise ConfigError(f"quantize must be int8, q4 or None, found {shown(quantize)}")
    if device.type != "cpu":
        raise UnsupportedError(
            f"quantize={quantize!r} does not run on {str(device)!r}: choose device='cpu', or leave quantize out"
        )
    if dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedError(
            f"quantize={quantize!r} needs dtype float32 or bfloat16, found {str(dtype).removeprefix('torch.')}: choose "
            f"one of these, or leave quantize out"
        )
    if runs != "kernel" and quantize == "q4":
        raise UnsupportedError(
            "quantize='q4' runs in the CPU kernel alone, which is not available for this model (see draftwing info): "
            "choose quantize='int8', or leave quantize out"
        )
    if runs != "kernel" and not has_exact_int8():
        raise UnsupportedError(
            f"quantize={quantize!r} without the CPU kernel needs a CPU that multiplies 8-bit integers exactly (AVX-512 "
            f"VNNI, AMX, AVX-VNNI), and this one, or this build of PyTorch, does not: install a C++ compiler, with "
            f"which the kernel is built, or leave quantize out"
        )


def check_arithmetic(arithmetic: str | None) -> None:
    """Raise ConfigError unless it is "int8", "float32" or None."""
    if arithmetic is not None and (not isinstance(arithmetic, str) or arithmetic not in ("int8", "float32")):
        raise ConfigError(f"arithmetic must be int8, float32 or None, found {shown(arithmetic)}")


class Int8Product:
    """A matrix (out, in) in 8 bits, times rows in 8 bits: symmetric, with a scale for each channel and each row.

    Sums are of integers, exact in any order, so a row's result does not depend on other rows. oneDNN expects unsigned
    rows with 128 for zero; signed ones would run in its reference code, hundreds of times slower.
    """

    def __init__(self, weight: Tensor) -> None:
        num_out, num_in = weight.shape
        quantised, scales = quantize_channels(weight)
        self._packed: Tensor = _int8_pack(quantised, None)
        self._scales = scales / MAX_LEVEL  # for rows whose largest number is 1
        self._zeros = torch.zeros(num_out, dtype=torch.int32)
        self._half = torch.full((1, num_in), 128.5)  # not one number: TensorIterator is slow with two broadcast inputs
        self.num_bytes = num_out * (num_in + scales.element_size())

    def forward(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """(R, in) -> (R, out). Few and small kernels: on small matrices they cost as much as the product."""
        wide = x if x.dtype == torch.float32 else x.float()
        largest = wide.abs().amax(1, keepdim=True)
        # Rounds to the nearest of 255 levels: half a level is added, and the conversion truncates. A row of zeros is
        # 0 / 0, NaN here and any level after it; its largest number, zero, makes it zero again below.
        levels = torch.addcdiv(self._half, wide, largest, value=MAX_LEVEL).to(torch.uint8)
        out = self.product(levels)
        if residual is not None:
            out = torch.addcmul(residual if bias is None else residual + bias, out, largest)
        else:
            out = out.mul_(largest) if bias is None else torch.addcmul(bias, out, largest)
        return out if out.dtype == x.dtype else out.to(x.dtype)

    def product(self, levels: Tensor) -> Tensor:
        """(R, in) uint8 -> (R, out) float32."""
        args: tuple[Any, ...] = (self._packed, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], "")
        out: Tensor = _int8_product(levels, 1.0, 128, *args)
        return out


@cache
def has_exact_int8() -> bool:
    """Return True if PyTorch's 8-bit products are exact here: older CPUs add pairs in 16 bits, which saturates."""
    if not torch._C._has_mkldnn:
        return False
    try:
        out = Int8Product(torch.ones(32, 64)).product(torch.full((4, 64), 255, dtype=torch.uint8))
    except RuntimeError:
        return False
    return torch.allclose(out, torch.tensor(64.0), rtol=1e-5)


# --- 16 bits on a CPU ------------------------------------------------------------------------------------------------

MIN_ROWS = 4  # on AVX-512, 4 rows take a faster kernel than 1 or 2, and give the same bits as any larger number
_TILE = 16  # rows of an AMX tile
_SIZES: tuple[int, ...] = (*range(4, 16), *range(16, 32, 4), *range(32, 64, 8), *range(64, 257, 32))
_SAMPLE_ROWS = 32
# The terms that cancel, in units of the others; float16 ends at 65504.
_LARGE = {torch.bfloat16: 2.0**20, torch.float16: 2.0**13}


@dataclass
class _Verdict:
    """Findings about products of one kind and shape with one number of threads."""

    base: int  # the smallest block whose rows do not depend on each other; 0 if there is none
    # for each larger block that was tried, True if it gives the same bits
    agrees: dict[int, bool] = field(default_factory=dict)


_verdicts: dict[tuple[object, ...], _Verdict] = {}


class BlockProduct:
    """A matrix times rows in 16 bits, in blocks of such sizes that a row's bits do not depend on other rows.

    oneDNN chooses its code by processor, shape and fused operations, and not every code sums a row in the same order
    whatever the other rows are (on AMX, not with a fused residual). So only the bias is fused, blocks are padded with
    zeros, and a size is used only after a trial on this machine with this matrix: its rows must have the bits that they
    have in blocks of the smallest size, at other places and among other rows. If not even the smallest size passes,
    each row runs in its own block, which is slow and always right.

    The trial runs a sample of rows. In each, two large inputs cancel each other in one output, so that the numbers
    added between them are rounded coarsely and reveal the order of the sum. With another number of threads, sizes are
    tried again.

    Args:
        product: (R, in) -> (R, out), of any number of rows.
        weight: (out, in), of which only a few numbers are kept.
        kind: names everything besides shape and dtype that decides which code runs; each kind and shape is tried once.
    """

    def __init__(self, product: Callable[[Tensor], Tensor], weight: Tensor, kind: str) -> None:
        self._product, self._num_out = product, weight.shape[0]
        self._key = (kind, *weight.shape, weight.dtype)
        self._pairs = _cancelling(weight.detach())
        self._expected: dict[int, Tensor] = {}  # products of the sample, by number of threads
        self._verdict()

    @property
    def smallest(self) -> int:
        """The smallest block; 0 if each row runs in its own block."""
        return self._verdict().base

    def __call__(self, x: Tensor) -> Tensor:
        """(R, in) -> (R, out)."""
        x, verdict, rows, parts, done = x.contiguous(), self._verdict(), x.shape[0], [], 0
        while done < rows:
            size = self._size(verdict, rows - done) if verdict.base else MIN_ROWS
            part = x[done : done + (size if verdict.base else 1)]
            missing = size - part.shape[0]
            parts.append(self._product(F.pad(part, (0, 0, 0, missing)))[:-missing] if missing else self._product(part))
            done += part.shape[0]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else x.new_empty((0, self._num_out))

    def _size(self, verdict: _Verdict, rows: int) -> int:
        """The largest usable block of at most the next size above ``rows``."""
        index = sum(size < rows for size in _SIZES[:-1])
        for size in _SIZES[index::-1]:
            if size <= verdict.base:
                break
            if size not in verdict.agrees:
                sample, threads = self.sample(), torch.get_num_threads()
                if threads not in self._expected:
                    self._expected[threads] = self._run_blocks(sample, verdict.base)
                verdict.agrees[size] = self._is_same(size, sample, self._expected[threads])
            if verdict.agrees[size]:
                return size
        return verdict.base

    def _verdict(self) -> _Verdict:
        key = (*self._key, torch.get_num_threads())
        if key not in _verdicts:
            with torch.inference_mode():
                sample = self.sample()
                outputs = {size: self._run_blocks(sample, size) for size in (MIN_ROWS, _TILE)}
                usable = [size for size, out in outputs.items() if self._is_same(size, sample, out)]
                # If 4 rows take another kernel than 16, everything is padded to 16.
                if usable == [MIN_ROWS, _TILE] and not torch.equal(outputs[MIN_ROWS], outputs[_TILE]):
                    usable.remove(MIN_ROWS)
                _verdicts[key] = _Verdict(min(usable, default=0))
        return _verdicts[key]

    def sample(self) -> Tensor:
        """(R, in) rows whose bits reveal the order in which they are summed."""
        places, values = self._pairs
        x = torch.randn(_SAMPLE_ROWS, self._key[2], generator=torch.Generator().manual_seed(0)).to(values.dtype)
        return x.scatter_(1, places, values)

    def _run_blocks(self, x: Tensor, size: int) -> Tensor:
        return torch.cat([self._product(part) for part in torch.split(x, size)])

    def _is_same(self, size: int, sample: Tensor, expected: Tensor) -> bool:
        """True if the rows of a sample, shuffled, have the expected bits in blocks of ``size``."""
        whole = -(-len(sample) // size) * size
        order = torch.randperm(whole, generator=torch.Generator().manual_seed(size)) % len(sample)
        return torch.equal(self._run_blocks(sample[order], size), expected[order])


def _cancelling(weight: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of a sample, two inputs (R, 2) and their values (R, 2), which cancel each other in one output."""
    num_out, num_in = weight.shape
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randint(num_out, (_SAMPLE_ROWS,), generator=generator)
    places = torch.rand(_SAMPLE_ROWS, num_in, generator=generator).argsort(1)[:, :2]
    rows = weight[outputs].float()
    pairs = rows.gather(1, places)
    large = _LARGE[weight.dtype] * rows.abs().mean(1, keepdim=True) / pairs.prod(1, keepdim=True).abs()
    limit = 4 * _LARGE[weight.dtype] / pairs.abs().amax(1, keepdim=True)
    large = torch.minimum(large, limit).nan_to_num(1.0).clamp(2.0**-60, 2.0**60)  # zeros cancel nothing
    scale = torch.exp2(large.log2().floor())  # a power of two: both products are the same number, and exact
    crossed = pairs.flip(1) * torch.tensor([1.0, -1.0]) * scale
    return places, crossed.to(weight.dtype)


# --- matrices --------------------------------------------------------------------------------------------------------


def can_prepack(weight: Tensor) -> bool:
    """Return True if oneDNN takes this weight prepacked and is the better choice for it."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def runs_as(matrices: Iterable[Linear]) -> str:
    """The distinct ``Linear.runs_as`` of several matrices."""
    return "; ".join(dict.fromkeys(matrix.runs_as for matrix in matrices))


@dataclass(frozen=True)
class Layout:
    """How matrices are laid out."""

    # ``kernel`` for the CPU kernel's programs, ``torch`` prepacked if that is faster, ``plain`` unchanged
    runs: str = "plain"
    quantize: str | None = None  # "int8", "q4" or None
    expand: bool = False  # float32 even if a file holds smaller numbers, for comparisons
    rounds: bool = False  # the CPU kernel's products are those of bfloat16, with float32 sums, unless quantised
    arithmetic: str = "float32"  # arithmetic of GGUF blocks in the CPU kernel: "float32", or "int8" products


class Linear(nn.Module):
    """``x @ weight.T + bias`` with prepacked forms for inference; the weight is (out, in)."""

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
        self.quantized: str | None = None  # "int8" or "q4"
        self._expanded: tuple[str, ...] = ()  # formats of the file that the CPU kernel does not support
        self.scale = 1.0  # factor of the result, before a residual is added
        self.cap = 0.0  # the result is capped to cap * tanh(result / cap); 0: not

    @classmethod
    def of_stored(
        cls,
        parts: Sequence[Stored],
        bias: Tensor | None,
        quantize: str | None = None,
        *,
        gated: bool = False,
        rounds: bool = False,
        arithmetic: str = "float32",
    ) -> Linear:
        """Stack matrices of one input and pack them for the CPU kernel in the file's formats; see ``pack``.

        Args:
            rounds: round rows to bfloat16; all matrices must be stored in it.
            arithmetic: see ``Layout``.
        """
        linear = cls(torch.empty(0, parts[0].num_in), bias)
        linear.num_out = sum(part.num_out for part in parts)
        differ = len({part.format for part in parts}) > 1
        if quantize is not None or (gated and differ):
            plain = [part.expand() for part in parts]
            weight = plain[0] if len(plain) == 1 else torch.cat(plain)
            linear._fused, linear.quantized = (Packed.of(weight, bias, quantize=quantize, gated=gated),), quantize
            if quantize is None:
                linear._expanded = tuple(dict.fromkeys(part.was or part.format for part in parts))
            return linear
        groups = [[part] for part in stack(parts)] if differ else [parts]
        sizes = [sum(part.num_out for part in group) for group in groups]
        biases = [None] * len(groups) if bias is None else torch.split(bias, sizes)
        linear._expanded = tuple(dict.fromkeys(part.was for part in parts if part.was))
        linear._fused = tuple(
            Packed.of_stored(group, part, gated=gated, rounds=rounds, arithmetic=arithmetic)
            for group, part in zip(groups, biases, strict=True)
        )
        return linear

    @property
    def has_levels(self) -> bool:
        """True if it has GGUF blocks in int8 arithmetic."""
        return any(part.row_form == RowForm.LEVELS for part in self._fused)

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the stored formats (``cpu.layout.FORMATS``), from the first output to the last."""
        if self._fused:
            return tuple(part.format.name for part in self._fused)
        return ("int8",) if self._int8 is not None else (str(self.dtype).removeprefix("torch."),)

    @property
    def packed(self) -> tuple[Packed, ...]:
        """The matrix as the CPU kernel reads it, in parts one below the other. Raises ConfigError before ``pack``."""
        if not self._fused:
            raise ConfigError("a matrix was not packed for the CPU kernel: make it an attribute of the net")
        return self._fused

    @property
    def num_bytes(self) -> int:
        """Bytes read by one forward."""
        if self._fused:
            return sum(part.num_bytes for part in self._fused)
        if self._int8 is not None:
            return self._int8.num_bytes
        return self.num_out * self.num_in * self.weight.element_size()

    @property
    def runs_as(self) -> str:
        """The code that computes it. A row's bits do not depend on other rows, except in ``plain`` products."""
        if self._fused:
            names = ", ".join(dict.fromkeys(self.formats))
            if self._fused[0].row_form == RowForm.ROUNDED or (names in ("int8", "float32") and not self._expanded):
                return f"CPU kernel, {names}"
            if self._expanded:
                return f"CPU kernel, {names} expanded from {', '.join(self._expanded)}"
            return f"CPU kernel, {names} weights in {'int8' if self.has_levels else 'float32'} arithmetic"
        if self._int8 is not None:
            return "oneDNN, int8"
        name = str(self.dtype).removeprefix("torch.")
        if self._blocks is not None:
            how = f"blocks of {self._blocks.smallest} rows or more" if self._blocks.smallest else "one row at a time"
            return f"{'PyTorch' if self._packed is None else 'oneDNN'}, {name}, {how}"
        return f"PyTorch, {name}, plain" if self._packed is None else f"oneDNN, {name}"

    def lay_out(self, layout: Layout, *, gated: bool = False) -> Linear:
        """Lay it out once, and return it. ``gated``: see ``pack``."""
        if layout.runs == "kernel":
            self.pack(layout.quantize, gated=gated, rounds=layout.rounds)
        elif layout.quantize is not None:
            self.quantize(layout.quantize)
        elif layout.runs == "torch":
            self.prepack()
        return self

    def prepack(self) -> None:
        """Reorder the weight for oneDNN if that is faster, and drop the original; on a CPU in 16 bits, use blocks."""
        if self._packed is not None or self._int8 is not None or self._blocks is not None:
            return
        if can_prepack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
        if self.weight.device.type == "cpu" and self.dtype in (torch.bfloat16, torch.float16):
            kind = f"{'plain' if self._packed is None else 'packed'}, {'bias' if self.bias is not None else 'bare'}"
            self._blocks = BlockProduct(self.product, self.weight, kind)
        if self._packed is not None:
            self._drop()

    def pack(self, quantize: str | None = None, *, gated: bool = False, rounds: bool = False) -> None:
        """Lay a float32 matrix out for the CPU kernel, in 16 bits if these hold its numbers exactly.

        Args:
            quantize: "int8", "q4" or None.
            gated: the first half of the outputs are gates of the second. Such a matrix runs in programs, not in
                ``forward``.
            rounds: round weights and rows to bfloat16, unless quantised.
        """
        if not self._fused:
            bias = None if self.bias is None else self.bias.detach()
            self._fused = (Packed.of(self.weight.detach(), bias, quantize=quantize, gated=gated, rounds=rounds),)
            self.quantized = quantize
            self._drop()

    def for_drafts(self, quantize: str | None) -> Linear | None:
        """The matrix packed for the CPU kernel, for nets that read a matrix of the target, which may run in PyTorch.

        Returns this matrix, or a copy if it is not packed or ``quantize`` applies; None if it cannot be packed.
        """
        if self._fused and (quantize is None or self.quantized is not None):
            return self
        plain = self.plain()
        if plain.numel() == 0 or plain.dtype != torch.float32 or plain.device.type != "cpu":
            return None
        copy = Linear(plain, None if self.bias is None else self.bias.detach())
        copy.scale, copy.cap = self.scale, self.cap
        copy.pack(quantize)
        return copy

    def quantize(self, method: str = "int8") -> None:
        """Replace the weight by an approximation in 8 bits, within about a percent."""
        if self._int8 is not None:
            return
        if self._packed is not None:
            raise ConfigError("a prepacked matrix cannot be quantised: quantise it instead of prepacking it")
        check_quantize(method, self.weight.dtype, self.weight.device, "torch")
        if self.num_in > _MAX_INPUTS:
            raise UnsupportedError(
                f"quantize={method!r} takes matrices of at most {_MAX_INPUTS} inputs, found {self.num_in}: leave "
                f"quantize out"
            )
        self._int8, self.quantized = Int8Product(self.weight.detach()), method
        self._drop()

    @torch.no_grad()
    def refill(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Replace the numbers by others (out, in) in the same layout, also for programs that were traced before."""
        if len(self._fused) > 1:
            raise ConfigError("a matrix in several parts takes no other numbers: load it in one format")
        for part in self._fused:
            part.refill(weight.float(), bias, quantize=self.quantized)
        if self._int8 is not None:
            self._int8 = Int8Product(weight.to(self.dtype))
        elif self._packed is not None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(self.dtype), None)
        if self.weight.numel():
            self.weight.copy_(weight)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def plain(self) -> Tensor:
        """(out, in) the weight, in float32 if it is packed for the CPU kernel."""
        if not self._fused:
            return self.weight.detach()
        return torch.cat([part.rows(torch.arange(part.num_out)) for part in self._fused])

    def _drop(self) -> None:
        self.weight = nn.Parameter(torch.empty(0, dtype=self.weight.dtype), requires_grad=False)

    def forward(self, x: Any, residual: Any = None) -> Any:
        """(R, in) -> (R, out), plus ``residual`` (R, out) if given."""
        if isinstance(x, Traced):
            return x.linear(self.packed, residual, scale=self.scale, cap=self.cap)
        if self.scale == 1 and not self.cap:
            return self._multiplied(x, residual)
        out = self._multiplied(x) * self.scale
        if self.cap:
            out = (out / self.cap).tanh() * self.cap
        return out if residual is None else residual + out

    def _multiplied(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
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
        out = self.product(x) if residual is None else _product_added(x, residual, packed, self.bias, "add")
        return out[:rows] if rows < MIN_ROWS else out

    def spread(self, x: Any, places: Tensor | None, width: int) -> Any:
        """(R, in) -> (R, width): output i at ``places[i]``, and -inf elsewhere; None keeps their order."""
        if places is None:
            return self.forward(x)
        if isinstance(x, Traced):
            return x.linear(self.packed, spread=(places, width), scale=self.scale, cap=self.cap)
        out = self.forward(x)
        return out.new_full((*out.shape[:-1], width), float("-inf")).index_copy_(-1, places, out)

    def product(self, x: Tensor) -> Tensor:
        """(R, in) -> (R, out) by PyTorch or oneDNN, without padding."""
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        out: Tensor = _product_linear(x, self._packed, self.bias, "none", [], "")
        return out

    def _forward_fused(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Run a packed matrix outside of a net, for training and evaluations."""
        program = Program(required_kernel())
        source = program.given(self.num_in)
        result = program.output(source.linear(self.packed))
        program.finish()
        out = torch.empty(x.shape[0], self.num_out)
        places = {program.place(source.buffer): x.float().contiguous(), program.place(result): out}
        Workspace(program).run(x.shape[0], 1, places)
        return out if residual is None else residual + out


class Embedding(nn.Module):
    """Rows (V, H), looked up by token ids: a table that a net may train, or packed for the CPU kernel."""

    def __init__(self, rows: Tensor | Packed) -> None:
        super().__init__()
        self.packed = rows if isinstance(rows, Packed) else None
        table = None if isinstance(rows, Packed) else rows
        if isinstance(table, nn.Parameter):
            self.table: Tensor | None = table
        else:
            self.register_buffer("table", table, persistent=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(V, H)."""
        if self.packed is not None:
            return self.packed.num_out, self.packed.num_in
        num_tokens, width = self._table.shape
        return num_tokens, width

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.packed is not None else self._table.dtype

    @property
    def device(self) -> torch.device:
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
        table: Tensor = self._table if self.packed is None else self.forward(torch.arange(self.shape[0]))
        return table

    def view(self) -> Embedding:
        """Another embedding of the same numbers, which keeps its layout if this one's changes."""
        return Embedding(self._table if self.packed is None else self.packed)

    def lay_out(self, layout: Layout) -> Embedding:
        """Pack it if the CPU kernel runs the net."""
        if layout.runs == "kernel" and self.packed is None:
            self.packed = Packed.of(self._table.detach(), None)
            self.table = None
        return self
