"""The tables of notebooks 13 and 14: paper, measured, floor."""

from __future__ import annotations

from typing import Any

from firsttoken.progressive.coldstart.harness import BUCKET, KERNEL, NONE, SERVER, files_were, link_key
from firsttoken.progressive.coldstart.summary import LEAN
from firsttoken.progressive.coldstart.variants import VARIANTS
from firsttoken.study.measures import Scalar
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
            f"{scope} {q}": interval(result.summary.get(f"{measure}_{q.lower()}_s", variant=name, link=key), 2)
            for scope, measure in (("from the request's arrival", "ttft"), ("from process creation", "process_ttft"))
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
            if (over := result.summary.get("process_ttft_x", variant=name, than=base, link=key)) is None:
                continue
            bound = result.summary.of("process_ttft_x", variant=name, than="bound", link=key)
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


_FIRST, _STREAMED = ({"variant": variant, "link": "1gbit"} for variant in ("progressive", "whole_streamed"))
_DISK, _LEAN = ({"variant": variant, "link": "unshaped"} for variant in ("whole", "lean"))
_SERVED = {"variant": "lean", "link": "1gbit_server"}
_BASE = "whole_streamed"

TARGETS: tuple[tuple[str, str, dict[str, Scalar], str, str, str], ...] = (
    ("stage-1 load / (its bytes / rate read alone)", "load_x", _FIRST, "floor", "<= 1.10", ""),
    ("whole model, streamed: TTFT / max(load, compute)", "ttft_x", _STREAMED, "bound", "<= 1.15", ""),
    ("progressive TTFT / whole TTFT, same loader", "ttft_x", _FIRST, _BASE, "<= 0.80", "byte_share"),
    ("P95 TTFT below from_pretrained, %", "ttft_p95_below_pct", _FIRST, "from_pretrained", ">= 20", ""),
    ("P95 TTFT below the ServerlessLLM-style pool's, %", "ttft_p95_below_pct", _FIRST, "chunked", ">= 20", ""),
    ("whole model, this disk: TTFT / best peer's", "ttft_x", _DISK, "best_peer", "<= 1.25, aim < 1", ""),
    ("whole model, this disk: usable / quickest peer's", "ready_x", _DISK, "quickest_peer", "aim <= 1", ""),
    ("lean, this disk: process to token / whole start's", "process_ttft_x", _LEAN, _BASE, "<= 0.5", ""),
    ("lean, this disk: / max(import torch, its bytes)", "process_ttft_x", _LEAN, "bound", "aim <= 1.15", ""),
    ("lean, data server: process to token / whole start's", "process_ttft_x", _SERVED, _BASE, "<= 0.5", ""),
    ("lean, data server: / max(import torch, its bytes)", "process_ttft_x", _SERVED, "bound", "aim <= 1.15", ""),
    ("peak memory / whole start's", "peak_memory_x", _FIRST, _BASE, "<= 1.15", ""),
    ("device-seconds to the first token / whole start's", "device_time_x", _FIRST, _BASE, "<= 0.9 (paper 0.79)", ""),
    (
        "device-seconds to the whole model / whole start's",
        "full_device_time_x",
        _FIRST,
        _BASE,
        "<= 0.9 (paper 1.12)",
        "",
    ),
    ("CPU-seconds to the first token / whole start's", "cpu_time_x", _FIRST, _BASE, "", ""),
    ("CPU-seconds to the whole model / whole start's", "full_cpu_time_x", _FIRST, _BASE, "", ""),
    ("time to the whole model / whole start's", "full_time_x", _FIRST, _BASE, "(paper 1.12)", "full_byte_share"),
)
"""What is compared, the measure that answers, of what and to what, what is asked of it, and which is its floor."""


def target_rows(result: Result) -> Table:
    """The targets with what was measured; an empty cell where the result lacks the measure."""
    found = result.summary
    return [
        {
            "ratio": what,
            "asked": asked,
            "floor": f"{share['value']:.3f}" if (share := found.get(floor, **place)) else "",
            "measured": interval(found.get(measure, **place, than=than), 3),
        }
        for what, measure, place, than, asked, floor in TARGETS
    ]


def link_rows(result: Result) -> Table:
    """Every link: what was asked, what reading alone reached, and the gain of the progressive start."""
    links = {row["link"]: row for row in result.rows}
    rows: Table = []
    for name, row in links.items():
        key = link_key(row)
        over = result.summary.get("ttft_x", variant="progressive", than=_BASE, link=key)
        rows.append(
            {
                "link": name,
                "limited by": _limit(row, result),
                "files": files_were(row),
                "rate read alone, Gbit/s": interval(result.summary.get("bandwidth_gbit_per_s", link=key), 2),
                "progressive / whole": interval(over, 3),
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
    for entry in result.summary.all("ttft_x"):
        shape, link = entry["where"]["model"], entry["where"]["link"]
        share = result.summary.value("byte_share", model=shape, variant="progressive")
        rows.append(
            {
                "shape and link": f"{shape}, {link}",
                "progressive / whole, TTFT from arrival": interval(entry, 3),
                "floor: share of the bytes": f"{share:.3f}",
                "n": entry["n"],
            }
        )
    return rows
