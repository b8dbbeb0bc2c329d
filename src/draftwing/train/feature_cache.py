"""The target's hidden states on disk: computed once, and read by every run that trains on them.

A cache is a folder of safetensors shards, and ``index.json``, which lists them. A shard holds whole rows, one after
another: ``states`` (N, S * H), ``ids``, ``mask`` and ``best`` (N,), and for each row its ``lengths`` and its key in
``rows`` (R,). A key is any number that no other row has; readers sort rows by their keys, so the order in which they
were written does not matter. Shards are written whole or not at all. There are three writers:

- ``write_cache``: the rows of the first epoch of ``Batches``, with their numbers as keys, and the index last. Documents
  stay cut at the same places in later epochs.
- ``GrowingCache``: answers while the target writes them (``train.answers``): whole dialogues, with the hash of their
  prompts as keys. The index is replaced after each shard, so the cache can be read at any time. The target never reads
  the last token of an answer, so its states are 0; no loss depends on the states of a row's last token.
- ``vllm_states.import_states``: states that another engine wrote to files, through a ``GrowingCache``.

Shape suffixes: R rows, N tokens of rows one after another, B rows of a batch, T tokens, S hidden states, H hidden.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.filesize import decimal
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftwing.errors import ConfigError, DataError, NumericsError
from draftwing.formats.identity import differences, target_id
from draftwing.methods.net import TargetId
from draftwing.models.target import Target
from draftwing.remote import OnProgress, local_copy
from draftwing.storage import locked, replacing, writing
from draftwing.train.data import Batch, Batches, BatchPlan, Corpus, Example
from draftwing.train.features import FeatureBatch, best_tokens, score_text

INDEX = "index.json"
VERSION = 2
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SHARD_NAME = re.compile(r"features-\d{5,}\.safetensors")
SHARD_BYTES = 256 * 2**20
GROWING_SHARD_BYTES = 128 * 2**20  # collected in memory until they are written, and twice over while they are
BYTES_PER_ROW = 16  # length and key
BYTES_PER_TOKEN = 9  # id, mask and best token; hidden states not included
# Median relative difference of hidden states: with the same weights a few percent (bfloat16), or 0.11 between int8
# matrices and their originals (135M parameters); with other weights about 1.
MAX_DIFFERENCE = 0.15
MAX_DIFFERENCE_QUANTIZED = 0.5
MIN_COMPARED_TOKENS = 16  # the states of first tokens are similar in many models
# Share of a row's best tokens that the LM head finds again in its states: near 1, or near 0 with other weights.
MIN_SAME_BEST = 0.5
_MAKE = "`draftwing data cache`"
_REPAIR = f"the {_MAKE}, `data regenerate` or `data import-states` that made the cache again: it makes what is missing"
_KEPT = "; whole shards stay, and the same command continues from there"


@dataclass(frozen=True)
class CacheSize:
    """The size of a cache on disk, without a few kilobytes of headers."""

    num_tokens: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.num_tokens:,} tokens, {decimal(self.num_bytes)}"


@dataclass(frozen=True)
class CacheInfo:
    """Describes a cache; stored in each of its shards."""

    target: TargetId  # the model that computed the states
    quantize: str | None  # how its matrices were quantised; None if they were not
    # The stored hidden states, counted like ``FeatureSpec.taps``; the target's last is always among them.
    states: tuple[int, ...]
    dtype: str  # ``bfloat16`` or ``float32``
    max_length: int | None  # rows were cut there; None if they are whole
    seed: int  # seed of the ``Batches``

    @classmethod
    def new(
        cls,
        target: Target,
        taps: Sequence[int],
        identity: TargetId,
        dtype: torch.dtype = torch.bfloat16,
        *,
        max_length: int | None = None,
        seed: int = 0,
    ) -> CacheInfo:
        """Describe a new cache of the hidden states ``taps`` and the target's last; see ``GrowingCache``."""
        last, name = target.num_layers, str(dtype).removeprefix("torch.")
        wrong = [tap for tap in taps if not 0 <= tap <= last]
        if wrong:
            raise ConfigError(
                f"there is no hidden state {wrong[0]} in {target.name}, which has {last} layers: choose taps from 0 to "
                f"{last}"
            )
        if name not in DTYPES:
            raise ConfigError(f"a cache is stored in {' or '.join(DTYPES)}, found {dtype}: choose one of these")
        states = tuple(dict.fromkeys((*(tap for tap in taps if tap != last), last)))
        return cls(identity, target.quantized, states, name, max_length, seed)

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **dataclasses.asdict(self), "states": list(self.states)}

    @classmethod
    def from_dict(cls, content: Any, where: str) -> CacheInfo:
        """Read ``to_dict``. Raises DataError for other contents, and for other versions."""
        if isinstance(content, dict) and content.get("version", VERSION) != VERSION:
            raise DataError(
                f"{where}: a cache of version {content['version']!r}, expected {VERSION}: make it again with {_MAKE}, "
                f"or install the Draftwing that made it"
            )
        with _described(where):
            fields = {field.name: content[field.name] for field in dataclasses.fields(cls)}
            DTYPES[fields["dtype"]]
            states = tuple(map(int, fields["states"]))
            return cls(**{**fields, "target": TargetId(**fields["target"]), "states": states})

    def differing(self, other: CacheInfo) -> list[str]:
        """List the differences, as ``seed 0 and 1``; the names of the targets may differ."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "target"]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return differences(self.target, other.target) + [f"{name} {a} and {b}" for name, a, b in pairs if a != b]

    def size(self, num_rows: int, num_tokens: int) -> CacheSize:
        per_token = len(self.states) * self.target.hidden_size * DTYPES[self.dtype].itemsize + BYTES_PER_TOKEN
        return CacheSize(num_tokens, num_tokens * per_token + num_rows * BYTES_PER_ROW)


@contextmanager
def _described(where: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{where}: expected the description of a cache, found something else ({type(error).__name__}: {error}): "
            f"delete the folder and make it again with {_MAKE}"
        ) from error


# --- reading ---------------------------------------------------------------------------------------------------------


class Shard:
    """A shard, mapped into memory: states are read from the disk when they are used. See the module's docstring."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            file: Any = safe_open(path, framework="pt", device="cpu")
            self.ids, self.mask, self.best, self.lengths, self.rows = (
                file.get_tensor(name).numpy() for name in ("ids", "mask", "best", "lengths", "rows")
            )
            self._states = file.get_slice("states")
            num_tokens, width = self._states.get_shape()
            description = json.loads((file.metadata() or {})["draftwing"])
        except FileNotFoundError:
            raise DataError(f"{path}: expected a shard of a cache, found none: run {_REPAIR}") from None
        except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
            raise self._damaged(error) from error
        self.info = CacheInfo.from_dict(description, str(path))
        self.starts = np.cumsum(self.lengths) - self.lengths
        sizes = {num_tokens, len(self.ids), len(self.mask), len(self.best), int(self.lengths.sum())}
        expected_width = len(self.info.states) * self.info.target.hidden_size
        if len(sizes) > 1 or len(self.rows) != len(self.lengths) or width != expected_width:
            raise self._damaged("its tensors do not fit each other")

    def row(self, place: int) -> Example:
        tokens = slice(int(self.starts[place]), int(self.starts[place] + self.lengths[place]))
        return Example(self.ids[tokens], self.mask[tokens])

    def states(self, start: int, end: int) -> Tensor:
        """(N, S, H) the states of the tokens from ``start`` to ``end``."""
        try:
            states: Tensor = self._states[start:end]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise self._damaged(error) from error
        return states.view(end - start, len(self.info.states), -1)

    def check_weights(self, target: Target) -> None:
        """Raise DataError unless the target gives a row's stored states again, up to rounding and quantisation.

        Of a target without layers, the LM head must find most of the row's stored best tokens in its states.
        """
        long_enough = self.lengths >= min(MIN_COMPARED_TOKENS, self.lengths.max())
        row = int(np.where(long_enough, self.lengths, np.iinfo(np.int64).max).argmin())
        start, end = int(self.starts[row]), int(self.starts[row] + self.lengths[row])
        ids = torch.from_numpy(self.ids[start:end]).long()[None].to(target.device)
        num = max(1, end - start - 1)  # an answer's last token has no states
        if not target.has_layers:
            best = best_tokens(target, self.states(start, start + num)[:, -1]).numpy()
            same = float((best == self.best[start : start + num]).mean())
            if same < MIN_SAME_BEST:
                raise self._other_weights(target, f"its LM head predicts {same:.0%} of the same tokens")
            return
        now = score_text(target, ids, (target.num_layers,))[0][0, :num].double().cpu()
        stored = self.states(start, start + num)[:, -1].double()
        difference = float(((now - stored).norm(dim=-1) / stored.norm(dim=-1).clamp(min=1e-9)).median())
        limit = MAX_DIFFERENCE if self.info.quantize == target.quantized else MAX_DIFFERENCE_QUANTIZED
        if not difference < limit:
            raise self._other_weights(target, f"hidden states differ by {difference:.0%}")

    def _other_weights(self, target: Target, difference: str) -> DataError:
        return DataError(
            f"{self.path}: made when {self.info.target.name} had other weights than {target.name} has now "
            f"({difference}): use the weights that it was made with, or delete its folder and make it again with "
            f"{_MAKE}"
        )

    def _damaged(self, problem: object) -> DataError:
        return DataError(
            f"{self.path}: expected a whole shard of a cache, found a damaged one ({problem}); delete it, and run "
            f"{_REPAIR}"
        )


