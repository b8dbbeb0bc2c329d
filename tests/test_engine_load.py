"""Under load: prompts in pieces, slots of a stated amount, rows that give way and come back. No text changes by it."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

import draftwing as dw
from conftest import SMALL, add_tokenizer, check_engine, refused
from draftwing import engine as load
from draftwing.decode import Decoder
from draftwing.engine import Engine
from draftwing.errors import ConfigError, PromptError, SlotsError, UnsupportedError
from draftwing.methods.base import Drafter
from draftwing.models.adapter import AdapterTarget
from draftwing.models.context import FeatureSpec
from draftwing.models.lean import LeanTarget
from draftwing.models.paged import PAGE, PageTable, SlotsExhausted, pages_of
from draftwing.request import AtMost
from draftwing.sampling import Sampling
from draftwing.tree import DraftTree
from test_exact import DRAFTERS, FUSED

VOCAB = SMALL["vocab_size"]
CHUNK = 24
NAMES = ("none", "lookup-tree", "eagle1-rule", "eagle3-dynamic", "lm-tree")
OTHERS = (
    *("lm-rule", "eagle3-chain", "eagle1-rule-chain", "eagle3+lookup-rule", "lookahead", "skip-rule"),
    *("kangaroo-dynamic", "mtp-modules-tree", "mtp-dynamic", "view-snapkv", "medusa-rule", "eagle3-online-rule"),
    *("exit-dynamic", "dflash-chain", "suffix-tree", "lm-static", "eagle1-chain", "view-window", "self-chain"),
)
FAMILIES = tuple(name for name in ("llama", "kernel") if name == "llama" or name in FUSED)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(load, "PREFILL_CHUNK", CHUNK)


def requests(count=7, seed=0):
    """Prompts of 1 to 150 tokens, some of which begin alike, and all kinds of settings."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB) for _ in range(140)]
    kinds = (
        {"temperature": 0.0},
        {"temperature": 1.0, "logprobs": 2},
        {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.2},
        {"temperature": 1.0, "stop_tokens": (7, 8, 9)},
    )
    made = []
    for number in range(count):
        length = rng.choice((1, 2, 40, 66, 100))
        prompt = [rng.randrange(3, VOCAB) for _ in range(length)]
        if number % 3 == 0:
            prompt = shared[: rng.choice((64, 65, 66, 130, 140))] + prompt[:9]
        kind = kinds[number % len(kinds)]
        made.append((prompt, Sampling(max_tokens=rng.randint(10, 30), seed=number, ignore_eos=True, **kind)))
    return made


ALONE = {}


def alone(here, family, prompt, sampling):
    """What it is by itself, plainly, over slots as they always were."""
    key = family, tuple(prompt), sampling.seed, sampling.temperature, sampling.max_tokens
    if key not in ALONE:
        own = Engine(dw.Decoder(here.target))
        request = own.submit(prompt, sampling)
        own.run()
        ALONE[key] = request
    return ALONE[key]


def engine_of(here, name, pages, *, max_batch=4, **options):
    """An engine with memory for so many pages of target and drafter."""
    make = None if name == "none" else partial(DRAFTERS[name].make, here, "greedy")
    budget = dw.Budget(0) if name == "none" else DRAFTERS[name].budget
    if make is not None:
        make()  # a head is trained where it is first asked for
    probe = Decoder(here.target, make, budget=budget, kv_memory=1 << 26, max_batch=max_batch)
    num_bytes = (pages + 2) * probe.pages.num_page_bytes
    decoder = Decoder(here.target, make, budget=budget, kv_memory=num_bytes, max_batch=max_batch)
    assert decoder.pages.num_pages == pages
    return Engine(decoder, max_batch=max_batch, **options)


def same_text(request, expected):
    assert request.token_ids == expected.token_ids
    assert (request.finish_reason, request.error) == (expected.finish_reason, None)
    found, wanted = request.logprobs, expected.logprobs
    assert [each.token for each in found] == [each.token for each in wanted]
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in wanted], abs=1e-5)


