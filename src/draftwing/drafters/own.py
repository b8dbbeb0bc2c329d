"""The entry of a net of one's own: read and written by ``heads.plain``, drafted with as EAGLE heads are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwing.drafters.kind import Kind, Method, NetKind, NewDrafter, NewNet, Source
from draftwing.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from draftwing.drafters.base import Drafter
    from draftwing.heads.doctor.case import Finding
    from draftwing.heads.plain import PlainHead
    from draftwing.model.embedding import Embedding
    from draftwing.model.linear import Linear
    from draftwing.model.target import Target
    from draftwing.nets.base import DraftNet, Scored
    from draftwing.nets.eagle_config import TargetId

__all__ = [
    "convert_plain",
    "examine_plain",
    "feature_drafter",
    "from_head",
    "is_plain",
    "net_kind",
    "net_of_plain",
    "new_plain",
    "read_plain",
    "write_plain",
]


def net_kind(
    net: type[DraftNet],
    config: type[Any],
    methods: Mapping[str, Method],
    help: str,
    *,
    drafter: Callable[[Any, Target, str, str], Drafter] | None = None,
    taps: Callable[[int], tuple[int, ...]] = lambda num_layers: (num_layers,),
    start: Callable[[Any, Linear, Sequence[Scored]], None] | None = None,
    settings: tuple[str, ...] = (),
) -> Kind:
    """The entry of a net of one's own: written by ``heads.plain``, drafted with as EAGLE heads are.

    Args:
        net: its ``kind`` is the name. Called with config, embedding, target head, target ids and dtype.
        config: a ``nets.plain.PlainConfig``.
        methods, drafter, taps, start, settings: see ``NetKind``; ``taps`` is the last hidden state unless given. A net
            with an LM head of its own may name ``draft_vocab_size`` among the settings.
    """
    trained = NetKind(
        read=partial(read_plain, net, config),
        write=write_plain,
        new=partial(new_plain, net, config),
        taps=taps,
        methods=methods,
        layouts=("draftwing",),
        convert=partial(convert_plain, net.kind, config),
        diagnose=partial(examine_plain, net.kind, config),
        drafter=drafter or feature_drafter,
        start=start,
        settings=settings,
    )
    return Kind(net.kind, help, partial(from_head, trained), partial(is_plain, net.kind), net=trained)


def feature_drafter(net: DraftNet, target: Target, name: str = "", identity: str = "") -> Drafter:
    """Drafts with a net that reads the target's features."""
    from draftwing.drafters.feature import EagleDrafter

    return EagleDrafter(net, target, name, identity)


def from_head(kind: NetKind, source: Source) -> NewDrafter:
    """A maker of drafters from a head's folder."""
    from draftwing.heads.identity import head_id, target_id

    target = source.target
    own = target_id(target, source.tokenizer)
    net = kind.read(source.folder, target.embedding, target.head, own, dtype=target.dtype)
    net = net.prepack(target.quantized, fast=True)
    return partial(kind.drafter, net, target, source.folder.name, head_id(source.folder))


# --- the parts of an entry, for those that write their own -----------------------------------------------------------


def is_plain(name: str, config: Mapping[str, Any], folder: Path) -> bool:
    """Whether a folder holds a head of kind ``name`` as ``heads.plain`` writes it."""
    block = config.get("draftwing")
    return isinstance(block, dict) and block.get("kind") == name


def read_plain(
    net: type[DraftNet],
    config: type[Any],
    folder: Path,
    embedding: Tensor | Embedding,
    target_head: Linear | None = None,
    target: TargetId | None = None,
    dtype: torch.dtype | None = None,
) -> DraftNet:
    """See ``NetKind.read``."""
    from draftwing.heads.plain import load_plain

    head = load_plain(folder, net.kind, config)
    head.check_target(target, str(folder))
    return net_of_plain(net, head, embedding, target_head, str(folder), dtype)


def net_of_plain(
    net: type[DraftNet],
    head: PlainHead,
    embedding: Tensor | Embedding,
    target_head: Linear | None,
    where: str,
    dtype: torch.dtype | None = None,
) -> DraftNet:
    """The net of a head that was read. Raises CheckpointError where it does not fit the target's embedding."""
    import torch

    wanted = (head.config.vocab_size, head.config.hidden_size)
    if tuple(embedding.shape) != wanted:
        raise CheckpointError(
            f"{where}: the head is made for a target with an embedding of {wanted}, this one's is "
            f"{tuple(embedding.shape)}: load it with the target that it was trained for"
        )
    ids = None if head.target_ids is None else head.target_ids.to(embedding.device)
    found: DraftNet = net(head.config, embedding, target_head, ids, dtype or torch.float32)
    found.load_tensors(head.tensors, where)
    return found


def write_plain(folder: Path, net: DraftNet, *, training: Mapping[str, Any] | None = None) -> None:
    """See ``NetKind.write``."""
    from draftwing.heads.plain import PlainHead, save_plain

    save_plain(folder, PlainHead.from_net(net, training))


def new_plain(net: type[DraftNet], config: type[Any], new: NewNet) -> DraftNet:
    """See ``NetKind.new``: its settings are fields of the config."""
    shape = {name: value for name, value in new.settings.items() if name != "draft_vocab_size"}
    own = config.for_target(new.like, new.taps, target=new.target, **shape)
    return net(own, new.embedding, new.head, new.target_ids)


def convert_plain(name: str, config: type[Any], source: Path, destination: Path, to: str, **said: Any) -> None:
    """See ``NetKind.convert``."""
    from draftwing.heads.card import copy_card
    from draftwing.heads.plain import load_plain, save_plain
    from draftwing.heads.prompts import copy_stored

    if to != "draftwing":
        raise ConfigError(f"unknown head layout {to!r}: a {name} head is written as draftwing alone")
    head = load_plain(source, name, config)
    head.check_target(said.get("target"), str(source))
    save_plain(destination, head)
    copy_stored(source, destination)
    copy_card(source, destination, to)


def examine_plain(name: str, config: type[Any], folder: Path, target: Path | None) -> list[Finding]:
    """See ``NetKind.diagnose``."""
    from draftwing.heads.plain import diagnose_plain

    return diagnose_plain(folder, target, name, config)
