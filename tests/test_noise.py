"""Keyed noise: the same bits everywhere and for ever, and random ones."""

from __future__ import annotations

import math
import random

import pytest
import torch

from draftwing.cpu.library import get_kernel, kernel_problem
from draftwing.cpu.noise import NativeNoise, noise_of
from draftwing.noise import ACCEPT, DRAFT, TARGET, KeyedNoise, gumbel, hash_bits, uniform
from draftwing.sampling import Sampling, SamplingBatch

IDS = torch.arange(1000)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]
MASK = 2**64 - 1

# What a seed says must never change: not with a version of Draftwing, nor of torch. (seed, counters, id): bits;
# (seed, position, id): noise.
GOLDEN_BITS = {
    (0, (TARGET, 0), 0): 0xE8B8F7E5B6B1053D, (0, (TARGET, 1), 0): 0x4C5A0BA42E2A4D18,
    (0, (TARGET, 0), 1): 0x83977A39AE6BBD41, (1, (TARGET, 0), 0): 0xF9C57E7B7737E27D,
    (7, (TARGET, 1000), 50256): 0xF7FCA016FB049CE2, (2**63 - 1, (TARGET, 4095), 151935): 0x81EF26F48FDE7A72,
    (0, (DRAFT, 12, 2, 1), 5): 0x44BD948A9504CE56, (42, (ACCEPT, 12, 3), 0): 0x30751EA35E676E04,
}  # fmt: skip
GOLDEN_GUMBEL = {
    (0, 1, 0): -0.19047705829143524, (0, 1, 1): -0.3082517385482788, (0, 2, 0): 0.12391822040081024,
    (1, 1, 0): -0.006054493598639965, (42, 1000, 60): -0.7784576416015625,
    (42, 100_000, 31_999): -0.23057499527931213,
}  # fmt: skip


def reference_mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def reference_bits(seed: int, counters: tuple[int, ...], token: int) -> int:
    """The same hash in Python's own integers."""
    golden, mix = 0x9E3779B97F4A7C15, reference_mix
    key = mix(seed + golden & MASK)
    for counter in counters:
        key = mix((key + golden & MASK) ^ mix(counter * 0x94D049BB133111EB + golden & MASK))
    return mix(key + (token + 1) * golden & MASK)


def chi_square_sigmas(counts: torch.Tensor, num_draws: int) -> float:
    """How many standard deviations a chi-square of equally likely bins lies from its mean."""
    expected = num_draws / counts.numel()
    freedom = counts.numel() - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - freedom) / math.sqrt(2 * freedom)


def test_golden_values():
    for (seed, counters, token), bits in GOLDEN_BITS.items():
        assert int(hash_bits(seed, counters, torch.tensor(token))) & MASK == bits
    for (seed, position, token), noise in GOLDEN_GUMBEL.items():
        assert float(KeyedNoise(token + 1).at(seed, position)[token]) == noise


def test_bits_are_those_of_the_reference():
    rng = random.Random(0)
    for _ in range(200):
        seed, token = rng.choice((0, 1, 2**63 - 1, rng.randrange(2**63))), rng.choice((0, 1, rng.randrange(300_000)))
        counters = tuple(rng.randrange(2 ** rng.choice((1, 8, 40))) for _ in range(rng.randint(0, 3)))
        assert int(hash_bits(seed, counters, torch.tensor(token))) & MASK == reference_bits(seed, counters, token)


@pytest.mark.parametrize("device", DEVICES)
def test_bits_depend_on_nothing_but_seed_position_and_id(device):
    """Not on the batch, the order of asking, the size of the vocabulary, the device, or the block that they come in."""
    noise, small = KeyedNoise(1000, device), KeyedNoise(61, device)
    seeds, starts = [5, 0, 5, 2**63 - 1], [0, 7, 3, 100_000]
    block = noise.block(seeds, starts, 4)
    assert block.shape == (4, 4, 1000)
    assert block.dtype == torch.float32
    backwards = KeyedNoise(1000, device).block(seeds[::-1], starts[::-1], 4).flip(0)
    assert torch.equal(block, backwards)
    for row, (seed, start) in enumerate(zip(seeds, starts, strict=True)):
        for step in range(4):
            alone = gumbel(hash_bits(seed, (TARGET, start + step), IDS))
            assert torch.equal(block[row, step].cpu(), alone)
            assert torch.equal(small.at(seed, start + step).cpu(), alone[:61])
    assert torch.equal(block[0, 3], block[2, 0])
    shuffled = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(hash_bits(3, (0, 4), shuffled), hash_bits(3, (0, 4), IDS)[shuffled])


