"""Tiny random models of every family, made once per session."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["DRAFTWING_MODEL"] = "toy"  # the default model is a download
# A cache of the tests' own: nothing of the user's is read or written. Processes that this one starts (the workers of
# pytest-xdist, tools/mutants.py) inherit the variable: they share the cache, and the compiled kernel in it.
os.environ["DRAFTWING_CACHE"] = os.environ.get("DRAFTWING_TEST_CACHE") or tempfile.mkdtemp(prefix="draftwing-test-")

os.environ["HF_HUB_CACHE"] = os.path.join(os.environ["DRAFTWING_CACHE"], "hub")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes that tests start take up to a quarter less time
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process that a test starts compiles the whole package

import hypothesis
import pytest
import tokenizers
import torch
import transformers
import typer.testing

from draftwing import measure
from draftwing.cpu.library import get_kernel
from draftwing.errors import DraftwingError
from draftwing.shipped import SHIPPED

gc.disable()  # until all tests are collected: imported modules stay, and garbage collections would traverse them all
IS_SHARED = "DRAFTWING_TEST_CACHE" in os.environ  # it belongs to whoever started this process
os.environ["DRAFTWING_TEST_CACHE"] = os.environ["DRAFTWING_CACHE"]
typer.testing._get_command = cache(typer.main.get_command)  # builds the commands once instead of for every run
hypothesis.settings.register_profile("draftwing", max_examples=50)
hypothesis.settings.load_profile("draftwing")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
# In the background of a script interrupts are ignored, and what is started from there ignores them too.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Many tests load a new pair: what its steps take need not be known well.
measure.CONFIG = dataclasses.replace(
    measure.CONFIG, nodes=(1, 2, 3, 4, 8, 16, 64), depths=(1, 2, 8), rounds=8, seconds=0.05
)
torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it does, and far more on a busy machine


runs_full = False  # tests marked ``full`` can be selected; if not, the largest products are not even collected


def pytest_configure(config: pytest.Config) -> None:
    global runs_full
    runs_full = config.option.markexpr != "not full"
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        threading.Thread(target=get_kernel, daemon=True).start()  # compiles it while the workers start


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay: a garbage collection need not look at them
    gc.set_threshold(10_000)  # with the default of 700, collections take a sixth of the time of many tests
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not IS_SHARED:
        shutil.rmtree(os.environ["DRAFTWING_TEST_CACHE"], ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For ``-n auto``: a worker for each processor that may be used, 8 at most, as each takes half a gigabyte."""
    may_use = getattr(os, "sched_getaffinity", None)
    return min(len(may_use(0)) if may_use else os.cpu_count() or 1, 8)


PROCESS_SECONDS = 900  # for a process that ends by itself: among 30 others, imports alone may take minutes
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.4,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-bias-tied": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral-window": ("MistralConfig", {"sliding_window": 7, "head_dim": 16}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
    "phi3": ("Phi3Config", {"sliding_window": 9}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}),
}
LEAN = [name for name in FAMILIES if name not in ("gpt2", "gemma2")]
_SLIDES = ["sliding_attention", "full_attention", "sliding_attention"]
_SCALES = {
    "attention_multiplier": 0.2, "embedding_multiplier": 1.7, "residual_multiplier": 0.3, "logits_scaling": 2.5,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 5e5}
