"""Draft models distilled from their target: divergences, the loss, text of their own, and what comes of a run."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from conftest import add_tokenizer, build, float64_norms, refused
from draftwing.errors import CheckpointError, ConfigError, TokenizerError, UnsupportedError
from draftwing.lab.forecast import collect
from draftwing.loading import load, load_target
from draftwing.methods.base import Budget
from draftwing.methods.causal_lm import read_causal_lm
from draftwing.methods.objectives import OBJECTIVES, AlignedLoss, Truth, head_loss, objective_named
from draftwing.methods.registry import convert, diagnose, get_method, method_of_folder
from draftwing.models.lean import LeanTarget
from draftwing.train.data import collate
from draftwing.train.features import FeatureBatch, OnPolicyFeatures, scored
from draftwing.train.options import TrainOptions
from draftwing.train.session import RunFiles, Session, prepare
from draftwing.train.trainer import read_checkpoint
from test_trainer import assert_same_run, metrics_of, stop_at, toy_corpus

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_accelerator():
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


# --- divergences -----------------------------------------------------------------------------------------------------


def slow_divergence(name: str, p: list[float], q: list[float]) -> float:
    """As DistillSpec writes them, a token at a time."""
    if name == "fkl":
        return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
    if name == "rkl":
        return slow_divergence("fkl", q, p)
    if name == "tv":
        return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    beta = float(name.partition(":")[2] or 0.5)
    m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    return beta * slow_divergence("fkl", p, m) + (1 - beta) * slow_divergence("fkl", q, m)


NAMES = ("fkl", "rkl", "tv", "jsd", "jsd:0.1")


@pytest.mark.parametrize("name", NAMES)
def test_a_divergence_is_the_papers(name):
    torch.manual_seed(0)
    logits = 3 * torch.randn(5, 9, dtype=torch.float64)
    probs = (3 * torch.randn(5, 9, dtype=torch.float64)).softmax(-1)
    found = objective_named(name).divergence(logits, probs)
    wanted = [slow_divergence(name, p, q) for p, q in zip(probs.tolist(), logits.softmax(-1).tolist(), strict=True)]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))
    same = objective_named(name).divergence(probs.log(), probs)
    torch.testing.assert_close(same, torch.zeros_like(same))


@pytest.mark.parametrize("name", NAMES)
def test_its_gradient_is_its_slope(name):
    """Through ``head_loss``, whose chunks compute the gradient in the forward."""
    torch.manual_seed(1)
    probs = torch.randn(4, 7, dtype=torch.float64).softmax(-1)
    rows = torch.tensor([3, 0, 0, 2, 1])
    read = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    objective = objective_named(name)

    def loss(read: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return head_loss(read, weight, probs, rows, objective.divergence, torch.float64)

    assert torch.autograd.gradcheck(loss, (read, weight))


@pytest.mark.parametrize("name", NAMES)
def test_chances_of_nothing_do_no_harm(name):
    """p of 0 and q of 0, in float32, as far apart as they can be."""
    logits = torch.tensor([[200.0, -200.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    probs = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    loss = objective_named(name).divergence(logits, probs).sum()
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()
    assert logits.grad[1, 0] < 0  # towards p


@pytest.mark.parametrize("name", ["kl", "jsd:0", "jsd:1", "jsd:much", "fkl:0.5", 3])
def test_other_objectives_are_refused(name):
    with refused(ConfigError, "objective must be one of", "jsd:BETA", str(name)):
        TrainOptions("causal-lm", objective=name, iterations=1)


# --- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "fkl"), ("llama-tied", "jsd:0.3"), ("qwen3", "fkl"), ("mistral-window", "jsd:0.3"), ("phi3", "fkl")],
)
def test_the_loss_is_the_divergence_after_every_token_that_counts(family, name, folder_of):
    """Against transformers' own logits of target and draft model, a position at a time; gradients too."""
    target = LeanTarget.from_folder(folder_of("llama"), torch.float64, prepack=False)
    changes = {"tie_word_embeddings": True} if family.endswith("tied") else {}
    family = family.removesuffix("-tied")
    net = read_causal_lm(folder_of(family, 1, **changes), CPU, dtype=torch.float64)
    model = float64_norms(build(family, 1, **changes))
    rows = [(ids, mask) for ids, mask in ((each.ids, each.mask) for each in toy_corpus().examples[2:5])]
    batch = collate(rows)
    found = scored(target, batch, ())
    truth = Truth.of(found, target.head, None, torch.float64)
    (sums,) = AlignedLoss(net, objective_named(name))(found, truth, agreement=True)
    p = float64_norms(build("llama"))(batch.ids).logits.softmax(-1).detach()
    logits = model(batch.ids).logits
    wanted, count, agreed = 0.0, 0, 0
    for row, (ids, mask) in enumerate(rows):
        for place in range(1, len(ids)):
            if mask[place]:
                wanted += objective_named(name).divergence(logits[row, place - 1][None], p[row, place - 1][None])[0]
                count += 1
                agreed += int(logits[row, place - 1].argmax() == p[row, place - 1].argmax())
    assert (sums.count, int(sums.agreed)) == (count, agreed)
    torch.testing.assert_close(sums.loss, wanted, rtol=1e-6, atol=1e-7)  # transformers' rotation is in float32
    sums.loss.backward()
    wanted.backward()
    slow = dict(model.named_parameters())
    torch.testing.assert_close(net.norm.weight.grad, slow["model.norm.weight"].grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(net.embedding.table.grad, slow["model.embed_tokens.weight"].grad, rtol=1e-4, atol=1e-6)


def test_what_is_not_for_draft_models_is_refused(folder_of):
    net = read_causal_lm(folder_of("llama"), CPU)
    with refused(ConfigError, "predicts no features", "--objective fkl"):
        AlignedLoss(net, OBJECTIVES["hass"])
    with refused(ConfigError, "every position at once", "--unroll-steps"):
        AlignedLoss(net, OBJECTIVES["fkl"], 3)
    with refused(ConfigError, "own_text belongs to causal-lm", "eagle3"):
        TrainOptions("eagle3", own_text=0.5, iterations=1)
    with refused(UnsupportedError, "mixture of experts", "start from a dense model"):
        read_causal_lm(folder_of("mixtral"), CPU)
    for family in ("gemma3", "gemma4"):
        with refused(UnsupportedError, f"a model of type {family}_text is not trained", "start from a Llama-like one"):
            read_causal_lm(folder_of(family), CPU)


DENSE = ["llama", "llama-bias-tied", "qwen2", "qwen3", "phi3", "smollm3", "granite", "hunyuan", "olmo3"]
DENSE += ["exaone4", "arcee"]


@pytest.mark.parametrize("family", DENSE)
def test_every_dense_family_is_written_as_it_was_read(family, folder_of):
    """Every tensor under its own name, biases and norms of heads too."""
    folder = folder_of(family)
    written, stored = (
        read_causal_lm(folder, CPU, dtype=torch.float64).tensors(),
        load_file(folder / "model.safetensors"),
    )
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], stored[name]) for name in stored)


