"""Multi-token prediction (DeepSeek-V3, 2412.19437): a chain of modules, each of which guesses one token further ahead.

    h0 (target, position i) --+                      h1 --+                      h2 ...
                              v                           v
    token i + 1 ------> [module 1] --> token i + 2  [module 2] --> token i + 3
                                        token i + 2 ----^

A module is RMSNorm(token), RMSNorm(state) -> join -> decoder layer -> RMSNorm, read by the target's own LM head. The
next module reads the same state as the LM head: h0 is the target's last hidden state after its final norm, and later
ones come out of a module's norm. Checkpoints were trained so, and engines run them so.

Entry i of module k pairs the state at position i with the token at i + k. The first module alone is an EAGLE net whose
own states take the place of the target's; that is the default drafter. ``ChainDrafter`` runs them all. Modules come
from a trained head, or from the target's own checkpoint in the layouts of ``models.config``.

Shape suffixes: R rows (any entries of any sequences), B rows of a batch, T tokens, E = T - 2 entries, W entries read at
once, H hidden, D modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.formats.gguf_weights import open_weights
from draftwing.formats.identity import head_id
from draftwing.methods.base import Drafter
from draftwing.methods.method import NetMethod, NewDrafter, Source, integer_option
from draftwing.methods.net import LAYER_FIELDS, DraftNet, PlainConfig, Scored, TargetId
from draftwing.methods.net_drafter import EagleDrafter
from draftwing.methods.objectives import DraftLoss, StepGuesses, StepSums, Truth
from draftwing.models.attention import Attend, CausalAttention
from draftwing.models.config import Activation, ModelConfig, MtpNames, architecture_of, module_names, read_config
from draftwing.models.context import Context, Row, TargetOutput
from draftwing.models.layers import DecoderLayer, Norm, concat
from draftwing.models.lean import Reader, read_layer, read_norm, rotary_of
from draftwing.models.linear import Embedding, Layout, Linear
from draftwing.models.rope import Rotary
from draftwing.models.target import Target
from draftwing.models.weights import Weights
from draftwing.runtime.choose import can_trace
from draftwing.runtime.forward import Entries, NetShape
from draftwing.runtime.tree_builder import Drafted, DraftRequest, VerifyRequest
from draftwing.torch_utils import inference, on_device
from draftwing.tree import PAD, Accepted, DraftTree

# --- the net ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MtpConfig(PlainConfig):
    """The shape of a chain of modules, which reads one tap: the target's last hidden state."""

    num_modules: int = 1  # D of the paper
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: Activation
    # qkv_bias, o_bias, mlp_bias: the decoder layers' matrices have biases
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # each head's queries and keys are normed
    window: int | None = None  # the sliding window of the decoder layers, or None
    like_target: ClassVar = (*LAYER_FIELDS, "qkv_bias", "o_bias", "mlp_bias", "qk_norm")
    has_one_tap: ClassVar = True

    @staticmethod
    def for_levels(num_levels: int) -> dict[str, int]:
        return {"num_modules": num_levels}


class MtpModule(nn.Module):
    """One module: the norms of its two inputs, their join (H, 2 H) with tokens first, a decoder layer, and a norm."""

    def __init__(self, token_norm: Norm, state_norm: Norm, join: Linear, block: DecoderLayer, norm: Norm) -> None:
        super().__init__()
        self.token_norm, self.state_norm, self.join, self.block, self.norm = token_norm, state_norm, join, block, norm

    def forward(self, tokens: Any, states: Any, attend: Attend) -> Any:
        """Map embeddings and states (R, H) to the states (R, H) that the LM head and the next module read."""
        both = concat([self.token_norm.forward(tokens), self.state_norm.forward(states)])
        return self.norm.forward(self.block.forward(self.join.forward(both), attend, 0))


