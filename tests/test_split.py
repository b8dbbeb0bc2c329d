"""Float32 rows and bfloat16 weights on matrix tiles: rows in three parts, float32 sums; the same bits without tiles."""

import pytest
import torch

from conftest import build
from draftwing.cpu.layout import RowForm
from draftwing.cpu.library import get_kernel
from draftwing.decode import Decoder
from draftwing.methods.base import Budget
from draftwing.methods.causal_lm import CausalLMDrafter
from draftwing.models.context import FeatureSpec
from draftwing.models.lean import LeanTarget
from draftwing.models.linear import Linear
from draftwing.models.weights import Stored
from draftwing.sampling import Sampling
from draftwing.tree import DraftTree

pytestmark = pytest.mark.skipif(get_kernel() is None, reason="no kernel here")
ROWS = (1, 2, 3, 5, 6, 7, 10, 11, 13, 16, 17, 22, 33, 64, 70)
# Inputs: one step of 32, some more, and odd. Outputs: less than 64, and more.
SHAPES = [(32, 10), (37, 65), (64, 70), (130, 200), (577, 130), (1030, 64)]


@pytest.fixture(params=[True, False], ids=["tiles", "vectors"])
def split(request):
    """Rows are split where weights are laid out, on tiles or by vectors."""
    kernel = get_kernel()
    before = kernel.has_tiles
    if kernel.use_tiles(request.param) != request.param:
        pytest.skip("this processor has no tiles that work")
    kernel.has_tiles = True
    yield request.param
    kernel.use_tiles(before)


def matrix(num_out, num_in):
    return torch.randn(num_out, num_in).bfloat16()


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    linear = Linear.of_stored([Stored("bfloat16", weight.shape[1], weight)], bias)
    assert linear.packed[0].row_form == RowForm.SPLIT
    return linear


def product(weight, x, bias=None, threads=2):
    linear, before = linear_of(weight, bias), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return linear(x)
    finally:
        torch.set_num_threads(before)


def parts_of(x: torch.Tensor) -> list[torch.Tensor]:
    """Three in bfloat16, the first 8 bits of each number, the next 8 and the last 8."""
    parts = []
    for _ in range(3):
        parts.append((x.view(torch.int32) & -0x10000).view(torch.float32))
        x = x - parts[-1]
    assert not x.any()
    return parts


