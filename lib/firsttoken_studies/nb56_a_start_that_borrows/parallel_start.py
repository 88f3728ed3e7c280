"""Starts of several processes that each fetch a part, beside one that fetches all, by the rate of a process's link."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from firsttoken.assets.needs import LAYERS, ModelFacts, Need, check
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.progressiveserve.loading.reader import even_groups
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_studies.combined.borrowed.setting import start_setting
from firsttoken_studies.nb56_a_start_that_borrows.borrow_spec import WHOLE
from firsttoken_studies.nb56_a_start_that_borrows.division import bytes_of, divided
from firsttoken_studies.nb56_a_start_that_borrows.fetch_trial import FETCHED, FetchSpec
from firsttoken_studies.progressiveserve.coldstart.harness import BUCKET, TrialLink, one_trial
from firsttoken_studies.progressiveserve.coldstart.summary import ratio, values
from firsttoken_studies.record.overlay import name_results, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, Figure, handle, panels
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, rows_where
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import cells, interval

# What starts with fetchers say: first tokens by link and number of processes, whose they are, and what was moved.

TTFT, MODEL, SHARE = "ttft_request_s", "model", "T / k"


def parallel_start_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """By link TTFT of the whole start and when all its layers were there; by link and number k of processes TTFT, over
    the whole start's and over a k-th of it, when the last process had its part, when the first one had all layers over
    when the whole start had them, and all bytes that came over the links over the model's. Of all of them whose tokens
    came out, and how many lost a process."""
    summary, config = Summary(), parameters["fetchers"]
    rows = [
        row | {"parts_s": max(filter(None, row["fetched_s"])), "all_s": row["local_s"] or row["loaded_s"]}
        for row in rows
    ]
    for rate in config["gbit_per_s"]:
        rows_at_rate = rows_where(rows, gbit_per_s=rate)
        for measure, column in (("ttft_p50_s", TTFT), ("loaded_s", "loaded_s")):
            ttft_s = bootstrap(values(rows_at_rate, WHOLE, column), "median").summary("s")
            summary.add(measure, ttft_s, variant=WHOLE, gbit_per_s=rate)
        for count in config["servers"]:
            _fetched(summary, [row for row in rows_at_rate if row["servers"] in (1, count)], count, rate)
    wanted = {tuple(row["tokens"]) for row in rows_where(rows, variant=WHOLE)}
    fetched = rows_where(rows, variant=FETCHED)
    summary.add("answers", {"value": len(wanted), "unit": "answers of starts of one process"}, variant=WHOLE)
    same = bootstrap([tuple(row["tokens"]) in wanted for row in fetched])
    summary.add("same_tokens_pct", same.summary("% of starts", 100), variant=FETCHED, than=WHOLE)
    failed = sum("all layers" not in row["gone"] for row in fetched)
    summary.add("loans_that_failed", {"value": failed, "unit": "starts"}, variant=FETCHED)
    return summary


def _fetched(summary: Summary, rows: Rows, count: int, rate: float) -> None:
    labels = _place(rate, count)
    (model,) = {row["bytes_each"][0] for row in rows_where(rows, variant=WHOLE)}
    moved = [sum(row["bytes_each"]) / model for row in rows_where(rows, variant=FETCHED)]
    speedup = ratio(rows, FETCHED, WHOLE, TTFT)
    summary.add("ttft_p50_s", bootstrap(values(rows, FETCHED, TTFT), "median").summary("s"), **labels)
    summary.add("ttft_x", speedup.summary("x"), **labels, than=WHOLE)
    summary.add("ttft_x", speedup.summary("x of T / k", count), **labels, than=SHARE)
    summary.add("parts_s", bootstrap(values(rows, FETCHED, "parts_s"), "median").summary("s"), **labels)
    summary.add("loaded_x", ratio(rows, FETCHED, WHOLE, "all_s").summary("x"), **labels, than=WHOLE)
    summary.add("moved_x", bootstrap(moved, "median").summary("x"), **labels, than=MODEL)


TRIAL = "firsttoken_studies.nb56_a_start_that_borrows.fetch_trial"


@dataclass(frozen=True)
class FetchersConfig:
    """``tokens`` of the first of ``questions`` by one process and by each number of ``servers``, every one of them with
    a link of each of ``gbit_per_s`` and so many ``readers``; ``rounds`` times. Few of them: files that are read at once
    are whole at once, and the first process would wait for others behind its own part (eight readers: 50 MB of them).

    ProfileError for numbers below these, and for a number of servers or a rate that is named twice.
    """

    questions: str
    tokens: int
    gbit_per_s: tuple[float, ...]
    servers: tuple[int, ...]
    rounds: int
    readers: int

    def __post_init__(self) -> None:
        if len({*self.servers}) < len(self.servers) or len({*self.gbit_per_s}) < len(self.gbit_per_s):
            raise ProfileError("fetchers: name every number of servers and every rate of gbit_per_s once")
        if min(self.servers, default=0) < 2 or min(self.gbit_per_s, default=0.0) <= 0:
            raise ProfileError("fetchers: give each start 2 servers or more, and gbit_per_s above 0")
        if self.rounds < 1 or self.tokens < 2 or self.readers < 1:
            raise ProfileError("fetchers: give at least 1 round, 2 tokens and 1 reader")


def parallel_start(
    profile: Profile, *, divide: Callable[[Sequence[int], int], Sequence[range]] = even_groups
) -> Outcome:
    """Rows {variant, servers, gbit_per_s, round, ...} of fresh processes, in random order; the floor of each start is
    its largest part at the link's rate.

    The first process has one half of the cores, the others share the other one: with three processes on two cores, the
    two behind the first place their weights on one. ``divide`` says which parts each brings; it is asked here, and the
    processes are told. Raises StageError for more processes than the layers give work.
    """
    config = profile.section("fetchers", FetchersConfig)
    most = Need("fetchers.servers", max(config.servers), LAYERS, "take fewer")
    check([most], ModelFacts(profile.model))
    setting = start_setting(profile, config.questions, config.tokens, config.readers)
    manifest = read_manifest(setting.folder)
    parts = {count: divided(manifest, count, divide) for count in (1, *config.servers)}
    common = FetchSpec(**setting.common | {"staged": str(setting.folder), "others": setting.theirs})
    starts = list(product(config.gbit_per_s, parts, range(config.rounds)))
    random.Random(profile.seed).shuffle(starts)
    rows: Rows = []
    for rate, count, round_ in track(starts, desc="starts with fetchers", unit="start"):
        spec = replace(common, variant=WHOLE if count == 1 else FETCHED, servers=count)
        spec = replace(spec, layers=tuple((span.start, span.stop) for span in parts[count]))
        rows.append({"round": round_} | one_trial(spec, TrialLink(rate, BUCKET, cold=False), module=TRIAL))
    largest = {
        count: max(bytes_of(manifest, span, with_ends=span is layers[0]) for span in layers)
        for count, layers in parts.items()
    }
    floors = {
        floor_name(rate, count): {"value": 8e-9 * size / rate, "unit": "s", "why": f"{size:,} bytes over its link"}
        for rate, (count, size) in product(config.gbit_per_s, largest.items())
    }
    divisions = {"layers": {str(count): [[span.start, span.stop] for span in spans] for count, spans in parts.items()}}
    return Outcome(rows, floors, provenance=setting.provenance | divisions)


def floor_name(gbit_per_s: float, servers: int) -> str:
    """Return the name of the floor of such a start's first token."""
    return f"first token, {servers} over {gbit_per_s:g} Gbit/s"


