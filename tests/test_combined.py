"""Several drafters as one: each part's outcome, calibration, when a part is asked, and names."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import add_tokenizer, refused
from draftwing.budget.acceptance import Acceptance
from draftwing.decode import Decoder
from draftwing.engine import Engine
from draftwing.errors import ConfigError
from draftwing.lm import LM
from draftwing.loading import load, load_drafter
from draftwing.methods.base import Budget, Drafter, ListTree
from draftwing.methods.causal_lm import CausalLMDrafter
from draftwing.methods.ensemble import (
    MAX_PATIENCE,
    MIN_ANSWERS,
    MIN_PATIENCE,
    Asking,
    CombinedDrafter,
    DraftCalibration,
    Offer,
    Proposed,
    proposals,
    unite,
)
from draftwing.methods.lookahead import LookaheadDrafter
from draftwing.methods.lookup import LookupDrafter, SuffixAutomaton
from draftwing.methods.retrieval import RetrievalDrafter
from draftwing.models.context import Context, FeatureSpec, Row
from draftwing.models.lean import LeanTarget
from draftwing.noise import KeyedNoise
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.tree import DraftTree, GrowthRule
from test_merge import noisy_or, paths, proposal

VOCAB = 61


@pytest.fixture(scope="module")
def target(folder_of) -> LeanTarget:
    return LeanTarget.from_folder(folder_of("llama"), torch.float64)


class Oracle(Drafter):
    """Proposes the next tokens of a text that it knows, and keeps the hidden states that it was given."""

    def __init__(self, text: list[int], depth: int, taps: tuple[int, ...] = (), **traits) -> None:
        self.name, self.features = f"oracle {depth}", FeatureSpec(taps)
        for name, value in traits.items():
            setattr(self, name, value)
        self.text, self.depth = text, depth
        self.seen: dict[int, torch.Tensor] = {}
        self.budgets: list[Budget] = []
        self.paths: list[list[int]] = []
        self.num_learned = self.num_forgotten = 0

    def admit(self, ctx, features) -> None:
        assert (features is None) == (not self.features.taps)
        if features is not None:
            self.seen |= dict(enumerate(features[0]))

    def propose(self, ctx, sampling, budget) -> DraftTree:
        self.budgets.append(budget)
        tokens = [
            [*row.tokens[-1:], *self.text[len(row.tokens) :][: min(self.depth, budget.depth)]] for row in ctx.rows
        ]
        return DraftTree.from_lists(tokens, [list(range(-1, len(each) - 1)) for each in tokens])

    def observe(self, ctx, tree, accepted, output) -> None:
        path = accepted.path[0][: int(accepted.num[0]) + 1].tolist()
        self.paths.append(accepted.own_path[0].tolist())
        if output.features is not None:
            self.seen |= {ctx.rows[0].length + i: output.features[0, node].clone() for i, node in enumerate(path)}

    def learn(self) -> None:
        self.num_learned += 1

    def forget(self) -> None:
        self.num_forgotten += 1


GREEDY = SamplingBatch([Sampling()], KeyedNoise(VOCAB))
REPEATS = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]


def context(texts: list[list[int]]) -> Context:
    return Context(torch.device("cpu"), [Row(list(text), len(text) - 1, 1) for text in texts])


def combined(parts, texts, names=None) -> tuple[CombinedDrafter, Context]:
    """The parts as one drafter, which has admitted some rows."""
    both, ctx = CombinedDrafter(parts, DraftCalibration(len(parts)), names), context([])
    for text in texts:
        ctx.rows += context([text]).rows
        both.admit(ctx, None)
    return both, ctx


# --- the parts' view of a step ---------------------------------------------------------------------------------------


def decode(target: LeanTarget, drafter, prompt, budget: Budget, **sampling) -> list[int]:
    decoder, found = Decoder(target, drafter, budget=budget), list(prompt)
    decoder.admit(prompt, Sampling(max_tokens=20, ignore_eos=True, **sampling))
    while decoder.num_running:
        found += decoder.step().rows[0].token_ids
    return found


def test_each_part_gets_its_own_hidden_states(target):
    """Of the prompt and of every token that was kept, whoever proposed it."""
    text = decode(target, None, [5, 6, 7], Budget())
    for taps in (((3,), (0, 2)), ((2,), (2,)), ((1, 3), ()), ((3, 1), (1,))):
        parts = [Oracle(text, depth, own) for depth, own in zip((3, 1), taps, strict=True)]
        both = CombinedDrafter(parts, DraftCalibration(2))
        assert both.features.taps == tuple(dict.fromkeys((*taps[0], *taps[1])))
        assert decode(target, both, [5, 6, 7], Budget(4, 2)) == text
        for part, own in zip(parts, taps, strict=True):
            wanted = target.score(torch.tensor([text]), FeatureSpec(own)).features
            assert set(part.seen) >= set(range(18 if own else 0))
            for position, found in part.seen.items():
                assert torch.allclose(found, wanted[0, position])


def test_each_part_hears_which_of_its_own_nodes_were_kept(target):
    """The merged tree numbers nodes otherwise; a causal LM moves its slots by its own numbers."""
    text = decode(target, None, [5, 6, 7], Budget())
    short, wrong = Oracle(text, 1), Oracle([0] * 100, 2)
    both = CombinedDrafter([wrong, Oracle(text, 3), short], DraftCalibration(3))
    assert decode(target, both, [5, 6, 7], Budget(4, 3)) == text
    assert [part.paths[0] for part in both.parts] == [[0, -1, -1, -1], [0, 1, 2, 3], [0, 1, -1, -1]]


def test_lookahead_keeps_its_window_among_others(target):
    """Its extra nodes are scored next to all proposals."""
    lookahead = LookaheadDrafter(VOCAB, 4, 4, 4)
    decoder = Decoder(target, CombinedDrafter([LookupDrafter(VOCAB), lookahead], DraftCalibration(2)), budget=Budget(3))
    decoder.admit([5, 6, 7], Sampling(max_tokens=30, ignore_eos=True))
    sizes = []
    for _ in range(4):
        decoder.step()
        sizes.append(len(lookahead.windows[0].levels))
    assert sizes == [2, 3, 3, 3]


def test_as_much_is_read_as_every_part_has_read():
    class Reads(Oracle):
        resumes, num_read = True, ()

    parts = [Reads([], 1, (tap,), num_read=read) for tap, read in ((1, [4, 9]), (2, [6, 7]))]
    assert CombinedDrafter([*parts, LookupDrafter(VOCAB)], DraftCalibration(3)).num_read == [4, 7]


@pytest.mark.parametrize("learns", [False, True])
def test_every_part_learns_and_forgets(learns, target):
    """An engine calls ``learn`` before each step, for each part once, and only if a part learns."""
    parts = [Oracle([0] * 50, 1, learns=learns), Oracle([1] * 50, 2), LookupDrafter(VOCAB)]
    both = CombinedDrafter(parts, DraftCalibration(3))
    assert both.learns == learns
    both.learn()
    both.forget()
    assert [(part.num_learned, part.num_forgotten) for part in parts[:2]] == [(1, 1), (1, 1)]
    engine = Engine(Decoder(target, both, budget=Budget(2, 2)))
    engine.submit([5, 6, 7], Sampling(max_tokens=6, ignore_eos=True))
    num_steps = len(list(engine.steps()))
    assert [part.num_learned for part in parts[:2]] == [1 + num_steps] * 2 if learns else [1] * 2


def test_traits_are_those_of_all(target):
    parts = [Oracle([], 1, (3,), identity="a", num_bytes=3, runs_as="x"), LookupDrafter(VOCAB)]
    both = CombinedDrafter(parts, DraftCalibration(2))
    assert [part.name for part in both.parts] == ["lookup", "oracle 1"]  # what costs nothing is asked first
    assert both.name == "lookup + oracle 1"
    assert (both.identity, both.num_bytes, both.runs_as) == ("lookup + oracle 1 a", 3, "x")
    assert both.part_names == ("lookup", "oracle 1")
    assert all((both.drafts, both.reads_features, both.costs_forwards, both.grows_by_rule))
    assert not any((both.learns, both.resumes, both.lists, both.context))
    assert not CombinedDrafter([LookupDrafter(VOCAB)], DraftCalibration(1)).costs_forwards


def test_a_row_that_one_part_refuses_joins_none(target):
    class Refuses(Oracle):
        def admit(self, ctx, features) -> None:
            raise ConfigError("not this one")

    class Counted(Oracle):
        num_rows = 0

        def admit(self, ctx, features) -> None:
            self.num_rows += 1

        def remove(self, ctx, row) -> None:
            assert row == ctx.num_rows - 1
            self.num_rows -= 1

    decoder = Decoder(target, CombinedDrafter([counted := Counted([], 1), Refuses([], 1)], DraftCalibration(2)))
    with refused(ConfigError, "not this one"):
        decoder.admit([5, 6, 7], Sampling())
    assert decoder.ctx.num_rows == counted.num_rows == 0


# --- what is learnt --------------------------------------------------------------------------------------------------


def brute(tokens_of, told_of, emitted: list[int]) -> list[tuple[float, int, bool]]:
    """(told, depth, right) of every path whose tokens but the last came true, and are followed by another token."""
    found = []
    for path, told in zip(tokens_of, told_of, strict=True):
        if path and list(path[:-1]) == emitted[: len(path) - 1] and len(path) <= len(emitted):
            found.append((told, len(path), path[-1] == emitted[len(path) - 1]))
    return found


def table_of(seen: list[tuple[float, int, bool]]) -> tuple[np.ndarray, np.ndarray]:
    acceptance = Acceptance()
    if seen:
        told, depths, right = map(np.array, zip(*seen, strict=True))
        acceptance.observe(told, depths, right)
    return acceptance.tables()


def rule_of(worth: float = 1.0, node: float = 0.1) -> GrowthRule:
    ones, line = np.ones(8, np.float32), np.array([[0, 1]], np.float32)
    return GrowthRule(line, line, ones, ones, (1 + node * np.arange(-1, 23)).astype(np.float32), worth, 0.1)


@settings(max_examples=60, deadline=None)
@given(st.lists(proposal(), min_size=1, max_size=3), st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_each_drafters_claims_are_learnt_by_themselves(many, emitted):
    many = [distinct(each) for each in many]
    learnt = DraftCalibration(len(many))
    learnt.learn(many, None, emitted)
    for drafter, each in enumerate(many):
        wanted = table_of(brute(paths(each), each.node_probs, emitted))
        found = learnt.calibrated(drafter, rule_of())
        np.testing.assert_allclose(found.knots, wanted[0], rtol=1e-5)
        np.testing.assert_allclose(found.rates, wanted[1], rtol=1e-5)
        reached = learnt.path_probs(drafter, each)
        for node, above in enumerate(each.parents[1:], 1):
            place = min(len(paths(each)[node]), len(wanted[0])) - 1
            rate = np.interp(each.node_probs[node], wanted[0][place], wanted[1][place])
            assert reached[node] == pytest.approx(reached[above] * rate, rel=1e-4)


def distinct(one: ListTree) -> ListTree:
    """Without equal siblings, so that a path is a node."""
    union = unite([one])
    return ListTree(union.tokens, union.parents, [1.0, *(probs[0] for probs in union.given_probs[1:])])


@settings(max_examples=60, deadline=None)
@given(proposal(), proposal(), st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_claims_where_several_spoke_are_learnt_by_who_spoke(one, other, emitted):
    union, learnt = unite([one, other]), DraftCalibration(2)
    own = paths(union)
    learnt.learn_shared(union, emitted)
    # As nothing is known of either, chances are taken as told, between the tables' ends.
    for probs in union.given_probs:
        probs.update({drafter: min(max(told, 0.01), 0.9975) for drafter, told in probs.items()})
    told = [noisy_or(union, node) for node in range(len(own))]
    seen: dict[tuple[int, int], list[tuple[float, int, bool]]] = {}
    for node in range(1, len(own)):
        who = union.proposers(node), union.child_proposers[union.parents[node]]
        if who[1] == 3:
            seen.setdefault(who, []).extend(brute([own[node]], [told[node]], emitted))
    for who, claims in seen.items():
        if not claims:
            assert who not in learnt.shared
            continue
        table, wanted = learnt.shared[who], table_of(claims)
        table.settle()
        np.testing.assert_allclose(table.lines[0], wanted[0], rtol=1e-5)
        np.testing.assert_allclose(table.lines[1], wanted[1], rtol=1e-5)


def test_agreement_and_contradiction_come_to_mean_what_they_are_worth():
    """One drafter is right half the time and says so, the other always where the first agrees and never else."""
    learnt, rng = DraftCalibration(2), np.random.default_rng(0)
    for _ in range(400):
        true = int(rng.integers(0, 2))
        first = ListTree([9, true if rng.random() < 0.5 else 1 - true], [-1, 0], [1.0, 0.5])
        second = ListTree([9, first.tokens[1] if first.tokens[1] == true else 5], [-1, 0], [1.0, 0.5])
        learnt.learn([first, second], unite([first, second]), [true, 0])
    agreed, apart = (unite([ListTree([9, 1], [-1, 0], [1.0, 0.5]), ListTree([9, token], [-1, 0], [1.0, 0.5])])
                     for token in (1, 5))  # fmt: skip
    assert learnt.chance(agreed, 1) > 0.9
    assert learnt.chance(apart, 1) < 0.1
    assert learnt.chance(apart, 2) < 0.1
    alone = unite([ListTree([9, 1], [-1, 0], [1.0, 0.5]), ListTree([9], [-1], [1.0])])
    assert 0.4 < learnt.chance(alone, 1) < 0.6


def test_agreement_is_judged_by_depth():
    """When both agree, they are right about the next token and wrong about the one after it."""
    learnt, union = DraftCalibration(2), unite([ListTree([9, 1, 2], [-1, 0, 1], [1.0, 0.5, 0.5])] * 2)
    for _ in range(200):
        learnt.learn_shared(union, [1, 3, 0])
    for table in learnt.shared.values():
        table.settle()
    assert learnt.chance(union, 1) > 0.9
    assert learnt.chance(union, 2) < 0.1


def test_a_step_that_was_undone_teaches_nothing():
    calibration, tree = DraftCalibration(2), ListTree([9, 1], [-1, 0], [1.0, 0.5])
    Proposed([Row([5, 9], 1, 1)], [1], [Offer([tree])] * 2, [None], {1: [0.0]}).learn(calibration, whole=True)
    assert calibration.asking[1].num_answers[0] == 0


# --- who is asked ----------------------------------------------------------------------------------------------------


def test_a_drafter_is_asked_where_it_brings_more_than_it_takes():
    asking, rule = Asking(), rule_of(worth=2.0, node=0.0)
    assert asking.is_worth_it([0.0], 0, rule)  # nothing is known of it
    for _ in range(60):
        asking.add_time(1, 1.0, rule)
        asking.add_gain(0.0, 2, 4)  # where nobody else says anything it adds two tokens,
        asking.add_gain(3.0, 0, 4)  # and none where three are promised
    assert asking.is_worth_it([0.0], 0, rule)
    assert not asking.is_worth_it([3.0], 5, rule)
    assert asking.is_worth_it([1.0], 5, rule)  # never seen
    asking.add_time(2, 3.0, rule)
    assert asking.is_worth_it([0.0, 3.0], 5, rule)  # four seconds' worth of tokens for three
    asking.add_time(3, 5.0, rule)
    assert not asking.is_worth_it([0.0, 3.0, 3.0], 5, rule)
    costly = rule_of(worth=2.0, node=1.0)
    assert not asking.is_worth_it([0.0], 5, costly)  # its nodes take what its tokens are worth


def asking_after(answers: list[int], expected: float = 3.0, seconds: float = 1.0, rule=None) -> Asking:
    """A policy that has seen these numbers of added tokens."""
    asking = Asking()
    asking.add_time(1, seconds, rule or rule_of())
    for tokens in answers:
        asking.add_gain(expected, tokens, 0)
    return asking


def test_what_is_refused_is_tried_ever_rarer():
    asking, rule = asking_after([0] * 200), rule_of()
    tried = [step for step in range(400) if asking.is_worth_it([3.0], 5, rule)]
    pauses = [later - earlier for earlier, later in pairwise(tried)]
    assert tried[0] == MIN_PATIENCE - 1
    assert pauses[:4] == [8, 16, 32, 64]
    assert set(pauses[4:]) == {MAX_PATIENCE}
    for _ in range(200):
        asking.add_gain(3.0, 4, 0)  # now it is worth it,
    assert asking.is_worth_it([3.0], 5, rule)
    for _ in range(400):
        asking.add_gain(3.0, 0, 0)  # and then no longer
    assert [asking.is_worth_it([3.0], 5, rule) for _ in range(4)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("answers", "worth", "seconds", "is_worth_it"),
    [
        ([0] * MIN_ANSWERS, 4.0, 0.5, True),  # a few bad answers prove little
        ([0] * (MIN_ANSWERS + 100), 4.0, 0.5, False),
        ([0] * 10, 2.0, 1.0, False),  # answers that scatter are believed later than equal ones
        ([0] * 9 + [4], 2.0, 1.0, True),
    ],
)
def test_few_answers_prove_little(answers, worth, seconds, is_worth_it):
    rule = rule_of(worth, 0.0)
    assert asking_after(answers, 3.0, seconds, rule).is_worth_it([3.0], 0, rule) == is_worth_it


def test_slow_first_drafts_are_not_held_against_it():
    rule = rule_of(worth=2.0, node=0.0)
    asking = asking_after([1] * 200, 0.0, 10.0, rule)
    for seconds in (1.0, 5.0):
        asking.add_time(1, seconds, rule)
    assert asking.is_worth_it([0.0], 0, rule)


def test_an_interrupted_draft_hardly_counts():
    asking, rule = Asking(), rule_of()
    for seconds in (*[1.0] * 20, 100.0):
        asking.add_time(1, seconds, rule)
    assert asking.forwards_by_rows[1][1] == pytest.approx(1.05)


def test_the_time_of_a_draft_follows_the_machine():
    """A drafter that is asked rarely was last asked when the machine was slower."""
    slow, fast = rule_of(worth=2.0), rule_of(worth=1.0, node=0.05)
    slow = replace(slow, verify=slow.verify * 4.0)
    asking = asking_after([1] * 40, 3.0, 2.0, slow)
    for _ in range(39):
        asking.add_time(1, 2.0, slow)  # half of a forward
    assert not asking.is_worth_it([3.0], 0, replace(slow, worth=1.0))
    assert asking.is_worth_it([3.0], 0, fast)


def test_another_text_is_looked_at_soon_and_believed():
    asking, rule = asking_after([0] * 200), rule_of()
    assert sum(asking.is_worth_it([3.0], 5, rule) for _ in range(200)) < 8
    asking.begin_request()
    tried = [step for step in range(30) if asking.is_worth_it([3.0], 5, rule)]
    assert tried[:2] == [MIN_PATIENCE - 1, 3 * MIN_PATIENCE - 1]
    for _ in range(10):
        asking.add_gain(3.0, 2, 0)
    assert asking.is_worth_it([3.0], 5, rule)


def test_sampled_texts_are_learnt_of_by_themselves():
    both, ctx = combined([LookupDrafter(VOCAB), Oracle([4, 5, 6, 7, 8, 9], 3)], [[4, 5]])
    budget, tables = Budget(4, 2, 16, rule=rule_of(node=0.01)), (both.calibration, both.calibration.sampled)
    for temperature, before in ((0.0, [0, 0]), (1.0, [1, 0])):
        batch = SamplingBatch([Sampling(temperature=temperature, seed=1)], KeyedNoise(VOCAB))
        assert [calibration.asking[1].num_answers[0] for calibration in tables] == before
        both.propose(ctx, batch, budget)
        ctx.rows[0].tokens += ctx.rows[0].tokens[:1]
        ctx.rows[0].length += 1
        both.propose(ctx, batch, Budget(0))
    assert [calibration.asking[1].num_answers[0] for calibration in tables] == [1, 1]


@pytest.mark.parametrize("budget", [Budget(3), Budget(4, 3), Budget(4, 3, 5)], ids=str)
@pytest.mark.parametrize("drafter", ["lookup", "retrieval"])
def test_listed_trees_are_those_proposed(drafter, budget):
    trees = []
    for call in (lambda made, ctx: proposals(made.propose(ctx, GREEDY, budget)),
                 lambda made, ctx: made.list_trees(ctx, budget)):  # fmt: skip
        made, ctx = {"lookup": LookupDrafter, "retrieval": RetrievalOfOwn}[drafter](VOCAB), context([])
        for text in ([1, 2, 3, 4, 1, 2, 5, 1, 2], [7, 8, 9]):
            ctx.rows += context([text]).rows
            made.admit(ctx, None)
        trees.append(call(made, ctx))
    for found, listed in zip(*trees, strict=True):
        assert (found.tokens, found.parents) == (listed.tokens, listed.parents)
        assert found.node_probs[1:] == pytest.approx(listed.node_probs[1:])
    assert len(trees[0][0].tokens) > 1


class RetrievalOfOwn(RetrievalDrafter):
    """Copies from the row's own text."""

    def matches(self, index, row):
        return SuffixAutomaton(row.tokens).matches(2, 8)


