"""Tuning the layers that draft: recorded acceptance equals decoding, the search finds the best set, runs resume."""

from __future__ import annotations

import errno
import json
import random
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from conftest import add_tokenizer, build, refused
from draftwing.cli import main as cli
from draftwing.cpu.noise import noise_of
from draftwing.decode import Decoder
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.formats.identity import target_id
from draftwing.lab.tune import DEPTH, FILE, Pace, Recorded, TextIds, measure_pace, search, starts, tune
from draftwing.loading import load, load_target
from draftwing.methods.base import Budget
from draftwing.methods.layer_skip import LayerSet, LayerSkipDrafter
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
        decoder, ids = Decoder(plain), list(prompt)
        decoder.admit(prompt, Sampling(max_tokens=length, ignore_eos=True))
        while decoder.num_running:
            ids += decoder.step().rows[0].token_ids
        found.append(TextIds(tuple(ids), len(prompt)))
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


@pytest.mark.parametrize("parts", [Parts.without(3, (1,), ()), Parts.without(3, (), (0,)), Parts.first(3, 2)], ids=str)
def test_recorded_acceptance_equals_drafting(parts, plain, texts):
    lengths = []
    for text in texts:
        ends = range(max(text.prompt, 2) + 3, len(text.ids) + 1)  # a root is not the first token of all
        lengths += [drafted(plain, parts, list(text.ids[:end]), 3) for end in ends]
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
        Recorded(windowed, [TextIds(tuple(range(3, 20)), 4)], 4)
    with refused(ConfigError, "too short", "write more"):
        Recorded(windowed, [], 1)


# --- costs -----------------------------------------------------------------------------------------------------------


def test_tokens_a_second_of_the_best_chain():
    parts = Parts(3, (0, 1), (1,))  # a pass takes 0.1 + 0.2 + 0.2
    # Chains of 1 bring 1.9 tokens in 0.5 + 1.05; of 2 2.71 in 2.1; of 3 3.3 and so on: long ones pay no more.
    speeds = [(1 + sum(0.9**d for d in range(1, n + 1))) / (0.5 * n + 1 + 0.05 * n) for n in range(1, 13)]
    speed, depth = PACE.tokens_per_s(parts, (0.9, 0.81))  # deeper ones reckoned from these two
    assert speed == pytest.approx(max(speeds))
    assert depth == speeds.index(max(speeds)) + 1
    assert PACE.tokens_per_s(parts, (0.0, 0.0)) == (pytest.approx(1 / 1.55), 1)
    assert PACE.plain == 1.0
    assert Pace.from_dict(json.loads(json.dumps(asdict(PACE)))) == PACE


def test_a_pace_is_measured(folder):
    found = measure_pace(load_target(folder))
    assert min(found.attention, found.mlp, found.base, found.start) >= 0
    assert found.attention + found.mlp + found.base > 0
    assert list(found.verify) == sorted(found.verify)


# --- the search ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_the_planted_set_is_found(seed):
    """Twelve sublayers, of which five can be spared: each costs time, and the others cost acceptance, two together."""
    best, tried = Parts.without(6, (1, 3), (0, 3, 4)), []

    def worth(parts):
        tried.append(parts)
        missed = len(set(parts.skipped_attention) - {1, 3}) + 2 * len(set(parts.skipped_mlp) - {0, 3, 4})
        passes = 12 - len(parts.skipped_attention) - len(parts.skipped_mlp)
        return 0.7**missed / (2 + 0.3 * passes) + (0.02 if {1} <= set(parts.skipped_attention) else 0)

    assert search(6, worth, 150, seed) == best
    assert len(tried) == len(set(tried)) == 150
    chance = random.Random(seed)
    drawn = {Parts.without(6, *(tuple(x for x in range(6) if chance.random() < 0.5) for _ in "ab")) for _ in range(150)}
    assert best not in drawn  # random search would have missed it


def test_every_set_of_a_small_space_is_tried_once():
    tried = []
    best = search(1, lambda parts: tried.append(parts) or len(parts.mlp) - len(parts.attention), 100)
    assert len(set(tried)) == len(tried) == 4
    assert best == Parts(1, (), (0,))
    earlier, tried = dict.fromkeys(starts(4), 0.1), []
    search(4, lambda parts: tried.append(parts) or 0.0, len(earlier) + 9, 0, earlier)
    assert len(tried) == 9
    assert not set(tried) & set(earlier)


