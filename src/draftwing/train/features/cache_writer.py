"""Writing a cache of the target's hidden states: shard by shard, so that a killed run goes on where it was."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from draftwing.errors import ConfigError, DataError, NumericsError
from draftwing.heads.write import write_fix
from draftwing.model.target import Target
from draftwing.nets.eagle_config import TargetId
from draftwing.train.checkpoint import write_atomically
from draftwing.train.data.batches import Batches
from draftwing.train.features.cache import DTYPES, INDEX, CacheInfo, Shard
from draftwing.train.features.source import hidden_states
from draftwing.train.lock import locked

__all__ = ["CacheForm", "CacheSize", "CacheWritten", "estimate", "write_cache"]

SHARD_BYTES = 256 * 2**20
_BYTES_PER_ROW = 16  # its length and its number


@dataclass(frozen=True)
class CacheSize:
    """How large a cache is, or would be."""

    num_tokens: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.num_tokens:,} tokens, {_readable(self.num_bytes)}"


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
    per_token = _bytes_per_token(target, _states(target, taps), dtype)
    return CacheSize(
        plan.num_tokens_per_epoch, plan.num_tokens_per_epoch * per_token + len(plan.lengths) * _BYTES_PER_ROW
    )


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
    folder, states = Path(folder), _states(target, taps)
    shards = _cut(batches, _bytes_per_token(target, states, form.dtype), form.shard_bytes)
    info = CacheInfo(
        target=identity,
        states=states,
        dtype=_name(form.dtype),
        max_length=batches.max_length,
        seed=batches.seed,
        validation_share=validation_share,
        num_rows=len(batches.plan.lengths),
        num_tokens=batches.num_tokens_per_epoch,
        num_shards=len(shards),
    )
    writer = _Writer(folder, target, batches, shards, info)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, DataError):
            num_kept = _complete(writer, folder, info, on_progress)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{folder}: the cache cannot be written ({error}): {write_fix(error)}; what is whole stays, and the same "
            f"command goes on from there"
        ) from error
    return CacheWritten(estimate(target, batches, taps, form.dtype), info.num_shards, num_kept)


def _complete(writer: _Writer, folder: Path, info: CacheInfo, on_progress: Callable[[int, int], None] | None) -> int:
    """Write the shards that are missing, and the index; how many were there already."""
    missing = writer.missing()
    left = [writer.size(number) for number in missing]
    needed = sum(size.num_bytes for size in left)
    if needed > (free := shutil.disk_usage(folder).free):
        raise DataError(
            f"{folder}: the cache needs {needed:,} bytes ({_readable(needed)}) more, and the disk has {free:,} "
            f"bytes ({_readable(free)}) free: make room, write elsewhere, or cache less data"
        )
    done = info.num_tokens - sum(size.num_tokens for size in left)
    for number in missing:
        for num_tokens in writer.write(number):
            done += num_tokens
            if on_progress is not None:
                on_progress(done, info.num_tokens)
    write_atomically(folder / INDEX, json.dumps(info.to_dict(), indent=2) + "\n")
    return info.num_shards - len(missing)


def _cut(batches: Batches, bytes_per_token: int, shard_bytes: int) -> list[list[int]]:
    """Which batches each shard holds: the same whenever it is written."""
    shards: list[list[int]] = [[]]
    room = shard_bytes
    for number, rows in enumerate(batches.plan.epoch(0)):
        num_bytes = int(batches.plan.lengths[rows].sum()) * bytes_per_token
        if shards[-1] and num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(number)
        room -= num_bytes
    return shards


class _Writer:
    """Makes the shards of one cache, each by itself."""

    def __init__(
        self, folder: Path, target: Target, batches: Batches, shards: Sequence[Sequence[int]], info: CacheInfo
    ) -> None:
        self._folder, self._target, self._batches, self._info = folder, target, batches, info
        self._shards, self._rows = shards, batches.plan.epoch(0)

    def size(self, number: int) -> CacheSize:
        """Of a shard."""
        lengths = self._batches.plan.lengths[self._rows_of(number)]
        per_token = _bytes_per_token(self._target, self._info.states, DTYPES[self._info.dtype])
        return CacheSize(int(lengths.sum()), int(lengths.sum()) * per_token + len(lengths) * _BYTES_PER_ROW)

    def _rows_of(self, number: int) -> np.ndarray:
        return np.concatenate([self._rows[batch] for batch in self._shards[number]])

    def missing(self) -> list[int]:
        """The shards that are not there.

        Raises:
            DataError: one is there, and is damaged or belongs to another cache.
        """
        names = [self._info.shard(number) for number in range(self._info.num_shards)]
        for path in sorted(self._folder.glob("features-*.safetensors")):
            if path.name not in names:
                raise _foreign(path, next(iter(Shard(path).info.differing(self._info)), "by its name"))
        missing = [number for number, name in enumerate(names) if not self._is_complete(self._folder / name, number)]
        kept = [name for number, name in enumerate(names) if number not in missing]
        if kept:  # one is enough: other weights are others everywhere
            Shard(self._folder / kept[0]).check_weights(self._target)
        return missing

    def _is_complete(self, path: Path, number: int) -> bool:
        if not path.exists():
            return False
        shard = Shard(path)
        if differing := shard.info.differing(self._info):
            raise _foreign(path, differing[0])
        expected = self._contents(number)
        if not all(np.array_equal(getattr(shard, name), expected[name].numpy()) for name in expected):
            raise _foreign(path, "it was made of other data")
        return True

    def _contents(self, number: int) -> dict[str, Tensor]:
        """All of a shard but its states."""
        ids, masks, lengths = [], [], []
        for batch in map(self._batches.batch, self._shards[number]):
            ids.append(batch.ids[batch.real].int())
            masks.append(batch.mask[batch.real])
            lengths.append(batch.lengths)
        rows = torch.from_numpy(self._rows_of(number))
        return {"ids": torch.cat(ids), "mask": torch.cat(masks), "lengths": torch.cat(lengths), "rows": rows}

    def write(self, number: int) -> Iterator[int]:
        """Make a shard; yields the tokens of each batch as it is done."""
        target, path = self._target, self._folder / self._info.shard(number)
        taps, dtype = self._info.states, DTYPES[self._info.dtype]
        states = torch.empty(self.size(number).num_tokens, len(taps) * target.hidden_size, dtype=dtype)
        done = 0
        for batch in map(self._batches.batch, self._shards[number]):
            features = hidden_states(target, batch.ids.to(target.device), taps)
            found = features.to(dtype).cpu()[batch.real]
            states[done : done + len(found)] = found
            done += len(found)
            yield len(found)
        if not torch.isfinite(states).all():
            raise NumericsError(
                f"{target.name} gives hidden states that are not finite in {target.dtype}: run it with --dtype "
                f"{'float32' if target.dtype != torch.float32 else 'float64'}"
            )
        partial = path.with_name(path.name + ".partial")
        try:
            save_file(
                {"states": states, **self._contents(number)},
                partial,
                metadata={"draftwing": json.dumps(self._info.to_dict())},
            )
            with partial.open("rb+") as file:
                os.fsync(file.fileno())  # or the name might reach the disk before the numbers
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def _foreign(path: Path, why: str) -> DataError:
    return DataError(
        f"{path}: belongs to another cache ({why}): choose another folder, delete this one, or give what it was made "
        f"with to go on with it"
    )


def _states(target: Target, taps: Sequence[int]) -> tuple[int, ...]:
    """The hidden states to keep, each once, in the order in which they are asked for."""
    wrong = [tap for tap in taps if not 0 <= tap <= target.num_layers]
    if wrong:
        raise ConfigError(
            f"there is no hidden state {wrong[0]} in {target.name}, which has {target.num_layers} layers: choose taps "
            f"from 0 to {target.num_layers}"
        )
    return tuple(dict.fromkeys((*(tap for tap in taps if tap != target.num_layers), target.num_layers)))


def _bytes_per_token(target: Target, states: tuple[int, ...], dtype: torch.dtype) -> int:
    _name(dtype)
    return len(states) * target.hidden_size * dtype.itemsize + 5  # an id and its mask


def _name(dtype: torch.dtype) -> str:
    for name, known in DTYPES.items():
        if dtype == known:
            return name
    raise ConfigError(f"a cache is kept in {' or '.join(DTYPES)}, found {dtype}: choose one of these")


def _readable(num_bytes: float) -> str:
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 1000:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1000:,.1f} TB"
