"""Who is preempted, how it comes back and in which order: rules for each with every other, on the same draws.

CPS preempts the request that came last (its section 2.2) and chooses how it comes back. Which request gives way, and
who comes back first, are choices of their own, which no report compares.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from firsttoken.cps.policies import make_policy
from firsttoken.cps.policies.cross_point import BothEnds
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.executor import Executor
from firsttoken.engine.preemption import PreemptionPolicy
from firsttoken.engine.preemption.resume import IN_ORDER, RESUME_ORDERS
from firsttoken.engine.preemption.victims import VICTIMS, Drawn, Victim, first_arrived, last_arrived, victim_named
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
from firsttoken_studies.cps.live_loads import LiveLoadsConfig
from firsttoken_studies.nb22_cross_point_scheduler.study import HOST_BLOCKS, SOURCE, ReplayedConfig, calibrated, drawn
from firsttoken_studies.record.results import Outcome, Rows

LIFO, FREED, RANDOM = "last_arrived", "most_freed_for_its_cost", "random"
RULES = (*VICTIMS, FREED)


@dataclass(frozen=True)
class WayBack:
    """The way in which victims come back: a policy for the costs of a run, and whether blocks are written through."""

    policy: Callable[[Costs], PreemptionPolicy]
    write_through: bool = False


RECOVERIES = {
    "swap": WayBack(lambda costs: make_policy("swap")),
    "recompute": WayBack(lambda costs: make_policy("recompute")),
    "cross_point": WayBack(lambda costs: make_policy("cross_point")),
    "online": WayBack(lambda costs: make_policy("online")),
    "both_ends": WayBack(BothEnds),
    "write_through": WayBack(lambda costs: make_policy("swap"), write_through=True),
    "both_ends_written": WayBack(lambda costs: BothEnds(costs, written_through=True), write_through=True),
}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "prefill_first": {"scheduler": "prefill_first", "prefill_tokens": 2560, "token_budget": 1 << 20},
    "sarathi 512": {"scheduler": "sarathi", "token_budget": 512, "requests": 256},
    "sarathi 8192, 128 requests": {"scheduler": "sarathi", "token_budget": 8192, "requests": 128},  # as vLLM 44594
}
AGED_S = 5.0  # how long others may go ahead of a request under the resume order "aged"
IN_TIME_S = 10.0, 1.0  # to the first token, and between any two
STARVED_S = 30.0  # a wait for one token
CPS, VLLM = f"{LIFO} cross_point", "last_admitted recompute"  # in order, as they are published


@dataclass(frozen=True)
class VictimsConfig:
    """``seeds`` draws from ``first_seed`` on, beyond the profile's, of ``short`` + ``long`` conversations into each of
    ``pools`` KV blocks of 16 tokens: the fewer blocks, the more requests give way. They come all at once where
    ``rate_per_s`` is 0, else as a Poisson process. Each of ``victims`` runs with each of ``recoveries`` and ``orders``
    of coming back under each of ``schedulers``."""

    first_seed: int
    seeds: int
    short: int
    long: int
    rate_per_s: float
    pools: tuple[int, ...]
    victims: tuple[str, ...]
    recoveries: tuple[str, ...]
    orders: tuple[str, ...]
    schedulers: tuple[str, ...]

    def __post_init__(self) -> None:
        if min(self.seeds, self.short, self.long, *self.pools) < 1 or self.rate_per_s < 0:
            raise ProfileError("victims: seeds, short, long and pools must be at least 1, and rate_per_s not below 0")
        check_rules(self.victims, self.recoveries, self.orders)
        if absent := next((name for name in self.schedulers if name not in SCHEDULERS), ""):
            raise ProfileError(f"victims: no scheduler {absent!r}; {unknown(absent, SCHEDULERS)}")


def check_rules(victims: Sequence[str], recoveries: Sequence[str], orders: Sequence[str]) -> None:
    """Raise ProfileError for a victim, a recovery or a resume order whose name is unknown."""
    for names, known_names, kind in (
        (victims, RULES, "victim"),
        (recoveries, RECOVERIES, "recovery"),
        (orders, RESUME_ORDERS, "resume order"),
    ):
        if unknown_name := next((name for name in names if name not in known_names), ""):
            raise ProfileError(f"victims: no {kind} {unknown_name!r}; {unknown(unknown_name, known_names)}")


def victim_of(name: str, costs: Costs, seed: int, overrides: Mapping[str, Victim] | None = None) -> Victim:
    """Return the victim rule called ``name``: one of a reader's ``overrides``, one that needs ``costs`` or a ``seed``,
    or the engine's."""
    if name == RANDOM:
        return Drawn(seed)
    if name == FREED:

        def freed_for_its_cost(request: Request) -> tuple[float, int]:
            swap_s = costs.swap_out_s(request.cached) + costs.swap_in_s(request.cached)
            cheapest_s = min(swap_s, costs.step_s([(0, request.cached)], []))
            return len(request.blocks) / cheapest_s, request.order

        return lambda running: max(running, key=freed_for_its_cost)
    return (overrides or {}).get(name) or victim_named(name)


