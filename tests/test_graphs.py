"""Recorded forwards and drafts: they compute what the eager path does, and a recording survives changes of memory.

Two recorders stand for the GPU. ``Recorder`` runs the function again. ``Tape`` is as strict as a CUDA graph: it keeps
the operations of one run and repeats exactly these on the same memory, and fails if one of them would wait for the
device.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from unittest import mock

import pytest
import torch
import typer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from conftest import Recorder, build, float64_norms
from draftwing.budget.costs import TYPICAL_GPU
from draftwing.budget.planner import SHAPES, Planner
from draftwing.decode import Decoder
from draftwing.methods.base import EAGLE_TREE, Budget
from draftwing.methods.net_drafter import EagleDrafter
from draftwing.models.context import FeatureSpec
from draftwing.models.lean import LeanTarget
from draftwing.runtime import graphs
from draftwing.runtime.graphs import NODE_BUCKETS, CudaRecorder, Pool, RecordedRunner, round_up_to
from draftwing.sampling import Sampling
from draftwing.tree import PAD, DraftTree
from test_exact import DRAFTERS, MAX_TOKENS, PROMPTS, Lab, run
from test_lean import ROPES, check_trees

FAMILIES = ("llama", "llama-bias-tied", "mistral-window", "qwen2-window", "qwen3", "phi3")
aten = torch.ops.aten
WAITS = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten._unique2)


class Reads(TorchFunctionMode):
    """Counts reads of tensors by the host."""

    names = frozenset(("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__"))

    def __init__(self) -> None:
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in self.names:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


class NoWaiting(TorchDispatchMode):
    """Fails at operations whose result has a size that the host must read from the device."""

    forbidden = WAITS

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in self.forbidden, func
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            assert all(index is None or index.dtype == torch.int64 for index in args[1]), "boolean index"
        return func(*args, **(kwargs or {}))


class Tape(NoWaiting):
    """The operations of one run and their results."""

    forbidden = (*WAITS, aten.lift_fresh)  # torch.tensor of the host's numbers

    def __init__(self) -> None:
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = super().__torch_dispatch__(func, types, args, kwargs)
        memory = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
        is_view = all(tensor.untyped_storage().data_ptr() in memory for tensor in tensors(results))
        if func._schema.is_mutable or not is_view:  # views need not be repeated
            self.done.append((func, args, kwargs or {}, [] if func._schema.is_mutable else tensors(results)))
        return results


def tensors(of) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(of) if isinstance(leaf, torch.Tensor)]


class TapeRecorder:
    """A ``Record`` as strict as a CUDA graph."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replays = 0

    def __call__(self, function):
        self.num_recorded += 1
        function()
        with Tape() as tape, Reads() as reads:
            outputs = function()
        assert not reads.found

        def replay():
            self.num_replays += 1
            for func, args, kwargs, results in tape.done:
                fresh = tensors(func(*args, **kwargs))
                for place, result in enumerate(results):
                    result.copy_(fresh[place])
            return outputs

        return replay


RECORDERS = {"eager": Recorder, "tape": TapeRecorder}


@contextmanager
def recorded(lab: Lab, record) -> Iterator[None]:
    """The lab's models record, as they do on a GPU."""
    made = EagleDrafter.__init__
    try:
        for model in (lab.itself, lab.perturbed):
            model.use_graphs(record)

        def on_the_targets_runtime(self, net, target, *more) -> None:
            if net.runs.name == "torch":
                net.runs = target.runs
            made(self, net, target, *more)

        with mock.patch.object(EagleDrafter, "__init__", on_the_targets_runtime):
            yield
    finally:
        for model in (lab.itself, lab.perturbed):
            model.use_graphs(None)


# --- the target ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "record"), [("llama", "eager"), *((family, "tape") for family in FAMILIES)])
def test_logits_of_every_family(family, record, folder_of):
    """Those of transformers: ragged rows, a tree between buckets, a commit, a removal, a chain."""
    target = LeanTarget.from_folder(folder_of(family), torch.float64)
    target.use_graphs(RECORDERS[record]())
    model = float64_norms(build(family))
    for _ in range(2):  # the second time over the slots and graphs of the first
        check_trees(model, target, [list(range(3, 23)), [4], [9, 9, 30, 31, 32]])
        assert target.runs.record.num_recorded == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 33])