def test_counters_broadcast():
    positions = torch.arange(50)[:, None]
    together = hash_bits(9, (TARGET, positions), IDS)
    assert together.shape == (50, 1000)
    for position in (0, 1, 49):
        assert torch.equal(together[position], hash_bits(9, (TARGET, position), IDS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_does_not_depend_on_the_dtype_of_the_scores(dtype):
    noise = KeyedNoise(100)
    batch = SamplingBatch([Sampling(temperature=1.0, seed=4), Sampling(temperature=1.0, seed=5)], noise)
    depths = torch.tensor([[0, 1, 1], [0, 1, 2]])
    found = batch.perturb(torch.zeros(2, 3, 100, dtype=dtype), depths, [10, 20], 2)
    assert found.dtype == dtype
    for row, (seed, start) in enumerate(((4, 10), (5, 20))):
        for node in range(3):
            assert torch.equal(found[row, node].float(), noise.at(seed, start + int(depths[row, node])))


def test_eviction_changes_no_value():
    tiny, large = KeyedNoise(61, capacity=3), KeyedNoise(61)
    rng = random.Random(1)
    for _ in range(60):
        seed, position = rng.randrange(3), rng.randrange(5)
        assert torch.equal(tiny.at(seed, position), large.at(seed, position))
    assert torch.equal(tiny.block([1, 2], [0, 0], 5), large.block([1, 2], [0, 0], 5))  # a block larger than the cache
    first, second = tiny.at(7, 0), tiny.at(7, 1)
    assert tiny.at(7, 0) is first  # which makes it the newest
    tiny.at(7, 2), tiny.at(7, 3)
    assert tiny.at(7, 0) is first
    assert tiny.at(7, 1) is not second


@pytest.mark.skipif(get_kernel() is None, reason=f"no CPU kernel here: {kernel_problem()}")
@pytest.mark.parametrize("vocab", [1, 31, 32, 61, 1000])
def test_the_kernels_noise_is_the_same(vocab):
    """Whatever it has had to forget, and where one call asks for more than it may keep."""
    kernel = get_kernel()
    assert kernel is not None
    assert isinstance(noise_of(vocab, torch.device("cpu")), NativeNoise)
    native, wanted = NativeNoise(kernel, vocab, capacity=3), KeyedNoise(vocab)
    rng = random.Random(2)
    seeds, positions = (0, 1, 77, 2**62 + 5, 2**63 - 1), (0, 1, 2, 4095, 2**31, 2**40 + 3)
    for _ in range(100):
        seed, position = rng.choice(seeds), rng.choice(positions)
        assert torch.equal(native.at(seed, position), wanted.at(seed, position))
    kept = native.at(0, 1)
    for _ in range(2):
        assert torch.equal(native.block([1, 2], [0, 3], 5), wanted.block([1, 2], [0, 3], 5))
        assert torch.equal(native.at(1, 2), wanted.at(1, 2))
    assert torch.equal(kept, wanted.at(0, 1))  # a copy: what goes from the store does not take it along


def test_seeds_and_positions_are_independent():
    """Neighbours of every kind: nothing carries over from one to the next."""

    def block(seed: int, stream: int = TARGET) -> torch.Tensor:
        return uniform(hash_bits(seed, (stream, torch.arange(200)[:, None]), torch.arange(500)))

    zero, one, high = block(0), block(1), block(2**62)
    pairs = {
        "seeds 0 and 1": (zero, one),
        "seeds 0 and 2**62": (zero, high),
        "streams": (zero, block(0, DRAFT)),
        "positions": (zero[1:], zero[:-1]),
        "ids": (zero[:, 1:], zero[:, :-1]),
        "seed + 1 and position + 1": (zero[1:], one[:-1]),
        "position + 1 and id + 1": (zero[1:, :-1], zero[:-1, 1:]),
    }
    for name, (left, right) in pairs.items():
        correlation = float(torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1])
        assert abs(correlation) < 3.5 / math.sqrt(left.numel()), name
        joint = torch.histc(torch.floor(left * 8) * 8 + torch.floor(right * 8), 64, 0, 63)
        assert abs(chi_square_sigmas(joint, left.numel())) < 4, name


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_uniformity(seed):
    """Over ids at one position, over positions at one id, and over both, in the high bits and in the low ones."""
    positions = torch.arange(100_000)
    samples = {
        "ids": hash_bits(seed, (TARGET, 17), positions),
        "positions": hash_bits(seed, (TARGET, positions), torch.tensor(17)),
        "both": hash_bits(seed, (TARGET, torch.arange(1, 401)[:, None]), torch.arange(250)).flatten(),
    }
    for name, bits in samples.items():
        values = uniform(bits)
        assert float(values.min()) > 0, name
        assert float(values.max()) < 1
        assert values.unique().numel() == values.numel()
        for part in (values, values * 2**20 % 1):
            assert abs(chi_square_sigmas(torch.histc(part, 256, 0, 1), values.numel())) < 4, name


def test_uniform_never_reaches_its_ends():
    ends = uniform(torch.tensor([0, -1, 2**63 - 1, -(2**63)]))
    assert ends.tolist() == [2.0**-53, 1 - 2.0**-53, 0.5 - 2.0**-53, 0.5 + 2.0**-53]
    assert bool(gumbel(torch.tensor([0, -1])).isfinite().all())


def test_drawn_tokens_have_the_distribution_p():
    """argmax(log p + g) over 20000 positions: chi-square of the tokens, and of neighbours in pairs."""
    p = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.019, 0.001], dtype=torch.float64)
    num_draws = 20_000
    noise = gumbel(hash_bits(3, (TARGET, torch.arange(num_draws)[:, None]), torch.arange(8)))
    drawn = (p.log() + noise).argmax(-1)
    counts = torch.bincount(drawn, minlength=8)
    assert float(((counts - num_draws * p) ** 2 / (num_draws * p)).sum()) < 24.3  # 99.9% of 7 degrees of freedom
    pairs = torch.bincount(drawn[:-1].clamp(max=4) * 5 + drawn[1:].clamp(max=4), minlength=25).double()
    merged = torch.cat([p[:4], p[4:].sum()[None]])
    wanted = (num_draws - 1) * torch.outer(merged, merged).flatten()
    assert float(((pairs - wanted) ** 2 / wanted).sum()) < 51.2  # 99.9% of 24 degrees of freedom
    batch = SamplingBatch([Sampling(temperature=1.0, seed=3)], KeyedNoise(8))
    for position in range(50):
        token = batch.draw(p.log()[None, None], torch.zeros(1, 1, dtype=torch.int64), [position], 0)
        assert int(token) == int(drawn[position])
