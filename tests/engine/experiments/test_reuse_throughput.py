"""Throughput within an objective, from rows alone; and the engine on costs that leave no doubt."""

from __future__ import annotations

import pytest

from firsttoken_studies.nb36_throughput_under_load.study import (
    FULL,
    PARTIAL,
    REUSE,
    DecodeCosts,
    ReuseMethod,
    ServingConfig,
    TimedCosts,
    _served,
    most_qps,
    reuse_throughput_summary,
)

CONFIG = ServingConfig(2, 40, 8, 1, (0.2, 0.8, 1.4), 1.0, (1,), 1)
DECODE = DecodeCosts(1e-3, 0.0, 0.0)


def way(method: str, layers: int, seconds: float, *runs: str) -> ReuseMethod:
    return ReuseMethod(method, layers, runs, TimedCosts((100, 200), (seconds, 2 * seconds), DECODE))


WAYS = (way(FULL, 10, 1.0), way(PARTIAL, 4, 0.4, "a", "b"), way(REUSE, 0, 0.1))


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return [_served(each, CONFIG, [100, 200], 0, load) for each in WAYS for load in CONFIG.loads]


def test_a_rate_is_read_between_two() -> None:
    seen = [{"qps": qps, "ttft_mean_ms": ms, "alone_ttft_ms": 50.0} for qps, ms in ((2.0, 100.0), (4.0, 300.0))]
    assert most_qps(seen, "ttft", 200.0) == pytest.approx(3.0)
    assert most_qps(seen, "ttft", 75.0) == pytest.approx(1.0)
    assert most_qps(seen, "ttft", 999.0) == 4.0  # no more than was tried
    assert most_qps(seen, "ttft", 40.0) == 0.0  # nobody is that early


def test_load_delays_and_alone_is_the_least(rows) -> None:
    for each in WAYS:
        mine = [row for row in rows if row["method"] == each.method]
        assert [row["load"] for row in mine] == sorted(row["load"] for row in mine)
        assert mine[0]["alone_ttft_ms"] <= mine[0]["ttft_mean_ms"] < mine[1]["ttft_mean_ms"] < mine[2]["ttft_mean_ms"]
        assert mine[0]["alone_e2e_ms"] <= mine[0]["e2e_mean_ms"] + 1e-6


def test_every_way_meets_the_same_prompts_in_the_same_order(rows) -> None:
    lightest = [row for row in rows if row["load"] == 0.2]
    full, partial, _ = (row["alone_ttft_ms"] for row in lightest)
    assert partial == pytest.approx(0.4 * full)
    assert lightest[1]["qps"] == pytest.approx(2.5 * lightest[0]["qps"])


def test_the_summary_is_of_the_pairs_and_against_full_prefill(rows) -> None:
    found = reuse_throughput_summary(rows, {})
    assert found.value("objective_ms", metric="ttft", objective=2) == pytest.approx(2 * rows[0]["alone_ttft_ms"])

    def gain(objective: float, **where: object) -> float:
        return found.value("capacity_x", **where, metric="ttft", objective=objective, than=FULL)

    mean = {"method": PARTIAL, "across": "mean"}
    assert 2 < gain(2, method=PARTIAL, layers=4) == gain(2, **mean)
    assert gain(2, method=REUSE, layers=0) > gain(2, **mean)
    assert gain(1.5, **mean) >= gain(5, **mean)
