"""Nets that guess several tokens in one pass: trained, saved, drafted with, and held against slow references."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import draftwing.cli.main as cli
from conftest import refused
from draftwing.cli.options import Drafting
from draftwing.cpu.noise import noise_of
from draftwing.decode import Decoder
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.formats.identity import target_id
from draftwing.formats.tensors import to_maps
from draftwing.loading import load_drafter, load_target
from draftwing.methods.base import MEDUSA_TREE, Budget
from draftwing.methods.block import BlockDrafter
from draftwing.methods.calibration import Calibration
from draftwing.methods.dflash import dflash_taps
from draftwing.methods.eagle import ParallelDrafter
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.methods.medusa import PICKLE, load_medusa
from draftwing.methods.method import NewNet
from draftwing.methods.objectives import OBJECTIVES, Truth
from draftwing.methods.registry import convert, diagnose, get_method, method_of_folder
from draftwing.methods.unroll import UnrolledLoss, unroll
from draftwing.models.attention import CausalAttention
from draftwing.models.config import ModelConfig, read_config
from draftwing.models.context import Context, FeatureSpec, Row
from draftwing.runtime.tree_builder import TreeBuilder
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.train.data import Batch
from draftwing.train.features import FeatureBatch
from draftwing.train.options import TrainOptions
from draftwing.tree import PAD
from test_exact import erratic

BLOCKS = ("medusa", "hydra", "dflash", "dspark", "domino")


@pytest.fixture(scope="module")
def small(folder_of):
    """A target to make untrained nets for."""
    return load_target(folder_of("llama", head_dim=32), prepack=False)


def new_net(kind, target, folder, num_draft=None, numbers=0.1, **settings):
    """An untrained net, with small random numbers added to it."""
    torch.manual_seed(3)
    entry, like = get_method(kind), ModelConfig.from_hf(read_config(folder))
    ids = None if num_draft is None else torch.randperm(target.vocab_size)[:num_draft].sort().values
    embedding = target.embedding.plain().float()
    new = NewNet(like, entry.taps(like.num_layers), target_id(target), embedding, target.head, ids, settings)
    net = entry.new(new)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(numbers * torch.randn_like(weight))
    return net


def scored(target, net, rows=2, length=14):
    """A batch of random text with the target's features; the last row is padded."""
    torch.manual_seed(5)
    ids = torch.randint(3, target.vocab_size, (rows, length))
    mask = torch.rand(rows, length) < 0.8
    mask[-1, -4:] = False
    spec = FeatureSpec((*net.config.taps, target.num_layers))
    output = target.score(ids, spec)
    features = output.features.float()
    width = features.shape[-1] - target.hidden_size
    batch = Batch(ids, mask, torch.tensor([length] * (rows - 1) + [length - 4]))
    return FeatureBatch(batch, features[..., :width], features[..., width:], output.logits.float())


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["medusa", "hydra", "dflash", "eagle1", "eagle3", "mtp", "kangaroo"])
def test_the_texts_own_tokens_as_truth(method, small, folder_of):
    """Cross-entropy with the next token is that with a distribution which is sure of it."""
    kind, options = get_method(method), TrainOptions(method, iterations=1)
    settings = {**options.settings, "num_layers": 1} if "num_layers" in options.settings else options.settings
    net = new_net(method, small, folder_of("llama", head_dim=32), **settings)
    found, steps = scored(small, net), options.recipe.unroll_steps
    truth = Truth.of(found, small.head, None, torch.float32)
    sure = F.one_hot(truth.after[:, 0].long().clamp(min=0), small.vocab_size).float()
    sums = []
    for objective, told in (("next-token", truth), ("eagle3", replace(truth, probs=sure))):
        torch.manual_seed(0)
        scorer = (kind.loss or UnrolledLoss)(net, OBJECTIVES[objective], steps).eval()
        sums.append([each.loss.item() for each in scorer(found, told)])
    assert sums[0][0] > 0
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-6, atol=1e-6)  # sums in float32, of another order


@pytest.mark.parametrize("method", BLOCKS)
def test_features_are_not_compared(method, small, folder_of):
    net = new_net(method, small, folder_of("llama", head_dim=32))
    with refused(ConfigError, f"'{method}' predicts no features", "--objective"):
        get_method(method).loss(net, OBJECTIVES["eagle1"], net.num_levels)


@pytest.mark.parametrize("method", BLOCKS)
def test_16_bits_come_to_nearly_the_same(method, small, folder_of):
    """Under autocast, as runs train unless told otherwise: losses near float32's, and gradients for all weights."""
    net = new_net(method, small, folder_of("llama", head_dim=32), num_layers=2, unroll_steps=3)
    found, sums = scored(small, net), []
    for enabled in (False, True):
        scorer = get_method(method).loss(net, OBJECTIVES["medusa"], 3).eval()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            sums.append(scorer(found, Truth.of(found, small.head, None, torch.float32), agreement=True))
    for one, other in zip(*sums, strict=True):
        assert other.loss.item() == pytest.approx(one.loss.item(), rel=0.05)
    sum(each.loss for each in sums[1]).backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in net.parameters())


@pytest.mark.parametrize("method", BLOCKS)
def test_fewer_blocks_in_an_update(method, small, folder_of):
    """``later_share`` thins out the entries that blocks start from, at random in training."""
    net = new_net(method, small, folder_of("llama", head_dim=32), unroll_steps=3)
    found, seen = scored(small, net, length=42), set()
    loss = get_method(method).loss(net, OBJECTIVES["medusa"], 3, 0.0, 0.5)
    for _ in range(4):
        entries = loss.train().entries(found)
        assert len(entries) == round(0.5 * net.share * 40)
        assert entries.max() < 40
        seen.add(tuple(entries.tolist()))
    assert len(seen) > 1
    assert loss.eval().entries(found).tolist() == loss.entries(found).tolist()


# --- slow references -------------------------------------------------------------------------------------------------


def guesses(found, ids, levels, entries=None):
    """Every guess that counts: level, row, entry, the guessed position, and the target's logits there."""
    rows, length = found.batch.ids.shape
    for level, row, entry in product(range(levels), range(rows), range(length - 2) if entries is None else entries):
        guessed = entry + 2 + level
        if guessed < length and found.batch.mask[row, guessed]:
            p = found.logits[row, guessed - 1]
            if int(p.argmax()) in ids:
                yield level, row, entry, guessed, p


def check_loss(sums, wanted, rel=1e-4):
    """``wanted``: (level, loss) of every guess that counts."""
    for level, each in enumerate(sums):
        losses = [float(loss) for at, loss in wanted if at == level]
        assert each.count == len(losses) > 0
        assert each.loss.item() == pytest.approx(sum(losses), rel=rel)


