"""Programs of the CPU kernel, and how a network is traced into one.

Called with ``Traced`` values instead of tensors, a network records its operations instead of running them: a list over
buffers of rows, which the kernel runs in one call (``native/programs.h``).

Shape suffixes: R rows, B rows of a batch, N nodes, H hidden, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, get_num_threads

from draftwing.cpu.layout import NUM_BUFFERS, AcceptStruct, BatchStruct, Expert, Op
from draftwing.cpu.library import Kernel
from draftwing.cpu.packed import Packed
from draftwing.errors import ConfigError, UnsupportedError
from draftwing.models.attention import Heads
from draftwing.models.recurrent import GatedDelta

ACTIVATIONS = {"silu": 2, "gelu": 3, "gelu_pytorch_tanh": 4, "relu2": 5}
_EMBED, _NORM, _LINEAR, _ATTEND, _COPY, _CONVOLVE, _RECUR, _ROUTE, _EXPERTS, _COMBINE = range(10)
_STORE, _ADD, _CLAMPED = 0, 1, 6
_SCORES = ("softmax", "chosen", "sigmoid")
_NO_SOURCE = -1


class NormLike(Protocol):
    """An RMSNorm, or a LayerNorm if it ``centers``, with weight (H,) and a bias (H,) or None."""

    weight: Any
    bias: Any
    eps: float
    centers: bool


def _norm_fields(norm: NormLike) -> dict[str, Any]:
    """The fields of an operation that norms its input; none that are off."""
    fields: dict[str, Any] = {"norm": norm.weight.detach().float(), "eps": norm.eps}
    if norm.bias is not None:
        fields["norm_bias"] = norm.bias.detach().float()
    return {**fields, "centers": 1} if norm.centers else fields


class RoutingLike(Protocol):
    """See ``models.layers.Routing``."""

    num_per_token: int
    scores: str
    normalise: bool
    groups: tuple[int, int] | None
    group_by: str | None
    scale: float
    sum_eps: float
    scales_input: bool


def _padded(width: int) -> int:
    return -(-width // 16) * 16


class Program:
    """Operations over buffers of rows, shared by all runners of a network.

    While operations are added, each value has its own number. ``finish`` lets values that are not needed at the
    same time share memory; ``place`` then returns the memory of each.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.widths: list[int] = []  # by place, after ``finish``
        self.is_given: list[bool] = []  # by place: provided by the caller of every run
        self.ops: Any = None  # a ctypes array, after ``finish``
        self.num_ops = 0
        self._ops: list[Op] = []
        self.values: list[_Value] = []
        self._places: list[int] = []
        self._kept: list[Any] = []  # tensors and arrays that the operations point to

    def __len__(self) -> int:
        return len(self._ops)

    def given(self, width: int) -> Traced:
        """A value (R, width) that the caller of every run provides."""
        return Traced(self, self._new(width, is_given=True), width)

    def scratch(self, width: int) -> int:
        """A new value (R, width)."""
        return self._new(_padded(width), is_given=False)

    def output(self, value: Traced) -> int:
        """Make ``value`` an output, for which every run provides memory; returns its number."""
        buffer = value.settled().buffer
        self.values[buffer].is_given, self.values[buffer].width = True, value.width
        return buffer

    def _new(self, width: int, *, is_given: bool) -> int:
        self.values.append(_Value(width, is_given))
        return len(self.values) - 1

    def add(self, target: int, source: int = _NO_SOURCE, **fields: Any) -> None:
        """Add one operation; tensors among its fields are kept alive."""
        if len(self._ops) >= self.kernel.max_ops:
            raise UnsupportedError(
                f"a net of more than {self.kernel.max_ops} operations does not fit the CPU kernel: set is_traceable = "
                f"False in a custom net, or load a model this deep with DRAFTWING_KERNEL=off in the environment"
            )
        for name, value in fields.items():
            if isinstance(value, Tensor):
                kept = value.detach().contiguous()
                self._kept.append(kept)
                fields[name] = kept.data_ptr()
        for number in (target, source, fields.get("routes", _NO_SOURCE)):
            if number >= 0:
                self.values[number].see(len(self._ops))
        self._ops.append(Op(target=target, source=target if source < 0 else source, **fields))

    def keep(self, *arrays: Any) -> None:
        """Keep what an operation's addresses point to alive."""
        self._kept.extend(arrays)

    def finish(self) -> Program:
        """Assign places to the values; no operation may be added afterwards."""
        free: dict[int, list[int]] = {}
        ending: dict[int, list[_Value]] = {}
        for value in self.values:
            ending.setdefault(value.last, []).append(value)
        for value in self.values:
            if value.is_given or value.last < 0:
                value.place = self._lay_out(value)
        starting = {value.first: value for value in self.values if value.place < 0}
        for number in range(len(self._ops)):
            begun = starting.get(number)
            if begun is not None:
                room = free.get(begun.width)
                begun.place = room.pop() if room else self._lay_out(begun)
            for ended in ending.get(number, ()):
                if not ended.is_given:
                    free.setdefault(ended.width, []).append(ended.place)
        self._places = [value.place for value in self.values]
        for op in self._ops:
            op.source, op.target = self._places[op.source], self._places[op.target]
            op.routes = self._places[op.routes]
        self.ops, self.num_ops = (Op * len(self._ops))(*self._ops), len(self._ops)
        return self

    def _lay_out(self, value: _Value) -> int:
        if len(self.widths) >= NUM_BUFFERS:
            raise UnsupportedError(
                f"a net that needs more than {NUM_BUFFERS} values at a time does not fit the CPU kernel: use values "
                f"sooner, or set is_traceable = False"
            )
        self.widths.append(value.width)
        self.is_given.append(value.is_given)
        return len(self.widths) - 1

    def place(self, buffer: int) -> int:
        """The place of a value: its key in ``Workspace.run``."""
        return self._places[buffer]


