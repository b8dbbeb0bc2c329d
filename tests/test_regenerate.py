"""Answers anew: the model's own words, one record at a time, from here or from a server, stopped and gone on with."""

import json
import runpy
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import draftwing as dw
from conftest import TEXTS, add_tokenizer, refused
from draftwing.cli import main as cli
from draftwing.errors import ConfigError, DataError
from draftwing.sampling import Sampling
from draftwing.train.answer_batch import BatchAnswerer, write_requests
from draftwing.train.answer_local import LMAnswerer
from draftwing.train.answer_server import ServerAnswerer
from draftwing.train.answers import AnsweredTask, read_finished_ids, read_tasks, regenerate, sampling_of, seed_of
from draftwing.train.data import read_examples

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
DIALOGUES = [
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "add rows"},
            {"role": "assistant", "content": "somebody else's words"},
            {"role": "user", "content": "and now?"},
            {"role": "assistant", "content": "more of these"},
        ]
    },
    {"conversations": [{"from": "human", "value": "class"}, {"from": "gpt", "value": "other words"}]},
    {"prompt": "for row in rows"},
]


def load(folder_of, path, **settings):
    folder = shutil.copytree(folder_of("llama", vocab_size=300, head_dim=32), path)
    return dw.load(add_tokenizer(folder, **settings), dtype="float64")


@pytest.fixture(scope="module")
def lm(folder_of, tmp_path_factory):
    return load(folder_of, tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def chat_lm(folder_of, tmp_path_factory):
    return load(folder_of, tmp_path_factory.mktemp("chat") / "model", chat_template=TEMPLATE)


@pytest.fixture
def dialogues(tmp_path):
    file = tmp_path / "dialogues.jsonl"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in DIALOGUES))
    return file


@pytest.fixture
def documents(tmp_path):
    folder = tmp_path / "documents"
    folder.mkdir()
    for i, text in enumerate(TEXTS):
        (folder / f"{i}.py").write_text(text * 4)
    return folder


def lines_of(file):
    return [json.loads(line) for line in file.read_bytes().split(b"\n") if line]


class Echo:
    """An answerer without a model; counts what it was asked."""

    def __init__(self, words="yes 😀\n"):
        self.words, self.asked = words, []

    def answer(self, tasks):
        for task in tasks:
            self.asked.append(task.id)
            answer = AnsweredTask(task)
            while answer.next_prompt() is not None:
                answer.take(self.words, "stop", 3)
            yield answer.finish()


# --- tasks -----------------------------------------------------------------------------------------------------------


def test_tasks_of_dialogues(dialogues):
    first, second, third = read_tasks([dialogues])
    assert [message["content"] for message in first.messages] == ["Be brief.", "add rows", "and now?"]
    assert second.messages == ({"role": "user", "content": "class"},)
    assert third.messages == ({"role": "user", "content": "for row in rows"},)
    assert len({first.id, second.id, third.id}) == 3
    moved = dialogues.rename(dialogues.parent / "moved.jsonl")
    moved.write_text(moved.read_text() * 2)
    assert [task.id for task in read_tasks([moved])] == [first.id, second.id, third.id]  # by content, and once
    assert [task.id for task in read_tasks([moved], limit=2)] == [first.id, second.id]


def test_tasks_of_documents(documents, lm):
    text = "first line\nsecond line\nthird line that is long\n" * 3
    (documents / "0.py").write_text(text)
    bare = lm.tokenizer.fast
    for num in (1, 5, 12, 20, 30, 500):
        prompt = read_tasks([documents], prompt_tokens=num, tokenizer=lm.tokenizer)[0].text
        assert text.startswith(prompt)
        used = len(bare.encode(prompt, add_special_tokens=False).ids)
        assert 0 < used <= num
        assert used <= len(bare.encode(text, add_special_tokens=False).ids) / 2
        if num >= 12:
            assert text[len(prompt)] == "\n"
            # The next line would have been too much.
            more = text[: text.find("\n", len(prompt) + 1)]
            half = len(bare.encode(text, add_special_tokens=False).ids) // 2
            assert len(bare.encode(more, add_special_tokens=False).ids) > min(num, half)
    assert read_tasks([documents], prompt_tokens=4)[0].text == "first line"  # 16 characters
    assert read_tasks([documents], prompt_tokens=2)[0].text == "first li"


def test_a_short_document_keeps_half_of_itself(tmp_path):
    (tmp_path / "short.txt").write_text("abcdefgh")
    assert [task.text for task in read_tasks([tmp_path / "short.txt"])] == ["abcd"]


