"""RoPE, bit for bit against transformers."""

import copy

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from conftest import refused
from draftwing.errors import ConfigError, UnsupportedError
from draftwing.models.config import RopeConfig
from draftwing.models.rope import Rotary, attention_factor, inverse_frequencies

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}

LONG = {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16, "beta_slow": 2, "truncate": False}
ORIGINAL = {"original_max_position_embeddings": 256}

# Name: (head_dim, context, rope_scaling, other keys of the config).
SETTINGS = {
    "default": (64, 512, None, {}),
    "default-narrow": (6, 512, None, {"rope_theta": 1000000}),
    "linear": (64, 512, {"type": "linear", "factor": 2.5}, {}),
    "linear-int": (80, 512, {"rope_type": "linear", "factor": 4}, {"rope_theta": 500000.0}),
    "proportional": (40, 512, {"rope_type": "proportional", "partial_rotary_factor": 0.3, "rope_theta": 1e6}, {}),
    "proportional-stretched": (64, 512, {"rope_type": "proportional", "factor": 8.0, "rope_theta": 1e4}, {}),
    "dynamic": (64, 128, {"type": "dynamic", "factor": 2.0}, {}),
    "dynamic-int": (20, 100, {"type": "dynamic", "factor": 3}, {"rope_theta": 500000.0}),
    "dynamic-odd": (128, 96, {"type": "dynamic", "factor": 1.1}, {"rope_theta": 12345.678}),
    "llama3": (64, 1024, {**LLAMA3, **ORIGINAL}, {"rope_theta": 5e5}),
    "llama3-32": (128, 131072, LONG, {"rope_theta": 500000.0}),
    "llama3-step": (128, 131072, {**LONG, "high_freq_factor": 1.0}, {"rope_theta": 500000.0}),  # Llama 4's
    "llama3-no-original": (64, 1024, LLAMA3, {"rope_theta": 5e5}),
    "llama3-outer-original": (
        64, 1024, {**LLAMA3, **ORIGINAL}, {"rope_theta": 5e5, "original_max_position_embeddings": 128}
    ),
    "yarn": (128, 32768, {**YARN, "original_max_position_embeddings": 8192}, {"rope_theta": 1e6}),
    "yarn-no-original": (64, 512, YARN, {}),
    "yarn-null-factor": (64, 512, {**YARN, "factor": None, "original_max_position_embeddings": 64}, {}),
    "yarn-mscale": (64, 4096, {**YARN, **MSCALE, "factor": 40, "original_max_position_embeddings": 128}, {}),
    "yarn-one-mscale": (64, 512, {**YARN, "mscale": 0.7, "mscale_all_dim": 0, "beta_fast": 0, "beta_slow": None}, {}),
    "yarn-attention": (96, 512, {**YARN, "attention_factor": 1.25, "truncate": None}, {}),
    "yarn-shrinking": (64, 512, {**YARN, "factor": 0.5}, {}),
}  # fmt: skip


def read(config, **options):
    return RopeConfig.from_hf(config, **{"model_type": "llama", "theta": 10000.0, **options})


def pair(name):
    """(our RopeConfig, transformers' LlamaConfig) of a setting."""
    head_dim, context, scaling, other = SETTINGS[name]
    config = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "max_position_embeddings": context, **other}
    if scaling is not None:
        config["rope_scaling"] = dict(scaling)
    ours = read(config, head_dim=head_dim, max_position_embeddings=context)
    return ours, LlamaConfig(**copy.deepcopy(config))


def theirs_at(config, positions):
    """transformers' cosine and sine as complex numbers, float32."""
    cosine, sine = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    half = cosine.shape[-1] // 2
    return torch.complex(cosine[..., :half], sine[..., :half])


