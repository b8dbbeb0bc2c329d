"""One update's loss and gradients against the papers' formulas, in loops over rows, entries and the vocabulary."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from draftwing.methods import objectives
from draftwing.methods.eagle_net import EagleNet
from draftwing.methods.objectives import OBJECTIVES, Truth, head_loss
from draftwing.models.linear import Linear
from draftwing.train.data import Batch
from draftwing.train.features import FeatureBatch
from draftwing.train.options import TrainOptions
from draftwing.train.trainer import Trainer, make_optimizers, noise_seed, read_checkpoint
from test_unroll import HIDDEN, VOCAB, SlowNet, random_net, random_text

ROWS, LENGTH = 2, 6
DRAFT_IDS = torch.tensor([0, 2, 3, 5, 8, 9, 11])


@dataclass(frozen=True)
class Case:
    """A run's options, the net's, whether the features come with logits, and the tokens that losses look at."""

    options: dict
    net: dict
    has_logits: bool = True
    seen: torch.Tensor | None = None

    @property
    def target_ids(self):
        return self.net.get("target_ids", self.seen)


CASES = {
    "eagle1": Case({"method": "eagle1"}, {"fc_bias": True}, has_logits=False),  # with its noise
    "hass": Case({"method": "hass"}, {}, has_logits=False),
    "hass-narrowed": Case({"method": "hass", "later_share": 0.5}, {}, seen=DRAFT_IDS),
    "eagle3": Case({"method": "eagle3"}, {"target_ids": DRAFT_IDS}),  # its last steps have no entries here
    "eagle3-whole": Case({"method": "eagle3", "unroll_steps": 2, "accumulation": 2}, {}, has_logits=False),
    "eagle3.1": Case(
        {"method": "eagle3", "unroll_steps": 3},
        {"target_ids": DRAFT_IDS, "norm_output": True, "fc_norm": True, "norm_before_residual": True},
    ),
    "eagle3-layers": Case({"method": "eagle3", "unroll_steps": 3}, {"num_layers": 2, "qkv_bias": True}),
    "eagle3-narrow": Case(
        {"method": "eagle3", "unroll_steps": 2}, {"target_hidden_size": 20, "own_embedding": True, "fc_norm": True}
    ),
    "tv": Case({"method": "eagle3", "objective": "tv", "accumulation": 2}, {"target_ids": DRAFT_IDS}),
}


@pytest.fixture(autouse=True)
def _own_accelerator():
    """Its state is one for the process, and other tests may want another precision."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


class Texts:
    """A source of random texts: row 1 ends early, and some tokens do not count."""

    def __init__(self, net: EagleNet, has_logits: bool) -> None:
        self._net, self._has_logits = net, has_logits

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> FeatureBatch:
        with torch.random.fork_rng():
            torch.manual_seed(100 + number)
            ids, features = random_text(self._net, ROWS, LENGTH)
            ids[1, -1] = 0
            mask = torch.rand(ids.shape) < 0.8
            mask[:, 0] = mask[1, -1] = False
            mask[0, 2] = True
            last = features if self._net.config.version == 1 else torch.randn(ROWS, LENGTH, HIDDEN, dtype=torch.float64)
            logits = torch.randn(ROWS, LENGTH, VOCAB, dtype=torch.float64) * 2 if self._has_logits else None
        return FeatureBatch(Batch(ids, mask, torch.tensor([LENGTH, LENGTH - 1])), features, last, logits)


def test_muon_takes_the_matrices_between_hidden_states():
    net = random_net(3, own_embedding=True, num_layers=2)
    muon, adamw = make_optimizers(net, TrainOptions(iterations=1, optimizer="muon"))
    names = {parameter: name for name, parameter in net.named_parameters()}
    found = {names[each] for each in muon.param_groups[0]["params"]}
    rest = {names[each] for each in adamw.param_groups[0]["params"]}
    assert found | rest == set(names.values())
    assert not found & rest
    assert {"head.weight", "embedding.table", "norm.weight"} <= rest
    assert {"fc.weight", "layers.0.qkv.weight", "layers.1.mlp.down.weight"} <= found


# --- the papers' formulas --------------------------------------------------------------------------------------------


def smooth_l1(state, feature):
    """The mean over H of d^2 / 2 near 0 and |d| - 1/2 from 1 on (EAGLE-1)."""
    total = 0.0
    for one, other in zip(state, feature, strict=True):
        d = (one - other).abs()
        total = total + (d * d / 2 if d < 1 else d - 0.5)
    return total / len(state)


