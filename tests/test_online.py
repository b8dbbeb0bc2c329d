"""A head that learns while it serves: its loss, its time, how updates are undone; the output never changes."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import pytest
import torch

from conftest import add_tokenizer, build, refused
from draftwing.cpu.library import get_kernel
from draftwing.decode import Decoder
from draftwing.engine import Engine
from draftwing.errors import ConfigError
from draftwing.formats.write import write_head
from draftwing.loading import load, load_target
from draftwing.methods.base import Budget
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.methods.net_drafter import EagleDrafter
from draftwing.methods.online import Learner, LearningPace, OnlineDrafter, Stretch, Tally, hand_over
from draftwing.methods.registry import METHODS, get_method
from draftwing.models.layers import RMSNorm
from draftwing.models.lean import LeanTarget
from draftwing.models.linear import Layout, Linear, has_exact_int8
from draftwing.sampling import Sampling
from draftwing.stats import Stats
from processors import can_int8
from test_unroll import SlowNet, random_net, random_text

needs_kernel = pytest.mark.skipif(get_kernel() is None, reason="no C++ compiler here")
DRAFT_IDS = torch.tensor([0, 2, 3, 5, 8, 9, 11])
EVER = 1e9  # a share of the time that never runs out


# --- other numbers in place of a matrix's own ------------------------------------------------------------------------


LAYOUTS = {
    "plain": (Layout("plain"), torch.float32),
    "torch": (Layout("torch"), torch.float32),
    "bfloat16": (Layout("torch"), torch.bfloat16),
    **({"torch-int8": (Layout("torch", "int8"), torch.float32)} if has_exact_int8() else {}),
    **({"kernel": (Layout("kernel"), torch.float32)} if get_kernel() else {}),
    **({"kernel-int8": (Layout("kernel", "int8"), torch.float32)} if get_kernel() else {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_matrix_with_other_numbers_is_as_if_it_had_been_made_of_them(layout):
    torch.manual_seed(0)
    how, dtype = LAYOUTS[layout]
    before, after, x = torch.randn(96, 64), torch.randn(96, 64), torch.randn(5, 64, dtype=dtype)
    if layout == "kernel":
        before = before.bfloat16().float()  # which takes 16 bits: the others are rounded to it
    matrix = Linear(before.to(dtype), torch.randn(96, dtype=dtype)).lay_out(how)
    bias = torch.randn(96, dtype=dtype)
    matrix.refill(after, bias)
    wanted = Linear((after.bfloat16().float() if layout == "kernel" else after).to(dtype), bias).lay_out(how)
    assert matrix.formats == wanted.formats
    assert torch.equal(matrix.forward(x), wanted.forward(x))


@needs_kernel
@pytest.mark.parametrize("quantize", [None, "int8"] if can_int8() else [None])
def test_a_gated_matrix_too(quantize):
    torch.manual_seed(0)
    before, after = torch.randn(192, 64), torch.randn(192, 64)
    matrix, wanted = (Linear(each).lay_out(Layout("kernel", quantize), gated=True) for each in (before, after))
    memory = matrix.packed[0].weight.data_ptr()
    matrix.refill(after)
    assert matrix.packed[0].weight.data_ptr() == memory  # programs hold the address
    for name in ("weight", "scales", "sums"):
        one, other = (getattr(each.packed[0], name) for each in (matrix, wanted))
        assert one is other or torch.equal(one, other)


# --- what it learns from ---------------------------------------------------------------------------------------------


def stretches_of(net: EagleNet, count: int = 2) -> list[Stretch]:
    """Random ones, of several lengths."""
    found = []
    for number in range(count):
        ids, features = random_text(net, 1, 6 + number)
        places = torch.tensor([1, 3, 4 + number])
        probs = torch.rand(3, 4, dtype=torch.float64).softmax(-1)
        tokens = torch.stack([torch.randperm(net.num_draft_tokens)[:4] for _ in range(3)])
        found.append(Stretch(ids[0], features[0, :-1], places, tokens, probs))
    return found


@pytest.mark.parametrize("case", ["eagle1", "eagle3", "eagle3-few-tokens"])
def test_the_loss_is_that_of_drafts_which_were_wrong(case):
    """Against a slow net of vectors, one place and one chain at a time; gradients too."""
    few = DRAFT_IDS if case.endswith("few-tokens") else None
    net, serving = (random_net(1 if case == "eagle1" else 3, few) for _ in range(2))
    learner = Learner(serving, net, LearningPace(num_steps=3))
    chosen = stretches_of(net)
    learner.loss(chosen).backward()
    slow = {name: tensor.requires_grad_() for name, tensor in net.tensors().items()}
    reference, wanted = SlowNet(net, slow), 0.0
    head = net.read_head.weight if case == "eagle1" else slow["lm_head.weight"]
    for step in range(3):
        losses = []
        for each in chosen:
            for place, tokens, probs in zip(each.places.tolist(), each.tokens, each.probs, strict=True):
                start = place - 1 - step
                if start >= 0:
                    _, read = reference.draft(each.ids.tolist(), each.features, start, step + 1)[step]
                    losses.append(-(probs * (head @ read).log_softmax(-1)[tokens]).sum())
        wanted = wanted + 0.8**step * sum(losses) / len(losses)
    # EAGLE-1's frozen head is read in float32.
    close = {"rtol": 1e-5, "atol": 1e-6} if case == "eagle1" else {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(learner.loss(chosen), wanted, **close)
    wanted.backward()
    torch.testing.assert_close(net.fc.weight.grad, slow["fc.weight"].grad, **close)


def make(
    folder: Path, dtype=torch.float32, prepack=True, clock=perf_counter, **pace
) -> tuple[LeanTarget, OnlineDrafter]:
    """A target, and an untrained EAGLE-3 head."""
    target, plain = (LeanTarget.from_folder(folder, dtype, prepack=each) for each in (prepack, False))
    config = EagleConfig.for_target(3, plain.config)
    torch.manual_seed(2)
    trained = EagleNet(config, plain.embedding, plain.head, None, dtype)
    serving = EagleNet(config, target.embedding, target.head, None, dtype)
    serving.load_state_dict(trained.state_dict())
    serving = serving.prepack() if prepack else serving.requires_grad_(False)
    pace = LearningPace(**{"share": EVER, "lr": 1e-2, "places": 8, "window": 32, **pace})
    learner = Learner(serving, trained, pace, clock)
    return target, OnlineDrafter(EagleDrafter(serving, target), learner)


def write(target: LeanTarget, drafter: OnlineDrafter | None, times: int) -> Stats:
    """The same text several times."""
    engine = Engine(Decoder(target, drafter, budget=Budget(3)), max_batch=1)
    requests = [engine.submit((5, 9, 7), Sampling(max_tokens=40, ignore_eos=True)) for _ in range(times)]
    stats = Stats.of(engine.steps())
    assert len({tuple(request.token_ids) for request in requests}) == 1
    return stats


@needs_kernel
def test_a_head_that_starts_wrong_gets_better(folder_of):
    target, drafter = make(folder_of("llama", head_dim=32))
    learner = drafter.learner
    assert learner.serving.runs.name == "kernel"
    before = write(target, drafter, 1)
    write(target, drafter, 8)
    after = write(target, drafter, 1)
    assert before.tau < 1.5
    assert after.tau > before.tau + 1
    assert learner.num_updates > learner.num_handed > 2
    assert len(learner.ring) <= learner.pace.ring


def test_what_is_put_down_is_what_was_said(folder_of):
    """Each place of each stretch: the features and the chances that the target's own forward of the text has there."""
    target, drafter = make(folder_of("llama"), torch.float64, prepack=False, places=3, length=20)
    taken = []
    drafter.learner.learn = lambda found, tally, seconds: taken.extend(found) or True
    engine = Engine(Decoder(target, drafter, budget=Budget(3, 2)))
    prompts = [(5, 9, 7, 3, 4, 8), (7,), tuple(range(3, 30))]
    sampling = {"max_tokens": 30, "temperature": 1.0, "ignore_eos": True}
    requests = [engine.submit(each, Sampling(seed=n, **sampling)) for n, each in enumerate(prompts)]
    engine.run()
    drafter.learn()
    texts = [[*request.prompt_ids, *request.token_ids] for request in requests]
    assert len(taken) > 9
    for each in taken:
        ids = each.ids.tolist()
        text, start = next((t, s) for t in texts for s in range(len(t)) if t[s : s + len(ids)] == ids)
        output = target.score(torch.tensor([text]), drafter.features)
        torch.testing.assert_close(each.features, output.features[0, start : start + len(ids) - 1])
        assert 0 < len(each.places) == len(each.tokens)
        for place, tokens, probs in zip(each.places.tolist(), each.tokens, each.probs, strict=True):
            wanted = output.logits[0, start + place].softmax(-1)[tokens]
            torch.testing.assert_close(probs, (wanted / wanted.sum()).float())
            assert tokens[0] == output.logits[0, start + place].argmax()


