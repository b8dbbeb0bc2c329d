"""Grammars that would end the process or occupy it: the client gets a 400, and the server answers the next request."""

import gc
import sys
import threading

import psutil
import pytest

from conftest import refused
from draftwing.errors import ConfigError, UnsupportedError
from draftwing.text import grammar_compile
from draftwing.text.grammar import Grammar, Grammars
from serving import app_of, chat_folder, load, question, send

TOO_COMPLEX = "nested too deep or takes too long"


@pytest.fixture(scope="module")
def lm(folder_of, tmp_path_factory):
    pytest.importorskip("llguidance")
    return load(chat_folder(folder_of, tmp_path_factory))


def chained(num, link):
    """A schema of definitions, each of which refers to the next one as ``link`` makes it of a reference."""
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(num)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{num}": {"type": "integer"}}}


def in_object(reference):
    return {"type": "object", "properties": {"a": reference}, "required": ["a"]}


def rules(num, line):
    return "start: r0\n" + "\n".join(line.format(i, i + 1) for i in range(num)) + f'\nr{num}: "a"\n'


def terminals(num):
    return "start: R0\n" + "\n".join(f'R{i}: R{i + 1} "x"' for i in range(num)) + f'\nR{num}: "a"\n'


SCHEMAS = {
    "objects": chained(1000, in_object),
    "references": chained(5000, dict),
    "unions": chained(2500, lambda each: {"anyOf": [each, {"type": "null"}]}),
    "intersections": {"allOf": [{"anyOf": [{"minLength": i + j} for j in range(4)]} for i in range(12)]},
    "properties": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(6000)}},
    "itself": {"$ref": "#"},
    "circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "pattern": {"type": "string", "pattern": "(" * 3000 + "a" + ")" * 3000},
}  # fmt: skip
GRAMMARS = {
    "rules": rules(3000, "r{0}: r{1}"),
    "terminals": terminals(8000),
    "brackets": "start: " + "(" * 3000 + '"a"' + ")" * 3000,
    "intersections": "start: R\nR: " + " & ".join(f"/(.*[a-z]{{{i}}}.*)/" for i in range(1, 100)),
    "unknown": "start: <|nothing|> r0\n" + rules(3000, "r{0}: r{1}").split("\n", 1)[1],
}  # fmt: skip
HONEST = {
    "objects": chained(64, in_object),
    "unions": chained(64, lambda each: {"anyOf": [each, {"type": "null"}]}),
    "properties": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(300)}},
}


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(grammar_compile, "CPU_SECONDS", 0.3)


@pytest.mark.usefixtures("impatient")
def test_a_server_answers_after_each(lm):
    cities = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["Rome", "Oslo"]}}}

    async def work(http):
        async def chat(**fields):
            body = {"messages": question("x"), "max_tokens": 60, **fields}
            return await http.post("/v1/chat/completions", json=body)

        bodies = {}
        for name, schema in SCHEMAS.items():
            bodies[name] = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
        function = {"name": "f", "parameters": SCHEMAS["objects"]}
        tools = [{"type": "function", "function": function}]
        bodies["a tool"] = {"tools": tools, "tool_choice": "required"}
        bodies |= {f"grammar: {name}": {"grammar": grammar} for name, grammar in GRAMMARS.items()}
        for name, body in bodies.items():
            found = await chat(**body)
            assert found.status_code == 400, name
            assert "cannot be followed" in found.json()["error"]["message"], name
            answer = await chat(response_format=cities)
            assert answer.json()["choices"][0]["message"]["content"] in ('"Rome"', '"Oslo"'), name

    send(app_of(lm), work)


def test_large_honest_grammars_pass(lm):
    for schema in HONEST.values():
        assert lm.constraint(schema) is lm.constraint(Grammar.json_schema(schema))
    lm.constraint(Grammar.lark(rules(100, "r{0}: r{1}")))


@pytest.mark.usefixtures("impatient")
def test_the_time_is_that_of_one_grammar(lm):
    """Many grammars in a row, which take longer together than one may take, pass in one process."""
    make = lambda i: {"type": "object", "properties": {f"p{i}_{j}": {"type": "integer"} for j in range(150)}}  # noqa: E731
    for i in range(25):
        lm.constraint(make(i))


# A program that replies to grammars with "slow" in them once the file exists, and to others at once.
STUB = """
import os, sys, time
print('""', flush=True)
sys.stdin.readline()
for line in sys.stdin:
    print(file=open(os.environ["STARTED"], "w")) if "slow" in line else None
    while "slow" in line and not os.path.exists(os.environ["GO_ON"]):
        time.sleep(0.01)
    print('""', flush=True)
"""


def test_a_slow_grammar_does_not_block_others(lm, tmp_path, monkeypatch):
    go_on, started = tmp_path / "go-on", tmp_path / "started"
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setattr(grammar_compile, "__file__", str(tmp_path / "stub.py"))
    monkeypatch.setenv("GO_ON", str(go_on))
    monkeypatch.setenv("STARTED", str(started))
    grammars = Grammars(lm.tokenizer, lm.target.vocab_size, lm.target.eos_ids)
    slow = threading.Thread(target=lambda: grammars.constraint(Grammar.regex("slow")))
    slow.start()
    while not started.exists():
        pass
    for pattern in ("a", "b", "a"):
        grammars.constraint(Grammar.regex(pattern))
    assert slow.is_alive()
    go_on.touch()
    slow.join()


def trials():
    processes = psutil.Process().children()
    return [each for each in processes if any("grammar_compile" in word for word in each.cmdline())]


def test_processes_that_end_are_replaced_and_none_is_left(lm):
    before = {each.pid for each in trials()}
    grammars = Grammars(lm.tokenizer, lm.target.vocab_size, lm.target.eos_ids)
    grammars.constraint(Grammar.regex("a"))
    (first,) = [each for each in trials() if each.pid not in before]
    grammars.constraint(Grammar.regex("b"))
    first.terminate()  # a service manager signals all processes; the trial must continue
    grammars.constraint(Grammar.regex("c"))
    assert [each.pid for each in trials() if each.pid not in before] == [first.pid]
    first.kill()
    psutil.wait_procs([first])
    grammars.constraint(Grammar.regex("d"))
    (second,) = [each for each in trials() if each.pid not in before]
    with refused(ConfigError, TOO_COMPLEX):
        grammars.constraint(Grammar.lark(GRAMMARS["rules"]))
    assert second.pid not in {each.pid for each in trials()}
    grammars.constraint(Grammar.regex("e"))
    del grammars
    gc.collect()
    assert {each.pid for each in trials()} <= before


def test_a_process_that_does_not_start_is_named(lm, monkeypatch):
    for executable in ("/nothing/python", "/bin/false", ""):
        monkeypatch.setattr(sys, "executable", executable)
        grammars = Grammars(lm.tokenizer, lm.target.vocab_size, lm.target.eos_ids)
        with refused(UnsupportedError, "does not start"):
            grammars.constraint(Grammar.regex("a"))


def test_half_characters_are_refused(lm):
    with refused(ConfigError, "cannot be followed"):
        lm.constraint(Grammar.regex("\ud800"))
    lm.constraint({"const": "\ud83d\ude00"})
