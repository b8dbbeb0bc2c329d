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
    from draftwing.decode import Decoder
    from draftwing.engine import Engine
    from draftwing.errors import DraftwingError
    from draftwing.hf import custom_generate
    from draftwing.lm import LM, Generation, StreamStep
    from draftwing.loading import load
    from draftwing.methods.base import Budget, Drafter
    from draftwing.methods.method import DraftMethod, NetMethod
    from draftwing.methods.registry import register
    from draftwing.models.target import Target
    from draftwing.request import Request
    from draftwing.sampling import Sampling
    from draftwing.stats import Stats, Step
    from draftwing.text.grammar import Grammar
    from draftwing.text.tokenizer import TextStream
    from draftwing.tree import Accepted, DraftTree

__all__ = [
    "LM",
    "Accepted",
    "Budget",
    "Decoder",
    "DraftMethod",
    "DraftTree",
    "Drafter",
    "DraftwingError",
    "Engine",
    "Generation",
    "Grammar",
    "NetMethod",
    "Request",
    "Sampling",
    "Stats",
    "Step",
    "StreamStep",
    "Target",
    "TextStream",
    "custom_generate",
    "errors",
    "load",
    "register",
]
__version__ = "0.2.0"

# The module of each name, imported at first use: torch takes seconds, and ``draftwing --help`` needs none of it.
_HOMES = {
    "LM": "lm",
    "Accepted": "tree",
    "Budget": "methods.base",
    "Decoder": "decode",
    "DraftMethod": "methods.method",
    "DraftTree": "tree",
    "Drafter": "methods.base",
    "DraftwingError": "errors",
    "Engine": "engine",
    "Generation": "lm",
    "Grammar": "text.grammar",
    "NetMethod": "methods.method",
    "Request": "request",
    "Sampling": "sampling",
    "Stats": "stats",
    "Step": "stats",
    "StreamStep": "lm",
    "Target": "models.target",
    "TextStream": "text.tokenizer",
    "custom_generate": "hf",
    "load": "loading",
    "register": "methods.registry",
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
