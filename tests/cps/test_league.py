"""Who gives way, how it comes back and in which order: every cell serves all, and the summary holds it to CPS."""

from __future__ import annotations

from itertools import product

import pytest

from firsttoken.engine.preemption.resume import RESUME_ORDERS
from firsttoken.engine.workload_items import Item
from firsttoken.simulation.costs.published import PublishedCosts
from firsttoken.study.errors import ProfileError
from firsttoken_studies.nb24_who_is_preempted.figures import LABELS
from firsttoken_studies.nb24_who_is_preempted.league import (
    MEASURES,
    RECOVERIES,
    LeagueConfig,
    league_summary,
    run_of,
)
from firsttoken_studies.nb24_who_is_preempted.study import RULES

COSTS = PublishedCosts(decode_s=0.03)
ITEMS = [Item(0.0, tokens, 24, (0,) * tokens) for tokens in (60, 44, 28, 12, 70)]


def config(**fields) -> LeagueConfig:
    given = {"first_seed": 0, "seeds": 2, "short": 1, "long": 1, "blocks": 11, "rate_per_s": 0.0}
    rules = {"victims": ("last_arrived",), "recoveries": ("swap",), "orders": ("in_order",)}
    bounds = {"aged_s": 1.0, "ttft_s": 10.0, "gap_s": 1.0, "starved_s": 30.0}
    return LeagueConfig(**(given | rules | bounds | fields))


@pytest.mark.parametrize("victim", RULES)
def test_every_cell_serves_all_and_says_the_same_twice(victim: str) -> None:
    for recovery, order in product(RECOVERIES, RESUME_ORDERS):
        seen = [run_of(ITEMS, COSTS, config(), victim, recovery, order, seed=3) for _ in range(2)]
        assert seen[0] == seen[1] and seen[0]["preemptions"] > 0, (recovery, order)
        assert set(seen[0]) == set(MEASURES) and seen[0]["starved"] == 0


def test_every_rule_has_a_label() -> None:
    assert set(LABELS) == set(RULES)


def test_what_is_written_through_or_computed_again_costs_what_it_should() -> None:
    """Swap computes nothing again; from both ends some; recompute most."""
    again = {
        way: run_of(ITEMS, COSTS, config(), "last_arrived", way, "in_order", seed=0)["computed_again_pct"]
        for way in ("swap", "write_through", "recompute")
    }
    assert again["swap"] == again["write_through"] == 0 < again["recompute"]


def test_a_request_is_in_time_or_starved_by_the_bounds() -> None:
    late = run_of(ITEMS, COSTS, config(ttft_s=1e-9, starved_s=1e-9), "last_arrived", "swap", "in_order", seed=0)
    assert (late["in_time_pct"], late["starved"]) == (0, len(ITEMS))
    soon = run_of(ITEMS, COSTS, config(ttft_s=1e9, gap_s=1e9), "last_arrived", "swap", "in_order", seed=0)
    assert (soon["in_time_pct"], soon["starved"]) == (100, 0)


def test_the_summary_holds_each_cell_to_cps_and_to_vllm() -> None:
    cells = {"last_arrived cross_point": 100.0, "first_arrived swap": 80.0, "last_admitted recompute": 120.0}
    rows = []
    for name, level in cells.items():
        victim, recovery = name.split()
        columns = {column: [level, level + 10] for column in MEASURES}
        rows.append({"victim": victim, "recovery": recovery, "order": "in_order", "seeds": [0, 1]} | columns)
    summary = league_summary(rows, {})
    where = {"variant": "first_arrived", "policy": "swap", "case": "in_order"}
    below = summary.value("tpot_p99_below_pct", **where, than="last_arrived cross_point in_order")
    assert below == pytest.approx(100 * (1 - 85 / 105))
    fewer = summary.value("computed_again_below_pct", **where, than="last_admitted recompute in_order")
    assert fewer == pytest.approx(100 * (1 - 85 / 125))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"victims": ("oldest",)}, "league: no victim 'oldest'"),
        ({"recoveries": ("copy",)}, "league: no recovery 'copy'"),
        ({"orders": ("fifo",)}, "league: no resume order 'fifo'"),
        ({"rate_per_s": -1.0}, "rate_per_s not below 0"),
    ],
)
def test_names_and_numbers_that_are_wrong_are_one_line(fields, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        config(**fields)
