"""Where a training run gets the target's hidden states: computed as it goes, or read from a cache.

Shape suffixes: B rows, T tokens, F features (all taps), H hidden, V vocabulary.
"""

from __future__ import annotations

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

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> FeatureBatch: ...

    def text(self, number: int, rank: int = 0, world_size: int = 1) -> Batch:
        """The same without features, where these cost anything."""
        ...


class OnlineFeatures:
    """Runs the target on every batch."""

    def __init__(self, target: Target, batches: Batches, taps: tuple[int, ...]) -> None:
        self._target, self._batches, self._taps = target, batches, taps

    @property
    def num_tokens_per_epoch(self) -> int:
        return self._batches.num_tokens_per_epoch

    @property
    def num_batches_per_epoch(self) -> int:
        return self._batches.num_batches_per_epoch

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> FeatureBatch:
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


# Text that a draft model in training goes on with itself, scored by the target (on-policy: DistillSpec 2310.08461).
#
# Every so many batches of the data are cut, each row at a place drawn among those that count, and what follows is drawn
# from the draft model as it stands. Which batches, where they are cut and what is drawn depends on the seed, the number
# of the batch and the weights alone, so that a resumed run reads what an unbroken one would.
#
# Shape suffixes: B rows, T tokens.


class OwnText:
    """A ``FeatureSource`` some of whose batches the draft model writes.

    Args:
        source: of the data, and of all other batches.
        target: scores what was written.
        taps: that the net reads.
        writer: the draft model.
        share: of the batches.
        seed: of every choice here.
    """

    def __init__(
        self,
        source: FeatureSource,
        target: Target,
        taps: tuple[int, ...],
        writer: Target,
        share: float,
        seed: int,
    ) -> None:
        self._source, self._target, self._taps = source, target, taps
        self._writer, self._share, self._seed = writer, share, seed

    @property
    def num_tokens_per_epoch(self) -> int:
        return self._source.num_tokens_per_epoch

    @property
    def num_batches_per_epoch(self) -> int:
        return self._source.num_batches_per_epoch

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> FeatureBatch:
        if np.random.default_rng((self._seed, number, 2)).random() >= self._share:
            return self._source.batch(number, rank, world_size)
        text = self.text(number, rank, world_size)
        return scored(self._target, self._written(text, number, rank), self._taps)

    def text(self, number: int, rank: int = 0, world_size: int = 1) -> Batch:
        """The data's, which is cut here."""
        return self._source.text(number, rank, world_size)

    def _written(self, text: Batch, number: int, rank: int) -> Batch:
        """The rows with other ends; a row in which nothing counts stays as it is."""
        rng = np.random.default_rng((self._seed, number, 3, rank))
        engine = Engine(Decoder(self._writer))
        rows = []
        for ids, mask, length in zip(
            text.ids.cpu().numpy(), text.mask.cpu().numpy(), text.lengths.tolist(), strict=True
        ):
            places = np.flatnonzero(mask[:length])
            places = places[(places > 0) & (places < self._writer.max_length)]
            cut, seed = int(rng.choice(places)) if len(places) else length, int(rng.integers(2**31))
            prompt, request = ids[:cut], None
            if cut < length:
                sampling = Sampling(temperature=1.0, seed=seed, max_tokens=length - cut)
                request = engine.submit(prompt.tolist(), sampling)
            rows.append((prompt, request))
        engine.run()
        found = []
        for prompt, request in rows:
            drawn = [] if request is None else request.token_ids
            ids = np.concatenate([prompt, np.asarray(drawn, dtype=prompt.dtype)])
            found.append((ids, np.arange(len(ids)) >= len(prompt)))
        return collate(found)
