"""Whatever the OpenAPI document allows, and much that it does not, is answered in the shape that it promises."""

from contextlib import asynccontextmanager

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from conftest import check_engine
from draftwing.serve.app import Settings, make_app
from serving import chat_folder, load

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
    negative_data_rejection,
]  # fmt: skip
WRITING = ("/v1/chat/completions", "/v1/completions")


@asynccontextmanager
async def nothing(_):
    yield


@pytest.fixture(scope="module")
def app(folder_of, tmp_path_factory):
    lm = load(chat_folder(folder_of, tmp_path_factory, max_position_embeddings=48))
    app = make_app(lm, Settings(names=("tiny",), max_tokens=4))
    app.router.lifespan_context = nothing  # each case would start the worker and stop it
    app.state.worker.start()
    yield app
    worker = app.state.worker
    assert worker.state == "running"
    assert worker.num_open == 0
    assert worker.stop()
    check_engine(worker.engine)


def fuzz(operation, mode, count):

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case):
        body = case.body
        if isinstance(body, dict) and isinstance(body.get("n"), int):
            body["n"] = min(body["n"], 3)  # up to 128 texts are allowed, and take as long
        case.call_and_validate(checks=CHECKS)

    run()


def fuzz_all(app, count):
    """So many cases: most of them where something is written, half of them with what the document forbids."""
    operations = schemathesis.openapi.from_asgi("/openapi.json", app)
    for path in WRITING:
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            fuzz(operations[path]["POST"], mode, count // 5)
    for path in ("/v1/models", "/v1/models/{name}", "/health", "/metrics"):
        fuzz(operations[path]["GET"], schemathesis.GenerationMode.POSITIVE, count // 20)


def test_any_request_gets_an_answer_of_the_promised_shape(app):
    fuzz_all(app, 40)


@pytest.mark.full
def test_many_requests_get_answers_of_the_promised_shape(app):
    fuzz_all(app, 10_000)
