"""Texts that are passed over: decoded as if there were no drafter, and without it."""

import numpy as np
import pytest
import torch

import draftwing as dw
from conftest import SMALL, add_tokenizer, check_engine, refused
from draftwing import decode, engine
from draftwing.budget.planner import Planner
from draftwing.engine import Engine
from draftwing.errors import ConfigError, PromptError
from draftwing.methods.causal_lm import CausalLMDrafter
from draftwing.methods.lookup import LookupDrafter
from draftwing.models.lean import LeanTarget
from draftwing.request import AtMost
from draftwing.sampling import Sampling
from draftwing.text.tokenizer import Tokenizer
from test_budget import COSTS
from test_engine import interrupt_at

VOCAB = SMALL["vocab_size"]
PROMPTS = ([5, 6, 9, 5, 6], [8, *range(20, 35)], [11, 12], [4])
OPTIONS = {"max_tokens": 9, "ignore_eos": True, "temperature": 1.0}


@pytest.fixture(scope="module")
def target(folder_of):
    return LeanTarget.from_folder(folder_of("llama"), torch.float64, name="tiny")


class Passing(Planner):
    """Passes every other text over, from the second one on."""

    def __init__(self):
        super().__init__(COSTS, dw.Budget(4))
        self.asked, self.budgets = [], 0

    def skips(self, temperature):
        self.asked.append(temperature)
        return len(self.asked) % 2 == 0

    def budget(self, *args):
        self.budgets += 1
        return super().budget(*args)


class Seen(CausalLMDrafter):
    """A drafter that says which prompts it read."""

    def __init__(self, target, prompts):
        super().__init__(target, VOCAB)
        self.prompts = prompts

    def admit(self, ctx, features):
        self.prompts.append(ctx.rows[-1].tokens[: ctx.rows[-1].prompt_length])
        super().admit(ctx, features)


def engine_of(target, prompts, max_batch=1):
    planner = Passing()
    return Engine(dw.Decoder(target, lambda: Seen(target, prompts), planner=planner), max_batch=max_batch), planner


