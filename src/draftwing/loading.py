"""``load``: a target and a drafter by name, as an ``LM``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, TypedDict, Unpack

import torch

from draftwing.accept import get_rule
from draftwing.checks import Argument, check_arguments
from draftwing.decode import least_pages
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError, shown
from draftwing.formats.identity import has_tokenizer
from draftwing.formats.read import is_head
from draftwing.lm import LM
from draftwing.methods.base import BUDGET_ARGUMENT, Budget, Drafter
from draftwing.methods.registry import drafter_maker
from draftwing.models.adapter import AdapterTarget
from draftwing.models.cache import check_kv_dtype
from draftwing.models.catalogue import default_model, entry_of, is_adapter
from draftwing.models.config import ModelConfig, read_config
from draftwing.models.families import LEAN_MODEL_TYPES
from draftwing.models.lean import LeanTarget
from draftwing.models.lora import read_adapter_config
from draftwing.models.paged import PAGE, check_memory
from draftwing.models.resolve import resolve
from draftwing.models.target import Target
from draftwing.sampling import model_settings
from draftwing.storage import exists, read_json_object
from draftwing.text.tokenizer import Tokenizer

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
Dtype = str | torch.dtype


_ARGUMENTS = {
    "target": Argument((str, Path, NoneType), "a folder or a hub id", "give a string or a Path"),
    "draft": Argument((str, Path, NoneType), "a folder or a hub id", "give a string or a Path"),
    "lora": Argument((str, Path, NoneType), "a folder or a hub id", "give a string or a Path"),
    "revision": Argument((str, NoneType), "a branch, tag or commit, or None"),
    "budget": BUDGET_ARGUMENT,
}


class ModelOptions(TypedDict, total=False):
    """How ``load`` loads a target.

    Attributes:
        dtype: of the computation: ``float32``, ``bfloat16``, ``float16`` or ``float64``, as a name or a
            ``torch.dtype``. The default is float32 for every checkpoint, so that results are the same on every machine.
            On a CPU, weights stay in the checkpoint's precision, which only affects speed. ``"auto"``: the
            checkpoint's dtype, except that 16-bit checkpoints compute in float32 on a CPU.
        quantize: ``int8`` quantizes the matrices of target and drafter, ``q4`` to 4 bits in blocks of 32 (the LM head
            to 8): up to three and five times as fast on a CPU. The output is that of the quantized model, with or
            without drafts. None: as ``dtype`` says.
        arithmetic: of matrices in a GGUF file's blocks, on the CPU kernel. ``int8`` multiplies integers: activations
            are rounded to 8 bits in units of 32, as in llama.cpp. ``float32`` computes the products of the file's
            float32 expansion, slower. In both, the output is the same with and without drafts. None is int8.
        kv_dtype: ``int8`` keeps the target's keys and values in 8 bits with a scale per head and token, on the CPU
            kernel: a quarter of the memory, and faster with long contexts. The output is that of this cache, with or
            without drafts. None: float32, or as ``dtype`` says in PyTorch.
        device: ``cpu`` or ``cuda``; None takes a GPU if there is one.
        lora: a LoRA adapter, as a folder that peft wrote or a hub id, which is merged into the weights.
        engine: ``lean``, ``transformers`` (any architecture, slower), or ``auto``: lean if it supports the model.
        revision: of a hub id.
    """

    dtype: Dtype
    quantize: str | None
    arithmetic: str | None
    kv_dtype: str | None
    lora: str | Path | None
    device: str | torch.device | None
    engine: str
    revision: str | None


def load(
    target: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    rule: str = "match",
    budget: Budget | None = None,
    lossless: bool = True,
    draft_options: Mapping[str, Any] | None = None,
    **model: Unpack[ModelOptions],
) -> LM:
    """Load a target and a drafter.

    Args:
        target: a folder, a GGUF file, a hub id, or a name of the catalogue (``draftwing list``), which is downloaded
            once; None is the default chat model. A folder of a LoRA adapter stands for its base model with it.
        draft: an EAGLE head (in any layout) or a smaller causal LM, given like a target;
            ``"lookup"`` or ``"none"``; for long texts ``"self-window"`` or ``"self-snapkv"``; several at once as
            ``"eagle3+lookup"``. None takes the head that comes with Draftwing for this target, otherwise ``"lookup"``,
            or ``"none"`` for a target that drafts cannot speed up: one with recurrent layers that runs in transformers.
        rule: see ``Decoder``.
        lossless: see ``Decoder``.
        budget: how much to draft in every step; None decides step by step.
        draft_options: for the drafter, such as ``{"min_match": 3}``, the shortest repetition that lookup drafts from;
            ``{"draft": "lookup"}``: lookup drafts for the draft model; ``{"budget": 512}``: KV slots that
            self-speculation attends to; ``{"online": True}``: a head learns while it serves, in a tenth of the time or
            the given share.
        model: ``dtype``, ``quantize``, ``arithmetic``, ``kv_dtype``, ``lora``, ``device``, ``engine`` and ``revision``:
            see ``ModelOptions``.

    Raises:
        CheckpointError, ConfigError, TokenizerError: the message names the cause and the fix.
    """
    names = {"target": target, "draft": draft, "revision": model.get("revision"), "lora": model.get("lora")}
    check_arguments(_ARGUMENTS, {**names, "budget": budget})
    get_rule(rule, lossless=lossless)
    for name in ("target", "draft", "lora"):
        if names[name] is not None and not str(names[name]):
            raise ConfigError(f"{name} must be a folder or a hub id, found '': leave it out for the default")
    unknown = sorted(model.keys() - ModelOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"load() got an unexpected keyword argument {unknown[0]!r}")
    device = model.get("device")
    folder, lora = find_model(target, model.get("revision"), model.get("lora"))
    entry = entry_of(target if lora is None or model.get("lora") else lora)
    loaded = load_target(
        folder,
        dtype=model.get("dtype", "float32"),
        quantize=model.get("quantize"),
        arithmetic=model.get("arithmetic"),
        kv_dtype=model.get("kv_dtype"),
        lora=lora,
        device=device,
        engine=model.get("engine", "auto"),
        name=str(target or default_model()) + (f" + {model['lora']}" if model.get("lora") else ""),
    )
    tokenizer = Tokenizer(lora if lora is not None and has_tokenizer(lora) else folder)
    if draft is None:
        best = entry.best_head if entry is not None else None
        draft = best or ("none" if loaded.runs_nodes_alone or not loaded.supports_trees else "lookup")
    new_drafter = load_drafter(draft, loaded, tokenizer, device=device, options=draft_options)
    return LM(loaded, tokenizer, new_drafter, rule, budget, lossless=lossless)


def load_target(
    folder: Path,
    *,
    dtype: Dtype = "float32",
    quantize: str | None = None,
    arithmetic: str | None = None,
    kv_dtype: str | None = None,
    lora: Path | None = None,
    device: str | torch.device | None = None,
    engine: str = "auto",
    name: str | None = None,
    prepack: bool = True,
    layers: bool = True,
) -> Target:
    """Load a folder as a ``Target``. See ``load``; ``prepack=False`` keeps the weights as tensors.

    ``layers=False`` loads only embedding, final norm and LM head, of native families (see ``Target.has_layers``).
    """
    if not isinstance(engine, str) or engine not in ("auto", "lean", "transformers"):
        raise ConfigError(f"unknown engine {shown(engine)}: choose auto, lean or transformers")
    where, config = _device(device), read_config(folder)
    check_model(config, folder, name or str(folder))
    lean, problem = config.get("model_type") in LEAN_MODEL_TYPES, None
    if lean and engine == "auto":
        try:
            ModelConfig.from_hf(config, str(folder / "config.json"))
        except UnsupportedError as error:  # a setting that only transformers honours
            lean, problem = False, error
    reason = "" if problem is None else f" ({problem})"
    options = {"quantize": quantize, "arithmetic": arithmetic, "kv_dtype": kv_dtype}
    options["lora"] = None if lora is None else str(lora)
    is_lean = engine == "lean" or (engine == "auto" and lean)
    numbers = _dtype(dtype, config)
    if dtype == "auto" and is_lean and where.type == "cpu" and numbers.itemsize == 2:
        numbers = torch.float32  # the lean decoder computes in float32 with 16-bit weights there
    model: Target
    if is_lean:
        model = LeanTarget.from_folder(
            folder, numbers, where,
            prepack=prepack, name=name, quantize=quantize, arithmetic=arithmetic, kv_dtype=kv_dtype, layers=layers,
            lora=lora,
        )  # fmt: skip
    elif not layers:
        raise UnsupportedError(
            f"only native families can be loaded without their layers, and {folder} would run on transformers{reason}: "
            f"load all of it"
        )
    elif given := next(((option, value) for option, value in options.items() if value is not None), None):
        option, value = given
        raise UnsupportedError(
            f"{option}={shown(value)} needs the lean decoder, and {folder} would run on transformers{reason}: "
            f"{'choose engine=' + repr('lean') + ', or ' if lean else ''}leave {option} out"
        )
    else:
        try:
            model = AdapterTarget.from_folder(folder, numbers, where, name=name)
        except CheckpointError as error:
            if problem is None:
                raise
            raise problem from error  # the setting is why transformers was asked at all
    model.folder = folder
    _check_end_tokens(folder / "config.json", config.get("eos_token_id"), model.vocab_size)
    file = folder / "generation_config.json"
    eos = read_json_object(file).get("eos_token_id") if file.exists() else None  # Llama 3 has three there
    model_settings(folder)  # refuses NaN and other damage
    model.eos_ids = tuple(dict.fromkeys([*model.eos_ids, *_check_end_tokens(file, eos, model.vocab_size)]))
    return model


def find_model(
    target: str | Path | None, revision: str | None = None, lora: str | Path | None = None
) -> tuple[Path, Path | None]:
    """Return the folders of a target and of its LoRA adapter, if any: see ``load``."""
    folder = resolve(target, revision)
    if not is_adapter(folder):
        return folder, None if lora is None else resolve(lora)
    if lora is not None:
        raise ConfigError(f"{folder} is a LoRA adapter itself, so it takes no other: merge one of them first")
    base = read_adapter_config(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(f"{folder}: the adapter does not name its base model: give that, and this one as lora")
    beside = folder / base  # a path may be relative to the adapter
    return resolve(beside if not exists(base) and beside.is_dir() else base), folder


def check_model(config: Mapping[str, Any], folder: Path, name: str) -> None:
    """Raise CheckpointError if a folder with this ``config.json`` holds a draft head instead of a language model."""
    block = config.get("draftwing")
    if isinstance(block, dict) and block.get("kind") == "causal-lm":
        return
    if is_head(config, folder):
        raise CheckpointError(
            f"{name} is a draft head, not a language model: give the model that it was trained for as the target and "
            f"this one as the draft (`draftwing generate --target MODEL --draft {name}`)"
        )


def check_kv_memory(
    kv_memory: int,
    target: str | Path | None,
    budget: Budget | None,
    **model: Unpack[ModelOptions],
) -> None:
    """Check the memory of a server before its model is loaded, by the config alone.

    Args:
        kv_memory: bytes for the KV cache; the draft's is not counted, and is checked later.
        target, budget, model: as for ``load``.

    Raises:
        ConfigError: too little for any request, or more than the machine has.
        CheckpointError: see ``load``.
    """
    folder, _ = find_model(target, model.get("revision"), model.get("lora"))
    device = _device(model.get("device"))
    values = read_config(folder)
    check_model(values, folder, str(target or default_model()))
    if values.get("model_type") not in LEAN_MODEL_TYPES or model.get("engine") == "transformers":
        return  # refused for another reason
    check_kv_dtype(model.get("kv_dtype"))
    try:
        config = replace(ModelConfig.from_hf(values), kv_dtype=model.get("kv_dtype"))
    except UnsupportedError:
        return  # refused for another reason
    dtype = _dtype(model.get("dtype", "float32"), values)
    itemsize = 4 if device.type == "cpu" and dtype.itemsize == 2 else dtype.itemsize
    page_bytes = 2 * config.num_slot_layers * config.num_slot_heads * config.slot_width * itemsize * PAGE
    check_memory(kv_memory, page_bytes, least_pages(budget or Budget()), device)


def load_drafter(
    draft: str | Path,
    target: Target,
    tokenizer: Tokenizer | None,
    *,
    device: str | torch.device | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[[], Drafter]:
    """Return a function that makes drafters for ``target``.

    Args:
        draft: ``"none"``, ``"lookup"`` or another method's name, a head or a causal LM as a folder, name or hub id, or
            several of them joined by ``+``. ``"eagle3"``, ``"eagle1"`` and ``"causal-lm"`` are those that come with
            Draftwing for this target. Drafters are quantized like their target, and also for a float32 target if the
            CPU kernel then drafts faster; the output is the target's in any case.
        tokenizer: the target's; without it only vocabulary sizes are compared.
        device: of a draft model; a head is on the target's device.
        options: see ``load``'s ``draft_options``; each of several drafts takes its own.

    Raises:
        ConfigError: an option that this drafter does not have.
        TokenizerError: the draft model's tokenizer cannot be read, or its vocabulary has another size and the target's
            tokenizer is not known.
        CheckpointError: a head that was trained for another target, or is damaged.
        UnsupportedError: the draft model is not one of the lean decoder's families.
    """
    return drafter_maker(draft, target, tokenizer, device=partial(_device, device), options=options)


# --- options ---------------------------------------------------------------------------------------------------------


def _dtype(dtype: object, config: Mapping[str, Any]) -> torch.dtype:
    if isinstance(dtype, str) and dtype == "auto":
        # Newer files call it dtype. Other types, such as float8, belong to quantized checkpoints.
        stored = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        return DTYPES.get(stored, torch.float32)
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {shown(dtype)}: choose one of {', '.join(DTYPES)}, or auto")
    return DTYPES[dtype]


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"unknown device {shown(device)}: use cpu or cuda") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {str(device)!r} is not supported: use cpu or cuda")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ConfigError(
            f"device {str(device)!r}: PyTorch sees {count or 'no'} CUDA device{'s' * (count != 1)} here: "
            f"use {'a lower number' if count else 'device=' + repr('cpu')}"
        )
    return chosen


def training_dtype(device: str | torch.device | None = None) -> torch.dtype:
    """Return bfloat16; on a CPU without instructions for it float32, since bfloat16 takes many times longer there."""
    is_fast = _device(device).type == "cuda" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.bfloat16 if is_fast else torch.float32


def _check_end_tokens(file: Path, eos: Any, vocab_size: int) -> list[int]:
    """Return the ids of an ``eos_token_id``; a negative one means none, as in some configs on the Hub."""
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int and token < vocab_size for token in ids):
        raise CheckpointError(
            f"{file}: `eos_token_id` must be a token id below {vocab_size}, a list of them or null, found "
            f"{shown(eos)}: correct it, or download the file again"
        )
    return [token for token in ids if token >= 0]
