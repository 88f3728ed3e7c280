"""Makes of the rows of a link the ratios that are judged: medians and 95th percentiles, bootstrapped over rounds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from firsttoken.study.stats import AxisStatistic, Interval, bootstrap
from firsttoken.study.summary import Entry, Summary
from firsttoken_studies.progressiveserve.coldstart.harness import link_key
from firsttoken_studies.progressiveserve.coldstart.variants import VARIANTS
from firsttoken_studies.record.results import Rows, distinct, rows_where

P95 = AxisStatistic(lambda sample, axis: np.percentile(sample, 95, axis=axis))

REQUEST, PROCESS, READY = "ttft_request_s", "ttft_process_s", "ready_s"
STARTS = {"ttft": REQUEST, "process_ttft": PROCESS}
"""First tokens are timed from the request's arrival, and from the creation of the process, as in the report (3.4.3)."""
LEAN = {"lean": "whole_streamed", "lean_progressive": "progressive"}
"""Starts without transformers, and what each is held against: the same with it."""

Add = Callable[..., Entry]  # Summary.add, the link filled in


def values(rows: Rows, variant: str, column: str) -> list[float]:
    """``column`` of the trials of ``variant``, by round."""
    return list(_by_round(rows, variant, column).values())


def _by_round(rows: Rows, variant: str, column: str) -> dict[int, float]:
    chosen = rows_where(rows, variant=variant)
    return {row["round"]: row[column] for row in sorted(chosen, key=lambda row: row["round"])}


def ratio(rows: Rows, variant: str, base: str, column: str = REQUEST, q: float = 50) -> Interval:
    """The ``q``-th percentile of ``variant`` over that of ``base``, with the interval over resampled rounds; of the
    rounds in which both ran."""
    ours, theirs = _by_round(rows, variant, column), _by_round(rows, base, column)
    pairs = np.array([(ours[trial], theirs[trial]) for trial in ours if trial in theirs])

    def quotient(sample: np.ndarray, axis: int) -> np.ndarray:
        return np.divide(*np.moveaxis(np.percentile(sample, q, axis=axis), -1, 0))

    return bootstrap(pairs, AxisStatistic(quotient))


_LATER = re.compile(r"stage\d+_s")


def full_rows(rows: Rows) -> Rows:
    """The progressive trials as if each ended with the whole model in place instead of with its first token."""
    return [
        row
        | {start: row[start] + sum(row[key] for key in row if _LATER.fullmatch(key)) for start in STARTS.values()}
        | {"variant": "progressive_full", "cpu_s": row["cpu_full_s"]}
        for row in rows_where(rows, variant="progressive")
        if "cpu_full_s" in row
    ]


def cold_start_summary(rows: Rows, _: Mapping[str, Any]) -> Summary:
    """The measures of every link; a record also has rows of starts that are no longer tried, which are left out."""
    rows = [row for row in rows if row["variant"] in VARIANTS]
    return Summary(chain.from_iterable(map(link_summary, by_link(rows).values())))


def shapes_summary(rows: Rows, _: Mapping[str, Any]) -> Summary:
    """Summarise each shape: its progressive start over the whole one by link, and the share of bytes it waits for."""
    summary = Summary()
    for shape in distinct(rows, "shape"):
        labels = {"model": shape, "variant": "progressive"}
        for link, link_rows in by_link(rows_where(rows, shape=shape)).items():
            speedup = ratio(link_rows, "progressive", "whole_streamed").summary("x")
            summary.add("ttft_x", speedup, **labels, than="whole_streamed", link=link)
            if not summary.get("byte_share", **labels):
                share = values(link_rows, "progressive", "bytes")[0] / values(link_rows, "read", "bytes")[0]
                summary.add("byte_share", {"value": share, "unit": "bytes of stage 1 / bytes of the model"}, **labels)
    return summary


def by_link(rows: Rows) -> dict[str, Rows]:
    """The rows of each link, by its key, in recorded order."""
    return {key: [row for row in rows if link_key(row) == key] for key in dict.fromkeys(map(link_key, rows))}


def link_floor(rows: Rows) -> dict[str, Any]:
    """The floor of one link in s: all bytes at its measured rate."""
    seconds, size = float(np.median(values(rows, "read", "load_s"))), values(rows, "read", "bytes")[0]
    return {"value": seconds, "unit": "s", "why": f"{size:,} bytes at the rate read alone"}


