"""A real server: signals, clients that disconnect, and clients that do not read."""

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from typer.testing import CliRunner

from conftest import check_engine, refused
from draftwing.cli.main import app as cli
from draftwing.engine import Engine
from draftwing.errors import ConfigError
from draftwing.serve import app as serve_app
from draftwing.serve.app import ConnectionLimits, GracefulServer, Settings, bind, make_app
from serving import HTTP, PATIENT, chat_folder, load, question

LONG = {"prompt": "def add(a, b):", "max_tokens": 150, "temperature": 0, "ignore_eos": True, "stream": True}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def until(condition):
    """Wait until a condition is true, and return its value."""
    for _ in range(6_000):
        with suppress(httpx.TransportError):
            if found := condition():
                return found
        time.sleep(0.02)
    raise AssertionError("it did not come")


def is_up(url):
    return HTTP.get(f"{url}/health").status_code == 200


@pytest.fixture(scope="module")
def folder(folder_of, tmp_path_factory):
    return chat_folder(folder_of, tmp_path_factory, max_position_embeddings=1024)


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
    longer = {**LONG, "max_tokens": 700}
    with HTTP.stream("POST", f"{url}/v1/completions", json=longer) as answer:
        next(answer.iter_lines())
        assert worker.num_open == 1
    cancelled = 'draftwing_requests_total{finished_reason="cancelled",model_name="tiny"}'
    until(lambda: f"{cancelled} 1.0" in HTTP.get(f"{url}/metrics").text)
    with pytest.raises(httpx.ReadTimeout):
        HTTP.post(f"{url}/v1/completions", json={**longer, "stream": False}, timeout=httpx.Timeout(PATIENT, read=0.2))
    until(lambda: f"{cancelled} 2.0" in HTTP.get(f"{url}/metrics").text)
    assert worker.num_open == 0
    check_engine(worker.engine)


def test_who_does_not_read_holds_nobody_up_and_others_are_told_to_wait(served, pause):
    url, worker = served
    lazy = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = json.dumps({**LONG, "max_tokens": 700, "speculation": {"draft": "none"}, "logprobs": 5}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    lazy.sendall(head.encode() + b"\r\n\r\n" + body)
    until(lambda: worker.num_open == 1)
    short = {"prompt": "x", "max_tokens": 2, "temperature": 0}
    with HTTP.stream("POST", f"{url}/v1/completions", json=LONG) as waiting:  # one more may wait
        refused = HTTP.post(f"{url}/v1/completions", json=short)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        waiting.close()
    pause.seconds = 0
    assert until(lambda: HTTP.post(f"{url}/v1/completions", json=short).status_code == 200)
    lazy.close()
    until(lambda: worker.num_open == 0)


def hold_texts(monkeypatch):
    """Make engines wait after each step until the event that this returns is set."""
    steps, may_go_on = Engine.steps, threading.Event()

    def held(engine):
        for step in steps(engine):
            yield step
            assert may_go_on.wait(PATIENT)

    monkeypatch.setattr(Engine, "steps", held)
    return may_go_on


def is_draining(url):
    answer = HTTP.get(f"{url}/health")
    return answer.status_code == 503 and answer.json()["status"] == "draining"


def test_sigterm_finishes_what_is_here_and_refuses_what_is_new(folder, monkeypatch):
    """A text that is written, three chats that are being parsed, and one whose body has arrived in part."""
    text_goes_on, chats_go_on, body_goes_on = hold_texts(monkeypatch), threading.Event(), threading.Event()
    parse, port = serve_app.parse_chat, free_port()
    url, keys = f"http://127.0.0.1:{port}", {"authorization": "Bearer secret"}

    def parse_later(*args):
        assert chats_go_on.wait(PATIENT)
        return parse(*args)

    def pieces(body):
        yield body[:9]
        assert body_goes_on.wait(PATIENT)
        yield body[9:]

    def post(content):
        headers = {**keys, "content-type": "application/json"}
        return HTTP.post(f"{url}/v1/chat/completions", content=content, headers=headers)

    def work(pool):
        until(lambda: is_up(url))
        assert HTTP.get(f"{url}/v1/models").status_code == 401
        body = json.dumps({"messages": question("x"), "max_tokens": 2, "ignore_eos": True}).encode()
        with HTTP.stream("POST", f"{url}/v1/completions", json=LONG, headers=keys) as answer:
            lines = answer.iter_lines()
            next(lines)
            answers = [pool.submit(post, content) for content in (body, body, body, pieces(body))]
            until(lambda: HTTP.get(f"{url}/health").json()["open_requests"] == 5)
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: is_draining(url))
            assert post(body).status_code == 503
            for event in (body_goes_on, chats_go_on, text_goes_on):
                event.set()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert [answer.result().json()["usage"]["completion_tokens"] for answer in answers] == [2] * 4

    def work_and_stop(pool):
        try:
            work(pool)
        except BaseException:
            os.kill(os.getpid(), signal.SIGTERM)  # the second one stops it at once
            os.kill(os.getpid(), signal.SIGTERM)
            raise

    monkeypatch.setattr(serve_app, "parse_chat", parse_later)
    monkeypatch.setenv("DRAFTWING_API_KEY", "secret")
    args = ["serve", "--target", folder, "--draft", "lookup", "--tree", "chain:2", "--port", port, "--name", "tiny"]
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # which uvicorn raises again once it has ended
    try:
        with ThreadPoolExecutor(5) as pool:
            worked = pool.submit(work_and_stop, pool)
            result = CliRunner().invoke(cli, list(map(str, args)))
            worked.result()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.exit_code == 0, result.output
    assert f"tiny at {url}/v1" in result.output


