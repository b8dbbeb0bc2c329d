"""A quantised target: its texts do not depend on drafts, like those of any other model."""

import pytest
import torch

import draftwing as dw
from conftest import SMALL, refused
from draftwing.cpu.library import get_kernel
from draftwing.cpu.packed import NotFiniteError, quantize_blocks
from draftwing.decode import Decoder
from draftwing.errors import ConfigError, UnsupportedError
from draftwing.formats.write import write_head
from draftwing.loading import load_drafter, load_target
from draftwing.methods import net as net_module
from draftwing.methods.base import EAGLE_TREE, Budget
from draftwing.methods.causal_lm import CausalLMDrafter
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.methods.lookup import LookupDrafter
from draftwing.methods.net_drafter import EagleDrafter
from draftwing.models import linear as linear_module
from draftwing.models.config import ModelConfig, read_config
from draftwing.models.lean import LeanTarget
from draftwing.models.linear import Linear
from draftwing.sampling import Sampling
from draftwing.stats import Stats
from processors import can_int8

pytestmark = pytest.mark.skipif(not can_int8(), reason="this CPU multiplies no 8-bit integers exactly")
in_pytorch = pytest.mark.skipif(
    not linear_module.has_exact_int8(), reason="PyTorch multiplies no 8-bit integers exactly"
)
VOCAB = SMALL["vocab_size"]
PROMPTS = ((9,), (4, *range(3, 23)), (3, 8, 12, 5, 8, 12))
SAMPLINGS = {"greedy": {"temperature": 0.0}, "t1": {"temperature": 1.0}}


def decode(target, kind, rows, drafter=None, budget=None):
    decoder, texts, stats = Decoder(target, drafter, "match", budget), {}, Stats()
    for row in rows:
        sampling = Sampling(max_tokens=10, seed=10 + row, ignore_eos=True, **SAMPLINGS[kind])
        texts[decoder.admit(list(PROMPTS[row]), sampling)] = ()
    while decoder.num_running:
        step = decoder.step()
        stats.add(step)
        for row in step.rows:
            texts[row.request_id] += row.token_ids
    return list(texts.values()), stats


def eagle(folder, target, version, quantize="int8"):
    torch.manual_seed(2)
    config = EagleConfig.for_target(version, ModelConfig.from_hf(read_config(folder)))
    net = EagleNet(config, target.embedding, target.head, None, target.dtype)
    return net.prepack(quantize)


DRAFTERS = {
    "lookup": (lambda folder, target: LookupDrafter(VOCAB, 1), Budget(4, 3)),
    "float-twin": (lambda folder, target: CausalLMDrafter(LeanTarget.from_folder(folder), VOCAB), Budget(4)),
    "itself-tree": (lambda folder, target: CausalLMDrafter(target, VOCAB), Budget(4, 4, 12)),
    "eagle1": (lambda folder, target: EagleDrafter(eagle(folder, target, 1), target), Budget(paths=EAGLE_TREE)),
    "eagle3": (lambda folder, target: EagleDrafter(eagle(folder, target, 3), target), Budget(4, 8, 24)),
}


@in_pytorch
@pytest.mark.parametrize(
    ("family", "kind", "dtype"), [("llama-bias-tied", "t1", torch.float32), ("mixtral", "greedy", torch.bfloat16)]
)
def test_text_is_plain_decodings(family, kind, dtype, folder_of):
    """Alone and in a ragged batch; each case takes half of the kinds of drafters."""
    folder = folder_of(family)
    target = LeanTarget.from_folder(folder, dtype, quantize="int8")
    plain = [decode(target, kind, [row])[0][0] for row in range(3)]
    assert decode(target, kind, range(3))[0] == plain
    for name, (make, budget) in list(DRAFTERS.items())[family == "mixtral" :: 2]:
        texts, stats = decode(target, kind, range(3), make(folder, target), budget)
        assert texts == plain, name
        assert stats.num_drafted > 0
        if name in ("float-twin", "itself-tree"):
            assert stats.num_accepted > 0


