"""Steps as the inspector draws them: the tree with its probabilities, the accepted path, the text and the times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from draftwing.dialogue import pieces_of
from draftwing.stats import RowStep, Step
from draftwing.text.tokenizer import TextStream, Tokenizer
from draftwing.tree import PAD

_PHASES = ("draft", "verify", "accept", "commit", "host")


class TokenNames:
    """Names of single tokens: their text, or the tokenizer's name if they have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        """Return a name, such as `` the``; a token that is part of a character has no text."""
        if token not in self._names:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            name: str | None = self._tokenizer.fast.id_to_token(token)
            if name is not None and name.startswith("\u2581") and not text.startswith(" "):
                text = " " + text  # SentencePiece's decoder drops the space of a first token
            self._names[token] = name or f"<{token}>" if not text or "\ufffd" in text else text
        return self._names[token]


class Tracer:
    """Traces the steps of one request, in their order.

    Args:
        tokenizer: the target's.
        prompt_ids: the request's.
        stop: its stop strings.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: tuple[str, ...] = ()) -> None:
        self._names = TokenNames(tokenizer)
        self._stream = TextStream(tokenizer, prompt_ids, stop)

    def trace(self, row: RowStep, step: Step | None, place: int = 0) -> dict[str, Any]:
        """Trace one step, or several merged ones (``step`` is None), of which only the text remains.

        Args:
            row: the request's share.
            step: the step.
            place: the index of ``row`` in the step.

        Returns:
            The result of ``step_trace``, and ``pieces``: the text by token, each with True if it was drafted.
        """
        pieces = [{"text": piece.text, "drafted": piece.is_drafted} for piece in pieces_of(row, self._stream)]
        if step is None:
            ids = list(row.token_ids)
            return {"position": row.position, "token_ids": ids, "num_tokens": len(ids), "pieces": pieces}
        return {**step_trace(step, place, self._names), "pieces": pieces}


def step_trace(step: Step, place: int, names: TokenNames) -> dict[str, Any]:
    """Return one row of a step as JSON values.

    Args:
        step: the step.
        place: the index of the row in it.
        names: names the tokens.

    Returns:
        ``position`` of the first emitted token, including the prompt; ``nodes`` of the tree, root first: ``id``,
        ``text``, ``parent`` (-1 for the root), ``depth``, ``chance``, the drafter's probability of the token, and
        ``reach``, that of its path (None if unknown), ``kept``, and ``law``, the target's distribution, if requested;
        ``path``, the kept nodes; ``bonus``; ``token_ids`` emitted; ``num_drafted``, ``num_accepted``, ``depth``;
        ``num_rows`` that shared the step; ``seconds`` by phase, of all rows together.
    """
    row, tree = step.rows[place], step.tree
    tokens, parents = tree.tokens[place].tolist(), tree.parents[place].tolist()
    used = [node for node, token in enumerate(tokens) if token != PAD]
    number = {node: i for i, node in enumerate(used)}
    path = [node for node in step.accepted.path[place].tolist() if node != PAD]
    chances, reaches = (
        [None] * len(tokens) if values is None else [_rounded(value) for value in values[place].tolist()]
        for values in (tree.node_probs, tree.confidence)
    )
    nodes: list[dict[str, Any]] = []
    for i, node in enumerate(used):
        parent = number.get(parents[node], -1)
        nodes.append(
            {
                "id": tokens[node],
                "text": names(tokens[node]),
                "parent": parent,
                "depth": nodes[parent]["depth"] + 1 if parent >= 0 else 0,
                "chance": chances[node] if i else None,
                "reach": reaches[node] if i else None,
                "kept": node in path,
            }
        )
        if row.laws is not None and i < len(row.laws):
            top = [
                {"id": token, "text": names(token), "p": _rounded(prob), "g": _rounded(noise)}
                for token, prob, noise in row.laws[i].chances
            ]
            nodes[-1]["law"] = {"drawn": row.laws[i].drawn, "top": top}
    bonus = int(step.accepted.bonus[place])
    return {
        "position": row.position,
        "nodes": nodes,
        "path": [number[node] for node in path],
        "bonus": {"id": bonus, "text": names(bonus)},
        "token_ids": list(row.token_ids),
        "num_tokens": len(row.token_ids),
        "num_drafted": row.num_drafted,
        "num_accepted": row.num_accepted,
        "depth": row.depth,
        "num_rows": len(step.rows),
        "seconds": {phase: round(getattr(step.timings, phase), 7) for phase in _PHASES},
    }


def _rounded(value: float) -> float | None:
    """Return six digits, to keep traces small; None for infinity and NaN, which JSON lacks."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
