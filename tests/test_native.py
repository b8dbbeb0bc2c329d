"""The kernel's C++ on its own: concurrent threads, the filters of drafts, and draws that are easy to get wrong."""

import ctypes
import math
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from conftest import PROCESS_SECONDS
from draftwing.cpu import build
from draftwing.cpu.library import required_kernel
from draftwing.cpu.noise import NativeNoise
from draftwing.noise import KeyedNoise
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.tree import DraftTree

CAN_COMPILE = sys.platform == "linux" and build.find_compiler() is not None
pytestmark = pytest.mark.skipif(not CAN_COMPILE, reason="no C++ compiler here")

HERE = Path(__file__).with_name("native")
VOCAB, BEST = 400, 256  # tokens, and how many of them a draft looks at


def compiled(name: str, made: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    compiler = build.find_compiler()
    assert compiler is not None
    # Not optimised: that compiles far faster, and optimisations are not under test.
    command = [*compiler, "-O0", "-std=c++17", "-march=native", "-pthread", f"-I{build.SOURCES}", *flags]
    command += ["-o", str(made), str(HERE / name)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_SECONDS)


@pytest.fixture(scope="session")
def sanitizer(tmp_path_factory) -> list[str]:
    """The flags of the thread sanitizer, if this compiler and this system support it."""
    folder, flags = tmp_path_factory.mktemp("sanitizer"), ["-g1", "-fsanitize=thread"]
    empty = folder / "empty.cpp"
    empty.write_text("#include <thread>\nint main() { std::thread([] {}).join(); }\n")
    made = compiled(str(empty), folder / "empty", *flags)
    works = made.returncode == 0 and subprocess.run([folder / "empty"], capture_output=True).returncode == 0
    return flags if works else []


@pytest.mark.full
def test_concurrent_threads_compute_what_one_computes(sanitizer, tmp_path):
    """They run, draft, accept and make noise, while children are forked."""
    done = compiled("stress.cpp", tmp_path / "stress", *sanitizer)
    assert done.returncode == 0, done.stderr
    ran = subprocess.run([tmp_path / "stress"], capture_output=True, text=True, timeout=PROCESS_SECONDS)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    assert ran.stdout.endswith(" 0 wrong\n")


# --- filters ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """The score below which a row's filters mask everything."""
    path = tmp_path_factory.mktemp("cut") / "cut.so"
    done = compiled("cut.cpp", path, "-fPIC", "-shared")
    assert done.returncode == 0, done.stderr
    function = ctypes.CDLL(str(path)).cut
    function.restype = ctypes.c_float
    function.argtypes = [ctypes.c_void_p, *[ctypes.c_int32] * 2, *[ctypes.c_float] * 2, ctypes.c_int32]
    return lambda scores, k, p, least, exact=False: function(scores.data_ptr(), len(scores), k, p, least, exact)


def kept_by_sampling(scores: torch.Tensor, **filters) -> torch.Tensor:
    """(V,) True for the tokens that ``SamplingBatch`` keeps."""
    batch = SamplingBatch([Sampling(temperature=1.0, **filters)], KeyedNoise(len(scores)))
    return batch.filtered(scores[None, None])[0, 0] > -math.inf


def make_scores(seed: int, kind: str) -> torch.Tensor:
    scores = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    if kind == "peaked":
        return scores * 5
    return (scores * 2).round() / 2 if kind == "ties" else scores * 0.05 if kind == "flat" else scores


TOP_K = (None, 1, 5, 100, BEST - 1, BEST, BEST + 1, 300, VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1)


@pytest.mark.parametrize("kind", ["usual", "peaked", "flat", "ties"])
@pytest.mark.parametrize(("p", "least"), [(1.0, 0.0), (0.4, 0.0), (0.97, 0.0), (1.0, 0.05), (0.8, 0.1)], ids=str)
def test_a_draft_masks_what_the_sampling_masks_and_nothing_more(kind, p, least, cut):
    """Tokens that the target might draw must not be masked; up to 256 tokens, all others are."""
    for seed, k in product(range(4), TOP_K):
        scores = make_scores(seed, kind)
        kept = scores >= cut(scores, k or 0, p, least)
        expected = kept_by_sampling(scores, top_k=k, top_p=p, min_p=least)
        assert not bool((expected & ~kept).any()), (seed, k)
        few = int(expected.sum()) <= BEST and (k is None or k <= BEST or k >= VOCAB)
        if (few and kind != "ties") or (k is not None and k <= BEST and p == 1.0):
            assert torch.equal(kept, expected), (seed, k)
        assert torch.equal(scores >= cut(scores, k or 0, p, least, exact=True), expected)  # acceptance must be exact


def test_filters_of_banned_tokens(cut):
    assert cut(torch.full((VOCAB,), -math.inf), 5, 0.5, 0.1) == -math.inf
    assert cut(torch.full((VOCAB,), -math.inf), 300, 0.5, 0.1, exact=True) == -math.inf
    banned = torch.full((VOCAB,), -math.inf)
    banned[[3, 9]] = torch.tensor([1.0, 2.0])
    assert cut(banned, 5, 1.0, 0.0) == 1.0


# --- draws -----------------------------------------------------------------------------------------------------------


def drawn(scores: torch.Tensor, seed: int = -1) -> tuple[int, bool]:
    """The token that the kernel draws from (V,) scores, and True if they were finite."""
    tree = DraftTree.root(torch.tensor([1]))
    accepted = NativeNoise(required_kernel(), len(scores)).match(tree, scores[None, None].contiguous(), [seed], [0])
    assert accepted is not None
    assert accepted.on_host is not None
    return int(accepted.bonus), accepted.on_host[0].finite


@pytest.mark.parametrize(
    "equals",
    [(5, 16), (16, 5), (0, 16), (15, 16), (5, 21, 40), (31, 32), (127, 128), (129, 2), (255, 256), (256, 300)],
    ids=str,
)
def test_the_lowest_of_equal_scores_is_drawn(equals):
    """At any place in the blocks of 128 scores, and after the last whole block."""
    scores = torch.zeros(301)
    scores[list(equals)] = 1.0
    assert drawn(scores) == (min(equals), True)
    assert int(scores.argmax()) == min(equals)


@pytest.mark.parametrize("place", [0, 5, 16, 47, 127, 128, 303, 304, 310])
@pytest.mark.parametrize("seed", [-1, 3])
def test_scores_that_are_not_finite_are_reported(place, seed):
    """NaN is found by comparing a number with itself; infinity is not."""
    for bad, expected in ((math.inf, (place, False)), (math.nan, (place, False)), (1e30, (place, True))):
        scores = torch.zeros(311)
        scores[place] = bad
        assert drawn(scores, seed) == expected
    assert drawn(torch.full((311,), -math.inf), seed)[1] is False


@pytest.mark.parametrize(("vocab", "rows"), [(1, 3), (31, 200), (129, 200), (1000, 800), (20_011, 20)])
@pytest.mark.parametrize("spread", [0.0, 1.0, 10.0])
def test_the_highest_score_under_noise_is_drawn(vocab, rows, spread):
    """The kernel computes noise only where an upper bound of it might win: never may another token win."""
    generator, seeds, starts = torch.Generator().manual_seed(vocab), list(range(rows)), [7] * rows
    scores = torch.randn(rows, 1, vocab, generator=generator) * spread
    scores[torch.rand(scores.shape, generator=generator) < 0.1] = -math.inf
    scores[..., 0] = 0.0
    tree = DraftTree.root(torch.zeros(rows, dtype=torch.int64))
    accepted = NativeNoise(required_kernel(), vocab).match(tree, scores, seeds, starts)
    assert accepted is not None
    assert torch.equal(accepted.bonus, (scores + KeyedNoise(vocab).block(seeds, starts, 1)).argmax(-1)[:, 0])


@pytest.mark.parametrize("bit", [0, 15, 16, 17, 31, 32, 33, 47, 48, 62])
def test_every_bit_of_a_seed_counts(bit):
    noises = KeyedNoise(40), NativeNoise(required_kernel(), 40)
    for noise in noises:
        one, other = noise.at(5, 9), noise.at(5 ^ 1 << bit, 9)
        assert not bool((one == other).any())
        both = noise.block([5, 5 ^ 1 << bit], [9, 9], 1)
        assert torch.equal(both[:, 0], torch.stack([one, other]))
    assert torch.equal(*(noise.at(5 ^ 1 << bit, 9) for noise in noises))
