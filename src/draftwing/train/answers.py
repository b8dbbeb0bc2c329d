"""Training data in the target's own words: the prompts of a data set, answered by the target.

A draft model learns to predict its target, so answers of another model, or of people, teach it the wrong thing.
``regenerate`` has every prompt answered by an ``LM`` (``LMAnswerer``), by servers (``ServerAnswerer``) or by files of
answers (``BatchAnswerer``), and appends each record to a file at once, so that a stopped run continues from there. With
a cache of hidden states, records wait until their states are on the disk: what is in the file is in the cache, and what
is only in one of them is answered again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from tokenizers import Tokenizer as FastTokenizer

from draftwing.errors import ConfigError, DataError
from draftwing.remote import OnProgress, public_name
from draftwing.sampling import Sampling
from draftwing.storage import locked, writing
from draftwing.text.prompts import Message
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data import DataRecord, bare_tokenizer, find_files, read_records
from draftwing.train.feature_cache import CacheRow, GrowingCache, PendingShard

CHARACTERS_PER_TOKEN = 4  # if there is no tokenizer
RECORD_START = b'{"id": "'  # each line of the output starts with this


@dataclass(frozen=True)
class Task:
    """A dialogue or a document to be answered."""

    id: str  # hash of the rest, so that a prompt is recognised wherever it is read from
    where: str  # file and line
    messages: tuple[Message, ...]  # a dialogue's system and user turns; each user turn gets an answer
    text: str  # beginning of a document, to be continued; empty for a dialogue

    @property
    def key(self) -> int:
        """The id as an integer of 64 bits: the key of its row in a cache."""
        return int.from_bytes(bytes.fromhex(self.id), "little", signed=True)

    @property
    def num_turns(self) -> int:
        return 1 if self.text else sum(message["role"] == "user" for message in self.messages)

    @property
    def num_prompt_tokens(self) -> int:
        """An estimate of the tokens without the answers."""
        return len(self.text or "".join(message["content"] for message in self.messages)) // CHARACTERS_PER_TOKEN


class AnsweredTask:
    """A task and its answers so far: one for each user turn, or one that continues a document."""

    def __init__(self, task: Task, temperature: float | None = None) -> None:
        self.task, self.temperature = task, temperature
        self.prompted: list[Message] = []  # the messages of the latest prompt; empty for a document
        self.messages: list[Message] = []  # the dialogue, as far as it was answered
        self.text = ""  # the document with its continuation
        self.finish_reason = ""  # that of the latest answer: ``stop`` or ``length``
        self.num_tokens = 0  # in all answers
        self.problem = ""  # the reason why there is no answer
        self.row: CacheRow | None = None  # the ids that the target read and wrote, with its states if these are stored
        self._waiting = deque(task.messages)

    def next_prompt(self) -> str | list[Message] | None:
        """Return the document's beginning, or the messages up to the next user turn; None after the last one."""
        if self.task.text:
            return None if self.finish_reason else self.task.text
        self.prompted = list(self.messages)
        while self._waiting:
            self.prompted.append(self._waiting.popleft())
            if self.prompted[-1]["role"] == "user":
                return list(self.prompted)
        return None

    def take(self, text: str, finish_reason: str, num_tokens: int) -> None:
        """Add the answer to the latest prompt."""
        self.finish_reason = finish_reason
        self.num_tokens += num_tokens
        if self.task.text:
            self.text = self.task.text + text
        else:
            cut = {"finish_reason": "length"} if finish_reason == "length" else {}
            self.messages = [*self.prompted, {"role": "assistant", "content": text, **cut}]

    def finish(self, problem: str = "") -> AnsweredTask:
        """Store the problem if there is no answer at all, and return self."""
        self.problem = "" if self.messages or self.text else problem or "there was nothing to answer"
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return one line of the output."""
        content = {"messages": self.messages} if self.messages else {"text": self.text}
        result = {"finish_reason": self.finish_reason, "num_tokens": self.num_tokens}
        drawn = {} if self.temperature is None else {"temperature": self.temperature}
        return {"id": self.task.id, "source": self.task.where, **content, **result, **drawn}


class Answerer(Protocol):
    """Answers tasks in any order."""

    def answer(self, tasks: Iterable[Task]) -> Iterator[AnsweredTask]:
        """Yield every task's answer as soon as it is complete; those of tasks that stay open are left out."""
        ...


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def seed_of(seed: int, task_id: str) -> int:
    """Return the seed of one task, in [0, 2**63), a function of the run's seed and the task."""
    return _hash64(f"{seed} {task_id}") >> 1


