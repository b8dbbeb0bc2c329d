"""Drafters that look drafts up: their proposals while rows come and go, their options, and their gain."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import draftwing as dw
from conftest import add_tokenizer, refused
from draftwing.cli.options import default_drafts, drafts_without_path
from draftwing.errors import CheckpointError, ConfigError, DataError, PromptError, TokenizerError
from draftwing.lab.compare import compare
from draftwing.loading import load_drafter
from draftwing.methods.base import Budget
from draftwing.methods.lookup import LookupDrafter
from draftwing.methods.retrieval import LlmaDrafter, Memory, RestDrafter, SuffixDrafter
from draftwing.methods.suffix_array import SuffixArray, join_texts
from draftwing.models.context import Context, Row
from draftwing.noise import KeyedNoise
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.tree import PAD, DraftTree
from test_cli import PROMPT

VOCAB = 20
REFERENCES = [[1, 2, 3, 4, 5], [9, 2, 3, 6], [7, 2, 3, 6]]
TEXTS = ([1, 2, 3, 4, 1, 2], [5, 6, 7, 8, 9, 5, 6, 7], [1, 2, 9, 1, 2, 8, 1, 2], [3, 3, 3], [4])


def propose(drafter, ctx: Context, budget: Budget) -> DraftTree:
    return drafter.propose(ctx, SamplingBatch([Sampling()] * len(ctx.rows), KeyedNoise(VOCAB)), budget)


def admitted(drafter, texts, references=()) -> Context:
    ctx = Context(torch.device("cpu"))
    for text in texts:
        ctx.rows.append(Row(list(text), len(text) - 1, 1, references))
        drafter.admit(ctx, None)
    return ctx


def fresh(drafter, texts, budget: Budget, references=()) -> DraftTree:
    return propose(drafter, admitted(drafter, texts, references), budget)


MAKERS = {
    "lookup": lambda: LookupDrafter(VOCAB),
    "llma": lambda: LlmaDrafter(VOCAB, REFERENCES),
    "rest": lambda: RestDrafter(VOCAB, SuffixArray(join_texts(REFERENCES)), min_match=1),
    "suffix": lambda: SuffixDrafter(VOCAB, Memory(1000)),
}


def test_only_the_longest_match_of_several_arrays_counts():
    long, short = (SuffixArray(join_texts(texts)) for texts in ([[1, 2, 3, 9]], [[8, 2, 3, 7], [5, 3, 6]]))
    memory = Memory(1000)
    for parts in ((long, short), (short, long)):
        memory.parts = parts
        match = memory.match([1, 2, 3], 1, 8)
        assert match.length == 3
        assert [follower.token for follower in memory.followers(match.place)] == [9]
        match = memory.match([4, 2, 3], 1, 8)
        assert sorted(follower.token for follower in memory.followers(match.place)) == [7, 9]


# --- what they propose -----------------------------------------------------------------------------------------------


def test_lookup_proposes_what_followed_before():
    tree = fresh(LookupDrafter(VOCAB), TEXTS, Budget(3))
    assert tree.tokens.tolist() == [[2, 3, 4, 1], [7, 8, 9, 5], [2, 8, 1, 2], [3, 3, PAD, PAD], [4, PAD, PAD, PAD]]
    both = fresh(LookupDrafter(VOCAB), [TEXTS[2]], Budget(2, 2))
    assert (both.tokens.tolist(), both.parents.tolist()) == ([[2, 8, 1, 9, 1]], [[-1, 0, 1, 0, 3]])
    # A match of 2 tokens, one more per level; less for what followed the first occurrence.
    wanted = [1, 1 - 1 / 3, 1 - 1 / 4, 0.3 * (1 - 1 / 3), 1 - 1 / 4]
    assert both.node_probs[0].tolist() == pytest.approx(wanted)


def test_llma_copies_from_references():
    found = fresh(LlmaDrafter(VOCAB, REFERENCES), [[8, 1, 2, 3], [8, 2, 3], [8, 8]], Budget(2, 2))
    # The longest match alone: "1 2 3" was followed by 4; "2 3" by 6 twice and by 4 once.
    assert found.tokens.tolist() == [[3, 4, 5, PAD], [3, 6, 4, 5], [8, PAD, PAD, PAD]]
    assert found.parents.tolist() == [[-1, 0, 1, -1], [-1, 0, 0, 2], [-1, -1, -1, -1]]
    assert found.node_probs is not None
    assert found.node_probs[1].tolist() == pytest.approx([1, 2 / 3 * 4 / 5, 1 / 3 * 4 / 5, 1 - 1 / 4])


def test_llma_reads_the_requests_own_references_and_its_text():
    drafter = LlmaDrafter(VOCAB, REFERENCES)
    own = [[4, 1, 2, 3, 9, 9]]
    assert fresh(drafter, [[4, 1, 2, 3]], Budget(2), own).tokens.tolist() == [[3, 9, 9]]
    assert fresh(LlmaDrafter(VOCAB), [TEXTS[0]], Budget(3)).tokens.tolist() == [[2, 3, 4, 1]]
    assert fresh(LlmaDrafter(VOCAB, [[1, 2, 99]]), [[1, 2]], Budget(3)).tokens.tolist() == [[2]]  # no such token


def test_rest_proposes_a_tree_of_what_followed():
    drafter = RestDrafter(VOCAB, SuffixArray(join_texts(REFERENCES)), identity="abc")
    tree = fresh(drafter, [[8, 2, 3], [1, 2], [8, 3]], Budget(2, 3))
    assert tree.tokens.tolist() == [[3, 6, 4, 5], [2, 3, 4, PAD], [3, PAD, PAD, PAD]]  # one token is too short
    assert drafter.identity == "abc"
    short = RestDrafter(VOCAB, SuffixArray(join_texts(REFERENCES)), min_match=1, max_match=1)
    assert fresh(short, [[1, 2, 3]], Budget(1)).tokens.tolist() == [[3, 6]]


@pytest.mark.parametrize(
    ("alpha", "text", "wanted"),
    [(1.0, [1], [2]), (1.0, [1, 2, 3], [4, 5, 6]), (2.0, [1, 2, 3], [4, 5, 6, 7, 8, 9]), (0.1, [1, 2, 3], [4])],
)
def test_suffix_drafts_more_the_longer_a_match_is(alpha, text, wanted):
    memory = Memory(1000)
    memory.add([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    assert fresh(SuffixDrafter(VOCAB, memory, alpha), [text], Budget(8)).tokens[0, 1:].tolist() == wanted
    assert fresh(SuffixDrafter(VOCAB, memory, alpha, min_match=len(text) + 1), [text], Budget(8)).num_nodes == 1


def test_suffix_takes_what_promises_more():
    """The continuation of "3" in the request, or of "2 3" in former ones: the one with more tokens to be accepted."""
    memory = Memory(1000)
    memory.add([2, 3, 7, 7])
    assert fresh(SuffixDrafter(VOCAB, memory), [[3, 5, 8, 2, 3]], Budget(2)).tokens.tolist() == [[3, 7, 7]]
    assert fresh(SuffixDrafter(VOCAB, Memory(1000)), [[3, 5, 8, 2, 3]], Budget(2)).tokens.tolist() == [[3, 5, 8]]
    # Met so often, in the request or in former ones, that a shorter match is the safer one.
    assert fresh(SuffixDrafter(VOCAB, memory), [[2, 3, 7, *[3, 9] * 10, 2, 3]], Budget(1)).tokens.tolist() == [[3, 9]]
    for _ in range(40):
        memory.add([3, 9, 4])
    assert fresh(SuffixDrafter(VOCAB, memory), [[2, 3]], Budget(1)).tokens.tolist() == [[3, 9]]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("leaving", [0, 2, 4])
def test_a_row_that_leaves_takes_nothing_along(leaving, name):
    """The last row takes its place; the drafter then proposes like one that has never seen the row that left."""
    drafter = MAKERS[name]()
    ctx = admitted(drafter, TEXTS)
    for row in ctx.rows:
        row.prompt_length = len(row.tokens)  # nothing was written: there is nothing to remember
    propose(drafter, ctx, Budget(3))
    drafter.remove(ctx, leaving)
    ctx.rows[leaving] = ctx.rows[-1]
    ctx.rows.pop()
    for row in ctx.rows:
        row.tokens += row.tokens[:3] * 3
    ctx.rows.append(Row([7, 7, 2, 7, 7], 4, 1))
    drafter.admit(ctx, None)
    wanted = fresh(MAKERS[name](), [row.tokens for row in ctx.rows], Budget(3, 2))
    found = propose(drafter, ctx, Budget(3, 2))
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert found.parents.tolist() == wanted.parents.tolist()
    assert found.num_nodes > 1


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("children", ["sampled", "distinct"])
def test_their_distribution_is_certain_of_each_child(children, name):
    tree = fresh(MAKERS[name](), [*TEXTS, [1, 2, 3]], Budget(3, 2, children=children))
    assert tree.is_line
    assert tree.draft_probs is not None
    assert tree.num_nodes > 1
    for tokens, probs in zip(tree.tokens.tolist(), tree.draft_probs.tolist(), strict=True):
        for node, child in enumerate(tokens[1:]):
            if child != PAD:
                assert probs[node] == [float(token == child) for token in range(VOCAB)]


@pytest.mark.parametrize("name", MAKERS)
def test_budgets_hold(name):
    texts = [*TEXTS, [1, 2, 3], [8, 2, 3]]
    for budget in (Budget(0), Budget(1, 5), Budget(3, 2, 2), Budget(2, 3), Budget(8, 1)):
        tree = fresh(MAKERS[name](), texts, budget)
        tree.check(VOCAB)
        most = budget.nodes or budget.depth * budget.width
        assert tree.num_nodes - 1 <= most
        assert int(tree.depths.max()) == tree.max_depth <= budget.depth
        for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            used = [parent for token, parent in zip(tokens, parents, strict=True) if token != PAD]
            assert max(used.count(node) for node in range(len(used))) <= budget.width


def test_what_a_row_has_written_is_remembered():
    memory = Memory(1000)
    drafter = SuffixDrafter(VOCAB, memory)
    ctx = admitted(drafter, [[1, 2, 3, 4, 5], [6, 7]])
    ctx.rows[0].prompt_length = 3
    ctx.rows[1].prompt_length = 2  # cancelled before it wrote anything
    drafter.remove(ctx, 1)
    assert len(memory) == 0
    drafter.remove(ctx, 0)
    other = fresh(SuffixDrafter(VOCAB, memory), [[9, 2, 3]], Budget(2))
    assert other.tokens.tolist() == [[3, 4, 5]]


# --- loaded by name --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(folder_of, tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrieval") / "target"
    return add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=300, head_dim=32), folder))


def lm(target, draft, **options):
    return dw.load(target, draft, dtype="float64", device="cpu", budget=dw.Budget(6), draft_options=options or None)


WANTED = {"max_tokens": 40, "ignore_eos": True}


def test_references_that_are_given(target, tmp_path):
    """At the load, as texts, files and ids, or with a request: each saves passes, and no text changes."""
    plain = lm(target, "none").generate(PROMPT, **WANTED)[0]
    without = lm(target, "llma").generate(PROMPT, **WANTED)[0]
    (tmp_path / "reference.txt").write_text(PROMPT)
    ids = [*plain.prompt_ids, *plain.token_ids]
    for reference in (ids, tuple(ids)):
        found = lm(target, "llma", references=[tmp_path / "reference.txt", reference], min_match=1)
        found = found.generate(PROMPT, **WANTED)[0]
        assert found.token_ids == plain.token_ids == without.token_ids
        assert found.tau > max(without.tau, 4)
    engine = lm(target, "llma").engine()
    requests = [engine.submit(plain.prompt_ids, Sampling(**WANTED), references=given) for given in ([ids], [], ())]
    engine.run()
    assert all(request.token_ids == plain.token_ids for request in requests)
    with_ids, *others = (request.stats.tau for request in requests)
    assert with_ids > max(4, others[0])
    assert others[0] == others[1]


def test_references_as_texts(target):
    model, seen = lm(target, "llma"), []
    ids, x = model.tokenizer.encode_plain(PROMPT), model.tokenizer.encode_plain("x")
    drafter = lm(target, "llma", references=["", PROMPT]).new_drafter()
    assert fresh(drafter, [ids[:4]], Budget(3)).tokens.tolist() == [ids[3:7]]

    class Watched(LlmaDrafter):
        def admit(self, ctx, features):
            seen.append(ctx.rows[-1].references)
            super().admit(ctx, features)

    model.new_drafter = lambda: Watched(model.target.vocab_size)
    model.generate([PROMPT, "for"], references=[PROMPT, "x"], max_tokens=2)
    list(model.stream(PROMPT, references=["x"], max_tokens=2))
    assert seen == [[ids, x], [ids, x], [x]]


@pytest.mark.parametrize("references", ["a text", [1, 2], [["a"]], [None], None, 5])
def test_what_is_no_list_of_references(references, target):
    for call in (lm(target, "none").generate, lm(target, "none").stream):
        with refused(ConfigError, "references must be a list of texts, found", "put each text into it"):
            call(PROMPT, references=references)


@pytest.mark.parametrize("references", ["a", ["a"], [["a"]], [1], [[1, 300]], [[-1]], [None], None, [[1.5]]])
def test_references_that_are_no_ids(references, target):
    with refused(PromptError, "references must be lists of token ids from 0 to 299, found", "encode each text"):
        lm(target, "none").engine().submit([1, 2], references=references)


def test_former_requests_are_remembered(target, tmp_path):
    """By every loop of one load, and by the next load where a file is named."""
    plain = lm(target, "none").generate(PROMPT, **WANTED)[0]
    file = tmp_path / "memory"
    model = lm(target, "suffix", memory=str(file), min_match=2)
    first, second = (model.generate(PROMPT, **WANTED)[0] for _ in range(2))
    third = lm(target, "suffix", memory=file).generate(PROMPT, **WANTED)[0]
    fresh_one = lm(target, "suffix", min_match=2).generate(PROMPT, **WANTED)[0]
    assert first.token_ids == second.token_ids == third.token_ids == plain.token_ids
    assert second.tau > max(first.tau, 4)
    assert third.tau > 4
    assert fresh_one.tau == first.tau


def test_comparisons_do_not_draft_from_the_last_round(target):
    plain, model = lm(target, "none"), lm(target, "suffix")
    first = lm(target, "suffix").generate(PROMPT, **WANTED)[0]
    model.generate(PROMPT, **WANTED)
    found = compare([plain, model], [PROMPT], Sampling(**WANTED), rounds=2).methods[1]
    assert found.tau == pytest.approx(first.tau)
    plain.forget()  # there is nothing to forget


def test_threads_that_share_a_memory_write_the_plain_texts(target):
    model, prompts = lm(target, "suffix"), [PROMPT, "for row in rows:"]
    plain = [text.token_ids for text in lm(target, "none").generate(prompts, **WANTED)]
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(model.generate, prompts, **WANTED) for _ in range(4)]
    assert [[text.token_ids for text in run.result()] for run in runs] == [plain] * 4
    assert model.generate(prompts, **WANTED)[0].tau > 4


def test_a_memory_of_another_tokenizer_is_refused(target, tmp_path, folder_of):
    file = tmp_path / "memory"
    lm(target, "suffix", memory=file).generate(PROMPT, **WANTED)
    smaller = dw.load(target, "none", device="cpu").target
    smaller.vocab_size = 100
    with refused(TokenizerError, str(file), "is not this target's (100)", "name another file"):
        load_drafter("suffix", smaller, None, options={"memory": file})
    file.write_bytes(file.read_bytes()[:-9])
    with refused(CheckpointError, str(file), "damaged"):
        lm(target, "suffix", memory=file)


def test_what_is_measured_without_a_named_draft():
    assert default_drafts("a/hub-id") == ["lookup"]
    assert default_drafts(None)[0] == "lookup"
    assert "suffix" not in default_drafts(None)
    assert {"none", "lookup", "llma", "suffix"} <= set(drafts_without_path("a/hub-id"))


@pytest.mark.parametrize(
    ("draft", "options", "kind", "parts"),
    [
        ("llma", {"references": "text"}, ConfigError, ["references must be a list", "'text'", "put it into a list"]),
        ("llma", {"references": [5]}, ConfigError, ["a reference is a text", "found 5"]),
        ("llma", {"references": [[5, 300]]}, ConfigError, ["token ids below 300", "[5, 300]"]),
        ("llma", {"references": [[5, True]]}, ConfigError, ["a reference is a text"]),
        ("llma", {"references": [Path("nowhere.txt")]}, DataError, ["nowhere.txt", "cannot be read", "UTF-8"]),
        ("llma", {"min_match": 0}, ConfigError, ["min_match must be at least 1, found 0"]),
        ("suffix", {"alpha": 0}, ConfigError, ["alpha must be above 0", "found 0"]),
        ("suffix", {"alpha": "2"}, ConfigError, ["alpha must be above 0", "found '2'"]),
        ("suffix", {"memory": Path.cwd()}, ConfigError, ["memory must be a file"]),
        ("suffix", {"memory": 5}, ConfigError, ["memory must be a file, found 5"]),
        ("suffix", {"memory_tokens": 10}, ConfigError, ["memory_tokens must be at least 1,000, found 10"]),
        ("suffix", {"depth": 10}, ConfigError, ["suffix has no option 'depth'", "it has alpha, memory"]),
    ],
)
def test_options_that_are_refused(draft, options, kind, parts, target):
    with refused(kind, *parts):
        lm(target, draft, **options)


def test_texts_need_a_tokenizer(target):
    model = dw.load(target, "none", device="cpu").target
    with refused(ConfigError, "references are texts, but there is no tokenizer", "as token ids"):
        load_drafter("llma", model, None, options={"references": ["a text"]})
    load_drafter("llma", model, None, options={"references": [[1, 2]]})()