def run_all(own, work, *, late=3, dice=None):
    """Submit on the way, step to the end, and check after every step; by ``dice`` rows are made to give way."""
    waiting = list(work)
    made = [own.submit(*waiting.pop(0)) for _ in range(min(late, len(waiting)))]
    while own.num_running or own.num_waiting or waiting:
        if waiting:
            made.append(own.submit(*waiting.pop(0)))
        step = own.step()
        assert all(row.token_ids or row.error for row in step.rows)
        if dice is not None and dice.random() < 0.1:
            own.preempt()
        check_engine(own)
        assert own.stats.num_slots_used <= own.stats.num_slots
    return made


def cases():
    """The main drafters by the kernel, one of them by PyTorch too; the rest is marked."""
    few = [(name, FAMILIES[-1]) for name in (*NAMES, "medusa-rule")] + [("eagle3-dynamic", "llama")]
    for name in (*NAMES, *OTHERS):
        for family in FAMILIES:
            yield pytest.param(name, family, marks=() if (name, family) in few else pytest.mark.full)


@pytest.mark.parametrize(("name", "family"), [*cases()])
def test_texts_are_those_of_requests_alone(name, family, lab):
    here, work = lab(family), requests()
    own = engine_of(here, name, 10)
    memory = [(cache.data.data_ptr(), cache.data.nbytes) for cache in own.decoder.pages.caches]
    made = run_all(own, work, dice=random.Random(5))
    for request, each in zip(made, work, strict=True):
        same_text(request, alone(here, family, *each))
    stats = own.stats
    assert stats.num_preempted
    assert bool(stats.num_prefix_hits >= PAGE) == own.decoder.shares_prefixes
    assert stats.num_prefix_hits < stats.num_prefix_queries
    assert (stats.num_running, stats.num_waiting, stats.num_slots_used) == (0, 0, 0)
    assert [(cache.data.data_ptr(), cache.data.nbytes) for cache in own.decoder.pages.caches] == memory


@pytest.mark.parametrize(
    "name", ["eagle3-dynamic", *(pytest.param(name, marks=pytest.mark.full) for name in NAMES if name[:6] != "eagle3")]
)
def test_sixteen_others_change_nothing(name, lab):
    here = lab(FAMILIES[-1])
    work = [(ids, replace(each, max_tokens=60, stop_tokens=())) for ids, each in requests(17)]  # all are there at once
    own = engine_of(here, name, 150, max_batch=17, optimism=1.0)
    made = [own.submit(*each) for each in work]
    most = 0
    while own.num_running or own.num_waiting:
        own.step()
        most = max(most, own.num_running)
    check_engine(own)
    assert most > 11  # texts end sooner the better they are drafted
    for request, each in zip(made, work, strict=True):
        same_text(request, alone(here, FAMILIES[-1], *each))


@pytest.mark.parametrize("others", ["limits", "budgets"])
@pytest.mark.parametrize(
    "name",
    [
        *("eagle3-dynamic", "eagle1-rule", "lookup-tree", "lookahead"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("lm-static", "eagle3+lookup-rule", "eagle1-chain")),
    ],
)
def test_each_row_has_no_more_nodes_than_it_wants(name, others, lab):
    here, work = lab(FAMILIES[-1]), requests(6, seed=2)
    wishes = [AtMost(1), AtMost(3), None, AtMost(2), None, AtMost(500)]
    if others == "budgets":
        wishes[2], wishes[4] = dw.Budget(2), "none"
    own = engine_of(here, name, 60, max_batch=6)
    made = [own.submit(*each, speculation=wish) for each, wish in zip(work, wishes, strict=True)]
    own.run()
    check_engine(own)
    for request, each in zip(made, work, strict=True):
        same_text(request, alone(here, FAMILIES[-1], *each))
    most = [max(row.num_drafted for row in request.rows) for request in made]
    assert all(found <= wish.nodes for found, wish in zip(most, wishes, strict=True) if isinstance(wish, AtMost))
    if others == "budgets":
        assert (most[2] <= 2, most[4]) == (True, 0)
    if not name.startswith("look"):  # these find a match now and then
        assert (most[0], most[5] > 3) == (1, True)


