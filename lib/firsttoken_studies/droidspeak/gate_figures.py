"""The figure and the table of notebook 35 about a gate before the answer, from results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from firsttoken.droidspeak import gate
from firsttoken.droidspeak.probes import TOKENS
from firsttoken.study.overlay import name_results, over
from firsttoken.study.plot import COLOURS
from firsttoken.study.record import Result, Rows
from firsttoken.study.show import interval
from firsttoken.study.stats import bootstrap
from firsttoken_studies.droidspeak.gating import SIGNALS, behind, calibrated, spoiled
from firsttoken_studies.droidspeak.setting import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TAGS = {"reuse": "all layers reused", "half": "half of the chosen group's size", "chosen": "the chosen group"}


def areas(recorded: Result | None, now: Result) -> Figure:
    """How well every signal parts spoiled from good answers: the area under its ROC with its interval, by cache."""
    import matplotlib.pyplot as plt

    drawn = over(recorded, now)
    gated = [_gated(one.result) for one in drawn]
    tags = [tag for tag in TAGS if any(tag in groups for groups in gated)]
    fig, axes = plt.subplots(1, len(tags), figsize=(9, 3.2), squeeze=False, sharey=True)
    for ax, tag in zip(axes[0], tags, strict=True):
        said = []
        for one, groups in zip(drawn, gated, strict=True):
            of = _of(one.result, groups[tag]) if tag in groups else []
            failed = spoiled(of)
            for place, signal in enumerate(SIGNALS) if len(set(failed)) == 2 else ():
                area = gate.auc_interval([row[signal] for row in of], failed).summary()
                one.point(ax, place + one.shift, area, "measured", along="x")
            if of:
                whose = "yours, " if one.own and not one.alone else ""
                said.append(f"{whose}{groups[tag]}: {sum(failed)} of {len(failed)} spoiled")
        ax.axvline(0.5, color=COLOURS["mark"], linestyle=":", linewidth=1.5)
        ax.annotate("a coin", (0.5, len(SIGNALS) - 0.55), (4, 0), textcoords="offset points", fontsize=9)
        ax.set_title("\n".join([TAGS[tag], *said]), fontsize=9.5)
        ax.set(xlim=(-0.03, 1.03), ylim=(len(SIGNALS) - 0.4, -0.5))
        ax.grid(axis="y", visible=False)
    axes[0][0].set_yticks(range(len(SIGNALS)), SIGNALS)
    axes[0][len(tags) // 2].set_xlabel("how often a spoiled answer has the larger signal than a good one (95 %)")
    chosen = {s: drawn[0].result.summary.get("auc", case="chosen", signal=s) for s in SIGNALS}
    known = {signal: entry["value"] for signal, entry in chosen.items() if entry}
    if known:
        best = max(known, key=known.__getitem__)
        told = f"{best} tells spoiled answers from good ones best, in {100 * known[best]:.0f} % of pairs"
        fig.suptitle(f"Over the chosen group {told}", fontsize=12)
    name_results(fig, drawn, "spoiled_pct")
    return fig


def gate_rows(result: Result, depth: int) -> Rows:
    """The gates in numbers, on items that set no threshold, "no gate" first; computed is of a full prefill.

    A probe of tokens computes them in all layers; a request that is sent back has its group recomputed for nothing.
    """
    probe = TOKENS / Run.parse(result.parameters["reuse"]["runs"][0]).tokens
    rows = []
    for tag, group in _gated(result).items():
        judged, own = _of(result, group), [row["own"] for row in _of(result, group)]
        layers = (int(group.split("-")[1]) - int(group.split("-")[0]) + 1) / depth if "-" in group else 0.0
        cache = {"cache": f"{TAGS[tag]} ({group})"}
        rows.append(cache | {"gate": "no gate"} | _cost([row["score"] for row in judged], own, layers))
        gates = calibrated(_of(result, group, "calibrate"), result.parameters["gate"]["miss_budget"])
        for signal, made in gates.items():
            rates = {name: result.summary.get(name, case=tag, signal=signal) for name in _RATES}
            sent_back = 1 - sum(made.accepts(row[signal]) for row in judged) / len(judged)
            cost = layers + sent_back + (probe if signal in ("head", "tail") else 0.0)
            told = {_RATES[name]: "" if rate is None else f"{rate['value']:.0f}" for name, rate in rates.items()}
            rows.append(cache | {"gate": signal} | told | _cost(behind(made, judged), own, cost))
    return rows


_RATES = {
    "miss_pct": "missed, % of spoiled",
    "false_alarm_pct": "false alarms, % of good",
    "fallback_pct": "sent back, %",
}


def _cost(scores: list[float], own: list[float], compute: float) -> dict[str, Any]:
    score = interval(bootstrap(scores).summary("%", 100))
    return {"score, %": score, "own, %": round(100 * sum(own) / len(own), 1), "computed, %": round(100 * compute)}


def _of(result: Result, group: str, name: str = "judge") -> Rows:
    return [row for row in result.rows if (row["set"], row["group"]) == (name, group)]


def _gated(result: Result) -> dict[str, str]:
    """The group of each tag of the summary; where two are one, it stands under the first."""
    found: dict[str, str] = {}
    for tag in TAGS:
        entry = result.summary.get("group", case=tag)
        if entry and entry["value"] not in found.values():
            found[tag] = entry["value"]
    return found
