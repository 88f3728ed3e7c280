"""The figures of notebooks 13 and 14, drawn from results alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.progressive.coldstart.harness import BUCKET, KERNEL, files_were, link_key
from firsttoken.progressive.coldstart.summary import REQUEST, values
from firsttoken.progressive.coldstart.variants import VARIANTS
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# phase, what it is made of, colour
PHASES = (
    ("config, tokenizer, empty model", ("config_and_tokenizer", "build"), COLOURS["configuration"]),
    ("waiting for weights", ("adapter", "load"), COLOURS["weights"]),
    ("prefill", ("prefill",), COLOURS["prefill"]),
)


def phase_stacks(result: Result, links: Sequence[str]) -> Figure:
    """Median phases from the arrival of the request to the first token, of the variants that ran over each of
    ``links``; the imports before it are told in words.

    A tick is the floor, the variant's bytes at the link's measured rate; a line the 95 % interval of the median TTFT,
    a dot its 95th percentile.
    """
    import matplotlib.pyplot as plt

    frames = [[row for row in result.rows if row["link"] == link and row["variant"] != "read"] for link in links]
    names = [sorted({row["variant"] for row in rows}, key=list(VARIANTS).index, reverse=True) for rows in frames]
    heights = [1.6 + len(found) for found in names]
    fig, axes = plt.subplots(len(links), 1, figsize=(9, 1 + 0.34 * sum(heights)), height_ratios=heights, squeeze=False)
    for ax, link, rows, found in zip(axes[:, 0], links, frames, names, strict=True):
        labels = []
        for place, name in enumerate(found):
            own = [row for row in rows if row["variant"] == name]
            median = result.summary.of("ttft_p50_s", variant=name, link=link_key(own[0]))
            _stack(ax, place, own, _floor(result, link, own), median)
            labels.append(f"{VARIANTS[name].label} (n = {len(own)})")
        before = float(
            np.median([_seconds(row, ("interpreter", "imports")) for row in rows if not VARIANTS[row["variant"]].lean])
        )
        ax.set(xlabel=f"seconds from the arrival of the request (imports: {before:.1f} s before)")
        ax.set(xlim=(0, None), title=_link_title(rows), yticks=range(len(found)), yticklabels=labels)
        ax.grid(axis="y", visible=False)
    handles, labels = axes[0][0].get_legend_handles_labels()
    kept = dict(zip(labels, handles, strict=True))
    fig.legend(kept.values(), kept.keys(), loc="outside lower center", ncols=3)
    return fig


def _stack(ax: Axes, place: int, rows: Rows, floor: float, median: dict[str, Any]) -> None:
    left = 0.0
    for label, parts, colour in PHASES:
        width = float(np.median([_seconds(row, parts) for row in rows]))
        ax.barh(place, width, left=left, color=colour, label=label, height=0.62)
        left += width
    if not VARIANTS[rows[0]["variant"]].early:  # its bytes move from the first line of the process on
        ax.plot([floor, floor], [place - 0.42, place + 0.42], color=COLOURS["floor"], linewidth=2.5, label="floor")
    interval = [median["low"], median["high"]]
    ax.plot(interval, [place, place], color="#777777", linewidth=2, label="median, 95 % interval")
    p95 = float(np.percentile([row[REQUEST] for row in rows], 95))
    ax.plot(p95, place, "o", color="white", markeredgecolor="black", markersize=5, label="95th percentile")


def _seconds(row: dict[str, Any], parts: Sequence[str]) -> float:
    return sum(row.get(f"phase_{part}_s", 0.0) for part in parts)


def _floor(result: Result, link: str, rows: Rows) -> float:
    """The bytes of these rows' variant at the rate that reading alone had; half the time over two links, and so on."""
    floor, whole = result.floors[f"link {link}"], max(row.get("bytes", 0) for row in result.rows)
    variant = VARIANTS[rows[0]["variant"]]
    share = 1.0 if variant.peer else rows[0]["bytes"] / whole
    return floor["value"] * share / variant.links


def _link_title(rows: Rows) -> str:
    name, shaped = rows[0]["link"], {KERNEL: "shaped in the kernel", BUCKET: "shaped by a token bucket"}
    if name == "unshaped":
        return f"this disk, {files_were(rows[0])}"
    return f"{name}, {shaped[rows[0]['shaped_by']]}" if rows[0]["shaped_by"] in shaped else name