def test_what_asking_brought_is_learnt_of_every_step():
    """Of claims every fourth is enough."""
    calibration = DraftCalibration(2)
    offers = [Offer([ListTree([9], [-1], [1.0])]), Offer([ListTree([9, 1], [-1, 0], [1.0, 0.5])])]
    row = Row([5, 9, 1, 7], 3, 1)
    Proposed([row], [1], offers, [None], {1: [0.0]}).learn(calibration, whole=False)
    assert calibration.asking[1].num_answers[0] == 1
    assert calibration.asking[1].mean_added[0] == 1.0
    assert calibration.tables[1].pending == []


def test_what_others_found_too_was_not_added():
    """Nor was a token that came as the bonus, because its node was not worth its verification."""
    calibration = DraftCalibration(2)
    offers = [Offer([ListTree([9, 1], [-1, 0], [1.0, 0.5])]), Offer([ListTree([9, 1, 7], [-1, 0, 1], [1.0, 0.5, 0.5])])]
    for row, added in ((Row([5, 9, 1, 7, 8], 4, 1), 1.0), (Row([5, 9, 1, 7], 3, 1), 0.5)):  # 1 of 1, then 0 of 1
        Proposed([row], [1], offers, [None], {1: [0.0]}).learn(calibration, whole=False)
        assert calibration.asking[1].mean_added[0] == added


