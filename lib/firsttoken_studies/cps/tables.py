"""The tables of notebooks 20 to 23, from results alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import numpy as np

from firsttoken.cps.crossing import Crossing, crossing, fit_crossing
from firsttoken.engine.workload_items import Item
from firsttoken.simulation.costs.published import TABLE_2, Table2Row, decomposed
from firsttoken_studies.cps.styles import PATH_LOOKS, POLICIES
from firsttoken_studies.nb21_swap_or_recompute.study import swap_ms
from firsttoken_studies.nb22_cross_point_scheduler.study import AS_PUBLISHED, BOUND, CONTROLS, MEANS, OFF
from firsttoken_studies.record.results import Result, Rows, Table
from firsttoken_studies.record.show import interval


def environment_rows(result: Result) -> Rows:
    """Return the components of Table 1 beside this machine's."""
    parts = [row for row in result.rows if row["what"] == "part"]
    return [{key: row[key] for key in ("component", "paper", "here")} for row in parts]


def limit_rows(result: Result) -> Table:
    """Yield for each pair of parts what the first allows, what Table 1 has beside it, and whether both can be."""
    for row in result.rows:
        if row["what"] == "limit":
            yield {
                "pair": f"{row['part']} and {row['other']}",
                "allows": f"{row['allows']:g} {row['unit']}",
                "Table 1 has": f"{row['asked']:g}",
                "together": "impossible" if row["broken"] else "possible",
                "source": row["source"],
            }


def published_rows() -> Table:
    """Table 2 as printed, and what a copy of 4 KiB costs in it if the bytes cross at 25 GB/s."""
    for line in TABLE_2:
        parts = decomposed(line.tokens)
        yield {
            "tokens": line.tokens,
            "out, ms": line.out_ms,
            "prep, ms": line.prep_ms,
            "in, ms": line.in_ms,
            "swap, ms": line.swap_ms,
            "recompute, ms": line.recompute_ms,
            "copies each way": parts.copies,
            "bytes at 25 GB/s, ms each way": round(parts.wire_s * 1e3, 2),
            "rest, us a copy (out, in)": f"{parts.out_us_per_copy:.2f}, {parts.in_us_per_copy:.2f}",
        }


def published_crossing_rows() -> Rows:
    """Return the crossing in Table 2, by the way it is read, and with each of the table's lines left out."""
    rows = [
        {"read": "straight between the points", "verdict": _crossing(crossing, TABLE_2)},
        {"read": "the same on a log2 axis", "verdict": _crossing(partial(crossing, log2=True), TABLE_2)},
        {"read": "one straight line each, relative errors", "verdict": _crossing(fit_crossing, TABLE_2)},
    ]
    for omitted in TABLE_2:
        others = [line for line in TABLE_2 if line is not omitted]
        rows.append(
            {"read": f"straight lines, without {omitted.tokens} tokens", "verdict": _crossing(fit_crossing, others)}
        )
    return rows


def recovery_rows(result: Result) -> Table:
    """Table 2 of this machine: medians by length."""
    swaps = result.frame(what="swap")
    taken = swap_ms(swaps).groupby([swaps.path, swaps.tokens]).median()
    for tokens, again_ms in result.frame(what="recompute").groupby("tokens").ms.median().items():
        line = {f"swap {name}, ms": taken[name, tokens] for name in PATH_LOOKS}
        line["plain copies out and in, ms"] = result.floors[f"swap_{tokens}_tokens"]["value"]
        line["recompute, ms"] = again_ms
        yield {"tokens": tokens} | {key: _digits(value) for key, value in line.items()}


def part_rows(result: Result, lengths: Sequence[int]) -> Table:
    """A restoration taken apart as in Table 2, theirs and ours; medians in ms. A plain copy needs no preparing."""
    for line in (line for line in TABLE_2 if line.tokens in lengths):
        of_length = [row for row in result.rows if row["tokens"] == line.tokens]
        if not any(row["what"] == "swap" for row in of_length):
            continue
        for part in ("out", "prep", "in"):
            cells = {"restoring": f"{line.tokens:,} tokens: {part}", "paper, ms": f"{getattr(line, f'{part}_ms'):.3g}"}
            for name, (label, *_) in PATH_LOOKS.items():
                own_ms = [row[f"{part}_ms"] for row in of_length if row["what"] == "swap" and row["path"] == name]
                cells[f"{label}, ms"] = _digits(_median(own_ms))
            plain = [row["ms"] for row in of_length if row["what"] == "memcpy" and row["direction"] == part]
            yield cells | ({"plain copy, ms": _digits(_median(plain))} if plain else {})
        again = _digits(_median([row["ms"] for row in of_length if row["what"] == "recompute"]))
        paper = {"restoring": f"{line.tokens:,} tokens: prefilled again", "paper, ms": f"{line.recompute_ms:.3g}"}
        yield paper | {"recomputed here, ms": again}


