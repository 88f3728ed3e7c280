"""The picture that notebook 17 opens with, and its figures and tables, drawn from results alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from firsttoken.study.summary import Entry, Scalar
from firsttoken_studies.nb17_bits_before_layers.bitplane_starts import BEHIND, LAYERS, LOSSLESS, WHOLE
from firsttoken_studies.nb17_bits_before_layers.frontier import STORIES
from firsttoken_studies.progressiveserve.coldstart.summary import by_link, values
from firsttoken_studies.record.overlay import DrawnResult, legend, name_results, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, Axes, Figure, panels
from firsttoken_studies.record.results import Result, Rows, Table, distinct
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval

Place = Mapping[str, Scalar]

PERPLEXITY = "perplexity_x"  # than the exact weights'
PANELS = {"em_drop": "EM lost, points", "f1_drop": "F1 lost, points", PERPLEXITY: "perplexity gained, %"}
GOALS = {"em_drop": 3.0, "f1_drop": 3.0, PERPLEXITY: 5.0}
GOAL_BYTES = 0.36
SHARES = (0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
LOSSES = (-10, -3, 0, 3, 10, 30, 100, 300, 1000, 3000)
STARTS = {WHOLE: "whole model, plain", LOSSLESS: "whole model, coded without loss", LAYERS: "stages of layers"}


def schematic() -> Schematic:
    """Draw which bits of the weights of every layer come first, and which come while the model answers."""
    alt = (
        "Each layer of a model is a bar of bits: sign, exponent and two bits of the mantissa, then the other bits. A "
        "start by bits brings the first bits of all layers, a third of the bytes, and the first token comes. The other "
        "bits come while the model answers, and then every weight is exact. A start by layers brings most layers whole "
        "and lacks some."
    )
    sketch = Schematic(20, 7.2, alt)
    sketch.text(0.3, 0.5, "First the bits that matter, of every layer", heading=True)
    sketch.text(11.3, 0.5, "or most layers, whole", heading=True)
    for layer in range(4):
        y, waits = 1.2 + 1.1 * layer, layer == 2
        sketch.text(0.3, y + 0.5, f"layer {layer + 1}")
        sketch.box(2.4, y, "sign, exponent", "measured", width=2.8)
        sketch.box(5.3, y, "other bits", "measured", width=3.6, missing=True)
        sketch.box(11.3, y, "waits" if waits else "all 16 bits", "none", width=6.5, missing=waits)
    sketch.arrow((3.8, 6.5), (3.8, 5.7), look="measured")
    sketch.text(3.8, 6.8, "first token", align="center", heading=True)
    sketch.arrow((7.1, 6.5), (7.1, 5.7), look="measured")
    sketch.text(7.1, 6.8, "while it answers", align="center")
    sketch.arrow((14.5, 6.5), (14.5, 5.7), look="none")
    sketch.text(14.5, 6.8, "first token, later and worse", align="center")
    return sketch


def kind(labels: Place) -> tuple[str, str]:
    """The look of what is at ``labels`` in the frontier, and what a legend calls all like it."""
    if labels.get("stage") == 1:
        healed = labels["recipe"] != "none"
        return ("ours", "8 of 30 layers wait, healed") if healed else ("none", "8 of 30 layers wait")
    variant = labels.get("variant", LOSSLESS)
    if variant.startswith("sparse"):
        return "sparse", "small weights wait"
    if " later" in variant or " ends " in variant:
        return "mixed", "mixed: the ends by another split, or layers wait too"
    if variant.startswith(LOSSLESS):
        return "S0", "all bits, plain or coded"
    if variant.startswith("bits"):
        return "measured", "low bits wait"
    return "other", "rounded to so many bits in groups of 32"


def called(labels: Place) -> str:
    """Return the name in tables of the weights at ``labels``."""
    if "recipe" in labels:
        return "layers" if labels["recipe"] == "none" else "layers, healed"
    return f"{labels['variant']} of {labels['dtype']}" if "variant" in labels else "plain"


def shares(result: Result, task: str = "") -> list[Entry]:
    """The bytes before the first token of all that was measured on ``task``, STORIES or, "", the served model's own; by
    name."""
    entries = [entry for entry in result.summary.all("byte_share") if entry["where"].get("task", "") == task]
    return sorted(entries, key=lambda entry: called(entry["where"]))


def frontier(recorded: Result | None, now: Result) -> Figure:
    """Bytes before the first token against what is lost with them: of the served model, and of the one whose weights
    were trained in full precision (hollow)."""
    results = over(recorded, now)
    fig, axes = panels(1, 3, figsize=(11, 4.6))
    for ax, (measure, label) in zip(axes, PANELS.items(), strict=True):
        ax.axvline(GOAL_BYTES, color=COLOURS["target"], linestyle="--", linewidth=1)
        ax.axhline(GOALS[measure], color=COLOURS["target"], linestyle="--", linewidth=1, label="goals")
        for task in ("", STORIES) if measure == PERPLEXITY else ("",):
            for shown in results:
                _points(ax, shown, measure, task)
        ax.set_xscale("log")
        ax.set_yscale("symlog", linthresh=GOALS[measure])
        ax.set(ylabel=label, xlim=(0.18, 1.1), ylim=(-GOALS[measure], 1.5 * ax.get_ylim()[1]))
        ax.xaxis.set_ticks(SHARES, [f"{share:g}" for share in SHARES])
        ax.xaxis.set_ticks([], minor=True)
        low, high = ax.get_ylim()
        ticks = [tick for tick in LOSSES if low <= tick <= high]
        ax.yaxis.set_ticks(ticks, [f"{tick:,}" for tick in ticks])
        ax.yaxis.set_ticks([], minor=True)
        ax.set_xlabel("bytes before the first token / all", fontsize="medium")
    handles = dict(zip(*reversed(axes[2].get_legend_handles_labels()), strict=True))
    fig.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=2)
    name_results(fig, results, "em_drop")
    return fig


def _points(ax: Axes, shown: DrawnResult, measure: str, task: str) -> None:
    result = shown.result
    for share in shares(result, task):
        labels, x = share["where"], share["value"]
        look, label = kind(labels)
        if (lost := _lost(result, measure, labels)) is None or shown.repeats(ax, f"{task} {called(labels)}", (x, lost)):
            continue
        low, y, high = lost
        ax.errorbar(
            [x],
            [y],
            yerr=[[max(0.0, y - low)], [max(0.0, high - y)]],
            fmt=LOOKS[look].marker,
            color=COLOURS[look],
            markerfacecolor="white" if task else COLOURS[look],
            markersize=7,
            capsize=3,
            label=f"{label}; trained in full precision" if task else label,
            **shown.outlined,
        )
        if look == "other":
            ax.annotate(labels["variant"][0], (x, y), (6, 4), textcoords="offset points", fontsize=8)


def _lost(result: Result, measure: str, labels: Place) -> tuple[float, float, float] | None:
    """Low, value and high of what is lost, in points or %: nothing by the exact weights, None where nobody compared."""
    if (entry := _compared(result, measure, labels)) is None:
        return None
    low, value, high = (entry.get(name, entry["value"]) for name in ("low", "value", "high"))
    return (low, value, high) if measure != PERPLEXITY else tuple(100 * x - 100 for x in (low, value, high))


def _compared(result: Result, measure: str, labels: Place) -> Mapping[str, Any] | None:
    """Return ``measure`` at ``labels`` beside the exact weights, which lose nothing; None where nobody compared."""
    than = {"than": "exact"} if measure == PERPLEXITY else {}
    entry = result.summary.get(measure, **labels, **than)
    return {"value": 0.0} if entry is None and labels == {"stage": 0} else entry


def frontier_rows(result: Result) -> Rows:
    """Every variant: bytes before the first token and in all, what EM and F1 lose, and perplexity on both origins."""
    return [_frontier_row(result, share) for share in shares(result)]


def _frontier_row(result: Result, share: Entry) -> dict[str, str]:
    get, labels = result.summary.get, share["where"]
    return {
        "first": called(labels),
        "bytes first": _share(share),
        "in all": _share(get("full_byte_share", **labels)),
        "EM lost, points": interval(get("em_drop", **labels)),
        "F1 lost, points": interval(get("f1_drop", **labels)),
        "perplexity, x": interval(get(PERPLEXITY, **labels, than="exact"), 3),
        "stories: bytes first": _share(get("byte_share", **labels, task=STORIES)),
        "stories: perplexity, x": interval(get(PERPLEXITY, **labels, task=STORIES, than="exact"), 3),
    }


def _share(entry: Mapping[str, Any] | None) -> str:
    return "" if entry is None else f"{entry['value']:.3f}"


def plan_name(start: str) -> str:
    """Return the name of a start in figures and tables."""
    if start.endswith(BEHIND):
        return plan_name(start.removesuffix(BEHIND)) + BEHIND
    return STARTS.get(start, f"{start} first" if "bits" in start and start != "bits" else "low bits wait")


def starts(recorded: Result | None, now: Result) -> Figure:
    """Seconds from the request's arrival to the first token and until every weight is exact, by plan and link, over
    what the bytes of each take at the rate read alone; of starts with torch first. Of a reader's order of the planes
    there are the starts by planes alone, which the others do not depend on."""
    results = over(recorded, now)
    links = by_link(results[0].result.rows)
    fig, axes = panels(1, len(links), figsize=(min(11, 3.4 * len(links) + 3), 4.2), sharey=True, squeeze=False)
    for ax, (key, link_rows) in zip(axes[0], links.items(), strict=True):
        # the clock begins behind the imports, so those whose torch comes behind have nothing to show here
        names = [name for name in distinct(link_rows, "variant") if name != "read" and not name.endswith(BEHIND)]
        for row_index, name in enumerate(names):
            for shown in results:
                if not (shown.library and name in STARTS):
                    _start(ax, row_index, shown, name, key)
        ax.set(xlabel="s from the request's arrival", title=link_rows[0]["link"], xlim=(0, None))
        ax.set_yticks(range(len(names)), [plan_name(name) for name in names])
    axes[0][0].invert_yaxis()
    legend(fig, axes[0][0], results, "ttft_p50_s", columns=4)
    return fig


def _start(ax: Axes, row_index: int, shown: DrawnResult, name: str, key: str) -> None:
    """Draw one start over one link in its row, where the result has it; the legend names it once."""
    summary, position = shown.result.summary, row_index + 0.8 * shown.shift
    entry = summary.get("ttft_p50_s", variant=name, link=key)
    if entry is None or shown.repeats(ax, name, entry["value"]):
        return
    look, first = _LOOKS.get(name, "measured" if name == "bits" else "other"), row_index == 1 and not shown.index
    labels = ("first token", "its bytes alone", "every weight exact") if first else (None, None, None)
    shown.point(ax, position, entry, look, along="x", label=labels[0], share=0.8)
    read_s = float(np.median(values(by_link(shown.result.rows)[key], "read", "load_s")))
    tick = {"marker": "|", "color": COLOURS["floor"], "markersize": 14, "markeredgewidth": 2, "linestyle": "none"}
    ax.plot(read_s * summary.value("byte_share", variant=name, link=key), position, **tick, label=labels[1])
    if speedup := summary.get("full_time_x", variant=name, than=WHOLE, link=key):
        full = speedup["value"] * summary.value("ttft_p50_s", variant=WHOLE, link=key)
        exact = {"marker": "D", "color": COLOURS[look], "markerfacecolor": "white", "linestyle": "none"}
        ax.plot(full, position, **exact, label=labels[2], **shown.style)


_LOOKS = {WHOLE: "S0", LOSSLESS: "S0", LAYERS: "none"}


def start_rows(result: Result) -> Table:
    """Every plan over every link: bytes, seconds, and what they are of the plain whole model's."""
    for key, link_rows in by_link(result.rows).items():
        for name in distinct(link_rows, "variant"):
            if name == "read":
                continue
            labels, beside = {"variant": name, "link": key}, {"variant": name, "than": WHOLE, "link": key}
            yield {
                "plan and link": f"{plan_name(name)}, {link_rows[0]['link']}",
                "bytes first": _share(result.summary.of("byte_share", **labels)),
                "TTFT, s": interval(result.summary.of("ttft_p50_s", **labels), 2),
                "from process creation, s": interval(result.summary.of("process_ttft_p50_s", **labels), 2),
                "TTFT / whole": interval(result.summary.get("ttft_x", **beside), 3),
                "all exact / whole": interval(result.summary.get("full_time_x", **beside), 3),
            }
