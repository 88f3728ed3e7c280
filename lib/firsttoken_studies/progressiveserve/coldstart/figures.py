"""The figures of notebooks 13 and 14, drawn from results alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.study.summary import Entry, Scalar
from firsttoken.study.system import NOT_HERE
from firsttoken_studies.progressiveserve.coldstart.harness import BUCKET, KERNEL, files_were, link_key
from firsttoken_studies.progressiveserve.coldstart.summary import PROCESS, values
from firsttoken_studies.progressiveserve.coldstart.variants import FIRST, VARIANTS
from firsttoken_studies.record.overlay import DrawnResult, counted, legend, name_results, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, panels
from firsttoken_studies.record.results import Result, Rows, Table, distinct, rows_where
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def start_schematic() -> Schematic:
    """Draw a plain start beside a progressive one, over time."""
    alt = (
        "Two starts over time. A plain start brings all layers, and then gives the first token. A progressive start "
        "brings group A, three quarters of the layers, and gives the first token: groups B and C come while it answers."
    )
    sketch = Schematic(20, 4.6, alt)
    sketch.text(0.3, 0.5, "The first token does not wait for layers B and C", heading=True)
    for y, name, look in ((1.2, "plain", "S3"), (3, "progressive", "S1")):
        sketch.text(0.3, y + 0.5, name)
        sketch.box(3, y, "A", look, width=7.5)
        for x, group, of_group in ((10.5, "B", "S2"), (11.75, "C", "S3")):
            shift = 0.0 if look == "S3" else 2.4
            sketch.box(x + shift, y, group, look if look == "S3" else of_group, width=1.25)
    sketch.box(13, 1.2, "first token", "mark", width=2.4)
    sketch.box(10.5, 3, "first token", "mark", width=2.4)
    sketch.text(15.6, 3.5, "while it answers")
    sketch.arrow((3, 4.35), (18.6, 4.35))
    sketch.text(18.8, 4.35, "time")
    return sketch


def deferral_schematic() -> Schematic:
    """Draw what is gained and lost with each layer that waits."""
    alt = (
        "A model of eight layers, of which none, two or four wait. The more layers wait, the fewer bytes come before "
        "the first token, and the sooner it is there; and the worse the answers are until the others come."
    )
    sketch = Schematic(20, 5.4, alt)
    sketch.text(0.3, 0.5, "Each layer that waits buys time and costs quality", heading=True)
    tells = ("the first token waits for all", "sooner, a little worse", "sooner still, much worse")
    for row, tell in enumerate(tells):
        for layer in range(8):
            waits = abs(layer - 4) <= row and layer != 4 - row and row > 0
            sketch.box(3.4 + 1.2 * layer, 1.2 + 1.3 * row, "waits" if waits else "", "none", 1.15, missing=waits)
        sketch.text(0.3, 1.7 + 1.3 * row, f"{2 * row or 'no'} layers wait")
        sketch.text(13.4, 1.7 + 1.3 * row, tell)
    return sketch


# The tables of notebooks 13 and 14: paper, measured, floor.

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
    source = recorded or now
    for label, measure, labels, than, required, floor in TARGETS:
        yield {
            "ratio": label,
            "asked": required,
            "floor": f"{share['value']:.3f}" if (share := source.summary.get(floor, **labels)) else "",
            "recorded": interval(recorded.summary.get(measure, **labels, than=than), 3) if recorded else "",
            "your run": interval(now.summary.get(measure, **labels, than=than), 3),
        }


def deferral_rows(result: Result) -> Table:
    """Return by number of deferred layers the TTFT [s], and F1 [%] and perplexity by the way they were chosen."""
    sizes = sorted({row["deferred_layers"] for row in result.rows if "ttft_request_s" in row})
    blocks = {(r["selection"], r["deferred_layers"]): r["block"] for r in result.rows if "selection" in r}
    summary = result.summary
    for size in sizes:
        entry: dict[str, Any] = {"layers deferred": size, "TTFT, s": interval(summary.of("ttft_p50_s", layers=size), 2)}
        titles = ("distance", "perplexity", "healed")
        for title, selection in zip(titles, titles if size else ("none",), strict=False):
            if (block := blocks.get((selection, size))) is not None:
                labels = {"variant": selection, "layers": size}
                entry[f"{title}: block"] = f"{block[0]}-{block[-1]}" if block else "whole"
                entry[f"{title}: F1, %"] = f"{summary.value('f1_pct', **labels):.1f}"
                entry[f"{title}: perplexity"] = f"{summary.value('perplexity', **labels):.1f}"
        yield entry


def most_deferred(result: Result) -> int:
    """The largest number of layers that was deferred in a start that was timed; in any row where none was."""
    timed = [row for row in result.rows if "ttft_request_s" in row]
    return max(row["deferred_layers"] for row in timed or result.rows)


# phase, what it is made of, colour
PHASES = (
    ("interpreter, imports", ("interpreter", "imports"), COLOURS["other"]),
    ("config, tokenizer, empty model", ("config_and_tokenizer", "build"), COLOURS["configuration"]),
    ("waiting for weights", ("adapter", "load"), COLOURS["weights"]),
    ("prefill", ("prefill",), COLOURS["prefill"]),
)
LINES = {"whole_streamed": "S3", "progressive": "S1"}  # the look of each variant whose first token is drawn by link
STACKED = (
    "from_pretrained",
    "chunked",
    "whole_streamed",
    "whole_early",
    "progressive",
    "progressive_early",
    "lean",
    "lean_progressive",
)
"""The variants whose phases are drawn: other people's loaders, and ours with and without what is claimed of it."""


