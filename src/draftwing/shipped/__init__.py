"""The models and prompts that come with Draftwing."""

from __future__ import annotations

from pathlib import Path

from draftwing.errors import CheckpointError

__all__ = ["SHIPPED", "shipped_folder", "shipped_heads"]

SHIPPED = Path(__file__).parent


def shipped_heads(model: str, *kinds: str) -> dict[str, str]:
    """Of these kinds those that lie in ``shipped/MODEL/KIND``, each with its folder, in the same order."""
    folders = {kind: f"{model}/{kind}" for kind in kinds}
    return {kind: folder for kind, folder in folders.items() if (SHIPPED / folder / "config.json").exists()}


def shipped_folder(name: str) -> Path:
    """The folder of a shipped model. Raises CheckpointError where it is not installed."""
    folder = SHIPPED / name
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder}: the model shipped with Draftwing is not installed: reinstall the package")
    return folder
