"""Prompts that begin as former texts did: what was read of these is not read again, and nothing else changes."""

from __future__ import annotations

import random
from functools import partial
from itertools import product

import pytest
import torch

import draftwing as dw
from conftest import SMALL, Recorder, check_engine, kernel_size, refused
from draftwing.cpu.library import get_kernel
from draftwing.decode import Decoder
from draftwing.engine import Engine
from draftwing.errors import SlotsError
from draftwing.models.lean import LeanTarget
from draftwing.models.paged import PAGE, PageTable, new_cache
from draftwing.sampling import Sampling
from test_exact import DRAFTERS, FUSED

VOCAB = SMALL["vocab_size"]
FAMILIES = tuple(name for name in ("llama", "kernel", "kernel-int8") if name == "llama" or name in FUSED)
NAMES = ("none", "lookup-tree", "eagle1-rule", "eagle3-dynamic", "lm-tree")


def engine_of(here, name, pages=30, max_batch=4):
    make = None if name == "none" else partial(DRAFTERS[name].make, here, "greedy")
    budget = dw.Budget(0) if name == "none" else DRAFTERS[name].budget
    if make is not None:
        make()
    probe = Decoder(here.target, make, budget=budget, kv_memory=1 << 26)
    num_bytes = (pages + 2) * probe.pages.num_page_bytes
    decoder = Decoder(here.target, make, budget=budget, kv_memory=num_bytes, max_batch=max_batch)
    return Engine(decoder, max_batch=max_batch)


def text(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def decoded(own, prompt, temperature=0.0, max_tokens=24):
    """The request, and the tokens of its prompt that were found."""
    before = own.stats.num_prefix_hits
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=4, ignore_eos=True, logprobs=0)
    request = own.submit(prompt, sampling)
    own.run()
    check_engine(own)
    return request, own.stats.num_prefix_hits - before


def shape_of(request):
    """What was drafted and kept of it, step by step."""
    return [(row.num_drafted, row.num_accepted, row.depth) for row in request.rows]


@pytest.mark.parametrize(
    ("name", "family", "temperature"),
    [*product(NAMES, FAMILIES[-1:], [0.0]), ("eagle3-dynamic", FAMILIES[-1], 1.0)],
)
def test_turns_go_on_from_the_slots_of_the_last(name, family, temperature, lab):
    here = lab(family)
    own, history = engine_of(here, name), text(1, 70)
    num_before = 0
    for turn in range(3):
        request, found = decoded(own, history, temperature)
        fresh, nothing = decoded(engine_of(here, name), history, temperature)
        assert nothing == 0
        assert request.token_ids == fresh.token_ids
        if family in FUSED:  # to the bit
            assert request.logprobs == fresh.logprobs
        assert shape_of(request) == shape_of(fresh)  # a head's slots are those that it would have written itself
        # A head reads the tokens of the last step only with its next draft, which never came.
        assert max(num_before - 10, 0) <= found <= num_before
        assert found == num_before or name not in ("none", "lookup-tree")
        history = [*history, *request.token_ids]
        num_before = len(history) - 1
        history += text(2 + turn, 20)


@pytest.mark.parametrize("name", ["eagle3-dynamic", pytest.param("lm-tree", marks=pytest.mark.full)])
def test_a_slot_counts_with_the_token_behind_it(name, lab):
    """A head's entry reads that token, too."""
    here, prompt = lab(FAMILIES[-1]), text(5, 2 * PAGE + 3)
    for place in (1, 2, PAGE, PAGE + 1, PAGE + 9, 2 * PAGE):
        own, other = engine_of(here, name), [*prompt]
        decoded(own, prompt)
        other[place] = 3 if prompt[place] != 3 else 4
        request, found = decoded(own, other)
        fresh, _ = decoded(engine_of(here, name), other)
        assert found == place - 1
        assert request.token_ids == fresh.token_ids
        assert shape_of(request) == shape_of(fresh)
    own = engine_of(here, name)
    decoded(own, prompt)
    for length in (2, 3, PAGE, PAGE + 1, PAGE + 2, 2 * PAGE + 1, 2 * PAGE + 2):
        assert decoded(own, prompt[:length], max_tokens=2)[1] == length - 2


