"""Prompts and answers as files in the format of OpenAI's batch API, which vLLM's ``run_batch`` and hosted APIs read.

Each line of a file of requests has ``custom_id``, ``method``, ``url`` and ``body``; each line of a file of answers has
the ``custom_id``, and ``response`` (``status_code`` and ``body``) or ``error``. An answer to a dialogue's second turn
needs the first, so a dialogue with N turns takes N rounds: each writes a request for the first turn without an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from draftwing.errors import DataError
from draftwing.remote import local_copy, public_name
from draftwing.sampling import Sampling
from draftwing.storage import parse_json, replacing, writing
from draftwing.text.prompts import Message
from draftwing.train.answer_server import REFUSED, read_completion, request_of
from draftwing.train.answers import AnsweredTask, Task, sampling_of

CUSTOM_ID = re.compile(r"([0-9a-f]{16})-(\d+)-T([0-9.e+-]+)")  # task, turn, temperature


class _Answer(NamedTuple):
    where: str  # file and line
    temperature: float
    completion: tuple[str, str, int] | None  # text, finish reason and number of tokens
    problem: str  # the reason why there is no completion
    is_final: bool  # False if the same request may succeed later


class BatchAnswerer:
    """Answers tasks with the lines of files; ``write_requests`` asks for what they lack.

    Args:
        files: with the answers of all rounds, in any order. A completion counts more than an error.

    Attributes:
        num_open: tasks of the latest ``answer`` with a turn that no line answers.
        unread: ``(where, why)`` of lines that are no answers.

    Raises:
        DataError: a file cannot be read, or has not one answer to a request of ``write_requests``.
    """

    def __init__(self, files: Sequence[str | Path]) -> None:
        self._answers: dict[tuple[str, int], _Answer] = {}
        self.unread: list[tuple[str, str]] = []
        self.num_open = 0
        for file in files:
            self._read(local_copy(file), public_name(file))

    def _read(self, path: Path, name: str) -> None:
        num_read = 0
        try:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        num_read += self._add(line, f"{name}, line {number}")
        except OSError as error:
            raise DataError(f"{name}: cannot be read ({error}): give a file of answers, JSONL") from error
        if not num_read:
            why = f" ({': '.join(self.unread[0])})" if self.unread else ""
            raise DataError(
                f"{name}: has no answer to a request of --write-batch{why}: give the file that the batch wrote"
            )

    def _add(self, line: bytes, where: str) -> bool:
        """Store a line's answer; return False for a line that is none."""
        try:
            entry = parse_json(line)
            match = CUSTOM_ID.fullmatch(str(entry["custom_id"]))
            if match is None:
                raise ValueError(f"custom_id {entry['custom_id']!r:.60} is none of --write-batch")
            task, turn, temperature = match[1], int(match[2]), float(match[3])
        except (ValueError, LookupError, TypeError) as error:
            self.unread.append((where, f"expected a line with custom_id, found {line[:40]!r} ({error})"))
            return False
        answer = _read_answer(entry, where, temperature)
        old = self._answers.get((task, turn))
        if old is None or old.completion is None:
            self._answers[task, turn] = answer
        return True

    def answer(self, tasks: Iterable[Task]) -> Iterator[AnsweredTask]:
        self.num_open = 0
        for task in tasks:
            answer, turn, prompt, reply = self._follow(task)
            if prompt is not None and reply is None:
                self.num_open += 1
                continue
            if reply is None or (reply.is_final and turn):  # complete, or ended by a prompt that is not accepted
                yield answer.finish()
            else:
                yield AnsweredTask(task).finish(f"{reply.problem} ({reply.where})")

    def next_request(self, task: Task) -> tuple[int, str | list[Message]] | None:
        """Return the first turn without a completion and its prompt; None if all have one."""
        _, turn, prompt, _ = self._follow(task)
        return None if prompt is None else (turn, prompt)

    def count_unknown(self, tasks: Iterable[Task]) -> int:
        """Return the number of answered tasks that are none of ``tasks``. Raises DataError if all are."""
        answered = {task for task, _ in self._answers}
        unknown = answered - {task.id for task in tasks}
        if answered and unknown == answered:
            raise DataError(
                f"the {len(answered)} answers belong to no prompt of the data: give --data as for --write-batch"
            )
        return len(unknown)

    def _follow(self, task: Task) -> tuple[AnsweredTask, int, str | list[Message] | None, _Answer | None]:
        """Return the task with its completions, the next turn, its prompt (None if there is none), and its error."""
        first = self._answers.get((task.id, 0))
        answer, turn = AnsweredTask(task, None if first is None else first.temperature), 0
        while True:
            prompt, reply = answer.next_prompt(), self._answers.get((task.id, turn))
            if prompt is None:
                return answer, turn, None, None
            if reply is None or reply.completion is None:
                return answer, turn, prompt, reply
            answer.take(*reply.completion)
            turn += 1


def _read_answer(entry: Mapping[str, Any], where: str, temperature: float) -> _Answer:
    response, problem, is_final = entry.get("response"), entry.get("error"), False
    status = response.get("status_code") if isinstance(response, dict) else None
    if isinstance(response, dict) and status == 200 and not problem:
        try:
            completion = read_completion(response.get("body"))
        except ValueError as error:
            return _Answer(where, temperature, None, str(error), False)
        if completion[0].strip():
            return _Answer(where, temperature, completion, "", True)
        return _Answer(where, temperature, None, "the answer is empty", True)
    if isinstance(response, dict):
        problem, is_final = problem or response.get("body"), status in REFUSED
    while isinstance(problem, dict) and ("error" in problem or "message" in problem):
        problem = problem["error"] if "error" in problem else problem["message"]
    text = problem if isinstance(problem, str) else json.dumps(problem)
    return _Answer(where, temperature, None, f"{'' if status is None else status} {text[:300]}".strip(), is_final)


def write_requests(
    path: Path,
    tasks: Iterable[Task],
    model: str,
    samplings: Sequence[Sampling],
    *,
    answered: BatchAnswerer,
    finished: Set[str] = frozenset(),
) -> int:
    """Write a request for every task's next turn, and return their number; without any, no file is written.

    Args:
        model: the target's name at the service.
        samplings: of which each task gets one (see ``sampling_of``).
        answered: the answers of earlier rounds.
        finished: ids of tasks that are left out.
    """
    lines = []
    for task in tasks:
        request = None if task.id in finished else answered.next_request(task)
        if request is not None:
            sampling = sampling_of(samplings, task.id)
            url, body = request_of(model, request[1], sampling)
            name = f"{task.id}-{request[0]}-T{sampling.temperature!r}"
            lines.append(json.dumps({"custom_id": name, "method": "POST", "url": f"/v1{url}", "body": body}))
    if lines:
        with writing(path, DataError), replacing(path) as partial:
            partial.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return len(lines)
