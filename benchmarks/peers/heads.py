"""Heads in the peers' formats, from ``draftwing export``; imported in Draftwing's environment."""

from __future__ import annotations

import shutil
from pathlib import Path

from peers.channel import PeerError
from peers.modes import Mode, Settings, fingerprint

# Peer: the layout of ``draftwing export --to`` that it reads.
LAYOUTS = {"vllm": "vllm", "openvino": "vllm", "llama.cpp": "gguf"}


def exported(mode: Mode, settings: Settings) -> Path | None:
    """Return the folder that drafts for a mode: the given one, or its export if it is a head for another engine.

    Raises:
        PeerError: a head that cannot be exported.
    """
    folder = settings.draft_of(mode)
    if folder is None or mode.peer not in LAYOUTS or not mode.name.startswith("eagle"):
        return folder
    from draftwing.errors import DraftwingError
    from draftwing.formats.identity import target_id_of_folder
    from draftwing.formats.write import convert

    to = LAYOUTS[mode.peer]
    out = settings.cache / "heads" / f"{fingerprint(folder)}-for-{fingerprint(settings.target)}-{to}"
    if not out.exists():
        partial = out.with_name(out.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            if to == "gguf":
                partial.mkdir()
                convert(folder, partial / "head.gguf", to, target_file=(settings.target / "model.gguf").resolve())
            else:
                convert(folder, partial, to, target=target_id_of_folder(settings.target))
        except DraftwingError as error:
            raise PeerError(f"the head cannot be exported: {error}") from error
        partial.replace(out)
    return out
