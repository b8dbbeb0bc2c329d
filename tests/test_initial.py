"""How a net starts: its closed forms against what they promise, before any training."""

import pytest
import torch

from draftwing.methods.eagle import initialise
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.methods.unroll import unroll
from draftwing.models.config import RopeConfig
from draftwing.models.linear import Linear
from draftwing.train.data import Batch
from draftwing.train.features import FeatureBatch

VOCAB, HIDDEN, HALF = 97, 128, 40
HEAD_DIM = 32


# Embedding and LM head of a target; its features at a position tell the token there and the one before it.
GENERATOR = torch.Generator().manual_seed(0)
EMBEDDING = torch.randn(VOCAB, HIDDEN, generator=GENERATOR)
HEAD = Linear(torch.randn(VOCAB, HIDDEN, generator=GENERATOR))
RANDOM = torch.randint(VOCAB, (64, 2 * HALF), generator=torch.Generator().manual_seed(9))


def batch_of(ids, num_taps=3):
    before = torch.cat([ids[:, :1], ids[:, :-1]], 1)
    after = torch.cat([ids[:, 1:], ids[:, -1:]], 1)
    last = HEAD.weight[after].detach()
    loud = torch.ones(HIDDEN).index_fill_(0, torch.tensor([3]), 200.0)  # as hidden states have it
    taps = [EMBEDDING[ids] * loud, EMBEDDING[ids] + EMBEDDING[before], last][-num_taps:]
    mask = torch.ones_like(ids, dtype=torch.bool)
    return FeatureBatch(Batch(ids, mask, torch.full((len(ids),), ids.shape[1])), torch.cat(taps, -1), last)


def net_of(version, **changes):
    config = EagleConfig(
        version=version,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-6,
        activation="silu",
        rope=RopeConfig("default", 10000.0, HEAD_DIM, HEAD_DIM, 512),
        max_position_embeddings=512,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        taps=(0, 1, 2) if version == 3 else (2,),
        **changes,
    )
    torch.manual_seed(0)
    return EagleNet(config, EMBEDDING, HEAD)


def repeated(num, seed):
    half = torch.stack([torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed + i)) for i in range(num)])
    return torch.cat([half[:, :HALF], half[:, :HALF]], 1)


@torch.no_grad()
def guessed(net, found, ids):
    """(B, E) whether the token at i + 2 is guessed."""
    step = next(unroll(net, ids, found.features, 1))
    guess = net.logits(step.read).argmax(-1).view(len(ids), -1)
    return guess == ids[:, 2:]


@pytest.mark.parametrize("changes", [{}, {"norm_output": True}, {"fc_norm": True}, {"norm_before_residual": True}])
def test_an_untrained_eagle3_net_copies_what_followed_the_same_two_tokens(changes):
    net = net_of(3, **changes)
    initialise(net, HEAD, [batch_of(RANDOM)])
    ids = repeated(8, seed=100)
    right = guessed(net, batch_of(ids), ids)
    assert right[:, HALF:].float().mean() > 0.7  # the second time
    assert right[:, : HALF - 2].float().mean() < 0.2  # nothing says what comes the first time


def test_other_inputs_than_the_shifted_token_are_not_looked_up():
    net = net_of(3, inputs="feature-unshifted")
    before = net.layer.qkv.weight.clone()
    initialise(net, HEAD, [batch_of(RANDOM)])
    assert torch.equal(net.layer.qkv.weight, before)


@pytest.mark.parametrize("version", [1, 3])
def test_fc_is_the_linear_guess_whatever_the_size_of_channels(version):
    """Where the next token follows from the last one, a linear map knows it, loud channels or not."""
    successor = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))
    texts = [torch.randint(VOCAB, (64,), generator=torch.Generator().manual_seed(2))]
    for _ in range(30):
        texts.append(successor[texts[-1]])
    ids = torch.stack(texts, 1)
    found = batch_of(ids, 3 if version == 3 else 1)
    net = net_of(version, **({"inputs": "feature-unshifted"} if version == 3 else {}))
    initialise(net, HEAD, [found])
    assert guessed(net, found, ids).float().mean() > 0.9


def test_padding_is_not_learnt_from():
    found = batch_of(RANDOM)
    lengths = torch.full((64,), 30)
    whole, short = net_of(3), net_of(3)
    cut = RANDOM[:, :30]
    initialise(short, HEAD, [batch_of(cut)])
    padded = FeatureBatch(
        Batch(RANDOM, found.batch.mask, lengths), found.features.index_fill(1, torch.arange(30, 80), 1e6), found.last
    )
    # The last real position's follower differs: it is cut from both.
    padded.last[:, :30] = batch_of(cut).last
    initialise(whole, HEAD, [padded])
    for name, value in whole.state_dict().items():
        assert torch.allclose(value, short.state_dict()[name], atol=1e-4), name


def test_the_scale_of_the_logits_is_solved_too():
    """A guess that knows little is not sure of itself: no other scale of the head has less cross-entropy."""
    found = batch_of(RANDOM)
    net = net_of(3)
    initialise(net, HEAD, [found])
    assert (net.norm.weight == 1).all()
    with torch.no_grad():
        step = next(unroll(net, RANDOM, found.features, 1))
        logits = net.draft_logits(step.read)
        probs = HEAD.forward(found.last[:, 1:-1].reshape(-1, HIDDEN)).softmax(-1)

        def entropy(scale):
            return float(-(probs * (logits * scale).log_softmax(-1)).sum(-1).mean())

    assert entropy(1.0) < min(entropy(0.7), entropy(1.4))
    assert entropy(1.0) < 1.1 * torch.log(torch.tensor(float(VOCAB)))  # no worse than knowing nothing
