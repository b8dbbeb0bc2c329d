"""A drafter as a user would write it: a table of the tokens that followed each token."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
import torch

from conftest import add_tokenizer, refused
from draftwing.budget.acceptance import Acceptance
from draftwing.errors import ConfigError
from draftwing.lab.compare import compare
from draftwing.lm import LM
from draftwing.loading import load
from draftwing.methods.base import Budget, Drafter
from draftwing.methods.lookup import LookupDrafter
from draftwing.models.context import Context, Row
from draftwing.runtime.tree_builder import UNKNOWN_PROB, prune_by_rule
from draftwing.sampling import Sampling
from draftwing.tree import PAD, DraftTree, GrowthRule

PROMPTS = ["def add(a, b):\n    return a", "for row in rows: print(row)", "class Table:"]


class Bigrams(Drafter):
    """Drafts the two most frequent successors of each token."""

    name = "bigrams"
    costs_forwards = False
    identity = "of my own texts"

    def __init__(self, table: dict[int, list[int]]) -> None:
        self.table = table

    def propose(self, ctx, sampling, budget):
        tokens, parents = [], []
        for row in ctx.rows:
            own, above, level = [row.tokens[-1]], [-1], [0]
            for _ in range(budget.depth):
                level = [(node, child) for node in level for child in self.table.get(own[node], [])[: budget.width]]
                level = level[: budget.width]
                level = [own.append(child) or above.append(node) or len(own) - 1 for node, child in level]
            tokens.append(own)
            parents.append(above)
        return DraftTree.from_lists(tokens, parents, ctx.device)


@pytest.fixture(scope="module")
def lm(folder_of) -> LM:
    return load(add_tokenizer(folder_of("llama", vocab_size=300)), "none", dtype="float64")


@pytest.fixture(scope="module")
def table(lm) -> dict[int, list[int]]:
    """Made of the target's own greedy texts, so that it is right now and then."""
    followed = defaultdict(Counter)
    for result in lm.generate(PROMPTS, max_tokens=40, ignore_eos=True):
        ids = result.prompt_ids + result.token_ids
        for first, second in pairwise(ids):
            followed[first][second] += 1
    return {token: [each for each, _ in found.most_common(2)] for token, found in followed.items()}


@pytest.mark.parametrize("budget", [None, Budget(3), Budget(4, 2)], ids=str)
def test_its_texts_are_plain_decodings(budget, lm, table):
    own = LM(lm.target, lm.tokenizer, lambda: Bigrams(table), budget=budget)
    sampling = [Sampling(temperature, max_tokens=40, seed=5, ignore_eos=True) for temperature in (0, 1, 0)]
    wanted, found = (each.generate(PROMPTS, sampling) for each in (lm, own))
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    if budget is not None:
        assert all(each.tau > 1.5 for each in found[::2])
        assert found[0].stats.alpha[0] > 0.5


def test_it_is_compared_and_described(lm, table):
    own = LM(lm.target, lm.tokenizer, lambda: Bigrams(table))
    assert own.is_auto
    found = compare([lm, own], PROMPTS[:2], Sampling(max_tokens=20, ignore_eos=True))
    assert [method.name for method in found.methods] == ["none", "bigrams"]
    assert found.all_identical
    assert found.settings["budgets"] == {"bigrams": "auto"}
    assert json.dumps(found.to_dict())
    own = LM(lm.target, lm.tokenizer, lambda: Bigrams(table), "multi-round", Budget(3))
    with refused(ConfigError, "the drafter gives none"):
        own.generate(PROMPTS[:1], max_tokens=20, ignore_eos=True)


# --- what is cut of such trees ---------------------------------------------------------------------------------------


def rule_of(seed: int, most: int = 20) -> GrowthRule:
    rng = np.random.default_rng(seed)
    knots, rates = (np.sort(rng.random((3, 5)), axis=1).astype(np.float32) for _ in range(2))
    verify = np.cumsum(rng.random(most + 3) * rng.choice([0.02, 0.2, 0.5])).astype(np.float32)
    ones = np.ones(8, np.float32)
    return GrowthRule(knots, rates, ones, ones, verify, float(2 * rng.random()), 0.1)


