"""Turn a GGUF file into a model folder: config, tokenizer and a link to the file, written once into the private cache.

The rest of Draftwing then has one kind of model: a folder. If a folder holds ``model.gguf``, its other files were made
from that file; ``config.json`` is what the model had before it was converted to GGUF. Draft heads of llama.cpp become
heads' folders in the same way.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from draftwing.errors import CheckpointError, ConfigError, UnsupportedError, shown
from draftwing.formats.gguf import ADVICE, GgufFile, Metadata, is_gguf, open_file, shortest_decimal
from draftwing.formats.gguf_tokenizer import end_ids, special_id, tokenizer_config, tokenizer_json
from draftwing.models.config import ModelConfig
from draftwing.models.families import FAMILIES, ExpertTraits, Family, Key
from draftwing.storage import check_regular, expand_user, new_folder, private_folder

LINK = "model.gguf"
OWN_KEY = "draftwing.config"  # metadata with the ``draftwing`` part of a head's config, as JSON
_FORM = 3  # version of the written files: a higher one replaces all folders
_HASHED_BYTES = 1 << 16  # the start of a file identifies it, together with its path, size and time
_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_DIGEST = "files.sha256"  # SHA-256 over ``_FILES``: a damaged folder is written again
_CONVERT_AGAIN = "Convert the model again."

_temporary: dict[str, Path] = {}  # folders by name, used if the cache cannot be written


def open_gguf(path: Path) -> Path:
    """Return the model folder of a GGUF file; write it first if it is missing."""
    path = expand_user(path).absolute()  # links are kept: parts of a split model lie next to the link
    name = _folder_name(path)
    try:
        with private_folder() as cache:
            base = cache.path / "gguf"
            base.mkdir(mode=0o700, exist_ok=True)
            if _is_complete(base / name, path):
                return base / name
            with cache.locked("gguf.lock"):
                _prune(base)
            return _make_folder(base, name, path)
    except OSError:  # the cache cannot be written
        if name not in _temporary:
            base = Path(tempfile.mkdtemp(prefix="draftwing-gguf-"))
            atexit.register(shutil.rmtree, base, ignore_errors=True)
            _temporary[name] = _make_folder(base, name, path)
        return _temporary[name]


def link_of(folder: Path) -> Path | None:
    """Return the GGUF file that a folder was made from; None for any other folder."""
    try:
        return Path(os.readlink(Path(folder) / LINK))
    except OSError:
        return None


def folder_files(file: GgufFile) -> dict[str, str]:
    """Return the contents of a model folder's files by name."""
    config = _config(file)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] is not None}
    return {
        "config.json": _json(config),
        "generation_config.json": _json(ids),
        "tokenizer.json": tokenizer_json(file.metadata, config["vocab_size"]),
        "tokenizer_config.json": _json(tokenizer_config(file.metadata, config["max_position_embeddings"])),
    }


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _folder_name(path: Path) -> str:
    if not is_gguf(path):
        found = "another one. Download it again" if path.exists() else "none. Check the path"
        raise CheckpointError(f"{path}: expected a GGUF file, found {found}.")
    state = path.stat()
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(_HASHED_BYTES))
    digest.update(f"{_FORM} {path} {state.st_size} {state.st_mtime_ns}".encode(errors="surrogateescape"))
    stem = re.sub(r"[^\w.-]", "_", path.stem, flags=re.ASCII)[:80].lstrip(".") or "model"
    return f"{stem}-{digest.hexdigest()[:16]}"


def _make_folder(base: Path, name: str, path: Path) -> Path:
    final = base / name
    if _is_complete(final, path):
        return final
    with closing(open_file(path)) as file:
        files = folder_files(file)
    with new_folder(final) as partial:
        for file_name, text in files.items():
            (partial / file_name).write_text(text, encoding="utf-8")
        (partial / _DIGEST).write_text(_digest(partial), encoding="utf-8")
        try:
            os.symlink(path, partial / LINK)
        except OSError:  # Windows allows it to few users
            os.link(path, partial / LINK)
    return final