class FeatureCache:
    """An opened cache: ids and masks in memory, hidden states read row by row. One at a URL is copied first."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = local_copy(folder)
        self.info, names, num_rows = _read_index(self.folder)
        self._shards = [Shard(self.folder / name) for name in names]
        for shard in self._shards:
            if differing := shard.info.differing(self.info):
                raise DataError(
                    f"{shard.path}: belongs to another cache than its {INDEX} ({differing[0]}): delete the folder and "
                    f"make the cache again with {_MAKE}"
                )
        places = {
            int(key): (shard, slice(int(start), int(start + length)))
            for shard in self._shards
            for key, start, length in zip(shard.rows, shard.starts, shard.lengths, strict=True)
        }
        num_stored = sum(len(shard.rows) for shard in self._shards)
        if not num_stored == len(places) == num_rows:
            raise DataError(
                f"{self.folder}: expected {num_rows} rows, each once, found {len(places)} in {num_stored}: delete the "
                f"folder and make the cache again with {_MAKE}"
            )
        self._places = [places[key] for key in sorted(places)]

    @property
    def lengths(self) -> np.ndarray:
        return np.asarray([tokens.stop - tokens.start for _, tokens in self._places], dtype=np.int64)

    def part(self, chosen: Iterable[bool]) -> FeatureCache:
        """Return a cache with some of the rows. ``chosen``: (R,) bool."""
        part = copy.copy(self)
        part._places = list(itertools.compress(self._places, chosen))
        return part

    def cut(self, max_length: int) -> FeatureCache:
        """Return a cache with rows cut like ``Batches`` cuts dialogues; those without an answer are left out."""
        cut = copy.copy(self)
        cut._places = [(shard, slice(at.start, min(at.stop, at.start + max_length))) for shard, at in self._places]
        return cut.part(bool(row.mask.any()) for row in cut.corpus.examples)

    def row(self, number: int) -> Example:
        shard, tokens = self._places[number]
        return Example(shard.ids[tokens], shard.mask[tokens])

    def states(self, number: int) -> tuple[Tensor, np.ndarray]:
        """(T, S, H) a row's hidden states, in the order of ``info.states``, and (T,) the best token after each."""
        shard, tokens = self._places[number]
        return shard.states(tokens.start, tokens.stop), shard.best[tokens]

    @property
    def corpus(self) -> Corpus:
        """All rows, as dialogues."""
        return Corpus(tuple(map(self.row, range(len(self._places)))))

    def check(self, target: Target, identity: TargetId) -> None:
        """Raise DataError unless the states are this target's: sizes, vocabulary, and the states of one row."""
        differing = differences(self.info.target, identity)
        if differing:
            raise DataError(
                f"{self.folder}: made for {self.info.target.name}, and the target is {identity.name} ({differing[0]}): "
                f"train for that target, or make a cache of this one with {_MAKE}"
            )
        self._shards[0].check_weights(target)


