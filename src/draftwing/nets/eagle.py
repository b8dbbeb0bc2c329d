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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.errors import CheckpointError
from draftwing.model.layers import Attend, DecoderLayer, GatedMLP, RMSNorm
from draftwing.model.linear import Linear
from draftwing.nets.eagle_config import EagleConfig, check_parts
from draftwing.run.graphs import Record
from draftwing.run.kernel.build import Kernel
from draftwing.run.kernel.fused import kernel_for
from draftwing.run.kernel.program import Heads

__all__ = ["EagleNet"]


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
        check_parts(config, embedding, target_head, target_ids)
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
