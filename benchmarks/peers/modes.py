"""The peers, their modes, and the settings of a run."""

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
    "llama.cpp": ("plain", "lookup", "eagle3"),
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
    "llama.cpp/eagle3": 3,
    "vllm/lookup": 5,
    "vllm/eagle3": 3,
    "vllm/eagle1": 3,
}


@dataclass(frozen=True)
class Mode:
    """A peer and what drafts for it."""

    peer: str
    name: str

    def __str__(self) -> str:
        return f"{self.peer}/{self.name}"


@dataclass(frozen=True)
class Settings:
    """The settings of all modes."""

    target: Path
    drafts: dict[str, Path | None]  # by mode: ``eagle3``, ``eagle1``, ``draft-lm``
    precision: str
    threads: int
    max_tokens: int
    cache: Path
    draft_tokens: dict[str, int] = field(default_factory=dict)
    vllm_eager: bool = False

    def draft_of(self, mode: Mode) -> Path | None:
        """Return the folder that drafts for a mode, if there is one."""
        return self.drafts.get(mode.name.removesuffix("-tree"))

    def job(self, mode: Mode, op: str, draft: Path | None = None) -> dict[str, Any]:
        """Return the job of a worker; ``draft`` is a folder in the peer's format."""
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
        """Return why a mode cannot be run, or None."""
        name = mode.name.removesuffix("-tree")
        if name in self.drafts and self.drafts[name] is None:
            return f"no --{name} was given for this target"
        if self.precision == "int4" and mode.peer not in ("draftwing", "openvino"):
            return "it is compared in 4 bits on a GGUF file only: give --target model.gguf"
        if str(mode) == "llama.cpp/eagle3" and self.precision != "gguf":
            return "a head's GGUF file contains the tokenizer of its target's: give --target model.gguf"
        return None


def fingerprint(folder: Path) -> str:
    """Hash a folder's state, so that a conversion is reused only for the same files."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    told = [f"{folder}", *(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)]
    return f"{folder.parent.name}-{folder.name}-{hashlib.sha256(chr(10).join(told).encode()).hexdigest()[:12]}"


def parse_modes(text: str | None) -> list[Mode]:
    """Parse a list such as ``draftwing,openvino/plain``; the baseline is always first, the rest ordered like ``PEERS``.

    Raises:
        ValueError: an unknown peer or mode; the message lists the known ones.
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
    """Override ``DRAFT_TOKENS`` with items such as ``vllm/eagle3=5``.

    Raises:
        ValueError: malformed, or a mode without such a number.
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
    """Return the order of modes in each round, rotated by one from round to round.

    A machine that slows down then slows all modes alike, and no mode always runs on a processor that the same other
    mode has heated up.
    """
    return [[(start + place) % num_modes for place in range(num_modes)] for start in range(rounds)]