class MtpNet(DraftNet):
    """A chain of modules over the target's embedding and LM head. Its first arguments are ``DraftNet``'s.

    ``chain`` are the modules, with decoder layers of the target ``like``, else new ones with Llama's. ``forward`` runs
    the first, on its own states after its first step.
    """

    kind = "mtp"
    config: MtpConfig

    def __init__(
        self,
        config: MtpConfig,
        *parts: Any,
        chain: Sequence[MtpModule] = (),
        like: ModelConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, *parts, **options)
        self._like = like
        if not self._target_head:
            raise ConfigError("an MTP net reads the target's LM head: give it")
        self.chain, hidden = nn.ModuleList(chain), config.hidden_size
        while len(self.chain) < config.num_modules:
            block = self.new_decoder_layer(
                qkv_bias=config.qkv_bias, o_bias=config.o_bias, mlp_bias=config.mlp_bias, qk_norm=config.qk_norm
            )
            token_norm, state_norm, norm = (self.new_norm(hidden) for _ in range(3))
            join = self.new_matrix(hidden, 2 * hidden)
            self.chain.append(MtpModule(token_norm, state_norm, join, block, norm))

    @property
    def shape(self) -> NetShape:
        heads = self.modules_in_order[0].block
        return replace(
            self.attention_shape((self.config.window,)),
            head_dim=heads.head_dim,
            has_plain_heads=heads.traits.is_plain,
        )

    @property
    def is_traceable(self) -> bool:
        return can_trace(None if self._like is None else self._like.latent)

    def new_rotary(self) -> Rotary:
        return super().new_rotary() if self._like is None else rotary_of(self._like, self.dtype, self.device)

    @property
    def num_levels(self) -> int:
        """Tokens that the whole chain guesses."""
        return len(self.chain)

    @property
    def modules_in_order(self) -> list[MtpModule]:
        return [cast(MtpModule, module) for module in self.chain]

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        states = self.modules_in_order[0].forward(self.embedding.forward(ids), states, attend)
        return states, states

    def part(self, first: int = 0, count: int = 1) -> MtpNet:
        """Return a net of some of the modules, which shares their weights and their runtime."""
        if count == len(self.chain):
            return self
        config, chain = replace(self.config, num_modules=count), self.modules_in_order[first : first + count]
        part = MtpNet(
            config, self.embedding, self._target_head[0], self.target_ids, self._new_dtype, chain=chain, like=self._like
        )
        part.runs = self.runs
        return part


# --- training --------------------------------------------------------------------------------------------------------

LAMBDA = 0.3  # as for most of DeepSeek-V3's training; only a scale here, since the target is frozen


class MtpLoss(DraftLoss):
    """lambda / D times the sum of the modules' cross-entropies (eq. 24-25).

    Module k (1 to D) reads at entry i the state that module k - 1 left there, or the target's, and the token at i + k.
    Its attention is causal over its own entries; its label is the text's token at i + k + 1, or the target's
    distribution if the objective is not ``next-token``.
    """

    def check(self) -> None:
        super().check()
        if self.later_share != 1:
            raise ConfigError(
                f"training: later_share is {self.later_share}, and later MTP modules read every entry of the earlier "
                f"ones: leave it out"
            )

    def forward(self, scored: Scored, truth: Truth, *, agreement: bool = False) -> list[StepSums]:
        share = LAMBDA / self.num_steps
        return [replace(sums, loss=sums.loss * share) for sums in super().forward(scored, truth, agreement=agreement)]

    def steps(self, scored: Scored, num_steps: int) -> Iterator[StepGuesses]:
        net, ids = self.net, scored.batch.ids
        rows, count, shape = ids.shape[0], ids.shape[1] - 2, net.shape
        states = self.noisy(scored, count).reshape(rows * count, -1)
        padded, entries = F.pad(ids, (0, len(net.chain))), torch.arange(count, device=ids.device)
        positions = entries.repeat(rows)
        for step, module in enumerate(islice(net.modules_in_order, num_steps)):
            cis = net.rotary.cis(positions + step, upto=count + len(net.chain)).view(len(positions), 1, -1)
            attend = CausalAttention(rows, count, shape.windows, shape.head_dim**-0.5, cis)
            tokens = net.embedding.forward(padded[:, 1 + step : 1 + step + count].reshape(-1))
            states = module.forward(tokens, states, attend)
            yield StepGuesses(step, entries, states)