@pytest.mark.parametrize("nodes", [0, -1, 5000, True, 2.0])
def test_a_limit_is_a_number_of_nodes(nodes):
    with refused(ConfigError, "1 to 4,096 nodes"):
        AtMost(nodes)


@pytest.fixture(scope="module")
def target(folder_of):
    return LeanTarget.from_folder(folder_of("llama", head_dim=32), torch.float32, name="tiny")


def plain_engine(target, pages, **options):
    page_bytes = Decoder(target, kv_memory=1 << 26, max_batch=1).pages.num_page_bytes
    max_batch = options.get("max_batch")
    return Engine(Decoder(target, kv_memory=(pages + 2) * page_bytes, max_batch=max_batch), **options)


def text_of(target, prompt, sampling):
    own = Engine(dw.Decoder(target))
    request = own.submit(prompt, sampling)
    own.run()
    return request.token_ids


@cache
def text_alone(target, prompt, max_tokens):
    return text_of(target, list(prompt), Sampling(max_tokens=max_tokens, ignore_eos=True))


def texts_alone(target, work):
    return [text_alone(target, tuple(prompt), sampling.max_tokens) for prompt, sampling in work]


def long_ones(count, max_tokens=90, seed=3):
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(40)] for _ in range(count)]
    return [(prompt, Sampling(max_tokens=max_tokens, ignore_eos=True)) for prompt in prompts]


# --- memory ----------------------------------------------------------------------------------------------------------


def test_the_youngest_gives_way_where_optimism_was_wrong(target, monkeypatch):
    work = long_ones(4)
    own = plain_engine(target, 10, optimism=1.0)
    made = [own.submit(*each) for each in work]
    gone, tried, step = [], [], own.decoder.step
    monkeypatch.setattr(own.decoder, "step", lambda: tried.append(1) or step())
    while own.num_running or own.num_waiting:
        before = set(own.decoder.running)
        tried.clear()
        own.step()
        assert len(tried) == 1  # who gives way does so before a step finds too few slots
        check_engine(own)
        gone += [each.id for each in before if each not in own.decoder.running and each.finish_reason is None]
    assert gone
    assert own.stats.num_preempted == len(gone)
    assert 0 not in gone  # the first one keeps its slots
    assert [each.token_ids for each in made] == texts_alone(target, work)


def test_whoever_matters_least_gives_way_and_comes_last(target):
    work = long_ones(4, max_tokens=70)
    own = plain_engine(target, 9, optimism=1.0)
    made = [own.submit(*each, priority=priority) for each, priority in zip(work, (-1, 0, 2, 2), strict=True)]
    ended = []
    while own.num_running or own.num_waiting:
        ended += [row.request_id for row in own.step().rows if row.finish_reason]
        check_engine(own)
    assert ended == [2, 3, 1, 0]
    assert own.stats.num_preempted
    assert [each.token_ids for each in made] == texts_alone(target, work)


def test_without_optimism_nobody_gives_way(target):
    work = long_ones(5)
    own = plain_engine(target, 10, optimism=0.0)
    made = run_all(own, work, late=5)
    assert own.stats.num_preempted == 0
    assert [each.token_ids for each in made] == texts_alone(target, work)


@pytest.mark.parametrize("missing", [0, 1])
def test_who_comes_in_finds_all_of_its_pages(missing, target):
    """Without optimism: there are exactly as many pages as two requests need, or one less, so the second one waits."""
    work = long_ones(2)
    needs = pages_of(40 + 90 + load.tree_slots([dw.Budget()]))
    own = plain_engine(target, 2 * needs - missing, optimism=0.0)
    made, most = [own.submit(*each) for each in work], 0
    for _ in range(12):
        most = max(most, len(own.step().rows))
    assert most == 2 - missing
    own.run()
    assert own.stats.num_preempted == 0
    assert [each.token_ids for each in made] == texts_alone(target, work)


