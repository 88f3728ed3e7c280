"""The figures of notebook 32: the schedules of Figure 13 as timelines, and the live run over shaped links."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from firsttoken.droidspeak.pipeline.schedule import LINK, PROCESSOR, BusySpan, ReuseRequest, Schedule, simulate
from firsttoken.study.overlay import legend, over
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken.study.stats import bootstrap
from firsttoken_studies.droidspeak.loading_tables import by_rate
from firsttoken_studies.droidspeak.published import FIGURE_13, PUBLISHED_UNITS
from firsttoken_studies.droidspeak.styles import LOOK_OF, METHODS, SCHEDULES

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

    fig, axes = plt.subplots(3, 1, figsize=(9, 5.4), sharex=True)
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
    fig.legend(*last.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8.5)
    fig.suptitle("Sent first, the E-cache lets link and processor work at the same time", fontsize=12)
    return fig


def ttft_by_link(recorded: Result | None, now: Result) -> Figure:
    """Figure 20, live over shaped links: the TTFT of the four ways, and how many times pipelined's the others take.

    Left, medians over rounds; right, the median of the ratios within a round, as the summary has it.
    """
    import matplotlib.pyplot as plt

    drawn = over(recorded, now)
    fig, (times, ratios) = plt.subplots(1, 2, figsize=(9, 4.6))
    for one in drawn:
        links = [(rate, rows) for rate, rows in by_rate(one.result.rows) if rate]
        rates = [rate for rate, _ in links]
        for schedule, look in LOOK_OF.items():
            each = [[r["ttft_s"] for r in rows if r["schedule"] == schedule] for _, rows in links]
            one.line(times, rates, [bootstrap(seconds, "median").summary() for seconds in each], look)
            than = {"method": schedule, "than": Schedule.PIPELINED}
            one.line(ratios, rates, [one.result.summary.get("ttft_x", **than, gbit_per_s=rate) for rate in rates], look)
        times.plot(rates, [_floor(rows) for _, rows in links], ":", color=COLOURS["mark"], **one.style)
    ratios.axhline(1, color=SCHEDULES[Schedule.PIPELINED].colour)
    links = [(rate, rows) for rate, rows in by_rate(drawn[0].result.rows) if rate]
    ticks, balance = [rate for rate, _ in links], _balance(links[0][1])
    for ax in (times, ratios):
        ax.set(xscale="log", yscale="log", xlabel="link, Gbit/s (shaped)")
        ax.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
        ax.xaxis.set_minor_formatter("")
        low, high = ax.get_ylim()
        places = [digit * 10.0**power for power in range(-4, 4) for digit in (1, 2, 5)]
        ax.set_yticks([place for place in places if low <= place <= high])
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("")
        if balance and ticks[0] / 2 <= balance <= ticks[-1] * 2:
            ax.axvline(balance, color=COLOURS["mark"], linestyle="--", linewidth=1.2)
    for style in SCHEDULES.values():
        times.plot([], [], marker=style.marker, color=style.colour, label=style.label)
    times.plot([], [], ":", color=COLOURS["mark"], label="max(transfer, computation)")
    times.plot([], [], color=COLOURS["mark"], linestyle="--", linewidth=1.2, label="both equally long (record)")
    times.set_ylabel("time to first token, s")
    ratios.set_ylabel("times pipelined's, of the same round")
    row = links[0][1][0]
    ratios.set_title(f"{row['tokens']} tokens, layers {row['group']} recomputed (record)", fontsize=10)
    legend(fig, times, drawn, "ttft_x")
    fig.suptitle("E-cache first hides the shorter of transfer and computation on every link", fontsize=12)
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
