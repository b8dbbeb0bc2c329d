"""The training loop: stopped, killed, shared by two processes or out of disk, it ends where an unbroken run does."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from conftest import refused
from draftwing.errors import CheckpointError, ConfigError, NumericsError
from draftwing.methods.eagle import initialise
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.methods.objectives import OBJECTIVES
from draftwing.models.lean import LeanTarget
from draftwing.train import trainer as trainer_module
from draftwing.train.data import Batch, Batches, Corpus, Example
from draftwing.train.features import FeatureBatch, OnlineFeatures, scored
from draftwing.train.options import TrainOptions
from draftwing.train.session import RunFiles, prepare
from draftwing.train.trainer import CHECKPOINT, Trainer, noise_seed, read_checkpoint

METRICS = "metrics.jsonl"
RANKS_TIMEOUT = 280  # seconds: on a busy machine most of it is imports


def toy_corpus() -> Corpus:
    """Dialogues of 2 to 16 tokens, and a document. Its batches of 48 tokens are few, so that epochs end often."""
    rng = np.random.default_rng(0)
    examples = []
    for length in (2, 2, 16, 9, 12, 5, 16, 16, 16):
        mask = rng.random(length) < 0.7
        mask[0], mask[-1] = False, True
        examples.append(Example(rng.integers(3, 61, length, dtype=np.int32), mask))
    return Corpus(tuple(examples), rng.integers(3, 61, 70, dtype=np.int32), np.asarray([0]), prefix=(1,))


def make(
    folder: Path, out: Path, source=None, dtype=torch.float32, evaluate=None, on_progress=None, **options
) -> Trainer:
    """A run over a random target; everything is made anew, as a new process would."""
    options = TrainOptions(
        **{"precision": "no", "iterations": 8, "save_every": 3, "max_length": 16, "tokens_per_batch": 48, **options}
    )
    torch.manual_seed(options.seed)
    target = LeanTarget.from_folder(folder, dtype, prepack=False)
    version = 3 if options.method == "eagle3" else 1
    shape = {"inputs": options.inputs, "fc_norm": options.fc_norm}
    config = EagleConfig.for_target(version, target.config, options.draft_vocab_size, **shape)
    ids = torch.arange(options.draft_vocab_size) + 3 if config.has_draft_vocab else None
    net = EagleNet(config, target.embedding, target.head, ids, dtype)
    source = source or OnlineFeatures(
        target, Batches(toy_corpus(), options.tokens_per_batch, options.max_length, options.seed), config.taps
    )
    initialise(net, target.head, [source.batch(0)])
    accelerator = Accelerator(mixed_precision="no", cpu=True)
    trainer = Trainer(
        net, target.head, net.target_ids, source, options, out, evaluate=evaluate, accelerator=accelerator
    )
    trainer.on_progress = on_progress
    return trainer


def measure(net: EagleNet) -> dict[str, float]:
    """Stands for an evaluation: it shows which weights it was given."""
    return {"val_loss": float(sum(parameter.double().abs().sum() for parameter in net.parameters()))}


def stop_at(trainer: Trainer, iteration: int) -> Trainer:
    """As a signal handler would stop it."""
    trainer.on_progress = lambda progress: setattr(trainer, "stopping", progress.iteration == iteration)
    return trainer


def metrics_of(out: Path) -> list[dict]:
    """Its lines, but for the speeds."""
    lines = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in lines]


def assert_same(one, other, where: str = "checkpoint", **tolerance) -> None:
    """Bit for bit, unless a tolerance is given."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one.keys() - {"seconds"}:
            assert_same(one[key], other[key], f"{where}.{key}", **tolerance)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}.{index}", **tolerance)
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(
            one, other, msg=lambda text: f"{where}: {text}", **(tolerance or {"rtol": 0, "atol": 0})
        )
    elif isinstance(one, float) and tolerance:
        assert one == pytest.approx(other, rel=tolerance["rtol"]), where
    else:
        assert one == other, where


def assert_same_run(one: Path, other: Path, **tolerance) -> None:
    """Net, optimizer and counters; every line of the metrics; the head."""
    assert_same(read_checkpoint(one), read_checkpoint(other), **tolerance)
    assert_same(metrics_of(one), metrics_of(other), "metrics", **tolerance)
    if not tolerance:
        for name in ("model.safetensors", "config.json"):
            assert (one / "head" / name).read_bytes() == (other / "head" / name).read_bytes()


