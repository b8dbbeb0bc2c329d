"""The target's hidden states on disk: computed once, and read by every run that trains on them.

A cache is a folder of safetensors shards, and ``index.json``, which names them. A shard holds whole rows, one after
another: ``states`` (N, S * H), ``ids``, ``mask`` and ``best`` (N,), and of each row ``lengths`` and its key in ``rows``
(R,). A key is any number that no other row has. Readers take rows in the order of their keys, so that it does not
matter in which order they were written, nor how many were to come. There are two writers:

- ``cache_writer``: rows of the first epoch of ``Batches``, numbered as there, and the index last. A run of the same
  seed reads, in its first epoch, the very batches that it would have made itself. Documents stay cut in later epochs
  as they were in the first.
- ``growing``: answers as the target writes them (``train.answers``), whole dialogues with the hash of their prompts as
  key, and the index anew after each shard. The target never read the last token of an answer, so that its states are
  0; nothing that is learnt depends on the states of a row's last token.

What a cache did to its data, a run that reads it must agree with (``max_length``, ``validation_share``); what it left
open, the run does itself.

Shape suffixes: R rows, N tokens of rows one after another, B rows of a batch, T tokens, S hidden states, H hidden.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
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
from draftwing.train.data.batches import Batch, Plan, collate
from draftwing.train.data.corpus import Corpus, Example
from draftwing.train.features.source import FeatureBatch, hidden_states

__all__ = ["DTYPES", "INDEX", "CacheIndex", "CacheInfo", "CachedFeatures", "FeatureCache", "Shard", "shard_name"]

INDEX = "index.json"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
VERSION = 2
_COMMAND = "`draftwing data cache`"
_AGAIN = f"the {_COMMAND} or `data regenerate` that made the cache again: it makes what is missing"
_DAMAGED = "expected a whole shard of a cache, found a damaged one"
# States of the same weights differ by rounding (a few percent in bfloat16), those of others by as much as they are.
_SAME = 0.15
_SAME_QUANTIZED = 0.5  # int8 matrices and those that they were made from: 0.11 apart on a model of 135M
_SAMPLE = 16  # tokens of a row that is compared, at least: first tokens look alike in many models


@dataclass(frozen=True)
class CacheInfo:
    """What a cache is made of; the same in each of its shards.

    Attributes:
        target: whose hidden states these are; ``quantize`` how its matrices were quantised, None: not at all.
        states: which ones, counted as ``FeatureSpec.taps``, each once; the target's last is always among them.
        dtype: ``bfloat16`` or ``float32``.
        max_length: rows were cut there; None: they are whole.
        seed: of the ``Batches``, and of the split that held out ``validation_share`` of the data before it; with a
            share of 0 nothing was held out.
    """

    target: TargetId
    quantize: str | None
    states: tuple[int, ...]
    dtype: str
    max_length: int | None
    seed: int
    validation_share: float

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
            raise _undescribed(where, error) from error

    def differing(self, other: CacheInfo) -> list[str]:
        """What tells two caches apart, as ``seed 0 and 1``; the names of their targets may differ."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "target"]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return differences(self.target, other.target) + [f"{name} {a} and {b}" for name, a, b in pairs if a != b]


@dataclass(frozen=True)
class CacheIndex:
    """What ``index.json`` says: what the cache is made of, and which shards are part of it.

    Attributes:
        shards: their file names.
        num_rows, num_tokens: in all of them.
    """

    info: CacheInfo
    shards: tuple[str, ...]
    num_rows: int
    num_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        totals = {"num_rows": self.num_rows, "num_tokens": self.num_tokens, "shards": list(self.shards)}
        return {**self.info.to_dict(), **totals}

    @classmethod
    def from_dict(cls, found: Any, where: str) -> CacheIndex:
        """Read what ``to_dict`` gave.

        Raises:
            DataError: it is none, or of another version.
        """
        info = CacheInfo.from_dict(found, where)
        try:
            shards = tuple(map(str, found["shards"]))
            if not shards or not all(map(_SHARD.fullmatch, shards)):
                raise ValueError(f"shards {shards}")
            return cls(info, shards, int(found["num_rows"]), int(found["num_tokens"]))
        except (KeyError, TypeError, ValueError) as error:
            raise _undescribed(where, error) from error


