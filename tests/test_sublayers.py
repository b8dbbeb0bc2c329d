"""The target drafts for itself with some of its layers: sub-nets over its own slots, their folders and their names."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from conftest import Recorder, build, refused
from draftwing.cli.options import default_drafts, drafts_without_path
from draftwing.cpu.noise import noise_of
from draftwing.decode import Decoder
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.formats.identity import target_id
from draftwing.loading import load_drafter, load_target
from draftwing.methods import layer_skip
from draftwing.methods.base import Budget
from draftwing.methods.layer_skip import LayerSet, LayerSkipDrafter
from draftwing.methods.net import TargetId
from draftwing.methods.registry import get_method, method_of_folder
from draftwing.models.adapter import CACHES, AdapterTarget
from draftwing.models.lean import LeanTarget
from draftwing.models.subnet import Parts, SubNet, runner_over
from draftwing.runtime.forward import Entries
from draftwing.runtime.graphs import GraphRuntime
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.stats import Stats
from draftwing.tree import DraftTree

PROMPTS = ((4, 7, 7, 1, 30), (9, 2, 11), tuple(range(3, 20)))
SOME = Parts.without(3, (1,), (0, 2))


@pytest.fixture(scope="module")
def folder(folder_of):
    return folder_of("llama", head_dim=32)


def decode(target, drafter, budget, temperature=0.0, tokens=20, prompts=PROMPTS):
    decoder, texts = Decoder(target, drafter, budget=budget), {}
    for row, prompt in enumerate(prompts):
        sampling = Sampling(temperature=temperature, seed=row, max_tokens=tokens, ignore_eos=True)
        texts[decoder.admit(prompt, sampling)] = ()
    stats = Stats()
    while decoder.num_running:
        step = decoder.step()
        stats.add(step)
        for row in step.rows:
            texts[row.request_id] += row.token_ids
    return texts, stats


# --- sub-nets --------------------------------------------------------------------------------------------------------


def test_parts_are_counted():
    assert Parts.first(3, 2) == Parts(3, (0, 1), (0, 1)) == Parts.without(3, (2,), (2,))
    assert Parts(3, (0, 2), (1,)) == SOME
    assert (SOME.skipped_attention, SOME.skipped_mlp) == ((1,), (0, 2))
    assert str(Parts.first(3, 2)) == "the first 2 of 3 layers"
    assert str(SOME) == "2 attentions and 1 MLPs of 3 layers"
    for wrong in ((3,), (-1,), (1, 0), (1, 1)):
        with refused(ConfigError, "attention: layers must be from 0 to 2", str(list(wrong))):
            Parts.without(3, wrong, ())


def by_hand(model, parts, ids):
    """The logits of a text whose last token runs through ``parts`` alone, and sees the whole model's keys: slowly."""
    with torch.no_grad():
        output = model.model(ids[None, :-1], use_cache=True)
        name = next(each for each in CACHES if getattr(output, each, None) is not None)
        whole = {name: output[name]}
        x = model.model.embed_tokens(ids[None, -1:])
        cos_sin = model.model.rotary_emb(x, torch.tensor([[len(ids) - 1]]))
        for index, layer in enumerate(model.model.layers):
            if index in parts.attention:
                x = x + layer.self_attn(layer.input_layernorm(x), cos_sin, None, **whole)[0]
            if index in parts.mlp:
                x = x + layer.mlp(layer.post_attention_layernorm(x))
        return model.lm_head(model.model.norm(x))[0, 0]


@torch.inference_mode()
@pytest.mark.parametrize("parts", [SOME, Parts.first(3, 1), Parts.without(3, (), ()), Parts(3, (), ())], ids=str)
def test_a_pass_is_that_of_the_layers_by_hand(parts, folder):
    ids = torch.tensor(PROMPTS[2])
    wanted = by_hand(build("llama", head_dim=32), parts, ids)
    for dtype, prepack in ((torch.float64, False), (torch.float32, True)):
        target = LeanTarget.from_folder(folder, dtype, prepack=prepack)
        ctx = target.new_context()
        target.prefill(ctx, ids.tolist())
        net = SubNet(target.net, parts, gives_stream=True)
        logits, stream = runner_over(net, target, ctx).forward(Entries(DraftTree.chain(ids[None, -1:]), ctx.lengths))
        torch.testing.assert_close(logits[0, 0].double(), wanted, rtol=1e-4, atol=1e-4)
        assert stream.shape == (1, 1, 32)


def test_nothing_is_copied(folder):
    target = load_target(folder)
    ctx = target.new_context()
    net = SubNet(target.net, SOME)
    assert net.net.layers is target.net.layers
    assert runner_over(net, target, ctx).cache is ctx.cache
    whole = SubNet(target.net, Parts.without(3, (), ()))
    assert whole.num_bytes == target.num_weight_bytes
    assert SubNet(target.net, Parts(3, (), ())).num_bytes == target.head.num_bytes < net.num_bytes < whole.num_bytes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("parts", [Parts.without(3, (), ()), Parts.first(3, 3)])
