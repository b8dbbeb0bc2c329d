"""Kangaroo's adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftwing.drafters.kind import Method
from draftwing.drafters.own import plain_kind

if TYPE_CHECKING:
    from draftwing.drafters.base import Drafter
    from draftwing.model.target import Target
    from draftwing.nets.base import DraftNet

__all__ = ["KANGAROO"]

EXIT = 2  # layers of the target that draft: the paper's choice for 7B (it takes 3 for 13B)


def _parts() -> tuple[type[DraftNet], type[Any]]:
    from draftwing.nets.kangaroo import KangarooConfig, KangarooNet

    return KangarooNet, KangarooConfig


def _drafter(net: Any, target: Target, name: str = "", identity: str = "") -> Drafter:
    from draftwing.drafters.kangaroo import KangarooDrafter

    return KangarooDrafter(net, target, name, identity)


def _loss(*args: Any, **said: Any) -> Any:
    from draftwing.nets.aligned import AlignedLoss

    return AlignedLoss(*args, **said)


def _taps(num_layers: int) -> tuple[int, ...]:
    return (min(EXIT, num_layers),)


KANGAROO = (
    plain_kind(
        "kangaroo",
        _parts,
        {"kangaroo": Method("eagle3")},
        "a Kangaroo adapter",
        drafter=_drafter,
        taps=_taps,
        loss=_loss,
    ),
)
