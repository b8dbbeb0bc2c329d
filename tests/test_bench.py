"""The benchmark protocol: question sets, prompts of later turns, records that survive a kill, and correct figures."""

import copy
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import draftwing as dw
from conftest import CHAT_TEMPLATE, add_tokenizer, refused
from draftwing.cli.main import app
from draftwing.errors import CheckpointError, ConfigError, PromptError
from draftwing.lab import bench, bench_results
from draftwing.lab.bench import FILE, Journal, QuestionSet, find_files, open_journal, read_journal, read_set
from draftwing.lab.bench_results import (
    Estimate,
    ResultSample,
    alpha_of,
    estimate,
    gather,
    mean_estimate,
    resamples,
    to_dict,
)
from draftwing.lm import LM
from draftwing.loading import load_drafter

QUESTIONS = [
    {"question_id": 7, "category": "math", "turns": ["def add(a, b):", "and now sub?"]},
    {"question_id": 8, "category": "code", "turns": ["class Table:"]},
    {"question_id": 9, "category": "math", "turns": ["for row in rows:"]},
]


def write(file, entries):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


@pytest.fixture(scope="module")
def chat(folder_of, tmp_path_factory):
    """A tiny model with a chat template and sampling settings."""
    folder = shutil.copytree(folder_of("llama", vocab_size=300, head_dim=32), tmp_path_factory.mktemp("bench") / "chat")
    add_tokenizer(folder, chat_template=CHAT_TEMPLATE)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 0}')
    return folder


@pytest.fixture(scope="module")
def plain(chat):
    return dw.load(chat, "none")


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return write(tmp_path_factory.mktemp("sets") / "tiny.jsonl", QUESTIONS)


def method(plain, budget=3, kind=LM):
    maker = load_drafter("lookup", plain.target, plain.tokenizer)
    return bench.Method("lookup", kind(plain.target, plain.tokenizer, maker, budget=dw.Budget(budget)))


def plan(plain, questions, *methods, tokens=8, temperatures=(0.0,), limit=None):
    samplings = [dw.Sampling(temperature=value, max_tokens=tokens, seed=3) for value in temperatures]
    return bench.Plan(plain, methods or [method(plain)], [read_set("tiny", questions)], samplings, limit)


def measure(folder, plan):
    with open_journal(folder) as journal:
        journal.begin(bench.describe_settings(plan.plain, plan.samplings[0]))
        bench.run(plan, journal)
    return read_journal(folder)


def with_attributes(journal, **attributes):
    other = copy.copy(journal)
    vars(other).update(attributes)
    return other


def records(folder):
    """The records without measured times."""

    def timeless(value):
        if isinstance(value, dict):
            return {name: timeless(item) for name, item in value.items() if name not in ("seconds", "wall")}
        return value

    return [timeless(json.loads(line)) for line in (folder / FILE).read_text().splitlines()]


# --- sets ------------------------------------------------------------------------------------------------------------


def test_every_form_of_a_question(tmp_path):
    dialogue = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "an answer that the model must not see"},
        {"role": "user", "content": "And?"},
    ]
    entries = [
        {"question_id": 5, "category": "qa", "turns": ["one", "two"], "reference": ["x"]},
        {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "    pass", "test": "assert"},
        {"question": "How many?", "answer": "4"},
        {"instruction": "Sort", "input": "3 1 2", "output": "1 2 3"},
        {"article": "News.", "highlights": "N.", "id": "ab"},
        {"messages": dialogue},
    ]
    questions = read_set("mixed", write(tmp_path / "mixed.jsonl", entries)).questions
    assert [(question.id, question.turns) for question in questions] == [
        ("5", ("one", "two")), ("HumanEval/0", ("def f():",)), ("3", ("How many?",)), ("4", ("Sort\n\n3 1 2",)),
        ("ab", ("Summarize: News.",)), ("6", ("Hi", "And?")),
    ]  # fmt: skip
    assert questions[0].categories == ("qa",)
    dialogue[2]["content"] = "Hello."
    assert questions[5].messages(["Hello."]) == dialogue


