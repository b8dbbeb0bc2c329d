"""A step in one call: who drafts goes on with the verification where nothing is made of the trees in between."""

from dataclasses import replace

import pytest
import torch

from draftwing.budget.planner import Planner
from draftwing.cpu.library import get_kernel, kernel_problem
from draftwing.cpu.runner import FusedStep, KernelRunner
from draftwing.decode import Decoder
from draftwing.engine import Engine
from draftwing.methods.base import Budget
from draftwing.methods.causal_lm import CausalLMDrafter
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.methods.net_drafter import EagleDrafter
from draftwing.models.config import ModelConfig, read_config
from draftwing.models.lean import LeanTarget
from draftwing.models.paged import PageTable
from draftwing.request import Request
from draftwing.sampling import Sampling
from pairwise import cover, groups_of
from test_budget import COSTS

pytestmark = pytest.mark.skipif(get_kernel() is None, reason=f"no CPU kernel here: {kernel_problem()}")
VOCAB, END = 61, 30
PROMPTS = [3, 8, 12, 5, 3, 8], [9, 9, 4], [7]
PAIRS = groups_of(("name", "budget", "at"), 2)
BUDGETS = {"chain": Budget(4), "wide": Budget(3, 3, 12), "re-ranked": Budget(4, 3, 7), "beyond the end": Budget(40)}


@pytest.fixture(scope="module")
def target(folder_of):
    return LeanTarget.from_folder(folder_of("llama", head_dim=32), torch.float32)


@pytest.fixture(scope="module")
def drafters(target, folder_of):
    """By name, as functions: a model that is right, one that is mostly wrong, and heads that guess."""
    models = {seed: LeanTarget.from_folder(folder_of("llama", seed, head_dim=32), torch.float32) for seed in (0, 1)}
    found = {
        "itself": lambda: CausalLMDrafter(models[0], VOCAB),
        "causal-lm": lambda: CausalLMDrafter(models[1], VOCAB),
    }
    shape = ModelConfig.from_hf(read_config(folder_of("llama", head_dim=32)))
    for version in (1, 3):
        torch.manual_seed(version)
        net = EagleNet(EagleConfig.for_target(version, shape), target.embedding, target.head).prepack(fast=True)
        found[f"eagle{version}"] = lambda net=net: EagleDrafter(net, target)
    return found


def run(target, drafter, budget=None, temperatures=(0.0,), *, planner=None, interrupts=(), **more):
    """All steps of texts that are decoded together, and the texts."""
    decoder, texts, steps = Decoder(target, drafter, budget=budget, planner=planner), {}, []
    for place, temperature in enumerate(temperatures):
        own = Sampling(temperature=temperature, seed=place, max_tokens=END + place, ignore_eos=True, **more)
        texts[decoder.admit(PROMPTS[place], own)] = []
    while decoder.num_running:
        try:
            steps.append(decoder.step())
        except interrupts:
            continue
        for row in steps[-1].rows:
            texts[row.request_id] += row.token_ids
    return steps, [*texts.values()]


def calls(monkeypatch, holder, name):
    """Grows by one whenever that is called."""
    found, asked = [], getattr(holder, name)
    monkeypatch.setattr(holder, name, lambda *given: (found.append(1), asked(*given))[1])
    return found


def told_of(step):
    """What a step says, whatever its seconds."""
    tree, accepted = step.tree, step.accepted
    numbers = tree.tokens, tree.parents, tree.node_probs, tree.confidence, accepted.path, accepted.num, accepted.bonus
    return (
        [None if each is None else each.tolist() for each in numbers],
        tree.num_draft_forwards,
        tree.is_line,
        step.rows,
    )


NAMES, TEMPERATURES = ("itself", "causal-lm", "eagle1", "eagle3"), ((0.0,), (1.0,), (0.0, 1.0, 0.5))