def test_pages_that_others_hold_are_copied_before_they_are_written(lab):
    """Texts that part in the middle of a page, while the first one is still running."""
    here, prompt = lab(FAMILIES[-1]), text(6, PAGE + 20)
    own, sampling = engine_of(here, "eagle3-dynamic"), Sampling(max_tokens=20, ignore_eos=True)
    others = [prompt, [*prompt[:-3], 5, 6], [*prompt[: PAGE + 5], *text(9, 30)], prompt[: PAGE + 9]]
    requests = []
    for other in others:
        requests.append(own.submit(other, sampling))
        own.step()
        check_engine(own)
    assert [request.num_cached for request in requests] == [0, PAGE + 16, PAGE + 4, PAGE + 7]
    own.run()
    check_engine(own)
    for request, other in zip(requests, others, strict=True):
        assert request.token_ids == decoded(engine_of(here, "eagle3-dynamic"), other, max_tokens=20)[0].token_ids


def test_requests_that_run_share_pages(lab):
    own, prompt = engine_of(lab(FAMILIES[-1]), "eagle3-dynamic"), text(6, 2 * PAGE + 9)
    made = []
    for number in range(4):
        made.append(
            own.submit([*prompt, number + 5], Sampling(max_tokens=20, temperature=1.0, seed=number, ignore_eos=True))
        )
        own.step()
        check_engine(own)
    shared = [pages[:2] for pages in own.decoder.pages.rows]
    assert len(shared) == 4
    assert len({tuple(each) for each in shared}) == 1
    assert [own.decoder.pages.uses[page] for page in shared[0]] == [4, 4]
    own.run()
    check_engine(own)
    for number, request in enumerate(made):
        alone = Engine(dw.Decoder(lab(FAMILIES[-1]).target))
        one = alone.submit([*prompt, number + 5], request.sampling)
        alone.run()
        assert request.token_ids == one.token_ids


def test_what_a_request_has_read_itself_is_not_counted_as_cached(lab):
    """It gives its slots up, and finds them again."""
    own, prompt = engine_of(lab(FAMILIES[-1]), "none"), text(9, 150)
    sampling = Sampling(max_tokens=30, ignore_eos=True)
    other, request = (own.submit(each, sampling) for each in (text(8, 5), prompt))
    for _ in range(4):
        own.step()
    assert own.preempt()
    own.run()
    assert own.stats.num_preempted == 1
    assert own.stats.num_prefix_hits >= 2 * PAGE
    assert (other.num_cached, request.num_cached) == (0, 0)
    again = own.submit(prompt, sampling)
    own.run()
    assert again.num_cached == len(prompt) - 2


def test_what_was_used_last_is_kept_longest(lab):
    own = engine_of(lab(FAMILIES[-1]), "none", pages=6)
    prompts = [text(seed, PAGE + 6) for seed in range(8)]
    for prompt in prompts[:3]:
        decoded(own, prompt, max_tokens=3)
    assert decoded(own, prompts[0], max_tokens=3)[1] == PAGE + 4
    for prompt in prompts[3:]:
        decoded(own, prompt, max_tokens=3)
        assert decoded(own, prompts[0], max_tokens=3)[1] == PAGE + 4
        assert own.stats.num_slots_used == 0
    assert own.decoder.pages.num_kept <= 6
    assert len(own.decoder.pages.prefixes) == own.decoder.pages.num_kept
    for prompt in (text(20, 200), text(21, 200), text(22, 200), text(23, 200)):
        decoded(own, prompt, max_tokens=3)
    assert decoded(own, prompts[0], max_tokens=3)[1] == 0


