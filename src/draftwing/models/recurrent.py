"""The gated delta rule (Gated DeltaNet, 2412.06464) over draft trees: Qwen3-Next, Qwen3.5.

The matrices of a layer run for all nodes at once. Its states are walked node by node, depth first, so that at most one
state per level is alive, and every node has the bits of decoding its path token by token.

Shape suffixes: N nodes, C channels of the convolution, K key heads, V value heads, D their widths, S size of the
convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.models.config import DeltaConfig
from draftwing.tree import PAD, DraftTree, depth_first, last_tokens, latest_state

_EPS = 1e-6  # added to the squared lengths of queries and keys
_split = torch.split_with_sizes


class GatedDelta(nn.Module):
    """The mixer of a layer: a short convolution of queries, keys and values, a state per value head, a gated norm.

    Args:
        weight: (S, C) of the convolution, of the oldest token first.
        a_log, dt_bias: (V,) the decay of a state is exp(-exp(a_log) * softplus(a + dt_bias)).
        norm: (D,) of the norm of a head's result.
        is_tiled: return first the first value head of every key head, then the second ones, as GGUF files have them.
    """

    def __init__(
        self,
        config: DeltaConfig,
        weight: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        eps: float,
        *,
        is_tiled: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.eps, self.out_width, self.is_tiled = config, eps, config.values_width, is_tiled
        self.weight, self.norm = nn.Parameter(weight), nn.Parameter(norm)
        self.a_log, self.dt_bias = nn.Parameter(a_log), nn.Parameter(dt_bias)

    def mix(self, layer: int, rows: Tensor, attend: Any) -> Tensor:
        """Columns q, k, v, z, b and a of a matrix (R, width) -> (R, V * D)."""
        mixed: Tensor = attend.recur(layer, rows, self)
        return mixed

    def tokens(self, windows: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        """The queries, keys, values, decays and shares of nodes, whose last inputs are ``windows`` (N, S, C)."""
        config, size = self.config, self.weight.shape[0]
        conv = windows[:, size - 1] * self.weight[size - 1]
        for i in range(size - 2, -1, -1):
            conv = conv + windows[:, i] * self.weight[i]
        wide = torch.promote_types(windows.dtype, torch.float32)
        q, k, v = _split(F.silu(conv).to(wide), [config.keys_width, config.keys_width, config.values_width], 1)
        q, k = (self._unit(heads.view(len(heads), config.num_key_heads, -1)) for heads in (q, k))
        decay = (-self.a_log.to(wide).exp() * F.softplus(a.to(wide) + self.dt_bias.to(wide))).exp()
        return q * config.key_dim**-0.5, k, v.view(len(v), config.num_value_heads, -1), decay, b.to(wide).sigmoid()

    def _unit(self, heads: Tensor) -> Tensor:
        """(N, K, D) -> (N, V, D) of length 1."""
        length = torch.linalg.vector_norm(heads, dim=-1, keepdim=True)
        unit = heads * torch.rsqrt(length * length + _EPS)
        return unit.repeat_interleave(self.config.num_value_heads // self.config.num_key_heads, 1)

    def step(self, state: Tensor | None, tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """A state (V, D, D) or None for zeros, and one node of ``tokens`` -> the next state, and (V, D)."""
        q, k, v, decay, share = tokens
        state = k.new_zeros(*k.shape, v.shape[-1]) if state is None else state * decay[:, None, None]
        delta = (v - (state * k[:, :, None]).sum(1)) * share[:, None]
        state = state + k[:, :, None] * delta[:, None]
        return state, (state * q[:, :, None]).sum(1)

    def gated(self, mixed: Tensor, z: Tensor) -> Tensor:
        """(N, V, D) and gates (N, V * D) -> (N, V * D)."""
        length = torch.linalg.vector_norm(mixed, dim=-1, keepdim=True)
        width = mixed.shape[-1]
        unit = (mixed * (width**0.5 * torch.rsqrt(length * length + width * self.eps))).to(z.dtype)
        gates = F.silu(z.to(mixed.dtype)).view_as(mixed)
        gated: Tensor = ((unit * self.norm) * gates).to(z.dtype)
        if self.is_tiled:
            gated = gated.view(len(gated), self.config.num_key_heads, -1, width).transpose(1, 2)
        return gated.flatten(1)


class WalkOrder(NamedTuple):
    """How all layers walk a row's tree."""

    nodes: Sequence[tuple[int, int]]  # with their depths, see ``depth_first``
    windows: Tensor  # (N, S) for each node its last inputs, as indices of the S - 1 committed ones and the tree's

    @classmethod
    def of(cls, tree: DraftTree, size: int) -> list[WalkOrder]:
        """For each row, if the convolutions read ``size`` tokens."""
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        used = [[node for node, token in enumerate(row) if token != PAD] for row in tokens]
        nodes = torch.arange(tree.num_nodes, device=tree.parents.device).expand(tree.num_rows, -1)
        windows = last_tokens(tree.parents, nodes, size) + size - 1
        return [cls([*depth_first(*row)], own) for *row, own in zip(parents, used, windows, strict=True)]


