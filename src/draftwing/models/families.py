"""The lean families as they lie on disk: which tensors a layer is made of, and under which names.

Shape suffixes: H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from draftwing.cpu.packed import NotFiniteError
from draftwing.models.config import ModelConfig
from draftwing.models.layers import DecoderLayer, Experts, GatedMLP, RMSNorm
from draftwing.models.linear import Embedding, Layout, Linear
from draftwing.models.weights import Stored, Weights, check_finite

T = TypeVar("T")


@dataclass
class Reader:
    """Reads tensors by name, remembers which, and lays matrices out for what will run them, one at a time.

    Attributes:
        dtype: of all that is no matrix.
        used: names that were read.
        layout: see ``Linear.lay_out``.
    """

    files: Weights
    dtype: torch.dtype
    device: torch.device
    layout: Layout
    used: set[str] = field(default_factory=set)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape, all of it finite."""
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
        gated: bool = False,
    ) -> Linear:
        """Several matrices of one input, stacked; an ``exact`` one is never quantised."""
        biases = [self.tensor(f"{name}.bias", out) for name, out in zip(names, outs, strict=True)] if bias else None
        bias_of_all = None if biases is None else torch.cat(biases)
        layout = self.layout.as_exact if exact else self.layout
        if layout.runs == "kernel":
            shapes = {f"{name}.weight": (out, num_in) for name, out in zip(names, outs, strict=True)}
            return self._packed(
                shapes,
                lambda parts: Linear.of_stored(parts, bias_of_all, layout.quantize, gated=gated, rounds=layout.rounds),
            )
        weights = [self.tensor(f"{name}.weight", out, num_in) for name, out in zip(names, outs, strict=True)]
        stacked = torch.cat(weights) if len(weights) > 1 else weights[0]
        del weights  # else the float matrices lie there twice while one is quantised
        return Linear(stacked, bias_of_all).lay_out(layout, gated=gated)

    def embedding(self, name: str, num_tokens: int, width: int) -> Embedding:
        """The rows of the input tokens."""
        if self.layout.runs != "kernel":
            return Embedding(self.tensor(name, num_tokens, width))
        return self._packed({name: (num_tokens, width)}, lambda parts: Embedding.of_stored(parts[0]))

    def _packed(self, shapes: Mapping[str, tuple[int, int]], pack: Callable[[list[Stored]], T]) -> T:
        """What ``pack`` makes of matrices as the file holds them, all of them finite."""
        self.used.update(shapes)
        held = [self.files.stored(name, shape) for name, shape in shapes.items()]
        parts = [self._as_laid_out(part) for part in held]
        try:
            if self.layout.quantize is not None:  # levels are finite whatever they were made of
                self._check(shapes, parts)
            return pack(parts)
        except NotFiniteError:
            self._check(shapes, parts)
            raise
        finally:
            for part in held:
                self.files.drop(part)

    def _as_laid_out(self, part: Stored) -> Stored:
        if self.layout.rounds:
            return part.rounded()
        return part.expanded() if self.layout.expand else part.narrowed()

    def _check(self, names: Iterable[str], parts: Sequence[Stored]) -> None:
        """Raise CheckpointError, naming the matrix, if one holds NaN or infinity."""
        for name, part in zip(names, parts, strict=True):
            check_finite(name, part.data if part.data.is_floating_point() else part.expand())


def read_layer(reader: Reader, config: ModelConfig, index: int) -> DecoderLayer:
    """Layer ``index`` of a folder."""
    base = f"model.layers.{index}."
    hidden, dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
    query_dim, kv_dim = config.num_heads * dim, config.num_kv_heads * dim

    def norm(name: str, size: int) -> RMSNorm:
        return RMSNorm(reader.tensor(f"{base}{name}.weight", size), eps)

    attention = f"{base}self_attn."
    if config.model_type == "phi3":
        qkv = reader.linear([f"{attention}qkv_proj"], [query_dim + 2 * kv_dim], hidden)
    else:
        names = [f"{attention}{each}_proj" for each in "qkv"]
        qkv = reader.linear(names, [query_dim, kv_dim, kv_dim], hidden, config.qkv_bias)
    return DecoderLayer(
        input_norm=norm("input_layernorm", hidden),
        qkv=qkv,
        out=reader.linear([f"{attention}o_proj"], [hidden], query_dim, config.o_bias),
        post_norm=norm("post_attention_layernorm", hidden),
        mlp=_read_mlp(reader, config, index, base),
        heads=(config.num_heads, config.num_kv_heads, dim),
        norms=(norm("self_attn.q_norm", dim), norm("self_attn.k_norm", dim)) if config.qk_norm else None,
    )


def _read_mlp(reader: Reader, config: ModelConfig, index: int, base: str) -> GatedMLP | Experts:
    hidden, wide = config.hidden_size, config.intermediate_size

    def gated(gate: list[str], down: str, width: int, bias: bool = False) -> GatedMLP:
        outs = [2 * width] if len(gate) == 1 else [width, width]
        gate_up = reader.linear(gate, outs, hidden, bias, gated=True)
        return GatedMLP(gate_up, reader.linear([down], [hidden], width, bias), config.activation)

    moe = config.moe
    if moe is None or not moe.is_sparse(index):
        gate = ["gate_up_proj"] if config.model_type == "phi3" else ["gate_proj", "up_proj"]
        return gated([f"{base}mlp.{name}" for name in gate], f"{base}mlp.down_proj", wide, config.mlp_bias)
    if config.model_type == "mixtral":
        block, names = f"{base}block_sparse_moe.", ("w1", "w3", "w2")
    else:
        block, names = f"{base}mlp.", ("gate_proj", "up_proj", "down_proj")
    expert: Callable[[int, str], str] = lambda e, name: f"{block}experts.{e}.{name}"  # noqa: E731
    experts = [
        gated([expert(e, names[0]), expert(e, names[1])], expert(e, names[2]), moe.intermediate_size)
        for e in range(moe.num_experts)
    ]
    router = reader.linear([f"{block}gate"], [moe.num_experts], hidden, exact=True)
    return Experts(router, experts, moe.num_experts_per_token, normalise=moe.norm_topk_prob)
