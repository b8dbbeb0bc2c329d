"""Cached features: the online run's own batches, gone on with after a kill, and never another target's."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from conftest import TEXTS, add_tokenizer, refused
from draftwing.cli import main as cli
from draftwing.errors import ConfigError, DataError, NumericsError
from draftwing.formats.identity import target_id
from draftwing.models.lean import LeanTarget
from draftwing.train import feature_cache as store
from draftwing.train.data import Batches, Corpus, Example
from draftwing.train.feature_cache import CachedFeatures, CacheInfo, FeatureCache, estimate, write_cache
from draftwing.train.features import OnlineFeatures
from draftwing.train.options import TrainOptions
from draftwing.train.session import RunFiles, prepare
from short_runs import three_updates

TAPS = (0, 1, 2)
SHARD = 20_000
TOKENS = 120
LENGTH = 40


def load(folder_of, dtype=torch.float32, **changes):
    return LeanTarget.from_folder(folder_of("llama", **changes), dtype, prepack=False, name="tiny")


@pytest.fixture(scope="module")
def target(folder_of):
    return load(folder_of)


@pytest.fixture(scope="module")
def corpus():
    rng = np.random.default_rng(0)
    examples = []
    for _ in range(12):
        ids = np.asarray([1, *rng.integers(3, 61, rng.integers(4, 60))], dtype=np.int32)
        examples.append(Example(ids, np.arange(len(ids)) >= 3))
    stream = rng.integers(3, 61, 300).astype(np.int32)
    return Corpus(tuple(examples), stream, np.asarray([0]), (1,))


def batches_of(corpus, seed=5, tokens=TOKENS):
    return Batches(corpus, tokens, LENGTH, seed)


def write(folder, target, corpus, taps=TAPS, dtype=torch.float32, **options):
    batches = options.pop("batches", None) or batches_of(corpus)
    options = {"identity": target_id(target), "dtype": dtype, "shard_bytes": SHARD, **options}
    return write_cache(folder, target, batches, taps, **options)


@pytest.fixture(scope="module")
def exact(target, corpus, tmp_path_factory):
    """A cache in the target's own precision. Tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("cache") / "exact"
    write(folder, target, corpus)
    return folder


def test_two_runs_never_write_one_cache(target, corpus, tmp_path):
    tried = []

    def second(done, total):
        if not tried:
            tried.append(done)
            with refused(DataError, "another run (process ", "is writing here"):
                write(tmp_path / "cache", target, corpus)

    write(tmp_path / "cache", target, corpus, on_progress=second)
    assert len(tried) == 1
    assert not [path.name for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]


@pytest.fixture
def copy(exact, tmp_path):
    return shutil.copytree(exact, tmp_path / "copy")


def cached(folder, taps=TAPS, tokens=TOKENS, seed=5, **options):
    return CachedFeatures(FeatureCache(folder), taps, tokens, seed, **options)


def rows_of(found):
    return sorted(
        (*row[:length].tolist(), *last[:length].flatten().tolist())
        for row, last, length in zip(found.batch.ids, found.last, found.batch.lengths.tolist(), strict=True)
    )


# --- what is read is what the target says ----------------------------------------------------------------------------


@pytest.mark.parametrize("taps", [TAPS, (2, 0), (3,), ()])
def test_the_first_epoch_is_the_online_one(target, corpus, exact, taps):
    online, source = OnlineFeatures(target, batches_of(corpus), taps), cached(exact, taps)
    assert source.num_batches_per_epoch == online.num_batches_per_epoch > 3
    assert source.num_tokens_per_epoch == batches_of(corpus).num_tokens_per_epoch
    for number in range(online.num_batches_per_epoch):
        found, expected = source.batch(number), online.batch(number)
        real = expected.batch.real
        for name in ("ids", "mask", "lengths"):
            assert torch.equal(getattr(found.batch, name), getattr(expected.batch, name))
        assert torch.equal(found.features[real], expected.features[real])
        assert torch.equal(found.last[real], expected.last[real])
        assert torch.equal(found.best[real], expected.logits[real].argmax(-1))
        assert not found.features[~real].any()
        assert (found.features.shape, found.features.dtype) == (expected.features.shape, expected.features.dtype)
        assert found.logits is None


