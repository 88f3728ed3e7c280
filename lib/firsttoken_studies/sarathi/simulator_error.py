"""The simulator against a real GPU: requests that vLLM served on the card whose operators were profiled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from firsttoken.assets.manual_downloads import downloaded
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.latency_metrics import serve_items
from firsttoken.engine.request import Request
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.workload.workload_items import Item
from firsttoken.sarathi.hardware import Hardware
from firsttoken.study.errors import CorpusError
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows, frame_of
from firsttoken.study.summary import Entry, Summary

FIELDS = ("input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")
VLLM, SIMULATED = "vllm", "simulated"
RUNS = {SIMULATED: True, "simulated without prefix caching": False}  # whether blocks are kept and found again
METRICS = ("ttft", "tpot", "latency")
QUANTILES = {"mean": np.mean, "p50": np.median, "p99": lambda values: np.percentile(values, 99)}


@dataclass(frozen=True)
class ErrorConfig:
    """The timestamps in ``requests`` (a file beside the profile), and vLLM's settings for that run.

    Its scheduler fills a step with decodes and then with chunks, as Sarathi's; who is preempted recomputes, from what
    is left of its own blocks, which prefix caching keeps as long as nobody needs them. ``blocks`` are those it had.
    """

    requests: str
    token_budget: int
    batch: int
    blocks: int


def simulator_error(profile: Profile) -> Outcome:
    """Rows {request, run, ttft_s, tpot_s, latency_s}; ``run`` is ``VLLM`` or one of ``RUNS``."""
    config, hardware = profile.section("simulator_error", ErrorConfig), profile.section("hardware", Hardware)
    costs = hardware.read()
    settings = config.blocks, config.batch, config.token_budget
    engines = {run: as_vllm(costs, *settings, share_prefixes=shared) for run, shared in RUNS.items()}
    rows = beside_vllm(downloaded(hardware.costs) / config.requests, engines)
    return Outcome(rows, provenance=hardware.provenance(costs))


def as_vllm(costs: Costs, blocks: int, batch: int, token_budget: int, *, share_prefixes: bool = True) -> Engine:
    """The simulator on ``costs`` with ``blocks`` KV blocks and vLLM's settings: at most ``batch`` requests and
    ``token_budget`` tokens a step."""
    settings = EngineConfig(
        scheduler="sarathi",
        watermark=0.0,
        requests=batch,
        token_budget=token_budget,
        share_prefixes=share_prefixes,
    )
    return Engine(SimulatedExecutor(costs, blocks), settings)


def beside_vllm(requests: Path, engines: Mapping[str, Engine]) -> Rows:
    """Rows {request, run, ttft_s, tpot_s, latency_s} of the run whose timestamps are the file ``requests``, and of the
    same lengths and arrivals in each of ``engines``.

    Raises CorpusError for a file that cannot be read.
    """
    served = read_requests(requests)
    start = min(row["queued_ts"] for row in served)
    items = [
        Item(row["queued_ts"] - start, tokens := int(row["input_toks"]), int(row["output_toks"]), (number,) * tokens)
        for number, row in enumerate(served)  # no two prompts begin alike: their text is not published
    ]
    rows: Rows = [{"request": number, "run": VLLM} | measured(row) for number, row in enumerate(served)]
    for run, engine in engines.items():
        answered = enumerate(serve_items(engine, items))
        rows += [{"request": number, "run": run} | simulated(request) for number, request in answered]
    return rows


def read_requests(path: Path) -> list[dict[str, float]]:
    """vLLM's timestamps, a JSON object a line, by the time of queueing.

    Raises CorpusError naming file, line and mend for a line that is no such object, or whose times run backwards.
    """
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path}: cannot be read ({error}); bring it again") from error
    for line, text in enumerate(lines, 1):
        try:
            row = {name: float(json.loads(text)[name]) for name in FIELDS}
        except (ValueError, TypeError, KeyError) as error:
            raise CorpusError(f"{path}, line {line}: is no request with {', '.join(FIELDS)}; bring it again") from error
        if not row["queued_ts"] <= row["first_token_ts"] <= row["last_token_ts"] or min(row.values()) < 0:
            raise CorpusError(f"{path}, line {line}: its times run backwards; bring it again")
        found.append(row)
    if not found:
        raise CorpusError(f"{path}: holds no request; bring it again")
    return sorted(found, key=lambda row: row["queued_ts"])


def measured(row: Mapping[str, float]) -> dict[str, float]:
    decoding_s = row["last_token_ts"] - row["first_token_ts"]
    return {
        "ttft_s": row["first_token_ts"] - row["queued_ts"],
        "tpot_s": decoding_s / max(1.0, row["output_toks"] - 1),
        "latency_s": row["last_token_ts"] - row["queued_ts"],
    }


def simulated(request: Request) -> dict[str, float]:
    return {
        "ttft_s": request.ttft_s,
        "tpot_s": request.tpot_s or 0.0,
        "latency_s": request.times_s[-1] - request.arrival_s,
    }


def error_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize how far the simulator is off, in % of vLLM's: mean, median and P99 of each metric, and the worst; the
    worst without prefix caching, too."""
    summary = Summary()
    for run in RUNS:
        off = off_pct(rows, run)
        for measure, entry in off.items() if run == SIMULATED else ():
            summary.add(measure, entry, source=run, than=VLLM)
        summary.add("off_pct", worst(off.values()), source=run, than=VLLM, across="worst")
    return summary


def off_pct(rows: Rows, run: str) -> dict[str, Entry]:
    """How far ``run`` is off, in % of vLLM's, by measure: each of ``QUANTILES`` of each of ``METRICS``."""
    ours, real = frame_of(rows, run=run), frame_of(rows, run=VLLM)
    found = {}
    for metric, (name, made) in product(METRICS, QUANTILES.items()):
        mine, theirs = (float(made(times[f"{metric}_s"].to_numpy())) for times in (ours, real))
        found[f"{metric}_{name}_off_pct"] = {"value": 100 * (mine / theirs - 1), "n": len(real), "unit": "%"}
    return found


def worst(off: Iterable[Entry]) -> Entry:
    """The entry that is farthest from 0, without its sign."""
    entry = max(off, key=lambda one: abs(one["value"]))
    return entry | {"value": abs(entry["value"])}
