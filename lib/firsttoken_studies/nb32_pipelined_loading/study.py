"""The cache on its way over a shaped link: the four ways of Figures 13 and 20."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from firsttoken.droidspeak.pipeline.schedule import (
    LINK,
    PROCESSOR,
    BusySpan,
    ReuseRequest,
    Schedule,
    SendingOrder,
    e_cache_first,
    simulate,
)
from firsttoken.droidspeak.profile.pareto import smallest_within
from firsttoken.link.shaped import LinkConfig
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_studies.droidspeak.published import FIGURE_13, PUBLISHED_UNITS, SHAPES, edge_over_kv, kv_bytes
from firsttoken_studies.droidspeak.setting import Setting
from firsttoken_studies.droidspeak.styles import LOOK_OF, METHODS, SCHEDULES
from firsttoken_studies.droidspeak.wire import LoadingConfig, WiredPair
from firsttoken_studies.nb30_full_reuse_and_sensitivity.profiling import BOUND, setting_profile
from firsttoken_studies.record.overlay import legend, over
from firsttoken_studies.record.plot import COLOURS, Axes, Figure, compared, panels, ticks
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, frame_of, rows_where
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval


def pipelined_loading(profile: Profile, *, order: SendingOrder = e_cache_first) -> Outcome:
    """One row a link, schedule and round, with the floor of its request: the longer of transfer and computation.

    The computation is that of the same round's unpipelined request after its last byte; the transfer is the bytes over
    the link's own rate. ``order`` says in which order the pieces of a cache go over the link.
    """
    config = profile.section("loading", LoadingConfig)
    setting = Setting(profile, config.needs())
    receiver, sender, profiled = setting_profile(setting, setting.runs[0])
    group = smallest_within(profiled, BOUND).group
    rng, rows = random.Random(profile.seed), []
    with tempfile.TemporaryDirectory(prefix="firsttoken-") as folder:
        wire = WiredPair(sender, receiver, config.tokens, [group], Path(folder))
        schedules = [Schedule.RECOMPUTE, Schedule.SEND_ALL, Schedule.SEND_REUSED, Schedule.PIPELINED]
        for schedule in schedules:
            wire.ask(group, LinkConfig(), schedule)  # warms up, and touches the buffers
        cells = [(rate, step) for step in range(config.rounds) for rate in config.gbit_per_s]
        for rate, step in track(cells, desc="links", unit="link"):
            for schedule in rng.sample(schedules, len(schedules)):
                marks = wire.ask(group, LinkConfig(rate), schedule, order).marks
                rows.append(
                    {"gbit_per_s": rate, "schedule": str(schedule), "round": step, "group": str(group)}
                    | {"tokens": config.tokens, "ttft_s": round(marks.first_token_s, 6), "bytes": marks.bytes_moved}
                    | {"kv_token_bytes": wire.kv_token_bytes, "edge_token_bytes": wire.e_cache_token_bytes}
                    | _rounded(edge_s=marks.edge_s, last_byte_s=marks.last_byte_s, start_s=marks.recompute_start_s)
                )
    _add_floors(rows)
    return Outcome(rows, provenance={"models": setting.models.provenance})


def _add_arithmetic(summary: Summary) -> None:
    """Add the results of the paper's formulas and of its Figure 13, exactly."""
    for name in ("Llama-3-8B", "Llama-3.1-70B", "Llama-2-7B"):
        entry = {"value": edge_over_kv(*SHAPES[name][:3]), "unit": "x of one layer's KV"}
        summary.add("edge_bytes_x", entry, model=name.lower(), than="kv of a layer")
    for schedule in PUBLISHED_UNITS:
        entry = {"value": simulate(FIGURE_13, schedule).total, "unit": "units, two requests"}
        summary.add("ttft_units", entry, method=schedule, case="figure 13")
    for layers in (6, 4):  # the report's toy, and the one that its number fits (errata I36)
        entry = {"value": kv_bytes(layers, 1, 2, 4), "unit": "bytes"}
        summary.add("kv_bytes", entry, model="toy", layers=layers)


