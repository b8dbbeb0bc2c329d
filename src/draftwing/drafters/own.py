"""The entry of a net of one's own: read and written by ``heads.plain``, drafted with as EAGLE heads are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwing.drafters.kind import Kind, Method, NetKind, NewDrafter, NewNet, Source
from draftwing.errors import CheckpointError, ConfigError, shown

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
    "ONLINE",
    "NetParts",
    "feature_drafter",
    "from_head",
    "last_layer",
    "net_kind",
    "net_of_plain",
    "new_plain",
    "plain_kind",
    "read_plain",
]

NetParts = Callable[[], tuple[type["DraftNet"], type[Any]]]  # the class of a net and that of its config


def _share(value: Any) -> float:
    """Of the steps' time that learning may take; 0 for none."""
    if isinstance(value, bool):
        return 0.1 if value else 0.0
    if isinstance(value, int | float) and 0 < value <= 1:
        return float(value)
    raise ConfigError(
        f"draft_options: online must be True, False, or the share of the time that learning may take, above 0 and up "
        f"to 1, found {shown(value)}"
    )


def _rate(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ConfigError(f"draft_options: online_lr must be between 0 and 1, found {shown(value)}: 1e-4 is usual")
    return float(value)


ONLINE: Mapping[str, Callable[[Any], Any]] = {"online": _share, "online_lr": _rate}  # of heads that can be unrolled


def net_kind(
    net: type[DraftNet],
    config: type[Any],
    methods: Mapping[str, Method],
    help: str,
    *,
    drafter: Callable[[Any, Target, str, str], Drafter] | None = None,
    taps: Callable[[int], tuple[int, ...]] | None = None,
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
    said: dict[str, Any] = {"drafter": drafter, "taps": taps or last_layer, "start": start, "settings": settings}
    return plain_kind(net.kind, lambda: (net, config), methods, help, **said)


def plain_kind(
    name: str,
    parts: NetParts,
    methods: Mapping[str, Method],
    help: str,
    *,
    recognises: Callable[[Mapping[str, Any], Path], bool] | None = None,
    drafter: Callable[[Any, Target, str, str], Drafter] | None = None,
    **said: Any,
) -> Kind:
    """The same of a net that comes with Draftwing: its classes are imported when they are used.

    Args:
        name: the net's ``kind``; ``parts`` gives its classes.
        recognises: see ``Kind``; as written by ``heads.plain`` unless given.
        said: further parts of ``NetKind``, those of a plain head in place of what is not said.
    """
    plain: dict[str, Any] = {
        "read": partial(read_plain, parts),
        "write": _write_plain,
        "new": partial(new_plain, parts),
        "taps": last_layer,
        "layouts": ("draftwing",),
        "convert": partial(_convert_plain, name, parts),
        "diagnose": partial(_diagnose_plain, name, parts),
    }
    trained = NetKind(methods=methods, drafter=drafter or feature_drafter, **{**plain, **said})
    options = {} if drafter else ONLINE  # another drafter may not run its net as an unroll does
    return Kind(name, help, partial(from_head, trained), recognises or partial(_is_plain, name), options, trained)


def last_layer(num_layers: int) -> tuple[int, ...]:
    """The taps of a net that reads the last hidden state."""
    return (num_layers,)


def feature_drafter(net: DraftNet, target: Target, name: str = "", identity: str = "") -> Drafter:
    """Drafts with a net that reads the target's features."""
    from draftwing.drafters.feature import EagleDrafter

    return EagleDrafter(net, target, name, identity)


def from_head(kind: NetKind, source: Source) -> NewDrafter:
    """A maker of drafters from a head's folder; with the option ``online`` of such as learn while they serve."""
    from draftwing.heads.identity import head_id, target_id

    target = source.target
    own = target_id(target, source.tokenizer)
    net = kind.read(source.folder, target.embedding, target.head, own, dtype=target.embedding.dtype)
    net = net.prepack(target.quantized, fast=True)
    new_drafter = partial(kind.drafter, net, target, source.folder.name, head_id(source.folder))
    if source.options.get("online"):
        return _learning(kind, source, net, new_drafter)
    if "online_lr" in source.options:
        raise ConfigError("draft_options: online_lr goes with online: say {'online': True} too, or leave it out")
    return new_drafter


def _learning(kind: NetKind, source: Source, serving: DraftNet, new_drafter: NewDrafter) -> NewDrafter:
    """A maker of drafters that share one net, and what teaches it."""
    import torch

    from draftwing.drafters.online import OnlineDrafter
    from draftwing.heads.identity import target_id
    from draftwing.nets.learner import Learner, Pace

    target = source.target
    rows = target.embedding if target.embedding.dtype == torch.float32 else target.embedding.plain().float()
    own = target_id(target, source.tokenizer)
    copy = kind.read(source.folder, rows, target.head, own, dtype=torch.float32)
    pace = Pace(share=source.options["online"], lr=source.options.get("online_lr", Pace.lr))
    learner = Learner(serving, copy, pace)
    return lambda: OnlineDrafter(new_drafter(), learner)


# --- the parts of an entry, for those that write their own -----------------------------------------------------------


def _is_plain(name: str, config: Mapping[str, Any], folder: Path) -> bool:
    """Whether a folder holds a head of kind ``name`` as ``heads.plain`` writes it."""
    block = config.get("draftwing")
    return isinstance(block, dict) and block.get("kind") == name


def read_plain(
    parts: NetParts,
    folder: Path,
    embedding: Tensor | Embedding,
    target_head: Linear | None = None,
    target: TargetId | None = None,
    dtype: torch.dtype | None = None,
) -> DraftNet:
    """See ``NetKind.read``."""
    from draftwing.heads.plain import load_plain

    net, config = parts()
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


def _write_plain(folder: Path, net: DraftNet, *, training: Mapping[str, Any] | None = None) -> None:
    """See ``NetKind.write``."""
    from draftwing.heads.plain import PlainHead, save_plain

    save_plain(folder, PlainHead.from_net(net, training))


def new_plain(parts: NetParts, new: NewNet) -> DraftNet:
    """See ``NetKind.new``: its settings are fields of the config."""
    net, config = parts()
    shape = {name: value for name, value in new.settings.items() if name != "draft_vocab_size"}
    own = config.for_target(new.like, new.taps, target=new.target, **shape)
    return net(own, new.embedding, new.head, new.target_ids)


def _convert_plain(name: str, parts: NetParts, source: Path, destination: Path, to: str, **said: Any) -> None:
    from draftwing.heads.card import copy_card
    from draftwing.heads.plain import load_plain, save_plain
    from draftwing.heads.prompts import copy_stored

    if to != "draftwing":
        raise ConfigError(f"unknown head layout {to!r}: a {name} head is written as draftwing alone")
    head = load_plain(source, name, parts()[1])
    head.check_target(said.get("target"), str(source))
    save_plain(destination, head)
    copy_stored(source, destination)
    copy_card(source, destination, to)


def _diagnose_plain(name: str, parts: NetParts, folder: Path, target: Path | None) -> list[Finding]:
    from draftwing.heads.plain import diagnose_plain

    return diagnose_plain(folder, target, name, parts()[1])