def test_a_few_questions_are_spread_over_categories(tmp_path):
    mt_bench = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
    every = [name for name in mt_bench for _ in range(10)] + ["summarization"] * 80 + ["qa"] * 80
    file = write(tmp_path / "spec.jsonl", [{"category": name, "turns": [str(n)]} for n, name in enumerate(every)])
    spec = read_set("spec", file)
    assert spec.questions[10].categories == ("roleplay", "mt_bench")
    assert spec.questions[80].categories == ("summarization",)
    assert [question.number for question in spec.chosen(7)] == [0, 80, 160, 10, 81, 161, 20]
    assert spec.chosen(7) == spec.chosen(40)[:7]
    assert sorted(question.number for question in spec.chosen(None)) == list(range(240))
    alone = read_set("mt", write(tmp_path / "mt.jsonl", [{"category": name, "turns": ["?"]} for name in mt_bench]))
    assert alone.questions[0].categories == ("writing",)


def test_files_and_their_names(tmp_path):
    for name in ("gsm8k", "mt_bench"):
        write(tmp_path / "data" / name / "question.jsonl", QUESTIONS)
        write(tmp_path / "data" / name / "model_answer" / "other.jsonl", QUESTIONS)
    one = write(tmp_path / "one.jsonl", QUESTIONS)
    (tmp_path / "empty").mkdir()
    assert list(find_files([str(tmp_path / "data"), str(one), f"two={one}"])) == ["gsm8k", "mt_bench", "one", "two"]
    assert list(find_files([str(tmp_path / "data" / "gsm8k")])) == ["gsm8k"]
    for arguments, kind, *parts in (
        ([str(one), str(one)], ConfigError, "would be called 'one'", "such as other="),
        ([f"all={tmp_path / 'data'}"], ConfigError, "2 question files in this folder"),
        ([f"={one}"], ConfigError, "must be NAME=FILE"),
        ([str(tmp_path / "none.jsonl")], CheckpointError, "no such file"),
        ([str(tmp_path / "empty")], CheckpointError, "no .jsonl file in this folder"),
        ([], ConfigError, "bench needs questions"),
    ):
        with refused(kind, *parts):
            find_files(arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "there is no prompt in it"),
        ('{"turns": []}', "line 1: there is no question in it"),
        ('{"turns": ["a", " "]}', "line 1: there is no question in it, or an empty one"),
        ('{"turns": ["a"]}\n{"answer": "b"}', "line 2: expected one of the keys"),
        ('{"turns": ["a"]}\nnonsense', "line 2: not JSON"),
    ],
)
def test_files_without_questions(tmp_path, content, message):
    (tmp_path / "bad.jsonl").write_text(content)
    with refused(PromptError, message):
        read_set("bad", tmp_path / "bad.jsonl")


# --- statistics ------------------------------------------------------------------------------------------------------


def counts(tokens, forwards, seconds, wall, reached=(), taken=()):
    values = {"tokens": tokens, "forwards": forwards, "seconds": seconds, "wall": wall}
    return {**values, "reached": list(reached), "taken": list(taken)}


ANSWERS = [  # question, with drafts, baseline; the first question has two turns
    ("a", counts(10, 5, 1.0, 2.0, (5, 4), (4, 1)), counts(10, 10, 2.0, 3.0)),
    ("a", counts(20, 5, 3.0, 4.0, (5, 5, 5), (5, 5, 5)), counts(20, 20, 4.0, 5.0)),
    ("b", counts(12, 6, 1.0, 1.5, (6,), (3,)), counts(12, 12, 1.0, 1.5)),
]


def test_figures_by_hand():
    # Question a: 30 tokens in 4 s against 6 s, question b: 12 in 1 s against 1 s.
    assert {name: figure.value for name, figure in estimate(ResultSample.of(ANSWERS), "seed").items()} == {
        "tau": pytest.approx(42 / 16),
        "speedup": pytest.approx((6 / 4 + 1) / 2),
        "speedup_ratio_of_means": pytest.approx((30 / 4 + 12) / (30 / 6 + 12)),
        "speedup_with_prompt": pytest.approx((30 / 6 + 12 / 1.5) / (30 / 8 + 12 / 1.5)),
    }
    one = estimate(ResultSample.of(ANSWERS[:2]), "seed")["tau"]  # one question has no interval
    assert (one.to_dict(), one.text()) == ({"value": 3.0, "low": None, "high": None}, "3.00")
    other = Estimate.of(2.0, np.array([1.0, 3.0]))
    assert other.text("x") == "2.00x [1.05-2.95]"
    assert mean_estimate([one, other]).to_dict() == {"value": 2.5, "low": None, "high": None}
    alpha, reached = alpha_of([answer for _, answer, _ in ANSWERS])
    assert alpha == pytest.approx([12 / 16, 6 / 9, 1.0])
    assert reached == [16, 9, 5]