def test_tasks_and_answerers_refuse(tmp_path, documents, lm):
    with refused(ConfigError, "prompt_tokens must be at least 1, found 0"):
        read_tasks([documents], prompt_tokens=0)
    with refused(ConfigError, "max_batch must be at least 1, found 0"):
        LMAnswerer(lm, SAMPLED, max_batch=0)
    nothing = tmp_path / "a.jsonl"
    nothing.write_text('{"messages": []}\n{"text": " "}\n')
    with refused(DataError, "a.jsonl: there is nothing to answer: give user turns"):
        read_tasks([nothing])
    with refused(DataError, "a.jsonl: this file is both a source and the output"):
        read_tasks([nothing], output=tmp_path / "documents" / ".." / "a.jsonl")


# --- our own model ---------------------------------------------------------------------------------------------------

SAMPLED = Sampling(temperature=0.9, top_p=0.95, max_tokens=12, seed=5)
STOPPED = Sampling(temperature=0.9, max_tokens=24, stop=tuple("aeortsn"), seed=0)


def answers_of(lm, task, sampling):
    """The same, one prompt at a time, by ``generate``."""
    own, messages = [], []
    for message in task.messages:
        messages.append(message)
        if message["role"] == "user":
            prompt = messages
            if not lm.tokenizer.has_chat_template:
                prompt = "".join(each["content"] + "\n\n" for each in messages)
            (found,) = lm.generate([prompt], sampling, seed=seed_of(sampling.seed, task.id))
            cut = {"finish_reason": "length"} if found.finish_reason == "length" else {}
            messages = [*messages, {"role": "assistant", "content": found.text, **cut}]
            own.append(found)
    return own, messages


@pytest.mark.parametrize(("kind", "sampling"), [("chat_lm", SAMPLED), ("lm", STOPPED)], ids=["chat", "stop-string"])
def test_every_user_turn_is_answered_in_the_models_own_words(kind, sampling, dialogues, tmp_path, request):
    lm = request.getfixturevalue(kind)
    tasks = read_tasks([dialogues])
    done = regenerate(tasks, LMAnswerer(lm, sampling, max_batch=2), tmp_path / "out.jsonl")
    found = {entry["id"]: entry for entry in lines_of(tmp_path / "out.jsonl")}
    num_tokens, finishes = 0, set()
    for task in tasks:
        own, messages = answers_of(lm, task, sampling)
        if all(answer.text.strip() for answer in own):
            assert found.pop(task.id) == {
                "id": task.id,
                "source": task.where,
                "messages": messages,
                "finish_reason": own[-1].finish_reason,
                "num_tokens": sum(len(answer.token_ids) for answer in own),
                "temperature": 0.9,
            }
        num_tokens += sum(len(answer.token_ids) for answer in own)
        finishes |= {answer.finish_reason for answer in own}
    assert ("stop" if sampling is STOPPED else "length") in finishes
    assert len(found) == 0
    assert done.num_written + len(done.skipped) == 3
    assert done.num_written >= 1
    if sampling is SAMPLED:
        assert (done.num_written, done.num_tokens) == (3, num_tokens)


def test_documents_go_on_from_their_beginning(lm, documents, tmp_path):
    tasks = read_tasks([documents], prompt_tokens=8, tokenizer=lm.tokenizer)
    regenerate(tasks, LMAnswerer(lm, SAMPLED, max_batch=2), tmp_path / "out.jsonl")
    found = {entry["source"]: entry for entry in lines_of(tmp_path / "out.jsonl")}
    assert sorted(found) == ["0.py", "1.py", "2.py"]
    for task in tasks:
        (alone,) = lm.generate([task.text], SAMPLED, seed=seed_of(5, task.id))
        assert found[task.where]["text"] == task.text + alone.text
        assert found[task.where]["finish_reason"] == alone.finish_reason


def test_no_more_than_max_batch_at_once_and_no_fewer(lm, documents, tmp_path, monkeypatch):
    decoder, running = lm.decoder(), []
    step = decoder.step
    monkeypatch.setattr(lm, "decoder", lambda **options: decoder)
    monkeypatch.setattr(decoder, "step", lambda: [running.append(decoder.num_running), step()][1])
    tasks = read_tasks([documents], tokenizer=lm.tokenizer)
    regenerate(tasks, LMAnswerer(lm, SAMPLED, max_batch=2), tmp_path / "out.jsonl")
    assert max(running) == running[0] == 2


