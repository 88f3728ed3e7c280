"""The figures and tables of notebook 35 about a gate before the answer, from results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from firsttoken.kvreuse import gate
from firsttoken.kvreuse.experiments.gating import SIGNALS
from firsttoken.kvreuse.experiments.setting import Run
from firsttoken.kvreuse.experiments.styles import METHODS
from firsttoken.kvreuse.probes import TOKENS
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken.study.stats import bootstrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TAGS = {"reuse": "all layers reused", "half": "half of the chosen group's size", "chosen": "the chosen group"}
# Tol's bright scheme, without those of paper, measured, floor and the methods
_SIGNALS = {"entropy": "#66CCEE", "doubt": "#228833", "head": "#CCBB44", "tail": "#EE6677"}


def curves(result: Result) -> Figure:
    """ROC of every signal on items that set no threshold, one panel a cache; rings are the calibrated gates."""
    import matplotlib.pyplot as plt

    groups = _gated(result)
    fig, axes = plt.subplots(1, len(groups), figsize=(4.1 * max(len(groups), 1.3), 4.7), squeeze=False, sharey=True)
    for ax, (tag, group) in zip(axes[0], groups.items(), strict=True):
        of = [row for row in result.rows if (row["set"], row["group"]) == ("judge", group)]
        failed = spoiled(of)
        ax.plot([0, 100], [0, 100], ":", color=COLOURS["floor"], label="a coin")
        for signal in SIGNALS if 0 < sum(failed) < len(failed) else ():
            colour = _SIGNALS[signal]
            points = gate.roc([row[signal] for row in of], failed)
            label = f"{signal}, area {gate.auc(points):.2f}"
            ax.plot(
                [100 * p.false_alarm for p in points],
                [100 * p.caught for p in points],
                color=colour,
                label=label,
                drawstyle="steps-post",
            )
            rates = {name: result.summary.get(f"{tag}_{signal}_{name}_pct") for name in ("false_alarm", "miss")}
            if all(rates.values()):
                at = rates["false_alarm"]["value"], 100 - rates["miss"]["value"]
                ax.plot(*at, "o", color=colour, markersize=11, fillstyle="none", markeredgewidth=2)
        ring = {"markersize": 9, "fillstyle": "none", "markeredgewidth": 2, "linestyle": ""}
        ax.plot([], [], "o", color=COLOURS["floor"], label="the calibrated gate", **ring)
        ax.set_title(f"{TAGS[tag]} ({group}):\n{sum(failed)} of {len(failed)} answers spoiled", fontsize=10.5)
        ax.set_xlabel("good answers sent back, %")
        ax.legend(fontsize=9, loc="lower right")
        ax.set_aspect("equal")
    axes[0][0].set_ylabel("spoiled answers sent back, %")
    return fig


def after_gate(result: Result, depth: int) -> Figure:
    """Score against computation: every cache without a gate and behind each, and full prefill."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(8.5, 4.6))
    rows = gate_points(result, depth)
    marks = dict(zip(_gated(result), ("^", "d", "o"), strict=False))
    for row in rows:
        colour = METHODS["DroidSpeak"].colour if row["signal"] == "no gate" else _SIGNALS[row["signal"]]
        score = bootstrap(row["scores"])
        ax.plot([100 * row["compute"]] * 2, [100 * score.low, 100 * score.high], color=colour, linewidth=1, alpha=0.6)
        ax.plot(100 * row["compute"], 100 * score.estimate, marks[row["tag"]], color=colour, markersize=9)
    own = bootstrap([row["own"] for row in _judged(result, next(iter(_gated(result).values())))])
    full = METHODS["full prefill"]
    ax.plot(100, 100 * own.estimate, full.marker, color=full.colour, markersize=9, label=full.label)
    ax.plot([100, 100], [100 * own.low, 100 * own.high], color=full.colour, linewidth=1)
    ax.axhline(95 * own.estimate, color=COLOURS["paper"], linestyle="--", label="5 % below its own (the paper's bound)")
    for tag, marker in marks.items():
        ax.plot([], [], marker, color=METHODS["DroidSpeak"].colour, markersize=9, label=f"{TAGS[tag]}, no gate")
    for signal in {row["signal"]: None for row in rows if row["signal"] != "no gate"}:
        ax.plot([], [], "-", color=_SIGNALS[signal], linewidth=5, label=f"behind a gate: {signal}")
    ax.set(xlabel="computed, % of a full prefill (probe and fallback included)", ylabel="score, %")
    ax.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    return fig


def gate_rows(result: Result, depth: int) -> Rows:
    """The gates in numbers, on items that set no threshold."""
    rows = []
    for row in gate_points(result, depth):
        slug = f"{row['tag']}_{row['signal']}"
        line: dict[str, Any] = {"cache": f"{TAGS[row['tag']]} ({row['group']})", "gate": row["signal"]}
        for name, label in (
            ("auc", "area"),
            ("miss_pct", "missed, % of spoiled"),
            ("false_alarm_pct", "false alarms, % of good"),
            ("fallback_pct", "sent back, %"),
        ):
            entry = result.summary.get(f"{slug}_{name}")
            line[label] = "" if entry is None else f"{entry['value']:.2f}" if name == "auc" else f"{entry['value']:.0f}"
        line["score, %"] = interval(bootstrap(row["scores"]).summary("%", 100))
        line["computed, %"] = round(100 * row["compute"])
        rows.append(line)
    return rows


def gate_points(result: Result, depth: int) -> Rows:
    """By cache and signal ("no gate" first): what is computed, as a share of a full prefill, and the scores.

    A probe of tokens computes them in all layers; a request that is sent back has its group recomputed for nothing.
    """
    probe = TOKENS / Run.parse(result.parameters["reuse"]["runs"][0]).tokens
    budget, rows = result.parameters["gate"]["miss_budget"], []
    for tag, group in _gated(result).items():
        judged, calibrating = _judged(result, group), _judged(result, group, "calibrate")
        layers = (int(group.split("-")[1]) - int(group.split("-")[0]) + 1) / depth if "-" in group else 0.0
        of = {"tag": tag, "group": group}
        rows.append(of | {"signal": "no gate", "compute": layers, "scores": [row["score"] for row in judged]})
        failed = spoiled(calibrating)
        for signal in SIGNALS if 0 < sum(failed) < len(failed) else ():
            made = gate.calibrate([r[signal] for r in calibrating], failed, signal=signal, miss_budget=budget)
            kept = [made.accepts(row[signal]) for row in judged]
            cost = layers + (1 - sum(kept) / len(kept)) + (probe if signal in ("head", "tail") else 0.0)
            scores = [row["score"] if good else row["own"] for row, good in zip(judged, kept, strict=True)]
            rows.append(of | {"signal": signal, "compute": cost, "scores": scores})
    return rows


def spoiled(rows: Rows) -> list[bool]:
    """By request: whether its answer is much worse than the receiver's own (a score lower by a half, as in gating)."""
    return [row["own"] - row["score"] >= 0.5 for row in rows]


def _judged(result: Result, group: str, name: str = "judge") -> Rows:
    return [row for row in result.rows if (row["set"], row["group"]) == (name, group)]


def _gated(result: Result) -> dict[str, str]:
    """The group of each tag of the summary; where two are one, it stands under the first."""
    found: dict[str, str] = {}
    for tag in TAGS:
        entry = result.summary.get(f"{tag}_group")
        if entry and entry["value"] not in found.values():
            found[tag] = entry["value"]
    return found
