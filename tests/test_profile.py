"""Measured costs are those of a scripted clock."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from conftest import build, refused
from draftwing import decode
from draftwing import measure as profile
from draftwing.budget import CONFIG
from draftwing.budget.costs import Costs
from draftwing.decode import Decoder
from draftwing.errors import ConfigError
from draftwing.methods.base import Budget, Drafter, NoDrafter
from draftwing.methods.causal_lm import CausalLMDrafter
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.methods.lookup import LookupDrafter
from draftwing.methods.net_drafter import EagleDrafter
from draftwing.models import target as targets
from draftwing.models.adapter import AdapterTarget
from draftwing.models.config import ModelConfig, read_config
from draftwing.models.lean import LeanTarget
from draftwing.sampling import Sampling

VOCAB = 80  # more than the most nodes that are measured
CHANGES = {"max_position_embeddings": 2400, "vocab_size": VOCAB, "head_dim": 32}  # runs in the CPU kernel
PROMPTS = ([4, 9, 9, 4, 9], [3])


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch):
    """Those that users get; other tests measure fewer (conftest.py)."""
    monkeypatch.setattr(profile, "CONFIG", replace(CONFIG, seconds=0.05))


def measure(target, maker, rounds=2, **named) -> Costs:
    """Everything that is measured in this number of rounds, however long they take."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(profile, "CONFIG", replace(CONFIG, rounds=rounds))
        return profile.measure(target, maker, math.inf, **named)


@pytest.fixture(scope="module")
def target(folder_of) -> LeanTarget:
    return LeanTarget.from_folder(folder_of("llama", **CHANGES), torch.float32, name="tiny")


def eagle(target: LeanTarget, folder) -> EagleDrafter:
    torch.manual_seed(0)
    config = EagleConfig.for_target(3, ModelConfig.from_hf(read_config(folder)))
    net = EagleNet(config, target.embedding, target.head, None, torch.float32).requires_grad_(False)
    return EagleDrafter(net, target, "tiny")


@pytest.fixture(scope="module")
def makers(target, folder_of):
    """A maker of each kind of drafter."""
    net = eagle(target, folder_of("llama", **CHANGES)).net
    return {
        "none": NoDrafter,
        "lookup": lambda: LookupDrafter(VOCAB),
        "eagle3": lambda: EagleDrafter(net, target, "tiny"),
        "causal-lm": lambda: CausalLMDrafter(target, VOCAB),
    }


class Script:
    """A clock that stands still but where the script moves it: by what a forward, or a draft, takes."""

    def __init__(self, monkeypatch, target, verify, draft=lambda budget, rows: 1e-3) -> None:
        self.now, self.forwards, self.draft = 0.0, [], draft
        for module in (decode, profile, targets):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now, time=time.time))
        real = target.forward

        def forward(ctx, tree, *rest, **named):
            self.now += verify(tree.num_nodes, ctx.num_rows, sum(ctx.lengths))
            self.forwards.append((ctx.num_rows, tree.num_nodes))
            return real(ctx, tree, *rest, **named)

        monkeypatch.setattr(target, "forward", forward)

    def drafter(self, name: str = "scripted") -> Drafter:
        """Drafts nothing, and takes its time for it."""
        script = self

        class Slow(Drafter):
            def propose(self, ctx, sampling, budget):
                script.now += script.draft(budget, ctx.num_rows)
                return super().propose(ctx, sampling, budget)

        slow = Slow()
        slow.name = name
        return slow


def knots(counts, seconds) -> tuple[tuple[float, float], ...]:
    return tuple((count, pytest.approx(seconds(count))) for count in counts)


# --- measuring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "lookup", "eagle3", "causal-lm"])
def test_curves_are_finite_and_rise(name, target, makers):
    costs = measure(target, makers[name])
    drafts = name in ("eagle3", "causal-lm")
    counts = [[count for count, _ in curve.knots] for curve in (costs.verify, costs.chain, costs.tree)]
    assert counts == [list(CONFIG.nodes), *[list(CONFIG.depths) if drafts else []] * 2]
    for curve in (costs.verify, costs.chain, costs.tree):
        seconds = [value for _, value in curve.knots]
        assert seconds == sorted(seconds)
        assert all(0 <= value < math.inf for value in seconds)
    assert costs.verify(1) > 0
    for number in (costs.per_token, costs.per_row, costs.draft_per_row):
        assert 0 <= number < math.inf
    assert costs.width == (CONFIG.tree.width if drafts else 1)
    assert costs.context == CONFIG.batches[0][1]


