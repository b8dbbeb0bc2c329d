"""The CPU kernel: the numbers of PyTorch, the same bits in any company, and what happens where it cannot be had."""

import math
import os
import random
import threading

import pytest
import torch
import torch.nn.functional as F

from conftest import FURTHER, build, kernel_size, refused
from draftwing.accept import _along, _walk, match, match_logits
from draftwing.cpu.library import get_kernel, kernel_problem
from draftwing.cpu.noise import NativeNoise
from draftwing.cpu.packed import Packed
from draftwing.cpu.program import Program, Workspace
from draftwing.decode import Decoder
from draftwing.errors import ConfigError, UnsupportedError
from draftwing.methods.base import Budget
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.methods.lookup import LookupDrafter
from draftwing.methods.net_drafter import EagleDrafter
from draftwing.models.adapter import AdapterTarget
from draftwing.models.config import ModelConfig, read_config
from draftwing.models.context import FeatureSpec
from draftwing.models.layers import Experts, GatedMLP, Routing
from draftwing.models.lean import LeanTarget
from draftwing.models.linear import Linear
from draftwing.noise import KeyedNoise
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.tree import PAD, Accepted, DraftTree

needs_kernel = pytest.mark.skipif(get_kernel() is None, reason=f"no CPU kernel here: {kernel_problem()}")
FAMILIES = {
    "llama": ("llama", {"head_dim": 32}),
    "llama-bias-tied": ("llama-bias-tied", {"head_dim": 32, "hidden_act": "gelu"}),
    "window": ("mistral-window", {"head_dim": 32}),
    "qwen2": ("qwen2", {"hidden_size": 128}),
    "qwen3": ("qwen3", {"head_dim": 64, "hidden_act": "gelu_pytorch_tanh"}),
    "phi3-partial": ("phi3", {"hidden_size": 128, "partial_rotary_factor": 0.5}),
    "odd-sizes": ("llama", {"head_dim": 96, "hidden_size": 52, "intermediate_size": 77, "vocab_size": 67}),
    "dynamic": (
        "llama",
        {
            "head_dim": 32,
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        },
    ),
}
FAMILIES |= {name: (name, kernel_size(name)) for name in FURTHER}
FAMILIES["llama4"][1]["attention_chunk_size"] = 8  # trees cross multiples of pages
FAMILIES["qwen3-next-dense"] = ("qwen3-next", {"head_dim": 32, "num_experts": 0})
PARENTS = [-1, 0, 0, 1, 1, 2, 5, 3, -1]


def both(folder_of, monkeypatch, name, **options):
    """The same model in the kernel and in PyTorch."""
    family, changes = FAMILIES[name]
    folder = folder_of(family, **changes)
    fused = LeanTarget.from_folder(folder, torch.float32, **options)
    assert fused.runtime == "kernel"
    monkeypatch.setenv("DRAFTWING_KERNEL", "off")
    plain = LeanTarget.from_folder(folder, torch.float32, **options)
    assert plain.runtime == "torch"
    monkeypatch.delenv("DRAFTWING_KERNEL")
    return fused, plain


# --- one matrix ------------------------------------------------------------------------------------------------------


