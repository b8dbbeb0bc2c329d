"""Rows run ahead of each other here, but are handed out column by column, as plain decoding writes them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftwing.engine.engine import Engine
from draftwing.errors import DraftwingWarning
from draftwing.sampling import Sampling
from draftwing.sampling_options import nth_seed
from draftwing.stats import Stats

__all__ = ["Columns", "Ends"]


class Ends:
    """When rows end: what ``generate`` made of eos tokens, lengths, times, stop strings and the caller's criteria.

    Lengths and end tokens are looked at on the host; all others are called as plain decoding calls them, once for
    each column, with all rows as far as that column.

    Attributes:
        tokens: end tokens.
        length: new tokens at most.
        pads: whether a row that ended is filled up while the others go on; without end tokens it is written on.
    """

    def __init__(self, criteria: Iterable[Any], input_ids: Tensor, room: int) -> None:
        from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

        criteria = [*criteria]
        self._room, width = room, input_ids.shape[1]
        lengths = [each.max_length - width for each in criteria if type(each) is MaxLengthCriteria]
        ids = [torch.as_tensor(each.eos_token_id) for each in criteria if type(each) is EosTokenCriteria]
        others = [each for each in criteria if type(each) not in (MaxLengthCriteria, EosTokenCriteria)]
        self.tokens = tuple(dict.fromkeys(token for each in ids for token in each.reshape(-1).tolist()))
        self.pads = any(hasattr(each, "eos_token_id") for each in criteria)
        self._wanted = max(min(lengths, default=room + 1), 1)  # plain decoding writes one token whatever the length is
        self.length = min(self._wanted, max(room, 1))
        self._others: Any = StoppingCriteriaList(others)
        self._sequences = input_ids

    def __call__(self, column: Sequence[int], number: int) -> list[bool]:
        """Which rows end with a column, the ``number``-th."""
        full = number >= self.length
        if full and self.length < self._wanted:
            warnings.warn(
                f"the text was cut after {self.length} new tokens, where the model's context is full, and "
                f"{self._wanted} were asked for: lower max_new_tokens, or shorten the prompt",
                DraftwingWarning,
                stacklevel=2,
            )
        ended = [full or token in self.tokens for token in column]
        if self._others:
            fresh = torch.tensor(column, dtype=self._sequences.dtype, device=self._sequences.device)
            self._sequences = torch.cat([self._sequences, fresh[:, None]], 1)
            found = self._others(self._sequences, None).tolist()
            ended = [one or other for one, other in zip(ended, found, strict=True)]
        return ended


class Columns:
    """The new tokens, column by column, each with a token of every row.

    A step gives every row as many tokens as it may; a column is complete when the last row has reached it.

    Args:
        ends: when rows end.
        pad: what rows are filled up with once they ended.
        streamer: hears every column as soon as it is complete; None: nobody does.
    """

    def __init__(self, ends: Ends, pad: int, streamer: Any) -> None:
        self._ends, self._pad, self._streamer = ends, pad, streamer
        self.columns: list[list[int]] = []

    def decode(self, engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, vocab_size: int) -> Stats:
        """Fill ``columns``; every row but the first draws a seed that follows from the first one's."""
        ends, stats = self._ends, Stats()
        inside = tuple(token for token in ends.tokens if 0 <= token < vocab_size)  # -1 means never to some
        sampling = replace(sampling, max_tokens=ends.length, stop_tokens=inside if ends.pads else ())
        requests = [
            engine.submit(prompt, replace(sampling, seed=nth_seed(sampling.seed or 0, row)))
            for row, prompt in enumerate(prompts)
        ]
        written = [request.token_ids for request in requests]
        ended = [False] * len(requests)
        for step in engine.steps():
            stats.add(step)
            for request in requests:
                if request.error is not None:
                    raise request.error
            self._complete(written, ended)
            for request, is_over in zip(requests, ended, strict=True):
                if is_over and (ends.pads or all(ended)):
                    engine.cancel(request)
        if self._streamer is not None:
            self._streamer.end()
        return stats

    def _complete(self, written: Sequence[Sequence[int]], ended: list[bool]) -> None:
        """Hand out the columns that all rows have reached, and mark in ``ended`` the rows that end with them."""
        pads, number = self._ends.pads, len(self.columns)
        while not all(ended):
            live = [not (pads and over) for over in ended]
            if any(lives and len(row) <= number for lives, row in zip(live, written, strict=True)):
                return
            column = [row[number] if lives else self._pad for lives, row in zip(live, written, strict=True)]
            self.columns.append(column)
            number += 1
            ended[:] = [old or new for old, new in zip(ended, self._ends(column, number), strict=True)]
            if self._streamer is not None:
                self._streamer.put(torch.tensor(column))
