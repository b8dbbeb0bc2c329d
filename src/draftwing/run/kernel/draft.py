"""Whole drafts in one call of the CPU kernel (``native/drafts.h``): what is waiting, then a tree level by level.

Shape suffixes: B rows, W entries, N nodes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from draftwing.run.kernel.built import Built
from draftwing.run.kernel.layout import Batch, Draft
from draftwing.run.request import Drafted, DraftRequest, Waiting
from draftwing.tree import DraftTree

__all__ = ["address", "grow_tree"]


def address(numbers: array[Any]) -> int:
    """Where they lie; they must outlive the call that reads them."""
    return numbers.buffer_info()[0]


def grow_tree(
    built: Built, batch: Batch, caught: Batch, waiting: Waiting, before: Sequence[int], request: DraftRequest
) -> Drafted:
    """Run what is waiting and grow a tree for every row.

    Args:
        built: the net.
        batch: slots, rotation and buffers of a level of every row; ``caught`` those of what is waiting.
        before: slots of each row before that of its root.
        request: what to grow.
    """
    rows, entries, program = len(waiting.tokens), waiting.num_entries, built.program
    room = 1 + request.width + (request.depth - 1) * request.width * request.width  # of a row's nodes
    numbers = np.empty((3, rows * room), dtype=np.int64)
    chances = np.empty((2, rows * room), dtype=np.float32)
    draft, kept = _asked(built, request)
    counts = array("q", map(len, waiting.tokens))
    draft.room, draft.counts = room, address(counts)
    draft.tokens, draft.parents, draft.places = (numbers.ctypes.data + 8 * i * rows * room for i in range(3))
    draft.told, draft.reached = chances.ctypes.data, chances.ctypes.data + 4 * rows * room
    batch.rows = caught.rows = rows
    caught.nodes = caught.tree_nodes = entries
    caught.first_node = 0
    flat = array("q")
    for ids in waiting.tokens:
        flat.extend(ids)
        flat.extend([-1] * (entries - len(ids)))
    fed, parents = array("q", waiting.lengths), array("q", [*range(-1, entries - 1)] * rows)
    caught.tokens, caught.lengths, caught.parents = map(address, (flat, fed, parents))
    lengths, roots = array("q", before), array("q", request.roots)
    batch.lengths = address(lengths)
    nodes = program.kernel.draft(program.ops, len(program), batch, caught, draft, address(roots))
    del kept
    size = rows * nodes
    tokens, above, places = (torch.from_numpy(each[:size].reshape(rows, nodes)) for each in numbers)
    told, reached = (torch.from_numpy(each[:size].reshape(rows, nodes)) for each in chances)
    tree = DraftTree(
        tokens, above, reached, told=told, effort=draft.effort, is_line=bool(draft.is_chain), depth=draft.deepest
    )
    return Drafted(tree, None if request.width == 1 else places, draft.levels - 1)


def _asked(built: Built, request: DraftRequest) -> tuple[Draft, list[object]]:
    """The request as the kernel reads it, and what it points to."""
    wanted, seeds, starts = (array("q", each) for each in (request.wanted, request.seeds, request.starts))
    temperatures, top_p, min_p = (array("f", each) for each in (request.temperatures, request.top_p, request.min_p))
    vocab = built.program.widths[built.logits]
    top_k = array("i", [min(k, vocab) for k in request.top_k])
    draft = Draft(
        depth=request.depth, width=request.width, most=request.most, vocab_size=vocab,
        num_catch_up=built.num_fuse, num_hidden=built.num_hidden, logits=built.logits, read=built.read,
        states=built.states, fed_back=-1 if built.states < 0 else built.out,
        sharpness=request.sharpness, kept=1 - request.miss,
        wanted=address(wanted), seeds=address(seeds), starts=address(starts), noise=request.noise,
        temperatures=address(temperatures), top_k=address(top_k), top_p=address(top_p), min_p=address(min_p),
    )  # fmt: skip
    rule = request.rule
    if rule is not None:
        draft.num_tables, draft.num_knots = rule.knots.shape
        draft.knots, draft.rates = rule.knots.ctypes.data, rule.rates.ctypes.data
        draft.gains, draft.costs = rule.gains.ctypes.data, rule.costs.ctypes.data
        draft.verify, draft.worth, draft.share = rule.verify.ctypes.data, rule.worth, rule.share
    return draft, [wanted, seeds, starts, temperatures, top_k, top_p, min_p, rule]
