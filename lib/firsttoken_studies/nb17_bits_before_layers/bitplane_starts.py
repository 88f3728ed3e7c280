"""Cold starts by what waits: nothing, a block of layers, or the low bits of every weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.assets.needs import ModelFacts, check
from firsttoken.progressiveserve.base_model import ServedConfig, ServedModel, load_served
from firsttoken.progressiveserve.evaluation import QualityConfig
from firsttoken.study.dtypes import named
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Entry, Scalar, Summary
from firsttoken_extras.bitplanes.layouts import SPLITS, planes_of
from firsttoken_studies.nb13_cold_start.study import disk_speed, trial_specs
from firsttoken_studies.nb17_bits_before_layers.frontier import STORIES, PrecisionConfig
from firsttoken_studies.progressiveserve.coldstart.checkpoints import bare_checkpoint, planes_checkpoint
from firsttoken_studies.progressiveserve.coldstart.harness import one_trial, wire_for
from firsttoken_studies.progressiveserve.coldstart.summary import PROCESS, REQUEST, by_link, link_floor, ratio, values
from firsttoken_studies.progressiveserve.coldstart.trial import TrialSpec
from firsttoken_studies.record.plot import COLOURS, LOOKS, panels
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, distinct, rows_where
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WHOLE, LAYERS, LOSSLESS = "whole_streamed", "progressive", "lossless"
BEHIND = ", torch behind"  # of a start whose first token comes before torch is imported


@dataclass(frozen=True)
class Start:
    """A start that is timed under ``name``: a trial, and how many stages its checkpoint has."""

    name: str
    spec: TrialSpec
    stages: int


def precision_start(profile: Profile) -> Outcome:
    """First tokens of the whole model as it is stored, of the report's stages and of every split, from cold files over
    each link and from this disk, each going on until all weights are there; in lean layers, as ``serve`` computes."""
    config = profile.section("precision", PrecisionConfig)
    quality = profile.section("quality", QualityConfig)
    check(profile.section("served", ServedConfig).needs(), ModelFacts(profile.model))
    served = load_served(profile)
    starts = _starts(profile, config, quality.questions, served)
    read = replace(starts[0].spec, variant="read", recover=False)
    disk = disk_speed(read)
    rows: Rows = []
    floors = {}
    links = ((config.gbit_per_s, config.starts), *((rate, config.few_starts) for rate in config.few_links))
    for rate, rounds in links:
        wire = wire_for(rate, Path(read.staged), disk)
        start_rows: Rows = []
        for round_ in track(range(rounds), desc=f"cold starts, {wire.name}", unit="round"):
            start_rows.append(one_trial(read, wire) | {"round": round_})
            for start in starts if round_ % 2 == 0 else starts[::-1]:  # a machine that drifts favours nobody
                label = {"variant": start.name, "round": round_, "stages": start.stages}
                start_rows.append(one_trial(start.spec, wire) | label)
        if not start_rows:
            continue
        rows += start_rows
        floors[f"link {wire.name}"] = link_floor(start_rows)
    return Outcome(rows, floors, provenance=served.provenance)


def _starts(profile: Profile, config: PrecisionConfig, questions: str, served: ServedModel) -> list[Start]:
    served = replace(served, stored=named(config.stored))
    by_layer = trial_specs(profile, bare_checkpoint(served), questions, config.readers)
    by_layer_names = {WHOLE: "whole_behind", LAYERS: "progressive_behind"}
    starts = []
    for name, behind in by_layer_names.items():
        starts.append(Start(name, replace(by_layer(name), lean=True, digest=True), 3))
        recover = starts[-1].spec.recover
        starts.append(Start(name + BEHIND, replace(by_layer(behind), recover=recover, digest=True), 3))
    for split in config.start_splits:
        of_split = trial_specs(profile, planes_checkpoint(served, split), questions, config.readers)
        options = {"lean": True, "recover": planes_of(split) > 1, "digest": True}
        starts.append(Start(split, replace(of_split("progressive"), **options), planes_of(split)))
        if not any(layout.code_bits for layout in SPLITS[split].values()):  # which torch alone decodes
            spec = replace(of_split("progressive_behind"), **options)
            starts.append(Start(split + BEHIND, spec, planes_of(split)))
    return starts


def precision_start_summary(rows: Rows, _: Mapping[str, Any]) -> Summary:
    """By link and start: TTFT from arrival and from process creation, over the plain whole model's and the losslessly
    coded one's; bytes before the first token and in all; time until every weight is exact over the whole model's. A
    start with torch behind is held against the same with torch first, and one that needed torch is left out."""
    summary = Summary()
    for key, link_rows in by_link(rows).items():
        link_rows = [row for row in link_rows if not row["variant"].endswith(BEHIND) or "torch_at_first_token" in row]
        plain = values(link_rows, "read", "bytes")[0]
        complete = [row | {REQUEST: row[REQUEST] + _later(row)} for row in link_rows if row["variant"] != "read"]
        exact = {*distinct(link_rows, "weights_sha256", variant=WHOLE)}
        for name in distinct(complete, "variant"):
            labels = {"variant": name, "link": key}
            summary.add("ttft_p50_s", bootstrap(values(link_rows, name, REQUEST), "median").summary("s"), **labels)
            summary.add(
                "process_ttft_p50_s", bootstrap(values(link_rows, name, PROCESS), "median").summary("s"), **labels
            )
            share = values(link_rows, name, "bytes")[0] / plain
            summary.add("byte_share", {"value": share, "unit": "of the bytes"}, **labels)
            if name.endswith(BEHIND):
                _behind(summary, link_rows, name, key, share)
            if name == WHOLE:
                continue
            beside = labels | {"than": WHOLE}
            summary.add("ttft_x", ratio(link_rows, name, WHOLE).summary("x"), **beside)
            summary.add("process_ttft_x", ratio(link_rows, name, WHOLE, PROCESS).summary("x"), **beside)
            summary.add("full_time_x", ratio(complete, name, WHOLE).summary("x"), **beside)
            same = {*distinct(link_rows, "weights_sha256", variant=name)} == exact
            summary.add("same_weights", {"value": same, "unit": "bit by bit, in every start"}, **beside)
            if name != LOSSLESS and rows_where(link_rows, variant=LOSSLESS):
                summary.add("ttft_x", ratio(link_rows, name, LOSSLESS).summary("x"), **labels, than=LOSSLESS)
            if any("full_bytes" in row for row in rows_where(link_rows, variant=name)):
                share = values(link_rows, name, "full_bytes")[0] / plain
                summary.add("full_byte_share", {"value": share, "unit": "of the bytes"}, **labels)
    return summary


def _behind(summary: Summary, link_rows: Rows, name: str, key: str, share: float) -> None:
    """Add the seconds of a start with torch behind from the creation of its process: over those of the same start with
    torch first, and beyond the time of its ``share`` of the bytes where they are read alone."""
    labels, base = {"variant": name, "link": key}, name.removesuffix(BEHIND)
    if base != WHOLE:  # against which every start is held
        summary.add("process_ttft_x", ratio(link_rows, name, base, PROCESS).summary("x"), **labels, than=base)
    bytes_s = share * float(np.median(values(link_rows, "read", "load_s")))
    above = bootstrap([s - bytes_s for s in values(link_rows, name, PROCESS)], "median")
    summary.add("process_ttft_above_bytes_s", above.summary("s"), **labels, than="bytes")


def _later(row: dict[str, Any]) -> float:
    """Seconds from the first token until every stage was there."""
    return sum(row.get(f"stage{stage}_s", 0.0) for stage in range(2, row["stages"] + 1))


# The figures and tables of notebook 17, drawn from results alone.

Place = Mapping[str, Scalar]

PERPLEXITY = "perplexity_x"  # than the exact weights'
PANELS = {"em_drop": "EM lost, points", "f1_drop": "F1 lost, points", PERPLEXITY: "perplexity gained, %"}
GOALS = {"em_drop": 3.0, "f1_drop": 3.0, PERPLEXITY: 5.0}
GOAL_BYTES = 0.36
SHARES = (0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
LOSSES = (-10, -3, 0, 3, 10, 30, 100, 300, 1000, 3000)
STARTS = {WHOLE: "whole model, plain", LOSSLESS: "whole model, coded without loss", LAYERS: "stages of layers"}


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


def frontier(result: Result) -> Figure:
    """Bytes before the first token against what is lost with them: of the served model, and of the one whose weights
    were trained in full precision (hollow)."""
    fig, axes = panels(1, 3, figsize=(11, 4.6))
    for ax, (measure, label) in zip(axes, PANELS.items(), strict=True):
        ax.axvline(GOAL_BYTES, color=COLOURS["target"], linestyle="--", linewidth=1)
        ax.axhline(GOALS[measure], color=COLOURS["target"], linestyle="--", linewidth=1, label="goals")
        for task in ("", STORIES) if measure == PERPLEXITY else ("",):
            _points(ax, result, measure, task)
        ax.set_xscale("log")
        ax.set_yscale("symlog", linthresh=GOALS[measure])
        ax.set(ylabel=label, xlim=(0.18, 1.1), ylim=(-GOALS[measure], 1.5 * ax.get_ylim()[1]))
        ax.xaxis.set_ticks(SHARES, [f"{share:g}" for share in SHARES])
        ax.xaxis.set_ticks([], minor=True)
        low, high = ax.get_ylim()
        ticks = [tick for tick in LOSSES if low <= tick <= high]
        ax.yaxis.set_ticks(ticks, [f"{tick:,}" for tick in ticks])
        ax.yaxis.set_ticks([], minor=True)
    fig.supxlabel("bytes before the first token, of the plain model's", fontsize="medium")
    handles = dict(zip(*reversed(axes[2].get_legend_handles_labels()), strict=True))
    fig.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=2)
    return fig


def _points(ax: Axes, result: Result, measure: str, task: str) -> None:
    for share in shares(result, task):
        labels, x = share["where"], share["value"]
        look, label = kind(labels)
        if (lost := _lost(result, measure, labels)) is None:
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


def mixed_rows(result: Result) -> Rows:
    """Return those of :func:`frontier_rows` whose plans mix, and those of sparsity."""
    return [_frontier_row(result, share) for share in shares(result) if kind(share["where"])[0] in ("mixed", "sparse")]


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


BOUNDS: tuple[tuple[str, str, str, float], ...] = (
    ("EM lost, points", "em_drop", "", 3.0),
    ("F1 lost, points", "f1_drop", "", 3.0),
    ("perplexity, x", PERPLEXITY, "", 1.05),
    ("perplexity, x", PERPLEXITY, STORIES, 1.05),
    ("perplexity, x", PERPLEXITY, STORIES, 1.01),
)
"""Of the record: what is bounded, its measure, the task, and the most of it that is acceptable."""


def record_rows(result: Result) -> Table:
    """The fewest bytes before the first acceptable token, by model and bound: where the measured value keeps to it, and
    where its whole interval does."""
    for label, measure, task, most in BOUNDS:
        model = "TinyStories 15 M" if task else result.parameters["model"]
        by_bound: dict[str, list[tuple[float, str]]] = {"value": [], "high": []}
        for share in shares(result, task):
            if (entry := _compared(result, measure, share["where"])) is None:
                continue
            for bound, candidates in by_bound.items():
                if entry.get(bound, entry["value"]) <= most:
                    candidates.append((share["value"], called(share["where"])))
        if any(by_bound.values()):
            fewest = {
                bound: "{1}: {0:.3f}".format(*min(candidates)) if candidates else "none"
                for bound, candidates in by_bound.items()
            }
            candidates = {"as measured": fewest["value"], "for the whole interval": fewest["high"]}
            yield {"model and bound": f"{model}: {label} <= {most:g}", **candidates}


def plan_name(start: str) -> str:
    """Return the name of a start in figures and tables."""
    if start.endswith(BEHIND):
        return plan_name(start.removesuffix(BEHIND)) + BEHIND
    return STARTS.get(start, f"{start} first" if "bits" in start and start != "bits" else "low bits wait")


def starts(result: Result) -> Figure:
    """Seconds from the request's arrival to the first token and until every weight is exact, by plan and link, over
    what the bytes of each take at the rate read alone; of starts with torch first."""
    links = by_link(result.rows)
    fig, axes = panels(1, len(links), figsize=(min(11, 3.4 * len(links) + 3), 3.6), sharey=True, squeeze=False)
    for ax, (key, link_rows) in zip(axes[0], links.items(), strict=True):
        # the clock begins behind the imports, so those whose torch comes behind have nothing to show here
        names = [name for name in distinct(link_rows, "variant") if name != "read" and not name.endswith(BEHIND)]
        read_s = float(np.median(values(link_rows, "read", "load_s")))
        for row_index, name in enumerate(names):
            entry = result.summary.of("ttft_p50_s", variant=name, link=key)
            look = _LOOKS.get(name, "measured" if name == "bits" else "other")
            floor = read_s * result.summary.value("byte_share", variant=name, link=key)
            ax.plot(
                [floor],
                [row_index],
                "|",
                color=COLOURS["floor"],
                markersize=16,
                markeredgewidth=2,
                label="its bytes alone",
            )
            ax.plot([entry["low"], entry["high"]], [row_index, row_index], color=COLOURS[look], linewidth=3)
            ax.plot([entry["value"]], [row_index], "o", color=COLOURS[look], markersize=8, label="first token")
            if speedup := result.summary.get("full_time_x", variant=name, than=WHOLE, link=key):
                full = speedup["value"] * result.summary.value("ttft_p50_s", variant=WHOLE, link=key)
                ax.plot(
                    [full], [row_index], "D", color=COLOURS[look], markerfacecolor="white", label="every weight exact"
                )
        ax.set(xlabel="s from the request's arrival", title=link_rows[0]["link"], xlim=(0, None))
        ax.set_yticks(range(len(names)), [plan_name(name) for name in names])
    axes[0][0].invert_yaxis()
    handles = dict(zip(*reversed(axes[0][0].get_legend_handles_labels()), strict=True))
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return fig


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
