"""Drafters that fail in mid-step: the text goes on without them; and a row that fails among many."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

import draftwing as dw
from conftest import SMALL, refused
from draftwing import decode as faults
from draftwing.budget.costs import Costs, Curve
from draftwing.budget.planner import Planner
from draftwing.engine import Engine
from draftwing.errors import ConfigError, DraftwingError, DraftwingWarning
from draftwing.methods.base import NoDrafter
from draftwing.methods.causal_lm import CausalLMDrafter
from draftwing.methods.lookup import LookupDrafter
from draftwing.models.lean import LeanTarget
from draftwing.sampling import Sampling

VOCAB = SMALL["vocab_size"]
PROMPTS = ([5, 6, 9, 5, 6], [8, *range(20, 35)], [11, 12], [13, 4])


@pytest.fixture(scope="module")
def target(folder_of):
    return LeanTarget.from_folder(folder_of("llama"), torch.float64, name="tiny")


def samplings(max_tokens=14):
    return [
        Sampling(max_tokens=max_tokens + row, temperature=float(row % 2), seed=row, ignore_eos=True)
        for row in range(len(PROMPTS))
    ]


@pytest.fixture(scope="module")
def expected(target):
    own = Engine(dw.Decoder(target))
    requests = [own.submit(*each) for each in zip(PROMPTS, samplings(), strict=True)]
    own.run()
    return [each.token_ids for each in requests]


class Failing(CausalLMDrafter):
    """Fails at the calls that a class of it says: by the name of the method and its number among all such calls."""

    fails: ClassVar[dict[str, tuple[int, ...]]] = {}
    error: BaseException = ZeroDivisionError("by nothing")
    calls: ClassVar[dict[str, int]] = {}

    def _count(self, name):
        calls = type(self).calls
        calls[name] = calls.get(name, 0) + 1
        if calls[name] in self.fails.get(name, ()):
            raise self.error

    def admit(self, ctx, features):
        super().admit(ctx, features)
        self._count("admit")

    def propose(self, ctx, sampling, budget):
        found = super().propose(ctx, sampling, budget)
        self._count("propose")
        return found

    def observe(self, ctx, tree, accepted, output):
        self._count("observe")
        super().observe(ctx, tree, accepted, output)

    def remove(self, ctx, row):
        self._count("remove")
        super().remove(ctx, row)


def failing(target, error=None, **at):
    """A maker of drafters that fail so, all counted together."""
    kind = type("Failing", (Failing,), {"fails": at, "calls": {}, "error": error or Failing.error})
    return lambda: kind(target, VOCAB)


def engine_with(target, maker, max_batch=None):
    decoder = dw.Decoder(target, maker, budget=dw.Budget(3, 2))
    own = Engine(decoder, max_batch=max_batch)
    return decoder, own, [own.submit(*each) for each in zip(PROMPTS, samplings(), strict=True)]


@pytest.mark.parametrize(
    ("at", "error"),
    [
        ({"propose": (2,)}, None),
        ({"propose": (2,)}, MemoryError()),
        ({"observe": (3,)}, DraftwingError("it says so itself")),
        ({"admit": (2,)}, None),
        ({"remove": (1,)}, MemoryError()),
        ({"propose": (1, 3), "observe": (2,)}, None),
    ],
)
def test_a_text_goes_on_without_a_drafter_that_fails(at, error, target, expected):
    for max_batch in (None, 2) if error is None else (None,):
        decoder, own, requests = engine_with(target, failing(target, error, **at), max_batch)
        drafted = []
        for step in own.steps():
            step.tree.check(VOCAB)
            drafted.append(step.tree.num_nodes > 1)
        assert [each.token_ids for each in requests] == expected
        assert all(each.finish_reason == "length" for each in requests)
        assert decoder.faults.num == sum(map(len, at.values()))
        assert type(decoder.faults.last) is type(error or Failing.error)
        assert any(drafted[-6:]) or (max_batch is None and "admit" in at)  # a fresh one drafts again
        if "propose" in at:
            assert not drafted[at["propose"][0] - 1]
        later = own.submit(*next(zip(PROMPTS, samplings(), strict=True)))
        own.run()
        assert later.token_ids == expected[0]
        assert later.stats.num_drafted > 0


@pytest.mark.parametrize("name", ["propose", "observe", "admit"])
def test_a_drafter_that_always_fails_is_given_up(name, target, expected):
    decoder, own, requests = engine_with(target, failing(target, **{name: tuple(range(1, 99))}), 1)
    with pytest.warns(DraftwingWarning, match="failed 3 times in a row, the last time with ZeroDivisionError") as told:
        own.run()
    assert len(told) == 1
    assert [each.token_ids for each in requests] == expected
    assert decoder.faults.num == faults.MAX_FAULTS
    assert decoder.drafter.name == "none"


def test_a_budget_without_a_drafter_needs_no_planner(target):
    planner = Planner(Costs(Curve(((1, 1.0), (64, 1.1)))), dw.Budget(9, 4, 30))
    decoder = dw.Decoder(target, failing(target, admit=tuple(range(1, 99))), budget=dw.Budget(2), planner=planner)
    own = Engine(decoder, max_batch=1)
    assert decoder.largest_budget == planner.largest
    for each in zip(PROMPTS, samplings(), strict=True):
        own.submit(*each)
    with pytest.warns(DraftwingWarning, match="drafting is off"):
        own.run()
    assert decoder.largest_budget == decoder.budget


def test_faults_far_apart_are_not_in_a_row(target, expected):
    decoder, own, requests = engine_with(target, failing(target, propose=(1, 4, 7, 10)), 1)
    own.run()
    assert [each.token_ids for each in requests] == expected
    assert (decoder.faults.num, decoder.faults.in_a_row) == (4, 0)


def test_what_cannot_even_be_made_again_is_given_up(target, expected):
    makers = iter([failing(target, propose=(2,))])

    def make():
        return next(makers)()

    _, own, requests = engine_with(target, make)
    with pytest.warns(DraftwingWarning, match="StopIteration"):
        own.run()
    assert [each.token_ids for each in requests] == expected


class Choosy(LookupDrafter):
    """Takes no prompt that begins with 13."""

    def admit(self, ctx, features):
        if ctx.rows[-1].tokens[0] == 13:
            raise DraftwingError("no thirteen")
        super().admit(ctx, features)


def test_a_row_that_a_drafter_cannot_take_is_decoded_plainly(target, expected):
    """While it runs nobody is drafted for; each such row counts once, and the others keep their drafter for later."""
    decoder = dw.Decoder(target, lambda: Choosy(VOCAB, 1), budget=dw.Budget(3))
    own = Engine(decoder, max_batch=1)
    for number in range(1, 4):
        bad = own.submit(PROMPTS[3], samplings()[3])
        good = own.submit([7, 7, 7, 7, 7, 7], Sampling(max_tokens=20, logit_bias={7: 1e6}))
        own.run()
        assert bad.token_ids == expected[3]
        assert (decoder.faults.num, str(decoder.faults.last)) == (number, "no thirteen")
        assert (bad.stats.num_drafted, good.stats.num_accepted > 5) == (0, True)


def test_a_drafter_that_was_given_cannot_be_replaced(target):
    decoder = dw.Decoder(target, failing(target, observe=(1,))(), budget=dw.Budget(3))
    decoder.admit(PROMPTS[0], samplings()[0])
    with pytest.raises(ZeroDivisionError):
        decoder.step()
    with refused(ConfigError, "a step was interrupted", "admit the requests to a new Decoder"):
        decoder.step()
    refusing = dw.Decoder(target, Choosy(VOCAB, 1))
    with refused(DraftwingError, "no thirteen"):
        refusing.admit(PROMPTS[3], samplings()[3])
    assert (refusing.ctx.num_rows, refusing.running) == (0, ())


def test_an_interrupt_in_a_drafter_is_nobodys_fault(target, expected):
    decoder, own, requests = engine_with(target, failing(target, KeyboardInterrupt(), propose=(2,), observe=(4,)))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            own.run()
    own.run()
    assert [each.token_ids for each in requests] == expected
    assert decoder.faults.num == 0


class Unlucky(NoDrafter):
    """Learns, and fails at it."""

    learns = True

    def learn(self):
        raise RuntimeError("too hard")


def test_learning_that_fails_is_a_fault_too(target, expected):
    decoder, own, requests = engine_with(target, Unlucky)
    with pytest.warns(DraftwingWarning, match="too hard"):
        own.run()
    assert [each.token_ids for each in requests] == expected
    assert decoder.faults.num == faults.MAX_FAULTS