def test_intervals_equal_brute_force():
    generator = np.random.default_rng(5)
    tokens, forwards = generator.integers(20, 90, 9), generator.integers(5, 20, 9)
    seconds, base = generator.uniform(1, 3, (2, 9))
    answers = [
        (n, counts(int(tokens[n]), int(forwards[n]), seconds[n], 1), counts(int(tokens[n]), int(tokens[n]), base[n], 1))
        for n in range(9)
    ]
    found = estimate(ResultSample.of(answers), "seed")
    indices = resamples(9, "seed")
    assert indices.shape == (2000, 9)
    taus = [tokens[drawn].sum() / forwards[drawn].sum() for drawn in indices]
    speedups = [(base / seconds)[drawn].mean() for drawn in indices]
    for name, values in (("tau", taus), ("speedup", speedups)):
        assert (found[name].low, found[name].high) == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])))
    again, other = estimate(ResultSample.of(answers), "seed"), estimate(ResultSample.of(answers), "another")
    assert again["tau"].to_dict() == found["tau"].to_dict() != other["tau"].to_dict()


def test_intervals_cover_the_true_value(monkeypatch):
    monkeypatch.setattr(bench_results, "NUM_RESAMPLES", 300)
    generator, covered = np.random.default_rng(1), 0
    for trial in range(200):
        seconds = np.exp(generator.normal(0, 0.3, 60))  # with drafts; the baseline takes 2 s
        ones = np.ones(60)
        sample = ResultSample(ones, ones, 1 / seconds, ones, ones, ones * 2, ones)
        found = estimate(sample, str(trial))["speedup"]
        covered += found.low <= 2 * np.exp(0.3**2 / 2) <= found.high
    assert 0.90 <= covered / 200 <= 0.98


# --- the protocol ----------------------------------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch):
    """(drafter, prompt) of every call of ``LM.generate``."""
    calls, real = [], LM.generate

    def generate(lm, prompts, *args, **options):
        calls.append((lm.drafter_name, prompts[0]))
        return real(lm, prompts, *args, **options)

    monkeypatch.setattr(LM, "generate", generate)
    return calls


def test_a_later_turn_follows_the_baselines_answer_and_methods_take_turns(plain, questions, tmp_path, decoded):
    journal = measure(tmp_path, plan(plain, questions))
    order = [name for name, _ in decoded[2:]]  # without the warm-up
    assert order[::2] == ["lookup", "none", "none", "lookup"]
    assert sorted(order) == ["lookup"] * 4 + ["none"] * 4
    first, second = (journal.answers["tiny", 0, turn, "T=0"][0] for turn in (1, 2))
    answer = first["plain"]["text"]
    assert answer
    prompt = f"<user>def add(a, b):<assistant>{answer}<user>and now sub?<bot>"
    expected = plain.tokenizer.fast.encode(prompt, add_special_tokens=False).ids
    assert [prompt for _, prompt in decoded].count(expected) == 2
    assert second["prompt_tokens"] == len(expected)
    assert [first["methods"][key]["identical"] for key in journal.methods] == [True]
    assert second["plain"]["text"] == plain.generate([expected], max_tokens=8)[0].text


class Wrong(LM):
    """A decoder that gets one token of one text wrong."""

    def generate(self, prompts, *args, **options):
        found = super().generate(prompts, *args, **options)
        if self.drafter.drafts and len(found[0].token_ids) == 8 and "sub" in self.tokenizer.decode(prompts[0]):
            found[0].token_ids[5] += 1
            found[0].text += "<wrong>"
        return found


def test_a_different_answer_is_counted_and_shown(plain, questions, tmp_path):
    wrong = plan(plain, questions, method(plain, 2, Wrong), method(plain, 3), temperatures=(0.0, 1.0))
    (group,) = gather([measure(tmp_path, wrong)])
    identical = {(row.sampling, row.method["budget"]): row.num_identical for row in group.wholes}
    assert identical == {("T=0", "chain:2"): 3, ("T=0", "chain:3"): 4, ("T=1", "chain:2"): 3, ("T=1", "chain:3"): 4}
    assert not group.keeps_promises
    assert [(each["turn"], each["differs_at"], each["budget"]) for each in group.differences] == [(2, 5, "chain:2")] * 2
    values = to_dict([group])["groups"][0]
    wholes = [row for row in values["rows"] if row["category"] is None and row["turn"] is None]
    assert values["all_identical"] is False
    assert [row["identical"] for row in wholes] == [0.75, 1.0, 0.75, 1.0]
    assert all(each["text"].endswith("<wrong>") for each in values["differences"])