# --- text of its own -------------------------------------------------------------------------------------------------


class Texts:
    """The same rows at every number, with features that say that the data was read."""

    num_batches_per_epoch = 9

    def __init__(self, batch) -> None:
        self._batch = batch

    def text(self, number, rank=0, world_size=1):
        return self._batch

    def batch(self, number, rank=0, world_size=1):
        nothing = torch.zeros(*self._batch.ids.shape, 0)
        return FeatureBatch(self._batch, nothing, nothing)


def test_a_draft_model_goes_on_with_what_counts(folder_of):
    """Each row keeps its beginning; what follows is drawn from the model as it is then, and is all that counts."""
    target = LeanTarget.from_folder(folder_of("llama"), prepack=False)
    net = read_causal_lm(folder_of("llama", 1), CPU)
    batch = collate([(each.ids, each.mask) for each in toy_corpus().examples[2:6]])
    source = OnPolicyFeatures(Texts(batch), target, (), net.as_target(), 0.5, seed=3)
    found = [source.batch(number) for number in range(24)]
    written = [each for each in found if each.batch is not batch]
    assert 6 < len(written) < 18
    cuts = set()
    for each in written:
        for row in range(4):
            length, real = int(batch.lengths[row]), int(each.batch.lengths[row])
            cut = int(each.batch.mask[row].int().argmax())
            assert batch.mask[row, cut]  # only an answer is written anew
            assert real <= length
            assert each.batch.mask[row].tolist() == [cut <= place < real for place in range(each.batch.ids.shape[1])]
            assert each.batch.ids[row, :cut].tolist() == batch.ids[row, :cut].tolist()
            cuts.add((row, cut))
        torch.testing.assert_close(each.logits, scored(target, each.batch, ()).logits)
    assert len(cuts) > 8
    again = OnPolicyFeatures(Texts(batch), target, (), net.as_target(), 0.5, seed=3)
    first = next(number for number in range(24) if found[number].batch is not batch)
    assert torch.equal(again.batch(first).batch.ids, found[first].batch.ids)
    assert not torch.equal(again.batch(first, rank=1).batch.ids, found[first].batch.ids)
    with torch.no_grad():
        net.norm.weight.mul_(3)
    assert not torch.equal(again.batch(first).batch.ids, found[first].batch.ids)