def test_every_epoch_has_every_row_in_another_order(exact):
    source = cached(exact, seed=2)
    num = source.num_batches_per_epoch
    epochs = [[source.batch(epoch * num + i) for i in range(num)] for epoch in range(2)]
    every = [sorted(row for found in epoch for row in rows_of(found)) for epoch in epochs]
    assert every[0] == every[1]
    assert [rows_of(found) for found in epochs[0]] != [rows_of(found) for found in epochs[1]]
    resumed = cached(exact, seed=2).batch(num + 1)
    assert torch.equal(resumed.batch.ids, epochs[1][1].batch.ids)
    assert torch.equal(resumed.features, epochs[1][1].features)
    other = cached(exact, seed=3, tokens=200)
    again = sorted(row for i in range(other.num_batches_per_epoch) for row in rows_of(other.batch(i)))
    assert again == every[0]
    parts = [row for rank in range(3) for row in rows_of(source.batch(1, rank, 3))]
    assert sorted(parts) == rows_of(source.batch(1))


def test_bfloat16_is_half_as_large_and_close(target, corpus, exact, tmp_path):
    write(tmp_path, target, corpus, dtype=torch.bfloat16)
    found, expected = cached(tmp_path).batch(0), cached(exact).batch(0)
    assert found.features.dtype == torch.float32
    assert torch.allclose(found.features, expected.features, rtol=2**-8, atol=0)
    assert cached(tmp_path, dtype=torch.float64).batch(0).last.dtype == torch.float64
    size = estimate(target, batches_of(corpus), TAPS)
    files = list(tmp_path.glob("*.safetensors"))
    assert size.num_bytes <= sum(file.stat().st_size for file in files) <= size.num_bytes + 2000 * len(files)
    assert str(size).startswith(f"{batches_of(corpus).num_tokens_per_epoch} tokens, ")
    assert estimate(target, batches_of(corpus), TAPS, torch.float32).num_bytes > 1.9 * size.num_bytes
    # The last hidden state is kept once, whether it is a tap or not.
    assert estimate(target, batches_of(corpus), (3,)) == estimate(target, batches_of(corpus), ())
    assert CacheInfo.new(target, (3, 1), target_id(target)).states == (1, 3)  # readers find it at the end


def test_rows_without_an_answer_are_cut_off(exact):
    """Those of dialogues, whose first three tokens are a question."""
    whole = FeatureCache(exact)
    cut = whole.cut(3)
    assert 0 < len(cut.lengths) < len(whole.lengths)
    assert all(row.mask.any() and len(row.ids) <= 3 for row in cut.corpus.examples)
    assert len(whole.cut(4).lengths) == len(whole.lengths)


def test_a_cache_knows_its_ids(target, corpus, exact):
    online, batches = [], batches_of(corpus)
    for batch in map(batches.batch, range(batches.num_batches_per_epoch)):
        online += [tuple(ids[mask].tolist()) for ids, mask in zip(batch.ids, batch.mask, strict=True)]
    found = FeatureCache(exact).corpus
    assert found.num_tokens == batches.num_tokens_per_epoch
    assert sorted(tuple(each.ids[each.mask].tolist()) for each in found.examples) == sorted(online)
    FeatureCache(exact).check(target, target_id(target))