@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_are_those_of_transformers(name):
    ours, theirs = pair(name)
    reference = LlamaRotaryEmbedding(theirs)
    assert reference.rope_type == ours.type
    assert inverse_frequencies(ours).equal(reference.inv_freq)
    assert attention_factor(ours) == reference.attention_scaling
    if ours.type != "default":
        expected, scaling = ROPE_INIT_FUNCTIONS[ours.type](theirs)
        assert inverse_frequencies(ours).equal(expected)
        assert attention_factor(ours) == scaling
        # The same settings as transformers 5 would save them.
        sizes = {"head_dim": ours.head_dim, "max_position_embeddings": ours.max_position_embeddings}
        assert read(theirs.to_dict(), **sizes) == ours


@pytest.mark.parametrize("name", [name for name in SETTINGS if name.startswith("dynamic")])
def test_dynamic_frequencies_at_every_length(name):
    ours, theirs = pair(name)
    for length in [1, *range(ours.max_position_embeddings, ours.max_position_embeddings + 300)]:
        # A tensor, because that is what transformers' forward passes.
        expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, seq_len=torch.tensor(length))
        assert inverse_frequencies(ours, torch.tensor(length)).equal(expected)


@pytest.mark.parametrize("name", [name for name in SETTINGS if not name.startswith("dynamic")])
def test_factors_are_those_of_transformers(name):
    ours, theirs = pair(name)
    rotary = Rotary(ours)
    for positions in (
        torch.arange(700)[None],
        torch.tensor([[0, 5, 5, 3], [2000, 1, 1023, 1024]]),
        torch.tensor([[9]]),
    ):
        found = rotary.cis(positions)
        assert found.dtype == torch.complex64
        assert found.equal(theirs_at(theirs, positions))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_factors_are_rounded_to_the_dtype_last(dtype):
    ours, theirs = pair("yarn")
    positions = torch.arange(300)[None]
    cosine, sine = LlamaRotaryEmbedding(theirs)(torch.zeros(1, dtype=dtype), positions)
    assert cosine.dtype == dtype
    found = Rotary(ours, dtype).cis(positions)
    assert found.dtype == (torch.complex128 if dtype == torch.float64 else torch.complex64)
    assert found.real.equal(cosine[..., :64].to(found.real.dtype))
    assert found.imag.equal(sine[..., :64].to(found.real.dtype))


@pytest.mark.parametrize("prompt", [5, 128, 129, 140])
def test_dynamic_is_what_a_token_by_token_reference_does(prompt):
    ours, theirs = pair("dynamic")  # context 128
    reference, rotary = LlamaRotaryEmbedding(theirs), Rotary(ours)
    blocks = [torch.arange(prompt), *(torch.tensor([position]) for position in range(prompt, 150))]
    expected = []
    for block in blocks:
        cosine, sine = reference(torch.zeros(1), block[None])
        expected.append(torch.complex(cosine[0, :, :32], sine[0, :, :32]))
    found = rotary.cis(torch.arange(150), torch.tensor(prompt))
    assert found.equal(torch.cat(expected))


def test_dynamic_does_not_depend_on_the_grouping():
    ours, _ = pair("dynamic-odd")  # context 96
    positions, prompts = torch.arange(120).expand(2, -1), torch.tensor([[10], [110]])
    whole = Rotary(ours).cis(positions, prompts)
    pieces, rotary, start = [], Rotary(ours), 0
    for size in (1, 7, 30, 2, 5, 60, 1, 3, 11):
        pieces.append(rotary.cis(positions[:, start : start + size], prompts))
        start += size
    assert start == 120
    assert torch.cat(pieces, 1).equal(whole)
    # Rows differ while the longer prompt stretches further, and meet where both texts are beyond it.
    assert not whole[0, 50].equal(whole[1, 50])
    assert whole[0, 115].equal(whole[1, 115])


def test_dynamic_without_a_prompt_goes_by_position():
    ours, _ = pair("dynamic")
    rotary, positions = Rotary(ours), torch.tensor([3, 127, 128, 200])
    assert rotary.cis(positions).equal(rotary.cis(positions, torch.tensor(1)))
    assert rotary.cis(torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, 32)


