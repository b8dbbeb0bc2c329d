"""MTP modules: trained heads, and those that lie in a target's own checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from draftwing.drafters.kind import Kind, Method, NetKind, NewDrafter, NewNet, Source
from draftwing.drafters.own import feature_drafter, from_head, net_kind
from draftwing.errors import CheckpointError, ConfigError, shown

if TYPE_CHECKING:
    from draftwing.drafters.base import Drafter
    from draftwing.heads.doctor.case import Finding
    from draftwing.model.target import Target
    from draftwing.nets.base import DraftNet

__all__ = ["MTP"]

HELP = "MTP modules"


def _plain() -> NetKind:
    """How a head's own folder is read, written, converted and examined."""
    from draftwing.nets.mtp import MtpConfig, MtpNet

    return cast(NetKind, net_kind(MtpNet, MtpConfig, {}, HELP).net)


def _is_head(config: Mapping[str, Any], folder: Path) -> bool:
    block = config.get("draftwing")
    return isinstance(block, dict) and block.get("kind") == "mtp"


def _read(folder: Path, *args: Any, **said: Any) -> DraftNet:
    from draftwing.heads.mtp import read_modules
    from draftwing.model.config import read_config

    if _is_head(read_config(folder), folder):
        return _plain().read(folder, *args, **said)
    return read_modules(folder, *args, **said)


def _write(folder: Path, net: DraftNet, *, training: Mapping[str, Any] | None = None) -> None:
    _plain().write(folder, net, training=training)


def _convert(source: Path, destination: Path, to: str, **said: Any) -> None:
    _plain().convert(source, destination, to, **said)


def _diagnose(folder: Path, target: Path | None) -> list[Finding]:
    return _plain().diagnose(folder, target)


def _new(new: NewNet) -> DraftNet:
    from draftwing.nets.mtp import MtpConfig, MtpNet

    count = new.settings["unroll_steps"] or METHODS["mtp"].unroll_steps
    config = MtpConfig.for_target(new.like, new.taps, target=new.target, num_modules=count)
    return MtpNet(config, new.embedding, new.head, new.target_ids)


def _new_loss(*args: Any) -> Any:
    from draftwing.nets.mtp_loss import MtpLoss

    return MtpLoss(*args)


def _last_state(num_layers: int) -> tuple[int, ...]:
    return (num_layers,)


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


METHODS = {"mtp": Method("next-token", 1)}  # as many modules as steps
_NET = NetKind(
    read=_read,
    write=_write,
    new=_new,
    taps=_last_state,
    methods=METHODS,
    layouts=("draftwing",),
    convert=_convert,
    diagnose=_diagnose,
    drafter=_drafter,
    settings=("unroll_steps",),
    loss=_new_loss,
)
MTP = Kind("mtp", HELP, _make, _is_head, {"modules": _modules}, _NET, of_target=_folder_of)
