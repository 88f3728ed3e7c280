"""Who gives way, how it comes back, and in which order: every rule with every other, on the same draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from firsttoken.cps.policies import make_policy
from firsttoken.cps.policies.cross_point import BothEnds
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.preemption import PreemptionPolicy
from firsttoken.engine.preemption.resume import RESUME_ORDERS
from firsttoken.engine.request import Kind, Request
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.workload_items import Arrivals, Item, serve_items, with_arrivals
from firsttoken.simulation.costs.published import PublishedCosts
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap, share_below
from firsttoken.study.summary import Summary
from firsttoken_studies.nb22_cross_point_scheduler.study import HOST_BLOCKS, ReplayedConfig, calibrated, drawn
from firsttoken_studies.nb24_who_is_preempted.study import LIFO, RULES, victim_of
from firsttoken_studies.record.results import Outcome, Rows


@dataclass(frozen=True)
class Recovery:
    """How victims come back: a policy for the costs of a run, and whether blocks are written through as they fill."""

    policy: Callable[[Costs], PreemptionPolicy]
    written_through: bool = False


RECOVERIES: dict[str, Recovery] = {
    "swap": Recovery(lambda costs: make_policy("swap")),
    "recompute": Recovery(lambda costs: make_policy("recompute")),
    "cross_point": Recovery(lambda costs: make_policy("cross_point")),
    "online": Recovery(lambda costs: make_policy("online")),
    "both_ends": Recovery(BothEnds),
    "write_through": Recovery(lambda costs: make_policy("swap"), written_through=True),
    "both_ends_written": Recovery(lambda costs: BothEnds(costs, written_through=True), written_through=True),
}
BASE = f"{LIFO} cross_point in_order"  # CPS as it is published
VLLM = "last_admitted recompute in_order"  # vLLM's default


@dataclass(frozen=True)
class LeagueConfig:
    """``seeds`` draws from ``first_seed`` on of ``short`` + ``long`` conversations into ``blocks`` KV blocks of 16
    tokens: all at once where ``rate_per_s`` is 0, else as a Poisson process.

    Each of ``victims`` runs with each of ``recoveries`` in each of ``orders``; one that is "aged" lets others go ahead
    for ``aged_s``. A request is in time whose first token comes within ``ttft_s`` and each further one within
    ``gap_s``, and starved where it waits longer than ``starved_s`` for one.
    """

    first_seed: int
    seeds: int
    short: int
    long: int
    blocks: int
    rate_per_s: float
    victims: tuple[str, ...]
    recoveries: tuple[str, ...]
    orders: tuple[str, ...]
    aged_s: float
    ttft_s: float
    gap_s: float
    starved_s: float

    def __post_init__(self) -> None:
        if min(self.seeds, self.short, self.long, self.blocks) < 1 or self.rate_per_s < 0:
            raise ProfileError("league: seeds, short, long and blocks must be at least 1, and rate_per_s not below 0")
        for names, known_names, kind in (
            (self.victims, RULES, "victim"),
            (self.recoveries, RECOVERIES, "recovery"),
            (self.orders, RESUME_ORDERS, "resume order"),
        ):
            if unknown_name := next((name for name in names if name not in known_names), ""):
                raise ProfileError(f"league: no {kind} {unknown_name!r}; {unknown(unknown_name, known_names)}")


MEASURES = {  # of a run: column of the rows -> measure of the summary, unit
    "p99_tpot_ms": ("tpot_p99_ms", "ms"),
    "mean_ttft_ms": ("ttft_mean_ms", "ms"),
    "p99_ttft_ms": ("ttft_p99_ms", "ms"),
    "in_time_pct": ("in_time_pct", "% of the requests"),
    "computed_again_pct": ("computed_again_pct", "% of the tokens"),
    "longest_gap_s": ("longest_gap_s", "s"),
    "starved": ("starved", "requests"),
    "preemptions": ("preemptions", ""),
}


COMPARED = (  # with what, column of the rows, measure of the summary
    (BASE, "p99_tpot_ms", "tpot_p99_below_pct"),
    (BASE, "mean_ttft_ms", "ttft_mean_below_pct"),
    (VLLM, "computed_again_pct", "computed_again_below_pct"),
    (VLLM, "mean_ttft_ms", "ttft_mean_below_pct"),
)


def league(profile: Profile) -> Outcome:
    """All conversations at once, as in CPS: see ``cells_of``."""
    return cells_of(profile.section("league", LeagueConfig))


def league_open(profile: Profile) -> Outcome:
    """Conversations that come one by one, at nearly the rate that the engine can serve: see ``cells_of``."""
    return cells_of(profile.section("league_open", LeagueConfig))


def cells_of(config: LeagueConfig) -> Outcome:
    """Rows {victim, recovery, order, seeds, and for each of ``MEASURES`` a list by seed}, prefill first, on the costs
    of CPS's Table 2."""
    seeds = list(range(config.first_seed, config.first_seed + config.seeds))
    set_up = ReplayedConfig(config.seeds, config.short, config.long, config.blocks, (), ())
    loads = {seed: drawn(set_up, seed) for seed in seeds}
    costs = PublishedCosts(decode_s=calibrated([loads[seed] for seed in seeds[:3]], config.blocks))
    if config.rate_per_s:
        loads = {seed: with_arrivals(items, Arrivals(config.rate_per_s, seed)) for seed, items in loads.items()}
    rows: Rows = []
    for case in track(list(product(config.victims, config.recoveries, config.orders)), desc="league"):
        runs = [run_of(loads[seed], costs, config, *case, seed=seed) for seed in seeds]
        named = dict(zip(("victim", "recovery", "order"), case, strict=True)) | {"seeds": seeds}
        rows.append(named | {name: [round(run[name], 4) for run in runs] for name in MEASURES})
    source = "ShareGPT lengths on the costs of CPS Table 2; no model runs"
    return Outcome(rows, provenance={"source": source, "kind": "replayed"})


