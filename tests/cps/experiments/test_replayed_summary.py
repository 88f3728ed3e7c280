"""The summary of the replayed policies: what the row of a bound changes in it."""

from __future__ import annotations

from firsttoken_studies.nb22_cross_point_scheduler.study import BOUND, COMPARED, OTHERS, PAPER_TPOT_MS, replayed_summary

METRICS = ("mean_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "recovery_s", "preemptions", "makespan_s")


def test_the_bounds_of_the_workloads_are_a_mean_and_no_policy_s() -> None:
    runs = [
        {"seed": seed, "policy": policy, "costs": costs, "decode_ms": price} | dict.fromkeys(METRICS, price + seed)
        for seed in (0, 1)
        for costs, price in (("published", 30.0), ("published", 5.0), ("coalesced", 30.0))
        for policy in (*COMPARED, *OTHERS)
    ]
    bound = {"policy": BOUND, "costs": BOUND, "decode_ms": PAPER_TPOT_MS}
    bounds = [bound | {"seed": 0, "mean_ttft_ms": 10.0}, bound | {"seed": 1, "mean_ttft_ms": 20.0}]
    found = replayed_summary(bounds + runs, {})
    least = {"measure": "ttft_mean_ms", "where": {"policy": BOUND}}
    assert found.all("ttft_mean_ms", policy=BOUND) == [
        least | {"value": 15.0, "low": 10.0, "high": 20.0, "range": True, "n": 2, "unit": "ms"}
    ]
    assert found.value("decode_ms") == 30.0
    for measure in ("ttft_mean_ms", "tpot_mean_ms"):
        assert found.value(measure, policy="swap", costs="published") == 30.5