def phase_stacks(recorded: Result | None, now: Result) -> Figure:
    """Phases of one start from the creation of the process to the first token: of that whose time is nearest the
    median, so that a bar ends at the number it stands for.

    A tick is the floor, the variant's bytes at the link's measured rate, from when its reading may begin; a line the
    95 % interval of the median.
    """
    results = over(recorded, now)
    links = [link for link in ("1 Gbit/s", "unshaped") if recorded and f"link {link}" in recorded.floors]
    links = links or [now.rows[0]["link"]]

    def trials(shown: DrawnResult, link: str, variant: str) -> Rows:
        return rows_where(shown.result.rows, link=link, variant=variant)

    by_link = {
        link: [name for name in reversed(STACKED) if any(trials(d, link, name) for d in results)] for link in links
    }
    heights = [1.2 + len(names) for names in by_link.values()]
    size = (9, 1.6 + 0.42 * sum(heights))
    fig, axes = panels(len(links), 1, figsize=size, height_ratios=heights, squeeze=False, sharex=True)
    for ax, (link, names) in zip(axes[:, 0], by_link.items(), strict=True):
        for row_index, name in enumerate(names):
            for result_drawn in results:
                if result_drawn.library and VARIANTS[name].stages != FIRST:
                    continue  # a reader's plan of stages is loaded by these alone
                if rows := trials(result_drawn, link, name):
                    _stack(
                        ax, row_index - result_drawn.shift, rows, result_drawn, _floor(result_drawn.result, link, rows)
                    )
                elif name in result_drawn.result.provenance.get("left_out", {}).get(link, ()):
                    ax.annotate(NOT_HERE, (0, row_index - result_drawn.shift), fontsize=8, va="center")
        shown = next(
            rows for result_drawn in reversed(results) for name in names if (rows := trials(result_drawn, link, name))
        )
        ax.set(title=_link_title(shown), yticks=range(len(names)), yticklabels=[VARIANTS[n].label for n in names])
        ax.set(ylim=(-0.6, len(names) - 0.4))
        ax.grid(axis="y", visible=False)
    ax.set(xlabel="seconds from the creation of the process to the first token", xlim=(0, None))
    by_link = (
        rows for result_drawn in results for link in links if (rows := trials(result_drawn, link, "progressive"))
    )
    for start in map(median_start, itertools.islice(by_link, 1)):
        share = 100 * _seconds(start, PHASES[0][1]) / start[PROCESS]
        fig.suptitle(
            f"{share:.0f} % of a progressive start ({start['link']}) passes before a weight is needed: imports"
        )
    handles, labels = axes[0][0].get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    ax.legend(by_label.values(), by_label.keys(), loc="lower right", fontsize="small", frameon=True)
    name_results(fig, results, "process_ttft_p50_s")
    return fig


def median_start(rows: Rows) -> dict[str, Any]:
    """The start whose time from the creation of the process is nearest the median of all."""
    middle = float(np.median([row[PROCESS] for row in rows]))
    return min(rows, key=lambda row: abs(row[PROCESS] - middle))


