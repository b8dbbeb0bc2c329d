"""The inspector's traces and lessons agree with the steps that they show; distributions at the nodes of a tree."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

import draftwing as dw
from conftest import refused
from draftwing.errors import ConfigError, SamplingError
from draftwing.sampling import Sampling
from draftwing.serve.trace import TokenNames, Tracer, lesson, step_trace
from draftwing.tree import PAD

PROMPT = "def quicksort(items):\n    if len(items) <= 1:\n        return items\n"
DRAFTS = ["eagle3", "causal-lm", "lookup", "eagle3+lookup", "none"]
TREE = dw.Budget(4, 3, 12)
LENGTH = 24


@pytest.fixture(scope="module")
def lm_of():
    made = {}

    def get(draft):
        if draft not in made:
            made[draft] = dw.load(draft=draft, device="cpu", budget=TREE)
        return made[draft]

    return get


def traces(lm, **options):
    """Of every step, with the step itself."""
    ids = lm.encode(PROMPT)
    tracer = Tracer(lm.tokenizer, ids, Sampling(max_tokens=LENGTH, **options))
    steps = lm.stream(PROMPT, max_tokens=LENGTH, ignore_eos=True, **options)
    return [(tracer.trace(each.step.rows[0], each.step), each.step) for each in steps]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trace_says_what_its_step_did(lm_of, draft, temperature):
    lm, text, drafted = lm_of(draft), "", 0
    for trace, step in traces(lm, temperature=temperature, seed=3):
        json.dumps(trace, allow_nan=False)
        row, nodes = step.rows[0], trace["nodes"]
        tokens = [token for token in step.tree.tokens[0].tolist() if token != PAD]
        assert [node["id"] for node in nodes] == tokens
        assert len(nodes) == row.num_drafted + 1 == trace["num_drafted"] + 1
        assert max(node["depth"] for node in nodes) == row.depth == trace["depth"]
        assert nodes[0]["parent"] == -1
        assert all(nodes[node["parent"]]["depth"] + 1 == node["depth"] for node in nodes[1:])
        path = trace["path"]
        assert [i for i, node in enumerate(nodes) if node["kept"]] == path
        assert len(path) == row.num_accepted + 1 == trace["num_accepted"] + 1
        assert all(nodes[child]["parent"] == above for above, child in itertools.pairwise(path))
        said = [*(nodes[node]["id"] for node in path[1:]), trace["bonus"]["id"]]
        assert trace["token_ids"] == list(row.token_ids) == said[: len(row.token_ids)]
        assert trace["position"] == row.position
        assert sum(trace["seconds"].values()) == pytest.approx(step.timings.total, abs=1e-6)
        assert "".join(piece["text"] for piece in trace["pieces"]) == row.text
        if step.tree.node_probs is not None:
            told = step.tree.node_probs[0][step.tree.tokens[0] != PAD].tolist()
            assert [node["chance"] for node in nodes[1:]] == pytest.approx(told[1:], rel=1e-4)
        if step.tree.confidence is not None:
            told = step.tree.confidence[0][step.tree.tokens[0] != PAD].tolist()
            assert [node["reach"] for node in nodes[1:]] == pytest.approx(told[1:], rel=1e-4)
        text, drafted = text + row.text, drafted + row.num_drafted
    options = {"temperature": temperature, "seed": 3, "max_tokens": LENGTH, "ignore_eos": True}
    assert text == lm_of("none").generate(PROMPT, **options)[0].text
    assert (drafted > 0) == (draft != "none")


@pytest.mark.parametrize("options", [{}, {"stop": ("\n",), "min_tokens": LENGTH}], ids=["plain", "ignored-stop"])
def test_only_drafted_tokens_are_shown_as_drafted(lm_of, options):
    for trace, step in traces(lm_of("eagle3"), **options):
        tokens = [text for text, is_drafted in ((p["text"], p["drafted"]) for p in trace["pieces"]) if is_drafted]
        kept = lm_of("eagle3").tokenizer.decode(list(step.rows[0].token_ids)[: step.rows[0].num_accepted])
        assert "".join(tokens) == kept


def test_rows_of_a_batch_have_traces_of_their_own(lm_of):
    lm = lm_of("eagle3")
    engine, names = lm.engine(max_batch=2), TokenNames(lm.tokenizer)
    requests = [engine.submit(lm.encode(text), Sampling(max_tokens=8, ignore_eos=True)) for text in (PROMPT, "import ")]
    said = {request.id: [] for request in requests}
    for step in engine.steps():
        for place, row in enumerate(step.rows):
            trace = step_trace(step, place, names)
            assert trace["num_rows"] == len(step.rows)
            kept = [trace["nodes"][node]["id"] for node in trace["path"][1:]]
            assert [*kept, trace["bonus"]["id"]][: trace["num_tokens"]] == trace["token_ids"]
            said[row.request_id] += trace["token_ids"]
    assert [said[request.id] for request in requests] == [request.token_ids for request in requests]


def test_steps_that_nobody_read_in_time_keep_their_text(lm_of):
    lm = lm_of("eagle3")
    first, then = [each.step.rows[0] for each in lm.stream(PROMPT, max_tokens=12, ignore_eos=True)][:2]
    joined = replace(
        then, token_ids=first.token_ids + then.token_ids, position=first.position, text=first.text + then.text
    )
    trace = Tracer(lm.tokenizer, lm.encode(PROMPT), Sampling()).trace(joined, None)
    assert "nodes" not in trace
    assert trace["token_ids"] == list(joined.token_ids)
    assert "".join(piece["text"] for piece in trace["pieces"]) == joined.text


def test_every_token_can_be_shown(lm_of):
    shown = TokenNames(lm_of("none").tokenizer)
    names = [shown(token) for token in range(lm_of("none").target.vocab_size)]
    assert all(names)
    assert not any("\ufffd" in name for name in names)


# --- distributions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["eagle3", "none"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_distributions_are_the_targets_own_and_change_nothing(lm_of, draft, temperature):
    lm, said = lm_of(draft), []
    for trace, step in traces(lm, temperature=temperature, seed=5, node_distributions=4, logprobs=0):
        row, nodes = step.rows[0], trace["nodes"]
        assert len(row.node_distributions) == len(nodes)
        for node, distribution in zip(nodes, row.node_distributions, strict=True):
            chances = {token: (chance, noise) for token, chance, noise in distribution.chances}
            assert len(chances) >= 4
            assert 0 < sum(chance for chance, _ in chances.values()) <= 1 + 1e-6
            assert {
                each["id"] for each in nodes if nodes[each["parent"]] is node and each is not nodes[0]
            } <= chances.keys()
            assert distribution.drawn == max(
                chances, key=lambda token: math.log(chances[token][0] + 1e-300) + chances[token][1]
            )
            assert node["distribution"]["drawn"] == distribution.drawn
            assert all((noise == 0) == (temperature == 0) for _, noise in chances.values())
        for node, logprob in zip(trace["path"], row.logprobs, strict=False):
            distribution = row.node_distributions[node]
            assert distribution.drawn == logprob.token
            chance = next(chance for token, chance, _ in distribution.chances if token == logprob.token)
            assert chance == pytest.approx(math.exp(logprob.logprob), rel=1e-3)
        said += row.token_ids
    plain = lm.generate(PROMPT, temperature=temperature, seed=5, max_tokens=LENGTH, ignore_eos=True)[0]
    assert said == plain.token_ids
    assert all(step.rows[0].node_distributions is None for _, step in traces(lm, temperature=temperature))


def test_distributions_know_the_settings(lm_of):
    lm = lm_of("eagle3")
    wanted = lm.encode("x")[-1]
    for _, step in traces(lm, temperature=0.7, seed=1, node_distributions=1, logit_bias={wanted: 1e4}):
        for distribution in step.rows[0].node_distributions:
            assert distribution.chances[0][:2] == (wanted, pytest.approx(1.0))
            assert distribution.drawn == wanted
    for _, step in traces(lm, temperature=0.7, seed=1, node_distributions=1, top_k=1):
        assert all(distribution.chances[0][1] == 1 for distribution in step.rows[0].node_distributions)


@pytest.mark.parametrize("distributions", [-1, 65])
def test_distributions_out_of_range_are_refused(distributions):
    with refused(SamplingError, "node_distributions must be in [0, 64]"):
        Sampling(node_distributions=distributions)


# --- lessons ---------------------------------------------------------------------------------------------------------


def teach(lm, sampling, ids=None):
    ids = lm.encode(PROMPT) if ids is None else ids
    return lesson(lm.target, lm.new_drafter, ids, sampling, TokenNames(lm.tokenizer))


@pytest.mark.parametrize("draft", ["eagle3", "causal-lm"])
def test_a_lesson_tells_the_classic_rules_decisions(lm_of, draft):
    lm, fates, num_second = lm_of(draft), set(), 0
    for seed in range(8):
        told = teach(lm, Sampling(temperature=1.0, seed=seed))
        json.dumps(told, allow_nan=False)
        for name in ("chain", "tree"):
            tries, last = told[name]["tries"], told[name]["last"]
            assert tries
            for each in tries:
                fates.add(each["kept"])
                assert each["accept"] == pytest.approx(min(1.0, each["p"] / each["q"]))
                assert each["kept"] == (each["u"] < each["accept"])
                mine = next(distribution for distribution in each["distributions"] if distribution["id"] == each["id"])
                assert (mine["p"], mine["q"]) == (each["p"], each["q"])
            kept = {0, *(each["node"] for each in tries if each["kept"])}
            assert all(each["parent"] in kept for each in tries)
            assert last["is_rest"] == (not tries[-1]["kept"])
            assert last["id"] in [distribution["id"] for distribution in last["distributions"] if distribution["p"] > 0]
        assert all(each["parent"] + 1 == each["node"] for each in told["chain"]["tries"])
        for first, then in itertools.pairwise(told["tree"]["tries"]):
            if first["parent"] == then["parent"]:  # what was tried is taken from q
                num_second += 1
                assert all(each["q"] == 0 for each in then["distributions"] if each["id"] == first["id"])
    assert fates == {True, False}
    assert num_second


def test_a_lesson_and_a_distribution_agree_on_p(lm_of):
    lm = lm_of("eagle3")
    told = teach(lm, Sampling(temperature=0.8, seed=2))
    distribution = traces(lm, temperature=0.8, seed=2, node_distributions=64)[0][1].rows[0].node_distributions[0]
    chances = {token: chance for token, chance, _ in distribution.chances}
    both = [
        distribution for distribution in told["chain"]["tries"][0]["distributions"] if distribution["id"] in chances
    ]
    assert len(both) >= 3
    assert all(each["p"] == pytest.approx(chances[each["id"]], rel=1e-3) for each in both)


def test_what_rejections_leave_is_p_without_q(lm_of):
    lm = lm_of("eagle3")
    for seed in range(20):
        first = teach(lm, Sampling(temperature=1.0, seed=seed))["chain"]
        if not first["tries"][0]["kept"]:
            break
    distributions = {distribution["id"]: distribution for distribution in first["tries"][0]["distributions"]}
    rest = {distribution["id"]: distribution["p"] for distribution in first["last"]["distributions"]}
    shared = [
        token for token in distributions if token in rest and distributions[token]["p"] > distributions[token]["q"]
    ]
    scales = [rest[token] / (distributions[token]["p"] - distributions[token]["q"]) for token in shared]
    assert scales
    assert all(scale == pytest.approx(scales[0], rel=1e-6) and scale >= 1 for scale in scales)


def test_at_temperature_0_a_lesson_is_told_at_1(lm_of):
    assert teach(lm_of("eagle3"), Sampling())["temperature"] == 1.0


def test_of_a_draft_that_copies_q_is_one_token(lm_of):
    lm = lm_of("lookup")
    tries = teach(lm, Sampling(temperature=1.0, seed=1), ids=(lm.encode(PROMPT) * 2)[:-4])["chain"]["tries"]
    assert tries
    assert all(each["q"] == 1.0 and each["accept"] == each["p"] for each in tries)


def test_a_draft_without_q_has_no_lesson(lm_of):
    lm = lm_of("lookup")

    def new_drafter():
        drafter = lm.new_drafter()
        propose = drafter.propose
        drafter.propose = lambda *given: replace(propose(*given), draft_probs=None)
        return drafter

    with refused(ConfigError, "no distribution q"):
        lesson(lm.target, new_drafter, lm.encode(PROMPT) * 2, Sampling(seed=1), TokenNames(lm.tokenizer))


def test_a_lesson_leaves_texts_alone(lm_of):
    lm = lm_of("eagle3")
    stream = lm.stream(PROMPT, temperature=1.0, seed=4, max_tokens=16, ignore_eos=True)
    said = [*next(stream).token_ids]
    teach(lm, Sampling(temperature=1.0, seed=9))
    for step in stream:
        said += step.token_ids
    assert said == lm.generate(PROMPT, temperature=1.0, seed=4, max_tokens=16, ignore_eos=True)[0].token_ids
    assert torch.is_inference_mode_enabled() is False
