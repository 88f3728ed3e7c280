"""Figure 14 of DroidSpeak, the gains that follow from it, and the tables of notebook 33."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from firsttoken.droidspeak.profile.pareto import Profiled, smallest_within
from firsttoken.droidspeak.profile.profile_transfer import select_items
from firsttoken.study.summary import Entry
from firsttoken_studies.droidspeak.decoding import CHOOSE, DROIDSPEAK, JUDGE, OWN, choices_of_samples, decoded_groups
from firsttoken_studies.droidspeak.setting import run_of
from firsttoken_studies.droidspeak.styles import METHODS, in_words, style_of
from firsttoken_studies.droidspeak.tables import by_run, relative_loss
from firsttoken_studies.nb30_full_reuse_and_sensitivity.profiling import BOUND, profiled_groups
from firsttoken_studies.nb33_latency_and_quality.reuse_methods import (
    ABOVE_BLEND,
    ACCURACY,
    BLEND,
    COMPUTE,
    DECODED,
    LATENCY,
    where_of,
)
from firsttoken_studies.record.overlay import DrawnResult, legend, over
from firsttoken_studies.record.plot import COLOURS, Axes, Figure, categories, panels
from firsttoken_studies.record.results import Result, Rows, Table, rows_where
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval

PAPER_GAIN, PAPER_MEAN_GAIN = (1.7, 3.1), 2.1  # 5.2, 8 pairs with 3 data sets each
PAPER_LEAD, PAPER_MEAN_LEAD = (5, 33), 16  # over CacheBlend at equal latency, 5.2
_BLENDS = {  # by how CacheBlend's share was found: what a legend says, and how much of the mark is filled
    LATENCY: ("CacheBlend at equal latency", "full"),
    COMPUTE: ("CacheBlend at equal computation", "left"),
    "": ("CacheBlend, its own share of tokens", "none"),
}


def schematic() -> Schematic:
    """Draw what partial prefill and CacheBlend compute of a prompt, in layers and tokens."""
    alt = (
        "Two grids of a prompt's keys and values: a row for each layer, a column for each token. DroidSpeak computes "
        "every token of a few neighbouring layers. CacheBlend computes every token of the first layer, and in all "
        "layers above the tokens that deviate most. The others are reused from the sender's cache."
    )
    sketch = Schematic(20, 7.3, alt)
    titles = {1.6: "DroidSpeak: all tokens of some layers", 11.2: "CacheBlend: some tokens of all layers"}
    for x, title in titles.items():
        sketch.text(x, 0.4, title, heading=True)
        for row, token in product(range(6), range(8)):
            look = "full reuse"
            if x < 2 and row in (1, 2):
                look = "droidspeak"
            elif x > 2 and (row == 5 or token in (2, 5)):
                look = "cacheblend"
            sketch.box(x + token, 0.9 + 0.75 * row, look=look, height=0.75)
        sketch.arrow((x, 5.65), (x + 8, 5.65))
        sketch.arrow((x - 0.3, 5.4), (x - 0.3, 0.9))
        sketch.text(x + 4, 6.05, "tokens of the prompt", align="center")
    sketch.text(0.1, 1.1, "layers")
    for x, (looks, text) in {
        4.5: (("droidspeak", "cacheblend"), "computed"),
        11.2: (("full reuse",), "reused"),
    }.items():
        for position, look in enumerate(looks):
            sketch.box(x + 0.7 * position, 6.6, look=look, width=0.6, height=0.6)
        sketch.text(x + 0.7 * len(looks) + 0.1, 6.9, text)
    return sketch


def quality_by_latency(recorded: Result | None, now: Result) -> Figure:
    """Figure 14: what is kept of the own score against the time to the first token, one panel a run.

    The line is the frontier, answered by the items that choose; marks are answered by the items that judge. Bars are
    95 % over items. Of CacheBlend's ways to choose tokens the better one is shown.
    """
    results = over(recorded, now)
    runs = by_run(results[0].result)
    fig, axes = panels(1, len(runs), figsize=(9, 5.2), squeeze=False, sharey=True)
    bounds: list[float] = [0]
    for ax, run in zip(axes[0], runs, strict=True):
        ax.axhline(100 * (1 - BOUND), color=COLOURS["paper"], linestyle="--", linewidth=1.4)
        for shown in results:
            if run_rows := by_run(shown.result).get(run):
                bounds += _panel(ax, run_rows, shown)
        ax.set_title(in_words(run), fontsize=8.5)
        ax.set_xlabel("time to first token / full prefill's")
    first = axes[0][0]
    first.set_ylim(*_limits(bounds))
    first.set_ylabel(f"{now.rows[0]['metric']} kept, % of the own")
    first.plot([], [], color=COLOURS["paper"], linestyle="--", label="paper: 5 % may be lost")
    first.plot(
        [], [], "o-", color=METHODS[DROIDSPEAK].colour, fillstyle="none", label="partial prefill, choosing items"
    )
    for row, label, fill in _shown(rows_where(next(iter(runs.values())), items=JUDGE)):
        style = style_of(row["method"])
        first.plot([], [], style.marker, color=style.colour, linestyle="none", fillstyle=fill, label=label)
    legend(fig, first, results, "score_pct")
    fig.suptitle(_kept_in_time(runs), fontsize=12)
    return fig


def _kept_in_time(runs: Mapping[str, Rows]) -> str:
    """Say how much of the own score a chosen group and CacheBlend at equal latency keep, on average over ``runs``."""
    shares: dict[str, list[float]] = {}
    for rows in runs.values():
        judged = rows_where(rows, items=JUDGE)
        (own_scores,) = (row["item_score"] for row in rows_where(judged, method=OWN))
        for row, label, _ in _shown(judged):
            name = "" if row["method"] == DROIDSPEAK else label
            shares.setdefault(name, []).append(100 - relative_loss(own_scores, row["item_score"]).estimate)
            shares.setdefault(f"{name} time", []).append(100 * _time(row))
    group, blend, time = (np.mean(shares[name]) for name in ("", _BLENDS[LATENCY][0], " time"))
    return f"In {time:.0f} % of the time a group keeps {group:.0f} % of the score, CacheBlend {blend:.0f} %"


def _limits(bounds: Sequence[float]) -> tuple[float, float]:
    """Return the limits of an axis around ``bounds``."""
    margin = 0.05 * (max(bounds) - min(bounds))
    return min(bounds) - margin, max(bounds) + margin


def _panel(ax: Axes, rows: Rows, shown: DrawnResult) -> list[float]:
    """Draw the answers of one run, and return what the axis must hold: the record's intervals, and of an own run
    beside it the values, as its few items have intervals that would take all of the axis."""
    look = METHODS[DROIDSPEAK]
    line = sorted(rows_where(rows, items=CHOOSE), key=lambda row: row["hi"] - row["lo"])
    points = [(_time(row), 100 - relative_loss(line[-1]["item_score"], row["item_score"]).estimate) for row in line]
    shade = shown.style | {"alpha": 0.6 * shown.style["alpha"]}
    bounds = [share for _, share in points]
    if not shown.repeats(ax, "frontier", tuple(points)):
        ax.plot(
            *zip(*points, strict=True), f"{look.marker}-", color=look.colour, linewidth=1, fillstyle="none", **shade
        )
    judged = rows_where(rows, items=JUDGE)
    (own_scores,) = (row["item_score"] for row in rows_where(judged, method=OWN))
    for row, _, fill in _shown(judged):
        style, lost = style_of(row["method"]), relative_loss(own_scores, row["item_score"])
        bars = [[lost.high - lost.estimate], [lost.estimate - lost.low]]
        bounds += [100 - lost.estimate] if shown.own and not shown.alone else [100 - lost.low, 100 - lost.high]
        if shown.repeats(ax, row["method"], (_time(row), lost.estimate)):
            continue
        size = 9.5 if row["method"] == DROIDSPEAK else 7.5
        ax.errorbar(_time(row), 100 - lost.estimate, bars, marker=style.marker, color=style.colour, fillstyle=fill,
                    markersize=size, linestyle="none", linewidth=1.2, **shown.outlined)  # fmt: skip
    ax.set_xlim(-0.04, 1.06)
    return bounds


def _shown(judged: Rows) -> list[tuple[dict[str, Any], str, str]]:
    """Rows with label and fill: every method, and of CacheBlend's that were asked alike the one that scores best."""
    methods_shown: dict[str, tuple[dict[str, Any], str, str]] = {}
    for row in judged:
        label, fill = style_of(row["method"]).label, "full"
        labels = where_of(row["method"])
        if labels["method"] == BLEND:
            label, fill = _BLENDS[labels.get("case", "")]
        elif row["method"] == DROIDSPEAK:
            label = "DroidSpeak, the chosen group"
        if label not in methods_shown or row["score"] > methods_shown[label][0]["score"]:
            methods_shown[label] = (row, label, fill)
    return list(methods_shown.values())


