"""What the choice would do on links that were not run, from costs alone."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from firsttoken.droidspeak.group_selection import GroupCosts, GroupLoss
from firsttoken.droidspeak.layer_group import Group
from firsttoken.study import paths
from firsttoken_studies.nb35_a_group_for_this_link import adaptive_group
from firsttoken_studies.nb35_a_group_for_this_link.adaptive_group import Plan, scaled_rows

COSTS = GroupCosts(
    10, layer_s=0.01, layer_token_s=0.0, first_token_s=0.005, kv_token_bytes=1000, e_cache_token_bytes=1500
)
PLAN = Plan(
    COSTS, (GroupLoss(Group(3, 6), 0.04), GroupLoss(Group(0, 8), 0.01), GroupLoss(Group(0, 10), 0.0)), tokens=1000
)


def test_a_link_is_scaled_by_what_both_machines_compute() -> None:
    """A link that brings keys and values as fast as they are computed does so here, too."""
    assert PLAN.prefill_s == pytest.approx(0.1)
    paper_gbit = 40e3 * 2 * 32 * 8 * 128 * 2 / 4 * 8 / 1e9
    assert PLAN.here(paper_gbit) == pytest.approx(10 * 1000 * 1000 / 0.1 * 8 / 1e9)


def test_a_slow_link_recomputes_more_and_a_busy_processor_less() -> None:
    slow, fast = (PLAN.choice(rate)[0] for rate in (1e6, 1e12))
    assert (slow, fast) == (Group(0, 10), Group(3, 6))
    middle = [len(PLAN.choice(7e7, load=load)[0]) for load in (1.0, 100.0)]
    assert middle[1] == 3 <= middle[0]
    assert PLAN.choice(1e12)[1] < PLAN.choice(1e12, latency_s=0.05)[1] <= 1


def test_the_table_has_a_line_for_every_link_of_the_papers() -> None:
    rows = list(scaled_rows(PLAN))
    assert [row["Gbit/s in the paper"] for row in rows] == [4, 16, 50, 64, 100, 200, 300, 400]
    assert all(a["as much here"] < b["as much here"] for a, b in pairwise(rows))
    alone, away = ([row[name] for row in rows] for name in ("TTFT / full prefill's", "the same 2 ms away"))
    assert all(near <= far for near, far in zip(alone, away, strict=True))
    assert rows[-1]["group"] == "3-5 (3 of 10)"


def test_costs_that_were_recorded_before_a_name_changed_are_read_and_written_as_they_are() -> None:
    (result,) = (paths.DATA / "results").glob("*/full/adaptive_group.json")
    recorded = json.loads(result.read_text(encoding="utf-8"))["provenance"]["costs"]
    costs = adaptive_group._read(recorded)
    assert costs.e_cache_token_bytes == recorded["edge_token_bytes"]
    assert adaptive_group._recorded(costs) == recorded
