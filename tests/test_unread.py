"""What waits to be read, against lists of every row's own entries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwing.methods.net_drafter import PendingFeatures

MOVES = st.lists(st.sampled_from(["admit", "admit empty", "remove", "step", "step", "step", "clear"]), max_size=40)


def check(found: torch.Tensor, rows: list[list[float]]) -> None:
    assert found.shape[0] == len(rows)
    assert found.shape[1] >= max(1, *map(len, rows))
    for row, own in enumerate(rows):
        assert found[row, : len(own), 0].tolist() == own


@settings(max_examples=200, deadline=None)
@given(moves=MOVES, seed=st.integers(0, 10**6), looks=st.booleans())
def test_every_row_keeps_its_own_entries_in_order(moves, seed, looks):
    """Rows come, go and take each other's places; a step leaves each a number of entries of its own."""
    unread, rows, lengths = PendingFeatures(), [], []
    draw, number = torch.Generator().manual_seed(seed), 0.0
    for move in ["admit", *moves]:
        if move.startswith("admit"):
            count = 0 if move.endswith("empty") else 1
            number += 1
            unread.admit(torch.full((1, count, 2), number), lengths)
            rows.append([number] * count)
            lengths.append(int(torch.randint(1, 9, (), generator=draw)))
        elif move == "remove" and len(rows) > 1:
            row = int(torch.randint(0, len(rows), (), generator=draw))
            unread.remove(row, lengths)
            rows[row], lengths[row] = rows[-1], lengths[-1]
            rows.pop(), lengths.pop()
        elif move == "step":
            kept = torch.randint(1, 4, (len(rows),), generator=draw).tolist()
            features = number + 1 + torch.arange(len(rows) * 4.0).view(len(rows), 4, 1).expand(-1, -1, 2)
            number += len(rows) * 4
            unread.add(features[:, : max(kept)], list(lengths))
            for row, count in enumerate(kept):
                rows[row].extend(features[row, :count, 0].tolist())
                lengths[row] += count
        elif move == "clear":
            unread.clear()
            rows = [[] for _ in rows]
            unread.add(torch.full((len(rows), 1, 2), number + 1), list(lengths))
            number += 1
            rows, lengths = [[number] for _ in rows], [length + 1 for length in lengths]
        if looks:
            check(unread.joined(lengths), rows)
    check(unread.joined(lengths), rows)
    check(unread.joined(lengths), rows)  # a draft whose step never ended asks again


@pytest.mark.parametrize("count", [0, 1])
def test_a_lone_row(count):
    unread = PendingFeatures()
    unread.admit(torch.ones(1, count, 3), [])
    assert unread.joined([4]).shape == (1, 1, 3)
