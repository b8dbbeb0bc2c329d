"""Speculation chosen per request, and what it brought, in vLLM's words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from draftwing.drafters.base import Budget
from draftwing.engine.wishes import AtMost, cut_to_nodes
from draftwing.errors import ConfigError, shown
from draftwing.serve.fields import Speculation
from draftwing.stats import RowStep

__all__ = ["budget_of", "figures"]


def budget_of(wish: Speculation) -> Budget | AtMost | str | None:
    """How much to draft: a budget, ``none``, or what the server does by itself: None, or up to a size.

    Raises:
        ConfigError: a tree that is none.
    """
    if wish.draft == "none" or wish.max_nodes == 0:
        return "none"
    tree = wish.tree or "auto"
    kind, _, numbers = tree.partition(":")
    try:
        if kind == "chain":
            budget = Budget(int(numbers))
        elif kind == "dynamic":
            nodes, depth, width = map(int, numbers.split(","))
            budget = Budget(depth, width, nodes)
        elif tree == "auto":
            return None if wish.max_nodes is None else AtMost(wish.max_nodes)
        else:
            raise ValueError
    except ConfigError as error:
        raise ConfigError(f"speculation.tree {shown(tree)}: {error}") from error
    except ValueError:
        raise ConfigError(
            f"speculation.tree must be auto, chain:K or dynamic:NODES,DEPTH,WIDTH, found {shown(tree)}: write chain:5, "
            f"or dynamic:59,8,10"
        ) from None
    return budget if wish.max_nodes is None else cut_to_nodes(budget, wish.max_nodes)


def figures(rows: Iterable[RowStep], *, detailed: bool = False) -> dict[str, Any]:
    """What speculation brought in these steps.

    Args:
        rows: of all steps; those that drafted nothing count nowhere.
        detailed: with two lists that have an entry for each step that drafted.
    """
    drafted, accepted = [], []
    for row in rows:
        if row.num_drafted:
            drafted.append(row.num_drafted)
            accepted.append(row.num_accepted)
    histogram = [0] * (max(accepted, default=-1) + 1)
    for num in accepted:
        histogram[num] += 1
    found: dict[str, Any] = {
        "mean_acceptance_length": 1 + sum(accepted) / max(len(accepted), 1),
        "draft_acceptance_rate": sum(accepted) / max(sum(drafted), 1),
        "acceptance_histogram": histogram,
        "num_spec_steps": len(drafted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
    }
    if detailed:
        found |= {"per_step_accepted": accepted, "per_step_drafted": drafted}
    return {"speculative_decoding": found}