def _undescribed(where: str, error: Exception) -> DataError:
    return DataError(
        f"{where}: expected the description of a cache, found something else ({type(error).__name__}: {error}): delete "
        f"the folder and make it again with {_COMMAND}"
    )


_SHARD = re.compile(r"features-\d{5,}\.safetensors")


def shard_name(number: int) -> str:
    """The file name of a shard, from 0."""
    return f"features-{number + 1:05}.safetensors"


class Shard:
    """A shard, opened: mapped into memory, so that what is not read costs nothing.

    Attributes:
        info: see ``CacheInfo``.
        ids, mask: (N,) int32 and bool.
        best: (N,) int32 the target's best token after each, at least where the token after it counts; it saves readers
            the target's LM head.
        lengths, rows: (R,) int64.
        starts: (R,) where each row begins among the tokens.

    Raises:
        DataError: missing, damaged, or none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            file = _open(path)
            found = {name: file.get_tensor(name).numpy() for name in ("ids", "mask", "best", "lengths", "rows")}
            self._states = file.get_slice("states")
            num_tokens, width = self._states.get_shape()
            described = json.loads((file.metadata() or {})["draftwing"])
        except FileNotFoundError:
            raise DataError(f"{path}: expected a shard of a cache, found none: run {_AGAIN}") from None
        except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
            raise DataError(f"{path}: {_DAMAGED} ({error}); delete it, and run {_AGAIN}") from error
        self.info = CacheInfo.from_dict(described, str(path))
        self.ids, self.mask, self.best = (found[name] for name in ("ids", "mask", "best"))
        self.lengths, self.rows = found["lengths"], found["rows"]
        self.starts = np.cumsum(self.lengths) - self.lengths
        sizes = {num_tokens, len(self.ids), len(self.mask), len(self.best), int(self.lengths.sum())}
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
        """Raise DataError unless the target still gives the states of a row.

        Where one of the two is quantised and the other is not, they may differ more.
        """
        long_enough = self.lengths >= min(_SAMPLE, self.lengths.max())
        row = int(np.where(long_enough, self.lengths, np.iinfo(np.int64).max).argmin())
        start, end = int(self.starts[row]), int(self.starts[row] + self.lengths[row])
        ids = torch.from_numpy(self.ids[start:end]).long()[None].to(target.device)
        found = hidden_states(target, ids, (target.num_layers,))
        known = max(1, end - start - 1)  # not of an answer's last token
        now, then = found[0, :known].double().cpu(), self.states(start, start + known)[:, -1].double()
        apart = float(((now - then).norm(dim=-1) / then.norm(dim=-1).clamp(min=1e-9)).median())
        if not apart < (_SAME if self.info.quantize == target.quantized else _SAME_QUANTIZED):
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
        index = _read_index(self.folder)
        self.info = index.info
        self._shards = [Shard(self.folder / name) for name in index.shards]
        for shard in self._shards:
            if differing := shard.info.differing(self.info):
                raise DataError(
                    f"{shard.path}: belongs to another cache than {INDEX} beside it ({differing[0]}): delete the "
                    f"folder and make the cache again with {_COMMAND}"
                )
        keys = np.concatenate([shard.rows for shard in self._shards])
        order, num_keys = np.argsort(keys, kind="stable"), len(np.unique(keys))
        if not len(keys) == num_keys == index.num_rows:
            raise DataError(
                f"{self.folder}: expected {index.num_rows} rows, each once, found {num_keys} in {len(keys)}: delete "
                f"the folder and make the cache again with {_COMMAND}"
            )
        self.lengths = np.concatenate([shard.lengths for shard in self._shards])[order]
        self._starts = np.concatenate([shard.starts for shard in self._shards])[order]
        self._shard_of = np.repeat(np.arange(len(self._shards)), [len(shard.rows) for shard in self._shards])[order]

    def part(self, chosen: np.ndarray) -> FeatureCache:
        """The same with some of its rows alone. ``chosen``: (R,) bool."""
        found = copy.copy(self)
        found.lengths, found._starts, found._shard_of = (
            each[chosen] for each in (self.lengths, self._starts, self._shard_of)
        )
        return found

    def cut(self, max_length: int) -> FeatureCache:
        """The same with longer rows cut there, as ``Batches`` cuts dialogues; those without an answer are left out."""
        found = copy.copy(self)
        found.lengths = np.minimum(self.lengths, max_length)
        return found.part(np.asarray([bool(each.mask.any()) for each in found.corpus.examples]))

    def row(self, number: int) -> Example:
        """A row's ids and mask."""
        shard, start, end = self._place(number)
        return Example(shard.ids[start:end], shard.mask[start:end])

    def states(self, number: int) -> Tensor:
        """(T, S, H) a row's hidden states, in the order of ``info.states``; read from the disk as they are used."""
        shard, start, end = self._place(number)
        return shard.states(start, end)

    def best(self, number: int) -> np.ndarray:
        """(T,) the target's best token after each of a row's."""
        shard, start, end = self._place(number)
        found: np.ndarray = shard.best[start:end]
        return found

    def _place(self, number: int) -> tuple[Shard, int, int]:
        start = int(self._starts[number])
        return self._shards[int(self._shard_of[number])], start, start + int(self.lengths[number])

    @property
    def corpus(self) -> Corpus:
        """All rows, as dialogues."""
        return Corpus(tuple(self.row(number) for number in range(len(self.lengths))))

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
                f"{cache.folder}: has the hidden states {_listed(kept)}, and the net reads {_listed(taps)}: train "
                f"one that reads those (--taps), or make a cache for this one with {_COMMAND}"
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
        rows, batch = self._rows(number, rank, world_size)
        batch = batch.runnable()
        hidden = self._cache.info.target.hidden_size
        stored = torch.zeros(
            *batch.ids.shape, len(self._chosen), hidden, dtype=DTYPES[self._cache.info.dtype]
        )  # (B, T, S, H)
        best = torch.zeros_like(batch.ids)
        for i, row in enumerate(rows):
            stored[i, : self._cache.lengths[row]] = self._cache.states(row)[:, self._chosen]
            best[i, : self._cache.lengths[row]] = torch.from_numpy(self._cache.best(row).astype(np.int64))
        states = stored.to(self._device).to(self._dtype)  # as few bytes as can be go to the device
        features, last = states[:, :, :-1].flatten(2), states[:, :, -1]
        return FeatureBatch(batch.to(self._device), features, last, best=best.to(self._device))

    def text(self, number: int, rank: int = 0, world_size: int = 1) -> Batch:
        """See ``FeatureSource``."""
        return self._rows(number, rank, world_size)[1]

    def _rows(self, number: int, rank: int, world_size: int) -> tuple[list[int], Batch]:
        _, rows = self._plan.batch(number, rank, world_size)
        return rows, collate([(each.ids, each.mask) for each in map(self._cache.row, rows)])


def _read_index(folder: Path) -> CacheIndex:
    file = folder / INDEX
    try:
        return CacheIndex.from_dict(json.loads(file.read_text(encoding="utf-8")), str(file))
    except FileNotFoundError:
        begun = any(folder.glob("features-*")) if folder.is_dir() else False
        what = "an unfinished cache: run the same command again to finish it" if begun else "no cache: make one"
        raise DataError(f"{folder}: {what} with {_COMMAND}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file}: not readable as JSON ({error}): run {_AGAIN}, this file too") from error


def _listed(taps: Sequence[int]) -> str:
    return ", ".join(map(str, taps))
