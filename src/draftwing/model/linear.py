"""Matrix times rows, laid out for decoding: few rows, all of the weight read for each.

On a CPU ``F.linear`` is slow for 2 to 16 rows, and a row's last bits depend on how many rows are beside it. oneDNN
with prepacked weights has neither fault: on a 64 MB float32 matrix 8 rows cost 1.1 times one row (``F.linear``: 2.5
times), and for two rows or more each row's bits are its own. Both are what verification lives on. In 16 bits the
second is not so everywhere: there ``blocks`` runs only what was tried out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.errors import ConfigError, UnsupportedError
from draftwing.model.blocks import MIN_ROWS, BlockProduct
from draftwing.model.int8 import MAX_INPUTS, Int8Product, check_quantize
from draftwing.model.stored import Stored, stack
from draftwing.run.kernel.formats import RowForm
from draftwing.run.kernel.library import required_kernel
from draftwing.run.kernel.packed import Packed
from draftwing.run.kernel.program import Program, Traced
from draftwing.run.kernel.runner import Workspace

__all__ = ["MIN_ROWS", "Layout", "Linear", "can_prepack", "runs_as"]

_product, _product_added = torch.ops.mkldnn._linear_pointwise.default, torch.ops.mkldnn._linear_pointwise.binary

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
        out: Tensor = _product(x, self._packed, self.bias, "none", [], "")
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
