"""A drafter that knows the texts, for tests and tools/model_table.py."""

from __future__ import annotations

from typing import Any

from draftwing.methods.base import Drafter
from draftwing.tree import DraftTree


class Knows(Drafter):
    """Drafts known texts as chains, with a wrong sibling of each node, and all wrong at multiples of ``wrong_at``.

    Its chains have ``depth`` nodes, or as many as the budget says.
    """

    name, costs_forwards = "knows", False

    def __init__(self, texts: list[list[int]], wrong_at: int, depth: int | None = None, vocab_size: int = 61) -> None:
        self.texts, self.wrong_at, self.depth, self.vocab_size = texts, wrong_at, depth, vocab_size

    def propose(self, ctx: Any, sampling: Any, budget: Any) -> DraftTree:
        tokens, parents, size = [], [], self.vocab_size
        for row in ctx.rows:
            text = next((text for text in self.texts if text[: len(row.tokens)] == row.tokens), row.tokens)
            nodes, above, last = [row.tokens[-1]], [-1], 0
            stop = len(row.tokens) + (budget.depth if self.depth is None else self.depth)
            for i in range(len(row.tokens), min(len(text), stop)):
                right, wrong = (text[i] + (i % self.wrong_at == 0)) % size, (text[i] + 9) % size
                pair = [wrong, right] if i % 2 else [right, wrong]
                nodes, above = [*nodes, *pair], [*above, last, last]
                last = len(nodes) - 2 + pair.index(right)
            tokens.append(nodes)
            parents.append(above)
        return DraftTree.from_lists(tokens, parents, ctx.device)
