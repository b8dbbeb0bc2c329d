"""What is to be answered: the prompts of dialogues and documents, each known by a hash of its words."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from tokenizers import Tokenizer as FastTokenizer

from draftwing.errors import ConfigError, DataError
from draftwing.sampling import Sampling
from draftwing.text.prompts import Message
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.checkpoint import locked
from draftwing.train.data import Record, bare_tokenizer, find_files, read_records
from draftwing.train.feature_cache import GrowingCache, Row

_CHARACTERS_PER_TOKEN = 4  # where no tokenizer is at hand


@dataclass(frozen=True)
class Task:
    """What is to be answered.

    Attributes:
        id: a hash of the rest, so that a prompt is known again wherever it is read from.
        where: file and line.
        messages: of a dialogue: the system's and the user's turns; each of the latter wants an answer.
        text: the beginning of a document, to go on from; empty for a dialogue.
    """

    id: str
    where: str
    messages: tuple[Message, ...]
    text: str

    @property
    def key(self) -> int:
        """The id as a number of 64 bits, as caches of features have it."""
        return int.from_bytes(bytes.fromhex(self.id), "little", signed=True)

    @property
    def num_turns(self) -> int:
        """Answers that it wants."""
        return 1 if self.text else sum(message["role"] == "user" for message in self.messages)

    @property
    def num_prompt_tokens(self) -> int:
        """About so many tokens of it stand there before the first answer."""
        return len(self.text or "".join(message["content"] for message in self.messages)) // _CHARACTERS_PER_TOKEN


@dataclass(frozen=True)
class Answer:
    """A task that has come to its end.

    Attributes:
        messages: the dialogue so far as it was answered.
        text: the document.
        finish_reason: of the last answer: ``stop`` or ``length``.
        num_tokens: of all answers.
        temperature: with which they were drawn, where that is known.
        problem: why there is no answer at all; else empty.
        row: the ids as the target read and wrote them, with its hidden states, where these are kept.
    """

    task: Task
    messages: tuple[Message, ...]
    text: str
    finish_reason: str
    num_tokens: int
    problem: str = ""
    temperature: float | None = None
    row: Row | None = None

    def to_dict(self) -> dict[str, Any]:
        """One line of the output."""
        said = {"messages": list(self.messages)} if self.messages else {"text": self.text}
        how: dict[str, Any] = {"finish_reason": self.finish_reason, "num_tokens": self.num_tokens}
        if self.temperature is not None:
            how["temperature"] = self.temperature
        return {"id": self.task.id, "source": self.task.where, **said, **how}


class Answerer(Protocol):
    """Answers tasks in any order, each as soon as it is done."""

    def answer(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        """Every task's answer."""
        ...


class Dialogue:
    """A task on its way: what to ask next, and what was answered. A document is asked once.

    Attributes:
        temperature: of its answers, for the record.
        row: of what was answered, for ``Answer.row``: the last answer's, which has all before it too.
    """

    def __init__(self, task: Task, temperature: float | None = None) -> None:
        self.task, self.temperature = task, temperature
        self.row: Row | None = None
        self._waiting = deque(task.messages)
        self._asked: list[Message] = []
        self._answered: list[Message] = []
        self._text, self._finish_reason, self._num_tokens = "", "", 0

    def next_prompt(self) -> str | list[Message] | None:
        """The document's beginning, or the messages up to the next user turn; None when nothing is left to ask."""
        if self.task.text:
            return None if self._finish_reason else self.task.text
        self._asked = list(self._answered)
        while self._waiting:
            self._asked.append(self._waiting.popleft())
            if self._asked[-1]["role"] == "user":
                return list(self._asked)
        return None

    @property
    def asked(self) -> Sequence[Message]:
        """The messages of the prompt given last; none of a document."""
        return self._asked

    def take(self, text: str, finish_reason: str, num_tokens: int) -> None:
        """The answer to the prompt given last."""
        self._finish_reason = finish_reason
        self._num_tokens += num_tokens
        if self.task.text:
            self._text = self.task.text + text
        else:
            cut = {"finish_reason": "length"} if finish_reason == "length" else {}
            self._answered = [*self._asked, {"role": "assistant", "content": text, **cut}]

    def finish(self, problem: str = "") -> Answer:
        """What there is; the problem counts only where there is nothing."""
        found = bool(self._answered or self._text)
        why = "" if found else problem or "there was nothing to answer"
        said = tuple(self._answered), self._text, self._finish_reason, self._num_tokens
        return Answer(self.task, *said, why, self.temperature, self.row)


def seed_of(seed: int, task_id: str) -> int:
    """The seed of one task, in [0, 2**63): it depends on nothing but the run's seed and the task."""
    digest = hashlib.blake2b(f"{seed} {task_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sampling_of(choices: Sequence[Sampling], task_id: str) -> Sampling:
    """One of several ways to sample, and a seed of the task's own: a function of the choices and the task alone.

    So a run that was stopped, or whose tasks come in another order, gives each task the same.
    """
    seed = choices[0].seed or 0
    digest = hashlib.blake2b(f"which {seed} {task_id}".encode(), digest_size=8).digest()
    chosen = choices[int.from_bytes(digest, "little") % len(choices)]
    return replace(chosen, seed=seed_of(seed, task_id))


def read_tasks(
    sources: Sequence[str | Path],
    *,
    prompt_tokens: int = 64,
    per_document: int = 1,
    tokenizer: Tokenizer | None = None,
    exclude: Path | None = None,
    output: Path | None = None,
    limit: int | None = None,
) -> list[Task]:
    """Every dialogue's prompts and every document's beginning; equal ones once.

    Args:
        sources, exclude: see ``find_files``.
        prompt_tokens: of a document, cut back to the end of a line; never more than half of it.
        per_document: a document is cut at line ends into so many parts at most, each with a prompt of its own.
        tokenizer: to count them with; None takes a token for four characters.
        output: the file that will be written, which is left out of folders.
        limit: the first so many tasks alone.

    Raises:
        DataError: a source cannot be used, or there is nothing to ask.
        ConfigError: ``prompt_tokens`` below 1.
    """
    if prompt_tokens < 1 or per_document < 1:
        raise ConfigError(
            f"prompt_tokens and per_document must be at least 1, found {prompt_tokens} and {per_document}"
        )
    bare = bare_tokenizer(tokenizer) if tokenizer is not None else None
    tasks: dict[str, Task] = {}
    for file in find_files(sources, exclude, output=output):
        for record in read_records(file):
            for part in _parts(record, per_document, prompt_tokens):
                task = _task(part, prompt_tokens, bare)
                if task is not None:
                    tasks.setdefault(task.id, task)
            if limit is not None and len(tasks) >= limit:
                return list(tasks.values())[:limit]
    if not tasks:
        raise DataError(f"{', '.join(map(str, sources))}: there is nothing to ask: give user turns, or documents")
    return list(tasks.values())


def _parts(record: Record, count: int, prompt_tokens: int) -> Iterator[Record]:
    """A document in up to ``count`` parts of like length; a dialogue is one part."""
    text = record.text or ""
    count = min(count, len(text) // (2 * _CHARACTERS_PER_TOKEN * prompt_tokens))
    if count < 2:
        yield record
        return
    starts = [text.find("\n", len(text) * part // count) + 1 for part in range(1, count)]
    bounds = sorted({0, *starts, len(text)})
    for start, end in itertools.pairwise(bounds):
        if text[start:end].strip():
            yield replace(record, text=text[start:end].strip("\n"))


def _task(record: Record, prompt_tokens: int, bare: FastTokenizer | None) -> Task | None:
    text = "" if record.text is None else _beginning(record.text, prompt_tokens, bare)
    asked = [message for message in record.messages if message["role"] in ("system", "user")]
    if not text and not any(message["role"] == "user" for message in asked):
        return None
    content = json.dumps([text, asked], ensure_ascii=False, sort_keys=True)
    return Task(hashlib.blake2b(content.encode(), digest_size=8).hexdigest(), record.where, tuple(asked), text)


def _beginning(text: str, num_tokens: int, bare: FastTokenizer | None) -> str:
    if bare is None:
        end = min(num_tokens * _CHARACTERS_PER_TOKEN, len(text) // 2)
    else:
        # A token seldom has more than a few characters, and a long document need not be encoded for its beginning.
        offsets = bare.encode(text[: 32 * num_tokens], add_special_tokens=False).offsets
        num = min(num_tokens, len(offsets) // 2)
        end = offsets[num - 1][1] if num else 0
    head = text[:end]
    if not text.startswith("\n", end):
        lines = head.rpartition("\n")[0]
        head = lines if lines.strip() else head
    return head.rstrip("\n") if head.strip() else ""


# Training data in the target's own words: the prompts of a data set, answered anew.
#
# A draft model learns to guess what its target says, so answers of another model, or of people, teach it the wrong
# thing. ``regenerate`` asks every prompt again, of our own ``LM`` here (``LMAnswerer``) or of a server
# (``ServerAnswerer``), and appends each finished record to a file at once, so that a run that was stopped goes on where
# it was. With a cache beside it, records wait for their hidden states to be on the disk: what is in the file is in the
# cache, and what is in one of them alone is answered again.


_FIRST_KEY = b'{"id": "'  # what every line of the output begins with


@dataclass(frozen=True)
class Regenerated:
    """What a run did.

    Attributes:
        num_written: records added to the file, or to the cache alone where the file had them.
        num_kept: tasks that were in it before, and in the cache.
        num_tokens: generated by this run.
        skipped: ``(where, why)`` of tasks that could not be answered.
        seconds: that this run answered for.
    """

    num_written: int
    num_kept: int
    num_tokens: int
    skipped: tuple[tuple[str, str], ...]
    seconds: float = field(default=0.0, compare=False)

    @property
    def tokens_per_s(self) -> float:
        """Of this run, prompts not counted."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


def regenerate(
    tasks: Sequence[Task],
    answerer: Answerer,
    output: Path,
    *,
    cache: GrowingCache | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Regenerated:
    """Answer the tasks that ``output`` (JSON lines) does not have yet, and append each as it is done.

    Stopped at any moment, by Ctrl-C or a kill, it loses only what was not finished; run again, it goes on.

    Args:
        cache: keeps the rows of the answers. A record is then appended when its shard is whole: a kill loses at most
            that shard's answers, Ctrl-C none.
        on_progress: called with the tasks done, those of earlier runs counted, and the tasks in all.

    Raises:
        DataError: the file holds something else, another process writes to it, or not one task could be answered. Of
            the cache: see ``GrowingCache``; or it has other words of a task than the file, or than its answer now.
    """
    num_written = num_tokens = 0
    skipped: list[tuple[str, str]] = []
    with locked(output, DataError, is_file=True), nullcontext() if cache is None else cache.opened():
        finished = _finished(output)
        waiting = [task for task in tasks if task.id not in finished or (cache is not None and not cache.has(task.key))]
        num_kept = len(tasks) - len(waiting)
        began = time.perf_counter()
        with _open(output) as file:
            put = _Output(output, file, finished, cache)
            if on_progress is not None:
                on_progress(num_kept, len(tasks))
            try:
                for answer in answerer.answer(waiting):
                    num_tokens += answer.num_tokens
                    if answer.problem:
                        skipped.append((answer.task.where, answer.problem))
                    else:
                        put.put(answer)
                        num_written += 1
                    if on_progress is not None:
                        on_progress(num_kept + num_written + len(skipped), len(tasks))
            finally:
                put.flush()
    if skipped and not num_written and not num_kept:
        where, why = skipped[0]
        raise DataError(f"none of the {len(skipped)} prompts could be answered; the first one, {where}: {why}")
    return Regenerated(num_written, num_kept, num_tokens, tuple(skipped), time.perf_counter() - began)


@dataclass(frozen=True)
class _Pending:
    """What is to be written next, and where: to the file from the byte ``end`` on, to the cache as shard ``number``."""

    end: int
    number: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    lines: list[bytes] = field(default_factory=list)


class _Output:
    """The file, and the cache beside it. A task that is in one of them already goes to the other alone.

    ``flush`` may be done again from its start, and one assignment makes it count: an interrupt leaves nothing out and
    puts nothing down twice.
    """

    def __init__(self, path: Path, file: BinaryIO, finished: Mapping[str, bytes], cache: GrowingCache | None) -> None:
        self._path, self._file, self._finished, self._cache = path, file, finished, cache
        self._pending = _Pending(file.seek(0, 2), 0 if cache is None else cache.free_number)

    def put(self, answer: Answer) -> None:
        """Take a record, and write what is due."""
        pending, task, cache = self._pending, answer.task, self._cache
        line = (json.dumps(answer.to_dict(), ensure_ascii=False) + "\n").encode("utf-8", "replace")
        known = self._finished.get(task.id)
        if known is not None and known != _digest(json.loads(line)):
            raise self._other_words(task)
        if cache is not None:
            if answer.row is None:
                raise DataError(f"{task.where}: there are no hidden states of the answer: this answerer keeps none")
            if not cache.has(task.key):
                pending.rows[task.key] = answer.row
            elif not np.array_equal(cache.ids(task.key), answer.row.example.ids):
                raise self._other_words(task)
        if known is None:
            pending.lines.append(line)
        if cache is None or not pending.rows:
            self.flush()
        elif cache.is_enough(list(pending.rows.values())):
            self.flush()
            cache.check_room()

    def flush(self) -> None:
        """Write what waits: the states first, so that no record lacks them."""
        pending, cache = self._pending, self._cache
        if cache is not None and pending.rows:
            cache.write(pending.number, pending.rows)
        content = b"".join(pending.lines)
        try:
            self._file.seek(pending.end)
            self._file.write(content)
            self._file.flush()
        except OSError as error:
            raise DataError(
                f"{self._path}: cannot be written to ({error}): make room, then run the same command again; what was "
                f"finished is kept"
            ) from error
        self._pending = _Pending(pending.end + len(content), 0 if cache is None else cache.free_number)

    def _other_words(self, task: Task) -> DataError:
        return DataError(
            f"{self._path}: task {task.id} ({task.where}) was answered in other words before, by other settings or "
            f"another model: give what it was made with, or write to another file and folder"
        )


def _open(output: Path) -> BinaryIO:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.touch()
        return output.open("r+b")
    except OSError as error:
        raise DataError(f"{output}: cannot be written to ({error}): give another file") from error


def _finished(output: Path) -> dict[str, bytes]:
    """The ids that the file has, with a digest of what was said.

    A last line that was half written when a run was killed is cut off.
    """
    if not output.exists():
        return {}
    found: dict[str, bytes] = {}
    try:
        with output.open("r+b") as file:
            whole = 0
            for number, line in enumerate(file, 1):
                record = _record(line)
                if record is not None:
                    found[record["id"]] = _digest(record)
                elif line.endswith(b"\n") or not line.startswith(_FIRST_KEY[: len(line)]):
                    raise DataError(
                        f"{output}, line {number}: expected a record that an earlier run wrote, found "
                        f"{line[:40]!r}: give another file to write to"
                    )
                else:
                    break
                whole += len(line)
                if not line.endswith(b"\n"):
                    file.seek(whole)
                    file.write(b"\n")
                    return found
            file.truncate(whole)
    except OSError as error:
        raise DataError(f"{output}: cannot be read and written ({error}): give another file") from error
    return found


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("id"), str) else None


def _digest(record: Mapping[str, Any]) -> bytes:
    """Of what was asked and said; how long it took and with which settings are other matters."""
    said = json.dumps([record.get("messages"), record.get("text")], sort_keys=True)
    return hashlib.blake2b(said.encode(), digest_size=8).digest()
