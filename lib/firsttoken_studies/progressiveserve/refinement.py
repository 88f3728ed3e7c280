"""Planes merged under running generations: what clients feel of it, what it takes, what they are told afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from firsttoken.assets.corpora import running_text, token_windows
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check, text_of
from firsttoken.progressiveserve.planes.layouts import SPLITS
from firsttoken.progressiveserve.served import ServedConfig, ServedModel, load_served
from firsttoken.study.clock import timed
from firsttoken.study.dtypes import named
from firsttoken.study.errors import ProfileError
from firsttoken.study.measures import Entry, Summary
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import bootstrap
from firsttoken_studies.progressiveserve.coldstart.harness import make_cold
from firsttoken_studies.progressiveserve.coldstart.materials import (
    Checkpoint,
    planes_checkpoint,
    prompt_of,
    whole_checkpoint,
)
from firsttoken_studies.progressiveserve.frontier import PrecisionConfig
from firsttoken_studies.progressiveserve.handover import handover_rows, handover_summary, same_logits
from firsttoken_studies.progressiveserve.timeline import peak_growth, timeline_process
from firsttoken_studies.progressiveserve.timeline_trial import TimelineSpec

WHOLE, STILL, KEPT, AGAIN = "whole", "still", "kept", "again"
ASKED_FOR_S = 0.5
"""Seconds in which clients ask: each once, before the first token of any."""

COPIED = 1 << 28  # bytes


@dataclass(frozen=True)
class RefinementConfig:
    """``clients`` generate ``new_tokens`` each while the planes of ``split`` arrive over a token bucket of
    ``gbit_per_s``; each of ``timelines`` runs ``runs`` times.

    "whole" is the plain model in one stage, "still" stays at the first bits, "kept" goes on over what the first bits
    wrote, "again" computes it again when every weight is exact. What either does to the ``continue_tokens`` that follow
    is compared on ``windows`` of text at each of ``contexts`` tokens.
    """

    questions: str
    split: str
    gbit_per_s: float
    clients: int
    new_tokens: int
    timelines: tuple[str, ...]
    runs: int
    contexts: tuple[int, ...]
    windows: int
    continue_tokens: int

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ProfileError(f"refinement.split: no split {self.split!r}; known: {', '.join(SPLITS)}")
        if odd := set(self.timelines) - {WHOLE, STILL, KEPT, AGAIN}:
            raise ProfileError(f"refinement.timelines: no timeline {min(odd)!r}; known: whole, still, kept, again")
        if min(self.contexts) < 2 or self.continue_tokens < 1:
            raise ProfileError("refinement.contexts must be 2 tokens or more, and continue_tokens 1")

    def needs(self) -> list[Need]:
        """The context and the text hold the longest sequence, the context an answer and a token more."""
        longest = max(self.contexts) + self.continue_tokens
        return [
            Need("refinement.contexts + continue_tokens", longest, CONTEXT),
            Need("refinement.windows x (contexts + continue_tokens)", self.windows * longest, text_of("test")),
            Need("refinement.new_tokens", self.new_tokens + 1, CONTEXT),
        ]


def refinement_under_load(profile: Profile) -> Outcome:
    """Open generations while planes arrive and are merged between steps, each timeline in a fresh process with cold
    files; and how far what follows the hand-over is from what the exact weights say."""
    config = profile.section("refinement", RefinementConfig)
    check([*profile.section("served", ServedConfig).needs(), *config.needs()], ModelFacts(profile.model))
    served = load_served(profile)
    stored = named(profile.section("precision", PrecisionConfig).stored)
    cut = planes_checkpoint(served, stored, config.split)
    whole = whole_checkpoint(replace(served, stored=stored))
    device, dtype = profile.torch_device(), profile.torch_dtype()
    provenance, prompt, size = served.provenance, _prompt(profile, config, served), _bytes(served, dtype)
    longest = max(config.contexts) + config.continue_tokens
    windows = token_windows(running_text("test"), served.tokenizer, longest, config.windows).tolist()
    del served  # the children need the memory, and the cores
    rows: Rows = [{"row": "copy", "gb_per_s": _copy_rate(device)}, {"row": "model", "bytes": size}]
    jobs = [(run, name) for run in range(config.runs) for name in config.timelines[:: 1 if run % 2 == 0 else -1]]
    for run, name in tqdm(jobs, desc="timelines", unit="start", disable=None):
        found = _timeline(whole if name == WHOLE else cut, name, prompt, profile, config)
        rows += [{"case": name, "run": run} | row for row in found]
    rows.append({"row": "logits", "same": same_logits(cut, whole, windows[0], device, dtype)})
    rows += handover_rows(cut, windows, config.contexts, config.continue_tokens, device, dtype)
    return Outcome(rows, provenance=provenance)


def _prompt(profile: Profile, config: RefinementConfig, served: ServedModel) -> list[int]:
    return served.tokenizer.encode(prompt_of(profile, config.questions))


def _bytes(served: ServedModel, computing: torch.dtype) -> int:
    """Of the weights as they compute."""
    return sum(parameter.numel() for parameter in served.model.parameters()) * computing.itemsize


def _copy_rate(device: torch.device) -> float:
    """GB/s of a copy in the memory of ``device``, each byte counted once: the median of five."""
    source, target = (torch.ones(COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    return COPIED / 1e9 / float(np.median(timed(lambda: target.copy_(source), repeats=5, device=device)))


def _timeline(checkpoint: Checkpoint, case: str, prompt: list[int], profile: Profile, config: RefinementConfig) -> Rows:
    make_cold(sorted(checkpoint.staged.rglob("*.safetensors")))
    spec = TimelineSpec(
        folder=str(checkpoint.staged),
        prompt=prompt,
        upgrade=case in (KEPT, AGAIN),
        policy="naive" if case == KEPT else "prefill again",
        gbit_per_s=config.gbit_per_s,
        clients=config.clients,
        new_tokens=config.new_tokens,
        duration_s=ASKED_FOR_S,
        sample_s=0.05,
        threads=profile.threads,
        device=str(profile.torch_device()),
        dtype=profile.dtype_name,
        recover=case != STILL,
    )
    rows = timeline_process(asdict(spec), case)
    return [row for row in rows if row["row"] != "memory" or not row["at_s"]]  # the first is what it grew from


def refinement_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """A step with and without merges, the longest gap between two tokens while planes come, what merging takes of the
    memory's rate, peaks over the model, and the divergence after the hand-over."""
    summary = handover_summary([row for row in rows if row["row"] == "handover"])
    (logits,) = (row["same"] for row in rows if row["row"] == "logits")
    summary.add("same_logits", {"value": logits, "unit": "as the plain whole model's, bit by bit"})
    (copied,) = (row["gb_per_s"] for row in rows if row["row"] == "copy")
    summary.add("copy_gb_per_s", {"value": copied, "unit": "GB/s"})
    (size,) = (row["bytes"] for row in rows if row["row"] == "model")
    runs = range(parameters["refinement"]["runs"])
    peaks: dict[str, list[float | None]] = {}
    for case in dict.fromkeys(row["case"] for row in rows if "case" in row):
        found = [[row for row in rows if row.get("case") == case and row["run"] == run] for run in runs]
        _case(partial(summary.add, case=case), found, parameters)
        peaks[case] = [peak_growth(each, size) for each in found]
    _peaks(summary, {case: each for case, each in peaks.items() if None not in each})
    merged = [row for row in rows if "merged_bytes" in row and row["case"] == KEPT]
    if merged:
        rates = [row["merged_bytes"] / 1e9 / row["merging_s"] for row in merged]
        shares, longest = [rate / copied for rate in rates], [1000 * row["longest_merge_s"] for row in merged]
        summary.add("merge_gb_per_s", bootstrap(rates, "median").summary("GB/s of 16-bit weights"))
        summary.add("merge_x", bootstrap(shares, "median").summary("of the copy's rate"), than="copy")
        summary.add("longest_merge_ms", bootstrap(longest, "median").summary("ms"))
    step = summary.get("step_ms", case=STILL)
    for case in (KEPT, AGAIN):
        if step and (gap := summary.get("longest_gap_ms", case=case)):
            share = {name: gap[name] / step["value"] for name in ("value", "low", "high") if name in gap}
            summary.add("longest_gap_x", gap | share | {"unit": "steps"}, case=case, than="step")
    return summary


