"""Serves a tiny chat model to OpenAI clients within the process."""

import asyncio
import shutil
from contextlib import asynccontextmanager

import httpx
import openai

import draftwing as dw
from conftest import add_tokenizer, check_engine
from draftwing.serve.app import Settings, make_app

TEMPLATE = (
    "{% if mood is defined %}[{{ mood }}]{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
PATIENT = 60.0  # seconds for an answer: httpx's 5 are too few on a machine with much other work
# Making a context of TLS takes 60 ms, more than the request. A connection is for one request, as servers end here.
HTTP = httpx.Client(verify=False, timeout=PATIENT, limits=httpx.Limits(max_keepalive_connections=0))
TEXTS = ["def add(a, b):", "class Table:\n    def", "for row in rows: print(row)\nfor row in"]


def chat_folder(folder_of, tmp_path_factory, template=TEMPLATE, **changes):
    """A tiny model with a tokenizer and a chat template."""
    folder = shutil.copytree(
        folder_of("llama", vocab_size=300, head_dim=32, **changes), tmp_path_factory.mktemp("served") / "model"
    )
    return add_tokenizer(folder, chat_template=template)


def load(folder, draft="lookup", **options):
    """A model with a fixed budget, so that nothing is measured."""
    return dw.load(folder, draft, device="cpu", budget=dw.Budget(3), **options)


def app_of(lm, **settings):
    """A new app with an empty queue, whose model is named ``tiny``."""
    return make_app(lm, Settings(names=("tiny",), **settings))


@asynccontextmanager
async def running(app):
    """An httpx client of an app, in the same event loop; checks that nothing is left in the engine at the end."""
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield http
        worker = app.state.worker
        for _ in range(int(PATIENT * 100)):
            if not worker.num_open:
                break
            await asyncio.sleep(0.01)
        assert worker.num_open == 0
    if worker.error is None:
        assert (worker.engine.num_running, worker.engine.num_waiting) == (0, 0)
        check_engine(worker.engine)


def ask(app, work):
    """The result of the coroutine function ``work`` with an ``openai`` client of the app."""

    async def with_client(http):
        return await work(openai.AsyncOpenAI(api_key="x", base_url="http://test/v1", http_client=http, max_retries=0))

    return send(app, with_client)


def send(app, work):
    """The same with a plain httpx client."""

    async def main():
        async with running(app) as http:
            return await work(http)

    return asyncio.run(main())


async def make(resource, **fields):
    """An answer of ``client.completions`` or ``client.chat.completions``; the chunks of a stream as a list."""
    answer = await resource.create(model="tiny", **fields)
    return [chunk async for chunk in answer] if fields.get("stream") else answer


def complete(app, prompt, **fields):
    return ask(app, lambda client: make(client.completions, prompt=prompt, **fields))


def chat(app, messages, **fields):
    """``messages`` may be the text of a question."""
    messages = question(messages) if isinstance(messages, str) else messages
    return ask(app, lambda client: make(client.chat.completions, messages=messages, **fields))


def question(text):
    return [{"role": "user", "content": text}]
