"""The tables of notebooks 13 and 14: paper, measured, floor."""

from __future__ import annotations

from typing import Any

from firsttoken.progressive.coldstart.harness import BUCKET, KERNEL, NONE, SERVER, files_were, link_key
from firsttoken.progressive.coldstart.summary import LEAN
from firsttoken.progressive.coldstart.variants import VARIANTS
from firsttoken.study.record import Result
from firsttoken.study.show import interval
from firsttoken.study.system import NOT_HERE

Table = list[dict[str, Any]]


def first_token_rows(result: Result, key: str) -> Table:
    """TTFT of every variant over the link ``key`` ("1gbit"), by both definitions, in s with 95 % intervals.

    A variant that was asked for and cannot run here says so: another loader over a token bucket, or not installed.
    """
    absent = result.provenance.get("left_out", {})  # results recorded before that was kept lack it
    left_out = {name for link in links_of(result, key) for name in absent.get(link, ())}
    rows: Table = []
    for name, variant in VARIANTS.items():
        entry = {
            f"{scope} {q}": interval(result.summary.get(f"{name}_{short}_{q.lower()}_{key}"), 2)
            for scope, short in (("from the request's arrival", "request"), ("from process creation", "process"))
            for q in ("P50", "P95")
        }
        if name in left_out:
            entry = dict.fromkeys(entry, NOT_HERE)
        if any(entry.values()):
            rows.append({"variant": variant.label, **entry})
    return rows


def lean_rows(result: Result) -> Table:
    """Starts without transformers over those with it, process to token, and over what none can do without: importing
    torch, or the bytes at the rate read alone, whichever takes longer."""
    rows: Table = []
    for name, base in LEAN.items():
        for key in sorted({link_key(row) for row in result.rows}):
            if (over := result.summary.get(f"{name}_over_{base}_{key}")) is None:
                continue
            bound = result.summary[f"{name}_over_bound_{key}"]
            rows.append(
                {
                    "lean start": f"{VARIANTS[name].label}, {key}",
                    "asked": "<= 0.5",
                    "/ the same with transformers": interval(over, 3),
                    "/ max(import torch, its bytes)": interval(bound, 3),
                }
            )
    return rows


def links_of(result: Result, key: str) -> set[str]:
    """The names of the links that the measures call ``key``."""
    return {row["link"] for row in result.rows if link_key(row) == key}


TARGETS: tuple[tuple[str, str, str, str], ...] = (
    ("stage-1 load / (its bytes / rate read alone)", "stage1_load_over_floor_1gbit", "<= 1.10", ""),
    ("whole model, streamed: TTFT / max(load, compute)", "whole_streamed_over_bound_1gbit", "<= 1.15", ""),
    ("progressive TTFT / whole TTFT, same loader", "progressive_over_whole_1gbit", "<= 0.80", "byte_share_first_1gbit"),
    ("P95 TTFT below from_pretrained, %", "p95_reduction_vs_from_pretrained_1gbit", ">= 20", ""),
    ("P95 TTFT below the ServerlessLLM-style pool's, %", "p95_reduction_vs_chunked_1gbit", ">= 20", ""),
    ("whole model, this disk: TTFT / best peer's", "whole_over_best_peer_unshaped", "<= 1.25, aim < 1", ""),
    ("whole model, this disk: usable / quickest peer's", "whole_ready_over_quickest_peer_unshaped", "aim <= 1", ""),
    ("lean, this disk: process to token / whole start's", "lean_over_whole_streamed_unshaped", "<= 0.5", ""),
    ("lean, this disk: / max(import torch, its bytes)", "lean_over_bound_unshaped", "aim <= 1.15", ""),
    ("lean, data server: process to token / whole start's", "lean_over_whole_streamed_1gbit_server", "<= 0.5", ""),
    ("lean, data server: / max(import torch, its bytes)", "lean_over_bound_1gbit_server", "aim <= 1.15", ""),
    ("peak memory / whole start's", "peak_memory_over_whole_1gbit", "<= 1.15", ""),
    ("device-seconds to the first token / whole start's", "device_s_first_1gbit", "<= 0.9 (paper 0.79)", ""),
    ("device-seconds to the whole model / whole start's", "device_s_full_1gbit", "<= 0.9 (paper 1.12)", ""),
    ("CPU-seconds to the first token / whole start's", "cpu_s_first_1gbit", "", ""),
    ("CPU-seconds to the whole model / whole start's", "cpu_s_full_1gbit", "", ""),
    ("time to the whole model / whole start's", "full_over_whole_1gbit", "(paper 1.12)", "byte_share_full_1gbit"),
)
"""What is compared, the measure that answers, what is asked of it, and the measure that is its floor."""


