"""A smaller causal LM as the drafter (Leviathan et al. 2211.17192; trees as in SpecInfer 2305.09781).

    CausalLMDrafter    drafts with any model that shares the target's tokenizer
    TranslatingDrafter drafts with a model of another tokenizer: its context and its drafts are encoded again
    CausalLMNet        the model in training: distilled from its target (DistillSpec 2310.08461)

The draft model has KV slots for the same rows as the target: accepted nodes are committed there too, as far as they
were run, so that the next draft reads only what is missing.

On disk it is a Hugging Face folder that transformers, vLLM and ``load(draft=...)`` read:

    config.json         the model's own, with ``{"draftwing": {"kind": "causal-lm", "target": ..., "training": ...}}``
    model.safetensors   the weights in float32, named as its family names them
    tokenizer.json ...  the target's tokenizer

Shape suffixes: B rows, T tokens, R rows of entries, W entries read at once, C children of each, H hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from draftwing.cpu.noise import noise_of
from draftwing.errors import ConfigError, DraftwingError, DraftwingWarning, TokenizerError, UnsupportedError
from draftwing.formats.doctor import Finding
from draftwing.formats.identity import differences, has_tokenizer, made_for, target_id_of_folder
from draftwing.formats.read import checked_training, is_head
from draftwing.formats.settings import FORMAT
from draftwing.formats.write import write_folder
from draftwing.methods.base import Budget, Drafter, ListTree, no_probs, swap_remove
from draftwing.methods.calibration import Calibration
from draftwing.methods.ensemble import Union, unite
from draftwing.methods.method import NetMethod, NewDrafter, NewNet, Source
from draftwing.methods.net import DraftNet, TargetId, layer_names
from draftwing.methods.net_drafter import NetDrafter
from draftwing.methods.objectives import AlignedLoss
from draftwing.models.attention import Attend
from draftwing.models.config import ModelConfig, RopeConfig, read_config
from draftwing.models.context import Context, Row, TargetOutput
from draftwing.models.families import LEAN_MODEL_TYPES
from draftwing.models.layers import DecoderLayer
from draftwing.models.lean import (
    LeanTarget,
    Reader,
    TappedNet,
    read_layer,
    read_norm,
    resized,
    rotary_of,
)
from draftwing.models.linear import Embedding, Layout, Linear
from draftwing.models.paged import SlotsExhausted, other_rows
from draftwing.models.target import Target
from draftwing.models.weights import WeightFiles, Weights
from draftwing.noise import KeyedNoise
from draftwing.runtime.forward import NetShape, TorchRuntime
from draftwing.runtime.tree_builder import (
    UNKNOWN_PROB,
    Drafted,
    DraftRequest,
    together,
)
from draftwing.sampling import PENALTIES, Sampling, SamplingBatch
from draftwing.text.tokenizer import Tokenizer
from draftwing.text.translate import DraftText, Pieces, Translation
from draftwing.torch_utils import inference
from draftwing.tree import PAD, Accepted, DraftTree

# --- drafting --------------------------------------------------------------------------------------------------------


class CausalLMDrafter(NetDrafter):
    """Drafts with ``model``, a ``LeanTarget`` or an object with the attributes of it that are read here."""

    grows_by_rule = resumes = True

    def __init__(self, model: Any, target_vocab_size: int, calibration: Calibration | None = None) -> None:
        if model.vocab_size != target_vocab_size:
            raise TokenizerError(
                f"draft model {model.name} has a vocabulary of {model.vocab_size}, the target {target_vocab_size}: "
                f"with another tokenizer, the target's must be known; give it, or choose draft='lookup'"
            )
        if model.net.shape.num_recurrent and model.runs.name != "kernel":
            raise UnsupportedError(
                f"draft model {model.name} has recurrent layers, which draft in the CPU kernel only: load it there, in "
                f"float32, bfloat16 or int8, or choose draft='lookup'"
            )
        self.model, self._calibration = model, calibration or Calibration()
        self._num_tokens = model.net.num_tokens
        self.name = f"causal-lm ({model.name})"
        self.num_bytes, self.runs_as = model.num_weight_bytes, model.runs_as
        self.identity = f"{self.name}, {self.num_bytes}"
        if model.net.places is not None:
            self.tokenizer = "another, with the target's tokens under other ids"
        self.runner = model.runs.runner(model.net, self)
        self._read: list[int] = []  # tokens of each row that lie in its slots here
        self._drafted: Drafted | None = None  # the tree that is being verified

    @inference
    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """Prefill the new row; one that exceeds this model's context stays empty here and is not drafted for."""
        row = ctx.rows[-1]
        length = row.length if self._room(row) > 0 else 0
        if length or not row.resumed:
            self._prefill(row, length)
        self._read.append(length)

    @property
    def num_read(self) -> list[int]:
        return list(self._read)

    @inference
    def read_on(self, ctx: Context, row: Row, features: Tensor | None, stop: int) -> None:
        if self._room(row) > 0:
            self._prefill(row, stop)

    def _prefill(self, row: Row, stop: int) -> None:
        tokens = self._readable(row.tokens[row.resumed : stop])
        self.runner.prefill(len(self._read), tokens, prompt_length=row.prompt_length, start=row.resumed)

    def _readable(self, tokens: list[int]) -> list[int]:
        """The tokens, with 0 for those that a smaller embedding does not have."""
        if max(tokens, default=0) < self._num_tokens:
            return tokens
        return [token if token < self._num_tokens else 0 for token in tokens]

    @inference
    def remove(self, ctx: Context, row: int) -> None:
        """Drop the row's slots; the last row takes its place."""
        self.runner.cache.move_row(len(self._read) - 1, row)
        swap_remove(self._read, row)

    def _room(self, row: Row) -> int:
        """Return how deep a tree this model's context allows for a row; once below 1 it stays there."""
        room: int = self.model.max_length - row.length - 2
        return room

    @inference
    def request(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftRequest | None:
        """Ask for trees as deep as this model's context allows."""
        rooms = [self._room(row) for row in ctx.rows]
        room = min((room for room in rooms if room > 0), default=0)
        self._drafted = None
        if min(room, budget.depth) <= 0:
            return None
        fits = [room > 0 for room in rooms]
        # A row without room reads its pending token alone, and gets no tree.
        starts = [read if fit else row.length for row, read, fit in zip(ctx.rows, self._read, fits, strict=True)]
        missing = [
            self._readable(row.tokens[start : row.length + 1]) for row, start in zip(ctx.rows, starts, strict=True)
        ]
        return DraftRequest(
            ctx, fits, sampling, budget, self._calibration, missing, starts, ctx.lengths, wants_places=True
        ).within(room)

    def receive(self, ctx: Context, drafted: Drafted) -> DraftTree:
        self._drafted = drafted
        for place, row in enumerate(ctx.rows):
            if self._room(row) > 0:
                self._read[place] = row.length
        return drafted.tree

    @inference
    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Commit the accepted path as far as it was run here: leaves never were."""
        drafted, self._drafted = self._drafted, None
        if drafted is None:
            return
        # The deepest level was never run: its nodes have no slots, and near the end there is no room for any.
        path = drafted.slots_of(accepted.own_path)[:, : 1 + drafted.num_levels]
        if drafted.places is not None:  # even the nodes of a single path may be apart here
            self.runner.commit(ctx.lengths, path)
        num_kept = (path != PAD).sum(1).tolist()  # no wait: the step has already returned its tokens
        for place, (row, num) in enumerate(zip(ctx.rows, num_kept, strict=True)):
            if self._room(row) > 0:
                self._read[place] += num


# --- a draft model with another tokenizer ----------------------------------------------------------------------------


class TranslatedNoise(KeyedNoise):
    """The target's noise by draft tokens: each has that of the target's token that its text begins with."""

    def __init__(self, noise: KeyedNoise, first: Tensor) -> None:
        super().__init__(len(first), first.device)
        self._noise, self._first = noise, first

    def at(self, seed: int, position: int) -> Tensor:
        return self._noise.at(seed, position)[self._first]

    def block(self, seeds: Sequence[int], starts: Sequence[int], num_positions: int) -> Tensor:
        return self._noise.block(seeds, starts, num_positions)[:, :, self._first]


@dataclass
class TranslatedRow:
    """A row in the draft model's tokens, and the draft that is being verified."""

    text: DraftText
    prompt_length: int
    num_read: int = 0  # ids that lie in its slots
    tokens: list[int] = field(default_factory=list)  # the draft's, the root first
    parents: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # as in ``Drafted``
    num_levels: int = 0  # that were run: deeper nodes have no slots
    has_slots: bool = True  # False: not drafted for any more, because other rows need the memory

    def follow(self) -> list[int]:
        """Count the slots that hold the row's present ids; returns the places of those of the draft."""
        ids, start = self.text.ids, self.num_read
        self.num_read, path, node = min(start, self.text.num_stable, max(len(ids) - 1, 0)), list[int](), 0
        while len(path) < self.num_levels and self.num_read == start + len(path) < len(ids) - 1:
            wanted = ids[self.num_read]
            pairs = enumerate(zip(self.tokens, self.parents, strict=True))
            node = next((i for i, (token, above) in pairs if i and above == node and token == wanted), 0)
            if not node or self.places[node] == PAD:
                break
            path.append(self.places[node])
            self.num_read += 1
        self.num_levels = 0
        return path


class TranslatingDrafter(CausalLMDrafter):
    """Drafts in the vocabulary of a model whose tokenizer is not the target's (SLEM, 2502.05202).

    The model reads the row's text in its own tokens. Its trees grow as those of other models do, and their paths are
    encoded by the target's tokenizer in the context of the last words. No q over the target's vocabulary exists, so
    the classic acceptance rules cannot be used. Its rows have other lengths than the target's: with ``kv_memory`` they
    have as many pages, and if these do not suffice, the longest row is not drafted for any more.
    """

    is_one_request = grows_by_rule = resumes = has_probs = False
    tokenizer = "another: drafts are encoded again by the target's"

    def __init__(self, model: Any, target_vocab_size: int, translation: Translation) -> None:
        with other_rows(model.max_length):
            super().__init__(model, model.vocab_size)
        self.name = f"causal-lm ({model.name}, another tokenizer)"
        self._translation, self._rows, self._target_vocab_size = translation, list[TranslatedRow](), target_vocab_size
        self._sampling: tuple[SamplingBatch, SamplingBatch] | None = None  # the target's and the draft model's
        first = [max(token, 0) for token in translation.first[: model.vocab_size]]
        self._first = torch.tensor([*first, *[0] * (model.vocab_size - len(first))], device=model.device)

    @inference
    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """Prefill the new row; one that exceeds this model's context is not drafted for."""
        text = DraftText(self._translation)
        text.extend_to(ctx.rows[-1].tokens)
        row = TranslatedRow(text, len(text.ids))
        if self._space(row) > 0:
            row.num_read = max(len(text.ids) - 1, 0)
        ids, place = self._readable(text.ids[: row.num_read]), len(self._rows)
        self._rows.append(row)
        try:
            self.runner.prefill(place, ids, prompt_length=row.prompt_length)
        except SlotsExhausted:
            self._drop_slots(place)
        text.settle()

    @inference
    def remove(self, ctx: Context, row: int) -> None:
        self.runner.cache.move_row(len(self._rows) - 1, row)
        swap_remove(self._rows, row)

    def _space(self, row: TranslatedRow) -> int:
        """Return how deep a tree this model's context allows for a row; 0 if its text cannot be continued."""
        space: int = self.model.max_length - len(row.text.ids) - 2
        return max(space, 0) if row.text.ids and row.text.is_complete and row.has_slots else 0

    def _drop_slots(self, place: int) -> None:
        """Free the slots of a row, and do not draft for it any more."""
        row = self._rows[place]
        row.has_slots, row.num_read, row.num_levels = False, 0, 0
        self.runner.cache.table.empty(place)

    def _read_rows(self, ctx: Context) -> None:
        """Read what the target has written, and keep the slots of the draft's tokens in it."""
        starts, paths = [], []
        for row, state in zip(ctx.rows, self._rows, strict=True):
            starts.append(max(state.num_read - 1, 0))
            state.text.extend_to(row.tokens)
            paths.append([0, *state.follow()])
            state.text.settle()
        width = max(map(len, paths))
        if any(path != [*range(len(path))] for path in paths):
            self.runner.commit(starts, ctx.tensor([[*path, *[PAD] * (width - len(path))] for path in paths]))

    @inference
    def request(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftRequest | None:
        if budget.children not in ("keyed", "top"):
            raise ConfigError(no_probs(self.name))
        if budget.depth == 0:
            return None
        self._read_rows(ctx)
        spaces = [self._space(row) for row in self._rows]
        if not any(spaces):
            return None
        fits = [space > 0 for space in spaces]
        # A row that is not drafted for reads any token, in place of nothing.
        starts = [row.num_read for row in self._rows]
        unread = [
            self._readable(row.text.ids[row.num_read :]) if fit else [0]
            for row, fit in zip(self._rows, fits, strict=True)
        ]
        roots = [start + len(ids) - 1 for start, ids in zip(starts, unread, strict=True)]
        return DraftRequest(
            ctx, fits, self._sampling_of(sampling), budget, self._calibration, unread, starts, roots, wants_places=True
        ).within(min(space for space in spaces if space > 0))

    def _sampling_of(self, sampling: SamplingBatch) -> SamplingBatch:
        """Return the rows' sampling over the draft model's vocabulary; penalties and biases are left out."""
        if self._sampling is None or self._sampling[0] is not sampling:
            names = ("node_distributions", "logit_bias", "banned_tokens", *(f"{name}_penalty" for name in PENALTIES))
            neutral = {name: getattr(Sampling(), name) for name in names}
            rows = [replace(row, **neutral) for row in sampling.rows]
            noise = noise_of(len(self._first), self._first.device)  # the kernel drafts greedily with it
            if not sampling.all_greedy:
                noise = TranslatedNoise(sampling.noise, self._first)
            self._sampling = sampling, SamplingBatch(rows, noise, sampling.device)
        return self._sampling[1]

    @inference
    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Grow trees of the model's tokens, and encode their paths by the target's tokenizer."""
        while (request := self.request(ctx, sampling, budget)) is not None:
            try:
                drafted = self.draft(request)
                break
            except SlotsExhausted:
                self._drop_slots(max(range(len(self._rows)), key=lambda place: self._rows[place].num_read))
        else:
            return ctx.roots()
        tree, unions = drafted.tree, list[Union]()
        places = None if drafted.places is None else drafted.places.tolist()
        node_probs = None if tree.node_probs is None else tree.node_probs.tolist()
        path_probs = None if tree.confidence is None else tree.confidence.tolist()
        pairs = zip(ctx.rows, self._rows, request.active, tree.tokens.tolist(), tree.parents.tolist(), strict=True)
        for number, (row, state, is_active, tokens, parents) in enumerate(pairs):
            paths = [ListTree(row.tokens[-1:])]
            if is_active:
                state.num_read, state.tokens, state.parents = len(state.text.ids), tokens, parents
                state.places = [*range(len(tokens))] if places is None else places[number]
                state.num_levels = drafted.num_levels
                reached = [1.0] * len(tokens)
                for node in range(1, len(tokens)):
                    if node_probs is None and path_probs is not None:
                        reached[node] = path_probs[number][node]
                    else:
                        prob = UNKNOWN_PROB if node_probs is None else node_probs[number][node]
                        reached[node] = reached[parents[node]] * prob
                paths += self._translated(row, state, reached, budget.depth)
            unions.append(unite(paths))
            unions[-1].weigh(lambda union, node: max(union.given_probs[node].values()))
        num_forwards = tree.max_depth if tree.num_draft_forwards is None else tree.num_draft_forwards
        return together(unions, [union.within(budget) for union in unions], ctx.device, float(num_forwards))

    def _translated(self, row: Row, state: TranslatedRow, reached: Sequence[float], depth: int) -> Iterator[ListTree]:
        """Yield a row's paths in the target's tokens; a node is as likely as the draft tokens that it needs."""
        before, inner = self._translation.tail(row.tokens), set(state.parents)
        for leaf, token in enumerate(state.tokens):
            if not leaf or token == PAD or leaf in inner:
                continue
            nodes = [leaf]
            while nodes[0]:
                nodes.insert(0, state.parents[nodes[0]])
            path, counts = self._translation.to_target(before, [state.tokens[node] for node in nodes[1:]])
            path = [*takewhile(lambda token: token < self._target_vocab_size, path[:depth])]
            chances = [1.0, *(reached[nodes[count]] for count in counts[: len(path)])]
            probs = [chance / max(above, 1e-9) for above, chance in pairwise(chances)]
            yield ListTree([row.tokens[-1], *path], [*range(-1, len(path))], [1.0, *probs])

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Do nothing: the next request compares the draft with what the target wrote."""


# --- the model in training -------------------------------------------------------------------------------------------

INIT_STD = 0.02  # standard deviation of a new model's weights
HEAD_DIM = 64  # default for a new model


@dataclass(frozen=True)
class CausalLMConfig:
    """The config of a draft model, with the fields that ``DraftNet`` reads of a ``PlainConfig``."""

    shape: ModelConfig  # as the lean decoder reads it
    source: Mapping[str, Any]  # the contents of its ``config.json``
    calibration: Calibration = field(default_factory=Calibration)
    target: TargetId | None = None  # the target that it was trained for
    taps: ClassVar[tuple[int, ...]] = ()

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.shape.hidden_size

    @property
    def rope(self) -> RopeConfig:
        return self.shape.rope


def new_config(
    like: ModelConfig, num_layers: int | None = None, hidden_size: int | None = None, num_heads: int | None = None
) -> dict[str, Any]:
    """Return the ``config.json`` of a new Llama that drafts for a target of the shape ``like``.

    By default it has a quarter of the target's layers and half of its width, in heads of 64 channels.
    """
    hidden = hidden_size or max(HEAD_DIM, like.hidden_size // 2 // HEAD_DIM * HEAD_DIM)
    count = num_heads or max(1, hidden // HEAD_DIM)
    if hidden % count or hidden // count % 2:
        raise ConfigError(
            f"training: {count} heads cannot share a hidden size of {hidden}: heads of an even width are needed, give "
            f"--num-heads {max(1, hidden // HEAD_DIM)} with --hidden-size {max(1, hidden // HEAD_DIM) * HEAD_DIM}, say"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": like.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": -(-8 * hidden // 3 // 64) * 64,
        "num_hidden_layers": num_layers or max(1, like.num_layers // 4),
        "num_attention_heads": count,
        "num_key_value_heads": count,
        "head_dim": hidden // count,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": like.context_length,
        "tie_word_embeddings": True,
        "bos_token_id": like.bos_id,
        "eos_token_id": list(like.eos_ids) or None,
        "pad_token_id": like.pad_id,
        "torch_dtype": "float32",
    }


class CausalLMNet(DraftNet):
    """A lean decoder with gradients for all its weights, embedding and LM head included.

    Args:
        lean: its parts, not prepacked; the net takes them over.
        files: the tokenizer's files, which are copied into every folder that the net is written to.
    """

    kind = "causal-lm"

    def __init__(self, config: CausalLMConfig, lean: TappedNet, files: Sequence[Path] = ()) -> None:
        if config.shape.moe is not None:
            raise UnsupportedError(
                "a mixture of experts is not trained as a draft model: start from a dense model, or from nothing"
            )
        if config.shape.family.is_changed_by_reading:
            raise UnsupportedError(
                f"a model of type {config.shape.model_type} is not trained as a draft model: start from a Llama-like "
                f"one, such as llama, qwen2 or qwen3, or from nothing"
            )
        table = nn.Parameter(lean.embedding.plain().detach().clone())  # a clone: it may be mapped from the file
        super().__init__(config, Embedding(table), dtype=table.dtype)
        self.layers, self.norm, self.head = nn.ModuleList(lean.layers), lean.norm, lean.head
        for parameter in [*self.layers.parameters(), *self.norm.parameters(), *self.head.parameters()]:
            parameter.data = parameter.data.clone()
            parameter.requires_grad_(True)
        if config.shape.tie_word_embeddings:
            self.head.weight = self.embedding.table  # type: ignore[assignment]  # a Parameter, see above
        layers = cast(Sequence[DecoderLayer], self.layers)
        self._lean = replace(lean, embedding=self.embedding, layers=layers, head=self.head, taps=())
        self.files = tuple(files)

    @classmethod
    def new(
        cls, source: Mapping[str, Any], device: torch.device, *, target: TargetId, files: Sequence[Path] = ()
    ) -> CausalLMNet:
        """Return a net with small random weights, in the shape given by the ``config.json`` ``source``."""
        shape = ModelConfig.from_hf(dict(source), "the new draft model")
        reader = Reader(cast(Weights, _RandomWeights()), torch.float32, device, Layout())
        layers = [read_layer(reader, shape, index) for index in range(shape.num_layers)]
        norm = read_norm(reader, shape, "model.norm", shape.hidden_size)
        size = shape.vocab_size, shape.hidden_size
        table = reader.tensor("model.embed_tokens.weight", *size)
        head = Linear(table if shape.tie_word_embeddings else reader.tensor("lm_head.weight", *size))
        rotary = rotary_of(shape, torch.float32, device)
        lean = TappedNet(shape, Embedding(table), layers, norm, head, rotary)
        return cls(CausalLMConfig(shape, source, target=target), lean, files)

    @property
    def shape(self) -> NetShape:
        return self._lean.shape

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """Map tokens (R,) to the LM head's input (R, H); nothing is fed back."""
        return self._lean.forward(ids, states, attend)

    def as_target(self) -> LeanTarget:
        """Return a model that decodes with these weights, including later updates."""
        return LeanTarget(self._lean, TorchRuntime(), "draft model in training")

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of its tensors, under the names of its family's Hugging Face folders."""
        shape = self.config.shape
        tensors = {"model.embed_tokens.weight": self.embedding.plain(), "model.norm.weight": self.norm.weight}
        if not shape.tie_word_embeddings:
            tensors["lm_head.weight"] = self.head_weight
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        for index, layer in enumerate(self.layers):
            for path, parameter in layer.named_parameters():
                place, kind = path.rsplit(".", 1)
                names = layer_names(shape.model_type)[place]
                sizes = [query, key, key] if len(names) == 3 else [len(parameter) // len(names)] * len(names)
                for name, part in zip(names, torch.split(parameter, sizes), strict=True):
                    tensors[f"model.layers.{index}.{name}.{kind}"] = part
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


class _RandomWeights:
    """Stands in for ``Weights``: any tensor; norms of ones, biases of zeros, and small random numbers."""

    def get(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor on the CPU, so that a seed gives the same model on every device."""
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype)
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=dtype)
        return torch.empty(shape, dtype=dtype).normal_(0, INIT_STD)


# --- the folder ------------------------------------------------------------------------------------------------------

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip


def tokenizer_files(folder: Path) -> list[Path]:
    return [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]


def read_causal_lm(
    folder: Path, device: torch.device, target: TargetId | None = None, dtype: torch.dtype = torch.float32
) -> CausalLMNet:
    """Read the model in a folder, to train it as a draft model of ``target`` (None: of any)."""
    folder = Path(folder)
    source = read_config(folder)
    model_type = source.get("model_type")
    if model_type not in LEAN_MODEL_TYPES:
        raise UnsupportedError(
            f"{folder}: a model of type {model_type!r} is not trained as a draft model: start from one of "
            f"{', '.join(sorted(LEAN_MODEL_TYPES))}, or from nothing"
        )
    WeightFiles(folder).close()  # safetensors alone: a GGUF file's blocks have no gradients
    draft = target_id_of_folder(folder)
    if target is not None:
        hashes = {draft.vocab_hash, target.vocab_hash} - {""}
        if draft.vocab_size != target.vocab_size or len(hashes) > 1:
            raise TokenizerError(
                f"{folder}: the draft model has another tokenizer than the target (vocabularies of {draft.vocab_size} "
                f"and {target.vocab_size}): start from a model that shares the target's, or from nothing"
            )
    kept = {name: value for name, value in source.items() if name not in ("draftwing", "dtype", "torch_dtype")}
    model = LeanTarget.from_folder(folder, dtype, device, prepack=False)
    kept["tie_word_embeddings"] = model.config.tie_word_embeddings  # the files decide
    config = CausalLMConfig(model.config, kept, target=target or made_for(folder))
    return CausalLMNet(config, model.net, tokenizer_files(folder))


# --- registration ----------------------------------------------------------------------------------------------------


def _translation(source: Source, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> Translation | None:
    """Return how to translate between the tokenizers of target and draft model; None if they are the same."""
    own = Tokenizer(source.folder)
    detail = tokenizer.difference(own)
    if detail is None:
        return None
    translation = Translation(Pieces(tokenizer, source.target.eos_ids), Pieces(own, eos_ids))
    if not translation.is_one_to_one:
        warnings.warn(
            f"draft model {source.name} has another tokenizer than the target ({detail}): its drafts are encoded again "
            f"by the target's, and fewer are accepted than of a draft model that shares it",
            DraftwingWarning,
            stacklevel=2,
        )
    return translation


class CausalLM(NetMethod):
    """A smaller causal LM, as it is or trained for the target."""

    layouts = ()
    settings = ("num_layers", "hidden_size", "num_heads", "own_text")
    options: ClassVar = {}
    loss = AlignedLoss
    calibrates = False

    def recognises(self, config: Mapping[str, Any], folder: Path) -> bool:
        return super().recognises(config, folder) or not is_head(config, folder)

    def new_drafter(self, source: Source) -> NewDrafter:
        folder, target = source.folder, source.target
        values = read_config(folder)
        model_type = values.get("model_type")
        if model_type not in LEAN_MODEL_TYPES:
            raise UnsupportedError(
                f"draft model {source.name} is of type {model_type!r}: a draft model must be one of "
                f"{', '.join(sorted(LEAN_MODEL_TYPES))}; or use draft='lookup'"
            )
        config = ModelConfig.from_hf(values, str(folder / "config.json"))
        translation = None if source.tokenizer is None else _translation(source, source.tokenizer, config.eos_ids)
        rows = None
        if translation is not None and translation.is_one_to_one:
            known = [*translation.to_draft, *[-1] * target.vocab_size][: target.vocab_size]
            rows = [token if token < config.vocab_size else -1 for token in known]
        model = LeanTarget.from_folder(
            folder, target.dtype, source.device(), name=folder.name, quantize=target.quantized, fast=True,
            rows=rows,
        )  # fmt: skip
        if translation is not None and rows is None:
            return partial(TranslatingDrafter, model, target.vocab_size, translation)
        # The same tokenizer, but larger sizes of a family often pad their matrices to more rows.
        if source.tokenizer is not None and model.vocab_size != target.vocab_size:
            model = resized(model, target.vocab_size)
        return partial(CausalLMDrafter, model, target.vocab_size)

    def drafter(self, net: Any, target: Target, name: str = "", identity: str = "") -> Drafter:
        return CausalLMDrafter(net.as_target(), target.vocab_size)

    def read(
        self, folder: Path, embedding: Embedding | Tensor, target_head: Any = None, *rest: Any, **options: Any
    ) -> DraftNet:
        return read_causal_lm(folder, embedding.device, *rest, **options)

    def write(self, folder: Path, net: CausalLMNet, *, training: Mapping[str, Any] | None = None) -> None:
        target = net.config.target
        block = {
            "format": FORMAT,
            "kind": net.kind,
            "target": None if target is None else dataclasses.asdict(target),
            "training": checked_training(training),
        }
        config = {**net.config.source, "torch_dtype": str(net.dtype).removeprefix("torch."), "draftwing": block}
        copies = [file for file in net.files if file.parent != Path(folder)]
        write_folder(Path(folder), config, net.tensors(), copies=copies)

    def convert(self, source: Path, destination: Path, to: str, **options: Any) -> None:
        raise UnsupportedError(
            f"{source}: holds a causal LM, which has no other layout: Draftwing, transformers and vLLM read the folder "
            f"as it is"
        )

    def diagnose(self, folder: Path, target: Path | None) -> list[Finding]:
        identity = None if target is None else target_id_of_folder(target)
        try:
            net = read_causal_lm(folder, torch.device("cpu"))
        except DraftwingError as error:
            fix = "give a folder of a causal LM or of a head, or download it again"
            return [Finding("head", "fail", str(error), fix)]
        size = sum(parameter.numel() for parameter in net.parameters())
        findings = [Finding("head", "ok", f"a {net.config.shape.model_type} causal LM of {size:,} numbers")]
        if target is None or identity is None or not has_tokenizer(folder) or not has_tokenizer(target):
            return [*findings, Finding("target", "unknown", "no target was given, or one of both has no tokenizer")]
        detail = Tokenizer(target).difference(Tokenizer(folder))
        if detail is not None:
            detail = f"another tokenizer than the target's ({detail}), so drafts are encoded again"
            return [*findings, Finding("target", "warn", detail, "a model that shares it is accepted more often")]
        trained_for = made_for(folder)
        differing = differences(trained_for, identity) if trained_for is not None else []
        if differing:
            detail = f"it was trained for another target ({'; '.join(differing)})"
            return [*findings, Finding("target", "warn", detail, "train it for this one: it will agree more often")]
        return [*findings, Finding("target", "ok", "it shares the target's tokenizer")]

    def taps(self, num_layers: int) -> tuple[int, ...]:
        return ()

    def new(self, new: NewNet) -> DraftNet:
        shape = {name: new.settings.get(name) for name in ("num_layers", "hidden_size", "num_heads")}
        files = tokenizer_files(new.folder)
        return CausalLMNet.new(new_config(new.like, **shape), new.embedding.device, target=new.target, files=files)

    def as_target(self, net: CausalLMNet) -> Target:
        return net.as_target()