_LATENT = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 2, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 80,
}  # fmt: skip
# Further families of the lean decoder, with every trait of theirs turned on.
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("SmolLM3Config", {"use_sliding_window": True, "sliding_window": 6, "no_rope_layers": [1, 0, 1]}),
    "granite": ("GraniteConfig", _SCALES),
    "granitemoe": ("GraniteMoeConfig", {**_SCALES, "num_local_experts": 4}),
    "ministral": ("MinistralConfig", {"sliding_window": 6, "layer_types": _SLIDES, "head_dim": 8}),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 8,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 8, "attention_out_bias": True}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 8, "use_bias": True}),
    "hunyuan": ("HunYuanDenseV1Config", {"head_dim": 8}),
    "hunyuan-alpha": (
        "HunYuanDenseV1Config",
        {"head_dim": 8, "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}},
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": (
        "Olmo3Config",
        {
            "sliding_window": 6,
            "layer_types": _SLIDES,
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            },
        },
    ),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 6,
            "swiglu_limit": 1.0,
            "layer_types": _SLIDES,
            "rope_parameters": _YARN,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2Config",
        {
            **_LATENT,
            "q_lora_rank": 20,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek-v3": ("DeepseekV3Config", {**_LATENT, "q_lora_rank": None, "num_nextn_predict_layers": 0}),
    "llama4": (
        "Llama4TextConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size_mlp": 40,
            "moe_layers": [1, 2],
            "head_dim": 8,
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 7,  # trees cross its multiples
            "floor_scale": 4,
            "attn_scale": 0.5,
            "attention_bias": True,
        },
    ),
    "arcee": ("ArceeConfig", {"head_dim": 8}),
    "gemma": ("GemmaConfig", {"head_dim": 8}),
    "gemma2-capped": (
        "Gemma2Config",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "attn_implementation": "eager",  # SDPA caps no scores
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "query_pre_attn_scalar": 10,
            "final_logit_softcapping": 3.0,
            "layer_types": _SLIDES,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 6,
            "layer_types": [*_SLIDES, *_SLIDES],  # the last one becomes full_attention
            "head_dim": 8,
            "global_head_dim": 40,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "sliding_window": 6,
            "hidden_size_per_layer_input": 20,
            "vocab_size_per_layer_input": 70,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4-moe": (
        "Gemma4TextConfig",
        {
            "layer_types": _SLIDES,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 1,
            "use_double_wide_mlp": True,
            "sliding_window": 6,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "exaone4": ("Exaone4Config", {"sliding_window": 6, "layer_types": _SLIDES}),
    "glm": ("GlmConfig", {"head_dim": 8}),
    "glm4": ("Glm4Config", {"head_dim": 8}),
    "cohere": ("CohereConfig", {"logit_scale": 0.3}),
    "cohere2": ("Cohere2Config", {"sliding_window": 6, "layer_types": _SLIDES, "logit_scale": 0.3}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 6}),
    "nemotron": ("NemotronConfig", {"head_dim": 8}),
    "qwen3.5": ("Qwen3_5TextConfig", _DELTA),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            **_DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        {
            **_EXPERTS,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "ernie4_5-moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_end_index": 1},
    ),
    "glm4-moe": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 4,
            "topk_group": 2,
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "num_mtp_layers": 0,
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeTextConfig",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 40},
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 16,
            "conv_L_cache": 4,
            "num_key_value_heads": 1,  # keys and values are narrower than the convolution's inputs
        },
    ),
}


def kernel_size(family: str) -> dict[str, int]:
    """The sizes that let the CPU kernel run one of the ``FURTHER`` families: heads of 32 channels, or of two widths."""
    if "kv_lora_rank" in FURTHER[family][1]:
        return {"qk_nope_head_dim": 56, "v_head_dim": 32}
    if "global_head_dim" in FURTHER[family][1]:
        return {"head_dim": 32, "global_head_dim": 96}
    return {"head_dim": 32} if "head_dim" in FURTHER[family][1] else {"hidden_size": 128}


@contextmanager
def refused(kind: type[DraftwingError], *parts: str) -> Iterator[None]:
    """Expects exactly this class of error, and a message that has all the parts in this order."""
    with pytest.raises(DraftwingError) as caught:
        yield
    assert type(caught.value) is kind, repr(caught.value)
    assert re.search(".*".join(map(re.escape, parts)), str(caught.value), re.DOTALL), str(caught.value)


def check_engine(engine: Any) -> None:
    """Requests, rows, the drafter's rows and pages agree."""
    decoder, prefill = engine.decoder, engine.prefill
    decoder.recover()
    drafter, rows = decoder.drafter, decoder.ctx.rows
    for request, row in zip(decoder.running, rows, strict=True):
        assert row.tokens == [*request.prompt_ids, *request.token_ids]
        assert row.length == len(row.tokens) - 1
    if drafter.resumes:
        assert all(num <= row.length for num, row in zip(drafter.num_read, rows, strict=True))
    if decoder.pages is not None:
        assert len(decoder.pages.rows) == len(decoder.running)
        is_held = prefill is not None and prefill.generation == decoder.generation
        decoder.pages.check([prefill.pages] if is_held else [])


