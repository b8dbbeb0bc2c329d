"""What a doctor looks at: a head read as far as it can be, and its target's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from draftwing.errors import DraftwingError
from draftwing.heads.identity import target_id_of_folder
from draftwing.heads.names import Names, sort_names
from draftwing.heads.read import find_config, find_taps, find_version, read_tensors
from draftwing.heads.settings import Settings, read_settings
from draftwing.model.config import ModelConfig, read_config
from draftwing.nets.eagle_config import EagleConfig, TargetId
from draftwing.nets.eagle_tensors import tensor_shapes

__all__ = ["Case", "Finding", "Status", "TargetFolder", "examine", "look_at_target"]

Status = Literal["ok", "warn", "fail", "unknown"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: of the check, stable.
        status: ``warn``: it works, but perhaps worse than it could; ``unknown``: it cannot be seen from here.
        detail: what was found.
        fix: what to do about it; empty where nothing is to be done.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class TargetFolder:
    """The folder of the model that a head is for. ``config`` is flat: a multimodal model's text part."""

    folder: Path
    config: Mapping[str, Any]
    id: TargetId

    @cached_property
    def model(self) -> ModelConfig | None:
        """Its shape, where it is of a family that the lean decoder knows."""
        try:
            return ModelConfig.from_hf(read_config(self.folder))
        except DraftwingError:
            return None


@dataclass
class Case:
    """A head as far as it could be read; what could not is None, and ``failures`` says why."""

    folder: Path
    target: TargetFolder | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)
    settings: Settings | None = None
    tensors: Mapping[str, Tensor] | None = None
    version: int | None = None
    names: Names | None = None
    config: EagleConfig | None = None
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def is_third(self) -> bool:
        """EAGLE-3, or what claims to be."""
        return (self.version or (self.settings.version if self.settings is not None else None)) == 3

    @cached_property
    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes that the config asks for; empty where it could not be read."""
        return {} if self.config is None else tensor_shapes(self.config)

    def tensor(self, name: str) -> Tensor | None:
        """A tensor by EAGLE's name."""
        if self.names is None or self.tensors is None:
            return None
        stored = {**self.names.net, **self.names.maps, **self.names.copies}.get(name)
        return None if stored is None else self.tensors[stored]


def examine(folder: Path, target: TargetFolder | None) -> Case:
    """Read a head step by step, and go on after a step that fails with those that do not need it."""
    case = Case(Path(folder), target)
    where = str(folder)
    try:
        case.raw = read_config(case.folder)
        case.settings = read_settings(case.raw, f"{where}/config.json")
        find_taps(case.settings, where)
    except DraftwingError as error:
        case.failures["config"] = str(error)
    try:
        case.tensors = read_tensors(case.folder)
    except DraftwingError as error:
        case.failures["weights"] = str(error)
    if case.settings is None or case.tensors is None:
        return case
    try:
        case.version = find_version(case.settings, case.tensors, where)
        case.names = sort_names(case.tensors, case.version, where, own_embedding=case.settings.own_embedding)
    except DraftwingError as error:
        case.failures["kind"] = str(error)
        return case
    try:
        case.config = find_config(case.settings, case.version, case.names, where)
    except DraftwingError as error:
        case.failures.setdefault("config", str(error))
    return case


def look_at_target(folder: Path) -> TargetFolder:
    """What a doctor needs of a target: its config and its identity, not its weights.

    Raises:
        CheckpointError, ConfigError, TokenizerError: it cannot be read.
    """
    config = read_config(folder)
    text = config.get("text_config")
    return TargetFolder(
        Path(folder), {**config, **text} if isinstance(text, dict) else config, target_id_of_folder(folder)
    )
