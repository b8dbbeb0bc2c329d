"""Drafts that the CPU kernel grows in one call: those of ``TreeBuilder``, and those of a rule by explicit search."""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from unittest import mock

import numpy as np
import pytest
import torch

from conftest import kernel_size, refused
from draftwing.cpu.library import get_kernel
from draftwing.cpu.noise import noise_of
from draftwing.cpu.runner import KernelRunner
from draftwing.decode import Decoder
from draftwing.errors import ConfigError, UnsupportedError
from draftwing.methods.base import Budget
from draftwing.methods.calibration import NUM_COMPARED, Calibration
from draftwing.methods.causal_lm import CausalLMDrafter
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.methods.net_drafter import EagleDrafter, PendingFeatures
from draftwing.models.config import ModelConfig, read_config
from draftwing.models.lean import LeanTarget
from draftwing.models.target import Target
from draftwing.runtime.forward import Entries, Runner
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.tree import PAD, DraftTree, GrowthRule
from pairwise import pairs

pytestmark = pytest.mark.skipif(get_kernel() is None, reason="no C++ compiler here")

SHAPE = {"head_dim": 32, "num_hidden_layers": 4}
PROMPTS = ((4, 7, 7, 1, 30), (9, 2), (3, 8, 2, 5, 8, 0, 11, 40))
DRAFTERS = ("eagle1", "eagle3", "eagle3-few-tokens", "eagle3.1", "lm")
SAMPLINGS = {
    "greedy": [Sampling(seed=b) for b in range(3)],
    "t1": [Sampling(temperature=1.0, seed=b) for b in range(3)],
    "mixed": [Sampling(seed=1), Sampling(temperature=0.6, seed=2), Sampling(temperature=1.3, seed=3)],
    "top-k": [Sampling(temperature=1.0, top_k=k, seed=k) for k in (1, 5, 500)],
    "top-p": [Sampling(temperature=1.5, top_p=p, seed=3) for p in (0.1, 0.7, 0.95)],
    "min-p": [Sampling(temperature=1.0, min_p=p, seed=3) for p in (0.9, 0.2, 0.01)],
    "biases": [
        Sampling(logit_bias={7: 3.0, 40: -2.5}),
        Sampling(temperature=0.9, logit_bias={8: 1.5, 9: 2.0, 11: 1.0}, banned_tokens=(9, 30), seed=2),
        Sampling(temperature=1.0, seed=3),
    ],
    "penalties": [
        Sampling(repetition_penalty=1.7, frequency_penalty=-0.6),
        Sampling(temperature=0.8, presence_penalty=0.7, frequency_penalty=0.9, logit_bias={7: 2.0}, seed=2),
        Sampling(temperature=1.0, top_p=0.9, repetition_penalty=0.6, presence_penalty=-0.5, seed=3),
    ],
    "all-filters": [Sampling(temperature=0.8, top_k=k, top_p=0.9, min_p=0.05, seed=k) for k in (3, 20, 60)],
}


@pytest.fixture(scope="module")
def target(folder_of) -> LeanTarget:
    return LeanTarget.from_folder(folder_of("llama", **SHAPE))


def drafter_for(name: str, target: LeanTarget, folder_of):
    """A new drafter; its net is made once."""
    net = net_for(name, target, folder_of)
    return CausalLMDrafter(net, target.vocab_size) if name == "lm" else EagleDrafter(net, target)


@cache
def net_for(name: str, target: LeanTarget, folder_of):
    if name == "lm":
        return LeanTarget.from_folder(folder_of("llama", **SHAPE))
    changes = {"eagle3-few-tokens": {"draft_vocab_size": 40}, "eagle3.1": {"fc_norm": True, "norm_output": True}}
    torch.manual_seed(5)
    config = EagleConfig.for_target(
        3 if "3" in name else 1, target.config, calibration=Calibration(scale=1.25), **changes.get(name, {})
    )
    ids = None
    if config.has_draft_vocab:
        ids = torch.randperm(target.vocab_size)[: config.draft_vocab_size].sort().values
    net = EagleNet(config, target.embedding, target.head, ids)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return net.prepack()


