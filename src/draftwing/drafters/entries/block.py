"""Nets that guess several tokens in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from draftwing.drafters.kind import Kind, Method, NetKind, NewNet
from draftwing.drafters.own import (
    convert_plain,
    examine_plain,
    from_head,
    is_plain,
    net_of_plain,
    new_plain,
    read_plain,
    write_plain,
)

if TYPE_CHECKING:
    from torch import Tensor

    from draftwing.drafters.base import Drafter
    from draftwing.heads.doctor.case import Finding
    from draftwing.model.embedding import Embedding
    from draftwing.model.linear import Linear
    from draftwing.model.target import Target
    from draftwing.nets.base import DraftNet
    from draftwing.nets.block import BlockNet
    from draftwing.nets.eagle_config import TargetId

__all__ = ["BLOCK"]


Classes = Callable[[], tuple[type[Any], type[Any]]]  # a net's and its config's, imported when they are needed


def _drafter(net: BlockNet, target: Target, name: str = "", identity: str = "") -> Drafter:
    from draftwing.drafters.block import BlockDrafter

    return BlockDrafter(net, target, name, identity)


def _loss(*args: Any, **said: Any) -> Any:
    from draftwing.nets.block_loss import BlockLoss

    return BlockLoss(*args, **said)


def _new(classes: Classes, new: NewNet) -> DraftNet:
    """As many levels as the run has steps; where it does not say, as many as the kind has."""
    said = {name: value for name, value in new.settings.items() if value is not None}
    levels = said.pop("unroll_steps", None)
    if levels is not None:
        said |= classes()[1].of_levels(levels)
    net = cast("BlockNet", new_plain(*classes(), replace(new, settings=said)))
    return net.start_from(new.head)


def _last(num_layers: int) -> tuple[int, ...]:
    return (num_layers,)


def _kind(name: str, help: str, classes: Classes, method: Method, settings: tuple[str, ...], **said: Any) -> Kind:
    """An entry; ``said``: what is not as of a plain head that reads the last hidden state."""
    net: dict[str, Any] = {
        "read": lambda *args, **more: read_plain(*classes(), *args, **more),
        "taps": _last,
        "layouts": ("draftwing",),
        "convert": lambda *args, **more: convert_plain(name, classes()[1], *args, **more),
        "diagnose": lambda folder, target: examine_plain(name, classes()[1], folder, target),
        **said,
    }
    recognises = net.pop("recognises", partial(is_plain, name))
    common: dict[str, Any] = {"write": write_plain, "new": partial(_new, classes), "drafter": _drafter, "loss": _loss}
    made = NetKind(**common, **net, methods={name: method}, settings=("unroll_steps", *settings))
    return Kind(name, help, partial(from_head, made), recognises, net=made)


# --- Medusa, which others write too ----------------------------------------------------------------------------------


def _medusa() -> tuple[type[Any], type[Any]]:
    from draftwing.nets.medusa import MedusaConfig, MedusaNet

    return MedusaNet, MedusaConfig


def _is_medusa(config: Mapping[str, Any], folder: Path) -> bool:
    from draftwing.heads.medusa import is_medusa

    return is_medusa(config)


def _read_medusa(
    folder: Path,
    embedding: Tensor | Embedding,
    target_head: Linear | None = None,
    target: TargetId | None = None,
    dtype: Any = None,
) -> DraftNet:
    from draftwing.heads.medusa import load_medusa

    head = load_medusa(folder, target)
    return net_of_plain(_medusa()[0], head, embedding, target_head, str(folder), dtype)


def _convert_medusa(*args: Any, **said: Any) -> None:
    from draftwing.heads.medusa import convert_medusa

    convert_medusa(*args, **said)


def _diagnose_medusa(folder: Path, target: Path | None) -> list[Finding]:
    from draftwing.heads.doctor.medusa import diagnose_medusa

    return diagnose_medusa(folder, target)


# --- the others ------------------------------------------------------------------------------------------------------


def _hydra() -> tuple[type[Any], type[Any]]:
    from draftwing.nets.hydra import HydraConfig, HydraNet

    return HydraNet, HydraConfig


def _dflash() -> tuple[type[Any], type[Any]]:
    from draftwing.nets.dflash import DFlashConfig, DFlashNet

    return DFlashNet, DFlashConfig


def _dspark() -> tuple[type[Any], type[Any]]:
    from draftwing.nets.dspark import DSparkConfig, DSparkNet

    return DSparkNet, DSparkConfig


def _dflash_taps(num_layers: int) -> tuple[int, ...]:
    from draftwing.nets.dflash import dflash_taps

    return dflash_taps(num_layers)


BLOCK = (
    _kind(
        "medusa",
        "Medusa heads: each guesses one of the next tokens",
        _medusa,
        Method("medusa", 5),
        ("draft_vocab_size", "num_layers"),
        recognises=_is_medusa,
        read=_read_medusa,
        layouts=("draftwing", "vllm", "medusa"),
        convert=_convert_medusa,
        diagnose=_diagnose_medusa,
    ),
    _kind(
        "hydra",
        "Hydra heads: Medusa's, each reading the tokens drafted so far",
        _hydra,
        Method("medusa", 5),
        ("draft_vocab_size", "num_layers"),
    ),
    _kind(
        "dflash",
        "a DFlash net: a block of tokens in one pass",
        _dflash,
        Method("dflash", 7),
        ("num_layers",),
        taps=_dflash_taps,
    ),
    _kind(
        "dspark",
        "a DSpark net: DFlash, each place on the token before it",
        _dspark,
        Method("dflash", 7),
        ("num_layers",),
        taps=_dflash_taps,
    ),
)