# --- modules in the target's own checkpoint --------------------------------------------------------------------------

# Copies of the target's embedding and LM head in DeepSeek's checkpoints, and their originals.
_COPIES = {
    "embed_tokens.weight": ("model.embed_tokens.weight",),
    "shared_head.head.weight": ("lm_head.weight", "model.embed_tokens.weight"),
}
_ADVICE = "draft with lookup, or train a head for it (`draftwing train`)"


def read_modules(
    folder: Path,
    embedding: Tensor | Embedding,
    target_head: Linear | None = None,
    target: TargetId | None = None,
    dtype: torch.dtype = torch.float32,
) -> MtpNet:
    """Read the modules in a target's folder."""
    folder = Path(folder)
    config, where = read_config(folder), str(folder / "config.json")
    with open_weights(folder) as files:
        names = module_names(config, files.keys(), where)
        if names is None:
            raise CheckpointError(
                f"{folder}: this checkpoint of {architecture_of(config)} has no MTP modules: {_ADVICE}, or give the "
                f"folder of an MTP head"
            )
        try:
            like = ModelConfig.from_hf(dict(config), where)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{folder}: the MTP modules of {architecture_of(config)} cannot be run, because Draftwing lacks that "
                f"architecture's decoder layers for drafts: {_ADVICE}"
            ) from error
        reader = Reader(files, dtype, embedding.device, Layout())
        layer = _similar_layer(like, names, files)
        chain = [_read_module(reader, like, names, module, layer) for module in range(names.num_modules)]
        _check_modules(config, names, reader.used, files)
    # With latent attention, heads are wider than their rotation: see ``MtpNet.shape``.
    shape = MtpConfig.for_target(
        like, (like.num_layers,), num_modules=len(chain), window=like.sliding_windows[layer],
        head_dim=like.rope.head_dim, target=target,
    )  # fmt: skip
    return MtpNet(shape, embedding, target_head, None, dtype, chain=chain, like=like)


def _similar_layer(like: ModelConfig, names: MtpNames, files: Weights) -> int:
    """The last of the target's layers that has attention, and experts if the modules have them."""
    experts, moe = like.family.experts, like.moe
    has_experts = experts is not None and f"{names.block_of(0)}{experts.router}.weight" in files
    for layer in reversed(range(like.num_layers)):
        is_mixed = any(kinds[layer] for kinds in (like.recurs, like.convolves) if kinds)
        if not is_mixed and has_experts == (moe is not None and moe.sparse_layers[layer]):
            return layer
    raise UnsupportedError(
        f"{files.folder}: an MTP module of {like.family.architecture} is like none of the target's layers: {_ADVICE}"
    )


def _read_module(reader: Reader, like: ModelConfig, names: MtpNames, module: int, layer: int) -> MtpModule:
    """Read a module, whose decoder layer is like the target's ``layer``."""
    base, hidden = names.base_of(module), like.hidden_size
    token_norm, state_norm, norm = (
        read_norm(reader, like, base + name, hidden) for name in (names.token_norm, names.state_norm, names.norm)
    )
    join = reader.tensor(f"{base}{names.join}.weight", hidden, 2 * hidden)
    if names.states_first:
        join = torch.cat([join[:, hidden:], join[:, :hidden]], 1)
    block = read_layer(reader, like, layer, names.block_of(module))
    return MtpModule(token_norm, state_norm, Linear(join), block, norm)


def _check_modules(config: Mapping[str, Any], names: MtpNames, used: set[str], files: Weights) -> None:
    """Raise UnsupportedError if a module has more than a decoder layer, or another embedding or LM head."""
    for name in files.unused(used):
        if names.owns(name) and not name.endswith((*_COPIES, "rotary_emb.inv_freq")):
            raise UnsupportedError(
                f"{files.folder}: an MTP module of {architecture_of(config)} has {name!r}, which no decoder "
                f"layer of the target has: {_ADVICE}"
            )
    for module in range(names.num_modules):
        for name, originals in _COPIES.items():
            copy = names.base_of(module) + name
            original = next((original for original in originals if original in files), None)
            if copy in files and original and not torch.equal(files.get(copy), files.get(original)):
                raise UnsupportedError(
                    f"{files.folder}: {copy} is not the target's {original}, and Draftwing runs MTP modules with the "
                    f"target's own embedding and LM head: {_ADVICE}"
                )