def test_an_interrupted_run_resumes_to_the_same_records(plain, questions, tmp_path, monkeypatch):
    whole = plan(plain, questions, method(plain, 2), method(plain, 3), temperatures=(0.0, 1.0))
    measure(tmp_path / "whole", whole)
    real, left = Journal.add, [7]

    def add(self, record):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        real(self, record)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "add", add)
        with pytest.raises(KeyboardInterrupt):
            measure(tmp_path / "killed", whole)
    with (tmp_path / "killed" / FILE).open("a") as file:
        file.write('{"kind": "answer", "set": "ti')  # the start of a line, like after a power cut
    assert len(read_journal(tmp_path / "killed").answers) == 3
    measure(tmp_path / "killed", whole)
    assert records(tmp_path / "killed") == records(tmp_path / "whole")
    before = (tmp_path / "killed" / FILE).read_bytes()
    measure(tmp_path / "killed", whole)  # nothing is missing
    assert (tmp_path / "killed" / FILE).read_bytes() == before


def test_a_later_method_is_measured_alone(plain, questions, tmp_path):
    measure(tmp_path, plan(plain, questions, method(plain, 2), limit=1))
    journal = measure(tmp_path, plan(plain, questions, method(plain, 2), method(plain, 3), limit=1))
    two, three = journal.methods
    assert [list(record["methods"]) for record in journal.answers["tiny", 0, 2, "T=0"]] == [[two], [three]]
    (group,) = gather([journal])
    rows = [(row.method["budget"], row.num_identical, row.num_answers) for row in group.wholes]
    assert rows == [("chain:2", 2, 2), ("chain:3", 2, 2)]


def test_a_prompt_that_exceeds_the_context_is_skipped(plain, tmp_path):
    long = {"question_id": "long", "turns": ["x " * 300, "more"]}
    file = write(tmp_path / "tiny.jsonl", [QUESTIONS[1], long])
    (group,) = gather([measure(tmp_path / "out", plan(plain, file))])
    assert [row.num_questions for row in group.wholes] == [1]
    assert [(turn["id"], turn["turn"], turn["context"]) for turn in group.skipped] == [
        ("long", 1, 256),
        ("long", 2, 256),
    ]
    before = records(tmp_path / "out")
    measure(tmp_path / "out", plan(plain, file))
    assert records(tmp_path / "out") == before
    journal = measure(tmp_path / "whole", plan(plain, file, tokens=250))  # room for the prompt, but not the answer
    assert [turn["id"] for turn in journal.skipped.values()] == ["8", "long", "long"]
    assert not journal.answers


def test_different_settings_are_never_mixed(plain, questions, tmp_path):
    one = measure(tmp_path / "one", plan(plain, questions, limit=1))
    with refused(ConfigError, "holds results with tokens 8, and this run has 9", "another --out"):
        measure(tmp_path / "one", plan(plain, questions, tokens=9))
    changed = write(tmp_path / "tiny.jsonl", QUESTIONS[:2])
    with refused(ConfigError, "other questions called 'tiny'"):
        measure(tmp_path / "one", plan(plain, changed))
    two = measure(tmp_path / "two", plan(plain, questions, method(plain, 2), limit=1))
    three = measure(tmp_path / "three", plan(plain, questions, tokens=9, limit=1))
    four = measure(tmp_path / "four", plan(plain, changed, limit=1))
    groups = gather([one, two, three, four])
    assert [len(group.folders) for group in groups] == [2, 1, 1]
    assert [row.method["budget"] for row in groups[0].wholes] == ["chain:3", "chain:2"]
    machine = {**one.settings["machine"], "cpu": "another"}
    for change, num_groups in (({"machine": machine}, 2), ({"target": "the same by another name"}, 1)):
        assert len(gather([one, with_attributes(one, settings={**one.settings, **change})])) == num_groups
    for change, message in (
        ({"machine": machine}, "with cpu 'another'"),
        ({"target": "x", "target_identity": "0"}, "with target 'x'"),
        ({"target_identity": "0"}, "with target identity '0'"),
    ):
        with refused(ConfigError, message):
            with_attributes(one, settings={**one.settings, **change}).begin(one.settings)


