"""Schedulers under a load that changes, with a heavy tenant among light ones: simulated, one load and clock for all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from firsttoken.engine.costs.model import Costs
from firsttoken.engine.engine import Engine
from firsttoken.engine.metrics import serve_items
from firsttoken.engine.request import Request
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.sarathi.capacity import STRICT, TIMES, Objective
from firsttoken.sarathi.hardware import Hardware
from firsttoken.sarathi.lengths import lengths
from firsttoken.sarathi.policy import Policy
from firsttoken.sarathi.policy_text import place_of
from firsttoken.study.errors import ProfileError
from firsttoken.study.measures import Summary
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import bootstrap
from firsttoken_studies.sarathi.changing import ChangingLoad, Phases
from firsttoken_studies.sarathi.own_objectives import OWN_OBJECTIVES

TOLD = ("adaptive_budget", "deadline")  # which know the objective: they are run once for each
ADAPTIVE, RIVALS = "adaptive_budget", ("sarathi ", "prefill_cap", "deadline")
ABOVE_BEST = {"scheduler": ADAPTIVE, "than": "best rival"}
TRIED = 2  # draws on which the margin of ``pace`` was chosen: what is judged is drawn anew
TENANTS, QUANTILES = ("light", "heavy"), (50, 99)


@dataclass(frozen=True)
class ChangingConfig(Phases):
    """The load of ``Phases`` with lengths from ``lengths``, for each of ``seeds`` draws, at most ``batch`` at once.

    First tokens are due after ``light_s`` and ``heavy_s`` seconds; ``objectives`` for the time between two tokens are
    in decode iterations, the strict one (``capacity.TIMES``) among them. ``wait_s`` is the longest that a scheduler
    which prefers short prompts lets others wait.
    """

    lengths: str
    seeds: int
    batch: int
    light_s: float
    heavy_s: float
    wait_s: float
    objectives: tuple[int, ...]
    schedulers: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.seeds, self.batch) < 1 or min(self.light_s, self.heavy_s, self.wait_s, *self.objectives) <= 0:
            raise ProfileError("changing load: seeds and batch must be at least 1, times and objectives above 0")
        if TIMES[STRICT] not in self.objectives:
            raise ProfileError(f"changing load: objectives must have the strict one, {TIMES[STRICT]}, among them")


def changing_load(profile: Profile) -> Outcome:
    """Rows {what: run, seed, scheduler, objective (of one that knows it), tbt_p99_s, <tenant>_ttft_p50_s, ...},
    {what: within, seed, scheduler, objective, share} and {what: phase, ..., phase, ttft_p50_s, tbt_p99_s}.

    ``share`` is that of requests whose first token is in time and the P99 of whose gaps is within the objective;
    ``late`` that of requests any token of which comes after it was promised (first token, then one each objective).
    """
    config, hardware = profile.section("changing_load", ChangingConfig), profile.section("hardware", Hardware)
    costs, pairs = hardware.read(), lengths(config.lengths)
    pairs = pairs[pairs.sum(1) <= hardware.tokens]
    iteration_s = hardware.iteration_s(costs)
    rows: Rows = []
    cases = [
        (seed, name, times)
        for seed in range(profile.seed + TRIED, profile.seed + TRIED + config.seeds)
        for name in config.schedulers
        for times in (config.objectives if name in TOLD else (TIMES[STRICT],))
    ]
    for seed, name, times in tqdm(cases, desc="changing load", disable=None):
        load = ChangingLoad.drawn(pairs, config, seed)
        served = _Served(config, load, _serve(config, hardware, costs, load, name, times * iteration_s))
        case = {"seed": seed, "scheduler": name} | ({"objective": times} if name in TOLD else {})
        strict_s = TIMES[STRICT] * iteration_s
        rows.append({"what": "run"} | case | served.measures() | {"late": served.late(strict_s)})
        for asked in (times,) if name in TOLD else config.objectives:
            rows.append({"what": "within"} | case | {"objective": asked, "share": served.within(asked * iteration_s)})
        rows += [{"what": "phase"} | case | row for row in served.by_phase()]
    floors = {"decode_iteration": {"value": iteration_s, "unit": "s", "why": "a step that only decodes"}}
    return Outcome(rows, floors, provenance=hardware.provenance(costs))


def _serve(
    config: ChangingConfig, hardware: Hardware, costs: Costs, load: ChangingLoad, name: str, tbt_s: float
) -> list[Request]:
    policy = Policy.named(name)
    if (own := OWN_OBJECTIVES.get(policy.kind)) is not None:
        policy = replace(policy, kind=own(np.where(load.heavy, config.heavy_s, config.light_s).tolist()))
    settings = replace(policy.config(Objective(tbt_s), config.batch), wait_s=config.wait_s)
    return serve_items(Engine(SimulatedExecutor(costs, hardware.blocks), settings), load.items)


class _Served:
    """What the clients of one run saw."""

    def __init__(self, config: ChangingConfig, load: ChangingLoad, requests: Sequence[Request]) -> None:
        self.config, self.heavy, self.requests = config, load.heavy, requests
        self.arrivals = np.array([request.arrival_s for request in requests])
        self.begun = np.array([request.begun_s for request in requests])
        self.ttft = np.array([request.ttft_s for request in requests])
        self.due = np.where(load.heavy, config.heavy_s, config.light_s)
        self.gaps = [np.diff(request.times_s) for request in requests]

    def measures(self) -> dict[str, float]:
        """Of all requests, and of either kind of tenant."""
        found = {"tbt_p99_s": float(np.percentile(np.concatenate(self.gaps), 99))}
        for tenant, mine in zip(TENANTS, (~self.heavy, self.heavy), strict=True):
            for q in QUANTILES:
                found[f"{tenant}_ttft_p{q}_s"] = float(np.percentile(self.ttft[mine], q))
        overtaken = self.begun[:, None] - self.arrivals >= self.config.wait_s  # [young, old]
        overtaken &= (self.arrivals[:, None] > self.arrivals) & (self.begun[:, None] < self.begun)
        return found | {"longest_wait_s": float((self.begun - self.arrivals).max()), "overtaken": int(overtaken.sum())}

    def within(self, tbt_s: float) -> float:
        """The share of requests within both objectives."""
        held = [len(gaps) == 0 or np.percentile(gaps, 99) <= tbt_s for gaps in self.gaps]
        return float(np.mean((self.ttft <= self.due) & held))

    def late(self, tbt_s: float) -> float:
        """The share of requests that got a token later than it was promised."""
        promised = (arrival + due for arrival, due in zip(self.arrivals, self.due, strict=True))
        return float(
            np.mean(
                [
                    (np.array(request.times_s) > first_s + tbt_s * np.arange(len(request.times_s))).any()
                    for request, first_s in zip(self.requests, promised, strict=True)
                ]
            )
        )

    def by_phase(self) -> Iterator[dict[str, Any]]:
        """Of the requests that arrived in each phase the median first token, of the tokens that came in it the gaps."""
        arrived = self.config.phase_at(self.arrivals)
        came = self.config.phase_at(np.concatenate([request.times_s[1:] for request in self.requests]))
        gaps = np.concatenate(self.gaps)
        for phase in range(len(self.config.factors)):
            if (arrived == phase).any() and (came == phase).any():
                ttft_s = float(np.median(self.ttft[arrived == phase]))
                tbt_s = float(np.percentile(gaps[came == phase], 99))
                yield {"phase": phase, "ttft_p50_s": ttft_s, "tbt_p99_s": tbt_s}


def changing_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Times by scheduler; shares within each objective, and how many points the adaptive budget's is above the best of
    the fixed budgets' and rivals' of each draw; requests that were late; who was overtaken after the bound."""
    summary = Summary()
    runs = [row for row in rows if row["what"] == "run" and row.get("objective", TIMES[STRICT]) == TIMES[STRICT]]
    by = {name: [row for row in runs if row["scheduler"] == name] for name in _names(runs)}
    for name, mine in by.items():
        where = place_of(name)
        summary.add("tbt_p99_s", bootstrap([row["tbt_p99_s"] for row in mine]).summary("s"), **where)
        for tenant, q in itertools.product(TENANTS, QUANTILES):
            ttft = bootstrap([row[f"{tenant}_ttft_p{q}_s"] for row in mine])
            summary.add(f"ttft_p{q}_s", ttft.summary("s"), **where, tenant=tenant)
        summary.add("longest_wait_s", bootstrap([row["longest_wait_s"] for row in mine]).summary("s"), **where)
        summary.add("late_pct", bootstrap([row["late"] for row in mine]).summary("%", 100), **where)
        overtaken = {"value": sum(row["overtaken"] for row in mine), "n": len(mine), "unit": "pairs of requests"}
        summary.add("overtaken", overtaken, **where)
    above = []
    for times in dict.fromkeys(row["objective"] for row in rows if row["what"] == "within"):
        here = [row for row in rows if row["what"] == "within" and row["objective"] == times]
        shares = {name: [row["share"] for row in here if row["scheduler"] == name] for name in _names(here)}
        for name, each in shares.items():
            summary.add("within_pct", bootstrap(each).summary("%", 100), **place_of(name), objective=times)
        rivals = [each for name, each in shares.items() if name.startswith(RIVALS)]
        if ADAPTIVE in shares and rivals:
            distance = bootstrap(np.subtract(shares[ADAPTIVE], np.max(rivals, axis=0))).summary("points", 100)
            above.append(summary.add("within_points", distance, **ABOVE_BEST, objective=times))
    if above:
        worst = min(above, key=lambda entry: entry["value"])
        summary.add("within_points", worst, **ABOVE_BEST, across="worst")
    return summary


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["scheduler"] for row in rows))