def _time(row: dict[str, Any]) -> float:
    return float(np.median(row["time_share"]))


def gains(recorded: Result | None, now: Result, profiled: Result | None, profiled_now: Result) -> Figure:
    """Draw the gain of the chosen group, its loss on items that did not choose it, and its lead over CacheBlend.

    Both rules that choose, decoded answers and token accuracy (from the profile of the same items), are scored alike:
    by the decoded answers of the items that were left out of the draw that chose.
    """
    results = over(recorded, now)
    runs = by_run(results[0].result)
    fig, (gain, loss, lead) = panels(1, 3, figsize=(9, 0.75 * len(runs) + 2.9), sharey=True)
    for ax, span, mean in ((gain, PAPER_GAIN, PAPER_MEAN_GAIN), (lead, PAPER_LEAD, PAPER_MEAN_LEAD)):
        ax.axvspan(*span, color=COLOURS["paper"], alpha=0.25, linewidth=0)
        ax.axvline(mean, color=COLOURS["paper"], linewidth=2)
    loss.axvline(100 * BOUND, color=COLOURS["target"], linestyle="--", linewidth=1.4)
    for ax, nothing in ((gain, 1), (loss, 0), (lead, 0)):
        ax.axvline(nothing, color=COLOURS["mark"], linewidth=0.8)
        ax.grid(axis="y", visible=False)
    bounds: dict[Axes, list[float]] = {gain: [1, *PAPER_GAIN], loss: [0, 100 * BOUND], lead: [0, *PAPER_LEAD]}
    changed = profiled_now.with_mechanism or profiled_now
    for shown in results:
        source = changed if shown.library else profiled_now if shown.own or profiled is None else profiled
        summary, profiles = shown.result.summary, by_run(source)
        for height, run in enumerate(runs):
            if (rows := by_run(shown.result).get(run)) is None:
                continue
            labels = run_of(rows[0])
            out = held_out(rows, profiled_groups(profiles[run]))
            for ax, mark, entry in (
                (gain, "decoded", summary.get("speedup_x", **DECODED, **labels)),
                (gain, "accuracy", summary.get("speedup_x", **ACCURACY, **labels)),
                (loss, "decoded", out["decoded"]),
                (loss, "accuracy", out["accuracy"]),
                (loss, "judged", summary.get("relative_loss_pct", method=DROIDSPEAK, **labels)),
                (lead, "latency", summary.get("score_above_points", **ABOVE_BLEND, case=LATENCY, **labels)),
                (lead, "compute", summary.get("score_above_points", **ABOVE_BLEND, case=COMPUTE, **labels)),
            ):
                _dot(ax, entry, height, mark, shown)
                measures = ("value",) if shown.own and not shown.alone else ("low", "high")
                bounds[ax] += [entry[measure] for measure in measures] if entry else []
    for ax, limits in bounds.items():
        ax.set_xlim(*_limits(limits))
    gain.set_xlabel("first token, times earlier")
    loss.set_xlabel("score lost, % of the own")
    lead.set_xlabel("points above CacheBlend")
    categories(gain, [in_words(run).replace(", ", ",\n") for run in runs], fontsize=9)
    for marker, _, label in MARKS.values():
        gain.plot([], [], marker, color=METHODS[DROIDSPEAK].colour, markersize=7, label=label)
    gain.plot([], [], color=COLOURS["paper"], linewidth=4, label="paper: range and mean")
    gain.plot([], [], color=COLOURS["target"], linestyle="--", label="bound: 5 %")
    legend(fig, gain, results, "score_above_points", columns=2)
    lost = [
        results[0].result.summary.value("relative_loss_pct", method=DROIDSPEAK, **run_of(run_rows[0]))
        for run_rows in runs.values()
    ]
    many = sum(value > 100 * BOUND for value in lost)
    fig.suptitle(f"Of {len(lost)} groups chosen within 5 %, {many} lose more than that on other items", fontsize=12)
    return fig