def sampling_of(choices: Sequence[Sampling], task_id: str) -> Sampling:
    """Return one of the choices with the task's own seed: a function of both, so that a resumed run gives the same."""
    seed = choices[0].seed or 0
    return replace(choices[_hash64(f"which {seed} {task_id}") % len(choices)], seed=seed_of(seed, task_id))


# --- reading tasks ---------------------------------------------------------------------------------------------------


def read_tasks(
    sources: Sequence[str | Path],
    *,
    prompt_tokens: int = 64,
    tokenizer: Tokenizer | None = None,
    output: Path | None = None,
    limit: int | None = None,
) -> list[Task]:
    """Return every dialogue's prompts and every document's beginning, without duplicates, at most ``limit``.

    Args:
        sources, output: see ``find_files``.
        prompt_tokens: of a document's beginning, which is cut back to a line end and at most half of the document.
        tokenizer: to count tokens; None counts one for four characters.
    """
    if prompt_tokens < 1:
        raise ConfigError(f"prompt_tokens must be at least 1, found {prompt_tokens}")
    bare = bare_tokenizer(tokenizer) if tokenizer is not None else None
    tasks: dict[str, Task] = {}
    for record in itertools.chain.from_iterable(map(read_records, find_files(sources, output=output))):
        task = _make_task(record, prompt_tokens, bare)
        if task is not None:
            tasks.setdefault(task.id, task)
        if limit is not None and len(tasks) >= limit:
            break
    if not tasks:
        names = ", ".join(map(public_name, sources))
        raise DataError(f"{names}: there is nothing to answer: give user turns, or documents")
    return list(tasks.values())[:limit]


def _make_task(record: DataRecord, prompt_tokens: int, bare: FastTokenizer | None) -> Task | None:
    text = "" if record.text is None else _beginning(record.text, prompt_tokens, bare)
    prompts = [message for message in record.messages if message["role"] in ("system", "user")]
    if not text and not any(message["role"] == "user" for message in prompts):
        return None
    content = json.dumps([text, prompts], ensure_ascii=False, sort_keys=True)
    return Task(hashlib.blake2b(content.encode(), digest_size=8).hexdigest(), record.where, tuple(prompts), text)