def test_the_table_grows_without_changing():
    ours, _ = pair("llama3")
    small, large = Rotary(ours), Rotary(ours)
    large.reserve(10000)
    before = small.cis(torch.arange(1000))
    assert small.cis(torch.tensor(9999)).equal(large.cis(torch.tensor(9999), upto=10000))
    assert small.cis(torch.arange(1000)).equal(before)
    assert small.cis(torch.empty(0, dtype=torch.int64)).shape == (0, 32)
    assert small.cis(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 32)
    with pytest.raises(IndexError):
        small.cis(torch.tensor([-1]))


@pytest.mark.parametrize("name", ["llama3", "dynamic"])
def test_factors_made_in_inference_mode_serve_training(name):
    ours, _ = pair(name)
    with torch.inference_mode():
        rotary = Rotary(ours)
        rotary.cis(torch.arange(5000))
    weights = torch.ones(5000, ours.rotary_dim // 2, requires_grad=True)
    (weights * rotary.cis(torch.arange(5000))).real.sum().backward()
    assert weights.grad is not None


def test_phi3_rotates_only_a_part():
    kwargs = {"hidden_size": 256, "num_attention_heads": 2, "partial_rotary_factor": 0.75, "rope_theta": 10000.0}
    ours = read(kwargs, model_type="phi3", head_dim=128, max_position_embeddings=4096)
    reference = Phi3RotaryEmbedding(Phi3Config(**kwargs, vocab_size=32064))
    positions = torch.arange(64)[None]
    cosine, sine = reference(torch.zeros(1), positions)
    assert ours.rotary_dim == 96
    assert Rotary(ours).cis(positions).equal(torch.complex(cosine[..., :48], sine[..., :48]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["default", "dynamic", "yarn"])
def test_a_gpu_agrees_with_transformers_there(name):
    ours, theirs = pair(name)
    positions = torch.arange(100, device="cuda")[None]
    cosine, sine = LlamaRotaryEmbedding(theirs).to("cuda")(torch.zeros(1, device="cuda"), positions)
    half = cosine.shape[-1] // 2
    found = Rotary(ours, device="cuda").cis(positions, torch.tensor(100, device="cuda"))
    assert found.equal(torch.complex(cosine[..., :half], sine[..., :half]))


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ('RoPE type "longrope" is not supported by the lean decoder', {"type": "longrope"}),
        ("expected one of default, linear, dynamic, llama3, yarn, proportional. Use engine=", {"type": "su"}),
        ("must be even, from 2 to 8, found 3. Correct it", {"rotary_dim": 3}),
        ("must be even, from 2 to 8, found 10", {"rotary_dim": 10}),
        ("must be even, from 4 to 8, found 2", {"type": "dynamic", "rotary_dim": 2}),
        ("rope_theta must be above 1, found 0", {"theta": 0}),
        ("factor must be above 0, found 0", {"type": "linear", "factor": 0}),
        (
            "embeddings must be an integer above 0, found None",
            {"type": "yarn", "original_max_position_embeddings": None},
        ),
        ("must be an integer above 0, found 1.5", {"type": "llama3", "original_max_position_embeddings": 1.5}),
        ("beta_slow must be above 0", {"type": "yarn", "beta_slow": -1}),
        ("low_freq_factor <= high_freq_factor must hold, found (5.0, 4.0)", {"type": "llama3", "low_freq_factor": 5.0}),
        ("truncate must be true or false, found no", {"type": "yarn", "truncate": "no"}),
    ],
)
def test_refusals(text, changes):
    usual = {"type": "default", "theta": 1e4, "head_dim": 8, "rotary_dim": 8, "original_max_position_embeddings": 8}
    with refused(UnsupportedError if "RoPE type" in text or "engine" in text else ConfigError, text):
        RopeConfig(**{**usual, "max_position_embeddings": 64, **changes})


def test_a_dtype_without_complex_numbers_is_refused():
    with refused(ConfigError, "Rotary: dtype must be one of torch.float32, ", " found torch.int8"):
        Rotary(pair("default")[0], torch.int8)
