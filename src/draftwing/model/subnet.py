"""A sub-net of the target: some of its layers, or only the attention or the MLP of a layer.

It is made of the target's own modules, and runs over the target's own KV slots: no weight and no slot is copied. The
nodes that it runs lie in the slots of the tree, which the target's next forward writes again in every layer.

Shape suffixes: R rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import ConfigError, UnsupportedError
from draftwing.model.attention import Attend
from draftwing.model.layers import settled
from draftwing.model.lean import LeanContext, LeanTarget, TappedNet, attention_bytes, mlp_bytes
from draftwing.model.rope import Rotary
from draftwing.model.target import Target
from draftwing.run.forward import Entries, NetShape, Runner
from draftwing.tree import DraftTree

__all__ = ["Begun", "Parts", "RestNet", "SubNet", "lean_target", "runner_over"]


@dataclass(frozen=True)
class Parts:
    """Which parts of a decoder run.

    Attributes:
        num_layers: of the whole decoder.
        attention, mlp: the layers whose attention and whose MLP run, ascending.

    Raises:
        ConfigError: a layer that is not there, or one twice.
    """

    num_layers: int
    attention: tuple[int, ...]
    mlp: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, layers in (("attention", self.attention), ("mlp", self.mlp)):
            if sorted(set(layers)) != list(layers) or not set(layers) <= set(range(self.num_layers)):
                raise ConfigError(
                    f"{name}: layers must be from 0 to {self.num_layers - 1}, ascending and each once, found "
                    f"{list(layers)!r:.80}: correct them"
                )

    @classmethod
    def first(cls, num_layers: int, count: int) -> Parts:
        """The first ``count`` layers: an early exit."""
        return cls(num_layers, tuple(range(count)), tuple(range(count)))

    @classmethod
    def without(cls, num_layers: int, attention: tuple[int, ...], mlp: tuple[int, ...]) -> Parts:
        """All but these: Draft & Verify's skipped sublayers."""
        check = cls(num_layers, attention, mlp)
        every = range(num_layers)
        return cls(
            num_layers,
            tuple(layer for layer in every if layer not in check.attention),
            tuple(layer for layer in every if layer not in check.mlp),
        )

    @property
    def num_first(self) -> int:
        """How many layers an early exit runs; 0 where it is none, or the whole decoder."""
        count = len(self.attention)
        return count if self == Parts.first(self.num_layers, count) and count < self.num_layers else 0

    @property
    def skipped_attention(self) -> tuple[int, ...]:
        """The layers whose attention does not run."""
        return tuple(sorted(set(range(self.num_layers)) - set(self.attention)))

    @property
    def skipped_mlp(self) -> tuple[int, ...]:
        """The layers whose MLP does not run."""
        return tuple(sorted(set(range(self.num_layers)) - set(self.mlp)))

    def __str__(self) -> str:
        both = set(self.attention) & set(self.mlp)
        if both == set(range(len(both))) and len(self.attention) == len(self.mlp) == len(both):
            return f"the first {len(both)} of {self.num_layers} layers"
        return f"{len(self.attention)} attentions and {len(self.mlp)} MLPs of {self.num_layers} layers"


class _OfTarget:
    """A part of a target: a ``Net`` with the whole one's dtype, device and rotation."""

    net: TappedNet

    @property
    def dtype(self) -> torch.dtype:
        """The target's."""
        return self.net.dtype

    @property
    def device(self) -> torch.device:
        """The target's."""
        return self.net.device

    @property
    def rotary(self) -> Rotary:
        """The target's."""
        return self.net.rotary


