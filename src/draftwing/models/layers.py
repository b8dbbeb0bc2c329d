"""Decoder layers, for targets and draft networks.

A layer has matrices but no cache, mask or batch: it passes queries, keys and values to an ``Attend``. Decoding passes
one that writes KV slots and attends over a tree, training a causal one, tracing one that records the operation.

Code that uses ``Embedding``, ``concat``, ``columns``, ``RMSNorm``, ``Linear``, ``GatedMLP`` and an ``Attend`` runs on
tensors; on ``Traced`` values it records a program for the CPU kernel.

Shape suffixes: R rows (batch and tokens flattened), H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.cpu.program import Routed, Traced, join
from draftwing.models import gpu
from draftwing.models.attention import PLAIN_HEADS, Attend, HeadTraits
from draftwing.models.linear import Embedding, Linear
from draftwing.models.recurrent import GatedDelta

# The operators without their Python wrappers, which cost more than the work on a handful of rows.
_split = torch.split_with_sizes
_vector_norm: Callable[..., Tensor] = torch.linalg.vector_norm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


def settled(x: Any) -> Any:
    """Compute a traced value now, because several operations read it; tensors are returned unchanged."""
    return x.settled() if isinstance(x, Traced) else x


def scaled(x: Any, factor: float) -> Any:
    """Multiply rows (R, H) by a factor; overwrites a traced value."""
    if factor == 1:
        return x
    return x.scaled(factor) if isinstance(x, Traced) else x * factor


def concat(parts: Sequence[Any]) -> Any:
    """Concatenate (R, H) values along H."""
    return join(parts) if isinstance(parts[0], Traced) else torch.cat(list(parts), -1)


def columns(x: Any, width: int) -> list[Any]:
    """Split (R, n * width) into n values (R, width)."""
    if isinstance(x, Traced):
        return [x.columns(start, start + width) for start in range(0, x.width, width)]
    return list(torch.split(x, width, -1))


class Taps:
    """Collects hidden states of a forward. ``taps`` are their indices, in the order in which they are concatenated."""

    def __init__(self, taps: tuple[int, ...]) -> None:
        self._taps = taps
        self._states: dict[int, Any] = {}
        self._traced: Traced | None = None

    def see(self, index: int, x: Any) -> None:
        """Keep hidden state ``index`` (R, H) if it is a tap. A traced one is copied, since it is overwritten later."""
        if index not in self._taps:
            return
        self._states[index] = x
        if not isinstance(x, Traced):
            return
        if self._traced is None:
            width = x.width * len(self._taps)
            self._traced = Traced(x.program, x.program.scratch(width), width)
        for place, tap in enumerate(self._taps):
            if tap == index:
                x.write(self._traced.buffer, place * x.width)

    def joined(self) -> Any:
        """(R, n * H), or None without taps."""
        if self._traced is not None or not self._taps:
            return self._traced
        return torch.cat([self._states[tap] for tap in self._taps], -1)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (1910.07467). A weight of another dtype than x is applied first."""

    centers = False  # the mean is not subtracted
    bias = None

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.requires_grad)
        self.eps = eps
        self._root, self._floor = math.sqrt(weight.shape[0]), weight.shape[0] * eps

    def forward(self, x: Any, channels: Tensor | None = None) -> Any:
        """(..., H) -> (..., H). In half precision the norm is taken in float32.

        ``channels`` (H,) are the indices of the weights of x's channels; None for their order.
        """
        if isinstance(x, Traced):
            return x.normed(self)
        weight = self.weight if channels is None else self.weight[channels]
        if gpu.is_usable(x):
            return gpu.add_norm(x, None, weight, self.eps)[1]
        # On a CPU ``F.rms_norm`` takes several times as long for a few rows.
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        length: Tensor = _vector_norm(wide, dim=-1, keepdim=True)
        unit = wide * (self._root * torch.rsqrt(length * length + self._floor))
        if weight.dtype != x.dtype:
            return (unit * weight).to(x.dtype)
        return (unit if unit.dtype == x.dtype else unit.to(x.dtype)) * weight


