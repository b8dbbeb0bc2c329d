"""Tuning the layers that draft: recorded acceptance equals decoding, and the search finds the best set."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from conftest import add_tokenizer, build, refused
from draftwing.cli import main as cli
from draftwing.cpu.noise import noise_of
from draftwing.decode import Decoder
from draftwing.errors import ConfigError
from draftwing.formats.identity import target_id
from draftwing.lab.tune import DEPTH, Pace, Recorded, Trial, measure_pace, tune
from draftwing.loading import load, load_target
from draftwing.methods.base import Budget
from draftwing.methods.layer_skip import LayerSet, LayerSkipDrafter
from draftwing.methods.net import TargetId
from draftwing.models.lean import LeanTarget
from draftwing.models.subnet import Parts, SubNet
from draftwing.sampling import Sampling, SamplingBatch

PACE = Pace(start=0.0, base=0.1, attention=0.1, mlp=0.2, verify=tuple(1 + 0.05 * n for n in range(13)))
EVERY = Parts.without(3, (), ())


@pytest.fixture(scope="module")
def folder(folder_of):
    return folder_of("llama", initializer_range=0.15)


@pytest.fixture(scope="module")
def plain(folder):
    return LeanTarget.from_folder(folder, torch.float64, prepack=False)


@pytest.fixture(scope="module")
def texts(plain):
    """What the target writes, one text shorter than the other."""
    found = []
    for prompt, length in (((4, 7, 7, 1, 30), 30), ((9,), 20)):
        decoder, written = Decoder(plain), []
        decoder.admit(prompt, Sampling(max_tokens=length, ignore_eos=True))
        while decoder.num_running:
            written += decoder.step().rows[0].token_ids
        found.append((prompt, written))
    return found


# --- acceptance ------------------------------------------------------------------------------------------------------


def drafted(target, parts, ids, depth):
    """How many tokens of a chain below the last of ``ids`` are accepted, by drafting it."""
    decoder = Decoder(target, LayerSkipDrafter(SubNet(target.net, parts), target, "x"))
    decoder.admit(ids[:-depth], Sampling(max_tokens=depth + 2, ignore_eos=True))
    batch = SamplingBatch([Sampling()], noise_of(target.vocab_size, target.device))
    chain = decoder.drafter.propose(decoder.ctx, batch, Budget(depth)).tokens[0, 1:].tolist()
    right = [a == b for a, b in zip(chain, ids[-depth:], strict=True)]
    return right.index(False) if False in right else depth


@pytest.mark.parametrize("parts", [Parts.without(3, (1,), (0,)), Parts.first(3, 2)], ids=str)
def test_recorded_acceptance_equals_drafting(parts, plain, texts):
    lengths = []
    for prompt, written in texts:
        ids = [*prompt, *written]
        ends = range(max(len(prompt), 2) + 3, len(ids) + 1)  # a root is not the first token of all
        lengths += [drafted(plain, parts, ids[:end], 3) for end in ends]
    expected = tuple(sum(length >= depth for length in lengths) / len(lengths) for depth in (1, 2, 3))
    assert Recorded(plain, texts, 3).accepted(parts) == pytest.approx(expected)
    assert 0 < expected[0] < 1


def test_the_whole_target_is_always_right(plain, texts):
    recorded = Recorded(plain, texts, 4)
    assert recorded.accepted(EVERY) == (1.0,) * 4
    recorded.accepted(Parts.first(3, 1))
    assert recorded.accepted(EVERY) == (1.0,) * 4  # a set does not affect the next one


def test_a_window_ends_what_is_recorded(folder_of):
    windowed = LeanTarget.from_folder(folder_of("mistral-window"), torch.float64, prepack=False)
    with refused(ConfigError, "too short", "within 7 tokens"):
        Recorded(windowed, [(range(3, 7), range(7, 20))], 4)
    with refused(ConfigError, "too short", "write more"):
        Recorded(windowed, [], 1)


# --- costs -----------------------------------------------------------------------------------------------------------


def test_tokens_a_second_of_the_best_chain():
    parts = Parts(3, (0, 1), (1,))  # a pass takes 0.1 + 0.2 + 0.2
    # Chains of 1 bring 1.9 tokens in 0.5 + 1.05; of 2 2.71 in 2.1; of 3 3.3 and so on: long ones pay no more.
    speeds = [(1 + sum(0.9**d for d in range(1, n + 1))) / (0.5 * n + 1 + 0.05 * n) for n in range(1, 13)]
    trial = PACE.trial(parts, (0.9, 0.81))  # deeper ones follow from these two
    assert trial.tokens_per_s == pytest.approx(max(speeds))
    assert trial.depth == speeds.index(max(speeds)) + 1
    assert PACE.trial(parts, (0.0, 0.0)) == Trial(parts, (0.0, 0.0), pytest.approx(1 / 1.55), 1)
    assert PACE.plain == 1.0


def test_a_pace_is_measured(folder):
    found = measure_pace(load_target(folder))
    assert min(found.attention, found.mlp, found.base, found.start) >= 0
    assert found.attention + found.mlp + found.base > 0
    assert list(found.verify) == sorted(found.verify)


# --- the search ------------------------------------------------------------------------------------------------------


def target_of(num_layers):
    return TargetId("t", 8, num_layers, 100)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_planted_set_is_found(seed, tmp_path):
    """Twelve sublayers, of which five can be spared: each costs time, and the others cost acceptance, two together."""
    best, tried = Parts.without(6, (1, 3), (0, 3, 4)), []

    def score(parts):
        tried.append(parts)
        missed = len(set(parts.skipped_attention) - {1, 3}) + 2 * len(set(parts.skipped_mlp) - {0, 3, 4})
        passes = 12 - len(parts.skipped_attention) - len(parts.skipped_mlp)
        bonus = 0.02 if 1 in parts.skipped_attention else 0
        return Trial(parts, (), 0.7**missed / (2 + 0.3 * passes) + bonus, 1)

    found, finished = tune(tmp_path / "out", target_of(6), score, num_trials=150, seed=seed)
    assert (found.parts, finished) == (best, True)
    assert len(tried) == len(set(tried)) == 150
    assert LayerSet.read(tmp_path / "out").parts == best


def test_every_set_of_a_small_space_is_tried_once(tmp_path):
    tried = []

    def score(parts):
        tried.append(parts)
        return Trial(parts, (), len(parts.mlp) - len(parts.attention), 1)

    found, _ = tune(tmp_path / "out", target_of(1), score, num_trials=100)
    assert len(set(tried)) == len(tried) == 4
    assert found.parts == Parts(1, (), (0,))


def test_ctrl_c_keeps_the_best_set_and_the_next_run_begins_with_it(plain, texts, tmp_path):
    recorded, tried, progress = Recorded(plain, texts, DEPTH), [], []

    def score(parts):
        tried.append(parts)
        if len(tried) == 8:
            raise KeyboardInterrupt
        return PACE.trial(parts, recorded.accepted(parts))

    def run(target, **options):
        return tune(tmp_path / "out", target, score, on_progress=lambda *news: progress.append(news), **options)

    first, finished = run(target_id(plain), num_trials=20)
    assert not finished
    assert LayerSet.read(tmp_path / "out").parts == first.parts
    second, finished = run(target_id(plain), num_trials=12)
    assert finished
    assert tried[8] == first.parts
    assert second.tokens_per_s >= first.tokens_per_s
    assert progress[-1] == (12, 12, second)
    run(replace(target_id(plain), vocab_size=9), num_trials=1)  # a set of another target is no start
    assert tried[-1] == EVERY


def test_early_exits_and_ctrl_c_before_any_set(tmp_path):
    def interrupt(parts):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path / "out", target_of(3), interrupt, only_exits=True)
    assert not (tmp_path / "out").exists()
    tried = []
    tune(tmp_path / "out", target_of(3), lambda p: tried.append(p) or Trial(p, (), 1.0, 1), only_exits=True)
    assert tried == [Parts.first(3, 1), Parts.first(3, 2)]


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    place = tmp_path_factory.mktemp("target")
    build("llama", head_dim=32, vocab_size=300, initializer_range=0.1).float().save_pretrained(place)
    return add_tokenizer(place)


def test_the_command(chatty, tmp_path):
    out, data = tmp_path / "out", tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "def add("}\n{"prompt": "for row in rows"}\n')
    args = ["tune", "layers", "-t", str(chatty), "--data", str(data), "-n", "24", "--out", str(out), "--trials"]
    done = CliRunner().invoke(cli.app, [*args, "20", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["finished"], found["out"]) == (True, str(out))
    assert LayerSet.read(out).parts == Parts.without(3, tuple(found["skip_attention"]), tuple(found["skip_mlp"]))
    shown = CliRunner().invoke(cli.app, [*args, "1"])
    assert shown.exit_code == 0, shown.output
    assert "tokens/s expected" in shown.output
    assert f"wrote {out}" in shown.output.replace("\n", "")
    options = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 5}
    texts = [load(chatty, draft, budget=Budget(3)).generate("def", **options)[0].text for draft in ("none", out)]
    assert texts[0] == texts[1]
