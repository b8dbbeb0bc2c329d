"""Drafts without a trained head: nothing, the text itself, a smaller causal LM."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from draftwing.drafters.kind import Kind, NewDrafter, Source
from draftwing.errors import ConfigError, UnsupportedError, shown

__all__ = ["PLAIN"]


def _make_none(source: Source) -> NewDrafter:
    from draftwing.drafters.base import NoDrafter

    return NoDrafter


def _make_lookup(source: Source) -> NewDrafter:
    from draftwing.drafters.lookup import LookupDrafter

    return partial(LookupDrafter, source.target.vocab_size, **source.options)


def _min_match(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"draft_options: min_match must be at least 1, found {shown(value)}: give a whole number")
    return value


def _drafted_for_by(value: Any) -> str:
    if value not in ("lookup", "none"):
        raise ConfigError(
            f"draft_options: draft says what drafts for the draft model, found {shown(value)}: choose lookup or none"
        )
    return str(value)


def _make_causal_lm(source: Source) -> NewDrafter:
    from draftwing.drafters.causal_lm import CausalLMDrafter
    from draftwing.drafters.staged import StagedDrafter
    from draftwing.model.config import LEAN_MODEL_TYPES, read_config
    from draftwing.model.lean import LeanTarget
    from draftwing.text.tokenizer import Tokenizer

    folder, target = source.folder, source.target
    if source.tokenizer is not None:
        source.tokenizer.check_same(Tokenizer(folder), source.name)
    found = read_config(folder).get("model_type")
    if found not in LEAN_MODEL_TYPES:
        raise UnsupportedError(
            f"draft model {source.name} is of type {found!r}: a draft model must be one of "
            f"{', '.join(sorted(LEAN_MODEL_TYPES))}; or use draft='lookup'"
        )
    model = LeanTarget.from_folder(
        folder, target.dtype, source.device(), name=folder.name, quantize=target.quantized, fast=True
    )
    kind = StagedDrafter if source.options.get("draft") == "lookup" else CausalLMDrafter
    return partial(kind, model, target.vocab_size)


def _is_causal_lm(config: Mapping[str, Any], folder: Path) -> bool:
    from draftwing.heads.read import is_head

    return not is_head(config, folder)


PLAIN = (
    Kind("none", "plain decoding", _make_none),
    Kind("lookup", "what followed the same words earlier in the text", _make_lookup, options={"min_match": _min_match}),
    Kind(
        "causal-lm",
        "a smaller causal LM with the same tokenizer",
        _make_causal_lm,
        _is_causal_lm,
        options={"draft": _drafted_for_by},
    ),
)
