"""Nets that guess several tokens in one pass: trained, saved, drafted with, and held against slow references."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import draftwing.cli.main as cli
from conftest import TEXTS, add_tokenizer, build, refused
from draftwing.api import load, load_drafter, load_target
from draftwing.cli.options import Drafting
from draftwing.drafters.base import MEDUSA_TREE, Budget
from draftwing.drafters.block import BlockDrafter
from draftwing.drafters.growing.growth import Growth
from draftwing.drafters.kinds import KINDS, NewNet, convert, diagnose, kind_of_folder
from draftwing.engine.decode import Decoder
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.heads.identity import target_id
from draftwing.heads.medusa import FILE, load_medusa
from draftwing.model.config import ModelConfig, read_config
from draftwing.model.target import Context, FeatureSpec, Row
from draftwing.nets.calibration import Calibration
from draftwing.nets.dflash import dflash_taps
from draftwing.nets.objectives import OBJECTIVES
from draftwing.run.kernel.noise import noise_of
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data.batches import Batch
from draftwing.train.features.source import FeatureBatch
from draftwing.train.loss.batch import Truth, UnrolledLoss
from draftwing.train.options import TrainOptions
from draftwing.train.session import RunFiles, prepare
from draftwing.tree import PAD
from test_exact import erratic

PROMPTS = ["def add(", "class Table:\n    def", "for row in rows: print(row)\nfor row in"]
METHODS = ("medusa", "hydra", "dflash", "dspark")
LEVELS = {"medusa": 5, "hydra": 5, "dflash": 7, "dspark": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("target")
    build("llama", head_dim=32, vocab_size=300, initializer_range=0.1).float().save_pretrained(place)
    return add_tokenizer(place)


@pytest.fixture(scope="module")
def run_of(folder, tmp_path_factory):
    """A short training by a method, through the ordinary session: where it is, the session, and the metrics."""

    @cache
    def get(method, **changes):
        place = tmp_path_factory.mktemp(method)
        data = place / "data.jsonl"
        data.write_text("".join(json.dumps({"text": text * 4}) + "\n" for text in TEXTS * 6))
        options = TrainOptions(
            method,
            iterations=12,
            lr=3e-3,
            max_length=32,
            tokens_per_batch=256,
            precision="no",
            validation_share=0.2,
            eval_prompts=1,
            eval_tokens=4,
            **changes,
        )
        session = prepare(RunFiles(folder, [data]), options, place, dtype="float32", device="cpu")
        session.run()
        return place, session, [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]

    return get


@pytest.fixture(scope="module")
def small(folder_of):
    """A target to make untrained nets for."""
    return load_target(folder_of("llama", head_dim=32), prepack=False)


def new_net(kind, target, folder, num_draft=None, numbers=0.1, **settings):
    """An untrained net, with small random numbers added to it."""
    torch.manual_seed(3)
    entry, like = KINDS[kind].net, ModelConfig.from_hf(read_config(folder))
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


@pytest.mark.parametrize("method", METHODS)
def test_it_trains(method, run_of, folder):
    _, session, metrics = run_of(method)
    trainer, target = session.trainer, session.target
    found, losses = trainer.source.batch(0), []
    for net in (new_net(method, target, folder, numbers=0.0), trainer.net):
        scorer = KINDS[method].net.loss(net, trainer.options.recipe.objective, LEVELS[method]).eval()
        sums = scorer(found, Truth.of(found, target.head, None, torch.float32))
        losses.append(sum(each.loss.item() / each.count for each in sums))
    assert losses[1] < losses[0]
    assert len(metrics[0]["agreement"]) == len(metrics[-1]["val_agreement"]) == LEVELS[method]
    assert metrics[-1]["tau"] >= 1
    assert f"{method} head of" in session.describe()
    assert session.trainer.net.config.calibration != Calibration()  # fitted on what this kind guesses


@pytest.mark.parametrize("method", ["medusa", "hydra", "dflash", "eagle1", "eagle3", "mtp", "kangaroo"])
def test_the_texts_own_tokens_as_truth(method, small, folder_of):
    """Cross-entropy with the next token is that with a law which is sure of it."""
    kind, options = KINDS[method].net, TrainOptions(method, iterations=1)
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


@pytest.mark.parametrize("method", METHODS)
def test_it_is_saved_and_loaded(method, run_of, folder):
    place, session, _ = run_of(method)
    target = load_target(folder)
    assert kind_of_folder(place / "head") is KINDS[method]
    net = KINDS[method].net.read(place / "head", target.embedding, target.head, target_id(target, Tokenizer(folder)))
    assert net.config == session.trainer.net.config
    for name, tensor in session.trainer.net.tensors().items():
        assert torch.equal(net.tensors()[name], tensor), name
    assert load_drafter(place / "head", target, Tokenizer(folder))().name == f"{method} (head)"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_targets(method, temperature, run_of, folder):
    """With chains, trees, and what the planner makes of the kind; on a target of any kind of its own."""
    head, options = run_of(method)[0] / "head", {"temperature": temperature, "seed": 3, "max_tokens": 24}
    for engine, budgets in (("lean", (Budget(4), Budget(3, 4, 8), None)), ("transformers", (Budget(3, 3),))):
        plain = load(folder, "none", engine=engine).generate(PROMPTS, **options, ignore_eos=True)
        for budget in budgets:
            found = load(folder, head, engine=engine, budget=budget).generate(PROMPTS, **options, ignore_eos=True)
            assert [each.token_ids for each in found] == [each.token_ids for each in plain]
            if budget is not None:
                assert all(each.stats.num_drafted for each in found)


@pytest.mark.parametrize("method", METHODS)
def test_the_doctor_knows_it(method, run_of, folder, folder_of):
    head = run_of(method)[0] / "head"
    shown = CliRunner().invoke(cli.app, ["doctor", str(head), "-t", str(folder), "--json", "--no-measure"])
    assert shown.exit_code == 0, shown.output
    found = {each["name"]: each["status"] for each in json.loads(shown.stdout)["findings"]}
    assert found["head"] == found["target"] == "ok"
    other = folder_of("llama", head_dim=32)
    assert "fail" in {each.status for each in diagnose(head, other)}
    with refused(CheckpointError, "made for", "vocab_size 300 and 61"):
        load_drafter(head, load_target(other), None)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_of_another_number_of_levels(method, run_of, folder, tmp_path):
    """A head keeps its own number; a new one has as many as the run asks for."""
    _, session, metrics = run_of(method, unroll_steps=2)
    assert session.trainer.net.num_levels == len(metrics[-1]["val_agreement"]) == 2
    files = RunFiles(folder, [run_of(method)[0] / "data.jsonl"], initial=run_of(method)[0] / "head")
    options = TrainOptions(method, iterations=1, max_length=32, tokens_per_batch=256, unroll_steps=3, precision="no")
    with refused(ConfigError, f"{method} head guesses {LEVELS[method]} tokens", "asks for 3", "unroll_steps"):
        prepare(files, options, tmp_path, dtype="float32", device="cpu")


@pytest.mark.parametrize("method", METHODS)
def test_features_are_not_compared(method, small, folder_of):
    net = new_net(method, small, folder_of("llama", head_dim=32))
    with refused(ConfigError, f"a {method} head predicts no features", "medusa, dflash or tv"):
        KINDS[method].net.loss(net, OBJECTIVES["eagle1"], net.num_levels)


@pytest.mark.parametrize("method", METHODS)
def test_16_bits_come_to_nearly_the_same(method, small, folder_of):
    """Under autocast, as runs train unless told otherwise: losses near float32's, and gradients for all weights."""
    net = new_net(method, small, folder_of("llama", head_dim=32), num_layers=2, unroll_steps=3)
    found, sums = scored(small, net), []
    for enabled in (False, True):
        scorer = KINDS[method].net.loss(net, OBJECTIVES["medusa"], 3).eval()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            sums.append(scorer(found, Truth.of(found, small.head, None, torch.float32), agreement=True))
    for one, other in zip(*sums, strict=True):
        assert other.loss.item() == pytest.approx(one.loss.item(), rel=0.05)
    sum(each.loss for each in sums[1]).backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in net.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_fewer_blocks_in_an_update(method, small, folder_of):
    """``later_share`` thins out the entries that blocks start from, at random in training."""
    net = new_net(method, small, folder_of("llama", head_dim=32), unroll_steps=3)
    found, seen = scored(small, net, length=42), set()
    loss = KINDS[method].net.loss(net, OBJECTIVES["medusa"], 3, 0.0, 0.5)
    for _ in range(4):
        entries = loss.train()._entries(found)
        assert len(entries) == round(0.5 * net.share * 40)
        assert entries.max() < 40
        seen.add(tuple(entries.tolist()))
    assert len(seen) > 1
    assert loss.eval()._entries(found).tolist() == loss._entries(found).tolist()