def random_tree(rng: np.random.Generator, rows: int, told: bool) -> DraftTree:
    sizes = rng.integers(1, 12, rows)
    tokens = [[int(token) for token in rng.integers(0, 50, size)] for size in sizes]
    parents = [[-1, *(int(rng.integers(0, node)) for node in range(1, size))] for size in sizes]
    tree = DraftTree.from_lists(tokens, parents)
    probs = torch.from_numpy(rng.random(tree.tokens.shape).astype(np.float32)) if told else None
    return DraftTree(tree.tokens, tree.parents, node_probs=probs)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_kept_has_the_greatest_gain(rows, told):
    """By explicit search over how many nodes of each row are kept."""
    rng, sizes = np.random.default_rng(rows), []
    for seed in range(60):
        rule, tree = rule_of(seed), random_tree(rng, rows, told)
        reached = np.zeros(tree.tokens.shape)
        reached[:, 0] = 1
        for row in range(rows):
            for node in range(1, int(tree.valid[row].sum())):
                depth, above = int(tree.depths[row, node]), int(tree.parents[row, node])
                said = float(tree.node_probs[row, node]) if told else UNKNOWN_PROB
                place = min(depth, 3) - 1
                reached[row, node] = reached[row, above] * np.interp(said, rule.knots[place], rule.rates[place])
        ranked = -np.sort(-reached[:, 1:], axis=1)
        nets = [ranked[:, :count].sum() * rule.worth - rule.verify[count + 1] for count in range(ranked.shape[1] + 1)]
        count = int(np.argmax(nets))
        kept = prune_by_rule(tree, rule)
        kept.check()
        for row in range(rows):
            wanted = sorted(value for value in ranked[row, :count] if value > 0)
            found = kept.confidence[row, 1:][kept.valid[row, 1:]] if kept.num_nodes > 1 else torch.zeros(0)
            assert sorted(found.tolist()) == pytest.approx(wanted, rel=1e-5)
            assert set(kept.tokens[row].tolist()) <= {PAD, *tree.tokens[row].tolist()}
        assert kept.max_depth == int(kept.depths.max())
        assert kept.num_draft_forwards == (tree.max_depth if tree.num_nodes > 1 else 0)
        sizes.append((kept.num_nodes == 1, kept.num_nodes == tree.num_nodes))
    assert {(True, False), (False, False), (False, True)} <= set(sizes)  # none, some and all are kept


def test_a_longer_match_is_told_to_be_likelier():
    drafter, tokens = LookupDrafter(50, 2), [*range(9), *range(9), 20, 3, 4, 30, 20, 3, 4]
    ctx = Context(torch.device("cpu"), [Row(tokens, len(tokens) - 1, 1)])
    drafter.admit(ctx, None)
    tree = drafter.propose(ctx, None, Budget(4, 3))
    tree.check(50)
    told = tree.node_probs[0].tolist()
    assert tree.tokens[0].tolist() == [4, 30, 20, 3, 4, 5, 6, 7, 8]
    # Three tokens match what 30 follows, so that it is right at 3 in 4, and ever likelier from there; two match 5.
    assert told[1:5] == pytest.approx([3 / 4, 4 / 5, 5 / 6, 6 / 7])
    assert told[5] < told[1]
    assert told[6:] == pytest.approx([3 / 4, 4 / 5, 5 / 6])
    assert tree.depth == 4
    chain = drafter.propose(ctx, None, Budget(4))
    assert (chain.is_line, chain.node_probs[0].tolist()) == (True, pytest.approx(told[:5]))
    # What is told is calibrated like any other drafter's chances.
    acceptance = Acceptance()
    assert acceptance(np.array(told[1:]), 1) == pytest.approx(told[1:])
