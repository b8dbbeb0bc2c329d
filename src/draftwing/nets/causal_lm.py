"""A draft model in training: the lean decoder's own layers, with weights that have gradients.

It reads tokens alone, and is what ``train causal-lm`` distils from its target (DistillSpec 2310.08461). The forward is
that of ``model.lean``; a file of its weights is a Hugging Face folder's.

Shape suffixes: R rows (any entries of any sequences), H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from draftwing.errors import ConfigError, UnsupportedError
from draftwing.model.attention import Attend
from draftwing.model.config import ModelConfig
from draftwing.model.embedding import Embedding
from draftwing.model.families import Reader, read_layer
from draftwing.model.layers import DecoderLayer, GatedMLP, RMSNorm
from draftwing.model.lean import LeanTarget, TappedNet
from draftwing.model.linear import Layout, Linear
from draftwing.model.rope import Rotary
from draftwing.model.rope_config import RopeConfig
from draftwing.model.stored import Stored
from draftwing.model.weights import Weights
from draftwing.nets.base import DraftNet
from draftwing.nets.calibration import Calibration
from draftwing.nets.eagle_config import TargetId
from draftwing.run.eager import TorchRuntime
from draftwing.run.forward import NetShape

__all__ = ["CausalLMConfig", "CausalLMNet", "new_config"]

SPREAD = 0.02  # of a new model's weights
HEAD_DIM = 64  # of a new model, unless said otherwise


@dataclass(frozen=True)
class CausalLMConfig:
    """What a draft model is: a ``nets.base.NetConfig``.

    Attributes:
        shape: as the lean decoder reads it.
        source: the same as its ``config.json`` says it.
        target: which target it was trained for.
    """

    shape: ModelConfig
    source: Mapping[str, Any]
    calibration: Calibration = field(default_factory=Calibration)
    target: TargetId | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        """It reads none of the target's hidden states."""
        return ()

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.shape.vocab_size

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.shape.hidden_size

    @property
    def rope(self) -> RopeConfig:
        """The rotation of its positions."""
        return self.shape.rope


