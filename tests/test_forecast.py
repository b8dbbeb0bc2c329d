"""A forecast walks along recorded texts like decoding does: compared with a formula, explicit trees and decoding."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

import draftwing as dw
from conftest import refused
from draftwing.budget.costs import Costs, Curve
from draftwing.cli.main import app
from draftwing.errors import CheckpointError, ConfigError
from draftwing.formats.identity import head_id
from draftwing.lab.forecast import (
    DEPTH,
    FILE,
    ForecastTexts,
    HeldOut,
    ReferenceTree,
    accepted,
    collect,
    forecast,
    statistics,
    walk,
)
from draftwing.lm import LM
from draftwing.methods.base import EAGLE_TREE, Budget
from draftwing.sampling import Sampling
from draftwing.shipped import SHIPPED, TOY
from draftwing.text.prompts import shipped_prompts

BUDGETS = {
    "chain": Budget(4), "long chain": Budget(DEPTH), "static": Budget(paths=EAGLE_TREE), "dynamic": Budget(6, 10, 20),
    "wide": Budget(8, 10, 59), "all": Budget(3, 10),
}  # fmt: skip
MADE = {"head": "0" * 16, "target": "t", "runs_as": "", "context": 64.0}


def texts_of(found, ranks, lengths, stopped=False):
    """Texts whose reference trees are single paths with these ranks."""
    return ForecastTexts(
        lengths=np.array(lengths, dtype=np.int32),
        stopped=np.full(len(lengths), stopped),
        found=np.array(found, dtype=np.uint8),
        ranks=np.array(ranks, dtype=np.uint8),
        likelier=np.zeros((len(ranks), DEPTH), dtype=np.uint8),
    )


@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_independent_rates_give_the_papers_tau(alpha):
    generator = np.random.default_rng(3)
    found = np.minimum(generator.geometric(1 - alpha, size=60_000) - 1, DEPTH)
    texts = texts_of(found, np.zeros(found.sum()), [20_000] * 3)
    for gamma in (1, 3, 7):
        assert walk(texts, Budget(gamma)).tau == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha), rel=0.02)


def test_a_step_starts_at_the_end_of_the_last_one_and_only_a_text_that_stopped_cuts_it_short():
    # Three easy positions before a hard one: a mean over positions would be (3 + 2 + 1 + 0) / 4 + 1 = 2.5.
    steps = walk(texts_of([3, 2, 1, 0] * 10, [0] * 60, [40]), Budget(5))
    assert (steps.tau, steps.steps.tolist(), steps.tokens.tolist()) == (4.0, [10], [40])
    for stopped, tokens in ((True, 5), (False, 8)):
        texts = texts_of([3, 0, 0, 0, 3], [0] * 6, [5], stopped)
        assert walk(texts, Budget(5)).tokens.tolist() == [tokens]


def random_trees(count, seed=0):
    """Trees of three children, four deep, ten nodes of each level expanded; and the tokens that follow."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        tokens, parents, chances, level = [0], [-1], [1.0], [0]
        for _ in range(4):
            fresh = []
            for node in level:
                rates = np.sort(generator.dirichlet([0.6] * 3))[::-1]
                for rank in range(3):
                    fresh.append(len(tokens))
                    tokens.append(rank)  # a token is its rank
                    parents.append(node)
                    chances.append(float(np.float32(chances[node] * rates[rank])))
            level = sorted(fresh, key=lambda node: -chances[node])[:10]
        following = generator.choice(4, size=6, p=[0.6, 0.2, 0.1, 0.1])
        yield ReferenceTree(*map(np.array, (tokens, parents, chances))), following


def recorded(trees):
    return statistics((following.tolist(), False, [tree]) for tree, following in trees)


def kept_by(tree, keeps, following):
    """How many of the following tokens lie in the part of a tree for which ``keeps``."""
    node = 0
    for depth, token in enumerate(following):
        below = np.flatnonzero((tree.parents == node) & (tree.tokens == token))
        if not len(below) or below[0] not in keeps:
            return depth
        node = below[0]
    return len(following)


@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (5, 2), (12, 4), (40, 3), (100, 4)])
def test_dynamic_trees_are_the_best_nodes(nodes, depth):
    trees = list(random_trees(200))
    expected = []
    for tree, following in trees:
        depths = np.repeat(np.arange(5), (1, 3, 9, 27, 30))  # ten of the third level's 27 have children
        order = np.argsort(-tree.chances, kind="stable")
        best = [node for node in order if 0 < depths[node] <= depth][:nodes]
        expected.append(kept_by(tree, set(best), following))
    assert sum(expected) > 0
    assert accepted(recorded(trees), Budget(depth, 10, nodes)).tolist() == expected


