"""The networks of EAGLE: one decoder layer over the target's features and the embeddings of the tokens after them.

    EAGLE-1 (2401.15077; EAGLE-2, 2406.16858, has the same network): fc(embedding, feature) -> layer -> the next
        feature, read by the target's LM head. The feature is the target's last hidden state.
    EAGLE-3 (2503.01840): three taps fused by fc; the layer attends over (embedding, state), each normed; a norm and
        its own LM head over a draft vocabulary. EAGLE-3.1: every tap is normed, and the normed state is fed back.
    P-EAGLE: EAGLE-3 that drafts a chain in one forward; entries after the first read a mask token and learned features.

Entry i pairs the feature at position i with the token at position i + 1 (the "shifted" token), has position i, and
predicts the token at i + 2. The network's output replaces the feature in the next entry.

Shape suffixes: R rows (any entries of any sequences), H hidden, F features (all taps together), V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.methods.calibration import Calibration
from draftwing.methods.net import LAYER_FIELDS, DraftNet, Place, TargetId, layer_places
from draftwing.models.attention import Attend
from draftwing.models.config import Activation, ModelConfig, RopeConfig
from draftwing.models.layers import DecoderLayer, RMSNorm, columns, concat
from draftwing.models.linear import Embedding, Linear
from draftwing.runtime.forward import NetShape

# The inputs of an entry, named as in the EAGLE paper's ablation.
Inputs = Literal["token", "feature", "feature-unshifted", "feature-shifted"]


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Return EAGLE-3's low, middle and high tap, the default of all engines: inputs of layers 2, L // 2 and L - 3."""
    if num_layers < 3:
        raise ConfigError(
            f"EAGLE-3's usual taps need a target of 3 layers or more, found {num_layers}: give taps (from 0 to "
            f"{num_layers}), or use EAGLE-1, which reads the last hidden state"
        )
    return 2, num_layers // 2, num_layers - 3


@dataclass(frozen=True)
class EagleConfig:
    """The shape of an EAGLE network."""

    version: int  # 1 or 3
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: Activation
    rope: RopeConfig
    max_position_embeddings: int
    # vocab_size, draft_vocab_size: of the target, and of this net's own head
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]  # the target's hidden states that are read, counted as transformers' ``hidden_states``
    inputs: Inputs = "feature-shifted"  # inputs of an entry; all but ``feature-shifted`` are for the ablation
    fc_bias: bool = False  # EAGLE-1's fc has a bias
    norm_before_residual: bool = False  # the layer's residual is the normed state (some engines' variant of EAGLE-3)
    norm_before_fc: bool = False  # one RMSNorm over all taps together before fc
    # fc_norm, norm_output: EAGLE-3.1: an RMSNorm for each tap; the normed state is what is fed back
    fc_norm: bool = False
    norm_output: bool = False
    num_layers: int = 1  # decoder layers; the first is the widened one, the others are plain
    qkv_bias: bool = False  # queries, keys and values of every layer have biases
    qk_norm: bool = False  # queries and keys of every layer are normed per head, as in Qwen3
    target_hidden_size: int | None = None  # width of the target's features in EAGLE-3 if it is not ``hidden_size``
    own_embedding: bool = False  # the network has its own token embedding instead of the target's
    calibration: Calibration = field(default_factory=Calibration)  # converts scores to probabilities at T > 0
    target: TargetId | None = None  # the target it was trained for; None in other projects' heads that do not name it
    # mask_token_id, num_levels: P-EAGLE: the token that stands for an unknown one, and tokens that one forward drafts
    mask_token_id: int | None = None
    num_levels: int = 8

    def __post_init__(self) -> None:
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(f"mask_token_id must be a token below {self.vocab_size}, found {self.mask_token_id}")
        if self.version not in (1, 3):
            raise ConfigError(f"an EAGLE net is of version 1 or 3, found {self.version}")
        if self.inputs not in get_args(Inputs):
            raise ConfigError(f"unknown draft inputs {self.inputs!r}: choose one of {', '.join(get_args(Inputs))}")
        if self.version == 1 and (len(self.taps) != 1 or self.draft_vocab_size != self.vocab_size):
            raise ConfigError("an EAGLE-1 net reads one tap and the target's own LM head: one tap, no draft vocabulary")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(
                f"the draft vocabulary must have 1 to {self.vocab_size} tokens, found {self.draft_vocab_size}"
            )
        if self.num_layers < 1:
            raise ConfigError(f"an EAGLE net needs at least 1 layer, found {self.num_layers}")
        if self.target_hidden_size is not None and self.target_hidden_size < 1:
            raise ConfigError(f"target_hidden_size must be at least 1, found {self.target_hidden_size}")
        if self.feature_size != self.hidden_size and self.version == 1:
            raise ConfigError(
                f"an EAGLE-1 net predicts the target's features and must be as wide as they are ({self.feature_size}), "
                f"found hidden_size {self.hidden_size}"
            )
        if self.feature_size != self.hidden_size and not self.own_embedding:
            raise ConfigError(
                f"a net of width {self.hidden_size} cannot read the embedding of a target of width "
                f"{self.feature_size}: give it its own embedding"
            )

    @classmethod
    def for_target(
        cls, version: int, like: ModelConfig, draft_vocab_size: int | None = None, **changes: Any
    ) -> EagleConfig:
        """Return the usual config for a target of the shape ``like``: one layer of that shape, the default taps.

        ``changes`` are any other fields, such as ``inputs`` or ``fc_norm``.
        """
        shape = {name: getattr(like, name) for name in (*LAYER_FIELDS, "max_position_embeddings")}
        shape["draft_vocab_size"] = (draft_vocab_size if version == 3 else None) or like.vocab_size
        if "taps" not in changes:
            shape["taps"] = (like.num_layers,) if version == 1 else default_taps(like.num_layers)
        return cls(version=version, **{**shape, **changes})

    @property
    def feature_size(self) -> int:
        """Width of each of the target's hidden states."""
        return self.hidden_size if self.target_hidden_size is None else self.target_hidden_size

    @property
    def has_draft_vocab(self) -> bool:
        """True if draft ids differ from target ids."""
        return self.draft_vocab_size < self.vocab_size


