"""Speculative decoding for any Hugging Face causal LM, without changing what it says.

import draftwing as dw

lm = dw.load("path-or-hub-id", draft="path-or-hub-id | lookup | none")
for step in lm.stream("def quicksort(", temperature=0.8, seed=1):
    print(step.text, end="")
"""

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