def _stack(ax: Axes, position: float, rows: Rows, shown: DrawnResult, floor: float) -> None:
    start, bar_start, height = median_start(rows), 0.0, {1: 0.62, 2: 0.3, 3: 0.24}[shown.count]
    if shown.repeats(ax, start["variant"], start[PROCESS]):
        return
    edge = {"edgecolor": "black", "linewidth": 0.8} if shown.own else {"linewidth": 0}
    for label, parts, colour in PHASES:
        width = _seconds(start, parts)
        ax.barh(position, width, left=bar_start, color=colour, label=label, height=height, **edge, **shown.style)
        bar_start += width
    variant, half = VARIANTS[start["variant"]], 0.6 * height
    # the bytes of an early start move from the first line of the process on
    bar_bottom = floor + (0.0 if variant.early else _seconds(start, PHASES[0][1]))
    ax.plot(
        [bar_bottom, bar_bottom],
        [position - half, position + half],
        color=COLOURS["floor"],
        linewidth=2,
        label="floor: bytes / rate",
    )
    median = shown.result.summary.of("process_ttft_p50_s", variant=variant.name, link=link_key(start))
    interval = [median.get("low", bar_start), median.get("high", bar_start)]
    ax.plot(interval, [position, position], color=COLOURS["mark"], linewidth=2, label="median, 95 % interval")
    ax.annotate(
        f"{bar_start:.1f}", (max(bar_start, interval[1]), position), (4, 0), textcoords="offset points", **_TOLD
    )


_TOLD = {"va": "center", "fontsize": 8.5}


def _seconds(row: dict[str, Any], parts: Sequence[str]) -> float:
    return sum(row.get(f"phase_{part}_s", 0.0) for part in parts)


def _floor(result: Result, link: str, rows: Rows) -> float:
    """The bytes of these rows' variant at the rate that reading alone had; half the time over two links, and so on."""
    floor, model_bytes = result.floors[f"link {link}"], max(row.get("bytes", 0) for row in result.rows)
    variant = VARIANTS[rows[0]["variant"]]
    share = 1.0 if variant.peer else rows[0]["bytes"] / model_bytes
    return floor["value"] * share / variant.links


def _link_title(rows: Rows) -> str:
    name, shaped = rows[0]["link"], {KERNEL: "shaped in the kernel", BUCKET: "shaped by a token bucket"}
    if name == "unshaped":
        return f"this disk, {files_were(rows[0])}"
    return f"{name}, {shaped[rows[0]['shaped_by']]}" if rows[0]["shaped_by"] in shaped else name


def first_token_by_link(recorded: Result | None, now: Result) -> Figure:
    """Median TTFT from the request's arrival, with its 95 % interval, against the measured rate of the link.

    Only links that gave the rate that was asked of them, one a rate: a rate beyond what this machine's memory gives is
    that of the memory once more.
    """
    results = over(recorded, now)
    fig, ax = panels(figsize=(9, 4.8))
    for shown in results:
        for variant, name in LINES.items():
            if shown.library and VARIANTS[variant].stages != FIRST:
                continue
            points = _by_rate(shown.result, variant)
            whose = "your plan" if shown.library else "your run" if shown.own else "recorded"
            label = f"{VARIANTS[variant].label}, {whose}"
            rates, entries, floors = zip(*points, strict=True) if points else ((), (), ())
            shown.line(ax, rates, entries, name, label=label)
            ax.plot(rates, floors, ":", color=COLOURS["floor"], marker=LOOKS[name].marker, markerfacecolor="none")
    ax.plot([], [], ":", color=COLOURS["floor"], label="floor: bytes / rate")
    ax.set(xscale="log", yscale="log", xlabel="measured rate of the link, Gbit/s", ylabel="TTFT from arrival, s")
    for axis, ticks in ((ax.xaxis, (1, 2, 5, 10, 20)), (ax.yaxis, (0.1, 0.2, 0.5, 1, 2))):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    pairs = zip(*(_by_rate(results[0].result, variant) for variant in LINES), strict=False)
    saved = [
        f"{100 * (1 - few['value'] / all_['value']):.0f} % at {rate:.0f}" for (rate, all_, _), (_, few, _) in pairs
    ]
    savings_text = " and ".join(saved[:: max(1, len(saved) - 1)])
    fig.suptitle(f"Stage 1 brings the first token earlier by {savings_text} Gbit/s")
    ax.legend(loc="upper right", fontsize="small")
    name_results(fig, results, "ttft_p50_s")
    return fig


