"""A cache that grows row by row, in any order, as texts are written; how many there will be, nobody knows.

Rows come in shards. A shard is there whole or not at all, and the index is written anew after each, so that what has
been written can be read at any time. What a row is a row *of* is its key: a run that goes on asks which keys are there.

Shape suffixes: N tokens of rows one after another, T tokens, S hidden states, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwing.errors import DataError
from draftwing.model.target import Target
from draftwing.nets.eagle_config import TargetId
from draftwing.train.data.corpus import Example
from draftwing.train.features.cache import DTYPES, CacheInfo, Shard
from draftwing.train.features.source import best_tokens
from draftwing.train.features.store import CacheFolder, CacheSize, size_of, states_of, writing_cache
from draftwing.train.lock import locked

__all__ = ["GrowingCache", "Row"]

_SHARD_BYTES = 128 * 2**20  # kept in memory until they are written, twice over while they are


@dataclass(frozen=True, eq=False)
class Row:
    """A row of a cache.

    Attributes:
        example: ids and mask (T,).
        states: (T, S * H); 0 where the target never read the last token.
        greedy_from: every token from this position on is known to be the target's best after those before it.
    """

    example: Example
    states: Tensor
    greedy_from: int | None = None


class GrowingCache:
    """The rows of ``target``'s texts in a folder, kept in bfloat16.

    Args:
        folder: made where there is none.
        target: whose states they are; ``identity`` tells readers which it is.
        taps: which hidden states are kept, beside the target's last.
        shard_bytes: what a shard has at least, but for the last one.

    Attributes:
        states: which hidden states a row has.

    Raises:
        ConfigError: taps that the target does not have.
    """

    def __init__(
        self, folder: Path, target: Target, taps: Sequence[int], *, identity: TargetId, shard_bytes: int = _SHARD_BYTES
    ) -> None:
        self.states = states_of(target, taps)
        info = CacheInfo(
            target=identity,
            quantize=target.quantized,
            states=self.states,
            dtype="bfloat16",
            max_length=None,
            seed=0,
            validation_share=0.0,
        )
        self._folder, self._target, self._shard_bytes = CacheFolder(folder, info), target, shard_bytes
        self._sizes: dict[int, tuple[int, int]] = {}  # rows and tokens of each shard that is there
        self._places: dict[int, tuple[Shard, int]] = {}  # by key: the rows that were there before this run

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Look at what is there, and let nobody else write until this ends.

        Raises:
            DataError: another process writes there, it holds another cache or a damaged one, or the disk has no room
                for another shard.
        """
        path = self._folder.path
        with writing_cache(path):
            path.mkdir(parents=True, exist_ok=True)
        with locked(path, DataError):
            shards = self._folder.shards()
            if shards:  # one is enough: other weights are others everywhere
                next(iter(shards.values())).check_weights(self._target)
            for number, shard in shards.items():
                self._sizes[number] = len(shard.rows), len(shard.ids)
                self._places |= {key: (shard, place) for place, key in enumerate(shard.rows.tolist())}
            self.check_room()
            yield

    def has(self, key: int) -> bool:
        """Whether the row was there before this run."""
        return key in self._places

    def ids(self, key: int) -> np.ndarray:
        """(T,) the tokens of a row that was there."""
        shard, place = self._places[key]
        start = int(shard.starts[place])
        found: np.ndarray = shard.ids[start : start + int(shard.lengths[place])]
        return found

    @property
    def free_number(self) -> int:
        """Of the next shard: the first that is not there."""
        return next(number for number in range(len(self._sizes) + 1) if number not in self._sizes)

    @property
    def size(self) -> CacheSize:
        """Of what is there."""
        rows, tokens = (sum(each[i] for each in self._sizes.values()) for i in range(2))
        return self.size_of(rows, tokens)

    @property
    def num_rows(self) -> int:
        """That are there."""
        return sum(rows for rows, _ in self._sizes.values())

    def size_of(self, num_rows: int, num_tokens: int) -> CacheSize:
        """What so many rows would take."""
        return size_of(self._folder.info, num_rows, num_tokens)

    def free_bytes(self) -> int:
        """Of the disk. The folder must be there."""
        return self._folder.free_bytes()

    def is_enough(self, rows: Sequence[Row]) -> bool:
        """Whether they fill a shard."""
        return self.size_of(len(rows), sum(len(row.states) for row in rows)).num_bytes >= self._shard_bytes

    def write(self, number: int, rows: dict[int, Row]) -> None:
        """Write a shard, and the index. Done again with the same number and rows, it changes nothing.

        Args:
            rows: by key.

        Raises:
            DataError: the disk is full, or the folder not writable.
            NumericsError: states that are not finite.
        """
        folder, found = self._folder, list(rows.values())
        states = torch.cat([row.states for row in found]).to(DTYPES[folder.info.dtype])
        folder.check_finite(states, self._target)
        contents = {
            "states": states,
            "best": self._best(found, states[:, -self._target.hidden_size :]),
            "ids": torch.from_numpy(np.concatenate([row.example.ids for row in found]).astype(np.int32)),
            "mask": torch.from_numpy(np.concatenate([row.example.mask for row in found])),
            "lengths": torch.tensor([len(row.states) for row in found]),
            "rows": torch.tensor(list(rows)),
        }
        with writing_cache(folder.path):
            folder.write(number, contents)
            self._sizes[number] = len(found), len(states)
            numbers = sorted(self._sizes)
            folder.write_index(numbers, self.num_rows, self.size.num_tokens)

    def _best(self, rows: Sequence[Row], last: Tensor) -> Tensor:
        """(N, H) -> (N,) int32: see ``Shard.best``. The LM head runs only where nothing else tells: it is a quarter of
        the time of answering otherwise."""
        found = torch.from_numpy(np.concatenate([np.append(row.example.ids[1:], 0) for row in rows]).astype(np.int32))
        wanted = torch.zeros(len(found), dtype=torch.bool)
        start = 0
        for row in rows:
            unknown = torch.from_numpy(row.example.mask[1 : row.greedy_from])
            wanted[start : start + len(unknown)] = unknown
            start += len(row.example.ids)
        if wanted.any():
            found[wanted] = best_tokens(self._target, last[wanted])
        return found

    def check_room(self) -> None:
        """Raise DataError unless the disk has room for one more shard: known before it is worked for."""
        self._folder.check_room(self._shard_bytes, "the next shard of the cache")
