"""Serving while it grows, over time: tokens, stages, memory (the report's 90 + 19 + 19 s against 114)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check, weight_bytes
from firsttoken.progressiveserve.base_model import ServedConfig, load_served
from firsttoken.study.errors import FirstTokenError, ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap, median_ratio
from firsttoken.study.summary import Summary
from firsttoken_studies.nb15_recovery_timeline.trial import TimelineSpec
from firsttoken_studies.progressiveserve.coldstart.checkpoints import (
    Checkpoint,
    prompt_of,
    served_checkpoint,
    whole_checkpoint,
)
from firsttoken_studies.progressiveserve.coldstart.harness import make_cold
from firsttoken_studies.record.results import Outcome, Rows, frame_of, rows_where


@dataclass(frozen=True)
class TimelineConfig:
    """``clients`` ask one request after another, ``new_tokens`` each, for ``duration_s`` seconds from a cold start.

    The link is a token bucket of ``gbit_per_s``; every case runs ``runs`` times, in turn.
    """

    questions: str
    gbit_per_s: float
    clients: int
    new_tokens: int
    duration_s: float
    sample_s: float
    runs: int

    def needs(self) -> list[Need]:
        """Require a context that holds an answer and, by the prompt's own length, more."""
        return [Need("timeline.new_tokens", self.new_tokens + 1, CONTEXT)]

    def check_duration(self, size: int) -> None:
        """Raise ProfileError where the clients would be gone before ``size`` bytes have come over the link."""
        needed = 8e-9 * size / self.gbit_per_s if self.gbit_per_s else 0.0
        if needed > self.duration_s:
            raise ProfileError(
                f"timeline.duration_s: the whole model takes {needed:.0f} s over {self.gbit_per_s:g} Gbit/s and the "
                f"clients leave after {self.duration_s:g}: raise it, or timeline.gbit_per_s"
            )


CASES = ("whole", "pinned", "upgrade")
"""The whole model at once; progressively, requests ending as they began; progressively, open requests moving over."""


def stage_of(now: int, best: int, moves: bool) -> int:
    """Return the stage that computes a request's next token, where ``now`` has computed the last one, and a ``best``
    has come since."""
    return best if moves else now


def recovery_timeline(profile: Profile, *, stage_of: Callable[[int, int, bool], int] = stage_of) -> Outcome:
    """Serve the same clients by a plain start and two progressive ones, each in a fresh process with cold files.

    ``stage_of`` is asked here, of each pair of stages, and the other process is told which of them requests move
    between.
    """
    config = profile.section("timeline", TimelineConfig)
    check([*profile.section("served", ServedConfig).needs(), *config.needs()], ModelFacts(profile.model))
    config.check_duration(weight_bytes(profile.model, profile.torch_dtype()))
    served = load_served(profile)
    progressive, whole_checkpoint_served = served_checkpoint(profile, served), whole_checkpoint(served)
    prompt = served.tokenizer.encode(prompt_of(profile, config.questions))
    provenance = served.provenance
    del served  # the children need the memory, and the cores
    rows: Rows = []
    cases = [(run, case) for run in range(config.runs) for case in (CASES if run % 2 == 0 else CASES[::-1])]
    for run, case in track(cases, desc="timelines", unit="start"):
        checkpoint = whole_checkpoint_served if case == "whole" else progressive
        pairs = combinations(range(1, len(checkpoint.manifest.stages) + 1), 2)
        moves = [(now, best) for now, best in pairs if stage_of(now, best, case == "upgrade") == best]
        timeline = _one_timeline(checkpoint, moves, prompt, profile, config)
        rows += [{"case": case, "run": run} | row for row in [{"row": "moves", "pairs": moves}, *packed(timeline)]]
    return Outcome(rows, provenance=provenance)