def run_of(
    items: Sequence[Item], costs: Costs, config: LeagueConfig, victim: str, recovery: str, order: str, *, seed: int
) -> dict[str, float]:
    """Return what the clients of one run saw, and what it computed again."""
    way = RECOVERIES[recovery]
    executor = SimulatedExecutor(costs, config.blocks, host_blocks=HOST_BLOCKS, write_through=way.written_through)
    settings = EngineConfig(
        victim=victim_of(victim, costs, seed),
        resume=order,
        wait_s=config.aged_s,
        watermark=0.0,
        prefill_tokens=2560,
        token_budget=1 << 20,
    )
    engine = Engine(executor, settings, policy=way.policy(costs))
    requests = serve_items(engine, items)
    again = engine.token_counts[Kind.RECOMPUTE] / sum(engine.token_counts.values())
    return _of_clients(requests, config) | {"computed_again_pct": 100 * again}


def _of_clients(requests: Sequence[Request], config: LeagueConfig) -> dict[str, float]:
    first_s = np.array([request.ttft_s for request in requests])
    gaps = np.array([np.diff(request.times_s).max(initial=0.0) for request in requests])
    tpot = [seconds for request in requests if (seconds := request.tpot_s) is not None]
    return {
        "p99_tpot_ms": float(np.percentile(tpot, 99)) * 1e3,
        "mean_ttft_ms": float(first_s.mean()) * 1e3,
        "p99_ttft_ms": float(np.percentile(first_s, 99)) * 1e3,
        "in_time_pct": 100 * float(((first_s <= config.ttft_s) & (gaps <= config.gap_s)).mean()),
        "longest_gap_s": float(gaps.max()),
        "starved": float((gaps > config.starved_s).sum()),
        "preemptions": float(sum(request.preemptions for request in requests)),
    }


def league_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize each cell, and by how much it lies below CPS as it is published and below vLLM's default, on the same
    draws."""
    summary = Summary()
    cells = {f"{row['victim']} {row['recovery']} {row['order']}": row for row in rows}
    for name, row in cells.items():
        labels = {"variant": row["victim"], "policy": row["recovery"], "case": row["order"]}
        for column, (measure, unit) in MEASURES.items():
            summary.add(measure, bootstrap(row[column]).summary(unit), **labels)
        for than, column, measure in COMPARED:
            if name != than and than in cells and any(cells[than][column]):
                below = share_below(row[column], cells[than][column])
                summary.add(measure, below.summary("%", 100), **labels, than=than)
    return summary
