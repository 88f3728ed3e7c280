"""Windows of a cold start under load, drawn: goodput by arm, what each idea is missed by, the course of one draw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from firsttoken_studies.nb61_five_at_once.study import ALL, ARMS, NONE, goodput
from firsttoken_studies.nb61_five_at_once.trial import IDEAS
from firsttoken_studies.record.overlay import name_results, over
from firsttoken_studies.record.plot import COLOURS, Axes, Figure, categories, panels
from firsttoken_studies.record.results import Result, Table, rows_where
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import cells


def schematic() -> Schematic:
    """Draw what each of the five ideas does for a replica that starts cold."""
    alt = (
        "A replica has two of its six layers; the others come over a link, one by one (ProgressiveServe). A neighbour "
        "that has all of them runs those that are missing (PETALS). Another model has cached how the prompt begins "
        "(DroidSpeak), the rest of it is computed in chunks (Sarathi-Serve), and a request that finds no block is "
        "swapped or computed again (CPS)."
    )
    sketch = Schematic(22, 8.2, alt)
    sketch.text(0.2, 0.4, "Requests arrive while most layers are still on their way", heading=True)
    for y, owner, is_cold in ((1.2, "cold replica", True), (4, "warm neighbour", False)):
        sketch.text(0.2, y + 0.5, owner)
        for layer in range(6):
            look = "measured" if is_cold else "online" if layer > 1 else "other"
            sketch.box(5 + 1.5 * layer, y, f"{layer + 1}", look, 1.5, missing=is_cold and layer > 1)
    sketch.arrow((17.2, 1.7), (14.2, 1.7))
    sketch.text(17.4, 1.4, "layers come:")
    sketch.text(17.4, 2, "ProgressiveServe")
    sketch.arrow((8.7, 2.3), (8.7, 3.9))
    sketch.arrow((13.3, 3.9), (13.3, 2.3))
    sketch.text(11, 3.1, "runs 3 to 6: PETALS", align="center")
    for x, width, text, look, idea in (
        (5, 3.4, "cached", "sender", "DroidSpeak"),
        (8.6, 1.7, "chunk", "sarathi", ""),
        (10.4, 1.7, "chunk", "sarathi", "Sarathi-Serve"),
        (14, 6, "no block left: swap?", "swap", "CPS"),
    ):
        sketch.box(x, 5.9, text, look, width=width)
        sketch.text(x + (0 if look == "sarathi" else width / 2), 7.4, idea, align="center")
    sketch.text(0.2, 6.4, "a prompt")
    return sketch


COLUMNS = {
    "within both objectives, requests/s": ("goodput_per_s", 2),
    "first token of the first request, s": ("first_token_s", 2),
    "P50 TTFT, s": ("ttft_p50_s", 2),
    "P95 TTFT, s": ("ttft_p95_s", 2),
    "P99 TBT, s": ("tbt_p99_s", 3),
    "processors, s": ("processor_s", 1),
    "the warm replica's answers, %": ("same_tokens_pct", 0),
    "the whole model's but for near ties, %": ("own_answers_pct", 0),
    "F1 to the warm replica's": ("f1", 2),
    "preemptions": ("preemptions", 1),
}


def arm_rows(result: Result) -> Table:
    """A line an arm: all measures with their intervals."""
    for arm in ARMS:
        if result.summary.get("goodput_per_s", variant=arm):
            yield {"arm": arm} | cells(result.summary, COLUMNS, variant=arm)


def goodput_by_arm(recorded: Result | None, now: Result) -> Figure:
    """Requests within both objectives a second, a line an arm."""
    fig, ax = panels(figsize=(8, 4.6))
    drawn_over = over(recorded, now)
    for shown in drawn_over:
        for position, arm in enumerate(ARMS):
            look = "measured" if arm == ALL else "other"
            shown.point(
                ax, position + shown.shift, shown.result.summary.get("goodput_per_s", variant=arm), look, along="x"
            )
    categories(ax, ARMS, 0.4)
    ax.set_xlim(left=0)
    ax.set_xlabel("requests within both objectives, a second")
    above = (recorded or now).summary.get("goodput_above_pct", variant=ALL, than="best single")
    gained = f": {above['value']:+.0f} % beside the best one" if above else ""
    ax.set_title(f"In time with all five ideas{gained}", loc="left", fontsize=11)
    name_results(fig, drawn_over, "goodput_per_s")
    return fig


def missed(recorded: Result | None, now: Result) -> Figure:
    """Draw the part of the goodput of all five that is lost without each of them, paired by draw; right of 0 an idea
    is missed."""
    fig, ax = panels(figsize=(8, 3))
    drawn_over = over(recorded, now)
    for shown in drawn_over:
        for position, idea in enumerate(IDEAS):
            entry = shown.result.summary.get("goodput_lost_per_s", variant=ALL, than=f"without {idea}")
            shown.point(ax, position + shown.shift, entry, "measured", along="x")
    ax.axvline(0, color=COLOURS["target"], linestyle="--")
    categories(ax, IDEAS, 0.4)
    ax.set_xlabel("goodput of all five above that without this one, requests/s")
    lost = [(recorded or now).summary.get("goodput_lost_per_s", variant=ALL, than=f"without {idea}") for idea in IDEAS]
    sure = sum(entry.get("low", 0) > 0 for entry in lost if entry)
    ax.set_title(f"{sure} of {len(IDEAS)} ideas are missed for sure when they are left out", loc="left", fontsize=11)
    name_results(fig, drawn_over)
    return fig


def course(result: Result) -> Figure:
    """The first draw without any idea and with all: a line a request, from its arrival over its first token to its
    last."""
    fig, axes = panels(1, 2, figsize=(9, 4), sharex=True, sharey=True)
    first = min(row["seed"] for row in result.rows)
    for ax, arm in zip(axes, (NONE, ALL), strict=True):
        for row in rows_where(result.rows, arm=arm, seed=first):
            _one_course(ax, row, result.parameters["five_at_once"])
            ax.set_title(f"{arm}: {goodput(row, result.parameters['five_at_once']):.2f} requests/s in time")
        ax.set_xlabel("seconds since the first request")
    fig.suptitle("The same requests wait less for their first token, and answer sooner, with all five")
    axes[0].set_ylabel("request")
    axes[0].invert_yaxis()
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    return fig


def _one_course(ax: Axes, row: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    places = np.arange(len(row["arrival_s"]))
    firsts = np.array([config["limit_s"] if time_s is None else time_s for time_s in row["first_s"]], float)
    lasts = np.array([config["limit_s"] if time_s is None else time_s for time_s in row["last_s"]], float)
    ax.hlines(places, row["arrival_s"], firsts, color=COLOURS["other"], linewidth=3, label="waits for its first token")
    ax.hlines(places, firsts, lasts, color=COLOURS["measured"], linewidth=3, label="answers")
    ax.axvline(row["loaded_s"], color=COLOURS["mark"], linestyle=":", label="all layers are here")
