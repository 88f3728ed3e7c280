"""Metrics of a run: the latencies that its clients saw, and the cost of its recoveries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from firsttoken.engine.engine import Engine
from firsttoken.engine.preemption.preemption_policy import Action
from firsttoken.engine.request import Request, Sampling
from firsttoken.engine.trace import Trace
from firsttoken.engine.workload_items import Item


def serve_items(engine: Engine, items: Sequence[Item]) -> list[Request]:
    """Run a workload to the end; every answer is greedy and as long as its item says."""
    return engine.serve([(item.prompt, Sampling(item.output_tokens), item.arrival_s) for item in items])


def client_metrics(requests: Sequence[Request]) -> dict[str, float]:
    """Mean TTFT, and mean and P99 over requests of TPOT (CPS 4.2.2), in ms; requests of one token have no TPOT."""
    ttft = [request.ttft_s for request in requests]
    tpot = [seconds for request in requests if (seconds := request.tpot_s) is not None]
    return {
        "mean_ttft_ms": float(np.mean(ttft)) * 1e3,
        "mean_tpot_ms": float(np.mean(tpot)) * 1e3,
        "p99_tpot_ms": float(np.percentile(tpot, 99)) * 1e3,
        "makespan_s": max(request.times_s[-1] for request in requests) - min(r.arrival_s for r in requests),
    }


def recovery_metrics(trace: Trace) -> dict[str, Any]:
    """Count the preemptions and the ways in which requests came back, with the seconds that took."""
    actions = [recovery.action for recovery in trace.recoveries]
    return {
        "preemptions": len(actions),
        "swapped": actions.count(Action.SWAP),
        "host_full": sum(recovery.reason == "host pool full" for recovery in trace.recoveries),
        "recovery_s": sum(recovery.cost_s for recovery in trace.recoveries),
    }
