"""The figures of notebook 22: the reader's run over the record, and the queue of its scene."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from firsttoken.engine.request import Phase
from firsttoken_studies.cps.styles import POLICIES
from firsttoken_studies.nb22_cross_point_scheduler.study import BOUND, COMPARED, MEANS, PAPER_TPOT_MS, below, column
from firsttoken_studies.record.overlay import DrawnResult, legend, name_results, over
from firsttoken_studies.record.plot import COLOURS, Axes, Figure, panels
from firsttoken_studies.record.results import Result, Rows, rows_where
from firsttoken_studies.record.schematic import Schematic

PAPER_P99_MS = 70.57
# Figure 2 and 4.2.2: CPS in ms; the P99 TPOT of the others from its percentages, and from these theirs below Swap
PAPER = {
    "ttft_mean_ms": {"cross_point": 1648.35},
    "tpot_mean_ms": {"cross_point": PAPER_TPOT_MS},
    "tpot_p99_ms": {"cross_point": PAPER_P99_MS, "swap": PAPER_P99_MS / 0.869, "recompute": PAPER_P99_MS / 0.799},
}
SAID = {"ttft_mean_ms": "mean TTFT, s", "tpot_mean_ms": "mean TPOT, ms", "tpot_p99_ms": "P99 TPOT, ms"}
PHASES = {Phase.RUNNING: "measured", Phase.SWAPPED: "swap", Phase.WAITING: "recompute"}


def schematic() -> Schematic:
    """Draw what becomes of the cache of a request that is preempted, of a short one and of a long one."""
    alt = (
        "Request A and request B, which came last, hold all blocks of the GPU, so B gives up its own. Where B is "
        "short, its two blocks are copied to host memory, and later back. Where B is long, its six blocks are thrown "
        "away, and its tokens are computed again."
    )
    sketch = Schematic(20, 5.9, alt)
    for x, blocks, length, way, outcome in (
        (0.3, 2, "short", "swap", "copied to host memory, later back"),
        (10.8, 6, "long", "recompute", "thrown away, later computed again"),
    ):
        sketch.text(x, 0.5, f"B is {length}: {way}", heading=True)
        for block in range(8):
            of_b = block >= 8 - blocks
            sketch.box(x + block, 1.6, "B" if of_b else "A", "online" if of_b else "measured")
        start = x + 8 - blocks
        for block in range(blocks):
            sketch.box(start + block, 4, "B", "online" if way == "swap" else "recompute", missing=way == "recompute")
        sketch.arrow((start + blocks / 2, 2.7), (start + blocks / 2, 3.95), look=way)
        sketch.text(x, 1.2, "GPU: all 8 blocks are taken")
        sketch.text(x + 8, 5.5, outcome, align="right")
    return sketch


def policy_bars(recorded: Result | None, now: Result) -> Figure:
    """Figure 2 of the paper on its own costs: three bars in three groups, and each policy's gain paired with Swap."""
    import matplotlib.pyplot as plt

    results = over(recorded, now)
    fig = plt.figure(figsize=(9, 6.6))
    above, under = fig.subfigures(2, 1, height_ratios=(1, 1.15))
    axes = above.subplots(1, len(SAID))
    for ax, (measure, label) in zip(axes, SAID.items(), strict=True):
        scale = 1e-3 if "ttft" in measure else 1.0
        for index, name in enumerate(COMPARED):
            for shown in results:
                entry = shown.result.summary.of(measure, policy=name, costs="published")
                shown.bar(ax, index, entry, _look(name), width=0.8, scale=scale)
            if (ms := PAPER[measure].get(name)) is not None:
                ax.hlines(scale * ms, index - 0.44, index + 0.44, **_paper())
        ax.set_title(label)
        ax.set_xticks(range(len(COMPARED)), [POLICIES[name][0] for name in COMPARED])
        ax.grid(axis="x", visible=False)
    least = results[0].result.summary.value("ttft_mean_ms", policy=BOUND) / 1e3
    axes[0].axhline(least, color=COLOURS["floor"], linestyle=":", zorder=6)
    text_style = {"va": "bottom", "ha": "center", "fontsize": 9, "zorder": 7, "bbox": {"color": "white", "pad": 1}}
    axes[0].text(1, least + 3, f"no policy is below {least:.0f} s", **text_style)
    _gains(under.subplots(), results)
    places = {"under CPS": "cross_point", "if swapped requests may overtake": "swap_overtaking"}
    labels, get = {"than": "swap", "costs": "published"}, results[0].result.summary.get
    gains = {text: get("tpot_p99_below_pct", policy=policy, **labels) for text, policy in places.items()}
    message = ", ".join(f"{gain['value']:.0f} % {text}" for text, gain in gains.items() if gain)
    fig.suptitle(f"P99 TPOT below that of always swapping: {message}")
    name_results(fig, results, "tpot_p99_ms")
    return fig