def _beginning(text: str, num_tokens: int, bare: FastTokenizer | None) -> str:
    if bare is None:
        end = min(num_tokens * CHARACTERS_PER_TOKEN, len(text) // 2)
    else:
        # Few tokens are longer than 32 characters, and a long document need not be encoded for its beginning.
        offsets = bare.encode(text[: 32 * num_tokens], add_special_tokens=False).offsets
        num = min(num_tokens, len(offsets) // 2)
        end = offsets[num - 1][1] if num else 0
    head = text[:end]
    if not text.startswith("\n", end):
        lines = head.rpartition("\n")[0]
        head = lines if lines.strip() else head
    return head.rstrip("\n") if head.strip() else ""


# --- writing answers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Regenerated:
    num_written: int  # records added to the file, or only to the cache if the file had them
    num_kept: int  # tasks that were in the file, and in the cache, before
    num_tokens: int  # generated by this run
    skipped: tuple[tuple[str, str], ...]  # ``(where, why)`` of tasks without an answer
    seconds: float = field(default=0.0, compare=False)  # seconds of this run

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


def regenerate(
    tasks: Sequence[Task],
    answerer: Answerer,
    output: Path,
    *,
    cache: GrowingCache | None = None,
    on_progress: OnProgress | None = None,
) -> Regenerated:
    """Answer the tasks that ``output`` (JSON lines) does not have yet, and append each answer when it is complete.

    Stopped at any moment, by Ctrl-C or a kill, it loses only unfinished answers; run again, it continues.

    Args:
        cache: stores the rows of the answers. A record is then appended when its shard has been written: a kill loses
            at most that shard's answers, Ctrl-C none.
        on_progress: called with the tasks done, including those of earlier runs, and the total.

    Raises:
        DataError: the file holds something else, another process writes to it, or no task could be answered. With a
            cache also: see ``GrowingCache``; or it has another answer to a task than the file, or than this run.
    """
    num_written = num_tokens = 0
    skipped: list[tuple[str, str]] = []
    with locked(output, DataError, is_file=True), nullcontext() if cache is None else cache.opened():
        if cache is not None:
            cache.check_room()
        with writing(output, DataError):
            output.touch()
            file = output.open("r+b")
        with file:
            finished = _read_finished(output, file)
            records = _Output(output, file, finished, cache)
            waiting = [
                task
                for task in tasks
                if task.id not in finished or (cache is not None and task.key not in cache.old_rows)
            ]
            num_kept = len(tasks) - len(waiting)
            began = time.perf_counter()
            if on_progress is not None:
                on_progress(num_kept, len(tasks))
            try:
                for answer in answerer.answer(waiting):
                    num_tokens += answer.num_tokens
                    if answer.problem:
                        skipped.append((answer.task.where, answer.problem))
                    else:
                        records.put(answer)
                        num_written += 1
                    if on_progress is not None:
                        on_progress(num_kept + num_written + len(skipped), len(tasks))
            finally:
                records.flush()
    if skipped and not num_written and not num_kept:
        raise DataError(f"none of the {len(skipped)} prompts could be answered; the first one, {': '.join(skipped[0])}")
    return Regenerated(num_written, num_kept, num_tokens, tuple(skipped), time.perf_counter() - began)


def read_finished_ids(output: Path) -> set[str]:
    """Return the ids of the tasks that ``output`` has; empty if there is no file. Raises DataError as above."""
    if not output.exists():
        return set()
    with locked(output, DataError, is_file=True), writing(output, DataError), output.open("r+b") as file:
        return set(_read_finished(output, file))


class _Output:
    """Writes to the file, and to the cache; a task that is already in one of them is written only to the other.

    ``flush`` may be repeated from its start, so an interrupt loses nothing and writes nothing twice.
    """

    def __init__(self, path: Path, file: BinaryIO, finished: Mapping[str, bytes], cache: GrowingCache | None) -> None:
        self._path, self._file, self._finished, self._cache = path, file, finished, cache
        self._shard = None if cache is None else PendingShard(cache, indexes=True)
        self._end, self._lines = file.seek(0, 2), list[bytes]()  # the next lines, and the byte at which they belong

    def put(self, answer: AnsweredTask) -> None:
        """Add a record, and flush if a shard is full or there is no cache."""
        task, cache, shard = answer.task, self._cache, self._shard
        line = (json.dumps(answer.to_dict(), ensure_ascii=False) + "\n").encode("utf-8", "replace")
        old_digest = self._finished.get(task.id)
        if old_digest is not None and old_digest != _digest(json.loads(line)):
            raise self._conflict(task)
        if cache is not None and shard is not None:
            if answer.row is None:
                raise DataError(f"{task.where}: the answer has no hidden states: this answerer does not record them")
            old_row = cache.old_rows.get(task.key)
            if old_row is None:
                shard.rows[task.key] = answer.row
            elif not np.array_equal(old_row.ids, answer.row.example.ids):
                raise self._conflict(task)
        if old_digest is None:
            self._lines.append(line)
        if cache is None or shard is None or not shard.rows:
            self.flush()
        elif shard.num_bytes() >= cache.shard_bytes:
            self.flush()
            cache.check_room()

    def flush(self) -> None:
        """Write the pending records: the states first, so that no record lacks them."""
        if self._shard is not None:
            self._shard.write()
        content = b"".join(self._lines)
        with writing(self._path, DataError, "; then run the same command again: what was finished is kept"):
            self._file.seek(self._end)
            self._file.write(content)
            self._file.flush()
        self._lines, self._end = [], self._end + len(content)

    def _conflict(self, task: Task) -> DataError:
        return DataError(
            f"{self._path}: task {task.id} ({task.where}) had another answer before, of other settings or another "
            f"model: give what it was made with, or write to another file and folder"
        )


def _read_finished(output: Path, file: BinaryIO) -> dict[str, bytes]:
    """Return the ids in the file, with a digest of each record; a partial last line of a killed run is cut off."""
    digests: dict[str, bytes] = {}
    end, line = 0, b""
    for number, line in enumerate(file, 1):
        try:
            record = json.loads(line)
            digests[str(record["id"])] = _digest(record)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            if not line.endswith(b"\n") and line.startswith(RECORD_START[: len(line)]):
                line = b"\n"
                break
            raise DataError(
                f"{output}, line {number}: expected a record that an earlier run wrote, found {line[:40]!r}: give "
                f"another file to write to"
            ) from None
        end += len(line)
    file.seek(end)
    file.truncate()
    if end and not line.endswith(b"\n"):
        file.write(b"\n")
    return digests


def _digest(record: Mapping[str, Any]) -> bytes:
    """Hash the prompts and answers of a record, without its settings and counts."""
    content = json.dumps([record.get("messages"), record.get("text")], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=8).digest()
