"""Measure the costs of a step on this machine with a decode loop, and cache them on disk.

A stand-in drafter proposes trees of every size to time the target; the real one drafts at every depth. The sizes take
turns, so that changes of the machine's speed affect all alike. Steps during which a thread waited for a processor count
only if there are no others, and costs of a busy machine are kept for ten minutes.

The target is measured once for all its drafters. For a further drafter, a few of the target's sizes give the machine's
present pace.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from draftwing.accept import get_rule
from draftwing.budget.config import CONFIG
from draftwing.budget.costs import Costs, Curve
from draftwing.budget.planner import Planner
from draftwing.cpu.library import get_kernel
from draftwing.errors import ConfigError
from draftwing.methods.base import Budget, Drafter, NoDrafter
from draftwing.models.context import Context, FeatureSpec
from draftwing.models.lean import LeanContext
from draftwing.models.target import Target
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.stats import Step, Timings
from draftwing.storage import Folder, parse_json, private_folder
from draftwing.tree import DraftTree

TASKS = Path("/proc/self/task")


class Loop(Protocol):
    """The part of a ``decode.Decoder`` that measuring needs."""

    ctx: Context
    budget: Budget

    @property
    def num_running(self) -> int: ...

    def admit(self, prompt_ids: list[int], sampling: Sampling) -> int: ...

    def step(self) -> Step: ...

    def retire(self, request_id: int) -> None: ...


NewLoop = Callable[[Drafter, Budget], Loop]  # for a target, under the match rule


class Sample(NamedTuple):
    """Seconds of a step or a part of it, and whether no thread waited for a processor meanwhile."""

    seconds: float
    is_clean: bool


class Series:
    """Samples of one kind of step by count: nodes for the target, depth for the drafter."""

    def __init__(self, counts: Sequence[int], time_step: Callable[[int], Sample]) -> None:
        self._samples: dict[int, list[Sample]] = {count: [] for count in counts}
        self._time_step = time_step

    def run(self) -> None:
        """Time every count once."""
        for count in list(self._samples)[:1]:
            self._time_step(count)  # not counted: it refills the caches that other series emptied
        for count, samples in self._samples.items():
            samples.append(self._time_step(count))

    @property
    def seconds(self) -> dict[float, list[float]]:
        """Seconds by count, without the first round, and without disturbed steps if there are others."""
        return {
            count: [sample.seconds for sample in samples if sample.is_clean] or [sample.seconds for sample in samples]
            for count, samples in self._later()
        }

    @property
    def are_disturbed(self) -> list[bool]:
        """For every count, True if all its steps were disturbed; the machine is busy if most are."""
        return [not any(sample.is_clean for sample in samples) for _, samples in self._later()]

    def _later(self) -> list[tuple[int, list[Sample]]]:
        return [(count, samples[1:] or samples) for count, samples in self._samples.items()]


def waited_seconds() -> float:
    """Return the seconds that this process's threads waited for a processor; 0 if the system does not count them."""
    waited = 0
    with suppress(OSError), os.scandir(TASKS) as tasks:  # Linux only
        for task in tasks:
            with suppress(OSError, ValueError, IndexError), open(f"{task.path}/schedstat", "rb") as file:
                waited += int(file.read().split()[1])
    return waited * 1e-9


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
    """A decode loop with ``rows`` rows of ``context`` tokens, whose steps are timed."""

    def __init__(self, target: Target, drafter: Drafter, new_loop: NewLoop, rows: int, context: int) -> None:
        self.target, self.drafter = target, drafter
        self.loop = new_loop(drafter, Budget(1))
        self.prompt = [(7 * i + 3) % target.vocab_size for i in range(context + 1)]  # the last one is pending
        self.rows, self.length = rows, context
        self.ids: set[int] = set()
        self._admit()

    def _admit(self) -> None:
        sampling = Sampling(max_tokens=self.target.max_length, ignore_eos=True)
        self.ids = {self.loop.admit(self.prompt, sampling) for _ in range(self.rows)}
        self.stretch(self.length)

    def stretch(self, length: int) -> bool:
        """Extend rows to ``length`` with slots of zeros, which take as long to read. Return False if impossible."""
        ctx = self.loop.ctx
        if not isinstance(ctx, LeanContext) or length <= ctx.rows[0].length:
            return False
        for row in ctx.rows:
            row.tokens[1:1] = [self.prompt[0]] * (length - row.length)
            row.length = length
        self.length = length
        return True

    def verify(self, nodes: int) -> Sample:
        """Time everything but the draft."""
        assert isinstance(self.drafter, _Filler)
        self.drafter.nodes = nodes
        times, is_clean = self._step()
        if isinstance(self.loop.ctx, LeanContext):  # rows keep their length
            for row in self.loop.ctx.rows:
                row.length = self.length
                del row.tokens[row.length + 1 :]
        return Sample(times.verify + times.accept + times.commit, is_clean)

    def draft(self, budget: Budget) -> Sample:
        """Time the draft."""
        self.loop.budget = budget
        times, is_clean = self._step()
        return Sample(times.draft, is_clean)

    def _step(self) -> tuple[Timings, bool]:
        if self.loop.num_running < self.rows:  # a row reached the end of its context
            for request in self.ids:
                self.loop.retire(request)
            self._admit()
        waited, start = waited_seconds(), time.perf_counter()
        step = self.loop.step()
        elapsed = time.perf_counter() - start
        self.ids -= {row.request_id for row in step.rows if row.finish_reason is not None}
        return step.timings, waited_seconds() - waited <= CONFIG.max_wait_share * elapsed


