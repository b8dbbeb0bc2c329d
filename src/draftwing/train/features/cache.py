"""The target's hidden states on disk: computed once, and read by every run that trains on them.

A cache is a folder of safetensors shards, and ``index.json``, which is written last. A shard holds whole rows, one
after another: ``states`` (N, S * H), ``ids`` and ``mask`` (N,), and of each row ``lengths`` and its number in ``rows``
(R,). Rows are those of the first epoch of ``Batches``, and are numbered as there: a run of the same seed reads from a
cache, in its first epoch, the very batches that it would have made itself. Documents stay cut in later epochs as they
were in the first.

Shape suffixes: R rows, N tokens of rows one after another, B rows of a batch, T tokens, S hidden states, H hidden.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftwing.errors import DataError
from draftwing.heads.identity import differences
from draftwing.model.target import Target
from draftwing.nets.eagle_config import TargetId
from draftwing.train.data.batches import Plan, collate
from draftwing.train.data.corpus import Corpus, Example
from draftwing.train.features.source import FeatureBatch, hidden_states

__all__ = ["DTYPES", "INDEX", "CacheInfo", "CachedFeatures", "FeatureCache", "Shard"]

INDEX = "index.json"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
VERSION = 1
_COMMAND = "`draftwing data cache`"
_AGAIN = f"the {_COMMAND} that made the cache again: it makes what is missing"
_DAMAGED = "expected a whole shard of a cache, found a damaged one"
# States of the same weights differ by rounding (a few percent in bfloat16), those of others by as much as they are.
_SAME = 0.15
_SAMPLE = 16  # tokens of a row that is compared, at least: first tokens look alike in many models


@dataclass(frozen=True)
class CacheInfo:
    """What a cache is made of; the same in each of its shards.

    Attributes:
        target: whose hidden states these are.
        states: which ones, counted as ``FeatureSpec.taps``, each once; the target's last is always among them.
        dtype: ``bfloat16`` or ``float32``.
        max_length: of a row.
        seed: of the ``Batches``, and of the split that held out ``validation_share`` of the data before it.
        num_rows, num_tokens, num_shards: in all.
    """

    target: TargetId
    states: tuple[int, ...]
    dtype: str
    max_length: int
    seed: int
    validation_share: float
    num_rows: int
    num_tokens: int
    num_shards: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"version": VERSION, **dataclasses.asdict(self), "states": list(self.states)}

    @classmethod
    def from_dict(cls, found: Any, where: str) -> CacheInfo:
        """Read what ``to_dict`` gave.

        Raises:
            DataError: it is none, or of another version.
        """
        if isinstance(found, dict) and found.get("version", VERSION) != VERSION:
            raise DataError(
                f"{where}: a cache of version {found['version']!r}, expected {VERSION}: make it again with {_COMMAND}, "
                f"or install the Draftwing that made it"
            )
        try:
            plain = {f.name: found[f.name] for f in dataclasses.fields(cls)}
            DTYPES[plain["dtype"]]
            return cls(**{**plain, "target": TargetId(**plain["target"]), "states": tuple(map(int, plain["states"]))})
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{where}: expected the description of a cache, found something else ({type(error).__name__}: "
                f"{error}): delete the folder and make it again with {_COMMAND}"
            ) from error

    def differing(self, other: CacheInfo) -> list[str]:
        """What tells two caches apart, as ``seed 0 and 1``; the names of their targets may differ."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "target"]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return differences(self.target, other.target) + [f"{name} {a} and {b}" for name, a, b in pairs if a != b]

    def shard(self, number: int) -> str:
        """The file name of a shard, from 0."""
        return f"features-{number + 1:05}-of-{self.num_shards:05}.safetensors"


