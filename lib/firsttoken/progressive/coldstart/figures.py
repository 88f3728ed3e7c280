"""The figures of notebooks 13 and 14, drawn from results alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.progressive.coldstart.harness import files_were
from firsttoken.progressive.coldstart.summary import REQUEST, values
from firsttoken.progressive.coldstart.variants import VARIANTS
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# phase, what it is made of, colour
PHASES = (
    ("interpreter and imports", ("interpreter", "imports"), COLOURS["other"]),
    ("config, tokenizer, empty model", ("config_and_tokenizer", "build"), COLOURS["configuration"]),
    ("waiting for weights", ("adapter", "load"), COLOURS["weights"]),
    ("prefill", ("prefill",), COLOURS["prefill"]),
)


def phase_stacks(result: Result, links: Sequence[str]) -> Figure:
    """Median phases of every variant over each of ``links``; 0 is the arrival of the request, left of it the start.

    A tick is the floor, the variant's bytes at the link's measured rate, and a dot the 95th percentile.
    """
    import matplotlib.pyplot as plt

    frames = {link: [row for row in result.rows if row["link"] == link and row["variant"] != "read"] for link in links}
    names = sorted({row["variant"] for rows in frames.values() for row in rows}, key=list(VARIANTS).index, reverse=True)
    height = 1.6 + 0.42 * len(names)
    fig, axes = plt.subplots(1, len(links), figsize=(5.2 * len(links) + 1.5, height), sharey=True, squeeze=False)
    for ax, link in zip(axes[0], links, strict=True):
        for place, name in enumerate(names):
            rows = [row for row in frames[link] if row["variant"] == name]
            if rows:
                _stack(ax, place, rows, _floor(result, link, rows))
        ax.axvline(0, color="black", linewidth=1)
        ax.use_sticky_edges = False
        ax.margins(x=0.04)
        n = min(sum(row["variant"] == name for row in frames[link]) for name in {r["variant"] for r in frames[link]})
        ax.set(title=f"{_link_title(frames[link])}, n = {n}", xlabel="seconds from the arrival of the request")
        ax.grid(axis="y", visible=False)
    axes[0][0].set_yticks(range(len(names)), [VARIANTS[name].label for name in names])
    handles, labels = axes[0][-1].get_legend_handles_labels()
    kept = dict(zip(labels, handles, strict=True))
    fig.legend(kept.values(), kept.keys(), loc="outside lower center", ncols=3)
    return fig


def _stack(ax: Axes, place: int, rows: Rows, floor: float) -> None:
    left = -float(np.median([_seconds(row, PHASES[0][1]) for row in rows]))
    if VARIANTS[rows[0]["variant"]].early:  # its bytes move from the first line of the process on
        floor += left
    for label, parts, colour in PHASES:
        width = float(np.median([_seconds(row, parts) for row in rows]))
        ax.barh(place, width, left=left, color=colour, label=label, height=0.62)
        left += width
    ax.plot([floor, floor], [place - 0.42, place + 0.42], color=COLOURS["floor"], linewidth=2.5, label="floor")
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
    name, shaped = rows[0]["link"], {"kernel": "shaped in the kernel", "bucket": "shaped by a token bucket"}
    return f"this disk, {files_were(rows[0])}" if name == "unshaped" else f"{name}, {shaped[rows[0]['shaped_by']]}"


def first_token_by_link(result: Result, variants: Sequence[str] = ("whole_streamed", "progressive")) -> Figure:
    """TTFT from the request's arrival against the measured rate of the link, each with its floor."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7.5, 4.4))
    looks = {"whole_streamed": (COLOURS["S3"], "o"), "progressive": (COLOURS["S1"], "s")}
    for variant in variants:
        points = sorted(_by_rate(result, variant))
        rates, times, low, high, floors = (np.array(column) for column in zip(*points, strict=True))
        colour, marker = looks[variant]
        ax.errorbar(
            rates,
            times,
            yerr=[times - low, high - times],
            color=colour,
            marker=marker,
            capsize=3,
            label=VARIANTS[variant].label,
        )
        ax.plot(rates, floors, ":", color=COLOURS["floor"], marker=marker, markersize=4, markerfacecolor="none")
    ax.plot([], [], ":", color=COLOURS["floor"], label="floor: bytes / rate")
    ax.set(xscale="log", yscale="log", xlabel="measured rate of the link, Gbit/s", ylabel="TTFT from arrival, s")
    for axis, ticks in ((ax.xaxis, (1, 2, 5, 10, 20)), (ax.yaxis, (0.1, 0.2, 0.5, 1, 2))):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    ax.legend(loc="upper center", ncols=3, bbox_to_anchor=(0.5, 1.14))
    return fig


def _by_rate(result: Result, variant: str) -> list[tuple[float, float, float, float, float]]:
    points = []
    for link in {row["link"] for row in result.rows if row["variant"] == "progressive"}:
        rows = [row for row in result.rows if row["link"] == link]
        times = values(rows, variant, REQUEST)
        if times:
            read = float(np.median(values(rows, "read", "load_s")))
            size = next(row["bytes"] for row in rows if row["variant"] == "read")
            moved = next(row["bytes"] for row in rows if row["variant"] == variant)
            low, middle, high = np.percentile(times, [25, 50, 75])
            points.append((8e-9 * size / read, middle, low, high, moved * read / size))
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
    for ax, score, label in ((middle, "f1", "F1, %"), (right, "perplexity", "perplexity")):
        for selection, look in _SELECTIONS.items():
            points = [
                (size, result.summary[f"{score}_{selection}_{size}"])
                for size in range(max(sizes) + 1)
                if f"{score}_{selection}_{size}" in result.summary
            ]
            if points:
                _line(ax, points, result.summary[f"{score}_s0"], **look)
        ax.set(ylabel=label, title=f"n = {result.summary[f'{score}_s0']['n']}, 95 %")
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