def test_each_task_has_one_of_several_temperatures_whatever_comes_before_it(lm, documents, tmp_path):
    tasks = read_tasks([documents], prompt_tokens=8, tokenizer=lm.tokenizer)
    mixed = [Sampling(temperature=each, max_tokens=6, seed=4) for each in (0.0, 1.0)]
    regenerate(tasks, LMAnswerer(lm, mixed, max_batch=3), tmp_path / "whole.jsonl")
    out = tmp_path / "resumed.jsonl"
    regenerate(tasks[2:3], LMAnswerer(lm, mixed), out)
    regenerate(tasks[::-1], LMAnswerer(lm, mixed, max_batch=2), out)
    whole, resumed = ({entry["id"]: entry for entry in lines_of(tmp_path / name)} for name in ("whole.jsonl", out.name))
    assert whole == resumed
    assert {entry["temperature"] for entry in whole.values()} == {0.0, 1.0}
    for task in tasks:
        (alone,) = lm.generate([task.text], sampling_of(mixed, task.id))
        assert whole[task.id]["text"] == task.text + alone.text
    chosen = [[sampling_of(mixed, str(i)).temperature for i in range(400)] for _ in range(2)]
    assert chosen[0] == chosen[1]
    assert 150 < sum(chosen[0]) < 250
    other = [Sampling(temperature=each, seed=3) for each in (0.0, 1.0)]
    assert [sampling_of(other, str(i)).temperature for i in range(400)] != chosen[0]
    seeds = [seed_of(0, "a"), seed_of(0, "b"), seed_of(1, "a")]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_what_was_written_can_be_trained_on(chat_lm, dialogues, tmp_path):
    out = tmp_path / "out.jsonl"
    regenerate(read_tasks([dialogues]), LMAnswerer(chat_lm, SAMPLED), out)
    corpus = read_examples([out], chat_lm.tokenizer, max_length=500)
    assert len(corpus.examples) == 3
    for example, entry in zip(corpus.examples, lines_of(out), strict=True):
        said = chat_lm.tokenizer.decode(example.ids[example.mask].tolist())
        for message in entry["messages"]:
            if message["role"] == "assistant":
                assert message["content"].strip("\n ") in said


def test_a_prompt_that_is_too_long_ends_the_dialogue(chat_lm, tmp_path):
    file = tmp_path / "a.jsonl"
    long = {"role": "user", "content": "x" * 600}
    short = {"role": "user", "content": "add"}
    file.write_text("\n".join(json.dumps({"messages": messages}) for messages in ([short, long, short], [long])))
    done = regenerate(read_tasks([file]), LMAnswerer(chat_lm, SAMPLED), tmp_path / "out.jsonl")
    (entry,) = lines_of(tmp_path / "out.jsonl")
    assert [message["role"] for message in entry["messages"]] == ["user", "assistant"]
    assert done.skipped[0][0] == f"{file}, line 2"
    assert "shorten it" in done.skipped[0][1]


# --- stopped, and gone on with ---------------------------------------------------------------------------------------


def test_ctrl_c_loses_nothing_that_was_finished(lm, documents, tmp_path):
    tasks = read_tasks([documents], prompt_tokens=8, tokenizer=lm.tokenizer)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "deep" / "out.jsonl"
    regenerate(tasks, LMAnswerer(lm, SAMPLED, max_batch=2), whole)
    seen = []

    def stop(done, total):
        seen.append((done, total))
        assert len(lines_of(out)) == done  # on the disk, not in a buffer
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerate(tasks, LMAnswerer(lm, SAMPLED, max_batch=2), out, on_progress=stop)
    assert seen == [(0, 3), (1, 3), (2, 3)]
    before = out.read_bytes()
    assert len(lines_of(out)) == 2
    seen.clear()
    done = regenerate(tasks, LMAnswerer(lm, SAMPLED), out, on_progress=lambda *at: seen.append(at))
    assert (done.num_written, done.num_kept) == (1, 2)
    assert seen == [(2, 3), (3, 3)]
    assert out.read_bytes().startswith(before)
    assert sorted(out.read_bytes().split(b"\n")) == sorted(whole.read_bytes().split(b"\n"))


def test_killed_at_any_byte(dialogues, documents, tmp_path):
    tasks = [*read_tasks([dialogues])[1:], *read_tasks([documents], limit=1)]
    out = tmp_path / "out.jsonl"
    regenerate(tasks, Echo(), out)
    whole = out.read_bytes()
    assert whole.count(b"\n") == 3
    ends = [at for at, byte in enumerate(whole) if byte == ord("\n")]
    for size in sorted({*range(0, len(whole), 7), *range(12), *(at + i for at in ends for i in (-1, 0, 1))}):
        out.write_bytes(whole[:size])
        echo = Echo()
        done = regenerate(tasks, echo, out)
        assert out.read_bytes() == whole
        kept = whole[: size + 1].count(b"\n")  # a record that lacks its newline alone is whole
        assert (done.num_kept, done.num_written, len(echo.asked)) == (kept, 3 - kept, 3 - kept)


