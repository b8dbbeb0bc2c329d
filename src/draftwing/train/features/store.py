"""What both writers of a cache share: its folder, where shards come whole or not at all, and how large it gets."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from draftwing.errors import ConfigError, DataError, NumericsError
from draftwing.heads.write import write_fix
from draftwing.model.target import Target
from draftwing.train.checkpoint import write_atomically
from draftwing.train.features.cache import DTYPES, INDEX, CacheIndex, CacheInfo, Shard, shard_name

__all__ = ["SHARD_BYTES", "CacheFolder", "CacheSize", "dtype_name", "size_of", "states_of", "writing_cache"]

SHARD_BYTES = 256 * 2**20
_BYTES_PER_ROW = 16  # its length and its key


@dataclass(frozen=True)
class CacheSize:
    """How large a cache is, or would be."""

    num_tokens: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.num_tokens:,} tokens, {_readable(self.num_bytes)}"


class CacheFolder:
    """The folder of a cache that is being written."""

    def __init__(self, path: Path, info: CacheInfo) -> None:
        self.path, self.info = Path(path), info

    def shards(self) -> dict[int, Shard]:
        """The shards that are there, by number.

        Raises:
            DataError: one is damaged or belongs to another cache.
        """
        found = {}
        for path in sorted(self.path.glob("features-*.safetensors")):
            shard, number = Shard(path), path.stem.removeprefix("features-")
            if differing := shard.info.differing(self.info):
                raise self.foreign(path, differing[0])
            if not number.isdecimal() or path.name != shard_name(int(number) - 1):
                raise self.foreign(path, "by its name")
            found[int(number) - 1] = shard
        return found

    def foreign(self, path: Path, why: str) -> DataError:
        """What is wrong with a shard of another cache."""
        return DataError(
            f"{path}: belongs to another cache ({why}): choose another folder, delete this one, or give what it was "
            f"made with to go on with it"
        )

    def check_finite(self, states: Tensor, target: Target) -> None:
        """Raise NumericsError unless all of the states are finite."""
        if not torch.isfinite(states).all():
            raise NumericsError(
                f"{target.name} gives hidden states that are not finite in {target.dtype}: run it with --dtype "
                f"{'float32' if target.dtype != torch.float32 else 'float64'}"
            )

    def write(self, number: int, contents: Mapping[str, Tensor]) -> None:
        """Write a shard, in place of one of this number. ``contents``: the tensors of a ``Shard``."""
        path = self.path / shard_name(number)
        partial = path.with_name(path.name + ".partial")
        try:
            save_file(dict(contents), partial, metadata={"draftwing": json.dumps(self.info.to_dict())})
            with partial.open("rb+") as file:
                os.fsync(file.fileno())  # or the name might reach the disk before the numbers
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def write_index(self, numbers: Sequence[int], num_rows: int, num_tokens: int) -> None:
        """Say what the cache is made of; from here on it can be read."""
        index = CacheIndex(self.info, tuple(map(shard_name, numbers)), num_rows, num_tokens)
        write_atomically(self.path / INDEX, json.dumps(index.to_dict(), indent=2) + "\n")

    def check_room(self, num_bytes: int, what: str) -> None:
        """Raise DataError unless the disk has room for so many bytes more, which ``what`` needs."""
        if num_bytes > (free := self.free_bytes()):
            raise DataError(
                f"{self.path}: {what} needs {num_bytes:,} bytes ({_readable(num_bytes)}) more, and the disk has "
                f"{free:,} bytes ({_readable(free)}) free: make room, write elsewhere, or cache less data"
            )

    def free_bytes(self) -> int:
        """Of the disk."""
        return shutil.disk_usage(self.path).free


@contextmanager
def writing_cache(folder: Path) -> Iterator[None]:
    """Around what writes to a cache: raises DataError where the disk is full, or the folder not writable."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{folder}: the cache cannot be written ({error}): {write_fix(error)}; what is whole stays, and the same "
            f"command goes on from there"
        ) from error


def states_of(target: Target, taps: Sequence[int]) -> tuple[int, ...]:
    """The hidden states to keep for ``taps``: each once, in their order, and the target's last.

    Raises:
        ConfigError: a tap that the target does not have.
    """
    wrong = [tap for tap in taps if not 0 <= tap <= target.num_layers]
    if wrong:
        raise ConfigError(
            f"there is no hidden state {wrong[0]} in {target.name}, which has {target.num_layers} layers: choose taps "
            f"from 0 to {target.num_layers}"
        )
    return tuple(dict.fromkeys((*(tap for tap in taps if tap != target.num_layers), target.num_layers)))


def size_of(info: CacheInfo, num_rows: int, num_tokens: int) -> CacheSize:
    """Of a cache, but for a few kilobytes of headers."""
    per_token = (
        len(info.states) * info.target.hidden_size * DTYPES[info.dtype].itemsize + 9
    )  # an id, its mask, and the best token after it
    return CacheSize(num_tokens, num_tokens * per_token + num_rows * _BYTES_PER_ROW)


def dtype_name(dtype: torch.dtype) -> str:
    """Of a cache's numbers. Raises ConfigError for one in which none is kept."""
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
