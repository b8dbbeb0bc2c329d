"""Speculative decoding for any Hugging Face causal LM, without changing what it says.

import draftwing as dw

lm = dw.load("path-or-hub-id", draft="path-or-hub-id | lookup | none")
for step in lm.stream("def quicksort(", temperature=0.8, seed=1):
    print(step.text, end="")
"""

from draftwing import errors
from draftwing.api import LM, Generation, StreamStep, load
from draftwing.drafters.base import Budget, Drafter
from draftwing.engine.decode import Decoder
from draftwing.engine.engine import Engine
from draftwing.engine.request import Request
from draftwing.errors import DraftwingError
from draftwing.hf.generate import custom_generate
from draftwing.model.target import Target
from draftwing.sampling import Sampling
from draftwing.stats import Stats, Step
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
]
__version__ = "0.1.0"
