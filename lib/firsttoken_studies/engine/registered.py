"""The experiments of this room. The engine beside others, and under load."""

from __future__ import annotations

from firsttoken.study.experiment import Experiment

_ENGINE = "firsttoken_studies.engine"

EXPERIMENTS = (
    Experiment(
        "throughput", "The engine beside others", "20", f"{_ENGINE}.throughput:throughput", "throughput_summary"
    ),
    Experiment(
        "reuse_throughput",
        "What a shorter prefill is worth under load",
        "36",
        f"{_ENGINE}.reuse_throughput:reuse_throughput",
        "reuse_throughput_summary",
        reads=("prefill_latency",),
    ),
)