MEASURES = {  # of a run: column of the rows -> measure of the summary, unit
    "p99_tpot_ms": ("tpot_p99_ms", "ms"),
    "mean_ttft_ms": ("ttft_mean_ms", "ms"),
    "p99_ttft_ms": ("ttft_p99_ms", "ms"),
    "in_time_pct": ("in_time_pct", "% of the requests"),
    "computed_again_pct": ("computed_again_pct", "% of the tokens"),
    "recomputed": ("recomputed_tokens", "tokens"),
    "longest_gap_s": ("longest_gap_s", "s"),
    "starved": ("starved", "requests"),
    "preemptions": ("preemptions", ""),
}


def victims(
    profile: Profile, *, last_that_came: Victim = last_arrived, first_that_came: Victim = first_arrived
) -> Outcome:
    """All conversations at once, under several loads and schedulers: see ``cells_of``. Both rules may be a reader's, in
    place of the engine's."""
    overrides = {LIFO: last_that_came, "first_arrived": first_that_came}
    return cells_of(profile.section("victims", VictimsConfig), profile.seed, overrides)


def league(profile: Profile) -> Outcome:
    """All conversations at once, every rule with every other: see ``cells_of``."""
    return cells_of(profile.section("league", VictimsConfig), profile.seed)


def league_open(profile: Profile) -> Outcome:
    """Conversations that come one by one, at nearly the rate that the engine can serve: see ``cells_of``."""
    return cells_of(profile.section("league_open", VictimsConfig), profile.seed)


def league_copies(profile: Profile) -> Outcome:
    """All conversations at once, with blocks written through and recoveries from both ends: see ``cells_of``."""
    return cells_of(profile.section("league_copies", VictimsConfig), profile.seed)


def cells_of(config: VictimsConfig, seed: int, overrides: Mapping[str, Victim] | None = None) -> Outcome:
    """Rows {blocks, scheduler, recovery, victim, order, seeds, and for each of ``MEASURES`` a list by seed}, on the
    costs of CPS's Table 2, the price of a decode step set by the first three draws. ``overrides`` stand for the
    engine's of their name."""
    set_up = ReplayedConfig(config.seeds, config.short, config.long, max(config.pools), (), ())
    seeds = [seed + config.first_seed + number for number in range(config.seeds)]
    loads = {seed: drawn(set_up, seed) for seed in seeds}
    costs = PublishedCosts(decode_s=calibrated([loads[seed] for seed in seeds[:3]], max(config.pools)))
    if config.rate_per_s:
        loads = {seed: with_arrivals(items, Arrivals(config.rate_per_s, seed)) for seed, items in loads.items()}
    named = ("blocks", "scheduler", "recovery", "victim", "order")
    every = product(config.pools, config.schedulers, config.recoveries, config.victims, config.orders)
    rows: Rows = []
    for case in track([dict(zip(named, values, strict=True)) for values in every], desc="victims"):
        runs = [run_with(loads[seed], costs, case | {"seed": seed}, overrides) for seed in seeds]
        rows.append(case | {"seeds": seeds} | lists_by_seed(runs))
    return Outcome(rows, provenance={"source": SOURCE, "kind": "replayed"})


def table_2(seed: int) -> PublishedCosts:
    """The costs of CPS's Table 2, with the price of a decode step that three draws of its set-up give."""
    set_up = ReplayedConfig(3, 100, 100, 512, (), ())
    return PublishedCosts(decode_s=calibrated([drawn(set_up, seed + number) for number in range(3)], set_up.blocks))


def run_with(
    items: Sequence[Item], costs: Costs, case: Mapping[str, Any], overrides: Mapping[str, Victim] | None = None
) -> dict[str, float]:
    """Return what clients saw of one case, and what it computed again."""
    recovery = RECOVERIES[case["recovery"]]
    copies = {"host_blocks": HOST_BLOCKS, "write_through": recovery.write_through}
    executor = SimulatedExecutor(costs, case["blocks"], **copies)
    victim = victim_of(case["victim"], costs, case["seed"], overrides)
    ordered = {"resume": case.get("order", IN_ORDER), "wait_s": AGED_S}
    ordered |= {"watermark": case.get("watermark", 0.0)}
    settings = EngineConfig(victim=victim, **ordered, **SCHEDULERS[case["scheduler"]])
    return seen(executor, settings, recovery.policy(costs), items)


