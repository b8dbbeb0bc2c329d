"""Answers as the OpenAI protocol has them: whole ones, chunks of streams, usage, log-probabilities."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftwing.stats import Logprob
from draftwing.text.tokenizer import Tokenizer

__all__ = ["Shape", "chat_logprobs", "completion_logprobs", "usage_of"]

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
