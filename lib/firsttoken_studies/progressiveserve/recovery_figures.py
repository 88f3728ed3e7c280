"""The figures of notebooks 15 and 16, drawn from results alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.progressiveserve.staged_serving.transitions import TRANSITIONS
from firsttoken.study.system import NOT_HERE
from firsttoken_studies.nb15_recovery_timeline.study import CASES, unpacked
from firsttoken_studies.record.overlay import name_results, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, panels
from firsttoken_studies.record.results import Result, Rows, Table, distinct, frame_of, rows_where
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval

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
POLICIES = {
    "request boundary": LOOKS["request boundary"],
    "prefill again": LOOKS["recompute"],
    "from boundary states": LOOKS["boundary states"],
    "partial prefill": LOOKS["droidspeak"],
    "naive": LOOKS["naive"],
}
KINDS = {"healed": "adapters change with the stage", "bare": "no adapters"}
_CORNER = {"ha": "right", "va": "top"}
LEAST_MS = 0.001  # a stall of less is drawn as one of so much


def moving_schematic() -> Schematic:
    """Draw the tokens of a request that stays with its stage, and of one that moves, while stages come."""
    alt = (
        "Stage 1 of a model answers first. Stage 2 comes, and then the whole model. A request that stays gets all its "
        "tokens from stage 1. A request that moves gets its next tokens from each better stage, once that has read "
        "again all tokens so far."
    )
    sketch = Schematic(20, 5.6, alt)
    sketch.text(0.3, 0.5, "Layers come while requests are answered", heading=True)
    for stage, name in enumerate(("stage 1", "stage 2", "whole model")):
        sketch.box(4 + 5 * stage, 1, f"{name} is there", f"S{stage + 1}", width=4.9)
        for y, look in ((2.7, "S1"), (4.2, f"S{stage + 1}")):
            for token in range(5):
                again = stage > 0 and token == 0 and y > 4
                sketch.box(4 + 5 * stage + token, y, "read" if again else "", look, width=0.95, missing=again)
    sketch.text(0.3, 3.2, "it stays", heading=True)
    sketch.text(0.3, 4.7, "it moves", heading=True)
    sketch.arrow((4, 5.45), (18.9, 5.45))
    sketch.text(19, 5.45, "time")
    return sketch


def session_schematic() -> Schematic:
    """Draw the keys and values that an open session has when a layer comes in its midst."""
    alt = (
        "An open session has keys and values of six tokens in layers one to five. Four tokens were read while layer "
        "three was missing: there they have none, and those in the layers above are the smaller model's. The tokens "
        "after that are the whole model's. To go on is wrong, to compute again takes time, and to end with the smaller "
        "model costs nothing."
    )
    sketch = Schematic(20, 6.6, alt)
    sketch.text(0.3, 0.5, "Layer 3 comes in the middle of an answer", heading=True)
    for layer in range(5, 0, -1):
        y = 6 - layer + 0.1
        sketch.text(0.3, y + 0.5, f"layer {layer}")
        for token in range(6):
            late, old = token > 3, layer >= 3
            look = "S3" if late or not old else "S1"
            sketch.box(
                2.4 + 1.2 * token,
                y,
                "none" if layer == 3 and not late else "",
                look,
                1.15,
                missing=layer == 3 and not late,
            )
    sketch.text(4.75, 6.35, "tokens before", align="center")
    sketch.text(8.35, 6.35, "after", align="center")
    ways = {"Go on": "with keys and values of another model", "Compute again": "layers 3 to 5: right, and late"}
    for row, (way, cost) in enumerate((ways | {"Stay": "the smaller model ends the answer"}).items()):
        sketch.text(10.6, 1.5 + 1.7 * row, way, heading=True)
        sketch.text(10.6, 2.1 + 1.7 * row, cost)
    return sketch


def stage_bars(recorded: Result | None, now: Result) -> Figure:
    """Time until each stage serves, in plain starts of the same loader: the report's beside ours."""
    results = [shown for shown in over(recorded, now) if not shown.library]  # no rule of moving is about the stages
    fig, ax = panels(figsize=(9, 3.8))
    _stage_bar(ax, 0, np.cumsum(PAPER_S["stages"]) / PAPER_S["whole"], 0.5, {"edgecolor": COLOURS["paper"]})
    for row_index, case in enumerate(("pinned", "upgrade"), start=1):
        for shown in results:
            serving = shown.result.frame(case=case, row="event", what="serving").groupby("stage").at_s.median()
            edges = serving / shown.result.summary.value("full_time_s", case="whole")
            look = shown.style | ({"edgecolor": "black"} if shown.own else {})
            _stage_bar(ax, row_index + 1.3 * shown.shift, edges, 0.6 if shown.alone else 0.34, look)
    ax.axvline(1, color=COLOURS["floor"], linestyle="--", label="a plain start of the same loader serves")
    for stage in (1, 2, 3):
        ax.barh(0, 0, color=COLOURS[f"S{stage}"], label=f"until stage {stage} serves")
    names = ["report: Llama-2-7B,\none run", *(f"here: {LABELS[case]}".replace(", ", ",\n") for case in CASES[1:])]
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set(xlabel="time from the start, in plain starts", xlim=(0, 2.6))
    ax.grid(axis="y", visible=False)
    late = 100 * (results[0].result.summary.value("full_time_x", case="pinned", than="whole") - 1)
    early = 100 * (1 - results[0].result.summary.value("ttft_x", case="pinned", than="whole"))
    fig.suptitle(f"The first token comes {early:.0f} % earlier, the whole model {late:.0f} % later")
    ax.legend(loc="upper right", fontsize="x-small", frameon=True)
    name_results(fig, results, "ttft_p50_s")
    return fig


