"""Hidden states in vLLM's files, as written by transformers: the same training as on our own cache, or a refusal."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from conftest import refused
from draftwing.cli import main as cli
from draftwing.errors import ConfigError, DataError, UnsupportedError
from draftwing.formats.identity import target_id
from draftwing.loading import load_target
from draftwing.models.resolve import resolve
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data import Batches, Example, read_examples
from draftwing.train.feature_cache import FeatureCache, write_cache
from draftwing.train.options import TrainOptions
from draftwing.train.session import RunFiles, prepare
from draftwing.train.vllm_states import import_states

TAPS = (2, 4, 5)  # layers that EAGLE-3 reads, of the toy's eight
LAYERS = [2, 4, 5, 8]
QUESTIONS = ["def add(a, b):", "class Table:", "for row in rows:", "import os", "x = [1, 2", "while True:"]
ANSWERS = ["    return a + b", "    rows = []", "    print(row)", "os.getcwd()", ", 3]\n", "    break"]


@pytest.fixture(scope="module")
def toy():
    return resolve("toy")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "dialogues.jsonl"
    pairs = zip(QUESTIONS, ANSWERS, strict=True)
    file.write_text("".join(json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in pairs))
    return file


@pytest.fixture(scope="module")
def corpus(toy, data):
    return read_examples([data], Tokenizer(toy), max_length=64)


class Engine:
    """Writes files as vLLM does: the input of layer i, and the output of the last one before the final norm."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.model.norm.register_forward_pre_hook(lambda module, args: self.unnormed.append(args[0]))

    @torch.no_grad()
    def write(self, folder, rows, layers=LAYERS):
        folder.mkdir(exist_ok=True)
        for number, ids in enumerate(rows):
            self.unnormed = []
            tokens = torch.tensor(np.asarray(ids)).long()
            output = self.model(tokens[None], output_hidden_states=True)
            states = [*output.hidden_states[:-1], self.unnormed[0]]
            stacked = torch.stack([states[layer][0] for layer in layers], 1).contiguous()
            save_file({"hidden_states": stacked, "token_ids": tokens}, folder / f"cmpl-{number}-0.safetensors")
        return folder


@pytest.fixture(scope="module")
def states(toy, corpus, tmp_path_factory):
    """A folder of vLLM's files, one for each dialogue. Tests that change it take a copy."""
    return Engine(toy).write(tmp_path_factory.mktemp("vllm") / "states", [each.ids for each in corpus.examples])


@pytest.fixture(scope="module")
def ends(toy):
    return load_target(toy, dtype="float32", device="cpu", name="toy", prepack=False, layers=False)


def read(folder, out, target, **options):
    options = {"identity": target_id(target), "dtype": torch.float32, **options}
    return import_states(folder, out, target, options.pop("taps", TAPS), **options)


# --- training --------------------------------------------------------------------------------------------------------


def test_a_head_learns_the_same_from_vllm_as_from_here(toy, data, corpus, states, ends, tmp_path):
    target = load_target(toy, dtype="float32", device="cpu", prepack=False)
    identity = target_id(target, Tokenizer(toy))
    batches = Batches(corpus, 512, 64)
    write_cache(tmp_path / "own", target, batches, TAPS, identity=identity, dtype=torch.float32)
    read(states, tmp_path / "vllm", ends, identity=identity, dialogues=corpus.examples)
    options = TrainOptions(
        "eagle3", iterations=3, max_length=64, tokens_per_batch=512, validation_share=0, precision="no", taps=TAPS
    )
    settings = {"dtype": "float32", "device": "cpu"}
    own, vllm = (
        prepare(
            RunFiles("toy", [], cache=tmp_path / name), options, tmp_path / f"run-{name}", **settings, layers=layers
        )
        for name, layers in (("own", True), ("vllm", False))
    )
    # Both fit their start on a sample of rows, which the caches have in another order: here from one start.
    vllm.trainer.net.load_state_dict(own.trainer.net.state_dict())
    losses = {"own": [], "vllm": []}
    for name, session in (("own", own), ("vllm", vllm)):
        session.trainer.on_progress = lambda step, name=name: losses[name].append(step.metrics["loss"])
        session.run()
    assert len(losses["own"]) == 3
    assert losses["own"][0] > losses["own"][-1]
    assert losses["vllm"] == pytest.approx(losses["own"], rel=1e-5)