def _prune(base: Path) -> None:
    """Remove folders whose file is gone. Links are not followed: they may point to anything."""
    if base.is_symlink():
        return
    with os.scandir(base) as entries:
        for entry in entries:
            file = link_of(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else None
            if file is not None and not os.path.lexists(file):
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_complete(folder: Path, path: Path) -> bool:
    try:
        return (folder / LINK).samefile(path) and (folder / _DIGEST).read_bytes() == _digest(folder).encode()
    except OSError:
        return False


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in _FILES:
        check_regular(folder / name)
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


# --- architectures ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """A GGUF architecture: its family, and what llama.cpp implies or its converter changes."""

    model_type: str
    # (key, value, model type): the family instead if the file has this key, and at least this value
    variants: tuple[tuple[str, int, str], ...] = ()
    has_pairs: bool = False  # rows of queries and keys are in an order in which RoPE's pairs are adjacent
    renamed: Mapping[str, str] = field(default_factory=dict)  # tensors of a layer: this file's name -> the usual one
    # Every n-th layer has full attention, unless the file has a pattern, and the others the window: its default in
    # tokens (0: none), or None if the file must state it.
    pattern: int = 0
    window: int | None = 0
    local_theta: float | None = None  # default RoPE base of layers with a window; None for that of the others
    # number of layers of the one size whose scores are scaled by (hidden / heads) ** -0.5, not by the heads' width
    widest: int | None = None
    normalises: bool = False  # default of ``norm_topk_prob``
    rope: Mapping[str, Any] = field(default_factory=dict)  # settings of a stretched RoPE that files do not state
    mscale: float = 0.0  # YaRN's ``mscale_all_dim`` by the file's logarithmic multiplier; 0 if files have none
    neutral: Mapping[str, tuple[Any, ...] | None] = field(default_factory=dict)  # in addition to ``_NEUTRAL``
    is_head: bool = False  # a draft head, whose layers are of this family; see ``_head``


# Settings of vision models that change nothing for text: it has the same positions in all sections, and no images for
# the first layers to read.
_SECTIONS: Final = {"rope.dimension_sections": None}
_DEEPSTACK: Final = {**_SECTIONS, "n_deepstack_layers": None}
_MLP_NORM: Final = {"post_attention_norm": "ffn_norm"}

ARCHITECTURES: Final[dict[str, Architecture]] = {
    "llama": Architecture(
        "llama", (("expert_count", 1, "mixtral"), ("attention.sliding_window", 1, "mistral")), has_pairs=True
    ),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", normalises=True),
    "qwen2vl": Architecture("qwen2", neutral=_SECTIONS),
    "qwen3vl": Architecture("qwen3", neutral=_DEEPSTACK),
    "qwen3vlmoe": Architecture("qwen3_moe", normalises=True, neutral=_DEEPSTACK),
    "phi3": Architecture("phi3"),
    "gemma": Architecture("gemma"),
    "gemma2": Architecture("gemma2", pattern=2, window=4096, widest=46),
    "gemma3": Architecture("gemma3_text", pattern=6, local_theta=10000.0, widest=62),
    "smollm3": Architecture("smollm3", has_pairs=True),
    "granite": Architecture("granite", has_pairs=True, neutral={"rope.scaling.finetuned": (True,)}),
    "granitemoe": Architecture("granitemoe", has_pairs=True, neutral={"rope.scaling.finetuned": (True,)}),
    "olmo2": Architecture("olmo2", (("attention.sliding_window", 1, "olmo3"),), pattern=4),
    "chatglm": Architecture("glm"),
    "glm4": Architecture("glm4"),
    "exaone4": Architecture("exaone4", pattern=4),
    "command-r": Architecture("cohere"),
    "cohere2": Architecture("cohere2", pattern=4, window=None),
    "seed_oss": Architecture("seed_oss", renamed=_MLP_NORM),
    "ernie4_5": Architecture("ernie4_5"),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "starcoder2": Architecture("starcoder2"),
    "stablelm": Architecture("stablelm"),
    "nemotron": Architecture("nemotron"),
    "arcee": Architecture("arcee", has_pairs=True),
    "olmoe": Architecture("olmoe"),
    "qwen2moe": Architecture("qwen2_moe"),
    "lfm2": Architecture("lfm2"),
    "lfm2moe": Architecture("lfm2_moe", normalises=True, neutral={"expert_gating_func": (2,)}),  # the sigmoid
    "gpt-oss": Architecture(
        "gpt_oss", pattern=2, window=None, renamed=_MLP_NORM, rope={"truncate": False},
        neutral={"expert_gating_func": (0, 3)},  # the softmax of the chosen scores
    ),
    "mistral3": Architecture(
        "mistral", (("rope.scaling.original_context_length", 1, "ministral3"),), has_pairs=True, mscale=1.0
    ),
    "qwen35": Architecture("qwen3_5_text", renamed=_MLP_NORM, neutral=_SECTIONS),
    "qwen35moe": Architecture("qwen3_5_moe_text", renamed=_MLP_NORM, neutral=_SECTIONS),
    "qwen3next": Architecture("qwen3_next", renamed=_MLP_NORM, normalises=True),
    "deepseek2": Architecture(
        "deepseek_v2", (("expert_gating_func", 2, "deepseek_v3"),), neutral={"expert_gating_func": (0, 1, 2)},
        mscale=10.0,
    ),
    "glm4moe": Architecture("glm4_moe", renamed=_MLP_NORM, neutral={**_SECTIONS, "expert_gating_func": (0, 2)}),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",  # the width of the shared expert is wrong in files, and not used
        neutral={"interleave_moe_layer_step": (1,), "expert_shared_feed_forward_length": None},
    ),
    "llama4": Architecture("llama4_text", neutral={"expert_gating_func": (0, 2)}),
    "gemma4": Architecture("gemma4_text", window=None),
    "eagle3": Architecture("llama", has_pairs=True, is_head=True),
    "dflash": Architecture("qwen3", is_head=True, neutral={"hidden_act": (b"silu",)}),
}  # fmt: skip