class Shard:
    """A shard, opened: mapped into memory, so that what is not read costs nothing.

    Attributes:
        info: see ``CacheInfo``.
        ids, mask: (N,) int32 and bool.
        lengths, rows: (R,) int64.
        starts: (R,) where each row begins among the tokens.

    Raises:
        DataError: missing, damaged, or none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            file = _open(path)
            found = {name: file.get_tensor(name).numpy() for name in ("ids", "mask", "lengths", "rows")}
            self._states = file.get_slice("states")
            num_tokens, width = self._states.get_shape()
            described = json.loads((file.metadata() or {})["draftwing"])
        except FileNotFoundError:
            raise DataError(f"{path}: expected a shard of a cache, found none: run {_AGAIN}") from None
        except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
            raise DataError(f"{path}: {_DAMAGED} ({error}); delete it, and run {_AGAIN}") from error
        self.info = CacheInfo.from_dict(described, str(path))
        self.ids, self.mask, self.lengths, self.rows = (found[name] for name in ("ids", "mask", "lengths", "rows"))
        self.starts = np.cumsum(self.lengths) - self.lengths
        sizes = {num_tokens, len(self.ids), len(self.mask), int(self.lengths.sum())}
        wide = len(self.info.states) * self.info.target.hidden_size
        if len(sizes) > 1 or len(self.rows) != len(self.lengths) or width != wide:
            raise DataError(f"{path}: {_DAMAGED} (its tensors do not fit each other); delete it, and run {_AGAIN}")

    def states(self, start: int, end: int) -> Tensor:
        """(N, S, H) the states of some tokens."""
        try:
            found: Tensor = self._states[start:end]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise DataError(f"{self.path}: {_DAMAGED} ({error}); delete it, and run {_AGAIN}") from error
        return found.view(end - start, len(self.info.states), -1)

    def check_weights(self, target: Target) -> None:
        """Raise DataError unless the target still gives the states of a row."""
        long_enough = self.lengths >= min(_SAMPLE, self.lengths.max())
        row = int(np.where(long_enough, self.lengths, np.iinfo(np.int64).max).argmin())
        start, end = int(self.starts[row]), int(self.starts[row] + self.lengths[row])
        ids = torch.from_numpy(self.ids[start:end]).long()[None].to(target.device)
        found = hidden_states(target, ids, (target.num_layers,))
        now, then = found[0].double().cpu(), self.states(start, end)[:, -1].double()
        apart = float(((now - then).norm(dim=-1) / then.norm(dim=-1).clamp(min=1e-9)).median())
        if not apart < _SAME:
            raise DataError(
                f"{self.path}: made when {self.info.target.name} had other weights than {target.name} has now (hidden "
                f"states differ by {apart:.0%}): use the weights that it was made with, or delete its folder and make "
                f"it again with {_COMMAND}"
            )


def _open(path: Path) -> Any:
    return safe_open(path, framework="pt", device="cpu")


class FeatureCache:
    """A cache on disk, opened: ids and masks at hand, hidden states read row by row.

    Attributes:
        folder: where it lies.
        info: what it is made of.
        lengths: (R,) the tokens of each row.

    Raises:
        DataError: no cache, an unfinished one, or shards that are missing, damaged or of another one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.info = _read_index(self.folder)
        self._shards = [Shard(self.folder / self.info.shard(number)) for number in range(self.info.num_shards)]
        for shard in self._shards:
            if differing := shard.info.differing(self.info):
                raise DataError(
                    f"{shard.path}: belongs to another cache than {INDEX} beside it ({differing[0]}): delete the "
                    f"folder and make the cache again with {_COMMAND}"
                )
        rows = np.concatenate([shard.rows for shard in self._shards])
        order = np.argsort(rows, kind="stable")
        if not np.array_equal(rows[order], np.arange(self.info.num_rows)):
            raise DataError(
                f"{self.folder}: expected {self.info.num_rows} rows, each once, found {len(np.unique(rows))} in "
                f"{len(rows)}: delete the folder and make the cache again with {_COMMAND}"
            )
        self.lengths = np.concatenate([shard.lengths for shard in self._shards])[order]
        self._starts = np.concatenate([shard.starts for shard in self._shards])[order]
        self._shard_of = np.repeat(np.arange(len(self._shards)), [len(shard.rows) for shard in self._shards])[order]

    def row(self, number: int) -> Example:
        """A row's ids and mask."""
        shard, start, end = self._place(number)
        return Example(shard.ids[start:end], shard.mask[start:end])

    def states(self, number: int) -> Tensor:
        """(T, S, H) a row's hidden states, in the order of ``info.states``; read from the disk as they are used."""
        shard, start, end = self._place(number)
        return shard.states(start, end)

    def _place(self, number: int) -> tuple[Shard, int, int]:
        start = int(self._starts[number])
        return self._shards[int(self._shard_of[number])], start, start + int(self.lengths[number])

    @property
    def corpus(self) -> Corpus:
        """All rows, as dialogues."""
        return Corpus(tuple(self.row(number) for number in range(self.info.num_rows)))

    def check(self, target: Target, identity: TargetId) -> None:
        """Raise DataError unless the states are this target's: sizes, vocabulary, and what it says of one row."""
        differing = differences(self.info.target, identity)
        if differing:
            raise DataError(
                f"{self.folder}: made for {self.info.target.name}, and the target is {identity.name} ({differing[0]}): "
                f"train for that target, or make a cache of this one with {_COMMAND}"
            )
        self._shards[0].check_weights(target)