def _add_floors(rows: Rows) -> None:
    """To each row of a request that computes on what was sent: ``floor_s``."""
    for row in rows:
        same = {"gbit_per_s": row["gbit_per_s"], "round": row["round"]}
        plain = rows_where(rows, **same, schedule=Schedule.SEND_REUSED)[0]
        last_byte_s = plain.get("last_byte_s", 0.0)  # nothing is sent where the group is all layers
        compute = plain["ttft_s"] - last_byte_s
        if row["schedule"] == Schedule.RECOMPUTE:
            continue
        transfer = row["bytes"] / (row["gbit_per_s"] * 1e9 / 8) if row["gbit_per_s"] else last_byte_s
        row |= {"compute_s": round(compute, 6), "transfer_s": round(transfer, 6)}
        row["floor_s"] = round(max(compute, transfer), 6)


def loading_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize by link the pipelined way over its floor, and its gain over the others; group, sizes, and arithmetic.

    The size of this model's E-cache is left out where the rows do not have it.
    """
    summary, pipelined = Summary(), Schedule.PIPELINED
    frame = frame_of(rows).sort_values("round", kind="stable").set_index("round")
    for rate, rate_rows in frame.groupby("gbit_per_s"):
        times = {schedule: rate_rows[rate_rows.schedule == schedule.value] for schedule in Schedule}
        over_floor = bootstrap(times[pipelined].ttft_s / times[pipelined].floor_s, "median")
        entry = over_floor.summary("x of max(transfer, compute)")
        summary.add("ttft_x", entry, method=pipelined, than="floor", gbit_per_s=rate)
        for other in (Schedule.RECOMPUTE, Schedule.SEND_ALL, Schedule.SEND_REUSED):
            gain = bootstrap(times[other].ttft_s / times[pipelined].ttft_s, "median")
            summary.add("ttft_x", gain.summary("x"), method=other, than=pipelined, gbit_per_s=rate)
    reused = {"method": Schedule.SEND_REUSED, "than": pipelined}
    summary.add("ttft_x", max(summary.all("ttft_x", **reused), key=lambda e: e["value"]), **reused, across="most")
    if fastest := max(row["gbit_per_s"] for row in rows):  # at 0 a link is not shaped
        full, floor = {"method": Schedule.RECOMPUTE, "than": pipelined}, {"method": pipelined, "than": "floor"}
        shaped = [entry for entry in summary.all("ttft_x", **floor) if entry["where"]["gbit_per_s"]]
        summary.add("ttft_x", summary.of("ttft_x", **full, gbit_per_s=fastest), **full, link="fastest")
        summary.add("ttft_x", max(shaped, key=lambda entry: entry["value"]), **floor, across="worst")
    first_row = rows[0]  # the group and what a token weighs are the same in all
    if "edge_token_bytes" in first_row:
        ratio = first_row["edge_token_bytes"] / first_row["kv_token_bytes"]
        summary.add("edge_bytes_x", {"value": ratio, "unit": "x of one layer's KV"}, than="kv of a layer")
    summary.add("group", {"value": first_row["group"], "unit": "layers"})
    _add_arithmetic(summary)
    return summary


def _rounded(**seconds: float | None) -> dict[str, float]:
    """Round those seconds that are there to microseconds; drop the others."""
    return {name: round(value, 6) for name, value in seconds.items() if value is not None}


# The tables of notebook 32: sizes, the schedules of Figure 13, and the live run, from arithmetic and results alone.


def edge_rows(result: Result) -> Table:
    """E-cache over KV of one layer, by shape; of the model that was run, as it was measured, too."""
    measured = result.summary.get("edge_bytes_x", than="kv of a layer")
    for name, (hidden, kv_heads, head_dim, paper) in SHAPES.items():
        yield {
            "model": name,
            "hidden": hidden,
            "KV heads x head dimension": f"{kv_heads} x {head_dim}",
            "E-cache / KV of a layer": edge_over_kv(hidden, kv_heads, head_dim),
            "paper": paper,
            "measured": measured["value"] if measured and "(here)" in name else "",
        }


def toy_rows() -> Table:
    """The report's toy example: 1 head of 2, 4 tokens, 2 bytes (errata I36)."""
    for layers, size in ((layers, kv_bytes(layers, 1, 2, 4)) for layers in (6, 4)):
        yield {"layers": layers, "KV, bytes": size, "KV, GB": f"{size / 1e9:.2e}", "report, GB": "1.28e-07"}