def drafted(target, drafter, budget, max_tokens=8):
    """Every row of every step: the committed tokens, the pending one, and the row's nodes with parents and depths."""
    decoder = Decoder(target, drafter, budget=budget)
    for row, prompt in enumerate(((4, 7, 7, 1, 30), (9, 2, 11))):
        decoder.admit(prompt, Sampling(max_tokens=max_tokens - row, ignore_eos=True))
        decoder.step()
    while decoder.num_running:
        sequences = [(list(row.tokens[: row.length]), row.tokens[row.length]) for row in decoder.ctx.rows]
        tree = decoder.step().tree
        for row, (sequence, pending) in enumerate(sequences):
            nodes = [node for node in range(tree.num_nodes) if tree.tokens[row, node] != PAD]
            assert tree.tokens[row, 0] == pending
            yield sequence, pending, tree, row, nodes[1:]


def features_of(target, sequence, taps):
    """(T, F) in float32."""
    return target.score(torch.tensor([sequence]), FeatureSpec(taps)).features[0].float()


def check_levels(tree, row, nodes, best_of):
    """Each level's nodes are among its two best tokens, ``best_of(level)``, and the best one is there."""
    tokens, depths = tree.tokens[row].tolist(), tree.depths[row].tolist()
    for level in range(max((depths[node] for node in nodes), default=0)):
        best = best_of(level)
        here = {tokens[node] for node in nodes if depths[node] == level + 1}
        assert here <= set(best)
        assert best[0] in here


# --- how trees grow from a block -------------------------------------------------------------------------------------


def grown(distributions, budget, temperature, *, wide):
    """A tree from distributions (B, K, V), one for each level; ``wide`` says them to every node by itself."""
    rows, vocab = len(distributions), distributions.shape[-1]
    ctx = Context(torch.device("cpu"), [Row([1, 2, 3 + row], 2, 2) for row in range(rows)])
    requests = [Sampling(temperature=temperature, seed=row) for row in range(rows)]
    sampling = SamplingBatch(requests, noise_of(vocab, torch.device("cpu")))
    growth = TreeBuilder(ctx.pending(), [True] * rows, [3] * rows, sampling, budget, Calibration(1.5, 0.1))
    for level in range(distributions.shape[1]):
        logits = distributions[:, level : level + 1]
        growth.extend(logits.expand(-1, growth.num_newest, -1) if wide else logits)
        if growth.done:
            break
    return growth.finish().tree


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "budget",
    [Budget(4), Budget(3, 3), Budget(4, 4, 9), Budget(paths=((0,), (1,), (0, 0), (1, 2), (0, 0, 1))), erratic(4, 3, 9)],
    ids=["chain", "level", "dynamic", "static", "rule"],
)
def test_one_distribution_for_a_level_is_the_same_distribution_for_each_node(budget, temperature):
    torch.manual_seed(1)
    distributions = 2 * torch.randn(3, 4, 30)
    one, other = (grown(distributions, budget, temperature, wide=wide) for wide in (False, True))
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.parents, other.parents)
    if one.confidence is not None:
        assert torch.equal(one.confidence, other.confidence)


def test_a_dynamic_tree_holds_the_likeliest_paths():
    """Best-first over a block's distributions, against all paths there are (DDTree's optimum)."""
    torch.manual_seed(2)
    distributions = 2 * torch.randn(1, 3, 8).double()
    tree = grown(distributions, Budget(3, 8, 12), 0.0, wide=False)
    chances = distributions[0].softmax(-1)
    every = {
        path: float(torch.stack([chances[level, token] for level, token in enumerate(path)]).prod())
        for depth in (1, 2, 3)
        for path in product(range(8), repeat=depth)
    }
    best = sorted(every, key=lambda path: -every[path])[:12]
    paths, tokens, parents = {0: ()}, tree.tokens[0].tolist(), tree.parents[0].tolist()
    for node in range(1, len(tokens)):
        paths[node] = (*paths[parents[node]], tokens[node])
    assert sorted(list(paths.values())[1:]) == sorted(best)


def test_medusas_tree():
    """The shape that its authors publish: nodes on each level, and some of those that it has and has not."""
    assert [sum(len(path) == depth for path in MEDUSA_TREE) for depth in (1, 2, 3, 4)] == [10, 28, 23, 2]
    assert len(set(MEDUSA_TREE)) == 63
    assert {(0, 9), (1, 6), (2, 2), (3, 1), (0, 0, 9), (0, 1, 2), (0, 7, 0), (1, 0, 1)} <= set(MEDUSA_TREE)
    assert not {(1, 7), (3, 2), (0, 8, 0), (1, 1, 0), (0, 0, 0, 2)} & set(MEDUSA_TREE)
    assert Drafting(tree="medusa").budget().paths == MEDUSA_TREE


# --- Medusa ----------------------------------------------------------------------------------------------------------


def medusa_head(net, level, state):
    """What the paper says of one head, for one hidden state (H,)."""
    for layer in net.blocks[level]:
        state = state + F.silu(layer.weight @ state + (0 if layer.bias is None else layer.bias))
    return net.heads[level].weight @ state


def test_medusa_begins_as_the_targets_own_head(small, folder_of):
    entry, folder = get_method("medusa"), folder_of("llama", head_dim=32)
    like, ids = ModelConfig.from_hf(read_config(folder)), torch.tensor([4, 9, 30])
    new = NewNet(like, (like.num_layers,), target_id(small), small.embedding.plain().float(), small.head, ids, {})
    net, state = entry.new(new), torch.randn(6, like.hidden_size)
    wanted = small.head.forward(state.to(small.dtype)).float()
    for level in range(net.num_levels):
        found = net.level_logits(level, net.residual(level, state))
        torch.testing.assert_close(found[:, ids], wanted[:, ids])
        assert found.isinf().sum() == 6 * (small.vocab_size - 3)


@pytest.mark.parametrize("prepack", [False, True])
def test_medusa_drafts_from_the_last_feature(prepack, folder_of):
    """Every step of rows of several lengths: the best tokens of each head on the feature before the pending token."""
    folder = folder_of("llama", head_dim=32)
    plain = load_target(folder, prepack=False)
    net, target = new_net("medusa", plain, folder), load_target(folder) if prepack else plain
    reference = new_net("medusa", plain, folder)
    drafter = BlockDrafter(net.prepack() if prepack else net.requires_grad_(False), target)
    for sequence, _, tree, row, nodes in drafted(target, drafter, Budget(3, 2), 12):
        feature = features_of(plain, sequence, (plain.num_layers,))[-1]
        check_levels(
            tree, row, nodes, lambda level, f=feature: medusa_head(reference, level, f).topk(2).indices.tolist()
        )


# --- Hydra -----------------------------------------------------------------------------------------------------------


def hydra_head(net, level, feature, tokens):
    """What the paper says of one head, for one hidden state (H,) and the tokens from the pending one on."""
    known = torch.cat([feature, *[net.embedding.table[token] for token in tokens]])
    x = net.straight[level].weight @ known + F.silu(net.mixed[level].weight @ known + net.mixed[level].bias)
    for layer in net.further[level]:
        x = x + F.silu(layer.weight @ x + layer.bias)
    return net.heads[level].weight @ x