@pytest.mark.parametrize(("is_running", "missing", "most"), [(True, 2, 2), (True, 3, 1), (False, 0, 2), (False, 1, 1)])
def test_pages_in_common_are_saved_only_while_a_row_holds_them(is_running, missing, most, target):
    """The second of two requests finds two of its pages: the first one's, or those of a request that has ended."""
    (prompt, sampling), (other, _) = ((each * 4, sampling) for each, sampling in long_ones(2, max_tokens=40))
    needs = pages_of(len(prompt) + 40 + load.tree_slots([dw.Budget()]))
    own, found = plain_engine(target, 2 * needs - missing, optimism=0.0), 0
    if not is_running:
        own.submit(prompt, Sampling(max_tokens=1))
        own.run()
    made = [own.submit(prompt if is_running else other, sampling)]
    own.step()
    made.append(own.submit(prompt, sampling))
    for _ in range(12):
        found = max(found, len(own.step().rows))
    assert found == most
    own.run()
    assert made[1].num_cached >= 2 * PAGE
    assert own.stats.num_preempted == 0
    assert [each.token_ids for each in made] == [text_of(target, each.prompt_ids, sampling) for each in made]


def test_a_limit_beyond_the_context_needs_the_memory_of_the_context(target):
    needs = pages_of(target.max_length + load.tree_slots([dw.Budget()]))
    own = plain_engine(target, 2 * needs, optimism=0.0)
    made = [own.submit(prompt, sampling) for prompt, sampling in long_ones(2, max_tokens=10**6)]
    for _ in range(4):
        own.step()
    assert own.num_running == len(made)


def test_a_prompt_that_gives_way_while_it_is_read_comes_back(target):
    own = plain_engine(target, 16)
    first = own.submit([5, 6], Sampling(max_tokens=30, ignore_eos=True))
    own.step()
    other = own.submit([7] * 200, Sampling(max_tokens=4, ignore_eos=True))
    own.step()
    assert own.prefill.request is other
    assert own.preempt()
    assert (own.num_running, own.num_waiting, own.stats.num_preempted) == (1, 1, 1)
    own.run()
    check_engine(own)
    for request in (first, other):
        assert request.token_ids == text_of(target, request.prompt_ids, request.sampling)


def test_a_preempted_row_finds_its_own_tokens_again(target):
    own = plain_engine(target, 16)
    first, second = (own.submit([token], Sampling(max_tokens=200, ignore_eos=True)) for token in (5, 6))
    while len(second.token_ids) < 2 * PAGE + 9:
        own.step()
    used, hits = own.stats.num_slots_used, own.stats.num_prefix_hits
    assert 2 * len(second.token_ids) <= used <= 16 * PAGE
    assert used % PAGE == 0
    assert own.preempt()
    assert own.stats.num_slots_used < used
    own.run()
    assert own.stats.num_prefix_hits - hits >= 2 * PAGE
    for request in (first, second):
        assert request.token_ids == text_of(target, request.prompt_ids, request.sampling)


def test_a_prompt_gives_way_if_it_matters_least_or_no_row_would_remain(target):
    """Two rows and a prompt that is being read: the last in rank gives way; and never the only row."""
    short = Sampling(max_tokens=30, ignore_eos=True)
    for priority, gives_way in ((-1, "prompt"), (0, "prompt"), (1, "row")):
        own = plain_engine(target, 16)
        first, second = own.submit([5, 6], short), own.submit([8, 9], short)
        own.step()
        late = own.submit([7] * 200, Sampling(max_tokens=4, ignore_eos=True), priority=priority)
        own.step()
        assert own.prefill.request is late
        assert own.preempt()
        assert (own.prefill is None) == (gives_way == "prompt")
        assert list(own.decoder.running) == ([first, second] if gives_way == "prompt" else [first])
        if gives_way == "row":
            assert own.preempt()  # the prompt matters more, but no row would remain
            assert own.prefill is None
            assert list(own.decoder.running) == [first]
            assert not own.preempt()
        own.run()
        check_engine(own)
        for request in (first, second, late):
            assert request.token_ids == text_of(target, request.prompt_ids, request.sampling)


