"""Measures what a step costs here, through a decode loop, and keeps it for the next time.

A stand-in drafter proposes trees of every size for the target's part; the real one drafts at every depth for its own.
All are measured in turn, so that a machine that slows down slows all alike, and medians are taken; of steps that waited
for a processor only where there are no others. What was measured so does not stay for long.

The target's part is measured once for all drafters: two curves of one target differ by what else ran at the time, and
whoever compares drafters by them compares that. A further drafter is measured beside a few sizes of the target's,
which say how fast the machine is now.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from draftwing.accept import get_rule
from draftwing.budget.costs import ROWS, Costs
from draftwing.budget.neighbours import Undisturbed
from draftwing.budget.planner import Planner
from draftwing.budget.samples import WIDTH, ByCount, Sample, Samples
from draftwing.drafters.base import Budget, Drafter, Traits
from draftwing.errors import ConfigError
from draftwing.model.lean import LeanContext
from draftwing.model.target import Context, FeatureSpec, Target, TargetOutput
from draftwing.run.kernel.library import get_kernel
from draftwing.run.storage import private_folder
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.stats import Step, Timings
from draftwing.tree import Accepted, DraftTree

__all__ = ["Loop", "NewLoop", "costs_of", "drop_costs", "known_costs", "measure", "planner_for"]

NODES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
DEPTHS = (1, 2, 4, 8)
TREE_DEPTHS = (1, 2, 4, 6)
# Where a plain step takes longer than this, fewer sizes are measured.
SLOW = 0.06
FEW_NODES, FEW_DEPTHS = (1, 4, 6, 8, 12, 16, 32, 64), (1, 4)
ROW_NODES = ANCHORS = (1, 4, 16)
CONTEXT, LONG = 64, 1024  # tokens of the rows that are measured
ROUNDS, LEAST_ROUNDS = 24, 2  # the first warms everything up, and does not count
OFTEN = 16  # nodes up to which, and depths of chains, are measured in every round: most steps are such; others in half
YOUNG = 3600  # seconds for which costs are kept whatever steps take, or they might be measured at every start
SECONDS = 4.0  # for all of it, about
BUSY, MOMENT = 0.1, 600  # more of the sizes than this share measured on a busy machine: costs for so many seconds
LONGER = 2  # times as long to measure there


class Loop(Protocol):
    """What is needed of a decode loop: ``engine.decode.Decoder``."""

    ctx: Context
    budget: Budget

    @property
    def num_running(self) -> int:
        """Requests that the next step advances."""
        ...

    def admit(self, prompt_ids: list[int], sampling: Sampling) -> int:
        """Add a request; its id."""
        ...

    def step(self) -> Step:
        """Advance them all."""
        ...

    def retire(self, request_id: int) -> None:
        """Drop one that still runs."""
        ...


NewLoop = Callable[[Drafter, Budget], Loop]  # of a target, under the match rule


class _Filler:
    """Proposes chains of a given number of nodes that are never right for long."""

    name = "filler"
    traits = Traits(costs_forwards=False)

    def __init__(self, features: FeatureSpec) -> None:
        self.features, self.nodes = features, 1

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """Nothing to keep."""

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """The pending token, again and again; as a tree of two branches, since trees need a mask of their own."""
        tokens = ctx.pending()[:, None].repeat(1, self.nodes)
        if self.nodes < 3:
            return DraftTree.chain(tokens)
        parents = torch.arange(-2, self.nodes - 2, device=ctx.device).clamp(min=-1).expand_as(tokens).clone()
        parents[:, 1:3] = 0
        return DraftTree(tokens, parents)

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Nothing to learn."""

    def remove(self, ctx: Context, row: int) -> None:
        """Nothing to drop."""