# --- how trees grow from a block -------------------------------------------------------------------------------------


def grown(laws, budget, temperature, *, wide):
    """A tree from laws (B, K, V), one for each level; ``wide`` says them to every node by itself."""
    rows, vocab = len(laws), laws.shape[-1]
    ctx = Context(torch.device("cpu"), [Row([1, 2, 3 + row], 2, 2) for row in range(rows)])
    requests = [Sampling(temperature=temperature, seed=row) for row in range(rows)]
    sampling = SamplingBatch(requests, noise_of(vocab, torch.device("cpu")))
    growth = Growth(ctx, [True] * rows, sampling, budget, Calibration(1.5, 0.1))
    for level in range(laws.shape[1]):
        logits = laws[:, level : level + 1]
        growth.extend(logits.expand(-1, growth._num_newest, -1) if wide else logits)
        if growth.done:
            break
    return growth.finish().tree


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "budget",
    [Budget(4), Budget(3, 3), Budget(4, 4, 9), Budget(paths=((0,), (1,), (0, 0), (1, 2), (0, 0, 1))), erratic(4, 3, 9)],
    ids=["chain", "level", "dynamic", "static", "rule"],
)
def test_one_law_for_a_level_is_the_same_law_for_each_node(budget, temperature):
    torch.manual_seed(1)
    laws = 2 * torch.randn(3, 4, 30)
    one, other = (grown(laws, budget, temperature, wide=wide) for wide in (False, True))
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.parents, other.parents)
    if one.confidence is not None:
        assert torch.equal(one.confidence, other.confidence)


