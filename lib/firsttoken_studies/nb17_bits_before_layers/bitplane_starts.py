"""Cold starts by what waits: nothing, a block of layers, or the low bits of every weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from firsttoken.assets.needs import ModelFacts, check
from firsttoken.progressiveserve.base_model import ServedConfig, ServedModel, load_served
from firsttoken.progressiveserve.evaluation import QualityConfig
from firsttoken.study.dtypes import named
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_extras.bitplanes.layouts import SPLITS
from firsttoken_extras.bitplanes.plane_plan import PlaneOrder, plane_after_plane
from firsttoken_studies.nb13_cold_start.study import disk_speed, trial_specs
from firsttoken_studies.nb17_bits_before_layers.frontier import PrecisionConfig
from firsttoken_studies.progressiveserve.coldstart.checkpoints import (
    bare_checkpoint,
    checkpoint_root,
    planes_checkpoint,
)
from firsttoken_studies.progressiveserve.coldstart.harness import one_trial, wire_for
from firsttoken_studies.progressiveserve.coldstart.summary import PROCESS, REQUEST, by_link, link_floor, ratio, values
from firsttoken_studies.progressiveserve.coldstart.trial import TrialSpec
from firsttoken_studies.record.results import Outcome, Rows, distinct, rows_where

WHOLE, LAYERS, LOSSLESS = "whole_streamed", "progressive", "lossless"
BEHIND = ", torch behind"  # of a start whose first token comes before torch is imported


@dataclass(frozen=True)
class Start:
    """A start that is timed under ``name``: a trial, and how many stages its checkpoint has."""

    name: str
    spec: TrialSpec
    stages: int


def precision_start(profile: Profile, *, order: PlaneOrder = plane_after_plane) -> Outcome:
    """First tokens of the whole model as it is stored, of the report's stages and of every split, from cold files over
    each link and from this disk, each going on until all weights are there; in lean layers, as ``serve`` computes.

    ``order`` says which planes come first. Another than the library's is staged in a folder that is gone afterwards,
    and always has torch first.
    """
    config = profile.section("precision", PrecisionConfig)
    quality = profile.section("quality", QualityConfig)
    check(profile.section("served", ServedConfig).needs(), ModelFacts(profile.model))
    served = load_served(profile)
    with checkpoint_root(order is not plane_after_plane) as root:
        rows, floors = _timed(_starts(profile, config, quality.questions, served, order, root), config)
    return Outcome(rows, floors, provenance=served.provenance)


def _timed(starts: Sequence[Start], config: PrecisionConfig) -> tuple[Rows, dict[str, Any]]:
    """Rows of each of ``starts`` over each link, and what a link takes for all bytes."""
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
    return rows, floors


def _starts(
    profile: Profile, config: PrecisionConfig, questions: str, served: ServedModel, order: PlaneOrder, root: Path
) -> list[Start]:
    served = replace(served, stored=named(config.stored))
    by_layer = trial_specs(profile, bare_checkpoint(served), questions, config.readers)
    by_layer_names = {WHOLE: "whole_behind", LAYERS: "progressive_behind"}
    starts = []
    for name, behind in by_layer_names.items():
        starts.append(Start(name, replace(by_layer(name), lean=True, digest=True), 3))
        recover = starts[-1].spec.recover
        starts.append(Start(name + BEHIND, replace(by_layer(behind), recover=recover, digest=True), 3))
    for split in config.start_splits:
        checkpoint = planes_checkpoint(served, split, order, root)
        of_split, stages = trial_specs(profile, checkpoint, questions, config.readers), len(checkpoint.manifest.stages)
        options = {"lean": True, "recover": stages > 1, "digest": True}
        starts.append(Start(split, replace(of_split("progressive"), **options), stages))
        rounded = any(layout.code_bits for layout in SPLITS[split].values())  # which torch alone decodes
        if order is plane_after_plane and not rounded:
            starts.append(Start(split + BEHIND, replace(of_split("progressive_behind"), **options), stages))
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
