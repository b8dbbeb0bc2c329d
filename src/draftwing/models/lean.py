"""The lean decoder: a target for the families of ``models.families``, with static KV slots, tree attention and taps.

It loads Hugging Face folders and computes transformers' logits with less overhead: one matrix for queries, keys and
values, one for gate and up, and a runtime that is chosen at loading: on a CPU all layers as one program (``cpu``) or,
if that is impossible, PyTorch with prepacked weights; on a GPU recorded CUDA graphs.

Shape suffixes: B rows, N nodes, T tokens, R rows of a forward, F features, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from draftwing.cpu.layout import BLOCKS
from draftwing.cpu.packed import NotFiniteError, Packed
from draftwing.cpu.program import Traced
from draftwing.errors import CheckpointError, UnsupportedError
from draftwing.formats.gguf_weights import open_weights
from draftwing.methods.base import Budget, Drafter
from draftwing.methods.net_drafter import NetDrafter
from draftwing.models.attention import Attend, HeadTraits
from draftwing.models.cache import KVCache, check_kv_dtype
from draftwing.models.config import ModelConfig, module_names, num_modules, read_config
from draftwing.models.context import NO_FEATURES, Context, FeatureSpec, Row, TargetOutput
from draftwing.models.families import ExpertTraits
from draftwing.models.layers import (
    ClampedMLP,
    DecoderLayer,
    Experts,
    ExpertsBeside,
    GatedInput,
    GatedMLP,
    LatentProjection,
    LayerInputs,
    LayerNorm,
    Norm,
    PlainMLP,
    RMSNorm,
    Routing,
    SharedExpert,
    ShortConvolution,
    Taps,
    scaled,
    settled,
)
from draftwing.models.linear import Embedding, Layout, Linear, check_arithmetic, check_quantize, runs_as
from draftwing.models.lora import LoraWeights
from draftwing.models.recurrent import GatedDelta
from draftwing.models.rope import Rotary
from draftwing.models.target import Target, own_context
from draftwing.models.weights import Stored, Weights, check_finite, mxfp4_blocks
from draftwing.noise import AcceptArgs
from draftwing.runtime.choose import runtime_for
from draftwing.runtime.forward import PREFILL_CHUNK, Entries, NetShape, Runner, Runtime, TorchRuntime, score
from draftwing.runtime.graphs import GraphRuntime, Record
from draftwing.runtime.tree_builder import Drafted, DraftRequest, VerifyRequest
from draftwing.sampling import SamplingBatch
from draftwing.torch_utils import inference
from draftwing.tree import PAD, Accepted, DraftTree

T = TypeVar("T")

# --- weights ---------------------------------------------------------------------------------------------------------


@dataclass
class Reader:
    """Reads tensors by name, and lays matrices out for their runtime."""

    files: Weights
    dtype: torch.dtype  # dtype of everything that is no matrix
    device: torch.device
    layout: Layout
    used: set[str] = field(default_factory=set)  # names that were read

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape. Raises CheckpointError if a number is not finite."""
        self.used.add(name)
        weight = self.files.get(name, self.dtype, shape)
        check_finite(name, weight)
        return weight.to(self.device)

    def linear(
        self,
        names: Sequence[str],
        outs: Sequence[int],
        num_in: int,
        bias: bool = False,
        *,
        exact: bool = False,
        is_head: bool = False,
        gated: bool = False,
        rows: Tensor | None = None,
    ) -> Linear:
        """Stack matrices of one input; an ``exact`` one is never quantised, an LM head not to 4 bits.

        ``rows`` are the indices of the outputs in the stacked matrices; None for their order.
        """
        biases = [self.tensor(f"{name}.bias", out) for name, out in zip(names, outs, strict=True)] if bias else None
        bias_of_all = None if biases is None else torch.cat(biases)
        if bias_of_all is not None and rows is not None:
            bias_of_all = bias_of_all[rows]
        layout = replace(self.layout, quantize=None) if exact else self.layout
        if is_head and layout.quantize == "q4":
            layout = replace(layout, quantize="int8")
        weights = {f"{name}.weight": out for name, out in zip(names, outs, strict=True)}
        held = {name: self._stored(name, (out, num_in)) for name, out in weights.items()}
        return self._packed(held, lambda parts: _linear(_reordered(parts, rows), bias_of_all, layout, gated=gated))

    def embedding(self, name: str, num_tokens: int, width: int, rows: Tensor | None = None) -> Embedding:
        """Read an embedding, or some of its ``rows``."""

        def pack(parts: list[Stored]) -> Embedding:
            (part,) = _reordered(parts, rows)
            return Embedding(Packed.of_stored([part], None) if self.layout.runs == "kernel" else part.data)

        return self._packed({name: self._stored(name, (num_tokens, width))}, pack)

    def experts(
        self, name: str, shape: tuple[int, int, int], traits: ExpertTraits, *, gated: bool = False
    ) -> list[Linear]:
        """The matrices that a tensor of all experts, of ``shape`` (experts, out, in), or blocks of 4 bits hold.

        gpt-oss's have biases, and gates and ups alternate.
        """
        biases = [None] * shape[0] if traits.clamp is None else self.tensor(f"{name}_bias", *shape[:2])
        rows = torch.arange(shape[1]).view(-1, 2).T.flatten() if gated and traits.clamp is not None else slice(None)

        def pack(parts: list[Stored]) -> Linear:
            bias = biases[len(matrices)]
            part = replace(parts[0], data=parts[0].data[rows].contiguous())
            return _linear([part], None if bias is None else bias[rows], self.layout, gated=gated)

        matrices: list[Linear] = []
        for held in self._of_experts(name, shape, traits.is_transposed):
            matrices.append(self._packed(held, pack))
        return matrices

    def _of_experts(self, name: str, shape: tuple[int, int, int], is_transposed: bool) -> Iterator[dict[str, Stored]]:
        """Yield each expert's matrix under the name of its tensor in the file."""
        count, num_out, num_in = shape
        if f"{name}_blocks" in self.files:
            scales = self.files.get(f"{name}_scales", None, (count, num_out, num_in // 32))
            self.used |= {f"{name}_blocks", f"{name}_scales"}
            name = f"{name}_blocks"
            for part in map(mxfp4_blocks, self.files.get(name, None, (count, num_out, num_in // 32, 16)), scales):
                yield {name: part if self.layout.runs == "kernel" else self._plain(name, part.expand())}
            return
        stored = self._stored(name, (count, num_in, num_out) if is_transposed else shape)
        for matrix in stored.data:
            yield {name: replace(stored, num_in=num_in, data=matrix.T if is_transposed else matrix)}

    def _stored(self, name: str, shape: tuple[int, ...]) -> Stored:
        """A tensor as its runtime takes it: in the file's format for the CPU kernel, otherwise plain and checked."""
        self.used.add(name)
        if self.layout.runs == "kernel":
            return self.files.stored(name, shape)
        return self._plain(name, self.files.get(name, self.dtype, shape))

    def _plain(self, name: str, weight: Tensor) -> Stored:
        check_finite(name, weight)
        return Stored("plain", weight.shape[-1], weight.to(self.device, self.dtype))

    def _packed(self, held: dict[str, Stored], pack: Callable[[list[Stored]], T]) -> T:
        """Pack matrices; the CPU kernel's in their own formats or that of the layout.

        Raises CheckpointError, which names the matrix, if a number is not finite.
        """
        if self.layout.runs != "kernel":
            return pack([*held.values()])
        convert = Stored.rounded if self.layout.rounds else Stored.expanded if self.layout.expand else Stored.narrowed
        parts = [convert(part) for part in held.values()]
        try:
            if self.layout.quantize is not None:  # quantised levels are always finite
                self._check(held, parts)
            return pack(parts)
        except NotFiniteError:
            self._check(held, parts)
            raise
        finally:
            for part in held.values():
                self.files.drop(part)

    def _check(self, names: Iterable[str], parts: Sequence[Stored]) -> None:
        for name, part in zip(names, parts, strict=True):
            check_finite(name, part.data if part.data.is_floating_point() else part.expand())


def _linear(parts: list[Stored], bias: Tensor | None, layout: Layout, *, gated: bool) -> Linear:
    """Stack matrices of one input and lay them out."""
    if layout.runs != "kernel":
        weight = torch.cat([part.data for part in parts]) if len(parts) > 1 else parts[0].data
        return Linear(weight, bias).lay_out(layout, gated=gated)
    return Linear.of_stored(
        parts, bias, layout.quantize, gated=gated, rounds=layout.rounds, arithmetic=layout.arithmetic
    )


def _reordered(parts: list[Stored], rows: Tensor | None) -> list[Stored]:
    """Matrices with their outputs in another order, given by the index in all of them stacked."""
    if rows is None:
        return parts
    if len(parts) == 1:  # any number of rows
        return [replace(parts[0], data=parts[0].data[rows])]
    ends = torch.tensor([part.num_out for part in parts]).cumsum(0)
    starts = [0, *ends.tolist()]
    owners, counts = torch.unique_consecutive(torch.bucketize(rows, ends, right=True), return_counts=True)
    return [
        replace(parts[owner], data=parts[owner].data[piece - starts[owner]])
        for owner, piece in zip(owners.tolist(), torch.split(rows, counts.tolist()), strict=True)
    ]


def read_norm(reader: Reader, config: ModelConfig, name: str, size: int) -> Norm:
    """Read a norm of the family's kind."""
    family, eps = config.family, config.rms_norm_eps
    weight = reader.tensor(f"{name}.weight", size)
    if family.norm == "layer":
        bias = reader.tensor(f"{name}.bias", size) if family.norm_bias else None
        return LayerNorm(weight + family.norm_offset, bias, eps)
    if family.norm_offset or family.is_layered:  # in 16 bits it would round 1 + weight, or x before it is multiplied
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + family.norm_offset
    return RMSNorm(weight, eps)


def _head_traits(config: ModelConfig, index: int) -> HeadTraits:
    """The traits of a layer's heads. The rotation of layers with a window comes after that of the others."""
    pairs, local = config.rope.rotary_dim // 2, config.local_rope
    rotation, query_scale, sizes = None, None, config.sizes_of(index)
    if not config.rotates[index]:
        rotation = (0, 0)
    elif local is not None and config.sliding_windows[index] is not None:
        rotation = (pairs, local.rotary_dim // 2)
    elif local is not None or config.query_scale is not None:
        rotation = (0, pairs)
    if config.query_scale is not None and config.rotates[index] == all(config.rotates):
        query_scale = pairs
    return HeadTraits(
        None if config.attention_scale == config.head_dim**-0.5 else config.attention_scale,
        config.score_cap,
        rotation,
        query_scale,
        config.family.qk_norm in ("rotated", "unweighted"),
        source=sizes.source if sum(sizes.source == other.source for other in config.layer_sizes) > 1 else None,
        slots=config.slots[index] if config.slots else None,
    )


def _halved_pairs(config: ModelConfig) -> Tensor | None:
    """The order of the rows of q, k and v in which rotated pairs are half a rotation apart; None if they are so."""
    if not config.family.is_interleaved:
        return None
    dim, rotated = config.head_dim, config.rope.rotary_dim
    channels = torch.arange(dim)
    channels[:rotated] = channels[:rotated].view(-1, 2).T.flatten()
    heads = torch.arange(config.num_heads + config.num_kv_heads)[:, None] * dim + channels
    end = (config.num_heads + 2 * config.num_kv_heads) * dim
    return torch.cat([heads.flatten(), torch.arange(heads.numel(), end)])


def read_layer(reader: Reader, config: ModelConfig, index: int, base: str | None = None) -> DecoderLayer:
    """Read layer ``index`` of a folder, or another one like it, whose tensors' names begin with ``base``."""
    base = f"model.layers.{index}." if base is None else base
    sizes, hidden, moe = config.sizes_of(index), config.hidden_size, config.moe
    dim, kv_heads = sizes.head_dim, sizes.num_kv_heads if sizes.source == index else 0
    query_dim, kv_dim = config.num_heads * dim, kv_heads * dim
    family, names = config.family, config.family.names
    qkv: Linear | LatentProjection

    def norm(name: str | None, size: int = hidden) -> Norm | None:
        return None if name is None else read_norm(reader, config, base + name, size)

    def scaled_matrix(matrix: Linear) -> Linear:
        matrix.scale = config.residual_scale
        return matrix

    def mlp_of(gate_up: Sequence[str], down: str, width: int, bias: bool = False) -> GatedMLP | PlainMLP:
        outs = [(2 if family.is_gated else 1) * width // len(gate_up)] * len(gate_up)
        first = reader.linear([base + name for name in gate_up], outs, hidden, bias, gated=family.is_gated)
        kind = GatedMLP if family.is_gated else PlainMLP
        second = scaled_matrix(reader.linear([base + down], [hidden], width, bias))
        return kind(first, second, config.activation)

    traits, value_dim = _head_traits(config, index), dim
    heads, output, out_width = (config.num_heads, kv_heads, dim), names.out, None
    mixer: ShortConvolution | GatedDelta | None = None
    if config.convolves[index]:
        weight = reader.tensor(f"{base}conv.conv.weight", hidden, 1, config.conv_size)
        mixer, heads = ShortConvolution(weight[:, 0].T.contiguous()), (config.num_heads, config.num_slot_heads, dim)
        qkv, output = reader.linear([f"{base}conv.in_proj"], [3 * hidden], hidden), "conv.out_proj"
        out_width = hidden
    elif config.delta is not None and config.recurs[index]:
        qkv, mixer = _read_delta(reader, config, f"{base}linear_attn.")
        output, out_width = "linear_attn.out_proj" + "_tiled" * mixer.is_tiled, config.delta.values_width
    elif config.latent is not None:
        qkv = _read_latent(reader, config, f"{base}self_attn.")
        value_dim = config.latent.value_dim
        traits = replace(traits, value_dim=value_dim, shared_dim=config.latent.rope_dim)
    else:
        projections = [base + name for name in names.qkv]
        outs, rows = [query_dim, kv_dim, kv_dim], _halved_pairs(config)
        if config.delta is not None:
            outs[0], rows = 2 * query_dim, _gates_last(config)
            traits = replace(traits, is_gated=True)
        if not kv_heads:
            projections, outs = projections[:1], outs[:1]
            unused = (*names.qkv[1:], names.k_norm)  # some folders hold them
            reader.used |= {f"{base}{name}.{kind}" for name in unused for kind in ("weight", "bias")}
        elif sizes.repeats_keys:
            projections, outs = projections[:2], outs[:2]
            rows = torch.cat([torch.arange(query_dim + kv_dim), torch.arange(query_dim, query_dim + kv_dim)])
        outs = outs if len(projections) == len(outs) else [sum(outs)]
        qkv = reader.linear(projections, outs, hidden, config.qkv_bias, rows=rows)
    if names.sinks is not None:
        traits = replace(traits, sinks=reader.tensor(base + names.sinks, config.num_heads))
    has_bias = config.o_bias and mixer is None
    out_width = out_width or config.num_heads * value_dim
    out = scaled_matrix(reader.linear([base + output], [hidden], out_width, has_bias))
    mlp: GatedMLP | PlainMLP | Experts | ExpertsBeside
    post_norm, mixed = norm(names.mlp_in), family.experts if moe is not None and moe.sparse_layers[index] else None
    if mixed is not None and mixed.beside is None:
        mlp = _read_experts(reader, config, mixed, base, mlp_of)
    else:
        mlp = mlp_of(names.gate_up, names.down, sizes.intermediate_size, config.mlp_bias)
        if mixed is not None:
            assert post_norm is not None
            experts = _read_experts(reader, config, mixed, base, mlp_of)
            mlp, post_norm = ExpertsBeside(mlp, experts, _norms_beside(reader, config, mixed, base, post_norm)), None
    norms: Sequence[RMSNorm] | None = None
    if config.qk_norm and family.qk_norm == "unweighted":
        ones = RMSNorm(torch.ones(dim, dtype=reader.dtype, device=reader.device), config.rms_norm_eps)
        norms = (ones, ones) if config.rotates[index] else None
    elif config.qk_norm and mixer is None:
        widths = (query_dim, kv_dim) if family.qk_norm == "all" else (dim, dim)
        parts = zip((names.q_norm, names.k_norm) if kv_heads else (names.q_norm,), widths, strict=False)
        norms = [cast(RMSNorm, norm(name, width)) for name, width in parts]
        if family.is_layered and kv_heads:
            norms.append(RMSNorm(torch.ones(dim, dtype=reader.dtype, device=reader.device), config.rms_norm_eps))
    return DecoderLayer(
        input_norm=norm(names.attention_in),
        qkv=qkv,
        out=out,
        post_norm=post_norm,
        mlp=mlp,
        heads=heads,
        norms=norms,
        out_norms=(norm(names.attention_out), norm(names.mlp_out)),
        traits=traits,
        is_parallel=names.mlp_in is None and names.mlp_out is None,
        mixer=mixer,
        gated_input=None if config.layer_inputs is None else _read_gated_input(reader, config, base),
        scale=reader.tensor(f"{base}layer_scalar", 1).item() if family.is_layered else 1.0,
    )


def _read_gated_input(reader: Reader, config: ModelConfig, base: str) -> GatedInput:
    assert config.layer_inputs is not None
    width, hidden = config.layer_inputs[1], config.hidden_size
    gate = reader.linear([f"{base}per_layer_input_gate"], [width], hidden)
    projection = reader.linear([f"{base}per_layer_projection"], [hidden], width)
    norm = read_norm(reader, config, f"{base}post_per_layer_input_norm", hidden)
    return GatedInput(gate, projection, cast(RMSNorm, norm), config.activation)


def _read_layer_inputs(reader: Reader, config: ModelConfig, rows: Tensor | None) -> LayerInputs | None:
    """``rows`` renumber the tokens: see ``LeanTarget.from_folder``."""
    if config.layer_inputs is None:
        return None
    (count, width), hidden = config.layer_inputs, config.hidden_size
    rows = None if rows is None else rows.clamp(min=0)
    table = reader.embedding("model.embed_tokens_per_layer.weight", count, config.num_layers * width, rows)
    projection = reader.linear(["model.per_layer_model_projection"], [config.num_layers * width], hidden)
    norm = cast(RMSNorm, read_norm(reader, config, "model.per_layer_projection_norm", width))
    projection.scale = hidden**-0.5
    # The sum of both inputs is scaled by 2 ** -0.5, as its parts here.
    return LayerInputs(table, projection, RMSNorm(norm.weight.detach() * 2**-0.5, norm.eps), (width / 2) ** 0.5)


def _gates_last(config: ModelConfig) -> Tensor:
    """The order of the rows of q, k and v in which the gates, which follow the queries of each head, come last."""
    heads = torch.arange(2 * config.num_heads * config.head_dim).view(config.num_heads, 2, -1)
    rest = torch.arange(heads.numel(), heads.numel() + 2 * config.num_kv_heads * config.head_dim)
    return torch.cat([heads[:, 0].flatten(), rest, heads[:, 1].flatten()])


def _read_delta(reader: Reader, config: ModelConfig, base: str) -> tuple[Linear, GatedDelta]:
    """Read the gated delta rule, and the matrix of its inputs: queries, keys, values, gates, shares and decays."""
    delta, hidden = config.delta, config.hidden_size
    assert delta is not None
    values, heads, width = delta.num_value_heads, delta.num_key_heads, delta.values_width

    def unfused(name: str, sizes: Sequence[int]) -> Tensor:
        """The rows of a matrix in which each key head has its part of several inputs, with one input after another."""
        names.append(name)
        outs.append(sum(sizes) * heads)
        parts = torch.split_with_sizes(torch.arange(outs[-1]).view(heads, -1), [*sizes], 1)
        return torch.cat([part.flatten() for part in parts])

    def split(*inputs: tuple[str, int]) -> Tensor:
        """The rows of a matrix for each input."""
        names.extend(name for name, _ in inputs)
        outs.extend(size for _, size in inputs)
        return torch.arange(sum(size for _, size in inputs))

    # GGUF files of the fused family have the first of its two matrices split.
    is_split, group = config.family.delta == "split", values // heads
    names, outs = list[str](), list[int]()
    if is_split or f"{base}in_proj_qkv.weight" in reader.files:
        rows = split(("qkv", delta.conv_width), ("z", width))
    else:
        rows = unfused("qkvz", [delta.key_dim, delta.key_dim, width // heads, width // heads])
    rest = split(("b", values), ("a", values)) if is_split else unfused("ba", [group, group])
    rows = torch.cat([rows, len(rows) + rest])
    matrix = reader.linear([f"{base}in_proj_{name}" for name in names], outs, hidden, rows=None if is_split else rows)
    weight = reader.tensor(f"{base}conv1d.weight", delta.conv_width, 1, delta.conv_size)[:, 0].T.contiguous()
    a_log, dt_bias = (reader.tensor(f"{base}{name}", values) for name in ("A_log", "dt_bias"))
    norm = reader.tensor(f"{base}norm.weight", delta.value_dim)
    is_tiled = f"{base}out_proj_tiled.weight" in reader.files
    return matrix, GatedDelta(delta, weight, a_log, dt_bias, norm, config.rms_norm_eps, is_tiled=is_tiled)


def _read_latent(reader: Reader, config: ModelConfig, base: str) -> LatentProjection:
    """Read the matrices of latent attention, the rotated channels of each head first and their pairs halved."""
    latent, heads, hidden, bias = config.latent, config.num_heads, config.hidden_size, config.o_bias
    assert latent is not None
    rotated, width = latent.rope_dim, latent.rope_dim + latent.plain_dim
    pairs = torch.arange(rotated).view(-1, 2).T.flatten()
    order = torch.cat([latent.plain_dim + pairs, torch.arange(latent.plain_dim)])
    rows = (torch.arange(heads)[:, None] * width + order).flatten()

    def norm(name: str, size: int) -> RMSNorm:
        return RMSNorm(reader.tensor(f"{base}{name}.weight", size), 1e-6)  # whatever the config's is

    queries: tuple[Linear] | tuple[Linear, RMSNorm, Linear]
    if latent.query_rank is None:
        queries = (reader.linear([f"{base}q_proj"], [heads * width], hidden, rows=rows),)
    else:
        queries = (
            reader.linear([f"{base}q_a_proj"], [latent.query_rank], hidden, bias),
            norm("q_a_layernorm", latent.query_rank),
            reader.linear([f"{base}q_b_proj"], [heads * width], latent.query_rank, rows=rows),
        )
    rows = torch.cat([torch.arange(latent.rank), latent.rank + pairs])
    down = reader.linear([f"{base}kv_a_proj_with_mqa"], [latent.rank + rotated], hidden, bias, rows=rows)
    if f"{base}k_b_proj.weight" in reader.files:  # GGUF files have them apart
        outs = [heads * latent.plain_dim, heads * latent.value_dim]
        up = reader.linear([f"{base}k_b_proj", f"{base}v_b_proj"], outs, latent.rank)
    else:
        own = torch.arange(heads * (latent.plain_dim + latent.value_dim)).view(heads, -1)
        rows = torch.cat([own[:, : latent.plain_dim].flatten(), own[:, latent.plain_dim :].flatten()])
        up = reader.linear([f"{base}kv_b_proj"], [len(rows)], latent.rank, rows=rows)
    sizes = heads, rotated, latent.plain_dim, latent.value_dim
    return LatentProjection(queries, down, norm("kv_a_layernorm", latent.rank), up, sizes)


def _read_experts(
    reader: Reader,
    config: ModelConfig,
    names: ExpertTraits,
    base: str,
    mlp_of: Callable[[Sequence[str], str, int], GatedMLP | PlainMLP],
) -> Experts:
    """Read a mixture of experts; ``mlp_of`` reads a single one by its names after ``base``."""
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    count, width = moe.num_experts, moe.intermediate_size
    stacked = [f"{base}{name}" for name in names.stacked]
    if stacked[0] in reader.files or f"{stacked[0]}_blocks" in reader.files:
        inner = reader.experts(stacked[0], (count, 2 * width, hidden), names, gated=True)
        outer = reader.experts(stacked[1], (count, hidden, width), names)
    else:
        inner, outer, has_bias = [], [], names.clamp is not None
        for expert in range(count):
            *first, second = (base + name.format(e=expert) for name in names.apart)
            inner.append(reader.linear(first, [width, width], hidden, has_bias, gated=True))
            outer.append(reader.linear([second], [hidden], width, has_bias))
    experts: list[GatedMLP] = []
    for pair in zip(inner, outer, strict=True):
        pair[1].scale = config.residual_scale
        experts.append(GatedMLP(*pair, config.activation) if moe.clamp is None else ClampedMLP(*pair, *moe.clamp))
    router = reader.linear([base + names.router], [count], hidden, names.router_bias, exact=True)
    bias = None
    if names.score_bias is not None:
        name = base + names.score_bias
        bias = reader.tensor(name, *(1,) * (len(reader.files.shape(name)) - 1), count).flatten()
    scales = None if names.expert_scale is None else reader.tensor(base + names.expert_scale, count)
    shared = None
    if names.shared is not None and moe.shared_size:
        parts = [f"{names.shared}.{name}_proj" for name in ("gate", "up", "down")]
        mlp = cast(GatedMLP, mlp_of(parts[:2], parts[2], moe.shared_size))
        gate = None if names.shared_gate is None else reader.linear([base + names.shared_gate], [1], hidden, exact=True)
        shared = SharedExpert(mlp, gate)
    routing = Routing(
        moe.num_experts_per_token, names.scores, moe.norm_topk_prob, moe.groups, names.groups, moe.scale, names.sum_eps,
        names.scales_input,
    )  # fmt: skip
    return Experts(router, experts, routing, shared, bias, scales)


def _norms_beside(
    reader: Reader, config: ModelConfig, names: ExpertTraits, base: str, mlp_in: Norm
) -> tuple[Norm, Norm, Norm, Norm, Norm]:
    """The norms of ``ExpertsBeside``, of which the first is ``mlp_in``."""
    assert names.router_scale is not None
    hidden = config.hidden_size
    mlp_out, experts_in, experts_out = (
        read_norm(reader, config, f"{base}{place}_feedforward_layernorm_{number}", hidden)
        for place, number in (("post", 1), ("pre", 2), ("post", 2))
    )
    scale = reader.tensor(base + names.router_scale, hidden)
    scale = scale.to(torch.promote_types(scale.dtype, torch.float32)) * hidden**-0.5
    return mlp_in, mlp_out, experts_in, experts_out, RMSNorm(scale, config.rms_norm_eps)


def rotary_of(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Rotary:
    """The rotations of a model's layers."""
    return Rotary(config.rope, dtype, device, local=config.local_rope, query_scale=config.query_scale)


def _is_tied(files: Weights) -> bool:
    """Return False if an LM head is stored that is not the embedding, whatever config.json says."""
    names = "model.embed_tokens.weight", "lm_head.weight"
    if not all(name in files for name in names):
        return True
    embedding, head = (files.get(name) for name in names)
    return embedding.dtype == head.dtype and torch.equal(embedding, head)


def _read_ends(reader: Reader, config: ModelConfig, rows: Tensor | None) -> tuple[Embedding, Linear]:
    """The input embedding and the LM head; one matrix is kept once if both can use it.

    ``rows`` renumber the tokens: see ``LeanTarget.from_folder``.
    """
    size, name, is_tied = (config.vocab_size, config.hidden_size), "model.embed_tokens", config.tie_word_embeddings
    inputs, outputs = (None, None) if rows is None else (rows.clamp(min=0), rows[rows >= 0])
    is_one = is_tied and rows is None
    if is_one and reader.layout.runs != "kernel":
        embedding = reader.embedding(f"{name}.weight", *size)
        head = Linear(embedding.plain()).lay_out(reader.layout)
    else:
        head = reader.linear([name if is_tied else "lm_head"], [size[0]], size[1], is_head=True, rows=outputs)
        is_shared = is_one and not head.quantized
        embedding = Embedding(head.packed[0]) if is_shared else reader.embedding(f"{name}.weight", *size, inputs)
    if is_tied:
        reader.used.add("lm_head.weight")  # some folders save the shared matrix twice
    head.scale, head.cap = config.logit_scale, config.logit_cap
    return embedding, head


# --- the target ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class TappedNet:
    """A lean model as a ``Net``, which returns its logits and some hidden states.

    The vocabulary of a draft model's ``config`` is the target's: tokens that only the target has get -inf, and those
    that only the draft model has are left out.
    """

    config: ModelConfig
    embedding: Embedding
    layers: Sequence[DecoderLayer]
    norm: Norm
    head: Linear
    rotary: Rotary
    taps: tuple[int, ...] = ()
    inputs: LayerInputs | None = None
    places: Tensor | None = None  # the tokens that the head's rows belong to; None for the first ones

    @property
    def num_tokens(self) -> int:
        """Tokens that can be read."""
        return self.embedding.shape[0]

    @cached_property
    def shape(self) -> NetShape:
        config = self.config
        return NetShape(
            config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, config.sliding_windows,
            config.vocab_size, out_width=config.hidden_size * len(self.taps),
            has_plain_heads=all(layer.traits.is_plain and layer.mixer is None for layer in self.layers)
            and not any((window or 0) < 0 for window in config.sliding_windows),
            narrow_width=0 if config.kv_dtype is None else config.slot_width, num_slot_heads=config.num_slot_heads,
            delta=config.delta, num_recurrent=sum(config.recurs),
            num_slot_layers=config.num_slot_layers if config.layer_sizes else 0,
            is_sparse=self.places is not None or self.num_tokens < config.vocab_size,
        )  # fmt: skip

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def fuse(self, features: Any) -> Any:
        """Unchanged: the network reads tokens alone."""
        return features

    def embed(self, ids: Any) -> Any:
        """(R,) -> (R, H), what the first layer reads."""
        return settled(scaled(self.embedding.forward(ids), self.config.embedding_scale))

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """(R,) -> (R, H) after the final norm, and the taps (R, F) or None."""
        x, taps = self.embed(ids), Taps(self.taps)
        inputs = [None] * len(self.layers) if self.inputs is None else self.inputs.forward(ids, x)
        for index, (layer, own) in enumerate(zip(self.layers, inputs, strict=True)):
            taps.see(index, x)
            x = layer.forward(x, attend, index, own)
        read = self.norm.forward(x)
        taps.see(self.config.num_layers, read)
        return read, taps.joined()

    def logits(self, read: Any) -> Any:
        """(R, H) -> (R, V)."""
        size, places = self.config.vocab_size, self.places
        if places is None and self.num_tokens < size:
            places = torch.arange(self.num_tokens, device=self.device)
        out = self.head.spread(read, places, size)
        if places is not None or self.num_tokens == size:
            return out
        return out.columns(0, size) if isinstance(out, Traced) else out[..., :size]


def resized(model: LeanTarget, vocab_size: int) -> LeanTarget:
    """Return a model that shares the tokenizer but pads its matrices differently, with logits of another width."""
    net = replace(model.net, config=replace(model.net.config, vocab_size=vocab_size))
    return LeanTarget(net, model.runs, model.name, model.dtype)


@dataclass
class LeanContext(Context):
    """Rows, and the runner of the network that returns the context's features, over their KV slots."""

    runner: Runner = None  # type: ignore[assignment]  # set by new_context

    @property
    def cache(self) -> KVCache:
        return self.runner.cache


class LeanTarget(Target):
    """A ``Target`` that runs the lean decoder: ``net``, without taps, by ``runs``, which its drafters share."""

    def __init__(self, net: TappedNet, runtime: Runtime, name: str = "model", dtype: torch.dtype | None = None) -> None:
        config = net.config
        self.config, self.name, self.net, self.runs = config, name, net, runtime
        self._nets = {net.taps: net}
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers, self.max_length = config.num_layers, config.context_length
        self.dtype, self.device = dtype or net.dtype, net.device
        self.eos_ids = config.eos_ids
        self.applies_match = runtime.name == "kernel"
        self.supports_views = self.supports_pages = config.delta is None
        self.has_layers = bool(net.layers)

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        prepack: bool = True,
        name: str | None = None,
        quantize: str | None = None,
        fast: bool = False,
        expand: bool = False,
        arithmetic: str | None = None,
        kv_dtype: str | None = None,
        layers: bool = True,
        rows: Sequence[int] | None = None,
        lora: Path | None = None,
    ) -> LeanTarget:
        """Load a Hugging Face folder.

        On a CPU weights keep the format of the file, with float32 arithmetic. In bfloat16 the CPU kernel rounds the
        rows and weights of its products; states, KV slots and logits are float32.

        Args:
            quantize: "int8" for all matrices but the routers of experts, "q4" for 4 bits in the layers, or None.
            fast: quantise if the CPU kernel is faster that way: for a draft model, whose distribution is not output.
            expand: convert weights to float32.
            arithmetic: "float32" or "int8" products with GGUF blocks; None is int8 if the CPU kernel runs them.
            kv_dtype: "int8" keeps keys and values in 8 bits.
            layers: False loads only embedding, final norm and LM head (see ``Target.has_layers``).
            rows: renumber the tokens, for a draft model whose tokenizer has the target's tokens under other ids: for
                each of the target's tokens the model's, or -1, which gets a logit of -inf.
            lora: folder of an adapter to merge (``models.lora``).
        """
        device = torch.device(device)
        check_quantize(quantize, dtype, device)
        check_arithmetic(arithmetic)
        source, where = read_config(folder), str(folder / "config.json")
        config = replace(ModelConfig.from_hf(source, where), kv_dtype=kv_dtype)
        runtime, layout = runtime_for(
            dtype, device, {config.head_dim, *(sizes.head_dim for sizes in config.layer_sizes)}, config.activation,
            is_dense=config.moe is None and not config.family.is_layered, delta=config.delta, latent=config.latent,
            may_round=True, prepack=prepack, quantize=quantize, fast=fast,
        )  # fmt: skip
        check_quantize(quantize, dtype, device, layout.runs)
        check_kv_dtype(kv_dtype, layout.runs)
        states = torch.float32 if layout.runs == "kernel" else dtype  # in the kernel only products are in bfloat16
        layout = replace(layout, expand=expand, arithmetic=arithmetic or "int8")
        files = open_weights(folder)
        if config.tie_word_embeddings and not _is_tied(files):
            config = replace(config, tie_word_embeddings=False)
        if lora is not None:
            files = LoraWeights(files, lora, is_tied=config.tie_word_embeddings)
            config = replace(config, tie_word_embeddings=config.tie_word_embeddings and not files.unties)
        reader = Reader(files, states, device, layout)
        with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:  # packing is bound by memory traffic
            numbers = range(config.num_layers if layers else 0)
            decoder_layers = list(pool.map(partial(read_layer, reader, config), numbers))
        norm = read_norm(reader, config, config.family.names.final_norm, config.hidden_size)
        order = None if rows is None else torch.tensor(rows)
        embedding, head = _read_ends(reader, config, order)
        inputs = _read_layer_inputs(reader, config, order) if layers else None
        unused = reader.files.unused(reader.used) if layers else []
        unused = [key for key in unused if not key.endswith("rotary_emb.inv_freq")]
        # MTP modules in the same files, for `--draft mtp`; Qwen3-Next's config does not count them.
        if unused and (num_modules(source, where) or config.delta is not None):
            modules = module_names(source, unused, where)
            unused = [key for key in unused if modules is None or not modules.owns(key)]
        if unused:
            raise CheckpointError(
                f"{folder}: {len(unused)} weights have no place in a {config.model_type} model, first {unused[0]!r}: "
                f"is config.json that of another model?"
            )
        rotary = rotary_of(config, states, device)
        places = None
        if order is not None:
            config, places = replace(config, vocab_size=len(order)), (order >= 0).nonzero()[:, 0].to(device)
        net = TappedNet(config, embedding, decoder_layers, norm, head, rotary, inputs=inputs, places=places)
        target = cls(net, runtime, name or folder.name, dtype)
        if arithmetic == "int8" and not any(matrix.has_levels for matrix in target.matrices):
            raise UnsupportedError(
                f"arithmetic='int8' is for GGUF files in {', '.join(BLOCKS)} that the CPU kernel runs in float32, and "
                f"{target.name} runs as {target.runs_as}: leave it out, or choose quantize='int8'"
            )
        return target

    @property
    def quantized(self) -> str | None:
        return self.net.layers[0].qkv.quantized if self.has_layers else None

    @property
    def matrices(self) -> list[Linear]:
        """The matrices of the layers and the LM head."""
        modules = [*self.net.layers, *([] if self.net.inputs is None else [self.net.inputs])]
        parts = [part for module in modules for part in module.modules()]
        return [*(part for part in parts if isinstance(part, Linear)), self.net.head]

    @property
    def runs_as(self) -> str:
        return runs_as(self.matrices)

    @property
    def runtime(self) -> str:
        return self.runs.name

    @property
    def num_weight_bytes(self) -> int:
        layers = sum(layer.num_attention_bytes + layer.mlp.num_bytes for layer in self.net.layers)
        gates = sum(layer.gated_input.num_bytes for layer in self.net.layers if layer.gated_input is not None)
        inputs = 0 if self.net.inputs is None else self.net.inputs.projection.num_bytes
        return self.net.head.num_bytes + layers + gates + inputs

    @property
    def embedding(self) -> Embedding:
        return self.net.embedding

    @property
    def head(self) -> Linear:
        return self.net.head

    @property
    def is_prefix_free(self) -> bool:
        """True if a KV slot depends only on the tokens up to it, so that requests can share prefixes."""
        return self.net.rotary.position_only

    def use_graphs(self, record: Record | None) -> None:
        """Record the forwards of new contexts with ``record`` (``runtime.graphs``), or run them eagerly if it is None.

        No effect on mixtures of experts and recurrent models, which wait for the device, and on the CPU kernel.
        """
        is_fixed = self.config.moe is None and self.config.delta is None
        if self.runs.name != "kernel":
            self.runs = GraphRuntime(record) if record is not None and is_fixed else TorchRuntime()

    def _tapped(self, taps: tuple[int, ...]) -> TappedNet:
        if not self.has_layers:
            raise UnsupportedError(f"{self.name} was loaded without its layers and runs no text: load all of it")
        return self._nets.setdefault(taps, replace(self.net, taps=taps))

    def new_context(self, features: FeatureSpec = NO_FEATURES) -> LeanContext:
        """See ``Target.new_context``. Slots are allocated as rows join, or reused with their recorded graphs."""
        ctx = LeanContext(self.device, features=features)
        ctx.runner = self.runs.runner(self._tapped(features.taps), ctx)
        return ctx

    def read(self, ctx: Context, row: Row, start: int, stop: int) -> Tensor | None:
        runner, ids = own_context(ctx, LeanContext).runner, row.tokens[start:stop]
        width = runner.net.shape.out_width
        features = runner.prefill(len(ctx.rows), ids, prompt_length=row.prompt_length, start=start)
        if features is None and width:
            return torch.zeros(1, 0, width, dtype=self.net.dtype, device=self.device)
        return features

    def propose(
        self, drafter: Drafter, ctx: Context, sampling: SamplingBatch, budget: Budget, accept: AcceptArgs | None
    ) -> Drafted:
        """See ``Target.propose``. If the draft is one request to a kernel runner, the same call verifies the trees."""
        if not (drafter.is_one_request and isinstance(drafter, NetDrafter)):
            return super().propose(drafter, ctx, sampling, budget, accept)
        request = drafter.request(ctx, sampling, budget)
        if request is None:
            return Drafted(ctx.roots())
        verify = None
        if accept is not None:
            verify = VerifyRequest(cast(LeanContext, ctx).runner, [row.length for row in ctx.rows], accept)
        drafted = drafter.draft(request, verify)
        tree = drafter.receive(ctx, drafted)
        return drafted if tree is drafted.tree else drafted._replace(tree=tree)

    @inference
    def forward(self, ctx: Context, tree: DraftTree, accept: AcceptArgs | None = None) -> TargetOutput:
        entries = Entries(tree, ctx.lengths, prompt_lengths=[row.prompt_length for row in ctx.rows])
        return own_context(ctx, LeanContext).runner.verify(entries, accept)

    @torch.no_grad()
    def score(self, ids: Tensor, features: FeatureSpec = NO_FEATURES) -> TargetOutput:
        net = self._tapped(features.taps)
        if self.runs.name == "torch":
            return TargetOutput(*score(net, ids))
        runner, rows = self.runs.runner(net, self), ids.shape[0]
        outputs = []
        for start in range(0, ids.shape[1], PREFILL_CHUNK):
            tree, prompts = DraftTree.chain(ids[:, start : start + PREFILL_CHUNK]), [ids.shape[1]] * rows
            outputs.append(runner.forward(Entries(tree, [start] * rows, prompt_lengths=prompts, keeps_all=True)))
        logits = torch.cat([chunk for chunk, _ in outputs if chunk is not None], 1)
        taps = [chunk for _, chunk in outputs if chunk is not None]
        return TargetOutput(logits, torch.cat(taps, 1) if taps else None)

    @inference
    def commit(self, ctx: Context, tree: DraftTree, accepted: Accepted) -> None:
        """See ``Target.commit``. The nodes of a chain are in their final slots already."""
        ctx = own_context(ctx, LeanContext)
        if ctx.cache.states is not None:
            for row, path in enumerate(accepted.path.tolist()):
                ctx.cache.states.commit(row, [node for node in path if node != PAD])
        if not tree.is_line:
            ctx.runner.commit(ctx.lengths, accepted.path)

    @inference
    def draft(self, request: DraftRequest) -> Drafted:
        return own_context(request.ctx, LeanContext).runner.draft(request)

    @inference
    def watch(self, ctx: Context, row: int, start: int) -> Tensor:
        state = ctx.rows[row]
        tokens = state.tokens[start : state.length]
        return own_context(ctx, LeanContext).runner.watch(row, tokens, start, state.prompt_length)

    @inference
    def remove(self, ctx: Context, row: int) -> None:
        ctx = own_context(ctx, LeanContext)
        ctx.cache.move_row(ctx.num_rows - 1, row)
        ctx.rows[row] = ctx.rows[-1]
        ctx.rows.pop()