# --- the tensors of a head -------------------------------------------------------------------------------------------
#
# Names are EAGLE's, and vLLM's for what EAGLE lacks. The network has fewer parameters, since matrices with the same
# input are merged: a name stands for some rows of a parameter.
#
#     EAGLE-1   layers.{i}.*; the first layer has no input_layernorm
#     EAGLE-3   midlayer.* for the first layer, layers.{i}.* (i from 1) for more, fc_norm and input_norm (EAGLE-3.1)
#     both      *.self_attn.{q,k,v}_proj.bias, *.self_attn.{q,k}_norm.weight, embed_tokens.weight if the network has its
#               own embedding


def tensor_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    return {name: place.shape for name, place in _places(config).items()}


def _places(config: EagleConfig) -> dict[str, Place]:
    is_third, hidden = config.version == 3, config.hidden_size
    taps = config.feature_size * len(config.taps)
    places = {"fc.weight": Place("fc.weight", (hidden, taps if is_third else 2 * hidden))}
    if config.fc_bias:
        places["fc.bias"] = Place("fc.bias", (hidden,))
    for index in range(config.num_layers):
        is_widened = is_third and index == 0
        name = "midlayer" if is_widened else f"layers.{index}"
        width, biased = 2 * hidden if is_widened else hidden, ("qkv",) if config.qkv_bias else ()
        places |= layer_places(config, name, f"layers.{index}", width, biased=biased, qk_norm=config.qk_norm)
        if index:
            places[f"{name}.input_layernorm.weight"] = Place(f"layers.{index}.input_norm.weight", (hidden,))
    if is_third:
        places |= {
            "midlayer.input_layernorm.weight": Place("token_norm.weight", (hidden,)),
            "midlayer.hidden_norm.weight": Place("state_norm.weight", (hidden,)),
            "norm.weight": Place("norm.weight", (hidden,)),
            "lm_head.weight": Place("head.weight", (config.draft_vocab_size, hidden)),
        }
    if config.norm_before_fc:
        places["input_norm.weight"] = Place("input_norm.weight", (taps,))
    if config.fc_norm:
        for index in range(len(config.taps)):
            places[f"fc_norm.{index}.weight"] = Place(f"tap_norms.{index}.weight", (config.feature_size,))
    if config.mask_token_id is not None:
        places["mask_hidden"] = Place("mask_hidden", (taps,))
    if config.own_embedding:
        places["embed_tokens.weight"] = Place("embedding.table", (config.vocab_size, hidden))
    return places


# --- the network -----------------------------------------------------------------------------------------------------


