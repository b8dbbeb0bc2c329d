"""Measure the costs of a step on this machine with a decode loop, for forecasts and comparisons.

A stand-in drafter proposes trees of every size to time the target; the real one drafts at every depth. The sizes take
turns, so that changes of the machine's speed affect all alike. Decoding does not need these costs: the planner learns
its own from the steps it takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch

from draftwing.budget import CONFIG
from draftwing.budget.costs import Costs, Curve
from draftwing.decode import Decoder
from draftwing.errors import ConfigError
from draftwing.methods.base import Budget, Drafter, NoDrafter
from draftwing.models.context import Context, FeatureSpec
from draftwing.models.lean import LeanContext
from draftwing.models.target import Target
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.stats import Timings
from draftwing.tree import DraftTree

PROMPT = 2  # tokens of the prompts that measurements read


class Series:
    """Seconds of one kind of step by count: nodes for the target, depth for the drafter.

    Args:
        counts: in rising order.
        time_step: takes a step and returns its seconds, or those of the part that matters.
        guess: seconds that a first step may take, by count; None for a series that is always begun. The others are
            slow, so that half as many rounds must do.
    """

    def __init__(
        self, counts: Sequence[int], time_step: Callable[[int], float], guess: Callable[[int], float] | None = None
    ) -> None:
        self.samples: dict[int, list[float]] = {count: [] for count in counts}
        self.time_step, self.guess = time_step, guess
        self._elapsed: dict[int, float] = {}

    def predict(self, count: int) -> float:
        """Return the seconds that a step will take: as the last time, or in proportion to the last smaller count."""
        if not self._elapsed:
            return 0.0 if self.guess is None else self.guess(count)
        last = max((known for known in self._elapsed if known <= count), default=min(self._elapsed))
        return self._elapsed[last] * count / last

    def run(self, count: int, *, counts: bool = True) -> None:
        """Take a step, and keep its time if it ``counts``."""
        start = time.perf_counter()
        seconds = self.time_step(count)
        self._elapsed[count] = time.perf_counter() - start
        if counts:
            self.samples[count].append(seconds)

    @property
    def seconds(self) -> dict[int, list[float]]:
        """Seconds by count, without the first step of each, which finds cold caches."""
        return {count: samples[1:] or samples for count, samples in self.samples.items() if samples}


class _Filler(NoDrafter):
    """Propose a given number of nodes, almost all of which are rejected."""

    name = "filler"

    def __init__(self, features: FeatureSpec) -> None:
        self.features, self.nodes = features, 1

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Repeat the pending token in two branches, since trees need an attention mask."""
        tokens = ctx.pending()[:, None].repeat(1, self.nodes)
        if self.nodes < 3:
            return DraftTree.chain(tokens)
        parents = torch.arange(-2, self.nodes - 2, device=ctx.device).clamp(min=-1).expand_as(tokens).clone()
        parents[:, 1:3] = 0
        return DraftTree(tokens, parents)


class _Bench:
    """A decode loop with ``rows`` rows of ``context`` tokens, whose steps are timed. It is made for its first step."""

    def __init__(self, target: Target, new_drafter: Callable[[], Drafter], rows: int, context: int) -> None:
        self.target, self.new_drafter = target, new_drafter
        self.prompt = [(7 * i + 3) % target.vocab_size for i in range(PROMPT + 1)]  # the last one is pending
        self.rows, self.length = rows, context
        self.ids: set[int] = set()

    @cached_property
    def loop(self) -> Decoder:
        self.drafter = self.new_drafter()
        loop = Decoder(self.target, self.drafter, budget=Budget(1))
        self._admit(loop)
        return loop

    def _admit(self, loop: Decoder) -> None:
        sampling = Sampling(max_tokens=self.target.max_length, ignore_eos=True)
        self.ids = {loop.admit(self.prompt, sampling) for _ in range(self.rows)}
        if isinstance(loop.ctx, LeanContext):  # slots of zeros take as long to read as others
            for row in loop.ctx.rows:
                row.tokens[1:1] = [self.prompt[0]] * (self.length - row.length)
                row.length = max(self.length, row.length)

    def verify(self, nodes: int) -> float:
        """Return the seconds of a step without the draft."""
        ctx = self.loop.ctx
        assert isinstance(self.drafter, _Filler)
        self.drafter.nodes = nodes
        times = self._step()
        if isinstance(ctx, LeanContext):  # rows keep their length
            for row in ctx.rows:
                row.length = self.length
                del row.tokens[row.length + 1 :]
        return times.verify + times.accept + times.commit

    def draft(self, budget: Budget) -> float:
        """Return the seconds of a step's draft."""
        self.loop.budget = budget
        return self._step().draft

    def _step(self) -> Timings:
        loop = self.loop
        if loop.num_running < self.rows:  # a row reached the end of its context
            for request in self.ids:
                loop.retire(request)
            self._admit(loop)
        step = loop.step()
        self.ids -= {row.request_id for row in step.rows if row.finish_reason is not None}
        return step.timings


