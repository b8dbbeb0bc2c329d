"""The field's protocol: sets, prompts of later turns, records that a kill cannot spoil, and honest figures."""

import json
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

import draftwing as dw
from conftest import add_tokenizer, refused
from draftwing.cli.main import app
from draftwing.errors import CheckpointError, ConfigError, PromptError, UnsupportedError
from draftwing.lab import bench as protocol
from draftwing.lab import bench as settings
from draftwing.lab import bench_results as statistics
from draftwing.lab.bench import FILE, Journal, open_journal, read_journal
from draftwing.lab.bench_page import render
from draftwing.lab.bench_results import Estimate, Sample, alpha_of, estimate, gather, mean_estimate, resamples, to_dict
from draftwing.lab.bench_sets import QuestionSet, find_files, read_set
from draftwing.lm import LM
from draftwing.loading import load_drafter

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
QUESTIONS = [
    {"question_id": 7, "category": "math", "turns": ["def add(a, b):", "and now sub?"]},
    {"question_id": 8, "category": "code", "turns": ["class Table:"]},
    {"question_id": 9, "category": "math", "turns": ["for row in rows:"]},
]


def write(file, entries):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(each) + "\n" for each in entries))
    return file


@pytest.fixture(scope="module")
def chat(folder_of, tmp_path_factory):
    """A tiny model with a chat template, and sampling settings of its own."""
    folder = shutil.copytree(folder_of("llama", vocab_size=300), tmp_path_factory.mktemp("bench") / "chat")
    add_tokenizer(folder, chat_template=TEMPLATE)
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
    return settings.Method("lookup", kind(plain.target, plain.tokenizer, maker, budget=dw.Budget(budget)))


def plan(plain, questions, *methods, tokens=8, heats=(0.0,), limit=None):
    samplings = [dw.Sampling(temperature=heat, max_tokens=tokens, seed=3) for heat in heats]
    return protocol.Plan(plain, methods or [method(plain)], [read_set("tiny", questions)], samplings, limit)


def measure(folder, planned):
    with open_journal(folder) as journal:
        journal.begin(settings.describe_settings(planned.plain, planned.samplings[0]))
        protocol.run(planned, journal)
    return read_journal(folder)


def timeless(value):
    """A record without what a clock says."""
    if isinstance(value, dict):
        return {name: timeless(each) for name, each in value.items() if name not in ("seconds", "wall")}
    return value


def records(folder):
    return [timeless(json.loads(line)) for line in (folder / FILE).read_text().splitlines()]


# --- sets ------------------------------------------------------------------------------------------------------------


def test_every_form_of_a_question(tmp_path):
    file = write(
        tmp_path / "mixed.jsonl",
        [
            {"question_id": 5, "category": "qa", "turns": ["one", "two"], "reference": ["x"]},
            {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "    pass", "test": "assert"},
            {"question": "How many?", "answer": "4"},
            {"instruction": "Sort", "input": "3 1 2", "output": "1 2 3"},
            {"article": "News.", "highlights": "N.", "id": "ab"},
            {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "an answer that the model must not see"},
                    {"role": "user", "content": "And?"},
                ]
            },
        ],
    )
    found = read_set("mixed", file).questions
    assert [each.turns for each in found] == [
        ("one", "two"),
        ("def f():",),
        ("How many?",),
        ("Sort\n\n3 1 2",),
        ("Summarize: News.",),
        ("Hi", "And?"),
    ]
    assert [each.id for each in found] == ["5", "HumanEval/0", "3", "4", "ab", "6"]
    assert found[0].categories == ("qa",)
    assert [each.is_bare for each in found] == [False, True, False, False, False, False]
    assert found[5].messages(["Hello."]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "And?"},
    ]