@pytest.mark.parametrize("content", ["my notes", "my notes\nmore", '{"text": "x"}\n', '{"id": "a"}\n\nx', "[1]"])
def test_a_file_of_another_kind_is_left_alone(content, dialogues, tmp_path):
    out = tmp_path / "notes.txt"
    out.write_text(content)
    with refused(DataError, "notes.txt, line", "expected a record that an earlier run wrote", "give another file"):
        regenerate(read_tasks([dialogues]), Echo(), out)
    assert out.read_text() == content


def test_output_that_cannot_be_written(dialogues, tmp_path):
    with refused(DataError, "cannot be written", "check the path"):
        regenerate(read_tasks([dialogues]), Echo(), tmp_path)
    with refused(DataError, "cannot be written", "part of the path is a file"):
        regenerate(read_tasks([dialogues]), Echo(), dialogues / "out.jsonl")


# --- a server --------------------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Answers with the number of its messages; ``script(body)`` may return (status, headers, content) instead."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests, self.script = [], lambda body: None
        self.lock, self.url = threading.Lock(), f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass  # clients that hang up


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, dict(self.headers), body))
        found = self.server.script(body)
        if found is None:
            if self.path == "/v1/chat/completions":
                choice = {"message": {"role": "assistant", "content": f"answer {len(body['messages'])}"}}
            else:
                choice = {"text": " and so on"}
            usage = {"completion_tokens": 3}
            found = 200, {}, json.dumps({"choices": [{**choice, "finish_reason": "stop"}], "usage": usage})
        status, headers, content = found
        if status is None:  # hang up
            return
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def answerer(server, sampling=SAMPLED, **options):
    return ServerAnswerer(
        server.url, "tiny", sampling, **{"backoff": 0.001, "num_retries": 3, "timeout": 10, **options}
    )


def test_dialogues_of_a_server(server, dialogues, tmp_path):
    tasks = read_tasks([dialogues])
    done = regenerate(tasks, answerer(server, api_key="secret", num_parallel=1), tmp_path / "out.jsonl")
    assert done == type(done)(3, 0, 12, ())
    assert done.tokens_per_s == 12 / done.seconds > 0
    first = lines_of(tmp_path / "out.jsonl")[0]
    contents = [message["content"] for message in first["messages"]]
    assert contents == ["Be brief.", "add rows", "answer 2", "and now?", "answer 4"]
    assert first["finish_reason"] == "stop"
    path, headers, body = server.requests[1]
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", "Bearer secret")
    assert body == {
        "model": "tiny", "messages": first["messages"][:4], "temperature": 0.9, "top_p": 0.95, "max_tokens": 12,
        "seed": seed_of(5, tasks[0].id) & 0x7FFFFFFF,
    }  # fmt: skip
    assert all("assistant" not in json.dumps(request[2]["messages"][:2]) for request in server.requests)


def test_documents_of_a_server(server, documents, tmp_path):
    tasks = read_tasks([documents], prompt_tokens=4)
    sampling = Sampling(max_tokens=4, top_k=7, stop=("\n",))
    url = ServerAnswerer(server.url + "/v1/", "tiny", sampling)
    regenerate(tasks, url, tmp_path / "out.jsonl")
    texts = {entry["id"]: entry["text"] for entry in lines_of(tmp_path / "out.jsonl")}
    assert texts == {task.id: task.text + " and so on" for task in tasks}
    path, headers, body = server.requests[0]
    assert path == "/v1/completions"
    assert "Authorization" not in headers
    assert (body["top_k"], body["stop"]) == (7, ["\n"])
    assert "min_p" not in body


def test_cut_answers_are_marked(server, dialogues, tmp_path):
    reply = {"choices": [{"message": {"content": "half"}, "finish_reason": "length"}]}
    server.script = lambda body: (200, {}, json.dumps(reply))
    regenerate(read_tasks([dialogues], limit=1), answerer(server), tmp_path / "out.jsonl")
    (entry,) = lines_of(tmp_path / "out.jsonl")
    assert [message.get("finish_reason") for message in entry["messages"]] == [None, None, "length", None, "length"]


def test_requests_run_side_by_side(server, tmp_path):
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(12)))
    barrier = threading.Barrier(4, timeout=10)  # breaks, and fails the request, unless four come together
    server.script = lambda body: [barrier.wait(), None][1]
    done = regenerate(read_tasks([file]), answerer(server, num_parallel=4), tmp_path / "out.jsonl")
    assert done.num_written == 12
    assert len(server.requests) == 12


