"""RoPE in transformers whose frequencies change with the length: LongRoPE (2402.13753) and dynamic NTK (2309.00071).

transformers rotates all tokens of a forward by the frequencies of its last position. A token that is decoded alone is
therefore rotated differently from the same token in a forward that reaches across a limit. ``LengthRope`` says how
many tokens one forward may read without changing any of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_ORIGINAL = "original_max_position_embeddings"


def rope_parameters(config: Any) -> list[Mapping[str, Any]]:
    """The RoPE settings of a transformers config: one mapping, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, Mapping)]
    return by_layer_type or [parameters]


def rope_type(parameters: Mapping[str, Any]) -> str:
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def context_length(config: Any) -> int:
    """The number of tokens that a row may hold: configs state it before or after RoPE stretches it."""
    names = ("max_position_embeddings", "n_positions", "max_target_positions")
    positions = next((int(size) for name in names if (size := getattr(config, name, None))), 1 << 20)
    lengths = [positions]
    for parameters in rope_parameters(config):
        factor, original = parameters.get("factor") or 1.0, parameters.get(_ORIGINAL)
        if rope_type(parameters) in ("linear", "dynamic"):
            lengths.append(int(positions * factor))
        elif rope_type(parameters) in ("yarn", "longrope") and original and original <= positions:
            lengths.append(int(original * factor))
    return max(lengths)


class LengthRope:
    """The RoPE modules of a transformers model whose frequencies change with the length.

    ``switches`` are lengths above which LongRoPE uses its long factors, ascending; ``stretches_at`` is the length above
    which dynamic NTK has other frequencies for every length, infinite without it.
    """

    def __init__(self, model: Any) -> None:
        self._dynamic: list[Any] = []  # the modules, which keep the frequencies of the longest text so far
        self._config = model.config.get_text_config()
        switches, stretches_at = set[int](), math.inf
        for module in model.modules():
            kinds = getattr(module, "rope_type", None)
            if any("dynamic" in kind for kind in _values(kinds)) and hasattr(module, "original_max_seq_len"):
                self._dynamic.append(module)
                stretches_at = min(stretches_at, module.original_max_seq_len)
        for parameters in rope_parameters(self._config):
            if rope_type(parameters) == "longrope":
                original = parameters.get(_ORIGINAL) or getattr(self._config, _ORIGINAL, None)
                switches.add(int(original or self._config.max_position_embeddings))
        self.switches, self.stretches_at = sorted(switches), stretches_at

    def __bool__(self) -> bool:
        """True if any frequency changes with the length."""
        return bool(self.switches) or self.stretches_at < math.inf

    def end_of_forward(self, start: int) -> float:
        """Return where a forward from ``start`` must end, so that tokens are rotated as if each had come alone."""
        if start >= self.stretches_at:
            return start + 1
        return min(self.stretches_at, *(limit for limit in self.switches if start < limit), math.inf)

    def reset(self) -> None:
        """Forget the longest text so far: the next forward has the frequencies of its length."""
        for module in self._dynamic:
            names = [f"{name}_" for name in module.rope_type] if isinstance(module.rope_type, Mapping) else [""]
            for name in names:
                original = getattr(module, f"{name}original_inv_freq")
                setattr(module, f"{name}inv_freq", original.to(getattr(module, f"{name}inv_freq").device))
                setattr(module, f"{name}max_seq_len_cached", module.original_max_seq_len)

    @contextmanager
    def limited_to(self, limit: int) -> Iterator[None]:
        """Lower all limits to ``limit`` tokens, so that a short text shows what happens there."""
        before = self.switches, self.stretches_at
        changed: list[tuple[Any, str, Any]] = []

        def change(holder: Any, name: str) -> None:
            value = holder[name] if isinstance(holder, dict) else getattr(holder, name)
            changed.append((holder, name, value))
            _set(holder, name, limit)

        try:
            for parameters in rope_parameters(self._config):
                if rope_type(parameters) == "longrope" and _ORIGINAL in parameters:
                    change(parameters, _ORIGINAL)
            if self.switches and hasattr(self._config, _ORIGINAL):
                change(self._config, _ORIGINAL)
            if self._dynamic:
                change(self._config, "max_position_embeddings")
            for module in self._dynamic:
                change(module, "original_max_seq_len")
            self.switches = [limit] if self.switches else []
            self.stretches_at = limit if self._dynamic else math.inf
            yield
        finally:
            for holder, name, value in reversed(changed):
                _set(holder, name, value)
            self.switches, self.stretches_at = before
            self.reset()


def drops_cache(model: Any, cache_name: str, limit: int) -> bool:
    """Return True if the model's ``generate`` reads the whole text again when it grows beyond ``limit`` tokens."""
    from transformers import DynamicCache

    cache, states = DynamicCache(), torch.zeros(1, 1, limit, 1)
    cache.update(states, states, 0)
    ids = torch.zeros(1, limit + 1, dtype=torch.int64)
    prepared = model.prepare_inputs_for_generation(ids, next_sequence_length=1, use_cache=True, **{cache_name: cache})
    return prepared.get(cache_name) is None


def _values(kinds: Any) -> list[str]:
    values = kinds.values() if isinstance(kinds, Mapping) else [kinds]
    return [kind for kind in values if isinstance(kind, str)]


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)
