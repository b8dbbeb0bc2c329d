"""What a result depends on: the target, how it runs and samples, the machine; and what is measured, a draft each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import draftwing
from draftwing.accept import get_rule
from draftwing.api import LM
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError, shown
from draftwing.evaluate.machine import describe_machine
from draftwing.gguf.folder import LINK
from draftwing.run.kernel.library import get_kernel
from draftwing.sampling import Sampling
from draftwing.text.records import parse_json

__all__ = ["Method", "describe_settings", "digest", "name_of_sampling", "parse_sampling", "settings_key"]

_FILE = "generation_config.json"
_KNOWN: dict[str, Callable[[str], float]] = {"top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}
# Settings of a generation_config.json that change what is sampled, and are not supported: what asks for nothing.
_UNSUPPORTED = {
    "typical_p": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "suppress_tokens": (None,),
    "guidance_scale": (None, 1, 1.0),
}
_BLOCK = 1 << 14  # bytes read at each of _SAMPLES places of a weight file
_SAMPLES = 256


def digest(value: object) -> str:
    """12 hexadecimal digits that stand for a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


# --- what is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A draft with a budget: one row of a table.

    Attributes:
        draft: what it is called.
        lm: decodes with it.
    """

    draft: str
    lm: LM

    def fresh(self) -> Method:
        """The same with nothing learnt: a budget that is decided step by step begins anew with each set."""
        lm = self.lm
        return replace(
            self, lm=type(lm)(lm.target, lm.tokenizer, lm.new_drafter, lm.rule, lm.budget, lossless=lm.lossless)
        )

    def describe(self) -> dict[str, Any]:
        """As it stands in a record; ``key`` stands for all of it."""
        traits, rule = self.lm.traits, get_rule(self.lm.rule, lossless=False)
        budget = self.lm.budget
        values = {
            "draft": self.draft,
            "identity": digest(traits.identity),
            "runs_as": traits.runs_as,
            "budget": self.lm.describe_budget(),
            "paths": budget.paths if budget is not None else None,
            "rule": self.lm.rule,
            "lossless": rule.lossless,
            "is_feature_chain": traits.reads_features and budget is not None and budget.is_chain,
        }
        return {"key": digest(values), **values}


# --- sampling --------------------------------------------------------------------------------------------------------


def name_of_sampling(sampling: Sampling) -> str:
    """Such as ``T=0`` or ``T=0.6 top_p=0.9``: everything that tells it from another."""
    more = [f"{name}={value:g}" for name in _KNOWN if (value := getattr(sampling, name)) != getattr(Sampling(), name)]
    return " ".join([f"T={sampling.temperature:g}", *more])


def parse_sampling(text: str, folder: Path) -> Sampling:
    """``0``, ``1``, ``0.2,top_p=0.9``, or ``model``: as the model's own ``generation_config.json`` says.

    Args:
        folder: the target's.

    Raises:
        ConfigError: it says nothing that is known, or the model has no settings of its own.
        SamplingError: a value outside its range.
    """
    if text.strip() == "model":
        return _of_model(folder / _FILE)
    first, *more = (part.strip() for part in text.split(","))
    pairs = [part.partition("=")[::2] for part in more]
    try:
        words = {name.strip(): _KNOWN[name.strip()](value) for name, value in pairs}
        return Sampling(temperature=float(first), **words)  # type: ignore[arg-type]
    except (KeyError, ValueError) as error:
        if isinstance(error, draftwing.DraftwingError):
            raise
        raise ConfigError(
            f"--temperature must be a number, a number with settings such as 0.2,top_p=0.9 (of {', '.join(_KNOWN)}), "
            f"or model, found {shown(text)}"
        ) from None


def _of_model(file: Path) -> Sampling:
    try:
        held = parse_json(file.read_bytes()) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error}): download it again") from error
    held = held if isinstance(held, dict) else {}
    odd = next((name for name, neutral in _UNSUPPORTED.items() if held.get(name) not in neutral), None)
    if odd is not None:
        raise UnsupportedError(
            f"{file}: the model's own sampling has {odd} {shown(held[odd])}, which is not supported: leave out "
            f"--temperature model"
        )
    words: dict[str, Any] = {name: held[name] for name in ("temperature", *_KNOWN) if held.get(name) is not None}
    if words.get("top_k") == 0:  # as transformers says none
        del words["top_k"]
    if not words or held.get("do_sample") is False:
        raise ConfigError(
            f"{file}: the model has no sampling settings of its own: leave out --temperature model, or give them, such "
            f"as --temperature 0.6,top_p=0.9"
        )
    return Sampling(**{"temperature": 1.0, **words})


# --- settings --------------------------------------------------------------------------------------------------------


def describe_settings(lm: LM, sampling: Sampling) -> dict[str, Any]:
    """Everything beside set, sampling and draft that a figure depends on. What differs in it is never put in one table.

    Args:
        lm: plain decoding.
        sampling: its ``max_tokens`` and ``seed`` count.
    """
    target, kernel = lm.target, get_kernel()
    is_kernel = target.runtime == "kernel" and kernel is not None
    return {
        "target": target.name,
        "target_identity": _identity(lm.tokenizer.folder),
        "tokenizer": lm.tokenizer.vocab_hash,
        "chat": lm.tokenizer.has_chat_template,
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantize": target.quantized or "none",
        "device": str(target.device),
        "runtime": kernel.name if is_kernel and kernel is not None else f"{target.runtime}, {type(target).__name__}",
        "matrices": target.runs_as,
        "tokens": sampling.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "seed": sampling.seed,
        "batch": 1,
        "draftwing": draftwing.__version__,
        "machine": describe_machine(),
    }


def _identity(folder: Path) -> str:
    """16 digits that stand for a model's weights, of which evenly spaced parts are read: it takes milliseconds."""
    hashed = hashlib.sha256()
    link = folder / LINK
    files = [link] if link.exists() else sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin"))
    try:
        for path in files:
            size = path.stat().st_size
            hashed.update(f"{size} ".encode())
            with path.open("rb") as file:
                for number in range(_SAMPLES):
                    file.seek(max(size - _BLOCK, 0) * number // (_SAMPLES - 1))
                    hashed.update(file.read(_BLOCK))
    except OSError as error:
        raise CheckpointError(f"{folder}: the weights cannot be read ({error}): download them again") from error
    return hashed.hexdigest()[:16]


def settings_key(settings: Mapping[str, Any]) -> str:
    """Stands for settings; what the target is called does not count, its weights do."""
    return digest({name: value for name, value in settings.items() if name != "target"})