def schedule_rows() -> Table:
    """Figure 13: the sums of both requests, as published and under other assumptions, and each request alone."""
    free = tuple(replace(job, edge_units=0) for job in FIGURE_13)
    for schedule, paper in PUBLISHED_UNITS.items():
        timeline = simulate(FIGURE_13, schedule)
        line = {"schedule": str(schedule), "paper": paper, "sum": timeline.total}
        line |= {f"request {job.name}": timeline.ttft[job.name] for job in FIGURE_13}
        yield line | {
            "requests overlap": simulate(FIGURE_13, schedule, overlap=True).total,
            "E-cache free": simulate(free, schedule).total,
            "both": simulate(free, schedule, overlap=True).total,
        }


def loading_rows(result: Result) -> Table:
    """Figure 20 in numbers: median TTFT of every schedule by link, the floor, and what pipelining gains."""
    for rate, rate_rows in by_rate(result.rows):
        line: dict[str, Any] = {"link, Gbit/s": f"{rate:g}" if rate else "not shaped"}
        for schedule in Schedule:
            line[f"{schedule}, s"] = f"{median_ttft(rate_rows, schedule):.3f}"
        piped = rows_where(rate_rows, schedule=Schedule.PIPELINED)
        line["floor, s"] = f"{np.median([row['floor_s'] for row in piped]):.3f}"
        ratios = [(Schedule.PIPELINED, "floor")]
        ratios += [(other, Schedule.PIPELINED) for other in (Schedule.SEND_REUSED, Schedule.RECOMPUTE)]
        for schedule, than in ratios:
            speedup = result.summary.of("ttft_x", method=schedule, than=than, gbit_per_s=rate)
            line[f"{schedule} / {than}"] = interval(speedup, 2)
        yield line


def by_rate(rows: Rows) -> Iterator[tuple[float, Rows]]:
    """The rows of each link, from slow to fast; 0 Gbit/s, a link that is not shaped, comes last."""
    for rate in sorted({row["gbit_per_s"] for row in rows}, key=lambda rate: rate or float("inf")):
        yield rate, rows_where(rows, gbit_per_s=rate)


def median_ttft(rows: Rows, schedule: Schedule) -> float:
    """Seconds, over the rounds of one link."""
    return float(np.median([row["ttft_s"] for row in rows_where(rows, schedule=schedule)]))


def loading_comparison(result: Result) -> Rows:
    """Paper, measured and floor: the arithmetic of Figure 13 and 4.1, and the live run at its worst link."""
    value, least, kv = result.summary.value, sum(job.floor for job in FIGURE_13), {"than": "kv of a layer"}
    lines: list[tuple[Any, ...]] = []
    for schedule, paper in PUBLISHED_UNITS.items():
        units = value("ttft_units", method=schedule, case="figure 13")
        lines.append((f"Figure 13, {schedule}, two requests", paper, units, "units", least))
    for name, paper in (("Llama-3-8B", 2), ("Llama-3.1-70B", 4)):
        lines.append((f"E-cache over KV, {name}", paper, value("edge_bytes_x", model=name.lower(), **kv), "x"))
    for layers in (4, 6):
        size = value("kv_bytes", model="toy", layers=layers)
        lines.append((f"KV of the toy example, {layers} layers", 128, size, "B"))
    if worst := result.summary.get("ttft_x", method=Schedule.PIPELINED, than="floor", across="worst"):
        lines.append(("pipelined TTFT over max(transfer, compute), worst link", "", worst["value"], "x", 1.0))
    return compared(*lines)


# The figures of notebook 32: the schedules of Figure 13 as timelines, and the live run over shaped links.

