"""Writing a cache of the target's hidden states: shard by shard, so that a killed run goes on where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwing.errors import DataError
from draftwing.heads.identity import target_id
from draftwing.model.target import Target
from draftwing.nets.eagle_config import TargetId
from draftwing.train.data.batches import Batches
from draftwing.train.features.cache import DTYPES, CacheInfo, Shard
from draftwing.train.features.source import read_text
from draftwing.train.features.store import (
    SHARD_BYTES,
    CacheFolder,
    CacheSize,
    dtype_name,
    size_of,
    states_of,
    writing_cache,
)
from draftwing.train.lock import locked

__all__ = ["CacheForm", "CacheWritten", "estimate", "write_cache"]


@dataclass(frozen=True)
class CacheForm:
    """How a cache keeps its numbers: ``dtype`` bfloat16 or float32, shards of ``shard_bytes`` or one batch each."""

    dtype: torch.dtype = torch.bfloat16
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True)
class CacheWritten:
    """What ``write_cache`` did.

    Attributes:
        size: of the whole cache.
        num_shards: in all; ``num_kept`` were there already.
    """

    size: CacheSize
    num_shards: int
    num_kept: int


def estimate(target: Target, batches: Batches, taps: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> CacheSize:
    """What ``write_cache`` would write, but for a few kilobytes of headers. Arguments and errors as there."""
    plan = batches.plan
    info = _info(target, batches, taps, dtype, target_id(target), 0.0)
    return size_of(info, len(plan.lengths), plan.num_tokens_per_epoch)


def write_cache(
    folder: Path,
    target: Target,
    batches: Batches,
    taps: Sequence[int],
    *,
    identity: TargetId,
    validation_share: float = 0.0,
    form: CacheForm = CacheForm(),
    on_progress: Callable[[int, int], None] | None = None,
) -> CacheWritten:
    """Run the target over one epoch of ``batches`` and keep its hidden states; go on where an earlier call stopped.

    Args:
        folder: made where there is none.
        taps: which hidden states are kept, beside the target's last.
        identity: of ``target``, kept for those who read the cache.
        validation_share: of the data, held out of ``batches`` by ``split`` with their seed: kept for readers too.
        form: how the numbers are kept.
        on_progress: called with the tokens done and the tokens in all.

    Raises:
        ConfigError: taps that the target does not have, or another dtype.
        DataError: the disk has no room, the folder cannot be written, another process writes to it, or it holds another
            cache or a damaged one.
        NumericsError: hidden states that are not finite.
    """
    info = _info(target, batches, taps, form.dtype, identity, validation_share)
    writer = _Writer(CacheFolder(folder, info), target, batches, form.shard_bytes)
    with writing_cache(Path(folder)):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with locked(Path(folder), DataError):
            num_kept = writer.complete(on_progress)
    return CacheWritten(estimate(target, batches, taps, form.dtype), len(writer.shards), num_kept)


def _info(
    target: Target, batches: Batches, taps: Sequence[int], dtype: torch.dtype, identity: TargetId, share: float
) -> CacheInfo:
    return CacheInfo(
        target=identity,
        quantize=target.quantized,
        states=states_of(target, taps),
        dtype=dtype_name(dtype),
        max_length=batches.max_length,
        seed=batches.seed,
        validation_share=share,
    )


class _Writer:
    """Makes the shards of one cache, each by itself. ``shards``: the numbers of the batches that each holds."""

    def __init__(self, folder: CacheFolder, target: Target, batches: Batches, shard_bytes: int) -> None:
        self._folder, self._target, self._batches = folder, target, batches
        self._rows = batches.plan.epoch(0)
        self.shards: list[list[int]] = [[]]
        room = shard_bytes
        for number, rows in enumerate(self._rows):  # the same whenever it is written
            num_bytes = self._size(rows).num_bytes
            if self.shards[-1] and num_bytes > room:
                self.shards.append([])
                room = shard_bytes
            self.shards[-1].append(number)
            room -= num_bytes

    def _size(self, rows: np.ndarray) -> CacheSize:
        return size_of(self._folder.info, len(rows), int(self._batches.plan.lengths[rows].sum()))

    def complete(self, on_progress: Callable[[int, int], None] | None) -> int:
        """Write the shards that are missing, and the index; how many were there already."""
        missing, plan = self._missing(), self._batches.plan
        left = [self._size(self._rows_of(number)) for number in missing]
        self._folder.check_room(sum(size.num_bytes for size in left), "the cache")
        done = plan.num_tokens_per_epoch - sum(size.num_tokens for size in left)
        for number in missing:
            for num_tokens in self._write(number):
                done += num_tokens
                if on_progress is not None:
                    on_progress(done, plan.num_tokens_per_epoch)
        self._folder.write_index(range(len(self.shards)), len(plan.lengths), plan.num_tokens_per_epoch)
        return len(self.shards) - len(missing)

    def _rows_of(self, number: int) -> np.ndarray:
        return np.concatenate([self._rows[batch] for batch in self.shards[number]])

    def _missing(self) -> list[int]:
        """The shards that are not there.

        Raises:
            DataError: one is there, and is damaged or belongs to another cache.
        """
        found = self._folder.shards()
        for number, shard in found.items():
            if number >= len(self.shards) or not np.array_equal(np.sort(shard.rows), np.sort(self._rows_of(number))):
                raise self._folder.foreign(shard.path, "its rows are batched otherwise, or of other data")
            self._check_contents(shard, number)
        if found:  # one is enough: other weights are others everywhere
            next(iter(found.values())).check_weights(self._target)
        return [number for number in range(len(self.shards)) if number not in found]

    def _check_contents(self, shard: Shard, number: int) -> None:
        expected = self._contents(number)
        if not all(np.array_equal(getattr(shard, name), expected[name].numpy()) for name in expected):
            raise self._folder.foreign(shard.path, "it was made of other data")

    def _contents(self, number: int) -> dict[str, Tensor]:
        """All of a shard but its states."""
        ids, masks, lengths = [], [], []
        for batch in map(self._batches.batch, self.shards[number]):
            ids.append(batch.ids[batch.real].int())
            masks.append(batch.mask[batch.real])
            lengths.append(batch.lengths)
        rows = torch.from_numpy(self._rows_of(number))
        return {"ids": torch.cat(ids), "mask": torch.cat(masks), "lengths": torch.cat(lengths), "rows": rows}

    def _write(self, number: int) -> Iterator[int]:
        """Make a shard; yields the tokens of each batch as it is done."""
        target, info = self._target, self._folder.info
        num_tokens, width = self._size(self._rows_of(number)).num_tokens, len(info.states) * target.hidden_size
        states = torch.empty(num_tokens, width, dtype=DTYPES[info.dtype])
        best = torch.empty(num_tokens, dtype=torch.int32)
        done = 0
        for batch in map(self._batches.batch, self.shards[number]):
            features, following = read_text(target, batch.ids.to(target.device), info.states)
            found = features.to(states.dtype).cpu()[batch.real]
            states[done : done + len(found)] = found
            best[done : done + len(found)] = following.cpu()[batch.real]
            done += len(found)
            yield len(found)
        self._folder.check_finite(states, target)
        self._folder.write(number, {"states": states, "best": best, **self._contents(number)})