# --- what it takes, and how it is undone -----------------------------------------------------------------------------


def small_learner(**pace) -> Learner:
    """One whose every update takes two seconds."""
    serving, copy = (random_net(3, DRAFT_IDS) for _ in range(2))
    learner = Learner(serving.requires_grad_(False), copy, LearningPace(**pace), lambda: 2.0 * learner.num_updates)
    return learner


def test_learning_takes_its_share_of_the_time_and_no_more():
    learner = small_learner(share=0.25)
    torch.manual_seed(0)
    for _ in range(400):  # of a tenth of a second each
        learner.learn(stretches_of(learner.net, 1), Tally(), 0.1)
    assert 4 <= learner.num_updates <= 6  # 40 seconds, of which 10 may be spent, two at a time
    for _ in range(1000):
        learner.learn([], Tally(), 0.1)
    seen = learner.num_updates
    assert seen <= 7  # without anything new there is nothing to learn
    learner.learn(stretches_of(learner.net, 1), Tally(), 0.1)
    learner.learn(stretches_of(learner.net, 1), Tally(), 0.1)
    assert learner.num_updates <= seen + 1  # what was not spent does not pile up


def test_an_update_takes_no_stretch_twice():
    """Half of them the newest, the others any earlier ones."""
    learner, taken = small_learner(batch=4, ring=5, share=1.0), []
    loss = learner.loss
    learner.loss = lambda stretches: taken.append(list(map(id, stretches))) or loss(stretches)
    torch.manual_seed(0)
    for count in range(1, 9):
        learner.learn(stretches_of(learner.net, 1), Tally(), 100.0)
        ring = list(map(id, learner.ring))
        assert len(set(taken[-1])) == len(taken[-1]) == min(count, 4)
        assert taken[-1][0] == ring[-1]
        assert set(taken[-1]) <= set(ring)


