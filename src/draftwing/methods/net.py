"""The base class of draft networks: modules that are trained in PyTorch and run by any runtime.

PyTorch runs ``forward`` directly, the CPU kernel runs the program recorded when it is traced, and a GPU replays its
graph.

Shape suffixes: B rows, T tokens, R entries (of any sequences), H hidden, F features (all taps together), V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from draftwing.errors import CheckpointError, ConfigError
from draftwing.methods.calibration import Calibration
from draftwing.models.attention import Attend
from draftwing.models.config import ModelConfig, RopeConfig
from draftwing.models.families import FAMILIES
from draftwing.models.layers import DecoderLayer, Experts, GatedMLP, RMSNorm, SharedExpert
from draftwing.models.linear import Embedding, Layout, Linear, has_exact_int8
from draftwing.models.rope import Rotary
from draftwing.runtime.choose import runtime_for
from draftwing.runtime.forward import NetShape, Runtime, TorchRuntime


@dataclass(frozen=True)
class TargetId:
    """The target that a head was trained for: its name, and properties that can be compared."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    vocab_hash: str = ""


# Fields that most configs copy from the target's: those of an attention layer, and of a decoder layer.
ATTENTION_FIELDS = ("vocab_size", "hidden_size", "rope", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps")
LAYER_FIELDS = (*ATTENTION_FIELDS, "intermediate_size", "activation")
# Weights of a head that stays in the processor's caches while the target is read: 4 bits would save no time there,
# and they cost small heads up to 3% of tau.
MAX_CACHED = 4_000_000
# Fields that must be at least 1, in configs that have them.
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "num_modules", "rank", "state_size",
)  # fmt: skip


def layer_names(model_type: str = "llama") -> dict[str, list[str]]:
    """Map a decoder layer's modules to their names in Hugging Face folders; several are stacked to make one matrix."""
    return FAMILIES[model_type].names.modules()


@dataclass(frozen=True)
class Place:
    """Rows from ``start`` on of a net's parameter at ``path``, as many as ``shape`` has: a tensor of a file."""

    path: str
    shape: tuple[int, ...]
    start: int = 0


