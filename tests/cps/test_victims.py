"""Who gives way: each rule is asked and answers alike for the same draw, and what its summary holds."""

from __future__ import annotations

import pytest

from firsttoken.engine.workload_items import Item
from firsttoken.simulation.costs.published import PublishedCosts
from firsttoken_studies.nb24_who_is_preempted.study import (
    FREED,
    RULES,
    SCHEDULERS,
    run_with,
    victim_of,
    victims_summary,
)

COSTS = PublishedCosts(decode_s=0.03)
ITEMS = [Item(0.0, tokens, 24, (0,) * tokens) for tokens in (60, 44, 28, 12)]


@pytest.mark.parametrize("victim", RULES)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_rule_serves_all_and_says_the_same_twice(victim: str, scheduler: str) -> None:
    case = {"blocks": 11, "scheduler": scheduler, "recovery": "swap", "victim": victim, "seed": 3}
    found = run_with(ITEMS, COSTS, case)
    assert found == run_with(ITEMS, COSTS, case)
    assert found["preemptions"] > 0 and found["longest_gap_s"] > 0.03


def test_the_rule_that_knows_costs_takes_most_blocks_a_second() -> None:
    class Running:
        def __init__(self, order: int, cached: int, blocks: int) -> None:
            self.order, self.cached, self.blocks = order, cached, [0] * blocks

    few, many = Running(0, 512, 10), Running(1, 512, 30)
    choose = victim_of(FREED, COSTS, 0)
    assert not isinstance(choose, str) and choose([few, many]) is many


def test_the_summary_holds_each_rule_against_the_last_that_came() -> None:
    rows = []
    for recovery, victim, tail in (
        ("swap", "last_arrived", 100.0),
        ("cross_point", "last_arrived", 90.0),
        ("swap", "first_arrived", 60.0),
    ):
        at = {"blocks": 512, "scheduler": "prefill_first", "recovery": recovery, "victim": victim, "seeds": [*range(5)]}
        tails = [tail + seed for seed in range(5)]
        rows.append(at | {"p99_tpot_ms": tails, "longest_gap_s": [1.0] * 5, "preemptions": [3] * 5})
    summary = victims_summary(rows, {})
    where = {"case": "512 blocks", "scheduler": "prefill_first", "policy": "swap", "variant": "first_arrived"}
    assert summary.value("tpot_p99_below_pct", **where, than="last_arrived swap") == pytest.approx(100 * (1 - 62 / 102))
    assert summary.value("tpot_p99_below_pct", **where, than="last_arrived cross_point") == pytest.approx(
        100 * (1 - 62 / 92)
    )