@pytest.mark.parametrize("settings", [{}, {"num_layers": 2, "unroll_steps": 3, "num_draft": 25}])
@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_the_loss_is_the_papers(method, settings, small, folder_of):
    """Head by head, position by position, with the text's tokens as those drafted so far; weighted 0.8^k."""
    if method == "medusa" and settings:
        settings = {**settings, "has_bias": False}
    net = new_net(method, small, folder_of("llama", head_dim=32), **settings)
    found = scored(small, net)
    loss = get_method(method).loss(net, OBJECTIVES["medusa"], net.num_levels).eval()
    sums = loss(found, Truth.of(found, small.head, net.target_ids, torch.float32), agreement=True)
    ids = torch.arange(small.vocab_size) if net.target_ids is None else net.target_ids
    wanted, right = [], [0] * net.num_levels
    with torch.no_grad():
        for level, row, entry, guessed, p in guesses(found, ids, net.num_levels):
            feature, tokens = found.features[row, entry], found.batch.ids[row, entry + 1 : guessed]
            q = medusa_head(net, level, feature) if method == "medusa" else hydra_head(net, level, feature, tokens)
            wanted.append((level, F.cross_entropy(q, p[ids].softmax(-1))))
            right[level] += int(ids[q.argmax()]) == int(p.argmax())
    check_loss(sums, wanted)
    assert [int(each.agreed) for each in sums] == right
    assert loss.objective.decay == 0.8  # per head, applied by the trainer


def test_hydra_drafts_along_each_path(folder_of):
    """Every node of every tree: among the best tokens of its level's head after the tokens on its own path."""
    folder = folder_of("llama", head_dim=32)
    target = load_target(folder, prepack=False)
    net, seen = new_net("hydra", target, folder).requires_grad_(False), 0
    for straight in net.straight:
        straight.weight[:, net.config.hidden_size :].mul_(100)  # so that tokens matter
    for sequence, pending, tree, row, nodes in drafted(target, BlockDrafter(net, target), Budget(4, 3, 10)):
        feature = features_of(target, sequence, (target.num_layers,))[-1]
        paths, probs = {0: (pending,)}, {0: 1.0}
        for node in nodes:
            parent, token = int(tree.parents[row, node]), int(tree.tokens[row, node])
            above = paths[parent]
            logits = hydra_head(net, len(above) - 1, feature, above)
            assert token in logits.topk(3).indices
            paths[node], probs[node] = (*above, token), probs[parent] * float(logits.softmax(-1)[token])
            assert float(tree.confidence[row, node]) == pytest.approx(probs[node], rel=1e-3)
        likeliest = hydra_head(net, 0, feature, (pending,)).argmax()
        assert not nodes or (pending, int(likeliest)) in paths.values()  # near its end a row drafts nothing
        seen += len(nodes)
    assert seen > 20


def test_hydra_begins_as_the_targets_own_head(small, folder_of):
    net, state = new_net("hydra", small, folder_of("llama", head_dim=32), numbers=0.0), torch.randn(3, 1, 32)
    tokens, carried = torch.tensor([[4], [9], [7]]), None
    wanted = small.head.forward(state[:, 0].to(small.dtype)).float()
    for level in range(net.num_levels):
        found, carried, _ = net.guess(level, state, tokens, carried)
        torch.testing.assert_close(found[:, 0], wanted)
    with refused(ConfigError, "a Hydra net reads one hidden state", "(1, 2)"):
        replace(net.config, taps=(1, 2))


# --- DFlash ----------------------------------------------------------------------------------------------------------


def turned(heads, position, theta):
    """RoPE of (heads, D) at one position, half a head apart."""
    half = heads.shape[1] // 2
    angles = position * theta ** (-torch.arange(half) / half)
    left, right = heads[:, :half], heads[:, half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], 1)