class CachedFeatures:
    """A ``FeatureSource`` that reads a cache; no target is run. Logits are left to be computed from ``last``.

    Args:
        cache: opened.
        taps: that the net reads; some of the cache's states.
        tokens_per_batch: at most, padding counted; need not be that which the cache was made with.
        seed: of all shuffling.
        device, dtype: of the features: the target's.

    Raises:
        DataError: the cache lacks one of the taps.
        ConfigError: a batch leaves no room for the longest row.
    """

    def __init__(
        self,
        cache: FeatureCache,
        taps: Sequence[int],
        tokens_per_batch: int,
        seed: int = 0,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        kept = cache.info.states
        if not set(taps) <= set(kept):
            raise DataError(
                f"{cache.folder}: has the hidden states {_listed(kept)}, and the net reads {_listed(taps)}: train a "
                f"net that reads those, or make a cache for this one with {_COMMAND}"
            )
        self._cache, self._device, self._dtype = cache, torch.device(device), dtype
        self._chosen = [kept.index(tap) for tap in (*taps, cache.info.target.num_layers)]
        self._plan = Plan(cache.lengths, tokens_per_batch, seed)

    @property
    def num_tokens_per_epoch(self) -> int:
        """See ``FeatureSource``."""
        return self._plan.num_tokens_per_epoch

    @property
    def num_batches_per_epoch(self) -> int:
        """See ``Batches``."""
        return self._plan.num_batches_per_epoch

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> FeatureBatch:
        """See ``FeatureSource``; features are 0 behind the end of a row."""
        _, rows = self._plan.batch(number, rank, world_size)
        batch = collate([(each.ids, each.mask) for each in map(self._cache.row, rows)]).runnable()
        hidden = self._cache.info.target.hidden_size
        stored = torch.zeros(
            *batch.ids.shape, len(self._chosen), hidden, dtype=DTYPES[self._cache.info.dtype]
        )  # (B, T, S, H)
        for i, row in enumerate(rows):
            stored[i, : self._cache.lengths[row]] = self._cache.states(row)[:, self._chosen]
        states = stored.to(self._device).to(self._dtype)  # as few bytes as can be go to the device
        return FeatureBatch(batch.to(self._device), states[:, :, :-1].flatten(2), states[:, :, -1])


def _read_index(folder: Path) -> CacheInfo:
    file = folder / INDEX
    try:
        return CacheInfo.from_dict(json.loads(file.read_text(encoding="utf-8")), str(file))
    except FileNotFoundError:
        begun = any(folder.glob("features-*")) if folder.is_dir() else False
        what = "an unfinished cache: run the same command again to finish it" if begun else "no cache: make one"
        raise DataError(f"{folder}: {what} with {_COMMAND}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{file}: not readable as JSON ({error}): run the {_COMMAND} that made the cache again: it writes this file"
            f" anew"
        ) from error


def _listed(taps: Sequence[int]) -> str:
    return ", ".join(map(str, taps))