def _by_rate(result: Result, variant: str) -> list[tuple[float, Entry, float]]:
    """Rate read alone, median TTFT and floor, of every link that gave its rate, the slowest first."""
    points = []
    for link in distinct(result.rows, "link", variant=variant):
        rows = rows_where(result.rows, link=link)
        read = float(np.median(values(rows, "read", "load_s")))
        size = next(row["bytes"] for row in rows if row["variant"] == "read")
        rate, set_rate = 8e-9 * size / read, rows[0]["gbit_per_s"]
        if rate < 0.9 * set_rate or link_key(rows[0]) not in (f"{set_rate:g}gbit", "unshaped"):
            continue
        moved = next(row["bytes"] for row in rows if row["variant"] == variant)
        entry = result.summary.of("ttft_p50_s", variant=variant, link=link_key(rows[0]))
        points.append((rate, entry, moved * read / size))
    return sorted(points, key=lambda point: point[0])


def trade_off(recorded: Result | None, now: Result) -> Figure:
    """Draw TTFT, F1 and perplexity over the number of deferred layers, by the way in which these were chosen."""
    results = over(recorded, now)
    fig, axes = panels(1, 3, figsize=(9, 4.2))
    for result_drawn in results:
        rows, summary = result_drawn.result.rows, result_drawn.result.summary
        sizes = sorted({row["deferred_layers"] for row in rows})
        if timed := {row["deferred_layers"]: row for row in rows if "ttft_request_s" in row}:
            result_drawn.line(axes[0], sizes, [summary.of("ttft_p50_s", layers=size) for size in sizes], "measured")
            moved = [8e-9 * timed[size]["bytes"] / timed[size]["gbit_per_s"] for size in sizes]
            axes[0].plot(sizes, moved, ":", color=COLOURS["mark"], **result_drawn.style)
        for ax, score in zip(axes[1:], SCORES, strict=True):
            for selection, (name, _) in SELECTIONS.items():
                scored = {size: summary.get(score, variant=selection, layers=size) for size in sizes}
                if sum(entry is not None for entry in scored.values()) == 1 and selection == "healed":
                    result_drawn.point(
                        ax, *next((size + result_drawn.shift, entry) for size, entry in scored.items() if entry), name
                    )
                elif any(scored.values()):
                    scored[0] = summary.of(score, variant="none", layers=0)
                    result_drawn.line(ax, sizes, list(scored.values()), name)
    whole_labels = {"variant": "none", "layers": 0}
    axes[0].set_title(f"TTFT, s ({counted(results, 'ttft_p50_s', layers=0)})")
    axes[0].set_ylim(0, None)
    for ax, (score, label) in zip(axes[1:], SCORES.items(), strict=True):
        ax.set_title(f"{label} ({counted(results, score, **whole_labels)})")
    axes[2].set_yscale("log")
    ticks = (10, 20, 50, 100, 200, 500, 1000, 2000)
    axes[2].yaxis.set_ticks(ticks, [f"{tick:,}" for tick in ticks])
    axes[2].yaxis.set_ticks([], minor=True)
    shown = range(0, max(most_deferred(result_drawn.result) for result_drawn in results) + 1, 2)
    for ax in axes:
        ax.set(xlabel="layers deferred", xticks=shown)
        ax.title.set_fontsize(10.5)
    axes[0].plot([], [], "o-", color=COLOURS["measured"], label=f"measured, over {_link(now)}")
    axes[0].plot([], [], ":", color=COLOURS["mark"], label="bytes / nominal rate")
    for name, label in SELECTIONS.values():
        axes[0].plot([], [], f"{LOOKS[name].marker}-", color=COLOURS[name], label=label)
    value, most = results[0].result.summary.value, most_deferred(results[0].result)
    saved = 1 - value("ttft_p50_s", layers=most) / value("ttft_p50_s", layers=0)
    of_whole = value("f1_pct", **whole_labels)
    lost = 1 - value("f1_pct", variant="distance", layers=most) / of_whole if of_whole else 0.0
    message = f"{100 * saved:.0f} % of the TTFT and cost {100 * lost:.0f} % of the F1"
    fig.suptitle(f"Quality goes faster than time: {most} deferred layers save {message}", fontsize=12)
    legend(fig, axes[0], results)
    return fig


def _link(result: Result) -> str:
    return next(row["link"] for row in result.rows if "link" in row)


SCORES = {"f1_pct": "F1, %", "perplexity": "perplexity"}
SELECTIONS = {  # the way in which deferred layers were chosen: its look, and what the legend says
    "distance": ("none", "chosen by angular distance, not healed"),
    "perplexity": ("by perplexity", "chosen by perplexity, not healed"),
    "healed": ("ours", "by distance, healed (ours)"),
}