def held_out(rows: Rows, profiles: Sequence[Profiled]) -> dict[str, Entry]:
    """Return by rule what decoded answers of items lose over the group that other items choose, % of the own score.

    ``rows`` are a run's answers, ``profiles`` its groups by token accuracy, of the same items in the same order. The
    items are drawn with replacement, as many as there are; those not drawn judge. Mean and 95 % of 200 draws.
    """
    rng, by_group = random.Random(0), {profiled.group: profiled for profiled in decoded_groups(rows)}
    groups = [profiled for profiled in profiles if profiled.group in by_group]
    lost = {"decoded": [100 * draw.relative_loss for draw in choices_of_samples(rows)], "accuracy": []}
    items = len(groups[0].own)
    for _ in lost["decoded"]:
        chosen_items = rng.choices(range(items), k=items)
        if remaining := sorted(set(range(items)) - set(chosen_items)):
            group = smallest_within(select_items(groups, chosen_items), BOUND).group
            lost["accuracy"].append(100 * select_items([by_group[group]], remaining)[0].relative_loss)
    return {
        rule: {"value": float(np.mean(losses)), "n": items, "unit": "% of own"}
        | dict(zip(("low", "high"), map(float, np.percentile(losses, [2.5, 97.5])), strict=True))
        for rule, losses in lost.items()
    }


