"""Any other causal LM of transformers behind the same ``Target``: slower than the lean decoder, and as exact.

Every row has a cache of its own. A tree is one forward with a 4D additive mask (eager attention reads a bool mask
silently wrong) and explicit positions; commit gathers the kept entries. When a model is loaded, one small tree is
compared with the model's own forward, and once more under a window of three tokens where the model has a window: an
architecture that ignores our mask or positions, or whose state cannot be rolled back, is found there, and is then
decoded plainly.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, DraftwingWarning, UnsupportedError
from draftwing.formats.gguf_folder import link_of
from draftwing.models.context import NO_FEATURES, Context, FeatureSpec, Row, TargetOutput, own_context
from draftwing.models.linear import Embedding, Linear
from draftwing.models.target import Target
from draftwing.models.weights import check_finite
from draftwing.noise import AcceptArgs
from draftwing.tree import PAD, Accepted, DraftTree

# What transformers calls a cache: since 5.24, before that, and of state-space models before that.
CACHES = ("cache", "past_key_values", "cache_params")

_KINDS = ("full_attention", "sliding_attention")
_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")  # cache layers that are keys and values and nothing else
_NARROW, _SIBLINGS = 3, 24
# Relative to the largest logit. Even a float64 model may compute its norms or its attention in float32.
_TOLERANCES = {torch.bfloat16: 0.05, torch.float16: 0.02}


@dataclass
class AdapterContext(Context):
    """Rows, the transformers cache of each, and how many tokens each cache has read."""

    caches: list[Any] = field(default_factory=list)
    read: list[int] = field(default_factory=list)


class AdapterTarget(Target):
    """A transformers model as a ``Target``.

    Args:
        model: a causal LM in eval mode.
        name: for reports.

    Attributes:
        reason: why trees are not supported, where they are not.

    Raises:
        UnsupportedError: the model cannot be run step by step.
    """

    def __init__(self, model: Any, name: str | None = None) -> None:
        self.model = model.eval()
        self.name = name or type(model).__name__
        self._config = config = model.config.get_text_config()
        head = model.get_output_embeddings()
        if head is None:
            raise UnsupportedError(
                f"{self.name}: it has no output embedding, so it is no causal LM: choose another model"
            )
        self.vocab_size = head.weight.shape[0]
        self.dtype, self.device = head.weight.dtype, head.weight.device
        self.hidden_size, self.num_layers = config.hidden_size, config.num_hidden_layers
        self.max_length = int(getattr(config, "max_position_embeddings", 0) or getattr(config, "n_positions", 1 << 20))
        self.eos_ids = _ids(getattr(config, "eos_token_id", None))
        self._layer_types: list[str] = list(getattr(config, "layer_types", None) or [])
        self._window: int | None = getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True) is False:
            self._window = None
        # A prompt's logits are not looked at; for a long one they are larger than the model.
        brief = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._prefill_options: dict[str, Any] = {"logits_to_keep": 1} if brief else {}
        self._cache_name, cache = self._native_cache()
        self.reason = self._why_no_trees(cache)
        self.supports_trees = self.reason is None
        if self.reason is not None:
            warnings.warn(f"{self.name}: {self.reason}; it is decoded plainly", DraftwingWarning, stacklevel=2)

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        name: str | None = None,
    ) -> AdapterTarget:
        """Load with ``AutoModelForCausalLM``.

        Raises:
            CheckpointError: transformers cannot load the folder (its own reason is quoted), or would make up weights
                that are missing, or some are not finite.
            UnsupportedError: see the class.
        """
        from transformers import AutoModelForCausalLM

        file = link_of(folder)
        if file is not None:
            raise UnsupportedError(
                f"{file}: transformers does not run a GGUF file as it is here: write a model folder with "
                f"`draftwing import {file} FOLDER` and give that, or leave engine out"
            )
        load: Any = AutoModelForCausalLM.from_pretrained
        try:
            model, info = load(folder, dtype=dtype, output_loading_info=True, trust_remote_code=False)
        except Exception as error:  # transformers raises anything from KeyError to OSError here
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{folder}: transformers cannot load this model ({reason}). Check that the folder is whole, and that "
                f"your version of transformers knows the architecture."
            ) from error
        if info["missing_keys"]:
            raise CheckpointError(
                f"{folder}: weight {min(info['missing_keys'])} is missing, and {len(info['missing_keys'])} are in all. "
                f"Does config.json belong to these weights? Download both again from one place."
            )
        for key, weight in model.named_parameters():
            check_finite(key, weight)
        return cls(model.to(device), name or folder.name)

    @property
    def num_weight_bytes(self) -> int:
        """All parameters but the input embedding (an upper bound for mixtures of experts)."""
        embedding = self.model.get_input_embeddings().weight
        total = sum(p.numel() * p.element_size() for p in self.model.parameters())
        tied = embedding is self.model.get_output_embeddings().weight
        return int(total - (0 if tied else embedding.numel() * embedding.element_size()))

    def new_context(self, features: FeatureSpec = NO_FEATURES) -> AdapterContext:
        """An empty context."""
        return AdapterContext(self.device, features=features)

    @torch.inference_mode()
    def prefill(self, ctx: Context, prompt_ids: Sequence[int]) -> Tensor | None:
        ctx = own_context(ctx, AdapterContext)
        self.check_prompt(prompt_ids)
        ids, cache, taps, features = list(prompt_ids), self._empty_cache(), None, ctx.features
        if len(ids) > 1:
            inputs = torch.tensor([ids[:-1]], device=self.device)
            output = self._run(inputs, cache, features, **self._prefill_options)
            cache = self._cache_of(output)
            taps = self._taps(output, features)
        elif features.taps:
            width = self.hidden_size * len(features.taps)
            taps = torch.zeros(1, 0, width, dtype=self.dtype, device=self.device)
        ctx.rows.append(Row(ids, len(ids) - 1, len(ids)))
        ctx.caches.append(cache)
        ctx.read.append(len(ids) - 1)
        return taps

    @torch.inference_mode()
    def forward(self, ctx: Context, tree: DraftTree, accept: AcceptArgs | None = None) -> TargetOutput:
        ctx = own_context(ctx, AdapterContext)
        logits, taps, features = [], [], ctx.features
        for row, length in enumerate(ctx.lengths):
            tokens = tree.tokens[row : row + 1].clamp(min=0)
            if self.supports_trees:
                self._rewind(ctx, row, length)
                positions = length + tree.depths[row : row + 1]
                masks = self._masks(tree.ancestors[row], tree.depths[row], length)
                output = self._run(tokens, ctx.caches[row], features, attention_mask=masks, position_ids=positions)
            else:
                if tree.num_nodes > 1 or ctx.read[row] != length:
                    what = "a tree was drafted" if tree.num_nodes > 1 else "a step before this one failed"
                    raise UnsupportedError(
                        f"{self.name}: {what}, but {self.reason}: decode it plainly with draft='none', and after an "
                        f"error admit its requests to a new decoder"
                    )
                output = self._run(tokens, ctx.caches[row], features)
            ctx.caches[row] = self._cache_of(output)
            ctx.read[row] = length + tree.num_nodes
            logits.append(output.logits)
            taps.append(self._taps(output, features))
        found = [tap for tap in taps if tap is not None]
        return TargetOutput(torch.cat(logits), torch.cat(found) if found else None)

    @torch.no_grad()
    def score(self, ids: Tensor, features: FeatureSpec = NO_FEATURES) -> TargetOutput:
        output = self._run(ids, self._empty_cache(), features)
        return TargetOutput(output.logits, self._taps(output, features))

    @property
    def embedding(self) -> Embedding:
        return Embedding(self.model.get_input_embeddings().weight.detach())

    @property
    def head(self) -> Linear:
        own = self.model.get_output_embeddings()
        return Linear(own.weight.detach(), None if own.bias is None else own.bias.detach())

    @torch.inference_mode()
    def commit(self, ctx: Context, tree: DraftTree, accepted: Accepted) -> None:
        """See ``Target.commit``. Each cache holds the whole tree at its end: keep the path."""
        ctx = own_context(ctx, AdapterContext)
        if tree.num_nodes == 1:
            return
        for row, (length, path) in enumerate(zip(ctx.lengths, accepted.path.tolist(), strict=True)):
            kept = [length + node for node in path if node != PAD]
            slots = ctx.tensor([*range(length), *kept])
            for layer in ctx.caches[row].layers:
                layer.keys = layer.keys.index_select(2, slots)
                layer.values = layer.values.index_select(2, slots)
            ctx.read[row] = length + len(kept)

    def remove(self, ctx: Context, row: int) -> None:
        ctx = own_context(ctx, AdapterContext)
        ctx.rows[row], ctx.caches[row], ctx.read[row] = ctx.rows[-1], ctx.caches[-1], ctx.read[-1]
        for column in (ctx.rows, ctx.caches, ctx.read):
            column.pop()

    # --- how transformers is called --------------------------------------------------------------------------------

    def _empty_cache(self) -> Any:
        """A cache that keeps every position of every layer; None lets a recurrent model make its own."""
        if not self.supports_trees:
            return None
        from transformers import DynamicCache

        return DynamicCache()

    def _rewind(self, ctx: AdapterContext, row: int, length: int) -> None:
        """Take back what a step that failed has left in the cache."""
        if ctx.read[row] > length:
            for layer in ctx.caches[row].layers:
                layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]

    def _run(self, ids: Tensor, cache: Any, features: FeatureSpec = NO_FEATURES, **extra: Any) -> Any:
        if features.taps:
            extra["output_hidden_states"] = True
        if cache is not None:
            extra[self._cache_name] = cache
        return self.model(input_ids=ids, use_cache=True, **extra)

    def _cache_of(self, output: Any) -> Any:
        return getattr(output, self._cache_name)

    def _taps(self, output: Any, features: FeatureSpec) -> Tensor | None:
        if not features.taps:
            return None
        return torch.cat([output.hidden_states[tap] for tap in features.taps], -1)

    def _masks(self, ancestors: Tensor, depths: Tensor, length: int) -> Any:
        """Additive masks (1, 1, N, length + N); one per kind of layer where the model has several."""
        nodes = len(depths)
        committed = torch.ones(nodes, length, dtype=torch.bool, device=self.device)
        full = torch.cat([committed, ancestors], 1)
        key_positions = torch.cat([torch.arange(length, device=self.device), length + depths])

        def additive(allowed: Tensor) -> Tensor:
            bias = torch.zeros(allowed.shape, dtype=self.dtype, device=self.device)
            return bias.masked_fill_(~allowed, torch.finfo(self.dtype).min)[None, None]

        windowed = full
        if self._window is not None:
            windowed = full & (key_positions > (length + depths)[:, None] - self._window)
        kinds = set(self._layer_types)
        if len(kinds) < 2:  # not every such model takes a dict
            return additive(full if kinds == {"full_attention"} else windowed)
        return {"full_attention": additive(full), "sliding_attention": additive(windowed)}

    # --- does it keep to our mask? ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def _native_cache(self) -> tuple[str, Any]:
        """The cache that the model makes for itself, and the name under which it gives and takes it."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                output = self.model(input_ids=torch.tensor([self._tokens(3)], device=self.device), use_cache=True)
        except Exception as error:  # an unknown model may raise anything
            raise UnsupportedError(
                f"{self.name}: its own forward fails ({type(error).__name__}: {error}): try another dtype, or another "
                f"version of transformers"
            ) from error
        for name in CACHES:
            cache = getattr(output, name, None)
            if cache is not None:
                return name, cache
        raise UnsupportedError(
            f"{self.name}: it returns no cache, so it cannot be decoded step by step: choose another model, or use "
            f"transformers' own generate"
        )

    def _tokens(self, count: int) -> list[int]:
        return [(7 * i + 3) % self.vocab_size for i in range(count)]

    def _why_no_trees(self, cache: Any) -> str | None:
        """None where a branching tree gives the logits of the model's own forward, else the reason why not."""
        unknown = set(self._layer_types).difference(_KINDS)
        if unknown:
            return f"its layers of type {', '.join(sorted(unknown))} cannot take drafted tokens back"
        if type(cache).__name__ != "DynamicCache" or any(type(each).__name__ not in _LAYERS for each in cache.layers):
            return "its state cannot take drafted tokens back"
        window = self._hidden_window()
        if window is not None:
            return f"nothing is known of its attention window `{window}`"
        try:
            same = self._keeps_to_a_tree()
            if same and self._window is not None:
                with self._narrowed():
                    same = self._keeps_to_a_tree()
        except Exception as error:  # whatever an unknown model raises means the same: not this way
            return f"it cannot run a tree mask ({type(error).__name__}: {error})"
        return None if same else "it does not keep to a tree mask with explicit positions"

    def _hidden_window(self) -> str | None:
        """A window under a name that we do not know, too wide for a small tree to show it (gpt_neo has one)."""
        settings: dict[str, Any] = vars(self._config)
        for name, value in settings.items():
            known = name in ("sliding_window", "use_sliding_window", "max_window_layers") or name.endswith("pattern")
            if "window" in name and not known and isinstance(value, int) and 1 < value < self.max_length:
                return name
        return None

    @contextmanager
    def _narrowed(self) -> Iterator[None]:
        """With a window so narrow that a small tree shows whether the model's is ours."""
        kept = self._config.sliding_window, self._window
        self._config.sliding_window = self._window = _NARROW
        try:
            yield
        finally:
            self._config.sliding_window, self._window = kept

    @torch.inference_mode()
    def _keeps_to_a_tree(self) -> bool:
        """Whether the nodes of a tree have the logits of their paths in the model's own forward.

        Many siblings, the last with a child: under a mask or positions that count slots instead of ancestors (alibi),
        the last two are far off, by more than half precision could explain.
        """
        last = _SIBLINGS
        prompt, drafts = self._tokens(4), self._tokens(5 + last)[4:]
        tree = DraftTree.from_lists([[prompt[-1], *drafts]], [[-1, *[0] * last, last]], self.device)
        ctx = self.new_context()
        self.prefill(ctx, prompt)
        ours = self.forward(ctx, tree).logits[0]
        for node, path in ((0, []), (1, [0]), (last, [last - 1]), (last + 1, [last - 1, last])):
            ids = torch.tensor([[*prompt, *(drafts[i] for i in path)]], device=self.device)
            own = self.model(input_ids=ids, use_cache=False).logits[0, -1].double()
            error = float((own - ours[node]).abs().max() / own.abs().max().clamp(min=1.0))
            if not error <= _TOLERANCES.get(self.dtype, 3e-4):  # NaN, too, is no agreement
                return False
        return True


def _ids(ids: int | Sequence[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