def weights_of(net: EagleNet) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in net.named_parameters()}


def assert_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def learn_until_handed(learner: Learner, rate: float) -> None:
    handed = learner.num_handed
    for _ in range(9):
        learner.learn(stretches_of(learner.net), Tally(100, round(100 * rate)), 100.0)
        if learner.num_handed > handed:
            return
    raise AssertionError


def test_weights_that_draft_worse_are_taken_back():
    """To the bit; and a rate that falls by chance alone takes nothing back."""
    learner = small_learner(share=1.0, lr=0.05, window=100)
    first = weights_of(learner.serving)
    learn_until_handed(learner, 0.5)
    second = weights_of(learner.serving)
    assert not torch.equal(first["fc.weight"], second["fc.weight"])
    learn_until_handed(learner, 0.45)
    third = weights_of(learner.serving)
    assert not torch.equal(second["fc.weight"], third["fc.weight"])
    assert learner.num_taken_back == 0
    learner.learn([], Tally(100, 10), 1.0)
    assert learner.num_taken_back == 1
    assert_equal(weights_of(learner.serving), second)
    assert torch.equal(learner.net.fc.weight, second["fc.weight"])  # and it learns on from there
    learn_until_handed(learner, 0.1)  # nothing is known of those that were put back, so nothing is taken back
    assert not torch.equal(learner.net.fc.weight, second["fc.weight"])


