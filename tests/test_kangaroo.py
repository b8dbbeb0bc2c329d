"""Kangaroo: its loss and its drafts against slow ones by hand, and the ordinary training, files and commands."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conftest import build, refused
from draftwing.cpu.noise import noise_of
from draftwing.decode import Decoder
from draftwing.errors import ConfigError, UnsupportedError
from draftwing.methods.base import Budget
from draftwing.methods.kangaroo import KangarooConfig, KangarooDrafter, KangarooNet
from draftwing.methods.objectives import OBJECTIVES, AlignedLoss, Truth
from draftwing.models.adapter import AdapterTarget
from draftwing.models.context import FeatureSpec
from draftwing.models.lean import LeanTarget
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.train.data import Batch
from draftwing.train.features import FeatureBatch

PROMPTS = ["def add(", "for row in rows: print(row)\nfor row in"]


@pytest.fixture(scope="module")
def target(folder_of):
    return LeanTarget.from_folder(folder_of("llama"), torch.float64, prepack=False)


def new_net(target, taps=(2,), **changes):
    torch.manual_seed(3)
    config = replace(KangarooConfig.for_target(target.config, taps), **changes)
    net = KangarooNet(config, target.embedding, target.head, None, torch.float64)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return net


def by_hand(net, target, ids):
    """(T, V) log q of the token after each token of a text: attention written out, head by head."""
    with torch.no_grad():
        x = target.score(ids[None], FeatureSpec((2,))).features[0]
        config, count = net.config, len(ids)

        def norm(x, weight):
            return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight

        heads = (norm(x, net.input_norm.weight) @ net.qkv.weight.T).view(count, -1, config.head_dim)
        half = config.head_dim // 2
        angles = torch.arange(count)[:, None] * config.rope.theta ** -(torch.arange(half).double() / half)

        def turned(head):
            real, imaginary = head[:, :half], head[:, half:]
            cos, sin = angles.cos(), angles.sin()
            return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], -1)

        group, mixed = config.num_heads // config.num_kv_heads, []
        for head in range(config.num_heads):
            q = turned(heads[:, head])
            k = turned(heads[:, config.num_heads + head // group])
            v = heads[:, config.num_heads + config.num_kv_heads + head // group]
            scores = (q @ k.T / config.head_dim**0.5).masked_fill(torch.ones(count, count).triu(1) > 0, -torch.inf)
            mixed.append(scores.softmax(-1) @ v)
        read = norm(x + torch.cat(mixed, -1) @ net.out.weight.T, net.norm.weight)
        return (read @ target.head.weight.T).log_softmax(-1)


# --- the loss --------------------------------------------------------------------------------------------------------


def batch_of(target, ids, mask):
    found = target.score(ids, FeatureSpec((2, target.num_layers)))
    width = target.hidden_size
    batch = Batch(ids, mask, mask.sum(1))
    return FeatureBatch(batch, found.features[..., :width], found.features[..., width:], found.logits)


def test_the_loss_is_the_cross_entropy_by_hand(target):
    torch.manual_seed(5)
    ids = torch.randint(61, (2, 9))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, :4] = mask[1, 7:] = False  # a prompt whose tokens do not count, and padding
    net, found = new_net(target).requires_grad_(True), batch_of(target, ids, mask)
    truth = Truth.of(found, target.head, None, torch.float64)
    (sums,) = AlignedLoss(net, OBJECTIVES["eagle3"], 1)(found, truth, agreement=True)
    loss, count, agreed = 0.0, 0, 0
    for row in range(2):
        log_q, p = by_hand(net, target, ids[row]), target.score(ids[row : row + 1]).logits[0].softmax(-1)
        for place in range(8):
            if mask[row, place + 1]:
                loss -= float((p[place] * log_q[place]).sum())
                agreed += int(log_q[place].argmax() == p[place].argmax())
                count += 1
    assert float(sums.loss.detach()) == pytest.approx(loss)
    assert (sums.count, int(sums.agreed)) == (count, agreed)
    sums.loss.backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in net.parameters())


def test_what_the_loss_has_not(target):
    for objective, steps, share, part in (
        ("eagle3", 2, 1.0, "learns one step"), ("eagle1", 1, 1.0, "predicts no features"),
        ("eagle3", 1, 0.5, "learns one step"),
    ):  # fmt: skip
        with refused(ConfigError, "'kangaroo'", part, "leave"):
            AlignedLoss(new_net(target), OBJECTIVES[objective], steps, 0.0, share)


def test_noise_and_a_narrow_vocabulary(target):
    """Of the loss alone: noise changes it in training and not in evaluation, and left-out tokens count for nobody."""
    torch.manual_seed(6)
    ids = torch.randint(61, (1, 12))
    net, found = new_net(target), batch_of(target, ids, torch.ones_like(ids, dtype=torch.bool))
    some = torch.arange(40)
    truth = Truth.of(found, target.head, some, torch.float64)
    loss = AlignedLoss(net, OBJECTIVES["eagle3"], 1, noise=2.0, target_ids=some)
    noisy, quiet = float(loss(found, truth)[0].loss), float(loss.eval()(found, truth)[0].loss)
    log_q, p = by_hand(net, target, ids[0])[:, :40].log_softmax(-1), found.logits[0, :, :40].softmax(-1)
    known = [place for place in range(11) if int(found.logits[0, place].argmax()) < 40]
    assert quiet == pytest.approx(-float((p[known] * log_q[known]).sum()))
    assert abs(noisy - quiet) > 1e-6


# --- drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_chains_are_those_by_hand(family, folder_of):
    """Token after token: the target's first layers on what was drafted, then the adapter, which has no window."""
    target = LeanTarget.from_folder(folder_of(family), torch.float64, prepack=False)
    net = new_net(target).requires_grad_(False)
    net.out.weight.mul_(20)  # so that all that it attends to matters
    names = [KangarooDrafter(net, target, name).name for name in ("", "kangaroo", "head")]
    assert names == ["kangaroo", "kangaroo", "kangaroo (head)"]
    decoder = Decoder(target, KangarooDrafter(net, target), budget=Budget(4))
    for prompt in ((4, 7, 7, 1, 30, *range(40, 50)), (9,)):
        decoder.admit(prompt, Sampling(max_tokens=12, ignore_eos=True))
    for _ in range(3):
        decoder.step()
    batch = SamplingBatch([Sampling()] * 2, noise_of(target.vocab_size, target.device))
    chains = decoder.drafter.propose(decoder.ctx, batch, Budget(4)).tokens
    for row, chain in zip(decoder.ctx.rows, chains.tolist(), strict=True):
        ids = list(row.tokens)
        for _ in range(4):
            ids.append(int(by_hand(net, target, torch.tensor(ids))[-1].argmax()))
        assert chain == ids[row.length :]