def test_a_dynamic_tree_holds_the_likeliest_paths():
    """Best-first over a block's laws, against all paths there are (DDTree's optimum)."""
    torch.manual_seed(2)
    laws = 2 * torch.randn(1, 3, 8).double()
    tree = grown(laws, Budget(3, 8, 12), 0.0, wide=False)
    chances = laws[0].softmax(-1)
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


@pytest.mark.parametrize("num_draft", [None, 25])
@pytest.mark.parametrize("settings", [{}, {"num_layers": 2, "has_bias": False, "unroll_steps": 3}])
def test_medusas_loss_is_the_papers(num_draft, settings, small, folder_of):
    """Head by head, position by position: head k at t guesses the token at t + k + 1, weighted 0.8^k."""
    net = new_net("medusa", small, folder_of("llama", head_dim=32), num_draft, **settings)
    found = scored(small, net)
    loss = KINDS["medusa"].net.loss(net, OBJECTIVES["medusa"], net.num_levels).eval()
    sums = loss(found, Truth.of(found, small.head, net.target_ids, torch.float32), agreement=True)
    ids = torch.arange(small.vocab_size) if net.target_ids is None else net.target_ids
    rows, length = found.batch.ids.shape
    for level, each in enumerate(sums):
        losses, right = [], 0
        for row in range(rows):
            for t in range(length - 2):
                guessed = t + 1 + (level + 1)  # the pending token is t + 1, the first head's the one after it
                if guessed >= length or not found.batch.mask[row, guessed]:
                    continue
                p = found.logits[row, guessed - 1]
                if int(p.argmax()) not in ids.tolist():
                    continue
                q = medusa_head(net, level, found.features[row, t])
                losses.append(F.cross_entropy(q, p[ids].softmax(-1)))
                right += int(ids[q.argmax()]) == int(p.argmax())
        assert each.count == len(losses) > 0
        assert each.loss.item() == pytest.approx(sum(each.item() for each in losses), rel=1e-4)
        assert int(each.agreed) == right
    assert loss.objective.decay == 0.8  # of each further head, by the trainer


def test_medusa_begins_as_the_targets_own_head(small, folder_of):
    entry, folder = KINDS["medusa"].net, folder_of("llama", head_dim=32)
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
    decoder = Decoder(target, drafter, budget=Budget(3, 2))
    for row, prompt in enumerate(((4, 7, 7, 1, 30), (9, 2, 11))):
        decoder.admit(prompt, Sampling(max_tokens=12 - row, ignore_eos=True))
        decoder.step()
    while decoder.num_running:
        texts = [(list(row.tokens[: row.length]), row.tokens[row.length]) for row in decoder.ctx.rows]
        tree = decoder.step().tree
        for row, (text, pending) in enumerate(texts):
            feature = plain.score(torch.tensor([text]), FeatureSpec((plain.num_layers,))).features[0, -1].float()
            tokens, depths = tree.tokens[row].tolist(), tree.depths[row].tolist()
            assert tokens[0] == pending
            for level in range(max(depths)):
                best = medusa_head(reference, level, feature).topk(2).indices.tolist()
                assert {token for token, depth in zip(tokens, depths, strict=True) if depth == level + 1} <= {
                    *best,
                    PAD,
                }
                assert best[0] in tokens