def normed(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def applied(matrix, row):
    return matrix.weight @ row + (0 if matrix.bias is None else matrix.bias)


def dflash_block(net, features, pending):
    """What the LM head reads of one block (N, H) after features (L, F): token by token, key by key."""
    config, start = net.config, len(features)
    sizes = [config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim]
    context = [normed(net.fc.weight @ feature, net.state_norm) for feature in features]
    places = range(start, start + config.block_size)
    mask = net.mask if config.mask_token_id is None else net.embedding.table[config.mask_token_id]
    x = [net.embedding.table[pending] if place == start else mask for place in places]
    for index, layer in enumerate(net.layers):
        window = config.windows[index] if config.windows and config.windows[index] else 1000
        reach = 0 if config.causal and config.causal[index] else 1000

        def parts(row, place, layer=layer):
            q, k, v = applied(layer.qkv, row).split([*sizes, sizes[1]])
            q, k = (
                normed(each.view(-1, config.head_dim), norm) for each, norm in ((q, layer.q_norm), (k, layer.k_norm))
            )
            return turned(q, place, config.rope.theta), turned(k, place, config.rope.theta), v.view(-1, config.head_dim)

        own = [parts(normed(row, layer.input_norm), place) for row, place in zip(x, places, strict=True)]
        seen = [parts(row, place)[1:] for place, row in enumerate(context)] + [each[1:] for each in own]
        rows = []
        for at, row, (q, _, _) in zip(places, x, own, strict=True):
            mixed, near = [], [each for place, each in enumerate(seen) if at - window < place <= at + reach]
            for head, query in enumerate(q):
                group = head * config.num_kv_heads // config.num_heads
                scores = torch.stack([query @ k[group] for k, _ in near]) / config.head_dim**0.5
                mixed.append(sum(w * v[group] for w, (_, v) in zip(scores.softmax(0), near, strict=True)))
            row = row + applied(layer.out, torch.cat(mixed))
            gate, up = (layer.mlp.gate_up.weight @ normed(row, layer.post_norm)).chunk(2)
            rows.append(row + layer.mlp.down.weight @ (F.silu(gate) * up))
        x = rows
    return torch.stack([normed(row, net.norm) for row in x])


def test_dflashs_loss_is_the_papers(small, folder_of):
    """The mask k places after the pending token guesses the token there, weighted exp(-(k-1)/gamma)."""
    net = new_net("dflash", small, folder_of("llama", head_dim=32), num_layers=1, unroll_steps=3)
    found = scored(small, net)
    loss = get_method("dflash").loss(net, OBJECTIVES["dflash"], 3).eval()
    sums, wanted = loss(found, Truth.of(found, small.head, None, torch.float32)), []
    with torch.no_grad():
        # A quarter of the 12 entries, evenly spaced.
        for level, row, entry, _, p in guesses(found, range(small.vocab_size), 3, (0, 4, 8)):
            read = dflash_block(net, found.features[row, : entry + 1], found.batch.ids[row, entry + 1])
            wanted.append((level, F.cross_entropy(small.head.weight.float() @ read[1 + level], p.softmax(-1))))
    check_loss(sums, wanted, 1e-3)
    assert loss.objective.decay == pytest.approx(2.718281828 ** (-1 / 4))  # a block of 8


def test_dflash_drafts_from_all_features(folder_of):
    """Rows of several lengths, through slots: each step has the distributions of one block after the text so far."""
    folder = folder_of("llama", head_dim=32)
    target = load_target(folder, prepack=False)
    net = new_net("dflash", target, folder, num_layers=2, unroll_steps=3).requires_grad_(False)
    for sequence, pending, tree, row, nodes in drafted(target, BlockDrafter(net, target), Budget(3, 2)):
        logits = (
            dflash_block(net, features_of(target, sequence, net.config.taps), pending) @ target.head.weight.float().T
        )
        check_levels(tree, row, nodes, lambda level, logits=logits: logits[1 + level].topk(2).indices.tolist())


def test_dflash_shapes(small, folder_of):
    assert dflash_taps(36) == (2, 10, 18, 26, 34)  # of the layers 1, 9, 17, 25 and 33, whose outputs these are
    assert dflash_taps(28) == (2, 8, 14, 20, 26)
    assert dflash_taps(4) == dflash_taps(3) == (2,)
    folder = folder_of("llama", head_dim=32)
    assert len(new_net("dflash", small, folder).layers) == 5
    for settings, part in (
        ({"block_size": 1}, "block_size from 2"),
        ({"num_layers": 0}, "num_layers must be at least 1"),
    ):
        with refused(ConfigError, part):
            new_net("dflash", small, folder, **settings)
    with refused(ConfigError, "num_layers belongs to medusa, hydra, dflash, dspark", "'eagle3'"):
        TrainOptions("eagle3", iterations=1, num_layers=2)


# --- DSpark ----------------------------------------------------------------------------------------------------------


def dspark_distribution(net, head, x, before):
    """Logits of one place (H,) after one token, and how sure the net is of them."""
    known = torch.cat([x, net.embedding_before[before]])
    trust = net.trust.weight[0] @ known + net.trust.bias[0]
    return head @ x + net.head_after.weight @ net.embedding_before[before], trust.sigmoid()


def test_dsparks_loss_is_the_papers(small, folder_of):
    """Each place with the token before it; its confidence is the overlap of its distribution with the target's."""
    net = new_net("dspark", small, folder_of("llama", head_dim=32), num_layers=1, unroll_steps=3, rank=6)
    net.head_after.weight.data.mul_(20)  # so that the token before matters
    found, head = scored(small, net), small.head.weight.float()
    loss = get_method("dspark").loss(net, OBJECTIVES["dflash"], 3).eval()
    sums, wanted = loss(found, Truth.of(found, small.head, None, torch.float32)), []
    with torch.no_grad():
        for level, row, entry, guessed, p in guesses(found, range(small.vocab_size), 3, (0, 4, 8)):
            read = dflash_block(net, found.features[row, : entry + 1], found.batch.ids[row, entry + 1])
            logits, sure = dspark_distribution(net, head, read[1 + level], found.batch.ids[row, guessed - 1])
            overlap = torch.minimum(p.softmax(-1), logits.softmax(-1)).sum()
            miss = F.binary_cross_entropy(sure, overlap)
            wanted.append((level, F.cross_entropy(logits, p.softmax(-1)) + miss))
    check_loss(sums, wanted, 1e-3)
    before = net.fc.weight.grad
    objective = replace(loss.objective, divergences=((0.0, OBJECTIVES["tv"].divergences[0][1]),))
    alone = get_method("dspark").loss(net, objective, 3).eval()
    sum(each.loss for each in alone(found, Truth.of(found, small.head, None, torch.float32))).backward()
    assert before is None
    assert net.fc.weight.grad is None or net.fc.weight.grad.abs().max() == 0  # what trust learns changes no guess
    assert net.trust.weight.grad.abs().max() > 0


def test_dominos_loss_reads_the_texts_tokens(small, folder_of):
    """Every level is trained on the distribution that it drafts with, after the tokens of the text."""
    net = new_net("domino", small, folder_of("llama", head_dim=32), num_layers=1, unroll_steps=3, rank=6, state_size=5)
    found, loss = scored(small, net), get_method("domino").loss(net, OBJECTIVES["dflash"], 3).eval()
    sums, wanted = loss(found, Truth.of(found, small.head, None, torch.float32)), []
    with torch.no_grad():
        for level, row, entry, guessed, p in guesses(found, range(small.vocab_size), 3, (0, 4, 8)):
            read = dflash_block(net, found.features[row, : entry + 1], found.batch.ids[row, entry + 1])
            block, carried = net.open(read[None], 3), None
            for place in range(level + 1):
                guess = net.guess(place, block, found.batch.ids[row, entry + 1 + place].view(1, 1), carried)
                carried = guess.carried
            assert guessed == entry + 2 + level
            wanted.append((level, F.cross_entropy(guess.logits[0, 0], p.softmax(-1))))
    check_loss(sums, wanted, 1e-3)


def test_dspark_drafts_along_each_path(folder_of):
    """Every node among the best after the token before it; the less sure, the less likely."""
    folder = folder_of("llama", head_dim=32)
    target = load_target(folder, prepack=False)
    net = new_net("dspark", target, folder, num_layers=1, unroll_steps=3, rank=6).requires_grad_(False)
    net.head_after.weight.mul_(20)  # so that tokens matter
    head = target.head.weight.float()
    for sequence, pending, tree, row, nodes in drafted(target, BlockDrafter(net, target), Budget(3, 2, 8)):
        read = dflash_block(net, features_of(target, sequence, net.config.taps), pending)
        tokens, depths, probs = tree.tokens[row].tolist(), tree.depths[row].tolist(), {0: 1.0}
        for node in nodes:
            above = int(tree.parents[row, node])
            logits, sure = dspark_distribution(net, head, read[depths[node]], tokens[above])
            assert tokens[node] in logits.topk(2).indices
            probs[node] = probs[above] * float(sure * logits.softmax(-1)[tokens[node]])
            assert float(tree.confidence[row, node]) == pytest.approx(probs[node], rel=1e-3)


# --- P-EAGLE ---------------------------------------------------------------------------------------------------------


def test_peagle_drafts_a_chain_from_one_forward(folder_of):
    """Every level's best tokens are those after the mask entries of one causal forward over the whole sequence."""
    folder = folder_of("llama", head_dim=32)
    target, ids = load_target(folder, prepack=False), torch.arange(3, 60, 3)
    like = {"mask_token_id": 7, "num_levels": 4, "num_layers": 2, "fc_norm": True}
    torch.manual_seed(3)
    config = EagleConfig.for_target(3, ModelConfig.from_hf(read_config(folder)), len(ids), **like)
    net = EagleNet(config, target.embedding.plain().float(), None, ids).requires_grad_(False)
    net.mask_hidden.add_(torch.randn_like(net.mask_hidden))
    deepest = 0
    for sequence, pending, tree, row, nodes in drafted(target, ParallelDrafter(net, target), Budget(6, 2, 8)):
        features = torch.cat([features_of(target, sequence, config.taps), net.mask_hidden.expand(3, -1)])
        cis = net.rotary.cis(torch.arange(len(features)), upto=len(features)).view(len(features), 1, -1)
        attend = CausalAttention(1, len(features), [None] * 2, 32**-0.5, cis)
        read, _ = net.forward(torch.tensor([*sequence[1:], pending, 7, 7, 7]), net.fuse(features), attend)
        logits = net.logits(read)[len(sequence) - 1 :]
        check_levels(tree, row, nodes, lambda level, logits=logits: logits[level].topk(2).indices.tolist())
        deepest = max(deepest, int(tree.depths[row].max()))
    assert deepest == 4


def test_peagle_is_trained_on_what_it_drafts_from(small, folder_of):
    """An entry of any step reads what the drafter's one forward reads: the true entries up to it, and masks."""
    net = new_net("peagle", small, folder_of("llama", head_dim=32), num_layers=2, unroll_steps=3)
    assert (net.config.mask_token_id, net.num_levels) == (small.vocab_size - 1, 3)
    found = scored(small, net)
    mask, length = net.config.mask_token_id, found.batch.ids.shape[1] - 2
    for share in (1.0, 0.5):
        for step in unroll(net, found.batch.ids, found.features, 3, share):
            read = step.read.view(2, len(step.entries), -1)
            for place, entry in enumerate(step.entries.tolist()):
                count = entry + 1 + step.index
                features = torch.cat([found.features[1, : entry + 1], net.mask_hidden.expand(step.index, -1)])
                tokens = torch.cat([found.batch.ids[1, 1 : entry + 2], torch.full((step.index,), mask)])
                cis = net.rotary.cis(torch.arange(count), upto=count).view(count, 1, -1)
                attend = CausalAttention(1, count, [None] * 2, 32**-0.5, cis)
                one = net.forward(tokens, net.fuse(features), attend)[0][-1]
                torch.testing.assert_close(read[1, place], one, rtol=1e-4, atol=1e-4)
            assert len(step.entries) == (length if step.index == 0 else round(share * length))
    get_method("peagle").start(net, small.head, [found])
    assert torch.allclose(net.mask_hidden, found.features[:, :-2][found.batch.real[:, 2:]].mean(0))
    loss = get_method("peagle").loss(net, OBJECTIVES["eagle3"], 3)
    sum(each.loss for each in loss(found, Truth.of(found, small.head, None, torch.float32))).backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in net.parameters())
    with refused(ConfigError, "this peagle head guesses 3 tokens, and unroll_steps is 4"):
        get_method("peagle").loss(net, OBJECTIVES["eagle3"], 4)


