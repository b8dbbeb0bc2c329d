"""Batches as a function of (seed, number) alone, so that a resumed run reads what an unbroken one would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.errors import ConfigError, DataError
from draftwing.train.data.corpus import Corpus, Example

__all__ = ["Batch", "Batches", "Plan", "collate"]

# Rows of one batch differ by at most this factor in length (but for those carried up), which bounds the padding.
_GROWTH = 1.15


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows that are trained on together.

    Attributes:
        ids: (B, T) int64, 0 behind the end of a row.
        mask: (B, T) bool, see ``Example``; False behind the end of a row.
        lengths: (B,) int64.
    """

    ids: Tensor
    mask: Tensor
    lengths: Tensor

    @property
    def real(self) -> Tensor:
        """(B, T) bool: False behind the end of a row."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]

    def to(self, device: torch.device) -> Batch:
        """On a device."""
        return Batch(self.ids.to(device), self.mask.to(device), self.lengths.to(device))

    def runnable(self) -> Batch:
        """With at least one row and 3 tokens, where an unroll has its first entry; what is added does not count.

        A process must take part in every update, even where it has no rows of a batch, or only tiny ones.
        """
        rows, tokens = max(1 - len(self.ids), 0), max(3 - self.ids.shape[1], 0)
        if not rows and not tokens:
            return self
        padding = (0, tokens, 0, rows)
        return Batch(F.pad(self.ids, padding), F.pad(self.mask, padding), F.pad(self.lengths, (0, rows)))


def collate(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Batch:
    """Ids and masks (T,) of rows as one padded batch; (0, 1) of no rows."""
    longest = max((len(ids) for ids, _ in rows), default=1)
    padded = torch.zeros(len(rows), longest, dtype=torch.int64)
    masks = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, (ids, mask) in enumerate(rows):
        padded[i, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
        masks[i, : len(ids)] = torch.from_numpy(mask)
    return Batch(padded, masks, torch.tensor([len(ids) for ids, _ in rows], dtype=torch.int64))


class Plan:
    """Which rows share a batch: others in every epoch, as a function of (seed, epoch) alone.

    Rows of like length share a batch: each of the length classes is shuffled and filled into batches, and what is left
    over rides with the next longer class. The number of batches is therefore the same in every epoch.

    Args:
        lengths: (R,) the tokens of each row.
        tokens_per_batch: at most, padding counted.
        seed: of all shuffling.

    Raises:
        ConfigError: a batch leaves no room for the longest row.
        DataError: there is nothing to train on.
    """

    def __init__(self, lengths: np.ndarray, tokens_per_batch: int, seed: int = 0) -> None:
        if seed < 0:
            raise ConfigError(f"seed must be at least 0, found {seed}")
        if not len(lengths):
            raise DataError("there is nothing to train on: give dialogues with answers within max_length, or documents")
        longest = int(lengths.max())
        if tokens_per_batch < longest:
            raise ConfigError(
                f"tokens_per_batch is {tokens_per_batch}, and the longest row has {longest} tokens: raise it to at "
                f"least {longest}, or lower max_length"
            )
        limits = [longest]
        while limits[-1] > lengths.min():
            limits.append(min(limits[-1] - 1, int(limits[-1] / _GROWTH)))
        self.lengths, self._seed = lengths, seed
        self._limits = np.asarray(limits[::-1])  # the greatest length of each class, ascending
        self._rows_per_batch = [tokens_per_batch // int(limit) for limit in self._limits]
        self._latest = (0, self.epoch(0))

    @property
    def num_tokens_per_epoch(self) -> int:
        """Tokens in the rows of an epoch, padding not counted."""
        return int(self.lengths.sum())

    @property
    def num_batches_per_epoch(self) -> int:
        """Batches until every row was read."""
        return len(self._latest[1])

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """The rows of each batch of an epoch."""
        rng = np.random.default_rng((self._seed, epoch, 0))
        classes = np.searchsorted(self._limits, self.lengths)
        batches: list[np.ndarray] = []
        carried = np.empty(0, dtype=np.int64)
        for number, size in enumerate(self._rows_per_batch):
            # The carried ones go first: rows must not be pushed up into the longest class time and again.
            rows = np.concatenate([carried, rng.permutation(np.flatnonzero(classes == number))])
            num_full = len(rows) // size
            batches += [rows[i * size : (i + 1) * size] for i in range(num_full)]
            carried = rows[num_full * size :]
        if len(carried):
            batches.append(carried)
        return [batches[i] for i in rng.permutation(len(batches))]

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> tuple[int, list[int]]:
        """The epoch and the rows of a batch, counted over all epochs, or of one rank's share of it.

        The rows of all ranks are those of the whole batch. A rank has none where there are fewer rows than ranks:
        that may happen in the one batch of an epoch that the last rows do not fill.

        Raises:
            ConfigError: a number or rank that does not exist, or batches too small for so many ranks.
        """
        if number < 0 or not 0 <= rank < world_size:
            raise ConfigError(
                f"batch {number} for rank {rank} of {world_size} does not exist: expected a number of at least 0 and a "
                f"rank below world_size"
            )
        if world_size > self._rows_per_batch[-1]:
            raise ConfigError(
                f"a batch has room for {self._rows_per_batch[-1]} of the longest rows, and there are {world_size} "
                f"ranks: raise tokens_per_batch to {world_size * int(self._limits[-1])}, or lower max_length"
            )
        epoch, index = divmod(number, self.num_batches_per_epoch)
        if self._latest[0] != epoch:
            self._latest = (epoch, self.epoch(epoch))
        return epoch, self._latest[1][index][rank::world_size].tolist()


class Batches:
    """Cuts a corpus into batches, each epoch in another way: see ``Plan``.

    Rows are the dialogues, and windows of the stream of documents. An epoch takes the stream as a ring and starts
    cutting at another place of it, so that it has every token once, and always the same number of windows.

    Args:
        corpus: or its dialogues alone.
        tokens_per_batch: at most, padding counted.
        max_length: of a window, and of a dialogue: longer ones are cut.
        seed: of all shuffling.

    Attributes:
        plan: which rows share a batch.

    Raises:
        ConfigError: ``max_length`` leaves no room for a prediction, or a batch none for the longest row.
        DataError: there is nothing to train on.
    """

    def __init__(
        self, corpus: Corpus | Sequence[Example], tokens_per_batch: int, max_length: int, seed: int = 0
    ) -> None:
        corpus = corpus if isinstance(corpus, Corpus) else Corpus(tuple(corpus))
        self._stream, self._prefix = corpus.stream, np.asarray(corpus.prefix, dtype=np.int32)
        self._window = max_length - len(self._prefix)
        if max_length < 2 or self._window < 1:
            raise ConfigError(f"max_length must be at least {max(2, len(self._prefix) + 1)}, found {max_length}")
        self.max_length, self.seed = max_length, seed
        self._examples = [example for example in corpus.examples if example.mask[:max_length].any()]
        full, rest = divmod(len(self._stream), self._window)
        windows = [self._window] * full + [rest] * (rest > 0)
        lengths = np.asarray(
            [min(len(example.ids), max_length) for example in self._examples]
            + [len(self._prefix) + length for length in windows],
            dtype=np.int64,
        )
        self.plan = Plan(lengths, tokens_per_batch, seed)

    @property
    def num_tokens_per_epoch(self) -> int:
        """Tokens in the rows of an epoch, padding not counted."""
        return self.plan.num_tokens_per_epoch

    @property
    def num_batches_per_epoch(self) -> int:
        """Batches until every row was read."""
        return self.plan.num_batches_per_epoch

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> Batch:
        """The batch of this number, counted over all epochs, or one rank's rows of it (maybe none): see ``Plan.batch``.

        Raises:
            ConfigError: a number or rank that does not exist, or batches too small for so many ranks.
        """
        epoch, rows = self.plan.batch(number, rank, world_size)
        start = self._start(epoch)
        return collate([self._row(row, start) for row in rows])

    def _start(self, epoch: int) -> int:
        """Where the epoch starts to cut the stream."""
        return int(np.random.default_rng((self.seed, epoch, 1)).integers(max(1, len(self._stream))))

    def _row(self, row: int, start: int) -> tuple[np.ndarray, np.ndarray]:
        if row < len(self._examples):
            example = self._examples[row]
            return example.ids[: self.max_length], example.mask[: self.max_length]
        at = (row - len(self._examples)) * self._window
        places = np.arange(at, min(at + self._window, len(self._stream))) + start
        ids = np.concatenate([self._prefix, self._stream.take(places, mode="wrap")])
        mask = np.ones(len(ids), dtype=bool)
        mask[: max(1, len(self._prefix))] = False
        return ids, mask