def test_a_busy_server_is_asked_again(server, dialogues, tmp_path):
    troubles = iter([(503, {}, "loading"), (429, {"Retry-After": "0"}, ""), (None, {}, "")])
    server.script = lambda body: next(troubles, None)
    done = regenerate(read_tasks([dialogues], limit=1), answerer(server), tmp_path / "out.jsonl")
    assert done.num_written == 1
    assert len(server.requests) == 5


def test_a_busy_server_says_how_long_to_wait(server, dialogues, tmp_path, monkeypatch):
    """But not longer than a minute."""
    waits = []

    class Event(threading.Event):
        def wait(self, timeout=None):
            waits.append(timeout)
            return False

    module = SimpleNamespace(Event=Event, Thread=threading.Thread)
    monkeypatch.setattr("draftwing.train.answer_server.threading", module)
    troubles = iter([(429, {"Retry-After": "7"}, ""), (503, {"Retry-After": "999"}, "")])
    server.script = lambda body: next(troubles, None)
    assert regenerate(read_tasks([dialogues], limit=1), answerer(server), tmp_path / "out.jsonl").num_written == 1
    assert waits == [7, 60]


def test_no_proxy_is_asked_for_this_machine(server, dialogues, tmp_path, monkeypatch):
    for name, value in (("http_proxy", "http://192.0.2.1:9"), ("no_proxy", "")):
        monkeypatch.setenv(name, value)
    done = regenerate(read_tasks([dialogues]), answerer(server, timeout=1), tmp_path / "out.jsonl")
    assert done.num_written == 3


def test_a_server_that_goes_down_keeps_what_was_finished(server, dialogues, tmp_path):
    tasks, out = read_tasks([dialogues]), tmp_path / "out.jsonl"
    server.script = lambda body: (500, {}, "out of memory") if body["messages"][0]["content"] == "class" else None
    with refused(
        DataError, "/v1/chat/completions: no answer after 4 tries (500 out of memory)", "run the same command"
    ):
        regenerate(tasks, answerer(server, num_parallel=1), out)
    assert [entry["id"] for entry in lines_of(out)] == [tasks[0].id]
    server.script = lambda body: None
    server.requests.clear()
    done = regenerate(tasks, answerer(server), out)
    assert (done.num_kept, done.num_written, len(server.requests)) == (1, 2, 2)


def test_a_refused_prompt_is_skipped(server, dialogues, tmp_path):
    refusal = 400, {}, json.dumps({"error": {"message": "the context is too long"}})
    server.script = lambda body: refusal if len(body["messages"]) in (1, 4) else None
    done = regenerate(read_tasks([dialogues]), answerer(server), tmp_path / "out.jsonl")
    (entry,) = lines_of(tmp_path / "out.jsonl")
    assert [message["content"] for message in entry["messages"]] == ["Be brief.", "add rows", "answer 2"]
    assert sorted(done.skipped) == [(f"{dialogues}, line {n}", "400 the context is too long") for n in (2, 3)]
    server.script = lambda body: refusal
    with refused(DataError, "none of the 3 prompts could be answered", "line ", "400 the context is too long"):
        regenerate(read_tasks([dialogues]), answerer(server), tmp_path / "other.jsonl")


@pytest.mark.parametrize(
    ("reply", "parts"),
    [
        ((404, {}, '{"error": {"message": "no model tiny"}}'), ["model 'tiny': 404 no model tiny", "check the URL"]),
        ((401, {}, '{"error": "bad key"}'), ["401 bad key", "API key"]),
        ((200, {}, "<html>"), ["expected JSON, found b'<html>'", "OpenAI API?"]),
        ((200, {}, '{"choices": []}'), ['expected a completion, found {"choices": []}', "OpenAI API?"]),
        ((200, {}, "[]"), ["expected a completion, found []"]),
    ],
)
def test_a_server_that_is_none(reply, parts, server, dialogues, tmp_path):
    server.script = lambda body: reply
    with refused(DataError, *parts):
        regenerate(read_tasks([dialogues]), answerer(server), tmp_path / "out.jsonl")


def test_an_empty_answer_is_skipped(server, dialogues, tmp_path):
    empty = json.dumps({"choices": [{"message": {"content": None}, "finish_reason": "stop"}]})
    server.script = lambda body: (200, {}, empty) if body["messages"][-1]["content"] == "class" else None
    done = regenerate(read_tasks([dialogues]), answerer(server), tmp_path / "out.jsonl")
    assert (done.num_written, done.skipped) == (2, ((f"{dialogues}, line 2", "the answer is empty"),))