def started(drafter, target, requests, steps=2) -> tuple[Decoder, SamplingBatch]:
    """A few steps on, so that entries are waiting, and not as many in every row."""
    decoder = Decoder(target, drafter, budget=Budget(3))
    for prompt, request in zip(PROMPTS, requests, strict=True):
        decoder.admit(prompt, replace(request, max_tokens=50, ignore_eos=True))
    for _ in range(steps):
        decoder.step()
    return decoder, SamplingBatch(requests, noise_of(target.vocab_size, target.device))


def trees(name, target, folder_of, kind, budget, at_once) -> DraftTree:
    drafter = drafter_for(name, target, folder_of)
    decoder, sampling = started(drafter, target, SAMPLINGS[kind])
    with nullcontext() if at_once else mock.patch.object(KernelRunner, "draft", Runner.draft):
        return drafter.propose(decoder.ctx, sampling, budget)


def same(found: DraftTree, wanted: DraftTree) -> None:
    """Assert that both have the same nodes with the same parents, in any order."""
    for row in range(found.num_rows):
        assert paths(found, row) == paths(wanted, row)


def paths(tree: DraftTree, row: int) -> set[tuple[int, ...]]:
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    known = {0: (tokens[0],)}
    for node in range(1, len(tokens)):
        if tokens[node] != PAD:
            known[node] = (*known[parents[node]], tokens[node])
    return set(known.values())


FIXED = {str(each): each for each in (Budget(1), Budget(5), Budget(4, 4, 9), Budget(3, 10, 40), Budget(2, 3, 500))}


@pytest.mark.parametrize(
    ("name", "kind", "budget"), pairs({"name": DRAFTERS, "kind": tuple(SAMPLINGS), "budget": tuple(FIXED)})
)
def test_a_fixed_tree_is_that_of_growing_level_by_level(name, kind, budget, target, folder_of):
    found = trees(name, target, folder_of, kind, FIXED[budget], True)
    found.check(target.vocab_size)
    wanted = trees(name, target, folder_of, kind, FIXED[budget], False)
    same(found, wanted)
    used = zip(found.parents.tolist(), (found.tokens != PAD).sum(1).tolist(), strict=True)
    assert found.is_line == all(parents[:num] == list(range(-1, num - 1)) for parents, num in used)
    assert found.max_depth == wanted.depths.max()


# --- by what nodes are worth -----------------------------------------------------------------------------------------


def rule_of(seed: int, depth: int, most: int) -> GrowthRule:
    rng = np.random.default_rng(seed)
    knots = np.sort(rng.random((2, 6)), axis=1).astype(np.float32)
    rates = np.sort(rng.random((2, 6)), axis=1).astype(np.float32)
    verify = np.cumsum(rng.random(most + 3) * rng.choice([0.02, 0.2])).astype(np.float32)
    gains, costs = rng.random(depth).astype(np.float32), (0.3 * rng.random(depth)).astype(np.float32)
    return GrowthRule(knots, rates, gains, costs, verify, float(rng.random() * 2), float(rng.choice([0.05, 0.5])))


def free(depth: int, most: int) -> GrowthRule:
    """Nothing costs anything, and the net is believed."""
    line = np.array([[0.0, 1.0]], np.float32)
    return GrowthRule(line, line, np.full(depth, 1.0, np.float32), np.zeros(depth, np.float32),
                      np.zeros(most + 3, np.float32), 1.0, 0.0)  # fmt: skip