def length_rows(loads: Sequence[Sequence[Item]]) -> Table:
    """Yield the lengths of the conversations of workloads: prompt, answer and both, in tokens."""
    items = [item for load in loads for item in load]
    parts = {
        "short: up to 1,024": [item for item in items if item.total_tokens <= 1024],
        "long": [item for item in items if item.total_tokens > 1024],
        "all": items,
    }
    for name, values in parts.items():
        totals = [item.total_tokens for item in values]
        middle, high = np.percentile(totals, [50, 90])
        line = {
            "conversations": name,
            "a workload": len(values) // len(loads),
            "prompt, mean": _mean(values, "prompt_tokens"),
        }
        line |= {"answer, mean": _mean(values, "output_tokens"), "both, mean": _mean(values, "total_tokens")}
        yield line | {"median": f"{middle:.0f}", "90 % up to": f"{high:.0f}", "range": f"{min(totals)}-{max(totals)}"}


def policy_rows(result: Result) -> Table:
    """Figure 2 in numbers: means over workloads with intervals."""
    for name, (label, _, _) in POLICIES.items():
        line = {"policy": label}
        for measure, (column, *_) in MEANS.items():
            digits = {"recovery_s": 2, "ttft_mean_ms": 0, "preemptions": 0}.get(measure, 1)
            for entry in result.summary.all(measure, policy=name):
                line[column] = interval(entry, digits)
        if len(line) > 1:
            yield line


def gain_rows(result: Result) -> Rows:
    """Return how much CrossPoint and the controls lie below others, paired by workload, with the paper's values."""
    summary = result.summary
    paper = {("tpot_p99_below_pct", "swap"): "13.1", ("tpot_p99_below_pct", "recompute"): "20.1"}
    labels = {
        "ttft_mean_below_pct": "mean TTFT",
        "tpot_mean_below_pct": "mean TPOT",
        "tpot_p99_below_pct": "P99 TPOT",
        "recovery_below_pct": "recovery cost",
    }
    lines = []
    for (measure, label), other in product(labels.items(), ("swap", "recompute")):
        gain = interval(summary.of(measure, policy="cross_point", than=other, costs="published"))
        row_name = f"{label} of CrossPoint below {POLICIES[other][0]}, %"
        lines.append((row_name, gain, paper.get((measure, other), "")))
    for name, other in product(CONTROLS, ("swap", "cross_point")):
        row_name = f"P99 TPOT of {POLICIES[name][0].removeprefix('control: ')} below {POLICIES[other][0]}, %"
        if gain := summary.get("tpot_p99_below_pct", policy=name, than=other, costs="published"):
            lines.append((row_name, interval(gain)))
    cheaper = summary.of("recovery_below_pct", policy="swap", than=AS_PUBLISHED, costs="coalesced")
    gain = summary.of("tpot_p99_below_pct", policy="cross_point", than="swap", costs="coalesced")
    share = summary.of("recovery_share_pct", policy="cross_point", costs="published")
    least = f"{summary.value('ttft_mean_ms', policy=BOUND) / 1e3:.1f}"
    lines += [
        ("recovery cost of Swap with coalesced copies below CrossPoint, %", interval(cheaper, 2)),
        ("P99 TPOT of CrossPoint below Swap, both with coalesced copies, %", interval(gain, 2)),
        ("share of all recoveries in a run of CrossPoint, %", interval(share, 2)),
        ("least mean TTFT with 512 blocks of 16 tokens and steps of the paper's TPOT, s", least, "1.65"),
    ]
    return [dict(zip(("what", "measured", "paper"), line, strict=False)) for line in lines]


def simulator_rows(result: Result) -> Table:
    """Yield the distance of the simulated runs from the live ones, by measure."""
    labels = {"source": "simulated", "than": "live"}
    for measure, name in OFF.items():
        mean = interval(result.summary.of(measure, **labels, across="mean"))
        worst = result.summary.value(measure, **labels, across="worst")
        yield {"metric": name, "off, % (mean over runs)": mean, "worst run, %": f"{worst:.1f}"}


def _crossing(estimate: Callable[..., Crossing], lines: Sequence[Table2Row]) -> str:
    swap, again = [line.swap_ms for line in lines], [line.recompute_ms for line in lines]
    return estimate([line.tokens for line in lines], swap, again).verdict


def _mean(items: Sequence[Item], field: str) -> str:
    return f"{np.mean([getattr(item, field) for item in items]):.0f}"


def _median(values: list[float]) -> float:
    return float(np.median(values))


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
