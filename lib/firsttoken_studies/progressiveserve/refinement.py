"""Planes merged under running generations: what clients feel of it, what it takes, what they are told afterwards.

The last is what keys and values that coarse weights wrote do to the tokens that exact weights make after the hand-over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from firsttoken.assets.corpora import running_text, token_windows
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check, text_of
from firsttoken.progressiveserve.base_model import ServedConfig, ServedModel, load_served
from firsttoken.progressiveserve.staged_serving.probe import Probe
from firsttoken.progressiveserve.staged_serving.transitions import TRANSITIONS
from firsttoken.study.dtypes import named
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap, median_ratio
from firsttoken.study.summary import Entry, Summary
from firsttoken.study.timing import synchronise, timed
from firsttoken_extras.bitplanes.layouts import SPLITS
from firsttoken_studies.progressiveserve.coldstart.checkpoints import (
    Checkpoint,
    planes_checkpoint,
    prompt_of,
    whole_checkpoint,
)
from firsttoken_studies.progressiveserve.frontier import PrecisionConfig
from firsttoken_studies.progressiveserve.open_session import LoadedStages
from firsttoken_studies.progressiveserve.timeline import first_answers, one_timeline, peak_growth, token_gaps
from firsttoken_studies.record.results import Outcome, Rows, frame_of, rows_where

KEEP, REDO = TRANSITIONS["naive"], TRANSITIONS["prefill again"]


def handover_rows(
    checkpoint: Checkpoint,
    windows: Sequence[Sequence[int]],
    contexts: Sequence[int],
    following: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Rows:
    """One row a window, context and position after the hand-over: how far the next token's chances are from those of
    exact weights on exact keys and values, in nats (KL), where the old ones are kept, and where weights stay coarse.

    The text of ``windows`` is what follows, whatever the model would have said. Rows of position 0 say what a prefill
    again takes, and a step.
    """
    cases = [(index, context) for index in range(len(windows)) for context in contexts]
    longest, requests = max(contexts) + following, 3 * len(cases)
    model = LoadedStages(checkpoint, device, dtype, tokens=longest, requests=requests)
    model.bring(1)
    begun = partial(model.begun, 1, policy=KEEP)
    text = {case: (windows[case[0]][: case[1]], windows[case[0]][case[1] : case[1] + following]) for case in cases}
    probes = {case: (begun(before[:-1]), begun(before[:-1])) for case, (before, _) in text.items()}
    coarse = {
        case: _told(begun(before[:-1]), [before[-1], *after[:-1]])
        for case, (before, after) in track(text.items(), desc="first bits", unit="text")
    }
    model.bring(*model.stages[1:])
    better = partial(model.view, model.last)
    rows: Rows = []
    for case, (probe, again) in track(probes.items(), desc="after the hand-over", unit="text"):
        before, after = text[case]
        label = {"row": "handover", "window": case[0], "context_tokens": case[1]}
        rows.append(label | {"position": 0, "redo_ms": _ms(lambda p=again: p.carry(better(REDO), REDO), device)})
        probe.carry(better(KEEP), KEEP)
        fed = [before[-1], *after[:-1]]
        exact = _told(again, fed)
        pairs = zip(exact, _told(probe, fed), coarse.pop(case), strict=True)
        for position, (right, answered, stale) in enumerate(pairs, 1):
            rows.append(
                label
                | {
                    "position": position,
                    "kl_kept": _divergence(right, answered),
                    "kl_coarse": _divergence(right, stale),
                    "same_kept": bool(answered.argmax() == right.argmax()),
                    "same_coarse": bool(stale.argmax() == right.argmax()),
                }
            )
    return rows


def same_logits(
    planes: Checkpoint, whole_checkpoint: Checkpoint, ids: Sequence[int], device: torch.device, dtype: torch.dtype
) -> bool:
    """Return whether the model that came in planes gives the same logits after ``ids``, bit by bit, as the plain whole
    model."""
    logits = []
    for checkpoint in (planes, whole_checkpoint):
        model = LoadedStages(checkpoint, device, dtype, tokens=len(ids))
        for stage in model.stages:
            model.bring(stage)
        logits.append(model.begun(model.last, ids[:-1], KEEP).feed(ids[-1:]))
    return torch.equal(*logits)


def _told(probe: Probe, ids: Sequence[int]) -> Tensor:
    """Logits [tokens, vocabulary] after each of ``ids``."""
    return torch.stack([probe.feed([token]) for token in ids])


def _divergence(exact_logits: Tensor, found_logits: Tensor) -> float:
    """KL of two distributions over the vocabulary in nats, from logits [vocabulary]."""
    exact, other = (logits.double().log_softmax(-1) for logits in (exact_logits, found_logits))
    return float((exact.exp() * (exact - other)).sum())


def _ms(compute: Any, device: torch.device) -> float:
    synchronise(device)
    begin = time.perf_counter()
    compute()
    synchronise(device)
    return 1000 * (time.perf_counter() - begin)


def handover_summary(rows: Rows) -> Summary:
    """Summarize by context length: mean KL at the first position and over all, and how often the likeliest token
    is that of the exact weights, where keys and values are kept, beside weights that stay coarse; what a prefill again
    takes."""
    summary, frame = Summary(), frame_of(rows)
    for context, context_rows in frame.groupby("context_tokens", sort=False) if len(frame) else ():
        after, first = context_rows[context_rows.position > 0], context_rows[context_rows.position == 1]
        summary.by(context_rows, {}, {"redo_ms": ("redo_ms", "median", "ms")}, context_tokens=context)
        for name in ("kept", "coarse"):
            labels, kl, same = {"case": name, "context_tokens": context}, f"kl_{name}", f"same_{name}"
            summary.by(first, {}, {"kl_first_nats": (kl, "mean", "nats")}, **labels)
            means = after.astype({same: float}).groupby("window", sort=False)[[kl, same]].mean()
            measures = {"kl_nats": (kl, "mean", "nats"), "same_token_pct": (same, "mean", "%", 100)}
            summary.by(means, {}, measures, **labels)
    return summary


WHOLE, STILL, KEPT, AGAIN = "whole", "still", "kept", "again"
ASKED_FOR_S = 0.5
"""Seconds in which clients ask: each once, before the first token of any."""

COPIED = 1 << 28  # bytes
ANSWER_TOKENS = 24  # of a first answer, as in the study of stages of layers


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
        if unknown := set(self.timelines) - {WHOLE, STILL, KEPT, AGAIN}:
            raise ProfileError(f"refinement.timelines: no timeline {min(unknown)!r}; known: whole, still, kept, again")
        if min(self.contexts) < 2 or self.continue_tokens < 1:
            raise ProfileError("refinement.contexts must be 2 tokens or more, and continue_tokens 1")

    def needs(self) -> list[Need]:
        """Require a context and a text that hold the longest sequence, and a context for an answer and a token more."""
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
    served = replace(load_served(profile), stored=named(profile.section("precision", PrecisionConfig).stored))
    cut, uncut = planes_checkpoint(served, config.split), whole_checkpoint(served)
    device, dtype = profile.torch_device(), profile.torch_dtype()
    provenance, prompt, size = served.provenance, _prompt(profile, config, served), _bytes(served, dtype)
    longest = max(config.contexts) + config.continue_tokens
    windows = token_windows(running_text("test"), served.tokenizer, longest, config.windows).tolist()
    del served  # the children need the memory, and the cores
    rows: Rows = [{"row": "copy", "gb_per_s": _copy_rate(device)}, {"row": "model", "bytes": size}]
    jobs = [(run, name) for run in range(config.runs) for name in config.timelines[:: 1 if run % 2 == 0 else -1]]
    for run, name in track(jobs, desc="timelines", unit="start"):
        policy = "naive" if name == KEPT else "prefill again"
        options = {"upgrade": name in (KEPT, AGAIN), "policy": policy, "recover": name != STILL}
        options |= {"duration_s": ASKED_FOR_S, "sample_s": 0.05}
        timeline = one_timeline(uncut if name == WHOLE else cut, name, prompt, profile, config, **options)
        # the first is what it grew from
        selected = (row for row in timeline if row["row"] != "memory" or not row["at_s"])
        rows += [{"case": name, "run": run} | row for row in selected]
    rows.append({"row": "logits", "same": same_logits(cut, uncut, windows[0], device, dtype)})
    rows += handover_rows(cut, windows, config.contexts, config.continue_tokens, device, dtype)
    return Outcome(rows, provenance=provenance)


def _prompt(profile: Profile, config: RefinementConfig, served: ServedModel) -> list[int]:
    return served.tokenizer.encode(prompt_of(profile, config.questions))


def _bytes(served: ServedModel, computing: torch.dtype) -> int:
    """Return the bytes of the weights in the dtype in which they compute."""
    return sum(parameter.numel() for parameter in served.model.parameters()) * computing.itemsize


def _copy_rate(device: torch.device) -> float:
    """GB/s of a copy in the memory of ``device``, each byte counted once: the median of five."""
    source, target = (torch.ones(COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    return COPIED / 1e9 / float(np.median(timed(lambda: target.copy_(source), repeats=5, device=device)))


def refinement_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """A step with and without merges, the longest gap between two tokens while planes come, what merging takes of the
    memory's rate, peaks over the model, and the divergence after the hand-over."""
    summary = handover_summary(rows_where(rows, row="handover"))
    (logits,), (copy,), (model,) = (rows_where(rows, row=kind) for kind in ("logits", "copy", "model"))
    summary.add("same_logits", {"value": logits["same"], "unit": "as the plain whole model's, bit by bit"})
    summary.add("copy_gb_per_s", {"value": copy["gb_per_s"], "unit": "GB/s"})
    runs = range(parameters["refinement"]["runs"])
    peaks: dict[str, list[float | None]] = {}
    for case in dict.fromkeys(row["case"] for row in rows if "case" in row):
        run_rows = [rows_where(rows, case=case, run=run) for run in runs]
        _case(partial(summary.add, case=case), run_rows, parameters)
        peaks[case] = [peak_growth(rows_of_run, model["bytes"]) for rows_of_run in run_rows]
    _peaks(summary, {case: growths for case, growths in peaks.items() if None not in growths})
    _first_answers(summary, {case: first_answers(rows_where(rows, case=case), ANSWER_TOKENS, runs) for case in peaks})
    if merged := [row for row in rows_where(rows, case=KEPT) if "merged_bytes" in row]:
        rates = frame_of(merged).assign(gb_per_s=lambda frame: frame.merged_bytes / 1e9 / frame.merging_s)
        rates["share"] = rates.gb_per_s / copy["gb_per_s"]
        summary.by(rates, {}, {"merge_gb_per_s": ("gb_per_s", "median", "GB/s of 16-bit weights")})
        summary.by(rates, {}, {"merge_x": ("share", "median", "of the copy's rate")}, than="copy")
        summary.by(rates, {}, {"longest_merge_ms": ("longest_merge_s", "median", "ms", 1000)})
    step = summary.get("step_ms", case=STILL)
    for case in (KEPT, AGAIN):
        if step and (gap := summary.get("longest_gap_ms", case=case)):
            share = {name: gap[name] / step["value"] for name in ("value", "low", "high") if name in gap}
            summary.add("longest_gap_x", gap | share | {"unit": "steps"}, case=case, than="step")
    return summary


