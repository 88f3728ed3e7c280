"""The figures and tables of notebook 33, from results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.kvreuse.experiments.methods import DROIDSPEAK, OWN, REUSE
from firsttoken.kvreuse.experiments.profiling import BOUND
from firsttoken.kvreuse.experiments.speedups import BOUNDS, TimeShares
from firsttoken.kvreuse.experiments.styles import METHODS, style_of
from firsttoken.kvreuse.experiments.tables import by_run, key_of
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken.study.stats import bootstrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER_GAIN, PAPER_MEAN_GAIN = (1.7, 3.1), 2.1  # 5.2, 8 pairs with 3 data sets each
PAPER_LEAD, PAPER_MEAN_LEAD = (5, 33), 16  # over CacheBlend at equal latency, 5.2
TARGET = 1.10  # of (k + first token) / L
_FILLS = {"": "full", "gradual": "none", "from": "left"}  # CacheBlend's variants


def quality_by_latency(methods: Result, times: TimeShares) -> Figure:
    """Figure 14: score against the time to the first token, one panel a run; bars are 95 % over items."""
    import matplotlib.pyplot as plt

    runs = by_run(methods)
    columns = min(3, len(runs))
    lines = -(-len(runs) // columns)
    fig, axes = plt.subplots(
        lines, columns, figsize=((3.7 if columns > 2 else 5) * columns + 0.6, 3.3 * lines + 1.1), squeeze=False
    )
    fig.get_layout_engine().set(w_pad=0.12)
    for ax, (run, rows) in zip(axes.flat, runs.items(), strict=False):
        _panel(ax, rows, times)
        ax.set_title(f"{run}, n = {rows[0]['n']}", fontsize=10.5)
        ax.set_ylabel(f"{rows[0]['metric']}, %")
    for ax in axes.flat[len(runs) :]:
        ax.set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel(f"time to first token / full prefill's\n({times.tokens:,} tokens, no link)")
    shown: dict[str, Any] = {}
    for ax in axes.flat:
        handles, labels = ax.get_legend_handles_labels()
        shown |= {label: handle for handle, label in zip(handles, labels, strict=True) if label not in shown}
    fig.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=min(4, max(2, columns)), fontsize=9)
    return fig


def _panel(ax: Axes, rows: Rows, times: TimeShares) -> None:
    own = 100 * next(row["score"] for row in rows if row["method"] == OWN)
    ax.axhline((1 - BOUND) * own, color=COLOURS["paper"], linestyle="--", linewidth=1.4, label="5 % below its own")
    ax.axhline(own - 100 * BOUND, color=COLOURS["paper"], linestyle=":", linewidth=1.4, label="5 points below its own")
    groups = sorted((row for row in rows if row["method"].startswith((REUSE, DROIDSPEAK))), key=lambda r: r["compute"])
    line = [(float(np.median(times.of(DROIDSPEAK, row["compute"]))), 100 * row["score"]) for row in groups]
    ax.plot(*zip(*line, (1.0, own), strict=True), "-", color=METHODS[DROIDSPEAK].colour, linewidth=1, alpha=0.6)
    for row in rows:
        method, label, look = row["method"], label_of(row["method"]), style_of(row["method"])
        timed = DROIDSPEAK if method == REUSE else next(name for name in METHODS if method.startswith(name))
        at = float(np.median(times.of(timed, row["compute"])))
        score = bootstrap(row["item_score"])
        equal, other_group = " equal" in method, method.startswith(f"{DROIDSPEAK} ")
        ax.plot([at, at], [100 * score.low, 100 * score.high], color=look.colour, linewidth=1.2, alpha=0.55)
        ax.plot(
            at,
            100 * score.estimate,
            look.marker,
            color=look.colour,
            label=label,
            fillstyle="none" if other_group else _FILLS[_variant(method).partition(" ")[0]],
            markersize=6 if other_group else 9 if method == DROIDSPEAK or equal else 7.5,
        )
    ax.set_xlim(-0.02, max(1.05, ax.get_xlim()[1]))


def label_of(method: str) -> str:
    """A method as a legend has it: "CacheBlend 0.15 gradual" becomes "CacheBlend 15 %, gradual"."""
    if method == DROIDSPEAK:
        return "DroidSpeak, the chosen group"
    if method.startswith(DROIDSPEAK):
        return "DroidSpeak, other groups of the frontier"
    if not method.startswith("CacheBlend"):
        return style_of(method).label
    share = method.split()[1]
    said = "at equal compute" if share == "equal" else f"{100 * float(share):g} %"
    start, _, layers = _variant(method).partition(" ")
    return f"CacheBlend {said}" + {"": "", "gradual": ", gradual", "from": f", first {layers} layers whole"}[start]


def _variant(method: str) -> str:
    return " ".join(method.split()[2:]) if method.startswith("CacheBlend") else ""


def gains(rows: Rows, methods: Result) -> Figure:
    """Left: speed-up at the loss bound, ``rows`` of ``speedups``. Right: lead over CacheBlend at equal compute."""
    import matplotlib.pyplot as plt

    runs = list(dict.fromkeys(row["run"] for row in rows))
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 0.55 * len(runs) + 2.2), sharey=True)
    for ax, span, mean in ((left, PAPER_GAIN, PAPER_MEAN_GAIN), (right, PAPER_LEAD, PAPER_MEAN_LEAD)):
        ax.axvspan(*span, color=COLOURS["paper"], alpha=0.25, linewidth=0, label="paper: range")
        ax.axvline(mean, color=COLOURS["paper"], linewidth=2, label="paper: mean")
        ax.grid(axis="y", visible=False)
    reused = [row for row in rows if not row["layers"]]
    for shift, (bound, marker) in enumerate(zip(BOUNDS, ("o", "s"), strict=True)):
        mended = [row for row in rows if row["bound"] == bound and row["layers"]]
        for row in (row for row in rows if row["bound"] == bound):
            at, look = runs.index(row["run"]) + 0.24 * (shift - 0.5), METHODS[DROIDSPEAK if row["layers"] else REUSE]
            first = f"here: losing at most {bound}" if row in mended[:1] else None
            label = "here: full reuse keeps to the bound" if row in reused[:1] else first
            _dot(left, row["gain"], at, marker, look.colour, label)
    for row in (row for row in methods.rows if row["method"] == OWN):
        entry = methods.summary.get(f"{key_of(row)}_over_cacheblend_points")
        if entry and row["run"] in runs:
            _dot(right, entry, runs.index(row["run"]), "o", METHODS[DROIDSPEAK].colour)
    left.axvline(1, color=COLOURS["floor"], linestyle=":", linewidth=1.2, label="no gain")
    right.axvline(0, color=COLOURS["floor"], linestyle=":", linewidth=1.2)
    left.set(xscale="log", xlabel="full prefill's time to first token / DroidSpeak's")
    ticks = [tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 40) if tick <= 1.1 * max(r["gain"]["high"] for r in rows)]
    left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    left.xaxis.set_minor_formatter("")
    right.set_xlabel("score of DroidSpeak above CacheBlend's\nat equal compute, points")
    left.set_yticks(range(len(runs)), runs)
    left.set_ylim(len(runs) - 0.5, -0.5)
    fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    return fig


def _dot(ax: Axes, entry: dict[str, Any], at: float, marker: str, colour: str, label: str | None = None) -> None:
    fill = "full" if marker == "o" else "none"
    ax.plot([entry["low"], entry["high"]], [at, at], color=colour, linewidth=1.8, alpha=0.7)
    ax.plot(entry["value"], at, marker, color=colour, markersize=8, fillstyle=fill, label=label)


def partial_times(latency: Result) -> Figure:
    """Left: the time by the share that is computed, with its floor. Right: partial prefill over that floor."""
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.3))
    lengths = sorted({row["tokens"] for row in latency.rows})
    _times(left, [row for row in latency.rows if row["tokens"] == lengths[0]])
    left.set_title(f"{lengths[0]:,} tokens, medians of {1 + max(row['round'] for row in latency.rows)} rounds")
    for tokens, marker in zip(lengths, "os^Dv", strict=False):
        over = over_floor([row for row in latency.rows if row["tokens"] == tokens])
        shares = [100 * share for share in over]
        low, middle, high = np.array([[found.low, found.estimate, found.high] for found in over.values()]).T
        right.errorbar(
            shares,
            middle,
            [middle - low, high - middle],
            marker=marker,
            color=METHODS[DROIDSPEAK].colour,
            alpha=1 if tokens == lengths[0] else 0.55,
            label=f"{tokens:,} tokens",
            capsize=2,
        )
    right.axhline(TARGET, color=COLOURS["report"], linestyle="--", label=f"target: at most {TARGET:.2f}")
    right.axhline(1, color=COLOURS["floor"], linestyle=":", label="floor")
    right.set(xlabel="layers recomputed, % of all", ylabel="partial prefill / (k + first token) / L")
    right.set_xlim(-3, 103)
    bottom, top = right.get_ylim()
    right.set_ylim(bottom, top + 0.45 * (top - bottom))  # room for the legend
    right.legend(fontsize=9, loc="upper right")
    return fig


def _times(ax: Axes, rows: Rows) -> None:
    by: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        by.setdefault(row["method"], {}).setdefault(row["compute"], []).append(row["first_token_s"])
    for name, line in by.items():
        points = sorted((100 * share, float(np.median(times))) for share, times in line.items())
        look = style_of(name)
        ax.plot(*zip(*points, strict=True), f"{look.marker}-", color=look.colour, label=look.label)
    full = [row for row in rows if row["method"] == OWN]
    prefill, first = (
        float(np.median(v))
        for v in ([r["prefill_s"] for r in full], [r["first_token_s"] - r["prefill_s"] for r in full])
    )
    ax.plot([0, 100], [first, prefill + first], ":", color=COLOURS["floor"], label="floor: (k + first token) / L")
    ax.set(xlabel="computed, % of a prefill's token-layers", ylabel="time to first token, s")
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=9)


def over_floor(rows: Rows) -> dict[float, Any]:
    """By share of layers: the interval of partial prefill's time over (k + first token) / L of the same round's."""
    full = {row["round"]: row for row in rows if row["method"] == OWN}
    ratios: dict[float, list[float]] = {}
    for row in sorted(rows, key=lambda row: row["compute"]):
        if row["method"] == DROIDSPEAK and row["compute"] < 1:
            whole = full[row["round"]]
            floor = row["compute"] * whole["prefill_s"] + whole["first_token_s"] - whole["prefill_s"]
            ratios.setdefault(row["compute"], []).append(row["first_token_s"] / floor)
    return {share: bootstrap(values, "median") for share, values in ratios.items()}


def method_rows(methods: Result, times: TimeShares) -> Rows:
    """Figure 14 in numbers."""
    rows = []
    for row in methods.rows:
        slug = f"{key_of(row)}_{row['method'].replace(' ', '_').replace('-', '_').lower()}"
        timed = DROIDSPEAK if row["method"] == REUSE else next(n for n in METHODS if row["method"].startswith(n))
        rows.append(
            {
                "run": row["run"],
                "method": label_of(row["method"]) if row["method"] == DROIDSPEAK else row["method"],
                "layers": f"{row['lo']}-{row['hi'] - 1}" if row["hi"] else "",
                "computed, %": round(100 * row["compute"], 1),
                "time / full prefill's": round(float(np.median(times.of(timed, row["compute"]))), 2),
                f"score, % (n = {row['n']})": interval(methods.summary[f"{slug}_pct"]),
                "loss, points": interval(methods.summary.get(f"{slug}_loss_points")),
            }
        )
    return rows


def gain_rows(rows: Rows) -> Rows:
    """The speed-ups in numbers, ``rows`` of ``speedups``; the paper's stand beside them."""
    return [
        {
            "run": row["run"],
            "loses at most": row["bound"],
            "group": f"{row['group']} ({row['layers']} of {row['depth']})",
            "loss, points": interval(row["loss"]),
            "relative, %": round(row["relative_pct"], 1),
            "speed-up": interval(row["gain"], 2),
            "paper": f"{PAPER_GAIN[0]}-{PAPER_GAIN[1]}, mean {PAPER_MEAN_GAIN}",
        }
        for row in rows
    ]


