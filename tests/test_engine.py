"""Requests through the engine: they come and go, fail alone, and lose nothing to an interrupt."""

import asyncio
import math
import shutil
import sys
from itertools import cycle

import pytest
import torch

import draftwing as dw
from conftest import SMALL, add_tokenizer, refused
from draftwing import decode, engine, request
from draftwing.accept import get_rule
from draftwing.engine import Engine
from draftwing.errors import ConfigError, NumericsError, PromptError
from draftwing.methods.base import NoDrafter, cut_to_nodes
from draftwing.methods.causal_lm import CausalLMDrafter
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.methods.lookup import LookupDrafter
from draftwing.methods.net_drafter import EagleDrafter
from draftwing.models.config import ModelConfig, read_config
from draftwing.models.lean import LeanTarget
from draftwing.noise import KeyedNoise
from draftwing.readout import explain, read_emitted
from draftwing.request import Request
from draftwing.sampling import Sampling, SamplingBatch, nth_seed
from draftwing.stats import Stats
from draftwing.tree import Accepted, DraftTree

VOCAB = SMALL["vocab_size"]
PROMPTS = ([5, 6, 9, 5, 6], [8, *range(20, 35)], [11, 12], [4])
TEXTS = ["def add(a, b):", "class Table:\n    def", "for row in rows: print(row)\nfor row in"]
DRAFTERS = ("none", "lookup", "lm", "eagle")


@pytest.fixture(scope="module")
def target(folder_of):
    return LeanTarget.from_folder(folder_of("llama"), torch.float64, name="tiny")


@pytest.fixture(scope="module")
def maker(target, folder_of):
    """``maker("lm")``: makes drafters that agree with the target now and then."""
    torch.manual_seed(3)
    shape = ModelConfig.from_hf(read_config(folder_of("llama")))
    net = EagleNet(EagleConfig.for_target(3, shape), target.embedding, target.head, None, torch.float64)
    return {
        "none": NoDrafter,
        "lookup": lambda: LookupDrafter(VOCAB, 1),
        "lm": lambda: CausalLMDrafter(target, VOCAB),
        "eagle": lambda: EagleDrafter(net, target),
    }.__getitem__


@pytest.fixture(scope="module")
def folder(folder_of, tmp_path_factory):
    path = tmp_path_factory.mktemp("engine") / "model"
    return add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=300), path))


@pytest.fixture(scope="module")
def lm(folder):
    return dw.load(folder, "lookup", dtype="float64", device="cpu", draft_options={"min_match": 1})


@pytest.fixture(scope="module")
def plain(folder):
    return dw.load(folder, "none", dtype="float64", device="cpu")


def samplings(max_tokens=10):
    return [
        Sampling(max_tokens=max_tokens + row, temperature=float(row % 2), seed=row, ignore_eos=True)
        for row in range(len(PROMPTS))
    ]


@pytest.fixture(scope="module")
def expected(target):
    """What each prompt's text is, alone and plainly."""
    found = []
    for prompt, sampling in zip(PROMPTS, samplings(), strict=True):
        alone = Engine(dw.Decoder(target))
        one = alone.submit(prompt, sampling)
        alone.run()
        found.append(one.token_ids)
    return found


# --- requests come and go --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_batch", "drafter"), [(1, "none"), (1, "eagle"), (2, "lookup"), (2, "lm"), (None, "none"), (None, "eagle")]
)
def test_a_queue_changes_no_text(max_batch, drafter, target, maker, expected):
    own = Engine(dw.Decoder(target, maker(drafter), budget=dw.Budget(3)), max_batch=max_batch)
    requests = [own.submit(*each) for each in zip(PROMPTS, samplings(), strict=True)]
    most = 0
    for _ in own.steps():
        most = max(most, own.num_running)
        assert all(len(each.token_ids) <= each.sampling.max_tokens for each in requests)
    assert most <= (max_batch or len(PROMPTS))
    assert [each.token_ids for each in requests] == expected
    assert [each.finish_reason for each in requests] == ["length"] * len(PROMPTS)
    assert (own.num_running, own.num_waiting) == (0, 0)