# --- Hydra -----------------------------------------------------------------------------------------------------------


def hydra_head(net, level, feature, tokens):
    """What the paper says of one head, for one hidden state (H,) and the tokens from the pending one on."""
    known = torch.cat([feature, *[net.embedding.table[token] for token in tokens]])
    x = net.straight[level].weight @ known + F.silu(net.mixed[level].weight @ known + net.mixed[level].bias)
    for layer in net.further[level]:
        x = x + F.silu(layer.weight @ x + layer.bias)
    return net.heads[level].weight @ x


@pytest.mark.parametrize("settings", [{}, {"num_layers": 2, "unroll_steps": 3, "num_draft": 25}])
def test_hydras_loss_is_the_papers(settings, small, folder_of):
    """Head by head, position by position, with the text's own tokens as those drafted so far."""
    net = new_net("hydra", small, folder_of("llama", head_dim=32), **settings)
    found = scored(small, net, length=10)
    loss = KINDS["hydra"].net.loss(net, OBJECTIVES["medusa"], net.num_levels).eval()
    sums = loss(found, Truth.of(found, small.head, net.target_ids, torch.float32))
    ids = torch.arange(small.vocab_size) if net.target_ids is None else net.target_ids
    rows, length = found.batch.ids.shape
    with torch.no_grad():
        for level, each in enumerate(sums):
            losses = []
            for row, t in product(range(rows), range(length - 2)):
                guessed = t + 2 + level
                if guessed >= length or not found.batch.mask[row, guessed]:
                    continue
                p = found.logits[row, guessed - 1]
                if int(p.argmax()) in ids.tolist():
                    q = hydra_head(net, level, found.features[row, t], found.batch.ids[row, t + 1 : guessed])
                    losses.append(F.cross_entropy(q, p[ids].softmax(-1)).item())
            assert each.count == len(losses) > 0
            assert each.loss.item() == pytest.approx(sum(losses), rel=1e-4)


def test_hydra_drafts_along_each_path(folder_of):
    """Every node of every tree: among the best tokens of its level's head after the tokens on its path."""
    folder = folder_of("llama", head_dim=32)
    target = load_target(folder, prepack=False)
    net, seen = new_net("hydra", target, folder).requires_grad_(False), 0
    decoder = Decoder(target, BlockDrafter(net, target), budget=Budget(4, 3, 10))
    for row, prompt in enumerate(((4, 7, 7, 1, 30), (9, 2, 11))):
        decoder.admit(prompt, Sampling(max_tokens=8 - row, ignore_eos=True))
        decoder.step()
    while decoder.num_running:
        texts = [(list(row.tokens[: row.length]), row.tokens[row.length]) for row in decoder.ctx.rows]
        tree = decoder.step().tree
        for row, (text, pending) in enumerate(texts):
            feature = target.score(torch.tensor([text]), FeatureSpec((target.num_layers,))).features[0, -1].float()
            tokens, parents, paths = tree.tokens[row].tolist(), tree.parents[row].tolist(), {0: (pending,)}
            for node in range(1, len(tokens)):
                if tokens[node] != PAD:
                    above = paths[parents[node]]
                    paths[node] = (*above, tokens[node])
                    assert tokens[node] in hydra_head(net, len(above) - 1, feature, above).topk(3).indices
            likeliest = hydra_head(net, 0, feature, (pending,)).argmax()
            assert len(paths) == 1 or (pending, int(likeliest)) in paths.values()  # near its end a row drafts nothing
            seen += len(paths) - 1
    assert seen > 20


def test_hydra_begins_as_the_targets_own_head(small, folder_of):
    net, state = new_net("hydra", small, folder_of("llama", head_dim=32), numbers=0.0), torch.randn(3, 1, 32)
    tokens, carried = torch.tensor([[4], [9], [7]]), None
    wanted = small.head.forward(state[:, 0].to(small.dtype)).float()
    for level in range(net.num_levels):
        found, carried, _ = net.guess(level, state, tokens, carried)
        torch.testing.assert_close(found[:, 0], wanted)
    with refused(ConfigError, "a Hydra head reads one hidden state", "(1, 2)"):
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


