"""Many cold starts at once, simulated: replicas that load over one shared link while a burst of requests waits.

Each replica runs the engine's own scheduler over measured costs; the link is shared fairly, or in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from firsttoken.engine.costs.fitted import FittedCosts
from firsttoken.engine.workload_items import Item
from firsttoken.progressiveserve.stages import REPORT_PLAN, STAGES, StagePlan
from firsttoken.simulation.costs.operator_costs import OperatorCosts
from firsttoken.simulation.costs.operator_tables import CONTEXT, Curve, OperatorTables, tables_from
from firsttoken.simulation.lengths import lengths, workload
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import Interval, bootstrap
from firsttoken.study.summary import Summary
from firsttoken_studies.nb47_the_other_reports_on_gpus.study import LLAMA_2, MODELS
from firsttoken_studies.nb63_many_cold_starts.replicas import (
    FAIR,
    FIRST_STAGES,
    IN_TURN,
    Bounds,
    Loads,
    System,
    loads_between,
    serve,
    shared_link,
    stages_at,
)
from firsttoken_studies.record.results import Outcome, Result, Rows, load_result, rows_where

MEASURED_ON = "amd-epyc-avx512bf16-2c"  # the machine whose recorded costs of SmolLM2-135M are taken
HERE = "smollm2-135m"
CARD = "a100-sxm"
_DEPTH, _BLOCKS = 30, 1 << 14  # layers of SmolLM2-135M; KV blocks of 16 tokens, which nobody runs out of
WHOLE, STAGED, WARM = "whole", "stages", "kept warm"
ARMS = {  # what comes over the link, and who goes first on it
    WHOLE: (WHOLE, FAIR),
    STAGED: (STAGED, FAIR),
    "stages, first ones first": (STAGED, FIRST_STAGES),
    "whole, in turn": (WHOLE, IN_TURN),
    "stages, in turn": (STAGED, IN_TURN),
    WARM: (WARM, FAIR),
}
POOLED = (WHOLE, STAGED)  # whose cold starts are mixed with a pool that is kept for a while
MOVES = {"request boundary": False, "prefill again": True}  # what becomes of open requests when a stage arrives


@dataclass(frozen=True)
class ManyStartsConfig:
    """Bursts for ``replicas`` of each of ``systems``: SmolLM2-135M on the machine of the record, or Llama-2-7B on an
    A100. Each system has its ``gbit_per_s`` of the shared link, of which one replica takes at most ``most_gbit_per_s``,
    and its ``usd_per_hour`` of a replica.

    A burst has ``requests`` a replica, Poisson at ``rate`` a second and replica, of up to ``longest`` tokens from
    ``lengths``. The replicas begin within ``spread_s`` seconds, drawn evenly, and have at most ``open_requests`` at
    once; what is open when a stage arrives does as ``transition`` says. Bursts come every ``gaps_s`` seconds on
    average, between which a pool is kept for ``keep_alive_s``.
    """

    systems: tuple[str, ...]
    gbit_per_s: tuple[float, ...]
    most_gbit_per_s: tuple[float, ...]
    usd_per_hour: tuple[float, ...]
    arms: tuple[str, ...]
    replicas: tuple[int, ...]
    requests: int
    rate: float
    lengths: str
    longest: int
    spread_s: float
    open_requests: int
    token_budget: int
    transition: str
    gaps_s: tuple[float, ...]
    keep_alive_s: tuple[float, ...]
    seeds: int

    @property
    def bounds(self) -> Bounds:
        """Return the bounds of each replica."""
        return Bounds(self.open_requests, self.token_budget, MOVES[self.transition])

    def __post_init__(self) -> None:
        for name, given, allowed in (("systems", self.systems, SYSTEMS), ("arms", self.arms, ARMS)):
            if unknown := next((entry for entry in given if entry not in allowed), ""):
                raise ProfileError(f"many_starts.{name}: there is no {unknown!r}; known: {', '.join(allowed)}")
        if not {WHOLE, WARM} <= {*self.arms}:
            raise ProfileError(f"many_starts.arms: the others are compared with {WHOLE!r} and {WARM!r}; add both")
        if self.transition not in MOVES:
            raise ProfileError(f"many_starts.transition: {self.transition!r} is not one of {', '.join(MOVES)}")
        if {len(self.gbit_per_s), len(self.most_gbit_per_s), len(self.usd_per_hour)} != {len(self.systems)}:
            raise ProfileError("many_starts: give a gbit_per_s, most_gbit_per_s and usd_per_hour for each system")
        several = (self.systems, self.arms, self.replicas, self.gaps_s, self.keep_alive_s)
        if any(not entry or len({*entry}) < len(entry) for entry in several):
            raise ProfileError("many_starts: give systems, arms, replicas, gaps_s and keep_alive_s, each value once")
        if min(*self.replicas, self.requests, self.open_requests, self.seeds) < 1 or self.longest < 2:
            raise ProfileError("many_starts: replicas, requests, open_requests and seeds must be 1 or more, longest 2")
        above = (*self.gbit_per_s, *self.most_gbit_per_s, *self.gaps_s, self.rate)
        others = (*self.keep_alive_s, *self.usd_per_hour, self.spread_s)
        if not all(0 < entry < math.inf for entry in above) or not all(0 <= entry < math.inf for entry in others):
            raise ProfileError("many_starts: rates and gaps_s must be above 0, prices and other seconds 0 or more")


# What is loaded, and what it costs to compute with it.


def recorded(experiment: str) -> Result:
    """The recorded result of that experiment on ``MEASURED_ON``. Raises ProfileError where it is not there."""
    result = load_result(experiment, "full", machine=MEASURED_ON)
    if result is None:
        raise ProfileError(f"many_starts: no recorded {experiment} of {MEASURED_ON} is here; get data/results from git")
    return result


def here() -> System:
    """Return SmolLM2-135M on two cores: bytes as they were loaded (cold_start), a step as it was fitted
    (crosspoint_live).

    A stage that lacks layers has its share of a step: the bytes' share of the time that every step takes, as all
    weights are read, and the layers' share of the rest. The cost of adapters and of the load itself to a step is left
    out; :func:`validated` measures it.
    """
    loads = recorded("cold_start")
    staged = next(row for row in loads.rows if "full_bytes" in row)
    first, full = staged["bytes"], staged["full_bytes"]
    sizes = (first, (full - first + 1) // 2, (full - first) // 2)
    plan = StagePlan.from_block(_DEPTH, loads.provenance["block"])
    costs = FittedCosts.from_dict(recorded("crosspoint_live").provenance["costs"])
    stages = {}
    for stage, came in zip(STAGES, np.cumsum(sizes).tolist(), strict=True):
        layers = len(plan.present(stage)) / _DEPTH
        rest = {name: layers * getattr(costs, name) for name in ("prefill_token", "pair", "request", "context_token")}
        stages[stage] = replace(costs, step=costs.step * came / full, **rest)
    model_bytes = next(row["bytes"] for row in loads.rows if row["variant"] == "whole_streamed")
    return System(sizes, model_bytes, stages, _BLOCKS)


@dataclass(frozen=True)
class _EqualHeads(OperatorTables):
    """Tables that have the decodes of as many heads of keys as of queries, too: their keys and values as bytes. None
    has measured those; prompts of such heads were measured."""

    def attention(self, kind: str, heads: int, kv_heads: int, head_dim: int, kv: str) -> dict[int, Curve]:
        if kind == CONTEXT:
            return super().attention(kind, heads, kv_heads, head_dim, kv)
        tokens, token = np.array([1.0, 1024.0, 2048.0, 4096.0]), 2 * 2 * kv_heads * head_dim
        moved = {batch: batch * token * tokens / self.memory_bytes_s for batch in (1, 2, 4, 8, 16, 32, 64)}
        return {batch: (tokens, np.maximum(seconds, self.kernel_s)) for batch, seconds in moved.items()}


def on_card() -> System:
    """Llama-2-7B in 16 bits on an A100 by measured operators, in the report's stages. Its adapters, 0.2 % of the bytes,
    are left out."""
    shape, tables = MODELS[LLAMA_2], _EqualHeads(**vars(OperatorTables.read(CARD)))
    shapes = {stage: replace(shape, layers=len(REPORT_PLAN.present(stage))) for stage in STAGES}
    costs = {stage: OperatorCosts.of(tables, loaded) for stage, loaded in shapes.items()}
    first, second, model_weights_bytes = (2 * shapes[stage].weights for stage in STAGES)
    return System((first, second - first, model_weights_bytes - second), model_weights_bytes, costs, costs[3].blocks)


SYSTEMS: dict[str, Callable[[], System]] = {HERE: here, LLAMA_2: on_card}


# The experiment.


Sharing = Callable[[Sequence[float], Sequence[float], float], list[list[float]]]
"""From when replicas start, the bytes of their parts and those a second of the link: when each has each part."""


def many_starts(profile: Profile, *, sharing: Sharing | None = None) -> Outcome:
    """Rows {what: "burst", model, arm, replicas, seed, ...}, with seconds from the first arrival on and bytes by stage,
    and {what: "live", case, measure, live_s, simulated_s}, one replica held against the recorded runs of notebook 15.

    All arms of a draw have the same requests, and replicas that begin at the same moments. ``sharing`` stands for the
    library's fair ``shared_link``.
    """
    config = profile.section("many_starts", ManyStartsConfig)
    pairs = lengths(config.lengths)
    pairs = pairs[pairs.sum(1) <= config.longest]
    rows = validated(config.bounds)
    systems = {name: SYSTEMS[name]() for name in config.systems}
    cases = [(name, count, seed) for name in systems for count in config.replicas for seed in range(config.seeds)]
    for name, count, seed in track(cases, desc="bursts"):
        items = workload(pairs, count * config.requests, profile.seed + seed, count * config.rate)
        starts = np.random.default_rng([profile.seed + seed, 1]).uniform(0, config.spread_s, count).tolist()
        labels = {"what": "burst", "model": name, "replicas": count, "seed": profile.seed + seed}
        system_index = config.systems.index(name)
        rows += [
            labels | {"arm": arm} | burst(systems[name], arm, starts, items, config, system_index, sharing)
            for arm in config.arms
        ]
    costs = {CARD: tables_from(), MEASURED_ON: "cold_start, crosspoint_live and recovery_timeline of the record"}
    return Outcome(rows, provenance={"kind": "simulated on measured costs", "costs": costs})


def burst(
    system: System,
    arm: str,
    starts: Sequence[float],
    items: Sequence[Item],
    config: ManyStartsConfig,
    system_index: int = 0,
    sharing: Sharing | None = None,
) -> dict[str, Any]:
    """Simulate one burst in one ``arm``: what its clients saw, what came over the link, and what was paid for.

    Each replica is paid for from its start until the last token of the burst, and loads until then or until it is
    whole. ``system_index`` is the place of the system in ``config``.
    """
    parts, order = ARMS[arm]
    sizes = {WHOLE: (system.whole,), STAGED: system.sizes, WARM: ()}[parts]
    rate, most = (1e9 / 8 * gbit[system_index] for gbit in (config.gbit_per_s, config.most_gbit_per_s))
    if not sizes:
        loads = Loads([[] for _ in starts], [])
    elif sharing is not None and order == FAIR:
        loads = loads_between(starts, sizes, sharing(starts, sizes, rate))
    else:
        loads = shared_link(starts, sizes, rate, most, order)
    requests, tokens_by_stage = serve(system, stages_at(loads), items, config.bounds)
    waits = [request.ttft_s for request in requests]
    over_s = max(request.times_s[-1] for request in requests)
    first_s = min(request.times_s[0] for request in requests)
    last = STAGES[-1]
    return {
        "served": len(requests),
        "tokens": tokens_by_stage.total(),
        **{f"ttft_p{q}_s": float(np.percentile(waits, q)) for q in (50, 95, 99)},
        "first_s": first_s,
        "over_s": over_s,
        "whole_s": max((times[-1] for times in loads.ready_s if times), default=0.0),
        "bytes_first": loads.bytes_by(first_s),
        "bytes_over": loads.bytes_by(over_s),
        "bytes_all": [size * len(starts) for size in sizes],
        "pruned_pct": 100 * (1 - tokens_by_stage[last] / tokens_by_stage.total()),
        "paid_s": sum(over_s - (begin if sizes else 0.0) for begin in starts),
    }


LIVE = {"whole": (WHOLE, "request boundary"), "pinned": (STAGED, "request boundary")}
LIVE |= {"upgrade": (STAGED, "prefill again")}
LIVE_PROMPT = 27  # tokens of the recorded question
FIRST, LAST_STAGE, ANSWER = "first token", "last stage", "first answer"
_SEEN = {FIRST: "ttft_p50_s", LAST_STAGE: "full_time_s", ANSWER: "first_answer_s"}


def validated(bounds: Bounds) -> Rows:
    """Simulate the recorded starts of one replica under clients that ask at once (recovery_timeline): rows {what:
    "live", case, moment, live_s, simulated_s} of the first token, the last stage and the first whole answer."""
    live, system = recorded("recovery_timeline"), here()
    rows: Rows = []
    timeline = live.parameters["timeline"]
    rate = timeline["gbit_per_s"] * 1e9 / 8
    items = [Item(0.0, LIVE_PROMPT, timeline["new_tokens"])] * timeline["clients"]
    for case, (parts, transition) in LIVE.items():
        loads = shared_link([0.0], (system.whole,) if parts == WHOLE else system.sizes, rate, rate)
        request, *_ = serve(system, stages_at(loads), items, bounds._replace(moves=MOVES[transition])).requests
        times = {FIRST: request.times_s[0], LAST_STAGE: loads.ready_s[0][-1], ANSWER: request.times_s[-1]}
        for moment, at_s in times.items():
            seen_s = live.summary.value(_SEEN[moment], case=case)
            rows.append({"what": "live", "case": case, "moment": moment, "live_s": seen_s, "simulated_s": at_s})
    return rows


def starts_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """By model, arm and number of replicas: times to the first token, bytes by stage, the share of tokens of pruned
    stages, seconds and money a thousand requests; what an arm takes off the whole model's, paired by draw; the gap
    between two bursts at which a pool that is kept warm costs as much as the arm; and the simulator's error."""
    summary, config = Summary(), parameters["many_starts"]
    for case in (row for row in rows if row["what"] == "live"):
        off = {"value": 100 * (case["simulated_s"] / case["live_s"] - 1), "unit": "%"}
        summary.add("off_pct", off, source="simulated", than="live", case=f"{case['case']}, {case['moment']}")
    errors = [abs(row["simulated_s"] / row["live_s"] - 1) for row in rows if row.get("moment") == FIRST]
    summary.add("off_pct", {"value": 100 * max(errors), "unit": "%"}, source="simulated", than="live", across="worst")
    for system_index, name in enumerate(config["systems"]):
        for count in config["replicas"]:
            _of_one(summary, rows_where(rows, what="burst", model=name, replicas=count), config, system_index)
    return summary


