"""A head from one layout into another, and the command that serves it there."""

from __future__ import annotations

import json
import shlex
import warnings
from pathlib import Path

from draftwing.errors import CheckpointError, ConfigError, DraftwingWarning
from draftwing.formats.card import copy_card, copy_stored
from draftwing.formats.layouts import LAYOUTS
from draftwing.formats.read import head_version, load_head
from draftwing.formats.write import save_head
from draftwing.methods.medusa import is_medusa
from draftwing.methods.net import TargetId
from draftwing.models.config import read_config

# Which engine's command serves a layout; our own and EAGLE's have no server.
SERVED_BY = {"vllm": "vllm", "speculators": "vllm", "sglang": "sglang"}


def convert(
    source: Path,
    destination: Path,
    to: str,
    *,
    target: TargetId | None = None,
    taps: tuple[int, ...] | None = None,
    depth: int = 5,
) -> None:
    """Write the head in ``source``, of any layout, into ``destination`` in the layout ``to``.

    No number changes: tensors keep their bits, and what a layout has no word for stays in the config's ``draftwing``
    part. The target's own ``embed_tokens`` (and in EAGLE-1 ``lm_head``) go along where the source has them and
    the engine bears them, and so do the prompts that the head is tried on, and its card.

    Args:
        to: one of ``LAYOUTS``.
        target: the head's target, for a source that does not know it; checked against one that does.
        taps: the hidden states that the head reads, instead of what the source says.
        depth: how many tokens a speculators config proposes.

    Raises:
        CheckpointError: a source that cannot be read, or a destination that cannot be written or is the source.
        ConfigError: no such layout, or a config that cannot be meant.
        UnsupportedError: a head that the layout cannot express, or that Draftwing does not know.

    Warns:
        DraftwingWarning: something had to be guessed or fixed to read the source.
    """
    source, destination = Path(source), Path(destination)
    if to not in LAYOUTS:
        raise ConfigError(f"unknown head layout {to!r}: choose one of {', '.join(LAYOUTS)}")
    if destination.exists() and source.exists() and destination.samefile(source):
        raise CheckpointError(f"{destination}: is the source itself: choose another folder for the converted head")
    head = load_head(source).for_target(target, taps, str(source))
    # A guess that an argument replaces is none.
    said = [text for text in head.warnings if taps is None or "taps=" not in text]
    for text in said:
        warnings.warn(DraftwingWarning(text), stacklevel=2)
    save_head(destination, head, to, depth=depth)
    copy_stored(source, destination)
    name, version = destination.resolve().name, head.config.version
    serve = _command(to, head.verifier or "TARGET", name, version, depth, 4) if to in SERVED_BY else ""
    copy_card(source, destination, to, serve)


def serve_command(to: str, target: str, folder: Path, depth: int, *, branching: int = 4) -> str:
    """The shell command that serves ``target`` with the converted head in ``folder``.

    Args:
        to: ``vllm``, ``sglang`` or ``speculators`` (which vLLM serves).
        target: path or hub id.
        depth: draft tokens in a row.
        branching: how many children a node of SGLang's tree has; vLLM drafts chains.

    Raises:
        ConfigError: a layout that no engine serves, or a depth or branching below 1.
        CheckpointError, UnsupportedError: no head in the folder.
    """
    if to not in SERVED_BY:
        raise ConfigError(f"no engine serves the layout {to!r}: choose one of {', '.join(SERVED_BY)}")
    if depth < 1 or branching < 1:
        raise ConfigError(f"depth and branching must be at least 1, found {depth} and {branching}")
    config = read_config(Path(folder))
    if is_medusa(config):
        return _vllm(target, {"method": "medusa", "model": str(folder)}, min(depth, config.get("num_heads", depth)))
    return _command(to, target, str(folder), head_version(Path(folder)), depth, branching)


def _command(to: str, target: str, folder: str, version: int, depth: int, branching: int) -> str:
    first = version == 1
    if SERVED_BY[to] == "vllm":
        # Without a method vLLM goes by the name of the folder.
        return _vllm(target, {"method": "eagle" if first else "eagle3", "model": folder}, depth)
    # More tokens than the tree has nodes would be an error, and fewer than the depth waste steps.
    tokens = max(depth + 1, min(8, 1 + branching * depth))
    options = {
        "--model-path": target,
        "--speculative-algorithm": "EAGLE" if first else "EAGLE3",
        "--speculative-draft-model-path": folder,
        "--speculative-num-steps": str(depth),
        "--speculative-eagle-topk": str(branching),
        "--speculative-num-draft-tokens": str(depth + 1 if branching == 1 else tokens),
    }
    return "python -m sglang.launch_server " + " ".join(f"{key} {shlex.quote(value)}" for key, value in options.items())


def _vllm(target: str, draft: dict[str, object], depth: int) -> str:
    said = json.dumps({**draft, "num_speculative_tokens": depth})
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(said)}"
