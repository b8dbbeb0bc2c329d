"""Lookahead decoding: its pool and its window against slow references, and that what is only scored is never kept."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import add_tokenizer, build, refused
from draftwing.decode import Decoder
from draftwing.errors import ConfigError
from draftwing.lm import LM
from draftwing.loading import load
from draftwing.methods.base import Budget, Drafter
from draftwing.methods.lookahead import LookaheadDrafter, NGramPool
from draftwing.models.adapter import AdapterTarget
from draftwing.models.lean import LeanTarget
from draftwing.noise import KeyedNoise
from draftwing.runtime.tree_builder import prune_by_rule
from draftwing.sampling import Sampling
from draftwing.tree import PAD, DraftTree
from test_combined import rule_of

VOCAB = 61
PROMPTS = ([3, 4, 5, 6, 3, 4, 5, 6], [9], [8, 8, 8, 7, 8, 8, 8])


@pytest.fixture(scope="module")
def target(folder_of) -> LeanTarget:
    return LeanTarget.from_folder(folder_of("llama", initializer_range=0.15), torch.float64)


# --- the pool --------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 3), max_size=30), st.integers(1, 4))
def test_the_pool_holds_the_latest_that_begin_alike(ngrams, most):
    pool = NGramPool(most)
    for ngram in ngrams:
        pool.add(ngram)
    for token in range(3):
        latest: list[list[int]] = []
        for first, *rest in reversed(ngrams):
            if first == token and rest not in latest:
                latest.append(rest)
        assert pool.after(token) == latest[:most]


# --- the window ------------------------------------------------------------------------------------------------------


class Watched(LookaheadDrafter):
    """Keeps what every window was when it was scored, and what came of it."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(VOCAB, *sizes)
        self.seen: list[tuple] = []

    def propose(self, ctx, sampling, budget) -> DraftTree:
        tree = super().propose(ctx, sampling, budget)
        tree.check(VOCAB)  # in particular, no column hangs below one that is past the end of its request
        return tree

    def observe(self, ctx, tree, accepted, output) -> None:
        before = copy.deepcopy(self.windows)
        super().observe(ctx, tree, accepted, output)
        for row, old, new in zip(ctx.rows, before, copy.deepcopy(self.windows), strict=True):
            self.seen.append((row, row.tokens[: row.length + 1], tree.num_extra_nodes, old, new))


def said(target: LeanTarget, text: list[int], sampling: Sampling, num_prompt: int) -> int:
    """The token after a text, by one forward of all of it."""
    scores = target.score(torch.tensor([text])).logits[0, -1].clone()
    scores[sorted(set(text[num_prompt:]))] -= sampling.presence_penalty
    if sampling.temperature > 0:
        scores = scores / sampling.temperature + KeyedNoise(VOCAB).at(sampling.seed, len(text))
    return int(scores.argmax())


@pytest.mark.parametrize(("sizes", "penalty"), [((4, 3, 3), 1.5), ((4, 3, 3), 0.0), ((3, 5, 2), 1.5), ((2, 2, 2), 0.0)])
def test_each_column_is_continued_as_its_own_text_would_be(sizes, penalty, target):
    width, ngram, _ = sizes
    drafter = Watched(*sizes)
    decoder = Decoder(target, drafter, budget=Budget(4, 3))
    asked = {}
    for number, prompt in enumerate(PROMPTS[:2]):
        options = {"temperature": 0.7 * number, "seed": 4 + number, "presence_penalty": penalty}
        sampling = Sampling(max_tokens=16, ignore_eos=True, **options)
        decoder.admit(prompt, sampling)
        asked[id(decoder.ctx.rows[-1])] = sampling
    while decoder.num_running:
        decoder.step()
    last: dict[int, tuple] = {}
    full = 0
    for row, text, num_scored, old, new in drafter.seen:
        sampling, levels = asked[id(row)], old.levels
        if not num_scored:  # only one token was left to write
            continue
        assert old.start == len(text)  # the window begins behind the pending token
        assert all(len(level) == width for level in levels)
        for number, place in ((number, place) for number in range(len(levels)) for place in range(width)):
            known = last.get(id(row))  # what stood there before still does
            if known is not None and len(known[0]) == len(levels) and old.start - known[1] + place < width:
                assert levels[number][place] == known[0][number][old.start - known[1] + place]
        wanted = []
        for place in range(width):
            column = [level[place] for level in levels]
            path = [*levels[0][: place + 1], *column[1:]]
            is_run = PAD not in path and len(text) + len(path) < row.prompt_length + 16  # else past the end
            wanted.append(said(target, [*text, *path], sampling, row.prompt_length) if is_run else PAD)
        newest = new.levels[-1]
        assert newest == wanted
        assert not new.pool.after(PAD)
        assert not any(PAD in rest for token in range(VOCAB) for rest in new.pool.after(token))
        if len(levels) == ngram - 1:
            full += 1
            assert new.levels == [*levels[1:], newest]
            assert new.start == old.start + 1
            for place, token in enumerate(newest):
                column = [level[place] for level in levels]
                assert token == PAD or [*column[1:], token] in new.pool.after(column[0])
        else:
            assert new.levels == [*levels, newest]
        last[id(row)] = new.levels, new.start
    assert full > 3