def paper_rows(latency: Result, methods: Result) -> Rows:
    """What the paper says beside what was measured, and the floor of a time."""
    summary = latency.summary
    rows = [
        {
            "what": f"mean speed-up, losing at most {bound}, computation alone",
            "paper": f"{PAPER_MEAN_GAIN} ({PAPER_GAIN[0]}-{PAPER_GAIN[1]})",
            "measured": interval(summary.get(f"speedup_mean_{name}_x"), 2),
            "unit": "x",
        }
        for bound, name in zip(BOUNDS, ("relative", "absolute"), strict=True)
    ]
    leads = [entry["value"] for name, entry in methods.summary.items() if name.endswith("_over_cacheblend_points")]
    if leads:
        span = f"{min(leads):.1f} to {max(leads):.1f}"
        paper = f"{PAPER_MEAN_LEAD} ({PAPER_LEAD[0]}-{PAPER_LEAD[1]})"
        rows.append({"what": "lead over CacheBlend", "paper": paper, "measured": span, "unit": "points"})
    for name, entry in summary.items():
        if name.startswith("partial_over_share_"):
            what = f"partial prefill, {int(name.split('_')[-1]):,} tokens, its worst size"
            rows.append(
                {"what": what, "measured": interval(entry, 2), "floor": 1.0, "unit": "x of (k + first token) / L"}
            )
    return rows
