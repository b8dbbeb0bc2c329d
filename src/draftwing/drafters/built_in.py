"""The kinds of drafts that come with Draftwing, in the order in which they are shown."""

from __future__ import annotations

from draftwing.drafters.entries.block import BLOCK
from draftwing.drafters.entries.causal_lm import CAUSAL_LM
from draftwing.drafters.entries.eagle import EAGLE
from draftwing.drafters.entries.itself import ITSELF
from draftwing.drafters.entries.kangaroo import KANGAROO
from draftwing.drafters.entries.lookahead import LOOKAHEAD
from draftwing.drafters.entries.mtp import MTP
from draftwing.drafters.entries.plain import PLAIN
from draftwing.drafters.entries.retrieval import RETRIEVAL
from draftwing.drafters.entries.sublayers import SUBLAYERS
from draftwing.drafters.kind import Kind

__all__ = ["BUILT_IN"]

BUILT_IN: tuple[Kind, ...] = (
    *PLAIN,
    *LOOKAHEAD,
    *EAGLE,
    MTP,
    *BLOCK,
    *KANGAROO,
    *SUBLAYERS,
    *ITSELF,
    *RETRIEVAL,
    CAUSAL_LM,
)
