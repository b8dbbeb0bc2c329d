"""Kangaroo (2404.18911): the target's first layers and a trained adapter draft for it.

It drafts as a causal LM does that shares the target's layers: what the target keeps of a tree is committed in its own
slots, as far as it was run there, and the next draft reads only what is missing. The paper stops a draft where the
confidence falls below 0.6; here the growth rule does, by what such confidences came to (``drafters.growing.worth``).
"""

from __future__ import annotations

from dataclasses import replace

from draftwing.drafters.causal_lm import CausalLMDrafter
from draftwing.errors import ConfigError
from draftwing.model.lean import LeanTarget
from draftwing.model.linear import Linear, runs_as
from draftwing.model.subnet import Parts, SubNet, lean_target
from draftwing.model.target import Target
from draftwing.nets.kangaroo import KangarooNet, Shallow

__all__ = ["KangarooDrafter"]


class _Model:
    """The first layers and the adapter: a ``causal_lm.DraftModel``."""

    def __init__(self, adapter: KangarooNet, target: LeanTarget, name: str) -> None:
        first = SubNet(target.net, Parts.first(target.num_layers, adapter.config.taps[0]))
        self.name, self.vocab_size, self.max_length = name, target.vocab_size, target.max_length
        self.net, self.runs = Shallow(first, adapter), target.runs
        matrices = [part for part in adapter.modules() if isinstance(part, Linear)]
        own = sum(matrix.num_bytes for matrix in [*matrices, adapter.read_head])
        self.num_weight_bytes = first.num_bytes - target.head.num_bytes + own
        self.runs_as = "; ".join(dict.fromkeys([target.runs_as, runs_as(matrices)]))


class KangarooDrafter(CausalLMDrafter):
    """Drafts with ``adapter`` behind the first layers of ``target``.

    Args:
        identity: what tells it from other adapters, for what was measured with it.

    Raises:
        ConfigError: the adapter reads a layer that the target has not, or has other heads or another vocabulary.
        UnsupportedError: a target that runs on transformers.
    """

    def __init__(self, adapter: KangarooNet, target: Target, name: str = "", identity: str = "") -> None:
        own, config = lean_target(target, "a Kangaroo adapter"), adapter.config
        if config.vocab_size != own.vocab_size or config.taps[0] > own.num_layers:
            raise ConfigError(
                f"the adapter reads the state behind {config.taps[0]} layers of a target with a vocabulary of "
                f"{config.vocab_size}; {own.name} has {own.num_layers} layers and {own.vocab_size} tokens: use one "
                f"trained for it"
            )
        super().__init__(_Model(adapter, own, name), own.vocab_size, config.calibration)
        self.name = adapter.kind + (f" ({name})" if name else "")
        # The target goes on from what its first layers have left of a draft.
        identity = f"{identity} {config} {adapter.dtype} {self.traits.num_bytes}"
        self.traits = replace(self.traits, identity=identity, hands_on=False)