def test_a_row_with_nan_leaves_nothing_behind(folder_of):
    target = LeanTarget.from_folder(folder_of("llama"), torch.float32)
    clean = LeanTarget.from_folder(folder_of("llama"), torch.float32)
    with torch.no_grad():
        target.embedding.table[7] = torch.nan
    num_bytes = 11 * Decoder(target, kv_memory=1 << 26, max_batch=1).pages.num_page_bytes
    own = Engine(Decoder(target, kv_memory=num_bytes, max_batch=2), max_batch=2)
    bad = [7 if each == 7 else each for each in text(3, 70)]
    bad[10] = 7
    good = [8 if each == 7 else each for each in text(4, 90)]
    sampling = Sampling(max_tokens=9, ignore_eos=True, banned_tokens=(7,))
    alone = Engine(dw.Decoder(clean))
    wanted = alone.submit(good, sampling)
    alone.run()
    for _ in range(3):
        broken, fine = own.submit(bad, sampling), own.submit(good, sampling)
        own.run()
        check_engine(own)
        assert broken.finish_reason == "error"
        assert fine.token_ids == wanted.token_ids
    assert own.stats.num_prefix_hits == 2 * (len(good) - 2)  # only the good request's


@pytest.mark.parametrize("memory", [None, 6], ids=["rows", "pages"])
@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": torch.float64}, {"quantize": "int8", "kv_dtype": "int8"}],
    ids=["kernel", "pytorch", "int8"],
)
def test_nan_of_an_earlier_request_reaches_no_later_one(options, memory, folder_of):
    """PyTorch needs zeros in unused slots; in the kernel they change nothing."""
    if "kv_dtype" in options and get_kernel() is None:
        pytest.skip("slots in 8 bits need the kernel")
    target = LeanTarget.from_folder(folder_of("llama", hidden_size=128), **options)
    if memory is not None:
        memory *= Decoder(target, kv_memory=1 << 26, max_batch=1).pages.num_page_bytes
    own, alone = Engine(Decoder(target, kv_memory=memory, max_batch=1), max_batch=1), Engine(Decoder(target))
    sampling = Sampling(max_tokens=9, ignore_eos=True)
    wanted = alone.submit(text(4, 40), sampling)
    alone.run()
    for _ in range(2):
        own.submit(text(3, 150), sampling)
        own.run()
        slots = own.decoder.ctx.cache.data[..., 0 if memory is None else PAGE :, :]  # the first page is no row's
        with torch.inference_mode():
            (slots if slots.is_floating_point() else slots.view(torch.float32)).fill_(torch.nan)
        found = own.submit(text(4, 40), sampling)
        own.run()
        assert found.token_ids == wanted.token_ids


def test_positions_that_depend_on_the_prompt_share_nothing(folder_of):
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    folder = folder_of("llama", rope_scaling=scaling, max_position_embeddings=96)
    target = LeanTarget.from_folder(folder, torch.float32)
    num_bytes = 11 * Decoder(target, kv_memory=1 << 26, max_batch=1).pages.num_page_bytes
    own = Engine(Decoder(target, kv_memory=num_bytes, max_batch=2), max_batch=2)
    prompt, sampling = text(3, 70), Sampling(max_tokens=12, ignore_eos=True)
    for _ in range(2):
        own.submit(text(4, 5), sampling)
        request, alone = own.submit(prompt, sampling), Engine(dw.Decoder(target))
        while own.num_running < 2:
            own.step()
        assert own.preempt()  # the younger one
        own.run()
        one = alone.submit(prompt, sampling)
        alone.run()
        assert request.token_ids == one.token_ids
    assert own.stats.num_prefix_hits == 0


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen3", torch.float64), *product(("lfm2", "gemma4"), (torch.float64, torch.float32))],
    ids=str,
)
def test_recorded_forwards_look_into_pages_too(family, dtype, folder_of):
    """And those of the kernel, which are not recorded; the inputs of convolutions lie in pages too."""
    changes = kernel_size(family) if dtype == torch.float32 else {}
    target = LeanTarget.from_folder(folder_of(family, **changes), dtype)
    plain = LeanTarget.from_folder(folder_of(family, **changes), dtype)
    target.use_graphs(Recorder())
    num_bytes = 12 * Decoder(target, kv_memory=1 << 26, max_batch=1).pages.num_page_bytes
    own = Engine(Decoder(target, kv_memory=num_bytes, max_batch=3), max_batch=3)
    prompts = [text(1, 70), text(2, 5), [*text(1, 70), *text(3, 9)], text(4, 30)]
    made = [own.submit(prompt, Sampling(max_tokens=15, ignore_eos=True)) for prompt in prompts]
    dice = random.Random(1)
    while own.num_running or own.num_waiting:
        own.step()
        if dice.random() < 0.2:
            own.preempt()
        check_engine(own)
    alone = Engine(dw.Decoder(plain))
    wanted = [alone.submit(prompt, Sampling(max_tokens=15, ignore_eos=True)) for prompt in prompts]
    alone.run()
    assert own.stats.num_preempted
    assert [each.token_ids for each in made] == [each.token_ids for each in wanted]


