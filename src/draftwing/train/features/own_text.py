"""Text that a draft model in training goes on with itself, scored by the target (on-policy: DistillSpec 2310.08461).

Every so many batches of the data are cut, each row at a place drawn among those that count, and what follows is drawn
from the draft model as it stands. Which batches, where they are cut and what is drawn depends on the seed, the number
of the batch and the weights alone, so that a resumed run reads what an unbroken one would.

Shape suffixes: B rows, T tokens.
"""

from __future__ import annotations

import numpy as np

from draftwing.engine.decode import Decoder
from draftwing.engine.engine import Engine
from draftwing.model.target import Target
from draftwing.sampling import Sampling
from draftwing.train.data.batches import Batch, collate
from draftwing.train.features.source import FeatureBatch, FeatureSource, scored

__all__ = ["OwnText"]


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
        """See ``FeatureSource``."""
        return self._source.num_tokens_per_epoch

    @property
    def num_batches_per_epoch(self) -> int:
        """See ``FeatureSource``."""
        return self._source.num_batches_per_epoch

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> FeatureBatch:
        """See ``FeatureSource``."""
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
