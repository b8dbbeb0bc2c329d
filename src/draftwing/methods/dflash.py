"""DFlash (2602.06036): a whole block of tokens from one pass over the pending token and K masks.

Every layer attends to the target's own features next to the block itself: features of several taps are fused, normed,
and projected by each layer's key and value matrices directly, without passing through the layers below. Within the
block all tokens see each other (block diffusion in one step). The mask k places after the pending token guesses the
token there, read by the target's LM head.

KV slot i holds the keys and values of the feature at position i; the pending token stands at the first position that
has no feature yet. The paper uses an unused token of the target as the mask; here the mask is a trained vector, which
fits any target.

Shape suffixes: see ``methods.block``; L layers, N = 1 + K tokens of a block, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.methods.block import BlockMethod, BlockNet, Guess
from draftwing.methods.net import LAYER_FIELDS, PlainConfig
from draftwing.models.attention import Attend, Attention, HeadTraits
from draftwing.models.config import ModelConfig
from draftwing.models.layers import ACTIVATIONS, DecoderLayer
from draftwing.runtime.forward import NetShape


def dflash_taps(num_layers: int) -> tuple[int, ...]:
    """Return the outputs of five evenly spaced layers, from the second layer to the third from the end."""
    last = max(num_layers - 3, 1)
    layers = (1 + round(tap * (last - 1) / 4) for tap in range(5))
    return tuple(dict.fromkeys(min(layer + 1, num_layers) for layer in layers))


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(PlainConfig):
    """The shape of a DFlash net: ``block_size`` tokens with the pending one, and sizes of its decoder layers."""

    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: str
    block_size: int = 8
    like_target: ClassVar = LAYER_FIELDS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation not in ACTIVATIONS or not 2 <= self.block_size <= 1024:
            raise ConfigError(
                f"a DFlash net needs a block_size from 2 to 1,024 and an activation of {', '.join(ACTIVATIONS)}, found "
                f"{self.block_size} and {self.activation!r}"
            )

    @staticmethod
    def for_levels(num_levels: int) -> dict[str, int]:
        return {"block_size": 1 + num_levels}

    @classmethod
    def for_target(cls, like: ModelConfig, taps: tuple[int, ...], **changes: Any) -> Self:
        """Return a config of 5 layers, as in the paper, of the target's shape; see ``PlainConfig.for_target``."""
        return super().for_target(like, taps, **{"num_layers": 5, **changes})


