"""Answers as the OpenAI protocol has them: whole ones, chunks of streams, usage, log-probabilities."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from draftwing.errors import DraftwingError
from draftwing.lm import LM
from draftwing.serve.convert import Asked, figures
from draftwing.serve.errors import Refusal, dumps, of_error
from draftwing.serve.tool_calls import Call, Delta, ToolReader
from draftwing.stats import Logprob, RowStep, Step
from draftwing.text.tokenizer import Tokenizer
from draftwing.worker import Part, Ticket, Worker

_LEAST = -9999.0  # JSON has no infinity


@dataclass(frozen=True)
class Shape:
    """What every part of one answer says of itself."""

    model: str
    is_chat: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An answer that comes at once."""
        return self._part("chat.completion" if self.is_chat else "text_completion", choices)

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk of a stream."""
        return self._part("chat.completion.chunk" if self.is_chat else "text_completion", choices)

    def _part(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def usage_of(num_prompt: int, num_written: int, num_cached: int) -> dict[str, Any]:
    """Tokens read and written; of the former, those that were read before."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_written,
        "total_tokens": num_prompt + num_written,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def chat_logprobs(found: Iterable[Logprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """Log-probabilities of a chat's tokens."""
    content = [
        {
            **_entry(each.token, each.logprob, tokenizer),
            "top_logprobs": [_entry(token, logprob, tokenizer) for token, logprob in each.top],
        }
        for each in found
    ]
    return {"content": content, "refusal": None}


def _entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": _name(token, tokenizer),
        "logprob": max(logprob, _LEAST),
        "bytes": list(tokenizer.token_bytes(token)),
    }


def completion_logprobs(found: Sequence[Logprob], tokenizer: Tokenizer, offset: int = 0) -> dict[str, Any]:
    """Log-probabilities of a completion's tokens; ``offset``: characters of the text before them."""
    names = [_name(each.token, tokenizer) for each in found]
    offsets = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    tops = [
        {_name(token, tokenizer): max(logprob, _LEAST) for token, logprob in (*each.top, (each.token, each.logprob))}
        for each in found
    ]
    return {
        "tokens": names,
        "token_logprobs": [max(each.logprob, _LEAST) for each in found],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _name(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


# An answer under way: the texts of one request, from the worker's tickets to JSON, at once or as a stream.


_DONE = b"data: [DONE]\n\n"


class Tracer(Protocol):
    """Makes of one text's steps what chunks carry where they are asked to."""

    def trace(self, row: RowStep, step: Step | None, place: int = 0) -> dict[str, Any]:
        """Of a step, or of several (then ``step`` is None) that nobody read in time; ``place``: of the row in it."""
        ...


NewTracer = Callable[[Tokenizer, Sequence[int], tuple[str, ...]], Tracer]  # of a prompt, with stop strings


@dataclass
class _Choice:
    index: int
    ticket: Ticket
    reader: ToolReader | None
    tracer: Tracer | None = None
    said: str = ""
    calls: list[Call] = field(default_factory=list)
    has_begun: bool = False
    is_done: bool = False
    num_characters: int = 0  # of its tokens, for text_offset

    @property
    def finish_reason(self) -> str:
        is_cut = self.reader is not None and self.reader.is_open
        return "tool_calls" if self.calls and not is_cut else str(self.ticket.request.finish_reason)

    def take(self, text: str, done: bool) -> tuple[str, list[Delta]]:
        """What is said with the next text, and what comes to the calls."""
        deltas: list[Delta] = []
        if self.reader is not None:
            text, deltas = self.reader.push(text)
            text += self.reader.flush() if done else ""
        self.said += text
        for delta in deltas:
            if delta.call is not None:
                self.calls.append(delta.call)
            self.calls[delta.index].arguments += delta.arguments
        return text, deltas


class Writing:
    """Carries a request out. Whoever stops listening ends it: ``close`` cancels what still runs.

    Args:
        worker: decodes.
        lm: whose answer it is.
        asked: what is asked for.
        shape: how answers look.
        new_tracer: where steps can be traced.

    Raises:
        Refusal: too busy, closed, or a setting that cannot be decoded.
    """

    def __init__(self, worker: Worker, lm: LM, asked: Asked, shape: Shape, new_tracer: NewTracer | None = None) -> None:
        self._worker, self._lm, self._asked, self._shape = worker, lm, asked, shape
        new_tracer = new_tracer if asked.traced else None
        self._news = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self._news.set)

        self._choices: list[_Choice] = []
        try:
            for number, text in enumerate(asked.texts):
                ticket = worker.submit(
                    text.prompt_ids,
                    text.sampling,
                    wake,
                    keeps_steps=new_tracer is not None,
                    **text.options,
                )
                reader = None if asked.tool_names is None else ToolReader(asked.tool_names, asked.most_calls)
                tracer = new_tracer and new_tracer(lm.tokenizer, text.prompt_ids, text.sampling.stop)
                self._choices.append(_Choice(number, ticket, reader, tracer))
        except DraftwingError as error:
            self.close()
            raise of_error(error) from error

    def close(self) -> None:
        """Cancel what still runs."""
        for choice in self._choices:
            if not choice.is_done:
                self._worker.cancel(choice.ticket)

    async def whole(self) -> bytes:
        """The answer as one JSON object.

        Raises:
            Refusal: a text failed.
        """
        async for choice, parts, done in self._parts():
            choice.take("".join(part.row.text for part in parts), done)
        answer = self._shape.whole([self._choice(choice) for choice in self._choices])
        return dumps({**answer, "usage": self._usage(), "metrics": self._metrics()})

    async def stream(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        try:
            async for choice, parts, done in self._parts():
                for chunk in self._chunks(choice, parts, done):
                    yield self._event(chunk)
        except Refusal as error:
            yield b"data: " + dumps(error.body) + b"\n\n"
        else:
            if self._asked.with_usage:
                last = {**self._shape.chunk([]), "usage": self._usage(), "metrics": self._metrics()}
                yield b"data: " + dumps(last) + b"\n\n"
        yield _DONE

    async def _parts(self) -> AsyncIterator[tuple[_Choice, list[Part], bool]]:
        while not all(choice.is_done for choice in self._choices):
            await self._news.wait()
            self._news.clear()
            for choice in self._choices:
                parts, done = ([], True) if choice.is_done else choice.ticket.take()
                if choice.is_done or not (parts or done):
                    continue
                choice.is_done = done
                request = choice.ticket.request
                if done and request.finish_reason not in ("stop", "length"):
                    raise self._failure(request.error)
                yield choice, parts, done

    def _failure(self, error: DraftwingError | None) -> Refusal:
        if error is not None:
            return of_error(error)
        return Refusal(503, "the server shut down before the answer was finished: ask again", code="unavailable")

    # --- pieces ----------------------------------------------------------------------------------------------------

    def _chunks(self, choice: _Choice, parts: Sequence[Part], done: bool) -> list[dict[str, Any]]:
        """The chunks of a stream for what has come; one for each step where they are traced."""
        chunks = []
        groups = [list(parts)] if choice.tracer is None else [[part] for part in parts]
        for number, group in enumerate(groups or [[]], 1):
            last = done and number >= len(groups)
            text, deltas = choice.take("".join(part.row.text for part in group), last)
            logprobs = [found for part in group for found in part.row.logprobs or ()]
            found = self._pieces(choice, text, deltas, logprobs)
            if choice.tracer is not None and group:
                (part,) = group
                found = found or [self._shape.chunk([self._piece(choice, "")])]
                trace = choice.tracer.trace(part.row, part.step, part.place)
                found[-1]["draftwing"] = {**trace, "at": round(part.at - choice.ticket.submitted_at, 6)}
            chunks += found
        if done:
            chunks.append(self._shape.chunk([self._piece(choice, "", finish=choice.finish_reason)]))
        return chunks

    def _pieces(
        self, choice: _Choice, text: str, deltas: Sequence[Delta], logprobs: Sequence[Logprob]
    ) -> list[dict[str, Any]]:
        found = []
        if not choice.has_begun:
            choice.has_begun = True
            if self._shape.is_chat:
                piece = {"index": choice.index, "delta": {"role": "assistant", "content": ""}}
                found.append(self._shape.chunk([{**piece, "logprobs": None, "finish_reason": None}]))
        if text or logprobs:
            found.append(self._shape.chunk([self._piece(choice, text, logprobs)]))
        for delta in deltas:
            piece = {"index": choice.index, "delta": {"tool_calls": [_delta(delta)]}, "finish_reason": None}
            found.append(self._shape.chunk([piece]))
        return found

    def _piece(
        self, choice: _Choice, text: str, logprobs: Sequence[Logprob] = (), finish: str | None = None
    ) -> dict[str, Any]:
        shown = self._logprobs(choice, logprobs) if logprobs else None
        body: dict[str, Any] = {"text": text}
        if self._shape.is_chat:
            body = {"delta": {"content": text} if finish is None else {}}
        return {"index": choice.index, **body, "logprobs": shown, "finish_reason": finish}

    def _choice(self, choice: _Choice) -> dict[str, Any]:
        request = choice.ticket.request
        shown = None if request.sampling.logprobs is None else self._logprobs(choice, request.logprobs)
        body: dict[str, Any] = {"text": choice.said}
        if self._shape.is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": choice.said, "refusal": None}
            if choice.calls:
                message["content"] = choice.said or None
                message["tool_calls"] = [_call(call) for call in choice.calls]
            body = {"message": message}
        return {"index": choice.index, **body, "logprobs": shown, "finish_reason": choice.finish_reason}

    def _logprobs(self, choice: _Choice, found: Sequence[Logprob]) -> dict[str, Any]:
        if self._shape.is_chat:
            return chat_logprobs(found, self._lm.tokenizer)
        shown = completion_logprobs(found, self._lm.tokenizer, choice.num_characters)
        choice.num_characters += sum(map(len, shown["tokens"]))
        return shown

    def _event(self, chunk: dict[str, Any]) -> bytes:
        if self._asked.usage_always:
            chunk["usage"] = self._usage()
        elif self._asked.with_usage:
            chunk["usage"] = None
        return b"data: " + dumps(chunk) + b"\n\n"

    def _usage(self) -> dict[str, Any]:
        requests = [choice.ticket.request for choice in self._choices]
        written = sum(len(request.token_ids) for request in requests)
        cached = sum(request.num_cached or 0 for request in requests[:: self._asked.n])  # each prompt counts once
        return usage_of(self._asked.num_prompt_tokens, written, cached)

    def _metrics(self) -> dict[str, Any]:
        rows: list[RowStep] = [row for choice in self._choices for row in choice.ticket.request.rows]
        return figures(rows, detailed=self._asked.detailed)


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _delta(delta: Delta) -> dict[str, Any]:
    """As a stream has it: first what is called, then with what."""
    if delta.call is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    called = {"name": delta.call.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.call.id, "type": "function", "function": called}
