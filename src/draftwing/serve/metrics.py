"""Figures for Prometheus: Draftwing's own names, and the same numbers under vLLM's, for dashboards that are there."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from draftwing.engine.worker import Ticket, Worker
from draftwing.stats import Step

__all__ = ["Metrics"]

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
        self._counts = dict.fromkeys(("prompt", "generated", "drafts", "drafted", "accepted", "steps"), 0)
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
            self._counts["steps"] += 1
            for row in step.rows:
                self._counts["generated"] += len(row.token_ids)
                if row.num_drafted:
                    self._counts["drafts"] += 1
                    self._counts["drafted"] += row.num_drafted
                    self._counts["accepted"] += row.num_accepted
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
            self._counts["prompt"] += len(ticket.request.prompt_ids)
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
        for own, theirs, text, key in (
            ("prompt_tokens", "prompt_tokens", "Tokens of prompts that were read.", "prompt"),
            ("generation_tokens", "generation_tokens", "Tokens written.", "generated"),
            ("drafts", "spec_decode_num_drafts", "Steps of a text that drafted.", "drafts"),
            ("draft_tokens", "spec_decode_num_draft_tokens", "Tokens drafted.", "drafted"),
            ("accepted_tokens", "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", "accepted"),
        ):
            yield from self._twice(own, theirs, lambda name, t=text, k=key: self._counter(name, t, counts[k]))
        yield self._counter("draftwing_steps", "Steps of the decode loop, whatever their number of texts.", counts["steps"])
        text = "Drafted tokens that were accepted, by their depth."
        yield from self._twice(
            "accepted_tokens_per_pos",
            "spec_decode_num_accepted_tokens_per_pos",
            lambda name: self._labelled(name, text, "position", {str(n): each for n, each in enumerate(positions)}),
        )
        text = "Requests that have ended."
        yield from self._twice(
            "requests", "request_success", lambda name: self._labelled(name, text, "finished_reason", ends)
        )
        for (own, text), (buckets, total) in zip(_TIMES.items(), times, strict=True):
            yield from self._twice(own, own, lambda name, t=text, b=buckets, s=total: self._histogram(name, t, b, s))
        yield from self._gauges()

    def _gauges(self) -> Iterator[Metric]:
        engine = None if self._worker is None else self._worker.engine
        running, waiting = (0, 0) if engine is None else (engine.num_running, engine.num_waiting)
        text = "Requests that are decoded."
        yield from self._twice("requests_running", "num_requests_running", lambda name: self._gauge(name, text, running))
        other = "Requests that wait for a row."
        yield from self._twice("requests_waiting", "num_requests_waiting", lambda name: self._gauge(name, other, waiting))

    def _twice(self, own: str, theirs: str, make: Callable[[str], Metric]) -> Iterator[Metric]:
        yield make(f"draftwing_{own}")
        yield make(f"vllm:{theirs}")

    def _counter(self, name: str, text: str, value: float) -> Metric:
        found = CounterMetricFamily(name, text, labels=["model_name"])
        found.add_metric([self._model], value)
        return found

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        found = GaugeMetricFamily(name, text, labels=["model_name"])
        found.add_metric([self._model], value)
        return found

    def _labelled(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        found = CounterMetricFamily(name, text, labels=["model_name", label])
        for key, value in values.items():
            found.add_metric([self._model, key], value)
        return found

    def _histogram(self, name: str, text: str, buckets: list[tuple[str, float]], total: float) -> Metric:
        found = HistogramMetricFamily(name, text, labels=["model_name"])
        found.add_metric([self._model], buckets, total)
        return found


_TIMES = {
    "time_to_first_token_seconds": "From a request's coming to its first token.",
    "inter_token_latency_seconds": "Between two tokens of a text.",
    "e2e_request_latency_seconds": "From a request's coming to its end.",
}