def dflash_block(net, features, pending):
    """What the LM head reads of one block (N, H) after features (L, F): token by token, key by key."""
    config, start = net.config, len(features)
    sizes = [config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim]
    context = [normed(net.fc.weight @ feature, net.state_norm) for feature in features]
    places = range(start, start + config.block_size)
    x = [net.embedding.table[pending] if place == start else net.mask for place in places]
    for layer in net.layers:

        def parts(row, place, layer=layer):
            q, k, v = (layer.qkv.weight @ row).split([*sizes, sizes[1]])
            q, k = (
                normed(each.view(-1, config.head_dim), norm) for each, norm in ((q, layer.q_norm), (k, layer.k_norm))
            )
            return turned(q, place, config.rope.theta), turned(k, place, config.rope.theta), v.view(-1, config.head_dim)

        own = [parts(normed(row, layer.input_norm), place) for row, place in zip(x, places, strict=True)]
        seen = [parts(row, place)[1:] for place, row in enumerate(context)] + [each[1:] for each in own]
        rows = []
        for row, (q, _, _) in zip(x, own, strict=True):
            mixed = []
            for head, query in enumerate(q):
                group = head * config.num_kv_heads // config.num_heads
                scores = torch.stack([query @ k[group] for k, _ in seen]) / config.head_dim**0.5
                mixed.append(sum(w * v[group] for w, (_, v) in zip(scores.softmax(0), seen, strict=True)))
            row = row + layer.out.weight @ torch.cat(mixed)
            gate, up = (layer.mlp.gate_up.weight @ normed(row, layer.post_norm)).chunk(2)
            rows.append(row + layer.mlp.down.weight @ (F.silu(gate) * up))
        x = rows
    return torch.stack([normed(row, net.norm) for row in x])


def test_dflash_sees_the_features_before_its_block_and_all_of_it(small, folder_of):
    """All blocks of a batch at once, against each by itself: what a block's mask hides cannot matter."""
    net = new_net("dflash", small, folder_of("llama", head_dim=32), num_layers=2, unroll_steps=3)
    found, entries = scored(small, net, length=9), torch.tensor([0, 2, 3, 6])
    with torch.no_grad():
        read = net.blocks(F.pad(found.batch.ids, (0, 3)), found.features, entries)
        for row in range(2):
            for place, entry in enumerate(entries.tolist()):
                wanted = dflash_block(net, found.features[row, : entry + 1], found.batch.ids[row, entry + 1])
                torch.testing.assert_close(read[row, place], wanted, rtol=1e-3, atol=1e-4)


def test_dflashs_loss_is_the_papers(small, folder_of):
    """The mask k places after the pending token guesses the token there, weighted exp(-(k-1)/gamma)."""
    net = new_net("dflash", small, folder_of("llama", head_dim=32), num_layers=1, unroll_steps=3)
    found = scored(small, net)
    loss = KINDS["dflash"].net.loss(net, OBJECTIVES["dflash"], 3).eval()
    sums, rows, length = loss(found, Truth.of(found, small.head, None, torch.float32)), *found.batch.ids.shape
    starts = [0, 4, 8]  # a quarter of the 12 entries, evenly spaced
    wanted, counts = [0.0] * 3, [0] * 3
    with torch.no_grad():
        for row, entry in product(range(rows), starts):
            read = dflash_block(net, found.features[row, : entry + 1], found.batch.ids[row, entry + 1])
            for level in range(3):
                guessed = entry + 2 + level
                if guessed < length and found.batch.mask[row, guessed]:
                    p = found.logits[row, guessed - 1].softmax(-1)
                    wanted[level] += F.cross_entropy(small.head.weight.float() @ read[1 + level], p).item()
                    counts[level] += 1
    assert [each.count for each in sums] == counts
    assert [each.loss.item() for each in sums] == pytest.approx(wanted, rel=1e-3)
    assert loss.objective.decay == pytest.approx(2.718281828 ** (-1 / 4))  # a block of 8


