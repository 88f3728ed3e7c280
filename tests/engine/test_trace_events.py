"""What viewers of traces are given: one row a request and one for the device, and nothing in a row overlaps."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.engine.request import Sampling
from firsttoken.engine.schedulers import SCHEDULERS
from firsttoken.engine.trace import DEVICE, REQUESTS, trace_events, write_trace

WORKLOADS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12), st.floats(0, 30)), min_size=1, max_size=10)


def rows(events: list[dict]) -> dict[tuple[int, int], list[dict]]:
    """Complete events by row, in the order of their begin."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return {row: sorted(spans, key=lambda span: (span["ts"], span["dur"])) for row, spans in found.items()}


def test_a_trace_that_viewers_open(lab, tmp_path: Path) -> None:
    """Two requests, of which the second is preempted and computes its prompt again."""
    run = lab.simulated(4, preemption="recompute")
    for _ in range(2):
        run.submit([0] * 8, Sampling(8), 5.0)
    run.finish()
    write_trace(tmp_path / "out" / "trace.json", run.trace, run.requests)
    events = json.loads((tmp_path / "out" / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i"}
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {(DEVICE, 0): "steps", (REQUESTS, 0): "request 0", (REQUESTS, 1): "request 1"}
    spans = rows(events)
    assert spans.keys() == named.keys()
    device = spans[DEVICE, 0]
    assert len(device) == len(run.trace.steps) and device[0]["name"] == "prefill of 16 tokens"
    assert (device[0]["ts"], device[0]["dur"]) == (0.0, pytest.approx(1.16e6)), "from the first arrival on"
    assert device[0]["args"] == {"prefill_tokens": 16, "decode_tokens": 0, "recompute_tokens": 0}
    last = [span["name"] for span in spans[REQUESTS, 1]]
    assert last[:2] == ["waits", "prefill"] and last[2:] == ["recompute + decode", *["decode"] * 6]
    (preempted,) = [event for event in events if event["ph"] == "i"]
    assert (preempted["tid"], preempted["args"]["back by"]) == (1, "recompute")


def test_nothing_ran(lab) -> None:
    run = lab.simulated(4)
    assert [event["ph"] for event in trace_events(run.trace, run.requests)] == ["M"] * 4


@settings(max_examples=60, deadline=None)
@given(asked=WORKLOADS, scheduler=st.sampled_from(sorted(SCHEDULERS)), spare=st.integers(0, 12))
def test_nothing_overlaps_and_all_is_there(lab, asked, scheduler: str, spare: int) -> None:
    blocks = lab.smallest_pool([one[:2] for one in asked], 4) + spare
    run = lab.simulated(blocks, host_blocks=100, preemption="swap", scheduler=scheduler)
    run.offer(*asked)
    run.finish()
    events = json.loads(json.dumps(list(trace_events(run.trace, run.requests))))
    for spans in rows(events).values():
        assert all(span["ts"] >= 0 and span["dur"] >= 0 for span in spans)
        assert all(one["ts"] + one["dur"] <= after["ts"] + 1e-3 for one, after in pairwise(spans))
    assert sum(event["ph"] == "i" for event in events) == len(run.trace.recoveries)
    told = sum(len(step.chunks) for step in run.trace.steps)
    assert sum(event["ph"] == "X" for event in events) == len(run.trace.steps) + len(run.requests) + told
