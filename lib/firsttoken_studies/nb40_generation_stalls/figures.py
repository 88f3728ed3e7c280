"""The figures and the table of notebook 40."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.sarathi.policy import scheduler_labels
from firsttoken_studies.nb40_generation_stalls.study import LIVE, SIMULATED
from firsttoken_studies.record.overlay import name_results, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, handle, panels
from firsttoken_studies.record.results import Result, Rows, Table, distinct, rows_where
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval
from firsttoken_studies.record.verdicts import compared
from firsttoken_studies.sarathi.leaderboard import BASE
from firsttoken_studies.sarathi.styles import NAMES, apart, card, told

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def schematic() -> Schematic:
    """Draw the tokens of one running request while a long prompt is read: whole, and in chunks."""
    alt = (
        "A running request A has a token in each step. A long prompt P comes. Read whole, P takes one long step, and "
        "A has no token until it ends: this gap is the stall. Cut into chunks, P takes several steps, each a little "
        "longer than before, and A has its token in each of them."
    )
    sketch = Schematic(20, 7.7, alt)
    sketch.text(0.2, 0.4, "P is read whole: A stalls", heading=True)
    for x in (1, 2.1, 13.2, 14.3, 15.4, 16.5):
        sketch.box(x, 1, "A", "measured")
    sketch.box(3.2, 2, "prompt P", "prefill", width=10)
    sketch.arrow((3.2, 1.55), (13.1, 1.55), "the stall: no token of A", look="target")
    sketch.text(0.2, 4.4, "P is cut into chunks: each gap is one short step", heading=True)
    for x in (1, 2.1, *(3.2 + 2.8 * chunk + 1.7 for chunk in range(4)), 14.4, 15.5):
        sketch.box(x, 5, "A", "measured")
    for chunk in range(4):
        sketch.box(3.2 + 2.8 * chunk, 6, f"chunk {chunk + 1}", "prefill", width=2.7)
    for y in (3.2, 7.3):
        sketch.arrow((0.8, y), (18.6, y))
        sketch.text(18.8, y, "time")
    return sketch


def stalls(recorded: Result | None, now: Result) -> Figure:
    """Draw the tokens of a running request after a long prompt has come, by scheduler (Figure 1a).

    Of each the repeat with the median time. Each line has its mark where the prompt has its first token.
    """
    live = apart(recorded, now, lambda result: f"live, {_model(result)}")
    simulated = apart(recorded, now, lambda result: f"simulated, {card(result)}")
    panels_shown = [*((LIVE, *panel) for panel in live.items()), *((SIMULATED, *panel) for panel in simulated.items())]
    fig, axes = panels(1, len(panels_shown), figsize=(9, 4.6), sharey=True)
    labels = {}
    for ax, (run, title, results) in zip(axes, panels_shown, strict=True):
        for shown in results:
            rows = rows_where(shown.result.rows, run=run)
            for scheduler in distinct(rows, "scheduler"):
                if shown.library and _same_steps(shown.result, shown.library, scheduler):
                    continue
                times, first_s = _median_run(rows_where(rows, scheduler=scheduler))
                name, label = NAMES[scheduler.partition(" ")[0]]
                look, width = LOOKS[name], 2.2 if shown.own else 1.4
                ax.step(times, range(len(times)), where="post", color=look.colour, linewidth=width, **shown.style)
                edge = {"markeredgecolor": "black"} if shown.own else {}
                point = (first_s, np.searchsorted(times, first_s, side="right") - 1)
                ax.plot(*point, look.marker, ms=8, color=look.colour, **edge, **shown.style)
                labels[label] = handle(color=look.colour, marker=look.marker)
        ax.set_title(title, fontsize=10)
        ax.set(xlabel="time since the prompt came, s", xlim=(0, None), ylim=(-0.7, None))
    fig.suptitle(stall_title(recorded, now))
    axes[0].set_ylabel("tokens of a running request since")
    names = fig.legend(list(labels.values()), list(labels), loc="outside lower center", ncols=3, fontsize="small")
    name_results(fig, over(recorded, now), legend=names)
    return fig


def stall_title(recorded: Result | None, now: Result) -> str:
    """Return the live gaps of the record in a sentence; and where this run has the other one longer, that it has."""
    pairs = [
        [result.summary.all("worst_gap_ms", source=LIVE, scheduler=name)[0]["value"] for name in (BASE, "sarathi")]
        for result in (recorded or now, now)
    ]
    (whole_ms, chunked_ms), (own_whole_ms, own_chunked_ms) = pairs
    word = compared(chunked_ms, whole_ms, "shortens", "lengthens")
    other = (
        " (in your run it does not)" if word != compared(own_chunked_ms, own_whole_ms, "shortens", "lengthens") else ""
    )
    return f"Cutting a long prompt {word} the longest stall: live {chunked_ms:.0f} ms instead of {whole_ms:.0f}{other}"


def _model(result: Result) -> str:
    """Return the model of the live runs of notebook 40, and the length of the prompt that comes."""
    config = result.parameters["stalls"]
    return f"{config.get('model') or result.parameters['model']}, {config['prompt']:,} tokens"


def _same_steps(result: Result, library: Result, scheduler: str) -> bool:
    """Return whether a reader's ``scheduler`` is simulated as the library's is; live times never agree."""
    name = scheduler.partition(" ")[0]
    ran, expected = (
        [row for row in rows_where(compared_result.rows, run=SIMULATED) if row["scheduler"].partition(" ")[0] == name]
        for compared_result in (result, library)
    )
    return ran == expected


def _median_run(rows: Rows) -> tuple[list[float], float]:
    """Return when a running request had its tokens and the prompt its first, in the repeat with the median duration."""
    times = {}
    for row in rows_where(rows, request=0):
        times.setdefault(row["repeat"], []).append(row["at_s"])
    repeat = sorted(times, key=lambda number: times[number][-1])[(len(times) - 1) // 2]
    (first_s,) = (row["ttft_s"] for row in rows_where(rows, request="prompt", repeat=repeat))
    return times[repeat], first_s


def one_arrival(scenes: Mapping[str, Mapping[str, Any]], title: str) -> Figure:
    """Draw two runs of notebook 40's scene, by scheduler: "tokens" are the times of a running request's next tokens,
    "first" that of the prompt's first, ms. Axes are the same for every run; letters are few, as they take longest."""
    fig, ax = panels(figsize=(7.2, 2.8), layout="none")
    fig.subplots_adjust(left=0.08, right=0.98, bottom=0.18, top=0.89)
    for (scheduler, scene), side in zip(scenes.items(), ("left", "right"), strict=True):
        name, label = NAMES[scheduler]
        times = [0, *scene["tokens"]]
        ax.step(times, range(len(times)), where="post", color=COLOURS[name])
        ax.text(times[-1], len(times) - 1, f"  {label}  ", color=COLOURS[name], ha=side, va="center")
        first = np.searchsorted(times, scene["first"], side="right") - 1
        ax.plot(scene["first"], first, LOOKS[name].marker, ms=9, color=COLOURS[name])
    ax.set_title(title, fontsize="medium")
    ax.set(xlim=(0, 1330), xticks=range(0, 1201, 300), ylim=(-0.5, 12.9), yticks=range(0, 13, 4))
    ax.set(xlabel="time since the long prompt came, ms", ylabel="tokens since")
    return fig


def stall_rows(result: Result) -> Table:
    """The longest gap, over a plain one, and the prompt's TTFT, by run and scheduler."""
    runs = dict.fromkeys((row["run"], row["scheduler"]) for row in result.rows)
    for run, scheduler in runs:
        labels = {"source": run} | scheduler_labels(scheduler)
        yield {
            "run": f"{run}: {told(scheduler)}",
            "longest gap, ms": interval(result.summary.of("worst_gap_ms", **labels), 0),
            "over a plain gap": interval(result.summary.of("worst_gap_x", **labels, than="plain gap"), 1),
            "prompt's TTFT, s": interval(result.summary.of("ttft_s", **labels), 2),
        }
