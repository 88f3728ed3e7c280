"""From the rows of a link to the ratios that are judged: medians and 95th percentiles, bootstrapped over rounds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import numpy as np

from firsttoken.progressive.coldstart.harness import link_key
from firsttoken.progressive.coldstart.variants import VARIANTS
from firsttoken.study.record import Rows
from firsttoken.study.stats import Along, Interval, bootstrap

P95 = Along(lambda sample, axis: np.percentile(sample, 95, axis=axis))

REQUEST, PROCESS, READY = "ttft_request_s", "ttft_process_s", "ready_s"
LEAN = {"lean": "whole_streamed", "lean_progressive": "progressive"}
"""Starts without transformers, and what each is held against: the same with it."""

Measures = dict[str, dict[str, Any]]


def values(rows: Rows, variant: str, column: str) -> list[float]:
    """``column`` of the trials of ``variant``, by round."""
    return list(_by_round(rows, variant, column).values())


def _by_round(rows: Rows, variant: str, column: str) -> dict[int, float]:
    chosen = sorted((row for row in rows if row["variant"] == variant), key=lambda row: row["round"])
    return {row["round"]: row[column] for row in chosen}


def ratio(rows: Rows, variant: str, base: str, column: str = REQUEST, q: float = 50) -> Interval:
    """The ``q``-th percentile of ``variant`` over that of ``base``, with the interval over resampled rounds; of the
    rounds in which both ran."""
    ours, theirs = _by_round(rows, variant, column), _by_round(rows, base, column)
    pairs = np.array([(ours[at], theirs[at]) for at in ours if at in theirs])

    def quotient(sample: np.ndarray, axis: int) -> np.ndarray:
        return np.divide(*np.moveaxis(np.percentile(sample, q, axis=axis), -1, 0))

    return bootstrap(pairs, Along(quotient))


def full_rows(rows: Rows) -> Rows:
    """The progressive trials as if each ended with the whole model in place instead of with its first token."""
    stages = ("stage2_s", "stage3_s")
    complete = [row for row in rows if row["variant"] == "progressive" and "cpu_full_s" in row]
    return [
        row
        | {
            "variant": "progressive_full",
            REQUEST: row[REQUEST] + sum(row[stage] for stage in stages),
            PROCESS: row[PROCESS] + sum(row[stage] for stage in stages),
            "cpu_s": row["cpu_full_s"],
        }
        for row in complete
    ]


def cold_start_summary(rows: Rows, _: Mapping[str, Any]) -> Measures:
    """The measures of every link."""
    return {name: entry for found in _parts(rows, link_key) for name, entry in link_summary(found).items()}


def shapes_summary(rows: Rows, _: Mapping[str, Any]) -> Measures:
    """Of every shape: the progressive start over the whole one by link, and the share of the bytes it waits for."""
    summary: Measures = {}
    for found in _parts(rows, lambda row: (row["shape"], link_key(row))):
        shape = found[0]["shape"]
        summary[f"{shape}_ratio_{link_key(found[0])}"] = ratio(found, "progressive", "whole_streamed").summary("x")
        share = values(found, "progressive", "bytes")[0] / values(found, "read", "bytes")[0]
        summary[f"{shape}_byte_share"] = {"value": share, "unit": "bytes of stage 1 / bytes of the model"}
    return summary


def _parts(rows: Rows, key: Callable[[dict[str, Any]], Hashable]) -> Iterable[Rows]:
    """The rows of each key, in recorded order."""
    parts: dict[Hashable, Rows] = {}
    for row in rows:
        parts.setdefault(key(row), []).append(row)
    return parts.values()


def link_floor(rows: Rows) -> dict[str, Any]:
    """The floor of one link in s: all bytes at its measured rate."""
    seconds, size = float(np.median(values(rows, "read", "load_s"))), values(rows, "read", "bytes")[0]
    return {"value": seconds, "unit": "s", "why": f"{size:,} bytes at the rate read alone"}


def link_summary(rows: Rows) -> Measures:
    """Measures of one link, their names ending in its key."""
    read, size = values(rows, "read", "load_s"), values(rows, "read", "bytes")[0]
    rate = size / float(np.median(read))
    there = {row["variant"] for row in rows}
    measures: Measures = {"bandwidth": bootstrap([8e-9 * size / s for s in read], "median").summary("Gbit/s")}
    for name in sorted(there - {"read"}):
        for column, short in ((REQUEST, "request"), (PROCESS, "process")):
            times = values(rows, name, column)
            measures[f"{name}_{short}_p50"] = bootstrap(times, "median").summary("s")
            measures[f"{name}_{short}_p95"] = bootstrap(times, P95).summary("s")
    if {"progressive", "whole_streamed"} <= there:
        measures |= _progressive(rows, size, rate)
    peers = sorted(name for name in there if VARIANTS[name].peer and not VARIANTS[name].lean)
    for peer in peers if "progressive" in there else ():
        measures |= _reductions(rows, peer, peer)
    if peers and "whole" in there:
        best = min(peers, key=lambda name: float(np.median(values(rows, name, REQUEST))))
        measures["best_peer"] = {"value": best, "unit": "by median TTFT from request arrival"}
        measures["whole_over_best_peer"] = ratio(rows, "whole", best).summary("x")
        # until the prefill could run at its warm speed: from_pretrained and safetensors return before they have read,
        # and ours tokenizes while it reads, so the time between a loader's call and its return compares neither
        ready = [row | {READY: row[REQUEST] - row["prefill_warm_s"]} for row in rows if "prefill_warm_s" in row]
        quickest = min(peers, key=lambda name: float(np.median(values(ready, name, READY))))
        measures["quickest_peer"] = {"value": quickest, "unit": "by median time until the weights can be used"}
        measures["whole_ready_over_quickest_peer"] = ratio(ready, "whole", quickest, READY).summary("x")
    measures |= _lean(rows)
    for name in there:
        # ParaServe's arithmetic: k links bring everything in a k-th of the time
        if (count := VARIANTS[name].links) > 1:
            shares = [s * count * rate / size for s in values(rows, name, "load_s")]
            measures[f"{name}_over_expected"] = bootstrap(shares, "median").summary("x of T / k")
    return {f"{name}_{link_key(rows[0])}": entry for name, entry in measures.items()}


def _progressive(rows: Rows, size: int, rate: float) -> Measures:
    """The progressive start against the same loader's whole model of ``size`` bytes, and both against what physics
    allows at ``rate`` bytes/s."""
    whole = float(np.median(values(rows, "whole_streamed", "prefill_warm_s")))
    bound = max(size / rate, whole)
    loads = values(rows, "progressive", "load_s")
    first, full = (values(rows, "progressive", column)[0] for column in ("bytes", "full_bytes"))
    both = rows + full_rows(rows)
    measures = {
        "byte_share_first": {"value": first / size, "unit": "of the model's bytes, adapter A included"},
        "byte_share_full": {"value": full / size, "unit": "of the model's bytes, adapters A and AB included"},
        "progressive_over_whole": ratio(rows, "progressive", "whole_streamed").summary("x"),
        **_reductions(rows, "whole_streamed", "same_loader"),
        "stage1_load_over_floor": bootstrap([s * rate / first for s in loads], "median").summary("x"),
        "whole_streamed_over_bound": bootstrap(
            [s / bound for s in values(rows, "whole_streamed", REQUEST)], "median"
        ).summary("x"),
        # the report counts device time from the creation of the process (3.1.3)
        "device_s_first": ratio(rows, "progressive", "whole_streamed", PROCESS).summary("x"),
        "device_s_full": ratio(both, "progressive_full", "whole_streamed", PROCESS).summary("x"),
        "full_over_whole": ratio(both, "progressive_full", "whole_streamed").summary("x"),
        "cpu_s_first": ratio(rows, "progressive", "whole_streamed", "cpu_s").summary("x"),
        "cpu_s_full": ratio(both, "progressive_full", "whole_streamed", "cpu_s").summary("x"),
    }
    if None not in values(rows, "progressive", "growth_bytes") + values(rows, "whole_streamed", "growth_bytes"):
        measures["peak_memory_over_whole"] = ratio(rows, "progressive", "whole_streamed", "growth_bytes").summary("x")
    if any("device_peak_bytes" in row for row in rows):
        device = ratio(rows, "progressive", "whole_streamed", "device_peak_bytes")
        measures["peak_device_memory_over_whole"] = device.summary("x")
    if any(row["variant"] == "whole" for row in rows):
        measures["streaming_gain"] = _reduction(ratio(rows, "whole_streamed", "whole"))
    return measures


def _lean(rows: Rows) -> Measures:
    """Starts without transformers against the same loader's with it, from the creation of the process; and against what
    none can do without: importing torch, or the bytes at the rate read alone, whichever takes longer."""
    measures: Measures = {}
    rate = values(rows, "read", "bytes")[0] / float(np.median(values(rows, "read", "load_s")))
    for name, base in LEAN.items():
        if not {name, base} <= {row["variant"] for row in rows}:
            continue
        bound = max(values(rows, name, "bytes")[0] / rate, float(np.median(values(rows, name, "torch_s"))))
        measures[f"{name}_over_{base}"] = ratio(rows, name, base, PROCESS).summary("x")
        shares = [s / bound for s in values(rows, name, PROCESS)]
        measures[f"{name}_over_bound"] = bootstrap(shares, "median").summary("x")
        measures[f"{name}_says_the_same"] = {
            "value": len({row.get("token_id") for row in rows if row["variant"] in (name, base)}) == 1,
            "unit": f"first tokens of {name} and {base} are equal",
        }
    return measures


def _reductions(rows: Rows, base: str, called: str) -> Measures:
    """What the progressive start saves of the first-token time of ``base``: P50 and P95, from the request's arrival,
    and from the creation of the process, as the report measures (3.4.3)."""
    return {
        f"p{q}{since}_reduction_vs_{called}": _reduction(ratio(rows, "progressive", base, column, q))
        for q in (50, 95)
        for column, since in ((REQUEST, ""), (PROCESS, "_process"))
    }


def _reduction(found: Interval) -> dict[str, Any]:
    """A ratio as what it saves, in %."""
    return Interval(1 - found.estimate, 1 - found.high, 1 - found.low, found.n).summary("%", 100)
