"""The picture at the head of the README: for each report one finding, beside the report's number and what bounds it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firsttoken.study.summary import Entry, Scalar
from firsttoken_studies.record import plot
from firsttoken_studies.record.claims import Claim
from firsttoken_studies.record.plot import LOOKS, Axes, Figure, handle
from firsttoken_studies.record.results import Result, recorded_entries

PAPER, MEASURED, BOUND, BESIDE = "paper", "measured", "floor", "other"
_NAMES = {PAPER: "the report", MEASURED: "this project, as the label says", BESIDE: "for comparison"}
KEPT_PCT = 95  # of the F1: DroidSpeak recomputes the smallest group that keeps so much
_WRAPPED = 34  # characters of a title's line
Found, Said = Callable[..., Entry], Mapping[str, Any]


@dataclass(frozen=True)
class Bar:
    """One line of a panel: a number or an entry of a summary, called ``name``, drawn in the look of ``kind``."""

    name: str
    found: float | Entry
    kind: str = MEASURED

    @property
    def value(self) -> float:
        """Return the value that is drawn."""
        return float(self.found["value"] if isinstance(self.found, Mapping) else self.found)


@dataclass(frozen=True)
class Panel:
    """The finding of one report. Further right is better; ``bounds`` are drawn as lines."""

    report: str
    finding: str
    axis: str
    bars: tuple[Bar, ...]
    bounds: tuple[Bar, ...] = ()


def panels(claims: Sequence[Claim], results: Sequence[Result], machine: str) -> list[Panel]:
    """The five panels, from what was recorded on ``machine``, or on another where it has no result.

    Raises FirstTokenError for an experiment that nobody recorded or a measure that its result lacks, KeyError for a
    claim that the ledger does not have.
    """
    entry_of = recorded_entries(results, machine)
    values = {claim.id: claim.value for claim in claims}
    made = (_progressiveserve, _cps, _sarathi, _droidspeak, _petals)
    return [panel(entry_of, values) for panel in made]


def _progressiveserve(entry_of: Found, values: Said) -> Panel:
    labels = {"link": "1gbit", "variant": "progressive"}
    gain = entry_of("cold_start", "ttft_p50_below_pct", **labels, than="whole_streamed")
    process = entry_of("cold_start", "process_ttft_p50_below_pct", **labels, than="whole_streamed")
    spared = 100 * (1 - entry_of("cold_start", "byte_share", **labels)["value"])
    return Panel(
        "ProgressiveServe",
        f"The first token comes {gain['value']:.0f} % earlier, as {spared:.0f} % of the bytes may wait",
        "saving in time to the first token, %",
        (
            Bar("Llama-2-7B, from the request", values["progressive.ttft"], PAPER),
            Bar("measured, from the request", gain),
            Bar("measured, process start included", process),
        ),
        (Bar("bytes that wait here", spared, BOUND),),
    )


def _cps(entry_of: Found, values: Said) -> Panel:
    def below(policy: str, costs: str = "published") -> Entry:
        return entry_of("crosspoint_replayed", "tpot_p99_below_pct", policy=policy, than="swap", costs=costs)

    gain, free = below("cross_point"), below("cross_point", "coalesced")
    return Panel(
        "CPS",
        f"The tail falls by {gain['value']:.0f} %, with almost free copies by {free['value']:.0f} %: the gain lies in "
        "the queue",
        "P99 time per token below always swap, %",
        (
            Bar("measured on an A6000", values["cps.p99-below-swap"], PAPER),
            Bar("replayed on the report's costs", gain),
            Bar("replayed, copies almost free", free),
            Bar("always swap, resumed out of order", below("swap_overtaking"), BESIDE),
        ),
        (Bar("always swap: no gain", 0.0, BOUND),),
    )


def _sarathi(entry_of: Found, values: Said) -> Panel:
    def times(case: str) -> Entry:
        labels = {"scheduler": "sarathi", "budget_tokens": 512, "case": case, "than": "prefill_first"}
        return entry_of("paper_capacity", "capacity_x", **labels)

    labels = {"scheduler": "chunked_only", "budget_tokens": 512, "objective": "strict", "than": "prefill_first"}
    chunks = entry_of("serving_capacity", "capacity_x", **labels)
    mistral, yi = (
        times(f"{case}, sarathi-2024") for case in ("mistral-7b on 1 a100-sxm, 100 ms", "yi-34b on 2 a100-sxm, 200 ms")
    )
    return Panel(
        "Sarathi-Serve",
        f"{mistral['value']:.1f} and {yi['value']:.1f} times the requests under a strict objective, on its GPUs",
        "requests a second over those of prefill first",
        (
            Bar("Mistral-7B on an A100", values["sarathi.capacity-mistral"], PAPER),
            Bar("Mistral-7B on an A100, simulated", mistral),
            Bar("Yi-34B on two A100", values["sarathi.capacity-yi"], PAPER),
            Bar("Yi-34B on two A100, simulated", yi),
            Bar("chunks alone, RTX 4090, simulated", chunks, BESIDE),
        ),
        (Bar("prefill first: no gain", 1.0, BOUND),),
    )


def _droidspeak(entry_of: Found, values: Said) -> Panel:
    def kept(method: str, **labels: Scalar) -> Entry:
        lost = entry_of("reuse_methods", "relative_loss_pct", method=method, **labels)
        return lost | {"value": 100 - lost["value"], "low": 100 - lost["high"], "high": 100 - lost["low"]}

    pairs = [("qa", "base"), ("qa", "lead"), ("all", "base")]
    groups = [kept("DroidSpeak", receiver=receiver, sender=sender, task="qa") for receiver, sender in pairs]
    low, high = (least_or_most(entry["value"] for entry in groups) for least_or_most in (min, max))
    return Panel(
        "DroidSpeak",
        f"With one group of layers computed again, {low:.0f} to {high:.0f} % of the model's own F1 are kept on new "
        "questions",
        "F1 kept on new questions, %",
        (
            Bar("at least, by the report", KEPT_PCT, PAPER),
            *(Bar(f"measured, pair of models {number}", entry) for number, entry in enumerate(groups, 1)),
            Bar("measured, whole cache, worst pair", kept("full reuse", across="worst"), BESIDE),
        ),
        (Bar("own prefill", 100, BOUND),),
    )


def _petals(entry_of: Found, values: Said) -> Panel:
    labels = {"model": "bloom-176b", "link": "100 Mbit/s, 100 ms", "gbit_per_s": 256, "than": "offloading"}
    foreseen = entry_of("swarm_chains", "steps_per_s_x", source="foreseen", **labels)
    speedup = entry_of("swarm_chains", "steps_per_s_x", source="measured", bits=8, **labels)
    return Panel(
        "PETALS",
        f"By arithmetic three servers are {foreseen['value']:.1f} times as fast as offloading with the paper's GPUs, "
        f"and {speedup['value']:.1f} times with this processor",
        "tokens a second over those of offloading",
        (
            Bar("BLOOM-176B on A100s, 100 Mbit/s", values["petals.latency-256"], PAPER),
            Bar("calculated from its fast link", foreseen),
            Bar("calculated from a layer timed here", speedup),
        ),
        (Bar("offloading: no gain", 1.0, BOUND),),
    )


def five_findings(claims: Sequence[Claim], results: Sequence[Result], machine: str) -> Figure:
    """A panel a report: its number, what was measured with 95 % intervals, and the bound. Raises as ``panels``."""
    fig, axes = plot.panels(3, 2, figsize=(11, 7.6), layout="constrained")
    made = panels(claims, results, machine)
    for ax, panel in zip(axes.flat, made, strict=False):
        _draw(ax, panel)
    rest = axes.flat[len(made)]
    rest.axis("off")
    handles = [handle(**_look(kind), label=_NAMES[kind]) for kind in (PAPER, MEASURED, BESIDE)]
    handles.append(handle(color=LOOKS[BOUND].colour, linestyle="--", label="a bound, or no change"))
    rest.legend(handles=handles, loc="center", fontsize=10, title="Further right is better.", title_fontsize=10)
    return fig


def _look(kind: str) -> dict[str, Any]:
    look = LOOKS[kind]
    marker = "d" if kind == PAPER else look.marker
    return {"color": look.colour, "marker": marker, "markersize": 9, "markeredgecolor": "black", "linestyle": "none"}


def _draw(ax: Axes, panel: Panel) -> None:
    for row, bar in enumerate(panel.bars):
        entry = bar.found if isinstance(bar.found, Mapping) else {}
        low, high = (entry.get(end, bar.value) for end in ("low", "high"))
        error = [[bar.value - low], [high - bar.value]]
        ax.errorbar(bar.value, row, xerr=error, **_look(bar.kind))
    for bound in panel.bounds:
        ax.axvline(bound.value, color=LOOKS[BOUND].colour, linestyle="--", linewidth=1.5, zorder=1)
        ax.annotate(bound.name, (bound.value, -0.75), (4, 0), textcoords="offset points", fontsize=9, va="center")
    ax.set_yticks(range(len(panel.bars)), [bar.name for bar in panel.bars], fontsize=10)
    ax.set(ylim=(len(panel.bars) - 0.4, -1.1))
    ax.set_xlabel(panel.axis, fontsize=10)
    title = "\n".join(textwrap.wrap(panel.finding, _WRAPPED))
    ax.set_title(f"{panel.report}\n{title}", loc="left", fontsize=11)
