"""Speculative decoding on one page: slow, and short enough to be seen to be correct.

A drafter proposes a tree of tokens. Its root is the *pending* token: already emitted, not yet in the KV cache. The
target scores all nodes in one forward, an acceptance rule keeps a path from the root, and the token after the path
(the *bonus*) is drawn from the target. So every step emits at least one token, and a lone root is ordinary decoding.

Why the output does not depend on the drafter: under the rule ``match`` the target draws a token at every node with
noise that is a hash of (seed, position, token id), and the walk follows a child only if it carries that very token.
The classic rules keep the target's distribution instead.

The decoder and engine compute the same thing faster and for many requests at once; ``tests/test_reference.py``
compares them with this file for every drafter and every rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from draftwing.accept import get_rule
from draftwing.methods.base import Budget, Drafter
from draftwing.models.target import Target
from draftwing.noise import KeyedNoise
from draftwing.sampling import Sampling, SamplingBatch


@torch.inference_mode()
def generate(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    rule: str = "match",
    budget: Budget | None = None,
) -> list[int]:
    """Generate the tokens after one prompt.

    Args:
        target: the model whose output this is.
        drafter: a fresh one; ``NoDrafter()`` for ordinary decoding.
        prompt_ids: at least one token.
        sampling: temperature, filters, penalties, seed, ``max_tokens`` and stop tokens.
        rule: a name in ``accept.RULES``.
        budget: shape of the trees.

    Returns:
        The generated token ids. An end token, if one was drawn, is the last of them.
    """
    accept = get_rule(rule, lossless=False)
    budget = replace(budget or Budget(), children=accept.children)
    batch = SamplingBatch([sampling], KeyedNoise(target.vocab_size, target.device), target.device)
    end_tokens = {*sampling.stop_tokens, *(() if sampling.ignore_eos else target.eos_ids)}

    # Prefill: cache every prompt token but the last, which becomes pending. The drafter may read hidden states.
    ctx = target.new_context(drafter.features)
    drafter.admit(ctx, target.prefill(ctx, prompt_ids))
    row, generated = ctx.rows[0], list[int]()

    while True:
        # Propose: no deeper than what may still be emitted.
        room = min(sampling.max_tokens - len(generated), target.room(row.length))
        shape = replace(budget, depth=min(budget.depth, room - 1)) if budget.paths is None else budget
        tree = drafter.propose(ctx, batch, shape)
        tree = tree.prune(ctx.tensor([room - 1]), room - 1) if tree.max_depth >= room else tree

        # Verify: one forward over all nodes, then the rule walks down the tree.
        output = target.forward(ctx, tree)
        logits = batch.adjusted(output.logits, tree, ctx.history())  # penalties and biases
        proposed = tree.proposed  # without nodes that are scored for the drafter's own use
        scores = batch.filtered(logits[:, : proposed.num_nodes])  # temperature, top-k, top-p, min-p
        accepted = accept.apply(proposed, scores, batch, [row.length + 1])

        # Commit: the kept path's keys and values stay in the cache; the drafter sees what became of its tree.
        target.commit(ctx, proposed, accepted)
        drafter.observe(ctx, tree, accepted, output)

        # Emit the accepted nodes and the bonus, which is the next pending token.
        path = accepted.path[0, 1 : 1 + int(accepted.num[0])]
        emitted = [*proposed.tokens[0, path].tolist(), int(accepted.bonus[0])]
        row.tokens += emitted
        row.length += len(emitted)
        for token in emitted:
            generated.append(token)
            if token in end_tokens or len(generated) == sampling.max_tokens or len(row.tokens) >= target.max_length:
                return generated