def _read_index(folder: Path) -> tuple[CacheInfo, list[str], int]:
    """Return the description, the shards' file names, and the number of rows."""
    file = folder / INDEX
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        begun = folder.is_dir() and any(folder.glob("features-*"))
        what = "an unfinished cache: run the same command again to finish it" if begun else "no cache: make one"
        raise DataError(f"{folder}: {what} with {_MAKE}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: not readable as JSON ({error}): run {_REPAIR}, this file too") from error
    info = CacheInfo.from_dict(index, str(file))
    with _described(str(file)):
        names = list(map(str, index["shards"]))
        if not names or not all(map(SHARD_NAME.fullmatch, names)):
            raise ValueError(f"shards {names}")
        return info, names, int(index["num_rows"])


class CachedFeatures(BatchPlan):
    """A ``FeatureSource`` that reads a cache and runs no target; logits are left to be computed from ``last``.

    ``tokens_per_batch`` may differ from the value that the cache was made with. ``device`` and ``dtype`` are the
    target's.
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
        stored = cache.info.states
        if not set(taps) <= set(stored):
            listed, read = (", ".join(map(str, states)) for states in (stored, taps))
            raise DataError(
                f"{cache.folder}: has the hidden states {listed}, and the net reads {read}: train one that reads those "
                f"(--taps), or make a cache for this one with {_MAKE}"
            )
        super().__init__(cache.lengths, tokens_per_batch, seed)
        self._cache, self._device, self._dtype = cache, torch.device(device), dtype
        self._columns = [stored.index(tap) for tap in (*taps, cache.info.target.num_layers)]

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> FeatureBatch:
        """See ``FeatureSource``; features are 0 after the end of a row."""
        rows, batch = self._text(number, rank, world_size)
        batch, info = batch.runnable(), self._cache.info
        shape = (*batch.ids.shape, len(self._columns), info.target.hidden_size)  # (B, T, S, H)
        stored, best = torch.zeros(shape, dtype=DTYPES[info.dtype]), torch.zeros_like(batch.ids)
        for i, row in enumerate(rows):
            row_states, row_best = self._cache.states(row)
            stored[i, : self.lengths[row]] = row_states[:, self._columns]
            best[i, : self.lengths[row]] = torch.from_numpy(row_best.astype(np.int64))
        states = stored.to(self._device).to(self._dtype)  # converted on the device, so that fewer bytes go there
        features, last = states[:, :, :-1].flatten(2), states[:, :, -1]
        return FeatureBatch(batch.to(self._device), features, last, best=best.to(self._device))

    def text(self, number: int, rank: int = 0, world_size: int = 1) -> Batch:
        return self._text(number, rank, world_size)[1]

    def _text(self, number: int, rank: int, world_size: int) -> tuple[list[int], Batch]:
        def make_row(epoch: int, row: int) -> tuple[np.ndarray, np.ndarray]:
            example = self._cache.row(row)
            return example.ids, example.mask

        return self.collate(number, make_row, rank, world_size)


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CacheRow:
    example: Example  # ids and mask (T,)
    states: Tensor  # (T, S * H); 0 for a last token that the target never read
    best: np.ndarray  # (T,) int32, see ``Shard.best``; -1 if it is to be computed by the LM head


class GrowingCache:
    """Writes a cache row by row, in any order. ``old_rows`` are the rows that existed before this run, by key.

    Args:
        target: the model whose states they are; ``identity`` describes it to readers.
        taps: the hidden states to store, besides the target's last.
        shard_bytes: size of a shard.
        settings: other fields of ``CacheInfo``.
    """

    def __init__(
        self,
        folder: Path,
        target: Target,
        taps: Sequence[int],
        *,
        identity: TargetId,
        shard_bytes: int = GROWING_SHARD_BYTES,
        dtype: torch.dtype = torch.bfloat16,
        **settings: Any,
    ) -> None:
        self.info = CacheInfo.new(target, taps, identity, dtype, **settings)
        self._folder, self._target, self.shard_bytes = Path(folder), target, shard_bytes
        self._sizes: dict[int, tuple[int, int]] = {}  # rows and tokens of each existing shard
        self.old_rows: dict[int, Example] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Read the existing rows, and lock the folder until the block ends."""
        with locked(self._folder, DataError):
            for path in sorted(self._folder.glob("features-*.safetensors")):
                shard, number = Shard(path), path.stem.removeprefix("features-")
                if differing := shard.info.differing(self.info):
                    raise self.foreign(path, differing[0])
                if not number.isdecimal() or path != self._path(int(number) - 1):
                    raise self.foreign(path, "by its name")
                if not self._sizes:  # one is enough: other weights give other states everywhere
                    shard.check_weights(self._target)
                self._sizes[int(number) - 1] = len(shard.rows), len(shard.ids)
                self.old_rows |= {key: shard.row(place) for place, key in enumerate(shard.rows.tolist())}
            yield

    @property
    def num_shards(self) -> int:
        return len(self._sizes)

    @property
    def free_number(self) -> int:
        """The first number without a shard."""
        return next(number for number in range(len(self._sizes) + 1) if number not in self._sizes)

    @property
    def num_rows(self) -> int:
        return sum(rows for rows, _ in self._sizes.values())

    @property
    def size(self) -> CacheSize:
        return self.info.size(self.num_rows, sum(tokens for _, tokens in self._sizes.values()))

    def check_room(self, num_bytes: int | None = None, what: str = "the next shard of the cache") -> None:
        """Raise DataError unless the disk has room for this number of bytes, by default of one shard."""
        num_bytes, free = self.shard_bytes if num_bytes is None else num_bytes, shutil.disk_usage(self._folder).free
        if num_bytes > free:
            raise DataError(
                f"{self._folder}: {what} needs {num_bytes:,} bytes ({decimal(num_bytes)}) more, and the disk has "
                f"{free:,} bytes ({decimal(free)}) free: make room, write elsewhere, or cache less data"
            )

    @contextmanager
    def filling(self, *, indexes: bool) -> Iterator[PendingShard]:
        """Yield a shard to fill. Its ``write`` stores it, and so do the end of the block and Ctrl-C.

        Args:
            indexes: write the index with every shard, so that what is there is readable.
        """
        pending = PendingShard(self, indexes)
        try:
            yield pending
            pending.write()
        except KeyboardInterrupt:
            pending.write()
            raise

    def write(self, number: int, rows: Mapping[int, CacheRow]) -> None:
        """Write a shard of rows, by key. Idempotent: the same arguments may be written again."""
        states = torch.cat([row.states for row in rows.values()]).to(DTYPES[self.info.dtype])
        if not torch.isfinite(states).all():
            dtype = self._target.dtype
            raise NumericsError(
                f"{self._target.name} gives hidden states that are not finite in {dtype}: run it with --dtype "
                f"{'float32' if dtype != torch.float32 else 'float64'}"
            )
        best = torch.from_numpy(np.concatenate([row.best for row in rows.values()]))
        unknown = best < 0
        if unknown.any():
            best[unknown] = best_tokens(self._target, states[unknown, -self._target.hidden_size :])
        contents = {
            "states": states,
            "best": best,
            "ids": torch.from_numpy(np.concatenate([row.example.ids for row in rows.values()]).astype(np.int32)),
            "mask": torch.from_numpy(np.concatenate([row.example.mask for row in rows.values()])),
            "lengths": torch.tensor([len(row.states) for row in rows.values()]),
            "rows": torch.tensor(list(rows)),
        }
        with writing(self._folder, DataError, _KEPT), replacing(self._path(number)) as partial:
            save_file(contents, partial, metadata={"draftwing": json.dumps(self.info.to_dict())})
        self._sizes[number] = len(rows), len(states)

    def write_index(self) -> None:
        """Write the index of all shards, which makes the cache readable."""
        shards = [self._path(number).name for number in sorted(self._sizes)]
        totals = {"num_rows": self.num_rows, "num_tokens": self.size.num_tokens, "shards": shards}
        text = json.dumps({**self.info.to_dict(), **totals}, indent=2) + "\n"
        with writing(self._folder, DataError, _KEPT), replacing(self._folder / INDEX) as partial:
            partial.write_text(text, encoding="utf-8")

    def _path(self, number: int) -> Path:
        return self._folder / f"features-{number + 1:05}.safetensors"

    def foreign(self, path: Path, why: str) -> DataError:
        """Return the error for a folder or a shard of another cache."""
        return DataError(
            f"{path}: belongs to another cache ({why}): choose another folder, delete this one, or give what it was "
            f"made with to continue it"
        )


