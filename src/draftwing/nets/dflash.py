"""DFlash (2602.06036): a whole block of tokens from one pass over the pending token and as many masks.

Every layer attends to the target's own features beside the block itself: fused from several taps, normed, and taken
through the layer's key and value matrices as they are, without a layer below them. Within the block everything sees
everything. The mask k places after the pending token guesses the token there, read by the target's LM head.

Slot i holds the keys and values of the feature at position i; the pending token stands at the first position without.

Shape suffixes: see ``nets.block``; L layers, N = 1 + K tokens of a block, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.model.attention import Attend, Attention
from draftwing.model.config import ModelConfig
from draftwing.model.layers import ACTIVATIONS, DecoderLayer, GatedMLP, RMSNorm
from draftwing.nets.block import BlockNet, Guess
from draftwing.nets.plain import PlainConfig
from draftwing.run.forward import NetShape

__all__ = ["BlockAttention", "DFlashConfig", "DFlashNet", "dflash_taps"]


def dflash_taps(num_layers: int, num_taps: int = 5) -> tuple[int, ...]:
    """The outputs of evenly spaced layers, from the second to the third from the end."""
    last = max(num_layers - 3, 1)
    places = (1 + round(place * (last - 1) / max(num_taps - 1, 1)) for place in range(num_taps))
    return tuple(dict.fromkeys(min(place + 1, num_layers) for place in places))


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(PlainConfig):
    """A DFlash net's shape.

    Attributes:
        block_size: tokens of a block, the pending one counted: it guesses one fewer.
        num_layers, intermediate_size, num_heads, num_kv_heads, head_dim, rms_norm_eps, activation: of its layers.

    Raises:
        ConfigError: see ``PlainConfig``; or sizes that do not go together.
    """

    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: str
    block_size: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (self.num_layers, self.intermediate_size, self.num_heads, self.num_kv_heads, self.head_dim)
        if min(sizes) < 1 or self.num_heads % self.num_kv_heads or self.rope.head_dim != self.head_dim:
            raise ConfigError(
                f"a DFlash net needs sizes of at least 1, query heads that are a multiple of the KV heads, and a "
                f"rotation of its own head width, found layers {self.num_layers}, MLP {self.intermediate_size}, heads "
                f"{self.num_heads} and {self.num_kv_heads}, head width {self.head_dim} and {self.rope.head_dim}"
            )
        if self.activation not in ACTIVATIONS or not 2 <= self.block_size <= 1024:
            raise ConfigError(
                f"a DFlash net needs a block_size from 2 to 1,024 and an activation of {', '.join(ACTIVATIONS)}, found "
                f"{self.block_size} and {self.activation!r}"
            )

    @staticmethod
    def of_levels(num_levels: int) -> dict[str, int]:
        """The fields of a net that guesses so many tokens: the pending one stands in a block too."""
        return {"block_size": 1 + num_levels}

    @classmethod
    def for_target(cls, like: ModelConfig, taps: tuple[int, ...], **changes: Any) -> Self:
        """See ``PlainConfig.for_target``: layers of the target's own shape, 5 of them as in the paper."""
        names = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "activation")
        shape = {name: getattr(like, name) for name in names}
        return super().for_target(like, taps, **{"num_layers": 5, **shape, **changes})