def test_static_trees_go_by_ranks():
    trees = list(random_trees(300, seed=1))
    found = accepted(recorded(trees), Budget(paths=EAGLE_TREE))
    for kept, (_, following) in zip(found.tolist(), trees, strict=True):
        path = following.tolist()[:kept]
        assert not path or tuple(path) in EAGLE_TREE
        assert kept == 4 or following[kept] > 2 or tuple(following.tolist()[: kept + 1]) not in EAGLE_TREE
    assert len(set(found.tolist())) > 3


TOKENS = 4  # a node of 911 in each of three trees takes its time


@pytest.fixture(scope="module")
def shipped():
    """The shipped head's statistics on three prompts, and what they were made of."""
    lm = dw.load(draft="eagle3")
    prompts = [lm.encode(prompt) for prompt in shipped_prompts(3)]
    return lm, prompts, collect(lm.target, lm.new_drafter, head_id(TOY / "eagle3"), prompts, num_tokens=TOKENS)


@pytest.mark.parametrize(("name", "temperature"), [("chain", 1.0), *zip(BUDGETS, [0.0, 1.0] * 3, strict=True)])
def test_decoding_keeps_what_the_record_says(shipped, name, temperature):
    lm, prompts, found = shipped
    texts = found.at(temperature)
    kept = accepted(texts, BUDGETS[name])
    engine = LM(lm.target, lm.tokenizer, lm.new_drafter, budget=BUDGETS[name]).engine()
    for number, prompt in enumerate(prompts):
        engine.submit(prompt, Sampling(temperature=temperature, max_tokens=200, seed=number))
    starts, wrong, beyond, seen = np.cumsum(texts.lengths) - texts.lengths, 0, 0, 0
    for step in engine.steps():
        for row in step.rows:
            at = row.position - len(prompts[row.request_id])
            if at < texts.lengths[row.request_id]:
                place = starts[row.request_id] + at
                seen += 1
                # A static tree may go where the reference tree, which is ten nodes wide, did not.
                ended = name == "static" and row.num_accepted > kept[place] == texts.found[place]
                beyond += ended
                wrong += row.num_accepted != kept[place] and not ended
        if all(row.position - len(prompts[row.request_id]) >= TOKENS for row in step.rows):
            break
    assert seen >= 3
    assert wrong == 0
    assert beyond <= 1


def test_the_file_keeps_everything(shipped, tmp_path):
    _, _, found = shipped
    folder = shutil.copytree(TOY / "eagle3", tmp_path / "head")
    assert found.write(folder).stat().st_size < 20_000
    read = HeldOut.read(folder)
    assert read.describe() == found.describe()
    other = dataclasses.replace(found, texts={0.7: found.at(1.0)})
    assert sorted(other.joined(read).texts) == [0.0, 0.7, 1.0]
    assert sorted(dataclasses.replace(other, head="1" * 16).joined(read).texts) == [0.7]
    for temperature in (0.0, 1.0):
        for field in dataclasses.fields(ForecastTexts):
            own, other = (getattr(each.at(temperature), field.name) for each in (found, read))
            assert np.array_equal(own, other), field.name


def test_files_that_cannot_be_used_are_refused(shipped, tmp_path):
    _, _, found = shipped
    folder = shutil.copytree(TOY / "eagle3", tmp_path / "head")
    (folder / FILE).unlink(missing_ok=True)
    with refused(CheckpointError, "no held-out statistics", "predict --collect"):
        HeldOut.read(folder)
    whole = found.write(folder).read_bytes()
    for damaged in (b"", whole[:200], whole[: len(whole) // 2] + b"x" * 50 + whole[len(whole) // 2 + 50 :], b"PK" * 40):
        (folder / FILE).write_bytes(damaged)
        with refused(CheckpointError, "not readable as held-out statistics", "predict --collect"):
            HeldOut.read(folder)
    (folder / FILE).write_bytes(whole)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "more": 1}))
    with refused(CheckpointError, "other weights", "predict --collect"):
        HeldOut.read(folder)