# --- training on it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["eagle1", "eagle3"])
def test_training_on_a_cache_is_training_online(method, folder_of, target, corpus, exact, tmp_path):
    batches = batches_of(corpus)
    taps = (3,) if method == "eagle1" else (2, 1, 0)
    online, losses = three_updates(method, target, OnlineFeatures(target, batches, taps), tmp_path / "online", LENGTH)
    weights, same = three_updates(method, target, cached(exact, taps), tmp_path / "exact", LENGTH)
    assert torch.allclose(weights, online, rtol=0, atol=1e-6)
    assert torch.allclose(same, losses, rtol=1e-5)
    write(tmp_path / "bf16", target, corpus, dtype=torch.bfloat16)
    weights, close = three_updates(method, target, cached(tmp_path / "bf16", taps), tmp_path / "rounded", LENGTH)
    assert torch.allclose(close, losses, rtol=5e-3)
    assert (weights - online).abs().mean() < 0.1 * 3e-3  # three updates of at most 1e-3
    # A target in bfloat16 loses nothing in a cache of bfloat16.
    rounded = load(folder_of, torch.bfloat16)
    write(tmp_path / "own", rounded, corpus, dtype=torch.bfloat16)
    found = cached(tmp_path / "own", taps, dtype=torch.bfloat16).batch(1)
    expected = OnlineFeatures(rounded, batches, taps).batch(1)
    assert torch.equal(found.features[expected.batch.real], expected.features[expected.batch.real])


# --- stopped and gone on with ----------------------------------------------------------------------------------------


class Killed(Exception):
    pass


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_killed_run_goes_on(target, corpus, exact, tmp_path, monkeypatch):
    calls = []

    def kill(done, total):
        calls.append((done, total))
        if len(calls) == 5:
            raise Killed

    with pytest.raises(Killed):
        write(tmp_path, target, corpus, on_progress=kill)
    kept = contents(tmp_path)
    assert 0 < len(kept) < len(contents(exact)) - 1
    assert set(kept.items()) < set(contents(exact).items())
    with refused(DataError, "an unfinished cache: run the same command again"):
        FeatureCache(tmp_path)
    (tmp_path / f"{max(contents(exact))}.partial").write_bytes(b"half of a shar")
    ran = []
    score = target.score
    monkeypatch.setattr(target, "score", lambda ids, taps: ran.append(len(ids)) or score(ids, taps))
    progress = []
    done = write(tmp_path, target, corpus, on_progress=lambda *found: progress.append(found))
    assert done.num_kept == len(kept)
    assert len(ran) == 1 + len(progress) < 1 + batches_of(corpus).num_batches_per_epoch  # one looks at the weights
    total = batches_of(corpus).num_tokens_per_epoch
    assert progress[-1] == (total, total)
    assert contents(tmp_path) == contents(exact)
    ran.clear()
    assert write(tmp_path, target, corpus).num_kept == done.num_shards
    assert len(ran) == 1


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_ctrl_c_loses_one_batch_at_most(stop, target, corpus, exact, tmp_path):
    seen = []

    def interrupt(done, total):
        seen.append(done)
        if len(seen) == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, target, corpus, on_progress=interrupt)
    progress = []
    write(tmp_path, target, corpus, on_progress=lambda *amounts: progress.append(amounts))
    assert progress[0][0] > seen[-1]
    assert len(progress) == batches_of(corpus).num_batches_per_epoch - stop
    rows, cached = FeatureCache(exact), FeatureCache(tmp_path)
    assert len(rows.lengths) == len(cached.lengths)
    for number in range(len(rows.lengths)):
        assert torch.equal(rows.states(number)[0], cached.states(number)[0])


def test_what_is_missing_is_made_again(target, corpus, exact, copy):
    shards = sorted(copy.glob("*.safetensors"))
    shards[1].unlink()
    with refused(DataError, str(shards[1]), "found none: run the `draftwing data cache`"):
        FeatureCache(copy)
    assert write(copy, target, corpus).num_kept == len(shards) - 1
    assert contents(copy) == contents(exact)
    shards[2].write_bytes(shards[2].read_bytes()[:-100])
    for use in (lambda: FeatureCache(copy), lambda: write(copy, target, corpus)):
        with refused(DataError, str(shards[2]), "a damaged one", "delete it, and run"):
            use()
    shards[2].unlink()
    write(copy, target, corpus)
    assert contents(copy) == contents(exact)


