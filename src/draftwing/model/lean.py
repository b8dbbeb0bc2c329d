"""The lean decoder: a target for the Llama family with static KV slots, tree attention and taps.

It loads Hugging Face folders and gives transformers' logits, at a fraction of the overhead: one fused matrix for
queries, keys and values, one for gate and up, and on a CPU all layers as one program (``run.kernel``) or, where
that cannot be, prepacked weights with residuals added inside the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.model.attention import CausalAttention
from draftwing.model.cache import KVCache, TreeAttention
from draftwing.model.config import ModelConfig, read_config
from draftwing.model.layers import Attend, DecoderLayer, Experts, GatedMLP, RMSNorm
from draftwing.model.linear import MIN_ROWS, Linear, check_weights
from draftwing.model.rope import Rotary
from draftwing.model.target import NO_FEATURES, Context, FeatureSpec, Row, Target, TargetOutput, on_device
from draftwing.model.weights import WeightFiles, check_finite
from draftwing.run.graphs import CudaRecorder, Pool, Record, TreeGraphs
from draftwing.run.kernel.build import Kernel
from draftwing.run.kernel.fused import FusedDecoder, kernel_for
from draftwing.run.kernel.program import Heads
from draftwing.run.request import Drafted, DraftRequest
from draftwing.tree import Accepted, DraftTree

__all__ = ["LeanContext", "LeanTarget"]

PREFILL_CHUNK = 256


@dataclass
class LeanContext(Context):
    """Rows and their KV slots."""

    cache: KVCache = None  # type: ignore[assignment]  # set by new_context, the only maker
    graphs: TreeGraphs | None = None  # forwards recorded over this cache


class LeanTarget(Target):
    """See ``Target``. Build it with ``from_folder``."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
        name: str = "model",
        kernel: Kernel | None = None,
    ) -> None:
        self.config, self.name = config, name
        self._embedding, self.layers, self.norm, self._head = embedding, layers, norm, head
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers, self.max_length = config.num_layers, config.context_length
        self.dtype, self.device = embedding.dtype, embedding.device
        self.eos_ids = config.eos_ids
        self.rotary = Rotary(config.rope, self.dtype, self.device)
        self._scale = config.head_dim**-0.5
        self._fused = (
            None if kernel is None else FusedDecoder(kernel, config, embedding, layers, norm, head, self.rotary)
        )
        self._pool: Pool[TreeGraphs] = Pool()
        self.record: Record | None = None
        if self.device.type == "cuda":
            self.use_graphs(CudaRecorder(self.device))
        self._num_weight_bytes = head.num_bytes + sum(
            _active_bytes(layer, config.moe.num_experts_per_token if config.moe else 0) for layer in layers
        )

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        prepack: bool = True,
        name: str | None = None,
        weights: str | None = None,
        fast: bool = False,
    ) -> LeanTarget:
        """Load a Hugging Face folder; ``weights`` quantises its matrices, all but the routers of experts.

        ``fast`` quantises them too where the CPU kernel is faster so: for a model that drafts, whose law nobody keeps.

        Raises:
            ConfigError, UnsupportedError: the config cannot be run here, or not with these ``weights``.
            CheckpointError: weights missing, truncated, of other shapes, unknown or not finite.
        """
        check_weights(weights, dtype, torch.device(device))
        config = ModelConfig.from_hf(read_config(folder), str(folder / "config.json"))
        heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        is_dense = config.moe is None
        kernel = (
            kernel_for(dtype, torch.device(device), heads, config.activation, is_dense=is_dense) if prepack else None
        )
        if fast and kernel is not None and kernel.has_int8:
            weights = "int8"
        reader = _Reader(WeightFiles(folder), dtype, torch.device(device), prepack, weights, kernel is not None)
        embedding = reader.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = [_read_layer(reader, config, index) for index in range(config.num_layers)]
        norm = RMSNorm(reader.tensor("model.norm.weight", config.hidden_size), config.rms_norm_eps)
        if config.tie_word_embeddings:
            reader.used.add("lm_head.weight")  # some folders save the shared matrix twice
            head = reader.packed(Linear(embedding))
        else:
            head = reader.packed(Linear(reader.tensor("lm_head.weight", config.vocab_size, config.hidden_size)))
        unused = [key for key in reader.files.unused(reader.used) if not key.endswith("rotary_emb.inv_freq")]
        if unused:
            raise CheckpointError(
                f"{folder}: {len(unused)} weights have no place in a {config.model_type} model, first {unused[0]!r}: "
                f"is config.json that of another model?"
            )
        return cls(config, embedding, layers, norm, head, name or folder.name, kernel)

    @property
    def weights(self) -> str | None:
        """How the matrices are quantised; None where they are as ``dtype`` says."""
        return self._head.quantised

    @property
    def runtime(self) -> str:
        """See ``Target``."""
        return "torch" if self._fused is None else "kernel"

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of weights read by one forward of one token."""
        return self._num_weight_bytes

    @property
    def embedding(self) -> Tensor:
        """See ``Target``."""
        return self._embedding

    @property
    def head(self) -> Linear:
        """See ``Target``."""
        return self._head

    def use_graphs(self, record: Record | None) -> None:
        """Record the forwards of contexts made from now on (``run.graphs``), or None: run them eagerly.

        Experts and dynamic rotation ask the device as they go, and the CPU kernel needs no graphs: these run as ever.
        """
        fits = self._fused is None and self.config.moe is None and self.config.rope.position_only
        self.record, self._pool = record if fits else None, Pool()

    def new_context(self) -> LeanContext:
        """An empty context; slots are made as rows come, or taken over with the graphs recorded over them."""
        c = self.config
        cache = KVCache(c.num_layers, c.num_kv_heads, c.head_dim, self.dtype, self.device)
        ctx, record = LeanContext(self.device, cache=cache), self.record
        if record is not None:
            parts = (c, self.rotary, self._embedding, self._head, self._run_layers, record)
            ctx.graphs = self._pool.lend(ctx, lambda: TreeGraphs(cache, *parts))
            ctx.cache = ctx.graphs.cache
        return ctx

    @torch.inference_mode()
    def prefill(self, ctx: Context, prompt_ids: Sequence[int], features: FeatureSpec = NO_FEATURES) -> Tensor | None:
        """See ``Target.prefill``. Chunked, and each row by itself, so that its bits depend on nothing else."""
        assert isinstance(ctx, LeanContext)
        self.check_prompt(prompt_ids)
        ids = list(prompt_ids)
        row = ctx.num_rows
        ctx.cache.reserve(row + 1, len(ids))
        ctx.cache.clear(row)
        pieces = []
        for start in range(0, len(ids) - 1, PREFILL_CHUNK):
            chunk = ids[start : min(start + PREFILL_CHUNK, len(ids) - 1)]
            tree = DraftTree.chain(torch.tensor([chunk], device=self.device))
            if self._fused is not None:
                _, taps = self._fused.forward(
                    ctx.cache, row, [start], [len(ids)], tree, 0, features.taps, want_logits=False
                )
            else:
                _, taps = self._hidden(ctx.cache, row, [start], [len(ids)], tree, 0, features)
            pieces.append(taps)
        ctx.rows.append(Row(ids, len(ids) - 1, len(ids)))
        if not features.taps:
            return None
        width = self.hidden_size * len(features.taps)
        empty = torch.zeros(1, 0, width, dtype=self.dtype, device=self.device)
        return torch.cat([empty, *(piece for piece in pieces if piece is not None)], 1)

    @torch.inference_mode()
    def forward(
        self, ctx: Context, tree: DraftTree, features: FeatureSpec = NO_FEATURES, first_node: int = 0
    ) -> TargetOutput:
        """See ``Target.forward``.

        With ``first_node`` the nodes before it are taken as forwarded (their slots are written) and the result
        covers the rest alone: how a model that drafts for another grows its own tree level by level.
        """
        assert isinstance(ctx, LeanContext)
        if ctx.graphs is not None:
            return ctx.graphs.forward(ctx.lengths, tree, features, first_node)
        prompts = [row.prompt_length for row in ctx.rows]
        if self._fused is not None:
            found, taps = self._fused.forward(
                ctx.cache, 0, ctx.lengths, prompts, tree, first_node, features.taps, want_logits=True
            )
            assert found is not None
            return TargetOutput(found, taps)
        hidden, taps = self._hidden(ctx.cache, 0, ctx.lengths, prompts, tree, first_node, features)
        rows, nodes = tree.num_rows, tree.num_nodes - first_node
        logits = self._head.forward(hidden)[: rows * nodes].view(rows, nodes, -1)
        return TargetOutput(logits, taps)

    def draft(self, ctx: Context, request: DraftRequest, tokens: Sequence[Sequence[int]]) -> Drafted:
        """Read each row's ``tokens`` and grow a tree below the last: see ``Program.draft``. Only with ``drafts``.

        The slots of all that was read and expanded are written as ``forward`` does.
        """
        assert isinstance(ctx, LeanContext)
        assert self._fused is not None
        return self._fused.draft(request, tokens, ctx.cache, ctx.lengths)

    @property
    def drafts(self) -> bool:
        """Whether the CPU kernel grows whole trees with this model."""
        return self._fused is not None and self.config.rope.position_only

    def _hidden(
        self,
        cache: KVCache,
        first_row: int,
        lengths: list[int],
        prompt_lengths: list[int],
        tree: DraftTree,
        first_node: int,
        features: FeatureSpec,
    ) -> tuple[Tensor, Tensor | None]:
        """(R, H) after the final norm, R = B * N (padded to MIN_ROWS), and the taps (B, N, F)."""
        rows, nodes = tree.num_rows, tree.num_nodes - first_node
        real = rows * nodes
        cache.reserve(first_row + rows, max(lengths) + tree.num_nodes)
        lengths_B = on_device(lengths, self.device)
        positions = lengths_B[:, None] + tree.depths[:, first_node:]
        prompts_B = on_device(prompt_lengths, self.device)[:, None]
        cis = self.rotary.cis(positions, prompts_B, upto=max(lengths) + tree.num_nodes).view(real, 1, -1)
        x = F.embedding(tree.tokens[:, first_node:].clamp(min=0).reshape(-1), self._embedding)
        if real < MIN_ROWS:  # padded once here, not in every matrix
            x = F.pad(x, (0, 0, 0, MIN_ROWS - real))
        windows, heads = self.config.sliding_windows, self.config.num_heads
        attend = TreeAttention(
            cache, first_row, lengths, lengths_B, tree, first_node, windows, heads, self._scale, max(real, MIN_ROWS)
        )
        x, taps = self._run_layers(x, cis, attend, features)
        return x, None if taps is None else taps[:real].view(rows, nodes, -1)

    def _run_layers(
        self, x: Tensor, cis: Tensor, attend: Attend, features: FeatureSpec
    ) -> tuple[Tensor, Tensor | None]:
        """(R, H) embeddings -> (R, H) after the final norm, and the taps (R, F)."""
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in features.taps:
                tapped[index] = x
            x = layer.forward(x, cis, attend, index)
        x = self.norm.forward(x)
        if not features.taps:
            return x, None
        tapped[self.num_layers] = x
        return x, torch.cat([tapped[tap] for tap in features.taps], -1)

    @torch.no_grad()
    def score(self, ids: Tensor, features: FeatureSpec = NO_FEATURES) -> TargetOutput:
        """See ``Target.score``."""
        rows, length = ids.shape
        if self._fused is not None:
            return self._score_fused(ids, features)
        real = rows * length
        positions = torch.arange(length, device=self.device).repeat(rows)
        lengths = torch.full_like(positions, length)
        cis = self.rotary.cis(positions, lengths, upto=length).view(real, 1, -1)
        attend = CausalAttention(rows, length, self.config.sliding_windows, self._scale)
        x, taps = self._run_layers(F.embedding(ids.reshape(-1), self._embedding), cis, attend, features)
        return TargetOutput(
            self._head.forward(x).view(rows, length, -1), None if taps is None else taps.view(rows, length, -1)
        )

    def _score_fused(self, ids: Tensor, features: FeatureSpec) -> TargetOutput:
        assert self._fused is not None
        rows, length = ids.shape
        c = self.config
        cache = KVCache(c.num_layers, c.num_kv_heads, c.head_dim, self.dtype, self.device)
        cache.reserve(rows, length)
        pieces = []
        for start in range(0, length, PREFILL_CHUNK):
            tree = DraftTree.chain(ids[:, start : start + PREFILL_CHUNK])
            starts, ends = [start] * rows, [length] * rows
            found = self._fused.forward(cache, 0, starts, ends, tree, 0, features.taps, want_logits=True)
            pieces.append(found)
        logits = torch.cat([found for found, _ in pieces if found is not None], 1)
        tapped = [taps for _, taps in pieces if taps is not None]
        return TargetOutput(logits, torch.cat(tapped, 1) if tapped else None)

    @torch.inference_mode()
    def commit(self, ctx: Context, tree: DraftTree, accepted: Accepted) -> None:
        """See ``Target.commit``. A chain's nodes lie in their final slots already."""
        assert isinstance(ctx, LeanContext)
        if tree.is_line:
            return
        if self._fused is not None:
            self._fused.kernel.commit(ctx.cache.data, ctx.tensor(ctx.lengths), accepted.path)
        else:
            ctx.cache.commit(ctx.tensor(ctx.lengths), accepted)

    @torch.inference_mode()
    def remove(self, ctx: Context, row: int) -> None:
        """See ``Target.remove``."""
        assert isinstance(ctx, LeanContext)
        ctx.cache.move_row(ctx.num_rows - 1, row)
        ctx.rows[row] = ctx.rows[-1]
        ctx.rows.pop()