def test_a_few_questions_are_spread_over_categories(tmp_path):
    mt_bench = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
    every = [name for name in mt_bench for _ in range(10)] + ["summarization"] * 80 + ["qa"] * 80
    file = write(tmp_path / "spec.jsonl", [{"category": name, "turns": [str(n)]} for n, name in enumerate(every)])
    spec = read_set("spec", file)
    assert spec.questions[10].categories == ("roleplay", "mt_bench")
    assert spec.questions[80].categories == ("summarization",)
    assert [each.number for each in spec.chosen(7)] == [0, 80, 160, 10, 81, 161, 20]
    assert spec.chosen(7) == spec.chosen(40)[:7]
    assert sorted(each.number for each in spec.chosen(None)) == list(range(240))
    alone = read_set("mt", write(tmp_path / "mt.jsonl", [{"category": name, "turns": ["?"]} for name in mt_bench]))
    assert alone.questions[0].categories == ("writing",)


def test_files_and_their_names(tmp_path):
    for name in ("gsm8k", "mt_bench"):
        write(tmp_path / "data" / name / "question.jsonl", QUESTIONS)
        write(tmp_path / "data" / name / "model_answer" / "other.jsonl", QUESTIONS)
    one = write(tmp_path / "one.jsonl", QUESTIONS)
    assert list(find_files([str(tmp_path / "data"), str(one), f"two={one}"])) == ["gsm8k", "mt_bench", "one", "two"]
    assert list(find_files([str(tmp_path / "data" / "gsm8k")])) == ["gsm8k"]
    with refused(ConfigError, "would be called 'one'", "such as other="):
        find_files([str(one), str(one)])
    with refused(ConfigError, "2 question files in this folder"):
        find_files([f"all={tmp_path / 'data'}"])
    with refused(CheckpointError, "no such file"):
        find_files([str(tmp_path / "none.jsonl")])
    (tmp_path / "empty").mkdir()
    with refused(CheckpointError, "no .jsonl file in this folder"):
        find_files([str(tmp_path / "empty")])
    with refused(ConfigError, "bench needs questions"):
        find_files([])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "there is no prompt in it"),
        ('{"turns": []}', "line 1: there is no question in it"),
        ('{"turns": ["a", " "]}', "line 1: there is no question in it, or an empty one"),
        ('{"turns": ["a"]}\n{"answer": "b"}', "line 2: expected one of the keys"),
        ('{"turns": ["a"]}\nnonsense', "line 2: not JSON"),
    ],
)
def test_files_that_ask_nothing(tmp_path, line, said):
    (tmp_path / "bad.jsonl").write_text(line)
    with refused(PromptError, said):
        read_set("bad", tmp_path / "bad.jsonl")


# --- statistics ------------------------------------------------------------------------------------------------------


def measured(tokens, forwards, seconds, wall, reached=(), taken=()):
    return {
        "tokens": tokens,
        "forwards": forwards,
        "seconds": seconds,
        "wall": wall,
        "reached": list(reached),
        "taken": list(taken),
    }


ANSWERS = [  # question, with a draft, plainly; the first question has two turns
    ("a", measured(10, 5, 1.0, 2.0, (5, 4), (4, 1)), measured(10, 10, 2.0, 3.0)),
    ("a", measured(20, 5, 3.0, 4.0, (5, 5, 5), (5, 5, 5)), measured(20, 20, 4.0, 5.0)),
    ("b", measured(12, 6, 1.0, 1.5, (6,), (3,)), measured(12, 12, 1.0, 1.5)),
]


def test_figures_by_hand():
    found = estimate(Sample.of(ANSWERS), "seed")
    assert found["tau"].value == pytest.approx(42 / 16)
    # Question a: 30 tokens in 4 s against 6 s, question b: 12 in 1 s against 1 s.
    assert found["speedup"].value == pytest.approx((6 / 4 + 1) / 2)
    assert found["speedup_ratio_of_means"].value == pytest.approx((30 / 4 + 12) / (30 / 6 + 12))
    assert found["speedup_with_prompt"].value == pytest.approx((30 / 6 + 12 / 1.5) / (30 / 8 + 12 / 1.5))
    alpha, reached = alpha_of([own for _, own, _ in ANSWERS])
    assert alpha == pytest.approx([12 / 16, 6 / 9, 1.0])
    assert reached == [16, 9, 5]


