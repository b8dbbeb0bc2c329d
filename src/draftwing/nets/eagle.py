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
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.errors import CheckpointError, ConfigError
from draftwing.model.config import Activation, ModelConfig
from draftwing.model.layers import Attend, DecoderLayer, GatedMLP, RMSNorm
from draftwing.model.linear import Linear
from draftwing.model.rope import RopeConfig
from draftwing.nets.calibration import Calibration
from draftwing.run.graphs import Record
from draftwing.run.kernel.fused import kernel_for
from draftwing.run.kernel.library import Kernel
from draftwing.run.kernel.program import Heads

__all__ = ["EagleConfig", "EagleNet", "Inputs", "TargetId", "default_taps"]

# What an entry reads, in the terms of the EAGLE paper's ablation.
Inputs = Literal["token", "feature", "feature-unshifted", "feature-shifted"]


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's low, middle and high tap: the inputs of layers 2, L // 2 and L - 3, as every engine defaults to."""
    return 2, num_layers // 2, num_layers - 3


@dataclass(frozen=True)
class TargetId:
    """Which target a head was trained for: its name, and what can be checked of it."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    vocab_hash: str = ""


@dataclass(frozen=True)
class EagleConfig:
    """An EAGLE net's shape.

    Attributes:
        version: 1 or 3.
        taps: the target's hidden states that are read, counted as transformers' ``hidden_states``.
        vocab_size, draft_vocab_size: of the target, and of this net's own head.
        inputs: what an entry reads; everything but ``feature-shifted`` is for the ablation.
        fc_bias: EAGLE-1's fc has a bias.
        norm_before_residual: the layer's residual is the normed state (some engines' variant of EAGLE-3).
        norm_before_fc: one RMSNorm over all taps together before fc.
        fc_norm, norm_output: EAGLE-3.1: an RMSNorm for each tap; the normed state is what is fed back.
        calibration: how its scores become chances at T > 0.
        target: which target it was trained for; None in foreign heads that do not say.

    Raises:
        ConfigError: values that do not go together.
    """

    version: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: Activation
    rope: RopeConfig
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    inputs: Inputs = "feature-shifted"
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    calibration: Calibration = field(default_factory=Calibration)
    target: TargetId | None = None

    def __post_init__(self) -> None:
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

    @classmethod
    def for_target(
        cls, version: int, like: ModelConfig, draft_vocab_size: int | None = None, **changes: Any
    ) -> EagleConfig:
        """The usual net for a target: one layer of the target's own shape, the default taps.

        Args:
            like: the target's shape.
            changes: any other field, such as ``inputs`` or ``fc_norm``.

        Raises:
            ConfigError: EAGLE-3's taps for a target of fewer than 3 layers, which has no such layers.
        """
        if version == 3 and "taps" not in changes and like.num_layers < 3:
            raise ConfigError(
                f"EAGLE-3's usual taps need a target of 3 layers or more, found {like.num_layers}: give taps"
            )
        shape: dict[str, Any] = {
            "version": version,
            "hidden_size": like.hidden_size,
            "intermediate_size": like.intermediate_size,
            "num_heads": like.num_heads,
            "num_kv_heads": like.num_kv_heads,
            "head_dim": like.head_dim,
            "rms_norm_eps": like.rms_norm_eps,
            "activation": like.activation,
            "rope": like.rope,
            "max_position_embeddings": like.max_position_embeddings,
            "vocab_size": like.vocab_size,
            "draft_vocab_size": (draft_vocab_size if version == 3 else None) or like.vocab_size,
            "taps": (like.num_layers,) if version == 1 else default_taps(like.num_layers),
            **changes,
        }
        return cls(**shape)

    @property
    def has_draft_vocab(self) -> bool:
        """Whether draft ids differ from target ids."""
        return self.draft_vocab_size < self.vocab_size


class EagleNet(nn.Module):
    """An EAGLE net with everything that one draft step needs.

    Args:
        config: its shape.
        embedding: (V, H) the target's, frozen and never saved with the head.
        target_head: the target's LM head, frozen; EAGLE-1 reads it, EAGLE-3 does not.
        target_ids: (V_draft,) ascending target ids of the draft vocabulary; None for the whole vocabulary.
        dtype: of its weights.

    Raises:
        ConfigError: embedding, head or ids that do not fit ``config``.
    """

    embedding: Tensor
    target_ids: Tensor | None

    def __init__(
        self,
        config: EagleConfig,
        embedding: Tensor,
        target_head: Linear | None = None,
        target_ids: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config = config
        _check_parts(config, embedding, target_head, target_ids)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("target_ids", target_ids, persistent=False)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        device = embedding.device

        def matrix(num_out: int, num_in: int, *, bias: bool = False) -> Linear:
            weight = torch.empty(num_out, num_in, dtype=dtype, device=device).normal_(0, num_in**-0.5)
            weight.requires_grad_()
            zeros = torch.zeros(num_out, dtype=dtype, device=device, requires_grad=True) if bias else None
            return Linear(weight, zeros)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(torch.ones(size, dtype=dtype, device=device, requires_grad=True), eps)

        is_third = config.version == 3
        taps_width = hidden * len(config.taps)
        self.fc = matrix(hidden, taps_width if is_third else 2 * hidden, bias=config.fc_bias)
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.layer = DecoderLayer(
            input_norm=None,
            qkv=matrix(query + 2 * key, 2 * hidden if is_third else hidden),
            out=matrix(hidden, query),
            post_norm=norm(hidden),
            mlp=GatedMLP(
                matrix(2 * config.intermediate_size, hidden),
                matrix(hidden, config.intermediate_size),
                config.activation,
            ),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        self.token_norm = norm(hidden) if is_third else None
        self.state_norm = norm(hidden) if is_third else None
        self.input_norm = norm(taps_width) if config.norm_before_fc else None
        self.tap_norms = nn.ModuleList([norm(hidden) for _ in config.taps]) if config.fc_norm else None
        self.norm = norm(hidden) if is_third else None
        if is_third and config.inputs == "token":  # what reads the features gets no gradient, which a
            for unread in (self.fc, self.tap_norms, self.input_norm):  # data-parallel wrapper would wait for
                if unread is not None:
                    unread.requires_grad_(False)
        # EAGLE-1's head is the target's: kept in a list, so that it is no parameter of this module.
        self._target_head = [target_head] if target_head is not None and not is_third else []
        self.head = matrix(config.draft_vocab_size, hidden) if is_third else None
        self.kernel: Kernel | None = None  # where ``prepack`` has laid the matrices out for it
        self.runs: tuple[Record, Any] | None = None  # its slots and drafts recorded over them, lent to drafters

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features (R, F) as the states (R, H) of entries: EAGLE-3's fc, for EAGLE-1 nothing."""
        return features if self.config.version == 1 else self.fc.forward(self.fc_input(features))

    def fc_input(self, features: Tensor) -> Tensor:
        """(R, F) -> (R, F) as EAGLE-3's fc reads them: normed where the config says so."""
        if self.tap_norms is not None:
            taps = torch.split(features, self.config.hidden_size, -1)
            features = torch.cat([norm(tap) for norm, tap in zip(self.tap_norms, taps, strict=True)], -1)
        return features if self.input_norm is None else self.input_norm.forward(features)

    def forward(self, token_ids: Tensor, states: Tensor, cis: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """One draft step of any number of entries.

        Args:
            token_ids: (R,) the token of each entry (which one: ``config.inputs``).
            states: (R, H) from ``fuse``, or what an earlier step fed back.
            cis: (R, 1, D / 2) rotation of the entries' positions.
            attend: mixes each entry with those that it sees.

        Returns:
            (R, H) the states to feed back, and (R, H) what ``logits`` reads.
        """
        config = self.config
        tokens = F.embedding(token_ids, self.embedding)
        if config.inputs == "token":
            states = torch.zeros_like(states)
        elif config.inputs == "feature":
            tokens = torch.zeros_like(tokens)
        if self.token_norm is None or self.state_norm is None or self.norm is None:
            x = self.fc.forward(torch.cat([tokens, states], -1))
            out = self.layer.forward(x, cis, attend, 0)
            return out, out
        normed = self.state_norm.forward(states)
        both = torch.cat([self.token_norm.forward(tokens), normed], -1)
        out = self.layer.mix(both, normed if config.norm_before_residual else states, cis, attend, 0)
        read = self.norm.forward(out)
        return (read if config.norm_output else out), read

    def logits(self, read: Tensor) -> Tensor:
        """(R, H) -> (R, V_draft) in the draft vocabulary; ``to_target`` puts them among the target's tokens."""
        head = self.read_head
        return head.forward(read.to(head.dtype))

    @property
    def read_head(self) -> Linear:
        """The LM head that ``logits`` uses: its own or, in EAGLE-1, the target's."""
        return self._target_head[0] if self.head is None else self.head

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights and states, which may be wider than the target's."""
        return self.layer.post_norm.weight.dtype

    @property
    def head_weight(self) -> Tensor:
        """(V_draft, H) of the head that ``logits`` uses."""
        return self.read_head.weight

    def to_target(self, logits: Tensor) -> Tensor:
        """(..., V_draft) -> (..., V): tokens outside the draft vocabulary get -inf."""
        if self.target_ids is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], self.config.vocab_size), float("-inf"))
        return wide.index_copy_(-1, self.target_ids, logits)

    def prepack(self, weights: str | None = None, *, fast: bool = False) -> EagleNet:
        """Lay the matrices out for decoding, quantised where ``weights`` says so (see ``Linear``).

        ``fast`` takes 8 bits too where the CPU kernel makes drafting faster by them: it changes what is guessed a
        little, and the target's text not at all.

        The net cannot be trained or saved after it.
        """
        self.requires_grad_(False)
        layer, mlp = self.layer, self.layer.mlp
        assert isinstance(mlp, GatedMLP)
        heads = Heads(layer.num_heads, layer.num_kv_heads, layer.head_dim)
        if self.config.inputs.startswith("feature-"):
            self.kernel = kernel_for(self.dtype, self.embedding.device, heads, mlp.activation_name)
        if fast and self.kernel is not None and self.kernel.has_int8:
            weights = "int8"
        if self.kernel is not None and self._target_head:
            head = self._target_head[0].for_drafts(weights)
            if head is None:  # it was laid out for PyTorch: then this net runs there too
                self.kernel, weights = None, self._target_head[0].quantised
            else:
                self._target_head = [head]
        for module in self.modules():
            if not isinstance(module, Linear):
                continue
            if self.kernel is not None:
                module.fuse(weights, gated=module is mlp.gate_up)
            elif weights is None:
                module.prepack()
            else:
                module.quantise(weights)
        return self

    # --- the tensors of a head, by the names that the field gives them ---------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the head's tensors under EAGLE's own key names."""
        return {name: view.clone() for name, view in self._views().items()}

    def load_tensors(self, tensors: Mapping[str, Tensor], where: str = "the head") -> EagleNet:
        """Take tensors named as in ``tensors``; all of them, and no others.

        Raises:
            CheckpointError: a key is missing, unknown, or has another shape.
        """
        views = self._views()
        missing, unknown = sorted(views.keys() - tensors.keys()), sorted(tensors.keys() - views.keys())
        if missing or unknown:
            what = f"lacks {missing[0]!r}" if missing else f"has a tensor {unknown[0]!r} that no such net has"
            raise CheckpointError(
                f"{where} {what} (missing {len(missing)}, unknown {len(unknown)}): its config.json and its weights do "
                f"not belong together; `draftwing doctor` names what differs"
            )
        for name, view in views.items():
            if tensors[name].shape != view.shape:
                raise CheckpointError(
                    f"{where}: {name} has shape {tuple(tensors[name].shape)}, expected {tuple(view.shape)}: was it "
                    f"trained for another target?"
                )
            view.copy_(tensors[name])
        return self

    def _views(self) -> dict[str, Tensor]:
        """Every tensor of the head by EAGLE's name: views, since fused matrices hold several."""
        config, layer, mlp = self.config, self.layer, self.layer.mlp
        assert isinstance(mlp, GatedMLP)
        base = "midlayer" if config.version == 3 else "layers.0"
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q, k, v = torch.split(layer.qkv.weight.data, [query, key, key])
        gate, up = mlp.gate_up.weight.data.chunk(2)
        named: dict[str, Tensor | nn.Module | None] = {
            "fc.weight": self.fc.weight,
            "fc.bias": self.fc.bias,
            f"{base}.self_attn.q_proj.weight": q,
            f"{base}.self_attn.k_proj.weight": k,
            f"{base}.self_attn.v_proj.weight": v,
            f"{base}.self_attn.o_proj.weight": layer.out.weight,
            f"{base}.mlp.gate_proj.weight": gate,
            f"{base}.mlp.up_proj.weight": up,
            f"{base}.mlp.down_proj.weight": mlp.down.weight,
            f"{base}.post_attention_layernorm.weight": layer.post_norm,
            "midlayer.input_layernorm.weight": self.token_norm,
            "midlayer.hidden_norm.weight": self.state_norm,
            "norm.weight": self.norm,
            "input_norm.weight": self.input_norm,
            **{f"fc_norm.{index}.weight": norm for index, norm in enumerate(self.tap_norms or ())},
            "lm_head.weight": self.head,
        }
        return {
            name: (part if isinstance(part, Tensor) else part.get_parameter("weight")).data
            for name, part in named.items()
            if part is not None
        }


def _check_parts(config: EagleConfig, embedding: Tensor, target_head: Linear | None, target_ids: Tensor | None) -> None:
    wanted = (config.vocab_size, config.hidden_size)
    if tuple(embedding.shape) != wanted:
        raise ConfigError(
            f"the head is made for an embedding of {wanted}, the target's is {tuple(embedding.shape)}: a head only "
            f"fits the target that it was trained for"
        )
    if config.version == 1 and target_head is None:
        raise ConfigError("an EAGLE-1 net needs the target's LM head")
    if config.has_draft_vocab != (target_ids is not None) or (
        target_ids is not None and target_ids.shape != (config.draft_vocab_size,)
    ):
        raise ConfigError(
            f"the draft vocabulary has {config.draft_vocab_size} of {config.vocab_size} tokens, and target_ids "
            f"{None if target_ids is None else tuple(target_ids.shape)}: give one id for each, or None for all"
        )
