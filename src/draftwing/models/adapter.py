"""Any other causal LM of transformers as a ``Target``: slower than the lean decoder, and as exact.

Every row has its own cache. A tree is one forward with a 4D additive mask (eager attention misreads a bool mask without
an error) and explicit positions; commit gathers the kept entries. When a model is loaded, a small tree is compared with
the model's own forward, and once more under a window of three tokens if the model has a window. That finds
architectures that ignore the mask or the positions. If their cache can be cropped, a tree is run path by path, each as
a forward of the model's own; the cheapest trees are then chains. If not, as with recurrent layers, a tree is walked
depth first: every node is the forward of one token that baseline decoding would run, from a copy of its parent's state.
Such drafts save no time, but every draft method works. Models whose state cannot be copied are decoded without
speculation, one token at a time.

A few decoded tokens are compared with the model's own forward as well, with and without explicit positions, and at
lengths at which RoPE changes its frequencies (``length_rope``). A model that never matches is refused.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, DraftwingWarning, UnsupportedError
from draftwing.formats.gguf_folder import link_of
from draftwing.models import length_rope
from draftwing.models.context import NO_FEATURES, Context, FeatureSpec, Row, TargetOutput
from draftwing.models.linear import Embedding, Linear
from draftwing.models.target import Target, own_context
from draftwing.models.weights import check_finite
from draftwing.noise import AcceptArgs
from draftwing.tree import PAD, Accepted, DraftTree, depth_first, latest_state

# Names of the cache in transformers: since 5.24, before that, of state-space models before that, and of RWKV.
CACHES = ("cache", "past_key_values", "cache_params", "state")

_LAYER_TYPES = ("full_attention", "sliding_attention")
_CHAIN_LAYER_TYPES = (*_LAYER_TYPES, "chunked_attention")
# Which hold nothing but keys and values, or nothing: then a layer reads those of another.
_CACHE_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
_GROWING_LAYERS = ("DynamicLayer", "LinearAttentionAndFullAttentionLayer")  # which keep the keys of every token
_WINDOW_LAYERS = ("DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
_NARROW_WINDOW, _NUM_SIBLINGS = 3, 24
_NUM_STEPS = 3  # decoded in a check
_LONGEST_CHECK = 1024  # tokens; windows up to this are checked as they are
_NEAR, _FAR = 4, 1 << 20  # limits of RoPE that a check crosses, and that it does not
# Relative to the largest logit. Even a float64 model may compute its norms or its attention in float32.
_TOLERANCES = {torch.bfloat16: 0.05, torch.float16: 0.02}
# Above it, half precision or quantised activations cannot explain the error of a forward over fewer tokens.
_MAX_ROUNDING = 0.2


@dataclass
class RowCache:
    """The transformers cache of a row."""

    cache: Any  # None before the first token
    # tokens in it, if it cannot be cropped; None after a forward that failed, which may have changed it
    num_read: int | None
    last: TargetOutput | None = None  # logits (1, 1, V) and features of the last token, if it cannot be cropped
    tokens: list[int] = field(default_factory=list)  # those in it, if trees are run path by path
    # nodes of the path that was walked last, from the root on, and the cache after each; ``cache`` is the root's
    path: list[tuple[int, Any]] = field(default_factory=list)


@dataclass
class AdapterContext(Context):
    """Rows, and the cache of each."""

    caches: list[RowCache] = field(default_factory=list)


class AdapterTarget(Target):
    """A transformers model as a ``Target``.

    Args:
        model: a causal LM.

    Attributes:
        reason: the reason why trees are not supported, or None.
    """

    def __init__(self, model: Any, name: str | None = None) -> None:
        self.model = model.eval()
        self.name = name or type(model).__name__
        try:
            self._config = config = model.config.get_text_config()
        except ValueError as error:  # several texts, such as a prompt and codes of audio
            raise UnsupportedError(f"{self.name}: it is no causal LM ({error}): choose another model") from error
        head = model.get_output_embeddings()
        if head is None or not hasattr(head, "weight"):
            raise UnsupportedError(
                f"{self.name}: it has no output embedding, so it is no causal LM: choose another model"
            )
        self.vocab_size = head.weight.shape[0]
        self.dtype, self.device = head.weight.dtype, head.weight.device
        try:
            self.hidden_size, self.num_layers = config.hidden_size, config.num_hidden_layers
        except AttributeError as error:  # several networks, as in BLT
            raise UnsupportedError(
                f"{self.name}: its config describes no stack of layers ({error}): choose another model, or use "
                f"transformers' own generate"
            ) from error
        self.max_length = length_rope.context_length(config) - _num_reserved_positions(model)
        eos = getattr(config, "eos_token_id", None)
        self.eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        self._layer_types: list[str] = list(getattr(config, "layer_types", None) or [])
        self._window: int | None = getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True) is False:
            self._window = None
        # The logits of a prompt are not used, and for a long one they are larger than the model.
        keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._prefill_options: dict[str, Any] = {"logits_to_keep": 1} if keeps else {}
        self._rope = length_rope.LengthRope(model)
        self._cache_name, cache = self._native_cache()
        self._rereads = self._drops_cache()
        self.runs_paths = self.runs_nodes_alone = False
        self.reason = self._choose(cache)
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
        """Load with ``AutoModelForCausalLM``."""
        file = link_of(folder)
        if file is not None:
            raise UnsupportedError(
                f"{file}: transformers does not run a GGUF file directly: write a model folder with "
                f"`draftwing import {file} FOLDER` and give that, or leave engine out"
            )
        try:
            from transformers import AutoModelForCausalLM

            load: Any = AutoModelForCausalLM.from_pretrained
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

    def read(self, ctx: Context, row: Row, start: int, stop: int) -> Tensor | None:
        ctx = own_context(ctx, AdapterContext)
        cache, features = self._read(row, len(row.tokens) - self._drops_last(row), ctx.features)
        ctx.caches.append(cache)
        if not ctx.features.taps:
            return None
        empty = torch.zeros(1, 0, self.hidden_size * len(ctx.features.taps), dtype=self.dtype, device=self.device)
        return torch.cat([empty, *features], 1)[:, : row.length]

    def room(self, length: int) -> int:
        """See ``Target.room``. No step crosses a length at which RoPE changes."""
        return int(min(super().room(length), self._rope.end_of_forward(length) - length))

    def _drops_last(self, row: Row) -> int:
        """1 if a row's pending token is not read with the others, else 0.

        It is read again in the first step, unless it cannot be. If RoPE changes with the length, a prompt is read as a
        whole, since its length decides about its frequencies.
        """
        is_prompt = row.prompt_length == len(row.tokens)
        return int(self._crops and not (self._rope and is_prompt))

    def _read(self, row: Row, stop: int, features: FeatureSpec) -> tuple[RowCache, list[Tensor]]:
        """Read a row's tokens before ``stop`` into a new cache; also returns their features.

        The prompt is one forward, and later tokens are rotated as if each had come alone.
        """
        state, taps, start = RowCache(self._new_cache(), 0), list[Tensor](), 0
        end = stop if self._rereads else min(row.prompt_length, stop)
        while start < stop:
            ids = torch.tensor([row.tokens[start:end]], device=self.device)
            output = self._run(ids, state.cache, features, start, **self._prefill_options)
            last = self._last(output, features)
            state = RowCache(getattr(output, self._cache_name), end, last, row.tokens[:end])
            states = _taps(output, features)
            taps += [] if states is None else [states]
            start, end = end, int(min(self._rope.end_of_forward(end), stop))
        return state, taps

    def _last(self, output: Any, features: FeatureSpec) -> TargetOutput | None:
        """The output for the last token alone, if that token cannot be cropped and read again."""
        if self._crops:
            return None
        taps = _taps(output, features)
        # A copy: a view would keep the logits of a whole prompt.
        return TargetOutput(output.logits[:, -1:].clone(), None if taps is None else taps[:, -1:].clone())

    @torch.inference_mode()
    def forward(self, ctx: Context, tree: DraftTree, accept: AcceptArgs | None = None) -> TargetOutput:
        ctx = own_context(ctx, AdapterContext)
        if tree.num_nodes > 1 and not self.supports_trees:
            raise UnsupportedError(
                f"{self.name}: a tree was drafted, but {self.reason}: decode without speculation with draft='none'"
            )
        outputs = [self._forward_row(ctx, tree, index) for index in range(ctx.num_rows)]
        taps = [output.features for output in outputs if output.features is not None]
        return TargetOutput(torch.cat([output.logits for output in outputs]), torch.cat(taps) if taps else None)

    def _forward_row(self, ctx: AdapterContext, tree: DraftTree, index: int) -> TargetOutput:
        row, features = ctx.rows[index], ctx.features
        length, state = row.length, ctx.caches[index]
        if self._rereads and length in self._rope.switches:
            state = ctx.caches[index] = self._read(row, length + 1, features)[0]
        if self.runs_paths:
            return self._forward_paths(row, state, tree, index, features)
        if self._crops:
            _crop(state.cache, length)  # also the entries of a step that failed
            masks = self._masks(tree.ancestors[index], tree.depths[index], length)
            positions = length + tree.depths[index : index + 1]
            tokens = tree.tokens[index : index + 1].clamp(min=0)
            output = self._run(tokens, state.cache, features, attention_mask=masks, position_ids=positions)
            return TargetOutput(output.logits, _taps(output, features))
        # The pending token may have been read already: with the prompt, or in a step that failed later.
        if state.num_read not in (length, length + 1):
            state = ctx.caches[index] = self._read(row, length + 1, features)[0]
        elif state.num_read == length:
            state.num_read = None
            output = self._run(tree.tokens[index : index + 1, :1], state.cache, features, length)
            state.cache, state.last = getattr(output, self._cache_name), self._last(output, features)
            state.num_read = length + 1
        assert state.last is not None
        return state.last if tree.num_nodes == 1 else self._walk(state, length, tree, index, features)

    def _forward_paths(
        self, row: Row, state: RowCache, tree: DraftTree, index: int, features: FeatureSpec
    ) -> TargetOutput:
        """Run a tree's paths one after another; each begins with what the cache shares with it."""
        tokens, parents = tree.tokens[index].tolist(), tree.parents[index].tolist()
        nodes = [node for node, token in enumerate(tokens) if token != PAD]
        done, pieces = set[int](), list[tuple[list[int], TargetOutput]]()
        for leaf in nodes:
            if leaf in {parents[node] for node in nodes if node}:
                continue
            path = [leaf]
            while path[0]:
                path.insert(0, parents[path[0]])
            new = [node for node in path if node not in done]
            text = [*row.tokens[: row.length], *(tokens[node] for node in path)]
            kept = next((i for i, (a, b) in enumerate(zip(state.tokens, text, strict=False)) if a != b), len(text))
            kept = min(kept, len(state.tokens), len(text) - len(new))
            _crop(state.cache, kept)
            state.tokens = text[:kept]
            output = self._run(torch.tensor([text[kept:]], device=self.device), state.cache, features, kept)
            state.cache, state.tokens = getattr(output, self._cache_name), text
            pieces.append((new, TargetOutput(output.logits, _taps(output, features))))
            done.update(new)
        return _assembled(len(tokens), pieces)

    def _walk(self, state: RowCache, length: int, tree: DraftTree, index: int, features: FeatureSpec) -> TargetOutput:
        """Run a tree node by node, depth first, after its root; keeps the states of one path at a time."""
        root = state.last
        assert root is not None
        tokens, parents = tree.tokens[index].tolist(), tree.parents[index].tolist()
        used = [node for node, token in enumerate(tokens) if token != PAD]
        path, pieces = [(0, state.cache)], [([0], root)]
        for node, depth in islice(depth_first(parents, used), 1, None):
            del path[depth:]
            ids = torch.tensor([[tokens[node]]], device=self.device)
            output = self._run(ids, _copy(path[-1][1]), features, length + depth)
            pieces.append(([node], TargetOutput(output.logits, _taps(output, features))))
            cache = getattr(output, self._cache_name)
            for _, above in path:
                _share(above, cache)
            path.append((node, cache))
        state.path = path
        return _assembled(len(tokens), pieces)

    @torch.no_grad()
    def score(self, ids: Tensor, features: FeatureSpec = NO_FEATURES) -> TargetOutput:
        output = self._run(ids, self._new_cache(), features)
        return TargetOutput(output.logits, _taps(output, features))

    @torch.inference_mode()
    def commit(self, ctx: Context, tree: DraftTree, accepted: Accepted) -> None:
        """See ``Target.commit``. Each cache ends with the whole tree: keep the path."""
        ctx = own_context(ctx, AdapterContext)
        if tree.num_nodes == 1 or self.runs_paths:  # the next step crops
            return
        for row, (length, path) in enumerate(zip(ctx.lengths, accepted.path.tolist(), strict=True)):
            nodes = [node for node in path if node != PAD]
            if self.runs_nodes_alone:
                self._keep(ctx.caches[row], length, nodes, tree.tokens[row : row + 1])
                continue
            slots = ctx.tensor([*range(length), *(length + node for node in nodes)])
            for layer in ctx.caches[row].cache.layers:
                layer.keys, layer.values = layer.keys.index_select(2, slots), layer.values.index_select(2, slots)

    def _keep(self, state: RowCache, length: int, nodes: list[int], tokens: Tensor) -> None:
        """Take the state after the accepted nodes, reading those again that were not walked last."""
        state.cache, shared = latest_state(state.path, nodes, state.cache)
        state.path, state.last, state.num_read = [], None, None
        for depth, node in enumerate(nodes[shared:], shared):
            output = self._run(tokens[:, node : node + 1], state.cache, start=length + depth)
            state.cache = getattr(output, self._cache_name)
        state.num_read = length + len(nodes)

    def remove(self, ctx: Context, row: int) -> None:
        ctx = own_context(ctx, AdapterContext)
        columns: tuple[list[Any], ...] = (ctx.rows, ctx.caches)
        for column in columns:
            column[row] = column[-1]
            column.pop()

    # --- calls of transformers -------------------------------------------------------------------------------------

    def _new_cache(self) -> Any:
        """A cache that keeps every position of every layer; None lets a recurrent model make its own."""
        if not self._crops:
            return None
        from transformers import DynamicCache

        return DynamicCache()

    def _run(
        self, ids: Tensor, cache: Any, features: FeatureSpec = NO_FEATURES, start: int | None = None, **options: Any
    ) -> Any:
        """A forward of tokens (B, T), the first of which has the position ``start`` in its text."""
        self._rope.reset()
        if start is not None and self._positioned:
            options["position_ids"] = torch.arange(start, start + ids.shape[1], device=self.device)[None]
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

    # --- what does the model support? ------------------------------------------------------------------------------

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

    def _drops_cache(self) -> bool:
        """True if ``generate`` reads the text again when LongRoPE changes to its long factors, as Phi-3's does."""
        try:
            return any(length_rope.drops_cache(self.model, self._cache_name, limit) for limit in self._rope.switches)
        except Exception as error:  # an unknown model may raise anything
            raise UnsupportedError(
                f"{self.name}: generate cannot be examined at the length at which its RoPE changes "
                f"({type(error).__name__}: {error}): try another version of transformers"
            ) from error

    def _choose(self, cache: Any) -> str | None:
        """Choose how to decode so that logits are the model's own; return why trees are not supported, or None."""
        self._positioned = self.supports_trees = self._crops = True
        with self._rope.limited_to(_FAR), _without_step_limits(self.model):
            reason = self._why_no_trees(cache)
            if reason is None and self._decoding_error() > self._tolerance:
                reason = "its cached keys cannot be rolled back"
            if reason is None:
                return None
            self.runs_paths = True
            if self._can_crop(cache) and any(self._runs_paths_exactly() for self._positioned in (True, False)):
                return None
            self.runs_paths = self._crops = self.supports_trees = False
            errors = dict[bool, float]()
            for self._positioned in (True, False):
                errors[self._positioned] = self._decoding_error()
                if errors[self._positioned] <= self._tolerance:
                    break
            self._positioned = min(errors, key=lambda positioned: errors[positioned])
            is_rounded = self.dtype in _TOLERANCES or getattr(self.model, "is_quantized", False)
            if errors[self._positioned] <= (_MAX_ROUNDING if is_rounded else self._tolerance):
                self.supports_trees = self.runs_nodes_alone = True
                if self._walks_exactly():
                    return None
                self.supports_trees = self.runs_nodes_alone = False
                return reason
        raise UnsupportedError(
            f"{self.name}: decoded one token at a time, it does not have the logits of a forward over the whole "
            f"text, so no decoding would be exact (is it an encoder, or does it need further inputs?): choose another "
            f"model, or use transformers' own generate"
        )

    @property
    def _tolerance(self) -> float:
        return _TOLERANCES.get(self.dtype, 3e-4)

    def _decoding_error(self) -> float:
        """The error of a few decoded tokens, also beyond a change of RoPE; infinite if they cannot be decoded."""
        try:
            error = self._error_of_steps(3, _NUM_STEPS)
            if not self._rope:
                return error
            # generate keeps the keys of earlier tokens, unlike a forward of the whole text, unless it drops its cache.
            with self._rope.limited_to(_NEAR):
                errors = [self._error_of_steps(length, 1) for length in (_NEAR, _NEAR + 1, _NEAR + 2)]
                errors += [self._error_of_steps(_NEAR - 1, _NUM_STEPS)] if self._rereads else []
            return max(error, *errors)
        except Exception:  # an unknown model may raise anything
            return math.inf

    @torch.inference_mode()
    def _error_of_steps(self, num_prompt: int, num_steps: int) -> float:
        ids = self._tokens(num_prompt + num_steps - 1)
        steps = enumerate(self._steps(ids, num_prompt), num_prompt)
        return max([self._error(logits, ids[:length]) for length, logits in steps])

    def _error(self, logits: Tensor, ids: Sequence[int]) -> float:
        """The largest deviation from the logits after ``ids`` in the model's own forward, relative to the largest."""
        expected = self._logits(ids).double()
        error = float((expected - logits).abs().max() / expected.abs().max().clamp(min=1.0))
        return math.inf if math.isnan(error) else error

    def _logits(self, ids: Sequence[int]) -> Tensor:
        """(V,) the logits after ``ids`` in the model's own forward."""
        self._rope.reset()
        logits: Tensor = self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=False).logits[0, -1]
        return logits

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

    def _can_crop(self, cache: Any) -> bool:
        """True if a cache holds nothing but keys and values, and RoPE does not change with the length."""
        is_known, layers = set(self._layer_types) <= set(_CHAIN_LAYER_TYPES), _layers(cache)
        return is_known and not self._rope and bool(layers) and all(type(x).__name__ in _CACHE_LAYERS for x in layers)

    @torch.inference_mode()
    def _runs_paths_exactly(self) -> bool:
        """True if a tree that is run path by path is exact, also beyond every window of the model.

        A window is narrowed if the model reads it from its config, and crossed if it is short.
        """
        config, prompt = self._config, self._tokens(12)
        names = [
            name
            for name, value in vars(config).items()
            if ("window" in name or "chunk" in name) and type(value) is int and 1 < value < self.max_length
        ]
        try:
            if not self._is_path_exact(4):
                return False
            for name in names:
                value, whole = getattr(config, name), self._logits(prompt)
                setattr(config, name, _NARROW_WINDOW)
                try:
                    is_read = not torch.equal(self._logits(prompt), whole)
                    if is_read and not all(self._is_path_exact(length) for length in range(3, 9)):
                        return False
                finally:
                    setattr(config, name, value)
                if value + 8 <= min(_LONGEST_CHECK, self.max_length):
                    is_read = True
                    if not all(self._is_path_exact(value + more) for more in (-2, 3)):
                        return False
                if not is_read:
                    return False
        except Exception:  # an unknown model may raise anything
            return False
        return True

    @torch.inference_mode()
    def _is_path_exact(self, num_prompt: int) -> bool:
        """Compare two steps with the model's own forward; the path that the first one accepts is not its last."""
        ids, ctx = self._tokens(num_prompt + 6), self.new_context()
        prompt, (one, two, three, *more) = ids[:num_prompt], ids[num_prompt:]
        self.prefill(ctx, prompt)
        tree = DraftTree.from_lists([[prompt[-1], one, two, three]], [[-1, 0, 1, 0]], self.device)
        logits = self.forward(ctx, tree).logits[0]
        errors = [
            self._error(logits[node], [*prompt, *path]) for node, path in enumerate(([], [one], [one, two], [three]))
        ]
        row = ctx.rows[0]
        row.tokens += [one, two]
        row.length = len(row.tokens) - 1
        logits = self.forward(ctx, DraftTree.chain(torch.tensor([[two, *more]], device=self.device))).logits[0]
        errors += [self._error(logits[node], [*row.tokens, *more[:node]]) for node in range(len(more) + 1)]
        return max(errors) <= self._tolerance

    @torch.inference_mode()
    def _walks_exactly(self) -> bool:
        """True if a tree that is walked has the bits of tokens decoded one by one, and so has the step after it."""
        ids = self._tokens(6)
        prompt, (one, two, three) = ids[:3], ids[3:]
        texts = [[*prompt, one, two], [*prompt, three], [*prompt, one, three, two]]
        try:
            plain = [self._steps(text, len(prompt)) for text in texts]
            ctx = self.new_context()
            self.prefill(ctx, prompt)
            tree = DraftTree.from_lists([[prompt[-1], one, two, three]], [[-1, 0, 1, 0]], self.device)
            nodes = self.forward(ctx, tree).logits[0]
            accepted = ctx.tensor([1])
            self.commit(ctx, tree, Accepted(ctx.tensor([[0, 1]]), accepted, accepted))
            row = ctx.rows[0]
            row.tokens, row.length = texts[2], len(prompt) + 1
            after = self.forward(ctx, DraftTree.chain(ctx.tensor([[three, two]]))).logits[0]
        except Exception:  # an unknown model may raise anything
            return False
        expected = [*plain[0], plain[1][1], *plain[2][2:]]
        return torch.equal(torch.cat([nodes, after]), torch.stack(expected))

    def _steps(self, ids: Sequence[int], num_prompt: int) -> list[Tensor]:
        """The logits (V,) after the last token of a prompt, and after each further token decoded alone."""
        ctx, found = self.new_context(), list[Tensor]()
        self.prefill(ctx, ids[:num_prompt])
        row = ctx.rows[0]
        for length in range(num_prompt, len(ids) + 1):
            row.tokens, row.length = list(ids[:length]), length - 1
            found.append(self.forward(ctx, ctx.roots()).logits[0, -1])
        return found

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
        paths: dict[int, list[int]] = {0: [], 1: [0], last: [last - 1], last + 1: [last - 1, last]}
        errors = [self._error(logits[node], [*prompt, *(drafts[i] for i in path)]) for node, path in paths.items()]
        return max(errors) <= self._tolerance


