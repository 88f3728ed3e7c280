"""Schedulers under a load that changes, with a heavy tenant among light ones: simulated, one load and clock for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.engine import Engine
from firsttoken.engine.latency_metrics import serve_items
from firsttoken.engine.request import Request, ScheduledChunk
from firsttoken.engine.schedulers.sarathi import Deadline, Sarathi
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.workload_items import Item
from firsttoken.sarathi.capacity import STRICT, TIMES, Objective
from firsttoken.sarathi.policy import Policy
from firsttoken.sarathi.policy_text import place_of
from firsttoken.simulation.hardware import Hardware
from firsttoken.simulation.lengths import lengths
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_studies.record.results import Outcome, Rows, frame_of, rows_where

# Schedulers that know what each request is promised: Niyama's classes of service (Goel et al., arXiv 2503.22562).


def earliest_due(first_s: Sequence[float]) -> type[Sarathi]:
    """Schedule as Sarathi with its budget as it is; of the waiting prompts the one whose first token is due first
    begins first.

    The first token of request ``number`` is due ``first_s[number]`` seconds after its arrival. Where all are promised
    the same time this is first come, first served.
    """

    class EarliestDue(Sarathi):
        name: ClassVar[str] = "earliest_due"

        def budget(self, decodes: Sequence[ScheduledChunk]) -> int:
            self.sort_waiting(lambda request: (request.arrival_s + first_s[request.number], request.number))
            return self.config.token_budget

    return EarliestDue


def slo_deadline(first_s: Sequence[float]) -> type[Deadline]:
    """``Deadline`` with a promise for each request, as in ``earliest_due``. Of Niyama's three parts it has two, chunks
    by slack and prompts by deadline; nobody is put aside who is too late."""

    class OwnDeadline(Deadline):
        name: ClassVar[str] = "own_deadline"

        def first_s(self, request: Request) -> float:
            return first_s[request.number]

    return OwnDeadline


SLO_SCHEDULERS: dict[str, Callable[[Sequence[float]], type[Sarathi]]] = {
    "earliest_due": earliest_due,
    "deadline": slo_deadline,
}
"""How such a scheduler is made, by the name that a profile has for it."""


# A load that changes: requests of many light tenants and of a heavy one, at a rate that is now low and now high.

LIGHT, HEAVY = 50, 90  # percentiles: light tenants' prompts are up to the one, the heavy one's from the other on


@dataclass(frozen=True)
class Phases:
    """``rate`` requests a second on average of a phase of factor 1; each of ``factors`` holds for ``phase_s`` seconds.

    ``heavy`` is the share of requests that the heavy tenant sends.
    """

    rate: float
    factors: tuple[float, ...]
    phase_s: float
    heavy: float

    def __post_init__(self) -> None:
        if not self.factors or min(self.rate, self.phase_s, *self.factors) <= 0 or not 0 < self.heavy < 1:
            raise ProfileError(
                "changing load: rate, phase_s and all factors must be above 0, heavy between 0 and 1, and at least "
                "one factor given"
            )

    @property
    def count(self) -> int:
        """The requests expected in all phases; so many come in every draw."""
        return max(2, round(self.rate * self.phase_s * sum(self.factors)))

    def times_s(self, seed: int) -> np.ndarray:
        """Arrival times [count], ascending: a Poisson process of changing rate, given how many come in all."""
        expected = np.concatenate([[0.0], np.cumsum(self.factors)])
        uniform = np.sort(np.random.default_rng([seed, 0]).random(self.count)) * expected[-1]
        return np.interp(uniform, expected, self.phase_s * np.arange(len(expected)))

    def phase_at(self, at_s: np.ndarray) -> np.ndarray:
        """The number of the phase at each of ``at_s`` [n]; after the last it is still the last."""
        return np.minimum(np.asarray(at_s) // self.phase_s, len(self.factors) - 1).astype(int)


@dataclass(frozen=True)
class ChangingLoad:
    """A workload, and which of its requests are the ``heavy`` tenant's [requests]."""

    items: tuple[Item, ...]
    heavy: np.ndarray

    @classmethod
    def drawn(cls, pairs: np.ndarray, phases: Phases, seed: int) -> ChangingLoad:
        """Lengths from ``pairs`` [n, 2] of (prompt, answer) tokens, with replacement; at least one of either kind."""
        draw, count = np.random.default_rng([seed, 1]), phases.count
        heavy = np.zeros(count, dtype=bool)
        heavy[draw.permutation(count)[: min(count - 1, max(1, round(phases.heavy * count)))]] = True
        low, high = np.percentile(pairs[:, 0], [LIGHT, HEAVY])
        light = draw.choice(pairs[pairs[:, 0] <= low], size=count)
        chosen = np.where(heavy[:, None], draw.choice(pairs[pairs[:, 0] >= high], size=count), light).tolist()
        times = phases.times_s(seed).tolist()
        items = (
            Item(arrival_s, prompt, answer, (0,) * prompt)
            for arrival_s, (prompt, answer) in zip(times, chosen, strict=True)
        )
        return cls(tuple(items), heavy)


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
    for seed, name, times in track(cases, desc="changing load"):
        load = ChangingLoad.drawn(pairs, config, seed)
        served = _Served(config, load, _serve(config, hardware, costs, load, name, times * iteration_s))
        case = {"seed": seed, "scheduler": name} | ({"objective": times} if name in TOLD else {})
        strict_s = TIMES[STRICT] * iteration_s
        rows.append({"what": "run"} | case | served.measures() | {"late": served.late(strict_s)})
        for objective in (times,) if name in TOLD else config.objectives:
            rows.append(
                {"what": "within"} | case | {"objective": objective, "share": served.within(objective * iteration_s)}
            )
        rows += [{"what": "phase"} | case | row for row in served.by_phase()]
    floors = {"decode_iteration": {"value": iteration_s, "unit": "s", "why": "a step that only decodes"}}
    return Outcome(rows, floors, provenance=hardware.provenance(costs))