def test_a_draft_without_a_pass_says_that_it_took_none():
    """Else the clock would take the seconds of lookup for those of a net."""
    both, ctx = combined([LookupDrafter(VOCAB), costly := Oracle([0] * 50, 3)], [REPEATS])
    budget = Budget(4, 2, 16, rule=rule_of(node=0.01))
    assert both.propose(ctx, GREEDY, budget).num_draft_forwards == 3
    assert costly.budgets[-1].depth == 4
    asking = both.calibration.asking[1]
    asking.forwards_by_rows[1] = (MIN_ANSWERS, 100.0)
    for _ in range(MIN_ANSWERS):
        asking.add_gain(3.0, 0, 3)
    tree = both.propose(ctx, GREEDY, budget)
    assert costly.budgets[-1].depth == 0
    assert tree.tokens[0, :4].tolist() == [4, 5, 6, 7]
    assert tree.max_depth > budget.depth  # copies may be longer than what a net drafts
    assert tree.num_draft_forwards == 0.0


def test_lone_claims_that_are_worth_nothing_are_left_out():
    both, ctx = combined([LookupDrafter(VOCAB), Oracle([0] * 50, 3, grows_by_rule=True)], [REPEATS])
    tree = both.propose(ctx, GREEDY, Budget(4, 2, 16, rule=rule_of(worth=0.01, node=1.0)))
    assert tree.tokens[0, 1:].tolist() == [0, 0, 0]  # the other grows by its own rule, as this one does not