def test_a_step_that_runs_out_of_slots_is_done_again(target, monkeypatch):
    """Where a drafter took more than anybody expected."""
    work = long_ones(3, max_tokens=60)
    own = plain_engine(target, 9, optimism=1.0)
    monkeypatch.setattr(load, "tree_slots", lambda budgets: -PAGE)
    made = run_all(own, work * 3, late=9)
    assert own.stats.num_preempted
    assert [each.token_ids for each in made] == texts_alone(target, work) * 3


def test_what_cannot_fit_is_refused(target, folder_of):
    own = plain_engine(target, 4)
    with refused(PromptError, "a prompt of 40 tokens and an answer of 200 do not fit", "kv_memory", "ask for"):
        own.submit(*long_ones(1, max_tokens=200)[0])
    with refused(PromptError, "do not fit into the 256 KV slots", "shorten it"):
        own.submit([5] * 250, Sampling(max_tokens=1))
    room = own.room_for(40)
    request = own.submit(long_ones(1)[0][0], Sampling(max_tokens=room, ignore_eos=True))
    own.run()
    assert len(request.token_ids) == room
    check_engine(own)
    for wrong in (0, -1, True, 1.5, "2G"):
        with refused(ConfigError, "kv_memory must be a number of bytes"):
            Decoder(target, kv_memory=wrong)
    with refused(ConfigError, "kv_memory=1,000 bytes is too small: it needs at least 4 blocks of 64 tokens"):
        Decoder(target, kv_memory=1000, max_batch=2)
    with refused(ConfigError, "optimism must be a number from 0 to 1, found 2"):
        Engine(Decoder(target, kv_memory=1 << 20, max_batch=2), optimism=2)
    from conftest import build

    with refused(UnsupportedError, "runs in transformers", "leave kv_memory out"):
        Decoder(AdapterTarget(build("gpt2")), kv_memory=1 << 20)


@pytest.mark.parametrize("references", ["text", [5], [[VOCAB]], [[-1]], [[True]], [["x"]], [[5], None]], ids=str)
def test_references_are_lists_of_ids(references, target):
    with refused(PromptError, "references must be lists of token ids from 0 to", "encode each text first"):
        Engine(dw.Decoder(target)).submit([5], references=references)


def test_a_wide_tree_of_one_request_needs_room_while_it_runs(target):
    """And no longer: others are refused nothing afterwards."""
    own = plain_engine(target, 16)
    with refused(PromptError, "do not fit"):
        own.submit([5] * 40, Sampling(max_tokens=40), speculation=dw.Budget(1000))
    room = own.room_for(40)
    wide = own.submit([5] * 40, Sampling(max_tokens=9, ignore_eos=True), speculation=dw.Budget(30, 20))
    other = own.submit([6] * 40, Sampling(max_tokens=9, ignore_eos=True))
    first = own.step()
    assert len(first.rows) == 1  # 16 pages do not hold two such trees
    own.run()
    check_engine(own)
    assert other.token_ids == text_of(target, [6] * 40, other.sampling)
    assert wide.finish_reason == "length"
    assert own.room_for(40) == room


# --- prompts in pieces -----------------------------------------------------------------------------------------------


def test_a_long_prompt_stalls_nobody(target):
    own = plain_engine(target, 16)
    short, long = own.submit([5, 6], Sampling(max_tokens=40, ignore_eos=True)), None
    own.step()
    long = own.submit([7] * 200, Sampling(max_tokens=4, ignore_eos=True))
    read, written = 0, len(short.token_ids)
    while not long.token_ids:
        own.step()
        check_engine(own)
        assert len(short.token_ids) == written + 1  # every step
        written += 1
        if own.prefill is not None:
            assert 0 < own.prefill.done - read <= CHUNK
            assert (own.num_running, own.num_waiting) == (1, 1)
            read = own.prefill.done
    assert read == 192  # 199 to read, 24 at a time
    own.run()
    assert long.token_ids == text_of(target, [7] * 200, Sampling(max_tokens=4, ignore_eos=True))