def measure(
    target: Target,
    new_drafter: Callable[[], Drafter],
    new_loop: NewLoop,
    seconds: float | None = None,
    *,
    long: int | None = None,
    known: Costs | None = None,
) -> Costs:
    """Measure the costs of a target with a drafter.

    Args:
        seconds: for all of it, about; two rounds at least, longer on a busy machine.
        long: tokens of the row that gives the cost per token of context; half the context at most.
        known: costs of the same target with another drafter: then only the target's present pace is measured.

    Raises:
        ConfigError: the target has no room for a prompt of two tokens and a tree.
    """
    drafter, room = new_drafter(), target.max_length // 2
    if room < 8:
        raise ConfigError(f"{target.name} has a context of {target.max_length} tokens: at least 16 are needed")
    (_, context), (num_rows, _), (_, long_context) = CONFIG.batches
    context, long_context = min(context, room // 2), min(long or long_context, room)

    def bench(drafter: Drafter, rows: int) -> _Bench:
        return _Bench(target, drafter, new_loop, rows, context)

    max_nodes = min(room // 2, target.vocab_size)
    nodes = [count for count in CONFIG.nodes if count <= max_nodes]
    rare = [count for count in CONFIG.nodes[-2:] if count <= max_nodes]  # slow sizes, timed in half of the rounds
    anchors = [count for count in CONFIG.nodes[:-2:3] if count <= max_nodes]
    depths = [depth for depth in CONFIG.depths if depth < room // 2] if drafter.costs_forwards else []
    width = CONFIG.tree.width if depths and target.vocab_size > CONFIG.tree.width else 1
    one = bench(_Filler(drafter.features), 1)
    small = Series(anchors if known else [count for count in nodes if count not in rare], one.verify)
    large, by_rows, by_context, chain, tree, chain_rows = (Series([], one.verify) for _ in range(6))
    if known is None:
        batch, long_row = bench(_Filler(drafter.features), num_rows), bench(_Filler(drafter.features), 1)
        large, by_rows = Series(rare, one.verify), Series(anchors, batch.verify)
        by_context = Series(anchors if long_row.stretch(long_context) else [], long_row.verify)
    if depths:
        alone, together = bench(drafter, 1), bench(new_drafter(), num_rows)
        for drafting in (alone, together):
            drafting.stretch(min(drafter.context, room))
        chain = Series(depths, lambda depth: alone.draft(Budget(depth)))
        tree = Series(depths if width > 1 else [], lambda depth: alone.draft(Budget(depth, width, nodes[-1])))
        chain_rows = Series(depths[-1:], lambda depth: together.draft(Budget(depth)))
    often, seldom = (small, chain), (large, by_rows, by_context, tree, chain_rows)

    def busy_share() -> float:
        return statistics.fmean([is_disturbed for series in (*often, *seldom) for is_disturbed in series.are_disturbed])

    start, limit = time.perf_counter(), CONFIG.seconds if seconds is None else seconds
    for turn in range(2 * CONFIG.rounds):
        factor = 2 if turn >= 2 and busy_share() > 1 / 2 else 1
        if turn >= 2 and (turn >= factor * CONFIG.rounds or time.perf_counter() - start > factor * limit):
            break
        for series in often if turn >= 2 and turn % 2 == 0 else (*often, *seldom):
            series.run()

    curve = Curve.fit(small.seconds | large.seconds)
    if known is not None:
        costs = known.at_pace(statistics.median([time / known.verify_seconds(int(n)) for n, time in curve.knots]))
    else:
        rows_curve, long_curve = Curve.fit(by_rows.seconds), Curve.fit(by_context.seconds)
        per_row = statistics.median([time - curve(n * num_rows) for n, time in rows_curve.knots]) / (num_rows - 1)
        added = long_context - context
        per_token = {n: [max(seconds - curve(n), 0.0) / added] for n, seconds in long_curve.knots}
        token = statistics.median([values[0] for values in per_token.values()] or [0.0])
        row = max(per_row - context * token, 0.0)  # each row's own tokens are counted separately
        costs = Costs(curve, per_token=token, per_token_of=Curve.fit(per_token), per_row=row, context=context)
    chains = Curve.fit_concave(chain.seconds)
    more_rows = Curve.fit(chain_rows.seconds)(1) / chains(depths[-1]) - 1 if depths else 0.0
    draft_per_row, busy = max(more_rows / (num_rows - 1), 0.0), max(busy_share(), costs.busy)
    trees = Curve.fit_line(tree.seconds)
    return replace(costs, chain=chains, tree=trees, width=width, draft_per_row=draft_per_row, busy=busy)


def planner_for(target: Target, new_drafter: Callable[[], Drafter], rule: str, new_loop: NewLoop) -> Planner:
    """Return a planner for a target with a drafter, by measured costs.

    Args:
        rule: a name in ``accept.RULES``.
        new_loop: makes a decode loop from a drafter and a budget, to measure with.
    """
    costs = costs_of(target, new_drafter, new_loop)
    on_cpu = target.device.type == "cpu"
    return Planner.for_drafter(costs, get_rule(rule, lossless=False), new_drafter(), on_cpu=on_cpu)


# --- cache -----------------------------------------------------------------------------------------------------------


def costs_of(target: Target, new_drafter: Callable[[], Drafter], new_loop: NewLoop, *, again: bool = False) -> Costs:
    """Return measured costs, from the cache if this machine has measured them before; ``again`` measures again."""
    drafter = new_drafter()
    cached, of_target = (None, None) if again else (known_costs(target, drafter), known_costs(target))
    if cached is not None:
        return cached
    costs = measure(target, new_drafter, new_loop, known=of_target)
    with suppress(OSError), private_folder() as folder:  # without a cache the next start measures again
        _write(folder, _key(target, drafter), costs)
        if of_target is None:
            _write(folder, _key(target), costs.of_target)
    return costs


def known_costs(target: Target, drafter: Drafter | None = None) -> Costs | None:
    """Return what this machine has measured before, with a drafter or for the target alone, or None."""
    try:
        with private_folder() as folder:
            entry = parse_json(folder.read(_file(_key(target, drafter))))
        costs, age = Costs.from_dict(entry["costs"]), time.time() - float(entry["measured"])
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None
    is_old = not 0 <= age <= CONFIG.busy_lifetime_s
    return None if (costs.busy > 1 / 2 and is_old) or not math.isfinite(costs.verify(1)) else costs


def _write(folder: Folder, key: dict[str, object], costs: Costs) -> None:
    text = json.dumps({"key": key, "measured": time.time(), "costs": costs.to_dict()})
    folder.write(_file(key), text.encode())


def _key(target: Target, drafter: Drafter | None = None) -> dict[str, object]:
    kernel = get_kernel() if target.runtime == "kernel" else None  # elsewhere it would be compiled for nothing
    return {
        "version": 10,
        "runtime": target.runtime if kernel is None else kernel.costs_like,
        "target": target.name,
        "shape": [target.num_layers, target.hidden_size, target.vocab_size, target.num_weight_bytes, target.runs_as],
        "dtype": str(target.dtype),
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "drafter": None if drafter is None else [drafter.name, drafter.identity],
    }


def _file(key: dict[str, object]) -> str:
    return f"costs-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]}.json"
