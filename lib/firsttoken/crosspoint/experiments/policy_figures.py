"""The figures of notebook 22, drawn from results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken.crosspoint.experiments.policies_live import MEANS
from firsttoken.crosspoint.experiments.policies_replayed import BOUND, PAPER_TPOT_MS, below
from firsttoken.crosspoint.experiments.styles import POLICIES
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER_P99_MS = 70.57
# Figure 2 and 4.2.2: CPS in ms; the P99 TPOT of the others from its percentages, and from these theirs below Swap
PAPER = {
    "ttft_mean_ms": {"cross_point": 1648.35},
    "tpot_mean_ms": {"cross_point": PAPER_TPOT_MS},
    "tpot_p99_ms": {"cross_point": PAPER_P99_MS, "swap": PAPER_P99_MS / 0.869, "recompute": PAPER_P99_MS / 0.799},
}
SAID = {"ttft_mean_ms": "mean TTFT", "tpot_mean_ms": "mean TPOT", "tpot_p99_ms": "P99 TPOT"}


def policy_dots(result: Result) -> Figure:
    """Figure 2 of the paper, on its own costs: every policy beside its numbers, and paired with Swap by workload."""
    import matplotlib.pyplot as plt

    there = [name for name in POLICIES if result.summary.all("tpot_p99_ms", policy=name)]
    main = published_runs(result)
    fig, axes = plt.subplots(2, 3, figsize=(11.5, 0.62 * len(there) + 2.6), sharey=True)
    for (top, bottom), (measure, label) in zip(axes.T, SAID.items(), strict=True):
        for place, name in enumerate(there):
            entry = result.summary.of(measure, policy=name, costs="published")
            _dot(top, place, name, *(entry[key] / 1e3 if "ttft" in measure else entry[key] for key in _KEYS))
            gain = below(main, name, "swap", MEANS[measure][0])
            _dot(bottom, place, name, 100 * gain.low, 100 * gain.estimate, 100 * gain.high)
        for name, ms in PAPER[measure].items():
            _paper(top, there.index(name), ms / 1e3 if "ttft" in measure else ms)
            if name != "swap" and "swap" in PAPER[measure]:
                _paper(bottom, there.index(name), 100 * (1 - ms / PAPER[measure]["swap"]))
        top.set_xlabel(f"{label}, {'s (log)' if 'ttft' in measure else 'ms'}")
        bottom.set_xlabel(f"{label} below Swap's, %, paired")
        bottom.axvline(0, color=COLOURS["none"], linewidth=1)
    first = axes[0][0]
    least = result.summary.value("ttft_mean_ms", policy=BOUND) / 1e3
    first.axvline(least, color=COLOURS["floor"], linestyle=":", label=f"floor: {least:.0f} s")
    first.set(xscale="log", xlim=(1, 400))
    first.set_xticks([1, 3, 10, 30, 100, 300], ["1", "3", "10", "30", "100", "300"])
    first.plot([], [], "|", color=COLOURS["paper"], markersize=14, markeredgewidth=3, label="paper")
    first.legend(loc="lower left", fontsize=8.5)
    for ax in axes.flat:
        ax.grid(axis="y", visible=False)
    axes[0][0].set_yticks(range(len(there)), [POLICIES[name][0] for name in there])
    axes[0][0].invert_yaxis()
    count = len({row["seed"] for row in main})
    fig.suptitle(f"means and 95 % intervals over {count} workloads of 200 requests", fontsize=10)
    return fig


_KEYS = ("low", "value", "high")


def published_runs(result: Result) -> Rows:
    """The runs on the costs of Table 2 at the calibrated price of a decode step."""
    price = result.summary.value("decode_ms")
    return [row for row in result.rows if row["costs"] == "published" and row["decode_ms"] == price]


def _dot(ax: Axes, place: int, name: str, low: float, value: float, high: float) -> None:
    _, colour, marker = POLICIES[name]
    ax.plot([low, high], [place] * 2, color=colour, linewidth=2)
    ax.plot(value, place, marker, color=colour, markersize=8)


def _paper(ax: Axes, place: int, value: float) -> None:
    ax.plot(value, place, "|", color=COLOURS["paper"], markersize=18, markeredgewidth=3)


def threshold_curve(result: Result) -> Figure:
    """What the threshold is worth: P99 TPOT and recovery cost for thresholds from never swap to always swap."""
    import matplotlib.pyplot as plt

    summary = result.summary
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.6))
    for ax, (measure, label) in zip(
        axes, {"tpot_p99_ms": "P99 TPOT, ms", "recovery_s": "all recoveries of a run, s"}.items(), strict=True
    ):
        by_threshold = {entry["where"]["threshold_tokens"]: entry for entry in summary.all(measure, policy="threshold")}
        for threshold, name in ((0, "recompute"), (1024, "cross_point")):
            by_threshold[threshold] = summary.of(measure, policy=name, costs="published")
        thresholds = sorted(by_threshold)
        entries = [by_threshold[threshold] for threshold in thresholds]
        places = range(len(entries))
        ax.fill_between(places, [e["low"] for e in entries], [e["high"] for e in entries], alpha=0.25, linewidth=0)
        ax.plot(places, [entry["value"] for entry in entries], "o-", color=COLOURS["measured"])
        chosen = thresholds.index(1024)
        _, colour, marker = POLICIES["cross_point"]
        ax.plot(chosen, entries[chosen]["value"], marker, color=colour, markersize=9, label="the paper's threshold")
        ax.set_xticks(list(places), [str(threshold) if threshold else "never\nswap" for threshold in thresholds])
        ax.set(xlabel="swap up to this many tokens", ylabel=label)
    axes[0].legend(fontsize=9)
    return fig