def test_pages_are_found_by_all_tokens_up_to_them():
    table = PageTable(4, 1024)
    made = table.cache(1, 1, 8, torch.float32, torch.device("cpu"))
    table.allocate(14 * made.num_page_bytes)
    prefixes, first = table.prefixes, text(1, 3 * PAGE + 5)
    second = [first[0] + 1, *first[1:]]
    for tokens in (first, second):
        table.hold(0, [len(tokens)], 0)
        prefixes.remember(tokens, table.rows[0], len(tokens) - 1)
        table.remove(0, 0)
    assert table.num_kept == 8
    assert len({*prefixes.find(first).pages, *prefixes.find(second).pages}) == 6
    assert prefixes.find([*first[:PAGE], *second[PAGE:]]) == prefixes.find(first)  # after the first page they agree
    assert prefixes.find(first).num_slots == len(first) - 2
    parted = prefixes.find([*first[: PAGE + 2], 3, *first[PAGE + 3 :]])
    whole = prefixes.find(first).pages
    assert parted == (whole[:1], whole[1], PAGE + 1)
    table.hold(0, [9 * PAGE], 0)  # 4 of 12 pages are empty: the ends of the oldest texts are reused first
    assert prefixes.find(first) == ([], None, 0)
    found = prefixes.find(second)
    assert (len(found.pages), found.partial, found.num_slots) == (3, None, 3 * PAGE)
    table.check()


def test_what_a_head_has_not_read_is_not_kept(lab):
    """While nothing is drafted a head does not read; its slots of that time hold nothing."""
    here, prompt = lab(FAMILIES[-1]), text(5, 2 * PAGE)
    own = engine_of(here, "eagle3-dynamic")
    lazy = own.submit(prompt, Sampling(max_tokens=80, ignore_eos=True), speculation="none")
    own.run()
    check_engine(own)
    request, found = decoded(own, [*prompt, *lazy.token_ids])
    fresh, _ = decoded(engine_of(here, "eagle3-dynamic"), [*prompt, *lazy.token_ids])
    assert found == 2 * PAGE - 2  # the prompt but its last entry, which needs the next token
    assert request.token_ids == fresh.token_ids
    assert shape_of(request) == shape_of(fresh)


def test_a_page_that_holds_more_replaces_those_that_hold_less():
    table = PageTable(4, 1024)
    made = table.cache(1, 1, 8, torch.float32, torch.device("cpu"))
    table.allocate(20 * made.num_page_bytes)
    prefixes, tokens = table.prefixes, text(1, 2 * PAGE)
    for length in (5, 9, 9, 7, PAGE + 1, PAGE + 4, PAGE + 3):
        table.hold(0, [length], 0)
        prefixes.remember(tokens[:length], table.rows[0], length - 1)
        table.remove(0, 0)
    assert len(prefixes) == table.num_kept == 2
    other = [*tokens[:7], tokens[7] + 1]  # neither begins the other: both are kept
    table.hold(0, [len(other)], 0)
    prefixes.remember(other, table.rows[0], len(other) - 1)
    table.remove(0, 0)
    assert len(prefixes) == table.num_kept == 3
    assert prefixes.find([*other, 3]).num_slots == 7
    assert prefixes.find([*tokens[:8], 3]).num_slots == 7
    for token in (0, VOCAB + 1):  # before and after all known pages, in their order
        assert prefixes.find([*tokens[:7], token, 3]).num_slots == 6
    table.check()