def _serve(
    config: ChangingConfig, hardware: Hardware, costs: Costs, load: ChangingLoad, name: str, tbt_s: float
) -> list[Request]:
    policy = Policy.named(name)
    if (slo_scheduler := SLO_SCHEDULERS.get(policy.kind)) is not None:
        policy = replace(policy, kind=slo_scheduler(np.where(load.heavy, config.heavy_s, config.light_s).tolist()))
    settings = replace(policy.config(Objective(tbt_s), config.batch), wait_s=config.wait_s)
    return serve_items(Engine(SimulatedExecutor(costs, hardware.blocks), settings), load.items)


class _Served:
    """The times that the clients of one run saw."""

    def __init__(self, config: ChangingConfig, load: ChangingLoad, requests: Sequence[Request]) -> None:
        self.config, self.heavy, self.requests = config, load.heavy, requests
        self.arrivals = np.array([request.arrival_s for request in requests])
        self.begun = np.array([request.begun_s for request in requests])
        self.ttft = np.array([request.ttft_s for request in requests])
        self.due = np.where(load.heavy, config.heavy_s, config.light_s)
        self.gaps = [np.diff(request.times_s) for request in requests]

    def measures(self) -> dict[str, float]:
        """Return the measures of all requests, and of either kind of tenant."""
        measured = {"tbt_p99_s": float(np.percentile(np.concatenate(self.gaps), 99))}
        for tenant, of_tenant in zip(TENANTS, (~self.heavy, self.heavy), strict=True):
            for q in QUANTILES:
                measured[f"{tenant}_ttft_p{q}_s"] = float(np.percentile(self.ttft[of_tenant], q))
        overtaken = self.begun[:, None] - self.arrivals >= self.config.wait_s  # [young, old]
        overtaken &= (self.arrivals[:, None] > self.arrivals) & (self.begun[:, None] < self.begun)
        return measured | {
            "longest_wait_s": float((self.begun - self.arrivals).max()),
            "overtaken": int(overtaken.sum()),
        }

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
        """Yield by phase the median TTFT of requests that arrived in it, and the P99 gap of tokens that came in it."""
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
    summary, runs, within = Summary(), frame_of(strict(rows, "run")), frame_of(rows, what="within")
    for name, scheduler_runs in runs.groupby("scheduler", sort=False):
        labels = place_of(name)
        summary.by(scheduler_runs, {}, {"tbt_p99_s": ("tbt_p99_s", "mean", "s")}, **labels)
        for tenant in TENANTS:
            times = {f"ttft_p{q}_s": (f"{tenant}_ttft_p{q}_s", "mean", "s") for q in QUANTILES}
            summary.by(scheduler_runs, {}, times, **labels, tenant=tenant)
        rest = {"longest_wait_s": ("longest_wait_s", "mean", "s"), "late_pct": ("late", "mean", "%", 100)}
        summary.by(scheduler_runs, {}, rest, **labels)
        overtaken = {"value": scheduler_runs.overtaken.sum(), "n": len(scheduler_runs), "unit": "pairs of requests"}
        summary.add("overtaken", overtaken, **labels)
    above = []
    for times, objective_rows in within.groupby("objective", sort=False):
        shares = {
            name: scheduler_runs.share.to_numpy()
            for name, scheduler_runs in objective_rows.groupby("scheduler", sort=False)
        }
        for name, share_values in shares.items():
            summary.add("within_pct", bootstrap(share_values).summary("%", 100), **place_of(name), objective=times)
        rivals = [share_values for name, share_values in shares.items() if name.startswith(RIVALS)]
        if ADAPTIVE in shares and rivals:
            distance = bootstrap(shares[ADAPTIVE] - np.max(rivals, axis=0)).summary("points", 100)
            above.append(summary.add("within_points", distance, **ABOVE_BEST, objective=times))
    if above:
        worst = min(above, key=lambda entry: entry["value"])
        summary.add("within_points", worst, **ABOVE_BEST, across="worst")
    return summary


def strict(rows: Rows, kind: str) -> Rows:
    """The rows of ``kind`` under the strict objective: those of a scheduler that knows no objective are all."""
    return [row for row in rows_where(rows, what=kind) if row.get("objective", TIMES[STRICT]) == TIMES[STRICT]]