class LayerNorm(nn.Module):
    """(x - mean) / deviation * weight + bias over the last dimension (1607.06450); the bias may be None."""

    centers = True

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.requires_grad)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=bias.requires_grad)
        self.eps = eps

    def forward(self, x: Any) -> Any:
        """(..., H) -> (..., H)."""
        return (
            x.normed(self) if isinstance(x, Traced) else F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        )


Norm = RMSNorm | LayerNorm


def add_normed(x: Any, y: Any, norm: Norm | None) -> Any:
    """x + norm(y), of (R, H) each."""
    if isinstance(x, Traced):
        return x.plus(y if norm is None else norm.forward(y))
    return x + (y if norm is None else norm.forward(y))


class PlainMLP(nn.Module):
    """Two matrices with an activation between them."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self.activation, self.activation_name = ACTIVATIONS[activation], activation

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a token reads."""
        return self.gate_up.num_bytes + self.down.num_bytes

    def forward(self, x: Any, residual: Any = None) -> Any:
        """(R, H) -> (R, H), plus ``residual`` if given."""
        if isinstance(x, Traced):
            return self.down.forward(x.linear(self.gate_up.packed, activation=self.activation_name), residual)
        return self.down.forward(self._activated(self.gate_up.forward(x)), residual)

    def _activated(self, up: Tensor) -> Tensor:
        """The output of the first matrix -> (R, intermediate)."""
        return self.activation(up)


class GatedMLP(PlainMLP):
    """SwiGLU or GeGLU (2002.05202) with gate and up in one matrix (2 * intermediate, H)."""

    def _activated(self, up: Tensor) -> Tensor:
        if self.activation_name == "silu" and gpu.is_usable(up):
            return gpu.silu_mul(up)
        gate, up = up.chunk(2, 1)
        return self.activation(gate) * up


class ClampedMLP(GatedMLP):
    """(up + 1) * gate * sigmoid(alpha * gate), with gate and up clamped to ``limit`` (gpt-oss)."""

    def __init__(self, gate_up: Linear, down: Linear, alpha: float, limit: float) -> None:
        super().__init__(gate_up, down, "silu")
        self.alpha, self.limit = alpha, limit

    def _activated(self, up: Tensor) -> Tensor:
        gate, up = up.chunk(2, 1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * (gate * self.alpha).sigmoid()


class SharedExpert(nn.Module):
    """An expert that every row goes through, weighted by the sigmoid of ``gate`` if there is one (Qwen2-MoE)."""

    def __init__(self, mlp: GatedMLP, gate: Linear | None) -> None:
        super().__init__()
        self.mlp, self.gate = mlp, gate

    def forward(self, x: Any, residual: Any = None) -> Any:
        """(R, H) -> (R, H), plus ``residual`` if given."""
        if self.gate is None:
            return self.mlp.forward(x, residual)
        out = self.mlp.forward(x)
        if isinstance(x, Traced):
            return self.gate.forward(x).routed(Routing(1, "sigmoid")).combine(out, x.width, residual)
        out = out * self.gate.forward(x).sigmoid()
        return out if residual is None else residual + out


@dataclass(frozen=True)
class Routing:
    """How a row's experts are chosen and weighted."""

    num_per_token: int
    scores: str = "softmax"  # see ``ExpertTraits``, also for ``group_by``
    normalise: bool = False  # the weights of the chosen experts are rescaled to sum to one
    groups: tuple[int, int] | None = None  # number of groups, and of those that experts are chosen from
    group_by: str | None = None
    scale: float = 1.0  # factor of the weights
    sum_eps: float = 0.0
    scales_input: bool = False

    def choose(self, scores: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """The router's scores (R, experts) -> the weights and the indices (R, k) of the chosen experts."""
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))  # in half precision too, as in training
        if self.scores == "chosen":
            scores, chosen = scores.topk(self.num_per_token, dim=-1)
            return scores.softmax(-1), chosen
        given, scores = scores, scores.sigmoid() if self.scores == "sigmoid" else scores.softmax(-1)
        ranked = scores if bias is None else scores + bias
        if bias is None and self.scores == "sigmoid":  # before they saturate
            ranked = given
        if self.groups is not None:
            num_groups, num_kept = self.groups
            grouped = ranked.view(len(ranked), num_groups, -1)
            worth = grouped.amax(-1) if self.group_by == "max" else grouped.topk(2, -1)[0].sum(-1)
            is_kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, worth.topk(num_kept, -1)[1], True)
            ranked = grouped.masked_fill(~is_kept[..., None], -torch.inf).flatten(1)
        chosen = ranked.topk(self.num_per_token, dim=-1)[1]
        weights = scores.gather(1, chosen)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + self.sum_eps)
        return weights * self.scale if self.scale != 1 else weights, chosen