def first_token_by_link(result: Result, variants: Sequence[str] = ("whole_streamed", "progressive")) -> Figure:
    """Median TTFT from the request's arrival, with its 95 % interval, against the measured rate of the link.

    Only links that gave the rate that was asked of them, one a rate: a rate beyond what this machine's memory gives is
    that of the memory once more.
    """
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(8, 4.4))
    looks = {"whole_streamed": (COLOURS["S3"], "o"), "progressive": (COLOURS["S1"], "s")}
    counts: dict[float, set[int]] = {}
    for variant in variants:
        points = sorted(_by_rate(result, variant))
        rates, times, low, high, floors, numbers = (np.array(column) for column in zip(*points, strict=True))
        colour, marker = looks[variant]
        bars = np.array([times - low, high - times])
        ax.errorbar(rates, times, bars, color=colour, marker=marker, capsize=4, label=VARIANTS[variant].label)
        ax.plot(rates, floors, ":", color=COLOURS["floor"], marker=marker, markersize=4, markerfacecolor="none")
        for rate, n in zip(rates, numbers, strict=True):
            counts.setdefault(float(rate), set()).add(int(n))
    for rate, found in counts.items():
        told = f"n = {min(found)}" if len(found) == 1 else f"n = {min(found)} to {max(found)}"
        ax.annotate(told, (rate, 1), xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=9)
    ax.plot([], [], ":", color=COLOURS["floor"], label="floor: bytes / rate")
    ax.set(xscale="log", yscale="log", xlabel="measured rate of the link, Gbit/s", ylabel="TTFT from arrival, s")
    for axis, ticks in ((ax.xaxis, (1, 2, 5, 10, 20)), (ax.yaxis, (0.1, 0.2, 0.5, 1, 2))):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    fig.legend(loc="outside lower center", ncols=3)
    return fig


def _by_rate(result: Result, variant: str) -> list[tuple[float, float, float, float, float, int]]:
    """Rate read alone, median TTFT, its interval, floor and number of starts, of every link that gave its rate."""
    points = []
    for link in {row["link"] for row in result.rows if row["variant"] == variant}:
        rows = [row for row in result.rows if row["link"] == link]
        read = float(np.median(values(rows, "read", "load_s")))
        size = next(row["bytes"] for row in rows if row["variant"] == "read")
        rate, asked = 8e-9 * size / read, rows[0]["gbit_per_s"]
        if rate < 0.9 * asked or link_key(rows[0]) not in (f"{asked:g}gbit", "unshaped"):
            continue
        moved = next(row["bytes"] for row in rows if row["variant"] == variant)
        found = result.summary.of("ttft_p50_s", variant=variant, link=link_key(rows[0]))
        points.append((rate, found["value"], found["low"], found["high"], moved * read / size, found["n"]))
    return points


def trade_off(result: Result) -> Figure:
    """By the number of deferred layers: TTFT with its floor, F1 and perplexity by the way in which they were chosen."""
    import matplotlib.pyplot as plt

    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 4))
    timed = [row for row in result.rows if "ttft_request_s" in row]
    sizes = sorted({row["deferred_layers"] for row in timed})
    times = [[row["ttft_request_s"] for row in timed if row["deferred_layers"] == size] for size in sizes]
    left.plot(sizes, [np.median(t) for t in times], "o-", color=COLOURS["measured"], label="measured, median")
    for size, spread in zip(sizes, times, strict=True):
        left.plot([size] * len(spread), spread, ".", color=COLOURS["measured"], alpha=0.35, markersize=5)
    moved = [next(row["bytes"] for row in timed if row["deferred_layers"] == size) for size in sizes]
    rate = 1e9 / 8 * float(timed[0]["gbit_per_s"])
    left.plot(sizes, np.array(moved) / rate, ":", color=COLOURS["mark"], label="bytes / nominal rate")
    left.set(ylabel="TTFT from arrival, s", ylim=(0, None), title=f"{timed[0]['link']}, {len(times[0])} starts each")
    for ax, score, label in ((middle, "f1_pct", "F1, %"), (right, "perplexity", "perplexity")):
        whole = result.summary.of(score, variant="none", layers=0)
        for selection, look in _SELECTIONS.items():
            points = [
                (size, entry)
                for size in range(max(sizes) + 1)
                if (entry := result.summary.get(score, variant=selection, layers=size))
            ]
            if points:
                _line(ax, points, whole, **look)
        ax.set(ylabel=label, title=f"n = {whole['n']}, 95 %")
    right.set(yscale="log")
    ticks = (20, 50, 100, 200, 500, 1000, 2000)
    right.yaxis.set_ticks(ticks, [f"{tick:,}" for tick in ticks])
    right.yaxis.set_ticks([], minor=True)
    for ax in (left, middle, right):
        ax.set(xlabel="layers deferred", xticks=sizes[:: max(1, len(sizes) // 6)])
    left.legend(loc="lower left")
    fig.legend(*middle.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return fig


_SELECTIONS: dict[str, dict[str, Any]] = {
    "distance": {"color": COLOURS["none"], "marker": "o", "label": "chosen by angular distance, not healed"},
    "perplexity": {"color": COLOURS["by perplexity"], "marker": "s", "label": "chosen by perplexity, not healed"},
    "healed": {"color": COLOURS["ours"], "marker": "D", "label": "by distance, healed (ours)"},
}


def _line(ax: Axes, points: Sequence[tuple[int, dict[str, Any]]], whole: dict[str, Any], **look: Any) -> None:
    entries = [(0, whole), *points] if len(points) > 1 else list(points)
    x = [size for size, _ in entries]
    y = np.array([entry["value"] for _, entry in entries])
    low, high = (np.array([entry.get(bound, entry["value"]) for _, entry in entries]) for bound in ("low", "high"))
    line = "-" if len(points) > 1 else ""
    ax.errorbar(x, y, yerr=[np.maximum(0, y - low), np.maximum(0, high - y)], capsize=3, linestyle=line, **look)