def _stage_bar(ax: Axes, position: float, edges: Sequence[float], height: float, look: dict[str, Any]) -> None:
    begin = 0.0
    for stage, end in enumerate(edges, start=1):
        ax.barh(position, end - begin, left=begin, height=height, color=COLOURS[f"S{stage}"], linewidth=1.5, **look)
        begin = end
    text = " / ".join(f"{end:.2f}" for end in edges)
    ax.annotate(text, (begin, position), (5, 0), textcoords="offset points", va="center", fontsize=9)


def answered_s(result: Result, case: str) -> list[float]:
    """Return the time at which the first answer of each client ended, in s from the start, in every run of ``case``."""
    tokens = frame_of(unpacked(rows_where(result.rows, case=case)), row="token", request=0)
    return tokens.groupby(["run", "client"]).at_s.max().tolist()


def growth_of_service(recorded: Result | None, now: Result) -> Figure:
    """The first run of each case over time: tokens handed out so far by stage, and resident memory; an arrow from the
    first token to the end of the clients' first answers. The time shown is twice a plain start's. Of a reader's rule
    there are the cases in which it moves requests otherwise."""
    results = over(recorded, now)
    fig, axes = panels(2, len(CASES), figsize=(9, 5.6), sharex=True, sharey="row", height_ratios=(1.8, 1))
    until = 2.2 * max(shown.result.summary.value("full_time_s", case="whole") for shown in results)
    most = max((len(_tokens(shown.result, case, until)) for shown in results for case in CASES), default=0) or 1
    for (top, bottom), case in zip(axes.T, CASES, strict=True):
        for shown in results:
            rows = rows_where(shown.result.rows, case=case, run=0)
            if shown.repeats(top, case, str([row["pairs"] for row in rows_where(rows, row="moves")])):
                continue
            last = max(distinct(rows, "stage", row="event"))
            tokens = _tokens(shown.result, case, until)
            # the last stage of a start is the whole model, whatever its number
            colours = [COLOURS["S3" if row["stage"] == last else f"S{row['stage']}"] for row in tokens]
            points = [row["at_s"] for row in tokens], range(1, len(tokens) + 1)
            edge = {"edgecolors": "black", "linewidths": 0.15} if shown.own else {}
            top.scatter(*points, c=colours, s=14 if shown.own else 7, **edge, **shown.style)
            text_height = most * (1.02 + (0.25 if shown.library else 0.08 if shown.own else 0.18))
            span = min((row["at_s"] for row in tokens), default=0.0), float(np.median(answered_s(shown.result, case)))
            top.plot(span, [text_height] * 2, "|-", color=COLOURS["mark"], markersize=8, **shown.style)
            memory = {row["at_s"]: row["rss_bytes"] / 1e6 for row in rows_where(rows, row="memory") if row["rss_bytes"]}
            bottom.plot([*memory], [*memory.values()], color=COLOURS["measured"], **shown.style)
            if not memory:
                bottom.annotate(NOT_HERE, (0.5, 0.5 + shown.shift), xycoords="axes fraction", ha="center", va="center")
        top.set_title(LABELS[case].replace(", ", ",\n"), fontsize=10)
        bottom.set(xlabel="seconds from the start", xlim=(0, until))
    axes[0][0].set(ylabel="tokens handed out", ylim=(0, 1.3 * most))
    axes[1][0].set(ylabel="resident, MB", ylim=(0, None))
    for stage, label in ((1, "stage 1"), (2, "stage 2"), (3, "whole model")):
        axes[0][0].plot([], [], "o", color=COLOURS[f"S{stage}"], label=f"by {label}")
    axes[0][0].plot([], [], "|-", color=COLOURS["mark"], label="first token to\nend of first answer")
    axes[0][0].legend(loc="center left", fontsize="x-small", frameon=True)
    first, end = (
        [measure(results[0].result, case) for case in ("pinned", "whole")]
        for measure in (
            lambda r, case: r.summary.value("ttft_p50_s", case=case),
            lambda *arguments: np.median(answered_s(*arguments)),
        )
    )
    early = f"The first token ({first[0]:.1f} s, not {first[1]:.1f})"
    whole_text = f"({end[0]:.1f} s, not {end[1]:.1f})"
    if first[0] < first[1] and end[0] > end[1]:
        fig.suptitle(f"{early} is bought with the rest of the answer {whole_text}")
    elif first[0] < first[1]:
        fig.suptitle(f"{early} and the whole first answer {whole_text} come earlier")
    else:
        fig.suptitle(f"{early} beside the whole first answer {whole_text}")
    name_results(fig, results, "ttft_p50_s")
    return fig