HIDES = 1.5  # times the longer of the two, up to which the shorter counts as hidden
KV, COMPUTED = METHODS["full reuse"].colour, METHODS["full prefill"].colour
EDGE, IN_VAIN = COLOURS["E-cache"], COLOURS["in vain"]


def schematic() -> Schematic:
    """Draw link and processor when everything is loaded before the computation, and when the E-cache goes first."""
    alt = (
        "A link brings the E-cache and the keys and values of four layers that are reused; a processor computes five "
        "other layers again. If everything is loaded first, the processor waits for the link. If the E-cache comes "
        "first, the processor begins at once, the rest arrives meanwhile, and the first token comes sooner."
    )
    sketch = Schematic(21, 7.4, alt)
    for top, title, start in (
        (0, "Load, then compute: the processor waits for all of it", 7),
        (3.8, "E-cache first: link and processor work at the same time", 3),
    ):
        sketch.text(0.2, top + 0.45, title, heading=True)
        sketch.text(0.2, top + 1.5, "link")
        sketch.text(0.2, top + 2.6, "processor")
        sketch.box(2, top + 1, "E", "E-cache")
        for unit in range(4):
            sketch.box(3 + unit, top + 1, "KV", "full reuse")
        for unit in range(5):
            sketch.box(start + 1.4 * unit, top + 2.1, "layer", "recompute", width=1.4)
        sketch.arrow((start + 8.6, top + 2.6), (start + 7.1, top + 2.6))
        sketch.text(start + 8.8, top + 2.6, "first token")
    return sketch


def timelines(of_cell: Mapping[Schedule, Mapping[str, float]] | None = None) -> Figure:
    """Figure 13, unit by unit: what link and processor do for both requests under each schedule.

    ``of_cell`` has the units until the first token of each request as a notebook's cell computes them: where they are
    others they stand ringed, and in the title.
    """
    fig, axes = panels(3, 1, figsize=(9, 5.4), sharex=True)
    jobs = {job.name: job for job in FIGURE_13}
    for ax, (schedule, paper) in zip(axes, PUBLISHED_UNITS.items(), strict=True):
        timeline = simulate(FIGURE_13, schedule)
        for span in timeline.spans:
            _draw(ax, span, jobs[span.job])
        for job in FIGURE_13:
            end = job.arrival + timeline.ttft[job.name]
            ax.plot([job.arrival] * 2, [-0.5, 1.5], color=COLOURS["mark"], linestyle=":", linewidth=1.2)
            ax.plot([end] * 2, [-0.5, 1.5], color=COLOURS["mark"], linewidth=1.8)
        title = f"{schedule}: {_sum(timeline.ttft)} (paper: {paper})"
        if of_cell and of_cell[schedule] != timeline.ttft:
            title += f"; your cell: {_sum(of_cell[schedule])}"
            for job in FIGURE_13:
                end = job.arrival + of_cell[schedule][job.name]
                ax.plot([end] * 2, [-0.5, 1.5], color=COLOURS["your mechanism"], linewidth=4, zorder=5)
        ax.set_title(title, fontsize=11, loc="left")
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


def _sum(units: Mapping[str, float]) -> str:
    """Return the units of both requests and their sum, as "11 + 19 = 30"."""
    return " + ".join(f"{units[job.name]:g}" for job in FIGURE_13) + f" = {sum(units.values()):g}"