@pytest.fixture(autouse=True)
def _own_accelerator():
    """Its state is one for the process, and other tests may want another precision."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture
def folder(folder_of) -> Path:
    return folder_of("llama")


@pytest.fixture(scope="module")
def unbroken(folder_of, tmp_path_factory) -> Path:
    """The folder of a whole run with the options of ``make``."""
    AcceleratorState._reset_state(True)
    out = tmp_path_factory.mktemp("unbroken")
    make(folder_of("llama"), out).run()
    return out


# --- resuming --------------------------------------------------------------------------------------------------------

RUNS = {
    "adamw": {"method": "eagle3", "draft_vocab_size": 30},
    "noise-accumulation": {"method": "eagle1", "accumulation": 2},
    "muon-thin": {"method": "hass", "optimizer": "muon", "later_share": 0.5},
}


@pytest.mark.parametrize("run", RUNS)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(run, folder, tmp_path):
    """Wherever it was stopped: before the first checkpoint, on one, after one, more than once."""
    options = {**RUNS[run], "evaluate": measure, "eval_every": 2, "iterations": 8}
    whole = make(folder, tmp_path / "unbroken", **options).run()
    for stop in (1, 3, 7) if run == "adamw" else (4,):
        progress = stop_at(make(folder, tmp_path / "stopped", **options), stop).run()
        assert progress.iteration == stop == read_checkpoint(tmp_path / "stopped")["iteration"]
    resumed = make(folder, tmp_path / "stopped", **options).run()
    assert resumed.iteration == whole.iteration == 8
    assert_same_run(tmp_path / "stopped", tmp_path / "unbroken")
    lines = metrics_of(tmp_path / "stopped")
    assert [line["iteration"] for line in lines] == list(range(1, 9))
    assert [line["iteration"] for line in lines if "val_loss" in line] == [2, 4, 6, 8]
    again = make(folder, tmp_path / "stopped", **options).run()  # there is nothing left to do
    assert (again.iteration, again.metrics) == (8, {})
    assert_same_run(tmp_path / "stopped", tmp_path / "unbroken")


def test_every_batch_is_read_once_and_in_order(folder, tmp_path):
    read = []
    for stop in (3, 0):
        trainer = make(folder, tmp_path, accumulation=2)
        batch = trainer.source.batch
        trainer.source.batch = lambda number, *rank, batch=batch: (read.append(number), batch(number, *rank))[1]
        stop_at(trainer, stop).run()
    assert read == [0, *range(16)]  # the first batch is looked at once before: see ``train.units``


def test_a_head_knows_the_last_evaluation_before_it_was_resumed(folder, tmp_path):
    for stop in (7, 8):
        stop_at(make(folder, tmp_path, evaluate=measure, eval_every=3, iterations=9), stop).run()
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["draftwing"]["training"]["held_out"]["iteration"] == 6


@pytest.mark.parametrize("saved", [0, 6])
def test_lines_that_the_checkpoint_lacks_are_dropped(saved, folder, unbroken, tmp_path):
    """A killed run may have logged more than it saved, and half a line; even before its first checkpoint."""
    if saved:
        stop_at(make(folder, tmp_path / "killed"), saved).run()
    (tmp_path / "killed").mkdir(exist_ok=True)
    lines = (unbroken / METRICS).read_text().splitlines()
    with (tmp_path / "killed" / METRICS).open("a") as file:
        file.write(lines[saved].replace('"loss": ', '"loss": 1') + "\n" + lines[saved + 1][:20])
    make(folder, tmp_path / "killed").run()
    assert_same_run(tmp_path / "killed", unbroken)


def test_a_run_killed_right_after_a_checkpoint_has_its_line(folder, unbroken, tmp_path):
    trainer = make(folder, tmp_path / "killed")
    save = trainer.save

    def save_and_die():
        save()
        raise KeyboardInterrupt

    trainer.save = save_and_die
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    make(folder, tmp_path / "killed").run()
    assert_same_run(tmp_path / "killed", unbroken)


@pytest.fixture(scope="module")
def finished(folder_of, tmp_path_factory) -> Path:
    AcceleratorState._reset_state(True)
    out = tmp_path_factory.mktemp("finished")
    make(folder_of("llama"), out, iterations=2).run()
    return out


OTHER = {
    "iterations": 3, "lr": 2e-3, "optimizer": "muon", "method": "hass", "objective": "tv", "unroll_steps": 2,
    "later_share": 0.5, "draft_vocab_size": 40, "fc_norm": True, "accumulation": 2, "clip": 1.0,
    "warmup": 0.1, "tokens_per_batch": 64, "max_length": 12, "seed": 1,
}  # fmt: skip


def test_other_options_are_another_run(folder, finished):
    before = (finished / CHECKPOINT).read_bytes()
    for name, value in OTHER.items():
        with refused(ConfigError, f"holds a run with {name} ", f", and this one has {value!r}: choose another --out"):
            make(folder, finished, **{"iterations": 2, name: value}).run()
    assert (finished / CHECKPOINT).read_bytes() == before


def test_how_often_a_run_reports_may_change(folder, finished):
    often = {"eval_every": 1, "save_every": 1, "eval_prompts": 1, "eval_tokens": 9, "eval_depth": 3}
    assert make(folder, finished, iterations=2, **often).run().iteration == 2


def test_two_runs_never_train_into_one_folder(folder, unbroken, tmp_path):
    """Both would append to the metrics, and one replace the other's checkpoint."""
    tried = []

    def second(progress):
        if not tried:
            tried.append(progress.iteration)
            with pytest.raises(CheckpointError, match=rf"another run \(process {os.getpid()}\) is writing here"):
                make(folder, tmp_path / "out").run()

    make(folder, tmp_path / "out", on_progress=second).run()
    assert tried == [1]
    assert_same_run(tmp_path / "out", unbroken)
    assert len((tmp_path / "out" / METRICS).read_text().splitlines()) == 8