@needs_kernel
@pytest.mark.parametrize("shape", [(64, 32), (100, 130), (1, 7), (321, 64)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_matrix_gives_each_row_its_own_bits(shape, bias, quantize):
    torch.manual_seed(0)
    weight, offset = torch.randn(shape), torch.randn(shape[0]) if bias else None
    linear = Linear(weight.clone(), offset)
    linear.pack(quantize)
    x = torch.randn(40, shape[1])
    whole = linear.forward(x)
    wanted = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    assert (whole - wanted).abs().max() < (1e-4 if quantize is None else 0.06 * shape[1] ** 0.5)
    for count in range(1, 20):
        assert torch.equal(linear.forward(x[20 : 20 + count]), whole[20 : 20 + count])
    assert torch.equal(linear.forward(x[:3], torch.ones(3, shape[0])), whole[:3] + 1)
    assert linear.num_bytes >= weight.numel() * (4 if quantize is None else 1)


@needs_kernel
def test_zero_and_nan_rows_stay_what_they_are():
    linear = Linear(torch.randn(20, 33))
    linear.pack("int8")
    x = torch.zeros(3, 33)
    x[1, 4] = torch.nan
    out = linear.forward(x)
    assert (out[0] == 0).all()
    assert out[1].isnan().all()
    assert (out[2] == 0).all()


@needs_kernel
def test_a_gated_matrix_and_places():
    torch.manual_seed(0)
    weight, x = torch.randn(2 * 70, 33), torch.randn(7, 33)
    kernel = get_kernel()
    assert kernel is not None
    program = Program(kernel)
    source = program.given(33)
    wide = program.output(source.linear(Packed.of(weight, None, gated=True), activation="silu"))
    places = torch.randperm(200)[:70]
    spread = program.output(source.linear(Packed.of(weight[:70].contiguous(), None), spread=(places, 200)))
    program.finish()
    out, scattered = torch.empty(7, 70), torch.full((7, 200), -torch.inf)
    given = {source.buffer: x, wide: out, spread: scattered}
    Workspace(program).run(7, 1, {program.place(buffer): tensor for buffer, tensor in given.items()})
    gate, up = (x.double() @ weight.double().T).chunk(2, 1)
    assert torch.allclose(out.double(), F.silu(gate) * up, atol=1e-4)
    assert torch.allclose(scattered[:, places].double(), gate, atol=1e-4)
    assert scattered.isfinite().sum() == 7 * 70


# --- mixtures of experts ---------------------------------------------------------------------------------------------

ROUTINGS = {
    "softmax": (Routing(3), False),
    "normalised": (Routing(2, normalise=True, sum_eps=0.1), False),
    "chosen": (Routing(4, "chosen"), False),
    "one": (Routing(1, scale=2.5), True),
    "all": (Routing(24, normalise=True), False),
    "sigmoid": (Routing(3, "sigmoid", normalise=True, scale=1.5), True),
    "input": (Routing(3, "sigmoid", scales_input=True), False),
    "best-groups": (Routing(5, groups=(4, 2), group_by="max", scale=0.5), False),
    "best-pairs": (Routing(5, "sigmoid", groups=(6, 3), group_by="two"), True),
    "single-groups": (Routing(2, "sigmoid", groups=(24, 4), group_by="max"), True),
}


def layer_of_experts(routing, has_bias, packs, count=24, hidden=32, width=40):
    """Experts in PyTorch, or packed for the kernel."""
    torch.manual_seed(0)

    def matrix(num_out, num_in, gated=False):
        made = Linear(torch.randn(num_out, num_in) / num_in**0.5)
        if packs:
            made.pack(gated=gated)
        return made

    experts = [GatedMLP(matrix(2 * width, hidden, True), matrix(hidden, width), "silu") for _ in range(count)]
    bias = torch.randn(count) if has_bias else None
    return Experts(matrix(count, hidden), experts, routing, bias=bias)


def run_experts(layer, x, residual=None):
    kernel = get_kernel()
    assert kernel is not None
    program = Program(kernel)
    source, stream = program.given(x.shape[1]), program.given(x.shape[1])
    out = program.output(layer.forward(source, None if residual is None else stream))
    program.finish()
    found = torch.full_like(x, torch.nan)
    given = {source.buffer: x.contiguous(), out: found} | ({} if residual is None else {stream.buffer: residual})
    Workspace(program).run(len(x), 1, {program.place(buffer): tensor for buffer, tensor in given.items()})
    return found


@needs_kernel
@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_have_pytorchs_numbers_in_any_company(name):
    routing, has_bias = ROUTINGS[name]
    packed, plain = (layer_of_experts(routing, has_bias, packs) for packs in (True, False))
    x, residual = torch.randn(50, 32), torch.randn(50, 32)
    whole = run_experts(packed, x, residual)
    assert torch.allclose(whole, plain.forward(x, residual), atol=1e-4)
    assert torch.allclose(run_experts(packed, x), plain.forward(x), atol=1e-4)
    for first, count in ((0, 1), (7, 3), (20, 16), (33, 17)):
        part = slice(first, first + count)
        assert torch.equal(run_experts(packed, x[part], residual[part]), whole[part])


@needs_kernel
def test_scores_are_ranked_before_they_saturate():
    """The highest score is chosen even if the sigmoid of several is 1."""
    packed, plain = (layer_of_experts(ROUTINGS["input"][0], False, packs) for packs in (True, False))
    x = 50 * torch.randn(20, 32)
    scores = plain.router.forward(x)
    assert ((scores > 30).sum(1) > 3).any()
    largest, chosen = scores.topk(3)
    best = [[plain.experts[expert](row[None])[0] for expert in own] for row, own in zip(x, chosen, strict=True)]
    wanted = torch.stack([sum(parts) for parts in best])
    for found in (run_experts(packed, x), plain.forward(x)):
        assert (found - wanted)[(largest > 30).all(1)].abs().max() < 1e-5 * wanted.abs().max()


@needs_kernel
def test_threads_share_an_experts_outputs():
    packed, plain = (layer_of_experts(Routing(2), False, packs, hidden=200, width=300) for packs in (True, False))
    x, before = torch.randn(3, 200), torch.get_num_threads()
    whole = run_experts(packed, x)
    assert torch.allclose(whole, plain.forward(x), atol=1e-4)
    try:
        torch.set_num_threads(6)
        assert torch.equal(run_experts(packed, x), whole)
        assert torch.equal(run_experts(packed, x[1:2]), whole[1:2])
    finally:
        torch.set_num_threads(before)


@needs_kernel
def test_more_experts_than_the_kernel_takes():
    kernel = get_kernel()
    assert kernel is not None
    assert kernel.max_experts >= 512  # Qwen3-Next
    with refused(UnsupportedError, f"at most {kernel.max_experts} experts", "DRAFTWING_KERNEL=off"):
        Program(kernel).given(kernel.max_experts + 1).routed(Routing(2))


@needs_kernel
def test_rows_of_nan_choose_experts_and_stay_nan():
    """They reach neither memory of others nor other rows."""
    packed = layer_of_experts(*ROUTINGS["best-pairs"], True)
    x = torch.randn(6, 32)
    whole = run_experts(packed, x)
    x[2] = torch.nan
    found = run_experts(packed, x)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], whole[others])