def ttft_by_link(recorded: Result | None, now: Result) -> Figure:
    """Figure 20, live over shaped links: the TTFT of the four ways, and how many times pipelined's the others take.

    Left, medians over rounds; right, the median of the ratios within a round, as the summary has it.
    """
    results = over(recorded, now)
    fig, (times, ratios) = panels(1, 2, figsize=(9, 4.6))
    for shown in results:
        links = [(rate, rows) for rate, rows in by_rate(shown.result.rows) if rate]
        rates = [rate for rate, _ in links]
        # a reader's order of sending changes the pipelined way alone; the others differ by chance from run to run
        for schedule, look in LOOK_OF.items():
            than = {"method": schedule, "than": Schedule.PIPELINED}
            shown.line(
                ratios, rates, [shown.result.summary.get("ttft_x", **than, gbit_per_s=rate) for rate in rates], look
            )
            if shown.library and schedule is not Schedule.PIPELINED:
                continue
            samples = [[row["ttft_s"] for row in rows_where(rows, schedule=schedule)] for _, rows in links]
            shown.line(times, rates, [bootstrap(seconds, "median").summary() for seconds in samples], look)
        if not shown.library:
            times.plot(rates, [_floor(rows) for _, rows in links], ":", color=COLOURS["mark"], **shown.style)
    ratios.axhline(1, color=SCHEDULES[Schedule.PIPELINED].colour)
    links = [(rate, rows) for rate, rows in by_rate(results[0].result.rows) if rate]
    rates, balance = [rate for rate, _ in links], _balance(links[0][1])
    for ax in (times, ratios):
        ax.set(xscale="log", yscale="log", xlabel="link, Gbit/s (shaped)")
        ticks(ax.xaxis, rates)
        low, high = ax.get_ylim()
        places = [digit * 10.0**power for power in range(-4, 4) for digit in (1, 2, 5)]
        ticks(ax.yaxis, [tick for tick in places if low <= tick <= high])
        if balance and rates[0] / 2 <= balance <= rates[-1] * 2:
            ax.axvline(balance, color=COLOURS["mark"], linestyle="--", linewidth=1.2)
    for style in SCHEDULES.values():
        times.plot([], [], marker=style.marker, color=style.colour, label=style.label)
    times.plot([], [], ":", color=COLOURS["mark"], label="max(transfer, computation)")
    times.plot([], [], color=COLOURS["mark"], linestyle="--", linewidth=1.2, label="both equally long (record)")
    times.set_ylabel("time to first token, s")
    ratios.set_ylabel("times pipelined's, of the same round")
    row = links[0][1][0]
    ratios.set_title(f"{row['tokens']} tokens, layers {row['group']} recomputed (record)", fontsize=10)
    legend(fig, times, results, "ttft_x")
    slow = [shown for shown in results if _worst(shown.result) > HIDES]
    whose = f", but not in {' and '.join(shown.who() for shown in slow)}" if slow else " on every link"
    fig.suptitle(f"E-cache first hides the shorter of transfer and computation{whose}", fontsize=12)
    return fig


def _worst(result: Result) -> float:
    """Return the most that the pipelined way takes over the longer of transfer and computation, of the links drawn."""
    entries = result.summary.all("ttft_x", method=Schedule.PIPELINED, than="floor")
    return max((entry["value"] for entry in entries if entry["where"].get("gbit_per_s")), default=0.0)


def _draw(ax: Axes, span: BusySpan, job: ReuseRequest) -> None:
    """One unit of work, with its layer counted from 1 as the paper does; the second request is outlined."""
    lane = {LINK: 0, PROCESSOR: 1}[span.resource]
    name = span.activity.removeprefix("KV ")
    colour = COMPUTED if span.resource == PROCESSOR else EDGE
    if span.activity.startswith("KV"):
        colour = IN_VAIN if int(name) in job.group else KV
    look = {"color": colour, "edgecolor": "black" if job is FIGURE_13[1] else colour, "linewidth": 1.2}
    ax.barh(lane, span.end - span.start - 0.08, left=span.start + 0.04, height=0.82, **look)
    text = f"{job.name}\n{name if name == 'E' else int(name) + 1}"
    light = colour in (IN_VAIN, KV)
    middle = (span.start + span.end) / 2
    ax.text(middle, lane, text, ha="center", va="center", fontsize=7.5, color="black" if light else "white")


def _floor(rows: Rows) -> float:
    """Median floor of the pipelined requests of one link, s."""
    return float(np.median([row["floor_s"] for row in rows_where(rows, schedule=Schedule.PIPELINED)]))


def _balance(rows: Rows) -> float | None:
    """The rate at which the pipelined request's transfer takes as long as its computation, Gbit/s."""
    piped = rows_where(rows, schedule=Schedule.PIPELINED)
    compute = float(np.median([row["compute_s"] for row in piped]))
    return piped[0]["bytes"] * 8 / 1e9 / compute if compute and piped[0]["bytes"] else None