def test_ngrams_come_true(target):
    lookahead, plain = LookaheadDrafter(VOCAB, 5, 3, 5), Decoder(target)
    decoder = Decoder(target, lookahead, budget=Budget(3, 4))
    for prompt in PROMPTS:
        for each in (decoder, plain):
            each.admit(prompt, Sampling(max_tokens=40, ignore_eos=True))
    steps, count = 0, 0
    while decoder.num_running:
        rows = decoder.step().rows
        steps, count = steps + len(rows), count + sum(len(row.token_ids) for row in rows)
    assert count == 120
    assert steps < 100


def test_classic_rules_get_chains(target):
    """Each node is certain of its only child: with two children the distribution of the text would be another one."""
    texts = []
    for rule in ("match", "multi-round"):
        decoder = Decoder(target, LookaheadDrafter(VOCAB, 5, 3, 5), rule, budget=Budget(3, 4))
        decoder.admit(PROMPTS[0], Sampling(max_tokens=40, ignore_eos=True))
        texts.append([])
        while decoder.num_running:
            step = decoder.step()
            texts[-1] += step.rows[0].token_ids
            if rule == "multi-round":
                parents = step.tree.parents[step.tree.tokens != PAD].tolist()
                assert parents == [*range(-1, len(parents) - 1)]
    assert texts[0] == texts[1]


# --- nodes that are scored and not proposed --------------------------------------------------------------------------


class Tempting(Drafter):
    """Wants the very tokens scored that the target is about to say, and proposes none, or a wrong one before them."""

    name, costs_forwards = "tempting", False

    def __init__(self, text: list[int], proposes: bool) -> None:
        self.text, self.proposes, self.scored = text, proposes, 0

    def propose(self, ctx, sampling, budget) -> DraftTree:
        future = self.text[len(ctx.rows[0].tokens) :][:3]
        root = ctx.rows[0].tokens[-1]
        tree = DraftTree.from_lists([[root, (future[0] + 1) % VOCAB]] if self.proposes and future else [[root]],
                                    [[-1, 0]] if self.proposes and future else [[-1]])  # fmt: skip
        return tree.with_extra_nodes(torch.tensor([future]), torch.tensor([[*range(-1, len(future) - 1)]]), len(future))

    def observe(self, ctx, tree, accepted, output) -> None:
        self.scored += tree.num_extra_nodes
        assert output.logits.shape[1] == tree.num_nodes
        for node in range(tree.num_nodes - tree.num_extra_nodes, tree.num_nodes):  # each saw its own path
            if tree.tokens[0, node] != PAD and node + 1 < tree.num_nodes and tree.tokens[0, node + 1] != PAD:
                assert int(output.logits[0, node].argmax()) == int(tree.tokens[0, node + 1])


