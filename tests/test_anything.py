"""Any input works or is refused by name: no traceback, no endless loop, no unbounded memory.

Hypothesis draws JSON-like values, and some that JSON cannot say, for sampling, budgets, prompts and records, strings
and bytes for everything that the command line takes. ``test_fuzz.py`` has values of other classes for every public
callable.
"""

import json
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import conftest
import draftwing as dw
from conftest import add_tokenizer
from draftwing.cli import main as cli
from draftwing.errors import DataError, DraftwingError, PromptError
from draftwing.text.prompts import as_list, check_prompt, read_prompts, read_record

# The same examples everywhere; each may load a model or compile a template once, so that no single one has a deadline.
settings.register_profile(
    "anything",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
settings.load_profile("anything")


def examples(count: int) -> settings:
    """This number of examples, and ten times as many in ``make test-all``."""
    return settings(max_examples=10 * count if conftest.runs_full else count)


INTS = st.integers(-3, 70) | st.integers() | st.sampled_from([2**31, 2**63, -(2**63), 10**400, -(10**400)])
FLOATS = st.floats() | st.sampled_from([1e-40, 1e39, 1e300, -0.0, 0.5, 1.0])
TEXTS = (
    st.text(max_size=8) | st.text(st.characters(), max_size=4) | st.sampled_from(["\ud83d", "0", "1e5", "nan", "\0"])
)
SCALARS = st.none() | st.booleans() | INTS | FLOATS | TEXTS
KEYS = TEXTS | INTS | st.booleans()
VALUES = st.recursive(
    SCALARS | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=8,
)
DEEP = ["[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000, "9" * 10_000, "[" + "9" * 10_000 + "]"]


@contextmanager
def works_or_is_refused() -> Iterator[None]:
    """The message of a refusal is short enough to read, and can be printed."""
    try:
        yield
    except DraftwingError as error:
        message = str(error)
        assert message
        assert len(message) < 1500, message
        message.encode("utf-8", "backslashreplace")


@pytest.fixture(scope="module", autouse=sys.platform == "linux")
def memory_is_bounded():
    """All of it stays within two more gigabytes of address space than there were, or fails with MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def folder(folder_of, tmp_path_factory):
    path = tmp_path_factory.mktemp("anything") / "target"
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    return add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=300, head_dim=32), path), chat_template=template)


@pytest.fixture(scope="module")
def lms(folder):
    """Plain, by lookup, and with a draft model, each in chains and in trees."""
    drafts = [("none", None), ("lookup", dw.Budget(4)), (folder, dw.Budget(2)), (folder, dw.Budget(2, 2, 3))]
    return [dw.load(folder, draft, budget=budget) for draft, budget in drafts]


# --- sampling --------------------------------------------------------------------------------------------------------

USUAL = {
    "temperature": st.sampled_from([0, 1e-10, 0.5, 1, 1e10]),
    "top_k": st.sampled_from([None, 1, 5, 2**31 - 1, 2**31, 2**63, 10**400]),
    "top_p": st.floats(0, 1, exclude_min=True),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(1e-10, 1e10),
    "presence_penalty": st.floats(-1e20, 1e20),
    "frequency_penalty": st.floats(-1e20, 1e20),
    "logit_bias": st.dictionaries(st.integers(0, 301), st.floats(-1e20, 1e20) | INTS, max_size=3),
    "banned_tokens": st.lists(st.integers(0, 301), max_size=3),
    "stop_tokens": st.lists(st.integers(0, 301), max_size=3),
    "stop": st.lists(st.text(max_size=2), max_size=2),
    "ignore_eos": st.booleans(),
    "max_tokens": st.integers(1, 4),
    "seed": st.integers(0, 2**63 - 1),
    "logprobs": st.none() | st.integers(0, 64),
    "min_tokens": st.integers(0, 1),
    "node_distributions": st.integers(0, 3),
}


def test_every_field_has_its_usual_values():
    assert set(USUAL) == {field.name for field in fields(dw.Sampling)}


@examples(60)
@given(st.sampled_from(sorted(USUAL)), VALUES)
def test_a_field_of_sampling(name, value):
    with works_or_is_refused():
        dw.Sampling(**{name: value}).check_vocabulary(300)


@examples(40)
@given(st.fixed_dictionaries({}, optional=USUAL), st.sampled_from([[5], [5, 6, 5, 6]]))
def test_whatever_plain_decoding_takes_drafting_takes(lms, options, prompt):
    """And the text is the same; whatever is refused is refused by all of them alike."""
    found = []
    for lm in lms:
        try:
            done = lm.generate([prompt, prompt], **{"max_tokens": 3, "seed": 3, **options})
            found.append([(each.token_ids, each.finish_reason) for each in done])
        except DraftwingError as error:
            found.append(str(error))
    assert found == found[:1] * len(lms)


# --- budgets ---------------------------------------------------------------------------------------------------------

PATHS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6)


@examples(60)
@given(st.dictionaries(st.sampled_from(["depth", "width", "nodes", "paths", "children"]), VALUES | PATHS, max_size=3))
def test_a_budget(options):
    with works_or_is_refused():
        budget = dw.Budget(**options)
        assert len(str(budget)) < 60
        assert budget.depth * budget.width <= 2**18


@examples(40)
@given(
    st.fixed_dictionaries(
        {},
        optional={"depth": st.integers(0, 40), "width": st.integers(1, 40), "nodes": st.none() | st.integers(1, 4096)},
    )
    | st.fixed_dictionaries({"paths": PATHS})
)
def test_a_budget_at_work(lms, options):
    """Any shape gives the text of baseline decoding."""
    wanted = lms[0].generate([[5, 6, 5]], max_tokens=4)[0].token_ids
    with works_or_is_refused():
        budget = dw.Budget(**options)
        for lm in (lms[1], lms[2]):
            lm = dw.LM(lm.target, lm.tokenizer, lm.new_drafter, "match", budget)
            assert lm.generate([[5, 6, 5]], max_tokens=4)[0].token_ids == wanted


# --- prompts ---------------------------------------------------------------------------------------------------------

MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content"]) | TEXTS, SCALARS | TEXTS, max_size=3), max_size=2
)
SHAPES = [(), (2,), (0,), (2, 2), (1, 1, 1)]
TENSORS = st.sampled_from([torch.full(shape, value) for shape in SHAPES for value in (5, 5.0, -1, True)])


@examples(60)
@given(VALUES | MESSAGES | TENSORS)
def test_a_prompt(lms, prompt):
    with works_or_is_refused():
        lms[0].generate(prompt, max_tokens=1)
    with works_or_is_refused():
        list(lms[0].stream(prompt, max_tokens=1))
    for each in as_list(prompt):
        with works_or_is_refused():
            assert check_prompt(check_prompt(each)) == check_prompt(each)


FORMS = [*("conversations", "messages", "turns", "prompt", "completion", "question", "answer")]
FORMS += ["instruction", "input", "output", "text"]
PARTS = TEXTS | VALUES | st.lists(TEXTS, max_size=3) | MESSAGES
RECORDS = st.dictionaries(st.sampled_from(FORMS), PARTS, max_size=3)


@examples(60)
@given(RECORDS | VALUES)
@example({"instruction": [], "input": "0"})
def test_a_record(record):
    for problem in (PromptError, DataError):
        with suppress(problem):
            found = read_record(record, "here", problem)
            assert (found.text is None) or not found.messages
            assert all(set(message) <= {"role", "content", "finish_reason"} for message in found.messages)


CONTENTS = (
    st.binary(max_size=30)
    | st.lists(RECORDS.map(lambda record: json.dumps(record, default=str)), max_size=3).map("\n".join).map(str.encode)
    | st.sampled_from([text.encode() for text in DEEP])
)


@examples(60)
@given(CONTENTS, st.sampled_from(["a.txt", "a.jsonl", "a.json"]))
def test_a_file_of_prompts(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    with works_or_is_refused():
        for prompt in read_prompts(tmp_path / name):
            assert check_prompt(prompt) == prompt


# --- the command line ------------------------------------------------------------------------------------------------
# Every example loads a model; the parsers behind it met more examples above.

WORDS = TEXTS | SCALARS.map(str)
TREES = st.sampled_from(["auto", "static", "chain:", "dynamic:", "chain:0", "chain:2000", "dynamic:1,2,3"]) | st.builds(
    lambda kind, numbers: kind + ",".join(map(str, numbers)),
    st.sampled_from(["chain:", "dynamic:", ""]),
    st.lists(st.integers() | st.integers(0, 9), max_size=4),
)
OPTIONS = {
    "--tree": TREES | WORDS,
    "--rule": st.sampled_from(["match", "block", "speculative", "typical"]) | WORDS,
    "--logit-bias": st.builds(lambda token, value: f"{token}:{value}", INTS.filter(lambda i: i < 10**9), FLOATS)
    | WORDS,
    "--dtype": st.sampled_from(["float64", "bfloat16"]) | WORDS,
    "--device": st.sampled_from(["cpu", "meta", "cuda:99999999999999"]) | WORDS,
    "--draft": WORDS,
    **dict.fromkeys(
        ["-T", "--top-p", "--min-p", "--presence-penalty", "--repetition-penalty"], FLOATS.map(str) | WORDS
    ),
    **dict.fromkeys(["--top-k", "--seed", "--logprobs", "--stop", "--engine", "--quantize"], WORDS),
}


def command(*args, stdin=b""):
    """The command line ends with a text or with one line that says why not."""
    done = CliRunner().invoke(cli.app, ["generate", *args], input=stdin)
    assert done.exception is None or isinstance(done.exception, SystemExit), (args, done.exception)
    assert done.exit_code in (0, 1, 2)
    if done.exit_code == 2:
        assert done.stdout == ""
        lines = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("error: ")


@examples(20)
@given(st.lists(st.sampled_from(sorted(OPTIONS)).flatmap(lambda n: st.tuples(st.just(n), OPTIONS[n])), max_size=2))
def test_options_of_the_command_line(folder, options):
    words = [f"{name}={value}" if name.startswith("--") else f"{name}{value}" for name, value in options]
    command("x x", "-t", str(folder), "-d", "lookup", "-n", "2", *words)


@examples(20)
@given(st.lists(WORDS, max_size=4))
def test_words_of_the_command_line(folder, words):
    command("-t", str(folder), "-d", "none", "-n", "1", *words)


@examples(12)
@given(CONTENTS, st.sampled_from(["stdin", "a.txt", "a.jsonl", "a.json"]))
def test_prompts_of_the_command_line(folder, tmp_path, content, source):
    stdin, more = (content, []) if source == "stdin" else (b"", ["--prompts", str(tmp_path / source)])
    if more:
        (tmp_path / source).write_bytes(content)
    command("-t", str(folder), "-d", "none", "-n", "1", *more, stdin=stdin)


@examples(14)
@given(
    VALUES.map(lambda value: json.dumps(value, default=str, skipkeys=True)[:5000])
    | st.sampled_from(DEEP)
    | TEXTS
    | PATHS.map(str)
)
def test_tree_files_of_the_command_line(folder, tmp_path, content):
    (tmp_path / "tree.json").write_text(content, encoding="utf-8", errors="surrogatepass")
    command("x x", "-t", str(folder), "-d", "lookup", "-n", "1", "--tree", str(tmp_path / "tree.json"))
