"""Prometheus metrics: each under Draftwing's name and under vLLM's, for existing dashboards."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from draftwing.engine import Engine
from draftwing.stats import Step
from draftwing.worker import Ticket

_LONG = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)  # seconds
_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_COUNTERS = {  # our name: vLLM's name, description
    "prompt_tokens": ("prompt_tokens", "Prompt tokens read."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "drafts": ("spec_decode_num_drafts", "Steps with drafts, per request."),
    "draft_tokens": ("spec_decode_num_draft_tokens", "Tokens drafted."),
    "accepted_tokens": ("spec_decode_num_accepted_tokens", "Drafted tokens accepted."),
}
_TIMES = {
    "time_to_first_token_seconds": (_LONG, "Time from a request to its first token."),
    "inter_token_latency_seconds": (_SHORT, "Time between two tokens of a request."),
    "e2e_request_latency_seconds": (_LONG, "Time from a request to its end."),
}


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count


class Metrics(Collector):
    """Counts a worker's steps, which its thread adds; any thread collects. ``model`` labels every series."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._engine: Engine | None = None
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._accepted_by_depth: list[int] = []
        self._ends: dict[str, int] = {"stop": 0, "length": 0, "cancelled": 0, "error": 0}
        self._times = {name: _Histogram(bounds) for name, (bounds, _) in _TIMES.items()}
        self._last: dict[int, float] = {}  # time of each running request's latest tokens
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def watch(self, engine: Engine) -> None:
        """Report the state of ``engine`` too."""
        self._engine = engine

    def add_step(self, step: Step, tickets: dict[int, Ticket], now: float) -> None:
        counts = self._counts
        with self._lock:
            for row in step.rows:
                num_tokens = len(row.token_ids)
                counts["generation_tokens"] += num_tokens
                if row.num_drafted:
                    counts["drafts"] += 1
                    counts["draft_tokens"] += row.num_drafted
                    counts["accepted_tokens"] += row.num_accepted
                    self._accepted_by_depth += [0] * (row.num_accepted - len(self._accepted_by_depth))
                    for depth in range(row.num_accepted):
                        self._accepted_by_depth[depth] += 1
                ticket = tickets.get(row.request_id)
                if ticket is None or not num_tokens:
                    continue
                before = self._last.get(row.request_id)
                self._last[row.request_id] = now
                if before is None:
                    self._times["time_to_first_token_seconds"].add(now - ticket.submitted_at)
                    counts["prompt_tokens"] += len(ticket.request.prompt_ids)
                else:  # a step's tokens share its time equally
                    self._times["inter_token_latency_seconds"].add((now - before) / num_tokens, num_tokens)

    def add_end(self, ticket: Ticket, now: float) -> None:
        with self._lock:
            self._last.pop(ticket.request.id, None)
            reason = str(ticket.request.finish_reason)
            self._ends[reason] = self._ends.get(reason, 0) + 1
            self._times["e2e_request_latency_seconds"].add(now - ticket.submitted_at)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric under both names."""
        with self._lock:
            counts, by_depth, ends = dict(self._counts), list(self._accepted_by_depth), dict(self._ends)
            times = [(name, list(accumulate(each.counts)), each.sum) for name, each in self._times.items()]
        for name, (theirs, text) in _COUNTERS.items():
            yield from self._twice(CounterMetricFamily, name, theirs, text, {"": counts[name]})
        text = "Drafted tokens accepted, by depth."
        name, theirs = "accepted_tokens_per_pos", "spec_decode_num_accepted_tokens_per_pos"
        depths = {str(depth): count for depth, count in enumerate(by_depth)}
        yield from self._twice(CounterMetricFamily, name, theirs, text, depths, "position")
        text = "Requests that have ended."
        yield from self._twice(CounterMetricFamily, "requests", "request_success", text, ends, "finished_reason")
        for name, cumulative, total in times:
            bounds, text = _TIMES[name]
            buckets = list(zip((*map(str, bounds), "+Inf"), map(float, cumulative), strict=True))
            for prefix in ("draftwing_", "vllm:"):
                histogram = HistogramMetricFamily(prefix + name, text, labels=["model_name"])
                histogram.add_metric([self._model], buckets, total)
                yield histogram
        if self._engine is None:
            return
        stats = self._engine.stats
        used = stats.num_slots_used / max(stats.num_slots, 1)
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        for kind, name, theirs, text, value in (
            (gauge, "requests_running", "num_requests_running", "Requests being decoded.", stats.num_running),
            (gauge, "requests_waiting", "num_requests_waiting", "Requests waiting for a row.", stats.num_waiting),
            (gauge, "kv_slots_used_share", "kv_cache_usage_perc", "Share of --kv-memory in use.", used),
            (counter, "preemptions", "num_preemptions", "Rows that gave up their slots.", stats.num_preempted),
            (counter, "prefix_queries", "prefix_cache_queries", "Prompt tokens to read.", stats.num_prefix_queries),
            (counter, "prefix_hits", "prefix_cache_hits", "Prompt tokens found in the cache.", stats.num_prefix_hits),
        ):
            yield from self._twice(kind, name, theirs, text, {"": value})
        text = "Errors of drafters. A step continues without a drafter that fails; three in a row turn drafting off."
        faults = CounterMetricFamily("draftwing_drafter_faults", text, labels=["model_name"])  # vLLM has none
        faults.add_metric([self._model], stats.num_faults)
        yield faults

    def _twice(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        ours: str,
        theirs: str,
        text: str,
        values: Mapping[str, float],
        label: str | None = None,
    ) -> Iterator[Metric]:
        """Yield a metric under both names; ``values`` by the value of ``label``, if there is one."""
        for name in (f"draftwing_{ours}", f"vllm:{theirs}"):
            family = kind(name, text, labels=["model_name", *([label] if label else [])])
            for key, value in values.items():
                family.add_metric([self._model, *([key] if label else [])], value)
            yield family