def test_the_interval_is_the_resampled_figure_by_brute_force():
    generator = np.random.default_rng(5)
    answers = [
        (n, measured(int(t), int(f), s, s + 1), measured(int(t), int(t), p, p + 1))
        for n, (t, f, s, p) in enumerate(
            zip(
                generator.integers(20, 90, 9),
                generator.integers(5, 20, 9),
                generator.uniform(1, 3, 9),
                generator.uniform(1, 3, 9),
                strict=True,
            )
        )
    ]
    found = estimate(Sample.of(answers), "seed")
    places = resamples(9, "seed")
    assert places.shape == (2000, 9)
    taus, speedups = [], []
    for drawn in places:
        picked = [answers[place] for place in drawn]
        taus.append(sum(own["tokens"] for _, own, _ in picked) / sum(own["forwards"] for _, own, _ in picked))
        speedups.append(sum(base["seconds"] / own["seconds"] for _, own, base in picked) / 9)
    assert (found["tau"].low, found["tau"].high) == pytest.approx(tuple(np.quantile(taus, [0.025, 0.975])))
    assert (found["speedup"].low, found["speedup"].high) == pytest.approx(tuple(np.quantile(speedups, [0.025, 0.975])))
    again, other = estimate(Sample.of(answers), "seed"), estimate(Sample.of(answers), "another")
    assert again["tau"].to_dict() == found["tau"].to_dict()
    assert other["tau"].to_dict() != found["tau"].to_dict()


def test_the_interval_covers_what_it_says(monkeypatch):
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 500)
    generator, covered = np.random.default_rng(1), 0
    for trial in range(300):
        seconds = np.exp(generator.normal(0, 0.3, 60))  # of a draft; plain decoding takes 2 s for the same
        ones = np.ones(60)
        sample = Sample(ones, ones, 1 / seconds, ones, ones, ones * 2, ones)
        found = estimate(sample, str(trial))["speedup"]
        covered += found.low <= 2 * np.exp(0.3**2 / 2) <= found.high
    assert 0.90 <= covered / 300 <= 0.98


def test_one_question_has_no_interval():
    found = estimate(Sample.of(ANSWERS[:2]), "seed")
    assert found["tau"].to_dict() == {"value": 3.0, "low": None, "high": None}
    mean = mean_estimate([found["tau"], Estimate.of(2.0, np.array([1.0, 3.0]))])
    assert mean.to_dict() == {"value": 2.5, "low": None, "high": None}


# --- the protocol ----------------------------------------------------------------------------------------------------


def test_a_later_turn_follows_plain_decodings_answer(plain, questions, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        LM,
        "generate",
        lambda self, prompts, *a, _real=LM.generate, **k: asked.append(prompts[0]) or _real(self, prompts, *a, **k),
    )
    journal = measure(tmp_path, plan(plain, questions, limit=1))
    first, second = (journal.answers["tiny", 0, turn, "T=0"][0] for turn in (1, 2))
    answer = first["plain"]["text"]
    assert answer
    prompt = f"<user>def add(a, b):<assistant>{answer}<user>and now sub?<bot>"
    expected = plain.tokenizer.fast.encode(prompt, add_special_tokens=False).ids
    assert asked[-2:] == [expected, expected]  # both ways of decoding it
    assert second["prompt_tokens"] == len(expected)
    assert [first["methods"][key]["identical"] for key in journal.methods] == [True]
    expected = plain.generate([expected], max_tokens=8)[0].text
    assert second["plain"]["text"] == expected


def test_decoders_take_turns_at_being_first(plain, questions, tmp_path, monkeypatch):
    order = []
    real = protocol._timed
    monkeypatch.setattr(protocol, "_timed", lambda lm, *rest: order.append(lm.drafter_name) or real(lm, *rest))
    measure(tmp_path, plan(plain, questions))
    assert [order[place] for place in range(0, 8, 2)] == ["lookup", "none", "none", "lookup"]
    assert sorted(order) == ["lookup"] * 4 + ["none"] * 4


class Wrong(LM):
    """A decoder that gets one token of one text wrong."""

    def generate(self, prompts, *args, **options):
        found = super().generate(prompts, *args, **options)
        if self.drafter.drafts and len(found[0].token_ids) == 8 and "sub" in self.tokenizer.decode(prompts[0]):
            found[0].token_ids[5] += 1
            found[0].text += "<wrong>"
        return found


