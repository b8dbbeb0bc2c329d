"""A tiny model that chats, served to clients of the OpenAI protocol inside of this process."""

import asyncio
import shutil
from contextlib import asynccontextmanager

import httpx
import openai

import draftwing as dw
from conftest import add_tokenizer
from draftwing.serve.app import Settings, make_app

TEMPLATE = (
    "{% if mood is defined %}[{{ mood }}]{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
PATIENT = 60.0  # seconds for an answer: httpx's 5 are too few on a machine with much other work
TEXTS = ["def add(a, b):", "class Table:\n    def", "for row in rows: print(row)\nfor row in"]


def chat_folder(folder_of, tmp_path_factory, template=TEMPLATE, **changes):
    """A tiny model with a tokenizer and a chat template."""
    folder = shutil.copytree(folder_of("llama", vocab_size=300, **changes), tmp_path_factory.mktemp("served") / "model")
    return add_tokenizer(folder, chat_template=template)


def load(folder, draft="lookup", **options):
    """With a fixed budget: nothing is measured."""
    return dw.load(folder, draft, device="cpu", budget=dw.Budget(3), **options)


def app_of(lm, **settings):
    """An app of its own, under the name ``tiny``; its queue is empty."""
    return make_app(lm, Settings(names=("tiny",), **settings))


@asynccontextmanager
async def running(app):
    """An httpx client of an app, in the same event loop; afterwards nothing is left in the engine."""
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
        worker.engine.check()


def ask(app, work):
    """What the coroutine function ``work`` makes of an ``openai`` client of the app."""

    async def main():
        async with running(app) as http:
            client = openai.AsyncOpenAI(api_key="secret", base_url="http://test/v1", http_client=http, max_retries=0)
            return await work(client)

    return asyncio.run(main())


def send(app, work):
    """The same with a plain httpx client."""

    async def main():
        async with running(app) as http:
            return await work(http)

    return asyncio.run(main())


def question(text):
    return [{"role": "user", "content": text}]
