"""Answers of servers with the OpenAI API: vLLM, SGLang, llama.cpp, and many others."""

from __future__ import annotations

import http.client
import json
import queue
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from draftwing.errors import ConfigError, DataError
from draftwing.sampling import Sampling
from draftwing.train.answers import AnsweredTask, Task, sampling_of

REFUSED = (400, 413, 422)  # the status if this prompt is not accepted; others may be
BUSY = (408, 425, 429)  # and everything from 500
MAX_WAIT = 60.0  # seconds between two tries
LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Besides the settings that every server knows; sent only if they are set, since strict servers refuse unknown ones.
EXTRA_SETTINGS = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos")


class ServerAnswerer:
    """Answers with ``/v1/chat/completions`` (dialogues) and ``/v1/completions`` (documents).

    Several servers share the tasks. Each task has its own seed, so the server does not change its answer. If a server
    stops answering, the others restart its tasks.

    Args:
        url: of a server, with or without ``/v1``; or several.
        model: the name under which each serves the target.
        sampling: of every answer; its seed is mixed with each task's id and cut to 31 bits. From several, each task
            gets one (see ``sampling_of``).
        num_parallel: simultaneous requests to each server.
        api_key: sent as a bearer token.
        timeout: seconds for one answer.
        num_retries: of a request if the server was busy or closed the connection.
        backoff: seconds before the first retry; each further one waits twice as long, up to a minute.

    Attributes:
        num_tokens: written so far, of tasks that are done.
        gone: the errors of servers that stopped answering while others continued.

    Raises:
        ConfigError: an invalid URL, or a number out of range.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        model: str,
        sampling: Sampling | Sequence[Sampling],
        *,
        num_parallel: int = 16,
        api_key: str | None = None,
        timeout: float = 600.0,
        num_retries: int = 6,
        backoff: float = 1.0,
    ) -> None:
        if num_parallel < 1 or num_retries < 0 or timeout <= 0:
            raise ConfigError("num_parallel must be at least 1, num_retries at least 0, timeout above 0")
        urls = dict.fromkeys([url] if isinstance(url, str) else url)
        if not urls:
            raise ConfigError("expected the URL of a server such as http://localhost:8000, found none")
        self._servers = [_Server(each, model, api_key, timeout, (num_retries, backoff)) for each in urls]
        self._model, self._num_parallel = model, num_parallel
        self._choices = [sampling] if isinstance(sampling, Sampling) else list(sampling)
        self.num_tokens, self.gone = 0, list[str]()

    def answer(self, tasks: Iterable[Task]) -> Iterator[AnsweredTask]:
        """See ``Answerer``.

        Raises:
            DataError: no server can be reached, all keep failing, or one refuses everything (wrong key, unknown model).
        """
        shared = _SharedTasks(tasks, self._servers)
        self.gone = shared.gone

        def work(server: _Server) -> None:
            try:
                while (task := shared.take(server)) is not None:
                    try:
                        shared.results.put(self._answer(task, server))
                    except _GoneError as error:
                        shared.give_back(task, server, error)
                    finally:
                        shared.finish()
            except Exception as error:  # raised again in the calling thread
                shared.results.put(error)
            shared.results.put(None)

        # Daemons: after Ctrl-C, requests that may take minutes do not delay the exit.
        threads = [
            threading.Thread(target=work, args=(server,), daemon=True)
            for _ in range(self._num_parallel)
            for server in self._servers
        ]
        try:
            for thread in threads:
                thread.start()
            num_running = len(threads)
            while num_running:
                result = shared.results.get()
                if isinstance(result, Exception):
                    raise result
                if result is None:
                    num_running -= 1
                else:
                    yield result
        finally:
            shared.stop()

    def _answer(self, task: Task, server: _Server) -> AnsweredTask:
        sampling = sampling_of(self._choices, task.id)
        answer, num_tokens = AnsweredTask(task, sampling.temperature), 0
        while (prompt := answer.next_prompt()) is not None:
            try:
                text, finish_reason, count = self._complete(prompt, sampling, server)
            except _RefusedError as error:
                return answer.finish(str(error))
            if not text.strip():
                return answer.finish("the answer is empty")
            answer.take(text, finish_reason, count)
            num_tokens += count
        self.num_tokens += num_tokens  # only displayed: two threads at once may lose a count
        return answer.finish()

    def _complete(
        self, prompt: str | list[dict[str, str]], sampling: Sampling, server: _Server
    ) -> tuple[str, str, int]:
        """Return text, finish reason and number of tokens."""
        body: dict[str, Any] = {
            "model": self._model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": (sampling.seed or 0) & 0x7FFFFFFF,  # llama.cpp's seeds have 32 bits
        }
        default = Sampling()
        body |= {name: value for name in EXTRA_SETTINGS if (value := getattr(sampling, name)) != getattr(default, name)}
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if isinstance(prompt, str):
            reply = server.post("/completions", {**body, "prompt": prompt})
        else:
            messages = [{"role": message["role"], "content": message["content"]} for message in prompt]
            reply = server.post("/chat/completions", {**body, "messages": messages})
        try:
            choice = reply["choices"][0]
            text = choice["text"] if isinstance(prompt, str) else choice["message"]["content"]
            usage = reply.get("usage") or {}
            finish_reason = "length" if choice.get("finish_reason") == "length" else "stop"
            return str(text or ""), finish_reason, int(usage.get("completion_tokens") or 0)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{server.url}: expected a completion, found {json.dumps(reply)[:120]}: is this a server with the "
                f"OpenAI API?"
            ) from error


class _SharedTasks:
    """The tasks of one ``answer``, shared by its threads, and their results (None: a thread has ended)."""

    def __init__(self, tasks: Iterable[Task], servers: Sequence[_Server]) -> None:
        self._tasks, self._returned, self._num_running = iter(tasks), list[Task](), 0
        self._changed, self._left = threading.Condition(), list(servers)
        self._stopping, self.gone = threading.Event(), list[str]()
        self.results: queue.Queue[AnsweredTask | Exception | None] = queue.Queue()
        for server in servers:
            server.stopping = self._stopping

    def take(self, server: _Server) -> Task | None:
        """Return the next task; wait while running ones may be given back. None after the last one."""
        with self._changed:
            while not self._stopping.is_set() and server in self._left:
                task = self._returned.pop() if self._returned else next(self._tasks, None)
                if task is not None:
                    self._num_running += 1
                    return task
                if not self._num_running:
                    return None
                self._changed.wait()
            return None

    def give_back(self, task: Task, server: _Server, error: _GoneError) -> None:
        """Return the task of a server that stopped answering. Raises DataError if no other server is left."""
        with self._changed:
            self._returned.append(task)
            if server in self._left:
                self._left.remove(server)
                self.gone.append(str(error))
            if not self._left:
                raise DataError(str(error)) from error

    def finish(self) -> None:
        """Count a task as done, or as given back."""
        with self._changed:
            self._num_running -= 1
            self._changed.notify_all()

    def stop(self) -> None:
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()


class _Server:
    def __init__(self, url: str, model: str, api_key: str | None, timeout: float, retries: tuple[int, float]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"server {url!r}: expected a URL such as http://localhost:8000")
        base = url.rstrip("/")
        self.url = base if base.endswith("/v1") else base + "/v1"
        self._model, self._timeout, self._retries = model, timeout, retries
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # A proxy from the environment cannot reach this machine's ports.
        handlers = [urllib.request.ProxyHandler({})] if parts.hostname in LOOPBACK else []
        self._opener = urllib.request.build_opener(*handlers)
        self._was_reached = False
        self.stopping = threading.Event()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the reply's JSON; try again while the server is busy or cannot be reached."""
        where, problem = self.url + path, ""
        request = urllib.request.Request(where, json.dumps(body).encode(), self._headers)
        num_retries, backoff = self._retries
        for attempt in range(num_retries + 1):
            try:
                content = self._send(request)
                break
            except _BusyError as error:
                problem = str(error)
                wait = min(backoff * 2.0**attempt, MAX_WAIT) * random.uniform(0.75, 1.25)
                if attempt < num_retries and self.stopping.wait(max(wait, error.wait)):
                    raise DataError(f"{where}: stopped while waiting to try again ({problem})") from error
        else:
            raise _GoneError(
                f"{where}: no answer after {num_retries + 1} tries ({problem}): check the server, then run the same "
                f"command again; what was finished is kept"
            )
        try:
            return json.loads(content)
        except ValueError as error:
            raise DataError(
                f"{where}: expected JSON, found {content[:80]!r}: is this a server with the OpenAI API?"
            ) from error

    def _send(self, request: urllib.request.Request) -> bytes:
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                self._was_reached = True
                return bytes(response.read())
        except urllib.error.HTTPError as error:
            self._was_reached = True
            problem = f"{error.code} {_error_message(error)}"
            if error.code in REFUSED:
                raise _RefusedError(problem) from error
            if error.code in BUSY or error.code >= 500:
                raise _BusyError(problem, _retry_after(error)) from error
            raise DataError(
                f"{request.full_url} for model {self._model!r}: {problem}: check the URL, the model's name and "
                f"the API key"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            problem = str(getattr(error, "reason", error)) or type(error).__name__
            if self._was_reached:
                raise _BusyError(problem) from error
            raise _GoneError(
                f"{self.url}: no server can be reached ({problem}): start it, or correct its URL"
            ) from error


class _GoneError(Exception):
    pass


class _RefusedError(Exception):
    pass


class _BusyError(Exception):
    def __init__(self, problem: str, wait: float = 0.0) -> None:
        super().__init__(problem)
        self.wait = wait


def _error_message(error: urllib.error.HTTPError) -> str:
    try:
        content = error.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return str(error.reason)
    try:
        reply = json.loads(content)
        reply = reply.get("error", reply)
        return str(reply["message"] if isinstance(reply, dict) else reply)[:300]
    except (ValueError, KeyError, AttributeError):
        return content.strip()[:300] or str(error.reason)


def _retry_after(error: urllib.error.HTTPError) -> float:
    """Return the seconds that the server requests; 0 if it sends none, or a date."""
    try:
        return min(float(error.headers.get("Retry-After", 0)), MAX_WAIT)
    except ValueError:
        return 0.0