def _of_one(summary: Summary, rows: Rows, config: Mapping[str, Any], system_index: int) -> None:
    """The entries of one model and number of replicas."""
    labels = {"model": rows[0]["model"], "replicas": rows[0]["replicas"]}
    table = {arm: rows_where(rows, arm=arm) for arm in config["arms"]}
    thousand = 1000 / rows[0]["served"]
    price = config["usd_per_hour"][system_index] / 3600
    paid = {arm: np.array([row["paid_s"] for row in arm_rows]) for arm, arm_rows in table.items()}
    for arm, arm_rows in table.items():
        arm_labels = labels | {"variant": arm}
        for column, unit in (("ttft_p50_s", "s"), ("ttft_p95_s", "s"), ("ttft_p99_s", "s"), ("first_s", "s")):
            summary.add(column, bootstrap([row[column] for row in arm_rows]).summary(unit), **arm_labels)
        for column, unit in (("over_s", "s"), ("whole_s", "s"), ("pruned_pct", "% of tokens")):
            summary.add(column, bootstrap([row[column] for row in arm_rows]).summary(unit), **arm_labels)
        for column in ("bytes_first", "bytes_over", "bytes_all"):
            for stage, came in enumerate(zip(*(row[column] for row in arm_rows), strict=True), 1):
                summary.add(f"{column}_gb", bootstrap(came).summary("GB", 1e-9), stage=stage, **arm_labels)
        summary.add("paid_s", bootstrap(paid[arm] * thousand).summary("s a thousand requests"), **arm_labels)
        summary.add("usd", bootstrap(paid[arm] * thousand * price).summary("USD a thousand requests"), **arm_labels)
        if arm == WARM:
            continue
        if arm != WHOLE:
            for column in ("ttft_p50", "ttft_p95", "ttft_p99"):
                pairs = [[row[f"{column}_s"] for row in some] for some in (arm_rows, table[WHOLE])]
                summary.add(f"{column}_below_pct", _below(*pairs).summary("%", 100), than=WHOLE, **arm_labels)
            summary.add("paid_below_pct", _below(paid[arm], paid[WHOLE]).summary("%", 100), than=WHOLE, **arm_labels)
        crossing = bootstrap((paid[arm] - paid[WARM]) / labels["replicas"])
        summary.add("crossing_s", crossing.summary("s between two bursts"), than=WARM, **arm_labels)
        for gap in config["gaps_s"] if arm in POOLED else ():
            for keep_alive in config["keep_alive_s"]:
                warm = -math.expm1(-keep_alive / gap)  # share of bursts that meet the pool, where gaps are exponential
                mean_paid_s = warm * paid[WARM] + (1 - warm) * paid[arm] + labels["replicas"] * gap * warm
                entry = bootstrap(mean_paid_s * thousand * price).summary("USD a thousand requests")
                summary.add("usd", entry, case=pool(gap, keep_alive), **arm_labels)


def pool(gap_s: float, kept_s: float) -> str:
    """Return the case of a pool that is kept ``kept_s`` seconds, and meets a burst every ``gap_s`` on average."""
    return f"every {gap_s:g} s, kept {kept_s:g} s"


def _below(own_s: Sequence[float], baseline_s: Sequence[float]) -> Interval:
    """The share by which the mean of ``own_s`` lies below that of ``baseline_s``, the draws paired, with its
    interval."""
    return bootstrap(np.array([own_s, baseline_s]).T, lambda pairs: float(1 - np.divide(*pairs.mean(0))))