def test_requests_are_submitted_and_cancelled_on_the_way(target, maker, expected):
    own = Engine(dw.Decoder(target, maker("lm"), budget=dw.Budget(2)), max_batch=2)
    first, second, third = (own.submit(*each) for each in list(zip(PROMPTS, samplings(), strict=True))[:3])
    own.step()
    own.cancel(first)
    own.cancel(third)  # it still waits
    so_far = list(first.token_ids)
    fourth = own.submit(PROMPTS[3], samplings()[3])
    own.run()
    assert (first.finish_reason, third.finish_reason) == ("cancelled", "cancelled")
    assert first.token_ids == so_far == expected[0][: len(so_far)]
    assert third.token_ids == []
    assert [second.token_ids, fourth.token_ids] == [expected[1], expected[3]]
    own.cancel(second)
    assert second.finish_reason == "length"
    with refused(ConfigError, "nothing to decode"):
        own.step()


def test_bad_requests_are_refused_when_they_are_submitted(target):
    own = Engine(dw.Decoder(target, rule="block"))
    with refused(PromptError, "token id 61 is outside the vocabulary"):
        own.submit([VOCAB])
    with refused(ConfigError, "stop strings need a tokenizer"):
        own.submit([5], Sampling(stop="x"))
    with refused(ConfigError, "'block' takes chains, found width 2"):
        own.submit([5], speculation=dw.Budget(2, 2))
    with refused(ConfigError, "speculation must be a Budget, 'none' or None, found 5", "Budget(5)"):
        own.submit([5], speculation=5)
    for max_batch in (0, "2", 1.5, True, float("nan")):
        with refused(ConfigError, "max_batch must be at least 1, found"):
            Engine(dw.Decoder(target), max_batch=max_batch)
    assert own.num_waiting == 0


# --- how much is drafted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rows_of_one_batch_say_how_much_is_drafted_for_them(drafter, target, maker, expected):
    own = Engine(dw.Decoder(target, maker(drafter), budget=dw.Budget(4)))
    wishes = ["none", dw.Budget(1), dw.Budget(3, 2, 5), None]
    requests = [
        own.submit(prompt, sampling, speculation=wish)
        for prompt, sampling, wish in zip(PROMPTS, samplings(), wishes, strict=True)
    ]
    for step in own.steps():
        step.tree.check(VOCAB)
        assert all(row.depth <= (0, 1, 3, 4)[row.request_id] for row in step.rows)
    assert [each.token_ids for each in requests] == expected
    assert requests[0].stats.num_drafted == 0
    if drafter in ("lm", "eagle"):
        assert all(each.stats.num_drafted for each in requests[1:])


@pytest.mark.parametrize(("wish", "most"), [("none", 2), (dw.Budget(1), 2), (dw.Budget(3, 2, 5), 8), (None, 4)])
def test_one_tree_does_not_slow_the_others(wish, most, target, maker, expected):
    """Next to seven requests a tree has 1.5 times their nodes (with the root), those of the engine's own, or two."""
    own = Engine(dw.Decoder(target, maker("lm"), budget=dw.Budget(4)))
    others = [own.submit(PROMPTS[0], samplings()[0], speculation=wish) for _ in range(7)]
    large = own.submit(PROMPTS[1], Sampling(max_tokens=40, ignore_eos=True), speculation=dw.Budget(8, 4, 40))
    shared, alone = [], []
    for step in own.steps():
        (shared if len(step.rows) == 8 else alone).append(step.tree.num_nodes - 1)
    assert max(shared) == most
    assert max(alone) > 8
    assert [each.token_ids for each in others] == expected[:1] * 7
    own.submit(PROMPTS[1], large.sampling)
    assert next(own.steps()).tree.num_nodes <= 5


def test_a_request_may_choose_no_draft_of_one(target, maker, expected):
    own = Engine(dw.Decoder(target, maker("lm"), budget=dw.Budget(4)))
    made = [own.submit(PROMPTS[0], samplings()[0], drafts=drafts) for drafts in ([], None)]
    own.run()
    assert [each.token_ids for each in made] == [expected[0]] * 2
    assert [bool(each.stats.num_drafted) for each in made] == [False, True]


def test_a_static_tree_is_cut_to_its_shallow_paths():
    """Parents first, in whatever order they are listed."""
    tree = dw.Budget(paths=((0, 0), (1,), (0,), (0, 0, 0), (1, 0)))
    assert [len(cut_to_nodes(tree, most).paths) for most in (1, 2, 3, 4, 5, 9)] == [1, 2, 3, 4, 5, 5]
    assert cut_to_nodes(tree, 1).paths == ((0,),)
    assert cut_to_nodes(tree, 3).paths == ((0,), (1,), (0, 0))
    assert cut_to_nodes(tree, 5) is tree


