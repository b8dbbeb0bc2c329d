"""Drafts without a net: nothing, and the text itself."""

from __future__ import annotations

from functools import partial
from typing import Any

from draftwing.drafters.kind import Kind, NewDrafter, Source
from draftwing.errors import ConfigError, shown

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


PLAIN = (
    Kind("none", "plain decoding", _make_none),
    Kind("lookup", "what followed the same words before", _make_lookup, options={"min_match": _min_match}),
)