@pytest.mark.parametrize("proposes", [False, True])
@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float64), ("kernel", torch.float32), ("gpt2", None)])
def test_what_is_only_scored_is_never_kept(family, dtype, proposes, folder_of):
    if family == "gpt2":
        target = AdapterTarget(build(family))
    else:
        folder = folder_of("qwen3", head_dim=32) if family == "kernel" else folder_of(family)
        target = LeanTarget.from_folder(folder, dtype)
    texts = []
    for drafter in (None, lambda: Tempting(texts[0], proposes)):
        made = None if drafter is None else drafter()
        decoder = Decoder(target, made, budget=Budget(4, 3))
        decoder.admit([5, 6, 7], Sampling(max_tokens=12, ignore_eos=True))
        found = [5, 6, 7]
        while decoder.num_running:
            step = decoder.step()
            found += step.rows[0].token_ids
            assert step.rows[0].num_accepted == 0
            assert step.rows[0].depth == step.rows[0].num_drafted <= int(proposes)
            assert step.tree.num_extra_nodes == 0
            assert bool((step.tree.tokens[:, 2:] == PAD).all())
        texts.append(found)
    assert texts[0] == texts[1]
    assert made.scored > 20


def test_nodes_beside_a_tree():
    tree = DraftTree.from_lists([[7, 1, 2], [7, 3]], [[-1, 0, 1], [-1, 0]])
    tree = DraftTree(tree.tokens, tree.parents, node_probs=torch.ones(2, 3), draft_probs=torch.ones(2, 3, 5), depth=2)
    tail = torch.tensor([[4, 5, 6], [4, 5, PAD]]), torch.tensor([[-1, 0, -1], [-1, 0, 1]]), 4
    whole = tree.with_extra_nodes(*tail)
    whole.check(8)
    assert whole.tokens.tolist() == [[7, 1, 2, 4, 5, 6], [7, 3, PAD, 4, 5, PAD]]
    assert whole.parents.tolist() == [[-1, 0, 1, 0, 3, 0], [-1, 0, -1, 0, 3, -1]]
    assert (whole.num_extra_nodes, whole.depth) == (3, 4)
    assert whole.draft_probs.shape == (2, 6, 5)
    offer = whole.proposed
    offer.check(8)
    assert offer.tokens.tolist() == [[7, 1, 2, PAD, PAD, PAD], [7, 3, PAD, PAD, PAD, PAD]]
    assert offer.proposed is offer
    assert whole.proposals.tokens.tolist() == tree.tokens.tolist()
    again = whole.proposals.with_extra_nodes(*whole.extra_nodes)
    assert again.tokens.tolist() == whole.tokens.tolist()
    assert again.parents.tolist() == whole.parents.tolist()
    assert whole.prune(torch.tensor([1, 1])).tokens[0].tolist() == [7, 1, PAD, 4, PAD, 6]
    deeper = tree.with_extra_nodes(torch.tensor([[4], [4]]), torch.tensor([[-1], [-1]]), 1)
    assert deeper.depth == deeper.depths.max() == 2
    # What is not worth its verification goes, what is only scored stays.
    kept = prune_by_rule(whole, rule_of(worth=0.01))
    assert kept.tokens.tolist() == [[7, 4, 5, 6], [7, 4, 5, PAD]]
    assert (kept.num_extra_nodes, kept.depth) == (3, 4)


# --- as a kind -------------------------------------------------------------------------------------------------------


def test_it_is_a_kind_with_three_sizes(folder_of):
    folder = add_tokenizer(folder_of("llama", vocab_size=300))
    lm = load(folder, "lookahead", dtype="float64", draft_options={"window": 3, "ngram": 4, "guesses": 2})
    assert lm.new_drafter().identity == "window 3, ngram 4, guesses 2"
    both = load(folder, "lookup+lookahead", dtype="float64", draft_options={"ngram": 4, "min_match": 1})
    plain = LM(lm.target, lm.tokenizer)
    for temperature in (0.0, 1.0):
        asked = {"max_tokens": 30, "temperature": temperature, "seed": 3, "ignore_eos": True}
        wanted = [each.token_ids for each in plain.generate(["def add(a, b):", "class"], **asked)]
        for each in (lm, both):
            assert [found.token_ids for found in each.generate(["def add(a, b):", "class"], **asked)] == wanted


@pytest.mark.parametrize(
    ("name", "value"), [("window", 0), ("ngram", 1), ("guesses", True), ("window", 65), ("ngram", "3")]
)
def test_sizes_out_of_range_are_refused(name, value, folder_of):
    with refused(ConfigError, f"draft_options: {name} must be from", "give a whole number"):
        load(add_tokenizer(folder_of("llama", vocab_size=300)), "lookahead", draft_options={name: value})