def test_a_text_that_differs_is_counted_and_shown(plain, questions, tmp_path):
    journal = measure(tmp_path, plan(plain, questions, method(plain, 2, Wrong), method(plain, 3), heats=(0.0, 1.0)))
    (group,) = gather([journal])
    counts = {(row.sampling, row.method["budget"]): row.num_identical for row in group.wholes}
    assert counts == {("T=0", "chain:2"): 3, ("T=0", "chain:3"): 4, ("T=1", "chain:2"): 3, ("T=1", "chain:3"): 4}
    assert not group.keeps_promises
    assert [(each["turn"], each["differs_at"], each["budget"]) for each in group.differences] == [(2, 5, "chain:2")] * 2
    shown = to_dict([group])["groups"][0]
    assert shown["all_identical"] is False
    assert [row["identical"] for row in shown["rows"] if row["category"] is None and row["turn"] is None] == [
        0.75,
        1.0,
        0.75,
        1.0,
    ]
    page = render([group])
    assert "Texts that differ from plain decoding's (2)" in page
    assert "&lt;wrong&gt;" in page
    assert "<wrong>" not in page


def test_what_a_kill_left_goes_on_to_the_same(plain, questions, tmp_path, monkeypatch):
    methods = [method(plain, 2), method(plain, 3)]
    whole = plan(plain, questions, *methods, heats=(0.0, 1.0))
    measure(tmp_path / "whole", whole)
    real, left = Journal.add, [7]

    def add(self, record):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        real(self, record)

    monkeypatch.setattr(Journal, "add", add)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path / "killed", whole)
    monkeypatch.setattr(Journal, "add", real)
    with (tmp_path / "killed" / FILE).open("a") as file:
        file.write('{"kind": "answer", "set": "ti')  # what a power cut leaves of a line
    assert len(read_journal(tmp_path / "killed").answers) == 3
    measure(tmp_path / "killed", whole)
    assert records(tmp_path / "killed") == records(tmp_path / "whole")
    before = (tmp_path / "killed" / FILE).read_bytes()
    measure(tmp_path / "killed", whole)  # nothing is left to do
    assert (tmp_path / "killed" / FILE).read_bytes() == before


def test_a_draft_that_comes_later_is_measured_alone(plain, questions, tmp_path):
    measure(tmp_path, plan(plain, questions, method(plain, 2), limit=1))
    journal = measure(tmp_path, plan(plain, questions, method(plain, 2), method(plain, 3), limit=1))
    two, three = journal.methods
    assert [list(each["methods"]) for each in journal.answers["tiny", 0, 2, "T=0"]] == [[two], [three]]
    (group,) = gather([journal])
    assert [(row.method["budget"], row.num_identical, row.num_answers) for row in group.wholes] == [
        ("chain:2", 2, 2),
        ("chain:3", 2, 2),
    ]


def test_a_prompt_without_room_is_skipped_by_name(plain, tmp_path):
    long = {"question_id": "long", "turns": ["x " * 300, "more"]}
    file = write(tmp_path / "tiny.jsonl", [QUESTIONS[1], long])
    journal = measure(tmp_path / "out", plan(plain, file))
    assert [each["turn"] for each in journal.skipped.values()] == [1, 2]
    (group,) = gather([journal])
    assert [row.num_questions for row in group.wholes] == [1]
    assert [(each["id"], each["context"]) for each in group.skipped] == [("long", 256), ("long", 256)]
    assert "question long, turn 1" in render([group])
    before = records(tmp_path / "out")
    measure(tmp_path / "out", plan(plain, file))
    assert records(tmp_path / "out") == before
    journal = measure(tmp_path / "whole", plan(plain, file, tokens=250))  # room for the prompt alone
    assert [each["id"] for each in journal.skipped.values()] == ["8", "long", "long"]
    assert not journal.answers


