"""The lean decoder: a target for the Llama family with static KV slots, tree attention and taps.

It loads Hugging Face folders and gives transformers' logits, at a fraction of the overhead: one matrix for queries,
keys and values, one for gate and up, and what runs them is chosen when they are loaded: on a CPU all layers as one
program (``run.kernel``) or, where that cannot be, PyTorch with prepacked weights; on a GPU recorded graphs.

Shape suffixes: B rows, N nodes, T tokens, R rows of a forward, F features, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import CheckpointError
from draftwing.gguf.source import open_weights
from draftwing.inference import inference
from draftwing.model.attention import Attend
from draftwing.model.cache import KVCache, View
from draftwing.model.config import ModelConfig, read_config
from draftwing.model.embedding import Embedding
from draftwing.model.families import Reader, read_layer
from draftwing.model.int8 import check_quantize
from draftwing.model.layers import DecoderLayer, Experts, GatedMLP, RMSNorm, Taps, settled
from draftwing.model.linear import Linear, runs_as
from draftwing.model.mtp import module_names, num_modules
from draftwing.model.rope import Rotary
from draftwing.model.target import NO_FEATURES, Context, FeatureSpec, Row, Target, TargetOutput, own_context
from draftwing.noise import Walk
from draftwing.run.choose import Needs, record_with, runtime_for
from draftwing.run.eager import score
from draftwing.run.forward import PREFILL_CHUNK, Entries, NetShape, Runner, Runtime
from draftwing.run.growing import Asked
from draftwing.run.recording import Record
from draftwing.run.request import Ahead, Drafted, Waiting
from draftwing.tree import Accepted, DraftTree

__all__ = ["LeanContext", "LeanTarget", "TappedNet", "attention_bytes", "mlp_bytes"]


@dataclass(eq=False)
class TappedNet:
    """A lean model as what can be run (``run.forward.Net``): it gives out its logits and some hidden states."""

    config: ModelConfig
    embedding: Embedding
    layers: Sequence[DecoderLayer]
    norm: RMSNorm
    head: Linear
    rotary: Rotary
    taps: tuple[int, ...] = ()

    @property
    def shape(self) -> NetShape:
        """See ``Net``."""
        config = self.config
        return NetShape(
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.sliding_windows,
            config.vocab_size,
            out_width=config.hidden_size * len(self.taps),
        )

    @property
    def dtype(self) -> torch.dtype:
        """See ``Net``."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """See ``Net``."""
        return self.embedding.device

    def fuse(self, features: Any) -> Any:
        """Tokens are all it reads."""
        return features

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """(R,) -> (R, H) after the final norm, and the taps (R, F) or None."""
        x, taps = settled(self.embedding.forward(ids)), Taps(self.taps)
        for index, layer in enumerate(self.layers):
            taps.see(index, x)
            x = layer.forward(x, attend, index)
        read = self.norm.forward(x)
        taps.see(self.config.num_layers, read)
        return read, taps.joined()

    def logits(self, read: Any) -> Any:
        """(R, H) -> (R, V)."""
        return self.head.forward(read)


@dataclass
class LeanContext(Context):
    """Rows, and what runs them over their KV slots: by the taps that are wanted, all over the same slots.

    ``begun`` finishes the forward of a tree whose drafting ran a part of it already: logits, or None for other trees.
    """

    runner: Runner = None  # type: ignore[assignment]  # set by new_context, the only maker
    begun: Callable[[DraftTree], Tensor | None] | None = None

    @property
    def cache(self) -> KVCache:
        """Their slots."""
        return self.runner.cache

    @property
    def ahead(self) -> Ahead | None:
        """See ``Context``."""
        return None if self.walk is None else Ahead(self.runner, [row.length for row in self.rows], self.walk)


class LeanTarget(Target):
    """See ``Target``. Build it with ``from_folder``."""

    supports_views = supports_pages = True

    def __init__(self, net: TappedNet, runtime: Runtime, name: str = "model", dtype: torch.dtype | None = None) -> None:
        config = net.config
        self.config, self.name, self._runtime = config, name, runtime
        self._nets = {net.taps: net}
        self._net = net
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers, self.max_length = config.num_layers, config.context_length
        self.dtype, self.device = dtype or net.dtype, net.device
        self.eos_ids = config.eos_ids
        num_experts = config.moe.num_experts_per_token if config.moe else 0
        active = [attention_bytes(layer) + mlp_bytes(layer, num_experts) for layer in net.layers]
        self._num_weight_bytes = net.head.num_bytes + sum(active)

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
    ) -> LeanTarget:
        """Load a Hugging Face folder; ``quantize`` says how its matrices are quantised, all but the routers of experts.

        On a CPU weights stay in the bits that the file has, with float32 arithmetic; ``expand`` makes float32 of them.
        In bfloat16 the CPU kernel rounds the rows and weights of its products; states, slots and logits are float32.
        ``fast`` quantises them too where the CPU kernel is faster so: for a model that drafts, whose law nobody keeps.

        Raises:
            ConfigError, UnsupportedError: the config cannot be run here, or not quantised so.
            CheckpointError: weights missing, truncated, of other shapes, unknown or not finite.
        """
        device = torch.device(device)
        check_quantize(quantize, dtype, device)
        said, where = read_config(folder), str(folder / "config.json")
        config = ModelConfig.from_hf(said, where)
        is_dense = config.moe is None
        needs = Needs(dtype, device, config.head_dim, config.activation, is_dense=is_dense, may_round=True)
        runtime, layout = runtime_for(needs, prepack=prepack, quantize=quantize, fast=fast)
        check_quantize(quantize, dtype, device, layout.runs)
        states = torch.float32 if layout.runs == "kernel" else dtype  # there bfloat16 is for products alone
        reader = Reader(open_weights(folder), states, device, replace(layout, expand=expand))
        with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:  # packing is memory traffic and little else
            layers = list(pool.map(partial(read_layer, reader, config), range(config.num_layers)))
        norm = RMSNorm(reader.tensor("model.norm.weight", config.hidden_size), config.rms_norm_eps)
        embedding, head = _read_ends(reader, config)
        unused = [key for key in reader.files.unused(reader.used) if not key.endswith("rotary_emb.inv_freq")]
        if unused and num_modules(said, where):  # modules that draft lie beside the model: `--draft mtp` reads them
            modules = module_names(said, unused, where)
            unused = [key for key in unused if modules is None or not modules.owns(key)]
        if unused:
            raise CheckpointError(
                f"{folder}: {len(unused)} weights have no place in a {config.model_type} model, first {unused[0]!r}: "
                f"is config.json that of another model?"
            )
        rotary = Rotary(config.rope, states, device)
        return cls(TappedNet(config, embedding, layers, norm, head, rotary), runtime, name or folder.name, dtype)

    @property
    def quantized(self) -> str | None:
        """How the matrices are quantised; None where they are as ``dtype`` says."""
        return self._net.head.quantized

    @property
    def runs_as(self) -> str:
        """See ``Target``."""
        parts = [part for layer in self._net.layers for part in layer.modules()]
        return runs_as([*(part for part in parts if isinstance(part, Linear)), self._net.head])

    @property
    def layers(self) -> Sequence[DecoderLayer]:
        """The decoder's."""
        return self._net.layers

    @property
    def runtime(self) -> str:
        """See ``Target``."""
        return self._runtime.name

    @property
    def walks(self) -> bool:  # type: ignore[override]  # of an instance, as of a class
        """See ``Target.forward``."""
        return self._runtime.name == "kernel"

    @property
    def runs(self) -> Runtime:
        """What makes its runners: what drafts for it is run alike."""
        return self._runtime

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of weights read by one forward of one token."""
        return self._num_weight_bytes

    @property
    def embedding(self) -> Embedding:
        """See ``Target``."""
        return self._net.embedding

    @property
    def head(self) -> Linear:
        """See ``Target``."""
        return self._net.head

    @property
    def is_prefix_free(self) -> bool:
        """Whether what a slot holds depends on nothing but the tokens up to it."""
        return self._net.rotary.config.position_only

    @property
    def net(self) -> TappedNet:
        """What a runner of its own would run, without taps."""
        return self._net

    def use_graphs(self, record: Record | None) -> None:
        """Record the forwards of contexts made from now on (``run.graphs``), or None: run them eagerly.

        Experts ask the device as they go, and the CPU kernel needs no graphs: these run as before.
        """
        self._runtime = record_with(self._runtime, record, is_dense=self.config.moe is None)

    def _tapped(self, taps: tuple[int, ...]) -> TappedNet:
        found = self._nets.get(taps)
        return self._nets.setdefault(taps, replace(self._net, taps=taps)) if found is None else found

    def new_context(self, features: FeatureSpec = NO_FEATURES) -> LeanContext:
        """See ``Target.new_context``; slots are made as rows come, or taken over with the graphs recorded over them."""
        ctx = LeanContext(self.device, features=features)
        ctx.runner = self._runtime.runner(self._tapped(features.taps), ctx)
        return ctx

    @inference
    def prefill(self, ctx: Context, prompt_ids: Sequence[int]) -> Tensor | None:
        """See ``Target.prefill``. In pieces, and each row by itself, so that its bits depend on nothing else."""
        ctx = own_context(ctx, LeanContext)
        self.check_prompt(prompt_ids)
        ids = list(prompt_ids)
        row = Row(ids, len(ids) - 1, len(ids))
        features = self.read(ctx, row, 0, row.length)
        ctx.rows.append(row)
        return features

    @inference
    def read(self, ctx: Context, row: Row, start: int, stop: int) -> Tensor | None:
        """See ``Target.read``."""
        ctx = own_context(ctx, LeanContext)
        ids, prompt, width = row.tokens[start:stop], row.prompt_length, ctx.runner.net.shape.out_width
        features = ctx.runner.prefill(ctx.num_rows, ids, prompt_length=prompt, start=start)
        if features is None and width:
            return torch.zeros(1, 0, width, dtype=self._net.dtype, device=self.device)
        return features

    @inference
    def forward(self, ctx: Context, tree: DraftTree, walk: Walk | None = None) -> TargetOutput:
        """See ``Target.forward``."""
        ctx = own_context(ctx, LeanContext)
        runner, begun, ctx.begun = ctx.runner, ctx.begun, None
        verified, runner.verified = runner.verified, None
        if verified is not None and verified.tree is tree:
            return TargetOutput(verified.logits, verified.out, tree, True, verified.accepted, verified.seconds)
        finished = None if begun is None or ctx.features.taps else begun(tree)
        if finished is not None:
            return TargetOutput(finished, None, tree)
        prompts = [row.prompt_length for row in ctx.rows]
        entries = Entries(tree, [row.length for row in ctx.rows], prompt_lengths=prompts, walk=walk)
        logits, features = runner.forward(entries)
        assert logits is not None
        if runner.paths is not None and not tree.is_line:
            tree = replace(tree, paths=runner.paths)
        return TargetOutput(logits, features, tree, is_kept=runner.keeps_outputs, accepted=runner.walked)

    @torch.no_grad()
    def score(self, ids: Tensor, features: FeatureSpec = NO_FEATURES) -> TargetOutput:
        """See ``Target.score``."""
        net = self._tapped(features.taps)
        if self._runtime.name == "torch":
            logits, features_BTF = score(net, ids)
            return TargetOutput(logits, features_BTF)
        runner, rows = self._runtime.runner(net, self), ids.shape[0]
        found = []
        for start in range(0, ids.shape[1], PREFILL_CHUNK):
            tree, prompts = DraftTree.chain(ids[:, start : start + PREFILL_CHUNK]), [ids.shape[1]] * rows
            found.append(runner.forward(Entries(tree, [start] * rows, prompt_lengths=prompts)))
        logits = torch.cat([each for each, _ in found if each is not None], 1)
        taps = [each for _, each in found if each is not None]
        return TargetOutput(logits, torch.cat(taps, 1) if taps else None)

    @inference
    def commit(self, ctx: Context, tree: DraftTree, accepted: Accepted) -> None:
        """See ``Target.commit``. The nodes of a line lie in their final slots already."""
        ctx = own_context(ctx, LeanContext)
        if not tree.is_line:
            ctx.runner.commit(ctx.lengths, accepted.path)

    @inference
    def draft(self, ctx: Context, view: View, asked: Asked) -> Drafted:
        """See ``Target.draft``."""
        ctx = own_context(ctx, LeanContext)
        lengths, prompts = ctx.lengths, [row.prompt_length for row in ctx.rows]
        pending = [[token] for token in asked.roots]
        return ctx.runner.draft(Waiting(pending, lengths, lengths, view=view, prompt_lengths=prompts), asked)

    @inference
    def watch(self, ctx: Context, row: int, start: int) -> Tensor:
        """See ``Target.watch``."""
        ctx = own_context(ctx, LeanContext)
        state = ctx.rows[row]
        return ctx.runner.watch(row, state.tokens[start : state.length], start, state.prompt_length)

    @inference
    def remove(self, ctx: Context, row: int) -> None:
        """See ``Target.remove``."""
        ctx = own_context(ctx, LeanContext)
        ctx.cache.move_row(ctx.num_rows - 1, row)
        ctx.rows[row] = ctx.rows[-1]
        ctx.rows.pop()


def attention_bytes(layer: DecoderLayer) -> int:
    """Weight bytes that one token reads in a layer's attention."""
    return layer.qkv.num_bytes + layer.out.num_bytes


