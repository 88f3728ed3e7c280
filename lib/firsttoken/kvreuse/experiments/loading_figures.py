"""The figures of notebook 32: the schedules of Figure 13 as timelines, and the live run over shaped links."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from firsttoken.kvreuse.experiments.loading_tables import by_rate, median_ttft
from firsttoken.kvreuse.experiments.published import FIGURE_13, PUBLISHED_UNITS
from firsttoken.kvreuse.experiments.styles import METHODS, SCHEDULES
from firsttoken.kvreuse.pipeline.schedule import LINK, PROCESSOR, BusySpan, ReuseRequest, Schedule, simulate
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken.study.stats import bootstrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KV, EDGE, COMPUTED, IN_VAIN = (
    METHODS["full reuse"].colour,
    COLOURS["E-cache"],
    METHODS["full prefill"].colour,
    COLOURS["in vain"],
)


def timelines(overlap: bool = False) -> Figure:
    """Figure 13, unit by unit: what link and processor do for both requests under each schedule."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(3, 1, figsize=(10, 5.4), sharex=True)
    jobs = {job.name: job for job in FIGURE_13}
    for ax, (schedule, paper) in zip(axes, PUBLISHED_UNITS.items(), strict=True):
        timeline = simulate(FIGURE_13, schedule, overlap=overlap)
        for span in timeline.spans:
            _draw(ax, span, jobs[span.job])
        for job in FIGURE_13:
            end = job.arrival + timeline.ttft[job.name]
            ax.plot([job.arrival] * 2, [-0.5, 1.5], color=COLOURS["mark"], linestyle=":", linewidth=1.2)
            ax.plot([end] * 2, [-0.5, 1.5], color=COLOURS["mark"], linewidth=1.8)
        sums = " + ".join(f"{timeline.ttft[job.name]:g}" for job in FIGURE_13)
        ax.set_title(f"{schedule}: {sums} = {timeline.total:g} (paper: {paper})", fontsize=11, loc="left")
        ax.set_yticks([0, 1], ["link", "processor"])
        ax.set_ylim(1.5, -0.5)
        ax.grid(axis="y", visible=False)
    axes[-1].set_xlabel("time, units (one layer moved or computed)")
    axes[-1].set_xlim(0, None)
    last = axes[-1]
    for colour, label in (
        (EDGE, "E-cache"),
        (KV, "KV that is reused"),
        (IN_VAIN, "KV sent in vain"),
        (COMPUTED, "layer recomputed"),
    ):
        last.barh(0, 0, color=colour, label=label, edgecolor="white")
    last.plot([], [], color=COLOURS["mark"], linestyle=":", label="request arrives")
    last.plot([], [], color=COLOURS["mark"], label="first token")
    fig.legend(*last.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=9)
    return fig


def ttft_by_link(result: Result) -> Figure:
    """Figure 20, live over shaped links: TTFT of the four ways and the floor; and each way over pipelined."""
    import matplotlib.pyplot as plt

    fig, (times, ratios) = plt.subplots(1, 2, figsize=(10.5, 4.2), width_ratios=(1.25, 1))
    links = [(rate, rows) for rate, rows in by_rate(result.rows) if rate]
    rates = [rate for rate, _ in links]
    for schedule, style in SCHEDULES.items():
        look = {"color": style.colour, "marker": style.marker}
        each = [bootstrap([r["ttft_s"] for r in rows if r["schedule"] == schedule], "median") for _, rows in links]
        times.plot(rates, [interval.estimate for interval in each], "-", label=style.label, **look)
        times.fill_between(
            rates, [i.low for i in each], [i.high for i in each], color=style.colour, alpha=0.2, linewidth=0
        )
        over = [median_ttft(rows, schedule) / _floor(rows) for _, rows in links]
        ratios.plot(rates, over, "-", **look)
    times.plot(
        rates,
        [_floor(rows) for _, rows in links],
        ":",
        color=COLOURS["mark"],
        label="max(transfer, computation), measured apart",
    )
    ratios.axhline(1, linestyle=":", color=COLOURS["mark"])
    balance = _balance(links[0][1])
    for ax in (times, ratios):
        ax.set(xscale="log", yscale="log", xlabel="link, Gbit/s (shaped)")
        ax.set_xticks(rates, [f"{rate:g}" for rate in rates])
        ax.xaxis.set_minor_formatter("")
        low, high = ax.get_ylim()
        ticks = [digit * 10.0**power for power in range(-4, 4) for digit in (1, 2, 5)]
        ax.set_yticks([tick for tick in ticks if low <= tick <= high])
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("")
        if balance and rates[0] / 2 <= balance <= rates[-1] * 2:
            ax.axvline(balance, color=COLOURS["mark"], linestyle="--", linewidth=1.2)
    if balance:
        times.plot([], [], color=COLOURS["mark"], linestyle="--", linewidth=1.2, label="its transfer = its computation")
    times.set_ylabel("time to first token, s")
    ratios.set_ylabel("over max(transfer, computation), x")
    row = links[0][1][0]
    fig.suptitle(f"{result.slug}: prefix of {row['tokens']} tokens, layers {row['group']} recomputed", fontsize=11)
    fig.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9.5)
    return fig


def _draw(ax: Axes, span: BusySpan, job: ReuseRequest) -> None:
    """One unit of work, with its layer counted from 1 as the paper does; the second request is outlined."""
    lane = {LINK: 0, PROCESSOR: 1}[span.resource]
    name = span.what.removeprefix("KV ")
    colour = COMPUTED if span.resource == PROCESSOR else EDGE
    if span.what.startswith("KV"):
        colour = IN_VAIN if int(name) in job.group else KV
    second = job is FIGURE_13[1]
    width = span.end - span.start
    ax.barh(
        lane,
        width - 0.08,
        left=span.start + 0.04,
        color=colour,
        edgecolor="black" if second else colour,
        linewidth=1.2,
        height=0.82,
    )
    text = f"{job.name}\n{name if name == 'E' else int(name) + 1}"
    light = colour in (IN_VAIN, KV)
    middle = (span.start + span.end) / 2
    ax.text(middle, lane, text, ha="center", va="center", fontsize=7.5, color="black" if light else "white")


def _floor(rows: Rows) -> float:
    """Median floor of the pipelined requests of one link, s."""
    return float(np.median([row["floor_s"] for row in rows if row["schedule"] == Schedule.PIPELINED]))


def _balance(rows: Rows) -> float | None:
    """The rate at which the pipelined request's transfer takes as long as its computation, Gbit/s."""
    piped = [row for row in rows if row["schedule"] == Schedule.PIPELINED]
    compute = float(np.median([row["compute_s"] for row in piped]))
    return piped[0]["bytes"] * 8 / 1e9 / compute if compute and piped[0]["bytes"] else None