def test_settings_are_never_mixed(plain, questions, tmp_path):
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
    assert [len(each.folders) for each in groups] == [2, 1, 1]
    assert [row.method["budget"] for row in groups[0].wholes] == ["chain:3", "chain:2"]
    machine = {**one.settings, "machine": {**one.settings["machine"], "cpu": "another"}}
    other = Journal(tmp_path, machine, one.sets, one.methods, one.answers)
    assert len(gather([one, other])) == 2
    named = Journal(
        tmp_path, {**one.settings, "target": "the same by another name"}, one.sets, one.methods, one.answers
    )
    assert len(gather([one, named])) == 1


def test_two_heads_of_one_name_are_told_apart(plain, questions, tmp_path):
    journal = measure(tmp_path, plan(plain, questions, limit=1))
    (held,) = journal.methods.values()
    other = Journal(tmp_path, journal.settings, journal.sets, {"k": {**held, "key": "k", "identity": "f00dfeed"}})
    for unit, (record,) in journal.answers.items():
        (own,) = record["methods"].values()
        other.answers[unit] = [{**record, "methods": {"k": own}}]
    (group,) = gather([journal, other])
    assert sorted(row.method["draft"] for row in group.wholes) == sorted(
        [f"lookup ({held['identity'][:6]})", "lookup (f00dfe)"]
    )


def test_the_mean_counts_each_set_alike(plain, questions, tmp_path):
    sets = [
        read_set("tiny", questions),
        QuestionSet("other", "other.jsonl", read_set("other", questions).questions[1:2]),
    ]
    journal = measure(tmp_path, protocol.Plan(plain, [method(plain)], sets, [dw.Sampling(max_tokens=8, seed=3)]))
    one, two, mean = gather([journal])[0].wholes
    assert mean.set == "mean of sets"
    assert mean.figures["tau"].value == pytest.approx((one.figures["tau"].value + two.figures["tau"].value) / 2)
    assert (mean.num_answers, one.num_answers, two.num_answers) == (5, 4, 1)


def test_parts_of_a_set(plain, questions, tmp_path):
    (group,) = gather([measure(tmp_path, plan(plain, questions))])
    parts = {row.part: (row.num_questions, row.num_answers) for row in group.rows}
    assert parts == {
        "": (3, 4),
        "turn 1": (3, 3),
        "turn 2": (1, 1),
        "math": (2, 3),
        "math, turn 1": (2, 2),
        "math, turn 2": (1, 1),
        "code": (1, 1),
        "code, turn 1": (1, 1),
    }
    assert [row.part for row in group.parts] == ["turn 1", "turn 2", "math", "code"]


def test_each_question_has_noise_of_its_own(plain, tmp_path):
    same = write(tmp_path / "tiny.jsonl", [{"turns": ["def add(a, b):"]}, {"turns": ["def add(a, b):"]}])
    journal = measure(tmp_path / "out", plan(plain, same, heats=(1.0,)))
    texts = [journal.text(("tiny", number, 1, "T=1")) for number in (0, 1)]
    assert texts[0] != texts[1]


# --- sampling and settings -------------------------------------------------------------------------------------------


def test_samplings(chat, tmp_path):
    names = [settings.name_of_sampling(settings.parse_sampling(text, chat)) for text in ("0", "1", "0.2,top_p=0.9")]
    assert names == ["T=0", "T=1", "T=0.2 top_p=0.9"]
    assert settings.parse_sampling("model", chat) == dw.Sampling(temperature=0.6, top_p=0.9)
    with refused(ConfigError, "--temperature must be a number", "found 'hot'"):
        settings.parse_sampling("hot", chat)
    with refused(ConfigError, "--temperature must be a number"):
        settings.parse_sampling("1,topp=3", chat)
    with refused(ConfigError, "no sampling settings of its own"):
        settings.parse_sampling("model", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true, "typical_p": 0.9}')
    with refused(UnsupportedError, "typical_p 0.9"):
        settings.parse_sampling("model", tmp_path)


def test_other_weights_are_another_target(chat, tmp_path):
    other = shutil.copytree(chat, tmp_path / "other")
    found = [settings._identity(folder) for folder in (chat, other)]
    assert found[0] == found[1]
    file = other / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert settings._identity(other) != found[0]


