"""The kinds of drafts that come with Draftwing, in the order in which they are shown."""

from __future__ import annotations

from draftwing.drafters.entries.block import BLOCK
from draftwing.drafters.entries.eagle import EAGLE
from draftwing.drafters.entries.plain import PLAIN
from draftwing.drafters.kind import Kind

__all__ = ["BUILT_IN"]

BUILT_IN: tuple[Kind, ...] = (*PLAIN, *EAGLE, *BLOCK)
