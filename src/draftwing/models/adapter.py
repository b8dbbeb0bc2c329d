"""Any other causal LM of transformers as a ``Target``: slower than the lean decoder, and as exact.

Every row has its own cache. A tree is one forward with a 4D additive mask (eager attention misreads a bool mask without
an error) and explicit positions; commit gathers the kept entries. When a model is loaded, a small tree is compared with
the model's own forward, and once more under a window of three tokens if the model has a window. That finds
architectures that ignore the mask or the positions, or whose state cannot be rolled back; these are decoded without
speculation.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
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

# Names of the cache in transformers: since 5.24, before that, and of state-space models before that.
CACHES = ("cache", "past_key_values", "cache_params")

_LAYER_TYPES = ("full_attention", "sliding_attention")
_CACHE_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")  # which hold nothing but keys and values
_NARROW_WINDOW, _NUM_SIBLINGS = 3, 24
# Relative to the largest logit. Even a float64 model may compute its norms or its attention in float32.
_TOLERANCES = {torch.bfloat16: 0.05, torch.float16: 0.02}


@dataclass
class AdapterContext(Context):
    """Rows, the transformers cache of each, and the number of tokens in it."""

    caches: list[Any] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)


class AdapterTarget(Target):
    """A transformers model as a ``Target``.

    Args:
        model: a causal LM.

    Attributes:
        reason: the reason why trees are not supported, or None.

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
        eos = getattr(config, "eos_token_id", None)
        self.eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        self._layer_types: list[str] = list(getattr(config, "layer_types", None) or [])
        self._window: int | None = getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True) is False:
            self._window = None
        # The logits of a prompt are not used, and for a long one they are larger than the model.
        keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._prefill_options: dict[str, Any] = {"logits_to_keep": 1} if keeps else {}
        self._cache_name, cache = self._native_cache()
        self.reason = self._why_no_trees(cache)
        self.supports_trees = self.reason is None
        if self.reason is not None:
            warnings.warn(
                f"{self.name}: {self.reason}; it is decoded without speculation", DraftwingWarning, stacklevel=2
            )

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
            CheckpointError: transformers cannot load the folder, or weights are missing or not finite.
            UnsupportedError: see the class; or a GGUF file.
        """
        from transformers import AutoModelForCausalLM

        file = link_of(folder)
        if file is not None:
            raise UnsupportedError(
                f"{file}: transformers does not run a GGUF file directly: write a model folder with "
                f"`draftwing import {file} FOLDER` and give that, or leave engine out"
            )
        load: Any = AutoModelForCausalLM.from_pretrained
        try:
            model, info = load(folder, dtype=dtype, output_loading_info=True, trust_remote_code=False)
        except Exception as error:  # transformers raises anything from KeyError to OSError here
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{folder}: transformers cannot load this model ({reason}). Check that the folder is complete, and "
                f"that your version of transformers supports the architecture."
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

    @property
    def embedding(self) -> Embedding:
        return Embedding(self.model.get_input_embeddings().weight.detach())

    @property
    def head(self) -> Linear:
        head = self.model.get_output_embeddings()
        return Linear(head.weight.detach(), None if head.bias is None else head.bias.detach())

    def new_context(self, features: FeatureSpec = NO_FEATURES) -> AdapterContext:
        return AdapterContext(self.device, features=features)

    @torch.inference_mode()
    def prefill(self, ctx: Context, prompt_ids: Sequence[int]) -> Tensor | None:
        ctx = own_context(ctx, AdapterContext)
        self.check_prompt(prompt_ids)
        ids, cache, taps, features = list(prompt_ids), self._new_cache(), None, ctx.features
        if len(ids) > 1:
            inputs = torch.tensor([ids[:-1]], device=self.device)
            output = self._run(inputs, cache, features, **self._prefill_options)
            cache, taps = getattr(output, self._cache_name), _taps(output, features)
        elif features.taps:
            taps = torch.zeros(1, 0, self.hidden_size * len(features.taps), dtype=self.dtype, device=self.device)
        ctx.rows.append(Row(ids, len(ids) - 1, len(ids)))
        ctx.caches.append(cache)
        ctx.cached.append(len(ids) - 1)
        return taps

    @torch.inference_mode()
    def forward(self, ctx: Context, tree: DraftTree, accept: AcceptArgs | None = None) -> TargetOutput:
        ctx = own_context(ctx, AdapterContext)
        outputs: list[Any] = []
        for row, length in enumerate(ctx.lengths):
            tokens, options = tree.tokens[row : row + 1].clamp(min=0), dict[str, Any]()
            if self.supports_trees:
                if ctx.cached[row] > length:  # drop the entries of a step that failed
                    for layer in ctx.caches[row].layers:
                        layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
                masks = self._masks(tree.ancestors[row], tree.depths[row], length)
                options = {"attention_mask": masks, "position_ids": length + tree.depths[row : row + 1]}
            elif tree.num_nodes > 1 or ctx.cached[row] != length:
                what = "a tree was drafted" if tree.num_nodes > 1 else "a step before this one failed"
                raise UnsupportedError(
                    f"{self.name}: {what}, but {self.reason}: decode without speculation with draft='none', and after "
                    f"an error admit its requests to a new decoder"
                )
            output = self._run(tokens, ctx.caches[row], ctx.features, **options)
            ctx.caches[row] = getattr(output, self._cache_name)
            ctx.cached[row] = length + tree.num_nodes
            outputs.append(output)
        taps = [tap for output in outputs if (tap := _taps(output, ctx.features)) is not None]
        return TargetOutput(torch.cat([output.logits for output in outputs]), torch.cat(taps) if taps else None)

    @torch.no_grad()
    def score(self, ids: Tensor, features: FeatureSpec = NO_FEATURES) -> TargetOutput:
        output = self._run(ids, self._new_cache(), features)
        return TargetOutput(output.logits, _taps(output, features))

    @torch.inference_mode()
    def commit(self, ctx: Context, tree: DraftTree, accepted: Accepted) -> None:
        """See ``Target.commit``. Each cache ends with the whole tree: keep the path."""
        ctx = own_context(ctx, AdapterContext)
        if tree.num_nodes == 1:
            return
        for row, (length, path) in enumerate(zip(ctx.lengths, accepted.path.tolist(), strict=True)):
            kept = [length + node for node in path if node != PAD]
            slots = ctx.tensor([*range(length), *kept])
            for layer in ctx.caches[row].layers:
                layer.keys, layer.values = layer.keys.index_select(2, slots), layer.values.index_select(2, slots)
            ctx.cached[row] = length + len(kept)

    def remove(self, ctx: Context, row: int) -> None:
        ctx = own_context(ctx, AdapterContext)
        columns: tuple[list[Any], ...] = (ctx.rows, ctx.caches, ctx.cached)
        for column in columns:
            column[row] = column[-1]
            column.pop()

    # --- calls of transformers -------------------------------------------------------------------------------------

    def _new_cache(self) -> Any:
        """A cache that keeps every position of every layer; None lets a recurrent model make its own."""
        if not self.supports_trees:
            return None
        from transformers import DynamicCache

        return DynamicCache()

    def _run(self, ids: Tensor, cache: Any, features: FeatureSpec = NO_FEATURES, **options: Any) -> Any:
        if features.taps:
            options["output_hidden_states"] = True
        if cache is not None:
            options[self._cache_name] = cache
        return self.model(input_ids=ids, use_cache=True, **options)

    def _masks(self, ancestors: Tensor, depths: Tensor, length: int) -> Any:
        """Additive masks (1, 1, N, length + N), by the type of layer if the model has several."""
        committed = torch.ones(len(depths), length, dtype=torch.bool, device=self.device)
        full = torch.cat([committed, ancestors], 1)
        key_positions = torch.cat([torch.arange(length, device=self.device), length + depths])

        def additive(allowed: Tensor) -> Tensor:
            bias = torch.zeros(allowed.shape, dtype=self.dtype, device=self.device)
            return bias.masked_fill_(~allowed, torch.finfo(self.dtype).min)[None, None]

        windowed = full
        if self._window is not None:
            windowed = full & (key_positions > (length + depths)[:, None] - self._window)
        types = set(self._layer_types)
        if len(types) < 2:  # not every such model takes a dict
            return additive(full if types == {"full_attention"} else windowed)
        return {"full_attention": additive(full), "sliding_attention": additive(windowed)}

    # --- does the model support trees? -----------------------------------------------------------------------------

    @torch.inference_mode()
    def _native_cache(self) -> tuple[str, Any]:
        """The name and value of the cache that the model makes and returns."""
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
        """None if a branching tree gives the logits of the model's own forward, otherwise the reason why not."""
        unknown = set(self._layer_types).difference(_LAYER_TYPES)
        if unknown:
            return f"the state of its {', '.join(sorted(unknown))} layers cannot be rolled back"
        if type(cache).__name__ != "DynamicCache" or any(type(x).__name__ not in _CACHE_LAYERS for x in cache.layers):
            return "its state cannot be rolled back"
        # A window under an unknown name may be too wide for a small tree to show it (gpt_neo has one).
        for name, value in vars(self._config).items():
            known = name in ("sliding_window", "use_sliding_window", "max_window_layers") or name.endswith("pattern")
            if "window" in name and not known and isinstance(value, int) and 1 < value < self.max_length:
                return f"its attention window `{name}` is not supported"
        config, window = self._config, self._window
        try:
            supported = self.is_tree_exact()
            if supported and window is not None:
                # Under a narrow window, a small tree shows whether the model's window is ours.
                configured, config.sliding_window = config.sliding_window, _NARROW_WINDOW
                self._window = _NARROW_WINDOW
                try:
                    supported = self.is_tree_exact()
                finally:
                    config.sliding_window, self._window = configured, window
        except Exception as error:  # an unknown model may raise anything
            return f"it cannot run a tree mask ({type(error).__name__}: {error})"
        return None if supported else "it ignores a tree mask or explicit positions"

    @torch.inference_mode()
    def is_tree_exact(self) -> bool:
        """True if the nodes of a tree have the logits of their paths in the model's own forward.

        The root has many children, and the last one a child: if masks or positions count slots instead of ancestors
        (alibi), the last two nodes are wrong by more than half precision could explain.
        """
        last = _NUM_SIBLINGS
        prompt, drafts = self._tokens(4), self._tokens(5 + last)[4:]
        tree = DraftTree.from_lists([[prompt[-1], *drafts]], [[-1, *[0] * last, last]], self.device)
        ctx = self.new_context()
        self.prefill(ctx, prompt)
        logits = self.forward(ctx, tree).logits[0]
        for node, path in ((0, []), (1, [0]), (last, [last - 1]), (last + 1, [last - 1, last])):
            ids = torch.tensor([[*prompt, *(drafts[i] for i in path)]], device=self.device)
            expected = self.model(input_ids=ids, use_cache=False).logits[0, -1].double()
            error = float((expected - logits[node]).abs().max() / expected.abs().max().clamp(min=1.0))
            if not error <= _TOLERANCES.get(self.dtype, 3e-4):  # also false for NaN
                return False
        return True


def _taps(output: Any, features: FeatureSpec) -> Tensor | None:
    return torch.cat([output.hidden_states[tap] for tap in features.taps], -1) if features.taps else None
