"""The EAGLE nets: one decoder layer over the target's features and the embeddings of the tokens after them.

    EAGLE-1 (2401.15077; EAGLE-2, 2406.16858, is the same net): fc(embedding, feature) -> layer -> the next feature,
        read by the target's own LM head. The feature is the target's last hidden state.
    EAGLE-3 (2503.01840): three taps fused by fc; the layer attends over (embedding, state), each normed; a norm and
        an LM head of its own over a draft vocabulary. EAGLE-3.1: every tap normed, and the normed state fed back.

Entry i pairs the feature at position i with the token at position i + 1 (the "shifted" token), stands at position i,
and guesses the token at i + 2. What the net gives out takes the feature's place in the next entry.

Shape suffixes: R rows (any entries of any sequences), H hidden, F features (all taps together), V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from draftwing.model.attention import Attend
from draftwing.model.embedding import Embedding
from draftwing.model.layers import DecoderLayer, GatedMLP, RMSNorm, columns, concat
from draftwing.model.linear import Linear
from draftwing.nets.base import DraftNet
from draftwing.nets.eagle_config import EagleConfig, check_parts
from draftwing.nets.eagle_tensors import copy_tensors, fill_tensors
from draftwing.run.forward import NetShape

__all__ = ["EagleNet"]


@dataclass(frozen=True)
class _Maker:
    """Makes the parts of a new net: small random matrices, norms of one."""

    dtype: torch.dtype
    device: torch.device
    eps: float

    def matrix(self, num_out: int, num_in: int, *, bias: bool = False) -> Linear:
        weight = torch.empty(num_out, num_in, dtype=self.dtype, device=self.device).normal_(0, num_in**-0.5)
        zeros = torch.zeros(num_out, dtype=self.dtype, device=self.device, requires_grad=True) if bias else None
        return Linear(weight.requires_grad_(), zeros)

    def norm(self, size: int) -> RMSNorm:
        return RMSNorm(torch.ones(size, dtype=self.dtype, device=self.device, requires_grad=True), self.eps)

    def layer(self, config: EagleConfig, index: int) -> DecoderLayer:
        hidden, wide, is_widened = config.hidden_size, config.intermediate_size, config.version == 3 and index == 0
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return DecoderLayer(
            input_norm=None if index == 0 else self.norm(hidden),
            qkv=self.matrix(query + 2 * key, 2 * hidden if is_widened else hidden, bias=config.qkv_bias),
            out=self.matrix(hidden, query),
            post_norm=self.norm(hidden),
            mlp=GatedMLP(self.matrix(2 * wide, hidden), self.matrix(hidden, wide), config.activation),
            heads=(config.num_heads, config.num_kv_heads, config.head_dim),
        )


class EagleNet(DraftNet):
    """An EAGLE net with everything that one draft step needs.

    Args:
        config: its shape.
        embedding: (V, H) the target's, frozen and never saved with the head; for a net with an embedding of its own
            where that begins.
        target_head: the target's LM head, frozen; EAGLE-1 reads it, EAGLE-3 does not.
        target_ids: (V_draft,) ascending target ids of the draft vocabulary; None for the whole vocabulary.
        dtype: of its weights.

    Raises:
        ConfigError: embedding, head or ids that do not fit ``config``.
    """

    config: EagleConfig

    def __init__(
        self,
        config: EagleConfig,
        embedding: Tensor | Embedding,
        target_head: Linear | None = None,
        target_ids: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_parts(config, embedding, target_head, target_ids)
        super().__init__(config, embedding, None if config.version == 3 else target_head, target_ids, dtype)
        if config.own_embedding:
            table = embedding.plain() if isinstance(embedding, Embedding) else embedding
            self.embedding = Embedding(nn.Parameter(table.detach().to(dtype).clone()))
        hidden, make = config.hidden_size, _Maker(dtype, embedding.device, config.rms_norm_eps)
        is_third = config.version == 3
        taps_width = config.feature_size * len(config.taps)
        self.fc = make.matrix(hidden, taps_width if is_third else 2 * hidden, bias=config.fc_bias)
        self.layers = nn.ModuleList([make.layer(config, index) for index in range(config.num_layers)])
        self.token_norm = make.norm(hidden) if is_third else None
        self.state_norm = make.norm(hidden) if is_third else None
        self.input_norm = make.norm(taps_width) if config.norm_before_fc else None
        self.tap_norms = (
            nn.ModuleList([make.norm(config.feature_size) for _ in config.taps]) if config.fc_norm else None
        )
        self.norm = make.norm(hidden) if is_third else None
        if is_third and config.inputs == "token":  # what reads the features gets no gradient, which a
            for unread in (self.fc, self.tap_norms, self.input_norm):  # data-parallel wrapper would wait for
                if unread is not None:
                    unread.requires_grad_(False)
        self.head = make.matrix(config.draft_vocab_size, hidden) if is_third else None

    # --- what it computes ------------------------------------------------------------------------------------------

    def fuse(self, features: Any) -> Any:
        """The target's features (R, F) as the states (R, H) of entries: EAGLE-3's fc, for EAGLE-1 nothing."""
        return features if self.config.version == 1 else self.fc.forward(self.fc_input(features))

    def fc_input(self, features: Any) -> Any:
        """(R, F) -> (R, F) as EAGLE-3's fc reads them: normed where the config says so."""
        if self.tap_norms is not None:
            taps = columns(features, self.config.feature_size)
            norms = [cast(RMSNorm, norm) for norm in self.tap_norms]
            features = concat([norm.forward(tap) for norm, tap in zip(norms, taps, strict=True)])
        return features if self.input_norm is None else self.input_norm.forward(features)

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """One draft step of any number of entries.

        Args:
            ids: (R,) the token of each entry (which one: ``config.inputs``).
            states: (R, H) from ``fuse``, or what an earlier step fed back.
            attend: mixes each entry with those that it sees.

        Returns:
            (R, H) what ``logits`` reads, and (R, H) the states to feed back.
        """
        config = self.config
        tokens = self.embedding.forward(ids)
        if config.inputs == "token":
            states = torch.zeros_like(states)
        elif config.inputs == "feature":
            tokens = torch.zeros_like(tokens)
        first, *others = (cast(DecoderLayer, layer) for layer in self.layers)
        if self.token_norm is None or self.state_norm is None or self.norm is None:
            x = first.forward(self.fc.forward(concat([tokens, states])), attend, 0)
        else:
            normed = self.state_norm.forward(states)
            both = concat([self.token_norm.forward(tokens), normed])
            x = first.mix(both, normed if config.norm_before_residual else states, attend, 0)
        for index, layer in enumerate(others, 1):
            x = layer.forward(x, attend, index)
        if self.norm is None:
            return x, x
        read = self.norm.forward(x)
        return read, read if config.norm_output else x

    @property
    def kind(self) -> str:  # type: ignore[override]  # of one class there are two kinds
        """See ``DraftNet``."""
        return f"eagle{self.config.version}"

    @property
    def layer(self) -> DecoderLayer:
        """The first layer, which reads tokens and states."""
        return cast(DecoderLayer, self.layers[0])

    @property
    def shape(self) -> NetShape:
        """See ``Net``."""
        config = self.config
        return NetShape(
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            [None] * config.num_layers,
            config.vocab_size,
            feature_width=config.feature_size * len(config.taps),
            state_width=config.hidden_size,
            out_width=config.hidden_size,
            is_shifted=config.inputs != "feature-unshifted",
            is_sparse=self.target_ids is not None,
        )

    @property
    def is_traceable(self) -> bool:
        """See ``DraftNet``: not the ablation's nets that read half of an entry."""
        return self.config.inputs.startswith("feature-")

    # --- the tensors of a head, by the names that the field gives them ---------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the head's tensors under EAGLE's own key names."""
        return copy_tensors(self, self.config)

    def load_tensors(self, tensors: Mapping[str, Tensor], where: str = "the head") -> EagleNet:
        """Take tensors named as in ``tensors``; all of them, and no others.

        Raises:
            CheckpointError: a key is missing, unknown, or has another shape.
        """
        fill_tensors(self, self.config, tensors, where)
        return self