@pytest.mark.parametrize(
    ("name", "budget", "temperatures"), cover({"name": NAMES, "budget": BUDGETS, "at": TEMPERATURES}, PAIRS), ids=str
)
def test_it_is_the_same_step(name, budget, temperatures, target, drafters, monkeypatch):
    kernel = get_kernel()
    with monkeypatch.context() as watched:
        drafts, forwards = calls(watched, kernel, "draft"), calls(watched, kernel, "verify")
        steps, texts = run(target, drafters[name], BUDGETS[budget], temperatures)
    # Not so near the end of a text, where a tree may yet be cut: it is a little deeper than can be emitted.
    assert len(forwards) < (len(steps) / 2 if budget != "beyond the end" else len(steps) + 1)
    assert len(drafts) > len(steps) / 2
    monkeypatch.setattr(KernelRunner, "fused_step", lambda *_: None)
    forwards = calls(monkeypatch, kernel, "verify")
    apart, texts_apart = run(target, drafters[name], BUDGETS[budget], temperatures)
    assert len(forwards) == len(apart)
    assert texts == texts_apart == run(target, None, None, temperatures)[1]
    assert [*map(told_of, steps)] == [*map(told_of, apart)]
    if name == "itself" and temperatures == (0.0,):
        assert max(row.num_accepted for step in steps for row in step.rows) >= 3


@pytest.mark.parametrize("temperatures", [(0.0,), (1.0, 0.0, 1.0)], ids=str)
@pytest.mark.parametrize("name", ["itself", "eagle3"])
def test_a_planner_may_decide(name, temperatures, target, drafters, monkeypatch):
    stood = calls(monkeypatch, KernelRunner, "fused_step")
    planner = Planner(COSTS, Budget(6, 4, 20))
    steps, texts = run(target, drafters[name], None, temperatures, planner=planner, logprobs=2)
    plain, plain_texts = run(target, None, None, temperatures, logprobs=2)
    assert texts == plain_texts
    for place in range(len(temperatures)):  # what is said of the tokens is read from the logits of their nodes
        said = [
            [row.logprobs for each in found for row in each.rows if row.request_id == place] for found in (steps, plain)
        ]
        assert [one for some in said[0] for one in some] == [one for some in said[1] for one in some]
    assert stood
    assert any(step.tree.num_nodes > 1 for step in steps)


@pytest.mark.parametrize("temperatures", [(0.0,), (1.0, 0.0, 1.0)], ids=str)
def test_what_a_head_reads_next_is_that_of_the_nodes_that_were_kept(temperatures, target, drafters, monkeypatch):
    """Of trees that have fewer nodes than they might: wrong features would change no text, but the next trees."""
    rule = Planner(COSTS, Budget(6, 4, 20)).rule(len(temperatures))
    budget = Budget(6, 4, 20, rule=rule)
    steps, _ = run(target, drafters["eagle3"], budget, temperatures)
    assert len({step.tree.num_nodes for step in steps}) > 2
    monkeypatch.setattr(KernelRunner, "fused_step", lambda *_: None)
    apart, _ = run(target, drafters["eagle3"], budget, temperatures)
    assert [*map(told_of, steps)] == [*map(told_of, apart)]


@pytest.mark.parametrize(
    "own",
    [{"min_tokens": 5}, {"repetition_penalty": 1.5}, {"logit_bias": {7: 3.0}}, {"speculation": Budget(2)}],
    ids=str,
)
def test_where_something_is_made_of_trees_or_logits_it_does_not_go_on(own, target, drafters, monkeypatch):
    stood = calls(monkeypatch, KernelRunner, "fused_step")

    def text(drafter):
        own_budget = {"speculation": own["speculation"]} if "speculation" in own else {}
        sampling = Sampling(max_tokens=END, ignore_eos=True, **({} if own_budget else own))
        decoder, found = Decoder(target, drafter, budget=Budget(4, 2, 6)), []
        decoder.start(Request(0, PROMPTS[0], sampling, **own_budget))
        while decoder.num_running:
            found += decoder.step().rows[0].token_ids
        return found

    assert text(drafters["itself"]) == text(None)
    assert not stood


def test_classic_rules_do_not_go_on(target, drafters, monkeypatch):
    stood = calls(monkeypatch, KernelRunner, "fused_step")
    decoder = Decoder(target, drafters["causal-lm"], "speculative", Budget(3))
    decoder.admit(PROMPTS[0], Sampling(temperature=1.0, seed=0, max_tokens=END, ignore_eos=True))
    while decoder.num_running:
        decoder.step()
    assert not stood