def test_no_room_is_known_before_anything_is_written(target, corpus, exact, copy, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda folder: usage)
    size = estimate(target, batches_of(corpus), TAPS, torch.float32)
    with refused(DataError, f"needs {size.num_bytes:,} bytes", "has 1,000 bytes (1.0 kB) free: make room"):
        write(tmp_path / "new", target, corpus)
    assert not contents(tmp_path / "new")
    write(copy, target, corpus)  # nothing is missing


def test_a_full_disk_loses_nothing_that_is_whole(target, corpus, exact, tmp_path, monkeypatch):
    save = store.save_file

    def full(tensors, path, metadata):
        save(tensors, path, metadata)
        if "00003" in path.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "save_file", full)
    with refused(DataError, str(tmp_path), "No space left", "the disk is full: make room", "continues from there"):
        write(tmp_path, target, corpus)
    assert sorted(contents(tmp_path)) == sorted(contents(exact))[:2]


# --- whose features these are ----------------------------------------------------------------------------------------


def test_another_target_is_refused(folder_of, target, corpus, exact, copy):
    cache, own = FeatureCache(exact), target_id(target)
    cache.check(load(folder_of, torch.bfloat16), own)
    cache.check(target, dataclasses.replace(own, name="the same elsewhere", vocab_hash="whatever it is"))
    for change in ({"hidden_size": 64}, {"num_layers": 4}, {"vocab_size": 62}):
        (name, value) = next(iter(change.items()))
        other = dataclasses.replace(own, name="other", **change)
        with refused(
            DataError, "made for tiny, and the target is other", f"{name} {getattr(own, name)} and {value}", "make a"
        ):
            cache.check(target, other)
    trained_on = load(folder_of, seed=1)
    for use in (lambda: cache.check(trained_on, own), lambda: write(copy, trained_on, corpus)):
        with refused(DataError, "other weights", "make it again with `draftwing data cache`"):
            use()
    with refused(DataError, "has the hidden states 0, 1, 2, 3, and the net reads 1, 4", "make a cache"):
        cached(exact, (1, 4))


def test_another_cache_is_not_written_over(target, corpus, exact, copy):
    before = contents(copy)
    other = Corpus(corpus.examples[::-1], corpus.stream, corpus.starts, corpus.prefix)
    cases = [
        ({"taps": (0, 1)}, "belongs to another cache (states (0, 1, 2, 3) and (0, 1, 3))"),
        ({"taps": (2, 1, 0)}, "belongs to another cache (states (0, 1, 2, 3) and (2, 1, 0, 3))"),
        ({"corpus": other}, "belongs to another cache"),
        ({"batches": batches_of(corpus, seed=6)}, "belongs to another cache (seed 5 and 6)"),
    ]
    for change, part in cases:
        with refused(DataError, str(copy), part, "choose another folder"):
            write(copy, target, **{"corpus": corpus, **change})
    done = write(copy, target, corpus, batches=batches_of(corpus, tokens=999))  # the same rows
    assert done.num_kept == done.num_shards
    assert contents(copy) == before


def test_the_same_rows_of_other_words_are_another_cache(target, corpus, copy):
    examples = [Example(np.where(each.ids == 7, 8, each.ids), each.mask) for each in corpus.examples]
    with refused(DataError, "it was made of other data"):
        write(copy, target, Corpus(tuple(examples), corpus.stream, corpus.starts, corpus.prefix))