@needs_kernel
def test_equal_scores_choose_the_first_experts():
    layer = layer_of_experts(Routing(2), False, True)
    x = torch.zeros(2, 32)
    x[:, 0] = 1.0
    layer.router = Linear(torch.zeros(24, 32))
    layer.router.pack()
    first = layer_of_experts(Routing(2), False, True)
    scores = torch.full((24, 32), -9.0)
    scores[:2] = 0.0
    first.router = Linear(scores)
    first.router.pack()
    a, b = run_experts(layer, x), run_experts(first, x)
    assert torch.allclose(a * 12, b, atol=1e-3)  # softmax over 24 equal scores, and over two


# --- the walk --------------------------------------------------------------------------------------------------------


def random_trees(rng, rows, vocab, *, distinct=False):
    """Ragged rows, unused nodes in between; children of few tokens, so that siblings are often equal."""
    nodes = rng.choice((1, 2, 5, 9, 17))
    tokens, parents = torch.full((rows, nodes), PAD), torch.full((rows, nodes), -1)
    for row in range(rows):
        used = [0, *sorted(rng.sample(range(1, nodes), rng.randrange(nodes)))]
        taken = set()
        for place, node in enumerate(used):
            parent, token = rng.choice(used[:place]) if place else -1, rng.randrange(min(vocab, 4) if distinct else 2)
            if place and (parent, token) in taken and distinct:
                continue
            if parent >= 0 and tokens[row, parent] == PAD:
                continue
            taken.add((parent, token))
            tokens[row, node], parents[row, node] = token, parent
    return DraftTree(tokens, parents)


def batches(vocab, noise):
    """The same rows with the kernel's noise and with Python's: greedy ones beside others, seeds alike and apart."""
    kernel = get_kernel()
    assert kernel is not None
    rows = [Sampling(), Sampling(temperature=1.0, seed=3), Sampling(temperature=0.5, seed=2**63 - 1), Sampling(seed=3)]
    native = NativeNoise(kernel, vocab, capacity=2)
    return SamplingBatch(rows, native), SamplingBatch(rows, noise)