def test_the_same_numbers_as_eagerly(nodes, dtype, folder_of):
    """Logits, features, and the keys and values of every slot up to the tree's last."""
    target = LeanTarget.from_folder(folder_of("qwen3"), dtype, prepack=False)
    taps, tokens = FeatureSpec((1, 3)), torch.arange(2 * nodes).view(2, nodes) % 50 + 3
    parents = (torch.arange(nodes) // 2 - (torch.arange(nodes) == 0).long()).expand(2, -1).clone()
    outputs = []
    for record in (None, TapeRecorder()):
        target.use_graphs(record)
        ctx = target.new_context(taps)
        for prompt in PROMPTS[1:]:
            target.prefill(ctx, prompt)
        for first in (0, 11):  # the second is a replay
            tree = DraftTree((tokens + first) % 60, parents)
            output = target.forward(ctx, tree)
        slots = [ctx.cache.data[:, :, row, :, : state.length + nodes] for row, state in enumerate(ctx.rows)]
        outputs.append([output.logits.clone(), output.features.clone(), *slots, tree.ancestors, tree.depths])
    for eager, ours in zip(*outputs, strict=True):
        assert eager.shape == ours.shape
        tolerance = 1e-4 if dtype == torch.float32 else 0.15
        assert torch.allclose(eager.double(), ours.double(), rtol=tolerance, atol=tolerance)


def test_experts_and_dynamic_rotation_run_eagerly_and_nodes_go_into_buckets(folder_of):
    sizes = [round_up_to(NODE_BUCKETS, count) for count in (1, 2, 3, 5, 9, 61, 64, 65, 129)]
    assert sizes == [1, 2, 4, 8, 16, 64, 64, 128, 192]
    for changes in ({}, {"rope_parameters": ROPES["dynamic"]}):
        target = LeanTarget.from_folder(folder_of("llama" if changes else "mixtral", **changes), torch.float64)
        target.use_graphs(Recorder())
        assert not isinstance(target.new_context().runner, RecordedRunner)


# --- texts -----------------------------------------------------------------------------------------------------------


TEXTS = ("eagle1-unshifted", "eagle3-chain", "eagle3-few-tokens", "lm-tree", "view-window", "view-snapkv", "scattered")


@pytest.mark.parametrize(
    ("record", "drafter"),
    [*product(["eager"], TEXTS), *product(["tape"], ["eagle3-chain", "eagle1-static", "lm-dynamic"])],
)
def test_text_is_plain_decodings(record, drafter, lab):
    """In a ragged batch of rows that join and leave; a tape repeats the operations that a graph would."""
    here, case, record = lab("llama"), DRAFTERS[drafter], RECORDERS[record]()
    expected = [here.plain("mixed", row) for row in range(3)]
    made = case.make(here, "mixed") if drafter == "scattered" else None
    with recorded(here, record):
        requests = [here.request("mixed", row) for row in range(3)]
        made = made or case.make(here, "mixed")
        texts, _ = run(here.target, requests, made, case.budget, joins=(0, 0, 1), leaves={0: 1})
    for row in range(3):
        assert texts[row] == expected[row][: len(texts[row])]
        assert len(texts[row]) == MAX_TOKENS or row == 0
    assert record.num_replays > record.num_recorded > 0


# --- drafts ----------------------------------------------------------------------------------------------------------


BUDGETS = {
    "chain": Budget(1),
    "levels": Budget(3, 4),
    "dynamic": Budget(4, 6, 12),
    "static": Budget(paths=EAGLE_TREE),
}


@pytest.mark.parametrize(("budget", "rule"), [*((each, "match") for each in BUDGETS), ("dynamic", "match-top")])
def test_recorded_trees_are_eager_trees(budget, rule, lab):
    """The tree of every step; one row has no features at first."""
    here, trees = lab("llama"), []
    requests = [
        (prompt, Sampling(max_tokens=10, ignore_eos=True, seed=row, temperature=(0.7, 0.0, 1.0)[row]))
        for row, prompt in enumerate(PROMPTS)
    ]
    for record in (None, TapeRecorder()):
        with recorded(here, record):
            decoder = Decoder(here.target, EagleDrafter(here.head(3, ()), here.target), rule, BUDGETS[budget])
            for request in requests:
                decoder.admit(*request)
            steps = []
            while decoder.num_running:
                steps.append(decoder.step().tree)
            trees.append(steps)
    assert len(trees[0]) == len(trees[1])
    for eager, ours in zip(*trees, strict=True):  # compared in the end: later steps do not change a tree
        for name in ("tokens", "parents", "ancestors"):
            assert torch.equal(getattr(eager, name), getattr(ours, name))
        assert torch.equal(eager.depths.expand_as(eager.parents), ours.depths.expand_as(ours.parents))
        assert (eager.confidence is None) == (ours.confidence is None)
        if eager.confidence is not None:
            assert torch.allclose(eager.confidence, ours.confidence)
    assert any((tree.tokens[:, 1:] != PAD).any() for tree in trees[1])


def test_drafts_in_float32(folder_of, lab):
    here = lab("llama")
    target = LeanTarget.from_folder(folder_of("llama"), torch.float32, prepack=False)
    texts = []
    for record in (None, TapeRecorder()):
        target.use_graphs(record)
        head = here.head(3, ())
        net = type(head)(head.config, target.embedding).load_tensors(
            {name: tensor.float() for name, tensor in head.tensors().items()}
        )
        drafter = EagleDrafter(net.requires_grad_(False), target)
        requests = [here.request(kind, row) for row, kind in enumerate(("greedy", "t1", "greedy"))]
        texts.append(run(target, requests, drafter, Budget(4, 4, 10))[0])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["top-p", "penalties"])