def test_the_rows_are_those_of_our_own_target(toy, corpus, states, ends, tmp_path):
    done = read(states, tmp_path / "cache", ends, dialogues=corpus.examples)
    assert (done.num_rows, done.num_kept, done.skipped, done.num_missing) == (len(QUESTIONS), 0, (), 0)
    target = load_target(toy, dtype="float32", device="cpu", prepack=False)
    cache = FeatureCache(tmp_path / "cache")
    cache.check(target, target_id(target))
    cache.check(ends, target_id(ends))
    assert (cache.info.states, cache.info.max_length) == ((*TAPS, 8), None)
    masks = {each.ids.tobytes(): each.mask for each in corpus.examples}
    right = total = 0
    for number in range(done.num_rows):
        row, (found, best) = cache.row(number), cache.states(number)
        assert np.array_equal(row.mask, masks[row.ids.tobytes()])
        logits = ends.head.forward(found[:, -1])
        assert np.array_equal(best, logits.argmax(-1).numpy())
        right += int((best[:-1] == row.ids[1:])[row.mask[1:]].sum())
        total += int(row.mask.sum())
    assert done.agreement == pytest.approx(right / total)


def test_whole_texts_without_dialogues(states, ends, tmp_path):
    read(states, tmp_path, ends)
    cache = FeatureCache(tmp_path)
    assert all(row.mask[1:].all() and not row.mask[0] for row in cache.corpus.examples)
    assert len(cache.lengths) == len(QUESTIONS)


def test_rows_that_begin_or_continue_a_dialogue(toy, corpus, ends, tmp_path):
    """Output without its last token, and text with the prompt for the next answer."""
    first, second, third = corpus.examples[:3]
    question = third.ids[: int(third.mask.argmax())]
    rows = [first.ids[:-1], [*second.ids, 5, 6], question, [7, 8, 9], first.ids[:-1]]
    done = read(Engine(toy).write(tmp_path / "in", rows), tmp_path / "out", ends, dialogues=corpus.examples)
    found = {row.ids.tobytes(): row.mask for row in FeatureCache(tmp_path / "out").corpus.examples}
    assert len(found) == done.num_rows == 2
    assert done.num_missing == len(corpus.examples) - 3
    assert np.array_equal(found[first.ids[:-1].tobytes()], first.mask[:-1])
    longer = np.asarray(rows[1], dtype=np.int32)
    assert np.array_equal(found[longer.tobytes()], [*second.mask, False, False])
    assert [why for _, why in done.skipped] == [
        "none of its tokens is part of an answer",
        "its tokens are those of no dialogue in the data",
        "another file has the same tokens",
    ]
    with refused(DataError, "--data has no dialogue with an answer: leave it out"):
        read(tmp_path / "in", tmp_path / "other", ends, dialogues=[])
    with refused(DataError, "none of the 5 files", "cmpl-0-0.safetensors: its tokens", "give the dialogues"):
        strangers = [Example(np.asarray([9, 9], dtype=np.int32), np.asarray([False, True]))]
        read(tmp_path / "in", tmp_path / "other", ends, dialogues=strangers)


def test_ctrl_c_keeps_the_rows_of_an_import(corpus, states, ends, tmp_path):
    def interrupt(done, total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read(states, tmp_path, ends, dialogues=corpus.examples, on_progress=interrupt)
    assert len(FeatureCache(tmp_path).lengths) == 3
    assert read(states, tmp_path, ends, dialogues=corpus.examples).num_kept == 3


def test_an_import_is_continued(corpus, states, ends, tmp_path):
    files = sorted(states.iterdir())
    (tmp_path / "part").mkdir()
    for file in files[:4]:
        shutil.copy(file, tmp_path / "part")
    (tmp_path / "part" / files[3].name).write_bytes(files[3].read_bytes()[:-100])
    small = {"dialogues": corpus.examples, "shard_bytes": 20_000}
    with refused(DataError, files[3].name, "a damaged or unfinished one", "wait until vLLM has ended, or delete it"):
        read(tmp_path / "part", tmp_path / "out", ends, **small)
    assert 0 < len(FeatureCache(tmp_path / "out").lengths) <= 3
    done = read(states, tmp_path / "out", ends, **small)
    assert done.num_kept > 0
    assert done.num_rows == len(files) == len(FeatureCache(tmp_path / "out").lengths)
    again = read(states, tmp_path / "out", ends, **small)
    assert (again.num_kept, again.agreement) == (len(files), None)
    with refused(DataError, "belongs to another cache (its rows have other masks"):
        read(states, tmp_path / "out", ends)


# --- files that are refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"hidden_states": None}, ["expected hidden_states and token_ids, found token_ids"]),
        ({"hidden_states": lambda x: x[:, :3]}, ["has 3 layers, and 4 were expected", "--layer-ids"]),
        ({"hidden_states": lambda x: x[:, :, :64]}, ["states of 64 channels, and toy has 128", "give --target"]),
        ({"hidden_states": lambda x: x[:-1]}, ["tokens and the states of", "without chunked prefill"]),
        ({"hidden_states": lambda x: x.flatten(1)}, ["expected hidden_states (T, L, H)"]),
        ({"hidden_states": lambda x: x.log()}, ["not finite: delete it", "bfloat16"]),
        ({"token_ids": lambda x: x + 2040}, ["has token id", "the vocabulary of toy has 2048", "give --target"]),
        ({"token_ids": lambda x: x - 3000}, ["has token id -", "give --target"]),
    ],
)
def test_files_that_do_not_fit(change, parts, states, ends, tmp_path):
    folder = shutil.copytree(states, tmp_path / "in")
    path = sorted(folder.iterdir())[2]
    tensors = load_file(path)
    for name, function in change.items():
        value = tensors.pop(name)
        if function is not None:
            tensors[name] = function(value).contiguous()
    save_file(tensors, path)
    with refused(DataError, str(path), *parts):
        read(folder, tmp_path / "out", ends)
    path.unlink()
    assert read(folder, tmp_path / "out", ends).num_rows == len(QUESTIONS) - 1


