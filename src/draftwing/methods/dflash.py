"""DFlash (2602.06036): a whole block of tokens from one pass over the pending token and K masks.

Every layer attends to the target's own features next to the block itself: features of several taps are fused, normed,
and projected by each layer's key and value matrices directly, without passing through the layers below. Within the
block all tokens see each other (block diffusion in one step). The mask k places after the pending token guesses the
token there, read by the target's LM head. Other projects' heads may differ: some also guess a token at the place of the
pending one, and some layers see a window, or no later token of the block.

KV slot i holds the keys and values of the feature at position i; the pending token stands at the first position that
has no feature yet. The paper uses an unused token of the target as the mask; here the mask is a trained vector, which
fits any target, unless ``mask_token_id`` names one.

Shape suffixes: see ``methods.block``; L layers, N = 1 + K tokens of a block, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.errors import ConfigError, UnsupportedError
from draftwing.formats.dflash import load_dflash, save_dflash
from draftwing.formats.plain import PlainHead
from draftwing.formats.read import same_matrix
from draftwing.formats.settings import OTHER_ENGINE, dflash_kind
from draftwing.formats.tensors import EMBEDDING
from draftwing.formats.write import check_source, command_for
from draftwing.methods.block import BlockMethod, BlockNet, Guess
from draftwing.methods.net import LAYER_FIELDS, PlainConfig, TargetId
from draftwing.models.attention import Attend, Attention, HeadTraits
from draftwing.models.config import ModelConfig, read_config
from draftwing.models.layers import ACTIVATIONS, DecoderLayer
from draftwing.models.linear import Embedding, Linear
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
    mask_token_id: int | None = None  # this token of the target is the mask, not a vector of the net
    from_anchor: bool = False  # the pending token's position predicts the next token, and the masks those after it
    windows: tuple[int | None, ...] = ()  # each layer's sliding window, None for all entries; empty: no layer has one
    causal: tuple[bool, ...] = ()  # layers that see no later token of the block; empty: none
    attention_bias: bool = False  # all matrices of attention have biases
    own_head: bool = False  # the net has its own LM head, for its draft vocabulary
    like_target: ClassVar = LAYER_FIELDS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation not in ACTIVATIONS or not 2 <= self.block_size <= 1024:
            raise ConfigError(
                f"a DFlash net needs a block_size from 2 to 1,024 and an activation of {', '.join(ACTIVATIONS)}, found "
                f"{self.block_size} and {self.activation!r}"
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(f"mask_token_id must be a token below {self.vocab_size}, found {self.mask_token_id}")
        for name in ("windows", "causal"):
            if len(getattr(self, name)) not in (0, self.num_layers):
                raise ConfigError(f"{name} must have an entry for each of {self.num_layers} layers, or none")
        if any(window is not None and window < self.block_size for window in self.windows):
            raise ConfigError(f"a sliding window must be at least block_size {self.block_size}, found {self.windows}")

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
        bias = config.attention_bias
        self.layers = nn.ModuleList(
            self.new_decoder_layer(qk_norm=True, qkv_bias=bias, o_bias=bias) for _ in range(config.num_layers)
        )
        self.norm = self.new_norm(width)
        self.mask = None
        if config.mask_token_id is None:
            self.mask = nn.Parameter(torch.zeros(width, dtype=self._new_dtype, device=self.embedding.device))
        if config.own_head:
            self.head = self.new_matrix(self.num_draft_tokens, width)

    @property
    def num_levels(self) -> int:
        return self.num_masks + self.config.from_anchor

    @property
    def num_masks(self) -> int:  # type: ignore[override]
        return self.config.block_size - 1

    @property
    def share(self) -> float:  # type: ignore[override]
        """1 / block_size, so that all blocks together have as many tokens as the text."""
        return 1 / self.config.block_size

    @property
    def shape(self) -> NetShape:
        config = self.config
        shape = self.attention_shape(config.windows or [None] * config.num_layers)
        return replace(shape, causal=config.causal)

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
        is_mask = ids == self.mask_id
        x = self.embedding.forward(ids.masked_fill(is_mask, self.config.mask_token_id or 0)).to(self.dtype)
        if self.mask is not None:
            x = torch.where(is_mask[:, None], self.mask, x)
        for index, layer in enumerate(layers):
            x = layer.forward(x, attend, index)
        read = self.norm.forward(x)
        return read, read

    def open(self, out: Tensor, depth: int) -> Tensor:
        """Return the logits of each place that guesses (B, depth, V)."""
        masks = self.guessing(out, depth)
        return self.level_logits(0, masks.flatten(0, 1)).view(*masks.shape[:2], -1)

    def guessing(self, out: Tensor, depth: int) -> Tensor:
        """Return the output (B, depth, H) of the places that guess: of the masks, or also of the pending token."""
        first = 1 - self.config.from_anchor
        return out[:, first : first + depth]

    def guess(self, level: int, block: Tensor, tokens: Tensor, carried: Tensor | None) -> Guess:
        """Return a mask's distribution, which ignores the tokens before it."""
        return Guess(block[:, level : level + 1])

    # --- training --------------------------------------------------------------------------------------------------

    def levels(
        self, ids: Tensor, features: Tensor, entries: Tensor, num_levels: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        read = self.blocks(ids, features, entries)
        for level in range(num_levels):
            yield read[:, :, 1 - self.config.from_anchor + level].flatten(0, 1), self.head_weight

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
        self._masks: list[Tensor] = []  # (C * N, T + C * N) of each layer, once blocks are run

    def within_blocks(self) -> BlockAttention:
        """Switch from the features to the blocks."""
        num_blocks, nodes = len(self._entries), 1 + self._net.num_masks
        order = torch.arange(nodes, device=self._entries.device)
        self.cis = self._rotation((self._entries[:, None] + 1 + order).flatten())
        features = torch.arange(self._length, device=order.device) <= self._entries[:, None]
        same_block = torch.eye(num_blocks, dtype=torch.bool, device=order.device)
        seen = torch.cat([features, same_block.repeat_interleave(nodes, 1)], 1).repeat_interleave(nodes, 0)
        queries = (self._entries[:, None] + 1 + order).flatten()
        distance = queries[:, None] - torch.cat([torch.arange(self._length, device=order.device), queries])
        windows, causal = self._net.shape.windows, self._net.shape.causal or [False] * len(self._net.layers)
        for window, is_causal in zip(windows, causal, strict=True):
            mask = seen if window is None else seen & (distance < window)
            self._masks.append(mask & (distance >= 0) if is_causal else mask)
        return self

    def _rotation(self, positions: Tensor) -> Tensor:
        cis = self._net.rotary.cis(positions.repeat(self._rows), upto=self._length + self._net.num_masks + 2)
        return cis.view(-1, 1, self._net.config.rope.rotary_dim // 2)

    def mix(self, layer: int, traits: HeadTraits, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: (R, heads, D) each -> (R, heads * D); for the features, only keep their keys and values."""
        q, k, v = (x.view(self._rows, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        if not self._masks:
            self._seen.append((k, v))
            return q.new_empty(0)
        keys, values = self._seen[layer]
        mixed = F.scaled_dot_product_attention(
            q, torch.cat([keys, k], 2), torch.cat([values, v], 2), attn_mask=self._masks[layer], enable_gqa=True
        )
        return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


class DFlash(BlockMethod):
    """A block of masks over the target's features: see ``DFlashNet``."""

    net: type[DFlashNet] = DFlashNet
    config: type[DFlashConfig] = DFlashConfig
    layouts: tuple[str, ...] = ("draftwing", "vllm", "sglang", "speculators", "gguf")
    settings = (*BlockMethod.settings, "mask_token_id")

    def taps(self, num_layers: int) -> tuple[int, ...]:
        return dflash_taps(num_layers)

    # --- on disk ---------------------------------------------------------------------------------------------------

    def recognises(self, config: Mapping[str, Any], folder: Path) -> bool:
        return super().recognises(config, folder) or dflash_kind(config) == self.name

    def read_head(self, folder: Path, target: TargetId | None) -> PlainHead:
        if dflash_kind(read_config(folder)) is None:
            return super().read_head(folder, target)
        head = load_dflash(folder, self.name, self.config)
        head.check_target(target, str(folder))
        return head

    def convert(self, source: Path, destination: Path, to: str, **options: Any) -> None:
        if to != "gguf":
            super().convert(source, destination, to, **options)
            return
        check_source(source, destination)
        head = self.read_head(source, options.get("target"))
        save_dflash(destination, head, to, target=options.get("target_file"), dtype=options.get("dtype"))

    def save_head(self, folder: Path, head: PlainHead, layout: str, target: TargetId | None) -> str | None:
        if layout == "draftwing":
            return super().save_head(folder, head, layout, target)
        if head.config.target is None and target is not None:
            head = replace(head, config=replace(head.config, target=target))
        save_dflash(folder, head, layout)
        levels = head.config.block_size - 1 + head.config.from_anchor
        name = "TARGET" if target is None else target.name
        return command_for(layout, name, folder.resolve().name, self.name, levels)

    def fit_head(
        self, head: PlainHead, embedding: Tensor | Embedding, target_head: Linear | None, where: str
    ) -> PlainHead:
        copy = head.copies.get(EMBEDDING)
        rows = embedding.plain() if isinstance(embedding, Embedding) and copy is not None else embedding
        if copy is not None and not same_matrix(copy, cast(Tensor, rows)):
            raise UnsupportedError(
                f"{where}: its {EMBEDDING} is not the target's own, which Draftwing's {self.name} net reads: was it "
                f"trained for another version of this model? {OTHER_ENGINE.capitalize()}"
            )
        own = head.tensors.get("head.weight") if head.target_ids is None else None
        if own is None or target_head is None or not same_matrix(own, target_head.weight):
            return head
        tensors = {name: tensor for name, tensor in head.tensors.items() if name != "head.weight"}
        return replace(head, config=replace(head.config, own_head=False), tensors=tensors)