def test_dflash_drafts_from_all_features(folder_of):
    """Every step of rows of several lengths, through slots: the laws that one block after the text so far has."""
    folder = folder_of("llama", head_dim=32)
    target = load_target(folder, prepack=False)
    net = new_net("dflash", target, folder, num_layers=2, unroll_steps=3).requires_grad_(False)
    decoder = Decoder(target, BlockDrafter(net, target), budget=Budget(3, 2))
    for row, prompt in enumerate(((4, 7, 7, 1, 30), (9, 2, 11))):
        decoder.admit(prompt, Sampling(max_tokens=8 - row, ignore_eos=True))
        decoder.step()
    while decoder.num_running:
        texts = [(list(row.tokens[: row.length]), row.tokens[row.length]) for row in decoder.ctx.rows]
        tree = decoder.step().tree
        for row, (text, pending) in enumerate(texts):
            features = target.score(torch.tensor([text]), FeatureSpec(net.config.taps)).features[0].float()
            read = dflash_block(net, features, pending)
            tokens, depths = tree.tokens[row].tolist(), tree.depths[row].tolist()
            for level in range(max(depths)):
                best = (target.head.weight.float() @ read[1 + level]).topk(2).indices.tolist()
                assert {token for token, depth in zip(tokens, depths, strict=True) if depth == level + 1} <= {
                    *best,
                    PAD,
                }
                assert best[0] in tokens


def test_dflash_shapes(small, folder_of):
    assert dflash_taps(36) == (2, 10, 18, 26, 34)  # of the layers 1, 9, 17, 25 and 33, whose outputs these are
    assert dflash_taps(28) == (2, 8, 14, 20, 26)
    assert dflash_taps(4) == dflash_taps(3) == (2,)
    folder = folder_of("llama", head_dim=32)
    assert len(new_net("dflash", small, folder).layers) == 5
    for settings, part in (({"block_size": 1}, "block_size from 2"), ({"num_layers": 0}, "sizes of at least 1")):
        with refused(ConfigError, "a DFlash net needs", part):
            new_net("dflash", small, folder, **settings)
    with refused(ConfigError, "num_layers belongs to medusa, hydra, dflash, dspark", "'eagle3'"):
        TrainOptions("eagle3", iterations=1, num_layers=2)


# --- DSpark ----------------------------------------------------------------------------------------------------------


def dspark_law(net, head, x, before):
    """Logits of one place (H,) after one token, and how sure the net is of them."""
    known = torch.cat([x, net.embedding_before[before]])
    trust = net.trust.weight[0] @ known + net.trust.bias[0]
    return head @ x + net.head_after.weight @ net.embedding_before[before], trust.sigmoid()


def test_dsparks_loss_is_the_papers(small, folder_of):
    """Each place with the token before it; and the trust in it, by how much of its law overlaps with the target's."""
    net = new_net("dspark", small, folder_of("llama", head_dim=32), num_layers=1, unroll_steps=3, rank=6)
    found, head = scored(small, net), small.head.weight.float()
    loss = KINDS["dspark"].net.loss(net, OBJECTIVES["dflash"], 3).eval()
    sums, rows, length = loss(found, Truth.of(found, small.head, None, torch.float32)), *found.batch.ids.shape
    wanted = [0.0] * 3
    with torch.no_grad():
        for row, entry in product(range(rows), [0, 4, 8]):
            read = dflash_block(net, found.features[row, : entry + 1], found.batch.ids[row, entry + 1])
            for level in range(3):
                guessed = entry + 2 + level
                if guessed < length and found.batch.mask[row, guessed]:
                    p = found.logits[row, guessed - 1].softmax(-1)
                    logits, sure = dspark_law(net, head, read[1 + level], found.batch.ids[row, guessed - 1])
                    kept = torch.minimum(p, logits.softmax(-1)).sum()
                    wanted[level] += F.cross_entropy(logits, p).item() + F.binary_cross_entropy(sure, kept).item()
    assert [each.loss.item() for each in sums] == pytest.approx(wanted, rel=1e-3)
    before = net.fc.weight.grad
    objective = replace(loss.objective, divergences=((0.0, OBJECTIVES["tv"].divergences[0][1]),))
    alone = KINDS["dspark"].net.loss(net, objective, 3).eval()
    sum(each.loss for each in alone(found, Truth.of(found, small.head, None, torch.float32))).backward()
    assert before is None
    assert net.fc.weight.grad is None or net.fc.weight.grad.abs().max() == 0  # what trust learns changes no guess
    assert net.trust.weight.grad.abs().max() > 0


