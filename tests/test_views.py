"""Drafts through a view, against transformers with explicit masks, and SnapKV's choice against loops."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

from conftest import add_tokenizer, build, float64_norms, kernel_size, refused
from draftwing.cpu.library import get_kernel
from draftwing.cpu.noise import noise_of
from draftwing.decode import Decoder
from draftwing.errors import ConfigError, UnsupportedError
from draftwing.loading import load, load_drafter
from draftwing.methods.base import Budget
from draftwing.methods.magicdec import SelfDrafter, SnapKVSlots, WindowSlots, snapkv_slots
from draftwing.models.adapter import AdapterTarget
from draftwing.models.cache import View
from draftwing.models.context import FeatureSpec
from draftwing.models.lean import LeanTarget
from draftwing.runtime.forward import Entries
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.tree import DraftTree

needs_kernel = pytest.mark.skipif(get_kernel() is None, reason="no C++ compiler here")
RUNS = ["torch", pytest.param("kernel", marks=needs_kernel)]
MODELS = {"llama": {"head_dim": 32}, "mistral-window": {"head_dim": 32, "sliding_window": 23}}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}  # rotations that depend on the prompt's length
VOCAB, LAYERS, HEADS, GROUPS = 61, 3, 2, 2
TEXTS = ([3 + 7 * i % 50 for i in range(53)], [5 + 11 * i % 45 for i in range(38)])
TREE = DraftTree(
    torch.tensor([[9, 8, 8, 7, 30, 2], [4, 4, 11, 12, 13, 14]]),
    torch.tensor([[-1, 0, 0, 1, 2, 4], [-1, 0, 1, 2, 0, 4]]),
)


class Both:
    """A lean target and the same model in transformers, in the same precision."""

    def __init__(self, family: str, runs: str, folder_of) -> None:
        self.window = MODELS[family].get("sliding_window")
        dtype = torch.float32 if runs == "kernel" else torch.float64
        self.target = LeanTarget.from_folder(folder_of(family, **MODELS[family]), dtype)
        assert self.target.runtime == runs
        self.model = float64_norms(build(family, **MODELS[family]))
        self.close = {"rtol": 1e-3, "atol": 1e-4} if runs == "kernel" else {"rtol": 1e-9, "atol": 1e-9}

    def context(self, features: FeatureSpec | None = None):
        """Each text but its last token in the slots, that one pending."""
        ctx = self.target.new_context() if features is None else self.target.new_context(features)
        for text in TEXTS:
            self.target.prefill(ctx, text)
        return ctx

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """By position: causal, and within the window."""
        return (keys <= queries) & (keys > queries - (self.window or 1 << 30))

    @torch.no_grad()
    def logits(self, row: int, tree: DraftTree, seen) -> torch.Tensor:
        """Of a row's tree, by transformers in one forward: ``seen(layer, head)`` are slots that its nodes look at."""
        text = TEXTS[row][:-1]
        length, tokens, parents = len(text), tree.tokens[row].tolist(), tree.parents[row].tolist()
        depths, above = [0], [{0}]
        for node in range(1, len(tokens)):
            depths.append(depths[parents[node]] + 1)
            above.append({node, *above[parents[node]]})
        positions = [*range(length), *[length + depth for depth in depths]]
        places = torch.tensor(positions)
        allowed = self.sees(places[:, None], places).repeat(LAYERS, HEADS * GROUPS, 1, 1)
        allowed[..., :length, length:] = False
        for node, nodes in enumerate(above):
            allowed[..., length + node, [length + other for other in range(len(tokens)) if other not in nodes]] = False
        for layer, head in product(range(LAYERS), range(HEADS * GROUPS)):
            slots = set(seen(layer, head // GROUPS))
            allowed[layer, head, length:, [slot for slot in range(length) if slot not in slots]] = False
        masks = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill_(~allowed, -torch.inf)
        self.model.set_attn_implementation("sdpa")  # the eager one takes its softmax in float32
        hooks = [
            layer.self_attn.register_forward_pre_hook(
                lambda _, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask[None]}), with_kwargs=True
            )
            for layer, mask in zip(self.model.model.layers, masks, strict=True)
        ]
        ids = torch.tensor([[*text, *tokens]])
        found = self.model(ids, position_ids=torch.tensor([positions]), attention_mask=masks[:1], use_cache=False)
        for hook in hooks:
            hook.remove()
        return found.logits[0, length:]