class Experts(nn.Module):
    """A mixture of experts: the top k experts of each row, weighted (Mixtral 2401.04088).

    Args:
        bias: (experts,) added to the scores by which experts are chosen, or None.
        scales: (experts,) factors of the weights, or None.
    """

    def __init__(
        self,
        router: Linear,
        experts: Sequence[GatedMLP],
        routing: Routing,
        shared: SharedExpert | None = None,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, nn.ModuleList(experts), shared
        self.routing, self.bias, self.scales = routing, bias, scales

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a token reads: the router's and those of its experts."""
        expert = self.experts[0]
        assert isinstance(expert, GatedMLP)
        shared = 0 if self.shared is None else self.shared.mlp.num_bytes
        return self.router.num_bytes + self.routing.num_per_token * expert.num_bytes + shared

    def forward(self, x: Any, residual: Any = None, routed_by: Any = None) -> Any:
        """(R, H) -> (R, H), plus ``residual`` if given. The results of the experts are summed in their order.

        ``routed_by`` (R, H) is read by the router instead of x.
        """
        x = settled(x)
        scores = self.router.forward(x if routed_by is None else routed_by)
        if isinstance(x, Traced):
            return self._trace(x, scores, residual)
        weights, chosen = self.routing.choose(scores, self.bias)
        if self.scales is not None:
            weights = weights * self.scales[chosen]
        weights = weights.to(x.dtype)
        out = torch.zeros_like(x)
        for index in sorted(set(chosen.flatten().tolist())):
            rows, places = (chosen == index).nonzero(as_tuple=True)
            expert, read, shares = self.experts[index], x[rows], weights[rows, places, None]
            out.index_add_(0, rows, expert(read * shares) if self.routing.scales_input else expert(read) * shares)
        if self.shared is not None:
            out = self.shared.forward(x, out)
        return out if residual is None else residual + out

    def _trace(self, x: Traced, scores: Any, residual: Traced | None) -> Traced:
        routed: Routed = scores.routed(self.routing, self.bias, self.scales)
        if self.shared is not None:
            residual = self.shared.forward(x, residual)
        experts = cast(Sequence[GatedMLP], self.experts)
        clamp = (experts[0].alpha, experts[0].limit) if isinstance(experts[0], ClampedMLP) else None
        ups, downs = [expert.gate_up.packed[0] for expert in experts], [expert.down.packed[0] for expert in experts]
        pairs = routed.linear(x, ups, gathers=True, activation=experts[0].activation_name, clamp=clamp)
        pairs = routed.linear(pairs, downs, gathers=False, scale=experts[0].down.scale)
        return routed.combine(pairs, x.width, residual)


class ExpertsBeside(nn.Module):
    """An MLP and a mixture of experts next to each other (Gemma 4).

    Args:
        norms: of the MLP's input and output, of the experts' input and output, and of the router's input.
    """

    def __init__(self, mlp: GatedMLP | PlainMLP, experts: Experts, norms: Sequence[Norm]) -> None:
        super().__init__()
        self.mlp, self.experts = mlp, experts
        self.mlp_in, self.mlp_out, self.experts_in, self.experts_out, self.router_in = norms

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a token reads."""
        return self.mlp.num_bytes + self.experts.num_bytes

    def forward(self, x: Any) -> Any:
        """(R, H) -> (R, H)."""
        dense = settled(self.mlp_out.forward(self.mlp.forward(self.mlp_in.forward(x))))
        mixed = self.experts.forward(self.experts_in.forward(x), routed_by=self.router_in.forward(x))
        return add_normed(dense, mixed, self.experts_out)


class LatentProjection(nn.Module):
    """Queries, keys and values by way of narrow ones (multi-head latent attention, DeepSeek-V2, 2405.04434).

    Each head's channels are its rotated ones, then the others. In PyTorch values are padded with zeros to that width.

    Args:
        queries: (H, heads * width), or a matrix, a norm and a second matrix.
        down: (H, rank + rotated width): the latent keys and values, and the rotated keys that all heads share.
        up: (rank, heads * (plain width + value width)): the keys of all heads, then their values.
        sizes: heads, rotated width, plain width, value width.
    """

    def __init__(
        self,
        queries: tuple[Linear] | tuple[Linear, RMSNorm, Linear],
        down: Linear,
        norm: RMSNorm,
        up: Linear,
        sizes: tuple[int, int, int, int],
    ) -> None:
        super().__init__()
        self.queries, self.down, self.norm, self.up = nn.ModuleList(queries), down, norm, up
        self.sizes = sizes

    @property
    def quantized(self) -> str | None:
        """See ``Linear``."""
        return self.down.quantized

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a token reads."""
        return sum(part.num_bytes for part in self.modules() if isinstance(part, Linear))

    def forward(self, x: Any) -> Any:
        """(R, H) -> (R, 3 * heads * width); traced, with narrow values, and the shared keys once, after them."""
        if isinstance(x, Traced):
            return self._trace(x)
        heads, rotated, plain, value = self.sizes
        q = x
        for part in self.queries:
            q = part(q)
        latent, shared = _split(self.down.forward(x), (self.down.num_out - rotated, rotated), 1)
        own, values = _split(self.up.forward(self.norm.forward(latent)), (heads * plain, heads * value), 1)
        keys = torch.cat([shared[:, None].expand(-1, heads, -1), own.view(-1, heads, plain)], -1)
        values = F.pad(values.view(-1, heads, value), (0, rotated + plain - value))
        return torch.cat([q, keys.flatten(1), values.flatten(1)], 1)

    def _trace(self, x: Traced) -> Traced:
        down, last = self.down.forward(x), cast(Linear, self.queries[-1])
        for part in list(self.queries)[:-1]:
            x = part(x)
        rank = self.up.num_in
        width = last.num_out + self.up.num_out
        out = Traced(x.program, x.program.scratch(width + self.sizes[1]), width + self.sizes[1])
        x.linear(last.packed, into=(out, 0))
        down.columns(0, rank).normed(self.norm).linear(self.up.packed, into=(out, last.num_out))
        down.columns(rank, down.width).write(out.buffer, width)
        return out


class ShortConvolution(nn.Module):
    """C * sum of w_i * (B * x)_i over the last tokens, channel by channel; B, C and x are columns of one matrix (LFM2).

    Args:
        weight: (size, H), of the oldest token first.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.requires_grad)
        self.size, self.out_width = weight.shape

    def mix(self, layer: int, rows: Tensor, attend: Any) -> Tensor:
        """(R, 3 * H) -> (R, H)."""
        b, gates, x = rows.chunk(3, 1)
        inputs = b * x
        before = attend.before(layer, inputs, self.size - 1)
        out = inputs * self.weight[-1]
        for i in range(self.size - 2, -1, -1):
            out = out + before[:, i] * self.weight[i]
        return out * gates


class LayerInputs(nn.Module):
    """The inputs of all layers: of a token, and of its projected embedding (Gemma 4).

    Args:
        table: (V, layers * width).
        projection: (layers * width, H).
        norm: of ``width``.
        scale: factor of the token's rows.
    """

    def __init__(self, table: Embedding, projection: Linear, norm: RMSNorm, scale: float) -> None:
        super().__init__()
        self.table, self.projection, self.norm, self.scale = table, projection, norm, scale

    def forward(self, ids: Any, x: Any) -> list[Any]:
        """Tokens (R,) and their scaled embeddings (R, H) -> (R, width) for each layer."""
        width, tokens = self.norm.weight.shape[0], scaled(self.table.forward(ids), self.scale)
        projected = self.projection.forward(x)
        if isinstance(x, Traced):
            return columns(add_normed(tokens, projected, self.norm), width)
        return columns(tokens + self.norm.forward(projected.view(len(x), -1, width)).flatten(1), width)


class GatedInput(nn.Module):
    """Adds norm(projection(activation(gate(x)) * input)) to the stream (Gemma 4)."""

    def __init__(self, gate: Linear, projection: Linear, norm: RMSNorm, activation: str) -> None:
        super().__init__()
        self.gate, self.projection, self.norm = gate, projection, norm
        self.activation, self.activation_name = ACTIVATIONS[activation], activation

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a token reads."""
        return self.gate.num_bytes + self.projection.num_bytes

    def forward(self, x: Any, own: Any) -> Any:
        """(R, H) and the layer's input (R, width) -> (R, H)."""
        if isinstance(x, Traced):
            gated = x.linear(self.gate.packed, activation=self.activation_name, times=own)
        else:
            gated = self.activation(self.gate.forward(x)) * own
        return add_normed(x, self.projection.forward(gated), self.norm)


class DecoderLayer(nn.Module):
    """Attention or another mixer, and MLP, each added to the residual stream.

    Args:
        input_norm: before attention, or None (EAGLE-1; OLMo 2).
        qkv: (H_in, (heads + 2 * KV heads) * width), queries first.
        post_norm: before the MLP, or None: it reads the stream (OLMo 2, ``ExpertsBeside``), or what attention reads
            (``is_parallel``).
        heads: number of query heads and of KV heads, and their width.
        norms: of queries and keys, or None: of each head (Qwen3), or of all heads together (OLMo 2). Values may have
            a norm, too (Gemma 4); keys have none if there are no KV heads.
        out_norms: of what attention and MLP add, or None.
        traits: differences of the heads from Llama's.
        is_parallel: attention and MLP read the same norm, and both are added (Cohere).
        mixer: instead of attention, of the columns of ``qkv``.
        gated_input: adds the input of this layer alone, or None.
        scale: factor of the result of ``forward``.
    """

    def __init__(
        self,
        input_norm: Norm | None,
        qkv: Linear | LatentProjection,
        out: Linear,
        post_norm: Norm | None,
        mlp: GatedMLP | PlainMLP | Experts | ExpertsBeside,
        heads: tuple[int, int, int],
        norms: Sequence[RMSNorm] | None = None,
        *,
        out_norms: tuple[Norm | None, Norm | None] = (None, None),
        traits: HeadTraits = PLAIN_HEADS,
        is_parallel: bool = False,
        mixer: ShortConvolution | GatedDelta | None = None,
        gated_input: GatedInput | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.input_norm, self.post_norm = input_norm, post_norm
        self.mixer, self.gated_input, self.scale = mixer, gated_input, scale
        self.out_norm, self.mlp_out_norm = out_norms
        self.qkv, self.out, self.mlp = qkv, out, mlp
        self.num_heads, self.num_kv_heads, self.head_dim = heads
        self.traits, self.is_parallel = traits, is_parallel
        # Norms over all heads are taken before ``attend``, which splits the heads and norms each.
        over_all = norms is not None and norms[0].weight.shape[0] > self.head_dim
        self.q_norm: RMSNorm | None = norms[0] if norms and not over_all else None
        self.k_norm: RMSNorm | None = norms[1] if norms and len(norms) > 1 and not over_all else None
        self.v_norm: RMSNorm | None = norms[2] if norms and len(norms) > 2 else None
        self.q_norm_all: RMSNorm | None = norms[0] if norms and over_all else None
        self.k_norm_all: RMSNorm | None = norms[1] if norms and over_all else None

    @property
    def num_attention_bytes(self) -> int:
        """Bytes of weights that a token reads in attention."""
        return self.qkv.num_bytes + self.out.num_bytes

    def forward(self, x: Any, attend: Attend, layer: int, own: Any = None) -> Any:
        """(R, H) -> (R, H). ``layer`` is passed to ``attend``; ``own`` (R, width) is the layer's own input, if any."""
        x = self.mix(x if self.input_norm is None else self.input_norm.forward(x), x, attend, layer)
        if self.gated_input is not None:
            x = self.gated_input.forward(x, own)
        return scaled(x, self.scale)

    def mix(self, normed: Any, x: Any, attend: Attend, layer: int) -> Any:
        """The layer with a given attention input ``normed`` (R, H_in): draft networks read more than the stream x."""
        if self.is_parallel:
            assert not isinstance(self.mlp, ExpertsBeside)
            normed = settled(normed)
            return self.mlp.forward(normed, self._attend(normed, x, attend, layer))
        norm = self.post_norm if self.out_norm is None and isinstance(self.post_norm, RMSNorm) else None
        if norm is not None and not isinstance(x, Traced) and gpu.is_usable(x):
            mixed = self.out.forward(self._mixed(normed, attend, layer))
            x, normed = gpu.add_norm(x, mixed, norm.weight, norm.eps)
            return self._add(self.mlp, normed, x, self.mlp_out_norm)
        return self.add_mlp(self._attend(normed, x, attend, layer))

    def add_attention(self, x: Any, attend: Attend, layer: int) -> Any:
        """The attention alone, added to the stream (R, H)."""
        normed = x if self.input_norm is None else self.input_norm.forward(x)
        return self._attend(normed, x, attend, layer)

    def add_mlp(self, x: Any) -> Any:
        """The MLP alone, added to the stream (R, H)."""
        norm = self.input_norm if self.is_parallel else self.post_norm
        return self._add(self.mlp, x if norm is None else norm.forward(x), x, self.mlp_out_norm)

    def _attend(self, normed: Any, x: Any, attend: Attend, layer: int) -> Any:
        return self._add(self.out, self._mixed(normed, attend, layer), x, self.out_norm)

    def _mixed(self, normed: Any, attend: Attend, layer: int) -> Any:
        """The values that each head attends to (R, heads * value width)."""
        rows = self._project(normed)
        if self.traits.is_gated and not isinstance(rows, Traced):
            width = self.num_heads * self.head_dim
            mixed = attend(layer, rows[:, :-width], self)
            return mixed * rows[: len(mixed), -width:].sigmoid()
        mixed = attend(layer, rows, self)
        if self.traits.value_dim is None or isinstance(mixed, Traced):
            return mixed
        return mixed.view(len(mixed), self.num_heads, -1)[..., : self.traits.value_dim].flatten(1)

    def _add(self, part: Any, read: Any, x: Any, norm: Norm | None) -> Any:
        """x (R, H) plus the normed result of a part."""
        return part.forward(read, x) if norm is None else add_normed(x, part.forward(read), norm)

    def _project(self, normed: Any) -> Any:
        """Queries, keys and values (R, (heads + 2 * KV heads) * width) of the attention's input."""
        qkv = self.qkv.forward(normed)
        if self.q_norm_all is None or self.k_norm_all is None:
            return qkv
        sizes = [self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim]
        if isinstance(qkv, Traced):
            return qkv.with_normed(0, self.q_norm_all).with_normed(sizes[0], self.k_norm_all)
        q, k, v = _split(qkv, (*sizes, sizes[1]), 1)
        return torch.cat([self.q_norm_all.forward(q), self.k_norm_all.forward(k), v], 1)
