"""Drafts by some of the target's own layers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from draftwing.drafters.kind import Kind, NewDrafter, Source
from draftwing.errors import ConfigError, shown

__all__ = ["SUBLAYERS"]


def _make_layers(source: Source) -> NewDrafter:
    from draftwing.drafters.sublayers import SubLayersDrafter
    from draftwing.heads.identity import target_id
    from draftwing.heads.layer_set import LayerSet
    from draftwing.model.subnet import SubNet, lean_target

    found, target = LayerSet.read(source.folder), lean_target(source.target, "draft 'layers'")
    found.check_target(target_id(target, source.tokenizer), str(source.folder))
    return partial(SubLayersDrafter, SubNet.of(target.net, found.parts), target, "layers")


def _make_exit(source: Source) -> NewDrafter:
    from draftwing.drafters.sublayers import SubLayersDrafter
    from draftwing.model.subnet import Parts, SubNet, lean_target

    target = lean_target(source.target, "draft 'early-exit'")
    count = source.options.get("layers", max(1, target.num_layers // 4))
    if count > target.num_layers:
        raise ConfigError(
            f"draft_options: layers must be at most {target.num_layers}, all that {target.name} has, found {count}"
        )
    net = SubNet.of(target.net, Parts.first(target.num_layers, count))
    return partial(SubLayersDrafter, net, target, "early-exit")


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"draft_options: layers must be at least 1, found {shown(value)}: give a whole number")
    return value


def _is_layers(config: Mapping[str, Any], folder: Path) -> bool:
    block = config.get("draftwing")
    return isinstance(block, dict) and block.get("kind") == "layers"


SUBLAYERS = (
    Kind("layers", "layers that draftwing tune layers chose", _make_layers, _is_layers),
    Kind(
        "early-exit",
        "the target's first layers",
        _make_exit,
        options={"layers": _count},
    ),
)