def test_the_median_of_two_is_the_smaller_one(target, maker):
    for wishes, most in ((("none", dw.Budget(8, 4, 40)), 2), ((dw.Budget(8, 4, 40),) * 2, 40)):
        own = Engine(dw.Decoder(target, maker("lm")))
        for wish in wishes:
            own.submit(PROMPTS[0], Sampling(max_tokens=30, ignore_eos=True), speculation=wish)
        assert next(own.steps()).tree.num_nodes - 1 == most


class Watched(LookupDrafter):
    """Keeps the budgets that it is given."""

    def __init__(self):
        super().__init__(VOCAB, 1)
        self.budgets = []

    def propose(self, ctx, sampling, budget):
        self.budgets.append(budget)
        return super().propose(ctx, sampling, budget)


@pytest.mark.parametrize(("drafter", "prompt"), [("lm", 5), ("eagle", 5), ("eagle", 250)])
def test_trees_are_one_level_shallower_than_what_is_left(drafter, prompt, target, maker):
    """Each step also emits the token after its tree; a prompt of 250 tokens leaves 6 of the context."""
    decoder, left = dw.Decoder(target, maker(drafter), budget=dw.Budget(8)), 6
    max_tokens = left if prompt < 250 else 100
    decoder.admit([5 + number % 40 for number in range(prompt)], Sampling(max_tokens=max_tokens, ignore_eos=True))
    while decoder.num_running:
        row = decoder.step().rows[0]
        assert row.depth == row.num_drafted == left - 1
        left -= len(row.token_ids)


def test_nothing_is_drafted_deeper_than_can_be_emitted(target):
    paths = tuple((0,) * depth for depth in range(1, 30))
    for budget in (dw.Budget(1000), dw.Budget(1000, 3, 40), dw.Budget(paths=paths)):
        watched = Watched()
        decoder = dw.Decoder(target, watched, budget=budget)
        decoder.admit(PROMPTS[0], Sampling(max_tokens=6, ignore_eos=True))
        done = 0
        while decoder.num_running:
            done += len(decoder.step().rows[0].token_ids)
            assert watched.budgets[-1].depth <= 8  # 5, rounded up
        assert done == 6
        assert watched.budgets[0].depth == 8
        assert watched.budgets[0].width == budget.width


# --- a row that fails ------------------------------------------------------------------------------------------------


def test_one_row_with_nan_ends_alone(folder, plain):
    wanted = plain.generate(TEXTS, max_tokens=8, banned_tokens=(7,))
    broken = dw.load(folder, "lookup", dtype="float64", device="cpu")
    bad = [7, *broken.encode(TEXTS[0])]
    with torch.no_grad():
        broken.target.embedding.table[7] = torch.nan
    found = broken.generate([TEXTS[0], bad, *TEXTS[1:]], max_tokens=8, banned_tokens=(7,))
    assert [found[i].text for i in (0, 2, 3)] == [each.text for each in wanted]
    assert [each.finish_reason == "error" for each in found] == [False, True, False, False]
    assert [each.error is None for each in found] == [True, False, True, True]
    assert found[1].token_ids == []
    first, second = broken.generate([bad, TEXTS[0]], max_tokens=8, banned_tokens=(7,))
    assert (first.finish_reason, second.text) == ("error", wanted[0].text)
    with refused(NumericsError, "request 1", "hold NaN", "check the weights"):
        raise found[1].error
    with refused(NumericsError, "hold NaN"):
        broken.generate([bad], max_tokens=8)
    with refused(NumericsError, "hold NaN"):
        list(broken.stream(bad, max_tokens=8))


@pytest.mark.parametrize("rule", ["speculative", "multi-round", "block"])
def test_a_row_with_nan_fails_alone_under_a_classic_rule(folder, rule):
    broken = dw.load(folder, "lookup", rule=rule, budget=dw.Budget(3), dtype="float64", device="cpu")
    bad = [7, *broken.encode(TEXTS[0])]
    with torch.no_grad():
        broken.target.embedding.table[7] = torch.nan
    options = {"max_tokens": 8, "temperature": 1.0, "seed": 3, "banned_tokens": (7,)}
    alone = broken.generate([TEXTS[0]], **options)[0]
    found = broken.generate([TEXTS[0], bad], **options)
    assert [each.finish_reason for each in found] == [alone.finish_reason, "error"]
    assert found[0].text == alone.text
    with refused(NumericsError, "request 1", "hold NaN"):
        raise found[1].error