def _one_timeline(
    checkpoint: Checkpoint, moves: list[tuple[int, int]], prompt: list[int], profile: Profile, config: TimelineConfig
) -> Rows:
    """The rows of one timeline from cold files, in a process of its own.

    Raises FirstTokenError when it fails, with its last line.
    """
    make_cold(sorted(checkpoint.staged.rglob("*.safetensors")))
    spec = TimelineSpec(
        folder=str(checkpoint.staged),
        prompt=prompt,
        moves=moves,
        gbit_per_s=config.gbit_per_s,
        clients=config.clients,
        new_tokens=config.new_tokens,
        duration_s=config.duration_s,
        sample_s=config.sample_s,
        threads=profile.threads,
        device=str(profile.torch_device()),
        dtype=profile.dtype_name,
    )
    command = [sys.executable, "-m", "firsttoken_studies.nb15_recovery_timeline.trial"]
    done = subprocess.run(command, input=json.dumps(asdict(spec)), capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise FirstTokenError(f"the timeline of {checkpoint.staged.name} failed: {reason}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def packed(rows: Rows) -> Rows:
    """The rows of one timeline with the tokens of each request in its own row, as lists: a record has tens of thousands
    of them. Times are cut to microseconds."""
    tokens = frame_of(rows, row="token")
    lists = {
        key: {
            "token_s": [round(time_s, 6) for time_s in request_tokens.at_s],
            "stages": request_tokens.stage.astype(int).tolist(),
        }
        for key, request_tokens in (tokens.groupby(["client", "request"]) if len(tokens) else ())
    }
    others = [row for row in rows if row["row"] != "token"]
    return [row | lists.get((row["client"], row["request"]), {}) if row["row"] == "request" else row for row in others]


def unpacked(rows: Rows) -> Rows:
    """Undo :func:`packed`: return a row for each token; older records, which have them, stay as they are."""
    tokens = [
        {key: row[key] for key in ("case", "run", "client", "request") if key in row}
        | {"row": "token", "at_s": time_s, "stage": stage}
        for row in rows
        for time_s, stage in zip(row.get("token_s", ()), row.get("stages", ()), strict=True)
    ]
    return [*rows, *tokens]


def timeline_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize by case when tokens, a whole answer and the whole model came [s], what was handed out, and the stalls
    at a transition.

    The peaks over the model's bytes are absent where the rows do not know one of the two.
    """
    config, rows = parameters["timeline"], unpacked(rows)
    runs = range(config["runs"])
    summary = Summary()
    firsts, fulls = {}, {}
    for case in CASES:
        case_rows = rows_where(rows, case=case)
        tokens, events = frame_of(case_rows, row="token"), frame_of(case_rows, row="event")
        by_run = tokens.groupby("run").at_s.agg(["min", "count"]).reindex(runs)
        requests = [row["tokens"] for row in rows_where(case_rows, row="request")]
        short = {
            "value": sum(count != config["new_tokens"] for count in requests),
            "n": len(requests),
            "unit": "requests with a token too few or too many",
        }
        served = events[(events.what == "serving") & (events.stage == events.stage.max())]
        firsts[case], fulls[case] = by_run["min"], served.set_index("run").at_s
        summary.by(by_run, {}, {"ttft_p50_s": ("min", "median", "s")}, case=case)
        summary.by(served, {}, {"full_time_s": ("at_s", "median", "s")}, case=case)
        summary.by(by_run, {}, {"tokens": ("count", "median", "tokens")}, case=case)
        summary.add("short_requests", short, case=case)
        growth = [_loader(case_rows, run) for run in runs]
        if None not in growth:
            summary.add("peak_memory_x", bootstrap(growth, "median").summary("x"), case=case, than="model")
        memory_rows = [row for row in case_rows if {"device_peak_bytes", "model_bytes"} <= row.keys()]
        if on_device := [row["device_peak_bytes"] / row["model_bytes"] for row in memory_rows]:
            peak = bootstrap(on_device, "median").summary("x")
            summary.add("peak_device_memory_x", peak, case=case, than="model")
        if excess := [stall for run in runs for stall in stalls(case_rows, run)]:
            beyond = bootstrap(excess, "median").summary("ms beyond a decode turn and the move")
            summary.add("excess_stall_ms", beyond, case=case)
    answered = {case: first_answers(rows_where(rows, case=case), config["new_tokens"], runs) for case in CASES}
    for case, seconds in answered.items():
        if None not in seconds:
            summary.add("first_answer_s", bootstrap(seconds, "median").summary("s"), case=case)
            if case != "whole" and None not in answered["whole"]:
                slowdown = median_ratio(seconds, answered["whole"]).summary("x")
                summary.add("first_answer_x", slowdown, case=case, than="whole")
    for measure, by_case in (("ttft_x", firsts), ("full_time_x", fulls)):
        ratios = (by_case["pinned"] / by_case["whole"]).dropna()  # by run
        summary.add(measure, bootstrap(ratios, "median").summary("x"), case="pinned", than="whole")
    return summary


def first_answers(rows: Rows, new_tokens: int, runs: Iterable[int]) -> list[float | None]:
    """Return when the first ``new_tokens`` tokens of the clients' first answers were there, in seconds from the start.

    For each of ``runs`` this is the median over the clients, None where one of them had fewer by the end.
    """
    medians: list[float | None] = []
    for run in runs:
        tokens = frame_of(rows, run=run, row="token", request=0)
        answers = [sorted(client_times) for _, client_times in (tokens.groupby("client").at_s if len(tokens) else ())]
        complete = bool(answers) and min(map(len, answers)) >= new_tokens
        medians.append(
            float(np.median([client_times[new_tokens - 1] for client_times in answers])) if complete else None
        )
    return medians


def _loader(rows: Rows, run: int) -> float | None:
    """Return how many times the model's bytes the process grew in one run, from the moment its libraries were in memory
    to its peak; None where one of these is unknown."""
    (peak,) = rows_where(rows, run=run, row="peak")
    before, model_bytes = rows_where(rows, run=run, row="memory")[0]["rss_bytes"], peak.get("model_bytes")
    if None in (before, peak["rss_bytes"], model_bytes):
        return None
    return (peak["rss_bytes"] - before) / model_bytes


def stalls(rows: Rows, run: int) -> list[float]:
    """Return, for each request that was decoding when a stage took over, the ms between the tokens around that moment,
    less the median turn and less what moving sessions over took."""
    events = rows_where(rows, run=run, row="event")
    moments = [row for row in rows_where(events, what="serving") if row["stage"] > 1]
    gaps = _token_gaps(rows_where(rows, run=run))
    usual = float(np.median([high - low for low, high in gaps])) if gaps else 0.0
    stalls_ms = []
    for moment in moments:
        moved = sum(row["took_s"] for row in rows_where(events, stage=moment["stage"]) if "took_s" in row)
        stalls_ms += [1000 * (high - low - usual - moved) for low, high in gaps if low <= moment["at_s"] < high]
    return stalls_ms


def _token_gaps(rows: Rows) -> list[tuple[float, float]]:
    """Return the times, in s, of each two successive tokens of a request."""
    tokens = frame_of(rows, row="token")
    times_of_requests = tokens.groupby(["client", "request"], sort=False).at_s if len(tokens) else ()
    return [pair for _, times in times_of_requests for pair in pairwise(times)]
