"""Every set of layers that was tried, in a file to which each is added at once: a run that was stopped goes on from it.

The first line says what the run is about, with the recorded texts and the measured times, so that all trials are of
one measure; then comes a line for each set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwing.errors import CheckpointError, ConfigError
from draftwing.evaluate.tune.pace import Pace
from draftwing.evaluate.tune.recorded import Text
from draftwing.heads.write import write_fix
from draftwing.model.subnet import Parts

__all__ = ["FILE", "Basis", "Trial", "Trials"]

FILE = "trials.jsonl"


@dataclass(frozen=True)
class Trial:
    """A set, how often its chains are accepted to each depth, and its tokens a second with chains of ``depth``."""

    parts: Parts
    accepted: tuple[float, ...]
    tokens_per_s: float
    depth: int

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "skip_attention": list(self.parts.skipped_attention),
            "skip_mlp": list(self.parts.skipped_mlp),
            "accepted": list(self.accepted),
            "tokens_per_s": self.tokens_per_s,
            "depth": self.depth,
        }


@dataclass(frozen=True)
class Basis:
    """What all trials of a run are measured by."""

    texts: tuple[Text, ...]
    pace: Pace


class _OtherRunError(Exception):
    """The file is of a run about something else."""


class Trials:
    """The file of a run.

    Args:
        folder: where it lies.
        about: what the trials depend on; any JSON. A run about something else is not gone on with.
        num_layers: of the target.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], num_layers: int) -> None:
        self._file, self._about, self._num_layers = folder / FILE, dict(about), num_layers
        self.basis: Basis | None = None
        self.found: list[Trial] = []

    def read(self) -> None:
        """What earlier runs left; a last line that a kill cut short is dropped.

        Raises:
            CheckpointError: the file cannot be read, or holds something else.
            ConfigError: a run about something else.
        """
        try:
            content = self._file.read_bytes() if self._file.exists() else b""
        except OSError as error:
            raise CheckpointError(f"{self._file}: cannot be read ({error}): choose another --out") from error
        lines = content.split(b"\n")
        whole, rest = lines[:-1], lines[-1]
        for number, line in enumerate(whole, 1):
            try:
                self._take(json.loads(line), number)
            except _OtherRunError as error:
                raise ConfigError(str(error)) from None
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{self._file}, line {number}: expected what `draftwing tune` writes ({error!r}): delete the "
                    f"file to start anew, or choose another --out"
                ) from error
        if rest:
            try:
                with self._file.open("r+b") as file:
                    file.truncate(len(content) - len(rest))
            except OSError as error:
                raise self._unwritable(error) from error

    def _take(self, record: Any, number: int) -> None:
        if number == 1:
            differs = [name for name, value in self._about.items() if record["about"].get(name) != value]
            if differs:
                raise _OtherRunError(
                    f"{self._file} holds a run with {differs[0]} {record['about'].get(differs[0])!r:.80}, and this one "
                    f"has {self._about[differs[0]]!r:.80}: choose another --out, or give what that run had to go on"
                )
            self.basis = Basis(tuple(map(Text.from_dict, record["texts"])), Pace.from_dict(record["pace"]))
            return
        skipped = [tuple(map(int, record[name])) for name in ("skip_attention", "skip_mlp")]
        accepted = tuple(map(float, record["accepted"]))
        parts = Parts.without(self._num_layers, *skipped)
        self.found.append(Trial(parts, accepted, float(record["tokens_per_s"]), int(record["depth"])))

    def begin(self, basis: Basis) -> None:
        """Write the first line. Raises CheckpointError where that cannot be."""
        texts = [text.to_dict() for text in basis.texts]
        self._append({"about": self._about, "texts": texts, "pace": basis.pace.to_dict()})
        self.basis = basis

    def add(self, trial: Trial) -> None:
        """Put a trial down. Raises CheckpointError where the file cannot be written to."""
        self._append(trial.to_dict())
        self.found.append(trial)

    @property
    def best(self) -> Trial | None:
        """The fastest so far."""
        return max(self.found, key=lambda trial: trial.tokens_per_s, default=None)

    @property
    def scores(self) -> dict[Parts, float]:
        """Tokens a second by set, in the order in which they were tried."""
        return {trial.parts: trial.tokens_per_s for trial in self.found}

    def _append(self, record: Mapping[str, Any]) -> None:
        try:
            size = self._file.stat().st_size if self._file.exists() else 0
            with self._file.open("ab") as file:
                try:
                    file.write(json.dumps(record).encode() + b"\n")
                    file.flush()
                except OSError:
                    file.truncate(size)  # half a line would be taken for damage
                    raise
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self._file}: cannot be written to ({error}): {write_fix(error)}; what was tried before is kept"
        )
