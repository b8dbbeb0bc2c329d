"""What is to be answered: the prompts of dialogues and documents, each known by a hash of its words."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as FastTokenizer

from draftwing.errors import ConfigError, DataError
from draftwing.sampling import Sampling
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data.conversations import bare_tokenizer
from draftwing.train.data.sources import Message, Record, find_files, read_records
from draftwing.train.features.growing import Row

__all__ = ["Answer", "Answerer", "Dialogue", "Task", "read_tasks", "sampling_of", "seed_of"]

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
