"""Lookahead decoding: the target drafts for itself while it verifies."""

from __future__ import annotations

from functools import partial
from typing import Any

from draftwing.drafters.kind import Kind, NewDrafter, Source
from draftwing.errors import ConfigError, shown

__all__ = ["LOOKAHEAD"]

# W, N and G: the paper's for 7B on a GPU; a CPU has less arithmetic to spare.
_ON_GPU = {"window": 7, "ngram": 5, "guesses": 7}
_ON_CPU = {"window": 4, "ngram": 3, "guesses": 4}
_MOST = 64


def _make_lookahead(source: Source) -> NewDrafter:
    from draftwing.drafters.lookahead import LookaheadDrafter

    sizes = _ON_GPU if source.target.device.type == "cuda" else _ON_CPU
    return partial(LookaheadDrafter, source.target.vocab_size, **{**sizes, **source.options})


def _size(name: str, least: int, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise ConfigError(
            f"draft_options: {name} must be from {least} to {_MOST}, found {shown(value)}: give a whole number"
        )
    return value


LOOKAHEAD = (
    Kind(
        "lookahead",
        "n-grams that the target says ahead",
        _make_lookahead,
        options={name: partial(_size, name, least) for name, least in (("window", 1), ("ngram", 2), ("guesses", 1))},
    ),
)
