"""The figures of notebooks 15 and 16, drawn from results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from firsttoken.progressive.recovery.timeline import CASES
from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.record import Result, Rows
from firsttoken.study.system import NOT_HERE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER_S = {"whole": 114.0, "stages": (90.0, 19.0, 19.0)}
"""The report's times to serve (2.4.1) and its stages (KIISE KSC 2025, Table 1): Llama-2-7B, one run each."""

LABELS = {
    "whole": "whole model first",
    "pinned": "progressive, requests end as they began",
    "upgrade": "progressive, open requests move over",
}
SCORED = {1: {"stage": 1, "recipe": "ours"}, 2: {"stage": 2, "recipe": "ours"}, 3: {"stage": 3}}
"""Where stage_quality has the scores of each stage as it is served: healed by our recipe."""

POLICIES = {
    "request boundary": LOOKS["request boundary"],
    "prefill again": LOOKS["recompute"],
    "from boundary states": LOOKS["boundary states"],
    "partial prefill": LOOKS["droidspeak"],
    "naive": LOOKS["naive"],
}


def stage_bars(result: Result) -> Figure:
    """Time until each stage serves, in plain starts of the same loader: the report's beside ours."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(8.5, 3.2))
    whole = result.summary.value("full_time_s", case="whole")
    bars = [("report: Llama-2-7B, about 1 Gbit/s", np.cumsum(PAPER_S["stages"]) / PAPER_S["whole"], COLOURS["paper"])]
    for case in ("pinned", "upgrade"):
        bars.append((f"here: {LABELS[case]}", np.array(_served_at(result, case)) / whole, COLOURS["measured"]))
    for place, (_, ends, edge) in enumerate(bars):
        begin = 0.0
        for stage, end in enumerate(ends, start=1):
            colour = COLOURS[f"S{stage}"]
            ax.barh(place, end - begin, left=begin, color=colour, edgecolor=edge, linewidth=2, height=0.6)
            last = stage == len(ends)
            ax.annotate(
                f"{end:.2f}",
                (end, place),
                ha="left" if last else "right",
                va="center",
                fontsize=9,
                xytext=(5 if last else -3, 0),
                textcoords="offset points",
            )
            begin = end
    ax.axvline(1, color=COLOURS["floor"], linestyle="--", label="plain start of the same loader")
    for stage in (1, 2, 3):
        ax.barh(0, 0, color=COLOURS[f"S{stage}"], label=f"until stage {stage} serves")
    ax.set_yticks(range(len(bars)), [label for label, _, _ in bars])
    ax.invert_yaxis()
    ax.set(xlabel="time from the start, in plain starts", xlim=(0, 1.4))
    ax.grid(axis="y", visible=False)
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def _served_at(result: Result, case: str) -> list[float]:
    """Median time in s at which each stage began to serve."""
    events = [row for row in result.rows if row["case"] == case and row["row"] == "event" and row["what"] == "serving"]
    stages = sorted({row["stage"] for row in events})
    return [float(np.median([row["at_s"] for row in events if row["stage"] == stage])) for stage in stages]


def growth_of_service(result: Result, quality: Result | None = None, run: int = 0) -> Figure:
    """One run of each case over time: tokens handed out so far by stage, the score of the stage that serves new
    requests as ``quality`` (stage_quality) has it, and resident memory. The time shown is twice a plain start's."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(3, len(CASES), figsize=(12, 7), sharex=True, sharey="row", height_ratios=(1.6, 1, 1))
    until = 2 * result.summary.value("full_time_s", case="whole")
    for (top, middle, bottom), case in zip(axes.T, CASES, strict=True):
        rows = [row for row in result.rows if row["case"] == case and row["run"] == run]
        tokens = sorted((row for row in rows if row["row"] == "token"), key=lambda row: row["at_s"])
        served = [row for row in rows if row["row"] == "event" and row["what"] == "serving"]
        last = max(row["stage"] for row in rows if row["row"] == "event")
        for stage in sorted({row["stage"] for row in tokens}):
            points = [(row["at_s"], i) for i, row in enumerate(tokens, start=1) if row["stage"] == stage]
            top.plot(*zip(*points, strict=True), ".", color=_stage_colour(stage, last), markersize=5)
        for row in served:
            for ax in (top, middle, bottom):
                ax.axvline(row["at_s"], color=_stage_colour(row["stage"], last), linestyle="--", linewidth=1.2)
        if quality:
            _score_lane(middle, quality, served, last, until)
        memory = [(row["at_s"], row["rss_bytes"] / 1e6) for row in rows if row["row"] == "memory" and row["rss_bytes"]]
        if memory:
            bottom.plot(*zip(*memory, strict=True), color=COLOURS["measured"])
        for ax, missing in ((middle, quality is None), (bottom, not memory)):
            if missing:
                ax.annotate(NOT_HERE, (0.5, 0.5), xycoords="axes fraction", ha="center", va="center")
        top.set_title(LABELS[case], fontsize=11)
        bottom.set(xlabel="seconds from the start", xlim=(0, until))
    shown = [row for row in result.rows if row["row"] == "token" and row["run"] == run and row["at_s"] <= until]
    most = max((sum(row["case"] == case for row in shown) for case in CASES), default=1)
    axes[0][0].set(ylabel="tokens handed out", ylim=(0, 1.1 * most or 1))
    axes[1][0].set(ylabel="F1, %\n(notebook 12)", ylim=(0, 100))
    known = [row["rss_bytes"] or 0 for row in result.rows if row["row"] in ("memory", "peak")]
    axes[2][0].set(ylabel="resident, MB", ylim=(0, 1.1 * max(known) / 1e6 or 1))
    for stage, label in ((1, "stage 1"), (2, "stage 2"), (3, "whole model")):
        axes[0][0].plot([], [], "o", color=COLOURS[f"S{stage}"], label=f"by {label}")
    axes[0][0].plot([], [], "--", color="black", label="begins to serve")
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig


def _stage_colour(stage: int, last: int) -> str:
    """The last stage of a start is the whole model, whatever its number."""
    return COLOURS["S3" if stage == last else f"S{stage}"]


def _score_lane(ax: Axes, quality: Result, served: Rows, last: int, until: float) -> None:
    """F1 in % with its interval of each stage from when it serves new requests until the next one does."""
    begins = sorted((row["at_s"], row["stage"]) for row in served)
    ends = [at for at, _ in begins[1:]] + [until]
    for (begin, stage), end in zip(begins, ends, strict=True):
        found = quality.summary.of("f1_pct", **SCORED[3 if stage == last else stage])
        colour = _stage_colour(stage, last)
        ax.fill_between([begin, end], found["low"], found["high"], color=colour, alpha=0.25, linewidth=0)
        ax.plot([begin, end], [found["value"]] * 2, color=colour, linewidth=2.5)
    told, place = f"{found['value']:.0f} %, n = {found['n']}", (until, found["low"])
    ax.annotate(told, place, (-3, -3), textcoords="offset points", ha="right", va="top", fontsize=9)


def continuation_losses(result: Result) -> Figure:
    """What the rest of a text costs more than after a fresh prefill, when a request moves from stage 1 to the whole
    model: by policy, paired by window."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(8.5, 3))
    kinds = {"healed": ("with adapters", "full", -0.13), "bare": ("without adapters", "none", 0.13)}
    for place, (policy, (colour, marker)) in enumerate(POLICIES.items()):
        for kind, (_, fill, shift) in kinds.items():
            entry = result.summary.of("excess_nll", policy=policy, variant=kind)
            ax.plot([entry["low"], entry["high"]], [place + shift] * 2, color=colour, linewidth=2)
            ax.plot(entry["value"], place + shift, marker, color=colour, markersize=8, fillstyle=fill)
    for label, fill, _ in kinds.values():
        ax.plot([], [], "o", color=COLOURS["mark"], fillstyle=fill, markersize=8, label=label)
    ax.axvline(0, color=COLOURS["mark"], linestyle=":", linewidth=1.2)
    ax.set_yticks(range(len(POLICIES)), list(POLICIES))
    ax.set_ylim(len(POLICIES) - 0.5, -0.5)
    ax.set_xlabel("loss of what follows beyond that after a fresh prefill, nats a token")
    ax.set_title(f"{entry['n']} windows, 95 %", fontsize=11)
    ax.grid(axis="y", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig
