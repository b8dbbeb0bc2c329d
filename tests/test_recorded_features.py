"""States that the target has while it answers: those of the whole text, kept through kills, and trained on."""

import json
import shutil

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from conftest import TEXTS, add_tokenizer, refused
from draftwing.cli import main as cli
from draftwing.errors import ConfigError, DataError
from draftwing.formats.identity import target_id
from draftwing.lm import LM
from draftwing.loading import load_target
from draftwing.methods.base import Budget
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.methods.lookup import LookupDrafter
from draftwing.methods.net_drafter import EagleDrafter
from draftwing.models.config import ModelConfig, read_config
from draftwing.sampling import Sampling
from draftwing.text.tokenizer import Tokenizer
from draftwing.train import feature_cache as store
from draftwing.train.answer_local import LMAnswerer
from draftwing.train.answers import read_tasks, regenerate, sampling_of
from draftwing.train.data import Batches
from draftwing.train.feature_cache import CachedFeatures, FeatureCache, GrowingCache, write_cache
from draftwing.train.features import score_text
from draftwing.train.options import TrainOptions
from draftwing.train.session import RunFiles, prepare
from processors import can_int8
from short_runs import three_updates

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
QUESTIONS = [["add rows", "and now?"], ["class"], ["for row in rows"], ["def add", "self", "return a"], ["append(row)"]]
SAMPLING = Sampling(temperature=0.8, max_tokens=14, seed=3)
TAPS = (2, 1, 0)
KERNEL = {"vocab_size": 300, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def folder(folder_of, tmp_path_factory):
    path = tmp_path_factory.mktemp("recorded") / "model"
    return add_tokenizer(shutil.copytree(folder_of("llama", **KERNEL), path), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def target(folder):
    return load_target(folder, dtype="float32", device="cpu", name="tiny")


@pytest.fixture(scope="module")
def lm(folder, target):
    """``lm("lookup")``: drafts in fixed shapes."""
    torch.manual_seed(3)
    shape = ModelConfig.from_hf(read_config(folder))
    plain = target.embedding.plain().float()
    net = EagleNet(EagleConfig.for_target(3, shape), plain, target.head).prepack(None, fast=True)
    makers = {"none": None, "lookup": lambda: LookupDrafter(300, 1), "eagle": lambda: EagleDrafter(net, target)}

    def make(draft="none"):
        return LM(target, Tokenizer(folder), makers[draft], budget=None if draft == "none" else Budget(4, 2, 6))

    return make


@pytest.fixture
def tasks(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in QUESTIONS))
    return read_tasks([file])


def cache_of(folder, target, taps=TAPS, shard_bytes=1, **settings):
    return GrowingCache(folder, target, taps, identity=target_id(target), shard_bytes=shard_bytes, **settings)


def answer(tasks, lm, out, cache, sampling=SAMPLING, max_batch=3, **options):
    answerer = LMAnswerer(lm, sampling, max_batch=max_batch, states=cache.info.states)
    return regenerate(tasks, answerer, out, cache=cache, **options)


def lines_of(file):
    return {entry["id"]: entry for entry in map(json.loads, file.read_text().splitlines())}


def words_of(file):
    return {key: entry["messages"] for key, entry in lines_of(file).items()}


def rows_of(folder):
    cache = FeatureCache(folder)
    rows = [cache.row(number) for number in range(len(cache.lengths))]
    return {row.ids.tobytes(): (row.mask, cache.states(number)[0]) for number, row in enumerate(rows)}


def same(one, other):
    return one.keys() == other.keys() and all(
        np.array_equal(one[ids][0], other[ids][0]) and torch.equal(one[ids][1], other[ids][1]) for ids in one
    )


@pytest.fixture(scope="module")
def whole(lm, target, tmp_path_factory):
    """An unbroken run: its file and its cache, one shard for each row."""
    path = tmp_path_factory.mktemp("whole")
    file = path / "questions.jsonl"
    file.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in QUESTIONS))
    answer(read_tasks([file]), lm(), path / "out.jsonl", cache_of(path / "features", target))
    return path


# --- what is kept ----------------------------------------------------------------------------------------------------


def check_states(target, ids, found):
    """A row's states are those that a forward of the whole text gives, but for the token that nobody read."""
    expected = score_text(target, torch.from_numpy(ids.astype(np.int64))[None], (*TAPS, 3))[0][0].bfloat16()
    found = found.flatten(1)
    if target.runtime == "kernel":
        assert torch.equal(found[:-1], expected[:-1])
    else:
        assert torch.allclose(found[:-1].float(), expected[:-1].float(), rtol=2**-7, atol=1e-5)
    assert not found[-1].any()