def by_the_law(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(R, out) float32: of each part 32 inputs at a time, the even and the odd ones apart; the small parts first."""
    weight, sums = weight.float(), []
    for part in parts_of(x):
        total = torch.zeros(len(x), len(weight))
        for start in range(0, x.shape[1], 32):
            halves = torch.zeros(2, *total.shape)
            for i in range(start, min(start + 32, x.shape[1])):
                halves[i % 2] += part[:, i, None] * weight[:, i]  # exact
            total += halves[0] + halves[1]
        sums.append(total)
    return sums[0] + (sums[1] + sums[2])


# --- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_taken_in_the_order_of_the_law(shape, split):
    """To the bit, for every number of rows; and as right as float32 sums are."""
    num_in, num_out = shape
    torch.manual_seed(num_in)
    x, weight, bias = torch.randn(ROWS[-1], num_in), matrix(num_out, num_in), torch.randn(num_out)
    wanted = by_the_law(x, weight) + bias
    exact = x.double() @ weight.double().T + bias
    longest = 17 + 1 + -(-num_in // 32) + 3  # sums on the way of a number
    sizes = x.double().abs() @ weight.double().abs().T + bias.abs()
    assert ((wanted - exact).abs() <= longest * 2.0**-24 * sizes).all()
    for rows in ROWS:
        assert torch.equal(product(weight, x[:rows], bias), wanted[:rows]), rows


def test_it_is_nearer_than_rows_that_are_not_split(split):
    torch.manual_seed(3)
    x, weight = torch.randn(70, 2048), matrix(300, 2048)
    exact = x.double() @ weight.double().T
    get_kernel().has_tiles = False
    whole = Linear.of_stored([Stored("bfloat16", 2048, weight)], None)
    assert whole.packed[0].row_form == RowForm.AS_THEY_ARE
    get_kernel().has_tiles = True
    errors = [(found - exact).abs().mean() for found in (product(weight, x), whole(x))]
    assert 0 < errors[0] < errors[1] / 2


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_its_own_bits_whatever_stands_beside_it(split, threads):
    torch.manual_seed(threads)
    x, weight = torch.randn(70, 203), matrix(150, 203)
    alone = torch.cat([product(weight, row[None], threads=threads) for row in x])
    for rows in ROWS[1:]:
        assert torch.equal(product(weight, x[:rows], threads=threads), alone[:rows])
        assert torch.equal(product(weight, x[-rows:], threads=threads), alone[-rows:])


def test_with_and_without_tiles_the_bits_are_the_same(split):
    """Of numbers of all sizes too, of which some, and some sums, are too small to be normal. A matrix that was laid out
    for tiles stays what it is when they are turned off."""
    if not split:
        pytest.skip("compared with the other")
    torch.manual_seed(0)
    for low, high in ((-20, 20), (-80, -40), (-140, 1)):
        scale = torch.exp2(torch.randint(low, high, (1, 707)).float())
        assert get_kernel().use_tiles(True)
        x, linear = torch.randn(67, 707) * scale, linear_of((torch.randn(130, 707) * scale.flip(1)).bfloat16())
        with_tiles = linear(x)
        get_kernel().use_tiles(False)
        assert torch.equal(linear(x), with_tiles)
        assert with_tiles.abs().amax() > 0


def test_numbers_come_through_whole(split):
    """Seen through a matrix that gives each input out: all 24 bits, whatever the sign and the size."""
    torch.manual_seed(1)
    x = torch.randn(6, 96) * torch.exp2(torch.randint(-90, 120, (6, 96)).float())
    x[0, :4] = torch.tensor([0.0, -0.0, torch.finfo(torch.float32).max, -1 - 2.0**-23])
    assert torch.equal(product(torch.eye(96).bfloat16(), x), x)


def test_what_is_not_finite_stays_visible(split):
    x = torch.randn(5, 40)
    x[0, 3], x[2, 39], x[4, 8] = torch.nan, -torch.inf, torch.nan
    x.view(torch.int32)[4, 8] = 0x7F800001  # a NaN of low bits alone: the first part would be infinite
    found = product(torch.ones(3, 40).bfloat16(), x)
    assert not found[[0, 2, 4]].isfinite().any()
    assert found[0].isnan().all()
    assert found[[1, 3]].isfinite().all()


# --- which weights ----------------------------------------------------------------------------------------------------


def test_only_bfloat16_on_tiles_is_multiplied_so(split):
    for name, num_in, form in (
        ("bfloat16", 32, RowForm.SPLIT),
        ("bfloat16", 31, RowForm.AS_THEY_ARE),  # less than a step
        ("float16", 64, RowForm.AS_THEY_ARE),
        ("float32", 64, RowForm.AS_THEY_ARE),
    ):
        part = Stored(name, num_in, torch.randn(70, num_in).to(getattr(torch, name)))
        assert Linear.of_stored([part], None).packed[0].row_form == form, name
    rounded = Linear(torch.randn(70, 64))
    rounded.pack(rounds=True)
    assert rounded.packed[0].row_form == RowForm.ROUNDED


def test_without_tiles_rows_stay_as_they_are():
    kernel = get_kernel()
    before = kernel.has_tiles
    kernel.use_tiles(False)
    try:
        part = Stored("bfloat16", 64, matrix(70, 64))
        assert Linear.of_stored([part], None).packed[0].row_form == RowForm.AS_THEY_ARE
    finally:
        kernel.use_tiles(before)


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a checkpoint in bfloat16."""
    folder = tmp_path_factory.mktemp("bfloat16")
    build("llama", hidden_size=64, head_dim=32, intermediate_size=80).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_a_tree_and_a_path_of_it_have_the_same_bits(folder, split):
    target = LeanTarget.from_folder(folder, torch.float32)
    assert {part.row_form for part in target.net.layers[0].qkv.packed} == {RowForm.SPLIT}
    ctx = target.new_context(FeatureSpec((1, 2)))
    target.prefill(ctx, [3, 8, 12, 5, 9, 30, 41])
    tokens, parents = [5, 9, 11, 9, 7, 6, 2], [-1, 0, 0, 1, 1, 2, 5]
    whole = target.forward(ctx, DraftTree.from_lists([tokens], [parents])).logits
    for path in ([0, 2, 5, 6], [0, 1, 4], [0]):
        alone = target.forward(ctx, DraftTree.from_lists([[tokens[n] for n in path]], [[*range(-1, len(path) - 1)]]))
        assert torch.equal(alone.logits[0], whole[0, path])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_with_drafts_are_those_without(folder, split, temperature):
    texts = []
    for drafted in (False, True):
        target = LeanTarget.from_folder(folder, torch.float32)
        drafter = CausalLMDrafter(LeanTarget.from_folder(folder, torch.float32), target.vocab_size) if drafted else None
        decoder, text = Decoder(target, drafter, "match", Budget(4, 3, 8)), {}
        for seed, prompt in enumerate(([4, 9, 30], [8])):
            sampling = Sampling(temperature=temperature, seed=seed, max_tokens=24, ignore_eos=True)
            text[decoder.admit(prompt, sampling)] = ()
        while decoder.num_running:
            for row in decoder.step().rows:
                text[row.request_id] += row.token_ids
        texts.append(list(text.values()))
    assert texts[0] == texts[1]