def _assembled(num_nodes: int, pieces: Sequence[tuple[list[int], TargetOutput]]) -> TargetOutput:
    """Return the output for a row's tree from forwards whose last tokens are the given nodes."""

    def columns(outputs: Sequence[Tensor]) -> Tensor:
        whole = outputs[0].new_zeros(1, num_nodes, outputs[0].shape[-1])
        for (nodes, _), output in zip(pieces, outputs, strict=True):
            whole[:, nodes] = output[:, -len(nodes) :]
        return whole

    taps = [output.features for _, output in pieces if output.features is not None]
    return TargetOutput(columns([output.logits for _, output in pieces]), columns(taps) if taps else None)


def _layers(cache: Any) -> Sequence[Any]:
    """Return the layers of a cache; of an encoder-decoder's, those of the decoder's own tokens."""
    layers: Sequence[Any] = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    return layers


@contextmanager
def _without_step_limits(model: Any) -> Iterator[None]:
    """Lift the least time step of Mamba 2 layers: forwards of several tokens apply it, and those of one do not."""
    name = "time_step_limit"
    limits = [(module, getattr(module, name)) for module in model.modules() if hasattr(module, name)]
    try:
        for module, limit in limits:
            setattr(module, name, (0.0, limit[1]))
        yield
    finally:
        for module, limit in limits:
            setattr(module, name, limit)