def test_measured_curves_are_the_clocks(target, monkeypatch):
    def draft(budget, rows):
        return (0.002 + 0.0005 * budget.depth * (1 + 0.5 * (budget.width > 1))) * (1 + 0.25 * (rows - 1))

    script = Script(monkeypatch, target, lambda nodes, rows, context: 0.01 + 0.001 * nodes * rows, draft)
    costs = measure(target, script.drafter)
    assert costs.verify.knots == knots(CONFIG.nodes, lambda nodes: 0.01 + 0.001 * nodes)
    assert costs.chain.knots == knots(CONFIG.depths, lambda depth: 0.002 + 0.0005 * depth)
    assert costs.tree.knots == knots(CONFIG.depths, lambda depth: 0.002 + 0.00075 * depth)
    assert costs.draft_per_row == pytest.approx(0.25)
    assert costs.per_row == pytest.approx(0, abs=1e-9)
    assert costs.per_token == pytest.approx(0, abs=1e-9)
    assert costs.level_seconds == pytest.approx(0.0005)


@pytest.mark.parametrize("step", [1e-4, 4e-3, 0.06, 0.3, 2.0])
@pytest.mark.parametrize("per_node", [0.0, 1.0])
def test_a_measurement_takes_no_longer_than_it_may(step, per_node, target, monkeypatch):
    """Steps of any length are only begun if they fit, but a forward and a draft; other sizes are extrapolated."""
    monkeypatch.setattr(profile, "CONFIG", replace(profile.CONFIG, rounds=6))
    script = Script(
        monkeypatch,
        target,
        lambda nodes, rows, context: step * (1 + per_node * (nodes * rows - 1)),
        lambda budget, rows: step / 5 * budget.depth * (1 + 0.1 * budget.width),
    )
    costs = profile.measure(target, script.drafter, 0.5)
    assert script.now <= max(0.5, 0.5 + 0.22 * step, 2.22 * step)
    assert costs.verify(1) == pytest.approx(step)
    assert costs.verify(64) >= 0.999 * step
    assert costs.chain(1) == pytest.approx(0.22 * step)
    assert costs.chain(4) > 0


def test_a_complete_measurement_ends_in_time(target, monkeypatch):
    script = Script(monkeypatch, target, lambda nodes, rows, context: 0.05)
    with monkeypatch.context() as patched:
        patched.setattr(profile, "CONFIG", CONFIG)
        profile.measure(target, script.drafter)
    assert CONFIG.seconds / 2 < script.now <= CONFIG.seconds


def test_the_first_round_does_not_count(target, monkeypatch):
    seen = set()

    def verify(nodes, rows, context):
        cold = (nodes, rows) not in seen
        seen.add((nodes, rows))
        return 0.02 if not cold else 0.001 * nodes

    costs = measure(target, Script(monkeypatch, target, verify).drafter)
    assert costs.verify.knots == knots(CONFIG.nodes, lambda nodes: 0.02)


def after_other_steps():
    """A step after another kind of step finds its weights driven from the caches, and takes five times as long."""
    state = {"drafted": False, "kind": ("plain", 1, False)}

    def draft(budget, rows):
        state["drafted"] = True
        return 1 if state["kind"] == ("drafts", rows, False) else 5

    def verify(nodes, rows, context):
        kind = ("drafts", rows, False) if state["drafted"] else ("plain", rows, context / rows > 200)
        is_cold, state["kind"], state["drafted"] = kind != state["kind"], kind, False
        return 5 if is_cold else 1

    return verify, draft


def held_up_half_of_the_time():
    """Half of all rounds are held up, of whatever part."""
    calls = Counter()

    def held_up(*part):
        calls[part] += 1
        return 1 + calls[part] // 2 % 2

    return held_up, lambda budget, rows: held_up("draft", budget.depth, budget.width, rows)


@pytest.mark.parametrize("disturbance", [after_other_steps, held_up_half_of_the_time])
def test_costs_are_those_of_a_quiet_machine(disturbance, target, monkeypatch):
    verify, draft = disturbance()
    script = Script(
        monkeypatch,
        target,
        lambda nodes, rows, context: (0.001 + 0.0001 * nodes * rows) * verify(nodes, rows, context),
        lambda budget, rows: 0.0002 * budget.depth * rows**0.5 * draft(budget, rows),
    )
    costs = measure(target, script.drafter, rounds=CONFIG.rounds)
    assert costs.verify.knots == knots(CONFIG.nodes, lambda nodes: 0.001 + 0.0001 * nodes)
    assert costs.chain.knots == knots(CONFIG.depths, lambda depth: 0.0002 * depth)
    assert script.forwards.count((1, 3)) == CONFIG.rounds
    assert costs.tree.knots == knots(CONFIG.depths, lambda depth: 0.0002 * depth)
    assert script.forwards.count((1, 64)) == CONFIG.rounds // 2 + 1
    assert costs.draft_per_row == pytest.approx(1 / 3)
    assert costs.per_row == pytest.approx(0, abs=1e-9)
    assert costs.per_token == pytest.approx(0, abs=1e-9)


