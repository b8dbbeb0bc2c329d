"""Figures for Prometheus: Draftwing's own names, and the same numbers under vLLM's, for dashboards that are there."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from draftwing.engine import EngineStats
from draftwing.stats import Step
from draftwing.worker import Ticket, Worker

_LONG = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)  # seconds
_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)


class _Histogram:
    """Counts of values by the buckets they fall into."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def as_read(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulated counts by bound, and the sum, as the exposition format has them."""
        total, found = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found, self._sum


class Metrics(Collector):
    """Counts what a worker's steps did; the worker's thread adds, whoever scrapes reads.

    Args:
        model: the label ``model_name`` of every series.

    Attributes:
        registry: of these figures alone.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._worker: Worker | None = None
        self._lock = threading.Lock()
        self._counts = dict.fromkeys((own for own, _, _ in _COUNTS), 0)
        self._by_position: list[int] = []
        self._ends: dict[str, int] = {"stop": 0, "length": 0, "cancelled": 0, "error": 0}
        self._first, self._between, self._whole = _Histogram(_LONG), _Histogram(_SHORT), _Histogram(_LONG)
        self._last: dict[int, float] = {}  # by request: when its latest tokens came
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def watch(self, worker: Worker) -> None:
        """The worker whose queue is shown."""
        self._worker = worker

    def step(self, step: Step, tickets: dict[int, Ticket], now: float) -> None:
        """Count a step. The worker's thread calls this."""
        with self._lock:
            for row in step.rows:
                self._counts["generation_tokens"] += len(row.token_ids)
                if row.num_drafted:
                    self._counts["drafts"] += 1
                    self._counts["draft_tokens"] += row.num_drafted
                    self._counts["accepted_tokens"] += row.num_accepted
                    missing = row.num_accepted - len(self._by_position)
                    self._by_position += [0] * missing
                    for depth in range(row.num_accepted):
                        self._by_position[depth] += 1
                ticket = tickets.get(row.request_id)
                if ticket is not None and row.token_ids:
                    self._clock(row.request_id, len(row.token_ids), ticket, now)

    def _clock(self, request_id: int, num_tokens: int, ticket: Ticket, now: float) -> None:
        before = self._last.get(request_id)
        self._last[request_id] = now
        if before is None:
            self._first.add(now - ticket.submitted_at)
            self._counts["prompt_tokens"] += len(ticket.request.prompt_ids)
        else:  # tokens that come together are as far apart as their share of the wait
            self._between.add((now - before) / num_tokens, num_tokens)

    def end(self, ticket: Ticket, now: float) -> None:
        """Count a request that has ended."""
        with self._lock:
            self._last.pop(ticket.request.id, None)
            reason = str(ticket.request.finish_reason)
            self._ends[reason] = self._ends.get(reason, 0) + 1
            self._whole.add(now - ticket.submitted_at)

    # --- reading ---------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """Every figure twice, by both names."""
        with self._lock:
            counts, positions, ends = dict(self._counts), list(self._by_position), dict(self._ends)
            times = [each.as_read() for each in (self._first, self._between, self._whole)]
        for own, theirs, text in _COUNTS:
            yield from self._twice(CounterMetricFamily, own, theirs, text, {(): counts[own]})
        depths: dict[tuple[str, ...], float] = {(str(depth),): count for depth, count in enumerate(positions)}
        text = "Drafted tokens that were accepted, by their depth."
        own, theirs = "accepted_tokens_per_pos", "spec_decode_num_accepted_tokens_per_pos"
        yield from self._twice(CounterMetricFamily, own, theirs, text, depths, "position")
        ended: dict[tuple[str, ...], float] = {(reason,): count for reason, count in ends.items()}
        text = "Requests that have ended."
        yield from self._twice(CounterMetricFamily, "requests", "request_success", text, ended, "finished_reason")
        for (own, text), (buckets, total) in zip(_TIMES.items(), times, strict=True):
            for name in (f"draftwing_{own}", f"vllm:{own}"):
                family = HistogramMetricFamily(name, text, labels=["model_name"])
                family.add_metric([self._model], buckets, total)
                yield family
        if self._worker is not None:
            yield from self._of_engine(self._worker.engine.stats)

    def _of_engine(self, now: EngineStats) -> Iterator[Metric]:
        used = now.num_slots_used / max(now.num_slots, 1)
        for own, theirs, text, value in (
            ("requests_running", "num_requests_running", "Requests that are decoded.", now.num_running),
            ("requests_waiting", "num_requests_waiting", "Requests that wait for a row.", now.num_waiting),
            ("kv_slots_used_share", "kv_cache_usage_perc", "Of --kv-memory, the share that rows hold.", used),
        ):
            yield from self._twice(GaugeMetricFamily, own, theirs, text, {(): value})
        for own, theirs, text, value in (
            ("preemptions", "num_preemptions", "Rows that gave their slots up for others.", now.num_preempted),
            ("prefix_queries", "prefix_cache_queries", "Tokens of prompts to be read.", now.num_prefix_queries),
            ("prefix_hits", "prefix_cache_hits", "Tokens of prompts found in slots.", now.num_prefix_hits),
        ):
            yield from self._twice(CounterMetricFamily, own, theirs, text, {(): value})
        text = "What drafters raised: a step goes on without one that fails, and after three in a row there is none."
        family = CounterMetricFamily("draftwing_drafter_faults", text, labels=["model_name"])  # vLLM has none
        family.add_metric([self._model], now.num_faults)
        yield family

    def _twice(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        own: str,
        theirs: str,
        text: str,
        values: Mapping[tuple[str, ...], float],
        *labels: str,
    ) -> Iterator[Metric]:
        for name in (f"draftwing_{own}", f"vllm:{theirs}"):
            family = kind(name, text, labels=["model_name", *labels])
            for key, value in values.items():
                family.add_metric([self._model, *key], value)
            yield family


_COUNTS = (  # our name, vLLM's, what is counted
    ("prompt_tokens", "prompt_tokens", "Tokens of prompts that were read."),
    ("generation_tokens", "generation_tokens", "Tokens written."),
    ("drafts", "spec_decode_num_drafts", "Steps of a text that drafted."),
    ("draft_tokens", "spec_decode_num_draft_tokens", "Tokens drafted."),
    ("accepted_tokens", "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted."),
)
_TIMES = {
    "time_to_first_token_seconds": "From a request's coming to its first token.",
    "inter_token_latency_seconds": "Between two tokens of a text.",
    "e2e_request_latency_seconds": "From a request's coming to its end.",
}