# --- addresses and connections ---------------------------------------------------------------------------------------


def test_addresses_that_cannot_be_used_are_refused_before_the_model_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for args, message in (
            (["--port", str(port)], f"port {port} is in use: end the other program, or choose another port, such as"),
            (["--host", "192.0.2.1"], "this machine has no such address"),
            (["--host", "nowhere.invalid"], "this machine has no such address"),
            (["--host", "x" * 300], "this machine has no such address"),
            (["--kv-memory", "inf"], "--kv-memory takes GiB"),
            (["--kv-memory", "nan"], "--kv-memory takes GiB"),
            (["--kv-memory", "1e300"], "--kv-memory takes GiB"),
            (["--kv-memory", "0"], "--kv-memory takes GiB"),
            (["--kv-memory", "-1"], "--kv-memory takes GiB"),
        ):
            result = CliRunner().invoke(cli, ["serve", "--target", "/no/such/model", *args])
            assert result.exit_code == 2, args
            assert message in " ".join(result.stderr.split()), args


@pytest.mark.parametrize("gib", ["100000", "1e-5"])
def test_memory_that_cannot_work_is_refused_before_the_model_is_loaded(gib, monkeypatch):
    monkeypatch.setattr("draftwing.cli.options.Model.load", lambda *args: pytest.fail("loaded"))
    result = CliRunner().invoke(cli, ["serve", "--target", "toy", "--port", str(free_port()), "--kv-memory", gib])
    assert result.exit_code == 2
    message = " ".join(result.stderr.split())
    assert "error: --kv-memory" in message
    assert re.search(r"it needs at least .* GiB", message)


@pytest.mark.parametrize(
    ("args", "hosts"),
    [
        ([], ("localhost", "127.0.0.1", "::1")),
        (["--allowed-host", "a", "--allowed-host", "b.c"], ("localhost", "127.0.0.1", "::1", "a", "b.c")),
        (["--host", "0.0.0.0"], ()),
        (["--host", "0.0.0.0", "--allowed-host", "a"], ("localhost", "127.0.0.1", "::1", "a")),
    ],
)
def test_host_names_and_limits_of_the_command_line(monkeypatch, args, hosts):
    made = []
    monkeypatch.setattr("draftwing.cli.options.Model.check_kv_memory", lambda *args: None)
    monkeypatch.setattr("draftwing.cli.options.Model.load", lambda *args: SimpleNamespace())
    monkeypatch.setattr("draftwing.serve.app.make_app", lambda lm, settings: made.append(settings))
    monkeypatch.setattr("draftwing.serve.app.run", lambda app, sockets, patience: [each.close() for each in sockets])
    args = ["serve", "--target", "x", "--port", str(free_port()), "--kv-memory", "0.5", "--max-nodes", "9", *args]
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 0, result.output
    assert (made[0].hosts, made[0].kv_memory, made[0].max_nodes) == (hosts, 2**29, 9)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_port_that_is_taken_while_the_model_loads_is_named(loop):
    new_loop = pytest.importorskip(loop).new_event_loop
    (ours,) = bind("127.0.0.1", 0)
    with ours, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(ours.getsockname())
        other.listen()
        app = FastAPI()
        app.state.worker = SimpleNamespace(max_open=1)
        server = GracefulServer(app)
        server.config.load()
        server.lifespan = SimpleNamespace(startup=lambda: asyncio.sleep(0), should_exit=False, state={})
        with (
            asyncio.Runner(loop_factory=new_loop) as runner,
            refused(ConfigError, "cannot listen at '127.0.0.1': port", "is in use"),
        ):
            runner.run(server.startup([ours]))