def cross_entropy(p, log_q):
    return -sum(p[v] * log_q[v] for v in range(len(p)))


def best_ten(p, log_q):
    """The same over the 10 tokens that the target likes best (HASS)."""
    best = sorted(range(len(p)), key=lambda v: -p[v].item())[:10]
    return -sum(p[v] * log_q[v] for v in best)


def total_variation(p, log_q):
    return sum((p[v] - log_q[v].exp()).abs() for v in range(len(p))) / 2


FORMULAS = {
    "eagle1": (1.0, lambda p, log_q, state, truth: smooth_l1(state, truth) + 0.1 * cross_entropy(p, log_q)),
    "hass": (
        1.0,
        lambda p, log_q, state, truth: smooth_l1(state, truth) + 0.1 * cross_entropy(p, log_q) + best_ten(p, log_q),
    ),
    "eagle3": (0.8, lambda p, log_q, state, truth: cross_entropy(p, log_q)),
    "tv": (0.8, lambda p, log_q, state, truth: total_variation(p, log_q)),
}


def log_softmax(scores):
    largest = max(scores)
    norm = sum((score - largest).exp() for score in scores).log() + largest
    return [score - norm for score in scores]


def slow_micro_batch(net, weights, head, found, case, number):
    """Loss of one micro-batch, and (agreed, counted) of each step."""
    options = TrainOptions(iterations=1, precision="no", **case.options)
    recipe = options.recipe
    decay, formula = FORMULAS[options.objective or options.method]
    slow, features = SlowNet(net, weights), found.features.clone()
    drafted = list(range(VOCAB)) if case.target_ids is None else case.target_ids.tolist()
    torch.manual_seed(noise_seed(options.seed, number))
    if recipe.noise:  # in +-0.1
        features[:, : LENGTH - 2] += (torch.rand(ROWS, LENGTH - 2, features.shape[2], dtype=torch.float64) - 0.5) * 0.2
    going_on = range(LENGTH - 2)
    if options.later_share < 1:
        going_on = torch.randperm(LENGTH - 2)[: round(options.later_share * (LENGTH - 2))].tolist()
    losses: list[list] = [[] for _ in range(recipe.unroll_steps)]
    agreed = [0] * recipe.unroll_steps
    for row in range(ROWS):
        for entry in range(LENGTH - 2):
            chain = slow.draft(
                found.batch.ids[row].tolist(), features[row], entry, min(recipe.unroll_steps, LENGTH - 2 - entry)
            )
            for step, (state, read) in enumerate(chain):
                guessed = entry + 2 + step  # the entry knows the token before it, and the target what comes then
                truth = found.last[row, guessed - 1]
                target = head @ truth if found.logits is None else found.logits[row, guessed - 1]
                best = max(range(VOCAB), key=lambda v, target=target: target[v].item())
                if not found.batch.mask[row, guessed] or best not in drafted or (step and entry not in going_on):
                    continue
                p = [value.exp() for value in log_softmax([target[v] for v in drafted])]
                rows = weights.get("lm_head.weight", head)
                scores = (rows if case.seen is None else rows[case.seen]) @ read
                log_q = log_softmax([*scores])
                losses[step].append(formula(p, log_q, state, truth))
                agreed[step] += max(range(len(log_q)), key=lambda v, log_q=log_q: log_q[v].item()) == drafted.index(
                    best
                )
    loss = sum(decay**step * sum(each) / len(each) for step, each in enumerate(losses) if each)
    return loss, [(num, len(each)) for num, each in zip(agreed, losses, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_an_updates_loss_and_gradients_are_the_papers(name, tmp_path):
    """Through the trainer itself: the mean over the entries that count, decay^s, the mean over the micro-batches."""
    case = CASES[name]
    options = TrainOptions(iterations=1, precision="no", **case.options)
    net = random_net(3 if options.method == "eagle3" else 1, **case.net)
    head = Linear(torch.randn(VOCAB, HIDDEN, dtype=torch.float64)) if net.head is not None else net.read_head
    head.weight.requires_grad_(False)
    source = Texts(net, case.has_logits)
    weights = {key: value.requires_grad_() for key, value in net.tensors().items()}
    total, counts = 0.0, []
    for number in range(options.accumulation):
        loss, counted = slow_micro_batch(net, weights, head.weight, source.batch(number), case, number)
        total, counts = total + loss / options.accumulation, counted
    wanted = torch.autograd.grad(total, list(weights.values()))

    accelerator = Accelerator(mixed_precision="no", cpu=True)
    trainer = Trainer(net, head, case.target_ids, source, options, tmp_path, accelerator=accelerator)
    gradients = {}

    def watch(parameters, norm):  # called between the backward and the step
        gradients.update({key: parameter.grad.clone() for key, parameter in net.named_parameters()})

    trainer.accelerator.clip_grad_norm_ = watch
    trainer.run()
    sizes = read_checkpoint(tmp_path)["input_sizes"]
    for key, parameter in net.named_parameters():  # which ``tensors`` names as a file does
        parameter.data = gradients[key] * sizes.get(key, torch.ones(())).to(parameter.dtype)
    found = net.tensors()
    metrics = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert metrics["loss"] == pytest.approx(total.item(), rel=1e-9, abs=1e-9)
    for (key, gradient), other in zip(found.items(), wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")
        assert gradient.abs().max() > 1e-6, key
    assert head.weight.grad is None
    assert metrics["agreement"] == pytest.approx([num / max(of, 1) for num, of in counts])
    # Some entries count and some do not, as well as, with a draft vocabulary, some whose best token it lacks.
    assert 0 < counts[0][1] < ROWS * (LENGTH - 2)


# --- the loss of a head, in chunks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 8, 23])
def test_the_loss_of_a_head_does_not_depend_on_its_chunks(rows, monkeypatch):
    monkeypatch.setitem(objectives.CHUNK, "cpu", 8)
    for name, dtype in product(OBJECTIVES, (torch.float32, torch.float64)):
        check_chunks(name, rows, dtype)


def check_chunks(name, rows, dtype):
    torch.manual_seed(rows)
    read = torch.randn(rows, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, dtype=dtype, requires_grad=True)
    probs, where = (torch.randn(9, VOCAB, dtype=dtype) * 2).softmax(-1), torch.randint(9, (rows,))
    divergence = OBJECTIVES[name].divergence
    loss = head_loss(read, weight, probs, where, divergence, dtype) * 3  # a scale, as the mean over entries is one
    wanted = divergence(read @ weight.T, probs[where]).sum() * 3
    assert loss.dtype == dtype
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(loss, wanted, **tolerance)
    for one, other in zip(
        torch.autograd.grad(loss, (read, weight)), torch.autograd.grad(wanted, (read, weight)), strict=True
    ):
        torch.testing.assert_close(one, other, **tolerance)


def test_a_frozen_head_gets_no_gradient():
    torch.manual_seed(0)
    read = torch.randn(5, HIDDEN, requires_grad=True)
    weight, probs = torch.randn(VOCAB, HIDDEN), torch.randn(5, VOCAB).softmax(-1)
    head_loss(read, weight, probs, torch.arange(5), OBJECTIVES["eagle3"].divergence, torch.float32).backward()
    assert weight.grad is None
    assert read.grad.abs().max() > 0


def test_half_precision_products_keep_a_wide_loss():
    """As under autocast: the matrix products in bfloat16, probabilities, loss and parameters in float32."""
    torch.manual_seed(0)
    read, weight = (torch.randn(size, HIDDEN, requires_grad=True) for size in (20, VOCAB))
    probs, rows = torch.randn(20, VOCAB).softmax(-1), torch.arange(20)
    divergence = OBJECTIVES["eagle3"].divergence
    found, wanted = (
        head_loss(read, weight, probs, rows, divergence, dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=0)
    for one, other in zip(
        torch.autograd.grad(found, (read, weight)), torch.autograd.grad(wanted, (read, weight)), strict=True
    ):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.02 * other.norm()


@pytest.mark.parametrize("version", [1, 3])
def test_known_best_tokens_leave_the_truth_as_it_is(version):
    """With them no logit outside the draft vocabulary is computed."""
    net = random_net(version, target_ids=DRAFT_IDS if version == 3 else None)
    head = Linear(torch.randn(VOCAB, HIDDEN, dtype=torch.float64))
    found = Texts(net, has_logits=False).batch(0)
    whole = Truth.of(found, head, net.target_ids, torch.float64)
    known = replace(found, best=found.logits_of(head).argmax(-1))
    narrow = Truth.of(known, head, net.target_ids, torch.float64)
    torch.testing.assert_close(narrow.probs, whole.probs)
    for name in ("best", "last", "counts"):
        assert torch.equal(getattr(narrow, name), getattr(whole, name)), name
    drafted = range(VOCAB) if net.target_ids is None else DRAFT_IDS.tolist()
    places = {token: place for place, token in enumerate(drafted)}
    assert narrow.best.tolist() == [[places.get(token, -1) for token in row] for row in known.best.tolist()]