@pytest.mark.parametrize("rule", ["speculative", "multi-round", "block"])
def test_a_single_nan_ends_a_row_under_a_classic_rule(rule):
    scores = torch.zeros(1, 1, VOCAB)
    scores[0, 0, 5] = math.nan
    tree = DraftTree.chain(torch.tensor([[4]]))
    for seed in range(4):
        sampling = SamplingBatch([Sampling(temperature=1.0, seed=seed)], KeyedNoise(VOCAB))
        accepted = get_rule(rule).apply(tree, scores, sampling, [3])
        assert not read_emitted(tree, accepted, scores)[0].finite


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("num_nodes", [1, 3])
def test_scores_that_are_no_numbers_end_a_row(value, num_nodes):
    tree = DraftTree.chain(torch.tensor([[4, 5, 6][:num_nodes]] * 2))
    scores = torch.zeros(2, num_nodes, 9)
    scores[1, num_nodes - 1, 3] = value
    path = torch.arange(num_nodes).expand(2, -1)
    accepted = Accepted(path, torch.tensor([num_nodes - 1] * 2), torch.tensor([3, 3]))
    assert [row.finite for row in read_emitted(tree, accepted, scores)] == [True, False]


PINNED = [7, 8296287086402770272, 7233309265121582064, 7494842645428862270]  # texts of a seed stay what they are
CHANGES = [
    {"logit_bias": {9: 30.0, 5: -3.0}},
    {"banned_tokens": (30, 173)},
    {"min_tokens": 5, "stop_tokens": (9,)},
    {"presence_penalty": 1.5},
    {"presence_penalty": 1.5, "logit_bias": {9: 4.0}},
    {"grammar": "json"},
]


@pytest.mark.parametrize(("change", "draft"), list(zip(CHANGES, cycle(("lookup", "none")))), ids=str)
def test_logprobs_are_the_models_own_whatever_changes_the_choice(change, draft, folder):
    lm = dw.load(folder, draft, dtype="float64", device="cpu")
    prompt = [5, 9, 11, 5, 9, 11, 5]
    made = lm.generate([prompt], max_tokens=8, logprobs=2, **change)[0]
    plain = lm.generate([prompt], max_tokens=8)[0]
    assert made.token_ids != plain.token_ids[: len(made.token_ids)] or "min_tokens" in change
    for place, (token, found) in enumerate(zip(made.token_ids, made.logprobs, strict=True)):
        logits = lm.target.score(torch.tensor([[*prompt, *made.token_ids[:place]]])).logits[0, -1]
        wanted = logits.log_softmax(-1)
        assert found.token == token
        assert found.logprob == pytest.approx(float(wanted[token]))
        assert [value for _, value in found.top] == pytest.approx(wanted.topk(2).values.tolist())


def test_min_tokens_holds_for_stop_strings(lm):
    whole = lm.generate([TEXTS[0]], max_tokens=12, ignore_eos=True)[0]
    stop = next(text for text in map(lm.tokenizer.decode, ([t] for t in whole.token_ids)) if text.strip())
    cut = lm.generate([TEXTS[0]], max_tokens=12, ignore_eos=True, stop=(stop,))[0]
    kept = lm.generate([TEXTS[0]], max_tokens=12, ignore_eos=True, stop=(stop,), min_tokens=12)[0]
    assert len(cut.token_ids) < 12
    assert kept.token_ids == whole.token_ids


def test_seeds_of_several_texts_are_pinned():
    assert [nth_seed(7, number) for number in range(4)] == PINNED
    assert max(PINNED) >= 2**62


def test_a_constraint_is_advanced_on_a_copy():
    """An interrupted step must find the state that it began with."""

    class Taken:
        def __init__(self, tokens=()):
            self.tokens = tokens

        def start(self):
            return Taken()

        def take(self, token):
            self.tokens = (*self.tokens, token)

        def fork(self):
            return Taken(self.tokens)

    request = Request(0, [5], Sampling(), constraint=Taken())
    before = request.state()
    request.token_ids += [3, 4]
    assert request.state().tokens == (3, 4)
    assert before.tokens == ()