def test_without_optuna(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with refused(UnsupportedError, "tuning needs optuna", "pip install 'draftwing[lab]'", "--exits"):
        search(3, lambda parts: 0.0, 5)


# --- runs ------------------------------------------------------------------------------------------------------------


class Run:
    """A run in a folder with a given pace; ``stop_after`` trials it is interrupted."""

    def __init__(self, out, plain, texts, stop_after=None, **options):
        self.out, self.plain, self.texts, self.stop_after = out, plain, texts, stop_after
        self.options, self.progress, self.num_measured = options, [], 0

    def measure(self):
        self.num_measured += 1
        return self.texts, PACE

    def __call__(self):
        def on_progress(done, total, best):
            self.progress.append((done, total))
            if done == self.stop_after and len(self.progress) == done + 1:
                raise KeyboardInterrupt

        options = {"num_trials": 24, **self.options, "on_progress": on_progress}
        return tune(self.out, target_id(self.plain), self.measure, lambda: self.plain, **options)


def sets_of(out):
    lines = (out / FILE).read_text().split("\n")[1:-1]  # without the settings and an unfinished line
    return [(line["skip_attention"], line["skip_mlp"]) for line in map(json.loads, lines)]


def test_a_run_writes_the_best_set(plain, texts, tmp_path):
    run = Run(tmp_path / "out", plain, texts)
    found = run()
    recorded = Recorded(plain, texts, DEPTH)
    tried = [Parts.without(3, tuple(a), tuple(b)) for a, b in sets_of(tmp_path / "out")]
    speeds = [PACE.tokens_per_s(parts, recorded.accepted(parts))[0] for parts in tried]
    assert (found.finished, found.num_trials, len(set(tried))) == (True, 24, 24)
    assert found.best.tokens_per_s == max(speeds)
    assert LayerSet.read(tmp_path / "out").parts == found.best.parts == tried[speeds.index(max(speeds))]
    assert run.progress[-1] == (24, 24)
    again = Run(tmp_path / "out", plain, texts)  # nothing is left to do
    assert again().best == found.best
    assert again.num_measured == 0


@pytest.mark.parametrize("cut", [b"", b'{"skip_attention": [0'])
def test_a_stopped_run_resumes(cut, plain, texts, tmp_path):
    """After Ctrl-C, and after a kill in the middle of a line: the same sets as in one go, each tried once."""
    whole = Run(tmp_path / "whole", plain, texts)
    whole()
    first = Run(tmp_path / "parts", plain, texts, 7)
    found = first()
    assert (found.finished, found.num_trials) == (False, 7)
    assert LayerSet.read(tmp_path / "parts").parts == found.best.parts
    with (tmp_path / "parts" / FILE).open("ab") as file:
        file.write(cut)
    second = Run(tmp_path / "parts", plain, texts)
    assert second().finished
    assert (first.num_measured, second.num_measured) == (1, 0)
    assert second.progress[0] == (7, 24)
    assert len(set(map(str, sets_of(tmp_path / "parts")))) == 24
    assert sets_of(tmp_path / "parts")[:15] == sets_of(tmp_path / "whole")[:15]


def test_early_exits_alone_after_ctrl_c_before_any_set(plain, texts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path / "out", plain, texts, 0, only_exits=True)()
    assert not (tmp_path / "out" / "config.json").exists()
    found = Run(tmp_path / "out", plain, texts, only_exits=True)()
    assert found.num_trials == 2
    assert sets_of(tmp_path / "out") == [([1, 2], [1, 2]), ([2], [2])]
    assert found.best.parts in (Parts.first(3, 1), Parts.first(3, 2))


def test_files_of_another_run(plain, texts, tmp_path):
    out = tmp_path / "out"
    Run(out, plain, texts, only_exits=True)()
    with refused(ConfigError, FILE, "seed 0", "this one has 1", "another --out"):
        Run(out, plain, texts, only_exits=True, seed=1)()
    lines = (out / FILE).read_text().splitlines()
    unknown_layer = '{"skip_attention": [9], "skip_mlp": [], "accepted": [], "tokens_per_s": 1, "depth": 1}'
    for number, line in [(2, "{}"), (2, "[1]"), (2, "nothing"), (2, unknown_layer), (1, "{}"), (1, '{"about": {}}')]:
        (out / FILE).write_text("\n".join([*lines[: number - 1], line, ""]))
        with refused(CheckpointError, f"line {number}", "delete the file"):
            Run(out, plain, texts, only_exits=True)()


def test_a_full_disk(plain, texts, tmp_path, monkeypatch):
    """In the middle of a line: the file keeps whole lines, and the run resumes when there is room."""
    room = [3]
    Run(tmp_path / "out", plain, texts)()
    whole = sets_of(tmp_path / "out")
    opened = Path.open

    class Full:
        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self._file.close()

        def write(self, data):
            room[0] -= 1
            if room[0] < 0:
                self._file.write(data[:9])
                raise OSError(errno.ENOSPC, "No space left on device")
            return self._file.write(data)

    def limited(path, mode="r", *args, **options):
        found = opened(path, mode, *args, **options)
        return Full(found) if mode == "ab" else found

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", limited)
        with refused(CheckpointError, FILE, "cannot be written to", "the disk is full", "earlier records are kept"):
            Run(tmp_path / "full", plain, texts)()
    assert sets_of(tmp_path / "full") == whole[:2]
    assert Run(tmp_path / "full", plain, texts)().num_trials == 24


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
    assert (found["trials"], found["finished"], found["out"]) == (20, True, str(out))
    assert found["measured"]["tau"] >= 1
    assert LayerSet.read(out).parts == Parts.without(3, tuple(found["skip_attention"]), tuple(found["skip_mlp"]))
    shown = CliRunner().invoke(cli.app, [*args, "21", "--no-measure"])
    assert shown.exit_code == 0, shown.output
    assert "tokens/s expected" in shown.output
    assert f"wrote {out}" in shown.output.replace("\n", "")
    options = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 5}
    texts = [load(chatty, draft, budget=Budget(3)).generate("def", **options)[0].text for draft in ("none", out)]
    assert texts[0] == texts[1]