class Reads(Drafter):
    """Reads features and never resumes; raises once when it is ``broken``."""

    name, features, broken = "reads", FeatureSpec((1,)), False

    def __init__(self, seen: list[tuple[int, int]]) -> None:
        self.seen = seen

    def admit(self, ctx, features) -> None:
        self.seen.append((ctx.rows[-1].length, features.shape[1]))

    def propose(self, ctx, sampling, budget) -> DraftTree:
        broken, Reads.broken = Reads.broken, False
        if broken:
            raise ValueError("broken")
        return ctx.roots()


def test_a_prompt_that_is_read_again_from_its_start_has_its_features_once(target):
    """A drafter failed while it was being read, so that all rows are made again."""
    seen = []
    page_bytes = Decoder(target, lambda: Reads([]), kv_memory=1 << 26, max_batch=2).pages.num_page_bytes
    own = Engine(Decoder(target, lambda: Reads(seen), kv_memory=18 * page_bytes, max_batch=2), max_batch=2)
    own.submit([5, 6], Sampling(max_tokens=40, ignore_eos=True))
    own.step()
    long = own.submit([7] * 100, Sampling(max_tokens=4, ignore_eos=True))
    own.step()
    assert own.prefill.done
    Reads.broken = True
    own.run()
    check_engine(own)
    assert own.stats.num_faults == 1
    assert all(length == count for length, count in seen)
    assert (99, 99) in seen
    assert long.token_ids == text_of(target, [7] * 100, long.sampling)


class Keeps(Drafter):
    """Keeps the features of prompts."""

    name, features = "keeps", FeatureSpec((1,))

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def admit(self, ctx, features) -> None:
        self.kept.append(features.clone())

    def propose(self, ctx, sampling, budget) -> DraftTree:
        return ctx.roots()


def test_features_of_pieces_are_in_the_order_of_the_prompt(target):
    at_once, in_pieces, prompt = Keeps(), Keeps(), [3 + number % 29 for number in range(3 * CHUNK)]
    Decoder(target, at_once).admit(prompt, Sampling(max_tokens=4))
    own = Engine(Decoder(target, in_pieces, kv_memory=1 << 26, max_batch=2), max_batch=2)
    own.submit([5, 6], Sampling(max_tokens=40, ignore_eos=True))
    own.step()
    own.submit(prompt, Sampling(max_tokens=4))
    own.step()
    assert own.prefill.done
    own.run()
    assert at_once.kept[0].shape[1] == len(prompt) - 1
    assert torch.equal(at_once.kept[0], in_pieces.kept[1])


def test_on_a_cpu_pieces_are_smaller(target, monkeypatch):
    monkeypatch.setattr(load, "PREFILL_PIECE", 10)
    own = plain_engine(target, 16)
    own.submit([5, 6], Sampling(max_tokens=40, ignore_eos=True))
    own.step()
    long = own.submit([7] * 60, Sampling(max_tokens=4, ignore_eos=True))
    for done in (10, 20, 30):
        own.step()
        assert own.prefill.done == done
    own.run()
    assert long.token_ids == text_of(target, [7] * 60, Sampling(max_tokens=4, ignore_eos=True))


def test_short_prompts_come_in_together(target):
    own = plain_engine(target, 16)
    for number in range(4):
        own.submit([5 + number] * 8, Sampling(max_tokens=9, ignore_eos=True))
    assert len(own.step().rows) == 3  # 24 tokens, 7 of each
    assert len(own.step().rows) == 4


