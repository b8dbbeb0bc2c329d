"""Answers of servers with the OpenAI API: vLLM, SGLang, llama.cpp, and many others."""

from __future__ import annotations

import http.client
import json
import queue
import random
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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
        sampling: one, or several of which each task gets one (see ``sampling_of``); seeds are cut to 31 bits.
        num_parallel: simultaneous requests to each server.
        timeout: seconds for one answer.
        num_retries: of a request if the server was busy or closed the connection.
        backoff: seconds before the first retry; each further one waits twice as long, up to a minute.
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
        self._urls = list(dict.fromkeys(map(_api_url, [url] if isinstance(url, str) else url)))
        if not self._urls:
            raise ConfigError("expected the URL of a server such as http://localhost:8000, found none")
        self._model, self._num_parallel = model, num_parallel
        self._settings = model, api_key, timeout, (num_retries, backoff)
        self._choices = [sampling] if isinstance(sampling, Sampling) else list(sampling)
        self.num_tokens = 0  # written so far, in tasks that are done
        self.gone: list[str] = []  # errors of servers that stopped answering while others continued

    def answer(self, tasks: Iterable[Task]) -> Iterator[AnsweredTask]:
        waiting, stopping = deque(tasks), threading.Event()
        results: queue.Queue[AnsweredTask | Exception | None] = queue.Queue()  # None: a thread has ended
        servers = [_Server(url, *self._settings, stopping) for url in self._urls]

        def work(server: _Server) -> None:
            with suppress(IndexError):  # no task is left
                while not (stopping.is_set() or server.problem):
                    task = waiting.popleft()
                    try:
                        results.put(self._answer(task, server))
                    except _GoneError as error:
                        waiting.append(task)
                        server.problem = str(error)
                    except Exception as error:  # raised again in the calling thread
                        results.put(error)
            results.put(None)

        try:
            # Again, if a server has returned its tasks after the threads of the others have ended.
            while waiting and (running := [server for server in servers if not server.problem]):
                num_threads = self._num_parallel * len(running)
                for number in range(num_threads):
                    # Daemons: after Ctrl-C, requests that may take minutes do not delay the exit.
                    threading.Thread(target=work, args=(running[number % len(running)],), daemon=True).start()
                while num_threads:
                    result = results.get()
                    if isinstance(result, Exception):
                        raise result
                    if result is None:
                        num_threads -= 1
                    else:
                        yield result
            self.gone = [server.problem for server in servers if server.problem]
            if waiting:
                raise DataError(self.gone[-1])
        finally:
            stopping.set()

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
        reply = server.post(*request_of(self._model, prompt, sampling))
        try:
            return read_completion(reply)
        except ValueError as error:
            raise DataError(f"{server.url}: {error}: is this a server with the OpenAI API?") from error


def request_of(model: str, prompt: str | Sequence[Mapping[str, Any]], sampling: Sampling) -> tuple[str, dict[str, Any]]:
    """Return path (after ``/v1``) and body of the request that answers messages, or continues a text."""
    body: dict[str, Any] = {
        "model": model,
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
        return "/completions", {**body, "prompt": prompt}
    messages = [{"role": message["role"], "content": message["content"]} for message in prompt]
    return "/chat/completions", {**body, "messages": messages}


def read_completion(reply: Any) -> tuple[str, str, int]:
    """Return text, finish reason and number of tokens of either endpoint's reply. Raises ValueError for others."""
    try:
        choice = reply["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        usage = reply.get("usage") or {}
        finish_reason = "length" if choice.get("finish_reason") == "length" else "stop"
        return str(text or ""), finish_reason, int(usage.get("completion_tokens") or 0)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"expected a completion, found {json.dumps(reply)[:120]}") from error


def _api_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"server {url!r}: expected a URL such as http://localhost:8000")
    return url.rstrip("/").removesuffix("/v1") + "/v1"


class _Server:
    def __init__(
        self,
        url: str,
        model: str,
        api_key: str | None,
        timeout: float,
        retries: tuple[int, float],
        stopping: threading.Event,
    ) -> None:
        self.url, self._model, self._timeout, self._retries, self._stopping = url, model, timeout, retries, stopping
        self.problem = ""  # the reason why it is no longer asked
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # A proxy from the environment cannot reach this machine's ports.
        handlers = [urllib.request.ProxyHandler({})] if urlsplit(url).hostname in LOOPBACK else []
        self._opener = urllib.request.build_opener(*handlers)
        self._was_reached = False

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the reply's JSON; try again while the server is busy or cannot be reached."""
        where, problem = self.url + path, ""
        request = urllib.request.Request(where, json.dumps(body).encode(), self._headers)
        num_retries, backoff = self._retries
        for attempt in range(num_retries + 1):
            try:
                return self._send(request)
            except _BusyError as error:
                problem = str(error)
                wait = min(backoff * 2.0**attempt, MAX_WAIT) * random.uniform(0.75, 1.25)
                if attempt < num_retries and self._stopping.wait(max(wait, error.wait)):
                    raise DataError(f"{where}: stopped while waiting to try again ({problem})") from error
        raise _GoneError(
            f"{where}: no answer after {num_retries + 1} tries ({problem}): check the server, then run the same "
            f"command again; what was finished is kept"
        )

    def _send(self, request: urllib.request.Request) -> Any:
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                self._was_reached = True
                content = response.read()
        except urllib.error.HTTPError as error:
            self._was_reached = True
            problem = f"{error.code} {_read_message(error)}"
            if error.code in REFUSED:
                raise _RefusedError(problem) from error
            if error.code in BUSY or error.code >= 500:
                wait = error.headers.get("Retry-After", "")  # seconds, or a date
                raise _BusyError(problem, min(float(wait), MAX_WAIT) if wait.isdecimal() else 0.0) from error
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
        try:
            return json.loads(content)
        except ValueError as error:
            raise DataError(
                f"{request.full_url}: expected JSON, found {content[:80]!r}: is this a server with the OpenAI API?"
            ) from error


class _GoneError(Exception):
    pass


class _RefusedError(Exception):
    pass


class _BusyError(Exception):
    def __init__(self, problem: str, wait: float = 0.0) -> None:
        super().__init__(problem)
        self.wait = wait


def _read_message(error: urllib.error.HTTPError) -> str:
    try:
        content = error.read().decode("utf-8", "replace")
        reply = json.loads(content)
        reply = reply.get("error", reply)
        return str(reply["message"] if isinstance(reply, dict) else reply)[:300]
    except (OSError, http.client.HTTPException):
        return str(error.reason)
    except (ValueError, KeyError, AttributeError):
        return content.strip()[:300] or str(error.reason)
