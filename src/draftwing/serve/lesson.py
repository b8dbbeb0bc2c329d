"""One step of the classic acceptance rules for the inspector, with the probabilities of target and draft.

The server itself draws with keyed noise, which needs no draft probabilities. For comparison, a lesson decodes one step
from the same tokens by the rules of ``accept``, and records their decisions.

p = target, q = draft. Shape suffixes: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftwing.accept import RULES, KeyedDraws, Rule, children_of, multi_round, residual, without
from draftwing.decode import Decoder
from draftwing.errors import ConfigError
from draftwing.methods.base import Budget, Drafter
from draftwing.models.target import Target
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.serve.trace import TokenNames
from draftwing.tree import PAD, Accepted, DraftTree

_NUM_TOP = 6  # tokens listed per distribution
_CHAIN, _TREE = Budget(4), Budget(2, 3)


class _RecordedDraws(KeyedDraws):
    def __init__(self, seed: int, position: int) -> None:
        super().__init__(seed, position)
        self.tries: list[tuple[float, float, bool]] = []  # probability, uniform draw, accepted

    def accept(self, prob: float) -> bool:
        drawn = self._next()
        self.tries.append((prob, drawn, drawn < prob))
        return drawn < prob


def lesson(
    target: Target,
    new_drafter: Callable[[], Drafter],
    ids: Sequence[int],
    sampling: Sampling,
    names: TokenNames,
) -> dict[str, Any]:
    """Draft from ``ids`` as a chain and as a tree, and return the decisions of the classic rules.

    Args:
        target, new_drafter: the models; the drafter must draw children from its distribution q.
        ids: the prompt and the text so far.
        sampling: of the request. At temperature 0 both distributions would be a single token: 1 is used instead.
        names: names the tokens.

    Returns:
        ``temperature``; ``chain`` and ``tree``: ``tries`` in order (token, parent node, ``p`` and ``q`` of the token,
        the probability ``accept`` of keeping it, the draw ``u``, True in ``kept`` if it was, and the likeliest tokens
        of p and q at this point), and ``last``: the distribution and token after them, and True in ``is_rest`` if the
        distribution is the residual after a rejection.
    """
    temperature = sampling.temperature or 1.0
    sampling = replace(
        sampling, temperature=temperature, max_tokens=_CHAIN.depth + 2, ignore_eos=True, logprobs=None, laws=0, stop=()
    )
    result: dict[str, Any] = {"temperature": temperature}
    for name, budget in (("chain", _CHAIN), ("tree", _TREE)):
        is_chain = name == "chain"  # sampled with replacement

        def apply(
            tree: DraftTree,
            scores: Tensor,
            batch: SamplingBatch,
            starts: Sequence[int],
            name: str = name,
            is_chain: bool = is_chain,
        ) -> Accepted:
            used = [node for node, token in enumerate(tree.tokens[0].tolist()) if token != PAD]
            if tree.draft_probs is None and len(used) > 1:
                raise ConfigError("this draft has no distribution q that its tokens are drawn from: choose a head")
            place = {node: i for i, node in enumerate(used)}
            tokens = [int(tree.tokens[0, node]) for node in used]
            parents = [place.get(int(tree.parents[0, node]), -1) for node in used]
            p_NV = batch.probs(scores)[0, used].double().cpu()
            q_NV = p_NV if tree.draft_probs is None else tree.draft_probs[0, used].double().cpu()
            draws = _RecordedDraws(batch.seeds[0], starts[0])
            path, bonus = multi_round(tokens, parents, p_NV, q_NV, draws, replacement=is_chain)
            result[name] = _explain(tokens, parents, p_NV, q_NV, draws, bonus, names, replacement=is_chain)
            device = tree.tokens.device
            kept = torch.tensor([[used[node] for node in path]], device=device)
            return Accepted(kept, torch.tensor([len(path) - 1], device=device), torch.tensor([bonus], device=device))

        base = RULES["speculative" if is_chain else "multi-round"]
        rule = Rule(base.name, apply, children=base.children, chain_only=base.chain_only)
        decoder = Decoder(target, new_drafter, rule, budget)
        decoder.admit(ids, sampling)
        decoder.step()
    return result


def _explain(
    tokens: list[int], parents: list[int], p_NV: Tensor, q_NV: Tensor, draws: _RecordedDraws, bonus: int,
    names: TokenNames, *, replacement: bool,
) -> dict[str, Any]:  # fmt: skip
    """Repeat the walk of ``multi_round`` with its recorded draws, and describe each try."""

    def top(p_V: Tensor, q_V: Tensor | None, token: int) -> list[dict[str, Any]]:
        """Return the likeliest tokens of both distributions, and ``token``, by p."""
        laws = [p_V] if q_V is None else [p_V, q_V]
        likely = [t for law in laws for t in law.topk(min(_NUM_TOP, len(law))).indices.tolist() if law[t] > 0]
        return [
            {"id": t, "text": names(t), "p": float(p_V[t]), "q": None if q_V is None else float(q_V[t])}
            for t in sorted(dict.fromkeys([token, *likely]), key=lambda t: -float(p_V[t]))
        ]

    tries: list[dict[str, Any]] = []
    draw, node, p_V, q_V, is_rest = iter(draws.tries), 0, p_NV[0], q_NV[0], False
    children = children_of(parents, node)
    while children:
        child = children.pop(0)
        token, (accept, drawn, kept) = tokens[child], next(draw)
        tries.append(
            {
                "node": child, "parent": node, "id": token, "text": names(token), "accept": accept, "u": drawn,
                "p": float(p_V[token]), "q": float(q_V[token]), "kept": kept, "laws": top(p_V, q_V, token),
            }
        )  # fmt: skip
        if kept:
            node, p_V, q_V, is_rest = child, p_NV[child], q_NV[child], False
            children = children_of(parents, node)
        else:
            p_V, is_rest = residual(p_V, q_V), True
            q_V = q_V if replacement else without(q_V, token)
    last = {"id": bonus, "text": names(bonus), "laws": top(p_V, None, bonus), "is_rest": is_rest}
    return {"root": {"id": tokens[0], "text": names(tokens[0])}, "tries": tries, "last": last}