def submit_all(engine, **options):
    return [engine.submit(prompt, Sampling(seed=seed, **OPTIONS), **options) for seed, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def texts(target):
    baseline = Engine(dw.Decoder(target), max_batch=1)
    requests = submit_all(baseline)
    baseline.run()
    return [request.token_ids for request in requests]


def test_a_text_that_is_passed_over_is_the_same_and_no_drafter_reads_it(target, texts):
    read = []
    own, planner = engine_of(target, read)
    found = submit_all(own)
    for _ in own.steps():
        check_engine(own)
    assert [each.token_ids for each in found] == texts
    assert read == [PROMPTS[0], PROMPTS[2]]
    assert planner.asked == [1.0] * 4
    assert planner.budgets == sum(len(each.rows) for each in found[::2])  # none is asked for the others
    assert [each.stats.num_forwards for each in found[1::2]] == [9, 9]
    assert all(each.stats.num_drafted for each in found[::2])


def test_a_text_that_ends_from_outside_gives_the_drafter_back(target):
    read = []
    own, _ = engine_of(target, read)
    first, second, third = (own.submit(prompt, Sampling(seed=1, **OPTIONS)) for prompt in PROMPTS[:3])
    while first.finish_reason is None or len(second.token_ids) < 4:
        own.step()
    own.cancel(second)
    own.run()
    assert read == [PROMPTS[0], PROMPTS[2]]
    assert (second.finish_reason, third.finish_reason) == ("cancelled", "length")


def test_a_prompt_that_is_refused_leaves_the_drafter_in_place(target, monkeypatch):
    read = []
    own, planner = engine_of(target, read)
    bad, good = (own.submit(PROMPTS[place], Sampling(seed=1, **OPTIONS)) for place in (1, 0))
    planner.asked.append(0.0)  # the first one is passed over
    read_tokens = target.read

    def refusing(ctx, row, start, stop):
        if row.tokens == PROMPTS[1]:
            raise PromptError("no: say something else")
        return read_tokens(ctx, row, start, stop)

    monkeypatch.setattr(target, "read", refusing)
    own.run()
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    with refused(PromptError, "no"):
        raise bad.error
    assert read == [PROMPTS[0]]


@pytest.mark.parametrize("at", range(1, 130, 16))
def test_an_interrupt_loses_nothing(at, target, texts):
    """In a text that is passed over, where it begins, and where it ends."""
    own, _ = engine_of(target, [])
    found = submit_all(own)
    files = {module.__file__ for module in (decode, engine)}
    while any(each.finish_reason is None for each in found):
        ends = found[0].finish_reason is not None and found[2].finish_reason is None
        count = interrupt_at(at if ends else 0, own.step, files)
        if ends and count == at:  # then the next one goes through: some lines are met in every step
            own.step()
        check_engine(own)
    assert [each.token_ids for each in found] == texts
    last = own.submit(PROMPTS[0], Sampling(seed=0, **OPTIONS), speculation=dw.Budget(2))
    own.run()
    assert last.stats.num_drafted  # the drafter is back


def test_a_text_that_was_passed_over_is_drafted_for_after_an_interrupt(target):
    """Its rows are made again, now with a drafter."""
    own, planner = engine_of(target, [])
    _, second, *_ = submit_all(own)
    while not second.token_ids:
        own.step()
    budgets, at = planner.budgets, 1
    while not own.decoder.generation:
        interrupt_at(at, own.step, {decode.__file__})
        at += 8
    assert second.finish_reason is None
    own.step()
    assert planner.budgets > budgets


@pytest.mark.parametrize(
    ("wishes", "asked"),
    [
        ({}, 4),
        ({"speculation": dw.Budget(2)}, 0),
        ({"speculation": AtMost(2)}, 0),
        ({"speculation": "none"}, 0),
        ({"references": [[5, 6, 7]]}, 0),
    ],
)
def test_what_speaks_for_drafts_is_heard(wishes, asked, target, texts):
    own, planner = engine_of(target, [])
    found = submit_all(own, **wishes)
    own.run()
    assert [each.token_ids for each in found] == texts
    assert len(planner.asked) == asked


def test_a_constrained_text_is_not_passed_over(target):
    """Its masks make single tokens certain, which drafts may use."""

    class Anything:
        def start(self):
            return self

        def allowed(self):
            return np.full(-(-VOCAB // 32), 2**32 - 1, dtype=np.uint32)

        def take(self, token):
            pass

        def fork(self):
            return self

    own, planner = engine_of(target, [])
    request = own.submit(PROMPTS[0], Sampling(max_tokens=3, seed=0), constraint=Anything())
    own.run()
    assert request.error is None
    assert not planner.asked


def test_rows_that_may_run_together_are_not_passed_over(target):
    for most in (2, None):
        own, planner = engine_of(target, [], max_batch=most)
        own.submit(PROMPTS[0], Sampling(seed=0, **OPTIONS))
        own.run()
        assert not planner.asked


def test_with_pages_nothing_is_passed_over(target, texts):
    """A later request may start with slots that the drafter must have read too."""
    planner, read = Passing(), []
    decoder = dw.Decoder(target, lambda: Seen(target, read), planner=planner, kv_memory=1 << 22, max_batch=1)
    own = Engine(decoder, max_batch=1)
    found = submit_all(own)
    own.run()
    assert [each.token_ids for each in found] == texts
    assert not planner.asked
    assert read == [*PROMPTS]


def test_a_drafter_that_costs_next_to_nothing_or_remembers_is_always_there(target):
    learning = CausalLMDrafter(target, VOCAB)
    learning.learns = True
    for drafter in (LookupDrafter(VOCAB, 1), learning):
        planner = Passing()
        own = Engine(dw.Decoder(target, drafter, planner=planner), max_batch=1)
        own.submit(PROMPTS[0], Sampling(seed=0, **OPTIONS))
        own.run()
        assert not planner.asked


def test_lone_texts_of_an_lm_are(target, tmp_path, monkeypatch):
    """By ``stream``, and by ``generate`` of one prompt; not several at once."""
    planner = Passing()
    monkeypatch.setattr("draftwing.lm.planner_for", lambda *_: planner)
    lm = dw.LM(target, Tokenizer(add_tokenizer(tmp_path)), lambda: CausalLMDrafter(target, VOCAB))
    sampling = Sampling(max_tokens=3, seed=0)
    list(lm.stream(PROMPTS[0], sampling))
    lm.generate([PROMPTS[0]], sampling)
    assert len(planner.asked) == 2
    lm.generate([PROMPTS[0]], sampling, n=2)
    lm.generate(PROMPTS[:2], sampling)
    assert len(planner.asked) == 2
    assert planner.budgets > 0
    with refused(ConfigError, "max_batch must be at least 1"):
        lm.generate([PROMPTS[0]], sampling, max_batch=0)
