"""Training data that is read while the run trains on it: data sets larger than memory or disk.

The records of all sources, one of each in turn, are read in blocks of about 16 million characters. A block is encoded
and cut into batches like a corpus, so its rows are shuffled among each other; ``datasets`` also shuffles the files of a
data set. What a run reads is a function of its sources and its seed, and a checkpoint stores where its block begins: a
resumed run reads the same batches without reading what came before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from draftwing.errors import DataError
from draftwing.remote import OnProgress
from draftwing.train.data import (
    Batch,
    Batches,
    Corpus,
    DataRecord,
    DataSet,
    DialogueEncoder,
    Source,
    check_not_empty,
    encode,
    read_records,
    split_at,
    unit_hashes,
)

# Characters of a block: some 4 million tokens, which take 20 MB as ids and masks, are read and encoded in seconds, and
# last for 2,000 batches of 2,048. Dialogues of 4,000 characters are shuffled among 4,000 others.
BLOCK_CHARACTERS = 2**24


class _Reader:
    """The records of one source, an epoch at a time, from the start or a ``position``."""

    def __init__(self, source: Source, seed: int, epoch: int, position: Any) -> None:
        self._source = source
        # A buffer of one record leaves only the order of the files to be shuffled, whose place can be stored exactly.
        self._data: Any = source.open().shuffle(seed=seed, buffer_size=1) if isinstance(source, DataSet) else None
        if self._data is not None and position is not None:
            self._data.load_state_dict(position["data"])
        self.begin(epoch, 0 if position is None else int(position["count"]))

    def begin(self, epoch: int, count: int = 0) -> None:
        """Start an epoch, after ``count`` records."""
        self._count = count
        if isinstance(self._source, DataSet):
            self._data.set_epoch(epoch)
            self._records = self._source.read(self._data, count + 1)
        else:
            self._records = itertools.islice(read_records(self._source), count, None)

    @property
    def position(self) -> dict[str, Any]:
        return {"count": self._count, **({} if self._data is None else {"data": self._data.state_dict()})}

    def next(self) -> DataRecord | None:
        """Return the next record; None at the end of the epoch."""
        record = next(self._records, None)
        self._count += record is not None
        return record


class StreamedBatches:
    """Batches of a stream, by number, as ``Batches`` has those of a corpus; reading backwards begins again.

    Args:
        validation_share: of the units of the first block that are held out (see ``data.split``); at least one. Units
            with such hashes are left out of all blocks, so that none equals one that is held out.
        block_characters: size of a block.
        on_progress: called with the characters of the first block that were read, and with its size.

    Attributes:
        training: the first block without what is held out.
        validation: the part of the first block that is held out.
        num_batches_per_epoch: batches in the first block.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        encoder: DialogueEncoder,
        tokens_per_batch: int,
        seed: int = 0,
        *,
        validation_share: float = 0.0,
        block_characters: int = BLOCK_CHARACTERS,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._sources, self._encoder, self._seed = sources, encoder, seed
        self._tokens_per_batch, self._block_characters = tokens_per_batch, block_characters
        self._limit = -1.0
        self._go_to(None)
        whole = encode(self._read(on_progress), encoder)
        check_not_empty(whole, encoder, ", ".join(source.name for source in sources))
        if validation_share:
            self._limit = max(validation_share, float(unit_hashes(whole, seed).min()))
        self.training, self.validation = split_at(whole, self._limit, seed)
        self._use(self.training)
        self.num_batches_per_epoch = self._num_batches
        if not self._num_batches:
            raise DataError(
                f"{', '.join(source.name for source in sources)}: all of its {len(whole.examples)} dialogues and "
                f"sections of text are held out: give more data, or hold out nothing (validation_share 0)"
            )

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Return a batch, or one rank's rows of it (possibly none); see ``BatchPlan.collate``."""
        if number < self._first:
            self.restore(None)
        while number >= self._first + self._num_batches:
            self._advance()
        assert self._batches is not None
        # In every block, the batches of another epoch: the seed alone would shuffle all blocks alike.
        return self._batches.batch(self._block * self._num_batches + number - self._first, rank, world_size)

    @property
    def position(self) -> dict[str, Any]:
        """The start of the present block, for ``restore``."""
        names = [source.name for source in self._sources]
        place = {"epoch": self._epoch, "block": self._block, "first": self._first}
        return {"sources": names, **place, "readers": self._positions}

    def restore(self, position: dict[str, Any] | None) -> None:
        """Go to a ``position``; None is the start. Raises DataError for one of other sources."""
        names = [source.name for source in self._sources]
        if position is not None and position["sources"] != names:
            raise DataError(
                f"this run was stopped in {', '.join(position['sources'])}, and the data is {', '.join(names)}: give "
                f"the same --data, or choose another --out"
            )
        self._go_to(position)
        self._use(split_at(encode(self._read(), self._encoder), self._limit, self._seed)[0])

    def _go_to(self, position: dict[str, Any] | None) -> None:
        start = position or {"epoch": 0, "block": 0, "first": 0, "readers": [None] * len(self._sources)}
        # ``first`` is the number of the present block's first batch.
        self._epoch, self._block, self._first = (int(start[name]) for name in ("epoch", "block", "first"))
        pairs = zip(self._sources, start["readers"], strict=True)
        self._readers = [_Reader(source, self._seed, self._epoch, place) for source, place in pairs]
        self._positions = [reader.position for reader in self._readers]

    def _advance(self) -> None:
        self._first, self._block = self._first + self._num_batches, self._block + 1
        if self._is_last:
            self._epoch += 1
            for reader in self._readers:
                reader.begin(self._epoch)
        self._positions = [reader.position for reader in self._readers]
        self._use(split_at(encode(self._read(), self._encoder), self._limit, self._seed)[0])

    def _read(self, on_progress: OnProgress | None = None) -> Iterator[DataRecord]:
        """Yield the records of a block, one of each source in turn."""
        characters, active = 0, list(self._readers)
        while active and characters < self._block_characters:
            for reader in list(active):
                record = reader.next()
                if record is None:
                    active.remove(reader)
                    continue
                yield record
                characters += len(record.text or "") + sum(len(message["content"]) for message in record.messages)
                if on_progress is not None:
                    on_progress(min(characters, self._block_characters), self._block_characters)
        self._is_last = not active

    def _use(self, corpus: Corpus) -> None:
        """Make the batches of the present block; there are none if nothing of it is left."""
        self._batches, self._num_batches = None, 0
        if corpus.num_tokens:
            max_length = self._encoder.max_length
            self._batches = Batches(corpus, self._tokens_per_batch, max_length, self._seed)
            self._num_batches = self._batches.num_batches_per_epoch