def layer_places(
    config: Any, name: str, path: str, width: int, *, biased: Collection[str] = (), qk_norm: bool = False
) -> dict[str, Place]:
    """Return the places of a decoder layer's tensors, except for its input norm.

    Args:
        name: of the layer, before the names that its tensors have in Hugging Face folders.
        path: of the layer in the net.
        width: number of inputs of its attention.
        biased: modules with biases.
        qk_norm: queries and keys have norms.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"out": [hidden], "mlp.gate_up": [inner, inner], "mlp.down": [hidden], "qkv": [query, key, key]}
    widths = {"out": query, "mlp.down": inner, "qkv": width}
    places = {f"{name}.post_attention_layernorm.weight": Place(f"{path}.post_norm.weight", (hidden,))}
    for module, sizes in rows.items():
        for number, (part, size) in enumerate(zip(layer_names()[module], sizes, strict=True)):
            shape, start = (size, widths.get(module, hidden)), sum(sizes[:number])
            places[f"{name}.{part}.weight"] = Place(f"{path}.{module}.weight", shape, start)
            if module in biased:
                places[f"{name}.{part}.bias"] = Place(f"{path}.{module}.bias", (size,), start)
    for module in ("q_norm", "k_norm") if qk_norm else ():
        places[f"{name}.{layer_names()[module][0]}.weight"] = Place(f"{path}.{module}.weight", (config.head_dim,))
    return places


@dataclass(frozen=True)
class PlainConfig:
    """The usual config of a network, stored in a head's ``config.json``; subclasses add fields.

    A subclass is a frozen dataclass too; its fields are numbers, strings, tuples of them, or such dataclasses.

    Raises:
        ConfigError: no taps, a size below 1, or heads that do not go together.
    """

    taps: tuple[int, ...]  # the target's hidden states that are read, counted as transformers' ``hidden_states``
    vocab_size: int  # the target's
    hidden_size: int  # width of the target, and of a state
    rope: RopeConfig  # the rotation of its positions; unused without attention
    calibration: Calibration = field(default_factory=Calibration)  # converts scores to probabilities at T > 0
    target: TargetId | None = None  # the target it was trained for
    # fields that ``for_target`` copies from the target's ``ModelConfig``
    like_target: ClassVar[tuple[str, ...]] = ("vocab_size", "hidden_size", "rope")
    has_one_tap: ClassVar[bool] = False  # the network reads a single hidden state

    def __post_init__(self) -> None:
        if not self.taps or min(self.taps) < 0:
            raise ConfigError(f"taps must name at least 1 hidden state of the target, from 0 on, found {self.taps}")
        if self.has_one_tap and len(self.taps) != 1:
            name = type(self).__name__.removesuffix("Config")
            raise ConfigError(f"a {name} net reads one hidden state of the target, found taps {self.taps}: give one")
        for name in _SIZES:
            if (size := getattr(self, name, 1)) < 1:
                raise ConfigError(f"a draft network's {name} must be at least 1, found {size}")
        num_heads, num_kv_heads = getattr(self, "num_heads", 1), getattr(self, "num_kv_heads", 1)
        if num_heads % num_kv_heads:
            raise ConfigError(f"num_heads must be a multiple of num_kv_heads, found {num_heads} and {num_kv_heads}")
        if (head_dim := getattr(self, "head_dim", self.rope.head_dim)) != self.rope.head_dim:
            raise ConfigError(f"head_dim must be that of rope, found {head_dim} and {self.rope.head_dim}")

    @classmethod
    def for_target(cls, like: ModelConfig, taps: tuple[int, ...], **changes: Any) -> Self:
        """Return the config of a new network for a target of this shape; ``changes`` set other fields."""
        return cls(taps=taps, **{**{name: getattr(like, name) for name in cls.like_target}, **changes})


# A batch with the target's hidden states (``train.features.FeatureBatch``): ``batch.ids`` (B, T), the tokens;
# ``batch.real`` (B, T), False for padding; ``features`` (B, T, F), the taps that the network reads; and ``last``
# (B, T, H), the input of the target's LM head.
Scored = Any


class DraftNet(nn.Module, ABC):
    """A network that drafts from the target's features: a ``runtime.forward.Net``.

    Args:
        config: a ``PlainConfig``, or another frozen dataclass with its fields.
        embedding: (V, H) the target's, frozen and never saved with the network.
        target_head: the target's LM head, frozen, unless the network has its own (``head``).
        target_ids: (V_draft,) ascending target ids of the draft vocabulary; None for the whole vocabulary.
        dtype: of the matrices that ``new_matrix`` makes.

    Attributes:
        kind: the name of its method in ``methods.registry``.
        head: its own LM head, or None; set it after ``super().__init__``.
        runs: the runtime, chosen by ``prepack``.

    Raises:
        ConfigError: the embedding has another shape than the config states.
    """

    kind: str = ""
    embedding: Embedding
    target_ids: Tensor | None
    head: Linear | None

    def __init__(
        self,
        config: Any,
        embedding: Tensor | Embedding,
        target_head: Linear | None = None,
        target_ids: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        expected = (config.vocab_size, config.hidden_size)
        if tuple(embedding.shape) != expected:
            raise ConfigError(
                f"the head is made for an embedding of {expected}, the target's is {tuple(embedding.shape)}: a head "
                f"only fits the target that it was trained for"
            )
        self.config, self.head, self._new_dtype = config, None, dtype
        self.embedding = embedding.view() if isinstance(embedding, Embedding) else Embedding(embedding)
        self.register_buffer("target_ids", target_ids, persistent=False)
        # In a list, so that the target's head is not a parameter of this module.
        self._target_head = [] if target_head is None else [target_head]
        self.runs = cast(Runtime, TorchRuntime())
        self._rotary: tuple[tuple[torch.dtype, torch.device], Rotary] | None = None

    def new_matrix(self, num_out: int, num_in: int, *, bias: bool = False) -> Linear:
        """Return a new random matrix; a bias starts at zero."""
        place: dict[str, Any] = {"dtype": self._new_dtype, "device": self.embedding.device}
        weight = torch.empty(num_out, num_in, **place).normal_(0, num_in**-0.5)
        zeros = torch.zeros(num_out, requires_grad=True, **place) if bias else None
        return Linear(weight.requires_grad_(), zeros)

    def new_norm(self, size: int) -> RMSNorm:
        """Return a new norm of ones, with the config's ``rms_norm_eps``."""
        ones = torch.ones(size, dtype=self._new_dtype, device=self.embedding.device, requires_grad=True)
        return RMSNorm(ones, self.config.rms_norm_eps)

    def new_decoder_layer(
        self,
        *,
        width: int | None = None,
        qkv_bias: bool = False,
        o_bias: bool = False,
        mlp_bias: bool = False,
        input_norm: bool = True,
        qk_norm: bool = False,
    ) -> DecoderLayer:
        """Return a new decoder layer of the config's sizes, whose attention reads ``width`` numbers (H by default)."""
        config, new = self.config, self.new_matrix
        hidden, inner = config.hidden_size, config.intermediate_size
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return DecoderLayer(
            input_norm=self.new_norm(hidden) if input_norm else None,
            qkv=new(query + 2 * key, width or hidden, bias=qkv_bias),
            out=new(hidden, query, bias=o_bias),
            post_norm=self.new_norm(hidden),
            mlp=GatedMLP(new(2 * inner, hidden, bias=mlp_bias), new(hidden, inner, bias=mlp_bias), config.activation),
            heads=(config.num_heads, config.num_kv_heads, config.head_dim),
            norms=(self.new_norm(config.head_dim), self.new_norm(config.head_dim)) if qk_norm else None,
        )

    # --- the forward pass ------------------------------------------------------------------------------------------

    @property
    def shape(self) -> NetShape:
        """The sizes; by default of a network without attention that reads all taps, each of the hidden size."""
        return self.attention_shape(())

    def attention_shape(self, windows: Sequence[int | None]) -> NetShape:
        """Return the shape of a net with one attention layer per sliding window (None: unlimited)."""
        config, width = self.config, self.config.hidden_size
        return NetShape(
            num_layers=len(windows),
            num_heads=config.num_heads if windows else 0,
            num_kv_heads=config.num_kv_heads if windows else 0,
            head_dim=config.head_dim if windows else 0,
            windows=windows,
            vocab_size=config.vocab_size,
            feature_width=width * len(config.taps),
            state_width=width,
            out_width=width,
            is_sparse=self.target_ids is not None,
        )

    def fuse(self, features: Any) -> Any:
        """Map the target's features (R, F) to states (R, H); by default the identity, for one tap."""
        return features

    def mask_entry(self) -> tuple[int, Tensor] | None:
        """Return the token and the state (1, H) that entries after the true ones read; None if they read the draft's.

        A net with such an entry drafts all levels in one forward (P-EAGLE).
        """
        return None

    @abstractmethod
    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """Run one draft step of R entries.

        Args:
            ids: (R,) the token of each entry.
            states: (R, H) from ``fuse``, or fed back by the step before.
            attend: attention over the entries that each one sees; called once for each layer of ``shape``.

        Returns:
            The input of ``logits`` (R, H), and the states (R, H) to feed back.
        """

    def logits(self, read: Any) -> Any:
        """(R, H) -> (R, V) over the target's tokens; -inf outside the draft vocabulary."""
        head = self.read_head
        return head.spread(read.to(head.dtype), self.target_ids, self.config.vocab_size)

    def draft_logits(self, read: Tensor) -> Tensor:
        """(R, H) -> (R, V_draft) in the draft vocabulary."""
        head = self.read_head
        logits: Tensor = head.forward(read.to(head.dtype))
        return logits

    @property
    def read_head(self) -> Linear:
        """The LM head of ``logits``: its own, or the target's."""
        return self._target_head[0] if self.head is None else self.head

    @property
    def num_draft_tokens(self) -> int:
        return self.config.vocab_size if self.target_ids is None else len(self.target_ids)

    @property
    def head_weight(self) -> Tensor:
        """(V_draft, H) the matrix of ``read_head``."""
        return self.read_head.weight

    # --- running ---------------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and states, which may be wider than the target's."""
        return next(module.dtype for module in self.modules() if isinstance(module, Linear))

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def rotary(self) -> Rotary:
        key = self.dtype, self.device
        if self._rotary is None or self._rotary[0] != key:  # the net was moved
            self._rotary = key, self.new_rotary()
        return self._rotary[1]

    def new_rotary(self) -> Rotary:
        """Return the rotation of its positions, in its dtype and on its device."""
        return Rotary(self.config.rope, self.dtype, self.device)

    @property
    def is_traceable(self) -> bool:
        """True if ``forward`` only uses what can be traced for the CPU kernel (``models.layers``)."""
        return True

    def prepack(self, quantize: str | None = None, *, fast: bool = False) -> Any:
        """Choose a runtime and lay out the matrices for it, quantized by ``quantize`` (see ``Linear``).

        ``fast`` also quantizes to 4 bits if the CPU kernel then drafts faster, which changes drafts a little and never
        the output. The network cannot be trained or saved afterwards.
        """
        self.requires_grad_(False)
        mlps = [module for module in self.modules() if isinstance(module, GatedMLP)]
        activation, head_dim = mlps[0].activation_name if mlps else "silu", self.shape.head_dim
        runtime, layout = runtime_for(
            self.dtype, self.device, (head_dim,), activation, is_traceable=self.is_traceable,
            is_dense=not any(isinstance(module, Experts) for module in self.modules()), quantize=quantize, fast=fast,
        )  # fmt: skip
        num_weights = sum(module.weight.numel() for module in self.modules() if isinstance(module, Linear))
        if fast and layout == Layout("kernel", "int8") and num_weights > MAX_CACHED:
            layout = replace(layout, quantize="q4")
        if runtime.name == "kernel" and self._target_head:
            head = self._target_head[0].for_drafts(layout.quantize)
            if head is None:  # laid out for PyTorch, which must then run this network too
                runtime, layout = TorchRuntime(), Layout("torch", self._target_head[0].quantized)
            else:
                self._target_head = [head]
        if layout.runs != "kernel" and not has_exact_int8():
            layout = replace(layout, quantize=None)  # AVX2 only: exact 8-bit products are slower there
        gates = [mlp.gate_up for mlp in mlps]
        exact = [module.router for module in self.modules() if isinstance(module, Experts)]
        exact += [module.gate for module in self.modules() if isinstance(module, SharedExpert) and module.gate]
        self.embedding.lay_out(layout)
        for module in self.modules():
            if isinstance(module, Linear):
                is_exact = any(module is router for router in exact)
                own = replace(layout, quantize=None) if is_exact else layout
                module.lay_out(own, gated=any(module is gate for gate in gates))
        self.runs = runtime
        return self

    # --- tensors ---------------------------------------------------------------------------------------------------

    def named_tensors(self) -> dict[str, Tensor]:
        """Return views of all tensors, by their names in a head's file; the network must not have been prepacked."""
        return {name: parameter.data for name, parameter in self.named_parameters()}

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of ``named_tensors``."""
        return {name: tensor.clone() for name, tensor in self.named_tensors().items()}

    def load_tensors(self, tensors: Mapping[str, Tensor], where: str = "the head") -> Self:
        """Load tensors named as in ``named_tensors``: all of them, and no others.

        Raises CheckpointError if a name is missing, unknown, or has another shape.
        """
        views = self.named_tensors()
        missing, unknown = sorted(views.keys() - tensors.keys()), sorted(tensors.keys() - views.keys())
        if missing or unknown:
            what = f"lacks {missing[0]!r}" if missing else f"has a tensor {unknown[0]!r} that no such net has"
            raise CheckpointError(
                f"{where} {what} (missing {len(missing)}, unknown {len(unknown)}): its config.json and its weights do "
                f"not belong together; `draftwing doctor` names what differs"
            )
        for name, view in views.items():
            if view.shape != tensors[name].shape:
                raise CheckpointError(
                    f"{where}: {name} has shape {tuple(tensors[name].shape)}, expected {tuple(view.shape)}: was it "
                    f"trained for another target?"
                )
        for name, view in views.items():
            view.copy_(tensors[name])
        return self
