"""What both writers of a cache share: its folder, where shards come whole or not at all, and how large it gets."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftwing.errors import ConfigError, DataError, NumericsError
from draftwing.formats.identity import differences, target_id
from draftwing.formats.write import write_fix
from draftwing.methods.net import TargetId
from draftwing.models.target import Target
from draftwing.train.checkpoint import locked, write_atomically
from draftwing.train.data import Batch, Batches, Corpus, Example, Plan, collate
from draftwing.train.features import FeatureBatch, best_tokens, hidden_states, read_text

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


# The target's hidden states on disk: computed once, and read by every run that trains on them.
#
# A cache is a folder of safetensors shards, and ``index.json``, which names them. A shard holds whole rows, one after
# another: ``states`` (N, S * H), ``ids``, ``mask`` and ``best`` (N,), and of each row ``lengths`` and its key in
# ``rows``
# (R,). A key is any number that no other row has. Readers take rows in the order of their keys, so that it does not
# matter in which order they were written, nor how many were to come. There are two writers:
#
# - ``cache_writer``: rows of the first epoch of ``Batches``, numbered as there, and the index last. A run of the same
#   seed reads, in its first epoch, the very batches that it would have made itself. Documents stay cut in later epochs
#   as they were in the first.
# - ``growing``: answers as the target writes them (``train.answers``), whole dialogues with the hash of their prompts
# as
#   key, and the index anew after each shard. The target never read the last token of an answer, so that its states are
#   0; nothing that is learnt depends on the states of a row's last token.
#
# What a cache did to its data, a run that reads it must agree with (``max_length``, ``validation_share``); what it left
# open, the run does itself.
#
# Shape suffixes: R rows, N tokens of rows one after another, B rows of a batch, T tokens, S hidden states, H hidden.


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
        return self._plan.num_tokens_per_epoch

    @property
    def num_batches_per_epoch(self) -> int:
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


# Writing a cache of the target's hidden states: shard by shard, so that a killed run goes on where it was.


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


# A cache that grows row by row, in any order, as texts are written; how many there will be, nobody knows.
#
# Rows come in shards. A shard is there whole or not at all, and the index is written anew after each, so that what has
# been written can be read at any time. What a row is a row *of* is its key: a run that goes on asks which keys are
# there.
#
# Shape suffixes: N tokens of rows one after another, T tokens, S hidden states, H hidden.


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
