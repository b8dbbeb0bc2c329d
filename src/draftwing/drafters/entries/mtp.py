"""MTP modules: trained heads, and those that lie in a target's own checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from draftwing.drafters.kind import Method, NetKind, NewDrafter, NewNet, Source
from draftwing.drafters.own import feature_drafter, from_head, plain_kind, read_plain
from draftwing.errors import CheckpointError, ConfigError, shown

if TYPE_CHECKING:
    from draftwing.drafters.base import Drafter
    from draftwing.model.target import Target
    from draftwing.nets.base import DraftNet

__all__ = ["MTP"]


def _parts() -> tuple[type[Any], type[Any]]:
    from draftwing.nets.mtp import MtpConfig, MtpNet

    return MtpNet, MtpConfig


def _read(folder: Path, *args: Any, **said: Any) -> DraftNet:
    """A head's own folder, or the target's."""
    from draftwing.heads.mtp import read_modules
    from draftwing.model.config import read_config

    recognises = _PLAIN.recognises
    assert recognises is not None
    if recognises(read_config(folder), folder):
        return read_plain(_parts, folder, *args, **said)
    return read_modules(folder, *args, **said)


def _new(new: NewNet) -> DraftNet:
    count = new.settings["unroll_steps"] or _METHOD.unroll_steps
    net, config = _parts()
    shape = config.for_target(new.like, new.taps, target=new.target, num_modules=count)
    return cast("DraftNet", net(shape, new.embedding, new.head, new.target_ids))


def _new_loss(*args: Any) -> Any:
    from draftwing.nets.mtp_loss import MtpLoss

    return MtpLoss(*args)


def _drafter(net: Any, target: Target, name: str = "", identity: str = "") -> Drafter:
    """Drafts with the first module, on its own states after its first token."""
    return feature_drafter(net.part(), target, name, identity)


def _make(source: Source) -> NewDrafter:
    """Of as many modules as are asked for, so that no other is laid out."""
    count = source.options.get("modules", 1)

    def read(*args: Any, **said: Any) -> Any:
        net: Any = _read(*args, **said)
        if count > net.config.num_modules:
            raise ConfigError(
                f"draft_options: modules is {count}, and {source.name} has {net.config.num_modules}: ask for fewer"
            )
        return net.part(count=count)

    if count == 1:
        return from_head(replace(_NET, read=read), source)
    parts: list[Any] = []  # made once, and traced once

    def drafter(net: Any, target: Target, name: str, identity: str) -> Drafter:
        from draftwing.drafters.mtp import ChainDrafter

        parts.extend(net.part(place) for place in range(len(parts), count))
        return ChainDrafter(parts, target, name, identity)

    return from_head(replace(_NET, read=read, drafter=drafter), source)


def _modules(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"draft_options: modules must be at least 1, found {shown(value)}: give a whole number")
    return value


def _folder_of(target: Target) -> Path:
    """The target's own. Raises CheckpointError where it has no modules."""
    from draftwing.gguf.source import open_weights
    from draftwing.model.config import read_config
    from draftwing.model.mtp import architecture_of, module_names

    folder = target.folder
    if folder is None:
        raise CheckpointError(f"{target.name} was not loaded from a folder: give the folder of an MTP head")
    config = read_config(folder)
    with open_weights(folder) as files:
        if module_names(config, files.keys(), str(folder / "config.json")) is None:
            raise CheckpointError(
                f"{target.name} ({architecture_of(config)}) has no MTP modules in its checkpoint: give the folder of a "
                f"trained head (`draftwing train mtp`), or draft with lookup"
            )
    return folder


_METHOD = Method("next-token", 1)  # as many modules as steps
_PLAIN = plain_kind(
    "mtp",
    _parts,
    {"mtp": _METHOD},
    "MTP modules",
    drafter=_drafter,
    read=_read,
    new=_new,
    settings=("unroll_steps",),
    loss=_new_loss,
)
_NET = cast(NetKind, _PLAIN.net)
MTP = replace(_PLAIN, make=_make, options={"modules": _modules}, of_target=_folder_of)