class EagleNet(DraftNet):
    """An EAGLE-1 or EAGLE-3 network; see ``DraftNet``. With its own embedding, it starts from the target's."""

    config: EagleConfig

    def __init__(
        self,
        config: EagleConfig,
        embedding: Tensor | Embedding,
        target_head: Linear | None = None,
        target_ids: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        is_third, hidden = config.version == 3, config.hidden_size
        super().__init__(config, embedding, None if is_third else target_head, target_ids, dtype)
        if not is_third and target_head is None:
            raise ConfigError("an EAGLE-1 net needs the target's LM head")
        num_ids = config.vocab_size if target_ids is None else len(target_ids)
        if num_ids != config.draft_vocab_size or config.has_draft_vocab != (target_ids is not None):
            raise ConfigError(
                f"the draft vocabulary has {config.draft_vocab_size} of {config.vocab_size} tokens, and target_ids "
                f"{None if target_ids is None else tuple(target_ids.shape)}: give one id for each, or None for all"
            )
        if config.own_embedding:
            table = embedding.plain() if isinstance(embedding, Embedding) else embedding
            self.embedding = Embedding(nn.Parameter(table.detach().to(dtype).clone()))
        taps_width = config.feature_size * len(config.taps)
        self.fc = self.new_matrix(hidden, taps_width if is_third else 2 * hidden, bias=config.fc_bias)
        # The first layer of EAGLE-3 reads (embedding, state), which have norms below; that of EAGLE-1 has no norm.
        traits: dict[str, Any] = {"qkv_bias": config.qkv_bias, "qk_norm": config.qk_norm}
        first = self.new_decoder_layer(width=2 * hidden if is_third else hidden, input_norm=False, **traits)
        others = (self.new_decoder_layer(**traits) for _ in range(config.num_layers - 1))
        self.layers = nn.ModuleList([first, *others])
        self.token_norm = self.new_norm(hidden) if is_third else None
        self.state_norm = self.new_norm(hidden) if is_third else None
        self.input_norm = self.new_norm(taps_width) if config.norm_before_fc else None
        self.tap_norms = (
            nn.ModuleList([self.new_norm(config.feature_size) for _ in config.taps]) if config.fc_norm else None
        )
        self.norm = self.new_norm(hidden) if is_third else None
        if is_third and config.inputs == "token":  # these get no gradient, for which DistributedDataParallel waits
            for unread in (self.fc, self.tap_norms, self.input_norm):
                if unread is not None:
                    unread.requires_grad_(False)
        self.head = self.new_matrix(config.draft_vocab_size, hidden) if is_third else None
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(taps_width, dtype=dtype, device=self.embedding.device))

    @property
    def num_levels(self) -> int | None:
        """Number of tokens that one forward drafts (P-EAGLE); None if they are drafted one by one."""
        return None if self.config.mask_token_id is None else self.config.num_levels

    # --- the forward pass ------------------------------------------------------------------------------------------

    def mask_entry(self) -> tuple[int, Tensor] | None:
        token = self.config.mask_token_id
        return None if token is None else (token, self.fuse(self.mask_hidden[None]))

    def fuse(self, features: Any) -> Any:
        """Map the target's features (R, F) to states (R, H) by EAGLE-3's fc; EAGLE-1 reads them unchanged."""
        return features if self.config.version == 1 else self.fc.forward(self.fc_input(features))

    def fc_input(self, features: Any) -> Any:
        """Return the input (R, F) of EAGLE-3's fc: the features, normed if the config says so."""
        if self.tap_norms is not None:
            taps = columns(features, self.config.feature_size)
            norms = [cast(RMSNorm, norm) for norm in self.tap_norms]
            features = concat([norm.forward(tap) for norm, tap in zip(norms, taps, strict=True)])
        return features if self.input_norm is None else self.input_norm.forward(features)

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """Run one draft step; ``config.inputs`` decides what entries read."""
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
    def kind(self) -> str:  # type: ignore[override]  # one class, three methods
        return f"eagle{self.config.version}" if self.config.mask_token_id is None else "peagle"

    @property
    def layer(self) -> DecoderLayer:
        """The first layer, which reads tokens and states."""
        return cast(DecoderLayer, self.layers[0])

    @property
    def shape(self) -> NetShape:
        config = self.config
        return replace(
            self.attention_shape([None] * config.num_layers),
            feature_width=config.feature_size * len(config.taps),
            is_shifted=config.inputs != "feature-unshifted",
        )

    @property
    def is_traceable(self) -> bool:
        """False for the ablation's networks that read half of an entry."""
        return self.config.inputs.startswith("feature-")

    def named_tensors(self) -> dict[str, Tensor]:
        return {
            name: attrgetter(place.path)(self).data[place.start : place.start + place.shape[0]]
            for name, place in _places(self.config).items()
        }
