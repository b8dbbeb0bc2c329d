"""The page, and what it asks of the server beside texts: what is served, what forwards cost, lessons."""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, cast

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from draftwing.budget.measure import known_costs
from draftwing.errors import ConfigError, DraftwingError, shown
from draftwing.limits import names_of
from draftwing.lm import LM
from draftwing.methods.base import Drafter
from draftwing.methods.ensemble import CombinedDrafter
from draftwing.serve.convert import Defaults, asked_of_chat, asked_of_completion
from draftwing.serve.errors import Refusal, dumps, of_error
from draftwing.serve.lesson import lesson
from draftwing.serve.models import ChatBody, CompletionBody, Message
from draftwing.serve.trace import Shown

MOST_IDS = 4096  # tokens of a text that a lesson reads
_FOLDER = Path(__file__).parent / "page"
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _Page(StaticFiles):
    """Files that may ask for nothing from elsewhere, and may not be framed."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file."""
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        return response


class _LessonBody(BaseModel):
    """A place in a text: a prompt or messages, and the tokens that were written before."""

    model_config = ConfigDict(strict=True, extra="forbid")

    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    prompt: Annotated[str, Field(max_length=2**20)] | None = None
    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MOST_IDS)]
    draft: Annotated[str, Field(max_length=256)]
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


class Inspector:
    """What the page shows of one server.

    Args:
        lm: what is served.
        model: its name.
        defaults: of sampling, as for requests.
        needs_key: whether requests need an API key.
    """

    def __init__(self, lm: LM, model: str, defaults: Defaults, *, needs_key: bool) -> None:
        self._lm, self._model, self._defaults, self._needs_key = lm, model, defaults, needs_key
        self._shown = Shown(lm.tokenizer)
        self._turn = asyncio.Lock()  # one lesson at a time: each is a forward beside those of requests

    def install(self, app: FastAPI) -> None:
        """Add its paths, and the page at the root; they must be the last ones."""

        @app.get("/inspector/state", include_in_schema=False)
        async def state() -> Response:
            """What is served."""
            return _json(self._state())

        @app.get("/inspector/costs", include_in_schema=False)
        async def costs(draft: str = "") -> Response:
            """What was measured here before; nothing is measured while requests run."""
            return _json(await run_in_threadpool(self._costs, draft))

        @app.post("/inspector/lesson", include_in_schema=False)
        async def teach(body: _LessonBody) -> Response:
            """What the classic rules make of a place in a text."""
            async with self._turn:
                return _json(await run_in_threadpool(self._lesson, body))

        mimetypes.add_type("text/javascript", ".js")  # some systems say text/plain, which browsers then refuse
        app.mount("/", _Page(directory=_FOLDER, html=True), name="page")

    def _drafters(self) -> Iterator[tuple[str, Callable[[], Drafter]]]:
        """By name, what requests may choose among; each maker gives one with empty state."""
        new, whole = self._lm.new_drafter, self._lm.new_drafter()
        if not whole.drafts:
            return
        yield "+".join(whole.part_names) or names_of(whole)[0], new
        for place, name in enumerate(whole.part_names):
            yield name, lambda place=place: cast(CombinedDrafter, new()).parts[place]  # type: ignore[misc]

    def _maker(self, name: str) -> Callable[[], Drafter]:
        known = dict(self._drafters())
        if name not in known:
            choice = ", ".join(known) or "none"
            raise Refusal(400, f"there is no draft {shown(name)} here: choose {choice}", "draft")
        return known[name]

    def _state(self) -> dict[str, Any]:
        target = self._lm.target
        drafts = []
        for number, (name, new) in enumerate(self._drafters()):
            drafter = new()
            drafts.append(
                {
                    "name": name,
                    "taps": list(drafter.features.taps),
                    "has_net": drafter.costs_forwards,
                    "is_default": number == 0,
                }
            )
        budget = self._lm.describe_budget()
        return {
            "model": self._model,
            "target": target.name,
            "num_layers": target.num_layers,
            "max_length": target.max_length,
            "is_chat": self._lm.tokenizer.has_chat_template,
            "needs_key": self._needs_key,
            "drafts": [*drafts, {"name": "none", "taps": [], "has_net": False, "is_default": not drafts}],
            "tree": budget if budget.startswith(("chain:", "dynamic:")) else "auto",
        }

    def _costs(self, draft: str) -> dict[str, Any]:
        new = self._maker(draft) if draft not in ("", "none") else self._lm.new_drafter
        found = known_costs(self._lm.target, new()) or known_costs(self._lm.target, self._lm.new_drafter())
        if found is None:
            return {"why": "Costs were not measured on this machine yet. They are when a server starts with tree auto."}
        curves = {"verify": found.verify, "chain": found.chain, "tree": found.tree}
        return {**{name: curve.knots for name, curve in curves.items()}, "context": found.context}

    def _lesson(self, body: _LessonBody) -> dict[str, Any]:
        if (body.messages is None) == (body.prompt is None):
            raise Refusal(400, "a lesson needs either messages or a prompt", "messages")
        own: dict[str, Any] = {"temperature": body.temperature, "seed": body.seed, "max_tokens": 1}
        if body.messages is not None:
            asked = asked_of_chat(ChatBody(messages=body.messages, **own), self._lm, self._defaults)
        else:
            asked = asked_of_completion(CompletionBody(prompt=body.prompt or "", **own), self._lm, self._defaults)
        ids = [*asked.texts[0].prompt_ids, *body.token_ids]
        if len(ids) > MOST_IDS or any(token >= self._lm.target.vocab_size for token in body.token_ids):
            raise Refusal(
                400, f"a lesson reads up to {MOST_IDS:,} tokens of this model: choose a place before", "token_ids"
            )
        if body.draft == "none":
            return {"why": "This text was written without a draft: choose one under Settings."}
        new = self._maker(body.draft)
        try:
            return lesson(self._lm.target, new, ids, asked.texts[0].sampling, self._shown)
        except ConfigError as error:
            return {"why": f"{error}."}
        except DraftwingError as error:
            raise of_error(error) from error


def _json(value: dict[str, Any]) -> Response:
    return Response(dumps(value), media_type="application/json", headers={"Cache-Control": "no-store"})