@dataclass
class _Walk:
    """The last forward of a row's tree through one layer."""

    delta: GatedDelta
    inputs: Tensor  # (N, C) of the convolution
    tokens: tuple[Tensor, ...]
    path: list[tuple[int, Tensor]] = field(default_factory=list)  # the nodes walked last, and the state after each


@dataclass
class _Committed:
    inputs: Tensor  # (S - 1, C) of the convolution at the last tokens
    state: Tensor | None  # (V, D, D), or None before the first token


class RecurrentStates:
    """The states of all rows and layers, after the committed tokens."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[int, _Committed]] = {}
        self._walks: dict[int, dict[int, _Walk]] = {}

    def clear(self, row: int) -> None:
        """Forget a row."""
        self._rows.pop(row, None)
        self._walks.pop(row, None)

    def move(self, source: int, target: int) -> None:
        """Let row ``source`` take the place of ``target``; if they are the same, forget it."""
        self.clear(target)
        if source in self._rows:
            self._rows[target] = self._rows.pop(source)
        self._walks.pop(source, None)

    def forward(self, row: int, layer: int, rows: Tensor, delta: GatedDelta, order: WalkOrder) -> Tensor:
        """The matrix's rows of a tree (N, width) -> (N, V * D); commits nothing."""
        config, size = delta.config, delta.weight.shape[0]
        sizes = [config.conv_width, config.values_width, config.num_value_heads, config.num_value_heads]
        inputs, z, b, a = _split(rows, sizes, 1)
        before = self._committed(row, layer, inputs, size).inputs
        walk = _Walk(delta, inputs, delta.tokens(torch.cat([before, inputs])[order.windows], b, a))
        self._walks.setdefault(row, {})[layer] = walk
        mixed = walk.tokens[2].new_zeros(len(rows), config.num_value_heads, config.value_dim)
        for node, depth in order.nodes:
            del walk.path[depth:]
            state = walk.path[-1][1] if depth else self._rows[row][layer].state
            state, mixed[node] = delta.step(state, [part[node] for part in walk.tokens])
            walk.path.append((node, state))
        return delta.gated(mixed, z)

    def commit(self, row: int, nodes: Sequence[int]) -> None:
        """Take the states after the accepted nodes of the last forward, from the root on."""
        for layer, walk in self._walks.pop(row, {}).items():
            committed = self._rows[row][layer]
            state, shared = latest_state(walk.path, nodes, committed.state)
            for node in nodes[shared:]:
                state = walk.delta.step(state, [part[node] for part in walk.tokens])[0]
            inputs = torch.cat([committed.inputs, walk.inputs[list(nodes)]])[len(nodes) :]
            self._rows[row][layer] = _Committed(inputs, state)

    def _committed(self, row: int, layer: int, inputs: Tensor, size: int) -> _Committed:
        layers = self._rows.setdefault(row, {})
        if layer not in layers:
            layers[layer] = _Committed(inputs.new_zeros(size - 1, inputs.shape[1]), None)
        return layers[layer]