@dataclass(eq=False)
class SubNet(_OfTarget):
    """Some ``parts`` of a decoder as a net (``run.forward.Net``), read by its final norm and LM head.

    Attributes:
        gives_stream: the stream (R, H) behind the last part comes out beside what the LM head reads.
        rest: what is left of the decoder behind an early exit whose stream comes out.
    """

    net: TappedNet
    parts: Parts
    gives_stream: bool = False
    rest: RestNet | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.gives_stream and self.parts.num_first:
            self.rest = RestNet(self.net, self.parts.num_first)

    @classmethod
    def of(cls, net: TappedNet, parts: Parts) -> SubNet:
        """The sub-net that drafts with ``parts``: of an early exit the target's forward goes on from where it ends."""
        return cls(net, parts, gives_stream=parts.num_first > 0)

    @property
    def shape(self) -> NetShape:
        """See ``Net``: the slots are the whole decoder's."""
        return replace(self.net.shape, out_width=self.net.config.hidden_size if self.gives_stream else 0)

    def fuse(self, features: Any) -> Any:
        """Tokens are all it reads."""
        return features

    def stream(self, ids: Any, attend: Attend) -> Any:
        """(R,) -> (R, H) behind the last part."""
        x, attention, mlp = settled(self.net.embedding.forward(ids)), set(self.parts.attention), set(self.parts.mlp)
        for index, layer in enumerate(self.net.layers):
            if index in attention:
                x = layer.look(x, attend, index)
            if index in mlp:
                x = layer.transform(x)
        return x

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """(R,) -> (R, H) after the final norm, and the stream before it or None."""
        x = self.stream(ids, attend)
        return self.net.norm.forward(x), x if self.gives_stream else None

    def logits(self, read: Any) -> Any:
        """(R, H) -> (R, V)."""
        return self.net.head.forward(read)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a pass of one token reads, the LM head's too."""
        moe, layers = self.net.config.moe, self.net.layers
        num_experts = moe.num_experts_per_token if moe else 0
        attention = sum(attention_bytes(layers[index]) for index in self.parts.attention)
        return self.net.head.num_bytes + attention + sum(mlp_bytes(layers[i], num_experts) for i in self.parts.mlp)


@dataclass(eq=False)
class RestNet(_OfTarget):
    """What is left of a forward behind the first ``count`` layers: a net that reads the stream behind these."""

    net: TappedNet
    count: int

    @property
    def shape(self) -> NetShape:
        """See ``Net``, here and below."""
        hidden = self.net.config.hidden_size
        return replace(self.net.shape, feature_width=hidden, state_width=hidden, out_width=0)

    def fuse(self, features: Any) -> Any:
        """The stream as it is."""
        return features

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """(R, H) behind the first layers -> (R, H) after the final norm."""
        for index in range(self.count, self.net.config.num_layers):
            states = self.net.layers[index].forward(states, attend, index)
        return self.net.norm.forward(states), None

    def logits(self, read: Any) -> Any:
        """(R, H) -> (R, V)."""
        return self.net.head.forward(read)


@dataclass(frozen=True)
class Begun:
    """The forward of a chain whose first layers ran while it was drafted: their keys and values lie in its slots.

    Called with the chain, it runs the first layers for what drafting left out (its last node), and the other layers
    for all nodes: each node's numbers are those of a forward through all layers.

    Attributes:
        first, rest: run the first layers and the others, over the same slots.
        tree: the chain.
        states: (B, W, H) the stream behind the first layers, of the first nodes.
        lengths: slots of each row before its chain.
    """

    first: Runner
    rest: Runner
    tree: DraftTree
    states: Tensor
    lengths: tuple[int, ...]

    def __call__(self, tree: DraftTree) -> Tensor | None:
        """(B, N, V) logits; None for another tree."""
        if tree is not self.tree:
            return None
        states, num_nodes = self.states[:, : tree.num_nodes], tree.num_nodes
        if states.shape[1] < num_nodes:
            entries = Entries(tree, self.lengths, first_node=states.shape[1])
            _, more = self.first.forward(entries, want_logits=False)
            assert more is not None
            states = torch.cat([states, more], 1)
        return self.rest.forward(Entries(tree, self.lengths, states=states))[0]


def runner_over(net: SubNet | RestNet, target: LeanTarget, ctx: LeanContext) -> Runner:
    """What runs a part of a target over the slots of one of its contexts."""
    return target.runs.runner(net, ctx, ctx.cache)


def lean_target(target: Target, what: str) -> LeanTarget:
    """The target, whose layers can be run one by one.

    Args:
        what: drafts with them, for the message.

    Raises:
        UnsupportedError: it runs on transformers, as a whole.
    """
    if isinstance(target, LeanTarget):
        return target
    raise UnsupportedError(
        f"{what} runs single layers of the target, and {target.name} runs on transformers, as a whole: choose "
        f"engine='lean' where the architecture allows it, or another draft"
    )