class Search:
    """The same decisions, node by node, with a drafter's own steps."""

    def __init__(self, drafter: EagleDrafter, decoder: Decoder, sampling: SamplingBatch, budget: Budget, rule) -> None:
        self.drafter, self.ctx, self.sampling, self.budget, self.rule = drafter, decoder.ctx, sampling, budget, rule
        self.rows = range(self.ctx.num_rows)
        self.nodes = [
            [{"token": row.tokens[row.length], "parent": -1, "reached": 1.0, "place": 0}] for row in self.ctx.rows
        ]

    def children(self, row: int, level: int, logits: torch.Tensor, above: int) -> list[dict]:
        request = self.sampling.rows[row]
        scores = logits.double()
        if request.temperature > 0:
            noise = self.sampling.noise.at(request.seed, self.ctx.rows[row].length + 1 + level)
            calibration: Calibration = self.drafter.net.config.calibration
            ranked = (logits / request.temperature * calibration.scale + noise).double()
            best = ranked.topk(NUM_COMPARED)
            told = (calibration.sharpness * best.values).softmax(-1) * (1 - calibration.miss)
            told, ids = told[: self.budget.width], best.indices[: self.budget.width]
        else:
            ids = scores.topk(self.budget.width).indices
            told = scores.softmax(-1)[ids]
        table = min(level, len(self.rule.knots) - 1)
        rates = np.interp(told.numpy(), self.rule.knots[table], self.rule.rates[table])
        return [
            {"token": int(token), "parent": above, "reached": self.nodes[row][above]["reached"] * rate, "place": -1}
            for token, rate in zip(ids.tolist(), rates.tolist(), strict=True)
        ]

    def ranked(self, row: int) -> list[int]:
        return sorted(range(1, len(self.nodes[row])), key=lambda node: -self.nodes[row][node]["reached"])

    def worth(self) -> int:
        most = min(self.budget.nodes, max(len(nodes) - 1 for nodes in self.nodes))
        nets, gain = [-float(self.rule.verify[1])], 0.0
        for count in range(1, most + 1):
            for row in self.rows:
                if count < len(self.nodes[row]):
                    gain += self.nodes[row][self.ranked(row)[count - 1]]["reached"]
            nets.append(gain * self.rule.worth - float(self.rule.verify[count + 1]))
        return int(np.argmax(nets))

    def widen(self, level: int, newest: list[int]) -> list[list[int]]:
        kept = self.worth()
        chosen = [
            [node for node in self.ranked(row)[:kept] if node >= newest[row]][: self.budget.width] for row in self.rows
        ]
        gain, cost, share = float(self.rule.gains[level]), float(self.rule.costs[level]), self.rule.share
        width, total = 0, 0.0
        while width < max(map(len, chosen)):
            reached = sum(
                self.nodes[row][chosen[row][width]]["reached"] for row in self.rows if width < len(chosen[row])
            )
            if width and not reached * gain > cost * share:
                break
            total, width = total + reached, width + 1
        more = float(self.rule.verify[kept + 2] - self.rule.verify[kept + 1])
        enough = width and total * gain > cost * (1 + (width - 1) * share) + more
        return [each[:width] for each in chosen] if enough else []

    def tree(self) -> DraftTree:
        waiting, runner = self.drafter.request(self.ctx, self.sampling, self.budget), self.drafter.runner
        width = waiting.num_entries
        chain = DraftTree.chain(torch.tensor([[*ids, *[PAD] * (width - len(ids))] for ids in waiting.tokens]))
        last = torch.tensor([len(ids) - 1 for ids in waiting.tokens])[:, None, None]
        states = runner.fuse(waiting.features[:, :width])
        logits, states = runner.forward(Entries(chain, waiting.lengths, states=states), last=last)
        frontier = [[0] for _ in self.rows]
        drafted = [[(nodes[0]["token"], -1)] for nodes in self.nodes]
        for level in range(self.budget.depth):
            newest = [len(nodes) for nodes in self.nodes]
            for row in self.rows:
                for entry, above in enumerate(frontier[row]):
                    self.nodes[row] += self.children(row, level, logits[row, entry], above)
            before, frontier = frontier, self.widen(level, newest)
            if level + 1 == self.budget.depth or not frontier:
                break
            width, first = max(map(len, frontier)), len(drafted[0])
            sources = torch.zeros(len(self.rows), width, dtype=torch.int64)
            for row in self.rows:
                for entry in range(width):
                    if entry >= len(frontier[row]):
                        drafted[row].append((PAD, -1))
                        continue
                    node = self.nodes[row][frontier[row][entry]]
                    node["place"] = len(drafted[row])
                    drafted[row].append((node["token"], self.nodes[row][node["parent"]]["place"]))
                    sources[row, entry] = before[row].index(node["parent"])
            tokens, parents = (torch.tensor([[each[part] for each in row] for row in drafted]) for part in (0, 1))
            states = states.gather(1, sources[:, :, None].expand(-1, -1, states.shape[2]))
            entries = Entries(DraftTree(tokens, parents), waiting.root_slots, 0, first, None, states)
            logits, states = runner.forward(entries)
        kept, tokens, parents = self.worth(), [], []
        for row in self.rows:
            order = [0, *sorted(self.ranked(row)[:kept])]
            tokens.append([self.nodes[row][node]["token"] for node in order])
            parents.append([order.index(self.nodes[row][node]["parent"]) if node else -1 for node in order])
        return DraftTree.from_lists(tokens, parents)


