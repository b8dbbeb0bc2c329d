"""Sampling parameters, and scores against transformers' own processors and brute force."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftwing.errors import SamplingError
from draftwing.noise import KeyedNoise
from draftwing.sampling import History, Penalties, Sampling, SamplingBatch, penalised_on_host
from draftwing.sampling import penalised as on_device
from draftwing.tree import PAD, DraftTree

NAN, INF = math.nan, math.inf


def logits_of(rows: int, nodes: int, vocab: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(rows, nodes, vocab, dtype=torch.float64, generator=generator)


def scores_of(rows: list[Sampling], logits: torch.Tensor, tree: DraftTree | None = None, history=None) -> torch.Tensor:
    batch = SamplingBatch(rows, KeyedNoise(logits.shape[-1]))
    return batch.scores(logits, tree or DraftTree.root(torch.zeros(len(rows), dtype=torch.int64)), history)


# --- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values", "wanted"),
    [
        ("temperature", (-0.1, INF, NAN, 1e-40, 1e39), r"0 \(greedy\) or in \[1e-10, 1e10\]"),
        ("top_k", (0, -5), "None or at least 1"),
        ("top_p", (0.0, 1.01, -1.0, NAN), r"in \(0, 1\]"),
        ("min_p", (-0.1, 1.1, NAN), r"in \[0, 1\]"),
        ("repetition_penalty", (0.0, -1.0, INF, NAN, 1e-40, 1e39), r"in \[1e-10, 1e10\] \(1 is none\)"),
        ("presence_penalty", (INF, -INF, NAN, 1e39), r"in \[-1e20, 1e20\] \(0 is none\)"),
        ("frequency_penalty", (INF, NAN, 10**400), r"in \[-1e20, 1e20\] \(0 is none\)"),
        ("max_tokens", (0, -1), "at least 1"),
        ("seed", (-1, 2**63), r"None \(drawn\) or in \[0, 2\*\*63\)"),
        ("logprobs", (-1, 65), r"None or in \[0, 64\]"),
        ("stop", ("", ("a", "")), "without empty strings"),
        (
            "logit_bias",
            ({3: INF}, {3: -INF}, {1: 0.0, 2: NAN}),
            r"in \[-1e20, 1e20\] \(ban tokens with banned_tokens\)",
        ),
    ],
)
def test_values_outside_their_range(name, values, wanted):
    for value in values:
        with pytest.raises(SamplingError, match=rf"^{name} must be {wanted}, found "):
            Sampling(**{name: value})


def test_values_at_the_ends_of_their_range():
    Sampling(temperature=0, top_k=1, top_p=1e-9, min_p=1.0, repetition_penalty=0.1, max_tokens=1, seed=2**63 - 1)
    assert Sampling(logprobs=0, presence_penalty=-2.0).penalises
    assert not Sampling().penalises
    lists, tuples = ("END", [3], range(2)), (("END",), (3,), (0, 1))
    one, other = (Sampling(stop=a, stop_tokens=b, banned_tokens=c) for a, b, c in (lists, tuples))
    assert one == other


@pytest.mark.parametrize("name", ["stop", "stop_tokens"])
def test_text_that_utf8_cannot_encode(name):
    with pytest.raises(SamplingError, match=rf"^{name} must be text, found .*: remove the unpaired surrogate"):
        Sampling(**{name: ["a", "b\ud800"]})


def test_token_ids_must_be_the_targets():
    Sampling(logit_bias={60: 1.0}, banned_tokens=(0, 60), stop_tokens=(60,)).check_vocabulary(61)
    for name, value in (("logit_bias", {61: 1.0}), ("banned_tokens", (0, 61)), ("stop_tokens", (-1,))):
        with pytest.raises(SamplingError, match=rf"^{name}: token id -?\d+ is outside the target's vocabulary of 61$"):
            Sampling(**{name: value}).check_vocabulary(61)
    with pytest.raises(SamplingError, match="bans all 3 tokens: nothing is left to draw"):
        Sampling(banned_tokens=(0, 1, 2, 2)).check_vocabulary(3)


# --- one processor at a time -----------------------------------------------------------------------------------------

PROCESSORS = {
    "temperature 0.3": ({"temperature": 0.3}, TemperatureLogitsWarper(0.3)),
    "temperature 2": ({"temperature": 2.0}, TemperatureLogitsWarper(2.0)),
    "top-k 1": ({"top_k": 1}, TopKLogitsWarper(1)),
    "top-k 7": ({"top_k": 7}, TopKLogitsWarper(7)),
    "top-k of more than all": ({"top_k": 5000}, TopKLogitsWarper(5000)),
    "top-p tiny": ({"top_p": 1e-9}, TopPLogitsWarper(1e-9)),
    "top-p 0.5": ({"top_p": 0.5}, TopPLogitsWarper(0.5)),
    "top-p 0.95": ({"top_p": 0.95}, TopPLogitsWarper(0.95)),
    "top-p 0.999": ({"top_p": 0.999}, TopPLogitsWarper(0.999)),
    "min-p 0.05": ({"min_p": 0.05}, MinPLogitsWarper(0.05)),
    "min-p 1": ({"min_p": 1.0}, MinPLogitsWarper(1.0)),
}


@pytest.mark.parametrize("vocab", [61, 1000])
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_are_those_of_transformers(name, vocab):
    parameters, processor = PROCESSORS[name]
    for seed, spread in enumerate((0.1, 1.0, 5.0)):  # nearly flat: top-p 0.95 keeps more than 256 of 1000
        logits = logits_of(3, 2, vocab, seed, spread)
        found = scores_of([Sampling(**{"temperature": 1.0, **parameters})] * 3, logits)
        wanted = processor(None, logits.flatten(0, 1)).view(found.shape)
        assert torch.equal(found.isinf(), wanted.isinf())
        assert torch.allclose(found, wanted, rtol=1e-12, atol=0)


def test_top_p_may_need_more_than_the_few_best():
    logits = logits_of(2, 1, 1000, spread=0.1)
    logits[1] *= 100  # a row for which few suffice shares the batch
    found = scores_of([Sampling(temperature=1.0, top_p=0.9)] * 2, logits)
    kept = found.isfinite().sum(-1)[:, 0].tolist()
    assert kept[0] > 800
    assert kept[1] < 256
    assert torch.equal(found[1:], scores_of([Sampling(temperature=1.0, top_p=0.9)], logits[1:]))


def test_all_together_in_the_order_of_transformers():
    ids = torch.tensor([[3, 8, 8, 60, 5]])
    logits = logits_of(1, 1, 61)
    wanted = logits[:, 0]
    for processor in (
        RepetitionPenaltyLogitsProcessor(1.4),
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(30),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.02),
    ):
        wanted = processor(ids, wanted)
    sampling = Sampling(temperature=0.7, repetition_penalty=1.4, top_k=30, top_p=0.9, min_p=0.02)
    history = History(ids[:, :-1], torch.tensor([4]), torch.tensor([5]))
    found = scores_of([sampling], logits, DraftTree.root(ids[:, -1]), history)[:, 0]
    assert 1 < int(found.isfinite().sum()) < 30
    assert torch.equal(found.isinf(), wanted.isinf())
    assert torch.allclose(found, wanted, rtol=1e-12, atol=0)


def kept(sampling: Sampling, logits: list[float]) -> list[int]:
    found = scores_of([sampling], torch.tensor(logits, dtype=torch.float64)[None, None])
    return found[0, 0].isfinite().nonzero()[:, 0].tolist()


TIES = [1.0, 3.0, 2.0, 2.0, 2.0, 0.0]
BEST = float(torch.tensor(TIES).softmax(0)[1])
HALF = [0.0, -math.log(2), -math.log(2)]  # exactly 0.5, 0.25 and 0.25


@pytest.mark.parametrize(
    ("cuts", "logits", "wanted"),
    [
        ({"top_k": 1}, TIES, [1]),
        ({"top_k": 2}, TIES, [1, 2, 3, 4]),
        ({"top_k": 5}, TIES, [0, 1, 2, 3, 4]),
        ({"top_k": 5, "temperature": 9.0}, TIES, [0, 1, 2, 3, 4]),
        ({"top_p": BEST - 1e-3}, TIES, [1]),
        ({"top_p": BEST + 1e-3}, TIES, [1, 2, 3, 4]),
        ({"top_p": 0.3}, [1.0] * 6, [*range(6)]),
        ({"min_p": 1.0}, [2.0, 2.0, 1.0], [0, 1]),
        ({"top_k": 1}, [2.0, 2.0, 1.0], [0, 1]),
        # A nucleus that is full takes no more: 0.5 reaches a top-p of 0.5, and 0.5 + 0.25 + 0.25 one of 0.75.
        ({"top_p": 0.5}, HALF, [0]),
        ({"top_p": 0.5}, HALF[::-1], [2]),
        ({"top_p": math.nextafter(0.5, 1)}, HALF, [0, 1, 2]),
        ({"top_p": 0.75}, HALF, [0, 1, 2]),
    ],
)
def test_ties_at_the_cut_all_stay(cuts, logits, wanted):
    """However a sort orders them: the text must not depend on it."""
    assert torch.tensor(HALF, dtype=torch.float64).softmax(0).tolist() == [0.5, 0.25, 0.25]
    assert kept(Sampling(**{"temperature": 1.0, **cuts}), logits) == wanted


@pytest.mark.parametrize("top_p", [0.05, 0.62, 0.99])
def test_top_p_against_brute_force(top_p):
    rng = random.Random(5)
    for _ in range(20):
        logits = [float(rng.randrange(4)) for _ in range(8)]  # ties everywhere
        probs = torch.tensor(logits, dtype=torch.float64).softmax(0).tolist()
        ranked = sorted(probs, reverse=True)
        cut = next((p for i, p in enumerate(ranked) if sum(ranked[: i + 1]) >= top_p), ranked[-1])
        assert kept(Sampling(temperature=1.0, top_p=top_p), logits) == [i for i, p in enumerate(probs) if p >= cut]


def test_logit_bias_and_banned_tokens():
    logits = logits_of(3, 2, 9)
    rows = [Sampling(logit_bias={2: 1.5, 8: -100.0}), Sampling(banned_tokens=(0, 4)), Sampling()]
    wanted = logits.clone()
    wanted[0, :, 2] += 1.5
    wanted[0, :, 8] -= 100.0
    wanted[1, :, [0, 4]] = -INF
    assert torch.equal(scores_of(rows, logits), wanted)
    # A ban wins over a bias, and what is banned has no share in a nucleus.
    sampling = Sampling(temperature=1.0, top_p=0.5, logit_bias={0: 50.0}, banned_tokens=(0,))
    assert kept(sampling, [0.0, 5.0, 1.0]) == [1]


def test_penalties_look_at_the_logits_before_any_bias():
    """A bias that turns a negative logit positive does not turn its penalty round."""
    sampling = Sampling(repetition_penalty=2.0, logit_bias={0: 3.0, 1: -3.0})
    history = History(torch.tensor([[0, 1]]), torch.tensor([2]), torch.tensor([2]))
    logits = torch.tensor([[[-1.0, 1.0, 5.0]]], dtype=torch.float64)
    found = scores_of([sampling], logits, DraftTree.root(torch.tensor([2])), history)
    assert found.flatten().tolist() == [-1.0 * 2 + 3, 1.0 / 2 - 3, 5.0 / 2]


# --- penalties on trees ----------------------------------------------------------------------------------------------


def penalised(logits: list[float], past: list[int], output: list[int], sampling: Sampling) -> list[float]:
    """One node by brute force: ``past`` is all that came before the new token, ``output`` its part after the prompt."""
    scores = []
    for token, logit in enumerate(logits):
        if token in past:
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        logit -= sampling.frequency_penalty * output.count(token)
        logit -= sampling.presence_penalty * (token in output)
        scores.append(logit / (sampling.temperature or 1.0))
    return scores


@pytest.mark.parametrize("seed", range(12))
def test_penalties_look_at_each_nodes_own_path(seed):
    rng = random.Random(seed)
    vocab, num_rows, num_nodes = 7, 4, 9  # few tokens: they repeat in prompt, output and path
    samplings = [
        Sampling(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
        Sampling(repetition_penalty=0.7, frequency_penalty=-0.2),
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, presence_penalty=-1.0),
    ]
    committed = [[rng.randrange(vocab) for _ in range(rng.randint(0, 6))] for _ in range(num_rows)]
    # The root is the prompt's last token in some rows, and output in others.
    prompt_lengths = [rng.randint(1, len(tokens) + 1) for tokens in committed]
    tokens, parents = [], []
    for _ in range(num_rows):
        used = [0]
        row, above = [rng.randrange(vocab)], [-1]
        for node in range(1, num_nodes):
            skipped = rng.random() < 0.2
            row.append(PAD if skipped else rng.randrange(vocab))
            above.append(-1 if skipped else rng.choice(used))
            used += [] if skipped else [node]
        tokens.append(row)
        parents.append(above)
    longest = max(map(len, committed))
    padded = [row + [0] * (longest - len(row)) for row in committed]
    history = History(
        torch.tensor(padded, dtype=torch.int64).view(num_rows, longest),
        torch.tensor([len(row) for row in committed]),
        torch.tensor(prompt_lengths),
    )
    logits = logits_of(num_rows, num_nodes, vocab, seed)
    tree = DraftTree.from_lists(tokens, parents)
    found = scores_of(samplings, logits, tree, history)
    names = ("repetition", "presence", "frequency")
    columns = [[[[getattr(row, f"{name}_penalty")]] for row in samplings] for name in names]
    by = Penalties(*torch.tensor(columns, dtype=torch.float64))
    for kind in (torch.float32, torch.float64):
        on_host = penalised_on_host(logits.to(kind), tree, history, by)
        assert torch.equal(on_host, on_device(logits.to(kind), tree, history, by))
    for b, sampling in enumerate(samplings):
        for node in (node for node in range(num_nodes) if tokens[b][node] != PAD):
            path, at = [], node
            while at >= 0:
                path.insert(0, tokens[b][at])
                at = parents[b][at]
            past = committed[b] + path
            wanted = penalised(logits[b, node].tolist(), past, past[prompt_lengths[b] :], sampling)
            assert torch.allclose(found[b, node], torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_does_not_notice_the_others(dtype):
    rows = [
        Sampling(),
        Sampling(temperature=0.6, top_p=0.8, seed=1),
        Sampling(temperature=1.0, top_k=5, seed=2),
        Sampling(temperature=1.3, min_p=0.1, seed=3),
        Sampling(temperature=1.0, seed=1),
    ]
    logits = logits_of(len(rows), 4, 400).to(dtype)
    parents = [-1, 0, 0, 1]
    tree = DraftTree.from_lists([[1, 2, 3, 4]] * len(rows), [parents] * len(rows))
    batch = SamplingBatch(rows, KeyedNoise(400))
    together = batch.scores(logits, tree, None)
    assert together.dtype == dtype
    starts = [5, 9, 5, 1, 7]
    drawn, probs = batch.draw(together, tree.depths, starts, 3), batch.probs(together)
    assert torch.equal(drawn[0], logits[0].argmax(-1))
    assert torch.equal(probs[0], torch.nn.functional.one_hot(drawn[0], 400).to(dtype))
    assert torch.allclose(probs.sum(-1), torch.ones((), dtype=dtype))
    assert bool((probs.gather(-1, drawn[..., None]) > 0).all())
    for b, row in enumerate(rows):
        single = SamplingBatch([row], KeyedNoise(400))
        one = DraftTree.from_lists([[1, 2, 3, 4]], [parents])
        alone = single.scores(logits[b : b + 1], one, None)
        assert not row.temperature or torch.equal(alone[0], together[b])
        assert torch.equal(single.draw(alone, one.depths, starts[b : b + 1], 2)[0], drawn[b])
        assert torch.equal(single.probs(alone)[0], probs[b])


def test_half_precision_is_scored_in_float32():
    logits = logits_of(1, 1, 61).to(torch.bfloat16)
    assert scores_of([Sampling(temperature=0.5)], logits).dtype == torch.float32
    assert scores_of([Sampling()], logits).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_setting_makes_scores_that_are_not_finite(dtype):
    """Everything at its limits at once: NaN or infinity is then the weights' doing alone."""
    logits = 1e3 * logits_of(2, 1, 61).to(dtype)
    history = History(torch.full((2, 1000), 7), torch.tensor([1000, 1000]), torch.tensor([1, 1]))
    tree = DraftTree.root(torch.tensor([7, 7]))
    for sign, temperature, repetition in product((-1, 1), (1e-10, 1e10), (1e-10, 1e10)):
        sampling = Sampling(
            temperature=temperature,
            repetition_penalty=repetition,
            presence_penalty=sign * 1e20,
            frequency_penalty=sign * 1e20,
            logit_bias={7: -sign * 1e20, 8: sign * 1e20},
            banned_tokens=(3,),
            top_p=0.9,
            min_p=0.01,
        )
        batch = SamplingBatch([sampling] * 2, KeyedNoise(61))
        scores = batch.scores(logits, tree, history)
        assert not scores.isnan().any()
        assert not (scores == math.inf).any()
        drawn = batch.draw(scores, tree.depths, [1000, 1000], 0)
        assert scores.gather(-1, drawn[..., None]).isfinite().all()
        assert batch.probs(scores).isfinite().all()


def test_top_k_fits_the_kernel_whatever_it_is():
    rows = [Sampling(temperature=1.0, top_k=k) for k in (None, 1, 60, 61, 2**31, 10**400)]
    assert SamplingBatch(rows, KeyedNoise(61)).filters[1] == [0, 1, 60, 0, 0, 0]
    assert rows[4].top_k == 2**31
    logits = logits_of(len(rows), 1, 61)
    assert (scores_of(rows, logits).isfinite().sum(-1)[:, 0].tolist()) == [61, 1, 60, 61, 61, 61]
