"""Nets that guess several tokens in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwing.drafters.kind import Kind, Method, NetKind, NewNet
from draftwing.drafters.own import convert_plain, examine_plain, from_head, is_plain, new_plain, read_plain, write_plain
from draftwing.errors import CheckpointError

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
    from draftwing.train.loss.block import BlockLoss

    return BlockLoss(*args, **said)


# --- Medusa ----------------------------------------------------------------------------------------------------------


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
    import torch

    from draftwing.heads.medusa import load_medusa
    from draftwing.nets.medusa import MedusaNet

    head = load_medusa(folder, target)
    wanted = (head.config.vocab_size, head.config.hidden_size)
    if tuple(embedding.shape) != wanted:
        raise CheckpointError(
            f"{folder}: the head is made for a target with an embedding of {wanted}, this one's is "
            f"{tuple(embedding.shape)}: load it with the target that it was trained for"
        )
    ids = None if head.target_ids is None else head.target_ids.to(embedding.device)
    net = MedusaNet(head.config, embedding, target_head, ids, dtype or torch.float32)
    net.load_tensors(head.tensors, str(folder))
    return net


def _new_medusa(new: NewNet) -> DraftNet:
    from draftwing.nets.medusa import MedusaConfig, MedusaNet

    said = dict(new.settings)
    said.pop("draft_vocab_size", None)  # as many as there are target ids
    said["num_heads"] = said.pop("unroll_steps", None) or said.get("num_heads", 5)
    config = MedusaConfig.for_target(new.like, new.taps, target=new.target, **said)
    return MedusaNet(config, new.embedding, new.head, new.target_ids).start_from(new.head)


def _convert_medusa(*args: Any, **said: Any) -> None:
    from draftwing.heads.medusa import convert_medusa

    convert_medusa(*args, **said)


def _diagnose_medusa(folder: Path, target: Path | None) -> list[Finding]:
    from draftwing.heads.doctor.medusa import diagnose_medusa

    return diagnose_medusa(folder, target)


_MEDUSA = NetKind(
    read=_read_medusa,
    write=write_plain,
    new=_new_medusa,
    taps=lambda num_layers: (num_layers,),
    methods={"medusa": Method("medusa", 5)},
    layouts=("draftwing", "vllm", "medusa"),
    convert=_convert_medusa,
    diagnose=_diagnose_medusa,
    drafter=_drafter,
    settings=("draft_vocab_size", "unroll_steps"),
    loss=_loss,
)

# --- those that are written as plain heads ---------------------------------------------------------------------------

Classes = Callable[[], tuple[type[Any], type[Any]]]  # a net's and its config's, imported when they are needed


def _dflash() -> tuple[type[Any], type[Any]]:
    from draftwing.nets.dflash import DFlashConfig, DFlashNet

    return DFlashNet, DFlashConfig


def _dflash_taps(num_layers: int) -> tuple[int, ...]:
    from draftwing.nets.dflash import dflash_taps

    return dflash_taps(num_layers)


def _of_block(settings: Mapping[str, Any], levels: int | None) -> dict[str, Any]:
    """The pending token stands in a block too."""
    return {**settings, **({} if levels is None else {"block_size": 1 + levels})}


def _new(classes: Classes, sized: Callable[..., dict[str, Any]], new: NewNet) -> DraftNet:
    said = {name: value for name, value in new.settings.items() if value is not None}
    levels = said.pop("unroll_steps", None)
    return new_plain(*classes(), replace(new, settings=sized(said, levels)))


def _plain(
    name: str, help: str, classes: Classes, taps: Callable[[int], tuple[int, ...]], method: Method, **said: Any
) -> Kind:
    """An entry. ``sized``: a net's settings and how many tokens it shall guess, or None, as fields of its config."""
    sized = said.pop("sized")
    net = NetKind(
        read=lambda *args, **more: read_plain(*classes(), *args, **more),
        write=write_plain,
        new=partial(_new, classes, sized),
        taps=taps,
        methods={name: method},
        layouts=("draftwing",),
        convert=lambda *args, **more: convert_plain(name, classes()[1], *args, **more),
        diagnose=lambda folder, target: examine_plain(name, classes()[1], folder, target),
        drafter=_drafter,
        loss=_loss,
        **said,
    )
    return Kind(name, help, partial(from_head, net), partial(is_plain, name), net=net)


BLOCK = (
    Kind(
        "medusa",
        "Medusa heads: each guesses one of the next tokens",
        partial(from_head, _MEDUSA),
        _is_medusa,
        net=_MEDUSA,
    ),
    _plain(
        "dflash",
        "a DFlash net: a block of tokens in one pass",
        _dflash,
        _dflash_taps,
        Method("dflash", 7),
        sized=_of_block,
        settings=("num_layers", "unroll_steps"),
    ),
)