def test_targets_that_do_not_fit(target, folder_of):
    with refused(UnsupportedError, "Kangaroo", "runs in transformers"):
        KangarooDrafter(new_net(target), AdapterTarget(build("gpt2")))
    with refused(ConfigError, "behind 4 layers", "3 layers and 61 tokens"):
        KangarooDrafter(new_net(target, taps=(4,)), target)
    with refused(ConfigError, "2 heads", "and the target 4, 2 and 8", "trained for it"):
        KangarooDrafter(new_net(target, num_heads=2), target)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"taps": (1, 2)}, ["reads one hidden state", "(1, 2)"]),
        ({"taps": (0,)}, ["behind 1 or more of the target's layers"]),
        ({"num_kv_heads": 3}, ["multiple of num_kv_heads", "4 and 3"]),
        ({"head_dim": 0}, ["head_dim must be at least 1"]),
    ],
)
def test_shapes_that_no_adapter_has(changes, parts, target):
    with refused(ConfigError, *parts):
        replace(KangarooConfig.for_target(target.config, (2,)), **changes)


def test_in_bfloat16(target, folder_of):
    """As it is trained by default: the target in 16 bits, the adapter in 32."""
    half = LeanTarget.from_folder(folder_of("llama"), torch.bfloat16, prepack=False)
    net = KangarooNet(new_net(target).config, half.embedding, half.head).requires_grad_(False)
    decoder = Decoder(half, KangarooDrafter(net, half), budget=Budget(3, 2))
    decoder.admit([4, 8, 9, 30], Sampling(max_tokens=9, ignore_eos=True))
    drafted = 0
    while decoder.num_running:
        drafted += decoder.step().rows[0].num_drafted
    assert drafted > 0