# --- DFlash and DSpark heads of others -------------------------------------------------------------------------------

NESTED = {"mask_token_id": 7, "target_layer_ids": [0, 1]}
MARKOV = {"markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True}
FLAT = {**NESTED, **MARKOV, "confidence_head_with_markov": True, "num_anchors": 8}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
Z_LAB = {"architectures": ["DFlashDraftModel"], "block_size": 4, "num_target_layers": 3, "dflash_config": NESTED}
SPECFORGE = {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0, **FLAT}
SPECULATORS = {"block_size": 4, "mask_token_id": 7, "aux_hidden_state_layer_ids": [1, 2], "draft_vocab_size": 20}
DOMINO = {**NESTED, "projector_type": "domino", "emb_dim": 6, "gru_hidden_dim": 10, "shift_label": True}
DOMINO["pure_draft_prefix_len"] = 1
MEANT = {"from_anchor": True, "rank": 6, "state_size": 10, "num_uncorrected": 1}
# Config fields of published layouts: of the top level, and of the layer's shape; their kind; and the net they mean.
PUBLISHED = {
    "z-lab": (Z_LAB, {}, "dflash", {"windows": (), "causal": (), "from_anchor": False, "mask_token_id": 7}),
    "z-lab windows": (Z_LAB, WINDOWS, "dflash", {"windows": (5, None), "causal": (True, False)}),
    "vllm windows": (
        {**Z_LAB, "dflash_config": {**NESTED, "use_swa": True, "swa_window_size": 4, "causal": False}},
        {}, "dflash", {"windows": (4, 4), "causal": ()},
    ),
    "nested size": (
        {**Z_LAB, "block_size": None, "dflash_config": {**NESTED, "block_size": 3, "sample_from_anchor": True}},
        {"attention_bias": True}, "dflash", {"block_size": 3, "from_anchor": True, "attention_bias": True},
    ),
    "specforge": (
        {"architectures": ["DSparkDraftModel"], "block_size": 3, "dflash_config": SPECFORGE},
        {}, "dspark", {"from_anchor": True, "rank": 6},
    ),
    "deepspec": (
        {"architectures": ["Qwen3DSparkModel"], "block_size": 3, **FLAT},
        {}, "dspark", {"from_anchor": True, "own_head": False},
    ),
    "speculators": (
        {"speculators_model_type": "dflash", **SPECULATORS, "sliding_window_non_causal": True},
        WINDOWS, "dflash", {"windows": (5, None), "causal": (), "own_head": True},
    ),
    "domino": ({**Z_LAB, "architectures": ["DominoDraftModel"], "dflash_config": DOMINO}, {}, "domino", MEANT),
    "domino masks": (
        {**Z_LAB, "dflash_config": {**DOMINO, "shift_label": False, "pure_draft_prefix_len": 0}},
        {}, "domino", {**MEANT, "from_anchor": False, "num_uncorrected": 0},
    ),
    "speculators dspark": (
        {"speculators_model_type": "dspark", **SPECULATORS, **MARKOV, "sample_from_anchor": False},
        {}, "dspark", {"from_anchor": False, "own_head": True},
    ),
}  # fmt: skip


def published(place, layout, target, folder, drop=(), **changes):
    """A folder with random tensors as another project writes them, and these tensors."""
    top, shape, kind, _ = PUBLISHED[layout]
    model = read_config(folder)
    kept = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps"
    layer = {**{key: model[key] for key in kept.split()}, "model_type": "qwen3", "num_hidden_layers": 2, **shape}
    layer["rope_theta"] = 10000.0
    top = {key: value for key, value in {**top, **changes}.items() if value is not None}
    is_speculators = "speculators_model_type" in top
    config = {**top, "transformer_layer_config": layer} if is_speculators else {**layer, **top}
    config = {key: value for key, value in config.items() if key not in drop}
    torch.manual_seed(11)
    hidden, inner, dim, vocab = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"], layer["vocab_size"]
    query, key = (layer[name] * dim for name in ("num_attention_heads", "num_key_value_heads"))

    def matrix(*size):
        return torch.randn(size) / size[-1] ** 0.5

    tensors = {"fc.weight": matrix(hidden, 2 * hidden)}
    norms = {"hidden_norm": hidden, "norm": hidden}
    for index in range(2):
        of = f"layers.{index}"
        sizes = {"self_attn.q": (query, hidden), "self_attn.k": (key, hidden), "self_attn.v": (key, hidden)}
        sizes |= {"self_attn.o": (hidden, query), "mlp.gate": (inner, hidden), "mlp.up": (inner, hidden)}
        for name, size in {**sizes, "mlp.down": (hidden, inner)}.items():
            tensors[f"{of}.{name}_proj.weight"] = matrix(*size)
            if layer.get("attention_bias") and name.startswith("self_attn"):
                tensors[f"{of}.{name}_proj.bias"] = matrix(size[0])
        norms |= {f"{of}.input_layernorm": hidden, f"{of}.post_attention_layernorm": hidden}
        norms |= {f"{of}.self_attn.q_norm": dim, f"{of}.self_attn.k_norm": dim}
    tensors |= {f"{name}.weight": torch.rand(size) + 0.5 for name, size in norms.items()}
    drafted = top.get("draft_vocab_size", vocab)
    if drafted < vocab:
        ids = torch.randperm(vocab)[:drafted].sort().values
        tensors |= {"lm_head.weight": matrix(drafted, hidden), **to_maps(ids, vocab)}
    if layout == "deepspec":  # the target's own, which were not trained
        tensors |= {
            "lm_head.weight": target.head.weight.clone(),
            "embed_tokens.weight": target.embedding.plain().clone(),
        }
    if kind == "dspark":
        tensors |= {"markov_head.markov_w1.weight": torch.randn(vocab, 6), "confidence_head.proj.bias": torch.randn(1)}
        tensors |= {"markov_head.markov_w2.weight": torch.randn(drafted, 6)}
        tensors["confidence_head.proj.weight"] = matrix(1, hidden + 6 * ("confidence_head_with_markov" in str(top)))
    if kind == "domino":
        tensors |= {"prefix_gru.weight_ih_l0": matrix(30, hidden), "prefix_gru.weight_hh_l0": matrix(30, 10)}
        tensors |= {"embed_proj.0.weight": matrix(6, hidden + 10), "embed_proj.2.weight": torch.randn(drafted, 6)}
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    save_file(tensors, place / "model.safetensors")
    return place, tensors


def correction(kind, net, tensors, x, path):
    """The correction to the logits of state x (H,) after a path of tokens, the first of which is the pending one."""
    if kind == "dspark":
        return tensors["markov_head.markov_w2.weight"] @ net.embedding_before[path[-1]]
    if kind == "dflash" or len(path) <= net.config.num_uncorrected:
        return 0
    gru = torch.nn.GRU(len(x), net.config.state_size, bias=False)
    gru.load_state_dict({name.removeprefix("prefix_gru."): each for name, each in tensors.items() if "gru" in name})
    state = gru(net.embedding.table[path])[0][-1].detach()
    return tensors["embed_proj.2.weight"] @ F.silu(tensors["embed_proj.0.weight"] @ torch.cat([x, state]))


@pytest.mark.parametrize("layout", PUBLISHED)
def test_heads_of_others_draft_as_their_nets_do(layout, folder_of, tmp_path):
    """Every level's best tokens are those of the formulas, with windows, causal layers and draft vocabularies."""
    folder = folder_of("llama", head_dim=32)
    target = load_target(folder, prepack=False)
    place, tensors = published(tmp_path / "head", layout, target, folder)
    method = method_of_folder(place)
    _, _, kind, meaning = PUBLISHED[layout]
    assert method is get_method(kind)
    net = method.read(place, target.embedding, target.head, target_id(target)).requires_grad_(False)
    assert net.config.taps == (1, 2)
    assert {name: getattr(net.config, name) for name in meaning} == meaning
    assert all(finding.status == "ok" or finding.name == "target" for finding in diagnose(place))
    head = tensors["lm_head.weight"] if net.config.own_head else target.head.weight.float()
    ids = torch.arange(len(head)) if net.target_ids is None else net.target_ids
    first = 0 if net.config.from_anchor else 1
    found = scored(target, net, length=11)
    blocks = net.blocks(F.pad(found.batch.ids, (0, 4)), found.features, torch.tensor([2, 7]))
    expected = dflash_block(net, found.features[1, :8], found.batch.ids[1, 8])
    torch.testing.assert_close(blocks[1, 1], expected, rtol=1e-3, atol=1e-4)
    drafter = BlockDrafter(net, target)
    for sequence, pending, tree, row, nodes in drafted(target, drafter, Budget(net.num_levels, 2, children="top")):
        read = dflash_block(net, features_of(target, sequence, net.config.taps), pending)
        tokens = tree.tokens[row].tolist()
        for node in nodes:
            path = [tokens[node]]
            while (node := int(tree.parents[row, node])) >= 0:
                path.insert(0, tokens[node])
            x = read[first + len(path) - 2]
            logits = head @ x + correction(kind, net, tensors, x, path[:-1])
            assert path[-1] in ids[logits.topk(2).indices]


def check_equal(one, other):
    assert one.config == other.config
    assert one.tensors().keys() == other.tensors().keys()
    assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in one.tensors().items())
    assert one.target_ids is other.target_ids is None or torch.equal(one.target_ids, other.target_ids)