def test_layers_that_do_not_fit(states, ends, tmp_path):
    (tmp_path / "empty").mkdir()
    with refused(DataError, "has no *.safetensors file: give the shared_storage_path"):
        read(tmp_path / "empty", tmp_path / "out", ends)
    for layers, part in [([2, 4, 5, 9], "from 0 to 8"), ([5, 4, 2, 8], "ascending"), ([2, 2, 5, 8], "different")]:
        with refused(ConfigError, "layer ids must be", part, f"found {layers}"):
            read(states, tmp_path / "out", ends, layers=layers)
    with refused(ConfigError, "lack 8, which the head reads", "eagle_aux_hidden_state_layer_ids [2, 4, 5, 8]"):
        read(states, tmp_path / "out", ends, layers=[2, 4, 5, 7])
    with refused(ConfigError, "lack 1, 3, which", "or choose --taps"):
        read(states, tmp_path / "out", ends, layers=LAYERS, taps=(1, 3, 5))
    some = read(states, tmp_path / "out", ends, layers=LAYERS, taps=(5,))  # not all that the files have
    assert some.num_rows == len(QUESTIONS)
    assert FeatureCache(tmp_path / "out").info.states == (5, 8)


def test_wrong_layers_and_weights_are_noticed(toy, folder_of, corpus, states, ends, tmp_path):
    """The files do not name their layers: the LM head shows whether the last one is right."""
    wrong = Engine(toy).write(tmp_path / "wrong", [each.ids for each in corpus.examples], [2, 4, 5, 0])
    right = read(states, tmp_path / "right", ends).agreement
    assert right > read(wrong, tmp_path / "cache", ends).agreement
    target = load_target(toy, dtype="float32", device="cpu", prepack=False)
    with refused(DataError, "had other weights", "make it again"):
        FeatureCache(tmp_path / "cache").check(target, target_id(target))
    other = folder_of("llama", hidden_size=128, vocab_size=2048, num_hidden_layers=8)
    stranger = load_target(other, dtype="float32", device="cpu", prepack=False, layers=False)
    identity = dataclasses.replace(target_id(ends), name="stranger")
    with refused(DataError, "had other weights", "LM head predicts"):
        FeatureCache(tmp_path / "right").check(stranger, identity)
    with refused(UnsupportedError, "loaded without its layers and runs no text"):
        ends.score(torch.tensor([[1, 2]]))


# --- the command line ------------------------------------------------------------------------------------------------


def run(*args):
    return CliRunner().invoke(cli.app, list(map(str, args)))


def test_import_and_train(data, states, tmp_path):
    base = ["data", "import-states", states, "-t", "toy", "-o", tmp_path / "cache", "--device", "cpu"]
    made = run(*base, "--from", "vllm", "--taps", "2,4,5", "--data", data, "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["num_rows"] == len(QUESTIONS)
    train = ["train", "eagle3", "-t", "toy", "--cache", tmp_path / "cache", "--device", "cpu", "--iterations", 1]
    short = ["--validation-share", 0.2, "--taps", "2,4,5", "--precision", "no", "-o", tmp_path / "run", "--json"]
    trained = run(*train, *short, "--ends-only")
    assert trained.exit_code == 0, trained.output
    found = json.loads(trained.stdout)
    assert found["val_loss"] > 0
    assert "tau" not in found
    for args, part in [
        ([*base, "--from", "sglang"], "--from must be vllm, found 'sglang'"),
        ([*base, "--from", "vllm", "--layer-ids", "a"], "--layer-ids must be numbers"),
        (
            ["train", "eagle3", "-t", "toy", "--data", data, "--minutes", 1, *short, "--ends-only"],
            "layers are needed without a cache",
        ),
    ]:
        failed = run(*args)
        assert part in failed.output + str(failed.exception)
