"""Measure the costs of a step on this machine with a decode loop, and cache them on disk.

A stand-in drafter proposes trees of every size to time the target; the real one drafts at every depth. The sizes take
turns, so that changes of the machine's speed affect all alike. Steps during which a thread waited for a processor count
only if there are no others, and costs of a busy machine are kept for ten minutes.

No request waits for its costs: the first steps decode without drafts, then half a second is spent on measuring, and
the rest is measured in a small share of the time, next to decoding. The target is measured once for all its drafters.
For a further drafter, a few of the target's sizes give the machine's present pace.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

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
PROMPT = 2  # tokens of the prompts that measurements read
MEASURING = "measuring costs during the first answer: this model with this draft is new on this machine"


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
    """Seconds of a step or a part of it, whether no thread waited for a processor meanwhile, and the whole time."""

    seconds: float
    is_clean: bool
    elapsed: float


class Series:
    """Samples of one kind of step by count: nodes for the target, depth for the drafter.

    Args:
        counts: in rising order.
        time_step: takes a step.
        guess: seconds that a first step takes at most, by count.
    """

    def __init__(
        self, counts: Sequence[int], time_step: Callable[[int], Sample], guess: Callable[[int], float]
    ) -> None:
        self._samples: dict[int, list[Sample]] = {count: [] for count in counts}
        self._time_step, self._guess = time_step, guess

    @property
    def counts(self) -> list[int]:
        return list(self._samples)

    def predict(self, count: int) -> float:
        """Return the seconds that a step will take: as the last time, or in proportion to a smaller count."""
        if samples := self._samples[count]:
            return samples[-1].elapsed
        smaller = [(other, samples[-1].elapsed) for other, samples in self._samples.items() if samples]
        smaller = [(other, elapsed) for other, elapsed in smaller if other < count]
        return smaller[-1][1] * count / smaller[-1][0] if smaller else self._guess(count)

    def is_new(self, count: int) -> bool:
        return not self._samples[count]

    def run(self, count: int) -> None:
        """Time a step."""
        self._samples[count].append(self._time_step(count))

    def warm_up(self, count: int) -> None:
        """Take a step that does not count."""
        self._time_step(count)

    @property
    def seconds(self) -> dict[float, list[float]]:
        """Seconds by count, without the first step, and without disturbed steps if there are others."""
        return {
            count: [sample.seconds for sample in samples if sample.is_clean] or [sample.seconds for sample in samples]
            for count, samples in self._later()
        }

    @property
    def are_disturbed(self) -> list[bool]:
        """For every count, True if all its steps were disturbed; the machine is busy if most are."""
        return [not any(sample.is_clean for sample in samples) for _, samples in self._later()]

    def _later(self) -> list[tuple[int, list[Sample]]]:
        return [(count, samples[1:] or samples) for count, samples in self._samples.items() if samples]


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
    """A decode loop with ``rows`` rows of ``context`` tokens, whose steps are timed. It is made for its first step."""

    def __init__(
        self, target: Target, new_drafter: Callable[[], Drafter], new_loop: NewLoop, rows: int, context: int
    ) -> None:
        self.target, self.new_drafter, self.new_loop = target, new_drafter, new_loop
        self.prompt = [(7 * i + 3) % target.vocab_size for i in range(PROMPT + 1)]  # the last one is pending
        self.rows, self.length = rows, context
        self.ids: set[int] = set()

    @cached_property
    def loop(self) -> Loop:
        self.drafter = self.new_drafter()
        loop = self.new_loop(self.drafter, Budget(1))
        self._admit(loop)
        return loop

    def _admit(self, loop: Loop) -> None:
        sampling = Sampling(max_tokens=self.target.max_length, ignore_eos=True)
        self.ids = {loop.admit(self.prompt, sampling) for _ in range(self.rows)}
        if isinstance(loop.ctx, LeanContext):  # slots of zeros take as long to read as others
            for row in loop.ctx.rows:
                row.tokens[1:1] = [self.prompt[0]] * (self.length - row.length)
                row.length = max(self.length, row.length)

    def verify(self, nodes: int) -> Sample:
        """Time everything but the draft."""
        ctx = self.loop.ctx
        assert isinstance(self.drafter, _Filler)
        self.drafter.nodes = nodes
        times, is_clean, elapsed = self._step()
        if isinstance(ctx, LeanContext):  # rows keep their length
            for row in ctx.rows:
                row.length = self.length
                del row.tokens[row.length + 1 :]
        return Sample(times.verify + times.accept + times.commit, is_clean, elapsed)

    def draft(self, budget: Budget) -> Sample:
        """Time the draft."""
        self.loop.budget = budget
        times, is_clean, elapsed = self._step()
        return Sample(times.draft, is_clean, elapsed)

    def _step(self) -> tuple[Timings, bool, float]:
        loop = self.loop
        waited, start = waited_seconds(), time.perf_counter()
        if loop.num_running < self.rows:  # a row reached the end of its context
            for request in self.ids:
                loop.retire(request)
            self._admit(loop)
        step = loop.step()
        elapsed = time.perf_counter() - start
        self.ids -= {row.request_id for row in step.rows if row.finish_reason is not None}
        return step.timings, waited_seconds() - waited <= CONFIG.max_wait_share * elapsed, elapsed


class Measurement:
    """Measures the costs of a target with a drafter, in slices of any length.

    A step begins only if it will probably end within its slice, so the time of all slices is bounded on any machine.
    A few sizes come first; those that were never measured are extrapolated.

    Args:
        step_seconds: known duration of a step without drafts; it bounds the first steps.
        long: tokens of the row that gives the cost per token of context; half the context at most.
        known: costs of the same target with another drafter: then only the target's present pace is measured.

    Attributes:
        known: as given.
        seconds: spent so far.
        is_done: True once every size was measured ``CONFIG.rounds`` times, or all took ``CONFIG.seconds``.

    Raises:
        ConfigError: the target has no room for a prompt of two tokens and a tree.
    """

    def __init__(
        self,
        target: Target,
        new_drafter: Callable[[], Drafter],
        new_loop: NewLoop,
        *,
        step_seconds: float = 0.0,
        long: int | None = None,
        known: Costs | None = None,
    ) -> None:
        drafter, room = new_drafter(), target.max_length // 2
        if room < 8:
            raise ConfigError(f"{target.name} has a context of {target.max_length} tokens: at least 16 are needed")
        (_, context), (num_rows, _), (_, long_context) = CONFIG.batches
        is_lean = target.supports_pages
        self._context = min(context, room // 2) if is_lean else PROMPT
        self._long, self._num_rows, self.known = min(long or long_context, room), num_rows, known
        self._drafter, self._step_seconds, self._is_cuda = drafter, step_seconds, target.device.type == "cuda"

        def bench(new: Callable[[], Drafter], rows: int, context: int) -> _Bench:
            return _Bench(target, new, new_loop, rows, context)

        def filler() -> Drafter:
            return _Filler(drafter.features)

        max_nodes = min(room // 2, target.vocab_size)
        nodes = [count for count in CONFIG.nodes if count <= max_nodes]
        rare = [count for count in CONFIG.nodes[-2:] if count <= max_nodes]  # slow sizes, timed in half of the rounds
        anchors = [count for count in CONFIG.nodes[:-2:3] if count <= max_nodes]
        depths = [depth for depth in CONFIG.depths if depth < room // 2] if drafter.costs_forwards else []
        width = CONFIG.tree.width if depths and target.vocab_size > CONFIG.tree.width else 1
        self._width = width
        one, batch = bench(filler, 1, self._context), bench(filler, num_rows, self._context)
        long_row = bench(filler, 1, self._long)
        drafting = min(drafter.context, room)
        alone, together = bench(new_drafter, 1, drafting), bench(new_drafter, num_rows, drafting)
        is_new = known is None

        def forward(nodes: int, rows: int = 1) -> float:
            return step_seconds * (nodes + PROMPT) * rows

        small = Series([n for n in nodes if n not in rare] if is_new else anchors, one.verify, forward)
        most = small.counts[-1]
        large = Series(rare if is_new else [], one.verify, lambda n: small.predict(most) * n / most)
        by_rows = Series(anchors if is_new else [], batch.verify, lambda n: forward(n, num_rows))
        by_context = Series(anchors if is_new and is_lean else [], long_row.verify, forward)
        # A level of a draft takes as long as a forward at most.
        chain = Series(depths, lambda depth: alone.draft(Budget(depth)), lambda depth: forward(2 * depth))
        tree = Series(
            depths if width > 1 else [],
            lambda depth: alone.draft(Budget(depth, width, nodes[-1])),
            lambda depth: width * chain.predict(depth),
        )
        chain_rows = Series(
            depths[-1:], lambda depth: together.draft(Budget(depth)), lambda depth: num_rows * chain.predict(depth)
        )
        self._verify, self._by_rows, self._by_context = (small, large), by_rows, by_context
        self._chain, self._tree, self._chain_rows = chain, tree, chain_rows
        self._all = (small, chain, large, by_rows, by_context, tree, chain_rows)
        first = ((small, 1), (small, 4), (chain, 1), (chain, 4), (small, 16))
        self._first = [(series, count) for series, count in first if count in series.counts]
        self._steps = self._schedule()
        self._next = next(self._steps, None)
        self._last: Series | None = None  # the one that was timed last
        self.seconds = 0.0

    def _schedule(self) -> Iterator[tuple[Series, int]]:
        for turn in range(CONFIG.rounds):
            for series in self._all[:2] if turn >= 2 and turn % 2 == 0 else self._all:
                yield from ((series, count) for count in series.counts)

    @property
    def is_done(self) -> bool:
        return self._next is None or self.seconds >= CONFIG.seconds

    def run(self, seconds: float) -> None:
        """Measure for up to ``seconds``."""
        start, self._last = time.perf_counter(), None
        end = start + seconds
        while self._first:
            self._time(*self._first.pop(0), end)
        while self._next is not None:
            predicted = self._time(*self._next, end)
            if 0 < predicted <= CONFIG.pause_seconds:
                break  # it fits into a later slice
            self._next = next(self._steps, None)
        self.seconds += time.perf_counter() - start

    def _time(self, series: Series, count: int, end: float) -> float:
        """Time a step if it will end before ``end``. Return 0, or its predicted seconds if it will not."""
        warm_ups = []
        if series is not self._last and not series.is_new(series.counts[0]):
            warm_ups.append(series.counts[0])  # refills the caches that other steps emptied
        if self._is_cuda and series.is_new(count):
            warm_ups.append(count)  # records a graph
        predicted = sum(map(series.predict, (*warm_ups, count)))
        if predicted > end - time.perf_counter():
            return predicted
        for each in warm_ups:
            series.warm_up(each)
        series.run(count)
        self._last = series
        return 0.0

    @property
    def has_costs(self) -> bool:
        """True if enough was measured to keep it for other processes."""
        return len(self._verify[0].seconds) > 1 and (not self._chain.counts or bool(self._chain.seconds))

    @property
    def costs(self) -> Costs:
        """The costs as measured so far."""
        known, num_rows, context = self.known, self._num_rows, self._context
        curve = Curve.fit(self._verify[0].seconds | self._verify[1].seconds)
        defaults = default_costs(self._step_seconds or curve(1), self._drafter)
        if known is not None:
            paces = [time / known.verify_seconds(int(n)) for n, time in curve.knots]
            costs = known.at_pace(statistics.median(paces or [1.0]))
        else:
            curve = curve if len(curve.knots) > 1 else defaults.verify
            by_rows, by_context = Curve.fit(self._by_rows.seconds), Curve.fit(self._by_context.seconds)
            rows = [time - curve(n * num_rows) for n, time in by_rows.knots]
            per_row = statistics.median(rows or [0.0]) / (num_rows - 1)
            added = self._long - context
            per_token = {n: [max(seconds - curve(n), 0.0) / added] for n, seconds in by_context.knots}
            token = statistics.median([values[0] for values in per_token.values()] or [0.0])
            row = max(per_row - context * token, 0.0)  # each row's own tokens are counted separately
            costs = Costs(curve, per_token=token, per_token_of=Curve.fit(per_token), per_row=row, context=context)
        chains, trees = Curve.fit_concave(self._chain.seconds), Curve.fit_line(self._tree.seconds)
        chains = chains if chains.knots or not self._chain.counts else defaults.chain
        together = Curve.fit(self._chain_rows.seconds)
        more_rows = together(1) / chains(self._chain.counts[-1]) - 1 if together.knots else 0.0
        draft_per_row = max(more_rows / (num_rows - 1), 0.0)
        disturbed = [is_disturbed for series in self._all for is_disturbed in series.are_disturbed]
        busy = max(statistics.fmean(disturbed or [0.0]), costs.busy)
        return replace(costs, chain=chains, tree=trees, width=self._width, draft_per_row=draft_per_row, busy=busy)


def default_costs(step_seconds: float, drafter: Drafter) -> Costs:
    """Return typical costs, if nothing could be measured; ``step_seconds`` is the time of a step without drafts."""
    verify = Curve(tuple((count, share * step_seconds) for count, share in CONFIG.default_verify))
    depths = CONFIG.depths if drafter.costs_forwards else ()
    return Costs(verify, Curve(tuple((depth, depth * CONFIG.default_level * step_seconds) for depth in depths)))


class Meter:
    """Measures costs next to decoding: half a second at once, then a share of the time.

    Args:
        target, new_drafter, new_loop: see ``costs_of``.
        on_costs: called with a line of text when the measurement begins, and when its first costs are known.

    Attributes:
        costs: from an earlier process, or as measured so far; None before.
        is_done: True if nothing more is to be measured.
    """

    def __init__(
        self,
        target: Target,
        new_drafter: Callable[[], Drafter],
        new_loop: NewLoop,
        on_costs: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._target, self._new_drafter, self._new_loop, self._on_costs = target, new_drafter, new_loop, on_costs
        self._measurement: Measurement | None = None
        self.costs, self.is_done = _read(_key(target, new_drafter()))
        self._is_stored = self.costs is not None
        self._allowance = CONFIG.pause_seconds if self.costs is None else 0.0
        if self.costs is None:
            on_costs(MEASURING)

    def add(self, seconds: float) -> None:
        """Count seconds of decoding, a share of which may be spent on measuring."""
        self._allowance = min(self._allowance + CONFIG.measured_share * seconds, CONFIG.pause_seconds)

    def run(self, step_seconds: float) -> bool:
        """Measure for as long as is allowed now.

        Args:
            step_seconds: duration of a step without drafts.

        Returns:
            True if ``costs`` are new.
        """
        is_first = self.costs is None
        if self.is_done or self._allowance < (0.0 if is_first else CONFIG.slice_seconds):
            return False
        start = time.perf_counter()
        try:
            if self._measurement is None:
                known = _read(_key(self._target))[0]
                new: Any = (self._target, self._new_drafter, self._new_loop)
                self._measurement = Measurement(*new, step_seconds=step_seconds, known=known)
            self._measurement.run(self._allowance)
        except Exception as error:  # a drafter that fails also fails in a step, which continues without it
            self.is_done, self._measurement = True, None
            if is_first:
                self.costs = default_costs(step_seconds, self._new_drafter())
                self._on_costs(f"measuring costs failed ({type(error).__name__}: {error}): typical costs are assumed")
            return is_first
        finally:
            self._allowance -= time.perf_counter() - start
        measured, self.is_done = self._measurement, self._measurement.is_done
        self.costs = measured.costs
        if measured.has_costs and (self.is_done or not self._is_stored):
            self._is_stored = True
            with_target = self.is_done and measured.known is None
            _store(self._target, self._new_drafter(), self.costs, is_complete=self.is_done, with_target=with_target)
        if is_first:
            self._on_costs(f"costs measured in {measured.seconds:.1f} s: {self.costs.describe()}")
        if self.is_done:
            self._measurement = None  # its caches
        return True


def planner_for(
    target: Target,
    new_drafter: Callable[[], Drafter],
    rule: str,
    new_loop: NewLoop,
    on_costs: Callable[[str], None] = lambda text: None,
) -> Planner:
    """Return a planner for a target with a drafter, which measures its costs while it decodes.

    Args:
        rule: a name in ``accept.RULES``.
        new_loop: makes a decode loop from a drafter and a budget, to measure with.
        on_costs: see ``Meter``.
    """
    on_cpu, meter = target.device.type == "cpu", Meter(target, new_drafter, new_loop, on_costs)
    return Planner.for_drafter(meter, get_rule(rule, lossless=False), new_drafter(), on_cpu=on_cpu)


# --- cache -----------------------------------------------------------------------------------------------------------


def costs_of(target: Target, new_drafter: Callable[[], Drafter], new_loop: NewLoop, *, again: bool = False) -> Costs:
    """Return costs measured in up to ``CONFIG.seconds``, or by this machine before; ``again`` measures again.

    Raises:
        ConfigError: see ``Measurement``.
    """
    drafter = new_drafter()
    cached, is_complete = (None, False) if again else _read(_key(target, drafter))
    if cached is not None and is_complete:
        return cached
    known = None if again else _read(_key(target))[0]
    costs = measure(target, new_drafter, new_loop, known=known)
    _store(target, drafter, costs, is_complete=True, with_target=known is None)
    return costs


def measure(
    target: Target,
    new_drafter: Callable[[], Drafter],
    new_loop: NewLoop,
    seconds: float | None = None,
    *,
    long: int | None = None,
    known: Costs | None = None,
) -> Costs:
    """Measure costs for up to ``seconds``, or ``CONFIG.seconds``; ``long`` and ``known`` as in ``Measurement``."""
    measurement = Measurement(target, new_drafter, new_loop, long=long, known=known)
    measurement.run(CONFIG.seconds if seconds is None else seconds)
    return measurement.costs


def known_costs(target: Target, drafter: Drafter) -> Costs | None:
    """Return what this machine has measured with a drafter, or None."""
    return _read(_key(target, drafter))[0]


def _read(key: dict[str, object]) -> tuple[Costs | None, bool]:
    """Return stored costs, or None, and True if their measurement was complete."""
    try:
        with private_folder() as folder:
            entry = parse_json(folder.read(_file(key)))
        costs, age = Costs.from_dict(entry["costs"]), time.time() - float(entry["measured"])
        is_complete = bool(entry["is_complete"])
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None, False
    is_old = not 0 <= age <= CONFIG.busy_lifetime_s
    if (costs.busy > 1 / 2 and is_old) or not math.isfinite(costs.verify(1)):
        return None, False
    return costs, is_complete


def _store(target: Target, drafter: Drafter, costs: Costs, *, is_complete: bool, with_target: bool) -> None:
    """Keep costs for other processes, and with ``with_target`` the target's for other drafters."""
    with suppress(OSError), private_folder() as folder:  # without a cache the next process measures again
        _write(folder, _key(target, drafter), costs, is_complete)
        if with_target:
            _write(folder, _key(target), costs.of_target, is_complete)


def _write(folder: Folder, key: dict[str, object], costs: Costs, is_complete: bool) -> None:
    entry = {"key": key, "measured": time.time(), "is_complete": is_complete, "costs": costs.to_dict()}
    text = json.dumps(entry)
    folder.write(_file(key), text.encode())


def _key(target: Target, drafter: Drafter | None = None) -> dict[str, object]:
    kernel = get_kernel() if target.runtime == "kernel" else None  # elsewhere it would be compiled for nothing
    return {
        "version": 11,
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
