"""Answers in the OpenAI format: complete ones and streams of chunks, with usage and log-probabilities."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from draftwing.errors import DraftwingError
from draftwing.lm import LM
from draftwing.serve.convert import ParsedRequest
from draftwing.serve.errors import Refusal, dumps, refusal_for
from draftwing.serve.models import ChatBody, CompletionBody
from draftwing.serve.tool_calls import Call, Delta, ToolReader
from draftwing.serve.trace import Tracer
from draftwing.stats import Logprob, RowStep
from draftwing.worker import Part, Ticket, Worker

_MIN_LOGPROB = -9999.0  # JSON has no infinity


def speculation_metrics(rows: Iterable[RowStep], *, detailed: bool = False) -> dict[str, Any]:
    """Return statistics of the steps with drafts, under vLLM's names; if ``detailed``, also two lists of each step."""
    drafted, accepted = [], []
    for row in rows:
        if row.num_drafted:
            drafted.append(row.num_drafted)
            accepted.append(row.num_accepted)
    histogram = [0] * (max(accepted, default=-1) + 1)
    for num in accepted:
        histogram[num] += 1
    metrics: dict[str, Any] = {
        "mean_acceptance_length": 1 + sum(accepted) / max(len(accepted), 1),
        "draft_acceptance_rate": sum(accepted) / max(sum(drafted), 1),
        "acceptance_histogram": histogram,
        "num_spec_steps": len(drafted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
    }
    if detailed:
        metrics |= {"per_step_accepted": accepted, "per_step_drafted": drafted}
    return {"speculative_decoding": metrics}


@dataclass
class _Choice:
    index: int
    ticket: Ticket
    reader: ToolReader | None
    tracer: Tracer | None
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    has_begun: bool = False
    is_done: bool = False
    num_characters: int = 0  # in its tokens so far, for text_offset

    @property
    def finish_reason(self) -> str:
        is_cut = self.reader is not None and self.reader.is_open
        return "tool_calls" if self.calls and not is_cut else str(self.ticket.request.finish_reason)

    def take(self, parts: Sequence[Part], done: bool) -> tuple[str, list[Delta]]:
        """Add steps to the choice. Return their text without calls, and their changes to the calls."""
        text, deltas = "".join(part.row.text for part in parts), list[Delta]()
        if self.reader is not None:
            text, deltas = self.reader.push(text)
            text += self.reader.flush() if done else ""
        self.text += text
        for delta in deltas:
            if delta.call is not None:
                self.calls.append(delta.call)
            self.calls[delta.index].arguments += delta.arguments
        return text, deltas


class ServedAnswer:
    """Submits the sequences of a request to the worker and formats their output."""

    def __init__(
        self, worker: Worker, lm: LM, body: ChatBody | CompletionBody, parsed: ParsedRequest, model: str
    ) -> None:
        self._worker, self._tokenizer, self._body = worker, lm.tokenizer, body
        self._is_chat = isinstance(body, ChatBody)
        usage, speculation = body.stream_options, body.speculation
        self._include_usage = bool(usage and usage.include_usage)
        self._continuous_usage = bool(usage and usage.continuous_usage_stats)
        is_traced = bool(speculation and speculation.trace and body.stream)
        self._header = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if self._is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._news = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self._news.set)

        self._choices: list[_Choice] = []
        try:
            for index, (prompt_ids, sampling) in enumerate(parsed.sequences):
                ticket = worker.submit(prompt_ids, sampling, wake, keeps_steps=is_traced, **parsed.options)
                reader = None if parsed.tool_names is None else ToolReader(parsed.tool_names, parsed.max_calls)
                tracer = Tracer(lm.tokenizer, prompt_ids, sampling) if is_traced else None
                self._choices.append(_Choice(index, ticket, reader, tracer))
        except DraftwingError as error:
            self.close()
            raise refusal_for(error) from error

    def close(self) -> None:
        """Cancel the sequences that are still running."""
        for choice in self._choices:
            if not choice.is_done:
                self._worker.cancel(choice.ticket)

    async def whole(self) -> bytes:
        """Return the complete answer as a JSON object."""
        async for choice, parts, done in self._parts():
            choice.take(parts, done)
        choices = []
        for choice in self._choices:
            body: dict[str, Any] = {"text": choice.text}
            if self._is_chat:
                message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
                if choice.calls:
                    message["content"] = choice.text or None
                    message["tool_calls"] = [_call(call, call.arguments) for call in choice.calls]
                body = {"message": message}
            request = choice.ticket.request
            logprobs = None if request.sampling.logprobs is None else self._logprobs(choice, request.logprobs)
            choices.append({"index": choice.index, **body, "logprobs": logprobs, "finish_reason": choice.finish_reason})
        return dumps({**self._header, "choices": choices, "usage": self._usage(), "metrics": self._metrics()})

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events, and cancel what still runs if the client stops reading."""
        try:
            async for choice, parts, done in self._parts():
                for chunk in self._chunks(choice, parts, done):
                    if self._continuous_usage:
                        chunk["usage"] = self._usage()
                    elif self._include_usage:
                        chunk["usage"] = None
                    yield b"data: " + dumps(chunk) + b"\n\n"
            if self._include_usage:
                last = {**self._chunk(), "usage": self._usage(), "metrics": self._metrics()}
                yield b"data: " + dumps(last) + b"\n\n"
        except Refusal as error:
            yield b"data: " + dumps(error.body) + b"\n\n"
        finally:
            self.close()
        yield b"data: [DONE]\n\n"

    async def _parts(self) -> AsyncIterator[tuple[_Choice, list[Part], bool]]:
        """Yield the choices that have new parts, and True with the last ones."""
        while not all(choice.is_done for choice in self._choices):
            await self._news.wait()
            self._news.clear()
            for choice in self._choices:
                if choice.is_done:
                    continue
                parts, choice.is_done = choice.ticket.take()
                request = choice.ticket.request
                if choice.is_done and request.finish_reason not in ("stop", "length"):
                    if request.error is not None:
                        raise refusal_for(request.error)
                    raise Refusal(503, "the server shut down during the answer: ask again", code="unavailable")
                if parts or choice.is_done:
                    yield choice, parts, choice.is_done

    def _chunks(self, choice: _Choice, parts: list[Part], done: bool) -> list[dict[str, Any]]:
        """Return the chunks for new parts; traced requests get at least one for each part."""
        chunks = []
        groups = [parts] if choice.tracer is None or not parts else [[part] for part in parts]
        for number, group in enumerate(groups, 1):
            text, deltas = choice.take(group, done and number == len(groups))
            logprobs = [logprob for part in group for logprob in part.row.logprobs or ()]
            pieces: list[dict[str, Any]] = []
            if self._is_chat and not choice.has_begun:
                delta = {"role": "assistant", "content": ""}
                pieces.append({"delta": delta, "logprobs": None, "finish_reason": None})
            choice.has_begun = True
            body: dict[str, Any] = {"delta": {"content": text}} if self._is_chat else {"text": text}
            if text or logprobs or (choice.tracer is not None and group and not (pieces or deltas)):
                shown = self._logprobs(choice, logprobs) if logprobs else None
                pieces.append({**body, "logprobs": shown, "finish_reason": None})
            for change in deltas:
                fields = {"index": change.index, **_call(change.call, change.arguments)}
                pieces.append({"delta": {"tool_calls": [fields]}, "finish_reason": None})
            chunks += [self._chunk({"index": choice.index, **piece}) for piece in pieces]
            if choice.tracer is not None and group:
                trace = choice.tracer.trace(group[0].row, group[0].step, group[0].place)
                chunks[-1]["draftwing"] = {**trace, "at": round(group[0].at - choice.ticket.submitted_at, 6)}
        if done:
            body = {"delta": {}} if self._is_chat else {"text": ""}
            reason = choice.finish_reason
            chunks.append(self._chunk({"index": choice.index, **body, "logprobs": None, "finish_reason": reason}))
        return chunks

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._header, "object": kind, "choices": choices}

    def _logprobs(self, choice: _Choice, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        token_bytes = self._tokenizer.token_bytes

        def name(token: int) -> str:
            return token_bytes(token).decode("utf-8", "replace")

        def entry(token: int, logprob: float) -> dict[str, Any]:
            return {"token": name(token), "logprob": max(logprob, _MIN_LOGPROB), "bytes": list(token_bytes(token))}

        if self._is_chat:
            content = [
                {**entry(item.token, item.logprob), "top_logprobs": [entry(*top) for top in item.top]}
                for item in logprobs
            ]
            return {"content": content, "refusal": None}
        names = [name(item.token) for item in logprobs]
        *offsets, choice.num_characters = accumulate(map(len, names), initial=choice.num_characters)
        return {
            "tokens": names,
            "token_logprobs": [max(item.logprob, _MIN_LOGPROB) for item in logprobs],
            "top_logprobs": [
                {name(token): max(logprob, _MIN_LOGPROB) for token, logprob in (*item.top, (item.token, item.logprob))}
                for item in logprobs
            ],
            "text_offset": offsets,
        }

    def _usage(self) -> dict[str, Any]:
        requests = [choice.ticket.request for choice in self._choices]
        prompts = requests[:: self._body.n or 1]  # each prompt counts once
        num_prompt = sum(len(request.prompt_ids) for request in prompts)
        num_written = sum(len(request.token_ids) for request in requests)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_written,
            "total_tokens": num_prompt + num_written,
            "prompt_tokens_details": {"cached_tokens": sum(request.num_cached or 0 for request in prompts)},
        }

    def _metrics(self) -> dict[str, Any]:
        rows = (row for choice in self._choices for row in choice.ticket.request.rows)
        speculation = self._body.speculation
        return speculation_metrics(rows, detailed=speculation is not None and speculation.detailed)


def _call(call: Call | None, arguments: str) -> dict[str, Any]:
    """Return a call as JSON, or more arguments of an earlier one."""
    if call is None:
        return {"function": {"arguments": arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