def test_nothing_is_written_beyond_its_own_context(folder_of):
    """A text that is longer is cut where the model can still read what comes before."""
    target = LeanTarget.from_folder(folder_of("llama"), prepack=False)
    writer = LeanTarget.from_folder(folder_of("llama", 1, max_position_embeddings=12), prepack=False)
    ids, counts = torch.arange(3, 33).numpy(), (torch.arange(30) >= 4).numpy()
    source = OnPolicyFeatures(Texts(collate([(ids, counts)] * 30)), target, (), writer, 1.0, seed=0)
    batch = source.batch(0).batch
    cuts = batch.mask.int().argmax(1)
    assert cuts.min() >= 4
    assert len(cuts.unique()) > 4
    assert batch.lengths.max() == 12


def test_what_it_writes_follows_its_own_distribution(folder_of):
    """The first drawn token of many seeds has the chances that the draft model gives it."""
    target = LeanTarget.from_folder(folder_of("llama"), prepack=False)
    net = read_causal_lm(folder_of("llama", 1, hidden_size=16), CPU)
    writer, count = net.as_target(), 600
    ids, mask = torch.tensor([1, 5, 9, 7]).numpy(), torch.tensor([False, False, False, True]).numpy()
    source = OnPolicyFeatures(Texts(collate([(ids, mask)] * count)), target, (), writer, 1.0, seed=0)
    drawn = source.batch(0).batch.ids[:, 3]
    chances = writer.score(torch.tensor([[1, 5, 9]])).logits[0, -1].softmax(-1)
    seen = torch.bincount(drawn, minlength=61) / count
    assert float((seen - chances).abs().sum() / 2) < 0.16  # 0.11 is usual for 600 draws, uniform chances give 0.4


# --- a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(folder_of, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    build("llama", vocab_size=300, head_dim=32, max_position_embeddings=512).save_pretrained(folder)
    return add_tokenizer(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "texts.jsonl"
    lines = [
        f"def add_{n}(a, b):\n    return a + b * {n}\n\nfor row in rows:\n    print(row, {n})\n" for n in range(40)
    ]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return file


def session(target: Path, data: Path, out: Path, initial: Path | None = None, **options) -> Session:
    usual = {
        "iterations": 6, "save_every": 3, "eval_every": 3, "max_length": 32, "tokens_per_batch": 128, "precision": "no",
        "validation_share": 0.2, "eval_prompts": 2, "eval_tokens": 8, "keep_prompts": 2,
        **({} if initial else {"num_layers": 1, "hidden_size": 64}),
    }  # fmt: skip
    torch.manual_seed(0)
    files = RunFiles(target, [data], initial=initial)
    return prepare(files, TrainOptions("causal-lm", **{**usual, **options}), out, dtype="float32", device="cpu")


def test_a_stopped_run_goes_on_as_if_it_had_not_been(target, data, tmp_path):
    """To the bit, with text of its own too: what it writes hangs on its weights at that update."""
    options = {"optimizer": "muon", "objective": "jsd:0.2", "accumulation": 2, "own_text": 0.5}
    unbroken = session(target, data, tmp_path / "unbroken", **options)
    unbroken.run()
    stopped = session(target, data, tmp_path / "stopped", **options)
    stop_at(stopped.trainer, 4)
    assert stopped.run().iteration == 4 == read_checkpoint(tmp_path / "stopped")["iteration"]
    session(target, data, tmp_path / "stopped", **options).run()
    for out in ("stopped", "unbroken"):  # evaluations say how long they took
        file = tmp_path / out / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps({k: v for k, v in x.items() if k != "eval_seconds"}) + "\n" for x in lines))
    assert_same_run(tmp_path / "stopped", tmp_path / "unbroken")
    judged = [line for line in metrics_of(tmp_path / "stopped") if "tau" in line]
    assert [line["iteration"] for line in judged] == [3, 6]