def test_two_heads_with_one_name_are_distinguished(plain, questions, tmp_path):
    journal = measure(tmp_path, plan(plain, questions, limit=1))
    (recorded,) = journal.methods.values()
    other = with_attributes(journal, methods={"k": {**recorded, "key": "k", "identity": "f00dfeed"}}, answers={})
    for unit, (record,) in journal.answers.items():
        (counts,) = record["methods"].values()
        other.answers[unit] = [{**record, "methods": {"k": counts}}]
    (group,) = gather([journal, other])
    names = {row.method["draft"] for row in group.wholes}
    assert names == {f"lookup ({recorded['identity'][:6]})", "lookup (f00dfe)"}


def test_parts_of_a_set_and_the_mean_of_sets(plain, questions, tmp_path):
    other = QuestionSet("other", "other.jsonl", read_set("other", questions).questions[1:2])
    journal = measure(tmp_path, replace(plan(plain, questions), sets=[read_set("tiny", questions), other]))
    (group,) = gather([journal])
    one, two, mean = group.wholes
    assert mean.set == "mean of sets"
    assert mean.figures["tau"].value == pytest.approx((one.figures["tau"].value + two.figures["tau"].value) / 2)
    assert (mean.num_answers, one.num_answers, two.num_answers) == (5, 4, 1)
    assert {row.part: (row.num_questions, row.num_answers) for row in group.rows if row.set == "tiny"} == {
        "": (3, 4), "turn 1": (3, 3), "turn 2": (1, 1), "math": (2, 3), "math, turn 1": (2, 2),
        "math, turn 2": (1, 1), "code": (1, 1), "code, turn 1": (1, 1),
    }  # fmt: skip
    assert [row.part for row in group.parts] == ["turn 1", "turn 2", "math", "code"]


def test_each_question_has_its_own_noise(plain, tmp_path):
    same = write(tmp_path / "tiny.jsonl", [{"turns": ["def add(a, b):"]}, {"turns": ["def add(a, b):"]}])
    journal = measure(tmp_path / "out", plan(plain, same, temperatures=(1.0,)))
    texts = [journal.text(bench.Unit("tiny", number, 1, "T=1")) for number in (0, 1)]
    assert texts[0] != texts[1]


# --- sampling and settings -------------------------------------------------------------------------------------------


def test_samplings(chat, tmp_path):
    names = [bench.name_of_sampling(bench.parse_sampling(text, chat)) for text in ("0", "1", "0.2,top_p=0.9")]
    assert names == ["T=0", "T=1", "T=0.2 top_p=0.9"]
    assert bench.parse_sampling("model", chat) == dw.Sampling(temperature=0.6, top_p=0.9)
    for text, folder, kind, *parts in (
        ("hot", chat, ConfigError, "--temperature must be a number", "found 'hot'"),
        ("1,topp=3", chat, ConfigError, "--temperature must be a number"),
        ("model", tmp_path, ConfigError, "no sampling settings"),
    ):
        with refused(kind, *parts):
            bench.parse_sampling(text, folder)


def test_other_weights_are_another_target(chat, tmp_path):
    file = shutil.copytree(chat, tmp_path / "other") / "model.safetensors"
    same = bench.weights_digest(file.parent)
    assert same == bench.weights_digest(chat)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert bench.weights_digest(file.parent) != same


def test_invalid_plans(plain, questions):
    with refused(ConfigError, "requested twice"):
        plan(plain, questions, method(plain), method(plain)).check()
    with refused(ConfigError, "at least one draft"):
        replace(plan(plain, questions), methods=[]).check()
    with refused(ConfigError, "baseline without drafts"):
        replace(plan(plain, questions), plain=method(plain).lm).check()


def test_malformed_records(tmp_path):
    settings = '{"kind": "settings", "target": "t"}\n'
    for content, *parts in (
        (settings + '{"kind": "other"}\n', "line 2: not a record of draftwing bench", "unknown kind 'other'"),
        (settings + "nothing\n", "line 2: not a record of draftwing bench", "delete the line"),
        ('{"kind": "set", "name": "x"}\n', "line 1", "the settings must be first"),
        ("", "no results of draftwing bench in this folder"),
    ):
        (tmp_path / FILE).write_text(content)
        with refused(CheckpointError, *parts):
            read_journal(tmp_path)