@pytest.fixture(params=RUNS)
def runs(request) -> str:
    return request.param


@torch.inference_mode()
def run(ctx, tree: DraftTree, view: View | None = None, first_node: int = 0) -> torch.Tensor:
    """Logits of the nodes from ``first_node`` on."""
    return ctx.runner.forward(Entries(tree, ctx.lengths, first_node=first_node, view=view))[0]


def some_view(seed: int, layers: int, heads: int, counts) -> View:
    """Slots at random, of which some lie side by side and some fill a block."""
    rng, found = random.Random(seed), torch.zeros(2, layers, heads, max(counts) + 3, dtype=torch.int32)
    for row, layer, head in ((r, la, h) for r in range(2) for la in range(layers) for h in range(heads)):
        length, taken = len(TEXTS[row]) - 1, set(range(16, 32)) if head == 0 and counts[row] >= 20 else set()
        while len(taken) < counts[row]:
            start = rng.randrange(length)
            taken |= set(range(start, min(start + rng.randint(1, 3), length, start + counts[row] - len(taken))))
        found[row, layer, head, : counts[row]] = torch.tensor(sorted(taken))
    return View(found, counts)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(("layers", "heads", "counts"), [(1, 1, (24, 9)), (3, 2, (21, 30)), (3, 1, (5, 0))], ids=str)
def test_a_forward_through_a_view_is_that_of_hand_written_masks(family, layers, heads, counts, runs, folder_of):
    """Of a ragged batch of trees, level by level, each of whose nodes looks at its row's view and its ancestors."""
    both = Both(family, runs, folder_of)
    ctx, view = both.context(), some_view(1, layers, heads, counts)
    before = ctx.cache.data.clone()
    pieces = []
    for first, last in ((0, 1), (1, 3), (3, 6)):
        tree = DraftTree(TREE.tokens[:, :last], TREE.parents[:, :last])
        pieces.append(run(ctx, tree, view, first))
    found = torch.cat(pieces, 1)
    for row in range(2):

        def seen(layer: int, head: int, row: int = row) -> list[int]:
            slots = view.slots[row, layer if layers > 1 else 0, head if heads > 1 else 0]
            return slots[: counts[row]].tolist()

        torch.testing.assert_close(found[row].double(), both.logits(row, TREE, seen), **both.close)
    plain = both.target.forward(ctx, TREE).logits
    assert not torch.allclose(plain, found, atol=1e-3)
    for row, length in enumerate(ctx.lengths):  # what was committed is as it was; the kernel keeps keys by 16
        length = length if runs == "torch" else length // 16 * 16
        assert torch.equal(ctx.cache.data[:, :, row, :, :length], before[:, :, row, :, :length])


def test_a_tree_may_be_deeper_than_the_sliding_window_is_wide(runs, folder_of):
    both, counts = Both("mistral-window", runs, folder_of), (24, 9)
    ctx, view = both.context(), some_view(1, 1, 1, counts)
    tree = DraftTree.chain(torch.tensor([[3 + 5 * i % 51 for i in range(45)], [4 + 9 * i % 52 for i in range(45)]]))
    found = run(ctx, tree, view)
    for row in range(2):
        seen = view.slots[row, 0, 0, : counts[row]].tolist()
        wanted = both.logits(row, tree, lambda layer, head, seen=seen: seen)
        torch.testing.assert_close(found[row].double(), wanted, **both.close)


def test_a_window_is_that_of_hand_written_masks(runs, folder_of):
    """StreamingLLM's sinks and last tokens, row by row, as the drafter keeps them while rows grow."""
    both = Both("llama", runs, folder_of)
    ctx, slots = both.context(), WindowSlots(12, 3)
    for _ in TEXTS:
        slots.admit(both.target)
    for length in (20, 37):
        ctx.rows[1].length = length
        view = slots.view(both.target, ctx)
        assert view.counts == [12, 12]
        for row, state in enumerate(ctx.rows):
            assert view.slots[row, 0, 0].tolist() == [0, 1, 2, *range(state.length - 9, state.length)]
    found = run(ctx, TREE, view)
    for row, length in enumerate(ctx.lengths):
        seen = [0, 1, 2, *range(length - 9, length)]
        wanted = both.logits(row, TREE, lambda layer, head, seen=seen: seen)
        torch.testing.assert_close(found[row].double(), wanted, **both.close)
    slots.remove(0)
    ctx.rows = ctx.rows[1:]
    ctx.rows[0].length = 7
    view = slots.view(both.target, ctx)
    assert (view.counts, view.slots[0, 0, 0, :7].tolist()) == ([7], [*range(7)])