def test_a_prompt_that_is_being_read_can_be_cancelled_or_be_too_late(target):
    own = plain_engine(target, 16)
    first = own.submit([5, 6], Sampling(max_tokens=30, ignore_eos=True))
    own.step()
    for reason in ("cancelled", "deadline"):
        late = None if reason == "cancelled" else time.monotonic() + 1000
        other = own.submit([7] * 200, Sampling(max_tokens=4), deadline=late)
        own.step()
        assert own.prefill.request is other
        if reason == "cancelled":
            own.cancel(other)
        else:
            other.deadline = time.monotonic()
        own.step()
        check_engine(own)
        assert other.finish_reason == reason
        assert other.token_ids == []
        assert own.num_waiting == 0
    own.run()
    assert first.token_ids == text_of(target, [5, 6], first.sampling)
    assert own.stats.num_slots_used == 0


def test_a_long_prompt_alone_can_be_cancelled_from_another_thread(target, monkeypatch):
    own = plain_engine(target, 16)
    request = own.submit([7] * 200, Sampling(max_tokens=4))
    read = type(target).read

    def cancels(self, *args):
        other = threading.Thread(target=own.cancel, args=(request,))
        other.start()
        other.join()
        return read(self, *args)

    monkeypatch.setattr(type(target), "read", cancels)
    with refused(ConfigError, "nothing to decode"):
        own.step()
    check_engine(own)
    assert request.finish_reason == "cancelled"
    assert own.stats.num_prefix_queries == 199


# --- order and deadlines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paged", [False, True])
def test_priorities_and_deadlines(paged, target):
    own = plain_engine(target, 16, max_batch=1) if paged else Engine(dw.Decoder(target), max_batch=1)
    sampling = Sampling(max_tokens=5, ignore_eos=True)
    running = own.submit([5], sampling)
    own.step()
    low, usual, high, again = (own.submit([6], sampling, priority=each) for each in (-1, 0, 3, 3))
    late = own.submit([6], sampling, deadline=time.monotonic() - 1)
    in_time = own.submit([6], sampling, deadline=time.monotonic() + 1000)
    order = []
    while own.num_running or own.num_waiting:
        order += [row.request_id for row in own.step().rows if row.finish_reason]
        check_engine(own)
    assert order == [each.id for each in (running, high, again, usual, in_time, low)]
    assert (late.finish_reason, late.token_ids) == ("deadline", [])
    assert in_time.finish_reason == "length"
    stopped = own.submit([5], Sampling(max_tokens=100, ignore_eos=True), deadline=time.monotonic() + 1000)
    own.step()
    stopped.deadline = time.monotonic()
    with refused(ConfigError, "nothing to decode"):
        own.step()
    assert (stopped.finish_reason, len(stopped.token_ids)) == ("deadline", 1)
    ended = own.submit([5], sampling, deadline=time.monotonic() + 1000)
    while own.num_running or own.num_waiting:
        own.step()
    ended.deadline = time.monotonic()  # which comes too late to change how it ended
    own.submit([6], sampling)
    own.run()
    assert ended.finish_reason == "length"
    cancelled = own.submit([5], sampling)
    own.step()
    own.cancel(cancelled)
    with refused(ConfigError, "nothing to decode"):
        own.step()
    assert len(cancelled.token_ids) == 1
    for wrong in (1.5, "high", True):
        with refused(ConfigError, "priority must be a whole number, found"):
            own.submit([5], priority=wrong)
    for wrong in (float("nan"), "soon", True):
        with refused(ConfigError, "deadline must be seconds of time.monotonic() or None, found"):
            own.submit([5], deadline=wrong)
    check_engine(own)


# --- texts -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm(folder_of, tmp_path_factory):
    import shutil

    path = tmp_path_factory.mktemp("load") / "model"
    add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=300), path))
    return dw.load(path, "lookup", dtype="float32", device="cpu", draft_options={"min_match": 1}, budget=dw.Budget(3))