@pytest.fixture(scope="module")
def trained(target, data, tmp_path_factory) -> Path:
    """The folder of a draft model that has learnt its target's text."""
    AcceleratorState._reset_state(True)
    out = tmp_path_factory.mktemp("trained")
    run = session(target, data, out, iterations=10, lr=1e-2, eval_every=5)
    run.run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftwing.train.session.collect", partial(collect, num_tokens=8))
        assert run.collect_held_out(1) is not None
    judged = [line for line in metrics_of(out) if "tau" in line]
    assert judged[-1]["val_loss"] < judged[0]["val_loss"] < metrics_of(out)[0]["loss"]
    return out / "head"


def test_the_folder_is_a_hugging_face_model(trained, target):
    """transformers and the lean decoder read it alike, tokenizer and all; its config names no other kind of head."""
    model = transformers.AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()
    ids = torch.tensor([[1, 40, 50, 60, 70, 80]])
    with torch.no_grad():
        wanted = model(ids).logits
    torch.testing.assert_close(load_target(trained).score(ids).logits, wanted, rtol=1e-4, atol=1e-4)
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (trained, target))
    assert ours.get_vocab() == theirs.get_vocab()
    assert method_of_folder(trained) is get_method("causal-lm")
    block = json.loads((trained / "config.json").read_text())["draftwing"]
    assert block["kind"] == "causal-lm"
    assert block["target"]["num_layers"] == 3
    assert block["training"]["method"] == "causal-lm"
    assert "causal-lm head for" in (trained / "README.md").read_text()


@pytest.mark.parametrize("start", ["nothing", "target"])
def test_it_drafts_for_its_target(start, trained, target, data, tmp_path):
    """What began as the target itself, and has hardly moved, agrees with it; the text is the target's either way."""
    if start == "target":
        session(target, data, tmp_path, target, iterations=2, lr=1e-5).run()
        trained = tmp_path / "head"
    sampling = {"max_tokens": 24, "ignore_eos": True}
    plain = load(target, "none").generate("def add_7(a, b):", **sampling)[0]
    drafted = load(target, trained, budget=Budget(4)).generate("def add_7(a, b):", **sampling)[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_drafted > 0
    assert start == "nothing" or drafted.tau > 2


def test_a_run_goes_on_from_another_family(target, tmp_path, data):
    initial = tmp_path / "initial"
    build("qwen2", 5, vocab_size=300).float().save_pretrained(initial)
    add_tokenizer(initial)
    net = read_causal_lm(initial, CPU)
    get_method("causal-lm").write(tmp_path / "copy", net)
    one, other = (transformers.AutoModelForCausalLM.from_pretrained(each) for each in (initial, tmp_path / "copy"))
    for (name, wanted), found in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(wanted, found), name
    run = session(target, data, tmp_path / "out", initial, iterations=2)
    run.run()
    changed = read_causal_lm(tmp_path / "out" / "head", CPU).tensors()
    assert changed.keys() == net.tensors().keys()
    assert all(not torch.equal(changed[name], tensor) for name, tensor in net.tensors().items())


def test_bad_starts_are_refused(target, data, tmp_path, folder_of):
    with refused(TokenizerError, "another tokenizer than the target", "61 and 300"):
        session(target, data, tmp_path / "a", folder_of("llama"))
    with refused(CheckpointError, str(tmp_path / "nothing")):
        session(target, data, tmp_path / "a", tmp_path / "nothing")
    with refused(ConfigError, "num_layers shapes a new model", "leave it out"):
        session(target, data, tmp_path / "a", target, num_layers=2)
    with refused(ConfigError, "3 heads cannot share a hidden size of 64"):
        session(target, data, tmp_path / "a", num_heads=3)
    with refused(UnsupportedError, "type 'gpt2' is not trained as a draft model"):
        session(target, data, tmp_path / "a", folder_of("gpt2"))


def test_it_is_examined_and_not_converted(trained, target, folder_of, tmp_path):
    assert {each.name: each.status for each in diagnose(trained, target)} == {"head": "ok", "target": "ok"}
    assert {each.name: each.status for each in diagnose(trained)} == {"head": "ok", "target": "unknown"}
    with refused(UnsupportedError, "holds a causal LM, which has no other layout"):
        convert(trained, tmp_path / "out", "vllm")
