"""The tables of notebooks 13 and 14: paper, measured, floor."""

from __future__ import annotations

from typing import Any

from firsttoken.study.measures import Scalar
from firsttoken.study.record import Result
from firsttoken.study.show import interval
from firsttoken_studies.progressiveserve.coldstart.harness import BUCKET, KERNEL, NONE, SERVER, files_were, link_key

Table = list[dict[str, Any]]


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


def target_rows(recorded: Result | None, now: Result) -> Table:
    """The targets with their floor, what is recorded and what this run measured; an empty cell where a result lacks
    the measure."""
    known = recorded or now
    return [
        {
            "ratio": what,
            "asked": asked,
            "floor": f"{share['value']:.3f}" if (share := known.summary.get(floor, **place)) else "",
            "recorded": interval(recorded.summary.get(measure, **place, than=than), 3) if recorded else "",
            "your run": interval(now.summary.get(measure, **place, than=than), 3),
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