# --- requests that choose among them ---------------------------------------------------------------------------------


PROMPTS = ([5, 6, 9, 5, 6], [8, 5, 6, 9, 8, 5], [11, 12, 11, 12], [4, 9, 4])
WISHES = (["lookup"], ["model"], None, [], ("model", "lookup"))


class Asked(CausalLMDrafter):
    """Keeps the depths that it was asked for."""

    def __init__(self, *args):
        super().__init__(*args)
        self.depths = []

    def propose(self, ctx, sampling, budget):
        self.depths.append(budget.depth)
        return super().propose(ctx, sampling, budget)


def choosing(target, rule="match", budget=None):
    model = Asked(target, VOCAB)
    both = CombinedDrafter([model, LookupDrafter(VOCAB, 1)], DraftCalibration(2), ["model", "lookup"])
    return model, Engine(Decoder(target, both, rule, budget or Budget(3, 2)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("budget", [Budget(3, 2), Budget(4, 2, 20, rule=rule_of(node=0.01))], ids=["fixed", "rule"])
def test_requests_of_one_batch_choose_who_drafts_for_them(budget, temperature, target):
    sampling = Sampling(max_tokens=16, temperature=temperature, seed=3, ignore_eos=True)
    (_, plain), (model, engine) = choosing(target, budget=Budget(0)), choosing(target, budget=budget)
    baseline, requests = (
        [each.submit(prompt, sampling, drafts=drafts)
         for prompt, drafts in zip((*PROMPTS, PROMPTS[0]), WISHES, strict=True)]
        for each in (plain, engine)
    )  # fmt: skip
    plain.run()
    for step in engine.steps():
        step.tree.check(VOCAB)
        assert not any(row.num_drafted for row in step.rows if WISHES[row.request_id] == [])
    assert [request.token_ids for request in requests] == [request.token_ids for request in baseline]
    of_lookup, of_model, of_both = (request.stats.num_accepted for request in requests[:3])
    assert of_model > of_lookup  # a model that drafts for itself is right
    assert of_both > 0
    assert max(model.depths) > 0


@pytest.mark.parametrize(("rule", "budget"), [("match", Budget(3, 2)), ("speculative", Budget(3))])
def test_a_part_that_no_request_chose_is_not_asked(rule, budget, target):
    model, engine = choosing(target, rule, budget)
    first, second = (engine.submit(prompt, Sampling(max_tokens=8), drafts=["lookup"]) for prompt in PROMPTS[:2])
    engine.run()
    assert set(model.depths) == {0}
    assert first.finish_reason == second.finish_reason == "length"
    last = engine.submit(PROMPTS[0], Sampling(max_tokens=8), drafts=["model"])
    engine.run()
    assert max(model.depths) > 0
    assert last.token_ids == first.token_ids
    assert last.stats.num_accepted > 0


def test_nothing_is_learnt_of_a_part_that_no_request_chose(target):
    calibration, offers = DraftCalibration(2), [Offer([ListTree([9], [-1], [1.0])] * 2) for _ in range(2)]
    rows = [Row([5, 9, 1, 7], 3, 1, drafts=wish) for wish in (("lookup",), None)]
    Proposed(rows, [1, 1], offers, [None] * 2, {1: [0.0, 0.0]}, ("lookup", "model")).learn(calibration, whole=True)
    assert calibration.asking[1].num_answers[0] == 1


def test_drafts_that_are_not_there_are_refused(folder, target):
    own = load(folder, f"{folder}+lookup", dtype="float64", budget=Budget(3, 2)).engine()
    for name in (str(folder), "lookup"):
        own.submit([5], drafts=[name])
    with refused(ConfigError, "drafts: 'eagle3' is not loaded: choose", "lookup"):
        own.submit([5], drafts=["lookup", "eagle3"])
    for wrong in ("lookup", 5, {"lookup": 1}):
        with refused(ConfigError, "drafts must be a list of names, found"):
            own.submit([5], drafts=wrong)
    alone = Engine(Decoder(target, LookupDrafter(VOCAB, 1)))
    assert alone.submit([5], drafts=["lookup"]).speculation is None
    assert alone.submit([5], drafts=[]).speculation.depth == 0
    with refused(ConfigError, "choose lookup, or load"):
        alone.submit([5], drafts=["eagle3"])


# --- the classic rules -----------------------------------------------------------------------------------------------


def test_the_first_net_drafts_for_all_that_is_left():
    """A second one would take its time and be used for nothing."""
    both, ctx = combined([Oracle(REPEATS * 2, 3), Oracle(REPEATS * 2, 3)], [REPEATS])
    both.propose(ctx, GREEDY, Budget(2, children="sampled"))
    assert [part.budgets[-1].depth for part in both.parts] == [2, 0]


def test_a_part_hears_nothing_of_its_own_was_kept_if_another_was_taken(target):
    unsure = Oracle([0] * 100, 3, costs_forwards=False)
    both = CombinedDrafter([unsure, CausalLMDrafter(target, VOCAB)], DraftCalibration(2))
    decoder = Decoder(target, both, "multi-round", Budget(3))
    decoder.admit([5, 6, 7], Sampling(max_tokens=20, ignore_eos=True))
    assert decoder.step().rows[0].num_accepted == 3
    assert unsure.paths == [[0, -1, -1, -1]]


def test_each_row_takes_lookup_where_that_is_sure_and_else_the_model(target):
    """Before anything is drawn: children of one node come from one q."""
    both, ctx = combined([CausalLMDrafter(target, VOCAB), LookupDrafter(VOCAB)], [REPEATS, [1, 2, 3, 4, 5]])
    sampling = SamplingBatch([Sampling(temperature=1.0, seed=seed) for seed in (1, 2)], KeyedNoise(VOCAB))
    tree = both.propose(ctx, sampling, Budget(3, children="sampled"))
    assert tree.tokens[0].tolist() == [4, 5, 6, 7]
    assert [int(tree.draft_probs[0, node].argmax()) for node in range(3)] == [5, 6, 7]
    assert float(tree.draft_probs[0, :3].amax(-1).min()) == 1.0
    assert float(tree.draft_probs[1, 0].max()) < 1.0
    drawn = [float(tree.draft_probs[1, node, token]) for node, token in enumerate(tree.tokens[1, 1:].tolist())]
    assert all(q > 0 for q in drawn)


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(folder_of):
    return add_tokenizer(folder_of("llama", vocab_size=300))


def test_several_are_named_with_a_plus(folder):
    lm = load(folder, f"{folder}+lookup", dtype="float64", draft_options={"min_match": 1}, budget=Budget(3, 2))
    assert lm.drafter_name == f"lookup + causal-lm ({folder.name})"
    assert lm.new_drafter().parts[0].min_match == 1
    assert lm.new_drafter().calibration is lm.new_drafter().calibration  # shared by the next text
    plain, planned = LM(lm.target, lm.tokenizer), LM(lm.target, lm.tokenizer, lm.new_drafter)
    for temperature in (0.0, 1.0):
        options = {"max_tokens": 30, "temperature": temperature, "seed": 3, "ignore_eos": True}
        found, same, baseline = (each.generate(["def add(a, b):", "class"], **options) for each in (lm, planned, plain))
        ids = [[text.token_ids for text in texts] for texts in (found, same, baseline)]
        assert ids[0] == ids[1] == ids[2]
        assert all(text.tau > 1.5 for text in found)


def test_a_folder_may_have_a_plus_in_its_name(folder, tmp_path, monkeypatch):
    (tmp_path / "a+b").symlink_to(folder)
    target = LeanTarget.from_folder(folder, torch.float64)
    assert load_drafter(f"{tmp_path}/a+b", target, None)().name == "causal-lm (a+b)"
    assert load_drafter(tmp_path / "a+b", target, None)().name == "causal-lm (a+b)"


@pytest.mark.parametrize(
    ("draft", "options", "says"),
    [
        ("lookup+", {}, "joins a draft without a name: write it like eagle3+lookup"),
        ("lookup+lookup", {}, "names 'lookup' twice"),
        ("lookup+none", {}, "leave none out"),
        ("FOLDER+lookup", {"depth": 3}, "has no option 'depth': it has"),
        ("FOLDER+lookup", {"min_match": 0}, "min_match must be at least 1"),
    ],
)
def test_what_cannot_be_joined_is_refused(draft, options, says, folder):
    target = LeanTarget.from_folder(folder, torch.float64)
    with refused(ConfigError, says):
        load_drafter(draft.replace("FOLDER", str(folder)), target, None, options=options)