def measure(
    target: Target,
    new_drafter: Callable[[], Drafter],
    new_loop: NewLoop,
    seconds: float | None = None,
    *,
    long: int = LONG,
    known: Costs | None = None,
) -> Costs:
    """The costs of a target with a drafter, in about so many seconds, 4 (two rounds at least, more on a busy machine).

    Args:
        long: tokens of the text that tells what each further token takes; half the context at most.
        known: of the same target, whatever drafted: only what has changed of it is measured, its pace.

    Raises:
        ConfigError: the target has no room for a text of 2 tokens and a tree.
    """
    drafter, room = new_drafter(), target.max_length // 2
    if room < 8:
        raise ConfigError(f"{target.name} has room for {target.max_length} tokens: too few to measure anything")
    context = min(CONTEXT, room // 2)

    def bench(drafter: Drafter, rows: int) -> _Bench:
        return _Bench(target, drafter, new_loop, rows, context)

    one = bench(_Filler(drafter.features), 1)
    many, far = (None if known else bench(_Filler(drafter.features), rows) for rows in (ROWS, 1))
    stretched = far.stretch(min(long, room)) if far else 0
    one.verify(1)
    is_slow = one.verify(1).seconds > SLOW
    sizes, most = ANCHORS if known else FEW_NODES if is_slow else NODES, min(room // 2, target.vocab_size)
    nodes = [count for count in sizes if count <= most]
    some = [count for count in ROW_NODES if count in nodes]
    found = Samples()
    often = [_Series(found.verify, [count for count in nodes if count <= OFTEN], one.verify)]
    seldom = [_Series(found.verify, [count for count in nodes if count > OFTEN], one.verify)]
    seldom += [_Series(found.by_rows, some, many.verify)] if many else []
    seldom += [_Series(found.long, some, far.verify)] if far and stretched else []
    if drafter.traits.costs_forwards:
        alone, together = bench(drafter, 1), bench(new_drafter(), ROWS)
        for each in (alone, together):
            each.stretch(min(drafter.traits.context, room))
        depths = [depth for depth in (FEW_DEPTHS if is_slow else DEPTHS) if depth < room // 2]
        often.append(_Series(found.chain, depths, lambda depth: alone.draft(Budget(depth))))
        if target.vocab_size > WIDTH:
            deep = [depth for depth in (FEW_DEPTHS if is_slow else TREE_DEPTHS) if depth < room // 2]
            largest = min(NODES[-1], most)
            seldom.append(_Series(found.tree, deep, lambda depth: alone.draft(Budget(depth, WIDTH, largest))))
        seldom.append(_Series(found.rows_chain, depths[-1:], lambda depth: together.draft(Budget(depth))))
    _measure(found, often, seldom, SECONDS if seconds is None else seconds)
    return found.with_draft(known.at_pace(found.pace(known)) if known else found.of_target(context, stretched))


def _measure(found: Samples, often: Sequence[_Series], seldom: Sequence[_Series], seconds: float) -> None:
    """Round after round, for about so many seconds: some series in each, the others in half of them."""
    began = time.perf_counter()
    for turn in range(LONGER * ROUNDS):
        share = (time.perf_counter() - began) / seconds if seconds else math.inf
        enough = 1 if turn < LEAST_ROUNDS or found.busy <= BUSY else LONGER
        if turn >= LEAST_ROUNDS and (turn >= enough * ROUNDS or share > enough):
            break
        for series in (*often, *(seldom if turn < LEAST_ROUNDS or turn % 2 else ())):
            series.take()


class _Series(NamedTuple):
    """What is timed by one loop, one count after the other."""

    into: ByCount
    counts: Sequence[int]
    timed: Callable[[int], Sample]

    def take(self) -> None:
        """Of each count one more. The first is run twice: it brings back what others drove from the caches."""
        for count in self.counts[:1]:
            self.timed(count)
        for count in self.counts:
            self.into[count].append(self.timed(count))


class _Bench:
    """A decode loop whose steps are timed."""

    def __init__(self, target: Target, drafter: Drafter, new_loop: NewLoop, rows: int, context: int) -> None:
        self._target, self._drafter = target, drafter
        self._loop = new_loop(drafter, Budget(1))
        self._prompt = [(7 * i + 3) % target.vocab_size for i in range(context + 1)]  # the last one is pending
        self._rows, self._length = rows, context
        self._ids: set[int] = set()
        self._stretched = 0
        self._admit()

    def _admit(self) -> None:
        sampling = Sampling(max_tokens=self._target.max_length, ignore_eos=True)
        self._ids = {self._loop.admit(self._prompt, sampling) for _ in range(self._rows)}
        if self._stretched:
            self.stretch(self._stretched)

    def stretch(self, length: int) -> int:
        """Pretend that rows are so long: slots hold zeros, which take as long to read. 0 where that cannot be."""
        if not isinstance(self._loop.ctx, LeanContext) or length <= self._loop.ctx.rows[0].length:
            return 0
        for row in self._loop.ctx.rows:
            row.tokens[1:1] = [self._prompt[0]] * (length - row.length)
            row.length = length
        self._length = self._stretched = length
        return length

    def verify(self, nodes: int) -> Sample:
        """All but the draft."""
        assert isinstance(self._drafter, _Filler)
        self._drafter.nodes = nodes
        times, is_clean = self._step()
        if isinstance(self._loop.ctx, LeanContext):  # back again: the texts stay as long as they are said to be
            for row in self._loop.ctx.rows:
                row.length = self._length
                del row.tokens[row.length + 1 :]
        return Sample(times.verify + times.accept + times.commit, is_clean)

    def draft(self, budget: Budget) -> Sample:
        """The draft."""
        self._loop.budget = budget
        times, is_clean = self._step()
        return Sample(times.draft, is_clean)

    def _step(self) -> tuple[Timings, bool]:
        if self._loop.num_running < self._rows:  # a text ran to its end
            for request in self._ids:
                self._loop.retire(request)
            self._admit()
        with Undisturbed() as is_clean:
            step = self._loop.step()
        self._ids -= {row.request_id for row in step.rows if row.finish_reason is not None}
        return step.timings, bool(is_clean)


def planner_for(target: Target, new_drafter: Callable[[], Drafter], rule: str, new_loop: NewLoop) -> Planner:
    """A planner for a target with a drafter, by measured costs; it drops those that turn out to be wrong.

    Args:
        rule: a name in ``accept.RULES``.
        new_loop: makes a decode loop of a drafter and a budget, to measure with.
    """
    costs, drafter = costs_of(target, new_drafter, new_loop), new_drafter()
    return Planner.of(
        costs,
        get_rule(rule, lossless=False),
        drafter.traits,
        on_cpu=target.device.type == "cpu",
        on_stale=partial(drop_costs, target, drafter),
    )


# --- kept for the next time ------------------------------------------------------------------------------------------


def costs_of(target: Target, new_drafter: Callable[[], Drafter], new_loop: NewLoop, *, again: bool = False) -> Costs:
    """Measured costs, from the cache where this machine has measured the same before; ``again`` measures anew."""
    drafter = new_drafter()
    known, own = (None, None) if again else (known_costs(target, drafter), known_costs(target))
    if known is not None:
        return known
    costs = measure(target, new_drafter, new_loop, known=own)
    try:
        with private_folder() as folder:
            for key, kept in ((_key(target, drafter), costs), (_key(target), None if own else costs.of_target)):
                if kept is not None:
                    text = json.dumps({"key": key, "measured": time.time(), "costs": kept.to_dict()})
                    folder.write(_file(key), text.encode())
    except OSError:
        pass  # a cache that cannot be written costs a few seconds the next time, and nothing else
    return costs


def known_costs(target: Target, drafter: Drafter | None = None) -> Costs | None:
    """What this machine has measured before, with a drafter, or of the target alone.

    None where that is nothing that can be read, or was busy and is past.
    """
    try:
        with private_folder() as folder:
            kept = json.loads(folder.read(_file(_key(target, drafter))))
        costs, age = Costs.from_dict(kept["costs"]), time.time() - float(kept["measured"])
        return None if costs.busy > BUSY and not 0 <= age <= MOMENT else costs
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None


def drop_costs(target: Target, drafter: Drafter) -> None:
    """Forget what was measured, unless that was just now: the next planner measures anew, the target too."""
    for file in (_file(_key(target, drafter)), _file(_key(target))):
        try:
            with private_folder() as folder:
                if time.time() - float(json.loads(folder.read(file))["measured"]) > YOUNG:
                    folder.remove(file)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not there, or nothing that anybody will read


def _key(target: Target, drafter: Drafter | None = None) -> dict[str, object]:
    """All that costs depend on."""
    kernel = get_kernel()
    return {
        "version": 8,
        "runtime": kernel.costs_like if kernel is not None and target.runtime == "kernel" else target.runtime,
        "target": target.name,
        "shape": [target.num_layers, target.hidden_size, target.vocab_size, target.num_weight_bytes, target.runs_as],
        "dtype": str(target.dtype),
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "drafter": None if drafter is None else [drafter.name, drafter.traits.identity],
    }


def _file(key: dict[str, object]) -> str:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return f"costs-{name}.json"