def test_filtered_scores_are_drafted_from_eagerly(kind, lab, monkeypatch):
    """Drafts that need values on the host are not recorded; the target's forwards are."""
    here, record, keys, key_of = lab("llama"), Recorder(), [], graphs.recording_key
    monkeypatch.setattr(graphs, "recording_key", lambda request: (keys.append(key_of(request)), keys[-1])[1])
    with recorded(here, record):
        drafter = EagleDrafter(here.head(3, ()), here.target)
        run(here.target, [here.request(kind, 1)], drafter, Budget(4))
    assert set(keys) == {None}
    assert record.num_recorded > 0


# --- what a recording depends on -------------------------------------------------------------------------------------


def decode(target, prompt, budget=None, net=None, num_tokens=24):
    drafter = None if net is None else EagleDrafter(net, target)
    request = Sampling(max_tokens=num_tokens, ignore_eos=True)
    return run(target, [(prompt, request)], drafter, budget)[0][0]


def test_buckets_are_recorded_once(lab):
    """A second request takes the slots and the recordings of the first."""
    here, record = lab("llama"), Recorder()
    with recorded(here, record):
        net = here.head(3, ())
        first = decode(here.target, PROMPTS[1], Budget(5), net)
        # Chains of 6 nodes, and what is left of them near the end; one draft.
        assert 2 <= record.num_recorded <= 5
        before = record.num_recorded
        assert decode(here.target, PROMPTS[1], Budget(5), net) == first
        assert record.num_recorded == before
        decode(here.target, PROMPTS[1], Budget(3), net)
        assert record.num_recorded > before


def test_recordings_follow_the_slots(lab, monkeypatch):
    """Slots that move, for more tokens or more rows, drop their recordings and change no text."""
    monkeypatch.setattr(graphs, "MIN_SLOTS", 16)
    here, request = lab("llama"), Sampling(max_tokens=50, ignore_eos=True, temperature=1.0, seed=3)
    requests, joins = [(prompt, request) for prompt in PROMPTS], (0, 9, 21)
    expected = [run(here.target, [request])[0][0] for request in requests]
    record = TapeRecorder()
    with recorded(here, record):
        drafter = EagleDrafter(here.head(3, ()), here.target)
        texts, _ = run(here.target, requests, drafter, Budget(3), joins=joins, leaves={2: 23})
    # After the third has left, the other two are what they were before it came, in slots that moved when it did.
    assert [texts[row] for row in range(2)] == expected[:2]
    assert 0 < len(texts[2]) < len(expected[2])
    assert texts[2] == expected[2][: len(texts[2])]
    assert record.num_recorded > 8