class PendingShard:
    """Rows by key that are not written yet: see ``GrowingCache.filling``."""

    def __init__(self, cache: GrowingCache, indexes: bool) -> None:
        self._cache, self._indexes = cache, indexes
        self._number, self.rows = cache.free_number, dict[int, CacheRow]()

    def num_bytes(self, more: Iterable[CacheRow] = ()) -> int:
        """Return the size of the shard, with further rows."""
        lengths = [len(row.states) for row in (*self.rows.values(), *more)]
        return self._cache.info.size(len(lengths), sum(lengths)).num_bytes

    def write(self) -> None:
        """Write the rows, if there are any; an interrupt in here may let it be written again as the same shard."""
        if self.rows:
            self._cache.write(self._number, self.rows)
            if self._indexes:
                self._cache.write_index()
            self.rows, self._number = {}, self._cache.free_number


@dataclass(frozen=True)
class CacheWritten:
    """The result of ``write_cache``: the whole cache; ``num_kept`` of its shards existed before."""

    size: CacheSize
    num_shards: int
    num_kept: int


def estimate(target: Target, batches: Batches, taps: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> CacheSize:
    """Return the size of the cache that ``write_cache`` would write, with its arguments."""
    info = CacheInfo.new(target, taps, target_id(target), dtype)
    return info.size(len(batches.lengths), batches.num_tokens_per_epoch)


def write_cache(
    folder: Path,
    target: Target,
    batches: Batches,
    taps: Sequence[int],
    *,
    identity: TargetId,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = SHARD_BYTES,
    on_progress: OnProgress | None = None,
) -> CacheWritten:
    """Run the target over one epoch of ``batches`` and store its hidden states; continue a stopped call.

    Ctrl-C loses the present batch only, a kill all of the present shard.

    Args:
        folder, target, taps, identity, dtype: see ``GrowingCache``.
        shard_bytes: the size of a shard at most, or one batch if that is larger.
    """
    settings = {"max_length": batches.max_length, "seed": batches.seed}
    cache = GrowingCache(folder, target, taps, identity=identity, shard_bytes=shard_bytes, dtype=dtype, **settings)
    epoch, total, old_rows = batches.epoch(0), batches.num_tokens_per_epoch, cache.old_rows
    with cache.opened():
        unmatched = dict(old_rows)
        for number, keys in enumerate(epoch) if old_rows else ():
            for key, example in zip(keys.tolist(), batches.batch(number).examples(), strict=True):
                row = unmatched.get(key, example)
                if np.array_equal(row.ids, example.ids) and np.array_equal(row.mask, example.mask):
                    unmatched.pop(key, None)
        if unmatched:
            raise cache.foreign(Path(folder), "it was made of other data")
        num_kept, done = cache.num_shards, cache.size.num_tokens
        missing = cache.info.size(len(batches.lengths) - cache.num_rows, total - done)
        cache.check_room(missing.num_bytes, "the cache")
        with cache.filling(indexes=False) as shard:
            for number, keys in enumerate(epoch):
                if all(key in old_rows for key in keys.tolist()):
                    continue
                batch = batches.batch(number)
                states, logits = score_text(target, batch.ids.to(target.device), cache.info.states)
                states, best = states.to(dtype).cpu(), logits.argmax(-1).int().cpu()
                new_rows = {
                    key: CacheRow(example, states[i, : len(example.ids)], best[i, : len(example.ids)].numpy())
                    for i, (key, example) in enumerate(zip(keys.tolist(), batch.examples(), strict=True))
                    if key not in old_rows
                }
                if shard.num_bytes(new_rows.values()) > shard_bytes:
                    shard.write()
                shard.rows |= new_rows
                done += sum(len(row.states) for row in new_rows.values())
                if on_progress is not None:
                    on_progress(done, total)
        cache.write_index()
    return CacheWritten(cache.size, cache.num_shards, num_kept)
