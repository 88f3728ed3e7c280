"""Who is preempted on loads that others recorded: Azure's conversations and code of 2023, Mooncake's conversations.

The rules were compared on ShareGPT's lengths before; here each meets lengths and arrivals on which none was chosen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from firsttoken.assets.manual_downloads import downloaded
from firsttoken.cps.policies import make_policy
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.workload_items import Item, serve_items
from firsttoken.simulation.costs.published import PAPER_SHAPE
from firsttoken.simulation.workload.traces import load_trace
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken_studies.nb24_who_is_preempted.study import SCHEDULERS, check_rules, lists_by_seed, run_with, table_2
from firsttoken_studies.record.results import Outcome, Rows

TRACES = {
    "azure-conversations": "AzureLLMInferenceTrace_conv.csv",
    "azure-code": "AzureLLMInferenceTrace_code.csv",
    "mooncake-conversations": "conversation_trace.jsonl",
}
LONGEST = 8192  # tokens of a request: CPS's Table 2 ends there


@dataclass(frozen=True)
class ElsewhereConfig:
    """``seeds`` draws from ``first_seed`` on, each of ``requests`` successive requests from a random place of each of
    ``loads``. They come as they came there, sped up or slowed down to ``load_x`` times the rate at which the engine
    ends them where all come at once. The pool has the KV blocks of ``pool_requests`` requests of mean length. Each of
    ``victims`` runs with each of ``recoveries`` and ``orders``."""

    first_seed: int
    seeds: int
    requests: int
    load_x: float
    pool_requests: int
    loads: tuple[str, ...]
    victims: tuple[str, ...]
    recoveries: tuple[str, ...]
    orders: tuple[str, ...]

    def __post_init__(self) -> None:
        if min(self.seeds, self.requests, self.pool_requests) < 1 or self.load_x <= 0:
            raise ProfileError("league_elsewhere: seeds, requests and pool_requests must be at least 1, load_x above 0")
        if absent := next((load for load in self.loads if load not in TRACES), ""):
            raise ProfileError(f"league_elsewhere: no load {absent!r}; {unknown(absent, TRACES)}")
        check_rules(self.victims, self.recoveries, self.orders)


def league_elsewhere(profile: Profile) -> Outcome:
    """Rows as of ``study.cells_of``, and {load, rate_per_s}: the mean rate of each draw."""
    config = profile.section("league_elsewhere", ElsewhereConfig)
    costs = table_2(profile.seed)
    seeds = [profile.seed + config.first_seed + number for number in range(config.seeds)]
    every = list(product(config.recoveries, config.victims, config.orders))
    rows: Rows = []
    for load in config.loads:
        items = recorded_requests(load)
        mean_tokens = np.mean([item.total_tokens for item in items])
        blocks = max(PAPER_SHAPE.blocks(LONGEST), PAPER_SHAPE.blocks(int(config.pool_requests * mean_tokens)))
        draws = [window(items, config.requests, seed) for seed in seeds]
        rate_per_s = config.load_x * requests_per_s(draws[0], costs, blocks)
        draws = [at_rate(draw, rate_per_s) for draw in draws]
        for recovery, victim, order in track(every, desc=load):
            case = {"blocks": blocks, "scheduler": "prefill_first"}
            case |= {"recovery": recovery, "victim": victim, "order": order}
            runs = [run_with(draw, costs, case | {"seed": seed}) for draw, seed in zip(draws, seeds, strict=True)]
            rows.append({"load": load, "rate_per_s": rate_per_s} | case | {"seeds": seeds} | lists_by_seed(runs))
    return Outcome(rows, provenance={"source": "recorded loads on the costs of CPS Table 2", "kind": "replayed"})


def recorded_requests(load: str) -> tuple[Item, ...]:
    """The requests of a load that CPS's Table 2 has the costs of. Raises AssetError for files that are not there."""
    return load_trace(downloaded(load) / TRACES[load]).up_to(LONGEST).items


def window(items: Sequence[Item], count: int, seed: int) -> list[Item]:
    """Return ``count`` successive items from a random place, the first of them at 0 s. Raises ProfileError where there
    are fewer."""
    if len(items) < count:
        raise ProfileError(f"league_elsewhere: {count} requests of a load that has {len(items)}; take fewer")
    first = random.Random(seed).randrange(len(items) - count + 1)
    begin_s = items[first].arrival_s
    return [
        replace(item, arrival_s=item.arrival_s - begin_s, prompt=(0,) * item.prompt_tokens)
        for item in items[first : first + count]
    ]


def requests_per_s(items: Sequence[Item], costs: Costs, blocks: int) -> float:
    """The requests that the engine ends in a second where all ``items`` come at once, under vLLM's default."""
    executor = SimulatedExecutor(costs, blocks)
    config = EngineConfig(victim="last_admitted", watermark=0.0, **SCHEDULERS["prefill_first"])
    serve_items(Engine(executor, config, policy=make_policy("recompute")), [replace(i, arrival_s=0.0) for i in items])
    return len(items) / executor.now()


def at_rate(items: Sequence[Item], rate_per_s: float) -> list[Item]:
    """The items with their arrivals drawn out or together to ``rate_per_s`` in the mean."""
    factor = len(items) / rate_per_s / max(items[-1].arrival_s, 1e-6)
    return [replace(item, arrival_s=item.arrival_s * factor) for item in items]