@pytest.mark.parametrize("draft", ["lookup", "eagle"])
def test_states_are_those_of_the_whole_text(draft, lm, target, tasks, whole, tmp_path):
    out, folder = tmp_path / "out.jsonl", tmp_path / "features"
    done = answer(tasks, lm(draft), out, cache_of(folder, target, shard_bytes=10**9))
    assert (done.num_written, len(list(folder.glob("*.safetensors")))) == (len(tasks), 1)
    cache, rows = FeatureCache(folder), rows_of(folder)
    assert (cache.info.states, cache.info.quantize, cache.info.max_length) == ((*TAPS, 3), None, None)
    assert words_of(out) == words_of(whole / "out.jsonl")
    tokenizer = lm().tokenizer
    for task in tasks:
        messages, answers = [], []
        for asked in task.messages:  # one prompt at a time, by ``generate``
            messages.append(asked)
            (own,) = lm().generate([messages], sampling_of([SAMPLING], task.id))
            cut = {"finish_reason": "length"} if own.finish_reason == "length" else {}
            messages = [*messages, {"role": "assistant", "content": own.text, **cut}]
            answers.append(own)
        ids = np.asarray([*own.prompt_ids, *own.token_ids], dtype=np.int32)
        mask, states = rows.pop(ids.tobytes())
        check_states(target, ids, states)
        start = len(own.prompt_ids)
        assert mask[start:].all()
        said = tokenizer.decode(ids[:start][mask[:start]].tolist())
        # Spaces at an answer's ends may share a token with the template's.
        assert "".join(said.split()) == "".join("".join(each.text for each in answers[:-1]).split())
    assert not rows
    # Whatever drafts, and however many there are at once.
    assert same(rows_of(folder), rows_of(whole / "features"))


@pytest.mark.parametrize("temperatures", [(0.0,), (0.8,), (0.0, 0.8)])
def test_the_best_tokens_are_known_wherever_the_next_one_counts(temperatures, lm, target, tasks, tmp_path):
    choices = [Sampling(temperature=each, max_tokens=14, seed=3) for each in temperatures]
    answer(tasks, lm(), tmp_path / "out.jsonl", cache_of(tmp_path / "features", target), choices)
    cache, others = FeatureCache(tmp_path / "features"), 0
    for number in range(len(cache.lengths)):
        row = cache.row(number)
        counts = torch.from_numpy(np.append(row.mask[1:], False))
        assert counts.any()
        logits = target.head.forward(cache.states(number)[0][:, -1].float())[counts]
        known = torch.from_numpy(cache.states(number)[1])[counts].long()
        assert (logits.amax(-1) - logits.gather(1, known[:, None])[:, 0]).max() < 2e-2  # states are kept in bfloat16
        others += int((torch.from_numpy(row.ids)[1:][counts[:-1]] != known).sum())
    assert others  # else the rows' own tokens would do for all; earlier turns, read again, are not always the best


def test_a_document_counts_from_where_the_target_goes_on(lm, target, tmp_path):
    file = tmp_path / "a.py"
    file.write_text(TEXTS[1] * 4)
    (task,) = read_tasks([file], prompt_tokens=8, tokenizer=lm().tokenizer)
    answer([task], lm(), tmp_path / "out.jsonl", cache_of(tmp_path / "features", target))
    row = FeatureCache(tmp_path / "features").row(0)
    prompt = lm().tokenizer.encode(task.text)
    assert row.ids[: len(prompt)].tolist() == prompt
    assert (row.mask == (np.arange(len(row.ids)) >= len(prompt))).all()
    check_states(target, row.ids, FeatureCache(tmp_path / "features").states(0)[0])


@pytest.mark.skipif(not can_int8(), reason="this CPU multiplies no 8-bit integers exactly")
def test_an_int8_target_is_remembered(folder, target, tasks, tmp_path):
    small = load_target(folder, dtype="float32", device="cpu", name="tiny", quantize="int8")
    if small.runtime != "kernel":
        pytest.fail("int8 runs in the kernel alone")
    answer(tasks[1:2], LM(small, Tokenizer(folder)), tmp_path / "out.jsonl", cache_of(tmp_path / "features", small))
    cache = FeatureCache(tmp_path / "features")
    assert cache.info.quantize == "int8"
    check_states(small, cache.row(0).ids, cache.states(0)[0])
    cache.check(target, target_id(target))  # close enough to the model that it was made from
    with refused(DataError, "belongs to another cache (quantize int8 and None)"):
        answer(tasks, LM(target, Tokenizer(folder)), tmp_path / "out.jsonl", cache_of(tmp_path / "features", target))


