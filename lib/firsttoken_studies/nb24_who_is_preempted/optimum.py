"""The best that anybody could do on a small load who knew all of it, and how far each rule lies above it.

Who gives way, whether it is swapped or computed again, and when and in which order requests come back are all choices
of a run. The shortest worst time per output token (TPOT) over all of them is found by branch and bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.preemption import Action, PreemptionPolicy
from firsttoken.engine.request import Request, Sampling, ScheduledChunk
from firsttoken.engine.schedulers.sarathi import PrefillFirst
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.workload_items import Item, serve_items
from firsttoken.simulation.costs.published import PAPER_SHAPE
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_studies.nb22_cross_point_scheduler.study import HOST_BLOCKS, SOURCE, ReplayedConfig, drawn
from firsttoken_studies.nb24_who_is_preempted.study import (
    AGED_S,
    RECOVERIES,
    SCHEDULERS,
    check_rules,
    table_2,
    victim_of,
)
from firsttoken_studies.record.results import Outcome, Rows

OPTIMUM = "the optimum"
CPS_RULE = "last_arrived", "cross_point", "in_order"
_SHORTEST, _LONGEST = 300, 0.75  # tokens, and share of the pool: a request of a small load lies between
_DRAWN = ReplayedConfig(1, 100, 100, 512, (), ())  # conversations that a small load is taken from


@dataclass(frozen=True)
class OptimumConfig:
    """``seeds`` small loads: the first ``requests`` conversations of a draw that fit ``blocks`` KV blocks, all at once.

    Draws are taken from ``first_seed`` on; one in which CPS preempts fewer than ``preemptions`` times is passed over.
    The search ends after ``most_runs`` runs, and a load that needs more is reported and not counted. Each of
    ``victims`` with each of ``recoveries`` and ``orders`` is held against the optimum.
    """

    first_seed: int
    seeds: int
    requests: int
    blocks: int
    preemptions: int
    most_runs: int
    victims: tuple[str, ...]
    recoveries: tuple[str, ...]
    orders: tuple[str, ...]

    def __post_init__(self) -> None:
        if (
            min(self.seeds, self.requests, self.preemptions, self.most_runs) < 1
            or self.requests > 12
            or self.blocks < 32
        ):
            raise ProfileError(
                "optimum: seeds, preemptions and most_runs must be at least 1, requests 1 to 12, blocks at least 32"
            )
        check_rules(self.victims, self.recoveries, self.orders)


def worst_tpot_s(requests: Sequence[Request], now_s: float, step_s: float) -> float:
    """The longest TPOT of any request [s]; of one that is open the least that it can still have, with ``step_s`` for
    each of its tokens to come."""
    worst = 0.0
    for request in requests:
        gaps = request.sampling.max_tokens - 1
        if request.times_s and gaps:
            to_come = 1 + gaps - len(request.times_s)
            end_s = max(now_s, request.times_s[-1]) + to_come * step_s if to_come else request.times_s[-1]
            worst = max(worst, (end_s - request.times_s[0]) / gaps)
    return worst


class Undecided(Exception):
    """Raised where the script of a run has no choice left; ``count`` are possible."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


class Script(PreemptionPolicy):
    """The choices of one run, in the order in which it asks; ``recent`` are those of the moment at which it asks."""

    name = "script"

    def __init__(self, choices: Sequence[int]) -> None:
        self.choices, self.recent = choices, ()
        self._asked, self._moment_s = 0, -1.0

    def pick(self, count: int, now_s: float) -> int:
        """Return the next choice among ``count`` at ``now_s``. Raises Undecided behind the last."""
        if now_s != self._moment_s:
            self.recent, self._moment_s = (), now_s
        if count == 1:
            return 0
        if self._asked == len(self.choices):
            raise Undecided(count)
        self._asked += 1
        self.recent += (self.choices[self._asked - 1],)
        return self.recent[-1]

    def choose(self, tokens: int, now_s: float) -> Action:
        return (Action.SWAP, Action.RECOMPUTE)[self.pick(2, now_s)]


def _numbers(requests: Sequence[Request]) -> tuple[int, ...]:
    return *(request.number for request in requests), -1


