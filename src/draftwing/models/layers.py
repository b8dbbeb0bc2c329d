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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.cpu.program import Traced, join
from draftwing.models import gpu
from draftwing.models.attention import Attend
from draftwing.models.linear import Linear

# The operators without their Python wrappers, which cost more than the work on a handful of rows.
_split = torch.split_with_sizes
_vector_norm: Callable[..., Tensor] = torch.linalg.vector_norm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def settled(x: Any) -> Any:
    """Compute a traced value now, because several operations read it; tensors are returned unchanged."""
    return x.settled() if isinstance(x, Traced) else x


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
    """x / rms(x) * weight over the last dimension (1910.07467)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.requires_grad)
        self.eps = eps
        self._root, self._floor = math.sqrt(weight.shape[0]), weight.shape[0] * eps

    def forward(self, x: Any) -> Any:
        """(..., H) -> (..., H). In half precision the norm is taken in float32."""
        if isinstance(x, Traced):
            return x.normed(self)
        if gpu.is_usable(x):
            return gpu.add_norm(x, None, self.weight, self.eps)[1]
        # On a CPU ``F.rms_norm`` takes several times as long for a few rows.
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        length: Tensor = _vector_norm(wide, dim=-1, keepdim=True)
        unit = wide * (self._root * torch.rsqrt(length * length + self._floor))
        return (unit if unit.dtype == x.dtype else unit.to(x.dtype)) * self.weight


class GatedMLP(nn.Module):
    """SwiGLU or GeGLU (2002.05202) with gate and up in one matrix (2 * intermediate, H)."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self.activation, self.activation_name = ACTIVATIONS[activation], activation
        self._width = gate_up.num_out // 2

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a token reads."""
        return self.gate_up.num_bytes + self.down.num_bytes

    def forward(self, x: Any, residual: Any = None) -> Any:
        """(R, H) -> (R, H), plus ``residual`` if given."""
        if isinstance(x, Traced):
            return self.down.forward(x.linear(self.gate_up.packed, activation=self.activation_name), residual)
        both = self.gate_up.forward(x)
        if self.activation_name == "silu" and gpu.is_usable(both):
            return self.down.forward(gpu.silu_mul(both), residual)
        gate, up = _split(both, (self._width, self._width), 1)
        return self.down.forward(self.activation(gate) * up, residual)


class Experts(nn.Module):
    """A mixture of experts: softmax router, the top k experts of each row, weighted (Mixtral 2401.04088)."""

    def __init__(self, router: Linear, experts: list[GatedMLP], num_per_token: int, *, normalise: bool) -> None:
        super().__init__()
        self.router, self.experts = router, nn.ModuleList(experts)
        self.num_per_token, self.normalise = num_per_token, normalise

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a token reads: the router's and those of its experts."""
        expert = self.experts[0]
        assert isinstance(expert, GatedMLP)
        return self.router.num_bytes + self.num_per_token * expert.num_bytes

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """(R, H) -> (R, H), plus ``residual`` if given. The results of the experts are summed in their order."""
        probs = self.router.forward(x).float().softmax(-1)  # always float32, as in training
        weights, chosen = probs.topk(self.num_per_token, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        out = torch.zeros_like(x)
        for index in sorted(set(chosen.flatten().tolist())):
            rows, places = (chosen == index).nonzero(as_tuple=True)
            out.index_add_(0, rows, self.experts[index](x[rows]) * weights[rows, places, None])
        return out if residual is None else residual + out


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream.

    Args:
        input_norm: before attention, or None (EAGLE-1).
        qkv: (H_in, (heads + 2 * KV heads) * width), queries first.
        heads: number of query heads and of KV heads, and their width.
        norms: of each head's queries and keys (Qwen3), or None.
    """

    def __init__(
        self,
        input_norm: RMSNorm | None,
        qkv: Linear,
        out: Linear,
        post_norm: RMSNorm,
        mlp: GatedMLP | Experts,
        heads: tuple[int, int, int],
        norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> None:
        super().__init__()
        self.input_norm, self.post_norm = input_norm, post_norm
        self.qkv, self.out, self.mlp = qkv, out, mlp
        self.q_norm: RMSNorm | None = norms[0] if norms else None
        self.k_norm: RMSNorm | None = norms[1] if norms else None
        self.num_heads, self.num_kv_heads, self.head_dim = heads

    @property
    def num_attention_bytes(self) -> int:
        """Bytes of weights that a token reads in attention."""
        return self.qkv.num_bytes + self.out.num_bytes

    def forward(self, x: Any, attend: Attend, layer: int) -> Any:
        """(R, H) -> (R, H). ``layer`` is passed to ``attend``."""
        return self.mix(x if self.input_norm is None else self.input_norm.forward(x), x, attend, layer)

    def mix(self, normed: Any, x: Any, attend: Attend, layer: int) -> Any:
        """The layer with a given attention input ``normed`` (R, H_in): draft networks read more than the stream x."""
        mixed = attend(layer, self.qkv.forward(normed), self)
        if not isinstance(x, Traced) and gpu.is_usable(x):
            x, normed = gpu.add_norm(x, self.out.forward(mixed), self.post_norm.weight, self.post_norm.eps)
            return self.mlp.forward(normed, x)
        return self.add_mlp(self.out.forward(mixed, x))

    def add_attention(self, x: Any, attend: Attend, layer: int) -> Any:
        """The attention alone, added to the stream (R, H)."""
        normed = x if self.input_norm is None else self.input_norm.forward(x)
        return self.out.forward(attend(layer, self.qkv.forward(normed), self), x)

    def add_mlp(self, x: Any) -> Any:
        """The MLP alone, added to the stream (R, H)."""
        return self.mlp.forward(self.post_norm.forward(x), x)