@pytest.mark.parametrize(
    ("seed", "name", "kind"),
    pairs({"seed": range(8), "name": ("eagle1", "eagle3"), "kind": ("greedy", "t1", "mixed")}),
)
def test_a_rule_is_followed_node_by_node(seed, name, kind, target, folder_of):
    rule, budget = rule_of(seed, 6, 12), Budget(6, 3, 12)
    drafter = drafter_for(name, target, folder_of)
    decoder, sampling = started(drafter, target, SAMPLINGS[kind])
    found = drafter.propose(decoder.ctx, sampling, replace(budget, rule=rule))
    drafter = drafter_for(name, target, folder_of)
    decoder, sampling = started(drafter, target, SAMPLINGS[kind])
    same(found, Search(drafter, decoder, sampling, budget, rule).tree())
    assert found.node_probs.shape == found.confidence.shape == found.tokens.shape
    assert found.num_draft_forwards >= 1


GROWN = {str(each): each for each in (Budget(6, 3, 12), Budget(5), Budget(4, 5, 30))}


@pytest.mark.parametrize(
    ("name", "kind", "budget"),
    pairs({"name": ("eagle3", "eagle3-few-tokens", "lm"), "kind": tuple(SAMPLINGS), "budget": tuple(GROWN)}),
)
def test_in_torch_and_in_the_kernel_a_rule_grows_the_same_trees(name, kind, budget, target, folder_of):
    """Chains and trees, several rows, random rules; all that is said of the nodes too."""
    budget, grown = GROWN[budget], 0
    for seed in range(3):
        most = budget.nodes or budget.depth
        ruled = replace(budget, rule=rule_of(100 + seed, budget.depth, most))
        found, wanted = (trees(name, target, folder_of, kind, ruled, at_once) for at_once in (True, False))
        for part in ("tokens", "parents"):
            assert torch.equal(getattr(found, part), getattr(wanted, part)), (seed, part)
        used = found.valid
        for part in ("node_probs", "confidence"):
            assert getattr(found, part)[used].tolist() == pytest.approx(getattr(wanted, part)[used].tolist(), rel=1e-4)
        assert (found.is_line, found.depth) == (wanted.is_line, wanted.depth)
        assert found.num_draft_forwards == pytest.approx(wanted.num_draft_forwards)
        grown += found.num_nodes > 1
    assert grown


@pytest.mark.parametrize("rule", [None, rule_of(3, 6, 12)], ids=["fixed", "rule"])
@pytest.mark.parametrize("name", ["eagle3", "lm"])
def test_without_noise_the_likeliest_are_drafted(name, rule, target, folder_of):
    budget = Budget(6, 3, 12, children="top", rule=rule)
    found, wanted = (trees(name, target, folder_of, "mixed", budget, at_once) for at_once in (True, False))
    same(found, wanted)
    assert found.num_nodes > 1


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("name", DRAFTERS)
def test_rules_of_no_cost_and_of_no_worth(name, at_once, target, folder_of):
    """Without costs the whole tree grows, within the rule's tables; if no verification pays off, nothing is drafted."""
    found = trees(name, target, folder_of, "greedy", Budget(3, 3, 100, rule=free(3, 100)), at_once)
    same(found, trees(name, target, folder_of, "greedy", Budget(3, 3, 100), True))
    assert found.num_draft_forwards == 3
    found = trees(name, target, folder_of, "greedy", Budget(5, 3, 100, rule=free(2, 4)), at_once)
    assert found.num_nodes == 5
    assert found.max_depth <= 2
    rule = replace(free(3, 100), verify=np.arange(103, dtype=np.float32) * 10)
    found = trees(name, target, folder_of, "t1", Budget(3, 3, 100, rule=rule), at_once)
    assert (found.num_nodes, found.is_line) == (1, True)
    assert found.num_draft_forwards == 1  # the first level is drafted to know that


