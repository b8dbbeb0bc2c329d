"""The layers with which a target drafts for itself, as a folder that ``--draft`` takes: no weights, one config.

config.json   {"draftwing": {"format": 1, "kind": "layers", "target": {...}, "skip_attention": [...],
                             "skip_mlp": [...], "tuning": {...}}}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftwing.errors import CheckpointError, ConfigError, shown
from draftwing.heads.identity import differences, made_for
from draftwing.heads.settings import FORMAT
from draftwing.heads.write import check_destination, write_fix, write_text
from draftwing.model.config import read_config
from draftwing.model.subnet import Parts
from draftwing.nets.eagle_config import TargetId

__all__ = ["LAYERS", "LayerSet"]

LAYERS = "layers"


@dataclass(frozen=True)
class LayerSet:
    """Which parts of a target draft for it.

    Attributes:
        parts: those that run.
        target: for which they were chosen.
        tuning: how they were found, for people; any JSON.
    """

    parts: Parts
    target: TargetId
    tuning: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Into a folder, whole or not at all; an older set in it is replaced.

        Raises:
            CheckpointError: it cannot be written, or holds another model.
        """
        folder = Path(folder)
        check_destination(folder)
        block = {
            "format": FORMAT,
            "kind": LAYERS,
            "target": dataclasses.asdict(self.target),
            "skip_attention": list(self.parts.skipped_attention),
            "skip_mlp": list(self.parts.skipped_mlp),
            "tuning": dict(self.tuning),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be made ({error}): {write_fix(error)}") from error
        write_text(folder / "config.json", json.dumps({"draftwing": block}, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> LayerSet:
        """From a folder.

        Raises:
            CheckpointError: it cannot be read, or was written by another version.
            ConfigError: it holds something else, or layers that the target has not.
        """
        block, where = read_config(folder).get("draftwing"), f"{Path(folder) / 'config.json'}: draftwing"
        if not isinstance(block, dict) or block.get("kind") != LAYERS:
            raise ConfigError(
                f"{where}: expected a set of layers, found {shown(block)}: give a folder of `draftwing tune layers`"
            )
        if block.get("format") != FORMAT:
            raise CheckpointError(
                f"{where}: expected format {FORMAT}, found {shown(block.get('format'))}: it was written by another "
                f"version of Draftwing; use that one, or tune again"
            )
        target = made_for(folder)
        if target is None or type(target.num_layers) is not int:
            raise ConfigError(f"{where}: target must say for which model the layers are: tune again")
        skipped = [_layers(block.get(name), f"{where}: {name}") for name in ("skip_attention", "skip_mlp")]
        try:
            parts = Parts.without(target.num_layers, *skipped)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        tuning = block.get("tuning")
        return cls(parts, target, tuning if isinstance(tuning, dict) else {})

    def check_target(self, own: TargetId, where: str) -> None:
        """Raise CheckpointError if it was made for another target."""
        wrong = differences(self.target, own)
        if wrong:
            raise CheckpointError(
                f"{where}: these layers are of {self.target.name}, not of {own.name} ({'; '.join(wrong)}): tune the "
                f"layers of {own.name}"
            )


def _layers(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(each) is not int for each in value):
        raise ConfigError(f"{where} must be a list of layers such as [3, 7], found {shown(value)}: tune again")
    return tuple(value)