def _active_bytes(layer: DecoderLayer, num_experts: int) -> int:
    """Weight bytes that one token reads in a layer: of a mixture, its own experts."""
    if isinstance(layer.mlp, Experts):
        each = layer.mlp.experts[0]
        assert isinstance(each, GatedMLP)
        mlp = layer.mlp.router.num_bytes + num_experts * (each.gate_up.num_bytes + each.down.num_bytes)
    else:
        mlp = layer.mlp.gate_up.num_bytes + layer.mlp.down.num_bytes
    return layer.qkv.num_bytes + layer.out.num_bytes + mlp


# --- reading a folder ------------------------------------------------------------------------------------------------


@dataclass
class _Reader:
    """Reads tensors by name, remembers which, and quantises or prepacks matrices, one at a time."""

    files: WeightFiles
    dtype: torch.dtype
    device: torch.device
    prepack: bool
    weights: str | None
    fuse: bool

    def __post_init__(self) -> None:
        self.used: set[str] = set()

    def tensor(self, name: str, *shape: int) -> Tensor:
        self.used.add(name)
        weight = self.files.get(name, self.dtype, shape)
        check_finite(name, weight)
        return weight.to(self.device)

    def packed(self, linear: Linear, *, exact: bool = False, gated: bool = False) -> Linear:
        if self.fuse:
            linear.fuse(None if exact else self.weights, gated=gated)
        elif self.weights is not None and not exact:
            linear.quantise(self.weights)
        elif self.prepack:
            linear.prepack()
        return linear

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
        weights = [self.tensor(f"{name}.weight", out, num_in) for name, out in zip(names, outs, strict=True)]
        biases = [self.tensor(f"{name}.bias", out) for name, out in zip(names, outs, strict=True)] if bias else None
        stacked = torch.cat(weights) if len(weights) > 1 else weights[0]
        del weights  # else the float matrices lie there twice while one is quantised
        bias_of_all = None if biases is None else torch.cat(biases)
        return self.packed(Linear(stacked, bias_of_all), exact=exact, gated=gated)


def _read_layer(reader: _Reader, config: ModelConfig, index: int) -> DecoderLayer:
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
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=dim,
        q_norm=norm("self_attn.q_norm", dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", dim) if config.qk_norm else None,
    )


def _read_mlp(reader: _Reader, config: ModelConfig, index: int, base: str) -> GatedMLP | Experts:
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