# What notebook 56 shows of starts with fetchers, drawn from a result alone, and the picture that it opens with.


def schematic() -> Schematic:
    """Draw a replica whose layers come one by one, and the neighbour that runs those that are missing."""
    alt = (
        "A replica is loading a model of eight layers. At the first token it has none of them, and a warm neighbour "
        "runs all eight. At a later token three layers have come, the replica computes these, and the neighbour runs "
        "the other five. At the end all layers are here, and nothing is borrowed. Every token is the whole model's."
    )
    sketch = Schematic(20, 7.9, alt)
    sketch.text(0.2, 0.5, "A warm neighbour runs the layers that have not come", heading=True)
    for row, (when, come) in enumerate((("first token", 0), ("later", 3), ("at the end", 8))):
        top = 1.2 + 2.7 * row
        sketch.text(3.0, top + 0.5, "replica", align="right")
        if come < 8:
            sketch.text(3.0, top + 1.6, "neighbour", align="right")
        for layer in range(8):
            x = 3.3 + 1.5 * layer
            sketch.box(x, top, "", "S3" if layer < come else "other", width=1.4, missing=layer >= come)
            if layer >= come:
                sketch.box(x, top + 1.1, "", "measured", width=1.4)
        sketch.text(15.7, top + 0.5, when, heading=True)
        if come < 8:
            sketch.text(15.7, top + 1.6, f"{8 - come} of 8 layers borrowed")
    return sketch