def test_what_cannot_be_planned(plain, questions):
    with refused(ConfigError, "asked for twice"):
        plan(plain, questions, method(plain), method(plain)).check()
    with refused(ConfigError, "at least one draft"):
        protocol.Plan(plain, [], [read_set("tiny", questions)], [dw.Sampling()]).check()


# --- the command -----------------------------------------------------------------------------------------------------


def run(*args):
    return CliRunner().invoke(app, ["bench", *map(str, args)])


def test_the_command_from_end_to_end(questions, tmp_path, monkeypatch):
    """On the shipped pair, whose EAGLE-3 head reads features."""
    monkeypatch.setattr("draftwing.lab.bench_page._OFTEN", 1)
    other = write(tmp_path / "code.jsonl", [{"prompt": "def quicksort(items):\n"}])
    out = tmp_path / "out"
    args = ["-d", "eagle3", "-d", "lookup", "--tree", "chain:3", "-n", 6, "--num-prompts", 1, "-o", out]
    result = run("--set", questions, other, *args, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (group,) = found["groups"]
    rows = group["rows"]
    assert {(row["set"], row["sampling"], row["draft"]) for row in rows} == {
        (name, heat, draft)
        for name in ("tiny", "code", "mean of sets")
        for heat in ("T=0", "T=1")
        for draft in ("eagle3", "lookup")
    }
    assert all(row["identical"] == 1 for row in rows)
    (row,) = (row for row in rows if (row["set"], row["sampling"], row["draft"]) == ("code", "T=0", "eagle3"))
    assert row["n_alpha"] == row["alpha"] != []
    assert row["efficiency"] == pytest.approx(row["speedup"]["value"] / row["tau"]["value"])
    assert row["speedup"]["low"] is None  # one question
    assert all(row["n_alpha"] is None for row in rows if row["draft"] == "lookup")
    assert json.loads((out / "results.json").read_text())["groups"] == found["groups"]
    page = (out / "index.html").read_text()
    assert page.count("<svg") == 5  # speedup, tau, what is left of it at T=1, alpha of both sets
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # needs no network
    report = run("--report", out, "--out", tmp_path / "again")
    assert report.exit_code == 0, report.output
    assert "toy, float32, 6 tokens, batch 1" in report.stdout
    assert (tmp_path / "again" / "index.html").exists()
    other_settings = run("--set", questions, *args, "-n", 7)
    assert other_settings.exit_code == 2
    assert "holds results with tokens 6, and this run has 7" in other_settings.stderr


def test_ctrl_c_keeps_what_is_done_and_shows_it(chat, questions, tmp_path, monkeypatch):
    real = Journal.add

    def add(self, record):
        real(self, record)
        if len(self.answers) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "add", add)
    args = ["-t", chat, "-d", "lookup", "--tree", "chain:2", "-n", 4, "--set", questions, "-o", tmp_path]
    result = run(*args)
    assert result.exit_code == 130
    assert "the same command continues" in result.stderr
    assert "2 of 2" in result.stdout
    assert (tmp_path / "index.html").exists()
    monkeypatch.undo()
    result = run(*args)
    assert result.exit_code == 0, result.output
    assert "4 of 4" in result.stdout


def test_a_wrong_text_ends_with_1(chat, questions, tmp_path, monkeypatch):
    monkeypatch.setattr("draftwing.lm.LM", Wrong)
    result = run("-t", chat, "-d", "lookup", "-n", 8, "-T", "0", "--tree", "chain:2", questions, "-o", tmp_path)
    assert result.exit_code == 1, result.output
    assert "3 of 4" in result.stdout
    assert "NOT plain decoding's text" in result.stdout


@pytest.mark.parametrize(
    ("args", "said"),
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
def test_refusals(chat, questions, tmp_path, args, said):
    names = {"OUT": tmp_path / "out", "SET": questions, "CHAT": chat}
    result = run(*(names.get(each, each) for each in args))
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert not (tmp_path / "out" / FILE).exists()


def test_records_that_are_none(tmp_path):
    (tmp_path / FILE).write_text('{"kind": "settings"}\n{"kind": "other"}\n')
    with refused(CheckpointError, "line 2: not a record of draftwing bench", "unknown kind"):
        read_journal(tmp_path)
