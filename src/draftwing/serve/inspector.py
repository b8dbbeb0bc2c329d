"""The inspector: its page, and the routes that the page needs besides answers."""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from draftwing.errors import ConfigError, DraftwingError, shown
from draftwing.lm import LM
from draftwing.methods.base import Drafter
from draftwing.methods.ensemble import CombinedDrafter
from draftwing.request import names_of
from draftwing.serve.convert import Defaults, parse_chat, parse_completion
from draftwing.serve.errors import Refusal, dumps, refusal_for
from draftwing.serve.models import ChatBody, CompletionBody, Message
from draftwing.serve.trace import TokenNames, lesson

_MAX_LESSON_TOKENS = 4096
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _Page(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_PAGE_HEADERS)
        return response


class _LessonBody(BaseModel):
    """A position in a text: a prompt or messages, and the tokens generated before it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    prompt: Annotated[str, Field(max_length=2**20)] | None = None
    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=_MAX_LESSON_TOKENS)]
    draft: Annotated[str, Field(max_length=256)]
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


def install_inspector(app: FastAPI, lm: LM, model: str, defaults: Defaults, *, needs_key: bool) -> None:
    """Add the inspector's routes, and the page at the root, which must come last."""
    names = TokenNames(lm.tokenizer)
    lock = asyncio.Lock()  # one lesson at a time, since lessons compete with requests

    def part(place: int) -> Drafter:
        return cast(CombinedDrafter, lm.new_drafter()).parts[place]

    def drafters() -> dict[str, Callable[[], Drafter]]:
        """Return constructors of the drafters that requests may choose, the default first."""
        whole = lm.new_drafter()
        if not whole.drafts:
            return {}
        parts = {name: partial(part, place) for place, name in enumerate(whole.part_names)}
        return {"+".join(parts) or names_of(whole)[0]: lm.new_drafter, **parts}

    def new_drafter(name: str) -> Callable[[], Drafter]:
        choices = drafters()
        if name not in choices:
            raise Refusal(400, f"there is no draft {shown(name)} here: choose {', '.join(choices) or 'none'}", "draft")
        return choices[name]

    @app.get("/inspector/state", include_in_schema=False)
    async def get_state() -> Response:
        drafts: list[dict[str, Any]] = []
        for name, new in drafters().items():
            drafter = new()
            features = {"taps": list(drafter.features.taps), "has_net": drafter.costs_forwards}
            drafts.append({"name": name, **features, "is_default": not drafts})
        drafts.append({"name": "none", "taps": [], "has_net": False, "is_default": not drafts})
        budget = lm.describe_budget()
        return _json(
            {
                "model": model,
                "target": lm.target.name,
                "num_layers": lm.target.num_layers,
                "max_length": lm.target.max_length,
                "is_chat": lm.tokenizer.has_chat_template,
                "needs_key": needs_key,
                "drafts": drafts,
                "tree": budget if budget.startswith(("chain:", "dynamic:")) else "auto",
            }
        )

    @app.get("/inspector/costs", include_in_schema=False)
    async def get_costs() -> Response:
        costs = lm.observed_costs
        if costs is None:
            return _json({"why": "Costs are learned from requests that are decoded alone with tree auto."})
        return _json({"verify": costs.verify.knots, "chain": costs.chain.knots, "tree": costs.tree.knots})

    def make_lesson(body: _LessonBody) -> dict[str, Any]:
        if (body.messages is None) == (body.prompt is None):
            raise Refusal(400, "a lesson needs either messages or a prompt", "messages")
        fields: dict[str, Any] = {"temperature": body.temperature, "seed": body.seed, "max_tokens": 1}
        if body.messages is not None:
            parsed = parse_chat(ChatBody(messages=body.messages, **fields), lm, defaults)
        else:
            parsed = parse_completion(CompletionBody(prompt=body.prompt or "", **fields), lm, defaults)
        prompt_ids, sampling = parsed.sequences[0]
        ids = [*prompt_ids, *body.token_ids]
        if len(ids) > _MAX_LESSON_TOKENS or any(token >= lm.target.vocab_size for token in body.token_ids):
            message = f"a lesson reads up to {_MAX_LESSON_TOKENS:,} tokens of this model: choose a place before"
            raise Refusal(400, message, "token_ids")
        if body.draft == "none":
            return {"why": "This text was written without a draft: choose one under Settings."}
        new = new_drafter(body.draft)
        try:
            return lesson(lm.target, new, ids, sampling, names)
        except ConfigError as error:
            return {"why": f"{error}."}
        except DraftwingError as error:
            raise refusal_for(error) from error

    @app.post("/inspector/lesson", include_in_schema=False)
    async def get_lesson(body: _LessonBody) -> Response:
        async with lock:
            return _json(await run_in_threadpool(make_lesson, body))

    mimetypes.add_type("text/javascript", ".js")  # some systems map it to text/plain, which browsers reject
    app.mount("/", _Page(directory=Path(__file__).parent / "page", html=True), name="page")


def _json(value: dict[str, Any]) -> Response:
    return Response(dumps(value), media_type="application/json", headers={"Cache-Control": "no-store"})
