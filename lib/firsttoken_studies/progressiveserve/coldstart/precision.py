"""Cold starts by what waits: nothing, a block of layers, or the low bits of every weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from firsttoken.assets.needs import ModelFacts, check
from firsttoken.progressiveserve.checkpoint.plan import staged
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.progressiveserve.examination import QualityConfig
from firsttoken.progressiveserve.planes.layouts import planes_of
from firsttoken.progressiveserve.served import ServedConfig, ServedModel, load_served
from firsttoken.study import paths
from firsttoken.study.dtypes import named
from firsttoken.study.measures import Summary
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import bootstrap
from firsttoken_studies.progressiveserve.coldstart.experiments import disk_speed, trial_specs
from firsttoken_studies.progressiveserve.coldstart.harness import link_key, one_trial, wire_for
from firsttoken_studies.progressiveserve.coldstart.materials import (
    Checkpoint,
    planes_checkpoint,
    stored_source,
    write_stock,
)
from firsttoken_studies.progressiveserve.coldstart.summary import PROCESS, REQUEST, link_floor, ratio, values
from firsttoken_studies.progressiveserve.coldstart.trial import TrialSpec
from firsttoken_studies.progressiveserve.frontier import PrecisionConfig

WHOLE, LAYERS, LOSSLESS = "whole_streamed", "progressive", "lossless"


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
        found: Rows = []
        for round_ in tqdm(range(rounds), desc=f"cold starts, {wire.name}", unit="round", disable=None):
            found.append(one_trial(read, wire) | {"round": round_})
            for start in starts if round_ % 2 == 0 else starts[::-1]:  # a machine that drifts favours nobody
                label = {"variant": start.name, "round": round_, "stages": start.stages}
                found.append(one_trial(start.spec, wire) | label)
        if not found:
            continue
        rows += found
        floors[f"link {wire.name}"] = link_floor(found)
    return Outcome(rows, floors, provenance=served.provenance)


def _starts(profile: Profile, config: PrecisionConfig, questions: str, served: ServedModel) -> list[Start]:
    stored = named(config.stored)
    source, parent = stored_source(served, stored), paths.CACHE / "checkpoints"
    name, block = f"{served.sha256[:12]}-{config.stored}", served.plan.block
    folder = parent / f"{name}-{block[0]}-{block[-1]}-bare"
    manifest = write_staged(source, staged(source.names, served.plan), folder)
    stock = write_stock(source, parent / f"{name}-stock")
    bare = Checkpoint(folder, stock, manifest, served.plan, served.provenance)
    by_layer = trial_specs(profile, bare, questions, config.readers)
    starts = [Start(name, replace(by_layer(name), lean=True, digest=True), 3) for name in (WHOLE, LAYERS)]
    for split in config.start_splits:
        cut = planes_checkpoint(served, stored, split)
        spec = trial_specs(profile, cut, questions, config.readers)("progressive")
        spec = replace(spec, lean=True, recover=planes_of(split) > 1, digest=True)
        starts.append(Start(split, spec, planes_of(split)))
    return starts


def precision_start_summary(rows: Rows, _: Mapping[str, Any]) -> Summary:
    """By link and start: TTFT from arrival and from process creation, over the plain whole model's and the losslessly
    coded one's; bytes before the first token and in all; time until every weight is exact over the whole model's."""
    summary = Summary()
    for key in dict.fromkeys(link_key(row) for row in rows):
        found = [row for row in rows if link_key(row) == key]
        plain = values(found, "read", "bytes")[0]
        complete = [row | {REQUEST: row[REQUEST] + _later(row)} for row in found if row["variant"] != "read"]
        exact = {row["weights_sha256"] for row in found if row["variant"] == WHOLE}
        for name in dict.fromkeys(row["variant"] for row in complete):
            place = {"variant": name, "link": key}
            summary.add("ttft_p50_s", bootstrap(values(found, name, REQUEST), "median").summary("s"), **place)
            summary.add("process_ttft_p50_s", bootstrap(values(found, name, PROCESS), "median").summary("s"), **place)
            share = values(found, name, "bytes")[0] / plain
            summary.add("byte_share", {"value": share, "unit": "of the bytes"}, **place)
            if name == WHOLE:
                continue
            beside = place | {"than": WHOLE}
            summary.add("ttft_x", ratio(found, name, WHOLE).summary("x"), **beside)
            summary.add("process_ttft_x", ratio(found, name, WHOLE, PROCESS).summary("x"), **beside)
            summary.add("full_time_x", ratio(complete, name, WHOLE).summary("x"), **beside)
            same = {row["weights_sha256"] for row in found if row["variant"] == name} == exact
            summary.add("same_weights", {"value": same, "unit": "bit by bit, in every start"}, **beside)
            if LOSSLESS in {row["variant"] for row in found} - {name}:
                summary.add("ttft_x", ratio(found, name, LOSSLESS).summary("x"), **place, than=LOSSLESS)
            if any("full_bytes" in row for row in found if row["variant"] == name):
                share = values(found, name, "full_bytes")[0] / plain
                summary.add("full_byte_share", {"value": share, "unit": "of the bytes"}, **place)
    return summary


def _later(row: dict[str, Any]) -> float:
    """Seconds from the first token until every stage was there."""
    return sum(row.get(f"stage{stage}_s", 0.0) for stage in range(2, row["stages"] + 1))