class ResumesAsScripted(PrefillFirst):
    """Lets preempted requests come back when and in which order the script says.

    It is asked anew when somebody has ended, come or given way: in which order those that compute again come, and
    which swapped one that fits comes back, or, while others run, none.
    """

    name = "resumes_as_scripted"
    script: Script
    asked: tuple[int, ...] = ()
    passed: tuple[int, ...] = ()

    def plan(self) -> list[ScheduledChunk]:
        again = sorted((request for request in self.waiting if request.preemptions), key=lambda request: request.order)
        if (state := (self.preempted, *_numbers(again), *_numbers(self.running))) != self.asked and again:
            self.asked = state
            turns = {}
            while again:
                turns[again.pop(self._pick(len(again))).number] = len(turns)
            self.sort_waiting(lambda request: turns.get(request.number, len(turns)))
        return super().plan()

    def resume(self) -> None:
        while fitting := [request for request in self.swapped if self._fits(request)]:
            fitting.sort(key=lambda request: request.order)
            if (state := (self.preempted, *_numbers(fitting), *_numbers(self.running))) == self.passed:
                return
            if (chosen := self._pick(len(fitting) + bool(self.running))) == len(fitting):
                self.passed = state
                return
            self.bring_back(fitting[chosen])

    def _pick(self, count: int) -> int:
        return self.script.pick(count, self.preemptor.executor.now())

    def _fits(self, request: Request) -> bool:
        return self._missing(request, request.cached + 1) <= self.pool.free and self.full < self.config.requests


def least_worst_tpot_s(items: Sequence[Item], costs: Costs, blocks: int, best_s: float, runs: int) -> float | None:
    """The least worst TPOT [s] over every choice of who gives way, of swap or recompute, and of when and in which order
    requests come back, under prefill-first scheduling: exact, depth first, from ``best_s``, which some rule reached.
    None where ``runs`` runs are not all.

    Each run begins anew and follows a script of choices to its end. Requests that compute again go before all that
    never ran, as in vLLM.
    """
    step_s = costs.step_s((), (1,))
    scripts: list[tuple[int, ...]] = [()]
    reached_s: dict[tuple[object, ...], float] = {}
    for _ in range(runs):
        if not scripts:
            return best_s
        choices = scripts.pop()
        script = Script(choices)
        executor = SimulatedExecutor(costs, blocks, host_blocks=HOST_BLOCKS)

        def victim(running: list[Request], script: Script = script, now: Callable[[], float] = executor.now) -> Request:
            return sorted(running, key=lambda request: request.order)[script.pick(len(running), now())]

        scheduler = type("Resumes", (ResumesAsScripted,), {"script": script})
        engine = Engine(executor, _config(scheduler=scheduler, victim=victim), policy=script)
        requests = [engine.submit(item.prompt, Sampling(item.output_tokens), item.arrival_s) for item in items]
        try:
            engine.run()
        except Undecided as undecided:
            now_s = executor.now()
            state = script.recent, *_state(engine.scheduler, requests)
            if worst_tpot_s(requests, now_s, step_s) < best_s - 1e-12 and now_s < reached_s.get(state, math.inf):
                reached_s[state] = now_s
                scripts += [(*choices, choice) for choice in reversed(range(undecided.count))]
        else:
            best_s = min(best_s, worst_tpot_s(requests, executor.now(), step_s))
    return None if scripts else best_s


def _config(**choices: Any) -> EngineConfig:
    return EngineConfig(**({"watermark": 0.0, "wait_s": AGED_S} | SCHEDULERS["prefill_first"] | choices))


def _state(scheduler: ResumesAsScripted, requests: Sequence[Request]) -> tuple[object, ...]:
    """The state of each request, and what of the past the objective and the coming questions look at."""
    return (
        *((request.phase, len(request.tokens), *request.times_s[:1], *request.times_s[-1:]) for request in requests),
        *_numbers(scheduler.waiting),
        *scheduler.asked,
        *scheduler.passed,
    )


def small_load(seed: int, config: OptimumConfig) -> list[Item]:
    """The first conversations of a draw that are long enough to matter, and fit."""
    most = _LONGEST * PAPER_SHAPE.block_tokens * config.blocks
    fitting = [item for item in drawn(_DRAWN, seed) if _SHORTEST <= item.total_tokens <= most]
    return fitting[: config.requests]