@pytest.mark.parametrize("family", MODELS)
@needs_kernel
def test_a_view_of_everything_has_the_kernels_own_bits(family, folder_of):
    both = Both(family, "kernel", folder_of)
    ctx = both.context()
    view = View(torch.arange(60, dtype=torch.int32).expand(2, 3, 2, 60).contiguous(), ctx.lengths)
    for tree in (TREE, DraftTree.chain(TREE.tokens), DraftTree.root(TREE.tokens[:, 0])):
        assert torch.equal(run(ctx, tree, view), run(ctx, tree))


# --- what is looked at -----------------------------------------------------------------------------------------------


def attention(both: Both, row: int, start: int) -> torch.Tensor:
    """(L, K, start) how much the committed tokens from ``start`` on look at the slots before, by transformers."""
    both.model.set_attn_implementation("eager")
    with torch.no_grad():
        found = both.model(torch.tensor([TEXTS[row][:-1]]), output_attentions=True).attentions
    chances = torch.stack([each[0] for each in found])[:, :, start:, :start].sum(2)
    return chances.view(LAYERS, HEADS, GROUPS, start).sum(2)


@pytest.mark.parametrize("family", MODELS)
def test_what_is_watched_is_transformers_attention(family, runs, folder_of):
    both = Both(family, runs, folder_of)
    ctx = both.context()
    before = ctx.cache.data.clone()
    for row, start in ((0, 40), (1, 21), (1, 36), (0, 1)):
        found = both.target.watch(ctx, row, start)
        assert (found.shape, found.dtype) == ((LAYERS, HEADS, start), torch.float32)
        torch.testing.assert_close(found.double(), attention(both, row, start), rtol=1e-3, atol=1e-4)
    assert torch.equal(ctx.cache.data, before)


