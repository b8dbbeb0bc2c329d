"""A head is tried on prompts of its kind, and one that does not fit is recognised."""

import json
import random
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace

import accelerate
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import draftwing as dw
from conftest import add_tokenizer, build, refused
from draftwing.cli import main as cli
from draftwing.errors import ConfigError, PromptError
from draftwing.formats.card import line_of
from draftwing.formats.doctor import other_taps
from draftwing.formats.read import load_head
from draftwing.formats.settings import TAP_IDS
from draftwing.formats.write import save_head
from draftwing.lab.fit import MISFIT, FitTrial, by_chance, judge, measure_fit, trial_of, wilson
from draftwing.loading import load_drafter
from draftwing.shipped import TOY
from draftwing.text.prompts import as_put, read_prompts, shipped_prompts, shipped_questions
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data import Corpus, Example
from draftwing.train.evaluate import validation_prompts
from draftwing.train.options import TrainOptions
from draftwing.train.session import RunFiles, prepare

TEMPLATE = (
    "{% for m in messages %}<{{ 'bot' if m.role == 'assistant' else 'you' }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
SIZES = {"max_length": 64, "tokens_per_batch": 512, "precision": "no"}
WORDS = ["row", "rows", "table", "add", "print", "self", "class", "def", "return", "for"]


@pytest.fixture(scope="module", autouse=True)
def _short_starts():
    """Weights are solved on one batch instead of sixteen thousand tokens."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("draftwing.train.session.START_TOKENS", 512)
        yield


def dialogues(num):
    rng = random.Random(3)
    some = lambda count: " ".join(rng.choice(WORDS) for _ in range(count))  # noqa: E731
    return [
        {"messages": [{"role": "user", "content": f"{n}: {some(4)}"}, {"role": "assistant", "content": some(9)}]}
        for n in range(num)
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target that chats, and whose greedy text can be guessed a little."""
    folder = tmp_path_factory.mktemp("target")
    build("llama", head_dim=32, vocab_size=300, initializer_range=0.1).float().save_pretrained(folder)
    return add_tokenizer(folder, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def run(target, tmp_path_factory):
    """A short training on dialogues and documents: its folder, and the data."""
    place = tmp_path_factory.mktemp("run")
    data, texts = place / "chats.jsonl", place / "texts.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in dialogues(80)))
    rng = random.Random(5)
    bodies = [" ".join(rng.choice(WORDS) for _ in range(150)) for _ in range(30)]
    texts.write_text("".join(json.dumps({"text": body}) + "\n" for body in bodies))
    sizes = {"iterations": 6, "eval_every": 6, "eval_prompts": 1, "eval_tokens": 4, "keep_prompts": 6}
    options = TrainOptions("eagle3", lr=3e-3, draft_vocab_size=200, validation_share=0.2, **SIZES, **sizes)
    files = RunFiles(str(target), [data, texts], licence="Apache-2.0")
    prepare(files, options, place, dtype="float32", device="cpu").run()
    return place, data, texts


# --- prompts of its kind ---------------------------------------------------------------------------------------------


def test_every_phase_before_training_is_reported_with_its_bound(run, target, tmp_path):
    phases = []

    @contextmanager
    def phase(title):
        phases.append((title, []))
        yield lambda done, total: phases[-1][1].append((done, total))

    options = TrainOptions("eagle3", iterations=1, **SIZES)
    files, place = RunFiles(str(target), run[1:]), {"dtype": "float32", "device": "cpu", "phase": phase}
    session = prepare(files, options, tmp_path, **place)
    assert [title.split(",")[0] for title, _ in phases] == [
        *("reading the data", "loading the target", "first weights: scoring text and solving"),
    ]
    size = sum(file.stat().st_size for file in run[1:])
    assert phases[0][1][-1] == (size, size)
    assert phases[2][1] == [(0, 2), (1, 2), (2, 2)]
    evaluated = []
    session.evaluation.on_progress = evaluated.append
    session.run()
    assert evaluated[0] == "scoring held-out batch 1 of 1"
    assert re.fullmatch(r"measuring tau, (\d+) of \1 tokens", evaluated[-2])
    assert not evaluated[-1]
    phases.clear()
    prepare(files, options, tmp_path, **place)  # its checkpoint has later weights
    titles = [title.split(",")[0] for title, _ in phases]
    assert titles == ["reading the data", "loading the target"]


def test_training_takes_bfloat16_where_it_is_fast(run, target, tmp_path, monkeypatch):
    """A CPU without instructions for it takes many times longer. A run may continue on another machine."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    chosen, accelerator = [], accelerate.Accelerator

    def record(mixed_precision, **options):
        chosen.append(mixed_precision)
        return accelerator(mixed_precision="no", **options)  # accelerate keeps the first one for the whole process

    monkeypatch.setattr(accelerate, "Accelerator", record)
    options = TrainOptions("eagle3", iterations=1, max_length=64, tokens_per_batch=512, eval_prompts=0)
    files = RunFiles(str(target), run[1:])
    session = prepare(files, options, tmp_path, device="cpu")
    assert session.target.dtype == torch.bfloat16
    session.run()
    told = json.loads((tmp_path / "head" / "config.json").read_text())["draftwing"]["training"]
    assert told["precision"] == "bf16"
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    session = prepare(files, options, tmp_path, device="cpu")
    assert session.target.dtype == torch.float32
    session.run()
    assert chosen == ["bf16", "no"]


def test_ctrl_c_before_training_keeps_what_there_was(run, target, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("draftwing.train.session.load_target", stop)
    args = ["train", "eagle3", "-t", target, "--data", run[1], "--iterations", 1]
    args += ["--precision", "no", "--device", "cpu"]
    stopped = CliRunner().invoke(cli.app, list(map(str, [*args, "-o", tmp_path / "run"])))
    assert stopped.exit_code == 130
    assert "stopped before the first update (loading the target): nothing was written" in stopped.stderr
    assert not (tmp_path / "run").exists()
    stopped = CliRunner().invoke(cli.app, list(map(str, [*args, "-o", run[0]])))
    assert f"{run[0]} still has the 6 updates of earlier runs" in " ".join(stopped.stderr.split())


def test_validation_prompts_are_spread_over_the_held_out_data():
    """Dialogues up to their first answer, and beginnings of documents."""
    examples = [Example(np.full(6, number), np.arange(6) >= number % 4) for number in range(12)]
    prompts = [[number] * (number % 4 if number % 4 > 1 else 3) for number in range(12)]
    assert validation_prompts(Corpus(tuple(examples)), 12) == prompts
    assert validation_prompts(Corpus(tuple(examples)), 3) == prompts[::4]


def test_a_trained_head_carries_held_out_prompts(run, target):
    place, data, texts = run
    file = place / "head" / "prompts.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    asked, begun = [each["text"] for each in lines[:3]], [each["text"] for each in lines[3:]]
    questions = [json.loads(line)["messages"][0]["content"] for line in data.read_text().splitlines()]
    known = {f"<you>{question}</s><bot>" for question in questions}
    assert len(asked) == len(begun) == 3
    assert set(asked) <= known  # as the template renders them
    whole = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
    assert all(any(text.startswith(begin) for text in whole) for begin in begun)
    assert file.stat().st_size < 8192
    # They were held out: none is in what the run was trained on.
    options = TrainOptions("eagle3", iterations=1, validation_share=0.2, **SIZES)
    again = prepare(RunFiles(target, [data, texts]), options, place / "again", dtype="float32", device="cpu")
    tokenizer = again.tokenizer
    trained = {tokenizer.decode(each.ids.tolist()) for each in again.training.examples}
    assert trained
    assert not any(each in text for each in asked for text in trained)
    stream = tokenizer.decode(again.training.stream.tolist())
    assert not any(begin in stream for begin in begun)


def test_a_trained_head_has_a_card(run, target):
    place = run[0]
    card = (place / "head" / "README.md").read_text()
    judged = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()][-1]
    said = json.loads((place / "head" / "config.json").read_text())["draftwing"]["training"]
    assert said["held_out"] == {
        name: judged[name] for name in ("iteration", "val_loss", "val_agreement", "tau", "alpha")
    }
    for part in (
        "license: apache-2.0",
        f"# EAGLE-3 head for {target}",
        f"data: `chats.jsonl`, `texts.jsonl`, {said['num_dialogues']} dialogues, {said['tokens_in_data']:,} tokens",
        "length: 6 updates, 3,072 tokens seen, 1 minutes",
        f"Tau {judged['tau']:.2f}: tokens per forward",
        f"| agrees with the target | {judged['val_agreement'][0]:.1%} | {judged['val_agreement'][1]:.1%} |",
        "draftwing export head --to vllm",
        "Apache-2.0.",
    ):
        assert part in card, part
    assert str(place) not in card  # the user's folders are private


def test_prompts_can_be_kept_back(target, run, tmp_path):
    options = TrainOptions("eagle3", iterations=1, keep_prompts=0, eval_prompts=0, **SIZES)
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "prompts.jsonl").write_text('{"text": "of an older head"}\n')
    prepare(RunFiles(target, [run[1]]), options, tmp_path, dtype="float32", device="cpu").run()
    assert not (tmp_path / "head" / "prompts.jsonl").exists()


def test_losses_may_cover_only_the_most_frequent_tokens(run, target, tmp_path):
    """A net that uses the target's LM head; one that trains its head would leave rows untrained."""
    options = TrainOptions("eagle1", iterations=2, loss_vocab_size=50, eval_prompts=0, **SIZES)
    files = RunFiles(target, [run[1], run[2]])
    session = prepare(files, options, tmp_path, dtype="float32", device="cpu")
    assert len(session.trainer.target_ids) == 50
    assert session.trainer.net.num_draft_tokens == session.target.vocab_size
    session.run()
    assert (tmp_path / "head" / "config.json").exists()
    with refused(ConfigError, "or give draft_vocab_size"):
        prepare(files, replace(options, method="eagle3"), tmp_path / "other", dtype="float32", device="cpu")


def test_a_net_reads_the_requested_hidden_states(run, target, tmp_path):
    options = TrainOptions("eagle3", iterations=2, taps=(0, 2), eval_prompts=0, **SIZES)
    files, place = RunFiles(target, [run[1], run[2]]), {"dtype": "float32", "device": "cpu"}
    session = prepare(files, options, tmp_path / "run", **place)
    assert tuple(session.trainer.net.config.taps) == (0, 2)
    session.run()
    assert load_head(tmp_path / "run" / "head").config.taps == (0, 2)
    prepare(files, options, tmp_path / "run", **place).run()  # resumes; JSON has made the taps a list
    last = session.target.num_layers
    for taps in ((2, 0), (1, 1), (0, last + 1), (-1, 2)):
        with refused(ConfigError, f"different numbers from 0 to {last}, in order", "are usual"):
            prepare(files, replace(options, taps=taps), tmp_path / "other", **place)
    with refused(ConfigError, "'eagle1' reads the last hidden state", "leave out taps"):
        prepare(files, replace(options, method="eagle1"), tmp_path / "other", **place)
    started = replace(files, initial=tmp_path / "run" / "head")
    with refused(ConfigError, "taps (0, 2)", "this run has (0, 1)"):
        prepare(started, replace(options, taps=(0, 1)), tmp_path / "other", **place)


def test_long_prompts_stay_behind():
    assert line_of({"text": "a" * 1000}) is not None
    assert line_of({"text": "a" * 1024}) is None
    assert line_of({"text": "ä" * 600}) is None  # bytes, not characters


def test_what_a_head_is_tried_on(run, target, tmp_path):
    place, data, _ = run
    tokenizer = Tokenizer(target)
    stored = trial_of(place / "head", tokenizer, 6)
    assert stored.source == "prompts held out of its training, stored with the head"
    assert all(isinstance(each, str) for each in stored.prompts)  # a rendered text is no question
    assert len(trial_of(place / "head", tokenizer, 2).prompts) == 2
    bare = shutil.copytree(place / "head", tmp_path / "bare")
    (bare / "prompts.jsonl").unlink()
    asked = trial_of(bare, tokenizer, 3)
    assert "general questions through the chat template" in asked.source
    assert asked.prompts == [[{"role": "user", "content": each}] for each in shipped_questions(3)]
    own = read_prompts(data, 2)
    assert trial_of(place / "head", tokenizer, 4, own, where="mine.jsonl") == FitTrial(
        own, "prompts of mine.jsonl through the chat template"
    )
    plain = add_tokenizer(tmp_path)  # the same tokens, no chat template
    assert trial_of(bare, Tokenizer(plain), 2).prompts == shipped_prompts(2)
    assert all(isinstance(each, str) for each in trial_of(place / "head", Tokenizer(plain), 6).prompts)
    (bare / "prompts.jsonl").write_text('{"said": "nothing that is known"}\n')
    with refused(PromptError, "prompts.jsonl, line 1", "expected one of the keys"):
        trial_of(bare, tokenizer, 2)


def test_how_a_prompt_is_put():
    question = [{"role": "system", "content": "short"}, {"role": "user", "content": "why?"}]
    assert as_put("why?", True) == [{"role": "user", "content": "why?"}]
    assert as_put(question, True) == question
    assert as_put("why?", False) == "why?"
    assert as_put(question, False) == "short\n\nwhy?"
    assert as_put([1, 2], False) == as_put([1, 2], True) == [1, 2]


# --- the verdict -----------------------------------------------------------------------------------------------------


def damaged(head, how):
    """A head that does not fit, in a way that the field knows."""
    fc = head.tensors["fc.weight"]
    generator = torch.Generator().manual_seed(1)
    if how == "other vocabulary":
        ids = torch.randperm(head.config.vocab_size, generator=generator)[: len(head.target_ids)]
        return replace(head, target_ids=ids.sort().values)
    if how == "random":
        tensors = {
            name: torch.randn(t.shape, generator=generator) if t.ndim == 2 else t for name, t in head.tensors.items()
        }
        return replace(head, tensors=tensors)
    columns = torch.randperm(fc.shape[1], generator=generator)  # another model's features mean other things
    return replace(head, tensors={**head.tensors, "fc.weight": -fc[:, columns].contiguous()})


def test_a_head_is_told_from_one_that_does_not_fit(tmp_path):
    head, trial = TOY / "eagle3", FitTrial(shipped_prompts(2), "")
    plain = dw.load(draft="none", device="cpu")

    def fit_of(folder):
        return measure_fit(
            dw.LM(plain.target, plain.tokenizer, load_drafter(folder, plain.target, plain.tokenizer)), trial, 32
        )

    sound = fit_of(head)
    assert sound.verdict == "fits", sound
    assert sound.chance < sound.interval[0] < sound.alpha[0] < sound.interval[1]
    for how in ("random", "other features", "other vocabulary"):
        save_head(tmp_path / how, damaged(load_head(head), how), "draftwing")
        found = fit_of(tmp_path / how)
        assert found.verdict == "does not fit", (how, found)
        assert found.tau < sound.tau
        assert found.lookup_tau == sound.lookup_tau  # the same texts, the same lookup


@pytest.mark.parametrize(
    ("right", "lookup_tau", "verdict"),
    [(80, 1.2, "fits"), (80, 4.0, "weak"), (30, 1.2, "weak"), (14, 1.2, "does not fit"), (0, 1.2, "does not fit")],
)
def test_verdicts(right, lookup_tau, verdict):
    emitted = [place % 97 for place in range(100)]
    drafted = [token if place < right else 200 + place for place, token in enumerate(emitted)]
    stats = dw.Stats(num_tokens=100 + right, num_forwards=100, reached=[100], taken=[right])
    assert judge(stats, drafted, emitted, lookup_tau, "").verdict == verdict


def test_common_tokens_alone_are_no_fit():
    """A head that always drafts the most common token is right as often as chance, and does not fit."""
    rng = random.Random(0)
    emitted = [7 if rng.random() < 0.3 else rng.randrange(20, 300) for _ in range(400)]
    right = emitted.count(7)
    stats = dw.Stats(num_tokens=400 + right, num_forwards=400, reached=[400], taken=[right])
    fit = judge(stats, [7] * 400, emitted, 1.0, "")
    assert fit.alpha[0] > MISFIT
    assert fit.chance == pytest.approx(fit.alpha[0])
    assert fit.verdict == "does not fit"


def test_chance_and_interval():
    rng = random.Random(2)
    drafted, emitted = ([rng.randrange(4) for _ in range(60)] for _ in range(2))
    pairs = [(i, j) for i in range(60) for j in range(60) if i != j]
    assert by_chance(drafted, emitted) == pytest.approx(sum(drafted[i] == emitted[j] for i, j in pairs) / len(pairs))
    assert by_chance([3], [3]) == by_chance([], []) == 0
    assert wilson(0, 0) == (0, 1)
    # A share on the edge of the interval is 1.96 of its standard deviations away from the observed one.
    for edge in wilson(36, 100):
        assert abs(0.36 - edge) == pytest.approx(1.96 * (edge * (1 - edge) / 100) ** 0.5)


# --- the command -----------------------------------------------------------------------------------------------------


def doctor(*args):
    return CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, ["doctor", *map(str, args), "--device", "cpu"])


def test_the_command_reports_its_prompts(run, target):
    shown = doctor(run[0] / "head", "--target", target)
    assert "tried on prompts held out of its training, stored with the head" in shown.stdout
    assert "shuffled drafts: " in shown.stdout
    found = doctor(run[0] / "head", "--target", target, "--json")
    fit = json.loads(found.stdout)["fit"]
    assert shown.exit_code == found.exit_code == (fit["verdict"] == "does not fit")
    assert fit["tried_on"] == "prompts held out of its training, stored with the head"
    assert f"tau {fit['tau']:.2f}: {fit['verdict']}" in shown.stdout
    assert fit["interval"][0] <= fit["alpha"][0] <= fit["interval"][1]
    own = json.loads(
        doctor(run[0] / "head", "--target", target, "--json", "--prompts", run[1], "--num-prompts", 1).stdout
    )
    assert own["fit"]["tried_on"] == f"prompts of {run[1]} through the chat template"


def test_both_conventions_of_tap_ids_are_tried(tmp_path):
    head, target = load_head(TOY / "eagle3"), dw.load("toy").target
    assert head.config.taps == (2, 4, 5)
    save_head(tmp_path, head, "sglang")
    plain = json.loads((tmp_path / "config.json").read_text())
    plain = {name: value for name, value in plain.items() if name not in ("draftwing", "eagle_config")}
    for config, taps in (
        ({TAP_IDS: [2, 4, 5]}, (3, 5, 6)),  # read as inputs
        ({"eagle_config": {TAP_IDS: [1, 3, 4]}}, (1, 3, 4)),  # read as outputs
        ({TAP_IDS: [2, 4, target.num_layers - 1]}, None),
        ({}, None),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**plain, **config}))
        assert other_taps(tmp_path, target.num_layers) == taps
    assert other_taps(TOY / "eagle3", target.num_layers) is None
    # Those of the embedding alone agree less.
    fit = measure_fit(dw.load("toy"), FitTrial(shipped_prompts(1), ""), 24, (0, 0, 0))
    assert (fit.taps, fit.other.taps) == ((2, 4, 5), (0, 0, 0))
    assert fit.other.tau < fit.tau
    (tmp_path / "config.json").write_text(json.dumps({**plain, TAP_IDS: [2, 4, 5]}))
    shown = doctor(tmp_path, "--target", "toy", "--num-prompts", "1").stdout
    assert re.search(r"taps 2,4,5: tau \d\.\d\d; if its ids count outputs of layers, 3,5,6: tau \d\.\d\d, ", shown)
