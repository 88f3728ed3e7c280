"""What /metrics says, by Prometheus' own client library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from firsttoken.engine.async_engine import EngineStats


OUTCOMES = ("answered", "cancelled", "refused", "failed")
_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN_S = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)


class Metrics:
    """The service's counts and times since it began; ``stats`` and ``stage`` are asked when somebody looks."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, stats: Callable[[], EngineStats], stage: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Now(stats, stage))
        self.requests = Counter(
            "firsttoken_requests",
            "Requests by outcome: answered, cancelled (the client went), refused, failed",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        self.prompt_tokens = Counter("firsttoken_prompt_tokens", "Tokens of prompts", registry=self.registry)
        self.generated_tokens = Counter("firsttoken_generated_tokens", "Tokens said", registry=self.registry)
        self.first_token_s = Histogram(
            "firsttoken_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=_FIRST_S,
            registry=self.registry,
        )
        self.between_tokens_s = Histogram(
            "firsttoken_time_between_tokens_seconds",
            "Between two tokens of one answer",
            buckets=_BETWEEN_S,
            registry=self.registry,
        )

    def page(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class _Now:
    """What is not counted but looked at."""

    def __init__(self, stats: Callable[[], EngineStats], stage: Callable[[], int]) -> None:
        self._stats, self._stage = stats, stage

    def collect(self) -> Iterator[Metric]:
        """The registry calls this for the gauges' current values."""
        now = self._stats()
        yield GaugeMetricFamily("firsttoken_requests_running", "Requests in the engine's steps", now.running)
        yield GaugeMetricFamily("firsttoken_requests_waiting", "Requests that wait for that", now.waiting)
        yield GaugeMetricFamily("firsttoken_kv_blocks_used", "KV blocks that requests have", now.blocks_used)
        yield GaugeMetricFamily("firsttoken_kv_blocks", "KV blocks of the pool", now.blocks)
        yield GaugeMetricFamily("firsttoken_stage", "The stage that new requests begin with", self._stage())