@needs_kernel
def test_weights_handed_over_again_are_the_same_to_the_bit(folder_of):
    """What serves packed drafts the very trees that it drafted before."""
    target, drafter = make(folder_of("llama", head_dim=32))
    learner = drafter.learner
    kept = weights_of(learner.net)
    parts = [part for part in learner.serving.modules() if isinstance(part, Linear)]

    def bits() -> list[torch.Tensor]:
        packed = [getattr(part.packed[0], name) for part in parts for name in ("weight", "scales", "sums")]
        norms = [part.weight.clone() for part in learner.serving.modules() if isinstance(part, RMSNorm)]
        return [each.clone() for each in packed if each is not None] + norms

    before = bits()
    write(target, drafter, 4)
    assert any(not torch.equal(one, other) for one, other in zip(before, bits(), strict=True))
    assert not torch.equal(kept["fc.weight"], learner.net.fc.weight)
    with torch.no_grad():
        for name, value in learner.net.named_parameters():
            value.copy_(kept[name])
    hand_over(learner.net, learner.serving)
    assert all(torch.equal(one, other) for one, other in zip(before, bits(), strict=True))


def test_gradients_that_are_not_finite_change_nothing():
    learner = small_learner(share=1.0)
    before = weights_of(learner.net)
    (bad,) = stretches_of(learner.net, 1)
    bad.features[0, 0] = float("nan")
    learner.learn([bad], Tally(), 1.0)
    assert learner.num_updates == 0
    assert_equal(before, weights_of(learner.net))


def test_decoders_share_what_is_learnt(folder_of):
    """A second one hands over its stretches when no other thread is learning; without an engine nobody learns."""

    def clock() -> float:
        if meanwhile:
            write(*meanwhile.pop(), 2)
        return 0.0

    meanwhile: list[tuple] = []
    target, drafter = make(folder_of("llama"), torch.float64, prepack=False, clock=clock)
    learner = drafter.learner
    decoder = Decoder(target, drafter, budget=Budget(3))  # as costs are measured, on meaningless texts
    decoder.admit((5, 9, 7), Sampling(max_tokens=20, ignore_eos=True))
    while decoder.num_running:
        decoder.step()
    assert learner.num_updates == len(learner.ring) == 0
    other = OnlineDrafter(EagleDrafter(learner.serving, target), learner)
    meanwhile.append((target, other))
    assert learner.learn([], Tally(), 0.0)  # while the other one decodes
    assert learner.num_updates == 0
    assert 4 < len(other.stretches) <= learner.pace.ring  # the stretches of both texts
    other.learn()
    assert learner.num_updates == 1
    assert other.stretches == []
    write(target, drafter, 1)
    assert learner.num_updates > 2


# --- as an option of a head ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """A target with a tokenizer, and an untrained EAGLE-1 head for it."""
    folder, head = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("head")
    build("llama", vocab_size=300, head_dim=32).save_pretrained(folder)
    target = load_target(add_tokenizer(folder), prepack=False)
    torch.manual_seed(0)
    config = EagleConfig.for_target(1, target.config)
    write_head(head, EagleNet(config, target.embedding, target.head))
    return folder, head


@pytest.mark.parametrize("model", [{"dtype": "bfloat16"}, {"quantize": "int8"} if can_int8() else {}])
def test_an_option_turns_it_on(model, pair):
    folder, head = pair
    plain = load(folder, "none", **model)
    lm = load(folder, head, budget=Budget(3), draft_options={"online": 0.5, "online_lr": 1e-2}, **model)
    assert lm.drafter_name.endswith(", online")
    assert lm.drafter.learns
    one, other = lm.new_drafter(), lm.new_drafter()
    assert one.learner is other.learner
    assert (one.learner.pace.share, one.learner.pace.lr) == (0.5, 1e-2)
    sampling = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.7, "seed": 3}
    for _ in range(3):
        assert lm.generate("def add", **sampling)[0].token_ids == plain.generate("def add", **sampling)[0].token_ids
    assert one.learner.num_updates > 0


def test_it_is_off_unless_requested(pair):
    folder, head = pair
    assert not load(folder, head).drafter.learns
    for options, *says in (
        ({"online": 0.0}, "online must be above 0 and at most 1", "give True, False, or the share"),
        ({"online": "yes"}, "online must be above 0 and at most 1", "yes"),
        ({"online": True, "online_lr": 2}, "online_lr must be above 0 and at most 1", "2"),
        ({"online_lr": 1e-3}, "online_lr goes with online"),
    ):
        with refused(ConfigError, *says):
            load(folder, head, draft_options=options)
    assert {name for name in METHODS if "online" in get_method(name).options} >= {"eagle1", "eagle3"}
    assert "online" not in get_method("lookup").options