def new_config(
    like: ModelConfig, num_layers: int | None = None, hidden_size: int | None = None, num_heads: int | None = None
) -> dict[str, Any]:
    """The ``config.json`` of a new Llama that drafts for a target of the shape ``like``.

    Args:
        num_layers: None takes a quarter of the target's.
        hidden_size: None takes half of its width, in whole heads.
        num_heads: None takes heads of 64.

    Raises:
        ConfigError: heads that do not share the width evenly.
    """
    hidden = hidden_size or max(HEAD_DIM, like.hidden_size // 2 // HEAD_DIM * HEAD_DIM)
    count = num_heads or max(1, hidden // HEAD_DIM)
    if hidden % count or hidden // count % 2:
        raise ConfigError(
            f"training: {count} heads cannot share a hidden size of {hidden}: heads of an even width are needed, give "
            f"--num-heads {max(1, hidden // HEAD_DIM)} with --hidden-size {max(1, hidden // HEAD_DIM) * HEAD_DIM}, say"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": like.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": -(-8 * hidden // 3 // 64) * 64,
        "num_hidden_layers": num_layers or max(1, like.num_layers // 4),
        "num_attention_heads": count,
        "num_key_value_heads": count,
        "head_dim": hidden // count,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": like.context_length,
        "tie_word_embeddings": True,
        "bos_token_id": like.bos_id,
        "eos_token_id": list(like.eos_ids) or None,
        "pad_token_id": like.pad_id,
        "torch_dtype": "float32",
    }


class CausalLMNet(DraftNet):
    """A lean decoder to be trained; all of it, embedding and LM head included.

    Args:
        config: what it is.
        lean: its parts, plain (not prepacked), which become its own.
        files: its tokenizer's, which belong into every folder that it is written to.

    Raises:
        UnsupportedError: a mixture of experts.
    """

    kind = "causal-lm"

    def __init__(self, config: CausalLMConfig, lean: TappedNet, files: Sequence[Path] = ()) -> None:
        if config.shape.moe is not None:
            raise UnsupportedError(
                "a mixture of experts is not trained as a draft model: start from a dense model, or from nothing"
            )
        # Clones: what was read may be the mapped file itself.
        table = nn.Parameter(lean.embedding.plain().detach().clone())
        super().__init__(config, Embedding(table), dtype=table.dtype)
        self.layers, self.norm, self.head = nn.ModuleList(lean.layers), lean.norm, lean.head
        for parameter in [*self.layers.parameters(), *self.norm.parameters(), *self.head.parameters()]:
            parameter.data = parameter.data.clone()
            parameter.requires_grad_(True)
        if config.shape.tie_word_embeddings:
            self.head.weight = self.embedding.table  # type: ignore[assignment]  # a Parameter, see above
        layers = cast(Sequence[DecoderLayer], self.layers)
        self._lean = replace(lean, embedding=self.embedding, layers=layers, head=self.head, taps=())
        self.files = tuple(files)

    @classmethod
    def of_folder(
        cls, folder: Path, source: Mapping[str, Any], device: torch.device, *, dtype: torch.dtype, **known: Any
    ) -> CausalLMNet:
        """The model in a folder, whose ``config.json`` is ``source``; ``known``: ``target``, and ``files``."""
        model = LeanTarget.from_folder(folder, dtype, device, prepack=False)
        files = known.pop("files", ())
        return cls(CausalLMConfig(model.config, source, **known), model.net, files)

    @classmethod
    def new(
        cls, source: Mapping[str, Any], device: torch.device, *, target: TargetId, files: Sequence[Path] = ()
    ) -> CausalLMNet:
        """One of small random numbers, of the shape that the ``config.json`` ``source`` says."""
        shape = ModelConfig.from_hf(dict(source), "the new draft model")
        reader = Reader(_Random(), torch.float32, device, Layout())
        layers = [read_layer(reader, shape, index) for index in range(shape.num_layers)]
        norm = RMSNorm(reader.tensor("model.norm.weight", shape.hidden_size), shape.rms_norm_eps)
        size = shape.vocab_size, shape.hidden_size
        table = reader.tensor("model.embed_tokens.weight", *size)
        head = Linear(table if shape.tie_word_embeddings else reader.tensor("lm_head.weight", *size))
        rotary = Rotary(shape.rope, torch.float32, device)
        lean = TappedNet(shape, Embedding(table), layers, norm, head, rotary)
        return cls(CausalLMConfig(shape, source, target=target), lean, files)

    @property
    def shape(self) -> NetShape:
        """See ``run.forward.Net``."""
        return self._lean.shape

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """(R,) -> (R, H) what ``logits`` reads, and nothing to feed back."""
        return self._lean.forward(ids, states, attend)

    def as_target(self) -> LeanTarget:
        """The same weights as a model that decodes by itself: what the next update changes, it then has."""
        return LeanTarget(self._lean, TorchRuntime(), "draft model in training")

    def tensors(self) -> dict[str, Tensor]:
        """Copies of its tensors, under the names of its family's Hugging Face folders."""
        shape = self.config.shape
        found = {"model.embed_tokens.weight": self.embedding.plain(), "model.norm.weight": self.norm.weight}
        if not shape.tie_word_embeddings:
            found["lm_head.weight"] = self.head_weight
        for index, layer in enumerate(self.layers):
            found.update(_layer_tensors(shape, cast(DecoderLayer, layer), f"model.layers.{index}."))
        return {name: tensor.detach().clone() for name, tensor in found.items()}


def _layer_tensors(shape: ModelConfig, layer: DecoderLayer, base: str) -> Iterator[tuple[str, Tensor]]:
    """What ``model.families.read_layer`` reads, under the same names."""
    mlp, wide = cast(GatedMLP, layer.mlp), shape.intermediate_size
    if layer.input_norm is not None:
        yield f"{base}input_layernorm.weight", layer.input_norm.weight
    yield f"{base}post_attention_layernorm.weight", layer.post_norm.weight
    for name, norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm)):
        if norm is not None:
            yield f"{base}self_attn.{name}.weight", norm.weight
    sizes = [shape.num_heads * shape.head_dim, *[shape.num_kv_heads * shape.head_dim] * 2]
    parts: list[tuple[Linear, dict[str, int]]] = [
        (layer.out, {"self_attn.o_proj": shape.hidden_size}),
        (mlp.down, {"mlp.down_proj": shape.hidden_size}),
    ]
    if shape.model_type == "phi3":
        parts += [(layer.qkv, {"self_attn.qkv_proj": sum(sizes)}), (mlp.gate_up, {"mlp.gate_up_proj": 2 * wide})]
    else:
        names = [f"self_attn.{each}_proj" for each in "qkv"]
        parts.append((layer.qkv, dict(zip(names, sizes, strict=True))))
        parts.append((mlp.gate_up, {"mlp.gate_proj": wide, "mlp.up_proj": wide}))
    for matrix, outs in parts:
        for kind, whole in (("weight", matrix.weight), ("bias", matrix.bias)):
            if whole is not None:
                split = torch.split(whole, list(outs.values()))
                yield from ((f"{base}{name}.{kind}", part) for name, part in zip(outs, split, strict=True))


class _Random(Weights):
    """Has every tensor that is asked for: norms of ones, biases of zeros, and small random numbers."""

    folder = Path("a new model")

    def __contains__(self, name: str) -> bool:
        return True

    def close(self) -> None:
        """Nothing is open."""

    def keys(self) -> list[str]:
        """None that anybody has to use."""
        return []

    def shape(self, name: str) -> tuple[int, ...]:
        """Whatever is asked for; never read."""
        return ()

    def get(self, name: str, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """See ``Weights``; drawn on the CPU, so that a seed gives one model on every device."""
        size = shape or ()
        if name.endswith("norm.weight"):
            return torch.ones(size, dtype=dtype)
        if name.endswith("bias"):
            return torch.zeros(size, dtype=dtype)
        return torch.empty(size, dtype=dtype).normal_(0, SPREAD)

    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> Stored:
        """See ``Weights``."""
        found = self.get(name, torch.float32, shape)
        return Stored("float32", found.shape[-1], found)

    def drop(self, stored: Stored) -> None:
        """Nothing is mapped."""