WRITTEN = {
    "z-lab": ["draftwing", "vllm", "sglang", "speculators"], "z-lab windows": ["draftwing", "vllm", "sglang"],
    "vllm windows": ["draftwing", "vllm", "speculators"], "nested size": ["draftwing", "vllm", "speculators"],
    "specforge": ["draftwing", "vllm", "speculators"], "deepspec": ["draftwing", "vllm", "speculators"],
    "speculators": ["draftwing", "vllm", "speculators"], "domino": ["draftwing", "sglang"],
    "domino masks": ["draftwing"], "speculators dspark": ["draftwing", "speculators"],
}  # fmt: skip


@pytest.mark.parametrize("layout", PUBLISHED)
def test_heads_of_others_in_other_layouts(layout, small, folder_of, tmp_path):
    """Every layout that can express a head keeps its numbers, the first as it was published."""
    place, tensors = published(tmp_path / "head", layout, small, folder_of("llama", head_dim=32))
    method, own = method_of_folder(place), target_id(small)
    net = method.read(place, small.embedding, small.head, own)
    for to in set(method.layouts) - {"gguf"}:  # test_gguf_models.py
        if to not in WRITTEN[layout]:
            with refused(UnsupportedError, f"the {to} layout cannot express"):
                convert(place, tmp_path / to, to, target=own)
            continue
        convert(place, tmp_path / to, to, target=own)
        read = method.read(tmp_path / to, small.embedding, small.head, own)
        target = None if to == "draftwing" else own
        assert read.config.target == target
        read.config = replace(read.config, target=None)
        check_equal(net, read)
        assert all(finding.status == "ok" for finding in diagnose(tmp_path / to) if finding.name == "head")
        if to != "draftwing":
            again = load_file(tmp_path / to / "model.safetensors")
            assert all(torch.equal(again[name][..., : tensor.shape[-1]], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("mask", [9, None])
@pytest.mark.parametrize("kind", ["dflash", "dspark", "domino"])
def test_trained_blocks_in_other_layouts(kind, mask, small, folder_of, tmp_path):
    """A head reads the same without the part that only Draftwing reads; a mask vector goes to vLLM's DFlash alone."""
    folder, method, own = folder_of("llama", head_dim=32), get_method(kind), target_id(small)
    fields = {"calibration": Calibration(0.5, 0.25, 0.75), "mask_token_id": mask}
    net = saved(kind, small, folder, tmp_path / "head", num_layers=2, **fields)
    for to in set(method.layouts) - {"draftwing", "gguf"}:
        if (kind, to) == ("dspark", "vllm") or (mask is None and (kind, to) != ("dflash", "vllm")):
            feature = "predictions from masks alone" if mask else "a trained mask vector (train with `--mask-token-id`"
            with refused(UnsupportedError, f"the {to} layout cannot express {feature}"):
                convert(tmp_path / "head", tmp_path / to, to)
            continue
        convert(tmp_path / "head", tmp_path / to, to)
        assert (tmp_path / to / "mask_embedding.pt").exists() is (mask is None)
        check_equal(net, method.read(tmp_path / to, small.embedding, small.head, own))
        config = read_config(tmp_path / to)
        (tmp_path / to / "config.json").write_text(json.dumps({**config, "block_size": 3}))
        with refused(CheckpointError, "describes two nets"):
            method.read(tmp_path / to, small.embedding, small.head)
        del config["draftwing"]
        (tmp_path / to / "config.json").write_text(json.dumps(config))
        read = method.read(tmp_path / to, small.embedding, small.head, own)
        net.config = replace(net.config, calibration=Calibration(), target=None)
        check_equal(net, read)
        net.config = replace(net.config, calibration=fields["calibration"], target=own)


def test_a_mask_file_without_a_vector(small, folder_of, tmp_path):
    place, _ = published(tmp_path / "head", "z-lab", small, folder_of("llama", head_dim=32))
    torch.save([], place / "mask_embedding.pt")
    with refused(CheckpointError, "mask_embedding.pt", "download the head again"):
        method_of_folder(place).read(place, small.embedding, small.head)


@pytest.mark.parametrize(
    ("layout", "changes", "part"),
    [
        ("domino", {"speculators_model_type": "dflash", **SPECULATORS}, "`speculators_model_type` is 'dflash'"),
        ("z-lab", {"architectures": ["DFlash2DraftModel"], "conv_kernel_size": 2}, "`conv_kernel_size` is 2"),
        ("z-lab", {"dflash_config": {**NESTED, "window_growth": 2}}, "`dflash_config` has 'window_growth'"),
        ("z-lab", {"dflash_config": {**NESTED, "attention_sink_bias": True}}, "`attention_sink_bias` is True"),
        ("z-lab", {"target_hidden_size": 64}, "`target_hidden_size` is 64"),
        ("z-lab", {"model_type": "gemma4"}, "`model_type` is 'gemma4'"),
        ("specforge", {"dflash_config": {**SPECFORGE, "markov_head_type": "rnn"}}, "`markov_head_type` is 'rnn'"),
        ("deepspec", {"architectures": ["K3DSparkModel"], "kv_lora_rank": 8}, "`kv_lora_rank` is 8"),
        ("speculators", {"speculators_model_type": "dflash2"}, "`speculators_model_type` is 'dflash2'"),
    ],
)
def test_settings_that_are_not_honoured_are_named(layout, changes, part, small, folder_of, tmp_path):
    place, _ = published(tmp_path / "head", layout, small, folder_of("llama", head_dim=32), **changes)
    method = method_of_folder(place)
    with refused(UnsupportedError, "config.json", part, "the engine that it was made for"):
        method.read(place, small.embedding, small.head)


@pytest.mark.parametrize(
    ("layout", "drop", "changes", "part"),
    [
        ("z-lab", ["rope_theta"], {}, "lacks `rope_theta`"),
        ("z-lab", [], {"block_size": None}, "lacks `block_size`"),
        ("z-lab windows", [], {"use_sliding_window": False}, "no window: correct `use_sliding_window`"),
        ("z-lab windows", [], {"layer_types": ["full_attention"]}, "`layer_types` must name"),
        ("z-lab windows", [], {"sliding_window": 3}, "a sliding window must be at least block_size 4"),
        ("domino", [], {"dflash_config": {**DOMINO, "emb_dim": None}}, "lacks `emb_dim`"),
        ("z-lab", [], {"dflash_config": {**NESTED, "mask_token_id": 61}}, "mask_token_id must be a token below 61"),
        ("speculators", ["sliding_window_non_causal"], {}, "lacks `sliding_window_non_causal`"),
        ("speculators dspark", ["sample_from_anchor"], {}, "lacks `sample_from_anchor`"),
    ],
)
def test_configs_of_blocks_that_lack_something(layout, drop, changes, part, small, folder_of, tmp_path):
    place, _ = published(tmp_path / "head", layout, small, folder_of("llama", head_dim=32), drop, **changes)
    with refused(ConfigError, "config.json" if "lacks" in part or "`" in part else "head", part):
        method_of_folder(place).read(place, small.embedding, small.head)


def test_blocks_for_another_target(small, folder_of, tmp_path):
    folder, own = folder_of("llama", head_dim=32), target_id(small)
    place, _ = published(tmp_path / "layers", "z-lab", small, folder, num_target_layers=36)
    with refused(CheckpointError, "made for a target of 36 layers"):
        get_method("dflash").read(place, small.embedding, small.head, own)
    far = {**NESTED, "target_layer_ids": [0, 9]}
    place, _ = published(tmp_path / "taps", "z-lab", small, folder, dflash_config=far)
    with refused(CheckpointError, "reads hidden state 10", "3 layers"):
        get_method("dflash").read(place, small.embedding, small.head, own)
    place, _ = published(tmp_path / "copy", "deepspec", small, folder)
    with refused(UnsupportedError, "embed_tokens.weight is not the target's own"):
        get_method("dspark").read(place, small.embedding.plain() + 1, small.head, own)


# --- Medusa heads of others ------------------------------------------------------------------------------------------


def as_others_write_it(head, place, layout):
    """A head in a layout, without what Draftwing says of it for itself."""
    convert(head, place, layout)
    config = json.loads((place / "config.json").read_text())
    del config["draftwing"]
    (place / "config.json").write_text(json.dumps(config))
    return place, config


def saved(kind, target, folder, place, **settings):
    """A folder with an untrained head."""
    net = new_net(kind, target, folder, **settings)
    get_method(kind).write(place, net)
    return net


@pytest.mark.parametrize("layout", ["vllm", "medusa"])
@pytest.mark.parametrize("settings", [{}, {"num_layers": 2}, {"has_bias": False}, {"num_draft": 20}])
def test_layouts_keep_every_number(layout, settings, small, folder_of, tmp_path):
    folder = folder_of("llama", head_dim=32)
    net, own = saved("medusa", small, folder, tmp_path / "head", **settings), target_id(small)
    if layout == "medusa" and "num_draft" in settings:
        with refused(UnsupportedError, "has no draft vocabulary", "use vllm"):
            convert(tmp_path / "head", tmp_path / "other", layout)
        return
    other, config = as_others_write_it(tmp_path / "head", tmp_path / "other", layout)
    assert method_of_folder(other) is get_method("medusa")
    read = get_method("medusa").read(other, small.embedding, small.head, own)
    state, names = torch.randn(4, small.hidden_size), net.tensors()
    for level in range(net.num_levels):
        wanted, found = (each.level_logits(level, each.residual(level, state)) for each in (net, read))
        assert torch.equal(found, wanted)
    assert config["num_heads" if layout == "vllm" else "medusa_num_heads"] == net.num_levels == len(read.heads)
    if layout == "vllm":
        assert config["model_type"] == "medusa"
        assert config.get("truncated_vocab_size") == settings.get("num_draft")
    back = tmp_path / "back"
    convert(other, back, "draftwing", target=own)
    tensors = load_medusa(back).tensors
    assert all(torch.equal(tensors[name], tensor) for name, tensor in names.items())


def test_the_command_that_serves_it(small, folder_of, tmp_path):
    """By vLLM, with as many tokens as there are heads at most."""
    saved("medusa", small, folder_of("llama", head_dim=32), tmp_path / "head", unroll_steps=2)
    arguments = ["export", str(tmp_path / "head"), "--to", "vllm", "-t", str(folder_of("llama", head_dim=32))]
    done = CliRunner().invoke(cli.app, [*arguments, "-o", str(tmp_path / "vllm")])
    assert done.exit_code == 0, done.output
    assert '"method": "medusa"' in done.stdout
    assert '"num_speculative_tokens": 2' in done.stdout


def test_a_vllm_vocabulary_in_any_order(small, folder_of, tmp_path):
    """Others list the most frequent tokens first; a whole head beside a map is cut by it."""
    net = saved("medusa", small, folder_of("llama", head_dim=32), tmp_path / "head", num_draft=20)
    other, _ = as_others_write_it(tmp_path / "head", tmp_path / "other", "vllm")
    order, tensors = torch.randperm(20), load_file(other / "model.safetensors")
    cut, wanted = tensors["lm_heads.0.weight"], tensors["lm_heads.1.weight"]
    tensors["token_map"] = tensors["token_map"][order]
    for name in [name for name in tensors if name.startswith("lm_heads")]:
        tensors[name] = tensors[name][order].contiguous()
    whole = torch.zeros(small.vocab_size, small.hidden_size)
    whole[tensors["token_map"]] = tensors["lm_heads.1.weight"]
    tensors["lm_heads.1.weight"] = whole
    save_file(tensors, other / "model.safetensors")
    read = load_medusa(other, target_id(small))
    assert torch.equal(read.target_ids, net.target_ids)
    assert torch.equal(read.tensors["heads.0.weight"], cut)
    assert torch.equal(read.tensors["heads.1.weight"], wanted)


def test_one_lm_head_for_all(small, folder_of, tmp_path):
    """vLLM's original_lm_head: the first head's matrix serves every head."""
    net = saved("medusa", small, folder_of("llama", head_dim=32), tmp_path / "head")
    other, config = as_others_write_it(tmp_path / "head", tmp_path / "other", "vllm")
    (other / "config.json").write_text(json.dumps({**config, "original_lm_head": True}))
    read = load_medusa(other, target_id(small))
    for level in range(5):
        assert torch.equal(read.tensors[f"heads.{level}.weight"], net.heads[0].weight)


def test_a_config_that_names_too_few_heads(small, folder_of, tmp_path):
    """As the authors' first ones do: all that are there are used, and the doctor says so."""
    folder = folder_of("llama", head_dim=32)
    saved("medusa", small, folder, tmp_path / "head")
    other, config = as_others_write_it(tmp_path / "head", tmp_path / "other", "medusa")
    assert (other / PICKLE).exists()
    (other / "config.json").write_text(json.dumps({**config, "medusa_num_heads": 2}))
    assert load_medusa(other, target_id(small)).config.num_heads == 5
    found = {each.name: each for each in diagnose(other, folder)}
    assert found["count"].status == "warn"
    assert "says 2 heads, and it has 5" in found["count"].detail
    assert found["target"].status == "unknown"
    drafter = load_drafter(other, load_target(folder), None)()
    assert drafter.net.num_levels == 5


def test_medusa_heads_that_cannot_be_meant(small, folder_of, tmp_path):
    folder = folder_of("llama", head_dim=32)
    net = saved("medusa", small, folder, tmp_path / "head")
    other, _ = as_others_write_it(tmp_path / "head", tmp_path / "other", "medusa")
    with refused(ConfigError, "does not name its target", "--target"):
        load_medusa(other)
    with refused(UnsupportedError, "can only be written as draftwing, vllm, medusa", "'sglang'"):
        convert(other, tmp_path / "no", "sglang", target=target_id(small))
    with refused(CheckpointError, "is the source itself"):
        convert(tmp_path / "head", tmp_path / "head", "vllm")
    tensors = {f"{head}.1.weight": net.heads[head].weight.detach() for head in range(2)}
    tensors |= {f"{head}.0.linear.weight": torch.zeros(16, 16) for head in range(2)}
    for change, parts in (
        ({}, ["heads read 16 numbers", "hidden size of 32"]),
        ({"model.norm.weight": torch.ones(4)}, ["no Medusa head has", "'model.norm.weight'"]),
        ({"0.1.weight": torch.zeros(7, 16)}, ["know 7 tokens", "61 tokens"]),
        ({"0.0.linear.weight": torch.full((16, 16), torch.nan)}, ["blocks.0.0.weight"]),
    ):
        torch.save({**tensors, **change}, other / PICKLE)
        with refused(CheckpointError, *parts):
            load_medusa(other, target_id(small))
        assert [each.status for each in diagnose(other, folder)] == ["fail"]
    del tensors["0.0.linear.weight"]
    torch.save(tensors, other / PICKLE)
    with refused(CheckpointError, "lacks the first head's block"):
        load_medusa(other, target_id(small))
    (other / PICKLE).write_bytes(b"not a checkpoint")
    with refused(CheckpointError, PICKLE):
        load_medusa(other, target_id(small))
    for count, part in ((0, "num_heads must be at least 1"), (65, "up to 64 heads")):
        with refused(ConfigError, part):
            new_net("medusa", small, folder, num_heads=count)


def test_a_medusa_head_that_uses_the_targets(small, folder_of, tmp_path):
    """Residual blocks alone: saved and loaded, and no layout of others has a place for it."""
    net = saved("medusa", small, folder_of("llama", head_dim=32), tmp_path / "head", own_heads=False)
    assert net.head is None
    assert not any("heads" in name for name in net.tensors())
    read = get_method("medusa").read(tmp_path / "head", small.embedding, small.head)
    state = torch.randn(3, small.hidden_size)
    found = read.level_logits(1, read.residual(1, state))
    assert torch.equal(found, small.head.forward(net.residual(1, state)))
    with refused(UnsupportedError, "uses the target's LM head", "keep it as draftwing"):
        convert(tmp_path / "head", tmp_path / "no", "vllm")