def _peaks(summary: Summary, peaks: Mapping[str, list[float]]) -> None:
    """Add how much the process grew, over the weights as they compute, and over the growth of the plain whole model."""
    for case, growths in peaks.items():
        grown = bootstrap(growths, "median").summary("x the weights as they compute")
        summary.add("peak_memory_x", grown, case=case, than="model")
    for case in [case for case in peaks if case != WHOLE] if WHOLE in peaks else ():
        ratio = median_ratio(peaks[case], peaks[WHOLE]).summary("x")
        summary.add("peak_memory_x", ratio, case=case, than=WHOLE)


def _first_answers(summary: Summary, answered: Mapping[str, list[float | None]]) -> None:
    """Add by case when the first answers were whole, and that over the same run's of the plain whole model."""
    complete = {case: seconds for case, seconds in answered.items() if None not in seconds}
    for case, seconds in complete.items():
        summary.add("first_answer_s", bootstrap(seconds, "median").summary("s"), case=case)
        if case != WHOLE and WHOLE in complete:
            summary.add("first_answer_x", median_ratio(seconds, complete[WHOLE]).summary("x"), case=case, than=WHOLE)


def _case(add: Callable[..., Entry], runs: list[Rows], parameters: Mapping[str, Any]) -> None:
    """The measures of one timeline over its ``runs``."""
    gaps = [high - low for rows in runs for low, high in token_gaps(rows, "client")]
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
            longest, gaps_ms = [1000 * max(gaps) for gaps in within], [1000 * gap for gaps in within for gap in gaps]
            add("longest_gap_ms", bootstrap(longest, "median").summary("ms, while planes came"))
            add("refining_step_ms", bootstrap(gaps_ms, "median").summary("ms"))


def refining(rows: Rows) -> tuple[float, float] | None:
    """Return the span in which planes came and were merged (from, to; in s); None where none did."""
    events = [row for row in rows_where(rows, row="event") if row["stage"] > 1]
    begun = [row["at_s"] for row in events if row["what"] == "loading"]
    ended = [row["at_s"] for row in events if row["what"] == "arrived"]
    return (min(begun), max(ended)) if begun and ended else None


def _within(rows: Rows, start: float, end: float) -> list[float]:
    return [high - low for low, high in token_gaps(rows, "client") if high > start and low < end]