def _copy(cache: Any) -> Any:
    """Return a cache that the next forward may change without changing this one.

    Keys and values are shared: layers never write to them, they replace them.
    """
    layers = [x for x in _layers(cache) if type(x).__name__ in _GROWING_LAYERS + _WINDOW_LAYERS]
    states = [states for layer in layers for states in (layer.keys, layer.values)]
    return deepcopy(cache, {id(tensor): tensor for tensor in states})


def _share(above: Any, cache: Any) -> None:
    """Let a cache hold the keys and values of its tokens as views of those of a cache that continues it."""
    for layer, longer in zip(_layers(above), _layers(cache), strict=True):
        if type(layer).__name__ in _GROWING_LAYERS and layer.keys is not None:
            length = layer.keys.shape[2]
            layer.keys, layer.values = longer.keys[:, :, :length], longer.values[:, :, :length]


def _crop(cache: Any, length: int) -> None:
    """Keep the first ``length`` entries of every layer."""
    for layer in _layers(cache):
        if layer.keys is not None and layer.keys.shape[2] > length:
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]


def _num_reserved_positions(model: Any) -> int:
    """Entries of RoBERTa's position table that no text uses: positions are counted from behind the padding's."""
    size, words = getattr(model.config, "max_position_embeddings", None), model.get_input_embeddings()
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding) and module is not words]
    return max((t.padding_idx + 1 for t in tables if t.num_embeddings == size and t.padding_idx is not None), default=0)


def _taps(output: Any, features: FeatureSpec) -> Tensor | None:
    return torch.cat([output.hidden_states[tap] for tap in features.taps], -1) if features.taps else None