def test_settings_that_leave_no_number_are_named():
    one = Request(3, [5], Sampling(temperature=0.5, logit_bias={4: 2.0, 5: -8.0}))
    found = explain("tiny", one, 9, torch.zeros(2, 4), torch.tensor([0, 1, -1]))
    with refused(NumericsError, "request 3 at position 9 are finite", "temperature 0.5, logit_bias -8.0"):
        raise found
    logits = torch.zeros(3, 4)
    logits[1, 2] = math.nan
    assert "hold NaN" in str(explain("tiny", one, 9, logits, torch.tensor([0, 1])))
    assert "are finite" in str(explain("tiny", one, 9, logits, torch.tensor([0, 2])))  # not of a kept node


# --- interrupts ------------------------------------------------------------------------------------------------------

LOOP = {module.__file__ for module in (decode, engine, request)}


def interrupt_at(number, call, files=LOOP):
    """Run ``call`` and raise KeyboardInterrupt before the ``number``-th line of ``files``; lines that were run."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            count += 1
            if count == number:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return count


def requests_in(lm, drafter, target):
    """An engine with three requests, one of which has to wait and goes on until a stop string ends it."""
    decoder = dw.Decoder(target, drafter, budget=dw.Budget(2, 2, 3))
    own = Engine(decoder, max_batch=2, tokenizer=lm.tokenizer)
    options = {"ignore_eos": True, "logprobs": 0, "temperature": 1.0}
    submitted = [
        own.submit(lm.encode(TEXTS[2]), Sampling(max_tokens=2, seed=0, **options)),
        own.submit([5], Sampling(max_tokens=3, seed=1, **options)),
        own.submit([6, 7], Sampling(max_tokens=9, seed=1, stop=tuple("aeioustrn)("), **options)),
    ]
    return own, submitted


@pytest.mark.parametrize("drafter", ["none", "lookup", "itself"])
def test_an_interrupt_anywhere_loses_nothing_and_says_nothing_twice(drafter, lm):
    """Every step is interrupted a line later than the one before, until each line has been the last of a step.

    With lookup; the others have most lines in common with it: some of them.
    """
    target, stride = lm.target, {"none": 3, "lookup": 1, "itself": 4}[drafter]
    make = {
        "none": NoDrafter,
        "lookup": lambda: LookupDrafter(300, 1),
        "itself": lambda: CausalLMDrafter(target, 300),
    }[drafter]

    def told(submitted):
        return [
            (each.token_ids, each.text, each.finish_reason, [found.token for found in each.logprobs])
            for each in submitted
        ]

    own, submitted = requests_in(lm, make, target)
    lines = interrupt_at(0, own.step)  # letting two requests in is a part of it
    assert lines > 80
    own.run()
    wanted = told(submitted)
    assert {each.finish_reason for each in submitted} == {"stop", "length"}
    attempts, interrupted = 0, 0
    while attempts < lines:
        own, submitted = requests_in(lm, make, target)
        while any(each.finish_reason is None for each in submitted):
            number = attempts % lines + 1
            interrupted += interrupt_at(number, own.step) == number
            attempts += stride
        assert told(submitted) == wanted, attempts
    assert interrupted > lines // (2 * stride)


# --- LM: what it takes and what it gives back ------------------------------------------------------------------------


def test_a_seed_is_drawn_for_every_text_and_named(lm):
    options = {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    torch.manual_seed(0)
    drawn = lm.generate([TEXTS[0]] * 3, **options)
    assert len({each.seed for each in drawn}) == len({tuple(each.token_ids) for each in drawn}) == 3
    for each in drawn:
        (again,) = lm.generate(TEXTS[0], seed=each.seed, **options)
        assert again.token_ids == each.token_ids
    torch.manual_seed(0)
    assert [each.seed for each in lm.generate([TEXTS[0]] * 3, **options)] == [each.seed for each in drawn]
    given = lm.generate([TEXTS[0]] * 2, seed=4, **options)
    assert [each.seed for each in given] == [4, 4]
    assert given[0].token_ids == given[1].token_ids
    state = torch.get_rng_state()
    lm.generate(TEXTS[0], max_tokens=2)
    assert torch.equal(torch.get_rng_state(), state), "greedy decoding draws nothing"


def test_several_texts_of_a_prompt(lm):
    options = {"max_tokens": 6, "temperature": 1.0, "ignore_eos": True}
    found = lm.generate(TEXTS[:2], n=3, seed=5, **options)
    assert [each.prompt_ids for each in found] == [lm.encode(text) for text in TEXTS[:2] for _ in range(3)]
    assert [each.seed for each in found[:3]] == [each.seed for each in found[3:]]
    assert len({each.seed for each in found}) == 3
    assert found[0].token_ids == lm.generate(TEXTS[0], seed=5, **options)[0].token_ids
    assert found[2].token_ids == lm.generate(TEXTS[0], seed=found[2].seed, **options)[0].token_ids
    for n in (0, 1.5, "2", True, None):
        with refused(ConfigError, "n must be at least 1, found"):
            lm.generate(TEXTS[0], n=n)


def test_a_sampling_for_each_prompt(lm, plain):
    own = [Sampling(max_tokens=3), Sampling(max_tokens=5, temperature=1.0, seed=2), Sampling(max_tokens=4, seed=1)]
    found = lm.generate(TEXTS, own, ignore_eos=True)
    for text, sampling, each in zip(TEXTS, own, found, strict=True):
        assert each.token_ids == plain.generate(text, sampling, ignore_eos=True)[0].token_ids
        assert len(each.token_ids) == sampling.max_tokens
    one, other = lm.generate(TEXTS[1], {"temperature": 1.0, "seed": 2}), lm.generate(TEXTS[1], temperature=1.0, seed=2)
    assert one[0].text == other[0].text
    with refused(ConfigError, "sampling has 2 entries for 3 prompts"):
        lm.generate(TEXTS, own[:2])
    for bad in (5, "hot", [Sampling(), 5, Sampling()]):
        with refused(ConfigError, "sampling must be a Sampling, a dict of its fields or None", "Sampling(temperature"):
            lm.generate(TEXTS, bad)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_new_tokens", "did you mean max_tokens?"),
        ("do_sample", "did you mean temperature (0 is greedy"),
        ("num_return_sequences", "did you mean n?"),
        ("stop_token_ids", "did you mean stop_tokens?"),
        ("temprature", "did you mean temperature?"),
        ("zzz", "the options are temperature"),
    ],
)
def test_names_of_other_libraries_are_hinted_at(name, hint, lm):
    for call in (lm.generate, lm.stream):
        with refused(ConfigError, f"unknown sampling option {name!r}", hint):
            call("x", **{name: 1})
    with refused(ConfigError, f"unknown sampling option {name!r}", hint):
        lm.generate("x", {name: 1})


@pytest.mark.parametrize(
    "prompt",
    [None, 5, 1.5, {"role": "user", "content": "x"}, b"def", "\ud800", [True], [[1, [2]]], [None], ["x", None]],
    ids=repr,
)
def test_bad_prompts_are_refused_before_any_work(prompt, lm, monkeypatch):
    lm.engine()  # which measures once what steps cost
    monkeypatch.setattr(dw.Decoder, "step", lambda self: pytest.fail("a step was taken"))
    with refused(PromptError):
        lm.generate(prompt)
    with refused(PromptError):
        lm.generate(["good", prompt])
    with refused(PromptError):
        lm.stream(prompt)


def test_options_of_load(folder):
    with refused(ConfigError, "budget must be a Budget or None, found 5", "Budget(5)"):
        dw.load(folder, budget=5)
    for bad in (5, b"x", "", ["a"]):
        with refused(ConfigError, "target must be a folder or a hub id, found"):
            dw.load(bad)
        with refused(ConfigError, "draft must be a folder or a hub id, found"):
            dw.load(folder, bad)
    for bad in ("float8", 5, torch.int8, ["float32"], None):
        with refused(ConfigError, "unknown dtype", "choose one of float64, float32"):
            dw.load(folder, dtype=bad)
    for bad in (5.5, "tpu", ["cpu"]):
        with refused(ConfigError, "device", "use cpu or cuda"):
            dw.load(folder, device=bad)
    with refused(ConfigError, "draft_options: lookup has no option 'depth'", "it has min_match"):
        dw.load(folder, "lookup", draft_options={"depth": 3})
    with refused(ConfigError, "draft_options: none has no option 'min_match'", "leave draft_options out"):
        dw.load(folder, "none", draft_options={"min_match": 3})
    for bad in (0, "2", True, 1.5):
        with refused(ConfigError, "draft_options: min_match must be at least 1, found"):
            dw.load(folder, "lookup", draft_options={"min_match": bad})


def test_dtypes_and_draft_options(folder, folder_of):
    assert dw.load(folder, dtype="auto", device="cpu").target.dtype == torch.float64  # as the checkpoint was saved
    assert dw.load(folder, dtype=torch.float64, device=torch.device("cpu")).target.dtype == torch.float64
    assert dw.load(folder, device="cpu").target.dtype == torch.float32
    for least, wanted in ((1, [0, 1]), (3, [0, 0])):  # if one token is wanted there is nothing to draft
        lm = dw.load(folder, "lookup", dtype="float64", device="cpu", draft_options={"min_match": least})
        options = {"ignore_eos": True, "speculation": dw.Budget(2)}
        found = [lm.generate([[5, 6, 7, 5]], max_tokens=count, **options)[0] for count in (1, 2)]
        assert [each.stats.num_drafted for each in found] == wanted


def test_speculation_of_one_call(lm, plain):
    options = {"max_tokens": 16, "ignore_eos": True}
    wanted = plain.generate(TEXTS, **options)
    for wish, depth in (("none", 0), (dw.Budget(2), 2), (dw.Budget(4, 2), 4)):
        found = lm.generate(TEXTS, speculation=wish, **options)
        assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
        assert max(len(each.stats.reached) for each in found) <= depth
        steps = list(lm.stream(TEXTS[2], speculation=wish, **options))
        assert max(step.step.rows[0].depth for step in steps) <= depth
    with refused(ConfigError, "speculation must be a Budget"):
        lm.stream("x", speculation="lots")


def test_every_step_of_a_batch_is_told(lm):
    texts = {0: "", 1: "", 2: ""}

    def on_step(place, found):
        texts[place] += found.text
        assert len(found.step.rows) == 1

    found = lm.generate(TEXTS, max_tokens=9, on_step=on_step, max_batch=2)
    assert list(texts.values()) == [each.text for each in found]


# --- seconds ---------------------------------------------------------------------------------------------------------


def test_a_batchs_seconds_are_counted_once(target):
    own, steps = Engine(dw.Decoder(target)), []
    requests = [own.submit(*each) for each in zip(PROMPTS, samplings(), strict=True)]
    steps.extend(own.steps())
    wall = sum(step.timings.total for step in steps)
    whole, added = Stats.of(steps), Stats.sum(each.stats for each in requests)
    assert whole.total_seconds == pytest.approx(wall)
    assert added.total_seconds == pytest.approx(wall)
    assert added.elapsed == pytest.approx(wall)
    assert added.num_tokens == whole.num_tokens == sum(len(each.token_ids) for each in requests)
    assert added.tokens_per_s == pytest.approx(whole.num_tokens / wall)
    longest = requests[-1]  # it was in every step
    assert longest.stats.elapsed == pytest.approx(wall)
    assert longest.stats.total_seconds < 0.6 * wall


# --- asyncio ---------------------------------------------------------------------------------------------------------


def test_streams_run_beside_each_other_in_one_event_loop(lm):
    options = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    wanted = [each.text for each in lm.generate(TEXTS, **options)]

    async def read(text):
        return "".join([step.text async for step in lm.astream(text, **options)])

    async def everything():
        return await asyncio.gather(*map(read, TEXTS))

    assert asyncio.run(everything()) == wanted


def test_a_stream_is_cancelled_between_two_steps(lm):
    heard = []

    async def listen(enough):
        async for step in lm.astream(TEXTS[0], max_tokens=200, ignore_eos=True):
            heard.append(step)
            if len(heard) == 3:
                enough.set()
            await asyncio.sleep(0)

    async def stop_it():
        enough = asyncio.Event()
        task = asyncio.create_task(listen(enough))
        await enough.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async for step in lm.astream(TEXTS[1], max_tokens=200, ignore_eos=True):
            heard.append(step)
            break

    asyncio.run(stop_it())
    assert 4 <= len(heard) < 150
    with refused(PromptError):
        asyncio.run(anext(lm.astream(None)))


def test_a_small_tree_is_drafted_whatever_the_engine_drafts(target, maker):
    own = Engine(dw.Decoder(target, maker("lm"), budget=dw.Budget(0)))
    own.submit(PROMPTS[0], samplings()[0])
    own.submit(PROMPTS[1], samplings()[1], speculation=dw.Budget(2))
    assert next(own.steps()).tree.num_nodes == 3