# --- the command -----------------------------------------------------------------------------------------------------


def run(*args):
    return CliRunner().invoke(app, ["bench", *map(str, args)])


def test_the_command_from_end_to_end(questions, tmp_path):
    """On the shipped pair, whose EAGLE-3 head reads features."""
    other = write(tmp_path / "code.jsonl", [{"prompt": "def quicksort(items):\n"}])
    out = tmp_path / "out"
    args = ["-d", "eagle3", "-d", "lookup", "--tree", "chain:3", "-n", 6, "--num-prompts", 1, "-o", out]
    result = run("--set", questions, other, *args, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (group,) = found["groups"]
    rows = {(row["set"], row["sampling"], row["draft"]): row for row in group["rows"]}
    assert rows.keys() == {
        (name, sampling, draft)
        for name in ("tiny", "code", "mean of sets")
        for sampling in ("T=0", "T=1")
        for draft in ("eagle3", "lookup")
    }
    assert all(row["identical"] == 1 for row in rows.values())
    row = rows["code", "T=0", "eagle3"]
    assert row["n_alpha"] == row["alpha"] != []
    assert row["efficiency"] == pytest.approx(row["speedup"]["value"] / row["tau"]["value"])
    assert row["speedup"]["low"] is None  # one question
    assert all(row["n_alpha"] is None for row in rows.values() if row["draft"] == "lookup")
    assert json.loads((out / "results.json").read_text())["groups"] == found["groups"]
    report = run("--report", out, "--out", tmp_path / "again")
    assert report.exit_code == 0, report.output
    assert "toy, float32, 6 tokens, batch 1" in report.stdout
    assert (tmp_path / "again" / "results.json").exists()
    other_settings = run("--set", questions, *args, "-n", 7)
    assert other_settings.exit_code == 2
    assert "holds results with tokens 6, and this run has 7" in other_settings.stderr


def test_ctrl_c_keeps_and_shows_finished_answers(chat, questions, tmp_path, monkeypatch):
    real = Journal.add

    def add(self, record):
        real(self, record)
        if len(self.answers) == 2:
            raise KeyboardInterrupt

    args = ["-t", chat, "-d", "lookup", "--tree", "chain:2", "-n", 4, "--set", questions, "-o", tmp_path]
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "add", add)
        result = run(*args)
    assert result.exit_code == 130
    assert "the same command continues" in result.stderr
    assert "2 of 2" in result.stdout
    assert (tmp_path / "results.json").exists()
    result = run(*args)
    assert result.exit_code == 0, result.output
    assert "4 of 4" in result.stdout


def test_a_wrong_text_exits_with_1(chat, questions, tmp_path, monkeypatch):
    monkeypatch.setattr("draftwing.lm.LM", Wrong)
    result = run("-t", chat, "-d", "lookup", "-n", 8, "-T", "0", "--tree", "chain:2", questions, "-o", tmp_path)
    assert result.exit_code == 1, result.output
    assert "3 of 4" in result.stdout
    assert "NOT " in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give --out"),
        (["--out", "OUT"], "give --set FILE"),
        (["--out", "OUT", "--set", "missing.jsonl"], "no such file"),
        (["--out", "OUT", "--set", "SET", "--tree", "bush"], "--tree must be auto"),
        (["--out", "OUT", "--set", "SET", "--rule", "typical"], "add --lossy"),
        (["--out", "OUT", "--set", "SET", "-t", "CHAT", "-d", "missing"], "missing"),
        (["--out", "OUT", "--set", "SET", "-t", "CHAT", "-d", "none"], "give a --draft besides none"),
        (["--out", "OUT", "--set", "SET", "-t", "CHAT", "-T", "warm"], "--temperature must be a number"),
        (["--report", "OUT"], "no results of draftwing bench"),
    ],
)
def test_refusals(chat, questions, tmp_path, args, message):
    paths = {"OUT": tmp_path / "out", "SET": questions, "CHAT": chat}
    result = run(*(paths.get(arg, arg) for arg in args))
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert not (tmp_path / "out" / FILE).exists()