def test_the_whole_target_drafts_what_it_says(parts, temperature, folder):
    target = load_target(folder)
    plain, _ = decode(target, None, None, temperature)
    found, stats = decode(target, LayerSkipDrafter(SubNet(target.net, parts), target, "x"), Budget(4), temperature)
    assert found == plain
    assert 0 < stats.num_accepted == stats.num_drafted


@pytest.mark.parametrize(
    "engine", ["kernel", *(pytest.param(name, marks=pytest.mark.full) for name in ("torch", "recorded"))]
)
def test_slots_that_a_draft_makes_are_the_targets(engine, folder):
    """Chains far beyond the slots that there are: the slots move, and both runners follow."""
    target = LeanTarget.from_folder(folder, prepack=engine == "kernel")
    if engine == "recorded":
        target.use_graphs(Recorder())
        assert isinstance(target.runs, GraphRuntime)
    plain, _ = decode(target, None, None, 1.0, tokens=70)
    for budget in (Budget(60), *([Budget(20, 3)] if engine == "kernel" else [])):
        drafter = LayerSkipDrafter(SubNet(target.net, Parts.without(3, (1,), ())), target, "x")
        found, stats = decode(target, drafter, budget, 1.0, tokens=70)
        assert found == plain
        assert stats.num_accepted > 0


@pytest.mark.parametrize("engine", ["kernel", "torch"])
@pytest.mark.parametrize("count", [1, 2])
def test_the_targets_forward_goes_on_where_an_early_exit_ended(count, engine, folder):
    """Rows of several lengths: the logits of a chain are those of all layers, in the kernel to the bit."""
    target = LeanTarget.from_folder(folder, prepack=engine == "kernel")
    drafter = LayerSkipDrafter(SubNet.of(target.net, Parts.first(3, count)), target, "x")
    decoder, noise = Decoder(target, drafter, budget=Budget(4)), noise_of(target.vocab_size, target.device)
    samplings = [Sampling(temperature=1.0, seed=row, max_tokens=30, ignore_eos=True) for row in range(3)]
    for prompt, sampling in zip(PROMPTS, samplings, strict=True):
        decoder.admit(prompt, sampling)
    decoder.step()
    ctx = decoder.ctx
    sampling = SamplingBatch(samplings, noise)
    drafted, ran = drafter.draft(drafter.request(ctx, sampling, Budget(4))), []
    tree, begun = drafted.tree, drafted.resume
    assert begun.states.shape == (3, 4, 32)
    first = begun.first.forward
    begun.first.forward = lambda entries, **how: ran.append(entries.tokens.shape) or first(entries, **how)
    with torch.inference_mode():
        found = begun()
    assert ran == [(3, 1)]  # the last node alone went through the first layers again
    kept = ctx.cache.data[:, :, :, :, : max(ctx.lengths) + 5].clone()
    wanted = target.forward(ctx, tree).logits
    assert torch.equal(found, wanted) if engine == "kernel" else torch.allclose(found, wanted, atol=1e-5)
    torch.testing.assert_close(kept, ctx.cache.data[:, :, :, :, : max(ctx.lengths) + 5], atol=1e-5, rtol=1e-5)
    step = torch.inference_mode()(target.step)
    result = step(drafter, ctx, sampling, Budget(4))
    assert torch.equal(result.tree.tokens, tree.tokens)
    assert torch.equal(result.output.logits, found)
    other = replace(tree, tokens=tree.tokens.flip(0))  # not the tree that was drafted: all layers run
    result = step(drafter, ctx, sampling, Budget(4), revise=lambda tree: other)
    assert result.tree is other
    assert torch.equal(result.output.logits, target.forward(ctx, other).logits)
    assert drafter.draft(drafter.request(ctx, sampling, Budget(3, 2))).resume is None


def test_a_drafter_may_serve_another_context(folder):
    target = load_target(folder)
    plain, _ = decode(target, None, None)
    drafter = LayerSkipDrafter(SubNet(target.net, SOME), target, "x")
    assert decode(target, drafter, Budget(3), prompts=PROMPTS[::-1])[0].keys() == plain.keys()
    found, stats = decode(target, drafter, Budget(3))
    assert found == plain
    alone = decode(target, LayerSkipDrafter(SubNet(target.net, SOME), target, "x"), Budget(3))[1]
    assert (stats.num_accepted, stats.num_drafted) == (alone.num_accepted, alone.num_drafted)


