"""Programs of the CPU kernel: what a net leaves behind when it is traced.

A net is written once, for tensors. Called with ``Traced`` values in place of tensors, it writes down its operations
instead of running them: a list over buffers of rows, which the kernel walks in one call (``native/programs.h``).

Shape suffixes: R rows, B rows of a batch, N nodes, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from draftwing.errors import ConfigError, UnsupportedError
from draftwing.run.kernel.layout import NUM_BUFFERS, Op
from draftwing.run.kernel.library import Kernel
from draftwing.run.kernel.packed import Packed

__all__ = ["ACTIVATIONS", "HeadsLike", "Program", "Traced", "TracedAttention", "TracedIds", "join"]

ACTIVATIONS = {"silu": 2, "gelu": 3, "gelu_pytorch_tanh": 4}
_EMBED, _NORM, _LINEAR, _ATTEND, _COPY = range(5)
_STORE, _ADD = 0, 1
_READS_TARGET = -1  # an operation without a source


class NormLike(Protocol):
    """An RMSNorm: its weight (H,), and what is added to the mean square."""

    weight: Any
    eps: float


class HeadsLike(Protocol):
    """How an attention's queries, keys and values lie side by side, and the norms of each head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Any
    k_norm: Any


class Program:
    """Operations over buffers of rows. Written once, then read by any number of runners (``run.kernel.runner``).

    While it is written, a buffer is a number that belongs to one value. ``finish`` lets values that are not needed at
    the same time share memory; ``place`` then says where each lies.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.widths: list[int] = []  # of the memory that values lie in, after ``finish``
        self.is_given: list[bool] = []  # from outside, for every run
        self.ops: Any = None  # as the kernel reads them
        self.num_ops = 0
        self._ops: list[Op] = []
        self._values: list[_Value] = []
        self._places: list[int] = []
        self._kept: list[Tensor] = []  # what the operations point to

    def __len__(self) -> int:
        return len(self._ops)

    # --- writing ---------------------------------------------------------------------------------------------------

    def given(self, width: int) -> Traced:
        """A value (R, width) that every run is given."""
        return Traced(self, self._new(width, is_given=True), width)

    def scratch(self, width: int) -> int:
        """Memory for a value (R, width)."""
        return self._new(-(-width // 16) * 16, is_given=False)

    def output(self, value: Traced) -> int:
        """The buffer that ``value`` ends in, which every run is given room for."""
        settled = value.settled()
        found = self._values[settled.buffer]
        found.is_given, found.width = True, value.width
        return settled.buffer

    def _new(self, width: int, *, is_given: bool) -> int:
        self._values.append(_Value(width, is_given))
        return len(self._values) - 1

    def add(self, target: int, source: int = _READS_TARGET, **fields: Any) -> None:
        """One operation; tensors among its fields are kept alive."""
        if len(self._ops) >= self.kernel.max_ops:
            raise UnsupportedError(
                f"a net of more than {self.kernel.max_ops} operations does not fit the CPU kernel: say is_traceable = "
                f"False in a net of your own, or load a model this deep with DRAFTWING_KERNEL=off in the environment"
            )
        for name, value in fields.items():
            if isinstance(value, Tensor):
                kept = value.detach().contiguous()
                self._kept.append(kept)
                fields[name] = kept.data_ptr()
        for number in (target, source):
            if number >= 0:
                self._values[number].see(len(self._ops))
        self._ops.append(Op(target=target, source=target if source < 0 else source, **fields))

    def finish(self) -> Program:
        """No more is written: lay the values out."""
        free: dict[int, list[int]] = {}
        ending: dict[int, list[_Value]] = {}
        for value in self._values:
            ending.setdefault(value.last, []).append(value)
        for value in self._values:
            if value.is_given or value.last < 0:
                value.place = self._lay_out(value)
        starting = {value.first: value for value in self._values if value.place < 0}
        for number in range(len(self._ops)):
            begun = starting.get(number)
            if begun is not None:
                room = free.get(begun.width)
                begun.place = room.pop() if room else self._lay_out(begun)
            for ended in ending.get(number, ()):
                if not ended.is_given:
                    free.setdefault(ended.width, []).append(ended.place)
        self._places = [value.place for value in self._values]
        for op in self._ops:
            op.source, op.target = self._places[op.source], self._places[op.target]
        self.ops, self.num_ops = (Op * len(self._ops))(*self._ops), len(self._ops)
        return self

    def _lay_out(self, value: _Value) -> int:
        if len(self.widths) >= NUM_BUFFERS:
            raise UnsupportedError(
                f"a net that needs more than {NUM_BUFFERS} values at a time does not fit the CPU kernel: use values up "
                f"sooner, or say is_traceable = False"
            )
        self.widths.append(value.width)
        self.is_given.append(value.is_given)
        return len(self.widths) - 1

    def place(self, buffer: int) -> int:
        """Where a value lies: what ``Workspace.run`` calls it."""
        return self._places[buffer]


@dataclass
class _Value:
    """A value of a program: how wide, and the first and last operation that knows of it."""

    width: int
    is_given: bool
    first: int = -1
    last: int = -1
    place: int = -1
    version: int = 0

    def see(self, number: int) -> None:
        self.first = number if self.first < 0 else self.first
        self.last = number


@dataclass(frozen=True)
class Traced:
    """Stands for a tensor (R, width) while a net is traced.

    Some are not computed yet: an embedding's rows, or the norm of another value. Whoever reads such a value takes it
    in: a matrix norms its input on the way, a concatenation writes it straight into place.

    Attributes:
        buffer, column: where it lies, and from which column on.
        norm: weight and eps of an RMSNorm still to be taken.
        table: packed (V, width), whose rows are still to be read.
        version: a sum is written over its residual: handles from before it are of no more use.
    """

    program: Program = field(repr=False)
    buffer: int
    width: int
    column: int = 0
    norm: tuple[Tensor, float] | None = None
    table: Packed | None = None
    version: int = 0

    @classmethod
    def embedding(cls, ids: TracedIds, table: Packed) -> Traced:
        """The rows of ``table`` (V, H) that the tokens name."""
        return cls(ids.program, -1, table.num_in, table=table)

    def _check(self) -> None:
        if self.buffer >= 0 and self.program._values[self.buffer].version != self.version:
            raise ConfigError(
                "a net read a value after it was the residual of a matrix, which writes its sum over it: read the "
                "matrix's result instead, or say is_traceable = False"
            )

    def write(self, target: int, column: int = 0) -> None:
        """Compute it into the columns of another buffer."""
        self._check()
        if self.table is not None:
            code = self.table.format.code
            self.program.add(
                target, kind=_EMBED, column=column, num_out=self.width, weight=self.table.weight, format=code
            )
            return
        read: dict[str, Any] = {"column": column, "first": self.column, "num_in": self.width}
        if self.norm is None:
            self.program.add(target, self.buffer, kind=_COPY, **read)
        else:
            self.program.add(target, self.buffer, kind=_NORM, norm=self.norm[0], eps=self.norm[1], **read)

    def settled(self) -> Traced:
        """The same in memory of its own, at column 0."""
        if self.buffer >= 0 and self.norm is None and not self.column:
            return self
        found = Traced(self.program, self.program.scratch(self.width), self.width)
        self.write(found.buffer)
        return found

    def normed(self, norm: NormLike) -> Traced:
        """RMSNorm, to be taken by whoever reads it."""
        source = self.settled() if self.table is not None or self.norm is not None else self
        return replace(source, norm=(norm.weight.detach(), norm.eps))

    def columns(self, start: int, stop: int) -> Traced:
        """(R, stop - start) of its columns."""
        return replace(self.settled(), column=start, width=stop - start)

    def to(self, dtype: torch.dtype) -> Traced:
        """Itself: the kernel computes in float32."""
        return self

    def linear(
        self,
        packed: Packed | Sequence[Packed],
        residual: Traced | None = None,
        *,
        activation: str | None = None,
        spread: tuple[Tensor, int] | None = None,
    ) -> Traced:
        """A matrix times it, added to ``residual``; with ``activation`` a gated one.

        Args:
            packed: the matrix, or matrices whose outputs stand side by side.
            spread: (num_out,) int64 which column of (R, width) each output goes to, and the width; other columns stay.
        """
        parts = (packed,) if isinstance(packed, Packed) else packed
        if any(part.gated != (activation is not None) for part in parts):
            raise ConfigError("the gate_up of a GatedMLP is laid out for it alone: call the GatedMLP, not its matrix")
        source = self.settled() if self.table is not None or self.column else self
        source._check()
        program, width = self.program, sum(part.num_out for part in parts) if spread is None else spread[1]
        epilogue = ACTIVATIONS[activation] if activation is not None else _STORE if residual is None else _ADD
        out = Traced(program, program.scratch(width), width) if residual is None else residual._overwritten()
        norm, eps = source.norm or (None, 0.0)
        column = 0
        for part in parts:
            places = None if spread is None else spread[0][column : column + part.num_out]
            program.add(
                out.buffer, source.buffer, kind=_LINEAR, num_in=part.num_in, num_out=part.num_out, epilogue=epilogue,
                format=part.format.code, row_form=part.row_form, eps=eps, norm=norm, weight=part.weight,
                scales=part.scales, sums=part.sums,
                bias=part.bias, places=places, column=0 if places is not None else column,
            )  # fmt: skip
            column += part.num_out
        return out

    def _overwritten(self) -> Traced:
        """Memory that holds it and is about to be changed: its own, but for what every run is given."""
        self._check()
        value = self.program._values[self.buffer] if self.buffer >= 0 else None
        if value is None or value.is_given or self.norm is not None or self.column:
            found = Traced(self.program, self.program.scratch(self.width), self.width)
            self.write(found.buffer)
            return found
        value.version += 1
        return replace(self, version=value.version)


def join(parts: Sequence[Traced]) -> Traced:
    """Side by side."""
    width = sum(part.width for part in parts)
    found = Traced(parts[0].program, parts[0].program.scratch(width), width)
    column = 0
    for part in parts:
        part.write(found.buffer, column)
        column += part.width
    return found


@dataclass(frozen=True)
class TracedIds:
    """Stands for token ids (R,)."""

    program: Program


class TracedAttention:
    """An ``Attend`` for tracing: the kernel rotates, writes slots and mixes in one operation."""

    def __init__(self, windows: Any) -> None:
        self._windows = windows

    def __call__(self, layer: int, qkv: Traced, heads: HeadsLike) -> Traced:
        """(R, (heads + 2 * KV heads) * D) -> (R, heads * D)."""
        program, width = qkv.program, heads.num_heads * heads.head_dim
        out = Traced(program, program.scratch(width), width)
        both = heads.q_norm is not None and heads.k_norm is not None
        norms = {"q_norm": heads.q_norm.weight, "k_norm": heads.k_norm.weight, "eps": heads.q_norm.eps} if both else {}
        program.add(
            out.buffer, qkv.settled().buffer, kind=_ATTEND, layer=layer, window=self._windows[layer] or 0,
            scale=heads.head_dim**-0.5, num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim, **norms,
        )  # fmt: skip
        return out
