"""EAGLE heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwing.drafters.kind import Kind, Method, NetKind, NewNet
from draftwing.drafters.own import ONLINE, feature_drafter, from_head

if TYPE_CHECKING:
    from draftwing.heads.doctor.case import Finding
    from draftwing.model.linear import Linear
    from draftwing.nets.base import DraftNet, Scored

__all__ = ["EAGLE"]


def _is_eagle(version: int, config: Mapping[str, Any], folder: Path) -> bool:
    from draftwing.heads.read import eagle_version

    return eagle_version(config, folder) == version


def _read_eagle(*args: Any, **said: Any) -> DraftNet:
    from draftwing.heads.read import read_head

    return read_head(*args, **said)


def _write_eagle(folder: Path, net: Any, *, training: Mapping[str, Any] | None = None) -> None:
    from draftwing.heads.write import write_head

    write_head(folder, net, training=training)


def _new_eagle(version: int, new: NewNet) -> DraftNet:
    from draftwing.nets.eagle import EagleNet
    from draftwing.nets.eagle_config import EagleConfig

    size = None if new.target_ids is None else len(new.target_ids)
    shape = {name: value for name, value in new.settings.items() if name != "draft_vocab_size"}
    config = EagleConfig.for_target(version, new.like, size, taps=new.taps, target=new.target, **shape)
    return EagleNet(config, new.embedding, new.head, new.target_ids)


def _eagle_taps(version: int, num_layers: int) -> tuple[int, ...]:
    from draftwing.nets.eagle_config import default_taps

    return (num_layers,) if version == 1 else default_taps(num_layers)


def _start_eagle(net: Any, target_head: Linear, batches: Sequence[Scored]) -> None:
    from draftwing.nets.eagle_initial import initialise

    initialise(net, target_head, batches)


def _convert_eagle(*args: Any, **said: Any) -> None:
    from draftwing.heads.convert import convert as run

    run(*args, **said)


def _diagnose_eagle(folder: Path, target: Path | None) -> list[Finding]:
    from draftwing.heads.doctor.examine import diagnose as run

    return run(folder, target)


def _eagle(version: int, help: str, layouts: tuple[str, ...], settings: tuple[str, ...], **known: Method) -> Kind:
    net = NetKind(
        read=_read_eagle,
        write=_write_eagle,
        new=partial(_new_eagle, version),
        taps=partial(_eagle_taps, version),
        methods=known,
        layouts=layouts,
        convert=_convert_eagle,
        diagnose=_diagnose_eagle,
        drafter=feature_drafter,
        start=_start_eagle,
        settings=settings,
    )
    name = f"eagle{version}"
    return Kind(name, help, partial(from_head, net), partial(_is_eagle, version), ONLINE, net)


EAGLE = (
    _eagle(
        1,
        "an EAGLE-1 or EAGLE-2 head",
        ("draftwing", "eagle", "vllm", "sglang"),
        ("inputs",),
        eagle1=Method("eagle1", 1, 0.2),
        hass=Method("hass", 3),
    ),
    _eagle(
        3,
        "an EAGLE-3 head",
        ("draftwing", "eagle", "vllm", "sglang", "speculators"),
        ("inputs", "draft_vocab_size", "fc_norm", "norm_output"),
        eagle3=Method("eagle3", 5),
    ),
)
