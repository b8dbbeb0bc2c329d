"""Sub-networks of the target: some of its layers, or only the attention or the MLP of a layer.

They share the target's modules and KV slots. Their nodes use the slots of the tree, which the target's next forward
overwrites in every layer.

Shape suffixes: R rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import ConfigError, UnsupportedError
from draftwing.models.attention import Attend
from draftwing.models.lean import LeanContext, LeanTarget, TappedNet
from draftwing.models.rope import Rotary
from draftwing.models.target import Target
from draftwing.runtime.forward import Entries, NetShape, Runner
from draftwing.tree import DraftTree


@dataclass(frozen=True)
class Parts:
    """The parts of a decoder that run."""

    num_layers: int  # layers of the whole decoder
    # attention, mlp: layers whose attention and whose MLP run, ascending
    attention: tuple[int, ...]
    mlp: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, layers in ("attention", self.attention), ("mlp", self.mlp):
            if sorted(set(layers)) != list(layers) or not set(layers) <= set(range(self.num_layers)):
                raise ConfigError(
                    f"{name}: layers must be from 0 to {self.num_layers - 1}, ascending and each once, found "
                    f"{list(layers)!r:.80}: correct them"
                )

    @classmethod
    def first(cls, num_layers: int, count: int) -> Parts:
        """Return the first ``count`` layers: an early exit."""
        return cls(num_layers, tuple(range(count)), tuple(range(count)))

    @classmethod
    def without(cls, num_layers: int, attention: tuple[int, ...], mlp: tuple[int, ...]) -> Parts:
        """All but these sublayers: Draft & Verify."""
        skipped = cls(num_layers, attention, mlp)  # checks the layers
        return cls(num_layers, skipped.skipped_attention, skipped.skipped_mlp)

    @property
    def num_first(self) -> int:
        """Number of layers before an early exit; 0 if this is none, or the whole decoder."""
        count = len(self.attention)
        return count if self == Parts.first(self.num_layers, count) and count < self.num_layers else 0

    @property
    def skipped_attention(self) -> tuple[int, ...]:
        """Layers whose attention does not run."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.attention)

    @property
    def skipped_mlp(self) -> tuple[int, ...]:
        """Layers whose MLP does not run."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.mlp)

    def __str__(self) -> str:
        if self == Parts.first(self.num_layers, len(self.mlp)):
            return f"the first {len(self.mlp)} of {self.num_layers} layers"
        return f"{len(self.attention)} attentions and {len(self.mlp)} MLPs of {self.num_layers} layers"


@dataclass(eq=False)
class PartNet:
    """A ``Net`` with the target's vocabulary, dtype, device, rotation and LM head."""

    net: TappedNet

    @property
    def num_tokens(self) -> int:
        return self.net.num_tokens

    @property
    def places(self) -> Tensor | None:
        return self.net.places

    @property
    def dtype(self) -> torch.dtype:
        return self.net.dtype

    @property
    def device(self) -> torch.device:
        return self.net.device

    @property
    def rotary(self) -> Rotary:
        return self.net.rotary

    def fuse(self, features: Any) -> Any:
        """Unchanged."""
        return features

    def logits(self, read: Any) -> Any:
        """(R, H) -> (R, V)."""
        return self.net.head.forward(read)