def _tokens(result: Result, case: str, until: float) -> Rows:
    """The tokens of the first run up to ``until`` s, in the order in which they were handed out."""
    token_rows = rows_where(unpacked(rows_where(result.rows, case=case, run=0)), row="token")
    return sorted((row for row in token_rows if row["at_s"] <= until), key=lambda row: row["at_s"])


def continuation_losses(recorded: Result | None, now: Result) -> Figure:
    """Draw the stall of moving from stage 1 to the whole model, against the further loss of the rest of the text over
    that after a fresh prefill: by policy, paired by window, with and without adapters. Of a reader's rule there are the
    policies after which another loss follows."""
    results = over(recorded, now)
    fig, axes = panels(1, 2, figsize=(9, 4.4), sharex=True, sharey=True)
    for ax, (kind, label) in zip(axes, KINDS.items(), strict=True):
        for shown in results:
            for policy, look in POLICIES.items():
                (cost,) = shown.result.summary.all("cost_ms", policy=policy, variant=kind)
                lost = shown.result.summary.of("excess_nll", policy=policy, variant=kind)
                if shown.repeats(ax, policy, lost["value"]):  # a stall is never the same twice
                    continue
                error_bars = [[max(0.0, lost["value"] - lost["low"])], [max(0.0, lost["high"] - lost["value"])]]
                shape = {"marker": look.marker, "markersize": 9, "linestyle": "none", "color": look.colour}
                named = policy if shown.own and not shown.library else None
                stall = max(cost["value"], LEAST_MS)
                ax.errorbar(stall, lost["value"], error_bars, **shape, label=named, **shown.outlined)
        ax.axhline(0, color=COLOURS["floor"], linestyle=":", linewidth=1.2, label="a fresh prefill (no loss)")
        ax.set(title=label, xscale="log", xlabel="stall, ms (log scale)")
    axes[0].set_ylabel("loss of what follows, nats a token more")
    axes[1].legend(loc="upper right", fontsize="small", frameon=True)
    lost = results[0].result.summary.value("excess_nll", policy="naive", variant="healed")
    lengths = " and ".join(shown.who() + ": " + shown.result.summary.all("cost_ms")[0]["unit"] for shown in results)
    axes[0].annotate(lengths.replace(" and ", "\n"), (0.98, 0.98), xycoords="axes fraction", fontsize=8, **_CORNER)
    fig.suptitle(f"Swapping layers under an open session loses {lost:.1f} nats a token; a prefill loses none")
    name_results(fig, results, "excess_nll")
    return fig


# The tables of notebooks 15 and 16.

_TIMELINE = (
    ("first token, s", "ttft_p50_s", {}, 2, ""),
    ("whole first answer, s", "first_answer_s", {}, 2, ""),
    ("whole model serves, s", "full_time_s", {}, 2, ""),
    ("tokens handed out", "tokens", {}, 0, ""),
    ("growth of memory at its peak / bytes of the model", "peak_memory_x", {"than": "model"}, 2, NOT_HERE),
    ("requests with a token too few or too many", "short_requests", {}, 0, ""),
    ("extra stall at a change of stage, beyond one step and the prefill of the move, ms", "excess_stall_ms", {}, 1, ""),
)


def timeline_rows(result: Result) -> Rows:
    """Return the measures of each case: medians over runs with 95 % intervals; a run's first answers count as the
    median over its clients."""
    return [
        {"measure": label}
        | {LABELS[case]: interval(result.summary.get(name, case=case, **to), digits) or absent for case in CASES}
        for label, name, to, digits, absent in _TIMELINE
    ]


def policy_rows(result: Result) -> Table:
    """Every policy with and without adapters: stall, largest logit error, loss of what follows."""
    summary = result.summary
    for kind in ("healed", "bare"):
        for name in TRANSITIONS:
            labels = {"policy": name, "variant": kind}
            (cost,) = summary.all("cost_ms", **labels)
            yield {
                "policy": name,
                "adapters": "yes" if kind == "healed" else "no",
                f"stall, {cost['unit']}": interval(cost, 2),
                "largest logit error": f"{summary.value('logit_error', **labels):.2g}",
                "next token right, %": interval(summary.of("same_token_pct", **labels), 0),
                "loss of what follows, nats a token": interval(summary.get("nll", **labels), 2),
                "more than after a prefill": interval(summary.get("excess_nll", **labels), 2),
            }
