"""Which peers there are, what each of them can do, and what a run is told."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BASELINE = "draftwing/plain"

# Peer: its modes. The modes have the same names everywhere, whatever a peer calls them: ``lookup`` is prompt lookup
# or n-grams, ``draft-lm`` an assistant or draft model.
PEERS: dict[str, tuple[str, ...]] = {
    "draftwing": ("plain", "lookup", "draft-lm", "eagle3", "eagle1"),
    "transformers": ("plain", "lookup", "draft-lm"),
    "openvino": ("plain", "lookup", "draft-lm", "eagle3", "eagle3-tree"),
    "llama.cpp": ("plain", "lookup"),
    "vllm": ("plain", "lookup", "eagle3", "eagle1"),
}

# Tokens drafted ahead: each peer's own default or what its documentation shows; 0 leaves it to the peer.
# Draftwing decides it step by step.
DRAFT_TOKENS = {
    "transformers/lookup": 10,
    "transformers/draft-lm": 0,
    "openvino/lookup": 5,
    "openvino/draft-lm": 5,
    "openvino/eagle3": 5,
    "openvino/eagle3-tree": 15,
    "llama.cpp/lookup": 10,
    "vllm/lookup": 5,
    "vllm/eagle3": 3,
    "vllm/eagle1": 3,
}


@dataclass(frozen=True)
class Mode:
    """One way of decoding: a peer and what drafts for it."""

    peer: str
    name: str

    def __str__(self) -> str:
        return f"{self.peer}/{self.name}"


@dataclass(frozen=True)
class Settings:
    """What all modes share."""

    target: Path
    drafts: dict[str, Path | None]  # by mode: ``eagle3``, ``eagle1``, ``draft-lm``
    precision: str
    threads: int
    max_tokens: int
    cache: Path
    draft_tokens: dict[str, int] = field(default_factory=dict)
    vllm_eager: bool = False

    def draft_of(self, mode: Mode) -> Path | None:
        """The folder that drafts for a mode, if one does."""
        return self.drafts.get(mode.name.removesuffix("-tree"))

    def job(self, mode: Mode, op: str, draft: Path | None = None) -> dict[str, Any]:
        """What a worker is told; ``draft`` is its folder as the peer takes it."""
        cache = self.cache / mode.peer
        return {
            "op": op,
            "mode": mode.name,
            "target": str(self.target),
            "draft": None if draft is None else str(draft),
            "precision": self.precision,
            "threads": self.threads,
            "draft_tokens": self.draft_tokens.get(str(mode), 0),
            "cache": str(cache / fingerprint(self.target)),
            "draft_cache": None if draft is None else str(cache / fingerprint(draft)),
            "eager": self.vllm_eager,
        }

    def lacks(self, mode: Mode) -> str | None:
        """Why a mode cannot be tried at all."""
        name = mode.name.removesuffix("-tree")
        if name in self.drafts and self.drafts[name] is None:
            return f"no --{name} was given for this target"
        return None


def fingerprint(folder: Path) -> str:
    """Names a folder's state, so that a conversion of it is used again only while it is the same."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    told = [f"{folder}", *(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)]
    return f"{folder.parent.name}-{folder.name}-{hashlib.sha256(chr(10).join(told).encode()).hexdigest()[:12]}"


def parse_modes(text: str | None) -> list[Mode]:
    """Modes of a list such as ``draftwing,openvino/plain``, in the order of ``PEERS``, the baseline always first.

    Raises:
        ValueError: a peer or a mode that there is not; the message says which there are.
    """
    everything = [Mode(peer, name) for peer, names in PEERS.items() for name in names]
    if text is None:
        return everything
    wanted = {BASELINE}
    for item in (part.strip() for part in text.split(",")):
        found = [str(mode) for mode in everything if item in (mode.peer, str(mode))]
        if not found:
            peer = item.partition("/")[0]
            known = [f"{peer}/{name}" for name in PEERS[peer]] if peer in PEERS else list(PEERS)
            raise ValueError(f"{item!r} is none of {', '.join(known)}")
        wanted.update(found)
    return [mode for mode in everything if str(mode) in wanted]


def parse_draft_tokens(items: Sequence[str]) -> dict[str, int]:
    """``DRAFT_TOKENS`` with items such as ``vllm/eagle3=5`` in the place of the defaults.

    Raises:
        ValueError: not of this form, or a mode that has no such number.
    """
    found = dict(DRAFT_TOKENS)
    for item in items:
        name, _, number = item.partition("=")
        if name not in found:
            raise ValueError(f"{name!r} is none of {', '.join(found)}")
        if not number.isdigit() or int(number) < 1:
            raise ValueError(f"{item!r}: expected a number of tokens, such as {name}=4")
        found[name] = int(number)
    return found


def turns(num_modes: int, rounds: int) -> list[list[int]]:
    """Which mode comes when: in every round each once, and each round starts one further on.

    So a machine that slows down slows all alike, and nobody always runs right after the same neighbour has left
    the processor hot.
    """
    return [[(start + place) % num_modes for place in range(num_modes)] for start in range(rounds)]