def mlp_bytes(layer: DecoderLayer, num_experts: int) -> int:
    """The same of its MLP: of a mixture, the token's own experts."""
    if isinstance(layer.mlp, Experts):
        each = layer.mlp.experts[0]
        assert isinstance(each, GatedMLP)
        return layer.mlp.router.num_bytes + num_experts * (each.gate_up.num_bytes + each.down.num_bytes)
    return layer.mlp.gate_up.num_bytes + layer.mlp.down.num_bytes


def _read_ends(reader: Reader, config: ModelConfig) -> tuple[Embedding, Linear]:
    """The rows of the input tokens and the LM head. Where these are one matrix, the CPU kernel keeps it once."""
    size, name, own = (config.vocab_size, config.hidden_size), "model.embed_tokens.weight", "lm_head.weight"
    if not config.tie_word_embeddings:
        return reader.embedding(name, *size), reader.linear(["lm_head"], [size[0]], size[1])
    reader.used.add(own)  # some folders save the shared matrix twice
    if reader.layout.runs == "kernel":
        head = reader.linear([name.removesuffix(".weight")], [size[0]], size[1])
        return Embedding.shared_with(head) if head.quantized is None else reader.embedding(name, *size), head
    embedding = reader.embedding(name, *size)
    return embedding, Linear(embedding.plain()).lay_out(reader.layout)
