"""Nets that guess several tokens in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from draftwing.drafters.kind import Kind, Method, NewNet
from draftwing.drafters.own import NetParts, net_of_plain, new_plain, plain_kind

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


def _drafter(net: BlockNet, target: Target, name: str = "", identity: str = "") -> Drafter:
    from draftwing.drafters.block import BlockDrafter

    return BlockDrafter(net, target, name, identity)


def _loss(*args: Any, **said: Any) -> Any:
    from draftwing.nets.block_loss import BlockLoss

    return BlockLoss(*args, **said)


def _new(parts: NetParts, new: NewNet) -> DraftNet:
    """As many levels as the run has steps; where it does not say, as many as the kind has."""
    said = {name: value for name, value in new.settings.items() if value is not None}
    levels = said.pop("unroll_steps", None)
    if levels is not None:
        said |= parts()[1].of_levels(levels)
    net = cast("BlockNet", new_plain(parts, replace(new, settings=said)))
    return net.start_from(new.head)


def _kind(name: str, help: str, parts: NetParts, method: Method, settings: tuple[str, ...], **said: Any) -> Kind:
    """An entry; ``said``: what is not as of a plain head that reads the last hidden state."""
    common: dict[str, Any] = {"new": partial(_new, parts), "drafter": _drafter, "loss": _loss}
    return plain_kind(name, parts, {name: method}, help, settings=("unroll_steps", *settings), **common, **said)


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
        "Medusa heads",
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
        "Hydra heads",
        _hydra,
        Method("medusa", 5),
        ("draft_vocab_size", "num_layers"),
    ),
    _kind(
        "dflash",
        "a DFlash net",
        _dflash,
        Method("dflash", 7),
        ("num_layers",),
        taps=_dflash_taps,
    ),
    _kind(
        "dspark",
        "a DSpark net",
        _dspark,
        Method("dflash", 7),
        ("num_layers",),
        taps=_dflash_taps,
    ),
)