# --- stopped and gone on with ----------------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_was_finished(lm, target, tasks, whole, tmp_path):
    out, folder = tmp_path / "out.jsonl", tmp_path / "features"

    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer(tasks, lm(), out, cache_of(folder, target, shard_bytes=10**9), on_progress=stop)
    assert len(lines_of(out)) == len(rows_of(folder)) == 2  # it can be read at once
    done = answer(tasks, lm(), out, cache_of(folder, target, shard_bytes=10**9), max_batch=1)
    assert (done.num_kept, done.num_written) == (2, len(tasks) - 2)
    assert same(rows_of(folder), rows_of(whole / "features"))
    assert words_of(out) == words_of(whole / "out.jsonl")
    done = answer(tasks, lm(), out, cache_of(folder, target))
    assert (done.num_kept, done.num_written, done.num_tokens) == (len(tasks), 0, 0)


def copied(whole, tmp_path):
    shutil.copytree(whole / "features", tmp_path / "features")
    shutil.copy(whole / "out.jsonl", tmp_path / "out.jsonl")
    return tmp_path / "out.jsonl", tmp_path / "features"


def test_killed_between_the_states_and_the_record(lm, target, tasks, whole, tmp_path):
    out, folder = copied(whole, tmp_path)
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    (folder / "features-00009.safetensors.partial").write_bytes(b"half")
    done = answer(tasks, lm(), out, cache_of(folder, target))
    assert (done.num_kept, done.num_written) == (len(tasks) - 1, 1)
    assert len(lines_of(out)) == out.read_bytes().count(b"\n") == len(tasks)
    assert same(rows_of(folder), rows_of(whole / "features"))


def test_states_that_were_lost_are_made_again(lm, target, tasks, whole, tmp_path):
    out, folder = copied(whole, tmp_path)
    before, shards = out.read_bytes(), sorted(folder.glob("*.safetensors"))
    shards[1].unlink()
    shards[3].write_bytes(shards[3].read_bytes()[:-50])
    for use in (lambda: FeatureCache(folder), lambda: answer(tasks, lm(), out, cache_of(folder, target))):
        with refused(DataError, "features-0000", "`data regenerate` or `data import-states` that made the cache"):
            use()
    shards[3].unlink()
    done = answer(tasks, lm(), out, cache_of(folder, target))
    assert (done.num_kept, done.num_written) == (len(tasks) - 2, 2)
    assert out.read_bytes() == before  # the records were there
    assert same(rows_of(folder), rows_of(whole / "features"))


def test_other_words_are_refused(lm, target, tasks, whole, tmp_path):
    out, folder = copied(whole, tmp_path)
    before = out.read_bytes()
    sorted(folder.glob("*.safetensors"))[0].unlink()
    other = Sampling(temperature=0.8, max_tokens=14, seed=4)
    with refused(DataError, "had another answer before", "another file and folder"):
        answer(tasks, lm(), out, cache_of(folder, target), sampling=other)
    assert out.read_bytes() == before
    out.write_bytes(b"")
    with refused(DataError, "had another answer before"):
        answer(tasks, lm(), out, cache_of(folder, target), sampling=other)


def test_a_full_disk_leaves_records_and_states_in_step(lm, target, tasks, whole, tmp_path, monkeypatch):
    out, folder = tmp_path / "out.jsonl", tmp_path / "features"
    save = store.save_file

    def full(tensors, path, metadata):
        save(tensors, path, metadata)
        if "00003" in path.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "save_file", full)
    with refused(DataError, str(folder), "No space left", "make room", "continues from there"):
        answer(tasks, lm(), out, cache_of(folder, target))
    assert len(lines_of(out)) == len(rows_of(folder)) == 2
    monkeypatch.undo()
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage)
    with refused(DataError, "the next shard of the cache needs 2,000 bytes", "has 1,000 bytes"):
        answer(tasks, lm(), out, cache_of(folder, target, shard_bytes=2000))
    monkeypatch.undo()
    answer(tasks, lm(), out, cache_of(folder, target))
    assert len(lines_of(out)) == len(tasks)
    assert same(rows_of(folder), rows_of(whole / "features"))