def seen(
    executor: Executor, settings: EngineConfig, policy: PreemptionPolicy, items: Sequence[Item]
) -> dict[str, float]:
    """The ``MEASURES`` of one run."""
    engine = Engine(executor, settings, policy=policy)
    requests = serve_items(engine, items)
    first_s = np.array([request.ttft_s for request in requests])
    gaps_s = np.array([np.diff(request.times_s).max(initial=0.0) for request in requests])
    tpot_s = [seconds for request in requests if (seconds := request.tpot_s) is not None]
    return {
        "p99_tpot_ms": float(np.percentile(tpot_s, 99)) * 1e3,
        "mean_ttft_ms": float(first_s.mean()) * 1e3,
        "p99_ttft_ms": float(np.percentile(first_s, 99)) * 1e3,
        "in_time_pct": 100 * float(((first_s <= IN_TIME_S[0]) & (gaps_s <= IN_TIME_S[1])).mean()),
        "computed_again_pct": 100 * engine.token_counts[Kind.RECOMPUTE] / sum(engine.token_counts.values()),
        "recomputed": float(engine.token_counts[Kind.RECOMPUTE]),
        "longest_gap_s": float(gaps_s.max()),
        "starved": float((gaps_s > STARVED_S).sum()),
        "preemptions": float(sum(request.preemptions for request in requests)),
    }


def lists_by_seed(runs: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The columns of a row: each measure of all runs."""
    return {name: [round(run[name], 4) for run in runs] for name in MEASURES}


@dataclass(frozen=True)
class LiveVictimsConfig(LiveLoadsConfig):
    """Settings of the live runs: each of ``victims`` with each of ``recoveries``, in random order, on the draws from
    ``first_seed`` on."""

    victims: tuple[str, ...]
    recoveries: tuple[str, ...]
    first_seed: int = 0

    section = "live_victims"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.victims:
            victim_named(name)


class LiveLeagueConfig(LiveVictimsConfig):
    """Settings of the live runs of the rules that lead the league, on other draws."""

    section = "live_league"


def victims_live(profile: Profile) -> Outcome:
    """Measure each victim rule with each recovery on this machine: see ``measured_live``."""
    return measured_live(profile, profile.section("live_victims", LiveVictimsConfig))


def league_live(profile: Profile) -> Outcome:
    """Measure the rules that lead the league on this machine: see ``measured_live``."""
    return measured_live(profile, profile.section("live_league", LiveLeagueConfig))


def measured_live(profile: Profile, config: LiveVictimsConfig) -> Outcome:
    """Rows as simulated, of the profile's model on this machine, prefill first."""
    loaded, first_seed = config.load(profile, profile.model), profile.seed + config.first_seed
    seeds = range(first_seed, first_seed + config.seeds)
    loads = config.loads(loaded, seeds)
    cases = list(product(seeds, config.victims, config.recoveries))
    random.Random(profile.seed).shuffle(cases)
    runs: dict[tuple[int, str, str], dict[str, float]] = {}
    with closing(config.executor(loaded)) as executor:
        for seed, victim, recovery in track(cases, desc="live victims"):
            settings = EngineConfig(victim=victim, watermark=0.0)
            runs[seed, victim, recovery] = seen(executor, settings, config.policy(recovery), loads[seed])
    rows: Rows = [
        {"blocks": config.blocks, "scheduler": "prefill_first", "recovery": recovery, "victim": victim}
        | {"seeds": list(seeds)}
        | lists_by_seed([runs[seed, victim, recovery] for seed in seeds])
        for victim, recovery in product(config.victims, config.recoveries)
    ]
    return Outcome(rows, provenance=loaded.provenance.as_dict())


def victims_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize each case, and how far it lies, on the same draws, below the last that came with the same recovery and
    order, below LIFO with cross-point, which is CPS, and below recompute of the last that was admitted, which is
    vLLM."""
    summary = Summary()
    names = ("load", "blocks", "scheduler", "recovery", "victim", "order")
    cases = {tuple(({"order": IN_ORDER, "load": ""} | row)[name] for name in names): row for row in rows}
    for (load, blocks, scheduler, recovery, victim, order), case_rows in cases.items():
        parts = (load or f"{blocks} blocks", order if order != IN_ORDER else "")
        labels = {"case": ", ".join(filter(None, parts)), "scheduler": scheduler, "policy": recovery, "variant": victim}
        # rows without an order are of before the league, and have less in their summary
        columns = [name for name in MEASURES if name in case_rows and (name != "mean_ttft_ms" or "order" in case_rows)]
        for column in columns:
            summary.add(MEASURES[column][0], bootstrap(case_rows[column]).summary(MEASURES[column][1]), **labels)
        if "order" in case_rows:
            middle = bootstrap(case_rows["p99_tpot_ms"], "median")
            summary.add("tpot_p99_median_ms", middle.summary("ms"), **labels)
        for than, (other, its_order, bases) in {
            f"{LIFO} {recovery}": (recovery, order, ("p99_tpot_ms",)),
            CPS: ("cross_point", IN_ORDER, ("p99_tpot_ms", "mean_ttft_ms")),
            VLLM: ("recompute", IN_ORDER, ("p99_tpot_ms", "computed_again_pct", "recomputed", "mean_ttft_ms")),
        }.items():
            base = cases.get((load, blocks, scheduler, other, than.split()[0], its_order))
            if base is None or base is case_rows:
                continue
            for column in (name for name in bases if name in columns and any(base[name])):
                below = share_below(case_rows[column], base[column])
                name = MEASURES[column][0].rpartition("_")[0] + "_below_pct"  # the measure without its unit
                summary.add(name, below.summary("%", 100), **labels, than=than)
    return summary