def test_trees_that_are_not_the_ones_that_were_verified_are_verified(target, drafters, monkeypatch):
    """A drafter may propose other trees than its runner drafted: those are verified."""

    class Other(CausalLMDrafter):
        def receive(self, ctx, drafted):
            tree = super().receive(ctx, drafted)
            if tree.num_nodes == 1:
                return tree
            return replace(tree, tokens=torch.cat([tree.tokens[:, :1], (tree.tokens[:, 1:] + 1) % VOCAB], 1))

    model = drafters["itself"]().model
    forwards = calls(monkeypatch, get_kernel(), "verify")
    steps, texts = run(target, lambda: Other(model, VOCAB), Budget(4))
    assert len(forwards) >= len(steps) - 1  # lone roots at the end are verified in the call that drafts them
    assert sum(row.num_accepted for step in steps for row in step.rows) < len(steps)
    assert texts == run(target, None)[1]


@pytest.mark.parametrize("where", ["propose", "observe"])
@pytest.mark.parametrize("temperatures", [(0.0,), (1.0, 0.0)], ids=str)
def test_a_drafter_that_fails_afterwards_loses_nothing(where, temperatures, target, drafters):
    made, steps_to_failure = [], 3

    class Failing(CausalLMDrafter):
        def propose(self, ctx, sampling, budget):
            tree = super().propose(ctx, sampling, budget)
            self._count("propose")
            return tree

        def observe(self, ctx, tree, accepted, output):
            super().observe(ctx, tree, accepted, output)
            self._count("observe")

        def _count(self, at):
            made.append(at)
            if at == where and made.count(at) == steps_to_failure:
                raise RuntimeError("out of ideas")

    model = drafters["itself"]().model
    _, texts = run(target, lambda: Failing(model, VOCAB), Budget(4), temperatures)
    assert made.count(where) > steps_to_failure
    assert texts == run(target, None, None, temperatures)[1]


@pytest.mark.parametrize("temperatures", [(0.0,), (1.0, 0.0)], ids=str)
@pytest.mark.parametrize("name", ["itself", "eagle3"])
def test_an_interrupt_behind_the_call_loses_nothing(name, temperatures, target, drafters, monkeypatch):
    read, turns = FusedStep.read, []

    def interrupted(self, tree):
        turns.append(1)
        if len(turns) % 3 == 0:
            raise KeyboardInterrupt
        return read(self, tree)

    monkeypatch.setattr(FusedStep, "read", interrupted)
    _, texts = run(target, drafters[name], Budget(3, 2, 5), temperatures, interrupts=KeyboardInterrupt)
    assert len(turns) > 6
    assert texts == run(target, None, None, temperatures)[1]


def test_the_seconds_of_the_verification_are_its_own(target, drafters, monkeypatch):
    read, told = FusedStep.read, []

    def took_long(self, tree):
        found = read(self, tree)
        told.append(found.seconds)
        return replace(found, seconds=found.seconds + 1000)

    monkeypatch.setattr(FusedStep, "read", took_long)
    steps, _ = run(target, drafters["itself"], Budget(4))
    assert all(0 < seconds < 100 for seconds in told)
    fused = [step.timings for step in steps if step.tree.num_nodes > 1]
    assert len(fused) == len(told)
    assert all(each.verify > 1000 and each.draft < -900 and abs(each.total) < 100 for each in fused)


@pytest.mark.parametrize("temperatures", [(0.0,), (1.0, 0.0, 0.7)], ids=str)
@pytest.mark.parametrize("name", ["causal-lm", "eagle3"])
def test_paged_slots_take_one_call_too(name, temperatures, target, drafters, monkeypatch):
    def texts(*, paged):
        make, budget = drafters[name], Budget(3, 3, 8)
        if paged:
            engine = Engine(Decoder(target, make, budget=budget, kv_memory=1 << 24, max_batch=3), max_batch=3)
        else:
            engine = Engine(Decoder(target, make, budget=budget), max_batch=3)
        requests = [
            engine.submit(PROMPTS[row], Sampling(temperature=t, seed=row, max_tokens=END, ignore_eos=True))
            for row, t in enumerate(temperatures)
        ]
        engine.run()
        return [request.token_ids for request in requests]

    with monkeypatch.context() as watched:
        prepared, forwards = calls(watched, KernelRunner, "fused_step"), calls(watched, get_kernel(), "verify")
        found = texts(paged=True)
        assert len(prepared) > 2 * len(forwards)
    assert found == texts(paged=False)
    monkeypatch.setattr(PageTable, "num_missing", lambda *_: 1 << 30)  # no pages for the widest tree
    forwards = calls(monkeypatch, get_kernel(), "verify")
    assert texts(paged=True) == found
    assert len(forwards) > 5
