"""Who gives way, how it comes back and in which order: every case serves all, and is held to CPS and to vLLM."""

from __future__ import annotations

from itertools import product

import pytest

from firsttoken.engine.preemption.resume import RESUME_ORDERS
from firsttoken.engine.workload_items import Item
from firsttoken.simulation.costs.published import PublishedCosts
from firsttoken.study.errors import ProfileError
from firsttoken_studies.nb24_who_is_preempted import study
from firsttoken_studies.nb24_who_is_preempted.figures import LABELS
from firsttoken_studies.nb24_who_is_preempted.study import MEASURES, RECOVERIES, RULES, VictimsConfig, run_with

COSTS = PublishedCosts(decode_s=0.03)
ITEMS = [Item(0.0, tokens, 24, (0,) * tokens) for tokens in (60, 44, 28, 12, 70)]


def run(victim: str, recovery: str, order: str = "in_order") -> dict[str, float]:
    case = {"blocks": 11, "scheduler": "prefill_first", "victim": victim, "recovery": recovery, "order": order}
    return run_with(ITEMS, COSTS, case | {"seed": 3})


@pytest.mark.parametrize("victim", RULES)
def test_every_case_serves_all_and_says_the_same_twice(victim: str) -> None:
    for recovery, order in product(RECOVERIES, RESUME_ORDERS):
        found = run(victim, recovery, order)
        assert found == run(victim, recovery, order) and found["preemptions"] > 0, (recovery, order)
        assert set(found) == set(MEASURES) and found["starved"] == 0


def test_every_rule_has_a_label() -> None:
    assert set(LABELS) == set(RULES)


def test_what_comes_from_the_host_is_not_computed_again() -> None:
    again = {way: run("last_arrived", way)["computed_again_pct"] for way in ("swap", "recompute")}
    assert again["swap"] == 0 < again["recompute"]


def test_a_request_is_in_time_or_starved_by_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "IN_TIME_S", (1e-9, 1.0))
    monkeypatch.setattr(study, "STARVED_S", 1e-9)
    late = run("last_arrived", "swap")
    assert (late["in_time_pct"], late["starved"]) == (0, len(ITEMS))
    monkeypatch.setattr(study, "IN_TIME_S", (1e9, 1e9))
    assert run("last_arrived", "swap")["in_time_pct"] == 100


def test_the_summary_holds_each_case_to_cps_and_to_vllm() -> None:
    rows = []
    for victim, recovery, order, level in (
        ("last_arrived", "cross_point", "in_order", 100.0),
        ("first_arrived", "swap", "any_that_fits", 80.0),
        ("last_admitted", "recompute", "in_order", 120.0),
    ):
        case = {"blocks": 512, "scheduler": "prefill_first", "victim": victim, "recovery": recovery, "order": order}
        rows.append(case | {"seeds": [0, 1]} | {column: [level, level + 10] for column in MEASURES})
    summary = study.victims_summary(rows, {})
    where = {"variant": "first_arrived", "policy": "swap", "case": "512 blocks, any_that_fits"}
    where["scheduler"] = "prefill_first"
    assert summary.value("tpot_p99_below_pct", **where, than=study.CPS) == pytest.approx(100 * (1 - 85 / 105))
    assert summary.value("computed_again_below_pct", **where, than=study.VLLM) == pytest.approx(100 * (1 - 85 / 125))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"victims": ("oldest",)}, "victims: no victim 'oldest'"),
        ({"recoveries": ("copy",)}, "victims: no recovery 'copy'"),
        ({"orders": ("fifo",)}, "victims: no resume order 'fifo'"),
        ({"rate_per_s": -1.0}, "rate_per_s not below 0"),
    ],
)
def test_names_and_numbers_that_are_wrong_are_one_line(fields, message: str) -> None:
    numbers = {"first_seed": 0, "seeds": 2, "short": 1, "long": 1, "rate_per_s": 0.0, "pools": (11,)}
    rules = {"victims": ("last_arrived",), "recoveries": ("swap",), "orders": ("in_order",)}
    with pytest.raises(ProfileError, match=message):
        VictimsConfig(**(numbers | rules | {"schedulers": ("prefill_first",)} | fields))