def by_rule(
    items: Sequence[Item], costs: Costs, config: OptimumConfig, rule: tuple[str, str, str], seed: int
) -> tuple[float, int]:
    """Return the worst TPOT [s] of a victim, a recovery and an order, and how often somebody was preempted."""
    victim, name, order = rule
    recovery = RECOVERIES[name]
    executor = SimulatedExecutor(costs, config.blocks, host_blocks=HOST_BLOCKS, write_through=recovery.write_through)
    engine = Engine(
        executor, _config(victim=victim_of(victim, costs, seed), resume=order), policy=recovery.policy(costs)
    )
    requests = serve_items(engine, items)
    return worst_tpot_s(requests, executor.now(), 0.0), engine.scheduler.preempted


def pressed(first_seed: int, costs: Costs, config: OptimumConfig) -> list[int]:
    """The seeds from ``first_seed`` on whose load has as many preemptions under CPS as the profile asks. Raises
    ProfileError where fewer than one in fifty have."""
    seeds = []
    for seed in range(first_seed, first_seed + 50 * config.seeds):
        if by_rule(small_load(seed, config), costs, config, CPS_RULE, seed)[1] >= config.preemptions:
            seeds.append(seed)
        if len(seeds) == config.seeds:
            return seeds
    raise ProfileError(
        f"optimum: {len(seeds)} of {50 * config.seeds} loads have as many preemptions; take fewer blocks"
    )


def optimum(profile: Profile) -> Outcome:
    """Rows {victim, recovery, order, seeds, worst_tpot_ms: by seed}, and one of the optimum; {undecided} are the seeds
    whose search did not end."""
    config = profile.section("optimum", OptimumConfig)
    costs = table_2(profile.seed)
    rules = list(product(config.victims, config.recoveries, config.orders))
    worst_ms: dict[tuple[str, str, str], list[float]] = {rule: [] for rule in [*rules, (OPTIMUM, "", "")]}
    seeds, undecided = [], []
    for seed in track(pressed(profile.seed + config.first_seed, costs, config), desc="optimum"):
        items = small_load(seed, config)
        rules_s = {rule: by_rule(items, costs, config, rule, seed)[0] for rule in rules}
        least_s = least_worst_tpot_s(items, costs, config.blocks, min(rules_s.values()), config.most_runs)
        if least_s is None:
            undecided.append(seed)
            continue
        seeds.append(seed)
        for rule, seconds in (rules_s | {(OPTIMUM, "", ""): least_s}).items():
            worst_ms[rule].append(round(1e3 * seconds, 4))
    if not seeds:
        raise ProfileError(f"optimum: no search ended within {config.most_runs} runs; allow more, or fewer requests")
    case = {"blocks": config.blocks, "scheduler": "prefill_first", "seeds": seeds, "undecided": undecided}
    rows: Rows = [
        {"victim": victim, "recovery": recovery, "order": order} | case | {"worst_tpot_ms": values}
        for (victim, recovery, order), values in worst_ms.items()
    ]
    return Outcome(rows, provenance={"source": SOURCE, "kind": "replayed"})


def optimum_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """The worst TPOT of each combination as a multiple of the optimum, the mean and the worst over the loads."""
    summary = Summary()
    (best,) = (row for row in rows if row["victim"] == OPTIMUM)
    summary.add("undecided", {"value": len(best["undecided"]), "n": len(best["seeds"]) + len(best["undecided"])})
    for row in rows:
        labels = {"case": row["order"] or "any", "policy": row["recovery"] or "any", "variant": row["victim"]}
        summary.add("worst_tpot_ms", bootstrap(row["worst_tpot_ms"]).summary("ms"), **labels)
        if row is not best:
            times = [
                rule_ms / least_ms
                for rule_ms, least_ms in zip(row["worst_tpot_ms"], best["worst_tpot_ms"], strict=True)
            ]
            summary.add("tpot_worst_x", bootstrap(times).summary("x"), **labels, than=OPTIMUM)
            most = {"value": max(times), "n": len(times), "unit": "x"}
            summary.add("tpot_worst_x", most, **labels, than=OPTIMUM, across="worst")
    return summary