def _take_turns(all_series: Sequence[Series], seconds: float) -> None:
    """Take the steps of all series in turns, as far as they fit into ``seconds``."""
    end = time.perf_counter() + seconds
    for turn in range(CONFIG.rounds):
        for series in all_series:
            if series.guess is not None and turn >= 2 and turn % 2 == 0:
                continue  # timed in half of the rounds
            for index, count in enumerate(series.samples):
                is_cold = turn > 0 and index == 0  # other steps have emptied the caches, so another step comes first
                is_first = turn == 0 and index == 0 and series.guess is None
                if is_first or time.perf_counter() + (1 + is_cold) * series.predict(count) <= end:
                    if is_cold:
                        series.run(count, counts=False)
                    series.run(count)


def measure(
    target: Target,
    new_drafter: Callable[[], Drafter],
    seconds: float | None = None,
    *,
    long: int | None = None,
) -> Costs:
    """Measure the costs of a target with a drafter.

    Args:
        target: as loaded: its arithmetic, device and threads matter.
        new_drafter: makes the drafter.
        seconds: for all steps together, ``CONFIG.seconds`` by default. On a slow machine large sizes may not be
            measured: they are extrapolated.
        long: tokens of the row that gives the cost per token of context; half the context at most.

    Raises:
        ConfigError: the target has no room for a prompt of two tokens and a tree.
    """
    drafter, room = new_drafter(), target.max_length // 2
    if room < 8:
        raise ConfigError(f"{target.name} has a context of {target.max_length} tokens: at least 16 are needed")
    (_, context), (num_rows, _), (_, long_context) = CONFIG.batches
    is_lean = target.supports_pages
    context = min(context, room // 2) if is_lean else PROMPT
    long = min(long or long_context, room)
    max_nodes = min(room // 2, target.vocab_size)
    nodes = [count for count in CONFIG.nodes if count <= max_nodes]
    small, large, some = nodes[:-2], nodes[-2:], nodes[:-2:3]
    depths = [depth for depth in CONFIG.depths if depth < room // 2] if drafter.costs_forwards else []
    width = CONFIG.tree.width if depths and target.vocab_size > CONFIG.tree.width else 1

    def filler() -> Drafter:
        return _Filler(drafter.features)

    bench, length = partial(_Bench, target), min(drafter.context, room)
    one, batch, long_row = bench(filler, 1, context), bench(filler, num_rows, context), bench(filler, 1, long)
    alone, together = bench(new_drafter, 1, length), bench(new_drafter, num_rows, length)
    verify = Series(small, one.verify)
    verify_large = Series(large, one.verify, verify.predict)
    by_rows = Series(some, batch.verify, lambda n: num_rows * verify.predict(n))
    by_context = Series(some if is_lean else [], long_row.verify, verify.predict)
    chain = Series(depths, lambda depth: alone.draft(Budget(depth)))
    tree = Series(
        depths if width > 1 else [],
        lambda depth: alone.draft(Budget(depth, width, CONFIG.nodes[-1])),
        lambda depth: width * chain.predict(depth),
    )
    chain_rows = Series(
        depths[-1:], lambda depth: together.draft(Budget(depth)), lambda depth: num_rows * chain.predict(depth)
    )
    all_series = (verify, chain, verify_large, by_rows, by_context, tree, chain_rows)
    _take_turns(all_series, CONFIG.seconds if seconds is None else seconds)

    curve = Curve.fit(verify.seconds | verify_large.seconds)
    per_row = [time - curve(n * num_rows) for n, time in Curve.fit(by_rows.seconds).knots]
    per_token = {
        int(n): [max(time - curve(n), 0.0) / (long - context)] for n, time in Curve.fit(by_context.seconds).knots
    }
    token = statistics.median([value for values in per_token.values() for value in values] or [0.0])
    row = max(statistics.median(per_row or [0.0]) / (num_rows - 1) - context * token, 0.0)  # tokens count separately
    chains, together_knots = Curve.fit_concave(chain.seconds), Curve.fit(chain_rows.seconds)
    more_rows = together_knots(1) / chains(depths[-1]) - 1 if together_knots.knots else 0.0
    return Costs(
        curve,
        chain=chains,
        tree=Curve.fit_line(tree.seconds),
        width=width,
        per_token=token,
        per_token_of=Curve.fit(per_token),
        per_row=row,
        draft_per_row=max(more_rows / (num_rows - 1), 0.0),
        context=context,
    )
