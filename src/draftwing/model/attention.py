"""Whole texts at once, without a cache: how training reads a target, and how nets are trained.

Shape suffixes: B rows, T tokens, R = B * T, K heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["CausalAttention"]


class CausalAttention:
    """Each token sees itself and those before it, within the layer's window: an ``Attend`` for (B, T) tokens.

    Padding belongs at the end of rows: no other token sees it.

    Args:
        num_rows, length: B and T.
        windows: each layer's sliding window, or None.
        scale: of the scores.
    """

    def __init__(self, num_rows: int, length: int, windows: Sequence[int | None], scale: float) -> None:
        self._rows, self._length, self._windows, self._scale = num_rows, length, windows, scale
        self._masks: dict[int, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(R, heads, D) each -> (R, heads * D)."""
        mask = self._mask(self._windows[layer], q.device)
        q, k, v = (each.view(self._rows, self._length, -1, each.shape[-1]).transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=True
        )
        return mixed.transpose(1, 2).reshape(self._rows * self._length, -1)

    def _mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """(T, T) True where a token looks; None where all that came before may be seen."""
        if window is None or window >= self._length:
            return None
        if window not in self._masks:
            place = torch.arange(self._length, device=device)
            back = place[:, None] - place
            self._masks[window] = (back >= 0) & (back < window)
        return self._masks[window]