def test_decoders_side_by_side(lab):
    """Each has its own slots; of two that end, the slots of one are kept."""
    here = lab("llama")
    expected = [here.plain("t1", row) for row in (1, 2)]
    with recorded(here, TapeRecorder()):
        decoders = [Decoder(here.target, EagleDrafter(here.head(3, ()), here.target), budget=Budget(3)) for _ in "ab"]
        for row, decoder in enumerate(decoders, 1):
            decoder.admit(*here.request("t1", row))
        texts = [(), ()]
        while any(decoder.num_running for decoder in decoders):
            for place, decoder in enumerate(decoders):
                if decoder.num_running:
                    texts[place] += decoder.step().rows[0].token_ids
        assert texts == expected
        runners = [decoder.ctx.runner for decoder in decoders]  # keeps their ids from being used again
        caches = {id(runner.cache) for runner in runners}
        assert len(caches) == 2
        features = decoder.drafter.features
        del decoder, decoders
        gc.collect()
        contexts = [here.target.new_context(features) for _ in "ab"]
        assert [id(ctx.cache) in caches for ctx in contexts] == [True, False]


def test_a_pool_lends_to_one_at_a_time():
    class Holder:
        pass

    pool, made = Pool(), iter(range(9))
    first, second = Holder(), Holder()
    assert [pool.lend(holder, lambda: next(made)) for holder in (first, second)] == [0, 1]
    del first, second  # one idle runner is kept
    holders = [Holder() for _ in range(2)]
    assert [pool.lend(holder, lambda: next(made)) for holder in holders] == [0, 2]


# --- nothing waits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "kind", "is_recorded"),
    [
        *(("none", "t1", True), ("eagle3-chain", "greedy", True), ("eagle3-dynamic", "t1", True)),
        *(("eagle1-static", "t1", True), ("eagle3-chain", "t1", False), ("eagle3-dynamic", "greedy", False)),
    ],
)
def test_a_step_reads_only_its_tokens_from_the_device(drafter, kind, is_recorded, lab, monkeypatch):
    for module in ("accept", "masks", "readout", "sampling"):  # as on a GPU: reading from the host's memory never waits
        monkeypatch.setattr(f"draftwing.{module}.on_host", lambda _: False)
    here = lab("llama")
    with recorded(here, Recorder() if is_recorded else None):
        case = DRAFTERS.get(drafter)
        decoder = Decoder(here.target, case and case.make(here, kind), budget=case and case.budget)
        for row in range(3):
            prompt, sampling = here.request(kind, row)
            decoder.admit(prompt, replace(sampling, max_tokens=100))
        for _ in range(2):
            decoder.step()
        for _ in range(3):
            with NoWaiting(), Reads() as reads:
                decoder.step()
            assert reads.found == ["tolist"]


def test_the_benchmark_needs_a_gpu(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks" / "gpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    script, app = importlib.import_module("speed"), typer.Typer()
    app.command()(script.main)
    found = CliRunner().invoke(app, [str(tmp_path)])
    assert found.exit_code == 2
    assert "sees no CUDA device" in " ".join(found.stderr.split())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["greedy", "t1"])
@pytest.mark.parametrize("drafter", ["eagle3-chain", "eagle3-dynamic"])
def test_on_a_gpu(drafter, kind, folder_of, lab):
    """The graphs themselves: float64, so that no tie breaks another way."""
    here, device = lab("llama"), torch.device("cuda")
    target = LeanTarget.from_folder(folder_of("llama"), torch.float64, device)
    assert isinstance(target.runs.record, CudaRecorder)
    net = here.head(3, ()).to(device)
    net.embedding = target.embedding
    requests = [here.request(kind, row) for row in range(3)]
    texts, _ = run(target, requests, EagleDrafter(net, target), DRAFTERS[drafter].budget)
    assert [texts[row] for row in range(3)] == [here.plain(kind, row) for row in range(3)]


def test_a_step_that_records_has_no_time(lab):
    """It takes as long as many others: a planner would take it for an expensive budget."""

    here, record, planner, told = lab("llama"), Recorder(), Planner(TYPICAL_GPU, None, SHAPES), []

    def observe(*args):
        told.append((args[3] is None, record.num_recorded))
        Planner.observe(planner, *args)

    with recorded(here, record), mock.patch.object(planner, "observe", observe):
        decoder = Decoder(here.target, DRAFTERS["eagle3-chain"].make(here, "greedy"), planner=planner)
        decoder.admit(PROMPTS[0], Sampling(max_tokens=26, ignore_eos=True))
        before = record.num_recorded
        while decoder.num_running:
            decoder.step()
    counts = [before, *[count for _, count in told]]
    did_record = [after > count for count, after in pairwise(counts)]
    assert did_record == [is_untimed for is_untimed, _ in told]
    assert 0 < sum(did_record) < len(did_record)
