"""The models and prompts that come with Draftwing."""

from __future__ import annotations

from pathlib import Path

from draftwing.errors import CheckpointError

__all__ = ["SHIPPED", "shipped_folder"]

SHIPPED = Path(__file__).parent


def shipped_folder(name: str) -> Path:
    """The folder of a shipped model. Raises CheckpointError where it is not installed."""
    folder = SHIPPED / name
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder}: the model shipped with Draftwing is not installed: reinstall the package")
    return folder
