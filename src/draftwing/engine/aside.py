"""Texts that are decoded as if there were no drafter, where drafts were not worth it in those before.

A drafter that is never asked still reads prompts and keeps features, and takes its share of the caches: a twentieth of
the time of a small model that lies in these.
"""

from __future__ import annotations

from draftwing.budget.planner import Planner
from draftwing.drafters.base import Traits
from draftwing.engine.request import Request

__all__ = ["passes_over"]


def passes_over(request: Request, planner: Planner | None, traits: Traits) -> bool:
    """Whether a request that is about to be decoded alone is.

    Not where something speaks for drafts that other texts do not have, such as a grammar, nor with drafters that learn
    from what they see, or that cost next to nothing.
    """
    is_special = request.speculation is not None or request.constraint is not None or len(request.references) > 0
    learns = traits.learns or traits.forget is not None
    if planner is None or is_special or learns or not traits.costs_forwards:
        return False
    return planner.passes_over(request.sampling.max_tokens, request.sampling.temperature)