def test_layers_that_share_slots_look_at_them_one_by_one(folder_of):
    """Gemma 4: six layers have two layers of slots, and in some each KV head stands for two."""
    sizes = kernel_size("gemma4")
    folder, model = folder_of("gemma4", **sizes), float64_norms(build("gemma4", **sizes))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.tensor([TEXTS[0][:-1]]), output_attentions=True).attentions
    wanted = torch.stack([layer[0] for layer in weights])[:, :, 30:, :30].sum(2).view(6, 4, 2, 30).sum(2)
    views, found = some_view(1, 6, 2, (21, 30)), []
    views = View(views.slots.repeat_interleave(2, 2), views.counts)
    for dtype in (torch.float64, torch.float32):  # the latter in the kernel
        target = LeanTarget.from_folder(folder, dtype)
        ctx = target.new_context()
        for text in TEXTS:
            target.prefill(ctx, text)
        assert len(ctx.cache.data) == 2
        before = ctx.cache.data.clone()
        torch.testing.assert_close(target.watch(ctx, 0, 30).double(), wanted, rtol=1e-3, atol=1e-4)
        assert torch.equal(ctx.cache.data, before)
        everything = View(torch.arange(60, dtype=torch.int32).expand(2, 6, 4, 60).contiguous(), ctx.lengths)
        whole = run(ctx, TREE)
        torch.testing.assert_close(run(ctx, TREE, everything), whole, rtol=0, atol=1e-10)
        found.append(run(ctx, TREE, views).double())
        assert (found[-1] - whole).abs().max() > 1e-3
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def values_of(watched, pool: int, grain: int) -> list[float]:
    """What each group of slots counts with, in loops."""
    size, found = len(watched), []
    for begin in range(0, size, grain):
        around = [
            [watched[at] for at in range(slot - pool // 2, slot + pool // 2 + 1) if 0 <= at < size]
            for slot in range(begin, begin + grain)
        ]
        found.append(sum(max(each) for each in around))
    return found


@pytest.mark.parametrize(("pool", "grain"), [(1, 1), (7, 1), (5, 4), (1, 16), (7, 16)])
def test_the_choice_is_snapkvs(pool, grain):
    """No group of slots that was left out counts with more than one that was taken, for each layer and head."""
    torch.manual_seed(pool + grain)
    watched = torch.rand(3, 2, 8 * 16) ** 8
    for count in (grain, 3 * grain + grain // 2, 40, 500):
        found = snapkv_slots(watched, count, pool, grain)
        assert found.dtype == torch.int32
        assert found.shape == (3, 2, min(count // grain * grain, 128))
        for layer in range(3):
            for head in range(2):
                slots = found[layer, head].tolist()
                assert slots == sorted(set(slots))
                groups = slots[::grain]
                assert slots == [group + i for group in groups for i in range(grain)]
                assert all(group % grain == 0 for group in groups)
                values = values_of(watched[layer, head].tolist(), pool, grain)
                taken = sorted(values[group // grain] for group in groups)
                assert taken == pytest.approx(sorted(values)[len(values) - len(groups) :])


@pytest.mark.parametrize("per_head", [True, False])
def test_the_drafter_looks_at_what_snapkv_chooses(per_head, runs, folder_of):
    """Chosen by transformers' attention of the last tokens; these and what is written since are looked at besides."""
    both = Both("llama", runs, folder_of)
    ctx, slots = both.context(), SnapKVSlots(20, window=6, pool=3, grain=2, refresh=8, per_head=per_head)
    for _ in TEXTS:
        slots.admit(both.target)
    ctx.rows[1].length = 18  # a text that fits in is looked at as a whole
    lengths = ctx.lengths
    view = slots.view(both.target, ctx)
    assert view.counts == [20, 18]
    assert view.slots.shape[1:3] == (LAYERS, HEADS if per_head else 1)
    assert view.slots.nbytes < ctx.cache.data.nbytes / 40
    start = (lengths[0] - 6) // 2 * 2
    watched = attention(both, 0, start)
    watched = watched if per_head else watched.sum(1, keepdim=True)
    for layer in range(LAYERS):
        for head in range(view.slots.shape[2]):
            assert view.slots[1, layer, head, :18].tolist() == [*range(18)]
            chosen = view.slots[0, layer, head, :20].tolist()
            assert chosen[14:] == [*range(start, lengths[0])]
            values = values_of(watched[layer, head].tolist(), 3, 2)
            taken = sorted(values[slot // 2] for slot in chosen[:14:2])
            assert taken == pytest.approx(sorted(values)[-7:], rel=1e-3)
    before = view.slots[0, :, :, :14].clone()
    ctx.rows[0].length, ctx.rows[1].length = 36, 30  # row 0 is shorter than when its slots were chosen
    shorter = slots.view(both.target, ctx)
    assert shorter.counts == [20, 20]
    assert not torch.equal(shorter.slots[0, :, :, :14], before)
    before = shorter.slots[0, :, :, :14].clone()
    ctx.rows[0].length = 43
    again = slots.view(both.target, ctx)
    assert again.counts == [14 + 43 - 30, 20]
    assert torch.equal(again.slots[0, :, :, :14], before)  # 7 tokens later, not 8
    ctx.rows[0].length = 44
    refreshed = slots.view(both.target, ctx)
    assert refreshed.counts == [20, 20]
    assert not torch.equal(refreshed.slots[0, :, :, :14], before)
    ctx.rows[0].length = 19  # slots chosen for a longer text are no longer valid
    whole = slots.view(both.target, ctx)
    assert whole.counts == [19, 20]
    assert torch.equal(whole.slots[0, ..., :19], torch.arange(19).expand_as(whole.slots[0, ..., :19]))
    slots.remove(0)
    ctx.rows = ctx.rows[1:]
    left = slots.view(both.target, ctx)
    assert left.counts == [20]
    assert torch.equal(left.slots[0, :, :, :20], again.slots[1, :, :, :20])
    slots.remove(0)
    ctx.rows[0].length = 36
    for _ in range(2):  # after the last row has left, others join
        slots.admit(both.target)
        assert slots.view(both.target, ctx).counts == [20] * ctx.num_rows
        ctx.rows = [*ctx.rows, ctx.rows[0]]


# --- the drafter -----------------------------------------------------------------------------------------------------


def decoded(target, slots, budget: Budget, temperature: float, rule: str = "match"):
    """The texts of both rows, and all steps."""
    decoder = Decoder(target, None if slots is None else SelfDrafter(target, slots), rule, budget)
    for text in TEXTS:
        decoder.admit(text, Sampling(max_tokens=31, temperature=temperature, seed=3, ignore_eos=True))
    texts, steps = {0: [], 1: []}, []
    while decoder.num_running:
        steps.append(decoder.step())
        for row in steps[-1].rows:
            texts[row.request_id] += row.token_ids
    return texts, steps


@pytest.mark.parametrize(("slots", "temperature"), [(WindowSlots, 0.0), (SnapKVSlots, 1.0)], ids=["window", "snapkv"])
def test_a_view_of_everything_drafts_what_the_target_says(slots, temperature, runs, folder_of):
    """Every step but the last, which the end cuts, emits all that was drafted and one token more."""
    target = Both("mistral-window", runs, folder_of).target
    texts, steps = decoded(target, slots(200), Budget(5), temperature)
    assert texts == decoded(target, None, Budget(), temperature)[0]
    for step in steps[:-1]:
        assert [len(row.token_ids) for row in step.rows] == [6, 6]
    assert len(steps) == 6


@pytest.mark.parametrize("runs", ["float64", "float32"])
def test_it_rotates_as_the_target_does(runs, folder_of):
    """By prompt lengths too, where these count: else not all of what is in view would come true."""
    changes = {"head_dim": 32, "max_position_embeddings": 32, "rope_parameters": DYNAMIC}
    target = LeanTarget.from_folder(folder_of("llama", **changes), getattr(torch, runs))
    _, steps = decoded(target, WindowSlots(200), Budget(5), 1.0)
    assert all(row.num_accepted == row.num_drafted for step in steps for row in step.rows)
    assert len(steps) == 6


def test_a_model_that_is_loaded_drafts_for_itself(tmp_path):
    """By name, with options, through everything that makes a text of tokens."""
    build("llama", vocab_size=300).save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    options = {"budget": 24, "window": 4, "grain": 4, "refresh": 6}
    common = {"dtype": "float64", "device": "cpu", "budget": Budget(3)}
    found = [
        load(tmp_path, draft, draft_options=said, **common).generate(
            ["def add(a, b):\n    return a", "for row in rows: print(row)"], max_tokens=30, temperature=1.0, seed=4
        )
        for draft, said in (("none", {}), ("self-snapkv", options), ("self-window", {"budget": 20}))
    ]
    for texts in found[1:]:
        assert [each.text for each in texts] == [each.text for each in found[0]]
        assert any(each.tau > 1 for each in texts)


@pytest.mark.parametrize(
    ("rule", "runs"),
    [
        ("block", "torch"),
        *(pytest.param(rule, "kernel", marks=needs_kernel) for rule in ("speculative", "multi-round")),
    ],
)
def test_classic_rules_take_its_drafts(rule, runs, folder_of):
    """It gives the distribution that its tokens were drawn from: with everything in view that is the target's own."""
    target = Both("llama", runs, folder_of).target
    _, steps = decoded(target, WindowSlots(200), Budget(3), 1.0, rule)
    assert all(row.num_accepted == row.num_drafted for step in steps for row in step.rows)
    greedy, _ = decoded(target, SnapKVSlots(20, 4, 3, 2, 9), Budget(3), 0.0, rule)
    assert greedy == decoded(target, None, Budget(), 0.0)[0]


def test_drafts_are_the_same_next_to_a_drafter_that_reads_features(runs, folder_of):
    """A context that returns hidden states drafts like one that does not."""
    both, trees = Both("llama", runs, folder_of), []
    sampling = SamplingBatch([Sampling(temperature=1.0, seed=5)] * 2, noise_of(VOCAB, both.target.device))
    for features in (None, FeatureSpec((1, 3))):
        ctx, slots = both.context(features), WindowSlots(12, 3)
        for _ in TEXTS:
            slots.admit(both.target)
        drafter = SelfDrafter(both.target, slots)
        trees.append([drafter.propose(ctx, sampling, budget) for budget in (Budget(3), Budget(3, 2, 5))])
    for one, other in zip(*trees, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.parents, other.parents)
        assert one.num_nodes > 1


# --- by name ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "budget"),
    [
        ("self-window", {}, 512),
        ("self-window", {"budget": 9, "sinks": 0}, 9),
        ("self-snapkv", {}, 512),
        ("self-snapkv", {"budget": 40, "window": 8, "pool": 1, "grain": 4, "refresh": 0, "per_head": False}, 40),
    ],
    ids=str,
)
def test_both_are_drafts_by_name(name, options, budget, folder_of):
    target = LeanTarget.from_folder(folder_of("llama"), torch.float64)
    make = load_drafter(name, target, None, options=options)
    sampling = SamplingBatch([Sampling()], noise_of(VOCAB, target.device))
    for drafter in (make(), make()):  # each keeps its own rows
        assert (drafter.name, drafter.context) == (f"{name}:{budget}", budget)
        ctx = target.new_context()
        target.prefill(ctx, TEXTS[0])
        drafter.admit(ctx, None)
        assert drafter.propose(ctx, sampling, Budget(2)).num_nodes > 1
    others = [load_drafter("self-snapkv", target, None, options={"pool": pool})() for pool in (1, 3, 7)]
    assert len({drafter.identity for drafter in others}) == 3


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("self-window", {"budget": 1}, ["budget must be from 2 to", "found 1"]),
        ("self-window", {"budget": True}, ["budget must be from 2 to", "found True"]),
        ("self-window", {"sinks": -1}, ["sinks must be from 0", "found -1"]),
        ("self-window", {"sinks": 512}, ["sinks must be fewer than budget, found 512 of 512"]),
        ("self-window", {"window": 3}, ["self-window has no option 'window'", "it has budget, sinks"]),
        ("self-snapkv", {"pool": 4}, ["pool must be odd, found 4"]),
        ("self-snapkv", {"pool": "7"}, ["pool must be from 1", "found '7'"]),
        ("self-snapkv", {"grain": 0}, ["grain must be from 1", "found 0"]),
        ("self-snapkv", {"budget": 60}, ["budget must hold the window and twice the grain", "at least 64"]),
        ("self-snapkv", {"refresh": 1 << 30}, ["refresh must be from 0 to 65,536"]),
        ("self-snapkv", {"per_head": 1}, ["per_head must be True or False, found 1"]),
    ],
    ids=str,
)
def test_options_that_it_cannot_take_are_refused(name, options, parts, folder_of):
    target = LeanTarget.from_folder(folder_of("llama"), torch.float64)
    with refused(ConfigError, "draft_options", *parts):
        load_drafter(name, target, None, options=options)


def test_recurrent_layers_read_no_slots(folder_of):
    """So they cannot draft from some of them, nor share memory in pages, nor run alone."""
    target = LeanTarget.from_folder(folder_of("qwen3.5"), torch.float64, name="other")
    for name in ("self-window", "early-exit"):
        with refused(UnsupportedError, "other has recurrent layers", "draft"):
            load_drafter(name, target, None)
    with refused(UnsupportedError, "other has recurrent layers", "leave kv_memory out"):
        Decoder(target, kv_memory=1 << 26)


def test_layers_that_depend_on_whole_forwards_do_not_run_alone(folder_of):
    target = LeanTarget.from_folder(folder_of("gemma4"), torch.float64, name="other")
    with refused(UnsupportedError, "draft 'early-exit' runs single layers", "layers of other depend on inputs"):
        load_drafter("early-exit", target, None)


@pytest.mark.parametrize("name", ["self-window", "self-snapkv"])
def test_a_target_of_transformers_cannot_draft_for_itself(name):
    target = AdapterTarget(build("gpt2"), name="other")
    with refused(UnsupportedError, "other runs in transformers", "engine='lean'"):
        load_drafter(name, target, None)
    for call, args in ((target.draft, (None,)), (target.watch, (None, 0, 0))):
        with refused(UnsupportedError, "cannot look at some of its slots", "engine='lean'"):
            call(*args)
