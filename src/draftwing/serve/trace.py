"""A step as the inspector draws it: the tree with its chances, what was kept of it, its text, where the time went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from draftwing.dialogue import Piece, pieces_of
from draftwing.stats import Law, RowStep, Step
from draftwing.text.tokenizer import TextStream, Tokenizer
from draftwing.tree import PAD

_PHASES = ("draft", "verify", "accept", "commit", "host")


class Shown:
    """How single tokens are written: as their text where they are one, else as the tokenizer names them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        """Such as `` the``; what is no text by itself, such as part of a character, has a name."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._written(token)
        return found

    def _written(self, token: int) -> str:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        name: str | None = self._tokenizer.fast.id_to_token(token)
        if name is not None and name.startswith("\u2581") and not text.startswith(" "):
            text = " " + text  # SentencePiece's own decoder drops the space in front of a first token
        return name or f"<{token}>" if not text or "\ufffd" in text else text


class Tracer:
    """Traces the steps of one request, in their order.

    Args:
        tokenizer: the target's.
        prompt_ids: the request's.
        stop: its stop strings.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._shown = tokenizer, Shown(tokenizer)
        self._stream = TextStream(tokenizer, prompt_ids, stop)

    def trace(self, row: RowStep, step: Step | None, place: int = 0) -> dict[str, Any]:
        """Of one step; of several that nobody read in time (``step`` is None) no more than the text is known.

        Args:
            row: the request's share.
            step: the step.
            place: of the request among the step's rows.

        Returns:
            What ``step_trace`` gives, and ``pieces``: the step's text token by token, each with whether it was drafted.
        """
        pieces = [_piece(piece) for piece in pieces_of(row, self._stream)]
        if step is None:
            ids = list(row.token_ids)
            return {"position": row.position, "token_ids": ids, "num_tokens": len(ids), "pieces": pieces}
        return {**step_trace(step, place, self._tokenizer, self._shown), "pieces": pieces}


def step_trace(step: Step, place: int, tokenizer: Tokenizer, shown: Shown | None = None) -> dict[str, Any]:
    """One row of a step as plain JSON values.

    Args:
        step: the step.
        place: of the row in it.
        tokenizer: the target's.
        shown: how tokens are written, where that is kept from step to step.

    Returns:
        ``position`` of the first emitted token, the prompt counted; ``nodes`` of the tree, the root first: ``id``,
        ``text``, ``parent`` (-1 for the root), ``depth``, ``chance`` that the drafter gives it and ``reach`` of its
        whole path (None where it says nothing), whether it was ``kept``, and its ``law`` where the request asks for
        that; ``path``, the kept nodes; ``bonus``; ``token_ids`` emitted; ``num_drafted``, ``num_accepted``, ``depth``;
        ``num_rows`` that shared the step; ``seconds`` by phase, of all rows together.
    """
    row, tree, shown = step.rows[place], step.tree, shown or Shown(tokenizer)
    tokens, parents = tree.tokens[place].tolist(), tree.parents[place].tolist()
    used = [node for node, token in enumerate(tokens) if token != PAD]
    number = {node: i for i, node in enumerate(used)}
    path = [node for node in step.accepted.path[place].tolist() if node != PAD]
    told, reach = (None if each is None else each[place].tolist() for each in (tree.node_probs, tree.confidence))
    nodes: list[dict[str, Any]] = []
    for i, node in enumerate(used):
        above = number.get(parents[node], -1)
        nodes.append(
            {
                "id": tokens[node],
                "text": shown(tokens[node]),
                "parent": above,
                "depth": nodes[above]["depth"] + 1 if above >= 0 else 0,
                "chance": _number(told[node]) if told is not None and i else None,
                "reach": _number(reach[node]) if reach is not None and i else None,
                "kept": node in path,
            }
        )
        if row.laws is not None and i < len(row.laws):
            nodes[-1]["law"] = _law(row.laws[i], shown)
    bonus = int(step.accepted.bonus[place])
    return {
        "position": row.position,
        "nodes": nodes,
        "path": [number[node] for node in path],
        "bonus": {"id": bonus, "text": shown(bonus)},
        "token_ids": list(row.token_ids),
        "num_tokens": len(row.token_ids),
        "num_drafted": row.num_drafted,
        "num_accepted": row.num_accepted,
        "depth": row.depth,
        "num_rows": len(step.rows),
        "seconds": {phase: round(getattr(step.timings, phase), 7) for phase in _PHASES},
    }


def _piece(piece: Piece) -> dict[str, Any]:
    return {"text": piece.text, "drafted": piece.is_drafted}


def _law(law: Law, shown: Shown) -> dict[str, Any]:
    top = [
        {"id": token, "text": shown(token), "p": _number(chance), "g": _number(noise)}
        for token, chance, noise in law.chances
    ]
    return {"drawn": law.drawn, "top": top}


def _number(value: float) -> float | None:
    """Short enough to be sent for every node; JSON has no infinity and no NaN."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
