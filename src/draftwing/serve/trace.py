"""The inspector's views of decoding: steps as trees with their times, and one step by the classic acceptance rules.

The server itself draws with keyed noise, which needs no draft probabilities. For comparison, a lesson decodes one step
from the same tokens by the rules of ``accept``, and records their decisions.

p = target, q = draft. Shape suffixes: N nodes, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftwing.accept import RULES, KeyedDraws, Rule, multi_round, residual
from draftwing.decode import Decoder
from draftwing.dialogue import pieces_of
from draftwing.errors import ConfigError
from draftwing.methods.base import Budget, Drafter
from draftwing.methods.ensemble import proposals
from draftwing.models.target import Target
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.stats import RowStep, Step
from draftwing.text.tokenizer import TextStream, Tokenizer
from draftwing.tree import PAD, Accepted, DraftTree

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
    """Traces the steps of one request, in their order."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        self._names = TokenNames(tokenizer)
        self._stream = TextStream(tokenizer, prompt_ids, sampling.stop, min_ids=sampling.min_tokens)

    def trace(self, row: RowStep, step: Step | None, place: int = 0) -> dict[str, Any]:
        """Return ``step_trace`` of a step, and ``pieces``: the text by token, each with True if it was drafted.

        Of several merged steps (``step`` is None) only the text remains: ``drafted`` is None.
        """
        pieces = [{"text": piece.text, "drafted": piece.is_drafted} for piece in pieces_of(row, self._stream)]
        if step is None:
            ids, text = list(row.token_ids), [{"text": row.text, "drafted": None}]
            return {"position": row.position, "token_ids": ids, "num_tokens": len(ids), "pieces": text}
        return {**step_trace(step, place, self._names), "pieces": pieces}


def step_trace(step: Step, place: int, names: TokenNames) -> dict[str, Any]:
    """Return the row at ``place`` in a step as JSON values.

    Returns:
        ``position`` of the first emitted token, including the prompt; ``nodes`` of the tree, root first: ``id``,
        ``text``, ``parent`` (-1 for the root), ``depth``, ``chance``, the drafter's probability of the token, and
        ``reach``, that of its path (None if unknown), ``kept``, and ``distribution``, the target's, if requested;
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
        if row.node_distributions is not None and i < len(row.node_distributions):
            top = [
                {"id": token, "text": names(token), "p": _rounded(prob), "g": _rounded(noise)}
                for token, prob, noise in row.node_distributions[i].chances
            ]
            nodes[-1]["distribution"] = {"drawn": row.node_distributions[i].drawn, "top": top}
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


# --- lessons ---------------------------------------------------------------------------------------------------------

_NUM_TOP = 6  # tokens listed per distribution
_CHAIN, _TREE = Budget(4), Budget(2, 3)


def lesson(
    target: Target,
    new_drafter: Callable[[], Drafter],
    ids: Sequence[int],
    sampling: Sampling,
    names: TokenNames,
) -> dict[str, Any]:
    """Draft from ``ids`` as a chain and as a tree, and return the decisions of the classic rules.

    At temperature 0 both distributions would be a single token: 1 is used instead. Raises ConfigError if the drafter
    does not draw children from a distribution q.

    Returns:
        ``temperature``; ``chain`` and ``tree``: ``tries`` in order (token, parent node, ``p`` and ``q`` of the token,
        the probability ``accept`` of keeping it, the draw ``u``, True in ``kept`` if it was, and the likeliest tokens
        of p and q at this point), and ``last``: the distribution and token after them, and True in ``is_rest`` if the
        distribution is the residual after a rejection.
    """
    temperature = sampling.temperature or 1.0
    ends: dict[str, Any] = {"max_tokens": _CHAIN.depth + 2, "ignore_eos": True, "stop": ()}
    sampling = replace(sampling, temperature=temperature, logprobs=None, node_distributions=0, **ends)
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
            used, nodes = (tree.tokens[0] != PAD).nonzero()[:, 0].tolist(), proposals(tree)[0]
            tokens, parents = nodes.tokens, nodes.parents
            if tree.draft_probs is None and len(used) > 1:
                raise ConfigError("this draft has no distribution q that its tokens are drawn from: choose a head")
            p_NV = batch.probs(scores)[0, used].double().cpu()
            q_NV = p_NV if tree.draft_probs is None else tree.draft_probs[0, used].double().cpu()
            draws, tries, last_V = KeyedDraws(batch.seeds[0], starts[0]), list[dict[str, Any]](), p_NV[0]

            def on_try(child: int, p_V: Tensor, q_V: Tensor, accept: float, is_kept: bool) -> None:
                nonlocal last_V
                token = tokens[child]
                tries.append(
                    {
                        "node": child,
                        "parent": parents[child],
                        "id": token,
                        "text": names(token),
                        "accept": accept,
                        "u": draws.drawn,
                        "kept": is_kept,
                        "p": float(p_V[token]),
                        "q": float(q_V[token]),
                        "distributions": _likeliest(p_V, q_V, token, names),
                    }
                )
                last_V = p_NV[child] if is_kept else residual(p_V, q_V)

            path, bonus = multi_round(tokens, parents, p_NV, q_NV, draws, replacement=is_chain, on_try=on_try)
            last = {"id": bonus, "text": names(bonus), "distributions": _likeliest(last_V, None, bonus, names)}
            last["is_rest"] = bool(tries) and not tries[-1]["kept"]
            result[name] = {"root": {"id": tokens[0], "text": names(tokens[0])}, "tries": tries, "last": last}
            device = tree.tokens.device
            kept = torch.tensor([[used[node] for node in path]], device=device)
            return Accepted(kept, torch.tensor([len(path) - 1], device=device), torch.tensor([bonus], device=device))

        base = RULES["speculative" if is_chain else "multi-round"]
        rule = Rule(base.name, apply, children=base.children, chain_only=base.chain_only)
        decoder = Decoder(target, new_drafter, rule, budget)
        decoder.admit(ids, sampling)
        decoder.step()
    return result


def _likeliest(p_V: Tensor, q_V: Tensor | None, token: int, names: TokenNames) -> list[dict[str, Any]]:
    """Return the likeliest tokens of both distributions, and ``token``, by p."""
    distributions = [p_V] if q_V is None else [p_V, q_V]
    likely = [
        t for probs in distributions for t in probs.topk(min(_NUM_TOP, len(probs))).indices.tolist() if probs[t] > 0
    ]
    return [
        {"id": t, "text": names(t), "p": float(p_V[t]), "q": None if q_V is None else float(q_V[t])}
        for t in sorted(dict.fromkeys([token, *likely]), key=lambda t: -float(p_V[t]))
    ]