def test_a_draft_whose_step_never_ended_is_drafted_again(target, folder_of):
    drafter = drafter_for("eagle3", target, folder_of)
    decoder, sampling = started(drafter, target, SAMPLINGS["mixed"])
    found = [drafter.propose(decoder.ctx, sampling, Budget(4, 3, 9)) for _ in range(2)]
    same(*found)


def test_scores_that_are_no_numbers_end_a_draft(target, folder_of):
    """What is drafted may be anything; it must be a tree."""
    drafter = drafter_for("eagle3", target, folder_of)
    decoder, sampling = started(drafter, target, SAMPLINGS["mixed"])
    joined = PendingFeatures.joined
    with mock.patch.object(PendingFeatures, "joined", lambda *args: torch.full_like(joined(*args), math.nan)):
        for budget in (Budget(4, 3, 9), Budget(3), Budget(4, 3, 9, rule=free(4, 9))):
            drafter.propose(decoder.ctx, sampling, budget).check(target.vocab_size)


def test_usual_taps_need_layers_to_tap(folder_of):
    small = ModelConfig.from_hf(read_config(folder_of("llama", **{**SHAPE, "num_hidden_layers": 2})))
    with pytest.raises(ConfigError, match="3 layers or more, found 2: give taps"):
        EagleConfig.for_target(3, small)
    assert EagleConfig.for_target(3, small, taps=(0, 1, 2)).taps == (0, 1, 2)


def test_a_target_without_hidden_states_is_named(folder_of):
    """One of a user's own that leaves them out of its forwards."""
    target = LeanTarget.from_folder(folder_of("llama", **SHAPE))
    forward = target.forward
    target.forward = lambda ctx, tree, accept=None: replace(forward(ctx, tree, accept), features=None)
    target.propose = partial(Target.propose, target)  # draft and forward apart
    decoder = Decoder(target, drafter_for("eagle3", target, folder_of), budget=Budget(3))
    decoder.admit([4, 9, 30], Sampling(max_tokens=4))
    with refused(ConfigError, "the target's forward returned none", "TargetOutput.features"):
        decoder.step()


def test_a_recurrent_draft_model_drafts_in_the_kernel_only(folder_of):
    folder = folder_of("qwen3.5", **kernel_size("qwen3.5"))
    in_torch = LeanTarget.from_folder(folder, torch.float64)
    with refused(UnsupportedError, "has recurrent layers, which draft in the CPU kernel only", "lookup"):
        CausalLMDrafter(in_torch, in_torch.vocab_size)
    if get_kernel() is None:
        pytest.skip("no kernel")
    target, draft = (LeanTarget.from_folder(folder, torch.float32) for _ in range(2))
    for budget in (Budget(3), Budget(3, 3, 9)):
        texts, numbers = [], []
        for drafter in (None, CausalLMDrafter(draft, draft.vocab_size)):
            decoder = Decoder(target, drafter, budget=budget)
            for row in range(2):
                decoder.admit([3, 4, 5 + row], Sampling(temperature=1.0, max_tokens=13, seed=row, ignore_eos=True))
            rows = []
            while decoder.num_running:
                rows += decoder.step().rows
            texts.append([[token for row in rows if row.request_id == n for token in row.token_ids] for n in range(2)])
            numbers.append((sum(row.num_accepted for row in rows), sum(row.depth for row in rows)))
        assert texts[0] == texts[1]
        assert numbers[1][0] == numbers[1][1] > 0  # it is the target, and guesses all tokens
