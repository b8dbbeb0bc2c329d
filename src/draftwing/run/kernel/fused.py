"""The lean decoder as a program of the CPU kernel.

Shape suffixes: B rows, N nodes, R = B * N, F features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwing.model.cache import KVCache
from draftwing.model.config import ModelConfig
from draftwing.model.layers import DecoderLayer, GatedMLP, RMSNorm
from draftwing.model.linear import Linear
from draftwing.model.rope import Rotary
from draftwing.run.kernel.build import Kernel, get_kernel
from draftwing.run.kernel.program import ACTIVATIONS, Heads, Program, Slots
from draftwing.run.request import Drafted, DraftRequest, Waiting
from draftwing.tree import DraftTree

__all__ = ["FusedDecoder", "add_layer", "draft_slots", "kernel_for", "tree_slots"]

_DIM = 32  # heads are mixed so many channels at a time


def kernel_for(
    dtype: torch.dtype, device: torch.device, heads: Heads, activation: str, *, is_dense: bool = True
) -> Kernel | None:
    """The kernel, where it runs layers of this kind here: float32, dense, heads of whole vectors."""
    if dtype != torch.float32 or device.type != "cpu" or not is_dense or activation not in ACTIVATIONS:
        return None
    return get_kernel() if heads.head_dim % _DIM == 0 and heads.head_dim <= 1024 else None


def tree_slots(
    cache: KVCache,
    first_row: int,
    lengths: Sequence[int],
    tree: DraftTree,
    first_node: int,
    rotary: Rotary,
    prompt_lengths: Sequence[int] | None = None,
) -> Slots:
    """Room for the nodes of ``tree`` after ``lengths`` slots of each row, and where they stand."""
    cache.reserve(first_row + tree.num_rows, max(lengths) + tree.num_nodes)
    by_node = not rotary.config.position_only
    if by_node:
        positions = torch.tensor(lengths)[:, None] + tree.depths[:, first_node:]
        prompts = None if prompt_lengths is None else torch.tensor(prompt_lengths)[:, None]
        rotation = rotary.cis(positions, prompts).flatten(0, 1)
    else:
        rotation = rotary.table(max(lengths) + tree.num_nodes)
    return Slots(cache.data, first_row, lengths, tree.parents, first_node, rotation, by_node=by_node)


def draft_slots(
    cache: KVCache, fed: Sequence[int], num_waiting: int, lengths: Sequence[int], num_nodes: int, rotary: Rotary
) -> Slots:
    """Room for what waits after ``fed`` slots of each row, and for trees that grow to so many nodes beside their roots.

    The roots stand behind ``lengths`` slots.
    """
    upto = max(max(lengths) + 1 + num_nodes, max(fed) + num_waiting)
    cache.reserve(len(lengths), upto)
    return Slots(cache.data, 0, lengths, None, 0, rotary.table(upto), by_node=False)


def add_layer(
    program: Program,
    layer: DecoderLayer,
    x: int,
    source: int,
    buffers: tuple[int, int, int],
    *,
    index: int,
    window: int | None,
) -> None:
    """One decoder layer over the stream ``x``, which it changes.

    Args:
        source: what attention reads, normed by the layer's input norm where there is one; ``x``, but in draft nets.
        buffers: for queries, keys and values; for the mixture; and for the MLP.
    """
    qkv, mixed, wide = buffers
    mlp, norm = layer.mlp, layer.input_norm
    assert isinstance(mlp, GatedMLP)
    norms = None
    if layer.q_norm is not None and layer.k_norm is not None:
        norms = (layer.q_norm.weight, layer.k_norm.weight)
    heads = Heads(layer.num_heads, layer.num_kv_heads, layer.head_dim)
    eps = layer.post_norm.eps
    program.linear(source, layer.qkv.fused, qkv, norm=None if norm is None else norm.weight, eps=eps)
    program.attend(qkv, heads, mixed, layer=index, scale=layer.head_dim**-0.5, window=window, norms=norms, eps=eps)
    program.linear(mixed, layer.out.fused, x, add=True)
    program.linear(x, mlp.gate_up.fused, wide, norm=layer.post_norm.weight, eps=eps, activation=mlp.activation_name)
    program.linear(wide, mlp.down.fused, x, add=True)


@dataclass(frozen=True)
class _Built:
    """A program that gives some taps: they are complete after ``num_hidden`` operations, logits in the end."""

    program: Program
    features: int
    read: int
    logits: int
    num_hidden: int


class FusedDecoder:
    """Runs the layers of a lean decoder whose matrices are fused (see ``Linear.fuse``)."""

    def __init__(
        self,
        kernel: Kernel,
        config: ModelConfig,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
        rotary: Rotary,
    ) -> None:
        self.kernel, self._config, self._rotary = kernel, config, rotary
        self._embedding, self._layers, self._norm, self._head = embedding.contiguous(), layers, norm, head
        self._built: dict[tuple[int, ...], _Built] = {}

    def _build(self, taps: tuple[int, ...]) -> _Built:
        config, hidden = self._config, self._config.hidden_size
        program = Program(self.kernel)
        features, logits = program.outside(hidden * len(taps)), program.outside(config.vocab_size)
        x, read = program.scratch(hidden), program.scratch(hidden)
        qkv_width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        widths = (qkv_width, config.num_heads * config.head_dim, config.intermediate_size)
        qkv, mixed, wide = (program.scratch(width) for width in widths)

        def tap(number: int, buffer: int) -> None:
            for place, wanted in enumerate(taps):
                if wanted == number:
                    program.copy(buffer, hidden, features, place * hidden)

        program.embed(self._embedding, x)
        for index, layer in enumerate(self._layers):
            tap(index, x)
            window = config.sliding_windows[index]
            add_layer(program, layer, x, x, (qkv, mixed, wide), index=index, window=window)
        program.norm(x, self._norm.weight, self._norm.eps, read)
        tap(config.num_layers, read)
        num_hidden = len(program)
        program.linear(read, self._head.fused, logits)
        return _Built(program, features, read, logits, num_hidden)

    def draft(
        self, request: DraftRequest, tokens: Sequence[Sequence[int]], cache: KVCache, fed: Sequence[int]
    ) -> Drafted:
        """Read each row's ``tokens`` after ``fed`` slots and grow a tree below the last: see ``Program.draft``."""
        built = self._built.get(()) or self._build(())
        self._built[()] = built
        lengths = [start + len(ids) - 1 for start, ids in zip(fed, tokens, strict=True)]
        entries = max(map(len, tokens))
        slots = draft_slots(cache, fed, entries, lengths, request.depth * request.width, self._rotary)
        outside = {built.logits: torch.empty(len(fed) * request.width, self._config.vocab_size)}
        return built.program.draft(
            request,
            outside,
            slots,
            built.logits,
            waiting=Waiting(tokens, fed),
            num_hidden=built.num_hidden,
            read=built.read,
        )

    def forward(
        self,
        cache: KVCache,
        first_row: int,
        lengths: Sequence[int],
        prompt_lengths: Sequence[int],
        tree: DraftTree,
        first_node: int,
        taps: tuple[int, ...],
        *,
        want_logits: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits (B, N, V) where wanted and features (B, N, F) where ``taps`` ask for them, from ``first_node`` on."""
        built = self._built.get(taps)
        if built is None:
            built = self._built[taps] = self._build(taps)
        rows, nodes = tree.num_rows, tree.num_nodes - first_node
        slots = tree_slots(cache, first_row, lengths, tree, first_node, self._rotary, prompt_lengths)
        config = self._config
        features = torch.empty(rows, nodes, config.hidden_size * len(taps)) if taps else None
        logits = torch.empty(rows, nodes, config.vocab_size) if want_logits else None
        named = {built.features: features, built.logits: logits}
        built.program.run(
            rows,
            nodes,
            {buffer: tensor for buffer, tensor in named.items() if tensor is not None},
            num_ops=None if want_logits else built.num_hidden,
            tokens=tree.tokens[:, first_node:],
            slots=slots,
        )
        return logits, features