def test_folders_of_others(folder_of, folder, lm, target, tasks, whole, tmp_path):
    out, own = copied(whole, tmp_path)
    with refused(DataError, "belongs to another cache (states (2, 1, 0, 3) and (1, 3))", "choose another folder"):
        answer(tasks, lm(), out, cache_of(own, target, (1,)))
    twin = add_tokenizer(shutil.copytree(folder_of("llama", 1, **KERNEL), tmp_path / "twin"), chat_template=TEMPLATE)
    other = load_target(twin, dtype="float32", device="cpu", name="tiny")
    with refused(DataError, "made when tiny had other weights"):
        answer(tasks, LM(other, Tokenizer(twin)), out, cache_of(own, other))
    with cache_of(own, target).opened(), refused(DataError, "another run", "is writing here"):
        answer(tasks, lm(), out, cache_of(own, target))
    with refused(ConfigError, "no hidden state 7 in tiny"):
        cache_of(own, target, (7,))


# --- trained on ------------------------------------------------------------------------------------------------------

LENGTH = 48


@pytest.mark.parametrize("method", ["eagle1", "eagle3"])
def test_training_on_it_is_training_on_a_cache_of_its_rows(method, folder, target, whole, tmp_path):
    plain = load_target(folder, dtype="float32", device="cpu", name="tiny", prepack=False)
    grown = FeatureCache(whole / "features").cut(LENGTH)
    assert grown.lengths.max() == LENGTH < FeatureCache(whole / "features").lengths.max()
    batches = Batches(grown.corpus, 4 * LENGTH, LENGTH, 1)
    write_cache(tmp_path / "cache", target, batches, TAPS, identity=target_id(target))
    taps = (3,) if method == "eagle1" else TAPS
    sources = [CachedFeatures(each, taps, 4 * LENGTH, 1) for each in (grown, FeatureCache(tmp_path / "cache"))]
    found, expected = (
        three_updates(method, plain, source, tmp_path / f"{i}", LENGTH)[1] for i, source in enumerate(sources)
    )
    assert torch.allclose(found, expected, rtol=1e-6)
    assert found[2] != found[0]


def run(*args):
    return CliRunner().invoke(cli.app, list(map(str, args)))


def test_regenerate_and_train(folder, tmp_path):
    file, features = tmp_path / "questions.jsonl", tmp_path / "features"
    file.write_text("".join(json.dumps({"turns": turns * 2}) + "\n" for turns in QUESTIONS))
    base = ["data", "regenerate", "-t", folder, "--data", file, "-o", tmp_path / "out.jsonl", "--device", "cpu"]
    made = run(*base, "-d", "none", "-n", 9, "-T", "1,0", "--features", features, "--json")
    assert made.exit_code == 0, made.output
    assert "the features will have at most about" in made.stderr
    found = json.loads(made.stdout)
    assert found["features"]["rows"] == found["num_written"] == 5
    assert found["tokens_per_s"] == pytest.approx(found["num_tokens"] / found["seconds"])
    assert {entry["temperature"] for entry in lines_of(tmp_path / "out.jsonl").values()} == {0.0, 1.0}
    again = run(*base, "-d", "none", "-n", 9, "-T", "0,1", "--features", features)
    assert "wrote 0 records (0 tokens, 0 tokens/s)" in again.stderr
    assert f"--cache {features}" in again.stderr.replace("\n", "")
    options = TrainOptions(
        method="eagle3", max_length=LENGTH, tokens_per_batch=96, validation_share=0.3, iterations=2, precision="no",
        eval_prompts=1, eval_tokens=4,
    )  # fmt: skip
    session = prepare(RunFiles(folder, (), cache=features), options, tmp_path / "run", dtype="float32", device="cpu")
    assert 1 <= len(session.validation.examples) < 5 == len(session.validation.examples + session.training.examples)
    assert max(len(row.ids) for row in session.training.examples) == LENGTH
    assert session.run().metrics["val_loss"] > 0
    for args, part in [
        (["-T", "0,warm"], "--temperature must be a number, or several such as 0,0.7,1, found"),
        (["--features", features, "--server", "http://localhost:1"], "a server gives no hidden states"),
        (["--features", features, "--method", "dragon"], "--method must be one of"),
    ]:
        assert part in " ".join(run(*base, *args).output.split())
