"""Multi-token prediction (DeepSeek-V3, 2412.19437): a chain of modules, each of which guesses one token further on.

    h0 (target, position i) --+                      h1 --+                      h2 ...
                              v                           v
    token i + 1 ------> [module 1] --> token i + 2  [module 2] --> token i + 3
                                        token i + 2 ----^

A module is RMSNorm(token), RMSNorm(state) -> join -> decoder layer -> RMSNorm, read by the target's own LM head. What
the LM head reads is the state that goes on: h0 is the target's last hidden state after its final norm, and every later
one comes out of a module's norm. Checkpoints were trained so, and engines run them so.

Entry i of module k pairs the state at position i with the token at i + k. Without its later modules the first one is an
EAGLE net, whose own states take the place of the target's: that is what ``forward`` does.

Shape suffixes: R rows (any entries of any sequences), H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.model.attention import Attend
from draftwing.model.config import Activation, ModelConfig
from draftwing.model.embedding import Embedding
from draftwing.model.layers import DecoderLayer, GatedMLP, RMSNorm, concat
from draftwing.model.linear import Linear
from draftwing.nets.base import DraftNet
from draftwing.nets.plain import PlainConfig
from draftwing.run.forward import NetShape

__all__ = ["MtpConfig", "MtpModule", "MtpNet"]


@dataclass(frozen=True, kw_only=True)
class MtpConfig(PlainConfig):
    """The shape of a chain of modules. It reads one tap, the target's last hidden state.

    Attributes:
        num_modules: D of the paper.
        qkv_bias, o_bias, mlp_bias: whether matrices of the decoder layers have biases.
        qk_norm: each head's queries and keys are normed.
        window: the sliding window of the decoder layers, or None.

    Raises:
        ConfigError: values that do not go together.
    """

    num_modules: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: Activation
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_modules", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"an MTP head's {name} must be at least 1, found {getattr(self, name)}")
        if len(self.taps) != 1:
            raise ConfigError(f"an MTP head reads one hidden state of the target, found taps {self.taps}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"an MTP head's {self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim != self.rope.head_dim:
            raise ConfigError(f"an MTP head of width {self.head_dim} cannot be rotated as one of {self.rope.head_dim}")

    @classmethod
    def for_target(cls, like: ModelConfig, taps: tuple[int, ...], **changes: Any) -> Self:
        """One module with a decoder layer as the target's own dense ones; ``changes``: any field."""
        shape: dict[str, Any] = {
            "num_modules": 1,
            "intermediate_size": like.intermediate_size,
            "num_heads": like.num_heads,
            "num_kv_heads": like.num_kv_heads,
            "head_dim": like.head_dim,
            "rms_norm_eps": like.rms_norm_eps,
            "activation": like.activation,
            "qkv_bias": like.qkv_bias,
            "o_bias": like.o_bias,
            "mlp_bias": like.mlp_bias,
            "qk_norm": like.qk_norm,
        }
        return super().for_target(like, taps, **{**shape, **changes})


class MtpModule(nn.Module):
    """One module.

    Args:
        token_norm, state_norm: of what it reads.
        join: (H, 2 H), tokens first.
        block: its decoder layer.
        norm: of what it gives out.
    """

    def __init__(
        self, token_norm: RMSNorm, state_norm: RMSNorm, join: Linear, block: DecoderLayer, norm: RMSNorm
    ) -> None:
        super().__init__()
        self.token_norm, self.state_norm, self.join, self.block, self.norm = token_norm, state_norm, join, block, norm

    def forward(self, tokens: Any, states: Any, attend: Attend) -> Any:
        """Embeddings (R, H) and states (R, H) -> the states (R, H) that the LM head and the next module read."""
        both = concat([self.token_norm.forward(tokens), self.state_norm.forward(states)])
        return self.norm.forward(self.block.forward(self.join.forward(both), attend, 0))


class MtpNet(DraftNet):
    """A chain of modules over the target's embedding and LM head. Its first arguments are ``DraftNet``'s.

    Args:
        chain: the modules; new ones unless given.

    Attributes:
        chain: the modules. ``forward`` runs the first, on its own states after its first step.

    Raises:
        ConfigError: an embedding of another size than the config's, or no LM head.
    """

    kind = "mtp"
    config: MtpConfig

    def __init__(
        self,
        config: MtpConfig,
        embedding: Tensor | Embedding,
        target_head: Linear | None = None,
        target_ids: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        chain: Sequence[MtpModule] = (),
    ) -> None:
        if tuple(embedding.shape) != (config.vocab_size, config.hidden_size):
            raise ConfigError(
                f"the head is made for an embedding of {(config.vocab_size, config.hidden_size)}, the target's is "
                f"{tuple(embedding.shape)}: a head only fits the target that it was trained for"
            )
        if target_head is None:
            raise ConfigError("an MTP net reads the target's LM head: give it")
        super().__init__(config, embedding, target_head, target_ids, dtype)
        self.chain = nn.ModuleList(chain or [self._new_module() for _ in range(config.num_modules)])

    def _new_module(self) -> MtpModule:
        config, hidden = self.config, self.config.hidden_size
        query, key, wide = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, 2 * hidden
        inner, new = config.intermediate_size, self.new_matrix
        block = DecoderLayer(
            input_norm=self._new_norm(hidden),
            qkv=new(query + 2 * key, hidden, bias=config.qkv_bias),
            out=new(hidden, query, bias=config.o_bias),
            post_norm=self._new_norm(hidden),
            mlp=GatedMLP(
                new(2 * inner, hidden, bias=config.mlp_bias),
                new(hidden, inner, bias=config.mlp_bias),
                config.activation,
            ),
            heads=(config.num_heads, config.num_kv_heads, config.head_dim),
            norms=(self._new_norm(config.head_dim), self._new_norm(config.head_dim)) if config.qk_norm else None,
        )
        norms = [self._new_norm(hidden) for _ in range(3)]
        return MtpModule(norms[0], norms[1], new(hidden, wide), block, norms[2])

    def _new_norm(self, size: int) -> RMSNorm:
        ones = torch.ones(size, dtype=self._new_dtype, device=self.embedding.device, requires_grad=True)
        return RMSNorm(ones, self.config.rms_norm_eps)

    # --- what it computes ------------------------------------------------------------------------------------------

    @property
    def shape(self) -> NetShape:
        """See ``DraftNet``: of one module."""
        config = self.config
        return NetShape(
            1,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            (config.window,),
            config.vocab_size,
            feature_width=config.hidden_size,
            state_width=config.hidden_size,
            out_width=config.hidden_size,
            is_sparse=self.target_ids is not None,
        )

    @property
    def modules_in_order(self) -> list[MtpModule]:
        """The chain as it is run."""
        return [cast(MtpModule, module) for module in self.chain]

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """See ``DraftNet.forward``: one step of the first module."""
        found = self.modules_in_order[0].forward(self.embedding.forward(ids), states, attend)
        return found, found

    # --- parts of it -----------------------------------------------------------------------------------------------

    def part(self, first: int = 0, count: int = 1) -> MtpNet:
        """A net of some of its modules alone, with the very weights of this one, and run as it is."""
        if count == len(self.chain):
            return self
        config, chain = replace(self.config, num_modules=count), self.modules_in_order[first : first + count]
        head, ids, dtype = self._target_head[0], self.target_ids, self._new_dtype
        found = MtpNet(config, self.embedding, head, ids, dtype, chain=chain)
        found.runs = self.runs
        return found