def _gains(ax: Axes, results: Sequence[DrawnResult]) -> None:
    """P99 TPOT below Swap's on the same workloads, by policy."""
    present = [name for name in POLICIES if name != "swap" and column(published_runs(results[0].result), name, "seed")]
    for shown in results:
        runs = published_runs(shown.result)
        for index, name in enumerate(present):
            if column(runs, name, "seed"):
                gain = below(runs, name, "swap", MEANS["tpot_p99_ms"][0]).summary("%", 100)
                shown.point(ax, index + shown.shift, gain, _look(name), along="x")
    theirs = PAPER["tpot_p99_ms"]
    for name in ("recompute", "cross_point"):
        gain, position = 100 * (1 - theirs[name] / theirs["swap"]), present.index(name)
        label = "the paper" if name == "cross_point" else None
        ax.vlines(gain, position - 0.44, position + 0.44, **_paper(), label=label)
    ax.axvline(0, color=COLOURS["floor"], linewidth=1)
    ax.set_yticks(range(len(present)), [POLICIES[name][0] for name in present])
    ax.set(xlabel="P99 TPOT lower than under Swap on the same workloads, %")
    ax.grid(axis="y", visible=False)
    ax.invert_yaxis()
    ax.legend(loc="lower left", frameon=True)


def _paper() -> dict[str, Any]:
    """Return the style of the paper's number: grey, edged in white, as it may lie over a bar."""
    from matplotlib.patheffects import withStroke

    within = [withStroke(linewidth=4.5, foreground="white")]
    return {"color": COLOURS["paper"], "linewidth": 2.5, "path_effects": within, "zorder": 6}


def published_runs(result: Result) -> Rows:
    """The runs on the costs of Table 2 at the calibrated price of a decode step."""
    price = result.summary.value("decode_ms")
    return rows_where(result.rows, costs="published", decode_ms=price)


def _look(name: str) -> str:
    """Return the name under which ``LOOKS`` has a policy; "other" for a control."""
    look = name.replace("_", "-") if name == "cross_point" else name.replace("_", " ")
    return look if look in COLOURS else "other"


def threshold_gains(recorded: Result | None, now: Result) -> Figure:
    """Draw the gain of other thresholds than the paper's, paired by workload: tail, and cost of the recoveries."""
    results = over(recorded, now)
    fig, axes = panels(1, 2, figsize=(9, 3.9))
    titles = {"p99_tpot_ms": "P99 TPOT saved, %", "recovery_s": "recovery cost saved, %"}
    for ax, (name, label) in zip(axes, titles.items(), strict=True):
        for shown in results:
            runs = published_runs(shown.result)
            by_threshold = {row["threshold"]: row["policy"] for row in runs if "threshold" in row} | {0: "recompute"}
            by_threshold[shown.result.parameters["replayed"].get("threshold", 1024)] = "cross_point"
            gains = {
                t: below(runs, by_threshold[t], "cross_point", name).summary("%", 100) for t in sorted(by_threshold)
            }
            places = [max(t, 128) for t in gains]
            shown.line(ax, places, list(gains.values()), "cross-point", linestyle="-")
        ax.axhline(0, color=COLOURS["floor"], linewidth=1)
        ax.axvline(1024, color=COLOURS["paper"], linewidth=2.5, label="the paper's 1,024")
        ax.axvline(927, color=COLOURS["mark"], linestyle=":", label="Table 2 crosses at 927")
        ax.set(xscale="log", xlabel="CPS swaps up to this many tokens", ylabel=label)
        ax.set_xticks([128, 256, 512, 1024, 2048, 4096], ["never", "256", "512", "1,024", "2,048", "always"])
        ax.minorticks_off()
    fig.suptitle("What another threshold than the paper's 1,024 tokens saves")
    legend(fig, axes[0], results)
    return fig


def queue_lanes(scenes: Mapping[str, tuple[Sequence[str], Sequence[tuple[float, float, Sequence[Phase]]]]]) -> Figure:
    """Draw the phases of requests over time, a lane each, by policy. A scene is the names of its requests and its
    steps, each with when it began and ended and the phase of every request after it."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(len(scenes), 1, figsize=(9, 1.5 * len(scenes) + 0.9), sharex=True)
    for ax, (title, (names, steps)) in zip(axes, scenes.items(), strict=True):
        for lane in range(len(names)):
            for phase, group in groupby(steps, key=lambda step, lane=lane: step[2][lane]):
                (began, ended, _), *later = group
                height = 0.8 if phase is Phase.RUNNING else 0.35
                if phase in PHASES:
                    width = (later[-1][1] if later else ended) - began
                    ax.barh(lane, width, height, left=began, color=COLOURS[PHASES[phase]], linewidth=0)
        ax.set_title(title, loc="left", fontsize=10.5)
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
    state_labels = {
        "measured": "has blocks and runs",
        "swap": "swapped out, waits",
        "recompute": "waits to be computed again",
    }
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[look]) for look in state_labels]
    fig.legend(handles, state_labels.values(), loc="outside lower center", ncols=3)
    axes[-1].set_xlabel("simulated time, s")
    fig.suptitle("The long request blocks the short ones, though there is room for them")
    return fig