# --- drafting with the whole chain -----------------------------------------------------------------------------------


class ChainDrafter(EagleDrafter):
    """Drafts with several modules (``parts``): each token by the module trained for it, later ones by the last.

    Each module has its own KV slots. Entry i of module k pairs the state that the module before left at i with the
    token at i + k, so the root, whose token is the pending one, lies k - 1 slots earlier than in the first module's.
    """

    resumes = False  # a module continues from states that no slot keeps

    def __init__(self, parts: Sequence[MtpNet], target: Target, name: str = "", identity: str = "") -> None:
        super().__init__(parts[0], target, name, f"{identity} {len(parts)} modules")
        head_bytes = target.head.num_bytes
        self.num_bytes = len(parts) * (self.num_bytes - head_bytes) + head_bytes
        self.name += f", {len(parts)} modules"
        self._min_length = len(parts)  # roots have an entry in every module
        self._runners = [self.runner, *(part.runs.runner(part, self) for part in parts[1:])]
        # (B, D, H) each module's state at the last entry that it read; and the same once this step counts.
        self._left = torch.zeros(0, len(parts), self.net.shape.state_width, dtype=self._dtype, device=self.net.device)
        self._next_left: Tensor | None = None

    def read_on(self, ctx: Context, row: Row, features: Tensor | None, stop: int) -> None:
        """Feed a whole prompt to every module: each has one entry less than the one before."""
        assert features is not None
        ids, states, left = row.tokens[1 : stop + 1], features.to(self._dtype), []
        for module, runner in enumerate(self._runners):
            out = runner.prefill(len(self._fed), ids[module:], states[:, : max(len(ids) - module, 0)])
            states = states.new_zeros(1, 0, states.shape[2]) if out is None else out
            left.append(states[:, -1] if states.shape[1] else states.new_zeros(1, states.shape[2]))
        self._left, self._next_left = torch.cat([self._left, torch.stack(left, 1)]), None

    @inference
    def remove(self, ctx: Context, row: int) -> None:
        last = len(self._fed) - 1
        super().remove(ctx, row)
        for runner in self._runners[1:]:
            runner.cache.move_row(last, row)
        left, self._next_left = self._left, None
        self._left = torch.cat([left[:row], left[last:], left[row + 1 : last]])[:last]

    def draft(self, request: DraftRequest, verify: VerifyRequest | None = None) -> Drafted:
        logits, self._next_left = self._read_pending(request)
        builder, roots = request.builder(), request.root_slots
        return builder.grow(
            logits,
            self._next_left.flatten(1)[:, None],
            lambda tree, first, ids, states: self._level(roots, tree, first, states, builder.level),
            shifted=True,
        )

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        if self._read is not None and self._next_left is not None:
            self._left, self._next_left = self._next_left, None
        super().observe(ctx, tree, accepted, output)

    def _read_pending(self, request: DraftRequest) -> tuple[Tensor, Tensor]:
        """Feed the accepted entries to every module; return logits (B, 1, V) and states (B, D, H) at the roots.

        A module reads the states that the one before left one entry earlier; none exists before a row's first entry.
        """
        device, features = self.net.device, request.features
        assert features is not None
        states, left, logits = features[:, : request.num_entries], [], None
        for module, runner in enumerate(self._runners):
            starts = [max(fed, module) for fed in request.lengths]
            skipped = [start - fed for start, fed in zip(starts, request.lengths, strict=True)]
            tokens = [ids[skip:] for ids, skip in zip(request.tokens, skipped, strict=True)]
            width = max(1, *map(len, tokens))
            if module:  # the states before the first of these entries, and at all but the last of them
                before = torch.cat([self._left[:, None, module - 1], states], 1)
                first = on_device([int(fed < module) for fed in request.lengths], device)[:, None]
                place = (first + torch.arange(width, device=device)).clamp(max=before.shape[1] - 1)
                states = before.gather(1, place[:, :, None].expand(-1, -1, before.shape[2]))
            chain = DraftTree.chain(on_device([[*ids, *[PAD] * (width - len(ids))] for ids in tokens], device))
            entries = Entries(chain, [start - module for start in starts], states=states)
            module_logits, out = runner.forward(entries, want_logits=not module)
            assert out is not None
            last = on_device([max(len(ids), 1) - 1 for ids in tokens], device)[:, None, None]
            if module_logits is not None:
                logits = module_logits.gather(1, last.expand(-1, 1, module_logits.shape[2]))
            states = out
            none = on_device([not ids for ids in tokens], device).bool()[:, None]
            left.append(torch.where(none, self._left[:, module], out.gather(1, last.expand(-1, 1, out.shape[2]))[:, 0]))
        assert logits is not None
        return logits, torch.stack(left, 1)

    def _level(
        self, roots: Sequence[int], tree: DraftTree, first: int, states: Tensor | None, level: int
    ) -> tuple[Tensor, Tensor]:
        """Run the nodes from ``first`` on, ``level`` below the root, through the guessing module and all later ones.

        Args:
            states: (B, W, D * H) the modules' states at the nodes' parents. Those returned are at the nodes, and
                undefined for modules that are no longer needed.
        """
        assert states is not None
        above, deepest = states.chunk(len(self._runners), 2), len(self._runners) - 1
        left, guessing, logits = list(above), min(level, deepest), None
        for module in range(guessing, deepest + 1):
            lengths = [max(root - module, 0) for root in roots]
            read = above[module - 1 if level <= module else module]
            entries = Entries(tree, lengths, 0, first, None, read)
            module_logits, out = self._runners[module].forward(entries, want_logits=module == guessing)
            assert out is not None
            left[module] = out
            logits = module_logits if module == guessing else logits
        assert logits is not None
        return logits, torch.cat(left, 2)


