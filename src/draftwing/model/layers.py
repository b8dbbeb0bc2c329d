"""One decoder layer for every model here: the target's, and the building block of every draft net.

A layer knows its matrices and nothing of caches, masks or batches: it hands queries, keys and values to an
``Attend`` and gets the mixture back. Decoding passes one that writes KV slots and sees a tree; training passes
a causal one.

Shape suffixes: R rows (batch and tokens flattened), H hidden, K heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.model.linear import Linear

# The operators themselves: their Python wrappers cost more than the work on a handful of rows.
_split = torch.split_with_sizes
_vector_norm: Callable[..., Tensor] = torch.linalg.vector_norm

__all__ = ["Attend", "DecoderLayer", "Experts", "GatedMLP", "RMSNorm", "rotate"]

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Attend(Protocol):
    """Mixes values by attention."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(R, K, D) each, k and v with the KV heads alone -> (R, K * D)."""
        ...


def rotate(heads: Tensor, cis: Tensor) -> Tensor:
    """Rotary embedding (RoFormer, 2104.09864) as one complex product.

    The result holds each pair side by side instead of half a head apart; queries and keys are permuted alike,
    so their products are the same, and nobody else reads them.

    Args:
        heads: (R, K, D).
        cis: (R, 1, rotary_dim / 2) complex; channels past ``rotary_dim`` stay as they are.
    """
    half = cis.shape[-1]
    turning = heads if heads.dtype in (torch.float32, torch.float64) else heads.float()
    if heads.shape[-1] == 2 * half:
        real, imaginary = _split(turning, (half, half), -1)
    else:
        real, imaginary = turning[..., :half], turning[..., half : 2 * half]
    turned = torch.view_as_real(torch.complex(real, imaginary) * cis).flatten(-2).to(heads.dtype)
    return turned if heads.shape[-1] == 2 * half else torch.cat([turned, heads[..., 2 * half :]], -1)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (1910.07467)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.requires_grad)
        self.eps = eps
        self._root, self._floor = math.sqrt(weight.shape[0]), weight.shape[0] * eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., H) -> (..., H). In half precision the norm is taken in float32 and rounded before the weight."""
        # Few and small kernels: on a CPU ``F.rms_norm`` takes several times as long for a handful of rows.
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

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """(R, H) -> (R, H), plus ``residual`` where given."""
        both = self.gate_up.forward(x)
        gate, up = _split(both, (self._width, self._width), 1)
        mixed = self.activation(gate) * up
        return self.down.forward(mixed, residual)


class Experts(nn.Module):
    """A mixture of experts: softmax router, the top k experts of each row, weighted (Mixtral 2401.04088)."""

    def __init__(self, router: Linear, experts: list[GatedMLP], num_per_token: int, *, normalise: bool) -> None:
        super().__init__()
        self.router, self.experts = router, nn.ModuleList(experts)
        self.num_per_token, self.normalise = num_per_token, normalise

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """(R, H) -> (R, H), plus ``residual`` where given. Each row's sum runs in the order of the experts."""
        probs = self.router.forward(x).float().softmax(-1)  # float32 in every precision, as the models were trained
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
        input_norm: of the stream before attention; None where there is none (EAGLE-1).
        qkv: (H_in, (num_heads + 2 * num_kv_heads) * head_dim), queries first.
        out: attention output.
        mlp: a ``GatedMLP`` or ``Experts``.
        q_norm, k_norm: per-head norms (Qwen3), or None.
    """

    def __init__(
        self,
        input_norm: RMSNorm | None,
        qkv: Linear,
        out: Linear,
        post_norm: RMSNorm,
        mlp: GatedMLP | Experts,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.input_norm, self.post_norm = input_norm, post_norm
        self.qkv, self.out, self.mlp = qkv, out, mlp
        self.q_norm, self.k_norm = q_norm, k_norm
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self._turning_and_values = (num_heads + num_kv_heads, num_kv_heads)
        self._queries_and_keys = (num_heads, num_kv_heads)

    def forward(self, x: Tensor, cis: Tensor, attend: Attend, layer: int) -> Tensor:
        """(R, H) -> (R, H). ``cis`` (real rows, 1, D / 2); ``layer`` is passed on to ``attend``."""
        return self.mix(x if self.input_norm is None else self.input_norm.forward(x), x, cis, attend, layer)

    def mix(self, normed: Tensor, x: Tensor, cis: Tensor, attend: Attend, layer: int) -> Tensor:
        """The layer with its attention's input ``normed`` (R, H_in) given: draft nets read more than the stream x."""
        rows = cis.shape[0]  # those past it only pad the matrix products
        mixed_in = self.qkv.forward(normed)[:rows].view(rows, -1, self.head_dim)
        turning, v = _split(mixed_in, self._turning_and_values, 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _split(turning, self._queries_and_keys, 1)
            turning = torch.cat([self.q_norm.forward(q), self.k_norm.forward(k)], 1)
        q, k = _split(rotate(turning, cis), self._queries_and_keys, 1)
        mixed = attend(layer, q, k, v)
        x = self.out.forward(mixed, x)
        return self.mlp.forward(self.post_norm.forward(x), x)
