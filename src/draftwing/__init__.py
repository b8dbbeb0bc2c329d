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
    from draftwing import errors
    from draftwing.api import LM, Generation, StreamStep, load
    from draftwing.drafters.base import Budget, Drafter, Traits
    from draftwing.drafters.kinds import Kind, register
    from draftwing.engine.decode import Decoder
    from draftwing.engine.engine import Engine
    from draftwing.engine.request import Request
    from draftwing.errors import DraftwingError
    from draftwing.hf.generate import custom_generate
    from draftwing.model.target import Target
    from draftwing.sampling import Sampling
    from draftwing.stats import Stats, Step
    from draftwing.text.grammar import Grammar
    from draftwing.text.stream import TextStream
    from draftwing.tree import Accepted, DraftTree

__all__ = [
    "LM",
    "Accepted",
    "Budget",
    "Decoder",
    "DraftTree",
    "Drafter",
    "DraftwingError",
    "Engine",
    "Generation",
    "Grammar",
    "Kind",
    "Request",
    "Sampling",
    "Stats",
    "Step",
    "StreamStep",
    "Target",
    "TextStream",
    "Traits",
    "custom_generate",
    "errors",
    "load",
    "register",
]
__version__ = "0.1.0"

# Where each name lives. It is imported at first use: torch takes seconds, and ``draftwing --help`` needs none of it.
_HOMES = {
    "LM": "api",
    "Accepted": "tree",
    "Budget": "drafters.base",
    "Decoder": "engine.decode",
    "DraftTree": "tree",
    "Drafter": "drafters.base",
    "DraftwingError": "errors",
    "Engine": "engine.engine",
    "Generation": "api",
    "Grammar": "text.grammar",
    "Kind": "drafters.kinds",
    "Request": "engine.request",
    "Sampling": "sampling",
    "Stats": "stats",
    "Step": "stats",
    "StreamStep": "api",
    "Target": "model.target",
    "TextStream": "text.stream",
    "Traits": "drafters.base",
    "custom_generate": "hf.generate",
    "load": "api",
    "register": "drafters.kinds",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("draftwing.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'draftwing' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"draftwing.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