def test_a_noisy_clock_gives_rising_curves(target, monkeypatch):
    """Odd sizes are said to take less than the even ones before them: the mean of both stands for both."""
    times = {1: 0.010, 2: 0.012, 3: 0.010, 4: 0.020, 6: 0.018}
    script = Script(monkeypatch, target, lambda nodes, rows, context: times.get(nodes, 0.03))
    found = measure(target, script.drafter).verify.knots
    assert [seconds for _, seconds in found[:5]] == pytest.approx([0.010, 0.011, 0.011, 0.019, 0.019])


def test_rows_context_and_nodes_are_told_apart(target, monkeypatch):
    """For any number of rows at any context the costs predict the clock: a row's tokens are not counted twice."""

    def verify(nodes, rows, context):
        return 0.01 + 0.0002 * nodes * rows + 0.003 * (rows - 1) + 2e-5 * context

    with monkeypatch.context() as patched:
        costs = measure(target, Script(patched, target, verify).drafter)
    assert costs.per_token == pytest.approx(2e-5)
    assert costs.per_row == pytest.approx(0.003)
    for nodes, rows, context in ((1, 1, 64), (4, 4, 64), (1, 4, 64), (8, 1, 2000), (2, 8, 500), (1, 1, 0)):
        predicted, scripted = costs.verify_seconds(nodes, rows, context), verify(nodes, rows, context * rows)
        assert predicted == pytest.approx(scripted), (nodes, rows, context)
    script = Script(monkeypatch, target, lambda nodes, rows, context: 0.01 + (1 + nodes) * 1e-6 * context)
    costs = measure(target, script.drafter)
    for nodes in (1, 4, 16):
        assert costs.token_seconds(nodes) == pytest.approx((1 + nodes) * 1e-6)
    assert costs.verify_seconds(4, 1, 900) == pytest.approx(0.01 + 5e-6 * 900)


def test_a_draft_that_looks_at_its_text_is_measured_with_as_much_of_it(target, monkeypatch):
    """Where drafts say with how long a text they take what they take with any longer one."""
    contexts = []

    class Looks(Drafter):
        context = 200

        def propose(self, ctx, sampling, budget):
            contexts.append((len(ctx.rows), *{row.length for row in ctx.rows}))
            return super().propose(ctx, sampling, budget)

    measure(target, Looks)
    assert {rows for rows, _ in contexts} == {1, CONFIG.batches[1][0]}
    assert min(length for _, length in contexts) == min(200, target.max_length // 2)


def test_a_target_of_short_texts_is_measured(folder_of, monkeypatch):
    """All rounds together decode far more than a text may hold: no row may run to its end, or grow meanwhile."""
    short = LeanTarget.from_folder(folder_of("llama", max_position_embeddings=40), torch.float32)
    script = Script(monkeypatch, short, lambda nodes, rows, context: 0.01 + 1e-4 * context)
    costs = measure(short, script.drafter)
    assert costs.context == 10
    assert [count for count, _ in costs.verify.knots] == [1, 2, 3, 4, 6, 8]
    assert costs.per_token == pytest.approx(0.0001)


def test_a_target_without_room_is_refused(folder_of, monkeypatch):
    tiny = LeanTarget.from_folder(folder_of("llama", max_position_embeddings=12), torch.float32, name="tiny")
    with refused(ConfigError, "tiny has a context of 12 tokens"):
        measure(tiny, NoDrafter)
    least = LeanTarget.from_folder(folder_of("llama", max_position_embeddings=16), torch.float32)
    Script(monkeypatch, least, lambda nodes, rows, context: 0.01)
    assert [count for count, _ in measure(least, NoDrafter).verify.knots] == [1, 2, 3, 4]


def test_a_target_of_transformers_is_measured(monkeypatch):
    """Its cache cannot be stretched, so that nothing is known of a token's cost."""
    other = AdapterTarget(build("gpt2", vocab_size=VOCAB))
    script = Script(monkeypatch, other, lambda nodes, rows, context: 0.1 + 0.01 * nodes * rows + 0.02 * (rows - 1))
    costs = measure(other, script.drafter)
    assert costs.verify.knots == knots(CONFIG.nodes, lambda nodes: 0.1 + 0.01 * nodes)
    assert costs.per_row == pytest.approx(0.02)
    assert costs.per_token == 0.0


def decoded(target, maker) -> list[list[int]]:
    decoder = Decoder(target, maker(), budget=Budget(3))
    for seed, prompt in enumerate(PROMPTS):
        decoder.admit(prompt, Sampling(max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True))
    texts: dict[int, list[int]] = {}
    while decoder.num_running:
        for row in decoder.step().rows:
            texts.setdefault(row.request_id, []).extend(row.token_ids)
    return [texts[number] for number in sorted(texts)]


@pytest.mark.parametrize("name", ["lookup", "eagle3", "causal-lm"])
def test_measuring_changes_no_text(name, target, makers):
    before, state = decoded(target, makers[name]), torch.get_rng_state()
    costs = measure(target, makers[name])
    assert costs.verify.knots
    assert torch.equal(torch.get_rng_state(), state)
    assert decoded(target, makers[name]) == before
    assert torch.get_num_threads() == 1
