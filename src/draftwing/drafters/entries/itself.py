"""The target drafting for itself, through some of its own slots."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from draftwing.drafters.kind import Kind, NewDrafter, Source
from draftwing.errors import ConfigError, shown

__all__ = ["ITSELF"]

_MOST = 1 << 16  # of any option: a view that large is no view any more


def _make_window(source: Source) -> NewDrafter:
    from draftwing.drafters.itself import SelfDrafter, check_views
    from draftwing.drafters.views import WindowSlots

    budget, sinks = (source.options.get(name, usual) for name, usual in (("budget", 512), ("sinks", 4)))
    if sinks >= budget:
        raise ConfigError(
            f"draft_options: sinks must be fewer than budget, found {sinks} of {budget}: leave room for a window"
        )
    target = source.target
    check_views(target)
    return lambda: SelfDrafter(target, WindowSlots(budget, sinks))


def _make_snapkv(source: Source) -> NewDrafter:
    from draftwing.drafters.itself import SelfDrafter, check_views
    from draftwing.drafters.views import ChosenSlots

    options, target = source.options, source.target
    budget, window, grain = (
        options.get(name, usual) for name, usual in (("budget", 512), ("window", 32), ("grain", 16))
    )
    if window + 2 * grain > budget:
        raise ConfigError(
            f"draft_options: budget must hold the window and twice the grain, found {budget} for {window} and {grain}: "
            f"give a budget of at least {window + 2 * grain}"
        )
    check_views(target)
    return lambda: SelfDrafter(target, ChosenSlots(**options))


def _whole(name: str, least: int, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise ConfigError(
            f"draft_options: {name} must be a whole number from {least} to {_MOST:,}, found {shown(value)}"
        )
    return value


def _odd(value: Any) -> int:
    found = _whole("pool", 1, value)
    if found % 2 == 0:
        raise ConfigError(f"draft_options: pool must be odd, found {found}: a slot stands in the middle of its pool")
    return found


def _yes_or_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"draft_options: per_head must be True or False, found {shown(value)}")
    return value


def _at_least(name: str, least: int) -> Callable[[Any], int]:
    return partial(_whole, name, least)


ITSELF = (
    Kind(
        "self-window",
        "MagicDec: the target looking at its first and last tokens",
        _make_window,
        options={"budget": _at_least("budget", 2), "sinks": _at_least("sinks", 0)},
    ),
    Kind(
        "self-snapkv",
        "MagicDec: the target looking at the tokens that matter most",
        _make_snapkv,
        options={
            "budget": _at_least("budget", 2),
            "window": _at_least("window", 1),
            "pool": _odd,
            "grain": _at_least("grain", 1),
            "refresh": _at_least("refresh", 0),
            "per_head": _yes_or_no,
        },
    ),
)
