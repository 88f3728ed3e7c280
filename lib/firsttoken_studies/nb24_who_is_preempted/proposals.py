"""What proposals for vLLM and llama.cpp have published of preemption, replayed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firsttoken.engine.workload_items import Item
from firsttoken.simulation.costs.published import PublishedCosts
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import share_below
from firsttoken.study.summary import Summary
from firsttoken_studies.nb24_who_is_preempted.study import check_rules, run_with
from firsttoken_studies.record.results import Outcome, Rows

# CPS's Table 2: another model and card than the proposals', on which a count of preemptions hangs little
COSTS = PublishedCosts(decode_s=0.03)


@dataclass(frozen=True)
class Trial:
    """A proposal of ``source`` that lowers ``measure``, a column of ``study.MEASURES``, by ``published_pct``.

    ``requests`` come at once, with prompts of ``prompt`` and answers of ``output`` tokens, drawn evenly from 1 -
    ``spread`` to 1 + ``spread`` times that. Of each pair the first is what the proposal was held against. ``stated``:
    load, pool and batch are the proposal's; else lengths or pool are not published, and are this project's.
    """

    source: str
    case: str
    measure: str
    published_pct: float
    stated: bool
    requests: int
    prompt: int
    output: int
    spread: float
    blocks: int
    scheduler: str
    recovery: str
    victims: tuple[str, str]
    orders: tuple[str, str]
    watermarks: tuple[float, float]

    def __post_init__(self) -> None:
        check_rules(self.victims, (self.recovery,), self.orders)

    def measured(self, side: int, seed: int) -> float:
        """The measure of the run with the first or the second of each pair, on the load of ``seed``."""
        rng = random.Random(seed)
        factors = [rng.uniform(1 - self.spread, 1 + self.spread) for _ in range(2 * self.requests)]
        load = [
            Item(0.0, prompt := round(self.prompt * of_prompt), round(self.output * of_output), (0,) * prompt)
            for of_prompt, of_output in zip(factors[::2], factors[1::2], strict=True)
        ]
        case = {"blocks": self.blocks, "scheduler": self.scheduler, "recovery": self.recovery, "seed": seed}
        case |= {"victim": self.victims[side], "order": self.orders[side], "watermark": self.watermarks[side]}
        return run_with(load, COSTS, case)[self.measure]


@dataclass(frozen=True)
class ProposalsConfig:
    """``seeds`` loads of each of ``trials``, from ``first_seed`` on."""

    first_seed: int
    seeds: int
    trials: tuple[Trial, ...]


def proposals(profile: Profile) -> Outcome:
    """Rows {source, case, measure, stated, published_pct, seeds, base, changed}, the last two lists by seed."""
    config, rows = profile.section("proposals", ProposalsConfig), []
    seeds = [profile.seed + config.first_seed + number for number in range(config.seeds)]
    for trial in track(config.trials, desc="proposals"):
        base, changed = ([trial.measured(side, seed) for seed in seeds] for side in range(2))
        row = {name: getattr(trial, name) for name in ("source", "case", "measure", "stated", "published_pct")}
        rows.append(row | {"seeds": seeds, "base": base, "changed": changed})
    return Outcome(rows, provenance={"source": "loads of proposals on the costs of CPS Table 2", "kind": "simulated"})


def proposals_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """The share by which each proposal lowers its measure, published and simulated, and the share of them that do."""
    summary = Summary()
    for row in rows:
        labels = {"variant": row["source"], "case": row["case"]}
        summary.add("lowered_pct", {"value": row["published_pct"], "unit": "%"}, **labels, source="published")
        lowered = share_below(row["changed"], row["base"]).summary("%", 100)
        summary.add("lowered_pct", lowered, **labels, source="simulated")
    ups = [entry["value"] > 0 for entry in summary.all("lowered_pct", source="simulated")]
    summary.add("same_direction_pct", {"value": 100 * sum(ups) / len(ups), "n": len(ups), "unit": "% of the proposals"})
    return summary