@pytest.mark.parametrize(
    ("budget", "temperature", "parts"),
    [
        (Budget(2), 0.7, ("temperature 0, not of 0.7", "--collect -T 0.7")),
        (Budget(11), 0.0, ("reach 10 levels of 10 nodes", "draftwing compare")),
        (Budget(1, 11), 0.0, ("reach 10 levels of 10 nodes", "draftwing compare")),
    ],
)
def test_forecasts_beyond_the_statistics_are_refused(budget, temperature, parts):
    with refused(ConfigError, *parts):
        forecast(HeldOut(**MADE, texts={0.0: texts_of([1, 0], [0], [2])}), {"tree": budget}, [temperature])


def test_inconsistent_statistics_are_refused():
    with refused(ConfigError, "`stopped` must be bool", "collect them again"):
        dataclasses.replace(texts_of([1, 0], [0], [2]), stopped=np.zeros(1))
    with refused(ConfigError, "add up to", "collect them again"):
        texts_of([1, 0], [0], [3])


CURVES = (Curve(((1, 0.010), (64, 0.0163))), Curve(((1, 0.001), (8, 0.008))), Curve(((1, 0.001), (8, 0.015))))
COSTS = Costs(*CURVES, width=4, context=64)


def test_speedup_is_tau_over_what_a_step_takes():
    texts = texts_of([3, 2, 1, 0] * 10, [0] * 60, [40])
    chain, static = forecast(
        HeldOut(**MADE, texts={0.0: texts}), {"c": Budget(5), "s": Budget(paths=EAGLE_TREE)}, [0.0], COSTS
    )
    assert chain.tau == 4.0
    assert chain.speedup == pytest.approx(4.0 * 0.010 / (0.0105 + COSTS.draft_seconds(5)))
    # One node of the first level is expanded, then 4, 6, 3 and 1 of EAGLE-1's tree.
    inner = {path[:-1] for path in EAGLE_TREE}
    effort = sum(1 + (sum(len(path) == depth for path in inner) - 1) * COSTS.node_share for depth in range(5))
    assert static.speedup == pytest.approx(4.0 * 0.010 / (0.0125 + COSTS.draft_seconds(effort)))


def test_intervals_hold_the_mean(shipped):
    _, _, held_out = shipped
    steps = walk(held_out.at(1.0), Budget(5))
    low, high = steps.interval()
    assert low <= steps.tau <= high
    assert low < high
    assert (low, high) == steps.interval()


def invoke(*words):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}).invoke(app, ["predict", *words])


def test_the_command_reads_the_head_alone(shipped, tmp_path):
    _, _, found = shipped
    folder = shutil.copytree(TOY / "eagle3", tmp_path / "head")
    found.write(folder)
    shown = invoke("--draft", str(folder), "--tau-only", "--tree", "chain:4", "-T", "0", "--json")
    assert shown.exit_code == 0, shown.output
    (only,) = json.loads(shown.stdout)["forecasts"]
    assert (only["tree"], only["tau"], only["speedup"]) == ("chain:4", walk(found.at(0.0), Budget(4)).tau, None)
    table = invoke("--draft", str(folder), "--tau-only")
    assert table.exit_code == 0
    assert "dynamic:59,8,10" in table.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--collect", "--tau-only"], "exclude each other"),
        (["--tau-only", "--tree", "auto"], "name others"),
        (["--draft", "lookup"], "lookup has none"),
        (["--target", "x", "--draft", str(TOY / "eagle3"), "--collect"], "give some 40 with --prompts"),
    ],
)
def test_the_command_refuses(words, said):
    shown = invoke(*words)
    assert shown.exit_code != 0
    assert said in f"{shown.output}{shown.exception}"


def test_collecting_for_a_shipped_head_leaves_the_package_alone(tmp_path, monkeypatch):
    def contents():
        return {path: path.read_bytes() for path in SHIPPED.rglob("*") if path.is_file()}

    monkeypatch.setenv("DRAFTWING_CACHE", str(tmp_path / "cache"))
    before = contents()
    try:
        collected = invoke("--collect", "-T", "0.5", "--num-prompts", "1", "--tree", "chain:2", "--json")
        changed = [path for path, data in contents().items() if before.get(path) != data]
    finally:  # other tests read these files
        for path, data in before.items():
            if path.read_bytes() != data:
                path.write_bytes(data)
    assert collected.exit_code == 0, collected.output
    assert not changed
    assert str(tmp_path / "cache") in collected.stderr
    # The statistics are found again, with those that ship.
    again = invoke("--tau-only", "-T", "0.5", "-T", "0", "--tree", "chain:2", "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["statistics"]["texts"].keys() >= {"0", "0.5"}