# Values of keys that change nothing if they are not read, after the architecture's prefix; None: any value.
_EMPTY: Final = (0, b"", b"none")  # for keys that are not listed; an array must hold zeros
_NEUTRAL: Final[dict[str, tuple[Any, ...] | None]] = {
    **dict.fromkeys(
        (
            "vocab_size", "tensor_data_layout", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",
            "rope.scaling.finetuned", "rope.scaling.original_context_length",
            *(f"rope.scaling.yarn_{name}" for name in ("attn_factor", "beta_fast", "beta_slow", "ext_factor")),
            "rope.scaling.yarn_log_multiplier", "pooling_type",
            "use_parallel_residual",  # the converter writes true for StableLM whatever the model is
        )
    ),
    "attention.causal": (True,),
    "rope.scaling.attn_factor": (0, 1),
    "expert_gating_func": (0, 1),  # 1: softmax
    "expert_weights_scale": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
}  # fmt: skip

# The bounds of the frequencies that Llama 3 and Llama 4 stretch in part, which files do not state.
_BANDS: Final = ((1.0, 4.0), (1.0, 1.0))

# The factors of a family, and their keys in a file.
_FACTORS: Final = {
    "embedding_scale": "embedding_scale",
    "residual_scale": "residual_scale",
    "logit_scale": "logit_scale",
    "logit_divisor": "logit_scale",
    "score_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
}


def get_architecture(file: GgufFile) -> str:
    """Return the name of a file's architecture, one of ``ARCHITECTURES``. Raises UnsupportedError for any other."""
    where, kind = file.metadata.where, file.metadata.text("general.type", "model")
    if kind != "model":
        raise UnsupportedError(f"{where}: this file holds a model's \"{kind:.40}\" only. Give the model's own file.")
    architecture = file.metadata.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise file.metadata.unsupported(
            f"GGUF files of the architecture {architecture!r:.42} are not supported; expected one of "
            f"{', '.join(ARCHITECTURES)}."
        )
    # Files from before version 2 use the same numbers for other block formats.
    version = file.metadata.integer("general.quantization_version", 2)
    if version != 2:
        raise UnsupportedError(
            f"{where}: blocks of version {version} are not supported, only of version 2. Quantise the model again "
            "with a current llama.cpp."
        )
    return architecture


def get_model_type(file: GgufFile) -> str:
    """Return the family of a file's model, as in ``config.json``."""
    architecture = get_architecture(file)
    traits = ARCHITECTURES[architecture]
    for key, minimum, model_type in traits.variants:
        if file.metadata.integer(f"{architecture}.{key}", 0) >= minimum:
            return model_type
    return traits.model_type


# --- config.json -----------------------------------------------------------------------------------------------------


