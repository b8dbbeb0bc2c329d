"""Speculative decoding for any Hugging Face causal LM, without changing what it says.

import draftwing as dw

lm = dw.load("path-or-hub-id", draft="path-or-hub-id | lookup | none")
for step in lm.stream("def quicksort(", temperature=0.8, seed=1):
    print(step.text, end="")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwing.api import LM, Generation, StreamStep, load
    from draftwing.drafters.base import Budget, Drafter
    from draftwing.engine.decode import Decoder
    from draftwing.errors import DraftwingError
    from draftwing.hf import custom_generate
    from draftwing.model.target import Target
    from draftwing.sampling import Sampling
    from draftwing.stats import Stats, Step
    from draftwing.tree import DraftTree

__all__ = [
    "LM",
    "Budget",
    "Decoder",
    "DraftTree",
    "Drafter",
    "DraftwingError",
    "Generation",
    "Sampling",
    "Stats",
    "Step",
    "StreamStep",
    "Target",
    "custom_generate",
    "load",
]
__version__ = "0.1.0"

# Where each name lives. It is imported at first use: torch takes seconds, and ``draftwing --help`` needs none of it.
_HOMES = {
    "LM": "api",
    "Budget": "drafters.base",
    "Decoder": "engine.decode",
    "DraftTree": "tree",
    "Drafter": "drafters.base",
    "DraftwingError": "errors",
    "Generation": "api",
    "Sampling": "sampling",
    "Stats": "stats",
    "Step": "stats",
    "StreamStep": "api",
    "Target": "model.target",
    "custom_generate": "hf",
    "load": "api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'draftwing' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"draftwing.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