def new_table(num_pages):
    table = PageTable(4, 1024)
    made = table.cache(1, 1, 8, torch.float32, torch.device("cpu"))
    table.allocate((num_pages + 2) * made.num_page_bytes)
    return table, made


def test_the_end_of_a_prefix_is_reused_before_its_beginning():
    table, _ = new_table(3)
    tokens = text(1, 3 * PAGE + 1)
    table.hold(0, [3 * PAGE], 0)
    table.prefixes.remember(tokens, table.rows[0], 3 * PAGE)
    table.remove(0, 0)
    for num_kept in (2, 1):
        table.hold(0, [(3 - num_kept) * PAGE], 0)
        found = table.prefixes.find(tokens)
        assert (len(found.pages), found.num_slots) == (num_kept, num_kept * PAGE)


def test_pages_of_a_loop_that_ended_are_never_found():
    table, _ = new_table(3)
    tokens = text(1, 2 * PAGE + 1)
    table.hold(0, [2 * PAGE], 0)
    table.prefixes.remember(tokens, table.rows[0], 2 * PAGE)
    assert table.prefixes.find(tokens).num_slots
    table.restart()
    assert table.prefixes.find(tokens) == ([], None, 0)
    assert len(table.prefixes) == 0


def test_caches_that_are_made_again_are_the_old_ones_each_once():
    """Those of a target and a draft model of the same shape too."""

    def made(table):
        with table.making():
            return [new_cache(layers, 2, 8, torch.float32, torch.device("cpu")) for layers in (3, 3, 2)]

    table = PageTable(4, 1024)
    before = made(table)
    table.allocate(5 * table.num_page_bytes)
    table.restart()
    after = made(table)
    assert [id(each) for each in after] == [id(each) for each in before]
    assert len(table.caches) == 3


def test_rows_of_another_length_have_a_table_of_their_own():
    table = PageTable(4, 1024)
    made, shape = table.cache(1, 1, 8, torch.float32, torch.device("cpu")), (1, 1, 8, torch.float32)
    apart = table.apart(2048)
    other = apart.cache(*shape, torch.device("cpu"))
    made.leads = True
    table.allocate(6 * table.num_page_bytes)
    table.restart()
    assert not made.leads  # the next target's cache does
    assert table.apart(2048) is apart
    assert (table.num_pages, apart.num_pages) == (4, 4)
    apart.hold(0, [PAGE + 1], 0)
    assert (table.num_available, apart.num_available) == (4, 2)
    other.move_row(0, 0)  # without a leader: nothing else removes its rows
    assert apart.num_available == 4
    apart.hold(0, [PAGE], 0)
    apart.rows.clear()  # as an interrupt may leave it
    with refused(SlotsError, "1 are counted wrongly"):
        table.check()
    table.recount()
    table.check()
    assert apart.num_available == 4


def test_pages_that_belong_to_no_row_hold_zeros(monkeypatch):
    """Attention reads the first one past the end of every row; new memory may hold NaN."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args: empty(*args).fill_(torch.nan))
    _, made = new_table(3)
    pages = made.data.unflatten(4, (-1, PAGE)).abs().sum((0, 1, 2, 3, 5, 6))
    assert pages.isnan().tolist() == [False, True, True, True, False]
    assert pages[[0, -1]].tolist() == [0, 0]


def test_a_copied_page_has_the_content_of_its_source():
    table = PageTable(4, 1024)
    caches = [table.cache(2, 3, 8, torch.float32, torch.device("cpu")) for _ in range(2)]
    table.allocate(5 * sum(slots.num_page_bytes for slots in caches))
    table.hold(0, [PAGE], 0)
    source = table.rows[0][0]
    for number, slots in enumerate(caches):
        slots.data[..., source * PAGE : (source + 1) * PAGE, :] = number + torch.arange(PAGE)[:, None]
    copied = table.copy(source)
    assert copied not in (source, None)
    for slots in caches:
        pages = slots.data.unflatten(4, (-1, PAGE))
        assert torch.equal(pages[..., copied, :, :], pages[..., source, :, :])
    table.hold(0, [2 * PAGE], 0)
    assert table.copy(source) is None  # there is no third page
    assert table.uses[source] == 1
