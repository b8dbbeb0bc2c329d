"""Kangaroo (2404.18911): the target's first E layers and a trained adapter behind them draft for the target.

    x_E (the target's hidden state E) -> x_E + attention(norm(x_E)) -> norm -> the target's LM head

Entry i is the token at position i and guesses the token at i + 1, like the target itself. In training the hidden states
are the target's; while drafting, the target's first layers compute them (``ShallowNet``), so that the whole drafts like
a causal LM that shares the target's layers.

The paper stops a draft when its confidence falls below 0.6; here the growth rule decides, from how often drafts of such
a confidence were accepted (``tree.GrowthRule``).

Shape suffixes: R rows of entries, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from draftwing.errors import ConfigError
from draftwing.methods.base import Drafter
from draftwing.methods.causal_lm import CausalLMDrafter
from draftwing.methods.method import NetMethod
from draftwing.methods.net import ATTENTION_FIELDS, DraftNet, PlainConfig
from draftwing.methods.objectives import AlignedLoss
from draftwing.models.attention import Attend, HeadTraits
from draftwing.models.lean import LeanTarget
from draftwing.models.linear import Linear, runs_as
from draftwing.models.subnet import PartNet, Parts, SubNet, lean_target
from draftwing.models.target import Target
from draftwing.runtime.forward import NetShape

EXIT_LAYERS = 2  # layers of the target that draft: the paper's choice for 7B (it takes 3 for 13B)


@dataclass(frozen=True)
class KangarooConfig(PlainConfig):
    """The shape of an adapter, whose attention is as wide as the target's. Its one tap is E."""

    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 64
    rms_norm_eps: float = 1e-5
    like_target: ClassVar = ATTENTION_FIELDS
    has_one_tap: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.taps[0] < 1:
            raise ConfigError("a Kangaroo net reads the state behind 1 or more of the target's layers, found tap 0")


class KangarooNet(DraftNet):
    """The adapter: one attention layer and two norms between the target's hidden state E and its LM head."""

    kind = "kangaroo"
    config: KangarooConfig

    def __init__(self, config: KangarooConfig, *parts: Any, **options: Any) -> None:
        super().__init__(config, *parts, **options)
        hidden, width = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, width
        self.q_norm = self.k_norm = self.v_norm = self.mixer = None  # an ``Attend`` reads these of its caller
        self.traits = HeadTraits(rotation=(0, config.rope.rotary_dim // 2))  # a target's other rotations come later
        self.input_norm, self.norm = self.new_norm(hidden), self.new_norm(hidden)
        self.qkv = self.new_matrix((config.num_heads + 2 * config.num_kv_heads) * width, hidden)
        self.out = self.new_matrix(hidden, config.num_heads * width)

    @property
    def shape(self) -> NetShape:
        return self.attention_shape((None,))

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """Map hidden states E (R, H), which already contain the tokens, to the LM head's input (R, H), twice."""
        mixed = attend(0, self.qkv.forward(self.input_norm.forward(states)), self).to(self.dtype)
        read = self.norm.forward(self.out.forward(mixed, states))
        return read, read


class ShallowNet(PartNet):
    """The target's first layers and the adapter behind them, as one net with its own KV slots.

    The first layers' keys and values are kept twice, here and in the target's slots, because one net's pass reads slots
    of one kind: that is (E + 1) / num_layers of the target's. No weight is copied.
    """

    def __init__(self, first: SubNet, adapter: KangarooNet) -> None:
        super().__init__(first.net)
        self._first, self._adapter = first, adapter
        self._depth = adapter.config.taps[0]

    @property
    def shape(self) -> NetShape:
        """Its sizes. Raises ConfigError if the adapter's keys and values are not as wide as the target's."""
        shape, config = self._first.shape, self._adapter.config
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        if (config.num_heads, config.num_kv_heads, config.head_dim) != heads:
            raise ConfigError(
                f"the adapter has {config.num_heads} heads, {config.num_kv_heads} KV heads and {config.head_dim} "
                f"channels of each, and the target {heads[0]}, {heads[1]} and {heads[2]}: use an adapter trained for it"
            )
        return replace(shape, num_layers=self._depth + 1, windows=(*shape.windows[: self._depth], None))

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """(R,) -> (R, H) the LM head's input."""
        x = self._first.stream(ids, attend)

        def attend_behind(layer: int, qkv: Any, heads: Any) -> Any:
            return attend(self._depth + layer, qkv, heads)

        return self._adapter.forward(ids, x.to(self._adapter.dtype), attend_behind)[0], None

    def logits(self, read: Any) -> Any:
        return self._adapter.logits(read)


class ShallowModel:
    """A ``ShallowNet`` as the model of a ``CausalLMDrafter``."""

    def __init__(self, adapter: KangarooNet, target: LeanTarget, name: str) -> None:
        first = SubNet(target.net, Parts.first(target.num_layers, adapter.config.taps[0]))
        self.name, self.vocab_size, self.max_length = name, target.vocab_size, target.max_length
        self.net, self.runs = ShallowNet(first, adapter), target.runs
        matrices = [part for part in adapter.modules() if isinstance(part, Linear)]
        num_bytes = sum(matrix.num_bytes for matrix in [*matrices, adapter.read_head])
        self.num_weight_bytes = first.num_bytes - target.head.num_bytes + num_bytes
        self.runs_as = "; ".join(dict.fromkeys([target.runs_as, runs_as(matrices)]))


class KangarooDrafter(CausalLMDrafter):
    """Drafts with ``adapter`` behind the first layers of ``target``."""

    def __init__(self, adapter: KangarooNet, target: Target, name: str = "", identity: str = "") -> None:
        lean, config = lean_target(target, "a Kangaroo adapter"), adapter.config
        if config.vocab_size != lean.vocab_size or config.taps[0] > lean.num_layers:
            raise ConfigError(
                f"the adapter reads the state behind {config.taps[0]} layers of a target with a vocabulary of "
                f"{config.vocab_size}; {lean.name} has {lean.num_layers} layers and {lean.vocab_size} tokens: use one "
                f"trained for it"
            )
        super().__init__(ShallowModel(adapter, lean, name), lean.vocab_size, config.calibration)
        self.name = adapter.kind if name in ("", adapter.kind) else f"{adapter.kind} ({name})"
        self.identity = f"{identity} {config} {adapter.dtype} {self.num_bytes}"


class Kangaroo(NetMethod):
    """An adapter behind the target's first layers."""

    net = KangarooNet
    config = KangarooConfig
    options: ClassVar = {}
    loss = AlignedLoss

    def taps(self, num_layers: int) -> tuple[int, ...]:
        return (min(EXIT_LAYERS, num_layers),)

    def drafter(self, net: Any, target: Target, name: str = "", identity: str = "") -> Drafter:
        return KangarooDrafter(net, target, name, identity)
