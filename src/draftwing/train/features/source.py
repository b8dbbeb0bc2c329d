"""Where a training run gets the target's hidden states: computed as it goes, or read from a cache.

Shape suffixes: B rows, T tokens, F features (all taps), H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.model.linear import Linear
from draftwing.model.target import FeatureSpec, Target
from draftwing.train.data.batches import Batch, Batches

__all__ = ["FeatureBatch", "FeatureSource", "OnlineFeatures", "best_tokens", "hidden_states", "read_text", "scored"]

_ROWS = 512  # whose logits are looked at together


@dataclass(frozen=True, eq=False)
class FeatureBatch:
    """A batch with what the target thinks of it.

    Attributes:
        batch: ids and mask.
        features: (B, T, F) the taps that the net reads.
        last: (B, T, H) the hidden state that the LM head reads. Here and in ``features`` a row's last token may have
            none, which is then 0: what follows it is not known.
        logits: (B, T, V); None where they are to be computed from ``last``.
        best: (B, T) the target's best token after each; None where it is to be found in the logits.
    """

    batch: Batch
    features: Tensor
    last: Tensor
    logits: Tensor | None = None
    best: Tensor | None = None

    def logits_of(self, head: Linear) -> Tensor:
        """(B, T, V) the target's logits, computed by its LM head where they are not at hand."""
        if self.logits is not None:
            return self.logits
        found: Tensor = head.forward(self.last.flatten(0, 1)).view(*self.last.shape[:2], -1)
        return found


class FeatureSource(Protocol):
    """Batches by number, a pure function of it."""

    @property
    def num_tokens_per_epoch(self) -> int:
        """Tokens of an epoch."""
        ...

    @property
    def num_batches_per_epoch(self) -> int:
        """Batches of an epoch."""
        ...

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> FeatureBatch:
        """See ``Batches.batch``."""
        ...

    def text(self, number: int, rank: int = 0, world_size: int = 1) -> Batch:
        """The same without features, where these cost anything."""
        ...


class OnlineFeatures:
    """Runs the target on every batch."""

    def __init__(self, target: Target, batches: Batches, taps: tuple[int, ...]) -> None:
        self._target, self._batches, self._taps = target, batches, taps

    @property
    def num_tokens_per_epoch(self) -> int:
        """See ``FeatureSource``."""
        return self._batches.num_tokens_per_epoch

    @property
    def num_batches_per_epoch(self) -> int:
        """See ``Batches``."""
        return self._batches.num_batches_per_epoch

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> FeatureBatch:
        """See ``FeatureSource``."""
        return self.of(self.text(number, rank, world_size))

    def text(self, number: int, rank: int = 0, world_size: int = 1) -> Batch:
        """A batch without features: the target is not run."""
        return self._batches.batch(number, rank, world_size)

    def of(self, batch: Batch) -> FeatureBatch:
        """One forward of the target."""
        return scored(self._target, batch, self._taps)


def scored(target: Target, batch: Batch, taps: tuple[int, ...]) -> FeatureBatch:
    """A batch with what the target thinks of it: one forward."""
    batch = batch.runnable().to(target.device)
    logits, features = _score(target, batch.ids, FeatureSpec((*taps, target.num_layers)))
    width = target.hidden_size * len(taps)
    return FeatureBatch(batch, features[..., :width], features[..., width:], logits)


def hidden_states(target: Target, ids: Tensor, taps: tuple[int, ...]) -> Tensor:
    """(B, T) ids -> (B, T, F) what the target has there after the layers ``taps``, one beside the other."""
    return _score(target, ids, FeatureSpec(taps))[1]


def read_text(target: Target, ids: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(B, T) ids -> (B, T, F) what the target has there after the layers ``taps``, and (B, T) its best token after."""
    logits, states = _score(target, ids, FeatureSpec(taps))
    return states, logits.argmax(-1)


@torch.no_grad()
def best_tokens(target: Target, last: Tensor) -> Tensor:
    """(N, H) what the LM head reads -> (N,) int32: the target's best token after each, on the CPU."""
    rows = last.to(target.device).to(target.dtype)
    found = [target.head.forward(rows[start : start + _ROWS]).argmax(-1) for start in range(0, len(rows), _ROWS)]
    return torch.cat(found).int().cpu()


@torch.no_grad()
def _score(target: Target, ids: Tensor, spec: FeatureSpec) -> tuple[Tensor, Tensor]:
    output = target.score(ids, spec)
    if output.features is None:
        raise ConfigError(f"{target.name} gave no hidden states: let its score return the features that are asked for")
    return output.logits, output.features