class DFlashNet(BlockNet):
    """A few layers over the target's features and a block of masks."""

    kind = "dflash"
    config: DFlashConfig

    def __init__(self, config: DFlashConfig, *parts: Any, **options: Any) -> None:
        super().__init__(config, *parts, **options)
        width = config.hidden_size
        self.fc = self.new_matrix(width, width * len(config.taps))
        self.state_norm = self._new_norm(width)
        self.layers = nn.ModuleList(self._new_layer() for _ in range(config.num_layers))
        self.norm = self._new_norm(width)
        # Where the paper takes a token that the target has and never uses, any target has room for this.
        self.mask = nn.Parameter(torch.zeros(width, dtype=self._new_dtype, device=self.embedding.device))

    def _new_norm(self, size: int) -> RMSNorm:
        ones = torch.ones(size, dtype=self._new_dtype, device=self.embedding.device, requires_grad=True)
        return RMSNorm(ones, self.config.rms_norm_eps)

    def _new_layer(self) -> DecoderLayer:
        """As Qwen3's: queries and keys are normed, so that features and masks are of one size as keys."""
        config, hidden, wide = self.config, self.config.hidden_size, self.config.intermediate_size
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return DecoderLayer(
            input_norm=self._new_norm(hidden),
            qkv=self.new_matrix(query + 2 * key, hidden),
            out=self.new_matrix(hidden, query),
            post_norm=self._new_norm(hidden),
            mlp=GatedMLP(self.new_matrix(2 * wide, hidden), self.new_matrix(hidden, wide), config.activation),
            heads=(config.num_heads, config.num_kv_heads, config.head_dim),
            norms=(self._new_norm(config.head_dim), self._new_norm(config.head_dim)),
        )

    # --- what it is ------------------------------------------------------------------------------------------------

    @property
    def num_levels(self) -> int:
        """See ``BlockNet``."""
        return self.config.block_size - 1

    @property
    def num_masks(self) -> int:  # type: ignore[override]  # it follows from the block
        """See ``BlockNet``."""
        return self.config.block_size - 1

    @property
    def share(self) -> float:  # type: ignore[override]
        """See ``BlockNet``: as many tokens in blocks as there are in the text."""
        return 1 / self.config.block_size

    @property
    def shape(self) -> NetShape:
        """See ``DraftNet``."""
        config, width = self.config, self.config.hidden_size
        return NetShape(
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            [None] * config.num_layers,
            config.vocab_size,
            feature_width=width * len(config.taps),
            state_width=width,
            out_width=width,
        )

    # --- what it computes ------------------------------------------------------------------------------------------

    def fuse(self, features: Any) -> Any:
        """The target's features (R, F) as what every layer makes keys and values of."""
        return self.state_norm.forward(self.fc.forward(features))

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """With states: entries, of which keys and values are kept and nothing else comes. Without: a block."""
        layers = [cast(DecoderLayer, layer) for layer in self.layers]
        if states is not None:
            for index, layer in enumerate(layers):
                attend(index, layer.qkv.forward(states), layer)
            return states, states
        known = self.embedding.forward(ids.clamp(max=self.mask_id - 1)).to(self.mask.dtype)
        x = torch.where((ids == self.mask_id)[:, None], self.mask, known)
        for index, layer in enumerate(layers):
            x = layer.forward(x, attend, index)
        read = self.norm.forward(x)
        return read, read

    def open(self, out: Tensor, depth: int) -> Tensor:
        """See ``BlockNet``: the laws (B, depth, V), in one product."""
        rows = out[:, 1 : 1 + depth]
        found: Tensor = self.logits(rows.reshape(-1, rows.shape[2]))
        return found.view(*rows.shape[:2], -1)

    def guess(self, level: int, block: Tensor, tokens: Tensor, carried: Tensor | None) -> Guess:
        """See ``BlockNet``: the law of a place, whatever is chosen before it."""
        return Guess(block[:, level : level + 1])

    # --- training --------------------------------------------------------------------------------------------------

    def levels(
        self, ids: Tensor, features: Tensor, entries: Tensor, num_levels: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """See ``BlockNet``."""
        read = self.blocks(ids, features, entries)
        weight = self.head_weight
        for level in range(num_levels):
            yield read[:, :, 1 + level].flatten(0, 1), weight

    def blocks(self, ids: Tensor, features: Tensor, entries: Tensor) -> Tensor:
        """(B, C, N, H) what the LM head reads of blocks that start after each of ``entries`` (C,)."""
        rows, length = features.shape[:2]
        count, nodes = len(entries), 1 + self.num_masks
        attend = BlockAttention(self, rows, length, entries)
        self.forward(None, self.fuse(features.flatten(0, 1)), attend)
        tokens = ids.new_full((rows, count, nodes), self.mask_id)
        tokens[:, :, 0] = ids[:, entries + 1]
        read: Tensor = self.forward(tokens.flatten(), None, attend.within_blocks())[0]
        return read.view(rows, count, nodes, -1)

    def level_logits(self, level: int, read: Tensor) -> Tensor:
        """See ``BlockNet``."""
        found: Tensor = self.logits(read)
        return found


class BlockAttention(Attention):
    """An ``Attend`` for training: first for all features of B texts (T,), then for C blocks of each text at once.

    The block after entry i sees the features up to i, and all of itself.

    Args:
        net: whose layers these are.
        num_rows, length: B and T.
        entries: (C,) after which blocks start.
    """

    def __init__(self, net: DFlashNet, num_rows: int, length: int, entries: Tensor) -> None:
        self._net, self._rows, self._length, self._entries = net, num_rows, length, entries
        self._nodes = 1 + net.num_masks
        places = torch.arange(length, device=entries.device)
        super().__init__(self._turned(places))
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._mask: Tensor | None = None

    def within_blocks(self) -> BlockAttention:
        """From here on for the blocks."""
        order = torch.arange(self._nodes, device=self._entries.device)
        self.cis = self._turned((self._entries[:, None] + 1 + order).flatten())
        length, count, nodes = self._length, len(self._entries), self._nodes
        features = torch.arange(length, device=order.device) <= self._entries[:, None]
        own = torch.eye(count, dtype=torch.bool, device=order.device)
        seen = torch.cat([features, own.repeat_interleave(nodes, 1)], 1)  # (C, T + C * N)
        self._mask = seen.repeat_interleave(nodes, 0)
        return self

    def _turned(self, positions: Tensor) -> Tensor:
        """The rotation of all rows at ``positions``."""
        upto = self._length + self._nodes + 1
        return self._net.rotary.cis(positions.repeat(self._rows), upto=upto).view(
            -1, 1, self._net.config.rope.rotary_dim // 2
        )

    def mix(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(R, heads, D) each -> (R, heads * D); of the features nothing."""
        q, k, v = (each.view(self._rows, -1, *each.shape[1:]).transpose(1, 2) for each in (q, k, v))
        if self._mask is None:
            self._seen.append((k, v))
            return q.new_empty(0)
        keys, values = self._seen[layer]
        mixed = F.scaled_dot_product_attention(
            q, torch.cat([keys, k], 2), torch.cat([values, v], 2), attn_mask=self._mask, enable_gqa=True
        )
        return mixed.transpose(1, 2).flatten(0, 1).flatten(1)
