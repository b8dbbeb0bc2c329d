"""The models and prompts that come with Draftwing."""

from __future__ import annotations

from pathlib import Path

from draftwing.errors import CheckpointError

SHIPPED = Path(__file__).parent
TOY = SHIPPED / "toy"  # a tiny model of Python code, with heads and a draft model: for tests


def shipped_heads(model: str, *kinds: str) -> dict[str, str]:
    """Return the folders of those ``kinds`` that exist as ``shipped/MODEL/KIND``, in the same order."""
    folders = {kind: f"{model}/{kind}" for kind in kinds}
    return {kind: folder for kind, folder in folders.items() if (SHIPPED / folder / "config.json").exists()}


def shipped_folder(name: str) -> Path:
    """The folder of a shipped model. Raises CheckpointError where it is not installed."""
    folder = SHIPPED / name
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder}: the model shipped with Draftwing is not installed: reinstall the package")
    return folder
