"""Any other causal LM of transformers behind the same ``Target``: slower than the lean decoder, and as exact.

Every row has a cache of its own. A tree is one forward with a 4D additive mask (eager attention reads a bool mask
silently wrong) and explicit positions; commit gathers the kept entries. When a model is loaded, one small tree is
compared with the model's own forward: an architecture that ignores our mask or positions, or whose state cannot be
rolled back, is found there, and is then decoded plainly.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, DraftwingWarning, UnsupportedError
from draftwing.model.target import NO_FEATURES, Context, FeatureSpec, Row, Target, TargetOutput
from draftwing.tree import PAD, Accepted, DraftTree

__all__ = ["AdapterContext", "AdapterTarget"]


@dataclass
class AdapterContext(Context):
    """Rows and the transformers cache of each."""

    caches: list[Any] = field(default_factory=list)


class AdapterTarget(Target):
    """A transformers model as a ``Target``.

    Args:
        model: a causal LM in eval mode.
        name: for reports.

    Attributes:
        reason: why trees are not supported, where they are not.
    """

    def __init__(self, model: Any, name: str | None = None) -> None:
        self.model = model.eval()
        config = model.config.get_text_config()
        self.name = name or type(model).__name__
        weight = model.get_output_embeddings().weight
        self.vocab_size = weight.shape[0]
        self.dtype, self.device = weight.dtype, weight.device
        self.hidden_size, self.num_layers = config.hidden_size, config.num_hidden_layers
        self.max_length = int(getattr(config, "max_position_embeddings", 0) or getattr(config, "n_positions", 1 << 20))
        self.eos_ids = _ids(config.eos_token_id)
        self._layer_types: list[str] = list(getattr(config, "layer_types", None) or [])
        self._window: int | None = getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True) is False:
            self._window = None
        self.reason = self._why_no_trees()
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
            CheckpointError: transformers cannot load the folder; its own reason is quoted.
        """
        from transformers import AutoModelForCausalLM

        try:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        except Exception as error:  # transformers raises anything from KeyError to OSError here
            raise CheckpointError(f"{folder}: transformers cannot load this model: {error}") from error
        return cls(model.to(device), name or folder.name)

    @property
    def num_weight_bytes(self) -> int:
        """All parameters but the input embedding (an upper bound for mixtures of experts)."""
        embedding = self.model.get_input_embeddings().weight
        total = sum(p.numel() * p.element_size() for p in self.model.parameters())
        tied = embedding is self.model.get_output_embeddings().weight
        return int(total - (0 if tied else embedding.numel() * embedding.element_size()))

    def new_context(self) -> AdapterContext:
        """An empty context."""
        return AdapterContext(self.device)

    @torch.inference_mode()
    def prefill(self, ctx: Context, prompt_ids: Sequence[int], features: FeatureSpec = NO_FEATURES) -> Tensor | None:
        """See ``Target.prefill``: the model's own causal forward."""
        assert isinstance(ctx, AdapterContext)
        self.check_prompt(prompt_ids)
        ids, cache, taps = list(prompt_ids), self._empty_cache(), None
        if len(ids) > 1:
            output = self._run(torch.tensor([ids[:-1]], device=self.device), cache, None, None, features)
            cache = _cache_of(output)
            taps = self._taps(output, features)
        elif features.taps:
            width = self.hidden_size * len(features.taps)
            taps = torch.zeros(1, 0, width, dtype=self.dtype, device=self.device)
        ctx.rows.append(Row(ids, len(ids) - 1, len(ids)))
        ctx.caches.append(cache)
        return taps

    @torch.inference_mode()
    def forward(self, ctx: Context, tree: DraftTree, features: FeatureSpec = NO_FEATURES) -> TargetOutput:
        """See ``Target.forward``. Rows are run one by one."""
        assert isinstance(ctx, AdapterContext)
        logits, taps = [], []
        for row, length in enumerate(ctx.lengths):
            tokens = tree.tokens[row : row + 1].clamp(min=0)
            if self.supports_trees:
                positions = length + tree.depths[row : row + 1]
                masks = self._masks(tree.ancestors[row], tree.depths[row], length)
                output = self._run(tokens, ctx.caches[row], masks, positions, features)
            else:
                if tree.num_nodes > 1:
                    raise UnsupportedError(f"{self.name}: {self.reason}: decode it plainly with draft='none'")
                output = self._run(tokens, ctx.caches[row], None, None, features)
            ctx.caches[row] = _cache_of(output)
            logits.append(output.logits)
            taps.append(self._taps(output, features))
        found = [tap for tap in taps if tap is not None]
        return TargetOutput(torch.cat(logits), torch.cat(found) if found else None)

    @torch.inference_mode()
    def commit(self, ctx: Context, tree: DraftTree, accepted: Accepted) -> None:
        """See ``Target.commit``. Each cache holds the whole tree at its end: keep the path."""
        assert isinstance(ctx, AdapterContext)
        if tree.num_nodes == 1:
            return
        for row, (length, path) in enumerate(zip(ctx.lengths, accepted.path.tolist(), strict=True)):
            kept = [length + node for node in path if node != PAD]
            slots = ctx.tensor([*range(length), *kept])
            for layer in ctx.caches[row].layers:
                layer.keys = layer.keys.index_select(2, slots)
                layer.values = layer.values.index_select(2, slots)

    def remove(self, ctx: Context, row: int) -> None:
        """See ``Target.remove``."""
        assert isinstance(ctx, AdapterContext)
        ctx.rows[row], ctx.caches[row] = ctx.rows[-1], ctx.caches[-1]
        ctx.rows.pop()
        ctx.caches.pop()

    # --- how transformers is called --------------------------------------------------------------------------------

    def _empty_cache(self) -> Any:
        """A cache that keeps every position of every layer; None lets a recurrent model make its own."""
        if not getattr(self, "supports_trees", True):
            return None
        from transformers import DynamicCache

        return DynamicCache()

    def _run(self, ids: Tensor, cache: Any, masks: Any, positions: Tensor | None, features: FeatureSpec) -> Any:
        extra: dict[str, Any] = {"output_hidden_states": True} if features.taps else {}
        if cache is not None:
            extra["cache_params" if _is_cache_params(cache) else "past_key_values"] = cache
        if masks is not None:
            extra |= {"attention_mask": masks, "position_ids": positions}
        return self.model(input_ids=ids, use_cache=True, **extra)

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
        if not self._layer_types:
            return additive(windowed)
        masks = {"full_attention": additive(full), "sliding_attention": additive(windowed)}
        return {kind: masks[kind] for kind in set(self._layer_types)}

    # --- does it keep to our mask? ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def _why_no_trees(self) -> str | None:
        """None where a branching tree gives the logits of the model's own forward, else the reason why not."""
        unknown = set(self._layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            return f"its layers of type {', '.join(sorted(unknown))} keep a state that cannot be rolled back"
        tokens = [(7 * i + 3) % self.vocab_size for i in range(6)]
        try:
            with _quiet():
                native = self.model(input_ids=torch.tensor([tokens[:3]], device=self.device), use_cache=True)
            cache = _cache_of(native)
        except UnsupportedError as error:
            return str(error)
        if _is_cache_params(cache) or not all(getattr(layer, "is_croppable", False) for layer in cache.layers):
            return "its recurrent state cannot be rolled back"
        try:
            # Node 2 branches off node 0: 3 -> 4 and 3 -> 5, so that a wrong mask or position shows.
            tree = DraftTree.from_lists([[tokens[3], tokens[4], tokens[5]]], [[-1, 0, 0]], self.device)
            ctx = AdapterContext(self.device)
            self.supports_trees = True
            self.prefill(ctx, tokens[:4])
            ours = self.forward(ctx, tree).logits[0]
        except Exception as error:  # whatever an unknown model raises means the same: not this way
            return f"it cannot run a tree mask ({type(error).__name__}: {error})"
        for node, path in ((0, tokens[:4]), (1, tokens[:5]), (2, [*tokens[:4], tokens[5]])):
            own = self.model(input_ids=torch.tensor([path], device=self.device), use_cache=False).logits[0, -1]
            scale = own.float().abs().max().clamp(min=1.0)
            if float((own - ours[node]).float().abs().max() / scale) > 50 * torch.finfo(self.dtype).eps ** 0.75:
                return "it does not keep to a tree mask with explicit positions"
        return None


def _ids(ids: int | Sequence[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _is_cache_params(cache: Any) -> bool:
    """State-space models hand their state on under another name."""
    return cache is not None and not hasattr(cache, "layers")


def _cache_of(output: Any) -> Any:
    for name in ("past_key_values", "cache_params"):
        cache = getattr(output, name, None)
        if cache is not None:
            return cache
    raise UnsupportedError("the model returns no cache, so nothing can be decoded with it step by step")


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
