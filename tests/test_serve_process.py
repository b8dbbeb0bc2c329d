"""A real server: signals, clients that disconnect, and clients that do not read."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import httpx
import pytest
import uvicorn

from draftwing.serve.app import Settings, make_app
from serving import PATIENT, chat_folder, load, question

LONG = {"prompt": "def add(a, b):", "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}

# The command line, with an engine that pauses after a step while the file named by HOLD exists.
HELD = """
import os, time
from draftwing.cli.main import main
from draftwing.engine import Engine
steps = Engine.steps
def held(self):
    for step in steps(self):
        yield step
        while os.path.exists(os.environ["HOLD"]):
            time.sleep(0.01)
Engine.steps = held
main()
"""


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def until(condition):
    """Wait until a condition is true, and return its value."""
    for _ in range(30_000):
        with suppress(httpx.TransportError):
            if found := condition():
                return found
        time.sleep(0.02)
    raise AssertionError("it did not come")


def is_up(url):
    return httpx.get(f"{url}/health", timeout=PATIENT).status_code == 200


@pytest.fixture(scope="module")
def folder(folder_of, tmp_path_factory):
    return chat_folder(folder_of, tmp_path_factory, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def served(folder):
    """A uvicorn server in a thread: its address and its worker."""
    app = make_app(load(folder), Settings(names=("tiny",), max_batch=1, max_waiting=1))
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{port}"
    until(lambda: is_up(url))
    yield url, app.state.worker
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def pause(served, monkeypatch):
    """Seconds between two steps, so that a long answer does not end before a slow machine has checked it."""
    engine, pause = served[1].engine, SimpleNamespace(seconds=0.05)
    steps = engine.steps

    def slowly():
        for step in steps():
            yield step
            time.sleep(pause.seconds)

    monkeypatch.setattr(engine, "steps", slowly)
    return pause


@pytest.mark.usefixtures("pause")
def test_who_goes_away_leaves_nothing_behind(served):
    url, worker = served
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=PATIENT) as answer:
        next(answer.iter_lines())
        assert worker.num_open == 1
    cancelled = 'draftwing_requests_total{finished_reason="cancelled",model_name="tiny"} 1.0'
    until(lambda: cancelled in httpx.get(f"{url}/metrics", timeout=PATIENT).text)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json={**LONG, "stream": False}, timeout=httpx.Timeout(PATIENT, read=0.2))
    until(lambda: worker.num_open == 0)
    worker.engine.check()


def test_who_does_not_read_holds_nobody_up_and_others_are_told_to_wait(served, pause):
    url, worker = served
    lazy = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = json.dumps({**LONG, "speculation": {"draft": "none"}, "logprobs": 5}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    lazy.sendall(head.encode() + b"\r\n\r\n" + body)
    until(lambda: worker.num_open == 1)
    short = {"prompt": "x", "max_tokens": 2, "temperature": 0}
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=PATIENT) as waiting:  # one more may wait
        refused = httpx.post(f"{url}/v1/completions", json=short, timeout=PATIENT)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        waiting.close()
    pause.seconds = 0
    assert until(lambda: httpx.post(f"{url}/v1/completions", json=short, timeout=PATIENT).status_code == 200)
    lazy.close()
    until(lambda: worker.num_open == 0)


def test_sigterm_finishes_what_runs_and_refuses_what_is_new(folder, tmp_path):
    port, hold = free_port(), tmp_path / "hold"
    hold.touch()
    args = ["serve", "--target", folder, "--draft", "lookup", "--tree", "chain:2", "--port", port, "--name", "tiny"]
    process = subprocess.Popen(
        [sys.executable, "-c", HELD, *map(str, args)],
        env={**os.environ, "DRAFTWING_API_KEY": "secret", "OMP_NUM_THREADS": "1", "HOLD": str(hold)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    url, keys = f"http://127.0.0.1:{port}", {"authorization": "Bearer secret"}
    try:
        until(lambda: process.poll() is not None or is_up(url))
        assert httpx.get(f"{url}/v1/models", timeout=PATIENT).status_code == 401
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, headers=keys, timeout=PATIENT) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            found = until(lambda: (r := httpx.get(f"{url}/health", timeout=PATIENT)).status_code == 503 and r)
            assert found.json()["status"] == "draining"
            chat = {"messages": question("x"), "max_tokens": 2}
            assert httpx.post(f"{url}/v1/chat/completions", json=chat, headers=keys, timeout=PATIENT).status_code == 503
            hold.unlink()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert process.wait(PATIENT) == 0
    finally:
        process.kill()
        output = process.communicate()[0]
    assert f"tiny at {url}/v1" in output
    assert "Traceback" not in output
