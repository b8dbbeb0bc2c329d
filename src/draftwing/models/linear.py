"""Matrices laid out for decoding: few rows, and all of the weight read for each. 8-bit products, embeddings.

On a CPU ``F.linear`` is slow for 2 to 16 rows, and the last bits of a row depend on how many rows are in the batch.
oneDNN with prepacked weights has neither fault in float32: on 64 MB, 8 rows cost 1.1 times one row (``F.linear``:
2.5 times), and from two rows on a row's bits do not depend on the others. Verification needs both. In 16 bits oneDNN's
sums depend on the other rows on some processors, so these matrices are kept and multiplied in float32, and the results
are rounded; in 8 bits there is ``Int8Product``. The formats of the CPU kernel are in ``cpu.packed``.

Shape suffixes: R rows, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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


# --- matrices --------------------------------------------------------------------------------------------------------


MIN_ROWS = 4  # on AVX-512, 4 rows take a faster kernel than 1 or 2, and give the same bits as any larger number


def can_prepack(weight: Tensor) -> bool:
    """Return True if oneDNN takes this weight prepacked and is the better choice for it."""
    return weight.device.type == "cpu" and torch._C._has_mkldnn and weight.dtype != torch.float64


def _reordered(weight: Tensor) -> Tensor:
    """A weight in oneDNN's layout for float32 products."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.float(), None)
    return packed


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
        return self.num_out * self.num_in * (4 if self._packed is not None else self.weight.element_size())

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
        if self._packed is None:
            return f"PyTorch, {name}, plain"
        return f"oneDNN, {name}{'' if self.dtype == torch.float32 else ' in float32 arithmetic'}"

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
        """Reorder the weight for oneDNN if that is faster, in float32, and drop the original."""
        if self._packed is None and self._int8 is None and can_prepack(self.weight):
            self._packed = _reordered(self.weight.detach())
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
            self._packed = _reordered(weight.to(self.dtype))
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
        if self._packed is None:
            plain = F.linear(x, self.weight, self.bias)
            return plain if residual is None else residual + plain
        rows, bias = x.shape[0], None if self.bias is None else self.bias.float()
        padding = (0, 0, 0, max(MIN_ROWS - rows, 0))
        wide = F.pad(x.float(), padding)
        if residual is None:
            out: Tensor = _product_linear(wide, self._packed, bias, "none", [], "")
        else:
            out = _product_added(wide, F.pad(residual.float(), padding), self._packed, bias, "add")
        return out[:rows].to(self.dtype)

    def spread(self, x: Any, places: Tensor | None, width: int) -> Any:
        """(R, in) -> (R, width): output i at ``places[i]``, and -inf elsewhere; None keeps their order."""
        if places is None:
            return self.forward(x)
        if isinstance(x, Traced):
            return x.linear(self.packed, spread=(places, width), scale=self.scale, cap=self.cap)
        out = self.forward(x)
        return out.new_full((*out.shape[:-1], width), float("-inf")).index_copy_(-1, places, out)

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