@in_pytorch
@torch.inference_mode()
def test_what_is_quantised(folder_of):
    folder = folder_of("mixtral")
    target, floats = LeanTarget.from_folder(folder, quantize="int8"), LeanTarget.from_folder(folder)
    assert (target.quantized, floats.quantized) == ("int8", None)
    assert torch.equal(target.embedding.plain(), floats.embedding.plain())
    for layer in target.net.layers:
        quantised = {name: m.quantized for name, m in layer.named_modules() if isinstance(m, Linear)}
        assert {name for name, how in quantised.items() if how is None} == {"mlp.router"}
    assert target.head.quantized == "int8"
    logits = []
    for model in (target, floats):
        ctx = model.new_context()
        model.prefill(ctx, [3, 8, 12, 5])
        logits.append(model.forward(ctx, dw.DraftTree.chain(torch.tensor([[5, 9]]))).logits)
    assert 0 < (logits[0] - logits[1]).norm() < 0.2 * logits[1].norm()


@in_pytorch
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_bytes_read_are_those_of_the_small_weights(family, folder_of):
    hidden, wide, kv = SMALL["hidden_size"], SMALL["intermediate_size"], SMALL["num_key_value_heads"]
    experts, router = (2, 4 * 4 * hidden) if family == "mixtral" else (1, 0)  # two of four are active
    qkv = hidden + 2 * kv * hidden // SMALL["num_attention_heads"]
    mlp = router + experts * (2 * wide * (hidden + 4) + hidden * (wide + 4))
    layer = (qkv + hidden) * (hidden + 4) + mlp
    expected = SMALL["num_hidden_layers"] * layer + VOCAB * (hidden + 4)
    assert LeanTarget.from_folder(folder_of(family), quantize="int8").num_weight_bytes == expected


@in_pytorch
@pytest.mark.parametrize("version", [1, 3])
def test_a_head_is_quantised_like_its_target(version, folder_of, tmp_path):
    folder = folder_of("llama", vocab_size=300)
    target = load_target(folder, quantize="int8")
    config = EagleConfig.for_target(version, ModelConfig.from_hf(read_config(folder)))
    write_head(tmp_path / "head", EagleNet(config, target.embedding, target.head))
    for model, expected in ((target, "int8"), (load_target(folder), None)):
        drafter = load_drafter(tmp_path / "head", model, None)()
        assert isinstance(drafter, EagleDrafter)
        net = drafter.net
        assert {m.quantized for m in net.modules() if isinstance(m, Linear)} == {expected}
        assert net.dtype == torch.float32


# --- 4 bits ----------------------------------------------------------------------------------------------------------

in_kernel = pytest.mark.skipif(get_kernel() is None, reason="4-bit matrices run in the CPU kernel")
WIDE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96}


@in_kernel
@pytest.mark.parametrize(("kind", "width"), [("t1", 96), ("greedy", 72)], ids=["blocks", "no-blocks"])
def test_text_in_4_bits_is_plain_decodings(width, kind, folder_of):
    folder = folder_of("llama", **{**WIDE, "intermediate_size": width})
    target = LeanTarget.from_folder(folder, quantize="q4")
    layer = target.net.layers[0]
    assert target.quantized == "q4"
    assert layer.qkv.formats == layer.mlp.gate_up.formats == ("Q4_1",)
    assert layer.mlp.down.formats == (("Q4_1",) if width % 32 == 0 else ("int8",))
    assert target.head.formats == ("int8",)
    plain = [decode(target, kind, [row])[0][0] for row in range(3)]
    for name in ("lookup", "float-twin", "itself-tree"):
        make, budget = DRAFTERS[name]
        texts, stats = decode(target, kind, range(3), make(folder, target), budget)
        assert texts == plain, name
        assert stats.num_drafted > 0
    for version in (1, 3):
        drafter = EagleDrafter(eagle(folder, target, version, "q4"), target)
        assert decode(target, kind, range(3), drafter, Budget(4, 8, 24))[0] == plain


def test_weights_in_4_bits_are_the_nearest_levels_of_each_block():
    torch.manual_seed(0)
    weight = torch.randn(70, 96) * torch.rand(70, 1) + 0.3
    weight[3], weight[4, 32:64] = 0.0, 0.25
    stored = quantize_blocks(weight)
    assert (stored.format, stored.num_in, stored.data.shape) == ("Q4_1", 96, (70, 60))
    found, blocks = stored.expand().view(-1, 32), weight.view(-1, 32)
    spread = blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)
    plain = blocks.amin(1, keepdim=True) + (
        ((blocks - blocks.amin(1, keepdim=True)) / (spread / 15).clamp_min(1e-9)).round() * spread / 15
    )
    assert ((found - blocks).abs() <= 0.08 * spread + 1e-3).all()
    assert (found - blocks).square().sum() < 0.97 * (plain - blocks).square().sum()  # fitted by least squares
    assert torch.equal(stored.expand()[3], weight[3])
    assert torch.equal(stored.expand()[4, 32:64], weight[4, 32:64])
    again = quantize_blocks(stored.expand())
    assert torch.allclose(again.expand(), stored.expand(), atol=2e-3)


