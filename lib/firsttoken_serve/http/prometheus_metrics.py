"""What /metrics says, by Prometheus' own client library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from firsttoken.engine.async_engine import EngineStats


OUTCOMES = ("answered", "cancelled", "refused", "failed")
_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_REQUEST_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
_BETWEEN_S = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)


class ModelMetrics(NamedTuple):
    """The counts and times of one model; ``requests`` are by outcome."""

    requests: dict[str, Counter]
    prompt_tokens: Counter
    generated_tokens: Counter
    queue_s: Histogram
    first_token_s: Histogram
    between_tokens_s: Histogram
    request_s: Histogram


class Metrics:
    """The service's counts and times since it began, by model in ``of``; ``stats`` and ``stage`` are asked when
    somebody looks."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, stats: Callable[[], EngineStats], stage: Callable[[], int], models: Iterable[str]) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Now(stats, stage))
        help_text = "Requests by outcome: answered, cancelled (the client went), refused, failed"
        requests = Counter("firsttoken_requests", help_text, ["model", "outcome"], registry=registry)
        families: list[Any] = [
            Counter(f"firsttoken_{name}", help_text, ["model"], registry=registry)
            for name, help_text in (("prompt_tokens", "Tokens of prompts"), ("generated_tokens", "Tokens said"))
        ]
        families += [
            Histogram(f"firsttoken_{name}_seconds", help_text, ["model"], buckets=buckets, registry=registry)
            for name, help_text, buckets in (
                ("queue_time", "From the request's arrival to the first step that it is in", _FIRST_S),
                ("time_to_first_token", "From the request's arrival to its first token", _FIRST_S),
                ("time_between_tokens", "Between two tokens of one answer", _BETWEEN_S),
                ("request_time", "From the request's arrival to the end of its last answer", _REQUEST_S),
            )
        ]
        self.of = {
            model: ModelMetrics(
                {outcome: requests.labels(model, outcome) for outcome in OUTCOMES},
                *(family.labels(model) for family in families),
            )
            for model in models
        }

    def page(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Now:
    """Gauges of the engine, which are read when somebody looks and not counted."""

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