@dataclass(eq=False)
class SubNet(PartNet):
    """Some ``parts`` of a decoder as a ``Net``, followed by its final norm and LM head."""

    parts: Parts
    gives_stream: bool = False  # True if the second output is the residual stream (R, H) after the last part
    rest: RestNet | None = field(init=False, default=None)  # the layers after an early exit, if ``gives_stream``

    def __post_init__(self) -> None:
        if self.gives_stream and self.parts.num_first:
            self.rest = RestNet(self.net, self.parts.num_first)

    @classmethod
    def of(cls, net: TappedNet, parts: Parts) -> SubNet:
        """Return the network that drafts with ``parts``; after an early exit it returns the stream too."""
        return cls(net, parts, gives_stream=parts.num_first > 0)

    @cached_property
    def shape(self) -> NetShape:
        return replace(self.net.shape, out_width=self.net.config.hidden_size if self.gives_stream else 0)

    def stream(self, ids: Any, attend: Attend) -> Any:
        """(R,) -> the residual stream (R, H) after the last part."""
        x, attention, mlp = self.net.embed(ids), set(self.parts.attention), set(self.parts.mlp)
        for index, layer in enumerate(self.net.layers):
            if index in attention and index in mlp:
                x = layer.forward(x, attend, index)
            elif index in attention:
                x = layer.add_attention(x, attend, index)
            elif index in mlp:
                x = layer.add_mlp(x)
        return x

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """(R,) -> (R, H) after the final norm, and the stream before it or None."""
        x = self.stream(ids, attend)
        return self.net.norm.forward(x), x if self.gives_stream else None

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a forward of one token reads, the LM head included."""
        layers = self.net.layers
        attention = sum(layers[index].num_attention_bytes for index in self.parts.attention)
        return self.net.head.num_bytes + attention + sum(layers[index].mlp.num_bytes for index in self.parts.mlp)


@dataclass(eq=False)
class RestNet(PartNet):
    """The layers after the first ``count``: a network that reads the residual stream after these."""

    count: int

    @cached_property
    def shape(self) -> NetShape:
        hidden = self.net.config.hidden_size
        return replace(self.net.shape, feature_width=hidden, state_width=hidden, out_width=0)

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """(R, H) after the first layers -> (R, H) after the final norm."""
        for index in range(self.count, self.net.config.num_layers):
            states = self.net.layers[index].forward(states, attend, index)
        return self.net.norm.forward(states), None


@dataclass(frozen=True)
class StartedForward:
    """The forward of a chain whose first layers ran while it was drafted and wrote their keys and values.

    A call runs the first layers for the nodes that drafting left out (the last one), and the other layers for all
    nodes. The result is that of a forward through all layers.
    """

    # first, rest: runners of the first and of the other layers, over the same slots
    first: Runner
    rest: Runner
    tree: DraftTree  # the chain
    states: Tensor  # (B, W, H) the stream after the first layers, of the first nodes
    lengths: tuple[int, ...]  # slots of each row before its chain

    def __call__(self) -> Tensor:
        """(B, N, V) logits."""
        tree, num_nodes = self.tree, self.tree.num_nodes
        states = self.states[:, :num_nodes]
        if states.shape[1] < num_nodes:
            entries = Entries(tree, self.lengths, first_node=states.shape[1])
            _, more = self.first.forward(entries, want_logits=False)
            assert more is not None
            states = torch.cat([states, more], 1)
        logits, _ = self.rest.forward(Entries(tree, self.lengths, states=states))
        assert logits is not None
        return logits


def runner_over(net: SubNet | RestNet, target: LeanTarget, ctx: LeanContext) -> Runner:
    """Return a runner of a part of the target over the KV slots of one of its contexts."""
    return target.runs.runner(net, ctx, ctx.cache)


def lean_target(target: Target, what: str) -> LeanTarget:
    """Narrow the target to one whose layers can be run separately. ``what`` is the draft method, for the message."""
    if isinstance(target, LeanTarget):
        if target.config.delta is not None:
            raise UnsupportedError(
                f"{what} runs single layers of the target, but {target.name} has recurrent layers, whose states only "
                f"whole forwards change: use another draft method"
            )
        if target.config.family.is_layered:
            raise UnsupportedError(
                f"{what} runs single layers of the target, but layers of {target.name} depend on inputs, keys and "
                f"values that only whole forwards have: use another draft method"
            )
        return target
    raise UnsupportedError(
        f"{what} runs single layers of the target, but {target.name} runs in transformers, as a whole: use "
        f"engine='lean' if the architecture is supported, or another draft method"
    )
