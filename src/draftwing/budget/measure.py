"""Measure what a step costs on this machine, through a decode loop, and keep it for the next time.

A stand-in drafter proposes trees of every size for the target's part; the real one drafts at every depth for its own.
All sizes take turns, so that a machine that slows down slows all alike. Steps during which a thread waited for a
processor count only if there are no others, and costs that were measured on a busy machine are kept for ten minutes.

The target's part is measured once for all its drafters; a further drafter is measured next to a few of the target's
sizes, which give the machine's present pace.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from draftwing.accept import get_rule
from draftwing.budget.costs import ROWS, Costs, Curve
from draftwing.budget.planner import Planner
from draftwing.cpu.library import get_kernel
from draftwing.errors import ConfigError
from draftwing.files import parse_json
from draftwing.methods.base import Budget, Drafter, NoDrafter
from draftwing.models.context import Context, FeatureSpec
from draftwing.models.lean import LeanContext
from draftwing.models.target import Target
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.stats import Step, Timings
from draftwing.storage import private_folder
from draftwing.tree import DraftTree

TASKS = Path("/proc/self/task")


@dataclass(frozen=True)
class MeasureConfig:
    """The sizes that are measured, and the time limits."""

    nodes: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
    few_nodes: tuple[int, ...] = (1, 4, 6, 8, 12, 16, 32, 64)  # for slow targets
    anchors: tuple[int, ...] = (1, 4, 16)  # nodes at which further rows, long contexts and the pace are measured
    chain_depths: tuple[int, ...] = (1, 2, 4, 8)
    tree_depths: tuple[int, ...] = (1, 2, 4, 6)
    few_depths: tuple[int, ...] = (1, 4)
    tree_width: int = 4
    context: int = 64  # tokens of the measured rows
    long_context: int = 1024  # tokens of the row that gives the cost per token of context
    slow_step_s: float = 0.06  # seconds of a baseline step from which fewer sizes are measured
    often_upto: int = 16  # nodes up to which sizes are measured in every round; most steps are that small
    rounds: int = 24  # at most; the first one warms up and does not count
    seconds: float = 4.0  # for all of it, about; twice that on a busy machine
    busy_share: float = 0.1  # sizes without an undisturbed sample, above which the machine counts as busy
    busy_lifetime_s: float = 600.0  # for which costs of a busy machine are kept
    wait_share: float = 0.02  # share of a step that threads may wait for processors, as on an idle machine


CONFIG = MeasureConfig()


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


Samples = defaultdict[float, list[Sample]]  # by count
Series = tuple[Samples, Sequence[int], Callable[[int], Sample]]


def waited_seconds() -> float:
    """Return the seconds that this process's threads were ready to run and did not; 0 if the system does not tell."""
    waited = 0
    with suppress(OSError), os.scandir(TASKS) as tasks:  # Linux only
        for task in tasks:
            with suppress(OSError, ValueError, IndexError), open(f"{task.path}/schedstat", "rb") as file:
                waited += int(file.read().split()[1])
    return waited * 1e-9


