"""Convert a head from one layout into another, and build the command that serves it there."""

from __future__ import annotations

import json
import shlex
import warnings
from pathlib import Path

from draftwing.errors import CheckpointError, ConfigError, DraftwingWarning
from draftwing.formats.card import copy_card, copy_stored
from draftwing.formats.read import find_version, load_head, read_tensors
from draftwing.formats.settings import read_settings
from draftwing.formats.write import save_head
from draftwing.methods.medusa import is_medusa
from draftwing.methods.net import TargetId
from draftwing.models.config import read_config

# The engine that serves each layout; ours and EAGLE's have no server.
SERVED_BY = {"vllm": "vllm", "speculators": "vllm", "sglang": "sglang"}
BRANCHING = 4  # children of each node of SGLang's tree; vLLM drafts chains


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

    Tensors keep their bits, and what a layout cannot express stays in the config's ``draftwing`` part. The target's own
    ``embed_tokens`` (and in EAGLE-1 ``lm_head``) are copied if the source has them and the engine accepts them, and so
    are the stored prompts and the card.

    Args:
        to: one of ``layouts.LAYOUTS``.
        target: the head's target, for a source that does not name it; compared with one that does.
        taps: the hidden states that the head reads, instead of those that the source names.
        depth: number of tokens that a speculators config proposes.

    Warns:
        DraftwingWarning: something had to be guessed or fixed to read the source.
    """
    source, destination = Path(source), Path(destination)
    if destination.exists() and source.exists() and destination.samefile(source):
        raise CheckpointError(f"{destination}: is the source itself: choose another folder for the converted head")
    head = load_head(source).for_target(target, taps, str(source))
    for text in head.warnings:
        if taps is None or "taps=" not in text:  # the argument replaces a guess
            warnings.warn(DraftwingWarning(text), stacklevel=2)
    save_head(destination, head, to, depth=depth)
    copy_stored(source, destination)
    name, version = destination.resolve().name, head.config.version
    command = _command(to, head.verifier or "TARGET", name, version, depth) if to in SERVED_BY else ""
    copy_card(source, destination, to, command)


def serve_command(to: str, target: str, folder: Path, depth: int) -> str:
    """Return the shell command that serves ``target`` with the converted head in ``folder``.

    Args:
        to: ``vllm``, ``sglang`` or ``speculators`` (which vLLM serves).
        target: path or hub id.
        depth: draft tokens in a row.
    """
    folder = Path(folder)
    if to not in SERVED_BY:
        raise ConfigError(f"no engine serves the layout {to!r}: choose one of {', '.join(SERVED_BY)}")
    if depth < 1:
        raise ConfigError(f"depth must be at least 1, found {depth}")
    config = read_config(folder)
    if is_medusa(config):
        return _vllm(target, "medusa", str(folder), min(depth, config.get("num_heads", depth)))
    settings = read_settings(config, str(folder / "config.json"))
    version = find_version(settings, read_tensors(folder), str(folder))
    return _command(to, target, str(folder), version, depth)


def _command(to: str, target: str, folder: str, version: int, depth: int) -> str:
    if SERVED_BY[to] == "vllm":
        # Without a method vLLM guesses it from the folder's name.
        return _vllm(target, "eagle" if version == 1 else "eagle3", folder, depth)
    # More tokens than the tree has nodes would be an error, and fewer than the depth waste steps.
    tokens = max(depth + 1, min(8, 1 + BRANCHING * depth))
    options = {
        "--model-path": target,
        "--speculative-algorithm": "EAGLE" if version == 1 else "EAGLE3",
        "--speculative-draft-model-path": folder,
        "--speculative-num-steps": str(depth),
        "--speculative-eagle-topk": str(BRANCHING),
        "--speculative-num-draft-tokens": str(tokens),
    }
    return "python -m sglang.launch_server " + " ".join(f"{key} {shlex.quote(value)}" for key, value in options.items())


def _vllm(target: str, method: str, folder: str, depth: int) -> str:
    config = json.dumps({"method": method, "model": folder, "num_speculative_tokens": depth})
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(config)}"