def test_stop_strings_and_text_after_giving_way(lm):
    prompts = ["def add(a, b):", "class Table:\n    def", "for row in rows: print(row)\nfor row in"]
    plain = lm.generate(prompts, max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    middle = [each.text[len(each.text) // 2 :][:3] for each in plain]
    settings = [
        Sampling(
            max_tokens=40, temperature=1.0, seed=3, ignore_eos=True, stop=stop, repetition_penalty=1.0 + number / 9
        )
        for number, stop in enumerate(middle)
    ]
    expected = lm.generate(prompts, settings)
    assert expected[0].finish_reason == "stop"
    own = lm.engine(max_batch=3, kv_memory=1 << 20)
    made = [own.submit(lm.encode(prompt), each) for prompt, each in zip(prompts, settings, strict=True)]
    dice = random.Random(1)
    while own.num_running or own.num_waiting:
        own.step()
        if dice.random() < 0.3:
            own.preempt()
        check_engine(own)
    assert own.stats.num_preempted >= 3
    assert [each.text for each in made] == [each.text for each in expected]
    assert [each.finish_reason for each in made] == [each.finish_reason for each in expected]
    assert sum(cache.data.nbytes for cache in own.decoder.pages.caches) <= 1 << 20


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["read", "admit", "commit", "remove", "share", "attach", "release"])
def test_an_interrupt_anywhere_loses_nothing(place, lab, monkeypatch):
    here, work = lab(FAMILIES[-1]), requests(5)
    own = engine_of(here, "eagle3-dynamic", 12)
    made = [own.submit(*each) for each in work]
    count = 0

    def once(function):
        def run(*args, **options):
            nonlocal count
            count += 1
            if count in (1, 5):
                raise KeyboardInterrupt
            found = function(*args, **options)
            if count in (2, 7):
                count += 1
                raise KeyboardInterrupt
            return found

        return run

    kind = type(own.decoder.drafter) if place == "admit" else type(here.target)
    kind = kind if hasattr(kind, place) else PageTable
    monkeypatch.setattr(kind, place, once(getattr(kind, place)))
    stops = 0
    while stops < 9:
        try:
            for number, _ in enumerate(own.steps()):
                check_engine(own)
                if number % 9 == 3:
                    own.preempt()
            break
        except KeyboardInterrupt:
            stops += 1
    check_engine(own)
    assert stops
    for request, each in zip(made, work, strict=True):
        same_text(request, alone(here, FAMILIES[-1], *each))


def test_a_drafter_that_refuses_a_row_keeps_no_slots(lab, monkeypatch):
    here, work = lab(FAMILIES[-1]), requests(4)
    own = engine_of(here, "eagle3-dynamic", 12)
    kind, admit = type(own.decoder.drafter), type(own.decoder.drafter).admit

    def refuses(self, ctx, features):
        if ctx.rows[-1].tokens[: len(work[1][0])] == list(work[1][0]):
            raise SlotsError("not this one")
        admit(self, ctx, features)

    monkeypatch.setattr(kind, "admit", refuses)
    made = run_all(own, work)
    assert own.decoder.faults.num  # what it refuses is decoded plainly
    assert own.stats.num_slots_used == 0
    for request, each in zip(made, work, strict=True):
        same_text(request, alone(here, FAMILIES[-1], *each))


def test_the_account_of_pages_finds_what_is_wrong():
    table = PageTable(4, 256)
    made = table.cache(2, 1, 8, torch.float32, torch.device("cpu"))
    table.allocate(10 * made.num_page_bytes)
    table.hold(0, [10, 70], 3)
    table.check()
    assert (table.num_pages, table.num_available) == (8, 5)
    with refused(SlotsExhausted, "row 2 needs 6 pages of 64, holds 0, and 5 of 8 are free"):
        table.hold(2, [380], 1)
    table.rows.pop()
    table.check()
    lost = table.rows[1].pop()
    with refused(SlotsError, "1 are counted wrongly"):
        table.check()
    table.rows[1].append(lost)
    table._free.append(lost)
    with refused(SlotsError, "do not add up"):
        table.check()
    table._free.remove(lost)
    gone = table._free.pop()
    with refused(SlotsError, "1 are lost"):
        table.check()
    table._free.append(gone)
    table.array[1, 0] = 0
    with refused(SlotsError, "row 1 reads other pages than it holds"):
        table.check()