class DFlashNet(BlockNet):
    """A few decoder layers over the target's features and a block of masks."""

    kind = "dflash"
    config: DFlashConfig

    def __init__(self, config: DFlashConfig, *parts: Any, **options: Any) -> None:
        super().__init__(config, *parts, **options)
        width = config.hidden_size
        self.fc = self.new_matrix(width, width * len(config.taps))
        self.state_norm = self.new_norm(width)
        # Queries and keys are normed, as in Qwen3, so that features and masks give keys of the same magnitude.
        self.layers = nn.ModuleList(self.new_decoder_layer(qk_norm=True) for _ in range(config.num_layers))
        self.norm = self.new_norm(width)
        self.mask = nn.Parameter(torch.zeros(width, dtype=self._new_dtype, device=self.embedding.device))

    @property
    def num_levels(self) -> int:
        return self.config.block_size - 1

    num_masks = num_levels

    @property
    def share(self) -> float:  # type: ignore[override]
        """1 / block_size, so that all blocks together have as many tokens as the text."""
        return 1 / self.config.block_size

    @property
    def shape(self) -> NetShape:
        return self.attention_shape([None] * self.config.num_layers)

    def fuse(self, features: Any) -> Any:
        """Map the target's features (R, F) to the input (R, H) of every layer's key and value projections."""
        return self.state_norm.forward(self.fc.forward(features))

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """With states, write the keys and values of these entries; without, run a block."""
        layers = [cast(DecoderLayer, layer) for layer in self.layers]
        if states is not None:
            for index, layer in enumerate(layers):
                attend(index, layer.qkv.forward(states), layer)
            return states, states
        tokens = self.embedding.forward(ids.clamp(max=self.mask_id - 1)).to(self.mask.dtype)
        x = torch.where((ids == self.mask_id)[:, None], self.mask, tokens)
        for index, layer in enumerate(layers):
            x = layer.forward(x, attend, index)
        read = self.norm.forward(x)
        return read, read

    def open(self, out: Tensor, depth: int) -> Tensor:
        """Return the logits of each mask (B, depth, V)."""
        masks = out[:, 1 : 1 + depth]
        return self.level_logits(0, masks.flatten(0, 1)).view(*masks.shape[:2], -1)

    def guess(self, level: int, block: Tensor, tokens: Tensor, carried: Tensor | None) -> Guess:
        """Return a mask's distribution, which ignores the tokens before it."""
        return Guess(block[:, level : level + 1])

    # --- training --------------------------------------------------------------------------------------------------

    def levels(
        self, ids: Tensor, features: Tensor, entries: Tensor, num_levels: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        read = self.blocks(ids, features, entries)
        for level in range(num_levels):
            yield read[:, :, 1 + level].flatten(0, 1), self.head_weight

    def blocks(self, ids: Tensor, features: Tensor, entries: Tensor) -> Tensor:
        """Return the LM head's input (B, C, N, H) for blocks that start after each of ``entries`` (C,)."""
        rows, length = features.shape[:2]
        num_blocks, nodes = len(entries), 1 + self.num_masks
        attend = BlockAttention(self, rows, length, entries)
        self.forward(None, self.fuse(features.flatten(0, 1)), attend)
        tokens = ids.new_full((rows, num_blocks, nodes), self.mask_id)
        tokens[:, :, 0] = ids[:, entries + 1]
        read: Tensor = self.forward(tokens.flatten(), None, attend.within_blocks())[0]
        return read.view(rows, num_blocks, nodes, -1)


class BlockAttention(Attention):
    """Attention for training: first over all features of B texts, then over C blocks of each text at once.

    The block after entry i, one of ``entries`` (C,), sees the features up to i, and all of itself.
    """

    def __init__(self, net: DFlashNet, num_rows: int, length: int, entries: Tensor) -> None:
        self._net, self._rows, self._length, self._entries = net, num_rows, length, entries
        super().__init__(self._rotation(torch.arange(length, device=entries.device)))
        self._seen: list[tuple[Tensor, Tensor]] = []  # keys and values of the features, layer by layer
        self._mask: Tensor | None = None  # (C * N, T + C * N), once blocks are run

    def within_blocks(self) -> BlockAttention:
        """Switch from the features to the blocks."""
        num_blocks, nodes = len(self._entries), 1 + self._net.num_masks
        order = torch.arange(nodes, device=self._entries.device)
        self.cis = self._rotation((self._entries[:, None] + 1 + order).flatten())
        features = torch.arange(self._length, device=order.device) <= self._entries[:, None]
        same_block = torch.eye(num_blocks, dtype=torch.bool, device=order.device)
        seen = torch.cat([features, same_block.repeat_interleave(nodes, 1)], 1)
        self._mask = seen.repeat_interleave(nodes, 0)
        return self

    def _rotation(self, positions: Tensor) -> Tensor:
        cis = self._net.rotary.cis(positions.repeat(self._rows), upto=self._length + self._net.num_masks + 2)
        return cis.view(-1, 1, self._net.config.rope.rotary_dim // 2)

    def mix(self, layer: int, traits: HeadTraits, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: (R, heads, D) each -> (R, heads * D); for the features, only keep their keys and values."""
        q, k, v = (x.view(self._rows, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        if self._mask is None:
            self._seen.append((k, v))
            return q.new_empty(0)
        keys, values = self._seen[layer]
        mixed = F.scaled_dot_product_attention(
            q, torch.cat([keys, k], 2), torch.cat([values, v], 2), attn_mask=self._mask, enable_gqa=True
        )
        return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


class DFlash(BlockMethod):
    """A block of masks over the target's features: see ``DFlashNet``."""

    net: type[DFlashNet] = DFlashNet
    config: type[DFlashConfig] = DFlashConfig

    def taps(self, num_layers: int) -> tuple[int, ...]:
        return dflash_taps(num_layers)