@in_kernel
def test_a_matrix_in_4_bits_is_refilled_in_its_place():
    first, second = torch.randn(70, 64), torch.randn(70, 64)
    linear, expected = Linear(first.clone()), Linear(second.clone())
    for matrix in (linear, expected):
        matrix.pack("q4")
    x, before = torch.randn(3, 64), linear.packed[0].weight.data_ptr()
    linear.refill(second)
    assert linear.packed[0].weight.data_ptr() == before
    assert torch.equal(linear(x), expected(x))
    for odd in (torch.nan, torch.inf):
        second[5, 40] = odd
        with refused(NotFiniteError):
            linear.refill(second)


@in_kernel
@pytest.mark.parametrize("width", [64, 256])
def test_only_heads_beyond_the_caches_draft_in_4_bits(width, folder_of, monkeypatch):
    monkeypatch.setattr(net_module, "MAX_CACHED", 100_000)
    folder = folder_of("llama", **{**WIDE, "intermediate_size": 32, "hidden_size": width})
    target = LeanTarget.from_folder(folder)
    config = EagleConfig.for_target(3, ModelConfig.from_hf(read_config(folder)))
    net = EagleNet(config, target.embedding, target.head, None, target.dtype).prepack(fast=True)
    formats = {name for matrix in net.modules() if isinstance(matrix, Linear) for name in matrix.formats}
    if get_kernel().has_int8:
        assert formats == ({"int8"} if width == 64 else {"Q4_1"})


def test_4_bits_need_the_kernel(folder_of, monkeypatch):
    monkeypatch.setenv("DRAFTWING_KERNEL", "off")
    with refused(UnsupportedError, "quantize='q4'", "CPU kernel", "quantize='int8'"):
        LeanTarget.from_folder(folder_of("llama", **WIDE), quantize="q4")


def test_the_shipped_model():
    texts = {kind: [] for kind in SAMPLINGS}
    for draft in ("none", "eagle3", "eagle1", "causal-lm"):
        lm = dw.load(draft=draft, quantize="int8")
        for kind, found in texts.items():
            found.append(lm.generate("import os\n", max_tokens=24, seed=3, **SAMPLINGS[kind])[0].token_ids)
    for found in texts.values():
        assert all(text == found[0] for text in found)


@pytest.mark.parametrize(
    ("family", "options", "kind", "parts"),
    [
        ("llama", {"quantize": "int3"}, ConfigError, ["quantize must be int8, q4 or None", "found 'int3'"]),
        ("llama", {"dtype": "float64"}, UnsupportedError, ["found float64", "leave quantize out"]),
        ("llama", {"engine": "transformers"}, UnsupportedError, ["transformers", "engine='lean'"]),
        ("gpt2", {}, UnsupportedError, ["transformers", "leave quantize out"]),
    ],
)
def test_refusals(family, options, kind, parts, folder_of):
    with refused(kind, *parts):
        load_target(folder_of(family), **{"quantize": "int8", **options})


def test_the_kernel_is_exact_where_pytorch_is_not(folder_of, monkeypatch):
    """If PyTorch's 8-bit products saturate (only AVX2), models are quantised only if the kernel runs them."""
    folder = folder_of("llama", head_dim=32)
    before = LeanTarget.from_folder(folder, quantize="int8")
    for module in (linear_module, net_module):
        monkeypatch.setattr(module, "has_exact_int8", lambda: False)
    if get_kernel() is not None:
        after = LeanTarget.from_folder(folder, quantize="int8")
        assert (after.runtime, after.quantized) == ("kernel", "int8")
        texts = [decode(target, "t1", range(2))[0] for target in (before, after)]
        assert texts[0] == texts[1]
        monkeypatch.setattr(EagleNet, "is_traceable", False)  # a net that runs in PyTorch then drafts in float32
        net = eagle(folder, after, 3)
        assert net.runs.name == "torch"
        assert decode(after, "t1", range(2), EagleDrafter(net, after), Budget(4, 8, 24))[0] == texts[0]
    monkeypatch.setenv("DRAFTWING_KERNEL", "off")
    with refused(UnsupportedError, "quantize='int8'", "without the CPU kernel", "C++ compiler"):
        LeanTarget.from_folder(folder, quantize="int8")