def build(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random transformers model in float64 whose logits are spread out enough to be worth sampling from."""
    kind, extra = {**FAMILIES, **FURTHER}[family]
    config = getattr(transformers, kind)(**{**SMALL, **extra, **changes})
    torch.manual_seed(seed)
    config._experts_implementation = "eager"  # the grouped kernel knows no float64
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith(("bias", "scale")):
                weight.add_(0.1 * torch.randn_like(weight))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.sub_(0.3 * torch.rand_like(buffer))
    return model


@pytest.fixture(params=[True, False], ids=["tiles", "vectors"])
def tiles(request: pytest.FixtureRequest) -> Iterator[bool]:
    """With matrix tiles, if the processor has them, and without; float32 rows are split in both cases."""
    kernel = get_kernel()
    assert kernel is not None
    before = kernel.has_tiles
    if kernel.use_tiles(request.param) != request.param:
        pytest.skip("this processor has no tiles that work")
    kernel.has_tiles = True
    yield request.param
    kernel.use_tiles(before)


@pytest.fixture
def without_tiles() -> Iterator[None]:
    """Float32 rows are multiplied as they are: ``test_products`` tests what matrix tiles make of them."""
    kernel = get_kernel()
    before = kernel is not None and kernel.has_tiles
    if kernel is not None:
        kernel.use_tiles(False)
    yield
    if kernel is not None:
        kernel.use_tiles(before)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``folder_of("qwen3")``: a saved tiny model, made on first use."""
    made: dict[tuple[Any, ...], Path] = {}

    def get(family: str, seed: int = 0, **changes: Any) -> Path:
        key = (family, seed, repr(sorted(changes.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            build(family, seed, **changes).save_pretrained(folder)
            made[key] = folder
        return made[key]

    return get


@pytest.fixture(scope="session")
def chat_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of ``shipped/`` whose toy has a chat template: a chat model that needs no download."""
    shipped = tmp_path_factory.mktemp("shipped")
    shutil.copytree(SHIPPED / "toy", shipped / "toy")
    config = shipped / "toy" / "target" / "tokenizer_config.json"
    template = "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    return shipped


@pytest.fixture(scope="session")
def lab(folder_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """``lab("kernel")``: a target, heads trained for it, and its texts; made on first use, for tests of any file."""
    from test_exact import Lab

    def make(family: str) -> Any:
        like = get("kernel") if family.startswith("kernel-") else None
        return Lab(family, folder_of, tmp_path_factory, like)

    get = cache(make)
    return get


class _Float64(torch.overrides.TorchFunctionMode):
    """Keeps float64 tensors as they are where transformers converts them to float32: norms, rotations, softmax."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.polar:  # whose cosines differ in the last bit
            return torch.complex(args[1].cos(), args[1].sin())
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func in (torch.Tensor.float, torch.Tensor.type) or (torch.float32 in args[1:]):
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def float64_norms(model: Any) -> Any:
    """transformers computes norms and more in float32 even for a float64 model; a reference in float64 must not."""
    forward = model.forward

    @wraps(forward)
    def in_float64(*args: Any, **kwargs: Any) -> Any:
        with _Float64():
            return forward(*args, **kwargs)

    model.forward = in_float64
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq"):
                setattr(module, name, buffer.float())  # angles are computed in float32
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale.fill_(module.scalar_embed_scale)  # Gemma rounds it to float32
    return model


TEXTS = [
    "def add(a, b):\n    return a",
    "class Table:\n    def add(self, row):\n        self.rows.append(row)\n",
    "for row in rows: print(row)",
]


CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def add_tokenizer(folder: Path, vocab_size: int = 300, texts: list[str] = TEXTS, **settings: Any) -> Path:
    """Put a byte-level BPE trained on a few lines into a folder; ``settings`` go into its tokenizer_config.json."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **settings})
    )
    return folder


class Recorder:
    """A ``Record`` that runs the function again. Like a graph, every replay overwrites the same outputs."""

    def __init__(self):
        self.num_recorded = self.num_replays = 0

    def __call__(self, function):
        self.num_recorded += 1
        static = tuple(output.clone() for output in function())

        def replay():
            self.num_replays += 1
            for output, value in zip(static, function(), strict=True):
                output.copy_(value)
            return static

        return replay