MARKS = {  # what a mark is, and where it stands beside its run
    "decoded": ("o", -0.24, "group that decoded answers choose (loss: other items, 200 draws)"),
    "accuracy": ("s", -0.04, "group that token accuracy chooses (loss: other items, 200 draws)"),
    "judged": ("*", 0.16, "group that decoded answers choose, on a second set of items"),
    "latency": ("D", -0.14, "lead at equal latency"),
    "compute": ("v", 0.14, "lead at equal computation"),
}


def _dot(ax: Axes, entry: Entry | None, height: float, mark: str, shown: DrawnResult) -> None:
    if entry is None:
        return
    if shown.repeats(ax, f"{mark} {height}", tuple(entry[end] for end in ("value", "low", "high"))):
        return
    marker, shift, _ = MARKS[mark]
    error = [[max(0, entry["value"] - entry["low"])], [max(0, entry["high"] - entry["value"])]]
    height += shift + 0.5 * shown.shift
    ax.errorbar(entry["value"], height, xerr=error, marker=marker, color=METHODS[DROIDSPEAK].colour, linestyle="none",
                markersize=7, linewidth=1.4, **shown.outlined)  # fmt: skip


def answer_rows(methods: Result) -> Table:
    """Figure 14 in numbers, from the items that judge."""
    for run, run_rows in by_run(methods).items():
        judged = rows_where(run_rows, items=JUDGE)
        (own_row,) = rows_where(judged, method=OWN)
        for row in judged:
            yield {
                "run": run,
                "method": row["method"],
                "layers": f"{row['lo']}-{row['hi'] - 1}" if row["hi"] else "",
                "computed, %": round(100 * row["compute"], 1),
                "time / full prefill's": round(float(np.median(row["time_share"])), 2),
                f"{row['metric']}, % (n = {row['n']})": round(100 * row["score"], 1),
                "lost, % of the own": ""
                if row is own_row
                else interval(relative_loss(own_row["item_score"], row["item_score"]).summary()),
            }


def choice_rows(methods: Result) -> Table:
    """The group of each run that decoded answers choose, and the one that token accuracy would choose.

    The former's loss is on the items that judge, the latter's on those that choose.
    """
    shown = {
        "group": ("group", DECODED),
        "layers, %": ("group_layers_pct", DECODED),
        "earlier, times": ("speedup_x", DECODED),
        "lost on other items, %": ("relative_loss_pct", {"method": DROIDSPEAK}),
        "by token accuracy": ("group", ACCURACY),
        "its: earlier, times": ("speedup_x", ACCURACY),
        "its: lost, %": ("relative_loss_pct", ACCURACY),
    }
    for run, run_rows in by_run(methods).items():
        entries = {
            title: methods.summary.of(name, **labels, **run_of(run_rows[0])) for title, (name, labels) in shown.items()
        }
        yield {"run": run} | {title: interval(entry, 2) for title, entry in entries.items()}


def paper_rows(latency: Result, methods: Result) -> Rows:
    """Return the paper's numbers beside the measured ones; what is computed has no floor of its own here."""
    gain, lead = f"{PAPER_MEAN_GAIN} ({PAPER_GAIN[0]}-{PAPER_GAIN[1]})", f"{PAPER_LEAD[0]}-{PAPER_LEAD[1]}"
    lead, mean = f"{PAPER_MEAN_LEAD} ({lead})", {"across": "mean"}
    latent, computed = (ABOVE_BLEND | {"case": equal} for equal in (LATENCY, COMPUTE))
    shown = [
        ("speed-up within 5 % of the decoded score, mean", gain, "speedup_x", DECODED | mean, 2, "x"),
        ("the least of it", f"{PAPER_GAIN[0]}", "speedup_x", DECODED | {"across": "least"}, 2, "x"),
        ("speed-up within 5 % of token accuracy, mean", "", "speedup_x", ACCURACY | mean, 2, "x"),
        ("layers recomputed, mean", "34.4 (Figure 11)", "group_layers_pct", DECODED | mean, 1, "% of layers"),
        ("lead over CacheBlend at equal latency, mean", lead, "score_above_points", latent | mean, 1, "points"),
        ("the same at equal computation", "", "score_above_points", computed | mean, 1, "points"),
    ]
    rows = [
        {"what": label, "paper": paper, "measured": interval(methods.summary.get(name, **labels), digits), "unit": unit}
        for label, paper, name, labels, digits, unit in shown
    ]
    for entry in latency.summary.all("ttft_x", across="worst"):
        label = f"partial prefill, {entry['where']['context_tokens']:,} tokens, its worst size"
        rows.append({"what": label, "measured": interval(entry, 2), "unit": entry["unit"]})
    return rows