def test_what_overflows_in_float16_stays_out_of_the_slots(folder, monkeypatch):
    """A stream that lacks layers may overflow: a NaN in a slot would reach the target's own rows."""

    def broken_runner(net, target, ctx):
        runner = runner_over(net, target, ctx)
        draft = runner.draft

        def broken(*args):
            drafted = draft(*args)
            runner.cache.data[..., ctx.lengths[0] + 1 :, :] = float("nan")
            return drafted

        runner.draft = broken
        return runner

    monkeypatch.setattr(layer_skip, "runner_over", broken_runner)
    target = LeanTarget.from_folder(folder, torch.float16, prepack=False)
    drafter = LayerSkipDrafter(SubNet(target.net, SOME), target, "x")
    found, stats = decode(target, drafter, Budget(3), tokens=8, prompts=PROMPTS[:1])
    assert found == decode(target, None, None, tokens=8, prompts=PROMPTS[:1])[0]
    assert stats.num_drafted > 0


# --- by name ---------------------------------------------------------------------------------------------------------


def test_early_exit_by_name(folder):
    target = load_target(folder)
    plain, _ = decode(target, None, None)
    for options, words in (({"layers": 2}, "the first 2 of 3"), ({}, "the first 1 of 3")):
        drafter = load_drafter("early-exit", target, None, options=options)()
        assert words in drafter.name
        assert decode(target, drafter, Budget(3))[0] == plain
    whole = load_drafter("early-exit", target, None, options={"layers": 3})()
    stats = decode(target, whole, Budget(3))[1]
    assert 0 < stats.num_accepted == stats.num_drafted


def test_comparisons_do_not_try_it_unasked():
    assert "early-exit" not in default_drafts(None)
    assert {"none", "lookup", "early-exit"} <= set(drafts_without_path(None))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"layers": 0}, ["layers must be at least 1, found 0"]),
        ({"layers": 2.0}, ["layers must be at least 1, found 2.0", "whole number"]),
        ({"layers": 4}, ["layers must be at most 3", "found 4"]),
        ({"depth": 2}, ["early-exit has no option 'depth'", "it has layers"]),
    ],
)
def test_options_that_it_does_not_take(options, parts, folder):
    with refused(ConfigError, "draft_options", *parts):
        load_drafter("early-exit", load_target(folder), None, options=options)


def test_only_the_lean_decoder_runs_single_layers():
    with refused(UnsupportedError, "early-exit", "runs in transformers", "engine='lean'"):
        load_drafter("early-exit", AdapterTarget(build("gpt2")), None)


# --- folders ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(folder, tmp_path):
    LayerSet(SOME, target_id(load_target(folder)), {"speed": 1.5}).write(tmp_path / "layers")
    return tmp_path / "layers"


def test_a_folder_of_layers_is_a_draft(folder, written):
    target = load_target(folder)
    assert method_of_folder(written) is get_method("layers")
    found = LayerSet.read(written)
    assert (found.parts, found.tuning) == (SOME, {"speed": 1.5})
    drafter = load_drafter(written, target, None)()
    assert drafter.name == f"layers ({SOME})"
    assert decode(target, drafter, Budget(3, 3))[0] == decode(target, None, None)[0]
    LayerSet(Parts.first(3, 1), found.target).write(written)  # again, over the first
    assert LayerSet.read(written).parts == Parts.first(3, 1)


def test_another_targets_layers_are_refused(folder_of, written):
    other = load_target(folder_of("llama", head_dim=32, num_hidden_layers=4))
    with refused(CheckpointError, "num_layers 3 and 4", "tune the layers"):
        load_drafter(written, other, None)


@pytest.mark.parametrize(
    ("change", "kind", "parts"),
    [
        ({"skip_mlp": [7]}, ConfigError, ["mlp: layers must be from 0 to 2", "[7]"]),
        ({"skip_mlp": 1}, ConfigError, ["skip_mlp must be a list of layers", "found 1"]),
        ({"skip_attention": [True]}, ConfigError, ["skip_attention must be a list of layers"]),
        ({"target": None}, ConfigError, ["target must name the model"]),
        ({"format": 9}, CheckpointError, ["expected format 1, found 9", "tune again"]),
    ],
)
def test_folders_that_cannot_be_meant(change, kind, parts, folder, written):
    file = written / "config.json"
    config = json.loads(file.read_text())
    config["draftwing"] |= change
    file.write_text(json.dumps(config))
    with refused(kind, *parts):
        load_drafter(written, load_target(folder), None)


def test_no_other_model_is_overwritten(folder, tmp_path):
    found = LayerSet(SOME, TargetId("x", 32, 3, 61))
    with refused(CheckpointError, "holds another model"):
        found.write(folder)
    (tmp_path / "file").write_text("")
    with refused(CheckpointError, "found a file"):
        found.write(tmp_path / "file")
