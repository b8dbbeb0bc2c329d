"""Sources of the target's hidden states for training: computed for every batch, or for text that the draft writes.

``feature_cache.CachedFeatures`` is a third source. Shape suffixes: B rows, T tokens, F features (all taps), H hidden,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from draftwing.decode import Decoder
from draftwing.engine import Engine
from draftwing.errors import ConfigError
from draftwing.models.context import FeatureSpec
from draftwing.models.linear import Linear
from draftwing.models.target import Target
from draftwing.sampling import Sampling
from draftwing.train.data import Batch, Batches, collate
from draftwing.train.stream import StreamedBatches

HEAD_ROWS = 512  # rows whose logits are computed at once


@dataclass(frozen=True, eq=False)
class FeatureBatch:
    """A batch with the target's hidden states."""

    batch: Batch  # ids and mask
    features: Tensor  # (B, T, F) the taps that the net reads
    # (B, T, H) the input of the LM head. Here and in ``features`` the values of a row's last token may be 0.
    last: Tensor
    logits: Tensor | None = None  # (B, T, V); None if they are to be computed from ``last``
    best: Tensor | None = None  # (B, T) the target's best token after each; None if it is to be found in the logits

    def logits_of(self, head: Linear) -> Tensor:
        """(B, T, V) the target's logits, computed by its LM head if they are not stored."""
        if self.logits is not None:
            return self.logits
        logits: Tensor = head.forward(self.last.flatten(0, 1)).view(*self.last.shape[:2], -1)
        return logits


class FeatureSource(Protocol):
    """Batches by number, each a pure function of its number."""

    @property
    def num_batches_per_epoch(self) -> int: ...

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> FeatureBatch: ...

    def text(self, number: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Return the batch without features, which takes no forward."""
        ...


class OnlineFeatures:
    """A ``FeatureSource`` that runs the target on every batch."""

    def __init__(self, target: Target, batches: Batches | StreamedBatches, taps: tuple[int, ...]) -> None:
        self._target, self._batches, self._taps = target, batches, taps

    @property
    def num_batches_per_epoch(self) -> int:
        return self._batches.num_batches_per_epoch

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> FeatureBatch:
        return scored(self._target, self.text(number, rank, world_size), self._taps)

    def text(self, number: int, rank: int = 0, world_size: int = 1) -> Batch:
        return self._batches.batch(number, rank, world_size)


def scored(target: Target, batch: Batch, taps: tuple[int, ...]) -> FeatureBatch:
    """Run the target on a batch, padded to a shape that can be run."""
    batch = batch.runnable().to(target.device)
    features, logits = score_text(target, batch.ids, (*taps, target.num_layers))
    width = target.hidden_size * len(taps)
    return FeatureBatch(batch, features[..., :width], features[..., width:], logits)


@torch.no_grad()
def best_tokens(target: Target, last: Tensor) -> Tensor:
    """(N, H) inputs of the LM head -> (N,) int32 the target's best token after each, on the CPU."""
    rows = last.to(target.device).to(target.dtype)
    best = [target.head.forward(part).argmax(-1) for part in torch.split(rows, HEAD_ROWS)]
    return torch.cat(best).int().cpu()


@torch.no_grad()
def score_text(target: Target, ids: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(B, T) ids -> (B, T, F) the target's hidden states after the layers ``taps``, concatenated, (B, T, V) logits."""
    output = target.score(ids, FeatureSpec(taps))
    if output.features is None:
        raise ConfigError(f"{target.name} gave no hidden states: let its score return the features of its argument")
    return output.features, output.logits


class OnPolicyFeatures:
    """A ``FeatureSource`` that lets the draft model write a ``share`` of the batches (DistillSpec, 2310.08461).

    In these batches each row is cut at a random position among those that count, and ``writer``, the draft model,
    continues it with its present weights; ``target`` scores the text. The chosen batches, the cuts and the samples
    depend only on the seed, the number of the batch and the weights, so a resumed run reads the same text. ``source``
    has all other batches.
    """

    def __init__(
        self, source: FeatureSource, target: Target, taps: tuple[int, ...], writer: Target, share: float, seed: int
    ) -> None:
        self._source, self._target, self._taps = source, target, taps
        self._writer, self._share, self._seed = writer, share, seed

    @property
    def num_batches_per_epoch(self) -> int:
        return self._source.num_batches_per_epoch

    def text(self, number: int, rank: int = 0, world_size: int = 1) -> Batch:
        return self._source.text(number, rank, world_size)

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> FeatureBatch:
        if np.random.default_rng((self._seed, number, 2)).random() >= self._share:
            return self._source.batch(number, rank, world_size)
        text = self.text(number, rank, world_size)
        rngs = [np.random.default_rng((self._seed, number, 3, rank + i * world_size)) for i in range(len(text.ids))]
        return scored(self._target, self._continue(text, rngs), self._taps)

    def _continue(self, text: Batch, rngs: Sequence[np.random.Generator]) -> Batch:
        """Replace the ends of the rows, with a generator for each; a row in which nothing counts stays the same."""
        engine, rows = Engine(Decoder(self._writer)), []
        for example, rng in zip(text.examples(), rngs, strict=True):
            ids, length = example.ids, len(example.ids)
            places = np.flatnonzero(example.mask)
            places = places[(places > 0) & (places < self._writer.max_length)]
            cut, seed = int(rng.choice(places)) if len(places) else length, int(rng.integers(2**31))
            request = None
            if cut < length:
                sampling = Sampling(temperature=1.0, seed=seed, max_tokens=length - cut)
                request = engine.submit(ids[:cut].tolist(), sampling)
            rows.append((ids[:cut], request))
        engine.run()
        written = []
        for prompt, request in rows:
            drawn = [] if request is None else request.token_ids
            ids = np.concatenate([prompt, np.asarray(drawn, dtype=prompt.dtype)])
            written.append((ids, np.arange(len(ids)) >= len(prompt)))
        return collate(written)