def test_dspark_drafts_along_each_path(folder_of):
    """Every node among the best after the token before it; the less sure, the less likely."""
    folder = folder_of("llama", head_dim=32)
    target = load_target(folder, prepack=False)
    net = new_net("dspark", target, folder, num_layers=1, unroll_steps=3, rank=6).requires_grad_(False)
    net.head_after.weight.mul_(20)  # so that tokens matter
    head = target.head.weight.float()
    decoder = Decoder(target, BlockDrafter(net, target), budget=Budget(3, 2, 8))
    for row, prompt in enumerate(((4, 7, 7, 1, 30), (9, 2, 11))):
        decoder.admit(prompt, Sampling(max_tokens=8 - row, ignore_eos=True))
        decoder.step()
    while decoder.num_running:
        texts = [(list(row.tokens[: row.length]), row.tokens[row.length]) for row in decoder.ctx.rows]
        tree = decoder.step().tree
        for row, (text, pending) in enumerate(texts):
            features = target.score(torch.tensor([text]), FeatureSpec(net.config.taps)).features[0].float()
            read, tokens = dflash_block(net, features, pending), tree.tokens[row].tolist()
            chances, depths = {0: 1.0}, tree.depths[row].tolist()
            for node in range(1, len(tokens)):
                if tokens[node] != PAD:
                    above = int(tree.parents[row, node])
                    logits, sure = dspark_law(net, head, read[depths[node]], tokens[above])
                    assert tokens[node] in logits.topk(2).indices
                    chances[node] = chances[above] * float(sure * logits.softmax(-1)[tokens[node]])
                    assert float(tree.confidence[row, node]) == pytest.approx(chances[node], rel=1e-3)


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
    KINDS[kind].net.write(place, net)
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
    assert kind_of_folder(other) is KINDS["medusa"]
    read = KINDS["medusa"].net.read(other, small.embedding, small.head, own)
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
    wanted = tensors["lm_heads.1.weight"]
    tensors["token_map"] = tensors["token_map"][order]
    for name in [name for name in tensors if name.startswith("lm_heads")]:
        tensors[name] = tensors[name][order].contiguous()
    whole = torch.zeros(small.vocab_size, small.hidden_size)
    whole[tensors["token_map"]] = tensors["lm_heads.1.weight"]
    tensors["lm_heads.1.weight"] = whole
    save_file(tensors, other / "model.safetensors")
    read = load_medusa(other, target_id(small))
    assert torch.equal(read.target_ids, net.target_ids)
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
    assert (other / FILE).exists()
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
    with refused(ConfigError, "does not say for which target", "--target"):
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
        ({"0.1.weight": torch.zeros(7, 16)}, ["LM heads have 7 tokens", "has 61"]),
        ({"0.0.linear.weight": torch.full((16, 16), torch.nan)}, ["blocks.0.0.weight"]),
    ):
        torch.save({**tensors, **change}, other / FILE)
        with refused(CheckpointError, *parts):
            load_medusa(other, target_id(small))
        assert [each.status for each in diagnose(other, folder)] == ["fail"]
    del tensors["0.0.linear.weight"]
    torch.save(tensors, other / FILE)
    with refused(CheckpointError, "lacks the first head's block"):
        load_medusa(other, target_id(small))
    (other / FILE).write_bytes(b"not a checkpoint")
    with refused(CheckpointError, FILE):
        load_medusa(other, target_id(small))
    with refused(ConfigError, "from 1 to 64 heads", "0 and 1"):
        new_net("medusa", small, folder, num_heads=0)


def test_a_medusa_head_that_uses_the_targets(small, folder_of, tmp_path):
    """Residual blocks alone: saved and loaded, and no layout of others has a place for it."""
    net = saved("medusa", small, folder_of("llama", head_dim=32), tmp_path / "head", own_heads=False)
    assert net.head is None
    assert not any("heads" in name for name in net.tensors())
    read = KINDS["medusa"].net.read(tmp_path / "head", small.embedding, small.head)
    state = torch.randn(3, small.hidden_size)
    found = read.level_logits(1, read.residual(1, state))
    assert torch.equal(found, small.head.forward(net.residual(1, state)))
    with refused(UnsupportedError, "uses the target's LM head", "keep it as draftwing"):
        convert(tmp_path / "head", tmp_path / "no", "vllm")


def test_the_table_of_kinds_reads_others_heads_first(folder):
    assert kind_of_folder(Path(folder)).name == "causal-lm"