@needs_kernel
@pytest.mark.parametrize("vocab", [2, 5, 16, 61, 333])
def test_a_walk_finds_what_python_finds(vocab):
    """Ties, equal siblings, unused nodes, tokens that are banned, whole rows that are."""
    rng, longest = random.Random(vocab), 0
    native, python = batches(vocab, KeyedNoise(vocab))
    for turn in range(60):
        tree = random_trees(rng, 4, vocab, distinct=turn % 3 == 0)
        scores = torch.randn(4, tree.num_nodes, vocab, generator=torch.Generator().manual_seed(turn))
        scores[..., :2] += 3  # which are drafted
        if turn % 2:
            scores = scores.round()
        scores[torch.rand(scores.shape, generator=torch.Generator().manual_seed(turn)) < 0.2] = -math.inf
        starts = [rng.randrange(100) for _ in range(4)]
        found, wanted = match(tree, scores, native, starts), _walk(tree, scores, python, starts)
        for ours, theirs in zip(
            (found.path, found.num, found.bonus), (wanted.path, wanted.num, wanted.bonus), strict=True
        ):
            assert torch.equal(ours, theirs)
        assert found.on_host is not None
        assert wanted.on_host is None
        drawn = python.draw(scores, tree.depths, starts, tree.max_depth)
        along = _along(tree, drawn)
        assert torch.equal(found.num, along.num)
        for row, emitted in enumerate(found.on_host):
            num = int(wanted.num[row])
            path = wanted.path[row, : num + 1]
            assert emitted.tokens == [*tree.tokens[row, path[1:]].tolist(), int(wanted.bonus[row])]
            assert emitted.num_drafted == int(tree.valid[row].sum()) - 1
            assert emitted.depth == int(tree.depths[row].max())
            chosen = scores[row, path].gather(1, drawn[row, path, None])
            reached = [node for node in range(tree.num_nodes) if int(tree.depths[row, node]) <= num]
            if all(scores[row, node].isfinite().any() for node in reached):
                assert emitted.finite
            elif not bool(chosen.isfinite().all()):
                assert not emitted.finite
            longest = max(longest, num)
    assert longest >= 3


FILTERED = [
    Sampling(temperature=0.7, seed=1),
    Sampling(temperature=0.5, top_p=0.8, seed=2),
    Sampling(temperature=1.3, top_k=3, top_p=0.9, seed=3),
    Sampling(temperature=1.0, top_k=300, seed=4),
    Sampling(temperature=2.0, top_k=300, top_p=0.97, seed=5),
    Sampling(temperature=1.0, min_p=0.2, seed=6),
    Sampling(temperature=0.9, top_k=40, top_p=0.6, min_p=0.01, seed=7),
    Sampling(top_k=2, top_p=0.1),
]


@needs_kernel
@pytest.mark.parametrize("vocab", [5, 61, 1000])
@pytest.mark.parametrize("sharpness", [0.1, 3.0])
def test_filters_on_the_way_are_those_of_whole_scores(vocab, sharpness):
    """Flat distributions, where top-p and a large top-k need more than the first candidates, sharp ones, ties, -inf."""
    kernel, rng = get_kernel(), random.Random(vocab)
    assert kernel is not None
    native, python = (
        SamplingBatch(FILTERED, each) for each in (NativeNoise(kernel, vocab, capacity=2), KeyedNoise(vocab))
    )
    rows, masked = len(FILTERED), 0
    for turn in range(20):
        tree, generator = random_trees(rng, rows, vocab), torch.Generator().manual_seed(turn)
        logits = sharpness * torch.randn(rows, tree.num_nodes, vocab, generator=generator)
        logits[..., :2] += sharpness
        if turn % 2:
            logits = logits.round()
        logits[torch.rand(logits.shape, generator=generator) < 0.1] = -math.inf
        starts = [rng.randrange(100) for _ in range(rows)]
        scores = python.scores(logits, tree, None)
        masked += int((scores == -math.inf).sum() - (logits == -math.inf).sum())
        found, wanted = match_logits(tree, logits, native, starts), _walk(tree, scores, python, starts)
        assert found is not None
        for ours, theirs in zip(
            (found.path, found.num, found.bonus), (wanted.path, wanted.num, wanted.bonus), strict=True
        ):
            assert torch.equal(ours, theirs)
    assert masked > 0


@needs_kernel
@pytest.mark.parametrize("rank", [5, 255, 256, 257, 300])
def test_the_last_of_the_likeliest_is_among_them(rank):
    """The token that the noise likes best is drawn where it is the k-th, and masked where it comes after that."""
    kernel, vocab = get_kernel(), 1000
    assert kernel is not None
    noise, own = KeyedNoise(vocab), NativeNoise(kernel, vocab, capacity=2)
    for position in range(5):
        best = int(noise.at(1, position).argmax())
        logits = torch.full((vocab,), -0.002)
        logits[[token for token in range(vocab) if token != best][: rank - 1]] = 0.0
        logits[best] = -0.001
        for top_k, is_drawn in ((rank, True), (rank - 1, False)):
            sampling = SamplingBatch([Sampling(temperature=1.0, top_k=top_k, seed=1)], own)
            found = match_logits(
                DraftTree.chain(torch.zeros(1, 1, dtype=torch.int64)), logits[None, None], sampling, [position]
            )
            assert found is not None
            assert (found.bonus.item() == best) == is_drawn


