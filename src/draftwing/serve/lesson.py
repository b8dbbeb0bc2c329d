"""One step of the classic rules, written down: the real p and q of a text at the place where a reader stopped.

The server itself draws with keyed noise, which needs no q. So that both ways can be told side by side, the lesson
decodes one more step from the same tokens in a loop of its own, by the rules of ``accept``, and keeps what they decide.

p = target, q = draft. Shape suffixes: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftwing.accept import RULES, KeyedDraws, Rule, children_of, multi_round, residual, without
from draftwing.decode import Decoder
from draftwing.errors import ConfigError
from draftwing.methods.base import Budget, Drafter
from draftwing.models.target import Target
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.serve.trace import Shown
from draftwing.tree import PAD, Accepted, DraftTree

NUM_TOP = 6  # tokens of each law that are named
CHAIN, TREE = Budget(4), Budget(2, 3)


class _Recorded(KeyedDraws):
    """Keyed draws that remember the last number they drew."""

    last = 0.0

    def _next(self) -> float:
        self.last = super()._next()
        return self.last

    def accept(self, prob: float) -> bool:
        accepted = super().accept(prob)
        self.tries.append((prob, self.last, accepted))
        return accepted

    def __init__(self, seed: int, position: int) -> None:
        super().__init__(seed, position)
        self.tries: list[tuple[float, float, bool]] = []


class _Watched:
    def __init__(self, *, replacement: bool) -> None:
        self._replacement = replacement
        self.found: tuple[list[int], list[int], Tensor, Tensor, _Recorded, int] | None = None

    def __call__(self, tree: DraftTree, scores: Tensor, sampling: SamplingBatch, starts: Sequence[int]) -> Accepted:
        used = [node for node, token in enumerate(tree.tokens[0].tolist()) if token != PAD]
        if tree.draft_probs is None and len(used) > 1:
            raise ConfigError("this draft names tokens without a law q that they were drawn from: choose a head")
        place = {node: i for i, node in enumerate(used)}
        tokens = [int(tree.tokens[0, node]) for node in used]
        parents = [place.get(int(tree.parents[0, node]), -1) for node in used]
        p = sampling.probs(scores)[0, used].double().cpu()
        q = p if tree.draft_probs is None else tree.draft_probs[0, used].double().cpu()
        draws = _Recorded(sampling.seeds[0], starts[0])
        path, bonus = multi_round(tokens, parents, p, q, draws, replacement=self._replacement)
        self.found = tokens, parents, p, q, draws, bonus
        device = tree.tokens.device
        kept = torch.tensor([[used[node] for node in path]], device=device)
        return Accepted(kept, torch.tensor([len(path) - 1], device=device), torch.tensor([bonus], device=device))


def lesson(
    target: Target,
    new_drafter: Callable[[], Drafter],
    ids: Sequence[int],
    sampling: Sampling,
    shown: Shown,
) -> dict[str, Any]:
    """Draft from ``ids`` once as a chain and once as a tree, and tell what the classic rules make of each.

    Args:
        target, new_drafter: whose p and q; the drafter must draw its children from q.
        ids: the text so far, the prompt in front.
        sampling: of the text. At temperature 0 both laws would be a single token: then it is told at 1.
        shown: how tokens are written.

    Returns:
        ``temperature``; ``chain`` and ``tree``: ``tries`` in order (token, node above, ``p`` and ``q`` of the token,
        the chance ``accept`` of keeping it, the draw ``u``, whether it was ``kept``, and the likeliest tokens of p and
        q then), and ``last``: the law that the token after them was drawn from, that token, and whether that was
        what rejections had left of p.

    Raises:
        ConfigError: the draft has no q.
        PromptError: no room for one more token.
    """
    if sampling.temperature == 0:
        sampling = replace(sampling, temperature=1.0)
    sampling = replace(sampling, max_tokens=CHAIN.depth + 2, ignore_eos=True, logprobs=None, laws=0, stop=())
    told = {}
    for name, budget in (("chain", CHAIN), ("tree", TREE)):
        base = RULES["speculative" if name == "chain" else "multi-round"]
        watched = _Watched(replacement=name == "chain")
        rule = Rule(base.name, watched, children=base.children, chain_only=base.chain_only)
        decoder = Decoder(target, new_drafter, rule, budget)
        decoder.admit(ids, sampling)
        decoder.step()
        if watched.found is not None:
            told[name] = _told(*watched.found, replacement=name == "chain", shown=shown)
    return {"temperature": sampling.temperature, **told}


def _told(
    tokens: list[int], parents: list[int], p: Tensor, q: Tensor, draws: _Recorded, bonus: int,
    *, replacement: bool, shown: Shown,
) -> dict[str, Any]:  # fmt: skip
    tries, waiting, node, is_rest = [], iter(draws.tries), 0, False
    laws = partial(_laws, shown=shown)
    target, draft = p[0], q[0]
    while True:
        target, draft, is_rest, kept = p[node], q[node], False, None
        for child in children_of(parents, node):
            token, (chance, drawn, accepted) = tokens[child], next(waiting)
            tries.append(
                {
                    "node": child, "parent": node, "id": token, "text": shown(token), "accept": chance, "u": drawn,
                    "p": float(target[token]), "q": float(draft[token]), "kept": accepted,
                    "laws": laws(target, draft, [token]),
                }
            )  # fmt: skip
            if accepted:
                kept = child
                break
            target, is_rest = residual(target, draft), True
            draft = draft if replacement else without(draft, token)
        if kept is None:
            break
        node = kept
    last = {"id": bonus, "text": shown(bonus), "laws": laws(target, None, [bonus]), "is_rest": is_rest}
    return {"root": {"id": tokens[0], "text": shown(tokens[0])}, "tries": tries, "last": last}


def _laws(p_V: Tensor, q_V: Tensor | None, named: Sequence[int], *, shown: Shown) -> list[dict[str, Any]]:
    """The likeliest tokens of both laws, and those that are named: id, text, p and q."""
    count = min(NUM_TOP, len(p_V))
    both = [p_V] if q_V is None else [p_V, q_V]
    likely = [token for law in both for token in law.topk(count).indices.tolist() if law[token] > 0]
    tokens = dict.fromkeys([*named, *likely])
    return [
        {"id": token, "text": shown(token), "p": float(p_V[token]), "q": None if q_V is None else float(q_V[token])}
        for token in sorted(tokens, key=lambda token: -float(p_V[token]))
    ]
