"""What the command line reports of a generation and of a target: the values behind its lines, tables and JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from draftwing.cpu.library import kernel_problem
from draftwing.formats.gguf_weights import open_weights
from draftwing.lm import LM, Generation
from draftwing.models.adapter import AdapterTarget
from draftwing.models.config import read_config
from draftwing.models.lean import LeanTarget
from draftwing.models.target import Target
from draftwing.sampling import Sampling
from draftwing.text.grammar import GrammarLike


def record(
    done: Generation, plain: LM | None, sampling: Sampling, grammar: GrammarLike | None = None
) -> dict[str, Any]:
    """One generation, which ``grammar`` held, as ``--json`` prints it; with ``plain``, measured against that."""
    stats = done.stats
    values: dict[str, Any] = {
        "text": done.text,
        "token_ids": done.token_ids,
        "num_prompt_tokens": len(done.prompt_ids),
        "finish_reason": done.finish_reason,
        "tokens_per_s": done.stats.tokens_per_s,
        "tau": done.tau,
        "acceptance": sum(stats.taken) / max(sum(stats.reached), 1),
        "alpha": stats.alpha,
        "lossless": done.lossless,
        "num_steps": stats.num_forwards,
        "seconds": stats.seconds,
    }
    if done.logprobs is not None:
        values["logprobs"] = [asdict(each) for each in done.logprobs]
    if plain is not None:
        (base,) = plain.generate([done.prompt_ids], sampling, seed=done.seed, grammar=grammar)
        speedup = done.stats.tokens_per_s / base.stats.tokens_per_s
        values["plain"] = {
            "tokens_per_s": base.stats.tokens_per_s,
            "speedup": speedup,
            "efficiency": speedup / done.tau,
            "identical": base.token_ids == done.token_ids,
        }
    return values


def describe_run(lm: LM, sampling: Sampling) -> dict[str, Any]:
    """Everything that a text depends on, the prompt aside."""
    return {
        "target": lm.target.name,
        "drafter": lm.drafter_name,
        "rule": lm.rule,
        "budget": lm.describe_budget(),
        "dtype": str(lm.target.dtype).removeprefix("torch."),
        "quantize": lm.target.quantized,
        "device": str(lm.target.device),
        "sampling": asdict(sampling),
    }


def describe_lm(lm: LM) -> dict[str, dict[str, Any]]:
    """Target, tokenizer and drafter."""
    drafter = lm.drafter
    return {
        "target": _describe_target(lm.target, lm.tokenizer.folder),
        "tokenizer": {
            "vocabulary": lm.tokenizer.fast.get_vocab_size(),
            "chat_template": lm.tokenizer.has_chat_template,
        },
        "drafter": {
            "name": lm.drafter_name,
            "budget": lm.describe_budget(),
            **({"matrices": _of_drafts(lm), "mb_per_token": drafter.num_bytes / 1e6} if drafter.runs_as else {}),
        },
    }


def _describe_target(target: Target, folder: Path) -> dict[str, Any]:
    return {
        "name": target.name,
        "family": read_config(folder).get("model_type"),
        "engine": "transformers" if isinstance(target, AdapterTarget) else "lean",
        "parameters": _num_parameters(target, folder),
        "layers": target.num_layers,
        "hidden": target.hidden_size,
        "vocabulary": target.vocab_size,
        "context": target.max_length,
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantize": target.quantized or "none",
        "device": str(target.device),
        "runtime": _runtime(target),
        "matrices": target.runs_as,
        "exactness": _promise(target),
        "mb_per_token": target.num_weight_bytes / 1e6,
    }


def _runtime(target: Target) -> str:
    if target.runtime == "kernel":
        return "CPU kernel"
    could = isinstance(target, LeanTarget) and target.device.type == "cpu"
    could = could and target.dtype in (torch.float32, torch.bfloat16)
    problem = kernel_problem() if could else ""
    return f"PyTorch ({problem})" if problem else "PyTorch"


def _promise(target: Target) -> str:
    """How close the logits of drafted tokens come to plain decoding's: see ``Linear.runs_as``."""
    if isinstance(target, LeanTarget) and target.device.type == "cpu" and "plain" not in target.runs_as:
        return "to the bit: a drafted token's logits are those of plain decoding"
    return "up to rounding: several tokens in one forward may round otherwise than each alone"


def _of_drafts(lm: LM) -> str:
    """What computes the drafter's matrices, and whether these are smaller than the target's."""
    is_small = "int8" in lm.drafter.runs_as and lm.target.quantized is None
    return lm.drafter.runs_as + (" (for guesses alone: the text stays the target's)" if is_small else "")


def _num_parameters(target: Target, folder: Path) -> int:
    if isinstance(target, AdapterTarget):
        return sum(weight.numel() for weight in target.model.parameters())
    tied = read_config(folder).get("tie_word_embeddings")
    with open_weights(folder) as files:  # a tied head is the embedding, even where it is saved twice
        names = files.keys()
        return sum(math.prod(files.shape(name)) for name in names if not (tied and name == "lm_head.weight"))