def test_without_a_kernel_whole_scores_are_made():
    tree, logits = DraftTree.chain(torch.zeros(1, 1, dtype=torch.int64)), torch.randn(1, 1, 61)
    assert match_logits(tree, logits, SamplingBatch([Sampling()], KeyedNoise(61)), [5]) is None


@needs_kernel
@pytest.mark.parametrize("place", [0, 7, 15, 16, 40, 60])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_walk_sees_scores_that_are_no_distribution(place, bad):
    """At any node that is drawn from, in the rows that have one; NaN wins every draw, as it does in Python."""
    native, python = batches(61, KeyedNoise(61))
    tree = DraftTree.chain(torch.tensor([[1, 2, 3], [1, 2, 3], [1, place, 3], [1, 2, PAD]]))
    scores = torch.zeros(4, 3, 61)
    scores[:, 0, 2] = scores[:, 1, 3] = 100.0
    scores[0, 0, place] = scores[2, 0, place] = scores[3, 2, place] = bad
    found, wanted = match(tree, scores, native, [5] * 4), _walk(tree, scores, python, [5] * 4)
    assert torch.equal(found.path, wanted.path)
    assert torch.equal(found.bonus, wanted.bonus)
    assert found.on_host is not None
    assert [emitted.finite for emitted in found.on_host] == [False, True, False, True]
    banned = torch.full((4, 3, 61), -math.inf)
    found = match(tree, banned, native, [5] * 4)
    assert found.bonus.tolist() == [0] * 4
    assert found.on_host is not None
    assert not any(emitted.finite for emitted in found.on_host)


@needs_kernel
def test_what_the_kernel_does_not_walk_python_walks():
    native, python = batches(61, KeyedNoise(61))
    tree = DraftTree.chain(torch.tensor([[1, 2, 3]] * 4))
    scores = torch.randn(4, 3, 61, generator=torch.Generator().manual_seed(0))
    apart = torch.stack([scores, scores], -1)[..., 0]
    for kind in (scores.double(), apart):
        found = match(tree, kind, native, [5] * 4)
        assert found.on_host is None
        assert torch.equal(found.path, _walk(tree, kind, python, [5] * 4).path)


# --- a model ---------------------------------------------------------------------------------------------------------


@needs_kernel
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_has_pytorchs_numbers(name, folder_of, monkeypatch):
    """Prefill over several pieces, ragged rows, trees, a commit, more trees; logits and every tap."""
    monkeypatch.setattr("draftwing.runtime.forward.PREFILL_CHUNK", 8)
    monkeypatch.setattr("draftwing.models.lean.PREFILL_CHUNK", 8)
    found = []
    targets = both(folder_of, monkeypatch, name)
    spec = FeatureSpec((0, 2, targets[0].num_layers))
    prompts = [[5 + i % 40 for i in range(27)], [4], [9, 9, 30, 31, 32, 8, 7]]
    tree = DraftTree.from_lists([[3, 5, 9, 11, 9, 3, 7, 8, -1]] * 3, [PARENTS] * 3)
    kept = [[0, 2, 5, 6], [0, 1, 3, 7], [0, -1, -1, -1]]
    for target in targets:
        ctx, parts = target.new_context(spec), []
        if target is targets[0]:  # reads only slots that were written
            ctx.cache.reserve(3, 128)
            ctx.cache.data.fill_(torch.nan)
        parts += [target.prefill(ctx, prompt) for prompt in prompts]
        output = target.forward(ctx, tree)
        parts += [output.logits[:, :8], output.features[:, :8]]
        path = torch.tensor(kept)
        target.commit(ctx, tree, Accepted(path, (path >= 0).sum(1) - 1, torch.tensor([13] * 3)))
        for row, nodes in zip(ctx.rows, kept, strict=True):
            taken = [node for node in nodes if node >= 0]
            row.tokens += [tree.tokens[0, node].item() for node in taken[1:]] + [13]
            row.length += len(taken)
        target.remove(ctx, 1)
        output = target.forward(ctx, DraftTree.chain(torch.tensor([[13, 4, 6]] * 2)))
        parts += [output.logits, output.features]
        deep = torch.tensor([[13, *range(3, 43)]] * 2)  # far deeper than the sliding window is wide
        parts += [target.forward(ctx, DraftTree.chain(deep)).logits]
        parts += [target.score(torch.tensor([prompts[0], prompts[0][::-1]]), spec).logits]
        found.append(parts)
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape
        assert not ours.numel() or (ours - theirs).abs().max() < 2e-4 * theirs.abs().max()