def _config(file: GgufFile) -> dict[str, Any]:
    architecture, data = get_architecture(file), file.metadata
    traits, model_type, prefix = ARCHITECTURES[architecture], get_model_type(file), f"{architecture}."
    family = FAMILIES[model_type]
    hidden = data.integer(f"{prefix}embedding_length", minimum=1)
    heads = data.integer(f"{prefix}attention.head_count", minimum=1)
    modules = data.integer(f"{prefix}nextn_predict_layers", 0)
    layers = data.integer(f"{prefix}block_count", minimum=1, maximum=10000) - modules
    if layers < 1:
        raise ConfigError(f"{data.where}: `{prefix}nextn_predict_layers` {modules} leaves no layers. {_CONVERT_AGAIN}")
    sizes = _latent(data, prefix, heads) if family.is_latent else _heads(data, prefix, heads, hidden)
    head_dim = sizes["head_dim"]
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None and traits.is_head:  # it reads the target's
        vocab_size = len(data.texts("tokenizer.ggml.tokens"))
    elif embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        found = "none" if embedding is None else f"shape {list(embedding.shape)}"
        raise CheckpointError(
            f"{file.path}: expected the embedding token_embd.weight with rows of {hidden} numbers, found {found}. "
            "Download the file again."
        )
    else:
        vocab_size = embedding.shape[0]
    if family.qk_norm == "none" and "blk.0.attn_q_norm.weight" in file.tensors:
        raise data.unsupported(
            f"norms of queries and keys (blk.0.attn_q_norm.weight) are not supported for the architecture "
            f"{architecture}."
        )
    positions = data.integer(f"{prefix}context_length", minimum=1)
    norm = "layer_norm" if family.norm == "layer" else "layer_norm_rms"
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **sizes,
        family.activation.name: family.activation.default,
        family.eps.name: data.number(f"{prefix}attention.{norm}_epsilon"),
        "max_position_embeddings": positions,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "use_cache": True,
    }
    if modules:
        config["num_nextn_predict_layers"] = modules
    if family.is_layered:
        config |= _layered(file, prefix, layers)
    else:
        dense_size = None if family.experts is None else family.experts.dense_size
        width = "intermediate_size" if dense_size is None else dense_size.name
        config[width] = data.integer(f"{prefix}feed_forward_length", minimum=1)
    if family.delta is not None:
        config |= _delta(data, prefix, layers, modules)
    if family.conv_size is not None:
        config |= _convolutions(data, prefix, family.conv_size, layers)
    elif not family.is_latent and not family.is_layered:
        config["num_key_value_heads"] = data.integer(f"{prefix}attention.head_count_kv", heads, minimum=1)
    for key, parts in (
        (family.qkv_bias, ("attn_q", "attn_qkv")),
        (family.o_bias, ("attn_output",)),
        (family.mlp_bias, ("ffn_down",)),
    ):
        if isinstance(key, Key):  # several may have one key: a missing bias is reported when it is read
            has_bias = any(f"blk.0.{part}.bias" in file.tensors for part in parts)
            config[key.name] = config.get(key.name, False) or has_bias
    if family.scale is not None and family.scale_power == 1:
        config[family.scale.name] = data.number(f"{prefix}attention.scale", 0.0) or head_dim**-0.5
    elif family.scale is not None:
        config[family.scale.name] = hidden // heads if layers == traits.widest else head_dim
    for factor, name in _FACTORS.items():
        key = getattr(family, factor)
        if isinstance(key, Key) and prefix + name in data:
            config[key.name] = data.number(prefix + name)
    if not traits.is_head:
        config |= _windows(data, prefix, traits, family, layers, positions)
    if family.experts is not None and (family.experts.beside is None or data.integer(f"{prefix}expert_count", 0)):
        config |= _experts(data, prefix, traits, family.experts)
    if isinstance(family.uses_qk_norm, Key):  # Llama 4 Maverick has none: llama.cpp, too, knows it by its experts
        is_maverick = data.integer(f"{prefix}expert_count") == 128
        has_norms = not is_maverick if family.qk_norm == "unweighted" else "blk.0.attn_q_norm.weight" in file.tensors
        config[family.uses_qk_norm.name] = has_norms
    config |= _rope(file, architecture, family, head_dim, positions)
    ends = end_ids(data)
    config |= {
        "bos_token_id": special_id(data, "bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": special_id(data, "padding"),
    }
    # The format of most weights; float32 for blocks, whose numbers need all of it.
    dtypes: Counter[str] = Counter()
    for info in file.tensors.values():
        dtypes[{"F16": "float16", "BF16": "bfloat16"}.get(info.kind, "float32")] += math.prod(info.shape)
    config["dtype"] = dtypes.most_common(1)[0][0]
    head = _head(file, architecture, config, layers) if traits.is_head else {}
    _refuse_unread(data, prefix, traits)
    ModelConfig.from_hf(config, data.where)  # refuses invalid values, naming the file
    return {**config, **head}


def _head(file: GgufFile, architecture: str, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return what a draft head's config has besides its layers', as EAGLE's and z-lab's code spell it.

    llama.cpp counts the inputs of the target's layers, as we do, and z-lab's code their outputs. A file holds the
    target's tokenizer, whose mask token is DFlash's.
    """
    data, key = file.metadata, f"{architecture}.target_layers"
    taps = data.numbers(key, "iu", getattr(data.pairs.get(key), "size", 0))
    if not taps:
        raise ConfigError(
            f"{data.where}: lacks `{key}`, the target's layers that the head reads. Convert the head again with a "
            "current llama.cpp."
        )
    vocab_size = file.tensors["d2t"].shape[0] if "d2t" in file.tensors else config["vocab_size"]
    own = {"draftwing": _own_part(data)} if OWN_KEY in data else {}
    if architecture == "eagle3":
        return {
            **own,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": vocab_size,
            "eagle_aux_hidden_state_layer_ids": taps,
            "norm_before_residual": data.flag("eagle3.norm_before_residual", False),
            "norm_before_fc": data.flag("eagle3.norm_before_fc", False),
            "target_hidden_size": data.integer("eagle3.target_hidden_size", minimum=1),
        }
    mask = special_id(data, "mask", config["vocab_size"])
    window, causal = data.integer("dflash.attention.sliding_window", 0), data.flag("dflash.attention.causal", False)
    slides = data.numbers("dflash.attention.sliding_window_pattern", "biu", layers) if window else None
    markov = file.tensors.get("markov_w1.weight")
    for is_other, feature in (
        (window and slides is None, "Windows without `dflash.attention.sliding_window_pattern`"),
        ("selector_hidden.weight" in file.tensors, "DFlash 2 heads (selector_hidden.weight)"),
        (mask is None, "DFlash heads without `tokenizer.ggml.mask_token_id`"),
    ):
        if is_other:
            raise data.unsupported(f"{feature} are not read from GGUF.")
    nested = {"mask_token_id": mask, "target_layer_ids": [tap - 1 for tap in taps], "causal": causal}
    if markov is not None:
        nested |= {
            "markov_rank": markov.shape[-1],
            "enable_confidence_head": data.flag("dflash.has_confidence_head", True),
            "sample_from_anchor": data.flag("dflash.sample_from_anchor", True),
        }
    return {
        **own,
        "architectures": ["DFlashDraftModel" if markov is None else "DSparkDraftModel"],
        "block_size": data.integer("dflash.block_size", minimum=2),
        "draft_vocab_size": vocab_size,
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides or [False] * layers],
        "sliding_window": window or None,
        "use_sliding_window": bool(window),
        "dflash_config": nested,
    }


def _own_part(data: Metadata) -> dict[str, Any]:
    """Return the ``draftwing`` part of the config of a head that Draftwing wrote."""
    try:
        own = json.loads(data.text(OWN_KEY))
    except (ValueError, RecursionError):
        own = None
    if not isinstance(own, dict):
        raise data.wrong(OWN_KEY, "a JSON object")
    return own


def _heads(data: Metadata, prefix: str, heads: int, hidden: int) -> dict[str, Any]:
    """Return the width of a head, or of those in layers without a window."""
    if hidden % heads and f"{prefix}attention.key_length" not in data:
        raise ConfigError(
            f"{data.where}: `{prefix}embedding_length` {hidden} is no multiple of `{prefix}attention.head_count` "
            f"{heads}, and there is no `{prefix}attention.key_length`. {_CONVERT_AGAIN}"
        )
    head_dim = data.integer(f"{prefix}attention.key_length", hidden // heads, minimum=1)
    value_dim = data.integer(f"{prefix}attention.value_length", head_dim, minimum=1)
    if value_dim != head_dim:
        raise data.unsupported(f"keys of {head_dim} and values of {value_dim} numbers, not of one width.")
    return {"head_dim": head_dim}


def _latent(data: Metadata, prefix: str, heads: int) -> dict[str, Any]:
    """Return the widths of latent attention; ``head_dim`` is that of the rotation, as in transformers.

    llama.cpp multiplies queries and the latent keys, so its own heads are wider than the model's, and alike.
    """
    attention, rotated = f"{prefix}attention.", data.integer(f"{prefix}rope.dimension_count", minimum=2)
    data.integer(f"{attention}head_count_kv", 1)
    widths = []
    for name in ("key_length", "value_length"):  # files from before 2025-04 have the model's own
        own = data.integer(attention + name, 0)
        widths.append(data.integer(f"{attention}{name}_mla", own, minimum=1))
    if widths[0] <= rotated:
        raise ConfigError(
            f"{data.where}: keys of {widths[0]} numbers, of which RoPE turns {rotated} (`{prefix}rope.dimension_count`)"
            f". {_CONVERT_AGAIN}"
        )
    return {
        "head_dim": rotated,
        "num_key_value_heads": heads,
        "q_lora_rank": data.integer(f"{attention}q_lora_rank", 0) or None,
        "kv_lora_rank": data.integer(f"{attention}kv_lora_rank", minimum=1),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": widths[0] - rotated,
        "v_head_dim": widths[1],
    }


def _delta(data: Metadata, prefix: str, layers: int, modules: int) -> dict[str, Any]:
    """Return the settings of the gated delta rule, in the terms of state space models."""
    recurs = data.numbers(f"{prefix}attention.recurrent_layers", "biu", layers + modules)
    every = data.integer(f"{prefix}full_attention_interval", 4, minimum=1)
    if recurs is None:
        recurs = [(layer + 1) % every != 0 for layer in range(layers)]
    key_dim, width = data.integer(f"{prefix}ssm.state_size", minimum=1), data.integer(f"{prefix}ssm.inner_size")
    heads = data.integer(f"{prefix}ssm.time_step_rank", minimum=1)
    if width != heads * key_dim:
        raise data.unsupported(
            f"`{prefix}ssm.inner_size` {width} is not `{prefix}ssm.time_step_rank` {heads} times "
            f"`{prefix}ssm.state_size` {key_dim}."
        )
    return {
        "layer_types": ["linear_attention" if recur else "full_attention" for recur in recurs[:layers]],
        "linear_conv_kernel_dim": data.integer(f"{prefix}ssm.conv_kernel", minimum=2),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": key_dim,
        "linear_num_key_heads": data.integer(f"{prefix}ssm.group_count", minimum=1),
        "linear_num_value_heads": heads,
    }


def _layered(file: GgufFile, prefix: str, layers: int) -> dict[str, Any]:
    """Return the sizes of Gemma 4's layers, which files give by layer, or for those without a window and the others."""
    data, attention = file.metadata, f"{prefix}attention."

    def by_layer(key: str) -> list[int]:
        is_array = isinstance(data.pairs.get(key), np.ndarray)
        return (data.numbers(key, "iu", layers) if is_array else None) or [data.integer(key, minimum=1)] * layers

    slides = data.numbers(f"{attention}sliding_window_pattern", "biu", layers)
    if slides is None:
        raise ConfigError(f"{data.where}: required metadata `{attention}sliding_window_pattern` is missing. {ADVICE}")
    kv_heads, widths = by_layer(f"{attention}head_count_kv"), by_layer(f"{prefix}feed_forward_length")
    full, local = ({kv_heads[i] for i in range(layers) if bool(slides[i]) == is_local} for is_local in (False, True))
    shared = data.integer(f"{attention}shared_kv_layers", 0, maximum=layers)
    first = layers - shared
    if len(full) != 1 or len(local) > 1 or len({*widths[:first]}) > 1 or len({*widths[first:]}) > 1:
        raise data.unsupported(f"KV heads {shown(kv_heads)} and widths {shown(widths)} of layers.")
    head_dim = data.integer(f"{attention}key_length_swa", minimum=1)
    for key in (f"{attention}value_length_swa", f"{prefix}rope.dimension_count_swa"):
        data.integer(key, head_dim, minimum=head_dim, maximum=head_dim)
    inputs = data.integer(f"{prefix}embedding_length_per_layer_input", 0)
    table = file.tensors.get("per_layer_token_embd.weight")
    owners = [i for i in range(first) if not slides[i]]
    return {
        "head_dim": head_dim,
        "global_head_dim": data.integer(f"{attention}key_length"),
        "num_key_value_heads": max(local or full),
        "num_global_key_value_heads": max(full),
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in file.tensors for i in owners),
        "num_kv_shared_layers": shared,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "hidden_size_per_layer_input": inputs,
        **({} if table is None else {"vocab_size_per_layer_input": table.shape[0]}),
    }


def _convolutions(data: Metadata, prefix: str, size: Key, layers: int) -> dict[str, Any]:
    """Return the settings of LFM2: layers without KV heads have a short convolution."""
    key = f"{prefix}attention.head_count_kv"
    counts = data.numbers(key, "iu", layers)
    kv_heads = sorted(set(counts or ()) - {0})
    if counts is None or len(kv_heads) != 1 or kv_heads[0] < 0:
        raise CheckpointError(
            f"{data.where}: `{key}` must hold 0 or one number of KV heads for every layer, found {shown(counts)}. "
            f"{_CONVERT_AGAIN}"
        )
    return {
        "num_key_value_heads": kv_heads[0],
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        size.name: data.integer(f"{prefix}shortconv.l_cache", minimum=2),
        "block_auto_adjust_ff_dim": False,  # the file has the adjusted width
    }


def _windows(
    data: Metadata, prefix: str, traits: Architecture, family: Family, layers: int, positions: int
) -> dict[str, Any]:
    """Return ``sliding_window``, and ``layer_types`` if layers differ."""
    if family.windows not in ("always", "pattern"):
        key, is_chunked = f"{prefix}attention.sliding_window", family.windows == "chunked"
        window = data.integer(key, 0)
        if 0 < window < positions or (is_chunked and key in data):  # llama.cpp's chunks are Llama 4's
            raise data.unsupported(f"`{key}` {window} is not supported for this architecture.")
        return {} if family.windows == "never" or is_chunked else {"use_sliding_window": False}
    window = data.integer(f"{prefix}attention.sliding_window", traits.window)
    config: dict[str, Any] = {"sliding_window": window or None}
    if family.windows == "pattern":
        key = f"{prefix}attention.sliding_window_pattern"
        if isinstance(data.pairs.get(key), np.ndarray):
            slides = data.numbers(key, "biu", layers) or []
        else:
            every = data.integer(key, traits.pattern)
            slides = [not every or (layer + 1) % every != 0 for layer in range(layers)]
        config["layer_types"] = [
            "sliding_attention" if window and layer_slides else "full_attention" for layer_slides in slides
        ]
    return config


def _experts(data: Metadata, prefix: str, traits: Architecture, experts: ExpertTraits) -> dict[str, Any]:
    count = data.integer(f"{prefix}expert_count", minimum=1, maximum=1024)
    used = data.integer(f"{prefix}expert_used_count", minimum=1, maximum=count)
    # transformers has one of the two usual names, depending on the family.
    counts = ("num_experts", "num_local_experts") if experts.count is None else (experts.count,)
    config: dict[str, Any] = {**dict.fromkeys(counts, count), experts.per_token: used}
    key = f"{prefix}expert_feed_forward_length"
    if experts.size.name != "intermediate_size" or key in data:
        config[experts.size.name] = data.integer(key, minimum=1)
    if experts.beside is not None:
        config[experts.beside] = True
    if experts.num_dense is not None:
        config[experts.num_dense.name] = data.integer(f"{prefix}leading_dense_block_count", 0)
    if experts.every is not None:
        config[experts.every.name] = data.integer(f"{prefix}interleave_moe_layer_step", minimum=1)
    if experts.shared_size is not None and experts.shared_size.name != experts.size.name:
        config[experts.shared_size.name] = data.integer(f"{prefix}expert_shared_feed_forward_length", minimum=1)
    if experts.num_shared is not None:
        config[experts.num_shared.name] = data.integer(f"{prefix}expert_shared_count", 0)
    if experts.scale is not None:
        config[experts.scale.name] = data.number(f"{prefix}expert_weights_scale", 0.0) or 1.0
    if isinstance(experts.normalise, Key):
        config[experts.normalise.name] = data.flag(f"{prefix}expert_weights_norm", traits.normalises)
    if experts.groups is not None:
        groups = data.integer(f"{prefix}expert_group_count", 1) or 1
        config |= {"n_group": groups, "topk_group": data.integer(f"{prefix}expert_group_used_count", 1) or 1}
        config["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    if experts.has_dense_layers:  # llama.cpp supports no other values
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return config


def _refuse_unread(data: Metadata, prefix: str, traits: Architecture) -> None:
    """Raise UnsupportedError for a key of the architecture that nothing has read, unless it changes nothing."""
    neutral = {**_NEUTRAL, **traits.neutral}
    for key in sorted(data.pairs.keys() - data.read):
        name, value = key.removeprefix(prefix), data.pairs[key]
        allowed = neutral.get(name, _EMPTY)
        if name == key or allowed is None:
            continue
        if value.any() if isinstance(value, np.ndarray) else value not in allowed:
            raise data.unsupported(f"`{key:.80}` {shown(value)} is not supported.")


def _rope(file: GgufFile, architecture: str, family: Family, head_dim: int, positions: int) -> dict[str, Any]:
    """Return ``rope_theta`` and ``rope_scaling``, or both by layer type, and ``partial_rotary_factor`` if there is."""
    data, prefix, traits = file.metadata, f"{architecture}.rope.", ARCHITECTURES[architecture]
    theta = data.number(f"{prefix}freq_base", 10000.0)
    config: dict[str, Any] = {"rope_theta": theta}
    rotated = data.integer(f"{prefix}dimension_count", head_dim, minimum=2)
    if family.partial is not None or rotated != head_dim:
        if family.partial is None or rotated > head_dim:
            raise data.unsupported(
                f"RoPE turns {rotated} of a head's {head_dim} numbers (`{prefix}dimension_count`), which is not "
                f"supported for the architecture {architecture}."
            )
        # Half a number more if needed, so that rounding down gives ``rotated`` despite the division's rounding.
        exact = head_dim * (rotated / head_dim) == rotated
        config["partial_rotary_factor"] = (rotated if exact else rotated + 0.5) / head_dim
    if "rope_factors_long.weight" in file.tensors or "rope_factors_short.weight" in file.tensors:
        raise data.unsupported("RoPE of the type longrope is not supported.")
    scaling = _rope_scaling(data, prefix, positions, traits.mscale)
    if "llama_4_scaling_beta" in family.rope:
        scaling["llama_4_scaling_beta"] = data.number(f"{architecture}.attention.temperature_scale", 0.0) or None
    if "rope_freqs.weight" in file.tensors:
        if scaling:
            raise data.unsupported(f"rope_freqs.weight together with `{prefix}scaling` is not supported.")
        scaling = _proportional(file, head_dim) if family.is_layered else _llama3_scaling(file, prefix, theta, head_dim)
    local_theta = data.number(f"{prefix}freq_base_swa", traits.local_theta or theta)
    if family.local_theta is not None:
        full = {"rope_type": "default", "rope_theta": theta, **scaling}
        local = {"rope_type": "default", "rope_theta": local_theta}
        return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}
    if local_theta != theta:
        raise data.unsupported(
            f"`{prefix}freq_base_swa` {local_theta} differs from `{prefix}freq_base` {theta}, which is not supported "
            f"for the architecture {architecture}."
        )
    if scaling:
        config["rope_scaling"] = {**scaling, **traits.rope}
    return config


def _rope_scaling(data: Metadata, prefix: str, positions: int, mscale: float) -> dict[str, Any]:
    kind = data.text(f"{prefix}scaling.type", "none")
    factor = data.number(f"{prefix}scaling.factor", data.number(f"{prefix}scale_linear", 1.0))
    if kind == "none" and f"{prefix}scale_linear" in data and factor != 1:
        kind = "linear"  # old files have the factor only
    if kind == "none" or (kind == "linear" and factor == 1):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise data.unsupported(f'RoPE of the type "{kind:.40}", expected none, linear or yarn.')
    original = data.integer(f"{prefix}scaling.original_context_length", positions, minimum=1)
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        if f"{prefix}scaling.yarn_{name}" in data:
            scaling[name] = data.number(f"{prefix}scaling.yarn_{name}")
    log = data.number(f"{prefix}scaling.yarn_log_multiplier", 0.0) if mscale else 0.0
    if log:
        # llama.cpp takes DeepSeek's two factors to be the same, and Ministral's first one to be 1.
        scaling["mscale_all_dim"] = shortest_decimal(mscale * log)
        scaling["mscale"] = 1.0 if mscale == 1 else scaling["mscale_all_dim"]
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", *([] if mscale else ["yarn_log_multiplier"])):
        key = f"{prefix}scaling.{name}"
        neutral = [0.0 if name == "yarn_log_multiplier" else 1.0]
        if name.endswith("attn_factor") and factor > 1:  # OLMo 3's files state the checkpoint's, which is the default
            neutral.append(0.1 * math.log(factor) + 1)
        if key in data and not any(math.isclose(data.number(key), value, rel_tol=1e-6) for value in neutral):
            raise data.unsupported(f"`{key}` {data.number(key)} is not supported.")
    return scaling


def _divisors(file: GgufFile, head_dim: int) -> Any:
    """Return what the frequencies are divided by."""
    info = file.tensors["rope_freqs.weight"]
    if info.kind != "F32" or info.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{file.path}: rope_freqs.weight must hold {head_dim // 2} numbers in F32, found {list(info.shape)} in "
            f"{info.kind}. {_CONVERT_AGAIN}"
        )
    raw = file.maps[info.part][info.start : info.start + info.num_bytes]
    divisors = np.frombuffer(raw, "<f4").astype(np.float64)
    if not (np.isfinite(divisors) & (divisors >= 1)).all():
        raise ConfigError(f"{file.path}: rope_freqs.weight must be at least 1. Download the file again.")
    return divisors


def _proportional(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Recover Gemma 4's RoPE: some of the pairs do not turn, which files state as divisors of 1e30."""
    divisors = _divisors(file, head_dim)
    turning = int((divisors == 1).sum())
    if (divisors[:turning] != 1).any() or (divisors[turning:] < 1e29).any():
        raise file.metadata.unsupported("rope_freqs.weight must be 1 or 1e30, as Gemma 4's, and no other is supported.")
    return {"rope_type": "proportional", "partial_rotary_factor": 2 * turning / head_dim}


def _llama3_scaling(file: GgufFile, prefix: str, theta: float, head_dim: int) -> dict[str, Any]:
    """Recover Llama 3.1's RoPE: the file holds a divisor for each frequency, the config the numbers behind them."""
    divisors = _divisors(file, head_dim)
    factor = shortest_decimal(float(divisors.max()))
    if factor == 1:
        return {}
    original = file.metadata.integer(f"{prefix}scaling.original_context_length", 8192, minimum=1)
    turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    for low, high in _BANDS:
        smooth = np.clip((turns - low) / (high - low or 1e-9), 0, 1)
        if np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
            break
    else:
        raise file.metadata.unsupported(
            f"rope_freqs.weight is not Llama 3's (factor {factor}, {original} positions, bands {_BANDS}), and no other "
            f"is supported."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
