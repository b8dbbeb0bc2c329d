"""The models and prompts that come with Draftwing."""

from __future__ import annotations

from pathlib import Path

__all__ = ["SHIPPED"]

SHIPPED = Path(__file__).parent
