"""Prompt lookup: what it proposes when rows come and go, and the law that it hands to the classic rules."""

from __future__ import annotations

import pytest
import torch

from draftwing.drafters.base import Budget
from draftwing.drafters.lookup import LookupDrafter
from draftwing.model.target import Context, Row
from draftwing.noise import KeyedNoise
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.tree import PAD, DraftTree

VOCAB = 20
TEXTS = ([1, 2, 3, 4, 1, 2], [5, 6, 7, 8, 9, 5, 6, 7], [1, 2, 9, 1, 2, 8, 1, 2], [3, 3, 3], [4])


def context(texts: list[list[int]]) -> Context:
    return Context(torch.device("cpu"), [Row(list(text), len(text) - 1, 1) for text in texts])


def propose(drafter: LookupDrafter, ctx: Context, budget: Budget) -> DraftTree:
    sampling = SamplingBatch([Sampling()] * len(ctx.rows), KeyedNoise(VOCAB))
    return drafter.propose(ctx, sampling, budget)


def fresh(texts: list[list[int]], budget: Budget) -> DraftTree:
    drafter, ctx = LookupDrafter(VOCAB), context(texts)
    for _ in texts:
        drafter.admit(ctx, None)
    return propose(drafter, ctx, budget)


def test_what_followed_before_is_proposed():
    tree = fresh(list(map(list, TEXTS)), Budget(3))
    assert tree.tokens.tolist() == [[2, 3, 4, 1], [7, 8, 9, 5], [2, 8, 1, 2], [3, 3, PAD, PAD], [4, PAD, PAD, PAD]]
    both = fresh([list(TEXTS[2])], Budget(2, 2))
    assert (both.tokens.tolist(), both.parents.tolist()) == ([[2, 8, 1, 9, 1]], [[-1, 0, 1, 0, 3]])


@pytest.mark.parametrize("leaving", range(5))
def test_a_row_that_leaves_takes_nothing_along(leaving):
    """The last row comes into its place; both then go on as a drafter that has never seen the one that left."""
    drafter, ctx = LookupDrafter(VOCAB), context(list(map(list, TEXTS)))
    for _ in TEXTS:
        drafter.admit(ctx, None)
    propose(drafter, ctx, Budget(3))
    drafter.remove(ctx, leaving)
    ctx.rows[leaving] = ctx.rows[-1]
    ctx.rows.pop()
    for row in ctx.rows:
        row.tokens += row.tokens[:3] * 3
    ctx.rows.append(Row([7, 7, 2, 7, 7], 4, 1))
    drafter.admit(ctx, None)
    wanted = fresh([row.tokens for row in ctx.rows], Budget(3, 2))
    found = propose(drafter, ctx, Budget(3, 2))
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert found.parents.tolist() == wanted.parents.tolist()


@pytest.mark.parametrize("children", ["sampled", "distinct"])
def test_its_law_is_certain_of_each_child(children):
    tree = fresh(list(map(list, TEXTS)), Budget(3, 2, children=children))
    assert tree.draft_probs is not None
    for tokens, probs in zip(tree.tokens.tolist(), tree.draft_probs.tolist(), strict=True):
        for node, child in enumerate(tokens[1:]):
            if child != PAD:
                assert probs[node] == [float(token == child) for token in range(VOCAB)]
