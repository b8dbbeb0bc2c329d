"""Write the table of docs/models.md: how Draftwing runs every causal LM of the installed transformers.

    python tools/model_table.py [--only bamba --only gpt2] [--json]

A tiny random model of every type is saved as a folder and loaded. Its greedy text must be that of transformers, and
drafts of which half are right must not change it, nor a sampled text. Some minutes on one core.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from draftwing.decode import Decoder
from draftwing.errors import DraftwingError
from draftwing.loading import load_target
from draftwing.methods.base import Drafter
from draftwing.models.adapter import AdapterTarget
from draftwing.models.families import WRAPPERS
from draftwing.models.target import Target
from draftwing.sampling import Sampling

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from known_texts import Knows

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- begin: tools/model_table.py -->", "<!-- end -->"
MODEL_TYPES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *WRAPPERS})
PROMPTS = ([*range(5, 25)], [9, 9, 30, 31, 32])
NUM_TOKENS = 10
VOCAB = 64

# Settings of a tiny model, by their names in all configs that have them.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "max_position_embeddings": 128, "n_positions": 128, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3, "is_decoder": True,
    "is_encoder_decoder": False, "use_mamba_kernels": False, "unpadded_vocab_size": VOCAB, "moe_router_hidden_size": 16,
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "laurel_rank": 8, "head_dim": 8, "depth": 1,
    "n_group": 2, "topk_group": 1,
    "mamba_n_groups": 1, "n_groups": 1, "rotary_dim": 4, "out_hidden_size": 32, "router_hidden_size": 16,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "lru_width", "attention_hidden_size"), 32),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "word_embed_proj_dim", "emb_dim"), 32),
    **dict.fromkeys(("text_hidden_size", "adapter_in_dim", "adapter_out_dim", "adapter_input_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("swa_num_attention_heads", "index_n_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "num_experts_per_tok", "moe_topk", "moe_k", "layer_group_size"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("dff", "dim_ff", "d_inner", "expert_ffn_hidden_size", "dense_intermediate_size"), 48),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "mamba_head_dim", "swa_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_headdim", "d_head"), 8),
    **dict.fromkeys(("dim_head", "index_head_dim", "d_rel", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "hc_lowrank"), 16),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("shared_experts_intermediate_size", "intermediate_size_mlp", "feed_forward_size"), 16),
}  # fmt: skip
# The number of tokens that a layer sees at most, which is made shorter than the prompt.
WINDOWS = {
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size", "attention_window_size"), 6),
    **dict.fromkeys(("sliding_window_size", "rel_extent", "index_topk", "local_attention"), 6),
}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_CONVOLUTIONS = ["conv", "full_attention", "conv", "full_attention"]
_NO_LAYERS_OF_TOKENS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_INDEXER = {"n_heads": 2, "kv_heads": 1, "head_dim": 8, "budget": 6, "compress_ratio": 2}
_DOTS_3: dict[str, Any] = {
    **{f"swa_{name}": SMALL[name] for name in ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "v_head_dim")},
    **{f"swa_{name}": SMALL[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim")},
    "swa_head_dim": 16,
    "swa_num_key_value_heads": 4,
}
_QWEN_4 = {f"indexer_{name}": value for name, value in _INDEXER.items()}
# Further settings of a model type.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {"layer_types": _SLIDING, "rope_parameters": dict.fromkeys(_SLIDING[:2], _ROPE)},
    "cpmant": {"prompt_length": 4},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8}},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": [*_SLIDING, *_SLIDING[:2]]},
    "gemma4_assistant": {"text_config": _NO_LAYERS_OF_TOKENS},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 4},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": _CONVOLUTIONS},
    "lfm2_moe": {"layer_types": _CONVOLUTIONS},
    "mamba2": {"head_dim": 8, "num_heads": 8},
    "qwen4_exp": {"text_config": _QWEN_4},
    "qwen4_exp_text": _QWEN_4,
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16]},
    "roc_bert": {"shape_vocab_size": VOCAB, "pronunciation_vocab_size": VOCAB},
    "xlstm": {"hidden_size": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
    "dots3_note": {"text_config": _DOTS_3, "vision_config": {"num_hidden_layers": 42}},
    "dots3_note_text": _DOTS_3,
}  # fmt: skip
# Classes that decode no text by themselves, or need a package that is not installed.
UNUSABLE = {
    "gemma3n": "its images need the package timm; the text model is gemma3n_text",
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "a draft head of Gemma 4"),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "it decodes audio"),
}


@dataclass(frozen=True)
class Row:
    """The result for one model type: how it runs, the reason of a limit, and what went wrong."""

    model_type: str
    runs: str  # a key of HEADINGS
    reason: str = ""
    failure: str = ""


HEADINGS = {
    "native": "Native",
    "trees": "Through transformers, a draft tree is one forward",
    "paths": "Through transformers, a tree runs path by path: chains pay",
    "nodes": "Through transformers, a tree runs node by node: drafts save no time",
    "none": "Through transformers, without drafts",
    "rejected": "Rejected",
}


def small_config(model_type: str, **settings: Any) -> Any:
    """Return a config of a tiny model."""
    return _shrunk(transformers.CONFIG_MAPPING[model_type], {**SMALL, **settings}, SPECIAL.get(model_type, {}))


def _shrunk(kind: type, small: Mapping[str, Any], special: Mapping[str, Any]) -> Any:
    names = inspect.signature(kind.__init__).parameters
    settings: dict[str, Any] = {key: value for key, value in small.items() if key in names}
    if "kv_lora_rank" in names:  # every head has its own keys and values
        settings["num_key_value_heads"] = settings.get("num_attention_heads", 4)
    for name in names:
        parts = getattr(kind, "sub_configs", {})
        if name in parts:
            part = parts[name]
            if part is transformers.AutoConfig:
                part = type(getattr(kind(), name))
            if issubclass(part, transformers.PreTrainedConfig):
                settings[name] = _shrunk(part, small, special.get(name, {}))
    return kind(**{**special, **settings, **{k: v for k, v in special.items() if not isinstance(v, dict)}})


def make(config: Any) -> Any:
    """Return a tiny random model, in which norms and biases are not just ones and zeros."""
    torch.manual_seed(0)
    kind = transformers.AutoModelForMultimodalLM if config.model_type in WRAPPERS else transformers.AutoModelForCausalLM
    model = kind.from_config(config).float().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                weight.add_(0.1 * torch.randn_like(weight))
    return model


def examine(model_type: str) -> Row:
    """Make a tiny model, load it and compare its texts."""
    if model_type in UNUSABLE:
        return Row(model_type, "rejected", UNUSABLE[model_type])
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        try:
            model = make(small_config(model_type, **WINDOWS))
        except Exception as error:
            return Row(model_type, "rejected", failure=f"no tiny model can be made: {error}")
        model.save_pretrained(folder)
        try:
            target = load_target(Path(folder), name=model_type)
        except DraftwingError as error:
            return Row(model_type, "rejected", str(error))
        except Exception as error:
            return Row(model_type, "rejected", failure=f"{type(error).__name__}: {error}")
        runs, reason = _how(target)
        try:
            # transformers' forward of the whole Llama 4 fails without images.
            failure = _compare(target, model.language_model if model_type == "llama4" else model)
            if not failure and isinstance(target, AdapterTarget) and _has_window(model.config):
                # Few tokens do not show a wide window.
                wide = _how(AdapterTarget(make(small_config(model_type, **dict.fromkeys(WINDOWS, 100)))))[0]
                if [*HEADINGS].index(wide) < [*HEADINGS].index(runs):
                    failure = f"it runs as {wide} if windows are wide, which is wrong beyond them"
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        return Row(model_type, runs, reason, failure)


def _has_window(config: Any) -> bool:
    return any(getattr(part, name, None) for part in (config, config.get_text_config()) for name in WINDOWS)


def _how(target: Target) -> tuple[str, str]:
    if not isinstance(target, AdapterTarget):
        return "native", ""
    if not target.supports_trees:
        return "none", target.reason or ""
    return "nodes" if target.runs_nodes_alone else "paths" if target.runs_paths else "trees", ""


def _compare(target: Target, model: Any) -> str:
    """Return what is wrong with the texts; empty if nothing is."""
    greedy = _decode(target)
    for prompt, text in zip(PROMPTS, greedy, strict=True):
        theirs = {name: read(model, prompt) for name, read in (("generate", _generate), ("forward", _forward))}
        if text not in theirs.values():
            return f"{text} without drafts, transformers has {theirs}"
    sampled = _decode(target, temperature=1.0)
    for texts, temperature in ((greedy, 0.0), (sampled, 1.0)) if target.supports_trees else ():
        known = [[*prompt, *text] for prompt, text in zip(PROMPTS, texts, strict=True)]
        drafter = Knows(known, wrong_at=3, depth=4, vocab_size=VOCAB)
        drafted = _decode(target, drafter, temperature=temperature)
        if drafted != texts:
            return f"{drafted} with drafts at temperature {temperature:g}, {texts} without"
    return ""


def _decode(target: Target, drafter: Drafter | None = None, temperature: float = 0.0) -> list[list[int]]:
    decoder, texts = Decoder(target, drafter), dict[int, list[int]]()
    sampling = Sampling(temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True, seed=0)
    for prompt in PROMPTS:
        texts[decoder.admit(prompt, sampling)] = []
    while decoder.num_running:
        for row in decoder.step().rows:
            texts[row.request_id] += row.token_ids
    return [*texts.values()]


@torch.inference_mode()
def _generate(model: Any, prompt: Sequence[int]) -> list[int] | str:
    """The text of ``generate``, or why it fails."""
    ids = torch.tensor([prompt])
    model.generation_config = transformers.GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False)
    try:
        text: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids))[0, len(prompt) :].tolist()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return text


@torch.inference_mode()
def _forward(model: Any, prompt: Sequence[int]) -> list[int]:
    """The best token after each forward of the whole text."""
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


# --- the page --------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """Return the generated part of the page."""
    lines = [
        f"All causal LMs of transformers {transformers.__version__}, and multimodal models whose text model is native, "
        f"as tiny random models:",
        "",
    ]
    lines += ["| runs | model types |", "|---|---|"]
    for runs, heading in HEADINGS.items():
        names = [row.model_type for row in rows if row.runs == runs]
        if names and runs != "rejected":
            lines.append(f"| {heading} ({len(names)}) | {', '.join(f'`{name}`' for name in names)} |")
    lines += ["", "| rejected | reason |", "|---|---|"]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.runs == "rejected":
            reasons.setdefault(_short(row.reason), []).append(f"`{row.model_type}`")
    return "\n".join([*lines, *(f"| {', '.join(names)} | {reason} |" for reason, names in reasons.items())])


def _short(reason: str) -> str:
    """Return a reason without names of models, quoted errors and advice."""
    reason = re.sub(r" \(.*\)", "", re.sub(r"^\S+: ", "", " ".join(reason.split())))
    return re.split(r": (?:try|choose)|, so |; |\. ", reason)[0].rstrip(".")


def documented() -> tuple[str, dict[str, str]]:
    """Return the version of transformers that the page lists, and how each model type runs."""
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    runs = {}
    for line in text.splitlines():
        cells = line.split("|")
        if "`" in line:
            kind = next(
                (kind for kind, heading in HEADINGS.items() if cells[1].startswith(f" {heading} (")), "rejected"
            )
            runs |= dict.fromkeys(re.findall(r"`(\S+?)`", cells[1] if kind == "rejected" else cells[2]), kind)
    return text.partition("transformers ")[2].partition(",")[0], runs


def main(
    only: Annotated[list[str] | None, typer.Option(help="A model type. Without it: all, and write the page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each model type.")] = False,
) -> None:
    """Examine model types and write the table."""
    rows = []
    for model_type in only or MODEL_TYPES:
        row = examine(model_type)
        rows.append(row)
        line = f"{model_type}: {row.runs} {'FAILED: ' if row.failure else ''}{row.failure or row.reason}"
        print(json.dumps(asdict(row)) if as_json else line, flush=True)
    failed = [row.model_type for row in rows if row.failure]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    if not only:
        write(rows)


def write(rows: Sequence[Row]) -> None:
    """Write the table into the page."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{begin}\n{table(rows)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