def test_folders_that_are_no_cache(target, corpus, exact, copy, tmp_path):
    with refused(DataError, str(tmp_path / "none"), "no cache: make one with `draftwing data cache`"):
        FeatureCache(tmp_path / "none")
    index = copy / "index.json"
    text = index.read_text()
    for content, parts in [
        ("{", ["not readable as JSON"]),
        ("[1]", ["expected the description of a cache"]),
        (text.replace('"version": 2', '"version": 1'), ["version 1, expected 2", "make it again"]),
        (text.replace('"dtype": "float32"', '"dtype": "int3"'), ["expected the description of a cache"]),
        (text.replace("features-00001", "../features-00001"), ["the description of a cache", "../features-0000"]),
        (text.replace('"num_rows": ', '"num_rows": 1'), ["rows, each once, found"]),
        (text.replace('"seed": 5', '"seed": 6'), ["belongs to another cache than its index.json", "seed 5 and 6"]),
    ]:
        index.write_text(content)
        with refused(DataError, str(copy), *parts):
            FeatureCache(copy)
    index.write_text(text)
    first, second = sorted(copy.glob("*.safetensors"))[:2]
    shutil.copy(first, second)
    with refused(DataError, "rows, each once", "delete the folder"):
        FeatureCache(copy)
    (tmp_path / "file").write_text("")
    with refused(DataError, "cannot be written", "part of the path is a file"):
        write(tmp_path / "file" / "below", target, corpus)


def test_calls_that_cannot_be_meant(folder_of, target, corpus, tmp_path):
    with refused(ConfigError, "no hidden state 4 in tiny, which has 3 layers"):
        write(tmp_path, target, corpus, (1, 4))
    with refused(ConfigError, "stored in bfloat16 or float32, found torch.float16"):
        write(tmp_path, target, corpus, dtype=torch.float16)
    broken = load(folder_of)
    broken.net.norm.weight.data[0] = float("inf")
    with refused(NumericsError, "not finite in torch.float32", "float64"):
        write(tmp_path, broken, corpus)
    assert not contents(tmp_path)


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(folder_of, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cached") / "model"
    return add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=300), folder))


def run(*args):
    return CliRunner().invoke(cli.app, list(map(str, args)))


def test_cache_and_train(folder, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for i, text in enumerate(TEXTS * 2):
        (data / f"{i}.py").write_text(f"# {i}\n" + text * 6)
    common = ["-t", folder, "--data", data, "--device", "cpu", "--dtype", "float32", "--seed", 3]
    cut = ["--max-length", 24, "--tokens-per-batch", 96]
    made = run("data", "cache", *common, *cut, "--out", tmp_path / "cache", "--json")
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    assert found["num_kept"] == 0
    assert "the cache will have" in made.stderr
    assert json.loads(run("data", "cache", *common, *cut, "--out", tmp_path / "cache", "--json").stdout)["num_kept"] > 0
    again = run("data", "cache", *common, *cut, "--out", tmp_path / "cache").stderr
    assert f"draftwing train eagle3 --target {folder} --cache {tmp_path / 'cache'} --minutes" in again
    sizes = {"max_length": 24, "tokens_per_batch": 96, "iterations": 2, "eval_prompts": 1, "eval_tokens": 4}
    options = TrainOptions("eagle3", validation_share=0.2, precision="no", draft_vocab_size=40, seed=3, **sizes)
    settings = {"dtype": "float32", "device": "cpu"}
    session = prepare(RunFiles(folder, [], cache=tmp_path / "cache"), options, tmp_path / "run", **settings)
    online = prepare(RunFiles(folder, [data]), options, tmp_path / "online", **settings)
    num_tokens = session.training.num_tokens, session.validation.num_tokens
    assert sum(num_tokens) == found["size"]["num_tokens"]
    assert 0.05 < num_tokens[1] / sum(num_tokens) < 0.4
    assert session.coverage == pytest.approx(online.coverage, abs=0.05)
    # Both cut their rows at other places, and so start from other solutions: here from one.
    online.trainer.net.load_state_dict(session.trainer.net.state_dict())
    progress, expected = session.run(), online.run()
    assert progress.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=0.1)
    assert progress.metrics["tau"] >= 1


def test_the_command_refuses(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXTS))
    base = ["data", "cache", "-t", folder, "--data", text, "-o", tmp_path / "cache", "--device", "cpu"]
    for args, part in [
        (["--method", "dragon"], "--method must be one of"),
        (["--taps", "a"], "--taps must be numbers"),
    ]:
        found = run(*base, *args)
        assert isinstance(found.exception, SystemExit | ConfigError)
        assert part in found.output + str(found.exception)
    assert not (tmp_path / "cache").exists()