def test_no_server(server, dialogues, tmp_path):
    gone = Server()
    gone.server_close()
    with refused(DataError, f"{gone.url}/v1: no server can be reached (", "start it, or correct its URL"):
        regenerate(read_tasks([dialogues]), answerer(gone), tmp_path / "out.jsonl")
    with refused(ConfigError, "server 'localhost:8000': expected a URL such as http://localhost:8000"):
        ServerAnswerer("localhost:8000", "tiny", SAMPLED)
    with refused(ConfigError, "num_parallel must be at least 1"):
        answerer(server, num_parallel=0)


def test_several_servers_share_the_work(server, tmp_path):
    file, options = tmp_path / "many.jsonl", {"backoff": 0.001, "num_retries": 1, "timeout": 10, "num_parallel": 2}
    file.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(24)))
    tasks = read_tasks([file])
    regenerate(tasks, answerer(server), tmp_path / "alone.jsonl")
    with Server() as other:
        thread = threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        both = ServerAnswerer([server.url, other.url], "tiny", SAMPLED, **options)
        assert regenerate(tasks, both, tmp_path / "both.jsonl").num_written == 24
        assert other.requests
        seeds = {json.dumps(body["messages"]): body["seed"] for _, _, body in server.requests}
        assert all(seeds[json.dumps(body["messages"])] == body["seed"] for _, _, body in other.requests)
        other.script = lambda body: (503, {}, "out of memory")  # goes down: what it had begun is begun anew
        both = ServerAnswerer([server.url, other.url], "tiny", SAMPLED, **options)
        assert regenerate(tasks, both, tmp_path / "one-left.jsonl").num_written == 24
        assert [problem.startswith(other.url) for problem in both.gone] == [True]
        server.script = other.script
        with refused(DataError, "no answer after 2 tries (503 out of memory)"):
            regenerate(tasks, both, tmp_path / "none.jsonl")
        other.shutdown()
        thread.join()
    alone, together = (sorted(map(json.dumps, lines_of(tmp_path / f"{name}.jsonl"))) for name in ("alone", "one-left"))
    assert together == alone
    with refused(ConfigError, "expected the URL of a server", "found none"):
        ServerAnswerer([], "tiny", SAMPLED)


def test_the_command_reports_what_ctrl_c_left(folder_of, dialogues, tmp_path, monkeypatch):
    answer = LMAnswerer.answer
    folder = shutil.copytree(folder_of("llama", vocab_size=300, head_dim=32), tmp_path / "model")
    add_tokenizer(folder, chat_template=TEMPLATE)

    def stop(self, tasks):
        yield next(answer(self, tasks))
        raise KeyboardInterrupt

    args = ["data", "regenerate", "-t", folder, "--data", dialogues, "-o", tmp_path / "out", "-n", 4]
    monkeypatch.setattr(LMAnswerer, "answer", stop)
    stopped = CliRunner().invoke(cli.app, list(map(str, args)))
    assert stopped.exit_code == 130
    assert "stopped: 1 of 3 prompts are done: run the same command again to continue" in stopped.stderr
    monkeypatch.undo()
    assert "wrote 2 records" in CliRunner().invoke(cli.app, list(map(str, args))).stderr


def test_ctrl_c_does_not_wait_for_the_server(server, dialogues, tmp_path):
    released = threading.Event()
    server.script = lambda body: [len(body["messages"]) > 1 or released.wait(60), None][1]

    def stop(done, total):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerate(read_tasks([dialogues]), answerer(server), tmp_path / "out.jsonl", on_progress=stop)
    assert not released.is_set()  # two requests are still under way
    released.set()
    assert len(lines_of(tmp_path / "out.jsonl")) == 1


# --- batches: requests and answers in files --------------------------------------------------------------------------


