"""Who is preempted on six cards, by operators measured there, where requests come evenly and in bursts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from firsttoken.assets.dense_shape import SHAPES
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.workload_items import Arrivals, with_arrivals
from firsttoken.simulation.costs.operator_costs import OperatorCosts
from firsttoken.simulation.costs.operator_tables import CARDS, OperatorTables
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.summary import Summary
from firsttoken_studies.nb22_cross_point_scheduler.study import ReplayedConfig, drawn
from firsttoken_studies.nb24_who_is_preempted.elsewhere import requests_per_s
from firsttoken_studies.nb24_who_is_preempted.study import (
    VLLM,
    check_rules,
    lists_by_seed,
    run_with,
    table_2,
    victims_summary,
)
from firsttoken_studies.record.results import Outcome, Rows

TABLE_2 = "table-2"
COSTS = (TABLE_2, *CARDS)
MODEL = "llama-3.1-8b"


@dataclass(frozen=True)
class CardsConfig:
    """``seeds`` draws from ``first_seed`` on, each of ``short`` + ``long`` conversations of ShareGPT. They come at
    ``load_x`` times the rate at which the engine ends them where all come at once, with each ``burstiness``, into
    ``blocks`` KV blocks of 16 tokens. Each of ``victims`` runs with each of ``recoveries`` on each of ``cards``, which
    runs ``MODEL``; ``TABLE_2`` is CPS's card and model."""

    first_seed: int
    seeds: int
    short: int
    long: int
    load_x: float
    burstiness: tuple[float, ...]
    blocks: int
    cards: tuple[str, ...]
    victims: tuple[str, ...]
    recoveries: tuple[str, ...]

    def __post_init__(self) -> None:
        if min(self.seeds, self.short, self.long, self.blocks) < 1 or min(self.load_x, *self.burstiness) <= 0:
            raise ProfileError("league_cards: counts must be at least 1, load_x and burstiness above 0")
        if absent := next((card for card in self.cards if card not in COSTS), ""):
            raise ProfileError(f"league_cards: no card {absent!r}; {unknown(absent, COSTS)}")
        check_rules(self.victims, self.recoveries, ())


def costs_on(card: str, seed: int) -> Costs:
    """The costs of ``MODEL`` by the operators of ``card``, or those of CPS's Table 2."""
    return table_2(seed) if card == TABLE_2 else OperatorCosts.of(OperatorTables.read(card), SHAPES[MODEL])


def league_cards(profile: Profile) -> Outcome:
    """Rows as of ``study.cells_of``, and {load, card, burstiness, rate_per_s}."""
    config, rows = profile.section("league_cards", CardsConfig), []
    seeds = [profile.seed + config.first_seed + number for number in range(config.seeds)]
    set_up = ReplayedConfig(config.seeds, config.short, config.long, config.blocks, (), ())
    loads = {seed: drawn(set_up, seed) for seed in seeds}
    for card, burstiness in product(config.cards, config.burstiness):
        costs = costs_on(card, profile.seed)
        rate_per_s = config.load_x * requests_per_s(loads[seeds[0]], costs, config.blocks)
        draws = {seed: with_arrivals(loads[seed], Arrivals(rate_per_s, seed, burstiness)) for seed in seeds}
        labels = {"load": f"{card}, burstiness {burstiness:g}", "card": card, "burstiness": burstiness}
        labels |= {"rate_per_s": rate_per_s, "blocks": config.blocks, "scheduler": "prefill_first", "order": "in_order"}
        for recovery, victim in track(list(product(config.recoveries, config.victims)), desc=labels["load"]):
            case = labels | {"recovery": recovery, "victim": victim}
            runs = [run_with(draws[seed], costs, case | {"seed": seed}) for seed in seeds]
            rows.append(case | {"seeds": seeds} | lists_by_seed(runs))
    return Outcome(rows, provenance={"source": "ShareGPT lengths on operators of six cards", "kind": "simulated"})


def cards_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """As ``study.victims_summary``, and for each victim the share of the cards and bursts, under recompute, where the
    whole interval of its tail lies below vLLM's default."""
    summary = victims_summary(rows, parameters)
    for victim in dict.fromkeys(row["victim"] for row in rows):
        below = summary.all("tpot_p99_below_pct", policy="recompute", variant=victim, than=VLLM)
        if below:
            share = {"value": 100 * sum(entry["low"] > 0 for entry in below) / len(below), "n": len(below)}
            summary.add("cases_below_pct", share | {"unit": "% of the cases"}, variant=victim, than=VLLM)
    return summary
