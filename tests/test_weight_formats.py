"""Weights in the format of the file: in float32 arithmetic every format gives the numbers of its float32 expansion, and
in int8 arithmetic those of a plain implementation in NumPy, to the bit."""

from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from conftest import build, refused
from draftwing.cpu.layout import BLOCKS, FORMATS
from draftwing.cpu.library import get_kernel
from draftwing.cpu.packed import Packed
from draftwing.cpu.program import Program, Workspace
from draftwing.decode import Decoder
from draftwing.errors import CheckpointError, ConfigError
from draftwing.methods.base import Budget
from draftwing.methods.causal_lm import CausalLMDrafter
from draftwing.models.context import FeatureSpec
from draftwing.models.layers import GatedMLP
from draftwing.models.lean import LeanTarget
from draftwing.models.linear import Embedding, Linear
from draftwing.models.weights import Stored, stack
from draftwing.sampling import Sampling
from draftwing.tree import DraftTree
from processors import can_int8

pytestmark = [pytest.mark.skipif(get_kernel() is None, reason="no compiler"), pytest.mark.usefixtures("without_tiles")]

EXACT = [name for name, kind in FORMATS.items() if kind.is_exact]
ROWS = [*range(1, 9), 13, 33]


def stored(name, num_out, num_in, seed=0):
    """A random matrix. In blocks every bit is random, except that scales and powers of two are small numbers."""
    kind, rng = FORMATS[name], np.random.default_rng(seed)
    if kind.dtype is not None:
        numbers = torch.from_numpy(rng.standard_normal((num_out, num_in), np.float32))
        return Stored(name, num_in, numbers.to(kind.dtype))
    blocks = rng.integers(0, 256, (num_out, num_in // kind.inputs, kind.num_bytes), np.uint8)
    for at in kind.halves:
        scales = rng.normal(0, 0.05, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    if not kind.halves:
        blocks[:, :, 0] = rng.integers(119, 126, blocks.shape[:2])
    return Stored(name, num_in, torch.from_numpy(blocks.reshape(num_out, -1)))


def check_products(part, bias=None):
    """Products are those of the float32 expansion, for every number of rows."""
    ours, wide = Linear.of_stored([part], bias), Linear.of_stored([part.expanded()], bias)
    for rows in ROWS:
        x = torch.randn(rows, part.num_in)
        assert torch.equal(ours.forward(x), wide.forward(x))
    assert ours.formats == (part.format,)
    assert torch.equal(ours.plain(), part.expand())
    right = torch.nn.functional.linear(x.double(), part.expand().double(), None if bias is None else bias.double())
    assert torch.allclose(ours.forward(x), right.float(), rtol=1e-4, atol=1e-4 * right.abs().max())


@pytest.mark.parametrize("name", EXACT)
def test_products_are_those_of_the_expansion(name):
    for num_out, num_in in ((64, 768), (200, 256), (200, 768), (1, 256)):
        check_products(stored(name, num_out, num_in), torch.randn(num_out))


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_what_ggml_says(name):
    """As dequantised by ggml's library."""
    kind = gguf.GGMLQuantizationType[name]
    part = stored(name, 96, 512)
    expected = torch.from_numpy(gguf.quants.dequantize(part.data.numpy(), kind))
    assert torch.equal(Packed.of_stored([part], None).rows(torch.arange(96)), expected)
    assert FORMATS[name].num_bytes / FORMATS[name].inputs == part.data.shape[1] / 512


# --- int8 arithmetic -------------------------------------------------------------------------------------------------


def six_bits(packed):
    """(..., 12) bytes -> scales and offsets (..., 8) of Q4_K and Q5_K."""
    low, high, both = np.split(packed, 3, -1)
    scales = np.concatenate((low & 63, (both & 15) | (low >> 6 << 4)), -1)
    return scales, np.concatenate((high & 63, (both >> 4) | (high >> 6 << 4)), -1)


def read_blocks(part):
    """Levels (out, units, inputs) around zero or from zero on; factor and offset (out, units) float32."""
    kind = FORMATS[part.format]
    blocks = part.data.numpy().reshape(part.num_out, -1, kind.num_bytes)
    half = [blocks[..., at : at + 2].copy().view(np.float16).astype(np.float32) for at in kind.halves]
    factor = half[0] if half else np.ldexp(np.float32(1), blocks[..., 0].astype(int) - 128)
    offset = half[1] if len(half) > 1 else 0 * factor
    if part.format == "Q8_0":
        levels = blocks[..., 2:].view(np.int8)
    elif part.format in ("Q4_0", "Q4_1"):
        nibbles = blocks[..., kind.words[0] :]
        levels = np.concatenate((nibbles & 15, nibbles >> 4), -1).astype(np.int64) - (8 if part.format == "Q4_0" else 0)
    elif part.format == "Q6_K":
        low, high = (blocks[..., a:b].reshape(*blocks.shape[:2], 2, 1, -1) for a, b in ((0, 128), (128, 192)))
        low, high = low >> np.array([[0], [4]], np.uint8) & 15, high >> np.array([[0], [2], [4], [6]], np.uint8) & 3
        levels = (low.reshape(high.shape) | high << 4).astype(np.int64) - 32
        factor = factor * blocks[..., 192:208].view(np.int8)
    elif part.format in ("IQ4_NL", "IQ4_XS", "MXFP4"):
        nibbles = blocks[..., kind.words[0] :].reshape(*blocks.shape[:2], -1, 1, 16)
        nibbles = nibbles >> np.array([[0], [4]], np.uint8) & 15
        levels = np.array(getattr(gguf.quants, "MXFP4" if part.format == "MXFP4" else "IQ4_NL").kvalues)[nibbles]
        if part.format == "IQ4_XS":
            low = blocks[..., 4:8, None] >> np.array([0, 4], np.uint8) & 15
            high = blocks[..., 2:4, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
            factor = factor * ((low.reshape(high.shape) | high << 4).astype(np.float32) - 32).reshape(*low.shape[:2], 8)
    else:
        low = blocks[..., -128:].reshape(*blocks.shape[:2], 4, 1, 32) >> np.array([[0], [4]], np.uint8) & 15
        levels = low.reshape(*blocks.shape[:2], 8, 32)
        if part.format == "Q5_K":
            levels = levels | (blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
        scales, offsets = six_bits(blocks[..., 4:16])
        factor, offset = factor * scales.astype(np.float32), -offset * offsets.astype(np.float32)
    unit = 16 if part.format == "Q6_K" else 32
    levels = levels.reshape(part.num_out, -1, unit).astype(np.int64)
    return levels, *(numbers.reshape(part.num_out, -1).astype(np.float32) for numbers in (factor, offset))


def fused(a, b, c):
    """a * b + c in float32, rounded once."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def integer_product(x, part):
    """(R, in) -> (R, out) float32: rows rounded to 8 bits in units, exact sums of a unit, added in their order."""
    levels, factor, offset = read_blocks(part)
    units = x.numpy().reshape(len(x), levels.shape[1], -1)
    largest = np.abs(units).max(-1)
    largest = np.where(largest < 2.0**-119, np.float32(0), largest)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    rows = np.rint(units.astype(np.float64) * inverse[..., None]).astype(np.int64)
    scale = largest / np.float32(127)
    sums = rows.sum(-1).astype(np.float32) * scale
    out = np.zeros((len(x), part.num_out), np.float32)
    for unit in range(levels.shape[1]):
        if np.any(offset):
            out = fused(sums[:, unit, None], offset[:, unit], out)
        products = (rows[:, unit] @ levels[:, unit].T).astype(np.float32) * scale[:, unit, None]
        out = fused(products, factor[:, unit], out)
    return torch.from_numpy(out)


def in_int8(part, bias=None):
    return Linear.of_stored([part], bias, arithmetic="int8")


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("num_out", "num_in"), [(200, 768), (1, 256)])
def test_integer_products_of_any_number_of_rows(name, num_out, num_in, tiles):
    part, bias = stored(name, num_out, num_in), torch.randn(num_out)
    ours, x = in_int8(part, bias), torch.randn(130, num_in)
    expected = integer_product(x, part) + bias
    assert ours.has_levels
    assert f"{name} weights in int8 arithmetic" in ours.runs_as
    for rows in (*range(1, 65), 130):
        assert torch.equal(ours.forward(x[:rows]), expected[:rows]), rows
    assert torch.equal(ours.forward(x[77:79]), expected[77:79])
    exact = torch.nn.functional.linear(x, part.expand(), bias)
    assert (expected - exact).norm() < 0.015 * exact.norm()
    assert torch.equal(ours.plain(), part.expand())


@pytest.mark.parametrize("name", BLOCKS)
def test_integer_products_of_unusual_rows(name):
    """Zeros, the smallest and the largest numbers; NaN and infinity do not vanish, nor reach other rows."""
    part = stored(name, 70, 512)
    x = torch.randn(8, 512)
    x[0] = 0
    x[1] *= 1e-45  # subnormal
    x[2, :256] *= 1e-37  # some units below the smallest scale, some above
    x[3] *= 1e30
    x[4, 100:300] = 0
    expected = integer_product(x, part)
    assert torch.equal(in_int8(part).forward(x), expected)
    assert torch.equal(in_int8(part).forward(x.repeat(7, 1)), expected.repeat(7, 1))
    assert (expected[:2] == 0).all()
    x[5, 17], x[6, 400], x[7, 31] = torch.nan, torch.inf, -torch.inf
    for copies in (1, 7):
        found = in_int8(part).forward(x.repeat(copies, 1)).view(copies, 8, 70)
        assert torch.equal(found[:, :5], expected[:5].expand(copies, 5, 70))
        assert found[:, 5:].isnan().all()


@pytest.mark.parametrize("name", BLOCKS)
def test_integer_products_with_unusual_blocks(name):
    """All zeros, the largest levels everywhere, and subnormal scales."""
    kind, part, x = FORMATS[name], stored(name, 66, 512), torch.randn(5, 512)
    blocks = part.data.clone().view(66, -1, kind.num_bytes)
    blocks[0], blocks[1] = 0, 0x77 if name == "MXFP4" else 0xFF
    if name == "MXFP4":
        blocks[2:, ::2, 0] = torch.arange(64, dtype=torch.uint8)[:, None] % 2
    for at in kind.halves:
        blocks[1, :, at : at + 2] = torch.tensor([0xFF, 0x3B], dtype=torch.uint8)
        blocks[2:, ::2, at : at + 2] = torch.tensor([0x03, 0x80], dtype=torch.uint8)
    part = replace(part, data=blocks.view(66, -1))
    x[0] = 1.0  # the largest levels, too
    found = in_int8(part).forward(x)
    assert torch.equal(found, integer_product(x, part))
    assert torch.equal(in_int8(part).forward(x.repeat(11, 1)), found.repeat(11, 1))
    assert (found[:, 0] == 0).all()


@pytest.mark.parametrize("names", [("Q4_1", "Q4_1"), ("Q4_K", "Q6_K")], ids=str)
def test_integer_products_of_several_matrices(names):
    """One below the other, and gates next to what they gate."""
    parts = [stored(name, 64, 512, seed) for seed, name in enumerate(names)]
    x, residual = torch.randn(9, 512), torch.randn(9, 128)
    stacked = Linear.of_stored(parts, None, arithmetic="int8")
    both = [integer_product(x, part) for part in parts]
    assert torch.equal(stacked.forward(x, residual), residual + torch.cat(both, 1))
    if len(set(names)) == 1:
        mlp = Linear.of_stored(parts, None, gated=True, arithmetic="int8")
        program = Program(get_kernel())
        given = program.given(512)
        result = program.output(given.linear(mlp.packed, activation="silu"))
        program.finish()
        out = torch.empty(9, 64)
        Workspace(program).run(9, 1, {program.place(given.buffer): x, program.place(result): out})
        assert torch.allclose(out, torch.nn.functional.silu(both[0]) * both[1], rtol=1e-5)


# --- other properties ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_in", [1, 37, 255])
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_odd_widths(name, num_in):
    check_products(stored(name, 70, num_in))


@pytest.mark.parametrize("sizes", [(64, 64, 64), (128, 30, 30), (5, 7, 64)], ids=str)
def test_matrices_of_one_input_lie_on_top_of_each_other(sizes):
    """Matrices of one format become one; those of several stay parts."""
    for names in (("Q4_K", "Q4_K", "Q6_K"), ("Q4_K", "Q6_K", "Q4_K"), ("bfloat16",) * 3):
        parts = [stored(name, size, 256, seed) for seed, (name, size) in enumerate(zip(names, sizes, strict=True))]
        bias, x = torch.randn(sum(sizes)), torch.randn(9, 256)
        ours = Linear.of_stored(parts, bias)
        whole = Stored("float32", 256, torch.cat([part.expand() for part in parts]))
        wide = Linear.of_stored([whole], bias)
        residual = torch.randn(9, sum(sizes))
        assert torch.equal(ours.forward(x), wide.forward(x))
        assert torch.equal(ours.forward(x, residual), wide.forward(x, residual))
        assert torch.equal(ours.plain(), whole.data)
        assert len(ours.packed) == len(stack(parts))
        assert ours.num_bytes >= sum(part.data.nbytes for part in parts)


@pytest.mark.parametrize("names", [("Q4_1", "Q4_1"), ("Q4_1", "Q8_0"), ("float16", "float16")], ids=str)
@pytest.mark.parametrize("width", [64, 100])
def test_gated_products(names, width):
    gate, up = (stored(name, width, 96, seed) for seed, name in enumerate(names))
    down = stored("bfloat16", 96, width, 5)
    x, outputs = torch.randn(7, 96), []
    for parts in ([gate, up], [gate.expanded(), up.expanded()]):
        mlp = GatedMLP(Linear.of_stored(parts, None, gated=True), Linear.of_stored([down], None), "silu")
        program = Program(get_kernel())
        given = program.given(96)
        result = program.output(mlp.forward(given))
        program.finish()
        out = torch.empty(7, 96)
        Workspace(program).run(7, 1, {program.place(given.buffer): x, program.place(result): out})
        outputs.append(out)
    assert torch.equal(*outputs)
    gates, through = (torch.nn.functional.linear(x, part.expand()) for part in (gate, up))
    right = torch.nn.functional.linear(torch.nn.functional.silu(gates) * through, down.expand())
    assert torch.allclose(outputs[0], right, rtol=1e-3, atol=1e-3 * right.abs().max())


def test_float32_numbers_that_16_bits_hold_take_16():
    numbers = torch.randn(70, 48)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        linear = Linear(numbers.to(dtype).float())
        linear.pack()
        assert linear.formats == (str(dtype).removeprefix("torch."),)
        assert torch.equal(linear.plain(), numbers.to(dtype).float())
    late = numbers.to(torch.bfloat16).float()
    late[69, 47] += 1e-6
    for odd in (late, torch.full((2, 2), 1e-45)):  # too small for 16 bits
        assert Stored("float32", odd.shape[1], odd).narrowed().format == "float32"


@pytest.mark.parametrize("name", EXACT)
def test_embeddings(name):
    part = stored(name, 100, 256)
    head = Linear.of_stored([part], None)
    embedding = Embedding(head.packed[0])
    ids = torch.tensor([[0, 99], [63, 64]])
    assert embedding.shape == (100, 256)
    assert torch.equal(embedding(ids), part.expand()[ids])
    assert torch.equal(embedding.plain(), part.expand())
    with pytest.raises(ConfigError, match="from 0 to 99"):
        embedding(torch.tensor([100]))


def test_a_quantised_matrix_has_no_rows():
    linear = Linear(torch.randn(64, 64))
    linear.pack("int8")
    with pytest.raises(ConfigError, match="rows of gated and int8 matrices"):
        linear.plain()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_scales_that_are_not_finite(name, number):
    part = stored(name, 65, 512)
    kind = FORMATS[name]
    data = part.data.clone()
    start = data.shape[1] - kind.num_bytes
    if kind.halves:
        at = start + kind.halves[-1]
        data[64, at : at + 2] = torch.from_numpy(np.array([number], np.float16).view(np.uint8))
    else:  # an exponent that stands for NaN, and one whose multiples may be infinite
        data[64, start] = 255 if np.isnan(number) else 253
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        Packed.of_stored([replace(part, data=data)], None)


def test_packed_scales_and_exponents_take_all_values():
    for name, at, largest in (("IQ4_XS", 2, 255), ("MXFP4", 0, 252)):
        part = stored(name, 64, 512)
        part.data.view(64, -1, FORMATS[name].num_bytes)[:, :, at] = torch.arange(64)[:, None] * 4
        part.data[0, at] = largest
        assert torch.equal(Packed.of_stored([part], None).rows(torch.arange(64)), part.expand())


def test_int8_of_blocks_is_int8_of_their_expansion():
    part, x = stored("Q4_1", 70, 64), torch.randn(5, 64)
    ours, wide = Linear.of_stored([part], None, "int8"), Linear(part.expand())
    wide.pack("int8")
    assert ours.quantized == "int8"
    assert torch.equal(ours.forward(x), wide.forward(x))


# --- whole models ----------------------------------------------------------------------------------------------------

DIM = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 80}
DENSE = ["llama", "llama-bias-tied", "mistral-window", "qwen2", "qwen3", "phi3"]


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """``halves("llama", torch.float16)``: a folder whose weights are in 16 bits."""

    @cache
    def make(family, dtype):
        folder, model = tmp_path_factory.mktemp("half"), build(family, **DIM).to(dtype)
        model.config.dtype = dtype
        model.save_pretrained(folder)
        return folder

    return make


def logits_of(target, prompts):
    ctx = target.new_context(FeatureSpec((0, target.num_layers)))
    features = [target.prefill(ctx, prompt) for prompt in prompts]
    tree = DraftTree.from_lists([[prompt[-1], 5, 9, 7] for prompt in prompts], [[-1, 0, 0, 1]] * len(prompts))
    output = target.forward(ctx, tree)
    return [output.logits, output.features, *features]


@pytest.mark.parametrize(("family", "dtype"), list(zip(DENSE, cycle([torch.bfloat16, torch.float16]))))
def test_a_checkpoint_in_16_bits_is_read_in_16_bits(family, dtype, halves):
    folder, prompts = halves(family, dtype), [[4, 9, 30, 7], [8, 8], [11] * 40]
    target = LeanTarget.from_folder(folder, torch.float32)
    wide = LeanTarget.from_folder(folder, torch.float32, expand=True)
    assert (target.runtime, target.dtype, target.net.head.formats) == ("kernel", torch.float32, (str(dtype)[6:],))
    assert wide.net.head.formats == ("float32",)
    assert str(dtype)[6:] in target.runs_as
    assert 1.9 < wide.num_weight_bytes / target.num_weight_bytes <= 2
    for ours, theirs in zip(logits_of(target, prompts), logits_of(wide, prompts), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(target.embedding.plain(), wide.embedding.plain())
    assert torch.equal(target.head.plain(), wide.head.plain())
    tied = target.config.tie_word_embeddings
    assert tied == (target.embedding.packed.weight.data_ptr() == target.head.packed[0].weight.data_ptr())


@pytest.mark.parametrize("family", DENSE)
def test_float64_and_int8_of_a_checkpoint_in_16_bits(family, halves):
    """They read the same numbers."""
    folder = halves(family, torch.bfloat16)
    exact, target = LeanTarget.from_folder(folder, torch.float64), LeanTarget.from_folder(folder, torch.float32)
    assert torch.equal(exact.embedding.plain().float(), target.embedding.plain())
    assert torch.allclose(logits_of(exact, [[4, 9]])[0].float(), logits_of(target, [[4, 9]])[0], atol=1e-3)
    if can_int8():
        small = LeanTarget.from_folder(folder, torch.float32, quantize="int8")
        assert small.quantized == "int8"
        assert torch.equal(small.embedding.plain(), target.embedding.plain())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_that_are_not_finite_are_named(dtype, tmp_path):
    model = build("llama", **DIM).to(dtype)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[70, 3] = torch.inf
    model.save_pretrained(tmp_path)
    for quantize in [None, *(["int8"] if can_int8() else [])]:
        with refused(CheckpointError, "model.layers.1.mlp.up_proj.weight", "found 1 of 5120 that are NaN or infinite"):
            LeanTarget.from_folder(tmp_path, torch.float32, quantize=quantize)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_float32(temperature, halves):
    """With and without a draft model, which is also read in 16 bits."""
    folder, texts = halves("llama", torch.bfloat16), []
    for expand in (False, True):
        target = LeanTarget.from_folder(folder, torch.float32, expand=expand)
        for drafter in (None, CausalLMDrafter(LeanTarget.from_folder(folder, torch.float32), target.vocab_size)):
            decoder, text = Decoder(target, drafter, "match", Budget(4, 3, 8)), {}
            for seed, prompt in enumerate(([4, 9, 30], [8])):
                sampling = Sampling(temperature=temperature, seed=seed, max_tokens=24, ignore_eos=True)
                text[decoder.admit(prompt, sampling)] = ()
            while decoder.num_running:
                for row in decoder.step().rows:
                    text[row.request_id] += row.token_ids
            texts.append(list(text.values()))
    assert texts.count(texts[0]) == 4


def test_the_documented_table_is_the_table():
    page = Path(__file__).parents[1] / "docs" / "weights.md"
    rows = [line.strip("|").split("|") for line in page.read_text(encoding="utf-8").split("\n") if line[:2] == "| "][1:]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert [(name, float(size), fast_on, exact) for name, size, _, fast_on, exact in cells] == [
        (kind.name, round(kind.num_bytes / kind.inputs, 6), kind.fast_on, kind.exact) for kind in FORMATS.values()
    ]


def test_memory_for_weights():
    """Every byte can be written and read, with huge pages or without."""
    for size in (1, 63, 4096, 5 << 20):
        memory = get_kernel().room(size, dtype=torch.uint8)
        assert memory.shape == (size,)
        assert int(memory.fill_(7).sum(dtype=torch.int64)) == 7 * size