def reply_to(request, **change):
    """A line of a batch's output, as vLLM and hosted services write it."""
    body = request["body"]
    said = f"answer {len(body['messages'])}" if "messages" in body else " continued"
    choice = {"message": {"role": "assistant", "content": said}} if "messages" in body else {"text": said}
    completion = {"choices": [{**choice, "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}
    response = {"status_code": 200, "request_id": "r", "body": completion}
    return {"id": "batch_1", "custom_id": request["custom_id"], "response": response, "error": None, **change}


def failing(status, message):
    return {"response": {"status_code": status, "request_id": "r", "body": {"error": {"message": message}}}}


def write_lines(file, entries):
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


def ask(file, tasks, samplings=(SAMPLED,), replies=(), **options):
    return write_requests(file, tasks, "tiny", list(samplings), answered=BatchAnswerer(replies), **options)


def test_requests_are_those_to_a_server(server, dialogues, tmp_path):
    tasks = read_tasks([dialogues])
    assert ask(tmp_path / "requests.jsonl", tasks) == 3
    requests = lines_of(tmp_path / "requests.jsonl")
    assert {(request["method"], request["url"]) for request in requests} == {("POST", "/v1/chat/completions")}
    assert len({request["custom_id"] for request in requests}) == 3
    regenerate(tasks, answerer(server, num_parallel=1), tmp_path / "out.jsonl")
    sent = [body for _, _, body in server.requests]
    assert all(request["body"] in sent for request in requests)


def test_a_batch_answers_like_a_server(lm, dialogues, documents, tmp_path):
    """A dialogue of two turns takes two rounds; temperatures come back with the names of the requests."""
    tasks, out = read_tasks([dialogues, documents]), tmp_path / "out.jsonl"
    samplings = [Sampling(temperature=0.0, max_tokens=9, seed=3), Sampling(temperature=0.7, max_tokens=9, seed=3)]
    replies = []
    for number, (num_written, num_open) in enumerate([(len(tasks) - 1, 1), (1, 0)]):
        requests, answers = tmp_path / f"requests{number}.jsonl", tmp_path / f"answers{number}.jsonl"
        finished = read_finished_ids(out)
        assert ask(requests, tasks, samplings, replies, finished=finished) == [len(tasks), 1][number]
        replies.append(write_lines(answers, [reply_to(request) for request in reversed(lines_of(requests))]))
        batch = BatchAnswerer(replies)
        done = regenerate(tasks, batch, out)
        assert (done.num_written, done.num_kept, batch.num_open) == (
            num_written,
            len(tasks) - 1 if number else 0,
            num_open,
        )
    assert ask(tmp_path / "none.jsonl", tasks, samplings, replies, finished=read_finished_ids(out)) == 0
    assert not (tmp_path / "none.jsonl").exists()
    entries = {entry["id"]: entry for entry in lines_of(out)}
    assert {entry["temperature"] for entry in entries.values()} <= {0.0, 0.7}
    assert all(entries[task.id]["temperature"] == sampling_of(samplings, task.id).temperature for task in tasks)
    first = [message["content"] for message in entries[tasks[0].id]["messages"]]
    assert first == ["Be brief.", "add rows", "answer 2", "and now?", "answer 4"]
    assert entries[tasks[0].id]["num_tokens"] == 4
    assert entries[tasks[-1].id]["text"].endswith(" continued")
    assert read_examples([out], lm.tokenizer, max_length=64).num_tokens > 0


def test_failed_answers_are_counted_and_asked_again(dialogues, tmp_path):
    tasks, out = read_tasks([dialogues]), tmp_path / "out.jsonl"
    ask(tmp_path / "requests.jsonl", tasks)
    first, second, third = lines_of(tmp_path / "requests.jsonl")
    expired = {"response": None, "error": {"code": "batch_expired", "message": "expired"}}
    replies = write_lines(
        tmp_path / "replies.jsonl",
        [reply_to(first), reply_to(second, **failing(500, "out of memory")), reply_to(third, **expired)],
    )
    with replies.open("a") as file:
        file.write('{"custom_id": "another"}\n{"custom_id": "0123456')
    batch = BatchAnswerer([replies])
    with refused(DataError, "none of the 2 prompts could be answered", "500 out of memory", "replies.jsonl, line 2"):
        regenerate(tasks, batch, out)
    assert [where for where, _ in batch.unread] == [f"{replies}, line 4", f"{replies}, line 5"]
    assert batch.num_open == 1
    # The next round asks for the second turn, and again for what failed.
    assert ask(tmp_path / "again.jsonl", tasks, replies=[replies]) == 3
    requests = lines_of(tmp_path / "again.jsonl")
    assert [request["custom_id"] for request in requests[1:]] == [second["custom_id"], third["custom_id"]]
    more = write_lines(
        tmp_path / "more.jsonl",
        [
            reply_to(  # as vLLM writes it
                requests[0],
                response={"status_code": 400, "request_id": "r", "body": None},
                error={"error": {"message": "the context is too long", "code": 400}},
            ),
            reply_to(requests[1], response={"status_code": 200, "body": {"choices": []}}),
            reply_to(requests[2]),
        ],
    )
    done = regenerate(tasks, BatchAnswerer([replies, more]), out)
    assert done.num_written == 2
    assert regenerate(tasks, BatchAnswerer([more, replies]), tmp_path / "reversed.jsonl").num_written == 2
    assert [where for where, _ in done.skipped] == [f"{dialogues}, line 2"]
    assert "expected a completion, found" in done.skipped[0][1]
    # A prompt that is refused ends its dialogue before it.
    entries = {entry["id"]: entry["messages"] for entry in lines_of(out)}
    assert [message["content"] for message in entries[tasks[0].id]] == ["Be brief.", "add rows", "answer 2"]
    empty = {"response": {"status_code": 200, "body": {"choices": [{"message": {"content": " "}}]}}}
    nothing = write_lines(tmp_path / "empty.jsonl", [reply_to(second, **empty)])
    assert "the answer is empty" in regenerate(tasks, BatchAnswerer([nothing]), out).skipped[0][1]


def test_files_that_are_no_batch(dialogues, tmp_path):
    other = write_lines(tmp_path / "other.jsonl", [{"id": "1"}])
    with refused(DataError, str(other), "no answer to a request of --write-batch", "line 1", "give the file"):
        BatchAnswerer([other])
    with refused(DataError, "none.jsonl: cannot be read", "give a file of answers"):
        BatchAnswerer([tmp_path / "none.jsonl"])
    ask(tmp_path / "requests.jsonl", read_tasks([dialogues]))
    replies = write_lines(tmp_path / "replies.jsonl", map(reply_to, lines_of(tmp_path / "requests.jsonl")))
    assert BatchAnswerer([replies]).count_unknown(read_tasks([dialogues], limit=2)) == 1
    assert BatchAnswerer([]).count_unknown(read_tasks([dialogues])) == 0
    strangers = tmp_path / "strangers.jsonl"
    strangers.write_text('{"prompt": "who is there?"}\n')
    with refused(DataError, "the 3 answers belong to no prompt of the data"):
        BatchAnswerer([replies]).count_unknown(read_tasks([strangers]))


def test_batches_on_the_command_line(dialogues, tmp_path):
    base = ["data", "regenerate", "--data", dialogues, "-o", tmp_path / "out.jsonl"]

    def run(*args):
        return CliRunner().invoke(cli.app, list(map(str, [*base, *args])))

    requests, replies = tmp_path / "requests.jsonl", tmp_path / "replies.jsonl"
    asked = run("--write-batch", requests, "--served-model", "tiny", "-T", "0.7")
    assert asked.exit_code == 0, asked.output
    assert "wrote 3 requests" in asked.output
    write_lines(replies, map(reply_to, lines_of(requests)))
    more = ["--write-batch", tmp_path / "more.jsonl", "--served-model", "tiny"]
    found = json.loads(run("--read-batch", replies, *more, "--json").stdout)
    assert (found["num_written"], found["open"], found["requests"], found["unread"]) == (2, 1, 1, [])
    for args, part in [
        (["--write-batch", requests], "--write-batch needs --served-model"),
        (["--read-batch", replies, "--features", tmp_path / "cache"], "drop --features"),
        (["--read-batch", replies, "--write-batch", replies, "--served-model", "tiny"], "read and written at once"),
    ]:
        failed = run(*args)
        assert part in failed.output.replace("\n", " ") + str(failed.exception)


def recipe(name):
    return runpy.run_path(str(Path(__file__).parents[1] / "recipes" / "cluster" / name))


def test_replies_of_ray_are_those_of_a_batch(dialogues, tmp_path):
    tasks, ray = read_tasks([dialogues]), recipe("ray_answers.py")
    ask(tmp_path / "requests.jsonl", tasks)
    replies = []
    for request in lines_of(tmp_path / "requests.jsonl"):
        row = {**ray["prepare"](request), "generated_text": "an answer", "num_generated_tokens": SAMPLED.max_tokens}
        assert row["sampling_params"].items() <= request["body"].items()
        replies.append(ray["to_reply"](row))
    out = tmp_path / "out.jsonl"
    regenerate(tasks, BatchAnswerer([write_lines(tmp_path / "replies.jsonl", replies)]), out)
    assert [record["finish_reason"] for record in lines_of(out)] == ["length"] * len(lines_of(out))
    request = recipe("dialogue_requests.py")["request_of"](lines_of(out)[0], "tiny")
    roles = [message["role"] for message in request["body"]["messages"]]
    assert roles[-1] == "assistant"
    assert not request["body"]["add_generation_prompt"]


@pytest.mark.parametrize("name", ["slurm.sh", "node.sh"])
def test_scripts_of_clusters_are_bash(name):
    subprocess.run(["bash", "-n", Path(__file__).parents[1] / "recipes" / "cluster" / name], check=True)