class _Filler(NoDrafter):
    """Proposes a given number of nodes that are never right for long."""

    name = "filler"

    def __init__(self, features: FeatureSpec) -> None:
        self.features, self.nodes = features, 1

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Repeat the pending token, as a tree of two branches, since trees need a mask of their own."""
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
        self.rows, self.length, self.stretched = rows, context, 0
        self.ids: set[int] = set()
        self._admit()

    def _admit(self) -> None:
        sampling = Sampling(max_tokens=self.target.max_length, ignore_eos=True)
        self.ids = {self.loop.admit(self.prompt, sampling) for _ in range(self.rows)}
        if self.stretched:
            self.stretch(self.stretched)

    def stretch(self, length: int) -> int:
        """Pretend that rows are that long (slots of zeros take as long to read). Return 0 if impossible."""
        if not isinstance(self.loop.ctx, LeanContext) or length <= self.loop.ctx.rows[0].length:
            return 0
        for row in self.loop.ctx.rows:
            row.tokens[1:1] = [self.prompt[0]] * (length - row.length)
            row.length = length
        self.length = self.stretched = length
        return length

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

    def draft(self, depth: int, width: int = 1, nodes: int | None = None) -> Sample:
        """Time the draft."""
        self.loop.budget = Budget(depth, width, nodes)
        times, is_clean = self._step()
        return Sample(times.draft, is_clean)

    def _step(self) -> tuple[Timings, bool]:
        if self.loop.num_running < self.rows:  # a row reached the end of its context
            for request in self.ids:
                self.loop.retire(request)
            self._admit()
        waited, began = waited_seconds(), time.perf_counter()
        step = self.loop.step()
        spent = time.perf_counter() - began
        self.ids -= {row.request_id for row in step.rows if row.finish_reason is not None}
        return step.timings, waited_seconds() - waited <= CONFIG.wait_share * spent + 20e-6


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
        raise ConfigError(f"{target.name} has room for {target.max_length} tokens: too few to measure anything")
    context = min(CONFIG.context, room // 2)

    def bench(drafter: Drafter, rows: int) -> _Bench:
        return _Bench(target, drafter, new_loop, rows, context)

    one = bench(_Filler(drafter.features), 1)
    one.verify(1)
    is_slow = one.verify(1).seconds > CONFIG.slow_step_s
    most = min(room // 2, target.vocab_size)
    sizes = CONFIG.anchors if known else CONFIG.few_nodes if is_slow else CONFIG.nodes
    nodes = [count for count in sizes if count <= most]
    anchors = [count for count in CONFIG.anchors if count in nodes]
    verify, by_rows, by_context, chain, tree, chain_rows = (Samples(list) for _ in range(6))
    # (samples, counts, timed part): small sizes in every round, the others in half of the rounds
    often: list[Series] = [(verify, [count for count in nodes if count <= CONFIG.often_upto], one.verify)]
    seldom: list[Series] = [(verify, [count for count in nodes if count > CONFIG.often_upto], one.verify)]
    stretched = 0
    if known is None:
        many, far = bench(_Filler(drafter.features), ROWS), bench(_Filler(drafter.features), 1)
        stretched = far.stretch(min(long or CONFIG.long_context, room))
        seldom.append((by_rows, anchors, many.verify))
        seldom += [(by_context, anchors, far.verify)] if stretched else []
    if drafter.costs_forwards:
        alone, together = bench(drafter, 1), bench(new_drafter(), ROWS)
        for each in (alone, together):
            each.stretch(min(drafter.context, room))
        depths = [depth for depth in (CONFIG.few_depths if is_slow else CONFIG.chain_depths) if depth < room // 2]
        often.append((chain, depths, alone.draft))
        if target.vocab_size > CONFIG.tree_width:
            deep = [depth for depth in (CONFIG.few_depths if is_slow else CONFIG.tree_depths) if depth < room // 2]
            largest = min(CONFIG.nodes[-1], most)
            seldom.append((tree, deep, lambda depth: alone.draft(depth, CONFIG.tree_width, largest)))
        seldom.append((chain_rows, depths[-1:], together.draft))

    def busy() -> float:
        later = [
            samples[1:] for part in (verify, by_rows, by_context, chain, tree, chain_rows) for samples in part.values()
        ]
        return statistics.fmean([not any(sample.is_clean for sample in samples) for samples in later])

    began, limit = time.perf_counter(), CONFIG.seconds if seconds is None else seconds
    for turn in range(2 * CONFIG.rounds):
        longer = 1 if turn < 2 or busy() <= CONFIG.busy_share else 2
        if turn >= 2 and (turn >= longer * CONFIG.rounds or time.perf_counter() - began > longer * limit):
            break
        for samples, counts, timed in (*often, *(seldom if turn < 2 or turn % 2 else ())):
            for count in counts[:1]:
                timed(count)  # not counted: it refills the caches that other series emptied
            for count in counts:
                samples[count].append(timed(count))

    curve = Curve.fit(_clean(verify))
    if known is not None:
        costs = known.at_pace(_median([seconds / known.verify_seconds(int(count)) for count, seconds in curve.knots]))
    else:
        per_row = [(Curve.fit(_clean(by_rows))(n) - curve(n * ROWS)) / (ROWS - 1) for n in by_rows]
        longer_rows = Curve.fit(_clean(by_context))
        per_token = {n: [max((longer_rows(n) - curve(n)) / max(stretched - context, 1), 0.0)] for n in by_context}
        token = _median([values[0] for values in per_token.values()])
        row = max(0.0, _median(per_row) - context * token)  # each row's own tokens are counted separately
        costs = Costs(curve, per_token=token, per_token_of=Curve.fit(per_token), per_row=row, context=context)
    chains = Curve.bent(_clean(chain))
    more_rows = Curve.fit(_clean(chain_rows))(1) / chains(max(chain)) - 1 if chain_rows else 0.0
    return replace(
        costs,
        chain=chains,
        tree=Curve.line(_clean(tree)),
        width=CONFIG.tree_width if tree else 1,
        draft_per_row=max(0.0, more_rows / (ROWS - 1)),
        busy=max(busy(), costs.busy),
    )


def _clean(samples: Samples) -> Mapping[float, Sequence[float]]:
    """Seconds by count, without first rounds, and without disturbed steps if there are others."""
    later = {count: values[1:] or values for count, values in samples.items()}
    return {
        count: [sample.seconds for sample in values if sample.is_clean] or [sample.seconds for sample in values]
        for count, values in later.items()
    }


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def planner_for(target: Target, new_drafter: Callable[[], Drafter], rule: str, new_loop: NewLoop) -> Planner:
    """Make a planner for a target with a drafter, by measured costs.

    Args:
        rule: a name in ``accept.RULES``.
        new_loop: makes a decode loop from a drafter and a budget, to measure with.
    """
    costs = costs_of(target, new_drafter, new_loop)
    on_cpu = target.device.type == "cpu"
    return Planner.of(costs, get_rule(rule, lossless=False), new_drafter(), on_cpu=on_cpu)


# --- kept for the next time ------------------------------------------------------------------------------------------


def costs_of(target: Target, new_drafter: Callable[[], Drafter], new_loop: NewLoop, *, again: bool = False) -> Costs:
    """Return measured costs, from the cache if this machine has measured them before; ``again`` measures again."""
    drafter = new_drafter()
    known, of_target = (None, None) if again else (known_costs(target, drafter), known_costs(target))
    if known is not None:
        return known
    costs = measure(target, new_drafter, new_loop, known=of_target)
    with suppress(OSError), private_folder() as folder:  # without a cache the next start measures again
        for key, kept in ((_key(target, drafter), costs), (_key(target), None if of_target else costs.of_target)):
            if kept is not None:
                text = json.dumps({"key": key, "measured": time.time(), "costs": kept.to_dict()})
                folder.write(_file(key), text.encode())
    return costs


def known_costs(target: Target, drafter: Drafter | None = None) -> Costs | None:
    """Return what this machine has measured before, with a drafter or for the target alone, or None."""
    try:
        with private_folder() as folder:
            kept = parse_json(folder.read(_file(_key(target, drafter))))
        costs, age = Costs.from_dict(kept["costs"]), time.time() - float(kept["measured"])
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None
    is_old = not 0 <= age <= CONFIG.busy_lifetime_s
    return None if (costs.busy > CONFIG.busy_share and is_old) or not math.isfinite(costs.verify(1)) else costs


def _key(target: Target, drafter: Drafter | None = None) -> dict[str, object]:
    kernel = get_kernel()
    return {
        "version": 9,
        "runtime": kernel.costs_like if kernel is not None and target.runtime == "kernel" else target.runtime,
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