# --- registration ----------------------------------------------------------------------------------------------------


class Mtp(NetMethod):
    """The MTP modules of a target's checkpoint, or of a trained head."""

    net = MtpNet
    config = MtpConfig
    settings = ("unroll_steps",)
    options: ClassVar = {"modules": integer_option("modules", 1)}
    loss = MtpLoss

    def own_folder(self, target: Target) -> Path:
        folder = target.folder
        if folder is None:
            raise CheckpointError(f"{target.name} was not loaded from a folder: give the folder of an MTP head")
        config = read_config(folder)
        with open_weights(folder) as files:
            if module_names(config, files.keys(), str(folder / "config.json")) is None:
                raise CheckpointError(
                    f"{target.name} ({architecture_of(config)}) has no MTP modules in its checkpoint: give the folder "
                    f"of a trained head (`draftwing train mtp`), or draft with lookup"
                )
        return folder

    def new_drafter(self, source: Source) -> NewDrafter:
        if (count := source.options.get("modules", 1)) == 1:
            return super().new_drafter(source)
        target, folder = source.target, source.folder
        net = self.load(source).prepack(target.quantized, fast=True)
        parts = [net.part(place) for place in range(count)]  # shared by all drafters, so that each is traced once
        return partial(ChainDrafter, parts, target, folder.name, head_id(folder))

    def drafter(self, net: Any, target: Target, name: str = "", identity: str = "") -> Drafter:
        """Draft with the first module, on its own states after its first token."""
        return EagleDrafter(net.part(), target, name, identity)

    def load(self, source: Source) -> Any:
        net, count = super().load(source), source.options.get("modules", 1)
        if count > net.config.num_modules:
            raise ConfigError(
                f"draft_options: modules is {count}, and {source.name} has {net.config.num_modules}: ask for fewer"
            )
        return net.part(count=count)

    def read(self, folder: Path, *args: Any, **options: Any) -> Any:
        is_head = self.recognises(read_config(folder), folder)
        return super().read(folder, *args, **options) if is_head else read_modules(folder, *args, **options)
