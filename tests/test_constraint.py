"""Constraints: masks at tree nodes, texts that do not depend on drafts, minimum lengths and grammars."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import draftwing as dw
from conftest import add_tokenizer, refused
from draftwing.constraint import forbidden_tokens, has_bit, words_without
from draftwing.decode import Decoder
from draftwing.engine import Engine
from draftwing.errors import ConfigError, DraftwingError, NumericsError, SamplingError, UnsupportedError
from draftwing.masks import Masks
from draftwing.methods.base import Budget, Drafter
from draftwing.models.context import FeatureSpec
from draftwing.request import Request
from draftwing.sampling import Sampling
from draftwing.text.grammar import MAX_CHARACTERS, MAX_LEVELS, Grammar, Grammars, as_grammar, is_deeper
from draftwing.text.tokenizer import TextStream
from draftwing.tree import DraftTree
from test_exact import CLASSIC, DRAFTERS, FLOAT32, FUSED, PROMPTS, SAMPLINGS, VOCAB, Scripted, check_step

EOS = 2
LENGTH = 17  # tokens of a text, the end token counted


class Rhymes:
    """Each token must differ from the last one modulo 3; the text may end from 9 tokens on, and must after 16."""

    def start(self) -> RhymesState:
        return RhymesState((), self.fails_at)

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at


class RhymesState:
    def __init__(self, tokens: tuple[int, ...], fails_at: int | None) -> None:
        self.tokens, self.fails_at = tokens, fails_at

    def good(self) -> set[int]:
        if len(self.tokens) == LENGTH - 1:
            return {EOS}
        last = self.tokens[-1] % 3 if self.tokens else 0
        found = {token for token in range(VOCAB) if token % 3 != last and token != EOS}
        return found | {EOS} if len(self.tokens) >= 9 else found

    def allowed(self) -> np.ndarray:
        if len(self.tokens) == self.fails_at:
            raise ConfigError("no rhyme any more")
        return words_of(self.good())

    def take(self, token: int) -> None:
        assert token in self.good()
        self.tokens = (*self.tokens, token)

    def fork(self) -> RhymesState:
        return RhymesState(self.tokens, self.fails_at)


def words_of(tokens) -> np.ndarray:
    words = np.zeros((VOCAB + 31) // 32, dtype=np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def check_valid(text) -> None:
    state = Rhymes().start()
    for token in text:
        state.take(token)
    assert text[-1] == EOS or len(text) == LENGTH


# --- masks -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.sets(st.integers(0, 159)), st.integers(1, 200))
def test_bits_say_which_tokens_are_in_a_mask(num_words, tokens, vocab_size):
    words = np.zeros(num_words, dtype=np.uint32)
    here = {token for token in tokens if token < 32 * num_words}
    for token in here:
        words[token // 32] |= np.uint32(1 << token % 32)
    bits = forbidden_tokens(words, vocab_size)
    assert bits.shape == (vocab_size,)
    assert bits.dtype == bool
    assert set(np.flatnonzero(bits)) == set(range(vocab_size)) - here
    assert all(has_bit(words, token) == (token in here) for token in range(vocab_size))
    gone = tuple(tokens)[:2]
    left = forbidden_tokens(words_without(words, gone), vocab_size)
    assert set(np.flatnonzero(left)) == set(range(vocab_size)) - (here - set(gone))


def test_every_node_has_the_mask_of_its_own_path(monkeypatch):
    """Nodes below forbidden ones, and below the end of the text, go; the others keep their numbers."""
    request = Request(0, [5], Sampling(), constraint=Rhymes())
    other = Request(1, [5], Sampling())
    tokens = [[5, 4, 7, 8, 3, 6, 10], [5, 4, 7, 8, 3, 6, 10]]
    parents = [[-1, 0, 1, 1, 3, 2, 4]] * 2  # 4-7 rhyme, so 7 and the 6 below it go
    tree = DraftTree.from_lists(tokens, parents)
    masks = Masks([request, other], VOCAB, (EOS,), prunes=True)
    cut = masks.find(tree)
    cut.check(VOCAB)
    assert cut.tokens[0].tolist() == [5, 4, -1, 8, 3, -1, 10]
    assert cut.tokens[1].tolist() == tokens[1]
    logits = torch.randn(2, 7, VOCAB)
    masked = masks.apply(logits)
    assert torch.equal(masked[1], logits[1])
    with monkeypatch.context() as patch:  # as where the logits are elsewhere
        patch.setattr("draftwing.masks.on_host", lambda tensor: False)
        assert torch.equal(masks.apply(logits), masked)
        assert torch.equal(masks.apply(half := logits.bfloat16()), masked.bfloat16())
    assert half.isfinite().all()  # log-probabilities are read from what the target returned
    for node, path in {0: (), 1: (4,), 3: (4, 8), 4: (4, 8, 3), 6: (4, 8, 3, 10)}.items():
        good = sorted(RhymesState(path, None).good())
        assert torch.equal(masked[0, node, good], logits[0, node, good])
        assert masked[0, node].isfinite().sum() == len(good)

    trimmed = Masks([request], VOCAB, (EOS,), prunes=True).find(DraftTree.chain(torch.tensor([[5, 4, 7, 8]])))
    assert trimmed.tokens.tolist() == [[5, 4]]  # what nobody verifies is not even there
    assert (trimmed.is_line, trimmed.depth, trimmed.num_draft_forwards) == (True, 1, 3.0)
    whole = Masks([request], VOCAB, (EOS,), prunes=False).find(DraftTree.chain(torch.tensor([[5, 4, 7, 8]])))
    assert whole.num_nodes == 4
    request.token_ids += [4, 8, 3] * 3  # after 9 tokens the text may end, and no state follows an end
    ended = Masks([request], VOCAB, (EOS,), prunes=True).find(DraftTree.chain(torch.tensor([[3, EOS, 4]])))
    assert ended.tokens.tolist() == [[3, EOS]]


# --- the text --------------------------------------------------------------------------------------------------------


def decode(target, drafter, requests, budget=None, rule="match"):
    """Texts of (prompt, sampling, constraint or None), decoded together."""
    own = Engine(Decoder(target, drafter, rule, budget))
    submitted = [own.submit(prompt, sampling, constraint=held) for prompt, sampling, held in requests]
    for step in own.steps():
        check_step(step)
    assert all(each.error is None for each in submitted)
    return [tuple(each.token_ids) for each in submitted], [each.stats for each in submitted]


def requests_of(kind: str):
    """One under a constraint, one that must not end soon, one that is free."""
    kinds = ("t1", "penalties", "top-p", "greedy") if kind == "mixed" else (kind,) * 4
    one, two, three, four = ({"max_tokens": 20, **SAMPLINGS[each]} for each in kinds)
    return [
        (PROMPTS[0], Sampling(seed=1, **one), Rhymes()),
        (PROMPTS[1], Sampling(seed=2, min_tokens=11, logit_bias={EOS: 40.0}, stop_tokens=(7,), **two), None),
        (PROMPTS[2], Sampling(seed=3, ignore_eos=True, **three), None),
        (PROMPTS[2], Sampling(seed=4, min_tokens=12, **four), Rhymes()),
    ]


FEW = ("lm-tree", "eagle3-dynamic", "lookahead", "kangaroo-dynamic", "eagle3+lookup-rule", "twins", "scattered")
MORE = ("self-chain", "lm-static", "eagle3-rule", "medusa-dynamic", "lookahead+eagle3", "skip-chain")
MORE += ("mtp-modules-tree",)
CASES = [
    *(("llama", name) for name in FEW),
    ("gpt2", "lm-tree"),
    *((FLOAT32, name) for name in ("lm-tree", "eagle3-rule")),
]
FULL = [*(("llama", name) for name in MORE), *product(("gpt2", *FUSED), ("lm-tree", "twins"))]


@pytest.fixture(scope="module")
def plain(lab):
    known = {}

    def get(family, kind):
        if (family, kind) not in known:
            known[family, kind] = decode(lab(family).target, None, requests_of(kind))[0]
        return known[family, kind]

    return get


@pytest.mark.parametrize(
    ("family", "drafter"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL if case not in CASES)],
)
def test_the_text_is_the_same_whatever_is_drafted(family, drafter, lab, plain):
    here, case, wanted = lab(family), DRAFTERS[drafter], plain(family, "mixed")
    for text in (wanted[0], wanted[3]):
        check_valid(text)
    assert len(wanted[3]) > 12 or wanted[3][-1] != EOS
    made, requests = case.make(here, "mixed"), requests_of("mixed")
    if isinstance(made, Scripted):  # it knows what is said under the constraints
        made.futures = {tuple(prompt): text for (prompt, *_), text in zip(requests, wanted, strict=True)}
    found, stats = decode(here.target, made, requests, case.budget)
    assert found == wanted
    if drafter in ("lm-tree", "eagle3-dynamic", "twins", "scattered", "self-chain") and family != "gpt2":
        assert sum(each.num_accepted for each in stats) > 0


def test_it_is_the_best_of_what_is_allowed_at_every_place(lab):
    """By definition: the target scores each text up to there as a whole, and the best allowed token follows."""
    target, text, state = lab("llama").target, list(PROMPTS[1]), Rhymes().start()
    while len(text) == len(PROMPTS[1]) or text[-1] != EOS:
        logits = target.score(torch.tensor([text]), FeatureSpec()).logits[0, -1]
        text.append(max(state.good(), key=lambda token: float(logits[token])))
        state.take(text[-1])
    (found,), _ = decode(target, None, [(PROMPTS[1], Sampling(), Rhymes())])
    assert list(found) == text[len(PROMPTS[1]) :]


@pytest.mark.parametrize("rule", ["block", "multi-round"])
def test_classic_rules_are_greedy_under_a_constraint(rule, lab, plain):
    here = lab("llama")
    made = DRAFTERS["lm-chain"].make(here, "greedy")
    assert decode(here.target, made, requests_of("greedy"), CLASSIC[rule], rule)[0] == plain("llama", "greedy")


class Coin(Drafter):
    """Drafts one of two tokens, by the toss of a coin, and says so."""

    costs_forwards = False

    def __init__(self, *sides: int) -> None:
        self.sides = sides

    def propose(self, ctx, sampling, budget):
        if budget.depth == 0:
            return super().propose(ctx, sampling, budget)
        tosses = [self.sides[random.Random(seed).random() < 0.5] for seed in sampling.seeds]
        tokens = torch.stack([ctx.pending(), torch.tensor(tosses)], 1)
        probs = torch.zeros(ctx.num_rows, 2, VOCAB)
        probs[:, :, list(self.sides)] = 0.5
        return DraftTree.chain(tokens, draft_probs=probs)


@pytest.mark.parametrize("rule", ["match", *CLASSIC])
def test_the_distribution_under_a_constraint(rule, lab):
    """Forbidden drafts count as rejected under the classic rules: without them, allowed ones would come too often."""
    here, num_seeds, allowed = lab("llama"), 250, FewWords()
    prompt = [16]  # nothing is left to prefill
    logits = here.target.score(torch.tensor([prompt]), FeatureSpec()).logits[0, -1][list(allowed.words)]
    distribution = logits.softmax(0)
    side, chance = allowed.words[int(distribution.argmax())], float(distribution.max())
    assert 0.1 < chance < 0.6
    settings = {"temperature": 1.0, "max_tokens": 2}
    requests = [(prompt, Sampling(seed=seed, **settings), allowed) for seed in range(num_seeds)]
    texts, stats = decode(here.target, Coin(EOS + 2, side), requests, Budget(1), rule)
    assert (sum(each.num_drafted for each in stats) == num_seeds) == (rule != "match")  # there they are cut
    found = sum(text[0] == side for text in texts)
    assert abs(found - num_seeds * chance) < 3.5 * (num_seeds * chance * (1 - chance)) ** 0.5


class FewWords:
    """Every other token may follow any other, and never an end."""

    words = tuple(token for token in range(3, VOCAB) if token % 2)

    def start(self):
        return self

    def allowed(self):
        return words_of(self.words)

    def take(self, token):
        assert token in self.words

    def fork(self):
        return self


def test_a_constraint_that_fails_ends_its_own_text(lab):
    here = lab("llama")
    own = Engine(Decoder(here.target, lambda: DRAFTERS["lm-tree"].make(here, "t1"), budget=Budget(3, 2)))
    free = own.submit(PROMPTS[1], Sampling(max_tokens=12, ignore_eos=True))
    bad = own.submit(PROMPTS[2], constraint=Rhymes(fails_at=5))
    own.run()
    assert (free.finish_reason, len(free.token_ids)) == ("length", 12)
    assert (bad.finish_reason, str(bad.error)) == ("error", "no rhyme any more")
    assert len(bad.token_ids) <= 5
    nothing = Sampling(banned_tokens=tuple(token for token in range(VOCAB) if token % 3))
    last = own.submit(PROMPTS[2], nothing, constraint=Rhymes())
    own.run()
    with refused(NumericsError, "leave no token with a finite score", "constraint that allows none of what is left"):
        raise last.error


def test_what_is_no_constraint_is_refused(lab):
    own = Engine(Decoder(lab("llama").target))
    with refused(ConfigError, "constraint must have a start()", "found 'json'"):
        own.submit([5], constraint="json")
    with refused(ConfigError, "ignore_eos forbids that"):
        own.submit([5], Sampling(ignore_eos=True), constraint=Rhymes())
    assert own.num_waiting == 0


# --- min_tokens ------------------------------------------------------------------------------------------------------


def test_nothing_ends_a_text_before_min_tokens(lab):
    """The end token is by far the likeliest, so that it comes as soon as it may."""
    here, likely = lab("llama"), {EOS: 1e6}
    for name in (None, "lm-tree", "scattered"):
        for least in (0, 1, 7):
            sampling = Sampling(min_tokens=least, max_tokens=12, logit_bias=likely)
            drafter = None if name is None else DRAFTERS[name].make(here, "greedy")
            ((text,), _) = decode(here.target, drafter, [(PROMPTS[1], sampling, None)], Budget(4, 2))
            assert len(text) == least + 1
            assert text.index(EOS) == least
    stop = replace(sampling, logit_bias={9: 1e6}, stop_tokens=(9,), ignore_eos=True)
    ((text,), _) = decode(here.target, None, [(PROMPTS[1], stop, None)])
    assert text.index(9) == 7
    ((text,), _) = decode(here.target, None, [(PROMPTS[1], replace(sampling, ignore_eos=True), None)])
    assert text == (EOS,) * 12  # a token that ends nothing may come at any time


@pytest.mark.parametrize("value", [-1, 25, 1.5, "3", True, None])
def test_min_tokens_lie_within_max_tokens(value):
    with pytest.raises(SamplingError, match="min_tokens must be"):
        Sampling(max_tokens=24, min_tokens=value)


class Letters:
    """Token 0 is ``a``, token 1 ``b``, ..."""

    def decode(self, ids, *, skip_special_tokens):
        return "".join(chr(97 + token) for token in ids)


@pytest.mark.parametrize(
    ("stop", "least", "shown"),
    [
        (("c",), 0, "ab"),
        (("c",), 2, "ab"),
        (("c",), 3, "abcab"),
        (("ca",), 3, "ab"),  # complete with the fourth token, though it begins before
        (("ca",), 4, "abcabcabc"[:5]),
        (("b", "bcx"), 2, "abca"),  # an early b that may begin another one is still not an end
        (("cabca",), 5, "ab"),
    ],
)
def test_stop_strings_that_are_complete_too_soon_are_none(stop, least, shown):
    for size in (1, 2, 9):
        stream, text = TextStream(Letters(), (), stop, min_ids=least), ""
        ids = [0, 1, 2] * 3
        for at in range(0, len(ids), size):
            text += stream.push(ids[at : at + size])
        assert text + stream.flush() == shown, size


# --- grammars --------------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["x", "yz"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
LARK = 'start: "def " name "(" name ("," name)? ")"\nname: /[a-c]{1,3}/'


@pytest.fixture(scope="module")
def lm(folder_of, tmp_path_factory):
    pytest.importorskip("llguidance")
    path = tmp_path_factory.mktemp("grammar") / "model"
    add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=320), path))  # more rows than the tokenizer has tokens
    return dw.load(path, f"{path}+lookup", dtype="float64", device="cpu", draft_options={"min_match": 1})


def test_a_text_follows_its_grammar_whatever_is_drafted(lm):
    grammars = [
        (0.0, SCHEMA, lambda text: set(json.loads(text)) == {"kind", "count"} and json.loads(text)["count"] < 100),
        (1.0, Grammar.regex(r"[0-9]{3}-[a-f]{2,9}"), re.compile(r"[0-9]{3}-[a-f]{2,9}").fullmatch),
        (1.0, Grammar.lark(LARK), re.compile(r"def [a-c]{1,3}\([a-c]{1,3}(,[a-c]{1,3})?\)").fullmatch),
    ]
    for temperature, grammar, is_valid in grammars:
        options = {"temperature": temperature, "seed": 5, "max_tokens": 200, "grammar": grammar}
        texts = []
        for budget in ("none", Budget(3, 2, 5)):
            (found,) = lm.generate("def add(a, b):", speculation=budget, **options)
            texts.append(found.token_ids)
            assert found.finish_reason == "stop"
            assert found.token_ids[-1] == EOS
            assert is_valid(found.text), found.text
        assert texts[0] == texts[1]
        assert found.stats.num_accepted > 0
        assert "".join(step.text for step in lm.stream("def add(a, b):", **options)) == found.text


def test_any_json_object(lm):
    (found,) = lm.generate("x", max_tokens=12, grammar="json", temperature=1.0, seed=2)
    assert found.text.startswith("{")
    assert lm.constraint("json") is lm.constraint(Grammar.json_object()) is lm.constraint({"type": "object"})


def test_space_is_bounded(lm):
    """Blanks are by far the likeliest, and still the text ends."""
    bias = {lm.encode(blank)[-1]: 1e6 for blank in (" ", "\n")}
    (found,) = lm.generate("x", max_tokens=500, grammar=SCHEMA, logit_bias=bias)
    assert found.finish_reason == "stop"
    assert set(json.loads(found.text)) == {"kind", "count"}


def test_a_complete_grammar_ends_a_young_text(lm):
    (found,) = lm.generate("x", max_tokens=50, min_tokens=40, grammar=Grammar.regex("[ab]{5}"))
    assert re.fullmatch("[ab]{5}", found.text)
    long = {"grammar": Grammar.regex("[ab]{1,300}"), "logit_bias": {EOS: 1e6}}
    (longer,) = lm.generate("x", max_tokens=50, min_tokens=40, **long)
    assert len(longer.token_ids) == 41


def test_what_is_allowed_is_found_again_after_each_token(lm):
    state, ids = lm.constraint(Grammar.regex("abc")).start(), lm.tokenizer.encode_plain("a")
    before = state.allowed().copy()
    state.take(ids[0])
    assert has_bit(before, ids[0])
    assert not has_bit(state.allowed(), ids[0])


def test_the_grammars_that_were_used_last_are_kept(lm, monkeypatch):
    monkeypatch.setattr("draftwing.text.grammar._MAX_COMPILED", 2)
    one, two, three = (Grammar.regex(f"a{{{count}}}") for count in (1, 2, 3))
    grammars = Grammars(lm.tokenizer, lm.target.vocab_size, [EOS])
    first, second = grammars.constraint(one), grammars.constraint(two)
    assert grammars.constraint(one) is first
    third = grammars.constraint(three)  # in place of the second, which was used before the first
    assert grammars.constraint(one) is first
    assert grammars.constraint(three) is third
    assert grammars.constraint(two) is not second


def test_levels_of_nesting_are_counted():
    for value, levels in (([], 1), ([1], 1), ([[1]], 2), ({"a": [{}]}, 3)):
        assert not is_deeper(value, levels)
        assert is_deeper(value, levels - 1)


def deep(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ({"type": "nonsense"}, "the JSON schema cannot be followed"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "cannot be followed"),
        ({"$ref": "http://example.com/x.json"}, "cannot be followed"),
        ({"type": "object", "not": {}}, "cannot be followed"),
        (deep(MAX_LEVELS + 1), f"nested deeper than {MAX_LEVELS} levels"),
        (deep(100_000), "nested deeper than"),
        ({"a": {1, 2}}, "is not JSON"),
        ({"const": float("nan")}, "is not JSON"),
        (5, "grammar must be a Grammar, a JSON schema as a dict, or 'json', found 5"),
        ("xml", "found 'xml'"),
    ],
)
def test_grammars_that_cannot_be_followed_are_refused(grammar, message, lm):
    with refused(ConfigError, message):
        lm.generate("x", grammar=grammar)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "(a"),
        ("regex", "(" * 2000 + "a" + ")" * 2000),
        ("lark", "start: nope"),
        ("lark", ""),
        ("lark", "x" * (MAX_CHARACTERS + 1)),
        ("xml", "<a/>"),
        ("regex", 5),
        (["regex"], "a"),
    ],
)
def test_sources_that_cannot_be_read_are_refused(kind, source, lm):
    with pytest.raises(ConfigError) as caught:
        lm.constraint(Grammar(kind, source))
    assert len(str(caught.value)) < 400
    with refused(ConfigError, "a JSON schema is an object or true or false, found [1]"):
        Grammar.json_schema("[1]")
    assert as_grammar(Grammar.json_schema("true")).source == "true"


def test_without_llguidance_it_says_what_to_install(lm, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    lm.__dict__.pop("_grammars", None)
    with refused(UnsupportedError, "grammars need llguidance", "pip install 'draftwing[grammar]'"):
        lm.generate("x", grammar="json")
    assert issubclass(UnsupportedError, DraftwingError)