@dataclass
class _Value:
    """A value of a program, and the first and last operation that use it."""

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
    """Stands for a tensor (R, width) while a network is traced.

    Some values are lazy: an embedding's rows, or the norm of another value. The operation that reads such a value
    computes it: a matrix norms its input, a concatenation writes it into place.

    Attributes:
        buffer, column: number of the value that holds it, and the first column.
        norm: a norm still to be applied.
        scale: of the rows of ``table``.
        table: packed (V, width), whose rows are still to be read.
        version: a sum overwrites its residual, which invalidates older handles.
    """

    program: Program = field(repr=False)
    buffer: int
    width: int
    column: int = 0
    norm: NormLike | None = None
    table: Packed | None = None
    scale: float = 1.0
    version: int = 0

    @classmethod
    def embedding(cls, ids: TracedIds, table: Packed) -> Traced:
        """The rows of ``table`` (V, H) for the tokens."""
        return cls(ids.program, -1, table.num_in, table=table)

    def _check(self) -> None:
        if self.buffer >= 0 and self.program.values[self.buffer].version != self.version:
            raise ConfigError(
                "a net read a value after it was the residual of a matrix, which overwrites it with the sum: read the "
                "matrix's result instead, or set is_traceable = False"
            )

    def write(self, target: int, column: int = 0) -> None:
        """Compute it into the columns of another buffer."""
        self._check()
        if self.table is not None:
            code = self.table.format.code
            self.program.add(
                target, kind=_EMBED, column=column, num_out=self.width, weight=self.table.weight, format=code,
                scale=0.0 if self.scale == 1 else self.scale,
            )  # fmt: skip
            return
        read: dict[str, Any] = {"column": column, "first": self.column}
        if self.norm is None:
            self.program.add(target, self.buffer, kind=_COPY, num_in=self.width, **read)
        else:
            self.program.add(target, self.buffer, kind=_NORM, **self._normed_columns(self.norm), **read)

    def _normed_columns(self, norm: NormLike) -> dict[str, Any]:
        """The fields of an operation that norms it: once, or several times if it is wider than the norm."""
        width = norm.weight.shape[0]
        several = {} if width == self.width else {"num_heads": self.width // width}
        return {**_norm_fields(norm), "num_in": width, **several}

    def settled(self) -> Traced:
        """The same value, computed and at column 0."""
        if self.buffer >= 0 and self.norm is None and not self.column:
            return self
        settled = Traced(self.program, self.program.scratch(self.width), self.width)
        self.write(settled.buffer)
        return settled

    def normed(self, norm: NormLike) -> Traced:
        """A norm, computed by the operation that reads it."""
        source = self.settled() if self.table is not None or self.norm is not None else self
        return replace(source, norm=norm)

    def with_normed(self, start: int, norm: NormLike) -> Traced:
        """The same value, of which the columns from ``start`` on are normed, as many as the norm has weights."""
        value = self._overwritten()
        columns = {"column": start, "first": start, "num_in": norm.weight.shape[0]}
        self.program.add(value.buffer, kind=_NORM, **_norm_fields(norm), **columns)
        return value

    def plus(self, other: Traced) -> Traced:
        """The sum with a value that is normed, which overwrites this one."""
        if other.norm is None:
            raise ConfigError("a net added two values without a matrix or a norm: set is_traceable = False")
        value = self._overwritten()
        columns = {"first": other.column, "epilogue": _ADD}
        self.program.add(value.buffer, other.buffer, kind=_NORM, **other._normed_columns(other.norm), **columns)
        return value

    def scaled(self, factor: float) -> Traced:
        """Its rows, times ``factor``; overwrites them unless they are those of an embedding."""
        if self.table is not None:
            return replace(self, scale=self.scale * factor)
        value = self._overwritten()
        self.program.add(value.buffer, kind=_COPY, num_in=self.width, scale=factor)
        return value

    def columns(self, start: int, stop: int) -> Traced:
        """(R, stop - start) of its columns."""
        return replace(self.settled(), column=start, width=stop - start)

    def to(self, dtype: torch.dtype) -> Traced:
        """Unchanged: the kernel computes in float32."""
        return self

    def linear(
        self,
        packed: Packed | Sequence[Packed],
        residual: Traced | None = None,
        *,
        activation: str | None = None,
        spread: tuple[Tensor, int] | None = None,
        into: tuple[Traced, int] | None = None,
        times: Traced | None = None,
        scale: float = 1.0,
        cap: float = 0.0,
    ) -> Traced:
        """A matrix times it, added to ``residual``, or activated: gates then multiply a gated matrix's other outputs.

        Args:
            packed: the matrix, or matrices whose outputs are concatenated.
            scale, cap: see ``Linear``.
            into: a value to write the result into, and its first column.
            times: a value that the result is multiplied by and overwrites.
            spread: (num_out,) int64 the column of (R, width) for each output, and the width; other columns stay.
        """
        parts = (packed,) if isinstance(packed, Packed) else packed
        if any(part.gated for part in parts) and activation is None:
            raise ConfigError(
                "the gate_up matrix of a GatedMLP has a layout that only the GatedMLP reads: call the GatedMLP instead"
            )
        is_split = self.norm is not None and self.norm.weight.shape[0] < self.width
        source = self.settled() if self.table is not None or is_split else self
        source._check()
        program, width = self.program, sum(part.num_out for part in parts) if spread is None else spread[1]
        epilogue = ACTIVATIONS[activation] if activation is not None else _STORE if residual is None else _ADD
        if into is not None:
            out, column = into
        elif times is not None:
            out, column = times, times.column
        else:
            out = Traced(program, program.scratch(width), width) if residual is None else residual._overwritten()
            column = 0
        # Only what is used: an operation's other fields are 0.
        fields = {} if source.norm is None else _norm_fields(source.norm)
        fields |= ({"scale": scale} if scale != 1 else {}) | ({"cap": cap} if cap else {})
        fields |= ({"first": source.column} if source.column else {}) | ({} if times is None else {"multiplies": 1})
        for part in parts:
            places = None if spread is None else spread[0][column : column + part.num_out]
            program.add(
                out.buffer, source.buffer, kind=_LINEAR, num_in=part.num_in, num_out=part.num_out, epilogue=epilogue,
                format=part.format.code, row_form=part.row_form, weight=part.weight,
                scales=part.scales, sums=part.sums, is_gated=part.gated,
                bias=part.bias, places=places, column=0 if places is not None else column, **fields,
            )  # fmt: skip
            column += part.num_out
        return out

    def routed(self, routing: RoutingLike, bias: Tensor | None = None, scales: Tensor | None = None) -> Routed:
        """Choose experts by these scores (R, experts); see ``models.layers.Experts``."""
        scores, (num_groups, num_kept), k = self.settled(), routing.groups or (0, 0), routing.num_per_token
        most = self.program.kernel.max_experts
        if self.width > most:
            raise UnsupportedError(
                f"the CPU kernel runs layers of at most {most} experts, found {self.width}: load the model with "
                f"DRAFTWING_KERNEL=off in the environment"
            )
        routes = self.program.scratch(4 * k + 2 * self.width + 2)
        sizes = {"num_experts": self.width, "num_chosen": k, "scales_input": routing.scales_input}
        self.program.add(
            routes, scores.buffer, kind=_ROUTE, scores=_SCORES.index(routing.scores), normalises=routing.normalise,
            num_groups=num_groups, num_kept_groups=num_kept, sums_two=routing.group_by == "two", scale=routing.scale,
            eps=routing.sum_eps, bias=None if bias is None else bias.float(),
            scales=None if scales is None else scales.float(), **sizes,
        )  # fmt: skip
        return Routed(self.program, routes, sizes)

    def _overwritten(self) -> Traced:
        """A value that may be overwritten: this one, or a copy if it is lazy or provided by the caller."""
        self._check()
        value = self.program.values[self.buffer] if self.buffer >= 0 else None
        if value is None or value.is_given or self.norm is not None or self.column:
            copy = Traced(self.program, self.program.scratch(self.width), self.width)
            self.write(copy.buffer)
            return copy
        value.version += 1
        return replace(self, version=value.version)


@dataclass(frozen=True)
class Routed:
    """The experts of each row, and their weights."""

    program: Program = field(repr=False)
    buffer: int
    sizes: dict[str, int]

    def linear(
        self,
        x: Traced,
        experts: Sequence[Packed],
        *,
        gathers: bool,
        activation: str | None = None,
        clamp: tuple[float, float] | None = None,
        scale: float = 1.0,
    ) -> Traced:
        """The matrices (in, out) of experts times the rows that chose them: of each row's pairs (R, k * padded out).

        Args:
            gathers: x (R, in) is that of each row instead of each pair's (R, k * padded in).
            clamp: (alpha, limit) of the activation of ``ClampedMLP``, instead of ``activation``.
        """
        num_out = experts[0].num_out
        width = self.sizes["num_chosen"] * _padded(num_out)
        table = (Expert * len(experts))()
        for entry, each in zip(table, experts, strict=True):
            entry.format, entry.row_form = each.format.code, each.row_form
            for name in ("weight", "scales", "sums", "bias"):
                part = getattr(each, name)
                setattr(entry, name, None if part is None else part.data_ptr())
        self.program.keep(table, *experts)
        out = Traced(self.program, self.program.scratch(width), width)
        epilogue = _STORE if activation is None else ACTIVATIONS[activation]
        fields: dict[str, Any] = {"scale": scale} if scale != 1 else {}
        if clamp is not None:
            epilogue, fields = _CLAMPED, {"eps": clamp[0], "cap": clamp[1]}
        self.program.add(
            out.buffer, x.settled().buffer, kind=_EXPERTS, routes=self.buffer, gathers=gathers,
            num_in=experts[0].num_in, num_out=num_out, is_gated=experts[0].gated, epilogue=epilogue,
            weight=ctypes.addressof(table), **self.sizes, **fields,
        )  # fmt: skip
        return out

    def combine(self, pairs: Traced, width: int, residual: Traced | None = None) -> Traced:
        """(R, width): the weighted sum of each row's pairs (R, k * padded width), plus ``residual`` if given."""
        program = self.program
        out = Traced(program, program.scratch(width), width) if residual is None else residual._overwritten()
        program.add(
            out.buffer, pairs.buffer, kind=_COMBINE, routes=self.buffer, num_in=width,
            epilogue=_STORE if residual is None else _ADD, **self.sizes,
        )  # fmt: skip
        return out


def join(parts: Sequence[Traced]) -> Traced:
    """Concatenate columns."""
    width, program, column = sum(part.width for part in parts), parts[0].program, 0
    joined = Traced(program, program.scratch(width), width)
    for part in parts:
        part.write(joined.buffer, column)
        column += part.width
    return joined


@dataclass(frozen=True)
class TracedIds:
    """Stands for token ids (R,)."""

    program: Program


class TracedAttention:
    """An ``Attend`` for tracing: the kernel rotates, writes KV slots and attends in one operation."""

    def __init__(self, windows: Any, num_kv_heads: int) -> None:
        self._windows, self._num_kv_heads = windows, num_kv_heads
        self._kv_heads: dict[int, int] = {}  # KV heads by layer
        self._num_recurrent = 0  # layers so far

    def __call__(self, layer: int, qkv: Traced, heads: Heads) -> Traced:
        """(R, (heads + 2 * KV heads) * D) -> (R, heads * D).

        If heads share the first channels of their keys, these are one for all and come last.
        """
        program, traits = qkv.program, heads.traits
        value_dim = traits.value_dim or heads.head_dim
        width = heads.num_heads * value_dim
        if heads.mixer is not None:
            width = heads.mixer.out_width
        out = Traced(program, program.scratch(width), width)
        if isinstance(heads.mixer, GatedDelta):
            mixer, sizes = heads.mixer, heads.mixer.config
            program.add(
                out.buffer, qkv.settled().buffer, kind=_RECUR, layer=self._num_recurrent, num_in=sizes.value_dim,
                num_out=sizes.conv_size, num_heads=sizes.num_value_heads, num_kv_heads=sizes.num_key_heads,
                head_dim=sizes.key_dim, scale=sizes.key_dim**-0.5, eps=mixer.eps, is_tiled=mixer.is_tiled,
                weight=mixer.weight.float(), norm=mixer.norm.float(), scales=-mixer.a_log.float().exp(),
                bias=mixer.dt_bias.float(),
            )  # fmt: skip
            self._num_recurrent += 1
            return out
        if heads.mixer is not None:
            program.add(
                out.buffer, qkv.settled().buffer, kind=_CONVOLVE, layer=layer, num_in=width, num_out=heads.mixer.size,
                num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, weight=heads.mixer.weight.float(),
            )  # fmt: skip
            return out
        # Only what is used: an operation's other fields are 0.
        fields: dict[str, Any] = {}
        if heads.q_norm is not None:
            norms = {"q_norm": heads.q_norm, "k_norm": heads.k_norm, "v_norm": heads.v_norm}
            fields |= {name: norm.weight.float() for name, norm in norms.items() if norm is not None}
            fields |= {"eps": heads.q_norm.eps, "norms_rotated": traits.norms_rotated}
        if traits.rotation is not None:
            fields |= {"rotation_first": traits.rotation[0], "rotation_pairs": traits.rotation[1] or -1}
        if traits.query_scale is not None:
            fields["query_scale"] = traits.query_scale + 1
        if traits.shared_dim:
            fields["shared_dim"] = traits.shared_dim
        if traits.sinks is not None:
            fields["sinks"] = traits.sinks.float()
        if traits.is_gated:
            fields["is_gated"] = 1
        kv_heads = self._kv_heads[layer] = heads.num_kv_heads or self._kv_heads[traits.source or 0]
        slot_layer, slot_first = traits.slots or (layer, 0)
        program.add(
            out.buffer, qkv.settled().buffer, kind=_ATTEND, layer=layer, window=self._windows[layer] or 0,
            scale=heads.head_dim**-0.5 if traits.scale is None else traits.scale, cap=traits.cap,
            num_heads=heads.num_heads, num_kv_heads=kv_heads, head_dim=heads.head_dim, value_dim=value_dim,
            slot_layer=slot_layer, slot_first=slot_first, reads_only=heads.num_kv_heads == 0,
            heads_apart=self._num_kv_heads // kv_heads, **fields,
        )  # fmt: skip
        return out


class Workspace:
    """Memory for the values of a program; a run overwrites the values of the last one.

    Attributes:
        batch: the fields that stay the same from run to run; the kernel copies it.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.batch = program, BatchStruct()
        self._memory, self.capacity = torch.empty(0), 0
        for place, width in enumerate(program.widths):
            self.batch.widths[place] = width

    def reserve(self, num_rows: int) -> None:
        """Make room for R rows."""
        if num_rows <= self.capacity:
            return
        self.capacity, program = max(num_rows, 2 * self.capacity), self.program
        widths = [(place, width) for place, width in enumerate(program.widths) if not program.is_given[place]]
        self._memory = torch.empty(self.capacity * sum(width for _, width in widths))
        address = self._memory.data_ptr()
        for place, width in widths:
            self.batch.buffers[place] = address
            address += 4 * width * self.capacity

    def run(
        self,
        rows: int,
        nodes: int,
        given: Mapping[int, Tensor],
        *,
        first_op: int = 0,
        num_ops: int | None = None,
        accept: AcceptStruct | None = None,
    ) -> None:
        """Run the operations from ``first_op`` to before ``num_ops``.

        Args:
            rows, nodes: R = rows * nodes. Tokens, KV slots and other inputs are fields of ``batch``.
            given: float32 tensors of R rows by place, for the given values that these operations use.
            accept: apply ``accept.match`` to the trees afterwards, and commit the kept nodes.
        """
        self.reserve(rows * nodes)
        batch, program = self.batch, self.program
        batch.rows, batch.nodes = rows, nodes
        for place, tensor in given.items():
            batch.buffers[place] = tensor.data_ptr()
        count = (program.num_ops if num_ops is None else num_ops) - first_op
        kernel, ops, threads = (
            program.kernel,
            ctypes.byref(program.ops, first_op * ctypes.sizeof(Op)),
            get_num_threads(),
        )
        if accept is None:
            kernel.run(ops, count, ctypes.byref(batch), threads)
        else:
            kernel.verify(ops, count, ctypes.byref(batch), ctypes.byref(accept), threads)