def _peaks(summary: Summary, peaks: Mapping[str, list[float]]) -> None:
    """By how much the process grew, over the weights as they compute, and over what the plain whole model's did."""
    for case, each in peaks.items():
        grown = bootstrap(each, "median").summary("x the weights as they compute")
        summary.add("peak_memory_x", grown, case=case, than="model")
    for case in peaks if WHOLE in peaks else ():
        if case != WHOLE:
            shares = [own / whole for own, whole in zip(peaks[case], peaks[WHOLE], strict=True)]
            summary.add("peak_memory_x", bootstrap(shares, "median").summary("x"), case=case, than=WHOLE)


def _case(add: Callable[..., Entry], runs: list[Rows], parameters: Mapping[str, Any]) -> None:
    """The measures of one timeline over its ``runs``."""
    gaps = [high - low for rows in runs for low, high in token_gaps(rows)]
    short = [
        row["tokens"] != parameters["refinement"]["new_tokens"] for rows in runs for row in rows if "tokens" in row
    ]
    add("short_requests", {"value": sum(short), "n": len(short), "unit": "requests"})
    if gaps:
        add("step_ms", bootstrap([1000 * gap for gap in gaps], "median").summary("ms"))
        add("any_gap_ms", {"value": 1000 * max(gaps), "n": len(gaps), "unit": "ms, the longest"})
    if all(windows := [refining(rows) for rows in runs]):
        within = [_within(rows, *window) for rows, window in zip(runs, windows, strict=True)]
        add("refining_s", bootstrap([end - start for start, end in windows], "median").summary("s"))
        if all(within):
            longest, each = [1000 * max(gaps) for gaps in within], [1000 * gap for gaps in within for gap in gaps]
            add("longest_gap_ms", bootstrap(longest, "median").summary("ms, while planes came"))
            add("refining_step_ms", bootstrap(each, "median").summary("ms"))


def token_gaps(rows: Rows) -> list[tuple[float, float]]:
    """When two tokens of one client came after one another, in s."""
    clients: dict[int, list[float]] = {}
    for row in rows:
        if row["row"] == "token":
            clients.setdefault(row["client"], []).append(row["at_s"])
    return [pair for times in clients.values() for pair in pairwise(times)]


def refining(rows: Rows) -> tuple[float, float] | None:
    """From when to when planes came and were merged, in s; None where none did."""
    events = [row for row in rows if row["row"] == "event" and row["stage"] > 1]
    begun = [row["at_s"] for row in events if row["what"] == "loading"]
    ended = [row["at_s"] for row in events if row["what"] == "arrived"]
    return (min(begun), max(ended)) if begun and ended else None


def _within(rows: Rows, start: float, end: float) -> list[float]:
    return [high - low for low, high in token_gaps(rows) if high > start and low < end]
