"""Models in bfloat16: rounded rows and weights, float32 sums (see ``test_products``)."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwing.cpu.library import get_kernel
from draftwing.errors import CheckpointError
from draftwing.formats.write import write_head
from draftwing.loading import load_drafter
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.methods.net_drafter import EagleDrafter
from draftwing.models.config import ModelConfig, read_config
from draftwing.models.context import FeatureSpec
from draftwing.models.layers import RMSNorm
from draftwing.models.lean import LeanTarget
from draftwing.models.linear import Linear
from draftwing.tree import DraftTree
from processors import can_int8
from test_products import linear_of, reference
from test_weight_formats import stored

kernel = get_kernel()
pytestmark = pytest.mark.skipif(kernel is None, reason="no kernel here")


@pytest.mark.full
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs AVX-512")
def test_other_instructions_give_the_same_bits(folder_of):
    """AVX2, as a processor without AVX-512 computes them: products, and attention over keys and values in 8 bits."""
    code = (
        "import torch; from draftwing.models.linear import Linear; torch.manual_seed(0)\n"
        "weight, x = torch.randn(130, 203), torch.randn(33, 203)\n"
        "linear = Linear(weight); linear.pack(rounds=True)\n"
        "print([(linear(x[:rows]).double() * torch.arange(130)).sum().item() for rows in (1, 2, 3, 33)])\n"
        "from draftwing.models.lean import LeanTarget; from draftwing.tree import DraftTree\n"
        "from pathlib import Path; import sys\n"
        "target = LeanTarget.from_folder(Path(sys.argv[1]), kv_dtype='int8')\n"
        "ctx = target.new_context(); target.prefill(ctx, [3 + i * 7 % 50 for i in range(150)])\n"
        "print(target.forward(ctx, DraftTree.chain(torch.arange(3, 15)[None])).logits.tolist())"
    )
    outputs, folder = [], str(folder_of("llama", head_dim=96))
    for arch in ("native", "x86-64-v3"):
        environment = {**os.environ, "DRAFTWING_KERNEL_ARCH": arch}
        done = subprocess.run([sys.executable, "-c", code, folder], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "Q8_0", "Q6_K"])
def test_weights_of_every_format_become_bfloat16(name):
    torch.manual_seed(1)
    part = stored(name, 70, 512)
    rounded = part.rounded()
    assert (rounded.format, rounded.data.dtype) == ("bfloat16", torch.bfloat16)
    assert torch.equal(rounded.data, part.expand().bfloat16())
    linear = Linear.of_stored([rounded], None, rounds=True)
    x = torch.randn(3, 512)
    assert torch.equal(linear(x), reference("rounded", x, part.expand()))
    assert linear.num_bytes == 128 * 512 * 2


def test_refilled_numbers_are_rounded_too():
    linear, fresh, x = linear_of("rounded", torch.randn(70, 50)), torch.randn(70, 50), torch.randn(3, 50)
    linear.refill(fresh)
    assert torch.equal(linear(x), reference("rounded", x, fresh))


# --- models ----------------------------------------------------------------------------------------------------------


def logits_of(target: LeanTarget, nodes: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and features of a tree after a prompt, or of a path in it."""
    ctx = target.new_context(FeatureSpec((1, 2)))
    target.prefill(ctx, [3, 8, 12, 5, 9, 30, 41])
    tokens, parents = [5, 9, 11, 9, 7, 6, 2], [-1, 0, 0, 1, 1, 2, 5]
    if nodes is not None:
        tokens, parents = [tokens[n] for n in nodes], [*range(-1, len(nodes) - 1)]
    out = target.forward(ctx, DraftTree.from_lists([tokens], [parents]))
    assert out.features is not None
    return out.logits, out.features


@pytest.mark.parametrize("family", ["llama", "llama-bias-tied", "qwen3"])
def test_a_model_computes_in_bfloat16(family, folder_of, tiles):
    folder = folder_of(family, head_dim=32, initializer_range=0.1)
    target, wide = LeanTarget.from_folder(folder, torch.bfloat16), LeanTarget.from_folder(folder, torch.float64)
    assert (target.runtime, target.dtype, target.quantized) == ("kernel", torch.bfloat16, None)
    assert target.runs_as == "CPU kernel, bfloat16"
    logits, features = logits_of(target)
    assert logits.dtype == features.dtype == torch.float32
    exact = logits_of(wide)[0]
    assert 1e-4 * exact.abs().max() < (logits - exact).abs().max() < 0.05 * exact.abs().max()
    for path in ([0, 2, 5, 6], [0, 1, 4], [0]):
        for whole, alone in zip((logits, features), logits_of(target, path), strict=True):
            assert torch.equal(alone[0], whole[0, path])


def test_only_the_matrices_are_in_bfloat16(folder_of):
    folder = folder_of("llama-bias-tied", head_dim=32)
    target, wide = LeanTarget.from_folder(folder, torch.bfloat16), LeanTarget.from_folder(folder)
    for name, part in target.net.layers[1].named_modules():
        other = wide.net.layers[1].get_submodule(name)
        if isinstance(part, Linear):
            assert part.formats == ("bfloat16",)
            assert part.num_bytes == other.num_bytes / 2
            assert torch.equal(part.bias, other.bias)
        elif isinstance(part, RMSNorm):
            assert torch.equal(part.weight, other.weight)
    assert (target.head.formats, target.head.num_bytes) == (("bfloat16",), wide.head.num_bytes / 2)
    assert torch.equal(target.embedding.plain(), wide.embedding.plain().bfloat16().float())


def test_int8_takes_precedence_over_bfloat16(folder_of):
    if not kernel.has_int8 or not can_int8():
        pytest.skip("this CPU multiplies no 8-bit integers exactly")
    folder = folder_of("llama", head_dim=32)
    targets = [LeanTarget.from_folder(folder, dtype, quantize="int8") for dtype in (torch.float32, torch.bfloat16)]
    assert torch.equal(*(logits_of(target)[0] for target in targets))


def test_a_head_computes_as_for_a_float32_target(folder_of, tmp_path):
    folder = folder_of("llama", head_dim=32)
    target = LeanTarget.from_folder(folder, torch.bfloat16)
    config = EagleConfig.for_target(3, ModelConfig.from_hf(read_config(folder)))
    write_head(tmp_path / "head", EagleNet(config, target.embedding, target.head))
    drafter = load_drafter(tmp_path / "head", target, None)()
    assert isinstance(drafter, EagleDrafter)
    assert (drafter.net.dtype, drafter.net.runs.name) == (torch.float32, "kernel")


def test_without_the_kernel_pytorch_computes_in_bfloat16(folder_of, monkeypatch):
    monkeypatch.setenv("DRAFTWING_KERNEL", "off")
    target = LeanTarget.from_folder(folder_of("llama", head_dim=32), torch.bfloat16)
    assert (target.runtime, target.dtype, target.embedding.dtype) == ("torch", torch.bfloat16, torch.bfloat16)


def test_a_weight_beyond_bfloat16_is_named(folder_of, tmp_path):
    folder = folder_of("llama", head_dim=32)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["model.layers.1.mlp.down_proj.weight"][2, 3] = torch.finfo(torch.float32).max
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="down_proj"):
        LeanTarget.from_folder(tmp_path, torch.bfloat16)