def link_summary(rows: Rows) -> Summary:
    """Summarize the measures of one link."""
    read, size = values(rows, "read", "load_s"), values(rows, "read", "bytes")[0]
    rate = size / float(np.median(read))
    present = {row["variant"] for row in rows}
    summary = Summary()
    add = partial(summary.add, link=link_key(rows[0]))
    add("bandwidth_gbit_per_s", bootstrap([8e-9 * size / s for s in read], "median").summary("Gbit/s"))
    for name in sorted(present - {"read"}):
        for start, column in STARTS.items():
            times = values(rows, name, column)
            add(f"{start}_p50_s", bootstrap(times, "median").summary("s"), variant=name)
            add(f"{start}_p95_s", bootstrap(times, P95).summary("s"), variant=name)
    if {"progressive", "whole_streamed"} <= present:
        _progressive(add, rows, size, rate)
    peers = sorted(name for name in present if VARIANTS[name].peer and not VARIANTS[name].lean)
    for peer in peers if "progressive" in present else ():
        _below(add, rows, peer)
    if peers and "whole" in present:
        best = min(peers, key=lambda name: float(np.median(values(rows, name, REQUEST))))
        add("best_peer", {"value": best, "unit": "by median TTFT from request arrival"})
        add("ttft_x", ratio(rows, "whole", best).summary("x"), variant="whole", than="best_peer")
        # until the prefill could run at its warm speed: from_pretrained and safetensors return before they have read,
        # and ours tokenizes while it reads, so the time between a loader's call and its return compares neither
        ready = [row | {READY: row[REQUEST] - row["prefill_warm_s"]} for row in rows if "prefill_warm_s" in row]
        quickest = min(peers, key=lambda name: float(np.median(values(ready, name, READY))))
        add("quickest_peer", {"value": quickest, "unit": "by median time until the weights can be used"})
        add("ready_x", ratio(ready, "whole", quickest, READY).summary("x"), variant="whole", than="quickest_peer")
    _lean(add, rows, rate)
    for name, variant in VARIANTS.items():
        # ParaServe's arithmetic: k links bring everything in a k-th of the time
        if name in present and variant.links > 1:
            shares = [s * variant.links * rate / size for s in values(rows, name, "load_s")]
            add("load_x", bootstrap(shares, "median").summary("x of T / k"), variant=name, than="expected")
    return summary


def _progressive(add: Add, rows: Rows, size: int, rate: float) -> None:
    """The progressive start against the same loader's whole model of ``size`` bytes, and both against what physics
    allows at ``rate`` bytes/s."""
    variant, base, full = "progressive", "whole_streamed", full_rows(rows)
    bound = max(size / rate, float(np.median(values(rows, base, "prefill_warm_s"))))

    def over(measure: str, column: str, *, to_full_model: bool = False) -> None:
        """Add the ratio of a start to its first token, or with ``to_full_model`` to the whole model in place."""
        interval = ratio(rows + full, "progressive_full" if to_full_model else variant, base, column)
        add(measure, interval.summary("x"), variant=variant, than=base)

    with_them = {"byte_share": ("bytes", "adapter A"), "full_byte_share": ("full_bytes", "adapters A and AB")}
    for measure, (column, adapters) in with_them.items():
        share = {"value": values(rows, variant, column)[0] / size, "unit": f"of the model's bytes, {adapters} included"}
        add(measure, share, variant=variant)
    over("ttft_x", REQUEST)
    _below(add, rows, base)
    loaded = [s * rate / values(rows, variant, "bytes")[0] for s in values(rows, variant, "load_s")]
    add("load_x", bootstrap(loaded, "median").summary("x"), variant=variant, than="floor")
    streamed = bootstrap([s / bound for s in values(rows, base, REQUEST)], "median")
    add("ttft_x", streamed.summary("x"), variant=base, than="bound")
    # the report counts device time from the creation of the process (3.1.3)
    over("device_time_x", PROCESS)
    over("full_device_time_x", PROCESS, to_full_model=True)
    over("full_time_x", REQUEST, to_full_model=True)
    over("cpu_time_x", "cpu_s")
    over("full_cpu_time_x", "cpu_s", to_full_model=True)
    if None not in values(rows, variant, "growth_bytes") + values(rows, base, "growth_bytes"):
        over("peak_memory_x", "growth_bytes")
    if any("device_peak_bytes" in row for row in rows):
        over("peak_device_memory_x", "device_peak_bytes")
    if any(row["variant"] == "whole" for row in rows):
        gain = _reduction(ratio(rows, "whole_streamed", "whole"))
        add("ttft_p50_below_pct", gain, variant="whole_streamed", than="whole")


def _lean(add: Add, rows: Rows, rate: float) -> None:
    """Starts without transformers against the same loader's with it, from the creation of the process; and against what
    none can do without: importing torch, or the bytes at ``rate`` bytes/s, whichever takes longer."""
    for name, base in LEAN.items():
        if not {name, base} <= {row["variant"] for row in rows}:
            continue
        bound = max(values(rows, name, "bytes")[0] / rate, float(np.median(values(rows, name, "torch_s"))))
        shares = [s / bound for s in values(rows, name, PROCESS)]
        tokens = {row.get("token_id") for row in rows if row["variant"] in (name, base)}
        same = {"value": len(tokens) == 1, "unit": f"first tokens of {name} and {base} are equal"}
        add("process_ttft_x", ratio(rows, name, base, PROCESS).summary("x"), variant=name, than=base)
        add("process_ttft_x", bootstrap(shares, "median").summary("x"), variant=name, than="bound")
        add("same_first_token", same, variant=name, than=base)


def _below(add: Add, rows: Rows, base: str) -> None:
    """Add the share of the first-token time of ``base`` that the progressive start saves: P50 and P95."""
    for q in (50, 95):
        for start, column in STARTS.items():
            saved = _reduction(ratio(rows, "progressive", base, column, q))
            add(f"{start}_p{q}_below_pct", saved, variant="progressive", than=base)


def _reduction(interval: Interval) -> dict[str, Any]:
    """A ratio as what it saves, in %."""
    return Interval(1 - interval.estimate, 1 - interval.high, 1 - interval.low, interval.n).summary("%", 100)