@needs_kernel
@pytest.mark.parametrize("options", [{}, {"quantize": "int8", "kv_dtype": "int8"}], ids=["float32", "int8"])
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "window", "qwen3", "olmo2", "gemma2-capped", "cohere2", "starcoder2", "lfm2", "qwen3.5", "llama4"),
        "gemma4",
    ],
)
def test_a_nodes_bits_do_not_depend_on_its_tree(name, options, folder_of):
    """Every node of a tree, in a batch, has the very logits that it has when its path is decoded token by token."""
    family, changes = FAMILIES[name]
    target = LeanTarget.from_folder(folder_of(family, **changes), **options)
    prompt, tokens = [3 + i * 7 % 50 for i in range(62)], [7, 5, 9, 11, 9, 3, 7, 8, -1]  # the tree is in two pages
    ctx = target.new_context()
    for each in ([4, 4, 9], prompt):
        target.prefill(ctx, each)
    output = target.forward(ctx, DraftTree.from_lists([tokens] * 2, [PARENTS] * 2))
    for node in range(8):
        path, at = [], node
        while at >= 0:
            path.insert(0, tokens[at])
            at = PARENTS[at]
        alone = target.new_context()
        target.prefill(alone, prompt)
        for token in path:
            logits = target.forward(alone, DraftTree.root(torch.tensor([token]))).logits
            alone.rows[0].length += 1
        assert torch.equal(logits[0, 0], output.logits[1, node])


@needs_kernel
def test_recurrent_states_need_every_token_before(folder_of):
    family, changes = FAMILIES["qwen3.5"]
    target = LeanTarget.from_folder(folder_of(family, **changes))
    ctx = target.new_context()
    for prompt in ([3, 4, 5], [6]):
        target.prefill(ctx, prompt)
    target.remove(ctx, 0)  # the row that takes its place has read nothing
    root = DraftTree.root(torch.tensor([6]))
    logits = target.forward(ctx, root).logits
    assert torch.equal(logits[0], target.score(torch.tensor([[6]])).logits[0])
    ctx.rows[0].length += 2
    with refused(ConfigError, "cannot be continued", "prefill"):
        target.forward(ctx, root)


@needs_kernel
def test_threads_change_no_bit(folder_of):
    target = LeanTarget.from_folder(folder_of("llama", head_dim=32), torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5, 1, 3):
            torch.set_num_threads(threads)
            for _ in range(20):
                ctx = target.new_context()
                target.prefill(ctx, list(range(3, 50)))
                found.append(target.forward(ctx, DraftTree.chain(torch.tensor([[5, 6, 7]]))).logits)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


@needs_kernel
@pytest.mark.parametrize("threads", [2, 3, 16, 17, 33])
def test_every_thread_adds_its_outputs_once(threads):
    """Fewer tiles of outputs than threads, as many, and more; a second turn finds helpers that have started."""
    before = torch.get_num_threads()
    try:
        for outputs in (64, 192, 1100, 2600):
            linear, x, residual = Linear(torch.randn(outputs, 64), None), torch.randn(3, 64), torch.randn(3, outputs)
            linear.pack("int8")
            torch.set_num_threads(1)
            expected = linear(x, residual)
            torch.set_num_threads(threads)
            assert all(torch.equal(linear(x, residual), expected) for _ in range(5))
    finally:
        torch.set_num_threads(before)


@needs_kernel
def test_reading_nothing_does_nothing(folder_of):
    """Products of no rows cannot be shared out among threads: dividing by them ended the process."""
    target = LeanTarget.from_folder(folder_of("llama", head_dim=32))
    ctx = target.new_context()
    target.prefill(ctx, [3, 4, 5])
    watched = ctx.runner.watch(0, [], 3)
    assert watched.shape[-1] == 3
    assert not watched.any()