def test_addresses_that_the_machine_does_not_use_are_left_out(monkeypatch):
    missing, usable = ((socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, 0)) for host in ("192.0.2.1", "127.0.0.1"))
    for found in ([missing, usable], [usable, missing]):
        monkeypatch.setattr("socket.getaddrinfo", lambda *args, found=found, **options: found)
        (bound,) = bind("localhost", 0)
        with bound:
            assert bound.getsockname()[0] == "127.0.0.1"
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **options: [missing, missing])
    with refused(ConfigError, "cannot listen at 'localhost': this machine has no such address"):
        bind("localhost", 0)


@contextmanager
def graceful(folder, patience=30.0, **limits):
    """A server with such limits, which runs in a thread, and its address."""
    (bound,) = bind("127.0.0.1", 0)
    app = make_app(load(folder), Settings(names=("tiny",), max_batch=1, max_waiting=0))
    server = GracefulServer(app, patience=patience, limits=ConnectionLimits(**limits), log_level="warning")
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    address = bound.getsockname()
    until(lambda: is_up(f"http://127.0.0.1:{address[1]}"))
    yield server, address
    server.should_exit = True
    thread.join(PATIENT)
    assert not thread.is_alive()


def test_patience_ends(folder, monkeypatch):
    """Unfinished answers end with an error message, and the server exits."""
    may_go_on = hold_texts(monkeypatch)
    with graceful(folder, patience=0.0) as (server, address):
        with HTTP.stream("POST", f"http://127.0.0.1:{address[1]}/v1/completions", json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.handle_exit(signal.SIGTERM, None)
            until(lambda: server.should_exit)
            may_go_on.set()
            last = [line for line in lines if line][-2:]
        assert "the server shut down during the answer" in last[0]


def half_sent(address, text=b"GET /health HTTP/1.1\r\nhost: x\r\nx-more: "):
    connection = socket.create_connection(address, PATIENT)
    connection.sendall(text)
    return connection


def rest_of(connection):
    """Everything that is received until the connection is closed."""
    received = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(4096):
            received += part
    return received


def test_half_sent_headers_do_not_keep_others_out(folder):
    with graceful(folder, max_connections=4) as (_, address):
        lazy = [half_sent(address) for _ in range(12)]
        for _ in range(3):
            assert is_up(f"http://127.0.0.1:{address[1]}")
        assert rest_of(lazy[0]) == b""  # the oldest one is closed
        lazy[-1].sendall(b"y\r\n\r\n")  # the latest one is not
        assert lazy[-1].recv(12) == b"HTTP/1.1 200"
        for each in lazy:
            each.close()


def test_requests_that_may_run_have_connections_of_their_own(folder):
    """With room for one connection and one request, two connections stay open, and a third one closes the first."""
    with graceful(folder, max_connections=1) as (_, address):
        first, second = half_sent(address), half_sent(address)
        for each in (second, first):
            each.sendall(b"y\r\n\r\n")
            assert each.recv(12) == b"HTTP/1.1 200"
            each.close()
        first, second, third = (half_sent(address) for _ in range(3))
        assert rest_of(first) == b""
        for each in (first, second, third):
            each.close()


def test_a_second_signal_ends_it_at_once(folder, monkeypatch):
    may_go_on = hold_texts(monkeypatch)
    with (
        graceful(folder, patience=10 * PATIENT) as (server, (_, port)),
        HTTP.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=LONG) as answer,
    ):
        lines = answer.iter_lines()  # dropping the generator would close the connection
        next(lines)
        server.handle_exit(signal.SIGTERM, None)
        until(lambda: is_draining(f"http://127.0.0.1:{port}"))
        assert not server.should_exit
        server.handle_exit(signal.SIGTERM, None)
        until(lambda: server.should_exit)
        may_go_on.set()


@pytest.mark.parametrize("text", [b"", b"GET /health", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /health HT"])
def test_headers_must_come_in_time(folder, text):
    """Those of a second request on the same connection too."""
    with graceful(folder, header_timeout=0.05) as (_, address), half_sent(address, text) as lazy:
        assert rest_of(lazy).count(b"HTTP/1.1 200") == text.count(b"\r\n\r\n")