def target_rows(result: Result) -> Table:
    """The targets with what was measured; an empty cell where the result lacks the measure."""
    found = result.summary
    return [
        {
            "ratio": what,
            "asked": asked,
            "floor": f"{found[floor]['value']:.3f}" if floor in found else "",
            "measured": interval(found.get(measure), 3),
        }
        for what, measure, asked, floor in TARGETS
    ]


def link_rows(result: Result) -> Table:
    """Every link: what was asked, what reading alone reached, and the gain of the progressive start."""
    links = {row["link"]: row for row in result.rows}
    rows: Table = []
    for name, row in links.items():
        key = link_key(row)
        rows.append(
            {
                "link": name,
                "limited by": _limit(row, result),
                "files": files_were(row),
                "rate read alone, Gbit/s": interval(result.summary.get(f"bandwidth_{key}"), 2),
                "progressive / whole": interval(result.summary.get(f"progressive_over_whole_{key}"), 3),
            }
        )
    return rows


def _limit(row: dict[str, Any], result: Result) -> str:
    limit = {NONE: "the disk", KERNEL: "the kernel", BUCKET: "a token bucket", SERVER: "a data server"}[
        row["shaped_by"]
    ]
    refused = result.provenance.get("no_kernel_limit")  # absent where it was recorded before that was kept
    return f"{limit} ({refused})" if refused and row["shaped_by"] == BUCKET else limit


def deferral_rows(result: Result) -> Table:
    """By the number of deferred layers: TTFT in s, and F1 in % and perplexity by the way in which they were chosen."""
    sizes = sorted({row["deferred_layers"] for row in result.rows if "ttft_request_s" in row})
    blocks = {(r["selection"], r["deferred_layers"]): r["block"] for r in result.rows if "selection" in r}
    found, rows = result.summary, []
    for size in sizes:
        entry: dict[str, Any] = {"layers deferred": size, "TTFT, s": interval(found.of("ttft_p50_s", layers=size), 2)}
        titles = ("distance", "perplexity", "healed")
        for title, selection in zip(titles, titles if size else ("none",), strict=False):
            if (block := blocks.get((selection, size))) is not None:
                place = {"variant": selection, "layers": size}
                entry[f"{title}: block"] = f"{block[0]}-{block[-1]}" if block else "whole"
                entry[f"{title}: F1, %"] = f"{found.value('f1_pct', **place):.1f}"
                entry[f"{title}: perplexity"] = f"{found.value('perplexity', **place):.1f}"
        rows.append(entry)
    return rows


def most_deferred(result: Result) -> int:
    """The largest number of layers that was deferred."""
    return max(row["deferred_layers"] for row in result.rows if "ttft_request_s" in row)


def shape_rows(result: Result) -> Table:
    """Larger shapes: the progressive start over the whole one, beside its share of the bytes."""
    rows: Table = []
    for name, entry in result.summary.items():
        shape, found, link = name.partition("_ratio_")
        if found:
            rows.append(
                {
                    "shape and link": f"{shape}, {link}",
                    "progressive / whole, TTFT from arrival": interval(entry, 3),
                    "floor: share of the bytes": f"{result.summary[f'{shape}_byte_share']['value']:.3f}",
                    "n": entry["n"],
                }
            )
    return rows