@needs_kernel
def test_two_programs_at_the_same_time(folder_of):
    target = LeanTarget.from_folder(folder_of("llama", head_dim=32), torch.float32)
    other = LeanTarget.from_folder(folder_of("qwen3", head_dim=64), torch.float32)
    ids = torch.tensor([list(range(3, 60))])
    wanted, wrong = [each.score(ids).logits for each in (target, other)], []

    def work(model, logits):
        wrong.extend(i for i in range(30) if not torch.equal(model.score(ids).logits, logits))

    threads = [threading.Thread(target=work, args=pair) for pair in zip((target, other), wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_kernel
def test_a_forked_child_computes_alone(folder_of):
    """A child has none of its parent's helpers, and must not wait for them."""
    target = LeanTarget.from_folder(folder_of("llama", head_dim=32), torch.float32)
    ids, before = torch.tensor([[3, 4, 5]]), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        wanted = target.score(ids).logits
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(target.score(ids).logits, wanted) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(before)


def test_what_the_kernel_does_not_run_runs_in_pytorch(folder_of):
    for family, changes, dtype in (
        ("deepseek-v3", {}, torch.float32),  # heads of 24, and values of 12
        ("llama", {}, torch.float32),  # heads of 8
        ("llama", {"head_dim": 32}, torch.float64),
        ("llama", {"head_dim": 32}, torch.float16),
        ("deepseek-v3", {}, torch.bfloat16),
    ):
        assert LeanTarget.from_folder(folder_of(family, **changes), dtype).runtime == "torch"
    plain = LeanTarget.from_folder(folder_of("llama", head_dim=32), torch.float32, prepack=False)
    assert plain.runtime == "torch"
    assert plain.head.weight.numel() > 0


@needs_kernel
@pytest.mark.parametrize("own", [{"repetition_penalty": 1.8}, {"presence_penalty": 2.0}, {"logit_bias": {7: 4.0}}])
@pytest.mark.parametrize("others", [0, 2])
def test_a_forward_draws_nothing_where_a_row_changes_its_logits(own, others, folder_of):
    target = LeanTarget.from_folder(folder_of("llama", head_dim=32), torch.float32)
    assert target.applies_match

    def texts(own):
        loop = Decoder(target, lambda: LookupDrafter(61, 1), budget=Budget(3))
        rows = [loop.admit([3, 4, 5, 3, 4], Sampling(max_tokens=20, ignore_eos=True)) for _ in range(others)]
        rows.append(loop.admit([8, 9, 8, 9, 8], Sampling(max_tokens=20, ignore_eos=True, **own)))
        found = {row: [] for row in rows}
        while loop.num_running:
            for row in loop.step().rows:
                found[row.request_id] += row.token_ids
        return [*found.values()]

    plain, found = texts({}), texts(own)
    target.applies_match = False
    assert found == texts(own)
    assert found[-1] != plain[-1]
    assert found[:-1] == plain[:-1]


@needs_kernel
@pytest.mark.parametrize("fast", [False, True])
def test_an_eagle1_head_drafts_for_a_target_that_runs_in_pytorch(fast, folder_of):
    """It reads the target's LM head: a copy of it, laid out for the kernel."""
    target = AdapterTarget(build("llama", head_dim=32).float())
    config = EagleConfig.for_target(1, ModelConfig.from_hf(read_config(folder_of("llama", head_dim=32))))
    torch.manual_seed(0)
    net = EagleNet(config, target.embedding, target.head).prepack(fast=fast)
    assert net.runs.name == "kernel"
    assert target.head.weight.numel() > 0
    texts = []
    for drafter in (None, EagleDrafter(net, target)):
        decoder, text = Decoder(target, drafter, budget=Budget(4)), []
        decoder.admit([3, 8, 12, 5], Sampling(max_tokens=20, ignore_eos=True))
        while decoder.num_running:
            text += decoder.step().rows[0].token_ids
        texts.append(text)
    assert texts[0] == texts[1]


@needs_kernel
def test_a_head_that_is_laid_out_for_pytorch_keeps_its_net_there(folder_of):
    """A target whose heads are too narrow for the kernel, with a head whose own are wide enough."""
    target = LeanTarget.from_folder(folder_of("llama"), torch.float32)
    config = EagleConfig.for_target(1, ModelConfig.from_hf(read_config(folder_of("llama", head_dim=32))))
    assert EagleNet(config, target.embedding, target.head).prepack(fast=True).runs.name == "torch"