# --- killed ----------------------------------------------------------------------------------------------------------


def launch(job: str, *args: Path, **environment: str) -> BaseProcess:
    """Another process, forked from one that has imported everything and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "transformers", "torch._dynamo", "draftwing.train.session"])
    process = context.Process(target=main, args=(job, args, environment))
    process.start()
    return process


def finish(process: BaseProcess) -> None:
    process.join(RANKS_TIMEOUT)
    assert process.exitcode == 0  # what it said is among the output


def test_a_killed_run_ends_as_an_unbroken_one(folder, tmp_path):
    killed, unbroken = tmp_path / "killed", tmp_path / "unbroken"
    process = launch("train", folder, killed)
    lines, deadline = 0, time.monotonic() + RANKS_TIMEOUT
    while lines < 7 and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
        lines = (killed / METRICS).read_text().count("\n") if (killed / METRICS).exists() else 0
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert 0 < read_checkpoint(killed)["iteration"] < 24
    for out in (killed, unbroken):
        make(folder, out, **LONG).run()
    assert_same_run(killed, unbroken)
    assert len(metrics_of(killed)) == 24


# --- two processes ---------------------------------------------------------------------------------------------------


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


SHARED = {
    "method": "eagle3", "unroll_steps": 2, "draft_vocab_size": 30, "accumulation": 2, "save_every": 100,
}  # fmt: skip
# Random numbers belong to the rows of a batch, so they do not depend on the number of processes.
DRAWN = {"method": "eagle1", "unroll_steps": 2, "later_share": 0.5, "accumulation": 2}


def test_two_processes_train_as_one(folder, tmp_path):
    """Losses and weights are equal, a stop of one process stops both, and both end a timed run after the same update.

    A run may also be stopped and resumed with another number of processes.
    """
    drawn = {name: make(folder, tmp_path / name, dtype=torch.float64, **DRAWN) for name in ("drawn", "grown")}
    drawn["drawn"].run()
    assert stop_at(drawn["grown"], 3).run().iteration == 3
    one = make(folder, tmp_path / "one", dtype=torch.float64, **SHARED)
    sizes = [one.source.text(number).ids.shape for number in range(16)]
    assert any(rows < 2 for rows, _ in sizes)  # a batch of which one process has nothing
    one.run()
    port = free_port()
    ranks = [
        launch(
            "ranks", folder, tmp_path, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=port,
            LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            finish(rank)
    finally:
        for rank in ranks:
            rank.kill()
    # In float64, so that Adam cannot make much of a last bit.
    assert_same_run(tmp_path / "two", tmp_path / "one", rtol=1e-7, atol=1e-9)
    assert_same_run(tmp_path / "two-stopped", tmp_path / "two", rtol=1e-7, atol=1e-9)
    assert_same_run(tmp_path / "grown", tmp_path / "drawn", rtol=1e-7, atol=1e-9)
    assert read_checkpoint(tmp_path / "shrunk")["iteration"] == 4
    make(folder, tmp_path / "shrunk", dtype=torch.float64, **DRAWN).run()
    assert_same_run(tmp_path / "shrunk", tmp_path / "drawn", rtol=1e-7, atol=1e-9)
    ends = [json.loads((tmp_path / f"timed-{rank}.json").read_text()) for rank in range(2)]
    assert ends[0] == ends[1]
    assert ends[0]["iteration"] == ends[0]["iterations"] == len(metrics_of(tmp_path / "timed")) >= 7


def run_rank(folder: Path, out: Path) -> None:
    """What each of the two processes does."""
    rank = int(os.environ["RANK"])
    trainer = make(folder, out / "two", dtype=torch.float64, **SHARED)
    assert trainer.accelerator.num_processes == 2
    trainer.run()
    stopped = make(folder, out / "two-stopped", dtype=torch.float64, **SHARED)
    if rank == 1:  # which has no progress to report, and is told all the same
        batch = stopped.source.batch
        stopped.source.batch = lambda *at: (setattr(stopped, "stopping", stopped.iteration == 2), batch(*at))[1]
    assert stopped.run().iteration == 3
    make(folder, out / "two-stopped", dtype=torch.float64, **SHARED).run()
    make(folder, out / "grown", dtype=torch.float64, **DRAWN).run()
    stop_at(make(folder, out / "shrunk", dtype=torch.float64, **DRAWN), 4).run()
    # A net of which a part is never read: nobody may wait for its gradient.
    assert make(folder, out / "token", inputs="token", fc_norm=True, iterations=3).run().iteration == 3
    # Clocks that do not agree.
    trainer_module.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() * (1 + rank))
    progress = make(folder, out / "timed", iterations=None, minutes=0.02).run()
    (out / f"timed-{rank}.json").write_text(
        json.dumps({"iteration": progress.iteration, "iterations": progress.iterations})
    )


# --- what goes wrong -------------------------------------------------------------------------------------------------


class Changed:
    """A source whose batch of one number is another."""

    def __init__(self, source, number: int, change) -> None:
        self._source, self._number, self._change = source, number, change

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> FeatureBatch:
        found = self._source.batch(number, rank, world_size)
        return self._change(found) if number == self._number else found


def test_a_loss_that_is_not_finite_ends_the_run(folder, unbroken, tmp_path):
    """The last checkpoint is left, and with data that is sound the run goes on from there."""

    def spoiled(found: FeatureBatch) -> FeatureBatch:
        features = found.features.clone()
        features[0, 0, 3] = float("nan")
        return replace(found, features=features)

    trainer = make(folder, tmp_path / "spoiled")
    trainer.source = Changed(trainer.source, 4, spoiled)
    with pytest.raises(
        NumericsError, match=r"the loss is nan at iteration 5: lower --lr, or .* checkpoint in .* is whole"
    ):
        trainer.run()
    state = read_checkpoint(tmp_path / "spoiled")
    assert state["iteration"] == 3
    assert all(tensor.isfinite().all() for tensor in state["net"].values())
    make(folder, tmp_path / "spoiled").run()
    assert_same_run(tmp_path / "spoiled", unbroken)


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("how", ["replace", "device"])
def test_a_full_disk_leaves_the_older_checkpoint(how, folder, unbroken, tmp_path, monkeypatch):
    out = tmp_path / "full"
    stop_at(make(folder, out), 3).run()
    if how == "device" and not os.path.exists("/dev/full"):
        pytest.skip("the system has no /dev/full")
    with monkeypatch.context() as patch:
        if how == "device":
            (out / (CHECKPOINT + ".partial")).symlink_to("/dev/full")
        else:
            replace_file = os.replace
            patch.setattr(os, "replace", lambda a, b: (no_space if b.name == CHECKPOINT else replace_file)(a, b))
        trainer = make(folder, out)
        with pytest.raises(CheckpointError, match=r"No space left.*disk is full: make room.* before this one is whole"):
            trainer.run()
    assert sorted(path.name for path in out.iterdir()) == [CHECKPOINT, "head", METRICS]
    assert read_checkpoint(out)["iteration"] == 3
    make(folder, out).run()
    assert_same_run(out, unbroken)


def test_folders_that_cannot_hold_a_run(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file: cannot be written \(.*part of the path is a file"):
        make(folder, tmp_path / "file").run()
    (tmp_path / METRICS).mkdir()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: cannot be written \("):
        make(folder, tmp_path).run()
    (tmp_path / "cut").mkdir()
    for content in (b"PK\x03\x04 half a checkpoint", b""):
        (tmp_path / "cut" / CHECKPOINT).write_bytes(content)
        with pytest.raises(CheckpointError, match=r"checkpoint\.pt cannot be read \(\w.*delete it to restart this run"):
            make(folder, tmp_path / "cut").run()


def smaller_moments(state):
    moments = state["optimizers"][0]["state"]
    moments[0]["exp_avg"] = torch.zeros(3)


DAMAGES = [
    lambda state: state.pop("net"), lambda state: state.update(net={}), lambda state: state.update(net=5),
    lambda state: state.update(options=[1]), lambda state: state.update(iteration="3"),
    lambda state: state.update(iteration=-1), lambda state: state.update(seconds=float("nan")),
    lambda state: state.update(replanned=10**9), lambda state: state.update(calibration={"other": 3}),
    lambda state: state.update(optimizers=[]), lambda state: state.update(optimizers=[5]), smaller_moments,
]  # fmt: skip


def test_checkpoints_of_something_else(finished, folder, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    for damage in DAMAGES:
        state = read_checkpoint(finished)
        damage(state)
        torch.save(state, run / CHECKPOINT)
        with pytest.raises(CheckpointError, match=r"choose another --out|found"):
            make(folder, run, iterations=2).run()
    torch.save([1], tmp_path / CHECKPOINT)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        make(folder, tmp_path).run()
    (tmp_path / CHECKPOINT).unlink()
    os.mkfifo(tmp_path / CHECKPOINT)
    with pytest.raises(CheckpointError, match="not a regular file"):
        make(folder, tmp_path).run()


# --- what is trained -------------------------------------------------------------------------------------------------


class Toy:
    """Texts in which each token has one successor, told by a target that is nearly sure of it."""

    def __init__(self, folder: Path, num_taps: int) -> None:
        self._embedding = LeanTarget.from_folder(folder, torch.float32, prepack=False).embedding
        self._successor = torch.randperm(61, generator=torch.Generator().manual_seed(0))
        self._num_taps = num_taps

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> FeatureBatch:
        texts = [torch.randint(61, (8,), generator=torch.Generator().manual_seed(number))]
        for _ in range(9):
            texts.append(self._successor[texts[-1]])
        ids = torch.stack(texts, 1)
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, 0] = False
        last = self._embedding(ids)
        logits = torch.nn.functional.one_hot(self._successor[ids], 61) * 9.0
        return FeatureBatch(Batch(ids, mask, torch.full((8,), 10)), last.repeat(1, 1, self._num_taps), last, logits)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_loss_falls_on_what_can_be_learnt(optimizer, folder, tmp_path):
    options = {"optimizer": optimizer, "lr": {"adamw": 2e-2, "muon": 1e-2}[optimizer], "unroll_steps": 1}
    make(folder, tmp_path, source=Toy(folder, 3), iterations=40, save_every=40, **options).run()
    lines = metrics_of(tmp_path)
    assert lines[0]["loss"] > 4.0
    assert np.mean([line["loss"] for line in lines[-5:]]) < 0.3 * lines[0]["loss"]
    assert min(lines[-1]["agreement"]) > 0.9 > 0.3 > max(lines[0]["agreement"])


def test_the_rate_warms_up_and_falls_to_a_fiftieth(folder, tmp_path):
    make(folder, tmp_path, iterations=20, warmup=0.2, lr=1e-3, save_every=20, unroll_steps=1).run()
    rates = [line["lr"] for line in metrics_of(tmp_path)]
    assert rates[:5] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])
    through = np.arange(16) / 16
    assert rates[4:] == pytest.approx(1e-3 * (0.02 + 0.98 * (1 + np.cos(np.pi * through)) / 2))


class Slow:
    """A source, and the clock of its run: a batch takes 1 s, and ``slow`` seconds from the tenth on."""

    def __init__(self, source, slow: float) -> None:
        self._source, self._slow, self.now = source, slow, 0.0

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> FeatureBatch:
        self.now += 1.0 if number < 10 else self._slow
        return self._source.batch(number, rank, world_size)


@pytest.mark.parametrize(("slow", "iterations"), [(1.0, 30), (2.0, 21)])
def test_a_timed_run_takes_its_time(slow, iterations, folder, tmp_path, monkeypatch):
    """Half a minute: the number of updates is estimated again, so a run that becomes slower makes fewer."""
    source = Slow(Toy(folder, 3), slow)
    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: source.now))
    options = {"iterations": None, "minutes": 0.5, "lr": 1e-3, "save_every": 100, "unroll_steps": 1}
    progress = make(folder, tmp_path, source=source, **options).run()
    assert progress.iteration == progress.iterations == iterations
    rates = [line["lr"] for line in metrics_of(tmp_path)]
    assert rates[:6] == pytest.approx([1e-3 * number / 20 for number in range(1, 7)])  # while the speed is unknown
    assert rates[-1] < 1e-4


def test_the_loss_adds_up_the_means_of_its_steps(folder, tmp_path, monkeypatch):
    """A step's weight is a power of the objective's decay; micro-batches count equally."""
    monkeypatch.setitem(OBJECTIVES, "half", replace(OBJECTIVES["eagle3"], decay=0.5))
    monkeypatch.setitem(OBJECTIVES, "whole", replace(OBJECTIVES["eagle3"], decay=1.0))
    toy = Toy(folder, 3)
    source = SimpleNamespace(batch=lambda number, *_: toy.batch(0))

    def loss(objective, unroll_steps, **options):
        out = tmp_path / f"{objective}-{unroll_steps}-{len(options)}"
        options |= {"objective": objective, "unroll_steps": unroll_steps}
        make(folder, out, source=source, iterations=1, **options).run()
        return metrics_of(out)[0]["loss"]

    first, both = loss("whole", 1), loss("whole", 2)
    assert loss("half", 1) == pytest.approx(first)
    assert loss("half", 2) == pytest.approx(first + 0.5 * (both - first))
    assert loss("whole", 2, accumulation=2) == pytest.approx(both)


def test_no_two_batches_have_the_same_noise():
    seeds = {noise_seed(seed, number) for seed in range(3) for number in range(1000)}
    assert len(seeds) == 3000


@pytest.mark.parametrize("ids", [[], [[7]], [[7, 9]]], ids=["no rows", "one token", "two tokens"])
def test_batches_without_an_entry_change_nothing_else(ids, folder, tmp_path):
    """As the last batch of an epoch may be, for one process; the others then train alone."""
    trainer = make(folder, tmp_path, iterations=2, unroll_steps=2)
    target = LeanTarget.from_folder(folder, torch.float32, prepack=False)
    tokens = torch.tensor(ids, dtype=torch.int64).view(len(ids), -1 if ids else 1)
    empty = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), torch.full((len(ids),), tokens.shape[1]))
    trainer.source = Changed(trainer.source, 0, lambda found: scored(target, empty, trainer.net.config.taps))
    before = {name: p.detach().clone() for name, p in trainer.net.named_parameters()}

    def unmoved(progress):
        if progress.iteration == 1:
            assert progress.metrics["loss"] == 0
            assert_same({name: p.detach() for name, p in trainer.net.named_parameters()}, before)

    trainer.on_progress = unmoved
    assert trainer.run().metrics["loss"] > 0


LONG = {"method": "eagle1", "iterations": 24, "save_every": 3}


def main(job: str, args: tuple[Path, ...], environment: dict[str, str]) -> None:
    """In a process of its own."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    if job == "ranks":
        run_rank(*args)
    else:
        make(*args, on_progress=lambda progress: time.sleep(0.1), **LONG).run()


@pytest.mark.parametrize("package", ["accelerate", "matplotlib"])
def test_a_missing_package_is_named_before_any_work(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # its import now fails
    with refused(ConfigError, f"training needs the package {package}", "pip install 'draftwing[train]'"):
        prepare(RunFiles("no-such-model", [tmp_path]), TrainOptions("eagle3", iterations=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()
