"""What a head would have proposed at every position of a few held-out texts: the statistics that forecasts are made of.

At each position of a text that the target wrote, the drafter grew one large *reference tree*. Of it is kept what
decides whether another tree would have held the text's own next tokens: which child of its parent each of them was, and
how many nodes of each level were likelier. So tau of any chain, static or dynamic tree follows by walking along the
texts as decoding does (``replay``). Positions after a rejection are harder than others, and hard ones come in runs; a
walk sees both, where a table of rates would not.

One file of some tens of kilobytes lies in the head's folder; no model is needed to read it.

Shape suffixes: T texts, P positions of all texts one after another, E nodes of the texts' own paths, L levels,
K thresholds.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from draftwing.drafters.base import Budget
from draftwing.errors import CheckpointError, ConfigError
from draftwing.heads.identity import head_id
from draftwing.heads.write import write_fix

__all__ = ["DEPTH", "FILE", "REFERENCE", "THRESHOLDS", "WIDTH", "HeldOut", "Texts", "quantised"]

FILE = "held_out.npz"  # in a head's folder
FORMAT = 1
DEPTH, WIDTH = 10, 10  # of the reference tree
REFERENCE = Budget(DEPTH, WIDTH, nodes=WIDTH + (DEPTH - 1) * WIDTH * WIDTH)  # every node that it meets
# The chance of a path from which nodes are counted: what a tree that grows by its nodes' worth is made of.
THRESHOLDS = (0.6, 0.4, 0.25, 0.16, 0.1, 0.06, 0.04, 0.025)
PER_OCTAVE, MOST = 8, 255  # of a chance as one byte
_MOST_BYTES = 64 * 2**20  # of a file: far beyond what any collection writes


def quantised(chance: np.ndarray) -> np.ndarray:
    """Chances as bytes: 0 is certain, ``PER_OCTAVE`` more is half as likely."""
    with np.errstate(divide="ignore"):
        found: np.ndarray = np.clip(np.round(-PER_OCTAVE * np.log2(chance)), 0, MOST).astype(np.uint8)
    return found


@dataclass(frozen=True)
class Texts:
    """The texts of one temperature. All counts stop at 255.

    Attributes:
        lengths: (T,) int32: positions of each text.
        stopped: (T,) bool: whether the text ended there by itself, so that no step emits more.
        found: (P,) uint8: how many of a position's next tokens the reference tree holds as one path.
        ranks: (E,) uint8: which child of its parent each node of these paths is.
        chances: (E,) uint8: of the path down to it, as told, ``quantised``.
        likelier: (E, L) uint8: nodes of each level that are likelier than it, or as likely and met before it.
        sizes: (P, K) uint8: nodes whose path's chance is above each of ``THRESHOLDS``.
        levels: (P, K) uint8: the deepest level of those.
    """

    lengths: np.ndarray
    stopped: np.ndarray
    found: np.ndarray
    ranks: np.ndarray
    chances: np.ndarray
    likelier: np.ndarray
    sizes: np.ndarray
    levels: np.ndarray

    def __post_init__(self) -> None:
        texts, positions, entries = len(self.lengths), len(self.found), len(self.ranks)
        shapes = {
            "lengths": (texts,),
            "stopped": (texts,),
            "found": (positions,),
            "ranks": (entries,),
            "chances": (entries,),
            "likelier": (entries, DEPTH),
            "sizes": (positions, len(THRESHOLDS)),
            "levels": (positions, len(THRESHOLDS)),
        }
        for name, shape in shapes.items():
            value = getattr(self, name)
            kind = {"lengths": np.int32, "stopped": np.bool_}.get(name, np.uint8)
            if value.shape != shape or value.dtype != kind:
                raise ConfigError(
                    f"held-out statistics: `{name}` must be {np.dtype(kind).name} of shape {shape}, found "
                    f"{value.dtype.name} of {value.shape}: collect them anew"
                )
        if not texts or (self.lengths < 1).any() or int(self.lengths.sum()) != positions:
            raise ConfigError(
                f"held-out statistics: the texts' lengths must be at least 1 and add up to {positions} positions, "
                f"found {texts} texts of {int(self.lengths.sum())}: collect them anew"
            )
        if self.found.max() > DEPTH or int(self.found.sum(dtype=np.int64)) != entries:
            raise ConfigError(
                f"held-out statistics: the paths must be at most {DEPTH} deep and add up to {entries} nodes: collect "
                f"them anew"
            )


@dataclass(frozen=True)
class HeldOut:
    """The statistics of a head.

    Attributes:
        head: ``head_id`` of the head that they were made with.
        target: its name; ``runs_as`` is what computed the head's matrices.
        context: tokens of a row in the mean.
        texts: by temperature.
    """

    head: str
    target: str
    runs_as: str
    context: float
    texts: Mapping[float, Texts]

    def of(self, temperature: float) -> Texts:
        """The texts of a temperature.

        Raises:
            ConfigError: there are none of it.
        """
        found = self.texts.get(float(temperature))
        if found is None:
            known = ", ".join(f"{each:g}" for each in sorted(self.texts))
            raise ConfigError(
                f"the head's held-out statistics are of temperature {known}, not of {temperature:g}: forecast those, "
                f"or collect others with `draftwing predict --collect -T {temperature:g}`"
            )
        return found

    def joined(self, older: HeldOut) -> HeldOut:
        """With what ``older`` has of other temperatures, where both were made in the same way."""
        if any(getattr(self, name) != getattr(older, name) for name in ("head", "target", "runs_as")):
            return self
        return replace(self, texts={**older.texts, **self.texts})

    def describe(self) -> dict[str, Any]:
        """What they were made of, as plain JSON values."""
        return {
            "head": self.head,
            "target": self.target,
            "runs_as": self.runs_as,
            "context": self.context,
            "texts": {f"{each:g}": len(self.texts[each].lengths) for each in sorted(self.texts)},
            "positions": {f"{each:g}": len(self.texts[each].found) for each in sorted(self.texts)},
        }

    # --- the file --------------------------------------------------------------------------------------------------

    def write(self, folder: Path) -> Path:
        """Put them into a head's folder, whole or not at all; the file's path.

        Raises:
            CheckpointError: it cannot be written.
        """
        file = Path(folder) / FILE
        about: dict[str, Any] = {"format": FORMAT, "depth": DEPTH, "width": WIDTH, "thresholds": THRESHOLDS}
        about |= {name: getattr(self, name) for name in ("head", "target", "runs_as", "context")}
        about |= {"texts": list(self.texts)}
        arrays = {"about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)}
        for number, texts in enumerate(self.texts.values()):
            arrays |= {f"{each.name}_{number}": getattr(texts, each.name) for each in fields(Texts)}
        partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as stream:
                np.savez_compressed(stream, allow_pickle=False, **arrays)
            os.replace(partial, file)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise CheckpointError(
                f"{file}: the held-out statistics cannot be written ({error}): {write_fix(error)}"
            ) from error
        return file

    @classmethod
    def read(cls, folder: Path) -> HeldOut:
        """Those of a head's folder.

        Raises:
            CheckpointError: there are none, they cannot be read, or they were made with other weights.
        """
        file = Path(folder) / FILE
        collect = f"collect them with `draftwing predict --collect --draft {folder}` and the head's target and prompts"
        if not file.exists():
            raise CheckpointError(
                f"{folder}: has no held-out statistics ({FILE}), which a forecast is made of: {collect}"
            )
        try:
            if file.stat().st_size > _MOST_BYTES:
                raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
            found = cls._parsed(file.read_bytes())
        except (EOFError, OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
            raise CheckpointError(f"{file}: not readable as held-out statistics ({error}): {collect}") from error
        if found.head != head_id(Path(folder)):
            raise CheckpointError(
                f"{file}: these held-out statistics were made with other weights than the head has now: {collect}"
            )
        return found

    @classmethod
    def _parsed(cls, data: bytes) -> HeldOut:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes().decode())
            same = {"format": FORMAT, "depth": DEPTH, "width": WIDTH, "thresholds": list(THRESHOLDS)}
            if not isinstance(about, dict) or {name: about.get(name) for name in same} != same:
                raise ValueError("they are of another version")
            texts = {
                float(temperature): Texts(**{each.name: arrays[f"{each.name}_{number}"] for each in fields(Texts)})
                for number, temperature in enumerate(about["texts"])
            }
        named = {name: str(about[name]) for name in ("head", "target", "runs_as")}
        return cls(**named, context=float(about["context"]), texts=texts)