def first_tokens(recorded: Result | None, now: Result) -> Figure:
    """Seconds to the first token by the number of processes, one panel a rate: measured, T / k, and the floor."""
    results = over(recorded, now)
    rates = sorted({rate for shown in results for rate in shown.result.parameters["fetchers"]["gbit_per_s"]})
    fig, axes = panels(1, len(rates), figsize=(9, 4.2), squeeze=False)
    for ax, rate in zip(axes[0], rates, strict=True):
        for shown in results:
            config, result = shown.result.parameters["fetchers"], shown.result
            if rate not in config["gbit_per_s"]:
                continue
            counts = [1, *sorted(config["servers"])]
            entries = [result.summary.of("ttft_p50_s", **_place(rate, count)) for count in counts]
            for count, entry in zip(counts, entries, strict=True):
                shown.point(ax, count + 0.5 * shown.shift, entry, "measured", share=0.5)
            floors = [result.floors[floor_name(rate, count)]["value"] for count in counts]
            if shown.library is None:
                paper = [entries[0]["value"] / count for count in counts]
                ax.plot(counts, paper, "--", color=COLOURS["paper"], alpha=shown.style["alpha"])
                ax.plot(counts, floors, ":", color=COLOURS["floor"], alpha=shown.style["alpha"])
            elif floors != [shown.library.floors[floor_name(rate, count)]["value"] for count in counts]:
                ax.plot(counts, floors, ":", color=COLOURS["floor"], **shown.style)
            ax.set_xticks(counts if shown is results[0] else ax.get_xticks())
        ax.set(xlabel="processes", title=f"links of {rate:g} Gbit/s", ylim=(0, None))
    axes[0, 0].set_ylabel("first token after the request, s")
    look = LOOKS["measured"]
    handles = [
        handle(color=look.colour, marker=look.marker, linestyle="", label="measured"),
        handle(color=COLOURS["paper"], linestyle="--", label="paper: T / k"),
        handle(color=COLOURS["floor"], linestyle=":", label="floor: the largest part over its link"),
    ]
    axes[0, -1].legend(handles=handles, loc="lower left", fontsize=8)
    fig.suptitle("k processes that fetch a part each bring the first token in nearly T / k on slow links")
    name_results(fig, results, "ttft_p50_s")
    return fig


def fetch_rows(recorded: Result | None, now: Result) -> Table:
    """The table of first tokens, of all layers being in the first process, and of bytes, by link and processes."""
    columns = {
        "over whole": ("ttft_x", 2, {"than": WHOLE}),
        "over T / k": ("ttft_x", 2, {"than": SHARE}),
        "all layers in the first, over whole": ("loaded_x", 2, {"than": WHOLE}),
        "bytes over the model's": ("moved_x", 2, {"than": MODEL}),
    }
    for shown in over(recorded, now):
        summary, config = shown.result.summary, shown.result.parameters["fetchers"]
        for rate, count in product(config["gbit_per_s"], (1, *config["servers"])):
            one_fetcher_s = summary.value("ttft_p50_s", **_place(rate, 1))
            line = {
                "links and processes": f"{rate:g} Gbit/s, {count}",
                "paper: T / k, s": f"{one_fetcher_s / count:.2f}",
                "measured, s": interval(summary.of("ttft_p50_s", **_place(rate, count)), 2),
                "floor, s": f"{shown.result.floors[floor_name(rate, count)]['value']:.2f}",
            }
            yield line | cells(summary, columns, **_place(rate, count)) | {"whose": shown.who()}


def _place(rate: float, count: int) -> dict[str, str | float | int]:
    if count == 1:
        return {"variant": WHOLE, "gbit_per_s": rate}
    return {"variant": FETCHED, "servers": count, "gbit_per_s": rate}
