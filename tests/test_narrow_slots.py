"""Keys and values in 8 bits: how far they are from float32's, what they take, and where they are refused."""

import pytest
import torch

from conftest import kernel_size, refused
from draftwing.cpu.library import get_kernel, kernel_problem
from draftwing.decode import Decoder
from draftwing.errors import ConfigError, UnsupportedError
from draftwing.loading import check_kv_memory, load_target
from draftwing.methods.base import Budget
from draftwing.models.lean import LeanTarget
from draftwing.tree import DraftTree

needs_kernel = pytest.mark.skipif(get_kernel() is None, reason=f"no CPU kernel here: {kernel_problem()}")
PROMPT = [3 + 7 * i % 50 for i in range(150)]  # three pages
TREE = DraftTree.from_lists([[5, 9, 11, 7, 6, 8, 4, 12, 13, 30]], [[-1, 0, 0, 1, 1, 2, 5, 3, 7, 8]])


def both(folder):
    return (LeanTarget.from_folder(folder, kv_dtype=kv_dtype) for kv_dtype in (None, "int8"))


def context(target, *prompts):
    ctx = target.new_context()
    for prompt in prompts:
        target.prefill(ctx, prompt)
    return ctx


@needs_kernel
def test_a_slot_is_rounded_to_half_a_level(folder_of):
    """In the first layer, whose keys and values do not depend on other slots."""
    floats, ours = (context(target, PROMPT).cache.data[0, :, 0] for target in both(folder_of("llama", head_dim=64)))
    count, heads = 128, floats.shape[1]
    keys, values = floats[:, :, :count]
    keys = keys.reshape(heads, count // 16, 64, 16).transpose(2, 3).reshape(heads, count, 64)
    words = ours[0, :, :count].reshape(heads, count // 64, 17, 64).transpose(2, 3).reshape(heads, count, 17)
    for wide, narrow in ((keys, words), (values, ours[1, :, :count])):
        levels, scale = (
            narrow[..., :16].contiguous().view(torch.int8),
            narrow[..., 16:].contiguous().view(torch.float32),
        )
        assert torch.allclose(scale[..., 0], wide.abs().amax(-1) / 127)
        assert ((levels * scale - wide).abs() <= 0.5001 * scale).all()


@needs_kernel
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {"head_dim": 96}),
        ("qwen3", {"head_dim": 128}),
        ("mistral-window", {"head_dim": 64, "sliding_window": 70, "initializer_range": 0.2}),
        ("gemma2-capped", kernel_size("gemma2-capped")),
        ("lfm2", kernel_size("lfm2")),
    ],
)
def test_logits_are_close_to_float32(family, changes, folder_of):
    wide, narrow = (
        target.forward(context(target, PROMPT), TREE).logits for target in both(folder_of(family, **changes))
    )
    assert 0 < (narrow - wide).norm() < 0.025 * wide.norm()


@needs_kernel
def test_heads_narrower_than_their_slots_are_close_to_float32(folder_of):
    """Those of Gemma 4, whose scores are not scaled: with shorter queries, attention is as even as in other models."""
    folder, logits = folder_of("gemma4", **kernel_size("gemma4")), []
    for target in both(folder):
        for layer in target.net.layers:
            layer.q_norm.weight.data.mul_(0.1)
        logits.append(target.forward(context(target, PROMPT), TREE).logits)
    assert 0 < (logits[1] - logits[0]).norm() < 0.025 * logits[0].norm()


@needs_kernel
def test_convolutions_stay_in_float32(folder_of):
    folder = folder_of("lfm2", **kernel_size("lfm2"), layer_types=["conv"] * 3)
    wide, narrow = (target.forward(context(target, PROMPT), TREE).logits for target in both(folder))
    assert torch.equal(wide, narrow)


@needs_kernel
def test_nan_stays_in_its_row(folder_of):
    target = LeanTarget.from_folder(folder_of("llama", head_dim=64), kv_dtype="int8")
    ctx = context(target, PROMPT, PROMPT)
    tree = DraftTree(TREE.tokens.repeat(2, 1), TREE.parents.repeat(2, 1))
    before = target.forward(ctx, tree).logits
    ctx.cache.data.view(torch.float32)[1, 1, 0, 0, 70, -1] = torch.nan  # the scale of a value
    after = target.forward(ctx, tree).logits
    assert after[0].isnan().all()
    assert torch.equal(after[1], before[1])


@needs_kernel
def test_a_page_takes_little_more_than_a_quarter(folder_of):
    folder = folder_of("llama", head_dim=64)
    wide, narrow = (Decoder(target, kv_memory=1 << 28).pages.num_page_bytes for target in both(folder))
    assert narrow * 64 == wide * 17
    check_kv_memory(wide * 20, folder, Budget(0), device="cpu", kv_dtype="int8")
    with refused(ConfigError, "is too small"):
        check_kv_memory(wide, folder, Budget(0), device="cpu", kv_dtype="int8")


@pytest.mark.parametrize(
    ("family", "options", "kind", "parts"),
    [
        ("llama", {"kv_dtype": "int4"}, ConfigError, ["kv_dtype must be int8 or None, found 'int4'"]),
        ("llama", {"dtype": "float64"}, UnsupportedError, ["runs in the CPU kernel alone", "leave kv_dtype out"]),
        ("mixtral", {}, UnsupportedError, ["runs in the CPU kernel alone", "leave kv_dtype out"]),
        ("gpt2", {}, UnsupportedError, ["transformers", "leave kv_dtype out"]),
    ],
)
def test_it_is_refused_where_it_does_not_run(family, options, kind, parts, folder_of):
    with refused(kind, *parts):
        load_target(folder_of(family), device="cpu", **{"kv_dtype": "int8", **options})
